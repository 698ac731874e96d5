//! Every order of steps that there is, for pods small enough to try them all: any process may be
//! killed between any two steps, and so may the agent while it reaps.

use core::hash::{Hash, Hasher};
use std::collections::HashSet;
use std::hash::DefaultHasher;

use proptest::prelude::*;

use crate::charge::{Request, UNIT};
use crate::sim::{Agent, Process, SLOTS, World};

#[derive(Clone, Hash)]
struct State {
    world: World,
    /// How far each process is in its program.
    done: [usize; SLOTS],
    kills: u32,
    agent_kills: u32,
    corrections: u32,
}

fn charge(units: u64, limit: u64) -> Request {
    Request::charge(units * UNIT, limit * UNIT, u64::MAX)
}

fn uncharge(units: u64) -> Request {
    Request::uncharge(units * UNIT)
}

/// Stands for a state. That two of some 200,000 states share one, so that a path is not followed,
/// is a matter of one in a thousand million.
fn fingerprint(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// Tries every order; returns the number of states. Each step judges itself, and each state in
/// which nothing can move any more is settled and checked.
fn explore(programs: &[&[Request]], kills: u32, agent_kills: u32, corrections: u32) -> usize {
    let start =
        State { world: World::new(programs.len()), done: [0; SLOTS], kills, agent_kills, corrections };
    let mut seen = HashSet::from([fingerprint(&start)]);
    let mut open = Vec::from([start]);
    while let Some(state) = open.pop() {
        let mut next = Vec::new();
        let mut step = |change: &dyn Fn(&mut State)| {
            let mut state = state.clone();
            change(&mut state);
            next.push(state);
        };
        for (index, program) in (1..).zip(programs) {
            match state.world.process(index) {
                Process::Busy(_) => step(&|state| state.world.step(index)),
                Process::Idle => {
                    if let Some(&request) = program.get(state.done[index]) {
                        step(&|state| {
                            state.done[index] += 1;
                            state.world.start(index, 0, request);
                            state.world.step(index);
                        });
                    }
                }
                Process::Dead if *state.world.agent() == Agent::Idle => {
                    step(&|state| {
                        state.world.reap(index);
                        state.world.agent_step();
                    });
                }
                Process::Dead | Process::Free => {}
            }
            if state.kills > 0 && matches!(state.world.process(index), Process::Idle | Process::Busy(_)) {
                step(&|state| {
                    state.kills -= 1;
                    state.world.kill(index);
                });
            }
        }
        if *state.world.agent() != Agent::Idle {
            step(&|state| state.world.agent_step());
            if state.agent_kills > 0 {
                step(&|state| {
                    state.agent_kills -= 1;
                    state.world.agent_kill();
                });
            }
        } else if state.corrections > 0 {
            step(&|state| {
                state.corrections -= 1;
                state.world.correct(1, 0, UNIT.cast_signed());
            });
        }
        if next.is_empty() {
            state.world.clone().settle();
        }
        open.extend(next.into_iter().filter(|state| seen.insert(fingerprint(state))));
    }
    seen.len()
}

#[test]
fn a03_two_processes_race_for_room_that_only_one_can_have() {
    let states = explore(&[&[charge(2, 3), uncharge(2)], &[charge(2, 3), uncharge(1)]], 0, 0, 0);
    assert!(states > 500, "{states} states");
}

#[test]
fn a04_a_process_killed_between_any_two_steps_loses_and_doubles_nothing() {
    let states = explore(&[&[charge(2, 9), uncharge(1)], &[charge(1, 9)]], 2, 0, 0);
    assert!(states > 10_000, "{states} states");
}

#[test]
fn a04_an_agent_killed_while_it_reaps_leaves_the_rest_to_the_next_one() {
    let states = explore(&[&[charge(2, 9)], &[charge(1, 9)]], 1, 2, 0);
    assert!(states > 10_000, "{states} states");
}

#[test]
fn a04_three_processes_help_each_other_out_of_the_word() {
    let states = explore(&[&[charge(2, 9)], &[charge(1, 9)], &[charge(4, 6)]], 1, 0, 0);
    assert!(states > 10_000, "{states} states");
}

#[test]
fn a_correction_counts_once_whoever_dies() {
    let states = explore(&[&[charge(2, 9), uncharge(2)]], 1, 1, 2);
    assert!(states > 1_000, "{states} states");
}

proptest! {
    #[test]
    fn a04_no_charge_is_lost_or_doubled_in_any_order(schedule in prop::collection::vec(any::<u8>(), 0..600)) {
        crate::fuzz::charges(&schedule);
    }

    #[test]
    fn any_packet_is_refused_or_understood_in_one_way(packet in prop::collection::vec(any::<u8>(), 0..300)) {
        crate::fuzz::wire(&packet);
    }
}
