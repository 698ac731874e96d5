//! What is said of parking: moving the device memory of a pod's processes to the host, and back.
//!
//! The messages came after [`super::VERSION`] 1 and change nothing of it: a keeper that knows them
//! says so by [`super::Status::parking`], and is asked only then.

use serde::{Deserialize, Serialize};

/// Most processes of a pod that are parked together.
pub(crate) const MOST_PROCESSES: usize = 16;
/// Most parks of a node at a time, so that all of them fit the status.
pub(crate) const MOST_PARKS: usize = 32;
/// Longest text of [`Park::message`] and [`Moved::message`], in bytes.
pub(crate) const LONGEST_MESSAGE: usize = 256;

/// A process, told apart from later ones of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Process {
    /// Its number in the host's PID namespace.
    pub(crate) pid: i32,
    /// When it started, in clock ticks since boot: field 22 of `/proc/PID/stat`.
    pub(crate) started: u64,
}

/// What is to be parked: every process of a pod on a device, or none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ParkAsk {
    /// UID of the pod.
    pub(crate) pod: String,
    /// UUID of the device.
    pub(crate) device: String,
    /// The pod's processes there: between 1 and [`MOST_PROCESSES`].
    pub(crate) processes: Vec<Process>,
    /// How much of the device they have, in bytes. The keeper repeats it as [`Park::bytes`].
    pub(crate) bytes: u64,
    /// How long the driver may wait for each process to be between two calls, in milliseconds.
    pub(crate) lock_milliseconds: u32,
}

/// How far a park is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum ParkState {
    /// Every process runs as before. Never listed in [`Parking::parks`].
    Running,
    /// Memory is on its way to the host, or back after that failed.
    Parking,
    /// At least one process is on the host, and nothing is under way.
    Parked,
    /// Memory is on its way back.
    Restoring,
    /// The driver lost a process: its memory is in no usable state, here or there. Only the end of
    /// the processes ends this: the pod has to be restarted.
    Lost,
    /// A state that this version does not know.
    #[serde(other)]
    Other,
}

/// A pod whose memory on a device is parked, or under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Park {
    /// UID of the pod.
    pub(crate) pod: String,
    /// UUID of the device.
    pub(crate) device: String,
    /// [`ParkAsk::bytes`].
    pub(crate) bytes: u64,
    /// How far it is.
    pub(crate) state: ParkState,
    /// When it was asked for, in milliseconds since the epoch.
    pub(crate) since: u64,
    /// Why it is not further: what the last attempt met with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<String>,
}

/// What a keeper says of parking.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Parking {
    /// Why nothing can be parked on this node. `None`: as far as is known, it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unable: Option<String>,
    /// What is parked or under way, in the order of pods and devices. A pod that is not here runs.
    #[serde(default)]
    pub(crate) parks: Vec<Park>,
}

impl Parking {
    /// The park of a pod on a device.
    pub(crate) fn find(&self, pod: &str, device: &str) -> Option<&Park> {
        self.parks.iter().find(|park| park.pod == pod && park.device == device)
    }
}

/// What parking or restoring came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Moved {
    /// Where the pod's processes are now: [`ParkState::Parked`], [`ParkState::Running`] or
    /// [`ParkState::Lost`].
    pub(crate) state: ParkState,
    /// Why it is not what was asked for, in a sentence; `None` if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<String>,
    /// How long it took.
    pub(crate) milliseconds: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_whatever_a_newer_keeper_says() {
        let read = |text: &str| serde_json::from_str::<ParkState>(text).unwrap();
        assert_eq!(read("\"parked\""), ParkState::Parked);
        assert_eq!(read("\"frozenSolid\""), ParkState::Other);
    }
}
