//! Signals to an operator in the middle of what it does: right after a certain one of its writes.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{task::JoinHandle, time::timeout};

use crate::{SYSTEM, Scenario, TIMEOUT, Write, audit::Tail};

/// The service account of the operator.
const ACCOUNT: &str = "highwater-operator";
/// What the steps of an act are written to.
const STEPS: [&str; 5] =
    ["configmaps", "gpumemoryincidents", "gpumemoryincidents/status", "nodes", "pods/eviction"];
/// How often the audit log is looked at: sooner than the next write can be answered.
const LOOK: Duration = Duration::from_millis(1);

/// A signal that is sent once so many steps were written.
#[derive(Debug)]
pub struct Strike {
    process: Pid,
    over: Arc<AtomicBool>,
    watch: JoinHandle<Result<Option<Write>>>,
}

impl Scenario {
    /// Sends a signal to the operator of this pod as soon as the API server has answered the
    /// `count`-th write from now on by which an act goes on. Events, leases and the status of policies
    /// are no steps. The next write may be on its way by then.
    pub async fn strike(&self, operator: &str, count: usize, signal: Signal) -> Result<Strike> {
        let process = self.operator_process(operator).await?;
        let mut log = Tail::from_now_on(&self.cluster.paths.audit_log())?;
        let over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&over);
        let watch = tokio::task::spawn_blocking(move || {
            let mut steps = 0;
            while !ended.load(Ordering::Relaxed) {
                for write in log.more()?.into_iter().filter(is_step) {
                    steps += 1;
                    if steps == count {
                        kill_process(process, signal).context("striking the operator")?;
                        return Ok(Some(write));
                    }
                }
                thread::sleep(LOOK);
            }
            Ok(None)
        });
        Ok(Strike { process, over, watch })
    }

    /// The process of an operator, as this machine numbers it.
    async fn operator_process(&self, operator: &str) -> Result<Pid> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
        let uid = pods.get(operator).await?.uid().context("no UID")?;
        for entry in fs::read_dir("/proc")? {
            let path = entry?.path();
            let read = |file: &str| fs::read_to_string(path.join(file)).unwrap_or_default();
            if read("comm").trim_end() == "operator" && read("cgroup").contains(&uid) {
                let number =
                    path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
                return number.and_then(Pid::from_raw).context("not a process");
            }
        }
        bail!("{operator} has no process")
    }
}

fn is_step(write: &Write) -> bool {
    write.account == ACCOUNT && STEPS.contains(&write.resource.as_str()) && !write.dry_run && write.code < 300
}

impl Strike {
    /// Waits until the signal was sent; the write before it.
    pub async fn landed(&mut self) -> Result<Write> {
        let landed = timeout(TIMEOUT, &mut self.watch).await.context("too few writes")???;
        landed.context("nothing was struck")
    }

    /// Gives up waiting for the write; what it was, if it came.
    pub async fn end(mut self) -> Result<Option<Write>> {
        self.over.store(true, Ordering::Relaxed);
        (&mut self.watch).await?
    }

    /// Lets an operator go on that was halted.
    pub fn goes_on(&self) -> Result<()> {
        kill_process(self.process, Signal::CONT).context("letting the operator go on")
    }
}

impl Drop for Strike {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}
