//! Requests that are refused in unusual ways, pods that nobody may restart, and devices that come
//! and go.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{DecisionState, names};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{GI, ModelServer, NODE, TIMEOUT, broken_by, critical, enforce, scenario};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
    core::GroupVersionKind,
    discovery::ApiResource,
};
use serde_json::json;

const OVER: &str = "context; alloc 20Gi; serve";

#[test]
fn h18_the_culprit_is_named_and_not_the_pod_whose_allocation_failed() -> Result<()> {
    scenario("h18-culprit", async |s| {
        let mut spec = enforce(&s.namespace, "20Gi");
        // Long enough to see what another asks for refused.
        spec["quota"]["breach"]["holdMilliseconds"] = json!(6000);
        s.program(&s.namespace, spec).await?;
        // Takes all there is; what others ask for then fails.
        let culprit =
            s.start("culprit", "hold 3s; context; on-oom continue; leak 4Gi every 20ms x24; hold").await?;
        let victim =
            s.start("victim", "context; alloc 1Gi; hold 4s; on-oom retry; alloc 10Gi; serve").await?;
        ensure!(s.device_of(&culprit).await? == s.device_of(&victim).await?, "they share a device");
        let incident = s.incident(&culprit, DecisionState::Succeeded, "MemoryReturned").await?;
        s.explained(&incident)?;
        s.event(&culprit.name_any(), "QuotaBreach").await?;
        let failed =
            s.log(&victim).await?.iter().any(|line| line.text.contains(" op=alloc bytes=10737418240 code=2"));
        ensure!(failed, "its allocation was not refused: the scenario shows nothing");
        s.got(&victim, "alloc", 10 * GI).await?;
        s.untouched(&victim).await?;
        let about = s.incidents().await?;
        let named = |i: &highwater_crds::GpuMemoryIncident| {
            i.spec.subject.as_ref().map(|subject| subject.name.clone())
        };
        ensure!(
            about.iter().filter_map(named).all(|name| name.starts_with("culprit")),
            "the victim was named"
        );
        Ok(())
    })
}

#[test]
fn l13_a_device_that_was_lost_for_a_while_is_watched_and_acted_on_as_before() -> Result<()> {
    scenario("l13-recovers", async |s| {
        let actions = json!([{"type": "Restart", "restart": {"gracePeriodSeconds": 1}}]);
        s.program(&s.namespace, broken_by(&s.namespace, "60Gi", &critical(40, 30, &actions))).await?;
        let quiet = s.start("quiet", "context; alloc 1Gi; hold").await?;
        let device = s.device_of(&quiet).await?;
        s.fault(NODE, &["--device", &device, "lost"]).await?;
        s.metric("highwater_device_up", &[("device", &device)], |up| up == Some(0)).await?;
        never("an incident about a device that is lost", Duration::from_secs(2), async || {
            s.incidents_of(&s.namespace).await?.pop().map(|i| i.name_any()).context("none")
        })
        .await?;
        s.cluster.gpusim(NODE, &["clear"]).await?;
        s.metric("highwater_device_up", &[("device", &device)], |up| up == Some(1)).await?;
        s.level(&device, 0).await?;
        let hog = s.start("hog", "context; alloc 36Gi; hold").await?;
        s.incident(&hog, DecisionState::Succeeded, "MemoryReturned").await?;
        s.untouched(&quiet).await
    })
}

#[test]
fn two_disruption_budgets_on_one_pod_are_waited_for_like_one() -> Result<()> {
    scenario("pdb-conflict", async |s| {
        // The API server answers 500 where more than one selects a pod.
        for name in ["keep-one", "keep-another"] {
            s.apply(&json!({
                "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name},
                "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "over"}}},
            }))
            .await?;
        }
        s.program(&s.namespace, enforce(&s.namespace, "16Gi")).await?;
        let pod = s.start("over", OVER).await?;
        eventually("the incident to wait and to say why", TIMEOUT, async || {
            let incident = s.incidents().await?.pop().context("no incident")?;
            let decision = incident.status.and_then(|status| status.decision).context("no decision")?;
            ensure!(!decision.state.is_final(), "it ended {:?}/{}", decision.state, decision.reason);
            ensure!(
                decision.message.contains("isruption") || decision.reason == "DisruptionBudget",
                "it says {}: {}",
                decision.reason,
                decision.message
            );
            Ok(())
        })
        .await?;
        s.untouched(&pod).await?;
        let budgets = s.api::<PodDisruptionBudget>();
        budgets.delete("keep-another", &DeleteParams::default()).await?;
        s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await.map(drop)
    })
}

#[test]
fn a_pod_of_a_daemon_set_is_never_restarted() -> Result<()> {
    scenario("daemon-pod", async |s| {
        s.program(&s.namespace, enforce(&s.namespace, "16Gi")).await?;
        s.apply(&json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "daemon"},
            "spec": {"selector": {"matchLabels": {"app": "daemon"}}, "template": ModelServer::new("daemon", OVER).template()},
        }))
        .await?;
        let pod = s.running("daemon").await?;
        s.incident(&pod, DecisionState::Suppressed, "DaemonSetPod").await?;
        s.untouched(&pod).await?;
        let sets = s.api::<k8s_openapi::api::apps::v1::DaemonSet>();
        sets.delete("daemon", &DeleteParams::background()).await?;
        Ok(())
    })
}

#[test]
fn d16_two_restarts_that_did_not_help_become_a_ticket() -> Result<()> {
    scenario("d16-ticket", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Workload", "maxActions": 10, "windowMinutes": 60}]);
        s.program(&s.namespace, spec).await?;
        let first = s.start("again", OVER).await?;
        s.incident(&first, DecisionState::Succeeded, "MemoryReturned").await?;
        let second = s.running_other_than("again", first.metadata.uid.as_deref()).await?;
        s.incident(&second, DecisionState::Succeeded, "MemoryReturned").await?;
        let third = s.running_other_than("again", second.metadata.uid.as_deref()).await?;
        let ticket = s.incident(&third, DecisionState::Suppressed, "TicketNeeded").await?;
        let message = ticket.status.and_then(|status| status.decision).context("a decision")?.message;
        ensure!(message.chars().any(|character| character.is_ascii_digit()), "without numbers: {message}");
        // On the workload, where its owner looks.
        s.event("again", "TicketNeeded").await?;
        s.untouched(&third).await
    })
}

#[test]
fn of_devices_that_a_dra_driver_publishes_freeze_taints_just_the_one() -> Result<()> {
    scenario("freeze-dra", async |s| {
        let freeze = json!([{"type": "Freeze", "freeze": {"taintNodeWhen": "AnyDevice"}}]);
        s.program(&s.namespace, broken_by(&s.namespace, "60Gi", &critical(40, 30, &freeze))).await?;
        let samples = s.metrics(NODE).await?;
        let uuid = |device: &str| {
            let mut found = samples.labels("highwater_device_info", &[("device", device)], "uuid");
            found.pop().context("a UUID")
        };
        let device = |name: &str, uuid: &str| json!({"name": name, "attributes": {"uuid": {"string": uuid}}});
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": s.namespace},
            "spec": {"driver": "gpu.example.com", "nodeName": NODE,
                "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
                "devices": [device("gpu-0", &uuid("0")?), device("gpu-1", &uuid("1")?)]},
        });
        let kind = |kind: &str| ApiResource::from_gvk(&GroupVersionKind::gvk("resource.k8s.io", "v1", kind));
        let slices: Api<DynamicObject> = Api::all_with(s.client.clone(), &kind("ResourceSlice"));
        let rules: Api<DynamicObject> = Api::all_with(s.client.clone(), &kind("DeviceTaintRule"));
        slices.patch(&s.namespace, &PatchParams::apply("scenario"), &Patch::Apply(&slice)).await?;
        let ours = ListParams::default().labels(&format!("{}={NODE}", names::TAINTED_NODE_LABEL));
        let count = async |expected: usize| {
            eventually(&format!("{expected} taint rules"), TIMEOUT, async || {
                let rules = rules.list(&ours).await?.items;
                ensure!(rules.len() == expected, "there are {}", rules.len());
                Ok(rules)
            })
            .await
        };
        let result = async {
            let full = s.start("full", "context; alloc 36Gi; hold").await?;
            let index = s.device_of(&full).await?;
            let rule = count(1).await?.pop().context("a rule")?;
            let selector = rule.data["spec"]["deviceSelector"].clone();
            ensure!(selector["device"] == format!("gpu-{index}"), "it selects {selector}");
            ensure!(
                selector["pool"] == NODE && selector["driver"] == "gpu.example.com",
                "it selects {selector}"
            );
            ensure!(rule.data["spec"]["taint"]["effect"] == "NoSchedule", "{}", rule.data["spec"]["taint"]);
            let taints = s.node_object(NODE).await?.spec.and_then(|spec| spec.taints).unwrap_or_default();
            ensure!(
                !taints.iter().any(|taint| taint.key == names::PRESSURE_TAINT),
                "the node is tainted too"
            );
            let deployments = s.api::<k8s_openapi::api::apps::v1::Deployment>();
            deployments.delete("full", &DeleteParams::background()).await?;
            count(0).await.map(drop)
        }
        .await;
        slices.delete(&s.namespace, &DeleteParams::default()).await?;
        result
    })
}
