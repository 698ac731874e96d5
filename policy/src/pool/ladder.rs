//! Chunks of the ballast, and which of them to make, close and cut up.
//!
//! Each size divides the next, so that taking the largest first finds an exact set of chunks
//! whenever there is one. Deep chunks are few and quick to close; at the edge lie enough small
//! ones that any amount can be given to within 2 MiB:
//!
//! | part | chunks |
//! |---|---|
//! | fine | one each of 64, 32, 16, 8 and 4 MiB, two of 2 MiB: every amount up to 128 MiB |
//! | edge | eight of 128 MiB: every amount up to 1 GiB |
//! | deep | the rest in 1 GiB |

use highwater_crds::ByteSize;

/// What every amount is a multiple of, in bytes: the driver's granularity.
pub const GRAIN: u64 = 2 * ByteSize::MI;
/// Size of a chunk at the edge, in bytes.
pub const EDGE: u64 = 128 * ByteSize::MI;
/// Size of a deep chunk, in bytes.
pub const DEEP: u64 = ByteSize::GI;

/// Sizes of chunks in bytes, the largest first.
pub const SIZES: [u64; 8] = [DEEP, EDGE, 32 * GRAIN, 16 * GRAIN, 8 * GRAIN, 4 * GRAIN, 2 * GRAIN, GRAIN];

/// How many chunks of each size are to be in stock, in the order of [`SIZES`]. Of deep ones there
/// may be any number.
const STOCK: [u32; 8] = [0, 8, 1, 1, 1, 1, 1, 2];
/// At fewer chunks than this at the edge, a deep one is cut up.
const EDGE_LOW: u32 = 3;

/// A number of chunks of each size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunks([u32; 8]);

impl Chunks {
    /// None.
    pub const NONE: Self = Self([0; 8]);

    /// How many of a size in bytes; 0 if there is no such size.
    pub fn count(&self, size: u64) -> u32 {
        self.iter().find(|(of, _)| *of == size).map_or(0, |(_, count)| count)
    }

    /// Adds `count` chunks of a size in bytes. Whether there is such a size.
    pub fn add(&mut self, size: u64, count: u32) -> bool {
        let slot = SIZES.iter().zip(&mut self.0).find(|(of, _)| **of == size);
        slot.map(|(_, slot)| *slot = slot.saturating_add(count)).is_some()
    }

    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.iter().fold(0, |sum, (size, count)| size.saturating_mul(count.into()).saturating_add(sum))
    }

    /// How many chunks.
    pub fn len(&self) -> u32 {
        self.0.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Whether there is no chunk.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size in bytes and count, the largest size first, absent sizes included.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, u32)> + '_ {
        SIZES.into_iter().zip(self.0.iter().copied())
    }

    /// These without those; never below none.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut rest = *self;
        for (slot, other) in rest.0.iter_mut().zip(other.0) {
            *slot = slot.saturating_sub(other);
        }
        rest
    }

    /// These and those.
    #[must_use]
    pub fn with(&self, other: &Self) -> Self {
        let mut sum = *self;
        for (slot, other) in sum.0.iter_mut().zip(other.0) {
            *slot = slot.saturating_add(other);
        }
        sum
    }
}

/// Chunks to close, and chunks to make of what was closed beyond need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    /// To close.
    pub close: Chunks,
    /// To make anew. None where the closed ones are exactly what was asked for.
    pub remake: Chunks,
}

/// The chunks to make so that the ballast grows by `bytes`, rounded down to 2 MiB: first what is
/// missing of the fine and edge stock, then deep ones, then the rest.
pub fn plan(have: &Chunks, bytes: u64) -> Chunks {
    let mut made = Chunks::NONE;
    let mut rest = floor(bytes);
    for ((size, stock), (had, slot)) in SIZES.into_iter().zip(STOCK).zip(have.0.iter().zip(&mut made.0)).rev()
    {
        let missing = stock.saturating_sub(*had);
        *slot = missing.min(whole(rest, size));
        rest = rest.saturating_sub(size.saturating_mul((*slot).into()));
    }
    for (size, slot) in SIZES.into_iter().zip(&mut made.0) {
        let more = whole(rest, size);
        *slot = slot.saturating_add(more);
        rest = rest.saturating_sub(size.saturating_mul(more.into()));
    }
    made
}

/// The chunks to close so that `bytes`, rounded up to 2 MiB, come free; all if there are no more.
/// Few large ones rather than many small ones. Where no set of chunks is exact, one that is too
/// large is closed as well, and the excess is to be made anew.
pub fn release(have: &Chunks, bytes: u64) -> Exchange {
    let mut rest = ceil(bytes).min(have.bytes());
    let mut close = Chunks::NONE;
    for (size, (had, slot)) in SIZES.into_iter().zip(have.0.iter().zip(&mut close.0)) {
        *slot = whole(rest, size).min(*had);
        rest = rest.saturating_sub(size.saturating_mul((*slot).into()));
    }
    if rest == 0 {
        return Exchange { close, remake: Chunks::NONE };
    }
    // What is left is each larger than the rest: the smallest of them covers it.
    let left = have.without(&close);
    let Some((size, _)) = left.iter().rev().find(|(_, count)| *count > 0) else {
        return Exchange { close, remake: Chunks::NONE };
    };
    close.add(size, 1);
    let mut excess = size.saturating_sub(rest);
    // It may cover smaller ones too.
    for (size, slot) in SIZES.into_iter().zip(&mut close.0) {
        let spared = whole(excess, size).min(*slot);
        *slot = slot.saturating_sub(spared);
        excess = excess.saturating_sub(size.saturating_mul(spared.into()));
    }
    Exchange { close, remake: plan(&have.without(&close), excess) }
}

/// One step towards few chunks and enough small ones: those far beyond the stock are joined, a
/// larger one is cut where the stock has all but run out. `None` when all is in order. Never moves
/// more than 1 GiB.
pub fn tidy(have: &Chunks) -> Option<Exchange> {
    join(have).or_else(|| cut(have))
}

/// Joins small chunks into the next size, where enough are beyond the stock.
fn join(have: &Chunks) -> Option<Exchange> {
    let sizes = SIZES.into_iter().zip(SIZES.into_iter().skip(1));
    let counts = have.0.iter().zip(STOCK).skip(1);
    sizes.zip(counts).rev().find_map(|((next, size), (had, stock))| {
        let parts = whole(next, size);
        // So many that cutting one again is far.
        if *had < stock.saturating_add(parts.saturating_mul(2)) {
            return None;
        }
        let mut exchange = Exchange::default();
        exchange.close.add(size, parts);
        exchange.remake.add(next, 1);
        Some(exchange)
    })
}

/// Cuts a chunk where the stock of smaller ones has run out.
fn cut(have: &Chunks) -> Option<Exchange> {
    let fine = have
        .iter()
        .skip(2)
        .fold(0u64, |sum, (size, count)| size.saturating_mul(count.into()).saturating_add(sum));
    let incomplete = have.count(GRAIN) == 0 || fine < EDGE / 2;
    let size = if have.count(EDGE) < EDGE_LOW && have.count(DEEP) > 0 {
        DEEP
    } else if incomplete && have.count(EDGE) > 0 {
        EDGE
    } else {
        return None;
    };
    let mut close = Chunks::NONE;
    close.add(size, 1);
    let rest = have.without(&close);
    Some(Exchange { close, remake: plan(&rest, size) })
}

/// Rounded down to the grain.
pub(crate) fn floor(bytes: u64) -> u64 {
    bytes.saturating_sub(bytes % GRAIN)
}

/// Rounded up to the grain, or down where that is too large a number.
pub(crate) fn ceil(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(GRAIN).unwrap_or(floor(bytes))
}

/// How many whole chunks of a size there are in so many bytes.
fn whole(bytes: u64, size: u64) -> u32 {
    u32::try_from(bytes / size.max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GI: u64 = ByteSize::GI;
    const MI: u64 = ByteSize::MI;
    /// Most chunks beyond deep ones that planning leaves behind.
    const SMALL_MOST: u32 = 60;

    fn chunks(counts: [u32; 8]) -> Chunks {
        Chunks(counts)
    }

    #[test]
    fn each_size_divides_the_next() {
        for pair in SIZES.windows(2) {
            assert!(pair[0] > pair[1] && pair[0] % pair[1] == 0);
        }
        let stock = Chunks(STOCK);
        assert_eq!(stock.bytes(), GI + 128 * MI);
    }

    #[test]
    fn a_large_ballast_is_deep_with_a_fine_edge() {
        let made = plan(&Chunks::NONE, 100 * GI);
        assert_eq!(made, chunks([98, 15, 1, 1, 1, 1, 1, 2]));
        assert_eq!(made.bytes(), 100 * GI);
    }

    #[test]
    fn a_release_closes_few_large_chunks() {
        let have = plan(&Chunks::NONE, 100 * GI);
        assert_eq!(release(&have, 20 * GI).close, chunks([20, 0, 0, 0, 0, 0, 0, 0]));
        let odd = release(&have, 3 * GI + 129 * MI);
        assert_eq!(odd.close, chunks([3, 1, 0, 0, 0, 0, 0, 1]));
        assert!(odd.remake.is_empty());
    }

    #[test]
    fn where_no_set_is_exact_a_larger_chunk_is_cut() {
        let have = chunks([2, 0, 1, 0, 0, 0, 0, 0]);
        let Exchange { close, remake } = release(&have, 66 * MI);
        assert_eq!(close, chunks([1, 0, 0, 0, 0, 0, 0, 0]), "the 64 MiB chunk is spared");
        assert_eq!(remake.bytes(), GI - 66 * MI);
    }

    #[test]
    fn there_is_never_more_to_close_than_there_is() {
        let have = chunks([1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(release(&have, u64::MAX), Exchange { close: have, remake: Chunks::NONE });
        assert_eq!(release(&Chunks::NONE, GI), Exchange::default());
        assert_eq!(plan(&have, MI), Chunks::NONE, "less than the grain");
    }

    fn any_chunks() -> impl Strategy<Value = Chunks> {
        (0u32..150, prop::array::uniform7(0u32..20)).prop_map(|(deep, rest)| {
            let mut counts = [deep; 8];
            counts[1..].copy_from_slice(&rest);
            Chunks(counts)
        })
    }

    /// As the keeper does: closes, then makes.
    fn apply(have: Chunks, exchange: &Exchange) -> Chunks {
        have.without(&exchange.close).with(&exchange.remake)
    }

    fn tidied(mut have: Chunks) -> Chunks {
        for _ in 0..2000 {
            let Some(exchange) = tidy(&have) else { return have };
            assert_eq!(exchange.close.bytes(), exchange.remake.bytes());
            assert!(exchange.close.bytes() <= DEEP);
            assert_eq!(have.without(&exchange.close).with(&exchange.close), have, "it has what it closes");
            have = apply(have, &exchange);
        }
        panic!("tidying does not end: {have:?}");
    }

    proptest! {
        #[test]
        fn planning_is_exact_to_the_grain(have in any_chunks(), bytes in 0u64..300 * GI) {
            let made = plan(&have, bytes);
            prop_assert_eq!(made.bytes(), floor(bytes));
            prop_assert!(u64::from(made.len()) <= bytes / DEEP + u64::from(SMALL_MOST));
        }

        #[test]
        fn releasing_is_exact_to_the_grain(have in any_chunks(), bytes in 0u64..300 * GI) {
            let Exchange { close, remake } = release(&have, bytes);
            let due = ceil(bytes).min(have.bytes());
            prop_assert_eq!(close.bytes() - remake.bytes(), due);
            prop_assert_eq!(have.without(&close).with(&close), have, "it has what it closes");
            prop_assert!(remake.bytes() < DEEP);
        }

        #[test]
        fn an_exact_set_is_found_if_there_is_one(have in any_chunks(), part in prop::array::uniform8(0u32..100)) {
            let mut wanted = Chunks::NONE;
            for ((slot, had), share) in wanted.0.iter_mut().zip(have.0).zip(part) {
                *slot = had * share / 100;
            }
            let Exchange { close, remake } = release(&have, wanted.bytes());
            prop_assert!(remake.is_empty());
            prop_assert!(close.len() <= wanted.len(), "and it is no larger than that one");
        }

        #[test]
        fn in_order_every_amount_is_exact(bytes in 2 * GI..200 * GI, part in 0u64..=100) {
            let have = tidied(plan(&Chunks::NONE, bytes));
            prop_assert!(release(&have, have.bytes() / 100 * part).remake.is_empty());
        }

        #[test]
        fn tidying_ends_with_few_small_chunks_and_enough_of_them(have in any_chunks()) {
            let tidy = tidied(have);
            prop_assert_eq!(tidy.bytes(), have.bytes());
            prop_assert!(tidy.len() - tidy.count(DEEP) <= SMALL_MOST);
            if tidy.bytes() >= 2 * GI {
                let fine: u64 = tidy.iter().skip(2).map(|(size, count)| size * u64::from(count)).sum();
                prop_assert!(fine >= EDGE / 2 && tidy.count(GRAIN) > 0);
                prop_assert!(tidy.count(EDGE) >= EDGE_LOW - 1);
            }
        }

        #[test]
        fn the_number_of_chunks_stays_bounded_whatever_is_asked(
            steps in prop::collection::vec((any::<bool>(), 0u64..40 * GI), 1..60),
        ) {
            let mut have = Chunks::NONE;
            for (grow, bytes) in steps {
                have = if grow && have.bytes() < 200 * GI {
                    have.with(&plan(&have, bytes))
                } else {
                    apply(have, &release(&have, bytes))
                };
                have = tidied(have);
                prop_assert!(u64::from(have.len()) <= have.bytes() / DEEP + u64::from(SMALL_MOST));
            }
        }
    }
}
