//! How long a replay takes, and what it holds.
//!
//! One line a figure, with its goal and `ok` or `short`; the last line sums up. The exit status
//! is 0 only where every goal is reached. Takes up to 1 GB in the temporary folder.

#![allow(clippy::unwrap_used, clippy::expect_used)] // made-up input that is known to be right

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use flate2::{Compression, write::GzEncoder};

const GIB: u64 = 1 << 30;
const CAPACITY: u64 = 80 * GIB;
const SAMPLE_SECONDS: u64 = 10;

/// In which order a file holds its samples.
#[derive(Clone, Copy)]
enum Order {
    /// All pods of a moment, then those of the next.
    ByTime,
    /// One pod after the other.
    ByPod,
}

fn main() -> ExitCode {
    let folder = tempfile::tempdir().unwrap();
    let mut short = 0;
    let mut figure = |what: &str, value: String, goal: &str, reached: bool| {
        println!("{what}: {value} (goal {goal}) {}", if reached { "ok" } else { "short" });
        short += usize::from(!reached);
    };
    let seconds = |d: Duration| format!("{:.2} s", d.as_secs_f64());
    let goal = Duration::from_secs(10);

    for (what, pods, samples, order, packed) in [
        ("10 million samples, 1,000 pods by turns", 1000, 10_000, Order::ByTime, false),
        ("10 million samples, 1,000 pods in a row", 1000, 10_000, Order::ByPod, false),
        ("10 million samples, 1,000 pods in a row, packed", 1000, 10_000, Order::ByPod, true),
    ] {
        let file = write(folder.path(), pods, samples, order, packed);
        let run = Run::of(&file);
        figure(what, seconds(run.time), "<= 10 s", run.time <= goal);
        fs::remove_file(file).unwrap();
    }
    let file = write(folder.path(), 1_000_000, 10, Order::ByTime, false);
    let run = Run::of(&file);
    figure("10 million samples, 1 million pods by turns", seconds(run.time), "<= 10 s", run.time <= goal);
    figure(
        "memory for 1 million pods of 10 samples",
        format!("{} MiB, {} B a pod", run.peak >> 20, run.peak / 1_000_000),
        "<= 5120 MiB",
        run.peak <= 5 * GIB,
    );
    fs::remove_file(file).unwrap();
    // Long enough for every window of the detector to be full.
    let file = write(folder.path(), 10_000, 4_000, Order::ByPod, true);
    let run = Run::of(&file);
    figure(
        "memory a pod of 11 hours, of 10,000 pods",
        format!("{} B", run.peak / 10_000),
        "<= 6144 B",
        run.peak / 10_000 <= 6144,
    );
    println!(
        "bench-simulate: {}",
        if short == 0 { "every goal is reached".to_owned() } else { format!("{short} short") }
    );
    if short == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// One replay.
struct Run {
    time: Duration,
    /// The most that was resident, in bytes.
    peak: u64,
}

impl Run {
    fn of(file: &Path) -> Self {
        let began = Instant::now();
        let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-highwater"))
            .args(["simulate", "-o", "json", "--series"])
            .arg(file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut peak = 0;
        loop {
            peak = peak_of(&child).unwrap_or(peak);
            if let Some(status) = child.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return Self { time: began.elapsed(), peak };
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The most that a process had resident so far, in bytes.
fn peak_of(child: &Child) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// A recording of so many pods with so many samples each.
fn write(folder: &Path, pods: u64, samples: u64, order: Order, packed: bool) -> PathBuf {
    let path = folder.join("series.csv");
    let file = BufWriter::new(File::create(&path).unwrap());
    let mut into: Box<dyn Write> =
        if packed { Box::new(GzEncoder::new(file, Compression::fast())) } else { Box::new(file) };
    writeln!(into, "pod,device,seconds,bytes,capacity").unwrap();
    let mut noise = 0;
    let mut row = |pod: u64, sample: u64| {
        let bytes = bytes(pod, sample, samples, &mut noise);
        let seconds = 1_767_225_600 + sample * SAMPLE_SECONDS;
        writeln!(into, "team/server-{pod}-7d9c5b8f6d,{},{seconds},{bytes},{CAPACITY}", pod % 8).unwrap();
    };
    match order {
        Order::ByTime => (0..samples).for_each(|sample| (0..pods).for_each(|pod| row(pod, sample))),
        Order::ByPod => (0..pods).for_each(|pod| (0..samples).for_each(|sample| row(pod, sample))),
    }
    into.flush().unwrap();
    path
}

/// One pod in ten leaks; the others are flat, saw-toothed or filling a cache; all are noisy.
fn bytes(pod: u64, sample: u64, samples: u64, noise: &mut u64) -> u64 {
    *noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let base = 20 * GIB + (*noise >> 36);
    base + match pod % 10 {
        0 => 60 * GIB * sample / samples,
        1..=4 => 0,
        5..=7 => GIB / 64 * (sample % 128),
        _ => 40 * GIB * sample / (sample + 200),
    }
}
