//! Drains: pods go where there is room, one after the other, and whatever else a drain touches is
//! as before afterwards.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use highwater_crds::{
    ActionType, DecisionState, GpuMemoryIncident, GpuMemoryNode, HeadroomBand, IncidentKind, names,
};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{
    GI, ModelServer, NODE, OTHER_NODE, SYSTEM, Scenario, TIMEOUT, broken_by, critical, policy,
    priority_class, scenario, two_nodes,
};
use jiff::Timestamp;
use k8s_openapi::api::{
    apps::v1::DaemonSet, batch::v1::Job, coordination::v1::Lease, core::v1::Pod,
    policy::v1::PodDisruptionBudget,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams},
};
use serde_json::{Value, json};

/// The spec of a policy that drains this node where a device passes 60 %.
fn draining(s: &Scenario, node: &str) -> Value {
    let drain = json!({"type": "Drain", "drain": {"timeoutMinutes": 1}});
    let mut spec = broken_by(&s.namespace, "75Gi", &critical(60, 50, &json!([drain])));
    spec["nodes"] = json!({"matchLabels": {"kubernetes.io/hostname": node}});
    spec
}

/// A server whose pod starts on a node if it may, and may run on any.
fn movable(server: &ModelServer, node: &str) -> Value {
    let mut deployment = server.clone().anywhere().deployment();
    deployment["spec"]["template"]["spec"]["affinity"] = json!({"nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": {"matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}}],
    }});
    deployment
}

/// Applies a movable server and waits until its pod runs on that node.
async fn start_on(s: &Scenario, node: &str, name: &str, script: &str) -> Result<Pod> {
    s.apply(&movable(&ModelServer::new(name, script), node)).await?;
    let pod = s.running(name).await?;
    let place = node_of(&pod);
    ensure!(place == node, "{name} was to start on {node}, and runs on {place}");
    Ok(pod)
}

fn node_of(pod: &Pod) -> String {
    pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default()
}

/// Waits for the drain's incident to be so; fails at once where it ended otherwise.
async fn drain_is(s: &Scenario, state: DecisionState, reason: &str) -> Result<GpuMemoryIncident> {
    s.incident_for(&s.namespace, IncidentKind::Breaker, ActionType::Drain, state, reason).await
}

/// Waits for the end of the drain's newest incident: state, reason and message.
async fn drain_ended(s: &Scenario, limit: Duration) -> Result<(DecisionState, String, String)> {
    eventually("the end of the drain", limit, async || {
        let mut incidents = s.incidents_of(&s.namespace).await?;
        incidents.retain(|incident| incident.spec.proposed.action == ActionType::Drain);
        let incident = incidents.pop().context("there is none")?;
        let decision = incident.status.and_then(|status| status.decision).context("no decision")?;
        ensure!(
            decision.state.is_final(),
            "it is {:?}/{}: {}",
            decision.state,
            decision.reason,
            decision.message
        );
        Ok((decision.state, decision.reason, decision.message))
    })
    .await
}

async fn keep(s: &Scenario, app: &str) -> Result<()> {
    s.apply(&json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": format!("keep-{app}")},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": app}}},
    }))
    .await
}

async fn let_go(s: &Scenario, app: &str) -> Result<()> {
    let budgets = s.api::<PodDisruptionBudget>();
    budgets.delete(&format!("keep-{app}"), &DeleteParams::default()).await?;
    Ok(())
}

/// A drain that a disruption budget holds up: the node is cordoned, and one pod cannot go. The pod.
async fn held_up(s: &Scenario) -> Result<Pod> {
    two_nodes(s)?;
    s.program(&s.namespace, draining(s, NODE)).await?;
    keep(s, "held").await?;
    let pod = start_on(s, NODE, "held", "hold 2s; context; alloc 50Gi; serve").await?;
    s.cordoned(NODE, true).await?;
    Ok(pod)
}

#[test]
fn a_drain_moves_pods_by_priority_to_the_other_node_and_takes_its_cordon_back() -> Result<()> {
    scenario("drain", async |s| {
        two_nodes(s)?;
        for (class, value) in [("drained-first", 10), ("drained-second", 20), ("drained-last", 30)] {
            s.apply(&priority_class(class, value)).await?;
        }
        s.program(&s.namespace, draining(s, NODE)).await?;
        let start = Timestamp::now();
        stays(s).await?;
        let mut pods = Vec::new();
        for (name, class) in
            [("last", "drained-last"), ("first", "drained-first"), ("second", "drained-second")]
        {
            let script = "hold 4s; context; alloc 17Gi; serve";
            s.apply(&movable(&ModelServer::new(name, script).priority_class(class), NODE)).await?;
            let pod = s.running(name).await?;
            ensure!(node_of(&pod) == NODE, "{name} runs on {}", node_of(&pod));
            pods.push(pod);
        }
        let incident = drain_is(s, DecisionState::Succeeded, "MemoryReturned").await?;
        s.explained(&incident)?;
        let decision =
            incident.status.as_ref().and_then(|status| status.decision.clone()).context("a decision")?;
        ensure!(
            decision.targets.iter().any(|node| node == OTHER_NODE),
            "the targets are {:?}",
            decision.targets
        );
        ensure!(decision.acted_at.is_some(), "{decision:?}");

        let evictions = s.evictions_since(start)?;
        let order: Vec<_> = evictions
            .iter()
            .filter(|write| write.namespace == s.namespace)
            .filter_map(|write| write.name.split('-').next())
            .collect();
        // As few as were needed, those of least priority first, nobody twice.
        ensure!(
            !order.is_empty() && ["first", "second", "last"].starts_with(&order),
            "the evictions were of {order:?}"
        );
        for name in &order {
            let old = pods.iter().find(|pod| pod.name_any().starts_with(&format!("{name}-")));
            let new = s.running_other_than(name, old.and_then(|pod| pod.metadata.uid.as_deref())).await?;
            ensure!(node_of(&new) == OTHER_NODE, "{name} went to {}", node_of(&new));
        }
        s.cordoned(NODE, false).await?;
        stayed(s).await
    })
}

/// What no drain may move: a pod of a DaemonSet, one that nobody owns, and one of a finished job.
async fn stays(s: &Scenario) -> Result<()> {
    let template = ModelServer::new("daemon", "context; alloc 1Gi; serve").template();
    s.apply(&json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "daemon"},
        "spec": {"selector": {"matchLabels": {"app": "daemon"}}, "template": template},
    }))
    .await?;
    s.apply(&ModelServer::new("bare", "context; alloc 1Gi; serve").bare_pod()).await?;
    let mut template = ModelServer::new("job", "context; alloc 1Gi; exit 0").template();
    template["spec"]["restartPolicy"] = json!("Never");
    s.apply(&json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": {"template": template},
    }))
    .await?;
    for app in ["daemon", "bare"] {
        s.running(app).await?;
    }
    eventually("the job to be finished", TIMEOUT, async || {
        let job = s.api::<Job>().get("job").await?;
        job.status.and_then(|status| status.succeeded).filter(|count| *count == 1).context("it is not")
    })
    .await
    .map(drop)
}

async fn stayed(s: &Scenario) -> Result<()> {
    for app in ["daemon", "bare"] {
        let pod = s.running(app).await?;
        s.untouched(&pod).await?;
    }
    let jobs = s.api::<Pod>().list(&ListParams::default().labels("app=job")).await?;
    ensure!(jobs.items.len() == 1, "{} pods of the finished job", jobs.items.len());
    s.api::<DaemonSet>().delete("daemon", &DeleteParams::background()).await?;
    Ok(())
}

#[test]
fn with_no_room_elsewhere_no_target_is_said_and_nobody_is_evicted() -> Result<()> {
    scenario("no-target", async |s| {
        two_nodes(s)?;
        s.program(&s.namespace, draining(s, NODE)).await?;
        // A share of each device, and 79 % of both.
        let filler = "device 0; context; alloc 62Gi; device 1; context; alloc 62Gi; serve";
        s.apply(&ModelServer::new("filler", filler).gpus(2).on(OTHER_NODE).deployment()).await?;
        let filler = s.running("filler").await?;
        s.says(&filler, " serve used=").await?;
        headroom_is(s, OTHER_NODE, |ratio| ratio < 0.3).await?;
        eventually("both devices to be told as nearly full", TIMEOUT, async || {
            let node = Api::<GpuMemoryNode>::all(s.client.clone()).get(OTHER_NODE).await?;
            let bands: Vec<_> = node.status.iter().flat_map(|s| &s.devices).map(|d| d.headroom).collect();
            ensure!(bands == [HeadroomBand::Below88; 2], "they are told as {bands:?}");
            Ok(())
        })
        .await?;
        let start = Timestamp::now();
        let pod = start_on(s, NODE, "stuck", "hold 2s; context; alloc 50Gi; serve").await?;
        let incident = drain_is(s, DecisionState::Proposed, "NoTarget").await?;
        let decision = incident.status.and_then(|status| status.decision).context("a decision")?;
        ensure!(
            decision.message.chars().any(|character| character.is_ascii_digit()),
            "it gives no numbers: {}",
            decision.message
        );
        never("a cordon without a target", Duration::from_secs(3), async || {
            s.cordon_of(NODE).await?.0.then_some("cordoned").context("none")
        })
        .await?;
        for pod in [&pod, &filler] {
            s.untouched(pod).await?;
            ensure!(s.evictions_of(pod, start)? == 0, "{} was evicted", pod.name_any());
        }
        // Once there is room, it goes on by itself.
        let deployments = s.api::<k8s_openapi::api::apps::v1::Deployment>();
        deployments.delete("filler", &DeleteParams::background()).await?;
        drain_is(s, DecisionState::Succeeded, "MemoryReturned").await?;
        s.cordoned(NODE, false).await
    })
}

/// Waits until the node's agent exports a headroom that routers can use, and that it is so.
async fn headroom_is(s: &Scenario, node: &str, holds: impl Fn(f64) -> bool) -> Result<()> {
    eventually(&format!("the headroom of {node}"), TIMEOUT, async || {
        let ratios = s.metrics(node).await?.values("highwater_node_headroom_ratio", &[]);
        ensure!(!ratios.is_empty(), "it is not exported");
        ensure!(ratios.iter().all(|ratio| (0.0..=1.0).contains(ratio)), "no ratios: {ratios:?}");
        ensure!(ratios.iter().any(|ratio| holds(*ratio)), "the ratios are {ratios:?}");
        Ok(())
    })
    .await
}

#[test]
fn a21_a_node_that_was_powered_off_is_no_target_and_its_data_expire() -> Result<()> {
    scenario("a21-off", async |s| {
        two_nodes(s)?;
        s.program(&s.namespace, draining(s, NODE)).await?;
        headroom_is(s, OTHER_NODE, |ratio| ratio > 0.9).await?;
        s.power_off(OTHER_NODE).await?;
        let result = async {
            let leases: Api<Lease> = Api::namespaced(s.client.clone(), "kube-node-lease");
            eventually("the lease of the node to run out", Duration::from_secs(70), async || {
                let renewed = leases.get(OTHER_NODE).await?.spec.and_then(|spec| spec.renew_time);
                let age = Timestamp::now().duration_since(renewed.context("never renewed")?.0).as_secs();
                ensure!(age > 40, "it was renewed {age} s ago");
                Ok(())
            })
            .await?;
            let start = Timestamp::now();
            let pod = start_on(s, NODE, "alone", "hold 1s; context; alloc 50Gi; serve").await?;
            drain_is(s, DecisionState::Proposed, "NoTarget").await?;
            ensure!(s.evictions_of(&pod, start)? == 0, "it was evicted to where nothing runs");
            s.untouched(&pod).await
        }
        .await;
        s.power_on(OTHER_NODE).await?;
        result
    })
}

#[test]
fn d01_d11_a_person_who_uncordons_ends_the_drain() -> Result<()> {
    scenario("d11-uncordon", async |s| {
        let pod = held_up(s).await?;
        let start = Timestamp::now();
        s.cordon_by_hand(NODE, false).await?;
        let (state, reason, _) = drain_ended(s, TIMEOUT).await?;
        ensure!(
            matches!(state, DecisionState::Cancelled | DecisionState::Failed) && reason == "Uncordoned",
            "it ended {state:?}/{reason}"
        );
        let_go(s, "held").await?;
        never("an eviction after that", Duration::from_secs(6), async || {
            s.evictions_since(start)?.pop().context("none")
        })
        .await?;
        let (cordoned, owner) = s.cordon_of(NODE).await?;
        ensure!(!cordoned && owner.is_none(), "cordoned {cordoned} for {owner:?}");
        s.untouched(&pod).await
    })
}

#[test]
fn d01_memory_that_fell_ends_the_drain_and_undoes_the_cordon() -> Result<()> {
    scenario("d01-drain", async |s| {
        two_nodes(s)?;
        s.program(&s.namespace, draining(s, NODE)).await?;
        keep(s, "held").await?;
        let script = "hold 2s; context; alloc 50Gi; hold 10s; free; alloc 1Gi; serve";
        let pod = start_on(s, NODE, "held", script).await?;
        s.cordoned(NODE, true).await?;
        s.says(&pod, " op=free ").await?;
        let (state, reason, message) = drain_ended(s, TIMEOUT).await?;
        ensure!(state == DecisionState::Cancelled && reason == "Recovered", "{state:?}/{reason}: {message}");
        s.cordoned(NODE, false).await?;
        s.untouched(&pod).await
    })
}

#[test]
fn d03_a_refused_eviction_is_tried_again_after_a_pause_and_goes_on_by_itself() -> Result<()> {
    scenario("d03-backoff", async |s| {
        let start = Timestamp::now();
        let pod = held_up(s).await?;
        let tried = async |count: usize| {
            eventually(&format!("{count} attempts"), TIMEOUT, async || {
                let tries: Vec<_> = attempts(s, start)?;
                ensure!(tries.len() >= count, "{} so far", tries.len());
                Ok(tries)
            })
            .await
        };
        let seen = tried(2).await?;
        let gaps: Vec<_> =
            seen.windows(2).filter_map(|pair| Some(pair.get(1)?.duration_since(*pair.first()?))).collect();
        ensure!(gaps.iter().all(|gap| gap.as_millis() >= 4_900), "the pauses were {gaps:?}");
        let_go(s, "held").await?;
        drain_is(s, DecisionState::Succeeded, "MemoryReturned").await?;
        let next = s.running_other_than("held", pod.metadata.uid.as_deref()).await?;
        ensure!(node_of(&next) == OTHER_NODE, "it runs on {}", node_of(&next));
        s.cordoned(NODE, false).await
    })
}

/// When an eviction was asked for since then, for good, and what the answer was not success.
fn attempts(s: &Scenario, since: Timestamp) -> Result<Vec<Timestamp>> {
    let mut writes = s.writes_since(since)?;
    writes.retain(|write| {
        write.resource == "pods/eviction" && !write.dry_run && write.namespace == s.namespace
    });
    Ok(writes.into_iter().map(|write| write.at).collect())
}

#[test]
fn d04_a_cancelled_drain_is_not_succeeded_and_does_not_stop_the_next() -> Result<()> {
    scenario("d04-episodes", async |s| {
        two_nodes(s)?;
        let mut spec = draining(s, NODE);
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Policy", "maxActions": 0, "windowMinutes": 60}]);
        s.program(&s.namespace, spec).await?;
        let script = "hold 2s; context; alloc 50Gi; hold 6s; free; hold 5s; alloc 50Gi; serve";
        let pod = start_on(s, NODE, "restless", script).await?;
        let first = drain_is(s, DecisionState::Proposed, "BudgetExhausted").await?;
        s.says(&pod, " op=free ").await?;
        let ended = drain_is(s, DecisionState::Cancelled, "Recovered").await?;
        ensure!(ended.uid() == first.uid(), "another incident was cancelled");
        s.apply(&policy(&s.namespace, draining(s, NODE))).await?;
        let second = drain_is_of_another(s, &first).await?;
        ensure!(second.spec.episode > first.spec.episode, "the episode is {}", second.spec.episode);
        let incidents: Api<GpuMemoryIncident> = Api::namespaced(s.client.clone(), SYSTEM);
        let still = incidents.get(&first.name_any()).await?;
        let state = still.status.and_then(|status| Some(status.decision?.state));
        ensure!(state == Some(DecisionState::Cancelled), "the cancelled incident is now {state:?}");
        s.cordoned(NODE, false).await
    })
}

async fn drain_is_of_another(s: &Scenario, first: &GpuMemoryIncident) -> Result<GpuMemoryIncident> {
    eventually("a drain for the second episode to have succeeded", 2 * TIMEOUT, async || {
        let mut incidents = s.incidents_of(&s.namespace).await?;
        incidents.retain(|incident| incident.uid() != first.uid());
        let incident = incidents.pop().context("there is no other incident")?;
        let state = incident.status.as_ref().and_then(|status| Some(status.decision.as_ref()?.state));
        ensure!(state == Some(DecisionState::Succeeded), "it is {state:?}");
        Ok(incident)
    })
    .await
}

#[test]
fn d05_a_cordon_of_somebody_else_is_left_as_it_is() -> Result<()> {
    scenario("d05-foreign", async |s| {
        two_nodes(s)?;
        s.program(&s.namespace, draining(s, NODE)).await?;
        let script = "hold 5s; context; alloc 50Gi; hold 8s; free; alloc 1Gi; serve";
        let pod = start_on(s, NODE, "there", script).await?;
        s.cordon_by_hand(NODE, true).await?;
        let result = async {
            drain_is(s, DecisionState::Proposed, "NodeCordoned").await?;
            s.untouched(&pod).await?;
            drain_is(s, DecisionState::Cancelled, "Recovered").await?;
            let (cordoned, owner) = s.cordon_of(NODE).await?;
            ensure!(cordoned && owner.is_none(), "it is cordoned {cordoned} for {owner:?}");
            s.untouched(&pod).await
        }
        .await;
        s.cordon_by_hand(NODE, false).await?;
        result
    })
}

#[test]
fn d07_l03_l04_zombie_memory_leads_to_a_request_for_a_reset_first_and_to_no_blame() -> Result<()> {
    scenario("d07-zombie", async |s| {
        two_nodes(s)?;
        s.program(&s.namespace, draining(s, NODE)).await?;
        let pod = start_on(s, NODE, "innocent", "context; alloc 1Gi; serve").await?;
        let device = s.device_of(&pod).await?;
        let start = Timestamp::now();
        s.fault(NODE, &["--device", &device, "zombie", "--pid", "4194401", "--bytes", "40Gi"]).await?;
        let asked = s.reset_requested(NODE, true).await?;
        let uuid = s.metrics(NODE).await?.labels("highwater_device_info", &[("device", &device)], "uuid");
        ensure!(uuid.iter().any(|uuid| asked.contains(uuid.as_str())), "{asked:?} does not name {uuid:?}");
        let waits = s.incident_for(
            &s.namespace,
            IncidentKind::ZombieMemory,
            ActionType::Drain,
            DecisionState::Proposed,
            "ResetRequested",
        );
        ensure!(waits.await?.spec.subject.is_none(), "zombie memory is nobody's");
        never("a cordon before a reset was waited for", Duration::from_secs(4), async || {
            s.cordon_of(NODE).await?.0.then_some("cordoned").context("none")
        })
        .await?;
        ensure!(s.evictions_of(&pod, start)? == 0, "somebody was evicted");
        // Somebody resets the device.
        s.cluster.gpusim(NODE, &["clear"]).await?;
        s.reset_requested(NODE, false).await?;
        let ended = s.incident_for(
            &s.namespace,
            IncidentKind::ZombieMemory,
            ActionType::Drain,
            DecisionState::Cancelled,
            "Recovered",
        );
        ended.await?;
        s.untouched(&pod).await?;
        s.served_without_failure(&pod).await
    })
}

#[test]
fn d08_a_drain_that_cannot_end_is_given_up_said_and_undone() -> Result<()> {
    scenario("d08-blocked", async |s| {
        let pod = held_up(s).await?;
        let (state, reason, message) = drain_ended(s, 3 * TIMEOUT).await?;
        ensure!(state == DecisionState::Failed && reason == "DrainTimedOut", "{state:?}/{reason}: {message}");
        s.cordoned(NODE, false).await?;
        s.untouched(&pod).await
    })
}

#[test]
fn a_pause_stops_the_next_step_of_a_drain_and_never_its_undoing() -> Result<()> {
    scenario("drain-paused", async |s| {
        two_nodes(s)?;
        s.program(&s.namespace, draining(s, NODE)).await?;
        keep(s, "held").await?;
        let script = "hold 2s; context; alloc 50Gi; hold 16s; free; alloc 1Gi; serve";
        let pod = start_on(s, NODE, "held", script).await?;
        s.cordoned(NODE, true).await?;
        let start = Timestamp::now();
        s.pause_namespace(SYSTEM, true).await?;
        let result = async {
            let_go(s, "held").await?;
            never("an eviction while paused", Duration::from_secs(7), async || {
                s.evictions_since(start)?.pop().context("none")
            })
            .await?;
            s.says(&pod, " op=free ").await?;
            let (state, reason, message) = drain_ended(s, TIMEOUT).await?;
            ensure!(
                state == DecisionState::Cancelled && reason == "Recovered",
                "{state:?}/{reason}: {message}"
            );
            s.cordoned(NODE, false).await?;
            s.untouched(&pod).await
        }
        .await;
        s.pause_namespace(SYSTEM, false).await?;
        result
    })
}

#[test]
fn a_policy_deleted_in_the_middle_of_a_drain_ends_it_and_undoes_the_cordon() -> Result<()> {
    scenario("drain-deleted", async |s| {
        let pod = held_up(s).await?;
        s.delete_policy(&s.namespace).await?;
        let (state, reason, message) = drain_ended(s, TIMEOUT).await?;
        ensure!(
            matches!(state, DecisionState::Cancelled | DecisionState::Failed) && reason == "PolicyDeleted",
            "{state:?}/{reason}: {message}"
        );
        s.cordoned(NODE, false).await?;
        let_go(s, "held").await?;
        s.untouched(&pod).await
    })
}

#[test]
fn an_incident_deleted_by_hand_in_the_middle_of_a_drain_leaves_no_cordon_and_no_second_eviction() -> Result<()>
{
    scenario("drain-lost", async |s| {
        let start = Timestamp::now();
        let pod = held_up(s).await?;
        // No policy, so that nobody opens it anew.
        let incidents: Api<GpuMemoryIncident> = Api::namespaced(s.client.clone(), SYSTEM);
        for incident in s.incidents_about_nobody(&s.namespace).await? {
            incidents.delete(&incident.name_any(), &DeleteParams::default()).await?;
        }
        s.delete_policy(&s.namespace).await?;
        s.cordoned(NODE, false).await?;
        let_go(s, "held").await?;
        ensure!(s.evictions_of(&pod, start)? == 0, "it was evicted");
        s.untouched(&pod).await
    })
}

#[test]
fn a_node_powered_off_during_a_drain_ends_it_and_comes_back_without_our_cordon() -> Result<()> {
    scenario("drain-off", async |s| {
        two_nodes(s)?;
        s.apply(&policy(&s.namespace, draining(s, OTHER_NODE))).await?;
        s.policy_condition(&s.namespace, "Programmed", "True", "Programmed").await?;
        keep(s, "held").await?;
        start_on(s, OTHER_NODE, "held", "hold 2s; context; alloc 50Gi; serve").await?;
        s.cordoned(OTHER_NODE, true).await?;
        let start = Timestamp::now();
        s.power_off(OTHER_NODE).await?;
        let result = async {
            let (state, reason, message) = drain_ended(s, 3 * TIMEOUT).await?;
            if state == DecisionState::Succeeded {
                bail!("nobody can know that: {reason}: {message}");
            }
            s.cordoned(OTHER_NODE, false).await
        }
        .await;
        s.power_on(OTHER_NODE).await?;
        result?;
        let evictions = s.evictions_since(start)?;
        ensure!(evictions.len() <= 1, "the drain went on without its node: {evictions:?}");
        Ok(())
    })
}

#[test]
fn an_uninstall_brings_parked_memory_back_and_takes_its_cordon_along() -> Result<()> {
    scenario("leaving", async |s| {
        two_nodes(s)?;
        // On the first node a pod is parked, and the second is cordoned for a drain that is held up.
        let mut parking = broken_by(&s.namespace, "60Gi", &critical(40, 38, &json!([{"type": "Park"}])));
        parking["nodes"] = json!({"matchLabels": {"kubernetes.io/hostname": NODE}});
        s.program(&s.namespace, parking).await?;
        let second = format!("{}-drain", s.namespace);
        s.apply(&policy(&second, draining(s, OTHER_NODE))).await?;
        s.policy_condition(&second, "Programmed", "True", "Programmed").await?;
        keep(s, "held").await?;
        let cold = ModelServer::new("cold", "context; alloc 6Gi; serve").parkable();
        s.apply(&cold.deployment()).await?;
        let cold = s.running("cold").await?;
        s.says(&cold, " serve used=").await?;
        let hot = s.start("hot", "context; hold 1s; grow 16Gi/s to 27Gi; serve").await?;
        s.pod_metric(&cold, "highwater_pod_parked_bytes", |bytes| bytes >= Some(6 * GI)).await?;
        start_on(s, OTHER_NODE, "held", "context; alloc 50Gi; serve").await?;
        s.cordoned(OTHER_NODE, true).await?;

        let result = async {
            s.cluster.uninstall().await?;
            let (cordoned, owner) = s.cordon_of(OTHER_NODE).await?;
            ensure!(!cordoned && owner.is_none(), "{OTHER_NODE} is cordoned {cordoned} for {owner:?}");
            let annotations = s.node_object(NODE).await?.annotations().clone();
            ensure!(!annotations.contains_key(names::RESET_REQUESTED), "{annotations:?}");
            // It answers again: nobody measures any more.
            eventually("the parked pod to run again", TIMEOUT, async || {
                s.nobody_is_stopped().await?;
                let now = s.log(&cold).await?;
                let beats = now.iter().filter(|line| line.text.contains(" serve used=")).count();
                tokio::time::sleep(Duration::from_secs(2)).await;
                let later = s.log(&cold).await?;
                let more = later.iter().filter(|line| line.text.contains(" serve used=")).count();
                ensure!(more > beats, "it is still at {beats} beats");
                Ok(())
            })
            .await
        }
        .await;
        s.cluster.install().await?;
        result?;
        for pod in [&cold, &hot] {
            s.untouched(pod).await?;
            s.served_without_failure(pod).await?;
        }
        Ok(())
    })
}
