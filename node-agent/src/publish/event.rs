//! Events on pods.

use std::{sync::Arc, time::Duration};

use highwater_crds::names;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tracing::{debug, warn};

use super::LIMIT;
use crate::world::Pod;

/// Events that may wait for the API server.
const WAITING: usize = 64;
/// How often one is tried.
const ATTEMPTS: u32 = 60;
/// Between two attempts.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Something to tell about a pod.
#[derive(Debug)]
pub(crate) struct Notice {
    type_: EventType,
    regarding: ObjectReference,
    reason: &'static str,
    action: &'static str,
    note: String,
}

impl Notice {
    /// A warning.
    pub(crate) fn warning(pod: &Arc<Pod>, reason: &'static str, action: &'static str, note: String) -> Self {
        Self::new(EventType::Warning, pod, reason, action, note)
    }

    /// Something that is as it should be.
    pub(crate) fn normal(pod: &Arc<Pod>, reason: &'static str, action: &'static str, note: String) -> Self {
        Self::new(EventType::Normal, pod, reason, action, note)
    }

    fn new(
        type_: EventType,
        pod: &Arc<Pod>,
        reason: &'static str,
        action: &'static str,
        note: String,
    ) -> Self {
        let regarding = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.facts.namespace.clone()),
            name: Some(pod.facts.name.clone()),
            uid: Some(pod.uid.to_string()),
            ..ObjectReference::default()
        };
        Self { type_, regarding, reason, action, note }
    }
}

/// Starts to write Events; the returned end takes them.
pub(super) fn start(client: Client, node: &str) -> mpsc::Sender<Notice> {
    let (send, mut receive) = mpsc::channel::<Notice>(WAITING);
    let reporter = Reporter {
        controller: names::AGENT_COMPONENT.to_owned(),
        instance: Some(node.chars().take(128).collect()),
    };
    let recorder = Recorder::new(client, reporter);
    tokio::spawn(async move {
        while let Some(notice) = receive.recv().await {
            tell(&recorder, &notice).await;
        }
    });
    send
}

async fn tell(recorder: &Recorder, notice: &Notice) {
    let event = Event {
        type_: notice.type_,
        reason: notice.reason.to_owned(),
        note: Some(notice.note.chars().take(1000).collect()),
        action: notice.action.to_owned(),
        secondary: None,
    };
    for _ in 0..ATTEMPTS {
        match timeout(LIMIT, recorder.publish(&event, &notice.regarding)).await {
            Ok(Ok(())) => return,
            // The API server will say the same again.
            Ok(Err(error @ kube::Error::Api(_))) => {
                warn!(%error, reason = notice.reason, "the API server refused an Event");
                return;
            }
            Ok(Err(error)) => debug!(%error, reason = notice.reason, "cannot write an Event yet"),
            Err(_) => debug!(reason = notice.reason, "writing an Event timed out"),
        }
        sleep(AGAIN_AFTER).await;
    }
}
