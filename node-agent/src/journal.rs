//! The file of grants: written before bytes are given out, so that a later agent gives nobody less, and
//! nobody more, than this one did.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use highwater_policy::pool::journal::{Entry, Journal};
use tracing::{info, warn};

use crate::replace::replace;

/// The file.
#[derive(Debug)]
pub(crate) struct Grants {
    path: PathBuf,
    boot: String,
    /// What is in it, as far as this agent knows.
    written: Journal,
}

impl Grants {
    /// Reads the file in the state directory. Of another boot nothing counts.
    pub(crate) fn open(state_dir: &Path, proc_root: &Path) -> Self {
        let path = state_dir.join("grants.json");
        let boot = fs::read_to_string(proc_root.join("sys/kernel/random/boot_id")).unwrap_or_default();
        let boot = match boot.trim() {
            // Then nothing is known to be of this boot: what this agent writes is for itself alone.
            "" => format!("unknown, agent {} of {}", std::process::id(), jiff::Timestamp::now()),
            boot => boot.to_owned(),
        };
        let written = match fs::read_to_string(&path) {
            Ok(text) => Journal::parse(&text, &boot).unwrap_or_else(|error| {
                warn!(%error, path = %path.display(), "the grants of an earlier agent are not known");
                Journal::new(boot.clone(), Vec::new())
            }),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    warn!(%error, path = %path.display(), "the grants of an earlier agent cannot be read");
                }
                Journal::new(boot.clone(), Vec::new())
            }
        };
        if !written.devices().is_empty() {
            info!(devices = written.devices().len(), "going on with the grants of an earlier agent");
        }
        Self { path, boot, written }
    }

    /// What was written last of a device.
    pub(crate) fn device(&self, uuid: &str) -> Option<&Entry> {
        self.written.device(uuid)
    }

    /// What was written last of all devices.
    pub(crate) fn devices(&self) -> &[Entry] {
        self.written.devices()
    }

    /// Writes the grants of all devices. Once this returns they outlive the agent.
    ///
    /// # Errors
    /// Fails when the file cannot be written; what was there before stands.
    pub(crate) fn write(&mut self, devices: Vec<Entry>) -> io::Result<()> {
        let journal = Journal::new(self.boot.clone(), devices);
        if journal == self.written && self.path.exists() {
            return Ok(());
        }
        let text = journal.to_text().map_err(io::Error::other)?;
        replace(&self.path, |file| file.write_all(text.as_bytes()))?;
        self.written = journal;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use highwater_policy::pool::{Kind, journal::Held};

    use super::*;

    fn entry(granted: u64) -> Entry {
        let grants = vec![Held { pod: "p".into(), kind: Kind::Elastic, granted }];
        Entry { device: "GPU-1".to_owned(), grants, ..Entry::default() }
    }

    fn proc_of(boot: &str) -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        let directory = proc.path().join("sys/kernel/random");
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("boot_id"), format!("{boot}\n")).unwrap();
        proc
    }

    #[test]
    fn grants_outlive_the_agent_but_not_the_boot() {
        let state = tempfile::tempdir().unwrap();
        let (first, second) = (proc_of("one"), proc_of("two"));
        let mut grants = Grants::open(state.path(), first.path());
        assert!(grants.device("GPU-1").is_none());
        grants.write(vec![entry(7)]).unwrap();
        let again = Grants::open(state.path(), first.path());
        assert_eq!(again.device("GPU-1"), Some(&entry(7)));
        assert!(Grants::open(state.path(), second.path()).devices().is_empty());
    }

    #[test]
    fn what_cannot_be_written_leaves_what_was_there() {
        let state = tempfile::tempdir().unwrap();
        let proc = proc_of("one");
        let mut grants = Grants::open(state.path(), proc.path());
        grants.write(vec![entry(7)]).unwrap();
        // A directory in the way of the unfinished file: whoever writes, it fails.
        fs::create_dir(state.path().join("grants.unfinished")).unwrap();
        assert!(grants.write(vec![entry(8)]).is_err());
        assert_eq!(grants.device("GPU-1"), Some(&entry(7)));
        assert_eq!(Grants::open(state.path(), proc.path()).device("GPU-1"), Some(&entry(7)));
    }

    #[test]
    fn where_the_boot_cannot_be_told_nothing_is_taken_for_this_one() {
        let (state, proc) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut grants = Grants::open(state.path(), proc.path());
        grants.write(vec![entry(7)]).unwrap();
        assert_eq!(grants.device("GPU-1"), Some(&entry(7)));
        assert!(Grants::open(state.path(), proc.path()).devices().is_empty());
    }

    #[test]
    fn a_file_that_makes_no_sense_is_begun_anew() {
        let state = tempfile::tempdir().unwrap();
        let proc = proc_of("one");
        fs::write(state.path().join("grants.json"), "{").unwrap();
        let mut grants = Grants::open(state.path(), proc.path());
        assert!(grants.devices().is_empty());
        grants.write(vec![entry(1)]).unwrap();
        assert_eq!(Grants::open(state.path(), proc.path()).devices().len(), 1);
    }
}
