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

mod verify;

use highwater_crds::{
    ActReport, ActState, ActionType, Decision, DecisionState, GpuMemoryIncidentSpec, IncidentKind, Mode,
    Observation, ObservationState, Proposal, Subject,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

pub use self::verify::CLOCK_SET_BACK;
pub(crate) use self::verify::{Awaited, Next, acted, is_back, seen_since, set_back};
use self::verify::{verify, verify_report};
use crate::{episode::AWAITING_OBSERVATION, leak_acts, pod::PodFacts};

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
    if is_ahead(decision.since.0, now) {
        let message = "the operator's clock was set back: the agent's time to begin counts anew";
        let again = SignedDuration::from_secs(1);
        return Step::Record(verdict(DecisionState::Proposed, CLOCK_SET_BACK, message), Some(again));
    }
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
    match view.observation.map(|o| o.state) {
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
        return wait(AWAITING_OBSERVATION, message, LOOK_AGAIN);
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
    !is_ahead(asked, now) && now.duration_since(asked) < ASK_AGAIN
}

/// Whether a time that an operator wrote is still to come: its clock was set back since, or this is
/// another leader with another clock. No wait can be counted from such a time.
pub(crate) fn is_ahead(at: Timestamp, now: Timestamp) -> bool {
    at.duration_since(now) > FRESH
}

/// The verdict on an act that waits for a fresh observation.
pub(crate) fn stale(
    spec: &GpuMemoryIncidentSpec,
    observation: Option<&Observation>,
    now: Timestamp,
) -> Verdict {
    let ahead = observation.map_or(spec.evidence.at.0, |o| o.at.0).duration_since(now);
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
    verdict(DecisionState::Proposed, AWAITING_OBSERVATION, message)
}

/// Whether the last look at the subject is recent and found it over. The evidence itself is the
/// first look; every other one came after it, whatever the node's clock said then and says now. A
/// look from the future is not recent either: one of the clocks is wrong.
pub fn is_fresh(spec: &GpuMemoryIncidentSpec, observation: Option<&Observation>, now: Timestamp) -> bool {
    let (at, over) = match observation {
        Some(o) => (o.at.0, o.state == ObservationState::Over),
        None => (spec.evidence.at.0, true),
    };
    over && now.duration_since(at).abs() <= FRESH
}

fn evicted() -> Verdict {
    verdict(DecisionState::Verifying, "Evicted", "the pod was evicted; its memory is awaited")
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
mod tests;
#[cfg(test)]
mod world_tests;
