//! Command line.

use clap::{Parser, Subcommand};

use crate::simulate;

/// GPU memory of a Kubernetes fleet, from the command line. Nothing here writes to a cluster.
#[derive(Debug, Parser)]
#[command(name = "kubectl-highwater", bin_name = "kubectl highwater", version)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Replay a policy over recorded memory series, and print what it would have done and when.
    Simulate(simulate::Args),
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
