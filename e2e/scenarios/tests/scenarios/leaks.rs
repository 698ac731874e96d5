//! Leaks, from the first suspicion to the memory that is back, with nothing faster than by the policy's
//! own times: what takes a day in a cluster takes half a minute here.
//!
//! Each pod may come to 30 GiB. A context takes half a GiB.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{DecisionState, GpuMemoryIncident, IncidentKind, LeakFinding, LeakStage};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{ModelServer, NODE, Scenario, TIMEOUT, scenario, two_nodes};
use jiff::Timestamp;
use k8s_openapi::api::{core::v1::Pod, events::v1::Event, policy::v1::PodDisruptionBudget};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams},
};
use serde_json::{Value, json};

/// Grows by 1 GiB/s for ever.
const LEAKS: &str = "context; alloc 2Gi; on-oom continue; leak 100Mi every 100ms; serve";
/// How long an act may take to become due, and to be done.
const LIFE: Duration = Duration::from_secs(90);
const TICKETS: &str = "highwater_leak_workload_tickets";

/// A policy that restarts what leaks. Its times are those of the defaults, 300 times as fast, but for the
/// horizon, which also spaces the restarts of a workload: 6 x 4 s.
fn watchful(namespace: &str) -> Value {
    json!({
        "mode": "Enforce",
        "nodes": {},
        "namespaces": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "quota": {"default": {"limit": "30Gi"}},
        "leaks": {
            "sampleMilliseconds": 100, "bucketMilliseconds": 200,
            "blockMilliseconds": [600, 1200, 2400, 4800],
            "warmUpMilliseconds": 2000, "horizonMilliseconds": 4000, "leadMilliseconds": 2000,
            "actions": [{"type": "Restart", "restart": {"gracePeriodSeconds": 1}}],
        },
        "remediation": {"budget": {
            "maxUnavailable": 1, "haltAtCondemnedPercent": 100,
            "rates": [{"scope": "Workload", "maxActions": 10, "windowMinutes": 60}],
        }},
    })
}

async fn watch(s: &Scenario) -> Result<()> {
    s.program(&s.namespace, watchful(&s.namespace)).await
}

/// What is known of the leak that an incident is about, now or when it was opened.
fn found(incident: &GpuMemoryIncident) -> Option<&LeakFinding> {
    let observed = incident.status.as_ref().and_then(|s| s.observation.as_ref()?.leak.as_ref());
    observed.or(incident.spec.evidence.leak.as_ref())
}

fn message(incident: &GpuMemoryIncident) -> &str {
    incident.status.as_ref().and_then(|s| s.decision.as_ref()).map_or("", |d| d.message.as_str())
}

/// The incidents about leaks of a pod.
async fn leaks_of(s: &Scenario, pod: &Pod) -> Result<Vec<GpuMemoryIncident>> {
    let mut incidents = s.incidents().await?;
    incidents.retain(|i| {
        i.spec.kind == IncidentKind::Leak
            && i.spec.subject.as_ref().is_some_and(|subject| Some(&subject.uid) == pod.metadata.uid.as_ref())
    });
    Ok(incidents)
}

/// Waits until a pod is suspected.
async fn suspected(s: &Scenario, pod: &Pod) -> Result<GpuMemoryIncident> {
    eventually(&format!("a suspicion of {}", pod.name_any()), TIMEOUT, async || {
        leaks_of(s, pod).await?.pop().context("there is no such incident")
    })
    .await
}

/// Waits until the restart of a leaking pod is verified.
async fn restarted(s: &Scenario, pod: &Pod) -> Result<GpuMemoryIncident> {
    s.incident_within(pod, DecisionState::Succeeded, "MemoryReturned", LIFE).await
}

/// As long as this nobody is evicted.
async fn left_alone(s: &Scenario, pods: &[&Pod], lasting: Duration) -> Result<()> {
    let since = Timestamp::now();
    never("an eviction", lasting, async || s.evictions_since(since)?.pop().context("none")).await?;
    for pod in pods {
        s.untouched(pod).await?;
    }
    Ok(())
}

#[test]
fn l03_a_leaking_pod_is_found_restarted_and_verified_and_its_next_life_knows() -> Result<()> {
    scenario("leak-restart", async |s| {
        watch(s).await?;
        let first = s.start("leaks", LEAKS).await?;
        let suspicion = suspected(s, &first).await?;
        let finding = suspicion.spec.evidence.leak.clone().context("no finding in the evidence")?;
        ensure!(finding.slope_bytes_per_hour.low <= finding.slope_bytes_per_hour.mid, "{finding:?}");
        let waiting = s.incident(&first, DecisionState::Proposed, "LeakSuspected").await?;
        ensure!(message(&waiting).contains("an hour"), "no numbers: {}", message(&waiting));

        let incident = restarted(s, &first).await?;
        ensure!(found(&incident).is_some_and(|f| f.stage == LeakStage::Act), "{:?}", found(&incident));
        s.explained(&incident)?;
        let budgets =
            &incident.status.as_ref().and_then(|s| s.decision.as_ref()).context("decision")?.budgets;
        ensure!(budgets.iter().any(|b| b.starts_with("leaks: 1 restart")), "{budgets:?}");
        ensure!(s.tokens_of(&first).await? == 1, "more than one token for one act");
        ensure!(leaks_of(s, &first).await?.len() == 1, "more than one incident about one leak");
        s.event(&first.name_any(), "LeakSuspected").await?;
        s.event(&first.name_any(), "Evicted").await?;

        let next = s.running_other_than("leaks", first.uid().as_deref()).await?;
        let again = suspected(s, &next).await?;
        let profile = again.spec.evidence.leak.as_ref().and_then(|leak| leak.profile);
        let profile = profile.context("the next life knows nothing of the first")?;
        ensure!(profile.ended_badly == 1 && profile.last_slope_bytes_per_hour.is_some(), "{profile:?}");
        Ok(())
    })
}

#[test]
fn a_disruption_budget_holds_a_leaking_pod_until_it_gives_way() -> Result<()> {
    scenario("leak-pdb", async |s| {
        watch(s).await?;
        s.apply(&json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "keep"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "leaks"}}},
        }))
        .await?;
        let pod = s.start("leaks", LEAKS).await?;
        s.incident_within(&pod, DecisionState::Proposed, "DisruptionBudget", LIFE).await?;
        s.untouched(&pod).await?;
        s.api::<PodDisruptionBudget>().delete("keep", &DeleteParams::default()).await?;
        restarted(s, &pod).await.map(drop)
    })
}

#[test]
fn two_restarts_that_do_not_help_become_a_ticket() -> Result<()> {
    scenario("leak-ticket", async |s| {
        watch(s).await?;
        let mut pod = s.start("leaks", LEAKS).await?;
        for _ in 0..2 {
            restarted(s, &pod).await?;
            pod = s.running_other_than("leaks", pod.uid().as_deref()).await?;
        }
        let ticket = s.incident_within(&pod, DecisionState::Suppressed, "TicketNeeded", LIFE).await?;
        ensure!(message(&ticket).contains("an hour"), "no numbers: {}", message(&ticket));
        s.event("leaks", "TicketNeeded").await?;
        left_alone(s, &[&pod], Duration::from_secs(3)).await
    })
}

async fn tickets(s: &Scenario, expected: i64) -> Result<()> {
    eventually(&format!("{expected} tickets in the metrics"), TIMEOUT, async || {
        let mut most = 0;
        for (_, samples) in s.operator_metrics().await? {
            most = most.max(samples.bytes(TICKETS, &[])?.unwrap_or(0));
        }
        ensure!(most == expected, "there are {most}");
        Ok(())
    })
    .await
}

#[test]
fn three_replicas_that_leak_on_two_nodes_are_one_ticket_and_no_restart() -> Result<()> {
    scenario("leak-replicas", async |s| {
        two_nodes(s)?;
        watch(s).await?;
        let since = Timestamp::now();
        let server = |script: &str| ModelServer::new("replicas", script).anywhere().spread().replicas(3);
        s.apply(&server(LEAKS).deployment()).await?;
        let joined = eventually("three incidents on one ticket", LIFE, async || {
            let mut incidents = s.incidents().await?;
            incidents.retain(|i| {
                let decision = i.status.as_ref().and_then(|s| s.decision.as_ref());
                decision.is_some_and(|d| d.state == DecisionState::Proposed && d.reason == "WorkloadTicket")
            });
            ensure!(incidents.len() == 3, "{} are", incidents.len());
            Ok(incidents)
        })
        .await?;
        let nodes: BTreeSet<&str> = joined.iter().map(|i| i.spec.node.as_str()).collect();
        ensure!(nodes.len() == 2, "all were on {nodes:?}");
        ensure!(joined.iter().all(|i| message(i).contains("3 pods of Deployment/replicas on 2 nodes")));
        s.event("replicas", "WorkloadTicket").await?;
        tickets(s, 1).await?;
        s.kill_leader().await?;
        tickets(s, 1).await?;
        let list = Api::<Event>::namespaced(s.client.clone(), &s.namespace);
        let list = list.list(&ListParams::default().fields("regarding.name=replicas")).await?;
        let told = list.items.iter().filter(|e| e.reason.as_deref() == Some("WorkloadTicket")).count();
        ensure!(told == 1, "it was told {told} times");
        ensure!(s.evictions_since(since)?.is_empty(), "somebody was evicted");
        // Another template: whoever leaked goes, and the ticket with it.
        s.apply(&server("context; alloc 1Gi; serve").deployment()).await?;
        tickets(s, 0).await
    })
}

#[test]
fn l07_a_cache_that_fills_one_that_levels_off_and_daily_load_are_left_alone() -> Result<()> {
    scenario("leak-benign", async |s| {
        watch(s).await?;
        let fills = s.start("fills", "context; alloc 8Gi; grow 1Gi/s to 25Gi; serve").await?;
        let saturates = "context; alloc 2Gi; grow 4Gi/s to 12Gi; grow 2Gi/s to 18Gi; grow 1Gi/s to 22Gi; \
                         grow 512Mi/s to 24Gi; grow 256Mi/s to 25Gi; serve";
        let saturates = s.start("saturates", saturates).await?;
        let swings = s.start("swings", "context; alloc 4Gi; swing 10Gi every 3s x30; serve").await?;
        left_alone(s, &[&fills, &saturates, &swings], Duration::from_secs(40)).await?;
        for pod in [&fills, &saturates, &swings] {
            for incident in leaks_of(s, pod).await? {
                let stage = found(&incident).map(|f| f.stage);
                ensure!(stage != Some(LeakStage::Act), "{} was to be acted on", pod.name_any());
            }
        }
        Ok(())
    })
}

#[test]
fn an_agent_that_starts_anew_in_the_middle_of_a_leak_changes_nothing() -> Result<()> {
    scenario("leak-agent", async |s| {
        watch(s).await?;
        let pod = s.start("leaks", LEAKS).await?;
        let before = suspected(s, &pod).await?;
        let agent = s.agent(NODE).await?;
        s.kill("agent").await?;
        s.back("agent", &agent).await?;
        let incident = restarted(s, &pod).await?;
        ensure!(incident.metadata.uid == before.metadata.uid, "it was opened anew");
        ensure!(s.tokens_of(&pod).await? == 1, "more than one token for one act");
        let next = s.running_other_than("leaks", pod.uid().as_deref()).await?;
        s.untouched(&next).await
    })
}

#[test]
fn a_suspicion_that_clears_acts_on_nothing() -> Result<()> {
    scenario("leak-clears", async |s| {
        watch(s).await?;
        let pod = s.start("grows", "context; alloc 4Gi; hold 3s; grow 1Gi/s to 22Gi; serve").await?;
        suspected(s, &pod).await?;
        s.incident_within(&pod, DecisionState::Cancelled, "Recovered", LIFE).await?;
        s.untouched(&pod).await?;
        s.served_without_failure(&pod).await
    })
}
