//! Memory that goes with the load, taken out of a trend.
//!
//! A leak grows with work done; a cache or an elastic pool stands at a height that goes with the
//! rate of work and comes back when that falls. The second is fitted from block to block, where a
//! slow leak hardly shows, and subtracted.

use crate::leak::{
    number::count,
    trend::{GRAIN, Point, median},
    window::{BLOCKS, Block},
};

/// Rank correlation of the changes of rate and height from which the height is said to follow.
const FOLLOWS: f64 = 0.4;

/// Work is clearly more where it is so many times as much.
const MORE_WORK: f64 = 1.25;

/// The floors without what goes with the rate of work. `None` where no rate is known, it does not
/// change, or the floors do not follow it.
pub(super) fn without_load(blocks: &[Block], points: &mut [Point; BLOCKS]) -> Option<usize> {
    let mut rates = [0.0; BLOCKS];
    for (slot, block) in rates.iter_mut().zip(blocks) {
        *slot = block.aside.work.get()?;
    }
    let rates = rates.get(..blocks.len())?;
    let changes = || {
        let pairs = rates.iter().zip(blocks);
        pairs
            .clone()
            .zip(pairs.skip(1))
            .map(|((ra, a), (rb, b))| (rb - ra, f64::from(b.floor) - f64::from(a.floor)))
    };
    let pairs = count(changes().filter(|c| c.0 != 0.0).count());
    let agreeing = changes().map(|(rate, floor)| sign(rate) * sign_grain(floor)).sum::<f64>();
    if pairs < 5.0 || agreeing / pairs < FOLLOWS {
        return None;
    }
    let factor = median(changes().filter(|c| c.0 != 0.0).map(|(rate, floor)| floor / rate)).max(0.0);
    let usual = median(rates.iter().copied());
    for (slot, (block, rate)) in points.iter_mut().zip(blocks.iter().zip(rates)) {
        *slot = (f64::from(block.number), f64::from(block.floor) - factor * (rate - usual));
    }
    Some(blocks.len())
}

/// Whether the last two blocks did clearly more work than the two before them; not where work is not
/// known.
pub(super) fn works_more(blocks: &[Block]) -> bool {
    let done = |skip: usize| -> Option<f64> {
        let mut of = blocks.iter().rev().skip(skip);
        Some(of.next()?.aside.work.get()? + of.next()?.aside.work.get()?)
    };
    matches!((done(2), done(0)), (Some(before), Some(after)) if after > MORE_WORK * before)
}

/// Whether the floor came down while nothing was done: what leaked does not.
pub(super) fn came_down_idle(blocks: &[Block], growth: f64) -> bool {
    let busy = median(blocks.iter().filter_map(|b| b.aside.work.get()));
    let idle = |b: &&Block| b.aside.work.get().is_some_and(|w| w < busy / 20.0);
    let mut run = (0, 0.0, 0.0);
    for (before, block) in blocks.iter().zip(blocks.iter().skip(1)) {
        if idle(&block) {
            let from = if run.0 == 0 { f64::from(before.floor) } else { run.1 };
            run = (run.0 + 1, from, f64::from(block.floor));
            if run.0 >= 2 && run.1 - run.2 > growth / 4.0 {
                return true;
            }
        } else {
            run.0 = 0;
        }
    }
    false
}

fn sign(value: f64) -> f64 {
    if value > 0.0 {
        1.0
    } else if value < 0.0 {
        -1.0
    } else {
        0.0
    }
}

fn sign_grain(value: f64) -> f64 {
    if value.abs() < GRAIN { 0.0 } else { sign(value) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leak::window::{Aside, Short};

    fn block(number: u32, floor: f64, work: f64) -> Block {
        let floor = u32::try_from(crate::leak::number::whole(floor)).unwrap();
        Block { number, floor, peak: floor, aside: Aside { work: Short::of(work), ..Aside::default() } }
    }

    fn rate(i: u32) -> f64 {
        100.0 + f64::from((i * 7919) % 50) + 4.0 * f64::from(i)
    }

    #[test]
    fn memory_that_follows_the_load_is_level_without_it() {
        let blocks: Vec<Block> = (0..18).map(|i| block(i, 1e5 + 500.0 * rate(i), rate(i))).collect();
        let mut points = [(0.0, 0.0); BLOCKS];
        assert_eq!(without_load(&blocks, &mut points), Some(18));
        assert!(points.iter().all(|p| (p.1 - points[0].1).abs() < 200.0), "{points:?}");
    }

    #[test]
    fn a_leak_for_each_request_is_left_in() {
        let mut done = 0.0;
        let blocks: Vec<Block> = (0..18)
            .map(|i| {
                done += rate(i);
                block(i, 1e5 + 20.0 * done, rate(i))
            })
            .collect();
        let mut points = [(0.0, 0.0); BLOCKS];
        assert!(without_load(&blocks, &mut points).is_none_or(|n| points[n - 1].1 - points[0].1 > 30_000.0));
    }

    #[test]
    fn more_work_is_seen_where_work_is_known() {
        let of = |rates: &[f64]| -> Vec<Block> { rates.iter().map(|r| block(0, 1e5, *r)).collect() };
        assert!(works_more(&of(&[9.0, 9.0, 12.0, 14.0])));
        assert!(!works_more(&of(&[9.0, 9.0, 10.0, 10.0])));
        assert!(!works_more(&of(&[9.0, 9.0, f64::NAN, 14.0])));
        assert!(!works_more(&[]));
    }

    #[test]
    fn what_comes_down_while_idle_has_not_leaked() {
        let cache: Vec<Block> =
            (0..10).map(|i| block(i, 1e5 - 2000.0 * f64::from(i), if i > 6 { 0.0 } else { 9.0 })).collect();
        assert!(came_down_idle(&cache, 6000.0));
        let leak: Vec<Block> = (0..10)
            .map(|i| block(i, 1e5 + 2000.0 * f64::from(i.min(6)), if i > 6 { 0.0 } else { 9.0 }))
            .collect();
        assert!(!came_down_idle(&leak, 6000.0));
    }
}
