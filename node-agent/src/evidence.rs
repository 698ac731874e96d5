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

/// For how long there must be such memory before it is looked for, in milliseconds: a sample
/// between two calls of the driver may show some that is none.
const LASTING: u64 = 5_000;
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
    /// There are processes that may not be looked at.
    blind: bool,
    sought: Option<Millis>,
    looked: Option<Millis>,
}

/// What a look found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The processes that have a device open.
    pub(crate) users: Vec<User>,
    /// There are processes that may not be looked at.
    pub(crate) blind: bool,
}

/// Looks at every process of the node. Takes a while.
pub(crate) fn look(proc_root: &Path) -> Found {
    let (users, blind) = device_users(proc_root).unwrap_or_else(|error| {
        warn!(%error, "cannot look which processes have devices open");
        (Vec::new(), true)
    });
    let mut attributor = Attributor::new(proc_root);
    let users = users.into_iter().filter_map(|user| {
        let whose = match attributor.owner(user.pid) {
            Owner::Pod(owner) => Whose::Pod(Arc::clone(&owner.pod_uid)),
            Owner::Foreign => Whose::Process(attributor.comm(user.pid)?.to_owned()),
            Owner::Gone | Owner::Unknown => return None,
        };
        Some(User { minors: user.minors, managed: user.managed_bytes > 0, whose })
    });
    Found { users: users.collect(), blind }
}

impl Evidence {
    /// Whether to look now. What was found for memory that is no more is forgotten.
    pub(crate) fn is_due(&mut self, sought: bool, now: Millis) -> bool {
        if !sought {
            self.users.clear();
            self.sought = None;
            return false;
        }
        let lasts = now.since(*self.sought.get_or_insert(now)) >= LASTING;
        let due = lasts && self.looked.is_none_or(|looked| now.since(looked) >= LOOK_EVERY);
        if due {
            self.looked = Some(now);
        }
        due
    }

    /// Takes in what was found.
    pub(crate) fn set(&mut self, found: Found) {
        if found.blind && !self.blind {
            warn!(
                "may not look at the open files of every process: whose unexplained memory is cannot be told; \
                the capability SYS_PTRACE would let the agent look"
            );
        }
        self.users = found.users;
        self.blind = found.blind;
    }

    /// Whether a process on the device uses managed memory, as far as that can be ruled out.
    pub(crate) fn is_managed(&self, device: &DeviceInfo) -> bool {
        self.blind || self.of(device).any(|user| user.managed)
    }

    /// Whose the unexplained memory of a device may be, or why nobody can tell, in parentheses; empty
    /// where it cannot be said of one alone.
    pub(crate) fn candidate(&self, device: &Device, world: &World) -> String {
        if self.blind {
            return "(whose cannot be told: the agent lacks the capability SYS_PTRACE)".to_owned();
        }
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
        evidence
            .set(found(vec![process("miner", false), User { minors: vec![4], ..process("other", false) }]));
        assert_eq!(evidence.candidate(&device(), &World::default()), "(perhaps the node's process miner)");
        evidence.set(found(vec![process("miner", false), process("trainer", true)]));
        assert_eq!(evidence.candidate(&device(), &World::default()), "");
        assert!(evidence.is_managed(&device().info));
    }

    fn found(users: Vec<User>) -> Found {
        Found { users, blind: false }
    }

    #[test]
    fn who_may_not_look_says_so_and_rules_nothing_out() {
        let mut evidence = Evidence::default();
        assert!(!evidence.is_managed(&device().info));
        evidence.set(Found { users: Vec::new(), blind: true });
        assert!(evidence.is_managed(&device().info));
        assert!(evidence.candidate(&device(), &World::default()).contains("SYS_PTRACE"));
    }

    #[test]
    fn it_is_looked_for_seldom_and_only_when_sought() {
        let mut evidence = Evidence::default();
        assert!(!evidence.is_due(false, Millis(0)));
        assert!(!evidence.is_due(true, Millis(1)));
        assert!(!evidence.is_due(false, Millis(4_000)));
        assert!(!evidence.is_due(true, Millis(5_000)), "it did not last");
        assert!(evidence.is_due(true, Millis(10_000)));
        assert!(!evidence.is_due(true, Millis(39_999)));
        assert!(evidence.is_due(true, Millis(40_000)));
    }
}
