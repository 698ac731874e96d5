//! A ladder of acts: what was begun against memory that stands too high, and what is begun next.
//!
//! What is begun is decided by policy, from the present state and from what was tried. A ladder lasts for as
//! long as its breaker is above Normal; when use has fallen below the clear mark nothing more is begun until
//! it reaches the mark again.

use std::sync::Arc;

use highwater_crds::{Action, ActionType, Breaker, BreakerScope, Level, Mode, Watermark, WhenNobodyIsOver};
use highwater_policy::{
    acts::{self, Frees, Outcome, Situation, Tried, Verdict},
    ledger::Share,
    time::Millis,
};
use jiff::Timestamp;

use crate::decide::Standing;

/// Where a ladder stands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Foot {
    /// UUID of the device.
    pub(crate) device: Arc<str>,
    /// Mode of the layer.
    pub(crate) mode: Mode,
    /// What it stands at.
    pub(crate) at: At,
    /// UID of the pod that it is about, where it is about one.
    pub(crate) pod: Option<Arc<str>>,
}

/// What a ladder stands at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum At {
    /// A breaker of this scope.
    Breaker(BreakerScope),
    /// A quota that is broken.
    Breach,
    /// The rule on host memory.
    Host,
    /// The rule on leaks.
    Leak,
}

/// What was begun.
#[derive(Debug, Default)]
pub(crate) struct Ladder {
    trials: Vec<Trial>,
    /// Since when use has been below the clear mark.
    fell: Option<Millis>,
    /// What earlier agents had begun is among the trials.
    pub(crate) resumed: bool,
}

/// An act that was begun.
#[derive(Clone, Debug)]
struct Trial {
    act: ActionType,
    uid: Option<Arc<str>>,
    begun: Millis,
    outcome: Outcome,
}

/// An act that is to be begun now.
#[derive(Clone, Debug)]
pub(crate) struct Begun {
    /// The act.
    pub(crate) action: ActionType,
    /// The pod, by its place among the tenants of the device; `None` where it concerns the device or the node.
    pub(crate) tenant: Option<usize>,
    /// What it should free.
    pub(crate) frees: Frees,
    /// A restart of the containers where they are.
    pub(crate) in_place: bool,
    /// Why, in a sentence.
    pub(crate) line: String,
}

/// What came of a step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Step {
    /// What is begun.
    pub(crate) begin: Vec<Begun>,
    /// What else was weighed, a line each.
    pub(crate) alternatives: Vec<String>,
    /// How things stand.
    pub(crate) verdict: Verdict,
}

/// What is known of a breaker that is above Normal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    /// The breaker.
    pub(crate) breaker: &'a Breaker,
    /// Where it stands.
    pub(crate) standing: &'a Standing,
    /// The pods concerned, with their places among the tenants of the device.
    pub(crate) tenants: &'a [(usize, acts::Tenant<'a>)],
    /// Whether it is known which incidents there are, so that some may be opened.
    pub(crate) budgeted: bool,
    /// Now.
    pub(crate) now: Millis,
    /// Now, as pods' deadlines are told.
    pub(crate) wall: Timestamp,
}

impl Ladder {
    /// Whether something may be begun: use is not below the clear mark of the level, and was not since it was
    /// last at the mark. A new round begins when it is at the mark again.
    pub(crate) fn climbs(&mut self, mark: &Watermark, early: bool, share: Share, now: Millis) -> Climbs {
        // A level that was entered early is about memory that is still to come.
        if share.below(mark.clear_percent) && !early {
            self.fell.get_or_insert(now);
            return Climbs::Fell;
        }
        match self.fell {
            Some(_) if share.at_least(mark.trip_percent) || early => {
                *self = Self { resumed: self.resumed, ..Self::default() };
                Climbs::Anew
            }
            Some(_) => Climbs::Rests,
            None => Climbs::On,
        }
    }

    /// Decides what is begun now, and notes it.
    pub(crate) fn step(&mut self, view: View<'_>) -> Step {
        let View { breaker, standing, tenants, budgeted, now, wall } = view;
        let Some(need) = acts::need(breaker, &standing.state, standing.reading) else {
            return Step::default();
        };
        let level = standing.state.level;
        let actions = acts::in_force(breaker, level);
        self.plan(
            breaker.scope,
            level,
            &actions,
            need,
            breaker.when_nobody_is_over,
            tenants,
            budgeted,
            now,
            wall,
        )
    }

    /// The same for what no breaker measures: the use of one pod beyond what it may have.
    pub(crate) fn step_pod(
        &mut self,
        actions: &[Action],
        need: u64,
        tenant: (usize, acts::Tenant<'_>),
        budgeted: bool,
        now: Millis,
        wall: Timestamp,
    ) -> Step {
        let mut sorted: Vec<&Action> = actions.iter().collect();
        sorted.sort_by_key(|action| action.type_);
        let nobody = WhenNobodyIsOver::None;
        let scope = BreakerScope::Pod;
        self.plan(scope, Level::Critical, &sorted, need, nobody, &[tenant], budgeted, now, wall)
    }

    #[allow(clippy::too_many_arguments, reason = "a situation in its parts")]
    fn plan(
        &mut self,
        scope: BreakerScope,
        level: Level,
        actions: &[&Action],
        need: u64,
        when_nobody_is_over: WhenNobodyIsOver,
        tenants: &[(usize, acts::Tenant<'_>)],
        budgeted: bool,
        now: Millis,
        wall: Timestamp,
    ) -> Step {
        let known: Vec<acts::Tenant<'_>> = tenants.iter().map(|(_, tenant)| *tenant).collect();
        let tried: Vec<Tried<'_>> = self.trials.iter().map(Trial::told).collect();
        let situation = Situation {
            scope,
            level,
            actions,
            need,
            tenants: &known,
            tried: &tried,
            when_nobody_is_over,
            now,
            wall,
        };
        let plan = acts::plan(&situation);
        let begin: Vec<Begun> = plan
            .begin
            .iter()
            .filter(|act| budgeted || !act.action.is_budgeted())
            .map(|act| Begun {
                action: act.action,
                tenant: act.tenant.and_then(|place| tenants.get(place)).map(|(place, _)| *place),
                frees: act.frees,
                in_place: act.in_place,
                line: act.line(&situation),
            })
            .collect();
        // Lines are made only where somebody reads them.
        let told = begin.iter().any(|begun| begun.action.is_budgeted()) || plan.verdict == Verdict::NoCulprit;
        let lines = plan.alternatives.iter().map(|other| other.line(&known));
        let alternatives = if told { lines.collect() } else { Vec::new() };
        let trials: Vec<Trial> = plan
            .begin
            .iter()
            .filter(|act| budgeted || !act.action.is_budgeted())
            .map(|act| Trial {
                act: act.action,
                uid: act
                    .tenant
                    .and_then(|place| known.get(place))
                    .map(|tenant| tenant.pod.uid.as_str().into()),
                begun: now,
                outcome: Outcome::Pending,
            })
            .collect();
        self.trials.extend(trials);
        Step { begin, alternatives, verdict: plan.verdict }
    }

    /// Notes what an earlier agent had begun.
    pub(crate) fn resume(&mut self, act: ActionType, uid: Option<&str>, outcome: Outcome, now: Millis) {
        if !self.has(act, uid) {
            self.trials.push(Trial { act, uid: uid.map(Arc::from), begun: now, outcome });
        }
    }

    /// Notes what came of an act.
    pub(crate) fn conclude(&mut self, act: ActionType, uid: Option<&str>, outcome: Outcome) {
        if let Some(trial) = self.trials.iter_mut().find(|trial| trial.is(act, uid)) {
            trial.outcome = outcome;
        }
    }

    /// An act did what it was for: should its reason return, it may be begun again.
    pub(crate) fn forget(&mut self, act: ActionType, uid: Option<&str>) {
        self.trials.retain(|trial| !trial.is(act, uid));
    }

    /// Whether an act was begun.
    pub(crate) fn has(&self, act: ActionType, uid: Option<&str>) -> bool {
        self.trials.iter().any(|trial| trial.is(act, uid))
    }

    /// Whether an act of a type was begun and use has not fallen below the clear mark since.
    pub(crate) fn presses(&self, act: ActionType) -> bool {
        self.fell.is_none() && self.trials.iter().any(|trial| trial.act == act)
    }
}

/// Whether something may be begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Climbs {
    /// Use is below the clear mark.
    Fell,
    /// It was, and is not at the mark again.
    Rests,
    /// It is at the mark again: what was tried before says nothing any more.
    Anew,
    /// It has not been below the clear mark.
    On,
}

impl Trial {
    fn is(&self, act: ActionType, uid: Option<&str>) -> bool {
        self.act == act && self.uid.as_deref() == uid
    }

    fn told(&self) -> Tried<'_> {
        Tried { act: self.act, uid: self.uid.as_deref(), begun: self.begun, outcome: self.outcome }
    }
}
