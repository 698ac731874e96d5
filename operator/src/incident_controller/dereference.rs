//! The dereference step: everything that a decision looks at. One call, to read the pod; the rest
//! comes from stores.

use std::{collections::BTreeSet, sync::Arc};

use highwater_crds::{
    ActionType, Decision, DecisionState, GpuMemoryIncident, GpuMemoryNode, IncidentKind, Mode, Partition,
    names,
};
use highwater_policy::{
    budget::Limits,
    pod::{PodFacts, selects_namespace},
    remediation::{Asks, DISRUPTION_BUDGET, Eviction, Refusal, Rival, View},
    resolve::{Policies, Terms, terms},
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, runtime::reflector::ObjectRef};

use super::{act::AFTER_REFUSAL, budget, evict, workload};
use crate::{
    claims::Claim,
    context::{Context, Key, Known, is_open, state},
    error::{Error, call},
    watch::readable,
};

/// Everything that is known about an open incident.
pub(crate) struct Scene {
    pub(crate) key: Key,
    pub(crate) incident: GpuMemoryIncident,
    pub(crate) pod: Option<(Pod, PodFacts)>,
    pub(crate) workload: Option<workload::Workload>,
    pub(crate) limits: Limits,
    pub(crate) refusal: Option<Refusal>,
    asks: OwnedAsks,
    paused: Option<String>,
    rival: Option<(String, Claim)>,
    halted: Option<String>,
    blocked: Option<String>,
}

enum OwnedAsks {
    Deleted,
    Nothing,
    Act { terms: Terms, namespace_selected: bool },
}

/// None where the incident is gone, over, or cannot be read.
pub(crate) async fn dereference(ctx: &Context, key: &Key) -> Result<Option<Scene>, Error> {
    let Some(guard) = ctx.stores.incidents.get(&ObjectRef::new(&key.1).within(&key.0)) else {
        return Ok(None);
    };
    let newest = readable(&guard).map(|heard| ctx.written.newest(key, heard));
    let Some(incident) = newest.filter(is_open) else { return Ok(None) };
    let pod = read_pod(ctx, &incident).await?;
    let known = Arc::clone(&ctx.known.borrow());
    let asks = what_is_asked(ctx, &incident, &known);
    let namespace = incident.spec.subject.as_ref().map(|s| s.namespace.as_str());
    let workload = pod.as_ref().and_then(|(_, facts)| workload::top_owner(&ctx.stores, facts));
    let limits = limits(ctx, &incident, &known.policies);
    let mut scene = Scene {
        key: key.clone(),
        paused: paused(ctx, &incident, namespace, pod.as_ref().map(|(_, facts)| facts)),
        rival: rival(ctx, key, &incident),
        halted: halted(ctx, &incident, &limits),
        refusal: None,
        blocked: None,
        incident,
        pod,
        workload,
        limits,
        asks,
    };
    if !scene.is_verifying() && scene.pod.is_some() {
        scene.refusal = budget::refusal(ctx, &scene)?;
        scene.blocked = blocked(ctx, &scene).await;
    }
    Ok(Some(scene))
}

impl Scene {
    pub(crate) fn decision(&self) -> Option<&Decision> {
        self.incident.status.as_ref()?.decision.as_ref()
    }

    /// The scene as the decision takes it.
    pub(crate) fn view(&self) -> View<'_> {
        let spec = &self.incident.spec;
        let own = claim(&self.incident);
        let asked = self.incident.metadata.annotations.as_ref().and_then(|a| a.get(names::OBSERVE));
        View {
            spec,
            decision: self.decision(),
            observation: self.incident.status.as_ref().and_then(|s| s.observation.as_ref()),
            asked: asked.and_then(|at| at.parse::<Timestamp>().ok()),
            pod: self.pod.as_ref().map(|(_, facts)| facts),
            evicted: self.pod.as_ref().is_some_and(|(pod, facts)| facts.terminating && was_evicted(pod)),
            grace_seconds: self
                .pod
                .as_ref()
                .and_then(|(pod, _)| pod.spec.as_ref()?.termination_grace_period_seconds),
            asks: match &self.asks {
                OwnedAsks::Deleted => Asks::Deleted,
                OwnedAsks::Nothing => Asks::Nothing,
                OwnedAsks::Act { terms, namespace_selected } => {
                    Asks::Act { owner_kinds: &terms.owner_kinds, namespace_selected: *namespace_selected }
                }
            },
            paused: self.paused.clone(),
            rival: self.rival.as_ref().and_then(|(name, other)| own.rival(other, name)),
            halted: self.halted.clone(),
            refusal: self.refusal.clone(),
            blocked: self.blocked.clone(),
        }
    }

    /// Top owner of the subject, as the decision shows it.
    pub(crate) fn workload_name(&self) -> Option<String> {
        self.workload.as_ref().map(ToString::to_string)
    }

    fn is_verifying(&self) -> bool {
        state(&self.incident) == Some(DecisionState::Verifying)
    }
}

/// What an act for this incident concerns.
pub(crate) fn claim(incident: &GpuMemoryIncident) -> Claim {
    let subject = incident.spec.subject.as_ref().map(|s| s.uid.clone()).unwrap_or_default();
    Claim { device: format!("{}/{}", incident.spec.node, incident.spec.device), subject }
}

async fn read_pod(ctx: &Context, incident: &GpuMemoryIncident) -> Result<Option<(Pod, PodFacts)>, Error> {
    let Some(subject) = &incident.spec.subject else { return Ok(None) };
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &subject.namespace);
    let pod = call("read the pod", api.get_opt(&subject.name)).await?;
    Ok(pod.map(|pod| {
        let facts = PodFacts::parse(&pod);
        (pod, facts)
    }))
}

/// Whether the API server ends this pod because of an eviction.
fn was_evicted(pod: &Pod) -> bool {
    pod.status.iter().flat_map(|s| s.conditions.iter().flatten()).any(|c| {
        c.type_ == "DisruptionTarget"
            && c.status == "True"
            && c.reason.as_deref() == Some("EvictionByEvictionAPI")
    })
}

fn what_is_asked(ctx: &Context, incident: &GpuMemoryIncident, known: &Known) -> OwnedAsks {
    let spec = &incident.spec;
    let stored = ctx.stores.policies.get(&ObjectRef::new(&spec.policy));
    let Some(policy) = stored else { return OwnedAsks::Deleted };
    // What was resolved may be a moment behind the store: both must ask for the act.
    let still_stored = readable(&policy).is_some_and(|p| p.spec.mode == spec.mode);
    let status = ctx.stores.plan(&spec.node);
    let device = status.as_deref().and_then(readable).and_then(|node| model(node, &spec.device));
    let plan = known.plans.get(&spec.node).filter(|_| still_stored);
    let Some(terms) = plan.and_then(|plan| terms(plan, spec.mode, &spec.policy, spec.kind, device)) else {
        return OwnedAsks::Nothing;
    };
    let namespace_selected = spec.subject.as_ref().is_some_and(|subject| {
        let facts = ctx.stores.namespace(&subject.namespace);
        selects_namespace(
            terms.namespaces.as_ref(),
            &subject.namespace,
            facts.as_ref(),
            &ctx.release_namespace,
        )
    });
    OwnedAsks::Act { terms, namespace_selected }
}

/// Product and partition of a device.
fn model<'a>(node: &'a GpuMemoryNode, uuid: &str) -> Option<(&'a str, Partition)> {
    let status = node.status.as_ref()?;
    let device = status.devices.iter().find(|d| d.uuid == uuid)?;
    let model = status.models.get(usize::try_from(device.model).ok()?)?;
    Some((&model.product, model.partition))
}

/// The budgets of all policies that bind an act on the subject's device in its namespace.
fn limits(ctx: &Context, incident: &GpuMemoryIncident, policies: &Policies) -> Limits {
    let spec = &incident.spec;
    let (plan, node) = (ctx.stores.plan(&spec.node), ctx.stores.node(&spec.node));
    let labels = node.and_then(|n| n.metadata.labels.clone()).unwrap_or_default();
    let subject = spec.subject.as_ref().and_then(|s| ctx.stores.namespace(&s.namespace));
    let namespace = subject.map(|n| n.labels).unwrap_or_default();
    let device = plan.as_deref().and_then(readable).and_then(|plan| model(plan, &spec.device));
    // A dry run shows what its own policy's budget would say, though it does not bind yet.
    let own = policies.get(&spec.policy).filter(|_| spec.mode == Mode::DryRun);
    let binding = device
        .into_iter()
        .flat_map(|(product, partition)| policies.binding(&labels, product, partition, &namespace));
    // Of a device that its agent no longer reports, the policy that asks is what is known.
    let asking = policies.get(&spec.policy).filter(|_| device.is_none());
    Limits::strictest(binding.chain(own).chain(asking))
}

fn paused(
    ctx: &Context,
    incident: &GpuMemoryIncident,
    namespace: Option<&str>,
    pod: Option<&PodFacts>,
) -> Option<String> {
    ctx.paused(&incident.spec.node, namespace)
        .or_else(|| pod.filter(|p| p.paused).map(|p| format!("pod {}", p.name)))
}

/// Another act on the same pod or device: known here already, or recorded by an earlier leader.
fn rival(ctx: &Context, key: &Key, incident: &GpuMemoryIncident) -> Option<(String, Claim)> {
    let own = claim(incident);
    let recorded = ctx
        .stores
        .incidents(|other| {
            state(other) == Some(DecisionState::Verifying)
                && own.rival(&claim(other), "").is_some()
                && crate::context::key(&other.metadata) != *key
        })
        .into_iter()
        .map(|other| (other.metadata.name.clone().unwrap_or_default(), claim(&other)));
    let mut rivals: Vec<_> = ctx
        .claims
        .others(key)
        .into_iter()
        .filter(|(_, claim)| own.rival(claim, "").is_some())
        .chain(recorded)
        .collect();
    // The same pod is the stronger reason.
    rivals.sort_by_key(|(_, claim)| !matches!(own.rival(claim, ""), Some(Rival::Subject(_))));
    rivals.into_iter().next()
}

fn halted(ctx: &Context, incident: &GpuMemoryIncident, limits: &Limits) -> Option<String> {
    let wants_restart = |i: &GpuMemoryIncident| {
        i.spec.mode == Mode::Enforce
            && i.spec.proposed.action == ActionType::Restart
            && i.spec.subject.is_some()
            && matches!(i.spec.kind, IncidentKind::QuotaBreach | IncidentKind::Breaker)
    };
    if !wants_restart(incident) {
        return None;
    }
    let condemned: BTreeSet<String> =
        ctx.stores.incidents(|i| is_open(i) && wants_restart(i)).iter().map(|i| claim(i).device).collect();
    let plans = ctx.stores.plans.state();
    let devices = plans.iter().filter_map(|plan| Some(readable(plan)?.status.as_ref()?.devices.len())).sum();
    let halted = limits.fleet_halt(condemned.len(), devices);
    ctx.metrics.fleet_halted.set(i64::from(halted.is_some()));
    halted
}

/// Whether the disruption budget that refused the eviction before still refuses it. Asked without
/// acting, so that a long wait costs no tokens, no observations and no writes.
async fn blocked(ctx: &Context, scene: &Scene) -> Option<String> {
    let refused = scene.decision().filter(|d| d.reason == DISRUPTION_BUDGET && scene.refusal.is_none());
    let decision = refused?;
    let age = Timestamp::now().duration_since(decision.since.0);
    if age.unsigned_abs() < AFTER_REFUSAL {
        return Some(decision.message.clone());
    }
    match evict::evict(ctx, scene, evict::Run::Dry).await {
        Eviction::Budget(why) => Some(why),
        _ => None,
    }
}
