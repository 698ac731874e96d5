//! Command line and environment.

use std::{net::SocketAddr, path::PathBuf};

use clap::Parser;

/// The brain of a GPU node: measures the memory of its devices, accounts for it pod by pod,
/// asks pods for memory, carries out the acts that the operator allows, and reports what it sees. It evicts,
/// drains and taints nothing.
#[derive(Clone, Debug, Parser)]
#[command(name = "agent", version, about)]
pub(crate) struct Args {
    /// Name of the node that this agent runs on.
    #[arg(long, env = "NODE_NAME")]
    pub(crate) node_name: String,

    /// Namespace of the release.
    #[arg(long, env = "POD_NAMESPACE")]
    pub(crate) namespace: String,

    /// Time between two samples, in milliseconds.
    #[arg(long, env = "HIGHWATER_SAMPLE_INTERVAL_MILLISECONDS", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(10..=60_000))]
    pub(crate) sample_interval_milliseconds: u32,

    /// Path of the driver's management library (libnvidia-ml.so.1). Absent: where the loader
    /// finds it.
    #[arg(long, env = "HIGHWATER_DRIVER_LIBRARY")]
    pub(crate) driver_library: Option<PathBuf>,

    /// The kubelet's pod resources socket.
    #[arg(long, env = "HIGHWATER_POD_RESOURCES_SOCKET", default_value = kubelet_api::podresources::DEFAULT_SOCKET)]
    pub(crate) pod_resources_socket: PathBuf,

    /// The kubelet's directory, below which the volumes of pods are.
    #[arg(long, env = "HIGHWATER_KUBELET_ROOT", default_value = "/var/lib/kubelet")]
    pub(crate) kubelet_root: PathBuf,

    /// The keeper's socket. Absent: there is no keeper, and so no reservation pool.
    #[arg(long, env = "HIGHWATER_KEEPER_SOCKET")]
    pub(crate) keeper_socket: Option<PathBuf>,

    /// Where the last plan and the grants are kept over a restart; a tmpfs will do.
    #[arg(long, env = "HIGHWATER_STATE_DIR", default_value = "/run/highwater")]
    pub(crate) state_dir: PathBuf,

    /// Address of /metrics, /healthz and /readyz.
    #[arg(long, env = "HIGHWATER_LISTEN", default_value = "0.0.0.0:9440")]
    pub(crate) listen: SocketAddr,

    /// `/proc` of the host's PID namespace.
    #[arg(long, env = "HIGHWATER_PROC_ROOT", default_value = "/proc")]
    pub(crate) proc_root: PathBuf,

    /// Give limits to drivers that keep them by themselves, on the cgroups of pods.
    #[arg(long, env = "HIGHWATER_KERNEL_LIMITS", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) kernel_limits: bool,

    /// Root of the host's cgroup tree, to set the driver's limits in.
    #[arg(long, env = "HIGHWATER_CGROUP_ROOT", default_value = "/sys/fs/cgroup")]
    pub(crate) cgroup_root: PathBuf,

    /// Root of the host's cgroup tree, to read the host memory of pods in; nothing there is written.
    #[arg(long, env = "HIGHWATER_HOST_MEMORY_ROOT", default_value = "/sys/fs/cgroup")]
    pub(crate) host_memory_root: PathBuf,
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Args::command().debug_assert();
        let common = ["agent", "--node-name=n", "--namespace=hw"];
        assert!(Args::parse_from(common).kernel_limits);
        let without = common.into_iter().chain(["--kernel-limits=false"]);
        assert!(!Args::parse_from(without).kernel_limits);
    }
}
