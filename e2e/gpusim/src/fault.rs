//! What can be wrong with a device, on demand.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::protocol::{CheckpointStep, ProcessList, Region};
use crate::size::Bytes;

/// A fault in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fault {
    /// Where: a device, or one MIG instance of it.
    pub region: Region,
    /// What.
    pub kind: FaultKind,
}

/// The kinds of faults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum FaultKind {
    /// The process lists give no number of bytes: for one process, or for all.
    MissingProcessMemory {
        /// Host PID.
        pid: Option<u32>,
    },
    /// The device's memory cannot be read.
    MissingMemory,
    /// The device has fallen off the bus: every call about it fails.
    Lost,
    /// Every call about the device takes this much longer.
    Slow {
        /// Milliseconds.
        milliseconds: u64,
    },
    /// A living process, which never spoke to the simulator, holds memory.
    Foreign {
        /// Host PID.
        pid: u32,
        /// How much.
        bytes: Bytes,
        /// The list that shows it.
        list: ProcessList,
    },
    /// A process that is gone is still listed with memory.
    Zombie {
        /// The host PID that it had.
        pid: u32,
        /// How much.
        bytes: Bytes,
    },
    /// Memory is in use and no list shows a process for it.
    Unexplained {
        /// How much.
        bytes: Bytes,
    },
    /// Every second read of the device's memory shows more than the one before it.
    Torn {
        /// How much more.
        bytes: Bytes,
        /// How many of those reads show more before the fault ends; without end if absent.
        reads: Option<u32>,
        /// Whether the next read shows more.
        #[serde(default)]
        raised: bool,
    },
    /// Memory of processes that die from now on never comes back.
    Stuck {
        /// The dead process stays in the lists.
        listed: bool,
    },
    /// A step of checkpoints fails, for every process that has the device open.
    Checkpoint {
        /// The step.
        step: CheckpointStep,
        /// The process is lost by it.
        loses: bool,
    },
}

impl FaultKind {
    /// The name by which `gpusim ctl` knows the kind.
    pub fn name(&self) -> &'static str {
        match self {
            Self::MissingProcessMemory { .. } => "missing-process-memory",
            Self::MissingMemory => "missing-memory",
            Self::Lost => "lost",
            Self::Slow { .. } => "slow",
            Self::Foreign { .. } => "foreign",
            Self::Zombie { .. } => "zombie",
            Self::Unexplained { .. } => "unexplained",
            Self::Torn { .. } => "torn",
            Self::Stuck { .. } => "stuck",
            Self::Checkpoint { .. } => "checkpoint",
        }
    }

    /// Bytes that the fault itself keeps in use.
    pub(crate) fn held(&self) -> u64 {
        match self {
            Self::Foreign { bytes, .. } | Self::Zombie { bytes, .. } | Self::Unexplained { bytes } => bytes.0,
            _ => 0,
        }
    }

    /// The process that the lists show for those bytes.
    pub(crate) fn listed(&self) -> Option<(u32, ProcessList)> {
        match self {
            Self::Foreign { pid, list, .. } => Some((*pid, *list)),
            Self::Zombie { pid, .. } => Some((*pid, ProcessList::Compute)),
            _ => None,
        }
    }

    /// The bytes that this read of the device's memory shows too much. A fault whose last read
    /// this was says so by `reads: Some(0)`.
    pub(crate) fn tear(&mut self) -> u64 {
        let Self::Torn { bytes, reads, raised } = self else { return 0 };
        let shown = *raised && *reads != Some(0);
        *raised = !*raised;
        if !shown {
            return 0;
        }
        *reads = reads.map(|left| left.saturating_sub(1));
        bytes.0
    }

    /// Whether a read differs from the one before it, or is to last.
    pub(crate) fn unsettles(&self) -> bool {
        match self {
            Self::Slow { .. } | Self::Torn { .. } => true,
            Self::MissingProcessMemory { .. }
            | Self::MissingMemory
            | Self::Lost
            | Self::Foreign { .. }
            | Self::Zombie { .. }
            | Self::Unexplained { .. }
            | Self::Stuck { .. }
            | Self::Checkpoint { .. } => false,
        }
    }

    /// The extra time of a call.
    pub(crate) fn delay(&self) -> Duration {
        match self {
            Self::Slow { milliseconds } => Duration::from_millis(*milliseconds),
            _ => Duration::ZERO,
        }
    }
}
