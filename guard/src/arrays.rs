//! Arrays: memory in a layout of the driver's choice, so its size is estimated from what is asked.

use core::ffi::{c_uint, c_void};

use crate::accounts::{self, footprint};
use crate::code::{self, Code, OUT_OF_MEMORY, SUCCESS};
use crate::contexts;
use crate::state::{self, State};
use crate::streams;
use crate::symbols::{driver, hooks};
use crate::sys;
use crate::table::{Entry, Space};
use crate::virtual_memory;

type Array = *mut c_void;

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: no memory yet.
const WITHOUT_MEMORY: c_uint = 0x40 | 0x80;

/// `CUDA_ARRAY_DESCRIPTOR`, and its form for 32 bits.
#[repr(C)]
pub(crate) struct Description<N> {
    width: N,
    height: N,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`, and its form for 32 bits.
#[repr(C)]
pub(crate) struct Description3<N> {
    width: N,
    height: N,
    depth: N,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

/// What is asked for, whichever form was used.
#[derive(Clone, Copy, Debug)]
struct Shape {
    width: u64,
    height: u64,
    depth: u64,
    format: c_uint,
    channels: c_uint,
}

fn number(value: impl TryInto<u64>) -> u64 {
    value.try_into().unwrap_or(u64::MAX)
}

impl<N: Copy + TryInto<u64>> Description<N> {
    fn shape(&self) -> Shape {
        Shape {
            width: number(self.width),
            height: number(self.height),
            depth: 1,
            format: self.format,
            channels: self.channels,
        }
    }
}

impl<N: Copy + TryInto<u64>> Description3<N> {
    /// None for what takes no memory yet.
    fn shape(&self) -> Option<Shape> {
        (self.flags & WITHOUT_MEMORY == 0).then(|| Shape {
            width: number(self.width),
            height: number(self.height),
            depth: number(self.depth),
            format: self.format,
            channels: self.channels,
        })
    }
}

/// Bits that an element takes; for formats that name their channels, whatever `channels` says.
fn bits(format: c_uint, channels: c_uint) -> u64 {
    let each = match format {
        // Integers of 8, 16 and 32 bits without and with sign, and numbers of 16 and 32 bits.
        0x01 | 0x08 => 8,
        0x02 | 0x09 | 0x10 => 16,
        0x03 | 0x0a | 0x20 => 32,
        // Those that name all of it. Compressed ones count as if rows of blocks were full, and
        // pictures with coarser colour by the average.
        0x91 | 0x92 | 0x97 | 0x98 => return 4,
        0x93..=0x96 | 0x99..=0x9d | 0xc0 | 0xc6 => return 8,
        0xb0 => return 12,
        0xa2 | 0xa5 | 0xc1 | 0xc3 | 0xc7 | 0xc9 => return 16,
        0x9f | 0xa1 | 0xb2 | 0xb4 => return 24,
        0x50 | 0xc2 | 0xc4 | 0xc8 | 0xca => return 32,
        0xc5 | 0xcb => return 64,
        // Whatever else there is has no more than four channels of 32 bits.
        _ => return 128,
    };
    each * u64::from(channels.max(1))
}

/// Rows and layers are padded to this.
const ROW: u64 = 64;

impl Shape {
    fn bytes(self) -> u64 {
        let row = self.width.saturating_mul(bits(self.format, self.channels)).div_ceil(8);
        let row = row.div_ceil(ROW).saturating_mul(ROW);
        row.saturating_mul(self.height.max(1)).saturating_mul(self.depth.max(1))
    }

    /// All levels, each half as large as the one before.
    fn bytes_of_levels(self, levels: c_uint) -> u64 {
        let mut level = self;
        let mut total = 0_u64;
        for _ in 0..levels.min(32) {
            total = total.saturating_add(level.bytes());
            level.width = (level.width / 2).max(1);
            level.height /= 2;
            // Layers do not shrink, but nothing here says which it is: count them in full.
        }
        total
    }
}

fn create(
    state: &'static State,
    space: Space,
    out: *mut Array,
    bytes: u64,
    make: impl FnOnce() -> Code,
) -> Code {
    if out.is_null() || bytes == 0 {
        return make();
    }
    // SAFETY: it was made just now, and nobody else knows it.
    let give_back = || unsafe {
        if space == Space::Array {
            driver!(cuArrayDestroy(*out => Array));
        } else {
            driver!(cuMipmappedArrayDestroy(*out => Array));
        }
    };
    let device = match streams::current_device(state) {
        Ok(device) => device,
        Err(why) => return code::uncharged(why, make, give_back),
    };
    let charged = footprint(bytes);
    if accounts::charge(state, device, charged).is_err() {
        return OUT_OF_MEMORY;
    }
    let code = make();
    if code != SUCCESS {
        accounts::uncharge(state, device, charged);
        return code;
    }
    // SAFETY: the driver has written it.
    let array = unsafe { *out };
    let entry = Entry {
        bytes: charged,
        owner: contexts::owner(state),
        device: state.index_of(device),
        ..Entry::new(space, sys::key(array))
    };
    if let Ok(former) = state.table.insert(entry) {
        accounts::uncharge(state, device, former.map_or(0, |former| former.bytes));
        return SUCCESS;
    }
    // What cannot be remembered must not be had.
    give_back();
    accounts::uncharge(state, device, charged);
    OUT_OF_MEMORY
}

fn destroy(state: &'static State, space: Space, array: Array, end: impl FnOnce() -> Code) -> Code {
    let known = state.table.take(space, sys::key(array));
    let code = end();
    if code != SUCCESS {
        if let Some(entry) = known {
            let _put_back = state.table.insert(entry);
        }
        return code;
    }
    if let Some(entry) = known
        && let Some(device) = state.device_at(entry.device)
    {
        accounts::uncharge(state, device, entry.bytes);
    }
    virtual_memory::unpinned(state, sys::key(array));
    code
}

hooks! {
    /// Makes an array.
    fn cuArrayCreate_v2(array: *mut Array, asked: *const Description<usize>) via state::cuda, |state, real| {
        // SAFETY: the caller passes a description or null.
        let bytes = unsafe { asked.as_ref() }.map_or(0, |asked| asked.shape().bytes());
        create(state, Space::Array, array, bytes, || real(array, asked))
    }

    /// Makes an array; the form for 32 bits.
    fn cuArrayCreate(array: *mut Array, asked: *const Description<c_uint>) via state::cuda, |state, real| {
        // SAFETY: the caller passes a description or null.
        let bytes = unsafe { asked.as_ref() }.map_or(0, |asked| asked.shape().bytes());
        create(state, Space::Array, array, bytes, || real(array, asked))
    }

    /// Makes an array of up to three dimensions.
    fn cuArray3DCreate_v2(array: *mut Array, asked: *const Description3<usize>) via state::cuda, |state, real| {
        // SAFETY: the caller passes a description or null.
        let bytes = unsafe { asked.as_ref() }.and_then(Description3::shape).map_or(0, Shape::bytes);
        create(state, Space::Array, array, bytes, || real(array, asked))
    }

    /// Makes an array of up to three dimensions; the form for 32 bits.
    fn cuArray3DCreate(array: *mut Array, asked: *const Description3<c_uint>) via state::cuda, |state, real| {
        // SAFETY: the caller passes a description or null.
        let bytes = unsafe { asked.as_ref() }.and_then(Description3::shape).map_or(0, Shape::bytes);
        create(state, Space::Array, array, bytes, || real(array, asked))
    }

    /// Makes an array with smaller copies of itself.
    fn cuMipmappedArrayCreate(
        array: *mut Array, asked: *const Description3<usize>, levels: c_uint,
    ) via state::cuda, |state, real| {
        // SAFETY: the caller passes a description or null.
        let shape = unsafe { asked.as_ref() }.and_then(Description3::shape);
        let bytes = shape.map_or(0, |shape| shape.bytes_of_levels(levels));
        create(state, Space::Mipmap, array, bytes, || real(array, asked, levels))
    }

    /// Destroys an array.
    fn cuArrayDestroy(array: Array) via state::cuda, |state, real| {
        destroy(state, Space::Array, array, || real(array))
    }

    /// Destroys an array with smaller copies of itself.
    fn cuMipmappedArrayDestroy(array: Array) via state::cuda, |state, real| {
        destroy(state, Space::Mipmap, array, || real(array))
    }
}

const _: () = assert!(size_of::<Description<usize>>() == 24);

#[cfg(test)]
mod tests {
    use super::*;

    const FLOAT: c_uint = 0x20;

    #[test]
    fn a_plain_array_is_its_elements() {
        let asked = Description { width: 4096_usize, height: 4096, format: FLOAT, channels: 4 };
        assert_eq!(asked.shape().bytes(), 256 << 20);
        let line = Description { width: 1000_u32, height: 0, format: 1, channels: 1 };
        assert_eq!(line.shape().bytes(), 1024);
    }

    #[test]
    fn layers_count_and_what_has_no_memory_yet_does_not() {
        let mut asked =
            Description3 { width: 64_usize, height: 64, depth: 6, format: FLOAT, channels: 1, flags: 1 };
        assert_eq!(asked.shape().map(Shape::bytes), Some(64 * 64 * 4 * 6));
        asked.flags = 0x40;
        assert!(asked.shape().is_none());
    }

    #[test]
    fn levels_add_up_to_a_third_more() {
        let shape = Shape { width: 4096, height: 4096, depth: 1, format: FLOAT, channels: 1 };
        let (one, all) = (shape.bytes(), shape.bytes_of_levels(13));
        assert!(all > one + one / 4 && all < one + one / 2, "{all}");
    }

    #[test]
    fn absurd_shapes_are_too_large_and_not_small() {
        let shape = Shape { width: u64::MAX, height: u64::MAX, depth: 9, format: FLOAT, channels: 4 };
        assert_eq!(shape.bytes(), u64::MAX);
        assert_eq!(shape.bytes_of_levels(u32::MAX), u64::MAX);
    }
}
