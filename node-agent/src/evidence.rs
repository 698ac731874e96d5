//! Evidence for memory that no process list explains: which processes have a device open.
//!
//! Looked for seldom, and only while there is such memory. It names a candidate for people to
//! look at; nobody is ever acted on for it.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use highwater_gpu::DeviceInfo;
use highwater_policy::time::Millis;
use tracing::warn;

use crate::{
    account::Device,
    attribute::{Attributor, Owner, device_users},
    world::World,
};

/// How long to wait before looking again, in milliseconds.
const LOOK_EVERY: u64 = 30_000;

/// A process that has a device open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct User {
    /// Minor numbers of the devices.
    minors: Vec<u32>,
    /// It uses managed memory.
    managed: bool,
    whose: Whose,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Whose {
    /// The pod's, by the UID that the kubelet knows.
    Pod(Arc<str>),
    /// A process of no pod, by its name.
    Process(String),
}

/// What was found last.
#[derive(Debug, Default)]
pub(crate) struct Evidence {
    users: Vec<User>,
    looked: Option<Millis>,
}

/// Looks at every process of the node. Takes a while.
pub(crate) fn look(proc_root: &Path) -> Vec<User> {
    let users = device_users(proc_root).unwrap_or_else(|error| {
        warn!(%error, "cannot look which processes have devices open");
        Vec::new()
    });
    let mut attributor = Attributor::new(proc_root);
    let users = users.into_iter().filter_map(|user| {
        let whose = match attributor.owner(user.pid) {
            Owner::Pod(owner) => Whose::Pod(Arc::clone(&owner.pod_uid)),
            Owner::Foreign => Whose::Process(attributor.comm(user.pid)?.to_owned()),
            Owner::Gone => return None,
        };
        Some(User { minors: user.minors, managed: user.managed_bytes > 0, whose })
    });
    users.collect()
}

impl Evidence {
    /// Whether to look now. What was found for memory that is no more is forgotten.
    pub(crate) fn is_due(&mut self, sought: bool, now: Millis) -> bool {
        if !sought {
            self.users.clear();
            return false;
        }
        let due = self.looked.is_none_or(|looked| now.since(looked) >= LOOK_EVERY);
        if due {
            self.looked = Some(now);
        }
        due
    }

    /// Takes in what was found.
    pub(crate) fn set(&mut self, users: Vec<User>) {
        self.users = users;
    }

    /// Whether a process on the device is known to use managed memory.
    pub(crate) fn is_managed(&self, device: &DeviceInfo) -> bool {
        self.of(device).any(|user| user.managed)
    }

    /// Whose the unexplained memory of a device may be, in parentheses; empty where that cannot be
    /// said of one alone.
    pub(crate) fn candidate(&self, device: &Device, world: &World) -> String {
        let listed = |user: &User| match &user.whose {
            Whose::Pod(uid) => device.ledger.by_pod.iter().any(|held| held.pod == *uid),
            Whose::Process(_) => false,
        };
        // A process with managed memory, or one that has the device open and is in no list.
        let suspects: BTreeSet<_> = self
            .of(&device.info)
            .filter(|user| user.managed || !listed(user))
            .map(|user| &user.whose)
            .collect();
        let [one] = suspects.into_iter().collect::<Vec<_>>()[..] else { return String::new() };
        match one {
            Whose::Pod(uid) => world.pods.get(uid).map_or_else(String::new, |pod| {
                format!("(perhaps pod {}/{})", pod.facts.namespace, pod.facts.name)
            }),
            Whose::Process(name) => format!("(perhaps the node's process {name})"),
        }
    }

    fn of(&self, device: &DeviceInfo) -> impl Iterator<Item = &User> {
        let minor = device.minor;
        self.users.iter().filter(move |user| minor.is_some_and(|minor| user.minors.contains(&minor)))
    }
}

#[cfg(test)]
mod tests {
    use highwater_gpu::Partition;

    use super::*;

    fn device() -> Device {
        Device::new(DeviceInfo {
            uuid: "GPU-1".into(),
            index: 0,
            minor: Some(3),
            product: "NVIDIA H200".into(),
            partition: Partition::Whole,
            total: None,
        })
    }

    fn process(name: &str, managed: bool) -> User {
        User { minors: vec![3], managed, whose: Whose::Process(name.into()) }
    }

    #[test]
    fn one_candidate_is_named_and_of_several_none() {
        let mut evidence = Evidence::default();
        assert_eq!(evidence.candidate(&device(), &World::default()), "");
        evidence.set(vec![process("miner", false), User { minors: vec![4], ..process("other", false) }]);
        assert_eq!(evidence.candidate(&device(), &World::default()), "(perhaps the node's process miner)");
        evidence.set(vec![process("miner", false), process("trainer", true)]);
        assert_eq!(evidence.candidate(&device(), &World::default()), "");
        assert!(evidence.is_managed(&device().info));
    }

    #[test]
    fn it_is_looked_for_seldom_and_only_when_sought() {
        let mut evidence = Evidence::default();
        assert!(!evidence.is_due(false, Millis(0)));
        assert!(evidence.is_due(true, Millis(1)));
        assert!(!evidence.is_due(true, Millis(30_000)));
        assert!(evidence.is_due(true, Millis(30_001)));
    }
}
