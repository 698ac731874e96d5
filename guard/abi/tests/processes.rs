//! Real processes over one usage page: they race, are killed, and are stopped.
//!
//! The processes are this test binary again, run with the one test `worker`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use highwater_guard_abi::charge::{Charge, Reaped};
use highwater_guard_abi::page::UsagePage;
use rustix_bare::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

const ROLE: &str = "GUARD_ABI_WORKER";
const PAGE: &str = "GUARD_ABI_PAGE";

/// The device that the race is about.
const GPU: usize = 0;
/// Devices that count who arrived where.
const BEGIN: usize = 14;
const END: usize = 15;

const UNIT: u64 = 4096;

/// Pseudo-random numbers (xorshift).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

fn spawn(page: &OwnedFd, role: &str) -> Child {
    let path = format!("/proc/{}/fd/{}", std::process::id(), page.as_raw_fd());
    Command::new(std::env::current_exe().unwrap())
        .args(["worker", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(PAGE, path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Not a test by itself: what the processes do that the tests start.
#[test]
fn worker() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // If the test fails, nobody is left behind.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let file = File::options().read(true).write(true).open(std::env::var(PAGE).unwrap()).unwrap();
    let page = UsagePage::map(file.as_fd()).unwrap();
    let words: Vec<&str> = role.split(' ').collect();
    let number = |at: usize| words[at].parse::<usize>().unwrap();
    match words[0] {
        "race" => race(&page, number(1), number(2), number(3), words[4] == "same"),
        "churn" => churn(&page, number(1)),
        other => panic!("no role {other}"),
    }
}

/// What process `who` asks for in a round, in units.
fn wanted(round: usize, who: usize, same: bool) -> u64 {
    if same { 600 } else { Dice((round * 31 + who) as u64 * 0x9e37_79b9 + 1).roll(700) + 1 }
}

/// Waits until the count on a device is reached.
fn gather(page: &UsagePage, slot: usize, device: usize, count: u64) {
    assert_eq!(page.charge(slot, device, UNIT, u64::MAX, u64::MAX), Charge::Granted);
    let start = Instant::now();
    while page.charged(device) < count * UNIT {
        assert!(start.elapsed() < Duration::from_mins(1), "somebody did not arrive");
        std::thread::yield_now();
    }
}

fn race(page: &UsagePage, slot: usize, processes: usize, rounds: usize, same: bool) {
    let mut answers = Vec::new();
    for round in 0..rounds {
        let everybody = (processes * (round + 1)) as u64;
        let bytes = wanted(round, slot, same) * UNIT;
        gather(page, slot, BEGIN, everybody);
        let answer = page.charge(slot, GPU, bytes, LIMIT, u64::MAX);
        gather(page, slot, END, everybody);
        if answer == Charge::Granted {
            assert_eq!(page.uncharge(slot, GPU, bytes), bytes);
        }
        answers.push(match answer {
            Charge::Granted => "granted".to_owned(),
            Charge::OverLimit { charged, .. } => format!("{charged}"),
            other => panic!("{other:?}"),
        });
    }
    println!("\nanswers {}", answers.join(" "));
}

const LIMIT: u64 = 1024 * UNIT;

/// Runs a race and judges every round. Returns how many were refused in each.
fn run_race(processes: usize, rounds: usize, same: bool) -> Vec<usize> {
    let (page, fd) = UsagePage::create().unwrap();
    let kind = if same { "same" } else { "mixed" };
    let children: Vec<(usize, Child)> = (0..processes)
        .map(|_| {
            let slot = page.claim_any(1).unwrap();
            (slot, spawn(&fd, &format!("race {slot} {processes} {rounds} {kind}")))
        })
        .collect();
    let mut answers = HashMap::new();
    for (slot, mut child) in children {
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(child.wait().unwrap().success(), "{text}");
        let line = text.lines().find_map(|line| line.strip_prefix("answers ")).unwrap();
        answers.insert(slot, line.split(' ').map(str::to_owned).collect::<Vec<_>>());
    }
    // Only now: what they hold is what the slower ones still count.
    for &slot in answers.keys() {
        page.reap(slot).unwrap();
    }
    for device in [GPU, BEGIN, END] {
        assert_eq!(page.charged(device), 0);
    }
    (0..rounds)
        .map(|round| {
            let asked = |slot: usize| wanted(round, slot, same) * UNIT;
            let granted: u64 = answers
                .iter()
                .filter(|(_, answers)| answers[round] == "granted")
                .map(|(&slot, _)| asked(slot))
                .sum();
            assert!(granted <= LIMIT, "round {round}: {granted} granted");
            let mut refused = 0;
            for (&slot, answers) in &answers {
                if answers[round] != "granted" {
                    let charged: u64 = answers[round].parse().unwrap();
                    assert!(charged <= granted, "round {round}: {charged} charged, {granted} granted");
                    assert!(charged + asked(slot) > LIMIT, "round {round}: slot {slot} had room");
                    refused += 1;
                }
            }
            refused
        })
        .collect()
}

#[test]
fn a03_of_two_processes_that_want_more_than_half_one_is_refused_in_each_of_1000_rounds() {
    assert_eq!(run_race(2, 1000, true), vec![1; 1000]);
}

#[test]
fn a03_of_eight_processes_exactly_those_that_had_no_room_are_refused_in_1000_rounds() {
    let refused = run_race(8, 1000, false);
    assert!(refused.iter().any(|&count| count > 0) && refused.iter().any(|&count| count < 7));
}

/// Charges and returns without end, on two devices, under a limit that is often reached.
fn churn(page: &UsagePage, slot: usize) {
    println!("\nready");
    let mut dice = Dice((slot as u64) << 32 | u64::from(std::process::id()));
    loop {
        let (device, bytes) = (usize::from(dice.roll(2) == 0), dice.roll(200) * UNIT);
        if dice.roll(2) == 0 {
            let _ = page.charge(slot, device, bytes, LIMIT, LIMIT / 2);
        } else {
            page.uncharge(slot, device, bytes);
        }
    }
}

/// A process that churns, and its slot.
struct Churner {
    slot: usize,
    child: Child,
}

impl Churner {
    fn start(page: &UsagePage, fd: &OwnedFd) -> Self {
        let slot = page.claim_any(7).unwrap();
        Self { slot, child: spawn(fd, &format!("churn {slot}")) }
    }

    fn ready(&mut self) {
        let mut lines = BufReader::new(self.child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "ready"));
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn signal(churners: &[Churner], signal: Signal) {
    for churner in churners {
        kill_process(Pid::from_child(&churner.child), signal).unwrap();
    }
}

fn exact(page: &UsagePage, device: usize) {
    let audit = page.audit(device).expect("nobody is left");
    assert_eq!(audit.charged, audit.sum);
}

/// Each batch kills all processes but the last while these run, reaps them beside the last one,
/// then kills that too. Whatever is left is what this process charged itself.
#[test]
fn a04_after_1000_kills_at_random_points_the_charges_are_right_each_time() {
    const BATCH: usize = 5;
    const BATCHES: usize = 200;
    let (page, fd) = UsagePage::create().unwrap();
    let own = page.claim_any(1).unwrap();
    for (device, units) in [(0, 10), (1, 30)] {
        assert_eq!(page.charge(own, device, units * UNIT, u64::MAX, u64::MAX), Charge::Granted);
    }
    let mut dice = Dice(0x2545_f491_4f6c_dd1d);
    let mut amid = 0;
    for batch in 0..BATCHES {
        let mut churners: Vec<_> = (0..BATCH).map(|_| Churner::start(&page, &fd)).collect();
        churners.iter_mut().for_each(Churner::ready);
        std::thread::sleep(Duration::from_micros(dice.roll(1500)));
        let mut last = churners.pop().unwrap();
        for churner in &mut churners {
            churner.kill();
        }
        for churner in &churners {
            page.reap(churner.slot).unwrap();
            assert!((0..2).all(|device| page.held(churner.slot, device) == 0));
        }
        last.kill();
        // None means that it died amid a change, which is what this test is about.
        amid += usize::from(page.audit(0).is_none());
        page.reap(last.slot).unwrap();
        for (device, units) in [(0, 10), (1, 30)] {
            exact(&page, device);
            assert_eq!(page.charged(device), units * UNIT, "batch {batch}");
        }
    }
    assert!(amid > BATCHES / 20, "only {amid} of {BATCHES} died amid a change");
}

#[test]
fn h09_a_process_stopped_anywhere_delays_nobody() {
    let (page, fd) = UsagePage::create().unwrap();
    let own = page.claim_any(1).unwrap();
    let mut churners: Vec<_> = (0..4).map(|_| Churner::start(&page, &fd)).collect();
    churners.iter_mut().for_each(Churner::ready);
    let mut dice = Dice(0x1234_5678_9abc_def1);
    let mut slowest = Duration::ZERO;
    for _ in 0..200 {
        std::thread::sleep(Duration::from_micros(dice.roll(500)));
        signal(&churners, Signal::STOP);
        let start = Instant::now();
        for device in 0..2 {
            assert_eq!(page.charge(own, device, UNIT, u64::MAX, u64::MAX), Charge::Granted);
            assert_eq!(page.uncharge(own, device, UNIT), UNIT);
        }
        slowest = slowest.max(start.elapsed());
        signal(&churners, Signal::CONT);
    }
    // Four changes take about a microsecond; the rest is what the machine gives to others.
    assert!(slowest < Duration::from_millis(250), "{slowest:?}");
    for mut churner in churners {
        churner.kill();
        page.reap(churner.slot).unwrap();
    }
    for device in 0..2 {
        exact(&page, device);
        assert_eq!(page.charged(device), 0);
    }
}

#[test]
fn h10_a_killed_process_is_reaped_while_others_stand_still() {
    let (page, fd) = UsagePage::create().unwrap();
    let mut churners: Vec<_> = (0..3).map(|_| Churner::start(&page, &fd)).collect();
    churners.iter_mut().for_each(Churner::ready);
    signal(&churners, Signal::STOP);
    let mut killed = churners.pop().unwrap();
    killed.kill();
    let start = Instant::now();
    page.reap(killed.slot).unwrap();
    assert_eq!(page.reap(killed.slot), Ok(Reaped::default()));
    assert!(start.elapsed() < Duration::from_millis(250), "{:?}", start.elapsed());
    for mut churner in churners {
        churner.kill();
        page.reap(churner.slot).unwrap();
    }
    assert!((0..2).all(|device| page.charged(device) == 0));
}
