//! A restart in place: ends the main processes of a pod's containers, which the kubelet then starts anew
//! where they are.
//!
//! A process is signalled through a pidfd only, and only after its start time and its cgroup were
//! compared with what was found before: a PID that is used again is nobody's. First `SIGTERM`; who has
//! not ended when the grace period is over gets `SIGKILL`. The first process of a PID namespace ignores a
//! `SIGTERM` that it does not handle.

use std::{path::Path, sync::Arc, time::Duration};

use rustix::{
    io::Errno,
    process::{Pid, Signal, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender},
    time::{Instant, sleep_until},
};
use tracing::{info, warn};

use crate::{
    attribute::{Owner, identify},
    guard::{Peer, of_pid},
};

/// How often it is looked whether a process has ended.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a process may take to end after `SIGKILL`. One that hangs in the driver takes longer.
const KILLED_WITHIN: Duration = Duration::from_secs(30);

/// The main process of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Main {
    /// Its PID on the host.
    pub(crate) pid: u32,
    /// When it started, in clock ticks since boot.
    pub(crate) started: u64,
    /// ID of its container.
    pub(crate) container: String,
}

/// Something to be done about a pod's processes, off the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Finds the main processes of these containers.
    Find {
        /// UID of the incident.
        incident: Arc<str>,
        /// UID of the pod, as the kubelet knows it.
        pod: Arc<str>,
        /// IDs of its containers that use the device.
        containers: Vec<Arc<str>>,
    },
    /// Ends these processes.
    End {
        /// UID of the incident.
        incident: Arc<str>,
        /// UID of the pod, as the kubelet knows it.
        pod: Arc<str>,
        /// The processes.
        mains: Vec<Main>,
        /// How long they may take.
        grace: Duration,
    },
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The main processes; an error says why one was not found.
    Found {
        /// UID of the incident.
        incident: Arc<str>,
        /// One for each container.
        result: Result<Vec<Main>, String>,
    },
    /// How many had to be killed; an error says why one has not ended.
    Ended {
        /// UID of the incident.
        incident: Arc<str>,
        /// The count.
        result: Result<usize, String>,
    },
}

/// Carries orders out until nobody gives any more.
pub(crate) async fn run(
    proc_root: Arc<Path>,
    mut orders: UnboundedReceiver<Order>,
    outcomes: UnboundedSender<Outcome>,
) {
    while let Some(order) = orders.recv().await {
        let (proc_root, outcomes) = (Arc::clone(&proc_root), outcomes.clone());
        tokio::spawn(async move {
            let outcome = match order {
                Order::Find { incident, pod, containers } => {
                    let look = move || find(&proc_root, &pod, &containers);
                    let found = tokio::task::spawn_blocking(look).await;
                    Outcome::Found { incident, result: found.unwrap_or_else(|error| Err(error.to_string())) }
                }
                Order::End { incident, pod, mains, grace } => {
                    Outcome::Ended { incident, result: end(&proc_root, &pod, &mains, grace).await }
                }
            };
            // The loop ended: nobody asks what became of it.
            let _ = outcomes.send(outcome);
        });
    }
}

/// Finds the main process of each container of a pod: the oldest of its processes whose parent is not in
/// it. Programs that were started in it later, as by `kubectl exec`, have such a parent as well.
pub(crate) fn find(proc_root: &Path, pod: &str, containers: &[Arc<str>]) -> Result<Vec<Main>, String> {
    let mut processes = Vec::new();
    let entries = std::fs::read_dir(proc_root).map_err(|error| format!("listing processes: {error}"))?;
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(identity) = identify(proc_root, pid) else { continue };
        let Owner::Pod(owner) = identity.owner else { continue };
        let Some(container) =
            owner.container_id.as_ref().filter(|id| *owner.pod_uid == *pod && containers.contains(id))
        else {
            continue;
        };
        let Some(parent) = parent(proc_root, pid) else { continue };
        let main = Main { pid, started: identity.start_ticks, container: container.to_string() };
        processes.push((main, parent));
    }
    let is_inside = |pid: u32, container: &str| {
        processes.iter().any(|(main, _)| main.pid == pid && *main.container == *container)
    };
    containers
        .iter()
        .map(|container| {
            let own = processes.iter().filter(|(main, _)| *main.container == **container);
            let from_outside = own.filter(|(main, parent)| !is_inside(*parent, &main.container));
            let first = from_outside.min_by_key(|(main, _)| (main.started, main.pid));
            let missing = || format!("container {} has no process any more", short(container));
            first.map(|(main, _)| main.clone()).ok_or_else(missing)
        })
        .collect()
}

/// The parent of a process: field 4 of its `stat`.
fn parent(proc_root: &Path, pid: u32) -> Option<u32> {
    let stat = std::fs::read(proc_root.join(pid.to_string()).join("stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The name before it may contain anything.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn short(container: &str) -> String {
    container.chars().take(12).collect()
}

/// Ends processes. Those that are gone already have ended. Returns how many had to be killed.
async fn end(proc_root: &Path, pod: &str, mains: &[Main], grace: Duration) -> Result<usize, String> {
    let mut running = Vec::new();
    for main in mains {
        let Some(peer) = reach(proc_root, pod, main) else { continue };
        match pidfd_send_signal(&peer.pidfd, Signal::TERM) {
            Ok(()) => {
                info!(pid = main.pid, container = short(&main.container), "asked to end, to be started anew");
                running.push((main.pid, peer));
            }
            Err(Errno::SRCH) => {}
            Err(error) => return Err(cannot(main.pid, error)),
        }
    }
    let until = Instant::now() + grace;
    let mut killed = Vec::new();
    for (pid, peer) in running {
        if ends(&peer, until).await {
            continue;
        }
        match pidfd_send_signal(&peer.pidfd, Signal::KILL) {
            Ok(()) => killed.push((pid, peer)),
            Err(Errno::SRCH) => {}
            Err(error) => return Err(cannot(pid, error)),
        }
    }
    let until = Instant::now() + KILLED_WITHIN;
    for (pid, peer) in &killed {
        if !ends(peer, until).await {
            warn!(pid, "a process was killed and does not end");
            return Err(format!(
                "process {pid} was killed and has not ended within {} s",
                KILLED_WITHIN.as_secs()
            ));
        }
    }
    Ok(killed.len())
}

/// Whether a process ends until then.
async fn ends(peer: &Peer, until: Instant) -> bool {
    while !peer.has_ended() {
        let now = Instant::now();
        if now >= until {
            return false;
        }
        sleep_until(until.min(now + LOOK_EVERY)).await;
    }
    true
}

fn cannot(pid: u32, error: Errno) -> String {
    let advice = if error == Errno::PERM {
        ": the agent needs the capability KILL (agent.restartInPlace of the chart)"
    } else {
        ""
    };
    format!("process {pid} cannot be signalled: {error}{advice}")
}

/// The process, if it is still the one that was found.
fn reach(proc_root: &Path, pod: &str, main: &Main) -> Option<Peer> {
    let peer = of_pid(i32::try_from(main.pid).ok().and_then(Pid::from_raw)?, proc_root)?;
    let Owner::Pod(owner) = &peer.identity.owner else { return None };
    let same = peer.identity.start_ticks == main.started
        && *owner.pod_uid == *pod
        && owner.container_id.as_deref() == Some(&*main.container);
    same.then_some(peer)
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        process::{Child, Command, Stdio},
    };

    use super::*;

    const POD: &str = "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10";
    const ID: &str = "4f7a1d0b8c9e2f3a4b5c6d7e8f9012344f7a1d0b8c9e2f3a4b5c6d7e8f901234";
    const OTHER: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    fn listed(proc: &Path, pid: u32, parent: u32, started: u64, container: &str) {
        let directory = proc.join(pid.to_string());
        std::fs::create_dir(&directory).unwrap();
        let zeros = "0 ".repeat(15);
        std::fs::write(directory.join("stat"), format!("{pid} (a) b) S {parent} {zeros}1 0 {started} 9\n"))
            .unwrap();
        std::fs::write(directory.join("cgroup"), format!("0::/kubepods/pod{POD}/{container}\n")).unwrap();
    }

    #[test]
    fn the_main_process_of_a_container_is_the_oldest_that_came_from_outside() {
        let proc = tempfile::tempdir().unwrap();
        let proc = proc.path();
        listed(proc, 50, 1, 70, ID); // by exec
        listed(proc, 90, 1, 60, ID); // whose PID went round
        listed(proc, 60, 90, 60, ID);
        listed(proc, 10, 1, 10, OTHER);
        let main = Main { pid: 90, started: 60, container: ID.into() };
        assert_eq!(find(proc, POD, &[ID.into()]), Ok(vec![main]));
        assert_eq!(find(proc, POD, &[OTHER.into(), ID.into()]).unwrap().len(), 2);
        let gone: Arc<str> = "bbbb".into();
        assert!(find(proc, POD, &[gone]).unwrap_err().contains("no process any more"));
    }

    /// A process of this test that passes for one of the pod's container.
    struct Fake {
        proc: tempfile::TempDir,
        child: Child,
        main: Main,
    }

    impl Fake {
        fn start(script: &str) -> Self {
            let proc = tempfile::tempdir().unwrap();
            let mut child = Command::new("sh")
                .args(["-c", &format!("{script}; echo ready; read forever")])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            std::io::BufRead::read_line(
                &mut std::io::BufReader::new(child.stdout.as_mut().unwrap()),
                &mut line,
            )
            .unwrap();
            let pid = child.id();
            let directory = proc.path().join(pid.to_string());
            std::fs::create_dir(&directory).unwrap();
            symlink(format!("/proc/{pid}/stat"), directory.join("stat")).unwrap();
            std::fs::write(directory.join("cgroup"), format!("0::/kubepods/pod{POD}/{ID}\n")).unwrap();
            let main = find(proc.path(), POD, &[ID.into()]).unwrap().remove(0);
            assert_eq!(main.pid, pid);
            Self { proc, child, main }
        }

        async fn end(&self, main: &Main, grace: u64) -> Result<usize, String> {
            end(self.proc.path(), POD, std::slice::from_ref(main), Duration::from_millis(grace)).await
        }
    }

    #[tokio::test]
    async fn who_ends_when_asked_is_not_killed_and_who_does_not_is() {
        let mut polite = Fake::start("true");
        assert_eq!(polite.end(&polite.main.clone(), 60_000).await, Ok(0));
        polite.child.wait().unwrap();
        let mut deaf = Fake::start("trap '' TERM");
        assert_eq!(deaf.end(&deaf.main.clone(), 20).await, Ok(1));
        deaf.child.wait().unwrap();
        assert_eq!(deaf.end(&deaf.main.clone(), 20).await, Ok(0), "twice does no harm");
    }

    #[tokio::test]
    async fn a_process_that_only_has_the_number_of_the_one_that_was_found_is_let_be() {
        let mut fake = Fake::start("true");
        for other in [
            Main { started: fake.main.started + 1, ..fake.main.clone() },
            Main { container: OTHER.into(), ..fake.main.clone() },
        ] {
            assert_eq!(fake.end(&other, 20).await, Ok(0));
        }
        let proc = fake.proc.path();
        assert_eq!(end(proc, "another", std::slice::from_ref(&fake.main), Duration::ZERO).await, Ok(0));
        assert!(fake.child.try_wait().unwrap().is_none());
        fake.child.kill().unwrap();
        fake.child.wait().unwrap();
    }
}
