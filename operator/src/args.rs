//! Command line.

use std::net::SocketAddr;

use anyhow::Context as _;
use clap::{Args as ClapArgs, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Turns GpuMemoryPolicies into node plans, decides about incidents within budgets, drains nodes, and
/// taints nodes or devices under memory pressure.
#[derive(Debug, Parser)]
#[command(name = "operator", version)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Which messages are logged, such as `info` or `operator=debug,kube=info`.
    #[arg(long, env = "HIGHWATER_LOG", default_value = "info", global = true)]
    log: String,
}

#[derive(Clone, Copy, Debug, Default, Subcommand)]
pub(crate) enum Command {
    /// Run the operator (the default).
    #[default]
    Run,
    /// Before an uninstall: stop the running operators' writes, and remove our taints, cordons, labels
    /// and plans. Refuses, with exit status 3, while pods have the guard's volume.
    Cleanup {
        /// Go on although pods have the guard's volume: they go on running under it, new ones cannot
        /// start, and none of them can end cleanly before the volume server is installed again.
        #[arg(long, env = "HIGHWATER_ABANDON_GUARD_VOLUMES")]
        abandon_guard_volumes: bool,
    },
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Settings {
    /// Namespace that Highwater is installed in.
    #[arg(long, env = "POD_NAMESPACE", default_value = "highwater-system", global = true)]
    pub(crate) namespace: String,
    /// Name of this replica in the leader election. Must differ between replicas.
    #[arg(long, env = "POD_NAME", default_value = "operator", global = true)]
    pub(crate) identity: String,
    /// Address for /metrics, /healthz and /readyz.
    #[arg(long, env = "HIGHWATER_LISTEN", default_value = "0.0.0.0:9441", global = true)]
    pub(crate) listen: SocketAddr,
}

impl Args {
    pub(crate) fn log_filter(&self) -> anyhow::Result<EnvFilter> {
        EnvFilter::try_new(&self.log).with_context(|| format!("--log {:?} is not a log filter", self.log))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
