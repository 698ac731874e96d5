//! Jumps: memory that grows in steps at times of their own, over the whole life.
//!
//! The windows of the scales see few of them. Here the last jumps are kept, whenever they came: each
//! a rise from one floor to a higher one that stays. What comes down again was none. If they go on
//! as they came, memory runs out at the jump that goes beyond the room.

use serde::{Deserialize, Serialize};

use crate::leak::number::count;

/// Jumps that are kept.
const KEPT: usize = 6;
/// Fewest jumps that say that more will come.
const FEWEST: usize = 4;
/// Jumps that are closer than so many blocks on the mean are a rise, which the scales judge.
const APART: f64 = 3.0;
/// After so many times the usual gap without one they are over: by chance one in twenty.
const STALLED: f64 = 3.0;
/// The later gaps may be so many times the earlier ones,
const SLOWER: f64 = 2.0;
/// and the later jumps must be this share of the earlier ones: what shrinks fills something.
const SHRINKS: f64 = 0.6;
/// Jumps must be this share of all growth: the rest is another rise.
const HOLD: f64 = 0.75;
/// What is less than one part in so many of the largest jump is none.
const SMALL: u32 = 4;
/// A jump may be larger than the mean by this share of it.
const SHORT_OF: f64 = 0.25;
/// The normal quantile of one in ten.
const TENTH: f64 = 1.28;

/// A jump: the block before it, and the floors before and after, in units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Jump {
    at: u32,
    from: u32,
    to: u32,
}

/// The last jumps of a life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Jumps {
    latest: [Jump; KEPT],
    len: u32,
    /// The block before the first of this run of jumps,
    since: u32,
    /// and how many there were.
    seen: u32,
    /// The last block and its floor.
    last: Option<(u32, u32)>,
}

/// What to expect of jumps that go on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Expected {
    /// Mean size in units.
    pub size: f64,
    /// Mean gap in blocks.
    pub gap: f64,
    /// Jumps seen,
    pub seen: u32,
    /// in so many blocks.
    pub over: u32,
}

impl Expected {
    /// In how many blocks the jump comes that goes beyond so many units: one in ten times before the
    /// first, likely about the second, one in ten times after the third. Quantiles of a sum of
    /// exponential gaps, by the approximation of Wilson and Hilferty.
    pub(super) fn until(&self, room: f64) -> [f64; 3] {
        let more = (room / self.size - SHORT_OF).ceil().max(1.0);
        [-TENTH, 0.0, TENTH]
            .map(|z| self.gap * more * (1.0 - 1.0 / (9.0 * more) + z / (3.0 * more.sqrt())).max(0.0).powi(3))
    }
}

impl Jumps {
    fn kept(&self) -> &[Jump] {
        self.latest.get(..usize::try_from(self.len).unwrap_or(0)).unwrap_or_default()
    }

    /// Takes the floor of a block; a jump is of at least `size` units.
    pub(super) fn push(&mut self, number: u32, floor: u32, size: u32) {
        let Some((before, height)) = self.last.replace((number, floor)) else { return };
        // What came down below the middle of a jump takes it back.
        while self.kept().last().is_some_and(|jump| floor < jump.from.midpoint(jump.to)) {
            (self.len, self.seen) = (self.len - 1, self.seen.saturating_sub(1));
        }
        let rise = floor.saturating_sub(height);
        let largest = self.kept().iter().map(|j| j.to.saturating_sub(j.from)).max().unwrap_or(0);
        if rise < size.max(largest / SMALL).max(1) {
            return;
        }
        if self.kept().iter().any(|jump| jump.to.saturating_sub(jump.from) < rise / SMALL) {
            self.drop_below(rise / SMALL);
        }
        let place = usize::try_from(self.len).unwrap_or(0);
        if let Some(last) = place.checked_sub(1).and_then(|at| self.latest.get_mut(at))
            && last.at.saturating_add(1) == before
        {
            // The same one, seen in two blocks.
            last.to = floor;
            return;
        }
        let jump = Jump { at: before, from: height, to: floor };
        if place == 0 {
            (self.since, self.seen) = (before, 0);
        }
        self.seen = self.seen.saturating_add(1);
        if let Some(slot) = self.latest.get_mut(place) {
            *slot = jump;
            self.len += 1;
        } else {
            self.latest.rotate_left(1);
            let [.., last] = &mut self.latest;
            *last = jump;
        }
    }

    /// Forgets the jumps below a size: beside a large one they are noise.
    fn drop_below(&mut self, size: u32) {
        let mut left = Self { last: self.last, since: self.since, ..Self::default() };
        for jump in self.kept().iter().filter(|jump| jump.to.saturating_sub(jump.from) >= size) {
            let place = usize::try_from(left.len).unwrap_or(0);
            if let Some(slot) = left.latest.get_mut(place) {
                (*slot, left.len, left.seen) = (*jump, left.len + 1, left.seen + 1);
                left.since = if place == 0 { jump.at } else { left.since };
            }
        }
        *self = left;
    }

    /// What to expect at this block; `None` where jumps are too few or too close, over, becoming
    /// smaller or rarer, or not what makes it grow.
    pub(super) fn expected(&self, now: u32) -> Option<Expected> {
        let kept = self.kept();
        let (first, last, (_, floor)) = (kept.first()?, kept.last()?, self.last?);
        if kept.len() < FEWEST {
            return None;
        }
        let sum = |jumps: &[Jump]| jumps.iter().map(|j| f64::from(j.to.saturating_sub(j.from))).sum::<f64>();
        let size = |jumps: &[Jump]| sum(jumps) / count(jumps.len()).max(1.0);
        let span = |from: u32, to: u32| f64::from(to.saturating_sub(from));
        let (early, late) = kept.split_at(kept.len() / 2);
        let middle = late.first()?.at;
        let slow = span(middle, last.at) / count(late.len() - 1).max(1.0);
        let fast = span(first.at, middle) / count(early.len()).max(1.0);
        let gap = span(first.at, last.at) / count(kept.len() - 1);
        let grown = f64::from(floor) - f64::from(first.from);
        let goes_on = gap >= APART
            && span(last.at, now) <= STALLED * gap
            && slow <= SLOWER * fast.max(1.0)
            && size(late) >= SHRINKS * size(early)
            && sum(kept) >= HOLD * grown
            && sum(kept) * HOLD <= grown;
        goes_on.then(|| Expected {
            size: size(kept),
            gap,
            seen: self.seen,
            over: now.saturating_sub(self.since),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JUMP: u32 = 1000;

    /// Blocks at a height that is told by their number.
    fn of(blocks: u32, height: impl Fn(u32) -> u32) -> Option<Expected> {
        let mut jumps = Jumps::default();
        (0..blocks).for_each(|number| jumps.push(number, 10_000 + height(number), JUMP / 2));
        jumps.expected(blocks - 1)
    }

    #[test]
    fn jumps_that_go_on_say_when_memory_runs_out() {
        let expected = of(100, |n| n / 10 * JUMP).unwrap();
        assert_eq!((expected.size, expected.gap, expected.seen), (1000.0, 10.0, 9));
        let [early, likely, late] = expected.until(500.0);
        assert!(early < 3.0 && (5.0..10.0).contains(&likely) && late > 20.0, "{early} {likely} {late}");
        let [early, ..] = expected.until(4900.0);
        assert!((15.0..30.0).contains(&early), "five more: {early}");
    }

    #[test]
    fn few_jumps_or_none_say_nothing() {
        assert_eq!(of(100, |_| 0), None);
        assert_eq!(of(100, |n| n / 30 * JUMP), None);
    }

    #[test]
    fn jumps_that_are_over_say_nothing() {
        assert_eq!(of(100, |n| (n / 10).min(5) * JUMP), None);
    }

    #[test]
    fn jumps_that_shrink_or_become_rare_say_nothing() {
        assert_eq!(of(60, |n| [0, 4000, 7000, 9000, 10_000, 10_600][usize::try_from(n / 10).unwrap()]), None);
        let rare = [5, 10, 15, 60, 110, 160];
        assert_eq!(
            of(161, |n| u32::try_from(rare.iter().filter(|at| **at <= n).count()).unwrap() * JUMP),
            None
        );
    }

    #[test]
    fn a_steady_rise_is_no_jumps() {
        assert_eq!(of(100, |n| n * JUMP), None);
        assert_eq!(of(100, |n| n * JUMP / 10), None);
    }

    #[test]
    fn what_comes_down_again_was_none() {
        assert_eq!(of(100, |n| if n / 5 % 2 == 1 { JUMP } else { 0 }), None);
        let mut jumps = Jumps::default();
        (0..100).for_each(|n| jumps.push(n, 10_000 + n / 10 * JUMP, JUMP / 2));
        jumps.push(100, 10_000, JUMP / 2);
        assert_eq!((jumps.len, jumps.expected(100)), (0, None));
    }
}
