//! What goes on on the node: its agent and keeper, and what its driver says.

use std::{collections::BTreeMap, pin::pin, time::Duration};

use anyhow::{Context, Result, ensure};
use highwater_crds::Strength;
use highwater_e2e::eventually;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::Value;

use crate::{NODE, SYSTEM, Scenario, TIMEOUT};

/// How long a component may take until every node has the new one.
const ROLLOUT: &str = "--timeout=120s";

/// Signals every process of a pod's script.
const SIGNAL: &str = r#"
for p in $(pgrep -x workload); do grep -q "$0" /proc/$p/cgroup && kill "-$1" $p && found=yes; done
test -n "$found"
"#;

/// Memory that descriptors alone keep, in bytes by device: the ballast, as the driver sees it.
pub type Kept = BTreeMap<String, i64>;

/// How often the containers of a pod were started anew.
pub fn restarts(pod: &Pod) -> i32 {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    containers.map(|container| container.restart_count).sum()
}

impl Scenario {
    /// Kills a program of Highwater on the node. Its container is started again.
    pub async fn kill(&self, program: &str) -> Result<()> {
        self.cluster.on_node(NODE, "pkill", &["-KILL", "-x", program]).await.map(drop)
    }

    /// Halts a program of Highwater on the node in mid-flight, or lets it go on.
    pub async fn halt(&self, program: &str, halted: bool) -> Result<()> {
        let signal = if halted { "-STOP" } else { "-CONT" };
        self.cluster.on_node(NODE, "pkill", &[signal, "-x", program]).await.map(drop)
    }

    /// Waits until another container of a component runs on the node than in `before`; in the case of
    /// the agent, until it measures.
    pub async fn back(&self, component: &str, before: &Pod) -> Result<Pod> {
        eventually(&format!("another {component}"), TIMEOUT, async || {
            let pod = self.component(component, NODE).await?;
            let another = pod.uid() != before.uid() || restarts(&pod) > restarts(before);
            ensure!(another, "it is still the same");
            let mut statuses =
                pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
            let ready = statuses.all(|container| container.ready);
            ensure!(ready || component == "agent", "it is not ready");
            if component == "agent" {
                self.metrics(NODE).await?;
            }
            Ok(pod)
        })
        .await
    }

    /// Replaces the pods of a component on every node, as an upgrade does.
    pub async fn roll_out(&self, component: &str) -> Result<()> {
        let name = format!("daemonset/highwater-{component}");
        self.cluster.kubectl(["rollout", "restart", "-n", SYSTEM, &name]).await?;
        self.cluster.kubectl(["rollout", "status", "-n", SYSTEM, &name, ROLLOUT]).await.map(drop)
    }

    /// Sends a signal to every process of a pod's scripts, from the node.
    pub async fn signal(&self, pod: &Pod, signal: &str) -> Result<()> {
        let uid = pod.uid().context("no UID")?;
        let sent = self.cluster.on_node(NODE, "sh", &["-c", SIGNAL, &uid, signal]).await;
        sent.with_context(|| format!("sending SIG{signal} to {}", pod.name_any())).map(drop)
    }

    /// Waits until a metric of a pod satisfies a condition; returns its value.
    pub async fn pod_metric(
        &self,
        pod: &Pod,
        name: &str,
        holds: impl Fn(Option<i64>) -> bool,
    ) -> Result<Option<i64>> {
        let pod = pod.name_any();
        self.metric(name, &[("namespace", &self.namespace), ("pod", &pod)], holds).await
    }

    /// Waits until the guards of a pod have refused so many allocations, for whatever reasons.
    pub async fn refused(&self, pod: &Pod, holds: impl Fn(i64) -> bool) -> Result<()> {
        const REFUSALS: &str = "highwater_guard_refusals_total";
        let name = pod.name_any();
        let of_pod = [("namespace", self.namespace.as_str()), ("pod", name.as_str())];
        eventually(&format!("the refusals of {name} as expected"), TIMEOUT, async || {
            let metrics = self.metrics(NODE).await?;
            ensure!(!metrics.values(REFUSALS, &of_pod).is_empty(), "nobody counts them");
            let refused = metrics.sum(REFUSALS, &of_pod);
            ensure!(holds(refused), "there were {refused}");
            Ok(())
        })
        .await
    }

    /// Waits until a pod's quota holds with this strength on each of its devices.
    pub async fn strength(&self, pod: &Pod, expected: Strength) -> Result<()> {
        self.strength_within(pod, expected, TIMEOUT).await
    }

    /// The same with another time-out.
    pub async fn strength_within(&self, pod: &Pod, expected: Strength, limit: Duration) -> Result<()> {
        let name = pod.name_any();
        eventually(&format!("{name} to have strength {expected:?}"), limit, async || {
            let of_pod = [("namespace", self.namespace.as_str()), ("pod", name.as_str())];
            let has = self.metrics(NODE).await?.labels("highwater_pod_strength_info", &of_pod, "strength");
            let expected = format!("{expected:?}");
            ensure!(!has.is_empty() && has.iter().all(|strength| *strength == expected), "it has {has:?}");
            Ok(())
        })
        .await
    }

    /// Waits until a pod is reported to have less strength than its rule asks for, for this reason.
    pub async fn below_strength(&self, pod: &Pod, reason: &str) -> Result<()> {
        let name = pod.name_any();
        eventually(&format!("{name} to be below its strength for {reason}"), TIMEOUT, async || {
            let of_pod = [("namespace", self.namespace.as_str()), ("pod", name.as_str())];
            let samples = self.metrics(NODE).await?;
            let reasons = samples.labels("highwater_pod_strength_below_minimum", &of_pod, "reason");
            ensure!(reasons.iter().any(|seen| seen == reason), "the reasons are {reasons:?}");
            Ok(())
        })
        .await
    }

    /// What the node's simulated driver says of devices, holders and limits.
    pub async fn driver(&self) -> Result<Value> {
        let shown = self.cluster.gpusim(NODE, &["show"]).await?;
        serde_json::from_str(&shown).context("what the driver shows")
    }

    /// Fails where the node's driver has a process that is locked, or whose memory is on the host.
    pub async fn nobody_is_stopped(&self) -> Result<()> {
        let driver = self.driver().await?;
        let stopped = driver["stopped"].as_array().map_or(0, Vec::len);
        ensure!(stopped == 0, "{stopped} processes are stopped: {}", driver["stopped"]);
        Ok(())
    }

    /// The memory that descriptors alone keep.
    pub async fn kept(&self) -> Result<Kept> {
        let driver = self.driver().await?;
        let mut kept: Kept = (0..self.cluster.spec.gpus).map(|device| (device.to_string(), 0)).collect();
        for entry in driver["kept"].as_array().into_iter().flatten() {
            let device = entry["region"]["device"].as_i64().context("a device")?;
            *kept.entry(device.to_string()).or_default() += entry["bytes"].as_i64().context("a size")?;
        }
        Ok(kept)
    }

    /// Waits until what is kept has not changed for a second; returns it.
    pub async fn kept_at_rest(&self) -> Result<Kept> {
        eventually("the ballast at rest", TIMEOUT, async || {
            let before = self.kept().await?;
            tokio::time::sleep(Duration::from_secs(1)).await;
            let after = self.kept().await?;
            ensure!(before == after, "it went from {before:?} to {after:?}");
            Ok(after)
        })
        .await
    }

    /// Looks again and again at what is kept while something goes on. Returns what came of that, and
    /// all that was seen.
    pub async fn kept_while<T>(&self, work: impl Future<Output = Result<T>>) -> Result<(T, Vec<Kept>)> {
        let mut work = pin!(work);
        let mut seen = vec![self.kept().await?];
        let done = loop {
            tokio::select! {
                done = &mut work => break done?,
                kept = self.kept() => seen.push(kept?),
            }
        };
        seen.push(self.kept().await?);
        Ok((done, seen))
    }
}
