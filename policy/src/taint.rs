//! Whether a node, or single devices of it, ought to be tainted, from its plan and from what its
//! agent reports.
//!
//! A device that a DRA driver publishes is tainted by itself. The taint of the node is for the others.

use std::collections::BTreeMap;

use highwater_crds::{DeviceFault, DeviceStatus, Freeze, GpuMemoryNodeSpec, GpuMemoryNodeStatus, Level};
use jiff::SignedDuration;
use k8s_openapi::api::resource::v1::ResourceSlice;

use crate::resolve::may_freeze;

/// What to do about our taint on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaintChange {
    /// Set it, with this level as its value.
    Set(Level),
    /// Take it away.
    Remove,
}

/// How long a node may be without a Ready agent before what its agent last asked for is void.
/// Longer than an agent takes to be replaced.
pub const AGENT_GONE: SignedDuration = SignedDuration::from_secs(60);

/// What to do, where `present` is the value of our taint on the node now. While acts are paused
/// nothing is set, but what need not be there still goes. `agent_away` is how long the node has
/// had no Ready agent: nobody vouches then for what it last asked, so that nothing is set, and
/// after [`AGENT_GONE`] the taint goes.
pub fn change(
    present: Option<&str>,
    desired: Option<Level>,
    paused: bool,
    agent_away: Option<SignedDuration>,
) -> Option<TaintChange> {
    let desired = desired.filter(|_| agent_away.is_none_or(|away| away < AGENT_GONE));
    let paused = paused || agent_away.is_some();
    match (present, desired) {
        (None, None) => None,
        (Some(_), None) => Some(TaintChange::Remove),
        (value, Some(level)) if value == Some(value_of(level)) || paused => None,
        (_, Some(level)) => Some(TaintChange::Set(level)),
    }
}

/// The level for the node's taint, or None where nothing asks for one: one device whose policy
/// says `AnyDevice`, or every device that works. What the agent last reported counts only as long
/// as the plan still has a breaker that may freeze that device. A device that is `published` has a
/// taint of its own, and no say here.
pub fn desired(
    plan: &GpuMemoryNodeSpec,
    status: &GpuMemoryNodeStatus,
    published: &Published,
) -> Option<Level> {
    let asks: Vec<(Option<Freeze>, Level)> = status
        .devices
        .iter()
        .filter(|d| d.fault != Some(DeviceFault::Lost) && !published.contains_key(&d.uuid))
        .map(|device| (freeze(plan, status, device), device.level))
        .collect();
    let wanted = asks.iter().any(|(freeze, _)| *freeze == Some(Freeze::AnyDevice))
        || asks.iter().all(|(freeze, _)| freeze.is_some());
    let highest = asks.iter().filter(|(freeze, _)| freeze.is_some()).map(|(_, level)| *level).max();
    highest.filter(|_| wanted)
}

/// Whether any device asks for Freeze, so that it matters which of them are published.
pub fn any_asks(plan: &GpuMemoryNodeSpec, status: &GpuMemoryNodeStatus) -> bool {
    status.devices.iter().any(|device| freeze(plan, status, device).is_some())
}

/// The level for the taint of each published device that asks for one, by UUID.
pub fn desired_of_devices<'a>(
    plan: &GpuMemoryNodeSpec,
    status: &'a GpuMemoryNodeStatus,
    published: &Published,
) -> BTreeMap<&'a str, Level> {
    status
        .devices
        .iter()
        .filter(|d| published.contains_key(&d.uuid) && freeze(plan, status, d).is_some())
        .map(|d| (d.uuid.as_str(), d.level))
        .collect()
}

/// What a device asks for, as long as the plan lets it.
fn freeze(plan: &GpuMemoryNodeSpec, status: &GpuMemoryNodeStatus, device: &DeviceStatus) -> Option<Freeze> {
    let model = usize::try_from(device.model).ok().and_then(|i| status.models.get(i));
    device.freeze.filter(|_| model.is_some_and(|m| may_freeze(plan, &m.product, m.partition)))
}

/// The devices of a node that a DRA driver publishes, by UUID.
pub type Published = BTreeMap<String, DraDevice>;

/// How DRA names a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraDevice {
    /// The driver.
    pub driver: String,
    /// Its pool.
    pub pool: String,
    /// The device in the pool.
    pub device: String,
}

/// The devices of these UUIDs that the slices publish: a device is known by an attribute, of
/// whatever name, that is its UUID. Slices of an earlier generation of their pool are void.
pub fn published(slices: &[ResourceSlice], uuids: &[&str]) -> Published {
    let newest = |slice: &ResourceSlice| {
        let same = |other: &&ResourceSlice| {
            (&other.spec.driver, &other.spec.pool.name) == (&slice.spec.driver, &slice.spec.pool.name)
        };
        let generations = slices.iter().filter(same).map(|other| other.spec.pool.generation);
        generations.max().is_none_or(|newest| slice.spec.pool.generation >= newest)
    };
    let mut found = Published::new();
    for slice in slices.iter().filter(|slice| newest(slice)) {
        for device in slice.spec.devices.iter().flatten() {
            let values =
                device.attributes.iter().flat_map(BTreeMap::values).filter_map(|v| v.string.as_ref());
            for uuid in values.filter(|value| uuids.contains(&value.as_str())) {
                let dra = DraDevice {
                    driver: slice.spec.driver.clone(),
                    pool: slice.spec.pool.name.clone(),
                    device: device.name.clone(),
                };
                found.insert(uuid.clone(), dra);
            }
        }
    }
    found
}

/// Name of the rule that taints a device.
pub fn rule_name(uuid: &str) -> String {
    let name: String =
        uuid.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect();
    format!("highwater-{}", name.trim_matches('-'))
}

/// What to do about the rules of a node, by name: `present` are those there are with the value of
/// their taint, `desired` what each device asks for, by UUID. As [`change`] does for a node.
pub fn changes_of_rules(
    present: &BTreeMap<String, String>,
    desired: &BTreeMap<&str, Level>,
    paused: bool,
    agent_away: Option<SignedDuration>,
) -> Vec<(String, TaintChange)> {
    let wanted: BTreeMap<String, Level> =
        desired.iter().map(|(uuid, level)| (rule_name(uuid), *level)).collect();
    let mut names: Vec<&String> = present.keys().chain(wanted.keys()).collect();
    names.sort_unstable();
    names.dedup();
    names
        .into_iter()
        .filter_map(|name| {
            let value = present.get(name).map(String::as_str);
            let change = change(value, wanted.get(name).copied(), paused, agent_away)?;
            Some((name.clone(), change))
        })
        .collect()
}

/// The value of the taint for a level.
pub fn value_of(level: Level) -> &'static str {
    match level {
        Level::Normal => "Normal",
        Level::Warning => "Warning",
        Level::Critical => "Critical",
        Level::Emergency => "Emergency",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn plan(mode: &str) -> GpuMemoryNodeSpec {
        serde_json::from_value(json!({"layers": [{"mode": mode, "rules": [{
            "product": "G", "partition": "Whole", "breakers": [{"policy": "p", "ownerKinds": [],
                "value": {"scope": "Device", "critical": {"tripPercent": 88, "clearPercent": 84,
                    "actions": [{"type": "Freeze"}]}}}]}]}]}))
        .unwrap()
    }

    fn status(devices: &[(Option<&str>, Option<&str>)]) -> GpuMemoryNodeStatus {
        let devices: Vec<Value> = devices
            .iter()
            .map(|(freeze, fault)| {
                json!({"uuid": "u", "model": 0, "level": if freeze.is_some() { "Critical" } else { "Normal" },
                       "headroom": "Full", "strength": "Observe", "pods": 1, "freeze": freeze, "fault": fault})
            })
            .collect();
        serde_json::from_value(
            json!({"models": [{"product": "G", "partition": "Whole"}], "devices": devices}),
        )
        .unwrap()
    }

    fn of_node(plan: &GpuMemoryNodeSpec, status: &GpuMemoryNodeStatus) -> Option<Level> {
        desired(plan, status, &Published::new())
    }

    /// A status of two devices, `GPU-A` and `GPU-B`.
    fn two(a: Option<&str>, b: Option<&str>) -> GpuMemoryNodeStatus {
        let mut status = status(&[(a, None), (b, None)]);
        for (device, uuid) in status.devices.iter_mut().zip(["GPU-A", "GPU-B"]) {
            device.uuid = uuid.to_owned();
        }
        status
    }

    fn slice(generation: i64, devices: &[(&str, &str)]) -> ResourceSlice {
        let devices: Vec<Value> = devices
            .iter()
            .map(|(name, uuid)| json!({"name": name, "attributes": {"uuid": {"string": uuid}, "index": {"int": 0}}}))
            .collect();
        serde_json::from_value(json!({"metadata": {"name": "s"}, "spec": {"driver": "gpu.nvidia.com",
            "pool": {"name": "n1", "generation": generation, "resourceSliceCount": 1}, "devices": devices}}))
        .unwrap()
    }

    #[test]
    fn a_published_device_is_tainted_by_itself_and_has_no_say_about_its_node() {
        let (plan, uuids) = (plan("Enforce"), ["GPU-A", "GPU-B"]);
        let all = published(&[slice(1, &[("gpu-0", "GPU-A"), ("gpu-1", "GPU-B")])], &uuids);
        assert_eq!(all["GPU-B"].device, "gpu-1");
        let state = two(Some("AnyDevice"), None);
        assert_eq!(desired(&plan, &state, &all), None);
        assert_eq!(desired_of_devices(&plan, &state, &all), [("GPU-A", Level::Critical)].into());
        let one = published(&[slice(1, &[("gpu-0", "GPU-A")])], &uuids);
        assert_eq!(desired(&plan, &two(None, Some("AllDevices")), &one), Some(Level::Critical));
        assert!(any_asks(&plan, &state) && !any_asks(&plan, &two(None, None)));
        assert!(!any_asks(&GpuMemoryNodeSpec::default(), &state), "no policy asks (any more)");
    }

    #[test]
    fn slices_of_an_earlier_generation_are_void() {
        let slices = [slice(1, &[("old", "GPU-A"), ("gone", "GPU-B")]), slice(2, &[("new", "GPU-A")])];
        let found = published(&slices, &["GPU-A", "GPU-B"]);
        assert_eq!(found["GPU-A"].device, "new");
        assert!(!found.contains_key("GPU-B"));
    }

    #[test]
    fn rules_come_and_go_as_the_taint_of_a_node_does() {
        assert_eq!(rule_name("MIG-1/2:ab"), "highwater-mig-1-2-ab");
        let present = BTreeMap::from([("highwater-gpu-b".to_owned(), "Critical".to_owned())]);
        let asks = BTreeMap::from([("GPU-A", Level::Critical)]);
        let (set, remove) = (
            ("highwater-gpu-a".to_owned(), TaintChange::Set(Level::Critical)),
            ("highwater-gpu-b".to_owned(), TaintChange::Remove),
        );
        assert_eq!(changes_of_rules(&present, &asks, false, None), [set, remove.clone()]);
        assert_eq!(changes_of_rules(&present, &asks, true, None), [remove], "paused sets nothing");
        assert_eq!(changes_of_rules(&BTreeMap::new(), &BTreeMap::new(), false, None), []);
        let kept = BTreeMap::from([("GPU-B", Level::Critical)]);
        assert_eq!(changes_of_rules(&present, &kept, false, None), []);
        let away = Some(AGENT_GONE);
        assert_eq!(changes_of_rules(&present, &kept, false, away).len(), 1, "nobody vouches for it");
    }

    #[test]
    fn one_device_is_enough_only_where_the_policy_says_so() {
        let enforced = plan("Enforce");
        assert_eq!(
            of_node(&enforced, &status(&[(Some("AnyDevice"), None), (None, None)])),
            Some(Level::Critical)
        );
        assert_eq!(of_node(&enforced, &status(&[(Some("AllDevices"), None), (None, None)])), None);
        let both = status(&[(Some("AllDevices"), None), (Some("AllDevices"), None)]);
        assert_eq!(of_node(&enforced, &both), Some(Level::Critical));
        assert_eq!(of_node(&enforced, &status(&[])), None);
    }

    #[test]
    fn a_lost_device_does_not_keep_the_others_from_freezing() {
        let state = status(&[(Some("AllDevices"), None), (None, Some("Lost"))]);
        assert_eq!(of_node(&plan("Enforce"), &state), Some(Level::Critical));
    }

    #[test]
    fn without_an_enforced_breaker_a_stale_report_asks_for_nothing() {
        let state = status(&[(Some("AnyDevice"), None)]);
        assert_eq!(of_node(&plan("DryRun"), &state), None);
        assert_eq!(of_node(&GpuMemoryNodeSpec::default(), &state), None);
    }

    #[test]
    fn paused_sets_nothing_and_still_removes() {
        assert_eq!(change(None, Some(Level::Critical), true, None), None);
        assert_eq!(change(Some("Critical"), Some(Level::Emergency), true, None), None);
        assert_eq!(change(Some("Critical"), None, true, None), Some(TaintChange::Remove));
        assert_eq!(change(Some("Critical"), Some(Level::Critical), false, None), None);
        assert_eq!(change(None, Some(Level::Critical), false, None), Some(TaintChange::Set(Level::Critical)));
    }

    #[test]
    fn without_an_agent_nothing_is_set_and_what_is_set_goes_after_a_while() {
        let away = |seconds| Some(SignedDuration::from_secs(seconds));
        assert_eq!(change(None, Some(Level::Critical), false, away(1)), None);
        assert_eq!(change(Some("Critical"), Some(Level::Critical), false, away(59)), None);
        assert_eq!(
            change(Some("Critical"), Some(Level::Critical), false, away(60)),
            Some(TaintChange::Remove)
        );
        assert_eq!(change(None, Some(Level::Critical), false, away(60)), None);
    }
}
