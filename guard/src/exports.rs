//! Descriptors that keep physical memory alive after its handle and mappings are gone.
//!
//! An exported descriptor can be duplicated, passed on and closed anywhere, and nothing tells the
//! exporter. But a lock on an open file lives exactly as long as the last duplicate of that very
//! descriptor. So the guard locks one byte of each descriptor when it is exported, at an offset that
//! names the pod, the process and the export, and can see later, through another open file of the
//! same inode, whether it is still held. The same lock tells an importer whose export it has got.

use core::ffi::{CStr, c_int, c_short};
use core::mem::size_of;

use rustix::fd::{AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use rustix::fs::{Mode, OFlags};

use crate::state::State;
use crate::sys::Zeroed;
use crate::table::{Entry, Space};

/// The open file through which locks are looked at, where all exports have one inode (the driver's
/// device); and the number of the last export.
#[repr(C)]
pub(crate) struct Exports {
    last: u32,
    /// The descriptor plus one.
    probe: RawFd,
    device: u64,
    inode: u64,
}

// SAFETY: numbers.
unsafe impl Zeroed for Exports {}

/// Where memory that is imported comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// This process: the number of the memory.
    Here(u64),
    /// This pod, or it cannot be told.
    PodOrUnknown,
    /// Somewhere else.
    Elsewhere,
}

/// `struct flock`, as 64-bit Linux has it.
#[repr(C)]
struct Lock {
    kind: c_short,
    whence: c_short,
    start: i64,
    length: i64,
    process: c_int,
}

const _: () = assert!(size_of::<Lock>() == 32);

const WRITE: c_short = 1;
/// No lock: how one is given back, and the answer that there is none.
const UNLOCKED: c_short = 2;
const LOOK: c_int = 36;
const TAKE: c_int = 37;

/// Bits of an offset: the export, the process's slot, the pod.
const EXPORT_BITS: u32 = 32;
const SLOT_BITS: u32 = 10;
const POD_BITS: u32 = 21;

/// Locks of this pod that an importer looks through.
const MOST_LOOKED_AT: u32 = 4096;

#[link(name = "c")]
unsafe extern "C" {
    fn fcntl(descriptor: c_int, command: c_int, ...) -> c_int;
    fn __errno_location() -> *mut c_int;
}

/// Takes a lock or looks for one that is in the way.
fn lock(descriptor: BorrowedFd<'_>, command: c_int, start: i64, length: i64) -> Option<Lock> {
    locked(descriptor, command, Lock { kind: WRITE, whence: 0, start, length, process: 0 })
}

/// Leaves the program's `errno` alone.
fn locked(descriptor: BorrowedFd<'_>, command: c_int, mut lock: Lock) -> Option<Lock> {
    // SAFETY: both commands take such a structure; `errno` is the thread's own.
    let result = unsafe {
        let errno = __errno_location();
        let before = *errno;
        let result = fcntl(descriptor.as_raw_fd(), command, &raw mut lock);
        *errno = before;
        result
    };
    (result == 0).then_some(lock)
}

/// Whether locks can be taken at all on what a descriptor is of: at an offset that no export has.
fn can_lock(descriptor: BorrowedFd<'_>, start: i64) -> bool {
    let taken = lock(descriptor, TAKE, start, 1).is_some();
    if taken {
        locked(descriptor, TAKE, Lock { kind: UNLOCKED, whence: 0, start, length: 1, process: 0 });
    }
    taken
}

/// First offset of this pod's exports, and the slot of this process.
fn pod_and_slot(state: &'static State) -> Option<(i64, i64)> {
    let accounts = state.accounts.lock();
    let pages = accounts.pages()?;
    let hash = pages.pod.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let pod = i64::try_from(hash >> (u64::BITS - POD_BITS)).unwrap_or(0);
    let slot = i64::try_from(pages.slot).unwrap_or(0) & ((1 << SLOT_BITS) - 1);
    Some((pod << (EXPORT_BITS + SLOT_BITS), slot))
}

/// Opens the file of a descriptor once more.
fn reopen(descriptor: BorrowedFd<'_>) -> Option<RawFd> {
    let mut path = *b"/proc/self/fd/\0\0\0\0\0\0\0\0\0\0\0\0";
    let mut number = u32::try_from(descriptor.as_raw_fd()).ok()?;
    let mut digits = [0_u8; 10];
    let mut used = 0;
    for place in &mut digits {
        *place = b'0' + u8::try_from(number % 10).ok()?;
        used += 1;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    let written = digits.get(..used)?.iter().rev();
    path.iter_mut().skip(14).zip(written).for_each(|(place, digit)| *place = *digit);
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    // For reading: a second writer could keep alive what the descriptor stands for.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).ok().map(IntoRawFd::into_raw_fd)
}

fn identity(descriptor: RawFd) -> Option<(u64, u64)> {
    // SAFETY: nothing is done with it but to ask what it is.
    let stat = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(descriptor) }).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// A part of an inode's number, to recognise it.
fn short(inode: u64) -> u32 {
    u32::try_from(inode & u64::from(u32::MAX)).unwrap_or(0)
}

/// Marks a descriptor as an export of that memory. False where that cannot be done.
pub(crate) fn mark(state: &'static State, descriptor: RawFd, memory: u64) -> bool {
    // Without an agent nobody is charged, and nobody of the pod is known.
    let Some((pod, slot)) = pod_and_slot(state) else { return false };
    let mut exports = state.exports.lock();
    exports.last = exports.last.wrapping_add(1).max(1);
    let number = exports.last;
    let offset = pod | slot << EXPORT_BITS | i64::from(number);
    let Some((device, inode)) = identity(descriptor) else { return false };
    // SAFETY: the driver has just opened it for the caller.
    let opened = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let is_shared = (exports.device, exports.inode) == (device, inode);
    let own_probe = if exports.probe > 0 && is_shared && identity(exports.probe - 1) == Some((device, inode))
    {
        0
    } else {
        let Some(probe) = reopen(opened) else { return false };
        if exports.probe == 0 || is_shared {
            (exports.probe, exports.device, exports.inode) = (probe.saturating_add(1), device, inode);
            0
        } else {
            probe.saturating_add(1)
        }
    };
    let noted = lock(opened, TAKE, offset, 1).is_some() && {
        let entry = Entry {
            bytes: u64::try_from(offset).unwrap_or(0),
            owner: memory,
            more: u64::try_from(own_probe).unwrap_or(0),
            uses: short(inode),
            ..Entry::new(Space::Export, u64::from(number))
        };
        state.table.insert(entry).is_ok()
    };
    if !noted {
        close(own_probe, inode);
    }
    noted
}

/// Closes a probe, given plus one, if it is still that.
fn close(probe: RawFd, inode: u64) {
    if probe > 0 && identity(probe - 1).is_some_and(|(_, other)| short(other) == short(inode)) {
        // SAFETY: it was opened here, and is still the same file.
        unsafe { rustix::io::close(probe - 1) };
    }
}

/// Whether a duplicate of an exported descriptor is still open anywhere.
fn is_open(state: &'static State, export: &Entry) -> bool {
    let own = RawFd::try_from(export.more).unwrap_or(0);
    let probe = if own > 0 { own } else { state.exports.lock().probe };
    let known = identity(probe.saturating_sub(1)).is_some_and(|(_, inode)| short(inode) == export.uses);
    if !known {
        // The program has closed the probe: it cannot be told any more.
        return true;
    }
    // SAFETY: as was just seen, it is the probe.
    let probe = unsafe { BorrowedFd::borrow_raw(probe - 1) };
    let found = lock(probe, LOOK, i64::try_from(export.bytes).unwrap_or(0), 1);
    found.is_none_or(|found| found.kind != UNLOCKED)
}

/// Whether any export of that memory is still open somewhere. Forgets those that are not.
pub(crate) fn any_open(state: &'static State, memory: u64) -> bool {
    const BATCH: usize = 32;
    let mut open = false;
    let mut seen = 0_u64;
    loop {
        // In the order of their numbers, a batch at a time: nothing may be asked of the table
        // while it is being looked through.
        let mut batch = [None; BATCH];
        state.table.each(|entry| {
            if entry.is(Space::Export) && entry.owner == memory && entry.key > seen {
                let mut next = Some(*entry);
                for place in &mut batch {
                    if place.is_none_or(|other: Entry| next.is_some_and(|next| next.key < other.key)) {
                        core::mem::swap(place, &mut next);
                    }
                    if next.is_none() {
                        break;
                    }
                }
            }
        });
        for export in batch.into_iter().flatten() {
            seen = export.key;
            if is_open(state, &export) {
                open = true;
            } else if let Some(export) = state.table.take(Space::Export, export.key) {
                close(RawFd::try_from(export.more).unwrap_or(0), u64::from(export.uses));
            }
        }
        if batch.iter().any(Option::is_none) {
            return open;
        }
    }
}

/// Whose export a descriptor is.
pub(crate) fn origin(state: &'static State, descriptor: RawFd) -> Origin {
    let Some((pod, slot)) = pod_and_slot(state).filter(|_| identity(descriptor).is_some()) else {
        return Origin::PodOrUnknown;
    };
    // SAFETY: the caller imports it.
    let imported = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let Some(probe) = reopen(imported) else { return Origin::PodOrUnknown };
    // SAFETY: it was just opened.
    let other = unsafe { BorrowedFd::borrow_raw(probe) };
    let end = pod.saturating_add(1 << (EXPORT_BITS + SLOT_BITS));
    let mut from = pod;
    let mut origin = Origin::PodOrUnknown;
    for _ in 0..MOST_LOOKED_AT {
        let Some(found) = lock(other, LOOK, from, end.saturating_sub(from)) else { break };
        if found.kind == UNLOCKED || from >= end {
            if can_lock(imported, pod | slot << EXPORT_BITS) {
                origin = Origin::Elsewhere;
            }
            break;
        }
        // Of two open files only that which has the lock gets it again.
        if lock(imported, TAKE, found.start, 1).is_some() {
            let number = u64::try_from(found.start & ((1 << EXPORT_BITS) - 1)).unwrap_or(0);
            let here = (found.start >> EXPORT_BITS) & ((1 << SLOT_BITS) - 1) == slot;
            let export = state.table.get(Space::Export, number).filter(|_| here);
            origin = export.map_or(Origin::PodOrUnknown, |export| Origin::Here(export.owner));
            break;
        }
        from = found.start.saturating_add(found.length.max(1));
    }
    // SAFETY: it was opened above.
    unsafe { rustix::io::close(probe) };
    origin
}
