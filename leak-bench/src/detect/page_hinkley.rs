use super::{Alarm, Detect, minutes::Blocks};
use crate::series::Point;

/// Drift that is let pass, as a share of the capacity.
const TOLERANCE: f64 = 0.005;
/// The sum of what is beyond it that alarms, in minutes times shares of the capacity.
const THRESHOLD: f64 = 0.5;

/// The test of Page and Hinkley for a mean that rises.
#[derive(Clone, Debug)]
pub(super) struct PageHinkley {
    capacity: f64,
    blocks: Blocks,
    seen: f64,
    mean: f64,
    sum: f64,
    least: f64,
}

impl PageHinkley {
    pub(super) fn new(capacity: f64) -> Self {
        Self { capacity, blocks: Blocks::of_minutes(1), seen: 0.0, mean: 0.0, sum: 0.0, least: 0.0 }
    }
}

impl Detect for PageHinkley {
    fn push(&mut self, point: &Point) -> Option<Alarm> {
        let value = self.blocks.push(point)? / self.capacity;
        self.seen += 1.0;
        self.mean += (value - self.mean) / self.seen;
        self.sum += value - self.mean - TOLERANCE;
        self.least = self.least.min(self.sum);
        if self.sum - self.least <= THRESHOLD {
            return None;
        }
        *self = Self { blocks: self.blocks.clone(), ..Self::new(self.capacity) };
        Some(Alarm::Act)
    }
}
