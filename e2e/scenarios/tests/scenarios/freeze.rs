//! `Freeze`: no new work on a node whose memory runs high, and nothing left behind.

use anyhow::{Context as _, Result, ensure};
use highwater_crds::names;
use highwater_e2e::eventually;
use highwater_scenarios::{NODE, Scenario, TIMEOUT, deployment, enforce, scenario};
use k8s_openapi::api::core::v1::{Node, Taint};
use kube::{Api, api::DeleteParams};
use serde_json::{Value, json};

fn freezing(namespace: &str, when: &str) -> Value {
    let mut spec = enforce(namespace, "60Gi");
    spec["breakers"] = json!([{
        "scope": "Device", "minimumStayMilliseconds": 200,
        "critical": {"tripPercent": 40, "clearPercent": 30, "holdMilliseconds": 0,
                     "actions": [{"type": "Freeze", "freeze": {"taintNodeWhen": when}}]},
    }]);
    spec
}

#[test]
fn freeze_taints_the_node_and_lets_go_when_memory_falls() -> Result<()> {
    scenario("freeze", async |s| {
        s.program("freeze", freezing(&s.namespace, "AnyDevice")).await?;
        s.apply(&deployment("full", "context; alloc 40Gi; hold")).await?;
        s.running("full").await?;
        let taint = tainted(s).await?;
        ensure!(taint.effect == "NoSchedule", "{taint:?}");
        s.api::<k8s_openapi::api::apps::v1::Deployment>().delete("full", &DeleteParams::background()).await?;
        untainted(s).await
    })
}

#[test]
fn freeze_waits_for_all_devices_unless_the_policy_says_otherwise() -> Result<()> {
    scenario("freeze-all", async |s| {
        s.program("freeze-all", freezing(&s.namespace, "AllDevices")).await?;
        s.apply(&deployment("full", "context; alloc 40Gi; hold")).await?;
        let full = s.running("full").await?;
        let device = s.device_of(&full).await?;
        let level = [("device", device.as_str()), ("mode", "Enforce")];
        s.metric("highwater_device_level", &level, |level| level == Some(2)).await?;
        // One of two devices is full: pods are still welcome on the other.
        highwater_e2e::never(
            "a taint while one device is free",
            std::time::Duration::from_secs(3),
            async || our_taint(s).await?.context("none"),
        )
        .await?;
        s.untouched(&full).await
    })
}

#[test]
fn deleting_the_policy_undoes_its_taint() -> Result<()> {
    scenario("freeze-undone", async |s| {
        s.program("freeze-undone", freezing(&s.namespace, "AnyDevice")).await?;
        s.apply(&deployment("full", "context; alloc 40Gi; hold")).await?;
        s.running("full").await?;
        tainted(s).await?;
        s.delete_policy("freeze-undone").await?;
        untainted(s).await
    })
}

#[test]
fn uninstall_undoes_our_taint_and_touches_no_other() -> Result<()> {
    scenario("uninstall", async |s| {
        let nodes: Api<Node> = Api::all(s.client.clone());
        s.program("uninstall", freezing(&s.namespace, "AnyDevice")).await?;
        s.apply(&deployment("full", "context; alloc 40Gi; hold")).await?;
        s.running("full").await?;
        tainted(s).await?;
        s.cluster.kubectl(["taint", "node", NODE, "example.com/mine=1:NoSchedule"]).await?;
        let result = async {
            s.cluster.uninstall().await?;
            ensure!(our_taint(s).await?.is_none(), "uninstall left our taint");
            let taints = nodes.get(NODE).await?.spec.and_then(|spec| spec.taints).unwrap_or_default();
            ensure!(
                taints.iter().any(|taint| taint.key == "example.com/mine"),
                "uninstall took another's taint"
            );
            Ok(())
        }
        .await;
        s.cluster.kubectl(["taint", "node", NODE, "example.com/mine-"]).await?;
        s.cluster.install().await?;
        result
    })
}

async fn our_taint(s: &Scenario) -> Result<Option<Taint>> {
    let nodes: Api<Node> = Api::all(s.client.clone());
    let taints = nodes.get(NODE).await?.spec.and_then(|spec| spec.taints).unwrap_or_default();
    Ok(taints.into_iter().find(|taint| taint.key == names::PRESSURE_TAINT))
}

async fn tainted(s: &Scenario) -> Result<Taint> {
    eventually("our taint on the node", TIMEOUT, async || our_taint(s).await?.context("there is none")).await
}

async fn untainted(s: &Scenario) -> Result<()> {
    eventually("our taint to be gone", TIMEOUT, async || {
        ensure!(our_taint(s).await?.is_none(), "it is there");
        Ok(())
    })
    .await
}
