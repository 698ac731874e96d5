//! Command line and environment.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Holds the memory of a node's reservation pools, and serves the guard's volumes, as the agent
/// says.
#[derive(Clone, Debug, Parser)]
#[command(name = "keeper", version, about)]
pub(crate) struct Args {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs the keeper. A keeper that runs already hands over what it holds.
    Serve(Serve),
    /// Asks the keeper of this container how it is. Succeeds while it holds everything and
    /// serves, or has handed everything over.
    Status(State),
    /// Makes memory for a keeper, its parent, with which it speaks over standard input.
    #[command(hide = true)]
    Worker(Worker),
    /// Moves memory of processes for a keeper, as the worker.
    #[command(hide = true)]
    Mover(Worker),
}

/// Where the keeper is found.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct State {
    /// The directory of the keeper's socket; a tmpfs that keepers and agent share.
    #[arg(long, env = "HIGHWATER_KEEPER_STATE_DIR", default_value = "/run/highwater-keeper")]
    pub(crate) state_dir: PathBuf,
}

/// How to run.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Serve {
    #[command(flatten)]
    pub(crate) state: State,

    /// Serves no volumes.
    #[arg(long)]
    pub(crate) no_csi: bool,

    /// Name of the node that this keeper runs on.
    #[arg(long, env = "NODE_NAME", required_unless_present = "no_csi")]
    pub(crate) node_name: Option<String>,

    /// The kubelet's directory, below which volumes and plugins are.
    #[arg(long, env = "HIGHWATER_KUBELET_ROOT", default_value = "/var/lib/kubelet")]
    pub(crate) kubelet_root: PathBuf,

    /// The guard that is copied into each volume. Absent: volumes are refused.
    #[arg(long, env = "HIGHWATER_GUARD_LIBRARY")]
    pub(crate) guard_library: Option<PathBuf>,

    /// The program that is copied into each volume beside the guard, for readiness probes. Absent:
    /// volumes have none.
    #[arg(long, env = "HIGHWATER_READY_HELPER")]
    pub(crate) ready_helper: Option<PathBuf>,

    /// How long a worker stays without work, in seconds. It is 10 MiB large, and takes a moment
    /// to start.
    #[arg(long, env = "HIGHWATER_WORKER_IDLE_SECONDS", default_value_t = 300)]
    pub(crate) worker_idle_seconds: u32,

    /// How long the end may take, in seconds: to hand over, or to bring back what is parked. Less than
    /// the pod's grace period by 10 s, after which nothing is left to do in peace.
    #[arg(long, env = "HIGHWATER_END_SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) end_seconds: u32,

    #[command(flatten)]
    pub(crate) libraries: Libraries,
}

/// The driver's libraries.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Libraries {
    /// Path of the driver's management library (libnvidia-ml.so.1). Absent: where the loader
    /// finds it.
    #[arg(long, env = "HIGHWATER_DRIVER_LIBRARY")]
    pub(crate) driver_library: Option<PathBuf>,

    /// Path of the CUDA driver library (libcuda.so.1). Absent: where the loader finds it.
    #[arg(long, env = "HIGHWATER_CUDA_LIBRARY")]
    pub(crate) cuda_library: Option<PathBuf>,
}

/// How to work.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Worker {
    /// UUID of the device.
    #[arg(long)]
    pub(crate) device: String,

    #[command(flatten)]
    pub(crate) libraries: Libraries,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Args::command().debug_assert();
        let parse = |words: &[&str]| Args::try_parse_from([&["keeper"], words].concat());
        assert!(parse(&["serve", "--no-csi"]).is_ok());
        assert!(parse(&["serve", "--node-name", "n"]).is_ok());
        assert!(parse(&["worker", "--device", "GPU-1"]).is_ok());
        assert!(parse(&[]).is_err());
    }
}
