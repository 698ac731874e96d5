//! The main job as a story to watch: two model servers share a GPU, one grows over its quota,
//! and only that one is restarted.
//!
//! Exits non-zero where the story did not happen.

use std::{collections::BTreeMap, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{DecisionState, GpuMemoryIncident};
use highwater_e2e::{Cluster, eventually};
use highwater_scenarios::{GI, NODE, SYSTEM, Samples, Scenario, deployment, policy};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;

const POLICY: &str = "demo";
const USED: &str = "highwater_pod_memory_used_bytes";
const LIMIT: &str = "highwater_pod_memory_limit_bytes";

fn main() -> ExitCode {
    let story = Cluster::attach().and_then(|cluster| cluster.clone().block_on(tell(cluster))?);
    match story {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nThe story did not happen: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn tell(cluster: Cluster) -> Result<()> {
    let s = Scenario::begin(cluster, "demo").await?;
    let result = story(&s).await;
    if result.is_err() {
        eprintln!("{}", s.describe().await);
    }
    result
}

async fn story(s: &Scenario) -> Result<()> {
    say(
        "A policy: every pod of the demo's namespace may hold 16 GiB of a GPU. Who holds more for 2 s is restarted,",
    );
    say("at most one pod of a workload at a time and twice an hour.");
    s.apply(&policy(POLICY, demo_policy(&s.namespace))).await?;
    s.programmed(POLICY).await?;
    say("kubectl get gmp:  Accepted and Programmed; the node's agent follows the plan.");

    say(
        "Two model servers on one GPU. `chat` serves with 12 GiB. `batch` loads 6 GiB and then begins to grow;",
    );
    say("it ignores SIGTERM while it does.");
    s.apply(&deployment("chat", "context; alloc 12Gi; serve")).await?;
    let chat = s.running("chat").await?;
    s.apply(&deployment("batch", "ignore-sigterm; context; alloc 6Gi; hold 5s; grow 2Gi/s to 40Gi; hold"))
        .await?;
    let batch = s.running("batch").await?;

    let start = Instant::now();
    let (incident, peak) = watch(s, &batch, start).await?;
    let decision =
        incident.status.as_ref().and_then(|status| status.decision.clone()).context("a decision")?;
    ensure!(
        decision.state == DecisionState::Succeeded,
        "the incident ended {:?}/{}: {}",
        decision.state,
        decision.reason,
        decision.message
    );

    say("");
    let namespace = s.namespace.as_str();
    say(&format!("What was done, and why (kubectl get gmi -n {namespace} -o yaml):"));
    say(&format!("  {}", incident.spec.evidence.explanation));
    say(&format!("  {:?}/{}: {}", decision.state, decision.reason, decision.message));
    for budget in &decision.budgets {
        say(&format!("  budget: {budget}"));
    }
    for pod in [&batch, &chat] {
        say(&format!(
            "  Events about {}: {}",
            pod.name_any(),
            s.events_about(&pod.name_any()).await?.join(", ")
        ));
    }

    s.untouched(&chat).await.context("the neighbour was touched")?;
    s.served_without_failure(&chat).await.context("the neighbour noticed")?;
    let next = s.running_other_than("batch", batch.uid().as_deref()).await?;
    say("");
    say(&format!(
        "  {} held up to {} GiB and was evicted; {} runs in its place.",
        batch.name_any(),
        peak / GI,
        next.name_any()
    ));
    say(&format!("  {} served throughout: not restarted, no failed call.", chat.name_any()));
    let seconds = start.elapsed().as_secs();
    say(&format!("  From the start of `batch` to its memory back: {seconds} s."));
    say("");
    say("The cluster stays up. Look around:");
    say("  make kubectl ARGS='get gmp,gmn'                 policies, nodes");
    say(&format!(
        "  make kubectl ARGS='get gmi -n {namespace} -o yaml'   the incident: evidence, decision, budgets"
    ));
    say(&format!("  make kubectl ARGS='get events -n {namespace}'"));
    say(&format!("  make kubectl ARGS='logs -n {SYSTEM} -l app.kubernetes.io/component=agent'"));
    say("  make down                                       take it all down");
    Ok(())
}

fn demo_policy(namespace: &str) -> Value {
    json!({
        "mode": "Enforce",
        "nodes": {},
        "namespaces": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "quota": {
            "default": {"limit": "16Gi"},
            "breach": {"tolerance": "512Mi", "holdMilliseconds": 2000,
                       "actions": [{"type": "Signal"}, {"type": "Restart", "restart": {"gracePeriodSeconds": 2}}]},
        },
        "breakers": [{
            "scope": "Device",
            "warning":   {"tripPercent": 75, "clearPercent": 72, "holdMilliseconds": 500, "actions": [{"type": "Signal"}]},
            "critical":  {"tripPercent": 88, "clearPercent": 84, "holdMilliseconds": 500, "actions": [{"type": "Signal"}, {"type": "Freeze"}]},
            "emergency": {"tripPercent": 95, "clearPercent": 90, "holdMilliseconds": 0,
                          "actions": [{"type": "Restart", "restart": {"gracePeriodSeconds": 0}}]},
        }],
        "remediation": {"budget": {
            "maxUnavailable": 1,
            // A fleet of one node: its two GPUs are all there is.
            "haltAtCondemnedPercent": 100,
            "rates": [{"scope": "Workload", "maxActions": 2, "windowMinutes": 60}],
        }},
    })
}

/// Prints who holds what, twice a second, until the incident about `batch` has ended; returns it
/// and the most that `batch` was seen to hold.
async fn watch(s: &Scenario, batch: &Pod, start: Instant) -> Result<(GpuMemoryIncident, i64)> {
    let uid = batch.uid().unwrap_or_default();
    let mut peak = 0;
    let mut told = None;
    let mut last = String::new();
    say("");
    say("   time   the GPU that both share           level      pods: used / limit (GiB)");
    eventually("the incident about `batch` to end", Duration::from_mins(2), async || {
        let samples = s.metrics(NODE).await?;
        peak = peak.max(samples.bytes(USED, &[("pod", &batch.name_any())])?.unwrap_or(0));
        let device = samples.devices_of(&batch.name_any()).pop().unwrap_or_else(|| last.clone());
        println!("  {:>5.1}s  {}", start.elapsed().as_secs_f32(), row(&samples, &device)?);
        last = device;
        let incidents = s.incidents().await?;
        let incident =
            incidents.into_iter().find(|i| i.spec.subject.as_ref().is_some_and(|subject| subject.uid == uid));
        let decision = incident.as_ref().and_then(|incident| incident.status.as_ref()?.decision.clone());
        let state = decision.as_ref().map(|decision| (decision.state, decision.reason.clone()));
        if let Some((state, reason)) = &state
            && told.as_ref() != Some(&(*state, reason.clone()))
        {
            say(&format!("                 incident: {state:?}/{reason}"));
            told = Some((*state, reason.clone()));
        }
        tokio::time::sleep(Duration::from_millis(450)).await;
        ensure!(state.is_some_and(|(state, _)| state.is_final()), "it has not ended");
        incident.map(|incident| (incident, peak)).context("there is no incident")
    })
    .await
}

/// One line of the table: the device's use as a bar, its level, and each pod's use and limit.
fn row(samples: &Samples, device: &str) -> Result<String> {
    const WIDTH: i64 = 24;
    let capacity =
        samples.bytes("highwater_device_capacity_bytes", &[("device", device)])?.unwrap_or(1).max(1);
    let free = samples.bytes("highwater_device_memory_bytes", &[("device", device), ("bucket", "free")])?;
    let used = capacity - free.unwrap_or(0);
    let filled = usize::try_from(used * WIDTH / capacity).unwrap_or(0);
    let bar = format!("{}{}", "#".repeat(filled), ".".repeat(24_usize.saturating_sub(filled)));
    let level = samples.value("highwater_device_level", &[("device", device), ("mode", "Enforce")])?;
    let level = match level {
        None => "-",
        Some(level) if level < 0.5 => "Normal",
        Some(level) if level < 1.5 => "Warning",
        Some(level) if level < 2.5 => "Critical",
        Some(_) => "Emergency",
    };
    let mut pods = BTreeMap::new();
    for pod in samples.label_values(USED, "pod") {
        let gibibytes = |metric| samples.bytes(metric, &[("pod", pod.as_str())]);
        if let Some(used) = gibibytes(USED)? {
            let limit = gibibytes(LIMIT)?.map_or("-".to_owned(), |limit| (limit / GI).to_string());
            pods.insert(pod.clone(), format!("{pod} {:.1}/{limit}", tenths(used)));
        }
    }
    let pods: Vec<_> = pods.into_values().collect();
    Ok(format!("[{bar}] {:>3}%  {level:<9}  {}", used * 100 / capacity, pods.join("   ")))
}

/// Bytes as GiB with one decimal.
fn tenths(bytes: i64) -> f64 {
    #[allow(clippy::cast_precision_loss)] // a few tenths of a GiB
    let tenths = (bytes * 10 / GI) as f64;
    tenths / 10.0
}

fn say(line: &str) {
    println!("{line}");
}
