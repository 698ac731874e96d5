//! Whatever dies in the middle of an act: it is finished or undone, done once, and nothing is left
//! parked, frozen, unready or cordoned.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use highwater_crds::{ActState, ActionType, DecisionState, GpuMemoryIncident, names};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{
    GI, ModelServer, NODE, OTHER_NODE, PRESSURE_FILE, Scenario, TIMEOUT, broken_by, critical, enforce,
    restarts, scenario, two_nodes,
};
use jiff::Timestamp;
use k8s_openapi::api::{apps::v1::StatefulSet, core::v1::Pod};
use kube::{
    ResourceExt as _,
    api::{DeleteParams, ListParams},
};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::faults::{named, pending_namesake};

const PARKED: &str = "highwater_pod_parked_bytes";
const USED: &str = "highwater_pod_memory_used_bytes";

async fn broken(s: &Scenario, actions: Value) -> Result<()> {
    s.program(&s.namespace, broken_by(&s.namespace, "60Gi", &critical(40, 38, &actions))).await
}

/// Kills a program of the node and waits until its successor works.
async fn kill(s: &Scenario, program: &str) -> Result<()> {
    let before = s.component(program, NODE).await?;
    s.kill(program).await?;
    s.back(program, &before).await.map(drop)
}

#[test]
fn a_hook_whose_agent_dies_is_called_again_at_most_and_nobody_is_restarted() -> Result<()> {
    scenario("killed-hook", async |s| {
        broken(s, json!([{"type": "Hook"}])).await?;
        let script = "engine 8000; context; hold 2s; cache 36Gi; serve";
        let pod = s
            .start_server("engine", &ModelServer::new("engine", script).hook("SglangFlushCache", 8000))
            .await?;
        s.got(&pod, "alloc", 36 * GI).await?;
        kill(s, "agent").await?;
        s.says(&pod, "hook method=POST path=/flush_cache status=200").await?;
        let device = s.device_of(&pod).await?;
        s.level(&device, 0).await?;
        let calls = s.log(&pod).await?.iter().filter(|line| line.text.contains(" hook method=")).count();
        ensure!(calls <= 2, "it was called {calls} times");
        s.untouched(&pod).await
    })
}

#[test]
fn an_agent_killed_while_a_pod_is_unready_leaves_it_unready_no_longer_than_it_must() -> Result<()> {
    scenario("killed-unready", async |s| {
        broken(s, json!([{"type": "Unready"}])).await?;
        let script = "context; hold 5s; alloc 36Gi; hold 14s; free; alloc 1Gi; serve";
        let pod = s.start_server("busy", &ModelServer::new("busy", script).unready()).await?;
        s.act_done(&pod, ActionType::Unready).await?;
        s.ready(&pod, false).await?;
        kill(s, "agent").await?;
        s.says(&pod, " serve used=").await?;
        s.ready(&pod, true).await?;
        let (state, reason) = s.incident_ended(&pod).await?;
        ensure!(state == DecisionState::Succeeded, "it ended {state:?}/{reason}");
        ensure!(s.tokens_of(&pod).await? == 1, "more than one token for one act");
        s.untouched(&pod).await
    })
}

#[test]
fn a_pod_whose_agent_never_comes_back_is_ready_again_by_itself() -> Result<()> {
    scenario("agentless", async |s| {
        broken(s, json!([{"type": "Unready"}])).await?;
        let script = "context; hold 5s; alloc 36Gi; serve";
        let pod = s.start_server("busy", &ModelServer::new("busy", script).unready()).await?;
        s.act_done(&pod, ActionType::Unready).await?;
        s.ready(&pod, false).await?;
        s.halt("agent", true).await?;
        // The file says until when, at most 30 s ahead.
        let result = eventually("the pod to be ready", Duration::from_secs(45), async || {
            let ready = s.exec(&pod, &[names::READY_HELPER, PRESSURE_FILE]).await?;
            ensure!(ready.well, "the helper still says no");
            Ok(())
        })
        .await;
        s.halt("agent", false).await?;
        result?;
        s.untouched(&pod).await
    })
}

#[test]
fn whoever_dies_while_a_node_is_frozen_the_taint_stays_as_long_as_it_should() -> Result<()> {
    scenario("killed-freeze", async |s| {
        broken(s, json!([{"type": "Freeze", "freeze": {"taintNodeWhen": "AnyDevice"}}])).await?;
        let pod = s.start("full", "context; alloc 36Gi; serve").await?;
        s.tainted(NODE, true).await?;
        let never_without =
            never("the taint gone while memory is short", Duration::from_secs(12), async || {
                let taints = s.node_object(NODE).await?.spec.and_then(|spec| spec.taints).unwrap_or_default();
                let there = taints.iter().any(|taint| taint.key == names::PRESSURE_TAINT);
                (!there).then_some("it is gone").context("it is there")
            });
        let dying = async {
            kill(s, "agent").await?;
            s.kill_leader().await
        };
        let (taint, dying) = futures::join!(never_without, dying);
        dying?;
        taint?;
        s.untouched(&pod).await?;
        s.remove("full").await?;
        s.tainted(NODE, false).await
    })
}

#[test]
fn a_reclaim_whose_agent_dies_still_frees_what_is_idle() -> Result<()> {
    scenario("killed-reclaim", async |s| {
        broken(s, json!([{"type": "Reclaim"}])).await?;
        let script = "context; alloc 2Gi; retain; hold 2s; async 34Gi; free 34Gi; serve";
        let pod = s.start_guarded("keeps", script).await?;
        s.says(&pod, " op=free ").await?;
        kill(s, "agent").await?;
        s.pod_metric(&pod, USED, |used| used.is_some_and(|used| used < 4 * GI)).await?;
        s.untouched(&pod).await?;
        s.served_without_failure(&pod).await
    })
}

/// A pod that is parked because its neighbour grew; both.
async fn parked(s: &Scenario) -> Result<[Pod; 2]> {
    broken(s, json!([{"type": "Park"}])).await?;
    let cold = ModelServer::new("cold", "context; alloc 6Gi; serve").parkable();
    let cold = s.start_server("cold", &cold).await?;
    s.says(&cold, " serve used=").await?;
    let hot = s.start("hot", "context; hold 1s; grow 16Gi/s to 27Gi; serve").await?;
    s.act_is(&cold, ActionType::Park, &[ActState::Begun, ActState::Done]).await?;
    Ok([cold, hot])
}

/// Waits until the pod is parked whole or runs whole.
async fn parked_or_running(s: &Scenario, cold: &Pod) -> Result<()> {
    eventually("the pod to be parked or to run", TIMEOUT, async || {
        let samples = s.metrics(NODE).await?;
        let name = cold.name_any();
        let parked = samples.bytes(PARKED, &[("pod", &name)])?.unwrap_or(0);
        let used = samples.bytes(USED, &[("pod", &name)])?.unwrap_or(0);
        ensure!((parked > 6 * GI) != (used > 6 * GI), "{parked} parked, {used} used");
        Ok(())
    })
    .await
}

/// The neighbour leaves, and the parked pod is back as if nothing had been.
async fn is_restored(s: &Scenario, cold: &Pod) -> Result<()> {
    s.remove("hot").await?;
    s.pod_metric(cold, USED, |used| used > Some(6 * GI)).await?;
    s.pod_metric(cold, PARKED, |bytes| bytes.unwrap_or(0) == 0).await?;
    s.nobody_is_stopped().await?;
    let device = s.device_of(cold).await?;
    s.metrics(NODE).await?.adds_up(&device)?;
    let beats = async || -> Result<usize> {
        Ok(s.log(cold).await?.iter().filter(|line| line.text.contains(" serve used=")).count())
    };
    let before = beats().await?;
    eventually("it to serve again", TIMEOUT, async || {
        let now = beats().await?;
        ensure!(now > before + 1, "{now} beats");
        Ok(())
    })
    .await?;
    s.untouched(cold).await?;
    s.served_without_failure(cold).await
}

#[test]
fn an_agent_killed_while_it_parks_a_pod_finds_it_parked_once_and_restores_it() -> Result<()> {
    scenario("killed-park-agent", async |s| {
        let [cold, _] = parked(s).await?;
        kill(s, "agent").await?;
        parked_or_running(s, &cold).await?;
        let (state, reason) = s.incident_ended(&cold).await?;
        // One that was only just begun is not begun again.
        ensure!(
            matches!(state, DecisionState::Succeeded | DecisionState::Failed),
            "it ended {state:?}/{reason}"
        );
        ensure!(s.tokens_of(&cold).await? == 1, "more than one token for one act");
        is_restored(s, &cold).await
    })
}

#[test]
fn a_keeper_killed_while_a_pod_is_parked_loses_nothing_of_it() -> Result<()> {
    scenario("killed-park-keeper", async |s| {
        let [cold, _] = parked(s).await?;
        kill(s, "keeper").await?;
        s.metric("highwater_keeper_up", &[], |up| up == Some(1)).await?;
        parked_or_running(s, &cold).await?;
        is_restored(s, &cold).await
    })
}

#[test]
fn a_leader_killed_while_a_pod_is_parked_comes_to_the_same_end() -> Result<()> {
    scenario("killed-park-leader", async |s| {
        let [cold, _] = parked(s).await?;
        s.kill_leader().await?;
        let (state, reason) = s.incident_ended(&cold).await?;
        ensure!(state == DecisionState::Succeeded, "it ended {state:?}/{reason}");
        ensure!(s.tokens_of(&cold).await? == 1, "more than one token for one act");
        is_restored(s, &cold).await
    })
}

#[test]
fn an_agent_killed_on_the_way_to_a_restart_in_place_does_it_once() -> Result<()> {
    scenario("killed-in-place", async |s| {
        let action = json!({"type": "Restart", "restart": {"gracePeriodSeconds": 1, "inPlace": true}});
        let mut spec = broken_by(&s.namespace, "60Gi", &critical(40, 30, &json!([action])));
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Workload", "maxActions": 1, "windowMinutes": 60}]);
        s.program(&s.namespace, spec).await?;
        let script = "hold 6s; context; ignore-sigterm; alloc 36Gi; serve";
        let pod = s.start_server("agrees", &ModelServer::new("agrees", script).restarts_in_place()).await?;
        eventually("the decision", TIMEOUT, async || {
            let incidents = s.incidents_of(&s.namespace).await?;
            let incident = incidents.first().context("no incident")?;
            let state = incident.status.as_ref().and_then(|status| Some(status.decision.as_ref()?.state));
            ensure!(state >= Some(DecisionState::Approved), "it is {state:?}");
            Ok(())
        })
        .await?;
        kill(s, "agent").await?;
        let (state, reason) = s.incident_ended(&pod).await?;
        let now = s.api::<Pod>().get(&pod.name_any()).await?;
        ensure!(restarts(&now) <= 1, "{} restarts for one episode", restarts(&now));
        ensure!(
            state == DecisionState::Succeeded || restarts(&now) == 0,
            "it ended {state:?}/{reason} after {} restarts",
            restarts(&now)
        );
        ensure!(now.uid() == pod.uid(), "it was evicted");
        ensure!(s.tokens_of(&pod).await? == 1, "more than one token for one act");
        Ok(())
    })
}

/// Lets a policy drain the node where a device passes 60 %.
async fn drains(s: &Scenario) -> Result<()> {
    two_nodes(s)?;
    let drain = json!([{"type": "Drain", "drain": {"timeoutMinutes": 2}}]);
    let mut spec = broken_by(&s.namespace, "75Gi", &critical(60, 50, &drain));
    spec["nodes"] = json!({"matchLabels": {"kubernetes.io/hostname": NODE}});
    s.program(&s.namespace, spec).await
}

/// Pods of these names that are too much for a device of the node together, and may run elsewhere.
async fn two_to_move(s: &Scenario, names: [&str; 2]) -> Result<Vec<Pod>> {
    let mut pods = Vec::new();
    for name in names {
        let mut server =
            ModelServer::new(name, "hold 4s; context; alloc 25Gi; serve").anywhere().deployment();
        server["spec"]["template"]["spec"]["affinity"] = json!({"nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": {
                "matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]}}]}});
        s.apply(&server).await?;
        pods.push(s.running(name).await?);
    }
    Ok(pods)
}

#[test]
fn a_leader_killed_in_the_middle_of_a_drain_evicts_nobody_twice_and_leaves_no_cordon() -> Result<()> {
    scenario("killed-drain", async |s| {
        drains(s).await?;
        let start = Timestamp::now();
        let pods = two_to_move(s, ["one", "two"]).await?;
        s.cordoned(NODE, true).await?;
        s.kill_leader().await?;
        s.incident_for(
            &s.namespace,
            highwater_crds::IncidentKind::Breaker,
            ActionType::Drain,
            DecisionState::Succeeded,
            "MemoryReturned",
        )
        .await?;
        s.cordoned(NODE, false).await?;
        let mut moved = 0;
        for pod in &pods {
            let count = s.evictions_of(pod, start)?;
            ensure!(count <= 1, "{} was evicted {count} times", pod.name_any());
            ensure!(s.tokens_of(pod).await? <= 1, "several tokens for {}", pod.name_any());
            let app = pod.labels().get("app").context("its label")?.clone();
            let now = s.running(&app).await?;
            let place = now.spec.as_ref().and_then(|spec| spec.node_name.clone());
            moved += usize::from(place.as_deref() == Some(OTHER_NODE));
        }
        ensure!(moved >= 1, "nobody went to the other node");
        Ok(())
    })
}

/// More writes than any story has.
const MOST_WRITES: usize = 40;

/// Plays a story with the operator that leads killed right after one of its writes: after each of
/// these in turn, or, where `HIGHWATER_E2E_KILLS` is `all`, after every one that the story has.
async fn killed_after_writes(
    s: &Scenario,
    few: &[usize],
    story: impl AsyncFn(usize) -> Result<()>,
) -> Result<()> {
    let all = std::env::var("HIGHWATER_E2E_KILLS").is_ok_and(|which| which == "all");
    let counts: Vec<usize> = if all { (1..MOST_WRITES).collect() } else { few.to_vec() };
    for count in counts {
        let leader = s.two_operators().await?;
        let strike = s.strike(&leader, count, Signal::KILL).await?;
        let told = story(count).await;
        let struck = strike.end().await?;
        let after = struck.as_ref().map(|write| format!("{} {} {}", write.verb, write.resource, write.name));
        told.with_context(|| format!("killed after write {count}: {after:?}"))?;
        match after {
            Some(write) => eprintln!("killed after write {count}: {write}"),
            None if all && count > 1 => return Ok(()),
            None => bail!("the story has fewer than {count} writes"),
        }
    }
    ensure!(!all, "the story has no end");
    Ok(())
}

/// Waits until the episode that began since then has come to the end that is wanted; its incident, and
/// fails where there is a second one.
async fn only_incident(s: &Scenario, action: ActionType, since: Timestamp) -> Result<GpuMemoryIncident> {
    eventually(&format!("one {action:?} to have succeeded"), 2 * TIMEOUT, async || {
        let mut incidents = s.incidents_of(&s.namespace).await?;
        incidents.retain(|i| i.spec.proposed.action == action && i.spec.evidence.at.0 >= since);
        let (incident, others) = incidents.split_first().context("there is none")?;
        let decision = incident.status.as_ref().and_then(|status| status.decision.as_ref());
        let decision = decision.context("it has no decision")?;
        ensure!(
            decision.state == DecisionState::Succeeded,
            "it is {:?}/{}: {}",
            decision.state,
            decision.reason,
            decision.message
        );
        ensure!(others.is_empty(), "{} more", others.len());
        Ok(incident.clone())
    })
    .await
}

/// Waits until the pods of model servers that were taken away are gone.
async fn gone(s: &Scenario, apps: &[&str]) -> Result<()> {
    let these = format!("app in ({})", apps.join(","));
    eventually(&format!("the pods of {apps:?} to be gone"), TIMEOUT, async || {
        let left = s.api::<Pod>().list_metadata(&ListParams::default().labels(&these)).await?.items.len();
        ensure!(left == 0, "{left} are there");
        Ok(())
    })
    .await
}

async fn nothing_is_left_behind(s: &Scenario) -> Result<()> {
    s.cordoned(NODE, false).await?;
    s.tainted(NODE, false).await
}

#[test]
fn whichever_write_of_a_restart_the_leader_dies_after_it_is_done_once() -> Result<()> {
    scenario("killed-restarts", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Policy", "maxActions": 100, "windowMinutes": 60}]);
        s.program(&s.namespace, spec).await?;
        killed_after_writes(s, &[2, 3], async |count| {
            let start = Timestamp::now();
            // The pod that takes its place has its name, and does not tell the same story again.
            let app = format!("hog-{count}");
            let pod = named(s, &app).await?;
            let incident = only_incident(s, ActionType::Restart, start).await?;
            let evictions = s.evictions_of(&pod, start)?;
            ensure!(evictions <= 1, "{evictions} evictions for one episode");
            ensure!(s.tokens_for(&incident).await? == 1, "the budget is to be counted once");
            let namesake = pending_namesake(s, &pod).await?;
            ensure!(s.tokens_of(&namesake).await? == 0, "a token for the pod that came after");
            s.api::<StatefulSet>().delete(&app, &DeleteParams::background()).await?;
            gone(s, &[&app]).await?;
            nothing_is_left_behind(s).await
        })
        .await
    })
}

#[test]
fn whichever_write_of_a_drain_the_leader_dies_after_nobody_is_evicted_twice_and_no_cordon_is_left()
-> Result<()> {
    scenario("killed-drains", async |s| {
        drains(s).await?;
        killed_after_writes(s, &[3], async |count| {
            let start = Timestamp::now();
            let (one, two) = (format!("one-{count}"), format!("two-{count}"));
            let pods = two_to_move(s, [&one, &two]).await?;
            let incident = only_incident(s, ActionType::Drain, start).await?;
            nothing_is_left_behind(s).await?;
            let mut evicted = 0;
            for pod in &pods {
                let (count, tokens) = (s.evictions_of(pod, start)?, s.tokens_of(pod).await?);
                ensure!(count <= 1 && tokens <= 1, "{}: {count} evictions, {tokens} tokens", pod.name_any());
                evicted += tokens;
            }
            ensure!(evicted >= 1, "nobody was evicted");
            let tokens = s.tokens_for(&incident).await?;
            ensure!(tokens == 1 + evicted, "{tokens} tokens for a cordon and {evicted} evictions");
            s.remove(&one).await?;
            s.remove(&two).await?;
            gone(s, &[&one, &two]).await
        })
        .await
    })
}
