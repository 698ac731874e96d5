//! Cordons, taints and annotations of nodes: what drains do, and what people do.

use anyhow::{Context as _, Result, ensure};
use highwater_crds::names;
use highwater_e2e::{eventually, node::component_name};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::{OTHER_NODE, Scenario, TIMEOUT};

/// Fails where the cluster has one node.
pub fn two_nodes(s: &Scenario) -> Result<()> {
    ensure!(s.cluster.spec.nodes == 2, "this scenario needs two nodes: make up UP='--nodes 2'");
    Ok(())
}

impl Scenario {
    fn all_nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// The object of a node.
    pub async fn node_object(&self, node: &str) -> Result<Node> {
        Ok(self.all_nodes().get(node).await?)
    }

    /// Whether no new pods are let on a node, and for which incident of ours.
    pub async fn cordon_of(&self, node: &str) -> Result<(bool, Option<String>)> {
        let node = self.node_object(node).await?;
        let cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true);
        Ok((cordoned, node.annotations().get(names::CORDONED_FOR).cloned()))
    }

    /// Waits until a node is cordoned by Highwater, or by nobody.
    pub async fn cordoned(&self, node: &str, cordoned: bool) -> Result<()> {
        eventually(&format!("node {node} to be cordoned: {cordoned}"), 2 * TIMEOUT, async || {
            let now = self.cordon_of(node).await?;
            ensure!(now.0 == cordoned && now.1.is_some() == cordoned, "it is {now:?}");
            Ok(())
        })
        .await
    }

    /// Cordons or uncordons a node as a person does.
    pub async fn cordon_by_hand(&self, node: &str, cordoned: bool) -> Result<()> {
        self.patch_node(
            node,
            json!({"spec": {"unschedulable": if cordoned { json!(true) } else { Value::Null }}}),
        )
        .await
    }

    async fn patch_node(&self, node: &str, patch: Value) -> Result<()> {
        self.all_nodes().patch(node, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Waits until a reset of devices is asked for on a node, or not; what the annotation says.
    pub async fn reset_requested(&self, node: &str, requested: bool) -> Result<String> {
        eventually(&format!("a request to reset devices of {node}: {requested}"), 2 * TIMEOUT, async || {
            let asked = self.node_object(node).await?.annotations().get(names::RESET_REQUESTED).cloned();
            ensure!(asked.is_some() == requested, "it is {asked:?}");
            Ok(asked.unwrap_or_default())
        })
        .await
    }

    /// Waits until the node has our taint, or not.
    pub async fn tainted(&self, node: &str, tainted: bool) -> Result<()> {
        eventually(&format!("our taint on {node}: {tainted}"), TIMEOUT, async || {
            let taints = self.node_object(node).await?.spec.and_then(|spec| spec.taints).unwrap_or_default();
            let there = taints.iter().any(|taint| taint.key == names::PRESSURE_TAINT);
            ensure!(
                there == tainted,
                "the taints are {:?}",
                taints.iter().map(|t| &t.key).collect::<Vec<_>>()
            );
            Ok(())
        })
        .await
    }

    /// Switches a node off. Nothing of it runs until [`Scenario::power_on`].
    pub async fn power_off(&self, node: &str) -> Result<()> {
        ensure!(node == OTHER_NODE, "the first node shares its network with the control plane");
        self.cluster.kill(&component_name(node)).await
    }

    /// Switches it on again and waits until it is Ready.
    pub async fn power_on(&self, node: &str) -> Result<()> {
        self.cluster.reboot(node).await.with_context(|| format!("switching {node} on"))?;
        self.cluster.nodes_ready(2 * TIMEOUT).await?;
        eventually(&format!("the agent of {node}"), 2 * TIMEOUT, async || self.metrics(node).await).await?;
        Ok(())
    }

    /// Takes back what drains, or people in scenarios, left on a node.
    pub(crate) async fn as_it_was(&self, node: &str) -> Result<()> {
        let object = self.node_object(node).await?;
        let annotated = [names::CORDONED_FOR, names::RESET_REQUESTED, names::PAUSED]
            .iter()
            .any(|name| object.annotations().contains_key(*name));
        if annotated || object.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true) {
            let annotations =
                json!({names::CORDONED_FOR: null, names::RESET_REQUESTED: null, names::PAUSED: null});
            let patch =
                json!({"metadata": {"annotations": annotations}, "spec": {"unschedulable": Value::Null}});
            self.patch_node(node, patch).await?;
        }
        Ok(())
    }
}
