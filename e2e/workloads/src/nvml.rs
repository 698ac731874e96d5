//! What NVML says about a device's memory: the other view that a program may have of it.

use std::ffi::{CStr, CString, c_char, c_uint, c_ulonglong, c_void};

use crate::loader::{Bypass, Library};

const LIBRARY: &CStr = c"libnvidia-ml.so.1";
/// What NVML answers with where it is not there at all: NVML_ERROR_LIBRARY_NOT_FOUND, and
/// NVML_ERROR_FUNCTION_NOT_FOUND.
const NO_LIBRARY: c_uint = 12;
const NO_FUNCTION: c_uint = 13;
/// NVML_STRUCT_VERSION(Memory, 2).
const MEMORY_V2: c_uint = 40 + (2 << 24);

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) total: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryV2 {
    version: c_uint,
    pub(crate) total: c_ulonglong,
    pub(crate) reserved: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

/// What both forms of the call say; each, or its result code.
pub(crate) type Views = (Result<Memory, c_uint>, Result<MemoryV2, c_uint>);

/// Asks NVML about the device with a UUID.
pub(crate) fn views(uuid: [u8; 16], bypass: Option<Bypass>) -> Views {
    match device(uuid, bypass) {
        Err(code) => (Err(code), Err(code)),
        Ok((library, device)) => {
            let mut old = Memory::default();
            let old_code = call(&library, c"nvmlDeviceGetMemoryInfo", device, &mut old);
            let mut new = MemoryV2 { version: MEMORY_V2, ..MemoryV2::default() };
            let new_code = call(&library, c"nvmlDeviceGetMemoryInfo_v2", device, &mut new);
            (old_code.map(|()| old), new_code.map(|()| new))
        }
    }
}

fn device(uuid: [u8; 16], bypass: Option<Bypass>) -> Result<(Library, *mut c_void), c_uint> {
    let library = Library::open(LIBRARY, bypass).map_err(|_| NO_LIBRARY)?;
    let init = library.symbol(c"nvmlInit_v2").ok_or(NO_FUNCTION)?;
    // SAFETY: the function of this name has this type.
    let init: unsafe extern "C" fn() -> c_uint = unsafe { std::mem::transmute(init) };
    // SAFETY: may be called any number of times.
    checked(unsafe { init() })?;
    let find = library.symbol(c"nvmlDeviceGetHandleByUUID").ok_or(NO_FUNCTION)?;
    // SAFETY: the function of this name has this type.
    let find: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_uint =
        unsafe { std::mem::transmute(find) };
    let mut result = Err(NO_FUNCTION);
    for kind in ["GPU", "MIG"] {
        let mut device = std::ptr::null_mut();
        let name = CString::new(text(kind, uuid)).unwrap_or_default();
        // SAFETY: reads a text and writes a pointer, and there is room for it.
        result = checked(unsafe { find(name.as_ptr(), &raw mut device) }).map(|()| device);
        if result.is_ok() {
            break;
        }
    }
    Ok((library, result?))
}

fn call<T>(library: &Library, name: &CStr, device: *mut c_void, out: &mut T) -> Result<(), c_uint> {
    let function = library.symbol(name).ok_or(NO_FUNCTION)?;
    // SAFETY: the functions that this is used for have this type.
    let function: unsafe extern "C" fn(*mut c_void, *mut T) -> c_uint =
        unsafe { std::mem::transmute(function) };
    // SAFETY: the device is NVML's own, and the structure is what the function fills in.
    checked(unsafe { function(device, std::ptr::from_mut(out)) })
}

fn checked(code: c_uint) -> Result<(), c_uint> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// A UUID as NVML writes it.
fn text(kind: &str, uuid: [u8; 16]) -> String {
    let number = u128::from_be_bytes(uuid);
    format!(
        "{kind}-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        number >> 96,
        (number >> 80) & 0xffff,
        (number >> 64) & 0xffff,
        (number >> 48) & 0xffff,
        number & 0xffff_ffff_ffff
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvml_does() {
        let uuid = [0x5c, 0x8e, 0x22, 0, 0x11, 0x12, 0xab, 0xcd, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(text("GPU", uuid), "GPU-5c8e2200-1112-abcd-0102-030405060708");
    }
}
