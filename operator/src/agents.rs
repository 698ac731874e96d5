//! Which nodes have an agent that is Ready, and since when not.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, PoisonError},
};

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use crate::context::Context;

/// Labels that the chart gives to the agents' pods.
pub(crate) const LABELS: [(&str, &str); 2] =
    [("app.kubernetes.io/part-of", "highwater"), ("app.kubernetes.io/component", "agent")];

/// Since when nodes have had no Ready agent, as noticed by this replica.
#[derive(Debug, Default)]
pub(crate) struct Agents(Mutex<HashMap<String, Instant>>);

impl Agents {
    fn away(&self, node: &str, ready: bool, now: Instant) -> Option<SignedDuration> {
        let mut away = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ready {
            away.remove(node);
            return None;
        }
        let since = *away.entry(node.to_owned()).or_insert(now);
        Some(SignedDuration::try_from(now.duration_since(since)).unwrap_or(SignedDuration::MAX))
    }
}

impl Context {
    /// How long this node has had no Ready agent. None: it has one.
    pub(crate) fn agent_away(&self, node: &str) -> Option<SignedDuration> {
        let ready = !self
            .stores
            .pods
            .state_filter(|pod| is_agent(pod, &self.release_namespace) && is_ready_on(pod, node))
            .is_empty();
        self.agents.away(node, ready, Instant::now())
    }
}

impl Context {
    /// The nodes that have a Ready agent.
    pub(crate) fn nodes_with_agent(&self) -> HashSet<String> {
        let agents = self.stores.pods.state_filter(|pod| is_agent(pod, &self.release_namespace));
        let node = |pod: &Pod| pod.spec.as_ref().and_then(|s| s.node_name.clone());
        agents.iter().filter_map(|pod| node(pod).filter(|node| is_ready_on(pod, node))).collect()
    }
}

/// Whether a pod is an agent of this release.
pub(crate) fn is_agent(pod: &Pod, release_namespace: &str) -> bool {
    let has = |(key, value): (&str, &str)| {
        pod.metadata.labels.as_ref().and_then(|labels| labels.get(key)).is_some_and(|v| v == value)
    };
    pod.metadata.namespace.as_deref() == Some(release_namespace) && LABELS.into_iter().all(has)
}

fn is_ready_on(pod: &Pod, node: &str) -> bool {
    let conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node)
        && pod.metadata.deletion_timestamp.is_none()
        && conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    #[test]
    fn the_time_without_an_agent_begins_when_it_is_noticed_and_ends_with_the_next() {
        let (agents, start) = (Agents::default(), Instant::now());
        let away = |ready, seconds| {
            agents.away("n1", ready, start + Duration::from_secs(seconds)).map(|d| d.as_secs())
        };
        assert_eq!(away(true, 0), None);
        assert_eq!(away(false, 5), Some(0));
        assert_eq!(away(false, 65), Some(60));
        assert_eq!(away(true, 66), None);
        assert_eq!(away(false, 70), Some(0));
    }

    #[test]
    fn only_a_ready_agent_of_this_release_on_that_node_counts() {
        let pod = |namespace: &str, component: &str, ready: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"namespace": namespace, "labels": {
                    "app.kubernetes.io/part-of": "highwater", "app.kubernetes.io/component": component}},
                "spec": {"nodeName": "n1", "containers": []},
                "status": {"conditions": [{"type": "Ready", "status": ready}]}}))
            .unwrap()
        };
        assert!(is_agent(&pod("hw", "agent", "True"), "hw"));
        assert!(!is_agent(&pod("other", "agent", "True"), "hw"));
        assert!(!is_agent(&pod("hw", "operator", "True"), "hw"));
        assert!(is_ready_on(&pod("hw", "agent", "True"), "n1"));
        assert!(!is_ready_on(&pod("hw", "agent", "True"), "n2"));
        assert!(!is_ready_on(&pod("hw", "agent", "False"), "n1"));
    }
}
