//! Memory with an address from the start: plain, in rows, managed.

use core::ffi::c_uint;

use highwater_guard_abi::page::Managed;
use highwater_guard_abi::wire::RefusedReason;

use crate::accounts::{self, footprint};
use crate::blocks::{self, BLOCK};
use crate::client;
use crate::code::{self, Code, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS};
use crate::contexts;
use crate::pools;
use crate::state::{self, Device, State};
use crate::streams;
use crate::symbols::{driver, hooks};
use crate::sys;
use crate::table::{Entry, Kind, NoRoom, Space};
use crate::virtual_memory;

/// What the driver aligns rows to; seen on an H200, and corrected by what it then says.
const PITCH: u64 = 512;

/// Allocates memory that goes with its context, charged to its device before it is asked for: `size`
/// bytes at the pointer that `allocated` gives once `allocate` succeeded, with the size that it has
/// really.
fn allocate(
    state: &'static State,
    size: u64,
    allocate: impl FnOnce() -> Code,
    allocated: impl FnOnce() -> (u64, u64),
) -> Code {
    let device = match streams::current_device(state) {
        Ok(device) => device,
        Err(why) => return code::uncharged(why, allocate, || give_back(allocated().0)),
    };
    client::heed(state);
    let piece = if size < BLOCK { blocks::piece(size) } else { 0 };
    let charged = if piece > 0 { blocks::expect(device, piece) } else { footprint(size) };
    if accounts::charge(state, device, charged).is_err() {
        blocks::forget(device, piece);
        return OUT_OF_MEMORY;
    }
    let code = allocate();
    if code != SUCCESS {
        blocks::forget(device, piece);
        accounts::uncharge(state, device, charged);
        return code;
    }
    let (pointer, taken) = allocated();
    let owner = contexts::owner(state);
    let entry = Entry { owner, device: state.index_of(device), ..Entry::new(Space::Pointer, pointer) };
    let kept = if piece > 0 && taken < BLOCK {
        keep_small(state, device, charged, Entry { bytes: piece, kind: Kind::Small, ..entry })
    } else {
        blocks::forget(device, piece);
        keep(state, device, charged, Entry { bytes: footprint(taken), ..entry })
    };
    if let Err(held) = kept {
        // What cannot be charged or remembered must not be had.
        give_back(pointer);
        accounts::uncharge(state, device, held);
        return OUT_OF_MEMORY;
    }
    SUCCESS
}

/// Gives back what was allocated just now, and what nobody else knows of.
fn give_back(pointer: u64) {
    // SAFETY: nobody has it.
    unsafe { driver!(cuMemFree_v2(pointer => u64)) };
}

/// Charges and notes an allocation that has memory of its own, of which `charged` bytes are charged.
/// An error says how many are charged then.
fn keep(state: &'static State, device: &'static Device, charged: u64, entry: Entry) -> Result<(), u64> {
    accounts::charge(state, device, entry.bytes.saturating_sub(charged)).map_err(|_| charged)?;
    accounts::uncharge(state, device, charged.saturating_sub(entry.bytes));
    remember(state, entry).map_err(|_| entry.bytes)
}

/// The same for one that is in a block, for which `charged` bytes are charged.
fn keep_small(state: &'static State, device: &'static Device, charged: u64, entry: Entry) -> Result<(), u64> {
    let Ok(is_new) = blocks::enter(state, device, entry.key, entry.owner) else {
        blocks::forget(device, entry.bytes);
        return Err(charged);
    };
    let needed = if is_new { BLOCK } else { 0 };
    let more = needed.saturating_sub(charged);
    let fits = accounts::charge(state, device, more).is_ok();
    accounts::uncharge(state, device, charged.saturating_sub(needed));
    if fits && remember(state, entry).is_ok() {
        return Ok(());
    }
    blocks::forget(device, entry.bytes);
    let held = if fits { needed } else { needed.saturating_sub(more) };
    if needed > 0 && !blocks::leave(state, device, entry.key) {
        // Another thread has got a piece of it meanwhile.
        accounts::charge_anyway(state, device, needed.saturating_sub(held));
        return Err(0);
    }
    if needed == 0 && blocks::leave(state, device, entry.key) {
        return Err(BLOCK);
    }
    Err(held)
}

/// Notes what was allocated. What was known under the same pointer must have been freed in a way
/// that was not seen.
pub(crate) fn remember(state: &'static State, entry: Entry) -> Result<(), NoRoom> {
    if let Some(former) = state.table.insert(entry)? {
        released(state, &former);
    }
    Ok(())
}

/// Frees a pointer: one that is not known here is the driver's matter.
fn free(state: &'static State, pointer: u64, free: impl FnOnce() -> Code) -> Code {
    // It is taken out before, because another thread may be given the same address as soon as the
    // driver has it back.
    let known = state.table.take(Space::Pointer, pointer);
    let code = free();
    match known {
        Some(entry) if code == SUCCESS => released(state, &entry),
        Some(entry) => {
            let _put_back = state.table.insert(entry);
        }
        None if code == SUCCESS => pools::touched(state),
        None => {}
    }
    virtual_memory::settle_sometimes(state);
    client::heed(state);
    code
}

/// Gives back what a freed pointer held.
pub(crate) fn released(state: &'static State, entry: &Entry) {
    match (entry.kind, state.device_at(entry.device)) {
        (Kind::Pool, _) => pools::freed(state, entry),
        (Kind::Small, Some(device)) => {
            blocks::forget(device, entry.bytes);
            if blocks::leave(state, device, entry.key) {
                accounts::uncharge(state, device, BLOCK);
            }
        }
        (_, Some(device)) => accounts::uncharge(state, device, entry.bytes),
        (_, None) => {}
    }
}

/// Bytes of rows before the driver has said how long it makes them.
fn rows(width: u64, height: u64) -> u64 {
    width.div_ceil(PITCH).saturating_mul(PITCH).saturating_mul(height)
}

hooks! {
    /// Allocates memory.
    fn cuMemAlloc_v2(pointer: *mut u64, size: usize) via state::cuda, |state, real| {
        if pointer.is_null() {
            return real(pointer, size);
        }
        let size_of = sys::bytes(size);
        // SAFETY: the driver has written it.
        allocate(state, size_of, || real(pointer, size), || (unsafe { *pointer }, size_of))
    }

    /// Allocates memory; the form for 32 bits.
    fn cuMemAlloc(pointer: *mut c_uint, size: c_uint) via state::cuda, |state, real| {
        if pointer.is_null() {
            return real(pointer, size);
        }
        let size_of = u64::from(size);
        // SAFETY: the driver has written it.
        let allocated = || (u64::from(unsafe { *pointer }), size_of);
        allocate(state, size_of, || real(pointer, size), allocated)
    }

    /// Allocates rows.
    fn cuMemAllocPitch_v2(
        pointer: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint,
    ) via state::cuda, |state, real| {
        if pointer.is_null() || pitch.is_null() {
            return real(pointer, pitch, width, height, element);
        }
        let height_of = sys::bytes(height);
        // SAFETY: the driver has written both.
        let allocated = || unsafe { (*pointer, sys::bytes(*pitch).saturating_mul(height_of)) };
        let size = rows(sys::bytes(width), height_of);
        allocate(state, size, || real(pointer, pitch, width, height, element), allocated)
    }

    /// Allocates rows; the form for 32 bits.
    fn cuMemAllocPitch(
        pointer: *mut c_uint, pitch: *mut c_uint, width: c_uint, height: c_uint, element: c_uint,
    ) via state::cuda, |state, real| {
        if pointer.is_null() || pitch.is_null() {
            return real(pointer, pitch, width, height, element);
        }
        // SAFETY: the driver has written both.
        let allocated = || unsafe { (u64::from(*pointer), u64::from(*pitch).saturating_mul(u64::from(height))) };
        let size = rows(u64::from(width), u64::from(height));
        allocate(state, size, || real(pointer, pitch, width, height, element), allocated)
    }

    /// Allocates memory that the driver moves between host and device.
    fn cuMemAllocManaged(pointer: *mut u64, size: usize, flags: c_uint) via state::cuda, |state, real| {
        if pointer.is_null() {
            return real(pointer, size, flags);
        }
        let size_of = sys::bytes(size);
        let device = streams::current_device(state);
        match device.map_or(Managed::Charge, |device| accounts::managed(state, device)) {
            Managed::Ignore => real(pointer, size, flags),
            Managed::Refuse => {
                if let Ok(device) = device {
                    accounts::report(state, device, size_of, RefusedReason::Managed);
                }
                NOT_SUPPORTED
            }
            Managed::Charge => {
                // SAFETY: the driver has written it.
                let allocated = || (unsafe { *pointer }, size_of);
                allocate(state, size_of, || real(pointer, size, flags), allocated)
            }
        }
    }

    /// Frees memory.
    fn cuMemFree_v2(pointer: u64) via state::cuda, |state, real| {
        free(state, pointer, || real(pointer))
    }

    /// Frees memory; the form for 32 bits.
    fn cuMemFree(pointer: c_uint) via state::cuda, |state, real| {
        free(state, u64::from(pointer), || real(pointer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_long_as_the_driver_makes_them() {
        assert_eq!(rows(1000, 100_000), 1024 * 100_000);
        assert_eq!(rows(512, 3), 1536);
        assert_eq!(rows(0, 3), 0);
        assert_eq!(rows(u64::MAX, 2), u64::MAX);
    }
}
