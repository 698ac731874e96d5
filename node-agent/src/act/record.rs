//! What was begun about processes, written down before it is begun: a later agent goes on with it, and
//! never ends the processes that the kubelet started in their place.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::restart::Main;
use crate::replace::replace;

/// The file, by the UID of the incident.
#[derive(Debug)]
pub(crate) struct Record {
    path: PathBuf,
    boot: String,
    begun: BTreeMap<String, Vec<Main>>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content {
    /// PIDs and start times say something within one boot.
    boot: String,
    begun: BTreeMap<String, Vec<Main>>,
}

impl Record {
    /// Reads the file in the state directory. What is of another boot, or cannot be read, is no more.
    pub(crate) fn open(state_dir: &Path, proc_root: &Path) -> Self {
        let path = state_dir.join("restarts.json");
        let boot = fs::read_to_string(proc_root.join("sys/kernel/random/boot_id")).unwrap_or_default();
        let content = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).unwrap_or_else(|error| {
                warn!(%error, path = %path.display(), "what an earlier agent had begun is not known");
                Content::default()
            }),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    warn!(%error, path = %path.display(), "what an earlier agent had begun cannot be read");
                }
                Content::default()
            }
        };
        let begun = if content.boot == boot && !boot.is_empty() { content.begun } else { BTreeMap::new() };
        Self { path, boot, begun }
    }

    /// What was begun for an incident.
    pub(crate) fn get(&self, incident: &str) -> Option<&[Main]> {
        self.begun.get(incident).map(Vec::as_slice)
    }

    /// Writes down what is about to begin. Once this returns it outlives the agent.
    ///
    /// # Errors
    /// Fails when the file cannot be written. Then nothing may begin.
    pub(crate) fn begin(&mut self, incident: &Arc<str>, mains: Vec<Main>) -> io::Result<()> {
        self.begun.insert(incident.to_string(), mains);
        self.write().inspect_err(|_| drop(self.begun.remove(&**incident)))
    }

    /// Forgets incidents that are no more. A file that cannot be written keeps them, which does no harm.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        let before = self.begun.len();
        self.begun.retain(|incident, _| is_there(incident));
        if before != self.begun.len()
            && let Err(error) = self.write()
        {
            warn!(%error, "restarts that are over cannot be forgotten");
        }
    }

    fn write(&self) -> io::Result<()> {
        let content = Content { boot: self.boot.clone(), begun: self.begun.clone() };
        let text = serde_json::to_vec(&content)?;
        replace(&self.path, |file| file.write_all(&text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proc_of(boot: &str) -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        let directory = proc.path().join("sys/kernel/random");
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("boot_id"), boot).unwrap();
        proc
    }

    #[test]
    fn what_was_begun_outlives_the_agent_but_not_the_boot_nor_the_incident() {
        let state = tempfile::tempdir().unwrap();
        let (first, second) = (proc_of("one"), proc_of("two"));
        let mains = vec![Main { pid: 1, started: 2, container: "c".into() }];
        let mut record = Record::open(state.path(), first.path());
        record.begin(&"incident".into(), mains.clone()).unwrap();
        let mut later = Record::open(state.path(), first.path());
        assert_eq!(later.get("incident"), Some(&*mains));
        assert_eq!(Record::open(state.path(), second.path()).get("incident"), None);
        later.retain(|_| false);
        assert_eq!(Record::open(state.path(), first.path()).get("incident"), None);
    }

    #[test]
    fn what_cannot_be_written_down_has_not_begun() {
        let state = tempfile::tempdir().unwrap();
        let mut record = Record::open(&state.path().join("missing"), proc_of("one").path());
        assert!(record.begin(&"incident".into(), Vec::new()).is_err());
        assert_eq!(record.get("incident"), None);
    }
}
