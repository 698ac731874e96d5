//! How fast memory rises: the slope of use over the last seconds.

use std::collections::VecDeque;

use highwater_crds::Rise;

use crate::{ledger::Share, time::Millis};

/// The slope is that of so many milliseconds.
pub const WINDOW: u64 = 10_000;
/// Over less than so many milliseconds nothing is said: two samples would make a rate of any step.
pub const LEAST: u64 = 3_000;
/// Of samples that come closer together than so many milliseconds, the first is kept: whatever the
/// pace of sampling, a ring holds about a hundred.
const SPACING: u64 = 100;
/// The share in percent whose being reached is foreseen.
pub const FULL_PERCENT: i32 = 95;
/// A rise that entered a level keeps it while memory is no further below `abovePercent` than this,
const MARGIN_PERCENT: i32 = 3;
/// and while it would be full within so many times the lead.
const KEPT_LEADS: u64 = 2;

/// Bytes a second; negative where memory falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(pub i64);

/// The last samples of one device, pool or pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    samples: VecDeque<(Millis, u64)>,
}

impl Ring {
    /// Adds what was used at a sample. A missing number is not a sample; a clock that went back
    /// starts anew.
    pub fn push(&mut self, used: Option<u64>, now: Millis) {
        let Some(used) = used else { return };
        if self.samples.back().is_some_and(|(last, _)| *last > now) {
            self.samples.clear();
        }
        while self.samples.front().is_some_and(|(at, _)| now.since(*at) > WINDOW) {
            self.samples.pop_front();
        }
        if self.samples.back().is_none_or(|(last, _)| now.since(*last) >= SPACING) {
            self.samples.push_back((now, used));
        }
    }

    /// Forgets everything: what is measured has changed.
    pub fn clear(&mut self) {
        self.samples.clear();
    }

    /// The rate of the window: the slope of the line with the least squares through the samples.
    /// The largest step between two of them is taken out first, since one step, such as a model
    /// being loaded, is no rate. `None` while the samples span less than [`LEAST`].
    pub fn rate(&self) -> Option<Rate> {
        let ((first, base), (last, _)) = (*self.samples.front()?, *self.samples.back()?);
        if last.since(first) < LEAST {
            return None;
        }
        let steps = self.samples.iter().zip(self.samples.iter().skip(1));
        let (step_at, step) = steps
            .map(|((_, before), (at, after))| (*at, after.saturating_sub(*before)))
            .max_by_key(|(_, step)| *step)?;
        let (mut n, mut times, mut bytes, mut squares, mut products) = (0i128, 0i128, 0i128, 0i128, 0i128);
        for (at, used) in &self.samples {
            let t = i128::from(at.since(first));
            let taken_out = if *at >= step_at { i128::from(step) } else { 0 };
            let u = i128::from(*used) - i128::from(base) - taken_out;
            n += 1;
            times += t;
            bytes += u;
            squares += t * t;
            products += t * u;
        }
        let slope = ((n * products - times * bytes) * 1000).checked_div(n * squares - times * times)?;
        Some(Rate(i64::try_from(slope).unwrap_or(if slope < 0 { i64::MIN } else { i64::MAX })))
    }
}

/// Milliseconds until [`FULL_PERCENT`] is reached at this rate; 0 where it is reached already,
/// `None` where it never is.
pub fn until_full(share: Share, rate: Rate) -> Option<u64> {
    if share.at_least(FULL_PERCENT) {
        return Some(0);
    }
    let rate = u128::try_from(rate.0).ok().filter(|rate| *rate > 0)?;
    let full = u128::from(share.of) * 95 / 100;
    let left = full.saturating_sub(share.used.into());
    Some(u64::try_from(left * 1000 / rate).unwrap_or(u64::MAX))
}

/// Whether a level is to be entered early: memory is at or above the rule's floor, and would be
/// full within its lead.
pub fn enters(rule: &Rise, share: Share, rate: Option<Rate>) -> bool {
    share.at_least(rule.above_percent) && full_within(rule, 1, share, rate)
}

/// Whether a level that was entered early is kept for it: with more room than [`enters`], so that
/// a rate that wavers does not make the level do so.
pub fn keeps(rule: &Rise, share: Share, rate: Option<Rate>) -> bool {
    share.at_least(rule.above_percent.saturating_sub(MARGIN_PERCENT))
        && full_within(rule, KEPT_LEADS, share, rate)
}

fn full_within(rule: &Rise, leads: u64, share: Share, rate: Option<Rate>) -> bool {
    let lead = u64::try_from(rule.lead_seconds).unwrap_or(0).saturating_mul(1000).saturating_mul(leads);
    rate.and_then(|rate| until_full(share, rate)).is_some_and(|left| left <= lead)
}

#[cfg(test)]
mod tests {
    use highwater_crds::RiseLevel;
    use proptest::prelude::*;

    use super::*;

    const GI: u64 = 1 << 30;

    fn ring(samples: impl IntoIterator<Item = (u64, u64)>) -> Ring {
        let mut ring = Ring::default();
        for (at, used) in samples {
            ring.push(Some(used), Millis(at));
        }
        ring
    }

    fn rule() -> Rise {
        Rise { level: RiseLevel::Critical, lead_seconds: 60, above_percent: 60 }
    }

    #[test]
    fn a_steady_rise_has_its_rate() {
        let rate = ring((0..=100).map(|i| (i * 100, i * GI / 10))).rate().unwrap().0;
        let real = i64::try_from(GI).unwrap();
        assert!((rate - real).abs() < real / 50, "{rate}");
    }

    #[test]
    fn a_single_step_is_no_rate() {
        let step = |at: u64| ring((0..=100).map(|i| (i * 100, if i >= at { 40 * GI } else { GI })));
        for at in [1, 20, 50, 99, 100] {
            assert_eq!(step(at).rate(), Some(Rate(0)), "{at}");
        }
    }

    #[test]
    fn too_little_says_nothing() {
        assert_eq!(ring([]).rate(), None);
        assert_eq!(ring((0..29).map(|i| (i * 100, i * GI))).rate(), None);
        assert!(ring((0..=30).map(|i| (i * 100, i * GI))).rate().is_some());
    }

    #[test]
    fn what_is_older_than_the_window_is_forgotten() {
        let falls = (0..200).map(|i| (i * 100, if i < 100 { i * GI } else { 100 * GI }));
        assert_eq!(ring(falls).rate(), Some(Rate(0)));
    }

    #[test]
    fn a_clock_that_went_back_starts_anew() {
        let mut ring = ring((0..=100).map(|i| (100_000 + i * 100, i * GI)));
        ring.push(Some(GI), Millis(5));
        assert_eq!(ring.rate(), None);
    }

    #[test]
    fn a_fast_rise_enters_above_its_floor_only() {
        let at = |percent| Share { used: percent * GI, of: 100 * GI };
        let rate = |gib: i64| Some(Rate(gib << 30));
        assert!(enters(&rule(), at(65), rate(1)), "30 s are left");
        assert!(!enters(&rule(), at(30), rate(2)), "below the floor");
        assert!(!enters(&rule(), at(65), Some(Rate(1 << 28))), "120 s are left");
        assert!(keeps(&rule(), at(65), Some(Rate(1 << 28))), "which keeps a level");
        assert!(keeps(&rule(), at(58), rate(1)) && !enters(&rule(), at(58), rate(1)));
        for rate in [None, Some(Rate(0)), Some(Rate(i64::MIN))] {
            assert!(!keeps(&rule(), at(94), rate));
        }
        assert!(enters(&rule(), at(95), Some(Rate(0))), "it is full");
    }

    proptest! {
        #[test]
        fn no_samples_are_too_wild(samples in prop::collection::vec((0u64..20_000, prop::option::of(any::<u64>())), 0..300)) {
            let mut ring = Ring::default();
            for (at, used) in samples {
                ring.push(used, Millis(at));
                prop_assert!(ring.samples.len() <= 101);
                if let Some(rate) = ring.rate() {
                    let _ = until_full(Share { used: used.unwrap_or(0), of: u64::MAX }, rate);
                }
            }
        }

        #[test]
        fn memory_that_never_rises_has_no_rate_upwards(mut used in prop::collection::vec(any::<u64>(), 40..120)) {
            used.sort_unstable_by(|a, b| b.cmp(a));
            let ring = ring(used.into_iter().enumerate().map(|(i, u)| (i as u64 * 100, u)));
            prop_assert!(ring.rate().is_some_and(|rate| rate <= Rate(0)));
        }
    }
}
