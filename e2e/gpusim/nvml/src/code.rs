//! NVML's return codes.

use std::ffi::{CStr, c_char, c_uint};

use gpusim::client::CallError;
use gpusim::protocol::Failure;

/// Why a call failed; the numbers are those of `nvmlReturn_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Code {
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NoPermission = 4,
    NotFound = 6,
    InsufficientSize = 7,
    DriverNotLoaded = 9,
    FunctionNotFound = 13,
    GpuIsLost = 15,
    InUse = 19,
    ArgumentVersionMismatch = 25,
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
            CallError::Disconnected(_) => Self::DriverNotLoaded,
            CallError::Refused(Failure::Unknown) => Self::InvalidArgument,
            CallError::Refused(Failure::Lost) => Self::GpuIsLost,
            CallError::Refused(Failure::NotSupported) => Self::NotSupported,
            CallError::Refused(Failure::InUse) => Self::InUse,
            CallError::Refused(Failure::Forbidden) => Self::NoPermission,
            CallError::Refused(Failure::NoSuchFunction) => Self::FunctionNotFound,
            CallError::Refused(Failure::NoSuchCgroup) => Self::NotFound,
            CallError::NoDescriptor
            | CallError::Refused(
                Failure::OutOfMemory
                | Failure::NotShareable
                | Failure::OwnMemory
                | Failure::NoSuchProcess
                | Failure::OtherState
                | Failure::NotLocked
                | Failure::Invalid(_),
            ) => Self::Unknown,
        }
    }
}

const TEXTS: [(c_uint, &CStr); 31] = [
    (0, c"Success"),
    (1, c"Uninitialized"),
    (2, c"Invalid Argument"),
    (3, c"Not Supported"),
    (4, c"Insufficient Permissions"),
    (5, c"Already Initialized"),
    (6, c"Not Found"),
    (7, c"Insufficient Size"),
    (8, c"Insufficient External Power"),
    (9, c"Driver Not Loaded"),
    (10, c"Timeout"),
    (11, c"Interrupt Request Issue"),
    (12, c"NVML Shared Library Not Found"),
    (13, c"Function Not Found"),
    (14, c"Corrupted infoROM"),
    (15, c"GPU is lost"),
    (16, c"GPU requires reset"),
    (17, c"GPU access blocked by the operating system"),
    (18, c"Driver/library version mismatch"),
    (19, c"In use by another client"),
    (20, c"Insufficient Memory"),
    (21, c"No data"),
    (22, c"ECC is not supported with this vGPU"),
    (23, c"Insufficient resources"),
    (24, c"Frequency not supported"),
    (25, c"Argument version mismatch"),
    (26, c"Deprecated"),
    (27, c"Not ready"),
    (28, c"No GPUs were found"),
    (29, c"Invalid state"),
    (30, c"Reset type not supported"),
];

/// The text of a return code; valid for ever.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: c_uint) -> *const c_char {
    let known = TEXTS.iter().find(|(code, _)| *code == result);
    known.map_or(c"Unknown Error", |(_, text)| *text).as_ptr()
}
