//! The measurements, each with the guard and without.

use std::io::{BufRead, BufReader, PipeReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use highwater_guard_abi::page::{DeviceQuota, Managed};
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use crate::agent::Agent;
use crate::child::{self, DeviceLine, Latency, Sight, Waiting};
use crate::driver::NODES;
use crate::report::Report;
use crate::times::{Times, median, median_difference, microseconds};
use crate::volume::Volume;

const GIB: u64 = 1 << 30;

/// What a context is taken to need: as measured on an H200.
pub(crate) const CONTEXT: u64 = 518 << 20;

/// A part of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// What is added to an allocation and to a free.
    Latency,
    /// How long the wait for a grant is.
    Grants,
    /// How fast kernels and graphs are launched.
    Launches,
    /// What is added to the start of a process.
    Start,
    /// Many processes that open the driver at once.
    Storm,
    /// Many processes that start at once, up to their first memory.
    Crowd,
    /// PyTorch, by a script of its own.
    Torch,
}

/// What is measured against.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// A real driver; else one that does nothing.
    pub(crate) real: bool,
    /// The guard.
    pub(crate) library: PathBuf,
    /// The driver that does nothing.
    pub(crate) null_driver: PathBuf,
    /// The script that measures PyTorch.
    pub(crate) torch: Option<PathBuf>,
    /// Parts to measure; all if none is named.
    pub(crate) only: Vec<Part>,
}

/// Measures, and says whether every goal holds.
pub(crate) fn run(setting: &Setting) -> Result<ExitCode> {
    let bench = Bench::new(setting)?;
    let mut report = Report::new("bench-guard");
    println!(
        "{}, {} GiB; the guard is {} KiB",
        if setting.real { "the driver of this machine" } else { "a driver that does nothing" },
        bench.total / GIB,
        setting.library.metadata()?.len() >> 10,
    );
    let wanted = |part: Part| setting.only.is_empty() || setting.only.contains(&part);
    if wanted(Part::Latency) {
        bench.latency(&mut report)?;
    }
    if wanted(Part::Grants) {
        bench.grants(&mut report)?;
    }
    if wanted(Part::Launches) {
        bench.launches(&mut report)?;
    }
    if wanted(Part::Start) {
        bench.start(&mut report)?;
    }
    if wanted(Part::Storm) {
        bench.storm(&mut report, 100, if setting.real { 3 } else { 5 })?;
        bench.storm(&mut report, 300, if setting.real { 2 } else { 3 })?;
    }
    if wanted(Part::Crowd) {
        bench.crowd(&mut report, 300, if setting.real { 2 } else { 4 })?;
    }
    if let Some(script) = setting.torch.as_deref().filter(|_| wanted(Part::Torch)) {
        report.note(bench.torch(script)?);
    }
    Ok(report.finish())
}

/// Everything that programs are run with.
struct Bench {
    real: bool,
    volume: Volume,
    agent: Agent,
    total: u64,
    /// The guard where it was found, and the folder with the driver that does nothing.
    library: PathBuf,
    null: TempDir,
}

/// The devices as the driver says, asked by a program without the guard.
pub(crate) fn devices(command: &mut Command) -> Result<Vec<DeviceLine>> {
    let devices: Vec<DeviceLine> = answer(command.args(["child", "devices"]))?;
    ensure!(!devices.is_empty(), "the driver has no device");
    Ok(devices)
}

/// This program, to be run again.
pub(crate) fn myself() -> Command {
    Command::new("/proc/self/exe")
}

fn answer<T: DeserializeOwned>(command: &mut Command) -> Result<T> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "a measured program failed: {}", output.status);
    Ok(serde_json::from_slice(&output.stdout)?)
}

impl Bench {
    fn new(setting: &Setting) -> Result<Self> {
        let null = tempfile::tempdir()?;
        if !setting.real {
            let driver = &setting.null_driver;
            std::fs::copy(driver, null.path().join("libcuda.so.1"))
                .with_context(|| format!("the driver that does nothing is not at {}", driver.display()))?;
        }
        let volume = Volume::new(&setting.library)?;
        let devices = devices(&mut plain(setting.real, null.path()))?;
        let total = devices.first().map_or(0, |device| device.total);
        let quotas: Vec<_> = devices
            .iter()
            .map(|device| DeviceQuota {
                uuid: device.uuid,
                limit: device.total,
                granted: device.total,
                context: CONTEXT,
                free: u64::MAX,
                total: device.total,
                managed: Managed::Charge,
                wait_milliseconds: 1_000,
            })
            .collect();
        let agent = Agent::start(&volume.socket(), &quotas)?;
        let library = setting.library.clone();
        let bench = Self { real: setting.real, volume, agent, total, library, null };
        bench.check()?;
        Ok(bench)
    }

    /// That a program with the guard has it, and one without does not: else nothing here means
    /// anything.
    fn check(&self) -> Result<()> {
        let shared = self.agent.shared();
        let before = shared.joined.load(Ordering::Relaxed);
        let without: Sight = answer(self.program(false).args(["child", "look"]))?;
        ensure!(!without.guarded, "something stands before the driver without the guard");
        ensure!(shared.joined.load(Ordering::Relaxed) == before, "a program without the guard connected");
        let limit = self.total / 2;
        let quota = shared.quota.device(0).context("no device")?;
        shared.quota.set(0, &DeviceQuota { limit, ..quota });
        let with: Sight = answer(self.program(true).args(["child", "look"]))?;
        shared.quota.set(0, &quota);
        ensure!(with.guarded && with.total == limit, "the guard does not stand before the driver: {with:?}");
        ensure!(shared.joined.load(Ordering::Relaxed) > before, "a program with the guard did not connect");
        Ok(())
    }

    /// This program with the guard or without.
    fn program(&self, guarded: bool) -> Command {
        let mut command = plain(self.real, self.null.path());
        if guarded {
            command.env("LD_PRELOAD", self.volume.library());
        }
        command
    }

    fn latency(&self, report: &mut Report) -> Result<()> {
        let measure = |bytes: u64, held: usize| -> Result<Latency> {
            let pairs = if self.real { 20_000 } else { 100_000 };
            let mut command = self.program(true);
            command.args(["child", "latency"]);
            command.args(["--pairs", &pairs.to_string(), "--bytes", &bytes.to_string()]);
            let latency: Latency = answer(command.args(["--held", &held.to_string()]))?;
            ensure!(latency.guarded, "the guard was not there");
            Ok(latency)
        };
        let few = measure(16 << 10, 10)?;
        let many = measure(16 << 10, 100_000)?;
        for (what, cost) in [("an allocation", &few.allocate), ("a free", &few.free)] {
            report.at_most(&format!("added to {what}, median"), cost.added_median, 1.0, "us");
            report.at_most(&format!("added to {what}, p99"), cost.added_p99, 5.0, "us");
        }
        let (one, other) = (&few.free, &many.free);
        report.at_most("added to a free, 100,000 held, median", other.added_median, 1.0, "us");
        report.at_most("added to a free, 100,000 held, p99", other.added_p99, 5.0, "us");
        let growth = other.added_median - one.added_median;
        // What a larger table costs the processor's caches.
        report.at_most("what 100,000 held add to that of 10, median", growth, 0.5, "us");
        println!(
            "  the driver itself: {:.2} us to allocate, {:.2} us to free (medians)",
            few.allocate.own_median, few.free.own_median
        );
        Ok(())
    }

    fn grants(&self, report: &mut Report) -> Result<()> {
        let rounds = if self.real { (self.total / GIB).saturating_mul(7) / 10 } else { 100 };
        let passes = if self.real { 4_u32 } else { 10 };
        let shared = self.agent.shared();
        let before = shared.asked.load(Ordering::Relaxed);
        let quota = shared.quota.device(0).context("no device")?;
        shared.tight.store(true, Ordering::Relaxed);
        shared.quota.set_granted(0, 0);
        let mut talk = Talk::start(self.program(true).args(["child", "grants"]).args([
            "--passes",
            &passes.to_string(),
            "--rounds",
            &rounds.to_string(),
            "--bytes",
            &GIB.to_string(),
        ]))?;
        let waiting: Waiting = loop {
            let line = talk.hear()?;
            if line != "pass" {
                break serde_json::from_str(&line)?;
            }
            // All is given back: what it may have is what it has.
            shared.quota.set_granted(0, shared.usage.charged(0));
            talk.say("go")?;
        };
        talk.end()?;
        shared.tight.store(false, Ordering::Relaxed);
        shared.quota.set(0, &quota);
        let asked = shared.asked.load(Ordering::Relaxed) - before;
        ensure!(
            asked >= u64::try_from(waiting.rounds)?,
            "{} allocations of which {asked} asked: they were not waits",
            waiting.rounds
        );
        report.at_most("wait for a grant of 1 GiB, p99", waiting.p99 / 1e3, 3.0, "ms");
        println!(
            "  {} waits: median {:.3} ms; the driver itself takes {:.3} ms for 1 GiB",
            waiting.rounds,
            waiting.median / 1e3,
            waiting.own_median / 1e3
        );
        Ok(())
    }

    fn launches(&self, report: &mut Report) -> Result<()> {
        let mut talks =
            [Talk::start(self.program(false).args(["child", "launches"]))?, self.guarded_launches()?];
        for talk in &mut talks {
            ensure!(talk.hear()? == "ready", "a measured program did not begin");
        }
        let [mut without, mut with] = talks;
        for (what, times) in [("kernel", 4_000_u32), ("graph", 1_000)] {
            let order = format!("{what} {times}");
            let measure = |talk: &mut Talk| -> Result<u64> {
                talk.say(&order)?;
                Ok(talk.hear()?.parse()?)
            };
            let (mut with_times, mut without_times) = (Times::default(), Times::default());
            for pair in 0..110 {
                let (one, other);
                if pair % 2 == 0 {
                    one = measure(&mut with)?;
                    other = measure(&mut without)?;
                } else {
                    other = measure(&mut without)?;
                    one = measure(&mut with)?;
                }
                // The first are for warming up.
                if pair >= 10 {
                    with_times.push(Duration::from_nanos(one));
                    without_times.push(Duration::from_nanos(other));
                }
            }
            let each = |times_in: &Times| times_in.median() / f64::from(times);
            if self.real {
                let pairs = with_times.iter().zip(without_times.iter());
                let ratios = pairs.map(|(one, other)| microseconds(other) / microseconds(one));
                report.at_least(
                    &format!("{what} launches a second, with / without"),
                    median(ratios),
                    0.995,
                    "",
                );
            } else {
                let added = median_difference(&with_times, &without_times) / f64::from(times);
                // 0.5 % of a launch that takes 4 us, or of a graph that takes 10.
                let goal = if what == "kernel" { 0.02 } else { 0.05 };
                report.at_most(&format!("added to a {what} launch, median"), added, goal, "us");
            }
            println!(
                "  a {what} launch takes {:.3} us with, {:.3} us without",
                each(&with_times),
                each(&without_times)
            );
        }
        println!("  (a graph has {NODES} kernels)");
        with.end()?;
        without.end()
    }

    fn guarded_launches(&self) -> Result<Talk> {
        Talk::start(self.program(true).args(["child", "launches"]))
    }

    fn start(&self, report: &mut Report) -> Result<()> {
        let pairs = if self.real { 40 } else { 200 };
        for (what, name) in [("a process without CUDA", "nothing"), ("a process up to cuInit", "start")] {
            let run = |guarded: bool| -> Result<Duration> {
                let mut command = self.program(guarded);
                command.args(["child", name]).stdin(Stdio::null());
                let begun = Instant::now();
                let status = command.status()?;
                ensure!(status.success(), "a measured program failed: {status}");
                Ok(begun.elapsed())
            };
            let (mut with, mut without) = (Times::default(), Times::default());
            for pair in 0..pairs + 4 {
                let first = run(pair % 2 == 0)?;
                let second = run(pair % 2 == 1)?;
                let (one, other) = if pair % 2 == 0 { (first, second) } else { (second, first) };
                if pair >= 4 {
                    with.push(one);
                    without.push(other);
                }
            }
            let added = median_difference(&with, &without) / 1e3;
            report.at_most(&format!("added to {what}, median"), added, 1.0, "ms");
            println!("  without the guard it takes {:.2} ms", without.median() / 1e3);
        }
        Ok(())
    }

    /// So many processes that open the driver at once.
    fn storm(&self, report: &mut Report, processes: usize, rounds: usize) -> Result<()> {
        let (mut with, mut without) = (Times::default(), Times::default());
        for round in 0..rounds {
            for turn in 0..2 {
                let guarded = (round + turn) % 2 == 0;
                let times = self.storm_once(guarded, processes)?;
                if guarded { with.extend(&times) } else { without.extend(&times) }
            }
        }
        let (one, other) = (with.quantile(990), without.quantile(990));
        let what = format!("cuInit of {processes} processes at once, p99");
        if self.real {
            report.at_most(&format!("{what}, with / without"), one / other, 1.1, "");
        } else {
            // The driver takes no time here: what is left is the guard's connection, one after the
            // other.
            let goal = f64::from(u32::try_from(processes)?) * 0.5;
            report.at_most(&format!("{what}, added"), (one - other) / 1e3, goal, "ms");
        }
        println!(
            "  {} with: median {:.2} ms, p99 {:.2} ms; {} without: median {:.2} ms, p99 {:.2} ms",
            with.len(),
            with.median() / 1e3,
            one / 1e3,
            without.len(),
            without.median() / 1e3,
            other / 1e3
        );
        Ok(())
    }

    fn storm_once(&self, guarded: bool, processes: usize) -> Result<Times> {
        let before = self.agent.shared().joined.load(Ordering::Relaxed);
        let (gate, hold) = std::io::pipe()?;
        let (answers, tell) = std::io::pipe()?;
        let mut children = Vec::new();
        for _ in 0..processes {
            let mut command = self.program(guarded);
            command.args(["child", "storm"]).stdin(gate.try_clone()?).stdout(tell.try_clone()?);
            children.push(Running(command.spawn()?));
        }
        drop((gate, tell));
        let mut lines = BufReader::new(answers);
        for _ in 0..processes {
            ensure!(next(&mut lines)? == "ready", "a measured program did not begin");
        }
        // Their input ends.
        drop(hold);
        let mut times = Times::default();
        for _ in 0..processes {
            times.push(Duration::from_nanos(next(&mut lines)?.parse()?));
        }
        for child in &mut children {
            child.succeeds()?;
        }
        self.check_joined(before, guarded, processes)?;
        Ok(times)
    }

    /// That all of these programs have connected since `before`, or without the guard none.
    fn check_joined(&self, before: u64, guarded: bool, processes: usize) -> Result<()> {
        let joined = self.agent.shared().joined.load(Ordering::Relaxed) - before;
        ensure!(
            joined >= if guarded { u64::try_from(processes)? } else { 0 } && (guarded || joined == 0),
            "{joined} of {processes} connected"
        );
        Ok(())
    }

    /// So many processes that are started at once, each up to its first memory.
    fn crowd(&self, report: &mut Report, processes: usize, rounds: usize) -> Result<()> {
        let (mut with, mut without) = (Times::default(), Times::default());
        for round in 0..rounds {
            for turn in 0..2 {
                let guarded = (round + turn) % 2 == 0;
                let times = self.crowd_once(guarded, processes)?;
                if guarded { with.extend(&times) } else { without.extend(&times) }
            }
        }
        let what = format!("first memory of {processes} starts at once");
        // Where the driver takes no time, a start takes a few milliseconds, and as many again to be let in
        // one after the other: there it is only to be seen when that becomes several times as much.
        let goal = if self.real { 1.1 } else { 4.0 };
        for (name, per_mille) in [("median", 500), ("p99", 990)] {
            let ratio = with.quantile(per_mille) / without.quantile(per_mille);
            report.at_most(&format!("{what}, {name}, with / without"), ratio, goal, "");
        }
        println!(
            "  {} with: median {:.2} ms, p99 {:.2} ms; {} without: median {:.2} ms, p99 {:.2} ms",
            with.len(),
            with.median() / 1e3,
            with.quantile(990) / 1e3,
            without.len(),
            without.median() / 1e3,
            without.quantile(990) / 1e3
        );
        Ok(())
    }

    fn crowd_once(&self, guarded: bool, processes: usize) -> Result<Times> {
        let shared = self.agent.shared();
        let before = shared.joined.load(Ordering::Relaxed);
        let quota = shared.quota.device(0).context("no device")?;
        // As in a pod that has just been made: the first ones ask for what they may have.
        shared.quota.set_granted(0, 0);
        let (gate, hold) = std::io::pipe()?;
        let (answers, tell) = std::io::pipe()?;
        let mut children = Vec::new();
        for _ in 0..processes {
            let mut command = self.program(guarded);
            command.args(["child", "first", "--since", &child::now().to_string()]);
            command.stdin(gate.try_clone()?).stdout(tell.try_clone()?);
            children.push(Running(command.spawn()?));
        }
        drop((gate, tell));
        let mut lines = BufReader::new(answers);
        let mut times = Times::default();
        for _ in 0..processes {
            let line = next(&mut lines)?;
            let took = line.parse().with_context(|| format!("a measured program failed: {line}"))?;
            times.push(Duration::from_nanos(took));
        }
        // All of them hold it now, and it is in the pod's sum.
        let expected = if guarded { u64::try_from(processes * child::FIRST)? } else { 0 };
        let charged = shared.usage.charged(0);
        ensure!(charged == expected, "{charged} bytes are charged, not {expected}");
        drop(hold);
        for child in &mut children {
            child.succeeds()?;
        }
        self.check_joined(before, guarded, processes)?;
        // What they held is given back a moment after their end.
        let until = Instant::now() + Duration::from_secs(5);
        while !shared.slots().is_empty() {
            ensure!(Instant::now() < until, "processes that have ended are not forgotten");
            std::thread::sleep(Duration::from_millis(1));
        }
        shared.quota.set(0, &quota);
        Ok(times)
    }

    /// The script runs itself with the guard and without, and says whether its goals hold.
    fn torch(&self, script: &Path) -> Result<bool> {
        let mut command = Command::new("python3");
        command.arg(script).arg("--guard-bench").arg(std::env::current_exe()?);
        let status = command.arg("--library").arg(&self.library).status().context("python3")?;
        Ok(status.success())
    }
}

/// This program without the guard.
fn plain(real: bool, null: &Path) -> Command {
    let mut command = myself();
    if !real {
        command.env("GPUSIM_NULL", "1").env("LD_LIBRARY_PATH", null);
    }
    command.env_remove("LD_PRELOAD");
    command
}

fn next(lines: &mut BufReader<PipeReader>) -> Result<String> {
    let mut line = String::new();
    ensure!(lines.read_line(&mut line)? > 0, "the measured programs ended early");
    Ok(line.trim().to_owned())
}

/// A process that is ended with its owner.
struct Running(Child);

impl Running {
    /// Waits for its end, which must be a good one.
    fn succeeds(&mut self) -> Result<()> {
        let status = self.0.wait()?;
        ensure!(status.success(), "a measured program failed: {status}");
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A measured program that is told what to do.
struct Talk {
    child: Running,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Talk {
    fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let Some(output) = child.stdout.take() else { bail!("no output") };
        Ok(Self { child: Running(child), input, output: BufReader::new(output) })
    }

    fn say(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("no input")?;
        input.write_all(line.as_bytes())?;
        input.write_all(b"\n")?;
        Ok(())
    }

    fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "a measured program ended early");
        Ok(line.trim().to_owned())
    }

    fn end(mut self) -> Result<()> {
        self.input = None;
        self.output.read_to_end(&mut Vec::new())?;
        self.child.succeeds()
    }
}
