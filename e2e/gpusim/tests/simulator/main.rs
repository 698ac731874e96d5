//! The daemon, the two libraries and real processes together: what programs and observers of the
//! simulated host see, against what was measured on an H200 with driver 580.
//!
//! Builds the libraries and the workload first, once. Tests that need namespaces of their own are
//! left out where the user may not make them.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by these, and the exemption for tests does not reach their helpers"
)]

mod calls;
mod host;
mod limits;
mod observer;
mod sharing;

use host::{GIB, Host, MIB};
use serde_json::{Value, json};

/// A context with what it costs, and 1 GiB.
const SERVER: u64 = 518 * MIB + GIB;

#[test]
fn a_process_appears_with_its_context_and_is_charged_what_it_takes() {
    let host = Host::start(&json!({}));
    let workload = host.workload("device 0; physical 64Mi; hold");
    workload.await_line("took 64.0 MiB");
    let device = host.device(0);
    assert_eq!(device["compute"], json!([]), "memory without a context is in no list");
    assert_eq!(host.used(0), 64 * MIB + 3_328 * 1024);

    let workload = host.workload("context; alloc 1Gi; hold");
    workload.await_line("took 1.0 GiB");
    assert_eq!(host.charged(0), [(workload.pid(), SERVER)]);
}

#[test]
fn managed_memory_is_in_use_and_in_no_process_s_numbers() {
    let host = Host::start(&json!({ "contextOverhead": 0, "openOverhead": 0 }));
    let workload = host.workload("managed 4Gi; touch; fork 1 { device 0; hold }; hold");
    workload.await_line("took 4.0 GiB");
    host.await_used(0, 4 * GIB + 518 * MIB);
    assert_eq!(host.charged(0), [(workload.pid(), 518 * MIB)]);
}

#[test]
fn sigkill_frees_everything_once_the_driver_is_done() {
    let host = Host::start(&json!({}));
    let mut workload = host.workload("alloc 60Gi; hold");
    workload.await_line("took 60.0 GiB");
    let start = std::time::Instant::now();
    workload.kill();
    host.await_used(0, 0);
    let took = start.elapsed().as_millis();
    assert!(took >= 146, "60 GiB came back after {took} ms");
    assert_eq!(host.charged(0), []);
}

#[test]
fn sigterm_ends_a_workload_well_unless_it_is_ignored() {
    let host = Host::start(&json!({}));
    let mut polite = host.workload("alloc 1Gi; hold");
    polite.await_line("took");
    polite.terminate();
    polite.await_line("ends on request");
    assert_eq!(polite.exit_code(), Some(0));
    host.await_used(0, 0);

    let mut stubborn = host.workload("ignore-sigterm; alloc 1Gi; hold");
    stubborn.await_line("took");
    stubborn.terminate();
    stubborn.await_line("ignores a signal");
    assert_eq!(host.charged(0), [(stubborn.pid(), SERVER)]);
    stubborn.kill();
    host.await_used(0, 0);
}

#[test]
fn children_are_processes_of_their_own() {
    let host = Host::start(&json!({}));
    let mut parent = host.workload("alloc 1Gi; fork 2 { alloc 2Gi; hold }; hold");
    host.await_that("three processes hold memory", || host.charged(0).len() == 3);
    parent.terminate();
    parent.await_line("ends on request");
    assert_eq!(parent.exit_code(), Some(0));
    host.await_used(0, 0);
}

#[test]
fn memory_of_a_parent_is_freed_though_a_child_of_its_lives_on() {
    let host = Host::start(&json!({}));
    // The shell's child inherits whatever the shell has open, and outlives it.
    let mut parent = host.workload("alloc 1Gi; fork 1 { alloc 2Gi; hold }; hold");
    host.await_that("both hold memory", || host.charged(0).len() == 2);
    let child = host.charged(0).into_iter().find(|(pid, _)| *pid != parent.pid()).unwrap();
    parent.kill();
    host.await_that("the child alone holds memory", || host.charged(0) == [child]);
    host::kill(child.0);
    host.await_used(0, 0);
}

#[test]
fn a_refusal_is_out_of_memory_and_the_script_says_what_then() {
    let host = Host::start(&json!({ "devices": [{ "memory": "8Gi", "reserved": 0 }] }));
    let mut workload = host.workload("alloc 16Gi; hold");
    workload.await_line("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
    assert_eq!(workload.exit_code(), Some(1));
    let mut workload = host.workload("on-oom exit 3; alloc 16Gi; hold");
    assert_eq!(workload.exit_code(), Some(3));
    let mut workload = host.workload("on-oom continue; alloc 16Gi; alloc 1Gi; exit 7");
    assert_eq!(workload.exit_code(), Some(7));

    host.await_used(0, 0);
    let mut hog = host.workload("alloc 6Gi; hold");
    hog.await_line("took 6.0 GiB");
    let mut patient = host.workload("on-oom retry; alloc 6Gi; exit 0");
    patient.await_line("CUDA_ERROR_OUT_OF_MEMORY");
    hog.kill();
    assert_eq!(patient.exit_code(), Some(0));
}

#[test]
fn a_script_that_cannot_be_read_runs_nothing() {
    let host = Host::start(&json!({}));
    let mut workload = host.workload("alloc 1Gi; aloc 1Gi");
    assert_eq!(workload.exit_code(), Some(2));
    assert_eq!(host.used(0), 0);
}

#[test]
fn growth_leaks_and_spikes_end_where_they_should() {
    let host = Host::start(&json!({}));
    let mut workload =
        host.workload("grow 100Gi/s to 8Gi; spike 4Gi for 1ms; leak 64Mi every 1ms x4; free 1Gi; exit 0");
    assert_eq!(workload.exit_code(), Some(0));
    let lines = workload.lines();
    for words in [
        "took 4.0 GiB: holds 12.0 GiB",
        "gave back: holds 8.0 GiB",
        "holds 8.2 GiB",
        "gave back: holds 5.0 GiB",
    ] {
        assert_eq!(lines.iter().filter(|line| line.ends_with(words)).count(), 1, "{words}: {lines:?}");
    }
}

#[test]
fn a_server_feels_a_full_device_and_recovers() {
    let host = Host::start(&json!({ "devices": [{ "memory": "8Gi", "reserved": 0 }] }));
    let server = host.workload("alloc 1Gi; serve");
    server.await_line("failed=0 last=CUDA_SUCCESS");
    let mut hog = host.workload("on-oom continue; grow 100Gi/s to 7Gi; leak 2Mi every 1ms");
    server.await_line("last=CUDA_ERROR_OUT_OF_MEMORY");
    hog.kill();
    server.await_line("failed=1 last=CUDA_SUCCESS");
}

#[test]
fn the_pressure_file_is_printed_at_each_change() {
    let host = Host::start(&json!({}));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pressure");
    let workload = host.workload(&format!("watch-pressure {}; hold", path.display()));
    workload.await_line("pressure none");
    std::fs::write(&path, "{\"level\":\"Soft\"}\n").unwrap();
    workload.await_line("pressure {\"level\":\"Soft\"}");
    let new = directory.path().join("new");
    std::fs::write(&new, "{\"level\":\"Hard\"}\n").unwrap();
    std::fs::rename(&new, &path).unwrap();
    workload.await_line("pressure {\"level\":\"Hard\"}");
}

#[test]
fn a_process_sees_the_devices_that_it_was_given() {
    let host = Host::start(&json!({ "devices": [{ "count": 4 }] }));
    let all = host.nvml(&[]);
    let uuid = |index: usize| all["devices"][index]["uuid"].as_str().unwrap().to_owned();
    let two = format!("{},{}", uuid(3), uuid(1));
    let seen = host.nvml(&[("NVIDIA_VISIBLE_DEVICES", &two)]);
    let seen: Vec<_> =
        seen["devices"].as_array().unwrap().iter().map(|device| device["uuid"].clone()).collect();
    assert_eq!(seen, [json!(uuid(1)), json!(uuid(3))]);

    let workload = host.workload_with("device 1; alloc 1Gi; hold", &[("NVIDIA_VISIBLE_DEVICES", &two)]);
    workload.await_line("took 1.0 GiB");
    assert_eq!(host.charged(3), [(workload.pid(), SERVER)]);
    let mut workload = host.workload_with("device 2; hold", &[("NVIDIA_VISIBLE_DEVICES", &two)]);
    workload.await_line("CUDA_ERROR_INVALID_DEVICE");
    assert_eq!(workload.exit_code(), Some(1));
    let workload = host.workload_with("context; hold", &[("NVIDIA_VISIBLE_DEVICES", "void")]);
    workload.await_line("CUDA_ERROR_NO_DEVICE");
}

#[test]
fn mig_instances_are_devices_of_their_own() {
    let mig = json!([
        { "profile": "1g.18gb", "memory": "16Gi", "gpuInstance": 7 },
        { "profile": "1g.18gb", "memory": "16Gi", "gpuInstance": 8 },
    ]);
    let host = Host::start(&json!({ "contextOverhead": 0, "devices": [{ "mig": mig }] }));
    let device = host.device(0);
    assert_eq!(device["mig"], 1);
    let second = device["instances"][1]["uuid"].as_str().unwrap().to_owned();
    let workload = host.workload_with(
        "on-oom continue; alloc 16Gi; alloc 1Gi; hold",
        &[("NVIDIA_VISIBLE_DEVICES", &second)],
    );
    workload.await_line("took 1.0 GiB");
    let entry = json!([{ "pid": workload.pid(), "bytes": SERVER, "gi": 8, "ci": 0 }]);
    let device = host.device(0);
    assert_eq!(device["compute"], entry);
    assert_eq!(device["instances"][1]["compute"], entry);
    assert_eq!(device["instances"][0]["compute"], json!([]));
    assert_eq!(device["instances"][1]["memory"]["used"], SERVER);
    assert_eq!(device["instances"][1]["memory"]["total"], 16 * GIB);
}

#[test]
fn a_process_in_a_pid_namespace_below_is_known_by_both_its_pids() {
    let Some(inside) = host::namespaces() else { return };
    let host = Host::start(&json!({}));
    let outside = host.workload("alloc 1Gi; hold");
    outside.await_line("took");
    let below = host.workload_in(&inside, "alloc 1Gi; hold");
    below.await_line("took");
    host.await_that("both are charged", || host.charged(0).len() == 2);
    let (below_pid, _) = host.charged(0).into_iter().find(|(pid, _)| *pid != outside.pid()).unwrap();
    assert!(std::path::Path::new(&format!("/proc/{below_pid}")).exists(), "the host's own PID");
    let seen = host.nvml_in(&inside, &format!("/proc/{below_pid}/ns/pid"));
    assert_eq!(seen["devices"][0]["compute"], json!([{ "pid": 1, "bytes": SERVER, "gi": null, "ci": null }]));
    // The first process of a namespace is spared signals that it does not expect, but not these.
    host::signal(below_pid, host::Signal::TERM);
    below.await_line("ends on request");
    host.await_that("the other alone is charged", || host.charged(0) == [(outside.pid(), SERVER)]);

    let below = host.workload_in(&inside, "ignore-sigterm; alloc 1Gi; hold");
    below.await_line("took");
    let (below_pid, _) = host.charged(0).into_iter().find(|(pid, _)| *pid != outside.pid()).unwrap();
    host::kill(below_pid);
    host.await_that("the other alone is charged", || host.charged(0) == [(outside.pid(), SERVER)]);
}

#[test]
fn a_lost_device_fails_alone() {
    let host = Host::start(&json!({ "devices": [{ "count": 2 }] }));
    let mut workload = host.workload("context; on-oom retry; leak 2Mi every 1ms");
    workload.await_line("took");
    host.ctl("inject lost");
    workload.await_line("CUDA_ERROR_UNKNOWN (999)");
    assert_eq!(workload.exit_code(), Some(1));
    let state = host.nvml(&[]);
    assert_eq!(state["devices"][0]["error"], "GpuLost");
    assert_eq!(state["devices"][1]["memory"]["used"], 0);
    host.ctl("clear --kind lost");
    host.await_used(0, 0);
}

#[test]
fn missing_numbers_are_not_available_and_not_supported() {
    let host = Host::start(&json!({}));
    let workload = host.workload("alloc 1Gi; hold");
    workload.await_line("took");
    host.ctl(&format!("inject missing-process-memory --pid {}", workload.pid()));
    host.ctl("inject missing-memory");
    let device = host.device(0);
    assert_eq!(device["compute"], json!([{ "pid": workload.pid(), "bytes": null, "gi": null, "ci": null }]));
    assert_eq!(device["memory"]["error"], "NotSupported");
    assert_eq!(host.ctl("clear --device 0"), "2 faults ended\n");
    assert_eq!(host.charged(0), [(workload.pid(), SERVER)]);
}

#[test]
fn foreign_memory_lives_as_long_as_its_process() {
    let host = Host::start(&json!({}));
    let mut stranger = host::sleeper();
    host.ctl(&format!("inject foreign --pid {} --bytes 10Gi", stranger.id()));
    assert_eq!(host.charged(0), [(stranger.id(), 10 * GIB)]);
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    host.await_used(0, 0);
    let refusal = host.ctl_refusal(&format!("inject foreign --pid {} --bytes 1Gi", stranger.id()));
    assert!(refusal.contains("use zombie for one that is gone"), "{refusal}");
    let refusal = host.ctl_refusal("inject unexplained --bytes 200Gi");
    assert!(refusal.contains("200Gi do not fit"), "{refusal}");
}

#[test]
fn zombie_and_unexplained_memory_stays_until_a_reset() {
    let host = Host::start(&json!({}));
    host.ctl("inject zombie --pid 4194000 --bytes 2Gi");
    host.ctl("inject unexplained --bytes 1Gi");
    assert_eq!(host.charged(0), [(4_194_000, 2 * GIB)]);
    assert_eq!(host.used(0), 3 * GIB);

    host.ctl("inject stuck --listed");
    let mut workload = host.workload("alloc 1Gi; hold");
    workload.await_line("took");
    let victim = workload.pid();
    workload.kill();
    host.await_that("its memory has become a fault", || host.show()["holders"] == json!([]));
    let mut charged = host.charged(0);
    charged.sort_unstable();
    let mut expected = [(victim, SERVER), (4_194_000, 2 * GIB)];
    expected.sort_unstable();
    assert_eq!(charged, expected);
    host.ctl("reset --device 0");
    assert_eq!(host.used(0), 0);
}

#[test]
fn torn_reads_differ() {
    let host = Host::start(&json!({}));
    host.ctl("inject torn --bytes 1Gi --reads 1");
    let reads = [host.used(0), host.used(0), host.used(0)];
    assert_eq!(reads, [0, GIB, 0]);
}

#[test]
fn slow_calls_take_their_time() {
    let host = Host::start(&json!({}));
    host.ctl("inject slow --milliseconds 20");
    let start = std::time::Instant::now();
    host.used(0);
    assert!(start.elapsed().as_millis() >= 20);
}

#[test]
fn a_program_may_become_another_and_begins_anew() {
    let host = Host::start(&json!({}));
    let workload = host.shell("exec \"$WORKLOAD\" --script 'alloc 1Gi; fork 1 { alloc 2Gi; exit 0 }; hold'");
    workload.await_line("took 1.0 GiB");
    host.await_that("the first alone is charged", || host.charged(0) == [(workload.pid(), SERVER)]);
}

#[test]
fn a_restarted_daemon_takes_the_socket_over_and_nvml_finds_it() {
    let mut host = Host::start(&json!({ "seed": "a" }));
    let before = host.device(0)["uuid"].clone();
    let refusal = host.second_daemon();
    assert!(refusal.contains("another simulator serves"), "{refusal}");
    host.restart();
    assert_eq!(host.device(0)["uuid"], before, "the same seed gives the same devices");
}

#[test]
fn another_host_may_take_its_place() {
    let host = Host::start(&json!({}));
    let workload = host.workload("alloc 1Gi; hold");
    workload.await_line("took");
    let file = host.file("other.json", &json!({ "devices": [{ "count": 8, "name": "NVIDIA H100" }] }));
    let refusal = host.ctl_refusal(&format!("reconfigure {file}"));
    assert!(refusal.contains("end them first, or force"), "{refusal}");
    host.ctl(&format!("reconfigure {file} --force"));
    let state = host.nvml(&[]);
    assert_eq!(state["devices"].as_array().unwrap().len(), 8);
    assert_eq!(state["devices"][7]["name"], "NVIDIA H100");
}

#[test]
fn without_a_daemon_there_is_no_driver() {
    let mut host = Host::start(&json!({}));
    host.stop();
    assert_eq!(host.nvml(&[]), json!({ "error": "DriverNotLoaded" }));
    let workload = host.workload("context");
    workload.await_line("CUDA_ERROR_NO_DEVICE");
}

#[test]
fn the_driver_answers_as_an_h200_s_does() {
    let host = Host::start(&json!({}));
    compare(&host.conformance(&[]), include_str!("../h200.txt"));
}

#[test]
fn the_driver_answers_what_nobody_has_asked_a_real_one_as_before() {
    let host = Host::start(&json!({}));
    compare(&host.conformance(&["open"]), include_str!("../unmeasured.txt"));
}

fn compare(ours: &str, theirs: &str) {
    let mut group = "";
    for (ours, theirs) in ours.lines().zip(theirs.lines()) {
        group = ours.strip_prefix("--- ").unwrap_or(group);
        assert_eq!(ours, theirs, "in {group:?}");
    }
    assert_eq!(ours.lines().count(), theirs.lines().count());
}

#[test]
fn every_name_is_one_that_the_driver_exports() {
    // Drivers from R615 on have these; they answer for older ones that they do not exist.
    let later = ["nvmlDeviceGetMemoryLimits_v1", "nvmlDeviceSetMemoryLimits_v1"];
    for (library, names) in [
        ("libcuda.so.1", include_str!("../libcuda.txt")),
        ("libnvidia-ml.so.1", include_str!("../libnvidia-ml.txt")),
    ] {
        let known: Vec<_> = names.lines().chain(later).collect();
        for name in host::exports(library) {
            assert!(known.contains(&name.as_str()), "{library} exports {name}");
        }
    }
}

#[test]
fn a_call_costs_microseconds() {
    let host = Host::start(&json!({ "devices": [{ "count": 8 }] }));
    let mut client = host.client();
    let region = gpusim::protocol::Region { device: 3, instance: None };
    let mut times: Vec<_> = (0..1_000)
        .map(|_| {
            let start = std::time::Instant::now();
            client.call(&gpusim::protocol::Request::Memory(region)).unwrap();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    // Far above what it takes, so that a busy machine does not fail it.
    assert!(times[500].as_millis() < 5, "{:?}", times[500]);
}

/// JSON arrays of processes as PIDs and bytes.
fn entries(list: &Value) -> Vec<(u32, u64)> {
    let number = |value: &Value| value.as_u64().unwrap();
    let list = list.as_array().unwrap().iter();
    list.map(|entry| (u32::try_from(number(&entry["pid"])).unwrap(), number(&entry["bytes"]))).collect()
}
