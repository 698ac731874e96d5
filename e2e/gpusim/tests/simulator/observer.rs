//! An observer that keeps the driver open sees everything as soon as one that opens it anew,
//! though it asks the daemon only for what may have changed.

use std::time::{Duration, Instant};

use gpusim::protocol::{MemoryKind, ProcessList, Region, Reply, Request};
use serde_json::json;

use crate::entries;
use crate::host::{self, GIB, Host, MIB};

const WHOLE: Region = Region { device: 0, instance: None };

#[test]
fn what_a_process_did_is_seen_as_soon_as_it_is_answered() {
    let host = Host::start(&json!({ "contextOverhead": 0, "openOverhead": 0 }));
    let observers = [host.observer(), host.observer()];
    for observer in &observers {
        assert_eq!([observer.used(), observer.used()], [0, 0]);
        let page = observer.page();
        assert!(page.contains(" r--s "), "it could scribble: {page}");
    }
    let mut client = host.client();
    let own = std::process::id();
    client.call(&Request::Attach { devices: vec![0], lists: vec![ProcessList::Compute] }).unwrap();
    client.call(&Request::CreateContext(WHOLE)).unwrap();
    for _ in 0..20 {
        let (kind, bytes) = (MemoryKind::Plain, GIB);
        let allocate = Request::Allocate { region: WHOLE, kind, bytes, context: None };
        let Reply::Made(id) = client.call(&allocate).unwrap() else { panic!() };
        for observer in &observers {
            let device = observer.device();
            assert_eq!(device["memory"]["used"], 518 * MIB + GIB);
            assert_eq!(entries(&device["compute"]), [(own, 518 * MIB + GIB)]);
            assert_eq!(observer.device(), device);
        }
        client.call(&Request::Free(id)).unwrap();
        for observer in &observers {
            let device = observer.device();
            assert_eq!(device["memory"]["used"], 518 * MIB);
            assert_eq!(entries(&device["compute"]), [(own, 518 * MIB)]);
        }
    }
}

#[test]
fn each_observer_sees_what_its_pid_namespace_contains() {
    let Some(inside) = host::namespaces() else { return };
    let host = Host::start(&json!({}));
    let (outer, inner) = (host.observer(), host.observer_by(&inside, "lines"));
    host.ctl(&format!("inject foreign --pid {} --bytes 1Gi", std::process::id()));
    for _ in 0..2 {
        assert_eq!(entries(&outer.device()["compute"]), [(std::process::id(), GIB)]);
        assert_eq!(inner.device()["compute"], json!([]));
        assert_eq!((outer.used(), inner.used()), (GIB, GIB));
    }
}

#[test]
fn a_child_observes_for_itself() {
    let host = Host::start(&json!({}));
    let child = host.observer_by(&[], "child");
    assert_eq!([child.used(), child.used()], [0, 0]);
    host.ctl("inject unexplained --bytes 1Gi");
    assert_eq!([child.used(), child.used()], [GIB, GIB]);
}

#[test]
fn faults_are_seen_when_they_begin_and_when_they_end() {
    let host = Host::start(&json!({}));
    let observer = host.observer();
    let healthy = observer.device();
    assert_eq!(observer.device(), healthy);

    host.ctl("inject missing-memory");
    assert_eq!(observer.device()["memory"]["error"], "NotSupported");
    host.ctl("clear");
    assert_eq!(observer.device(), healthy);
    host.ctl("inject lost");
    assert_eq!(observer.device()["error"], "GpuLost");
    host.ctl("clear");
    assert_eq!(observer.device(), healthy);

    host.ctl("inject torn --bytes 1Gi --reads 2");
    let reads: Vec<_> = (0..6).map(|_| observer.used()).collect();
    assert_eq!(reads, [0, GIB, 0, GIB, 0, 0]);
    assert_eq!(host.show()["faults"], json!([]));
    assert_eq!(observer.device(), healthy);

    host.ctl("inject zombie --pid 4194000 --bytes 2Gi");
    assert_eq!(entries(&observer.device()["compute"]), [(4_194_000, 2 * GIB)]);
    host.ctl("inject missing-process-memory");
    assert_eq!(observer.device()["compute"][0]["bytes"], json!(null));
    host.ctl("reset --device 0");
    assert_eq!(observer.device(), healthy);

    host.ctl("inject slow --milliseconds 20");
    for _ in 0..2 {
        let start = Instant::now();
        assert_eq!(observer.device(), healthy);
        assert!(start.elapsed() >= Duration::from_millis(20));
    }
}

#[test]
fn memory_of_a_killed_process_comes_back_when_it_does() {
    let host = Host::start(&json!({}));
    let observer = host.observer();
    let mut workload = host.workload("alloc 60Gi; hold");
    workload.await_line("took 60.0 GiB");
    assert!(observer.used() > 60 * GIB);
    let start = Instant::now();
    workload.kill();
    host.await_that("all is free", || observer.used() == 0);
    assert!(start.elapsed() >= Duration::from_millis(146));
    let device = observer.device();
    assert_eq!((&device["compute"], &device["memory"]["used"]), (&json!([]), &json!(0)));
}

#[test]
fn a_daemon_that_ends_is_missed_and_its_successor_found() {
    let mut host = Host::start(&json!({}));
    let observer = host.observer();
    host.ctl("inject unexplained --bytes 1Gi");
    assert_eq!([observer.used(), observer.used()], [GIB, GIB]);
    let page = observer.page();
    host.stop();
    for _ in 0..2 {
        assert_eq!(observer.device(), json!({ "error": "DriverNotLoaded" }));
    }
    host.restart();
    assert_eq!([observer.used(), observer.used()], [0, 0]);
    assert_ne!(observer.page(), page, "the page is the new daemon's");
    host.ctl("inject unexplained --bytes 2Gi");
    assert_eq!(observer.used(), 2 * GIB);
}

#[test]
fn another_host_in_its_place_is_seen() {
    let host = Host::start(&json!({}));
    let observer = host.observer();
    let total = observer.device()["memory"]["total"].clone();
    let file = host.file("other.json", &json!({ "devices": [{ "memory": "8Gi", "reserved": 0 }] }));
    host.ctl(&format!("reconfigure {file}"));
    let device = observer.device();
    assert_ne!(device["memory"]["total"], total);
    assert_eq!(device["memory"]["total"], 8 * GIB);
}
