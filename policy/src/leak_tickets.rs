//! Replicas that leak alike are one ticket on their workload and not a restart each: what they share
//! is their program, and a restart of each only hides that.
//!
//! Three pods of one workload and one revision are a ticket where their memory grows in the same way,
//! about as fast, and was first suspected at about the same *age*. Age tells a leak from load: what a
//! busy hour does to replicas it does to all at one time of day, however old they are.
//!
//! All of this is derived from incidents and pods, so it is the same after a restart of the operator,
//! and by another leader. A pod stays on its ticket as long as its incident is open: until its
//! suspicion clears, it goes, or the workload's template changes.

use std::collections::{BTreeMap, BTreeSet};

use highwater_crds::{LeakClass, LeakMemory, Mode};
use jiff::{SignedDuration, Timestamp};

use crate::leak_acts::size;

/// So many pods that leak alike are a ticket.
pub const ALIKE: usize = 3;
/// Slopes, and ages, are alike up to this factor.
const FACTOR: i64 = 3;
/// Most members that one is compared with; a ticket of these is a ticket.
const MOST: usize = 64;

/// One open incident about a leak of a pod of the workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// UID of the incident.
    pub incident: String,
    /// UID of the pod,
    pub pod: String,
    /// its name,
    pub name: String,
    /// and its node.
    pub node: String,
    /// Mode of the policy.
    pub mode: Mode,
    /// Which memory grows,
    pub memory: LeakMemory,
    /// and how.
    pub class: LeakClass,
    /// How fast, in bytes an hour.
    pub slope: i64,
    /// When it was first suspected,
    pub since: Timestamp,
    /// and how old the pod was then.
    pub age: SignedDuration,
    /// What the pod was made from: pods of another revision run another program.
    pub revision: String,
    /// A pod of another revision was made after this one: the workload's template has changed.
    pub replaced: bool,
    /// Its incident is on a ticket already.
    pub ticketed: bool,
    /// An act because of it is approved or under way. It leaks like the others, but comes to no ticket
    /// meanwhile.
    pub acting: bool,
}

impl Member {
    /// Who may be on a ticket together. `None`: nobody with this one.
    fn family(&self) -> Option<(Mode, LeakMemory, &str, bool)> {
        if self.replaced || self.class == LeakClass::Saturating || self.slope <= 0 {
            return None;
        }
        Some((self.mode, self.memory, &self.revision, self.class == LeakClass::Exponential))
    }

    fn is_like(&self, other: &Self, ages: SignedDuration) -> bool {
        let [low, high] = [self.slope.min(other.slope), self.slope.max(other.slope)];
        let [young, old] = [self.age.min(other.age), self.age.max(other.age)];
        let aligned =
            old.saturating_sub(young) <= ages || young.checked_mul(3).is_none_or(|thrice| old <= thrice);
        self.family().is_some()
            && self.family() == other.family()
            && high <= low.saturating_mul(FACTOR)
            && aligned
    }
}

/// The ticket that a pod is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Whether this incident comes to it now and is the one that tells of it.
    pub tells: bool,
    /// Names of the pods on it, with their nodes.
    pub pods: BTreeMap<String, String>,
    /// The least and the greatest slope of these, in bytes an hour.
    pub slopes: (i64, i64),
}

impl Ticket {
    /// The ticket in a sentence.
    pub fn sentence(&self, workload: &str) -> String {
        let nodes: BTreeSet<&str> = self.pods.values().map(String::as_str).collect();
        let pods: Vec<&str> = self.pods.keys().take(4).map(String::as_str).collect();
        let more = self.pods.len().saturating_sub(pods.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!(
            "{} pods of {workload} on {} nodes ({}{more}) leak alike, by {} to {} an hour from the same age on: one ticket on the workload and no restart of each; its team has to look",
            self.pods.len(),
            nodes.len(),
            pods.join(", "),
            size(self.slopes.0),
            size(self.slopes.1),
        )
    }
}

/// The ticket that the incident `own` is on, if it is on one. `members` are all open incidents about
/// leaks of its workload, this one included, in any order; ages that are no further apart than `ages`
/// are alike whatever their factor.
pub fn ticket(members: &[Member], own: &str, ages: SignedDuration) -> Option<Ticket> {
    let mut sorted: Vec<&Member> = members.iter().filter(|m| m.family().is_some()).collect();
    sorted.sort_by(|a, b| (!a.ticketed, a.since, &a.incident).cmp(&(!b.ticketed, b.since, &b.incident)));
    let own = *sorted.iter().find(|m| m.incident == own)?;
    sorted.truncate(MOST);
    if !sorted.contains(&own) {
        sorted.push(own);
    }
    let joined = joined(&sorted, ages);
    if !own.ticketed && !joined.contains(own.incident.as_str()) {
        return None;
    }
    let on_it =
        |m: &&&Member| m.family() == own.family() && (m.ticketed || joined.contains(m.incident.as_str()));
    let on_it: Vec<&Member> = sorted.iter().filter(on_it).copied().collect();
    // Whoever was suspected first tells, in whatever order they come to the ticket; but not one that does
    // not come to it, or nobody would tell.
    let first = on_it.iter().filter(|m| !m.acting).min_by_key(|m| (m.since, &m.incident));
    let tells = !own.ticketed && first.is_some_and(|m| m.incident == own.incident);
    let slopes = || on_it.iter().map(|m| m.slope);
    Some(Ticket {
        tells,
        pods: on_it.iter().map(|m| (m.name.clone(), m.node.clone())).collect(),
        slopes: (slopes().min().unwrap_or(own.slope), slopes().max().unwrap_or(own.slope)),
    })
}

/// The incidents that are in some group of enough pods that are like its least one, or like one that
/// is on a ticket.
fn joined<'a>(members: &[&'a Member], ages: SignedDuration) -> BTreeSet<&'a str> {
    let mut joined = BTreeSet::new();
    for ticketed in members.iter().filter(|m| m.ticketed) {
        joined.extend(members.iter().filter(|m| m.is_like(ticketed, ages)).map(|m| m.incident.as_str()));
    }
    for slowest in members {
        for youngest in members.iter().filter(|m| m.is_like(slowest, ages)) {
            let group = members.iter().filter(|m| {
                m.slope >= slowest.slope
                    && m.age >= youngest.age
                    && m.is_like(slowest, ages)
                    && m.is_like(youngest, ages)
            });
            let group: Vec<&Member> = group.copied().collect();
            let pods: BTreeSet<&str> = group.iter().map(|m| m.pod.as_str()).collect();
            if pods.len() >= ALIKE {
                joined.extend(group.iter().map(|m| m.incident.as_str()));
            }
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const AGES: SignedDuration = SignedDuration::from_secs(60);

    fn member(name: &str) -> Member {
        Member {
            incident: format!("i-{name}"),
            pod: format!("u-{name}"),
            name: name.into(),
            node: format!("n{}", name.len() % 2),
            mode: Mode::Enforce,
            memory: LeakMemory::Device,
            class: LeakClass::Linear,
            slope: 100 << 20,
            since: Timestamp::from_second(1000).unwrap(),
            age: SignedDuration::from_secs(3600),
            revision: "r".into(),
            replaced: false,
            ticketed: false,
            acting: false,
        }
    }

    fn three(change: impl Fn(&mut Member)) -> Vec<Member> {
        let mut members = vec![member("a"), member("bb"), member("c")];
        change(&mut members[2]);
        members
    }

    fn on_ticket(members: &[Member]) -> Vec<&str> {
        let on = |m: &&Member| ticket(members, &m.incident, AGES).is_some();
        members.iter().filter(on).map(|m| m.name.as_str()).collect()
    }

    #[test]
    fn three_that_leak_alike_are_one_ticket_that_is_told_once() {
        let members = three(|m| m.class = LeakClass::Step);
        assert_eq!(on_ticket(&members), ["a", "bb", "c"]);
        let tells = |m: &&Member| ticket(&members, &m.incident, AGES).unwrap().tells;
        assert_eq!(members.iter().filter(tells).count(), 1);
        let said = ticket(&members, "i-bb", AGES).unwrap().sentence("Deployment/w");
        assert!(said.contains("3 pods of Deployment/w on 2 nodes (a, bb, c)"), "{said}");
        assert!(said.contains("by 100 MiB to 100 MiB an hour"), "{said}");
        assert_eq!(on_ticket(&members[..2]), [""; 0], "two are not enough");
    }

    #[test]
    fn the_one_that_was_suspected_first_tells_though_the_others_come_to_the_ticket_before() {
        let mut members = three(|_| {});
        let first = members.iter().map(|m| m.incident.clone()).min().unwrap();
        for member in &mut members {
            member.ticketed = member.incident != first;
        }
        assert!(ticket(&members, &first, AGES).unwrap().tells);
        for member in &mut members {
            member.ticketed = true;
        }
        assert!(!ticket(&members, &first, AGES).unwrap().tells, "once");
    }

    #[test]
    fn whoever_leaks_otherwise_is_not_on_the_ticket() {
        type Change = fn(&mut Member);
        let cases: [(&str, Change); 9] = [
            ("four times as fast", |m| m.slope *= 4),
            ("ever faster", |m| m.class = LeakClass::Exponential),
            ("levelling off", |m| m.class = LeakClass::Saturating),
            ("on the host", |m| m.memory = LeakMemory::Host),
            ("another revision", |m| m.revision = "s".into()),
            ("a template that changed", |m| m.replaced = true),
            ("only rehearsed", |m| m.mode = Mode::DryRun),
            ("at another age", |m| m.age = SignedDuration::from_hours(4)),
            ("the same pod twice", |m| m.pod = "u-a".into()),
        ];
        for (what, change) in cases {
            assert_eq!(on_ticket(&three(change)), [""; 0], "{what}");
        }
        assert_eq!(on_ticket(&three(|m| m.slope *= 3)).len(), 3);
        assert_eq!(on_ticket(&three(|m| m.age = SignedDuration::from_secs(1200))).len(), 3);
    }

    #[test]
    fn young_pods_are_of_the_same_age() {
        let mut members = three(|m| m.age = SignedDuration::from_secs(61));
        members[0].age = SignedDuration::from_secs(2);
        members[1].age = SignedDuration::from_secs(5);
        assert_eq!(on_ticket(&members).len(), 3);
    }

    #[test]
    fn one_whose_act_is_under_way_counts_and_does_not_tell() {
        let mut members = three(|_| {});
        members[0].since = Timestamp::from_second(1).unwrap();
        assert!(ticket(&members, "i-a", AGES).unwrap().tells);
        members[0].acting = true;
        let telling: Vec<&str> = members
            .iter()
            .filter(|m| ticket(&members, &m.incident, AGES).unwrap().tells)
            .map(|m| m.name.as_str())
            .collect();
        assert_eq!(telling, ["bb"]);
    }

    #[test]
    fn a_ticket_outlives_all_but_one_of_its_pods_and_takes_their_successors() {
        let mut left = member("a");
        left.ticketed = true;
        assert_eq!(on_ticket(std::slice::from_ref(&left)), ["a"]);
        let next = [left.clone(), member("d")];
        assert_eq!(on_ticket(&next), ["a", "d"]);
        assert!(!ticket(&next, "i-d", AGES).unwrap().tells, "it was told before");
        left.replaced = true;
        assert_eq!(on_ticket(&[left, member("d")]), [""; 0], "the template has changed");
    }

    #[test]
    fn an_incident_that_is_not_listed_is_on_no_ticket() {
        assert_eq!(ticket(&three(|_| {}), "i-other", AGES), None);
    }

    /// Slope, age, class, whether of the other revision, and whether on a ticket or being acted on.
    fn any_member() -> impl Strategy<Value = (i64, i64, u8, bool, u8)> {
        (1..8i64, 0..8i64, 0..4u8, any::<bool>(), 0..10u8)
    }

    proptest! {
        /// Whoever is on a ticket is so whatever the order, and never alone: with two others, or with
        /// one that is on it. Exactly one tells of a new one, and at most one of any; never one that is
        /// acted on, which does not come to it.
        #[test]
        fn tickets_do_not_depend_on_order_and_are_told_once(
            seeds in vec(any_member(), 0..9), turn in 0..9usize,
        ) {
            let members: Vec<Member> = seeds.iter().enumerate().map(|(i, (slope, age, class, other, state))| {
                Member {
                    slope: *slope << 28,
                    age: SignedDuration::from_secs(*age * 200),
                    class: [LeakClass::Linear, LeakClass::Step, LeakClass::Exponential, LeakClass::Saturating]
                        [usize::from(*class)],
                    revision: if *other { "s".into() } else { "r".into() },
                    ticketed: *state == 0,
                    acting: *state == 1,
                    ..member(&format!("p{i}"))
                }
            }).collect();
            let mut turned = members.clone();
            turned.rotate_left(turn.min(members.len()));
            for own in &members {
                let found = ticket(&members, &own.incident, AGES);
                prop_assert_eq!(&found, &ticket(&turned, &own.incident, AGES));
                let Some(found) = found else { continue };
                prop_assert!(own.class != LeakClass::Saturating);
                let family = |m: &&Member| m.family() == own.family();
                let known = members.iter().filter(family).any(|m| m.ticketed);
                prop_assert!(known || found.pods.len() >= ALIKE);
                let telling = members.iter().filter(family)
                    .filter(|m| ticket(&members, &m.incident, AGES).is_some_and(|t| t.tells)).count();
                prop_assert!(!(found.tells && own.acting));
                let somebody = members.iter().filter(family)
                    .any(|m| !m.acting && ticket(&members, &m.incident, AGES).is_some());
                prop_assert!(telling <= 1 && (known || !somebody || telling == 1), "{} tell", telling);
            }
        }
    }
}
