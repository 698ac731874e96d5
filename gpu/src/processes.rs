//! Which processes use a device: the driver's lists, merged.

use nvml_wrapper_sys::bindings::nvmlProcessInfo_t as Entry;

/// The driver's "no value" in a field of 64 bits.
pub(crate) const NO_BYTES: u64 = u64::MAX;
/// The driver's "no value" in an instance id.
const NO_INSTANCE: u32 = u32::MAX;

/// A process that uses a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its PID in the PID namespace of the caller.
    pub pid: u32,
    /// Bytes that the driver charges to it, contexts included; managed memory is not. `None`
    /// where the driver does not say.
    pub bytes: Option<u64>,
    /// The lists in which it was found.
    pub kinds: Kinds,
}

/// The driver's lists of processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds {
    /// Has a compute context.
    pub compute: bool,
    /// Has a graphics context.
    pub graphics: bool,
    /// Is a client of the Multi-Process Service.
    pub mps: bool,
}

impl Kinds {
    pub(crate) const COMPUTE: Self = Self { compute: true, graphics: false, mps: false };
    pub(crate) const GRAPHICS: Self = Self { compute: false, graphics: true, mps: false };
    pub(crate) const MPS: Self = Self { compute: false, graphics: false, mps: true };

    fn or(self, other: Self) -> Self {
        Self {
            compute: self.compute || other.compute,
            graphics: self.graphics || other.graphics,
            mps: self.mps || other.mps,
        }
    }
}

/// Adds one of the driver's lists to `processes`.
///
/// Each list names a process with all of its memory, whatever the kind: a process found twice
/// counts once, with the larger number. Entries of another GPU instance than `instance` are left
/// out, and so is PID 0, which stands for a process outside the caller's PID namespace: its
/// bytes stay unexplained.
pub(crate) fn merge(processes: &mut Vec<Process>, list: &[Entry], kind: Kinds, instance: Option<u32>) {
    for entry in list {
        let elsewhere = instance.is_some_and(|own| ![own, NO_INSTANCE].contains(&entry.gpuInstanceId));
        if entry.pid == 0 || elsewhere {
            continue;
        }
        let bytes = Some(entry.usedGpuMemory).filter(|&bytes| bytes != NO_BYTES);
        match processes.iter_mut().find(|process| process.pid == entry.pid) {
            Some(known) => {
                known.bytes = known.bytes.max(bytes);
                known.kinds = known.kinds.or(kind);
            }
            None => processes.push(Process { pid: entry.pid, bytes, kinds: kind }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(pid: u32, bytes: u64, instance: u32) -> Entry {
        Entry { pid, usedGpuMemory: bytes, gpuInstanceId: instance, computeInstanceId: NO_INSTANCE }
    }

    #[test]
    fn a_process_in_several_lists_counts_once_with_the_larger_number() {
        let mut processes = Vec::new();
        merge(&mut processes, &[entry(7, 100, NO_INSTANCE), entry(8, 5, NO_INSTANCE)], Kinds::COMPUTE, None);
        merge(&mut processes, &[entry(7, 120, NO_INSTANCE)], Kinds::GRAPHICS, None);
        merge(&mut processes, &[entry(8, NO_BYTES, NO_INSTANCE)], Kinds::MPS, None);
        assert_eq!(
            processes,
            [
                Process {
                    pid: 7,
                    bytes: Some(120),
                    kinds: Kinds { compute: true, graphics: true, mps: false }
                },
                Process {
                    pid: 8,
                    bytes: Some(5),
                    kinds: Kinds { compute: true, graphics: false, mps: true }
                },
            ]
        );
    }

    #[test]
    fn a_number_not_given_is_missing_not_zero() {
        let mut processes = Vec::new();
        merge(
            &mut processes,
            &[entry(7, NO_BYTES, NO_INSTANCE), entry(9, 0, NO_INSTANCE)],
            Kinds::COMPUTE,
            None,
        );
        assert_eq!(processes.iter().map(|p| p.bytes).collect::<Vec<_>>(), [None, Some(0)]);
    }

    #[test]
    fn only_the_processes_of_the_own_instance_count() {
        let mut processes = Vec::new();
        let list = [entry(1, 10, 7), entry(2, 20, 8), entry(3, 30, NO_INSTANCE)];
        merge(&mut processes, &list, Kinds::COMPUTE, Some(7));
        assert_eq!(processes.iter().map(|p| p.pid).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn a_process_that_cannot_be_named_is_left_to_the_residual() {
        let mut processes = Vec::new();
        merge(&mut processes, &[entry(0, 10, NO_INSTANCE)], Kinds::COMPUTE, None);
        assert_eq!(processes, []);
    }
}
