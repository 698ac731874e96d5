//! The apply step of the policy controller: writes the plans and status that differ.

use std::{collections::BTreeMap, sync::Arc};

use futures::{StreamExt, stream};
use highwater_crds::{
    GpuMemoryNode, GpuMemoryNodeSpec, GpuMemoryPolicy, GpuMemoryPolicyStatus, names::manager,
};
use highwater_policy::{
    policy_status::{Report, reports, status},
    resolve::Outcome,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api,
    api::{DynamicObject, PatchParams},
    core::{ApiResource, error_boundary::InvalidObject},
};
use serde_json::Value;
use tracing::{info, warn};

use super::dereference::Inputs;
use crate::{
    context::{Context, apply_to},
    error::{Error, call},
    watch::readable,
};

/// Most writes under way at once.
const WIDTH: usize = 16;

/// Writes what differs. False where something could not be written.
pub(crate) async fn apply(
    ctx: &Context,
    inputs: &Inputs,
    plans: &BTreeMap<String, Arc<GpuMemoryNodeSpec>>,
    outcomes: &BTreeMap<String, Outcome>,
) -> bool {
    let reports = reports(inputs.reporting(plans));
    show(ctx, outcomes, &reports);
    if !ctx.leader.holds() {
        return true;
    }
    if ctx.uninstalling() {
        return false;
    }
    let now = Timestamp::now();
    let changed: Vec<_> = inputs
        .nodes
        .iter()
        .filter_map(|(guard, _)| readable(guard))
        .filter_map(|node| {
            let plan = plans.get(node.metadata.name.as_deref()?)?;
            (node.spec != **plan).then_some((&node.metadata, plan.as_ref()))
        })
        .collect();
    let statuses: Vec<_> = inputs
        .policies
        .iter()
        .filter_map(|(name, (guard, _))| {
            let policy = readable(guard)?;
            let report = reports.get(name);
            let new = status(outcomes.get(name)?, report, halts(ctx, name), policy.status.as_ref(), now)?;
            Some((&policy.metadata, new))
        })
        .collect();
    let (planned, told) = (changed.len(), statuses.len());

    // Plans first: a status must not say that something holds before it does.
    let plans = changed.into_iter().map(|(meta, plan)| write_plan(ctx, meta, plan)).collect();
    let mut complete = all(ctx, plans).await;
    let statuses = statuses.into_iter().map(|(meta, new)| write_status(ctx, meta, new)).collect();
    complete &= all(ctx, statuses).await;
    let refusals = inputs.unreadable.iter().map(|invalid| refuse(ctx, invalid, outcomes, now)).collect();
    complete &= all(ctx, refusals).await;
    if planned + told > 0 {
        info!(plans = planned, statuses = told, complete, "wrote what changed");
    }
    complete
}

/// Makes the calls, [`WIDTH`] at once. An object that is gone needs nothing more.
async fn all<F: Future<Output = Result<(), Error>>>(ctx: &Context, calls: Vec<F>) -> bool {
    let mut complete = true;
    let mut results = stream::iter(calls).buffer_unordered(WIDTH);
    while let Some(result) = results.next().await {
        if let Err(error) = result {
            complete &= error.is_ordinary() && !matches!(error, Error::Uninstalling);
            ctx.failed("policy", "", &error);
        }
    }
    complete
}

async fn write_plan(ctx: &Context, meta: &ObjectMeta, plan: &GpuMemoryNodeSpec) -> Result<(), Error> {
    ctx.leader.check()?;
    if ctx.uninstalling() {
        return Err(Error::Uninstalling);
    }
    let api: Api<GpuMemoryNode> = Api::all(ctx.client.clone());
    let patch = apply_to::<GpuMemoryNode>(meta, "spec", plan);
    let name = meta.name.as_deref().unwrap_or_default();
    let params = PatchParams::apply(manager::OPERATOR_PLAN).force();
    call("write a node plan", api.patch(name, &params, &patch)).await?;
    ctx.metrics.plan_writes.inc();
    Ok(())
}

async fn write_status(ctx: &Context, meta: &ObjectMeta, status: GpuMemoryPolicyStatus) -> Result<(), Error> {
    ctx.leader.check()?;
    // Dynamic, since the answer holds the whole policy, which may be one that cannot be read.
    let resource = ApiResource::erase::<GpuMemoryPolicy>(&());
    let api: Api<DynamicObject> = Api::all_with(ctx.client.clone(), &resource);
    let patch = apply_to::<GpuMemoryPolicy>(meta, "status", status);
    let name = meta.name.as_deref().unwrap_or_default();
    let params = PatchParams::apply(manager::OPERATOR_POLICY).force();
    call("write a policy's status", api.patch_status(name, &params, &patch)).await?;
    Ok(())
}

/// Says in its status that a stored policy cannot be read. Its present status has to be asked for,
/// since the store has only its metadata.
async fn refuse(
    ctx: &Context,
    invalid: &InvalidObject,
    outcomes: &BTreeMap<String, Outcome>,
    now: Timestamp,
) -> Result<(), Error> {
    let meta = &invalid.metadata;
    let name = meta.name.as_deref().unwrap_or_default();
    let Some(outcome) = outcomes.get(name) else { return Ok(()) };
    let resource = ApiResource::erase::<GpuMemoryPolicy>(&());
    let api: Api<DynamicObject> = Api::all_with(ctx.client.clone(), &resource);
    let stored = call("read a policy", api.get(name)).await?;
    let old: Option<GpuMemoryPolicyStatus> =
        stored.data.get("status").and_then(|s| serde_json::from_value(Value::clone(s)).ok());
    if let Some(new) = status(outcome, None, halts(ctx, name), old.as_ref(), now) {
        warn!(policy = name, error = invalid.error, "a stored policy cannot be read and does not hold");
        write_status(ctx, meta, new).await?;
    }
    Ok(())
}

/// Whether the whole fleet stands still by the share of this policy.
fn halts(ctx: &Context, policy: &str) -> bool {
    ctx.halted.borrow().as_ref().is_some_and(|halt| halt.policy == policy)
}

fn show(ctx: &Context, outcomes: &BTreeMap<String, Outcome>, reports: &BTreeMap<String, Report>) {
    let gauge = &ctx.metrics.policy_conditions;
    gauge.reset();
    for (name, outcome) in outcomes {
        let status = status(outcome, reports.get(name), halts(ctx, name), None, Timestamp::UNIX_EPOCH);
        for condition in status.iter().flat_map(|s| &s.conditions) {
            gauge.with_label_values(&[name.as_str(), &condition.type_, &condition.status]).set(1);
        }
    }
}
