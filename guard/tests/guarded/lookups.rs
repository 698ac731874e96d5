//! However a program finds a function, it finds the guard's; and nothing that the driver lacks.

use gpusim::config::Config;
use highwater_guard_abi::wire::{STRENGTH_STOPPED, STRENGTH_UNCOVERED};

use crate::host::Host;
use crate::{CONTEXT, GIB, MIB, REFUSED};

const GUARD: &str = "libhighwater-guard.so";
const LIMIT: u64 = CONTEXT + GIB;

#[test]
fn every_way_of_looking_finds_the_guard() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    for lookup in ["handle", "default", "getproc"] {
        let mut program = pod.volume.program_that_looks(lookup);
        program.start();
        for name in ["cuMemAlloc_v2", "cuMemCreate", "cuMemAllocAsync", "cuMemGetInfo_v2", "cuCtxCreate_v2"] {
            assert_eq!(program.ask(&format!("where {name}")), GUARD, "{name} by {lookup}");
        }
        assert_eq!(program.ask("alloc a 2G"), REFUSED, "{lookup}");
        program.succeed(&["alloc a 512M"]);
        assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB, "{lookup}");
        program.end();
        pod.agent.await_charged(0);
    }
}

#[test]
fn the_form_of_the_threads_own_stream_is_covered_too() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.volume.program_that_looks("getproc");
    program.start();
    assert_eq!(program.ask("where cuMemAllocAsync_ptsz"), GUARD);
    assert_eq!(program.ask("where cuGraphLaunch_ptsz"), GUARD);
}

#[test]
fn what_the_guard_does_not_cover_comes_from_the_driver() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    for lookup in ["handle", "default", "getproc"] {
        let mut program = pod.volume.program_that_looks(lookup);
        program.start();
        assert_eq!(program.ask("where cuDeviceGetCount"), "libcuda.so.1", "{lookup}");
    }
}

#[test]
fn h14_nothing_is_found_that_the_driver_lacks() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    // The simulated driver has no green contexts; a real one of an older release has less still.
    for lookup in ["handle", "default", "getproc"] {
        let mut program = pod.volume.program_that_looks(lookup);
        program.start();
        assert_eq!(program.ask("where cuGreenCtxCreate"), "nowhere", "{lookup}");
    }
    // Without a driver there is nothing at all, even though the guard exports the names.
    let mut command = pod.volume.command("default");
    command.arg("without");
    let mut program = crate::host::Program::from(command);
    assert_eq!(program.ask("where cuInit"), "nowhere");
    assert_eq!(program.ask("init"), "500");
}

#[test]
fn versions_and_the_lookup_itself_are_covered() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    // The library has no versions, so any is as good as none.
    let found = program.ask("whereversion cuMemAlloc_v2 libcuda.so.1");
    assert!([GUARD, "nowhere"].contains(&found.as_str()), "{found}");
    assert_eq!(program.ask("wherelookup"), GUARD);
}

#[test]
fn the_next_one_of_a_library_before_the_guard_is_the_guard() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.volume.program_in_chain("default", true);
    program.start();
    assert_eq!(program.ask("alloc a 2G"), REFUSED);
    program.succeed(&["alloc a 512M"]);
    assert_eq!(program.ask("chaincalls"), "2");
    assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB);
    // The lookup itself as well, by whatever version.
    assert_eq!(program.ask("wherechain"), GUARD);
    // Who asks the driver's library does not mean the one before, which has the same names.
    let mut other = pod.volume.program_in_chain("handle", true);
    assert_eq!(other.ask("where cuMemAlloc_v2"), GUARD);
    assert_eq!(other.ask("wherelookup"), GUARD);
    assert_eq!(other.ask("init"), "0");
    // For whatever is not the driver's, the next one depends on who asks, guard or not.
    assert_eq!(program.ask("pid"), program.pid().to_string());
}

#[test]
fn the_next_one_of_a_library_after_the_guard_is_the_guard_as_well() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.volume.program_in_chain("default", false);
    program.start();
    assert_eq!(program.ask("alloc a 2G"), REFUSED);
    program.succeed(&["alloc a 512M"]);
    assert_eq!(program.ask("pid"), program.pid().to_string());
    // The program itself comes before the guard.
    assert_eq!(program.ask("wherenext cuMemAlloc_v2"), GUARD);
}

#[test]
fn a_driver_that_is_unloaded_and_loaded_again_is_followed() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.program();
    assert_eq!(program.ask("where cuMemAlloc_v2"), GUARD);
    program.succeed(&["reopen", "init", "retain", "alloc a 64M"]);
    assert_eq!(program.ask("alloc b 2G"), REFUSED);
}

#[test]
fn h13_with_a_driver_of_an_unknown_version_the_guard_stands_aside_and_says_so() {
    let host = Host::with(Config { cuda_version: 14_000, ..Config::default() });
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["alloc a 8G"]);
    assert_eq!(program.numbers("info")[2], host_total(&host));
    assert_eq!(pod.agent.charged(), 0);
    pod.agent.await_heard(|heard| heard.weaknesses & STRENGTH_STOPPED != 0);
}

fn host_total(host: &Host) -> u64 {
    let mut unguarded = host.unguarded();
    unguarded.start();
    unguarded.numbers("info")[2]
}

#[test]
fn tables_without_names_are_passed_through_and_counted() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let (mut program, mut unguarded) = (pod.ready(), host.unguarded());
    unguarded.start();
    let answer = program.ask("table 7");
    assert_eq!(answer, unguarded.ask("table 7"));
    if answer == "0" {
        pod.agent.await_heard(|heard| heard.weaknesses & STRENGTH_UNCOVERED != 0);
    }
}
