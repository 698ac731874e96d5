//! Who holds what grows, as far as it shows from outside the process.
//!
//! Three views of the same growth are compared: the driver's, what the framework reserved of it,
//! and what it allocated of that.

use crate::leak::{
    LeakMode,
    number::count,
    window::{Block, Maybe},
};

/// The share of the growth that one view must explain.
const MOST: f64 = 0.6;
/// CUDA graphs that leak grow by this a replay, in units of 64 KiB: 1 to 4 MiB, with some slack.
const A_REPLAY: std::ops::RangeInclusive<f64> = 12.0..=80.0;

/// The mode of the growth over these blocks, with how sure it is. `None` where only the driver's
/// number is known.
pub(super) fn mode(blocks: &[Block]) -> Option<(LeakMode, f64)> {
    let (first, last) = (blocks.first()?, blocks.last()?);
    let driver = f64::from(last.floor) - f64::from(first.floor);
    if driver <= 0.0 {
        return None;
    }
    let grown = |of: fn(&Block) -> Maybe| {
        let (a, b) = (of(first).get()?, of(last).get()?);
        Some((f64::from(b) - f64::from(a)) / driver)
    };
    let (allocated, reserved) = (grown(|b| b.aside.allocated), grown(|b| b.aside.reserved));
    let host = grown(|b| b.aside.host);
    if per_replay(blocks, driver) {
        return Some((LeakMode::PerReplay, 0.8));
    }
    match (allocated, reserved) {
        (Some(allocated), _) if allocated >= MOST => Some((LeakMode::HeldByFramework, sure(allocated))),
        (Some(allocated), Some(reserved)) if reserved >= MOST => {
            Some((LeakMode::AllocatorRetention, sure(reserved - allocated.max(0.0))))
        }
        (_, Some(reserved)) if reserved <= 1.0 - MOST => match host {
            Some(host) if host >= MOST => Some((LeakMode::HostOrManaged, sure(host))),
            _ => Some((LeakMode::OutsideFramework, sure(1.0 - reserved.max(0.0)))),
        },
        _ => host.filter(|host| *host >= MOST).map(|host| (LeakMode::HostOrManaged, sure(host) * 0.7)),
    }
}

/// A share of the growth as a degree of belief.
fn sure(share: f64) -> f64 {
    share.clamp(0.5, 0.95)
}

/// Whether the growth goes with replays, at the rate that is known of leaking graphs.
pub(super) fn per_replay(blocks: &[Block], growth: f64) -> bool {
    let replays: f64 = blocks.iter().skip(1).filter_map(|b| b.aside.replays.get()).sum();
    replays >= count(blocks.len()) && A_REPLAY.contains(&(growth / replays))
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
