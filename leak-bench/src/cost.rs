//! What the detector costs in time and memory.

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use highwater_policy::{
    leak::{Detector, Sample, Settings},
    time::Millis,
};

use crate::{
    number::real,
    synthetic::{Workload, shapes::FAMILIES},
};

/// Costs of a pod on a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// Microseconds a sample, amortised.
    pub microseconds_a_sample: f64,
    /// The longest that a sample took, in milliseconds.
    pub longest_milliseconds: f64,
    /// Bytes of a detector without what it points to, and of its state when written.
    pub bytes: usize,
    /// Bytes of its state, written after a week.
    pub state: usize,
}

fn samples() -> Vec<Vec<Sample>> {
    FAMILIES
        .into_iter()
        .map(|family| {
            // Number 0 is a week of a sample every 10 s.
            let workload = Workload::new("cost", family, 0, (0.45, 0.97));
            let series = workload.life(0, workload.length());
            let sample = |p: &crate::series::Point| Sample {
                at: Millis(p.at),
                bytes: p.bytes,
                capacity: Some(series.capacity),
                work: p.work,
                ..Sample::default()
            };
            series.points.iter().map(sample).collect()
        })
        .collect()
}

/// Measures over a week of each family. The longest sample is that of the best of three runs at
/// each place, so that what else the machine does is not counted.
pub(crate) fn measure(settings: &Arc<Settings>) -> Cost {
    let weeks = samples();
    let count: usize = weeks.iter().map(Vec::len).sum();
    let mut whole = Duration::MAX;
    for _ in 0..3 {
        let begin = Instant::now();
        for week in &weeks {
            let mut detector = Detector::new(Arc::clone(settings));
            for sample in week {
                black_box(detector.push(sample));
            }
        }
        whole = whole.min(begin.elapsed());
    }
    let mut longest = Duration::ZERO;
    let mut state = 0;
    for week in &weeks {
        let mut best = vec![Duration::MAX; week.len()];
        for _ in 0..3 {
            let mut detector = Detector::new(Arc::clone(settings));
            for (sample, best) in week.iter().zip(&mut best) {
                let begin = Instant::now();
                black_box(detector.push(sample));
                *best = (*best).min(begin.elapsed());
            }
            state = state.max(detector.state().to_bytes().len());
        }
        longest = longest.max(best.into_iter().max().unwrap_or_default());
    }
    Cost {
        microseconds_a_sample: whole.as_secs_f64() * 1e6 / real(count),
        longest_milliseconds: longest.as_secs_f64() * 1000.0,
        bytes: size_of::<Detector>(),
        state,
    }
}
