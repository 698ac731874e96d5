//! The work that a pod gets: requests or tokens per second around a mean of one.

use std::f64::consts::TAU;

use crate::{number::DAY, random::Random};

/// How fast the noise of the load forgets, in seconds.
const MEMORY: f64 = 300.0;

/// A load. Its shape belongs to the workload, its noise to the life.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// How much of the load swings with the day, 0 to 1.
    swing: f64,
    /// How narrow the peak of the day is.
    sharpness: i32,
    /// The time of day at which the pod began, in seconds.
    phase: f64,
    /// Deviation of the noise.
    noise: f64,
    /// Quiet hours a day, from this share of the day on.
    idle: Option<(f64, f64)>,
    state: f64,
}

impl Load {
    /// The load of a workload: `of_workload` gives its shape, `of_life` when this life began.
    pub(crate) fn new(of_workload: &mut Random, of_life: &mut Random) -> Self {
        let swing = if of_workload.chance(0.6) { of_workload.uniform(0.3, 0.95) } else { 0.0 };
        let sharpness = of_workload.pick(&[1, 2, 4]).unwrap_or(1);
        let noise = of_workload.uniform(0.05, 0.4);
        let idle = of_workload.chance(0.15).then(|| {
            let from = of_workload.unit() * 0.8;
            (from, from + of_workload.uniform(0.05, 0.2))
        });
        Self { swing, sharpness, phase: of_life.uniform(0.0, DAY), noise, idle, state: 0.0 }
    }

    /// One that always swings with the day.
    pub(crate) fn daily(of_workload: &mut Random, of_life: &mut Random) -> Self {
        let swing = of_workload.uniform(0.5, 0.98);
        Self { swing, ..Self::new(of_workload, of_life) }
    }

    /// The load `age` seconds into the life, after a step of `dt` seconds.
    pub(crate) fn step(&mut self, age: f64, dt: f64, random: &mut Random) -> f64 {
        let of_day = ((age + self.phase) / DAY).fract();
        if self.idle.is_some_and(|(from, to)| of_day >= from && of_day < to) {
            return 0.0;
        }
        let kept = (-dt / MEMORY).exp();
        self.state = kept * self.state + (1.0 - kept * kept).sqrt() * random.normal();
        let peak = f64::midpoint(1.0, (TAU * of_day).cos()).powi(self.sharpness);
        // The mean of the peak over a day for the three values of sharpness.
        let mean = match self.sharpness {
            1 => 0.5,
            2 => 0.375,
            _ => 0.273,
        };
        ((1.0 - self.swing) + self.swing * peak / mean) * (self.noise * self.state).exp()
    }
}
