use highwater_crds::ByteSize;

use super::*;
use crate::pool::{DeviceBytes, grant::Decay};

const GI: u64 = ByteSize::GI;
const MI: u64 = ByteSize::MI;
const MINUTE: u64 = 60_000;

/// A device of 100 GiB with a pool, and a keeper that does at once what it is asked for.
struct Bench {
    pool: DevicePool,
    pods: Vec<PodDemand>,
    foreign: u64,
    hidden: u64,
    ballast: u64,
    now: u64,
    pressure: Pressure,
    /// Whether the keeper obeys.
    obeys: bool,
    answers: Vec<(u64, Outcome)>,
    commands: Vec<Command>,
}

fn settings() -> Settings {
    Settings { size_percent: 60, margin: 0, start_hold_ms: 0, ..Settings::default() }
}

impl Bench {
    fn new(settings: Settings) -> Self {
        Self {
            pool: DevicePool::new(settings),
            pods: Vec::new(),
            foreign: 0,
            hidden: 0,
            ballast: 0,
            now: 1_000_000,
            pressure: Pressure::default(),
            obeys: true,
            answers: Vec::new(),
            commands: Vec::new(),
        }
    }

    /// With a full ballast.
    fn full(settings: Settings) -> Self {
        let mut bench = Self::new(settings);
        bench.settle();
        bench.commands.clear();
        bench
    }

    fn bind(&mut self, uid: &str, kind: Kind, guarantee: u64, limit: u64) {
        self.pods.push(PodDemand {
            uid: uid.into(),
            kind,
            guarantee,
            limit,
            used: Some(0),
            charged: None,
            bound_at: Millis(self.now),
        });
    }

    fn pod(&mut self, uid: &str) -> &mut PodDemand {
        self.pods.iter_mut().find(|pod| &*pod.uid == uid).unwrap()
    }

    fn uses(&mut self, uid: &str, bytes: u64) {
        self.pod(uid).used = Some(bytes);
    }

    fn end(&mut self, uid: &str) {
        self.pods.retain(|pod| &*pod.uid != uid);
    }

    fn free(&self) -> u64 {
        let pods: u64 = self.pods.iter().filter_map(|pod| pod.used).sum();
        100 * GI - pods - self.foreign - self.hidden - self.ballast
    }

    fn device(&self) -> DeviceBytes {
        DeviceBytes {
            total: 100 * GI,
            pods: self.pods.iter().filter_map(|pod| pod.used).sum(),
            foreign: self.foreign,
            unexplained: self.hidden,
            free: self.free(),
            ..DeviceBytes::default()
        }
    }

    fn sample_with(&mut self, change: impl FnOnce(&mut Facts<'_>)) -> Decision {
        self.now += 1;
        let pods = self.pods.clone();
        let mut facts = Facts {
            at: Millis(self.now),
            device: Some(self.device()),
            ballast: Some(self.ballast),
            torn: false,
            pods: Some(&pods),
            pressure: self.pressure,
        };
        change(&mut facts);
        let decision = self.pool.sample(&facts, Millis(self.now));
        self.take(&decision);
        decision
    }

    fn sample(&mut self) -> Decision {
        self.sample_with(|_| ())
    }

    fn take(&mut self, decision: &Decision) {
        self.answers.extend(decision.answers.iter().map(|answer| (answer.id, answer.outcome)));
        self.commands.extend(decision.command);
        if let Some(command) = decision.command.filter(|_| self.obeys) {
            self.obey(command);
        }
    }

    fn obey(&mut self, command: Command) {
        let done = match command {
            Command::Reserve { bytes, keep_free } => {
                let done = bytes.min(self.free().saturating_sub(keep_free));
                self.ballast += done;
                done
            }
            Command::Release { bytes } => {
                self.ballast -= bytes;
                bytes
            }
        };
        self.reply(Reply { done, complete: true });
    }

    fn reply(&mut self, reply: Reply) {
        self.now += 1;
        let decision = self.pool.replied(reply, Millis(self.now));
        self.take(&decision);
    }

    /// Samples until nothing moves.
    fn settle(&mut self) {
        for _ in 0..100 {
            let decision = self.sample();
            if decision.command.is_none() && !decision.sample_soon {
                return;
            }
        }
        panic!("does not come to rest: {:?}", self.pool.report());
    }

    fn asks(&mut self, uid: &str, id: u64, wanted: u64, wait_ms: u64) -> Option<Outcome> {
        let request = Request { uid: uid.into(), id, wanted, wait_ms };
        let decision = self.pool.request(request, Millis(self.now));
        self.take(&decision);
        self.answer(id)
    }

    fn answer(&self, id: u64) -> Option<Outcome> {
        self.answers.iter().find(|(of, _)| *of == id).map(|(_, outcome)| *outcome)
    }

    fn of(&self, uid: &str) -> PodReport {
        self.pool.report().pods.into_iter().find(|pod| &*pod.uid == uid).unwrap()
    }

    fn granted(&self, uid: &str) -> u64 {
        self.of(uid).granted
    }
}

#[allow(clippy::unnecessary_wraps)] // compared with answers that may not have come yet
fn refused(refusal: Refusal) -> Option<Outcome> {
    Some(Outcome::Refused(refusal))
}

#[allow(clippy::unnecessary_wraps)] // as above
fn granted(granted: u64) -> Option<Outcome> {
    Some(Outcome::Granted { granted })
}

#[test]
fn the_ballast_is_taken_in_steps_and_what_is_free_is_read_in_between() {
    let mut bench = Bench::new(Settings { reserve_step: 8 * GI, ..settings() });
    bench.obeys = false;
    let first = bench.sample();
    assert_eq!(first.command, Some(Command::Reserve { bytes: 8 * GI, keep_free: 0 }));
    assert!(first.sample_soon);
    assert_eq!(bench.sample().command, None, "one at a time");
    bench.ballast = 8 * GI;
    bench.now += 1;
    let replied = bench.pool.replied(Reply { done: 8 * GI, complete: true }, Millis(bench.now));
    assert_eq!((replied.command, replied.sample_soon), (None, true));
    assert!(bench.sample().command.is_some());
    assert_eq!(Bench::full(settings()).ballast, 60 * GI);
}

#[test]
fn the_margin_and_what_policy_sets_aside_are_never_held_back() {
    let mut bench = Bench::new(Settings { margin: GI, size_percent: 75, ..settings() });
    bench.foreign = 40 * GI;
    let decision = bench.sample_with(|facts| {
        let device = facts.device.as_mut().unwrap();
        (device.driver_reserved, device.set_aside, device.free) = (3 * GI, 3 * GI, 6 * GI);
    });
    assert_eq!(decision.command, Some(Command::Reserve { bytes: 2 * GI, keep_free: 4 * GI }));
}

#[test]
fn a_refusal_of_the_driver_ends_the_attempt() {
    let mut bench = Bench::new(settings());
    bench.obeys = false;
    bench.sample();
    bench.ballast = 3 * GI;
    bench.reply(Reply { done: 3 * GI, complete: false });
    assert_eq!(bench.sample().command, None);
    bench.now += 10_000;
    assert!(bench.sample().command.is_some(), "ten seconds later it is tried again");
    bench.reply(Reply { done: 0, complete: false });
    bench.now += 10_000;
    assert_eq!(bench.sample().command, None, "and then after twenty");
    bench.hidden = 0;
    bench.ballast = GI;
    assert!(bench.sample().command.is_some(), "or when more is free");
}

#[test]
fn a_pod_without_a_guard_gets_its_limit_when_it_is_bound() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Static, GI, 16 * GI);
    bench.obeys = false;
    let decision = bench.sample();
    assert!(decision.journal, "written before anything is given out");
    assert_eq!(decision.command, Some(Command::Release { bytes: 16 * GI }));
    assert!(decision.raise.is_empty() || bench.free() >= 16 * GI);
    bench.obeys = true;
    bench.obey(Command::Release { bytes: 16 * GI });
    assert_eq!(bench.granted("a"), 16 * GI);
    assert_eq!((bench.ballast, bench.pool.report().size), (44 * GI, 60 * GI), "pool = ballast + grants");
    bench.settle();
    assert_eq!(bench.ballast, 44 * GI, "what it has not used yet is left free for it");
    bench.end("a");
    bench.settle();
    assert_eq!(bench.ballast, 60 * GI, "returned at its end");
}

#[test]
fn nothing_is_granted_before_it_is_free() {
    let mut bench = Bench::full(Settings { size_percent: 75, ..settings() });
    bench.foreign = 25 * GI;
    bench.bind("a", Kind::Elastic, 8 * GI, 8 * GI);
    bench.settle();
    bench.obeys = false;
    assert_eq!(bench.asks("a", 1, 6 * GI, 0), None);
    assert_eq!(bench.granted("a"), 0);
    assert_eq!(bench.commands.last(), Some(&Command::Release { bytes: 6 * GI }));
    bench.ballast -= 6 * GI;
    bench.reply(Reply { done: 6 * GI, complete: true });
    assert_eq!(bench.answer(1), granted(6 * GI));
}

#[test]
fn a_guarded_pod_grows_in_steps_ahead_of_its_use() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 4 * GI, 16 * GI);
    bench.settle();
    assert_eq!((bench.granted("a"), bench.ballast), (0, 60 * GI), "its guarantee stays in the ballast");
    assert_eq!(bench.asks("a", 1, 518 * MI, 0), granted(518 * MI), "the first grant is for its context");
    bench.uses("a", 518 * MI);
    bench.settle();
    assert_eq!(bench.granted("a"), GI + 518 * MI, "the next step before it asks");
    assert_eq!(bench.asks("a", 2, 7 * GI, 0), granted(7 * GI));
    bench.uses("a", 7 * GI);
    bench.settle();
    assert_eq!(bench.asks("a", 3, 9 * GI + 1, 0), granted(10 * GI), "up to the next step");
    assert_eq!(bench.asks("a", 4, 16 * GI, 0), granted(16 * GI));
    assert_eq!(bench.asks("a", 5, 16 * GI + 1, 0), refused(Refusal::OverLimit));
}

#[test]
fn a20_while_a_pod_starts_nothing_is_given_out_ahead_of_use() {
    let mut bench = Bench::full(Settings { start_hold_ms: 120_000, ..settings() });
    bench.bind("old", Kind::Elastic, 0, 30 * GI);
    bench.settle();
    bench.asks("old", 1, 10 * GI, 0);
    bench.uses("old", 2 * GI);
    bench.now += 121_000;
    bench.settle();
    let before = bench.granted("old");
    bench.bind("new", Kind::Static, 0, 8 * GI);
    bench.settle();
    assert_eq!(bench.granted("new"), 8 * GI, "a binding is due at once");
    let (free, commands) = (bench.free(), bench.commands.len());
    bench.uses("old", before - 100 * MI);
    for _ in 0..10 {
        bench.now += 11_000;
        bench.sample();
    }
    assert_eq!(bench.free() + before - 100 * MI, free + 2 * GI, "free moves by its own use alone");
    assert_eq!(bench.commands.len(), commands, "no step ahead of use, no decay");
    assert_eq!(bench.asks("old", 2, before + GI + 1, 0), granted(before + GI + 2 * MI), "no more than asked");
    bench.now += 120_000;
    bench.uses("old", before + GI);
    bench.settle();
    assert!(bench.granted("old") > before + GI + 2 * MI, "afterwards it is ahead again");
}

#[test]
fn an_idle_surplus_decays_back_into_the_ballast() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 4 * GI, 40 * GI);
    bench.settle();
    bench.asks("a", 1, 30 * GI, 0);
    bench.uses("a", 5 * GI);
    bench.settle();
    let mut last = (bench.granted("a"), bench.ballast);
    assert_eq!(last, (30 * GI, 30 * GI));
    bench.now += 5 * MINUTE;
    bench.settle();
    let part = Decay::default().left(25 * GI, 5);
    assert_eq!(bench.granted("a"), 5 * GI + part);
    for _ in 0..120 {
        bench.now += MINUTE;
        bench.settle();
        let now = (bench.granted("a"), bench.ballast);
        assert!(now.0 <= last.0 && now.1 >= last.1);
        last = now;
    }
    assert_eq!(last.0, 5 * GI, "what it uses is its own");
    assert!(last.1 > 54 * GI);
}

#[test]
fn l05_what_an_engine_leaves_when_it_exits_is_held_back_at_once() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 8 * GI, 16 * GI);
    bench.settle();
    bench.asks("a", 1, 12 * GI, 0);
    bench.uses("a", 12 * GI);
    bench.settle();
    bench.uses("a", 0);
    bench.settle();
    assert_eq!((bench.granted("a"), bench.ballast), (0, 60 * GI));
    assert_eq!(bench.asks("a", 2, 8 * GI, 0), granted(8 * GI), "its guarantee is still there");
}

#[test]
fn a13_three_guarantees_of_12_on_24_are_two_and_the_third_is_named() {
    let mut bench = Bench::full(Settings { size_percent: 24, ..settings() });
    for uid in ["a", "b", "c"] {
        bench.bind(uid, Kind::Elastic, 12 * GI, 12 * GI);
        bench.settle();
    }
    let report = bench.pool.report();
    assert_eq!(report.short, 12 * GI);
    let uncovered: Vec<_> = report.pods.iter().map(|pod| pod.uncovered).collect();
    assert_eq!(uncovered, [0, 0, 12 * GI]);
    assert_eq!(bench.asks("c", 1, GI, 0), refused(Refusal::PoolEmpty));
    assert_eq!(bench.asks("a", 2, 12 * GI, 0), granted(12 * GI));
    assert_eq!(bench.asks("b", 3, 12 * GI, 0), granted(12 * GI));
}

#[test]
fn l11_limits_may_exceed_the_pool_and_who_finds_it_empty_is_refused() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 10 * GI, 50 * GI);
    bench.bind("b", Kind::Elastic, 10 * GI, 50 * GI);
    bench.settle();
    assert_eq!(bench.pool.report().short, 0);
    assert_eq!(bench.asks("a", 1, 50 * GI, 0), granted(50 * GI));
    bench.uses("a", 50 * GI);
    bench.settle();
    assert_eq!(bench.asks("b", 2, 11 * GI, 0), refused(Refusal::PoolEmpty));
    assert_eq!(bench.asks("b", 3, 10 * GI, 0), granted(10 * GI), "the guarantee was never lent");
}

#[test]
fn l10_a_request_waits_for_memory_and_not_for_ever() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 0, 60 * GI);
    bench.bind("b", Kind::Elastic, 0, 60 * GI);
    bench.settle();
    bench.asks("a", 1, 55 * GI, 0);
    bench.uses("a", 55 * GI);
    bench.settle();
    assert_eq!(bench.asks("b", 2, 20 * GI, 5000), None);
    assert_eq!(bench.asks("b", 3, 30 * GI, 9000), None);
    assert_eq!(bench.pool.next_deadline(), Some(Millis(bench.now + 5000)));
    bench.now += 5000;
    let decision = bench.pool.tick(Millis(bench.now));
    bench.take(&decision);
    assert_eq!(bench.answer(2), refused(Refusal::TimedOut));
    assert_eq!(bench.answer(3), None);
    bench.end("a");
    bench.settle();
    assert_eq!(bench.answer(3), granted(30 * GI));
}

#[test]
fn what_never_comes_is_not_waited_for() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 0, 100 * GI);
    bench.bind("b", Kind::Elastic, 10 * GI, 20 * GI);
    bench.settle();
    assert_eq!(bench.asks("a", 1, 61 * GI, 60_000), refused(Refusal::TooLarge));
    assert_eq!(bench.asks("a", 2, 51 * GI, 60_000), None, "the other may end");
    assert_eq!(bench.asks("a", 3, 51 * GI, 0), refused(Refusal::PoolEmpty));
    bench.end("b");
    bench.settle();
    assert_eq!(bench.answer(2), granted(51 * GI));
}

#[test]
fn l12_what_is_above_a_guarantee_is_taken_back_for_one_while_it_is_idle() {
    let mut bench = Bench::full(Settings { max_percent: 60, ..settings() });
    bench.bind("a", Kind::Elastic, 0, 60 * GI);
    bench.settle();
    assert_eq!(bench.asks("a", 1, 60 * GI, 0), granted(60 * GI), "a burst up to its limit");
    bench.foreign = 100 * GI - 60 * GI;
    bench.uses("a", 20 * GI);
    bench.sample();
    bench.bind("b", Kind::Elastic, 10 * GI, 30 * GI);
    let decision = bench.sample();
    assert_eq!(bench.pool.report().short, 10 * GI, "nothing is held back for it");
    assert_eq!(decision.lower, [Grant { uid: "a".into(), granted: 50 * GI }]);
    assert_eq!(decision.command, None, "the guard of the other may just be using it");
    assert_eq!(bench.asks("b", 2, 8 * GI, 0), None, "what is owed is not refused at once");
    bench.sample();
    assert_eq!(bench.answer(2), granted(8 * GI));
    bench.settle();
    assert_eq!((bench.pool.report().short, bench.ballast), (0, 2 * GI));
}

#[test]
fn l09_a_lowered_limit_holds_for_new_memory_and_what_is_held_is_let_shrink() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 0, 20 * GI);
    bench.settle();
    bench.asks("a", 1, 16 * GI, 0);
    bench.uses("a", 16 * GI);
    bench.settle();
    bench.pod("a").limit = 10 * GI;
    bench.settle();
    assert_eq!((bench.granted("a"), bench.of("a").shrinking), (16 * GI, 6 * GI));
    assert_eq!(bench.asks("a", 2, 16 * GI + MI, 0), refused(Refusal::OverLimit));
    let page = bench.pool.page("a", 16 * GI).unwrap();
    assert_eq!((page.limit, page.free), (10 * GI, 0));
    bench.uses("a", 12 * GI);
    bench.settle();
    assert_eq!((bench.granted("a"), bench.of("a").shrinking), (12 * GI, 2 * GI));
    bench.uses("a", 4 * GI);
    bench.settle();
    assert_eq!((bench.granted("a"), bench.of("a").shrinking), (10 * GI, 0));
    assert_eq!(bench.of("a").ungranted, 0, "it took nothing that was not its own");
}

#[test]
fn a19_memory_of_nobody_subtracts_from_what_may_be_granted() {
    let mut bench = Bench::full(settings());
    bench.foreign = 20 * GI;
    bench.bind("a", Kind::Elastic, 0, 100 * GI);
    bench.settle();
    assert_eq!(bench.pool.report().size, 48 * GI);
    assert_eq!(bench.asks("a", 1, 48 * GI + 1, 0), refused(Refusal::PoolEmpty));
    assert_eq!(bench.ballast, 60 * GI, "yet nothing is let go because somebody took something");
    assert_eq!(bench.asks("a", 2, 48 * GI, 0), granted(48 * GI));
}

#[test]
fn a_thief_is_named_and_what_it_took_is_not_made_up_from_the_ballast() {
    let mut bench = Bench::full(Settings { size_percent: 75, ..settings() });
    bench.foreign = 20 * GI;
    bench.bind("victim", Kind::Static, 0, 16 * GI);
    bench.bind("thief", Kind::Static, 0, 4 * GI);
    bench.settle();
    assert_eq!(bench.of("thief").overshoot, bench.free() - 4 * GI);
    let (loose, ballast) = (bench.free() - 20 * GI, bench.ballast);
    bench.uses("thief", 4 * GI + loose + 6 * GI);
    let decision = bench.sample();
    assert_eq!(decision.command, None);
    assert_eq!(bench.of("thief").ungranted, loose + 6 * GI, "within one sample");
    assert_eq!((bench.granted("victim"), bench.of("victim").taken), (10 * GI, 6 * GI));
    assert_eq!(bench.free(), 10 * GI, "unused grants are free");
    for _ in 0..20 {
        bench.now += MINUTE;
        bench.settle();
    }
    assert_eq!(bench.ballast, ballast, "whatever time passes");
    assert!(bench.pool.report().short == 0, "what is owed is in the ballast");
    bench.uses("thief", 4 * GI);
    bench.settle();
    assert_eq!((bench.granted("victim"), bench.of("victim").taken), (16 * GI, 0), "re-granted as it returns");
}

#[test]
fn what_no_list_shows_is_contained_and_made_up_once_it_is_calm() {
    let mut bench = Bench::full(Settings { size_percent: 75, ..settings() });
    bench.bind("victim", Kind::Static, 0, 16 * GI);
    bench.settle();
    let ballast = bench.ballast;
    bench.hidden = bench.free() - 10 * GI;
    bench.settle();
    assert_eq!((bench.granted("victim"), bench.ballast), (10 * GI, ballast));
    // It takes whatever becomes free, and gets no more than was free at first.
    for _ in 0..50 {
        bench.hidden += (bench.free() - 2 * GI).min(100 * MI);
        bench.now += 10_000;
        bench.settle();
        assert_eq!(bench.ballast, ballast);
    }
    bench.now += 30_000;
    bench.settle();
    assert_eq!(bench.granted("victim"), 16 * GI, "nobody has taken anything for a while");
    assert!(bench.ballast < ballast);
}

#[test]
fn what_was_made_up_and_is_taken_again_is_not_made_up_soon() {
    let mut bench = Bench::full(Settings { size_percent: 75, ..settings() });
    bench.bind("victim", Kind::Static, 0, 16 * GI);
    bench.settle();
    bench.hidden = bench.free();
    bench.settle();
    let (hidden, ballast) = (bench.hidden, bench.ballast);
    // It waits for each calm, and takes what that brings.
    for _ in 0..20 {
        bench.now += 10_000;
        bench.settle();
        bench.hidden += bench.free();
        bench.settle();
    }
    assert_eq!(bench.ballast, ballast - 16 * GI, "once, and not every 30 seconds");
    for _ in 0..60 * 24 {
        bench.now += MINUTE;
        bench.settle();
        bench.hidden += bench.free();
        bench.settle();
    }
    assert_eq!(bench.ballast, ballast - 32 * GI, "twice, a day later");
    bench.hidden = hidden - 16 * GI;
    bench.settle();
    assert_eq!(bench.of("victim").taken, 0, "re-granted as it returns");
    assert_eq!(bench.granted("victim"), 16 * GI);
    // All is as it was before.
    bench.hidden += bench.free();
    bench.settle();
    let ballast = bench.ballast;
    bench.now += 30_000;
    bench.settle();
    assert_eq!((bench.granted("victim"), bench.ballast), (16 * GI, ballast - 16 * GI));
}

#[test]
fn a_guard_that_asks_within_its_guarantee_is_served_beside_a_thief() {
    let mut bench = Bench::full(Settings { size_percent: 75, ..settings() });
    bench.bind("a", Kind::Elastic, 16 * GI, 16 * GI);
    bench.settle();
    bench.asks("a", 1, 8 * GI, 0);
    bench.hidden = bench.free();
    bench.settle();
    assert_eq!(bench.granted("a"), 0);
    assert_eq!(bench.asks("a", 2, 8 * GI, 0), granted(8 * GI));
}

#[test]
fn r02_a_frozen_device_grants_nothing_above_guarantees() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 4 * GI, 16 * GI);
    bench.pressure.freeze = true;
    bench.settle();
    assert_eq!(bench.asks("a", 1, 5 * GI, 0), refused(Refusal::Frozen));
    assert_eq!(bench.asks("a", 2, 5 * GI, 9000), None, "it may wait");
    assert_eq!(bench.asks("a", 3, 4 * GI, 0), granted(4 * GI));
    assert_eq!(bench.pool.page("a", 0).unwrap().free, 4 * GI);
    bench.pressure.freeze = false;
    bench.settle();
    assert_eq!(bench.answer(2), granted(5 * GI));
}

#[test]
fn r02_reclaiming_takes_all_that_is_idle_above_guarantees() {
    let mut bench = Bench::full(Settings { size_percent: 100, max_percent: 100, ..settings() });
    bench.bind("a", Kind::Elastic, 4 * GI, 40 * GI);
    bench.settle();
    bench.asks("a", 1, 30 * GI, 0);
    bench.uses("a", 6 * GI);
    bench.settle();
    bench.pressure.reclaim = true;
    let decision = bench.sample();
    assert_eq!(decision.lower, [Grant { uid: "a".into(), granted: 6 * GI }]);
    assert_eq!(decision.command, None, "not before it is seen what the guard did in between");
    bench.settle();
    assert_eq!(bench.ballast, 94 * GI);
}

#[test]
fn a_keeper_that_does_not_answer_is_asked_for_nothing_and_covers_nothing() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 4 * GI, 50 * GI);
    let decision = bench.sample_with(|facts| facts.ballast = None);
    assert_eq!(decision.command, None);
    assert_eq!((bench.pool.report().ballast, bench.pool.report().short), (None, 4 * GI));
    assert_eq!(bench.asks("a", 1, 4 * GI, 0), granted(4 * GI), "of what is free anyway");
}

#[test]
fn a_keeper_that_dies_takes_no_grant_with_it() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Static, 0, 10 * GI);
    bench.bind("b", Kind::Elastic, 8 * GI, 20 * GI);
    bench.settle();
    bench.asks("b", 1, 12 * GI, 0);
    bench.ballast = 0;
    bench.sample();
    assert_eq!((bench.granted("a"), bench.granted("b")), (10 * GI, 12 * GI));
    bench.settle();
    assert_eq!(bench.ballast, 38 * GI, "what is free is taken back, and what is granted left free");
}

#[test]
fn a_keeper_that_is_slow_costs_a_request_two_seconds_at_most() {
    let mut bench = Bench::new(Settings { size_percent: 100, max_percent: 100, ..settings() });
    bench.bind("a", Kind::Elastic, 0, 20 * GI);
    bench.settle();
    bench.obeys = false;
    assert_eq!(bench.asks("a", 1, 6 * GI, 0), None);
    bench.now += 2000;
    let decision = bench.pool.tick(Millis(bench.now));
    bench.take(&decision);
    assert_eq!(bench.answer(1), refused(Refusal::KeeperSlow));
    assert!(decision.journal);
    assert_eq!(bench.of("a").entitled, 0);
    bench.ballast -= 6 * GI;
    bench.reply(Reply { done: 6 * GI, complete: true });
    bench.obeys = true;
    bench.settle();
    assert_eq!((bench.granted("a"), bench.free()), (0, 0), "what came too late is held back again");
}

#[test]
fn a_keeper_that_fails_is_not_asked_again_at_once() {
    let mut bench = Bench::full(Settings { size_percent: 75, ..settings() });
    bench.foreign = 25 * GI;
    bench.bind("a", Kind::Elastic, 0, 20 * GI);
    bench.settle();
    bench.obeys = false;
    bench.asks("a", 1, 6 * GI, 10_000);
    let commands = bench.commands.len();
    bench.reply(Reply { done: 0, complete: false });
    assert_eq!(bench.commands.len(), commands);
    let again = bench.pool.next_deadline().unwrap();
    assert_eq!(again, Millis(bench.now + 100));
    bench.now = again.0;
    let decision = bench.pool.tick(again);
    assert_eq!(decision.command, Some(Command::Release { bytes: 6 * GI }));
}

#[test]
fn a_keeper_that_fails_to_hold_back_is_asked_again_soon() {
    let mut bench = Bench::new(settings());
    bench.obeys = false;
    assert!(matches!(bench.sample().command, Some(Command::Reserve { .. })));
    bench.now += 1;
    bench.pool.failed(Millis(bench.now));
    assert_eq!(bench.sample().command, None);
    bench.now += RELEASE_PAUSE;
    assert!(matches!(bench.sample().command, Some(Command::Reserve { .. })));
}

#[test]
fn a_command_that_was_under_way_before_is_waited_for() {
    let mut bench = Bench::new(settings());
    bench.pool = bench.pool.clone().awaiting(Some(Command::Release { bytes: GI }));
    assert_eq!(bench.sample().command, None);
    bench.now += 1;
    bench.pool.replied(Reply { done: GI, complete: true }, Millis(bench.now));
    assert!(matches!(bench.sample().command, Some(Command::Reserve { .. })));
}

#[test]
fn samples_that_are_torn_or_older_than_the_last_reply_move_nothing() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Static, 0, 16 * GI);
    bench.settle();
    let report = bench.pool.report();
    for change in [
        (|facts: &mut Facts<'_>| facts.at = Millis(0)) as fn(&mut Facts<'_>),
        |facts| facts.torn = true,
        |facts| facts.device = None,
    ] {
        let decision = bench.sample_with(|facts| {
            if let Some(device) = &mut facts.device {
                device.free = GI;
            }
            change(facts);
        });
        assert_eq!(decision, Decision::default());
        assert_eq!(bench.pool.report(), report);
    }
}

#[test]
fn what_pods_held_before_there_was_a_pool_is_their_own_up_to_their_limit() {
    let mut bench = Bench::new(settings());
    bench.bind("a", Kind::Elastic, 0, 20 * GI);
    bench.bind("b", Kind::Static, 0, 20 * GI);
    bench.uses("a", 30 * GI);
    bench.uses("b", 5 * GI);
    let decision = bench.sample();
    assert!(decision.journal);
    assert_eq!((bench.granted("a"), bench.of("a").ungranted), (20 * GI, 10 * GI));
    bench.settle();
    assert_eq!(bench.granted("b"), 20 * GI);
}

#[test]
fn a_request_before_the_first_sample_waits_for_it() {
    let mut bench = Bench::new(settings());
    bench.bind("a", Kind::Elastic, 0, 20 * GI);
    assert_eq!(bench.asks("a", 1, GI, 0), None);
    assert_eq!(bench.asks("nobody", 2, GI, 0), None);
    bench.sample();
    assert_eq!(bench.answer(1), granted(GI));
    bench.now += 2000;
    bench.sample();
    assert_eq!(bench.answer(2), refused(Refusal::UnknownPod));
}

#[test]
fn an_answer_that_nobody_waits_for_is_not_worked_for() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 0, 60 * GI);
    bench.bind("b", Kind::Elastic, 0, 60 * GI);
    bench.settle();
    bench.asks("a", 1, 60 * GI, 0);
    bench.uses("a", 60 * GI);
    bench.settle();
    bench.asks("b", 2, 30 * GI, 60_000);
    bench.asks("b", 3, GI, 60_000);
    bench.uses("a", 58 * GI);
    bench.settle();
    assert_eq!(bench.answer(3), None, "it does not pass the one before it");
    let decision = bench.pool.withdraw(2, Millis(bench.now));
    bench.take(&decision);
    bench.pressure.reclaim = true;
    bench.settle();
    assert_eq!(bench.answer(3), granted(GI));
    assert_eq!(bench.answer(2), None);
}

#[test]
fn after_a_crash_the_grants_are_those_of_the_journal() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, 4 * GI, 20 * GI);
    bench.bind("b", Kind::Static, 0, 10 * GI);
    bench.bind("gone", Kind::Elastic, 0, 20 * GI);
    bench.settle();
    bench.asks("a", 1, 8 * GI, 0);
    bench.asks("gone", 2, 8 * GI, 0);
    // Written down, and nothing of it given out.
    let entry = bench.pool.entry("GPU-1");
    bench.ballast = 60 * GI;
    bench.end("gone");
    bench.pool = DevicePool::restore(settings(), &entry, Millis(bench.now));
    assert_eq!(bench.pool.entry("GPU-1"), entry);
    bench.sample();
    assert_eq!((bench.granted("a"), bench.granted("b")), (8 * GI, 10 * GI));
    bench.settle();
    assert_eq!(bench.ballast, 42 * GI, "given out once");
    assert_eq!(bench.pool.entry("GPU-1").grants.len(), 2, "the pod that is gone is dropped");
}

#[test]
fn r01_a_pool_in_demand_grows_to_its_cap_and_an_idle_one_shrinks() {
    let rule = adaptive::Rule::default();
    let mut bench = Bench::full(Settings { adaptive: Some(rule), ..settings() });
    bench.bind("a", Kind::Elastic, 0, 100 * GI);
    bench.settle();
    let mut id = 0;
    let mut sizes = Vec::new();
    for _ in 0..4 {
        for _ in 0..100 {
            id += 1;
            let size = bench.pool.report().size;
            bench.asks("a", id, size, 0);
            bench.uses("a", bench.granted("a"));
        }
        bench.settle();
        sizes.push(bench.pool.report().size / GI);
    }
    assert_eq!(sizes, [66, 72, 75, 75]);
    bench.end("a");
    for _ in 0..20 {
        bench.now += 10 * MINUTE;
        bench.settle();
    }
    assert_eq!(bench.pool.report().size, 30 * GI, "not below half of what it began with");
    assert_eq!(bench.ballast, 30 * GI);
    let entry = bench.pool.entry("GPU-1");
    let again = DevicePool::restore(bench.pool.settings().clone(), &entry, Millis(0));
    assert_eq!(again.entry("GPU-1").share, 300_000, "kept over a crash");
}

#[test]
fn a_smaller_pool_by_policy_gives_its_ballast_up() {
    let mut bench = Bench::full(settings());
    bench.pool.set_settings(Settings { size_percent: 30, ..settings() });
    bench.settle();
    assert_eq!(bench.ballast, 30 * GI);
}

#[test]
fn bad_numbers_are_survived() {
    let mut bench = Bench::full(settings());
    bench.bind("a", Kind::Elastic, u64::MAX, u64::MAX);
    bench.bind("b", Kind::Static, u64::MAX, u64::MAX);
    bench.pod("a").charged = Some(u64::MAX);
    bench.settle();
    assert!(bench.pool.report().pods.iter().all(|pod| pod.granted <= 60 * GI));
    assert_eq!(bench.asks("a", u64::MAX, u64::MAX, u64::MAX), refused(Refusal::TooLarge));
    let page = bench.pool.page("a", u64::MAX).unwrap();
    assert_eq!(page.free, 0);
}
