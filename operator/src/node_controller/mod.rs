//! What we say on nodes: the memory-pressure taint (only our own key, only `NoSchedule`), and labels
//! for the strength that a node gives to every pod.

pub(crate) mod labels;
pub(crate) mod taint;

use std::{sync::Arc, time::Duration};

use highwater_crds::GpuMemoryNodeStatus;
use highwater_policy::{
    node_labels,
    taint::{TaintChange, change, desired},
};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Node;
use tokio_util::sync::CancellationToken;

use crate::{
    context::Context,
    error::Error,
    queue::{Again, drain},
    uninstall,
    watch::readable,
};

/// How soon a node is looked at again that waits for something without events of its own.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// Most nodes that are looked at at once.
const WIDTH: usize = 8;

/// Keeps taints and labels right while this replica leads.
pub(crate) async fn run(ctx: Arc<Context>, stop: CancellationToken) {
    let queue = Arc::clone(&ctx.signals.nodes);
    drain(queue, WIDTH, stop, |name: String| {
        let ctx = Arc::clone(&ctx);
        async move {
            match reconcile(&ctx, &name).await {
                Ok(again) => again,
                Err(error) => ctx.failed("node", &name, &error),
            }
        }
    })
    .await;
}

async fn reconcile(ctx: &Context, name: &str) -> Result<Again, Error> {
    ctx.leader.check()?;
    let Some(node) = ctx.stores.node(name) else {
        ctx.told.forget(name);
        return Ok(Again::OnChange);
    };
    let plan = ctx.known.borrow().plans.get(name).cloned();
    let reported = ctx.stores.plan(name);
    let status = reported.as_deref().and_then(readable).and_then(|r| r.status.as_ref());
    let wanted = plan.zip(status).and_then(|(plan, status)| desired(&plan, status));
    let present = taint::present(&node);
    let labelled = status.is_some_and(|s| !node_labels::desired(Some(s), None).is_empty());
    // What nobody asks for needs nobody to vouch for it.
    let agent_away = if wanted.is_some() || labelled { ctx.agent_away(name) } else { None };
    let paused = ctx.paused(name, None).is_some();
    // That an agent stays away, or an uninstall does not end, is no event.
    let again = if agent_away.is_some() || ((wanted.is_some() || labelled) && ctx.uninstalling()) {
        Again::After(LOOK_AGAIN)
    } else {
        Again::OnChange
    };
    // Neither waits for the other.
    let tainted = match change(present.as_deref(), wanted, paused, agent_away) {
        Some(change) => {
            let away = agent_away.filter(|_| wanted.is_some());
            taint(ctx, &node, change, away).await
        }
        None => Ok(()),
    };
    let labelled = label(ctx, &node, status, agent_away).await;
    tainted.and(labelled).map(|()| again)
}

/// Changes the taint of a node. `away` is how long nobody has vouched for one that is asked for.
async fn taint(
    ctx: &Context,
    node: &Node,
    change: TaintChange,
    away: Option<SignedDuration>,
) -> Result<(), Error> {
    let allowed = async {
        if change != TaintChange::Remove {
            uninstall::check(ctx).await?;
        }
        ctx.leader.check()
    };
    let name = node.metadata.name.as_deref().unwrap_or_default();
    taint::write(&ctx.client, name, change, allowed).await?;
    if let (TaintChange::Remove, Some(away)) = (change, away) {
        ctx.events.agent_gone(node, away);
    }
    Ok(())
}

/// Keeps the labels of a node right. They are no act on anybody, so that no pause concerns them.
async fn label(
    ctx: &Context,
    node: &Node,
    status: Option<&GpuMemoryNodeStatus>,
    agent_away: Option<SignedDuration>,
) -> Result<(), Error> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let present = node_labels::present(node.metadata.labels.as_ref());
    let desired = node_labels::desired(status, agent_away);
    if !ctx.told.differs(name, &present, &desired) {
        return Ok(());
    }
    if !desired.is_subset(&present) {
        uninstall::check(ctx).await?;
    }
    ctx.leader.check()?;
    labels::write(&ctx.client, &node.metadata, &desired).await?;
    ctx.told.put(name, present, desired);
    Ok(())
}
