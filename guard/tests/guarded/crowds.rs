//! Threads, forks, many processes, and processes that die or stop anywhere.

use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::host::{Host, Program};
use crate::{CONTEXT, GIB, KIB, MIB, REFUSED};

/// The longest that the guard lets anybody wait for anything, but for memory that is to come.
const PATIENCE: Duration = Duration::from_secs(2);

fn signal(program: &Program, name: &str) {
    let process = program.pid().to_string();
    assert!(Command::new("kill").args([name, &process]).status().unwrap().success());
}

#[test]
fn a03_two_racing_allocations_one_refused() {
    let host = Host::start();
    // Contexts and one and a half times the request.
    let pod = host.pod(CONTEXT + 900 * MIB);
    let mut program = pod.ready();
    let answer = program.numbers("threads 2 600M 200");
    assert_eq!(answer[0], 0);
    assert!(answer[1..].iter().all(|granted| *granted == 1), "{answer:?}");
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn a03_two_racing_processes_one_refused() {
    let host = Host::start();
    let pod = host.pod(2 * CONTEXT + 900 * MIB);
    let mut programs = [pod.ready(), pod.ready()];
    for round in 0..100 {
        for program in &mut programs {
            program.tell("alloc a 600M");
        }
        let answers: Vec<String> = programs.iter_mut().map(Program::answer).collect();
        let granted = answers.iter().position(|answer| answer == "0").unwrap();
        assert_eq!(answers[1 - granted], REFUSED, "round {round}");
        programs[granted].succeed(&["free a"]);
    }
    assert_eq!(pod.agent.charged(), 2 * CONTEXT);
}

#[test]
fn many_threads_over_one_quota_never_exceed_it() {
    let host = Host::start();
    let pod = host.pod(CONTEXT + 300 * MIB);
    let mut program = pod.ready();
    let answer = program.numbers("threads 8 100M 100");
    assert_eq!(answer[0], 0);
    assert!(answer[1..].iter().all(|granted| *granted == 3), "{answer:?}");
    assert_eq!(pod.agent.charged(), CONTEXT);
    assert!(pod.agent.is_consistent());
}

#[test]
fn a04_what_a_killed_process_held_is_given_back_once() {
    let host = Host::start();
    let pod = host.pod(4 * GIB);
    let mut witness = pod.ready();
    witness.succeed(&["alloc a 64M"]);
    for pause in 0..20 {
        let mut victim = pod.ready();
        victim.tell("forever 4M");
        std::thread::sleep(Duration::from_millis(pause));
        victim.kill();
        pod.agent.await_charged(CONTEXT + 64 * MIB);
        assert!(pod.agent.is_consistent());
    }
    witness.succeed(&["free a"]);
    pod.agent.await_charged(CONTEXT);
}

#[test]
fn h09_a_process_that_is_stopped_delays_nobody() {
    let host = Host::start();
    let pod = host.pod(4 * GIB);
    let mut stopped = pod.ready();
    stopped.tell("forever 4M");
    let mut other = pod.ready();
    for _ in 0..20 {
        signal(&stopped, "-STOP");
        let began = Instant::now();
        other.succeed(&["alloc a 64M", "free a", "info"]);
        assert!(began.elapsed() < Duration::from_secs(1));
        signal(&stopped, "-CONT");
    }
}

#[test]
fn s11_nobody_waits_for_who_was_killed_or_stopped_though_nobody_gives_back_what_they_held() {
    let host = Host::start();
    let mut pod = host.pod(64 * GIB);
    let mut witness = pod.ready();
    let mut victims: Vec<Program> = (0..10).map(|_| pod.ready()).collect();
    for victim in &mut victims {
        victim.tell("forever 4M");
    }
    // Without an agent nothing is reaped: the last change of a victim stays half done, if it was.
    pod.agent.die();
    let mut slowest = Duration::ZERO;
    for (round, victim) in victims.iter_mut().enumerate() {
        if round % 2 == 0 {
            victim.kill();
        } else {
            signal(victim, "-STOP");
        }
        let began = Instant::now();
        witness.succeed(&["alloc a 64M", "info", "free a"]);
        slowest = slowest.max(began.elapsed());
    }
    assert!(slowest < PATIENCE, "{slowest:?}");
}

#[test]
fn s6_threads_that_allocate_free_and_ask_at_once_leave_the_charges_exact() {
    let host = Host::start();
    let limit = CONTEXT + 256 * MIB;
    let pod = host.pod(limit);
    let mut program = pod.ready();
    let (used, mut witness) = (host.memory().used, pod.program());
    program.tell("storm 8 150");
    // Who asks meanwhile never sees more than there is.
    for _ in 0..50 {
        let numbers = witness.numbers("nvml");
        let (total, free, used) = (numbers[2], numbers[3], numbers[4]);
        assert_eq!((total, free + used), (limit, limit));
        assert!(pod.agent.charged() <= limit);
    }
    // Others than a refusal, allocations, and refusals.
    let numbers: Vec<u64> = program.answer().split(' ').map(|word| word.parse().unwrap()).collect();
    assert_eq!(numbers[0], 0, "{numbers:?}");
    assert!(numbers[1] > 300 && numbers[2] > 0, "{numbers:?}");
    program.succeed(&["stream", "sync"]);
    assert_eq!((host.memory().used, pod.agent.charged()), (used, CONTEXT));
    assert!(pod.agent.is_consistent());
}

#[test]
fn h15_a_forked_child_begins_anew() {
    let host = Host::start();
    let pod = host.pod(8 * GIB);
    // Before the driver is opened: the child uses it, and has a slot of its own.
    let mut program = pod.program();
    assert_eq!(program.ask("nvml").split(' ').next(), Some("0"));
    assert_eq!(
        program.ask("fork init; retain; alloc a 1G; info"),
        format!("0, 0, 0, 0 {} {}", 7 * GIB - CONTEXT, 8 * GIB)
    );
    pod.agent.await_charged(0);
    assert!(pod.agent.heard().hellos >= 2);
    // After: the driver refuses the child, and what the parent holds stays the parent's.
    program.start();
    program.succeed(&["alloc a 1G"]);
    let answer = program.ask("fork init; alloc b 1G; free a");
    assert!(!answer.split(", ").any(|code| code == "0"), "{answer}");
    assert_eq!(pod.agent.charged(), CONTEXT + GIB);
    program.succeed(&["free a", "alloc b 2G"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 2 * GIB);
}

#[test]
fn a_fork_amid_the_work_of_other_threads_leaves_the_child_free() {
    let host = Host::start();
    let pod = host.pod(8 * GIB);
    let mut program = pod.ready();
    for _ in 0..20 {
        // Nothing is held in the child that it would wait for.
        program.succeed(&["alloc a 16M"]);
        let began = Instant::now();
        program.ask("fork info; alloc b 16M");
        assert!(began.elapsed() < Duration::from_secs(5));
        program.succeed(&["free a"]);
    }
    assert_eq!(pod.agent.charged(), CONTEXT);
}

/// Does something with programs, and ends them where it takes longer than this: whoever waits for
/// their answers learns that they have died.
fn within<T>(limit: Duration, programs: &mut [Program], work: impl FnOnce(&mut [Program]) -> T) -> T {
    let processes: Vec<String> = programs.iter().map(|program| program.pid().to_string()).collect();
    let (done, waits) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if waits.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let _some_are_gone = Command::new("kill").arg("-KILL").args(&processes).status();
            }
        });
        // Dropped here, or on the way out of a failed assertion.
        let _done = done;
        work(programs)
    })
}

#[test]
fn h11_three_hundred_processes_at_once_start_and_share_the_quota_and_nobody_waits_for_ever() {
    const PROCESSES: usize = 300;
    const EACH: u64 = 64 * MIB;
    let all = PROCESSES as u64 * EACH;
    let host = Host::start();
    let pod = host.pod(all);
    let mut programs: Vec<Program> = (0..PROCESSES).map(|_| pod.program()).collect();
    // How long it takes is measured elsewhere, against programs without the guard.
    within(Duration::from_mins(2), &mut programs, |programs| {
        for order in ["init", "create a 64M"] {
            for program in programs.iter_mut() {
                program.tell(order);
            }
            for program in programs.iter_mut() {
                assert_eq!(program.answer(), "0", "{order}");
            }
        }
        assert_eq!(pod.agent.charged(), all);
        assert!(pod.agent.is_consistent());
        // Each is known, and none has given the agent up and taken memory past it.
        assert_eq!(pod.agent.heard().hellos, PROCESSES);
        for program in programs.iter_mut() {
            assert_eq!(program.ask("create b 2M"), REFUSED);
        }
    });
    drop(programs);
    pod.agent.await_charged(0);
    assert!(pod.agent.is_consistent());
}

#[test]
fn a_free_costs_the_same_however_much_is_held() {
    let host = Host::start();
    let pod = host.pod(64 * GIB);
    let mut command = pod.volume.command("handle");
    // A driver that does nothing, so that what is measured is the guard.
    command.env("GPUSIM_NULL", "1");
    let mut program = Program::from(command);
    program.start();
    let numbers = program.numbers("many 100000 4096");
    assert_eq!(numbers[0], 100_000);
    // By how much is measured elsewhere: a list that is walked would be a hundred times slower.
    assert!(numbers[2] < 20 * numbers[1].max(500), "{numbers:?}");
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn b02_b03_nothing_in_the_environment_changes_anything() {
    let host = Host::start();
    let pod = host.pod(CONTEXT + 64 * KIB * 16);
    for (name, value) in
        [("CUDA_DISABLE_CONTROL", "true"), ("CUDA_DEVICE_MEMORY_LIMIT", "100g"), ("HIGHWATER", "0")]
    {
        let mut command = pod.volume.command("handle");
        command.env(name, value).env_remove("HOME").env_remove("PATH");
        let mut program = Program::from(command);
        program.start();
        assert_eq!(program.ask("alloc a 2M"), REFUSED, "{name}");
        program.end();
        pod.agent.await_charged(0);
    }
}
