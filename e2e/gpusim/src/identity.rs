//! Who is at the other end of a socket, by what the kernel says.
//!
//! A process cannot name itself: in a pod it knows only its inner PID. The kernel gives the PID
//! as the daemon's PID namespace counts it, and `/proc` tells how the namespaces below count it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Asks a namespace for the one that it is in (`linux/nsfs.h`).
const NS_GET_PARENT: libc::c_ulong = 0xb702;

/// A process under all its PIDs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// PID in the daemon's PID namespace.
    pub pid: u32,
    /// Each PID namespace that the process is in, by inode number, and its PID there; the
    /// innermost first, the daemon's last.
    pub namespaces: Vec<(u64, u32)>,
}

impl Identity {
    /// Looks a living process up.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn of(pid: u32) -> io::Result<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
        let pids: Vec<u32> = line.split_whitespace().rev().filter_map(|pid| pid.parse().ok()).collect();
        let mut namespaces = Vec::with_capacity(pids.len());
        let mut namespace = File::open(format!("/proc/{pid}/ns/pid"))?;
        let mut rest = pids.iter().peekable();
        while let Some(pid) = rest.next() {
            namespaces.push((namespace.metadata()?.ino(), *pid));
            if rest.peek().is_some() {
                namespace = parent(&namespace)?;
            }
        }
        Ok(Self { pid, namespaces })
    }

    /// The PID in the daemon's namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The namespace that the process lives in.
    pub fn namespace(&self) -> u64 {
        self.namespaces.first().map_or(0, |(inode, _)| *inode)
    }

    /// How a namespace counts the process; `None` where it is not visible.
    pub fn pid_in(&self, namespace: u64) -> Option<u32> {
        self.namespaces.iter().find(|(inode, _)| *inode == namespace).map(|(_, pid)| *pid)
    }

    /// What is left of it after its death: its PID in the daemon's namespace.
    #[must_use]
    pub fn gone(&self) -> Self {
        let last = self.namespaces.last().copied();
        Self { pid: self.pid, namespaces: last.into_iter().collect() }
    }

    /// A process that is gone, seen from the daemon's own PID namespace.
    ///
    /// # Errors
    /// When `/proc` is not there.
    pub fn departed(pid: u32) -> io::Result<Self> {
        let own = std::fs::metadata("/proc/self/ns/pid")?.ino();
        Ok(Self { pid, namespaces: vec![(own, pid)] })
    }
}

/// The user and the process at the other end of a connection.
#[derive(Debug)]
pub struct Peer {
    /// The process.
    pub identity: Identity,
    /// Becomes readable when the process is gone.
    pub pidfd: OwnedFd,
    /// Its effective user when it connected.
    pub uid: u32,
}

impl Peer {
    /// Asks the kernel about the other end of `stream`.
    ///
    /// # Errors
    /// When the process is gone already, or is not visible in the daemon's PID namespace.
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        let credentials = credentials(stream)?;
        let pid = u32::try_from(credentials.pid).map_err(io::Error::other)?;
        let pidfd = watch(pid)?;
        Ok(Self { identity: Identity::of(pid)?, pidfd, uid: credentials.uid })
    }
}

/// A descriptor that becomes readable when the process is gone.
///
/// # Errors
/// When there is no such process.
pub fn watch(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "the process is in no PID namespace of ours")
    })?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

fn credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).map_err(io::Error::other)?;
    // SAFETY: the option fills in a `ucred`, and `length` says that there is room for one.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            std::ptr::from_mut(&mut credentials).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(credentials) } else { Err(io::Error::last_os_error()) }
}

/// The PID namespace that contains `namespace`.
fn parent(namespace: &File) -> io::Result<File> {
    // SAFETY: this request takes no argument and answers with a new descriptor.
    let fd = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made the descriptor for us and nobody else knows it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_itself_through_a_socket() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap();
        assert_eq!(peer.identity.pid, std::process::id());
        assert_eq!(peer.identity.pid_in(peer.identity.namespace()), Some(std::process::id()));
    }

    #[test]
    fn a_process_in_a_namespace_below_is_seen_from_above_only() {
        let outer = Identity { pid: 100, namespaces: vec![(1, 100)] };
        let inner = Identity { pid: 200, namespaces: vec![(2, 7), (1, 200)] };
        assert_eq!(inner.pid_in(outer.namespace()), Some(200));
        assert_eq!(inner.pid_in(inner.namespace()), Some(7));
        assert_eq!(outer.pid_in(inner.namespace()), None);
        assert_eq!(inner.gone(), Identity { pid: 200, namespaces: vec![(1, 200)] });
    }

    #[test]
    fn a_pid_without_process_is_an_error() {
        assert!(Identity::of(u32::MAX).is_err());
        assert!(watch(0).is_err());
    }
}
