//! Every family of allocations is charged, refused with the driver's own code, and given back.

use std::time::{Duration, Instant};

use gpusim::config::{Config, DeviceConfig};
use highwater_guard_abi::page::{DeviceQuota, Managed};
use highwater_guard_abi::wire::RefusedReason;

use crate::host::{Host, Pod, Program};
use crate::{CONTEXT, GIB, MIB, REFUSED};

/// A quota that holds a context and a gibibyte.
const LIMIT: u64 = CONTEXT + GIB;

#[test]
fn h08_s4_what_exceeds_the_quota_is_refused_with_out_of_memory_by_whatever_call() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["stream", "pool p", "graph g"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
    for order in [
        "alloc x 1025M",
        "pitch x 64K 17K",
        "managed x 1025M",
        "create x 1026M",
        "async x 1025M",
        "frompool x p 1025M",
        "array x 8192 8200",
        "mipmap x 8192 8192",
        "context x",
        "context y",
    ] {
        let expected = if order == "context x" { "0" } else { REFUSED };
        assert_eq!(program.ask(order), expected, "{order}");
    }
    program.succeed(&["endcontext x", "retain", "node g n 1025M"]);
    assert_eq!(program.ask("instantiate x g"), REFUSED);
    assert_eq!(pod.agent.charged(), CONTEXT);
    assert_eq!(host.memory().used, program_alone(&host));
    assert!(pod.agent.heard().refused.iter().all(|(_, reason)| *reason == RefusedReason::OverLimit));
    assert!(pod.agent.is_consistent());
}

/// What a process uses that has a context and nothing else.
fn program_alone(host: &Host) -> u64 {
    let other = Host::start();
    let mut program = other.unguarded();
    program.start();
    let used = other.memory().used;
    assert!(host.memory().total == other.memory().total);
    used
}

#[test]
fn what_is_freed_is_given_back() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    for _ in 0..3 {
        program.succeed(&["alloc a 512M", "pitch p 1000 100K", "managed m 256M", "array r 4096 1024"]);
        // 100,000 rows of 1,024 bytes, and an array of 64 MiB.
        let rows = (100 * 1024 * 1024_u64).next_multiple_of(2 * MIB);
        assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB + rows + 256 * MIB + 64 * MIB);
        assert_eq!(program.ask("alloc b 512M"), REFUSED);
        program.succeed(&["free a", "free p", "free m", "endarray r"]);
        assert_eq!(pod.agent.charged(), CONTEXT);
    }
    program.succeed(&["leave"]);
    assert_eq!(pod.agent.charged(), 0);
}

#[test]
fn small_allocations_are_charged_by_the_blocks_that_they_share() {
    let host = Host::start();
    let pod = host.pod(CONTEXT + 4 * MIB);
    let mut program = pod.ready();
    let alone = program_alone(&host);
    let agree = || assert_eq!(host.memory().used - alone, pod.agent.charged() - CONTEXT);
    program.succeed(&["alloc a 1"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 2 * MIB);
    program.succeed(&["alloc b 1M", "alloc c 500K"]);
    agree();
    assert_eq!(pod.agent.charged(), CONTEXT + 2 * MIB);
    program.succeed(&["alloc d 1500K"]);
    agree();
    assert_eq!(pod.agent.charged(), CONTEXT + 4 * MIB);
    // Within the blocks there is room for a little more, but not for another block.
    program.succeed(&["alloc e 64K"]);
    assert_eq!(program.ask("alloc f 1M"), REFUSED);
    assert_eq!(program.ask("alloc f 2M"), REFUSED);
    program.succeed(&["free d"]);
    agree();
    program.succeed(&["free a", "free b", "free c", "free e"]);
    agree();
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn small_allocations_of_all_sizes_are_charged_as_the_driver_takes_them() {
    let host = Host::start();
    let pod = host.pod(CONTEXT + GIB);
    let mut program = pod.ready();
    let alone = program_alone(&host);
    let mut random = 1_u64;
    for index in 0..300_u32 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        program.succeed(&[&format!("alloc a{index} {}", (random >> 43) + 1)]);
        if index >= 40 && index % 3 != 0 {
            program.succeed(&[&format!("free a{}", index - 40)]);
        }
        assert_eq!(host.memory().used - alone, pod.agent.charged() - CONTEXT);
    }
    program.succeed(&["reset"]);
    assert_eq!(pod.agent.charged(), 0);
    program.succeed(&["retain", "alloc a 1"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 2 * MIB);
}

#[test]
fn a_failing_driver_leaves_nothing_charged() {
    let host = Host::start();
    // More than the device has.
    let pod = host.pod(1000 * GIB);
    let mut program = pod.ready();
    program.succeed(&["stream"]);
    for order in ["alloc x 500G", "pitch x 1M 500K", "create x 500G", "async x 500G", "allocnull 4096"] {
        assert_ne!(program.ask(order), "0", "{order}");
    }
    assert_eq!(program.ask("alloc x 0"), "1");
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn s5_a_pointer_that_the_guard_does_not_know_is_the_drivers_matter() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    let mut unguarded = host.unguarded();
    unguarded.start();
    program.succeed(&["name nonsense 4096"]);
    unguarded.succeed(&["name nonsense 4096"]);
    for order in ["free nonsense", "asyncfree nonsense", "release nonsense", "ipcclose nonsense"] {
        assert_eq!(program.ask(order), unguarded.ask(order), "{order}");
    }
    // Twice is one time too many, and changes nothing.
    program.succeed(&["alloc a 64M", "free a"]);
    assert_ne!(program.ask("free a"), "0");
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn s1_memory_stays_charged_until_its_last_handle_and_its_last_mapping_are_gone() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["reserve r 4G", "create a 512M", "map r 0 a 512M", "release a"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB);
    program.succeed(&["create b 512M", "map r 512M b 512M", "release b"]);
    assert_eq!(program.ask("create c 2M"), REFUSED);
    // The handle of what is mapped keeps it too.
    program.succeed(&["handleof again r 300M", "unmap r 0 512M"]);
    assert_eq!(pod.agent.charged(), CONTEXT + GIB);
    program.succeed(&["release again"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB);
    program.succeed(&["unmap r 512M 512M"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn several_mappings_are_unmapped_at_once() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["reserve r 1G"]);
    for index in 0..40 {
        let order = format!("map r {}M a 4M", index * 4);
        program.succeed(&["create a 4M", &order, "release a"]);
    }
    assert_eq!(pod.agent.charged(), CONTEXT + 160 * MIB);
    program.succeed(&["unmap r 0 80M"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 80 * MIB);
    program.succeed(&["unmap r 80M 80M"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn h01_s2_memory_without_a_context_is_charged_to_the_device_in_its_properties() {
    let mut config = gpusim::config::Config::default();
    config.devices[0].count = 2;
    let host = Host::with(config);
    let pod = host.pod_with(&[host.quota(0, GIB), host.quota(1, 2 * GIB)]);
    let mut program = pod.program();
    program.succeed(&["init", "create a 512M 1", "create b 256M 0"]);
    assert_eq!((pod.agent.charged_on(0), pod.agent.charged_on(1)), (256 * MIB, 512 * MIB));
    // The current context's device is another one.
    program.succeed(&["retain", "create c 1G 1"]);
    assert_eq!((pod.agent.charged_on(0), pod.agent.charged_on(1)), (256 * MIB + CONTEXT, 1536 * MIB));
    assert_eq!(program.ask("create d 1G 1"), REFUSED);
}

#[test]
fn a10_each_device_of_a_pod_has_a_quota_a_charge_and_refusals_of_its_own() {
    let devices = vec![DeviceConfig { count: 2, ..DeviceConfig::default() }];
    let host = Host::with(Config { devices, ..Config::default() });
    let pod = host.pod_with(&[host.quota(0, CONTEXT + GIB), host.quota(1, CONTEXT + 2 * GIB)]);
    // The ranks of an engine that shares its model among devices.
    let mut ranks = [pod.program(), pod.program()];
    for (rank, program) in ranks.iter_mut().enumerate() {
        program.succeed(&["init", &format!("device {rank}"), "retain"]);
    }
    let charged = || [pod.agent.charged_on(0), pod.agent.charged_on(1)];
    assert_eq!(charged(), [CONTEXT, CONTEXT]);
    for (program, limit) in ranks.iter_mut().zip([CONTEXT + GIB, CONTEXT + 2 * GIB]) {
        assert_eq!(program.numbers("info"), [0, limit - CONTEXT, limit]);
        assert_eq!(program.numbers("total"), [0, limit]);
        assert_eq!(program.numbers("nvml")[2..5], [limit, limit - CONTEXT, CONTEXT]);
    }
    let [first, second] = &mut ranks;
    // One that is full refuses, by whatever call, and the other has what it had before.
    first.succeed(&["alloc a 1G", "stream"]);
    for order in ["alloc b 2M", "create b 2M", "managed b 2M", "async b 2M", "array b 4096 1024"] {
        assert_eq!(first.ask(order), REFUSED, "{order}");
    }
    assert_eq!(charged(), [CONTEXT + GIB, CONTEXT]);
    assert_eq!(second.numbers("info"), [0, 2 * GIB, CONTEXT + 2 * GIB]);
    second.succeed(&["alloc a 1536M"]);
    assert_eq!(second.ask("alloc b 1G"), REFUSED);
    assert_eq!(charged(), [CONTEXT + GIB, CONTEXT + 1536 * MIB]);
    // A rank takes memory of the other's device only within that one's quota: its context, and handles,
    // which need none.
    assert_eq!(second.ask("create c 2M 0"), REFUSED);
    assert_eq!(first.ask("create c 1G 1"), REFUSED);
    first.succeed(&["create c 512M 1"]);
    assert_eq!(charged(), [CONTEXT + GIB, CONTEXT + 2 * GIB]);
    first.succeed(&["device 1"]);
    assert_eq!(first.ask("retain"), REFUSED);
    // What one gives back is its own device's; what a rank held goes with it on both.
    second.succeed(&["free a"]);
    assert_eq!(charged(), [CONTEXT + GIB, CONTEXT + 512 * MIB]);
    first.kill();
    pod.agent.await_charged_on(0, 0);
    pod.agent.await_charged_on(1, CONTEXT);
    assert!(pod.agent.is_consistent());
}

#[test]
fn h02_memory_of_the_host_is_not_charged() {
    let host = Host::start();
    let pod = host.pod(CONTEXT + 2 * MIB);
    let (mut program, mut unguarded) = (pod.ready(), host.unguarded());
    unguarded.start();
    assert_eq!(program.ask("create a 64M host"), unguarded.ask("create a 64M host"));
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn a_thread_without_a_context_gets_the_drivers_answer() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["nocontext"]);
    assert_eq!(program.ask("alloc a 2M"), "201");
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn a07_pools_are_charged_by_what_they_have_reserved() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["stream", "async a 1"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 32 * MIB);
    program.succeed(&["async b 100M", "asyncfree b"]);
    // What is freed stays in the pool until the stream has caught up.
    let kept = program.numbers("reserved default")[1];
    assert_eq!(pod.agent.charged(), CONTEXT + kept);
    program.succeed(&["sync"]);
    assert_eq!(pod.agent.charged(), CONTEXT + program.numbers("reserved default")[1]);
    program.succeed(&["asyncfree a", "sync"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
    // And it may be freed like any other.
    program.succeed(&["async c 64M", "free c", "sync"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn a_pool_that_keeps_what_is_freed_is_made_to_give_it_back_before_a_refusal() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["stream", "pool p", "keep p 64G", "frompool a p 768M", "asyncfree a", "sync"]);
    assert_eq!(pod.agent.charged(), CONTEXT + program.numbers("reserved p")[1]);
    assert!(pod.agent.charged() >= CONTEXT + 768 * MIB);
    program.succeed(&["alloc b 512M", "free b"]);
    // While anything is captured nothing is asked of pools.
    program.succeed(&["frompool a p 768M", "asyncfree a", "sync", "begincapture"]);
    assert_eq!(program.ask("alloc b 512M").split(' ').next(), Some(REFUSED));
    program.succeed(&["endcapture g", "alloc b 512M"]);
}

/// Has a program wait for its streams until so much is charged.
fn sync_until(pod: &Pod<'_>, program: &mut Program, bytes: u64) {
    let began = Instant::now();
    while pod.agent.charged() != bytes {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "{} are charged, not {bytes}",
            pod.agent.charged()
        );
        program.succeed(&["sync"]);
    }
}

/// Longer than it is between two looks at what the agent asks.
const KEPT_ON: Duration = Duration::from_millis(150);

/// Has a program do something for so long.
fn keep_on(program: &mut Program, orders: &[&str]) {
    let began = Instant::now();
    while began.elapsed() < KEPT_ON {
        program.succeed(orders);
    }
}

#[test]
fn pools_and_graphs_give_back_what_they_keep_when_the_agent_asks() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["stream", "pool p", "keep p 64G", "frompool a p 256M", "asyncfree a", "sync"]);
    program.succeed(&["graph g", "node g a 256M", "freenode g a", "instantiate x g"]);
    program.succeed(&["launch x", "sync", "endexecutable x"]);
    assert!(pod.agent.charged() >= CONTEXT + 512 * MIB);
    // Of another device, of none, and of a newer agent that asks for what is not known.
    pod.agent.trim(1);
    pod.agent.trim(u32::MAX);
    pod.agent.say(b"HWGD\xff\x7f\x0c\0\0\0\0\0");
    pod.agent.say(b"garbage");
    let before = pod.agent.charged();
    keep_on(&mut program, &["sync"]);
    assert_eq!(pod.agent.charged(), before);
    pod.agent.trim(0);
    sync_until(&pod, &mut program, CONTEXT);
    assert_eq!(program.numbers("reserved p")[1], 0);
    assert!(pod.agent.is_consistent());
}

#[test]
fn a_trim_waits_for_the_end_of_a_capture() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["stream", "pool p", "keep p 64G", "frompool a p 256M", "asyncfree a", "sync"]);
    let kept = pod.agent.charged();
    program.succeed(&["begincapture"]);
    pod.agent.trim(0);
    // What is over the quota does not come to the driver, and spoils no capture.
    let began = Instant::now();
    while began.elapsed() < KEPT_ON {
        assert_eq!(program.ask("alloc b 2G").split(' ').next(), Some(REFUSED));
    }
    assert_eq!(pod.agent.charged(), kept);
    program.succeed(&["endcapture g"]);
    sync_until(&pod, &mut program, CONTEXT);
}

#[test]
fn a_destroyed_pool_is_charged_until_what_came_from_it_is_freed() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["stream", "pool p", "frompool a p 64M", "frompool b p 64M", "endpool p"]);
    assert!(pod.agent.charged() >= CONTEXT + 128 * MIB);
    program.succeed(&["asyncfree a"]);
    assert!(pod.agent.charged() >= CONTEXT + 64 * MIB);
    program.succeed(&["asyncfree b", "sync"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn a08_memory_of_graphs_is_charged_from_when_they_are_executable_until_it_is_trimmed() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["stream", "graph g", "node g a 256M", "freenode g a", "node g b 128M", "freenode g b"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
    // It never holds both at a time.
    program.succeed(&["instantiate x g"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 256 * MIB);
    program.succeed(&["launch x", "sync"]);
    let taken = host.memory().used - program_alone(&host);
    assert_eq!(pod.agent.charged(), CONTEXT + taken);
    program.succeed(&["launch x", "sync", "endexecutable x"]);
    assert_eq!(pod.agent.charged(), CONTEXT + taken);
    program.succeed(&["graphtrim"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn a_trim_that_gave_nothing_back_makes_no_launch_fail() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["stream", "graph g", "node g a 768M", "freenode g a", "instantiate x g"]);
    program.succeed(&["upload x", "launch x", "sync", "graphtrim"]);
    // The simulated driver keeps the memory of a graph for as long as that is executable.
    assert_eq!(pod.agent.charged(), CONTEXT + 768 * MIB);
    program.succeed(&["launch x", "sync", "launch x", "sync"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 768 * MIB);
    assert_eq!(program.ask("alloc b 512M"), REFUSED);
}

#[test]
fn h05_what_is_captured_is_charged_when_it_runs_and_not_before() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["stream", "begincapture", "async a 512M", "asyncfree a", "endcapture g"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
    program.succeed(&["instantiate x g"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB);
    program.succeed(&["launch x", "sync", "endexecutable x", "graphtrim"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
    program.succeed(&["begincapture", "async a 2G", "asyncfree a", "endcapture h"]);
    assert_eq!(program.ask("instantiate y h"), REFUSED);
}

#[test]
fn managed_memory_is_treated_as_the_quota_says() {
    let host = Host::start();
    let quota = host.quota(0, LIMIT);
    let pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    program.succeed(&["managed a 512M"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB);
    pod.agent.set(&DeviceQuota { managed: Managed::Ignore, ..quota });
    program.succeed(&["managed b 64G", "free b"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB);
    pod.agent.set(&DeviceQuota { managed: Managed::Refuse, ..quota });
    assert_eq!(program.ask("managed c 2M"), "801");
    pod.agent.await_heard(|heard| heard.refused.contains(&(2 * MIB, RefusedReason::Managed)));
    program.succeed(&["free a"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn what_goes_with_a_context_is_given_back_with_it() {
    let host = Host::start();
    let pod = host.pod(4 * GIB);
    let mut program = pod.ready();
    program.succeed(&["alloc a 64M", "array r 1024 1024", "stream", "create k 32M"]);
    program.succeed(&["context c", "alloc b 128M", "managed m 128M"]);
    let physical = 32 * MIB;
    assert_eq!(pod.agent.charged(), 2 * CONTEXT + 64 * MIB + 16 * MIB + physical + 256 * MIB);
    program.succeed(&["endcontext c"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 64 * MIB + 16 * MIB + physical);
    program.succeed(&["reset"]);
    assert_eq!(pod.agent.charged(), physical);
    program.succeed(&["release k"]);
    assert_eq!(pod.agent.charged(), 0);
}

#[test]
fn the_primary_context_is_charged_once_until_its_last_user_leaves() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    program.succeed(&["retain", "retain", "leave", "leave"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
    program.succeed(&["leave"]);
    assert_eq!(pod.agent.charged(), 0);
    program.succeed(&["retain"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn b17_a_quota_below_a_context_says_so() {
    let host = Host::start();
    let pod = host.pod(256 * MIB);
    let mut program = pod.program();
    program.succeed(&["init"]);
    assert_eq!(program.ask("retain"), REFUSED);
    pod.agent.await_heard(|heard| heard.refused == [(CONTEXT, RefusedReason::QuotaBelowContext)]);
}

#[test]
fn the_agents_estimate_of_a_context_is_followed() {
    let host = Host::start();
    let quota = host.quota(0, LIMIT);
    let pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    program.succeed(&["context c"]);
    for estimate in [600 * MIB, 400 * MIB] {
        pod.agent.set(&DeviceQuota { context: estimate, limit: 4 * GIB, granted: 4 * GIB, ..quota });
        program.succeed(&["alloc a 2M", "free a"]);
        assert_eq!(pod.agent.charged(), 2 * estimate);
    }
    program.succeed(&["endcontext c", "leave"]);
    assert_eq!(pod.agent.charged(), 0);
}

#[test]
fn l09_s9_a_limit_that_changes_holds_from_the_next_call_on() {
    let host = Host::start();
    let quota = host.quota(0, LIMIT);
    let pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    program.succeed(&["alloc a 512M"]);
    let with = |limit| DeviceQuota { limit, granted: limit, ..quota };
    pod.agent.set(&with(CONTEXT + 256 * MIB));
    assert_eq!(program.ask("alloc b 2M"), REFUSED);
    assert_eq!(program.numbers("info"), [0, 0, CONTEXT + 256 * MIB]);
    program.succeed(&["free a", "alloc b 2M"]);
    pod.agent.set(&with(8 * GIB));
    program.succeed(&["alloc c 6G"]);
    assert_eq!(program.numbers("total"), [0, 8 * GIB]);
}

#[test]
fn l10_a_refusal_waits_for_as_long_as_the_quota_says() {
    let host = Host::start();
    let quota = DeviceQuota { granted: CONTEXT, wait_milliseconds: 10_000, ..host.quota(0, LIMIT) };
    let pod = host.pod_with(&[quota]);
    let mut program = pod.ready();
    pod.agent.set_grants(crate::agent::Grants::After(Duration::from_millis(700)));
    let began = std::time::Instant::now();
    program.succeed(&["alloc a 512M"]);
    assert!(began.elapsed() >= Duration::from_millis(700));
}
