//! What the repository generates from its code: `cargo xtask generate` writes it, `cargo xtask
//! check` fails if anything committed differs or contradicts it.

mod alerts;
mod api_reference;
mod artefacts;
mod charts;
mod crds;
mod dashboard;
mod documents;
mod examples;
mod metrics;
mod schema;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// Generates and checks what is derived from the code.
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write every generated file.
    Generate,
    /// Fail if a generated file is not current, or if charts, alerts, metrics or examples
    /// contradict the code. Uses `helm` (or $HELM) and `promtool` where they are installed.
    Check,
}

fn main() -> ExitCode {
    let done = repository_root().and_then(|root| match Args::parse().command {
        Command::Generate => artefacts::write(&root).map(|()| true),
        Command::Check => Ok(check(&root)),
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Looks at one thing; gives one message for each fault.
type Check = fn(&Path) -> Result<Vec<String>>;

/// Runs every check, so that one run tells everything that is wrong. True if nothing is.
fn check(root: &Path) -> bool {
    let checks: [(&str, Check); 8] = [
        ("generated files", artefacts::check),
        ("API schema", crds::check),
        ("metrics", metrics::check),
        ("dashboard", dashboard::check),
        ("alerts", alerts::check),
        ("examples", examples::check),
        ("charts", charts::check),
        ("documents", documents::check),
    ];
    let mut all_well = true;
    for (name, run) in checks {
        let problems = run(root).unwrap_or_else(|error| vec![format!("{error:#}")]);
        if problems.is_empty() {
            println!("ok      {name}");
        } else {
            all_well = false;
            println!("FAILED  {name}");
            for problem in problems {
                println!("        {}", problem.replace('\n', "\n        "));
            }
        }
    }
    all_well
}

/// The folder that holds the workspace.
fn repository_root() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().map(Path::to_path_buf).context("xtask has no parent folder")
}
