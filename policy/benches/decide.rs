//! How long a decision takes: the plan of acts over the state of 10,000 devices, and redirection
//! away from one of 5,000 nodes.
//!
//! One line a figure, with its goal and `ok` or `short`; the last line sums up. The exit status
//! is 0 only where every goal is reached. Goals are for the processor's time of the thread: what a
//! decision costs. The time by the wall stands beside it; on a busy machine it has the time in which
//! the thread did not run as well.

#![allow(clippy::unwrap_used, clippy::expect_used)] // made-up input that is known to be right

use std::{
    hint::black_box,
    process::ExitCode,
    time::{Duration, Instant},
};

use highwater_crds::{
    Breaker, BreakerPreset, BreakerScope, ByteSize, CpuIdleBand, HeadroomBand, HostMemoryBand, HostStatus,
    Level, Partition, WhenNobodyIsOver,
};
use highwater_policy::{
    acts::{self, Situation, Tenant},
    breaker::{self, Reading, State},
    ledger::Share,
    park,
    pod::{Hook, HookPreset, PodFacts},
    redirect::{self, Decision, Demand, Target},
    time::Millis,
};
use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};

const DEVICES: usize = 10_000;
const PODS_A_DEVICE: usize = 8;
/// One device of so many is above a mark.
const SICK_ONE_OF: usize = 20;
const NODES: usize = 5_000;
const DEVICES_A_NODE: usize = 8;
/// What must leave the node.
const DEMANDS: usize = 8;
const RUNS: usize = 300;

fn main() -> ExitCode {
    let mut short = 0;
    let mut figure = |what: &str, times: Vec<Took>, goal: Duration| {
        let (mut busy, mut wall): (Vec<_>, Vec<_>) = times.iter().map(|took| (took.busy, took.wall)).unzip();
        busy.sort_unstable();
        wall.sort_unstable();
        let at = |times: &[Duration], percent: usize| {
            times.get(times.len() * percent / 100).copied().unwrap_or_default()
        };
        let milliseconds = |d: Duration| format!("{:.3} ms", d.as_secs_f64() * 1000.0);
        let reached = at(&busy, 99) <= goal;
        println!(
            "{what}: p50 {}, p99 {} (goal {}) {}; by the wall p50 {}, p99 {}",
            milliseconds(at(&busy, 50)),
            milliseconds(at(&busy, 99)),
            milliseconds(goal),
            if reached { "ok" } else { "short" },
            milliseconds(at(&wall, 50)),
            milliseconds(at(&wall, 99)),
        );
        short += usize::from(!reached);
    };
    figure("one decision over 10000 devices, 500 above a mark", plans(), Duration::from_millis(1));
    for (what, band) in [
        ("redirection among 5000 nodes, one of 8 below 60 %", Some(8)),
        ("redirection among 5000 nodes, none below 60 %", None),
    ] {
        figure(what, redirections(band), Duration::from_millis(12));
    }
    println!(
        "bench-decide: {}",
        if short == 0 { "every goal is reached".to_owned() } else { format!("{short} short") }
    );
    if short == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What one run took.
struct Took {
    /// Of the processor's time.
    busy: Duration,
    /// By the wall.
    wall: Duration,
}

fn measure(mut run: impl FnMut()) -> Vec<Took> {
    (0..RUNS)
        .map(|_| {
            let (busy, begin) = (busy(), Instant::now());
            run();
            let wall = begin.elapsed();
            Took { busy: self::busy().saturating_sub(busy), wall }
        })
        .collect()
}

/// How long this thread has run on a processor.
fn busy() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime))
        .expect("no thread has run for less than nothing")
}

fn plans() -> Vec<Took> {
    let preset = Breaker {
        scope: BreakerScope::Device,
        preset: Some(BreakerPreset::WarnBreakEmergency),
        rise: None,
        minimum_stay_milliseconds: 2000,
        warning: None,
        critical: None,
        emergency: None,
        when_nobody_is_over: WhenNobodyIsOver::LowestPriority,
    };
    let rule = breaker::filled(&preset);
    let pods: Vec<PodFacts> = (0..PODS_A_DEVICE).map(pod).collect();
    let tenants: Vec<Tenant<'_>> = pods.iter().enumerate().map(|(i, pod)| tenant(pod, i)).collect();
    let levels = [Level::Warning, Level::Critical, Level::Emergency];
    let states: Vec<(State, Reading)> = (0..DEVICES)
        .map(|i| {
            let sick = i.is_multiple_of(SICK_ONE_OF);
            let level = levels.get(i / SICK_ONE_OF % 3).copied().filter(|_| sick).unwrap_or_default();
            let used = if sick { 139 * ByteSize::GI } else { 60 * ByteSize::GI };
            let share = Some(Share { used, of: 140 * ByteSize::GI });
            (State::at(level, Millis(0)), Reading { share, rate: None })
        })
        .collect();
    let actions = levels.map(|level| acts::in_force(&rule, level));
    measure(|| {
        let mut begun = 0;
        for (state, reading) in &states {
            let Some(need) = acts::need(&rule, state, *reading).filter(|need| *need > 0) else { continue };
            let in_force = levels.iter().zip(&actions).find(|(level, _)| **level == state.level);
            let plan = acts::plan(&Situation {
                scope: BreakerScope::Device,
                level: state.level,
                actions: in_force.map_or(&[][..], |(_, actions)| actions),
                need,
                tenants: &tenants,
                tried: &[],
                when_nobody_is_over: rule.when_nobody_is_over,
                now: Millis(0),
                wall: Timestamp::UNIX_EPOCH,
            });
            begun += plan.begin.len();
        }
        assert!(black_box(begun) >= DEVICES / SICK_ONE_OF);
    })
}

fn pod(i: usize) -> PodFacts {
    PodFacts {
        namespace: format!("team-{i}"),
        name: format!("server-{i}"),
        uid: format!("8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d{i:02}"),
        priority: i32::try_from(i % 3).unwrap(),
        signal_volume: i.is_multiple_of(4),
        hook: (i.is_multiple_of(2)).then_some(Hook { preset: HookPreset::VllmSleep, port: 8000 }),
        ..PodFacts::default()
    }
}

fn tenant(pod: &PodFacts, i: usize) -> Tenant<'_> {
    Tenant {
        pod,
        used: Some(17 * ByteSize::GI),
        due: Some(u64::try_from(12 + i).unwrap() * ByteSize::GI),
        idle_grant: 0,
        guarded: i.is_multiple_of(2),
        cached: Some(ByteSize::GI),
        selected: true,
        restart: Ok(()),
        park: Err(park::Refusal::NotOptedIn),
    }
}

fn redirections(below_one_of: Option<usize>) -> Vec<Took> {
    let names: Vec<String> = (0..NODES).map(|i| format!("node-{i}")).collect();
    let devices: Vec<Vec<redirect::Device<'_>>> = (0..NODES)
        .map(|i| {
            let below = below_one_of.is_some_and(|n| i.is_multiple_of(n));
            (0..DEVICES_A_NODE).map(|d| device(below && d == 0)).collect()
        })
        .collect();
    let targets: Vec<Target<'_>> = names
        .iter()
        .zip(&devices)
        .enumerate()
        .map(|(i, (name, devices))| Target {
            name,
            ready: !i.is_multiple_of(50),
            lease_age: Some(5_000),
            tainted: i.is_multiple_of(40),
            cordoned: i.is_multiple_of(30),
            slots: Some(4),
            host: Some(HostStatus {
                cpu_idle: Some(if i % 100 > 40 { CpuIdleBand::Above40 } else { CpuIdleBand::Below40 }),
                memory: Some(HostMemoryBand::Above1200M),
                oom_kills: Some(false),
            }),
            devices,
        })
        .collect();
    let demands = [Demand { bytes: 10 * ByteSize::GI, devices: 1, products: &[] }; DEMANDS];
    measure(|| {
        let decision = redirect::decide(black_box(&demands), 95, black_box(&targets));
        assert!(matches!(&decision, Decision::Targets(found) if found.len() == DEMANDS));
        let Decision::Targets(found) = decision else { return };
        // What an incident says of it is part of what it costs.
        black_box(redirect::explain_scores(&demands, 95, &targets, &found));
    })
}

fn device(below: bool) -> redirect::Device<'static> {
    redirect::Device {
        product: "NVIDIA H200",
        partition: Partition::Whole,
        memory: Some(140 * ByteSize::GI),
        band: if below { HeadroomBand::Below60 } else { HeadroomBand::Below75 },
        empty: false,
        usable: true,
        clear_percent: Some(84),
    }
}
