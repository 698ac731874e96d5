//! Writing results where C callers want them.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;

use crate::code::Code;

/// A pointer to a result; null where the caller forgot it.
pub(crate) type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Writes a result.
pub(crate) fn put<T>(out: Out<T>, value: T) -> Result<(), Code> {
    out.ok_or(Code::InvalidValue)?.write(value);
    Ok(())
}

/// Writes a result that the caller may not want.
pub(crate) fn put_if_wanted<T>(out: Out<T>, value: T) {
    if let Some(out) = out {
        out.write(value);
    }
}

/// Writes a text, cut to fit, with its final zero byte.
///
/// # Safety
/// `buffer` is null or has room for `length` bytes.
pub(crate) unsafe fn put_text(buffer: *mut c_char, length: c_int, text: &str) -> Result<(), Code> {
    let room = usize::try_from(length).map_err(|_| Code::InvalidValue)?;
    let Some(most) = room.checked_sub(1).filter(|_| !buffer.is_null()) else {
        return Err(Code::InvalidValue);
    };
    let written = text.len().min(most);
    // SAFETY: `room` bytes are there, by this function's contract, and what is written is no more;
    // a text of ours does not overlap a buffer of the caller's.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), written);
        buffer.add(written).write(0);
    }
    Ok(())
}
