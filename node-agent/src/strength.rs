//! How firmly a pod's quota holds on a device, and why no more firmly.
//!
//! Pure: what is known goes in, the rung of the ladder comes out. From the top: the driver refuses, the
//! guard refuses, what nobody is owed is held back, or all is only measured.

use highwater_crds::{Strength, StrengthReason};
use highwater_policy::{pod::GuardOptIn, time::Millis};

/// How long something else must hold before it is told, in milliseconds.
const LASTING: u64 = 3_000;

/// What is known of a pod on a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grounds {
    /// A quota of the enforced layer holds for it, and the plan binds.
    pub(crate) bound: bool,
    /// The driver holds it to its limit; else why not.
    pub(crate) kernel: Result<(), StrengthReason>,
    /// Whether the guard is brought into it.
    pub(crate) opted_in: GuardOptIn,
    /// What is seen of its guard.
    pub(crate) guard: Guarded,
    /// The device's pool holds back what nobody is owed; else why not.
    pub(crate) pool: Result<(), StrengthReason>,
}

/// What is seen of a pod's guard on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Guarded {
    /// It holds nothing there: its guard has had nothing to refuse yet.
    #[default]
    Expected,
    /// Every process that holds something there charges through a guard.
    All,
    /// They do, and one of them has looked up functions that its guard does not cover. What those may
    /// give is found by comparison with the driver, and nothing was.
    Uncovered,
    /// Some do not: why.
    Not(StrengthReason),
}

/// How firmly a quota holds, and why no more firmly. No reason: there is nothing stronger.
pub(crate) type Verdict = (Strength, Option<StrengthReason>);

/// The strength.
pub(crate) fn of(grounds: Grounds) -> Verdict {
    if !grounds.bound {
        return (Strength::Observe, Some(StrengthReason::NoPlan));
    }
    let Err(no_kernel) = grounds.kernel else { return (Strength::Kernel, None) };
    let no_guard = match (grounds.opted_in, grounds.guard) {
        (GuardOptIn::No | GuardOptIn::Asked, _) => StrengthReason::NotOptedIn,
        (GuardOptIn::Volume, Guarded::Not(reason)) => reason,
        (GuardOptIn::Volume, Guarded::Uncovered) => {
            return (Strength::Guard, Some(StrengthReason::Uncovered));
        }
        (GuardOptIn::Volume, Guarded::All | Guarded::Expected) => {
            return (Strength::Guard, Some(no_kernel));
        }
    };
    match grounds.pool {
        Ok(()) => (Strength::Reservation, Some(no_guard)),
        // Whoever opted in hears first why that does not hold.
        Err(_) if grounds.opted_in != GuardOptIn::No => (Strength::Observe, Some(no_guard)),
        Err(no_pool) => (Strength::Observe, Some(no_pool)),
    }
}

/// A verdict that is told only when it has lasted, so that what is stored changes seldom.
///
/// A fall lasts for as long as it comes again before it has been away for that time, whatever its
/// reasons: nobody passes for guarded who goes round the guard a little at a time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Steady {
    told: Option<Verdict>,
    other: Option<Other>,
}

/// A verdict that is not told yet: since when it holds, and when it was last seen.
#[derive(Clone, Copy, Debug)]
struct Other {
    verdict: Verdict,
    since: Millis,
    last: Millis,
}

impl Steady {
    /// Takes in a verdict. The first is told at once.
    pub(crate) fn step(&mut self, verdict: Verdict, now: Millis) {
        let Some(told) = self.told else {
            self.told = Some(verdict);
            return;
        };
        let falls = |other: &Other| other.verdict.0 < told.0;
        if told == verdict {
            self.other = self.other.filter(|other| falls(other) && now.since(other.last) < LASTING);
            return;
        }
        let same = |other: &Other| other.verdict == verdict || (falls(other) && verdict.0 < told.0);
        let since = self.other.filter(same).map_or(now, |other| other.since);
        if now.since(since) >= LASTING {
            *self = Self { told: Some(verdict), other: None };
        } else {
            self.other = Some(Other { verdict, since, last: now });
        }
    }

    /// What is told.
    pub(crate) fn told(&self) -> Verdict {
        self.told.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEAKEST: Grounds = Grounds {
        bound: true,
        kernel: Err(StrengthReason::NoKernelLimits),
        opted_in: GuardOptIn::No,
        guard: Guarded::Expected,
        pool: Err(StrengthReason::NoPool),
    };

    #[test]
    fn every_rung_has_a_reason_why_it_is_not_the_next() {
        use StrengthReason::{
            GuardNotConnected, KeeperAway, Mps, NoKernelLimits, NoPlan, NoPool, NotOptedIn, OutsideGuard,
            Uncovered,
        };
        let volume = Grounds { opted_in: GuardOptIn::Volume, ..WEAKEST };
        let pool = Grounds { pool: Ok(()), ..WEAKEST };
        let observe = |reason| (Strength::Observe, Some(reason));
        for (grounds, expected) in [
            (Grounds { bound: false, kernel: Ok(()), ..pool }, observe(NoPlan)),
            (WEAKEST, observe(NoPool)),
            (Grounds { pool: Err(KeeperAway), ..WEAKEST }, observe(KeeperAway)),
            (Grounds { opted_in: GuardOptIn::Asked, ..WEAKEST }, observe(NotOptedIn)),
            (pool, (Strength::Reservation, Some(NotOptedIn))),
            (volume, (Strength::Guard, Some(NoKernelLimits))),
            (Grounds { guard: Guarded::All, ..volume }, (Strength::Guard, Some(NoKernelLimits))),
            (Grounds { guard: Guarded::Uncovered, ..volume }, (Strength::Guard, Some(Uncovered))),
            (Grounds { guard: Guarded::Not(OutsideGuard), ..volume }, observe(OutsideGuard)),
            (
                Grounds { guard: Guarded::Not(Mps), pool: Ok(()), ..volume },
                (Strength::Reservation, Some(Mps)),
            ),
            (
                Grounds { guard: Guarded::Not(GuardNotConnected), kernel: Ok(()), ..volume },
                (Strength::Kernel, None),
            ),
        ] {
            assert_eq!(of(grounds), expected, "{grounds:?}");
        }
    }

    #[test]
    fn what_passes_is_not_told() {
        let guard = (Strength::Guard, None);
        let fallen = (Strength::Observe, Some(StrengthReason::OutsideGuard));
        let mut steady = Steady::default();
        for (time, verdict, told) in [
            (0, guard, guard),
            (100, fallen, guard),
            (2_000, guard, guard),
            (3_100, guard, guard),
            (4_000, fallen, guard),
            (6_999, fallen, guard),
            (7_000, fallen, fallen),
            (7_100, guard, fallen),
            (9_000, fallen, fallen),
            (9_100, guard, fallen),
            (12_100, guard, guard),
        ] {
            steady.step(verdict, Millis(time));
            assert_eq!(steady.told(), told, "{time}");
        }
    }

    #[test]
    fn what_comes_again_and_again_or_for_other_reasons_is_told() {
        let guard = (Strength::Guard, None);
        let fallen = |reason| (Strength::Observe, Some(reason));
        for (first, second) in [
            (guard, fallen(StrengthReason::OutsideGuard)),
            (fallen(StrengthReason::OtherRoot), fallen(StrengthReason::OutsideGuard)),
        ] {
            let mut steady = Steady::default();
            steady.step(guard, Millis(0));
            for time in (100..=4_000).step_by(100) {
                steady.step(if time % 200 == 0 { second } else { first }, Millis(time));
            }
            assert_eq!(steady.told().0, Strength::Observe);
        }
    }
}
