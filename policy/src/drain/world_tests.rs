//! What operators, people, crashes and clocks can make of one drain.

use highwater_crds::{Decision, DecisionState, GpuMemoryIncident, GpuMemoryIncidentSpec, Observation};
use jiff::Timestamp;
use proptest::{collection::vec, prelude::*};

use super::{
    tests::{at, observation, pod, spec, targets, view},
    *,
};
use crate::remediation::{CLOCK_SET_BACK, Particulars, approved, may_follow, record};

/// A cluster with one node, three pods of two workloads, and two operators.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // independent facts
struct World {
    now: i64,
    /// How far each operator's clock and the node's are off.
    off: [i64; 2],
    node_off: i64,
    decision: Option<Decision>,
    observation: Option<Observation>,
    asked: Option<Timestamp>,
    over: bool,
    /// Whether the incident was deleted.
    deleted: bool,
    unschedulable: bool,
    annotation: Option<String>,
    /// The node is cordoned by hand: the field is no longer ours.
    by_hand: bool,
    /// Somebody lifted our cordon.
    lifted: bool,
    /// resourceVersion of each pod and whether it is ending; None: gone.
    pods: Vec<Option<(i64, bool)>>,
    tokens: Vec<bool>,
    evictions: Vec<usize>,
    paused: bool,
}

/// An operator between two of its calls.
#[derive(Clone, Debug)]
enum Leader {
    Idle,
    Reserved(Option<Decision>),
    Approved,
    Cordoned,
    Evicting { pod: usize, version: i64 },
}

const NODE_TOKEN: usize = 3;

impl World {
    fn new() -> Self {
        Self {
            now: 100,
            off: [0; 2],
            node_off: 0,
            decision: None,
            observation: None,
            asked: None,
            over: true,
            deleted: false,
            unschedulable: false,
            annotation: None,
            by_hand: false,
            lifted: false,
            pods: vec![Some((1, false)); 3],
            tokens: vec![false; 4],
            evictions: vec![0; 3],
            paused: false,
        }
    }

    fn state(&self) -> Option<DecisionState> {
        self.decision.as_ref().map(|d| d.state)
    }

    fn clock(&self, who: usize) -> Timestamp {
        at(self.now + self.off[who])
    }

    fn agent_looks(&mut self) {
        let state = if self.over { "Over" } else { "Recovered" };
        let after_act = self.decision.as_ref().and_then(|d| d.acted_at.clone());
        self.observation = Some(Observation { after_act, ..observation(state, self.now + self.node_off) });
    }

    fn write(&mut self, who: usize, cached: Option<&Decision>, verdict: &Verdict, acted: bool) -> bool {
        if self.deleted {
            return false;
        }
        let particulars = Particulars { acted_at: acted.then(|| self.clock(who)), ..Particulars::default() };
        let Some(new) = record(cached, verdict, particulars, self.clock(who)) else { return true };
        if !may_follow(self.state(), new.state) {
            return false;
        }
        self.decision = Some(new);
        true
    }

    /// Whose cordon the node has.
    fn cordon(&self) -> Cordon {
        let field = if self.by_hand { Field::Theirs } else { Field::Ours };
        cordon(self.unschedulable.then_some(field), self.annotation.as_deref(), &mark("hw", "i", "u"))
    }

    fn look(&self, who: usize, spec: &GpuMemoryIncidentSpec, cached: Option<&Decision>) -> Step {
        let named = [("a-1", "Deployment/a"), ("a-2", "Deployment/a"), ("b-1", "Deployment/b")];
        let there = |(index, (name, workload)): (usize, &(&str, &str))| {
            let (_, going) = self.pods[index]?;
            Some(Pod { going, uid: index.to_string(), ..pod(name, workload, 0) })
        };
        let pods: Vec<Pod> = named.iter().enumerate().filter_map(there).collect();
        let targets = targets();
        let view = View {
            decision: cached,
            observation: self.observation.as_ref(),
            asked: self.asked,
            cordon: Some(self.cordon()),
            evicting: self.tokens[..3].contains(&true),
            paused: self.paused.then(|| "node n1".to_owned()),
            ..view(spec, &pods, &targets)
        };
        match decide(&view, self.clock(who)) {
            Step::Evict(index) => Step::Evict(pods[index].uid.parse().unwrap()),
            step => step,
        }
    }

    fn advance(
        &mut self,
        who: usize,
        spec: &GpuMemoryIncidentSpec,
        leader: Leader,
        stale: Option<Decision>,
    ) -> Leader {
        if self.deleted {
            return Leader::Idle;
        }
        match leader {
            Leader::Idle => match self.look(who, spec, stale.as_ref()) {
                Step::Begin => {
                    self.tokens[NODE_TOKEN] = true;
                    Leader::Reserved(stale)
                }
                Step::Evict(pod) => {
                    self.tokens[pod] = true;
                    Leader::Evicting { pod, version: self.pods[pod].unwrap().0 }
                }
                Step::Record(verdict, _) => {
                    let acted = verdict.reason == CLOCK_SET_BACK;
                    self.write(who, stale.as_ref(), &verdict, acted);
                    Leader::Idle
                }
                Step::Observe(verdict) => {
                    self.asked = Some(self.clock(who));
                    self.write(who, stale.as_ref(), &verdict, false);
                    Leader::Idle
                }
                Step::Rest(_) => Leader::Idle,
            },
            Leader::Reserved(cached) => {
                if self.write(who, cached.as_ref(), &approved(spec), false) {
                    Leader::Approved
                } else {
                    Leader::Idle
                }
            }
            // What was decided is looked at again between the approval and the cordon.
            Leader::Approved if self.look(who, spec, self.decision.as_ref()) != Step::Begin => Leader::Idle,
            Leader::Approved => {
                match self.cordon() {
                    // One patch, with the version of the node that was read.
                    Cordon::Open => {
                        (self.unschedulable, self.annotation) = (true, Some(mark("hw", "i", "u")));
                        Leader::Cordoned
                    }
                    Cordon::Own => Leader::Cordoned,
                    Cordon::Others | Cordon::Lifted => Leader::Idle,
                }
            }
            Leader::Cordoned => {
                let cached = self.decision.clone();
                self.write(who, cached.as_ref(), &approved(spec), true);
                Leader::Idle
            }
            Leader::Evicting { pod, version } => {
                // The node is read again just before.
                let cordoned = self.cordon() == Cordon::Own;
                let open = self.state() == Some(DecisionState::Approved);
                match &mut self.pods[pod] {
                    Some((current, ending)) if *current == version && cordoned && open && !self.paused => {
                        assert!(self.tokens[pod] && self.tokens[NODE_TOKEN], "acted without a token");
                        assert!(!self.lifted, "evicted from a node that somebody uncordoned");
                        (*current, *ending) = (version + 1, true);
                        self.evictions[pod] += 1;
                    }
                    _ => {}
                }
                Leader::Idle
            }
        }
    }

    fn together(&self, who: usize) -> bool {
        (self.off[who] - self.node_off).abs() <= 5
    }

    /// What the operator does beside its incidents: it undoes a cordon with nothing behind it.
    fn sweep(&mut self) {
        let mut incident = GpuMemoryIncident::new("i", spec("Breaker", "Enforce"));
        incident.metadata.uid = Some("u".into());
        incident.status = Some(highwater_crds::GpuMemoryIncidentStatus {
            observation: None,
            decision: self.decision.clone(),
        });
        let found = (!self.deleted).then_some(&incident);
        if self.annotation.as_deref().is_some_and(|a| is_orphaned(a, found)) {
            self.annotation = None;
            self.unschedulable = self.by_hand;
        }
    }
}

/// By how many seconds a clock is set.
fn clocks() -> impl Strategy<Value = i64> {
    prop_oneof![-4..5i64, -90..91i64, -20_000..20_001i64]
}

proptest! {
    /// Whatever operators, people, crashes and clocks do in whatever order: no pod is evicted twice, none
    /// without a token and our cordon, what ended never changes, and when all is over our cordon is
    /// gone - and a cordon by hand is not.
    #[test]
    fn a_drain_leaves_nothing_behind_whoever_dies_when(
        events in vec((0..19u8, 0..2usize, clocks()), 1..160), survivor in 0..2usize,
    ) {
        let spec = spec("Breaker", "Enforce");
        let mut world = World::new();
        let mut leaders = [Leader::Idle, Leader::Idle];
        let mut caches: [Option<Decision>; 2] = [None, None];
        for (event, who, by) in events {
            let ended = world.state().filter(|s| s.is_final());
            match event {
                0 => world.now += 3,
                1 => world.agent_looks(),
                2 => leaders[who] = Leader::Idle, // SIGKILL
                3 => caches[who] = world.decision.clone(),
                4 => for pod in &mut world.pods {
                    if pod.is_some_and(|(_, ending)| ending) { *pod = None; }
                },
                5 => world.over = world.pods.iter().any(Option::is_some) && !world.over,
                6 => world.paused = !world.paused,
                7 if who == 0 && world.unschedulable => {
                    world.lifted |= world.annotation.is_some();
                    (world.unschedulable, world.by_hand) = (false, false);
                }
                // Where it is cordoned already, to cordon it changes nothing.
                7 if !world.unschedulable => (world.unschedulable, world.by_hand) = (true, true),
                8 if who == 0 => world.deleted = true,
                9 => world.now += 400,
                10 => world.sweep(),
                11 => world.off[who] += by,
                12 => world.node_off += by,
                // Somebody empties the status of the incident.
                13 if ended.is_none() => world.decision = None,
                _ => {
                    let leader = std::mem::replace(&mut leaders[who], Leader::Idle);
                    leaders[who] = world.advance(who, &spec, leader, caches[who].clone());
                }
            }
            prop_assert!(world.evictions.iter().all(|n| *n <= 1), "evicted twice: {world:?}");
            prop_assert!(ended.is_none() || world.state() == ended);
            prop_assert!(!world.by_hand || world.unschedulable, "a cordon by hand is not ours to undo");
        }
        // Time passes, one operator is left, and nobody interferes any more.
        world.paused = false;
        for _ in 0..40 {
            world.now += 60;
            for pod in &mut world.pods {
                if pod.is_some_and(|(_, ending)| ending) { *pod = None; }
            }
            let mut leader = Leader::Idle;
            for _ in 0..5 {
                world.agent_looks();
                leader = world.advance(survivor, &spec, leader, world.decision.clone());
            }
            world.sweep();
        }
        // Nothing is begun while the clocks do not go together, and nothing that was begun goes on for ever.
        let waits = matches!(world.state(), None | Some(DecisionState::Proposed)) && (world.by_hand || !world.together(survivor));
        prop_assert!(world.deleted || waits || world.state().is_some_and(DecisionState::is_final), "{world:?}");
        // Whoever set a cordon and died before writing of it, and whatever the clocks say.
        prop_assert!(world.annotation.is_none(), "left behind: {world:?}");
        prop_assert!(world.unschedulable == world.by_hand, "{world:?}");
    }
}
