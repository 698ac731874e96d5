//! Memory of every kind, accounted as what it is, and no pod blamed for what is not its own.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{DecisionState, DeviceFault, GpuMemoryNode};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{GI, MI, NODE, Scenario, TIMEOUT, deployment, enforce, scenario};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::DeleteParams};
use serde_json::json;

const BUCKETS: &str = "highwater_device_memory_bytes";

#[test]
fn the_buckets_add_up_to_the_device() -> Result<()> {
    scenario("buckets", async |s| {
        s.apply(&deployment("one", "context; alloc 8Gi; serve")).await?;
        s.apply(&deployment("two", "context; alloc 4Gi; managed 2Gi; touch; serve")).await?;
        let (one, two) = (s.running("one").await?, s.running("two").await?);
        for pod in [&one, &two] {
            s.metric("highwater_pod_memory_used_bytes", &[("pod", &pod.name_any())], |used| {
                used > Some(4 * GI)
            })
            .await?;
        }
        let samples = s.metrics(NODE).await?;
        for device in samples.label_values("highwater_device_capacity_bytes", "device") {
            samples.adds_up(&device)?;
        }
        Ok(())
    })
}

#[test]
fn a19_memory_of_a_process_of_no_pod_is_foreign() -> Result<()> {
    scenario("a19-foreign", async |s| {
        let (pod, device) = blamed_for_nothing(s, "a19").await?;
        let pid = s.cluster.on_node(NODE, "sh", &["-c", "sleep 300 >/dev/null 2>&1 & echo $!"]).await?;
        let pid = pid.trim();
        s.fault(NODE, &["--device", &device, "foreign", "--pid", pid, "--bytes", "74Gi"]).await?;
        let result = async {
            s.metric(BUCKETS, &[("bucket", "foreign"), ("device", &device)], |foreign| {
                foreign == Some(74 * GI)
            })
            .await?;
            s.metrics(NODE).await?.adds_up(&device)?;
            emergency_without_culprit(s, "a19", &pod, &device).await
        }
        .await;
        s.cluster.on_node(NODE, "kill", &[pid]).await?;
        result
    })
}

#[test]
fn l03_l04_zombie_memory_is_a_metric_and_a_condition_and_no_pod_is_blamed() -> Result<()> {
    scenario("l03-zombie", async |s| {
        let (pod, device) = blamed_for_nothing(s, "l03").await?;
        // A PID that cannot be alive: above pid_max.
        s.fault(NODE, &["--device", &device, "zombie", "--pid", "4194400", "--bytes", "74Gi"]).await?;
        s.metric(BUCKETS, &[("bucket", "zombie"), ("device", &device)], |zombie| zombie == Some(74 * GI))
            .await?;
        s.metrics(NODE).await?.adds_up(&device)?;
        attention_is_asked_for(s).await?;
        emergency_without_culprit(s, "l03", &pod, &device).await
    })
}

/// L04: memory used without a process is a condition of the node.
async fn attention_is_asked_for(s: &Scenario) -> Result<()> {
    let nodes: Api<GpuMemoryNode> = Api::all(s.client.clone());
    eventually("condition Attention=True on the node", TIMEOUT, async || {
        let status = nodes.get(NODE).await?.status.context("a status")?;
        let condition = status.conditions.into_iter().find(|condition| condition.type_ == "Attention");
        let condition = condition.context("no condition Attention")?;
        ensure!(condition.status == "True", "it is {}/{}", condition.status, condition.reason);
        Ok(())
    })
    .await
}

#[test]
fn memory_that_no_process_explains_is_unexplained_and_never_acted_on() -> Result<()> {
    scenario("unexplained", async |s| {
        let (pod, device) = blamed_for_nothing(s, "unexplained").await?;
        s.fault(NODE, &["--device", &device, "unexplained", "--bytes", "74Gi"]).await?;
        s.metric(BUCKETS, &[("bucket", "unexplained"), ("device", &device)], |bytes| {
            bytes.is_some_and(|bytes| (bytes - 74 * GI).abs() < 64 * MI)
        })
        .await?;
        emergency_without_culprit(s, "unexplained", &pod, &device).await
    })
}

#[test]
fn managed_memory_is_unexplained_and_not_the_pods_breach() -> Result<()> {
    scenario("managed", async |s| {
        s.program("managed", enforce(&s.namespace, "16Gi")).await?;
        s.apply(&deployment("managed", "context; managed 20Gi; touch; serve")).await?;
        let pod = s.running("managed").await?;
        let device = s.device_of(&pod).await?;
        s.metric(BUCKETS, &[("bucket", "unexplained"), ("device", &device)], |bytes| bytes > Some(19 * GI))
            .await?;
        s.metric("highwater_pod_memory_used_bytes", &[("pod", &pod.name_any())], |used| {
            used.is_some_and(|used| used > 0 && used < GI)
        })
        .await?;
        no_pod_is_blamed(s, &pod).await
    })
}

#[test]
fn a_number_that_the_driver_does_not_give_is_missing_and_not_zero() -> Result<()> {
    scenario("missing", async |s| {
        s.program("missing", enforce(&s.namespace, "16Gi")).await?;
        s.apply(&deployment("server", "context; alloc 4Gi; serve")).await?;
        let pod = s.running("server").await?;
        let name = pod.name_any();
        let used = ("highwater_pod_memory_used_bytes", [("pod", name.as_str())]);
        s.metric(used.0, &used.1, |used| used > Some(4 * GI)).await?;
        let device = s.device_of(&pod).await?;
        s.fault(NODE, &["--device", &device, "missing-process-memory"]).await?;
        s.metric(used.0, &used.1, |used| used.is_none()).await?;
        s.cluster.gpusim(NODE, &["clear"]).await?;
        s.metric(used.0, &used.1, |used| used > Some(4 * GI)).await?;

        s.fault(NODE, &["--device", &device, "missing-memory"]).await?;
        s.metric(BUCKETS, &[("bucket", "free"), ("device", &device)], |free| free.is_none()).await?;
        device_fault(s, Some(DeviceFault::NoMemoryInfo)).await?;
        s.cluster.gpusim(NODE, &["clear"]).await?;
        device_fault(s, None).await?;
        s.untouched(&pod).await
    })
}

#[test]
fn m08_of_two_devices_the_lost_one_is_reported_and_the_other_still_measured() -> Result<()> {
    scenario("m08-lost", async |s| {
        s.metric("highwater_device_up", &[("device", "0")], |up| up == Some(1)).await?;
        s.fault(NODE, &["--device", "0", "lost"]).await?;
        s.metric("highwater_device_up", &[("device", "0")], |up| up == Some(0)).await?;
        device_fault(s, Some(DeviceFault::Lost)).await?;
        let samples = s.metrics(NODE).await?;
        ensure!(samples.value("highwater_device_up", &[("device", "1")])? == Some(1.0), "device 1 is fine");
        ensure!(
            samples.value(BUCKETS, &[("bucket", "free"), ("device", "0")])?.is_none(),
            "no stale numbers of a lost device"
        );
        ensure!(samples.value(BUCKETS, &[("bucket", "free"), ("device", "1")])?.is_some());
        ensure!(
            samples.values("highwater_device_errors_total", &[("device", "0")]).iter().sum::<f64>() > 0.0
        );
        // L13: it comes back by itself.
        s.cluster.gpusim(NODE, &["clear"]).await?;
        s.metric("highwater_device_up", &[("device", "0")], |up| up == Some(1)).await?;
        device_fault(s, None).await
    })
}

#[test]
fn a16_the_drivers_reserve_is_not_promised_to_anybody() -> Result<()> {
    scenario("a16-reserve", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["pool"] = json!({"driverReserve": {"percent": 10, "minSize": "256Mi"}});
        s.program("a16", spec).await?;
        let capacity =
            s.metric("highwater_device_capacity_bytes", &[("device", "0")], |c| c.is_some()).await?;
        let tenth = capacity.map(|capacity| capacity / 10);
        s.metric(BUCKETS, &[("bucket", "driver_reserved"), ("device", "0")], |reserved| reserved >= tenth)
            .await?;
        s.metrics(NODE).await?.adds_up("0")
    })
}

#[test]
fn a12_m05_the_ledger_follows_the_pods_that_live() -> Result<()> {
    scenario("a12-rebuilt", async |s| {
        s.apply(&deployment("server", "context; alloc 8Gi; serve")).await?;
        let pod = s.running("server").await?;
        let name = pod.name_any();
        s.metric("highwater_pod_memory_used_bytes", &[("pod", &name)], |used| used > Some(8 * GI)).await?;
        let device = s.device_of(&pod).await?;
        s.metric(BUCKETS, &[("bucket", "pods"), ("device", &device)], |pods| pods > Some(8 * GI)).await?;
        s.api::<k8s_openapi::api::apps::v1::Deployment>()
            .delete("server", &DeleteParams::background())
            .await?;
        // M05: gone within 30 s of the pod's end.
        let pods: Api<Pod> = s.api();
        eventually("the pod to be gone", TIMEOUT, async || {
            pods.get_opt(&name).await?.is_none().then_some(()).context("it is there")
        })
        .await?;
        eventually("m05: the pod's series to be gone", Duration::from_secs(30), async || {
            let values = s.metrics(NODE).await?.values("highwater_pod_memory_used_bytes", &[("pod", &name)]);
            ensure!(values.is_empty(), "they are {values:?}");
            Ok(())
        })
        .await?;
        s.metric(BUCKETS, &[("bucket", "pods"), ("device", &device)], |pods| pods == Some(0)).await?;
        Ok(())
    })
}

/// A pod within its quota, under a policy that would act at once.
async fn blamed_for_nothing(s: &Scenario, name: &str) -> Result<(Pod, String)> {
    let mut spec = enforce(&s.namespace, "16Gi");
    spec["quota"]["default"]["guarantee"] = json!("8Gi");
    spec["breakers"] = json!([{
        "scope": "Device",
        "emergency": {"tripPercent": 95, "clearPercent": 90, "holdMilliseconds": 0, "actions": [{"type": "Restart"}]},
    }]);
    s.program(name, spec).await?;
    s.apply(&deployment("innocent", "context; alloc 4Gi; serve")).await?;
    let pod = s.running("innocent").await?;
    s.metric("highwater_pod_memory_used_bytes", &[("pod", &pod.name_any())], |used| used > Some(4 * GI))
        .await?;
    let device = s.device_of(&pod).await?;
    Ok((pod, device))
}

/// The breaker trips and finds nobody to blame.
async fn emergency_without_culprit(s: &Scenario, policy: &str, pod: &Pod, device: &str) -> Result<()> {
    let level = [("device", device), ("mode", "Enforce")];
    s.metric("highwater_device_level", &level, |level| level == Some(3)).await?;
    s.incident_without_subject(policy, DecisionState::Suppressed, "NoCulprit").await?;
    no_pod_is_blamed(s, pod).await
}

async fn no_pod_is_blamed(s: &Scenario, pod: &Pod) -> Result<()> {
    never("an incident that names a pod", Duration::from_secs(3), async || {
        let incidents = s.incidents().await?;
        incidents.iter().find(|i| i.spec.subject.is_some()).map(kube::ResourceExt::name_any).context("none")
    })
    .await?;
    let incidents = s.incidents().await?;
    let acted = incidents.iter().any(|incident| {
        let decision = incident.status.as_ref().and_then(|status| status.decision.as_ref());
        decision.is_some_and(|decision| decision.state == DecisionState::Succeeded)
    });
    ensure!(!acted, "something was done: {incidents:?}");
    s.untouched(pod).await
}

async fn device_fault(s: &Scenario, expected: Option<DeviceFault>) -> Result<()> {
    let nodes: Api<GpuMemoryNode> = Api::all(s.client.clone());
    eventually(&format!("a device fault {expected:?} in the node's status"), TIMEOUT, async || {
        let status = nodes.get(NODE).await?.status.context("a status")?;
        let faults: Vec<_> = status.devices.iter().filter_map(|device| device.fault).collect();
        ensure!(faults.first() == expected.as_ref(), "they are {faults:?}");
        Ok(())
    })
    .await
}
