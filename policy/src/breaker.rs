//! A breaker: Normal < Warning < Critical < Emergency on the share of memory used, of a device, of
//! what is granted of a pool, or of a pod's limit.
//!
//! A level is entered when use stayed at or above its mark for its hold, or early where memory
//! rises fast and the breaker says so, and left when use is below its clear mark and the level has
//! lasted for the minimum stay. A missing number changes nothing.

use highwater_crds::{
    Action, ActionType, Breaker, BreakerPreset, BreakerScope, Freeze, Level, RestartAction, RiseLevel,
    TaintNodeWhen, Watermark,
};

use crate::{
    ledger::Share,
    rise::{self, Rate},
    time::Millis,
};

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The present level.
    pub level: Level,
    /// Since when.
    pub since: Millis,
    /// The present level was entered before its mark was reached, because memory rose fast.
    pub early: bool,
    /// Since when use has been at or above the mark of each level above the present one:
    /// Warning, Critical, Emergency.
    above: [Option<Millis>; 3],
    /// Since when memory has risen so fast that a level above the present one is entered for it.
    rising: Option<Millis>,
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
    /// It was entered before its mark was reached, because memory rose fast.
    pub early: bool,
}

/// What is measured at a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// How much is used of what can be. `None` where that is not known.
    pub share: Option<Share>,
    /// How fast that rises, in bytes a second; from [`rise::Ring`].
    pub rate: Option<Rate>,
}

impl From<Option<Share>> for Reading {
    fn from(share: Option<Share>) -> Self {
        Self { share, rate: None }
    }
}

/// The state after a sample, and the change that it brought. A reading without a share, where the
/// driver did not say how much is used, changes nothing.
pub fn step(
    breaker: &Breaker,
    state: State,
    reading: impl Into<Reading>,
    now: Millis,
) -> (State, Option<Transition>) {
    let Reading { share, rate } = reading.into();
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
        .find(|((_, mark), above)| held(*mark, *above, now))
        .map(|((level, _), _)| level);

    let foreseen = early_level(breaker);
    let is_fast = breaker.rise.as_ref().is_some_and(|rule| rise::enters(rule, share, rate));
    let above_present = foreseen.is_some_and(|(level, _)| level > state.level);
    next.rising = if is_fast && above_present { state.rising.or(Some(now)) } else { None };
    let entered_early = foreseen
        .filter(|(_, mark)| held(Some(mark), next.rising, now))
        .map(|(level, _)| level)
        .filter(|level| risen.is_none_or(|risen| *level > risen));

    let to = entered_early.or(risen).unwrap_or_else(|| {
        let stayed = now.since(state.since) >= milliseconds(breaker.minimum_stay_milliseconds);
        if !stayed {
            return state.level;
        }
        let kept = breaker.rise.as_ref().filter(|rule| rise::keeps(rule, share, rate));
        let kept =
            kept.and(foreseen).map(|(level, _)| level).filter(|level| state.early && *level <= state.level);
        highest_kept(breaker, state.level, share).max(kept.unwrap_or(Level::Normal))
    });
    if to == state.level {
        // What was entered early and has reached its mark since is a level like any other.
        let reached = foreseen.is_some_and(|(level, mark)| level == to && share.at_least(mark.trip_percent));
        next.early &= !reached;
        return (next, None);
    }
    let early = entered_early.is_some();
    let transition = Transition { from: state.level, to, early };
    (State { level: to, since: now, early, above: next.above, rising: None }, Some(transition))
}

/// Whether what has been so since `since` has been so for the hold of a mark.
fn held(mark: Option<&Watermark>, since: Option<Millis>, now: Millis) -> bool {
    mark.zip(since).is_some_and(|(mark, since)| now.since(since) >= milliseconds(mark.hold_milliseconds))
}

/// The level that a rise enters early, with its mark.
fn early_level(breaker: &Breaker) -> Option<(Level, &Watermark)> {
    Some(match breaker.rise.as_ref()?.level {
        RiseLevel::Warning => (Level::Warning, breaker.warning.as_ref()?),
        RiseLevel::Critical => (Level::Critical, breaker.critical.as_ref()?),
    })
}

/// A breaker with the marks of its preset filled in, where it does not give them itself. What comes
/// out names no preset any more.
#[must_use]
pub fn filled(breaker: &Breaker) -> Breaker {
    let mut filled = breaker.clone();
    let Some(preset) = filled.preset.take() else { return filled };
    let [warning, critical, emergency] = preset_marks(preset);
    filled.warning.get_or_insert(warning);
    filled.critical.get_or_insert(critical);
    filled.emergency.get_or_insert(emergency);
    filled
}

/// The marks of a preset: Warning, Critical, Emergency.
fn preset_marks(preset: BreakerPreset) -> [Watermark; 3] {
    let mark = |trip_percent, clear_percent, hold_milliseconds, actions: &[ActionType]| Watermark {
        trip_percent,
        clear_percent,
        hold_milliseconds,
        actions: actions.iter().map(|type_| Action::of(*type_)).collect(),
    };
    match preset {
        BreakerPreset::WarnBreakEmergency => {
            let mut emergency = mark(95, 90, 0, &[]);
            let restart = RestartAction { grace_period_seconds: Some(10), in_place: false };
            emergency.actions.push(Action { restart: Some(restart), ..Action::of(ActionType::Restart) });
            let acts = [ActionType::Signal, ActionType::Hook, ActionType::Reclaim, ActionType::Freeze];
            [mark(75, 72, 500, &[ActionType::Signal]), mark(88, 84, 500, &acts), emergency]
        }
        BreakerPreset::ReclaimRefuse => [
            mark(80, 76, 500, &[ActionType::Signal, ActionType::Reclaim]),
            mark(90, 86, 500, &[ActionType::Hook]),
            mark(95, 91, 0, &[ActionType::Freeze]),
        ],
    }
}

/// What is wrong with the order of a breaker's marks, in words: a mark of its own may not go with
/// those of its preset. Within marks that are given the schema refuses it.
pub fn disorder(breaker: &Breaker) -> Option<String> {
    let mut set = marks(breaker).into_iter().filter_map(|(level, mark)| Some((level, mark?)));
    let mut before = set.next()?;
    for (level, mark) in set {
        let (lower, below) = before;
        if below.trip_percent >= mark.trip_percent || below.clear_percent > mark.clear_percent {
            return Some(format!(
                "levels are out of order: {lower:?} trips at {} and clears at {} %, {level:?} at {} and {} %: each must trip above the one before and clear no lower",
                below.trip_percent, below.clear_percent, mark.trip_percent, mark.clear_percent
            ));
        }
        before = (level, mark);
    }
    None
}

/// The bytes of `share` that must go before it is below this many percent.
pub fn excess(share: Share, clear_percent: i32) -> u64 {
    if share.below(clear_percent) {
        return 0;
    }
    let percent = u128::try_from(clear_percent).unwrap_or(0);
    let bound = u128::from(share.of).saturating_mul(percent).div_ceil(100);
    // Below the mark, not at it.
    let bound = u64::try_from(bound).unwrap_or(u64::MAX).saturating_sub(1);
    share.used.saturating_sub(bound)
}

/// The clear mark of the lowest level that asks for more than a `Signal`, else of the highest: what
/// a device must stay under where something is to come to it.
pub fn quiet_mark(breaker: &Breaker) -> Option<i32> {
    let set = || marks(breaker).into_iter().filter_map(|(_, mark)| mark);
    let acts = set().find(|mark| mark.actions.iter().any(|action| action.type_ > ActionType::Signal));
    acts.or_else(|| set().next_back()).map(|mark| mark.clear_percent)
}

/// The bytes that may come to a device before its use is no longer below [`quiet_mark`]: what is
/// moved back there, or wakes up, takes no more, or it would be what trips the breaker next. `None`
/// where the breaker has no mark.
pub fn room(breaker: &Breaker, share: Share) -> Option<u64> {
    let percent = u128::try_from(quiet_mark(breaker)?).unwrap_or(0);
    let bound = u128::from(share.of).saturating_mul(percent).div_ceil(100);
    let bound = u64::try_from(bound).unwrap_or(u64::MAX).saturating_sub(1);
    Some(bound.saturating_sub(share.used))
}

/// What a breaker of scope `Pool` measures: what is granted of a pool.
pub fn pool_share(granted: u64, pool: u64) -> Option<Share> {
    (pool > 0).then_some(Share { used: granted.min(pool), of: pool })
}

/// What a breaker of scope `Pod` measures: what a pod uses of its limit, which may be more than all
/// of it. `None` where there is no limit or its use is not known.
pub fn pod_share(used: Option<u64>, limit: Option<u64>) -> Option<Share> {
    let (used, of) = used.zip(limit.filter(|limit| *limit > 0))?;
    Some(Share { used, of })
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

/// The mark of a level.
pub fn mark(breaker: &Breaker, level: Level) -> Option<&Watermark> {
    marks(breaker).into_iter().find(|(at, _)| *at == level)?.1
}

/// What the breaker asks of the node at a level. A breaker of scope `Pod` asks nothing of it: one pod
/// near its limit is no reason to keep others away.
pub fn freeze(breaker: &Breaker, level: Level) -> Option<Freeze> {
    if breaker.scope == BreakerScope::Pod {
        return None;
    }
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
    use highwater_crds::{Rise, WhenNobodyIsOver};
    use proptest::prelude::*;

    use super::*;

    fn mark(trip: i32, clear: i32, hold: i32, actions: &[ActionType]) -> Watermark {
        let actions = actions.iter().map(|&type_| Action::of(type_)).collect();
        Watermark { trip_percent: trip, clear_percent: clear, hold_milliseconds: hold, actions }
    }

    fn breaker() -> Breaker {
        Breaker {
            scope: BreakerScope::Device,
            preset: None,
            rise: None,
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
        assert_eq!(
            transition,
            Some(Transition { from: Level::Emergency, to: Level::Critical, early: false })
        );
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

    fn rising() -> Breaker {
        let rise = Rise { level: RiseLevel::Critical, lead_seconds: 60, above_percent: 60 };
        Breaker { rise: Some(rise), ..breaker() }
    }

    /// Percents a second of the 100 bytes that [`at`] counts in.
    fn read(percent: u64, rate: i64) -> Reading {
        Reading { share: Some(at(percent)), rate: Some(Rate(rate)) }
    }

    #[test]
    fn a_fast_rise_enters_its_level_early_after_its_hold_and_says_so() {
        let (state, none) = step(&rising(), State::default(), read(65, 1), Millis(0));
        assert_eq!((state.level, none), (Level::Normal, None));
        let (state, transition) = step(&rising(), state, read(65, 1), Millis(500));
        assert_eq!(transition, Some(Transition { from: Level::Normal, to: Level::Critical, early: true }));
        assert!(state.early);
        let (state, _) = step(&rising(), state, read(90, 1), Millis(600));
        assert!(!state.early, "its mark was reached");
    }

    #[test]
    fn a_level_that_was_entered_early_is_kept_while_memory_rises_and_left_after() {
        let mut state = State::at(Level::Critical, Millis(0));
        state.early = true;
        for (now, rate) in [(2000, 1), (3000, 1), (60_000, 1)] {
            let (next, transition) = step(&rising(), state, read(65, rate), Millis(now));
            assert_eq!((next.level, transition), (Level::Critical, None));
            state = next;
        }
        let (left, transition) = step(&rising(), state, read(65, 0), Millis(60_100));
        assert_eq!((left.level, transition.map(|t| t.to)), (Level::Normal, Some(Level::Normal)));
        let (kept, _) = step(&rising(), State { early: true, ..state }, read(85, 0), Millis(60_100));
        assert_eq!(kept.level, Level::Critical, "its clear mark holds as always");
    }

    #[test]
    fn no_rise_enters_a_level_below_its_floor_or_without_a_rule() {
        for (breaker, reading) in [
            (rising(), read(59, 50)),
            (rising(), read(65, 0)),
            (rising(), Reading { rate: None, ..read(65, 0) }),
            (breaker(), read(65, 50)),
            (Breaker { critical: None, ..rising() }, read(65, 50)),
        ] {
            let mut state = State::default();
            for now in 0..50 {
                (state, _) = step(&breaker, state, reading, Millis(now * 100));
            }
            assert_eq!(state.level, Level::Normal);
        }
    }

    #[test]
    fn presets_have_their_marks_and_a_given_mark_holds_instead() {
        let of = |preset| Breaker {
            preset: Some(preset),
            warning: None,
            critical: None,
            emergency: None,
            ..breaker()
        };
        let marks_of = |breaker: &Breaker| {
            let breaker = filled(breaker);
            assert_eq!((breaker.preset, disorder(&breaker)), (None, None));
            marks(&breaker).map(|(_, mark)| mark.map(|m| (m.trip_percent, m.clear_percent)).unwrap())
        };
        assert_eq!(marks_of(&of(BreakerPreset::WarnBreakEmergency)), [(75, 72), (88, 84), (95, 90)]);
        assert_eq!(marks_of(&of(BreakerPreset::ReclaimRefuse)), [(80, 76), (90, 86), (95, 91)]);
        let own = Breaker { critical: Some(mark(90, 80, 0, &[])), ..of(BreakerPreset::WarnBreakEmergency) };
        assert_eq!(marks_of(&own)[1], (90, 80));
        let wrong = Breaker { critical: Some(mark(96, 80, 0, &[])), ..of(BreakerPreset::WarnBreakEmergency) };
        assert!(disorder(&filled(&wrong)).unwrap().contains("Emergency at 95"));
        let refuse = filled(&of(BreakerPreset::ReclaimRefuse));
        assert!(actions(&refuse, Level::Emergency).all(|(.., a)| a.type_ != ActionType::Restart));
        assert_eq!(filled(&breaker()), breaker());
    }

    #[test]
    fn what_comes_back_stays_below_the_clear_mark_of_the_first_level_that_acts() {
        let room = |used| super::room(&breaker(), Share { used, of: 1000 });
        assert_eq!([room(600), room(839), room(900)], [Some(239), Some(0), Some(0)], "84 % of Critical");
        let signals = Breaker { critical: None, emergency: None, ..breaker() };
        assert_eq!(super::room(&signals, Share { used: 0, of: 1000 }), Some(719));
        let none = Breaker { warning: None, ..signals };
        assert_eq!(super::room(&none, Share { used: 0, of: 1000 }), None);
    }

    #[test]
    fn the_excess_is_what_must_go_to_be_below() {
        for (used, percent, excess) in [(900, 84, 61), (840, 84, 1), (839, 84, 0), (5, 0, 5), (0, 0, 0)] {
            assert_eq!(super::excess(Share { used, of: 1000 }, percent), excess);
        }
        assert_eq!(pool_share(5, 0), None);
        assert_eq!(pod_share(Some(5), None), None);
        assert!(pod_share(Some(12), Some(10)).unwrap().at_least(120));
    }

    proptest! {
        #[test]
        fn without_the_excess_use_is_below(used in any::<u64>(), of in 1u64.., percent in 1i32..=100) {
            let excess = super::excess(Share { used, of }, percent);
            let below = |used| Share { used, of }.below(percent);
            prop_assert!(below(used - excess));
            prop_assert!(excess == 0 || !below(used - excess + 1));
        }

        #[test]
        fn a_rise_brings_no_level_back_within_its_minimum_stay(
            samples in prop::collection::vec((0u64..1500, 40u64..=100, -5i64..20), 1..200),
        ) {
            let (mut state, mut now) = (State::default(), Millis(0));
            for (gap, percent, rate) in samples {
                now = now.plus(gap);
                let (next, transition) = step(&rising(), state, read(percent, rate), now);
                if let Some(Transition { from, to, early }) = transition {
                    prop_assert_eq!((from, to, early), (state.level, next.level, next.early));
                    if to < from {
                        prop_assert!(now.since(state.since) >= 2000);
                    }
                    if early {
                        prop_assert!(to == Level::Critical && to > from && percent >= 60 && rate > 0);
                    }
                }
                state = next;
            }
        }

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
                    Some(Transition { from, to, early }) => {
                        prop_assert!(!early);
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
