//! Device memory and managed memory.

use std::collections::BTreeMap;
use std::ffi::{c_uchar, c_uint, c_ushort};
use std::sync::atomic::{AtomicU64, Ordering};

use gpusim::driver::GRANULARITY;
use gpusim::protocol::{MemoryKind, Reply, Request};

use crate::code::Code;
use crate::exports;
use crate::link::is_null;
use crate::output::{Out, put, put_if_wanted};
use crate::session::{Backing, Block, DevicePointer, Session, SharedBlock, with, with_current};
use crate::{graph, pool, stream, uvm};

/// Where allocations may begin.
const ALIGNMENT: u64 = 512;
/// Rows of a pitched allocation begin at multiples of this.
const PITCH: usize = 512;
/// Sizes of elements that a pitch may be made for.
const ELEMENTS: [c_uint; 3] = [4, 8, 16];
/// CU_MEM_ATTACH_GLOBAL and CU_MEM_ATTACH_HOST.
const ATTACH: [c_uint; 2] = [1, 2];

exports! {
    /// Takes device memory, with an address of 32 bits.
    fn cuMemAlloc(address: Out<c_uint>, bytes: c_uint) {
        let place = take_low(address.is_some(), u64::from(bytes))?;
        put(address, c_uint::try_from(place).map_err(|_| Code::Unknown)?)
    }

    /// Takes device memory.
    fn cuMemAlloc_v2(address: Out<DevicePointer>, bytes: usize) {
        if is_null() {
            return put(address, null_address(bytes));
        }
        allocate(address, bytes, MemoryKind::Plain)
    }

    /// Takes rows of device memory, with addresses of 32 bits.
    fn cuMemAllocPitch(
        address: Out<c_uint>, pitch: Out<c_uint>, width: c_uint, height: c_uint, element: c_uint,
    ) {
        let wide = |number: c_uint| usize::try_from(number).map_err(|_| Code::InvalidValue);
        let (row, bytes) = pitched(wide(width)?, wide(height)?, element)?;
        let place = take_low(address.is_some() && pitch.is_some(), u64::try_from(bytes).map_err(|_| Code::InvalidValue)?)?;
        put(pitch, c_uint::try_from(row).map_err(|_| Code::InvalidValue)?)?;
        put(address, c_uint::try_from(place).map_err(|_| Code::Unknown)?)
    }

    /// Takes rows of device memory, each at an address that suits the device.
    fn cuMemAllocPitch_v2(
        address: Out<DevicePointer>, pitch: Out<usize>, width: usize, height: usize, element: c_uint,
    ) {
        let (row, bytes) = pitched(width, height, element)?;
        let pitch = pitch.ok_or(Code::InvalidValue)?;
        if is_null() {
            put(address, null_address(bytes))?;
        } else {
            allocate(address, bytes, MemoryKind::Plain)?;
        }
        put(Some(pitch), row)
    }

    /// Takes memory that moves between host and device; it takes room on the device when touched.
    fn cuMemAllocManaged(address: Out<DevicePointer>, bytes: usize, flags: c_uint) {
        if !ATTACH.contains(&flags) {
            return Err(Code::InvalidValue);
        }
        if is_null() {
            return put(address, null_address(bytes));
        }
        allocate(address, bytes, MemoryKind::Managed)
    }

    /// Gives memory back, whichever context is current.
    fn cuMemFree(address: c_uint) { free(DevicePointer::from(address)) }

    /// Gives memory back, whichever context is current.
    fn cuMemFree_v2(address: DevicePointer) {
        if is_null() {
            return Ok(());
        }
        free(address)
    }

    /// Free and whole memory of the current context's device, as far as 32 bits tell.
    fn cuMemGetInfo(free: Out<c_uint>, total: Out<c_uint>) {
        let (now, whole) = information()?;
        put_if_wanted(free, c_uint::try_from(now).unwrap_or(c_uint::MAX));
        put_if_wanted(total, c_uint::try_from(whole).unwrap_or(c_uint::MAX));
        Ok(())
    }

    /// Free and whole memory of the current context's device.
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let (now, whole) = information()?;
        put_if_wanted(free, usize::try_from(now).map_err(|_| Code::Unknown)?);
        put_if_wanted(total, usize::try_from(whole).map_err(|_| Code::Unknown)?);
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

    /// Sets bytes, on the thread's own default stream.
    fn cuMemsetD8_v2_ptds(address: DevicePointer, _value: c_uchar, count: usize) { set(address, count, 1) }

    /// Sets 16-bit values.
    fn cuMemsetD16_v2(address: DevicePointer, _value: c_ushort, count: usize) { set(address, count, 2) }

    /// Sets 32-bit values.
    fn cuMemsetD32_v2(address: DevicePointer, _value: c_uint, count: usize) { set(address, count, 4) }
}

/// An address for an allocation that is none.
pub(crate) fn null_address(bytes: usize) -> DevicePointer {
    static NEXT: AtomicU64 = AtomicU64::new(0x1000_0000_0000);
    let size = u64::try_from(bytes).unwrap_or(0).next_multiple_of(ALIGNMENT);
    NEXT.fetch_add(size, Ordering::Relaxed)
}

/// What a process sees of its device's memory: free and whole.
fn information() -> Result<(u64, u64), Code> {
    let memory = with_current(|session, handle| {
        let region = session.region(session.context(handle)?.device)?;
        match session.call(&Request::MemoryWithinLimits(region))? {
            Reply::Memory(memory) => Ok(memory),
            _ => Err(Code::Unknown),
        }
    })?;
    Ok((memory.free, memory.total - memory.reserved))
}

/// Length of a row, and of all rows.
fn pitched(width: usize, height: usize, element: c_uint) -> Result<(usize, usize), Code> {
    if width == 0 || height == 0 || !ELEMENTS.contains(&element) {
        return Err(Code::InvalidValue);
    }
    let row = width.checked_next_multiple_of(PITCH).ok_or(Code::OutOfMemory)?;
    Ok((row, row.checked_mul(height).ok_or(Code::OutOfMemory)?))
}

/// Takes memory at an address of 32 bits.
fn take_low(wanted: bool, size: u64) -> Result<DevicePointer, Code> {
    with_current(|session, handle| {
        if !wanted || size == 0 {
            return Err(Code::InvalidValue);
        }
        stream::forbid_unsafe(session)?;
        let context = session.context(handle)?;
        let (device, context_id) = (context.device, context.id);
        let address = session.new_low_address(size)?;
        let id = session.allocate(device, MemoryKind::Plain, size, Some(context_id))?;
        session.blocks.insert(address, Block { size, backing: Backing::Own(id), context: handle, device });
        Ok(address)
    })
}

/// Gives memory back, whatever call it came from.
pub(crate) fn free(address: DevicePointer) -> Result<(), Code> {
    with(|session| {
        if address == 0 {
            return Ok(());
        }
        session.blocks.get(&address).ok_or(Code::InvalidValue)?;
        stream::forbid_unsafe(session)?;
        give_back(session, address)
    })
}

/// An allocation ends, whatever it was made by.
pub(crate) fn give_back(session: &mut Session, address: DevicePointer) -> Result<(), Code> {
    match session.blocks.get(&address).ok_or(Code::InvalidValue)?.backing {
        Backing::Own(id) | Backing::Managed { id, .. } => session.call(&Request::Free(id)).map(|_| ())?,
        Backing::Part => leave_shared(session, address)?,
        Backing::Pool(pool) => return pool::give_back(session, pool, address),
        Backing::Graph(executable) => return graph::give_back(session, executable, address),
        Backing::Opened(_) => return Err(Code::InvalidValue),
    }
    remove(session, address);
    Ok(())
}

/// Takes a block off the list, and its addresses out of the address space.
pub(crate) fn remove(session: &mut Session, address: DevicePointer) {
    let block = session.blocks.remove(&address);
    if let Some(Block { size, backing: Backing::Managed { mapped: true, .. }, .. }) = block {
        uvm::unmap(address, size);
    }
}

/// The memory of a context is gone with it.
pub(crate) fn forget(session: &mut Session, handle: usize) {
    let gone =
        session.blocks.iter().filter(|(_, block)| block.context == handle).map(|(address, _)| *address);
    for address in gone.collect::<Vec<_>>() {
        remove(session, address);
    }
    session.shared.retain(|_, block| block.context != handle);
}

fn allocate(address: Out<DevicePointer>, bytes: usize, kind: MemoryKind) -> Result<(), Code> {
    let address = with_current(|session, handle| {
        let out = address.ok_or(Code::InvalidValue)?;
        let size = u64::try_from(bytes).ok().filter(|size| *size > 0).ok_or(Code::InvalidValue)?;
        stream::forbid_unsafe(session)?;
        let device = session.context(handle)?.device;
        let (address, backing) = if kind == MemoryKind::Managed {
            let (address, id) = take(session, handle, kind, size)?;
            (address, Backing::Managed { id, mapped: session.map_managed(address, size) })
        } else if size < GRANULARITY {
            (enter_shared(session, handle, size)?, Backing::Part)
        } else {
            let (address, id) = take(session, handle, kind, size)?;
            (address, Backing::Own(id))
        };
        session.blocks.insert(address, Block { size, backing, context: handle, device });
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
    match session.new_address(size) {
        Ok(address) => Ok((address, id)),
        Err(code) => session.call(&Request::Free(id)).and(Err(code)),
    }
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
    if is_null() {
        return Ok(());
    }
    with_current(|session, _| {
        let length = u64::try_from(count).ok().and_then(|count| count.checked_mul(width));
        let end = length.and_then(|length| address.checked_add(length)).ok_or(Code::InvalidValue)?;
        if !address.is_multiple_of(width) {
            return Err(Code::InvalidValue);
        }
        if count == 0 {
            return Ok(());
        }
        stream::forbid_implicit(session)?;
        if let Some((start, block)) = block_at(session, address) {
            if end > start + block.size {
                return Err(Code::InvalidValue);
            }
            if let Backing::Managed { id, .. } = block.backing {
                session.call(&Request::Touch { id, bytes: end - start })?;
            }
            return Ok(());
        }
        let mapped = session.mapped.range(..=address).next_back();
        let inside = mapped.is_some_and(|(start, (size, _))| end <= start + size);
        if inside { Ok(()) } else { Err(Code::InvalidValue) }
    })
}

pub(crate) fn block_at(session: &Session, address: DevicePointer) -> Option<(DevicePointer, &Block)> {
    let (start, block) = session.blocks.range(..=address).next_back()?;
    (address < start + block.size).then_some((*start, block))
}
