//! What is parked, in a file beside the keeper's socket: a keeper that starts finds there what the one
//! before it had begun. The folder is a tmpfs, so the file ends with the machine, as the processes do.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use crate::keeper_protocol::{ParkState, Process};

/// Name of the file.
const NAME: &str = "parks.json";
/// Version of its form.
const VERSION: u32 = 1;

/// A park.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Entry {
    /// UID of the pod.
    pub(crate) pod: String,
    /// UUID of the device.
    pub(crate) device: String,
    /// The pod's processes.
    pub(crate) processes: Vec<Process>,
    /// What they have, as the agent said.
    pub(crate) bytes: u64,
    /// When it was asked for, in milliseconds since the epoch.
    pub(crate) since: u64,
    /// How long each process may take to be locked.
    pub(crate) lock_milliseconds: u32,
    /// How far it is.
    pub(crate) state: ParkState,
    /// The PID namespace in which the processes have these numbers.
    pub(crate) namespace: String,
    /// Why it is not further.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Text<E> {
    version: u32,
    parks: E,
}

/// The file.
#[derive(Debug)]
pub(crate) struct Journal {
    directory: PathBuf,
}

impl Journal {
    /// The journal in a directory.
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// What is in it. A file that cannot be read is put aside, since what it says may still tell
    /// somebody whom to restart.
    pub(crate) fn read(&self) -> io::Result<Vec<Entry>> {
        let path = self.directory.join(NAME);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        match serde_json::from_slice::<Text<Vec<Entry>>>(&text) {
            Ok(Text { version: VERSION, parks }) => Ok(parks),
            Ok(Text { version, .. }) => self.aside(&format!("it is of version {version}")),
            Err(error) => self.aside(&error.to_string()),
        }
    }

    fn aside(&self, why: &str) -> io::Result<Vec<Entry>> {
        let unread = self.directory.join("parks.json.unread");
        fs::rename(self.directory.join(NAME), &unread)?;
        Err(io::Error::other(format!("{why}; it is now {}", unread.display())))
    }

    /// Replaces it in one step.
    pub(crate) fn write(&self, entries: &[&Entry]) -> io::Result<()> {
        let path = self.directory.join(NAME);
        if entries.is_empty() {
            return match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        let text = serde_json::to_vec(&Text { version: VERSION, parks: entries })?;
        let new = self.directory.join("parks.json.new");
        let mut file: File =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        fs::rename(new, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        Entry {
            pod: "p".into(),
            device: "GPU-1".into(),
            processes: vec![Process { pid: 5, started: 6 }],
            bytes: 7,
            since: 8,
            lock_milliseconds: 9,
            state: ParkState::Parked,
            namespace: "pid:[1]".into(),
            message: None,
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::new(directory.path().to_owned());
        assert_eq!(journal.read().unwrap(), []);
        journal.write(&[&entry()]).unwrap();
        assert_eq!(journal.read().unwrap(), [entry()]);
        // A write that was cut off changes nothing.
        fs::write(directory.path().join("parks.json.new"), "{").unwrap();
        assert_eq!(journal.read().unwrap(), [entry()]);
        journal.write(&[]).unwrap();
        journal.write(&[]).unwrap();
        assert_eq!(journal.read().unwrap(), []);
        assert!(!directory.path().join(NAME).exists());
    }

    #[test]
    fn what_cannot_be_read_is_put_aside() {
        for garbage in ["", "{", "{\"version\":1}", "{\"version\":9,\"parks\":[]}", "\0\0"] {
            let directory = tempfile::tempdir().unwrap();
            let journal = Journal::new(directory.path().to_owned());
            fs::write(directory.path().join(NAME), garbage).unwrap();
            assert!(journal.read().unwrap_err().to_string().contains("parks.json.unread"), "{garbage}");
            assert_eq!(journal.read().unwrap(), [], "{garbage}");
        }
    }
}
