//! What may go wrong, in classes that a caller can act on.

use std::fmt;

use nvml_wrapper::error::NvmlError;

/// Why the driver could not be opened, and what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The management library is not there, or is not a library.
    #[error(
        "cannot load the GPU driver's management library {library:?}: {detail}. Install the NVIDIA driver on \
         the node, or mount its libnvidia-ml.so.1 and set --driver-library to the path"
    )]
    NoLibrary {
        /// The path or name that was tried.
        library: String,
        /// What the loader said.
        detail: String,
    },
    /// The kernel module is not loaded.
    #[error(
        "the NVIDIA kernel driver is not loaded on this node: load the module nvidia (see dmesg for why it failed)"
    )]
    DriverNotLoaded,
    /// The device nodes cannot be opened.
    #[error(
        "no permission to open the GPU devices: the container needs /dev/nvidiactl and /dev/nvidia* (through the \
         nvidia runtime class, CDI, or a privileged security context)"
    )]
    NoPermission,
    /// The library is of another version than the kernel module.
    #[error(
        "the management library {library:?} and the loaded kernel driver are of different versions: mount the library \
         of the running driver (after a driver upgrade, restart the pod)"
    )]
    Mismatch {
        /// The path or name that was opened.
        library: String,
    },
    /// The driver lacks calls without which memory cannot be accounted.
    #[error("driver {version} is too old: it lacks {missing}; 510 is the oldest that is supported")]
    TooOld {
        /// Version of the driver, where it says.
        version: String,
        /// Name of the first missing call.
        missing: &'static str,
    },
    /// Anything else.
    #[error("the GPU driver did not start: {0}")]
    Driver(CallError),
}

/// A call that the driver refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{call}: {class}")]
pub struct CallError {
    /// What was asked, for example `memory info`.
    pub call: &'static str,
    /// Why it was refused.
    pub class: ErrorClass,
}

impl CallError {
    pub(crate) fn new(call: &'static str, class: impl Into<ErrorClass>) -> Self {
        Self { call, class: class.into() }
    }
}

/// Why the driver refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// The GPU fell off the bus, or is otherwise out of reach.
    Lost,
    /// The GPU must be reset before it can be used again.
    ResetRequired,
    /// This device, or this driver, cannot say.
    NotSupported,
    /// The caller may not know.
    NoPermission,
    /// No such device (any more).
    NotFound,
    /// The library was shut down, or the handle is of another session.
    Stale,
    /// The driver gave up waiting.
    Timeout,
    /// Anything else.
    Other,
}

impl ErrorClass {
    /// Every class, so that a metric can start at 0 for each.
    pub const ALL: [Self; 8] = [
        Self::Lost,
        Self::ResetRequired,
        Self::NotSupported,
        Self::NoPermission,
        Self::NotFound,
        Self::Stale,
        Self::Timeout,
        Self::Other,
    ];

    /// The class in snake case, as a label of a metric.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::ResetRequired => "reset_required",
            Self::NotSupported => "not_supported",
            Self::NoPermission => "no_permission",
            Self::NotFound => "not_found",
            Self::Stale => "stale",
            Self::Timeout => "timeout",
            Self::Other => "other",
        }
    }

    /// Whether a handle that gave this error is of no more use.
    pub(crate) fn spoils_handle(self) -> bool {
        matches!(self, Self::Lost | Self::ResetRequired | Self::NotFound | Self::Stale)
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lost => "the GPU is lost",
            Self::ResetRequired => "the GPU must be reset",
            Self::NotSupported => "not supported",
            Self::NoPermission => "no permission",
            Self::NotFound => "not found",
            Self::Stale => "the handle is stale",
            Self::Timeout => "timed out",
            Self::Other => "unknown error of the driver",
        })
    }
}

impl From<NvmlError> for ErrorClass {
    fn from(error: NvmlError) -> Self {
        match error {
            NvmlError::GpuLost => Self::Lost,
            NvmlError::ResetRequired => Self::ResetRequired,
            NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_) => {
                Self::NotSupported
            }
            NvmlError::NoPermission | NvmlError::OperatingSystem => Self::NoPermission,
            NvmlError::NotFound => Self::NotFound,
            NvmlError::Uninitialized | NvmlError::InvalidArg => Self::Stale,
            NvmlError::Timeout => Self::Timeout,
            _ => Self::Other,
        }
    }
}
