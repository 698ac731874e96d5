//! What Observe and DryRun do, and what they never do.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{DecisionState, Mode};
use highwater_e2e::eventually;
use highwater_scenarios::{GI, NODE, TIMEOUT, enforce, policy, scenario};
use kube::ResourceExt as _;
use serde_json::json;

const OVER: &str = "context; alloc 20Gi; serve";

#[test]
fn observe_only_measures() -> Result<()> {
    scenario("observe", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["mode"] = json!("Observe");
        s.program("observe", spec).await?;
        let pod = s.start("over", OVER).await?;
        let name = pod.name_any();
        let labels = [("namespace", s.namespace.as_str()), ("pod", name.as_str())];
        s.metric("highwater_pod_memory_used_bytes", &labels, |used| used > Some(20 * GI)).await?;
        highwater_e2e::never("an incident under an Observe policy", Duration::from_secs(4), async || {
            let incidents = s.incidents().await?;
            incidents.first().map(kube::ResourceExt::name_any).context("none")
        })
        .await?;
        s.untouched(&pod).await?;
        let events = s.events_about(&name).await?;
        ensure!(!events.iter().any(|reason| reason == "QuotaBreach"), "{events:?}");
        Ok(())
    })
}

#[test]
fn dry_run_says_what_it_would_do_and_never_acts() -> Result<()> {
    scenario("dry-run", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["mode"] = json!("DryRun");
        s.program("dry-run", spec).await?;
        let pod = s.start("over", OVER).await?;
        let incident = s.incident(&pod, DecisionState::Suppressed, "DryRun").await?;
        ensure!(incident.spec.mode == Mode::DryRun);
        let decision = incident.status.and_then(|status| status.decision).context("a decision")?;
        ensure!(
            decision.message.to_lowercase().contains("would"),
            "it says what it would do: {}",
            decision.message
        );
        ensure!(decision.acted_at.is_none());
        s.untouched(&pod).await?;
        // The pressure file is an act too.
        let signal = s
            .cluster
            .kubectl([
                "exec",
                "-n",
                &s.namespace,
                &pod.name_any(),
                "--",
                "/bin/busybox",
                "cat",
                "/var/run/highwater/pressure",
            ])
            .await;
        ensure!(signal.is_err(), "a DryRun policy wrote a signal: {signal:?}");
        Ok(())
    })
}

#[test]
fn an_observe_policy_of_higher_priority_does_not_bind_an_enforced_one() -> Result<()> {
    scenario("modes-apart", async |s| {
        let mut observe = enforce(&s.namespace, "60Gi");
        observe["mode"] = json!("Observe");
        observe["priority"] = json!(900);
        s.apply(&policy("watching", observe)).await?;
        s.program("binding", enforce(&s.namespace, "16Gi")).await?;
        s.programmed("watching").await?;
        let pod = s.start("over", OVER).await?;
        let incident = s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        ensure!(incident.spec.policy == "binding");
        Ok(())
    })
}

#[test]
fn l09_a_changed_quota_holds_without_a_restart() -> Result<()> {
    scenario("l09-live-quota", async |s| {
        s.program("l09", enforce(&s.namespace, "40Gi")).await?;
        let pod = s.start("steady", OVER).await?;
        let name = pod.name_any();
        let labels = [("namespace", s.namespace.as_str()), ("pod", name.as_str())];
        s.metric("highwater_pod_memory_limit_bytes", &labels, |limit| limit == Some(40 * GI)).await?;
        s.untouched(&pod).await?;
        s.apply(&policy("l09", enforce(&s.namespace, "16Gi"))).await?;
        s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        Ok(())
    })
}

#[test]
fn deleting_a_policy_leaves_nothing_that_acts() -> Result<()> {
    scenario("policy-deleted", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        // No token, so that the incident waits.
        spec["remediation"]["budget"]["rates"] =
            json!([{"scope": "Fleet", "maxActions": 0, "windowMinutes": 60}]);
        s.program("deleted", spec).await?;
        let pod = s.start("over", OVER).await?;
        s.incident(&pod, DecisionState::Proposed, "BudgetExhausted").await?;
        s.delete_policy("deleted").await?;
        s.incident(&pod, DecisionState::Cancelled, "PolicyDeleted").await?;
        s.plan_followed().await?;
        let name = pod.name_any();
        eventually("the limit to be gone from the metrics", TIMEOUT, async || {
            let limit =
                s.metrics(NODE).await?.value("highwater_pod_memory_limit_bytes", &[("pod", &name)])?;
            ensure!(limit.is_none(), "it is {limit:?}");
            Ok(())
        })
        .await?;
        s.untouched(&pod).await
    })
}
