//! The status of a node's `GpuMemoryNode`, made of what its agent knows.
//!
//! It changes seldom: no live bytes, levels and bands with hysteresis, and counts.

use std::collections::BTreeMap;

use highwater_crds::{
    ByteSize, DeviceFault, DeviceModel, DeviceStatus, Freeze, GpuMemoryNodeStatus, HeadroomBand, Level,
    Partition, Strength, TopPod,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::ledger::Share;

/// The most pods that a status names.
pub const TOP_PODS: usize = 4;

/// Condition: every device is being measured.
pub const MONITORED: &str = "Monitored";
/// Condition: something here needs a person.
pub const ATTENTION: &str = "Attention";

/// What an agent knows of its node.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Generation of the plan that it follows.
    pub observed_generation: Option<i64>,
    /// Version of the agent.
    pub agent_version: String,
    /// Version of the driver.
    pub driver_version: Option<String>,
    /// Whether it measures at all.
    pub watch: Watch,
    /// The devices in the driver's order.
    pub devices: Vec<DeviceFacts>,
    /// Pods over their due with the bytes that they are over.
    pub over: Vec<(u64, TopPod)>,
}

/// Whether the agent measures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Watch {
    /// It does.
    #[default]
    On,
    /// It was told to let go of the devices, and something keeps it from that: what.
    StandingDown(String),
    /// It was told to let go of the devices, and did.
    StandDown,
    /// The driver could not be opened: why.
    NoDriver(String),
}

/// What an agent knows of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// UUID.
    pub uuid: String,
    /// Short name on the node, such as `0` or `0/7`.
    pub label: String,
    /// Product, partition and size.
    pub model: DeviceModel,
    /// Level of the breaker that counts.
    pub level: Level,
    /// How full it is; from [`band`].
    pub headroom: HeadroomBand,
    /// The weakest enforcement that holds for a pod here.
    pub strength: Strength,
    /// Pods that use it.
    pub pods: usize,
    /// Pods over their due.
    pub over: usize,
    /// Why it is not, or not wholly, measured.
    pub fault: Option<DeviceFault>,
    /// What its enforced breaker asks of the node.
    pub freeze: Option<Freeze>,
    /// Memory of dead processes stays allocated.
    pub zombie: bool,
    /// Much memory is in use that no process explains; the text says whose it may be.
    pub unexplained: Option<String>,
}

/// The status that follows from the facts. Conditions that stand as before keep their time.
pub fn status(facts: &Facts, previous: Option<&GpuMemoryNodeStatus>, now: Timestamp) -> GpuMemoryNodeStatus {
    let mut models: Vec<DeviceModel> = Vec::new();
    let mut devices = Vec::with_capacity(facts.devices.len());
    for device in &facts.devices {
        let model = models.iter().position(|m| *m == device.model).unwrap_or_else(|| {
            models.push(device.model.clone());
            models.len() - 1
        });
        devices.push(DeviceStatus {
            uuid: device.uuid.clone(),
            model: count(model),
            level: device.level,
            headroom: device.headroom,
            strength: device.strength,
            pods: count(device.pods),
            over: count(device.over),
            fault: device.fault,
            freeze: device.freeze,
        });
    }
    let mut over: Vec<&(u64, TopPod)> = facts.over.iter().collect();
    over.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| key(&a.1).cmp(&key(&b.1))));
    let mut top_pods: Vec<TopPod> = over.into_iter().take(TOP_PODS).map(|(_, pod)| pod.clone()).collect();
    // In an order that does not follow live bytes.
    top_pods.sort_by(|a, b| key(a).cmp(&key(b)));

    let generation = facts.observed_generation;
    let previous = previous.map_or(&[][..], |p| p.conditions.as_slice());
    let conditions = [monitored(facts), attention(facts)]
        .into_iter()
        .map(|verdict| verdict.condition(generation, previous, now))
        .collect();
    let mut status = GpuMemoryNodeStatus {
        observed_generation: generation,
        conditions,
        driver_version: facts.driver_version.clone(),
        agent_version: Some(facts.agent_version.clone()),
        level: facts.devices.iter().map(|d| d.level).max(),
        device_count: Some(count(devices.len())),
        models,
        devices,
        top_pods,
    };
    for shorten in SHORTEN {
        if serde_json::to_vec(&status).is_ok_and(|text| text.len() <= SIZE_MAX) {
            break;
        }
        shorten(&mut status);
    }
    status
}

/// The largest status in bytes of JSON: with the plan and the managed fields the object then stays
/// below 10 kB.
const SIZE_MAX: usize = 7_500;

/// What is left out of a status that would be too large, in turn. Metrics have all of it; what the
/// operator acts on is never left out.
const SHORTEN: [fn(&mut GpuMemoryNodeStatus); 4] = [
    |status| status.devices.iter_mut().for_each(|device| device.headroom = HeadroomBand::Unknown),
    |status| {
        for device in &mut status.devices {
            device.pods = 0;
            device.over = 0;
        }
    },
    |status| status.top_pods.clear(),
    |status| {
        for condition in &mut status.conditions {
            condition.message = condition.message.chars().take(128).collect();
        }
    },
];

fn key(pod: &TopPod) -> (&str, &str, &str) {
    (&pod.namespace, &pod.name, &pod.device)
}

fn count(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// A condition without its times.
struct Verdict {
    type_: &'static str,
    holds: bool,
    reason: &'static str,
    message: String,
}

impl Verdict {
    fn condition(self, generation: Option<i64>, previous: &[Condition], now: Timestamp) -> Condition {
        let status = if self.holds { "True" } else { "False" };
        let since = previous.iter().find(|c| c.type_ == self.type_ && c.status == status);
        Condition {
            type_: self.type_.to_owned(),
            status: status.to_owned(),
            reason: self.reason.to_owned(),
            message: self.message,
            observed_generation: generation,
            last_transition_time: since.map_or(Time(now), |c| c.last_transition_time.clone()),
        }
    }
}

fn monitored(facts: &Facts) -> Verdict {
    let verdict = |holds, reason, message| Verdict { type_: MONITORED, holds, reason, message };
    match &facts.watch {
        Watch::StandDown => {
            return verdict(false, "StandDown", "every device handle is closed, as asked".to_owned());
        }
        Watch::StandingDown(why) => return verdict(false, "StandingDown", why.chars().take(512).collect()),
        Watch::NoDriver(why) => return verdict(false, "NoDriver", why.chars().take(512).collect()),
        Watch::On => {}
    }
    if facts.devices.is_empty() {
        return verdict(false, "NoDevices", "the driver reports no device".to_owned());
    }
    let faults = named(facts, |d| d.fault.map(|fault| format!("{} {fault:?}", d.label)));
    if faults.is_empty() {
        verdict(true, "AllDevices", String::new())
    } else {
        verdict(false, "DeviceFault", format!("not wholly measured: {faults}"))
    }
}

fn attention(facts: &Facts) -> Verdict {
    let zombie = named(facts, |d| d.zombie.then(|| d.label.clone()));
    let unexplained = named(facts, |d| {
        d.unexplained
            .as_ref()
            .map(|whose| format!("{}{}{whose}", d.label, if whose.is_empty() { "" } else { " " }))
    });
    let mut messages = Vec::new();
    if !zombie.is_empty() {
        messages.push(format!("dead processes still hold memory on device {zombie}: it needs a reset"));
    }
    if !unexplained.is_empty() {
        messages.push(format!("no process explains some memory in use on device {unexplained}"));
    }
    let reason = match (zombie.is_empty(), unexplained.is_empty()) {
        (false, _) => "ZombieMemory",
        (true, false) => "UnexplainedMemory",
        (true, true) => "Nothing",
    };
    Verdict { type_: ATTENTION, holds: !messages.is_empty(), reason, message: messages.join("; ") }
}

/// What some devices say for themselves: the first few, and how many more.
fn named(facts: &Facts, what: impl Fn(&DeviceFacts) -> Option<String>) -> String {
    const NAMED: usize = 4;
    let all: Vec<String> = facts.devices.iter().filter_map(what).collect();
    let more = all.len().saturating_sub(NAMED);
    let mut text = all.into_iter().take(NAMED).collect::<Vec<_>>().join(", ");
    if more > 0 {
        text = format!("{text} and {more} more");
    }
    text
}

/// Whether two statuses say the same, whenever it became so.
pub fn same(a: &GpuMemoryNodeStatus, b: &GpuMemoryNodeStatus) -> bool {
    let timeless = |status: &GpuMemoryNodeStatus| {
        let conditions: BTreeMap<_, _> = status
            .conditions
            .iter()
            .map(|c| {
                let rest = (c.status.clone(), c.reason.clone(), c.message.clone(), c.observed_generation);
                (c.type_.clone(), rest)
            })
            .collect();
        (conditions, GpuMemoryNodeStatus { conditions: Vec::new(), ..status.clone() })
    };
    timeless(a) == timeless(b)
}

/// Use must fall this many points below a band's edge before the band is left downwards.
const BAND_MARGIN: i32 = 3;

/// The headroom band, given the one before. A missing number is `Unknown`.
pub fn band(previous: HeadroomBand, share: Option<Share>) -> HeadroomBand {
    let Some(share) = share else { return HeadroomBand::Unknown };
    [(HeadroomBand::Full, 88), (HeadroomBand::Below88, 75), (HeadroomBand::Below75, 60)]
        .into_iter()
        .find(|&(band, edge)| {
            let edge = if previous >= band { edge - BAND_MARGIN } else { edge };
            share.at_least(edge)
        })
        .map_or(HeadroomBand::Below60, |(band, _)| band)
}

/// Product and partition of a device, as statuses name them.
pub fn model(product: &str, partition: Partition, total: Option<u64>) -> DeviceModel {
    DeviceModel { product: product.chars().take(96).collect(), partition, memory: total.map(ByteSize) }
}

#[cfg(test)]
mod tests {
    use highwater_crds::{GpuMemoryNode, names::manager};
    use serde_json::json;

    use super::*;

    fn device(n: usize) -> DeviceFacts {
        DeviceFacts {
            uuid: format!("MIG-8e7cdc1b-20bb-5f71-9a34-{n:012}"),
            label: format!("{}/{}", n / 7, n % 7 + 7),
            model: model("NVIDIA H200 MIG 1g.18gb", Partition::Mig, Some(17_448_304_640)),
            level: Level::Normal,
            headroom: HeadroomBand::Below60,
            strength: Strength::Observe,
            pods: 2,
            over: 0,
            fault: None,
            freeze: None,
            zombie: false,
            unexplained: None,
        }
    }

    fn facts(devices: Vec<DeviceFacts>) -> Facts {
        Facts { observed_generation: Some(3), agent_version: "0.1.0".into(), devices, ..Facts::default() }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn devices_of_one_kind_share_a_model() {
        let mut other = device(2);
        other.model.product = "NVIDIA A100".into();
        let status = status(&facts(vec![device(0), device(1), other]), None, at(0));
        assert_eq!(status.models.len(), 2);
        assert_eq!(status.devices.iter().map(|d| d.model).collect::<Vec<_>>(), [0, 0, 1]);
    }

    #[test]
    fn a_condition_keeps_its_time_until_it_changes() {
        let before = status(&facts(vec![device(0)]), None, at(1));
        let again = status(&facts(vec![device(0)]), Some(&before), at(2));
        assert_eq!(before, again);
        let lost = DeviceFacts { fault: Some(DeviceFault::Lost), ..device(0) };
        let after = status(&facts(vec![lost]), Some(&before), at(3));
        assert_eq!(after.conditions[0].last_transition_time, Time(at(3)));
        assert_eq!(after.conditions[1].last_transition_time, Time(at(1)));
        assert!(after.conditions[0].message.contains("0/7 Lost"));
        assert!(!same(&before, &after));
    }

    #[test]
    fn statuses_are_compared_without_times_and_order() {
        let a = status(&facts(vec![device(0)]), None, at(1));
        let mut b = status(&facts(vec![device(0)]), None, at(2));
        b.conditions.reverse();
        assert!(same(&a, &b));
    }

    #[test]
    fn l04_zombie_memory_asks_for_a_person() {
        let zombie = DeviceFacts { zombie: true, ..device(0) };
        let status = status(&facts(vec![zombie]), None, at(1));
        let attention = status.conditions.iter().find(|c| c.type_ == ATTENTION).unwrap();
        assert_eq!((attention.status.as_str(), attention.reason.as_str()), ("True", "ZombieMemory"));
    }

    #[test]
    fn standing_down_is_not_monitored() {
        let facts = Facts { watch: Watch::StandDown, ..facts(vec![device(0)]) };
        let status = status(&facts, None, at(1));
        assert_eq!(
            (status.conditions[0].status.as_str(), status.conditions[0].reason.as_str()),
            ("False", "StandDown")
        );
    }

    #[test]
    fn a_band_is_left_downwards_only_below_its_margin() {
        use HeadroomBand::{Below60, Below75, Full, Unknown};
        let at = |used| Some(Share { used, of: 100 });
        assert_eq!(band(Unknown, at(60)), Below75);
        assert_eq!(band(Below75, at(58)), Below75);
        assert_eq!(band(Below60, at(58)), Below60);
        assert_eq!(band(Below75, at(56)), Below60);
        assert_eq!(band(Below60, at(99)), Full);
        assert_eq!(band(Full, None), Unknown);
    }

    #[test]
    fn d17_the_object_of_56_mig_devices_fits_in_10_kb() {
        let size = size_of_56(|n, device| {
            device.level = if n % 2 == 0 { Level::Emergency } else { Level::Critical };
            device.headroom = HeadroomBand::Full;
            device.zombie = true;
            device.freeze = (n % 4 == 0).then_some(Freeze::AllDevices);
        });
        assert!(size <= 10_000, "{size} bytes");
    }

    #[test]
    fn a_status_that_is_not_too_large_leaves_nothing_out() {
        let pod =
            TopPod { namespace: "team".into(), name: "p".into(), device: "d".into(), due: ByteSize::gib(1) };
        let facts = Facts { over: vec![(1, pod); 9], ..facts((0..8).map(device).collect()) };
        let status = status(&facts, None, at(0));
        assert_eq!(status.top_pods.len(), TOP_PODS);
        assert!(status.devices.iter().all(|d| d.pods == 2 && d.headroom == HeadroomBand::Below60));
    }

    #[test]
    fn d17_so_does_one_with_every_field_of_every_device_set() {
        let size = size_of_56(|n, device| {
            device.level = if n % 2 == 0 { Level::Emergency } else { Level::Critical };
            device.headroom = HeadroomBand::Full;
            device.zombie = true;
            device.freeze = Some(Freeze::AllDevices);
            device.over = 2;
            device.fault = Some(DeviceFault::NoProcessInfo);
            device.unexplained =
                Some("(perhaps pod machine-learning-platform/model-server-0-5d8f9c7b6d-x2x4z)".into());
        });
        assert!(size <= 10_000, "{size} bytes");
    }

    /// Bytes of the whole object of a node with 56 such devices, as it is stored.
    fn size_of_56(set: impl Fn(usize, &mut DeviceFacts)) -> usize {
        let mut facts = facts((0..56).map(device).collect());
        facts.driver_version = Some("580.159.03".into());
        for (n, device) in facts.devices.iter_mut().enumerate() {
            set(n, device);
        }
        facts.over = (0..9)
            .map(|n| {
                let pod = TopPod {
                    namespace: "machine-learning-platform".into(),
                    name: format!("model-server-{n}-5d8f9c7b6d-x2x4z"),
                    device: facts.devices[n].uuid.clone(),
                    due: ByteSize::gib(12),
                };
                (1, pod)
            })
            .collect();
        let status = status(&facts, None, at(1_800_000_000));
        let said: Vec<_> = status.devices.iter().map(|d| (d.level, d.freeze, d.fault)).collect();
        let known: Vec<_> = facts.devices.iter().map(|d| (d.level, d.freeze, d.fault)).collect();
        assert_eq!(said, known, "what the operator acts on");
        let layer = json!({"mode": "Enforce", "rules": [{
            "product": "NVIDIA H200 MIG 1g.18gb", "partition": "Mig", "quotaPolicies": ["serving"],
            "breakers": [{"policy": "serving", "ownerKinds": ["ReplicaSet", "StatefulSet"], "value": {
                "scope": "Device", "critical": {"tripPercent": 88, "clearPercent": 84},
                "emergency": {"tripPercent": 95, "clearPercent": 90, "actions": [{"type": "Restart"}]}}}]}],
            "quotas": [{"policy": "serving", "ownerKinds": ["ReplicaSet", "StatefulSet"], "value": {
                "default": {"limit": "8Gi"}, "breach": {"actions": [{"type": "Restart"}]}}}]});
        let plan = serde_json::from_value(json!({"planLifeSeconds": 600, "layers": [layer]})).unwrap();
        let mut node = GpuMemoryNode::new("gpu-node-0001.example.internal", plan);
        let field = |name: &str| (format!("f:{name}"), json!({}));
        let conditions: serde_json::Map<_, _> = status
            .conditions
            .iter()
            .map(|c| {
                let fields: serde_json::Map<_, _> =
                    ["type", "status", "reason", "message", "observedGeneration", "lastTransitionTime"]
                        .map(field)
                        .into_iter()
                        .chain([(".".to_owned(), json!({}))])
                        .collect();
                (format!("k:{{\"type\":\"{}\"}}", c.type_), json!(fields))
            })
            .collect();
        let mut fields: serde_json::Map<_, _> = [
            "observedGeneration",
            "driverVersion",
            "agentVersion",
            "level",
            "deviceCount",
            "models",
            "devices",
            "topPods",
        ]
        .map(field)
        .into_iter()
        .collect();
        fields.insert("f:conditions".into(), json!(conditions));
        let entry = |manager: &str, subresource: Option<&str>, fields: serde_json::Value| {
            json!({"manager": manager, "operation": "Apply", "apiVersion": "highwater.dev/v1alpha1",
                   "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": fields,
                   "subresource": subresource})
        };
        let owner = json!({"f:metadata": {"f:ownerReferences": {"k:{\"uid\":\"8e7cdc1b-20bb-5f71-9a34-000000000000\"}": {}}}});
        let plan = json!({"f:spec": {"f:planLifeSeconds": {}, "f:standDown": {}, "f:layers": {"k:{\"mode\":\"Enforce\"}":
            {".": {}, "f:mode": {}, "f:rules": {}, "f:quotas": {}}}}});
        node.metadata.managed_fields = serde_json::from_value(json!([
            entry(manager::AGENT_NODE, Some("status"), json!({"f:status": fields})),
            entry(manager::AGENT_NODE, None, owner),
            entry(manager::OPERATOR_PLAN, None, plan),
        ]))
        .unwrap();
        node.status = Some(status);
        serde_json::to_vec(&node).unwrap().len()
    }
}
