//! Which pods are of one workload, so that they share a profile.

use highwater_crds::{LeakMemory, Mode};
use serde::{Deserialize, Serialize};

use crate::{
    leak::{Detector, Profile},
    pod::PodFacts,
};

/// Label that a Deployment puts on its pods: what it appends to the names of its `ReplicaSet`s.
const TEMPLATE_HASH: &str = "pod-template-hash";

/// What lives are compared with: those of the same owner with the same images on the same kind of
/// device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Workload {
    /// Namespace.
    pub namespace: String,
    /// Kind and name of the topmost owner that the pod itself tells, with a slash between; of a pod
    /// without one `Pod` and its name.
    pub owner: String,
    /// Images of the pod.
    pub images: String,
    /// Product of the device.
    pub product: String,
    /// Which memory.
    pub memory: LeakMemory,
    /// The place of the device among those of the pod: ranks of one job need not be alike.
    pub rank: u8,
    /// Mode of the policies by which it is watched.
    pub mode: Mode,
}

impl Workload {
    /// The workload of a pod on a device of this product, which is the pod's `rank`th.
    pub fn of(pod: &PodFacts, product: &str, memory: LeakMemory, rank: u8, mode: Mode) -> Self {
        Self {
            namespace: pod.namespace.clone(),
            owner: owner(pod),
            images: pod.images.clone(),
            product: product.to_owned(),
            memory,
            rank,
            mode,
        }
    }
}

/// The topmost owner: a Deployment is known by the names of its `ReplicaSet`s.
fn owner(pod: &PodFacts) -> String {
    let Some(owner) = &pod.owner else { return format!("Pod/{}", pod.name) };
    let hash = pod.labels.get(TEMPLATE_HASH).filter(|_| owner.kind == "ReplicaSet");
    let deployment = hash.and_then(|hash| owner.name.strip_suffix(hash.as_str())?.strip_suffix('-'));
    match deployment {
        Some(name) => format!("Deployment/{name}"),
        None => format!("{}/{}", owner.kind, owner.name),
    }
}

impl Detector {
    /// Has it know what the workload has learnt elsewhere meanwhile.
    pub fn know(&mut self, profile: &Profile) {
        if self.profile != *profile {
            self.profile.clone_from(profile);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::Owner;

    #[test]
    fn the_pods_of_a_deployment_are_of_one_workload_whatever_its_replica_set() {
        let pod = |kind: &str, name: &str, hash: &str| PodFacts {
            name: "p".into(),
            labels: [(TEMPLATE_HASH.to_owned(), hash.to_owned())].into(),
            owner: Some(Owner {
                api_version: "apps/v1".into(),
                kind: kind.into(),
                name: name.into(),
                uid: "u".into(),
            }),
            ..PodFacts::default()
        };
        assert_eq!(owner(&pod("ReplicaSet", "server-5d4f", "5d4f")), "Deployment/server");
        assert_eq!(owner(&pod("ReplicaSet", "server-5d4f", "77aa")), "ReplicaSet/server-5d4f");
        assert_eq!(owner(&pod("StatefulSet", "server", "")), "StatefulSet/server");
        assert_eq!(owner(&PodFacts { name: "p".into(), ..PodFacts::default() }), "Pod/p");
        let of = |rank| Workload::of(&pod("Job", "j", ""), "H200", LeakMemory::Device, rank, Mode::Enforce);
        assert_ne!(of(0), of(1));
    }
}
