//! `make bench-agent`: what the agent costs, how fast it acts, and how large it is.
//!
//! The real program runs as a process against the simulated driver, with 8 devices and 128 pods
//! of one process each, sampling every 100 ms. Processes, driver and pressure files are real;
//! kubelet and API server are stand-ins of this program, and `/proc` is one in which the
//! processes are in the cgroups of pods.

mod api;
mod crossings;
mod kubelet;
mod node;
mod process;
mod report;
mod workload;

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use node::Node;
use report::Report;

/// Time between two samples.
const INTERVAL: Duration = Duration::from_millis(100);
/// How long the agent is watched while nothing happens.
const QUIET: Duration = Duration::from_secs(30);
/// How often metrics are scraped meanwhile.
const SCRAPE: Duration = Duration::from_secs(15);
/// How often a pod crosses its limit.
const CROSSINGS: usize = 1000;

fn main() -> Result<ExitCode> {
    if env::args().nth(1).as_deref() == Some(workload::ARGUMENT) {
        return workload::run().map(|()| ExitCode::SUCCESS);
    }
    let programs = Programs::build()?;
    let mut report = Report::new("bench-agent");

    let mut node = Node::start(&programs)?;
    node.await_start()?;
    println!("{} devices, {} pods, a sample every {INTERVAL:?}", node::DEVICES, node::PODS);

    let before = node.agent.cpu_time()?;
    for _ in 0..QUIET.as_secs() / SCRAPE.as_secs() {
        thread::sleep(SCRAPE);
        node.metrics()?;
    }
    let busy = node.agent.cpu_time()?.saturating_sub(before);
    report.at_most("CPU of one core", 100.0 * busy.as_secs_f64() / QUIET.as_secs_f64(), 1.0, "%");

    let mut delays = crossings::measure(&mut node, CROSSINGS)?;
    delays.sort_unstable();
    let milliseconds =
        |at: usize| delays.get(at * delays.len() / 100).map_or(f64::NAN, |d| 1e3 * d.as_secs_f64());
    println!(
        "{} crossings: median {:.1} ms, worst {:.1} ms",
        delays.len(),
        milliseconds(50),
        delays.last().map_or(f64::NAN, |d| 1e3 * d.as_secs_f64())
    );
    let goal = 1.5 * 1e3 * INTERVAL.as_secs_f64() + 5.0;
    report.at_most("crossing to signal visible, p99", milliseconds(99), goal, "ms");

    report.at_most("resident memory", mebibytes(node.agent.resident_bytes()?), 25.0, "MiB");
    report.at_most("agent binary", mebibytes(size(&programs.agent)?), 12.0, "MiB");
    report.at_most("operator binary", mebibytes(size(&programs.operator)?), 20.0, "MiB");
    Ok(report.finish())
}

/// The programs that take part.
struct Programs {
    agent: PathBuf,
    operator: PathBuf,
    gpusim: PathBuf,
    library: PathBuf,
}

/// What the product and its simulated driver are made of: built together, as for images, so that
/// the programs that are measured are those that are shipped.
const PACKAGES: [&str; 7] = [
    "highwater-agent",
    "highwater-operator",
    "highwater-workloads",
    "gpu-device-plugin",
    "gpusim",
    "gpusim-cuda",
    "gpusim-nvml",
];

impl Programs {
    /// Builds the release.
    fn build() -> Result<Self> {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--release", "--quiet", "--manifest-path"]);
        cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"));
        cargo.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
        let target =
            Path::new(env!("CARGO_BIN_EXE_agent")).ancestors().nth(2).context("the target directory")?;
        ensure!(cargo.arg("--target-dir").arg(target).status()?.success(), "cargo build failed");
        let release = target.join("release");
        Ok(Self {
            agent: release.join("agent"),
            operator: release.join("operator"),
            gpusim: release.join("gpusim"),
            library: release.join("libgpusim_nvml.so"),
        })
    }
}

fn size(path: &Path) -> Result<u64> {
    Ok(path.metadata().with_context(|| path.display().to_string())?.len())
}

#[allow(clippy::cast_precision_loss, reason = "sizes far below 2^53")]
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
