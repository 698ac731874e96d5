//! Redirection: the nodes that have room for what must leave another.
//!
//! A target is accepted while less than 60 % of its device is in use; from 60 to 75 % only if there
//! is none below, and only if it stays under its clear mark with the bytes that would come; above
//! never. Decided is on the headroom bands of nodes' statuses, of nodes whose agent renewed its Lease
//! within 40 s and is Ready, and that are neither tainted nor cordoned. A band says no more than
//! between which marks use lies: counted is the upper one, so that what is promised fits.
//!
//! Of nodes that would take it equally well those go first whose hosts fare best, by the bands that
//! their statuses tell: the fuller the source, the more is asked of them.

use std::{cmp::Reverse, ops::Range};

use highwater_crds::{Breaker, ByteSize, CpuIdleBand, HeadroomBand, HostMemoryBand, HostStatus, Partition};

use crate::breaker;

/// How old the last renewal of an agent's own Lease may be, in milliseconds, before what its node
/// last said is no longer believed.
pub const LEASE_FRESH: u64 = 40_000;
/// A device is filled to so many percent at most: beyond is an emergency.
const MOST_FULL: u64 = 95;

/// A node that could be a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target<'a> {
    /// Name.
    pub name: &'a str,
    /// Its agent is Ready, and monitors the devices.
    pub ready: bool,
    /// How long ago the agent renewed its own Lease, in milliseconds. `None`: it has none.
    pub lease_age: Option<u64>,
    /// It has a taint of ours, or one that keeps pods away.
    pub tainted: bool,
    /// It is cordoned.
    pub cordoned: bool,
    /// How many more pods may be scheduled there that ask for a device each, where that is known.
    pub slots: Option<u32>,
    /// How its host fares, where that is known.
    pub host: Option<HostStatus>,
    /// Its devices.
    pub devices: &'a [Device<'a>],
}

/// A device of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device<'a> {
    /// Product name.
    pub product: &'a str,
    /// How it is cut.
    pub partition: Partition,
    /// Its memory in bytes, where the driver says.
    pub memory: Option<u64>,
    /// How much of it is in use.
    pub band: HeadroomBand,
    /// Nothing uses it: what fits in is all of it.
    pub empty: bool,
    /// It is measured, and nothing freezes it.
    pub usable: bool,
    /// The clear mark that it must stay under, in percent; from [`clear_mark`].
    pub clear_percent: Option<i32>,
}

/// Something that must find room: one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand<'a> {
    /// What it uses on its device in bytes; the largest where it uses several.
    pub bytes: u64,
    /// How many devices it uses.
    pub devices: u32,
    /// The only products that it runs on. Empty: any.
    pub products: &'a [&'a str],
}

/// Where there is room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The target of each demand, in their order, by its place among the targets.
    Targets(Vec<usize>),
    /// There is none for this demand (by its place), and why not. Then nothing is to be moved.
    NoTarget(usize, Survey),
}

/// What was found of the nodes while there was no target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// All nodes that were looked at.
    pub nodes: usize,
    /// Those whose news are old, or whose agent is not Ready.
    pub stale: usize,
    /// Those that are tainted or cordoned.
    pub closed: usize,
    /// Those without a device of the right kind that is measured, or without a free one to be
    /// scheduled on.
    pub unsuitable: usize,
    /// Those whose devices are too full.
    pub full: usize,
}

impl Survey {
    /// In words.
    pub fn explain(&self, demand: &Demand<'_>) -> String {
        let Self { nodes, stale, closed, unsuitable, full } = self;
        format!(
            "no node has room for {} on {} device(s): of {nodes} other nodes {full} are too full, {unsuitable} have no such device free, {closed} are tainted or cordoned, {stale} have not been heard of within {} s",
            ByteSize(demand.bytes).rounded(),
            demand.devices,
            LEASE_FRESH / 1000,
        )
    }
}

/// The clear mark that a device must stay under where something moves there.
pub fn clear_mark(breaker: &Breaker) -> Option<i32> {
    breaker::quiet_mark(breaker)
}

/// Whether a node's own Lease is so fresh that what it said is believed.
pub const fn is_fresh(lease_age: Option<u64>) -> bool {
    matches!(lease_age, Some(age) if age <= LEASE_FRESH)
}

/// Finds a target for each demand, those first that come first. `source_percent` is how full the
/// device is that they are to leave. What was given room is counted for those that follow. The order
/// of the targets does not matter.
pub fn decide(demands: &[Demand<'_>], source_percent: i32, targets: &[Target<'_>]) -> Decision {
    let mut room = Room::new(targets, source_percent);
    let mut found = Vec::with_capacity(demands.len());
    for (place, demand) in demands.iter().enumerate() {
        let Some(target) = room.take(demand) else {
            return Decision::NoTarget(place, room.survey(demand));
        };
        found.push(target);
    }
    Decision::Targets(found)
}

/// Where the scores of hosts decided, in words: the first demand that without them would have had
/// another target than the one that was `found`. `None`: they made no difference.
pub fn explain_scores(
    demands: &[Demand<'_>],
    source_percent: i32,
    targets: &[Target<'_>],
    found: &[usize],
) -> Option<String> {
    let mut scores = targets.iter().map(|target| score(source_percent, target.host));
    let first = scores.next()?;
    if scores.all(|score| score == first) {
        return None;
    }
    let alike: Vec<Target<'_>> = targets.iter().map(|t| Target { host: None, ..t.clone() }).collect();
    let mut room = Room::new(&alike, source_percent);
    let (taken, other) = demands.iter().zip(found).find_map(|(demand, taken)| {
        // Until they differ the same was promised to the same, so that nothing but scores decided.
        let other = room.take(demand)?;
        (other != *taken).then_some((*taken, other))
    })?;
    let say = |target: &Target<'_>| {
        format!("{} (score {}: {})", target.name, score(source_percent, target.host), fares(target.host))
    };
    Some(format!("{} goes before {} by its host", say(targets.get(taken)?), say(targets.get(other)?)))
}

/// How a host fares, in words.
fn fares(host: Option<HostStatus>) -> String {
    let HostStatus { cpu_idle, memory, oom_kills } = host.unwrap_or_default();
    let cpu_idle = cpu_idle.map(|band| match band {
        CpuIdleBand::Above40 => "more than 40 % idle",
        CpuIdleBand::Below40 => "up to 40 % idle",
    });
    let memory = memory.map(|band| match band {
        HostMemoryBand::Above1200M => "more than 1.2 GB available",
        HostMemoryBand::Below1200M => "up to 1.2 GB available",
        HostMemoryBand::Below800M => "up to 800 MB available",
    });
    let killed = oom_kills.map(|killed| if killed { "OOM kills of late" } else { "no OOM kills of late" });
    let known: Vec<&str> = [cpu_idle, memory, killed].into_iter().flatten().collect();
    if known.is_empty() { "not known".to_owned() } else { known.join(", ") }
}

/// The score of a target in percent, by how full the source is and how the target's host fares.
/// 50 where too little is known of it; a host that is known not to fare well enough has 0, and is still
/// better than none.
pub fn score(source_percent: i32, host: Option<HostStatus>) -> i32 {
    let Some(host) = host else { return 50 };
    let memory = |worst| host.memory.map(|band| band <= worst);
    let (good, weight) = match source_percent {
        90.. => {
            let idle = host.cpu_idle.map(|band| band == CpuIdleBand::Above40);
            (both(idle, memory(HostMemoryBand::Above1200M)), 95)
        }
        85..90 => (both(memory(HostMemoryBand::Below1200M), host.oom_kills.map(|killed| !killed)), 72),
        _ => (None, 50),
    };
    match good {
        Some(true) => weight,
        Some(false) => 0,
        None => 50,
    }
}

/// Whether both hold, as far as that is known: one that does not is enough to know.
fn both(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    match (a, b) {
        (Some(false), _) | (_, Some(false)) => Some(false),
        (Some(true), Some(true)) => Some(true),
        _ => None,
    }
}

/// The targets with what was promised of them.
struct Room<'a> {
    targets: &'a [Target<'a>],
    /// Nodes that may be looked at, best first.
    open: Vec<Open>,
    /// The devices of these, each node's beside each other.
    devices: Vec<Slot<'a>>,
    stale: usize,
    closed: usize,
}

struct Open {
    target: usize,
    slots: Option<u32>,
    /// Where its devices are.
    devices: Range<usize>,
}

/// A device with its marks in bytes, worked out once: there are many, and each demand looks at all.
struct Slot<'a> {
    product: &'a str,
    /// It is measured, and in a band that something may be moved to.
    usable: bool,
    /// Its size is known, and so the marks are.
    sized: bool,
    /// What is in use at most, with what was promised.
    used: u64,
    at_60: u64,
    at_75: u64,
    most: u64,
    /// The clear mark; 0 where there is none.
    clear: u64,
}

impl<'a> Slot<'a> {
    fn new(device: &Device<'a>) -> Self {
        let used_percent = match device.band {
            HeadroomBand::Below60 if device.empty => Some(0),
            HeadroomBand::Below60 => Some(60),
            // Without a size only the first mark can be held to.
            HeadroomBand::Below75 => device.memory.and(Some(75)),
            HeadroomBand::Unknown | HeadroomBand::Below88 | HeadroomBand::Full => None,
        };
        let memory = device.memory.unwrap_or(0);
        let clear = device.clear_percent.and_then(|percent| u64::try_from(percent).ok());
        Self {
            product: device.product,
            usable: device.usable && used_percent.is_some(),
            sized: device.memory.is_some(),
            used: percent_of(memory, used_percent.unwrap_or(100)),
            at_60: percent_of(memory, 60),
            at_75: percent_of(memory, 75),
            most: percent_of(memory, MOST_FULL),
            clear: percent_of(memory, clear.unwrap_or(0)),
        }
    }

    fn suits(&self, demand: &Demand<'_>) -> bool {
        demand.products.is_empty() || demand.products.contains(&self.product)
    }

    /// How it would take a demand.
    fn fit(&self, demand: &Demand<'_>) -> Option<Fit> {
        if !self.usable || !self.suits(demand) {
            return None;
        }
        if !self.sized {
            return (self.used == 0).then_some(Fit::Below60);
        }
        // What is promised already is in use as much as what the band says.
        let after = self.used.saturating_add(demand.bytes);
        let stays = after < self.clear;
        if self.used <= self.at_60 {
            return (after <= self.most).then_some(if stays { Fit::Roomy } else { Fit::Below60 });
        }
        (self.used <= self.at_75 && stays).then_some(Fit::Below75)
    }
}

/// How a device would take a demand: the better the smaller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    /// It is below 60 % now, and stays under its clear mark.
    Roomy,
    /// It is below 60 % now.
    Below60,
    /// It is below 75 % now, and stays under its clear mark.
    Below75,
}

impl Fit {
    const ALL: [Self; 3] = [Self::Roomy, Self::Below60, Self::Below75];
}

impl<'a> Room<'a> {
    fn new(targets: &'a [Target<'a>], source_percent: i32) -> Self {
        let is_stale = |target: &Target<'_>| !target.ready || !is_fresh(target.lease_age);
        let is_closed = |target: &Target<'_>| !is_stale(target) && (target.tainted || target.cordoned);
        let mut devices = Vec::with_capacity(targets.iter().map(|target| target.devices.len()).sum());
        let mut open = Vec::with_capacity(targets.len());
        for (place, target) in targets.iter().enumerate() {
            if is_stale(target) || is_closed(target) {
                continue;
            }
            let first = devices.len();
            devices.extend(target.devices.iter().map(Slot::new));
            open.push(Open { target: place, slots: target.slots, devices: first..devices.len() });
        }
        open.sort_by_cached_key(|open: &Open| {
            targets.get(open.target).map(|target| (Reverse(score(source_percent, target.host)), target.name))
        });
        Self {
            targets,
            open,
            devices,
            stale: targets.iter().filter(|target| is_stale(target)).count(),
            closed: targets.iter().filter(|target| is_closed(target)).count(),
        }
    }

    /// Promises the best target its room.
    fn take(&mut self, demand: &Demand<'_>) -> Option<usize> {
        let mut best: Option<(Fit, usize)> = None;
        for (place, open) in self.open.iter().enumerate() {
            let Some(fit) = self.fit(open, demand) else { continue };
            if best.is_none_or(|(found, _)| fit < found) {
                best = Some((fit, place));
            }
            if fit == Fit::Roomy {
                break;
            }
        }
        let (_, place) = best?;
        let open = self.open.get_mut(place)?;
        open.slots = open.slots.map(|slots| slots.saturating_sub(demand.devices));
        let devices = self.devices.get_mut(open.devices.clone())?;
        let mut fits: Vec<(Fit, &mut Slot<'_>)> =
            devices.iter_mut().filter_map(|slot| Some((slot.fit(demand)?, slot))).collect();
        fits.sort_by_key(|(fit, _)| *fit);
        let wanted = usize::try_from(demand.devices.max(1)).unwrap_or(usize::MAX);
        for (_, slot) in fits.into_iter().take(wanted) {
            slot.used = slot.used.saturating_add(demand.bytes.max(1));
        }
        Some(open.target)
    }

    /// How a node would take a demand: as badly as the worst of the devices that it needs.
    fn fit(&self, open: &Open, demand: &Demand<'_>) -> Option<Fit> {
        let wanted = demand.devices.max(1);
        if open.slots.is_some_and(|slots| slots < wanted) {
            return None;
        }
        let mut counts = [0u32; 3];
        for slot in self.devices.get(open.devices.clone())? {
            let Some(fit) = slot.fit(demand) else { continue };
            for (_, count) in Fit::ALL.iter().zip(&mut counts).filter(|(up_to, _)| fit <= **up_to) {
                *count += 1;
            }
            if counts.first().is_some_and(|roomy| *roomy >= wanted) {
                break;
            }
        }
        Fit::ALL.into_iter().zip(counts).find(|(_, count)| *count >= wanted).map(|(fit, _)| fit)
    }

    /// What stands against a demand that found no target.
    fn survey(&self, demand: &Demand<'_>) -> Survey {
        let suits = |open: &&Open| {
            let slots = open.slots.is_none_or(|slots| slots >= demand.devices.max(1));
            let devices = self.targets.get(open.target).map_or(&[][..], |target| target.devices);
            let kind = |product| demand.products.is_empty() || demand.products.contains(product);
            slots && devices.iter().any(|device| device.usable && kind(&device.product))
        };
        let full = self.open.iter().filter(suits).count();
        Survey {
            nodes: self.targets.len(),
            stale: self.stale,
            closed: self.closed,
            unsuitable: self.open.len().saturating_sub(full),
            full,
        }
    }
}

/// So many percent of so many bytes, rounded down.
fn percent_of(memory: u64, percent: u64) -> u64 {
    let hundredths = (memory / 100).saturating_mul(percent);
    hundredths.saturating_add((memory % 100).saturating_mul(percent) / 100)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const GI: u64 = ByteSize::GI;
    const H200: &str = "NVIDIA H200";

    fn device(band: HeadroomBand) -> Device<'static> {
        Device {
            product: H200,
            partition: Partition::Whole,
            memory: Some(100 * GI),
            band,
            empty: false,
            usable: true,
            clear_percent: Some(84),
        }
    }

    fn node<'a>(name: &'a str, devices: &'a [Device<'a>]) -> Target<'a> {
        Target {
            name,
            ready: true,
            lease_age: Some(1_000),
            tainted: false,
            cordoned: false,
            slots: None,
            host: None,
            devices,
        }
    }

    fn demand(gib: u64) -> Demand<'static> {
        Demand { bytes: gib * GI, devices: 1, products: &[] }
    }

    fn first(demands: &[Demand<'_>], targets: &[Target<'_>]) -> Option<usize> {
        match decide(demands, 92, targets) {
            Decision::Targets(found) => found.first().copied(),
            Decision::NoTarget(..) => None,
        }
    }

    #[test]
    fn below_60_is_taken_and_above_only_if_there_is_none() {
        let (low, middle, high) = (
            [device(HeadroomBand::Below60)],
            [device(HeadroomBand::Below75)],
            [device(HeadroomBand::Below88)],
        );
        let all = [node("high", &high), node("middle", &middle), node("low", &low)];
        assert_eq!(first(&[demand(8)], &all), Some(2));
        assert_eq!(first(&[demand(8)], &all[..2]), Some(1));
        assert_eq!(first(&[demand(9)], &all[..2]), None, "75 + 9 is at its clear mark");
        assert_eq!(first(&[demand(1)], &all[..1]), None);
        for band in [HeadroomBand::Unknown, HeadroomBand::Full] {
            assert_eq!(first(&[demand(1)], &[node("n", &[device(band)])]), None);
        }
    }

    #[test]
    fn what_does_not_fit_is_not_taken_and_an_empty_device_takes_all() {
        let low = [device(HeadroomBand::Below60)];
        assert_eq!(first(&[demand(36)], &[node("low", &low)]), None);
        let empty = [Device { empty: true, ..device(HeadroomBand::Below60) }];
        assert_eq!(first(&[demand(90)], &[node("low", &low), node("empty", &empty)]), Some(1));
        let nameless = [Device { memory: None, ..device(HeadroomBand::Below60) }];
        assert_eq!(first(&[demand(90)], &[node("n", &nameless)]), Some(0));
    }

    #[test]
    fn nodes_that_are_stale_or_closed_are_no_targets() {
        let low = [device(HeadroomBand::Below60)];
        let fine = node("n", &low);
        assert_eq!(first(&[demand(1)], std::slice::from_ref(&fine)), Some(0));
        for target in [
            Target { ready: false, ..fine.clone() },
            Target { lease_age: None, ..fine.clone() },
            Target { lease_age: Some(LEASE_FRESH + 1), ..fine.clone() },
            Target { tainted: true, ..fine.clone() },
            Target { cordoned: true, ..fine.clone() },
            Target { slots: Some(0), ..fine.clone() },
            Target { devices: &[], ..fine.clone() },
        ] {
            assert_eq!(first(&[demand(1)], &[target]), None);
        }
        let broken = [Device { usable: false, ..low[0] }];
        assert_eq!(first(&[demand(1)], &[node("n", &broken)]), None);
        let other = Demand { products: &["NVIDIA L4"], ..demand(1) };
        assert_eq!(first(&[other], &[fine]), None);
    }

    #[test]
    fn what_is_promised_counts_for_those_that_follow() {
        let (a, b) = ([device(HeadroomBand::Below60)], [device(HeadroomBand::Below60)]);
        let all = [node("a", &a), node("b", &b)];
        assert_eq!(decide(&[demand(20), demand(20)], 92, &all), Decision::Targets(vec![0, 1]));
        let Decision::NoTarget(place, survey) = decide(&[demand(20); 3], 92, &all) else { panic!("no room") };
        assert_eq!((place, survey.full, survey.nodes), (2, 2, 2));
        let text = survey.explain(&demand(20));
        assert!(text.contains("20.0 GiB") && text.contains("2 are too full"), "{text}");
        let slots = [Target { slots: Some(1), ..node("a", &a) }];
        assert!(matches!(decide(&[demand(1), demand(1)], 92, &slots), Decision::NoTarget(1, _)));
    }

    #[test]
    fn a_pod_of_several_devices_needs_them_on_one_node() {
        let (one, two) =
            ([device(HeadroomBand::Below60), device(HeadroomBand::Full)], [device(HeadroomBand::Below60); 2]);
        let wide = Demand { devices: 2, ..demand(20) };
        assert_eq!(first(&[wide], &[node("one", &one)]), None);
        assert_eq!(decide(&[wide], 92, &[node("one", &one), node("two", &two)]), Decision::Targets(vec![1]));
        assert!(matches!(decide(&[wide, wide], 92, &[node("two", &two)]), Decision::NoTarget(1, _)));
    }

    const WELL: HostStatus = HostStatus {
        cpu_idle: Some(CpuIdleBand::Above40),
        memory: Some(HostMemoryBand::Above1200M),
        oom_kills: Some(false),
    };
    const BUSY: HostStatus = HostStatus { cpu_idle: Some(CpuIdleBand::Below40), ..WELL };

    #[test]
    fn a_host_that_fares_well_is_preferred() {
        let low = [device(HeadroomBand::Below60)];
        let all = [
            Target { host: Some(BUSY), ..node("busy", &low) },
            node("unknown", &low),
            Target { host: Some(WELL), ..node("well", &low) },
        ];
        assert_eq!(first(&[demand(1)], &all), Some(2));
        assert_eq!(first(&[demand(1)], &all[..2]), Some(1));
        assert_eq!(first(&[demand(1)], &all[..1]), Some(0));
    }

    #[test]
    fn a_score_asks_more_the_fuller_the_source_is() {
        let scores = |host| [95, 90, 89, 85, 84].map(|percent| score(percent, host));
        let less = HostStatus { memory: Some(HostMemoryBand::Below1200M), ..WELL };
        let least = HostStatus { memory: Some(HostMemoryBand::Below800M), ..WELL };
        let killing = HostStatus { oom_kills: Some(true), ..WELL };
        assert_eq!(scores(Some(WELL)), [95, 95, 72, 72, 50]);
        assert_eq!(scores(Some(BUSY)), [0, 0, 72, 72, 50]);
        assert_eq!(scores(Some(less)), [0, 0, 72, 72, 50]);
        assert_eq!(scores(Some(least)), [0, 0, 0, 0, 50]);
        assert_eq!(scores(Some(killing)), [95, 95, 0, 0, 50]);
        assert_eq!(scores(None), [50; 5]);
        // What is missing is neither good nor bad, and one bad number is enough.
        assert_eq!(scores(Some(HostStatus { cpu_idle: None, ..WELL })), [50, 50, 72, 72, 50]);
        assert_eq!(scores(Some(HostStatus { oom_kills: None, ..least })), [0, 0, 0, 0, 50]);
        assert_eq!(scores(Some(HostStatus { memory: None, ..killing })), [50, 50, 0, 0, 50]);
    }

    #[test]
    fn where_a_score_decided_is_said_and_nowhere_else() {
        let (low, middle) = ([device(HeadroomBand::Below60)], [device(HeadroomBand::Below75)]);
        let said = |demands: &[Demand<'_>], percent, targets: &[Target<'_>]| {
            let Decision::Targets(found) = decide(demands, percent, targets) else { panic!("no room") };
            explain_scores(demands, percent, targets, &found)
        };
        let all =
            [Target { host: Some(BUSY), ..node("a", &low) }, Target { host: Some(WELL), ..node("b", &low) }];
        assert_eq!(
            said(&[demand(1)], 92, &all).unwrap(),
            "b (score 95: more than 40 % idle, more than 1.2 GB available, no OOM kills of late) goes before a (score 0: up to 40 % idle, more than 1.2 GB available, no OOM kills of late) by its host"
        );
        assert_eq!(said(&[demand(1)], 87, &all), None, "both are as good");
        let only = [all[0].clone(), Target { host: Some(WELL), ..node("b", &middle) }];
        assert_eq!(said(&[demand(1)], 92, &only), None, "room comes first");
        let named = [Target { host: Some(WELL), ..node("a", &low) }, node("b", &low)];
        assert_eq!(said(&[demand(1)], 92, &named), None, "it would have been that one anyway");
        // What follows from an earlier promise is told by the one that decided.
        let text = said(&[demand(20), demand(20)], 92, &all).unwrap();
        assert!(text.starts_with("b (score 95"), "{text}");
    }

    #[test]
    fn the_clear_mark_is_that_of_the_first_level_that_acts() {
        let breaker = |marks: serde_json::Value| -> Breaker {
            let mut whole = json!({"scope": "Device"});
            whole.as_object_mut().unwrap().extend(marks.as_object().unwrap().clone());
            serde_json::from_value(whole).unwrap()
        };
        let mark = |trip: i32, act: &str| json!({"tripPercent": trip, "clearPercent": trip - 4, "actions": [{"type": act}]});
        let both = breaker(json!({"warning": mark(75, "Signal"), "critical": mark(88, "Hook")}));
        assert_eq!(clear_mark(&both), Some(84));
        assert_eq!(clear_mark(&breaker(json!({"warning": mark(75, "Signal")}))), Some(71));
        assert_eq!(clear_mark(&breaker(json!({}))), None);
    }

    fn any_band() -> impl Strategy<Value = HeadroomBand> {
        prop::sample::select(vec![
            HeadroomBand::Unknown,
            HeadroomBand::Below60,
            HeadroomBand::Below75,
            HeadroomBand::Below88,
            HeadroomBand::Full,
        ])
    }

    proptest! {
        #[test]
        fn no_target_is_overfilled_and_no_order_matters(
            bands in prop::collection::vec((any_band(), any_band(), any::<bool>(), 0u64..60_000), 0..12),
            sizes in prop::collection::vec((0u64..120, 1u32..3), 0..8),
            turn in 0usize..12,
        ) {
            let devices: Vec<[Device<'_>; 2]> =
                bands.iter().map(|(a, b, empty, _)| [Device { empty: *empty, ..device(*a) }, device(*b)]).collect();
            let names: Vec<String> = (0..bands.len()).map(|i| format!("n{i}")).collect();
            let mut targets: Vec<Target<'_>> = devices.iter().zip(&names).zip(&bands)
                .map(|((d, name), (.., age))| Target { lease_age: Some(*age), ..node(name, d) }).collect();
            let demands: Vec<Demand<'_>> =
                sizes.iter().map(|(gib, devices)| Demand { devices: *devices, ..demand(*gib) }).collect();
            let named = |decision: &Decision, targets: &[Target<'_>]| match decision {
                Decision::Targets(found) => Ok(found.iter().map(|at| targets[*at].name.to_owned()).collect::<Vec<_>>()),
                Decision::NoTarget(place, survey) => Err((*place, *survey)),
            };
            let before = decide(&demands, 92, &targets);
            if let Decision::Targets(found) = &before {
                for target in found {
                    prop_assert!(is_fresh(targets[*target].lease_age));
                    let given: u64 = found.iter().zip(&demands).filter(|(at, _)| *at == target)
                        .map(|(_, d)| d.bytes * u64::from(d.devices)).sum();
                    let room: u64 = targets[*target].devices.iter().map(|d| match d.band {
                        HeadroomBand::Below60 if d.empty => 95,
                        HeadroomBand::Below60 => 35,
                        HeadroomBand::Below75 => 9,
                        _ => 0,
                    }).sum();
                    prop_assert!(given <= room * GI, "{} GiB on room for {}", given / GI, room);
                }
            }
            let before = named(&before, &targets);
            let len = targets.len().max(1);
            targets.rotate_left(turn % len);
            targets.reverse();
            let after = decide(&demands, 92, &targets);
            prop_assert_eq!(before, named(&after, &targets));
        }
    }
}
