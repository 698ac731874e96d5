//! The operator's replicas: who leads, what its ledger holds, and its sudden end.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_crds::{GpuMemoryIncident, names};
use highwater_e2e::eventually;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Pod},
};
use kube::{Api, ResourceExt as _, api::DeleteParams};
use serde_json::{Map, Value};

use crate::{SYSTEM, Scenario, TIMEOUT};

impl Scenario {
    /// The tokens in the operator's ledger that were reserved for a pod.
    pub async fn tokens_of(&self, pod: &Pod) -> Result<usize> {
        let uid = pod.uid().unwrap_or_default();
        Ok(self.tokens().await?.values().filter(|token| token["pod"] == uid.as_str()).count())
    }

    /// The tokens that were reserved for an incident, whatever for.
    pub async fn tokens_for(&self, incident: &GpuMemoryIncident) -> Result<usize> {
        let of_incident = format!("{}/", incident.uid().context("no UID")?);
        Ok(self.tokens().await?.keys().filter(|key| key.starts_with(&of_incident)).count())
    }

    async fn tokens(&self) -> Result<Map<String, Value>> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), SYSTEM);
        let Some(map) = maps.get_opt(names::BUDGET_CONFIG_MAP).await? else { return Ok(Map::new()) };
        let ledger = map.data.unwrap_or_default().into_values().next().context("an empty ledger")?;
        let mut ledger: Value = serde_json::from_str(&ledger)?;
        let tokens = ledger["tokens"].take();
        serde_json::from_value(tokens).context("no tokens in the ledger")
    }

    /// The pod of the replica that leads.
    pub async fn leader(&self) -> Result<String> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), SYSTEM);
        eventually("a leader", TIMEOUT, async || {
            let lease = leases.get(names::LEADER_LEASE).await?;
            let holder = lease.spec.and_then(|spec| spec.holder_identity).filter(|holder| !holder.is_empty());
            let holder = holder.context("nobody holds the lease")?;
            let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
            pods.get(&holder).await.map(|pod| pod.name_any()).context("the holder is gone")
        })
        .await
    }

    /// SIGKILL to the operator process of one pod, which is not started again under that name: the
    /// other replica has to go on.
    pub async fn kill_operator(&self, pod: &str) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
        let object = pods.get(pod).await?;
        let uid = object.uid().context("no UID")?;
        let node = object.spec.and_then(|spec| spec.node_name).context("it is on no node")?;
        // Found by its container's cgroup; fails where nothing was killed.
        let script = format!(
            "for p in $(pgrep -x operator); do grep -q {uid} /proc/$p/cgroup && kill -KILL $p && exit 0; done; exit 1"
        );
        self.cluster.on_node(&node, "sh", &["-c", &script]).await.context("killing the leader")?;
        pods.delete(pod, &DeleteParams::default().grace_period(0)).await?;
        Ok(())
    }

    /// The same for whoever leads; returns when another does.
    pub async fn kill_leader(&self) -> Result<()> {
        let leader = self.leader().await?;
        self.kill_operator(&leader).await?;
        eventually("another leader", TIMEOUT, async || {
            let next = self.leads().await?;
            ensure!(next != leader, "{next} still leads");
            Ok(())
        })
        .await
        .with_context(|| format!("after {leader} was killed"))?;
        // So that the next may die as well.
        self.two_operators().await.map(drop)
    }

    /// The pod of the replica that the lease names and that knows that it leads.
    async fn leads(&self) -> Result<String> {
        let next = self.leader().await?;
        let all = self.operator_metrics().await?;
        let leads = all.iter().any(|(name, samples)| {
            *name == next && samples.values("highwater_operator_leader", &[]) == [1.0]
        });
        ensure!(leads, "{next} does not lead yet");
        Ok(next)
    }

    /// Waits until two replicas are ready and one of them leads; the pod of that one.
    pub async fn two_operators(&self) -> Result<String> {
        eventually("two replicas", Duration::from_secs(90), async || {
            let operators = self.operators().await?;
            let ready = |pod: &&Pod| {
                let statuses =
                    pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
                pod.metadata.deletion_timestamp.is_none()
                    && statuses.into_iter().any(|container| container.ready)
            };
            let ready = operators.iter().filter(ready).count();
            ensure!(ready >= 2, "{ready} are ready");
            self.leads().await
        })
        .await
    }
}
