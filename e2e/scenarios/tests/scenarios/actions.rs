//! Each act of a breaker by itself: where it is enough it is the one that is chosen, and nothing
//! stronger is done.
//!
//! Of the 80 GiB of a simulated device 79.4 GiB can be used; a context takes half a GiB.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{ActState, ActionType, DecisionState, GpuMemoryNode};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{
    GI, ModelServer, NODE, PRESSURE_FILE, Scenario, TIMEOUT, acted, broken_by, critical, restarts, scenario,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

const GRANTED: &str = "highwater_pool_granted_bytes";
const PARKED: &str = "highwater_pod_parked_bytes";
const USED: &str = "highwater_pod_memory_used_bytes";

/// What ends pods or moves them.
const STRONG: [ActionType; 3] = [ActionType::Park, ActionType::Restart, ActionType::Drain];

fn restart() -> Value {
    json!({"type": "Restart", "restart": {"gracePeriodSeconds": 1}})
}

/// Applies a policy with this one breaker, named like the namespace; waits until it is followed.
async fn broken(s: &Scenario, breaker: &Value) -> Result<()> {
    s.program(&s.namespace, broken_by(&s.namespace, "60Gi", breaker)).await
}

/// The pod goes on as before, and nothing that ends pods was thought of.
async fn nothing_stronger(s: &Scenario, pod: &Pod) -> Result<()> {
    s.no_incident_with(&s.namespace, &STRONG).await?;
    s.untouched(pod).await?;
    s.served_without_failure(pod).await
}

#[test]
fn a_signal_is_enough_for_a_pod_that_heeds_it() -> Result<()> {
    scenario("signal-alone", async |s| {
        let actions = json!([{"type": "Signal"}, {"type": "Hook"}, {"type": "Reclaim"}, restart()]);
        broken(s, &critical(40, 30, &actions)).await?;
        let script =
            format!("context; alloc 4Gi; engine 8000; heed level {PRESSURE_FILE}; cache 36Gi; serve");
        let pod = s
            .start_server("heeds", &ModelServer::new("heeds", &script).hook("SglangFlushCache", 8000))
            .await?;
        s.says(&pod, "heeded Level bytes=38654705664").await?;
        let device = s.device_of(&pod).await?;
        s.level(&device, 0).await?;
        ensure!(!called(s, &pod).await?, "the hook was called although the signal was enough");
        nothing_stronger(s, &pod).await
    })
}

/// Whether anybody has called a pod's endpoints.
async fn called(s: &Scenario, pod: &Pod) -> Result<bool> {
    Ok(s.log(pod).await?.iter().any(|line| line.text.contains(" hook method=")))
}

#[test]
fn l05_a_hook_is_enough_for_an_engine_that_frees_its_cache_by_each_preset() -> Result<()> {
    scenario("hook-alone", async |s| {
        let actions = json!([{"type": "Hook"}, {"type": "Reclaim"}, {"type": "Park"}, restart()]);
        broken(s, &critical(40, 30, &actions)).await?;
        let presets = [
            ("vllm", "VllmResetPrefixCache", "/reset_prefix_cache"),
            ("sglang", "SglangFlushCache", "/flush_cache"),
            ("triton", "TritonUnload:http", "/v2/repository/models/llama/unload"),
        ];
        for (name, preset, path) in presets {
            let server =
                ModelServer::new(name, "engine 8000; hold 2s; context; alloc 4Gi; cache 36Gi; serve")
                    .hook(preset, 8000)
                    .annotation(highwater_crds::names::POD_HOOK_MODEL, "llama");
            let pod = s.start_server(name, &server).await?;
            let device = s.device_of(&pod).await?;
            s.says(&pod, &format!("hook method=POST path={path} status=200 bytes=38654705664")).await?;
            s.level(&device, 0).await?;
            s.pod_metric(&pod, USED, |used| used.is_some_and(|used| used < 5 * GI)).await?;
            nothing_stronger(s, &pod).await.with_context(|| format!("with {preset}"))?;
            s.remove(name).await?;
        }
        Ok(())
    })
}

#[test]
fn an_engine_sent_to_sleep_is_woken_when_there_is_room_and_not_before() -> Result<()> {
    scenario("hook-sleep", async |s| {
        let actions = json!([{"type": "Hook"}, restart()]);
        broken(s, &critical(45, 40, &actions)).await?;
        let sleeps = ModelServer::new("sleeps", "engine 8000; context; alloc 4Gi; cache 12Gi; serve")
            .hook("VllmSleep", 8000);
        let sleeps = s.start_server("sleeps", &sleeps).await?;
        s.says(&sleeps, " serve used=").await?;
        let device = s.device_of(&sleeps).await?;
        // Together 47 %, the other alone 26 %.
        let other = s.start("other", "hold 1s; context; alloc 20Gi; serve").await?;
        let slept = s.says(&sleeps, "hook method=POST path=/sleep?level=1 status=200").await?;
        s.level(&device, 0).await?;
        // Awake it would pass the mark again.
        never("an engine that is woken into the same trouble", Duration::from_secs(4), async || {
            let log = s.log(&sleeps).await?;
            log.into_iter().find(|line| line.text.contains("path=/wake_up")).context("none")
        })
        .await?;
        nothing_stronger(s, &other).await?;
        s.remove("other").await?;
        let woken = s.says(&sleeps, "hook method=POST path=/wake_up status=200").await?;
        ensure!(woken.at > slept.at, "{woken:?} before {slept:?}");
        s.pod_metric(&sleeps, USED, |used| used > Some(16 * GI)).await?;
        nothing_stronger(s, &sleeps).await
    })
}

#[test]
fn bad_hook_endpoints_are_given_up_and_said_and_measuring_goes_on() -> Result<()> {
    scenario("hook-bad", async |s| {
        let hook = json!({"type": "Hook", "hook": {"timeoutMilliseconds": 500}});
        let mut spec = broken_by(&s.namespace, "60Gi", &critical(40, 30, &json!([hook, restart()])));
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Policy", "maxActions": 1, "windowMinutes": 60}]);
        s.program(&s.namespace, spec).await?;
        let innocent = ModelServer::new("innocent", "engine 8000; context; cache 1Gi; serve");
        let innocent = s.start_server("innocent", &innocent).await?;
        let address =
            innocent.status.as_ref().and_then(|status| status.pod_ip.clone()).context("no address")?;
        let manners = ["hangs", "streams", "fails", &format!("redirects http://{address}:8000/flush_cache")];
        let mut pods = Vec::new();
        for manner in manners {
            let name = manner.split(' ').next().unwrap_or(manner);
            let script = format!("engine 8000 {manner}; hold 3s; context; alloc 6Gi; cache 6Gi; serve");
            s.apply(&ModelServer::new(name, &script).hook("SglangFlushCache", 8000).deployment()).await?;
            pods.push(name.to_owned());
        }
        let device = s.device_of(&innocent).await?;
        let mut running = Vec::new();
        for name in &pods {
            running.push(s.running(name).await?);
        }
        for pod in &running {
            ensure!(s.device_of(pod).await? == device, "all are on one device");
        }
        let before = s.metrics(NODE).await?.value("highwater_samples_total", &[])?.unwrap_or(0.0);
        let from = tokio::time::Instant::now();
        // Four at once pass the mark together; whoever is asked is asked in vain.
        for (pod, manner) in running.iter().zip(&manners) {
            // Whoever says yes and never ends is taken at its word, and read no further.
            let told = if *manner == "streams" { "HookDone" } else { "HookFailed" };
            s.event(&pod.name_any(), told).await?;
        }
        let taken = s.metrics(NODE).await?.value("highwater_samples_total", &[])?.unwrap_or(0.0) - before;
        let second = from.elapsed().as_secs_f64();
        ensure!(taken >= 5.0 * second, "{taken} samples in {second} s: measuring waited for endpoints");
        eventually("the next act, since hooks did not help", TIMEOUT, async || {
            let incidents = s.incidents_of(&s.namespace).await?;
            let restarts =
                |i: &&highwater_crds::GpuMemoryIncident| i.spec.proposed.action == ActionType::Restart;
            let incident = incidents.iter().find(restarts).context("nothing follows")?;
            let weighed = &incident.spec.proposed.alternatives;
            ensure!(
                weighed.iter().any(|line| line.contains("Hook")),
                "{weighed:?} does not tell of the hooks"
            );
            Ok(())
        })
        .await?;
        ensure!(!called(s, &innocent).await?, "a redirect was followed");
        s.untouched(&innocent).await
    })
}

#[test]
fn unready_takes_a_pod_out_of_service_until_memory_fell_and_does_not_end_it() -> Result<()> {
    scenario("unready-alone", async |s| {
        broken(s, &critical(40, 30, &json!([{"type": "Unready"}, restart()]))).await?;
        let script = "context; hold 5s; alloc 36Gi; hold 12s; free; alloc 4Gi; serve";
        let pod = s.start_server("busy", &ModelServer::new("busy", script).unready()).await?;
        let incident = s.act_done(&pod, ActionType::Unready).await?;
        s.explained(&incident)?;
        s.ready(&pod, false).await?;
        let now = s.api::<Pod>().get(&pod.name_any()).await?;
        ensure!(restarts(&now) == 0 && now.metadata.deletion_timestamp.is_none(), "it was ended");
        // Nobody asks for it any more, and its sessions end.
        s.says(&pod, " serve used=").await?;
        s.ready(&pod, true).await?;
        let (state, reason) = s.incident_ended(&pod).await?;
        ensure!(state == DecisionState::Succeeded, "it ended {state:?}/{reason}");
        let file = s.exec(&pod, &["cat", PRESSURE_FILE]).await?.output;
        ensure!(!file.contains("unreadyUntil"), "the file still says {file}");
        nothing_stronger(s, &pod).await
    })
}

#[test]
fn unready_leaves_as_many_pods_of_a_workload_as_its_budget_says() -> Result<()> {
    scenario("unready-budget", async |s| {
        // Both would have to go: 62 % together, and 20 % is where it is over.
        broken(s, &critical(40, 20, &json!([{"type": "Unready"}]))).await?;
        let script = "context; hold 6s; alloc 24Gi; serve";
        s.apply(&ModelServer::new("pair", script).unready().replicas(2).deployment()).await?;
        let pods: Api<Pod> = s.api();
        let ready = async || -> Result<usize> {
            let list = pods.list(&kube::api::ListParams::default().labels("app=pair")).await?;
            let ready = |pod: &&Pod| {
                let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
                conditions
                    .into_iter()
                    .any(|condition| condition.type_ == "Ready" && condition.status == "True")
            };
            Ok(list.iter().filter(ready).count())
        };
        eventually("both to be ready", TIMEOUT, async || {
            let count = ready().await?;
            ensure!(count == 2, "{count} are");
            Ok(())
        })
        .await?;
        eventually("one to be unready", TIMEOUT, async || {
            let count = ready().await?;
            ensure!(count == 1, "{count} are ready");
            Ok(())
        })
        .await?;
        never("both unready at once", Duration::from_secs(6), async || {
            (ready().await? == 0).then_some("none is ready").context("one is")
        })
        .await
    })
}

#[test]
fn freeze_is_enough_where_stopping_growth_is_enough() -> Result<()> {
    scenario("freeze-alone", async |s| {
        let mut breaker =
            critical(40, 30, &json!([{"type": "Freeze", "freeze": {"taintNodeWhen": "AnyDevice"}}]));
        breaker["emergency"] =
            json!({"tripPercent": 80, "clearPercent": 70, "holdMilliseconds": 0, "actions": [restart()]});
        let mut spec = broken_by(&s.namespace, "75Gi", &breaker);
        spec["quota"]["default"]["guarantee"] = json!("8Gi");
        spec["pool"] = json!({"sizePercent": 95, "startHoldSeconds": 0});
        s.program(&s.namespace, spec).await?;
        // 70 GiB if nobody stops it.
        let script = "context; alloc 10Gi; on-oom continue; leak 1Gi every 150ms x60; info; serve";
        let pod = s.start_guarded("grows", script).await?;
        let device = s.device_of(&pod).await?;
        s.level(&device, 2).await?;
        s.tainted(NODE, true).await?;
        s.says(&pod, " info {").await?;
        s.refused(&pod, |refused| refused > 0).await?;
        let used = s.pod_metric(&pod, USED, |used| used.is_some()).await?.unwrap_or(0);
        ensure!(
            (31 * GI..40 * GI).contains(&used),
            "it holds {used} bytes: growth was to stop where 40 % was passed"
        );
        s.level(&device, 2).await?;
        s.no_incident_with(&s.namespace, &STRONG).await?;
        s.untouched(&pod).await?;
        // What is there goes on working.
        s.says(&pod, " serve used=").await?;
        s.served_without_failure(&pod).await?;
        s.remove("grows").await?;
        s.tainted(NODE, false).await
    })
}

#[test]
fn l15_reclaim_is_enough_where_an_allocator_keeps_what_it_does_not_use() -> Result<()> {
    scenario("reclaim-alone", async |s| {
        broken(s, &critical(40, 30, &json!([{"type": "Reclaim"}, {"type": "Park"}, restart()]))).await?;
        let script = "context; alloc 2Gi; retain; hold 3s; async 34Gi; free 34Gi; serve";
        let pod = s.start_guarded("keeps", script).await?;
        let device = s.device_of(&pod).await?;
        s.says(&pod, " op=free bytes=36507222016 code=0").await?;
        s.pod_metric(&pod, USED, |used| used.is_some_and(|used| used < 4 * GI)).await?;
        s.level(&device, 0).await?;
        nothing_stronger(s, &pod).await
    })
}

#[test]
fn l15_reclaim_takes_idle_grants_back_when_the_pool_runs_short() -> Result<()> {
    scenario("reclaim-grants", async |s| {
        let mut breaker = critical(85, 70, &json!([{"type": "Reclaim"}, restart()]));
        breaker["scope"] = json!("Pool");
        let mut spec = broken_by(&s.namespace, "60Gi", &breaker);
        spec["quota"]["default"]["guarantee"] = json!("4Gi");
        spec["pool"] = json!({"sizePercent": 60, "startHoldSeconds": 0});
        s.program(&s.namespace, spec).await?;
        // A pool of 47 GiB, of which one pod keeps 30 idle.
        let idle = s.start_guarded("idle", "context; alloc 30Gi; hold 1s; free; alloc 1Gi; serve").await?;
        s.says(&idle, " op=free ").await?;
        s.pod_metric(&idle, GRANTED, |granted| granted > Some(25 * GI)).await?;
        let busy = s.start_guarded("busy", "context; alloc 1Gi; leak 1Gi every 100ms x13; serve").await?;
        s.pod_metric(&idle, GRANTED, |granted| granted.is_some_and(|granted| granted < 8 * GI)).await?;
        s.says(&busy, " serve used=").await?;
        s.refused_nothing(&busy).await?;
        nothing_stronger(s, &busy).await?;
        nothing_stronger(s, &idle).await
    })
}

#[test]
fn a_parked_pod_makes_room_and_comes_back_when_its_neighbour_leaves() -> Result<()> {
    scenario("park-alone", async |s| {
        let cold = may_be_parked(s).await?;
        let hot = neighbour_grows(s).await?;
        let parked = s.act_done(&cold, ActionType::Park).await?;
        s.explained(&parked)?;
        let bytes = acted(&parked).and_then(|act| act.parked_bytes);
        ensure!(bytes >= Some(6 * GI), "{bytes:?} bytes are parked");
        s.pod_metric(&cold, PARKED, |bytes| bytes >= Some(6 * GI)).await?;
        s.pod_metric(&cold, USED, |used| used.is_none_or(|used| used < GI)).await?;
        let device = s.device_of(&cold).await?;
        s.level(&device, 0).await?;
        node_shows_parked(s, 1).await?;
        s.no_incident_with(&s.namespace, &[ActionType::Restart]).await?;

        s.says(&hot, " op=free ").await?;
        s.pod_metric(&cold, USED, |used| used > Some(6 * GI)).await?;
        s.pod_metric(&cold, PARKED, |bytes| bytes.unwrap_or(0) == 0).await?;
        node_shows_parked(s, 0).await?;
        let beats = served(s, &cold).await?;
        eventually("the pod to go on serving", TIMEOUT, async || {
            let now = served(s, &cold).await?;
            ensure!(now > beats + 1, "{now} beats");
            Ok(())
        })
        .await?;
        s.metrics(NODE).await?.adds_up(&device)?;
        for pod in [&cold, &hot] {
            s.untouched(pod).await?;
            s.served_without_failure(pod).await?;
        }
        let (state, reason) = s.incident_ended(&cold).await?;
        ensure!(state == DecisionState::Succeeded, "it ended {state:?}/{reason}");
        Ok(())
    })
}

/// A pod that may be parked, and that serves.
async fn may_be_parked(s: &Scenario) -> Result<Pod> {
    broken(s, &critical(40, 38, &json!([{"type": "Park"}, restart()]))).await?;
    let cold = ModelServer::new("cold", "context; alloc 6Gi; serve").parkable();
    let cold = s.start_server("cold", &cold).await?;
    s.says(&cold, " serve used=").await?;
    Ok(cold)
}

/// A neighbour that grows until the two have 43 % of the device, by itself 35 %, and leaves again.
async fn neighbour_grows(s: &Scenario) -> Result<Pod> {
    s.start("hot", "context; hold 1s; grow 16Gi/s to 27Gi; hold 14s; free; alloc 1Gi; serve").await
}

#[test]
fn a_checkpoint_that_loses_its_process_ends_in_a_restart_and_nothing_stays_booked() -> Result<()> {
    scenario("park-lost", async |s| {
        let cold = may_be_parked(s).await?;
        let device = s.device_of(&cold).await?;
        s.fault(NODE, &["--device", &device, "checkpoint", "--step", "checkpoint", "--loses"]).await?;
        let hot = neighbour_grows(s).await?;
        let failed = s.act_is(&cold, ActionType::Park, &[ActState::Failed]).await?;
        ensure!(acted(&failed).is_some_and(|act| !act.message.is_empty()), "it does not say why");
        s.cluster.gpusim(NODE, &["clear"]).await?;
        // Its owner starts it anew, and that is an incident of its own.
        let next = s.running_other_than("cold", cold.metadata.uid.as_deref()).await?;
        s.says(&next, " serve used=").await?;
        let restarted = s.incidents_of(&s.namespace).await?.into_iter().any(|incident| {
            incident.spec.proposed.action == ActionType::Restart
                && incident.spec.subject.is_some_and(|subject| Some(subject.uid) == cold.metadata.uid)
        });
        ensure!(restarted, "no incident says that the pod was restarted");
        eventually("nothing to be booked as parked", TIMEOUT, async || {
            let parked = s.metrics(NODE).await?.sum(PARKED, &[]);
            ensure!(parked == 0, "{parked} bytes are");
            Ok(())
        })
        .await?;
        s.metrics(NODE).await?.adds_up(&device)?;
        s.untouched(&hot).await
    })
}

#[test]
fn a_restore_that_is_refused_stays_parked_and_is_tried_again() -> Result<()> {
    scenario("park-restore", async |s| {
        let cold = may_be_parked(s).await?;
        let device = s.device_of(&cold).await?;
        s.fault(NODE, &["--device", &device, "checkpoint", "--step", "restore"]).await?;
        let hot = neighbour_grows(s).await?;
        s.act_done(&cold, ActionType::Park).await?;
        s.says(&hot, " serve used=").await?;
        never("parked memory that is forgotten", Duration::from_secs(4), async || {
            let parked = s.metrics(NODE).await?.sum(PARKED, &[]);
            (parked == 0).then_some(parked).context("it is booked")
        })
        .await?;
        s.untouched(&cold).await?;
        s.cluster.gpusim(NODE, &["clear"]).await?;
        s.pod_metric(&cold, USED, |used| used > Some(6 * GI)).await?;
        s.pod_metric(&cold, PARKED, |bytes| bytes.unwrap_or(0) == 0).await?;
        s.untouched(&cold).await
    })
}

async fn served(s: &Scenario, pod: &Pod) -> Result<usize> {
    Ok(s.log(pod).await?.iter().filter(|line| line.text.contains(" serve used=")).count())
}

async fn node_shows_parked(s: &Scenario, count: i32) -> Result<()> {
    let nodes: Api<GpuMemoryNode> = Api::all(s.client.clone());
    eventually(&format!("{count} parked pods in the node's status"), TIMEOUT, async || {
        let status = nodes.get(NODE).await?.status.context("a status")?;
        let parked: i32 = status.devices.iter().map(|device| device.parked).sum();
        ensure!(parked == count, "there are {parked}");
        Ok(())
    })
    .await
}

#[test]
fn a_pod_that_nothing_lets_park_is_not_parked() -> Result<()> {
    scenario("park-refused", async |s| {
        broken(s, &critical(40, 30, &json!([{"type": "Park"}]))).await?;
        // A checkpoint does not take managed memory along; and its neighbour did not opt in.
        let script = "context; hold 2s; managed 1Gi; touch; alloc 33Gi; serve";
        let managed = s.start_server("managed", &ModelServer::new("managed", script).parkable()).await?;
        let plain = s.start("plain", "context; alloc 2Gi; serve").await?;
        let device = s.device_of(&managed).await?;
        s.level(&device, 2).await?;
        never("a pod that is parked although it must not be", Duration::from_secs(6), async || {
            let parked = s.metrics(NODE).await?.sum(PARKED, &[]);
            (parked > 0).then_some(parked).context("none")
        })
        .await?;
        for pod in [&managed, &plain] {
            s.untouched(pod).await?;
            s.served_without_failure(pod).await?;
        }
        Ok(())
    })
}

#[test]
fn d15_a_restart_in_place_ends_the_containers_that_use_the_device_and_no_others() -> Result<()> {
    scenario("in-place", async |s| {
        let action = json!({"type": "Restart", "restart": {"gracePeriodSeconds": 1, "inPlace": true}});
        let mut spec = broken_by(&s.namespace, "60Gi", &critical(40, 30, &json!([action])));
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Workload", "maxActions": 1, "windowMinutes": 60}]);
        s.program(&s.namespace, spec).await?;
        let server = ModelServer::new("agrees", "hold 5s; context; alloc 36Gi; serve").restarts_in_place();
        let mut deployment = server.deployment();
        let side = json!({"name": "side", "image": "highwater.local/workload:dev", "imagePullPolicy": "Never",
            "command": ["/bin/busybox", "sleep", "3600"]});
        let containers = deployment["spec"]["template"]["spec"]["containers"].as_array_mut();
        containers.context("containers")?.push(side);
        s.apply(&deployment).await?;
        let pod = s.running("agrees").await?;
        let neighbour = s.start("neighbour", "context; alloc 1Gi; serve").await?;
        let incident = s.act_done(&pod, ActionType::Restart).await?;
        ensure!(incident.spec.proposed.in_place, "{:?}", incident.spec.proposed);
        let (state, reason) = s.incident_ended(&pod).await?;
        ensure!(state == DecisionState::Succeeded, "it ended {state:?}/{reason}");
        eventually("the kubelet to have started that container anew", TIMEOUT, async || {
            let now = s.api::<Pod>().get(&pod.name_any()).await?;
            let kept = now.uid() == pod.uid() && now.metadata.deletion_timestamp.is_none();
            ensure!(kept, "the pod was replaced");
            let statuses = now.status.and_then(|status| status.container_statuses).unwrap_or_default();
            let counts: Vec<_> = statuses.iter().map(|c| (c.name.as_str(), c.restart_count)).collect();
            ensure!(counts.contains(&("server", 1)) && counts.contains(&("side", 0)), "{counts:?}");
            Ok(())
        })
        .await?;
        s.untouched(&neighbour).await?;
        s.served_without_failure(&neighbour).await
    })
}

#[test]
fn l05_of_a_stale_session_only_that_pod_is_restarted() -> Result<()> {
    scenario("l05-stale", async |s| {
        broken(s, &critical(40, 30, &json!([{"type": "Hook"}, restart()]))).await?;
        let other = s.start("other", "context; alloc 2Gi; serve").await?;
        // The engine is gone, its worker is not.
        let stale = s.start("stale", "hold 2s; fork 1 { context; alloc 36Gi; hold }; hold").await?;
        let incident = s.incident(&stale, DecisionState::Succeeded, "MemoryReturned").await?;
        s.explained(&incident)?;
        s.untouched(&other).await?;
        s.served_without_failure(&other).await
    })
}

#[test]
fn the_ladder_is_climbed_one_act_after_the_other_until_one_is_enough() -> Result<()> {
    scenario("ladder", async |s| {
        let actions = json!([{"type": "Signal"}, {"type": "Hook"}, restart()]);
        let mut spec = broken_by(&s.namespace, "60Gi", &critical(40, 30, &actions));
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Workload", "maxActions": 1, "windowMinutes": 60}]);
        s.program(&s.namespace, spec).await?;
        let script = format!(
            "watch-pressure {PRESSURE_FILE}; engine 8000; hold 2s; context; alloc 36Gi; cache 1Gi; serve"
        );
        let pod =
            s.start_server("deaf", &ModelServer::new("deaf", &script).hook("SglangFlushCache", 8000)).await?;
        let signal = s.says_where(&pod, "pressure at Critical", |line| {
            line.text.contains("pressure {") && line.text.contains("Critical")
        });
        let signal = signal.await?;
        let hook = s.says(&pod, "hook method=POST path=/flush_cache status=200 bytes=1073741824").await?;
        let incident = s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        s.explained(&incident)?;
        let restarted =
            incident.status.as_ref().and_then(|status| status.decision.as_ref()?.acted_at.clone());
        let restarted = restarted.context("when it was restarted")?.0;
        ensure!(signal.at < hook.at, "the hook at {} before the signal at {}", hook.at, signal.at);
        ensure!(hook.at < restarted, "the restart at {restarted} before the hook at {}", hook.at);
        ensure!(
            hook.after(signal.at) >= Duration::from_secs(1)
                && restarted.duration_since(hook.at).as_secs() >= 1,
            "the next act did not wait for the one before: {} {} {restarted}",
            signal.at,
            hook.at
        );
        let weighed = incident.spec.proposed.alternatives;
        ensure!(weighed.iter().any(|line| line.contains("Hook")), "{weighed:?} does not tell of the hook");
        Ok(())
    })
}

#[test]
fn recovery_takes_the_acts_back_in_reverse() -> Result<()> {
    scenario("reverse", async |s| {
        let mark = |trip: i32, actions: Value| json!({"tripPercent": trip, "clearPercent": trip - 5, "holdMilliseconds": 100, "actions": actions});
        let (signal, hook) = (json!({"type": "Signal"}), json!({"type": "Hook"}));
        let freeze = json!({"type": "Freeze", "freeze": {"taintNodeWhen": "AnyDevice"}});
        broken(
            s,
            &json!({"scope": "Device", "minimumStayMilliseconds": 500,
                "warning": mark(30, json!([signal])),
                "critical": mark(45, json!([signal, hook])),
                "emergency": mark(60, json!([signal, hook, freeze])),
            }),
        )
        .await?;
        let script = format!("watch-pressure {PRESSURE_FILE}; engine 8000; context; alloc 8Gi; serve");
        let sleeps =
            s.start_server("sleeps", &ModelServer::new("sleeps", &script).hook("VllmSleep", 8000)).await?;
        s.says(&sleeps, " serve used=").await?;
        // 37, 54 (46 once the other sleeps), 66, 46, 28, 1 %.
        let tide = "context; alloc 20Gi; hold 3s; alloc 14Gi; alloc 1Gi; hold 8s; alloc 16Gi; hold 5s; \
                    free 16Gi; hold 4s; free 15Gi; hold 4s; free; serve";
        let tide = s.start("tide", tide).await?;
        s.tainted(NODE, true).await?;
        s.says(&sleeps, "path=/sleep?level=1 status=200").await?;
        s.says(&tide, " serve used=").await?;
        s.tainted(NODE, false).await?;
        let woken = s.says(&sleeps, "path=/wake_up status=200").await?;
        let log = s.log(&sleeps).await?;
        let mut levels: Vec<String> = Vec::new();
        for line in log.iter().filter_map(|line| line.text.split_once("pressure {")) {
            let file: Value = serde_json::from_str(&format!("{{{}", line.1))?;
            let level = file["level"].as_str().unwrap_or("none").to_owned();
            if levels.last() != Some(&level) {
                levels.push(level);
            }
        }
        levels.retain(|level| level != "none");
        let from = levels.iter().position(|level| level == "Warning").context("never Warning")?;
        ensure!(
            levels.iter().skip(from).eq([
                "Warning",
                "Critical",
                "Emergency",
                "Critical",
                "Warning",
                "Normal"
            ]),
            "the levels were {levels:?}"
        );
        let calm = log.iter().rev().find(|line| line.text.contains("\"level\":\"Normal\""));
        let calm = calm.context("never Normal again")?;
        ensure!(
            woken.after(calm.at) < TIMEOUT && woken.at > calm.at.checked_sub(Duration::from_secs(2))?,
            "woken at {}, calm at {}",
            woken.at,
            calm.at
        );
        for pod in [&sleeps, &tide] {
            nothing_stronger(s, pod).await?;
        }
        Ok(())
    })
}

#[test]
fn a_breaker_on_pods_concerns_the_pod_that_tripped_it_and_no_larger_neighbour() -> Result<()> {
    scenario("pod-scope", async |s| {
        let mut breaker = critical(90, 80, &json!([{"type": "Hook"}, restart()]));
        breaker["scope"] = json!("Pod");
        let mut spec = broken_by(&s.namespace, "60Gi", &breaker);
        spec["quota"]["rules"] =
            json!([{"name": "small", "pods": {"matchLabels": {"app": "small"}}, "limit": "8Gi"}]);
        s.program(&s.namespace, spec).await?;
        let large = ModelServer::new("large", "engine 8000; context; cache 30Gi; serve")
            .hook("SglangFlushCache", 8000);
        let large = s.start_server("large", &large).await?;
        s.says(&large, " serve used=").await?;
        // 7.5 of 8 GiB.
        let small = ModelServer::new("small", "engine 8000; hold 1s; context; alloc 1Gi; cache 6Gi; serve")
            .hook("SglangFlushCache", 8000);
        let small = s.start_server("small", &small).await?;
        s.says(&small, "hook method=POST path=/flush_cache status=200 bytes=6442450944").await?;
        ensure!(!called(s, &large).await?, "its neighbour was asked to free memory");
        for pod in [&small, &large] {
            nothing_stronger(s, pod).await?;
        }
        Ok(())
    })
}

#[test]
fn memory_that_rises_fast_enters_the_level_early_and_slow_growth_does_not() -> Result<()> {
    scenario("rise", async |s| {
        let mut breaker = critical(90, 80, &json!([{"type": "Signal"}]));
        breaker["rise"] = json!({"level": "Critical", "leadSeconds": 8, "abovePercent": 45});
        broken(s, &breaker).await?;
        let script = |rate: &str, to: &str| {
            format!("watch-pressure {PRESSURE_FILE}; context; grow {rate}/s to {to}; serve")
        };
        // At 48 %, where it stops, 95 % is still 18 s away.
        let slow = s.start("slow", &script("2Gi", "38Gi")).await?;
        s.says(&slow, " serve used=").await?;
        let early = s.log(&slow).await?.into_iter().find(|line| line.text.contains("\"level\":\"Critical\""));
        ensure!(early.is_none(), "slow growth: {early:?}");
        s.remove("slow").await?;
        // At 8 GiB a second and 45 % it is 5 s away.
        let fast = s.start("fast", &script("8Gi", "48Gi")).await?;
        let device = s.device_of(&fast).await?;
        let seen =
            s.says_where(&fast, "pressure at Critical", |line| line.text.contains("\"level\":\"Critical\""));
        seen.await?;
        let ratio = s.metrics(NODE).await?.value("highwater_device_usage_ratio", &[("device", &device)])?;
        ensure!(ratio.is_some_and(|ratio| ratio < 0.7), "use is {ratio:?}");
        // It rises no more.
        s.level(&device, 0).await?;
        nothing_stronger(s, &fast).await
    })
}

#[test]
fn l07_a_plateau_is_no_leak_and_leads_to_nothing() -> Result<()> {
    scenario("l07-plateau", async |s| {
        let mut breaker = critical(75, 70, &json!([{"type": "Signal"}, restart()]));
        breaker["rise"] = json!({"level": "Critical", "leadSeconds": 5});
        broken(s, &breaker).await?;
        let pod = s.start("engine", "context; grow 12Gi/s to 40Gi; serve").await?;
        s.says(&pod, " serve used=").await?;
        never("an incident about a pod that does not grow any more", Duration::from_secs(8), async || {
            s.incidents_of(&s.namespace).await?.pop().map(|i| i.name_any()).context("none")
        })
        .await?;
        nothing_stronger(s, &pod).await
    })
}

#[test]
fn a_preset_stands_for_its_marks() -> Result<()> {
    scenario("preset", async |s| {
        broken(s, &json!({"scope": "Device", "preset": "WarnBreakEmergency"})).await?;
        let pod = s.start("high", "context; alloc 60826Mi; serve").await?;
        let device = s.device_of(&pod).await?;
        s.level(&device, 1).await?;
        broken(s, &json!({"scope": "Device", "preset": "ReclaimRefuse"})).await?;
        s.level(&device, 0).await?;
        nothing_stronger(s, &pod).await
    })
}

#[test]
fn the_rule_on_host_memory_acts_where_cgroup_v2_is_and_says_so_where_it_is_not() -> Result<()> {
    scenario("host-memory", async |s| {
        let mut spec = broken_by(&s.namespace, "60Gi", &critical(90, 80, &json!([])));
        spec["hostMemory"] = json!({"tripPercent": 60, "clearPercent": 50, "holdMilliseconds": 500,
            "actions": [restart()]});
        s.program(&s.namespace, spec).await?;
        if !std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            let nodes: Api<GpuMemoryNode> = Api::all(s.client.clone());
            return eventually("the node to say that it has no cgroup v2", TIMEOUT, async || {
                let conditions =
                    nodes.get(NODE).await?.status.map(|status| status.conditions).unwrap_or_default();
                let told: Vec<_> = conditions.iter().map(|c| format!("{}: {}", c.type_, c.message)).collect();
                ensure!(told.iter().any(|text| text.contains("cgroup v2")), "its conditions say {told:?}");
                Ok(())
            })
            .await;
        }
        let mut greedy =
            ModelServer::new("greedy", "context; hold 2s; host 200Mi; touch; serve").deployment();
        let container = &mut greedy["spec"]["template"]["spec"]["containers"][0];
        container["resources"]["limits"]["memory"] = json!("256Mi");
        s.apply(&greedy).await?;
        let pod = s.running("greedy").await?;
        // Memory of the host that only a driver has locked is not simulated: a file in memory is as good.
        let fill = "dd if=/dev/zero of=/dev/shm/fill bs=1M count=180";
        s.exec(&pod, &["sh", "-c", fill]).await?;
        s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await.map(drop)
    })
}
