//! The folder by which the guard comes into programs, as the volume server makes it in a pod: the
//! library, and beside it the directory of the agent's socket.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// Where the agent listens, from the library's folder.
const SOCKET: &str = "run/agent.sock";

/// Removed with its owner.
#[derive(Debug)]
pub(crate) struct Volume {
    folder: TempDir,
}

impl Volume {
    /// A folder with a copy of the library.
    pub(crate) fn new(library: &Path) -> Result<Self> {
        // A socket's address has room for 107 bytes.
        let folder = tempfile::Builder::new().prefix("hw-").tempdir_in("/tmp")?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        fs::create_dir(folder.path().join("run"))?;
        let volume = Self { folder };
        fs::copy(library, volume.library())
            .with_context(|| format!("the guard is not at {}", library.display()))?;
        fs::set_permissions(volume.library(), fs::Permissions::from_mode(0o555))?;
        Ok(volume)
    }

    /// The library, for `LD_PRELOAD`.
    pub(crate) fn library(&self) -> PathBuf {
        self.folder.path().join("libhighwater-guard.so")
    }

    /// Where the agent is to listen.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }
}
