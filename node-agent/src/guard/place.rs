//! Where the socket of a guarded pod is: in the volume that the volume server made for it.
//!
//! That directory belongs to the node, but the pod's programs look at it and the pod's own volumes are
//! beside it: below the kubelet's directory no link is followed.

use std::{
    fs::File,
    io::{self, Read},
    os::fd::AsRawFd,
    path::PathBuf,
};

use highwater_crds::names;
use rustix::{
    fd::OwnedFd,
    fs::{
        AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, chmod, fstat, openat, openat2, renameat,
        statat, unlinkat,
    },
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};
use serde::Deserialize;

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::PATH).union(OFlags::CLOEXEC);
/// Where the kubelet has the volumes of CSI drivers in a pod's directory.
const CSI_VOLUMES: &str = "kubernetes.io~csi";
/// What the kubelet writes beside such a volume, and how much of it is read.
const DESCRIPTION: &str = "vol_data.json";
const DESCRIPTION_MOST: u64 = 64 << 10;
/// The socket's directory in the volume.
const DIRECTORY_IN_VOLUME: &str = "run";
/// The file name of the socket.
pub(crate) const SOCKET: &str = "agent.sock";
/// The same while nobody listens there yet.
const UNFINISHED: &str = ".agent.sock.unfinished";

/// Connections that may wait to be accepted. Hundreds of processes of a pod may start at once.
const BACKLOG: i32 = 1024;

/// Why a pod's socket could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlaceError {
    /// The text cannot name a pod.
    #[error("{0:?} is not the UID of a pod")]
    BadUid(String),
    /// The volume is not there (yet).
    #[error("the volume of the guard is not there")]
    NoVolume,
    /// Something is in the way.
    #[error("{what} is {found}: remove it")]
    Obstructed {
        /// What is in the way.
        what: &'static str,
        /// What kind of file it is.
        found: &'static str,
    },
    /// Anything else.
    #[error("making the socket: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for PlaceError {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

/// What is used of the kubelet's description of a volume.
#[derive(Deserialize)]
struct Description {
    #[serde(rename = "driverName")]
    driver_name: String,
}

/// Finds the directories of volumes.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    kubelet_root: PathBuf,
}

impl Places {
    /// Of the kubelet whose directory is `kubelet_root` (`/var/lib/kubelet`).
    pub(crate) fn new(kubelet_root: impl Into<PathBuf>) -> Self {
        Self { kubelet_root: kubelet_root.into() }
    }

    /// The directory of the socket in the pod's volume.
    fn open(&self, pod_uid: &str) -> Result<OwnedFd, PlaceError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if pod_uid.is_empty() || !pod_uid.chars().all(plain) {
            return Err(PlaceError::BadUid(pod_uid.to_owned()));
        }
        let root = openat(CWD, &self.kubelet_root, DIRECTORY, Mode::empty())?;
        let volumes = match beneath(&root, &format!("pods/{pod_uid}/volumes/{CSI_VOLUMES}"), OFlags::RDONLY) {
            Err(Errno::NOENT) => return Err(PlaceError::NoVolume),
            opened => opened.map_err(in_the_way)?,
        };
        for entry in Dir::read_from(&volumes)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if !name.starts_with('.') && is_ours(&volumes, name) {
                // The volume may be a mount of its own: mounts are crossed, links are not.
                return match beneath(&volumes, &format!("{name}/mount/{DIRECTORY_IN_VOLUME}"), OFlags::PATH) {
                    Err(Errno::NOENT) => Err(PlaceError::NoVolume),
                    opened => opened.map_err(in_the_way),
                };
            }
        }
        Err(PlaceError::NoVolume)
    }

    /// The inode of the socket that is there now.
    pub(crate) fn inode(&self, pod_uid: &str) -> Option<u64> {
        let directory = self.open(pod_uid).ok()?;
        Some(statat(&directory, SOCKET, AtFlags::SYMLINK_NOFOLLOW).ok()?.st_ino)
    }

    /// Makes the pod's socket, in place of one that an agent left behind, and listens. Also says its
    /// inode.
    pub(crate) fn listen(&self, pod_uid: &str) -> Result<(OwnedFd, u64), PlaceError> {
        let directory = self.open(pod_uid)?;
        match unlinkat(&directory, UNFINISHED, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) => return Err(obstructed(UNFINISHED, "a directory")),
            Err(error) => return Err(error.into()),
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // A socket's address has no room for the whole path, and nothing is to be looked up again.
        let path = format!("/proc/self/fd/{}/{UNFINISHED}", directory.as_raw_fd());
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        // For whatever user runs in the pod: who it is, its cgroup tells.
        let inode = open_to_all(&directory)?;
        listen(&socket, BACKLOG)?;
        // Whoever finds it finds somebody listening.
        renameat(&directory, UNFINISHED, &directory, SOCKET).map_err(|error| match error {
            Errno::ISDIR | Errno::NOTEMPTY | Errno::EXIST => obstructed(SOCKET, "a directory"),
            error => error.into(),
        })?;
        Ok((socket, inode))
    }
}

/// Lets everybody connect to the socket that was made just now; says its inode. Not by its name, under
/// which there might be a link by now.
fn open_to_all(directory: &OwnedFd) -> Result<u64, PlaceError> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(directory, UNFINISHED, flags, Mode::empty())?;
    let found = fstat(&file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(obstructed(UNFINISHED, "not the socket that was made there"));
    }
    chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), Mode::from_raw_mode(0o666))?;
    Ok(found.st_ino)
}

/// Opens a directory below another without following links.
fn beneath(directory: &OwnedFd, path: &str, how: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | how;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    openat2(directory, path, flags, Mode::empty(), resolve)
}

/// Whether the kubelet made this volume by the driver of the guard.
fn is_ours(volumes: &OwnedFd, name: &str) -> bool {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let opened = openat2(volumes, format!("{name}/{DESCRIPTION}"), flags, Mode::empty(), resolve);
    let Ok(file) = opened else { return false };
    let mut text = Vec::new();
    let read = File::from(file).take(DESCRIPTION_MOST).read_to_end(&mut text);
    read.is_ok()
        && serde_json::from_slice::<Description>(&text)
            .is_ok_and(|found| found.driver_name == names::GUARD_DRIVER)
}

fn in_the_way(error: Errno) -> PlaceError {
    match error {
        Errno::LOOP | Errno::XDEV => obstructed("the guard's volume", "a link"),
        Errno::NOTDIR => obstructed("the guard's volume", "not a directory"),
        error => error.into(),
    }
}

fn obstructed(what: &'static str, found: &'static str) -> PlaceError {
    PlaceError::Obstructed { what, found }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{FileTypeExt, PermissionsExt, symlink},
        path::Path,
    };

    use super::*;

    const UID: &str = "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10";

    /// A volume as the kubelet has it; the directory of its socket.
    fn volume(root: &Path, name: &str, driver: &str) -> PathBuf {
        let volume = root.join(format!("pods/{UID}/volumes/kubernetes.io~csi/{name}"));
        fs::create_dir_all(volume.join("mount")).unwrap();
        let description = format!(r#"{{"driverName":"{driver}","specVolID":"{name}"}}"#);
        fs::write(volume.join("vol_data.json"), description).unwrap();
        volume.join("mount/run")
    }

    #[test]
    fn everybody_in_the_pod_may_connect_and_an_older_socket_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let places = Places::new(root.path());
        assert!(matches!(places.listen(UID), Err(PlaceError::NoVolume)));
        let other = volume(root.path(), "a", "other.example.com");
        let run = volume(root.path(), "b", "guard.highwater.dev");
        assert!(matches!(places.listen(UID), Err(PlaceError::NoVolume)), "it is being made");
        fs::create_dir_all(&other).unwrap();
        fs::create_dir_all(&run).unwrap();
        let (_first, before) = places.listen(UID).unwrap();
        assert_eq!(places.inode(UID), Some(before));
        places.listen(UID).unwrap();
        assert_ne!(places.inode(UID), Some(before));
        let socket = fs::metadata(run.join(SOCKET)).unwrap();
        assert!(socket.file_type().is_socket());
        assert_eq!(socket.permissions().mode() & 0o777, 0o666);
        assert!(fs::read_dir(other).unwrap().next().is_none(), "another driver's volume is left alone");
    }

    #[test]
    fn no_link_is_followed_and_a_directory_in_the_way_is_told() {
        let root = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let places = Places::new(root.path());
        let run = volume(root.path(), "g", "guard.highwater.dev");
        symlink(elsewhere.path(), &run).unwrap();
        assert!(matches!(places.listen(UID), Err(PlaceError::Obstructed { .. })));
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
        fs::remove_file(&run).unwrap();
        fs::create_dir_all(run.join(SOCKET)).unwrap();
        assert!(matches!(places.listen(UID), Err(PlaceError::Obstructed { .. })));
        let directory = openat(CWD, elsewhere.path(), DIRECTORY, Mode::empty()).unwrap();
        let file = elsewhere.path().join("file");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        symlink(&file, elsewhere.path().join(UNFINISHED)).unwrap();
        assert!(matches!(open_to_all(&directory), Err(PlaceError::Obstructed { .. })));
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        for bad in ["", "..", "a/b", "a.b"] {
            assert!(matches!(places.listen(bad), Err(PlaceError::BadUid(_))), "{bad}");
        }
    }
}
