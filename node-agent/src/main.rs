//! The agent of a GPU node: sample -> attribute -> account -> decide -> act -> publish.

mod account;
mod act;
mod args;
mod attribute;
mod cgroup;
mod decide;
mod engine;
mod episodes;
mod evidence;
mod fares;
mod framework;
mod guard;
mod host;
mod hosts;
mod http;
mod journal;
mod keeper_protocol;
mod ladder;
mod leaks;
mod limits;
mod link;
mod metrics;
mod plan;
mod pod_http;
mod pod_resources;
mod pools;
mod publish;
mod replace;
mod run;
mod sampler;
mod signal;
mod strength;
#[cfg(test)]
mod test_clock;
mod wards;
mod watch;
mod world;

use std::{io::IsTerminal, time::Duration};

use anyhow::Context;
use clap::Parser;
use tracing_subscriber::{filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

fn main() -> anyhow::Result<()> {
    let args = args::Args::parse();
    let levels = std::env::var("HIGHWATER_LOG").unwrap_or_else(|_| "info".to_owned());
    // The client logs every failed call as an error; the agent says itself what fails.
    let targets = format!("kube_client=off,{levels}").parse::<Targets>();
    let targets = targets.context("HIGHWATER_LOG must be levels by target, such as info,agent=debug")?;
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(lines).with(targets).init();
    // One thread besides the sampler's: there is little to do, and little memory to do it in.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(4)
        .thread_keep_alive(Duration::from_secs(1))
        .thread_stack_size(512 << 10)
        .build()?;
    let ended = runtime.block_on(run::run(args));
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}
