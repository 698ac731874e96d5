//! The cluster's network: namespaces of their own, a bridge as the node network, routes between
//! the nodes' pod ranges. Nothing of the host's network is touched.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{
    command::output,
    paths::ClusterId,
    spec::{Node, Spec},
};

/// Where `ip netns` keeps the namespaces by name.
const NAMESPACES: &str = "/run/netns";

/// Makes the network of the spec's nodes.
pub(crate) fn create(id: ClusterId, spec: &Spec) -> Result<()> {
    for command in commands(id, spec) {
        let mut parts = command.split_whitespace();
        let program = parts.next().context("a command has a name")?;
        output(Command::new(program).args(parts))?;
    }
    Ok(())
}

/// Removes whatever is left of the network.
pub(crate) fn remove(id: ClusterId) -> Result<()> {
    for name in Node::all().map(|node| id.network_of(node)) {
        if Path::new(NAMESPACES).join(&name).exists() {
            output(Command::new("ip").args(["netns", "delete", &name]))?;
        }
    }
    Ok(())
}

/// Whether any cluster of this machine has a network.
pub(crate) fn any_exists() -> bool {
    ClusterId::all().any(|id| Path::new(NAMESPACES).join(id.network()).exists())
}

fn commands(id: ClusterId, spec: &Spec) -> Vec<String> {
    let main = id.network();
    let inside = format!("nsenter --net={NAMESPACES}/{main}");
    let mut all = vec![
        format!("ip netns add {main}"),
        format!("ip -n {main} link set lo up"),
        format!("ip -n {main} link add nodes type bridge"),
        format!("ip -n {main} addr add 10.222.0.1/24 dev nodes"),
        format!("ip -n {main} link set nodes up"),
        // A process of the node itself needs some route before kube-proxy redirects a service.
        format!("ip -n {main} route add 10.96.0.0/16 dev nodes"),
        format!("{inside} sysctl -qw net.ipv4.ip_forward=1"),
    ];
    for node in spec.nodes().skip(1) {
        let (own, address, pods) = (id.network_of(node), node.address(), node.pod_range());
        all.extend([
            format!("ip netns add {own}"),
            format!("ip -n {own} link set lo up"),
            format!("ip -n {main} link add {node} type veth peer name eth0 netns {own}"),
            format!("ip -n {main} link set {node} master nodes up"),
            format!("ip -n {own} addr add {address}/24 dev eth0"),
            format!("ip -n {own} link set eth0 up"),
            format!("ip -n {own} route add default via 10.222.0.1"),
            format!("ip -n {main} route add {pods} via {address}"),
            format!("nsenter --net={NAMESPACES}/{own} sysctl -qw net.ipv4.ip_forward=1"),
        ]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_node_gets_a_link_an_address_and_a_route_to_its_pods() {
        let commands = commands(ClusterId::default(), &Spec { nodes: 2, ..Spec::default() });
        for expected in [
            "ip -n highwater-e2e link add n2 type veth peer name eth0 netns highwater-e2e-n2",
            "ip -n highwater-e2e-n2 addr add 10.222.0.2/24 dev eth0",
            "ip -n highwater-e2e route add 10.222.2.0/24 via 10.222.0.2",
        ] {
            assert!(commands.iter().any(|command| command == expected), "{expected}");
        }
    }
}
