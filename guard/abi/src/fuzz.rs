//! Targets for `make fuzz`: each takes any bytes, and panics if something is wrong with the crate.
#![allow(clippy::missing_panics_doc, clippy::expect_used, reason = "panicking is how a target reports")]

use crate::charge::{Charge, Request, UNIT};
use crate::page::{Managed, QuotaPage, QuotaView, USAGE_BYTES, UsagePage};
use crate::sim::World;
use crate::wire::{FRAME, ToAgent, ToGuard};
use crate::{MAX_DEVICES, MAX_SLOTS};

/// Takes one input.
pub type Target = fn(&[u8]);

/// The targets by name.
pub const TARGETS: &[(&str, Target)] =
    &[("wire", wire), ("charges", charges), ("usage-page", usage_page), ("quota-page", quota_page)];

/// Pseudo-random inputs (xorshift), the same on every machine.
#[derive(Clone, Debug)]
pub struct Inputs {
    state: u64,
    buffer: [u8; Self::LONGEST],
}

impl Inputs {
    /// The longest input in bytes.
    pub const LONGEST: usize = 320;

    /// The inputs of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed | 1, buffer: [0; Self::LONGEST] }
    }

    fn number(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// The next input.
    pub fn next_input(&mut self) -> &[u8] {
        let length = usize::try_from(self.number() >> 32).unwrap_or(0) % (Self::LONGEST + 1);
        let mut at = 0;
        while at < length {
            let number = self.number().to_le_bytes();
            for (to, from) in self.buffer.iter_mut().skip(at).zip(number) {
                *to = from;
            }
            at += number.len();
        }
        self.buffer.get(..length).unwrap_or(&[])
    }
}

/// Takes numbers off an input; zeroes when it is used up.
struct Source<'a> {
    rest: &'a [u8],
}

impl Source<'_> {
    fn more(&self) -> bool {
        !self.rest.is_empty()
    }

    fn byte(&mut self) -> u8 {
        match self.rest.split_first() {
            Some((&first, rest)) => {
                self.rest = rest;
                first
            }
            None => 0,
        }
    }

    fn index(&mut self, below: usize) -> usize {
        usize::from(self.byte()) % below
    }

    fn number(&mut self) -> u64 {
        u64::from_le_bytes(core::array::from_fn(|_| self.byte()))
    }

    /// A number of which the edges are as likely as the middle.
    fn odd_number(&mut self) -> u64 {
        match self.byte() % 8 {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << 63,
            3 => u64::from(self.byte()),
            4 => u64::MAX - u64::from(self.byte()),
            5 => 1 << (self.byte() % 64),
            _ => self.number(),
        }
    }
}

/// Any packet is either refused or understood in one way only.
pub fn wire(bytes: &[u8]) {
    packets(bytes, |packet| {
        if let Ok(message) = ToAgent::decode(packet) {
            let (frame, length) = message.encode();
            let frame = frame.get(..length).expect("a frame that fits");
            assert_eq!(ToAgent::decode(frame), Ok(message));
            assert_eq!(frame.get(8..), packet.get(8..length));
        }
        if let Ok(message) = ToGuard::decode(packet) {
            let (frame, length) = message.encode();
            let frame = frame.get(..length).expect("a frame that fits");
            assert_eq!(ToGuard::decode(frame), Ok(message));
            assert_eq!(frame.get(8..), packet.get(8..length));
        }
    });
}

/// What is made of an input: itself; as hardly anything random begins like a frame, the same behind a
/// good header; and as hardly any random number is one of a list, that with small numbers in it.
fn packets(bytes: &[u8], mut each: impl FnMut(&[u8])) {
    /// More than there are messages in either direction.
    const KINDS: u8 = 8;
    const FIRST_TO_GUARD: u8 = 100;

    each(bytes);
    let (start, _) = ToAgent::Strength { flags: 0 }.encode();
    let mut packet = [0; FRAME + 8];
    let length = (bytes.len() + 8).min(packet.len());
    for (to, &from) in packet.iter_mut().zip(start.iter().take(4)) {
        *to = from;
    }
    let kind = bytes.first().map_or(0, |byte| byte % KINDS + byte / 128 * FIRST_TO_GUARD);
    let size = u16::try_from(length).unwrap_or(0).to_le_bytes();
    for (to, from) in packet.iter_mut().skip(4).zip([kind, 0].into_iter().chain(size)) {
        *to = from;
    }
    for (to, &from) in packet.iter_mut().skip(8).zip(bytes) {
        *to = from;
    }
    each(packet.get(..length).unwrap_or(&[]));
    // The numbers have 32 bits or 64, the lowest first.
    for (at, byte) in packet.iter_mut().enumerate().skip(8) {
        *byte = if at % 4 == 0 { *byte % 8 } else { 0 };
    }
    each(packet.get(..length).unwrap_or(&[]));
}

/// In any order of steps, kills and corrections no charge is lost or made twice.
pub fn charges(bytes: &[u8]) {
    let mut source = Source { rest: bytes };
    let mut world = World::new(3);
    while source.more() {
        let action = source.byte();
        let index = usize::from(action >> 4) % 4;
        let on = usize::from(action >> 6) % 2;
        match action % 16 {
            0..=4 => world.step(index),
            // Many steps of one process while the others stand still.
            5 => (0..source.byte() % 32).for_each(|_| world.step(index)),
            6 | 7 => {
                let request = Request::charge(
                    UNIT * u64::from(source.byte() % 8),
                    UNIT * u64::from(8 + source.byte() % 8),
                    UNIT * u64::from(4 + source.byte() % 12),
                );
                world.start(index, on, request);
            }
            8 => world.start(index, on, Request::uncharge(UNIT * u64::from(source.byte() % 8))),
            9 => world.kill(index),
            10 => world.reap(index),
            11 | 12 => world.agent_step(),
            13 => (0..source.byte() % 64).for_each(|_| world.agent_step()),
            14 => match source.byte() % 4 {
                0 => world.agent_kill(),
                1 => world.audit(),
                _ => world.claim(index),
            },
            _ => {
                let units = i64::from(source.byte() % 16) - 8;
                world.correct(index, on, units * UNIT.cast_signed());
            }
        }
    }
    world.settle();
}

thread_local! {
    static USAGE: UsagePage = UsagePage::create().expect("a memory file").0;
    static QUOTA: (QuotaPage, QuotaView) = {
        let (page, fd) = QuotaPage::create().expect("a memory file");
        let view = QuotaView::map(rustix::fd::AsFd::as_fd(&fd)).expect("a good page");
        (page, view)
    };
}

/// A usage page that is scribbled over gives wrong numbers and nothing worse. The page stays as it
/// is from one input to the next.
pub fn usage_page(bytes: &[u8]) {
    /// The header, the words and the first few slots, where things happen.
    const BUSY: usize = 24 + 72 * 4;
    /// No number that is given out is larger.
    const MOST: u64 = 1 << 62;

    USAGE.with(|page| {
        let mut source = Source { rest: bytes };
        while source.more() {
            let slot = source.index(if source.rest.len().is_multiple_of(2) { 5 } else { MAX_SLOTS + 2 });
            let device = source.index(MAX_DEVICES + 1);
            match source.byte() % 16 {
                0..=4 => page.scribble(source.index(256) + 8, source.odd_number()),
                5 => page.scribble(source.index(256) * 7 % BUSY, source.odd_number()),
                6 => {
                    let index = usize::try_from(source.number() >> 32).unwrap_or(0);
                    page.scribble(index % (USAGE_BYTES / 8), source.odd_number());
                }
                7 | 8 => {
                    let (bytes, limit, granted) =
                        (source.odd_number(), source.odd_number(), source.odd_number());
                    if let Charge::OverLimit { charged, .. } =
                        page.charge(slot, device, bytes, limit, granted)
                    {
                        assert!(charged <= MOST);
                    }
                }
                9 => assert!(page.uncharge(slot, device, source.odd_number()) <= MOST),
                10 => assert!(page.charged(device) <= MOST && page.held(slot, device) <= MOST),
                11 => {
                    let reaped = page.reap(slot).expect("nobody else is here");
                    assert!(reaped.bytes.iter().all(|&bytes| bytes <= MOST));
                    if (1..MAX_SLOTS).contains(&slot) {
                        assert!((0..MAX_DEVICES).all(|device| page.held(slot, device) == 0));
                        assert_eq!(page.token(slot), 0);
                    }
                }
                12 => {
                    let bytes = source.odd_number().cast_signed();
                    let former = page.correct(slot, device, bytes).expect("nobody else is here");
                    assert!(former.unsigned_abs() <= MOST);
                }
                13 => page.recover(),
                14 => {
                    if page.claim(slot, source.odd_number()) {
                        assert!(page.slots_in_use().any(|(used, _)| used == slot));
                    }
                }
                _ => match source.byte() % 16 {
                    0 => {
                        page.audit(device);
                    }
                    1 => {
                        page.claim_any(source.odd_number());
                    }
                    2 => assert!(page.slots_in_use().count() < MAX_SLOTS),
                    _ => {
                        page.raise_epoch();
                    }
                },
            }
        }
    });
}

/// Whatever a quota page says, the guard reads what the agent reads, within bounds.
pub fn quota_page(bytes: &[u8]) {
    QUOTA.with(|(page, view)| {
        let mut source = Source { rest: bytes };
        while source.more() {
            page.scribble(source.index(160) + 1, source.odd_number());
            assert!(view.len() <= MAX_DEVICES);
            let ordinal = source.index(MAX_DEVICES + 1);
            let quota = view.device(ordinal);
            assert_eq!(quota, page.device(ordinal));
            assert_eq!(quota.is_some(), ordinal < view.len());
            if let Some(quota) = quota {
                assert_eq!(view.limit(ordinal), Some(quota.limit));
                assert_eq!(view.granted(ordinal), Some(quota.granted));
                let found = view.find(&quota.uuid).expect("it is there");
                assert!(found <= ordinal);
                assert!(matches!(quota.managed, Managed::Charge | Managed::Refuse | Managed::Ignore));
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_is_among_what_the_inputs_are_made_into() {
        let (mut to_agent, mut to_guard) = ([0_u32; 4], [0_u32; 5]);
        let mut inputs = Inputs::new(3);
        for _ in 0..20_000 {
            packets(inputs.next_input(), |packet| {
                if let Ok(message) = ToAgent::decode(packet) {
                    to_agent[match message {
                        ToAgent::Hello(_) => 0,
                        ToAgent::Grant { .. } => 1,
                        ToAgent::Refused { .. } => 2,
                        ToAgent::Strength { .. } => 3,
                    }] += 1;
                }
                if let Ok(message) = ToGuard::decode(packet) {
                    to_guard[match message {
                        ToGuard::Welcome { .. } => 0,
                        ToGuard::Denied { .. } => 1,
                        ToGuard::Granted { .. } => 2,
                        ToGuard::NotGranted { .. } => 3,
                        ToGuard::Trim { .. } => 4,
                    }] += 1;
                }
            });
        }
        let often = |counts: &[u32]| counts.iter().all(|count| *count > 100);
        assert!(often(&to_agent) && often(&to_guard), "{to_agent:?} {to_guard:?}");
    }

    #[test]
    fn two_hundred_thousand_inputs_find_nothing() {
        for (name, target) in TARGETS {
            let mut inputs = Inputs::new(11);
            let share = if *name == "wire" { 140_000 } else { 20_000 };
            (0..share).for_each(|_| target(inputs.next_input()));
        }
    }
}
