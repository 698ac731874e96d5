//! What one pod may have, and what of it must be free for it.

use std::{collections::BTreeMap, sync::Arc};

use highwater_crds::ByteSize;
use serde::{Deserialize, Serialize};

use crate::{
    pool::{PodDemand, ladder},
    time::Millis,
};

/// How a pod is granted memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// A pod without a guard: its limit is guaranteed, granted when it is bound to the device and
    /// returned when it ends.
    Static,
    /// A pod whose guard asks: what its contexts need at first, then in steps ahead of its use.
    Elastic,
}

/// A surplus below this is given back whole rather than by decay, in bytes.
const CRUMB: u64 = 64 * ByteSize::MI;

/// How the part of an elastic grant above the guarantee melts away while it is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decay {
    /// What is left of it after each period, in thousandths.
    pub per_mille: u32,
    /// The period in milliseconds. A pod is idle when it has asked for nothing and charged
    /// nothing more for one.
    pub every_ms: u64,
}

impl Default for Decay {
    fn default() -> Self {
        Self { per_mille: 920, every_ms: 60_000 }
    }
}

impl Decay {
    /// What is left of a surplus in bytes after so many periods.
    pub fn left(&self, surplus: u64, periods: u64) -> u64 {
        let mut left = surplus;
        for _ in 0..periods {
            // It ends soon, unless nothing decays at all.
            let next = u64::try_from(u128::from(left) * u128::from(self.per_mille.min(1000)) / 1000);
            let next = next.unwrap_or(left);
            if next == left {
                break;
            }
            left = next;
        }
        if periods == 0 || left >= surplus {
            surplus
        } else if left < CRUMB {
            0
        } else {
            ladder::ceil(left).min(surplus)
        }
    }
}

/// A grant that was lowered while the guard may still act on the old value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settling {
    /// What the guard may still believe, in bytes.
    pub(super) from: u64,
    /// When it was lowered. What is seen later is what became of it.
    pub(super) at: Millis,
}

/// What is known of a pod and given to it. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) kind: Kind,
    guarantee: u64,
    pub(super) limit: u64,
    pub(super) bound_at: Millis,
    /// Held, as the driver says. As of the same moment as the device's numbers.
    pub(super) used: u64,
    /// Charged, as the pod's own usage page says. A hint, never more.
    charged: u64,
    /// What it may have as soon as the bytes are there. This is what the journal holds.
    pub(super) entitled: u64,
    /// What it may have now: what its quota page says. At most `entitled`.
    pub(super) granted: u64,
    pub(super) settling: Option<Settling>,
    /// What the journal gave back after a crash. Unlike what was only asked for, it is not
    /// forgotten while its bytes are still to come.
    restored: u64,
    /// The part of the guarantee that the pool covers.
    pub(super) covered: u64,
    /// What others took of its grant and was not given again.
    pub(super) taken: u64,
    /// When it last charged more or asked for more.
    pub(super) active_at: Millis,
    decayed_at: Millis,
    /// It charged more since the last sample.
    pub(super) growing: bool,
    /// It has held something since it was last granted more.
    touched: bool,
    /// What it holds was seen at least once.
    seen: bool,
}

impl Pod {
    /// A pod that is new to the pool.
    pub(super) fn new(demand: &PodDemand, now: Millis) -> Self {
        let mut pod = Self::restored(demand.kind, 0, now);
        pod.demand(demand);
        pod
    }

    /// A pod that the journal tells of. What it is owed is not known until it is seen again.
    pub(super) fn restored(kind: Kind, granted: u64, now: Millis) -> Self {
        Self {
            kind,
            guarantee: 0,
            limit: granted,
            bound_at: now,
            used: 0,
            charged: 0,
            entitled: granted,
            granted: 0,
            settling: None,
            restored: granted,
            covered: 0,
            taken: 0,
            active_at: now,
            decayed_at: now,
            growing: false,
            touched: false,
            seen: false,
        }
    }

    /// Takes over what policy and kubelet say of it.
    pub(super) fn demand(&mut self, demand: &PodDemand) {
        self.kind = demand.kind;
        self.limit = demand.limit;
        self.guarantee = demand.guarantee;
        self.bound_at = demand.bound_at;
    }

    /// Takes over what it holds. What a pod holds that is new to the pool was its own before
    /// there was anything to grant it: up to its limit it is granted with hindsight.
    pub(super) fn hold(&mut self, used: u64, charged: Option<u64>, now: Millis) {
        let before = self.committed();
        self.used = used;
        self.charged = charged.unwrap_or(used);
        let adopted = if self.seen { 0 } else { used.min(self.limit) };
        self.seen = true;
        if adopted > self.granted {
            self.granted = adopted;
            self.entitled = self.entitled.max(adopted);
        }
        self.growing = self.committed() > before;
        if self.growing {
            self.active_at = now;
        }
        self.touched |= self.committed() > 0;
    }

    /// It asks for more.
    pub(super) fn asks(&mut self, now: Millis) {
        self.active_at = now;
        self.touched = false;
    }

    /// What it is owed whatever others do.
    pub(super) fn guarantee(&self) -> u64 {
        match self.kind {
            Kind::Static => self.limit,
            Kind::Elastic => self.guarantee.min(self.limit),
        }
    }

    /// What it holds or is about to hold. It may say what it likes, but not beyond its grant.
    pub(super) fn committed(&self) -> u64 {
        match self.kind {
            Kind::Static => self.used,
            Kind::Elastic => self.used.max(self.charged.min(self.entitled)),
        }
    }

    /// Guaranteed and covered, but not granted: what the ballast owes it.
    pub(super) fn owed(&self) -> u64 {
        self.covered.saturating_sub(self.entitled)
    }

    /// What its guard may believe that it may have.
    pub(super) fn believed(&self) -> u64 {
        self.settling.map_or(self.granted, |settling| settling.from.max(self.granted))
    }

    /// What must be free for it, now or soon.
    pub(super) fn unused(&self) -> u64 {
        self.believed().max(self.entitled).saturating_sub(self.used)
    }

    /// What must be free for it now.
    pub(super) fn unused_now(&self) -> u64 {
        self.believed().saturating_sub(self.used)
    }

    /// What it holds without ever having been granted it.
    pub(super) fn ungranted(&self) -> u64 {
        self.used.saturating_sub(self.believed().max(self.entitled))
    }

    /// How far it is above a limit that was lowered below what it holds.
    pub(super) fn shrinking(&self) -> u64 {
        self.granted.saturating_sub(self.limit)
    }

    /// Granted above the guarantee and not in use.
    pub(super) fn idle_surplus(&self) -> u64 {
        match self.kind {
            Kind::Static => 0,
            Kind::Elastic => self.entitled.saturating_sub(self.guarantee().max(self.committed())),
        }
    }

    /// Lowers what it may have.
    pub(super) fn lower(&mut self, to: u64, now: Millis) {
        self.entitled = self.entitled.min(to);
        self.restored = self.restored.min(to);
        if self.granted <= to {
            return;
        }
        if self.kind == Kind::Elastic {
            self.settling = Some(Settling { from: self.believed(), at: now });
        }
        self.granted = to;
    }

    /// Drops what it is entitled to beyond what it has, what it had before a crash, and `asked`.
    pub(super) fn disentitle(&mut self, asked: u64) {
        self.entitled = self.entitled.min(self.granted.max(self.restored).max(asked.min(self.limit)));
    }

    /// Takes away what is not there any more: others took it. What its guard may still believe is
    /// not there either.
    pub(super) fn cut(&mut self, by: u64) {
        if by == 0 {
            return;
        }
        self.settling = None;
        self.restored = self.restored.min(self.entitled.saturating_sub(by));
        self.granted = self.granted.saturating_sub(by);
        self.entitled = self.entitled.saturating_sub(by);
        self.taken = self.taken.saturating_add(by);
    }

    /// Takes away, of what is still to come, what others took. How much.
    pub(super) fn forgo(&mut self, by: u64) -> u64 {
        let by = by.min(self.entitled.saturating_sub(self.granted.max(self.used)));
        self.entitled = self.entitled.saturating_sub(by);
        self.restored = self.restored.min(self.entitled);
        self.taken = self.taken.saturating_add(by);
        by
    }

    /// Takes away, of what its guard may still believe, what is not there any more. How much.
    pub(super) fn disillusion(&mut self, by: u64) -> u64 {
        let believed = self.believed();
        let by = by.min(believed.saturating_sub(self.granted.max(self.used)));
        if let Some(settling) = &mut self.settling {
            settling.from = believed.saturating_sub(by);
        }
        by
    }

    /// A sample that began at `at` shows what became of a grant that was lowered before: what the
    /// guard took in between remains granted.
    pub(super) fn settle(&mut self, at: Millis) {
        let Some(settling) = self.settling.filter(|settling| at > settling.at) else { return };
        self.settling = None;
        self.granted = self.used.max(self.charged).min(settling.from).max(self.granted);
        self.entitled = self.entitled.max(self.granted);
    }

    /// To what its grant falls by the rules of one pod alone: a lowered limit is followed as far
    /// as use has fallen; a pod in which nothing is left returns everything; the idle part above
    /// the guarantee decays, unless `still`.
    pub(super) fn falls_to(&mut self, decay: Decay, still: bool, asking: bool, now: Millis) -> u64 {
        let mut to = self.entitled.min(self.limit.max(self.committed()));
        if self.kind == Kind::Elastic && self.touched && self.committed() == 0 && !asking {
            self.touched = false;
            to = 0;
        }
        let last = self.active_at.max(self.decayed_at);
        let periods = now.since(last) / decay.every_ms.max(1);
        if still {
            // What passes while nothing may move does not count.
            self.decayed_at = now;
        } else if periods > 0 {
            self.decayed_at = last.plus(periods.saturating_mul(decay.every_ms));
            let surplus = self.idle_surplus();
            to = to.min(self.entitled.saturating_sub(surplus).saturating_add(decay.left(surplus, periods)));
        }
        to
    }
}

/// Pods in the order in which guarantees are kept: the first bound first.
pub(super) fn by_age(pods: &BTreeMap<Arc<str>, Pod>) -> Vec<Arc<str>> {
    let mut order: Vec<_> = pods.iter().map(|(uid, pod)| (pod.bound_at, uid.clone())).collect();
    order.sort();
    order.into_iter().map(|(_, uid)| uid).collect()
}

/// Says of each pod how much of its guarantee a pool of so many bytes covers, so that together it
/// is never more than the pool: first what is granted already, then the first bound first.
pub(super) fn cover(pods: &mut BTreeMap<Arc<str>, Pod>, pool: u64) {
    let order = by_age(pods);
    let mut left = pool;
    for uid in &order {
        if let Some(pod) = pods.get_mut(uid) {
            pod.covered = pod.guarantee().min(pod.entitled).min(left);
            left = left.saturating_sub(pod.covered);
        }
    }
    for uid in &order {
        if let Some(pod) = pods.get_mut(uid) {
            let more = pod.guarantee().saturating_sub(pod.covered).min(left);
            pod.covered = pod.covered.saturating_add(more);
            left = left.saturating_sub(more);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GI: u64 = ByteSize::GI;
    const MINUTE: u64 = 60_000;

    fn demand(kind: Kind, guarantee: u64, limit: u64, bound_at: u64) -> PodDemand {
        PodDemand {
            uid: "p".into(),
            kind,
            guarantee,
            limit,
            used: None,
            charged: None,
            bound_at: Millis(bound_at),
        }
    }

    fn elastic(guarantee: u64, limit: u64, granted: u64) -> Pod {
        let mut pod = Pod::new(&demand(Kind::Elastic, guarantee, limit, 0), Millis(0));
        (pod.entitled, pod.granted) = (granted, granted);
        pod
    }

    #[test]
    fn without_a_guard_the_limit_is_guaranteed() {
        let pod = Pod::new(&demand(Kind::Static, GI, 4 * GI, 0), Millis(0));
        assert_eq!(pod.guarantee(), 4 * GI);
        assert_eq!(elastic(9 * GI, 4 * GI, 0).guarantee(), 4 * GI, "never above the limit");
    }

    #[test]
    fn the_idle_part_above_the_guarantee_decays() {
        let mut pod = elastic(4 * GI, 16 * GI, 14 * GI);
        pod.hold(5 * GI, None, Millis(0));
        let mut at =
            |minute: u64, still| pod.falls_to(Decay::default(), still, false, Millis(minute * MINUTE));
        assert_eq!(at(0, false), 14 * GI);
        assert_eq!(at(1, true), 14 * GI, "not during a start hold");
        assert_eq!(at(1, false), 14 * GI, "whose time does not count");
        let once = at(2, false);
        assert_eq!(once, 5 * GI + ladder::ceil(9 * GI * 92 / 100));
        assert_eq!(at(2, false), 14 * GI, "each minute once");
    }

    #[test]
    fn a_pod_that_is_busy_keeps_what_it_has() {
        let mut pod = elastic(0, 16 * GI, 8 * GI);
        for minute in 0..10 {
            pod.hold(GI + minute, None, Millis(minute * MINUTE));
            assert_eq!(pod.falls_to(Decay::default(), false, false, Millis(minute * MINUTE)), 8 * GI);
        }
    }

    #[test]
    fn a_pod_in_which_nothing_is_left_returns_all_of_it() {
        let mut pod = elastic(4 * GI, 16 * GI, 6 * GI);
        pod.hold(0, Some(0), Millis(0));
        assert_eq!(pod.falls_to(Decay::default(), false, false, Millis(0)), 6 * GI, "it has not begun yet");
        pod.hold(GI, Some(GI), Millis(1));
        pod.hold(0, Some(0), Millis(2));
        assert_eq!(pod.falls_to(Decay::default(), true, true, Millis(2)), 6 * GI, "somebody asks for it");
        assert_eq!(pod.falls_to(Decay::default(), true, false, Millis(2)), 0);
        pod.asks(Millis(3));
        assert_eq!(
            pod.falls_to(Decay::default(), true, false, Millis(3)),
            6 * GI,
            "a new process is granted it"
        );
    }

    #[test]
    fn l09_a_limit_below_use_is_followed_as_use_falls() {
        for kind in [Kind::Static, Kind::Elastic] {
            let mut pod = Pod::new(&demand(kind, 0, 10 * GI, 0), Millis(0));
            (pod.entitled, pod.granted) = (10 * GI, 10 * GI);
            pod.hold(8 * GI, Some(8 * GI), Millis(0));
            pod.demand(&demand(kind, 0, 4 * GI, 0));
            let mut follow = |used| {
                pod.hold(used, Some(used), Millis(1));
                let to = pod.falls_to(Decay::default(), true, false, Millis(1));
                pod.lower(to, Millis(1));
                (pod.granted, pod.shrinking(), pod.ungranted())
            };
            assert_eq!(follow(8 * GI), (8 * GI, 4 * GI, 0));
            assert_eq!(follow(6 * GI), (6 * GI, 2 * GI, 0));
            assert_eq!(follow(3 * GI), (4 * GI, 0, 0));
        }
    }

    #[test]
    fn what_a_guard_takes_while_its_grant_is_lowered_remains_its_own() {
        let mut pod = elastic(0, 16 * GI, 10 * GI);
        pod.hold(2 * GI, None, Millis(0));
        pod.lower(4 * GI, Millis(5));
        assert_eq!(pod.unused(), 8 * GI, "until it is seen what became of it");
        pod.hold(2 * GI, Some(7 * GI), Millis(5));
        pod.settle(Millis(5));
        assert_eq!(pod.granted, 4 * GI, "a sample that began before shows nothing");
        pod.settle(Millis(6));
        assert_eq!((pod.granted, pod.entitled, pod.settling), (7 * GI, 7 * GI, None));
    }

    #[test]
    fn a_pod_that_lies_about_its_charges_gains_nothing() {
        let mut pod = elastic(0, 16 * GI, 4 * GI);
        pod.hold(GI, Some(u64::MAX), Millis(0));
        assert_eq!(pod.committed(), 4 * GI);
        assert_eq!(pod.unused(), 3 * GI);
        pod.settle(Millis(9));
        assert_eq!(pod.granted, 4 * GI);
        pod.hold(3 * GI, Some(0), Millis(1));
        assert_eq!(pod.unused(), GI, "the driver's number wins");
    }

    #[test]
    fn a13_guarantees_are_never_covered_twice() {
        let mut pods = BTreeMap::new();
        for (uid, bound_at) in [("c", 1), ("a", 2), ("b", 2)] {
            let demand = demand(Kind::Elastic, 12 * GI, 12 * GI, bound_at);
            pods.insert(Arc::from(uid), Pod::new(&demand, Millis(0)));
        }
        cover(&mut pods, 24 * GI);
        let covered: Vec<u64> = pods.values().map(|pod| pod.covered).collect();
        assert_eq!(covered, [12 * GI, 0, 12 * GI], "by age, then by UID");
        pods.get_mut("b").unwrap().entitled = 5 * GI;
        cover(&mut pods, 24 * GI);
        let covered: Vec<u64> = pods.values().map(|pod| pod.covered).collect();
        assert_eq!(covered, [7 * GI, 5 * GI, 12 * GI], "what is granted is kept");
    }

    proptest! {
        #[test]
        fn decay_never_adds(surplus in 0u64..200 * GI, periods in 0u64..2000, per_mille in 0u32..1200) {
            let decay = Decay { per_mille, every_ms: MINUTE };
            let left = decay.left(surplus, periods);
            prop_assert!(left <= surplus);
            prop_assert!(decay.left(surplus, periods + 1) <= left);
            if per_mille <= 920 && periods >= 200 {
                prop_assert_eq!(left, 0, "and comes to an end");
            }
        }

        #[test]
        fn an_idle_grant_falls_and_never_below_what_is_owed_or_held(
            granted in 0u64..100 * GI, guarantee in 0u64..100 * GI, used in 0u64..100 * GI,
            times in prop::collection::vec(0u64..30 * MINUTE, 1..20),
        ) {
            let mut pod = elastic(guarantee, 100 * GI, granted);
            pod.hold(used, None, Millis(0));
            // What it held before it was granted anything it was granted with hindsight.
            let (mut now, mut last) = (0, pod.granted);
            for time in times {
                now += time;
                let to = pod.falls_to(Decay::default(), false, false, Millis(now));
                pod.lower(to, Millis(now));
                prop_assert!(pod.granted <= last && pod.granted >= last.min(guarantee.max(used)));
                last = pod.granted;
            }
        }

        #[test]
        fn covered_guarantees_never_exceed_the_pool(
            pods in prop::collection::vec((0u64..50, 0u64..50, 0u64..60, 0u64..4), 0..12), pool in 0u64..200,
        ) {
            let mut map = BTreeMap::new();
            for (n, (guarantee, limit, granted, bound_at)) in pods.into_iter().enumerate() {
                let mut pod = elastic(guarantee, limit, granted);
                pod.bound_at = Millis(bound_at);
                map.insert(Arc::from(n.to_string()), pod);
            }
            cover(&mut map, pool);
            let covered: u64 = map.values().map(|pod| pod.covered).sum();
            let asked: u64 = map.values().map(Pod::guarantee).sum();
            prop_assert_eq!(covered, asked.min(pool));
            prop_assert!(map.values().all(|pod| pod.covered <= pod.guarantee()));
        }
    }
}
