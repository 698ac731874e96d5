//! Keeps the stores up to date and says what has to be looked at.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Debug,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use futures::StreamExt;
use highwater_crds::{GpuMemoryIncident, names};
use highwater_policy::{
    drain::{self, Field},
    remediation::{Carrier, carrier},
};
use k8s_openapi::{
    api::core::v1::{Container, Node, NodeSpec, NodeStatus, Pod, PodSpec, PodStatus, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::{
    Api, Resource,
    core::{DeserializeGuard, NamespaceResourceScope, PartialObjectMeta},
    runtime::{
        WatchStreamExt,
        reflector::store::Writer,
        utils::Backoff,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;
use tracing::warn;

use crate::{
    agents::{LABELS, is_agent},
    context::{Context, Writers, is_open, key},
    incident_controller::{show_halt, show_tickets, wake_siblings},
    node_controller::cordon,
};

/// Annotation that the kubelet puts on the API's copy of a static pod.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Label by which a StatefulSet says from which of its templates it made a pod.
pub(crate) const REVISION: &str = "controller-revision-hash";

/// Starts every watch. None of them ends by itself.
pub(crate) fn spawn(tasks: &mut JoinSet<anyhow::Result<()>>, ctx: &Arc<Context>, writers: Writers) {
    let mut watches = Watches { tasks, ctx };
    watches.all(writers.policies, drop_managed, |ctx, _, _| {
        ctx.signals.plans.notify_one();
        ctx.wake_incidents(|_| true);
    });
    watches.all(writers.plans, drop_managed, |ctx, plan, _| {
        ctx.signals.plans.notify_one();
        let node = plan.meta().name.clone().unwrap_or_default();
        ctx.wake_incidents(|i| i.spec.node == node);
        ctx.signals.nodes.add(node);
    });
    watches.all(writers.incidents, drop_managed, |ctx, guard, _| {
        match &guard.0 {
            Ok(incident) => {
                ctx.signals.incidents.add(key(&incident.metadata));
                // One drain less: another may begin.
                let ended = !is_open(incident);
                ctx.wake_incidents(|i| {
                    i.spec.device == incident.spec.device || (ended && both_drain(i, incident))
                });
                wake_siblings(ctx, incident);
                if carrier(&incident.spec.proposed) == Carrier::Drain {
                    // Its cordon, and its request for a reset, stand and fall with it.
                    ctx.signals.nodes.add(incident.spec.node.clone());
                }
            }
            Err(invalid) => {
                let (namespace, name) = key(&invalid.metadata);
                warn!(namespace, name, error = invalid.error, "an incident cannot be read and is left alone");
            }
        }
        show_halt(ctx);
        show_tickets(ctx);
    });
    let mut seen = Changes::default();
    watches.all(writers.nodes, strip_node, move |ctx, node: &Node, news| {
        // The kubelet renews the status of a node all the time.
        if seen.changed(node.metadata.name.as_deref(), news, &node_facts(node)) {
            let name = node.metadata.name.clone().unwrap_or_default();
            ctx.signals.plans.notify_one();
            ctx.wake_incidents(|i| i.spec.node == name);
            ctx.signals.nodes.add(name);
        }
    });
    let mut seen = Changes::default();
    watches.all(writers.namespaces, drop_managed, move |ctx, namespace: &PartialObjectMeta<_>, news| {
        let meta = &namespace.metadata;
        if seen.changed(meta.name.as_deref(), news, &(&meta.labels, &meta.annotations)) {
            ctx.wake_all(); // its pause may be that of the whole install
        }
    });
    watches.all(writers.pods, strip_pod, |ctx, pod: &Pod, _| {
        if is_agent(pod, &ctx.release_namespace) {
            let node = pod.spec.as_ref().and_then(|s| s.node_name.clone()).unwrap_or_default();
            ctx.wake_incidents(|i| i.spec.node == node);
            ctx.signals.nodes.add(node);
        }
        let uid = pod.metadata.uid.as_deref();
        let node = pod.spec.as_ref().and_then(|s| s.node_name.as_deref()).filter(|_| drain::uses_gpu(pod));
        ctx.wake_incidents(|i| match &i.spec.subject {
            Some(subject) => Some(subject.uid.as_str()) == uid,
            None => carrier(&i.spec.proposed) == Carrier::Drain && Some(i.spec.node.as_str()) == node,
        });
    });
    watches.all(writers.replica_sets, strip_owner, |_, _, _| {});
    watches.all(writers.stateful_sets, strip_owner, |_, _, _| {});
    watches.all(writers.jobs, strip_owner, |_, _, _| {});
    watches.one(names::BUDGET_CONFIG_MAP, writers.ledger);
    watches.one(names::LEADER_LEASE, writers.lease);
}

struct Watches<'a> {
    tasks: &'a mut JoinSet<anyhow::Result<()>>,
    ctx: &'a Arc<Context>,
}

impl Watches<'_> {
    /// Watches every object of a kind.
    fn all<K>(
        &mut self,
        writer: Writer<K>,
        strip: fn(&mut K),
        on: impl FnMut(&Context, &K, News) + Send + 'static,
    ) where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    {
        let api = Api::all(self.ctx.client.clone());
        let config = watcher::Config::default();
        self.tasks.spawn(reflect(Arc::clone(self.ctx), api, config, writer, strip, on));
    }

    /// Watches one object of the release.
    fn one<K>(&mut self, name: &str, writer: Writer<K>)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + Sync
            + 'static,
    {
        let api = Api::namespaced(self.ctx.client.clone(), &self.ctx.release_namespace);
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        self.tasks.spawn(reflect(Arc::clone(self.ctx), api, config, writer, drop_managed, |_, _, _| {}));
    }
}

/// Whether one of two drains may wait for the other.
fn both_drain(one: &GpuMemoryIncident, other: &GpuMemoryIncident) -> bool {
    [one, other].into_iter().all(|i| carrier(&i.spec.proposed) == Carrier::Drain)
}

/// What happened to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    /// It is new or has changed.
    Applied,
    /// It is gone.
    Deleted,
}

/// Follows one kind: every change goes into its store and then to `on`.
async fn reflect<K>(
    ctx: Arc<Context>,
    api: Api<K>,
    config: watcher::Config,
    writer: Writer<K>,
    strip: fn(&mut K),
    mut on: impl FnMut(&Context, &K, News) + Send,
) -> anyhow::Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let kind = K::kind(&()).to_string();
    let mut stream =
        std::pin::pin!(watcher(api, config).backoff(Patience::default()).modify(strip).reflect(writer));
    while let Some(event) = stream.next().await {
        match event {
            Ok(Event::Apply(object)) => on(&ctx, &object, News::Applied),
            Ok(Event::Delete(object)) => on(&ctx, &object, News::Deleted),
            // A list reaches the store as a whole when it is complete.
            Ok(Event::Init | Event::InitApply(_)) => {}
            Ok(Event::InitDone) => ctx.wake_all(),
            Err(error) => {
                ctx.metrics.watch_errors.with_label_values(&[kind.as_str()]).inc();
                warn!(kind, %error, "watch interrupted");
            }
        }
    }
    anyhow::bail!("the watch of {kind} ended")
}

/// Waits between attempts to watch. Much shorter at most than the usual 30 s: what happened while
/// the API server was away is caught up within seconds of its return.
#[derive(Default)]
struct Patience(u32);

impl Patience {
    const FIRST: Duration = Duration::from_millis(250);
    const LONGEST: Duration = Duration::from_secs(2);
}

impl Iterator for Patience {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = (Self::FIRST * 2u32.pow(self.0.min(8))).min(Self::LONGEST);
        self.0 = self.0.saturating_add(1);
        Some(wait)
    }
}

impl Backoff for Patience {
    fn reset(&mut self) {
        self.0 = 0;
    }
}

/// Tells which events change what matters of an object.
#[derive(Default)]
struct Changes(HashMap<String, u64>);

impl Changes {
    fn changed(&mut self, name: Option<&str>, news: News, facts: &impl Hash) -> bool {
        if news == News::Deleted {
            self.0.remove(name.unwrap_or_default());
            return true;
        }
        let mut hasher = DefaultHasher::new();
        facts.hash(&mut hasher);
        let hash = hasher.finish();
        self.0.insert(name.unwrap_or_default().to_owned(), hash) != Some(hash)
    }
}

fn node_facts(node: &Node) -> impl Hash {
    let taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    let ours = taints.filter(|t| t.key == names::PRESSURE_TAINT);
    let annotation = |key| node.metadata.annotations.as_ref().and_then(|a| a.get(key)).cloned();
    (
        node.metadata.uid.clone(),
        node.metadata.labels.clone(),
        [names::PAUSED, names::CORDONED_FOR, names::RESET_REQUESTED].map(annotation),
        cordon::field(node).map(|field| field == Field::Ours),
        ours.map(|t| t.value.clone()).collect::<Vec<_>>(),
        node.metadata.deletion_timestamp.is_some(),
    )
}

fn drop_managed<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

fn strip_owner<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    meta.labels = None;
    meta.annotations = None;
}

fn strip_node(node: &mut Node) {
    cordon::strip_managed(node);
    node.status = node
        .status
        .take()
        .map(|status| NodeStatus { allocatable: status.allocatable.map(of_gpus), ..NodeStatus::default() });
    node.spec = node.spec.take().map(|s| NodeSpec {
        taints: s.taints,
        unschedulable: s.unschedulable,
        ..NodeSpec::default()
    });
}

/// Of quantities those of GPUs.
fn of_gpus(mut quantities: BTreeMap<String, Quantity>) -> BTreeMap<String, Quantity> {
    quantities.retain(|name, _| drain::is_gpu(name));
    quantities
}

/// Of a pod's containers what they ask for of GPUs.
fn strip_containers(containers: Vec<Container>) -> Vec<Container> {
    let stripped = containers.into_iter().map(|container| Container {
        name: container.name,
        resources: container.resources.map(|r| ResourceRequirements {
            limits: r.limits.map(of_gpus),
            ..ResourceRequirements::default()
        }),
        ..Container::default()
    });
    stripped
        .filter(|c| c.resources.as_ref().and_then(|r| r.limits.as_ref()).is_some_and(|l| !l.is_empty()))
        .collect()
}

/// Keeps what counts for `maxUnavailable`, what tells an agent, and, of a pod that uses a GPU, what a
/// drain has to know of it.
fn strip_pod(pod: &mut Pod) {
    let uses_gpu = drain::uses_gpu(pod);
    let annotations = pod.metadata.annotations.take().filter(|_| uses_gpu).map(|mut annotations| {
        annotations.retain(|key, _| [names::PAUSED, MIRROR].contains(&key.as_str()));
        annotations
    });
    let kept = pod.metadata.labels.take().map(|mut labels| {
        labels.retain(|key, value| {
            LABELS.contains(&(key.as_str(), value.as_str())) || (uses_gpu && key == REVISION)
        });
        labels
    });
    strip_owner(pod);
    pod.metadata.labels = kept.filter(|labels| !labels.is_empty());
    pod.metadata.annotations = annotations.filter(|annotations| !annotations.is_empty());
    pod.spec = pod.spec.take().map(|s| {
        let stripped = PodSpec { node_name: s.node_name, ..PodSpec::default() };
        if !uses_gpu {
            return stripped;
        }
        PodSpec {
            containers: strip_containers(s.containers),
            init_containers: s.init_containers.map(strip_containers),
            resource_claims: s.resource_claims,
            node_selector: s.node_selector,
            priority: s.priority,
            priority_class_name: s.priority_class_name,
            ..stripped
        }
    });
    pod.status = pod.status.take().map(|mut status| PodStatus {
        phase: status.phase,
        conditions: status.conditions.take().map(|mut conditions| {
            conditions.retain(|c| c.type_ == "Ready");
            conditions
        }),
        ..PodStatus::default()
    });
}

/// Whether an object can be read.
pub(crate) fn readable<K>(guard: &DeserializeGuard<K>) -> Option<&K> {
    guard.0.as_ref().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_heartbeat_of_a_node_is_no_change_but_our_taint_is() {
        let node = |labels: &str, taint: &str| {
            let mut node: Node = serde_json::from_value(json!({
                "metadata": {"name": "n1", "labels": {"pool": labels}, "resourceVersion": "7"},
                "spec": {"taints": [{"key": names::PRESSURE_TAINT, "value": taint, "effect": "NoSchedule"},
                                    {"key": "other", "effect": "NoSchedule"}]},
                "status": {"conditions": []},
            }))
            .unwrap();
            strip_node(&mut node);
            node
        };
        let mut seen = Changes::default();
        let mut heard = |node: &Node, news| seen.changed(Some("n1"), news, &node_facts(node));
        let mut change = |node: &Node| heard(node, News::Applied);
        assert!(change(&node("a", "Critical")));
        assert!(!change(&node("a", "Critical")));
        assert!(change(&node("a", "Emergency")));
        assert!(change(&node("b", "Emergency")));
        assert!(heard(&node("b", "Emergency"), News::Deleted));
        assert!(heard(&node("b", "Emergency"), News::Applied), "one that comes back is new");
    }

    #[test]
    fn a_pod_that_uses_a_gpu_keeps_what_a_drain_asks_for() {
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "uid": "u", "annotations": {names::PAUSED: "true", "a": "b"}},
            "spec": {"nodeName": "n1", "priority": 7, "nodeSelector": {"pool": "a"}, "containers": [
                {"name": "side", "image": "i"},
                {"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "1"}}}]},
        }))
        .unwrap();
        strip_pod(&mut pod);
        assert!(drain::uses_gpu(&pod));
        let facts = highwater_policy::pod::PodFacts::parse(&pod);
        assert!(facts.paused && facts.priority == 7);
        let spec = pod.spec.unwrap();
        assert!(spec.node_selector.is_some() && spec.containers.len() == 1);
        assert_eq!(spec.containers[0].image, None);
        assert_eq!(pod.metadata.annotations.unwrap().len(), 1);
    }

    #[test]
    fn a_pod_keeps_its_readiness_and_loses_the_rest() {
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "uid": "u", "labels": {"a": "b"}},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [
                {"type": "Ready", "status": "True"}, {"type": "Initialized", "status": "True"}]},
        }))
        .unwrap();
        strip_pod(&mut pod);
        assert!(pod.metadata.labels.is_none() && pod.spec.as_ref().unwrap().containers.is_empty());
        assert_eq!(pod.status.unwrap().conditions.unwrap().len(), 1);
    }
}
