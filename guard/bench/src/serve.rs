//! Runs any command under the guard, without a cluster.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use highwater_guard_abi::page::{DeviceQuota, Managed};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;

use crate::agent::{Agent, Shared};
use crate::bench::{self, CONTEXT};
use crate::volume::Volume;

/// How often the state is written.
const EVERY: Duration = Duration::from_millis(50);

/// How to run the command.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Serve {
    /// What its processes may have together on each device: bytes, or with Ki, Mi, Gi.
    #[arg(long, value_parser = size)]
    limit: u64,

    /// What they are granted at first; more when they ask. Absent: the limit.
    #[arg(long, value_parser = size)]
    granted: Option<u64>,

    /// What a context is estimated to take.
    #[arg(long, value_parser = size, default_value_t = CONTEXT)]
    context: u64,

    /// A file in which what is charged is kept, as JSON.
    #[arg(long)]
    state: Option<PathBuf>,

    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// What is charged.
#[derive(Debug, Serialize)]
struct State {
    /// By ordinal of the device: by all processes.
    charged: Vec<u64>,
    /// By process: what it charged, by ordinal of the device.
    processes: BTreeMap<u32, Vec<u64>>,
    joined: u64,
    asked: u64,
    refused: u64,
    weaknesses: u32,
}

impl State {
    fn of(shared: &Shared, devices: usize) -> Self {
        let mut processes: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for (pid, slot) in shared.slots() {
            let held = processes.entry(pid).or_insert_with(|| vec![0; devices]);
            for (device, sum) in held.iter_mut().enumerate() {
                *sum = sum.saturating_add(shared.usage.held(slot, device));
            }
        }
        Self {
            charged: (0..devices).map(|device| shared.usage.charged(device)).collect(),
            processes,
            joined: shared.joined.load(Ordering::Relaxed),
            asked: shared.asked.load(Ordering::Relaxed),
            refused: shared.refused.load(Ordering::Relaxed),
            weaknesses: shared.weaknesses.load(Ordering::Relaxed),
        }
    }

    fn write(&self, path: &Path) -> Result<()> {
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_string(self)?).with_context(|| new.display().to_string())?;
        Ok(fs::rename(new, path)?)
    }
}

/// Runs the command; its exit code is the answer.
pub(crate) fn run(serve: &Serve, library: &Path) -> Result<ExitCode> {
    let volume = Volume::new(library)?;
    let devices = bench::devices(bench::myself().env_remove("LD_PRELOAD"))?;
    let quotas: Vec<_> = devices
        .iter()
        .map(|device| DeviceQuota {
            uuid: device.uuid,
            limit: serve.limit,
            granted: serve.granted.unwrap_or(serve.limit).min(serve.limit),
            context: serve.context,
            free: u64::MAX,
            total: device.total,
            managed: Managed::Charge,
            wait_milliseconds: 1_000,
        })
        .collect();
    let agent = Agent::start(&volume.socket(), &quotas)?;
    let (program, arguments) = serve.command.split_first().context("a command is missing")?;
    let mut command = Command::new(program);
    command.args(arguments).env("LD_PRELOAD", volume.library());
    let die_with_parent = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
    // SAFETY: a system call and nothing else, in the child before it becomes the program.
    unsafe { command.pre_exec(die_with_parent) };
    let mut child = command.spawn().with_context(|| program.to_string_lossy().into_owned())?;
    let shared = agent.shared();
    let status = loop {
        if let Some(path) = &serve.state {
            State::of(shared, devices.len()).write(path)?;
        }
        if let Some(status) = child.try_wait()? {
            break status;
        }
        sleep(EVERY);
    };
    // What a process held is given back a moment after its end.
    let until = Instant::now() + Duration::from_secs(2);
    while !shared.slots().is_empty() && Instant::now() < until {
        sleep(Duration::from_millis(5));
    }
    let state = State::of(shared, devices.len());
    if let Some(path) = &serve.state {
        state.write(path)?;
    }
    eprintln!(
        "guard-bench: {} processes connected, {} refusals, at the end {} bytes charged{}",
        state.joined,
        state.refused,
        state.charged.iter().sum::<u64>(),
        if state.weaknesses == 0 { String::new() } else { format!(", weakened by {:#x}", state.weaknesses) }
    );
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// A size in bytes, or with a unit.
fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.strip_suffix('i').unwrap_or(text) {
        number if number.ends_with('K') => (number.trim_end_matches('K'), 10),
        number if number.ends_with('M') => (number.trim_end_matches('M'), 20),
        number if number.ends_with('G') => (number.trim_end_matches('G'), 30),
        number => (number, 0),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text} is no size"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_a_unit() {
        assert_eq!(size("16Gi"), Ok(16 << 30));
        assert_eq!(size("5M"), Ok(5 << 20));
        assert_eq!(size("123"), Ok(123));
        assert!(size("Gi").is_err() && size("-1").is_err() && size("99999999999Gi").is_err());
    }
}
