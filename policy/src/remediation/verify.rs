//! Whether an act helped.
//!
//! An act is verified by what the agent saw after it. The clocks of the two machines may differ, and
//! either may be set at any time, so the agent names the act that it knew of
//! ([`Observation::after_act`]); its clock alone is believed only where it says later. Nothing is
//! waited for without end: an agent that says nothing is asked, a wait whose beginning is still to
//! come (the operator's clock was set back) begins anew, and before an act is said to have failed
//! the agent is asked once more.

use highwater_crds::{ActState, ActionType, Decision, DecisionState, Observation, ObservationState};
use jiff::{SignedDuration, Timestamp};

use super::{
    ASK_AGAIN, Asks, FRESH, LASTING_WITHIN, LOOK_AGAIN, Step, VERIFY_WITHIN, Verdict, View, asked_lately,
    end, gone, is_ahead, report, verdict,
};
use crate::episode::AWAITING_OBSERVATION;

/// Reason of a decision whose times were still to come.
pub const CLOCK_SET_BACK: &str = "ClockSetBack";

/// When the act was accepted, by the operator's clock.
pub(crate) fn acted(decision: &Decision) -> Timestamp {
    decision.acted_at.as_ref().unwrap_or(&decision.since).0
}

/// What the agent saw after the act, if that is what it saw last.
pub(crate) fn seen_since<'a>(
    decision: &Decision,
    observation: Option<&'a Observation>,
) -> Option<&'a Observation> {
    let knew = |o: &Observation| o.after_act.is_some() && o.after_act == decision.acted_at;
    observation.filter(|o| o.at.0 >= acted(decision) || knew(o))
}

/// Whether an observation says that the reason for the act is gone.
pub(crate) const fn is_back(observation: &Observation) -> bool {
    matches!(observation.state, ObservationState::Gone | ObservationState::Recovered)
}

/// An act that has not helped yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited<'a> {
    /// Name of the node.
    pub(crate) node: &'a str,
    /// What was decided.
    pub(crate) decision: &'a Decision,
    /// What the agent saw last.
    pub(crate) observation: Option<&'a Observation>,
    /// When it was last asked to look.
    pub(crate) asked: Option<Timestamp>,
    /// Whether nothing but what the agent sees is awaited.
    pub(crate) agent_alone: bool,
    /// How long the act may still take; not positive: its time is over.
    pub(crate) left: SignedDuration,
}

/// What to do while an act has not helped yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing for so long.
    Rest(SignedDuration),
    /// Record this.
    Record(Verdict),
    /// Ask the agent to look, and record that.
    Observe(Verdict),
}

impl From<Next> for Step {
    fn from(next: Next) -> Self {
        match next {
            Next::Rest(wait) => Self::Rest(Some(wait)),
            Next::Record(verdict) => Self::Record(verdict, Some(LOOK_AGAIN)),
            Next::Observe(verdict) => Self::Observe(verdict),
        }
    }
}

impl Awaited<'_> {
    /// What to do meanwhile. None: it is over, and has not helped.
    pub(crate) fn step(&self, now: Timestamp) -> Option<Next> {
        let acted = acted(self.decision);
        if let Some(verdict) = set_back(self.decision, now) {
            return Some(Next::Record(verdict));
        }
        let seen = seen_since(self.decision, self.observation);
        if !self.left.is_positive() {
            return self.last_look(seen, now);
        }
        if seen.is_some() || !self.agent_alone {
            return Some(Next::Rest(self.left));
        }
        // It says what it sees by itself, if it is there and heard of the act.
        let in_peace = LOOK_AGAIN - now.duration_since(acted);
        let wait = if in_peace.is_positive() {
            in_peace
        } else {
            let asked = self.asked.filter(|asked| *asked >= acted && asked_lately(*asked, now));
            let Some(asked) = asked else { return Some(Next::Observe(self.asking())) };
            ASK_AGAIN - now.duration_since(asked)
        };
        Some(Next::Rest(wait.min(self.left)))
    }

    /// An act is not said to have failed by old news: where the clocks do not go together, its time
    /// may have been shorter than it seems.
    fn last_look(&self, seen: Option<&Observation>, now: Timestamp) -> Option<Next> {
        if seen.is_some_and(|o| now.duration_since(o.at.0).abs() <= FRESH) {
            return None;
        }
        let over = now.checked_add(self.left).unwrap_or(now);
        match self.asked.filter(|asked| *asked >= over) {
            None => Some(Next::Observe(self.asking())),
            Some(asked) if asked_lately(asked, now) => {
                Some(Next::Rest(ASK_AGAIN - now.duration_since(asked)))
            }
            Some(_) => None,
        }
    }

    fn asking(&self) -> Verdict {
        let message =
            format!("the agent on {} has not said what it sees since the act: it was asked", self.node);
        verdict(self.decision.state, AWAITING_OBSERVATION, message)
    }
}

/// The verdict on an act whose beginning is still to come by the operator's clock: recording it sets
/// `actedAt` to the present, from which its time counts anew.
pub(crate) fn set_back(decision: &Decision, now: Timestamp) -> Option<Verdict> {
    is_ahead(acted(decision), now).then(|| {
        let message = "the operator's clock was set back: the time of the act counts anew";
        verdict(decision.state, CLOCK_SET_BACK, message)
    })
}

/// Whether the eviction helped. It is over when the pod is gone and the agent no longer sees its
/// memory.
pub(super) fn verify(view: &View<'_>, now: Timestamp) -> Step {
    let Some((decision, subject)) = view.decision.zip(view.spec.subject.as_ref()) else {
        return Step::Rest(None);
    };
    let since = acted(decision);
    let pod_gone = gone(view, subject);
    let seen = seen_since(decision, view.observation);
    if pod_gone && seen.is_some_and(|o| is_back(o) || o.bytes == Some(0)) {
        let took = now.duration_since(since).as_secs();
        return end(verdict(
            DecisionState::Succeeded,
            "MemoryReturned",
            format!("the pod is gone and its memory is back, {took} s after the eviction"),
        ));
    }
    let left = grace(view) + VERIFY_WITHIN - now.duration_since(since);
    if let Some(step) = awaited(view, decision, pod_gone, left).step(now) {
        return step.into();
    }
    let message = match (pod_gone, seen) {
        (false, _) => "the pod is still ending",
        (true, Some(_)) => "the pod is gone but the agent still sees its memory in use",
        (true, None) => "the pod is gone but its agent reported nothing since",
    };
    let message = format!("{message}, {} s after its grace period", VERIFY_WITHIN.as_secs());
    end(verdict(DecisionState::Failed, "MemoryNotReturned", message))
}

/// Whether an act helped that the agent carries out. It is over when the agent says that it is done
/// and no longer sees the reason for it. What lasts ends with the policy that asked for it.
pub(super) fn verify_report(view: &View<'_>, now: Timestamp) -> Step {
    use DecisionState::{Failed, Succeeded};

    let Some((decision, subject)) = view.decision.zip(view.spec.subject.as_ref()) else {
        return Step::Rest(None);
    };
    let act = view.spec.proposed.action;
    let since = acted(decision);
    let seen = seen_since(decision, view.observation);
    let returned = seen.is_some_and(|o| is_back(o) || (act == ActionType::Park && o.bytes == Some(0)));
    let took = now.duration_since(since).as_secs();
    let (state, why) = report(view).map_or((ActState::Begun, ""), |r| (r.state, r.message.as_str()));
    match state {
        ActState::Done | ActState::Undone if returned => {
            let message = format!("memory is back, {took} s after {act:?} began{}", colon(why));
            return end(verdict(Succeeded, "MemoryReturned", message));
        }
        ActState::Undone if seen.is_some() => {
            let message = format!("{act:?} was taken back before memory was{}", colon(why));
            return end(verdict(Failed, "ActUndone", message));
        }
        ActState::Failed | ActState::Refused => {
            return end(verdict(Failed, "ActFailed", format!("the agent failed at {act:?}{}", colon(why))));
        }
        ActState::Begun | ActState::Done | ActState::Undone => {}
    }
    if gone(view, subject) {
        return end(verdict(Failed, "PodGone", format!("the pod went before {act:?} was done")));
    }
    let policy = &view.spec.policy;
    match view.asks {
        Asks::Deleted if act != ActionType::Restart => {
            let message = format!("policy {policy} was deleted: {act:?} is taken back");
            return end(verdict(Failed, "PolicyDeleted", message));
        }
        Asks::Nothing if act != ActionType::Restart => {
            let message = format!("policy {policy} no longer asks for {act:?}: it is taken back");
            return end(verdict(Failed, "PolicyGone", message));
        }
        _ => {}
    }
    let within = if act == ActionType::Restart { grace(view) + VERIFY_WITHIN } else { LASTING_WITHIN };
    let left = within - now.duration_since(since);
    if let Some(step) = awaited(view, decision, true, left).step(now) {
        return step.into();
    }
    let what = match (state, seen) {
        (_, None) => "the agent reported nothing since",
        (ActState::Done, _) => "it is done and memory is not back",
        _ => "it is not done",
    };
    let message = format!("{what}, {} s after {act:?} began", within.as_secs());
    end(verdict(Failed, "MemoryNotReturned", message))
}

fn awaited<'a>(
    view: &View<'a>,
    decision: &'a Decision,
    agent_alone: bool,
    left: SignedDuration,
) -> Awaited<'a> {
    let node = view.spec.node.as_str();
    Awaited { node, decision, observation: view.observation, asked: view.asked, agent_alone, left }
}

fn colon(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(": {why}") }
}

fn grace(view: &View<'_>) -> SignedDuration {
    let proposed = view.spec.proposed.grace_period_seconds.map(i64::from);
    SignedDuration::from_secs(proposed.or(view.grace_seconds).unwrap_or(30))
}
