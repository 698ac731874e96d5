//! How long it takes from the sample that satisfies a breach's hold to the eviction request at
//! the API server: `make bench-reaction`, on a cluster with release binaries.
//!
//! Pods that exceed their quota a few seconds after their start are evicted again and again, in
//! several lanes a node, since most of the time goes by with pods starting and ending. Each lane has
//! a device of its own: a second act on a device waits for the first. The first time is the
//! evidence's, by the agent's clock; the second the API server's own, from its audit log. Both are
//! this machine's clock.

// A JSON value indexed by a name that it lacks is null; it does not panic.
#![allow(clippy::indexing_slicing)]

use std::{collections::BTreeMap, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use highwater_crds::GpuMemoryIncident;
use highwater_e2e::{Cluster, eventually};
use highwater_scenarios::{ModelServer, Scenario, enforce, policy};
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde_json::json;

/// Pods a node that are evicted independently of each other; `make bench-reaction` brings up as many devices.
const LANES: usize = 6;
/// The goal for the 99th percentile.
const GOAL_MILLISECONDS: i64 = 300;

#[derive(Parser)]
struct Arguments {
    /// Evictions to measure.
    #[arg(long, default_value_t = 100)]
    samples: usize,
    /// How long it may take in all, in seconds.
    #[arg(long, default_value_t = 900)]
    seconds: u64,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let cluster = Cluster::attach()?;
    let mut milliseconds = cluster.clone().block_on(measure(cluster, &arguments))??;
    milliseconds.sort_unstable();
    let at = |percent: usize| {
        milliseconds.get((milliseconds.len() * percent).div_ceil(100).saturating_sub(1)).copied()
    };
    let (median, p99) = (at(50).context("no sample")?, at(99).context("no sample")?);
    let verdict = if p99 <= GOAL_MILLISECONDS { "ok" } else { "short" };
    println!(
        "sample that satisfies the hold -> eviction request, {} times: median {median} ms, p99 {p99} ms (goal <= {GOAL_MILLISECONDS} ms) {verdict}",
        milliseconds.len()
    );
    println!("bench-reaction: {}", if verdict == "ok" { "every goal holds" } else { "1 goal is short" });
    Ok(if verdict == "ok" { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn measure(cluster: Cluster, arguments: &Arguments) -> Result<Vec<i64>> {
    let s = Scenario::begin(cluster, "bench-reaction").await?;
    let mut spec = enforce(&s.namespace, "4Gi");
    spec["quota"]["breach"]["holdMilliseconds"] = json!(0);
    spec["quota"]["breach"]["actions"] = json!([{"type": "Restart", "restart": {"gracePeriodSeconds": 0}}]);
    // For ten seconds an act counts as a pod that is down, and a lane comes round in fewer.
    spec["remediation"]["budget"]["maxUnavailable"] = json!(10);
    spec["remediation"]["budget"]["rates"] =
        json!([{"scope": "Fleet", "maxActions": 10000, "windowMinutes": 1}]);
    s.apply(&policy("bench-reaction", spec)).await?;
    s.programmed("bench-reaction").await?;
    let start = Timestamp::now();
    for node in s.cluster.spec.nodes().map(highwater_e2e::spec::Node::name) {
        for lane in 0..LANES {
            let script = format!("context; hold {}ms; alloc 6Gi; hold", 2000 + 170 * lane);
            let mut lane = ModelServer::new(&format!("lane-{node}-{lane}"), &script).deployment();
            lane["spec"]["template"]["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
            s.apply(&lane).await?;
        }
    }
    let wanted = arguments.samples;
    let mut measured = BTreeMap::new();
    let all =
        eventually(&format!("{wanted} evictions"), Duration::from_secs(arguments.seconds), async || {
            // Finished incidents are cleared away in time; what was measured once is kept.
            let incidents = s.incidents().await?;
            for eviction in s.evictions_since(start)? {
                if let Some(incident) = incidents.iter().find(|incident| about(incident, &eviction.name)) {
                    let took = eviction.at.as_millisecond() - incident.spec.evidence.at.0.as_millisecond();
                    measured.insert(incident.name_any(), took);
                }
            }
            ensure!(measured.len() >= wanted, "{} so far", measured.len());
            Ok(measured.values().copied().take(wanted).collect())
        })
        .await;
    s.end().await?;
    all
}

fn about(incident: &GpuMemoryIncident, pod: &str) -> bool {
    incident.spec.subject.as_ref().is_some_and(|subject| subject.name == pod)
}
