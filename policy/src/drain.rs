//! The life of a drain: a cordon, evictions in order of priority, and its own undo.
//!
//! | from      | to        | when |
//! |-----------|-----------|------|
//! | (new)     | Proposed  | it waits: for the reset that was requested, for room, for a budget, for somebody's cordon |
//! | Proposed  | Approved  | a token is reserved; the cordon follows, then the evictions, one after the other. Or the cordon stands already |
//! | Approved  | Cancelled | somebody uncordoned the node; the reason went before the first eviction; nobody asks for it any more |
//! | Approved  | Verifying | every pod that had to go was asked to, or the memory is back |
//! | Approved  | Failed    | it took too long, or nobody can say any more what the node holds |
//! | Verifying | Succeeded, Failed | the memory came back, or did not in time, or somebody uncordoned the node |
//!
//! As in [`crate::remediation`] every step is decided from present facts alone. The cordon is known by
//! the annotation that was set with it: a node that has it has been cordoned, whatever was recorded, so
//! that a drain whose leader died in between goes on from there, and no clock is asked whose it is.
//! Whatever ends a drain, its cordon is undone because no open incident stands behind it any more
//! ([`is_orphaned`]): also after a crash, and also where somebody deleted the incident.

use highwater_crds::{
    Decision, DecisionState, GpuMemoryIncident, GpuMemoryIncidentSpec, IncidentKind, Mode, Observation,
    ObservationState, names,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod as ApiPod};

use crate::{
    pod::PodFacts,
    remediation::{
        self, AGENT_GONE, Awaited, BUDGET_EXHAUSTED, DISRUPTION_BUDGET, FLEET_HALTED, FRESH, Next, Refusal,
        VERIFY_WITHIN, Verdict, acted, asked_lately, is_ahead, is_fresh, out_of_budget, seen_since, set_back,
        stale, verdict,
    },
};

/// How long a requested reset is waited for before a node is drained because of zombie memory.
pub const AFTER_RESET_REQUEST: SignedDuration = SignedDuration::from_secs(300);
/// Reason of an incident for which there is no room elsewhere.
pub const NO_TARGET: &str = "NoTarget";
/// How soon a drain that waits for something without events of its own is looked at again.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_secs(10);
/// How soon evictions are looked at again that were refused or wait for each other.
const NEXT_EVICTION: SignedDuration = SignedDuration::from_secs(5);
/// How old the evidence has to be before anything is decided but that a drain has to wait. What is wrong
/// on all nodes at once is told by one after the other, and the first would be drained, or ended for want
/// of a culprit, before enough are known to halt the fleet. Shorter than [`FRESH`]: the evidence alone
/// still suffices.
const SETTLING: SignedDuration = SignedDuration::from_secs(3);
/// The longest wait for a token.
const LONGEST_WAIT: SignedDuration = SignedDuration::from_secs(300);
/// Times of creation are whole seconds, rounded down.
const CREATION_ROUNDED: SignedDuration = SignedDuration::from_secs(1);
/// What begins the name of a resource that stands for a GPU.
const GPU_RESOURCES: [&str; 2] = ["nvidia.com/gpu", "nvidia.com/mig-"];
/// Most pods that a message names.
const NAMED: usize = 5;

/// What is known about a drain.
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
    /// How long the node has had no Ready agent. None: it has one.
    pub agent_away: Option<SignedDuration>,
    /// What the policy asks for now.
    pub asks: Asks,
    /// Another drain of the same node.
    pub rival: Option<String>,
    /// A later incident about more of the same zombie memory.
    pub larger: Option<String>,
    /// What stops new acts, if something does.
    pub paused: Option<String>,
    /// Why the whole fleet stands still, if it does.
    pub halted: Option<String>,
    /// What the budgets say against beginning it, if they do.
    pub refusal: Option<Refusal>,
    /// The node's cordon. None: the node is gone.
    pub cordon: Option<Cordon>,
    /// The pods on the node that use a GPU.
    pub pods: &'a [Pod],
    /// Whether an eviction of this drain has been requested, as far as the tokens tell.
    pub evicting: bool,
    /// Where there is room for what has to go; else why there is none.
    pub room: Result<&'a [String], String>,
}

/// What the policy of a drain asks for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asks {
    /// There is no such policy.
    Deleted,
    /// It does not ask for a drain on this device (any more).
    Nothing,
    /// Nobody can say, since the node's plan and report are not there.
    Unknown,
    /// It asks for it.
    Drain {
        /// How long the drain may take in minutes.
        timeout_minutes: i32,
    },
}

/// Whose cordon a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cordon {
    /// Nobody's.
    Open,
    /// That of this drain.
    Own,
    /// This drain had set one, and somebody has lifted it. They may have set another since.
    Lifted,
    /// Somebody else's.
    Others,
}

/// Whose cordon a node has: whether it is cordoned, and whether the field that says so may be
/// Highwater's; and what its annotation [`names::CORDONED_FOR`] says, which was written together with
/// that field. `own` is what this drain would write there: see [`mark`].
pub fn cordon(unschedulable: Option<Field>, annotation: Option<&str>, own: &str) -> Cordon {
    match (unschedulable, annotation == Some(own)) {
        (Some(Field::Ours), true) => Cordon::Own,
        (Some(_), false) => Cordon::Others,
        (None | Some(Field::Theirs), true) => Cordon::Lifted,
        (None, false) => Cordon::Open,
    }
}

/// Who set the field that cordons a node, as the API server knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Highwater, or nobody says who.
    Ours,
    /// Somebody else.
    Theirs,
}

/// What the annotation [`names::CORDONED_FOR`] says: which incident a cordon is for.
pub fn mark(namespace: &str, name: &str, uid: &str) -> String {
    format!("{namespace}/{name}/{uid}")
}

/// Namespace, name and UID of the incident that a cordon is for. None where it is not of our making.
pub fn marked(annotation: &str) -> Option<(&str, &str, &str)> {
    let mut parts = annotation.split('/');
    let marked = (parts.next()?, parts.next()?, parts.next()?);
    parts.next().is_none().then_some(marked)
}

/// Whether a cordon of ours has no open incident behind it, so that it is to be undone. `found` is
/// the incident of the name that its annotation has.
pub fn is_orphaned(annotation: &str, found: Option<&GpuMemoryIncident>) -> bool {
    let uid = marked(annotation).map(|(_, _, uid)| uid);
    found.is_none_or(|incident| incident.metadata.uid.as_deref() != uid || is_closed(incident))
}

fn is_closed(incident: &GpuMemoryIncident) -> bool {
    let decision = incident.status.as_ref().and_then(|s| s.decision.as_ref());
    decision.is_some_and(|d| d.state.is_final())
}

/// Whether this incident asks for a reset of its device: zombie memory that is still there, in mode
/// Enforce. It does so until the memory is back or nobody asks any more, whatever became of a drain.
pub fn wants_reset(incident: &GpuMemoryIncident) -> bool {
    let spec = &incident.spec;
    let status = incident.status.as_ref();
    let decision = status.and_then(|s| s.decision.as_ref()).map(|d| d.state);
    let asked = !matches!(
        decision,
        Some(DecisionState::Suppressed | DecisionState::Cancelled | DecisionState::Superseded)
    );
    let back = status
        .and_then(|s| s.observation.as_ref())
        .is_some_and(|o| matches!(o.state, ObservationState::Recovered | ObservationState::Gone));
    spec.kind == IncidentKind::ZombieMemory && spec.mode == Mode::Enforce && asked && !back
}

/// A pod on the node that uses a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    /// Its top owner, as `Kind/name`.
    pub workload: String,
    /// Priority.
    pub priority: i32,
    /// When it was created.
    pub born: Option<Timestamp>,
    /// Why it may not be evicted. None: it may.
    pub stays: Option<&'static str>,
    /// Whether it is ending.
    pub going: bool,
    /// Why its eviction has to wait: a budget, or a refusal that is too recent.
    pub waits: Option<String>,
}

impl Pod {
    fn label(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// Whether a pod uses a GPU, as far as its spec tells: a container asks for one, or a claim stands
/// for it.
pub fn uses_gpu(pod: &ApiPod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let asks = |container: &Container| {
        let limits = container.resources.as_ref().and_then(|r| r.limits.as_ref());
        limits.is_some_and(|l| l.keys().any(|name| is_gpu(name)))
    };
    spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty())
        || spec.containers.iter().chain(spec.init_containers.iter().flatten()).any(asks)
}

/// Whether a resource of this name stands for a GPU or a part of one.
pub fn is_gpu(resource: &str) -> bool {
    GPU_RESOURCES.iter().any(|gpu| resource.starts_with(gpu))
}

/// How many of which GPU resource a pod asks for. None: none, several kinds, or by a claim.
pub fn gpus(pod: &ApiPod) -> Option<(&str, u32)> {
    let spec = pod.spec.as_ref()?;
    let mut asked: Option<(&str, u32)> = None;
    for container in &spec.containers {
        let limits = container.resources.as_ref().and_then(|r| r.limits.as_ref());
        for (name, quantity) in limits.into_iter().flatten().filter(|(name, _)| is_gpu(name)) {
            let count: u32 = quantity.0.parse().ok()?;
            asked = match asked {
                None => Some((name, count)),
                Some((known, sum)) if known == name => Some((known, sum.saturating_add(count))),
                Some(_) => return None,
            };
        }
    }
    asked.filter(|_| spec.resource_claims.as_ref().is_none_or(Vec::is_empty))
}

/// Why a pod may not be evicted by a drain, if it may not.
pub fn stays(pod: &PodFacts, owner_kinds: &[String], namespace_selected: bool) -> Option<&'static str> {
    let kind = pod.owner.as_ref().map(|o| o.kind.as_str());
    let reasons = [
        (pod.finished, "it has finished"),
        (pod.mirror, "it is a static pod"),
        (pod.system_priority, "it has system priority"),
        (kind.is_none(), "nothing would start it again"),
        (kind == Some("DaemonSet"), "it is a DaemonSet's"),
        (kind.is_some_and(|kind| !owner_kinds.iter().any(|k| k == kind)), "its owner's kind is not listed"),
        (!namespace_selected, "its namespace is not selected"),
        (pod.paused, "acts on it are paused"),
    ];
    reasons.into_iter().find_map(|(holds, why)| holds.then_some(why))
}

/// How many bytes each pod that has to go may need elsewhere: what the largest pod on the device held
/// when the episode began, or what the act should free, or all that was in use there.
pub fn bytes_a_pod(spec: &GpuMemoryIncidentSpec) -> u64 {
    let evidence = &spec.evidence;
    let in_use = || Some(evidence.device_total_bytes?.saturating_sub(evidence.device_free_bytes?));
    let largest = evidence.neighbour_bytes.iter().max().copied();
    let bytes = largest.or(spec.proposed.frees_bytes).or_else(in_use).unwrap_or(0);
    u64::try_from(bytes).unwrap_or(0)
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
    /// Reserve a token, record that, cordon the node, record that.
    Begin,
    /// Reserve a token for this pod (an index into the view's) and evict it.
    Evict(usize),
}

/// What to do next about an incident that proposes a drain.
pub fn decide(view: &View<'_>, now: Timestamp) -> Step {
    match view.decision {
        Some(decision) if decision.state.is_final() => Step::Rest(None),
        Some(decision) if decision.state == DecisionState::Verifying => verify(view, decision, now),
        decision if has_begun(view) => under_way(view, decision, now),
        _ => before(view, now),
    }
}

/// Whether the node was cordoned. The node itself says so where it can: a leader that died right
/// after has not recorded it, and another that knew of nothing may have recorded a wait since.
fn has_begun(view: &View<'_>) -> bool {
    let recorded = |d: &Decision| d.state == DecisionState::Approved && d.acted_at.is_some();
    matches!(view.cordon, Some(Cordon::Own | Cordon::Lifted)) || view.decision.is_some_and(recorded)
}

fn end(state: DecisionState, reason: &'static str, message: impl Into<String>) -> Step {
    Step::Record(verdict(state, reason, message), None)
}

fn wait(state: DecisionState, reason: &'static str, message: String, again: SignedDuration) -> Step {
    Step::Record(verdict(state, reason, message), Some(again))
}

/// A drain that has not begun.
fn before(view: &View<'_>, now: Timestamp) -> Step {
    use DecisionState::{Cancelled, Proposed, Superseded, Suppressed};

    let (spec, policy) = (view.spec, &view.spec.policy);
    let Some(cordon) = view.cordon else {
        return end(Cancelled, "NodeGone", format!("node {} is gone", spec.node));
    };
    if !matches!(spec.mode, Mode::DryRun | Mode::Enforce) {
        return end(Suppressed, "ObserveOnly", format!("policy {policy} only observes"));
    }
    if view.asks == Asks::Deleted {
        return end(Cancelled, "PolicyDeleted", format!("policy {policy} was deleted"));
    }
    if view.observation.is_some_and(remediation::is_back) {
        return end(Cancelled, "Recovered", "memory was back before anything was done");
    }
    let zombie = spec.kind == IncidentKind::ZombieMemory;
    if let (true, Some(other)) = (zombie, &view.larger) {
        let message = format!("incident {other} is about more memory of the same device, and this one's");
        return end(Superseded, "LargerEpisode", message);
    }
    if view.asks == Asks::Nothing && !zombie {
        let message = format!("policy {policy} no longer asks for a drain of {}", spec.node);
        return end(Suppressed, "PolicyGone", message);
    }
    let moving = Moving::of(view, None);
    if spec.mode == Mode::DryRun {
        return end(Suppressed, "DryRun", rehearsed(view, &moving));
    }
    if let Some(away) = view.agent_away.filter(|away| *away >= AGENT_GONE) {
        return end(Cancelled, "AgentGone", agent_gone(spec, away));
    }
    let waits = |reason, message| wait(Proposed, reason, message, LOOK_AGAIN);
    if zombie && view.asks == Asks::Nothing {
        let message = format!("{}; policy {policy} does not ask for a drain", reset_requested(spec));
        return Step::Record(verdict(Proposed, "ResetRequested", message), None);
    }
    if let Some((reason, why)) = stopped(view) {
        return waits(reason, why);
    }
    let left = (spec.evidence.at.0.duration_since(now) + SETTLING).min(SETTLING);
    // A clock that is too far ahead is said at once.
    if !zombie && left.is_positive() && !remediation::is_ahead(spec.evidence.at.0, now) {
        return Step::Rest(Some(left));
    }
    let left = spec.evidence.at.0.duration_since(now) + AFTER_RESET_REQUEST;
    if zombie && left.is_positive() {
        let message = format!(
            "{}; the node is drained if it is still there {} s after it was seen",
            reset_requested(spec),
            AFTER_RESET_REQUEST.as_secs()
        );
        return wait(Proposed, "ResetRequested", message, left);
    }
    if let Some(other) = &view.rival {
        return waits("AwaitingVerification", format!("incident {other} drains node {}", spec.node));
    }
    if cordon == Cordon::Others {
        let message = format!(
            "node {} was cordoned by somebody else, who seems to be at work there: nothing is done until that cordon goes",
            spec.node
        );
        return waits("NodeCordoned", message);
    }
    if moving.pods.is_empty() && !zombie {
        let message = format!("no pod on {} may be evicted{}", spec.node, moving.stay());
        return end(Suppressed, "NoCulprit", message);
    }
    if let Some(refusal) = &view.refusal {
        let again = refusal.retry_at.map_or(LOOK_AGAIN, |at| {
            at.duration_since(now).clamp(SignedDuration::from_secs(1), LONGEST_WAIT)
        });
        return Step::Record(out_of_budget(&refusal.said), Some(again));
    }
    if let (Err(why), false) = (&view.room, moving.pods.is_empty()) {
        return waits(NO_TARGET, format!("{why}; nothing is evicted from {}", spec.node));
    }
    ask_first(view, Proposed, now).unwrap_or(Step::Begin)
}

/// A drain whose node is cordoned.
fn under_way(view: &View<'_>, decision: Option<&Decision>, now: Timestamp) -> Step {
    use DecisionState::{Approved, Cancelled, Failed, Verifying};

    let (spec, policy) = (view.spec, &view.spec.policy);
    match view.cordon {
        None => return end(Cancelled, "NodeGone", format!("node {} is gone", spec.node)),
        Some(Cordon::Own) => {}
        Some(_) => return end(Cancelled, "Uncordoned", uncordoned(spec)),
    }
    let recorded = decision.filter(|decision| decision.state == Approved);
    let Some((decision, since)) = recorded.and_then(|d| Some((d, d.acted_at.as_ref()?.0))) else {
        // Set just before its leader died: record it.
        return Step::Begin;
    };
    if let Some(verdict) = set_back(decision, now) {
        return Step::Record(verdict, Some(LOOK_AGAIN));
    }
    let timeout = match view.asks {
        Asks::Deleted => {
            let message = format!("policy {policy} was deleted: the cordon is taken back");
            return end(Cancelled, "PolicyDeleted", message);
        }
        Asks::Nothing => {
            let message = format!("policy {policy} no longer asks for a drain: the cordon is taken back");
            return end(Cancelled, "PolicyGone", message);
        }
        Asks::Unknown => None,
        Asks::Drain { timeout_minutes } => Some(SignedDuration::from_mins(timeout_minutes.into())),
    };
    let moving = Moving::of(view, Some(since));
    if seen_since(decision, view.observation).is_some_and(remediation::is_back) {
        if view.evicting || moving.any_going() {
            let message = "memory is back: no further pod is evicted";
            return Step::Record(verdict(Verifying, "MemoryBack", message), None);
        }
        let message = "memory was back before the first eviction: the cordon is taken back";
        return end(Cancelled, "Recovered", message);
    }
    if let Some(away) = view.agent_away.filter(|away| *away >= AGENT_GONE) {
        return end(Failed, "AgentGone", format!("{}: the cordon is taken back", agent_gone(spec, away)));
    }
    let left = timeout.map(|timeout| timeout - now.duration_since(since));
    if let (Some(timeout), Some(left)) = (timeout, left)
        && !left.is_positive()
    {
        let message =
            format!("not done within {} min: {}; the cordon is taken back", timeout.as_mins(), moving.left());
        return end(Failed, "DrainTimedOut", message);
    }
    if moving.all_going() {
        let message = format!(
            "every pod that may be evicted was asked to go from {}; its memory is awaited{}",
            spec.node,
            moving.stay()
        );
        return Step::Record(verdict(Verifying, "Evicted", message), None);
    }
    // Not beyond the end of the drain, which is no event.
    let again = |wait: SignedDuration| left.map_or(wait, |left| left.min(wait));
    let waits = |reason, message, after| wait(Approved, reason, message, again(after));
    if let Some((reason, why)) = stopped(view) {
        return waits(reason, why, LOOK_AGAIN);
    }
    if let Err(why) = &view.room {
        return waits(NO_TARGET, format!("{why}; no further pod is evicted from {}", spec.node), LOOK_AGAIN);
    }
    if let Some(index) = moving.next() {
        return ask_first(view, Approved, now).unwrap_or(Step::Evict(index));
    }
    let (reason, why) = moving.waits();
    waits(reason, format!("cordoned {}; {why}", spec.node), NEXT_EVICTION)
}

/// Whether a drain helped.
fn verify(view: &View<'_>, decision: &Decision, now: Timestamp) -> Step {
    use DecisionState::{Failed, Succeeded};

    let spec = view.spec;
    let since = acted(decision);
    match view.cordon {
        None => return end(Failed, "NodeGone", format!("node {} is gone", spec.node)),
        Some(Cordon::Own) => {}
        Some(_) => return end(Failed, "Uncordoned", uncordoned(spec)),
    }
    let moving = Moving::of(view, Some(since));
    let back = seen_since(decision, view.observation).is_some_and(remediation::is_back);
    if back && !moving.any_going() {
        let took = now.duration_since(since).as_secs();
        let message = format!("memory is back, {took} s after the cordon, which is taken back");
        return end(Succeeded, "MemoryReturned", message);
    }
    let timeout = match view.asks {
        Asks::Drain { timeout_minutes } => SignedDuration::from_mins(timeout_minutes.into()),
        _ => SignedDuration::ZERO,
    };
    let last = if is_ahead(decision.since.0, now) { since } else { decision.since.0 };
    let waited = now.duration_since(last);
    let awaited = Awaited {
        node: &spec.node,
        decision,
        observation: view.observation,
        asked: view.asked,
        agent_alone: !moving.any_going(),
        left: (timeout - now.duration_since(since)).max(VERIFY_WITHIN - waited),
    };
    if let Some(next) = awaited.step(now) {
        return match next {
            Next::Rest(wait) => Step::Rest(Some(wait)),
            Next::Record(verdict) => Step::Record(verdict, Some(LOOK_AGAIN)),
            Next::Observe(verdict) => Step::Observe(verdict),
        };
    }
    let what = if moving.any_going() { moving.left() } else { "the memory is not back".to_owned() };
    let message = format!("{what}, {} s after the last eviction; the cordon is taken back", waited.as_secs());
    end(Failed, "MemoryNotReturned", message)
}

/// What stops the next step, if anything.
fn stopped(view: &View<'_>) -> Option<(&'static str, String)> {
    if let Some(what) = &view.paused {
        return Some(("Paused", format!("acts are paused by annotation on {what}")));
    }
    if let Some(why) = &view.halted {
        return Some((FLEET_HALTED, why.clone()));
    }
    (view.asks == Asks::Unknown).then(|| {
        let message = format!("the GpuMemoryNode {} cannot be read: see the operator's log", view.spec.node);
        ("AwaitingObservation", message)
    })
}

/// Whether the agent has to look again before the next step.
fn ask_first(view: &View<'_>, state: DecisionState, now: Timestamp) -> Option<Step> {
    if is_fresh(view.spec, view.observation, now) {
        return None;
    }
    let verdict = Verdict { state, ..stale(view.spec, view.observation, now) };
    Some(match view.asked {
        Some(asked) if asked_lately(asked, now) => Step::Record(verdict, Some(FRESH)),
        _ => Step::Observe(verdict),
    })
}

/// The pods that a drain is about.
struct Moving<'a> {
    /// Those that have to go, with their index in the view: lowest priority first.
    pods: Vec<(usize, &'a Pod)>,
    /// Those that stay.
    stay: Vec<&'a Pod>,
}

impl<'a> Moving<'a> {
    /// Those that were there when the node was cordoned. Who came after that came in spite of the
    /// cordon, and is not chased.
    fn of(view: &View<'a>, cordoned: Option<Timestamp>) -> Self {
        let came_later = |pod: &Pod| {
            let cordoned = cordoned.and_then(|at| at.checked_add(CREATION_ROUNDED).ok());
            pod.born.zip(cordoned).is_some_and(|(born, cordoned)| born > cordoned)
        };
        let (mut pods, mut stay) = (Vec::new(), Vec::new());
        for (index, pod) in view.pods.iter().enumerate().filter(|(_, pod)| !came_later(pod)) {
            match pod.stays {
                None => pods.push((index, pod)),
                Some(_) => stay.push(pod),
            }
        }
        pods.sort_by(|(_, a), (_, b)| {
            (a.priority, &a.namespace, &a.name).cmp(&(b.priority, &b.namespace, &b.name))
        });
        Self { pods, stay }
    }

    fn any_going(&self) -> bool {
        self.pods.iter().any(|(_, pod)| pod.going)
    }

    fn all_going(&self) -> bool {
        self.pods.iter().all(|(_, pod)| pod.going)
    }

    /// The next to be evicted: of each workload one at a time.
    fn next(&self) -> Option<usize> {
        let busy = |pod: &Pod| {
            let same = |p: &Pod| p.namespace == pod.namespace && p.workload == pod.workload;
            self.pods.iter().any(|(_, p)| p.going && same(p))
        };
        let free = |pod: &Pod| !pod.going && pod.waits.is_none() && !busy(pod);
        self.pods.iter().find(|(_, pod)| free(pod)).map(|(index, _)| *index)
    }

    /// What the evictions that are left wait for.
    fn waits(&self) -> (&'static str, String) {
        let mut left = self.pods.iter().filter(|(_, pod)| !pod.going);
        let waiting = left.find_map(|(_, pod)| Some((pod, pod.waits.as_ref()?)));
        match waiting {
            Some((pod, why)) => {
                let by_budget = why.contains("maxUnavailable") || why.contains("rate ");
                let reason = if by_budget { BUDGET_EXHAUSTED } else { DISRUPTION_BUDGET };
                (reason, format!("the eviction of {} waits: {why}", pod.label()))
            }
            None => ("Evicting", format!("waiting for {}", self.left())),
        }
    }

    fn left(&self) -> String {
        let still = |going: bool, what: &str| {
            let names: Vec<_> =
                self.pods.iter().filter(|(_, p)| p.going == going).map(|(_, p)| p.label()).collect();
            (!names.is_empty()).then(|| format!("{} {what} ({})", names.len(), list(&names)))
        };
        let parts: Vec<_> = [still(false, "pods not evicted"), still(true, "pods still ending")]
            .into_iter()
            .flatten()
            .collect();
        if parts.is_empty() { "no pod is left".to_owned() } else { parts.join(", ") }
    }

    /// Who stays and why, as the end of a sentence.
    fn stay(&self) -> String {
        let named: Vec<_> = self
            .stay
            .iter()
            .map(|pod| format!("{}: {}", pod.label(), pod.stays.unwrap_or_default()))
            .collect();
        if named.is_empty() { String::new() } else { format!(" ({} stay: {})", named.len(), list(&named)) }
    }
}

fn list(names: &[String]) -> String {
    let first: Vec<_> = names.iter().take(NAMED).map(String::as_str).collect();
    match names.len().saturating_sub(NAMED) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

fn rehearsed(view: &View<'_>, moving: &Moving<'_>) -> String {
    let spec = view.spec;
    let names: Vec<_> = moving.pods.iter().map(|(_, pod)| pod.label()).collect();
    let drain = format!("node {} would have been cordoned and {} pods evicted", spec.node, names.len());
    let drain = if names.is_empty() { drain } else { format!("{drain} ({})", list(&names)) };
    let what = match (&view.room, &view.refusal) {
        _ if view.asks == Asks::Nothing => "a reset of the device would have been requested".to_owned(),
        (Err(why), _) if !names.is_empty() => format!("nothing would have been evicted: {why}"),
        (_, Some(refusal)) => {
            format!("the drain would have waited for its budget: {}", refusal.said.join("; "))
        }
        _ => drain,
    };
    if spec.kind == IncidentKind::ZombieMemory && view.asks != Asks::Nothing {
        format!("a reset of the device would have been requested; if that had not helped, {what}")
    } else {
        what
    }
}

fn uncordoned(spec: &GpuMemoryIncidentSpec) -> String {
    format!("somebody lifted the cordon of node {}: nothing more is evicted from it", spec.node)
}

fn agent_gone(spec: &GpuMemoryIncidentSpec, away: SignedDuration) -> String {
    let away = away.as_secs();
    format!("node {} has had no Ready agent for {away} s: nobody can say what it holds", spec.node)
}

fn reset_requested(spec: &GpuMemoryIncidentSpec) -> String {
    format!(
        "memory of processes that are gone is back after a reset of device {}: annotation {} of node {} asks for one",
        spec.device,
        names::RESET_REQUESTED,
        spec.node
    )
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod world_tests;
