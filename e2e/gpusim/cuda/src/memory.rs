//! Device memory and managed memory.

use std::collections::BTreeMap;
use std::ffi::{c_uchar, c_uint, c_ushort};

use gpusim::driver::GRANULARITY;
use gpusim::protocol::{MemoryKind, Reply, Request};

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put, put_if_wanted};
use crate::session::{Block, DevicePointer, Session, SharedBlock, with, with_current};

/// Where allocations may begin.
const ALIGNMENT: u64 = 512;
/// CU_MEM_ATTACH_GLOBAL and CU_MEM_ATTACH_HOST.
const ATTACH: [c_uint; 2] = [1, 2];

exports! {
    /// Takes device memory.
    fn cuMemAlloc_v2(address: Out<DevicePointer>, bytes: usize) {
        allocate(address, bytes, MemoryKind::Plain)
    }

    /// Takes memory that moves between host and device; it takes room on the device when touched.
    fn cuMemAllocManaged(address: Out<DevicePointer>, bytes: usize, flags: c_uint) {
        if !ATTACH.contains(&flags) {
            return Err(Code::InvalidValue);
        }
        allocate(address, bytes, MemoryKind::Managed)
    }

    /// Gives memory back, whichever context is current.
    fn cuMemFree_v2(address: DevicePointer) {
        with(|session| {
            if address == 0 {
                return Ok(());
            }
            match session.blocks.get(&address).ok_or(Code::InvalidValue)?.id {
                Some(id) => session.call(&Request::Free(id)).map(|_| ())?,
                None => leave_shared(session, address)?,
            }
            session.blocks.remove(&address);
            Ok(())
        })
    }

    /// Free and whole memory of the current context's device.
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let memory = with_current(|session, handle| {
            let region = session.region(session.context(handle)?.device)?;
            match session.call(&Request::Memory(region))? {
                Reply::Memory(memory) => Ok(memory),
                _ => Err(Code::Unknown),
            }
        })?;
        put_if_wanted(free, usize::try_from(memory.free).map_err(|_| Code::Unknown)?);
        put_if_wanted(total, usize::try_from(memory.total - memory.reserved).map_err(|_| Code::Unknown)?);
        Ok(())
    }

    /// The allocation that an address is in.
    fn cuMemGetAddressRange_v2(base: Out<DevicePointer>, size: Out<usize>, address: DevicePointer) {
        let (start, length) = with_current(|session, _| {
            let (start, block) = block_at(session, address).ok_or(Code::NotFound)?;
            Ok((start, block.size))
        })?;
        put_if_wanted(base, start);
        put_if_wanted(size, usize::try_from(length).map_err(|_| Code::Unknown)?);
        Ok(())
    }

    /// Sets bytes.
    fn cuMemsetD8_v2(address: DevicePointer, _value: c_uchar, count: usize) { set(address, count, 1) }

    /// Sets 16-bit values.
    fn cuMemsetD16_v2(address: DevicePointer, _value: c_ushort, count: usize) { set(address, count, 2) }

    /// Sets 32-bit values.
    fn cuMemsetD32_v2(address: DevicePointer, _value: c_uint, count: usize) { set(address, count, 4) }
}

fn allocate(address: Out<DevicePointer>, bytes: usize, kind: MemoryKind) -> Result<(), Code> {
    let address = with_current(|session, handle| {
        let out = address.ok_or(Code::InvalidValue)?;
        let size = u64::try_from(bytes).ok().filter(|size| *size > 0).ok_or(Code::InvalidValue)?;
        let managed = kind == MemoryKind::Managed;
        let (address, id) = if size < GRANULARITY && !managed {
            (enter_shared(session, handle, size)?, None)
        } else {
            let (address, id) = take(session, handle, kind, size)?;
            (address, Some(id))
        };
        session.blocks.insert(address, Block { size, id, context: handle, managed });
        Ok((out, address))
    });
    let (out, address) = address?;
    put(Some(out), address)
}

/// Takes memory of its own, in whole steps of the granularity.
fn take(
    session: &mut Session,
    handle: usize,
    kind: MemoryKind,
    size: u64,
) -> Result<(DevicePointer, u64), Code> {
    let context = session.context(handle)?;
    let (device, id) = (context.device, context.id);
    let id = session.allocate(device, kind, size, Some(id))?;
    Ok((session.new_address(size)?, id))
}

/// Finds room for a small allocation in a block of the context, or takes another block.
fn enter_shared(session: &mut Session, handle: usize, size: u64) -> Result<DevicePointer, Code> {
    let size = size.next_multiple_of(ALIGNMENT);
    for (address, block) in session.shared.iter_mut().filter(|(_, block)| block.context == handle) {
        if let Some(offset) = gap(block, size) {
            block.taken.insert(offset, size);
            return Ok(address + offset);
        }
    }
    let (address, id) = take(session, handle, MemoryKind::Plain, GRANULARITY)?;
    let taken = BTreeMap::from([(0, size)]);
    session.shared.insert(address, SharedBlock { id, context: handle, taken });
    Ok(address)
}

/// Gives a small allocation back, and its block with the last one in it.
fn leave_shared(session: &mut Session, address: DevicePointer) -> Result<(), Code> {
    let found = session.shared.range_mut(..=address).next_back();
    let (start, block) = found.ok_or(Code::InvalidValue)?;
    let start = *start;
    block.taken.remove(&(address - start));
    if block.taken.is_empty() {
        let id = block.id;
        session.shared.remove(&start);
        session.call(&Request::Free(id))?;
    }
    Ok(())
}

/// The first gap of a size in a block.
fn gap(block: &SharedBlock, size: u64) -> Option<u64> {
    let mut free_from = 0;
    for (offset, length) in &block.taken {
        if free_from + size <= *offset {
            break;
        }
        free_from = offset + length;
    }
    (free_from + size <= GRANULARITY).then_some(free_from)
}

/// Checks that values lie within memory of ours; a managed block comes to the device.
fn set(address: DevicePointer, count: usize, width: u64) -> Result<(), Code> {
    with_current(|session, _| {
        let length = u64::try_from(count).ok().and_then(|count| count.checked_mul(width));
        let end = length.and_then(|length| address.checked_add(length)).ok_or(Code::InvalidValue)?;
        if !address.is_multiple_of(width) {
            return Err(Code::InvalidValue);
        }
        if count == 0 {
            return Ok(());
        }
        if let Some((start, block)) = block_at(session, address) {
            if end > start + block.size {
                return Err(Code::InvalidValue);
            }
            if let Some(id) = block.id.filter(|_| block.managed) {
                session.call(&Request::Touch { id, bytes: end - start })?;
            }
            return Ok(());
        }
        let mapped = session.mapped.range(..=address).next_back();
        let inside = mapped.is_some_and(|(start, (size, _))| end <= start + size);
        if inside { Ok(()) } else { Err(Code::InvalidValue) }
    })
}

fn block_at(session: &Session, address: DevicePointer) -> Option<(DevicePointer, &Block)> {
    let (start, block) = session.blocks.range(..=address).next_back()?;
    (address < start + block.size).then_some((*start, block))
}
