//! Leaks: memory that grows and will not come back, told apart from caches that fill.
//!
//! Shape alone cannot tell a leak from a warm-up, a cache that fills, daily load or a bounded
//! batch before these stop growing. So there are two decisions. *Suspect*: the floors of blocks
//! rise steadily, are records of this life and do not level off. *Act*: memory may run out
//! within the horizon, several time scales agree, and healthy lives of the workload did not do
//! this. A missing number decides nothing.
//!
//! Pure and streaming: samples go in, findings come out, and what is kept is bounded.

mod alarm;
pub mod capacity;
mod detector;
mod ended;
mod evidence;
mod exposition;
mod finding;
mod jumps;
mod life;
mod load;
mod mode;
mod number;
mod profile;
mod reason;
mod report;
mod rise;
mod rule;
mod scale;
mod settings;
mod shape;
pub mod signals;
mod state;
#[cfg(test)]
mod tests;
mod trend;
mod window;
mod workload;

pub use highwater_crds::{LeakAdvice, LeakClass, LeakMode};

pub(crate) use self::reason::how;
pub use self::{
    detector::Detector,
    ended::{Circumstances, acted, life_end},
    evidence::{Evidence, JumpEvidence, ScaleRecords},
    exposition::Numbers,
    finding::{Finding, FindingKind, Interval, Rule, ScaleEvidence, Signals},
    mode::one_rank,
    profile::{AGES, Life, LifeEnd, Profile},
    report::{as_seconds, recommendation, renewal_due},
    settings::{SCALES, Settings},
    state::{State, StateError},
    workload::Workload,
};
use crate::time::Millis;

/// What is seen of a pod on a device at a moment. `None` is missing, never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// When, on any clock that only goes forward.
    pub at: Millis,
    /// Memory that the pod holds on the device, in bytes.
    pub bytes: Option<u64>,
    /// All that it can come to before an allocation fails, in bytes: the device less what the
    /// driver and others hold, or the pod's limit. Without it nothing is acted on.
    pub capacity: Option<u64>,
    /// Work done so far, as a counter that only grows within a life: requests, tokens or seconds
    /// of a busy device. A counter that falls began anew; what is not finite or negative is
    /// missing.
    pub work: Option<f64>,
    /// Memory of the pod on the host that is not page cache, in bytes.
    pub host_bytes: Option<u64>,
    /// What the framework in the pod says of itself.
    pub framework: Framework,
    /// Replays of CUDA graphs so far, as a counter.
    pub replays: Option<u64>,
}

/// A framework's own numbers, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Framework {
    /// In use by tensors.
    pub allocated: Option<u64>,
    /// Held from the driver, in use or cached.
    pub reserved: Option<u64>,
}
