//! How a life ended, from what is known of the pod.

use highwater_crds::{
    ActionType, DecisionState, GpuMemoryIncident, IncidentKind, LeakClass, LeakStage, Mode,
};
use jiff::Timestamp;

use crate::leak::LifeEnd;

/// What is known when a life ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Circumstances {
    /// The act that ended it, by what it was against.
    pub acted: Option<IncidentKind>,
    /// The host had no memory for one of its containers.
    pub out_of_memory: bool,
    /// It was asked to end, or ended by itself with success. A crash is neither: memory of the device
    /// may have run out, and nobody can tell.
    pub orderly: bool,
    /// It was seen from its start.
    pub whole: bool,
    /// What was thought of it when it ended.
    pub thought: Option<(LeakStage, LeakClass)>,
}

/// How a life ended. Only what was seen whole, ended in order and was above suspicion teaches what is
/// usual; a leak that somebody else restarted is one all the same.
pub fn life_end(of: Circumstances) -> LifeEnd {
    match of.acted {
        Some(IncidentKind::Leak) => return LifeEnd::LeakAct,
        Some(_) => return LifeEnd::Breaker,
        None if of.out_of_memory => return LifeEnd::OutOfMemory,
        None => {}
    }
    match of.thought {
        Some((LeakStage::Act, _)) => LifeEnd::LeakAct,
        Some((LeakStage::Suspect, class)) if class != LeakClass::Saturating => LifeEnd::Unknown,
        _ if of.orderly && of.whole => LifeEnd::Healthy,
        _ => LifeEnd::Unknown,
    }
}

/// The restart that was begun on a pod since its containers started, by what it was against.
pub fn acted<'a>(
    pod: &str,
    since: Option<Timestamp>,
    incidents: impl IntoIterator<Item = &'a GpuMemoryIncident>,
) -> Option<IncidentKind> {
    let restarted = |incident: &&GpuMemoryIncident| {
        let spec = &incident.spec;
        let of_pod = spec.subject.as_ref().is_some_and(|subject| subject.uid == pod);
        let decision = incident.status.as_ref().and_then(|status| status.decision.as_ref());
        let begun = decision.is_some_and(|decision| match decision.state {
            DecisionState::Approved | DecisionState::Verifying | DecisionState::Succeeded => true,
            DecisionState::Failed => decision.acted_at.is_some(),
            _ => false,
        });
        of_pod
            && begun
            && spec.mode == Mode::Enforce
            && spec.proposed.action == ActionType::Restart
            && since.is_none_or(|since| spec.evidence.at.0 >= since)
    };
    let kinds = incidents.into_iter().filter(restarted).map(|incident| incident.spec.kind);
    // Where several were, the leak says most of what the life was like.
    kinds.max_by_key(|kind| *kind == IncidentKind::Leak)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_whole_orderly_life_above_suspicion_teaches() {
        let orderly = Circumstances { orderly: true, whole: true, ..Circumstances::default() };
        let thought = |stage, class| Circumstances { thought: Some((stage, class)), ..orderly };
        for (of, expected) in [
            (orderly, LifeEnd::Healthy),
            (Circumstances { whole: false, ..orderly }, LifeEnd::Unknown),
            (Circumstances { orderly: false, ..orderly }, LifeEnd::Unknown),
            (Circumstances { out_of_memory: true, ..orderly }, LifeEnd::OutOfMemory),
            (Circumstances { acted: Some(IncidentKind::Leak), ..orderly }, LifeEnd::LeakAct),
            (Circumstances { acted: Some(IncidentKind::QuotaBreach), ..orderly }, LifeEnd::Breaker),
            (thought(LeakStage::Act, LeakClass::Linear), LifeEnd::LeakAct),
            (thought(LeakStage::Suspect, LeakClass::Linear), LifeEnd::Unknown),
            (thought(LeakStage::Suspect, LeakClass::Saturating), LifeEnd::Healthy),
        ] {
            assert_eq!(life_end(of), expected, "{of:?}");
        }
    }

    #[test]
    fn the_act_that_ended_a_life_is_known_by_its_incident() {
        let incident = |kind: &str, mode: &str, state: &str, at: &str| -> GpuMemoryIncident {
            serde_json::from_value(json!({
                "apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryIncident", "metadata": {"name": "i"},
                "spec": {"kind": kind, "mode": mode, "policy": "p", "node": "n", "device": "GPU-0", "episode": 1,
                    "subject": {"namespace": "team", "name": "a", "uid": "a"},
                    "evidence": {"at": at, "explanation": "e"}, "proposed": {"action": "Restart"}},
                "status": {"decision": {"state": state, "reason": "r", "message": "m", "since": at}}}))
            .unwrap()
        };
        let (early, late) = ("2026-01-01T00:00:00.000000Z", "2026-01-01T02:00:00.000000Z");
        let since = "2026-01-01T01:00:00Z".parse::<Timestamp>().ok();
        let of = |incidents: &[GpuMemoryIncident]| acted("a", since, incidents);
        assert_eq!(of(&[incident("Leak", "Enforce", "Verifying", late)]), Some(IncidentKind::Leak));
        assert_eq!(of(&[incident("Leak", "DryRun", "Succeeded", late)]), None);
        assert_eq!(of(&[incident("Leak", "Enforce", "Proposed", late)]), None);
        assert_eq!(of(&[incident("Leak", "Enforce", "Failed", late)]), None, "nothing was done");
        assert_eq!(of(&[incident("Leak", "Enforce", "Succeeded", early)]), None, "of a life before");
        let both =
            [incident("Leak", "Enforce", "Approved", late), incident("Breaker", "Enforce", "Approved", late)];
        assert_eq!(of(&both), Some(IncidentKind::Leak));
        assert_eq!(acted("b", since, &both), None);
    }
}
