//! The act step: what is done to the cluster.

use std::time::Duration;

use highwater_crds::{GpuMemoryIncident, names};
use highwater_policy::remediation::{
    self, Eviction, Particulars, Refusal, Verdict, after_eviction, after_rehearsal, approved, out_of_budget,
};
use jiff::Timestamp;
use kube::{
    Api,
    api::{Patch, PatchParams},
    runtime::reflector::ObjectRef,
};
use tracing::info;

use super::{
    budget,
    dereference::{Scene, claim},
    evict::{Run, evict},
    record::record,
};
use crate::{
    context::Context,
    error::{Error, call},
    queue::Again,
    watch::readable,
};

/// Least wait after the API server refused an eviction.
pub(super) const AFTER_REFUSAL: Duration = Duration::from_secs(5);
/// A decision whose facts have just changed is made again soon.
const AT_ONCE: Again = Again::Backoff(Duration::ZERO);

/// Reserves a token, records `Approved`, evicts, records `Verifying`. Each of these may be done
/// again after a crash without doing it twice.
pub(crate) async fn act(ctx: &Context, scene: &mut Scene) -> Result<Again, Error> {
    let key = scene.key.clone();
    if !ctx.claims.take(&key, &claim(&scene.incident)) {
        return Ok(AT_ONCE);
    }
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
    } else {
        ctx.claims.release(&key);
    }
    if let Some(verdict) = after_eviction(&eviction) {
        let evicted_at = accepted.then_some(now);
        record(ctx, scene, verdict, Particulars { evicted_at, ..Particulars::default() }).await?;
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
    let workload = scene.workload_name();
    let budgets = match budget::reserve(ctx, scene).await? {
        Ok(said) => said,
        Err(Refusal { said, .. }) => {
            let verdict = out_of_budget(&said);
            record(ctx, scene, verdict, Particulars { workload, budgets: said, evicted_at: None }).await?;
            return Ok(None);
        }
    };
    record(ctx, scene, approved(), Particulars { workload, budgets, evicted_at: None }).await?;
    if !still_over(ctx, scene) {
        return Err(Error::Overtaken);
    }
    ctx.leader.check()?;
    Ok(Some(evict(ctx, scene, Run::Real).await))
}

/// Whether the latest news still speaks for the act. It may have come while the token was
/// reserved.
fn still_over(ctx: &Context, scene: &Scene) -> bool {
    let latest = ctx.stores.incidents.get(&ObjectRef::new(&scene.key.1).within(&scene.key.0));
    let latest = latest.as_deref().and_then(readable).unwrap_or(&scene.incident);
    let observation = latest.status.as_ref().and_then(|s| s.observation.as_ref());
    remediation::is_fresh(&scene.incident.spec, observation, Timestamp::now())
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
        evicted_at: None,
    };
    record(ctx, scene, verdict, particulars).await?;
    Ok(Again::OnChange)
}

/// Asks the agent to look again.
pub(crate) async fn observe(ctx: &Context, scene: &mut Scene, verdict: Verdict) -> Result<Again, Error> {
    ctx.leader.check()?;
    let api: Api<GpuMemoryIncident> = Api::namespaced(ctx.client.clone(), &scene.key.0);
    let asked = serde_json::json!({"metadata": {
        "uid": scene.incident.metadata.uid,
        "annotations": {names::OBSERVE: Timestamp::now().to_string()},
    }});
    let params = PatchParams {
        field_manager: Some(names::manager::OPERATOR_DECISION.to_owned()),
        ..PatchParams::default()
    };
    call("ask for an observation", api.patch(&scene.key.1, &params, &Patch::Merge(asked))).await?;
    record(ctx, scene, verdict, Particulars { workload: scene.workload_name(), ..Particulars::default() })
        .await?;
    Ok(Again::After(Duration::from_secs(10)))
}
