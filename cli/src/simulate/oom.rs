//! Where recorded memory ran out, as far as numbers show it.
//!
//! Use that reaches the capacity is certain. A pod that is killed, or a program that ends, on the
//! way there shows only that its use was high and is gone at once: that is inferred, and not where
//! the pod is known to have lived on.

use highwater_crds::ByteSize;
use highwater_policy::{ledger::Share, time::Millis};

/// Use from which a fall counts, in percent of the capacity.
const HIGH_PERCENT: u64 = 90;
/// How far it falls at least, in percent of the capacity.
const FALL_PERCENT: u64 = 30;
/// What is left at most where nothing says that the pod was started anew: a program that ends
/// gives nearly all of it back, one that changes its model does not.
const LEFT_PERCENT: u64 = 20;
/// Within how many milliseconds: a few samples, whatever their distance.
const WITHIN: u64 = 5 * 60_000;

/// What one series showed so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watch {
    /// The last time that use was high.
    high: Option<(Millis, Share)>,
    /// The pod was started anew since then.
    restarted: bool,
    /// It was said already, and use has not fallen since.
    said: bool,
}

impl Watch {
    /// The pod was started anew.
    pub(crate) fn restart(&mut self) {
        self.restarted = true;
    }

    /// What a sample shows: why it is said that memory ran out. `lives` where the series says when
    /// the pod was started anew.
    pub(crate) fn step(&mut self, share: Share, lives: bool, now: Millis) -> Option<String> {
        if of_hundred(share.used) >= percent(share.of, HIGH_PERCENT) {
            *self = Self { high: Some((now, share)), restarted: false, said: self.said };
            let full = share.used >= share.of && !std::mem::replace(&mut self.said, true);
            return full.then(|| format!("use reached the capacity of {}", ByteSize(share.of).rounded()));
        }
        let (at, peak) = self.high?;
        let late = now.since(at) > WITHIN;
        let fallen = of_hundred(peak.used.saturating_sub(share.used)) >= percent(share.of, FALL_PERCENT);
        let gone = of_hundred(share.used) <= percent(share.of, LEFT_PERCENT);
        if !late && !(fallen && (self.restarted || gone)) {
            return None;
        }
        let Self { restarted, said, .. } = std::mem::take(self);
        if late || said || (lives && !restarted) {
            return None;
        }
        let how = if restarted { "and the pod was started anew" } else { "and no life is given" };
        Some(format!(
            "inferred: use fell from {} % to {} % of the capacity within {} s, {how}",
            peak.percent(),
            share.percent(),
            now.since(at).div_ceil(1000)
        ))
    }
}

/// So many hundredths of a size, times 100.
fn percent(bytes: u64, percent: u64) -> u128 {
    u128::from(bytes) * u128::from(percent)
}

fn of_hundred(bytes: u64) -> u128 {
    u128::from(bytes) * 100
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `(seconds, percent)` and returns the seconds at which memory ran out.
    fn found(lives: bool, restarts: &[u64], samples: &[(u64, u64)]) -> Vec<u64> {
        let mut watch = Watch::default();
        let mut found = Vec::new();
        for &(second, percent) in samples {
            if restarts.contains(&second) {
                watch.restart();
            }
            if watch.step(Share { used: percent, of: 100 }, lives, Millis(second * 1000)).is_some() {
                found.push(second);
            }
        }
        found
    }

    #[test]
    fn a_full_device_is_said_once_and_its_fall_is_the_same_event() {
        assert_eq!(found(false, &[], &[(0, 99), (10, 100), (20, 101), (30, 95), (40, 100), (50, 5)]), [10]);
        assert_eq!(found(false, &[], &[(0, 100), (10, 5), (20, 100)]), [0, 20]);
    }

    #[test]
    fn a_collapse_is_inferred_even_over_a_few_samples() {
        assert_eq!(found(false, &[], &[(0, 93), (57, 88), (114, 14), (171, 41)]), [114]);
    }

    #[test]
    fn a_slow_or_a_small_fall_is_none() {
        assert!(found(false, &[], &[(0, 93), (301, 40), (400, 20)]).is_empty());
        assert!(found(false, &[10], &[(0, 93), (10, 64)]).is_empty());
        assert!(found(false, &[], &[(0, 93), (10, 40)]).is_empty());
        assert!(found(false, &[], &[(0, 89), (10, 2)]).is_empty());
    }

    #[test]
    fn a_pod_that_lived_on_gave_memory_back() {
        assert!(found(true, &[], &[(0, 97), (10, 20)]).is_empty());
        assert_eq!(found(true, &[10], &[(0, 97), (10, 20)]), [10]);
        assert_eq!(found(true, &[10], &[(0, 97), (10, 88), (20, 12)]), [20]);
    }
}
