//! What tests of the engine are made of.

use highwater_gpu::{DeviceInfo, Kinds, Partition, Process, Reading};
use highwater_policy::{
    ledger::{Charge, Holder},
    pod::{Owner, PodFacts},
};
use serde_json::{Value, json};

use super::*;
use crate::world::Change;

pub(super) const GI: u64 = ByteSize::GI;
pub(super) const MI: u64 = ByteSize::MI;
/// Memory of each device.
pub(super) const TOTAL: u64 = 80 * GI;

pub(super) fn pod(name: &str) -> PodFacts {
    PodFacts {
        namespace: "team".into(),
        name: name.into(),
        uid: name.into(),
        owner: Some(Owner {
            api_version: "apps/v1".into(),
            kind: "ReplicaSet".into(),
            name: "rs".into(),
            uid: "rs".into(),
        }),
        ..PodFacts::default()
    }
}

pub(super) fn device(uuid: &str, index: u32) -> DeviceInfo {
    DeviceInfo {
        uuid: uuid.into(),
        index,
        minor: None,
        product: "NVIDIA H200".into(),
        partition: Partition::Whole,
        total: Some(TOTAL),
    }
}

/// The node's object with a plan of these layers.
pub(super) fn object(layers: &Value, generation: i64) -> GpuMemoryNode {
    let spec = serde_json::from_value(json!({"planLifeSeconds": 600, "layers": layers})).unwrap();
    let mut object = GpuMemoryNode::new("n1", spec);
    object.metadata.generation = Some(generation);
    object
}

/// All that there is.
pub(super) fn reset<T, const N: usize>(items: [T; N]) -> Change<T> {
    Change::Reset { items: items.into(), complete: true }
}

/// A process of a pod.
pub(super) fn charge(pod: &str, pid: u32, bytes: u64) -> Charge {
    let holder = Holder::Container { pod: pod.into(), container: None };
    Charge { pid, bytes: Some(bytes), holder }
}

/// A device on which this is listed, and so much is used besides.
pub(super) fn sampled(uuid: &str, charges: Vec<Charge>, besides: u64) -> Sampled {
    let used = charges.iter().filter_map(|charge| charge.bytes).sum::<u64>() + besides;
    let processes = charges.iter().map(|c| Process { pid: c.pid, bytes: c.bytes, kinds: Kinds::default() });
    let reading = Reading {
        total: Some(TOTAL),
        used: Some(used),
        free: Some(TOTAL - used),
        reserved: Some(0),
        processes: Some(processes.collect()),
        ..Reading::default()
    };
    Sampled { uuid: uuid.into(), reading, charges: Some(charges) }
}
