//! What an incident waits for, and that it goes on when it may.

use anyhow::{Context as _, Result, ensure};
use highwater_crds::DecisionState;
use highwater_scenarios::{NODE, SYSTEM, enforce, policy, scenario};
use kube::{ResourceExt as _, api::DeleteParams};
use serde_json::json;

const OVER: &str = "context; alloc 20Gi; serve";

#[test]
fn a_pdb_that_forbids_it_is_waited_for_and_named() -> Result<()> {
    scenario("pdb", async |s| {
        s.apply(&json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "keep"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "over"}}},
        }))
        .await?;
        s.program("pdb", enforce(&s.namespace, "16Gi")).await?;
        let pod = s.start("over", OVER).await?;
        let incident = s.incident(&pod, DecisionState::Proposed, "DisruptionBudget").await?;
        let decision = incident.status.and_then(|status| status.decision).context("a decision")?;
        ensure!(
            decision.message.contains("keep"),
            "the message names the PodDisruptionBudget: {}",
            decision.message
        );
        s.untouched(&pod).await?;

        let budgets = s.api::<k8s_openapi::api::policy::v1::PodDisruptionBudget>();
        budgets.delete("keep", &DeleteParams::default()).await?;
        s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        Ok(())
    })
}

#[test]
fn an_exhausted_budget_is_waited_for_and_a_raised_one_is_used() -> Result<()> {
    scenario("budget", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Policy", "maxActions": 0, "windowMinutes": 60}]);
        // A name of its own: what a policy of this name spent within the hour counts.
        let name = format!("budget-{}", s.namespace);
        s.program(&name, spec.clone()).await?;
        let pod = s.start("over", OVER).await?;
        s.incident(&pod, DecisionState::Proposed, "BudgetExhausted").await?;
        s.untouched(&pod).await?;
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Policy", "maxActions": 1, "windowMinutes": 60}]);
        s.apply(&policy(&name, spec)).await?;
        s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        Ok(())
    })
}

#[test]
fn paused_stops_new_acts_wherever_it_is_set() -> Result<()> {
    scenario("paused", async |s| {
        s.pause_namespace(SYSTEM, true).await?;
        let result = async {
            s.program("paused", enforce(&s.namespace, "16Gi")).await?;
            let pod = s.start("over", OVER).await?;
            s.incident(&pod, DecisionState::Proposed, "Paused").await?;
            // Handing the pause from one place to the next, no act slips through.
            s.pause_node(NODE, true).await?;
            s.pause_namespace(SYSTEM, false).await?;
            s.pause_namespace(&s.namespace, true).await?;
            s.pause_node(NODE, false).await?;
            s.cluster
                .kubectl([
                    "annotate",
                    "pod",
                    "-n",
                    &s.namespace,
                    &pod.name_any(),
                    "highwater.dev/paused=true",
                ])
                .await?;
            s.pause_namespace(&s.namespace, false).await?;
            highwater_e2e::never("an act while paused", std::time::Duration::from_secs(3), async || {
                s.untouched(&pod).await.err().context("untouched")
            })
            .await?;
            s.cluster
                .kubectl(["annotate", "pod", "-n", &s.namespace, &pod.name_any(), "highwater.dev/paused-"])
                .await?;
            s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
            Ok(())
        }
        .await;
        s.pause_namespace(SYSTEM, false).await?;
        s.pause_node(NODE, false).await?;
        result
    })
}

#[test]
fn max_unavailable_counts_pods_that_are_down_for_other_reasons() -> Result<()> {
    scenario("max-unavailable", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["quota"]["rules"] =
            json!([{"name": "r", "pods": {"matchLabels": {"app": "pair"}}, "limit": "16Gi"}]);
        s.program("max-unavailable", spec).await?;
        // Of two replicas the one that asks for a place that no node has stays Pending.
        let mut pair = highwater_scenarios::ModelServer::new("pair", OVER).replicas(2).deployment();
        pair["spec"]["template"]["spec"]["affinity"] = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": {"app": "pair"}}, "topologyKey": "kubernetes.io/hostname"}]}});
        s.apply(&pair).await?;
        let pod = s.running("pair").await?;
        let incident = s.incident(&pod, DecisionState::Proposed, "BudgetExhausted").await?;
        let decision = incident.status.and_then(|status| status.decision).context("a decision")?;
        ensure!(decision.message.contains("maxUnavailable"), "{}", decision.message);
        s.untouched(&pod).await
    })
}
