//! From memory taken beyond the limit to the signal in the pod's volume.
//!
//! The clock starts before the memory is taken, so the wait for the next sample is counted in.

use std::{
    fs::read_to_string,
    io::Write,
    mem::MaybeUninit,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use highwater_crds::names::SIGNAL_FILE;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    fs::inotify::{self, CreateFlags, Reader, WatchFlags},
};

use crate::{
    INTERVAL,
    node::{Crosser, Node},
    workload::{GROW, SHRINK},
};

/// A transition that takes longer never comes.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a pod is doing.
#[derive(Clone, Copy)]
enum Phase {
    /// Below its limit; crosses at this time.
    Below(Instant),
    /// Crossed at this time; no signal yet.
    Crossed(Instant),
    /// Was signalled; goes back at this time.
    Above(Instant),
    /// Went back at this time; the signal still stands.
    Returned(Instant),
}

/// Makes pods cross their limits, one on each device at a time, and measures each crossing.
pub(crate) fn measure(node: &mut Node, crossings: usize) -> Result<Vec<Duration>> {
    let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let mut pauses = Pauses(0x9e37_79b9_7f4a_7c15);
    let mut pods = Vec::new();
    for crosser in &mut node.crossers {
        let watch = inotify::add_watch(&events, &crosser.volume, WatchFlags::MOVED_TO)?;
        pods.push((watch, crosser, Phase::Below(Instant::now() + pauses.next())));
    }
    let mut delays = Vec::with_capacity(crossings);
    while delays.len() < crossings {
        for (_, crosser, phase) in &mut pods {
            step(crosser, phase)?;
        }
        for (watch, at) in written(&events)? {
            let Some((_, crosser, phase)) = pods.iter_mut().find(|(own, ..)| *own == watch) else { continue };
            let normal = read_to_string(crosser.volume.join(SIGNAL_FILE))?.contains(r#""level":"Normal""#);
            match *phase {
                Phase::Crossed(since) if !normal => {
                    delays.push(at - since);
                    *phase = Phase::Above(at + pauses.next());
                }
                Phase::Returned(_) if normal => *phase = Phase::Below(at + pauses.next()),
                _ => {}
            }
        }
    }
    Ok(delays)
}

/// Does what is due.
fn step(crosser: &mut Crosser, phase: &mut Phase) -> Result<()> {
    let now = Instant::now();
    match *phase {
        Phase::Below(at) if now >= at => {
            *phase = Phase::Crossed(now);
            tell(crosser, GROW)?;
        }
        Phase::Above(at) if now >= at => {
            *phase = Phase::Returned(now);
            tell(crosser, SHRINK)?;
        }
        Phase::Crossed(since) | Phase::Returned(since) => {
            ensure!(since.elapsed() < PATIENCE, "no signal in {PATIENCE:?}: see bench-agent.log");
        }
        Phase::Below(_) | Phase::Above(_) => {}
    }
    Ok(())
}

fn tell(crosser: &mut Crosser, line: &str) -> Result<()> {
    let input = crosser.process.0.stdin.as_mut().context("the workload's input")?;
    input.write_all(line.as_bytes()).context("tell the workload")
}

/// The watches whose files were written within the next moment, and when.
fn written(events: &OwnedFd) -> Result<Vec<(i32, Instant)>> {
    const MOMENT: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let mut files = Vec::new();
    if poll(&mut [PollFd::new(events, PollFlags::IN)], Some(&MOMENT))? > 0 {
        let at = Instant::now();
        let mut room = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(events, &mut room);
        while let Ok(event) = reader.next() {
            files.push((event.wd(), at));
        }
    }
    Ok(files)
}

/// Pauses of up to two intervals, so that crossings fall anywhere between samples.
struct Pauses(u64);

impl Pauses {
    fn next(&mut self) -> Duration {
        // xorshift
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let microseconds = u64::try_from(INTERVAL.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.0 % (2 * microseconds))
    }
}
