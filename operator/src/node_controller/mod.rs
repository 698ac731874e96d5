//! The memory-pressure taint of nodes: only our own key, only `NoSchedule`.

pub(crate) mod taint;

use std::sync::Arc;

use highwater_policy::taint::{change, desired};
use tokio_util::sync::CancellationToken;

use crate::{
    context::Context,
    error::Error,
    queue::{Again, drain},
    watch::readable,
};

/// Most nodes that are looked at at once.
const WIDTH: usize = 8;

/// Keeps the taints right while this replica leads.
pub(crate) async fn run(ctx: Arc<Context>, stop: CancellationToken) {
    let queue = Arc::clone(&ctx.signals.nodes);
    drain(queue, WIDTH, stop, |name: String| {
        let ctx = Arc::clone(&ctx);
        async move {
            match reconcile(&ctx, &name).await {
                Ok(()) => Again::OnChange,
                Err(error) => ctx.failed("node", &name, &error),
            }
        }
    })
    .await;
}

async fn reconcile(ctx: &Context, name: &str) -> Result<(), Error> {
    ctx.leader.check()?;
    let Some(node) = ctx.stores.node(name) else { return Ok(()) };
    let plan = ctx.known.borrow().plans.get(name).cloned();
    let reported = ctx.stores.plan(name);
    let status = reported.as_deref().and_then(readable).and_then(|r| r.status.as_ref());
    let wanted = plan.zip(status).and_then(|(plan, status)| desired(&plan, status));
    let present = taint::present(&node);
    let Some(change) = change(present.as_deref(), wanted, ctx.paused(name, None).is_some()) else {
        return Ok(());
    };
    taint::write(&ctx.client, name, change).await
}
