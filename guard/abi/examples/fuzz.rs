//! Feeds the fuzz targets with pseudo-random inputs until a number of inputs or a time is reached.
//!
//! ```text
//! fuzz [--inputs N] [--seconds S] [--seed X] [--target NAME]
//! fuzz --target NAME --hex BYTES      # one input again, as a failure prints it
//! ```
//!
//! `--inputs` is for each target. Ends with 1 if a target panicked, 2 if the arguments are wrong.

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use highwater_guard_abi::fuzz::{Inputs, TARGETS, Target};

struct Arguments {
    inputs: u64,
    time: Duration,
    seed: u64,
    target: Option<String>,
    hex: Option<Vec<u8>>,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut arguments =
        Arguments { inputs: 10_000_000, time: Duration::from_hours(1), seed: 1, target: None, hex: None };
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{word} needs a number, not {value}"));
        match word.as_str() {
            "--inputs" => arguments.inputs = number()?,
            "--seconds" => arguments.time = Duration::from_secs(number()?),
            "--seed" => arguments.seed = number()?,
            "--target" => arguments.target = Some(value),
            "--hex" => arguments.hex = Some(bytes(&value).ok_or("--hex needs pairs of hex digits")?),
            _ => return Err(format!("{word} is not known")),
        }
    }
    Ok(arguments)
}

fn bytes(hex: &str) -> Option<Vec<u8>> {
    let starts = (0..hex.len()).step_by(2);
    starts.map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Runs one target; false if it panicked.
fn fuzz(name: &str, target: Target, arguments: &Arguments) -> bool {
    let start = Instant::now();
    let mut inputs = Inputs::new(arguments.seed);
    let mut done = 0_u64;
    while done < arguments.inputs && (!done.is_multiple_of(1024) || start.elapsed() < arguments.time) {
        let input = inputs.next_input();
        if catch_unwind(AssertUnwindSafe(|| target(input))).is_err() {
            println!("{name}: failed at input {done} of seed {}: {}", arguments.seed, hex(input));
            return false;
        }
        done += 1;
    }
    println!("{name}: {done} inputs in {:.1} s, nothing found", start.elapsed().as_secs_f64());
    true
}

fn main() -> ExitCode {
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    let wanted = |name: &str| arguments.target.as_deref().is_none_or(|target| target == name);
    let targets: Vec<_> = TARGETS.iter().filter(|(name, _)| wanted(name)).collect();
    if targets.is_empty() {
        let names: Vec<_> = TARGETS.iter().map(|(name, _)| *name).collect();
        eprintln!("there is no such target; there are: {}", names.join(", "));
        return ExitCode::from(2);
    }
    if let Some(input) = &arguments.hex {
        for (name, target) in targets {
            target(input);
            println!("{name}: nothing found");
        }
        return ExitCode::SUCCESS;
    }
    // One thread a target: each has pages of its own.
    let found_nothing = std::thread::scope(|scope| {
        let run = |&&(name, target): &&(&'static str, Target)| {
            let arguments = &arguments;
            scope.spawn(move || fuzz(name, target, arguments))
        };
        let threads: Vec<_> = targets.iter().map(run).collect();
        threads.into_iter().all(|thread| thread.join().unwrap_or(false))
    });
    if found_nothing { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
