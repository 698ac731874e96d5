//! A pod in a few numbers: processes that charge step by step, die between any two steps, and an
//! agent that reaps them and may die as well. It runs the very steps of [`crate::charge`] and keeps
//! an account of its own beside them, by which every step is judged.
#![allow(clippy::expect_used, reason = "panicking is how the model reports")]

use core::cell::Cell;
use core::hash::{Hash, Hasher};

use crate::charge::{self, Device, Memory, Operation, Outcome, Place, Request, Slot, to_bytes};
use crate::reap::{self, Reaping, Resolve};

/// Slots of the model, the agent's included.
pub(crate) const SLOTS: usize = 4;
/// Devices of the model.
pub(crate) const DEVICES: usize = 2;

const PER_SLOT: usize = 5 + 4 * DEVICES;
const NUMBERS: usize = DEVICES + SLOTS * PER_SLOT;

/// A usage page of a few numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Small {
    numbers: [Cell<u64>; NUMBERS],
}

impl Hash for Small {
    fn hash<H: Hasher>(&self, state: &mut H) {
        for number in &self.numbers {
            number.get().hash(state);
        }
    }
}

impl Small {
    fn new() -> Self {
        Self { numbers: [const { Cell::new(0) }; NUMBERS] }
    }

    fn at(&self, place: Place) -> &Cell<u64> {
        let base = |slot: Slot| DEVICES + slot.index() % SLOTS * PER_SLOT;
        let index = match place {
            Place::Word(device) => device.index() % DEVICES,
            Place::Token(slot) => base(slot),
            Place::Intent(slot) => base(slot) + 1,
            Place::Detail(slot) => base(slot) + 2,
            Place::After(slot) => base(slot) + 3,
            Place::Applied(slot) => base(slot) + 4,
            Place::Held(slot, device) => base(slot) + 5 + device.index() % DEVICES,
            Place::Extra(slot, device) => base(slot) + 5 + DEVICES + device.index() % DEVICES,
            Place::Total(slot, device, cell) => {
                base(slot) + 5 + 2 * DEVICES + 2 * (device.index() % DEVICES) + usize::from(cell)
            }
        };
        let [first, ..] = &self.numbers;
        self.numbers.get(index).unwrap_or(first)
    }
}

impl Memory for Small {
    fn load(&self, place: Place) -> u64 {
        self.at(place).get()
    }

    fn store(&self, place: Place, value: u64) {
        self.at(place).set(value);
    }

    fn swap_if(&self, place: Place, current: u64, new: u64) -> bool {
        let at = self.at(place);
        let same = at.get() == current;
        if same {
            at.set(new);
        }
        same
    }

    fn raise(&self, place: Place, value: u64) {
        let at = self.at(place);
        at.set(at.get().max(value));
    }

    fn devices(&self) -> usize {
        DEVICES
    }
}

/// What a slot's owner is doing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Process {
    /// There is none.
    Free,
    /// It is between two changes.
    Idle,
    /// It is amid a change.
    Busy(Operation),
    /// It is gone and not reaped.
    Dead,
}

/// What the agent is doing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Agent {
    /// Nothing.
    Idle,
    /// Reaping a slot.
    Reap(usize, Reaping),
    /// Completing its last change before it corrects.
    Recover(Resolve, Operation),
    /// Correcting a slot.
    Correct(Operation),
}

type PerDevice = [i64; DEVICES];

/// The model's own account.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Truth {
    total: PerDevice,
    held: [PerDevice; SLOTS],
    extra: [PerDevice; SLOTS],
}

/// Everything there is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    memory: Small,
    processes: [Process; SLOTS],
    agent: Agent,
    truth: Truth,
}

fn at(numbers: &mut [PerDevice; SLOTS], slot: Slot, device: Device) -> &mut i64 {
    numbers.get_mut(slot.index()).and_then(|devices| devices.get_mut(device.index())).expect("in the model")
}

fn device(index: usize) -> Device {
    Device::new(index % DEVICES).expect("in the model")
}

fn slot(index: usize) -> Slot {
    Slot::new(index % SLOTS).expect("in the model")
}

impl World {
    /// A pod with `processes` idle processes in slots 1 and up.
    pub(crate) fn new(processes: usize) -> Self {
        let mut world = Self {
            memory: Small::new(),
            processes: [const { Process::Free }; SLOTS],
            agent: Agent::Idle,
            truth: Truth::default(),
        };
        for index in 1..=processes {
            world.claim(index);
        }
        world
    }

    pub(crate) fn process(&self, index: usize) -> &Process {
        self.processes.get(index).unwrap_or(&Process::Free)
    }

    fn set(&mut self, index: usize, process: Process) {
        if let Some(place) = self.processes.get_mut(index) {
            *place = process;
        }
    }

    #[cfg(test)]
    pub(crate) fn agent(&self) -> &Agent {
        &self.agent
    }

    /// A new process takes a free slot.
    pub(crate) fn claim(&mut self, index: usize) {
        if index > 0 && index < SLOTS && *self.process(index) == Process::Free {
            self.memory.store(Place::Token(slot(index)), 1);
            self.set(index, Process::Idle);
        }
    }

    /// An idle process begins a change.
    pub(crate) fn start(&mut self, index: usize, on: usize, request: Request) {
        if *self.process(index) == Process::Idle {
            self.set(index, Process::Busy(Operation::new(slot(index), device(on), request)));
        }
    }

    /// A process does one step of its change.
    pub(crate) fn step(&mut self, index: usize) {
        let Process::Busy(mut operation) = self.process(index).clone() else { return };
        let before = operation.clone();
        let words = self.words();
        let end = operation.step(&self.memory);
        self.judge(Some(&before), words);
        self.judge_refusal(&before, &operation);
        self.set(index, if end.is_some() { Process::Idle } else { Process::Busy(operation) });
        if end.is_some() {
            for on in 0..DEVICES {
                let held = charge::held(&self.memory, slot(index), device(on));
                let truth = *at(&mut self.truth.held, slot(index), device(on));
                assert_eq!(held, to_bytes(truth), "what slot {index} holds at rest");
            }
        }
    }

    /// A process is killed.
    pub(crate) fn kill(&mut self, index: usize) {
        if matches!(self.process(index), Process::Idle | Process::Busy(_)) {
            self.set(index, Process::Dead);
        }
    }

    /// The agent begins to reap a dead process.
    pub(crate) fn reap(&mut self, index: usize) {
        if self.agent == Agent::Idle && *self.process(index) == Process::Dead {
            self.agent = Agent::Reap(index, Reaping::new(slot(index)));
        }
    }

    /// The agent begins to correct a slot, its own or that of a live process.
    pub(crate) fn correct(&mut self, index: usize, on: usize, bytes: i64) {
        let may = index == 0 || matches!(self.process(index), Process::Idle | Process::Busy(_));
        if self.agent == Agent::Idle && may {
            let request = Request::correct(slot(index), bytes);
            let operation = Operation::new(Slot::AGENT, device(on), request);
            self.agent = Agent::Recover(Resolve::new(Slot::AGENT), operation);
        }
    }

    /// The agent does one step.
    pub(crate) fn agent_step(&mut self) {
        let words = self.words();
        let mut before = None;
        self.agent = match core::mem::replace(&mut self.agent, Agent::Idle) {
            Agent::Idle => Agent::Idle,
            Agent::Reap(index, mut reaping) => {
                before = reaping.operation().cloned();
                match reaping.step(&self.memory) {
                    None => Agent::Reap(index, reaping),
                    Some(end) => {
                        assert!(end.is_ok(), "nobody tires the agent here");
                        self.reaped(index);
                        Agent::Idle
                    }
                }
            }
            Agent::Recover(mut resolve, operation) => {
                if resolve.step(&self.memory) {
                    Agent::Correct(operation)
                } else {
                    Agent::Recover(resolve, operation)
                }
            }
            Agent::Correct(mut operation) => {
                before = Some(operation.clone());
                match operation.step(&self.memory) {
                    None => Agent::Correct(operation),
                    Some(_) => Agent::Idle,
                }
            }
        };
        self.judge(before.as_ref(), words);
    }

    /// The agent is killed; another one begins with empty hands.
    pub(crate) fn agent_kill(&mut self) {
        self.agent = Agent::Idle;
    }

    fn reaped(&mut self, index: usize) {
        for on in (0..DEVICES).map(device) {
            assert_eq!(*at(&mut self.truth.held, slot(index), on), 0, "slot {index} still holds something");
            assert_eq!(*at(&mut self.truth.extra, slot(index), on), 0, "slot {index} is still corrected");
            assert_eq!(charge::held(&self.memory, slot(index), on), 0);
            assert_eq!(reap::correction(&self.memory, slot(index), on), 0);
        }
        assert_eq!(self.memory.load(Place::Token(slot(index))), 0);
        self.set(index, Process::Free);
    }

    fn words(&self) -> [u64; DEVICES] {
        core::array::from_fn(|on| self.memory.load(Place::Word(device(on))))
    }

    /// If a step changed a word, a change was made: books it, and compares.
    fn judge(&mut self, operation: Option<&Operation>, before: [u64; DEVICES]) {
        for (on, (before, after)) in before.into_iter().zip(self.words()).enumerate() {
            if before != after {
                let operation = operation.expect("only a change swaps a word");
                assert_eq!(operation.device(), device(on));
                self.book(operation);
            }
            let total = self.truth.total.get(on).copied();
            assert_eq!(Some(charge::total(&self.memory, device(on))), total, "total of device {on}");
        }
    }

    fn book(&mut self, operation: &Operation) {
        let (slot, device, delta) = (operation.slot(), operation.device(), operation.delta());
        let total = self.truth.total.get_mut(device.index()).expect("in the model");
        *total += delta;
        match operation.request() {
            Request::Charge { units, limit, granted } => {
                assert_eq!(delta, units);
                assert!(*total <= limit && *total <= granted, "charged above the limit");
                *at(&mut self.truth.held, slot, device) += delta;
            }
            Request::Uncharge { units } => {
                let held = at(&mut self.truth.held, slot, device);
                assert_eq!(delta, -units.min(*held), "returned what was not held");
                *held += delta;
            }
            Request::Correct { target, to } => {
                let extra = at(&mut self.truth.extra, target, device);
                assert_eq!(delta, to - *extra, "a correction lost or doubled");
                *extra = to;
            }
            Request::Reap { target } => {
                let held = core::mem::take(at(&mut self.truth.held, target, device));
                let extra = core::mem::take(at(&mut self.truth.extra, target, device));
                assert_eq!(delta, -(held + extra), "reaped slot {target:?} wrongly");
            }
        }
    }

    /// A refusal must be right at the moment when it is decided.
    fn judge_refusal(&self, before: &Operation, after: &Operation) {
        if before.outcome() == after.outcome() {
            return;
        }
        let total = self.truth.total.get(after.device().index()).copied().expect("in the model");
        if let Request::Charge { units, limit, granted } = after.request() {
            match after.outcome() {
                Outcome::OverLimit { total: seen } => {
                    assert!(seen == total && total + units > limit, "refused though there was room");
                }
                Outcome::NeedsGrant { wanted } => {
                    assert_eq!(wanted, total + units);
                    assert!(wanted > granted && wanted <= limit, "held back though it was granted");
                }
                _ => {}
            }
        }
    }

    /// An audit never says anything but the truth, and says it when nobody is amid a change.
    pub(crate) fn audit(&self) {
        let still = self.agent == Agent::Idle && {
            let intents = (0..SLOTS).map(|index| self.memory.load(Place::Intent(slot(index))));
            intents.fold(0, |any, intent| any | intent & 1) == 0
        };
        for (on, total) in self.truth.total.into_iter().enumerate() {
            let audit = reap::audit(&self.memory, device(on), SLOTS);
            assert!(audit.is_some() || !still, "nothing is under way");
            if let Some(audit) = audit {
                assert_eq!(audit.charged, charge::to_signed_bytes(total));
                assert_eq!(audit.sum, audit.charged, "the sum of the slots");
            }
        }
    }

    /// Lets everybody finish and reaps the dead; nothing may be left over or missing.
    pub(crate) fn settle(&mut self) {
        while self.agent != Agent::Idle {
            self.agent_step();
        }
        for index in 1..SLOTS {
            while matches!(self.process(index), Process::Busy(_)) {
                self.step(index);
            }
            self.reap(index);
            while self.agent != Agent::Idle {
                self.agent_step();
            }
        }
        // Also what an agent left half done that died amid a correction.
        reap::recover(&self.memory);
        self.audit();
        for (on, total) in self.truth.total.into_iter().enumerate() {
            let sum = (self.truth.held.iter().chain(&self.truth.extra)).filter_map(|devices| devices.get(on));
            assert_eq!(total, sum.sum::<i64>());
        }
    }
}
