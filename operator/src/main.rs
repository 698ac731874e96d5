//! Highwater's operator: plans for the nodes, decisions about incidents, taints.

mod agents;
mod args;
mod claims;
mod cleanup;
mod context;
mod error;
mod events;
mod http;
mod incident_controller;
mod leader;
mod metrics;
mod node_controller;
mod policy_controller;
mod queue;
mod run;
mod uninstall;
mod watch;
mod written;

use std::{io::IsTerminal, process::ExitCode};

use clap::Parser;

/// Exit status of a cleanup that refuses: trying again would not help, a person has to do something.
const REFUSED: u8 = 3;

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<ExitCode> {
    let args = args::Args::parse();
    let colours = std::io::stdout().is_terminal();
    tracing_subscriber::fmt().with_env_filter(args.log_filter()?).with_ansi(colours).init();
    let done = match args.command.unwrap_or_default() {
        args::Command::Run => run::run(args.settings).await,
        args::Command::Cleanup { abandon_guard_volumes } => {
            cleanup::cleanup(args.settings, abandon_guard_volumes).await
        }
    };
    match done {
        Err(error) if error.is::<cleanup::StillGuarded>() => {
            tracing::error!("{error}");
            Ok(ExitCode::from(REFUSED))
        }
        done => done.map(|()| ExitCode::SUCCESS),
    }
}
