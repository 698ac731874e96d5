//! Taints of single devices, where a DRA driver publishes them: a `DeviceTaintRule` a device. Which
//! version of it the API server has, if any, is asked when it is first needed.

use std::collections::{BTreeMap, BTreeSet};

use highwater_crds::{
    GpuMemoryNodeSpec, GpuMemoryNodeStatus, Level,
    names::{PRESSURE_TAINT, TAINTED_NODE_LABEL, manager},
};
use highwater_policy::taint::{
    self, DraDevice, Published, TaintChange, changes_of_rules, desired_of_devices, rule_name, value_of,
};
use jiff::SignedDuration;
use k8s_openapi::api::{core::v1::Node, resource::v1::ResourceSlice};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::json;
use tokio::{
    sync::Mutex,
    time::{Duration, Instant},
};
use tracing::info;

use crate::{
    context::Context,
    error::{Error, call, code},
    uninstall,
};

/// The versions in which the rules may be served, newest first. Slices are `v1` wherever they are.
const VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1alpha3"];
/// How long it is believed that the API server has no such rules.
const BELIEVED: Duration = Duration::from_mins(10);
/// How often the rules are listed anew. One that leads no more may have set a rule since, by a request
/// that was under way: nothing else tells its successor of it.
pub(crate) const LIST_AGAIN: Duration = Duration::from_mins(1);
/// The longest value of a label.
const LABEL: usize = 63;

/// The rules of ours, as this replica knows them.
#[derive(Debug, Default)]
pub(crate) struct DeviceTaints(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// The kind as it is served (None: it is not), and when that was asked.
    kind: Option<(Option<ApiResource>, Instant)>,
    /// The values of their taints by name, by node. None: not listed yet.
    rules: Option<BTreeMap<String, BTreeMap<String, String>>>,
}

impl DeviceTaints {
    /// Forgets the rules: another replica may have changed them.
    pub(crate) async fn clear(&self) {
        self.0.lock().await.rules = None;
    }
}

/// Lists the rules anew, and has each node looked at whose rules are not what this replica thought.
pub(crate) async fn list_again(ctx: &Context) -> Result<(), Error> {
    ctx.leader.check()?;
    let mut known = ctx.device_taints.0.lock().await;
    let Some(resource) = kind(ctx, &mut known).await? else { return Ok(()) };
    let rules = list(&Api::all_with(ctx.client.clone(), &resource)).await?;
    let before = known.rules.take().unwrap_or_default();
    let nodes: BTreeSet<&String> = rules.keys().chain(before.keys()).collect();
    for node in nodes.into_iter().filter(|node| rules.get(*node) != before.get(*node)) {
        ctx.signals.nodes.add(node.clone());
    }
    known.rules = Some(rules);
    Ok(())
}

/// The devices of a node that can be tainted by themselves, of those of this status. `asked`: whether
/// any of them asks for it; if none does, nothing is looked up.
pub(crate) async fn published(
    ctx: &Context,
    node: &str,
    status: Option<&GpuMemoryNodeStatus>,
    asked: bool,
) -> Result<Published, Error> {
    let Some(status) = status.filter(|_| asked) else { return Ok(Published::new()) };
    if kind(ctx, &mut *ctx.device_taints.0.lock().await).await?.is_none() {
        return Ok(Published::new());
    }
    let api: Api<ResourceSlice> = Api::all(ctx.client.clone());
    let params = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let slices = match call("list a node's resource slices", api.list(&params)).await {
        Ok(slices) => slices.items,
        Err(Error::Api { source, .. }) if code(&source) == Some(404) => return Ok(Published::new()),
        Err(error) => return Err(error),
    };
    let uuids: Vec<&str> = status.devices.iter().map(|d| d.uuid.as_str()).collect();
    Ok(taint::published(&slices, &uuids))
}

/// Brings the rules of a node to what its devices ask for.
pub(crate) async fn reconcile(
    ctx: &Context,
    node: &Node,
    asks: Option<(&GpuMemoryNodeSpec, &GpuMemoryNodeStatus)>,
    published: &Published,
    paused: bool,
    agent_away: Option<SignedDuration>,
) -> Result<(), Error> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let desired: BTreeMap<&str, Level> =
        asks.map(|(plan, status)| desired_of_devices(plan, status, published)).unwrap_or_default();
    let mut known = ctx.device_taints.0.lock().await;
    let Some(resource) = kind(ctx, &mut known).await? else { return Ok(()) };
    let api: Api<DynamicObject> = Api::all_with(ctx.client.clone(), &resource);
    if known.rules.is_none() {
        known.rules = Some(list(&api).await?);
    }
    let rules = known.rules.get_or_insert_default().entry(name.to_owned()).or_default();
    let changes = changes_of_rules(rules, &desired, paused, agent_away);
    if changes.is_empty() {
        return Ok(());
    }
    if changes.iter().any(|(_, change)| *change != TaintChange::Remove) {
        uninstall::check(ctx).await?;
    }
    for (rule, change) in changes {
        ctx.leader.check()?;
        match change {
            TaintChange::Remove => {
                remove(&api, &rule).await?;
                rules.remove(&rule);
                let text = format!("removed the device taint {rule}");
                ctx.events.on_node(node, "DeviceUntainted", "Untaint", &text);
            }
            TaintChange::Set(level) => {
                let device = published.iter().find(|(uuid, _)| rule_name(uuid) == rule);
                let Some((uuid, device)) = device else { continue };
                if let Err(error) = set(&api, &resource, name, &rule, device, level).await {
                    // It may have been set all the same, and has to be known of to be removed.
                    known.rules = None;
                    return Err(error);
                }
                rules.insert(rule.clone(), value_of(level).to_owned());
                let text = format!(
                    "device {uuid} takes no new pods: it is at level {level:?} (DeviceTaintRule {rule})"
                );
                ctx.events.on_node(node, "DeviceTainted", "Taint", &text);
            }
        }
    }
    Ok(())
}

/// The kind as the API server has it. None: it has none.
async fn kind(ctx: &Context, known: &mut Known) -> Result<Option<ApiResource>, Error> {
    if let Some((kind, at)) = &known.kind
        && (kind.is_some() || at.elapsed() < BELIEVED)
    {
        return Ok(kind.clone());
    }
    let kind = served(&ctx.client).await?;
    known.kind = Some((kind.clone(), Instant::now()));
    Ok(kind)
}

/// Asks which version of the rules the API server has.
pub(crate) async fn served(client: &Client) -> Result<Option<ApiResource>, Error> {
    for version in VERSIONS {
        let group_version = format!("resource.k8s.io/{version}");
        let resources = client.list_api_group_resources(&group_version);
        match call("ask for the kinds of DRA", resources).await {
            Ok(list) if list.resources.iter().any(|r| r.name == "devicetaintrules") => {
                let kind = GroupVersionKind::gvk("resource.k8s.io", version, "DeviceTaintRule");
                return Ok(Some(ApiResource::from_gvk_with_plural(&kind, "devicetaintrules")));
            }
            Ok(_) => {}
            Err(Error::Api { source, .. }) if code(&source) == Some(404) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Our rules: the values of their taints by name, by node.
async fn list(api: &Api<DynamicObject>) -> Result<BTreeMap<String, BTreeMap<String, String>>, Error> {
    let ours = ListParams::default().labels(TAINTED_NODE_LABEL);
    let mut rules: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for rule in call("list the device taints", api.list(&ours)).await?.items {
        let node = rule.annotations().get(TAINTED_NODE_LABEL).cloned().unwrap_or_default();
        let value = rule.data.pointer("/spec/taint/value").and_then(|v| v.as_str()).unwrap_or_default();
        rules.entry(node).or_default().insert(rule.name_any(), value.to_owned());
    }
    Ok(rules)
}

/// Names of the rules that are ours.
pub(crate) async fn ours(client: &Client) -> Result<Vec<(ApiResource, String)>, Error> {
    let Some(resource) = served(client).await? else { return Ok(Vec::new()) };
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let names = list(&api).await?.into_values().flat_map(BTreeMap::into_keys);
    Ok(names.map(|name| (resource.clone(), name)).collect())
}

/// Removes a rule.
pub(crate) async fn remove(api: &Api<DynamicObject>, rule: &str) -> Result<(), Error> {
    match call("remove a device taint", api.delete(rule, &DeleteParams::default())).await {
        Err(Error::Api { source, .. }) if code(&source) == Some(404) => {}
        removed => drop(removed?),
    }
    info!(rule, "removed a device taint");
    Ok(())
}

async fn set(
    api: &Api<DynamicObject>,
    resource: &ApiResource,
    node: &str,
    rule: &str,
    device: &DraDevice,
    level: Level,
) -> Result<(), Error> {
    let label = if node.len() <= LABEL { node } else { "" };
    let object = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {
            "name": rule,
            "labels": {TAINTED_NODE_LABEL: label, "app.kubernetes.io/managed-by": "highwater-operator"},
            "annotations": {TAINTED_NODE_LABEL: node},
        },
        "spec": {
            // All three: a selector that leaves one out matches more than this device.
            "deviceSelector": {"driver": device.driver, "pool": device.pool, "device": device.device},
            "taint": {"key": PRESSURE_TAINT, "value": value_of(level), "effect": "NoSchedule"},
        },
    });
    let params = PatchParams::apply(manager::OPERATOR_DEVICE_TAINT).force();
    call("taint a device", api.patch(rule, &params, &Patch::Apply(object))).await?;
    info!(node, rule, ?level, "tainted a device");
    Ok(())
}
