//! The node's `GpuMemoryNode`: created with an empty plan, status written on change only.

use highwater_crds::{GpuMemoryNode, GpuMemoryNodeStatus, HeadroomBand, StrengthCounts, names::manager};
use highwater_policy::{node_status, time::Millis};
use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::{Attempt, Job};

/// Least time between two writes that say something urgent, in milliseconds.
const URGENT: u64 = 500;
/// Least time between two writes of which the later only counts anew, in milliseconds.
const UNHURRIED: u64 = 10_000;
/// Least time between two creations, in milliseconds.
const CREATE: u64 = 30_000;
/// For so long after a write what the watch shows may be older than that write, in milliseconds.
const ECHO: u64 = 5_000;

/// Creates the object, owned by the Node so that it is collected with it.
pub(super) async fn create(client: &Client, node: &str, owner: &str) -> kube::Result<GpuMemoryNode> {
    let api: Api<GpuMemoryNode> = Api::all(client.clone());
    let patch = json!({
        "apiVersion": GpuMemoryNode::api_version(&()),
        "kind": GpuMemoryNode::kind(&()),
        "metadata": {
            "name": node,
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": owner}],
        },
        "spec": {},
    });
    let params = PatchParams::apply(manager::AGENT_NODE).force();
    api.patch(node, &params, &Patch::Apply(patch)).await.map(stripped)
}

/// Reads the object, if there is one.
pub(super) async fn read(client: &Client, node: &str) -> kube::Result<Option<GpuMemoryNode>> {
    let api: Api<GpuMemoryNode> = Api::all(client.clone());
    Ok(api.get_opt(node).await?.map(stripped))
}

fn stripped(mut object: GpuMemoryNode) -> GpuMemoryNode {
    object.metadata.managed_fields = None;
    object
}

/// Writes the status.
pub(super) async fn write(
    client: &Client,
    node: &str,
    status: &GpuMemoryNodeStatus,
) -> kube::Result<GpuMemoryNode> {
    let api: Api<GpuMemoryNode> = Api::all(client.clone());
    let patch = json!({
        "apiVersion": GpuMemoryNode::api_version(&()),
        "kind": GpuMemoryNode::kind(&()),
        "status": status,
    });
    api.patch_status(node, &PatchParams::apply(manager::AGENT_NODE).force(), &Patch::Apply(patch)).await
}

/// Decides when the status is written.
#[derive(Debug, Default)]
pub(crate) struct NodeWriter {
    stored: Option<GpuMemoryNodeStatus>,
    written_at: Option<Millis>,
    /// What the watch showed last may be older than the last write.
    doubted: bool,
    /// What it showed, if so.
    shown: Option<GpuMemoryNodeStatus>,
    created_at: Option<Millis>,
    attempt: Attempt,
}

impl NodeWriter {
    /// The watch shows this object; `None`: there is none.
    pub(crate) fn seen(&mut self, object: Option<&GpuMemoryNode>, now: Millis) {
        let status = object.and_then(|object| object.status.clone());
        if object.is_none() || self.written_at.is_none_or(|at| now.since(at) > ECHO) {
            self.stored = status;
            self.doubted = false;
        } else {
            self.shown = status;
            self.doubted = true;
        }
    }

    /// What is stored: the base on which conditions keep their times.
    pub(crate) fn stored(&self) -> Option<&GpuMemoryNodeStatus> {
        self.stored.as_ref()
    }

    /// The object does not exist: creates it.
    pub(crate) fn create(&mut self, owner: &str, now: Millis) -> Option<Job> {
        let rests = self.created_at.is_some_and(|at| now.since(at) < CREATE);
        (!rests && self.attempt.ready(now)).then(|| {
            self.attempt.start();
            Job::CreateNode(owner.to_owned())
        })
    }

    /// Writes `status` if it differs from what is stored and it is time.
    pub(crate) fn step(&mut self, status: GpuMemoryNodeStatus, now: Millis) -> Option<Job> {
        if !self.attempt.ready(now) {
            return None;
        }
        // What the watch showed last is no echo of a write so long ago.
        if self.doubted && self.written_at.is_none_or(|at| now.since(at) > ECHO) {
            self.stored = self.shown.take();
            self.doubted = false;
        }
        if let Some(stored) = &self.stored {
            if node_status::same(stored, &status) {
                return None;
            }
            let waits = node_status::same(&urgent(stored), &urgent(&status)) && !loses_room(stored, &status);
            let pause = if waits { UNHURRIED } else { URGENT };
            if self.written_at.is_some_and(|at| now.since(at) < pause) {
                return None;
            }
        }
        self.attempt.start();
        Some(Job::Status(Box::new(status)))
    }

    /// The object was, or was not, created.
    pub(crate) fn created(&mut self, written: bool, now: Millis) {
        self.attempt.done(written, now);
        if written {
            self.created_at = Some(now);
        }
    }

    /// The status was, or was not, written.
    pub(crate) fn written(&mut self, status: GpuMemoryNodeStatus, written: bool, now: Millis) {
        self.attempt.done(written, now);
        if written {
            self.stored = Some(status);
            self.doubted = false;
            self.written_at = Some(now);
        }
    }
}

/// Whether a device or the host has less room than is told, or a device is no longer empty: pods are sent to
/// where there is room, so that must not be old news. More room may wait.
fn loses_room(stored: &GpuMemoryNodeStatus, status: &GpuMemoryNodeStatus) -> bool {
    let (told, is) = (stored.host.unwrap_or_default(), status.host.unwrap_or_default());
    let host = told.cpu_idle.is_some() && told.cpu_idle < is.cpu_idle
        || told.memory.is_some() && told.memory < is.memory
        || told.oom_kills == Some(false) && is.oom_kills == Some(true);
    let devices = stored.devices.iter().zip(&status.devices).any(|(told, is)| {
        let less = told.headroom != HeadroomBand::Unknown && told.headroom < is.headroom;
        less || (told.pods == 0 && is.pods > 0)
    });
    host || devices
}

/// A status without what may wait.
fn urgent(status: &GpuMemoryNodeStatus) -> GpuMemoryNodeStatus {
    let mut status = status.clone();
    status.top_pods.clear();
    status.host = None;
    for device in &mut status.devices {
        device.pods = 0;
        device.over = 0;
        device.headroom = HeadroomBand::Unknown;
        device.strengths = StrengthCounts::default();
        device.overshoot = None;
    }
    status
}

#[cfg(test)]
mod tests {
    use highwater_crds::Level;

    use super::*;

    fn status(level: Level) -> GpuMemoryNodeStatus {
        GpuMemoryNodeStatus { level: Some(level), ..GpuMemoryNodeStatus::default() }
    }

    #[test]
    fn d18_what_is_stored_is_not_written_again() {
        let mut writer = NodeWriter::default();
        assert!(writer.step(status(Level::Normal), Millis(0)).is_some());
        assert!(writer.step(status(Level::Normal), Millis(0)).is_none(), "one at a time");
        writer.written(status(Level::Normal), true, Millis(100));
        for now in [200, 60_000, 6_000_000] {
            assert!(writer.step(status(Level::Normal), Millis(now)).is_none());
        }
        assert!(writer.step(status(Level::Critical), Millis(7_000_000)).is_some());
    }

    #[test]
    fn a_restart_writes_nothing_that_is_there_already() {
        let mut writer = NodeWriter::default();
        let mut object = GpuMemoryNode::new("n", highwater_crds::GpuMemoryNodeSpec::default());
        object.status = Some(status(Level::Normal));
        writer.seen(Some(&object), Millis(0));
        assert!(writer.step(status(Level::Normal), Millis(1)).is_none());
    }

    #[test]
    fn counts_wait_and_levels_do_not() {
        let mut writer = NodeWriter::default();
        writer.written(status(Level::Normal), true, Millis(0));
        let counted = GpuMemoryNodeStatus {
            top_pods: vec![highwater_crds::TopPod {
                namespace: "a".into(),
                name: "b".into(),
                device: "c".into(),
                due: highwater_crds::ByteSize(1),
            }],
            ..status(Level::Normal)
        };
        assert!(writer.step(counted.clone(), Millis(9_999)).is_none());
        assert!(writer.step(counted, Millis(10_000)).is_some());
        writer.created(true, Millis(10_000));
        assert!(writer.step(status(Level::Critical), Millis(10_001)).is_some());
    }

    #[test]
    fn less_room_is_told_at_once_and_more_room_in_time() {
        let with = |headroom, pods| {
            let device = json!({"uuid": "GPU-1", "headroom": headroom, "pods": pods});
            let devices = vec![serde_json::from_value(device).unwrap()];
            GpuMemoryNodeStatus { devices, ..status(Level::Normal) }
        };
        for (told, is, at) in [
            (with(HeadroomBand::Below60, 1), with(HeadroomBand::Below88, 1), 500),
            (with(HeadroomBand::Below60, 0), with(HeadroomBand::Below60, 1), 500),
            (with(HeadroomBand::Below88, 1), with(HeadroomBand::Below60, 1), 10_000),
            (with(HeadroomBand::Below60, 2), with(HeadroomBand::Below60, 1), 10_000),
            (with(HeadroomBand::Unknown, 1), with(HeadroomBand::Full, 1), 10_000),
        ] {
            let mut writer = NodeWriter::default();
            writer.written(told.clone(), true, Millis(0));
            assert!(writer.step(is.clone(), Millis(at - 1)).is_none(), "{told:?} {is:?}");
            assert!(writer.step(is.clone(), Millis(at)).is_some(), "{told:?} {is:?}");
        }
    }

    #[test]
    fn a_host_that_is_short_is_told_at_once_and_what_is_better_or_unknown_in_time() {
        let with = |host| GpuMemoryNodeStatus {
            host: serde_json::from_value(host).unwrap(),
            ..status(Level::Normal)
        };
        let well = json!({"cpuIdle": "Above40", "memory": "Above1200M", "oomKills": false});
        let busy = json!({"cpuIdle": "Below40", "memory": "Above1200M", "oomKills": false});
        let short = json!({"cpuIdle": "Above40", "memory": "Below1200M", "oomKills": false});
        let killing = json!({"cpuIdle": "Above40", "memory": "Above1200M", "oomKills": true});
        for (told, is, at) in [
            (&well, &busy, 500),
            (&well, &short, 500),
            (&well, &killing, 500),
            (&busy, &well, 10_000),
            (&short, &well, 10_000),
            (&killing, &well, 10_000),
            (&well, &json!({"cpuIdle": "Above40"}), 10_000),
            (&json!({"memory": "Above1200M"}), &busy, 10_000),
            (&json!(null), &killing, 10_000),
        ] {
            let mut writer = NodeWriter::default();
            writer.written(with(told.clone()), true, Millis(0));
            assert!(writer.step(with(is.clone()), Millis(at - 1)).is_none(), "{told} {is}");
            assert!(writer.step(with(is.clone()), Millis(at)).is_some(), "{told} {is}");
        }
    }

    #[test]
    fn an_older_echo_of_the_watch_is_not_taken_for_a_change() {
        let mut writer = NodeWriter::default();
        writer.written(status(Level::Critical), true, Millis(0));
        let mut echo = GpuMemoryNode::new("n", highwater_crds::GpuMemoryNodeSpec::default());
        echo.status = Some(status(Level::Normal));
        writer.seen(Some(&echo), Millis(100));
        assert!(writer.step(status(Level::Critical), Millis(600)).is_none());
        writer.seen(Some(&echo), Millis(6_000));
        assert!(writer.step(status(Level::Critical), Millis(6_001)).is_some(), "somebody else changed it");
    }

    #[test]
    fn what_somebody_else_wrote_right_after_is_seen_once_it_can_be_no_echo() {
        let mut writer = NodeWriter::default();
        writer.written(status(Level::Critical), true, Millis(0));
        let mut other = GpuMemoryNode::new("n", highwater_crds::GpuMemoryNodeSpec::default());
        other.status = Some(status(Level::Normal));
        writer.seen(Some(&other), Millis(100));
        assert!(writer.step(status(Level::Critical), Millis(5_000)).is_none());
        assert!(writer.step(status(Level::Critical), Millis(5_001)).is_some());
    }

    #[test]
    fn an_object_that_was_created_is_not_created_again_at_once() {
        let mut writer = NodeWriter::default();
        assert!(writer.create("uid", Millis(0)).is_some());
        writer.created(true, Millis(10));
        assert!(writer.create("uid", Millis(29_000)).is_none());
        assert!(writer.create("uid", Millis(30_010)).is_some());
    }
}
