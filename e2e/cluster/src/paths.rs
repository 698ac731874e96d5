//! Where the test cluster keeps its things on the host.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// Overrides [`Paths::state`].
pub const STATE_VARIABLE: &str = "HIGHWATER_E2E_DIR";

/// Overrides [`Paths::data`].
pub const DATA_VARIABLE: &str = "HIGHWATER_E2E_DATA";

/// The folders of one cluster. All of them come from the environment, so every command and test
/// that runs with the same environment sees the same cluster.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Sockets, pid files, logs, kubeconfigs and certificates: `HIGHWATER_E2E_DIR`, by default
    /// `/run/highwater-e2e`.
    pub state: PathBuf,
    /// What needs a disk that allows execution (container layers, etcd, kubelets):
    /// `HIGHWATER_E2E_DATA`, by default `/var/lib/highwater-e2e`. `/run` is often mounted `noexec`.
    pub data: PathBuf,
    /// Built components, kept between clusters and checkouts: `highwater` in the user's cache.
    pub cache: PathBuf,
    /// The checkout that this program was built from.
    pub repository: PathBuf,
}

impl Paths {
    /// Reads the environment. Creates nothing.
    pub fn from_env() -> Result<Self> {
        let folder =
            |name: &str, default: &str| env::var_os(name).map_or_else(|| default.into(), PathBuf::from);
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
            state: folder(STATE_VARIABLE, "/run/highwater-e2e"),
            data: folder(DATA_VARIABLE, "/var/lib/highwater-e2e"),
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
