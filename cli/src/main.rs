//! `kubectl highwater`: Highwater from the command line. It writes nothing to any cluster.

mod args;
mod simulate;

use std::process::ExitCode;

use clap::Parser;

/// Exit status where the input, or the command line, has to be changed.
const BAD_INPUT: u8 = 2;

fn main() -> ExitCode {
    let args = args::Args::parse();
    let done = match &args.command {
        args::Command::Simulate(args) => simulate::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads the decisions has seen enough: `... | head`.
        Err(simulate::Error::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error @ simulate::Error::Output(_)) => {
            simulate::say(&format!("error: {error}"));
            ExitCode::FAILURE
        }
        Err(error @ simulate::Error::Input(_)) => {
            simulate::say(&format!("error: {error}"));
            ExitCode::from(BAD_INPUT)
        }
    }
}
