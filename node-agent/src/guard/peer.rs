//! Who is at the other end of a pod's socket.
//!
//! The kernel says which process connected. Whose it is, its cgroup says; a pidfd that was opened
//! before shows that what was read is of that very process, and tells its end.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt::socket_peercred,
    process::{Pid, PidfdFlags, pidfd_open},
};

use crate::{
    attribute::{Identity, identify},
    cgroup,
};

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A process at the other end.
#[derive(Debug)]
pub(crate) struct Peer {
    /// Its PID.
    pub(crate) pid: u32,
    /// Readable once it has ended.
    pub(crate) pidfd: OwnedFd,
    /// What `/proc` says of it.
    pub(crate) identity: Identity,
}

impl Peer {
    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        is_ready(&self.pidfd, PollFlags::IN)
    }
}

/// The process that made this connection. `None` if it is gone, or if there is no telling.
pub(crate) fn of_connection(socket: impl AsFd, proc_root: &Path) -> Option<Peer> {
    let pid = socket_peercred(&socket).ok()?.pid;
    let peer = of_pid(pid, proc_root)?;
    // A process that ended before the pidfd was opened has closed its end: then another may have
    // got its PID.
    (!is_ready(&socket, PollFlags::HUP)).then_some(peer)
}

/// The live process with this PID.
pub(crate) fn of_pid(pid: Pid, proc_root: &Path) -> Option<Peer> {
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    let pid = u32::try_from(pid.as_raw_pid()).ok()?;
    let identity = identify(proc_root, pid).ok()?;
    (!is_ready(&pidfd, PollFlags::IN)).then_some(Peer { pid, pidfd, identity })
}

/// Whether the other end of a connection is closed.
pub(crate) fn has_hung_up(socket: impl AsFd) -> bool {
    is_ready(socket, PollFlags::HUP)
}

fn is_ready(descriptor: impl AsFd, flags: PollFlags) -> bool {
    let mut fds = [PollFd::new(&descriptor, flags)];
    poll(&mut fds, Some(&NOW)).is_ok() && fds.iter().any(|fd| fd.revents().intersects(flags))
}

/// What can be told of a process that holds memory outside its pod's guard: its command name, and
/// whether it runs in another root than its container, where the guard is not. Nothing of the pod's
/// own file system is looked at, which may never answer.
pub(crate) fn inspect(proc_root: &Path, pid: u32) -> Option<(Box<str>, bool)> {
    let identity = identify(proc_root, pid).ok()?;
    let process = proc_root.join(pid.to_string());
    let elsewhere = std::fs::read_link(process.join("root")).is_ok_and(|root| root != Path::new("/"));
    let nested =
        || std::fs::read_to_string(process.join("cgroup")).is_ok_and(|text| cgroup::is_nested(&text));
    Some((identity.comm, elsewhere || nested()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixStream};

    use super::*;
    use crate::attribute::Owner;

    #[test]
    fn a_peer_is_known_by_its_cgroup_and_not_taken_for_one_when_it_is_gone() {
        let uid = "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10";
        let proc = tempfile::tempdir().unwrap();
        let me = std::process::id();
        let directory = proc.path().join(me.to_string());
        std::fs::create_dir(&directory).unwrap();
        symlink(format!("/proc/{me}/stat"), directory.join("stat")).unwrap();
        std::fs::write(directory.join("cgroup"), format!("0::/kubepods/pod{uid}/x\n")).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let peer = of_connection(&ours, proc.path()).unwrap();
        assert_eq!(peer.pid, me);
        assert!(matches!(peer.identity.owner, Owner::Pod(owner) if *owner.pod_uid == *uid));
        assert!(!has_hung_up(&ours));
        drop(theirs);
        assert!(has_hung_up(&ours) && of_connection(&ours, proc.path()).is_none());
    }

    #[test]
    fn a_process_in_a_root_of_its_own_is_told_from_one_that_only_avoids_the_guard() {
        let proc = tempfile::tempdir().unwrap();
        let id = "4f7a1d0b8c9e2f3a4b5c6d7e8f9012344f7a1d0b8c9e2f3a4b5c6d7e8f901234";
        let pod = "/kubepods/pod8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10";
        for (pid, root, cgroup, elsewhere) in [
            (1, "/", format!("0::{pod}/{id}\n"), false),
            (2, "/srv/jail", format!("0::{pod}/{id}\n"), true),
            (3, "/", format!("0::{pod}/{id}/docker/{id}\n"), true),
        ] {
            let directory = proc.path().join(format!("{pid}"));
            std::fs::create_dir(&directory).unwrap();
            let zeros = "0 ".repeat(16);
            std::fs::write(directory.join("stat"), format!("{pid} (thief) S {zeros}1 0 5 9\n")).unwrap();
            std::fs::write(directory.join("cgroup"), cgroup).unwrap();
            symlink(root, directory.join("root")).unwrap();
            assert_eq!(inspect(proc.path(), pid), Some(("thief".into(), elsewhere)), "{pid}");
        }
        assert_eq!(inspect(proc.path(), 9), None);
    }
}
