//! Host memory of pods, as cgroups say it, and room for what is parked.
//!
//! Only memory that the kernel cannot simply drop counts: anonymous and shared memory, and what is swapped
//! out. `memory.stat` costs the kernel a walk over the processors, so for a mark it is read only where
//! `memory.current`, which has the page cache in it and is therefore never less, says that it matters. Leak
//! detection needs it as it is, but seldom; that much version 1 says as well. All of it is read beside the
//! loop.

use std::{
    cmp::Ordering,
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use highwater_policy::host_memory::Sample;
use tokio::{
    sync::{
        mpsc::{UnboundedReceiver, UnboundedSender},
        watch,
    },
    time::sleep,
};

use crate::{attribute::start_ticks, keeper_protocol::Process, limits::Cgroups};

/// How often host memory is read for marks.
const EVERY: Duration = Duration::from_secs(2);
/// It is read no more often than this, whoever asks.
const SOONEST: Duration = Duration::from_millis(200);

/// A pod whose host memory is of interest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Want {
    /// UID of the pod, as the kubelet knows it.
    pub(crate) pod: Arc<str>,
    /// What a mark needs to know is wanted: below this share of its limit in percent, what it uses is of no
    /// interest.
    pub(crate) above_percent: Option<u8>,
    /// What it holds is wanted as it is, so often, in milliseconds.
    pub(crate) exact_every: Option<u64>,
}

/// The host memory of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// UID of the pod.
    pub(crate) pod: Arc<str>,
    /// What was read for a mark: use and limit of that of its cgroups which is fullest. Where the share of
    /// interest is not reached, use is at most what is said.
    pub(crate) sample: Option<Sample>,
    /// What it holds as it is, where that was due.
    pub(crate) exact: Option<Exact>,
}

/// Host memory that cannot be dropped, in bytes, of that of a pod's cgroups which is fullest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Exact {
    /// Held: anonymous, shared and swapped out.
    pub(crate) held: Option<u64>,
    /// Its limit, or what the node has.
    pub(crate) limit: Option<u64>,
}

/// Asks for what is needed to park a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Survey {
    /// UID of the pod, as the kubelet knows it.
    pub(crate) pod: Arc<str>,
    /// UUID of the device.
    pub(crate) device: Arc<str>,
    /// Its processes there.
    pub(crate) pids: Vec<u32>,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Surveyed {
    /// UID of the pod.
    pub(crate) pod: Arc<str>,
    /// UUID of the device.
    pub(crate) device: Arc<str>,
    /// Its processes; `None` where one is gone.
    pub(crate) processes: Option<Vec<Process>>,
    /// What its memory cgroups may still take; `None` where there is no limit.
    pub(crate) room: Option<u64>,
    /// `MemAvailable` of the node.
    pub(crate) available: Option<u64>,
}

/// What is read of the host.
#[derive(Debug)]
pub(crate) struct Host {
    cgroups: Cgroups,
    proc_root: PathBuf,
    /// The tree is one of cgroup v2.
    unified: bool,
    before: Mutex<Before>,
}

/// What was read before.
#[derive(Debug, Default)]
struct Before {
    /// How long each pod's processes had waited for memory when its refaults were read last, and how many
    /// there were: without a wait there are no more.
    refaults: HashMap<Arc<str>, (u64, u64)>,
    /// When what a pod holds was read as it is.
    exact: HashMap<Arc<str>, Instant>,
}

impl Host {
    /// Reads the tree below `cgroup_root`.
    pub(crate) fn new(cgroup_root: &Path, proc_root: PathBuf) -> Self {
        let unified = is_unified(cgroup_root);
        // Of version 1 the controllers have a tree each.
        let root = if unified { cgroup_root.to_owned() } else { cgroup_root.join("memory") };
        Self { cgroups: Cgroups::new(root), proc_root, unified, before: Mutex::default() }
    }

    /// Reads the host memory of pods. `marks` says whether marks are looked at as well.
    fn read(&self, wants: &[Want], marks: bool, now: Instant) -> Vec<Reading> {
        let node = self.meminfo("MemTotal");
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        before.refaults.retain(|pod, _| wants.iter().any(|want| want.pod == *pod));
        before.exact.retain(|pod, _| wants.iter().any(|want| want.pod == *pod));
        let mut of = |want: &Want| {
            let marked = want.above_percent.filter(|_| marks && self.unified);
            // A reading that comes a little early is the one that is due.
            let due = |every: &u64| {
                let last = before.exact.get(&want.pod);
                last.is_none_or(|last| {
                    now.duration_since(*last) + SOONEST / 2 >= Duration::from_millis(*every)
                })
            };
            let exact = want.exact_every.as_ref().is_some_and(due);
            if marked.is_none() && !exact {
                return None;
            }
            let groups = self.cgroups.of(&want.pod);
            let sample = marked.and_then(|above| {
                Some(Self::mark(groups.first()?, &groups, node, above, &want.pod, &mut before.refaults))
            });
            let exact = exact.then(|| {
                before.exact.insert(Arc::clone(&want.pod), now);
                let found = if self.unified { fullest(&groups, node, 0) } else { fullest_v1(&groups, node) };
                found.map_or_else(Exact::default, |(held, limit)| Exact {
                    held: Some(held),
                    limit: Some(limit),
                })
            });
            Some(Reading { pod: Arc::clone(&want.pod), sample, exact })
        };
        wants.iter().filter_map(&mut of).collect()
    }

    /// What a mark needs to know of a pod.
    fn mark(
        own: &Path,
        groups: &[PathBuf],
        node: Option<u64>,
        above_percent: u8,
        pod: &Arc<str>,
        refaults: &mut HashMap<Arc<str>, (u64, u64)>,
    ) -> Sample {
        let mut sample = Sample::default();
        if let Some((used, limit)) = fullest(groups, node, above_percent) {
            sample.held = Some(used);
            sample.limit = Some(limit);
        }
        let pressure = fs::read_to_string(own.join("memory.pressure")).unwrap_or_default();
        sample.some = stalled(&pressure, "some ");
        sample.full = stalled(&pressure, "full ");
        let some = sample.some.unwrap_or(0);
        sample.refaults = match refaults.get(pod) {
            Some((before, count)) if *before == some => Some(*count),
            _ => refaulted(own).inspect(|count| {
                refaults.insert(Arc::clone(pod), (some, *count));
            }),
        };
        sample
    }

    /// Finds out what is needed to park a pod.
    fn survey(&self, survey: Survey) -> Surveyed {
        let Survey { pod, device, pids } = survey;
        let process = |pid: &u32| {
            let started = start_ticks(&self.proc_root, *pid)?;
            Some(Process { pid: i32::try_from(*pid).ok()?, started })
        };
        let processes: Option<Vec<Process>> = pids.iter().map(process).collect();
        let (max, current) = if self.unified {
            ("memory.max", "memory.current")
        } else {
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
        };
        let node = self.meminfo("MemTotal").unwrap_or(u64::MAX);
        let room = |group: &PathBuf| {
            // Version 1 says "no limit" by a number that no node has.
            let limit = number(&group.join(max)).filter(|limit| *limit <= node)?;
            Some(limit.saturating_sub(number(&group.join(current)).unwrap_or(limit)))
        };
        let room = self.cgroups.of(&pod).iter().filter_map(room).min();
        Surveyed { pod, device, processes, room, available: self.meminfo("MemAvailable") }
    }

    /// A number of `/proc/meminfo`, in bytes.
    fn meminfo(&self, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.proc_root.join("meminfo")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let kib: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
        kib.checked_mul(1024)
    }
}

/// Whether a tree is one of cgroup v2.
pub(crate) fn is_unified(cgroup_root: &Path) -> bool {
    cgroup_root.join("cgroup.controllers").is_file()
}

/// The number that a file has in it; `None` for `max`, and where there is none.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// What a cgroup uses and cannot drop, or its bound where that is below the share of interest.
fn used(group: &Path, limit: u64, above_percent: u8) -> Option<u64> {
    let swapped = number(&group.join("memory.swap.current")).unwrap_or(0);
    let bound = number(&group.join("memory.current"))?.saturating_add(swapped);
    if u128::from(bound) * 100 < u128::from(limit) * u128::from(above_percent) {
        return Some(bound);
    }
    let stat = fs::read_to_string(group.join("memory.stat")).ok()?;
    let part = |name| field(&stat, name).unwrap_or(0);
    Some(part("anon").saturating_add(part("shmem")).saturating_add(swapped))
}

/// The same of cgroup v1, of all below a cgroup.
fn used_v1(group: &Path) -> Option<u64> {
    let stat = fs::read_to_string(group.join("memory.stat")).ok()?;
    // A kernel without swap accounting says nothing of it, an old one nothing of shared memory.
    let part = |name| field(&stat, name).unwrap_or(0);
    let anonymous = field(&stat, "total_rss")?;
    Some(anonymous.saturating_add(part("total_shmem")).saturating_add(part("total_swap")))
}

/// Use and limit of the fullest of a pod's cgroups of version 1, its own first.
fn fullest_v1(groups: &[PathBuf], node: Option<u64>) -> Option<(u64, u64)> {
    let of = |(at, group): (usize, &PathBuf)| {
        // Version 1 says "no limit" by a number that no node has.
        let limit =
            number(&group.join("memory.limit_in_bytes")).filter(|limit| node.is_none_or(|n| *limit <= n));
        let limit = match limit {
            Some(limit) => limit,
            None if at == 0 => node?,
            None => return None,
        };
        Some((used_v1(group)?, limit))
    };
    groups.iter().enumerate().filter_map(of).max_by(by_share)
}

/// By share: a/b against c/d as ad against cb.
fn by_share((a, b): &(u64, u64), (c, d): &(u64, u64)) -> Ordering {
    (u128::from(*a) * u128::from(*d)).cmp(&(u128::from(*c) * u128::from(*b)))
}

/// Use and limit of the fullest of a pod's cgroups, its own first.
fn fullest(groups: &[PathBuf], node: Option<u64>, above_percent: u8) -> Option<(u64, u64)> {
    let of = |(at, group): (usize, &PathBuf)| {
        let limit = match number(&group.join("memory.max")) {
            Some(limit) => limit.min(node.unwrap_or(limit)),
            // What has no limit may take what the node has; a container that of its pod.
            None if at == 0 => node?,
            None => return None,
        };
        Some((used(group, limit, above_percent)?, limit))
    };
    groups.iter().enumerate().filter_map(of).max_by(by_share)
}

/// Microseconds that processes have waited for memory, by the line of this kind.
fn stalled(pressure: &str, kind: &str) -> Option<u64> {
    let line = pressure.lines().find(|line| line.starts_with(kind))?;
    line.split(' ').find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

/// Pages that were read again shortly after they had been dropped.
fn refaulted(group: &Path) -> Option<u64> {
    let stat = fs::read_to_string(group.join("memory.stat")).ok()?;
    Some(field(&stat, "workingset_refault_anon")?.saturating_add(field(&stat, "workingset_refault_file")?))
}

/// A number of `memory.stat`.
fn field(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?.parse().ok()
}

/// Reads host memory for as long as somebody wants it, and answers surveys.
pub(crate) async fn run(
    host: Arc<Host>,
    wants: watch::Receiver<Arc<Vec<Want>>>,
    mut surveys: UnboundedReceiver<Survey>,
    readings: UnboundedSender<Vec<Reading>>,
    surveyed: UnboundedSender<Surveyed>,
) {
    let (mut read_at, mut marked): (Option<Instant>, Option<Instant>) = (None, None);
    loop {
        let wanted = Arc::clone(&wants.borrow());
        let soonest = wanted.iter().filter_map(|want| want.exact_every).min();
        let pace = soonest.map_or(EVERY, |every| Duration::from_millis(every).clamp(SOONEST, EVERY));
        let next = read_at.map_or(Duration::ZERO, |at: Instant| pace.saturating_sub(at.elapsed()));
        tokio::select! {
            survey = surveys.recv() => {
                let Some(survey) = survey else { return };
                let (host, surveyed) = (Arc::clone(&host), surveyed.clone());
                // The loop ended: nobody asks what was found.
                tokio::task::spawn_blocking(move || drop(surveyed.send(host.survey(survey))));
            }
            () = sleep(next) => {
                let now = Instant::now();
                read_at = Some(now);
                let marks = marked.is_none_or(|at| now.duration_since(at) + SOONEST / 2 >= EVERY);
                if marks {
                    marked = Some(now);
                }
                let wanted = Arc::clone(&wants.borrow());
                if wanted.is_empty() {
                    continue;
                }
                let host = Arc::clone(&host);
                let read = tokio::task::spawn_blocking(move || host.read(&wanted, marks, now));
                if let Ok(read) = read.await
                    && !read.is_empty()
                {
                    let _ = readings.send(read);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10";
    const ID: &str = "4f7a1d0b8c9e2f3a4b5c6d7e8f9012344f7a1d0b8c9e2f3a4b5c6d7e8f901234";

    fn want(above_percent: Option<u8>, exact_every: Option<u64>) -> Want {
        Want { pod: POD.into(), above_percent, exact_every }
    }

    struct Node(tempfile::TempDir);

    impl Node {
        fn new() -> Self {
            let node = Self(tempfile::tempdir().unwrap());
            node.write("cgroup/cgroup.controllers", "memory\n");
            node.write("proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    400 kB\n");
            node
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn group(&self, below: &str, max: &str, current: u64, anon: u64) {
            let group = format!("cgroup/kubepods/pod{POD}{below}");
            self.write(&format!("{group}/memory.max"), &format!("{max}\n"));
            self.write(&format!("{group}/memory.current"), &format!("{current}\n"));
            self.write(
                &format!("{group}/memory.stat"),
                &format!("anon {anon}\nfile 9\nshmem 5\nanon_thp 77\n"),
            );
        }

        fn read(&self) -> Option<(u64, u64)> {
            let host = Host::new(&self.0.path().join("cgroup"), self.0.path().join("proc"));
            let sample = host.read(&[want(Some(88), None)], true, Instant::now()).pop()?.sample?;
            sample.held.zip(sample.limit)
        }
    }

    #[test]
    fn the_page_cache_does_not_count_and_is_not_asked_for_in_vain() {
        let node = Node::new();
        assert_eq!(node.read(), None, "the pod has no cgroup");
        node.group("", "1000", 950, 500);
        assert_eq!(node.read(), Some((505, 1000)));
        node.group("", "1000", 800, 500);
        assert_eq!(node.read(), Some((800, 1000)), "it can be no more than that");
        node.write(&format!("cgroup/kubepods/pod{POD}/memory.swap.current"), "100\n");
        assert_eq!(node.read(), Some((605, 1000)), "what is swapped out was not dropped");
    }

    #[test]
    fn of_a_pod_without_a_limit_the_fullest_container_counts_and_else_the_node() {
        let node = Node::new();
        node.group("", "max", 1_000_000, 950_000);
        assert_eq!(node.read(), Some((950_005, 1_024_000)));
        node.group(&format!("/{ID}"), "2000", 1_999, 1_990);
        assert_eq!(node.read(), Some((1_995, 2_000)));
    }

    #[test]
    fn waits_and_refaults_are_counted_and_refaults_only_looked_at_after_a_wait() {
        let node = Node::new();
        node.group("", "1000", 100, 50);
        let host = Host::new(&node.0.path().join("cgroup"), node.0.path().join("proc"));
        let read = |waited: u64, refaults: u64| {
            let group = format!("cgroup/kubepods/pod{POD}");
            let text = format!(
                "some avg10=85.37 avg60=1.00 avg300=0.00 total={waited}\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=3\n"
            );
            node.write(&format!("{group}/memory.pressure"), &text);
            let text = format!("anon 5\nworkingset_refault_anon 1\nworkingset_refault_file {refaults}\n");
            node.write(&format!("{group}/memory.stat"), &text);
            let sample = host.read(&[want(Some(88), None)], true, Instant::now()).remove(0).sample.unwrap();
            (sample.some, sample.full, sample.refaults)
        };
        assert_eq!(read(7, 4), (Some(7), Some(3), Some(5)));
        assert_eq!(read(7, 9), (Some(7), Some(3), Some(5)));
        assert_eq!(read(8, 9), (Some(8), Some(3), Some(10)));
        assert_eq!(stalled("nonsense", "some "), None);
    }

    #[test]
    fn room_for_an_image_is_the_least_of_all_limits() {
        let node = Node::new();
        node.group("", "max", 10, 10);
        let host = || Host::new(&node.0.path().join("cgroup"), node.0.path().join("proc"));
        let survey = |pids| Survey { pod: POD.into(), device: "GPU-0".into(), pids };
        let found = host().survey(survey(vec![]));
        assert_eq!((found.room, found.available, found.processes), (None, Some(400 << 10), Some(vec![])));
        node.group("", "900", 100, 10);
        node.group(&format!("/{ID}"), "500", 100, 10);
        assert_eq!(host().survey(survey(vec![])).room, Some(400));
        assert_eq!(host().survey(survey(vec![7])).processes, None, "it is gone");
        let zeros = "0 ".repeat(16);
        node.write("proc/7/stat", &format!("7 (x) S {zeros}1 0 5 9\n"));
        assert_eq!(host().survey(survey(vec![7])).processes, Some(vec![Process { pid: 7, started: 5 }]));
    }

    #[test]
    fn what_a_pod_holds_is_read_as_it_is_when_that_is_due() {
        let node = Node::new();
        node.group("", "1000", 800, 500);
        let host = Host::new(&node.0.path().join("cgroup"), node.0.path().join("proc"));
        let begun = Instant::now();
        let read = |after: u64, marks| {
            let now = begun + Duration::from_millis(after);
            host.read(&[want(Some(88), Some(10_000))], marks, now).pop()
        };
        let first = read(0, true).unwrap();
        assert_eq!(first.sample.unwrap().held, Some(800), "far from its mark");
        assert_eq!(first.exact, Some(Exact { held: Some(505), limit: Some(1000) }));
        assert_eq!(read(2_000, true).unwrap().exact, None);
        assert_eq!(read(4_000, false), None);
        assert!(read(9_950, false).unwrap().exact.is_some(), "a little early");
    }

    #[test]
    fn cgroup_v1_says_what_a_pod_holds_and_nothing_for_marks() {
        let node = Node::new();
        fs::remove_file(node.0.path().join("cgroup/cgroup.controllers")).unwrap();
        let group = format!("cgroup/memory/kubepods/pod{POD}");
        node.write(&format!("{group}/memory.limit_in_bytes"), "9223372036854771712");
        node.write(
            &format!("{group}/memory.stat"),
            "cache 900\nrss 1\ntotal_rss 70\ntotal_shmem 20\ntotal_swap 7\n",
        );
        let host = Host::new(&node.0.path().join("cgroup"), node.0.path().join("proc"));
        let reading = host.read(&[want(Some(88), Some(1))], true, Instant::now()).remove(0);
        assert_eq!(reading.sample, None);
        assert_eq!(reading.exact, Some(Exact { held: Some(97), limit: Some(1_024_000) }));
    }

    #[test]
    fn cgroup_v1_has_a_tree_for_memory() {
        let node = Node::new();
        fs::remove_file(node.0.path().join("cgroup/cgroup.controllers")).unwrap();
        let group = format!("cgroup/memory/kubepods/pod{POD}");
        node.write(&format!("{group}/memory.limit_in_bytes"), "900");
        node.write(&format!("{group}/memory.usage_in_bytes"), "100");
        let host = Host::new(&node.0.path().join("cgroup"), node.0.path().join("proc"));
        assert!(!host.unified);
        let found = host.survey(Survey { pod: POD.into(), device: "GPU-0".into(), pids: vec![] });
        assert_eq!(found.room, Some(800));
        node.write(&format!("{group}/memory.limit_in_bytes"), "9223372036854771712");
        let found = host.survey(Survey { pod: POD.into(), device: "GPU-0".into(), pids: vec![] });
        assert_eq!(found.room, None);
    }
}
