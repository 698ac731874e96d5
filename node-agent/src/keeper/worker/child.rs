//! The worker's own side: loads the driver, makes memory as long as enough stays free, and passes
//! each descriptor to the keeper.
//!
//! The keeper's end of the connection is standard input. When it closes, the worker ends.

use std::{
    io::{Stdin, stdin},
    os::fd::{AsFd, BorrowedFd},
};

use anyhow::{Context, bail};
use highwater_gpu::{Ballast, Device, Driver};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Signal, set_parent_process_death_signal},
};

use super::{News, Order};
use crate::{
    args::Worker,
    keeper_protocol::{End, FrameError, receive_now, send_now},
};

/// How much is made between two looks at what is free: other processes allocate meanwhile.
const STEP_BYTES: u64 = 8 << 30;
/// As [`STEP_BYTES`], in chunks.
const STEP_CHUNKS: usize = 32;

/// Makes memory until the keeper is gone.
pub(crate) fn run(args: &Worker) -> anyhow::Result<()> {
    // A driver call may hang, and then nothing here would notice that the keeper is gone.
    set_parent_process_death_signal(Some(Signal::KILL)).context("ask to die with the keeper")?;
    let keeper = stdin();
    let mut devices = None;
    loop {
        let order = match receive_now(keeper.as_fd()) {
            Ok(frame) => frame.read::<Order>().context("read an order")?,
            Err(FrameError::Closed) => return Ok(()),
            Err(error) => bail!("standard input is no keeper: {error}"),
        };
        let Order::Make { chunks, keep_free } = order else { continue };
        let device = match &mut devices {
            Some(device) => device,
            None => match Opened::open(args) {
                Ok(opened) => devices.insert(opened),
                Err(error) => {
                    // The next worker tries again, with whatever libraries there are by then.
                    let ended = ended(End::Failed, Some(format!("{error:#}")), None);
                    return Ok(send_now(keeper.as_fd(), &ended, &[])?);
                }
            },
        };
        let ended = device.make(&keeper, chunks, keep_free)?;
        send_now(keeper.as_fd(), &ended, &[])?;
    }
}

fn ended(end: End, message: Option<String>, free: Option<u64>) -> News {
    News::Ended { end, message, free }
}

/// The device, open in both libraries.
struct Opened {
    ballast: Ballast,
    driver: Driver,
    device: Device,
}

impl Opened {
    fn open(args: &Worker) -> anyhow::Result<Self> {
        let driver = Driver::open(args.libraries.driver_library.as_deref())?;
        let ballast = Ballast::open(args.libraries.cuda_library.as_deref(), &args.device)?;
        Ok(Self { ballast, driver, device: Device::new(args.device.as_str()) })
    }

    /// Makes chunks step by step. Fails only if the keeper is gone.
    fn make(&mut self, keeper: &Stdin, chunks: Vec<(u64, u32)>, keep_free: u64) -> anyhow::Result<News> {
        let mut wanted =
            chunks.into_iter().flat_map(|(size, count)| (0..count).map(move |_| size)).peekable();
        loop {
            let reading = self.driver.sample(&mut self.device);
            let Some(free) = reading.free else {
                let why = reading.errors.first().map(ToString::to_string);
                let why = why.unwrap_or_else(|| "the driver does not say".to_owned());
                return Ok(ended(End::Failed, Some(format!("how much is free: {why}")), None));
            };
            // Looked at after the reading: what a release makes free from now on is not ours.
            if speaks(keeper.as_fd())? {
                return Ok(ended(End::Interrupted, None, Some(free)));
            }
            let room = free.saturating_sub(keep_free);
            let step = self.step(keeper, &mut wanted, room.min(STEP_BYTES))?;
            let left = free.saturating_sub(step.bytes);
            if let Some((end, message)) = step.end {
                return Ok(ended(end, message, Some(left)));
            }
            match wanted.peek() {
                None => return Ok(ended(End::Complete, None, Some(left))),
                Some(_) if step.bytes == 0 => return Ok(ended(End::KeepFree, None, Some(free))),
                Some(_) => {}
            }
        }
    }

    /// Makes chunks of at most `room` bytes together, and passes them on.
    fn step(
        &self,
        keeper: &Stdin,
        wanted: &mut std::iter::Peekable<impl Iterator<Item = u64>>,
        room: u64,
    ) -> anyhow::Result<Step> {
        let (mut sizes, mut descriptors) = (Vec::new(), Vec::new());
        let mut step = Step { bytes: 0, end: None };
        while sizes.len() < STEP_CHUNKS {
            let fits = |size: &u64| step.bytes.saturating_add(*size) <= room;
            let Some(size) = wanted.next_if(fits) else { break };
            if speaks(keeper.as_fd())? {
                step.end = Some((End::Interrupted, None));
                break;
            }
            match self.ballast.create(size) {
                Ok(descriptor) => descriptors.push(descriptor),
                Err(error) if error.out_of_memory() => {
                    step.end = Some((End::Refused, Some(error.to_string())));
                    break;
                }
                Err(error) => {
                    step.end = Some((End::Failed, Some(error.to_string())));
                    break;
                }
            }
            sizes.push(size);
            step.bytes = step.bytes.saturating_add(size);
        }
        if !sizes.is_empty() {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            send_now(keeper.as_fd(), &News::Made { sizes }, &borrowed)?;
        }
        Ok(step)
    }
}

/// What a step came to.
struct Step {
    bytes: u64,
    end: Option<(End, Option<String>)>,
}

/// Whether the keeper said something, or is gone.
fn speaks(keeper: BorrowedFd<'_>) -> anyhow::Result<bool> {
    let mut waiting = [PollFd::from_borrowed_fd(keeper, PollFlags::IN)];
    let none = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut waiting, Some(&none)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error).context("look for orders"),
    }
}
