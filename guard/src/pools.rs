//! Memory in the order of a stream. It comes from pools, which keep what is freed for a while, so
//! what is charged is what a pool has reserved, not what is allocated from it.
//!
//! Before an allocation the pool is charged for what it is expected to grow to, afterwards for what
//! the driver says. It shrinks when the program waits for a stream, so the hooks of those calls look
//! again; where nobody waits, the next allocation or refusal does.

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::Ordering;

use highwater_guard_abi::page::Managed;
use highwater_guard_abi::wire::RefusedReason;

use crate::accounts::{self, footprint};
use crate::client;
use crate::code::{self, Code, NOT_FOUND, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS};
use crate::graphs;
use crate::plain::{self, released};
use crate::state::{self, Device, State};
use crate::streams::{self, NullStream, relaxed};
use crate::symbols::{driver, hooks};
use crate::sys::{self, Guard, Zeroed};
use crate::table::{Entry, Kind, Space};

type Stream = *mut c_void;
type Handle = *mut c_void;

/// Steps in which a pool takes memory, as measured on an H200.
const POOL_STEP: u64 = 32 << 20;
/// What allocations from a pool are rounded to.
const BLOCK: u64 = 512;
/// Pools that are followed; what comes from further ones is charged by allocation.
const POOLS: usize = 256;
/// Synchronisations that are looked at after something was freed: the first need not be that of
/// the stream on which it was.
const LOOKS: u32 = 8;

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`
const RESERVED: c_int = 5;

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`
pub(crate) const DEVICE: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`
pub(crate) const PINNED: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_MANAGED`
const MANAGED: c_int = 2;

/// The start of `CUmemPoolProps`.
#[repr(C)]
pub(crate) struct PoolProperties {
    pub(crate) kind: c_int,
    handle_types: c_int,
    pub(crate) location: Location,
}

/// What becomes of a pool.
const UNUSED: u32 = 0;
const LIVE: u32 = 1;
/// Destroyed, but something allocated from it is not freed yet.
const DYING: u32 = 2;

#[derive(Clone, Copy)]
#[repr(C)]
struct Pool {
    handle: Handle,
    stage: u32,
    device: u8,
    /// 1 if it is of device memory that counts.
    counted: u8,
    charged: u64,
    /// Bytes allocated from it.
    live: u64,
    /// Bytes that are being allocated from it.
    coming: u64,
}

/// The pools of this process.
#[repr(C)]
pub(crate) struct Pools {
    pools: [Pool; POOLS],
    /// No pool from here on was ever in use.
    used: usize,
}

// SAFETY: numbers and null pointers.
unsafe impl Zeroed for Pools {}
// SAFETY: handles of pools are the same for every thread.
unsafe impl Send for Pools {}

impl Pools {
    fn seen(&mut self) -> &mut [Pool] {
        self.pools.get_mut(..self.used).unwrap_or_default()
    }

    fn find(&mut self, handle: Handle) -> Option<usize> {
        self.seen().iter().position(|pool| pool.stage == LIVE && pool.handle == handle)
    }

    fn add(&mut self, handle: Handle, device: u8, counted: bool) -> Option<usize> {
        let index = self.pools.iter().position(|pool| pool.stage == UNUSED)?;
        let new =
            Pool { handle, stage: LIVE, device, counted: u8::from(counted), charged: 0, live: 0, coming: 0 };
        *self.pools.get_mut(index)? = new;
        self.used = self.used.max(index + 1);
        Some(index)
    }
}

impl Pool {
    /// What it is expected to have reserved once all is allocated that is being allocated.
    fn expected(&self) -> u64 {
        let allocated = self.live.saturating_add(self.coming);
        allocated.div_ceil(POOL_STEP).saturating_mul(POOL_STEP)
    }

    /// Charges it for what it has reserved. While something is being allocated, what was charged for
    /// that stays.
    fn settle(&mut self, state: &'static State) {
        if self.stage != LIVE || self.counted == 0 {
            return;
        }
        let (Ok(reserved), Some(device)) = (reserved(self.handle), state.device_at(self.device)) else {
            return;
        };
        let needed = if self.coming == 0 { 0 } else { self.expected().min(self.charged) };
        let target = reserved.max(needed);
        if target > self.charged {
            accounts::charge_anyway(state, device, target - self.charged);
        } else {
            accounts::uncharge(state, device, self.charged - target);
        }
        self.charged = target;
    }

    /// Forgets it once it is destroyed and nothing from it is left.
    fn bury(&mut self, state: &'static State) {
        if self.stage == DYING && self.live == 0 {
            if let Some(device) = state.device_at(self.device) {
                accounts::uncharge(state, device, self.charged);
            }
            self.charged = 0;
            self.stage = UNUSED;
        }
    }
}

/// What a pool has reserved now. An error is the driver's code.
fn reserved(pool: Handle) -> Result<u64, Code> {
    let mut value = 0_u64;
    let code = relaxed(|| {
        // SAFETY: the function writes a number of 64 bits for this attribute.
        unsafe {
            driver!(cuMemPoolGetAttribute(pool => Handle, RESERVED => c_int, (&raw mut value).cast() => *mut c_void))
        }
    });
    if code == SUCCESS { Ok(value) } else { Err(code) }
}

/// Charges every pool for what it has reserved now.
pub(crate) fn settle(state: &'static State) {
    for pool in state.pools.lock().seen() {
        pool.settle(state);
    }
}

/// Makes the pools of a device give back what they keep, unless that could disturb a capture.
pub(crate) fn trim(state: &'static State, device: &Device) {
    if state.captures.load(Ordering::Relaxed) != 0 {
        return;
    }
    let index = state.index_of(device);
    for pool in state.pools.lock().seen().iter_mut() {
        if pool.stage == LIVE && pool.counted != 0 && pool.device == index && pool.charged > 0 {
            // SAFETY: the pool is not destroyed while it is in the list and that is locked.
            relaxed(|| unsafe { driver!(cuMemPoolTrimTo(pool.handle => Handle, 0 => usize)) });
            pool.settle(state);
        }
    }
}

/// Something was freed that is not known here: it may be of a graph.
pub(crate) fn touched(state: &'static State) {
    if state.graph_count.load(Ordering::Relaxed) != 0 {
        state.dirty.store(LOOKS, Ordering::Relaxed);
    }
}

/// An allocation went back to its pool.
pub(crate) fn freed(state: &'static State, entry: &Entry) {
    let mut pools = state.pools.lock();
    let index = usize::try_from(entry.more).unwrap_or(usize::MAX);
    if let Some(pool) = pools.seen().get_mut(index) {
        pool.live = pool.live.saturating_sub(entry.bytes);
        pool.bury(state);
    }
    state.dirty.store(LOOKS, Ordering::Relaxed);
}

/// The pool that a device's allocations come from. An error is the driver's code.
fn current_pool(device: u8) -> Result<Handle, Code> {
    let mut pool = ptr::null_mut();
    // SAFETY: the function takes a place for a handle.
    let code =
        unsafe { driver!(cuDeviceGetMemPool(&raw mut pool => *mut Handle, c_int::from(device) => c_int)) };
    match code {
        SUCCESS if pool.is_null() => Err(NOT_FOUND),
        SUCCESS => Ok(pool),
        why => Err(why),
    }
}

/// Where an allocation comes from.
enum Source {
    /// The pool at that place of the list.
    Pool(usize),
    /// Memory that does not count.
    Uncounted,
    /// A pool for which there is no place in the list.
    Unlisted,
}

fn source(pools: &mut Guard<'_, Pools>, handle: Handle, device: u8) -> Source {
    match pools.find(handle).or_else(|| pools.add(handle, device, true)) {
        Some(index) if pools.seen().get(index).is_some_and(|pool| pool.counted == 0) => Source::Uncounted,
        Some(index) => Source::Pool(index),
        None => Source::Unlisted,
    }
}

/// Allocates in the order of a stream, from `pool` or else from that of the stream's device.
fn allocate(
    state: &'static State,
    out: *mut u64,
    size: usize,
    (stream, null): (Stream, NullStream),
    pool: Option<Handle>,
    call: impl FnOnce() -> Code,
) -> Code {
    if out.is_null() || size == 0 {
        return call();
    }
    if streams::is_captured(stream, null) {
        // It becomes part of a graph, and is charged when that is made ready.
        graphs::seen(state);
        return call();
    }
    client::heed(state);
    let from = streams::device_of(state, stream)
        .and_then(|on| Ok((on, pool.map_or_else(|| current_pool(state.index_of(on)), Ok)?)));
    let (on, handle) = match from {
        Ok(from) => from,
        // SAFETY: the driver has written it.
        Err(why) => return code::uncharged(why, call, || give_back(unsafe { *out }, (stream, null))),
    };
    let size = sys::bytes(size).div_ceil(BLOCK).saturating_mul(BLOCK);
    let mut pools = state.pools.lock();
    let index = match source(&mut pools, handle, state.index_of(on)) {
        Source::Pool(index) => index,
        Source::Uncounted => {
            drop(pools);
            return call();
        }
        Source::Unlisted => {
            drop(pools);
            return allocate_unlisted(state, on, out, size, call);
        }
    };
    let Some((more, device)) = pools.seen().get_mut(index).map(|pool| {
        pool.coming = pool.coming.saturating_add(size);
        (pool.expected().saturating_sub(pool.charged), pool.device)
    }) else {
        return OUT_OF_MEMORY;
    };
    drop(pools);
    let device = state.device_at(device).unwrap_or(on);
    if accounts::charge(state, device, more).is_err() {
        with(state, index, |pool| pool.coming = pool.coming.saturating_sub(size));
        return OUT_OF_MEMORY;
    }
    with(state, index, |pool| pool.charged = pool.charged.saturating_add(more));
    let code = call();
    if code != SUCCESS {
        with(state, index, |pool| {
            pool.coming = pool.coming.saturating_sub(size);
            pool.settle(state);
        });
        return code;
    }
    // SAFETY: the driver has written it.
    let pointer = unsafe { *out };
    let entry = Entry {
        bytes: size,
        owner: u64::MAX,
        more: u64::try_from(index).unwrap_or(u64::MAX),
        device: state.index_of(device),
        kind: Kind::Pool,
        ..Entry::new(Space::Pointer, pointer)
    };
    // It is noted before the pool is looked at, so that the free of an entry with the same pointer
    // that was never seen comes first.
    let noted = plain::remember(state, entry);
    // What the pool grew by beyond what was expected has to be known, and to fit as well.
    let (beyond, why) = with(state, index, |pool| {
        pool.coming = pool.coming.saturating_sub(size);
        pool.live = pool.live.saturating_add(size);
        let (reserved, why) = reserved(handle).map_or_else(|why| (0, why), |bytes| (bytes, SUCCESS));
        let beyond = reserved.saturating_sub(pool.charged);
        pool.charged = pool.charged.saturating_add(beyond);
        (beyond, why)
    });
    if why == SUCCESS && noted.is_ok() && accounts::charge(state, device, beyond).is_ok() {
        with(state, index, |pool| pool.settle(state));
        return SUCCESS;
    }
    state.table.take(Space::Pointer, pointer);
    give_back(pointer, (stream, null));
    with(state, index, |pool| {
        pool.live = pool.live.saturating_sub(size);
        if noted.is_ok() {
            pool.charged = pool.charged.saturating_sub(beyond);
        }
        pool.settle(state);
    });
    trim(state, device);
    state.dirty.store(LOOKS, Ordering::Relaxed);
    if why == SUCCESS { OUT_OF_MEMORY } else { why }
}

/// Gives back what was allocated just now on this stream, and what nobody else knows of.
fn give_back(pointer: u64, (stream, null): (Stream, NullStream)) {
    // SAFETY: nobody has it.
    unsafe {
        match null {
            NullStream::Shared => driver!(cuMemFreeAsync(pointer => u64, stream => Stream)),
            NullStream::OfThread => driver!(cuMemFreeAsync_ptsz(pointer => u64, stream => Stream)),
        }
    };
}

/// Allocates from a pool that is not followed, and charges the allocation itself.
fn allocate_unlisted(
    state: &'static State,
    device: &'static Device,
    out: *mut u64,
    size: u64,
    call: impl FnOnce() -> Code,
) -> Code {
    let bytes = footprint(size);
    if accounts::charge(state, device, bytes).is_err() {
        return OUT_OF_MEMORY;
    }
    let code = call();
    if code != SUCCESS {
        accounts::uncharge(state, device, bytes);
        return code;
    }
    // SAFETY: the driver has written it.
    let pointer = unsafe { *out };
    let entry = Entry {
        bytes,
        owner: u64::MAX,
        device: state.index_of(device),
        ..Entry::new(Space::Pointer, pointer)
    };
    if plain::remember(state, entry).is_err() {
        // SAFETY: it was allocated just now, and nobody else knows it.
        unsafe { driver!(cuMemFree_v2(pointer => u64)) };
        accounts::uncharge(state, device, bytes);
        return OUT_OF_MEMORY;
    }
    SUCCESS
}

fn with<T: core::default::Default>(
    state: &'static State,
    index: usize,
    body: impl FnOnce(&mut Pool) -> T,
) -> T {
    state.pools.lock().seen().get_mut(index).map(body).unwrap_or_default()
}

/// Frees in the order of a stream.
fn free(
    state: &'static State,
    pointer: u64,
    (stream, null): (Stream, NullStream),
    call: impl FnOnce() -> Code,
) -> Code {
    if streams::is_captured(stream, null) {
        return call();
    }
    let known = state.table.take(Space::Pointer, pointer);
    let code = call();
    match known {
        Some(entry) if code == SUCCESS => released(state, &entry),
        Some(entry) => {
            let _put_back = state.table.insert(entry);
        }
        None => touched(state),
    }
    client::heed(state);
    code
}

/// Whether a pool with these properties counts, and on which device. An error is the code with which
/// it is refused.
fn counts(state: &'static State, kind: c_int, location: Location) -> Result<Option<&'static Device>, Code> {
    let of_device = location.kind == DEVICE;
    let device = if of_device { state.device(location.id) } else { streams::current_device(state) };
    match (kind, device) {
        (PINNED, device) if of_device => device.map(Some),
        (MANAGED, Ok(device)) => match accounts::managed(state, device) {
            Managed::Charge => Ok(Some(device)),
            Managed::Ignore => Ok(None),
            Managed::Refuse => {
                accounts::report(state, device, 0, RefusedReason::Managed);
                Err(NOT_SUPPORTED)
            }
        },
        _ => Ok(None),
    }
}

fn list(state: &'static State, pool: *mut Handle, counted: Option<&'static Device>) {
    // SAFETY: the driver has written it.
    let handle = unsafe { *pool };
    let mut pools = state.pools.lock();
    if pools.find(handle).is_none() {
        let index = counted.map_or(0, |device| state.index_of(device));
        // Where there is no room, what comes from it is charged by allocation.
        let _unlisted = pools.add(handle, index, counted.is_some());
    }
}

/// Looks up a pool that exists from the start.
fn look_up(
    state: &'static State,
    pool: *mut Handle,
    location: *const Location,
    kind: c_int,
    call: impl FnOnce() -> Code,
) -> Code {
    let code = call();
    if code == SUCCESS && !pool.is_null() && !location.is_null() {
        // SAFETY: the driver has read it.
        let location = unsafe { *location };
        if let Ok(counted) = counts(state, kind, location) {
            list(state, pool, counted);
        }
    }
    code
}

hooks! {
    /// Allocates in the order of a stream.
    fn cuMemAllocAsync(pointer: *mut u64, size: usize, stream: Stream) via state::cuda, |state, real| {
        allocate(state, pointer, size, (stream, NullStream::Shared), None, || real(pointer, size, stream))
    }

    /// Allocates in the order of a stream.
    fn cuMemAllocAsync_ptsz(pointer: *mut u64, size: usize, stream: Stream) via state::cuda, |state, real| {
        allocate(state, pointer, size, (stream, NullStream::OfThread), None, || real(pointer, size, stream))
    }

    /// Allocates from a pool in the order of a stream.
    fn cuMemAllocFromPoolAsync(
        pointer: *mut u64, size: usize, pool: Handle, stream: Stream,
    ) via state::cuda, |state, real| {
        let of = (stream, NullStream::Shared);
        allocate(state, pointer, size, of, Some(pool), || real(pointer, size, pool, stream))
    }

    /// Allocates from a pool in the order of a stream.
    fn cuMemAllocFromPoolAsync_ptsz(
        pointer: *mut u64, size: usize, pool: Handle, stream: Stream,
    ) via state::cuda, |state, real| {
        let of = (stream, NullStream::OfThread);
        allocate(state, pointer, size, of, Some(pool), || real(pointer, size, pool, stream))
    }

    /// Frees in the order of a stream.
    fn cuMemFreeAsync(pointer: u64, stream: Stream) via state::cuda, |state, real| {
        free(state, pointer, (stream, NullStream::Shared), || real(pointer, stream))
    }

    /// Frees in the order of a stream.
    fn cuMemFreeAsync_ptsz(pointer: u64, stream: Stream) via state::cuda, |state, real| {
        free(state, pointer, (stream, NullStream::OfThread), || real(pointer, stream))
    }

    /// Makes a pool.
    fn cuMemPoolCreate(pool: *mut Handle, properties: *const PoolProperties) via state::cuda, |state, real| {
        if pool.is_null() || properties.is_null() {
            return real(pool, properties);
        }
        // SAFETY: the caller passes properties, which begin with these fields.
        let (kind, location) = unsafe { ((*properties).kind, (*properties).location) };
        let counted = match counts(state, kind, location) {
            Ok(counted) => counted,
            Err(why) => {
                return code::uncharged(why, || real(pool, properties), || {
                    // SAFETY: the driver has made it just now, and nobody has it.
                    unsafe { driver!(cuMemPoolDestroy(*pool => Handle)) };
                });
            }
        };
        let code = real(pool, properties);
        if code == SUCCESS {
            list(state, pool, counted);
        }
        code
    }

    /// Destroys a pool; what was allocated from it lives on until it is freed.
    fn cuMemPoolDestroy(pool: Handle) via state::cuda, |state, real| {
        let index = state.pools.lock().find(pool);
        let Some(index) = index else { return real(pool) };
        with(state, index, |pool| {
            pool.settle(state);
            pool.stage = DYING;
        });
        let code = real(pool);
        with(state, index, |pool| {
            if code == SUCCESS {
                pool.bury(state);
            } else if pool.stage == DYING {
                pool.stage = LIVE;
            }
        });
        code
    }

    /// Makes a pool give memory back.
    fn cuMemPoolTrimTo(pool: Handle, keep: usize) via state::cuda, |state, real| {
        let code = real(pool, keep);
        settle(state);
        code
    }

    /// The pool that a place has from the start.
    fn cuMemGetDefaultMemPool(
        pool: *mut Handle, location: *const Location, kind: c_int,
    ) via state::cuda, |state, real| {
        look_up(state, pool, location, kind, || real(pool, location, kind))
    }

    /// The pool that a place has now.
    fn cuMemGetMemPool(pool: *mut Handle, location: *const Location, kind: c_int) via state::cuda, |state, real| {
        look_up(state, pool, location, kind, || real(pool, location, kind))
    }
}
