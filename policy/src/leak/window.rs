//! Samples become buckets, buckets become blocks, and the last blocks of each scale are kept.
//!
//! A block is known by its floor, a low quantile of the medians of its buckets: what a pod frees
//! now and then does not count as growth. Sizes are kept in units of 64 KiB, so that 32 bits hold
//! 256 TiB.

use serde::{Deserialize, Serialize};

use crate::leak::number::count;

/// Blocks that are kept of each scale.
pub(super) const BLOCKS: usize = 18;
/// Samples of a bucket that are kept; of more, every second.
const BUCKET: usize = 16;
/// The lowest medians of a block that are kept: a tenth of two hours of minutes, and one.
const LOWS: usize = 13;
/// Bits of a byte count below a unit.
const UNIT_BITS: u32 = 16;

/// A size in units of 64 KiB.
pub(super) fn units(bytes: u64) -> u32 {
    u32::try_from(bytes >> UNIT_BITS).unwrap_or(u32::MAX - 1).min(u32::MAX - 1)
}

/// A size in bytes.
pub(super) fn bytes(units: u32) -> u64 {
    u64::from(units) << UNIT_BITS
}

/// A number of units in bytes.
pub(super) fn float_bytes(units: f64) -> f64 {
    units * 65_536.0
}

/// A size that may be missing, in four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Maybe(u32);

impl Default for Maybe {
    fn default() -> Self {
        Self(u32::MAX)
    }
}

impl Maybe {
    pub(super) fn of(bytes: Option<u64>) -> Self {
        bytes.map_or_else(Self::default, |b| Self(units(b)))
    }

    pub(super) fn get(self) -> Option<u32> {
        (self.0 != u32::MAX).then_some(self.0)
    }
}

/// A float to six digits that may be missing, in four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Short(u32);

impl Default for Short {
    fn default() -> Self {
        Self(u32::MAX)
    }
}

impl Short {
    pub(super) fn of(value: f64) -> Self {
        if value.is_finite() {
            Self(u32::try_from(value.to_bits() >> 32).unwrap_or(u32::MAX))
        } else {
            Self::default()
        }
    }

    pub(super) fn get(self) -> Option<f64> {
        (self.0 != u32::MAX).then_some(f64::from_bits(u64::from(self.0) << 32))
    }
}

/// What goes with the floor of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Aside {
    /// Memory on the host, as last known.
    pub host: Maybe,
    /// The framework's allocated bytes, as last known.
    pub allocated: Maybe,
    /// The framework's reserved bytes, as last known.
    pub reserved: Maybe,
    /// Work done in it.
    pub work: Short,
    /// Graphs replayed in it.
    pub replays: Short,
}

/// A block of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Block {
    /// Its number since the life began.
    pub number: u32,
    /// The low quantile of its medians.
    pub floor: u32,
    /// Its greatest sample.
    pub peak: u32,
    /// What goes with it.
    pub aside: Aside,
}

/// The last blocks of a scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Window {
    blocks: [Block; BLOCKS],
    len: usize,
}

impl Window {
    /// Adds a block; the oldest goes.
    pub(super) fn push(&mut self, block: Block) {
        if self.len >= BLOCKS {
            self.blocks.rotate_left(1);
            self.len = BLOCKS - 1;
        }
        if let Some(slot) = self.blocks.get_mut(self.len) {
            *slot = block;
            self.len += 1;
        }
    }

    /// The blocks, the oldest first.
    pub(super) fn blocks(&self) -> &[Block] {
        self.blocks.get(..self.len).unwrap_or_default()
    }
}

/// A bucket that is being filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Bucket {
    values: [u32; BUCKET],
    kept: usize,
    seen: u32,
    /// Only one of so many samples is kept, as a power of two.
    thinning: u32,
    peak: u32,
}

impl Bucket {
    /// Takes a sample.
    pub(super) fn push(&mut self, value: u32) {
        self.peak = self.peak.max(value);
        if self.seen.is_multiple_of(1 << self.thinning.min(31)) {
            if self.kept == BUCKET {
                let mut kept = [0; BUCKET];
                for (to, from) in kept.iter_mut().zip(self.values.iter().step_by(2)) {
                    *to = *from;
                }
                (self.values, self.kept, self.thinning) = (kept, BUCKET / 2, self.thinning + 1);
            }
            if let Some(slot) = self.values.get_mut(self.kept) {
                *slot = value;
                self.kept += 1;
            }
        }
        self.seen = self.seen.saturating_add(1);
    }

    /// The lower median and the greatest sample; `None` where there was none. It is empty then.
    pub(super) fn close(&mut self) -> Option<(u32, u32)> {
        let values = self.values.get_mut(..self.kept).filter(|v| !v.is_empty())?;
        values.sort_unstable();
        let median = values.get((values.len() - 1) / 2).copied()?;
        let peak = self.peak;
        (self.kept, self.seen, self.thinning, self.peak) = (0, 0, 0, 0);
        Some((median, peak))
    }
}

/// A count that is not known yet, in eight bytes: it is never negative.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Sum(f64);

impl Default for Sum {
    fn default() -> Self {
        Self(-1.0)
    }
}

impl Sum {
    /// What is known from now on; it must not be negative.
    pub(super) fn of(value: f64) -> Self {
        Self(value.max(0.0))
    }

    /// Adds what is known.
    pub(super) fn add(&mut self, more: Option<f64>) {
        if let Some(more) = more {
            self.0 = self.0.max(0.0) + more;
        }
    }

    pub(super) fn get(self) -> Option<f64> {
        (self.0 >= 0.0).then_some(self.0)
    }

    fn short(self) -> Short {
        self.get().map_or_else(Short::default, Short::of)
    }
}

/// A block that is being filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Filling {
    lows: [u32; LOWS],
    buckets: u32,
    peak: u32,
    work: Sum,
    replays: Sum,
}

impl Filling {
    /// Adds work and replays that were done since the last bucket.
    pub(super) fn done(&mut self, work: Option<f64>, replays: Option<f64>) {
        self.work.add(work);
        self.replays.add(replays);
    }

    /// Takes the median and the peak of a bucket.
    pub(super) fn push(&mut self, median: u32, peak: u32) {
        let kept = usize::try_from(self.buckets).unwrap_or(LOWS).min(LOWS);
        self.buckets = self.buckets.saturating_add(1);
        self.peak = self.peak.max(peak);
        let place = self.lows.get(..kept).map_or(0, |lows| lows.partition_point(|l| *l <= median));
        if place >= LOWS {
            return;
        }
        if let Some(tail) = self.lows.get_mut(place..) {
            tail.rotate_right(1);
            if let Some(first) = tail.first_mut() {
                *first = median;
            }
        }
    }

    /// The block, if at least `least` buckets are in it. It is empty then.
    pub(super) fn close(&mut self, number: u32, aside: Aside, least: u32) -> Option<Block> {
        let done = std::mem::take(self);
        let rank = usize::try_from(done.buckets.saturating_sub(1) / 10).unwrap_or(0).min(LOWS - 1);
        let floor = done.lows.get(rank).copied().filter(|_| done.buckets >= least.max(1))?;
        let aside = Aside { work: done.work.short(), replays: done.replays.short(), ..aside };
        Some(Block { number, floor, peak: done.peak, aside })
    }
}

/// Greatest samples of the last buckets: the upper envelope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Envelope {
    peaks: [u32; 30],
    len: usize,
}

impl Envelope {
    /// Takes the peak of a bucket.
    pub(super) fn push(&mut self, peak: u32) {
        self.peaks.rotate_right(1);
        if let Some(first) = self.peaks.first_mut() {
            *first = peak;
        }
        self.len = (self.len + 1).min(self.peaks.len());
    }

    /// The 95 % quantile of what is kept.
    pub(super) fn level(&self) -> u32 {
        let (mut first, mut second) = (0, 0);
        for peak in self.peaks.iter().take(self.len) {
            if *peak >= first {
                (first, second) = (*peak, first);
            } else {
                second = second.max(*peak);
            }
        }
        // Up to twenty values the 95 % quantile is the greatest.
        if self.len > 20 { second } else { first }
    }
}

/// The mean of some values; 0 of none.
pub(super) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = values.fold((0.0, 0_usize), |(sum, n), v| (sum + v, n + 1));
    if n == 0 { 0.0 } else { sum / count(n) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_bucket_of_any_number_of_samples_keeps_its_median() {
        for n in [1_u32, 2, 6, 16, 17, 100, 5000] {
            let mut bucket = Bucket::default();
            (0..n).for_each(|i| bucket.push(1000 + i));
            let (median, peak) = bucket.close().unwrap();
            assert_eq!(peak, 1000 + n - 1);
            let middle = 1000 + (n - 1) / 2;
            assert!(median.abs_diff(middle) <= n / 8, "{n}: {median}, not {middle}");
            assert_eq!(bucket, Bucket { values: bucket.values, ..Bucket::default() });
            assert_eq!(bucket.close(), None);
        }
    }

    #[test]
    fn floats_keep_six_digits_and_what_is_none_is_missing() {
        for value in [0.0, 1.0, 123_456.0, 1e-3, 9.87e12] {
            let kept = Short::of(value).get().unwrap();
            assert!((kept - value).abs() <= value * 1e-6, "{value} became {kept}");
        }
        assert_eq!(Short::of(f64::NAN).get(), None);
        assert_eq!(Short::default().get(), None);
    }

    #[test]
    fn sizes_that_are_too_large_are_the_largest_and_not_missing() {
        assert_eq!(Maybe::of(Some(u64::MAX)).get(), Some(u32::MAX - 1));
        assert_eq!(Maybe::of(None).get(), None);
        assert_eq!(bytes(units(3 << 30)), 3 << 30);
    }

    #[test]
    fn a_block_with_too_few_buckets_is_none() {
        let mut filling = Filling::default();
        filling.push(5, 9);
        assert_eq!(filling.close(0, Aside::default(), 2), None);
        filling.push(5, 9);
        assert_eq!(filling.close(0, Aside::default(), 1).map(|b| (b.floor, b.peak)), Some((5, 9)));
    }

    #[test]
    fn the_window_keeps_the_last() {
        let mut window = Window::default();
        (0..50).for_each(|number| window.push(Block { number, ..Block::default() }));
        let numbers: Vec<u32> = window.blocks().iter().map(|b| b.number).collect();
        assert_eq!(numbers, (32..50).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn the_floor_is_the_tenth_of_the_medians(medians in prop::collection::vec(any::<u32>(), 1..=121)) {
            let mut filling = Filling::default();
            for median in &medians {
                filling.push(*median, *median);
            }
            let block = filling.close(1, Aside::default(), 1).unwrap();
            let mut sorted = medians.clone();
            sorted.sort_unstable();
            prop_assert_eq!(block.floor, sorted[(medians.len() - 1) / 10]);
            prop_assert_eq!(block.peak, sorted[medians.len() - 1]);
        }

        #[test]
        fn the_envelope_is_one_of_the_highest(peaks in prop::collection::vec(any::<u32>(), 1..100)) {
            let mut envelope = Envelope::default();
            for peak in &peaks {
                envelope.push(*peak);
            }
            let mut last: Vec<u32> = peaks.iter().rev().take(30).copied().collect();
            last.sort_unstable_by(|a, b| b.cmp(a));
            prop_assert_eq!(envelope.level(), last[usize::from(last.len() > 20)]);
        }
    }
}
