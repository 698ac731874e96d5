//! Policies and nodes in, node plans and policy status out: the whole fleet at once, since any
//! policy may change any plan.

mod apply;
mod dereference;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use highwater_policy::{
    policy_status,
    resolve::{Outcome, Policies, Resolution, resolve},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use self::dereference::Inputs;
use crate::context::{Context, Known};

/// How long changes are gathered before the fleet is resolved.
const GATHER: Duration = Duration::from_millis(50);
/// How soon what could not be written is tried again: doubled with each failure up to the second.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// Resolves the fleet whenever something changed that may matter.
pub(crate) async fn run(ctx: Arc<Context>, learnt: watch::Sender<Arc<Known>>, stop: CancellationToken) {
    let mut leader = ctx.leader.clone();
    let mut retry: Option<Duration> = None;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = ctx.signals.plans.notified() => sleep(GATHER).await,
            _ = leader.changed() => {}
            () = sleep(retry.unwrap_or_default()), if retry.is_some() => {}
        }
        let complete = reconcile(&ctx, &learnt).await;
        retry = (!complete).then(|| retry.map_or(RETRY.0, |wait| (wait * 2).min(RETRY.1)));
    }
}

/// 1. dereference (stores only), 2. resolve (pure), 3. apply (writes what differs; leader only).
///
/// False where something could not be written.
async fn reconcile(ctx: &Context, learnt: &watch::Sender<Arc<Known>>) -> bool {
    let (inputs, outcomes) = learn(ctx, learnt);
    let known = Arc::clone(&learnt.borrow());
    apply::apply(ctx, &inputs, &known.plans, &outcomes).await
}

/// The first two steps, made known to the other controllers.
pub(crate) fn learn(
    ctx: &Context,
    learnt: &watch::Sender<Arc<Known>>,
) -> (Inputs, BTreeMap<String, Outcome>) {
    let inputs = dereference::dereference(ctx);
    let begin = Instant::now();
    let policies = Policies::new(inputs.policies.values().map(|(_, policy)| policy.clone()));
    let Resolution { plans, mut outcomes } = resolve(&policies, inputs.nodes(), &inputs.namespaces);
    ctx.metrics.plan_compute.observe(begin.elapsed().as_secs_f64());
    outcomes.extend(inputs.unreadable.iter().map(|invalid| {
        let meta = &invalid.metadata;
        let outcome = policy_status::unreadable(meta.generation.unwrap_or_default(), &invalid.error);
        (meta.name.clone().unwrap_or_default(), outcome)
    }));
    learnt.send_replace(Arc::new(Known { policies, plans }));
    (inputs, outcomes)
}
