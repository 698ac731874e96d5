//! Whether the loader of a pod's programs can take the guard from a volume. Where it cannot, it says so
//! on standard error and goes on without: nobody else would notice.

use std::{
    fs::File,
    io::{self, Read, Seek},
    os::fd::OwnedFd,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags},
    io::Errno,
};

use super::{Kind, LIBRARY, MOUNT, MOUNTED_AT, PRELOAD, Refusal, open_directory};

/// What libraries begin with.
const MAGIC: [u8; 4] = *b"\x7fELF";
/// What every user must have of a directory and of a file.
const SEARCHABLE: u32 = 0o555;
const READABLE: u32 = 0o444;

/// What is wrong with a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Damage {
    what: String,
}

impl Damage {
    fn new(name: &str, what: &str) -> Self {
        Self { what: format!("{name} {what}") }
    }

    fn io(name: &str, error: Errno) -> Self {
        match error {
            Errno::NOENT => Self::new(name, "is gone"),
            error => Self::new(name, &format!("cannot be read: {error}")),
        }
    }

    /// What the kubelet is told, which shows it at the pod.
    pub(super) fn refusal(&self) -> Refusal {
        let why = format!(
            "programs would run without the guard, since of the volume {}: delete the pod, and the next \
             one gets a new volume",
            self.what
        );
        Refusal::new(Kind::NotReady, why)
    }
}

/// Whether a file begins as a library does. It is at its beginning afterwards.
pub(super) fn is_library(file: &mut File) -> io::Result<bool> {
    let mut head = Vec::new();
    file.by_ref().take(4).read_to_end(&mut head)?;
    file.rewind()?;
    Ok(head == MAGIC)
}

/// What is wrong with the volume of that name.
pub(super) fn of(parent: &OwnedFd, name: &str) -> Option<Damage> {
    find(parent, name).err()
}

fn find(parent: &OwnedFd, name: &str) -> Result<(), Damage> {
    let directory = match open_directory(parent, name) {
        Ok(Some(directory)) => directory,
        Ok(None) => return Err(Damage::new(MOUNT, "is gone")),
        Err(error) => return Err(Damage::new(MOUNT, &format!("cannot be opened: {error}"))),
    };
    let stat = rustix::fs::fstat(&directory).map_err(|error| Damage::io(MOUNT, error))?;
    if stat.st_mode & SEARCHABLE != SEARCHABLE {
        return Err(Damage::new(MOUNT, "is closed to some users"));
    }
    if !is_library(&mut readable(&directory, LIBRARY)?).unwrap_or(false) {
        return Err(Damage::new(LIBRARY, "is no library"));
    }
    let mut lines = String::new();
    let read = readable(&directory, PRELOAD)?.read_to_string(&mut lines);
    if read.is_err() || lines.lines().next() != Some(format!("{MOUNTED_AT}/{LIBRARY}").as_str()) {
        return Err(Damage::new(PRELOAD, "does not name the guard"));
    }
    Ok(())
}

/// A file that every user can read.
fn readable(directory: &OwnedFd, name: &str) -> Result<File, Damage> {
    let failed = |error| Damage::io(name, error);
    let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_mode & READABLE != READABLE {
        return Err(Damage::new(name, "cannot be read by every user"));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::empty()).map(File::from).map_err(failed)
}
