//! The agent's side of the guard: the socket in each guarded pod, its pages, and who is connected.
//!
//! A thread of its own serves all pods, so that whatever a pod does to its socket, sampling and the
//! agent's loop go on. The loop decides: it gives the thread [`Order`]s and hears [`News`].

mod bucket;
mod pages;
mod peer;
mod place;
mod server;

use std::sync::Arc;

use highwater_guard_abi::wire::ToGuard;

pub(crate) use pages::{Pages, Refusal, devices};
pub(crate) use peer::{Peer, of_pid};
pub(crate) use server::{Guards, Settings};

/// What the loop asks of the thread. Pods are named by the UID that the kubelet knows.
#[derive(Debug)]
pub(crate) enum Order {
    /// Serves a pod. `resumed`: its pages were an earlier agent's.
    Serve {
        /// The pod.
        pod: Arc<str>,
        /// Its pages, which say what it may have.
        pages: Arc<Pages>,
        /// They are those of an earlier agent, whose connections are gone.
        resumed: bool,
    },
    /// Serves a pod no longer: it is gone.
    Leave {
        /// The pod.
        pod: Arc<str>,
    },
    /// Says something to a guard.
    Tell {
        /// Its connection.
        connection: u64,
        /// What.
        what: ToGuard,
    },
    /// Has every guard of a pod trim the driver's pools, at their next call of the driver. Nobody answers.
    Trim {
        /// The pod.
        pod: Arc<str>,
        /// Ordinal of the device.
        device: u32,
    },
    /// Corrects what is charged to a slot, in bytes, in place of an earlier correction.
    Correct {
        /// The pod.
        pod: Arc<str>,
        /// The process that has the slot; 0 for the pod as a whole.
        pid: u32,
        /// The slot; 0 for the pod as a whole.
        slot: usize,
        /// Ordinal of the device.
        device: usize,
        /// More, or less, than its owner charged.
        bytes: i64,
    },
    /// Looks what kind of process it is that holds memory outside the guard.
    Inspect {
        /// The pod.
        pod: Arc<str>,
        /// The process.
        pid: u32,
    },
}

/// What the thread has to say.
#[derive(Debug)]
pub(crate) enum News {
    /// A process of the pod has a slot.
    Joined {
        /// The pod.
        pod: Arc<str>,
        /// The process.
        pid: u32,
        /// Its slot.
        slot: usize,
        /// Its command name.
        comm: Box<str>,
    },
    /// A slot was given back: its process ended, or runs another program now.
    Left {
        /// The pod.
        pod: Arc<str>,
        /// The process.
        pid: u32,
        /// The slot.
        slot: usize,
    },
    /// A guard asks that its pod may have more.
    Wants(Want),
    /// A connection is gone: no answer is waited for any more.
    Gone {
        /// The connection.
        connection: u64,
    },
    /// What weakens the guard in a process, as `STRENGTH_*` bits.
    Weakness {
        /// The pod.
        pod: Arc<str>,
        /// The process.
        pid: u32,
        /// The bits.
        flags: u32,
    },
    /// A process of another pod, or of none, came to the pod's socket and was turned away.
    Stranger {
        /// The pod whose socket it is.
        pod: Arc<str>,
        /// The process.
        pid: u32,
        /// Its command name.
        comm: Box<str>,
    },
    /// The guard in a process speaks no version that is spoken here.
    Incompatible {
        /// The pod.
        pod: Arc<str>,
        /// The process.
        pid: u32,
    },
    /// Somebody in the pod sent what is no frame of a guard, and was cut off.
    Garbage {
        /// The pod.
        pod: Arc<str>,
    },
    /// What was found of a process that holds memory outside the guard.
    Inspected {
        /// The pod.
        pod: Arc<str>,
        /// The process.
        pid: u32,
        /// Its command name.
        comm: Box<str>,
        /// It runs in another root than its container.
        other_root: bool,
    },
}

/// A guard asks that its pod may have more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Want {
    /// The pod.
    pub(crate) pod: Arc<str>,
    /// The connection.
    pub(crate) connection: u64,
    /// Ordinal of the device.
    pub(crate) device: u32,
    /// What the guard knows the question by.
    pub(crate) ticket: u32,
    /// What the pod would have charged in total, in bytes.
    pub(crate) bytes: u64,
    /// How long the guard would wait, in milliseconds.
    pub(crate) wait: u64,
}
