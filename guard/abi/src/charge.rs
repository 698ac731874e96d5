//! Charging one quota from many processes without a lock.
//!
//! # What is stored
//!
//! For every device the usage page has one *word*, and every process has a *slot*:
//!
//! | place | written by | meaning |
//! |---|---|---|
//! | `word[d]` | everybody, by compare and swap | who changed the total of `d` last: slot, cell, sequence number |
//! | `slot.total[d][2]` | its owner | the total that a change of its owner led to; `word[d]` says in which of the two cells |
//! | `slot.intent` | its owner | sequence number of its last change, and whether that is under way |
//! | `slot.detail`, `slot.after` | its owner | what that change is: device, kind, and what the owner holds once it is made |
//! | `slot.applied` | everybody, only upwards | a sequence number up to which changes are known to be decided |
//! | `slot.held[d]` | its owner | what it holds |
//! | `slot.extra[d]` | the agent | a correction of that, of either sign |
//!
//! At rest the total of a device is the sum of `held` and `extra` over all slots.
//!
//! # A change
//!
//! 1. Write what is to be done into `detail` and `after`, then `intent` = (sequence number, busy).
//! 2. Read `word[d]` = (slot `s`, cell `c`, number `q`), then the total in that cell, then the word
//!    again: unchanged, so the total was the true one.
//! 3. Refuse if the limit says so. Else write the new total into an own cell that the word does not
//!    name.
//! 4. Help: raise `slots[s].applied` to `q`, because the next step removes the only other trace of
//!    that change.
//! 5. Swap the word from (s, c, q) to (own slot, own cell, own number). If it changed, go to 2.
//! 6. Write `held`, then clear busy.
//!
//! # Why it is exact when a process dies anywhere
//!
//! Nobody but the owner writes its intent, so once the owner is gone its record stands still. If it
//! is not busy, `held` is the truth. If it is busy with number `q`, the change was made if and only
//! if step 5 succeeded. Then either the word still names (slot, q), or somebody replaced it, and
//! whoever replaced it had raised `applied` to at least `q` before. Reading first the word and then
//! `applied` therefore decides. If it was made, `held` is set to `after` (again, perhaps: that does
//! no harm), else it is left alone. What is then in `held` is taken out of the total by the same
//! protocol through the agent's slot, whose record names the slot that is being emptied; so an
//! agent which dies in the middle is resolved by the next one in the same way, and nothing is taken
//! out twice.
//!
//! # Why nobody waits
//!
//! No step depends on another process doing anything: step 2 and step 5 go round again only if the
//! word changed in between, that is, if another process made its change. A process that is stopped
//! holds nothing that others need: its cell is complete before the word names it.
//!
//! # Why an old value cannot return (ABA)
//!
//! A word names a slot and one of that slot's 53-bit sequence numbers. A number is used for one
//! change only, by later owners of the slot too, so a word never takes the same value twice: a
//! process that slept between step 2 and step 5 for however long fails at step 5 unless nothing
//! at all has happened, and then its total is still right. A cell is rewritten by its owner only
//! when the word no longer names it, so reading the word again proves the cell. `applied` only
//! rises, so a helper that slept before step 4 cannot undo what happened since; and what it asserts
//! was true and stays true. At ten million changes a second the numbers of a slot last 28 years.
//!
//! # Trust
//!
//! The page can be written by every process of the pod. A pod that scribbles over it can only
//! confuse its own accounts: everything read is clamped, slots and devices are bounded by their
//! types, and the agent never goes round a loop without a bound. What a pod really uses is known
//! from the driver; the agent compares.

#![cfg_attr(
    not(any(test, feature = "std")),
    allow(dead_code, reason = "the guard uses half of the protocol, the agent all of it")
)]

use core::fmt;

use crate::{AGENT_SLOT, MAX_DEVICES, MAX_SLOTS};

/// Bytes of one unit of account.
pub const UNIT: u64 = 4096;

/// What the driver rounds larger allocations up to.
pub const DRIVER_GRANULE: u64 = 2 << 20;

/// No total goes above this many units (512 PiB), whatever the limit: room for exact arithmetic.
const CEILING: i64 = 1 << 47;

/// The largest correction of a slot in units (256 TiB).
const MOST_CORRECTED: i64 = 1 << 36;

/// Anything read from a page is clamped to this, so that sums over all slots stay in range.
const CLAMP: i64 = 1 << 49;

/// Times that the agent goes through the steps of one change before it leaves a page that somebody
/// keeps changing.
pub(crate) const PATIENCE: u32 = 100_000;

/// Memory in units of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Units(u64);

impl Units {
    /// The units that hold `bytes`.
    #[must_use]
    pub const fn of(bytes: u64) -> Self {
        Self(bytes.div_ceil(UNIT))
    }

    /// That many units.
    #[must_use]
    pub const fn new(units: u64) -> Self {
        Self(units)
    }

    /// The number of units.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The same in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0.saturating_mul(UNIT)
    }
}

/// What the driver really takes for an allocation of `bytes`: large ones come in granules of 2 MiB.
#[must_use]
pub const fn round_allocation(bytes: u64) -> u64 {
    let step = if bytes >= DRIVER_GRANULE { DRIVER_GRANULE } else { UNIT };
    bytes.div_ceil(step).saturating_mul(step)
}

/// The answer to a charge. All sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "memory may be allocated only if the charge was granted"]
pub enum Charge {
    /// It is charged.
    Granted,
    /// It would go over the limit; nothing is charged.
    OverLimit {
        /// The limit.
        limit: u64,
        /// What the pod had charged at that moment.
        charged: u64,
    },
    /// It is within the limit but goes over what is granted now; nothing is charged.
    NeedsGrant {
        /// What the pod would have charged in total.
        wanted_total: u64,
    },
    /// There is no such slot or device; nothing is charged.
    Invalid,
}

/// Somebody in the pod changes the page faster than the agent can; try again later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contended;

impl fmt::Display for Contended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the usage page is changed without pause by a process of the pod")
    }
}

impl core::error::Error for Contended {}

/// What a slot held when it was reaped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Bytes that were returned for each device.
    pub bytes: [u64; MAX_DEVICES],
}

/// A consistent look at one device: what is charged against what its slots hold. Both in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Audit {
    /// The total.
    pub charged: i64,
    /// The sum over all slots, corrections included. Differs from `charged` only in a page that
    /// somebody has scribbled over.
    pub sum: i64,
}

/// A slot that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slot(u16);

impl Slot {
    pub(crate) const AGENT: Self = Self(0);
    const MASK: u64 = MAX_SLOTS as u64 - 1;

    pub(crate) fn new(slot: usize) -> Option<Self> {
        u16::try_from(slot).ok().filter(|_| slot < MAX_SLOTS).map(Self)
    }

    /// Whatever the low bits of an untrusted number say.
    fn masked(raw: u64) -> Self {
        Self(u16::try_from(raw & Self::MASK).unwrap_or(0))
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A device that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Device(u8);

impl Device {
    pub(crate) const FIRST: Self = Self(0);
    const MASK: u64 = MAX_DEVICES as u64 - 1;

    pub(crate) fn new(device: usize) -> Option<Self> {
        u8::try_from(device).ok().filter(|_| device < MAX_DEVICES).map(Self)
    }

    fn masked(raw: u64) -> Self {
        Self(u8::try_from(raw & Self::MASK).unwrap_or(0))
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

const _: () = assert!(MAX_SLOTS.is_power_of_two() && MAX_DEVICES.is_power_of_two());
const _: () = assert!(MAX_SLOTS <= 1 << 10 && MAX_DEVICES <= 1 << 4 && AGENT_SLOT == 0);

/// One of the 64-bit numbers that the protocol works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    Word(Device),
    Token(Slot),
    Intent(Slot),
    Detail(Slot),
    After(Slot),
    Applied(Slot),
    Held(Slot, Device),
    Extra(Slot, Device),
    Total(Slot, Device, bool),
}

/// Where these numbers live. Every operation is one atomic step in a single order of all steps
/// (sequentially consistent): that is what the model in the tests explores, and its price is
/// some ten nanoseconds a charge.
pub(crate) trait Memory {
    fn load(&self, place: Place) -> u64;
    fn store(&self, place: Place, value: u64);
    fn swap_if(&self, place: Place, current: u64, new: u64) -> bool;
    fn raise(&self, place: Place, value: u64);
    /// Devices that may be in use, at most [`MAX_DEVICES`].
    fn devices(&self) -> usize;
}

/// A word: slot in 10 bits, cell in one, sequence number in 53.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tag {
    pub(crate) slot: Slot,
    pub(crate) cell: bool,
    pub(crate) sequence: u64,
}

/// Sequence numbers have this many values.
const SEQUENCES: u64 = 1 << 53;

impl Tag {
    pub(crate) fn unpack(raw: u64) -> Self {
        Self { slot: Slot::masked(raw), cell: raw & (1 << 10) != 0, sequence: raw >> 11 }
    }

    fn pack(self) -> u64 {
        u64::from(self.slot.0) | u64::from(self.cell) << 10 | (self.sequence % SEQUENCES) << 11
    }
}

/// An intent: busy in the lowest bit, sequence number above it.
pub(crate) fn intent(sequence: u64, busy: bool) -> u64 {
    (sequence % SEQUENCES) << 1 | u64::from(busy)
}

pub(crate) fn intent_sequence(raw: u64) -> u64 {
    (raw >> 1) % SEQUENCES
}

pub(crate) fn intent_busy(raw: u64) -> bool {
    raw & 1 != 0
}

pub(crate) fn signed(raw: u64) -> i64 {
    raw.cast_signed().clamp(-CLAMP, CLAMP)
}

pub(crate) fn unsigned(raw: u64) -> i64 {
    raw.cast_signed().clamp(0, CLAMP)
}

/// `units` as a number that arithmetic cannot overflow on.
fn bounded(units: u64) -> i64 {
    i64::try_from(units).unwrap_or(CLAMP).min(CLAMP)
}

/// Units in bytes, never negative.
pub(crate) fn to_bytes(units: i64) -> u64 {
    Units(u64::try_from(units).unwrap_or(0)).bytes()
}

pub(crate) fn to_signed_bytes(units: i64) -> i64 {
    units.saturating_mul(UNIT.cast_signed())
}

/// Bytes in units, away from zero.
fn to_signed_units(bytes: i64) -> i64 {
    let units = bounded(Units::of(bytes.unsigned_abs()).get());
    if bytes < 0 { -units } else { units }
}

/// What a record says is being changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// What the owner of the slot holds.
    Held = 0,
    /// The agent's correction of a slot.
    Extra = 1,
    /// All that a dead slot held, its correction included.
    Reap = 2,
}

/// The second half of a record: device in 4 bits, kind in 4, the slot it is about above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Detail {
    pub(crate) device: Device,
    pub(crate) kind: Kind,
    pub(crate) target: Slot,
}

impl Detail {
    fn pack(self) -> u64 {
        u64::from(self.device.0) | (self.kind as u64) << 4 | u64::from(self.target.0) << 8
    }

    /// Reads the record of `slot`. Only the agent changes any slot but its own.
    pub(crate) fn unpack(raw: u64, slot: Slot) -> Self {
        let device = Device::masked(raw);
        if slot != Slot::AGENT {
            return Self { device, kind: Kind::Held, target: slot };
        }
        let kind = match (raw >> 4) & 0xf {
            1 => Kind::Extra,
            2 => Kind::Reap,
            _ => Kind::Held,
        };
        Self { device, kind, target: Slot::masked(raw >> 8) }
    }
}

/// What somebody asks for, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Request {
    Charge { units: i64, limit: i64, granted: i64 },
    Uncharge { units: i64 },
    Correct { target: Slot, to: i64 },
    Reap { target: Slot },
}

impl Request {
    pub(crate) fn charge(bytes: u64, limit: u64, granted: u64) -> Self {
        Self::Charge {
            units: bounded(Units::of(bytes).get()),
            limit: bounded(limit / UNIT).min(CEILING),
            granted: bounded(granted / UNIT),
        }
    }

    pub(crate) fn uncharge(bytes: u64) -> Self {
        Self::Uncharge { units: bounded(Units::of(bytes).get()) }
    }

    pub(crate) fn correct(target: Slot, bytes: i64) -> Self {
        Self::Correct { target, to: to_signed_units(bytes).clamp(-MOST_CORRECTED, MOST_CORRECTED) }
    }

    fn kind(self) -> Kind {
        match self {
            Self::Charge { .. } | Self::Uncharge { .. } => Kind::Held,
            Self::Correct { .. } => Kind::Extra,
            Self::Reap { .. } => Kind::Reap,
        }
    }
}

/// How a change ended, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Outcome {
    /// The total went up or down by so much.
    Changed(i64),
    /// The total would have gone over the limit.
    OverLimit { total: i64 },
    /// The total would have gone over what is granted.
    NeedsGrant { wanted: i64 },
    /// It was given up.
    Contended,
}

/// The next atomic step of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    LoadIntent,
    LoadHeld,
    LoadExtra,
    StoreDetail,
    StoreAfter,
    StoreBusy,
    LoadWord,
    LoadTotal,
    LoadWordAgain,
    StoreTotal,
    Help,
    Swap,
    Settle,
    SettleExtra,
    StoreIdle,
}

/// One change on its way. Each call of [`Operation::step`] does exactly one atomic operation on
/// the page, so the model in the tests can stop or kill a process between any two.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Operation {
    slot: Slot,
    device: Device,
    request: Request,
    at: At,
    sequence: u64,
    held: i64,
    extra: i64,
    /// What the total changes by.
    delta: i64,
    /// What the target's place holds afterwards.
    after: i64,
    word: u64,
    total: i64,
    cell: bool,
    outcome: Outcome,
}

impl Operation {
    pub(crate) fn new(slot: Slot, device: Device, request: Request) -> Self {
        Self {
            slot,
            device,
            request,
            at: At::LoadIntent,
            sequence: 0,
            held: 0,
            extra: 0,
            delta: 0,
            after: 0,
            word: 0,
            total: 0,
            cell: false,
            outcome: Outcome::Changed(0),
        }
    }

    fn target(&self) -> Slot {
        match self.request {
            Request::Charge { .. } | Request::Uncharge { .. } => self.slot,
            Request::Correct { target, .. } | Request::Reap { target } => target,
        }
    }

    /// Does one atomic operation; says how it ended, if it did.
    pub(crate) fn step(&mut self, memory: &impl Memory) -> Option<Outcome> {
        let Self { slot, device, .. } = *self;
        let target = self.target();
        match self.at {
            At::LoadIntent => {
                // The numbers go on where the last owner of the slot stopped.
                self.sequence = (intent_sequence(memory.load(Place::Intent(slot))) + 1) % SEQUENCES;
                self.at = if self.request.kind() == Kind::Extra { At::LoadExtra } else { At::LoadHeld };
            }
            At::LoadHeld => {
                self.held = unsigned(memory.load(Place::Held(target, device)));
                if self.request.kind() == Kind::Reap {
                    self.at = At::LoadExtra;
                } else {
                    return self.plan();
                }
            }
            At::LoadExtra => {
                self.extra = signed(memory.load(Place::Extra(target, device)));
                return self.plan();
            }
            At::StoreDetail => {
                let detail = Detail { device, kind: self.request.kind(), target };
                memory.store(Place::Detail(slot), detail.pack());
                self.at = At::StoreAfter;
            }
            At::StoreAfter => {
                memory.store(Place::After(slot), self.after.cast_unsigned());
                self.at = At::StoreBusy;
            }
            At::StoreBusy => {
                memory.store(Place::Intent(slot), intent(self.sequence, true));
                self.at = At::LoadWord;
            }
            At::LoadWord => {
                self.word = memory.load(Place::Word(device));
                self.at = At::LoadTotal;
            }
            At::LoadTotal => {
                let tag = Tag::unpack(self.word);
                self.total = signed(memory.load(Place::Total(tag.slot, device, tag.cell)));
                self.at = At::LoadWordAgain;
            }
            At::LoadWordAgain => {
                if memory.load(Place::Word(device)) == self.word {
                    self.decide();
                } else {
                    self.at = At::LoadWord;
                }
            }
            At::StoreTotal => {
                let total = self.total.saturating_add(self.delta);
                memory.store(Place::Total(slot, device, self.cell), total.cast_unsigned());
                // Its own last change needs no trace: it is settled, or this one would not run.
                self.at = if Tag::unpack(self.word).slot == slot { At::Swap } else { At::Help };
            }
            At::Help => {
                let tag = Tag::unpack(self.word);
                memory.raise(Place::Applied(tag.slot), tag.sequence);
                self.at = At::Swap;
            }
            At::Swap => {
                let tag = Tag { slot, cell: self.cell, sequence: self.sequence };
                let swapped = memory.swap_if(Place::Word(device), self.word, tag.pack());
                self.at = if swapped { At::Settle } else { At::LoadWord };
            }
            At::Settle => {
                settle(memory, self.request.kind(), target, device, self.after);
                self.at = if self.request.kind() == Kind::Reap { At::SettleExtra } else { At::StoreIdle };
            }
            At::SettleExtra => {
                memory.store(Place::Extra(target, device), 0);
                self.at = At::StoreIdle;
            }
            At::StoreIdle => {
                memory.store(Place::Intent(slot), intent(self.sequence, false));
                return Some(self.outcome);
            }
        }
        None
    }

    /// Works out what the change is, once it is known what the slot holds.
    fn plan(&mut self) -> Option<Outcome> {
        (self.delta, self.after) = match self.request {
            Request::Charge { units, .. } => (units, self.held.saturating_add(units)),
            Request::Uncharge { units } => {
                let units = units.min(self.held);
                (-units, self.held.saturating_sub(units))
            }
            Request::Correct { to, .. } => (to.saturating_sub(self.extra), to),
            Request::Reap { .. } => (-self.held.saturating_add(self.extra), 0),
        };
        self.outcome = Outcome::Changed(self.delta);
        // A dead slot whose correction cancels what it held must still be emptied.
        let empty = self.held == 0 && self.extra == 0;
        let reap = matches!(self.request, Request::Reap { .. });
        if (reap && empty) || (!reap && self.delta == 0) {
            return Some(self.outcome);
        }
        self.at = At::StoreDetail;
        None
    }

    /// Refuses, or goes on to make the change to a total that is known to be the present one.
    fn decide(&mut self) {
        if let Request::Charge { limit, granted, .. } = self.request {
            let wanted = self.total.saturating_add(self.delta);
            if wanted > limit {
                self.outcome = Outcome::OverLimit { total: self.total };
                self.at = At::StoreIdle;
                return;
            }
            if wanted > granted {
                self.outcome = Outcome::NeedsGrant { wanted };
                self.at = At::StoreIdle;
                return;
            }
        }
        let tag = Tag::unpack(self.word);
        // If the word names one of this slot's cells, others may be reading it: use the other one.
        self.cell = tag.slot == self.slot && !tag.cell;
        self.at = At::StoreTotal;
    }

    /// Gives the change up if it is not made yet.
    pub(crate) fn give_up(&mut self) {
        if matches!(
            self.at,
            At::LoadWord | At::LoadTotal | At::LoadWordAgain | At::StoreTotal | At::Help | At::Swap
        ) {
            self.outcome = Outcome::Contended;
            self.at = At::StoreIdle;
        }
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn slot(&self) -> Slot {
        self.slot
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn request(&self) -> Request {
        self.request
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn delta(&self) -> i64 {
        self.delta
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Runs to the end. Goes round again only if another process made a change meanwhile.
    pub(crate) fn run(mut self, memory: &impl Memory) -> Outcome {
        loop {
            if let Some(outcome) = self.step(memory) {
                return outcome;
            }
        }
    }
}

/// Writes what a change that was made means for its target. Harmless if done twice.
pub(crate) fn settle(memory: &impl Memory, kind: Kind, target: Slot, device: Device, after: i64) {
    let place = match kind {
        Kind::Held | Kind::Reap => Place::Held(target, device),
        Kind::Extra => Place::Extra(target, device),
    };
    memory.store(place, after.cast_unsigned());
}

/// Charges `bytes` to `slot`.
pub(crate) fn charge(
    memory: &impl Memory,
    slot: Slot,
    device: Device,
    bytes: u64,
    limit: u64,
    granted: u64,
) -> Charge {
    match Operation::new(slot, device, Request::charge(bytes, limit, granted)).run(memory) {
        Outcome::Changed(_) => Charge::Granted,
        Outcome::OverLimit { total } => Charge::OverLimit { limit, charged: to_bytes(total) },
        Outcome::NeedsGrant { wanted } => Charge::NeedsGrant { wanted_total: to_bytes(wanted) },
        Outcome::Contended => Charge::Invalid,
    }
}

/// Returns up to `bytes` from `slot`; says how much.
pub(crate) fn uncharge(memory: &impl Memory, slot: Slot, device: Device, bytes: u64) -> u64 {
    match Operation::new(slot, device, Request::uncharge(bytes)).run(memory) {
        Outcome::Changed(delta) => to_bytes(delta.saturating_neg()),
        _ => 0,
    }
}

/// The total of `device` in units; if somebody changes it without pause, one of its late values.
pub(crate) fn total(memory: &impl Memory, device: Device) -> i64 {
    let mut tries = 0_u32;
    loop {
        let word = memory.load(Place::Word(device));
        let tag = Tag::unpack(word);
        let total = signed(memory.load(Place::Total(tag.slot, device, tag.cell)));
        tries = tries.saturating_add(1);
        if memory.load(Place::Word(device)) == word || tries >= PATIENCE {
            return total;
        }
    }
}

/// What is charged on `device`, in bytes.
pub(crate) fn charged(memory: &impl Memory, device: Device) -> u64 {
    to_bytes(total(memory, device))
}

/// What `slot` holds on `device`, in bytes.
pub(crate) fn held(memory: &impl Memory, slot: Slot, device: Device) -> u64 {
    to_bytes(unsigned(memory.load(Place::Held(slot, device))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_up_to_what_the_driver_takes() {
        assert_eq!(round_allocation(0), 0);
        assert_eq!(round_allocation(512), 4096);
        assert_eq!(round_allocation(4097), 8192);
        assert_eq!(round_allocation(DRIVER_GRANULE), DRIVER_GRANULE);
        assert_eq!(round_allocation(DRIVER_GRANULE + 1), 2 * DRIVER_GRANULE);
        assert_eq!(round_allocation(u64::MAX), u64::MAX);
        assert_eq!(Units::of(1), Units::new(1));
        assert_eq!(Units::of(u64::MAX).bytes(), u64::MAX);
    }

    #[test]
    fn words_and_records_survive_packing() {
        for (slot, cell, sequence) in [(0, false, 0), (1023, true, SEQUENCES - 1), (5, true, 1 << 40)] {
            let tag = Tag { slot: Slot::new(slot).unwrap(), cell, sequence };
            assert_eq!(Tag::unpack(tag.pack()), tag);
        }
        for kind in [Kind::Held, Kind::Extra, Kind::Reap] {
            let detail = Detail { device: Device::new(15).unwrap(), kind, target: Slot::new(1023).unwrap() };
            assert_eq!(Detail::unpack(detail.pack(), Slot::AGENT), detail);
        }
        assert_eq!(intent_sequence(intent(SEQUENCES - 1, true)), SEQUENCES - 1);
    }

    #[test]
    fn only_the_record_of_the_agent_can_name_another_slot() {
        let slot = Slot::new(7).unwrap();
        assert_eq!(
            Detail::unpack(u64::MAX, slot),
            Detail { device: Device::new(15).unwrap(), kind: Kind::Held, target: slot }
        );
    }

    #[test]
    fn sizes_beyond_any_device_saturate() {
        assert_eq!(to_bytes(i64::MAX), u64::MAX);
        assert_eq!(to_bytes(i64::MIN), 0);
        assert_eq!(to_signed_units(i64::MIN), -CLAMP);
        assert_eq!(to_signed_units(-1), -1);
    }
}
