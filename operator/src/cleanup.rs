//! Before an uninstall: undoes what we did to nodes, and keeps the running operators from doing it
//! again.

use std::time::Duration;

use anyhow::Context as _;
use futures::{StreamExt, TryStreamExt, stream};
use highwater_crds::{GpuMemoryNode, names::manager};
use highwater_policy::taint::TaintChange;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams},
    core::ApiResource,
};
use serde::de::DeserializeOwned;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::{
    args::Settings,
    error::{CALL_SECONDS, Error, call, code},
    node_controller::taint,
    run::client,
    uninstall,
};

/// How often the mark of the uninstall is renewed.
const RENEW: Duration = Duration::from_secs(10);
/// When every write has ended that an operator began before it could see the mark.
const WRITES_HAVE_ENDED: Duration = Duration::from_secs(CALL_SECONDS + 1);
/// How many objects are asked for at once.
const PAGE: u32 = 250;
/// Most writes under way at once.
const WIDTH: usize = 16;
/// How often everything is looked through until nothing of ours is left.
const ROUNDS: usize = 5;
/// How often a node is tried that others change at the same time.
const ATTEMPTS: usize = 10;

/// Marks the release as being uninstalled, then removes our taints and empties the plans until
/// none is left. The mark is renewed all the while, and outlasts the operators.
pub(crate) async fn cleanup(settings: Settings) -> anyhow::Result<()> {
    let (client, namespace) = (client().await?, settings.namespace);
    uninstall::mark(&client, &namespace).await.context("cannot stop the running operators")?;
    let renew = async {
        loop {
            sleep(RENEW).await;
            if let Err(error) = uninstall::mark(&client, &namespace).await {
                warn!(%error, "trying again"); // the mark outlasts many attempts
            }
        }
    };
    tokio::select! {
        done = undo(&client) => done?,
        () = renew => {}
    }
    uninstall::mark(&client, &namespace).await.context("cannot stop the running operators")
}

async fn undo(client: &Client) -> anyhow::Result<()> {
    sleep(WRITES_HAVE_ENDED).await;
    for _ in 0..ROUNDS {
        let (tainted, planned) = (tainted_nodes(client).await?, planned_nodes(client).await?);
        if tainted.is_empty() && planned.is_empty() {
            info!("nothing of ours is left on the nodes");
            return Ok(());
        }
        let untaint = |node: String| async move { untaint(client, &node).await };
        stream::iter(tainted.clone()).map(untaint).buffer_unordered(WIDTH).try_collect::<()>().await?;
        let empty = |node: String| async move { empty(client, &node).await };
        stream::iter(planned.clone()).map(empty).buffer_unordered(WIDTH).try_collect::<()>().await?;
        info!(taints = tainted.len(), plans = planned.len(), "removed what was ours");
    }
    anyhow::bail!("something sets taints or plans again: stop it, then uninstall again")
}

async fn tainted_nodes(client: &Client) -> anyhow::Result<Vec<String>> {
    let api: Api<Node> = Api::all(client.clone());
    Ok(names_where("list the nodes", &api, |node| taint::present(node).is_some()).await?)
}

/// The nodes whose agents still have something to follow. None where the kind is not defined (any
/// more).
async fn planned_nodes(client: &Client) -> anyhow::Result<Vec<String>> {
    let planned = |node: &DynamicObject| {
        let layers = node.data.pointer("/spec/layers").and_then(serde_json::Value::as_array);
        layers.is_some_and(|layers| !layers.is_empty())
    };
    match names_where("list the node plans", &plans(client), planned).await {
        Err(Error::Api { source, .. }) if code(&source) == Some(404) => Ok(Vec::new()),
        names => Ok(names?),
    }
}

/// Dynamic, since a plan that cannot be read must be emptied too.
fn plans(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &ApiResource::erase::<GpuMemoryNode>(&()))
}

/// The names of the objects that satisfy `wanted`, found a page at a time: Node objects are large.
async fn names_where<K>(
    what: &'static str,
    api: &Api<K>,
    wanted: impl Fn(&K) -> bool,
) -> Result<Vec<String>, Error>
where
    K: Resource + Clone + std::fmt::Debug + DeserializeOwned,
{
    let mut params = ListParams::default().limit(PAGE);
    let mut names = Vec::new();
    loop {
        let page = call(what, api.list(&params)).await?;
        names.extend(page.items.iter().filter(|object| wanted(object)).map(ResourceExt::name_any));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(names),
        }
    }
}

async fn untaint(client: &Client, node: &str) -> anyhow::Result<()> {
    for attempt in 1.. {
        match taint::write(client, node, TaintChange::Remove, async { Ok(()) }).await {
            Ok(()) => break,
            Err(error) if error.is_ordinary() && attempt < ATTEMPTS => warn!(node, %error, "trying again"),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot remove the taint of node {node}"));
            }
        }
    }
    Ok(())
}

async fn empty(client: &Client, node: &str) -> anyhow::Result<()> {
    let patch = serde_json::json!({"spec": {"layers": null}});
    let params =
        PatchParams { field_manager: Some(manager::OPERATOR_CLEANUP.to_owned()), ..PatchParams::default() };
    match call("empty a node plan", plans(client).patch(node, &params, &Patch::Merge(patch))).await {
        Err(Error::Api { source, .. }) if code(&source) == Some(404) => Ok(()),
        written => written.map(drop).with_context(|| format!("cannot empty the plan of node {node}")),
    }
}
