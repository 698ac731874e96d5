//! What healthy lives of each workload were like on this node.

use std::collections::BTreeMap;

use highwater_policy::{
    leak::{LifeEnd, Profile, Workload},
    time::Millis,
};
use serde::{Deserialize, Serialize};

/// Workloads that are remembered; of more, those that were looked at longest ago are forgotten.
const MOST: usize = 512;

/// The workloads of the node.
#[derive(Clone, Debug, Default)]
pub(super) struct Workloads {
    known: BTreeMap<Workload, Known>,
}

/// What is known of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Known {
    profile: Profile,
    /// When it was last looked at, on the clock of the samples.
    used: u64,
    /// When a life of it last ended badly.
    ended_badly: Option<u64>,
}

impl Workloads {
    /// Of those that an earlier agent knew.
    pub(super) fn of(known: Vec<(Workload, Known)>) -> Self {
        Self { known: known.into_iter().collect() }
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<(Workload, Known)> {
        self.known.iter().map(|(workload, known)| (workload.clone(), known.clone())).collect()
    }

    /// The profile of a workload.
    pub(super) fn profile(&mut self, of: &Workload, at: Millis) -> Profile {
        self.known.get_mut(of).map_or_else(Profile::default, |known| {
            known.used = at.0;
            known.profile.clone()
        })
    }

    /// How a life counts that ended so: of replicas that ran beside each other only the first that ended
    /// badly does, for it says nothing of what a restart brought.
    pub(super) fn once(&mut self, of: &Workload, ended: LifeEnd, began: Millis, at: Millis) -> LifeEnd {
        if !matches!(ended, LifeEnd::LeakAct | LifeEnd::Breaker | LifeEnd::OutOfMemory) {
            return ended;
        }
        let known = self.entry(of, at);
        let beside = known.ended_badly.is_some_and(|before| before > began.0);
        known.ended_badly = Some(at.0);
        if beside { LifeEnd::Unknown } else { ended }
    }

    /// Takes over what a life has taught.
    pub(super) fn learn(&mut self, of: &Workload, profile: Profile, at: Millis) {
        self.entry(of, at).profile = profile;
    }

    fn entry(&mut self, of: &Workload, at: Millis) -> &mut Known {
        if !self.known.contains_key(of) && self.known.len() >= MOST {
            let oldest = self.known.iter().min_by_key(|(_, known)| known.used).map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                self.known.remove(&oldest);
            }
        }
        let known = self.known.entry(of.clone()).or_default();
        known.used = at.0;
        known
    }
}

#[cfg(test)]
mod tests {
    use highwater_crds::{LeakMemory, Mode};
    use highwater_policy::{leak::Life, pod::PodFacts};

    use super::*;

    fn workload(name: &str) -> Workload {
        let facts = PodFacts { name: name.into(), ..PodFacts::default() };
        Workload::of(&facts, "NVIDIA H200", LeakMemory::Device, 0, Mode::Enforce)
    }

    #[test]
    fn what_was_looked_at_longest_ago_is_forgotten_first() {
        let mut workloads = Workloads::default();
        let life = Profile::of(Life { peak: 7, ..Life::default() });
        for at in 0..600_u64 {
            workloads.learn(&workload(&at.to_string()), life.clone(), Millis(at));
            workloads.profile(&workload("0"), Millis(at));
        }
        assert_eq!(workloads.all().len(), MOST);
        assert_eq!(workloads.profile(&workload("0"), Millis(600)), life, "it was looked at all the time");
        assert_eq!(workloads.profile(&workload("1"), Millis(600)), Profile::default());
    }

    #[test]
    fn replicas_that_ran_beside_each_other_end_badly_once() {
        let (mut workloads, of) = (Workloads::default(), workload("a"));
        let mut end = |began, at| workloads.once(&of, LifeEnd::LeakAct, Millis(began), Millis(at));
        assert_eq!(end(0, 100), LifeEnd::LeakAct);
        assert_eq!(end(0, 110), LifeEnd::Unknown, "its neighbour");
        assert_eq!(end(105, 200), LifeEnd::Unknown, "one that began before its neighbour ended");
        assert_eq!(end(201, 300), LifeEnd::LeakAct, "the next life");
        assert_eq!(workloads.once(&of, LifeEnd::Healthy, Millis(0), Millis(400)), LifeEnd::Healthy);
    }
}
