//! The record step: the decision goes into the incident, and an Event beside it.

use highwater_crds::{GpuMemoryIncident, names::manager};
use highwater_policy::remediation::{self, Particulars, Verdict};
use jiff::Timestamp;
use kube::{Api, api::PatchParams};
use tracing::info;

use super::dereference::Scene;
use crate::{
    context::{Context, apply_to},
    error::{Error, call, code},
};

/// Writes a verdict if it says something new, and keeps the scene up to date.
pub(crate) async fn record(
    ctx: &Context,
    scene: &mut Scene,
    verdict: Verdict,
    particulars: Particulars,
) -> Result<(), Error> {
    let Some(decision) = remediation::record(scene.decision(), &verdict, particulars, Timestamp::now())
    else {
        return Ok(());
    };
    ctx.leader.check()?;
    let api: Api<GpuMemoryIncident> = Api::namespaced(ctx.client.clone(), &scene.key.0);
    let status = serde_json::json!({"decision": decision});
    let patch = apply_to::<GpuMemoryIncident>(&scene.incident.metadata, "status", status);
    let params = PatchParams::apply(manager::OPERATOR_DECISION).force();
    let request = api.patch_status(&scene.key.1, &params, &patch);
    scene.incident = match call("record a decision", request).await {
        Ok(incident) => incident,
        // The rule of the CRD: another leader has recorded what cannot be taken back.
        Err(Error::Api { source, .. }) if matches!(code(&source), Some(404 | 409 | 422)) => {
            return Err(Error::Overtaken);
        }
        Err(error) => return Err(error),
    };
    ctx.written.put(&scene.key, &scene.incident);
    let state = format!("{:?}", decision.state);
    info!(namespace = scene.key.0, incident = scene.key.1, state, reason = decision.reason, "decided");
    ctx.metrics.decisions.with_label_values(&[state.as_str(), decision.reason.as_str()]).inc();
    ctx.events.decided(&scene.incident, &decision);
    Ok(())
}
