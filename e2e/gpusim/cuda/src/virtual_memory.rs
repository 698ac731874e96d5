//! Memory and addresses apart: made, mapped and released one by one. None of it needs a context.
//! A descriptor keeps memory like a handle, and makes it another process's too.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};

use gpusim::driver::GRANULARITY;
use gpusim::protocol::{Descriptor, MemoryKind, Reply, Request};

use crate::code::Code;
use crate::exports;
use crate::link::is_null;
use crate::memory::null_address;
use crate::output::{Out, put};
use crate::session::{DevicePointer, Physical, Session, ordinal, with};

/// CU_MEM_ALLOCATION_TYPE_PINNED.
const PINNED: c_int = 1;
/// CU_MEM_LOCATION_TYPE_DEVICE.
const DEVICE: c_int = 1;
/// CU_MEM_LOCATION_TYPE_HOST and ..._HOST_NUMA. There is ..._HOST_NUMA_CURRENT too, but no memory is
/// made there.
const HOST: [c_int; 2] = [2, 3];
/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
const POSIX_DESCRIPTOR: c_int = 1;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
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
        with(|session| place(session, properties))?;
        put(Some(out), usize::try_from(GRANULARITY).map_err(|_| Code::Unknown)?)
    }

    /// Makes memory without an address.
    fn cuMemCreate(
        handle: Out<c_ulonglong>, size: usize, properties: Option<&AllocationProperties>, flags: c_ulonglong,
    ) {
        let out = handle.ok_or(Code::InvalidValue)?;
        let size = stepwise(size)?;
        if is_null() {
            return put(Some(out), null_address(1));
        }
        let id = with(|session| {
            let device = place(session, properties)?;
            let properties = properties.ok_or(Code::InvalidValue)?;
            if flags != 0 {
                return Err(Code::InvalidValue);
            }
            let id = match device {
                Some(device) => session.allocate(device, MemoryKind::Physical, size, None)?,
                // Of the host there is as much as anybody wants.
                None => u64::try_from(session.new_handle()).map_err(|_| Code::Unknown)?,
            };
            let memory = Physical {
                size,
                device,
                location: (properties.location.kind, properties.location.id),
                references: 1,
                mappings: 0,
                shareable: properties.requested_handle_types & POSIX_DESCRIPTOR != 0,
                imported: false,
            };
            session.physical.insert(id, memory);
            Ok(id)
        })?;
        put(Some(out), id)
    }

    /// Gives a handle back; the memory goes with its last handle, mapping and descriptor.
    fn cuMemRelease(handle: c_ulonglong) {
        if is_null() {
            return Ok(());
        }
        with(|session| {
            held(session, handle)?.references -= 1;
            collect(session, handle)
        })
    }

    /// Another handle of the memory that is mapped at an address; here the same number again.
    fn cuMemRetainAllocationHandle(handle: Out<c_ulonglong>, address: *mut c_void) {
        let out = handle.ok_or(Code::InvalidValue)?;
        let found = with(|session| {
            let address = u64::try_from(address.addr()).map_err(|_| Code::InvalidValue)?;
            let mapped = session.mapped.range(..=address).next_back();
            let (_, (_, handle)) = mapped
                .filter(|(start, (size, _))| address - *start < *size)
                .ok_or(Code::InvalidValue)?;
            let handle = *handle;
            session.physical.get_mut(&handle).ok_or(Code::InvalidValue)?.references += 1;
            Ok(handle)
        })?;
        put(Some(out), found)
    }

    /// What memory was made as.
    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<AllocationProperties>, handle: c_ulonglong) {
        let (kind, id, shareable) = with(|session| {
            let memory = held(session, handle)?;
            Ok((memory.location.0, memory.location.1, memory.shareable))
        })?;
        put(properties, AllocationProperties {
            kind: PINNED,
            requested_handle_types: if shareable { POSIX_DESCRIPTOR } else { 0 },
            location: Location { kind, id },
            win32_meta_data: std::ptr::null_mut(),
            flags: [0; 8],
        })
    }

    /// A descriptor that keeps memory, and makes it another process's that gets it.
    fn cuMemExportToShareableHandle(
        descriptor: Out<c_int>, handle: c_ulonglong, kind: c_int, flags: c_ulonglong,
    ) {
        let out = descriptor.ok_or(Code::InvalidValue)?;
        let made = with(|session| {
            let memory = held(session, handle)?;
            if kind != POSIX_DESCRIPTOR || flags != 0 || !memory.shareable || memory.imported {
                return Err(Code::InvalidValue);
            }
            session.export(handle)
        })?;
        // From here on it is the program's.
        out.write(made.into_raw_fd());
        Ok(())
    }

    /// The memory that a descriptor keeps; the descriptor stays the program's.
    fn cuMemImportFromShareableHandle(handle: Out<c_ulonglong>, descriptor: *mut c_void, kind: c_int) {
        let out = handle.ok_or(Code::InvalidValue)?;
        let number = c_int::try_from(descriptor.addr()).map_err(|_| Code::InvalidValue)?;
        // The number goes by a pointer: that of standard input is null, and refused.
        if kind != POSIX_DESCRIPTOR || number <= 0 {
            return Err(Code::InvalidValue);
        }
        // SAFETY: the number is only asked about, within this statement; the kernel says if there
        // is no such descriptor.
        let file = Descriptor::of(unsafe { BorrowedFd::borrow_raw(number) }).map_err(|_| Code::InvalidValue)?;
        let id = with(|session| {
            let Reply::Shared { id, region, bytes } = session.call(&Request::Import(file))? else {
                return Err(Code::Unknown);
            };
            let Some(device) = session.position(region) else {
                // It is of a device that this process has not got.
                session.call(&Request::Free(id))?;
                return Err(Code::InvalidValue);
            };
            let location = (DEVICE, c_int::try_from(device).map_err(|_| Code::Unknown)?);
            let memory = Physical {
                size: bytes,
                device: Some(device),
                location,
                references: 1,
                mappings: 0,
                shareable: true,
                imported: true,
            };
            session.physical.insert(id, memory);
            Ok(id)
        })?;
        put(Some(out), id)
    }

    /// Sets a range of addresses aside.
    fn cuMemAddressReserve(
        address: Out<DevicePointer>, size: usize, _alignment: usize, _hint: DevicePointer, flags: c_ulonglong,
    ) {
        let out = address.ok_or(Code::InvalidValue)?;
        if is_null() {
            return put(Some(out), null_address(size));
        }
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
        if is_null() {
            return Ok(());
        }
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
        if is_null() {
            return Ok(());
        }
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
        if is_null() {
            return Ok(());
        }
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
        if is_null() {
            return Ok(());
        }
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

/// Ordinal of the device that the properties name; nothing where they name the host.
fn place(session: &Session, properties: Option<&AllocationProperties>) -> Result<Option<usize>, Code> {
    let properties = properties.ok_or(Code::InvalidValue)?;
    let location = properties.location;
    match location.kind {
        _ if properties.kind != PINNED => Err(Code::InvalidValue),
        DEVICE => ordinal(session, location.id).map(Some),
        host if HOST.contains(&host) => Ok(None),
        _ => Err(Code::InvalidValue),
    }
}

/// Memory that the program has a handle of.
fn held(session: &mut Session, handle: u64) -> Result<&mut Physical, Code> {
    session.physical.get_mut(&handle).filter(|memory| memory.references > 0).ok_or(Code::InvalidValue)
}

/// How much of a range is mapped, counting mappings that begin in it.
fn mapped_within(session: &Session, address: DevicePointer, size: u64) -> u64 {
    let end = address.saturating_add(size);
    session.mapped.range(address..end).map(|(_, (size, _))| *size).sum()
}

/// Gives memory up that this process has neither a handle nor a mapping of.
fn collect(session: &mut Session, handle: u64) -> Result<(), Code> {
    let gone = session.physical.get(&handle).filter(|memory| memory.references == 0 && memory.mappings == 0);
    if let Some(memory) = gone {
        let on_device = memory.device.is_some();
        session.physical.remove(&handle);
        if on_device {
            session.call(&Request::Free(handle))?;
        }
    }
    Ok(())
}
