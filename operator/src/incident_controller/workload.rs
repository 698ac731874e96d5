//! Whose pod it is, and how many of that workload's pods are down.

use std::{collections::BTreeSet, fmt};

use highwater_policy::pod::{Owner, PodFacts};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{ObjectReference, Pod},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Resource,
    core::PartialObjectMeta,
    runtime::reflector::{ObjectRef, Store},
};

use super::leaks;
use crate::context::Stores;

/// Longest chain of owners that is followed.
const DEPTH: usize = 4;

/// The top owner of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Workload {
    api_version: String,
    kind: String,
    name: String,
    uid: String,
}

impl Workload {
    /// Its UID.
    pub(super) fn uid(&self) -> &str {
        &self.uid
    }

    /// What an Event on it refers to.
    pub(crate) fn reference(&self, namespace: &str) -> ObjectReference {
        ObjectReference {
            api_version: Some(self.api_version.clone()),
            kind: Some(self.kind.clone()),
            namespace: Some(namespace.to_owned()),
            name: Some(self.name.clone()),
            uid: Some(self.uid.clone()),
            ..ObjectReference::default()
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.name)
    }
}

/// Follows the controllers of a pod up to one whose own controller is not known.
pub(crate) fn top_owner(stores: &Stores, pod: &PodFacts) -> Option<Workload> {
    Some(climb(stores, &pod.namespace, pod.owner.clone()?))
}

fn climb(stores: &Stores, namespace: &str, mut owner: Owner) -> Workload {
    for _ in 0..DEPTH {
        match above(stores, namespace, &owner) {
            Some(next) => owner = next,
            None => break,
        }
    }
    Workload { api_version: owner.api_version, kind: owner.kind, name: owner.name, uid: owner.uid }
}

fn above(stores: &Stores, namespace: &str, owner: &Owner) -> Option<Owner> {
    match owner.kind.as_str() {
        "ReplicaSet" => controller_of(&stores.replica_sets, namespace, owner),
        "StatefulSet" => controller_of(&stores.stateful_sets, namespace, owner),
        "Job" => controller_of(&stores.jobs, namespace, owner),
        _ => None,
    }
}

fn controller_of<K>(store: &Store<PartialObjectMeta<K>>, namespace: &str, owner: &Owner) -> Option<Owner>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    let object = store.get(&ObjectRef::new(&owner.name).within(namespace))?;
    (object.metadata.uid.as_deref() == Some(owner.uid.as_str())).then(|| controller(&object.metadata))?
}

fn controller(meta: &ObjectMeta) -> Option<Owner> {
    let owner = meta.owner_references.as_ref()?.iter().find(|o| o.controller == Some(true))?;
    Some(Owner {
        api_version: owner.api_version.clone(),
        kind: owner.kind.clone(),
        name: owner.name.clone(),
        uid: owner.uid.clone(),
    })
}

/// UIDs of the workload's pods that are not ready, whatever the cause.
pub(crate) fn unavailable(stores: &Stores, namespace: &str, workload: &Workload) -> BTreeSet<String> {
    stores
        .pods
        .state_filter(|pod| pod.metadata.namespace.as_deref() == Some(namespace) && is_down(pod))
        .iter()
        .filter(|pod| {
            controller(&pod.metadata).is_some_and(|owner| climb(stores, namespace, owner) == *workload)
        })
        .filter_map(|pod| pod.metadata.uid.clone())
        .collect()
}

/// Revision and birth of each pod of a workload.
pub(crate) fn pods(stores: &Stores, namespace: &str, workload: &Workload) -> Vec<(String, Timestamp)> {
    let of_it = |pod: &Pod| {
        pod.metadata.namespace.as_deref() == Some(namespace)
            && controller(&pod.metadata).is_some_and(|owner| climb(stores, namespace, owner) == *workload)
    };
    let pods = stores.pods.state_filter(of_it);
    pods.iter()
        .filter_map(|pod| Some((leaks::revision(pod, workload), pod.metadata.creation_timestamp.as_ref()?.0)))
        .collect()
}

/// Whether a pod that ought to serve does not. One that has finished its work is no loss.
fn is_down(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let finished =
        status.and_then(|s| s.phase.as_deref()).is_some_and(|p| matches!(p, "Succeeded" | "Failed"));
    let ready = status
        .and_then(|s| s.conditions.as_ref())
        .is_some_and(|c| c.iter().any(|c| c.type_ == "Ready" && c.status == "True"));
    !finished && (!ready || pod.metadata.deletion_timestamp.is_some())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::apps::v1::ReplicaSet;
    use kube::runtime::watcher::Event;
    use serde_json::{Value, json};

    use super::*;

    fn owned(kind: &str, name: &str, uid: &str) -> Value {
        json!([{"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": uid, "controller": true}])
    }

    fn pod(name: &str, replica_set: &str, ready: &str, phase: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "team", "uid": name, "ownerReferences": owned("ReplicaSet", replica_set, replica_set)},
            "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]},
        }))
        .unwrap()
    }

    #[test]
    fn pods_of_all_replica_sets_of_a_deployment_count_together() {
        let (stores, mut writers) = Stores::new();
        for name in ["old", "new", "other"] {
            let deployment = if name == "other" { "else" } else { "server" };
            let object: PartialObjectMeta<ReplicaSet> = serde_json::from_value(json!({
                "apiVersion": "apps/v1", "kind": "ReplicaSet",
                "metadata": {"name": name, "namespace": "team", "uid": name,
                             "ownerReferences": owned("Deployment", deployment, deployment)}}))
            .unwrap();
            writers.replica_sets.apply_watcher_event(&Event::Apply(object));
        }
        for pod in [
            pod("a", "old", "False", "Running"),
            pod("b", "new", "False", "Pending"),
            pod("c", "new", "True", "Running"),
            pod("d", "other", "False", "Running"),
            pod("e", "old", "False", "Succeeded"),
        ] {
            writers.pods.apply_watcher_event(&Event::Apply(pod));
        }
        let facts = PodFacts::parse(&pod("c", "new", "True", "Running"));
        let workload = top_owner(&stores, &facts).unwrap();
        assert_eq!(workload.to_string(), "Deployment/server");
        let down: Vec<_> = unavailable(&stores, "team", &workload).into_iter().collect();
        assert_eq!(down, ["a", "b"]);
    }

    #[test]
    fn an_owner_of_unknown_kind_is_the_top() {
        let (stores, _writers) = Stores::new();
        let facts = PodFacts::parse(
            &serde_json::from_value(json!({"metadata": {"namespace": "team",
                "ownerReferences": owned("LeaderWorkerSet", "llm", "u")}}))
            .unwrap(),
        );
        assert_eq!(top_owner(&stores, &facts).unwrap().to_string(), "LeaderWorkerSet/llm");
    }
}
