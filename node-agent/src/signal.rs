//! `Signal`: the pressure file in a volume of the pod that opted in.
//!
//! The volume belongs to the pod, which may put anything there: the file is written beneath the
//! volume's directory without following a link, and appears whole, by a rename.

use std::{
    io::{self, Write},
    path::PathBuf,
};

use highwater_crds::{
    Level,
    names::{SIGNAL_FILE, SIGNAL_VOLUME},
};
use jiff::Timestamp;
use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, fchmod, openat, openat2, renameat, unlinkat},
    io::Errno,
};
use serde::{Deserialize, Serialize};

/// The file while it is being written.
const UNFINISHED: &str = ".pressure.unfinished";

/// What the file says: one JSON object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Pressure {
    /// How high memory stands: `Normal` when the signal is over.
    pub(crate) level: Level,
    /// UUID of the device concerned.
    pub(crate) device: String,
    /// Bytes that the pod uses there, where the driver says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) used_bytes: Option<u64>,
    /// The pod's limit there, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limit_bytes: Option<u64>,
    /// How to size batches.
    pub(crate) batch_advice: BatchAdvice,
    /// After this time a stronger act may follow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) deadline: Option<Timestamp>,
    /// Until when the pod's readiness probe is to fail, in milliseconds since the epoch. Absent, or past: it is
    /// ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unready_until: Option<u64>,
    /// When this was written.
    pub(crate) at: Timestamp,
}

/// How a program is to size its batches: `min(base, max(minimum, base * numerator / denominator))`,
/// rounded down, where `base` is what it uses without pressure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct BatchAdvice {
    pub(crate) numerator: u32,
    /// At least 1.
    pub(crate) denominator: u32,
    pub(crate) minimum: u32,
}

impl BatchAdvice {
    /// The advice at a level.
    pub(crate) const fn at(level: Level) -> Self {
        let (numerator, denominator, minimum) = match level {
            Level::Normal => (1, 1, 1),
            Level::Warning => (7, 10, 2),
            Level::Critical | Level::Emergency => (1, 2, 1),
        };
        Self { numerator, denominator, minimum }
    }
}

/// Why the file could not be written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SignalError {
    /// The text cannot name a pod.
    #[error("{0:?} is not the UID of a pod")]
    BadUid(String),
    /// The pod has no volume for it, or it is gone.
    #[error("the pod has no emptyDir volume named {SIGNAL_VOLUME} on this node")]
    NoVolume,
    /// The pod put something there that is not to be followed or replaced.
    #[error("{what} is {found}: the pod must remove it")]
    Obstructed {
        /// What is in the way.
        what: &'static str,
        /// What kind of file it is.
        found: &'static str,
    },
    /// Anything else.
    #[error("writing the pressure file: {0}")]
    Io(#[from] io::Error),
}

/// Writes pressure files.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    kubelet_root: PathBuf,
}

impl Signals {
    /// For the pods of the kubelet whose directory is `kubelet_root` (`/var/lib/kubelet`).
    pub(crate) fn new(kubelet_root: impl Into<PathBuf>) -> Self {
        Self { kubelet_root: kubelet_root.into() }
    }

    /// Shows `pressure` to the pod. Blocks for as long as a small write takes.
    pub(crate) fn write(&self, pod_uid: &str, pressure: &Pressure) -> Result<(), SignalError> {
        let mut text = serde_json::to_vec(pressure).map_err(io::Error::from)?;
        text.push(b'\n');
        let volume = self.volume(pod_uid)?;
        let mut file = std::fs::File::from(create(&volume)?);
        let written = file
            .write_all(&text)
            .and_then(|()| Ok(fchmod(&file, Mode::from_raw_mode(0o644))?)) // whatever the umask
            .map_err(SignalError::from)
            .and_then(|()| publish(&volume));
        if written.is_err() {
            // Best effort: the next write replaces it in any case.
            let _ = unlinkat(&volume, UNFINISHED, AtFlags::empty());
        }
        written
    }

    /// The volume's directory. Below the kubelet's own directory no link is followed.
    fn volume(&self, pod_uid: &str) -> Result<OwnedFd, SignalError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if pod_uid.is_empty() || !pod_uid.chars().all(plain) {
            return Err(SignalError::BadUid(pod_uid.to_owned()));
        }
        let directory = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let root = openat(CWD, &self.kubelet_root, directory, Mode::empty()).map_err(io::Error::from)?;
        let path = format!("pods/{pod_uid}/volumes/kubernetes.io~empty-dir/{SIGNAL_VOLUME}");
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(&root, path, directory, Mode::empty(), beneath).map_err(|error| match error {
            Errno::NOENT => SignalError::NoVolume,
            Errno::LOOP | Errno::XDEV => obstructed("the volume's directory", "a link"),
            Errno::NOTDIR => obstructed("the volume's directory", "not a directory"),
            error => io::Error::from(error).into(),
        })
    }
}

/// Makes the unfinished file, in place of one that an agent left behind.
fn create(volume: &OwnedFd) -> Result<OwnedFd, SignalError> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let create = || openat(volume, UNFINISHED, flags, Mode::from_raw_mode(0o600));
    let created = match create() {
        Err(Errno::EXIST) => match unlinkat(volume, UNFINISHED, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => create(),
            Err(Errno::ISDIR) => return Err(obstructed(UNFINISHED, "a directory")),
            Err(error) => Err(error),
        },
        created => created,
    };
    created.map_err(|error| io::Error::from(error).into())
}

/// Gives the file its name. What stood there under that name, link or pipe, is replaced, not
/// followed.
fn publish(volume: &OwnedFd) -> Result<(), SignalError> {
    renameat(volume, UNFINISHED, volume, SIGNAL_FILE).map_err(|error| match error {
        Errno::ISDIR | Errno::NOTEMPTY | Errno::EXIST => obstructed(SIGNAL_FILE, "a directory"),
        error => io::Error::from(error).into(),
    })
}

fn obstructed(what: &'static str, found: &'static str) -> SignalError {
    SignalError::Obstructed { what, found }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use rustix::fs::{FileType, mknodat};

    use super::*;

    const UID: &str = "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10";

    struct Kubelet(tempfile::TempDir);

    impl Kubelet {
        fn with_volume() -> Self {
            let kubelet = Self(tempfile::tempdir().unwrap());
            fs::create_dir_all(kubelet.volume()).unwrap();
            kubelet
        }

        fn volume(&self) -> PathBuf {
            self.0.path().join(format!("kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/highwater"))
        }

        fn file(&self) -> PathBuf {
            self.volume().join("pressure")
        }

        /// A file outside the volume that no signal may touch.
        fn bystander(&self) -> PathBuf {
            let path = self.0.path().join("bystander");
            fs::write(&path, "untouched").unwrap();
            path
        }

        fn write(&self, level: Level) -> Result<(), SignalError> {
            Signals::new(self.0.path().join("kubelet")).write(UID, &pressure(level))
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.volume()).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        }
    }

    fn pressure(level: Level) -> Pressure {
        Pressure {
            level,
            device: "GPU-1".into(),
            used_bytes: Some(9 << 30),
            limit_bytes: Some(8 << 30),
            batch_advice: BatchAdvice::at(level),
            deadline: Some("2026-01-02T03:04:05Z".parse().unwrap()),
            unready_until: Some(1_767_323_045_000),
            at: "2026-01-02T03:04:00Z".parse().unwrap(),
        }
    }

    #[test]
    fn the_file_says_what_a_program_needs_and_everyone_may_read_it() {
        let kubelet = Kubelet::with_volume();
        kubelet.write(Level::Warning).unwrap();
        let text = fs::read_to_string(kubelet.file()).unwrap();
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&text).unwrap(),
            serde_json::json!({
                "level": "Warning",
                "device": "GPU-1",
                "usedBytes": 9_663_676_416_u64,
                "limitBytes": 8_589_934_592_u64,
                "batchAdvice": {"numerator": 7, "denominator": 10, "minimum": 2},
                "deadline": "2026-01-02T03:04:05Z",
                "unreadyUntil": 1_767_323_045_000_u64,
                "at": "2026-01-02T03:04:00Z",
            })
        );
        assert_eq!(fs::metadata(kubelet.file()).unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(kubelet.names(), ["pressure"]);
    }

    #[test]
    fn a_new_signal_replaces_the_old_one_whole() {
        let kubelet = Kubelet::with_volume();
        kubelet.write(Level::Critical).unwrap();
        let old = fs::File::open(kubelet.file()).unwrap();
        kubelet.write(Level::Normal).unwrap();
        let read = |file| serde_json::from_reader::<fs::File, Pressure>(file).unwrap();
        assert_eq!(read(old), pressure(Level::Critical));
        assert_eq!(read(fs::File::open(kubelet.file()).unwrap()), pressure(Level::Normal));
    }

    #[test]
    fn the_batch_advice_is_that_of_the_design() {
        let apply = |level, base: u32| {
            let BatchAdvice { numerator, denominator, minimum } = BatchAdvice::at(level);
            base.min(minimum.max(base * numerator / denominator))
        };
        for (level, sizes) in [
            (Level::Normal, [(1, 1), (2, 2), (64, 64)]),
            (Level::Warning, [(1, 1), (2, 2), (64, 44)]),
            (Level::Critical, [(1, 1), (2, 1), (64, 32)]),
            (Level::Emergency, [(1, 1), (2, 1), (64, 32)]),
        ] {
            for (base, advised) in sizes {
                assert_eq!(apply(level, base), advised, "{level:?} {base}");
            }
        }
    }

    #[test]
    fn a_pod_without_the_volume_is_not_signalled() {
        let kubelet = Kubelet(tempfile::tempdir().unwrap());
        fs::create_dir_all(kubelet.0.path().join("kubelet/pods")).unwrap();
        assert!(matches!(kubelet.write(Level::Warning), Err(SignalError::NoVolume)));
    }

    #[test]
    fn a_link_named_as_the_file_is_replaced_not_followed() {
        let kubelet = Kubelet::with_volume();
        let bystander = kubelet.bystander();
        symlink(&bystander, kubelet.file()).unwrap();
        symlink(&bystander, kubelet.volume().join(UNFINISHED)).unwrap();
        kubelet.write(Level::Warning).unwrap();
        assert!(fs::symlink_metadata(kubelet.file()).unwrap().is_file());
        assert_eq!(fs::read_to_string(bystander).unwrap(), "untouched");
        assert_eq!(kubelet.names(), ["pressure"]);
    }

    #[test]
    fn a_hard_link_named_as_the_file_is_replaced_not_written() {
        let kubelet = Kubelet::with_volume();
        let bystander = kubelet.bystander();
        fs::hard_link(&bystander, kubelet.file()).unwrap();
        fs::hard_link(&bystander, kubelet.volume().join(UNFINISHED)).unwrap();
        kubelet.write(Level::Warning).unwrap();
        assert_eq!(fs::read_to_string(&bystander).unwrap(), "untouched");
        assert_eq!(fs::metadata(bystander).unwrap().permissions().mode() & 0o777, 0o644);
    }

    #[test]
    fn a_volume_replaced_by_a_link_is_refused() {
        let kubelet = Kubelet::with_volume();
        let target = kubelet.0.path().join("target");
        fs::create_dir(&target).unwrap();
        for element in [kubelet.volume(), kubelet.volume().ancestors().nth(2).unwrap().to_owned()] {
            fs::rename(&element, kubelet.0.path().join("aside")).unwrap();
            symlink(&target, &element).unwrap();
            let error = kubelet.write(Level::Warning).unwrap_err();
            assert!(matches!(error, SignalError::Obstructed { found: "a link", .. }), "{error}");
            fs::remove_file(&element).unwrap();
            fs::rename(kubelet.0.path().join("aside"), &element).unwrap();
        }
        assert_eq!(fs::read_dir(target).unwrap().count(), 0);
    }

    #[test]
    fn a_pipe_does_not_block_the_agent() {
        let kubelet = Kubelet::with_volume();
        for path in [kubelet.file(), kubelet.volume().join(UNFINISHED)] {
            mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
        }
        kubelet.write(Level::Warning).unwrap();
        assert!(fs::symlink_metadata(kubelet.file()).unwrap().is_file());
    }

    #[test]
    fn a_directory_in_the_way_is_refused_and_nothing_is_left_behind() {
        let kubelet = Kubelet::with_volume();
        fs::create_dir_all(kubelet.file().join("full")).unwrap();
        let error = kubelet.write(Level::Warning).unwrap_err();
        assert!(matches!(error, SignalError::Obstructed { what: SIGNAL_FILE, .. }), "{error}");
        assert_eq!(kubelet.names(), ["pressure"]);

        let kubelet = Kubelet::with_volume();
        fs::create_dir(kubelet.volume().join(UNFINISHED)).unwrap();
        let error = kubelet.write(Level::Warning).unwrap_err();
        assert!(matches!(error, SignalError::Obstructed { what: UNFINISHED, .. }), "{error}");
    }

    #[test]
    fn a_uid_that_is_a_path_is_refused() {
        let kubelet = Kubelet::with_volume();
        let signals = Signals::new(kubelet.0.path().join("kubelet"));
        for uid in ["", ".", "..", "../pods/x", "a/b", "a\0b"] {
            let error = signals.write(uid, &pressure(Level::Warning)).unwrap_err();
            assert!(matches!(error, SignalError::BadUid(_)), "{uid:?} {error}");
        }
    }
}
