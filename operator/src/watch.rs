//! Keeps the stores up to date and says what has to be looked at.

use std::{
    collections::HashMap,
    fmt::Debug,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use futures::StreamExt;
use highwater_crds::names;
use k8s_openapi::api::core::v1::{Node, NodeSpec, Pod, PodSpec, PodStatus};
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
    context::{Context, Writers, key},
    incident_controller::show_halt,
};

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
                ctx.wake_incidents(|i| i.spec.device == incident.spec.device);
            }
            Err(invalid) => {
                let (namespace, name) = key(&invalid.metadata);
                warn!(namespace, name, error = invalid.error, "an incident cannot be read and is left alone");
            }
        }
        show_halt(ctx);
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
        ctx.wake_incidents(|i| i.spec.subject.as_ref().map(|s| s.uid.as_str()) == uid);
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
    (
        node.metadata.uid.clone(),
        node.metadata.labels.clone(),
        node.metadata.annotations.as_ref().and_then(|a| a.get(names::PAUSED)).cloned(),
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
    drop_managed(node);
    node.status = None;
    node.spec = node.spec.take().map(|s| NodeSpec { taints: s.taints, ..NodeSpec::default() });
}

/// Keeps what counts for `maxUnavailable`, and what tells an agent.
fn strip_pod(pod: &mut Pod) {
    let kept = pod.metadata.labels.take().map(|mut labels| {
        labels.retain(|key, value| LABELS.contains(&(key.as_str(), value.as_str())));
        labels
    });
    strip_owner(pod);
    pod.metadata.labels = kept.filter(|labels| !labels.is_empty());
    pod.spec = pod.spec.take().map(|s| PodSpec { node_name: s.node_name, ..PodSpec::default() });
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
