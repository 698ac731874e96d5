//! What programs are told of memory: the device as large as the pod's limit, and as much of it free
//! as the pod could get.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::size_of;

use crate::accounts::{self, View};
use crate::client;
use crate::code::{Code, SUCCESS};
use crate::state::{self, State};
use crate::streams;
use crate::symbols::{driver, hooks};
use crate::sys;

/// `nvmlMemory_t`
#[repr(C)]
pub(crate) struct NvmlMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`
#[repr(C)]
pub(crate) struct NvmlMemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const _: () = assert!(size_of::<NvmlMemory>() == 24 && size_of::<NvmlMemoryV2>() == 40);

/// A size as the program has room for it.
fn narrowed(bytes: u64) -> c_uint {
    c_uint::try_from(bytes).unwrap_or(c_uint::MAX)
}

fn widened(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// How the current device is to be seen, given what the driver says of it.
fn current_view(state: &'static State, total: u64, free: u64) -> Option<View> {
    accounts::view(state, streams::current_device(state).ok()?, total, free)
}

fn total(state: &'static State, device: c_int, total: u64) -> u64 {
    let view = state.device(device).ok().and_then(|device| accounts::view(state, device, total, total));
    view.map_or(total, |view| view.total)
}

/// The UUID that a device of NVML has. A text like `GPU-` or `MIG-` and 32 digits with dashes.
fn uuid(device: *mut c_void) -> Option<[u8; 16]> {
    let mut text = [0_u8; 96];
    let length = c_uint::try_from(text.len()).ok()?;
    // SAFETY: the function takes room for so many characters.
    let code = unsafe {
        driver!(nvmlDeviceGetUUID(
            device => *mut c_void, text.as_mut_ptr().cast() => *mut c_char, length => c_uint
        ))
    };
    if code == SUCCESS { parse(&text) } else { None }
}

fn parse(text: &[u8]) -> Option<[u8; 16]> {
    let digits = text.get(4..)?.iter().take_while(|byte| **byte != 0).filter(|byte| **byte != b'-');
    let mut uuid = [0_u8; 16];
    let mut count = 0_usize;
    for digit in digits {
        let value = u8::try_from(char::from(*digit).to_digit(16)?).ok()?;
        let place = uuid.get_mut(count / 2)?;
        *place = *place << 4 | value;
        count += 1;
    }
    (count == 32).then_some(uuid)
}

/// How a device of NVML is to be seen.
fn nvml_view(state: &'static State, device: *mut c_void, total: u64, free: u64) -> Option<View> {
    let uuid = uuid(device)?;
    client::greet(state);
    accounts::view_by_uuid(state, &uuid, total, free)
}

/// Free and total memory of the current context's device. Either place may be null.
///
/// # Safety
/// The driver has written into those that are not.
unsafe fn show<N: Copy>(
    state: &'static State,
    code: Code,
    (free, total): (*mut N, *mut N),
    wide: impl Fn(N) -> u64,
    narrow: impl Fn(u64) -> N,
) -> Code {
    if code != SUCCESS || (free.is_null() && total.is_null()) {
        return code;
    }
    // SAFETY: as the caller says.
    let said = |place: *mut N| unsafe { place.as_ref() }.map_or(u64::MAX, |value| wide(*value));
    if let Some(view) = current_view(state, said(total), said(free)) {
        for (place, value) in [(free, view.free), (total, view.total)] {
            // SAFETY: as the caller says.
            if let Some(place) = unsafe { place.as_mut() } {
                *place = narrow(value);
            }
        }
    }
    code
}

hooks! {
    /// Free and total memory.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) via state::cuda, |state, real| {
        let code = real(free, total);
        // SAFETY: the driver has written them.
        unsafe { show(state, code, (free, total), sys::bytes, widened) }
    }

    /// Free and total memory; the form for 32 bits.
    fn cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) via state::cuda, |state, real| {
        let code = real(free, total);
        // SAFETY: the driver has written them.
        unsafe { show(state, code, (free, total), wide, narrowed) }
    }

    /// Total memory.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) via state::cuda, |state, real| {
        let code = real(bytes, device);
        // SAFETY: the driver has written it.
        if code == SUCCESS && let Some(bytes) = unsafe { bytes.as_mut() } {
            client::greet(state);
            *bytes = widened(total(state, device, sys::bytes(*bytes)));
        }
        code
    }

    /// Total memory; the form for 32 bits.
    fn cuDeviceTotalMem(bytes: *mut c_uint, device: c_int) via state::cuda, |state, real| {
        let code = real(bytes, device);
        // SAFETY: the driver has written it.
        if code == SUCCESS && let Some(bytes) = unsafe { bytes.as_mut() } {
            client::greet(state);
            *bytes = narrowed(total(state, device, wide(*bytes)));
        }
        code
    }

    /// Memory of a device.
    fn nvmlDeviceGetMemoryInfo(device: *mut c_void, memory: *mut NvmlMemory) via state::nvml, |state, real| {
        let code = real(device, memory);
        // SAFETY: NVML has written it.
        if code == SUCCESS && let Some(memory) = unsafe { memory.as_mut() }
            && let Some(view) = nvml_view(state, device, memory.total, memory.free)
        {
            // In this form what is used and what is free are all there is.
            (memory.total, memory.free) = (view.total, view.free);
            memory.used = view.total.saturating_sub(view.free);
        }
        code
    }

    /// Memory of a device, with what nobody can have apart.
    fn nvmlDeviceGetMemoryInfo_v2(
        device: *mut c_void, memory: *mut NvmlMemoryV2,
    ) via state::nvml, |state, real| {
        let code = real(device, memory);
        // SAFETY: NVML has written it.
        if code == SUCCESS && let Some(memory) = unsafe { memory.as_mut() }
            && let Some(view) = nvml_view(state, device, memory.total, memory.free)
        {
            (memory.total, memory.free, memory.used) = (view.total, view.free, view.used);
            memory.reserved = view.total.saturating_sub(view.free).saturating_sub(view.used);
        }
        code
    }
}

fn wide(bytes: c_uint) -> u64 {
    u64::from(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_read_from_their_texts() {
        let expected =
            [0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0];
        assert_eq!(parse(b"GPU-12345678-9abc-def0-1234-56789abcdef0\0\0"), Some(expected));
        assert_eq!(parse(b"MIG-12345678-9abc-def0-1234-56789abcdef0\0junk"), Some(expected));
        assert_eq!(parse(b"MIG-GPU-12345678-9abc-def0-1234-56789abcdef0/7/0\0"), None);
        assert_eq!(parse(b"GPU-1234\0"), None);
        assert_eq!(parse(b""), None);
    }
}
