//! What two leaders, an agent, crashes and clocks can make of one incident.

use highwater_crds::{ActReport, ActState, DecisionState, Observation, ObservationState};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use proptest::{collection::vec, prelude::*};

use super::{
    tests::{agent_act, at, kinds, pod, spec, view},
    *,
};

/// The cluster as two leaders see it, and a pod that is over until its act is done.
struct World {
    /// What time it is, and how far each operator's clock and the node's are off.
    now: i64,
    off: [i64; 2],
    node_off: i64,
    spec: GpuMemoryIncidentSpec,
    decision: Option<Decision>,
    observation: Option<Observation>,
    asked: Option<Timestamp>,
    /// When the agent looked last.
    seen: i64,
    pod: Option<(i64, bool)>, // resourceVersion, ending by eviction
    /// What the agent has done of its own act, and what it says of it.
    report: Option<ActState>,
    token: bool,
    acts: usize,
    /// Decisions that followed a final one.
    revivals: usize,
    clocks_jump: bool,
}

/// A leader between two of its calls.
#[derive(Clone, Debug)]
enum Leader {
    Idle,
    Reserved { version: i64, cached: Option<Decision> },
    Approved { version: i64, cached: Option<Decision> },
    Evicted { cached: Option<Decision> },
}

impl World {
    fn new(spec: GpuMemoryIncidentSpec, clocks_jump: bool) -> Self {
        Self {
            now: 100,
            off: [0; 2],
            node_off: 0,
            spec,
            decision: None,
            observation: None,
            asked: None,
            seen: 100,
            pod: Some((1, false)),
            report: None,
            token: false,
            acts: 0,
            revivals: 0,
            clocks_jump,
        }
    }

    fn clock(&self, who: usize) -> Timestamp {
        at(self.now + self.off[who])
    }

    fn is_over(&self) -> bool {
        self.pod.is_some() && !matches!(self.report, Some(ActState::Done))
    }

    /// Writes a decision as the API server lets it: the transition table is a rule of the CRD.
    fn write(&mut self, who: usize, cached: Option<&Decision>, verdict: &Verdict, acted: bool) -> bool {
        let particulars = Particulars { acted_at: acted.then(|| self.clock(who)), ..Particulars::default() };
        let Some(new) = record(cached, verdict, particulars, self.clock(who)) else { return true };
        let old = self.decision.as_ref().map(|d| d.state);
        if !may_follow(old, new.state) {
            return false;
        }
        if old.is_some_and(DecisionState::is_final) && old != Some(new.state) {
            self.revivals += 1;
        }
        self.decision = Some(new);
        true
    }

    /// The agent looks, does what was approved, and says so.
    fn agent(&mut self) {
        if carrier(&self.spec.proposed) == Carrier::Agent
            && self.report.is_none()
            && self.decision.as_ref().is_some_and(|d| d.state == DecisionState::Approved)
        {
            assert!(self.token, "acted without a token");
            self.acts += 1;
            self.report = Some(ActState::Begun);
        } else if self.report == Some(ActState::Begun) {
            self.report = Some(ActState::Done);
        }
        self.seen = self.now;
        let state = match (self.pod, self.is_over()) {
            (None, _) => ObservationState::Gone,
            (_, true) => ObservationState::Over,
            (_, false) => ObservationState::Recovered,
        };
        let message = String::new();
        self.observation = Some(Observation {
            state,
            bytes: None,
            at: MicroTime(at(self.now + self.node_off)),
            after_act: self.decision.as_ref().and_then(|d| d.acted_at.clone()),
            leak: None,
            hook: None,
            act: self.report.map(|state| ActReport { state, message, parked_bytes: None }),
        });
    }

    fn look(&self, who: usize, cached: Option<&Decision>) -> Step {
        let (template, kinds) = (pod(), kinds());
        let facts = self.pod.map(|(_, ending)| PodFacts { terminating: ending, ..template.clone() });
        let view = View {
            decision: cached,
            observation: self.observation.as_ref(),
            asked: self.asked,
            pod: facts.as_ref(),
            evicted: self.pod.is_some_and(|(_, ending)| ending),
            token: self.token,
            ..view(&self.spec, &template, &kinds)
        };
        decide(&view, self.clock(who))
    }

    fn advance(&mut self, who: usize, leader: Leader, stale: Option<Decision>) -> Leader {
        match leader {
            Leader::Idle => match self.look(who, stale.as_ref()) {
                Step::Act | Step::Allow => {
                    self.token = true; // idempotent by its key
                    Leader::Reserved { version: self.pod.unwrap().0, cached: stale }
                }
                Step::Record(verdict, _) => {
                    let acted = verdict.state == DecisionState::Verifying;
                    self.write(who, stale.as_ref(), &verdict, acted);
                    Leader::Idle
                }
                Step::Observe(verdict) => {
                    self.asked = Some(self.clock(who));
                    self.write(who, stale.as_ref(), &verdict, false);
                    Leader::Idle
                }
                Step::Rest(_) | Step::Rehearse => Leader::Idle,
            },
            Leader::Reserved { version, cached } => {
                if self.write(who, cached.as_ref(), &approved(&self.spec), false)
                    && carrier(&self.spec.proposed) == Carrier::Eviction
                {
                    Leader::Approved { version, cached: self.decision.clone() }
                } else {
                    Leader::Idle
                }
            }
            Leader::Approved { version, cached } => {
                if self.look(who, cached.as_ref()) != Step::Act {
                    return Leader::Idle;
                }
                match &mut self.pod {
                    Some((current, ending)) if *current == version => {
                        assert!(self.token, "acted without a token");
                        let age = self.now - self.seen;
                        assert!(self.clocks_jump || age <= 5, "acted on an observation of {age} s");
                        (*current, *ending) = (version + 1, true);
                        self.acts += 1;
                        Leader::Evicted { cached }
                    }
                    _ => Leader::Idle, // refused by its preconditions
                }
            }
            Leader::Evicted { cached } => {
                let verdict = after_eviction(&Eviction::Accepted, false).unwrap();
                self.write(who, cached.as_ref(), &verdict, true);
                Leader::Idle
            }
        }
    }

    /// One event of a story: of the first kinds there are some in any, of the last only in those
    /// where clocks jump.
    fn happens(&mut self, leaders: &mut [(Leader, Option<Decision>); 2], (event, who, by): (u8, usize, i64)) {
        match event {
            0 => self.now += 3,
            1 => self.agent(),
            2 => leaders[who].0 = Leader::Idle, // crash
            3 => leaders[who].1.clone_from(&self.decision),
            4 if self.pod.is_some_and(|(_, ending)| ending) => self.pod = None,
            4 => {
                if let Some((version, _)) = &mut self.pod {
                    *version += 1; // some change of its status
                }
            }
            8 if self.clocks_jump => self.off[who] += by,
            9 if self.clocks_jump => self.node_off += by,
            _ => {
                let (leader, cached) = std::mem::replace(&mut leaders[who], (Leader::Idle, None));
                let next = self.advance(who, leader, cached.clone());
                leaders[who] = (next, cached);
            }
        }
    }

    /// From here on one leader lives and hears everything, the agent looks every other second, and
    /// no clock is touched. Ends when nothing more is decided, or after `seconds`.
    fn settle(&mut self, who: usize, seconds: i64) {
        let mut leader = Leader::Idle;
        for _ in 0..seconds / 2 {
            self.now += 2;
            self.agent();
            if self.pod.is_some_and(|(_, ending)| ending) {
                self.pod = None;
            }
            for _ in 0..4 {
                leader = self.advance(who, leader, self.decision.clone());
            }
            if self.decision.as_ref().is_some_and(|d| d.state.is_final()) {
                return;
            }
        }
    }

    fn state(&self) -> Option<DecisionState> {
        self.decision.as_ref().map(|d| d.state)
    }
}

/// Events, with who they are about and by how many seconds a clock is set.
fn events() -> impl Strategy<Value = Vec<(u8, usize, i64)>> {
    let hours = prop_oneof![-4..5i64, -90..91i64, -20_000..20_001i64];
    vec((0..10u8, 0..2usize, hours), 1..120)
}

/// The acts that have a machine here: one by eviction, and each that the agent carries out.
fn acts() -> impl Strategy<Value = GpuMemoryIncidentSpec> {
    prop_oneof![
        Just(spec("Enforce")),
        Just(agent_act("Unready", false)),
        Just(agent_act("Park", false)),
        Just(agent_act("Restart", true)),
    ]
}

fn idle() -> [(Leader, Option<Decision>); 2] {
    [(Leader::Idle, None), (Leader::Idle, None)]
}

/// The longest that an act is waited for, with a last look and a clock that was set back once.
const LONGEST: i64 = 300 + 300 + 60;

#[test]
fn clocks_that_do_not_go_together_hide_no_success() {
    for act in
        [spec("Enforce"), agent_act("Unready", false), agent_act("Park", false), agent_act("Restart", true)]
    {
        for (operator, node) in
            [(0, 0), (0, -3), (0, 4), (0, -7200), (0, 7200), (-7200, 0), (60, 0), (-7200, 7200)]
        {
            let mut world = World::new(act.clone(), true);
            let mut leaders = idle();
            // A token, `Approved`, and the act.
            while world.state() != Some(DecisionState::Verifying) {
                world.agent();
                leaders[0].1.clone_from(&world.decision);
                for _ in 0..4 {
                    world.happens(&mut leaders, (7, 0, 0));
                }
            }
            assert_eq!(world.acts, 1, "{:?}", act.proposed);
            (world.off, world.node_off) = ([operator; 2], node);
            world.settle(0, LONGEST);
            let outcome = world.decision.as_ref().map(|d| (d.state, d.reason.as_str()));
            assert_eq!(
                outcome,
                Some((DecisionState::Succeeded, "MemoryReturned")),
                "{:?}, operator {operator} s, node {node} s",
                act.proposed
            );
        }
    }
}

proptest! {
    /// Of the incidents of one device at most one may act while another's act may have been
    /// requested, and among those that an earlier leader approved there is always one.
    #[test]
    fn one_act_a_device_and_no_mutual_wait(states in vec((0..9usize, 0..3i64), 1..8)) {
        let uids: Vec<String> = (0..states.len()).map(|i| format!("u{i}")).collect();
        let turns: Vec<Turn<'_>> = states.iter().zip(&uids).map(|((state, since), uid)| {
            Turn { state: DecisionState::ALL.get(*state).copied(), since: at(*since), uid }
        }).collect();
        let free: Vec<&Turn<'_>> = turns.iter()
            .filter(|own| own.state.is_none_or(|s| !s.is_final()) && own.state != Some(DecisionState::Verifying))
            .filter(|own| !turns.iter().any(|other| other.uid != own.uid && own.waits_for(other)))
            .collect();
        let count = |state| turns.iter().filter(|t| t.state == Some(state)).count();
        match (count(DecisionState::Verifying), count(DecisionState::Approved)) {
            (0, 0) => {}
            (0, _) => {
                prop_assert_eq!(free.len(), 1);
                prop_assert_eq!(free[0].state, Some(DecisionState::Approved));
            }
            _ => prop_assert!(free.is_empty()),
        }
    }

    #[test]
    fn at_most_one_act_an_incident_whatever_two_leaders_and_crashes_do(act in acts(), events in events()) {
        let (mut world, mut leaders) = (World::new(act, false), idle());
        for event in events {
            world.happens(&mut leaders, event);
            prop_assert!(world.acts <= 1);
            prop_assert_eq!(world.revivals, 0);
        }
    }

    /// Every clock may be set back and forth by hours, at any time: nothing is done twice, and what
    /// was begun is never waited for without end.
    #[test]
    fn no_clock_that_is_set_leads_to_a_second_act_or_to_a_wait_without_end(
        act in acts(), events in events(), survivor in 0..2usize,
    ) {
        let (mut world, mut leaders) = (World::new(act, true), idle());
        for event in events {
            world.happens(&mut leaders, event);
        }
        world.settle(survivor, LONGEST);
        prop_assert!(world.acts <= 1);
        prop_assert_eq!(world.revivals, 0);
        let waits = matches!(world.state(), Some(DecisionState::Approved | DecisionState::Verifying));
        prop_assert!(!waits, "{:?}", world.decision);
    }
}
