//! Small allocations share blocks of 2 MiB, which the driver takes when it needs one and gives back
//! when nothing in it is left. An allocation's address says in which block it is, so what is charged
//! is the blocks.

use highwater_guard_abi::charge::DRIVER_GRANULE;

use crate::state::{Device, State};
use crate::sys::Zeroed;
use crate::table::{Entry, NoRoom, Space};

/// Size of a block, and of the smallest allocation that has memory of its own.
pub(crate) const BLOCK: u64 = DRIVER_GRANULE;

/// What the driver rounds small allocations to.
const STEP: u64 = 512;

/// The blocks of a device, and the bytes that are allocated in them.
#[repr(C)]
pub(crate) struct Blocks {
    count: u64,
    live: u64,
}

// SAFETY: numbers.
unsafe impl Zeroed for Blocks {}

/// What a small allocation takes of a block.
pub(crate) fn piece(size: u64) -> u64 {
    size.div_ceil(STEP).saturating_mul(STEP)
}

/// The key of the block that an address is in.
fn key(pointer: u64) -> u64 {
    pointer / BLOCK
}

/// Counts a piece that is about to be allocated. Returns what to charge for it first: a block, if
/// there is no room for it in those that there are.
pub(crate) fn expect(device: &Device, piece: u64) -> u64 {
    let mut blocks = device.blocks.lock();
    let room = blocks.count.saturating_mul(BLOCK).saturating_sub(blocks.live);
    blocks.live = blocks.live.saturating_add(piece);
    if piece > room { BLOCK } else { 0 }
}

/// A piece is gone, or was not allocated after all.
pub(crate) fn forget(device: &Device, piece: u64) {
    let mut blocks = device.blocks.lock();
    blocks.live = blocks.live.saturating_sub(piece);
}

/// Notes in which block a piece is. Returns whether that is a new one, which is to be charged.
pub(crate) fn enter(
    state: &'static State,
    device: &Device,
    pointer: u64,
    owner: u64,
) -> Result<bool, NoRoom> {
    let mut blocks = device.blocks.lock();
    if state
        .table
        .change(Space::Block, key(pointer), |block| block.uses = block.uses.saturating_add(1))
        .is_some()
    {
        return Ok(false);
    }
    let block = Entry {
        bytes: BLOCK,
        owner,
        uses: 1,
        device: state.index_of(device),
        ..Entry::new(Space::Block, key(pointer))
    };
    state.table.insert(block)?;
    blocks.count = blocks.count.saturating_add(1);
    Ok(true)
}

/// A piece leaves its block. Returns whether that was the last one, so that the block is to be given
/// back.
pub(crate) fn leave(state: &'static State, device: &Device, pointer: u64) -> bool {
    let mut blocks = device.blocks.lock();
    let left =
        state.table.change(Space::Block, key(pointer), |block| block.uses = block.uses.saturating_sub(1));
    let is_empty = left.is_some_and(|block| block.uses == 0);
    if is_empty {
        state.table.take(Space::Block, key(pointer));
        blocks.count = blocks.count.saturating_sub(1);
    }
    is_empty
}

/// Blocks went with their context.
pub(crate) fn ended(device: &Device, count: u64) {
    let mut blocks = device.blocks.lock();
    blocks.count = blocks.count.saturating_sub(count);
}
