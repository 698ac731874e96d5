//! The rule on a pod's host memory, and its pressure index. From cgroup v2 alone.
//!
//! Use is what cannot be dropped: anonymous, shared and swapped memory. Page cache is not counted,
//! since the kernel takes it back by itself.
//!
//! The pressure index is 0 to 100, over windows of 10 s:
//!
//! ```text
//! index = max(full, (some + refaulted) / 2)
//! ```
//!
//! `full` and `some` are the shares of the window in which all, or some, of the pod's tasks waited
//! for memory (PSI), and `refaulted` is what was read again shortly after it had been dropped, as a
//! share of a tenth of what the pod may have. Pages read in for the first time, as at a start or by
//! a scan of a file, do not count.

use highwater_crds::{ByteSize, HostMemory};

use crate::{breaker::milliseconds, ledger::Share, time::Millis};

/// Length of a window in milliseconds.
pub const WINDOW: u64 = 10_000;
/// The index counts once it was above its mark in so many windows, one after the other.
pub const WINDOWS: u32 = 3;
/// What a page is, in bytes, in the kernel's counts of refaults.
const PAGE: u64 = 4096;

/// What was read of a pod's cgroup. A number that is not there is missing, never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// `anon` + `shmem` of `memory.stat` + `memory.swap.current`, in bytes.
    pub held: Option<u64>,
    /// `memory.max`, or the node's memory where that is `max`, in bytes.
    pub limit: Option<u64>,
    /// `total` of the line `some` of `memory.pressure`, in microseconds.
    pub some: Option<u64>,
    /// `total` of the line `full`.
    pub full: Option<u64>,
    /// `workingset_refault_anon` + `workingset_refault_file` of `memory.stat`, in pages.
    pub refaults: Option<u64>,
}

impl Sample {
    /// What is held of what may be.
    pub fn share(&self) -> Option<Share> {
        let (used, of) = self.held.zip(self.limit.filter(|limit| *limit > 0))?;
        Some(Share { used, of })
    }
}

/// Where the rule stands for one pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// It has tripped.
    pub active: bool,
    /// The pressure index of the last whole window, 0 to 100. `None` before the first.
    pub index: Option<i32>,
    /// Since when use has been at or above the trip mark.
    above: Option<Millis>,
    /// The window that runs: when it began, and what was read then.
    window: Option<(Millis, Sample)>,
    /// How many windows, one after the other, the index was above its mark.
    high: u32,
}

/// A change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The rule tripped.
    Tripped(Cause),
    /// It is over.
    Ended,
}

/// Why the rule tripped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Use stayed at or above the mark.
    Use(Share),
    /// The pressure index, this high, stayed above its mark.
    Pressure(i32),
}

impl Cause {
    /// In words.
    pub fn explain(self, rule: &HostMemory) -> String {
        match self {
            Self::Use(Share { used, of }) => format!(
                "holds {} of {} of host memory that cannot be dropped, at or above {} % for {} ms",
                ByteSize(used).rounded(),
                ByteSize(of).rounded(),
                rule.trip_percent,
                rule.hold_milliseconds
            ),
            Self::Pressure(index) => format!(
                "memory pressure index {index} of 100, above {} in {WINDOWS} windows of {} s",
                rule.pressure_index_percent.unwrap_or(100),
                WINDOW / 1000
            ),
        }
    }
}

/// The state after a sample, and the change that it brought.
pub fn step(rule: &HostMemory, state: State, sample: &Sample, now: Millis) -> (State, Option<Change>) {
    let mut next = state;
    let closed = next.close_window(sample, now);
    if closed {
        let above = next.index.zip(rule.pressure_index_percent).is_some_and(|(index, mark)| index > mark);
        next.high = if above { state.high.saturating_add(1) } else { 0 };
    }
    if rule.pressure_index_percent.is_none() {
        next.high = 0;
    }
    let share = sample.share();
    if let Some(share) = share {
        next.above = if share.at_least(rule.trip_percent) { state.above.or(Some(now)) } else { None };
    }
    let pressed = next.high >= WINDOWS;
    if !state.active {
        let held = next.above.is_some_and(|above| now.since(above) >= milliseconds(rule.hold_milliseconds));
        let by_use = share.filter(|_| held).map(Cause::Use);
        let by_pressure = next.index.filter(|_| pressed).map(Cause::Pressure);
        let cause = by_use.or(by_pressure);
        next.active = cause.is_some();
        return (next, cause.map(Change::Tripped));
    }
    // One calm window ends what pressure began; where use is missing nothing ends.
    if next.high == 0 && share.is_some_and(|share| share.below(rule.clear_percent)) {
        next.active = false;
        return (next, Some(Change::Ended));
    }
    (next, None)
}

/// The bytes that must go before a rule that tripped is over: what is above the clear mark, and a
/// page at least, since pressure may be high below it. `None` where use is not known.
pub fn need(rule: &HostMemory, sample: &Sample) -> Option<u64> {
    Some(crate::breaker::excess(sample.share()?, rule.clear_percent).max(PAGE))
}

impl State {
    /// Ends the window that runs, if its time is over, and begins the next. Counters that went back
    /// (another cgroup) begin one without an index.
    fn close_window(&mut self, sample: &Sample, now: Millis) -> bool {
        let Some((began, before)) = self.window else {
            self.window = Some((now, *sample));
            return false;
        };
        let took = now.since(began);
        if took < WINDOW {
            return false;
        }
        self.window = Some((now, *sample));
        self.index = index(&before, sample, took);
        true
    }
}

/// The pressure index between two samples that lie so many milliseconds apart. `None` where PSI is
/// missing or went back, or no time has passed.
pub fn index(before: &Sample, after: &Sample, milliseconds: u64) -> Option<i32> {
    let grown = |before: Option<u64>, after: Option<u64>| after?.checked_sub(before?);
    let micros = u128::from(milliseconds).saturating_mul(1000);
    let percent = |part: u64, whole: u128| {
        let percent = (u128::from(part) * 100).checked_div(whole)?;
        i32::try_from(percent.min(100)).ok()
    };
    let some = percent(grown(before.some, after.some)?, micros)?;
    let full = percent(grown(before.full, after.full)?, micros)?;
    // Without refaults, or without a limit to compare them with, stalls speak alone.
    let tenth = after.limit.map_or(0, |limit| u128::from(limit / 10));
    let refaulted = grown(before.refaults, after.refaults)
        .and_then(|pages| percent(pages.saturating_mul(PAGE), tenth))
        .unwrap_or(some);
    Some(full.max(i32::midpoint(some, refaulted)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GI: u64 = ByteSize::GI;

    fn rule() -> HostMemory {
        HostMemory {
            trip_percent: 92,
            clear_percent: 88,
            hold_milliseconds: 5000,
            pressure_index_percent: Some(85),
            actions: Vec::new(),
        }
    }

    fn holding(percent: u64) -> Sample {
        Sample { held: Some(percent * GI), limit: Some(100 * GI), ..Sample::default() }
    }

    /// Feeds samples and returns the changes with their times.
    fn run(samples: impl IntoIterator<Item = (u64, Sample)>) -> Vec<(u64, bool)> {
        let (mut state, mut changes) = (State::default(), Vec::new());
        for (at, sample) in samples {
            let (next, change) = step(&rule(), state, &sample, Millis(at));
            state = next;
            changes.extend(change.map(|change| (at, matches!(change, Change::Tripped(_)))));
        }
        changes
    }

    #[test]
    fn it_trips_after_its_hold_and_ends_below_its_clear_mark() {
        let seconds = |from: u64, to: u64, percent| (from..to).map(move |s| (s * 1000, holding(percent)));
        let samples = seconds(0, 4, 93).chain(seconds(4, 5, 91)).chain(seconds(5, 20, 93));
        let samples = samples.chain(seconds(20, 30, 89)).chain(seconds(30, 40, 87));
        assert_eq!(run(samples), [(10_000, true), (30_000, false)]);
    }

    #[test]
    fn a_missing_number_changes_nothing() {
        let samples = (0..6).map(|s| (s * 1000, holding(95)));
        let samples = samples.chain((6..60).map(|s| (s * 1000, Sample::default())));
        assert_eq!(run(samples), [(5_000, true)]);
        assert_eq!(run((0..60).map(|s| (s * 1000, Sample { limit: None, ..holding(99) }))), []);
    }

    /// A pod below its mark whose tasks wait for so many percent of the time.
    fn waiting(seconds: u64, percent: u64) -> Sample {
        let micros = seconds * percent * 10_000;
        Sample { some: Some(micros), full: Some(micros), refaults: Some(0), ..holding(50) }
    }

    #[test]
    fn pressure_trips_in_three_windows_and_ends_in_one() {
        let pressed = (0..=50).map(|s| (s * 1000, waiting(s, 90)));
        let end = waiting(50, 90).some.unwrap();
        let calm =
            (51..=80).map(|s| (s * 1000, Sample { some: Some(end), full: Some(end), ..waiting(0, 0) }));
        assert_eq!(run(pressed.chain(calm)), [(30_000, true), (60_000, false)]);
        let brief = (0..=20).map(|s| (s * 1000, waiting(s, 90)));
        let end = waiting(20, 90).some.unwrap();
        let calm =
            (21..=80).map(|s| (s * 1000, Sample { some: Some(end), full: Some(end), ..waiting(0, 0) }));
        assert_eq!(run(brief.chain(calm)), []);
    }

    #[test]
    fn what_must_go_is_never_nothing() {
        assert_eq!(need(&rule(), &holding(50)), Some(PAGE), "pressure tripped it");
        assert_eq!(need(&rule(), &holding(93)), Some(5 * GI + 1));
        assert_eq!(need(&rule(), &Sample::default()), None);
    }

    #[test]
    fn the_index_weighs_stalls_and_refaults() {
        let at = |some: u64, full: u64, refaults| Sample {
            some: Some(some * 100_000),
            full: Some(full * 100_000),
            refaults,
            limit: Some(10 * GI),
            held: None,
        };
        let index = |some, full, refaults: Option<u64>| {
            super::index(&at(0, 0, refaults.map(|_| 0)), &at(some, full, refaults), 10_000)
        };
        let tenth = GI / PAGE;
        assert_eq!(index(0, 0, Some(0)), Some(0));
        assert_eq!(index(90, 0, Some(0)), Some(45), "some wait, nothing is read again");
        assert_eq!(index(90, 0, Some(tenth)), Some(95));
        assert_eq!(index(90, 86, Some(0)), Some(86));
        assert_eq!(index(90, 0, None), Some(90), "stalls speak alone");
        assert_eq!(super::index(&Sample::default(), &at(1, 1, None), 10_000), None);
        assert_eq!(super::index(&at(9, 9, None), &at(1, 1, None), 10_000), None, "another cgroup");
    }

    proptest! {
        #[test]
        fn nothing_is_too_wild(samples in prop::collection::vec(
            (0u64..30_000, prop::option::of(any::<u64>()), prop::option::of(any::<u64>()),
             prop::option::of(any::<u64>()), prop::option::of(any::<u64>())), 0..60)) {
            let mut state = State::default();
            for (at, held, limit, some, refaults) in samples {
                let sample = Sample { held, limit, some, full: some, refaults };
                let (next, change) = step(&rule(), state, &sample, Millis(at));
                prop_assert!(next.index.is_none_or(|index| (0..=100).contains(&index)));
                match change {
                    Some(Change::Tripped(cause)) => {
                        prop_assert!(!state.active && next.active);
                        prop_assert!(!cause.explain(&rule()).is_empty());
                    }
                    Some(Change::Ended) => prop_assert!(state.active && !next.active),
                    None => prop_assert_eq!(state.active, next.active),
                }
                state = next;
            }
        }
    }
}
