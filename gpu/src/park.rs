//! Moving what a process has on its device to the host, and back, by the driver's checkpoints.
//!
//! A process is locked (its calls of the driver block, what was submitted comes to its end), then
//! checkpointed (its memory is copied to the host, into the process itself, and the device is let
//! go), and later restored and unlocked. The driver keeps the state, so whoever asks next, in
//! whatever process, finds it: nothing here remembers anything.
//!
//! What was seen of driver 580: a process that has imported memory of another can be checkpointed
//! and not restored, and is lost. Whoever parks must know that there is none.

use std::{
    ffi::{c_char, c_int, c_uint},
    fmt,
    mem::ManuallyDrop,
    path::Path,
    ptr,
    time::Duration,
};

use libloading::Library;

use crate::cuda::{self, LoadError, NO_DEVICE, OUT_OF_MEMORY, SUCCESS, calls};

/// `CUDA_ERROR_ILLEGAL_STATE`: the process is not in the state that the call begins with.
const ILLEGAL_STATE: c_int = 401;
/// `CUDA_ERROR_NOT_READY`: not locked in time.
const NOT_READY: c_int = 600;

/// The oldest driver that can checkpoint processes.
const OLDEST: u16 = 570;

/// Why a process's memory cannot be moved, or was not.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParkError {
    /// The CUDA driver cannot be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// CUDA shows no device.
    #[error("CUDA shows no device: its device node is missing here, or it is gone")]
    NoDevice,
    /// The driver refused.
    #[error("{call} of process {pid}: {name} ({code})")]
    Refused {
        /// Name of the call.
        call: &'static str,
        /// The process.
        pid: i32,
        /// The driver's code.
        code: i32,
        /// Its name for it.
        name: String,
    },
    /// The driver reported a state that this version does not know.
    #[error("the driver says that process {pid} is in state {state}, which is not known")]
    UnknownState {
        /// The process.
        pid: i32,
        /// The state's number.
        state: i32,
    },
}

impl ParkError {
    fn is(&self, wanted: c_int) -> bool {
        matches!(self, Self::Refused { code, .. } if *code == wanted)
    }

    /// Whether the device has too little memory to restore a process: it is no fault, and passes.
    pub fn out_of_memory(&self) -> bool {
        self.is(OUT_OF_MEMORY)
    }

    /// Whether the process could not be locked in time: it goes on running.
    pub fn timed_out(&self) -> bool {
        self.is(NOT_READY)
    }

    /// Whether the process is in another state than the call begins with, because somebody else
    /// moved it, or still does.
    pub fn other_state(&self) -> bool {
        self.is(ILLEGAL_STATE)
    }

    /// Whether nothing can be moved on this node, whatever is tried.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Load(_))
    }
}

/// Where the driver has a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProcessState {
    /// It runs.
    Running,
    /// Its calls of the driver block; its memory is on the device.
    Locked,
    /// Its memory is on the host. It is in no process list.
    Checkpointed,
    /// The driver lost it. There is no way back.
    Failed,
    /// Its memory is being moved (drivers that tell; others answer when it is done).
    Moving,
}

calls! {
    cuInit(c_uint);
    cuGetErrorName(c_int, *mut *const c_char);
    cuCheckpointProcessGetState(c_int, *mut c_int);
    cuCheckpointProcessLock(c_int, *const LockArguments);
    cuCheckpointProcessCheckpoint(c_int, *const NoArguments);
    cuCheckpointProcessRestore(c_int, *const NoArguments);
    cuCheckpointProcessUnlock(c_int, *const NoArguments);
}

/// `CUcheckpointLockArgs`.
#[repr(C)]
struct LockArguments {
    timeout_milliseconds: c_uint,
    reserved: c_uint,
    more: [u64; 7],
}

/// The others' arguments, none of which are needed: 64 bytes of zeroes, or null.
type NoArguments = [u64; 8];

const _: () = assert!(size_of::<LockArguments>() == 64);

/// The driver's checkpoints.
///
/// Calls take a process ID as the caller's PID namespace counts it, and the caller must be root.
/// They may last: about a minute for 100 GiB.
pub struct Checkpoint {
    calls: Calls,
    _library: ManuallyDrop<Library>,
}

impl Checkpoint {
    /// Opens the CUDA driver at the path `library`, or where the loader finds it, and the devices that
    /// `CUDA_VISIBLE_DEVICES` names: without a process that has them open, the driver could not
    /// restore where persistence mode is off.
    ///
    /// # Errors
    /// Each says what to change.
    pub fn open(library: Option<&Path>) -> Result<Self, ParkError> {
        let (calls, opened) = cuda::open(library, OLDEST, Calls::find)?;
        // SAFETY: no flags are defined.
        match unsafe { (calls.cuInit)(0) } {
            NO_DEVICE => return Err(ParkError::NoDevice),
            code => calls.check("cuInit", 0, code)?,
        }
        Ok(Self { calls, _library: opened })
    }

    /// Where the driver has a process.
    ///
    /// # Errors
    /// Where it does not say, as of a process that does not use CUDA.
    pub fn state(&self, pid: i32) -> Result<ProcessState, ParkError> {
        let mut state = -1;
        // SAFETY: the pointer is good for the call.
        let code = unsafe { (self.calls.cuCheckpointProcessGetState)(pid, &raw mut state) };
        self.calls.check("cuCheckpointProcessGetState", pid, code)?;
        match state {
            0 => Ok(ProcessState::Running),
            1 => Ok(ProcessState::Locked),
            2 => Ok(ProcessState::Checkpointed),
            3 => Ok(ProcessState::Failed),
            4 | 5 => Ok(ProcessState::Moving),
            state => Err(ParkError::UnknownState { pid, state }),
        }
    }

    /// Has a running process's calls block, once those under way and all submitted work are done.
    ///
    /// # Errors
    /// [`ParkError::timed_out`] where that is not within `patience`: the process runs on. Otherwise
    /// as the driver refuses it.
    pub fn lock(&self, pid: i32, patience: Duration) -> Result<(), ParkError> {
        // 0 would wait for ever.
        let timeout_milliseconds = c_uint::try_from(patience.as_millis()).unwrap_or(c_uint::MAX).max(1);
        let arguments = LockArguments { timeout_milliseconds, reserved: 0, more: [0; 7] };
        // SAFETY: the arguments are whole, and good for the call.
        let code = unsafe { (self.calls.cuCheckpointProcessLock)(pid, &raw const arguments) };
        self.calls.check("cuCheckpointProcessLock", pid, code)
    }

    /// Moves a locked process's memory to the host, into the process itself.
    ///
    /// # Errors
    /// As the driver refuses it. The process may be lost then: [`Checkpoint::state`] says.
    pub fn checkpoint(&self, pid: i32) -> Result<(), ParkError> {
        // SAFETY: no arguments are needed.
        let code = unsafe { (self.calls.cuCheckpointProcessCheckpoint)(pid, ptr::null()) };
        self.calls.check("cuCheckpointProcessCheckpoint", pid, code)
    }

    /// Moves a checkpointed process's memory back to its device; it stays locked.
    ///
    /// # Errors
    /// As [`Checkpoint::checkpoint`]; [`ParkError::out_of_memory`] where the device has no room.
    pub fn restore(&self, pid: i32) -> Result<(), ParkError> {
        // SAFETY: no arguments are needed.
        let code = unsafe { (self.calls.cuCheckpointProcessRestore)(pid, ptr::null()) };
        self.calls.check("cuCheckpointProcessRestore", pid, code)
    }

    /// Lets a locked process run.
    ///
    /// # Errors
    /// As the driver refuses it.
    pub fn unlock(&self, pid: i32) -> Result<(), ParkError> {
        // SAFETY: no arguments are needed.
        let code = unsafe { (self.calls.cuCheckpointProcessUnlock)(pid, ptr::null()) };
        self.calls.check("cuCheckpointProcessUnlock", pid, code)
    }
}

impl Calls {
    fn check(&self, call: &'static str, pid: i32, code: c_int) -> Result<(), ParkError> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(ParkError::Refused { call, pid, code, name: cuda::error_name(self.cuGetErrorName, code) })
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_cannot_be_used_is_final() {
        let open = |library| Checkpoint::open(Some(Path::new(library))).unwrap_err();
        let absent = open("/nonexistent/libcuda.so.1");
        assert!(
            matches!(absent, ParkError::Load(LoadError::NoLibrary { .. })) && absent.is_final(),
            "{absent}"
        );
        let other = open("libc.so.6");
        assert!(other.is_final() && other.to_string().contains("driver 570"), "{other}");
    }
}
