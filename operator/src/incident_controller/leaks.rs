//! What is known of a leak beside what the agent found: what the policy says of it, and which other
//! pods of the workload leak. All of it comes from stores.

use std::collections::BTreeSet;

use highwater_crds::{
    ActionType, DecisionState, GpuMemoryIncident, GpuMemoryIncidentSpec, IncidentKind, LeakClass, Leaks,
    Mode, Observation, ObservationState,
};
use highwater_policy::{
    budget::leaks::{horizon, lead},
    leak_acts::{Standing, has_ticket, latest},
    leak_tickets::{Member, ticket},
    pod::PodFacts,
    resolve::leak_rule,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector::ObjectRef;

use super::{
    dereference::{Scene, model},
    workload::{self, Workload},
};
use crate::{
    context::{Context, Key, Known, is_open, key, state},
    watch::{REVISION, readable},
};

/// A leak as its incident's decision takes it.
#[derive(Clone, Debug)]
pub(super) struct Leak {
    pub(super) standing: Standing,
    /// How long ahead the policy looks.
    pub(super) horizon: SignedDuration,
    /// Slope in bytes an hour, by the agent's last finding.
    pub(super) slope: i64,
    /// Whether this incident tells of the ticket that it is on.
    pub(super) tells: bool,
}

/// What the policy of an incident says of leaks on its device now.
pub(super) fn rule<'a>(ctx: &Context, spec: &GpuMemoryIncidentSpec, known: &'a Known) -> Option<&'a Leaks> {
    let status = ctx.stores.plan(&spec.node);
    let device = status.as_deref().and_then(readable).and_then(|node| model(node, &spec.device));
    let plan = known.plans.get(&spec.node)?;
    leak_rule(plan, spec.mode, &spec.policy, device).map(|rule| &rule.value)
}

/// Everything about the leak of an incident of that kind.
pub(super) fn look(ctx: &Context, scene: &Scene, known: &Known) -> Option<Leak> {
    let incident = &scene.incident;
    let spec = &incident.spec;
    if spec.kind != IncidentKind::Leak {
        return None;
    }
    let rule = rule(ctx, spec, known);
    let (horizon, lead) = rule.map_or_else(
        || (horizon(&Leaks::default()), lead(&Leaks::default())),
        |leaks| (horizon(leaks), lead(leaks)),
    );
    let asks = |act| rule.is_some_and(|leaks| leaks.actions.iter().any(|action| action.type_ == act));
    let observation = incident.status.as_ref().and_then(|s| s.observation.as_ref());
    let slope = latest(spec, observation).map_or(0, |found| found.slope_bytes_per_hour.mid);
    let ticket = scene.workload.as_ref().and_then(|workload| {
        let uid = incident.metadata.uid.as_deref().unwrap_or_default();
        Some((ticket(&members(ctx, scene, workload), uid, horizon)?, workload))
    });
    Some(Leak {
        tells: ticket.as_ref().is_some_and(|(ticket, _)| ticket.tells),
        standing: Standing {
            lead,
            asked: asks(spec.proposed.action),
            hooks: asks(ActionType::Hook),
            ticket: ticket.map(|(ticket, workload)| ticket.sentence(&workload.to_string())),
        },
        horizon,
        slope,
    })
}

/// The open incidents about leaks of a workload's pods. The scene's own is as the scene has it.
fn members(ctx: &Context, scene: &Scene, workload: &Workload) -> Vec<Member> {
    let Some(subject) = &scene.incident.spec.subject else { return Vec::new() };
    let pods = workload::pods(&ctx.stores, &subject.namespace, workload);
    let others = ctx.stores.incidents(|other| {
        other.spec.kind == IncidentKind::Leak
            && other.spec.subject.as_ref().is_some_and(|s| s.namespace == subject.namespace)
            && key(&other.metadata) != scene.key
    });
    let others = others.into_iter().map(|other| ctx.written.newest(&key(&other.metadata), &other));
    let own = scene.pod.as_ref().and_then(|(pod, _)| member(&scene.incident, pod, workload, &pods));
    let others = others.filter(is_open).filter_map(|other| {
        let subject = other.spec.subject.as_ref()?;
        let pod = ctx.stores.pods.get(&ObjectRef::new(&subject.name).within(&subject.namespace))?;
        let top = workload::top_owner(&ctx.stores, &PodFacts::parse(&pod))?;
        (top == *workload).then(|| member(&other, &pod, workload, &pods))?
    });
    others.chain(own).collect()
}

/// What counts of one incident; `None` where its pod is gone or has recovered.
fn member(
    incident: &GpuMemoryIncident,
    pod: &Pod,
    workload: &Workload,
    pods: &[(String, Timestamp)],
) -> Option<Member> {
    let spec = &incident.spec;
    let subject = spec.subject.as_ref().filter(|s| Some(&s.uid) == pod.metadata.uid.as_ref())?;
    let status = incident.status.as_ref();
    let observation = status.and_then(|s| s.observation.as_ref());
    let ended = |o: &Observation| {
        matches!(o.state, ObservationState::Recovered | ObservationState::Gone)
            && o.at.0 >= spec.evidence.at.0
    };
    let found = latest(spec, observation).filter(|_| !observation.is_some_and(ended))?;
    let born = pod.metadata.creation_timestamp.as_ref()?.0;
    let revision = revision(pod, workload);
    Some(Member {
        incident: incident.metadata.uid.clone()?,
        pod: subject.uid.clone(),
        name: subject.name.clone(),
        node: spec.node.clone(),
        mode: spec.mode,
        memory: found.memory,
        class: found.class,
        slope: found.slope_bytes_per_hour.mid,
        since: spec.evidence.at.0,
        age: spec.evidence.at.0.duration_since(born),
        replaced: pods.iter().any(|(other, at)| *other != revision && *at > born),
        revision,
        ticketed: has_ticket(status.and_then(|s| s.decision.as_ref())),
        acting: matches!(state(incident), Some(DecisionState::Approved | DecisionState::Verifying)),
    })
}

/// What tells pods of a workload apart that were made from different templates: the revision that
/// their owner wrote on them, else their `ReplicaSet`, of which a Deployment has one for each. Other
/// owners in between say nothing of that: a `JobSet` has many Jobs of one template.
pub(super) fn revision(pod: &Pod, workload: &Workload) -> String {
    let meta = &pod.metadata;
    let written = meta.labels.as_ref().and_then(|labels| labels.get(REVISION)).cloned();
    let owner = || meta.owner_references.as_ref()?.iter().find(|o| o.controller == Some(true));
    let replica_set = || owner().filter(|owner| owner.kind == "ReplicaSet").map(|owner| owner.uid.clone());
    written.or_else(replica_set).unwrap_or_else(|| workload.uid().to_owned())
}

/// Looks at the other leaks of a workload when one of them has news: together they may be a ticket.
pub(crate) fn wake_siblings(ctx: &Context, incident: &GpuMemoryIncident) {
    let workload = |i: &GpuMemoryIncident| -> Option<(String, String)> {
        let decision = i.status.as_ref()?.decision.as_ref()?;
        Some((i.spec.subject.as_ref()?.namespace.clone(), decision.workload.clone()?))
    };
    let decision = |i: &GpuMemoryIncident| i.status.as_ref().and_then(|s| s.decision.clone());
    if incident.spec.kind != IncidentKind::Leak {
        return;
    }
    // What levels off is on no ticket with anybody; replicas whose caches fill are many.
    let observation = incident.status.as_ref().and_then(|s| s.observation.as_ref());
    if latest(&incident.spec, observation).is_some_and(|found| found.class == LeakClass::Saturating) {
        return;
    }
    let Some(own) = workload(incident) else { return };
    ctx.wake_incidents(|other| {
        other.spec.kind == IncidentKind::Leak
            && other.metadata.uid != incident.metadata.uid
            && !has_ticket(decision(other).as_ref())
            && workload(other).as_ref() == Some(&own)
    });
}

/// Shows how many workloads have a ticket because their pods leak alike; none on a replica that does
/// not lead.
pub(crate) fn show_tickets(ctx: &Context) {
    let on_ticket = |i: &GpuMemoryIncident| {
        i.spec.kind == IncidentKind::Leak
            && i.spec.mode == Mode::Enforce
            && has_ticket(i.status.as_ref().and_then(|s| s.decision.as_ref()))
    };
    let incidents = if ctx.leader.holds() { ctx.stores.incidents(on_ticket) } else { Vec::new() };
    let workloads: BTreeSet<Key> = incidents
        .into_iter()
        .filter_map(|i| Some((i.spec.subject?.namespace, i.status?.decision?.workload?)))
        .collect();
    ctx.metrics.leak_workload_tickets.set(i64::try_from(workloads.len()).unwrap_or(i64::MAX));
}

#[cfg(test)]
mod tests {
    use highwater_policy::pod::PodFacts;
    use k8s_openapi::api::batch::v1::Job;
    use kube::{core::PartialObjectMeta, runtime::watcher::Event};
    use serde_json::{Value, json};

    use super::*;
    use crate::context::Stores;

    fn owned(kind: &str, name: &str) -> Value {
        json!([{"apiVersion": "v1", "kind": kind, "name": name, "uid": format!("{name}-1"), "controller": true}])
    }

    fn pod(owner: &Value, labels: &Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"namespace": "team", "labels": labels,
            "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": owner}}))
        .unwrap()
    }

    #[test]
    fn a_revision_is_the_one_written_on_the_pod_else_its_replica_set_else_the_workload() {
        let (stores, _writers) = Stores::new();
        let of = |owner: &Value, labels: &Value| {
            let pod = pod(owner, labels);
            let workload = workload::top_owner(&stores, &PodFacts::parse(&pod)).unwrap();
            revision(&pod, &workload)
        };
        let replica_set = owned("ReplicaSet", "r");
        assert_eq!(of(&replica_set, &json!({})), "r-1");
        assert_eq!(of(&replica_set, &json!({"controller-revision-hash": "abc"})), "abc");
        assert_eq!(of(&owned("JobSet", "s"), &json!({})), "s-1");
    }

    #[test]
    fn the_jobs_of_a_job_set_are_of_one_template() {
        let (stores, mut writers) = Stores::new();
        for name in ["workers-0", "workers-1", "workers-2"] {
            let job: PartialObjectMeta<Job> = serde_json::from_value(json!({
                "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": "team",
                    "uid": format!("{name}-1"), "ownerReferences": owned("JobSet", "training")}}))
            .unwrap();
            writers.jobs.apply_watcher_event(&Event::Apply(job));
            let mut pod = pod(&owned("Job", name), &json!({}));
            pod.metadata.name = Some(name.into());
            writers.pods.apply_watcher_event(&Event::Apply(pod));
        }
        let facts = PodFacts::parse(&pod(&owned("Job", "workers-1"), &json!({})));
        let workload = workload::top_owner(&stores, &facts).unwrap();
        assert_eq!(workload.to_string(), "JobSet/training");
        let revisions: Vec<String> =
            workload::pods(&stores, "team", &workload).into_iter().map(|(revision, _)| revision).collect();
        assert_eq!(revisions, ["training-1"; 3]);
    }
}
