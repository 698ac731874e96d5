//! The keeper of a GPU node: holds the memory that nobody is owed, as file descriptors, and serves
//! the guard's volumes. It decides nothing: the agent does.
//!
//! It loads neither CUDA nor NVML. A worker child does, one a device, for as long as memory is
//! being reserved; what the worker made stays when it is gone. So does another, for as long as a
//! pod's memory is moved to the host or back.

mod args;
mod connection;
mod csi;
mod descriptors;
mod holder;
#[path = "../keeper_protocol/mod.rs"]
mod keeper_protocol;
mod park;
mod place;
mod probe;
mod run;
mod succeed;
mod volume;
mod worker;

use std::{io::IsTerminal, process::ExitCode, time::Duration};

use anyhow::Context;
use clap::Parser;
use tokio::runtime::{Builder, Runtime};
use tracing_subscriber::{filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use args::{Args, Command};

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let levels = std::env::var("HIGHWATER_LOG").unwrap_or_else(|_| "info".to_owned());
    let targets = levels.parse::<Targets>();
    let targets = targets.context("HIGHWATER_LOG must be levels by target, such as info,keeper=debug")?;
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(lines).with(targets).init();
    match args.command {
        Command::Serve(serve) => {
            let runtime = runtime()?;
            let ended = runtime.block_on(run::run(serve));
            // A device that is stuck may hold a thread for ever.
            runtime.shutdown_timeout(Duration::from_secs(1));
            ended.map(|()| ExitCode::SUCCESS)
        }
        Command::Status(status) => runtime()?.block_on(probe::ask(&status)),
        Command::Worker(worker) => worker::child::run(&worker).map(|()| ExitCode::SUCCESS),
        Command::Mover(worker) => park::child::run(&worker).map(|()| ExitCode::SUCCESS),
    }
}

/// One thread for everything but the closing of descriptors and the writing of volumes.
fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(64)
        .thread_keep_alive(Duration::from_secs(1))
        .thread_stack_size(256 << 10)
        .build()
}
