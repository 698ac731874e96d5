use std::collections::VecDeque;

use super::{Alarm, Detect, Edge, minutes::Blocks};
use crate::{number::real, series::Point};

/// Minutes of a step.
const STEP: u64 = 10;
/// Steps that are kept: six hours.
const KEPT: usize = 36;
/// Steps of what it is compared with: the older half of them.
const REFERENCE: usize = 18;
/// Buckets of the capacity.
const BUCKETS: f64 = 50.0;
/// Steps in a row that must be out of the ordinary.
const IN_A_ROW: u32 = 3;

/// Use in buckets, pivoted against the buckets of the hours before, as RESIN pivots a fleet's:
/// alarm where it stays above their mean by three deviations and a bucket, and goes on rising.
/// Reimplemented for one pod from the published description; a fleet is what RESIN is made for.
#[derive(Clone, Debug)]
pub(super) struct Pivot {
    capacity: f64,
    blocks: Blocks,
    kept: VecDeque<f64>,
    high: u32,
    edge: Edge,
}

impl Pivot {
    pub(super) fn new(capacity: f64) -> Self {
        Self {
            capacity,
            blocks: Blocks::of_minutes(STEP),
            kept: VecDeque::with_capacity(KEPT),
            high: 0,
            edge: Edge::default(),
        }
    }
}

impl Detect for Pivot {
    fn push(&mut self, point: &Point) -> Option<Alarm> {
        let bucket = (self.blocks.push(point)? / self.capacity * BUCKETS).floor();
        let reference = || self.kept.iter().take(REFERENCE);
        let n = real(REFERENCE);
        let mean = reference().sum::<f64>() / n;
        let variance = reference().map(|b| (b - mean).powi(2)).sum::<f64>() / n;
        let rising = self.kept.back().is_some_and(|last| bucket >= *last);
        let high =
            self.kept.len() == KEPT && rising && bucket > mean + 3.0 * variance.sqrt() && bucket > mean + 1.0;
        self.high = if high { self.high + 1 } else { 0 };
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(bucket);
        self.edge.rises(self.high >= IN_A_ROW).then_some(Alarm::Act)
    }
}
