//! The host's mount points for what each node sees as its own, which all clusters of the machine
//! share: made by the first that lacks them, removed by the last that goes.
//!
//! To remove one while another cluster is up would take the mount out of that cluster's nodes.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, Write as _},
    path::Path,
};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

use crate::network;

/// Names the folders that were made, one a line; locked by whoever makes or removes any.
const MADE: &str = "/run/highwater-e2e-mount-points";

/// Makes what is missing. The caller's cluster has a network by now, and so counts as up.
pub(crate) fn make(paths: &[&str]) -> Result<()> {
    let mut made = open()?;
    made.seek(std::io::SeekFrom::End(0))?;
    for path in paths.iter().filter(|path| !Path::new(path).exists()) {
        fs::create_dir_all(path).with_context(|| format!("making the mount point {path}"))?;
        writeln!(made, "{path}")?;
    }
    Ok(())
}

/// Removes what was made, as far as it is empty, unless any cluster is left.
pub(crate) fn remove() -> Result<()> {
    let mut made = open()?;
    if network::any_exists() {
        return Ok(());
    }
    let mut paths = String::new();
    made.read_to_string(&mut paths)?;
    for path in paths.lines() {
        let _ = fs::remove_dir(path);
    }
    made.set_len(0).with_context(|| format!("emptying {MADE}"))
}

/// The list, locked until it is dropped.
fn open() -> Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(MADE)
        .with_context(|| format!("opening {MADE} (the cluster needs root)"))?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}
