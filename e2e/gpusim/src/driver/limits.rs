//! Limits on the memory of cgroups, as drivers from R615 on have them.

use std::sync::Arc;

/// One cgroup's limits on one device.
#[derive(Debug, Clone)]
pub(super) struct CgroupLimit {
    pub(super) device: u32,
    pub(super) cgroup: Cgroup,
    pub(super) soft: u64,
    pub(super) hard: u64,
}

/// A cgroup that was there when it was looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// Its path within its hierarchy.
    pub path: Arc<str>,
    /// Tells it from a later one of the same path.
    pub inode: u64,
}

/// Whether a cgroup is another, or below it.
pub(super) fn is_below(path: &str, ancestor: &str) -> bool {
    let Some(rest) = path.strip_prefix(ancestor) else { return false };
    rest.is_empty() || rest.starts_with('/') || ancestor.ends_with('/')
}

#[cfg(test)]
mod tests {
    use super::is_below;

    #[test]
    fn a_cgroup_is_below_its_ancestors_alone() {
        for (path, ancestor, below) in [
            ("/pods/a/c", "/pods/a", true),
            ("/pods/a", "/pods/a", true),
            ("/pods/ab", "/pods/a", false),
            ("/pods", "/pods/a", false),
            ("/pods/a", "/", true),
            ("/", "/", true),
        ] {
            assert_eq!(is_below(path, ancestor), below, "{path} {ancestor}");
        }
    }
}
