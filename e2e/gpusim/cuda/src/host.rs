//! Memory of the host that the device can reach. None of it is on the device.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};

use crate::code::Code;
use crate::output::{Out, put};
use crate::session::{DevicePointer, Session, with, with_current};
use crate::{exports, stream};

/// Memory of the host that calls made or registered, by address.
#[derive(Default)]
pub(crate) struct HostMemory(BTreeMap<usize, HostBlock>);

#[derive(Clone, Copy)]
struct HostBlock {
    size: usize,
    flags: c_uint,
    /// It was the program's before.
    registered: bool,
}

exports! {
    /// Takes memory of the host.
    fn cuMemAllocHost(address: Out<*mut c_void>, bytes: c_uint) {
        take(address, usize::try_from(bytes).map_err(|_| Code::InvalidValue)?, 0)
    }

    /// Takes memory of the host.
    fn cuMemAllocHost_v2(address: Out<*mut c_void>, bytes: usize) { take(address, bytes, 0) }

    /// Takes memory of the host.
    fn cuMemHostAlloc(address: Out<*mut c_void>, bytes: usize, flags: c_uint) { take(address, bytes, flags) }

    /// Gives memory of the host back.
    fn cuMemFreeHost(address: *mut c_void) {
        let block = with(|session| {
            stream::forbid_unsafe(session)?;
            let place = address.addr();
            session.host.0.get(&place).filter(|block| !block.registered).ok_or(Code::InvalidValue)?;
            session.host.0.remove(&place).ok_or(Code::InvalidValue)
        })?;
        // SAFETY: `take` made the mapping, and it is off the list, so that nobody ends it twice.
        unsafe { libc::munmap(address, block.size) };
        Ok(())
    }

    /// Makes memory of the program's reachable.
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) {
        with_current(|session, _| {
            if address.is_null() || bytes == 0 || session.host.0.contains_key(&address.addr()) {
                return Err(Code::InvalidValue);
            }
            session.host.0.insert(address.addr(), HostBlock { size: bytes, flags, registered: true });
            Ok(())
        })
    }

    /// Ends that.
    fn cuMemHostUnregister(address: *mut c_void) {
        with(|session| {
            let place = address.addr();
            session.host.0.get(&place).filter(|block| block.registered).ok_or(Code::InvalidValue)?;
            session.host.0.remove(&place);
            Ok(())
        })
    }

    /// The device's address of memory of the host: the same.
    fn cuMemHostGetDevicePointer_v2(pointer: Out<DevicePointer>, address: *mut c_void, _flags: c_uint) {
        with_current(|session, _| block_at(session, address.addr()).map(|_| ()).ok_or(Code::InvalidValue))?;
        put(pointer, u64::try_from(address.addr()).map_err(|_| Code::InvalidValue)?)
    }

    /// Flags by which memory of the host was made.
    fn cuMemHostGetFlags(flags: Out<c_uint>, address: *mut c_void) {
        let known = with(|session| {
            let block = session.host.0.get(&address.addr()).ok_or(Code::InvalidValue)?;
            Ok(block.flags)
        })?;
        put(flags, known)
    }
}

/// The memory of the host that an address is in: its start and size.
pub(crate) fn block_at(session: &Session, address: usize) -> Option<(usize, usize)> {
    let (start, block) = session.host.0.range(..=address).next_back()?;
    (address - start < block.size).then_some((*start, block.size))
}

fn take(address: Out<*mut c_void>, bytes: usize, flags: c_uint) -> Result<(), Code> {
    let out = address.ok_or(Code::InvalidValue)?;
    let place = with_current(|session, _| {
        if bytes == 0 {
            return Err(Code::InvalidValue);
        }
        stream::forbid_unsafe(session)?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let place = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if place == libc::MAP_FAILED {
            return Err(Code::OutOfMemory);
        }
        session.host.0.insert(place.addr(), HostBlock { size: bytes, flags, registered: false });
        Ok(place)
    })?;
    put(Some(out), place)
}
