//! The directory that keepers and agent share, and the sockets in it: who listens there, and who
//! may.
//!
//! Two keepers meet in it while one takes over from the other. `start.lock` lets one of them
//! start at a time; `keeper.lock` belongs to the one that holds memory, for as long as it does;
//! `keeper.sock` is replaced in one step, so that there is no moment without a keeper behind it.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io,
    os::unix::{
        fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
        net,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, flock},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};
use tokio::net::UnixListener;

use crate::keeper_protocol::Socket;

/// How many connections may wait to be taken.
const BACKLOG: i32 = 64;

/// The directory.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    directory: PathBuf,
}

impl Place {
    /// Makes the directory if it is not there.
    pub(crate) fn new(directory: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        Ok(Self { directory: directory.to_owned() })
    }

    /// Path of the keeper's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("keeper.sock")
    }

    /// The lock of the keeper that is starting, if nobody has it.
    pub(crate) fn try_start_lock(&self) -> io::Result<Option<Lock>> {
        Lock::try_take(&self.directory.join("start.lock"))
    }

    /// The lock of the keeper that holds memory, if nobody has it.
    pub(crate) fn try_holder_lock(&self) -> io::Result<Option<Lock>> {
        Lock::try_take(&self.directory.join("keeper.lock"))
    }
}

/// A lock that the kernel gives back when its holder ends, however it ends.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "it is the open file that holds the lock")] File);

impl Lock {
    fn try_take(path: &Path) -> io::Result<Option<Self>> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self(file))),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// A name in a directory that a socket of ours has.
#[derive(Debug)]
pub(crate) struct Name {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl Name {
    /// Binds a socket by `bind` and gives it the name `path`, in place of whatever had it.
    pub(crate) fn take<S>(path: &Path, bind: impl FnOnce(&Path) -> io::Result<S>) -> io::Result<(S, Self)> {
        // Hidden, so that whoever watches the directory overlooks it.
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}", std::process::id()));
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = bind(&temporary)?;
        let named = (|| {
            fs::set_permissions(&temporary, Permissions::from_mode(0o600))?;
            let file = fs::symlink_metadata(&temporary)?;
            fs::rename(&temporary, path)?;
            Ok(Self { path: path.to_owned(), identity: (file.dev(), file.ino()) })
        })();
        if named.is_err() {
            // Of no use, and in nobody's way.
            let _ = fs::remove_file(&temporary);
        }
        named.map(|name| (socket, name))
    }

    /// Whether the socket still has the name.
    pub(crate) fn holds(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.identity)
    }

    /// The path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// A listening socket of the protocol.
#[derive(Debug)]
pub(crate) struct Listener(UnixListener);

impl Listener {
    /// Listens at a path.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        Self::bind(&SocketAddrUnix::new(path)?)
    }

    /// Listens at an address.
    pub(crate) fn bind(address: &SocketAddrUnix) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&socket, address)?;
        listen(&socket, BACKLOG)?;
        UnixListener::from_std(net::UnixListener::from(socket)).map(Self)
    }

    /// Waits for a connection.
    pub(crate) async fn accept(&self) -> io::Result<Socket> {
        Ok(self.0.accept().await?.0.into())
    }
}

/// Whether a process of this user may use the keeper: root, or the keeper's own user.
pub(crate) fn is_trusted(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_passes_from_one_socket_to_the_next_without_a_gap() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keeper.sock");
        let (first, first_name) = Name::take(&path, Listener::at).unwrap();
        assert!(first_name.holds());
        let old = Socket::connect(&path).unwrap();
        first.accept().await.unwrap();
        let (second, second_name) = Name::take(&path, Listener::at).unwrap();
        assert!(!first_name.holds() && second_name.holds());
        let new = Socket::connect(&path).unwrap();
        second.accept().await.unwrap();
        assert_eq!(
            (old.peer().unwrap().0, new.peer().unwrap().0),
            (rustix::process::getuid().as_raw(), rustix::process::getuid().as_raw())
        );
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_lock_is_free_when_its_holder_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let place = Place::new(&directory.path().join("new")).unwrap();
        let held = place.try_holder_lock().unwrap();
        assert!(held.is_some());
        assert!(place.try_holder_lock().unwrap().is_none());
        assert!(place.try_start_lock().unwrap().is_some());
        drop(held);
        assert!(place.try_holder_lock().unwrap().is_some());
    }
}
