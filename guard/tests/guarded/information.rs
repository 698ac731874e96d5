//! What programs are told of memory is the quota, in every way in which they can ask.

use highwater_guard_abi::page::{DeviceQuota, Managed};

use crate::host::Host;
use crate::{CONTEXT, GIB, MIB};

const LIMIT: u64 = 16 * GIB;

#[test]
fn the_quota_is_the_device_for_cuda_and_nvml_alike() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["alloc a 1G"]);
    let (used, free) = (CONTEXT + GIB, LIMIT - CONTEXT - GIB);
    assert_eq!(program.numbers("info"), [0, free, LIMIT]);
    assert_eq!(program.numbers("total"), [0, LIMIT]);
    assert_eq!(program.numbers("nvml"), [0, 0, LIMIT, free, used, LIMIT, 0, free, used]);
}

#[test]
fn free_is_what_the_pod_could_get_now() {
    let host = Host::start();
    let quota = DeviceQuota { free: 2 * GIB, ..host.quota(0, LIMIT) };
    let pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    assert_eq!(program.numbers("info"), [0, 2 * GIB, LIMIT]);
    // In the first form of NVML's answer used and free are all there is; in the second what nobody
    // can have is apart.
    let (rest, held_back) = (LIMIT - 2 * GIB, LIMIT - 2 * GIB - CONTEXT);
    let expected = [0, 0, LIMIT, 2 * GIB, rest, LIMIT, held_back, 2 * GIB, CONTEXT];
    assert_eq!(program.numbers("nvml"), expected);
    // Where the agent does not know, the device does.
    pod.agent.set(&DeviceQuota { free: u64::MAX, ..quota });
    let mut hog = host.unguarded();
    hog.start();
    hog.succeed(&["alloc a 130G"]);
    let really = hog.numbers("info")[1];
    assert!(really < LIMIT - CONTEXT);
    assert_eq!(program.numbers("info"), [0, really, LIMIT]);
}

#[test]
fn h03_null_places_are_passed_on() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    let mut unguarded = host.unguarded();
    unguarded.start();
    let (ours, theirs) = (program.numbers("infonull"), unguarded.numbers("infonull"));
    assert_eq!(ours[..2], theirs[..2]);
    assert_eq!(ours[2], LIMIT);
}

#[test]
fn h07_the_driver_says_of_a_pointer_whether_it_is_managed() {
    let host = Host::start();
    let quota = host.quota(0, LIMIT);
    let pod = host.pod_with(&[quota]);
    let (mut program, mut unguarded) = (pod.ready(), host.unguarded());
    unguarded.start();
    for managed in [Managed::Charge, Managed::Ignore] {
        pod.agent.set(&DeviceQuota { managed, ..quota });
        for (order, answer) in [("managed x 64M", "0 1"), ("alloc x 64M", "0 0"), ("alloc x 1K", "0 0")] {
            for program in [&mut program, &mut unguarded] {
                program.succeed(&[order]);
                assert_eq!(program.ask("ismanaged x"), answer, "{order}");
                program.succeed(&["free x"]);
                assert_ne!(program.ask("ismanaged x").split(' ').next(), Some("0"), "{order}");
            }
        }
    }
}

#[test]
fn nvml_alone_is_told_the_quota_too() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut other = pod.ready();
    other.succeed(&["alloc a 1G"]);
    let mut tool = pod.program();
    let numbers = tool.numbers("nvml");
    assert_eq!(numbers[2..5], [LIMIT, LIMIT - CONTEXT - GIB, CONTEXT + GIB]);
}

#[test]
fn a_device_without_a_quota_is_shown_as_it_is() {
    let mut config = gpusim::config::Config::default();
    config.devices[0].count = 2;
    let host = Host::with(config);
    let pod = host.pod_with(&[host.quota(0, LIMIT)]);
    let mut program = pod.program();
    program.succeed(&["init", "device 1", "retain", "alloc a 64G"]);
    let mut unguarded = host.unguarded();
    unguarded.succeed(&["init", "device 1", "retain"]);
    assert_eq!(program.ask("total"), unguarded.ask("total"));
    assert_eq!(program.ask("info"), unguarded.ask("info"));
    assert_eq!(pod.agent.charged(), 0);
}

#[test]
fn without_a_limit_the_device_is_shown_as_it_is() {
    let host = Host::start();
    let quota = DeviceQuota { limit: u64::MAX, granted: u64::MAX, ..host.quota(0, 0) };
    let pod = host.pod_with(&[quota]);
    let (mut program, mut unguarded) = (pod.ready(), host.unguarded());
    unguarded.start();
    program.succeed(&["alloc a 64M"]);
    assert_eq!(program.ask("info"), unguarded.ask("info"));
    assert_eq!(pod.agent.charged(), CONTEXT + 64 * MIB);
}
