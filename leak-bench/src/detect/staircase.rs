use highwater_policy::leak::signals;

use super::{Alarm, Detect};
use crate::{number::wide, series::Point};

/// The staircase as specified, on the samples as they come, above a share of the capacity.
#[derive(Clone, Debug)]
pub(super) struct Staircase {
    rule: signals::Staircase,
    above: f64,
}

impl Staircase {
    pub(super) fn new(capacity: f64, share: f64) -> Self {
        Self { rule: signals::Staircase::default(), above: capacity * share }
    }
}

impl Detect for Staircase {
    fn push(&mut self, point: &Point) -> Option<Alarm> {
        let bytes = point.bytes?;
        (self.rule.push(bytes) && wide(bytes) >= self.above).then_some(Alarm::Act)
    }
}
