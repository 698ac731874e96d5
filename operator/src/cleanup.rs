//! Before an uninstall: undoes what we did to nodes.

use std::time::Duration;

use anyhow::Context as _;
use highwater_crds::names;
use highwater_policy::taint::TaintChange;
use jiff::Timestamp;
use k8s_openapi::{
    api::{
        coordination::v1::{Lease, LeaseSpec},
        core::v1::Node,
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams},
};
use tracing::{info, warn};

use crate::{args::Settings, error::call, leader::LEASE_SECONDS, node_controller::taint, run::client};

/// How long the running operators are kept from writing: until the uninstall has removed them.
const LEASE_LASTS_SECONDS: i32 = 60;
/// How many nodes are asked for at once.
const PAGE: u32 = 250;
/// How often a node is tried that others change at the same time.
const ATTEMPTS: usize = 10;

/// Takes the lease, so that no operator sets taints any more, and removes ours from every node.
pub(crate) async fn cleanup(settings: Settings) -> anyhow::Result<()> {
    let client = client().await?;
    take_lease(&client, &settings).await?;
    // A leader learns of it when it next renews.
    tokio::time::sleep(Duration::from_secs(LEASE_SECONDS)).await;
    let tainted = tainted_nodes(&client).await?;
    for node in &tainted {
        untaint(&client, node).await?;
    }
    info!(nodes = tainted.len(), "removed our taints");
    Ok(())
}

/// The nodes with our taint, found a page at a time: Node objects are large.
async fn tainted_nodes(client: &Client) -> anyhow::Result<Vec<String>> {
    let api: Api<Node> = Api::all(client.clone());
    let mut params = ListParams::default().limit(PAGE);
    let mut tainted = Vec::new();
    loop {
        let page = call("list the nodes", api.list(&params)).await?;
        let found = page.items.into_iter().filter(|node| taint::present(node).is_some());
        tainted.extend(found.filter_map(|node| node.metadata.name));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(tainted),
        }
    }
}

async fn take_lease(client: &Client, settings: &Settings) -> anyhow::Result<()> {
    let api: Api<Lease> = Api::namespaced(client.clone(), &settings.namespace);
    let now = MicroTime(Timestamp::now());
    let lease = Lease {
        metadata: ObjectMeta { name: Some(names::LEADER_LEASE.to_owned()), ..ObjectMeta::default() },
        spec: Some(LeaseSpec {
            holder_identity: Some(format!("cleanup-{}", settings.identity)),
            lease_duration_seconds: Some(LEASE_LASTS_SECONDS),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }),
    };
    let params = PatchParams::apply("highwater-operator/cleanup").force();
    call("take the lease", api.patch(names::LEADER_LEASE, &params, &Patch::Apply(lease)))
        .await
        .context("cannot stop the running operators")?;
    Ok(())
}

async fn untaint(client: &Client, node: &str) -> anyhow::Result<()> {
    for attempt in 1.. {
        match taint::write(client, node, TaintChange::Remove).await {
            Ok(()) => break,
            Err(error) if error.is_ordinary() && attempt < ATTEMPTS => warn!(node, %error, "trying again"),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot remove the taint of node {node}"));
            }
        }
    }
    Ok(())
}
