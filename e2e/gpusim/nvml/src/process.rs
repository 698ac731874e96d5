//! Who uses a device.

use std::ffi::{c_uint, c_ulonglong};
use std::mem::MaybeUninit;

use gpusim::protocol::{Process, ProcessList, Reply, Request};

use crate::code::Code;
use crate::exports;
use crate::session::{Handle, ask};

/// `nvmlProcessInfo_t`, versions 2 and 3 of the lists.
#[repr(C)]
struct ProcessInfo {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlProcessDetail_v1_t`.
#[repr(C)]
struct ProcessDetail {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
    protected: c_ulonglong,
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
struct ProcessDetailList {
    version: c_uint,
    mode: c_uint,
    count: c_uint,
    entries: *mut MaybeUninit<ProcessDetail>,
}

/// NVML_VALUE_NOT_AVAILABLE.
const NOT_AVAILABLE: c_ulonglong = c_ulonglong::MAX;
/// What stands for no instance.
const NO_INSTANCE: c_uint = c_uint::MAX;
/// NVML_STRUCT_VERSION(ProcessDetailList, 1).
const DETAIL_LIST_V1: c_uint = 24 + (1 << 24);
const _: () = assert!(size_of::<ProcessDetailList>() == 24);

exports! {
    /// Processes with a compute context.
    fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: Handle, count: Option<&mut c_uint>, infos: *mut MaybeUninit<ProcessInfo>,
    ) {
        list(device, ProcessList::Compute, count, infos)
    }

    /// Processes with a compute context.
    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: Handle, count: Option<&mut c_uint>, infos: *mut MaybeUninit<ProcessInfo>,
    ) {
        list(device, ProcessList::Compute, count, infos)
    }

    /// Processes with a graphics context.
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(
        device: Handle, count: Option<&mut c_uint>, infos: *mut MaybeUninit<ProcessInfo>,
    ) {
        list(device, ProcessList::Graphics, count, infos)
    }

    /// Processes with a graphics context.
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: Handle, count: Option<&mut c_uint>, infos: *mut MaybeUninit<ProcessInfo>,
    ) {
        list(device, ProcessList::Graphics, count, infos)
    }

    /// Clients of an MPS server.
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
        device: Handle, count: Option<&mut c_uint>, infos: *mut MaybeUninit<ProcessInfo>,
    ) {
        list(device, ProcessList::Mps, count, infos)
    }

    /// Clients of an MPS server.
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: Handle, count: Option<&mut c_uint>, infos: *mut MaybeUninit<ProcessInfo>,
    ) {
        list(device, ProcessList::Mps, count, infos)
    }

    /// Any of the lists, with the bytes under confidential computing: none here.
    fn nvmlDeviceGetRunningProcessDetailList(device: Handle, wanted: Option<&mut ProcessDetailList>) {
        let wanted = wanted.ok_or(Code::InvalidArgument)?;
        if wanted.version != DETAIL_LIST_V1 {
            return Err(Code::ArgumentVersionMismatch);
        }
        let list = match wanted.mode {
            0 => ProcessList::Compute,
            1 => ProcessList::Graphics,
            2 => ProcessList::Mps,
            _ => return Err(Code::InvalidArgument),
        };
        let detail = |process: &Process| {
            let ProcessInfo { pid, used, gpu_instance, compute_instance } = info(process);
            ProcessDetail { pid, used, gpu_instance, compute_instance, protected: 0 }
        };
        // SAFETY: the caller has room for as many entries as the list says, as the interface asks.
        unsafe { put_entries(&read(device, list)?, detail, &mut wanted.count, wanted.entries) }
    }
}

fn list(
    device: Handle,
    list: ProcessList,
    count: Option<&mut c_uint>,
    infos: *mut MaybeUninit<ProcessInfo>,
) -> Result<(), Code> {
    let count = count.ok_or(Code::InvalidArgument)?;
    // SAFETY: the caller has room for `count` entries, as the interface asks.
    unsafe { put_entries(&read(device, list)?, info, count, infos) }
}

fn read(device: Handle, list: ProcessList) -> Result<Vec<Process>, Code> {
    match ask(device, |region| Request::Processes(region, list))? {
        Reply::Processes(processes) => Ok(processes),
        _ => Err(Code::Unknown),
    }
}

fn info(process: &Process) -> ProcessInfo {
    let (gpu_instance, compute_instance) = process.instance.unwrap_or((NO_INSTANCE, NO_INSTANCE));
    ProcessInfo {
        pid: process.pid,
        used: process.bytes.unwrap_or(NOT_AVAILABLE),
        gpu_instance,
        compute_instance,
    }
}

/// Writes the entries, and their number to `count`; only the number where there is too little room.
///
/// # Safety
/// `places` is null or has room for `count` entries.
unsafe fn put_entries<T>(
    processes: &[Process],
    entry: impl Fn(&Process) -> T,
    count: &mut c_uint,
    places: *mut MaybeUninit<T>,
) -> Result<(), Code> {
    let room = usize::try_from(*count).map_err(|_| Code::InvalidArgument)?;
    *count = c_uint::try_from(processes.len()).map_err(|_| Code::Unknown)?;
    if processes.len() > room {
        return Err(Code::InsufficientSize);
    }
    if processes.is_empty() {
        return Ok(());
    }
    if places.is_null() {
        return Err(Code::InvalidArgument);
    }
    // SAFETY: there is room for that many entries, by this function's contract.
    let places = unsafe { std::slice::from_raw_parts_mut(places, room) };
    for (place, process) in places.iter_mut().zip(processes) {
        place.write(entry(process));
    }
    Ok(())
}
