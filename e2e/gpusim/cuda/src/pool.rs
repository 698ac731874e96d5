//! Memory in the order of streams, from pools that keep what is given back.
//!
//! As measured: a pool grows by steps of 32 MiB to what is in use, and shrinks at synchronisation to
//! what is in use or to its release threshold. It has no fragments, since the driver maps what is
//! free wherever it is needed.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_ulonglong, c_ushort, c_void};

use gpusim::driver::GRANULARITY;
use gpusim::protocol::{MemoryKind, Request};

use crate::code::Code;
use crate::exports;
use crate::link::is_null;
use crate::memory::{self, null_address};
use crate::output::{Out, put};
use crate::session::{Backing, Block, DevicePointer, Session, opaque, ordinal, with};
use crate::{graph, stream};

/// A pool grows by multiples of this.
const STEP: u64 = 32 << 20;
/// CU_MEM_ALLOCATION_TYPE_PINNED and CU_MEM_LOCATION_TYPE_DEVICE.
const PINNED: c_int = 1;
const DEVICE: c_int = 1;
/// `CUmemPool_attribute`: three switches, then numbers.
const FIRST_SWITCH: c_int = 1;
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;
const RESERVED_HIGH: c_int = 6;
const USED: c_int = 7;
const USED_HIGH: c_int = 8;

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    security: *mut c_void,
    max_size: usize,
    usage: c_ushort,
    rest: [u8; 54],
}

const _: () = assert!(size_of::<PoolProperties>() == 88);

impl PoolProperties {
    /// Those of memory on a device, by ordinal.
    pub(crate) fn on_device(location: c_int) -> Self {
        Self {
            kind: PINNED,
            handle_types: 0,
            location_kind: DEVICE,
            location,
            security: std::ptr::null_mut(),
            max_size: 0,
            usage: 0,
            rest: [0; 54],
        }
    }

    /// Ordinal of the device that they name.
    pub(crate) fn device(&self, session: &Session) -> Result<usize, Code> {
        if self.kind != PINNED || self.location_kind != DEVICE {
            return Err(Code::InvalidValue);
        }
        ordinal(session, self.location)
    }
}

/// The pools of a process.
#[derive(Default)]
pub(crate) struct Pools {
    made: BTreeMap<usize, Pool>,
    /// The pool that each device began with.
    defaults: BTreeMap<usize, usize>,
    /// The pool that each device has now.
    current: BTreeMap<usize, usize>,
}

#[derive(Default)]
struct Pool {
    device: usize,
    /// What it has reserved, as the daemon numbers it, and the context that this is part of.
    memory: Option<(u64, usize)>,
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    threshold: u64,
    /// 0 is no limit.
    max_size: u64,
    switches: [c_int; 3],
    /// It goes with the last of its allocations.
    destroyed: bool,
}

exports! {
    /// Takes memory from the current pool of the stream's device.
    fn cuMemAllocAsync(address: Out<DevicePointer>, bytes: usize, stream: *mut c_void) {
        take(address, bytes, None, stream, false)
    }

    /// Takes memory from the current pool of the stream's device.
    fn cuMemAllocAsync_ptsz(address: Out<DevicePointer>, bytes: usize, stream: *mut c_void) {
        take(address, bytes, None, stream, true)
    }

    /// Takes memory from a pool.
    fn cuMemAllocFromPoolAsync(
        address: Out<DevicePointer>, bytes: usize, pool: *mut c_void, stream: *mut c_void,
    ) {
        take(address, bytes, Some(pool.addr()), stream, false)
    }

    /// Takes memory from a pool.
    fn cuMemAllocFromPoolAsync_ptsz(
        address: Out<DevicePointer>, bytes: usize, pool: *mut c_void, stream: *mut c_void,
    ) {
        take(address, bytes, Some(pool.addr()), stream, true)
    }

    /// Gives memory back to its pool, or what is from no pool for good.
    fn cuMemFreeAsync(address: DevicePointer, stream: *mut c_void) { free(address, stream, false) }

    /// Gives memory back to its pool, or what is from no pool for good.
    fn cuMemFreeAsync_ptsz(address: DevicePointer, stream: *mut c_void) { free(address, stream, true) }

    /// Makes a pool.
    fn cuMemPoolCreate(pool: Out<*mut c_void>, properties: Option<&PoolProperties>) {
        let out = pool.ok_or(Code::InvalidValue)?;
        let properties = properties.ok_or(Code::InvalidValue)?;
        let handle = with(|session| {
            let device = properties.device(session)?;
            let max_size = u64::try_from(properties.max_size).map_err(|_| Code::InvalidValue)?;
            Ok(add(session, Pool { device, max_size, switches: [1; 3], ..Pool::default() }))
        })?;
        put(Some(out), opaque(handle))
    }

    /// Ends a pool, once all of its memory is given back.
    fn cuMemPoolDestroy(pool: *mut c_void) {
        with(|session| {
            let handle = pool.addr();
            if session.pools.defaults.values().any(|default| *default == handle) {
                return Err(Code::InvalidValue);
            }
            let pool = pool_mut(session, handle)?;
            pool.destroyed = true;
            let device = pool.device;
            if session.pools.current.get(&device) == Some(&handle) {
                session.pools.current.remove(&device);
            }
            shrink(session, handle, 0)
        })
    }

    /// Gives back what a pool does not use, as far as less than a size is left.
    fn cuMemPoolTrimTo(pool: *mut c_void, keep: usize) {
        with(|session| {
            pool_mut(session, pool.addr())?;
            stream::forbid_unsafe(session)?;
            shrink(session, pool.addr(), u64::try_from(keep).map_err(|_| Code::InvalidValue)?)
        })
    }

    /// Sets a number of a pool.
    fn cuMemPoolSetAttribute(pool: *mut c_void, attribute: c_int, value: *const c_void) {
        if value.is_null() {
            return Err(Code::InvalidValue);
        }
        with(|session| {
            let pool = pool_mut(session, pool.addr())?;
            if let Some(switch) = switch(pool, attribute) {
                // SAFETY: not null, and these attributes are of type int.
                *switch = unsafe { value.cast::<c_int>().read_unaligned() };
                return Ok(());
            }
            // SAFETY: not null, and all other attributes are of 64 bits.
            let number = unsafe { value.cast::<c_ulonglong>().read_unaligned() };
            match (attribute, number) {
                (RELEASE_THRESHOLD, threshold) => pool.threshold = threshold,
                (RESERVED_HIGH, 0) => pool.reserved_high = pool.reserved,
                (USED_HIGH, 0) => pool.used_high = pool.used,
                _ => return Err(Code::InvalidValue),
            }
            Ok(())
        })
    }

    /// Asks for a number of a pool.
    fn cuMemPoolGetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) {
        if value.is_null() {
            return Err(Code::InvalidValue);
        }
        with(|session| {
            let pool = pool_mut(session, pool.addr())?;
            if let Some(switch) = switch(pool, attribute) {
                // SAFETY: not null, and these attributes are of type int.
                unsafe { value.cast::<c_int>().write_unaligned(*switch) };
                return Ok(());
            }
            let number = match attribute {
                RELEASE_THRESHOLD => pool.threshold,
                RESERVED => pool.reserved,
                RESERVED_HIGH => pool.reserved_high,
                USED => pool.used,
                USED_HIGH => pool.used_high,
                _ => return Err(Code::InvalidValue),
            };
            // SAFETY: not null, and all other attributes are of 64 bits.
            unsafe { value.cast::<c_ulonglong>().write_unaligned(number) };
            Ok(())
        })
    }

    /// The pool that a device began with.
    fn cuDeviceGetDefaultMemPool(pool: Out<*mut c_void>, device: c_int) {
        let out = pool.ok_or(Code::InvalidValue)?;
        let handle = with(|session| {
            let device = ordinal(session, device)?;
            Ok(default_of(session, device))
        })?;
        put(Some(out), opaque(handle))
    }

    /// The pool from which a device takes memory now.
    fn cuDeviceGetMemPool(pool: Out<*mut c_void>, device: c_int) {
        let out = pool.ok_or(Code::InvalidValue)?;
        let handle = with(|session| {
            let device = ordinal(session, device)?;
            Ok(current_of(session, device))
        })?;
        put(Some(out), opaque(handle))
    }

    /// Sets the pool from which a device takes memory.
    fn cuDeviceSetMemPool(device: c_int, pool: *mut c_void) {
        with(|session| {
            let device = ordinal(session, device)?;
            if pool_mut(session, pool.addr())?.device != device {
                return Err(Code::InvalidValue);
            }
            session.pools.current.insert(device, pool.addr());
            Ok(())
        })
    }
}

impl Pools {
    /// What was part of a context is gone with it.
    pub(crate) fn forget(&mut self, context: usize) {
        let gone = |pool: &Pool| pool.memory.is_some_and(|(_, part_of)| part_of == context);
        for pool in self.made.values_mut().filter(|pool| gone(pool)) {
            pool.memory = None;
            (pool.reserved, pool.used) = (0, 0);
        }
    }
}

/// Gives back what the pools of a device keep beyond their thresholds.
pub(crate) fn synchronize(session: &mut Session, device: usize) -> Result<(), Code> {
    let pools = session.pools.made.iter().filter(|(_, pool)| pool.device == device && pool.reserved > 0);
    let pools: Vec<(usize, u64)> = pools.map(|(handle, pool)| (*handle, pool.threshold)).collect();
    pools.into_iter().try_for_each(|(handle, threshold)| shrink(session, handle, threshold))
}

/// An allocation of a pool's ends.
pub(crate) fn give_back(session: &mut Session, handle: usize, address: DevicePointer) -> Result<(), Code> {
    let block = session.blocks.remove(&address).ok_or(Code::InvalidValue)?;
    let pool = pool_mut(session, handle)?;
    pool.used = pool.used.saturating_sub(block.size);
    if pool.destroyed && pool.used == 0 {
        shrink(session, handle, 0)?;
    }
    Ok(())
}

fn take(
    address: Out<DevicePointer>,
    bytes: usize,
    pool: Option<usize>,
    stream: *mut c_void,
    per_thread: bool,
) -> Result<(), Code> {
    let out = address.ok_or(Code::InvalidValue)?;
    if is_null() {
        return put(Some(out), null_address(bytes));
    }
    let stream = stream::key(stream, per_thread);
    let address = with(|session| {
        let size = u64::try_from(bytes).map_err(|_| Code::InvalidValue)?;
        let context = stream::context_of(session, stream)?;
        if size == 0 {
            return Ok(0);
        }
        let device = session.context(context)?.device;
        if let Some(graph) = stream::graph_of(session, stream)? {
            return graph::add_allocation(session, graph, device, size).map(|(_, address)| address);
        }
        stream::forbid_unsafe(session)?;
        let handle = match pool {
            Some(handle) => handle,
            None => current_of(session, device),
        };
        if pool_mut(session, handle)?.destroyed {
            return Err(Code::InvalidValue);
        }
        grow(session, handle, size, context)?;
        let device = pool_mut(session, handle)?.device;
        let address = session.new_address(size)?;
        let block = Block { size, backing: Backing::Pool(handle), context, device };
        session.blocks.insert(address, block);
        let pool = pool_mut(session, handle)?;
        pool.used += size;
        pool.used_high = pool.used_high.max(pool.used);
        Ok(address)
    })?;
    put(Some(out), address)
}

fn free(address: DevicePointer, stream: *mut c_void, per_thread: bool) -> Result<(), Code> {
    if is_null() {
        return Ok(());
    }
    let stream = stream::key(stream, per_thread);
    with(|session| {
        stream::context_of(session, stream)?;
        if address == 0 {
            return Ok(());
        }
        if let Some(graph) = stream::graph_of(session, stream)? {
            return graph::add_free(session, graph, address).map(|_| ());
        }
        memory::give_back(session, address)
    })
}

/// Reserves what an allocation needs beyond what is there.
fn grow(session: &mut Session, handle: usize, size: u64, context: usize) -> Result<(), Code> {
    let pool = pool_mut(session, handle)?;
    let used = pool.used.checked_add(size).ok_or(Code::OutOfMemory)?;
    if pool.max_size > 0 && used > pool.max_size {
        return Err(Code::OutOfMemory);
    }
    let wanted = used.checked_next_multiple_of(STEP).ok_or(Code::OutOfMemory)?;
    let (device, reserved, memory) = (pool.device, pool.reserved, pool.memory);
    if wanted <= reserved {
        return Ok(());
    }
    let memory = if let Some((id, part_of)) = memory {
        session.call(&Request::Resize { id, bytes: wanted })?;
        (id, part_of)
    } else {
        let part_of = session.context(context)?.id;
        (session.allocate(device, MemoryKind::Plain, wanted, Some(part_of))?, context)
    };
    let pool = pool_mut(session, handle)?;
    pool.memory = Some(memory);
    pool.reserved = wanted;
    pool.reserved_high = pool.reserved_high.max(wanted);
    Ok(())
}

/// Gives back what is not used, but keeps so much.
fn shrink(session: &mut Session, handle: usize, keep: u64) -> Result<(), Code> {
    let pool = pool_mut(session, handle)?;
    let (reserved, memory) = (pool.reserved, pool.memory);
    let wanted = pool.used.max(keep.min(reserved)).next_multiple_of(STEP).min(reserved);
    if let Some((id, _)) = memory.filter(|_| wanted < reserved) {
        if wanted < GRANULARITY {
            session.call(&Request::Free(id))?;
        } else {
            session.call(&Request::Resize { id, bytes: wanted })?;
        }
    }
    let pool = pool_mut(session, handle)?;
    pool.reserved = wanted;
    if wanted == 0 {
        pool.memory = None;
        if pool.destroyed {
            session.pools.made.remove(&handle);
        }
    }
    Ok(())
}

fn pool_mut(session: &mut Session, handle: usize) -> Result<&mut Pool, Code> {
    session.pools.made.get_mut(&handle).ok_or(Code::InvalidValue)
}

fn switch(pool: &mut Pool, attribute: c_int) -> Option<&mut c_int> {
    let index = usize::try_from(attribute.checked_sub(FIRST_SWITCH)?).ok()?;
    pool.switches.get_mut(index)
}

fn add(session: &mut Session, pool: Pool) -> usize {
    let handle = session.new_handle();
    session.pools.made.insert(handle, pool);
    handle
}

fn default_of(session: &mut Session, device: usize) -> usize {
    if let Some(handle) = session.pools.defaults.get(&device) {
        return *handle;
    }
    let handle = add(session, Pool { device, switches: [1; 3], ..Pool::default() });
    session.pools.defaults.insert(device, handle);
    handle
}

fn current_of(session: &mut Session, device: usize) -> usize {
    match session.pools.current.get(&device) {
        Some(handle) => *handle,
        None => default_of(session, device),
    }
}

/// Whether a handle is a pool's; for pointers that ask where they are from.
pub(crate) fn of_block(block: &Block) -> Option<usize> {
    match block.backing {
        Backing::Pool(handle) => Some(handle),
        _ => None,
    }
}
