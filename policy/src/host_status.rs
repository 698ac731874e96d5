//! How a host fares, told in bands: idle processors, available memory, and kills for want of memory.
//!
//! Less room is told at once: work may be on its way there. More room is told only after it has lasted
//! for [`STAY`], and only as much as there was in all that time: a host that comes and goes is written
//! down as one that is short, and not at each turn. A number that cannot be read is no number: what was
//! told of it stands for [`BLIND`], then nothing is.

use std::collections::VecDeque;

use highwater_crds::{CpuIdleBand, HostMemoryBand, HostStatus};

use crate::time::Millis;

/// How often a host is to be read, in milliseconds.
pub const EVERY: u64 = 10_000;
/// The time over which the idle share of processors is taken, in milliseconds.
pub const WINDOW: u64 = 30_000;
/// For how long there must be more room before it is told, in milliseconds.
pub const STAY: u64 = 300_000;
/// For how long what was told of a number stands while it cannot be read, in milliseconds.
pub const BLIND: u64 = 60_000;
/// For how long a kill for want of memory counts, in milliseconds.
pub const OF_LATE: u64 = 600_000;

/// Bands of idle processors, the worst first: up to how many hundredths of a percent each goes, and how
/// many must be passed to leave it.
const CPU: [(CpuIdleBand, u64, u64); 1] = [(CpuIdleBand::Below40, 4_000, 4_500)];
/// Bands of available memory in bytes, likewise.
const MEMORY: [(HostMemoryBand, u64, u64); 2] = [
    (HostMemoryBand::Below800M, 800_000_000, 880_000_000),
    (HostMemoryBand::Below1200M, 1_200_000_000, 1_320_000_000),
];

/// What was read of a host at one time. What could not be read is missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// What its processors did since it started.
    pub cpu: Option<CpuTime>,
    /// Available memory in bytes.
    pub memory: Option<u64>,
    /// How many processes were killed for want of memory since it started.
    pub oom_kills: Option<u64>,
}

/// Time of all processors of a host, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// They did nothing, or waited for a disk.
    pub idle: u64,
    /// All of it.
    pub total: u64,
}

/// What is known of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// What the processors had done, from the start of the window on.
    cpu: VecDeque<(Millis, CpuTime)>,
    cpu_idle: Told<CpuIdleBand>,
    memory: Told<HostMemoryBand>,
    kills: Kills,
}

impl Host {
    /// An earlier agent told this: what was told stands until it is known better.
    pub fn resume(&mut self, told: &HostStatus, now: Millis) {
        self.cpu_idle = Told { band: told.cpu_idle, read: now, more: None };
        self.memory = Told { band: told.memory, read: now, more: None };
        // When that was is not known. That there was none is not believed: the agent itself may have been
        // killed.
        let killed = told.oom_kills == Some(true);
        self.kills = Kills { last: killed.then_some(now), read: now, ..Kills::default() };
    }

    /// The host was read.
    pub fn step(&mut self, reading: &Reading, now: Millis) {
        if let Some(cpu) = reading.cpu {
            self.cpu.push_back((now, cpu));
        }
        while self.cpu.get(1).is_some_and(|(at, _)| now.since(*at) >= WINDOW) {
            self.cpu.pop_front();
        }
        let start = self.cpu.front().filter(|(at, _)| now.since(*at) >= WINDOW);
        let idle = start.zip(reading.cpu).and_then(|((_, start), end)| idle(*start, end));
        self.cpu_idle.step(idle.map(|idle| band(&CPU, CpuIdleBand::Above40, self.cpu_idle.band, idle)), now);
        let memory =
            reading.memory.map(|bytes| band(&MEMORY, HostMemoryBand::Above1200M, self.memory.band, bytes));
        self.memory.step(memory, now);
        self.kills.step(reading.oom_kills, now);
    }

    /// What is told. `None`: nothing is known.
    pub fn status(&self) -> Option<HostStatus> {
        let status =
            HostStatus { cpu_idle: self.cpu_idle.band, memory: self.memory.band, oom_kills: self.kills.told };
        (status != HostStatus::default()).then_some(status)
    }
}

/// The idle share between two readings in hundredths of a percent.
fn idle(start: CpuTime, end: CpuTime) -> Option<u64> {
    let total = end.total.checked_sub(start.total).filter(|total| *total > 0)?;
    // The kernel says itself that the time of waiting may go back.
    let idle = end.idle.saturating_sub(start.idle).min(total);
    u64::try_from(u128::from(idle) * 10_000 / u128::from(total)).ok()
}

/// The band of a value, given the one before.
fn band<B: Copy + Ord>(bands: &[(B, u64, u64)], best: B, before: Option<B>, value: u64) -> B {
    let holds = |(band, up_to, leave): &&(B, u64, u64)| {
        value <= if before.is_some_and(|before| before >= *band) { *leave } else { *up_to }
    };
    bands.iter().find(holds).map_or(best, |(band, ..)| *band)
}

/// A band that is told. A greater one has less room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Told<B> {
    band: Option<B>,
    /// When the number was read last.
    read: Millis,
    /// Since when there has been more room without a break, and the least that there was.
    more: Option<(Millis, B)>,
}

impl<B> Default for Told<B> {
    fn default() -> Self {
        Self { band: None, read: Millis::default(), more: None }
    }
}

impl<B: Copy + Ord> Told<B> {
    fn step(&mut self, found: Option<B>, now: Millis) {
        let Some(found) = found else {
            if now.since(self.read) >= BLIND {
                *self = Self { read: self.read, ..Self::default() };
            }
            return;
        };
        self.read = now;
        if self.band.is_none_or(|told| found >= told) {
            self.band = Some(found);
            self.more = None;
            return;
        }
        let (since, least) = self.more.map_or((now, found), |(since, least)| (since, least.max(found)));
        self.more = Some((since, least));
        if now.since(since) >= STAY {
            self.band = Some(least);
            self.more = None;
        }
    }
}

/// Kills for want of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Kills {
    /// Since when they have been counted, and how many there were.
    watched: Option<Millis>,
    count: u64,
    /// When there was one.
    last: Option<Millis>,
    /// When the number was read last.
    read: Millis,
    told: Option<bool>,
}

impl Kills {
    fn step(&mut self, count: Option<u64>, now: Millis) {
        let Some(count) = count else {
            if now.since(self.read) >= BLIND {
                *self = Self { read: self.read, ..Self::default() };
            }
            return;
        };
        self.read = now;
        let watched = *self.watched.get_or_insert_with(|| {
            self.count = count;
            now
        });
        if count > self.count {
            self.last = Some(now);
        }
        self.count = count;
        // Those before the agent came have no time; where there was none at all, none was of late.
        let seen_all = count == 0 || now.since(watched) >= OF_LATE;
        let killed = self.last.is_some_and(|last| now.since(last) < OF_LATE);
        self.told = if killed { Some(true) } else { seen_all.then_some(false) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MB: u64 = 1_000_000;

    /// A reading at this second, of a host whose processors have been idle for these of 100 ticks since
    /// the one before.
    struct Bench {
        host: Host,
        now: u64,
        cpu: CpuTime,
    }

    impl Bench {
        fn new() -> Self {
            Self { host: Host::default(), now: 0, cpu: CpuTime::default() }
        }

        fn read(&mut self, idle: Option<u64>, memory: Option<u64>, oom_kills: Option<u64>) -> HostStatus {
            let cpu = idle.map(|idle| {
                self.cpu = CpuTime { idle: self.cpu.idle + idle, total: self.cpu.total + 100 };
                self.cpu
            });
            self.host.step(&Reading { cpu, memory, oom_kills }, Millis(self.now));
            self.now += EVERY;
            self.host.status().unwrap_or_default()
        }

        /// For so many seconds: each status that differs from the one before, with its second.
        fn memory(&mut self, seconds: u64, value: impl Fn(u64) -> u64) -> Vec<(u64, HostMemoryBand)> {
            let mut before = self.host.memory.band;
            let mut changes = Vec::new();
            for at in (0..seconds * 1000).step_by(10_000) {
                let told = self.read(None, Some(value(at / 1000) * MB), None).memory;
                if told != before {
                    changes.push((at / 1000, told.unwrap()));
                    before = told;
                }
            }
            changes
        }
    }

    #[test]
    fn idle_processors_are_told_after_a_window_and_not_as_0_before() {
        let mut bench = Bench::new();
        for _ in 0..3 {
            assert_eq!(bench.read(Some(90), None, None).cpu_idle, None);
        }
        assert_eq!(bench.read(Some(90), None, None).cpu_idle, Some(CpuIdleBand::Above40));
        // 90, 10, 10, and then no more of the 90: the window has 30 s.
        assert_eq!(bench.read(Some(10), None, None).cpu_idle, Some(CpuIdleBand::Above40));
        assert_eq!(bench.read(Some(10), None, None).cpu_idle, Some(CpuIdleBand::Below40));
    }

    #[test]
    fn exactly_at_a_mark_there_is_not_more_than_it() {
        let mut bench = Bench::new();
        let told = (0..4).map(|_| bench.read(Some(40), Some(1_200 * MB), None)).last().unwrap();
        assert_eq!(told.cpu_idle, Some(CpuIdleBand::Below40));
        assert_eq!(told.memory, Some(HostMemoryBand::Below1200M));
        let mut bench = Bench::new();
        let told = (0..4).map(|_| bench.read(Some(41), Some(1_200 * MB + 1), None)).last().unwrap();
        assert_eq!(told.cpu_idle, Some(CpuIdleBand::Above40));
        assert_eq!(told.memory, Some(HostMemoryBand::Above1200M));
    }

    #[test]
    fn less_room_is_told_at_once_and_more_after_it_has_lasted() {
        use HostMemoryBand::{Above1200M, Below800M, Below1200M};
        let mut bench = Bench::new();
        assert_eq!(bench.memory(60, |_| 4_000), [(0, Above1200M)]);
        assert_eq!(bench.memory(60, |_| 700), [(0, Below800M)]);
        assert_eq!(bench.memory(600, |_| 850), [], "not yet past its margin");
        assert_eq!(bench.memory(400, |_| 1_000), [(300, Below1200M)]);
        // Told is the least of all that time.
        bench.memory(20, |_| 700);
        assert_eq!(bench.memory(310, |at| if at == 100 { 1_000 } else { 4_000 }), [(300, Below1200M)]);
        // A break begins it anew.
        assert_eq!(bench.memory(400, |at| if at == 200 { 1_100 } else { 4_000 }), []);
    }

    #[test]
    fn a_number_that_cannot_be_read_is_missing_and_not_zero() {
        let mut bench = Bench::new();
        assert_eq!(bench.read(None, None, None), HostStatus::default());
        assert_eq!(bench.host.status(), None);
        for _ in 0..4 {
            bench.read(Some(90), Some(4_000 * MB), Some(0));
        }
        let all = HostStatus {
            cpu_idle: Some(CpuIdleBand::Above40),
            memory: Some(HostMemoryBand::Above1200M),
            oom_kills: Some(false),
        };
        assert_eq!(bench.host.status(), Some(all));
        for _ in 0..5 {
            assert_eq!(bench.read(None, None, None), all, "it may come back");
        }
        assert_eq!(bench.read(None, None, None), HostStatus::default());
        assert_eq!(bench.read(None, Some(100 * MB), None).memory, Some(HostMemoryBand::Below800M));
    }

    #[test]
    fn a_kill_counts_for_ten_minutes() {
        let mut bench = Bench::new();
        let mut kills = |seconds: u64, count| {
            let told = (0..seconds / 10).map(|_| bench.read(None, None, Some(count)).oom_kills);
            let told: Vec<_> = told.collect();
            (*told.first().unwrap(), *told.last().unwrap())
        };
        assert_eq!(kills(20, 0), (Some(false), Some(false)));
        assert_eq!(kills(600, 1), (Some(true), Some(true)));
        assert_eq!(kills(10, 1), (Some(false), Some(false)));
        assert_eq!(kills(10, 3), (Some(true), Some(true)));
    }

    #[test]
    fn kills_before_the_agent_came_are_no_kills_and_not_none_of_late() {
        let mut bench = Bench::new();
        for _ in 0..60 {
            assert_eq!(bench.read(None, None, Some(7)).oom_kills, None);
        }
        assert_eq!(bench.read(None, None, Some(7)).oom_kills, Some(false));
        assert_eq!(bench.read(None, None, Some(8)).oom_kills, Some(true));
    }

    #[test]
    fn after_a_restart_what_was_told_stands_but_for_no_kills() {
        let told = |oom_kills| HostStatus {
            cpu_idle: Some(CpuIdleBand::Below40),
            memory: Some(HostMemoryBand::Below800M),
            oom_kills,
        };
        let mut bench = Bench::new();
        bench.host.resume(&told(Some(false)), Millis(0));
        assert_eq!(bench.host.status(), Some(told(None)));
        bench.host.resume(&told(Some(true)), Millis(0));
        for _ in 0..30 {
            assert_eq!(bench.read(Some(90), Some(4_000 * MB), Some(5)), told(Some(true)));
        }
        let after = (0..30).map(|_| bench.read(Some(90), Some(4_000 * MB), Some(5))).last().unwrap();
        assert_eq!((after.memory, after.oom_kills), (Some(HostMemoryBand::Above1200M), Some(true)));
        assert_eq!(bench.read(None, None, Some(5)).oom_kills, Some(false));
    }

    proptest! {
        #[test]
        fn a_value_that_rests_never_changes_the_band(
            idle in 0u64..=100,
            memory in 0u64..2_000,
            kills in 0u64..3,
        ) {
            let mut bench = Bench::new();
            let mut read = || bench.read(Some(idle), Some(memory * MB), Some(kills));
            // By then everything is known.
            let known = (0..=60).map(|_| read()).last().unwrap();
            prop_assert!(known.cpu_idle.is_some() && known.memory.is_some() && known.oom_kills.is_some());
            for _ in 0..200 {
                prop_assert_eq!(read(), known);
            }
        }

        #[test]
        fn whatever_was_before_the_band_of_a_value_that_rests_comes_to_rest(
            before in prop::collection::vec((0u64..=100, 0u64..2_000), 0..60),
            idle in 0u64..=100,
            memory in 0u64..2_000,
        ) {
            let mut bench = Bench::new();
            for (idle, memory) in before {
                bench.read(Some(idle), Some(memory * MB), Some(0));
            }
            // A stay that began with less room ends there, and the next one goes on.
            for _ in 0..(WINDOW + 2 * STAY) / EVERY {
                bench.read(Some(idle), Some(memory * MB), Some(0));
            }
            let rests = bench.read(Some(idle), Some(memory * MB), Some(0));
            for _ in 0..100 {
                prop_assert_eq!(bench.read(Some(idle), Some(memory * MB), Some(0)), rests);
            }
        }

        #[test]
        fn however_a_value_flickers_more_room_is_told_once_in_five_minutes_at_most(
            values in prop::collection::vec(0u64..2_000, 0..400),
        ) {
            let mut bench = Bench::new();
            let (mut told, mut more) = (None, None);
            for value in values {
                let at = bench.now;
                let is = bench.read(None, Some(value * MB), None).memory;
                if told.is_some() && is < told {
                    prop_assert!(more.is_none_or(|before| at - before >= STAY));
                    more = Some(at);
                }
                told = is;
            }
        }
    }
}
