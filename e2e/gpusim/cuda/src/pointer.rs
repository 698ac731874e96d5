//! What is known about an address.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use crate::code::Code;
use crate::link::is_null;
use crate::memory::block_at;
use crate::session::{Backing, DevicePointer, Session, opaque, with};
use crate::{exports, host, ipc, pool};

/// `CUmemorytype`.
const HOST_MEMORY: c_uint = 1;
const DEVICE_MEMORY: c_uint = 2;
/// `CUpointer_attribute`.
const CONTEXT: c_int = 1;
const MEMORY_TYPE: c_int = 2;
const DEVICE_POINTER: c_int = 3;
const HOST_POINTER: c_int = 4;
const SYNC_MEMOPS: c_int = 6;
const BUFFER_ID: c_int = 7;
const IS_MANAGED: c_int = 8;
const DEVICE_ORDINAL: c_int = 9;
const IS_IPC_CAPABLE: c_int = 10;
const RANGE_START: c_int = 11;
const RANGE_SIZE: c_int = 12;
const MAPPED: c_int = 13;
const ALLOWED_HANDLE_TYPES: c_int = 14;
const ACCESS_FLAGS: c_int = 16;
const POOL: c_int = 17;
const LAST: c_int = 21;
/// CU_DEVICE_INVALID.
const NO_DEVICE: c_int = -2;

/// What can be said of an address.
#[derive(Default, Clone, Copy)]
struct Facts {
    /// Handle of the context that it belongs to.
    context: usize,
    memory_type: c_uint,
    address: DevicePointer,
    /// The same address, where the host can use it.
    on_host: usize,
    managed: bool,
    device: c_int,
    ipc: c_int,
    start: DevicePointer,
    size: usize,
    shareable: bool,
    pool: usize,
}

exports! {
    /// One fact about an address.
    fn cuPointerGetAttribute(value: *mut c_void, attribute: c_int, address: DevicePointer) {
        if value.is_null() {
            return Err(Code::InvalidValue);
        }
        let facts = with(|session| facts(session, address).ok_or(Code::InvalidValue))?;
        // SAFETY: not null, and the caller has room for what the attribute is.
        unsafe { write(value, attribute, &facts) }
    }

    /// Several facts about an address; nothing is known about one that is no memory of the
    /// driver's.
    fn cuPointerGetAttributes(
        count: c_uint, attributes: *const c_int, values: *const *mut c_void, address: DevicePointer,
    ) {
        if attributes.is_null() || values.is_null() {
            return Err(Code::InvalidValue);
        }
        let nothing = Facts { device: NO_DEVICE, ..Facts::default() };
        let facts = with(|session| Ok(facts(session, address).unwrap_or(nothing)))?;
        let count = usize::try_from(count).map_err(|_| Code::InvalidValue)?;
        // SAFETY: the caller names so many attributes and places, as the interface asks.
        let (attributes, values) = unsafe {
            (std::slice::from_raw_parts(attributes, count), std::slice::from_raw_parts(values, count))
        };
        for (attribute, value) in attributes.iter().zip(values).filter(|(_, value)| !value.is_null()) {
            // SAFETY: not null, and the caller has room for what the attribute is.
            unsafe { write(*value, *attribute, &facts) }?;
        }
        Ok(())
    }
}

fn facts(session: &Session, address: DevicePointer) -> Option<Facts> {
    let of_device = |context, device: usize, start, size: u64| Facts {
        context,
        memory_type: DEVICE_MEMORY,
        address,
        device: c_int::try_from(device).unwrap_or(NO_DEVICE),
        start,
        size: usize::try_from(size).unwrap_or(usize::MAX),
        ..Facts::default()
    };
    if let Some((start, block)) = block_at(session, address) {
        let managed = matches!(block.backing, Backing::Managed { .. });
        return Some(Facts {
            managed,
            on_host: if managed { usize::try_from(address).ok()? } else { 0 },
            ipc: ipc::is_capable(block),
            pool: pool::of_block(block).unwrap_or(0),
            ..of_device(block.context, block.device, start, block.size)
        });
    }
    if let Some((start, (size, handle))) = session.mapped.range(..=address).next_back()
        && address - start < *size
    {
        let physical = session.physical.get(handle)?;
        let known = of_device(0, physical.device.unwrap_or(0), *start, *size);
        let memory_type = if physical.device.is_some() { DEVICE_MEMORY } else { HOST_MEMORY };
        return Some(Facts { memory_type, shareable: physical.shareable, ..known });
    }
    let place = usize::try_from(address).ok()?;
    if let Some((start, size)) = host::block_at(session, place) {
        let (start, size) = (u64::try_from(start).ok()?, u64::try_from(size).ok()?);
        return Some(Facts { memory_type: HOST_MEMORY, on_host: place, ..of_device(0, 0, start, size) });
    }
    is_null().then(|| of_device(0, 0, address, 0))
}

/// Writes a fact in the type that it has.
///
/// # Safety
/// `value` has room for it.
unsafe fn write(value: *mut c_void, attribute: c_int, facts: &Facts) -> Result<(), Code> {
    // SAFETY: there is room for the attribute's type, by this function's contract; whatever its
    // alignment.
    unsafe {
        match attribute {
            CONTEXT => value.cast::<*mut c_void>().write_unaligned(opaque(facts.context)),
            MEMORY_TYPE => value.cast::<c_uint>().write_unaligned(facts.memory_type),
            DEVICE_POINTER => value.cast::<DevicePointer>().write_unaligned(facts.address),
            HOST_POINTER => value.cast::<*mut c_void>().write_unaligned(opaque(facts.on_host)),
            BUFFER_ID => value.cast::<c_ulonglong>().write_unaligned(facts.start),
            IS_MANAGED => value.cast::<c_uint>().write_unaligned(c_uint::from(facts.managed)),
            DEVICE_ORDINAL => value.cast::<c_int>().write_unaligned(facts.device),
            IS_IPC_CAPABLE => value.cast::<c_int>().write_unaligned(facts.ipc),
            RANGE_START => value.cast::<DevicePointer>().write_unaligned(facts.start),
            RANGE_SIZE => value.cast::<usize>().write_unaligned(facts.size),
            MAPPED => value.cast::<c_uint>().write_unaligned(c_uint::from(facts.size > 0)),
            ALLOWED_HANDLE_TYPES => value.cast::<c_ulonglong>().write_unaligned(u64::from(facts.shareable)),
            POOL => value.cast::<*mut c_void>().write_unaligned(opaque(facts.pool)),
            SYNC_MEMOPS | ACCESS_FLAGS => value.cast::<c_uint>().write_unaligned(0),
            other if other > 0 && other <= LAST => return Err(Code::NotSupported),
            _ => return Err(Code::InvalidValue),
        }
    }
    Ok(())
}
