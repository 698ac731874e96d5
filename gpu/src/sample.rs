//! One look at a device: memory, processes, memory again.

use std::{
    fmt,
    time::{Duration, Instant},
};

use nvml_wrapper::error::nvml_try;
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlMemory_v2_t, nvmlProcessInfo_t, nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE,
    nvmlReturn_t,
};

use crate::{
    CallError, Driver, ErrorClass, Kinds, Process,
    processes::{NO_BYTES, merge},
};

/// How often a torn sample is taken again before it is handed out as it is.
pub const MAX_RETAKES: u32 = 3;

/// A change during a sample that is never held against it: one allocation of the driver's.
const SLACK_BYTES: u64 = 2 << 20;

/// The shortest time over which a pace of growth is taken. Samples follow each other within a few
/// milliseconds when memory changes hands: one allocation between two of those is no pace at which
/// it would go on, and would explain another of its size away.
const PACE_SECONDS: f64 = 0.1;

/// How many of the lists are empty on most devices for good: those of graphics and of MPS. While
/// one is, it is asked for once in [`RARE_EVERY`]; until then a first process there is unexplained.
const RARE: usize = 2;

/// See [`RARE`].
const RARE_EVERY: Duration = Duration::from_secs(1);

/// Room for processes at first; a list that needs more makes it grow.
const FIRST_ROOM: usize = 32;

/// Room for processes at most: a count from a broken driver must not take the node's memory.
const MOST_ROOM: usize = 1 << 16;

/// A device to sample. Keeps what is worth keeping between samples: the driver's handle, which
/// is asked for again whenever it went bad, and room for the process lists.
pub struct Device {
    uuid: String,
    handle: Option<Handle>,
    room: Vec<nvmlProcessInfo_t>,
    last_used: Option<(u64, Instant)>,
    /// When each of the [`RARE`] lists was last found empty.
    empty: [Option<Instant>; RARE],
}

/// A handle of the driver, good for one opening of it.
#[derive(Clone, Copy)]
struct Handle {
    raw: nvmlDevice_t,
    session: u64,
    /// The GPU instance, where the device is a MIG instance.
    instance: Option<u32>,
}

// SAFETY: NVML's handles are not bound to a thread, and its calls may be made from any.
unsafe impl Send for Handle {}

/// What the driver said of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Bytes of the device.
    pub total: Option<u64>,
    /// Bytes in use, the reserved ones excepted.
    pub used: Option<u64>,
    /// Bytes free.
    pub free: Option<u64>,
    /// Bytes that the driver keeps for itself.
    pub reserved: Option<u64>,
    /// The processes that use the device, once each; `None` where the driver does not say.
    pub processes: Option<Vec<Process>>,
    /// Memory in use changed while the processes were listed, by more than growth explains and
    /// at every attempt: the numbers may not fit together.
    pub torn: bool,
    /// How often the sample was taken again, at most [`MAX_RETAKES`].
    pub retakes: u32,
    /// What the driver refused to say, a call each.
    pub errors: Vec<CallError>,
}

impl Reading {
    /// Whether the driver reports the device as lost.
    pub fn lost(&self) -> bool {
        self.errors.iter().any(|error| error.class == ErrorClass::Lost)
    }
}

impl Device {
    /// The device with the UUID that [`Driver::inventory`] gave. Nothing is asked of the driver
    /// before the first sample.
    pub fn new(uuid: impl Into<String>) -> Self {
        Self { uuid: uuid.into(), handle: None, room: Vec::new(), last_used: None, empty: [None; RARE] }
    }

    /// The UUID.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// What memory in use may change by within `seconds`, given how it grew since the last
    /// sample.
    fn explained_by_growth(&self, used: u64, now: Instant, seconds: f64) -> u64 {
        self.last_used.map_or(SLACK_BYTES, |(last, at)| {
            allowance(last.abs_diff(used), now.duration_since(at).as_secs_f64(), seconds)
        })
    }
}

impl Driver {
    /// Takes a sample of the device: three to five calls, each some ten microseconds on real
    /// hardware.
    /// Never fails as a whole: what is missing is `None`, and [`Reading::errors`] says why.
    pub fn sample(&self, device: &mut Device) -> Reading {
        let mut reading = self.take(device);
        for retake in 1..=MAX_RETAKES {
            if !reading.torn {
                break;
            }
            reading = Reading { retakes: retake, ..self.take(device) };
        }
        device.last_used = reading.used.map(|used| (used, Instant::now()));
        if reading.errors.iter().any(|error| error.class.spoils_handle()) {
            device.handle = None;
            device.empty = [None; RARE];
        }
        reading
    }

    /// One attempt.
    fn take(&self, device: &mut Device) -> Reading {
        let mut reading = Reading::default();
        let handle = match self.handle(device) {
            Ok(handle) => handle,
            Err(error) => {
                reading.errors.push(error);
                return reading;
            }
        };
        let started = Instant::now();
        let before = self.memory(handle);
        if let Err(error) = before
            && error.class.spoils_handle()
        {
            reading.errors.push(error);
            return reading;
        }
        match self.processes(handle, &mut device.room, &mut device.empty) {
            Ok(processes) => reading.processes = Some(processes),
            Err(error) => reading.errors.push(error),
        }
        // What cannot be read once is not asked again.
        match before.and_then(|before| Ok((before, self.memory(handle)?))) {
            Ok((before, after)) => {
                let some = |bytes| Some(bytes).filter(|&bytes| bytes != NO_BYTES);
                reading.total = some(after.total);
                reading.used = some(after.used);
                reading.free = some(after.free);
                reading.reserved = some(after.reserved);
                if let (Some(before), Some(after)) = (some(before.used), reading.used) {
                    let now = Instant::now();
                    let span = now.duration_since(started).as_secs_f64();
                    reading.torn = before.abs_diff(after) > device.explained_by_growth(before, now, span);
                }
            }
            Err(error) => reading.errors.push(error),
        }
        reading
    }

    /// The device's handle in this session.
    fn handle(&self, device: &mut Device) -> Result<Handle, CallError> {
        if let Some(handle) = device.handle
            && handle.session == self.session()
        {
            return Ok(handle);
        }
        let found = self
            .nvml()
            .device_by_uuid(device.uuid.as_str())
            .map_err(|e| CallError::new("device by UUID", e))?;
        let instance = match found.mig_is_mig_device_handle() {
            Ok(true) => Some(self.instance_ids(&found)?.0),
            _ => None,
        };
        // SAFETY: the handle is used with this session of the library only: each use goes through
        // this function.
        let handle = Handle { raw: unsafe { found.handle() }, session: self.session(), instance };
        device.handle = Some(handle);
        Ok(handle)
    }

    fn memory(&self, handle: Handle) -> Result<nvmlMemory_v2_t, CallError> {
        const CALL: &str = "memory info";
        // The size and version of the structure, in the form that the driver asks for.
        #[allow(clippy::cast_possible_truncation)] // 40 bytes
        const VERSION: u32 = size_of::<nvmlMemory_v2_t>() as u32 | 2 << 24;
        let symbol = self.nvml().lib().nvmlDeviceGetMemoryInfo_v2.as_ref();
        let function = symbol.map_err(|_| CallError::new(CALL, ErrorClass::NotSupported))?;
        let mut memory = nvmlMemory_v2_t { version: VERSION, total: 0, reserved: 0, free: 0, used: 0 };
        // SAFETY: the handle is of this session and `memory` is of the stated version.
        let code = unsafe { function(handle.raw, &raw mut memory) };
        nvml_try(code).map(|()| memory).map_err(|e| CallError::new(CALL, e))
    }

    /// The device's processes, from all lists.
    ///
    /// The list of compute processes is asked for at every sample: where a pool holds what nobody has, memory
    /// in use stays the same to the byte while who has it changes.
    fn processes(
        &self,
        handle: Handle,
        room: &mut Vec<nvmlProcessInfo_t>,
        empty: &mut [Option<Instant>; RARE],
    ) -> Result<Vec<Process>, CallError> {
        let lib = self.nvml().lib();
        let refused = |call| move |class| CallError { call, class };
        let compute = lib.nvmlDeviceGetComputeRunningProcesses_v3.as_ref().ok();
        let mut processes = Vec::new();
        let entries = list(compute, handle, room).map_err(refused("compute processes"))?;
        merge(&mut processes, entries, Kinds::COMPUTE, handle.instance);
        let rare = [
            ("graphics processes", Kinds::GRAPHICS, &lib.nvmlDeviceGetGraphicsRunningProcesses_v3),
            ("MPS processes", Kinds::MPS, &lib.nvmlDeviceGetMPSComputeRunningProcesses_v3),
        ];
        for ((call, kind, symbol), empty) in rare.into_iter().zip(empty) {
            if empty.is_some_and(|at| at.elapsed() < RARE_EVERY) {
                continue;
            }
            let entries = match list(symbol.as_ref().ok(), handle, room) {
                // A device without graphics or MPS has no such processes.
                Err(ErrorClass::NotSupported) => &[],
                entries => entries.map_err(refused(call))?,
            };
            merge(&mut processes, entries, kind, handle.instance);
            *empty = entries.is_empty().then(Instant::now);
        }
        Ok(processes)
    }
}

/// A call that lists processes.
type List = unsafe extern "C" fn(nvmlDevice_t, *mut u32, *mut nvmlProcessInfo_t) -> nvmlReturn_t;

/// Makes the call, with more room for as long as it asks for more: processes may start between
/// two attempts.
fn list<'a>(
    function: Option<&List>,
    handle: Handle,
    room: &'a mut Vec<nvmlProcessInfo_t>,
) -> Result<&'a [nvmlProcessInfo_t], ErrorClass> {
    const EMPTY: nvmlProcessInfo_t =
        nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
    let function = function.ok_or(ErrorClass::NotSupported)?;
    let mut wanted = room.len().max(FIRST_ROOM);
    for _ in 0..5 {
        room.resize(wanted, EMPTY);
        let mut count = u32::try_from(room.len()).unwrap_or(u32::MAX);
        // SAFETY: the handle is of the open session, and `room` holds `count` entries.
        let code = unsafe { function(handle.raw, &raw mut count, room.as_mut_ptr()) };
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if code == nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE {
            wanted = count.max(wanted).saturating_add(FIRST_ROOM).min(MOST_ROOM);
            continue;
        }
        nvml_try(code).map_err(ErrorClass::from)?;
        return Ok(room.get(..count).unwrap_or(room));
    }
    Err(ErrorClass::Other)
}

/// How far memory in use may move within `span` seconds if it goes on as it did: by `moved`
/// bytes in `since` seconds, or in [`PACE_SECONDS`] where that is longer.
fn allowance(moved: u64, since: f64, span: f64) -> u64 {
    // Precision does not matter here, and the conversion back saturates.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let growth = (moved as f64 / since.max(PACE_SECONDS) * span) as u64;
    growth.saturating_add(SLACK_BYTES)
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("uuid", &self.uuid)
            .field("open", &self.handle.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_allocation_just_before_explains_no_other() {
        // A pool gave out a gibibyte two milliseconds ago; a context comes within the sample.
        assert!(allowance(1 << 30, 0.002, 0.001) < 64 << 20);
        assert_eq!(allowance(1 << 30, 0.002, 0.001), allowance(1 << 30, 0.1, 0.001));
    }

    #[test]
    fn at_rest_only_one_small_allocation_is_explained() {
        assert_eq!(allowance(0, 0.1, 0.0001), SLACK_BYTES);
        assert_eq!(Device::new("u").explained_by_growth(1 << 30, Instant::now(), 1.0), SLACK_BYTES);
    }

    #[test]
    fn growth_explains_its_share_of_the_time_and_no_more() {
        // 10 GiB in 0.1 s is 10 MiB in 0.1 ms.
        let allowed = allowance(10 << 30, 0.1, 0.0001) - SLACK_BYTES;
        assert!(allowed.abs_diff(10 << 30 >> 10) < 1 << 20, "{allowed}");
        assert!(allowance(10 << 30, 0.1, 0.0001) < 1 << 30);
    }

    #[test]
    fn absurd_numbers_saturate() {
        assert_eq!(allowance(u64::MAX, f64::MIN_POSITIVE, f64::MAX), u64::MAX);
        assert_eq!(allowance(u64::MAX, 0.0, 0.0), SLACK_BYTES);
    }

    #[test]
    fn a_list_that_outgrows_its_room_is_asked_for_again() {
        unsafe extern "C" fn forty(_: nvmlDevice_t, count: *mut u32, out: *mut nvmlProcessInfo_t) -> u32 {
            // SAFETY: the caller passes a count and that many entries.
            unsafe {
                let room = *count;
                *count = 40;
                if room < 40 {
                    return nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
                }
                for i in 0..40 {
                    (*out.add(i as usize)).pid = i + 1;
                }
            }
            0
        }
        unsafe extern "C" fn insatiable(_: nvmlDevice_t, count: *mut u32, _: *mut nvmlProcessInfo_t) -> u32 {
            // SAFETY: the caller passes a count.
            unsafe { *count = u32::MAX };
            nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE
        }
        let handle = Handle { raw: std::ptr::null_mut(), session: 0, instance: None };
        let mut room = Vec::new();
        let pids: Vec<_> =
            list(Some(&(forty as List)), handle, &mut room).unwrap().iter().map(|p| p.pid).collect();
        assert_eq!(pids, (1..=40).collect::<Vec<_>>());
        assert_eq!(list(Some(&(insatiable as List)), handle, &mut room).unwrap_err(), ErrorClass::Other);
        assert!(room.len() <= MOST_ROOM);
    }
}
