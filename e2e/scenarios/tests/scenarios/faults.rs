//! Things that die at the worst moment.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{DecisionState, GpuMemoryIncident};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{
    GI, ModelServer, NODE, SYSTEM, Samples, Scenario, TIMEOUT, deployment, enforce, scenario,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::{Api, ResourceExt as _, api::DeleteParams};
use rustix::process::Signal;
use serde_json::{Value, json};

const HOG: &str = "ignore-sigterm; context; alloc 6Gi; hold 1s; grow 8Gi/s to 30Gi; hold";

/// A policy that lets the same scenario act often.
fn generous(namespace: &str) -> Value {
    let mut spec = enforce(namespace, "16Gi");
    spec["remediation"]["budget"]["rates"] =
        json!([{"scope": "Policy", "maxActions": 100, "windowMinutes": 60}]);
    spec
}

#[test]
fn an_agent_killed_at_ten_points_of_the_story_neither_forgets_nor_repeats() -> Result<()> {
    scenario("agent-killed", async |s| {
        s.program("agent-killed", generous(&s.namespace)).await?;
        for point in Point::ALL {
            let start = Timestamp::now();
            let app = format!("hog-{}", point as u8);
            if point == Point::BeforeThePod {
                kill_agent(s).await?;
            }
            let pod = s.start(&app, HOG).await?;
            if point != Point::BeforeThePod {
                reach(s, &pod, point).await.with_context(|| format!("{point:?}"))?;
                kill_agent(s).await?;
            }
            let incident = s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await;
            incident.with_context(|| format!("killed at {point:?}"))?;
            let evictions: Vec<_> =
                s.evictions_since(start)?.into_iter().filter(|write| write.name == pod.name_any()).collect();
            ensure!(evictions.len() == 1, "killed at {point:?}: {evictions:?}");
            ensure!(incidents_about(s, &pod).await?.len() == 1, "killed at {point:?}: a second incident");
            // The pod that takes its place would start the story again.
            s.cluster.kubectl(["delete", "deployment", "-n", &s.namespace, &app]).await?;
        }
        Ok(())
    })
}

/// Where in the story the agent is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    BeforeThePod,
    Running,
    Growing,
    NearTheLimit,
    OverTheLimit,
    IncidentOpened,
    Decided,
    Evicted,
    Terminating,
    MemoryBack,
}

impl Point {
    const ALL: [Self; 10] = [
        Self::BeforeThePod,
        Self::Running,
        Self::Growing,
        Self::NearTheLimit,
        Self::OverTheLimit,
        Self::IncidentOpened,
        Self::Decided,
        Self::Evicted,
        Self::Terminating,
        Self::MemoryBack,
    ];
}

/// Waits for a point of the story, as closely as it can be seen from outside.
async fn reach(s: &Scenario, pod: &Pod, point: Point) -> Result<()> {
    let name = pod.name_any();
    let agent =
        format!("{}:9440", s.agent(NODE).await?.status.and_then(|status| status.pod_ip).context("no IP")?);
    let used_over = async |bytes: i64| {
        eventually("the pod's use", TIMEOUT, async || {
            let used =
                Samples::scrape(&agent).await?.bytes("highwater_pod_memory_used_bytes", &[("pod", &name)])?;
            ensure!(used > Some(bytes), "it is {used:?}");
            Ok(())
        })
        .await
    };
    let decided = async |holds: fn(&GpuMemoryIncident) -> bool| {
        eventually("the incident", TIMEOUT, async || {
            let incidents = incidents_about(s, pod).await?;
            incidents.iter().any(holds).then_some(()).context("not yet")
        })
        .await
    };
    match point {
        Point::BeforeThePod | Point::Running => Ok(()),
        Point::Growing => used_over(7 * GI).await,
        Point::NearTheLimit => used_over(14 * GI).await,
        Point::OverTheLimit => used_over(16 * GI).await,
        Point::IncidentOpened => decided(|_| true).await,
        Point::Decided => decided(|i| i.status.as_ref().is_some_and(|s| s.decision.is_some())).await,
        Point::Evicted => {
            decided(|i| {
                i.status.as_ref().and_then(|s| s.decision.as_ref()).is_some_and(|d| d.acted_at.is_some())
            })
            .await
        }
        Point::Terminating => {
            eventually("the pod on its way out", TIMEOUT, async || {
                match s.api::<Pod>().get_opt(&name).await? {
                    Some(pod) if pod.metadata.deletion_timestamp.is_none() => anyhow::bail!("not yet"),
                    _ => Ok(()),
                }
            })
            .await
        }
        Point::MemoryBack => {
            eventually("the pod's memory back", TIMEOUT, async || {
                let used = Samples::scrape(&agent)
                    .await?
                    .bytes("highwater_pod_memory_used_bytes", &[("pod", &name)])?;
                ensure!(used.unwrap_or(0) == 0, "it is {used:?}");
                Ok(())
            })
            .await
        }
    }
}

/// Kills the agent and waits until its successor measures; the ledger must then be right within
/// a second.
async fn kill_agent(s: &Scenario) -> Result<()> {
    let agent = s.agent(NODE).await?;
    s.kill("agent").await?;
    s.back("agent", &agent).await?;
    eventually("the ledger to be right", Duration::from_secs(1), async || ledger_is_right(s).await).await
}

/// Compares the agent's buckets with what the simulated driver itself says.
async fn ledger_is_right(s: &Scenario) -> Result<()> {
    let samples = s.metrics(NODE).await?;
    for device in ["0", "1"] {
        samples.adds_up(device)?;
        let foreign =
            samples.bytes("highwater_device_memory_bytes", &[("device", device), ("bucket", "foreign")])?;
        ensure!(foreign == Some(0), "device {device}: pods taken for foreign: {foreign:?}");
    }
    Ok(())
}

async fn incidents_about(s: &Scenario, pod: &Pod) -> Result<Vec<GpuMemoryIncident>> {
    let uid = pod.uid().unwrap_or_default();
    let mut incidents = s.incidents().await?;
    incidents.retain(|incident| incident.spec.subject.as_ref().is_some_and(|subject| subject.uid == uid));
    Ok(incidents)
}

#[test]
fn a_leader_killed_on_the_way_to_an_act_leaves_it_to_be_done_once() -> Result<()> {
    scenario("leader-killed", async |s| {
        s.program("leader-killed", generous(&s.namespace)).await?;
        let delays = [0, 40];
        for (round, delay) in delays.into_iter().enumerate() {
            let start = Timestamp::now();
            let app = format!("hog-{round}");
            let pod = s.start(&app, HOG).await?;
            let leader = s.leader().await?;
            eventually("the incident", TIMEOUT, async || {
                incidents_about(s, &pod).await?.pop().map(drop).context("there is none")
            })
            .await?;
            // From here on the decision and the act follow within milliseconds; the delays spread
            // the kills over that time.
            tokio::time::sleep(Duration::from_millis(delay)).await;
            s.kill_operator(&leader).await?;
            s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
            let evictions: Vec<_> =
                s.evictions_since(start)?.into_iter().filter(|write| write.name == pod.name_any()).collect();
            // None where the request was under way when its sender died: it was done all the same.
            ensure!(evictions.len() <= 1, "killed after {delay} ms: {evictions:?}");
            ensure!(incidents_about(s, &pod).await?.len() == 1, "a second incident");
            // Its successor may have been evicted meanwhile, with a token of its own.
            let spent = s.tokens_of(&pod).await?;
            ensure!(spent == 1, "killed after {delay} ms: {spent} tokens for one eviction");
            ensure!(s.leader().await? != leader, "the killed leader leads");
            s.cluster.kubectl(["delete", "deployment", "-n", &s.namespace, &app]).await?;
        }
        Ok(())
    })
}

/// What a leader leaves behind that dies between its decision and the act, made by hand, since
/// no kill from outside hits those few milliseconds for certain.
#[test]
fn an_approved_act_whose_leader_died_is_done_once_with_the_token_that_is_there() -> Result<()> {
    scenario("approved-left", async |s| {
        s.program("approved-left", generous(&s.namespace)).await?;
        let start = Timestamp::now();
        scale_operator(s, 0).await?;
        let left = async {
            let pod = s.start("hog", HOG).await?;
            let incident = eventually("the incident", TIMEOUT, async || {
                incidents_about(s, &pod).await?.pop().context("there is none")
            })
            .await?;
            leave_approved(s, &incident, &pod).await?;
            anyhow::Ok(pod)
        }
        .await;
        scale_operator(s, 2).await?;
        let pod = left?;
        s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        let evictions: Vec<_> =
            s.evictions_since(start)?.into_iter().filter(|write| write.name == pod.name_any()).collect();
        ensure!(evictions.len() == 1, "{evictions:?}");
        ensure!(s.tokens_of(&pod).await? == 1, "the token that was there was to be used");
        Ok(())
    })
}

async fn scale_operator(s: &Scenario, replicas: i32) -> Result<()> {
    let deployment = "deployment/highwater-operator";
    let scale = format!("--replicas={replicas}");
    s.cluster.kubectl(["scale", "-n", SYSTEM, deployment, &scale]).await?;
    eventually("the operator's replicas", TIMEOUT, async || {
        let there = s.operators().await?.len();
        ensure!(i32::try_from(there)? == replicas, "{there} are there");
        Ok(())
    })
    .await
}

/// Reserves a token and stores the decision, as the operator does.
async fn leave_approved(s: &Scenario, incident: &GpuMemoryIncident, pod: &Pod) -> Result<()> {
    let now = Timestamp::now();
    let (incident_uid, pod_uid) = (incident.uid().context("no UID")?, pod.uid().context("no UID")?);
    let token = json!({
        "at": now, "policy": incident.spec.policy, "workload": "Deployment/hog", "namespace": s.namespace,
        "node": NODE, "pod": pod_uid, "keepUntil": now.checked_add(Duration::from_hours(1))?,
    });
    let maps: Api<ConfigMap> = Api::namespaced(s.client.clone(), SYSTEM);
    let name = highwater_crds::names::BUDGET_CONFIG_MAP;
    let mut map = maps.get_opt(name).await?.context("no act has been done on this cluster before")?;
    let text = map.data.as_mut().and_then(|data| data.values_mut().next()).context("an empty ledger")?;
    let mut ledger: Value = serde_json::from_str(text)?;
    ledger["tokens"][format!("{incident_uid}/{pod_uid}")] = token;
    *text = ledger.to_string();
    maps.replace(name, &kube::api::PostParams::default(), &map).await?;
    let decision =
        json!({"state": "Approved", "reason": "WithinBudget", "message": "", "since": format!("{now:.6}")});
    let patch = json!({"status": {"decision": decision}}).to_string();
    let arguments = [
        "patch",
        "gmi",
        "-n",
        &s.namespace,
        &incident.name_any(),
        "--subresource=status",
        "--type=merge",
        "-p",
        &patch,
    ];
    s.cluster.kubectl(arguments).await.map(drop)
}

/// A pod of a StatefulSet that will be over its quota, and whose next of the same name will find no node.
pub(crate) async fn named(s: &Scenario, name: &str) -> Result<Pod> {
    let mut set = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name},
        "spec": {"serviceName": name, "replicas": 1, "selector": {"matchLabels": {"app": name}},
                 "updateStrategy": {"type": "OnDelete"}, "template": ModelServer::new(name, HOG).template()},
    });
    s.apply(&set).await?;
    let pod = s.running(name).await?;
    set["spec"]["template"]["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "nowhere"});
    s.apply(&set).await?;
    Ok(pod)
}

/// Waits until another pod has the name of this one and is Pending.
pub(crate) async fn pending_namesake(s: &Scenario, old: &Pod) -> Result<Pod> {
    let name = old.name_any();
    eventually(&format!("another {name} that is Pending"), TIMEOUT, async || {
        let pod = s.api::<Pod>().get(&name).await?;
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        ensure!(pod.uid() != old.uid() && phase == Some("Pending"), "{:?} is {phase:?}", pod.uid());
        Ok(pod)
    })
    .await
}

/// Fails where more than `most` evictions of that name were granted since then, or the namesake is
/// touched within a moment; and where more or less than one token was spent on the first.
async fn hit_at_most(s: &Scenario, most: usize, old: &Pod, namesake: &Pod, start: Timestamp) -> Result<()> {
    never("an act on the pod that came after", Duration::from_secs(4), async || {
        s.untouched(namesake).await.err().context("untouched")
    })
    .await?;
    let evictions = s.evictions_of(old, start)?;
    ensure!(evictions <= most, "{evictions} evictions of {}", old.name_any());
    let spent = s.tokens_of(old).await?;
    ensure!(spent == 1, "{spent} tokens for one episode");
    ensure!(s.tokens_of(namesake).await? == 0, "a token for the pod that came after");
    Ok(())
}

#[test]
fn of_two_operators_that_both_believe_they_lead_the_second_evicts_nobody_again() -> Result<()> {
    scenario("two-leaders", async |s| {
        s.program("two-leaders", generous(&s.namespace)).await?;
        let start = Timestamp::now();
        let leader = s.two_operators().await?;
        // Halted once its approval is stored, with the eviction in mind; its lease runs out.
        let mut strike = s.strike(&leader, 2, Signal::STOP).await?;
        let acted = async {
            let pod = named(s, "named").await?;
            strike.landed().await?;
            s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
            let namesake = pending_namesake(s, &pod).await?;
            anyhow::Ok((pod, namesake))
        }
        .await;
        strike.goes_on()?;
        let (pod, namesake) = acted?;
        ensure!(s.leader().await? != leader, "the one that was halted leads");
        hit_at_most(s, 1, &pod, &namesake, start).await?;
        ensure!(incidents_about(s, &pod).await?.len() == 1, "a second incident");
        s.two_operators().await.map(drop)
    })
}

#[test]
fn an_act_that_is_under_way_misses_the_pending_pod_that_has_the_name_by_now() -> Result<()> {
    scenario("namesake", async |s| {
        s.program("namesake", generous(&s.namespace)).await?;
        let start = Timestamp::now();
        let leader = s.two_operators().await?;
        let mut strike = s.strike(&leader, 2, Signal::STOP).await?;
        let replaced = async {
            let pod = named(s, "named").await?;
            strike.landed().await?;
            s.api::<Pod>().delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await?;
            let namesake = pending_namesake(s, &pod).await?;
            anyhow::Ok((pod, namesake))
        }
        .await;
        strike.goes_on()?;
        let (pod, namesake) = replaced?;
        hit_at_most(s, 1, &pod, &namesake, start).await?;
        s.incident_ended(&pod).await?;
        s.two_operators().await.map(drop)
    })
}

#[test]
fn with_the_api_server_away_for_a_minute_the_node_goes_on_and_all_is_caught_up() -> Result<()> {
    scenario("api-away", async |s| {
        let mut spec = generous(&s.namespace);
        spec["breakers"] = json!([{
            "scope": "Device", "minimumStayMilliseconds": 0,
            "warning": {"tripPercent": 30, "clearPercent": 20, "holdMilliseconds": 0, "actions": [{"type": "Signal"}]},
        }]);
        s.program("api-away", spec).await?;
        s.apply(&deployment("hog", "ignore-sigterm; context; alloc 4Gi; hold 15s; grow 4Gi/s to 40Gi; hold"))
            .await?;
        let pod = s.running("hog").await?;
        let name = pod.name_any();
        let uid = pod.uid().context("no UID")?;
        let agent = format!(
            "{}:9440",
            s.agent(NODE).await?.status.and_then(|status| status.pod_ip).context("no IP")?
        );

        let device = s.device_of(&pod).await?;
        s.cluster.stop("kube-apiserver").await?;
        let away = tokio::time::Instant::now();
        let during = async {
            let first = Samples::scrape(&agent).await?.value("highwater_samples_total", &[])?;
            eventually(
                "use, level and samples to move with the API server away",
                Duration::from_secs(45),
                async || {
                    let samples = Samples::scrape(&agent).await?;
                    let used = samples.bytes("highwater_pod_memory_used_bytes", &[("pod", &name)])?;
                    ensure!(used > Some(39 * GI), "use is {used:?}");
                    let level =
                        samples.values("highwater_device_level", &[("device", &device), ("mode", "Enforce")]);
                    ensure!(level.iter().any(|level| *level >= 1.0), "level is {level:?}");
                    ensure!(samples.value("highwater_samples_total", &[])? > first, "no new samples");
                    Ok(())
                },
            )
            .await?;
            let file =
                format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/highwater/pressure");
            let signal = s.cluster.on_node(NODE, "cat", &[&file]).await?;
            ensure!(
                signal.contains("level") && !signal.contains("Normal"),
                "no signal with the API server away: {signal}"
            );
            tokio::time::sleep_until(away + Duration::from_mins(1)).await;
            anyhow::Ok(())
        }
        .await;
        s.cluster.start("kube-apiserver").await?;
        during?;
        s.cluster.api_ready().await?;
        // Stated bound: two minutes after the API server is back, of which the kubelet may take one
        // to hear of the eviction (its own back-off).
        let bound = Duration::from_mins(2);
        s.incident_within(&pod, DecisionState::Succeeded, "MemoryReturned", bound).await?;
        Ok(())
    })
}

#[test]
fn h19_after_a_power_cut_the_node_converges_without_hands() -> Result<()> {
    scenario("h19-reboot", async |s| {
        s.program("h19", generous(&s.namespace)).await?;
        s.apply(&deployment("server", "context; alloc 8Gi; serve")).await?;
        s.running("server").await?;
        let used = ("highwater_pod_memory_used_bytes", [("namespace", s.namespace.as_str())]);
        s.metric(used.0, &used.1, |bytes| bytes > Some(8 * GI)).await?;
        s.cluster.reboot(NODE).await?;
        s.running("server").await?;
        eventually("the rebooted node's ledger", Duration::from_secs(90), async || {
            let bytes = s.metrics(NODE).await?.bytes(used.0, &used.1)?;
            ensure!(bytes > Some(8 * GI), "it is {bytes:?}");
            ledger_is_right(s).await
        })
        .await?;
        never("an incident from a reboot", Duration::from_secs(2), async || {
            s.incidents().await?.first().map(kube::ResourceExt::name_any).context("none")
        })
        .await?;
        Ok(())
    })
}
