//! Deals the tests of a test program out over several clusters that stand side by side: whichever is
//! free takes the next, the longest first, so that all are done at about the same time. Most scenarios
//! wait, and a machine that waits can wait for several.
//!
//! It takes the arguments that a test program takes, and tells what came of the tests as one does. Each
//! test is a process of its own.

mod durations;
mod listing;
mod outcome;

use std::{
    cell::RefCell,
    collections::VecDeque,
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use futures::future::join_all;
use highwater_e2e::{
    Cluster,
    control::Request,
    eventually,
    paths::{CLUSTER_VARIABLE, ClusterId, Paths, STATE_VARIABLE},
};
use tokio::{process::Command, time::timeout};

use crate::{
    durations::Durations,
    outcome::{Outcome, Report},
};

/// How long a scenario may take before it is given up. They wait in bounds of their own.
const LIMIT: Duration = Duration::from_mins(20);

/// How long what a scenario left down may take to be there again, and the nodes to be Ready.
const READY: Duration = Duration::from_mins(1);

#[derive(Debug, Parser)]
#[command(name = "lanes", about)]
struct Arguments {
    /// The clusters, by their numbers: they are up, and have the product installed
    #[arg(long, value_delimiter = ',', required = true, value_parser = cluster)]
    clusters: Vec<ClusterId>,
    /// Where it is written how long each test takes, to begin with the longest
    #[arg(long)]
    durations: Option<PathBuf>,
    /// Write there how long each took that passed
    #[arg(long, requires = "durations")]
    record: bool,
    /// How many that failed, at most, are run once more, one at a time on the first of the clusters
    #[arg(long, default_value_t = 0)]
    second_tries: usize,
    /// The test program
    program: PathBuf,
    /// What a test program takes: names, --exact, --skip NAME, --ignored, --include-ignored
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

fn cluster(number: &str) -> Result<ClusterId> {
    ClusterId::parse(number)
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    ensure!(
        arguments.clusters.len() == 1 || std::env::var_os(STATE_VARIABLE).is_none(),
        "{STATE_VARIABLE} names the folder of one cluster: unset it, or give one of --clusters"
    );
    // One thread: the lanes only wait for their tests.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(&arguments))
}

async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let chosen = listing::chosen(&arguments.program, &arguments.rest).await?;
    let durations = arguments.durations.as_deref();
    let mut known = durations.map(Durations::read).transpose()?.unwrap_or_default();
    for cluster in &arguments.clusters {
        healthy(*cluster).await.with_context(|| format!("{cluster} cannot be used"))?;
    }
    let start = Instant::now();
    let mut report = Report::new(chosen.ignored, chosen.filtered);
    let all_stand =
        deal(&arguments.program, &arguments.clusters, known.longest_first(chosen.run), &mut report).await;
    if let Some(file) = durations.filter(|_| arguments.record) {
        known.learn(report.passed(), file)?;
    }
    let again = report.failed();
    // Where a cluster died, something else is wrong than a scenario.
    if all_stand && (1..=arguments.second_tries).contains(&again.len()) {
        print!("{}", report.failures());
        println!("\nA second try, alone:");
        deal(&arguments.program, arguments.clusters.get(..1).unwrap_or_default(), again, &mut report).await;
    }
    print!("{}", report.summary(start.elapsed()));
    Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs tests in this order on the clusters; whether all of those are there afterwards.
async fn deal(program: &Path, clusters: &[ClusterId], tests: Vec<String>, report: &mut Report) -> bool {
    println!("\nrunning {} tests on {} clusters", tests.len(), clusters.len());
    let waiting = RefCell::new(VecDeque::from(tests));
    let ended = RefCell::new(report);
    let lanes = clusters
        .iter()
        .map(|cluster| Lane { cluster: *cluster, program, waiting: &waiting, report: &ended }.work());
    let all_stand = join_all(lanes).await.into_iter().all(|stands| stands);
    for test in waiting.take() {
        ended.borrow_mut().add(&test, Outcome::failed("no cluster was left to run it on"), Duration::ZERO);
    }
    all_stand
}

/// One cluster, and what is left for all of them.
struct Lane<'a> {
    cluster: ClusterId,
    program: &'a Path,
    waiting: &'a RefCell<VecDeque<String>>,
    report: &'a RefCell<&'a mut Report>,
}

impl Lane<'_> {
    /// Runs one test after another, until none is left, or the cluster does not stand any more; whether
    /// it does.
    async fn work(self) -> bool {
        let start = Instant::now();
        let mut ran = 0;
        while let Some(test) = self.next() {
            let begin = Instant::now();
            let mut outcome =
                self.run(&test).await.unwrap_or_else(|error| Outcome::failed(&format!("{error:#}")));
            let took = begin.elapsed();
            // A scenario fails for a reason of its own; one whose cluster died, for that one.
            let death = if outcome.is_good() { None } else { healthy(self.cluster).await.err() };
            if let Some(death) = &death {
                outcome.add(&format!("Error: {test}: {} died: {death:#}", self.cluster));
            }
            println!("test {test} ... {} <{:.1}s> on {}", outcome.word(), took.as_secs_f64(), self.cluster);
            self.report.borrow_mut().add(&test, outcome, took);
            ran += 1;
            if let Some(death) = death {
                println!("{} died; what is left is for the others: {death:#}", self.cluster);
                return false;
            }
        }
        println!("{} is done with {ran} tests after {} s", self.cluster, start.elapsed().as_secs());
        true
    }

    // A borrow must not last while a test runs.
    fn next(&self) -> Option<String> {
        self.waiting.borrow_mut().pop_front()
    }

    async fn run(&self, test: &str) -> Result<Outcome> {
        let mut command = Command::new(self.program);
        command
            // It was chosen among the ignored ones too, where those were asked for.
            .args(["--exact", test, "--include-ignored", "--test-threads=1"])
            .env(CLUSTER_VARIABLE, self.cluster.number().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        match timeout(LIMIT, command.output()).await {
            Ok(output) => Ok(Outcome::of(test, &output.context("starting the test")?)),
            Err(_) => bail!("{test}: it did not end within {LIMIT:?}"),
        }
    }
}

/// Fails where a cluster is not up, or does not answer any more.
async fn healthy(id: ClusterId) -> Result<()> {
    // On a thread of its own, since there is no way back out of the cluster's network.
    let look = move || {
        let cluster = Cluster::attach_to(Paths::of(id)?)?;
        cluster.block_on(async {
            cluster.api_ready().await?;
            // A node that was just lost is Ready for a while.
            eventually("its components to run", READY, async || {
                let all = cluster.control(Request::Status).await?;
                let down = all.iter().find(|one| one.pid.is_none() || one.paused);
                ensure!(down.is_none(), "{} does not", down.map_or("all", |one| &one.name));
                Ok(())
            })
            .await?;
            cluster.nodes_ready(READY).await
        })?
    };
    let looked = std::thread::Builder::new().name(id.to_string()).spawn(look)?;
    tokio::task::spawn_blocking(move || looked.join())
        .await?
        .map_err(|_| anyhow::anyhow!("the thread in the cluster's network panicked"))?
}
