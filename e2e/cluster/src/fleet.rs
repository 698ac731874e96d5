//! Nodes without a machine: kwok stands in for their kubelets, and an agent can run for each as a
//! plain process with simulated GPUs of its own.

use std::fs;

use anyhow::{Context, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;

use crate::{
    Cluster,
    control::{Component, Request},
    install::NAMESPACE,
    namespace::Place,
    paths::write,
    spec::host_configuration,
};

/// Label of the fleet's nodes.
const LABEL: &str = "highwater.dev/fleet";

/// Requests to the API server at a time.
const AT_A_TIME: usize = 32;

/// An agent that runs as a process beside the cluster's nodes.
#[derive(Clone, Debug)]
pub struct FleetAgent {
    /// Its node.
    pub node: String,
    /// Its component, to stop, kill or pause.
    pub component: String,
    /// `host:port` of its metrics, in the cluster's network.
    pub address: String,
    /// The socket of its simulated driver.
    pub gpusim_socket: std::path::PathBuf,
}

impl Cluster {
    /// Makes the fleet have `count` nodes (`f1`, `f2`, ...) that kwok keeps Ready; their names.
    ///
    /// They carry the taint `kwok.x-k8s.io/node=fake:NoSchedule`, so that only pods that are meant
    /// for them get there, and no label that would draw the product's DaemonSet.
    pub async fn fleet(&self, count: usize) -> Result<Vec<String>> {
        let names: Vec<String> = (1..=count).map(|number| format!("f{number}")).collect();
        let nodes: Api<Node> = Api::all(self.client().await?);
        let running = self.control(Request::Status).await?;
        if count > 0 && !running.iter().any(|component| component.name == "kwok") {
            self.control(Request::Add(self.kwok()?)).await?;
        }
        let present = nodes.list_metadata(&ListParams::default().labels(LABEL)).await?;
        let surplus = present.items.into_iter().filter_map(|node| node.metadata.name);
        let surplus = surplus.filter(|name| !names.contains(name));
        stream::iter(surplus.map(anyhow::Ok))
            .try_for_each_concurrent(AT_A_TIME, async |name| {
                self.remove_agent(&name).await?;
                nodes.delete(&name, &DeleteParams::background()).await?;
                Ok(())
            })
            .await?;
        stream::iter(&names)
            .map(|name| create(&nodes, name))
            .buffer_unordered(AT_A_TIME)
            .try_collect::<()>()
            .await?;
        if count == 0 && running.iter().any(|component| component.name == "kwok") {
            self.control(Request::Remove("kwok".into())).await?;
        }
        Ok(names)
    }

    fn kwok(&self) -> Result<Component> {
        let stages = self.paths.state.join("kwok.yaml");
        write(&stages, include_str!("kwok.yaml"))?;
        Ok(Component::new(
            "kwok",
            Place::Network(self.paths.id.network()),
            self.paths.program("kwok"),
            [
                format!("--kubeconfig={}", self.paths.kubeconfig("admin").display()),
                format!("--config={}", stages.display()),
                format!("--manage-nodes-with-label-selector={LABEL}"),
                "--node-lease-duration-seconds=40".into(),
            ],
        ))
    }

    /// Runs an agent for one of the fleet's nodes, with as many simulated GPUs as a real node has.
    ///
    /// It acts as the administrator: what confines the agents of real nodes does not bind it.
    pub async fn start_agent(&self, node: &str) -> Result<FleetAgent> {
        let number: u16 = node
            .strip_prefix('f')
            .and_then(|number| number.parse().ok())
            .with_context(|| format!("{node} is no node of the fleet: those are f1, f2, ..."))?;
        let folder = self.paths.data.join("fleet").join(node);
        fs::create_dir_all(folder.join("kubelet/pods"))?;
        fs::create_dir_all(folder.join("state"))?;
        let gpusim_socket = folder.join("gpu.sock");
        let configuration = folder.join("gpusim.json");
        write(&configuration, host_configuration(node, &self.spec).to_string())?;
        let place = || Place::Network(self.paths.id.network());
        let mut gpusim = Component::new(
            format!("gpusim-{node}"),
            place(),
            self.paths.program("gpusim"),
            ["daemon", "--config", &configuration.display().to_string()],
        );
        let socket = gpusim_socket.display().to_string();
        gpusim.environment.insert("GPUSIM_SOCKET".into(), socket.clone());
        self.control(Request::Add(gpusim)).await?;

        let address = format!("127.0.0.1:{}", 20_000_u16.saturating_add(number));
        let component = format!("agent-{node}");
        let mut agent = Component::new(
            &component,
            place(),
            self.paths.program("agent"),
            [
                format!("--node-name={node}"),
                format!("--namespace={NAMESPACE}"),
                format!("--listen={address}"),
                format!("--driver-library={}", self.paths.program("libnvidia-ml.so.1").display()),
                format!("--kubelet-root={}", folder.join("kubelet").display()),
                format!("--pod-resources-socket={}", folder.join("kubelet/pod-resources.sock").display()),
                format!("--state-dir={}", folder.join("state").display()),
            ],
        );
        let kubeconfig = self.paths.kubeconfig("admin").display().to_string();
        agent.environment = [("GPUSIM_SOCKET".into(), socket), ("KUBECONFIG".into(), kubeconfig)].into();
        self.control(Request::Add(agent)).await?;
        Ok(FleetAgent { node: node.to_owned(), component, address, gpusim_socket })
    }

    /// Ends the agent of a fleet node and its simulated driver, where there are any.
    pub async fn remove_agent(&self, node: &str) -> Result<()> {
        let running = self.control(Request::Status).await?;
        for component in [format!("agent-{node}"), format!("gpusim-{node}")] {
            if running.iter().any(|one| one.name == component) {
                self.control(Request::Remove(component)).await?;
            }
        }
        Ok(())
    }
}

async fn create(nodes: &Api<Node>, name: &str) -> Result<()> {
    let parameters = PatchParams::apply("highwater-e2e").force();
    let meta = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {LABEL: "true"}},
        "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]}});
    nodes.patch(name, &parameters, &Patch::Apply(meta)).await?;
    let room = json!({"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "64"});
    let status = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "status": {"capacity": room, "allocatable": room}});
    nodes.patch_status(name, &parameters, &Patch::Apply(status)).await?;
    Ok(())
}
