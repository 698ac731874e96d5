//! The rule by which a pool grows and shrinks with its use.

use crate::{
    pool::size::{WHOLE, share_of},
    time::Millis,
};

/// When a pool grows or shrinks, and by how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The use of the pool is judged after so many requests for a grant,
    pub every_requests: u32,
    /// or after so many milliseconds, whichever comes first.
    pub every_ms: u64,
    /// Above so many percent in use it grows.
    pub grow_above_percent: u32,
    /// Below so many percent in use it shrinks.
    pub shrink_below_percent: u32,
    /// By so many percent of its size.
    pub by_percent: u32,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            every_requests: 100,
            every_ms: 600_000,
            grow_above_percent: 90,
            shrink_below_percent: 50,
            by_percent: 10,
        }
    }
}

/// What is remembered between two judgements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    since: Option<Millis>,
    requests: u32,
    /// Sum over the requests of the use at each, in parts per million.
    used: u64,
}

/// Bounds of a share, in parts per million.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// It never shrinks below this,
    pub least: u32,
    /// nor grows above this, which wins.
    pub most: u32,
}

impl State {
    /// Counts a request that found so many of the pool's bytes granted.
    pub fn request(&mut self, granted: u64, pool: u64) {
        self.requests = self.requests.saturating_add(1);
        self.used = self.used.saturating_add(share_of(granted, pool).into());
    }

    /// The share of the device after a judgement, if one is due: the mean use at the requests
    /// counts, or the present use where there were none.
    pub fn step(
        &mut self,
        rule: &Rule,
        share: u32,
        bounds: Bounds,
        (granted, pool): (u64, u64),
        now: Millis,
    ) -> u32 {
        let since = *self.since.get_or_insert(now);
        if self.requests < rule.every_requests.max(1) && now.since(since) < rule.every_ms.max(1) {
            return share;
        }
        let mean = self.used.checked_div(self.requests.into());
        let used = mean.unwrap_or_else(|| share_of(granted, pool).into());
        *self = Self { since: Some(now), ..Self::default() };
        let mark = |percent: u32| u64::from(percent) * u64::from(WHOLE / 100);
        let by = u64::from(rule.by_percent.min(100));
        let scaled = |percent: u64| u32::try_from(u64::from(share) * percent / 100).unwrap_or(WHOLE);
        if used > mark(rule.grow_above_percent) {
            scaled(100 + by).min(bounds.most.max(share.min(WHOLE)))
        } else if used < mark(rule.shrink_below_percent) {
            scaled(100 - by).max(bounds.least.min(share))
        } else {
            share
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: Bounds = Bounds { least: 250_000, most: 750_000 };

    fn after(requests: u32, granted: u64, share: u32) -> u32 {
        let mut state = State::default();
        assert_eq!(state.step(&Rule::default(), share, BOUNDS, (granted, 100), Millis(0)), share);
        for _ in 0..requests {
            state.request(granted, 100);
        }
        state.step(&Rule::default(), share, BOUNDS, (granted, 100), Millis(1))
    }

    #[test]
    fn r01_every_hundred_requests_above_90_percent_it_grows_by_a_tenth() {
        assert_eq!(after(99, 95, 500_000), 500_000);
        assert_eq!(after(100, 95, 500_000), 550_000);
        assert_eq!(after(100, 90, 500_000), 500_000, "at 90 it stays");
        assert_eq!(after(100, 95, 700_000), 750_000, "up to its cap");
    }

    #[test]
    fn r01_below_50_percent_it_shrinks_by_a_tenth() {
        assert_eq!(after(100, 49, 500_000), 450_000);
        assert_eq!(after(100, 50, 500_000), 500_000);
        assert_eq!(after(100, 0, 260_000), 250_000, "down to its floor");
    }

    #[test]
    fn ten_minutes_without_requests_are_judged_by_the_present_use() {
        let mut state = State::default();
        let mut at = |minutes: u64, share| {
            state.step(&Rule::default(), share, BOUNDS, (10, 100), Millis(minutes * 60_000))
        };
        assert_eq!(at(0, 500_000), 500_000);
        assert_eq!(at(9, 500_000), 500_000);
        assert_eq!(at(10, 500_000), 450_000);
        assert_eq!(at(19, 450_000), 450_000, "the ten minutes begin anew");
        assert_eq!(at(20, 450_000), 405_000);
    }

    proptest! {
        #[test]
        fn the_share_stays_within_its_bounds(
            steps in prop::collection::vec((0u32..200, 0u64..120, 0u64..700_000), 1..100),
            start in 250_000u32..=750_000,
        ) {
            let (mut state, mut share, mut now) = (State::default(), start, 0);
            for (requests, granted, passed) in steps {
                now += passed;
                for _ in 0..requests {
                    state.request(granted, 100);
                }
                let next = state.step(&Rule::default(), share, BOUNDS, (granted, 100), Millis(now));
                prop_assert!((BOUNDS.least..=BOUNDS.most).contains(&next));
                prop_assert!(u64::from(next) * 100 <= u64::from(share) * 110, "a tenth at a time");
                prop_assert!(u64::from(next) * 100 + 100 >= u64::from(share) * 90);
                share = next;
            }
        }
    }
}
