//! Follows a script through `libcuda.so.1`, whichever that is: a driver's or the simulator's.
//!
//! The steps of a script take, keep and give back device memory, as the servers and trainers do
//! that Highwater looks after; see `script.rs` for the language.

mod cuda;
mod pressure;
mod run;
mod script;
mod signals;
mod units;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use crate::run::Runner;
use crate::script::Script;
use crate::signals::Signals;

/// Uses GPU memory as a script says.
///
/// Statements, one a line or apart by `;`: device N; context; alloc SIZE; managed SIZE;
/// physical SIZE; touch; grow SIZE/s to SIZE; leak SIZE every DURATION [xN]; spike SIZE for
/// DURATION; hold [DURATION]; free [SIZE]; fork N { SCRIPT }; ignore-sigterm;
/// watch-pressure PATH; serve; on-oom exit N|continue|retry; exit N.
#[derive(Debug, Parser)]
#[command(name = "workload", version)]
struct Arguments {
    /// The script itself.
    #[arg(long, env = SCRIPT_VARIABLE, default_value = "")]
    script: String,
    /// A file with the script, in place of the above.
    #[arg(long)]
    script_file: Option<PathBuf>,
}

/// Holds the script where no argument does.
const SCRIPT_VARIABLE: &str = "WORKLOAD_SCRIPT";
/// Exit status for a script that cannot be followed.
const BAD_SCRIPT: u8 = 2;

fn main() -> ExitCode {
    let (script, signals) = match prepare() {
        Ok(prepared) => prepared,
        Err(error) => {
            eprintln!("workload: {error:#}");
            return ExitCode::from(BAD_SCRIPT);
        }
    };
    ExitCode::from(Runner::new(signals).run(&script))
}

fn prepare() -> Result<(Script, Signals)> {
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
    Ok((script, Signals::take().context("take over signals")?))
}
