//! What kind of cluster is asked for, and the nodes that follow from it.

use std::{fmt, fs};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::{paths::Paths, paths::write};

/// The shape of a cluster. A running cluster of another shape is torn down and made anew.
#[derive(Args, Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Spec {
    /// Real nodes, each with its own kubelet: 1 or 2
    #[arg(long, default_value_t = 1)]
    pub nodes: u8,
    /// Simulated GPUs of each node
    #[arg(long, default_value_t = 2)]
    pub gpus: u8,
    /// Memory of each simulated GPU
    #[arg(long, default_value = "80Gi")]
    pub gpu_memory: String,
    /// How many pods may share one GPU (resources that the device plugin offers for each)
    #[arg(long, default_value_t = 8)]
    pub gpu_replicas: u32,
    /// Version of the simulated driver, where not the one that was measured: 615.10 limits the memory
    /// of cgroups
    #[arg(long)]
    pub gpu_driver: Option<String>,
    /// Whether the simulated driver limits the memory of cgroups, where not as a driver of its version
    /// does
    #[arg(long, value_parser = ["auto", "force", "off"])]
    pub gpu_memory_limits: Option<String>,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            nodes: 1,
            gpus: 2,
            gpu_memory: "80Gi".into(),
            gpu_replicas: 8,
            gpu_driver: None,
            gpu_memory_limits: None,
        }
    }
}

impl Spec {
    /// Refuses what cannot be brought up, saying what to change.
    pub fn validate(&self) -> Result<()> {
        ensure!(
            (1..=2).contains(&self.nodes),
            "--nodes {}: give 1 or 2; `cluster fleet` adds more",
            self.nodes
        );
        ensure!((1..=16).contains(&self.gpus), "--gpus {}: give 1 to 16", self.gpus);
        ensure!((1..=64).contains(&self.gpu_replicas), "--gpu-replicas {}: give 1 to 64", self.gpu_replicas);
        Ok(())
    }

    /// The nodes, n1 first.
    pub fn nodes(&self) -> impl Iterator<Item = Node> + use<> {
        (1..=self.nodes).map(Node)
    }

    /// The spec of the running (or half-running) cluster; none where there is none.
    pub fn load(paths: &Paths) -> Option<Self> {
        serde_json::from_slice(&fs::read(paths.state.join("spec.json")).ok()?).ok()
    }

    /// Notes the spec beside the cluster's state.
    pub fn save(&self, paths: &Paths) -> Result<()> {
        write(&paths.state.join("spec.json"), serde_json::to_vec(self).context("writing the spec")?)
    }
}

/// A real node, by its number from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node(u8);

impl Node {
    /// The nodes that any cluster can have, n1 first.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self(1), Self(2)].into_iter()
    }

    /// `n1` -> the node, if the cluster can have one of that name.
    pub fn parse(name: &str) -> Result<Self> {
        Self::all()
            .find(|node| node.name() == name)
            .with_context(|| format!("no node {name}: the real nodes are n1 and n2"))
    }

    /// Name of the node's object.
    pub fn name(self) -> String {
        format!("n{}", self.0)
    }

    /// Address of the node on the cluster's bridge.
    pub fn address(self) -> String {
        format!("10.222.0.{}", self.0)
    }

    /// Addresses of the node's pods.
    pub fn pod_range(self) -> String {
        format!("10.222.{}.0/24", self.0)
    }

    /// Whether it is the node that shares the control plane's network.
    pub fn is_first(self) -> bool {
        self.0 == 1
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n{}", self.0)
    }
}

/// The simulated driver's configuration for a node. Devices of different nodes have different UUIDs.
pub(crate) fn host_configuration(node: &str, spec: &Spec) -> serde_json::Value {
    let mut configuration = serde_json::json!({
        "seed": node,
        "devices": [{"count": spec.gpus, "memory": spec.gpu_memory}],
    });
    let chosen = [("driverVersion", &spec.gpu_driver), ("memoryLimits", &spec.gpu_memory_limits)];
    if let Some(fields) = configuration.as_object_mut() {
        fields.extend(chosen.into_iter().filter_map(|(field, value)| {
            value.as_ref().map(|value| (field.to_owned(), value.as_str().into()))
        }));
    }
    configuration
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_real_nodes_are_refused_with_the_way_to_more() {
        let refusal = Spec { nodes: 3, ..Spec::default() }.validate().unwrap_err().to_string();
        assert!(refusal.contains("cluster fleet"), "{refusal}");
    }

    #[test]
    fn the_driver_is_only_described_as_far_as_it_was_asked_for() {
        let plain = host_configuration("n1", &Spec::default());
        assert_eq!(plain, serde_json::json!({"seed": "n1", "devices": [{"count": 2, "memory": "80Gi"}]}));
        let spec = Spec {
            gpu_driver: Some("615.10".into()),
            gpu_memory_limits: Some("force".into()),
            ..Spec::default()
        };
        let newer = host_configuration("n1", &spec);
        assert_eq!((&newer["driverVersion"], &newer["memoryLimits"]), (&"615.10".into(), &"force".into()));
    }

    #[test]
    fn nodes_have_disjoint_addresses() {
        let nodes: Vec<_> = Spec { nodes: 2, ..Spec::default() }.nodes().collect();
        assert_eq!(
            nodes.iter().map(|n| n.pod_range()).collect::<Vec<_>>(),
            ["10.222.1.0/24", "10.222.2.0/24"]
        );
    }
}
