//! A recorded or made life of a pod, and what is true of it.

use highwater_policy::{leak::Sample, time::Millis};

/// A sample as the agent would see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    /// Milliseconds since the pod began.
    pub at: u64,
    /// What it holds; `None` where the driver did not say.
    pub bytes: Option<u64>,
    /// Work done since the pod began, in any unit; `None` where there is no signal.
    pub work: Option<f64>,
}

impl Point {
    /// As the detector takes it, in a life that began so many milliseconds after its clock.
    pub(crate) fn sample(&self, begin: u64, capacity: u64) -> Sample {
        Sample {
            at: Millis(begin + self.at),
            bytes: self.bytes,
            capacity: Some(capacity),
            work: self.work,
            ..Sample::default()
        }
    }
}

/// What is true of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Truth {
    /// Nothing is wrong: every act is false.
    Benign,
    /// It leaks from `onset` and runs out of memory at `exhausted`, both in milliseconds.
    Leak {
        /// When the leak begins.
        onset: u64,
        /// When it runs out: the life ends there.
        exhausted: u64,
    },
    /// Allocator fragmentation: an act shortly before it runs out is right, an earlier one wrong.
    Fragmentation {
        /// When it runs out; `None` where it never does.
        exhausted: Option<u64>,
    },
    /// Nobody found out; counted both ways.
    Unresolved {
        /// When it runs out; `None` where it never does.
        exhausted: Option<u64>,
    },
}

/// A life of a pod on a device, or of its host memory.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// The pod; decides the side.
    pub pod: String,
    /// Family or row, for the report.
    pub family: String,
    /// What it may hold.
    pub capacity: u64,
    /// The plateau that its configuration declares.
    pub declared: Option<u64>,
    /// In order of time.
    pub points: Vec<Point>,
    /// What is true of it.
    pub truth: Truth,
}

impl Series {
    /// How long it is, in days.
    pub(crate) fn days(&self) -> f64 {
        let end = self.points.last().map_or(0, |p| p.at);
        let begin = self.points.first().map_or(0, |p| p.at);
        crate::number::wide(end.saturating_sub(begin)) / 86_400_000.0
    }

    /// The mean time between its samples, in seconds.
    pub(crate) fn cadence(&self) -> f64 {
        self.days() * 86_400.0 / crate::number::real(self.points.len().saturating_sub(1).max(1))
    }
}
