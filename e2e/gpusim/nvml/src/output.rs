//! Writing results where C callers want them.

use std::ffi::{CStr, c_char, c_uint};
use std::mem::MaybeUninit;

use crate::code::Code;

/// A pointer to a result; null where the caller forgot it.
pub(crate) type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Writes a result.
pub(crate) fn put<T>(out: Out<T>, value: T) -> Result<(), Code> {
    out.ok_or(Code::InvalidArgument)?.write(value);
    Ok(())
}

/// Writes a text with its final zero byte.
///
/// # Safety
/// `buffer` is null or has room for `length` bytes.
pub(crate) unsafe fn put_text(buffer: *mut c_char, length: c_uint, text: &str) -> Result<(), Code> {
    if buffer.is_null() {
        return Err(Code::InvalidArgument);
    }
    let room = usize::try_from(length).map_err(|_| Code::InvalidArgument)?;
    if room <= text.len() {
        return Err(Code::InsufficientSize);
    }
    // SAFETY: `room` bytes are there, by this function's contract, and the text and its zero byte
    // are no more than that; a text of ours does not overlap a buffer of the caller's.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), text.len());
        buffer.add(text.len()).write(0);
    }
    Ok(())
}

/// Reads a text of the caller's.
///
/// # Safety
/// `text` is null or ends in a zero byte.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, Code> {
    if text.is_null() {
        return Err(Code::InvalidArgument);
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Code::InvalidArgument)
}

/// A text in a field of fixed size, cut to fit, with at least one zero byte at the end.
pub(crate) fn field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (place, byte) in field.iter_mut().take(N.saturating_sub(1)).zip(text.bytes()) {
        *place = c_char::from_ne_bytes([byte]);
    }
    field
}
