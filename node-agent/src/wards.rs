//! What the loop knows of guarded pods: their pages, the processes that charge through a guard, and
//! what they hold beside what their guards say.
//!
//! The driver's numbers win. What a process holds more than its guard charged (contexts, memory that the
//! driver took by itself) is charged to it as a correction; what the pod's other processes hold is charged
//! to the pod as a whole.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    os::fd::{AsFd as _, OwnedFd},
    sync::{Arc, atomic::Ordering},
};

use highwater_crds::{ByteSize, ManagedMemory, StrengthReason};
use highwater_guard_abi::{
    AGENT_SLOT, MAX_DEVICES,
    charge::Audit,
    page::{DeviceQuota, Managed},
    wire::{STRENGTH_MPS, STRENGTH_STOPPED, STRENGTH_UNCOVERED},
};
use highwater_policy::{
    ledger::{Charge, Holder},
    pod::GuardOptIn,
    quota::{DEFAULT_CONTEXT, EffectiveQuota},
    time::Millis,
};
use tracing::{debug, info, warn};

use crate::{
    engine::Order,
    guard::{self, News, Pages, Refusal, devices},
    link,
    strength::Guarded,
    world::{Pod, World},
};

/// How long the keeper may take to give back the pages of an earlier agent, in milliseconds.
const FETCH_WITHIN: u64 = 3_000;
/// How often it is asked meanwhile.
const FETCH_AGAIN: u64 = 250;
/// How long the kubelet may take to say which devices a pod has, on a node with more than a page has
/// room for, in milliseconds.
const ASSIGN_WITHIN: u64 = 5_000;
/// How long after a pod of an earlier agent is served it is not yet known which of its processes have
/// a guard, in milliseconds.
const FIRST: u64 = 1_000;
/// How long the driver may still list a process that has ended, in milliseconds.
const DYING: u64 = 5_000;
/// How long what was found of a process that avoids the guard is kept, in milliseconds.
const REMEMBERED: u64 = 60_000;
/// Processes of a pod that are remembered for having avoided the guard.
const OUTSIDERS: usize = 64;
/// What the driver may take by itself for a process before its guard is taken to be avoided: local
/// memory, modules that are loaded late, graphs.
const OWN_GROWTH: u64 = ByteSize::GI;
/// Differences below this are not corrected.
const CORRECTED_FROM: u64 = 64 * ByteSize::KI;
/// For so many samples a process must rest before its context is taken to be made.
const MADE: u32 = 5;
/// How often the totals in pages are compared with what their slots hold, in milliseconds.
const AUDIT_EVERY: u64 = 10_000;
/// What a context may be learned to take.
const CONTEXT: std::ops::RangeInclusive<u64> = 16 * ByteSize::MI..=4 * ByteSize::GI;

/// The guarded pods of the node, by the UID that the kubelet knows.
#[derive(Debug, Default)]
pub(crate) struct Wards {
    wards: BTreeMap<Arc<str>, Ward>,
    /// What a context was seen to take, by the UUID of the device.
    contexts: HashMap<Arc<str>, u64>,
}

/// A guarded pod.
#[derive(Debug)]
pub(crate) struct Ward {
    pub(crate) pod: Arc<Pod>,
    since: Millis,
    /// When the keeper was last asked for the pages of an earlier agent; it has not answered yet.
    asked: Option<Millis>,
    /// Absent while it is not known whether an earlier agent left some.
    pages: Option<Arc<Pages>>,
    /// They were an earlier agent's.
    resumed: bool,
    /// Since when it is served.
    served: Option<Millis>,
    /// UUIDs of the devices by ordinal.
    devices: Vec<Arc<str>>,
    /// As an earlier agent had them, until that is taken over.
    order: Vec<[u8; 16]>,
    /// The quota of the layer that binds, by ordinal.
    terms: Vec<Option<EffectiveQuota>>,
    /// What its quota page says, by ordinal.
    written: Vec<DeviceQuota>,
    members: BTreeMap<u32, Member>,
    /// Processes that had slots and ended lately.
    former: BTreeMap<u32, Millis>,
    /// Processes whose guard speaks no version that is spoken here.
    incompatible: BTreeSet<u32>,
    outsiders: BTreeMap<u32, Outsider>,
    /// Corrections by slot and ordinal, as ordered.
    corrections: BTreeMap<(usize, usize), i64>,
    /// Devices for which its guards asked for more.
    wants: BTreeSet<Arc<str>>,
    /// What was seen of each device at the last sample, by ordinal.
    views: Vec<View>,
    /// What came of comparing the totals in its page with what its slots hold, by ordinal.
    audits: Vec<Audited>,
    /// When that was.
    audited: Millis,
}

/// What came of comparing a total with the sum that it ought to be.
#[derive(Clone, Copy, Debug, Default)]
struct Audited {
    /// They differed at the last look.
    differs: bool,
    /// By how much, once they differed twice in a row.
    told: Option<u64>,
}

impl Audited {
    /// Takes in a look. True where a difference has just become certain.
    fn look(&mut self, audit: Audit) -> bool {
        let difference = audit.charged.abs_diff(audit.sum);
        let again = std::mem::replace(&mut self.differs, difference > 0) && difference > 0;
        let before = self.told.replace(if again { difference } else { 0 });
        again && before.is_none_or(|before| before == 0)
    }
}

/// A process that charges through a guard.
#[derive(Debug, Default)]
struct Member {
    comm: Box<str>,
    slots: Vec<usize>,
    flags: u32,
    /// By ordinal.
    at: Vec<Standing>,
}

/// A process on a device.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    /// What it has charged for each of its contexts, as far as can be told: the estimate in the page when
    /// it joined, and from its next charge on the present one.
    estimate: u64,
    /// What the driver said and what it had charged at the last sample.
    last: Option<(u64, u64)>,
    /// For so many samples in a row neither has changed.
    rests: u32,
    /// For so many samples in a row it has held far more than it charged.
    excess: u32,
}

/// What came of comparing what a process charged with what the driver says.
#[derive(Clone, Copy, Debug)]
struct Compared {
    /// It goes round its guard.
    avoids: bool,
    /// What it holds that way.
    outside: u64,
    /// What its context takes beyond what was charged for it.
    context: i64,
    /// What a context was seen to take.
    context_seen: Option<u64>,
    /// What to correct its charges by, if that can be told.
    correction: Option<i64>,
    /// The least that they may be corrected by.
    floor: i64,
}

impl Standing {
    /// Takes in what the driver says that it holds, where it charged `held`, contexts were `learned` to take
    /// so much, and the page says `estimate`.
    fn compare(&mut self, held: u64, bytes: u64, learned: Option<u64>, estimate: u64) -> Compared {
        let last = self.last.replace((bytes, held));
        if last.is_some_and(|(_, before)| before != held) {
            self.estimate = estimate;
        }
        let before = last.map_or(0, |(_, held)| held);
        let context = learned.unwrap_or(self.estimate);
        // Charges come before, and are taken back after, what they stand for: the driver never shows more
        // than the larger of two, but for what it takes by itself.
        let excess = bytes.saturating_sub(held.max(before));
        let far = excess > OWN_GROWTH.saturating_add(context);
        self.excess = if far { self.excess.saturating_add(1) } else { 0 };
        // One that is about to end may have given all back since the driver was asked.
        let never_charged = held == 0 && before == 0 && last.is_some();
        let avoids = never_charged || self.excess >= 2;

        let at_rest = last == Some((bytes, held));
        self.rests = if at_rest { self.rests.saturating_add(1) } else { 0 };
        let only_context = held > 0 && held == self.estimate && self.rests >= MADE;
        let surplus = signed(context).saturating_sub(signed(self.estimate));
        // Less than it charged is right only as far as the estimate of its context was too high: the driver
        // lists no managed memory, and nobody's shared one.
        let floor = if learned.is_some() { surplus.min(0) } else { 0 };
        let difference = signed(bytes).saturating_sub(signed(held));
        Compared {
            avoids,
            outside: if avoids { excess } else { 0 },
            context: if avoids { 0 } else { surplus },
            context_seen: Some(bytes).filter(|bytes| only_context && CONTEXT.contains(bytes)),
            correction: (at_rest || avoids).then(|| difference.max(floor)),
            floor,
        }
    }
}

/// A process that holds memory outside the guard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outsider {
    /// Its command name, once it was looked at.
    pub(crate) comm: Option<Box<str>>,
    other_root: bool,
    /// When it was first seen, and last.
    pub(crate) since: Millis,
    last: Millis,
}

/// The three views of what a pod holds on a device: its guards', the agent's, and the difference to the
/// driver's by what makes it. In bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    /// What its guards have charged.
    pub(crate) charged: u64,
    /// What contexts take beyond what was estimated for them; less, if below 0.
    pub(crate) context: i64,
    /// What is held by processes, or parts of processes, that do not charge.
    pub(crate) outside: u64,
    /// What the driver took by itself, less what it does not list.
    pub(crate) driver: i64,
    /// Processes with a guard that hold something there.
    pub(crate) processes: usize,
    /// Whether all that is held is charged.
    pub(crate) guarded: Guarded,
    /// One of the processes that do not charge, if there are.
    pub(crate) outsider: Option<u32>,
}

impl Wards {
    /// Every guarded pod.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Ward> {
        self.wards.values()
    }

    /// A guarded pod.
    pub(crate) fn get(&self, pod: &str) -> Option<&Ward> {
        self.wards.get(pod)
    }

    /// Whether a pod's guards asked for memory of a device.
    pub(crate) fn wants(&self, pod: &str, device: &str) -> bool {
        self.wards.get(pod).is_some_and(|ward| ward.wants.contains(device))
    }

    /// What is seen of a pod's guards on a device.
    pub(crate) fn view(&self, pod: &str, device: &str) -> Option<&View> {
        let ward = self.wards.get(pod)?;
        ward.views.get(ward.ordinal(device)?)
    }

    /// What a context was seen to take on a device.
    pub(crate) fn context(&self, device: &str) -> Option<u64> {
        self.contexts.get(device).copied()
    }

    /// Follows which pods there are. `given` are the devices of a pod as the kubelet says.
    pub(crate) fn follow(
        &mut self,
        world: &World,
        node: &[Arc<str>],
        keeper: Keeper,
        given: impl Fn(&Pod) -> Vec<Arc<str>>,
        now: Millis,
        mut order: impl FnMut(Order),
    ) {
        let is_there = |uid: &str| {
            world.pods.get(uid).is_some_and(|pod| pod.facts.guard != GuardOptIn::No && !pod.facts.finished)
        };
        // Before the pods were listed nobody is known to be gone.
        if world.synced.pods {
            let gone: Vec<_> = self.wards.keys().filter(|uid| !is_there(uid)).cloned().collect();
            for pod in gone {
                self.wards.remove(&pod);
                order(Order::Guard(guard::Order::Leave { pod }));
            }
        }
        for pod in world.pods.values().filter(|pod| is_there(&pod.kubelet_uid)) {
            let ward = self
                .wards
                .entry(Arc::clone(&pod.kubelet_uid))
                .or_insert_with(|| Ward::new(Arc::clone(pod), now));
            ward.pod = Arc::clone(pod);
            ward.seek_pages(keeper, now, &mut order);
            // Whoever may have had its pages before has numbered its devices.
            if !node.is_empty() && ward.pages.is_some() {
                ward.know(node, || given(pod), now);
            }
        }
    }

    /// Whether there is a page that does not say everything yet.
    pub(crate) fn incomplete(&self) -> bool {
        self.wards.values().any(|ward| ward.pages.is_some() && ward.written.len() < ward.devices.len())
    }

    /// What holds for a pod on the devices of its page.
    pub(crate) fn set_terms(&mut self, pod: &str, terms: Vec<Option<EffectiveQuota>>) {
        if let Some(ward) = self.wards.get_mut(pod) {
            ward.terms = terms;
        }
    }

    /// The pods whose pages are there and that are not served yet.
    pub(crate) fn unserved(&self) -> Vec<Arc<str>> {
        let ready = |ward: &Ward| ward.served.is_none() && ward.pages.is_some() && !ward.written.is_empty();
        self.wards.values().filter(|ward| ready(ward)).map(|ward| Arc::clone(&ward.pod.kubelet_uid)).collect()
    }

    /// Begins to serve a pod.
    pub(crate) fn serve(&mut self, pod: &str, now: Millis, mut order: impl FnMut(Order)) {
        let Some(ward) = self.wards.get_mut(pod) else { return };
        let Some(pages) = ward.pages.clone() else { return };
        ward.served = Some(now);
        let pod = Arc::clone(&ward.pod.kubelet_uid);
        order(Order::Keeper(link::Order::Store { pod: Arc::clone(&pod), pages: Arc::clone(&pages) }));
        order(Order::Guard(guard::Order::Serve { pod, pages, resumed: ward.resumed }));
    }

    /// The keeper answers anew: it may have lost what it kept.
    pub(crate) fn store(&self, mut order: impl FnMut(Order)) {
        for ward in self.wards.values().filter(|ward| ward.served.is_some()) {
            if let Some(pages) = ward.pages.clone() {
                let pod = Arc::clone(&ward.pod.kubelet_uid);
                order(Order::Keeper(link::Order::Store { pod, pages }));
            }
        }
    }

    /// What an earlier agent had stored for a pod.
    pub(crate) fn fetched(&mut self, pod: &str, kept: Vec<OwnedFd>, keeper: Keeper, now: Millis) {
        let Some(ward) = self.wards.get_mut(pod).filter(|ward| ward.pages.is_none()) else { return };
        let mut kept = kept.into_iter();
        let (usage, quota) = (kept.next(), kept.next());
        let resumed = usage.and_then(|usage| {
            Pages::resume(usage)
                .inspect_err(|error| {
                    warn!(pod, %error, "the pages of an earlier agent are of no use: what the pod has is charged anew");
                })
                .ok()
        });
        match resumed {
            Some(pages) => {
                info!(pod, "a guarded pod's charges are taken over from an earlier agent");
                for (slot, _) in pages.usage.slots_in_use().chain([(AGENT_SLOT, 0)]) {
                    for ordinal in 0..MAX_DEVICES {
                        let bytes = pages.usage.correction(slot, ordinal);
                        if bytes != 0 {
                            ward.corrections.insert((slot, ordinal), bytes);
                        }
                    }
                }
                ward.pages = Some(Arc::new(pages));
                ward.resumed = true;
                // Earlier agents kept none.
                ward.order = quota.and_then(|quota| devices(quota.as_fd()).ok()).unwrap_or_default();
            }
            // One that is on its way may still have them.
            None if keeper == Keeper::Away && now.since(ward.since) < FETCH_WITHIN => {}
            None => ward.begin(),
        }
    }

    /// What the thread that serves guards says of processes.
    pub(crate) fn hear(&mut self, news: &News, now: Millis) {
        let pod = match news {
            News::Joined { pod, .. }
            | News::Left { pod, .. }
            | News::Weakness { pod, .. }
            | News::Incompatible { pod, .. }
            | News::Inspected { pod, .. } => pod,
            News::Wants(want) => &want.pod,
            News::Gone { .. } | News::Stranger { .. } | News::Garbage { .. } => return,
        };
        let Some(ward) = self.wards.get_mut(pod) else { return };
        match news {
            News::Joined { pid, slot, comm, .. } => {
                let estimates = ward.written.iter().map(|quota| quota.context);
                let mut at: Vec<_> =
                    estimates.map(|estimate| Standing { estimate, ..Standing::default() }).collect();
                at.resize(ward.devices.len(), Standing::default());
                let member = ward.members.entry(*pid).or_insert_with(|| Member { at, ..Member::default() });
                member.comm.clone_from(comm);
                if !member.slots.contains(slot) {
                    member.slots.push(*slot);
                }
                ward.former.remove(pid);
                ward.incompatible.remove(pid);
                ward.outsiders.remove(pid);
            }
            News::Left { pid, slot, .. } => {
                ward.corrections.retain(|(of, _), _| of != slot);
                if let Some(member) = ward.members.get_mut(pid) {
                    member.slots.retain(|held| held != slot);
                    if member.slots.is_empty() {
                        ward.members.remove(pid);
                        ward.former.insert(*pid, now);
                    }
                }
            }
            News::Weakness { pid, flags, .. } => {
                if let Some(member) = ward.members.get_mut(pid) {
                    member.flags = *flags;
                }
            }
            News::Incompatible { pid, .. } => {
                if ward.incompatible.len() < OUTSIDERS {
                    ward.incompatible.insert(*pid);
                }
            }
            News::Inspected { pid, comm, other_root, .. } => {
                if let Some(outsider) = ward.outsiders.get_mut(pid) {
                    outsider.comm = Some(comm.clone());
                    outsider.other_root = *other_root;
                }
            }
            News::Wants(want) => {
                let ordinal = usize::try_from(want.device).ok();
                if let Some(device) = ordinal.and_then(|ordinal| ward.devices.get(ordinal)) {
                    ward.wants.insert(Arc::clone(device));
                }
            }
            News::Gone { .. } | News::Stranger { .. } | News::Garbage { .. } => {}
        }
    }

    /// Compares what guards and driver say of a device.
    pub(crate) fn sample(
        &mut self,
        device: &Arc<str>,
        charges: Option<&[Charge]>,
        now: Millis,
        mut order: impl FnMut(Order),
    ) {
        let learned = self.contexts.get(device).copied();
        let mut seen = None;
        for ward in self.wards.values_mut() {
            let Some(ordinal) = ward.ordinal(device) else { continue };
            // What the driver does not list cannot be compared: what was seen stands.
            let Some(charges) = charges else { continue };
            let of_pod = |charge: &&Charge| matches!(&charge.holder, Holder::Container { pod, .. } if *pod == ward.pod.kubelet_uid);
            let listed: Vec<(u32, Option<u64>)> =
                charges.iter().filter(of_pod).map(|charge| (charge.pid, charge.bytes)).collect();
            let least = ward.compare(ordinal, &listed, learned, now, &mut order);
            seen = seen.into_iter().chain(least).min();
        }
        if let Some(bytes) = seen
            && learned.is_none_or(|learned| bytes < learned)
        {
            debug!(%device, bytes, "what a context takes was seen");
            self.contexts.insert(Arc::clone(device), bytes);
        }
    }

    /// Compares the totals in all pages with what their slots hold, if it is time. Returns the pods and
    /// devices where they have come to differ, which only writes past the guard can bring about.
    pub(crate) fn audit(&mut self, now: Millis) -> Vec<(Arc<Pod>, Arc<str>, u64)> {
        let mut found = Vec::new();
        for ward in self.wards.values_mut().filter(|ward| now.since(ward.audited) >= AUDIT_EVERY) {
            ward.audited = now;
            for ordinal in ward.audit() {
                if let (Some(device), Some(bytes)) = (ward.devices.get(ordinal), ward.misaccounted(ordinal)) {
                    found.push((Arc::clone(&ward.pod), Arc::clone(device), bytes));
                }
            }
        }
        found
    }

    /// Writes what a pod may have on a device.
    pub(crate) fn write(&mut self, pod: &str, ordinal: usize, quota: DeviceQuota) {
        let Some(ward) = self.wards.get_mut(pod) else { return };
        let Some(pages) = &ward.pages else { return };
        let Some(written) = ward.written.get_mut(ordinal) else {
            // Ordinals are given in turn.
            if ordinal == ward.written.len() {
                pages.quota.set(ordinal, &quota);
                ward.written.push(quota);
            }
            return;
        };
        if (DeviceQuota { free: quota.free, ..*written }) != quota {
            pages.quota.set(ordinal, &quota);
        } else if written.free != quota.free {
            pages.quota.set_free(ordinal, quota.free);
        }
        *written = quota;
    }

    /// Writes what a pod is granted on a device.
    pub(crate) fn grant(&mut self, pod: &str, device: &str, bytes: u64) {
        let Some(ward) = self.wards.get_mut(pod) else { return };
        let Some(ordinal) = ward.ordinal(device) else { return };
        if let (Some(pages), Some(written)) = (&ward.pages, ward.written.get_mut(ordinal))
            && written.granted != bytes
        {
            pages.quota.set_granted(ordinal, bytes);
            written.granted = bytes;
        }
    }
}

/// Where the keeper stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// This agent was given none.
    None,
    /// It does not answer, or not yet.
    Away,
    /// It answers.
    Up,
}

impl Ward {
    fn new(pod: Arc<Pod>, now: Millis) -> Self {
        Self {
            pod,
            since: now,
            asked: None,
            pages: None,
            resumed: false,
            served: None,
            devices: Vec::new(),
            order: Vec::new(),
            terms: Vec::new(),
            written: Vec::new(),
            members: BTreeMap::new(),
            former: BTreeMap::new(),
            incompatible: BTreeSet::new(),
            outsiders: BTreeMap::new(),
            corrections: BTreeMap::new(),
            wants: BTreeSet::new(),
            views: Vec::new(),
            audits: Vec::new(),
            audited: now,
        }
    }

    /// UUIDs of its devices by ordinal.
    pub(crate) fn devices(&self) -> &[Arc<str>] {
        &self.devices
    }

    /// Its pages.
    pub(crate) fn pages(&self) -> Option<&Pages> {
        self.pages.as_deref()
    }

    /// The quota of the layer that binds on the device of this ordinal.
    pub(crate) fn quota(&self, ordinal: usize) -> Option<&EffectiveQuota> {
        self.terms.get(ordinal)?.as_ref()
    }

    /// Whether it is known what holds for it.
    pub(crate) fn has_terms(&self) -> bool {
        self.terms.len() == self.devices.len()
    }

    /// What its quota page says.
    pub(crate) fn written(&self, ordinal: usize) -> Option<&DeviceQuota> {
        self.written.get(ordinal)
    }

    /// The ordinal of a device in its pages.
    pub(crate) fn ordinal(&self, device: &str) -> Option<usize> {
        self.devices.iter().position(|known| **known == *device)
    }

    /// The command name of a process that avoids the guard, and since when it does.
    pub(crate) fn outsider(&self, pid: u32) -> Option<(Option<&str>, Millis)> {
        if let Some(outsider) = self.outsiders.get(&pid) {
            return Some((outsider.comm.as_deref(), outsider.since));
        }
        // One that has a guard and goes round it.
        self.members.get(&pid).map(|member| (Some(&*member.comm), Millis::default()))
    }

    /// What its guards have charged on a device, corrections included. It may say what it likes.
    pub(crate) fn charged(&self, ordinal: usize) -> u64 {
        let Some(pages) = &self.pages else { return 0 };
        let slots = self.members.values().flat_map(|member| &member.slots);
        let held = slots.fold(0u64, |sum, slot| sum.saturating_add(pages.usage.held(*slot, ordinal)));
        let corrections = self.corrections.iter().filter(|((_, of), _)| *of == ordinal);
        corrections.fold(held, |sum, (_, bytes)| sum.saturating_add_signed(*bytes))
    }

    /// Connections that sent what is no frame of a guard.
    pub(crate) fn garbage(&self) -> u64 {
        self.pages.as_ref().map_or(0, |pages| pages.tally.garbage.load(Ordering::Relaxed))
    }

    /// Allocations that its guards refused on a device, for this reason.
    pub(crate) fn refused(&self, ordinal: usize, why: Refusal) -> u64 {
        self.pages.as_ref().map_or(0, |pages| pages.tally.refused(ordinal, why))
    }

    /// How far the total in its page is from the sum of its slots on a device, in bytes, as last seen
    /// twice in a row. `None` before the first look.
    pub(crate) fn misaccounted(&self, ordinal: usize) -> Option<u64> {
        self.audits.get(ordinal)?.told
    }

    /// Compares the totals in its page with what its slots hold. Returns the ordinals where they have come
    /// to differ.
    fn audit(&mut self) -> Vec<usize> {
        let Some(pages) = self.pages.clone() else { return Vec::new() };
        self.audits.resize(self.devices.len(), Audited::default());
        let looks = self.audits.iter_mut().enumerate();
        looks
            .filter_map(|(ordinal, audited)| audited.look(pages.usage.audit(ordinal)?).then_some(ordinal))
            .collect()
    }

    fn begin(&mut self) {
        match Pages::create() {
            Ok(pages) => self.pages = Some(Arc::new(pages)),
            Err(error) => warn!(pod = self.pod.facts.name, namespace = self.pod.facts.namespace, %error,
                "cannot make the pages of a guarded pod: it is tried again"),
        }
    }

    /// Finds out whether an earlier agent left pages; makes new ones where none did.
    fn seek_pages(&mut self, keeper: Keeper, now: Millis, order: &mut impl FnMut(Order)) {
        if self.pages.is_some() {
            return;
        }
        if keeper == Keeper::None || now.since(self.since) >= FETCH_WITHIN {
            self.begin();
        } else if self.asked.is_none_or(|asked| now.since(asked) >= FETCH_AGAIN) {
            self.asked = Some(now);
            order(Order::Keeper(link::Order::Fetch { pod: Arc::clone(&self.pod.kubelet_uid) }));
        }
    }

    /// Whether its quota page says something of a device.
    pub(crate) fn is_written(&self, ordinal: usize) -> bool {
        ordinal < self.written.len()
    }

    /// Gives its devices their ordinals, for good: as an earlier agent did, for that is what its processes
    /// charge by; else those that the kubelet gave it, then the others.
    fn know(&mut self, node: &[Arc<str>], given: impl FnOnce() -> Vec<Arc<str>>, now: Millis) {
        if self.devices.len() >= MAX_DEVICES || node.iter().all(|device| self.devices.contains(device)) {
            return;
        }
        let given = given();
        if given.is_empty() && node.len() > MAX_DEVICES && now.since(self.since) < ASSIGN_WITHIN {
            return;
        }
        for bytes in std::mem::take(&mut self.order) {
            let there = node.iter().find(|device| uuid_bytes(device) == Some(bytes));
            self.devices.push(there.map_or_else(|| named(bytes), Arc::clone));
        }
        for device in given.iter().chain(node).filter(|device| node.contains(device)) {
            let Some(bytes) = uuid_bytes(device) else { continue };
            if let Some(known) = self.devices.iter_mut().find(|known| uuid_bytes(known) == Some(bytes)) {
                // It was away when its place was taken over, and what kind of device it is not known.
                known.clone_from(device);
            } else if self.devices.len() < MAX_DEVICES {
                self.devices.push(Arc::clone(device));
            }
        }
        self.views.resize(self.devices.len(), View::default());
        for member in self.members.values_mut() {
            member.at.resize(self.devices.len(), Standing::default());
        }
    }

    /// Compares what its guards charged on a device with what the driver lists. Returns what a context was
    /// seen to take.
    fn compare(
        &mut self,
        ordinal: usize,
        listed: &[(u32, Option<u64>)],
        learned: Option<u64>,
        now: Millis,
        order: &mut impl FnMut(Order),
    ) -> Option<u64> {
        let pages = self.pages.clone()?;
        // Those of an earlier agent's processes that have a slot are about to be told. All others say
        // so before they can hold anything.
        let unknown_for = if self.resumed { FIRST } else { 0 };
        self.served.filter(|served| now.since(*served) >= unknown_for)?;
        let estimate = self.written.get(ordinal).map_or(DEFAULT_CONTEXT, |written| written.context);
        let (mut view, mut reason, mut corrections) = (View::default(), None, Vec::new());
        let mut uncovered = false;
        let mut seen: Option<u64> = None;
        self.former.retain(|_, ended| now.since(*ended) < DYING);
        for (pid, member) in &mut self.members {
            let slots = member.slots.iter();
            let held = slots.fold(0u64, |sum, slot| sum.saturating_add(pages.usage.held(*slot, ordinal)));
            view.charged = view.charged.saturating_add(held);
            let Some(standing) = member.at.get_mut(ordinal) else { continue };
            let slot = member.slots.first().copied();
            let Some((_, bytes)) = listed.iter().find(|(listed, _)| listed == pid) else {
                // It has no context there: the driver took nothing for it.
                *standing = Standing { estimate: standing.estimate, ..Standing::default() };
                view.processes += usize::from(held > 0);
                corrections.extend(slot.map(|slot| (*pid, slot, 0)));
                continue;
            };
            view.processes += 1;
            uncovered |= member.flags & STRENGTH_UNCOVERED != 0;
            let weak = weakness(member.flags);
            reason = reason.or(weak);
            // Where the driver does not say how much, there is nothing to compare.
            let Some(bytes) = bytes else { continue };
            let found = standing.compare(held, *bytes, learned, estimate);
            seen = seen.into_iter().chain(found.context_seen).min();
            view.outside = view.outside.saturating_add(found.outside);
            view.context = view.context.saturating_add(found.context);
            if found.avoids && weak.is_none() {
                view.outsider = view.outsider.or(Some(*pid));
                reason = Some(StrengthReason::OutsideGuard);
            }
            let Some(slot) = slot else { continue };
            let former = self.corrections.get(&(slot, ordinal)).copied().unwrap_or(0);
            // While it does not rest: no less than its estimate allows, since its guard may have followed.
            corrections.push((*pid, slot, found.correction.unwrap_or(former.max(found.floor))));
        }
        for (pid, bytes) in listed {
            if !self.members.contains_key(pid) && !self.former.contains_key(pid) {
                view.outside = view.outside.saturating_add(bytes.unwrap_or(0));
                reason = Some(self.see_outsider(*pid, now, order));
                view.outsider = Some(*pid);
            }
        }
        self.outsiders.retain(|_, outsider| now.since(outsider.last) < REMEMBERED);
        corrections.push((0, AGENT_SLOT, signed(self.outside_of_members(listed))));
        for (pid, slot, bytes) in corrections {
            self.correct(ordinal, pid, slot, bytes, order);
        }
        let used = listed.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(bytes.unwrap_or(0)));
        view.driver = signed(used)
            .saturating_sub(signed(view.charged))
            .saturating_sub(view.context)
            .saturating_sub(signed(view.outside));
        view.guarded = match reason {
            Some(reason) => Guarded::Not(reason),
            None if uncovered => Guarded::Uncovered,
            None if view.processes > 0 => Guarded::All,
            None => Guarded::Expected,
        };
        if let Some(place) = self.views.get_mut(ordinal) {
            *place = view;
        }
        seen
    }

    /// Has a slot corrected, if that is not so already.
    fn correct(&mut self, ordinal: usize, pid: u32, slot: usize, bytes: i64, order: &mut impl FnMut(Order)) {
        let former = self.corrections.get(&(slot, ordinal)).copied().unwrap_or(0);
        let close = bytes != 0 && former.abs_diff(bytes) < CORRECTED_FROM;
        if former == bytes || close {
            return;
        }
        self.corrections.insert((slot, ordinal), bytes);
        let pod = Arc::clone(&self.pod.kubelet_uid);
        order(Order::Guard(guard::Order::Correct { pod, pid, slot, device: ordinal, bytes }));
    }

    /// Bytes of listed processes that have no guard.
    fn outside_of_members(&self, listed: &[(u32, Option<u64>)]) -> u64 {
        let outside = listed
            .iter()
            .filter(|(pid, _)| !self.members.contains_key(pid) && !self.former.contains_key(pid));
        outside.fold(0u64, |sum, (_, bytes)| sum.saturating_add(bytes.unwrap_or(0)))
    }

    /// Takes note of a process that holds memory outside the guard; says why its pod is not guarded.
    fn see_outsider(&mut self, pid: u32, now: Millis, order: &mut impl FnMut(Order)) -> StrengthReason {
        if !self.outsiders.contains_key(&pid) && self.outsiders.len() < OUTSIDERS {
            let outsider = Outsider { comm: None, other_root: false, since: now, last: now };
            self.outsiders.insert(pid, outsider);
            let pod = Arc::clone(&self.pod.kubelet_uid);
            order(Order::Guard(guard::Order::Inspect { pod, pid }));
        }
        let known = self.outsiders.get_mut(&pid);
        let other_root = known.is_some_and(|outsider| {
            outsider.last = now;
            outsider.other_root
        });
        if self.incompatible.contains(&pid) {
            StrengthReason::GuardVersion
        } else if other_root {
            StrengthReason::OtherRoot
        } else if self.members.is_empty() && self.former.is_empty() {
            StrengthReason::GuardNotConnected
        } else {
            StrengthReason::OutsideGuard
        }
    }
}

/// What a guard says that keeps it from guarding.
fn weakness(flags: u32) -> Option<StrengthReason> {
    if flags & STRENGTH_MPS != 0 {
        Some(StrengthReason::Mps)
    } else if flags & STRENGTH_STOPPED != 0 {
        Some(StrengthReason::UnknownDriver)
    } else {
        None
    }
}

/// How a quota treats managed memory, in the words of the page.
pub(crate) fn managed(managed: ManagedMemory) -> Managed {
    match managed {
        ManagedMemory::Ignore => Managed::Ignore,
        ManagedMemory::Charge => Managed::Charge,
        ManagedMemory::Refuse => Managed::Refuse,
    }
}

/// What a context is taken to need on a device where `learned` was seen.
pub(crate) fn context_or_default(learned: Option<u64>) -> u64 {
    learned.unwrap_or(DEFAULT_CONTEXT)
}

/// The bytes of a UUID such as `GPU-6c1d...` or `MIG-6c1d...`.
pub(crate) fn uuid_bytes(uuid: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = uuid.get(4..)?.bytes().filter(|c| *c != b'-').collect();
    let mut bytes = [0; 16];
    let pairs = digits.chunks_exact(2);
    if digits.len() != 32 || !uuid.is_ascii() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// A whole device by the bytes of its UUID.
fn named(bytes: [u8; 16]) -> Arc<str> {
    let mut name = String::from("GPU-");
    for (place, digit) in format!("{:032x}", u128::from_be_bytes(bytes)).chars().enumerate() {
        if [8, 12, 16, 20].contains(&place) {
            name.push('-');
        }
        name.push(digit);
    }
    name.into()
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
