//! The agent comes late, goes, comes back changed, or never comes.

use std::time::{Duration, Instant};

use highwater_guard_abi::page::DeviceQuota;
use highwater_guard_abi::wire::{DeniedReason, NotGrantedReason, RefusedReason, STRENGTH_MPS};

use crate::agent::{Agent, Grants};
use crate::host::{Host, Program};
use crate::{CONTEXT, GIB, MIB, REFUSED};

const LIMIT: u64 = CONTEXT + GIB;

#[test]
fn a_grant_is_asked_for_and_used() {
    let host = Host::start();
    let pod = host.pod_with(&[DeviceQuota { granted: 0, ..host.quota(0, LIMIT) }]);
    let mut program = pod.ready();
    assert_eq!(pod.agent.heard().questions, 1);
    program.succeed(&["alloc a 512M"]);
    assert_eq!(pod.agent.heard().questions, 2);
    // Beyond the limit nobody is asked.
    assert_eq!(program.ask("alloc b 2G"), REFUSED);
    assert_eq!(pod.agent.heard().questions, 2);
}

#[test]
fn what_is_not_granted_is_refused_at_once() {
    let host = Host::start();
    let pod = host.pod_with(&[DeviceQuota { granted: CONTEXT, ..host.quota(0, LIMIT) }]);
    let mut program = pod.ready();
    pod.agent.set_grants(Grants::Refuse(NotGrantedReason::NoMemory));
    let began = Instant::now();
    assert_eq!(program.ask("alloc a 512M"), REFUSED);
    assert!(began.elapsed() < Duration::from_secs(1));
    pod.agent.await_heard(|heard| heard.refused == [(512 * MIB, RefusedReason::NotGranted)]);
    pod.agent.set_grants(Grants::UpTo(CONTEXT + 256 * MIB));
    assert_eq!(program.ask("alloc a 512M"), REFUSED);
    program.succeed(&["alloc a 256M"]);
}

#[test]
fn the_first_context_waits_for_its_grant_but_not_longer_than_two_seconds() {
    let host = Host::start();
    let pod = host.pod_with(&[DeviceQuota { granted: 0, ..host.quota(0, LIMIT) }]);
    pod.agent.set_grants(Grants::After(Duration::from_millis(500)));
    let mut program = pod.program();
    program.start();
    program.end();
    pod.agent.await_charged(0);
    pod.agent.set(&DeviceQuota { granted: 0, ..host.quota(0, LIMIT) });
    pod.agent.set_grants(Grants::Silence);
    let mut program = pod.program();
    program.succeed(&["init"]);
    let began = Instant::now();
    assert_eq!(program.ask("retain"), REFUSED);
    let waited = began.elapsed();
    assert!(waited >= Duration::from_millis(1900) && waited < Duration::from_secs(4), "{waited:?}");
}

#[test]
fn threads_that_wait_for_grants_do_not_wait_for_each_other() {
    let host = Host::start();
    let quota = DeviceQuota { granted: CONTEXT, ..host.quota(0, CONTEXT + 8 * GIB) };
    let pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    let answer = program.numbers("threads 8 1G 3");
    assert_eq!(answer, [0, 8, 8, 8]);
}

#[test]
fn without_an_agent_memory_is_to_be_had_after_a_while_and_is_charged_once_one_comes() {
    let host = Host::start();
    let volume = host.volume("pod");
    let mut program = volume.program();
    let began = Instant::now();
    program.succeed(&["init"]);
    assert!(began.elapsed() < Duration::from_secs(1));
    program.succeed(&["retain"]);
    let waited = began.elapsed();
    assert!(waited >= Duration::from_millis(1800) && waited < Duration::from_secs(5), "{waited:?}");
    // Only once.
    let began = Instant::now();
    program.succeed(&["alloc a 2G", "alloc b 64M"]);
    assert!(began.elapsed() < Duration::from_secs(1));
    let agent = Agent::start(&volume.socket(), &[host.quota(0, LIMIT)]);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(program.ask("alloc c 2M"), REFUSED);
    assert_eq!(agent.charged(), CONTEXT + 2 * GIB + 64 * MIB);
    program.succeed(&["free a", "alloc c 512M"]);
    assert_eq!(agent.charged(), CONTEXT + 64 * MIB + 512 * MIB);
}

#[test]
fn an_agent_that_is_late_is_waited_for() {
    let host = Host::start();
    let volume = host.volume("pod");
    let mut program = volume.program();
    program.succeed(&["init"]);
    program.tell("retain");
    std::thread::sleep(Duration::from_millis(500));
    let agent = Agent::start(&volume.socket(), &[host.quota(0, LIMIT)]);
    assert_eq!(program.answer(), "0");
    assert_eq!(agent.charged(), CONTEXT);
}

#[test]
fn an_agent_that_is_not_ready_yet_is_asked_again() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    pod.agent.deny(Some(DeniedReason::NotReady));
    let mut program = pod.program();
    program.succeed(&["init"]);
    program.tell("retain");
    std::thread::sleep(Duration::from_millis(300));
    pod.agent.deny(None);
    assert_eq!(program.answer(), "0");
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn b09_while_the_agent_is_away_the_last_limits_hold_and_the_next_agent_is_found() {
    let host = Host::start();
    let quota = host.quota(0, LIMIT);
    let mut pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    program.succeed(&["alloc a 256M"]);
    pod.agent.die();
    let began = Instant::now();
    program.succeed(&["alloc b 256M", "free b"]);
    assert_eq!(program.ask("alloc c 2G"), REFUSED);
    assert!(began.elapsed() < Duration::from_secs(1));
    // The next agent knows other limits; it has the usage page, so nothing is lost or doubled.
    let agent = pod.agent.successor(&[DeviceQuota { limit: 4 * GIB, granted: 4 * GIB, ..quota }]);
    std::thread::sleep(Duration::from_millis(100));
    program.succeed(&["alloc c 2G"]);
    assert_eq!(agent.charged(), CONTEXT + 2 * GIB + 256 * MIB);
    assert_eq!(program.numbers("total"), [0, 4 * GIB]);
    // It says which slot it has.
    assert!(agent.heard().slots.iter().all(|slot| *slot != 0));
}

#[test]
fn beyond_what_is_granted_the_next_agent_is_waited_for() {
    let host = Host::start();
    let quota = DeviceQuota { granted: CONTEXT + 64 * MIB, ..host.quota(0, LIMIT) };
    let mut pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    pod.agent.die();
    let began = Instant::now();
    assert_eq!(program.ask("alloc a 512M"), REFUSED);
    let waited = began.elapsed();
    assert!(waited >= Duration::from_millis(1800) && waited < Duration::from_secs(5), "{waited:?}");
    program.tell("alloc a 512M");
    std::thread::sleep(Duration::from_millis(500));
    let agent = pod.agent.successor(&[quota]);
    assert_eq!(program.answer(), "0");
    assert_eq!(agent.charged(), CONTEXT + 512 * MIB);
}

#[test]
fn whatever_threads_asked_of_an_agent_that_is_gone_the_next_one_is_asked() {
    let host = Host::start();
    // They may wait for a minute, but not as long as nobody knows of it.
    let quota = DeviceQuota { granted: CONTEXT, wait_milliseconds: 60_000, ..host.quota(0, 8 * GIB) };
    let pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    pod.agent.set_grants(Grants::Silence);
    program.tell("rising 5 16M");
    pod.agent.await_heard(|heard| heard.questions == 5);
    let began = Instant::now();
    let agent = pod.agent.upgraded(&[quota]);
    assert_eq!(program.answer(), "0 5");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(agent.charged(), CONTEXT);
}

#[test]
fn a_server_of_mps_is_told_wherever_it_is() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let directory = tempfile::tempdir().unwrap();
    for (there, flags) in [(false, 0), (true, STRENGTH_MPS)] {
        if there {
            std::fs::write(directory.path().join("control"), "").unwrap();
        }
        let mut command = pod.volume.command("handle");
        command.env("CUDA_MPS_PIPE_DIRECTORY", directory.path());
        let mut program = Program::from(command);
        program.start();
        // Whatever is heard after it was said before it.
        assert_eq!(program.ask("alloc a 8G"), REFUSED);
        pod.agent.await_heard(|heard| heard.refused.len() == 1 + usize::from(there));
        assert_eq!(pod.agent.heard().weaknesses, flags);
    }
}

#[test]
fn a_forked_child_lets_go_of_its_parents_connection() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    assert_eq!(program.ask("high"), "1");
    assert_eq!(program.ask("fork high"), "0");
    assert_eq!(program.ask("high"), "1");
    program.succeed(&["alloc a 64M"]);
    assert_eq!(pod.agent.heard().hellos, 1);
}

#[test]
fn a_program_that_closes_descriptors_that_it_does_not_know_keeps_its_quota() {
    let host = Host::start();
    let quota = DeviceQuota { granted: CONTEXT, ..host.quota(0, LIMIT) };
    let pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    program.succeed(&["highclose"]);
    // It connects again when it has something to ask, with the slot that it has.
    program.succeed(&["alloc a 512M"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB);
    assert_eq!(program.ask("alloc b 1G"), REFUSED);
    let slots = pod.agent.heard().slots;
    assert!(slots.len() == 2 && slots[0] == 0 && slots[1] != 0, "{slots:?}");
}
