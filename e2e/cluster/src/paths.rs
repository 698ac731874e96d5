//! Which of the machine's test clusters is meant, and where it keeps its things on the host.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::spec::Node;

/// Chooses among the clusters of this machine: 0, where it is not set, to [`ClusterId::LAST`].
pub const CLUSTER_VARIABLE: &str = "HIGHWATER_E2E_CLUSTER";

/// Overrides [`Paths::state`].
pub const STATE_VARIABLE: &str = "HIGHWATER_E2E_DIR";

/// Overrides [`Paths::data`].
pub const DATA_VARIABLE: &str = "HIGHWATER_E2E_DATA";

/// One of the clusters that this machine may run side by side. Whatever the whole machine sees of a
/// cluster is named after it; addresses and ports are not, since each has networks of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterId(u8);

impl ClusterId {
    /// The highest number that a cluster can have.
    pub const LAST: u8 = 7;

    /// Reads a number as [`CLUSTER_VARIABLE`] gives it.
    pub fn parse(number: &str) -> Result<Self> {
        let number = number.parse().ok().filter(|number| *number <= Self::LAST);
        let last = Self::LAST;
        number.map(Self).with_context(|| format!("{CLUSTER_VARIABLE} is to be a number from 0 to {last}"))
    }

    /// The number, from 0.
    pub fn number(self) -> u8 {
        self.0
    }

    /// All that there can be on this machine.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=Self::LAST).map(Self)
    }

    /// Network namespace of the control plane, the first node and the tests.
    pub fn network(self) -> String {
        self.to_string()
    }

    /// Network namespace of a node: the first node shares the control plane's.
    pub fn network_of(self, node: Node) -> String {
        if node.is_first() { self.network() } else { format!("{self}-{node}") }
    }

    /// Cgroup above everything that the cluster runs.
    pub fn cgroup(self) -> String {
        self.to_string()
    }

    /// Cgroup of a node's pods, below the cgroup root.
    pub fn cgroup_of(self, node: Node) -> String {
        format!("{self}/{node}")
    }
}

/// The cluster's name on this machine: `highwater-e2e`, `highwater-e2e-1`, ...
impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => write!(f, "highwater-e2e"),
            number => write!(f, "highwater-e2e-{number}"),
        }
    }
}

/// The name and the folders of one cluster. All of them come from the environment, so every command and test
/// that runs with the same environment sees the same cluster.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Which cluster of this machine it is: `HIGHWATER_E2E_CLUSTER`, by default 0.
    pub id: ClusterId,
    /// Sockets, pid files, logs, kubeconfigs and certificates: `HIGHWATER_E2E_DIR`, by default
    /// `/run/highwater-e2e` or, for cluster 1, `/run/highwater-e2e-1`.
    pub state: PathBuf,
    /// What needs a disk that allows execution (container layers, etcd, kubelets):
    /// `HIGHWATER_E2E_DATA`, likewise below `/var/lib`. `/run` is often mounted `noexec`.
    pub data: PathBuf,
    /// Built components, kept between clusters and checkouts: `highwater` in the user's cache.
    pub cache: PathBuf,
    /// The checkout that this program was built from.
    pub repository: PathBuf,
}

impl Paths {
    /// Reads the environment. Creates nothing.
    pub fn from_env() -> Result<Self> {
        Self::of(match env::var(CLUSTER_VARIABLE) {
            Ok(number) => ClusterId::parse(&number)?,
            Err(env::VarError::NotPresent) => ClusterId::default(),
            Err(error) => return Err(error).context(CLUSTER_VARIABLE),
        })
    }

    /// Those of this cluster; the rest is read from the environment.
    pub fn of(id: ClusterId) -> Result<Self> {
        let folder = |name: &str, parent: &str| {
            env::var_os(name).map_or_else(|| Path::new(parent).join(id.to_string()), PathBuf::from)
        };
        let cache = match env::var_os("XDG_CACHE_HOME") {
            Some(dir) => PathBuf::from(dir),
            None => PathBuf::from(env::var_os("HOME").context("HOME is not set: set it or XDG_CACHE_HOME")?)
                .join(".cache"),
        };
        let repository = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .context("the e2e crate lies two folders below the root of the checkout")?;
        Ok(Self {
            id,
            state: folder(STATE_VARIABLE, "/run"),
            data: folder(DATA_VARIABLE, "/var/lib"),
            cache: cache.join("highwater"),
            repository: repository.to_owned(),
        })
    }

    /// Certificates and keys.
    pub fn pki(&self) -> PathBuf {
        self.state.join("pki")
    }

    /// The kubeconfig of `user`: `admin`, or a component's own identity.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.state.join("kubeconfig").join(user)
    }

    /// The output of component `name`.
    pub fn log(&self, name: &str) -> PathBuf {
        self.state.join("logs").join(format!("{name}.log"))
    }

    /// The API server's audit log: one JSON object a line for each write by Highwater.
    pub fn audit_log(&self) -> PathBuf {
        self.log("audit")
    }

    /// The pid file of component `name`; the pid is the host's.
    pub fn pid_file(&self, name: &str) -> PathBuf {
        self.state.join("pids").join(name)
    }

    /// The supervisor's control socket.
    pub fn control_socket(&self) -> PathBuf {
        self.state.join("control.sock")
    }

    /// The folder whose parts a node sees under the usual paths.
    pub fn node(&self, node: &str) -> PathBuf {
        self.data.join(node)
    }

    /// The host's name for a path as node `node` sees it: `/run/gpusim` -> the node's own folder.
    pub fn on_node(&self, node: &str, path: &str) -> PathBuf {
        self.node(node).join("root").join(path.trim_start_matches('/'))
    }

    /// The binaries of this cluster: the Go components by name, and the product's own.
    pub fn bin(&self) -> PathBuf {
        self.data.join("bin")
    }

    /// Component `name` of the Kubernetes binary, or helm, kwok, or one of the Rust binaries.
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin().join(name)
    }
}

/// Writes a file and the folders above it.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))?;
    }
    fs::write(path, content).with_context(|| format!("writing {}", path.display()))
}

/// Replaces `target` by a copy of `source` in one step, so that programs that have the old file
/// open or mapped keep it.
pub fn replace(source: &Path, target: &Path) -> Result<()> {
    let parent = target.parent().context("a file has a folder")?;
    fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))?;
    let fresh = target.with_extension("new");
    fs::copy(source, &fresh)
        .and_then(|_| fs::rename(&fresh, target))
        .with_context(|| format!("copying {} to {}", source.display(), target.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_sees_every_cluster_under_names_of_its_own() {
        let second = Node::parse("n2").unwrap();
        let mut names: Vec<String> =
            ClusterId::all().flat_map(|id| [id.network(), id.network_of(second)]).collect();
        assert!(names.starts_with(&[
            "highwater-e2e".into(),
            "highwater-e2e-n2".into(),
            "highwater-e2e-1".into()
        ]));
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(ClusterId::parse("2").unwrap().cgroup_of(second), "highwater-e2e-2/n2");
    }

    #[test]
    fn what_is_no_number_of_a_cluster_is_refused_with_the_range() {
        for wrong in ["8", "-1", "one", ""] {
            assert!(ClusterId::parse(wrong).unwrap_err().to_string().contains("0 to 7"), "{wrong}");
        }
    }
}
