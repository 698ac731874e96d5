//! `make bench-guard`: what the guard adds to programs.
//!
//! This program is its own agent for the programs that it measures, which are runs of itself with the
//! guard and without. Against a driver that does nothing it shows on any machine when something became
//! slower; with `--real`, on a machine with a GPU, it measures what counts.
//!
//! `guard-bench serve --limit 16Gi -- COMMAND` runs any command under the guard.
#![allow(unsafe_code, reason = "it calls the driver")]

mod agent;
mod bench;
mod child;
mod driver;
mod report;
mod serve;
mod times;
mod volume;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// Measures what the guard adds to programs.
#[derive(Debug, Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    /// Measures against the driver of this machine.
    #[arg(long)]
    real: bool,

    /// The guard. Absent: libhighwater-guard.so or libhighwater_guard.so beside this program.
    #[arg(long, global = true)]
    library: Option<PathBuf>,

    /// The driver that does nothing. Absent: libgpusim_cuda.so beside this program.
    #[arg(long)]
    null_driver: Option<PathBuf>,

    /// Measures PyTorch too, by this script.
    #[arg(long)]
    torch: Option<PathBuf>,

    /// Measures these parts only.
    #[arg(long, value_delimiter = ',')]
    only: Vec<bench::Part>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs a command under the guard.
    Serve(serve::Serve),
    /// What is measured.
    #[command(hide = true)]
    Child {
        #[command(subcommand)]
        program: child::Program,
    },
}

/// The first of these files that lies beside this program.
fn beside(names: &[&str]) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().context("this program's folder")?;
    let mut paths = names.iter().map(|name| folder.join(name));
    paths
        .find(|path| path.exists())
        .with_context(|| format!("{} is not beside {}: say where it is", names.join(" or "), own.display()))
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    if let Some(Command::Child { program }) = &arguments.command {
        return program.run().map(|()| ExitCode::SUCCESS);
    }
    let library = match arguments.library {
        Some(path) => path,
        None => beside(&["libhighwater-guard.so", "libhighwater_guard.so"])?,
    };
    if let Some(Command::Serve(serve)) = &arguments.command {
        return serve::run(serve, &library);
    }
    let null_driver = match arguments.null_driver {
        Some(path) => path,
        None if arguments.real => PathBuf::new(),
        None => beside(&["libgpusim_cuda.so"])?,
    };
    bench::run(&bench::Setting {
        real: arguments.real,
        library,
        null_driver,
        torch: arguments.torch,
        only: arguments.only,
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
        let parse = |words: &[&str]| Arguments::try_parse_from([&["guard-bench"], words].concat());
        assert!(parse(&["--real", "--only", "latency,storm"]).is_ok());
        assert!(parse(&["serve", "--limit", "16Gi", "--", "true"]).is_ok());
        assert!(parse(&["serve", "--limit", "16Gi"]).is_err());
    }
}
