//! What only the agent does to a usage page: empties the slots of dead processes, corrects, audits.

use crate::MAX_DEVICES;
use crate::charge::{
    Audit, Contended, Detail, Device, Kind, Memory, Operation, Outcome, PATIENCE, Place, Reaped, Request,
    Slot, Tag, intent, intent_busy, intent_sequence, settle, signed, to_bytes, to_signed_bytes, total,
    unsigned,
};

/// The next atomic step of looking up how the last change of a slot ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ResolveAt {
    LoadIntent,
    LoadDetail,
    LoadAfter,
    LoadWord,
    LoadApplied,
    Settle,
    SettleExtra,
    StoreIdle,
}

/// Finds out whether the last change of a slot whose owner is gone was made, and completes it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Resolve {
    slot: Slot,
    at: ResolveAt,
    sequence: u64,
    detail: Detail,
    after: i64,
}

impl Resolve {
    pub(crate) fn new(slot: Slot) -> Self {
        Self {
            slot,
            at: ResolveAt::LoadIntent,
            sequence: 0,
            detail: Detail { device: Device::FIRST, kind: Kind::Held, target: slot },
            after: 0,
        }
    }

    /// Does one atomic operation; true if it is done.
    pub(crate) fn step(&mut self, memory: &impl Memory) -> bool {
        let slot = self.slot;
        let Detail { device, kind, target } = self.detail;
        match self.at {
            ResolveAt::LoadIntent => {
                let raw = memory.load(Place::Intent(slot));
                if !intent_busy(raw) {
                    return true;
                }
                self.sequence = intent_sequence(raw);
                self.at = ResolveAt::LoadDetail;
            }
            ResolveAt::LoadDetail => {
                self.detail = Detail::unpack(memory.load(Place::Detail(slot)), slot);
                self.at = ResolveAt::LoadAfter;
            }
            ResolveAt::LoadAfter => {
                let raw = memory.load(Place::After(slot));
                self.after = match kind {
                    Kind::Held => unsigned(raw),
                    Kind::Extra => signed(raw),
                    Kind::Reap => 0,
                };
                self.at = ResolveAt::LoadWord;
            }
            // First the word, then `applied`: whoever replaces the word raises `applied` before.
            ResolveAt::LoadWord => {
                let tag = Tag::unpack(memory.load(Place::Word(device)));
                let made = tag.slot == slot && tag.sequence == self.sequence;
                self.at = if made { ResolveAt::Settle } else { ResolveAt::LoadApplied };
            }
            ResolveAt::LoadApplied => {
                let made = memory.load(Place::Applied(slot)) >= self.sequence;
                self.at = if made { ResolveAt::Settle } else { ResolveAt::StoreIdle };
            }
            ResolveAt::Settle => {
                settle(memory, kind, target, device, self.after);
                self.at = if kind == Kind::Reap { ResolveAt::SettleExtra } else { ResolveAt::StoreIdle };
            }
            ResolveAt::SettleExtra => {
                memory.store(Place::Extra(target, device), 0);
                self.at = ResolveAt::StoreIdle;
            }
            ResolveAt::StoreIdle => {
                memory.store(Place::Intent(slot), intent(self.sequence, false));
                return true;
            }
        }
        false
    }
}

/// What the agent is doing when it reaps a slot.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Completing its own last change, which a former agent may have left half done.
    Recover(Resolve),
    /// Completing the last change of the dead process.
    Resolve(Resolve),
    /// Taking what it held on this device out of the total.
    Device(usize, Operation),
    /// Freeing the slot.
    Free,
}

/// Empties the slot of a process that is gone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reaping {
    slot: Slot,
    phase: Phase,
    returned: [i64; MAX_DEVICES],
}

impl Reaping {
    pub(crate) fn new(slot: Slot) -> Self {
        Self { slot, phase: Phase::Recover(Resolve::new(Slot::AGENT)), returned: [0; MAX_DEVICES] }
    }

    /// The change that it is making, if it is making one.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn operation(&self) -> Option<&Operation> {
        match &self.phase {
            Phase::Device(_, operation) => Some(operation),
            _ => None,
        }
    }

    fn device(&self, index: usize, memory: &impl Memory) -> Phase {
        match Device::new(index).filter(|_| index < memory.devices()) {
            Some(device) => {
                Phase::Device(index, Operation::new(Slot::AGENT, device, Request::Reap { target: self.slot }))
            }
            None => Phase::Free,
        }
    }

    /// Does one atomic operation; says how it ended, if it did.
    pub(crate) fn step(&mut self, memory: &impl Memory) -> Option<Result<Reaped, Contended>> {
        match &mut self.phase {
            Phase::Recover(resolve) => {
                if resolve.step(memory) {
                    self.phase = Phase::Resolve(Resolve::new(self.slot));
                }
            }
            Phase::Resolve(resolve) => {
                if resolve.step(memory) {
                    self.phase = self.device(0, memory);
                }
            }
            Phase::Device(index, operation) => {
                let index = *index;
                match operation.step(memory) {
                    None => {}
                    Some(Outcome::Changed(delta)) => {
                        if let Some(returned) = self.returned.get_mut(index) {
                            *returned = delta.saturating_neg();
                        }
                        self.phase = self.device(index + 1, memory);
                    }
                    Some(_) => return Some(Err(Contended)),
                }
            }
            Phase::Free => {
                memory.store(Place::Token(self.slot), 0);
                return Some(Ok(Reaped { bytes: self.returned.map(to_bytes) }));
            }
        }
        None
    }

    pub(crate) fn run(mut self, memory: &impl Memory) -> Result<Reaped, Contended> {
        let mut steps = 0_u32;
        loop {
            if let Some(end) = self.step(memory) {
                return end;
            }
            steps = steps.saturating_add(1);
            if steps >= PATIENCE
                && let Phase::Device(_, operation) = &mut self.phase
            {
                operation.give_up();
            }
        }
    }
}

/// Completes what a former agent was doing when it died.
pub(crate) fn recover(memory: &impl Memory) {
    let mut resolve = Resolve::new(Slot::AGENT);
    while !resolve.step(memory) {}
}

/// Sets the correction of a slot; returns the former one. Bytes.
pub(crate) fn correct(
    memory: &impl Memory,
    target: Slot,
    device: Device,
    bytes: i64,
) -> Result<i64, Contended> {
    recover(memory);
    let former = correction(memory, target, device);
    let mut operation = Operation::new(Slot::AGENT, device, Request::correct(target, bytes));
    let mut steps = 0_u32;
    loop {
        match operation.step(memory) {
            None => {}
            Some(Outcome::Changed(_)) => return Ok(former),
            Some(_) => return Err(Contended),
        }
        steps = steps.saturating_add(1);
        if steps >= PATIENCE {
            operation.give_up();
        }
    }
}

/// The correction of a slot in bytes.
pub(crate) fn correction(memory: &impl Memory, slot: Slot, device: Device) -> i64 {
    to_signed_bytes(signed(memory.load(Place::Extra(slot, device))))
}

/// Compares the total with the sum over the first `slots` slots. `None` if a change was under
/// way or came in between each time that it was tried.
pub(crate) fn audit(memory: &impl Memory, device: Device, slots: usize) -> Option<Audit> {
    const TRIES: u32 = 8;
    (0..TRIES).find_map(|_| {
        let word = memory.load(Place::Word(device));
        let before = intents(memory, slots)?;
        let mut sum = 0_i64;
        for slot in (0..slots).map_while(Slot::new) {
            let held = unsigned(memory.load(Place::Held(slot, device)));
            let extra = signed(memory.load(Place::Extra(slot, device)));
            sum = sum.saturating_add(held).saturating_add(extra);
        }
        let charged = total(memory, device);
        // Intents only grow, so an equal sum of them means that each is what it was; and what a
        // slot holds changes only between two values of its intent.
        let after = intents(memory, slots)?;
        (before == after && memory.load(Place::Word(device)) == word)
            .then_some(Audit { charged: to_signed_bytes(charged), sum: to_signed_bytes(sum) })
    })
}

/// The sum of all intents; `None` if one is busy.
fn intents(memory: &impl Memory, slots: usize) -> Option<u128> {
    (0..slots).map_while(Slot::new).try_fold(0_u128, |sum, slot| {
        let raw = memory.load(Place::Intent(slot));
        (!intent_busy(raw)).then(|| sum.saturating_add(u128::from(raw)))
    })
}
