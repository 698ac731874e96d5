//! Follows a script through `libcuda.so.1`, whichever that is: a driver's or the simulator's.
//!
//! The steps of a script take, keep and give back device memory, as the servers and trainers do
//! that Highwater looks after; see `script.rs` for the language.

mod cuda;
mod engine;
mod errands;
mod loader;
mod nvml;
mod pressure;
mod run;
mod script;
mod share;
mod signals;
mod units;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use crate::errands::Errands;
use crate::loader::{Bypass, Lookup};
use crate::run::{Access, Runner};
use crate::script::Script;
use crate::signals::Signals;

/// Uses GPU memory as a script says.
///
/// Statements, one a line or apart by `;`: device N; context; alloc SIZE; and like it, by other
/// calls: pitch, managed, physical or create (without a context), vmm, async, pool, array, graph,
/// capture, host; expect-oom context, or expect-oom and one of these; share SIZE at PATH;
/// import PATH [map]; keep PATH; offer SIZE at PATH; open PATH; info; synchronize; trim; touch; grow SIZE/s to SIZE; leak SIZE every DURATION [xN]; spike SIZE for
/// DURATION; hold [DURATION]; free [SIZE]; fork N { SCRIPT }; ignore-sigterm;
/// watch-pressure PATH; cache SIZE; engine PORT [hangs|redirects URL|streams|fails];
/// heed level|unready PATH; retain; swing SIZE every DURATION xN; serve;
/// on-oom exit N|continue|retry; exit N.
#[derive(Debug, Parser)]
#[command(name = "workload", version)]
struct Arguments {
    /// The script itself.
    #[arg(long, env = SCRIPT_VARIABLE, default_value = "")]
    script: String,
    /// A file with the script, in place of the above.
    #[arg(long)]
    script_file: Option<PathBuf>,
    /// How the driver's functions are found.
    #[arg(long, env = "WORKLOAD_LOOKUP", value_enum, default_value_t)]
    lookup: Lookup,
    /// Goes to the driver by a way of its own, past whatever is preloaded.
    #[arg(long, env = "WORKLOAD_BYPASS", value_enum)]
    bypass: Option<Bypass>,
}

/// Holds the script where no argument does.
const SCRIPT_VARIABLE: &str = "WORKLOAD_SCRIPT";
/// Exit status for a script that cannot be followed.
const BAD_SCRIPT: u8 = 2;

fn main() -> ExitCode {
    run::start_clock();
    let (script, signals, access) = match prepare() {
        Ok(prepared) => prepared,
        Err(error) => {
            eprintln!("workload: {error:#}");
            return ExitCode::from(BAD_SCRIPT);
        }
    };
    let errands = match Errands::new() {
        Ok(errands) => errands,
        Err(error) => {
            eprintln!("workload: {error}");
            return ExitCode::from(BAD_SCRIPT);
        }
    };
    ExitCode::from(Runner::new(signals, errands, access).run(&script))
}

fn prepare() -> Result<(Script, Signals, Access)> {
    let arguments = Arguments::parse();
    let text = match &arguments.script_file {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?,
        None => arguments.script,
    };
    let script = Script::parse(&text)?;
    anyhow::ensure!(
        !script.0.is_empty(),
        "the script is empty: give --script, --script-file or {SCRIPT_VARIABLE}"
    );
    let access = Access { lookup: arguments.lookup, bypass: arguments.bypass };
    Ok((script, Signals::take().context("take over signals")?, access))
}
