//! What the API server says about this node: pods, namespaces, the node, its plan, its incidents.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use highwater_crds::{GpuMemoryIncident, GpuMemoryNode, names};
use highwater_policy::{
    pod::{self, NamespaceFacts, PodFacts},
    time::Millis,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;

/// A change of a set of objects.
#[derive(Debug)]
pub(crate) enum Change<T> {
    /// The set was listed anew. `complete` is false where some object could not be read; what is
    /// known of these stands.
    Reset {
        /// What is there.
        items: Vec<T>,
        /// Whether that is all.
        complete: bool,
    },
    /// This one is there.
    Upsert(T),
    /// This one is gone.
    Remove(T),
}

/// A change of one kind of object.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // short-lived and few
pub(crate) enum WorldChange {
    /// Pods of this node.
    Pod(Change<PodFacts>),
    /// Namespaces, by name.
    Namespace(Change<(String, NamespaceFacts)>),
    /// The node.
    Node(Change<NodeFacts>),
    /// The node's `GpuMemoryNode`.
    Plan(Change<GpuMemoryNode>),
    /// The node's incidents.
    Incident(Change<GpuMemoryIncident>),
}

/// A pod of this node.
#[derive(Debug)]
pub(crate) struct Pod {
    /// Its facts.
    pub(crate) facts: PodFacts,
    /// UID in the API.
    pub(crate) uid: Arc<str>,
    /// UID by which the kubelet, and so a cgroup, knows it.
    pub(crate) kubelet_uid: Arc<str>,
    /// When this agent first saw it.
    pub(crate) first_seen: Millis,
    /// Containers that the host's kernel killed for lack of host memory.
    pub(crate) host_oom_kills: u64,
}

/// What matters of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    /// UID.
    pub(crate) uid: String,
    /// New acts on this node are switched off.
    pub(crate) paused: bool,
    /// The agent is to let go of the devices.
    pub(crate) stand_down: bool,
}

/// The GPU operator's label for the state of a driver upgrade on a node.
const DRIVER_UPGRADE: &str = "nvidia.com/gpu-driver-upgrade-state";
/// The states in which it is about to replace the driver.
const DRIVER_UPGRADES: [&str; 3] = ["pod-deletion-required", "drain-required", "pod-restart-required"];

impl NodeFacts {
    /// Reads a node's metadata.
    pub(crate) fn from_metadata(meta: &ObjectMeta) -> Self {
        let label = |key: &str| meta.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
        let upgrading = label(DRIVER_UPGRADE).is_some_and(|state| DRIVER_UPGRADES.contains(&state));
        Self {
            uid: meta.uid.clone().unwrap_or_default(),
            paused: pod::is_paused(meta),
            stand_down: label(names::STAND_DOWN) == Some("true") || upgrading,
        }
    }
}

/// Pods by the kubelet's UID.
pub(crate) type Pods = HashMap<Arc<str>, Arc<Pod>>;

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct World {
    /// Pods by the kubelet's UID.
    pub(crate) pods: Pods,
    /// Namespaces by name.
    pub(crate) namespaces: HashMap<String, NamespaceFacts>,
    /// The node.
    pub(crate) node: Option<NodeFacts>,
    /// The node's `GpuMemoryNode`.
    pub(crate) object: Option<GpuMemoryNode>,
    /// Incidents of this node by namespace and name.
    pub(crate) incidents: BTreeMap<(String, String), GpuMemoryIncident>,
    /// The node's `GpuMemoryNode` could be read when it was listed last: where there is none, there
    /// is none.
    pub(crate) object_readable: bool,
    /// Which kinds were listed once: pods, namespaces, node, plan, incidents.
    pub(crate) synced: Synced,
}

/// Which kinds of object have been listed.
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::struct_excessive_bools)] // one a kind
pub(crate) struct Synced {
    /// Pods of the node.
    pub(crate) pods: bool,
    /// Namespaces.
    pub(crate) namespaces: bool,
    /// The node.
    pub(crate) node: bool,
    /// Its `GpuMemoryNode`.
    pub(crate) plan: bool,
    /// Its incidents.
    pub(crate) incidents: bool,
}

impl Synced {
    /// Whether all were.
    pub(crate) fn all(self) -> bool {
        self.pods && self.namespaces && self.node && self.plan && self.incidents
    }
}

/// What a change means for the agent.
#[derive(Debug, Default)]
pub(crate) struct Effect {
    /// Who is where, or what holds for whom, changed.
    pub(crate) rules: bool,
    /// Pods with annotations that cannot be used, which were not there or said otherwise before.
    pub(crate) malformed: Vec<Arc<Pod>>,
}

impl World {
    /// Takes in a change.
    pub(crate) fn apply(&mut self, change: WorldChange, now: Millis) -> Effect {
        let mut effect = Effect::default();
        match change {
            WorldChange::Pod(change) => {
                if let Change::Reset { items, complete: true } = &change {
                    let known = self.pods.len();
                    self.pods.retain(|_, pod| items.iter().any(|facts| facts.uid == *pod.uid));
                    effect.rules |= known != self.pods.len();
                }
                let pods = &mut self.pods;
                each(change, &mut self.synced.pods, |facts, present| {
                    pod_change(pods, facts, present, now, &mut effect);
                });
            }
            WorldChange::Namespace(change) => {
                if let Change::Reset { complete: true, .. } = &change {
                    self.namespaces.clear();
                }
                effect.rules = true;
                each(change, &mut self.synced.namespaces, |(name, facts), present| {
                    if present {
                        self.namespaces.insert(name, facts);
                    } else {
                        self.namespaces.remove(&name);
                    }
                });
            }
            WorldChange::Node(change) => {
                if let Change::Reset { complete: true, .. } = &change {
                    self.node = None;
                }
                each(change, &mut self.synced.node, |facts, present| self.node = present.then_some(facts));
            }
            WorldChange::Plan(change) => {
                if let Change::Reset { complete, .. } = &change {
                    self.object_readable = *complete;
                    if *complete {
                        self.object = None;
                    }
                }
                each(change, &mut self.synced.plan, |object, present| {
                    self.object = present.then_some(object);
                });
                effect.rules = true;
            }
            WorldChange::Incident(change) => {
                if let Change::Reset { complete: true, .. } = &change {
                    self.incidents.clear();
                }
                each(change, &mut self.synced.incidents, |incident, present| {
                    let key = (incident.namespace().unwrap_or_default(), incident.name_any());
                    if present {
                        self.incidents.insert(key, incident);
                    } else {
                        self.incidents.remove(&key);
                    }
                });
            }
        }
        effect
    }

    /// Whether new acts on a pod are switched off: for the pod, its namespace, the node or the
    /// whole install.
    pub(crate) fn paused(&self, pod: &PodFacts, release_namespace: &str) -> bool {
        let namespace = |name: &str| self.namespaces.get(name).is_some_and(|facts| facts.paused);
        pod.paused
            || namespace(&pod.namespace)
            || namespace(release_namespace)
            || self.node.as_ref().is_some_and(|node| node.paused)
    }
}

fn pod_change(pods: &mut Pods, facts: PodFacts, present: bool, now: Millis, effect: &mut Effect) {
    let key = facts.kubelet_uid();
    let known = pods.get(key);
    let another = known.is_some_and(|pod| *pod.uid != *facts.uid);
    if !present {
        if !another {
            effect.rules |= pods.remove(key).is_some();
        }
        return;
    }
    // Who only says that it is the copy of a static pod takes nobody's place.
    if another && facts.static_uid.is_some() {
        return;
    }
    let known = known.filter(|_| !another);
    if known.is_some_and(|pod| pod.facts == facts) {
        return;
    }
    let before = known.map(|pod| &pod.facts.host_oom_killed);
    let kills = facts.host_oom_killed.iter().filter(|id| before.is_none_or(|ids| !ids.contains(*id))).count();
    let pod = Arc::new(Pod {
        uid: facts.uid.as_str().into(),
        kubelet_uid: key.into(),
        first_seen: known.map_or(now, |pod| pod.first_seen),
        host_oom_kills: known
            .map_or(0, |pod| pod.host_oom_kills)
            .saturating_add(u64::try_from(kills).unwrap_or(u64::MAX)),
        facts,
    });
    let said = known.map_or(&[][..], |pod| pod.facts.annotation_errors.as_slice());
    if !pod.facts.annotation_errors.is_empty() && pod.facts.annotation_errors != said {
        effect.malformed.push(Arc::clone(&pod));
    }
    effect.rules = true;
    pods.insert(Arc::clone(&pod.kubelet_uid), pod);
}

/// Calls `f` with every object and whether it is there.
fn each<T>(change: Change<T>, synced: &mut bool, mut f: impl FnMut(T, bool)) {
    match change {
        Change::Reset { items, .. } => {
            *synced = true;
            for item in items {
                f(item, true);
            }
        }
        Change::Upsert(item) => f(item, true),
        Change::Remove(item) => f(item, false),
    }
}

#[cfg(test)]
mod tests {
    use highwater_policy::pod::AnnotationError;

    use super::*;

    fn pod(uid: &str) -> PodFacts {
        PodFacts { uid: uid.into(), name: uid.into(), namespace: "team".into(), ..PodFacts::default() }
    }

    fn upsert(world: &mut World, facts: PodFacts) -> Effect {
        world.apply(WorldChange::Pod(Change::Upsert(facts)), Millis(0))
    }

    #[test]
    fn a_new_list_drops_what_is_gone_unless_it_is_incomplete() {
        let mut world = World::default();
        upsert(&mut world, pod("a"));
        let list = |complete| WorldChange::Pod(Change::Reset { items: vec![pod("b")], complete });
        world.apply(list(false), Millis(0));
        assert_eq!(world.pods.len(), 2);
        world.apply(list(true), Millis(0));
        assert_eq!(world.pods.keys().map(|k| &**k).collect::<Vec<_>>(), ["b"]);
        assert!(world.synced.pods && !world.synced.all());
    }

    #[test]
    fn a_pod_that_names_anothers_uid_neither_hides_nor_removes_it() {
        let forged = PodFacts { static_uid: Some("a".into()), ..pod("b") };
        let mut world = World::default();
        upsert(&mut world, pod("a"));
        upsert(&mut world, forged.clone());
        assert_eq!(*world.pods["a"].uid, *"a");
        world.apply(WorldChange::Pod(Change::Remove(forged.clone())), Millis(0));
        assert_eq!(*world.pods["a"].uid, *"a");
        // The pod that has the UID goes first, whenever it comes.
        let mut world = World::default();
        upsert(&mut world, forged);
        upsert(&mut world, pod("a"));
        assert_eq!(*world.pods["a"].uid, *"a");
    }

    #[test]
    fn a_malformed_annotation_is_told_once_a_change() {
        let bad = |reason: &str| PodFacts {
            annotation_errors: vec![AnnotationError { key: names::POD_LIMIT, reason: reason.into() }],
            ..pod("a")
        };
        let mut world = World::default();
        assert_eq!(upsert(&mut world, bad("x")).malformed.len(), 1);
        assert_eq!(upsert(&mut world, PodFacts { priority: 1, ..bad("x") }).malformed.len(), 0);
        assert_eq!(upsert(&mut world, bad("y")).malformed.len(), 1);
    }

    #[test]
    fn m11_each_host_oom_kill_counts_once() {
        let killed = |ids: &[&str]| PodFacts {
            host_oom_killed: ids.iter().map(|id| (*id).to_owned()).collect(),
            ..pod("a")
        };
        let mut world = World::default();
        for ids in [&["1"][..], &["1"], &["2"], &[]] {
            upsert(&mut world, killed(ids));
        }
        assert_eq!(world.pods["a"].host_oom_kills, 2);
    }

    #[test]
    fn each_of_the_four_switches_pauses() {
        let mut world = World::default();
        assert!(!world.paused(&pod("a"), "release"));
        assert!(world.paused(&PodFacts { paused: true, ..pod("a") }, "release"));
        for name in ["team", "release"] {
            world.namespaces =
                [(name.to_owned(), NamespaceFacts { paused: true, ..NamespaceFacts::default() })].into();
            assert!(world.paused(&pod("a"), "release"));
        }
        world.namespaces.clear();
        world.node = Some(NodeFacts { paused: true, ..NodeFacts::default() });
        assert!(world.paused(&pod("a"), "release"));
    }

    #[test]
    fn the_gpu_operators_driver_upgrade_makes_the_agent_stand_down() {
        let meta = |key: &str, value: &str| ObjectMeta {
            labels: Some([(key.to_owned(), value.to_owned())].into()),
            ..ObjectMeta::default()
        };
        assert!(NodeFacts::from_metadata(&meta(DRIVER_UPGRADE, "pod-restart-required")).stand_down);
        assert!(!NodeFacts::from_metadata(&meta(DRIVER_UPGRADE, "upgrade-done")).stand_down);
        assert!(NodeFacts::from_metadata(&meta(names::STAND_DOWN, "true")).stand_down);
    }
}
