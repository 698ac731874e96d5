use std::collections::VecDeque;

use super::{Alarm, Detect, Edge, minutes::Blocks};
use crate::{number::real, series::Point};

/// The line is drawn through so many means of a minute.
const WINDOW: usize = 120;
/// From so many on.
const LEAST: usize = 30;
/// Two numbers of minutes between which it is drawn anew.
const EVERY: usize = 5;
/// How well it must fit.
const FIT: f64 = 0.8;
/// Minutes within which it must reach the capacity.
const HORIZON: f64 = 60.0;

/// A straight line through the last two hours, as linear backward regression and Precog draw it
/// through host memory; reimplemented from their descriptions.
#[derive(Clone, Debug)]
pub(super) struct Linear {
    capacity: f64,
    blocks: Blocks,
    means: VecDeque<f64>,
    seen: usize,
    act: Edge,
    suspect: Edge,
}

impl Linear {
    pub(super) fn new(capacity: f64) -> Self {
        Self {
            capacity,
            blocks: Blocks::of_minutes(1),
            means: VecDeque::with_capacity(WINDOW),
            seen: 0,
            act: Edge::default(),
            suspect: Edge::default(),
        }
    }
}

/// Slope per step, where it stands at the last one, and R² of the least squares.
fn fit(values: &VecDeque<f64>) -> (f64, f64, f64) {
    let n = real(values.len());
    let (middle, mean) = ((n - 1.0) / 2.0, values.iter().sum::<f64>() / n);
    let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
    for (i, y) in values.iter().enumerate() {
        let (x, y) = (real(i) - middle, y - mean);
        xx += x * x;
        xy += x * y;
        yy += y * y;
    }
    let slope = xy / xx;
    (slope, mean + slope * middle, if yy > 0.0 { xy * xy / (xx * yy) } else { 0.0 })
}

impl Detect for Linear {
    fn push(&mut self, point: &Point) -> Option<Alarm> {
        let mean = self.blocks.push(point)?;
        if self.means.len() == WINDOW {
            self.means.pop_front();
        }
        self.means.push_back(mean);
        self.seen += 1;
        if self.means.len() < LEAST || !self.seen.is_multiple_of(EVERY) {
            return None;
        }
        let (slope, level, fit) = fit(&self.means);
        let grows = slope > 0.0 && fit >= FIT && slope * real(self.means.len()) > 0.01 * self.capacity;
        let act = self.act.rises(grows && (self.capacity - level) / slope < HORIZON);
        let suspect = self.suspect.rises(grows);
        if act { Some(Alarm::Act) } else { suspect.then_some(Alarm::Suspect) }
    }
}
