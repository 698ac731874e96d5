//! The table of entry points against what is known of the driver.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};

const TABLE: &str = include_str!("../entry-points.tsv");
const DRIVER: &str = include_str!("data/libcuda-580.txt");
const ASKED_FOR: &str = include_str!("data/pytorch-2.11.txt");

/// Status and reason by name.
fn table() -> BTreeMap<&'static str, (&'static str, &'static str)> {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
    let rows = lines.map(|line| {
        let fields: Vec<&str> = line.split('\t').collect();
        let [name, status, reason] = fields[..] else { panic!("{line}") };
        (name, (status, reason))
    });
    let all: Vec<_> = rows.collect();
    let by_name: BTreeMap<_, _> = all.iter().copied().collect();
    assert_eq!(by_name.len(), all.len(), "a name is listed twice");
    by_name
}

#[test]
fn every_name_that_the_driver_exports_or_a_framework_asks_for_is_listed() {
    let table = table();
    let exported: BTreeSet<&str> = DRIVER.lines().collect();
    assert_eq!(exported.len(), 707);
    let missing: Vec<_> =
        DRIVER.lines().chain(ASKED_FOR.lines()).filter(|name| !table.contains_key(name)).collect();
    assert_eq!(missing, Vec::<&str>::new());
}

#[test]
fn every_row_has_a_known_status_and_a_reason() {
    for (name, (status, reason)) in table() {
        let known = ["hooked", "charged elsewhere", "cannot allocate", "uncovered"].contains(&status);
        assert!(known && !reason.is_empty(), "{name}: {status}: {reason}");
    }
}

#[test]
fn nothing_is_listed_that_no_driver_has() {
    let known: BTreeSet<&str> = DRIVER.lines().chain(ASKED_FOR.lines()).collect();
    // This one is of libnvidia-ml, and PyTorch does not ask for it.
    let own = ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"];
    let unknown: Vec<_> =
        table().into_keys().filter(|name| !known.contains(name) && !own.contains(name)).collect();
    assert_eq!(unknown, Vec::<&str>::new());
}

#[test]
fn what_allocates_by_its_name_is_hooked_or_says_why_not() {
    // Whatever a later driver adds under such a name has to be looked at by somebody.
    let hooked_by_name = |name: &str| {
        (name.starts_with("cuMemAlloc") && !name.contains("Host"))
            || name.starts_with("cuArrayCreate")
            || name.starts_with("cuArray3DCreate")
            || name.starts_with("cuMipmappedArrayCreate")
            || name.starts_with("cuCtxCreate")
            || name.starts_with("cuGraphInstantiate")
    };
    for (name, (status, _)) in table() {
        assert!(!hooked_by_name(name) || status == "hooked", "{name}: {status}");
    }
}
