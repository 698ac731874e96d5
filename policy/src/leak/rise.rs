//! The rate of rise: a rise of the last minutes that leaves no time for the blocks of the scales.
//!
//! Minutes alone see too much, so its gates are hard. Every minute is at least as high as the one
//! before and all are above whatever this life had before them; it does not slow down, is no more
//! work than before, is far steeper than how the life came to where it is, and even its slow bound
//! runs out within the time that an act takes. A first tooth, a cache that fills and a warm-up fail
//! by the steepness, a day's load by the work or the record.

use serde::{Deserialize, Serialize};

use crate::leak::{
    Interval, Settings,
    number::{count, float, whole},
    window::float_bytes,
};

/// Minutes that are kept: so many must rise.
const MINUTES: usize = 10;
/// Growth of the second half as a share of that of the first below which it slows down.
const GOES_ON: f64 = 0.7;
/// So many times as steep as the way since the life was warm: else it has always risen so.
const STEEPER: f64 = 3.0;
/// Its slow bound must run out within so many times the lead: after that an act is too late.
const WITHIN: f64 = 1.5;
/// A day in milliseconds.
const FAR: f64 = 86_400_000.0;

/// The last buckets of a life; sizes in units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Minutes {
    medians: [u32; MINUTES],
    len: u32,
    /// The greatest median before these.
    before: u32,
    /// The first median after the warm-up.
    first: u32,
    /// Buckets since then.
    age: u32,
    /// The number of the last bucket.
    number: u32,
}

/// A rise of the last minutes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rise {
    /// Bytes an hour.
    pub slope: Interval<f64>,
    /// Until the capacity is reached, in milliseconds.
    pub exhaustion: Interval<u64>,
    /// What it grew, in bytes,
    pub growth: f64,
    /// in so many milliseconds.
    pub over: u64,
    /// Nothing explains it.
    pub alarming: bool,
}

impl Minutes {
    /// Takes the number of a bucket and its median. A bucket that was missed ends a rise.
    pub(super) fn push(&mut self, number: u32, median: u32) {
        if self.age == 0 {
            self.first = median;
        }
        self.age = self.age.saturating_add(1);
        if number != std::mem::replace(&mut self.number, number).saturating_add(1) {
            let kept = usize::try_from(self.len).unwrap_or(MINUTES);
            let most = self.medians.iter().rev().take(kept).max().copied().unwrap_or(0);
            (self.before, self.len) = (self.before.max(most), 0);
        }
        let [oldest, ..] = self.medians;
        if usize::try_from(self.len) == Ok(MINUTES) {
            self.before = self.before.max(oldest);
        } else {
            self.len += 1;
        }
        self.medians.rotate_left(1);
        let [.., last] = &mut self.medians;
        *last = median;
    }

    /// The rise of the last minutes towards a capacity in bytes; `None` where there is none. More work
    /// explains it.
    pub(super) fn rise(&self, settings: &Settings, capacity: u64, more_work: bool) -> Option<Rise> {
        if usize::try_from(self.len) != Ok(MINUTES) {
            return None;
        }
        let monotone = self.medians.iter().zip(self.medians.iter().skip(1)).all(|(a, b)| a <= b);
        let [first, .., last] = self.medians;
        let growth = f64::from(last) - f64::from(first);
        if !monotone || growth <= 0.0 {
            return None;
        }
        // Slopes over half of the minutes: a single minute says little.
        let mut slopes = [0.0; MINUTES / 2];
        let half = self.medians.iter().zip(self.medians.iter().skip(MINUTES / 2));
        for (slot, (a, b)) in slopes.iter_mut().zip(half) {
            *slot = (f64::from(*b) - f64::from(*a)) / count(MINUTES / 2);
        }
        slopes.sort_unstable_by(f64::total_cmp);
        let [slowest, _, middle, _, fastest] = slopes;
        let bucket = float(settings.bucket_milliseconds);
        let room = (float(capacity) - float_bytes(f64::from(last))).max(0.0);
        let until = |slope: f64| {
            let full = room / float_bytes(slope) * bucket;
            whole(if slope > 0.0 { full.min(FAR) } else { FAR })
        };
        let hourly = |slope: f64| float_bytes(slope) * 3_600_000.0 / bucket.max(1.0);
        let exhaustion = Interval { low: until(fastest), mid: until(middle), high: until(slowest) };
        Some(Rise {
            slope: Interval { low: hourly(slowest), mid: hourly(middle), high: hourly(fastest) },
            exhaustion,
            growth: float_bytes(growth),
            over: whole(bucket * count(MINUTES - 1)),
            alarming: first > self.before
                && self.goes_on()
                && !more_work
                && self.is_unlike_before(middle)
                && float(exhaustion.high) < float(settings.lead_milliseconds) * WITHIN,
        })
    }

    fn goes_on(&self) -> bool {
        let [first, .., last] = self.medians;
        let middle = self.medians.get(MINUTES / 2).copied().unwrap_or(last);
        f64::from(last) - f64::from(middle) >= GOES_ON * (f64::from(middle) - f64::from(first))
    }

    /// Whether it is much steeper than the way from the begin of the life.
    fn is_unlike_before(&self, slope: f64) -> bool {
        let [first, ..] = self.medians;
        let earlier = f64::from(self.age) - count(MINUTES);
        let way = (f64::from(first) - f64::from(self.first)).max(0.0);
        earlier >= count(MINUTES) && slope > STEEPER * way / earlier
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: u64 = 80 << 30;
    const GI: u32 = 1 << 14;

    /// An hour at 50 GiB, then what is added by the minute, in units.
    fn after(added: impl Fn(u32) -> u32, more_work: bool) -> Option<Rise> {
        let mut seen = Minutes::default();
        (0..60).for_each(|m| seen.push(m, 50 * GI));
        (1..=10).for_each(|m| seen.push(59 + m, 50 * GI + added(m)));
        seen.rise(&Settings::default(), CAPACITY, more_work)
    }

    #[test]
    fn a_rise_that_runs_out_in_minutes_is_alarming() {
        let rise = after(|m| m * 2 * GI, false).unwrap();
        assert!(rise.alarming, "{rise:?}");
        assert_eq!(rise.exhaustion.mid, 5 * 60_000);
    }

    #[test]
    fn a_rise_that_leaves_time_is_not() {
        assert!(after(|m| m * GI / 4, false).is_some_and(|r| !r.alarming));
    }

    #[test]
    fn more_work_explains_it() {
        assert!(after(|m| m * 2 * GI, true).is_some_and(|r| !r.alarming));
    }

    #[test]
    fn a_rise_that_slows_down_is_not() {
        let slowing = |m: u32| 25 * GI - 25 * GI / (1 + m * m / 6);
        assert!(after(slowing, false).is_some_and(|r| !r.alarming));
    }

    #[test]
    fn a_minute_below_the_last_is_no_rise() {
        assert_eq!(after(|m| if m == 5 { 0 } else { m * 2 * GI }, false), None);
    }

    #[test]
    fn a_life_that_has_always_risen_so_is_left_to_the_trend() {
        let mut seen = Minutes::default();
        (0..35).for_each(|m| seen.push(m, 10 * GI + m * 2 * GI));
        assert!(seen.rise(&Settings::default(), CAPACITY, false).is_some_and(|r| !r.alarming));
    }

    #[test]
    fn a_height_that_was_there_before_is_not_alarming() {
        let mut seen = Minutes::default();
        (0..30).for_each(|m| seen.push(m, 70 * GI));
        (30..90).for_each(|m| seen.push(m, 20 * GI));
        (0..10).for_each(|m| seen.push(90 + m, 52 * GI + m * 2 * GI));
        assert!(seen.rise(&Settings::default(), CAPACITY, false).is_some_and(|r| !r.alarming));
    }

    #[test]
    fn a_minute_that_was_missed_ends_the_rise() {
        let mut seen = Minutes::default();
        (0..60).for_each(|m| seen.push(m, 50 * GI));
        (0..11).filter(|m| *m != 4).for_each(|m| seen.push(60 + m, 52 * GI + m * 2 * GI));
        assert_eq!(seen.rise(&Settings::default(), CAPACITY, false), None);
    }
}
