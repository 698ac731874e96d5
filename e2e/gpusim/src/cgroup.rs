//! Cgroups of this machine: where a process is, and whether one is there.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::config::{Config, MemoryLimits};
use crate::driver::Cgroup;
use crate::protocol::Failure;

/// Where Linux shows its cgroups.
const ROOT: &str = "/sys/fs/cgroup";
/// The controller whose paths stand for a cgroup under version 1.
const CONTROLLER: &str = "memory";

/// The hierarchy whose paths name cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    root: PathBuf,
    /// Of version 1 by this controller, else of version 2.
    controller: Option<&'static str>,
}

impl Hierarchy {
    /// The hierarchy by which the configured driver limits memory.
    ///
    /// # Errors
    /// [`Failure::NoSuchFunction`] where the driver is too old, [`Failure::NotSupported`] where
    /// the machine's cgroups are.
    pub fn of(config: &Config) -> Result<Self, Failure> {
        if !config.knows_limits() {
            return Err(Failure::NoSuchFunction);
        }
        Self::found(Path::new(ROOT), config.memory_limits == MemoryLimits::Force).ok_or(Failure::NotSupported)
    }

    fn found(root: &Path, also_version_1: bool) -> Option<Self> {
        if root.join("cgroup.controllers").exists() {
            return Some(Self { root: root.to_owned(), controller: None });
        }
        let old = root.join(CONTROLLER);
        (also_version_1 && old.is_dir()).then_some(Self { root: old, controller: Some(CONTROLLER) })
    }

    /// The cgroup of a process.
    pub fn of_process(&self, pid: u32) -> Option<String> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        self.find(&text).map(str::to_owned)
    }

    /// The path in the text of `/proc/PID/cgroup`.
    fn find<'a>(&self, text: &'a str) -> Option<&'a str> {
        text.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let ours = match self.controller {
                None => controllers.is_empty(),
                Some(wanted) => controllers.split(',').any(|controller| controller == wanted),
            };
            ours.then_some(path)
        })
    }

    /// The cgroup that a caller names: by its path in the file system, or within the hierarchy.
    ///
    /// # Errors
    /// Where there is none.
    pub fn named(&self, namespace: &str) -> Result<Cgroup, Failure> {
        let within = namespace.strip_prefix(self.root.to_str().unwrap_or_default()).unwrap_or(namespace);
        let trimmed = within.trim_end_matches('/');
        let absolute = within.starts_with('/') && !trimmed.split('/').any(|part| part == "..");
        if !absolute {
            return Err(Failure::NoSuchCgroup);
        }
        let path = if trimmed.is_empty() { "/" } else { trimmed };
        let inode = self.inode(path).ok_or(Failure::NoSuchCgroup)?;
        Ok(Cgroup { path: path.into(), inode })
    }

    /// Whether a cgroup is still there: the same one, not a later one of the same path.
    pub fn has(&self, cgroup: &Cgroup) -> bool {
        self.inode(&cgroup.path) == Some(cgroup.inode)
    }

    fn inode(&self, path: &str) -> Option<u64> {
        let facts = std::fs::metadata(self.root.join(path.trim_start_matches('/'))).ok()?;
        facts.is_dir().then(|| facts.ino())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "9:memory:/pods/a\n4:cpu,cpuacct:/pods/b\n0::/pods/c\n";

    #[test]
    fn each_version_has_its_own_path() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Hierarchy::found(root.path(), true), None);
        std::fs::create_dir(root.path().join("memory")).unwrap();
        assert_eq!(Hierarchy::found(root.path(), false), None);
        let old = Hierarchy::found(root.path(), true).unwrap();
        assert_eq!(old.find(BOTH), Some("/pods/a"));
        std::fs::write(root.path().join("cgroup.controllers"), "memory").unwrap();
        let new = Hierarchy::found(root.path(), false).unwrap();
        assert_eq!(new.find(BOTH), Some("/pods/c"));
        assert_eq!(new.find("9:memory:/pods/a\n"), None);
    }

    #[test]
    fn a_cgroup_is_named_by_either_path_and_is_itself_only() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("cgroup.controllers"), "").unwrap();
        std::fs::create_dir_all(root.path().join("pods/a")).unwrap();
        let hierarchy = Hierarchy::found(root.path(), false).unwrap();
        let whole = format!("{}/pods/a/", root.path().display());
        let cgroup = hierarchy.named(&whole).unwrap();
        assert_eq!(&*cgroup.path, "/pods/a");
        assert_eq!(hierarchy.named("/pods/a").unwrap(), cgroup);
        for absent in ["/pods/b", "pods/a", "", "/pods/../pods/a"] {
            assert_eq!(hierarchy.named(absent), Err(Failure::NoSuchCgroup), "{absent}");
        }
        assert!(hierarchy.has(&cgroup));
        std::fs::remove_dir(root.path().join("pods/a")).unwrap();
        assert!(!hierarchy.has(&cgroup));
    }
}
