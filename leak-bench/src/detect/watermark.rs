use super::{Alarm, Detect, Edge};
use crate::{number::wide, series::Point};

/// So far below its mark use must fall before it can pass it again, in shares of the capacity.
const CLEAR: f64 = 0.03;

/// A share of the capacity that is passed.
#[derive(Clone, Debug)]
pub(super) struct Watermark {
    mark: f64,
    clear: f64,
    above: bool,
    edge: Edge,
}

impl Watermark {
    pub(super) fn new(capacity: f64, share: f64) -> Self {
        let (mark, clear) = (capacity * share, capacity * (share - CLEAR));
        Self { mark, clear, above: false, edge: Edge::default() }
    }
}

impl Detect for Watermark {
    fn push(&mut self, point: &Point) -> Option<Alarm> {
        let bytes = wide(point.bytes?);
        self.above = bytes >= self.mark || self.above && bytes >= self.clear;
        self.edge.rises(self.above).then_some(Alarm::Act)
    }
}
