//! Incidents that end without an act, and why.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_crds::DecisionState;
use highwater_e2e::{never, node::STATIC_PODS};
use highwater_scenarios::{GI, ModelServer, NODE, deployment, enforce, scenario};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt as _, api::DeleteParams};
use serde_json::{Value, json};

const OVER: &str = "context; alloc 20Gi; serve";

/// A policy that proposes but has no token to act with.
fn waiting(namespace: &str) -> Value {
    let mut spec = enforce(namespace, "16Gi");
    spec["remediation"]["budget"]["rates"] =
        json!([{"scope": "Policy", "maxActions": 0, "windowMinutes": 60}]);
    spec
}

#[test]
fn an_owner_kind_that_is_not_listed_is_left_alone() -> Result<()> {
    scenario("owner-kind", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["remediation"]["victims"] = json!({"ownerKinds": ["StatefulSet"]});
        s.program("owner-kind", spec).await?;
        let pod = s.start("over", OVER).await?;
        let incident = s.incident(&pod, DecisionState::Suppressed, "OwnerKindNotListed").await?;
        let decision = incident.status.and_then(|status| status.decision).context("a decision")?;
        ensure!(decision.message.contains("ReplicaSet"), "{}", decision.message);
        s.untouched(&pod).await
    })
}

#[test]
fn a_bare_pod_is_never_evicted() -> Result<()> {
    scenario("bare-pod", async |s| {
        s.program("bare-pod", enforce(&s.namespace, "16Gi")).await?;
        s.apply(&ModelServer::new("bare", OVER).bare_pod()).await?;
        let pod = s.running("bare").await?;
        s.incident(&pod, DecisionState::Suppressed, "NoOwner").await?;
        s.untouched(&pod).await
    })
}

#[test]
fn a_static_pod_over_its_quota_is_never_evicted_and_it_is_said_why() -> Result<()> {
    scenario("static-pod", async |s| {
        s.program("static-pod", enforce(&s.namespace, "16Gi")).await?;
        let start = Timestamp::now();
        let mut pod = ModelServer::new("static", OVER).bare_pod();
        pod["metadata"]["namespace"] = json!(s.namespace);
        let manifest = s.cluster.node_path(NODE, &format!("{STATIC_PODS}/{}.json", s.namespace));
        std::fs::write(&manifest, pod.to_string())?;
        let result = async {
            let mirror = s.running("static").await?;
            let incident = s.incident(&mirror, DecisionState::Suppressed, "MirrorPod").await?;
            let decision = incident.status.and_then(|status| status.decision).context("a decision")?;
            ensure!(decision.message.contains("static pod"), "{}", decision.message);
            ensure!(incident.spec.evidence.used_bytes > Some(16 * GI), "{:?}", incident.spec.evidence);
            ensure!(s.tokens_of(&mirror).await? == 0, "a token for what is never done");
            never("an eviction of a static pod", Duration::from_secs(3), async || {
                let mut tries = s.writes_since(start)?.into_iter();
                tries.rfind(|w| w.resource == "pods/eviction" && w.namespace == s.namespace).context("none")
            })
            .await?;
            s.untouched(&mirror).await
        }
        .await;
        std::fs::remove_file(&manifest)?;
        result
    })
}

#[test]
fn nobody_over_due_ends_without_a_culprit() -> Result<()> {
    scenario("no-culprit", async |s| {
        let mut spec = enforce(&s.namespace, "60Gi");
        spec["breakers"] = json!([{
            "scope": "Device",
            "emergency": {"tripPercent": 50, "clearPercent": 40, "holdMilliseconds": 0, "actions": [{"type": "Restart"}]},
        }]);
        s.program("no-culprit", spec).await?;
        s.apply(&deployment("within", "context; alloc 50Gi; serve")).await?;
        let pod = s.running("within").await?;
        let incident =
            s.incident_without_subject("no-culprit", DecisionState::Suppressed, "NoCulprit").await?;
        ensure!(incident.spec.evidence.level_percent >= Some(50), "{:?}", incident.spec.evidence);
        s.untouched(&pod).await
    })
}

#[test]
fn with_lowest_priority_the_least_important_pod_goes_when_nobody_is_over() -> Result<()> {
    scenario("lowest-priority", async |s| {
        s.apply(&json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "important"}, "value": 1000})).await?;
        let mut spec = enforce(&s.namespace, "60Gi");
        spec["breakers"] = json!([{
            "scope": "Device",
            "emergency": {"tripPercent": 75, "clearPercent": 60, "holdMilliseconds": 0, "actions": [{"type": "Restart", "restart": {"gracePeriodSeconds": 0}}]},
            "whenNobodyIsOver": "LowestPriority",
        }]);
        s.program("lowest-priority", spec).await?;
        let mut important = deployment("important", "context; alloc 30Gi; serve");
        important["spec"]["template"]["spec"]["priorityClassName"] = json!("important");
        s.apply(&important).await?;
        let important = s.running("important").await?;
        s.apply(&deployment("common", "context; hold 2s; alloc 34Gi; serve")).await?;
        let common = s.running("common").await?;
        s.incident(&common, DecisionState::Succeeded, "MemoryReturned").await?;
        s.untouched(&important).await
    })
}

#[test]
fn d01_memory_that_fell_before_the_act_cancels_it() -> Result<()> {
    scenario("d01-recovered", async |s| {
        s.program("d01", waiting(&s.namespace)).await?;
        s.apply(&deployment("spiky", "context; alloc 20Gi; hold 12s; free; alloc 2Gi; serve")).await?;
        let pod = s.running("spiky").await?;
        s.incident(&pod, DecisionState::Proposed, "BudgetExhausted").await?;
        s.incident(&pod, DecisionState::Cancelled, "Recovered").await?;
        // A budget that frees up afterwards changes nothing: the reason for the act is gone.
        s.program("d01", enforce(&s.namespace, "16Gi")).await?;
        s.untouched(&pod).await
    })
}

#[test]
fn a_pod_that_is_gone_or_replaced_before_the_act_cancels_it() -> Result<()> {
    scenario("pod-gone", async |s| {
        s.program("pod-gone", waiting(&s.namespace)).await?;
        s.apply(&ModelServer::new("over", OVER).deployment()).await?;
        let pod = s.running("over").await?;
        s.incident(&pod, DecisionState::Proposed, "BudgetExhausted").await?;
        s.api::<Pod>().delete(&pod.name_any(), &DeleteParams::default().grace_period(1)).await?;
        s.incident(&pod, DecisionState::Cancelled, "PodGone").await?;
        let next = s.running_other_than("over", pod.uid().as_deref()).await?;
        s.incident(&next, DecisionState::Proposed, "BudgetExhausted").await?;

        // A StatefulSet's pod comes back under its own name: the old decision must not hit it.
        let set = json!({
            "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "named"},
            "spec": {"serviceName": "named", "replicas": 1, "selector": {"matchLabels": {"app": "named"}},
                     "template": ModelServer::new("named", OVER).template()},
        });
        s.apply(&set).await?;
        let first = s.running("named").await?;
        s.incident(&first, DecisionState::Proposed, "BudgetExhausted").await?;
        s.api::<Pod>().delete("named-0", &DeleteParams::default().grace_period(1)).await?;
        let second = s.running_other_than("named", first.uid().as_deref()).await?;
        let cancelled = s.incident_ended(&first).await?;
        ensure!(
            cancelled.0 == DecisionState::Cancelled
                && ["PodGone", "PodReplaced"].contains(&cancelled.1.as_str()),
            "{cancelled:?}"
        );
        never("an act on the pod that came after", Duration::from_secs(2), async || {
            s.untouched(&second).await.err().context("untouched")
        })
        .await
    })
}

#[test]
fn a_namespace_that_is_not_selected_is_never_acted_on() -> Result<()> {
    scenario("not-selected", async |s| {
        s.program("not-selected", enforce("default", "16Gi")).await?;
        let pod = s.start("over", OVER).await?;
        never("an incident about a pod that no policy selects", Duration::from_secs(4), async || {
            s.incidents().await?.first().map(kube::ResourceExt::name_any).context("none")
        })
        .await?;
        s.untouched(&pod).await
    })
}
