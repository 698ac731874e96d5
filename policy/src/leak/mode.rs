//! Who holds what grows, as far as it shows from outside the process.
//!
//! Three views of the same growth are compared: the driver's, what the framework reserved of it,
//! and what it allocated of that.

use crate::leak::{
    LeakMode,
    number::count,
    trend::median,
    window::{BLOCKS, Block, Maybe},
};

/// The share of the growth that a view must explain.
const MOST: f64 = 0.6;
/// CUDA graphs that leak grow by this a replay, in units of 64 KiB: 1 to 4 MiB, with some slack.
const A_REPLAY: std::ops::RangeInclusive<f64> = 12.0..=80.0;
/// Replays vary where their deviation is this share of their mean,
const VARY: f64 = 0.2;
/// and growth goes with them where it correlates by so much.
const GOES_WITH: f64 = 0.3;

/// The mode of the growth over these blocks, with how sure it is. `None` where only the driver's
/// number is known, or where the views share the growth among them.
pub(super) fn mode(blocks: &[Block]) -> Option<(LeakMode, f64)> {
    let driver = grown(blocks, |b| Some(f64::from(b.floor))).filter(|driver| *driver > 0.0)?;
    let share = |of: fn(&Block) -> Maybe| grown(blocks, |b| of(b).get().map(f64::from)).map(|g| g / driver);
    if per_replay(blocks, total(blocks)) {
        return Some((LeakMode::PerReplay, 0.8));
    }
    let (allocated, reserved) = (share(|b| b.aside.allocated), share(|b| b.aside.reserved));
    let host = share(|b| b.aside.host).filter(|host| *host >= MOST);
    match (allocated, reserved) {
        (Some(allocated), _) if allocated >= MOST => Some((LeakMode::HeldByFramework, sure(allocated))),
        (Some(allocated), Some(reserved)) if reserved - allocated.max(0.0) >= MOST => {
            Some((LeakMode::AllocatorRetention, sure(reserved - allocated.max(0.0))))
        }
        (_, Some(reserved)) if reserved <= 1.0 - MOST => Some(host.map_or_else(
            || (LeakMode::OutsideFramework, sure(1.0 - reserved.max(0.0))),
            |host| (LeakMode::HostOrManaged, sure(host)),
        )),
        (None, None) => host.map(|host| (LeakMode::HostOrManaged, sure(host) * 0.7)),
        _ => None,
    }
}

/// What a view grew from the first third of the blocks to the last, each by its median: what a batch
/// takes for a moment is in single blocks. `None` where a third is not known.
fn grown(blocks: &[Block], of: impl Fn(&Block) -> Option<f64>) -> Option<f64> {
    let part = blocks.len().div_ceil(3);
    let height = |blocks: &[Block]| {
        let known = || blocks.iter().filter_map(&of);
        (known().count() > 0).then(|| median(known()))
    };
    Some(height(blocks.get(blocks.len() - part..)?)? - height(blocks.get(..part)?)?)
}

/// What the floor grew from the first block to the last.
fn total(blocks: &[Block]) -> f64 {
    match (blocks.first(), blocks.last()) {
        (Some(first), Some(last)) => f64::from(last.floor) - f64::from(first.floor),
        _ => 0.0,
    }
}

/// A share of the growth as a degree of belief.
fn sure(share: f64) -> f64 {
    share.clamp(0.5, 0.95)
}

/// Whether the growth goes with replays: by as much a replay as is known of leaking graphs, and where
/// their rate varies, more in blocks with more of them.
pub(super) fn per_replay(blocks: &[Block], growth: f64) -> bool {
    let replays: f64 = blocks.iter().skip(1).filter_map(|b| b.aside.replays.get()).sum();
    if replays < count(blocks.len()) || !A_REPLAY.contains(&(growth / replays)) {
        return false;
    }
    let mut pairs = [(0.0, 0.0); BLOCKS];
    let mut n = 0;
    for (slot, (a, b)) in pairs.iter_mut().zip(blocks.iter().zip(blocks.iter().skip(1))) {
        let Some(replays) = b.aside.replays.get() else { continue };
        *slot = (replays, f64::from(b.floor) - f64::from(a.floor));
        n += 1;
    }
    let pairs = pairs.get(..n).unwrap_or_default();
    let size = count(n).max(1.0);
    let (mx, my) = pairs.iter().fold((0.0, 0.0), |(x, y), p| (x + p.0 / size, y + p.1 / size));
    let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
    for (x, y) in pairs {
        xx += (x - mx).powi(2);
        xy += (x - mx) * (y - my);
        yy += (y - my).powi(2);
    }
    let varies = (xx / size).sqrt() > VARY * mx;
    !varies || xy >= GOES_WITH * (xx * yy).sqrt()
}

/// The rank that grows alone, given each rank's slope in bytes an hour: the others together grow
/// by less than a fifth of it. Its place, and how sure that is.
pub fn one_rank(slopes: &[f64]) -> Option<(usize, f64)> {
    let (place, most) = slopes.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1))?;
    let others = slopes.iter().enumerate().filter(|(at, _)| *at != place).map(|(_, s)| s.abs());
    let next = others.fold(0.0, f64::max);
    (slopes.len() >= 2 && *most > 0.0 && next < most / 5.0).then(|| (place, sure(1.0 - next / most)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leak::window::{Aside, Short};

    const MI: u64 = 1 << 20;

    /// Ten blocks in which driver, reserved, allocated and host grow by so many MiB a block.
    fn blocks(driver: u64, reserved: u64, allocated: u64, host: u64, replays: f64) -> Vec<Block> {
        let at = |i: u64, by: u64| Maybe::of(Some(1024 * MI + i * by * MI));
        (0..10)
            .map(|i| Block {
                number: u32::try_from(i).unwrap(),
                floor: crate::leak::window::units(8192 * MI + i * driver * MI),
                peak: 0,
                aside: Aside {
                    host: at(i, host),
                    allocated: at(i, allocated),
                    reserved: at(i, reserved),
                    work: Short::default(),
                    replays: Short::of(replays),
                },
            })
            .collect()
    }

    fn of(driver: u64, reserved: u64, allocated: u64, host: u64, replays: f64) -> Option<LeakMode> {
        mode(&blocks(driver, reserved, allocated, host, replays)).map(|m| m.0)
    }

    #[test]
    fn r07_r10_three_views_name_the_mode() {
        assert_eq!(of(100, 100, 95, 0, 0.0), Some(LeakMode::HeldByFramework));
        assert_eq!(of(100, 100, 5, 0, 0.0), Some(LeakMode::AllocatorRetention));
        assert_eq!(of(100, 0, 0, 0, 0.0), Some(LeakMode::OutsideFramework));
        assert_eq!(of(100, 0, 0, 100, 0.0), Some(LeakMode::HostOrManaged));
        assert_eq!(of(100, 0, 0, 0, 50.0), Some(LeakMode::PerReplay));
        assert_eq!(of(100, 50, 50, 0, 0.0), None, "half and half says nothing");
    }

    #[test]
    fn the_driver_alone_names_none() {
        let mut blocks = blocks(100, 0, 0, 0, 0.0);
        for block in &mut blocks {
            block.aside = Aside::default();
        }
        assert_eq!(mode(&blocks), None);
        assert_eq!(mode(&[]), None);
    }

    #[test]
    fn a_rank_that_grows_alone_is_named() {
        assert_eq!(one_rank(&[0.0, 1e6, 9e8, 0.0]).map(|r| r.0), Some(2));
        assert_eq!(one_rank(&[9e8, 8e8, 9e8]), None);
        assert_eq!(one_rank(&[9e8]), None);
        assert_eq!(one_rank(&[]), None);
    }
}
