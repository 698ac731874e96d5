//! The memory-pressure taint of nodes: only our own key, only `NoSchedule`.

pub(crate) mod taint;

use std::{sync::Arc, time::Duration};

use highwater_policy::taint::{TaintChange, change, desired};
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

/// Keeps the taints right while this replica leads.
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
    let Some(node) = ctx.stores.node(name) else { return Ok(Again::OnChange) };
    let plan = ctx.known.borrow().plans.get(name).cloned();
    let reported = ctx.stores.plan(name);
    let status = reported.as_deref().and_then(readable).and_then(|r| r.status.as_ref());
    let wanted = plan.zip(status).and_then(|(plan, status)| desired(&plan, status));
    let present = taint::present(&node);
    // What nobody asks for needs nobody to vouch for it.
    let agent_away = wanted.and_then(|_| ctx.agent_away(name));
    let paused = ctx.paused(name, None).is_some();
    // That an agent stays away, or an uninstall does not end, is no event.
    let again = if agent_away.is_some() || (wanted.is_some() && ctx.uninstalling()) {
        Again::After(LOOK_AGAIN)
    } else {
        Again::OnChange
    };
    let Some(change) = change(present.as_deref(), wanted, paused, agent_away) else { return Ok(again) };
    let allowed = async {
        if change != TaintChange::Remove {
            uninstall::check(ctx).await?;
        }
        ctx.leader.check()
    };
    taint::write(&ctx.client, name, change, allowed).await?;
    if let (TaintChange::Remove, Some(_), Some(away)) = (change, wanted, agent_away) {
        ctx.events.agent_gone(&node, away);
    }
    Ok(again)
}
