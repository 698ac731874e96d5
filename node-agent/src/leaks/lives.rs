//! The lives of a pod: from the start of its containers to their end.

use std::sync::Arc;

use highwater_policy::{
    leak::{Circumstances, Settings, acted},
    pod::PodFacts,
    time::Millis,
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::info;

use super::Leaks;
use crate::world::World;

/// A pod that was first seen so soon after its start, in milliseconds, was seen from its start.
const YOUNG: u64 = 30_000;

/// What tells one life of a pod from the next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Life {
    /// Name and ID of each container; the ID is empty before it first started.
    containers: Vec<(String, String)>,
    /// When the last of them started.
    started: Option<Timestamp>,
}

impl Life {
    /// The present one of a pod.
    pub(super) fn of(facts: &PodFacts) -> Self {
        let containers = facts.containers.iter();
        Self {
            containers: containers.clone().map(|c| (c.name.clone(), c.id.clone())).collect(),
            started: containers.filter_map(|c| c.started).max(),
        }
    }

    /// Whether it began so lately that all of it that counts is still to come.
    pub(super) fn is_young(&self, settings: &Settings, wall: Timestamp) -> bool {
        let age = self.started.map_or(0, |started| wall.duration_since(started).as_millis());
        u64::try_from(age).unwrap_or(0) <= settings.warm_up_milliseconds.max(YOUNG)
    }

    /// Whether a container was started anew since, and how the one before had ended.
    fn ended(&self, facts: &PodFacts) -> Option<Circumstances> {
        let before = |name: &str| self.containers.iter().find(|(of, _)| of == name).map(|(_, id)| id);
        let mut found: Option<Circumstances> = None;
        for container in &facts.containers {
            let Some(old) = before(&container.name).filter(|id| !id.is_empty() && **id != container.id)
            else {
                continue;
            };
            let ended = container.ended.as_ref().filter(|ended| ended.id == *old);
            let known = found.get_or_insert(Circumstances { orderly: true, ..Circumstances::default() });
            known.orderly &= ended.is_some_and(|ended| ended.exit_code == 0);
            known.out_of_memory |= ended.is_some_and(|ended| ended.out_of_memory);
        }
        found
    }
}

/// What is known of a pod's end from what was last heard of it.
fn last_words(facts: &PodFacts) -> Circumstances {
    let ended = || facts.containers.iter().filter_map(|c| c.ended.as_ref().filter(|ended| ended.id == c.id));
    let succeeded = facts.finished && ended().all(|ended| ended.exit_code == 0);
    Circumstances {
        orderly: facts.terminating || succeeded,
        out_of_memory: ended().any(|ended| ended.out_of_memory),
        ..Circumstances::default()
    }
}

impl Leaks {
    /// Ends lives, and begins those that follow.
    pub(super) fn live_on(&mut self, world: &World, at: Millis, wall: Timestamp) {
        // Before they were listed nobody knows who is gone, or by whose doing.
        if !world.synced.pods || !world.synced.incidents {
            for (uid, watched) in &mut self.pods {
                if let Some(pod) = world.pods.get(uid).filter(|pod| pod.uid == watched.uid) {
                    watched.pod = Some(Arc::clone(pod));
                }
            }
            return;
        }
        let mut ended = false;
        let workloads = &mut self.workloads;
        self.pods.retain(|uid, watched| {
            let present = world.pods.get(uid).filter(|pod| pod.uid == watched.uid && !pod.facts.finished);
            let mut known = if let Some(pod) = present {
                let ended = watched.life.ended(&pod.facts);
                watched.pod = Some(Arc::clone(pod));
                let Some(ended) = ended else {
                    watched.life = Life::of(&pod.facts);
                    return true;
                };
                ended
            } else {
                let last = world.pods.get(uid).filter(|pod| pod.uid == watched.uid).or(watched.pod.as_ref());
                last.map_or_else(Circumstances::default, |pod| last_words(&pod.facts))
            };
            known.acted = acted(&watched.uid, watched.life.started, world.incidents.values());
            let next = present.map(|pod| Life::of(&pod.facts)).unwrap_or_default();
            info!(pod = %watched.uid, ?known, restarted = present.is_some(), "a life of a pod ended");
            for series in &mut watched.series {
                series.end(known, next.is_young(&series.settings, wall), at, workloads);
            }
            ended = true;
            watched.life = next;
            watched.framework = None;
            present.is_some()
        });
        if ended {
            self.store.touched(true);
            for series in self.pods.values_mut().flat_map(|watched| &mut watched.series) {
                series.detector.know(&workloads.profile(&series.workload, at));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use highwater_policy::pod::{ContainerFacts, Ended};

    use super::*;

    fn facts(id: &str, ended: Option<(&str, i32, bool)>) -> PodFacts {
        let ended =
            ended.map(|(id, exit_code, out_of_memory)| Ended { id: id.into(), exit_code, out_of_memory });
        let container = ContainerFacts { name: "c".into(), id: id.into(), started: None, ended };
        PodFacts { containers: vec![container], ..PodFacts::default() }
    }

    #[test]
    fn a_life_ends_when_a_container_is_started_anew_and_not_before() {
        let life = Life::of(&facts("one", None));
        assert_eq!(life.ended(&facts("one", None)), None);
        assert_eq!(life.ended(&facts("one", Some(("one", 1, false)))), None, "nothing runs in its place");
        assert_eq!(
            Life::of(&facts("", None)).ended(&facts("one", None)),
            None,
            "it starts for the first time"
        );
        let ended = |code, oom| life.ended(&facts("two", Some(("one", code, oom)))).unwrap();
        assert!(ended(0, false).orderly);
        assert!(ended(137, true).out_of_memory && !ended(137, true).orderly);
        let unknown = life.ended(&facts("three", Some(("two", 0, true)))).unwrap();
        assert!(!unknown.orderly && !unknown.out_of_memory, "of the one that was seen nothing is known");
    }

    #[test]
    fn who_was_asked_to_end_or_succeeded_ended_in_order() {
        let gone = PodFacts { terminating: true, ..facts("one", Some(("one", 143, false))) };
        assert!(last_words(&gone).orderly);
        assert!(!last_words(&facts("one", None)).orderly, "it was there, and then it was not");
        let done = |code| PodFacts { finished: true, ..facts("one", Some(("one", code, false))) };
        assert!(last_words(&done(0)).orderly && !last_words(&done(1)).orderly);
        assert!(
            last_words(&PodFacts { finished: true, ..facts("one", Some(("one", 137, true))) }).out_of_memory
        );
    }

    #[test]
    fn a_life_that_is_long_on_its_way_was_not_seen_from_its_start() {
        let wall: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
        let life = |started: &str| Life { started: started.parse().ok(), ..Life::default() };
        let settings = Settings { warm_up_milliseconds: 1000, ..Settings::default() };
        assert!(life("2026-01-01T00:59:40Z").is_young(&settings, wall));
        assert!(!life("2026-01-01T00:59:20Z").is_young(&settings, wall));
        assert!(life("2026-01-01T00:55:00Z").is_young(&Settings::default(), wall), "it still warms up");
        assert!(Life::default().is_young(&settings, wall), "it has not started");
    }
}
