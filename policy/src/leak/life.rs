//! How far this life has come, and from where it came back by itself.

use serde::{Deserialize, Serialize};

use crate::leak::window::Sum;

/// Follows rises that were undone without a restart: a pod that came back from a height once has
/// shown that it can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Returned {
    /// Lowest floor since the last return, in units.
    trough: Option<u32>,
    /// Highest floor since that trough,
    top: u32,
    /// and highest peak.
    peak: u32,
    /// The greatest peak of a rise that was undone, in units.
    from: Option<u32>,
}

impl Returned {
    /// Takes a block. A rise of at least `least` units is undone when half of it is gone.
    pub(super) fn push(&mut self, floor: u32, peak: u32, least: u32) {
        let trough = *self.trough.get_or_insert(floor);
        if floor < trough {
            *self = Self { trough: Some(floor), top: floor, peak: floor, from: self.from };
            return;
        }
        (self.top, self.peak) = (self.top.max(floor), self.peak.max(peak));
        let rise = self.top - trough;
        if rise >= least && self.top.saturating_sub(floor) > rise / 2 {
            self.from = self.from.max(Some(self.peak));
            *self = Self { trough: Some(floor), top: floor, peak: floor, from: self.from };
        }
    }

    /// The greatest peak of a rise that was undone, in units.
    pub(super) fn from(&self) -> Option<u32> {
        self.from
    }
}

/// No counter of work comes so far; sums of what is below stay finite.
const MOST: f64 = 1e18;

/// A counter that may begin anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Counter {
    last: Sum,
    pending: Sum,
}

impl Counter {
    /// Takes its value. What is missing, negative, absurd or no number changes nothing.
    pub(super) fn push(&mut self, value: Option<f64>) {
        let Some(value) = value.filter(|v| (0.0..MOST).contains(v)) else { return };
        if let Some(last) = std::mem::replace(&mut self.last, Sum::of(value)).get() {
            self.pending.add(Some(if value >= last { value - last } else { value }));
        }
    }

    /// What was added since this was last asked.
    pub(super) fn take(&mut self) -> Option<f64> {
        std::mem::take(&mut self.pending).get()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn from(floors: &[u32]) -> Option<u32> {
        let mut returned = Returned::default();
        for floor in floors {
            returned.push(*floor, floor + 5, 10);
        }
        returned.from()
    }

    #[test]
    fn a_rise_that_is_undone_is_remembered() {
        assert_eq!(from(&[100, 150, 200, 190, 149]), Some(205));
        assert_eq!(from(&[100, 150, 200, 190, 150]), None, "half is still there");
        assert_eq!(from(&[100, 200, 100, 300, 100, 200]), Some(305));
        assert_eq!(from(&[100, 105, 100]), None, "too small to matter");
        assert_eq!(from(&[200, 100]), None, "it never rose");
    }

    #[test]
    fn a_counter_that_begins_anew_has_not_gone_back() {
        let mut counter = Counter::default();
        for value in [100.0, 150.0, 20.0, f64::NAN, -5.0, 30.0] {
            counter.push(Some(value));
        }
        assert_eq!(counter.take().map(f64::to_bits), Some(80.0_f64.to_bits()));
        assert_eq!(counter.take(), None);
    }

    proptest! {
        #[test]
        fn what_never_falls_never_returned(mut floors in prop::collection::vec(0u32..1_000_000, 1..100)) {
            floors.sort_unstable();
            prop_assert_eq!(from(&floors), None);
        }
    }
}
