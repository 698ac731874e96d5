//! A child process that does not outlive this one's interest in it.

use std::{
    fs::read_to_string,
    process::{Child, Command},
    time::Duration,
};

use anyhow::{Context, Result};

/// Killed when dropped.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        command.spawn().map(Self).with_context(|| format!("start {}", command.get_program().display()))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Processor time of all threads so far.
    pub(crate) fn cpu_time(&self) -> Result<Duration> {
        let stat = read_to_string(format!("/proc/{}/stat", self.pid()))?;
        let (_, fields) = stat.rsplit_once(") ").context("no name in stat")?;
        let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<u64>).sum::<Result<u64, _>>()?;
        Ok(Duration::from_millis(10 * ticks)) // Linux counts 100 of them a second for users
    }

    /// Resident memory.
    pub(crate) fn resident_bytes(&self) -> Result<u64> {
        let status = read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line =
            status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS in status")?;
        let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kibibytes << 10)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
