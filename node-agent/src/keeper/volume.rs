//! A guard's volume: a plain directory in the pod's own, which appears whole or not at all. What
//! lies there is the only record of it.

mod damage;
mod request;

use std::{
    ffi::CStr,
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use kubelet_api::csi::{NodePublishVolumeRequest, NodeUnpublishVolumeRequest};
use rustix::{
    fs::{AtFlags, Dir, FlockOperation, Mode, OFlags},
    io::Errno,
};
use tracing::warn;

use request::{Target, target, validate};

/// Directory in the pod at which the volume is mounted.
const MOUNTED_AT: &str = "/opt/highwater";
/// The guard.
const LIBRARY: &str = "libhighwater-guard.so";
/// What the loader reads, mounted at `/etc/ld.so.preload`.
const PRELOAD: &str = "ld.so.preload";
/// Version of the guard. A directory that has it was published whole.
const VERSION: &str = "version";
/// Where the agent puts the pod's socket.
const RUN: &str = "run";
/// What a readiness probe runs.
const READY: &str = "ready";
/// Everything.
const ENTRIES: [&str; 5] = [LIBRARY, PRELOAD, VERSION, RUN, READY];
/// Name of the volume's directory, given by the kubelet.
const MOUNT: &str = "mount";
/// Name while it is being filled or emptied.
const UNFINISHED: &str = ".highwater-unfinished";

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refusal {
    /// What kind of reason.
    pub(crate) kind: Kind,
    /// The reason, for people.
    pub(crate) message: String,
}

/// What kind of reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The request makes no sense, here or anywhere.
    Invalid,
    /// Not here, or not now.
    NotReady,
    /// There is no room.
    Full,
    /// The file system failed.
    Failed,
}

impl Refusal {
    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    fn invalid(message: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, message)
    }

    /// What failed, and what the kernel said of it.
    fn io(what: &str, error: &io::Error) -> Self {
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        if matches!(errno, Some(Errno::NOSPC | Errno::DQUOT)) {
            let why =
                "the disk of the kubelet's directory is full: the pod can start when there is room again";
            return Self::new(Kind::Full, format!("{what}: {why}"));
        }
        Self::new(Kind::Failed, format!("{what}: {error}"))
    }
}

/// A volume that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Published {
    /// Namespace and name of its pod.
    pub(crate) pod: String,
    /// Name of the volume.
    pub(crate) volume: String,
    /// Whether it was not there before.
    pub(crate) new: bool,
}

/// The volumes of a node.
#[derive(Debug)]
pub(crate) struct Volumes {
    root: PathBuf,
    library: Option<PathBuf>,
    ready: Option<PathBuf>,
    /// One at a time: two requests for one volume must not meet.
    busy: Mutex<()>,
}

impl Volumes {
    /// Volumes below the kubelet's directory, each with a copy of the library, and of the program for
    /// readiness probes.
    pub(crate) fn new(root: PathBuf, library: Option<PathBuf>, ready: Option<PathBuf>) -> Self {
        Self { root, library, ready, busy: Mutex::new(()) }
    }

    /// Makes a volume appear. One that is there stays as it is, whatever its version: the pod
    /// runs with it. One from which the loader could not take the guard is refused, so that nothing
    /// runs in the pod that believes to be guarded.
    pub(crate) fn publish(&self, request: &NodePublishVolumeRequest) -> Result<Published, Refusal> {
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let request = validate(request, &self.root)?;
        let mut published =
            Published { pod: request.pod.clone(), volume: request.target.volume.clone(), new: false };
        let parent = self.parent(&request.target)?.ok_or_else(|| {
            Refusal::new(Kind::NotReady, "the kubelet has not made the directory of the volume")
        })?;
        match contents(&parent, MOUNT)? {
            Contents::Whole => {
                return damage::of(&parent, MOUNT).map_or(Ok(published), |damage| Err(damage.refusal()));
            }
            Contents::Absent | Contents::Empty => {}
            Contents::Strange(name) => return Err(strange(&name)),
        }
        let library = self.open_library()?;
        clear(&parent)?;
        let filled = fill(&parent, library, self.open_ready(), &request.preload);
        if let Err(error) = filled.and_then(|()| rename(&parent, UNFINISHED, MOUNT)) {
            // The first error says what is wrong; what is left is cleared with the next request.
            let _ = clear(&parent);
            return Err(Refusal::io("cannot fill the volume", &error));
        }
        published.new = true;
        Ok(published)
    }

    /// Makes a volume disappear.
    pub(crate) fn unpublish(&self, request: &NodeUnpublishVolumeRequest) -> Result<(), Refusal> {
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let target = target(&request.target_path, &self.root)?;
        let Some(parent) = self.parent(&target)? else { return Ok(()) };
        clear(&parent)?;
        match contents(&parent, MOUNT)? {
            Contents::Absent => Ok(()),
            Contents::Whole | Contents::Empty => {
                let what = "cannot remove the volume";
                rename(&parent, MOUNT, UNFINISHED).map_err(|error| Refusal::io(what, &error))?;
                clear(&parent)
            }
            Contents::Strange(name) => Err(strange(&name)),
        }
    }

    /// The directory of the volume, without following a link below the kubelet's directory;
    /// `None` if it is not there. Locked against another keeper.
    fn parent(&self, target: &Target) -> Result<Option<OwnedFd>, Refusal> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |directory: Option<BorrowedFd<'_>>, name: &Path| match directory {
            None => rustix::fs::open(name, flags, Mode::empty()),
            Some(directory) => rustix::fs::openat(directory, name, flags | OFlags::NOFOLLOW, Mode::empty()),
        };
        let mut directory = open(None, &self.root)
            .map_err(|error| Refusal::io("cannot open the kubelet's directory", &error.into()))?;
        for name in target.directories() {
            directory = match open(Some(directory.as_fd()), Path::new(name)) {
                Ok(directory) => directory,
                Err(Errno::NOENT) => return Ok(None),
                Err(Errno::LOOP | Errno::NOTDIR) => {
                    let why = format!("{name:?} in the path of the volume is not a directory of its own");
                    return Err(Refusal::invalid(why));
                }
                Err(error) => {
                    return Err(Refusal::io("cannot open the directory of the volume", &error.into()));
                }
            };
        }
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(directory)),
            Err(Errno::WOULDBLOCK) => {
                Err(Refusal::new(Kind::NotReady, "another keeper works on this volume: try again"))
            }
            Err(error) => Err(Refusal::io("cannot lock the directory of the volume", &error.into())),
        }
    }

    /// Without it a volume is of use still: few pods run it.
    fn open_ready(&self) -> Option<File> {
        let path = self.ready.as_ref()?;
        let opened = File::open(path);
        opened
            .inspect_err(|error| warn!(%error, path = %path.display(), "volumes get no readiness helper"))
            .ok()
    }

    fn open_library(&self) -> Result<File, Refusal> {
        let refuse = |why: String| Refusal::new(Kind::NotReady, why);
        let path = self.library.as_ref();
        let path = path.ok_or_else(|| refuse("this keeper has no guard: set --guard-library".to_owned()))?;
        let failed = |error: io::Error| refuse(format!("cannot open the guard {}: {error}", path.display()));
        let mut file = File::open(path).map_err(failed)?;
        if !damage::is_library(&mut file).map_err(failed)? {
            return Err(refuse(format!(
                "the guard {} is no library: check the keeper's image",
                path.display()
            )));
        }
        Ok(file)
    }
}

fn strange(name: &str) -> Refusal {
    let why = format!("the directory of the volume has {name:?} in it, which this driver did not put there");
    Refusal::new(Kind::NotReady, why)
}

/// What is in a volume's directory.
enum Contents {
    /// There is none.
    Absent,
    /// Nothing.
    Empty,
    /// What is published.
    Whole,
    /// Something else.
    Strange(String),
}

fn contents(parent: &OwnedFd, name: &str) -> Result<Contents, Refusal> {
    let read = || {
        let Some(directory) = open_directory(parent, name)? else { return Ok(Contents::Absent) };
        let (mut whole, mut empty) = (false, true);
        for entry in entries(&directory)? {
            let known = ENTRIES.iter().find(|known| known.as_bytes() == entry.to_bytes());
            let Some(known) = known else {
                return Ok(Contents::Strange(entry.to_string_lossy().into_owned()));
            };
            whole |= *known == VERSION;
            empty = false;
        }
        Ok(match (whole, empty) {
            (true, _) => Contents::Whole,
            (false, true) => Contents::Empty,
            (false, false) => Contents::Strange(LIBRARY.to_owned()),
        })
    };
    read().map_err(|error: io::Error| Refusal::io("cannot read the directory of the volume", &error))
}

fn open_directory(parent: &OwnedFd, name: &str) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(parent, name, flags, Mode::empty()) {
        Ok(directory) => Ok(Some(directory)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Names in a directory but `.` and `..`.
fn entries(directory: &OwnedFd) -> io::Result<Vec<std::ffi::CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if name != c"." && name != c".." {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Fills a new directory, under the name that says that it is unfinished.
fn fill(parent: &OwnedFd, mut library: File, ready: Option<File>, preload: &[String]) -> io::Result<()> {
    let directory = make_directory(parent, UNFINISHED)?;
    let make = |name: &str, mode: u32| {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&directory, name, flags, Mode::from_raw_mode(0o600))?;
        // The umask has no say.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?;
        io::Result::Ok(File::from(file))
    };
    // A copy, so that an upgrade does not touch what a process has mapped.
    io::copy(&mut library, &mut make(LIBRARY, 0o555)?)?;
    if let Some(mut ready) = ready {
        io::copy(&mut ready, &mut make(READY, 0o555)?)?;
    }
    let mut lines = format!("{MOUNTED_AT}/{LIBRARY}\n");
    for line in preload {
        lines.push_str(line);
        lines.push('\n');
    }
    make(PRELOAD, 0o444)?.write_all(lines.as_bytes())?;
    make_directory(&directory, RUN)?;
    make(VERSION, 0o444)?.write_all(concat!(env!("CARGO_PKG_VERSION"), "\n").as_bytes())
}

fn make_directory(parent: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700))?;
    let made = open_directory(parent, name)?.ok_or(io::ErrorKind::NotFound)?;
    rustix::fs::fchmod(&made, Mode::from_raw_mode(0o755))?;
    Ok(made)
}

fn rename(parent: &OwnedFd, from: &str, to: &str) -> io::Result<()> {
    Ok(rustix::fs::renameat(parent, from, parent, to)?)
}

/// Removes the unfinished directory, if there is one.
fn clear(parent: &OwnedFd) -> Result<(), Refusal> {
    let clear = || {
        let Some(directory) = open_directory(parent, UNFINISHED)? else { return Ok(()) };
        for entry in entries(&directory)? {
            if entry.to_bytes() == RUN.as_bytes() {
                // Sockets of agents.
                if let Some(run) = open_directory(&directory, RUN)? {
                    for entry in entries(&run)? {
                        rustix::fs::unlinkat(&run, &entry, AtFlags::empty())?;
                    }
                }
                rustix::fs::unlinkat(&directory, &entry, AtFlags::REMOVEDIR)?;
            } else {
                rustix::fs::unlinkat(&directory, &entry, AtFlags::empty())?;
            }
        }
        io::Result::Ok(rustix::fs::unlinkat(parent, UNFINISHED, AtFlags::REMOVEDIR)?)
    };
    clear().map_err(|error| Refusal::io("cannot clear away an unfinished volume", &error))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::{
            fd::AsRawFd,
            unix::fs::{MetadataExt, PermissionsExt, symlink},
        },
    };

    use kubelet_api::csi::{
        EPHEMERAL, POD_NAME, POD_NAMESPACE, POD_UID, VolumeCapability,
        volume_capability::{AccessType, MountVolume},
    };

    use super::*;

    const UID: &str = "6b0f3c52-66f2-4a52-9f0e-0c1d2e3f4a5b";
    const OTHER: &str = "6b0f3c52-66f2-4a52-9f0e-0c1d2e3f4a5c";
    const OLD: &[u8] = b"\x7fELF library";
    const NEW: &[u8] = b"\x7fELF newer library, and longer";

    struct Node {
        root: tempfile::TempDir,
        volumes: Volumes,
    }

    impl Node {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let library = root.path().join("guard.so");
            fs::write(&library, OLD).unwrap();
            for pod in [UID, OTHER] {
                let directory = format!("pods/{pod}/volumes/kubernetes.io~csi/highwater-guard");
                fs::create_dir_all(root.path().join(directory)).unwrap();
            }
            let ready = root.path().join("ready");
            fs::write(&ready, b"program").unwrap();
            let volumes = Volumes::new(root.path().to_owned(), Some(library), Some(ready));
            Self { root, volumes }
        }

        fn target(&self) -> PathBuf {
            self.target_of(UID)
        }

        fn target_of(&self, pod: &str) -> PathBuf {
            self.root.path().join(format!("pods/{pod}/volumes/kubernetes.io~csi/highwater-guard/mount"))
        }

        fn request(&self) -> NodePublishVolumeRequest {
            self.request_of(UID)
        }

        fn request_of(&self, pod: &str) -> NodePublishVolumeRequest {
            let context = [
                (EPHEMERAL, "true"),
                (POD_UID, pod),
                (POD_NAME, "server"),
                (POD_NAMESPACE, "llm"),
                ("preload", "/usr/lib/libjemalloc.so:/opt/b.so\n"),
            ];
            NodePublishVolumeRequest {
                volume_id: "csi-1".into(),
                target_path: self.target_of(pod).to_str().unwrap().into(),
                readonly: true,
                volume_capability: Some(VolumeCapability {
                    access_type: Some(AccessType::Mount(MountVolume::default())),
                    access_mode: None,
                }),
                volume_context: context.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
                ..NodePublishVolumeRequest::default()
            }
        }

        fn unpublish(&self) -> Result<(), Refusal> {
            self.volumes.unpublish(&NodeUnpublishVolumeRequest {
                volume_id: "csi-1".into(),
                target_path: self.target().to_str().unwrap().into(),
            })
        }

        /// Names beside the volume.
        fn beside(&self) -> usize {
            fs::read_dir(self.target().parent().unwrap()).unwrap().count()
        }
    }

    #[test]
    fn a_volume_appears_whole_and_disappears_without_a_trace() {
        let node = Node::new();
        assert!(node.volumes.publish(&node.request()).unwrap().new);
        let target = node.target();
        let file = |name: &str| fs::metadata(target.join(name)).unwrap();
        let mode = |name: &str| file(name).permissions().mode() & 0o7777;
        assert_eq!(
            (mode(LIBRARY), mode(PRELOAD), mode(VERSION), mode(RUN), mode("")),
            (0o555, 0o444, 0o444, 0o755, 0o755)
        );
        assert_eq!(fs::read(target.join(LIBRARY)).unwrap(), OLD);
        assert_eq!((fs::read(target.join(READY)).unwrap(), mode(READY)), (b"program".to_vec(), 0o555));
        assert_eq!(
            fs::read_to_string(target.join(PRELOAD)).unwrap(),
            "/opt/highwater/libhighwater-guard.so\n/usr/lib/libjemalloc.so\n/opt/b.so\n"
        );
        // The agent's socket goes with it.
        // Its path is longer than one of a socket may be.
        let run = fs::File::open(target.join(RUN)).unwrap();
        let short = format!("/proc/self/fd/{}/agent.sock", run.as_raw_fd());
        std::os::unix::net::UnixListener::bind(short).unwrap();
        node.unpublish().unwrap();
        assert_eq!(node.beside(), 0);
        node.unpublish().unwrap();
        fs::remove_dir(target.parent().unwrap()).unwrap();
        node.unpublish().unwrap();
    }

    #[test]
    fn h12_a_newer_guard_leaves_what_running_pods_have_mapped_as_it_is() {
        let node = Node::new();
        node.volumes.publish(&node.request()).unwrap();
        let inode = |pod: &str| fs::metadata(node.target_of(pod).join(LIBRARY)).unwrap().ino();
        let had = inode(UID);
        // What is open stays, as what is mapped does.
        let mapped = File::open(node.target().join(LIBRARY)).unwrap();
        let read = || {
            let mut bytes = vec![0; NEW.len()];
            let length = rustix::io::pread(&mapped, &mut bytes, 0).unwrap();
            bytes.truncate(length);
            bytes
        };
        // The keeper's own copy is written over in place, and the next keeper has one of another name.
        let library = node.root.path().join("guard.so");
        assert_ne!(fs::metadata(&library).unwrap().ino(), had);
        fs::write(&library, NEW).unwrap();
        let moved = node.root.path().join("newer.so");
        fs::rename(&library, &moved).unwrap();
        let newer = Volumes::new(node.root.path().to_owned(), Some(moved), None);
        for _ in 0..2 {
            assert!(!newer.publish(&node.request()).unwrap().new);
            assert_eq!((inode(UID), read()), (had, OLD.to_vec()));
        }
        // A pod that comes now has the newer one, at a path and with a version of its own.
        assert!(newer.publish(&node.request_of(OTHER)).unwrap().new);
        assert_ne!(inode(OTHER), had);
        assert_eq!(fs::read(node.target_of(OTHER).join(LIBRARY)).unwrap(), NEW);
        let version = fs::read_to_string(node.target_of(OTHER).join(VERSION)).unwrap();
        assert_eq!(version.trim_end(), env!("CARGO_PKG_VERSION"));
        // Even one that takes the place of the volume of a pod whose processes linger.
        node.unpublish().unwrap();
        assert!(newer.publish(&node.request()).unwrap().new);
        assert_ne!(inode(UID), had);
        assert_eq!(read(), OLD);
    }

    #[test]
    fn b06_b07_what_the_loader_could_not_take_is_no_guard_and_the_pod_waits() {
        let node = Node::new();
        for library in [&b""[..], b"ELF", b"#!/bin/sh\n"] {
            fs::write(node.root.path().join("guard.so"), library).unwrap();
            let refusal = node.volumes.publish(&node.request()).unwrap_err();
            assert!(refusal.kind == Kind::NotReady && refusal.message.contains("guard.so"), "{refusal}");
            assert_eq!(node.beside(), 0);
        }
    }

    #[test]
    fn b06_a_volume_that_became_unreadable_is_refused_and_said_to_be_and_made_anew_for_the_next_pod() {
        let node = Node::new();
        let change = |name: &str, mode: u32| {
            fs::set_permissions(node.target().join(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        let replace = |name: &str, text: &str| {
            let path = node.target().join(name);
            fs::remove_file(&path).unwrap();
            fs::write(&path, text).unwrap();
        };
        let damages: [(&str, &dyn Fn()); 8] = [
            (PRELOAD, &|| change(PRELOAD, 0o400)),
            (PRELOAD, &|| replace(PRELOAD, "")),
            (PRELOAD, &|| replace(PRELOAD, "/opt/b.so\n")),
            (PRELOAD, &|| fs::remove_file(node.target().join(PRELOAD)).unwrap()),
            (LIBRARY, &|| change(LIBRARY, 0o500)),
            (LIBRARY, &|| replace(LIBRARY, "")),
            (LIBRARY, &|| fs::remove_file(node.target().join(LIBRARY)).unwrap()),
            (MOUNT, &|| change("", 0o700)),
        ];
        for (index, (name, damage)) in damages.iter().enumerate() {
            assert!(node.volumes.publish(&node.request()).unwrap().new, "{index}");
            assert!(!node.volumes.publish(&node.request()).unwrap().new, "{index}");
            damage();
            for _ in 0..2 {
                let refusal = node.volumes.publish(&node.request()).unwrap_err();
                assert_eq!(refusal.kind, Kind::NotReady, "{index}");
                assert!(
                    refusal.message.contains(name) && refusal.message.contains("delete the pod"),
                    "{refusal}"
                );
            }
            node.unpublish().unwrap();
            assert_eq!(node.beside(), 0, "{index}");
        }
    }

    #[test]
    fn what_a_dead_keeper_left_unfinished_is_cleared_away() {
        let node = Node::new();
        let unfinished = node.target().with_file_name(UNFINISHED);
        fs::create_dir_all(unfinished.join(RUN)).unwrap();
        fs::write(unfinished.join(LIBRARY), b"half").unwrap();
        assert!(node.volumes.publish(&node.request()).unwrap().new);
        assert_eq!(node.beside(), 1);
        fs::create_dir_all(&unfinished).unwrap();
        node.unpublish().unwrap();
        assert_eq!(node.beside(), 0);
        // The kubelet may have made the directory.
        fs::create_dir(node.target()).unwrap();
        assert!(node.volumes.publish(&node.request()).unwrap().new);
    }

    #[test]
    fn what_others_put_there_is_neither_used_nor_removed() {
        let node = Node::new();
        let check = |node: &Node| {
            assert_eq!(node.volumes.publish(&node.request()).unwrap_err().kind, Kind::NotReady);
            assert_eq!(node.unpublish().unwrap_err().kind, Kind::NotReady);
        };
        fs::create_dir(node.target()).unwrap();
        fs::write(node.target().join("data"), b"precious").unwrap();
        check(&node);
        assert_eq!(fs::read(node.target().join("data")).unwrap(), b"precious");
        // A library without the version that is written last is no volume of ours.
        fs::rename(node.target().join("data"), node.target().join(LIBRARY)).unwrap();
        check(&node);
    }

    #[test]
    fn links_are_not_followed() {
        let node = Node::new();
        let elsewhere = tempfile::tempdir().unwrap();
        let parent = node.target().parent().unwrap().to_owned();
        symlink(elsewhere.path(), node.target()).unwrap();
        assert!(node.volumes.publish(&node.request()).is_err());
        assert!(node.unpublish().is_err());
        fs::remove_file(node.target()).unwrap();
        fs::remove_dir(&parent).unwrap();
        symlink(elsewhere.path(), &parent).unwrap();
        assert_eq!(node.volumes.publish(&node.request()).unwrap_err().kind, Kind::Invalid);
        assert_eq!(node.unpublish().unwrap_err().kind, Kind::Invalid);
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    }

    #[test]
    fn without_a_guard_or_a_directory_the_pod_waits() {
        let node = Node::new();
        let request = node.request();
        let bare = Volumes::new(node.root.path().to_owned(), None, None);
        assert_eq!(bare.publish(&request).unwrap_err().kind, Kind::NotReady);
        fs::remove_file(node.root.path().join("guard.so")).unwrap();
        let refusal = node.volumes.publish(&request).unwrap_err();
        assert!(refusal.kind == Kind::NotReady && refusal.message.contains("guard.so"), "{refusal}");
        assert_eq!(node.beside(), 0);
        fs::write(node.root.path().join("guard.so"), OLD).unwrap();
        fs::remove_dir(node.target().parent().unwrap()).unwrap();
        assert_eq!(node.volumes.publish(&request).unwrap_err().kind, Kind::NotReady);
    }

    #[test]
    fn without_a_readiness_helper_the_rest_is_there() {
        let node = Node::new();
        fs::remove_file(node.root.path().join("ready")).unwrap();
        assert!(node.volumes.publish(&node.request()).unwrap().new);
        assert!(!node.target().join(READY).exists() && node.target().join(LIBRARY).exists());
        node.unpublish().unwrap();
        assert_eq!(node.beside(), 0);
    }

    #[test]
    fn a_failure_in_the_middle_leaves_nothing() {
        let refusal = Refusal::io("x", &io::Error::from_raw_os_error(Errno::NOSPC.raw_os_error()));
        assert_eq!(refusal.kind, Kind::Full);
        assert_eq!(
            Refusal::io("x", &io::Error::from_raw_os_error(Errno::DQUOT.raw_os_error())).kind,
            Kind::Full
        );
        assert_eq!(Refusal::io("x", &io::ErrorKind::NotFound.into()).kind, Kind::Failed);
        let node = Node::new();
        let request = node.request();
        // A program that cannot be read stands for any failure in the middle.
        let (library, unreadable) = (node.root.path().join("guard.so"), PathBuf::from("/proc/self/mem"));
        let broken = Volumes::new(node.root.path().to_owned(), Some(library), Some(unreadable));
        assert_eq!(broken.publish(&request).unwrap_err().kind, Kind::Failed);
        assert_eq!(node.beside(), 0);
    }
}
