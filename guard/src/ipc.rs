//! Memory of other processes. Within a pod it is charged to whoever made it; what comes from outside
//! of the pod is charged to the importer.
//!
//! A handle is 64 bytes that say nothing. So processes of a pod note the handles that they give out
//! in a file in `/dev/shm`, which the containers of a pod share unless something else is mounted
//! there; a handle that is not noted comes from elsewhere. Where the file cannot be had, nothing can
//! be told, and imports are free.

use core::ffi::{CStr, c_uint};

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::accounts::{self, footprint};
use crate::code::{Code, OUT_OF_MEMORY, SUCCESS};
use crate::contexts;
use crate::plain;
use crate::state::{self, State};
use crate::streams;
use crate::symbols::{driver, hooks};
use crate::table::{Entry, Kind, Space};

type Pool = *mut core::ffi::c_void;

/// `CUipcMemHandle`, `CUmemPoolPtrExportData`, `CUmemFabricHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct OpaqueHandle {
    bytes: [u8; 64],
}

/// Groups of handles in the file, and handles in a group.
const GROUPS: u64 = 4096;
const GROUP: usize = 8;
/// Times that a note is written again which another process has overwritten at the same moment.
const TRIES: u32 = 4;

impl OpaqueHandle {
    /// What stands for it in the file; never 0.
    fn hash(&self) -> u64 {
        let hash = self.bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        (hash ^ (hash >> 32)).max(1)
    }
}

/// One group of the file.
#[derive(Clone, Copy)]
struct Group {
    at: u64,
    hashes: [u64; GROUP],
}

impl Group {
    fn of(file: &OwnedFd, hash: u64) -> Result<Self, Errno> {
        let at = (hash >> 20) % GROUPS * 64;
        let mut bytes = [0_u8; GROUP * 8];
        // Beyond its end the file has no notes.
        rustix::io::pread(file, &mut bytes, at)?;
        let mut hashes = [0; GROUP];
        for (hash, bytes) in hashes.iter_mut().zip(bytes.chunks_exact(8)) {
            *hash = bytes.try_into().map_or(0, u64::from_le_bytes);
        }
        Ok(Self { at, hashes })
    }

    fn has(&self, hash: u64) -> bool {
        self.hashes.contains(&hash)
    }

    /// Writes into a free place, or over one that the hash chooses.
    fn put(&self, file: &OwnedFd, hash: u64) -> Result<(), Errno> {
        let free = self.hashes.iter().position(|other| *other == 0);
        let place = free.and_then(|place| u64::try_from(place).ok()).unwrap_or(hash % 8);
        rustix::io::pwrite(file, &hash.to_le_bytes(), self.at.saturating_add(place * 8)).map(|_| ())
    }
}

/// The file of this pod, which is made if there is none.
fn notes(state: &'static State) -> Option<OwnedFd> {
    const PREFIX: &[u8] = b"/dev/shm/highwater-";
    let pod = state.accounts.lock().pages()?.pod;
    let mut path = [0_u8; 64];
    let name = pod.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'-');
    path.iter_mut().take(63).zip(PREFIX.iter().chain(name)).for_each(|(place, byte)| *place = *byte);
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::NOENT) => {}
        other => return other.ok(),
    }
    // Containers of a pod may run as different users, and whoever is first makes it.
    let all = Mode::from_raw_mode(0o666);
    match rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, all) {
        Ok(file) => rustix::fs::fchmod(&file, all).ok().map(|()| file),
        Err(Errno::EXIST) => rustix::fs::open(path, flags, Mode::empty()).ok(),
        Err(_) => None,
    }
}

/// Notes a handle that this process gives out.
pub(crate) fn note(state: &'static State, handle: &OpaqueHandle) {
    let Some(file) = notes(state) else { return };
    let hash = handle.hash();
    for _ in 0..TRIES {
        match Group::of(&file, hash) {
            Ok(group) if !group.has(hash) => {
                if group.put(&file, hash).is_err() {
                    return;
                }
            }
            _ => return,
        }
    }
}

/// Whether a handle was given out by this pod, where that can be told.
pub(crate) fn is_noted(state: &'static State, handle: &OpaqueHandle) -> Option<bool> {
    let file = notes(state)?;
    let hash = handle.hash();
    Group::of(&file, hash).ok().map(|group| group.has(hash))
}

/// Charges memory that was imported from elsewhere to this process.
fn imported(state: &'static State, pointer: u64, owner: u64, undo: impl FnOnce()) -> Code {
    if let Some(known) = state.table.get(Space::Pointer, pointer)
        && known.kind == Kind::Imported
    {
        state.table.change(Space::Pointer, pointer, |entry| entry.uses = entry.uses.saturating_add(1));
        return SUCCESS;
    }
    let (mut base, mut size) = (0_u64, 0_usize);
    // SAFETY: the function takes places for two numbers.
    let code = unsafe {
        driver!(cuMemGetAddressRange_v2(
            &raw mut base => *mut u64, &raw mut size => *mut usize, pointer => u64
        ))
    };
    let device = match (code, streams::current_device(state)) {
        (SUCCESS, Ok(device)) => device,
        // What cannot be charged must not be had.
        (SUCCESS, Err(why)) | (why, _) => {
            undo();
            return why;
        }
    };
    let bytes = footprint(crate::sys::bytes(size));
    if accounts::charge(state, device, bytes).is_err() {
        undo();
        return OUT_OF_MEMORY;
    }
    let entry = Entry {
        bytes,
        owner,
        uses: 1,
        device: state.index_of(device),
        kind: Kind::Imported,
        ..Entry::new(Space::Pointer, pointer)
    };
    if plain::remember(state, entry).is_err() {
        undo();
        accounts::uncharge(state, device, bytes);
        return OUT_OF_MEMORY;
    }
    SUCCESS
}

/// Opens a handle.
fn open(
    state: &'static State,
    pointer: *mut u64,
    handle: &OpaqueHandle,
    open: impl FnOnce() -> Code,
) -> Code {
    let elsewhere = is_noted(state, handle) == Some(false);
    let code = open();
    if code != SUCCESS || !elsewhere || pointer.is_null() {
        return code;
    }
    // SAFETY: the driver has written it.
    let pointer = unsafe { *pointer };
    imported(state, pointer, contexts::owner(state), || {
        // SAFETY: it was opened just now, and nobody else knows it.
        unsafe { driver!(cuIpcCloseMemHandle(pointer => u64)) };
    })
}

hooks! {
    /// Makes a handle of memory for other processes.
    fn cuIpcGetMemHandle(handle: *mut OpaqueHandle, pointer: u64) via state::cuda, |state, real| {
        let code = real(handle, pointer);
        if code == SUCCESS && !handle.is_null() {
            // SAFETY: the driver has written it.
            note(state, unsafe { &*handle });
        }
        code
    }

    /// Opens a handle.
    fn cuIpcOpenMemHandle(pointer: *mut u64, handle: OpaqueHandle, flags: c_uint) via state::cuda, |state, real| {
        open(state, pointer, &handle, || real(pointer, handle, flags))
    }

    /// Opens a handle.
    fn cuIpcOpenMemHandle_v2(
        pointer: *mut u64, handle: OpaqueHandle, flags: c_uint,
    ) via state::cuda, |state, real| {
        open(state, pointer, &handle, || real(pointer, handle, flags))
    }

    /// Closes what was opened.
    fn cuIpcCloseMemHandle(pointer: u64) via state::cuda, |state, real| {
        match state.table.get(Space::Pointer, pointer) {
            Some(entry) if entry.kind == Kind::Imported && entry.uses > 1 => {
                let code = real(pointer);
                if code == SUCCESS {
                    state.table.change(Space::Pointer, pointer, |entry| entry.uses = entry.uses.saturating_sub(1));
                }
                code
            }
            Some(entry) if entry.kind == Kind::Imported => {
                state.table.take(Space::Pointer, pointer);
                let code = real(pointer);
                if code == SUCCESS {
                    plain::released(state, &entry);
                } else {
                    let _put_back = state.table.insert(entry);
                }
                code
            }
            _ => real(pointer),
        }
    }

    /// Makes a handle of an allocation from a pool that is shared.
    fn cuMemPoolExportPointer(handle: *mut OpaqueHandle, pointer: u64) via state::cuda, |state, real| {
        let code = real(handle, pointer);
        if code == SUCCESS && !handle.is_null() {
            // SAFETY: the driver has written it.
            note(state, unsafe { &*handle });
        }
        code
    }

    /// Opens an allocation from a pool that is shared.
    fn cuMemPoolImportPointer(
        pointer: *mut u64, pool: Pool, handle: *mut OpaqueHandle,
    ) via state::cuda, |state, real| {
        // SAFETY: the caller passes a handle or null.
        let elsewhere = unsafe { handle.as_ref() }.is_some_and(|handle| is_noted(state, handle) == Some(false));
        let code = real(pointer, pool, handle);
        if code != SUCCESS || !elsewhere || pointer.is_null() {
            return code;
        }
        // SAFETY: the driver has written it.
        let pointer = unsafe { *pointer };
        imported(state, pointer, u64::MAX, || {
            // SAFETY: it was opened just now, and nobody else knows it.
            unsafe { driver!(cuMemFree_v2(pointer => u64)) };
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_keeps_as_many_notes_as_fit_and_then_the_newest() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let hashes: Vec<u64> = (1..=9).map(|number| 0x7700_0000_0000 | number).collect();
        for hash in &hashes {
            let group = Group::of(&file, *hash).unwrap();
            assert!(!group.has(*hash));
            group.put(&file, *hash).unwrap();
            assert!(Group::of(&file, *hash).unwrap().has(*hash));
        }
        let group = Group::of(&file, hashes[0]).unwrap();
        assert_eq!(hashes.iter().filter(|hash| group.has(**hash)).count(), 8);
    }

    #[test]
    fn handles_that_differ_in_a_byte_are_told_apart() {
        let mut handle = OpaqueHandle { bytes: [0; 64] };
        let first = handle.hash();
        handle.bytes[63] = 1;
        assert_ne!(first, handle.hash());
    }
}
