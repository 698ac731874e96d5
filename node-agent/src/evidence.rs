//! Evidence for memory that no process list explains: which processes have a device open.
//!
//! Looked for seldom, and only while there is such memory. It names a candidate for people to
//! look at; nobody is ever acted on for it.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use highwater_crds::ByteSize;
use highwater_gpu::DeviceInfo;
use highwater_policy::time::Millis;
use tracing::warn;

use crate::{
    account::Device,
    attribute::{Attributor, Owner, device_users},
    world::{Pod, World},
};

/// For how long there must be such memory before it is looked for, in milliseconds: a sample
/// between two calls of the driver may show some that is none.
const LASTING: u64 = 5_000;
/// How long to wait before looking again, in milliseconds.
const LOOK_EVERY: u64 = 30_000;
/// So much, or so much more than when it was looked for last, is looked for at once where memory is
/// guarded or held back,
const ALARMING: u64 = 256 * ByteSize::MI;
/// though not more often than this, in milliseconds.
const ALARM_EVERY: u64 = 10_000;

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
    /// How much there was when it was looked for at once, and when.
    alarm: Option<(u64, Millis)>,
}

/// Whether so many bytes that no process list shows are reason enough to look at once.
pub(crate) fn is_alarming(bytes: u64) -> bool {
    bytes >= ALARMING
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

    /// Whether to look at once, for so many bytes that no process list shows.
    pub(crate) fn is_alarmed(&mut self, bytes: u64, now: Millis) -> bool {
        if !is_alarming(bytes) {
            // What comes and goes is not looked for at each coming.
            self.alarm = self.alarm.filter(|(_, at)| now.since(*at) < ALARM_EVERY).map(|(_, at)| (0, at));
            return false;
        }
        let due = self.alarm.is_none_or(|(before, at)| {
            bytes >= before.saturating_add(ALARMING) && now.since(at) >= ALARM_EVERY
        });
        if due {
            self.alarm = Some((bytes, now));
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

    /// Whether a pod is known to use managed memory, or nobody can tell.
    pub(crate) fn uses_managed(&self, pod: &str) -> bool {
        let theirs = |user: &User| matches!(&user.whose, Whose::Pod(uid) if **uid == *pod);
        self.blind || self.users.iter().any(|user| user.managed && theirs(user))
    }

    /// Whose the unexplained memory of a device may be, or why nobody can tell, in parentheses; empty
    /// where it cannot be said of one alone.
    pub(crate) fn candidate(&self, device: &Device, world: &World) -> String {
        if self.blind {
            return "(whose cannot be told: the agent lacks the capability SYS_PTRACE)".to_owned();
        }
        let suspects = self.whose(device, false);
        let [one] = suspects.into_iter().collect::<Vec<_>>()[..] else { return String::new() };
        match one {
            Whose::Pod(uid) => world.pods.get(uid).map_or_else(String::new, |pod| {
                format!("(perhaps pod {}/{})", pod.facts.namespace, pod.facts.name)
            }),
            Whose::Process(name) => format!("(perhaps the node's process {name})"),
        }
    }

    /// The pods whose the unexplained memory of a device may be: those with the least to show for having
    /// the device open, else all that have.
    pub(crate) fn suspects(&self, device: &Device, world: &World) -> Vec<Arc<Pod>> {
        let pods = |whose: BTreeSet<&Whose>| -> Vec<Arc<Pod>> {
            let pods = whose.into_iter().filter_map(|whose| match whose {
                Whose::Pod(uid) => world.pods.get(uid).map(Arc::clone),
                Whose::Process(_) => None,
            });
            pods.collect()
        };
        let few = pods(self.whose(device, false));
        if few.is_empty() { pods(self.whose(device, true)) } else { few }
    }

    /// Who has a device open, and uses managed memory or is in no list of it; or all who have it open.
    fn whose(&self, device: &Device, all: bool) -> BTreeSet<&Whose> {
        let listed = |user: &User| match &user.whose {
            Whose::Pod(uid) => device.ledger.by_pod.iter().any(|held| held.pod == *uid),
            Whose::Process(_) => false,
        };
        let users = self.of(&device.info).filter(|user| all || user.managed || !listed(user));
        users.map(|user| &user.whose).collect()
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
    fn much_that_comes_at_once_is_looked_for_at_once_and_all_candidates_are_named() {
        let mut evidence = Evidence::default();
        let mi = ByteSize::MI;
        assert!(!evidence.is_alarmed(255 * mi, Millis(0)));
        assert!(evidence.is_alarmed(256 * mi, Millis(100)));
        assert!(!evidence.is_alarmed(300 * mi, Millis(20_000)), "hardly more");
        assert!(evidence.is_alarmed(512 * mi, Millis(20_100)));
        assert!(!evidence.is_alarmed(9_999 * mi, Millis(30_000)), "not that often");
        assert!(evidence.is_alarmed(9_999 * mi, Millis(30_100)));
        assert!(!evidence.is_alarmed(0, Millis(30_200)));
        assert!(!evidence.is_alarmed(512 * mi, Millis(30_300)), "what comes and goes");
        assert!(evidence.is_alarmed(512 * mi, Millis(40_100)));
        let mut world = World::default();
        for name in ["a", "b"] {
            let facts =
                highwater_policy::pod::PodFacts { uid: name.into(), name: name.into(), ..Default::default() };
            world.apply(crate::world::WorldChange::Pod(crate::world::Change::Upsert(facts)), Millis(0));
        }
        let of_pod = |uid: &str| User { whose: Whose::Pod(uid.into()), ..process("x", false) };
        evidence.set(found(vec![of_pod("a"), of_pod("b"), process("daemon", false)]));
        let names = |evidence: &Evidence, device: &Device| -> Vec<String> {
            evidence.suspects(device, &world).iter().map(|pod| pod.facts.name.clone()).collect()
        };
        let mut device = device();
        assert_eq!(names(&evidence, &device), ["a", "b"]);
        let held = |pod: &str| highwater_policy::ledger::PodUse {
            pod: pod.into(),
            bytes: Some(1),
            containers: Vec::new(),
        };
        device.ledger.by_pod = vec![held("a")];
        assert_eq!(names(&evidence, &device), ["b"], "the other is listed");
        device.ledger.by_pod = vec![held("a"), held("b")];
        assert_eq!(names(&evidence, &device), ["a", "b"], "nobody stands out");
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
