//! The life of an incident: what to do next, given everything that is known now.
//!
//! | from      | to                                                        | when |
//! |-----------|-----------------------------------------------------------|------|
//! | (new)     | Proposed, Approved, Suppressed, Cancelled, Superseded     | it waits, may go on, or never will |
//! | Proposed  | Approved, Suppressed, Cancelled, Superseded, Failed       | as above |
//! | Proposed  | Verifying                                                 | its token is spent and the pod is going, or the agent has begun: an earlier request was accepted after all |
//! | Approved  | Verifying                                                 | the API server accepted the eviction, or the agent has begun |
//! | Approved  | Proposed, Suppressed, Cancelled, Superseded, Failed       | it may not go on after all, or was refused |
//! | Verifying | Succeeded, Failed                                         | the memory came back, or did not in time |
//!
//! Nothing follows the other states. Every step is decided from present facts alone, so that after
//! a crash, or by another leader, it is simply decided again.
//!
//! An eviction is the operator's own. `Unready`, `Park` and a restart in place are carried out by the
//! agent of the node, once they are approved; what it reports of them moves their incidents on. A
//! drain has a machine of its own: see [`crate::drain`].

use highwater_crds::{
    ActReport, ActState, ActionType, Decision, DecisionState, GpuMemoryIncidentSpec, IncidentKind, Mode,
    Observation, ObservationState, Proposal, Subject,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use crate::{leak_acts, pod::PodFacts};

/// The oldest observation that may be acted on.
pub const FRESH: SignedDuration = SignedDuration::from_secs(5);
/// How long after its grace period an evicted pod's memory may take to come back.
pub const VERIFY_WITHIN: SignedDuration = SignedDuration::from_secs(120);
/// Reason of an incident that waits for a token.
pub const BUDGET_EXHAUSTED: &str = "BudgetExhausted";
/// Reason of an incident whose eviction a disruption budget forbids for now.
pub const DISRUPTION_BUDGET: &str = "DisruptionBudget";
/// How long a node may be without a Ready agent before its incidents end: nobody can say any more
/// what the pod holds.
pub const AGENT_GONE: SignedDuration = SignedDuration::from_secs(600);
/// How long the agent has to begin an act that was approved.
pub const BEGIN_WITHIN: SignedDuration = SignedDuration::from_secs(60);
/// How long `Unready` and `Park` may take to bring memory back: requests that run have to end, and
/// 141 GiB take 100 s to be copied to the host.
pub const LASTING_WITHIN: SignedDuration = SignedDuration::from_secs(300);
/// Reason of an incident that waits because too much of the fleet is condemned.
pub const FLEET_HALTED: &str = "FleetHalted";
/// Reason of an incident whose token is reserved.
pub const WITHIN_BUDGET: &str = "WithinBudget";
/// Reason of an incident whose workload was restarted in vain.
pub const TICKET_NEEDED: &str = "TicketNeeded";
/// How long the agent is given to answer before it is asked again.
const ASK_AGAIN: SignedDuration = SignedDuration::from_secs(30);
/// How soon an incident that waits for something without events of its own is looked at again.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_secs(10);
/// The longest wait for a token.
const LONGEST_WAIT: SignedDuration = SignedDuration::from_secs(300);

/// Who carries an act out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// The operator, by an eviction.
    Eviction,
    /// The agent, once it is approved.
    Agent,
    /// The operator, by a cordon and evictions: see [`crate::drain`].
    Drain,
    /// The agent, at once: there is nothing to decide.
    Nobody,
}

/// Who carries out what an incident proposes.
pub const fn carrier(proposed: &Proposal) -> Carrier {
    match proposed.action {
        ActionType::Restart if !proposed.in_place => Carrier::Eviction,
        ActionType::Unready | ActionType::Park | ActionType::Restart => Carrier::Agent,
        ActionType::Drain => Carrier::Drain,
        ActionType::Signal | ActionType::Hook | ActionType::Freeze | ActionType::Reclaim => Carrier::Nobody,
    }
}

/// What is known about an incident.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// The evidence.
    pub spec: &'a GpuMemoryIncidentSpec,
    /// What was decided before.
    pub decision: Option<&'a Decision>,
    /// What the agent saw last.
    pub observation: Option<&'a Observation>,
    /// When the agent was last asked to look again.
    pub asked: Option<Timestamp>,
    /// The pod that has the subject's name, as just read.
    pub pod: Option<&'a PodFacts>,
    /// Whether that pod is ending because of an eviction.
    pub evicted: bool,
    /// Whether a token for this act is in the ledger, so that it may have been requested before.
    pub token: bool,
    /// How long the node has had no Ready agent. None: it has one.
    pub agent_away: Option<SignedDuration>,
    /// The pod's grace period in seconds.
    pub grace_seconds: Option<i64>,
    /// What the policy asks for now.
    pub asks: Asks<'a>,
    /// What stops new acts, if something does.
    pub paused: Option<String>,
    /// Another incident whose act is in the way.
    pub rival: Option<Rival<'a>>,
    /// Why the whole fleet stands still, if it does.
    pub halted: Option<String>,
    /// What the budgets say against it, if they do.
    pub refusal: Option<Refusal>,
    /// Why the disruption budget that refused the eviction before still refuses it, if it does.
    pub blocked: Option<String>,
    /// Why another restart of the workload would be in vain, if it would: see
    /// [`crate::budget::TokenLedger::in_vain`].
    pub in_vain: Option<String>,
    /// What else is known where it is about a leak.
    pub leak: Option<leak_acts::Standing>,
}

/// What the policy of an incident asks for now.
#[derive(Clone, Copy, Debug)]
pub enum Asks<'a> {
    /// There is no such policy.
    Deleted,
    /// It no longer asks for this act on this device.
    Nothing,
    /// Nobody can say, since the node's plan and report are not there.
    Unknown,
    /// It still asks for it.
    Act {
        /// The owner kinds whose pods may be restarted.
        owner_kinds: &'a [String],
        /// Whether its namespaces include the subject's.
        namespace_selected: bool,
    },
}

/// Another incident whose act is in the way.
#[derive(Clone, Copy, Debug)]
pub enum Rival<'a> {
    /// It has restarted the same pod.
    Subject(&'a str),
    /// It acts on the same device or pod, or may be about to.
    Device(&'a str),
}

/// Where an incident stands in the order of acts on one device or pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn<'a> {
    /// Its state. None: nothing was decided yet.
    pub state: Option<DecisionState>,
    /// Since when.
    pub since: Timestamp,
    /// UID of the incident.
    pub uid: &'a str,
}

impl Turn<'_> {
    /// Whether this incident waits for `other`: its act is under way, or is approved and may have
    /// been requested already. Of several that are approved, as an earlier leader may leave them,
    /// one goes first, so that they do not wait for each other.
    pub fn waits_for(&self, other: &Self) -> bool {
        match (self.state, other.state) {
            (Some(DecisionState::Approved), Some(DecisionState::Approved)) => {
                (other.since, other.uid) < (self.since, self.uid)
            }
            (_, Some(DecisionState::Approved | DecisionState::Verifying)) => true,
            _ => false,
        }
    }
}

/// What the budgets say against an act.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// What each said, refusals first.
    pub said: Vec<String>,
    /// When a token comes free, if that is a matter of time.
    pub retry_at: Option<Timestamp>,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Nothing, until something changes or this time has passed.
    Rest(Option<SignedDuration>),
    /// Record a verdict, and look again after this time.
    Record(Verdict, Option<SignedDuration>),
    /// Ask the agent for a fresh observation, and record that it is awaited.
    Observe(Verdict),
    /// Ask the API server whether it would evict the pod, and end.
    Rehearse,
    /// Reserve a token, record that, evict the pod, record that.
    Act,
    /// Reserve a token and record that: the agent carries the act out.
    Allow,
}

/// A state and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The state.
    pub state: DecisionState,
    /// Why, in one CamelCase word.
    pub reason: &'static str,
    /// Why, in a sentence.
    pub message: String,
}

/// What came of an eviction request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// The API server accepted it.
    Accepted,
    /// There is no such pod.
    Gone,
    /// The pod changed since it was read.
    Conflict,
    /// A disruption budget forbids it for now.
    Budget(String),
    /// The API server has no time, or did not answer: nobody knows whether it was done.
    Unclear(String),
    /// It will never be accepted.
    Denied(String),
}

pub(crate) fn verdict(state: DecisionState, reason: &'static str, message: impl Into<String>) -> Verdict {
    Verdict { state, reason, message: message.into() }
}

/// What to do next about an incident.
pub fn decide(view: &View<'_>, now: Timestamp) -> Step {
    use DecisionState::{Approved, Proposed, Suppressed, Verifying};

    let state = view.decision.map(|d| d.state);
    let by_agent = carrier(&view.spec.proposed) == Carrier::Agent;
    match state {
        Some(state) if state.is_final() => return Step::Rest(None),
        Some(Verifying) if by_agent => return verify_report(view, now),
        Some(Verifying) => return verify(view, now),
        _ => {}
    }
    let Some(subject) = &view.spec.subject else {
        return end(verdict(Suppressed, "NoCulprit", "no pod is over its due, so nobody is restarted"));
    };
    // An approved act may have been done just before its leader died, and one that waits again
    // may have been accepted although no answer came.
    let attempted = state == Some(Approved) || (state == Some(Proposed) && view.token);
    if attempted && by_agent {
        if let Some(report) = report(view) {
            return Step::Record(after_report(view.spec, report), None);
        }
    } else if attempted && (view.evicted || gone(view, subject)) {
        return Step::Record(evicted(), None);
    }
    if let Some(verdict) = never(view, subject) {
        return end(verdict);
    }
    if let Some(step) = leak_acts::not_due(view, now) {
        return step;
    }
    if view.spec.mode == Mode::DryRun {
        if by_agent {
            return end(rehearsed(view.spec.proposed.action, view.refusal.as_ref()));
        }
        return Step::Rehearse;
    }
    if let Some(gone) = agent_gone(view) {
        return end(gone);
    }
    if let Some(step) = held_back(view, now) {
        return step;
    }
    match (by_agent, view.decision) {
        (true, Some(decision)) if decision.state == Approved => awaits_agent(view, decision, now),
        (_, _) => ask_first(view, now).unwrap_or(if by_agent { Step::Allow } else { Step::Act }),
    }
}

/// The end of an incident about which nobody can say any more how it stands.
pub(crate) fn agent_gone(view: &View<'_>) -> Option<Verdict> {
    let away = view.agent_away.filter(|away| *away >= AGENT_GONE)?;
    let message = format!(
        "node {} has had no Ready agent for {} s: nobody can say what the pod holds",
        view.spec.node,
        away.as_secs()
    );
    Some(verdict(DecisionState::Cancelled, "AgentGone", message))
}

/// What the agent has reported of the act, if anything.
fn report<'a>(view: &View<'a>) -> Option<&'a ActReport> {
    view.observation.and_then(|o| o.act.as_ref())
}

/// The verdict on an approved act that a first report leads to.
fn after_report(spec: &GpuMemoryIncidentSpec, report: &ActReport) -> Verdict {
    use DecisionState::{Cancelled, Failed, Verifying};

    let act = spec.proposed.action;
    let with = |what: &str| match report.message.as_str() {
        "" => format!("the agent {what} {act:?}"),
        why => format!("the agent {what} {act:?}: {why}"),
    };
    match report.state {
        ActState::Begun | ActState::Done | ActState::Undone => verdict(Verifying, "Begun", with("has begun")),
        ActState::Refused => verdict(Cancelled, "ActRefused", with("refused")),
        ActState::Failed => verdict(Failed, "ActFailed", with("failed at")),
    }
}

/// An approved act that the agent has not begun.
fn awaits_agent(view: &View<'_>, decision: &Decision, now: Timestamp) -> Step {
    let left = BEGIN_WITHIN - now.duration_since(decision.since.0);
    if left.is_positive() {
        return Step::Rest(Some(left));
    }
    let message = format!(
        "the agent on {} did not begin within {} s of the approval",
        view.spec.node,
        BEGIN_WITHIN.as_secs()
    );
    end(verdict(DecisionState::Failed, "NotBegun", message))
}

fn end(verdict: Verdict) -> Step {
    Step::Record(verdict, None)
}

fn gone(view: &View<'_>, subject: &Subject) -> bool {
    view.pod.is_none_or(|pod| pod.uid != subject.uid)
}

/// Why the act will never be done, if so.
fn never(view: &View<'_>, subject: &Subject) -> Option<Verdict> {
    use DecisionState::{Cancelled, Superseded, Suppressed};

    let policy = &view.spec.policy;
    let (owner_kinds, namespace_selected) = match view.asks {
        Asks::Deleted => {
            return Some(verdict(Cancelled, "PolicyDeleted", format!("policy {policy} was deleted")));
        }
        Asks::Nothing => {
            let message = format!("policy {policy} no longer asks for this on {}", view.spec.node);
            return Some(verdict(Suppressed, "PolicyGone", message));
        }
        // Waits; see `not_now`.
        Asks::Unknown => return None,
        Asks::Act { owner_kinds, namespace_selected } => (owner_kinds, namespace_selected),
    };
    if !matches!(view.spec.mode, Mode::DryRun | Mode::Enforce) {
        return Some(verdict(Suppressed, "ObserveOnly", format!("policy {policy} only observes")));
    }
    let leak = view.spec.kind == IncidentKind::Leak;
    if !leak && !matches!(carrier(&view.spec.proposed), Carrier::Eviction | Carrier::Agent) {
        let message =
            format!("{:?} is done on the node; there is nothing to decide", view.spec.proposed.action);
        return Some(verdict(Suppressed, "NotAnAct", message));
    }
    // Before the pod is looked at, which is ending because of just that.
    if let (Some(Rival::Subject(other)), Mode::Enforce) = (view.rival, view.spec.mode) {
        let message = format!("incident {other} restarts the same pod");
        return Some(verdict(Superseded, "SubjectBeingRestarted", message));
    }
    let Some(pod) = view.pod else {
        return Some(verdict(Cancelled, "PodGone", "the pod is gone"));
    };
    let because = |state, reason, message: String| Some(verdict(state, reason, message));
    if pod.uid != subject.uid {
        return because(
            Cancelled,
            "PodReplaced",
            format!("the pod of this name is now another, {}", pod.uid),
        );
    }
    if pod.node.as_ref() != Some(&view.spec.node) {
        let place = pod.node.as_deref().unwrap_or("no node");
        return because(Suppressed, "NotOnNode", format!("the pod is on {place}, not on {}", view.spec.node));
    }
    if pod.terminating || pod.finished {
        return because(Cancelled, "PodGone", "the pod is already ending".to_owned());
    }
    if !namespace_selected {
        let message = format!("policy {policy} does not select namespace {} for acts", subject.namespace);
        return because(Suppressed, "NamespaceNotSelected", message);
    }
    if pod.mirror {
        return because(Suppressed, "MirrorPod", "a static pod cannot be evicted".to_owned());
    }
    if pod.system_priority {
        return because(
            Suppressed,
            "SystemPriority",
            format!("the pod has system priority {}", pod.priority),
        );
    }
    match pod.owner.as_ref().map(|o| o.kind.as_str()) {
        None => {
            return because(Suppressed, "NoOwner", "nothing would start the pod again".to_owned());
        }
        Some("DaemonSet") => {
            return because(Suppressed, "DaemonSetPod", "pods of a DaemonSet are never restarted".to_owned());
        }
        Some(kind) if !owner_kinds.iter().any(|k| k == kind) => {
            let message = format!("the pod's owner is a {kind}; listed are {}", owner_kinds.join(", "));
            return because(Suppressed, "OwnerKindNotListed", message);
        }
        Some(_) => {}
    }
    match latest(view).map(|o| o.state) {
        Some(ObservationState::Recovered) => {
            let what = if leak { "the suspicion cleared" } else { "memory fell below the mark" };
            return because(Cancelled, "Recovered", format!("{what} before anything was done"));
        }
        Some(ObservationState::Gone) => {
            return because(Cancelled, "Recovered", "the pod holds no memory there any more".to_owned());
        }
        _ => {}
    }
    // Of a leak it matters only once an act is due: see `leak_acts`.
    let in_vain = view.in_vain.as_ref().filter(|_| !leak && view.spec.proposed.action == ActionType::Restart);
    match (in_vain, view.spec.mode) {
        (Some(why), Mode::Enforce) => because(Suppressed, TICKET_NEEDED, why.clone()),
        _ => None,
    }
}

/// What the act has to wait for, if anything.
fn held_back(view: &View<'_>, now: Timestamp) -> Option<Step> {
    let wait = |reason, message: String, again| {
        Some(Step::Record(verdict(DecisionState::Proposed, reason, message), Some(again)))
    };
    if let Some(what) = &view.paused {
        return wait("Paused", format!("acts are paused by annotation on {what}"), LOOK_AGAIN);
    }
    if let Some(why) = &view.halted {
        return wait(FLEET_HALTED, why.clone(), LOOK_AGAIN);
    }
    if matches!(view.asks, Asks::Unknown) {
        let message = format!("the GpuMemoryNode {} cannot be read: see the operator's log", view.spec.node);
        return wait("AwaitingObservation", message, LOOK_AGAIN);
    }
    if let Some(Rival::Device(other) | Rival::Subject(other)) = view.rival {
        let message = format!("incident {other} has an act under way on this device or pod");
        return wait("AwaitingVerification", message, LOOK_AGAIN);
    }
    if let Some(refusal) = &view.refusal {
        let again = refusal.retry_at.map_or(LOOK_AGAIN, |at| {
            at.duration_since(now).clamp(SignedDuration::from_secs(1), LONGEST_WAIT)
        });
        return Some(Step::Record(out_of_budget(&refusal.said), Some(again)));
    }
    if let Some(why) = &view.blocked {
        return wait(DISRUPTION_BUDGET, why.clone(), LOOK_AGAIN);
    }
    None
}

/// Whether the agent has to look again before the act.
fn ask_first(view: &View<'_>, now: Timestamp) -> Option<Step> {
    if !is_fresh(view.spec, view.observation, now) {
        let verdict = stale(view.spec, view.observation, now);
        return Some(match view.asked {
            Some(asked) if asked_lately(asked, now) => Step::Record(verdict, Some(LOOK_AGAIN)),
            _ => Step::Observe(verdict),
        });
    }
    None
}

/// Whether the agent was asked too recently to be asked again.
pub(crate) fn asked_lately(asked: Timestamp, now: Timestamp) -> bool {
    now.duration_since(asked) < ASK_AGAIN
}

/// The verdict on an act that waits for a fresh observation.
pub(crate) fn stale(
    spec: &GpuMemoryIncidentSpec,
    observation: Option<&Observation>,
    now: Timestamp,
) -> Verdict {
    let latest = observation.filter(|o| o.at.0 >= spec.evidence.at.0);
    let ahead = latest.map_or(spec.evidence.at.0, |o| o.at.0).duration_since(now);
    let message = if ahead > FRESH {
        let ahead = ahead.as_secs();
        format!("the clock of {} is {ahead} s ahead of the operator's: set both right", spec.node)
    } else {
        format!(
            "what the agent on {} last saw is older than {} s or not certain: a fresh look was asked for",
            spec.node,
            FRESH.as_secs()
        )
    };
    verdict(DecisionState::Proposed, "AwaitingObservation", message)
}

/// Whether the last look at the subject is recent and found it over. The evidence itself is the
/// first look. A look from the future is not recent either: one of the clocks is wrong.
pub fn is_fresh(spec: &GpuMemoryIncidentSpec, observation: Option<&Observation>, now: Timestamp) -> bool {
    let (at, over) = match observation {
        Some(o) if o.at.0 >= spec.evidence.at.0 => (o.at.0, o.state == ObservationState::Over),
        _ => (spec.evidence.at.0, true),
    };
    over && now.duration_since(at).abs() <= FRESH
}

fn latest<'a>(view: &View<'a>) -> Option<&'a Observation> {
    view.observation.filter(|o| o.at.0 >= view.spec.evidence.at.0)
}

fn evicted() -> Verdict {
    verdict(DecisionState::Verifying, "Evicted", "the pod was evicted; its memory is awaited")
}

/// Whether the act helped. It is over when the pod is gone and the agent no longer sees its
/// memory.
fn verify(view: &View<'_>, now: Timestamp) -> Step {
    let Some((decision, subject)) = view.decision.zip(view.spec.subject.as_ref()) else {
        return Step::Rest(None);
    };
    let since = decision.acted_at.as_ref().unwrap_or(&decision.since).0;
    let pod_gone = gone(view, subject);
    let seen = view.observation.filter(|o| o.at.0 >= since);
    let returned = seen.is_some_and(|o| {
        matches!(o.state, ObservationState::Gone | ObservationState::Recovered) || o.bytes == Some(0)
    });
    if pod_gone && returned {
        let took = now.duration_since(since).as_secs();
        return end(verdict(
            DecisionState::Succeeded,
            "MemoryReturned",
            format!("the pod is gone and its memory is back, {took} s after the eviction"),
        ));
    }
    let left = grace(view) + VERIFY_WITHIN - now.duration_since(since);
    if left.is_positive() {
        return Step::Rest(Some(left));
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
fn verify_report(view: &View<'_>, now: Timestamp) -> Step {
    use DecisionState::{Failed, Succeeded};

    let Some((decision, subject)) = view.decision.zip(view.spec.subject.as_ref()) else {
        return Step::Rest(None);
    };
    let act = view.spec.proposed.action;
    let since = decision.acted_at.as_ref().unwrap_or(&decision.since).0;
    let seen = view.observation.filter(|o| o.at.0 >= since);
    let returned = seen.is_some_and(|o| {
        matches!(o.state, ObservationState::Gone | ObservationState::Recovered)
            || (act == ActionType::Park && o.bytes == Some(0))
    });
    let took = now.duration_since(since).as_secs();
    let (state, why) = report(view).map_or((ActState::Begun, ""), |r| (r.state, r.message.as_str()));
    match state {
        ActState::Done | ActState::Undone if returned => {
            let message = format!("memory is back, {took} s after {act:?} began{}", colon(why));
            return end(verdict(Succeeded, "MemoryReturned", message));
        }
        ActState::Undone => {
            let message = format!("{act:?} was taken back before memory was{}", colon(why));
            return end(verdict(Failed, "ActUndone", message));
        }
        ActState::Failed | ActState::Refused => {
            return end(verdict(Failed, "ActFailed", format!("the agent failed at {act:?}{}", colon(why))));
        }
        ActState::Begun | ActState::Done => {}
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
    if left.is_positive() {
        return Step::Rest(Some(left));
    }
    let what = match (state, seen) {
        (_, None) => "the agent reported nothing since",
        (ActState::Done, _) => "it is done and memory is not back",
        _ => "it is not done",
    };
    let message = format!("{what}, {} s after {act:?} began", within.as_secs());
    end(verdict(Failed, "MemoryNotReturned", message))
}

fn colon(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(": {why}") }
}

fn grace(view: &View<'_>) -> SignedDuration {
    let proposed = view.spec.proposed.grace_period_seconds.map(i64::from);
    SignedDuration::from_secs(proposed.or(view.grace_seconds).unwrap_or(30))
}

/// The verdict that a refused token leads to.
pub fn out_of_budget(said: &[String]) -> Verdict {
    verdict(DecisionState::Proposed, BUDGET_EXHAUSTED, said.join("; "))
}

/// The verdict that a reserved token leads to.
pub fn approved(spec: &GpuMemoryIncidentSpec) -> Verdict {
    let message = match carrier(&spec.proposed) {
        Carrier::Agent => {
            format!("a token is reserved; the agent on {} may begin {:?}", spec.node, spec.proposed.action)
        }
        _ => "a token is reserved; the eviction follows".to_owned(),
    };
    verdict(DecisionState::Approved, WITHIN_BUDGET, message)
}

/// The verdict on an act of the agent that is only rehearsed.
fn rehearsed(act: ActionType, refusal: Option<&Refusal>) -> Verdict {
    let would = match refusal {
        None => format!("{act:?} would have been approved"),
        Some(refusal) => format!("{act:?} would have waited for its budget: {}", refusal.said.join("; ")),
    };
    verdict(DecisionState::Suppressed, "DryRun", would)
}

/// The verdict that an eviction request leads to; None: nothing changed, look at everything again.
/// A pod that is gone after an earlier request (`attempted`) went because of that.
pub fn after_eviction(eviction: &Eviction, attempted: bool) -> Option<Verdict> {
    match eviction {
        Eviction::Accepted => Some(evicted()),
        Eviction::Gone if attempted => Some(evicted()),
        Eviction::Gone => {
            Some(verdict(DecisionState::Cancelled, "PodGone", "the pod was gone before it could be evicted"))
        }
        Eviction::Budget(why) => Some(verdict(DecisionState::Proposed, DISRUPTION_BUDGET, why.clone())),
        Eviction::Denied(why) => Some(verdict(DecisionState::Failed, "EvictionRefused", why.clone())),
        Eviction::Conflict | Eviction::Unclear(_) => None,
    }
}

/// The verdict that a rehearsed eviction leads to; None: it said nothing, ask again. `budgets` is
/// what the budgets would have said against it.
pub fn after_rehearsal(eviction: &Eviction, refusal: Option<&Refusal>) -> Option<Verdict> {
    let would = match (eviction, refusal) {
        (Eviction::Accepted, None) => {
            "the pod would have been evicted: the API server would allow it".to_owned()
        }
        (Eviction::Accepted, Some(refusal)) => {
            format!("the pod would have waited for its budget: {}", refusal.said.join("; "))
        }
        (Eviction::Budget(why), _) => {
            format!("the eviction would have waited for a disruption budget: {why}")
        }
        (Eviction::Denied(why), _) => format!("the eviction would have been refused: {why}"),
        (Eviction::Gone, _) => {
            return Some(verdict(DecisionState::Cancelled, "PodGone", "the pod is gone"));
        }
        (Eviction::Conflict | Eviction::Unclear(_), _) => return None,
    };
    Some(verdict(DecisionState::Suppressed, "DryRun", would))
}

/// Whether `new` may follow `old`.
pub fn may_follow(old: Option<DecisionState>, new: DecisionState) -> bool {
    use DecisionState::{Approved, Failed, Proposed, Succeeded, Verifying};
    match old {
        Some(state) if state == new => true,
        None => !matches!(new, Verifying | Succeeded),
        Some(Proposed | Approved) => new != Succeeded,
        Some(Verifying) => matches!(new, Succeeded | Failed),
        Some(_) => false,
    }
}

/// What is stored beside a verdict.
#[derive(Clone, Debug, Default)]
pub struct Particulars {
    /// Top owner of the subject, as `Kind/name`.
    pub workload: Option<String>,
    /// What the budgets said. Empty: as before.
    pub budgets: Vec<String>,
    /// When the act was accepted. None: as before.
    pub acted_at: Option<Timestamp>,
    /// Where there is room for what has to go. Empty: as before.
    pub targets: Vec<String>,
}

/// The decision to store, or None where `old` says the same or may not be followed by it.
pub fn record(
    old: Option<&Decision>,
    verdict: &Verdict,
    particulars: Particulars,
    now: Timestamp,
) -> Option<Decision> {
    if !may_follow(old.map(|o| o.state), verdict.state) {
        return None;
    }
    let since = old.filter(|o| o.state == verdict.state).map_or(MicroTime(now), |o| o.since.clone());
    let kept = |list: Vec<String>, before: fn(&Decision) -> &Vec<String>| match old {
        Some(old) if list.is_empty() => before(old).clone(),
        _ => list,
    };
    let new = Decision {
        state: verdict.state,
        reason: verdict.reason.to_owned(),
        // The schema takes 1024 characters.
        message: verdict.message.chars().take(1024).collect(),
        since,
        workload: particulars.workload.or_else(|| old?.workload.clone()),
        budgets: kept(particulars.budgets, |old| &old.budgets),
        acted_at: particulars.acted_at.map(MicroTime).or_else(|| old?.acted_at.clone()),
        targets: kept(particulars.targets, |old| &old.targets),
    };
    (old != Some(&new)).then_some(new)
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};
    use serde_json::json;

    use super::*;
    use crate::pod::Owner;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn spec(mode: &str) -> GpuMemoryIncidentSpec {
        serde_json::from_value(json!({
            "kind": "QuotaBreach", "mode": mode, "policy": "serving", "node": "n1", "device": "GPU-1", "episode": 1,
            "subject": {"namespace": "team", "name": "hog-1", "uid": "u1"},
            "evidence": {"at": "1970-01-01T00:01:40.000000Z"},
            "proposed": {"action": "Restart", "gracePeriodSeconds": 10},
        }))
        .unwrap()
    }

    fn pod() -> PodFacts {
        PodFacts {
            namespace: "team".into(),
            name: "hog-1".into(),
            uid: "u1".into(),
            node: Some("n1".into()),
            owner: Some(Owner {
                api_version: "apps/v1".into(),
                kind: "ReplicaSet".into(),
                name: "hog".into(),
                uid: "r".into(),
            }),
            ..PodFacts::default()
        }
    }

    fn kinds() -> Vec<String> {
        vec!["ReplicaSet".into()]
    }

    fn decision(state: DecisionState) -> Decision {
        Decision {
            state,
            reason: "R".into(),
            message: String::new(),
            since: MicroTime(at(100)),
            workload: None,
            budgets: vec![],
            acted_at: None,
            targets: vec![],
        }
    }

    fn observation(state: &str, second: i64) -> Observation {
        let at = format!("{:.6}", at(second));
        serde_json::from_value(json!({"state": state, "at": at})).unwrap()
    }

    /// A view in which everything speaks for the act, at second 100.
    fn view<'a>(spec: &'a GpuMemoryIncidentSpec, pod: &'a PodFacts, kinds: &'a [String]) -> View<'a> {
        View {
            spec,
            decision: None,
            observation: None,
            asked: None,
            pod: Some(pod),
            evicted: false,
            token: false,
            agent_away: None,
            grace_seconds: Some(30),
            asks: Asks::Act { owner_kinds: kinds, namespace_selected: true },
            paused: None,
            rival: None,
            halted: None,
            refusal: None,
            blocked: None,
            in_vain: None,
            leak: None,
        }
    }

    fn outcome(view: &View<'_>, second: i64) -> String {
        match decide(view, at(second)) {
            Step::Record(v, _) | Step::Observe(v) => format!("{:?}/{}", v.state, v.reason),
            step => format!("{step:?}"),
        }
    }

    #[test]
    fn a_fresh_breach_of_an_eligible_pod_is_acted_on() {
        let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
        assert_eq!(decide(&view(&spec, &pod, &kinds), at(101)), Step::Act);
        let approved = decision(DecisionState::Approved);
        let resumed = View { decision: Some(&approved), ..view(&spec, &pod, &kinds) };
        assert_eq!(decide(&resumed, at(102)), Step::Act);
    }

    #[test]
    fn a_dry_run_is_rehearsed_even_while_paused_or_out_of_budget() {
        let (spec, pod, kinds) = (spec("DryRun"), pod(), kinds());
        let refusal = Refusal { said: vec!["no".into()], retry_at: None };
        let view =
            View { paused: Some("node n1".into()), refusal: Some(refusal), ..view(&spec, &pod, &kinds) };
        assert_eq!(decide(&view, at(300)), Step::Rehearse);
    }

    #[test]
    fn every_reason_never_to_act_is_named() {
        let (enforce, good, kinds) = (spec("Enforce"), pod(), kinds());
        let case = |change: &dyn Fn(&mut PodFacts), expected: &str| {
            let mut pod = good.clone();
            change(&mut pod);
            assert_eq!(outcome(&view(&enforce, &pod, &kinds), 101), expected);
        };
        case(&|p| p.uid = "u2".into(), "Cancelled/PodReplaced");
        case(&|p| p.node = Some("n2".into()), "Suppressed/NotOnNode");
        case(&|p| p.terminating = true, "Cancelled/PodGone");
        case(&|p| p.mirror = true, "Suppressed/MirrorPod");
        case(&|p| p.system_priority = true, "Suppressed/SystemPriority");
        case(&|p| p.owner = None, "Suppressed/NoOwner");
        case(&|p| p.owner.as_mut().unwrap().kind = "DaemonSet".into(), "Suppressed/DaemonSetPod");
        case(&|p| p.owner.as_mut().unwrap().kind = "Job".into(), "Suppressed/OwnerKindNotListed");

        let base = view(&enforce, &good, &kinds);
        assert_eq!(outcome(&View { pod: None, ..base.clone() }, 101), "Cancelled/PodGone");
        assert_eq!(outcome(&View { asks: Asks::Deleted, ..base.clone() }, 101), "Cancelled/PolicyDeleted");
        assert_eq!(outcome(&View { asks: Asks::Nothing, ..base.clone() }, 101), "Suppressed/PolicyGone");
        let unselected = Asks::Act { owner_kinds: &kinds, namespace_selected: false };
        assert_eq!(
            outcome(&View { asks: unselected, ..base.clone() }, 101),
            "Suppressed/NamespaceNotSelected"
        );
        let rival = Some(Rival::Subject("other"));
        assert_eq!(outcome(&View { rival, ..base.clone() }, 101), "Superseded/SubjectBeingRestarted");

        let nobody = GpuMemoryIncidentSpec { subject: None, ..enforce.clone() };
        assert_eq!(outcome(&view(&nobody, &good, &kinds), 101), "Suppressed/NoCulprit");
        let observe = spec("Observe");
        assert_eq!(outcome(&view(&observe, &good, &kinds), 101), "Suppressed/ObserveOnly");
    }

    #[test]
    fn d01_what_recovered_before_the_act_is_cancelled() {
        let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
        for (state, second, expected) in [
            ("Recovered", 101, "Cancelled/Recovered"),
            ("Gone", 101, "Cancelled/Recovered"),
            ("Over", 101, "Act"),
            ("Recovered", 99, "Act"), // older than the evidence: of an earlier episode
        ] {
            let seen = observation(state, second);
            let view = View { observation: Some(&seen), ..view(&spec, &pod, &kinds) };
            assert_eq!(outcome(&view, 102), expected, "{state} at {second}");
        }
    }

    #[test]
    fn every_wait_is_named() {
        let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
        let base = view(&spec, &pod, &kinds);
        assert_eq!(outcome(&View { paused: Some("node n1".into()), ..base.clone() }, 101), "Proposed/Paused");
        assert_eq!(
            outcome(&View { halted: Some("why".into()), ..base.clone() }, 101),
            "Proposed/FleetHalted"
        );
        let rival = Some(Rival::Device("other"));
        assert_eq!(outcome(&View { rival, ..base.clone() }, 101), "Proposed/AwaitingVerification");
        let refusal = Some(Refusal { said: vec![], retry_at: Some(at(130)) });
        let Step::Record(v, Some(again)) = decide(&View { refusal, ..base.clone() }, at(101)) else {
            panic!()
        };
        assert_eq!((v.reason, again.as_secs()), ("BudgetExhausted", 29));

        let blocked = View { blocked: Some("pdb x".into()), ..base.clone() };
        assert_eq!(
            outcome(&blocked, 300),
            "Proposed/DisruptionBudget",
            "no observation is asked for in vain"
        );

        assert!(matches!(decide(&base, at(106)), Step::Observe(_)));
        let asked = View { asked: Some(at(106)), ..base.clone() };
        assert_eq!(outcome(&asked, 110), "Proposed/AwaitingObservation");
        assert!(matches!(decide(&asked, at(110)), Step::Record(..)), "it is not asked for twice");
        assert!(matches!(decide(&asked, at(136)), Step::Observe(_)), "an agent that was away is asked again");
        let unsure = observation("Unknown", 101);
        assert!(matches!(decide(&View { observation: Some(&unsure), ..base }, at(102)), Step::Observe(_)));
    }

    #[test]
    fn an_approved_act_that_was_done_before_a_crash_is_verified_not_repeated() {
        let (spec, mut pod, kinds) = (spec("Enforce"), pod(), kinds());
        pod.terminating = true;
        let approved = decision(DecisionState::Approved);
        let base = View { decision: Some(&approved), ..view(&spec, &pod, &kinds) };
        assert_eq!(outcome(&View { evicted: true, ..base.clone() }, 102), "Verifying/Evicted");
        assert_eq!(outcome(&View { pod: None, ..base.clone() }, 102), "Verifying/Evicted");
        assert_eq!(outcome(&base, 102), "Cancelled/PodGone", "somebody else deleted it");
    }

    #[test]
    fn an_act_that_was_requested_without_an_answer_is_verified_though_it_waits_again() {
        let (spec, mut pod, kinds) = (spec("Enforce"), pod(), kinds());
        pod.terminating = true;
        let proposed = decision(DecisionState::Proposed);
        let base = View { decision: Some(&proposed), token: true, ..view(&spec, &pod, &kinds) };
        assert_eq!(outcome(&View { evicted: true, ..base.clone() }, 102), "Verifying/Evicted");
        assert_eq!(outcome(&View { pod: None, ..base.clone() }, 102), "Verifying/Evicted");
        assert_eq!(outcome(&base, 102), "Cancelled/PodGone", "somebody else deleted it");
        let without = View { token: false, pod: None, ..base };
        assert_eq!(outcome(&without, 102), "Cancelled/PodGone", "it was never requested");
    }

    fn agent_act(action: &str, in_place: bool) -> GpuMemoryIncidentSpec {
        let mut spec = spec("Enforce");
        spec.proposed = serde_json::from_value(json!({"action": action, "inPlace": in_place})).unwrap();
        spec
    }

    fn reported(state: &str, act: &str, second: i64) -> Observation {
        let at = format!("{:.6}", at(second));
        let value = json!({"state": state, "at": at, "act": {"state": act, "message": "why"}});
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn what_the_agent_carries_out_is_approved_and_then_waited_for() {
        let (pod, kinds) = (pod(), kinds());
        for spec in [agent_act("Unready", false), agent_act("Park", false), agent_act("Restart", true)] {
            let base = view(&spec, &pod, &kinds);
            assert_eq!(decide(&base, at(101)), Step::Allow);
            let approved = decision(DecisionState::Approved);
            let waiting = View { decision: Some(&approved), token: true, ..base };
            assert!(outcome(&waiting, 159).starts_with("Rest"), "no fresh look is asked for");
            assert_eq!(outcome(&waiting, 160), "Failed/NotBegun");
            let paused = View { paused: Some("node n1".into()), ..waiting.clone() };
            assert_eq!(outcome(&paused, 102), "Proposed/Paused", "it is taken back before it begins");
            for (act, expected) in [
                ("Begun", "Verifying/Begun"),
                ("Done", "Verifying/Begun"),
                ("Undone", "Verifying/Begun"),
                ("Refused", "Cancelled/ActRefused"),
                ("Failed", "Failed/ActFailed"),
            ] {
                let seen = reported("Over", act, 101);
                let paused = View { observation: Some(&seen), ..paused.clone() };
                assert_eq!(outcome(&paused, 102), expected, "{act} was begun before the pause");
                let proposed = decision(DecisionState::Proposed);
                let again = View { decision: Some(&proposed), ..paused.clone() };
                assert_eq!(outcome(&again, 102), expected, "{act}: its token is spent");
                let without = View { token: false, ..again };
                assert_eq!(outcome(&without, 102), "Proposed/Paused", "{act} without a token is not ours");
            }
        }
    }

    #[test]
    fn an_act_of_the_agent_has_helped_when_it_is_done_and_memory_is_back() {
        let (pod, kinds) = (pod(), kinds());
        let mut verifying = decision(DecisionState::Verifying);
        verifying.acted_at = Some(MicroTime(at(110)));
        let case = |action: &str, seen: &Observation, second: i64| {
            let spec = agent_act(action, action == "Restart");
            let view =
                View { decision: Some(&verifying), observation: Some(seen), ..view(&spec, &pod, &kinds) };
            outcome(&view, second)
        };
        for action in ["Unready", "Park", "Restart"] {
            assert_eq!(case(action, &reported("Recovered", "Done", 111), 112), "Succeeded/MemoryReturned");
            assert!(case(action, &reported("Recovered", "Begun", 111), 112).starts_with("Rest"));
            assert!(case(action, &reported("Over", "Done", 111), 112).starts_with("Rest"));
            assert!(case(action, &reported("Recovered", "Done", 109), 112).starts_with("Rest"), "of before");
            assert_eq!(case(action, &reported("Over", "Failed", 111), 112), "Failed/ActFailed");
            assert_eq!(case(action, &reported("Over", "Undone", 111), 112), "Failed/ActUndone");
            assert_eq!(case(action, &reported("Over", "Done", 111), 500), "Failed/MemoryNotReturned");
        }
    }

    #[test]
    fn what_lasts_ends_with_its_policy_and_no_pause_keeps_it() {
        let (pod, kinds) = (pod(), kinds());
        let verifying = decision(DecisionState::Verifying);
        let begun = reported("Over", "Begun", 111);
        let case = |action: &str, asks: Asks<'_>| {
            let spec = agent_act(action, action == "Restart");
            let view = View {
                decision: Some(&verifying),
                observation: Some(&begun),
                asks,
                paused: Some("node n1".into()),
                ..view(&spec, &pod, &kinds)
            };
            outcome(&view, 112)
        };
        assert_eq!(case("Unready", Asks::Deleted), "Failed/PolicyDeleted");
        assert_eq!(case("Park", Asks::Nothing), "Failed/PolicyGone");
        assert!(case("Restart", Asks::Deleted).starts_with("Rest"), "it cannot be taken back");
    }

    #[test]
    fn a_third_restart_in_vain_becomes_a_ticket() {
        let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
        let in_vain = Some("it was restarted twice".to_owned());
        let refusal = Some(Refusal { said: vec!["no".into()], retry_at: None });
        let base = View { refusal, in_vain, ..view(&spec, &pod, &kinds) };
        assert_eq!(outcome(&base, 101), "Suppressed/TicketNeeded");
        let back = observation("Recovered", 101);
        let recovered = View { observation: Some(&back), ..base.clone() };
        assert_eq!(outcome(&recovered, 102), "Cancelled/Recovered");
        let unready = agent_act("Unready", false);
        assert_eq!(outcome(&View { spec: &unready, ..base }, 101), "Proposed/BudgetExhausted");
    }

    #[test]
    fn an_act_of_the_agent_is_rehearsed_without_a_call() {
        let (mut spec, pod, kinds) = (agent_act("Park", false), pod(), kinds());
        spec.mode = Mode::DryRun;
        let Step::Record(verdict, None) = decide(&view(&spec, &pod, &kinds), at(300)) else { panic!() };
        assert_eq!((verdict.reason, verdict.message.as_str()), ("DryRun", "Park would have been approved"));
    }

    #[test]
    fn a_look_from_the_future_is_not_fresh_and_names_the_skew() {
        let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
        let ahead = observation("Over", 160);
        let view = View { observation: Some(&ahead), ..view(&spec, &pod, &kinds) };
        let Step::Observe(verdict) = decide(&view, at(101)) else { panic!() };
        assert!(verdict.message.contains("n1 is 59 s ahead"), "{}", verdict.message);
        assert_eq!(decide(&view, at(155)), Step::Act, "a few seconds are no matter");
    }

    #[test]
    fn what_waits_for_an_agent_that_is_gone_ends() {
        let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
        let away = |seconds| View {
            agent_away: Some(SignedDuration::from_secs(seconds)),
            paused: Some("node n1".into()),
            ..view(&spec, &pod, &kinds)
        };
        assert_eq!(outcome(&away(599), 1000), "Proposed/Paused");
        assert_eq!(outcome(&away(600), 1000), "Cancelled/AgentGone");
    }

    #[test]
    fn a_report_that_cannot_be_read_ends_nothing() {
        let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
        let view = View { asks: Asks::Unknown, ..view(&spec, &pod, &kinds) };
        assert_eq!(outcome(&view, 101), "Proposed/AwaitingObservation");
    }

    #[test]
    fn verification_waits_for_the_pod_and_for_its_memory() {
        let (spec, pod, kinds) = (spec("Enforce"), pod(), kinds());
        let mut verifying = decision(DecisionState::Verifying);
        verifying.acted_at = Some(MicroTime(at(110)));
        let (over, gone, stale) =
            (observation("Over", 115), observation("Gone", 115), observation("Gone", 105));
        let base = View { decision: Some(&verifying), ..view(&spec, &pod, &kinds) };
        let without_pod = View { pod: None, ..base.clone() };
        let rest = |left| format!("{:?}", Step::Rest(Some(SignedDuration::from_secs(left))));
        assert_eq!(outcome(&View { observation: Some(&gone), ..base.clone() }, 120), rest(120));
        assert_eq!(outcome(&View { observation: Some(&over), ..without_pod.clone() }, 120), rest(120));
        assert_eq!(outcome(&View { observation: Some(&stale), ..without_pod.clone() }, 120), rest(120));
        assert_eq!(
            outcome(&View { observation: Some(&gone), ..without_pod.clone() }, 120),
            "Succeeded/MemoryReturned"
        );
        assert_eq!(
            outcome(&View { observation: Some(&over), ..without_pod }, 240),
            "Failed/MemoryNotReturned"
        );
        assert_eq!(outcome(&base, 240), "Failed/MemoryNotReturned");
    }

    #[test]
    fn what_an_eviction_says_becomes_a_verdict() {
        let state = |e: Eviction| after_eviction(&e, false).map(|v| format!("{:?}/{}", v.state, v.reason));
        assert_eq!(state(Eviction::Accepted).unwrap(), "Verifying/Evicted");
        assert_eq!(state(Eviction::Budget("pdb".into())).unwrap(), "Proposed/DisruptionBudget");
        assert_eq!(state(Eviction::Gone).unwrap(), "Cancelled/PodGone");
        let retried = after_eviction(&Eviction::Gone, true).unwrap();
        assert_eq!(retried.state, DecisionState::Verifying, "an earlier request was accepted after all");
        assert_eq!(state(Eviction::Denied("no".into())).unwrap(), "Failed/EvictionRefused");
        assert_eq!(state(Eviction::Conflict), None);
        assert_eq!(state(Eviction::Unclear("timeout".into())), None);
        let rehearsed = after_rehearsal(&Eviction::Budget("pdb x".into()), None).unwrap();
        assert_eq!((rehearsed.state, rehearsed.reason), (DecisionState::Suppressed, "DryRun"));
        assert!(rehearsed.message.contains("pdb x"));
    }

    #[test]
    fn the_same_verdict_later_is_no_write() {
        let wait = verdict(DecisionState::Proposed, "Paused", "by x");
        let first = record(None, &wait, Particulars::default(), at(1)).unwrap();
        assert_eq!(record(Some(&first), &wait, Particulars::default(), at(2)), None);
        let other = verdict(DecisionState::Proposed, "BudgetExhausted", "1");
        let second = record(Some(&first), &other, Particulars::default(), at(3)).unwrap();
        assert_eq!(second.since.0, at(1), "the state is the same");
    }

    const STATES: [DecisionState; 8] = [
        DecisionState::Proposed,
        DecisionState::Approved,
        DecisionState::Verifying,
        DecisionState::Succeeded,
        DecisionState::Suppressed,
        DecisionState::Cancelled,
        DecisionState::Failed,
        DecisionState::Superseded,
    ];

    #[test]
    fn final_states_never_change() {
        for old in STATES.into_iter().filter(|s| s.is_final()) {
            assert!(STATES.into_iter().all(|new| new == old || !may_follow(Some(old), new)));
        }
        assert!(!may_follow(Some(DecisionState::Verifying), DecisionState::Proposed));
        assert!(!may_follow(None, DecisionState::Verifying));
        assert!(!may_follow(Some(DecisionState::Proposed), DecisionState::Succeeded));
    }

    /// The cluster as two leaders see it.
    struct World {
        now: i64,
        decision: Option<Decision>,
        seen: i64,
        over: bool,
        pod: Option<(i64, bool)>, // resourceVersion, ending by eviction
        token: bool,
        evictions: usize,
        finals: usize,
    }

    /// A leader between two of its calls.
    #[derive(Clone, Debug)]
    enum Leader {
        Idle,
        Reserved { version: i64, cached: Option<Decision> },
        Approved { version: i64, cached: Option<Decision> },
        Evicted { cached: Option<Decision> },
    }

    impl World {
        /// Writes a decision as the API server lets it: the transition table is a rule of the CRD.
        fn write(&mut self, cached: Option<&Decision>, verdict: &Verdict, evicted: bool) -> bool {
            let particulars =
                Particulars { acted_at: evicted.then(|| at(self.now)), ..Particulars::default() };
            let Some(new) = record(cached, verdict, particulars, at(self.now)) else { return true };
            let old = self.decision.as_ref().map(|d| d.state);
            if !may_follow(old, new.state) {
                return false;
            }
            if old.is_some_and(DecisionState::is_final) && old != Some(new.state) {
                self.finals += 1;
            }
            self.decision = Some(new);
            true
        }

        fn look(&self, spec: &GpuMemoryIncidentSpec, cached: Option<&Decision>) -> Step {
            let seen = observation(if self.over { "Over" } else { "Recovered" }, self.seen);
            let (template, kinds) = (pod(), kinds());
            let facts = self.pod.map(|(_, ending)| PodFacts { terminating: ending, ..template.clone() });
            let view = View {
                decision: cached,
                observation: Some(&seen),
                pod: facts.as_ref(),
                evicted: self.pod.is_some_and(|(_, ending)| ending),
                token: self.token,
                ..view(spec, &template, &kinds)
            };
            decide(&view, at(self.now))
        }

        fn advance(
            &mut self,
            spec: &GpuMemoryIncidentSpec,
            leader: Leader,
            stale: Option<Decision>,
        ) -> Leader {
            match leader {
                Leader::Idle => match self.look(spec, stale.as_ref()) {
                    Step::Act => {
                        self.token = true; // idempotent by its key
                        Leader::Reserved { version: self.pod.unwrap().0, cached: stale }
                    }
                    Step::Record(verdict, _) | Step::Observe(verdict) => {
                        let evicted = verdict.state == DecisionState::Verifying;
                        self.write(stale.as_ref(), &verdict, evicted);
                        Leader::Idle
                    }
                    _ => Leader::Idle,
                },
                Leader::Reserved { version, cached } => {
                    if self.write(cached.as_ref(), &approved(spec), false) {
                        Leader::Approved { version, cached: self.decision.clone() }
                    } else {
                        Leader::Idle
                    }
                }
                Leader::Approved { version, cached } => {
                    let seen = observation(if self.over { "Over" } else { "Recovered" }, self.seen);
                    if !is_fresh(spec, Some(&seen), at(self.now)) {
                        return Leader::Idle;
                    }
                    match &mut self.pod {
                        Some((current, ending)) if *current == version => {
                            assert!(self.token, "acted without a token");
                            assert!(self.now - self.seen.max(100) <= 5, "acted on a stale observation");
                            (*current, *ending) = (version + 1, true);
                            self.evictions += 1;
                            Leader::Evicted { cached }
                        }
                        _ => Leader::Idle, // refused by its preconditions
                    }
                }
                Leader::Evicted { cached } => {
                    self.write(cached.as_ref(), &after_eviction(&Eviction::Accepted, false).unwrap(), true);
                    Leader::Idle
                }
            }
        }
    }

    proptest! {
        /// Of the incidents of one device at most one may act while another's act may have been
        /// requested, and among those that an earlier leader approved there is always one.
        #[test]
        fn one_act_a_device_and_no_mutual_wait(states in vec((0..9usize, 0..3i64), 1..8)) {
            let uids: Vec<String> = (0..states.len()).map(|i| format!("u{i}")).collect();
            let turns: Vec<Turn<'_>> = states.iter().zip(&uids).map(|((state, since), uid)| {
                Turn { state: STATES.get(*state).copied(), since: at(*since), uid }
            }).collect();
            let free: Vec<&Turn<'_>> = turns.iter()
                .filter(|own| own.state.is_none_or(|s| !s.is_final()) && own.state != Some(DecisionState::Verifying))
                .filter(|own| !turns.iter().any(|other| other.uid != own.uid && own.waits_for(other)))
                .collect();
            let count = |state| turns.iter().filter(|t| t.state == Some(state)).count();
            match (count(DecisionState::Verifying), count(DecisionState::Approved)) {
                (0, 0) => {}
                (0, _) => {
                    prop_assert_eq!(free.len(), 1);
                    prop_assert_eq!(free[0].state, Some(DecisionState::Approved));
                }
                _ => prop_assert!(free.is_empty()),
            }
        }

        #[test]
        fn at_most_one_eviction_an_incident_whatever_two_leaders_and_crashes_do(
            events in vec((0..8u8, 0..2usize), 1..120)
        ) {
            let spec = spec("Enforce");
            let mut world = World { now: 100, decision: None, seen: 100, over: true, pod: Some((1, false)),
                                    token: false, evictions: 0, finals: 0 };
            let mut leaders = [Leader::Idle, Leader::Idle];
            let mut caches: [Option<Decision>; 2] = [None, None];
            for (event, who) in events {
                match event {
                    0 => world.now += 3,
                    1 => world.seen = world.now,
                    2 => leaders[who] = Leader::Idle, // crash
                    3 => caches[who] = world.decision.clone(),
                    4 if world.pod.is_some_and(|(_, ending)| ending) => { world.pod = None; world.over = false; }
                    4 => if let Some((version, _)) = &mut world.pod { *version += 1 }, // some status change
                    _ => {
                        let leader = std::mem::replace(&mut leaders[who], Leader::Idle);
                        leaders[who] = world.advance(&spec, leader, caches[who].clone());
                    }
                }
                prop_assert!(world.evictions <= 1);
                prop_assert_eq!(world.finals, 0);
            }
        }
    }
}
