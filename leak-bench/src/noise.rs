//! How a level wavers when nothing happens.

use crate::{number::MIB, random::Random};

/// The driver counts in pages of this size.
const GRANULE: f64 = 2.0 * MIB;
/// How fast it forgets, in seconds.
const MEMORY: f64 = 240.0;

/// Noise of a pod's memory: autoregressive, on a device in steps of 2 MiB.
#[derive(Clone, Debug)]
pub(crate) struct Noise {
    deviation: f64,
    gpu: bool,
    state: f64,
}

impl Noise {
    /// That of a pod with a capacity in bytes. Device memory of most programs does not waver at
    /// all; host memory always does.
    pub(crate) fn new(gpu: bool, capacity: f64, random: &mut Random) -> Self {
        let share = if gpu {
            if random.chance(0.5) { 0.0 } else { random.log_uniform(0.0002, 0.004) }
        } else {
            random.log_uniform(0.0005, 0.008)
        };
        Self { deviation: share * capacity, gpu, state: 0.0 }
    }

    /// A level in bytes with its noise, after a step of `dt` seconds.
    pub(crate) fn add(&mut self, level: f64, dt: f64, random: &mut Random) -> f64 {
        if self.deviation > 0.0 {
            let kept = (-dt / MEMORY).exp();
            self.state = kept * self.state + (1.0 - kept * kept).sqrt() * random.normal();
        }
        let level = (level + self.deviation * self.state).max(0.0);
        if self.gpu { (level / GRANULE).ceil() * GRANULE } else { level }
    }
}
