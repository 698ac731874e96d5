//! Two published recipes, computed as evidence and as baselines; nothing is decided by them.
//!
//! The staircase is an alarm for steps: it fires on nearly every healthy pod whose load changes.
//! The drift compares the last samples with a uniform sample of the whole life, so that it says
//! "different from before" for a warm-up and a daily peak as well.

use serde::{Deserialize, Serialize};

/// Samples over which the staircase takes its median.
const STAIR: usize = 5;
/// Samples kept of the whole life.
const RESERVOIR: usize = 32;
/// Last samples that are compared with them.
const RECENT: usize = 8;

/// A step: above the median of the last five samples by more than 1.8 times their interquartile
/// range, and above 1.15 times the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staircase {
    last: [u64; STAIR],
    filled: usize,
}

impl Staircase {
    /// Takes a sample in bytes; whether it is a step.
    pub fn push(&mut self, bytes: u64) -> bool {
        let [.., before] = self.last;
        let fired = self.filled == STAIR && bytes > before.saturating_add(before / 20 * 3) && {
            let mut sorted = self.last;
            sorted.sort_unstable();
            let [_, first, median, third, _] = sorted;
            let range = third.saturating_sub(first);
            bytes > median.saturating_add(range.saturating_add(range / 5 * 4))
        };
        self.last.rotate_left(1);
        let [.., last] = &mut self.last;
        *last = bytes;
        self.filled = (self.filled + 1).min(STAIR);
        fired
    }
}

/// A uniform sample of a life and its last samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drift {
    life: [[u32; RESERVOIR / 4]; 4],
    recent: [u32; RECENT],
    seen: u64,
    random: u64,
}

impl Default for Drift {
    fn default() -> Self {
        Self { life: [[0; RESERVOIR / 4]; 4], recent: [0; RECENT], seen: 0, random: 0x9e37_79b9_7f4a_7c15 }
    }
}

impl Drift {
    /// Takes a sample, in any unit. Every sample of the life has the same chance to be kept
    /// (Vitter's algorithm R, with a generator that is the same each time).
    pub fn push(&mut self, value: u32) {
        let at = |seen: u64, len: usize| usize::try_from(seen).map_or(0, |s| s % len);
        if let Some(slot) = self.recent.get_mut(at(self.seen, RECENT)) {
            *slot = value;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.seen = self.seen.saturating_add(1);
        let place = if self.seen > RESERVOIR as u64 { self.random % self.seen } else { self.seen - 1 };
        if let Some(slot) =
            usize::try_from(place).ok().and_then(|place| self.life.as_flattened_mut().get_mut(place))
        {
            *slot = value;
        }
    }

    /// The distance of the last samples from the life: the statistic of Kolmogorov and Smirnov,
    /// from 0 to 1. 0 while there are too few samples.
    pub fn distance(&self) -> f64 {
        if self.seen < (RESERVOIR as u64) {
            return 0.0;
        }
        let (mut life, mut recent) = (self.life, self.recent);
        let life = life.as_flattened_mut();
        life.sort_unstable();
        recent.sort_unstable();
        let below = |sorted: &[u32], value: u32| sorted.partition_point(|v| *v <= value);
        let part = |n: usize, of: u32| u32::try_from(n).map_or(1.0, f64::from) / f64::from(of);
        life.iter()
            .chain(&recent)
            .map(|&value| (part(below(life, value), 32) - part(below(&recent, value), 8)).abs())
            .fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fired(values: &[u64]) -> usize {
        let mut staircase = Staircase::default();
        values.iter().filter(|v| staircase.push(**v)).count()
    }

    #[test]
    fn r05_a_step_fires_and_a_slow_rise_does_not() {
        assert_eq!(fired(&[1000, 1000, 1000, 1000, 1000, 1200]), 1);
        assert_eq!(fired(&[1000, 1000, 1000, 1000, 1000, 1150]), 0, "more than 1.15 times is meant");
        let slow: Vec<u64> = (0..1000).map(|i| 1000 + i).collect();
        assert_eq!(fired(&slow), 0, "a leak is no staircase");
        assert_eq!(fired(&[1000, 1200]), 0, "not before five samples");
    }

    #[test]
    fn r05_the_last_samples_are_compared_with_the_whole_life() {
        let mut drift = Drift::default();
        (0..1000).for_each(|_| drift.push(100));
        assert!(drift.distance() < 0.01);
        (0..8).for_each(|_| drift.push(200));
        assert!(drift.distance() > 0.8, "{}", drift.distance());
    }

    #[test]
    fn r05_the_state_of_a_node_is_small() {
        assert!(size_of::<Drift>() * 8192 <= 3_200_000, "{}", size_of::<Drift>());
    }
}
