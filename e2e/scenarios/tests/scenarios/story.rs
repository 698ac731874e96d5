//! The main job: from a policy to a pod restarted before it takes its neighbour down.

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{ActionType, DecisionState, IncidentKind, Mode};
use highwater_scenarios::{GI, ModelServer, NODE, Scenario, deployment, enforce, scenario};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;

const QUIET: &str = "context; alloc 8Gi; serve";
const HOG: &str = "ignore-sigterm; context; alloc 6Gi; hold 3s; grow 4Gi/s to 30Gi; hold";

#[test]
fn b16_the_hog_is_restarted_and_the_neighbour_never_notices() -> Result<()> {
    scenario("b16-hog", async |s| {
        s.program("b16", enforce(&s.namespace, "16Gi")).await?;
        let quiet = s.start("quiet", QUIET).await?;
        let hog = s.start("hog", HOG).await?;

        let incident = s.incident(&hog, DecisionState::Succeeded, "MemoryReturned").await?;
        ensure!(incident.spec.kind == IncidentKind::QuotaBreach && incident.spec.mode == Mode::Enforce);
        ensure!(incident.spec.proposed.action == ActionType::Restart && incident.spec.policy == "b16");
        let evidence = &incident.spec.evidence;
        ensure!(evidence.limit_bytes == Some(16 * GI), "limit in evidence: {:?}", evidence.limit_bytes);
        ensure!(evidence.used_bytes > Some(16 * GI), "use in evidence: {:?}", evidence.used_bytes);
        ensure!(!evidence.neighbour_bytes.is_empty(), "the neighbour is in the evidence as a count of bytes");
        ensure!(
            !serde_json::to_string(&incident.spec)?.contains(&quiet.name_any()),
            "the evidence must not name the neighbour"
        );
        let decision = incident.status.and_then(|status| status.decision).context("a decision")?;
        ensure!(
            decision.acted_at.is_some() && decision.workload.as_deref() == Some("Deployment/hog"),
            "{decision:?}"
        );
        ensure!(!decision.budgets.is_empty(), "the decision says what each budget said");

        // Every step is there to read.
        s.event(&hog.name_any(), "QuotaBreach").await?;
        s.event(&hog.name_any(), "Evicted").await?;
        s.untouched(&quiet).await?;
        s.served_without_failure(&quiet).await?;
        only_incident_about(s, &hog).await?;
        Ok(())
    })
}

#[test]
fn d16_a_workload_that_breaches_again_is_not_restarted_beyond_its_rate() -> Result<()> {
    scenario("d16-rate", async |s| {
        s.program("d16", enforce(&s.namespace, "16Gi")).await?;
        let first = s.start("hog", HOG).await?;
        s.incident(&first, DecisionState::Succeeded, "MemoryReturned").await?;
        let second = s.running_other_than("hog", first.uid().as_deref()).await?;
        let waiting = s.incident(&second, DecisionState::Proposed, "BudgetExhausted").await?;
        let decision = waiting.status.and_then(|status| status.decision).context("a decision")?;
        ensure!(decision.budgets.iter().any(|budget| budget.contains("Workload")), "{:?}", decision.budgets);
        s.untouched(&second).await
    })
}

#[test]
fn l08_an_emergency_provably_fires() -> Result<()> {
    scenario("l08-emergency", async |s| {
        let mut spec = enforce(&s.namespace, "60Gi");
        spec["quota"]["rules"] = json!([{"name": "owed", "pods": {"matchLabels": {"app": "owed"}}, "guarantee": "30Gi", "limit": "60Gi"}]);
        spec["quota"]["default"] = json!({"guarantee": "8Gi", "limit": "60Gi"});
        spec["breakers"] = json!([{
            "scope": "Device",
            "minimumStayMilliseconds": 200,
            "warning": {"tripPercent": 60, "clearPercent": 55, "holdMilliseconds": 0, "actions": [{"type": "Signal"}]},
            "emergency": {"tripPercent": 80, "clearPercent": 75, "holdMilliseconds": 0,
                          "actions": [{"type": "Restart", "restart": {"gracePeriodSeconds": 0}}]},
        }]);
        s.program("l08", spec).await?;
        // Larger, but within its guarantee: not the one to go.
        s.apply(&deployment("owed", "context; alloc 28Gi; serve")).await?;
        let owed = s.running("owed").await?;
        s.apply(&deployment("hog", "ignore-sigterm; context; alloc 4Gi; hold 2s; grow 8Gi/s to 45Gi; hold"))
            .await?;
        let hog = s.running("hog").await?;
        let incident = s.incident(&hog, DecisionState::Succeeded, "MemoryReturned").await?;
        ensure!(incident.spec.kind == IncidentKind::Breaker, "{:?}", incident.spec.kind);
        ensure!(incident.spec.proposed.grace_period_seconds == Some(0));
        s.untouched(&owed).await?;
        let level = s.metrics(NODE).await?.values("highwater_device_level", &[("mode", "Enforce")]);
        ensure!(!level.is_empty(), "the level is a metric");
        Ok(())
    })
}

#[test]
fn b14_two_processes_of_a_pod_are_one_sum_and_acted_on() -> Result<()> {
    scenario("b14-sum", async |s| {
        s.program("b14", enforce(&s.namespace, "8Gi")).await?;
        // Each is within the limit; together they are not.
        s.apply(&deployment("forks", "fork 2 { context; alloc 6Gi; hold }; hold")).await?;
        let pod = s.running("forks").await?;
        let incident = s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        ensure!(
            incident.spec.evidence.used_bytes >= Some(12 * GI),
            "{:?}",
            incident.spec.evidence.used_bytes
        );
        Ok(())
    })
}

/// Moves a pod's process into a cgroup below its container's, as a container engine inside the
/// pod does; fails where no hierarchy let it.
const NEST: &str = r#"
for p in $(pgrep -x workload); do grep -q "$0" /proc/$p/cgroup && pid=$p; done
nested=docker/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
while IFS=: read -r _ controllers path; do
    folder=/sys/fs/cgroup/${controllers#name=}$path/$nested
    mkdir -p "$folder" 2>/dev/null && echo "$pid" > "$folder/cgroup.procs"
done < /proc/$pid/cgroup 2>/dev/null
grep -q "$nested" /proc/$pid/cgroup
"#;

#[test]
fn b04_a_container_nested_in_a_pod_is_charged_to_that_pod() -> Result<()> {
    scenario("b04-nested", async |s| {
        s.program("b04", enforce(&s.namespace, "8Gi")).await?;
        s.apply(&deployment("outer", "hold 6s; context; alloc 12Gi; hold")).await?;
        let pod = s.running("outer").await?;
        let uid = pod.uid().context("no UID")?;
        s.cluster.on_node(NODE, "sh", &["-c", NEST, &uid]).await.context("nesting the process")?;
        let incident = s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        ensure!(
            incident.spec.evidence.used_bytes >= Some(12 * GI),
            "{:?}",
            incident.spec.evidence.used_bytes
        );
        Ok(())
    })
}

#[test]
fn b17_a_context_counts_towards_the_quota() -> Result<()> {
    scenario("b17-context", async |s| {
        let mut spec = enforce(&s.namespace, "512Mi");
        spec["quota"]["breach"]["tolerance"] = json!("1Mi");
        s.program("b17", spec).await?;
        s.apply(&deployment("small", "context; hold")).await?;
        let pod = s.running("small").await?;
        s.incident(&pod, DecisionState::Succeeded, "MemoryReturned").await?;
        Ok(())
    })
}

#[test]
fn b12_a_pod_that_ignores_its_share_is_stopped_not_its_neighbour() -> Result<()> {
    scenario("b12-share", async |s| {
        let mut spec = enforce(&s.namespace, "20Gi");
        spec["quota"]["rules"] = json!([{"name": "small", "pods": {"matchLabels": {"tier": "small"}}, "guarantee": "2Gi", "limit": "2Gi"}]);
        s.program("b12", spec).await?;
        s.apply(&deployment("keeps", "context; alloc 16Gi; serve")).await?;
        let keeps = s.running("keeps").await?;
        s.apply(
            &ModelServer::new("booked-2048-uses-11611", "context; alloc 11611Mi; hold")
                .label("tier", "small")
                .deployment(),
        )
        .await?;
        let thief = s.running("booked-2048-uses-11611").await?;
        let incident = s.incident(&thief, DecisionState::Succeeded, "MemoryReturned").await?;
        ensure!(
            incident.spec.evidence.quota_rule.as_deref() == Some("small"),
            "{:?}",
            incident.spec.evidence.quota_rule
        );
        s.untouched(&keeps).await
    })
}

#[test]
fn d13_no_second_act_before_the_memory_of_the_first_is_back() -> Result<()> {
    scenario("d13-slow-exit", async |s| {
        let mut spec = enforce(&s.namespace, "10Gi");
        spec["quota"]["breach"]["actions"] =
            json!([{"type": "Restart", "restart": {"gracePeriodSeconds": 6}}]);
        s.program("d13", spec).await?;
        // Both ignore SIGTERM, so that the first is gone only after its whole grace period.
        let script = "ignore-sigterm; context; alloc 14Gi; hold";
        s.apply(&deployment("one", script)).await?;
        s.apply(&deployment("two", script)).await?;
        let (one, two) = (s.running("one").await?, s.running("two").await?);
        let a = s.incident(&one, DecisionState::Succeeded, "MemoryReturned").await?;
        let b = s.incident(&two, DecisionState::Succeeded, "MemoryReturned").await?;
        let times = |incident: &highwater_crds::GpuMemoryIncident| {
            let decision = incident.status.as_ref().and_then(|status| status.decision.clone());
            decision.and_then(|d| d.acted_at.map(|evicted| (evicted.0, d.since.0)))
        };
        let (a, b) = (times(&a).context("first")?, times(&b).context("second")?);
        let (first, second) = if a.0 < b.0 { (a, b) } else { (b, a) };
        ensure!(
            second.0 >= first.1,
            "the second was evicted at {} before the first was verified at {}",
            second.0,
            first.1
        );
        Ok(())
    })
}

async fn only_incident_about(s: &Scenario, pod: &Pod) -> Result<()> {
    let uid = pod.uid().unwrap_or_default();
    let mut about = s.incidents().await?;
    about.retain(|incident| incident.spec.subject.as_ref().is_some_and(|subject| subject.uid == uid));
    ensure!(about.len() == 1, "{} incidents about one episode of {}", about.len(), pod.name_any());
    Ok(())
}
