//! Limits of cgroups, as drivers from R615 on have them.
//!
//! They run where a cgroup can be made: on a machine with version 1 of cgroups by the simulator's
//! aid for tests, elsewhere as on a real one.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::host::{GIB, Host, MIB};

const CONTEXT: u64 = 518 * MIB;

/// A cgroup of this test's, with one below it.
struct Group(PathBuf);

impl Group {
    /// `None` where none can be made.
    fn make(name: &str) -> Option<Self> {
        let whole = Path::new("/sys/fs/cgroup");
        let root =
            if whole.join("cgroup.controllers").exists() { whole.into() } else { whole.join("memory") };
        let group = root.join(format!("gpusim-{name}-{}", std::process::id()));
        std::fs::create_dir_all(group.join("inner")).ok()?;
        Some(Self(group))
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    /// A shell's words that move it into the inner cgroup.
    fn enter(&self) -> String {
        format!("echo $$ > {}/inner/cgroup.procs", self.path())
    }

    fn remove(&self) {
        for folder in [self.0.join("inner"), self.0.clone()] {
            // Processes that have just ended leave it a moment later.
            for _ in 0..200 {
                match std::fs::remove_dir(&folder) {
                    Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                        std::thread::sleep(std::time::Duration::from_millis(10));
                    }
                    _ => break,
                }
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.remove();
    }
}

fn newer(more: &Value) -> Host {
    let mut config = json!({
        "driverVersion": "615.20.01", "memoryLimits": "force", "contextOverhead": 0, "openOverhead": 0,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Host::start(&config)
}

#[test]
fn a_limited_cgroup_gets_no_more_and_sees_no_more() {
    let Some(group) = Group::make("limited") else { return };
    let host = newer(&json!({}));
    let unlimited = json!({ "code": 0, "soft": 0, "hard": u64::MAX, "used": 0 });
    assert_eq!(host.limits(&["get", "0", group.path()]), unlimited);
    let four = (4 * GIB).to_string();
    assert_eq!(host.limits(&["set", "0", group.path(), "0", &four])["code"], 0);

    let script =
        "alloc 1Gi; expect-oom alloc 3Gi; expect-oom vmm 3Gi; expect-oom async 3Gi; expect-oom array 3Gi
        managed 8Gi; touch; vmm 1Gi; info; fork 1 { expect-oom alloc 1Gi; exit 0 }; hold";
    let workload = host.shell(&format!("{}; exec \"$WORKLOAD\" --script '{script}'", group.enter()));
    let info: Value = serde_json::from_str(&workload.await_rest(" info ")).unwrap();
    assert_eq!(info["total"], 4 * GIB);
    assert_eq!(info["free"], 2 * GIB - CONTEXT);
    assert_eq!(info["nvmlV2"]["total"], 4 * GIB);
    assert!(info["deviceTotal"].as_u64().unwrap() > 100 * GIB);
    host.await_that("the child has ended", || {
        workload.lines().iter().any(|line| line.contains("as expected") && line.contains("cuMemAlloc"))
    });
    host.await_that("its context is gone", || {
        host.limits(&["get", "0", group.path()])["used"] == 2 * GIB + CONTEXT
    });

    // Others, and other devices, are not concerned.
    let mut free = host.workload("alloc 8Gi; exit 0");
    assert_eq!(free.exit_code(), Some(0));
    // A limit below what is used takes nothing away, and lets nothing in.
    let low = GIB.to_string();
    assert_eq!(host.limits(&["set", "0", group.path(), "0", &low])["code"], 0);
    assert_eq!(host.charged(0), [(workload.pid(), 2 * GIB + CONTEXT)]);
    drop(workload);

    assert_eq!(host.show()["limits"].as_array().unwrap().len(), 1);
    group.remove();
    assert_eq!(host.limits(&["get", "0", group.path()])["code"], 6);
    std::fs::create_dir_all(group.0.join("inner")).unwrap();
    assert_eq!(host.limits(&["get", "0", group.path()])["hard"], u64::MAX, "another cgroup of the same path");
    assert_eq!(host.show()["limits"], json!([]));
}

#[test]
fn limits_are_where_the_driver_and_the_machine_have_them() {
    let Some(group) = Group::make("where") else { return };
    let code = |host: &Host| host.limits(&["get", "0", group.path()])["code"].clone();
    let old = Host::start(&json!({ "memoryLimits": "force" }));
    assert_eq!(code(&old), 13, "no such function");
    let off = newer(&json!({ "memoryLimits": "off" }));
    assert_eq!(code(&off), 13);
    let mig = json!([{ "profile": "1g.18gb", "memory": "16Gi", "gpuInstance": 7 }]);
    let cut = newer(&json!({ "devices": [{ "mig": mig }] }));
    assert_eq!(code(&cut), 3, "not supported under MIG");
    assert_eq!(code(&newer(&json!({}))), 0);
    let automatic = newer(&json!({ "memoryLimits": "auto" }));
    let version_2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    assert_eq!(code(&automatic), if version_2 { 0 } else { 3 });
    assert_eq!(automatic.limits(&["get", "0", "/gpusim/none"])["code"], if version_2 { 6 } else { 3 });
}
