//! What every controller shares.

use std::{collections::BTreeMap, sync::Arc};

use highwater_crds::{
    DecisionState, GpuMemoryIncident, GpuMemoryNode, GpuMemoryNodeSpec, GpuMemoryPolicy, names,
};
use highwater_policy::{
    pod::{NamespaceFacts, is_paused},
    resolve::Policies,
};
use jiff::Timestamp;
use k8s_openapi::{
    api::{
        apps::v1::{ReplicaSet, StatefulSet},
        batch::v1::Job,
        coordination::v1::Lease,
        core::v1::{ConfigMap, Namespace, Node, Pod},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Client, Resource,
    api::Patch,
    core::{DeserializeGuard, PartialObjectMeta},
    runtime::reflector::{ObjectRef, Store, store::Writer},
};
use serde::Serialize;
use tokio::sync::{Notify, mpsc, watch};
use tracing::{debug, warn};

use crate::{
    agents::Agents,
    claims::Claims,
    error::Error,
    events::{Events, Message},
    incident_controller::{Leases, Refusals, Reservations},
    leader::Leadership,
    metrics::Metrics,
    node_controller::{device_taint::DeviceTaints, labels::Told},
    queue::{Again, Queue},
    uninstall,
    written::Written,
};

/// Namespace and name of an incident.
pub(crate) type Key = (String, String);

pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) release_namespace: String,
    /// Since when this replica runs.
    pub(crate) started: Timestamp,
    pub(crate) stores: Stores,
    pub(crate) signals: Signals,
    pub(crate) leader: Leadership,
    pub(crate) metrics: Metrics,
    pub(crate) events: Events,
    pub(crate) claims: Claims,
    pub(crate) agents: Agents,
    pub(crate) refusals: Refusals,
    pub(crate) written: Written,
    pub(crate) reservations: Reservations,
    /// The labels of nodes that were written.
    pub(crate) told: Told,
    pub(crate) device_taints: DeviceTaints,
    pub(crate) leases: Leases,
    /// Why the whole fleet stands still, if it does.
    pub(crate) halted: watch::Sender<Option<Halt>>,
    /// What the policies come to, as last resolved.
    pub(crate) known: watch::Receiver<Arc<Known>>,
}

/// The whole fleet stands still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Halt {
    /// The policy whose share was passed.
    pub(crate) policy: String,
    /// Why, with the numbers.
    pub(crate) why: String,
}

/// What the policies come to. Plans are here before any agent can have followed them.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) policies: Policies,
    pub(crate) plans: BTreeMap<String, Arc<GpuMemoryNodeSpec>>,
}

/// What the API server holds, as last heard.
pub(crate) struct Stores {
    pub(crate) policies: Store<DeserializeGuard<GpuMemoryPolicy>>,
    pub(crate) plans: Store<DeserializeGuard<GpuMemoryNode>>,
    pub(crate) incidents: Store<DeserializeGuard<GpuMemoryIncident>>,
    pub(crate) nodes: Store<Node>,
    pub(crate) namespaces: Store<PartialObjectMeta<Namespace>>,
    pub(crate) pods: Store<Pod>,
    pub(crate) replica_sets: Store<PartialObjectMeta<ReplicaSet>>,
    pub(crate) stateful_sets: Store<PartialObjectMeta<StatefulSet>>,
    pub(crate) jobs: Store<PartialObjectMeta<Job>>,
    pub(crate) ledger: Store<ConfigMap>,
    pub(crate) lease: Store<Lease>,
}

/// The other ends of the stores.
pub(crate) struct Writers {
    pub(crate) policies: Writer<DeserializeGuard<GpuMemoryPolicy>>,
    pub(crate) plans: Writer<DeserializeGuard<GpuMemoryNode>>,
    pub(crate) incidents: Writer<DeserializeGuard<GpuMemoryIncident>>,
    pub(crate) nodes: Writer<Node>,
    pub(crate) namespaces: Writer<PartialObjectMeta<Namespace>>,
    pub(crate) pods: Writer<Pod>,
    pub(crate) replica_sets: Writer<PartialObjectMeta<ReplicaSet>>,
    pub(crate) stateful_sets: Writer<PartialObjectMeta<StatefulSet>>,
    pub(crate) jobs: Writer<PartialObjectMeta<Job>>,
    pub(crate) ledger: Writer<ConfigMap>,
    pub(crate) lease: Writer<Lease>,
}

impl Stores {
    pub(crate) fn new() -> (Self, Writers) {
        use kube::runtime::reflector::store;
        let (policies, policies_writer) = store();
        let (plans, plans_writer) = store();
        let (incidents, incidents_writer) = store();
        let (nodes, nodes_writer) = store();
        let (namespaces, namespaces_writer) = store();
        let (pods, pods_writer) = store();
        let (replica_sets, replica_sets_writer) = store();
        let (stateful_sets, stateful_sets_writer) = store();
        let (jobs, jobs_writer) = store();
        let (ledger, ledger_writer) = store();
        let (lease, lease_writer) = store();
        let stores = Self {
            policies,
            plans,
            incidents,
            nodes,
            namespaces,
            pods,
            replica_sets,
            stateful_sets,
            jobs,
            ledger,
            lease,
        };
        let writers = Writers {
            policies: policies_writer,
            plans: plans_writer,
            incidents: incidents_writer,
            nodes: nodes_writer,
            namespaces: namespaces_writer,
            pods: pods_writer,
            replica_sets: replica_sets_writer,
            stateful_sets: stateful_sets_writer,
            jobs: jobs_writer,
            ledger: ledger_writer,
            lease: lease_writer,
        };
        (stores, writers)
    }

    /// Waits until every store has heard everything once. Nothing may be decided before: what is
    /// absent from a store that is not ready may well exist.
    pub(crate) async fn ready(&self) -> anyhow::Result<()> {
        self.policies.wait_until_ready().await?;
        self.plans.wait_until_ready().await?;
        self.incidents.wait_until_ready().await?;
        self.nodes.wait_until_ready().await?;
        self.namespaces.wait_until_ready().await?;
        self.pods.wait_until_ready().await?;
        self.replica_sets.wait_until_ready().await?;
        self.stateful_sets.wait_until_ready().await?;
        self.jobs.wait_until_ready().await?;
        self.ledger.wait_until_ready().await?;
        self.lease.wait_until_ready().await?;
        Ok(())
    }

    /// The incidents that can be read, of those that satisfy `wanted`.
    pub(crate) fn incidents(&self, wanted: impl Fn(&GpuMemoryIncident) -> bool) -> Vec<GpuMemoryIncident> {
        self.incidents
            .state()
            .iter()
            .filter_map(|guard| guard.0.as_ref().ok())
            .filter(|incident| wanted(incident))
            .cloned()
            .collect()
    }

    pub(crate) fn plan(&self, node: &str) -> Option<Arc<DeserializeGuard<GpuMemoryNode>>> {
        self.plans.get(&ObjectRef::new(node))
    }

    pub(crate) fn node(&self, name: &str) -> Option<Arc<Node>> {
        self.nodes.get(&ObjectRef::new(name))
    }

    pub(crate) fn namespace(&self, name: &str) -> Option<NamespaceFacts> {
        let namespace = self.namespaces.get(&ObjectRef::new(name))?;
        Some(NamespaceFacts::from_metadata(&namespace.metadata))
    }

    /// The namespaces that acts may concern at all.
    pub(crate) fn actionable_namespaces(&self, release: &str) -> BTreeMap<String, NamespaceFacts> {
        self.namespaces
            .state()
            .iter()
            .filter_map(|n| Some((n.metadata.name.clone()?, NamespaceFacts::from_metadata(&n.metadata))))
            .filter(|(name, _)| name != release && !names::SYSTEM_NAMESPACES.contains(&name.as_str()))
            .collect()
    }
}

/// What is to be looked at.
pub(crate) struct Signals {
    /// Policies, nodes or namespaces changed: the plans may have to.
    pub(crate) plans: Notify,
    pub(crate) incidents: Arc<Queue<Key>>,
    pub(crate) nodes: Arc<Queue<String>>,
}

/// The other ends of a context: who holds them has it hear, lead, know and be heard.
pub(crate) struct Ends {
    /// Of the stores.
    pub(crate) writers: Writers,
    /// The Events that are to be published.
    pub(crate) events: mpsc::Receiver<Message>,
    /// Whether this replica leads. At first it does not.
    pub(crate) leads: watch::Sender<bool>,
    /// What the policies come to.
    pub(crate) learnt: watch::Sender<Arc<Known>>,
}

impl Context {
    /// The context of an operator that knows nothing yet, with its other ends.
    ///
    /// # Errors
    /// Fails when metrics cannot be registered.
    pub(crate) fn new(client: Client, release_namespace: String) -> prometheus::Result<(Self, Ends)> {
        let metrics = Metrics::new()?;
        let (stores, writers) = Stores::new();
        let (sink, events) = Events::new(metrics.clone());
        let (leads, leader) = Leadership::new();
        let (learnt, known) = watch::channel(Arc::default());
        let context = Self {
            client,
            release_namespace,
            started: Timestamp::now(),
            stores,
            signals: Signals {
                plans: Notify::new(),
                incidents: Arc::new(Queue::new()),
                nodes: Arc::new(Queue::new()),
            },
            leader,
            metrics,
            events: sink,
            claims: Claims::default(),
            agents: Agents::default(),
            refusals: Refusals::default(),
            written: Written::default(),
            reservations: Reservations::default(),
            told: Told::default(),
            device_taints: DeviceTaints::default(),
            leases: Leases::default(),
            halted: watch::channel(None).0,
            known,
        };
        Ok((context, Ends { writers, events, leads, learnt }))
    }

    /// Looks at the open incidents that satisfy `wanted`.
    pub(crate) fn wake_incidents(&self, wanted: impl Fn(&GpuMemoryIncident) -> bool) {
        for incident in self.stores.incidents(|i| is_open(i) && wanted(i)) {
            self.signals.incidents.add(key(&incident.metadata));
        }
    }

    /// Looks at everything.
    pub(crate) fn wake_all(&self) {
        self.signals.plans.notify_one();
        self.wake_incidents(|_| true);
        for node in self.stores.nodes.state() {
            self.signals.nodes.add(node.metadata.name.clone().unwrap_or_default());
        }
    }

    /// What stops new acts on a node and in a namespace, if something does.
    pub(crate) fn paused(&self, node: &str, namespace: Option<&str>) -> Option<String> {
        let release = self.release_namespace.as_str();
        let paused = |name: &str| self.stores.namespace(name).is_some_and(|n| n.paused);
        if self.uninstalling() {
            return Some(format!("the Lease {} (the release is being uninstalled)", names::LEADER_LEASE));
        }
        if paused(release) {
            return Some(format!("the release namespace {release}"));
        }
        if self.stores.node(node).is_some_and(|n| is_paused(&n.metadata)) {
            return Some(format!("node {node}"));
        }
        namespace.filter(|n| paused(n)).map(|n| format!("namespace {n}"))
    }

    /// Whether the release is being uninstalled, as last heard.
    pub(crate) fn uninstalling(&self) -> bool {
        let lease =
            self.stores.lease.get(&ObjectRef::new(names::LEADER_LEASE).within(&self.release_namespace));
        lease.is_some_and(|lease| uninstall::under_way(&lease, self.started, Timestamp::now()))
    }

    /// Counts and logs an error, and says when to try again.
    pub(crate) fn failed(&self, controller: &str, key: &str, error: &Error) -> Again {
        if error.is_ordinary() {
            debug!(controller, key, %error, "looking again");
        } else {
            warn!(controller, key, %error, "reconciling failed");
            self.metrics.reconcile_errors.with_label_values(&[controller, error.category()]).inc();
        }
        match error {
            Error::NotLeader => Again::OnChange,
            _ => Again::Backoff(error.leaves_alone().unwrap_or_default()),
        }
    }
}

/// Whether something may still be done about an incident.
pub(crate) fn is_open(incident: &GpuMemoryIncident) -> bool {
    state(incident).is_none_or(|state| !state.is_final())
}

/// Where an incident stands.
pub(crate) fn state(incident: &GpuMemoryIncident) -> Option<DecisionState> {
    incident.status.as_ref()?.decision.as_ref().map(|d| d.state)
}

/// Namespace and name.
pub(crate) fn key(meta: &ObjectMeta) -> Key {
    (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
}

/// A server-side apply of one part (`spec` or `status`) of an object that exists: with its UID, so
/// that an object that was deleted meanwhile is not made anew.
pub(crate) fn apply_to<K>(meta: &ObjectMeta, part: &str, value: impl Serialize) -> Patch<serde_json::Value>
where
    K: Resource<DynamicType = ()>,
{
    Patch::Apply(serde_json::json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid},
        (part): value,
    }))
}
