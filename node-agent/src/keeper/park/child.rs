//! The worker that moves memory: a child of the keeper for one way of one park. It loads the driver,
//! goes the way, tells what it came to, and ends.

use std::{
    io::stdin,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use highwater_gpu::{Checkpoint, ProcessState};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::{
    process::is_there,
    steps::{self, Act, At, Fault, Hands},
    worker::{Told, Way},
};
use crate::{
    args::Worker,
    keeper_protocol::{FrameError, Process, receive_now, send_now},
};

/// Between two looks at what another step's asker left under way.
const PAUSE: Duration = Duration::from_millis(50);
/// How long that may take in all.
const PATIENCE: Duration = Duration::from_mins(3);

/// Goes the way that the keeper says.
pub(crate) fn run(args: &Worker) -> anyhow::Result<()> {
    // A driver call may last, and then nothing here would notice that the keeper is gone.
    set_parent_process_death_signal(Some(Signal::KILL)).context("ask to die with the keeper")?;
    let keeper = stdin();
    let way = match receive_now(keeper.as_fd()) {
        Ok(frame) => frame.read::<Way>().context("read the way")?,
        Err(FrameError::Closed) => return Ok(()),
        Err(error) => bail!("standard input is no keeper: {error}"),
    };
    let told = match Checkpoint::open(args.libraries.cuda_library.as_deref()) {
        Ok(driver) => {
            let until = Instant::now() + PATIENCE;
            let lock = Duration::from_millis(way.lock_milliseconds.into());
            let mut hands = Real { driver, processes: &way.processes, lock, until };
            let steps::Outcome { place, message } = steps::go(way.aim, way.processes.len(), &mut hands);
            Told { place: Some(place), message, unable: false }
        }
        Err(error) => Told { place: None, message: Some(error.to_string()), unable: error.is_final() },
    };
    Ok(send_now(keeper.as_fd(), &told, &[])?)
}

/// The driver's processes.
struct Real<'a> {
    driver: Checkpoint,
    processes: &'a [Process],
    lock: Duration,
    until: Instant,
}

impl Hands for Real<'_> {
    fn look(&mut self) -> Result<Vec<At>, String> {
        let at = self.processes.iter().map(|process| {
            if !is_there(*process) {
                return Ok(At::Gone);
            }
            match self.driver.state(process.pid) {
                Ok(ProcessState::Running) => Ok(At::Running),
                Ok(ProcessState::Locked) => Ok(At::Locked),
                Ok(ProcessState::Checkpointed) => Ok(At::Checkpointed),
                Ok(ProcessState::Failed) => Ok(At::Failed),
                Ok(ProcessState::Moving) => Ok(At::Moving),
                // It ended just now.
                Err(_) if !is_there(*process) => Ok(At::Gone),
                Err(error) => Err(error.to_string()),
            }
        });
        at.collect()
    }

    fn act(&mut self, place: usize, act: Act) -> Result<(), Fault> {
        let Some(process) = self.processes.get(place).filter(|process| is_there(**process)) else {
            // The next look shows it.
            return Ok(());
        };
        let done = match act {
            Act::Lock => self.driver.lock(process.pid, self.lock),
            Act::Checkpoint => self.driver.checkpoint(process.pid),
            Act::Restore => self.driver.restore(process.pid),
            Act::Unlock => self.driver.unlock(process.pid),
        };
        done.map_err(|error| {
            let elsewhere = error.other_state();
            let message = if error.timed_out() {
                format!("process {} did not come to rest within {} ms", process.pid, self.lock.as_millis())
            } else {
                error.to_string()
            };
            Fault { message, elsewhere }
        })
    }

    fn wait(&mut self) -> bool {
        std::thread::sleep(PAUSE);
        Instant::now() < self.until
    }
}
