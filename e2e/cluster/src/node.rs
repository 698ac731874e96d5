//! A real node: namespaces of its own in which the usual paths are the node's own folders, and
//! the programs in it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::{
    mount::{MountFlags, MountPropagationFlags, mount, mount_bind_recursive, mount_change},
    process::{WaitOptions, wait},
};

use crate::{
    control::{self, Component, Request},
    namespace::{self, Place},
    paths::{Paths, write},
    spec::{Node, Spec, host_configuration},
};

/// What a node sees as its own under the usual name. The kubelet's folder for device plugins and
/// the CNI state have fixed paths; the others are here so that charts and tools work unchanged.
pub const OWN_PATHS: &[&str] = &[
    "/etc/cni/net.d",
    "/opt/gpusim",
    "/run/containerd",
    "/run/gpusim",
    "/run/highwater",
    "/run/highwater-keeper",
    "/run/netns",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
];

/// Where the kubelet finds its static pods.
pub const STATIC_PODS: &str = "/var/lib/kubelet/manifests";

/// Where the simulated driver libraries lie on a node.
pub const DRIVER_LIBRARIES: &str = "/opt/gpusim/lib";

/// The component that holds a node's namespaces.
pub fn component_name(node: &str) -> String {
    format!("node-{node}")
}

/// Present once a node's namespaces are complete.
pub fn ready_file(paths: &Paths, node: &str) -> PathBuf {
    paths.state.join("nodes").join(node)
}

/// Writes a node's folders and configuration files.
pub fn prepare(paths: &Paths, node: Node, spec: &Spec) -> Result<()> {
    let name = node.name();
    for path in OWN_PATHS {
        fs::create_dir_all(paths.on_node(&name, path))?;
    }
    fs::create_dir_all(paths.on_node(&name, STATIC_PODS))?;
    fs::create_dir_all(ready_file(paths, &name).parent().context("has a folder")?)?;
    write(&paths.on_node(&name, "/etc/cni/net.d/10-bridge.conflist"), cni(node))?;
    write(&configuration(paths, node, "containerd.toml"), CONTAINERD)?;
    write(&configuration(paths, node, "gpusim.json"), host_configuration(&name, spec).to_string())?;
    write(&configuration(paths, node, "kubelet.yaml"), kubelet(paths, node))?;
    write(&configuration(paths, node, "kube-proxy.yaml"), kube_proxy(paths, node))
}

/// The node's own programs in the order of their start: first what needs no API server.
pub fn base_components(paths: &Paths, node: Node) -> Vec<Component> {
    let name = node.name();
    let inside = || Place::Node { name: name.clone() };
    let mut containerd = Component::new(
        format!("containerd-{node}"),
        inside(),
        "/usr/bin/containerd".into(),
        ["--config", &path(&configuration(paths, node, "containerd.toml"))],
    );
    containerd.environment.insert("TMPDIR".into(), "/tmp".into());
    let mut all = vec![
        Component::new(
            component_name(&name),
            Place::NewNode { name: name.clone(), network: paths.id.network_of(node) },
            paths.program("cluster"),
            ["node-init", &name],
        ),
        containerd,
    ];
    all.extend(gpusim(paths, node));
    all
}

/// The node's programs that talk to the API server, and the device plugin.
pub fn cluster_components(paths: &Paths, node: Node, spec: &Spec) -> Vec<Component> {
    let name = node.name();
    let inside = || Place::Node { name: name.clone() };
    let mut all = vec![
        Component::new(
            format!("kubelet-{node}"),
            inside(),
            paths.program("kubelet"),
            [
                format!("--config={}", path(&configuration(paths, node, "kubelet.yaml"))),
                format!("--kubeconfig={}", path(&paths.kubeconfig(&format!("kubelet-{node}")))),
                format!("--hostname-override={node}"),
                format!("--node-ip={}", node.address()),
                "--node-labels=nvidia.com/gpu.present=true".into(),
            ],
        ),
        Component::new(
            format!("kube-proxy-{node}"),
            inside(),
            paths.program("kube-proxy"),
            [format!("--config={}", path(&configuration(paths, node, "kube-proxy.yaml")))],
        ),
    ];
    all.extend(device_plugin(paths, node, spec));
    all
}

/// The simulated driver of a node; none until its program is built.
pub fn gpusim(paths: &Paths, node: Node) -> Option<Component> {
    paths.program("gpusim").exists().then(|| {
        Component::new(
            format!("gpusim-{node}"),
            Place::Node { name: node.name() },
            paths.program("gpusim"),
            ["daemon", "--config", &path(&configuration(paths, node, "gpusim.json"))],
        )
    })
}

/// The device plugin of a node; none until its program is built.
pub fn device_plugin(paths: &Paths, node: Node, spec: &Spec) -> Option<Component> {
    paths.program("gpu-device-plugin").exists().then(|| {
        Component::new(
            format!("device-plugin-{node}"),
            Place::Node { name: node.name() },
            paths.program("gpu-device-plugin"),
            [format!("--replicas={}", spec.gpu_replicas)],
        )
    })
}

/// The host's pid of a node's first process.
pub fn first_process(paths: &Paths, node: &str) -> Result<rustix::process::Pid> {
    let name = component_name(node);
    let status = control::send(paths, &Request::Status)?;
    let found = status.iter().find(|component| component.name == name);
    found
        .and_then(|component| component.pid)
        .filter(|_| ready_file(paths, node).exists())
        .and_then(rustix::process::Pid::from_raw)
        .with_context(|| format!("node {node} is not up: see `cluster status`"))
}

/// Runs a command inside a node to its end; its standard output.
pub fn output(paths: &Paths, node: &str, command: &mut Command) -> Result<String> {
    use std::process::Stdio;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let place = Place::Node { name: node.to_owned() };
    let child = namespace::spawn(&place, command, |name| first_process(paths, name))?;
    crate::command::check(&crate::command::display(command), child.wait_with_output()?)
}

/// The first process of a node: completes its mount namespace, then waits upon orphans.
///
/// It is started in new mount, pid and UTS namespaces and in the node's network.
pub fn init(paths: &Paths, name: &str) -> Result<()> {
    let node = Node::parse(name)?;
    // What is mounted in the node stays in the node; what one pod mounts, the node's others see.
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;
    mount("proc", "/proc", "proc", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None)
        .context("mounting /proc")?;
    for path in OWN_PATHS {
        mount_bind_recursive(paths.on_node(name, path), *path)
            .and_then(|()| mount_change(*path, MountPropagationFlags::SHARED | MountPropagationFlags::REC))
            .with_context(|| format!("giving the node its own {path}"))?;
    }
    rustix::system::sethostname(node.name().as_bytes())?;
    write(&ready_file(paths, name), "")?;
    loop {
        match wait(WaitOptions::empty()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // Without children there is nothing to wait upon; orphans are in no hurry.
            Err(_) => thread::sleep(Duration::from_millis(500)),
        }
    }
}

fn configuration(paths: &Paths, node: Node, file: &str) -> PathBuf {
    paths.node(&node.name()).join(file)
}

fn path(path: &Path) -> String {
    path.display().to_string()
}

fn cni(node: Node) -> String {
    format!(
        r#"{{"cniVersion": "1.0.0", "name": "pods", "plugins": [{{
  "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
  "ipam": {{"type": "host-local", "ranges": [[{{"subnet": "{}"}}]], "routes": [{{"dst": "0.0.0.0/0"}}]}}
}}]}}
"#,
        node.pod_range()
    )
}

/// Without CAP_SYS_RESOURCE, runc cannot lower a score: hence `restrict_oom_score_adj`.
const CONTAINERD: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "highwater.local/pause:dev"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"#;

fn kubelet(paths: &Paths, node: Node) -> String {
    let pki = path(&paths.pki());
    format!(
        r#"apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}, x509: {{clientCAFile: "{pki}/ca.crt"}}}}
authorization: {{mode: Webhook}}
cgroupDriver: cgroupfs
cgroupRoot: /{cgroup}
cgroupsPerQOS: true
enforceNodeAllocatable: []
failSwapOn: false
failCgroupV1: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
# No DNS server runs here; an address all the same, since the kubelet complains of every pod without.
clusterDNS: [10.96.0.10]
resolvConf: ""
staticPodPath: {STATIC_PODS}
evictionHard: {{memory.available: "100Mi", nodefs.available: "1%", imagefs.available: "1%", nodefs.inodesFree: "1%"}}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
tlsCertFile: "{pki}/kubelet-{node}.crt"
tlsPrivateKeyFile: "{pki}/kubelet-{node}.key"
nodeStatusUpdateFrequency: 5s
# An unchanged status is not written again, so that tests can count everybody else's writes.
nodeStatusReportFrequency: 24h
crashLoopBackOff: {{maxContainerRestartPeriod: 1s}}
"#,
        cgroup = paths.id.cgroup_of(node)
    )
}

fn kube_proxy(paths: &Paths, node: Node) -> String {
    format!(
        r#"apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {{kubeconfig: "{}"}}
mode: nftables
clusterCIDR: {}
conntrack: {{maxPerCore: 0, min: 0}}
hostnameOverride: {node}
bindAddress: {}
metricsBindAddress: 127.0.0.1:10249
healthzBindAddress: 127.0.0.1:10256
"#,
        path(&paths.kubeconfig("kube-proxy")),
        node.pod_range(),
        node.address(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_of_a_node_is_valid_json_with_its_own_range() {
        let conflist: serde_json::Value = serde_json::from_str(&cni(Node::parse("n2").unwrap())).unwrap();
        assert_eq!(conflist["plugins"][0]["ipam"]["ranges"][0][0]["subnet"], "10.222.2.0/24");
    }

    #[test]
    fn unknown_nodes_are_refused_by_name() {
        assert!(Node::parse("n3").unwrap_err().to_string().contains("n1 and n2"));
    }
}
