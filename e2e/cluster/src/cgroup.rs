//! The cluster's cgroups, version 1 or 2: a root for each node's pods, and one for the daemons by
//! which everything that belongs to the cluster is found again, whatever became of its parents.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    paths::ClusterId,
    spec::{Node, Spec},
};

/// The controllers of version 2 that the kubelet wants to find enabled.
const CONTROLLERS: &[&str] = &["cpu", "cpuset", "hugetlb", "io", "memory", "pids"];

/// Makes the cgroups of the daemons and of each node's pods.
pub fn create(id: ClusterId, spec: &Spec) -> Result<()> {
    let names = [id.cgroup(), daemons(id)].into_iter().chain(spec.nodes().map(|node| id.cgroup_of(node)));
    let hierarchies = hierarchies()?;
    for name in names {
        for hierarchy in &hierarchies {
            create_one(hierarchy, &name)?;
        }
    }
    Ok(())
}

/// Puts this process, and so all that it starts, under the daemons' cgroup.
///
/// With version 1 only in the hierarchy that processes are found by; limits that the caller lives
/// under in others go on.
pub fn join(id: ClusterId) -> Result<()> {
    let hierarchy = tracking_hierarchy()?;
    fs::write(hierarchy.path.join(daemons(id)).join("cgroup.procs"), "0")
        .context("joining the cluster's cgroup")
}

/// Kills every process of the cluster and waits for the end of the last.
pub fn kill_all(id: ClusterId) -> Result<()> {
    let root = tracking_hierarchy()?.path.join(id.cgroup());
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let alive = processes(&root);
        if alive.is_empty() {
            return Ok(());
        }
        for pid in &alive {
            // It may have ended meanwhile.
            let _ = kill_process(*pid, Signal::KILL);
        }
        if Instant::now() > deadline {
            bail!("processes {alive:?} do not end after SIGKILL; see /proc/PID/stack");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Removes the cgroups; they have no processes any more.
pub fn remove(id: ClusterId) -> Result<()> {
    remove_below(Path::new(&id.cgroup()))
}

/// Removes the cgroups of a node's pods, as a reboot does.
pub fn remove_pods(id: ClusterId, node: Node) -> Result<()> {
    remove_below(&Path::new(&id.cgroup_of(node)).join("kubepods"))
}

fn remove_below(name: &Path) -> Result<()> {
    // All of them: with version 1, the runtime makes cgroups in a version 2 hierarchy beside it too.
    for hierarchy in parse_hierarchies(&mounts()?) {
        let root = hierarchy.path.join(name);
        let deadline = Instant::now() + Duration::from_secs(5);
        while let Err(error) = remove_tree(&root) {
            // The kernel lets go of a cgroup a moment after its last process.
            if Instant::now() > deadline {
                return Err(error).with_context(|| format!("removing {}", root.display()));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

fn daemons(id: ClusterId) -> String {
    format!("{id}/daemons")
}

#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    path: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

fn mounts() -> Result<String> {
    fs::read_to_string("/proc/self/mountinfo").context("reading mounts")
}

/// The hierarchies that control anything.
fn hierarchies() -> Result<Vec<Hierarchy>> {
    let found = in_control(parse_hierarchies(&mounts()?));
    if found.is_empty() {
        bail!("no cgroups are mounted below /sys/fs/cgroup");
    }
    Ok(found)
}

/// All version 1 hierarchies, or the version 2 one where it is the only one.
fn in_control(mut all: Vec<Hierarchy>) -> Vec<Hierarchy> {
    if all.iter().any(|hierarchy| hierarchy.version == Version::One) {
        all.retain(|hierarchy| hierarchy.version == Version::One);
    }
    all
}

fn parse_hierarchies(mountinfo: &str) -> Vec<Hierarchy> {
    mountinfo
        .lines()
        .filter_map(|line| {
            let (mount, filesystem) = line.split_once(" - ")?;
            let version = match filesystem.split(' ').next()? {
                "cgroup" => Version::One,
                "cgroup2" => Version::Two,
                _ => return None,
            };
            let path = PathBuf::from(mount.split(' ').nth(4)?);
            path.starts_with("/sys/fs/cgroup").then_some(Hierarchy { path, version })
        })
        .collect()
}

/// Where processes are found again: version 2, or of version 1 a hierarchy that limits nothing
/// that daemons need.
fn tracking_hierarchy() -> Result<Hierarchy> {
    let mut all = hierarchies()?;
    let at = all.iter().position(|one| one.version == Version::Two || one.path.ends_with("pids"));
    Ok(all.swap_remove(at.unwrap_or(0)))
}

fn create_one(hierarchy: &Hierarchy, name: &str) -> Result<()> {
    let path = hierarchy.path.join(name);
    fs::create_dir_all(&path).with_context(|| format!("making the cgroup {}", path.display()))?;
    let parent = path.parent().unwrap_or(&path);
    if hierarchy.version == Version::Two {
        let controllers = fs::read_to_string(parent.join("cgroup.controllers"))?;
        for controller in controllers.split_whitespace().filter(|controller| CONTROLLERS.contains(controller))
        {
            fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"))
                .with_context(|| format!("enabling {controller} below {}", parent.display()))?;
        }
    } else if path.join("cpuset.cpus").exists() {
        // Empty in a new cgroup, and no process can join it then.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            fs::read(parent.join(file))
                .and_then(|value| fs::write(path.join(file), value))
                .with_context(|| format!("setting {file} of {}", path.display()))?;
        }
    }
    Ok(())
}

fn processes(cgroup: &Path) -> Vec<Pid> {
    let own = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let mut all: Vec<Pid> =
        own.lines().filter_map(|line| line.parse().ok()).filter_map(Pid::from_raw).collect();
    for child in children(cgroup) {
        all.extend(processes(&child));
    }
    all
}

fn children(cgroup: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(cgroup) else { return Vec::new() };
    entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect()
}

fn remove_tree(cgroup: &Path) -> io::Result<()> {
    for child in children(cgroup) {
        remove_tree(&child)?;
    }
    match fs::remove_dir(cgroup) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hybrid_host_counts_as_version_one() {
        let mounts = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found = in_control(parse_hierarchies(mounts));
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|hierarchy| hierarchy.version == Version::One));
    }

    #[test]
    fn a_unified_host_has_one_hierarchy() {
        let mounts = "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = in_control(parse_hierarchies(mounts));
        assert_eq!(found, [Hierarchy { path: "/sys/fs/cgroup".into(), version: Version::Two }]);
    }
}
