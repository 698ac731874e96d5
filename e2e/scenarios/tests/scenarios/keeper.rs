//! The keeper: what becomes of the memory that is held when it, or the agent, goes.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{GpuMemoryNode, Strength, names};
use highwater_e2e::eventually;
use highwater_scenarios::{GI, Kept, MI, NODE, Scenario, TIMEOUT, enforce, scenario};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

const BALLAST: &str = "highwater_pool_ballast_bytes";
const GRANTED: &str = "highwater_pool_granted_bytes";
const SIZE: &str = "highwater_pool_size_bytes";

fn pooled(namespace: &str) -> Value {
    let mut spec = enforce(namespace, "16Gi");
    spec["quota"]["default"]["guarantee"] = json!("8Gi");
    spec["pool"] = json!({"sizePercent": 60, "startHoldSeconds": 0});
    spec
}

/// A pod without and a pod with the guard, under a pool that is whole.
async fn begin(s: &Scenario, script: &str) -> Result<[Pod; 2]> {
    s.program("keeper", pooled(&s.namespace)).await?;
    let plain = s.start("plain", "hold 2s; context; alloc 2Gi; serve").await?;
    s.says(&plain, " serve used=").await?;
    the_pool_is_whole(s).await?;
    let guarded = s.start_guarded("guarded", script).await?;
    s.got(&guarded, "alloc", 2 * GI).await?;
    s.strength(&guarded, Strength::Guard).await?;
    Ok([plain, guarded])
}

/// Waits until what is held and what is granted make up each device's pool.
async fn the_pool_is_whole(s: &Scenario) -> Result<()> {
    eventually("whole pools", TIMEOUT, async || {
        let samples = s.metrics(NODE).await?;
        for device in ["0", "1"] {
            let of_device = [("device", device)];
            let ballast = samples.bytes(BALLAST, &of_device)?.context("the keeper does not say")?;
            let all = ballast + samples.sum(GRANTED, &of_device);
            let size = samples.bytes(SIZE, &of_device)?.context("no pool")?;
            ensure!(all + 256 * MI >= size && size > 0, "device {device}: {all} of a pool of {size}");
        }
        Ok(())
    })
    .await
}

#[test]
fn not_a_byte_of_the_ballast_moves_when_the_agent_dies_and_none_is_lost_to_a_new_keeper() -> Result<()> {
    scenario("successor", async |s| {
        let pods = begin(s, "context; alloc 2Gi; serve").await?;
        the_pool_is_whole(s).await?;
        let before = s.kept_at_rest().await?;
        let granted = async || -> Result<Vec<f64>> {
            let mut granted = s.metrics(NODE).await?.values(GRANTED, &[("namespace", &s.namespace)]);
            granted.sort_by(f64::total_cmp);
            Ok(granted)
        };
        let promised = granted().await?;

        let agent = s.agent(NODE).await?;
        let agent_dies = async {
            s.kill("agent").await?;
            s.back("agent", &agent).await?;
            eventually("the grants that there were", TIMEOUT, async || {
                // But for what the new agent corrects of a context's estimate.
                let now = granted().await?;
                let near = |(a, b): (&f64, &f64)| (a - b).abs() <= f64::from(1 << 24);
                let same = now.len() == promised.len() && now.iter().zip(&promised).all(near);
                ensure!(same, "{now:?}, not {promised:?}");
                Ok(())
            })
            .await
        };
        let ((), seen) = s.kept_while(agent_dies).await?;
        // Nothing is let go of; while chunks are put in order, a new one is there before the old ones go.
        let stands = |kept: &&Kept| {
            before.iter().all(|(device, bytes)| {
                kept.get(device).is_some_and(|now| (*bytes..=bytes + GI + 64 * MI).contains(now))
            })
        };
        let moved: Vec<_> = seen.iter().filter(|kept| !stands(kept)).collect();
        ensure!(moved.is_empty(), "{before:?} was held, and while the agent was away {moved:?}");
        let now = s.kept_at_rest().await?;
        let near = |(device, bytes): (&String, &i64)| {
            now.get(device).is_some_and(|now| (now - bytes).abs() <= 16 * MI)
        };
        ensure!(before.iter().all(near), "{before:?} was held, and {now:?} once the agent was back");

        let old = s.component("keeper", NODE).await?;
        let ((), seen) = s.kept_while(s.roll_out("keeper")).await?;
        let new = s.component("keeper", NODE).await?;
        ensure!(new.uid() != old.uid(), "it is still the old keeper");
        let fell = seen
            .iter()
            .find(|kept| before.iter().any(|(device, bytes)| kept.get(device).is_none_or(|now| now < bytes)));
        ensure!(
            fell.is_none(),
            "{before:?} was held, and during the hand-over {fell:?} (of {} looks)",
            seen.len()
        );
        s.metric("highwater_keeper_up", &[], |up| up == Some(1)).await?;
        the_pool_is_whole(s).await?;
        // It can give out what it was handed.
        s.follow(&pods[1], &[], "context; alloc 8Gi; free").await?.well()?;
        everybody_went_on(s, &pods).await
    })
}

async fn everybody_went_on(s: &Scenario, pods: &[Pod]) -> Result<()> {
    for pod in pods {
        s.untouched(pod).await?;
        s.refused_nothing(pod).await?;
        s.served_without_failure(pod).await?;
    }
    Ok(())
}

#[test]
fn a_keeper_that_dies_frees_everything_and_takes_back_what_is_free_without_refusing_anybody() -> Result<()> {
    scenario("keeper-killed", async |s| {
        // Grows through all of it, beyond its guarantee too.
        let script = "context; alloc 2Gi; leak 64Mi every 100ms x120; serve";
        let [plain, guarded] = begin(s, script).await?;
        let keeper = s.component("keeper", NODE).await?;
        let dies = async {
            s.kill("keeper").await?;
            s.back("keeper", &keeper).await?;
            s.metric("highwater_keeper_up", &[], |up| up == Some(1)).await?;
            the_pool_is_whole(s).await
        };
        let ((), seen) = s.kept_while(dies).await?;
        let least = seen.iter().map(|kept| kept.values().sum::<i64>()).min();
        ensure!(least == Some(0), "when it was dead, still {least:?} were held: {seen:?}");
        // The pod without a guard has what it was granted.
        s.pod_metric(&plain, GRANTED, |granted| granted == Some(16 * GI)).await?;
        s.says(&guarded, " serve used=").await?;
        s.strength(&guarded, Strength::Guard).await?;
        s.refused(&guarded, |count| count == 0).await?;
        everybody_went_on(s, &[plain, guarded]).await
    })
}

#[test]
fn a_node_that_stands_down_lets_go_of_everything_in_five_seconds_and_takes_it_back_afterwards() -> Result<()>
{
    scenario("stand-down", async |s| {
        let pods = begin(s, "context; alloc 2Gi; serve").await?;
        the_pool_is_whole(s).await?;
        let before = s.kept_at_rest().await?;
        stand_down(s, true).await?;
        let lets_go = async {
            eventually("every handle to be closed", Duration::from_secs(5), async || {
                let kept = s.kept().await?;
                ensure!(kept.values().all(|bytes| *bytes == 0), "{kept:?} is held");
                monitored_is(s, "False", "StandDown").await
            })
            .await?;
            // Pods are none the worse for it.
            s.follow(&pods[1], &[], "context; alloc 8Gi; expect-oom alloc 8Gi").await?.well().map(drop)
        }
        .await;
        stand_down(s, false).await?;
        lets_go?;
        eventually("the node to be measured", TIMEOUT, async || monitored_is(s, "True", "AllDevices").await)
            .await?;
        the_pool_is_whole(s).await?;
        let after = s.kept_at_rest().await?;
        for (device, bytes) in &before {
            let now = after.get(device).copied().unwrap_or(0);
            ensure!((now - bytes).abs() <= 2 * GI, "device {device}: {bytes} were held, and now {now}");
        }
        s.strength(&pods[1], Strength::Guard).await?;
        everybody_went_on(s, &pods).await
    })
}

async fn stand_down(s: &Scenario, on: bool) -> Result<()> {
    let value = if on { json!("true") } else { Value::Null };
    let patch = json!({"metadata": {"labels": {names::STAND_DOWN: value}}});
    let nodes: Api<Node> = Api::all(s.client.clone());
    nodes.patch(NODE, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

async fn monitored_is(s: &Scenario, status: &str, reason: &str) -> Result<()> {
    let nodes: Api<GpuMemoryNode> = Api::all(s.client.clone());
    let conditions = nodes.get(NODE).await?.status.map(|status| status.conditions).unwrap_or_default();
    let condition = conditions.iter().find(|c| c.type_ == "Monitored").context("no condition Monitored")?;
    ensure!(
        condition.status == status && condition.reason == reason,
        "Monitored is {}/{}: {}",
        condition.status,
        condition.reason,
        condition.message
    );
    Ok(())
}
