//! How full a device is.

use std::ffi::{c_uint, c_ulonglong};

use gpusim::protocol::{Memory, Region, Reply, Request};

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put};
use crate::session::{Handle, ask};

/// `nvmlMemory_t`. Here what the driver keeps counts as used.
#[repr(C)]
struct MemoryV1 {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// NVML_STRUCT_VERSION(Memory, 2): the size, and the version in the highest byte.
const MEMORY_V2: c_uint = 40 + (2 << 24);
const _: () = assert!(size_of::<MemoryV2>() == 40);

exports! {
    /// Memory, with what the driver keeps counted as used.
    fn nvmlDeviceGetMemoryInfo(device: Handle, memory: Out<MemoryV1>) {
        let Memory { total, free, .. } = read(device, Request::Memory)?;
        put(memory, MemoryV1 { total, free, used: total - free })
    }

    /// Memory, with what the driver keeps apart. A process in a limited cgroup sees its limit as
    /// the whole of it.
    fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: Option<&mut MemoryV2>) {
        let memory = memory.ok_or(Code::InvalidArgument)?;
        if memory.version != MEMORY_V2 {
            return Err(Code::ArgumentVersionMismatch);
        }
        let Memory { total, reserved, used, free } = read(device, Request::MemoryWithinLimits)?;
        *memory = MemoryV2 { version: MEMORY_V2, total, reserved, free, used };
        Ok(())
    }
}

fn read(device: Handle, request: impl FnOnce(Region) -> Request) -> Result<Memory, Code> {
    match ask(device, request)? {
        Reply::Memory(memory) => Ok(memory),
        _ => Err(Code::Unknown),
    }
}
