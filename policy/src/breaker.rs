//! The breaker of a device: Normal < Warning < Critical < Emergency on the share of memory used.
//!
//! A level is entered when use stayed at or above its mark for its hold, and left when use is
//! below its clear mark and the level has lasted for the minimum stay. A missing number changes
//! nothing.

use highwater_crds::{Action, ActionType, Breaker, Freeze, Level, TaintNodeWhen, Watermark};

use crate::{ledger::Share, time::Millis};

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The present level.
    pub level: Level,
    /// Since when.
    pub since: Millis,
    /// Since when use has been at or above the mark of each level above the present one:
    /// Warning, Critical, Emergency.
    above: [Option<Millis>; 3],
}

impl State {
    /// At a level since `since`.
    pub fn at(level: Level, since: Millis) -> Self {
        Self { level, since, ..Self::default() }
    }
}

/// A change of level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The level that was left.
    pub from: Level,
    /// The level that was entered.
    pub to: Level,
}

/// The state after a sample, and the change that it brought. `share` is `None` where the driver
/// did not say how much is used.
pub fn step(
    breaker: &Breaker,
    state: State,
    share: Option<Share>,
    now: Millis,
) -> (State, Option<Transition>) {
    let Some(share) = share else { return (state, None) };
    let mut next = state;
    for ((level, mark), above) in marks(breaker).into_iter().zip(&mut next.above) {
        let passed = mark.is_some_and(|mark| share.at_least(mark.trip_percent));
        *above = if passed && level > state.level { above.or(Some(now)) } else { None };
    }
    let risen = marks(breaker)
        .into_iter()
        .zip(next.above)
        .rev()
        .find(|((_, mark), above)| match (mark, above) {
            (Some(mark), Some(above)) => now.since(*above) >= milliseconds(mark.hold_milliseconds),
            _ => false,
        })
        .map(|((level, _), _)| level);
    let to = risen.unwrap_or_else(|| {
        let stayed = now.since(state.since) >= milliseconds(breaker.minimum_stay_milliseconds);
        if stayed { highest_kept(breaker, state.level, share) } else { state.level }
    });
    if to == state.level {
        return (next, None);
    }
    (State { level: to, since: now, above: next.above }, Some(Transition { from: state.level, to }))
}

/// The actions in force at a level: those of every level up to it, the highest level first.
pub fn actions(breaker: &Breaker, level: Level) -> impl Iterator<Item = (Level, &Watermark, &Action)> {
    marks(breaker)
        .into_iter()
        .rev()
        .filter(move |(at, _)| *at <= level)
        .filter_map(|(at, mark)| mark.map(|mark| (at, mark)))
        .flat_map(|(at, mark)| mark.actions.iter().map(move |action| (at, mark, action)))
}

/// The action of a type that is in force at a level; of several, that of the highest level.
pub fn action(breaker: &Breaker, level: Level, type_: ActionType) -> Option<(Level, &Watermark, &Action)> {
    actions(breaker, level).find(|(.., action)| action.type_ == type_)
}

/// What the breaker asks of the node at a level.
pub fn freeze(breaker: &Breaker, level: Level) -> Option<Freeze> {
    let (.., action) = action(breaker, level, ActionType::Freeze)?;
    Some(match action.freeze.as_ref().map(|f| f.taint_node_when).unwrap_or_default() {
        TaintNodeWhen::AllDevices => Freeze::AllDevices,
        TaintNodeWhen::AnyDevice => Freeze::AnyDevice,
    })
}

/// The highest level, not above `level`, whose clear mark use has not fallen below.
fn highest_kept(breaker: &Breaker, level: Level, share: Share) -> Level {
    marks(breaker)
        .into_iter()
        .rev()
        .find(|(at, mark)| *at <= level && mark.is_some_and(|mark| !share.below(mark.clear_percent)))
        .map_or(Level::Normal, |(at, _)| at)
}

fn marks(breaker: &Breaker) -> [(Level, Option<&Watermark>); 3] {
    [
        (Level::Warning, breaker.warning.as_ref()),
        (Level::Critical, breaker.critical.as_ref()),
        (Level::Emergency, breaker.emergency.as_ref()),
    ]
}

/// A duration of the API; the schema refuses negative ones.
pub(crate) fn milliseconds(value: i32) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use highwater_crds::{BreakerScope, WhenNobodyIsOver};
    use proptest::prelude::*;

    use super::*;

    fn mark(trip: i32, clear: i32, hold: i32, actions: &[ActionType]) -> Watermark {
        let actions = actions.iter().map(|&type_| Action { type_, restart: None, freeze: None }).collect();
        Watermark { trip_percent: trip, clear_percent: clear, hold_milliseconds: hold, actions }
    }

    fn breaker() -> Breaker {
        Breaker {
            scope: BreakerScope::Device,
            minimum_stay_milliseconds: 2000,
            warning: Some(mark(75, 72, 500, &[ActionType::Signal])),
            critical: Some(mark(88, 84, 500, &[ActionType::Signal, ActionType::Freeze])),
            emergency: Some(mark(95, 90, 0, &[ActionType::Restart])),
            when_nobody_is_over: WhenNobodyIsOver::None,
        }
    }

    fn at(percent: u64) -> Share {
        Share { used: percent, of: 100 }
    }

    /// Feeds `(time, percent)` samples and returns the levels after each.
    fn levels(samples: &[(u64, Option<u64>)]) -> Vec<Level> {
        let mut state = State::default();
        samples
            .iter()
            .map(|&(time, percent)| {
                (state, _) = step(&breaker(), state, percent.map(at), Millis(time));
                state.level
            })
            .collect()
    }

    #[test]
    fn a_level_is_entered_when_its_hold_is_over() {
        assert_eq!(
            levels(&[(0, Some(80)), (499, Some(80)), (500, Some(80))]),
            [Level::Normal, Level::Normal, Level::Warning]
        );
    }

    #[test]
    fn a_dip_below_the_mark_starts_the_hold_anew() {
        assert_eq!(
            levels(&[(0, Some(80)), (400, Some(70)), (600, Some(80)), (1000, Some(80))])[3],
            Level::Normal
        );
    }

    #[test]
    fn a_hold_of_zero_trips_on_the_first_sample() {
        assert_eq!(levels(&[(0, Some(97))]), [Level::Emergency]);
    }

    #[test]
    fn a_level_is_kept_between_its_clear_and_its_trip_mark() {
        assert_eq!(
            levels(&[(0, Some(96)), (9000, Some(91)), (9001, Some(89))]),
            [Level::Emergency, Level::Emergency, Level::Critical]
        );
    }

    #[test]
    fn a_level_lasts_for_its_minimum_stay() {
        assert_eq!(
            levels(&[(0, Some(96)), (1999, Some(1)), (2000, Some(1))]),
            [Level::Emergency, Level::Emergency, Level::Normal]
        );
    }

    #[test]
    fn a_missing_number_changes_nothing() {
        assert_eq!(levels(&[(0, Some(96)), (60_000, None)]), [Level::Emergency, Level::Emergency]);
    }

    #[test]
    fn a_level_whose_mark_was_taken_away_is_left() {
        let (tripped, _) = step(&breaker(), State::default(), Some(at(97)), Millis(0));
        let without = Breaker { emergency: None, ..breaker() };
        let (state, transition) = step(&without, tripped, Some(at(97)), Millis(2000));
        assert_eq!(transition, Some(Transition { from: Level::Emergency, to: Level::Critical }));
        assert_eq!(state.level, Level::Critical);
    }

    #[test]
    fn the_acts_of_lower_levels_stay_in_force() {
        assert_eq!(freeze(&breaker(), Level::Emergency), Some(Freeze::AllDevices));
        assert_eq!(freeze(&breaker(), Level::Warning), None);
        assert_eq!(
            action(&breaker(), Level::Emergency, ActionType::Signal).map(|a| a.0),
            Some(Level::Critical)
        );
        assert!(action(&breaker(), Level::Critical, ActionType::Restart).is_none());
    }

    proptest! {
        #[test]
        fn a_breaker_never_falls_faster_than_its_minimum_stay(
            samples in prop::collection::vec((0u64..1500, prop::option::of(0u64..=120)), 1..200),
            stay in 0i32..5000, hold in 0i32..2000,
        ) {
            let breaker = Breaker {
                minimum_stay_milliseconds: stay,
                critical: Some(mark(88, 84, hold, &[])),
                ..breaker()
            };
            let (mut state, mut now, mut last) = (State::default(), Millis(0), None::<Millis>);
            for (gap, percent) in samples {
                now = now.plus(gap);
                let share = percent.map(at);
                let (next, transition) = step(&breaker, state, share, now);
                match transition {
                    None => prop_assert_eq!(next.level, state.level),
                    Some(Transition { from, to }) => {
                        prop_assert_eq!((from, to), (state.level, next.level));
                        prop_assert!(share.is_some());
                        if to < from {
                            let entered = last.unwrap_or_default();
                            prop_assert!(now.since(entered) >= milliseconds(stay));
                        } else {
                            let mark = marks(&breaker).into_iter().find(|(l, _)| *l == to).and_then(|m| m.1);
                            prop_assert!(share.unwrap().at_least(mark.unwrap().trip_percent));
                        }
                        last = Some(now);
                    }
                }
                state = next;
            }
        }
    }
}
