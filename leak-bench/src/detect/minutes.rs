//! Means over blocks of so many minutes, for detectors that look at these.

use crate::{
    number::{real, wide},
    series::Point,
};

/// Gathers samples into blocks.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    length: u64,
    block: u64,
    sum: f64,
    samples: usize,
}

impl Blocks {
    pub(super) fn of_minutes(minutes: u64) -> Self {
        Self { length: minutes * 60_000, block: 0, sum: 0.0, samples: 0 }
    }

    /// The mean of the block before, where this sample is the first of another. Blocks without a
    /// number are left out.
    pub(super) fn push(&mut self, point: &Point) -> Option<f64> {
        let block = point.at / self.length;
        let mean = (block != self.block && self.samples > 0).then(|| self.sum / real(self.samples));
        if block != self.block {
            (self.block, self.sum, self.samples) = (block, 0.0, 0);
        }
        if let Some(bytes) = point.bytes {
            self.sum += wide(bytes);
            self.samples += 1;
        }
        mean
    }
}
