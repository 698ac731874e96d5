//! A steady fleet makes no work.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use highwater_crds::{GpuMemoryNode, HostStatus};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{GI, ModelServer, Scenario, TIMEOUT, deployment, enforce, policy, scenario};
use jiff::Timestamp;
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::json;

/// Times that a host may come to fare otherwise while the fleet is watched.
const OTHERWISE: usize = 3;

#[test]
fn d17_d18_a_steady_fleet_makes_no_writes_in_three_minutes() -> Result<()> {
    scenario("d18-steady", async |s| {
        let mut spec = enforce(&s.namespace, "16Gi");
        spec["breakers"] = json!([{"scope": "Device", "warning": {"tripPercent": 75, "clearPercent": 70, "actions": [{"type": "Signal"}]}}]);
        s.apply(&policy("steady", spec)).await?;
        let mut watching = enforce(&s.namespace, "8Gi");
        watching["mode"] = json!("Observe");
        s.apply(&policy("watching", watching)).await?;
        s.programmed("steady").await?;
        s.apply(&ModelServer::new("server", "context; alloc 4Gi; serve").replicas(3).deployment()).await?;
        // In and out by a GiB all the time that is watched, and longer.
        let breathing =
            format!("context; alloc 2Gi; {}serve", "spike 1Gi for 200ms; hold 800ms; ".repeat(400));
        // One that is over in the shadow layer, and one that breathes within its band.
        s.apply(&deployment("over-in-shadow", "context; alloc 10Gi; serve")).await?;
        s.apply(&deployment("breathes", &breathing)).await?;
        for app in ["server", "over-in-shadow", "breathes"] {
            let pod = s.running(app).await?.name_any();
            s.metric("highwater_pod_memory_used_bytes", &[("pod", &pod)], |used| used > Some(GI)).await?;
        }
        // Settled: a status that only counts anew may wait for ten seconds.
        eventually("what follows from the start to have been written", 2 * TIMEOUT, async || {
            let since = Timestamp::now().checked_sub(Duration::from_secs(25))?;
            let writes = s.writes_since(since)?;
            ensure!(writes.is_empty(), "{} writes, the last {:?}", writes.len(), writes.last());
            Ok(())
        })
        .await?;
        // What else the machine does is not the fleet's: where the host of a node comes to fare otherwise
        // meanwhile, that is told, once, and the time begins anew.
        for _ in 0..OTHERWISE {
            let (start, before) = (Timestamp::now(), hosts(s).await?);
            let steady =
                never("a write by Highwater in a steady fleet", Duration::from_mins(3), async || {
                    s.writes_since(start)?.pop().context("none")
                })
                .await;
            if steady.is_ok() || hosts(s).await? == before {
                return steady;
            }
        }
        bail!("the hosts fared otherwise {OTHERWISE} times: the machine is too busy for this")
    })
}

/// How the hosts of all nodes fare, by what their agents tell.
async fn hosts(s: &Scenario) -> Result<Vec<Option<HostStatus>>> {
    let nodes: Api<GpuMemoryNode> = Api::all(s.client.clone());
    let nodes = nodes.list(&ListParams::default()).await?;
    Ok(nodes.items.into_iter().map(|node| node.status.and_then(|status| status.host)).collect())
}
