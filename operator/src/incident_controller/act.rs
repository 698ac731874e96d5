//! The act step: what is done to the cluster.

use std::time::Duration;

use highwater_crds::{DecisionState, GpuMemoryIncident, names};
use highwater_policy::remediation::{
    self, Eviction, Particulars, Refusal, Step, Verdict, after_eviction, after_rehearsal, approved, decide,
    out_of_budget,
};
use jiff::Timestamp;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use tokio::time::Instant;
use tracing::info;

use super::{
    budget,
    dereference::{Scene, claim},
    evict::{Run, evict},
    record::record,
};
use crate::{
    context::{Context, Key},
    error::{Error, call},
    queue::Again,
};

/// Least wait after the API server refused an eviction.
pub(super) const AFTER_REFUSAL: Duration = Duration::from_secs(5);
/// When the agent ought to have begun what was approved.
const BEGIN_WITHIN: Duration = remediation::BEGIN_WITHIN.unsigned_abs();
/// A decision whose facts have just changed is made again soon.
pub(super) const AT_ONCE: Again = Again::Backoff(Duration::ZERO);

/// Reserves a token and records `Approved`: the agent of the node begins when it hears of it.
pub(crate) async fn allow(ctx: &Context, scene: &mut Scene) -> Result<Again, Error> {
    let key = scene.key.clone();
    if !ctx.claims.take(&key, &claim(&scene.incident)) {
        return Ok(AT_ONCE);
    }
    // The claim stays until the act is over, or waits again.
    let refused = match reserve(ctx, scene, Step::Allow).await {
        Ok(true) => return Ok(Again::After(BEGIN_WITHIN)),
        refused => refused,
    };
    ctx.claims.release(&key);
    match refused {
        Err(Error::Overtaken) => Ok(AT_ONCE),
        refused => refused.map(|_| Again::Backoff(AFTER_REFUSAL)),
    }
}

/// Reserves a token, records `Approved`, evicts, records `Verifying`. Each of these may be done
/// again after a crash without doing it twice.
pub(crate) async fn act(ctx: &Context, scene: &mut Scene) -> Result<Again, Error> {
    let key = scene.key.clone();
    if !ctx.claims.take(&key, &claim(&scene.incident)) {
        return Ok(AT_ONCE);
    }
    let attempted = scene.token;
    let eviction = match reserve_and_evict(ctx, scene).await {
        Ok(Some(eviction)) => eviction,
        not_evicted => {
            ctx.claims.release(&key);
            return match not_evicted {
                Err(Error::Overtaken) => Ok(AT_ONCE),
                Err(error) => Err(error),
                Ok(_) => Ok(Again::Backoff(AFTER_REFUSAL)),
            };
        }
    };
    let now = Timestamp::now();
    let accepted = eviction == Eviction::Accepted;
    if accepted {
        let reaction = now.duration_since(scene.incident.spec.evidence.at.0);
        ctx.metrics.reaction.observe(reaction.as_secs_f64().max(0.0));
        info!(incident = key.1, namespace = key.0, "evicted the pod");
    } else if !matches!(eviction, Eviction::Unclear(_)) {
        // One without a clear answer may have been accepted: the claim stays until the pod was
        // looked at again.
        ctx.claims.release(&key);
    }
    if let Eviction::Budget(why) = &eviction {
        ctx.refusals.put(&key, why, Instant::now());
    }
    if let Some(verdict) = after_eviction(&eviction, attempted) {
        let acted_at = (verdict.state == DecisionState::Verifying).then_some(now);
        record(ctx, scene, verdict, Particulars { acted_at, ..Particulars::default() }).await?;
    }
    Ok(match eviction {
        Eviction::Accepted => Again::OnChange,
        Eviction::Conflict => AT_ONCE,
        refused => {
            info!(incident = key.1, namespace = key.0, ?refused, "the pod was not evicted");
            Again::Backoff(AFTER_REFUSAL)
        }
    })
}

/// None where the budgets refuse.
async fn reserve_and_evict(ctx: &Context, scene: &mut Scene) -> Result<Option<Eviction>, Error> {
    if !reserve(ctx, scene, Step::Act).await? {
        return Ok(None);
    }
    still(ctx, scene, &Step::Act)?;
    ctx.leader.check()?;
    Ok(Some(evict(ctx, scene, Run::Real).await))
}

/// Whether it is still the step to take: a pause, another policy or another act may have come
/// meanwhile.
fn still(ctx: &Context, scene: &mut Scene, step: &Step) -> Result<(), Error> {
    scene.look_again(ctx)?;
    if decide(&scene.view(), Timestamp::now()) == *step { Ok(()) } else { Err(Error::Overtaken) }
}

/// Reserves a token and records `Approved`, if `step` is still the one to take. False where the
/// budgets refuse, which is recorded too.
async fn reserve(ctx: &Context, scene: &mut Scene, step: Step) -> Result<bool, Error> {
    let workload = scene.workload_name();
    let budgets = match budget::reserve(ctx, scene).await? {
        Ok(said) => said,
        Err(Refusal { said, .. }) => {
            let verdict = out_of_budget(&said);
            let particulars = Particulars { workload, budgets: said, ..Particulars::default() };
            record(ctx, scene, verdict, particulars).await?;
            return Ok(false);
        }
    };
    still(ctx, scene, &step)?;
    let verdict = approved(&scene.incident.spec);
    record(ctx, scene, verdict, Particulars { workload, budgets, ..Particulars::default() }).await?;
    Ok(true)
}

/// Asks the API server what it would say to the eviction, and ends the incident with that.
pub(crate) async fn rehearse(ctx: &Context, scene: &mut Scene) -> Result<Again, Error> {
    let eviction = evict(ctx, scene, Run::Dry).await;
    let Some(verdict) = after_rehearsal(&eviction, scene.refusal.as_ref()) else {
        return Ok(if eviction == Eviction::Conflict { AT_ONCE } else { Again::Backoff(AFTER_REFUSAL) });
    };
    let particulars = Particulars {
        workload: scene.workload_name(),
        budgets: scene.refusal.as_ref().map(|r| r.said.clone()).unwrap_or_default(),
        ..Particulars::default()
    };
    record(ctx, scene, verdict, particulars).await?;
    Ok(Again::OnChange)
}

/// Asks the agent to look again.
pub(crate) async fn observe(ctx: &Context, scene: &mut Scene, verdict: Verdict) -> Result<Again, Error> {
    ask(ctx, &scene.key, &scene.incident).await?;
    record(ctx, scene, verdict, Particulars { workload: scene.workload_name(), ..Particulars::default() })
        .await?;
    Ok(Again::After(Duration::from_secs(10)))
}

/// Annotates an incident so that its agent looks again.
pub(crate) async fn ask(ctx: &Context, key: &Key, incident: &GpuMemoryIncident) -> Result<(), Error> {
    ctx.leader.check()?;
    let api: Api<GpuMemoryIncident> = Api::namespaced(ctx.client.clone(), &key.0);
    let asked = serde_json::json!({"metadata": {
        "uid": incident.metadata.uid,
        "annotations": {names::OBSERVE: Timestamp::now().to_string()},
    }});
    let params = PatchParams {
        field_manager: Some(names::manager::OPERATOR_DECISION.to_owned()),
        ..PatchParams::default()
    };
    call("ask for an observation", api.patch(&key.1, &params, &Patch::Merge(asked))).await?;
    Ok(())
}
