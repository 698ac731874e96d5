//! Drains: 1. dereference (reads the node, the leases of the others where room is sought), 2. decide
//! (pure, `policy::drain`), 3. act: token, `Approved`, cordon; then, one at a time, token and
//! eviction, 4. record. What undoes a cordon is the node controller, whatever ended the drain.

mod act;
mod dereference;
mod room;

use highwater_policy::{
    drain::{NO_TARGET, Step, decide},
    remediation::{BUDGET_EXHAUSTED, CLOCK_SET_BACK, Particulars, Verdict},
};
use jiff::Timestamp;

use self::dereference::Scene;
pub(crate) use self::room::Leases;
use super::{act::ask, after, record};
use crate::{
    context::{Context, Key},
    error::Error,
    queue::Again,
};

/// Looks at an incident that proposes a drain, and takes the next step.
pub(super) async fn reconcile(ctx: &Context, key: &Key) -> Result<Again, Error> {
    let Some(mut scene) = dereference::dereference(ctx, key).await? else {
        ctx.claims.release(key);
        ctx.written.forget(key);
        return Ok(Again::OnChange);
    };
    let now = Timestamp::now();
    match decide(&scene.view(), now) {
        Step::Rest(wait) => Ok(after(wait)),
        Step::Record(verdict, wait) => {
            let acted_at = (verdict.reason == CLOCK_SET_BACK).then_some(now);
            write(ctx, &mut scene, &verdict, Particulars { acted_at, ..Particulars::default() }).await?;
            ctx.claims.release(key);
            Ok(after(wait))
        }
        Step::Observe(verdict) => {
            ask(ctx, key, &scene.incident).await?;
            write(ctx, &mut scene, &verdict, Particulars::default()).await?;
            ctx.claims.release(key);
            Ok(Again::After(std::time::Duration::from_secs(10)))
        }
        Step::Begin => Box::pin(act::begin(ctx, scene)).await,
        Step::Evict(index) => Box::pin(act::evict(ctx, scene, index)).await,
    }
}

/// Records a verdict with what the budgets said.
async fn write(
    ctx: &Context,
    scene: &mut Scene,
    verdict: &Verdict,
    particulars: Particulars,
) -> Result<(), Error> {
    let budgets = match &scene.refusal {
        Some(refusal) if verdict.reason == BUDGET_EXHAUSTED && particulars.budgets.is_empty() => {
            refusal.said.clone()
        }
        _ => particulars.budgets,
    };
    let workload = Some(format!("Node/{}", scene.incident.spec.node));
    let particulars = Particulars { workload, budgets, ..particulars };
    if record::write(ctx, &scene.key, &mut scene.incident, verdict, particulars).await?
        && verdict.reason == NO_TARGET
    {
        ctx.metrics.redirections.with_label_values(&["no_target"]).inc();
    }
    if verdict.state.is_final() {
        // Its cordon is to be taken back.
        ctx.signals.nodes.add(scene.incident.spec.node.clone());
    }
    Ok(())
}
