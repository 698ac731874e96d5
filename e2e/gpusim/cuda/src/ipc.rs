//! Allocations of one process opened by another.

use std::ffi::{c_int, c_uint};

use gpusim::protocol::{Reply, Request};

use crate::code::Code;
use crate::exports;
use crate::memory::block_at;
use crate::output::{Out, put};
use crate::session::{Backing, Block, DevicePointer, Session, with, with_current};

/// CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the only flag that there is.
const LAZY: c_uint = 1;
/// Marks a handle as one of ours.
const MARK: u64 = 0x6d69_7375_7067_1001;

/// `CUipcMemHandle`: 64 bytes that another process passes on as they are.
#[repr(C)]
#[derive(Clone, Copy)]
struct MemoryHandle {
    mark: [u8; 8],
    /// The allocation, as the daemon numbers it.
    piece: [u8; 8],
    /// Where in it the address was that the handle was made for.
    offset: [u8; 8],
    size: [u8; 8],
    rest: [u8; 32],
}

const _: () = assert!(size_of::<MemoryHandle>() == 64);

exports! {
    /// A handle by which another process can open an allocation.
    fn cuIpcGetMemHandle(handle: Out<MemoryHandle>, address: DevicePointer) {
        let made = with_current(|session, _| {
            let (piece, offset, size) = find(session, address).ok_or(Code::InvalidValue)?;
            Ok(MemoryHandle {
                mark: MARK.to_le_bytes(),
                piece: piece.to_le_bytes(),
                offset: offset.to_le_bytes(),
                size: size.to_le_bytes(),
                rest: [0; 32],
            })
        })?;
        put(handle, made)
    }

    /// Opens another process's allocation.
    fn cuIpcOpenMemHandle(address: Out<DevicePointer>, handle: MemoryHandle, flags: c_uint) {
        open(address, &handle, flags)
    }

    /// Opens another process's allocation.
    fn cuIpcOpenMemHandle_v2(address: Out<DevicePointer>, handle: MemoryHandle, flags: c_uint) {
        open(address, &handle, flags)
    }

    /// Closes it again.
    fn cuIpcCloseMemHandle(address: DevicePointer) {
        with(|session| match session.blocks.get(&address).map(|block| block.backing) {
            Some(Backing::Opened(id)) => {
                session.call(&Request::Free(id))?;
                session.blocks.remove(&address);
                Ok(())
            }
            _ => Err(Code::InvalidValue),
        })
    }
}

/// The piece that the allocation at an address is in, its place there, and its size.
fn find(session: &Session, address: DevicePointer) -> Option<(u64, u64, u64)> {
    let (start, block) = block_at(session, address)?;
    match block.backing {
        Backing::Own(id) => Some((id, 0, block.size)),
        Backing::Part => {
            let (begin, shared) = session.shared.range(..=start).next_back()?;
            Some((shared.id, start - begin, block.size))
        }
        _ => None,
    }
}

fn open(address: Out<DevicePointer>, handle: &MemoryHandle, flags: c_uint) -> Result<(), Code> {
    let out = address.ok_or(Code::InvalidValue)?;
    if u64::from_le_bytes(handle.mark) != MARK || flags != LAZY {
        return Err(Code::InvalidValue);
    }
    let (offset, size) = (u64::from_le_bytes(handle.offset), u64::from_le_bytes(handle.size));
    let place = with_current(|session, context| {
        let Reply::Shared { id, region, bytes } =
            session.call(&Request::Open(u64::from_le_bytes(handle.piece)))?
        else {
            return Err(Code::Unknown);
        };
        let fits = offset.checked_add(size).is_some_and(|end| end <= bytes);
        let Some(device) = session.position(region).filter(|_| fits) else {
            session.call(&Request::Free(id))?;
            return Err(Code::InvalidValue);
        };
        let place = session.new_address(bytes)? + offset;
        session.blocks.insert(place, Block { size, backing: Backing::Opened(id), context, device });
        Ok(place)
    })?;
    put(Some(out), place)
}

/// Whether a block could be opened by another process, for pointers that ask.
pub(crate) fn is_capable(block: &Block) -> c_int {
    c_int::from(matches!(block.backing, Backing::Own(_) | Backing::Part))
}
