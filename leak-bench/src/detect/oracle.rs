use super::{Alarm, Detect, Edge, end_of};
use crate::series::{Point, Truth};

/// Acts so long before the end, in milliseconds.
const HORIZON: u64 = 3_600_000;

/// Knows when each leak begins and ends: what can be reached at all.
#[derive(Clone, Debug)]
pub(super) struct Oracle {
    from: Option<u64>,
    edge: Edge,
}

impl Oracle {
    pub(super) fn new(truth: Truth) -> Self {
        let from = end_of(truth).map(|(onset, end)| end.saturating_sub(HORIZON).max(onset));
        Self { from, edge: Edge::default() }
    }
}

impl Detect for Oracle {
    fn push(&mut self, point: &Point) -> Option<Alarm> {
        self.edge.rises(self.from.is_some_and(|from| point.at >= from)).then_some(Alarm::Act)
    }
}
