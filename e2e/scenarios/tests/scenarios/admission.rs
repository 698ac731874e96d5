//! Bad input: what the API server refuses, and what conditions say of the rest.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use highwater_scenarios::{ModelServer, Scenario, TIMEOUT, deployment, enforce, policy, scenario};
use kube::ResourceExt as _;
use serde_json::{Value, json};

/// What is wrong, the field of the spec, its value, and a part of the message.
type Refusal = (&'static str, &'static str, Value, &'static str);

fn refusals_of_leaks() -> [Refusal; 5] {
    [
        (
            "a drain for a leak",
            "leaks",
            json!({"actions": [{"type": "Drain"}]}),
            "only Signal, Hook and Restart can help",
        ),
        (
            "a pod that is to be unready for a leak",
            "leaks",
            json!({"actions": [{"type": "Unready"}, {"type": "Restart"}]}),
            "a pod that is Unready keeps all that it leaked",
        ),
        (
            "leaks seen at falling scales",
            "leaks",
            json!({"blockMilliseconds": [600_000, 180_000, 1_800_000, 7_200_000]}),
            "blockMilliseconds must rise",
        ),
        (
            "blocks that are no whole buckets",
            "leaks",
            json!({"bucketMilliseconds": 50_000}),
            "does not divide the default blocks",
        ),
        (
            "a horizon within the lead",
            "leaks",
            json!({"horizonMilliseconds": 300_000}),
            "horizonMilliseconds must be at least leadMilliseconds",
        ),
    ]
}

#[test]
fn the_api_server_refuses_what_cannot_be_right_and_says_what_to_change() -> Result<()> {
    scenario("refused", async |s| {
        let breaker = |warning: Value, critical: Value| json!([{"scope": "Device", "warning": warning, "critical": critical}]);
        let mark = |trip: i32, clear: i32| json!({"tripPercent": trip, "clearPercent": clear});
        let cases: [Refusal; 18] = [
            (
                "clear above trip",
                "breakers",
                breaker(mark(75, 80), mark(88, 84)),
                "clearPercent must be below tripPercent",
            ),
            (
                "clear equal to trip",
                "breakers",
                breaker(mark(75, 75), mark(88, 84)),
                "clearPercent must be below tripPercent",
            ),
            ("levels out of order", "breakers", breaker(mark(90, 70), mark(88, 84)), "out of order"),
            ("no level", "breakers", json!([{"scope": "Device"}]), "at least one of warning"),
            (
                "a drain for a pool",
                "breakers",
                json!([{"scope": "Pool", "warning": {"tripPercent": 75, "clearPercent": 70, "actions": [{"type": "Drain"}]}}]),
                "only a breaker of scope Device may ask for Drain",
            ),
            (
                "guarantee above limit",
                "quota",
                json!({"default": {"guarantee": "9Gi", "limit": "8Gi"}}),
                "guarantee must not be above limit",
            ),
            ("zero size", "quota", json!({"default": {"limit": "0"}}), "greater than 0"),
            ("negative size", "quota", json!({"default": {"limit": "-1Gi"}}), "greater than 0"),
            ("not a size", "quota", json!({"default": {"limit": "lots"}}), "greater than 0"),
            (
                "unknown action",
                "quota",
                json!({"default": {"limit": "8Gi"}, "breach": {"actions": [{"type": "Explode"}]}}),
                "Unsupported value: \"Explode\"",
            ),
            (
                "a drain for one pod's breach",
                "quota",
                json!({"default": {"limit": "8Gi"}, "breach": {"actions": [{"type": "Drain"}]}}),
                "Freeze and Drain are actions of breakers",
            ),
            (
                "pool above its cap",
                "pool",
                json!({"sizePercent": 60, "maxPercent": 50}),
                "sizePercent must not be above maxPercent",
            ),
            ("a pool without a size", "pool", json!({"startHoldSeconds": 60}), "need a pool"),
            (
                "a pool that flaps",
                "pool",
                json!({"sizePercent": 60, "adaptive": {"growAbovePercent": 50, "shrinkBelowPercent": 50}}),
                "shrinkBelowPercent must be below",
            ),
            (
                "a wait without end",
                "pool",
                json!({"sizePercent": 60, "allocationWaitSeconds": 61}),
                "should be less than or equal to 60",
            ),
            (
                "kernel limits asked for and switched off",
                "quota",
                json!({"kernelLimits": "Off", "rules": [{"name": "r", "pods": {}, "limit": "8Gi", "minimumStrength": "Kernel"}]}),
                "kernelLimits is Off",
            ),
            (
                "unknown managed memory",
                "quota",
                json!({"rules": [{"name": "r", "pods": {}, "limit": "8Gi", "managedMemory": "Hide"}]}),
                "Unsupported value: \"Hide\"",
            ),
            ("Enforce without budget", "remediation", Value::Null, "needs remediation.budget"),
        ];
        for (what, field, value, message) in cases.into_iter().chain(refusals_of_leaks()) {
            let mut spec = enforce(&s.namespace, "8Gi");
            if value.is_null() {
                spec.as_object_mut().map(|spec| spec.remove(field));
            } else {
                spec[field] = value;
            }
            let answer = s.dry_run(&policy("refused", spec)).await;
            let said = answer.err().map(|error| format!("{error:#}")).unwrap_or_default();
            ensure!(said.contains(message), "{what}: expected {message:?}, got {said:?}");
        }
        s.dry_run(&policy("fine", enforce(&s.namespace, "8Gi"))).await
    })
}

#[test]
fn a_limit_that_fits_no_device_is_invalid() -> Result<()> {
    scenario("too-big", async |s| {
        s.apply(&policy("too-big", enforce(&s.namespace, "500Gi"))).await?;
        let message = s.policy_condition("too-big", "Accepted", "False", "Invalid").await?;
        ensure!(message.contains("500Gi"), "{message}");
        Ok(())
    })
}

#[test]
fn a_selector_that_matches_nothing_says_so() -> Result<()> {
    scenario("no-match", async |s| {
        let mut spec = enforce(&s.namespace, "8Gi");
        spec["nodes"] = json!({"matchLabels": {"pool": "nowhere"}});
        s.apply(&policy("no-match", spec)).await?;
        s.policy_condition("no-match", "Programmed", "False", "TargetNotFound").await?;
        let mut spec = enforce(&s.namespace, "8Gi");
        spec["devices"] = json!({"products": ["Abacus*"]});
        s.apply(&policy("no-device", spec)).await?;
        s.policy_condition("no-device", "Programmed", "False", "TargetNotFound").await?;
        Ok(())
    })
}

#[test]
fn of_two_policies_that_conflict_the_loser_names_the_winner_and_the_field() -> Result<()> {
    scenario("conflict", async |s| {
        let breakers =
            |trip: i32| json!([{"scope": "Device", "warning": {"tripPercent": trip, "clearPercent": 20}}]);
        let mut winner = enforce(&s.namespace, "30Gi");
        winner["priority"] = json!(200);
        winner["breakers"] = breakers(70);
        let mut loser = enforce(&s.namespace, "20Gi");
        loser["breakers"] = breakers(80);
        s.apply(&policy("winner", winner)).await?;
        s.apply(&policy("loser", loser)).await?;
        s.policy_condition("winner", "Programmed", "True", "Programmed").await?;
        let message = s.policy_condition("loser", "Programmed", "False", "PartiallyProgrammed").await?;
        ensure!(message.contains("winner") && message.contains("breakers"), "{message}");
        s.policy_condition("loser", "Accepted", "True", "Accepted").await?;
        Ok(())
    })
}

#[test]
fn a_policy_that_the_types_cannot_parse_does_not_stop_the_others() -> Result<()> {
    scenario("unparseable", async |s| {
        // Stored behind the schema's back: the definition is opened for a moment.
        let crd = "gpumemorypolicies.highwater.dev";
        let path = "/spec/versions/0/schema/openAPIV3Schema";
        let saved = s.cluster.kubectl(["get", "crd", crd, "-o", "json"]).await?;
        let saved: Value = serde_json::from_str(&saved)?;
        let schema = saved["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
        let replace = |value: Value| json!([{"op": "replace", "path": path, "value": value}]).to_string();
        let open = replace(json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}));
        s.cluster.kubectl(["patch", "crd", crd, "--type=json", "-p", &open]).await?;
        let broken = json!({
            "apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryPolicy", "metadata": {"name": "broken"},
            "spec": {"mode": "Enforce", "nodes": {}, "quota": {"default": {"limit": "minus one"}}},
        });
        let stored = highwater_e2e::eventually("the open schema to be in force", TIMEOUT, async || {
            s.apply(&broken).await
        })
        .await;
        let told = match stored {
            Ok(()) => said_to_be_invalid(s, "broken").await,
            error => error,
        };
        s.cluster.kubectl(["patch", "crd", crd, "--type=json", "-p", &replace(schema)]).await?;
        told?;
        s.program("sound", enforce(&s.namespace, "16Gi")).await?;
        s.apply(&deployment("over", "context; alloc 20Gi; serve")).await?;
        let pod = s.running("over").await?;
        s.incident(&pod, highwater_crds::DecisionState::Succeeded, "MemoryReturned").await?;
        Ok(())
    })
}

/// What can be said of a policy that cannot be parsed is said in its own status.
async fn said_to_be_invalid(s: &Scenario, name: &str) -> Result<()> {
    highwater_e2e::eventually(&format!("{name}: Accepted=False/Invalid"), TIMEOUT, async || {
        let policy = s.cluster.kubectl(["get", "gmp", name, "-o", "json"]).await?;
        let policy: Value = serde_json::from_str(&policy)?;
        let conditions = policy["status"]["conditions"].as_array().context("no conditions")?;
        let accepted = conditions.iter().find(|c| c["type"] == "Accepted").context("no Accepted")?;
        ensure!(accepted["status"] == "False" && accepted["reason"] == "Invalid", "{accepted}");
        Ok(())
    })
    .await
}

#[test]
fn a_malformed_pod_annotation_is_an_event_and_the_quota_holds() -> Result<()> {
    scenario("annotation", async |s| {
        s.program("annotation", enforce(&s.namespace, "16Gi")).await?;
        let server =
            ModelServer::new("over", "context; alloc 20Gi; serve").annotation("highwater.dev/limit", "a lot");
        s.apply(&server.deployment()).await?;
        let pod = s.running("over").await?;
        s.event(&pod.name_any(), "InvalidAnnotation").await?;
        s.incident(&pod, highwater_crds::DecisionState::Succeeded, "MemoryReturned").await?;
        Ok(())
    })
}

#[test]
fn an_annotation_lowers_a_limit_and_never_raises_it() -> Result<()> {
    scenario("annotation-limit", async |s| {
        s.program("annotation-limit", enforce(&s.namespace, "16Gi")).await?;
        let limits = BTreeMap::from([("lower", ("4Gi", 4i64)), ("raise", ("64Gi", 16))]);
        for (name, (annotation, _)) in &limits {
            let server = ModelServer::new(name, "context; alloc 1Gi; serve")
                .annotation("highwater.dev/limit", annotation);
            s.apply(&server.deployment()).await?;
        }
        for (name, (_, gibibytes)) in &limits {
            let pod = s.running(name).await?.name_any();
            let expected = gibibytes * highwater_scenarios::GI;
            s.metric("highwater_pod_memory_limit_bytes", &[("pod", &pod)], |limit| limit == Some(expected))
                .await?;
        }
        Ok(())
    })
}

#[test]
fn an_agent_may_write_only_what_is_of_its_own_node() -> Result<()> {
    scenario("agent-confined", async |s| {
        let agent = s.agent(highwater_scenarios::NODE).await?;
        let account =
            agent.spec.as_ref().and_then(|spec| spec.service_account_name.clone()).unwrap_or_default();
        let user = format!("--as=system:serviceaccount:{}:{account}", highwater_scenarios::SYSTEM);
        let write = async |node: &str, object: &str| {
            let extra = format!("--as-user-extra=authentication.kubernetes.io/node-name={node}");
            s.cluster
                .kubectl([
                    "annotate",
                    "gmn",
                    object,
                    "probe=1",
                    "--overwrite",
                    "--dry-run=server",
                    &user,
                    &extra,
                ])
                .await
        };
        write(highwater_scenarios::NODE, highwater_scenarios::NODE).await?;
        let refused = write("another-node", highwater_scenarios::NODE).await;
        ensure!(refused.is_err(), "an agent of another node wrote this node's object: {refused:?}");
        for denied in
            [["delete", "pods"], ["create", "pods/eviction"], ["patch", "nodes"], ["get", "secrets"]]
        {
            let answer =
                s.cluster.kubectl(["auth", "can-i", denied[0], denied[1], "-n", &s.namespace, &user]).await;
            ensure!(answer.is_err(), "the agent may {} {}: {answer:?}", denied[0], denied[1]);
        }
        Ok(())
    })
}
