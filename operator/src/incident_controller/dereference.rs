//! The dereference step: everything that a decision looks at. One call, to read the pod; the rest
//! comes from stores.

use std::{collections::BTreeSet, sync::Arc};

use highwater_crds::{
    ActionType, Decision, DecisionState, GpuMemoryIncident, GpuMemoryNode, IncidentKind, Mode, Partition,
    names,
};
use highwater_policy::{
    budget::{Fleet, Limits},
    leak_acts,
    pod::{PodFacts, selects_namespace},
    remediation::{Asks, Carrier, Refusal, Rival, Turn, View, carrier},
    resolve::{Policies, Policy, Terms, leak_rule, terms},
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, runtime::reflector::ObjectRef};

use super::{budget, leaks, probe, workload};
use crate::{
    claims::Claim,
    context::{Context, Halt, Key, Known, is_open, state},
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
    /// Whether the act has its token already.
    pub(crate) token: bool,
    /// The leak that it is about, if it is.
    pub(super) leak: Option<leaks::Leak>,
    in_vain: Option<String>,
    asks: OwnedAsks,
    agent_away: Option<SignedDuration>,
    paused: Option<String>,
    rival: Option<OwnedRival>,
    halted: Option<String>,
    blocked: Option<String>,
}

enum OwnedAsks {
    Deleted,
    Nothing,
    Unknown,
    Act { terms: Terms, namespace_selected: bool },
}

/// Another incident whose act is in the way.
struct OwnedRival {
    name: String,
    /// Whether it has restarted the same pod.
    same_pod: bool,
}

/// None where the incident is gone, over, or cannot be read.
pub(crate) async fn dereference(ctx: &Context, key: &Key) -> Result<Option<Scene>, Error> {
    let Some(guard) = ctx.stores.incidents.get(&ObjectRef::new(&key.1).within(&key.0)) else {
        return Ok(None);
    };
    let newest = readable(&guard).map(|heard| ctx.written.newest(key, heard));
    let Some(incident) = newest.filter(is_open) else { return Ok(None) };
    let pod = read_pod(ctx, &incident).await?;
    let workload = pod.as_ref().and_then(|(_, facts)| workload::top_owner(&ctx.stores, facts));
    let mut scene = Scene {
        key: key.clone(),
        incident,
        pod,
        workload,
        limits: Limits::default(),
        refusal: None,
        token: false,
        leak: None,
        in_vain: None,
        asks: OwnedAsks::Unknown,
        agent_away: None,
        paused: None,
        rival: None,
        halted: None,
        blocked: None,
    };
    scene.look(ctx)?;
    if !scene.is_verifying() && scene.pod.is_some() {
        scene.blocked = probe::blocked(ctx, &scene).await;
    }
    Ok(Some(scene))
}

impl Scene {
    /// Looks at the incident and at everything around it again, without a call.
    pub(crate) fn look_again(&mut self, ctx: &Context) -> Result<(), Error> {
        let heard = ctx.stores.incidents.get(&ObjectRef::new(&self.key.1).within(&self.key.0));
        let heard = heard.as_deref().and_then(readable).ok_or(Error::Overtaken)?;
        self.incident = ctx.written.newest(&self.key, heard);
        self.look(ctx)
    }

    fn look(&mut self, ctx: &Context) -> Result<(), Error> {
        let known = Arc::clone(&ctx.known.borrow());
        let spec = &self.incident.spec;
        let namespace = spec.subject.as_ref().map(|s| s.namespace.as_str());
        let pod = self.pod.as_ref().map(|(_, facts)| facts);
        self.limits = limits(ctx, &self.incident, &known.policies);
        self.asks = what_is_asked(ctx, &self.incident, &known);
        self.agent_away = ctx.agent_away(&spec.node);
        self.paused = paused(ctx, &self.incident, namespace, pod);
        self.rival = rival(ctx, &self.key, &self.incident);
        self.halted = halted(ctx, &self.incident, &self.limits);
        self.leak = leaks::look(ctx, self, &known);
        if !self.is_verifying() && self.incident.spec.subject.is_some() {
            let budget::Standing { token, refusal, in_vain } = budget::look(ctx, self)?;
            (self.token, self.refusal, self.in_vain) = (token, refusal, in_vain);
        }
        Ok(())
    }

    /// Whether something that is known without a call keeps the act waiting.
    pub(super) fn waits_anyway(&self) -> bool {
        self.paused.is_some() || self.halted.is_some() || self.rival.is_some() || self.refusal.is_some()
    }

    pub(crate) fn decision(&self) -> Option<&Decision> {
        self.incident.status.as_ref()?.decision.as_ref()
    }

    /// The scene as the decision takes it.
    pub(crate) fn view(&self) -> View<'_> {
        let spec = &self.incident.spec;
        let asked = self.incident.metadata.annotations.as_ref().and_then(|a| a.get(names::OBSERVE));
        View {
            spec,
            decision: self.decision(),
            observation: self.incident.status.as_ref().and_then(|s| s.observation.as_ref()),
            asked: asked.and_then(|at| at.parse::<Timestamp>().ok()),
            pod: self.pod.as_ref().map(|(_, facts)| facts),
            evicted: self.pod.as_ref().is_some_and(|(pod, facts)| facts.terminating && was_evicted(pod)),
            token: self.token,
            agent_away: self.agent_away,
            grace_seconds: self
                .pod
                .as_ref()
                .and_then(|(pod, _)| pod.spec.as_ref()?.termination_grace_period_seconds),
            asks: match &self.asks {
                OwnedAsks::Deleted => Asks::Deleted,
                OwnedAsks::Nothing => Asks::Nothing,
                OwnedAsks::Unknown => Asks::Unknown,
                OwnedAsks::Act { terms, namespace_selected } => {
                    Asks::Act { owner_kinds: &terms.owner_kinds, namespace_selected: *namespace_selected }
                }
            },
            paused: self.paused.clone(),
            rival: self.rival.as_ref().map(|rival| {
                if rival.same_pod { Rival::Subject(&rival.name) } else { Rival::Device(&rival.name) }
            }),
            halted: self.halted.clone(),
            refusal: self.refusal.clone(),
            blocked: self.blocked.clone(),
            in_vain: self.in_vain.clone(),
            leak: self.leak.as_ref().map(|leak| leak.standing.clone()),
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
    Claim {
        device: format!("{}/{}", incident.spec.node, incident.spec.device),
        subject,
        gentle: incident.spec.proposed.action == ActionType::Unready,
    }
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
    let plan = known.plans.get(&spec.node);
    if plan.is_none() && still_stored && status.is_some() && ctx.stores.node(&spec.node).is_some() {
        // It cannot be read, or was not resolved yet. That may pass.
        return OwnedAsks::Unknown;
    }
    let act = (spec.kind, spec.proposed.action);
    let plan = plan.filter(|_| still_stored);
    let asked = plan.and_then(|plan| {
        if spec.kind == IncidentKind::Leak {
            // It is watched as long as the policy looks for leaks, whatever it does about them.
            return leak_rule(plan, spec.mode, &spec.policy, device).map(Terms::from);
        }
        terms(plan, spec.mode, &spec.policy, act, device)
    });
    let Some(terms) = asked else { return OwnedAsks::Nothing };
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
pub(super) fn model<'a>(node: &'a GpuMemoryNode, uuid: &str) -> Option<(&'a str, Partition)> {
    let status = node.status.as_ref()?;
    let device = status.devices.iter().find(|d| d.uuid == uuid)?;
    let model = status.models.get(usize::try_from(device.model).ok()?)?;
    Some((&model.product, model.partition))
}

/// The budgets of all policies that bind an act on the subject's device in its namespace.
pub(super) fn limits(ctx: &Context, incident: &GpuMemoryIncident, policies: &Policies) -> Limits {
    let spec = &incident.spec;
    let (plan, node) = (ctx.stores.plan(&spec.node), ctx.stores.node(&spec.node));
    let labels = node.and_then(|n| n.metadata.labels.clone()).unwrap_or_default();
    let subject = spec.subject.as_ref().and_then(|s| ctx.stores.namespace(&s.namespace));
    let namespace = subject.map(|n| n.labels).unwrap_or_default();
    let device = plan.as_deref().and_then(readable).and_then(|plan| model(plan, &spec.device));
    let mut binding: Vec<&Policy> = device
        .into_iter()
        .flat_map(|(product, partition)| policies.binding(&labels, product, partition, &namespace))
        .collect();
    // The policy that asks binds its own acts, whatever it selects by now. A dry run shows what it
    // would say.
    let asking = policies.get(&spec.policy).filter(|asking| binding.iter().all(|p| p.name != asking.name));
    binding.extend(asking);
    Limits::strictest(binding)
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

/// Another act on the same pod or device: known here already, or recorded, by this leader or an
/// earlier one. Who has the claim has passed this before and waits for no other approved act.
fn rival(ctx: &Context, key: &Key, incident: &GpuMemoryIncident) -> Option<OwnedRival> {
    let (own, own_turn, under_way) = (claim(incident), turn(incident), ctx.claims.holds(key));
    let recorded = ctx.stores.incidents(|other| {
        carrier(&other.spec.proposed) != Carrier::Drain
            && own.waits_for(&claim(other))
            && crate::context::key(&other.metadata) != *key
            && (state(other) == Some(DecisionState::Verifying)
                || (!under_way && own_turn.waits_for(&turn(other))))
    });
    let recorded = recorded.iter().map(|other| OwnedRival {
        name: other.metadata.name.clone().unwrap_or_default(),
        // One that is only approved may yet come to nothing, and only a restart is the same act.
        same_pod: claim(other).subject == own.subject
            && state(other) == Some(DecisionState::Verifying)
            && other.spec.proposed.action == ActionType::Restart,
    });
    let known = ctx.claims.others(key);
    let known = known
        .into_iter()
        .filter(|(_, claim)| own.waits_for(claim))
        .map(|(name, _)| OwnedRival { name, same_pod: false });
    // The same pod is the stronger reason.
    recorded.chain(known).max_by_key(|rival| rival.same_pod)
}

fn turn(incident: &GpuMemoryIncident) -> Turn<'_> {
    let decision = incident.status.as_ref().and_then(|s| s.decision.as_ref());
    Turn {
        state: decision.map(|d| d.state),
        since: decision.map_or(Timestamp::MAX, |d| d.since.0),
        uid: incident.metadata.uid.as_deref().unwrap_or_default(),
    }
}

pub(super) fn halted(ctx: &Context, incident: &GpuMemoryIncident, limits: &Limits) -> Option<String> {
    if !condemns(incident) {
        return None;
    }
    limits.fleet_halt(&fleet(ctx))
}

/// Shows whether the fleet stands still for the policy that halts it first; never so on a replica
/// that does not lead.
pub(crate) fn show_halt(ctx: &Context) {
    let limits = Limits::strictest(ctx.known.borrow().policies.enforced());
    let why = ctx.leader.holds().then(|| limits.fleet_halt(&fleet(ctx))).flatten();
    ctx.metrics.fleet_halted.set(i64::from(why.is_some()));
    let halt = why.zip(limits.halting()).map(|(why, policy)| Halt { policy: policy.to_owned(), why });
    let told = ctx.halted.send_if_modified(|known| {
        // The numbers change all the time, and are in the metrics.
        let changed = known.as_ref().map(|k| &k.policy) != halt.as_ref().map(|h| &h.policy);
        known.clone_from(&halt);
        changed
    });
    if told {
        ctx.signals.plans.notify_one();
    }
    let policy = halt.as_ref().and_then(|h| ctx.stores.policies.get(&ObjectRef::new(&h.policy)));
    if let (true, Some(halt), Some(policy)) = (told, halt, policy.as_deref().and_then(readable)) {
        ctx.events.fleet_halted(policy, &halt.why);
    }
}

/// How much of the fleet is condemned, and how large it is.
fn fleet(ctx: &Context) -> Fleet {
    let incidents = ctx.stores.incidents.state();
    let (mut devices, mut nodes) = (BTreeSet::new(), BTreeSet::new());
    for incident in incidents.iter().filter_map(|guard| readable(guard)).filter(|i| is_open(i) && condemns(i))
    {
        let spec = &incident.spec;
        if carrier(&spec.proposed) == Carrier::Drain {
            nodes.insert(spec.node.as_str());
        } else {
            devices.insert((spec.node.as_str(), spec.device.as_str()));
        }
    }
    let plans = ctx.stores.plans.state();
    let counts = plans.iter().filter_map(|plan| Some(readable(plan)?.status.as_ref()?.devices.len()));
    let (all_nodes, all_devices) =
        counts.filter(|n| *n > 0).fold((0, 0_usize), |(nodes, sum), n| (nodes + 1, sum.saturating_add(n)));
    Fleet {
        condemned_devices: devices.len(),
        devices: all_devices,
        condemned_nodes: nodes.len(),
        nodes: all_nodes,
    }
}

/// Whether somebody is to be acted on for good because of this incident: a pod, or a whole node.
fn condemns(incident: &GpuMemoryIncident) -> bool {
    let (spec, status) = (&incident.spec, incident.status.as_ref());
    let (observation, decision) =
        status.map_or((None, None), |s| (s.observation.as_ref(), s.decision.as_ref()));
    spec.mode == Mode::Enforce
        && (spec.kind != IncidentKind::Leak || leak_acts::is_due(spec, observation, decision))
        && match carrier(&spec.proposed) {
            Carrier::Eviction | Carrier::Agent => spec.subject.is_some(),
            Carrier::Drain => true,
            Carrier::Nobody => false,
        }
}
