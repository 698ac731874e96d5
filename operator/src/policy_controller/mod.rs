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

/// What was learnt, for the third step.
struct Work {
    inputs: Inputs,
    known: Arc<Known>,
    outcomes: BTreeMap<String, Outcome>,
}

/// 1. dereference (stores only), 2. resolve (pure), 3. apply (writes what differs; leader only).
///
/// What is known must not stand still while plans are being written: the first two steps are taken
/// on every change, and the third with the newest of their results.
pub(crate) async fn run(ctx: Arc<Context>, learnt: watch::Sender<Arc<Known>>, stop: CancellationToken) {
    let (found, work) = watch::channel(None);
    tokio::join!(keep_learning(&ctx, learnt, found, &stop), keep_applying(&ctx, work, &stop));
}

async fn keep_learning(
    ctx: &Context,
    learnt: watch::Sender<Arc<Known>>,
    found: watch::Sender<Option<Arc<Work>>>,
    stop: &CancellationToken,
) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = ctx.signals.plans.notified() => sleep(GATHER).await,
        }
        let (inputs, outcomes) = learn(ctx, &learnt);
        let known = Arc::clone(&learnt.borrow());
        found.send_replace(Some(Arc::new(Work { inputs, known, outcomes })));
    }
}

async fn keep_applying(
    ctx: &Context,
    mut work: watch::Receiver<Option<Arc<Work>>>,
    stop: &CancellationToken,
) {
    let mut retry: Option<Duration> = None;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = work.changed() => if changed.is_err() { return },
            () = sleep(retry.unwrap_or_default()), if retry.is_some() => {
                ctx.signals.plans.notify_one();
                continue;
            }
        }
        let Some(newest) = work.borrow_and_update().clone() else { continue };
        let complete = apply::apply(ctx, &newest.inputs, &newest.known.plans, &newest.outcomes).await;
        retry = (!complete).then(|| retry.map_or(RETRY.0, |wait| (wait * 2).min(RETRY.1)));
    }
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
