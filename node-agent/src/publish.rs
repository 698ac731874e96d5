//! The publish step: what the agent writes to the API server.
//!
//! Every write is a job that runs beside the samples, with a time limit. What to write is derived
//! from the present state each time, so a job that failed needs no memory of its own: it is
//! submitted again, later, if its reason still holds.

mod event;
mod incident;
mod node;

pub(crate) use event::Notice;
pub(crate) use node::NodeWriter;

use std::time::Duration;

use highwater_crds::{GpuMemoryIncident, GpuMemoryNode, GpuMemoryNodeStatus, Observation};
use highwater_policy::{episode::Key, time::Millis};
use kube::Client;
use tokio::{sync::mpsc, time::timeout};
use tracing::{debug, warn};

use crate::episodes::{Name, name_of};

/// How long a write may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Something to write.
#[derive(Debug)]
pub(crate) enum Job {
    /// The node's `GpuMemoryNode`, owned by the Node of this UID.
    CreateNode(String),
    /// Its status.
    Status(Box<GpuMemoryNodeStatus>),
    /// The incident of an episode.
    Create(Key, Box<GpuMemoryIncident>),
    /// What is seen of an incident.
    Observe(Name, Observation),
    /// An Event.
    Tell(Notice),
    /// Nothing: reads the node's `GpuMemoryNode`, to know that the API server is there.
    Probe,
}

/// What became of a job.
#[derive(Debug)]
pub(crate) struct Done {
    /// It was done. Nothing else is a sign that the API server does its work.
    pub(crate) written: bool,
    /// There is no such object.
    pub(crate) gone: bool,
    /// What it was.
    pub(crate) what: What,
}

/// A job that is done.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "short-lived and few")]
pub(crate) enum What {
    /// [`Job::CreateNode`], and the object that there is now.
    CreateNode(Option<Box<GpuMemoryNode>>),
    /// [`Job::Status`], and what was written.
    Status(Box<GpuMemoryNodeStatus>),
    /// [`Job::Create`], and the incident that there is now.
    Create(Key, Box<GpuMemoryIncident>),
    /// [`Job::Observe`].
    Observe(Name, Observation),
    /// [`Job::Probe`], and the object, if it is done and there is one.
    Probe(Option<Box<GpuMemoryNode>>),
}

/// Runs jobs.
pub(crate) struct Publisher {
    client: Client,
    node: String,
    done: mpsc::UnboundedSender<Done>,
    events: mpsc::Sender<Notice>,
}

impl Publisher {
    /// For this node; `done` is told what became of each job. `instance` names this agent in
    /// Events.
    pub(crate) fn new(client: Client, node: &str, done: mpsc::UnboundedSender<Done>) -> Self {
        let events = event::start(client.clone(), node);
        Self { client, node: node.to_owned(), done, events }
    }

    /// Starts a job.
    pub(crate) fn submit(&self, job: Job) {
        if let Job::Tell(notice) = job {
            if let Err(error) = self.events.try_send(notice) {
                warn!(%error, "an Event is dropped: too many wait for the API server");
            }
            return;
        }
        let (client, node, done) = (self.client.clone(), self.node.clone(), self.done.clone());
        tokio::spawn(async move {
            // Nobody listens only while the agent ends.
            let _ = done.send(run(&client, &node, job).await);
        });
    }
}

async fn run(client: &Client, node: &str, job: Job) -> Done {
    match job {
        Job::CreateNode(owner) => {
            finish(node::create(client, node, &owner), |there| What::CreateNode(there.map(Box::new))).await
        }
        Job::Status(status) => {
            finish(node::write(client, node, &status), |_| What::Status(status.clone())).await
        }
        Job::Create(key, incident) => {
            let created = incident::create(client, &incident);
            finish(created, |there| {
                What::Create(key.clone(), Box::new(there.unwrap_or_else(|| (*incident).clone())))
            })
            .await
        }
        Job::Observe(name, observation) => {
            let written = incident::observe(client, &name, &observation);
            finish(written, |_| What::Observe(name.clone(), observation.clone())).await
        }
        Job::Probe => {
            finish(node::read(client, node), |there| What::Probe(there.flatten().map(Box::new))).await
        }
        Job::Tell(_) => Done { written: false, gone: false, what: What::Probe(None) },
    }
}

/// Waits for a write and says what became of it.
async fn finish<T>(
    write: impl Future<Output = kube::Result<T>>,
    what: impl FnOnce(Option<T>) -> What,
) -> Done {
    match timeout(LIMIT, write).await {
        Ok(Ok(value)) => Done { written: true, gone: false, what: what(Some(value)) },
        Ok(Err(error)) => {
            let answered = matches!(error, kube::Error::Api(_));
            let gone = matches!(&error, kube::Error::Api(status) if status.code == 404);
            let what = what(None);
            if answered {
                warn!(%error, what = what.label(), "the API server refused a write");
            } else {
                debug!(%error, what = what.label(), "a write failed");
            }
            Done { written: false, gone, what }
        }
        Err(_) => {
            let what = what(None);
            debug!(what = what.label(), "a write timed out");
            Done { written: false, gone: false, what }
        }
    }
}

impl What {
    fn label(&self) -> String {
        match self {
            Self::CreateNode(_) => "GpuMemoryNode".to_owned(),
            Self::Status(_) => "GpuMemoryNode status".to_owned(),
            Self::Create(_, incident) => {
                let (namespace, name) = name_of(incident);
                format!("incident {namespace}/{name}")
            }
            Self::Observe((namespace, name), _) => format!("observation of incident {namespace}/{name}"),
            Self::Probe(_) => "probe".to_owned(),
        }
    }
}

/// Attempts at one thing: one at a time, and later after failures.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attempt {
    in_flight: bool,
    failures: u32,
    not_before: Millis,
}

impl Attempt {
    /// Whether another may start.
    pub(crate) fn ready(&self, now: Millis) -> bool {
        !self.in_flight && now >= self.not_before
    }

    /// One started.
    pub(crate) fn start(&mut self) {
        self.in_flight = true;
    }

    /// It ended: after failures the next waits 0.25 s, doubled each time up to 8 s.
    pub(crate) fn done(&mut self, written: bool, now: Millis) {
        self.in_flight = false;
        if written {
            self.failures = 0;
        } else {
            self.not_before = now.plus(250 << self.failures.min(5));
            self.failures = self.failures.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_do_not_overlap_and_back_off() {
        let mut attempt = Attempt::default();
        assert!(attempt.ready(Millis(0)));
        attempt.start();
        assert!(!attempt.ready(Millis(1000)));
        attempt.done(false, Millis(1000));
        assert!(!attempt.ready(Millis(1249)) && attempt.ready(Millis(1250)));
        attempt.done(false, Millis(2000));
        assert!(!attempt.ready(Millis(2499)) && attempt.ready(Millis(2500)));
        for _ in 0..99 {
            attempt.done(false, Millis(0));
        }
        assert!(attempt.ready(Millis(8000)));
        attempt.done(true, Millis(0));
        attempt.done(false, Millis(0));
        assert!(attempt.ready(Millis(250)));
    }
}
