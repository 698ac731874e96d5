//! Streams: on which device they are, whether they are being captured, and when they have caught up
//! with what was freed on them.

use core::ffi::{c_int, c_void};
use core::sync::atomic::Ordering;

use crate::code::{Code, SUCCESS};
use crate::state::{self, Device, State};
use crate::symbols::{driver, hooks};
use crate::{client, graphs, pools, virtual_memory};

type Stream = *mut c_void;
type Context = *mut c_void;

/// The device of the calling thread's context. An error is the driver's code: 201 where the thread has
/// no context.
pub(crate) fn current_device(state: &'static State) -> Result<&'static Device, Code> {
    let mut device = 0;
    // SAFETY: the function takes a place for a number.
    let code = unsafe { driver!(cuCtxGetDevice(&raw mut device => *mut c_int)) };
    if code == SUCCESS { state.device(device) } else { Err(code) }
}

/// The calling thread's context; null if it has none.
pub(crate) fn current_context() -> Context {
    let mut context = core::ptr::null_mut();
    // SAFETY: the function takes a place for a handle.
    let code = unsafe { driver!(cuCtxGetCurrent(&raw mut context => *mut Context)) };
    if code == SUCCESS { context } else { core::ptr::null_mut() }
}

/// The device on which a stream runs. An error is the driver's code.
pub(crate) fn device_of(state: &'static State, stream: Stream) -> Result<&'static Device, Code> {
    // Null and two small numbers stand for the default streams of the current context.
    if stream.addr() <= 2 {
        return current_device(state);
    }
    let mut device = 0;
    // SAFETY: the function takes a place for a number; the stream is the caller's.
    if unsafe { driver!(cuStreamGetDevice(stream => Stream, &raw mut device => *mut c_int)) } == SUCCESS {
        return state.device(device);
    }
    let mut context = core::ptr::null_mut();
    // SAFETY: the function takes a place for a handle.
    let code = unsafe { driver!(cuStreamGetCtx(stream => Stream, &raw mut context => *mut Context)) };
    if code != SUCCESS || context == current_context() {
        return current_device(state);
    }
    // SAFETY: the context is that of a living stream, and what is pushed is popped.
    unsafe {
        if driver!(cuCtxPushCurrent_v2(context => Context)) != SUCCESS {
            return current_device(state);
        }
        let device = current_device(state);
        driver!(cuCtxPopCurrent_v2(&raw mut context => *mut Context));
        device
    }
}

/// Which of the two forms of a function was called: they differ in what the null stream means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NullStream {
    /// The one that all threads share.
    Shared,
    /// The calling thread's own.
    OfThread,
}

/// Whether what is put on a stream goes into a graph instead of being run.
pub(crate) fn is_captured(stream: Stream, null: NullStream) -> bool {
    const ACTIVE: c_int = 1;
    let mut status: c_int = 0;
    // SAFETY: both functions take a stream and a place for a number; neither waits for anything.
    let code = unsafe {
        match null {
            NullStream::Shared => {
                driver!(cuStreamIsCapturing(stream => Stream, &raw mut status => *mut c_int))
            }
            NullStream::OfThread => {
                driver!(cuStreamIsCapturing_ptsz(stream => Stream, &raw mut status => *mut c_int))
            }
        }
    };
    code == SUCCESS && status == ACTIVE
}

/// Runs `body` so that no call in it breaks a capture that is under way on another stream.
pub(crate) fn relaxed<T>(body: impl FnOnce() -> T) -> T {
    const RELAXED: c_int = 2;
    let mut mode = RELAXED;
    // SAFETY: the function exchanges the number for the thread's.
    let exchanged = unsafe { driver!(cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut c_int)) };
    let result = body();
    if exchanged == SUCCESS {
        // SAFETY: as above; the thread gets back what it had.
        unsafe { driver!(cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut c_int)) };
    }
    result
}

fn began(state: &'static State, code: Code) -> Code {
    if code == SUCCESS {
        state.captures.fetch_add(1, Ordering::Relaxed);
    }
    code
}

fn ended(state: &'static State, code: Code) -> Code {
    // A capture that failed has ended as well. One too many counted as over costs a call that the
    // driver refuses; one too few, that pools are not asked to give memory back.
    let _none =
        state.captures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
    code
}

/// What was freed in the order of a stream may have left its pool now.
fn caught_up(state: &'static State, code: Code) -> Code {
    virtual_memory::settle_sometimes(state);
    client::heed(state);
    let looks = state.dirty.load(Ordering::Relaxed);
    if code == SUCCESS && looks != 0 {
        state.dirty.store(looks - 1, Ordering::Relaxed);
        pools::settle(state);
        graphs::settle_all(state);
    }
    code
}

hooks! {
    /// Begins to capture a stream.
    fn cuStreamBeginCapture(stream: Stream) via state::cuda, |state, real| { began(state, real(stream)) }

    /// Begins to capture a stream.
    fn cuStreamBeginCapture_ptsz(stream: Stream) via state::cuda, |state, real| { began(state, real(stream)) }

    /// Begins to capture a stream.
    fn cuStreamBeginCapture_v2(stream: Stream, mode: c_int) via state::cuda, |state, real| {
        began(state, real(stream, mode))
    }

    /// Begins to capture a stream.
    fn cuStreamBeginCapture_v2_ptsz(stream: Stream, mode: c_int) via state::cuda, |state, real| {
        began(state, real(stream, mode))
    }

    /// Begins to capture a stream into a graph that exists.
    fn cuStreamBeginCaptureToGraph(
        stream: Stream, graph: *mut c_void, dependencies: *const *mut c_void, edges: *const c_void,
        count: usize, mode: c_int,
    ) via state::cuda, |state, real| {
        began(state, real(stream, graph, dependencies, edges, count, mode))
    }

    /// Begins to capture a stream into a graph that exists.
    fn cuStreamBeginCaptureToGraph_ptsz(
        stream: Stream, graph: *mut c_void, dependencies: *const *mut c_void, edges: *const c_void,
        count: usize, mode: c_int,
    ) via state::cuda, |state, real| {
        began(state, real(stream, graph, dependencies, edges, count, mode))
    }

    /// Ends a capture.
    fn cuStreamEndCapture(stream: Stream, graph: *mut *mut c_void) via state::cuda, |state, real| {
        ended(state, real(stream, graph))
    }

    /// Ends a capture.
    fn cuStreamEndCapture_ptsz(stream: Stream, graph: *mut *mut c_void) via state::cuda, |state, real| {
        ended(state, real(stream, graph))
    }

    /// Waits for a stream.
    fn cuStreamSynchronize(stream: Stream) via state::cuda, |state, real| { caught_up(state, real(stream)) }

    /// Waits for a stream.
    fn cuStreamSynchronize_ptsz(stream: Stream) via state::cuda, |state, real| { caught_up(state, real(stream)) }

    /// Waits for all of a context.
    fn cuCtxSynchronize() via state::cuda, |state, real| { caught_up(state, real()) }

    /// Waits for all of a context.
    fn cuCtxSynchronize_v2(context: Context) via state::cuda, |state, real| { caught_up(state, real(context)) }

    /// Waits for an event.
    fn cuEventSynchronize(event: *mut c_void) via state::cuda, |state, real| { caught_up(state, real(event)) }
}
