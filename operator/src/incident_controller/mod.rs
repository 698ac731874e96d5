//! Decides about incidents and acts on them.
//!
//! 1. dereference: everything that is known now (one read of the pod), 2. decide (pure),
//! 3. act: token, `Approved`, eviction, 4. record. On the way from a new incident to its eviction
//!    there is no call but these. What the agent carries out needs token and `Approved` alone; a drain
//!    has a folder of its own.

mod act;
mod budget;
mod collect;
mod dereference;
mod drain;
mod evict;
mod leaks;
mod probe;
mod record;
mod workload;

#[cfg(test)]
mod crash_tests;

use std::{sync::Arc, time::Duration};

use highwater_crds::DecisionState;
use highwater_policy::remediation::{BUDGET_EXHAUSTED, Carrier, Particulars, Step, carrier, decide};
use jiff::{SignedDuration, Timestamp};
use kube::runtime::reflector::ObjectRef;
use tokio_util::sync::CancellationToken;

pub(crate) use budget::Reservations;
pub(crate) use collect::collect_finished;
pub(crate) use dereference::show_halt;
pub(crate) use drain::Leases;
pub(crate) use leaks::{show_tickets, wake_siblings};
pub(crate) use probe::Refusals;

use crate::{
    context::{Context, Key},
    error::Error,
    queue::{self, Again},
    watch::readable,
};

/// Most incidents that are looked at at once.
const WIDTH: usize = 16;

/// Works on incidents while this replica leads.
pub(crate) async fn run(ctx: Arc<Context>, stop: CancellationToken) {
    let queue = Arc::clone(&ctx.signals.incidents);
    queue::drain(queue, WIDTH, stop, |key: Key| {
        let ctx = Arc::clone(&ctx);
        async move {
            match Box::pin(reconcile(&ctx, &key)).await {
                Ok(again) => again,
                Err(error) => ctx.failed("incident", &format!("{}/{}", key.0, key.1), &error),
            }
        }
    })
    .await;
}

async fn reconcile(ctx: &Context, key: &Key) -> Result<Again, Error> {
    ctx.leader.check()?;
    let stored = ctx.stores.incidents.get(&ObjectRef::new(&key.1).within(&key.0));
    let proposed = stored.as_deref().and_then(readable).map(|incident| carrier(&incident.spec.proposed));
    if proposed == Some(Carrier::Drain) {
        // Larger than all the rest, and rare.
        return Box::pin(drain::reconcile(ctx, key)).await;
    }
    let Some(mut scene) = dereference::dereference(ctx, key).await? else {
        ctx.claims.release(key);
        ctx.written.forget(key);
        ctx.refusals.forget(key);
        return Ok(Again::OnChange);
    };
    let now = Timestamp::now();
    match decide(&scene.view(), now) {
        Step::Rest(wait) => Ok(after(wait)),
        Step::Record(verdict, wait) => {
            let particulars = Particulars {
                workload: scene.workload_name(),
                budgets: match &scene.refusal {
                    Some(refusal) if verdict.reason == BUDGET_EXHAUSTED => refusal.said.clone(),
                    _ => Vec::new(),
                },
                acted_at: (verdict.state == DecisionState::Verifying).then_some(now),
                targets: Vec::new(),
            };
            let under_way = verdict.state == DecisionState::Verifying;
            record::record(ctx, &mut scene, verdict, particulars).await?;
            if !under_way {
                // An act whose answer was unclear was not done: the pod was read again since.
                ctx.claims.release(key);
            }
            Ok(after(wait))
        }
        Step::Observe(verdict) => {
            let under_way = verdict.state == DecisionState::Verifying;
            let again = act::observe(ctx, &mut scene, verdict).await?;
            if !under_way {
                ctx.claims.release(key);
            }
            Ok(again)
        }
        Step::Rehearse => act::rehearse(ctx, &mut scene).await,
        Step::Act => act::act(ctx, &mut scene).await,
        Step::Allow => act::allow(ctx, &mut scene).await,
    }
}

fn after(wait: Option<SignedDuration>) -> Again {
    wait.map_or(Again::OnChange, |wait| Again::After(Duration::try_from(wait).unwrap_or_default()))
}
