//! Limits that the driver itself keeps: a pod's limit on its cgroup, where driver, kernel and device
//! can do that.
//!
//! The limit is set on the cgroup of the pod, which holds all of its containers, and on that of each
//! container, by which a program in it is shown what it may have. A limit goes with its cgroup.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use highwater_crds::{Partition, StrengthReason};
use highwater_policy::time::Millis;
use jiff::Timestamp;
use tracing::warn;

use crate::cgroup;

/// How long to wait before a limit that could not be set is tried again, in milliseconds.
const AGAIN_AFTER: u64 = 30_000;
/// How long to wait for the cgroup of a pod that is being started, in milliseconds.
const STARTING: u64 = 1_000;
/// How often the containers of a pod are looked for: a container that starts again has a new cgroup.
const CONTAINERS_EVERY: u64 = 10_000;
/// Directories that are looked at for a pod's cgroup.
const LOOKED_AT: usize = 20_000;

/// Something to set on a pod's cgroups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    /// UID of the pod, as the kubelet knows it.
    pub(crate) pod: Arc<str>,
    /// UUID of the device.
    pub(crate) device: Arc<str>,
    /// The limit in bytes; `None` lifts it.
    pub(crate) bytes: Option<u64>,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// What was to be set.
    pub(crate) task: Task,
    /// Whether it was; else why not.
    pub(crate) result: Result<(), Failure>,
}

/// Why a limit was not set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The pod has no cgroup (yet).
    NoCgroup,
    /// It cannot be done here.
    Unavailable(StrengthReason, String),
    /// The driver refused: its words.
    Refused(String),
}

/// What the node can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ability {
    /// The driver has the calls.
    pub(crate) driver: bool,
    /// The agent may set limits on cgroups, and the node has those that it takes; else why not.
    pub(crate) cgroups: Result<(), StrengthReason>,
}

impl Ability {
    /// Whether limits can be set on a device; else why not.
    pub(crate) fn on(self, partition: Partition) -> Result<(), StrengthReason> {
        if !self.driver {
            Err(StrengthReason::NoKernelLimits)
        } else if partition == Partition::Mig {
            Err(StrengthReason::KernelLimitsMig)
        } else {
            self.cgroups
        }
    }
}

/// The limits of a node's pods.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    held: BTreeMap<(Arc<str>, Arc<str>), State>,
}

/// The limit of a pod on a device.
#[derive(Debug, Default)]
struct State {
    /// What is set, since when it has been, and when it was last seen to.
    set: Option<(u64, Timestamp, Millis)>,
    in_flight: bool,
    /// A limit may be set, whatever became of the last attempt.
    touched: bool,
    failed: Option<StrengthReason>,
    not_before: Millis,
    told: bool,
}

impl Limits {
    /// A pod is to be held to `limit` on a device, where it holds `used`; `None`: to none. Returns what
    /// is to be set.
    pub(crate) fn want(
        &mut self,
        pod: &Arc<str>,
        device: &Arc<str>,
        limit: Option<u64>,
        used: Option<u64>,
        now: Millis,
    ) -> Option<Task> {
        let key = (Arc::clone(pod), Arc::clone(device));
        if limit.is_none() && !self.held.contains_key(&key) {
            return None;
        }
        let state = self.held.entry(key).or_default();
        if state.in_flight || now < state.not_before {
            return None;
        }
        let due = match (limit, state.set) {
            (Some(limit), Some((set, _, at))) => limit != set || now.since(at) >= CONTAINERS_EVERY,
            (Some(_), None) => true,
            (None, _) => state.touched,
        };
        if !due {
            return None;
        }
        if limit.is_some_and(|limit| used.is_some_and(|used| used > limit)) {
            state.failed = Some(StrengthReason::AboveLimit);
            return None;
        }
        state.in_flight = true;
        state.touched = true;
        Some(Task { pod: Arc::clone(pod), device: Arc::clone(device), bytes: limit })
    }

    /// What came of a task. Returns since when the pod is held to its limit, if that is new.
    pub(crate) fn done(&mut self, outcome: &Outcome, now: Millis, wall: Timestamp) -> Option<Timestamp> {
        let Task { pod, device, bytes } = &outcome.task;
        let key = (Arc::clone(pod), Arc::clone(device));
        let state = self.held.get_mut(&key)?;
        state.in_flight = false;
        match (&outcome.result, bytes) {
            (Ok(()), Some(bytes)) => {
                let since = state.set.filter(|(set, ..)| set == bytes).map(|(_, since, _)| since);
                state.set = Some((*bytes, since.unwrap_or(wall), now));
                state.failed = None;
                since.is_none().then_some(wall)
            }
            (Ok(()), None) => {
                self.held.remove(&key);
                None
            }
            (Err(failure), _) => {
                // A pod that ended has no cgroup: what was set went with it.
                let (reason, pause) = match failure {
                    Failure::NoCgroup => (StrengthReason::KernelLimitRefused, STARTING),
                    Failure::Unavailable(reason, _) => (*reason, AGAIN_AFTER),
                    Failure::Refused(_) => (StrengthReason::KernelLimitRefused, AGAIN_AFTER),
                };
                if let Failure::Refused(why) | Failure::Unavailable(_, why) = failure
                    && !std::mem::replace(&mut state.told, true)
                {
                    warn!(%pod, %device, why, "the driver does not hold the pod to its limit");
                }
                state.set = None;
                state.touched &= *failure != Failure::NoCgroup;
                state.failed = Some(reason);
                state.not_before = now.plus(pause);
                None
            }
        }
    }

    /// Whether the driver holds the pod to `limit`; else why not.
    pub(crate) fn standing(
        &self,
        pod: &Arc<str>,
        device: &Arc<str>,
        limit: u64,
    ) -> Result<(), StrengthReason> {
        let state = self.held.get(&(Arc::clone(pod), Arc::clone(device)));
        match state {
            Some(State { set: Some((set, ..)), .. }) if *set == limit => Ok(()),
            Some(State { failed: Some(reason), .. }) => Err(*reason),
            // It is about to be.
            _ => Err(StrengthReason::KernelLimitRefused),
        }
    }

    /// Forgets pods that are gone, and devices that were let go of.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.held.retain(|(pod, _), _| is_there(pod));
    }
}

/// Finds the cgroups of pods.
#[derive(Debug)]
pub(crate) struct Cgroups {
    root: PathBuf,
    /// Those that were found, by pod.
    known: Mutex<HashMap<Arc<str>, PathBuf>>,
}

impl Cgroups {
    /// Below the root of the host's tree.
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root, known: Mutex::default() }
    }

    /// The cgroups of a pod: its own, then those of its containers. Empty where it has none. Looks
    /// through the whole tree for a pod that was not looked for before.
    pub(crate) fn of(&self, pod: &Arc<str>) -> Vec<PathBuf> {
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().get(pod).filter(|path| path.is_dir()).cloned();
        let found = known.or_else(|| {
            // A pod that is looked for is a good time to forget those that are gone.
            lock().retain(|_, path| path.is_dir());
            find(&self.root, pod)
        });
        let Some(own) = found else { return Vec::new() };
        let below = fs::read_dir(&own).into_iter().flatten().flatten();
        let mut all: Vec<PathBuf> = below
            .filter(|entry| entry.file_name().to_str().is_some_and(cgroup::is_container))
            .map(|entry| entry.path())
            .collect();
        all.sort();
        lock().insert(Arc::clone(pod), own.clone());
        all.insert(0, own);
        all
    }
}

/// The directory of a pod's cgroup: the outermost that has its UID in its name.
fn find(root: &Path, pod: &str) -> Option<PathBuf> {
    let mut waiting = VecDeque::from([root.to_owned()]);
    let mut looked_at = 0;
    while let Some(directory) = waiting.pop_front() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            looked_at += 1;
            if looked_at > LOOKED_AT {
                warn!(pod, "too many cgroups to find that of a pod");
                return None;
            }
            let name = entry.file_name();
            match name.to_str().map(cgroup::pod_of) {
                Some(Some(uid)) if uid == pod => return Some(entry.path()),
                // Another pod's: whatever is below is its own.
                Some(Some(_)) => {}
                _ => waiting.push_back(entry.path()),
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10";
    const OTHER: &str = "00000000-1111-2222-3333-444444444444";
    const ID: &str = "4f7a1d0b8c9e2f3a4b5c6d7e8f9012344f7a1d0b8c9e2f3a4b5c6d7e8f901234";

    #[test]
    fn a_pods_cgroups_are_found_whatever_makes_them_and_no_pod_passes_for_another() {
        for (pod, container) in [
            (format!("kubepods/burstable/pod{UID}"), ID.to_owned()),
            (
                format!(
                    "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{}.slice",
                    UID.replace('-', "_")
                ),
                format!("cri-containerd-{ID}.scope"),
            ),
        ] {
            let root = tempfile::tempdir().unwrap();
            let own = root.path().join(&pod);
            fs::create_dir_all(own.join(&container)).unwrap();
            fs::create_dir_all(own.join("helpers")).unwrap();
            // A pod that can make cgroups makes them below its own.
            fs::create_dir_all(root.path().join(format!("kubepods/pod{OTHER}/{ID}/pod{UID}/{ID}"))).unwrap();
            let cgroups = Cgroups::new(root.path().into());
            let of = |pod: &str| cgroups.of(&pod.into());
            assert_eq!(of(UID), [own.clone(), own.join(&container)]);
            assert!(of("11111111-1111-2222-3333-444444444444").is_empty());
            // A container starts again, and later the pod has ended.
            let again = container.replace(ID, &ID.replace('4', "5"));
            fs::rename(own.join(&container), own.join(&again)).unwrap();
            assert_eq!(of(UID), [own.clone(), own.join(&again)]);
            fs::remove_dir_all(&own).unwrap();
            assert!(of(UID).is_empty());
        }
    }

    fn wall() -> Timestamp {
        Timestamp::UNIX_EPOCH
    }

    #[test]
    fn a_limit_is_set_once_followed_when_it_changes_and_tells_since_when_it_holds() {
        let mut limits = Limits::default();
        let (pod, device): (Arc<str>, Arc<str>) = ("p".into(), "GPU-1".into());
        let want =
            |limits: &mut Limits, limit, used, now| limits.want(&pod, &device, limit, used, Millis(now));
        let task = want(&mut limits, Some(8), Some(3), 0).unwrap();
        assert_eq!(want(&mut limits, Some(8), Some(3), 100), None, "one at a time");
        let done = Outcome { task, result: Ok(()) };
        assert_eq!(limits.done(&done, Millis(100), wall()), Some(wall()));
        assert_eq!(limits.standing(&pod, &device, 8), Ok(()));
        assert_eq!(want(&mut limits, Some(8), Some(3), 200), None);
        // A container that started again has a new cgroup.
        let again = want(&mut limits, Some(8), Some(3), 10_100).unwrap();
        assert_eq!(limits.done(&Outcome { task: again, result: Ok(()) }, Millis(10_200), wall()), None);
        assert_eq!(want(&mut limits, Some(2), Some(3), 10_300), None, "it holds more");
        assert_eq!(limits.standing(&pod, &device, 2), Err(StrengthReason::AboveLimit));
        let lower = want(&mut limits, Some(2), Some(1), 10_400).unwrap();
        limits.done(&Outcome { task: lower, result: Ok(()) }, Millis(10_400), wall());
        assert_eq!(limits.standing(&pod, &device, 2), Ok(()));
        let lift = want(&mut limits, None, Some(1), 10_500).unwrap();
        assert_eq!(lift.bytes, None);
        limits.done(&Outcome { task: lift, result: Ok(()) }, Millis(10_600), wall());
        assert_eq!(want(&mut limits, None, Some(1), 10_700), None);
    }

    #[test]
    fn a_limit_that_may_be_set_is_lifted_whatever_the_last_answer_was() {
        let mut limits = Limits::default();
        let (pod, device): (Arc<str>, Arc<str>) = ("p".into(), "GPU-1".into());
        for (failure, lifts) in [(Failure::Refused("no".into()), true), (Failure::NoCgroup, false)] {
            let task = limits.want(&pod, &device, Some(8), None, Millis(0)).unwrap();
            limits.done(&Outcome { task, result: Ok(()) }, Millis(0), wall());
            let again = limits.want(&pod, &device, Some(8), None, Millis(10_000)).unwrap();
            limits.done(&Outcome { task: again, result: Err(failure) }, Millis(10_000), wall());
            let lift = limits.want(&pod, &device, None, None, Millis(50_000));
            assert_eq!(lift.as_ref().map(|task| task.bytes), lifts.then_some(None));
            if let Some(task) = lift {
                limits.done(&Outcome { task, result: Ok(()) }, Millis(50_000), wall());
            }
            assert_eq!(limits.want(&pod, &device, None, None, Millis(90_000)), None);
            limits.retain(|_| false);
        }
    }

    #[test]
    fn what_was_refused_is_tried_again_later_and_a_pod_that_starts_soon() {
        let mut limits = Limits::default();
        let (pod, device): (Arc<str>, Arc<str>) = ("p".into(), "GPU-1".into());
        let mut at = 0;
        for (failure, reason, pause) in [
            (Failure::NoCgroup, StrengthReason::KernelLimitRefused, 1_000),
            (Failure::Refused("no".into()), StrengthReason::KernelLimitRefused, 30_000),
            (
                Failure::Unavailable(StrengthReason::KernelLimitsMig, "no".into()),
                StrengthReason::KernelLimitsMig,
                30_000,
            ),
        ] {
            let task = limits.want(&pod, &device, Some(8), None, Millis(at)).unwrap();
            limits.done(&Outcome { task, result: Err(failure) }, Millis(at), wall());
            assert_eq!(limits.standing(&pod, &device, 8), Err(reason));
            assert_eq!(limits.want(&pod, &device, Some(8), None, Millis(at + pause - 1)), None);
            at += pause;
        }
        limits.retain(|_| false);
        assert_eq!(limits.want(&pod, &device, None, None, Millis(at)), None);
    }

    #[test]
    fn what_the_node_lacks_has_its_name() {
        let all = Ability { driver: true, cgroups: Ok(()) };
        assert_eq!(all.on(Partition::Whole), Ok(()));
        assert_eq!(all.on(Partition::Mig), Err(StrengthReason::KernelLimitsMig));
        for why in [StrengthReason::NoCgroupV2, StrengthReason::KernelLimitsDisabled] {
            assert_eq!(Ability { cgroups: Err(why), ..all }.on(Partition::Whole), Err(why));
        }
        let old = Ability { driver: false, ..all };
        assert_eq!(old.on(Partition::Whole), Err(StrengthReason::NoKernelLimits));
    }
}
