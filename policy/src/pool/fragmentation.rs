//! How much of a pool is lost to fragmentation: chunks of the [`ladder`] against
//! first fit in one range, on a named synthetic trace.
//!
//! **External** fragmentation is looked at before each request:
//!
//! ```text
//! external = (free - obtainable) / free
//! ```
//!
//! `free` is what is given to nobody, `obtainable` the largest single request that would be
//! granted now. For first fit that is the largest hole, since a block lies in one piece. Chunks
//! of the ladder are mapped side by side wherever they lie, so it is all that the chunks add up
//! to.
//!
//! **Internal** fragmentation is looked at after each request:
//!
//! ```text
//! internal = (given - asked) / given
//! ```
//!
//! over all blocks that live. What the ladder closes beyond need counts as given at this moment
//! although it is made anew right after.
//!
//! The mean is over all requests of the trace. A request that is refused although enough is free
//! in total is counted, and left out of what follows.

use std::collections::BTreeMap;

use highwater_crds::ByteSize;

use crate::pool::ladder::{self, Chunks};

/// Requests in order of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Its name; the same name is the same trace.
    pub name: &'static str,
    /// Size of the pool in bytes.
    pub capacity: u64,
    /// What happens.
    pub events: Vec<Event>,
}

/// Something that happens in a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A block is asked for.
    Take {
        /// By which it is known.
        id: u32,
        /// In bytes.
        bytes: u64,
    },
    /// It is given back.
    Give {
        /// By which it is known.
        id: u32,
    },
}

/// What came of a trace. Ratios are in parts per million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests.
    pub requests: u64,
    /// Mean external fragmentation.
    pub external_mean_ppm: u64,
    /// Greatest external fragmentation.
    pub external_peak_ppm: u64,
    /// Mean internal fragmentation.
    pub internal_mean_ppm: u64,
    /// Greatest internal fragmentation.
    pub internal_peak_ppm: u64,
    /// Requests refused although enough was free in total.
    pub refused_although_free: u64,
    /// Most chunks, or holes, at a time.
    pub peak_pieces: u64,
    /// Bytes that were given out and held back again to cut or join chunks, of all bytes given.
    pub remade_ppm: u64,
}

/// Placement in a pool.
trait Placement {
    /// What is given to nobody, in bytes.
    fn free(&self) -> u64;
    /// The largest request that would be granted.
    fn obtainable(&self) -> u64;
    /// Places a block. What is given for it at this moment, in bytes.
    fn take(&mut self, id: u32, bytes: u64) -> Option<u64>;
    /// Puts back what was given beyond need. What the block has then, in bytes.
    fn trim(&mut self, bytes: u64) -> u64;
    /// Takes a block back.
    fn give(&mut self, id: u32);
    /// Chunks, or holes.
    fn pieces(&self) -> u64;
    /// Bytes that were moved to cut or join.
    fn remade(&self) -> u64;
}

/// Runs a trace with first fit in one range, neighbours joined.
pub fn first_fit(trace: &Trace) -> Outcome {
    run(trace, FirstFit { holes: BTreeMap::from([(0, trace.capacity)]), blocks: BTreeMap::new() })
}

/// Runs a trace with chunks of the ladder.
pub fn on_ladder(trace: &Trace) -> Outcome {
    let have = ladder::plan(&Chunks::NONE, trace.capacity);
    run(trace, OnLadder { have, excess: 0, blocks: BTreeMap::new(), remade: 0 })
}

fn run(trace: &Trace, mut pool: impl Placement) -> Outcome {
    let mut outcome = Outcome { peak_pieces: pool.pieces(), ..Outcome::default() };
    let (mut external, mut internal) = (Mean::default(), Mean::default());
    let (mut asked, mut given, mut total) = (0u64, 0u64, 0u64);
    // Asked and given for each block that lives.
    let mut live: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for event in &trace.events {
        match *event {
            Event::Take { id, bytes } => {
                outcome.requests = outcome.requests.saturating_add(1);
                let free = pool.free();
                external.add(free.saturating_sub(pool.obtainable()), free);
                let Some(now) = pool.take(id, bytes) else {
                    let refused = u64::from(ladder::ceil(bytes) <= free);
                    outcome.refused_although_free = outcome.refused_although_free.saturating_add(refused);
                    continue;
                };
                asked = asked.saturating_add(bytes);
                let moment = given.saturating_add(now);
                internal.add(moment.saturating_sub(asked), moment);
                let kept = pool.trim(bytes);
                given = given.saturating_add(kept);
                total = total.saturating_add(kept);
                live.insert(id, (bytes, kept));
            }
            Event::Give { id } => {
                let Some((bytes, kept)) = live.remove(&id) else { continue };
                asked = asked.saturating_sub(bytes);
                given = given.saturating_sub(kept);
                pool.give(id);
            }
        }
        outcome.peak_pieces = outcome.peak_pieces.max(pool.pieces());
    }
    outcome.external_mean_ppm = external.mean();
    outcome.external_peak_ppm = external.peak;
    outcome.internal_mean_ppm = internal.mean();
    outcome.internal_peak_ppm = internal.peak;
    outcome.remade_ppm = ppm(pool.remade(), total);
    outcome
}

#[derive(Debug, Default)]
struct Mean {
    sum: u64,
    count: u64,
    peak: u64,
}

impl Mean {
    fn add(&mut self, part: u64, of: u64) {
        let ppm = ppm(part, of);
        self.sum = self.sum.saturating_add(ppm);
        self.count = self.count.saturating_add(1);
        self.peak = self.peak.max(ppm);
    }

    fn mean(&self) -> u64 {
        self.sum.checked_div(self.count).unwrap_or(0)
    }
}

fn ppm(part: u64, of: u64) -> u64 {
    u64::try_from(u128::from(part) * 1_000_000 / u128::from(of.max(1))).unwrap_or(u64::MAX)
}

/// First fit: a block lies in the first hole that is large enough.
#[derive(Debug)]
struct FirstFit {
    /// Size by address.
    holes: BTreeMap<u64, u64>,
    /// Address and size by block.
    blocks: BTreeMap<u32, (u64, u64)>,
}

impl Placement for FirstFit {
    fn free(&self) -> u64 {
        self.holes.values().fold(0, |sum, size| size.saturating_add(sum))
    }

    fn obtainable(&self) -> u64 {
        self.holes.values().max().copied().unwrap_or(0)
    }

    fn take(&mut self, id: u32, bytes: u64) -> Option<u64> {
        let bytes = ladder::ceil(bytes);
        let (&address, &size) = self.holes.iter().find(|(_, size)| **size >= bytes)?;
        self.holes.remove(&address);
        if size > bytes {
            self.holes.insert(address.saturating_add(bytes), size.saturating_sub(bytes));
        }
        self.blocks.insert(id, (address, bytes));
        Some(bytes)
    }

    fn trim(&mut self, bytes: u64) -> u64 {
        ladder::ceil(bytes)
    }

    fn give(&mut self, id: u32) {
        let Some((mut address, mut size)) = self.blocks.remove(&id) else { return };
        if let Some(next) = self.holes.remove(&address.saturating_add(size)) {
            size = size.saturating_add(next);
        }
        let before = self.holes.range(..address).next_back().map(|(at, size)| (*at, *size));
        if let Some((at, length)) = before.filter(|(at, length)| at.saturating_add(*length) == address) {
            self.holes.remove(&at);
            address = at;
            size = size.saturating_add(length);
        }
        self.holes.insert(address, size);
    }

    fn pieces(&self) -> u64 {
        u64::try_from(self.holes.len()).unwrap_or(u64::MAX)
    }

    fn remade(&self) -> u64 {
        0
    }
}

/// Chunks of the ladder, put in order after each step as the keeper does when it is idle.
#[derive(Debug)]
struct OnLadder {
    have: Chunks,
    /// Given out beyond need a moment ago.
    excess: u64,
    /// Size by block.
    blocks: BTreeMap<u32, u64>,
    remade: u64,
}

impl OnLadder {
    fn tidy(&mut self) {
        while let Some(exchange) = ladder::tidy(&self.have) {
            self.have = self.have.without(&exchange.close).with(&exchange.remake);
            self.remade = self.remade.saturating_add(exchange.close.bytes());
        }
    }
}

impl Placement for OnLadder {
    fn free(&self) -> u64 {
        self.have.bytes()
    }

    fn obtainable(&self) -> u64 {
        ladder::release(&self.have, u64::MAX).close.bytes()
    }

    fn take(&mut self, id: u32, bytes: u64) -> Option<u64> {
        let bytes = ladder::ceil(bytes);
        if bytes > self.have.bytes() {
            return None;
        }
        let exchange = ladder::release(&self.have, bytes);
        self.have = self.have.without(&exchange.close);
        self.excess = exchange.remake.bytes();
        self.blocks.insert(id, bytes);
        Some(exchange.close.bytes())
    }

    fn trim(&mut self, bytes: u64) -> u64 {
        let remake = ladder::plan(&self.have, self.excess);
        self.have = self.have.with(&remake);
        self.remade = self.remade.saturating_add(self.excess);
        self.excess = 0;
        self.tidy();
        ladder::ceil(bytes)
    }

    fn give(&mut self, id: u32) {
        let bytes = self.blocks.remove(&id).unwrap_or(0);
        self.have = self.have.with(&ladder::plan(&self.have, bytes));
        self.tidy();
    }

    fn pieces(&self) -> u64 {
        self.have.len().into()
    }

    fn remade(&self) -> u64 {
        self.remade
    }
}

impl Trace {
    /// `llm-mix`: model servers, their caches and their passing needs on 96 GiB, filled to 85 %
    /// at most, so that only fragmentation can refuse anything.
    ///
    /// | what | share of requests | size | lives for requests |
    /// |---|---|---|---|
    /// | weights | 4 % | 4 to 24 GiB | 1,000 to 4,000 |
    /// | cache blocks | 26 % | 256 MiB to 4 GiB | 50 to 400 |
    /// | contexts | 20 % | 518 MiB | 100 to 1,000 |
    /// | activations | 50 % | 2 to 512 MiB | 1 to 40 |
    pub fn llm_mix() -> Self {
        let capacity = 96 * ByteSize::GI;
        let most = capacity / 100 * 85;
        let mut random = Random(0x4869_6768_7761_7465);
        let mut events = Vec::new();
        let mut held = 0u64;
        // What ends, by the number of the request before which it does.
        let mut ends: BTreeMap<u64, Vec<(u32, u64)>> = BTreeMap::new();
        for id in 0..20_000u32 {
            while let Some(first) = ends.first_entry().filter(|first| *first.key() <= u64::from(id)) {
                for (id, bytes) in first.remove() {
                    held = held.saturating_sub(bytes);
                    events.push(Event::Give { id });
                }
            }
            let (bytes, life) = match random.within(0, 99) {
                0..4 => (random.within(4 * ByteSize::GI, 24 * ByteSize::GI), random.within(1000, 4000)),
                4..30 => (random.within(256 * ByteSize::MI, 4 * ByteSize::GI), random.within(50, 400)),
                30..50 => (518 * ByteSize::MI, random.within(100, 1000)),
                _ => (random.within(2 * ByteSize::MI, 512 * ByteSize::MI), random.within(1, 40)),
            };
            // To 512 bytes, as allocations are.
            let bytes = bytes.saturating_sub(bytes % 512);
            let rounded = ladder::ceil(bytes);
            if held.saturating_add(rounded) > most {
                continue;
            }
            held = held.saturating_add(rounded);
            events.push(Event::Take { id, bytes });
            ends.entry(u64::from(id).saturating_add(life)).or_default().push((id, rounded));
        }
        Self { name: "llm-mix", capacity, events }
    }
}

/// Numbers that look random and are the same every time (the splitmix64 sequence).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// From `least` to `most`, both included.
    fn within(&mut self, least: u64, most: u64) -> u64 {
        least.saturating_add(self.next() % most.saturating_sub(least).saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MI: u64 = ByteSize::MI;

    fn trace(capacity: u64, events: &[Event]) -> Trace {
        Trace { name: "test", capacity, events: events.to_vec() }
    }

    fn take(id: u32, mib: u64) -> Event {
        Event::Take { id, bytes: mib * MI }
    }

    #[test]
    fn first_fit_refuses_what_lies_in_two_holes_and_the_ladder_does_not() {
        let events = [
            take(1, 100),
            take(2, 100),
            take(3, 100),
            Event::Give { id: 1 },
            Event::Give { id: 3 },
            take(4, 200),
        ];
        let trace = trace(300 * MI, &events);
        let outcome = first_fit(&trace);
        assert_eq!(outcome.refused_although_free, 1);
        assert_eq!(outcome.external_peak_ppm, 500_000, "the largest of two equal holes");
        assert_eq!(on_ladder(&trace).refused_although_free, 0);
    }

    #[test]
    fn first_fit_joins_neighbours() {
        let events = [
            take(1, 100),
            take(2, 100),
            take(3, 100),
            Event::Give { id: 1 },
            Event::Give { id: 3 },
            Event::Give { id: 2 },
            take(4, 300),
        ];
        let outcome = first_fit(&trace(300 * MI, &events));
        assert_eq!((outcome.refused_although_free, outcome.peak_pieces), (0, 2));
    }

    #[test]
    fn rounding_to_the_grain_is_internal_fragmentation() {
        for outcome in [first_fit, on_ladder].map(|run| run(&trace(256 * MI, &[take(1, 3)]))) {
            assert_eq!(outcome.internal_peak_ppm, 250_000);
        }
    }

    #[test]
    fn r01_the_ladder_loses_less_than_five_percent_where_first_fit_loses_more() {
        let trace = Trace::llm_mix();
        assert_eq!(trace, Trace::llm_mix(), "the same every time");
        let (first, ladder) = (first_fit(&trace), on_ladder(&trace));
        assert!(first.requests > 5000, "{first:?}");
        assert!(first.external_mean_ppm > 200_000, "{first:?}");
        assert!(ladder.external_mean_ppm + ladder.internal_mean_ppm <= 50_000, "{ladder:?}");
        assert_eq!(ladder.refused_although_free, 0);
        assert!(ladder.remade_ppm < 300_000, "chunks are not cut and joined all the time: {ladder:?}");
        assert!(ladder.peak_pieces <= 96 + 60, "{ladder:?}");
    }
}
