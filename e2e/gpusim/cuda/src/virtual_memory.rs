//! Memory and addresses apart: made, mapped and released one by one. None of it needs a context.

use std::ffi::{c_int, c_ulonglong, c_void};

use gpusim::driver::GRANULARITY;
use gpusim::protocol::{MemoryKind, Request};

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put};
use crate::session::{DevicePointer, Physical, Session, ordinal, with};

/// CU_MEM_ALLOCATION_TYPE_PINNED.
const PINNED: c_int = 1;
/// CU_MEM_LOCATION_TYPE_DEVICE.
const DEVICE: c_int = 1;

/// `CUmemLocation`.
#[repr(C)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    requested_handle_types: c_int,
    location: Location,
    win32_meta_data: *mut c_void,
    flags: [u8; 8],
}

const _: () = assert!(size_of::<AllocationProperties>() == 32);

exports! {
    /// The step in which memory can be made and mapped, whichever option asks.
    fn cuMemGetAllocationGranularity(
        granularity: Out<usize>, properties: Option<&AllocationProperties>, _option: c_int,
    ) {
        let out = granularity.ok_or(Code::InvalidValue)?;
        with(|session| device(session, properties))?;
        put(Some(out), usize::try_from(GRANULARITY).map_err(|_| Code::Unknown)?)
    }

    /// Makes memory without an address.
    fn cuMemCreate(
        handle: Out<c_ulonglong>, size: usize, properties: Option<&AllocationProperties>, flags: c_ulonglong,
    ) {
        let out = handle.ok_or(Code::InvalidValue)?;
        let size = stepwise(size)?;
        let id = with(|session| {
            let device = device(session, properties)?;
            if flags != 0 {
                return Err(Code::InvalidValue);
            }
            let id = session.allocate(device, MemoryKind::Physical, size, None)?;
            session.physical.insert(id, Physical { size, released: false, mappings: 0 });
            Ok(id)
        })?;
        put(Some(out), id)
    }

    /// Gives the handle back; the memory goes with its last mapping.
    fn cuMemRelease(handle: c_ulonglong) {
        with(|session| {
            let physical = session.physical.get_mut(&handle).filter(|physical| !physical.released);
            physical.ok_or(Code::InvalidValue)?.released = true;
            collect(session, handle)
        })
    }

    /// Sets a range of addresses aside.
    fn cuMemAddressReserve(
        address: Out<DevicePointer>, size: usize, _alignment: usize, _hint: DevicePointer, flags: c_ulonglong,
    ) {
        let out = address.ok_or(Code::InvalidValue)?;
        let size = stepwise(size)?;
        let start = with(|session| {
            if flags != 0 {
                return Err(Code::InvalidValue);
            }
            let start = session.new_address(size)?;
            session.reserved.insert(start, size);
            Ok(start)
        })?;
        put(Some(out), start)
    }

    /// Gives a whole range of addresses back.
    fn cuMemAddressFree(address: DevicePointer, size: usize) {
        let size = stepwise(size)?;
        with(|session| {
            if session.reserved.get(&address) != Some(&size) || mapped_within(session, address, size) > 0 {
                return Err(Code::InvalidValue);
            }
            session.reserved.remove(&address);
            Ok(())
        })
    }

    /// Gives memory an address; always all of it.
    fn cuMemMap(address: DevicePointer, size: usize, offset: usize, handle: c_ulonglong, flags: c_ulonglong) {
        let size = u64::try_from(size).map_err(|_| Code::InvalidValue)?;
        with(|session| {
            let physical = session.physical.get(&handle).ok_or(Code::InvalidValue)?.size;
            let range = session.reserved.range(..=address).next_back();
            let inside = range.is_some_and(|(start, length)| address - start + size <= *length);
            if flags != 0 || offset != 0 || !inside {
                return Err(Code::InvalidValue);
            }
            if size != physical {
                return Err(Code::NotSupported);
            }
            if mapped_within(session, address, size) > 0 {
                return Err(Code::InvalidValue);
            }
            if let Some(physical) = session.physical.get_mut(&handle) {
                physical.mappings += 1;
            }
            session.mapped.insert(address, (size, handle));
            Ok(())
        })
    }

    /// Takes addresses from the memory mapped there; where there is none, there is nothing to do.
    fn cuMemUnmap(address: DevicePointer, size: usize) {
        let size = stepwise(size)?;
        with(|session| {
            let end = address.saturating_add(size);
            let inside: Vec<_> = session.mapped.range(address..end).map(|(start, (size, _))| (*start, *size)).collect();
            if inside.iter().any(|(start, size)| start + size > end) {
                return Err(Code::InvalidValue);
            }
            for (start, _) in inside {
                let Some((_, handle)) = session.mapped.remove(&start) else { continue };
                if let Some(physical) = session.physical.get_mut(&handle) {
                    physical.mappings -= 1;
                }
                collect(session, handle)?;
            }
            Ok(())
        })
    }

    /// Allows access to mapped memory: to whom is not checked.
    fn cuMemSetAccess(address: DevicePointer, size: usize, access: *const c_void, count: usize) {
        let size = stepwise(size)?;
        if access.is_null() || count == 0 {
            return Err(Code::InvalidValue);
        }
        with(|session| if mapped_within(session, address, size) == size { Ok(()) } else { Err(Code::InvalidValue) })
    }
}

/// A size that is a positive multiple of the granularity.
fn stepwise(size: usize) -> Result<u64, Code> {
    let size = u64::try_from(size).map_err(|_| Code::InvalidValue)?;
    if size == 0 || !size.is_multiple_of(GRANULARITY) { Err(Code::InvalidValue) } else { Ok(size) }
}

/// Ordinal of the device that the properties name.
fn device(session: &Session, properties: Option<&AllocationProperties>) -> Result<usize, Code> {
    let properties = properties.ok_or(Code::InvalidValue)?;
    if properties.kind != PINNED || properties.location.kind != DEVICE {
        return Err(Code::InvalidValue);
    }
    ordinal(session, properties.location.id)
}

/// How much of a range is mapped, counting mappings that begin in it.
fn mapped_within(session: &Session, address: DevicePointer, size: u64) -> u64 {
    let end = address.saturating_add(size);
    session.mapped.range(address..end).map(|(_, (size, _))| *size).sum()
}

/// Frees memory that has neither handle nor mapping.
fn collect(session: &mut Session, handle: u64) -> Result<(), Code> {
    let gone = session.physical.get(&handle).is_some_and(|memory| memory.released && memory.mappings == 0);
    if gone {
        session.physical.remove(&handle);
        session.call(&Request::Free(handle))?;
    }
    Ok(())
}
