//! What we say on nodes: the memory-pressure taint (only our own key, only `NoSchedule`) or taints of
//! single devices, labels for the strength that a node gives to every pod, requests for a reset; and
//! what becomes of a cordon behind which no drain stands any more.

pub(crate) mod cordon;
pub(crate) mod device_taint;
pub(crate) mod labels;
pub(crate) mod reset;
pub(crate) mod taint;

use std::{sync::Arc, time::Duration};

use highwater_crds::GpuMemoryNodeStatus;
use highwater_policy::{
    drain::{is_orphaned, marked},
    node_labels,
    taint::{TaintChange, any_asks, change, desired},
};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::ObjectRef;
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
    let work = drain(queue, WIDTH, stop.clone(), |name: String| {
        let ctx = Arc::clone(&ctx);
        async move {
            match reconcile(&ctx, &name).await {
                Ok(again) => again,
                Err(error) => ctx.failed("node", &name, &error),
            }
        }
    });
    tokio::join!(work, list_again(&ctx, stop));
}

async fn list_again(ctx: &Context, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(device_taint::LIST_AGAIN)).await.is_some() {
        if let Err(error) = device_taint::list_again(ctx).await {
            ctx.failed("node", "device taints", &error);
        }
    }
}

pub(crate) async fn reconcile(ctx: &Context, name: &str) -> Result<Again, Error> {
    ctx.leader.check()?;
    let Some(node) = ctx.stores.node(name) else {
        ctx.told.forget(name);
        return Ok(Again::OnChange);
    };
    let plan = ctx.known.borrow().plans.get(name).cloned();
    let reported = ctx.stores.plan(name);
    let status = reported.as_deref().and_then(readable).and_then(|r| r.status.as_ref());
    let both = plan.as_deref().zip(status);
    let asks = both.is_some_and(|(plan, status)| any_asks(plan, status));
    let present = taint::present(&node);
    let labelled = status.is_some_and(|s| !node_labels::desired(Some(s), None).is_empty());
    // What nobody asks for needs nobody to vouch for it.
    let agent_away = if asks || labelled { ctx.agent_away(name) } else { None };
    let paused = ctx.paused(name, None).is_some();
    // That an agent stays away, or an uninstall does not end, is no event.
    let resets = reset::desired(&ctx.stores.incidents(|i| i.spec.node == name));
    let waits = agent_away.is_some()
        || ((asks || labelled) && ctx.uninstalling())
        || (paused && !reset::asks_for_no_more(reset::present(&node), resets.as_deref()));
    let again = if waits { Again::After(LOOK_AGAIN) } else { Again::OnChange };
    // None waits for another: above all, no undo for anything.
    let released = release(ctx, &node).await;
    let requested = request_reset(ctx, &node, resets.as_deref(), paused).await;
    let (frozen, wanted) = match device_taint::published(ctx, name, status, asks).await {
        Ok(published) => {
            let wanted = both.and_then(|(plan, status)| desired(plan, status, &published));
            (device_taint::reconcile(ctx, &node, both, &published, paused, agent_away).await, wanted)
        }
        // Which devices have taints of their own is not known: what is there stays.
        Err(error) => return released.and(requested).and(Err(error)),
    };
    let tainted = match change(present.as_deref(), wanted, paused, agent_away) {
        Some(change) => {
            let away = agent_away.filter(|_| wanted.is_some());
            taint(ctx, &node, change, away).await
        }
        None => Ok(()),
    };
    let labelled = label(ctx, &node, status, agent_away).await;
    released.and(requested).and(frozen).and(tainted).and(labelled).map(|()| again)
}

/// Takes back a cordon of ours behind which no open incident stands, whatever ended it.
async fn release(ctx: &Context, node: &Node) -> Result<(), Error> {
    let orphaned = |mark: &str| {
        let (namespace, name, _) = marked(mark).unwrap_or_default();
        let found = ctx.stores.incidents.get(&ObjectRef::new(name).within(namespace));
        is_orphaned(mark, found.as_deref().and_then(readable))
    };
    let Some(mark) = cordon::annotation(node).filter(|mark| orphaned(mark)) else { return Ok(()) };
    ctx.leader.check()?;
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let text = match cordon::release(&ctx.client, name, orphaned).await? {
        Some(cordon::Released::Cordon) => {
            format!("uncordoned the node: the drain for incident {mark} is over")
        }
        Some(cordon::Released::Annotation) => {
            format!("the drain for incident {mark} is over; its cordon had been lifted by somebody else")
        }
        None => return Ok(()),
    };
    ctx.events.on_node(node, "Uncordoned", "Uncordon", &text);
    Ok(())
}

/// Keeps the request for resets right. What goes is no act.
async fn request_reset(ctx: &Context, node: &Node, desired: Option<&str>, paused: bool) -> Result<(), Error> {
    let present = reset::present(node);
    if present == desired {
        return Ok(());
    }
    if !reset::asks_for_no_more(present, desired) {
        if paused {
            return Ok(());
        }
        uninstall::check(ctx).await?;
    }
    ctx.leader.check()?;
    reset::write(&ctx.client, &node.metadata, desired).await?;
    let (reason, text) = match desired {
        Some(devices) => (
            "ResetRequested",
            format!("memory of processes that are gone is back only after a reset of {devices}"),
        ),
        None => ("ResetNoLongerRequested", "the memory of processes that were gone is back".to_owned()),
    };
    ctx.events.on_node(node, reason, "RequestReset", &text);
    Ok(())
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
