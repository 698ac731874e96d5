//! The Debian packages that the cluster runs on.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, bail};

use crate::command;

/// A package, and a file that tells whether it is there (whoever installed it).
const NEEDED: &[(&str, &str)] = &[
    ("containerd", "/usr/bin/containerd"),
    ("runc", "/usr/sbin/runc"),
    ("containernetworking-plugins", "/usr/lib/cni/bridge"),
    ("nftables", "/usr/sbin/nft"),
    ("conntrack", "/usr/sbin/conntrack"),
    ("ethtool", "/usr/sbin/ethtool"),
    ("iproute2", "/sbin/ip"),
    ("procps", "/sbin/sysctl"),
    ("prometheus", "/usr/bin/prometheus"),
    ("busybox-static", "/bin/busybox"),
];

/// Installs what is missing where we may, else names it.
pub(crate) fn ensure() -> Result<()> {
    let missing: Vec<_> =
        NEEDED.iter().filter(|(_, file)| !Path::new(file).exists()).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !rustix::process::geteuid().is_root() || !Path::new("/usr/bin/apt-get").exists() {
        bail!("these Debian packages are missing; install them and try again: {list}");
    }
    tracing::info!("installing {list}");
    let apt = |arguments: &[&str]| {
        command::output(
            Command::new("apt-get")
                .args(["-q", "-y", "-o", "DPkg::Lock::Timeout=120", "--no-install-recommends"])
                .args(arguments)
                // No service of a package is to start: the cluster runs its own.
                .envs([("DEBIAN_FRONTEND", "noninteractive"), ("RUNLEVEL", "1")]),
        )
    };
    let install = [&["install"], missing.as_slice()].concat();
    // The lists may be absent or old; most often they are not.
    if apt(&install).is_err() {
        apt(&["update"]).context("refreshing the package lists")?;
        apt(&install).with_context(|| format!("installing {list}: do it by hand and try again"))?;
    }
    Ok(())
}
