//! The ways in which programs take memory and find functions.

use serde_json::{Value, json};

use crate::host::{GIB, Host, MIB};

const CONTEXT: u64 = 518 * MIB;

fn host() -> Host {
    Host::start(&json!({ "contextOverhead": 0, "openOverhead": 0 }))
}

#[test]
fn each_way_of_taking_memory_is_charged_and_given_back() {
    let host = host();
    // What a process is charged for 100 MiB taken in each way: steps of 2 MiB, of 32 MiB for pools.
    for (way, charged) in [
        ("alloc", 100),
        ("pitch", 100),
        ("vmm", 100),
        ("create", 100),
        ("array", 100),
        ("async", 128),
        ("pool", 128),
        ("graph", 100),
        ("capture", 100),
        ("managed", 0),
        ("host", 0),
    ] {
        let mut workload = host.workload(&format!("context; {way} 100Mi; hold"));
        workload.await_line("result op=");
        assert_eq!(host.charged(0), [(workload.pid(), CONTEXT + charged * MIB)], "{way}");
        workload.kill();
        host.await_used(0, 0);
        let mut workload = host.workload(&format!("context; {way} 100Mi; free; synchronize; hold"));
        workload.await_line("result op=synchronize bytes=0 code=0");
        assert_eq!(host.charged(0), [(workload.pid(), CONTEXT)], "{way} is given back");
        workload.kill();
        host.await_used(0, 0);
    }
}

#[test]
fn a_refusal_is_the_same_code_by_whatever_call() {
    let host = Host::start(&json!({ "devices": [{ "memory": "8Gi", "reserved": 0 }] }));
    let ways = ["alloc", "pitch", "create", "vmm", "array", "async", "pool", "graph", "capture"];
    let script: Vec<_> = ways.iter().map(|way| format!("expect-oom {way} 16Gi")).collect();
    let mut workload = host.workload(&format!("{}; info; exit 0", script.join("; ")));
    assert_eq!(workload.exit_code(), Some(0));
    let lines = workload.lines();
    for way in ways {
        let name = if way == "create" { "physical" } else { way };
        let line = format!("result op={name} bytes=17179869184 code=2 name=CUDA_ERROR_OUT_OF_MEMORY");
        assert!(lines.iter().any(|known| known.contains(&line)), "{line}: {lines:#?}");
    }
    let info: Value = serde_json::from_str(&workload.await_rest(" info ")).unwrap();
    assert_eq!(info["total"], 8 * GIB);
    assert_eq!(info["nvml"]["total"], 8 * GIB);
    assert_eq!(info["free"], info["nvmlV2"]["free"], "nothing was left behind");

    let mut workload = host.workload("expect-oom alloc 1Gi; exit 0");
    workload.await_line("expected CUDA_ERROR_OUT_OF_MEMORY (2), but alloc got 1.0 GiB");
    assert_eq!(workload.exit_code(), Some(1));
    let mut hog = host.workload("on-oom retry; alloc 7Gi; hold");
    hog.await_line("took");
    let mut late = host.workload("expect-oom context; exit 0");
    assert_eq!(late.exit_code(), Some(0));
    hog.kill();
}

#[test]
fn functions_are_found_in_every_way() {
    let host = host();
    let expected = GIB + CONTEXT;
    for arguments in [
        &[][..],
        &["--lookup", "dlsym"],
        &["--bypass", "namespace"],
        &["--bypass", "copy"],
        &["--bypass", "copy", "--lookup", "dlsym"],
    ] {
        let mut workload = host.workload_by(arguments, "alloc 1Gi; info; fork 1 { alloc 1Gi; hold }; hold");
        workload.await_line(" info {");
        host.await_that(&format!("both are charged: {arguments:?}"), || {
            let charged = host.charged(0);
            charged.len() == 2 && charged.iter().all(|(_, bytes)| *bytes == expected)
        });
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", workload.pid())).unwrap();
        let private = maps.lines().any(|line| line.contains("/private-") && line.contains("libcuda.so.1"));
        assert_eq!(private, arguments.contains(&"copy"), "{arguments:?}");
        workload.terminate();
        assert_eq!(workload.exit_code(), Some(0));
        host.await_used(0, 0);
    }
}

#[test]
fn a_process_may_narrow_what_it_sees() {
    let host = Host::start(&json!({ "devices": [{ "count": 3 }] }));
    let uuid = host.device(2)["uuid"].as_str().unwrap().to_owned();
    let workload = host.workload_with("alloc 1Gi; hold", &[("CUDA_VISIBLE_DEVICES", &uuid)]);
    workload.await_line("took");
    assert_eq!(host.charged(2), [(workload.pid(), GIB + CONTEXT)]);
    let workload = host.workload_with("context", &[("CUDA_VISIBLE_DEVICES", "")]);
    workload.await_line("CUDA_ERROR_NO_DEVICE");
}

#[test]
fn a_driver_that_does_nothing_needs_no_daemon() {
    let mut host = host();
    host.stop();
    let script =
        "alloc 900Gi; pitch 1Gi; managed 1Gi; vmm 1Gi; create 1Gi; async 1Gi; array 1Gi; free; exit 7";
    let mut workload = host.workload_with(script, &[("GPUSIM_NULL", "1")]);
    assert_eq!(workload.exit_code(), Some(7), "{:#?}", workload.lines());
}
