use std::collections::VecDeque;

use super::{Alarm, Detect, Edge, minutes::Blocks};
use crate::{interval::quantile, number::real, series::Point};

/// Minutes of a block,
const BLOCK: u64 = 10;
/// and blocks of the window.
const WINDOW: usize = 18;
/// The score from which a trend counts.
const SCORE: f64 = 2.6;
/// Minutes within which the slope must reach the capacity.
const HORIZON: f64 = 60.0;

/// The test of Mann and Kendall with the slope of Theil and Sen, on plain means and as if these
/// were independent.
#[derive(Clone, Debug)]
pub(super) struct MannKendall {
    capacity: f64,
    blocks: Blocks,
    means: VecDeque<f64>,
    act: Edge,
    suspect: Edge,
}

impl MannKendall {
    pub(super) fn new(capacity: f64) -> Self {
        Self {
            capacity,
            blocks: Blocks::of_minutes(BLOCK),
            means: VecDeque::with_capacity(WINDOW),
            act: Edge::default(),
            suspect: Edge::default(),
        }
    }
}

/// The score, and the median slope per step.
fn trend(values: &VecDeque<f64>) -> (f64, f64) {
    let mut rises = 0.0;
    let mut slopes = Vec::new();
    for (j, later) in values.iter().enumerate() {
        for (i, earlier) in values.iter().enumerate().take(j) {
            let difference = later - earlier;
            rises += if difference == 0.0 { 0.0 } else { difference.signum() };
            slopes.push(difference / real(j - i));
        }
    }
    let n = real(values.len());
    let deviation = (n * (n - 1.0) * (2.0 * n + 5.0) / 18.0).sqrt();
    let corrected = if rises > 0.0 { rises - 1.0 } else { rises.min(-1.0) + 1.0 };
    (corrected / deviation, quantile(&slopes, 0.5).unwrap_or(0.0))
}

impl Detect for MannKendall {
    fn push(&mut self, point: &Point) -> Option<Alarm> {
        let mean = self.blocks.push(point)?;
        if self.means.len() == WINDOW {
            self.means.pop_front();
        }
        self.means.push_back(mean);
        if self.means.len() < 8 {
            return None;
        }
        let (score, slope) = trend(&self.means);
        let grows = score > SCORE && slope > 0.0;
        let left = (self.capacity - mean) / slope * 10.0;
        let act = self.act.rises(grows && left < HORIZON);
        let suspect = self.suspect.rises(grows);
        if act { Some(Alarm::Act) } else { suspect.then_some(Alarm::Suspect) }
    }
}
