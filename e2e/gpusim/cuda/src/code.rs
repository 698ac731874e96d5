//! CUDA's result codes.

use std::ffi::{CStr, c_char, c_uint};

use gpusim::client::CallError;
use gpusim::protocol::Failure;

use crate::output::{Out, put};

/// Why a call failed; the numbers are those of `CUresult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Code {
    InvalidValue = 1,
    OutOfMemory = 2,
    NotInitialized = 3,
    NoDevice = 100,
    InvalidDevice = 101,
    InvalidContext = 201,
    OperatingSystem = 304,
    InvalidHandle = 400,
    IllegalState = 401,
    NotFound = 500,
    NotReady = 600,
    ContextIsDestroyed = 709,
    NotSupported = 801,
    CaptureUnsupported = 900,
    CaptureInvalidated = 901,
    CaptureImplicit = 906,
    CaptureWrongThread = 908,
    Unknown = 999,
}

impl Code {
    /// As C callers get it.
    pub(crate) fn number(self) -> c_uint {
        c_uint::from(self as u16)
    }
}

impl From<CallError> for Code {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(Failure::OutOfMemory) => Self::OutOfMemory,
            CallError::Refused(Failure::NotSupported) => Self::NotSupported,
            CallError::Refused(Failure::NotShareable | Failure::NoSuchProcess) => Self::InvalidValue,
            CallError::Refused(Failure::OwnMemory) => Self::InvalidContext,
            CallError::Refused(Failure::OtherState) => Self::IllegalState,
            CallError::Refused(Failure::NotLocked) => Self::NotReady,
            CallError::NoDescriptor => Self::OperatingSystem,
            // A device that fell off the bus, or lost its state by a reset, leaves its programs
            // with this.
            CallError::Disconnected(_) | CallError::Refused(_) => Self::Unknown,
        }
    }
}

/// Number, name and description of each code that callers may meet here.
const TEXTS: [(c_uint, &CStr, &CStr); 19] = [
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not supported on this OS"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
    (
        901,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (
        906,
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (
        908,
        c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        c"attempt to terminate a thread-local capture sequence from another thread",
    ),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

crate::exports! {
    /// The name of a result code.
    fn cuGetErrorName(code: c_uint, name: Out<*const c_char>) {
        put_text(name, code, |(_, name, _)| name)
    }

    /// The description of a result code.
    fn cuGetErrorString(code: c_uint, text: Out<*const c_char>) {
        put_text(text, code, |(_, _, text)| text)
    }
}

fn put_text(
    out: Out<*const c_char>,
    code: c_uint,
    text: impl Fn(&(c_uint, &'static CStr, &'static CStr)) -> &'static CStr,
) -> Result<(), Code> {
    let entry = TEXTS.iter().find(|(number, ..)| *number == code);
    put(out, entry.map_or(std::ptr::null(), |entry| text(entry).as_ptr()))?;
    entry.map(|_| ()).ok_or(Code::InvalidValue)
}
