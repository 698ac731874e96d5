//! Where there is room for what has to leave a node: what the nodes last reported, whether their own
//! Leases are fresh, and what is still free there to be scheduled.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use highwater_crds::{
    Breaker, BreakerScope, GpuMemoryIncident, GpuMemoryNode, GpuMemoryNodeSpec, HeadroomBand, Mode,
};
use highwater_policy::{
    drain::{bytes_a_pod, gpus},
    node_status::MONITORED,
    redirect::{Decision, Demand, Device, Target, clear_mark, decide, explain_scores},
};
use jiff::Timestamp;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Pod, Taint},
};
use kube::{Api, api::ListParams};
use tokio::{
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::{
    context::Context,
    error::{Error, call},
    node_controller::cordon,
    watch::readable,
};

/// Namespace of the nodes' own Leases.
const LEASES: &str = "kube-node-lease";
/// How many Leases are asked for at once.
const PAGE: u32 = 1000;
/// For how long an answer about the Leases is good: several drains ask at once.
const GOOD_FOR: Duration = Duration::from_secs(5);
/// Most targets that an incident names.
const NAMED: usize = 8;
/// Taint that stands for a cordon, which is looked at apart.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// From so many devices on a node's report may leave out numbers of pods.
const MANY_DEVICES: usize = 16;

/// How old the nodes' own Leases were when they were last asked for.
#[derive(Debug, Default)]
pub(crate) struct Leases(Mutex<Option<(Instant, Ages)>>);

/// How long ago each node's Lease was renewed, in milliseconds.
type Ages = HashMap<String, u64>;

/// Where there is room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Room {
    /// Names of the nodes.
    pub(super) targets: Vec<String>,
    /// Where the scores of their hosts decided, in words.
    pub(super) weighed: Option<String>,
}

/// Finds a node for each of the pods; else why there is none.
pub(super) async fn find(
    ctx: &Context,
    incident: &GpuMemoryIncident,
    source: Option<&Node>,
    moving: &[Pod],
) -> Result<Result<Room, String>, Error> {
    let bytes = bytes_a_pod(&incident.spec);
    let demands: Vec<Demand<'_>> = moving
        .iter()
        .map(|pod| Demand { bytes, devices: gpus(pod).map_or(1, |(_, count)| count), products: &[] })
        .collect();
    if demands.is_empty() {
        return Ok(Ok(Room::default()));
    }
    let leases = lease_ages(ctx).await?;
    let known = std::sync::Arc::clone(&ctx.known.borrow());
    let agents = ctx.nodes_with_agent();
    let (resource, taken) = (one_resource(moving), taken(ctx));
    let nodes = ctx.stores.nodes.state();
    let reports = ctx.stores.plans.state();
    let reports: HashMap<&str, &GpuMemoryNode> = reports
        .iter()
        .filter_map(|guard| readable(guard))
        .filter_map(|report| Some((report.metadata.name.as_deref()?, report)))
        .collect();
    let candidates: Vec<(&str, &Node, Vec<Device<'_>>, &GpuMemoryNode)> = nodes
        .iter()
        .filter_map(|node| Some((node.metadata.name.as_deref()?, node.as_ref())))
        .filter(|(name, node)| *name != incident.spec.node && is_selected(node, moving))
        .filter_map(|(name, node)| {
            let report = reports.get(name)?;
            let plan = known.plans.get(name).map(AsRef::as_ref);
            Some((name, node, devices(report, plan), *report))
        })
        .collect();
    let tolerated: Vec<&Taint> = source.into_iter().flat_map(taints).collect();
    let targets: Vec<Target<'_>> = candidates
        .iter()
        .map(|(name, node, devices, report)| Target {
            name,
            ready: is_monitored(report) && agents.contains(*name),
            lease_age: leases.get(*name).copied(),
            tainted: taints(node).any(|taint| keeps_away(taint, &tolerated)),
            cordoned: cordon::is_cordoned(node),
            slots: resource.map(|resource| free(node, resource, &taken)),
            // An agent that is older than this says nothing of its host.
            host: report.status.as_ref().and_then(|status| status.host),
            devices,
        })
        .collect();
    let source_percent = incident.spec.evidence.level_percent.unwrap_or(100);
    Ok(match decide(&demands, source_percent, &targets) {
        Decision::Targets(places) => {
            let weighed = explain_scores(&demands, source_percent, &targets, &places);
            let names: BTreeSet<&str> =
                places.into_iter().filter_map(|place| targets.get(place)).map(|target| target.name).collect();
            Ok(Room { targets: names.into_iter().take(NAMED).map(str::to_owned).collect(), weighed })
        }
        Decision::NoTarget(place, survey) => {
            let demand = demands.get(place).copied();
            Err(demand.map(|demand| survey.explain(&demand)).unwrap_or_default())
        }
    })
}

/// How long ago the nodes' own Leases were renewed, in milliseconds. A node that is off renews none,
/// whatever its last report says.
async fn lease_ages(ctx: &Context) -> Result<Ages, Error> {
    let mut last = ctx.leases.0.lock().await;
    if let Some((asked, ages)) = last.as_ref().filter(|(asked, _)| asked.elapsed() < GOOD_FOR) {
        let since = u64::try_from(asked.elapsed().as_millis()).unwrap_or(u64::MAX);
        return Ok(ages.iter().map(|(node, age)| (node.clone(), age.saturating_add(since))).collect());
    }
    let ages = ask_for_leases(ctx).await?;
    *last = Some((Instant::now(), ages.clone()));
    Ok(ages)
}

async fn ask_for_leases(ctx: &Context) -> Result<Ages, Error> {
    let api: Api<Lease> = Api::namespaced(ctx.client.clone(), LEASES);
    let mut params = ListParams::default().limit(PAGE);
    let mut ages = Ages::new();
    loop {
        let page = call("list the leases of the nodes", api.list(&params)).await?;
        let now = Timestamp::now();
        ages.extend(page.items.into_iter().filter_map(|lease| {
            let renewed = lease.spec?.renew_time?.0;
            let age = now.duration_since(renewed).as_millis().max(0);
            Some((lease.metadata.name?, u64::try_from(age).unwrap_or(u64::MAX)))
        }));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(ages),
        }
    }
}

/// Whether every one of the pods may be scheduled on a node by its selector.
fn is_selected(node: &Node, moving: &[Pod]) -> bool {
    let empty = BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&empty);
    let wanted = moving.iter().filter_map(|pod| pod.spec.as_ref()?.node_selector.as_ref()).flatten();
    wanted.into_iter().all(|(key, value)| labels.get(key) == Some(value))
}

fn taints(node: &Node) -> impl Iterator<Item = &Taint> {
    let taints = node.spec.as_ref().and_then(|s| s.taints.as_ref());
    taints.into_iter().flatten().filter(|taint| taint.key != UNSCHEDULABLE)
}

/// Whether a taint keeps the pods away. Those that their present node has too, they tolerate.
fn keeps_away(taint: &Taint, tolerated: &[&Taint]) -> bool {
    let ours = taint.key == highwater_crds::names::PRESSURE_TAINT;
    let same = |t: &&&Taint| (&t.key, &t.value, &t.effect) == (&taint.key, &taint.value, &taint.effect);
    taint.effect != "PreferNoSchedule" && (ours || !tolerated.iter().any(|t| same(&t)))
}

fn is_monitored(report: &GpuMemoryNode) -> bool {
    let conditions = report.status.iter().flat_map(|s| &s.conditions);
    conditions.into_iter().any(|c| c.type_ == MONITORED && c.status == "True")
}

/// The devices of a node as redirection takes them.
fn devices<'a>(report: &'a GpuMemoryNode, plan: Option<&GpuMemoryNodeSpec>) -> Vec<Device<'a>> {
    let Some(status) = &report.status else { return Vec::new() };
    let told = status.devices.len() <= MANY_DEVICES;
    let device = |device: &'a highwater_crds::DeviceStatus| {
        let model = status.models.get(usize::try_from(device.model).ok()?)?;
        Some(Device {
            product: &model.product,
            partition: model.partition,
            memory: model.memory.map(|memory| memory.0),
            band: device.headroom,
            empty: told && device.pods == 0 && device.headroom == HeadroomBand::Below60,
            usable: device.fault.is_none() && device.freeze.is_none(),
            clear_percent: breaker(plan, &model.product, model.partition).and_then(clear_mark),
        })
    };
    status.devices.iter().filter_map(device).collect()
}

/// The breaker that holds for devices of this kind by a node's plan.
fn breaker<'a>(
    plan: Option<&'a GpuMemoryNodeSpec>,
    product: &str,
    partition: highwater_crds::Partition,
) -> Option<&'a Breaker> {
    let layer = plan?.layers.iter().find(|layer| layer.mode == Mode::Enforce)?;
    let rule = layer.rules.iter().find(|r| r.product == product && r.partition == partition)?;
    rule.breakers.iter().map(|b| &b.value).find(|breaker| breaker.scope == BreakerScope::Device)
}

/// The resource that all of the pods ask for, if it is one.
fn one_resource(moving: &[Pod]) -> Option<&str> {
    let mut names = moving.iter().map(|pod| gpus(pod).map(|(name, _)| name));
    let first = names.next()??;
    names.all(|name| name == Some(first)).then_some(first)
}

/// How many of each GPU resource the pods on each node have.
fn taken(ctx: &Context) -> HashMap<(String, String), u32> {
    let mut taken: HashMap<(String, String), u32> = HashMap::new();
    for pod in ctx.stores.pods.state() {
        let finished = pod.status.as_ref().and_then(|s| s.phase.as_deref());
        let Some((name, count)) = gpus(&pod) else { continue };
        if matches!(finished, Some("Succeeded" | "Failed")) {
            continue;
        }
        let Some(node) = pod.spec.as_ref().and_then(|s| s.node_name.clone()) else { continue };
        let sum = taken.entry((node, name.to_owned())).or_default();
        *sum = sum.saturating_add(count);
    }
    taken
}

/// How many more of a resource pods may have on a node.
fn free(node: &Node, resource: &str, taken: &HashMap<(String, String), u32>) -> u32 {
    let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref()?.get(resource));
    let all = allocatable.and_then(|quantity| quantity.0.parse::<u32>().ok()).unwrap_or(0);
    let name = node.metadata.name.clone().unwrap_or_default();
    all.saturating_sub(taken.get(&(name, resource.to_owned())).copied().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn taint(key: &str, effect: &str) -> Taint {
        Taint { key: key.into(), effect: effect.into(), ..Taint::default() }
    }

    #[test]
    fn a_taint_that_their_node_has_too_keeps_nobody_away_but_ours_does() {
        let gpu = taint("nvidia.com/gpu", "NoSchedule");
        let pressure = taint("highwater.dev/memory-pressure", "NoSchedule");
        let here = [&gpu, &pressure];
        assert!(!keeps_away(&gpu, &here));
        assert!(keeps_away(&pressure, &here));
        assert!(keeps_away(&taint("other", "NoExecute"), &here));
        assert!(!keeps_away(&taint("other", "PreferNoSchedule"), &here));
    }

    fn pod(limits: &Value, selector: &Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {
            "nodeSelector": selector, "containers": [{"name": "c", "resources": {"limits": limits}}]}}))
        .unwrap()
    }

    #[test]
    fn a_node_must_be_selected_by_every_pod_and_have_devices_left() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n2", "labels": {"pool": "a"}},
            "status": {"allocatable": {"nvidia.com/gpu": "4"}}}))
        .unwrap();
        let fits = pod(&json!({"nvidia.com/gpu": "2"}), &json!({"pool": "a"}));
        let elsewhere = pod(&json!({"nvidia.com/gpu": "1"}), &json!({"pool": "b"}));
        assert!(is_selected(&node, std::slice::from_ref(&fits)));
        assert!(!is_selected(&node, &[fits.clone(), elsewhere.clone()]));
        assert_eq!(one_resource(&[fits.clone(), elsewhere]), Some("nvidia.com/gpu"));
        let mig = pod(&json!({"nvidia.com/mig-1g.18gb": "1"}), &json!({}));
        assert_eq!(one_resource(&[fits, mig]), None);
        let taken = HashMap::from([(("n2".to_owned(), "nvidia.com/gpu".to_owned()), 3)]);
        assert_eq!(free(&node, "nvidia.com/gpu", &taken), 1);
        assert_eq!(free(&node, "nvidia.com/mig-1g.18gb", &taken), 0);
    }
}
