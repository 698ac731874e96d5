//! Events on pods and incidents. They are sent beside the reconciliation, which never waits for
//! them; what cannot be sent is counted.

use highwater_crds::{
    ActionType, Decision, DecisionState, Evidence, GpuMemoryIncident, GpuMemoryPolicy, names,
};
use highwater_policy::{
    leak_acts,
    remediation::{FLEET_HALTED, Verdict},
};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod};
use kube::{
    Client, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc;
use tracing::debug;

use crate::{error::call, metrics::Metrics};

/// Most Events that wait to be sent.
const WAITING: usize = 256;

/// An Event, and what it is about.
pub(crate) type Message = (Event, ObjectReference);

/// Where to hand in Events.
#[derive(Clone)]
pub(crate) struct Events {
    sink: mpsc::Sender<Message>,
    metrics: Metrics,
}

impl Events {
    pub(crate) fn new(metrics: Metrics) -> (Self, mpsc::Receiver<Message>) {
        let (sink, receiver) = mpsc::channel(WAITING);
        (Self { sink, metrics }, receiver)
    }

    /// Tells on a node that its taint went because nobody vouches for it any more.
    pub(crate) fn agent_gone(&self, node: &Node, away: SignedDuration) {
        let event = Event {
            type_: EventType::Warning,
            reason: "AgentGone".to_owned(),
            note: Some(format!(
                "removed the memory-pressure taint: the node has had no Ready agent for {} s",
                away.as_secs()
            )),
            action: "Untaint".to_owned(),
            secondary: None,
        };
        self.send(event, node.object_ref(&()));
    }

    /// Tells of a decision, on the incident and on its pod.
    pub(crate) fn decided(&self, incident: &GpuMemoryIncident, decision: &Decision) {
        if decision.reason == FLEET_HALTED {
            return; // told once, of the policy, and not a thousand times
        }
        let reference = incident.object_ref(&());
        let event = |secondary| Event {
            type_: match decision.state {
                DecisionState::Verifying | DecisionState::Failed => EventType::Warning,
                _ => EventType::Normal,
            },
            reason: decision.reason.clone(),
            note: Some(note(incident, decision)),
            action: format!("{:?}", decision.state),
            secondary,
        };
        self.send(event(None), reference.clone());
        if let Some(subject) = &incident.spec.subject {
            let pod = ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                namespace: Some(subject.namespace.clone()),
                name: Some(subject.name.clone()),
                uid: Some(subject.uid.clone()),
                ..ObjectReference::default()
            };
            self.send(event(Some(reference)), pod);
        } else if incident.spec.proposed.action == ActionType::Drain {
            let node = ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(incident.spec.node.clone()),
                ..ObjectReference::default()
            };
            self.send(event(Some(reference)), node);
        }
    }

    /// Tells on a workload that its team has to look: restarting it does not help.
    pub(crate) fn ticket(&self, incident: &GpuMemoryIncident, workload: ObjectReference, why: &Verdict) {
        let event = Event {
            type_: EventType::Warning,
            reason: why.reason.to_owned(),
            note: Some(why.message.chars().take(1000).collect()),
            action: "Restart".to_owned(),
            secondary: Some(incident.object_ref(&())),
        };
        self.send(event, workload);
    }

    /// Tells on a policy that so much of the fleet is condemned that nothing is done.
    pub(crate) fn fleet_halted(&self, policy: &GpuMemoryPolicy, why: &str) {
        let event = Event {
            type_: EventType::Warning,
            reason: FLEET_HALTED.to_owned(),
            note: Some(why.chars().take(1000).collect()),
            action: "Halt".to_owned(),
            secondary: None,
        };
        self.send(event, policy.object_ref(&()));
    }

    /// Tells on a node what became of its cordon, a taint of a device, or a request for a reset.
    pub(crate) fn on_node(&self, node: &Node, reason: &str, action: &str, text: &str) {
        let event = Event {
            type_: EventType::Normal,
            reason: reason.to_owned(),
            note: Some(text.chars().take(1000).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        self.send(event, node.object_ref(&()));
    }

    /// Tells of a pod that a drain evicts, or of what kept it.
    pub(crate) fn drained(&self, incident: &GpuMemoryIncident, pod: &Pod, text: &str) {
        let event = Event {
            type_: EventType::Warning,
            reason: "Drained".to_owned(),
            note: Some(text.chars().take(1000).collect()),
            action: "Evict".to_owned(),
            secondary: Some(incident.object_ref(&())),
        };
        self.send(event, pod.object_ref(&()));
    }

    fn send(&self, event: Event, about: ObjectReference) {
        if self.sink.try_send((event, about)).is_err() {
            self.metrics.reconcile_errors.with_label_values(&["events", "dropped"]).inc();
            debug!("an Event was dropped: too many are waiting");
        }
    }
}

fn note(incident: &GpuMemoryIncident, decision: &Decision) -> String {
    let spec = &incident.spec;
    let text = format!(
        "{:?} of {:?} on device {} by policy {}: {}{}{}",
        spec.proposed.action,
        spec.kind,
        spec.device,
        spec.policy,
        decision.message,
        leak(incident, decision),
        strength(&spec.evidence),
    );
    text.chars().take(1000).collect() // an Event takes 1 kB
}

/// What is known of a leak, where the decision does not say it itself.
fn leak(incident: &GpuMemoryIncident, decision: &Decision) -> String {
    let observation = incident.status.as_ref().and_then(|s| s.observation.as_ref());
    leak_acts::latest(&incident.spec, observation)
        .map(leak_acts::describe)
        .filter(|says| !decision.message.contains(says))
        .map_or_else(String::new, |says| format!(" (it {says})"))
}

/// How firmly the subject's quota held, which explains how it could come to this.
fn strength(evidence: &Evidence) -> String {
    match (evidence.strength, evidence.strength_reason) {
        (None, _) => String::new(),
        (Some(strength), None) => format!(" (its quota held at strength {strength:?})"),
        (Some(strength), Some(reason)) => {
            format!(" (its quota held at strength {strength:?}: {reason:?})")
        }
    }
}

/// Sends what is handed in.
pub(crate) async fn publish(
    client: Client,
    identity: String,
    metrics: Metrics,
    mut messages: mpsc::Receiver<Message>,
) -> anyhow::Result<()> {
    let reporter = Reporter { controller: names::OPERATOR_COMPONENT.to_owned(), instance: Some(identity) };
    let recorder = Recorder::new(client, reporter);
    while let Some((event, about)) = messages.recv().await {
        if let Err(error) = call("publish an Event", recorder.publish(&event, &about)).await {
            metrics.reconcile_errors.with_label_values(&["events", error.category()]).inc();
            debug!(%error, "an Event was not sent");
        }
    }
    anyhow::bail!("nobody hands in Events any more")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_says_how_firmly_the_quota_held() {
        let evidence = |fields: serde_json::Value| -> Evidence {
            let mut whole = serde_json::json!({"at": "2026-01-01T00:00:00.000000Z"});
            whole.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            serde_json::from_value(whole).unwrap()
        };
        assert_eq!(strength(&evidence(serde_json::json!({}))), "");
        assert_eq!(
            strength(&evidence(serde_json::json!({"strength": "Observe", "strengthReason": "NotOptedIn"}))),
            " (its quota held at strength Observe: NotOptedIn)"
        );
        assert_eq!(
            strength(&evidence(serde_json::json!({"strength": "Kernel"}))),
            " (its quota held at strength Kernel)"
        );
    }

    #[test]
    fn events_that_nobody_takes_in_time_are_counted() {
        let metrics = Metrics::new().unwrap();
        let (events, _receiver) = Events::new(metrics.clone());
        for _ in 0..WAITING + 3 {
            events.agent_gone(&Node::default(), SignedDuration::from_secs(60));
        }
        assert_eq!(metrics.reconcile_errors.with_label_values(&["events", "dropped"]).get(), 3);
    }
}
