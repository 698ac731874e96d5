//! Processes whose memory goes to the host and comes back.

use std::ffi::{c_int, c_uint};

use gpusim::protocol::{CheckpointStep, Reply, Request};

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put};
use crate::session::with;

/// `CUcheckpointLockArgs`.
#[repr(C)]
struct LockArguments {
    _timeout_milliseconds: c_uint,
    reserved: c_uint,
    more: [u64; 7],
}

exports! {
    /// Where a process is.
    fn cuCheckpointProcessGetState(pid: c_int, state: Out<c_int>) {
        let pid = number(pid)?;
        let reply = with(|session| session.call(&Request::ProcessState(pid)))?;
        let Reply::ProcessState(now) = reply else { return Err(Code::Unknown) };
        put(state, now as c_int)
    }

    /// Has a process's calls wait. Nothing runs here that would have to be waited for.
    fn cuCheckpointProcessLock(pid: c_int, arguments: Option<&LockArguments>) {
        if arguments.is_some_and(|given| given.reserved != 0 || given.more.iter().any(|word| *word != 0)) {
            return Err(Code::InvalidValue);
        }
        step(pid, CheckpointStep::Lock)
    }

    /// Moves a process's memory to the host.
    fn cuCheckpointProcessCheckpoint(pid: c_int, arguments: Option<&[u64; 8]>) {
        step_without(pid, arguments, CheckpointStep::Checkpoint)
    }

    /// Moves it back. Restoring on other devices is not simulated.
    fn cuCheckpointProcessRestore(pid: c_int, arguments: Option<&[u64; 8]>) {
        step_without(pid, arguments, CheckpointStep::Restore)
    }

    /// Lets a process's calls go on.
    fn cuCheckpointProcessUnlock(pid: c_int, arguments: Option<&[u64; 8]>) {
        step_without(pid, arguments, CheckpointStep::Unlock)
    }
}

fn number(pid: c_int) -> Result<u32, Code> {
    u32::try_from(pid).ok().filter(|pid| *pid > 0).ok_or(Code::InvalidValue)
}

fn step_without(pid: c_int, arguments: Option<&[u64; 8]>, which: CheckpointStep) -> Result<(), Code> {
    if arguments.is_some_and(|words| words.iter().any(|word| *word != 0)) {
        return Err(Code::InvalidValue);
    }
    step(pid, which)
}

fn step(pid: c_int, step: CheckpointStep) -> Result<(), Code> {
    let pid = number(pid)?;
    with(|session| session.call(&Request::Checkpoint { pid, step })).map(drop)
}
