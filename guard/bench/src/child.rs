//! The programs that are measured: this very program, run with the guard and without.

use std::io::{self, BufRead, Read, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Subcommand;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::driver::{Driver, Memory, Way};
use crate::times::{Times, median_difference};

/// What a measured program does. Not for people.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Program {
    /// Says which devices there are.
    Devices,
    /// Says how the driver looks from here.
    Look,
    /// Allocates and frees with the guard and past it, in turn.
    Latency {
        /// Pairs that are measured.
        #[arg(long)]
        pairs: usize,
        /// Size of each allocation.
        #[arg(long)]
        bytes: usize,
        /// Allocations that are held meanwhile.
        #[arg(long)]
        held: usize,
    },
    /// Allocates what was not granted yet.
    Grants {
        /// How often it gives everything back and begins anew.
        #[arg(long)]
        passes: usize,
        /// Allocations of a pass.
        #[arg(long)]
        rounds: usize,
        /// Size of each.
        #[arg(long)]
        bytes: usize,
    },
    /// Launches kernels and graphs as it is told.
    Launches,
    /// Opens the driver.
    Start,
    /// Does not even load the driver.
    Nothing,
    /// Opens the driver when its input ends.
    Storm,
    /// Takes memory as soon as it can, and holds it until its input ends.
    First {
        /// When it was started, by [`now`].
        #[arg(long)]
        since: u64,
    },
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceLine {
    pub(crate) uuid: [u8; 16],
    pub(crate) total: u64,
}

/// How the driver looks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sight {
    pub(crate) guarded: bool,
    pub(crate) total: u64,
}

/// What a call costs with the guard and past it, in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cost {
    /// Median of the differences between calls that were made in turn.
    pub(crate) added_median: f64,
    /// The difference of the 99th percentiles.
    pub(crate) added_p99: f64,
    /// The driver's own median.
    pub(crate) own_median: f64,
}

/// What allocating and freeing cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) guarded: bool,
    pub(crate) allocate: Cost,
    pub(crate) free: Cost,
}

/// What waiting for grants cost, in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Waiting {
    pub(crate) rounds: usize,
    pub(crate) median: f64,
    pub(crate) p99: f64,
    /// The driver's own median for such an allocation.
    pub(crate) own_median: f64,
}

impl Program {
    /// Runs it; what it found goes to standard output.
    pub(crate) fn run(&self) -> Result<()> {
        match *self {
            Self::Devices => {
                let driver = Driver::open()?;
                driver.init()?;
                let lines = driver.devices()?.into_iter();
                let lines = lines.map(|device| DeviceLine { uuid: device.uuid, total: device.total });
                say(&lines.collect::<Vec<_>>())
            }
            Self::Look => {
                let driver = opened()?;
                say(&Sight { guarded: driver.is_guarded()?, total: driver.total()? })
            }
            Self::Latency { pairs, bytes, held } => latency(pairs, bytes, held),
            Self::Grants { passes, rounds, bytes } => grants(passes, rounds, bytes),
            Self::Launches => launches(),
            Self::Start => Driver::open()?.init(),
            Self::Nothing => Ok(()),
            Self::Storm => storm(),
            Self::First { since } => first(since),
        }
    }
}

fn say(value: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string(value)?);
    Ok(())
}

/// The driver, opened, with its own functions at hand.
fn opened() -> Result<Driver> {
    let mut driver = Driver::open()?;
    driver.look_up(&[c"cuMemAlloc_v2", c"cuMemFree_v2"])?;
    driver.init()?;
    driver.context()?;
    Ok(driver)
}

fn refused(code: u32) -> anyhow::Error {
    anyhow!("CUDA error {code}")
}

/// Numbers that look random and are the same in every run.
struct Places(u64);

impl Places {
    fn below(&mut self, bound: usize) -> usize {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(bound.max(1)).unwrap_or(1)).unwrap_or(0)
    }
}

/// Gives back one of what is held, and takes it anew: how long each took.
fn exchange(memory: Memory, held: &mut [u64], at: usize, bytes: usize) -> Result<(Duration, Duration)> {
    let place = held.get_mut(at).context("nothing is held")?;
    let begun = Instant::now();
    let freed = memory.free(*place);
    let between = Instant::now();
    let allocated = memory.allocate(bytes);
    let done = Instant::now();
    freed.map_err(refused).context("cuMemFree_v2")?;
    *place = allocated.map_err(refused).context("cuMemAlloc_v2")?;
    Ok((between - begun, done - between))
}

fn latency(pairs: usize, bytes: usize, held: usize) -> Result<()> {
    let driver = opened()?;
    let (guarded, own) = (driver.memory(Way::Found)?, driver.memory(Way::Own)?);
    let fill = |memory: Memory| -> Result<Vec<u64>> {
        (0..held).map(|_| memory.allocate(bytes).map_err(refused).context("cuMemAlloc_v2")).collect()
    };
    let (mut with, mut without) = (fill(guarded)?, fill(own)?);
    let mut places = Places(88_172_645_463_325_252);
    let mut times = [const { Times::new() }; 4];
    let warm = pairs / 10;
    for pair in 0..warm + pairs {
        let at = places.below(held);
        // Who comes first alternates too.
        let (one, other);
        if pair % 2 == 0 {
            one = exchange(guarded, &mut with, at, bytes)?;
            other = exchange(own, &mut without, at, bytes)?;
        } else {
            other = exchange(own, &mut without, at, bytes)?;
            one = exchange(guarded, &mut with, at, bytes)?;
        }
        if pair >= warm {
            for (times, time) in times.iter_mut().zip([one.0, one.1, other.0, other.1]) {
                times.push(time);
            }
        }
    }
    let [free, allocate, own_free, own_allocate] = times;
    let cost = |with: &Times, without: &Times| Cost {
        added_median: median_difference(with, without),
        added_p99: with.quantile(990) - without.quantile(990),
        own_median: without.median(),
    };
    say(&Latency {
        guarded: driver.is_guarded()?,
        allocate: cost(&allocate, &own_allocate),
        free: cost(&free, &own_free),
    })
}

/// Tells the parent where this is, and waits until that has said something.
fn in_step(input: &mut impl BufRead) -> Result<String> {
    let mut line = String::new();
    ensure!(input.read_line(&mut line)? > 0, "nobody says how to go on");
    Ok(line.trim().to_owned())
}

fn grants(passes: usize, rounds: usize, bytes: usize) -> Result<()> {
    let driver = opened()?;
    let (guarded, own) = (driver.memory(Way::Found)?, driver.memory(Way::Own)?);
    let mut input = io::stdin().lock();
    let (mut waited, mut alone) = (Times::default(), Times::default());
    for _ in 0..passes {
        println!("pass");
        in_step(&mut input)?;
        let mut held = Vec::new();
        for _ in 0..rounds {
            let begun = Instant::now();
            let address = own.allocate(bytes).map_err(refused).context("the driver's own allocation")?;
            alone.push(begun.elapsed());
            own.free(address).map_err(refused)?;
            let begun = Instant::now();
            let allocated = guarded.allocate(bytes);
            let took = begun.elapsed();
            held.push(allocated.map_err(refused).context("an allocation that is to be granted")?);
            waited.push(took);
        }
        for address in held {
            guarded.free(address).map_err(refused)?;
        }
    }
    let own_median = alone.median();
    say(&Waiting {
        rounds: waited.len(),
        median: waited.median() - own_median,
        p99: waited.quantile(990) - own_median,
        own_median,
    })
}

fn launches() -> Result<()> {
    let driver = opened()?;
    let kernels = driver.kernels()?;
    println!("ready");
    for line in io::stdin().lock().lines() {
        let line = line?;
        let (what, times) = line.split_once(' ').context("what, and how often")?;
        let times: usize = times.parse()?;
        let begun = Instant::now();
        match what {
            "kernel" => kernels.launch(times)?,
            _ => driver.launch_graph(&kernels, times)?,
        }
        driver.synchronize()?;
        println!("{}", begun.elapsed().as_nanos());
    }
    Ok(())
}

fn storm() -> Result<()> {
    let driver = Driver::open()?;
    let mut out = io::stdout().lock();
    out.write_all(b"ready\n")?;
    out.flush()?;
    // Ends for all at once.
    io::stdin().lock().read_to_end(&mut Vec::new())?;
    let begun = Instant::now();
    driver.init()?;
    let took = format!("{}\n", begun.elapsed().as_nanos());
    out.write_all(took.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// What [`Program::First`] takes.
pub(crate) const FIRST: usize = 2 << 20;

/// The clock that all processes of the machine share, in nanoseconds.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(now.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(now.tv_nsec))
}

fn first(since: u64) -> Result<()> {
    let take = || -> Result<u64> {
        let driver = Driver::open()?;
        driver.init()?;
        driver.create(FIRST)?;
        Ok(now().saturating_sub(since))
    };
    let taken = take();
    // The others still wait, so that nobody would notice if this one ended without a word.
    let line = match &taken {
        Ok(nanoseconds) => format!("{nanoseconds}\n"),
        Err(error) => format!("{error:#}\n"),
    };
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes())?;
    out.flush()?;
    io::stdin().lock().read_to_end(&mut Vec::new())?;
    taken.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_reach_everywhere_and_no_further() {
        let mut places = Places(88_172_645_463_325_252);
        let mut seen = [false; 10];
        for _ in 0..1000 {
            seen[places.below(10)] = true;
        }
        assert_eq!(seen, [true; 10]);
        assert_eq!(places.below(0), 0);
    }
}
