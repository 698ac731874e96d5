//! Physical memory and addresses apart. Memory is charged from when it is made until its last handle
//! is released *and* its last mapping is gone *and* no exported descriptor of it is open any more:
//! any of these keeps it.

use core::cell::Cell;
use core::ffi::{c_int, c_uint, c_void};
use core::mem::size_of;
use core::sync::atomic::Ordering;

use crate::accounts::{self, footprint};
use crate::code::{self, Code, OUT_OF_MEMORY, SUCCESS};
use crate::exports::{self, Origin};
use crate::ipc::{self, OpaqueHandle};
use crate::pools::{DEVICE, Location};
use crate::state::{self, Device, State};
use crate::symbols::{driver, hooks};
use crate::sys::{self, Guard, Zeroed};
use crate::table::{Entry, NoRoom, Space};

type Handle = u64;
type Stream = *mut c_void;

/// `CUmemAllocationProp`
#[repr(C)]
pub(crate) struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows: *mut c_void,
    flags: [u8; 8],
}

const _: () = assert!(size_of::<AllocationProperties>() == 32);

/// `CUarrayMapInfo`
#[repr(C)]
pub(crate) struct ArrayMapping {
    resource_kind: c_uint,
    resource: *mut c_void,
    part_kind: c_uint,
    part: [u64; 4],
    operation: c_uint,
    handle_kind: c_uint,
    handle: Handle,
    offset: u64,
    devices: c_uint,
    flags: c_uint,
    reserved: [c_uint; 2],
}

const _: () = assert!(size_of::<ArrayMapping>() == 96);

/// `CU_MEM_OPERATION_TYPE_MAP`
const MAP: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const DESCRIPTOR: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`
const FABRIC: c_int = 8;

/// Flags of memory.
mod flag {
    /// A descriptor of it was given out.
    pub(super) const EXPORTED: u8 = 1;
    /// Only such descriptors keep it.
    pub(super) const ORPHAN: u8 = 2;
    /// It was made outside of this pod, and is charged as far as it is mapped.
    pub(super) const FOREIGN: u8 = 4;
    /// It has no bytes of its own, but keeps other memory.
    pub(super) const HOLDS: u8 = 8;
}

/// Numbers of memory that holds other memory begin with this, to differ from handles of arrays.
const HOLDER: u64 = 1 << 63;

/// What belongs together; whoever changes more than one entry has this locked.
#[repr(C)]
pub(crate) struct VirtualMemory {
    last: u64,
    /// All addresses and sizes of mappings, put together by "or".
    mapped: u64,
    pins: u64,
}

// SAFETY: numbers.
unsafe impl Zeroed for VirtualMemory {}

/// The right to change more than one entry.
type Locked<'a> = Guard<'a, VirtualMemory>;

impl VirtualMemory {
    /// What every address and size of a mapping is a multiple of.
    fn step(&self) -> u64 {
        1 << self.mapped.trailing_zeros().clamp(12, 40)
    }
}

/// Mappings and pins are counted in one number, so that 0 says that there are neither.
const PIN: u64 = 1 << 32;

/// Notes memory with one handle.
fn add(
    state: &'static State,
    locked: &mut Locked<'_>,
    handle: Handle,
    device: &Device,
    (bytes, flag): (u64, u8),
) -> Result<(), NoRoom> {
    locked.last = locked.last.wrapping_add(1);
    let number = locked.last;
    let memory =
        Entry { bytes, flag, uses: 1, device: state.index_of(device), ..Entry::new(Space::Memory, number) };
    state.table.insert(memory)?;
    let entry = Entry { owner: number, uses: 1, ..Entry::new(Space::Handle, handle) };
    match state.table.insert(entry) {
        Ok(None) => Ok(()),
        Ok(Some(former)) => {
            // That handle must have been released in a way that was not seen.
            state.table.change(Space::Memory, former.owner, |memory| {
                memory.uses = memory.uses.saturating_sub(former.uses);
            });
            collect(state, locked, former.owner);
            Ok(())
        }
        Err(no_room) => {
            state.table.take(Space::Memory, number);
            Err(no_room)
        }
    }
}

/// Notes one more use of a handle; `number` says what it is of, if it is not known.
fn use_handle(state: &'static State, handle: Handle, number: Option<u64>) {
    let used = state.table.change(Space::Handle, handle, |entry| entry.uses = entry.uses.saturating_add(1));
    let number = match (used, number) {
        (Some(entry), _) => entry.owner,
        (None, Some(number)) => {
            let entry = Entry { owner: number, uses: 1, ..Entry::new(Space::Handle, handle) };
            if state.table.insert(entry).is_err() {
                return;
            }
            number
        }
        (None, None) => return,
    };
    state.table.change(Space::Memory, number, |memory| memory.uses = memory.uses.saturating_add(1));
}

/// Gives memory back if nothing keeps it any more.
fn collect(state: &'static State, locked: &mut Locked<'_>, number: u64) {
    let Some(memory) = state.table.get(Space::Memory, number) else { return };
    if memory.uses > 0 || memory.more > 0 {
        return;
    }
    if memory.flag & flag::EXPORTED != 0 && exports::any_open(state, number) {
        if memory.flag & flag::ORPHAN == 0 {
            state.table.change(Space::Memory, number, |memory| memory.flag |= flag::ORPHAN);
            state.orphans.fetch_add(1, Ordering::Relaxed);
        }
        return;
    }
    if memory.flag & flag::ORPHAN != 0 {
        state.orphans.fetch_sub(1, Ordering::Relaxed);
    }
    state.table.take(Space::Memory, number);
    if let Some(device) = state.device_at(memory.device) {
        accounts::uncharge(state, device, memory.bytes);
    }
    if memory.flag & flag::HOLDS != 0 {
        unpin(state, locked, number | HOLDER);
    }
}

/// One mapping or pin fewer.
fn let_go(state: &'static State, locked: &mut Locked<'_>, number: u64, of: u64) {
    state.table.change(Space::Memory, number, |memory| memory.more = memory.more.saturating_sub(of));
    collect(state, locked, number);
}

/// Keeps memory until its holder is gone.
fn pin(state: &'static State, locked: &mut Locked<'_>, holder: u64, number: u64) {
    let key = holder.rotate_left(17) ^ number;
    let entry = Entry { owner: holder, more: number, ..Entry::new(Space::Pin, key) };
    if let Ok(None) = state.table.insert(entry) {
        state.table.change(Space::Memory, number, |memory| memory.more = memory.more.saturating_add(PIN));
        locked.pins = locked.pins.saturating_add(1);
    }
}

fn unpin(state: &'static State, locked: &mut Locked<'_>, holder: u64) {
    const BATCH: usize = 64;
    while locked.pins > 0 {
        let mut batch = [0_u64; BATCH];
        let count = Cell::new(0);
        state.table.drain(
            |entry| count.get() < BATCH && entry.is(Space::Pin) && entry.owner == holder,
            |entry| {
                if let Some(place) = batch.get_mut(count.get()) {
                    *place = entry.more;
                }
                count.set(count.get() + 1);
            },
        );
        for number in batch.into_iter().take(count.get()) {
            locked.pins = locked.pins.saturating_sub(1);
            let_go(state, locked, number, PIN);
        }
        if count.get() < BATCH {
            break;
        }
    }
}

/// An array is gone, and with it what it kept.
pub(crate) fn unpinned(state: &'static State, array: u64) {
    let mut locked = state.virtual_memory.lock();
    if locked.pins > 0 {
        unpin(state, &mut locked, array);
    }
}

/// The same now and then, where that need not be known at once.
pub(crate) fn settle_sometimes(state: &'static State) {
    const PAUSE: u64 = 50 * sys::MILLISECOND;
    if state.orphans.load(Ordering::Relaxed) == 0 {
        return;
    }
    let (now, before) = (sys::now(), state.orphans_seen.load(Ordering::Relaxed));
    if now >= before.saturating_add(PAUSE) {
        state.orphans_seen.store(now, Ordering::Relaxed);
        settle(state);
    }
}

/// Gives back memory of which the last descriptor was closed.
pub(crate) fn settle(state: &'static State) {
    const BATCH: usize = 64;
    if state.orphans.load(Ordering::Relaxed) == 0 {
        return;
    }
    let mut locked = state.virtual_memory.lock();
    let mut seen = 0;
    while state.orphans.load(Ordering::Relaxed) > 0 {
        let mut batch = [0_u64; BATCH];
        let mut count = 0;
        state.table.each(|entry| {
            if entry.is(Space::Memory)
                && entry.flag & flag::ORPHAN != 0
                && entry.key > seen
                && let Some(place) = batch.get_mut(count)
            {
                *place = entry.key;
                count += 1;
            }
        });
        for number in batch.into_iter().take(count) {
            collect(state, &mut locked, number);
        }
        if count < BATCH {
            break;
        }
        // The entries come in no order, so a full batch may leave out some below its largest: they
        // are looked at the next time.
        seen = batch.into_iter().max().unwrap_or(u64::MAX);
    }
}

/// The memory that is mapped at an address, wherever in the mapping that is.
fn mapped_at(state: &'static State, locked: &Locked<'_>, address: u64) -> Option<Entry> {
    const MOST_STEPS: u32 = 1 << 20;
    let step = locked.step();
    let mut start = address & !(step - 1);
    for _ in 0..MOST_STEPS {
        if let Some(mapping) = state.table.get(Space::Mapping, start) {
            return (mapping.key.saturating_add(mapping.bytes) > address).then_some(mapping);
        }
        start = start.checked_sub(step)?;
    }
    None
}

fn create(
    state: &'static State,
    out: *mut Handle,
    size: usize,
    location: Location,
    make: impl FnOnce() -> Code,
) -> Code {
    // The properties say where it goes; no context is needed, and memory of the host is no matter
    // of ours.
    if location.kind != DEVICE {
        return make();
    }
    let device = match state.device(location.id) {
        Ok(device) => device,
        // SAFETY: the driver has written it.
        Err(why) => return code::uncharged(why, make, || give_back(unsafe { *out })),
    };
    let bytes = footprint(sys::bytes(size));
    if accounts::charge(state, device, bytes).is_err() {
        return OUT_OF_MEMORY;
    }
    let code = make();
    if code != SUCCESS {
        accounts::uncharge(state, device, bytes);
        return code;
    }
    // SAFETY: the driver has written it.
    let handle = unsafe { *out };
    let mut locked = state.virtual_memory.lock();
    if add(state, &mut locked, handle, device, (bytes, 0)).is_err() {
        drop(locked);
        // What cannot be remembered must not be had.
        give_back(handle);
        accounts::uncharge(state, device, bytes);
        return OUT_OF_MEMORY;
    }
    SUCCESS
}

/// Gives back a handle that the driver made just now, and that nobody else knows of.
fn give_back(handle: Handle) {
    // SAFETY: nobody has it.
    unsafe { driver!(cuMemRelease(handle => Handle)) };
}

fn release(state: &'static State, handle: Handle, release: impl FnOnce() -> Code) -> Code {
    let locked = state.virtual_memory.lock();
    // The handle is taken out before, because another thread may be given the same one as soon as
    // the driver has it back; what it was of is given back after.
    let Some(known) = state.table.get(Space::Handle, handle) else {
        drop(locked);
        return release();
    };
    if known.uses > 1 {
        state.table.change(Space::Handle, handle, |entry| entry.uses -= 1);
    } else {
        state.table.take(Space::Handle, handle);
    }
    drop(locked);
    let code = release();
    let mut locked = state.virtual_memory.lock();
    state.table.change(Space::Memory, known.owner, |memory| memory.uses = memory.uses.saturating_sub(1));
    if code == SUCCESS {
        collect(state, &mut locked, known.owner);
    } else {
        use_handle(state, handle, Some(known.owner));
    }
    code
}

fn map(
    state: &'static State,
    (address, size, offset): (u64, u64, u64),
    handle: Handle,
    map: impl FnOnce() -> Code,
) -> Code {
    let locked = state.virtual_memory.lock();
    let number = state.table.get(Space::Handle, handle).map(|entry| entry.owner);
    // It counts before it is made, so that no other thread's release lets go of it.
    let memory = number.and_then(|number| {
        state.table.change(Space::Memory, number, |memory| memory.more = memory.more.saturating_add(1))
    });
    drop(locked);
    let Some(memory) = memory else { return map() };
    let number = memory.key;
    let code = match extend_foreign(state, &memory, offset.saturating_add(size)) {
        Ok(()) => map(),
        Err(accounts::Refused) => OUT_OF_MEMORY,
    };
    let mut locked = state.virtual_memory.lock();
    if code != SUCCESS {
        let_go(state, &mut locked, number, 1);
        return code;
    }
    locked.mapped |= address | size;
    let entry = Entry { bytes: size, owner: number, ..Entry::new(Space::Mapping, address) };
    match state.table.insert(entry) {
        Ok(None) => SUCCESS,
        Ok(Some(former)) => {
            let_go(state, &mut locked, former.owner, 1);
            SUCCESS
        }
        Err(NoRoom) => {
            // SAFETY: it was mapped just now.
            unsafe { driver!(cuMemUnmap(address => u64, usize::try_from(size).unwrap_or(0) => usize)) };
            let_go(state, &mut locked, number, 1);
            OUT_OF_MEMORY
        }
    }
}

/// Charges foreign memory as far as it is mapped.
fn extend_foreign(state: &'static State, memory: &Entry, end: u64) -> Result<(), accounts::Refused> {
    let more = footprint(end).saturating_sub(memory.bytes);
    if memory.flag & flag::FOREIGN == 0 || more == 0 {
        return Ok(());
    }
    let Some(device) = state.device_at(memory.device) else { return Ok(()) };
    accounts::charge(state, device, more)?;
    state.table.change(Space::Memory, memory.key, |memory| memory.bytes = memory.bytes.saturating_add(more));
    Ok(())
}

fn unmap(state: &'static State, address: u64, size: u64, unmap: impl FnOnce() -> Code) -> Code {
    let mut locked = state.virtual_memory.lock();
    if locked.mapped == 0 {
        drop(locked);
        return unmap();
    }
    // As with handles, the one mapping that this nearly always is about is taken out before.
    let whole = state.table.get(Space::Mapping, address).filter(|mapping| mapping.bytes == size);
    if let Some(mapping) = whole {
        state.table.take(Space::Mapping, address);
        drop(locked);
        let code = unmap();
        locked = state.virtual_memory.lock();
        if code == SUCCESS {
            let_go(state, &mut locked, mapping.owner, 1);
        } else {
            let _put_back = state.table.insert(mapping);
        }
        return code;
    }
    // Several: nobody may map anything meanwhile.
    let code = unmap();
    if code == SUCCESS {
        let end = address.saturating_add(size);
        let step = locked.step();
        let mut at = address;
        while at < end {
            let mapping = state.table.take(Space::Mapping, at);
            if let Some(mapping) = &mapping {
                let_go(state, &mut locked, mapping.owner, 1);
            }
            at = at.saturating_add(mapping.map_or(step, |mapping| mapping.bytes.max(step)));
        }
    }
    code
}

fn import(state: &'static State, out: *mut Handle, origin: Origin, import: impl FnOnce() -> Code) -> Code {
    let code = import();
    if code != SUCCESS || out.is_null() {
        return code;
    }
    // SAFETY: the driver has written it.
    let handle = unsafe { *out };
    let mut locked = state.virtual_memory.lock();
    match origin {
        Origin::Here(number) => use_handle(state, handle, Some(number)),
        Origin::PodOrUnknown => use_handle(state, handle, None),
        Origin::Elsewhere if state.table.get(Space::Handle, handle).is_some() => {
            use_handle(state, handle, None);
        }
        Origin::Elsewhere => {
            let added = match device_of(state, handle) {
                Ok(Some(device)) => add(state, &mut locked, handle, device, (0, flag::FOREIGN))
                    .map_err(|NoRoom| OUT_OF_MEMORY),
                Ok(None) => Ok(()),
                Err(why) => Err(why),
            };
            if let Err(why) = added {
                // What cannot be charged once it is mapped must not be had.
                drop(locked);
                give_back(handle);
                return why;
            }
        }
    }
    code
}

/// The device of whatever memory a handle is of; none for memory of the host. An error is the driver's
/// code.
fn device_of(state: &'static State, handle: Handle) -> Result<Option<&'static Device>, Code> {
    let mut says = core::mem::MaybeUninit::<AllocationProperties>::zeroed();
    // SAFETY: the function takes a place for properties; all of it are numbers and a pointer.
    let (code, location) = unsafe {
        let code = driver!(cuMemGetAllocationPropertiesFromHandle(
            says.as_mut_ptr() => *mut AllocationProperties, handle => Handle
        ));
        (code, says.assume_init().location)
    };
    match (code, location.kind) {
        (SUCCESS, DEVICE) => state.device(location.id).map(Some),
        (SUCCESS, _) => Ok(None),
        (why, _) => Err(why),
    }
}

fn map_arrays(state: &'static State, list: *const ArrayMapping, count: c_uint, code: Code) -> Code {
    if code != SUCCESS || list.is_null() {
        return code;
    }
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller passed so many of them, and the driver has read them.
    let list = unsafe { core::slice::from_raw_parts(list, count) };
    let mut locked = state.virtual_memory.lock();
    for mapping in list.iter().filter(|mapping| mapping.operation == MAP) {
        // Which part of an array is mapped is not followed: until the array is gone, all is kept.
        if let Some(handle) = state.table.get(Space::Handle, mapping.handle) {
            pin(state, &mut locked, sys::key(mapping.resource), handle.owner);
        }
    }
    code
}

hooks! {
    /// Makes memory without an address.
    fn cuMemCreate(
        handle: *mut Handle, size: usize, properties: *const AllocationProperties, flags: u64,
    ) via state::cuda, |state, real| {
        if handle.is_null() || properties.is_null() {
            return real(handle, size, properties, flags);
        }
        // SAFETY: the caller passes properties.
        let location = unsafe { (*properties).location };
        create(state, handle, size, location, || real(handle, size, properties, flags))
    }

    /// Gives a handle back.
    fn cuMemRelease(handle: Handle) via state::cuda, |state, real| {
        release(state, handle, || real(handle))
    }

    /// The handle of mapped memory; it is to be given back as well.
    fn cuMemRetainAllocationHandle(handle: *mut Handle, address: *mut c_void) via state::cuda, |state, real| {
        let code = real(handle, address);
        if code == SUCCESS && !handle.is_null() {
            // SAFETY: the driver has written it.
            let handle = unsafe { *handle };
            let locked = state.virtual_memory.lock();
            let number = match state.table.get(Space::Handle, handle) {
                Some(_) => None,
                None => mapped_at(state, &locked, sys::key(address)).map(|mapping| mapping.owner),
            };
            use_handle(state, handle, number);
        }
        code
    }

    /// Gives memory an address.
    fn cuMemMap(
        address: u64, size: usize, offset: usize, handle: Handle, flags: u64,
    ) via state::cuda, |state, real| {
        let what = (address, sys::bytes(size), sys::bytes(offset));
        map(state, what, handle, || real(address, size, offset, handle, flags))
    }

    /// Takes addresses from memory.
    fn cuMemUnmap(address: u64, size: usize) via state::cuda, |state, real| {
        unmap(state, address, sys::bytes(size), || real(address, size))
    }

    /// Makes something of memory that other processes can import.
    fn cuMemExportToShareableHandle(
        out: *mut c_void, handle: Handle, kind: c_int, flags: u64,
    ) via state::cuda, |state, real| {
        let code = real(out, handle, kind, flags);
        if code != SUCCESS || out.is_null() {
            return code;
        }
        if kind == DESCRIPTOR {
            let _locked = state.virtual_memory.lock();
            // SAFETY: the driver has written a descriptor.
            let descriptor = unsafe { out.cast::<c_int>().read() };
            if let Some(known) = state.table.get(Space::Handle, handle)
                && exports::mark(state, descriptor, known.owner)
            {
                state.table.change(Space::Memory, known.owner, |memory| memory.flag |= flag::EXPORTED);
            }
        } else if kind == FABRIC {
            // SAFETY: the driver has written 64 bytes.
            ipc::note(state, unsafe { &*out.cast::<OpaqueHandle>() });
        }
        code
    }

    /// Takes part in memory of another process.
    fn cuMemImportFromShareableHandle(
        handle: *mut Handle, from: *mut c_void, kind: c_int,
    ) via state::cuda, |state, real| {
        let origin = match kind {
            // The descriptor itself is passed in the place of the pointer.
            DESCRIPTOR => match c_int::try_from(from.addr()) {
                Ok(descriptor) => exports::origin(state, descriptor),
                Err(_) => Origin::PodOrUnknown,
            },
            FABRIC if !from.is_null() => {
                // SAFETY: the caller passes 64 bytes.
                match ipc::is_noted(state, unsafe { &*from.cast::<OpaqueHandle>() }) {
                    Some(false) => Origin::Elsewhere,
                    _ => Origin::PodOrUnknown,
                }
            }
            _ => Origin::PodOrUnknown,
        };
        import(state, handle, origin, || real(handle, from, kind))
    }

    /// Maps memory into arrays.
    fn cuMemMapArrayAsync(list: *mut ArrayMapping, count: c_uint, stream: Stream) via state::cuda, |state, real| {
        map_arrays(state, list, count, real(list, count, stream))
    }

    /// Maps memory into arrays.
    fn cuMemMapArrayAsync_ptsz(
        list: *mut ArrayMapping, count: c_uint, stream: Stream,
    ) via state::cuda, |state, real| {
        map_arrays(state, list, count, real(list, count, stream))
    }

    /// Makes an object through which memory of several devices is reached. It has none of its own.
    fn cuMulticastCreate(handle: *mut Handle, properties: *const c_void) via state::cuda, |state, real| {
        let code = real(handle, properties);
        if code == SUCCESS && !handle.is_null() && let Some(device) = state.device_at(0) {
            // SAFETY: the driver has written it.
            let handle = unsafe { *handle };
            let mut locked = state.virtual_memory.lock();
            // Unknown, it keeps nothing, and what is bound to it is given back too early.
            let _unknown = add(state, &mut locked, handle, device, (0, flag::HOLDS));
        }
        code
    }

    /// Binds memory to such an object, which keeps it.
    fn cuMulticastBindMem(
        object: Handle, offset: usize, memory: Handle, memory_offset: usize, size: usize, flags: u64,
    ) via state::cuda, |state, real| {
        let code = real(object, offset, memory, memory_offset, size, flags);
        if code == SUCCESS {
            let mut locked = state.virtual_memory.lock();
            let handles = (state.table.get(Space::Handle, object), state.table.get(Space::Handle, memory));
            if let (Some(object), Some(memory)) = handles {
                pin(state, &mut locked, object.owner | HOLDER, memory.owner);
            }
        }
        code
    }

    /// Binds mapped memory to such an object, which keeps it.
    fn cuMulticastBindAddr(
        object: Handle, offset: usize, address: u64, size: usize, flags: u64,
    ) via state::cuda, |state, real| {
        let code = real(object, offset, address, size, flags);
        if code == SUCCESS && let Some(object) = state.table.get(Space::Handle, object) {
            let mut locked = state.virtual_memory.lock();
            let end = address.saturating_add(sys::bytes(size));
            let mut at = address;
            while at < end && let Some(mapping) = mapped_at(state, &locked, at) {
                pin(state, &mut locked, object.owner | HOLDER, mapping.owner);
                at = mapping.key.saturating_add(mapping.bytes.max(1));
            }
        }
        code
    }
}
