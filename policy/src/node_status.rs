//! The status of a node's `GpuMemoryNode`, made of what its agent knows.
//!
//! It changes seldom: no live bytes, levels and bands with hysteresis, and counts.

use std::collections::{BTreeMap, BTreeSet};

use highwater_crds::{
    BelowStrength, ByteSize, DeviceFault, DeviceModel, DeviceStatus, Freeze, GpuMemoryNodeStatus,
    HeadroomBand, HostStatus, Level, Partition, PoolTrouble, Strength, StrengthCounts, StrengthReason,
    TopPod,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::{ledger::Share, pod::PodFacts, quota::EffectiveQuota};

/// The most pods that a status names: of those over their due, and of those below the strength that
/// is asked for.
pub const TOP_PODS: usize = 4;

/// Condition: every device is being measured.
pub const MONITORED: &str = "Monitored";
/// Condition: something here needs a person.
pub const ATTENTION: &str = "Attention";
/// Condition: every pod has the strength that its quota asks for.
pub const ENFORCED: &str = "Enforced";

/// Reason of [`MONITORED`]: some devices are not wholly measured, the others are.
pub const DEVICE_FAULT: &str = "DeviceFault";

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
    /// Every pod and device where the strength is less than the quota of the enforced layer asks
    /// for, in any order; from [`below`].
    pub below: Vec<BelowStrength>,
    /// Pods without a guard, as `namespace/name`, that took more than their limit while they started:
    /// engines that size themselves by what the device has. As long as they run.
    pub oversized: Vec<String>,
    /// Pods, as `namespace/name`, of which a program has looked up functions of the driver that its guard
    /// does not cover.
    pub uncovered: Vec<String>,
    /// The plan has a rule on host memory, which the node has no cgroup v2 to measure by.
    pub no_cgroup_v2: bool,
    /// The strength that a new pod without a guard would have on every device here: `Kernel` where
    /// each of them takes the driver's limits, else `Reservation` where each has a pool that is
    /// held, else `Observe`. `Observe` while the node does not measure or its plan does not bind.
    pub base_strength: Strength,
    /// How the host fares; from [`host_status`](crate::host_status).
    pub host: Option<HostStatus>,
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
    /// The pods that use it by the enforcement that holds for them.
    pub strengths: StrengthCounts,
    /// Its reservation pool, where the enforced layer of the plan gives it one.
    pub pool: Option<PoolFacts>,
    /// Pods that use it.
    pub pods: usize,
    /// Pods over their due.
    pub over: usize,
    /// Pods whose memory here is parked on the host.
    pub parked: usize,
    /// Why it is not, or not wholly, measured.
    pub fault: Option<DeviceFault>,
    /// What its enforced breaker asks of the node.
    pub freeze: Option<Freeze>,
    /// Memory of dead processes stays allocated.
    pub zombie: bool,
    /// Much memory is in use that no process explains; the text says whose it may be.
    pub unexplained: Option<String>,
}

/// What an agent knows of the reservation pool of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolFacts {
    /// What has been wrong with it for long enough to be told.
    pub trouble: Option<PoolTrouble>,
    /// The most that a pod without a guard could take beyond its due now, in bytes. `None` where
    /// that is not known, or no such pod uses the device.
    pub overshoot: Option<u64>,
}

/// What is said of a pod whose quota holds less firmly than it asks for; None where it holds as
/// asked. `reason` says why it has no more than `active`.
pub fn below(
    quota: &EffectiveQuota,
    active: Strength,
    reason: StrengthReason,
    pod: &PodFacts,
    device: &str,
) -> Option<BelowStrength> {
    let asked = quota.asked.as_ref().filter(|asked| active < asked.strength)?;
    Some(BelowStrength {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        device: device.to_owned(),
        policy: asked.policy.clone(),
        asked: asked.strength,
        active,
        reason,
    })
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
        let before = previous.and_then(|p| p.devices.iter().find(|d| d.uuid == device.uuid));
        let overshoot = device.pool.and_then(|pool| pool.overshoot);
        devices.push(DeviceStatus {
            uuid: device.uuid.clone(),
            model: count(model),
            level: device.level,
            headroom: device.headroom,
            strength: device.strengths.weakest(),
            strengths: if device.strengths.differ() { device.strengths } else { StrengthCounts::default() },
            pool: device.pool.and_then(|pool| pool.trouble),
            overshoot: overshoot.map(|bytes| overshoot_band(before.and_then(|d| d.overshoot), bytes)),
            pods: count(device.pods),
            over: count(device.over),
            parked: count(device.parked),
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
    let conditions_before = previous.map_or(&[][..], |p| p.conditions.as_slice());
    let conditions = [monitored(facts), attention(facts), enforced(facts)]
        .into_iter()
        .map(|verdict| verdict.condition(generation, conditions_before, now))
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
        host: facts.host,
        base_strength: facts.base_strength,
        below_count: count(facts.below.len()),
        below_strength: first_below(&facts.below).into_iter().cloned().collect(),
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
const SIZE_MAX: usize = 7_300;

/// What is left out of a status that would be too large, in turn. Metrics have all of it; what the
/// operator acts on is never left out.
const SHORTEN: [fn(&mut GpuMemoryNodeStatus); 10] = [
    |status| status.devices.iter_mut().for_each(|device| device.overshoot = None),
    |status| {
        status.devices.iter_mut().for_each(|device| device.headroom = HeadroomBand::Unknown);
        // Without them the node is no target, however its host fares.
        status.host = None;
    },
    |status| {
        for device in &mut status.devices {
            device.pods = 0;
            device.over = 0;
            device.parked = 0;
        }
    },
    |status| status.devices.iter_mut().for_each(|device| device.strengths = StrengthCounts::default()),
    |status| status.top_pods.clear(),
    |status| shorten_messages(status, 128),
    |status| status.below_strength.truncate(1),
    |status| status.devices.iter_mut().for_each(|device| device.pool = None),
    |status| shorten_messages(status, 32),
    |status| status.below_strength.clear(),
];

fn shorten_messages(status: &mut GpuMemoryNodeStatus, length: usize) {
    for condition in &mut status.conditions {
        condition.message = condition.message.chars().take(length).collect();
    }
}

/// Those below their strength that are named: one of each policy, so that each policy hears of it,
/// then those furthest below.
fn first_below(below: &[BelowStrength]) -> Vec<&BelowStrength> {
    let place = |pod: &BelowStrength| (pod.namespace.clone(), pod.name.clone(), pod.device.clone());
    let far = |pod: &BelowStrength| (std::cmp::Reverse(pod.asked), pod.active, place(pod));
    let mut all: Vec<&BelowStrength> = below.iter().collect();
    all.sort_by_cached_key(|pod| far(pod));
    let mut policies = BTreeSet::new();
    let (mut named, rest): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|pod| policies.insert(pod.policy.as_str()));
    named.extend(rest);
    named.truncate(TOP_PODS);
    named.sort_by_cached_key(|pod| place(pod));
    named
}

/// The largest band: what a quantity may be at most, and more than any device has.
const OVERSHOOT_MAX: u64 = 1 << 59;

/// The bytes that a pod could take beyond its due, in a band that changes seldom: the next power of
/// two of GiB, kept until it is passed or four times what is needed.
fn overshoot_band(before: Option<ByteSize>, bytes: u64) -> ByteSize {
    let band = ByteSize(bytes.clamp(ByteSize::GI, OVERSHOOT_MAX).next_power_of_two());
    before.filter(|before| bytes <= before.0 && before.0 <= band.0.saturating_mul(2)).unwrap_or(band)
}

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
        verdict(false, DEVICE_FAULT, format!("not wholly measured: {faults}"))
    }
}

fn attention(facts: &Facts) -> Verdict {
    let zombie = named(facts, |d| d.zombie.then(|| d.label.clone()));
    let unexplained = named(facts, |d| {
        d.unexplained
            .as_ref()
            .map(|whose| format!("{}{}{whose}", d.label, if whose.is_empty() { "" } else { " " }))
    });
    let pool = |trouble| {
        named(facts, move |d| {
            (d.pool.and_then(|pool| pool.trouble) == Some(trouble)).then(|| d.label.clone())
        })
    };
    let all = [
        ("ZombieMemory", "dead processes still hold memory, it needs a reset: device", zombie),
        ("UnexplainedMemory", "no process explains some memory in use: device", unexplained),
        (
            "PoolShort",
            "the pool does not cover what is promised: promise less, or enlarge it: device",
            pool(PoolTrouble::Short),
        ),
        (
            "KeeperAway",
            "the keeper does not answer, so that no memory is held back: device",
            pool(PoolTrouble::KeeperAway),
        ),
        ("PoolUnsupported", "the driver lets no memory be held: device", pool(PoolTrouble::Unsupported)),
        (
            "SizedByDevice",
            "takes its share of the whole device and knows nothing of its limit: give it the guard (label highwater.dev/guard), tell it its size, or give it a device alone: pod",
            first(facts.oversized.iter().cloned()),
        ),
        (
            "HostMemoryUnwatched",
            "a policy has a rule on host memory, which takes cgroup v2:",
            if facts.no_cgroup_v2 { "this node has none".to_owned() } else { String::new() },
        ),
    ];
    let there: Vec<_> = all.iter().filter(|(_, _, devices)| !devices.is_empty()).collect();
    let messages: Vec<_> = there.iter().map(|(_, what, devices)| format!("{what} {devices}")).collect();
    Verdict {
        type_: ATTENTION,
        holds: !there.is_empty(),
        reason: there.first().map_or("Nothing", |(reason, ..)| *reason),
        message: messages.join("; "),
    }
}

fn enforced(facts: &Facts) -> Verdict {
    let verdict = |holds, reason, message| Verdict { type_: ENFORCED, holds, reason, message };
    let named = first_below(&facts.below);
    let Some(first) = named.first() else {
        let uncovered = first(facts.uncovered.iter().cloned());
        let message = if uncovered.is_empty() {
            uncovered
        } else {
            format!("looked up functions of the driver that the guard does not cover: pod {uncovered}")
        };
        return verdict(true, "AllAtStrength", message);
    };
    // Which pods there are is in `belowStrength`: said twice, it would take the room of devices.
    let more = facts.below.len().saturating_sub(1);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    verdict(false, "BelowStrength", format!("{}{more}", say_below(first)))
}

/// A pod below the strength that is asked for, in words.
pub fn say_below(pod: &BelowStrength) -> String {
    let BelowStrength { namespace, name, asked, active, reason, .. } = pod;
    format!("pod {namespace}/{name} is to have {asked:?} and has {active:?} ({reason:?})")
}

/// What some devices say for themselves: the first few, and how many more.
fn named(facts: &Facts, what: impl Fn(&DeviceFacts) -> Option<String>) -> String {
    first(facts.devices.iter().filter_map(what))
}

/// The first few, and how many more.
fn first(all: impl Iterator<Item = String>) -> String {
    const NAMED: usize = 4;
    let all: Vec<String> = all.collect();
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

/// The steps in which the size of a context is told, in bytes.
const CONTEXT_STEP: u64 = 64 * ByteSize::MI;

/// Product and partition of a device, as statuses name them, its memory, and what a CUDA context was
/// seen to take on such a device, both in bytes.
pub fn model(product: &str, partition: Partition, total: Option<u64>, context: Option<u64>) -> DeviceModel {
    let context =
        context.filter(|bytes| *bytes > 0).and_then(|bytes| bytes.checked_next_multiple_of(CONTEXT_STEP));
    DeviceModel {
        product: product.chars().take(96).collect(),
        partition,
        memory: total.map(ByteSize),
        context: context.map(ByteSize),
    }
}

#[cfg(test)]
mod tests {
    use highwater_crds::{CpuIdleBand, GpuMemoryNode, HostMemoryBand, names::manager};
    use serde_json::json;

    use super::*;

    fn device(n: usize) -> DeviceFacts {
        DeviceFacts {
            uuid: format!("MIG-8e7cdc1b-20bb-5f71-9a34-{n:012}"),
            label: format!("{}/{}", n / 7, n % 7 + 7),
            model: model("NVIDIA H200 MIG 1g.18gb", Partition::Mig, Some(17_448_304_640), Some(519 << 20)),
            level: Level::Normal,
            headroom: HeadroomBand::Below60,
            strengths: StrengthCounts { observe: 2, ..StrengthCounts::default() },
            pool: None,
            pods: 2,
            over: 0,
            parked: 0,
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

    fn pool(trouble: Option<PoolTrouble>, overshoot: Option<u64>) -> PoolFacts {
        PoolFacts { trouble, overshoot }
    }

    fn below_of(policy: &str, n: usize, asked: Strength, active: Strength) -> BelowStrength {
        BelowStrength {
            namespace: "team".into(),
            name: format!("p{n}"),
            device: "GPU-0".into(),
            policy: policy.into(),
            asked,
            active,
            reason: StrengthReason::NotOptedIn,
        }
    }

    #[test]
    fn a_pool_that_does_not_cover_what_is_promised_asks_for_a_person() {
        let short = DeviceFacts { pool: Some(pool(Some(PoolTrouble::Short), None)), ..device(0) };
        let away = DeviceFacts { pool: Some(pool(Some(PoolTrouble::KeeperAway), None)), ..device(1) };
        let fine = DeviceFacts { pool: Some(pool(None, None)), ..device(2) };
        let status = status(&facts(vec![short, away, fine]), None, at(1));
        let attention = status.conditions.iter().find(|c| c.type_ == ATTENTION).unwrap();
        assert_eq!((attention.status.as_str(), attention.reason.as_str()), ("True", "PoolShort"));
        assert!(attention.message.contains("enlarge it: device 0/7; the keeper"), "{}", attention.message);
        let pools: Vec<_> = status.devices.iter().map(|d| d.pool).collect();
        assert_eq!(pools, [Some(PoolTrouble::Short), Some(PoolTrouble::KeeperAway), None]);
    }

    #[test]
    fn an_engine_that_sizes_itself_by_the_device_is_told_what_to_do() {
        let facts = Facts { oversized: vec!["team/vllm-0".into()], ..facts(vec![device(0)]) };
        let status = status(&facts, None, at(1));
        let attention = status.conditions.iter().find(|c| c.type_ == ATTENTION).unwrap();
        assert_eq!((attention.status.as_str(), attention.reason.as_str()), ("True", "SizedByDevice"));
        assert!(attention.message.contains("label highwater.dev/guard"), "{}", attention.message);
        assert!(attention.message.ends_with("pod team/vllm-0"), "{}", attention.message);
    }

    #[test]
    fn strengths_are_counted_and_the_weakest_is_shown() {
        let mut strengths = StrengthCounts::default();
        for strength in [Strength::Guard, Strength::Kernel, Strength::Guard] {
            strengths.add(strength);
        }
        let alike = StrengthCounts { guard: 2, ..StrengthCounts::default() };
        let devices = vec![
            DeviceFacts { strengths, ..device(0) },
            DeviceFacts { strengths: alike, ..device(1) },
            device(2),
        ];
        let json = serde_json::to_value(status(&facts(devices), None, at(1)).devices).unwrap();
        assert_eq!(json[0]["strength"], "Guard");
        assert_eq!(json[0]["strengths"], json!({"guard": 2, "kernel": 1}));
        assert_eq!((&json[1]["strength"], json[1].get("strengths")), (&json!("Guard"), None), "all alike");
        assert_eq!((json[2].get("strength"), json[2].get("strengths")), (None, None), "only measured");
        assert_eq!(StrengthCounts::default().weakest(), Strength::Observe);
    }

    #[test]
    fn who_is_below_is_counted_and_each_policy_hears_of_one() {
        use Strength::{Guard, Kernel, Observe, Reservation};
        let mut facts = facts(vec![device(0)]);
        facts.below = (0..9).map(|n| below_of("loud", n, Kernel, Observe)).collect();
        facts.below.push(below_of("quiet", 20, Reservation, Observe));
        facts.below.push(below_of("other", 30, Guard, Reservation));
        let status = status(&facts, None, at(1));
        assert_eq!(status.below_count, 11);
        let named: Vec<_> = status.below_strength.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(named, ["p0", "p1", "p20", "p30"]);
        let enforced = status.conditions.iter().find(|c| c.type_ == ENFORCED).unwrap();
        assert_eq!((enforced.status.as_str(), enforced.reason.as_str()), ("False", "BelowStrength"));
        assert_eq!(
            enforced.message,
            "pod team/p0 is to have Kernel and has Observe (NotOptedIn) and 10 more"
        );
        facts.below.reverse();
        assert!(same(&super::status(&facts, None, at(2)), &status), "in whatever order they are found");
        facts.below.clear();
        let well = super::status(&facts, None, at(3));
        assert_eq!(
            (well.conditions[2].reason.as_str(), well.conditions[2].message.as_str()),
            ("AllAtStrength", "")
        );
        let doubtful = Facts { uncovered: vec!["team/a".into(), "team/b".into()], ..facts };
        let doubtful = super::status(&doubtful, Some(&well), at(4));
        let enforced = &doubtful.conditions[2];
        assert_eq!((enforced.status.as_str(), enforced.reason.as_str()), ("True", "AllAtStrength"));
        assert!(enforced.message.ends_with("does not cover: pod team/a, team/b"), "{}", enforced.message);
        assert_eq!(serde_json::to_value(&well).unwrap().get("belowCount"), None);
    }

    #[test]
    fn a_pod_is_below_only_what_its_quota_asks_for() {
        let quota = |strength| EffectiveQuota {
            limit: 1,
            source: crate::quota::Source { policy: "p".into(), rule: "r".into(), lowered_by: None },
            guarantee: None,
            breach: None,
            asked: strength,
            managed: highwater_crds::ManagedMemory::Charge,
            kernel_limits: highwater_crds::KernelLimits::Off,
        };
        let asked = crate::quota::Asked { strength: Strength::Guard, policy: "p".into(), rule: "r".into() };
        let of = |quota: &EffectiveQuota, active| {
            below(quota, active, StrengthReason::OutsideGuard, &PodFacts::default(), "GPU-0")
        };
        assert_eq!(of(&quota(None), Strength::Observe), None);
        assert_eq!(of(&quota(Some(asked.clone())), Strength::Guard), None);
        assert_eq!(of(&quota(Some(asked.clone())), Strength::Kernel), None);
        let said = of(&quota(Some(asked)), Strength::Reservation).unwrap();
        assert_eq!((said.policy.as_str(), said.asked), ("p", Strength::Guard));
        assert_eq!(said.reason, StrengthReason::OutsideGuard);
    }

    #[test]
    fn overshoot_is_told_in_bands_that_do_not_flap() {
        let gi = |n| Some(ByteSize::gib(n));
        let band = |before, bytes| Some(overshoot_band(before, bytes));
        assert_eq!(band(None, 0), gi(1));
        assert_eq!(band(None, ByteSize::GI * 5), gi(8));
        assert_eq!(band(gi(8), ByteSize::GI * 4), gi(8), "kept at the edge");
        assert_eq!(band(gi(8), ByteSize::GI * 2), gi(2));
        assert_eq!(band(gi(8), ByteSize::GI * 8 + 1), gi(16));
        assert!(band(None, u64::MAX).unwrap() < ByteSize(1 << 60), "as the schema bounds it");
    }

    #[test]
    fn a_band_of_overshoot_is_kept_from_status_to_status() {
        let with = |bytes| facts(vec![DeviceFacts { pool: Some(pool(None, Some(bytes))), ..device(0) }]);
        let first = status(&with(5 * ByteSize::GI), None, at(0));
        let second = status(&with(4 * ByteSize::GI), Some(&first), at(1));
        assert_eq!(first, second);
    }

    #[test]
    fn a_context_is_told_in_coarse_steps() {
        let context = |bytes| model("G", Partition::Whole, None, bytes).context;
        assert_eq!(context(None), None);
        assert_eq!(context(Some(0)), None);
        assert_eq!(context(Some(518 << 20)), Some(ByteSize::mib(576)));
        assert_eq!(context(Some(576 << 20)), Some(ByteSize::mib(576)));
        assert_eq!(context(Some(u64::MAX)), None);
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
    fn d17_so_does_one_on_which_everything_is_guarded_and_much_is_below() {
        let size = size_of_56(|n, device| {
            device.strengths = StrengthCounts { guard: 2, observe: 1, ..StrengthCounts::default() };
            device.pool = Some(pool((n % 3 == 0).then_some(PoolTrouble::KeeperAway), Some(7 << 30)));
            device.freeze = Some(Freeze::AllDevices);
            device.level = Level::Emergency;
            device.headroom = HeadroomBand::Full;
            device.over = 1;
            device.fault = Some(DeviceFault::NoProcessInfo);
            device.zombie = true;
        });
        assert!(size <= 10_000, "{size} bytes");
    }

    #[test]
    fn a_guarded_mig_node_at_rest_tells_all_of_it() {
        let guarded = |n| DeviceFacts {
            strengths: StrengthCounts { guard: 1, ..StrengthCounts::default() },
            pods: 1,
            ..device(n)
        };
        let status = status(&facts((0..56).map(guarded).collect()), None, at(0));
        let told = |d: &DeviceStatus| {
            (d.strength, d.pods, d.headroom) == (Strength::Guard, 1, HeadroomBand::Below60)
        };
        assert!(status.devices.iter().all(told));
    }

    #[test]
    fn a_status_that_is_not_too_large_leaves_nothing_out() {
        let pod =
            TopPod { namespace: "team".into(), name: "p".into(), device: "d".into(), due: ByteSize::gib(1) };
        let host = Some(HostStatus { oom_kills: Some(true), ..HostStatus::default() });
        let facts = Facts { over: vec![(1, pod); 9], host, ..facts((0..8).map(device).collect()) };
        let status = status(&facts, None, at(0));
        assert_eq!(status.top_pods.len(), TOP_PODS);
        assert!(status.devices.iter().all(|d| d.pods == 2 && d.headroom == HeadroomBand::Below60));
        assert_eq!(status.host, facts.host);
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
        facts.below = (0..9)
            .map(|n| BelowStrength {
                namespace: "machine-learning-platform".into(),
                name: format!("model-server-{n}-5d8f9c7b6d-x2x4z"),
                device: facts.devices[n].uuid.clone(),
                policy: format!("serving-{}", n % 2),
                asked: Strength::Guard,
                active: Strength::Reservation,
                reason: StrengthReason::GuardNotConnected,
            })
            .collect();
        facts.base_strength = Strength::Reservation;
        facts.host = Some(HostStatus {
            cpu_idle: Some(CpuIdleBand::Above40),
            memory: Some(HostMemoryBand::Above1200M),
            oom_kills: Some(false),
        });
        let status = status(&facts, None, at(1_800_000_000));
        let said: Vec<_> = status.devices.iter().map(|d| (d.level, d.freeze, d.fault)).collect();
        let known: Vec<_> = facts.devices.iter().map(|d| (d.level, d.freeze, d.fault)).collect();
        assert_eq!(said, known, "what the operator acts on");
        assert_eq!(status.below_count, 9);
        let layer = json!({"mode": "Enforce", "rules": [{
            "product": "NVIDIA H200 MIG 1g.18gb", "partition": "Mig", "quotaPolicies": ["serving"],
            "pool": {"policy": "serving", "maxPolicy": "caps", "value": {"sizePercent": 60, "minSize": "8Gi",
                "maxPercent": 75, "startHoldSeconds": 60, "allocationWaitSeconds": 5, "adaptive": {
                    "growAbovePercent": 90, "shrinkBelowPercent": 50, "changePercent": 10,
                    "everyRequests": 100, "everyMinutes": 10}}},
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
            "host",
            "baseStrength",
            "belowCount",
            "belowStrength",
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
