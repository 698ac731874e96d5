//! Arrays: memory whose layout is the device's own affair.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};

use gpusim::protocol::{MemoryKind, Request};

use crate::code::Code;
use crate::link::is_null;
use crate::output::{Out, put};
use crate::session::{Session, opaque, with, with_current};
use crate::{exports, stream};

/// Flags of arrays that have no memory of their own: sparse ones, and those that are mapped later.
const WITHOUT_MEMORY: c_uint = 0x40 | 0x80;

/// `CUDA_ARRAY_DESCRIPTOR`; its first form counts in 32 bits.
#[repr(C)]
#[derive(Clone, Copy)]
struct Plane<N> {
    width: N,
    height: N,
    format: c_int,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`; its first form counts in 32 bits.
#[repr(C)]
#[derive(Clone, Copy)]
struct Space<N> {
    width: N,
    height: N,
    depth: N,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

const _: () = assert!(size_of::<Plane<usize>>() == 24 && size_of::<Space<usize>>() == 40);
const _: () = assert!(size_of::<Plane<c_uint>>() == 16 && size_of::<Space<c_uint>>() == 24);

/// The arrays of a process.
#[derive(Default)]
pub(crate) struct Arrays {
    arrays: BTreeMap<usize, Array>,
    mipmapped: BTreeMap<usize, Array>,
}

struct Array {
    /// As the daemon numbers its memory; nothing where it has none.
    memory: Option<u64>,
    /// Handle of its context.
    context: usize,
    shape: Space<usize>,
}

exports! {
    /// Makes an array of one or two dimensions.
    fn cuArrayCreate(array: Out<*mut c_void>, shape: Option<&Plane<c_uint>>) {
        let shape = shape.ok_or(Code::InvalidValue)?;
        let (width, height) = (wide(shape.width)?, wide(shape.height)?);
        create(array, Space { width, height, depth: 0, format: shape.format, channels: shape.channels, flags: 0 })
    }

    /// Makes an array of one or two dimensions.
    fn cuArrayCreate_v2(array: Out<*mut c_void>, shape: Option<&Plane<usize>>) {
        let Plane { width, height, format, channels } = *shape.ok_or(Code::InvalidValue)?;
        create(array, Space { width, height, depth: 0, format, channels, flags: 0 })
    }

    /// Makes an array.
    fn cuArray3DCreate(array: Out<*mut c_void>, shape: Option<&Space<c_uint>>) {
        let Space { width, height, depth, format, channels, flags } = *shape.ok_or(Code::InvalidValue)?;
        let (width, height, depth) = (wide(width)?, wide(height)?, wide(depth)?);
        create(array, Space { width, height, depth, format, channels, flags })
    }

    /// Makes an array.
    fn cuArray3DCreate_v2(array: Out<*mut c_void>, shape: Option<&Space<usize>>) {
        create(array, *shape.ok_or(Code::InvalidValue)?)
    }

    /// What an array is like.
    fn cuArrayGetDescriptor_v2(shape: Out<Plane<usize>>, array: *mut c_void) {
        let Space { width, height, format, channels, .. } = shape_of(array)?;
        put(shape, Plane { width, height, format, channels })
    }

    /// What an array is like.
    fn cuArray3DGetDescriptor_v2(shape: Out<Space<usize>>, array: *mut c_void) {
        put(shape, shape_of(array)?)
    }

    /// Ends an array.
    fn cuArrayDestroy(array: *mut c_void) {
        with(|session| {
            let array = session.arrays.arrays.remove(&array.addr()).ok_or(Code::InvalidHandle)?;
            release(session, &array)
        })
    }

    /// Makes an array with smaller copies of itself.
    fn cuMipmappedArrayCreate(array: Out<*mut c_void>, shape: Option<&Space<usize>>, levels: c_uint) {
        let out = array.ok_or(Code::InvalidValue)?;
        let shape = *shape.ok_or(Code::InvalidValue)?;
        let most = usize::BITS - shape.width.max(shape.height).max(shape.depth).leading_zeros();
        let mut bytes = 0_u64;
        for level in 0..levels.clamp(1, most.max(1)) {
            bytes = bytes.checked_add(size(&at_level(shape, level))?).ok_or(Code::OutOfMemory)?;
        }
        let handle = make(shape, bytes, |arrays| &mut arrays.mipmapped)?;
        put(Some(out), opaque(handle))
    }

    /// One of an array's smaller copies, which goes with the whole.
    fn cuMipmappedArrayGetLevel(array: Out<*mut c_void>, whole: *mut c_void, level: c_uint) {
        let out = array.ok_or(Code::InvalidValue)?;
        let handle = with(|session| {
            let whole = session.arrays.mipmapped.get(&whole.addr()).ok_or(Code::InvalidHandle)?;
            let part = Array { memory: None, context: whole.context, shape: at_level(whole.shape, level) };
            let handle = session.new_handle();
            session.arrays.arrays.insert(handle, part);
            Ok(handle)
        })?;
        put(Some(out), opaque(handle))
    }

    /// Ends an array with its smaller copies.
    fn cuMipmappedArrayDestroy(array: *mut c_void) {
        with(|session| {
            let array = session.arrays.mipmapped.remove(&array.addr()).ok_or(Code::InvalidHandle)?;
            release(session, &array)
        })
    }
}

impl Arrays {
    /// The memory of a context is gone with it.
    pub(crate) fn forget(&mut self, context: usize) {
        self.arrays.retain(|_, array| array.context != context);
        self.mipmapped.retain(|_, array| array.context != context);
    }
}

fn wide(number: c_uint) -> Result<usize, Code> {
    usize::try_from(number).map_err(|_| Code::InvalidValue)
}

fn create(array: Out<*mut c_void>, shape: Space<usize>) -> Result<(), Code> {
    let out = array.ok_or(Code::InvalidValue)?;
    let bytes = size(&shape)?;
    let handle = make(shape, bytes, |arrays| &mut arrays.arrays)?;
    put(Some(out), opaque(handle))
}

fn make(
    shape: Space<usize>,
    bytes: u64,
    place: impl FnOnce(&mut Arrays) -> &mut BTreeMap<usize, Array>,
) -> Result<usize, Code> {
    with_current(|session, context| {
        stream::forbid_unsafe(session)?;
        let (device, part_of) = session.context(context).map(|context| (context.device, context.id))?;
        let memory = if shape.flags & WITHOUT_MEMORY != 0 || is_null() {
            None
        } else {
            Some(session.allocate(device, MemoryKind::Plain, bytes, Some(part_of))?)
        };
        let handle = session.new_handle();
        place(&mut session.arrays).insert(handle, Array { memory, context, shape });
        Ok(handle)
    })
}

fn release(session: &mut Session, array: &Array) -> Result<(), Code> {
    array.memory.map_or(Ok(()), |id| session.call(&Request::Free(id)).map(|_| ()))
}

fn shape_of(array: *mut c_void) -> Result<Space<usize>, Code> {
    with(|session| {
        let array = session.arrays.arrays.get(&array.addr()).ok_or(Code::InvalidHandle)?;
        Ok(array.shape)
    })
}

fn at_level(shape: Space<usize>, level: c_uint) -> Space<usize> {
    let half = |length: usize| length.checked_shr(level).unwrap_or(0).max(usize::from(length > 0));
    Space { width: half(shape.width), height: half(shape.height), depth: half(shape.depth), ..shape }
}

/// Bytes of an array; a dimension of 0 is none.
fn size(shape: &Space<usize>) -> Result<u64, Code> {
    let element: usize = match shape.format {
        // Unsigned and signed integers of 8, 16 and 32 bits, and numbers of 16 and 32 bits.
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => return Err(Code::InvalidValue),
    };
    let channels = match shape.channels {
        1 => 1,
        2 => 2,
        4 => 4,
        _ => return Err(Code::InvalidValue),
    };
    if shape.width == 0 {
        return Err(Code::InvalidValue);
    }
    let lengths = [shape.width, shape.height.max(1), shape.depth.max(1), element, channels];
    let bytes = lengths.into_iter().try_fold(1_usize, usize::checked_mul);
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).ok_or(Code::OutOfMemory)
}
