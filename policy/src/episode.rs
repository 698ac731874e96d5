//! Episodes and their incidents: one name an episode, taken up again after a restart, and
//! observed no more often than somebody waits for it.

use std::sync::Arc;

use highwater_crds::{
    Decision, DecisionState, GpuMemoryIncident, GpuMemoryIncidentSpec, IncidentKind, Mode, ObservationState,
    names,
};
use kube::ResourceExt;
use sha2::{Digest, Sha256};

/// The most incidents that a node keeps open at once.
pub const MAX_OPEN: usize = 32;

/// The most of kind Leak that it keeps open besides.
pub const MAX_OPEN_LEAKS: usize = 16;

/// How often an observation is renewed while an act is being decided or verified, in
/// milliseconds.
pub const RENEW_MILLISECONDS: u64 = 2000;

/// Reason of a decision that waits for a fresh observation.
pub const AWAITING_OBSERVATION: &str = "AwaitingObservation";

/// From how many more bytes of zombie memory than an incident is about, if they are twice as many at
/// least, another is opened.
const ZOMBIE_OUTGROWN: i64 = 256 << 20;

/// Reasons of decisions by which an incident was closed because nobody asked for it any more, or nobody
/// could say how it stands. Who asks, or is there again, has not been answered by them.
const NOBODY_ASKED: [&str; 3] = ["PolicyDeleted", "PolicyGone", "AgentGone"];

/// What an episode is about. Of one key at most one episode runs at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// UID of the pod; `None` where no pod is to blame.
    pub subject: Option<Arc<str>>,
    /// UUID of the device.
    pub device: Arc<str>,
    /// What happened.
    pub kind: IncidentKind,
    /// Mode of the policies that ask for an act.
    pub mode: Mode,
}

impl Key {
    /// What an incident is about.
    pub fn of(spec: &GpuMemoryIncidentSpec) -> Self {
        Self {
            subject: spec.subject.as_ref().map(|s| s.uid.as_str().into()),
            device: spec.device.as_str().into(),
            kind: spec.kind,
            mode: spec.mode,
        }
    }

    /// Name of the incident of an episode: the pod's name, so that people find it, and a hash
    /// that makes it unique and the same after a restart.
    pub fn incident_name(&self, pod_name: Option<&str>, episode: i64) -> String {
        let subject = self.subject.as_deref().unwrap_or("none");
        let text = format!("{subject}/{}/{:?}/{:?}/{episode}", self.device, self.kind, self.mode);
        let hash = Sha256::digest(text.as_bytes())
            .iter()
            .take(6)
            .fold(0u64, |hash, byte| hash << 8 | u64::from(*byte));
        let head: String = pod_name.unwrap_or("device").chars().take(50).collect();
        format!("{}-{hash:012x}", head.trim_end_matches(['-', '.']))
    }
}

/// How an episode begins, given the incidents that are there.
#[derive(Clone, Debug, PartialEq)]
pub enum Beginning<'a> {
    /// It is the episode of this incident, which ran on while nobody looked.
    Resumed(&'a GpuMemoryIncident),
    /// It is a new one, with this number.
    New(i64),
}

/// Whether a key's present episode is one that has an incident already. An incident whose
/// subject was never seen to recover is of the same episode, whatever was decided about it.
pub fn begin<'a>(key: &Key, incidents: impl IntoIterator<Item = &'a GpuMemoryIncident>) -> Beginning<'a> {
    let latest = incidents
        .into_iter()
        .filter(|incident| Key::of(&incident.spec) == *key)
        .max_by_key(|incident| incident.spec.episode);
    match latest {
        Some(incident) if !has_ended(incident) => Beginning::Resumed(incident),
        Some(incident) => Beginning::New(incident.spec.episode.saturating_add(1)),
        None => Beginning::New(1),
    }
}

/// Whether an incident of zombie memory is that of the present episode, which `now` is about. That
/// memory is of no pod, so that a key says little: what another policy was told, or what was said of
/// far less, says nothing of what there is now.
pub fn is_of_zombie(incident: &GpuMemoryIncident, now: &GpuMemoryIncidentSpec) -> bool {
    let unanswered = |d: &Decision| NOBODY_ASKED.contains(&d.reason.as_str());
    !decision(incident).is_some_and(unanswered) && is_same_zombie(&incident.spec, &now.policy, frees(now))
}

/// Whether an episode of zombie memory goes on, where the memory is so many bytes now, and this policy
/// asks for an act.
pub fn is_same_zombie(then: &GpuMemoryIncidentSpec, policy: &str, bytes: i64) -> bool {
    let more = bytes.saturating_sub(frees(then));
    then.policy == policy && (more < ZOMBIE_OUTGROWN || more < frees(then))
}

fn frees(spec: &GpuMemoryIncidentSpec) -> i64 {
    spec.proposed.frees_bytes.unwrap_or(0)
}

/// Whether the agent has seen the end of an incident's episode.
pub fn has_ended(incident: &GpuMemoryIncident) -> bool {
    let observation = incident.status.as_ref().and_then(|s| s.observation.as_ref());
    observation.is_some_and(|o| is_end(o.state))
}

fn is_end(state: ObservationState) -> bool {
    matches!(state, ObservationState::Recovered | ObservationState::Gone)
}

/// Whether nothing more will be decided about an incident.
pub fn is_closed(incident: &GpuMemoryIncident) -> bool {
    decision(incident).is_some_and(|d| d.state.is_final())
}

fn decision(incident: &GpuMemoryIncident) -> Option<&Decision> {
    incident.status.as_ref().and_then(|s| s.decision.as_ref())
}

/// Whether an act is being decided or verified, so that a fresh observation is waited for.
fn is_urgent(decision: Option<&Decision>) -> bool {
    decision.is_none_or(|decision| match decision.state {
        DecisionState::Approved | DecisionState::Verifying => true,
        DecisionState::Proposed => decision.reason == AWAITING_OBSERVATION,
        _ => false,
    })
}

/// What the operator asks for a fresh observation by, if it does: it differs each time that it
/// asks anew. Its times are of another machine's clock, so they are compared for being the same
/// and for nothing else.
pub fn question(incident: &GpuMemoryIncident) -> Option<String> {
    let annotation = incident.annotations().get(names::OBSERVE);
    let evicted = decision(incident).and_then(|d| d.acted_at.as_ref()).map(|at| at.0.to_string());
    (annotation.is_some() || evicted.is_some())
        .then(|| format!("{}/{}", annotation.map_or("", String::as_str), evicted.unwrap_or_default()))
}

/// What was said last of an incident. The evidence counts as the first observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Last {
    /// What was seen.
    pub state: ObservationState,
    /// How long ago it was said, in milliseconds.
    pub age: u64,
    /// Whether it answers the present [`question`], or there is none.
    pub answers: bool,
}

/// The state to write into an incident's observation, if one is to be written: it differs from
/// the last one, or the operator waits for a newer one.
///
/// The end of an episode is not taken back: what comes after is the next episode. It is written
/// for a closed incident as well, so that the next is known for another.
pub fn observation_due(
    incident: &GpuMemoryIncident,
    last: Last,
    seen: ObservationState,
) -> Option<ObservationState> {
    if is_closed(incident) {
        return (!is_end(last.state) && is_end(seen)).then_some(seen);
    }
    let old = last.age >= RENEW_MILLISECONDS;
    if is_end(last.state) {
        // On its way out a pod of several processes is below its limit for a moment; what the act is
        // verified by is that its memory is back.
        let gone = seen == ObservationState::Gone && last.state != seen && is_urgent(decision(incident));
        return if gone { Some(seen) } else { (old && !last.answers).then_some(last.state) };
    }
    let due = seen != last.state || (old && (!last.answers || is_urgent(decision(incident))));
    due.then_some(seen)
}

#[cfg(test)]
mod tests {
    use highwater_crds::{ActionType, Evidence, GpuMemoryIncidentStatus, Observation, Proposal, Subject};
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn incident(episode: i64) -> GpuMemoryIncident {
        GpuMemoryIncident::new(
            "i",
            GpuMemoryIncidentSpec {
                kind: IncidentKind::QuotaBreach,
                mode: Mode::Enforce,
                policy: "serving".into(),
                node: "n1".into(),
                device: "GPU-1".into(),
                episode,
                subject: Some(Subject { namespace: "team".into(), name: "p".into(), uid: "u".into() }),
                evidence: Evidence {
                    at: MicroTime(at(100)),
                    scope: None,
                    level: None,
                    early: false,
                    level_percent: None,
                    trip_percent: None,
                    device_total_bytes: None,
                    device_free_bytes: None,
                    used_bytes: None,
                    limit_bytes: None,
                    due_bytes: None,
                    quota_rule: None,
                    neighbour_bytes: Vec::new(),
                    foreign_bytes: None,
                    unexplained_bytes: None,
                    strength: None,
                    strength_reason: None,
                    overshoot_bytes: None,
                    charged_bytes: None,
                    leak: None,
                    explanation: String::new(),
                },
                proposed: Proposal {
                    action: ActionType::Restart,
                    grace_period_seconds: None,
                    in_place: false,
                    frees_bytes: None,
                    alternatives: Vec::new(),
                },
            },
        )
    }

    fn observed(state: ObservationState, second: i64) -> Observation {
        Observation {
            state,
            bytes: None,
            at: MicroTime(at(second)),
            after_act: None,
            leak: None,
            hook: None,
            act: None,
        }
    }

    fn with(
        mut incident: GpuMemoryIncident,
        decision: Option<(DecisionState, &str)>,
        observation: Option<Observation>,
    ) -> GpuMemoryIncident {
        incident.status = Some(GpuMemoryIncidentStatus {
            observation,
            decision: decision.map(|(state, reason)| Decision {
                state,
                reason: reason.into(),
                message: String::new(),
                since: MicroTime(at(0)),
                workload: None,
                budgets: Vec::new(),
                acted_at: None,
                targets: Vec::new(),
            }),
        });
        incident
    }

    #[test]
    fn names_are_stable_differ_by_episode_and_fit() {
        let key = Key::of(&incident(1).spec);
        let long = "a".repeat(49) + "-b";
        assert_eq!(key.incident_name(Some("p"), 1), key.incident_name(Some("p"), 1));
        assert_ne!(key.incident_name(Some("p"), 1), key.incident_name(Some("p"), 2));
        assert_eq!(key.incident_name(Some(&long), 1).len(), 49 + 13);
        assert!(key.incident_name(None, 1).starts_with("device-"));
    }

    #[test]
    fn an_episode_that_ran_on_is_taken_up_and_one_that_ended_is_followed_by_the_next() {
        let key = Key::of(&incident(1).spec);
        assert_eq!(begin(&key, []), Beginning::New(1));
        let open = [incident(1), incident(2)];
        assert_eq!(begin(&key, &open), Beginning::Resumed(&open[1]));
        let closed = [with(incident(3), Some((DecisionState::Failed, "EvictionRefused")), None)];
        assert!(matches!(begin(&key, &closed), Beginning::Resumed(_)));
        let ended = [with(incident(3), None, Some(observed(ObservationState::Recovered, 9)))];
        assert_eq!(begin(&key, &ended), Beginning::New(4));
        let other = Key { mode: Mode::DryRun, ..key };
        assert_eq!(begin(&other, &ended), Beginning::New(1));
    }

    #[test]
    fn zombie_memory_of_another_policy_or_of_far_more_is_another_episode() {
        const MI: i64 = 1 << 20;
        let zombie = |policy: &str, bytes: i64| {
            let mut incident = incident(1);
            (incident.spec.kind, incident.spec.subject) = (IncidentKind::ZombieMemory, None);
            incident.spec.policy = policy.into();
            incident.spec.proposed.frees_bytes = Some(bytes);
            incident
        };
        let small = zombie("a", 3 * MI);
        for (policy, bytes, same) in [
            ("a", 3 * MI, true),
            ("a", 258 * MI, true),
            ("a", 259 * MI, false),
            ("a", 0, true),
            ("b", 3 * MI, false),
            ("b", 40_960 * MI, false),
        ] {
            assert_eq!(is_of_zombie(&small, &zombie(policy, bytes).spec), same, "{policy}: {bytes}");
        }
        let large = zombie("a", 10_240 * MI);
        assert!(is_of_zombie(&large, &zombie("a", 20_479 * MI).spec));
        assert!(!is_of_zombie(&large, &zombie("a", 20_480 * MI).spec));
        for (state, reason, answered) in [
            (DecisionState::Cancelled, "PolicyDeleted", false),
            (DecisionState::Cancelled, "AgentGone", false),
            (DecisionState::Cancelled, "Uncordoned", true),
            (DecisionState::Proposed, "ResetRequested", true),
        ] {
            let closed = with(large.clone(), Some((state, reason)), None);
            assert_eq!(is_of_zombie(&closed, &large.spec), answered, "{reason}");
        }
    }

    fn last(state: ObservationState, age: u64, answers: bool) -> Last {
        Last { state, age, answers }
    }

    #[test]
    fn an_observation_is_renewed_every_2_s_while_an_act_is_decided_or_verified() {
        use DecisionState::{Approved, Proposed, Suppressed, Verifying};
        use ObservationState::Over;
        for (decision, renewed) in [
            (None, true),
            (Some((Approved, "x")), true),
            (Some((Verifying, "x")), true),
            (Some((Proposed, AWAITING_OBSERVATION)), true),
            (Some((Proposed, "BudgetExhausted")), false),
            (Some((Suppressed, "DryRun")), false),
        ] {
            let incident = with(incident(1), decision, None);
            let due = |age| observation_due(&incident, last(Over, age, true), Over);
            assert_eq!(due(2000).is_some(), renewed, "{decision:?}");
            assert_eq!(due(1999), None);
        }
    }

    #[test]
    fn a_waiting_incident_is_observed_on_change_and_when_asked() {
        use ObservationState::{Over, Recovered};
        let waiting = with(incident(1), Some((DecisionState::Proposed, "Paused")), None);
        assert_eq!(observation_due(&waiting, last(Over, 0, true), Recovered), Some(Recovered));
        assert_eq!(observation_due(&waiting, last(Over, 2000, false), Over), Some(Over));
        assert_eq!(observation_due(&waiting, last(Over, 1999, false), Over), None, "no more often than that");
        assert_eq!(observation_due(&waiting, last(Over, 999_000, true), Over), None);
    }

    #[test]
    fn each_asking_is_a_question_of_its_own_whatever_the_operators_clock_says() {
        let mut incident = with(incident(1), Some((DecisionState::Verifying, "Evicted")), None);
        assert_eq!(question(&incident), None);
        let mut questions = Vec::new();
        for second in [500, 400, 1] {
            incident.annotations_mut().insert(names::OBSERVE.into(), at(second).to_string());
            questions.push(question(&incident));
        }
        let decision = incident.status.as_mut().and_then(|status| status.decision.as_mut()).unwrap();
        decision.acted_at = Some(MicroTime(at(1)));
        questions.push(question(&incident));
        for (n, one) in questions.iter().enumerate() {
            assert!(one.is_some() && questions.iter().skip(n + 1).all(|other| other != one));
        }
    }

    #[test]
    fn of_a_closed_incident_only_the_end_is_written_and_once() {
        use ObservationState::{Gone, Over, Recovered, Unknown};
        let closed = with(incident(1), Some((DecisionState::Suppressed, "DryRun")), None);
        for (before, seen, due) in [
            (Over, Over, None),
            (Over, Unknown, None),
            (Over, Recovered, Some(Recovered)),
            (Recovered, Gone, None),
        ] {
            assert_eq!(observation_due(&closed, last(before, 999_000, false), seen), due);
        }
    }

    #[test]
    fn an_end_is_not_taken_back_but_said_again_when_asked() {
        use ObservationState::{Gone, Over, Recovered};
        let incident = with(incident(1), Some((DecisionState::Verifying, "Evicted")), None);
        assert_eq!(observation_due(&incident, last(Gone, 999_000, true), Over), None);
        assert_eq!(observation_due(&incident, last(Gone, 2000, false), Over), Some(Gone));
        assert_eq!(observation_due(&incident, last(Gone, 1999, false), Over), None);
        // A pod of two processes, one of which is gone already.
        assert_eq!(observation_due(&incident, last(Recovered, 0, true), Gone), Some(Gone));
        assert_eq!(observation_due(&incident, last(Recovered, 999_000, true), Over), None);
    }
}
