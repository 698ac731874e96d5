//! The record step: the decision goes into the incident, and an Event beside it.

use highwater_crds::{GpuMemoryIncident, names::manager};
use highwater_policy::{
    leak_acts::WORKLOAD_TICKET,
    remediation::{self, Particulars, TICKET_NEEDED, Verdict},
};
use jiff::Timestamp;
use kube::{Api, api::PatchParams};
use tracing::info;

use super::dereference::Scene;
use crate::{
    context::{Context, Key, apply_to},
    error::{Error, call, code},
};

/// Writes a verdict if it says something new, and keeps the scene up to date.
pub(crate) async fn record(
    ctx: &Context,
    scene: &mut Scene,
    verdict: Verdict,
    particulars: Particulars,
) -> Result<(), Error> {
    // Of those that come to a ticket together one tells.
    let tells = scene.leak.as_ref().is_some_and(|leak| leak.tells);
    let ticket = verdict.reason == TICKET_NEEDED || (verdict.reason == WORKLOAD_TICKET && tells);
    if !write(ctx, &scene.key, &mut scene.incident, &verdict, particulars).await? {
        return Ok(());
    }
    if let (true, Some(workload), Some(subject)) = (ticket, &scene.workload, &scene.incident.spec.subject) {
        ctx.events.ticket(&scene.incident, workload.reference(&subject.namespace), &verdict);
    }
    Ok(())
}

/// Writes a verdict into an incident if it says something new, and says whether it did.
pub(crate) async fn write(
    ctx: &Context,
    key: &Key,
    incident: &mut GpuMemoryIncident,
    verdict: &Verdict,
    particulars: Particulars,
) -> Result<bool, Error> {
    let old = incident.status.as_ref().and_then(|s| s.decision.as_ref());
    let Some(decision) = remediation::record(old, verdict, particulars, Timestamp::now()) else {
        return Ok(false);
    };
    ctx.leader.check()?;
    let api: Api<GpuMemoryIncident> = Api::namespaced(ctx.client.clone(), &key.0);
    let status = serde_json::json!({"decision": decision});
    let patch = apply_to::<GpuMemoryIncident>(&incident.metadata, "status", status);
    let params = PatchParams::apply(manager::OPERATOR_DECISION).force();
    let request = api.patch_status(&key.1, &params, &patch);
    *incident = match call("record a decision", request).await {
        Ok(incident) => incident,
        // The rule of the CRD: another leader has recorded what cannot be taken back.
        Err(Error::Api { source, .. }) if matches!(code(&source), Some(404 | 409 | 422)) => {
            return Err(Error::Overtaken);
        }
        Err(error) => return Err(error),
    };
    ctx.written.put(key, incident);
    let state = format!("{:?}", decision.state);
    info!(namespace = key.0, incident = key.1, state, reason = decision.reason, "decided");
    ctx.metrics.decisions.with_label_values(&[state.as_str(), decision.reason.as_str()]).inc();
    ctx.events.decided(incident, &decision);
    Ok(true)
}
