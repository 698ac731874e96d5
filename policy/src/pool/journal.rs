//! What is written down before bytes are given out, so that neither a crash of the agent nor one
//! of the keeper loses or doubles a grant.
//!
//! A grant is a level, not a step: reading it twice gives it once. The bytes behind it are worked
//! out anew from what the driver and the keeper say, never from the journal.

use serde::{Deserialize, Serialize};

use crate::pool::grant::Kind;

/// Format of the journal.
const VERSION: u32 = 1;

/// The grants of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    version: u32,
    /// The boot of the machine that it was written in: with another one nothing of it is left.
    boot: String,
    devices: Vec<Entry>,
}

/// The grants of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// UUID of the device.
    pub device: String,
    /// Share of the device that the policy asked for, in percent.
    pub size_percent: u32,
    /// Share that the pool had come to by adapting, in parts per million.
    pub share: u32,
    /// What each pod may have.
    pub grants: Vec<Held>,
}

/// What a pod may have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// UID of the pod.
    pub pod: String,
    /// How it is granted.
    pub kind: Kind,
    /// In bytes, in total.
    pub granted: u64,
}

/// Why a journal cannot be used. The grants of guarded pods are then asked for anew, those of
/// others are given again from the pods that are bound.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// It is not JSON of the expected shape.
    #[error("the journal of grants cannot be read ({0}); it is begun anew")]
    Malformed(#[from] serde_json::Error),
    /// A later version wrote it.
    #[error("the journal of grants has format {0}, which a later version wrote; it is begun anew")]
    Later(u32),
}

impl Journal {
    /// The journal of a boot.
    pub fn new(boot: impl Into<String>, devices: Vec<Entry>) -> Self {
        Self { version: VERSION, boot: boot.into(), devices }
    }

    /// Reads a journal. One of another boot than `boot` is empty.
    pub fn parse(text: &str, boot: &str) -> Result<Self, JournalError> {
        let journal: Self = serde_json::from_str(text)?;
        if journal.version > VERSION {
            return Err(JournalError::Later(journal.version));
        }
        Ok(if journal.boot == boot { journal } else { Self::new(boot, Vec::new()) })
    }

    /// The text to write.
    pub fn to_text(&self) -> Result<String, JournalError> {
        Ok(serde_json::to_string(self)?)
    }

    /// The grants of a device.
    pub fn device(&self, uuid: &str) -> Option<&Entry> {
        self.devices.iter().find(|entry| entry.device == uuid)
    }

    /// The grants of all devices.
    pub fn devices(&self) -> &[Entry] {
        &self.devices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal() -> Journal {
        let grants = vec![Held { pod: "p".to_owned(), kind: Kind::Elastic, granted: 7 }];
        let entry = Entry { device: "GPU-1".to_owned(), size_percent: 60, share: 600_000, grants };
        Journal::new("boot-1", vec![entry])
    }

    #[test]
    fn what_is_written_is_read_again() {
        let text = journal().to_text().unwrap();
        let read = Journal::parse(&text, "boot-1").unwrap();
        assert_eq!(read, journal());
        assert_eq!(read.device("GPU-1").map(|entry| entry.grants.len()), Some(1));
        assert_eq!(read.device("GPU-2"), None);
    }

    #[test]
    fn grants_do_not_outlive_the_boot() {
        let text = journal().to_text().unwrap();
        assert!(Journal::parse(&text, "boot-2").unwrap().devices().is_empty());
    }

    #[test]
    fn half_a_journal_is_none() {
        let text = journal().to_text().unwrap();
        for end in 0..text.len() {
            assert!(matches!(Journal::parse(&text[..end], "boot-1"), Err(JournalError::Malformed(_))));
        }
        let later = text.replace("\"version\":1", "\"version\":2");
        assert!(matches!(Journal::parse(&later, "boot-1"), Err(JournalError::Later(2))));
    }
}
