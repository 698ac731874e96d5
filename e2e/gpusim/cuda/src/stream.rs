//! Streams, and their capture into graphs. Nothing ever runs, so that every stream is idle.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

use gpusim::protocol::Request;

use crate::code::Code;
use crate::output::{Out, put, put_if_wanted};
use crate::session::{Session, opaque, with, with_current};
use crate::{exports, graph, pool};

/// The default stream, by both its names, and the calling thread's own.
const NONE: usize = 0;
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;
/// CU_STREAM_NON_BLOCKING.
const NON_BLOCKING: c_uint = 1;
/// `CUstreamCaptureMode`.
const GLOBAL: c_int = 0;
const RELAXED: c_int = 2;
/// `CUstreamCaptureStatus`.
const IDLE: c_int = 0;
const ACTIVE: c_int = 1;
const BROKEN: c_int = 2;

/// How many captures there are: calls that are made all the time need not look while it is 0.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// What this thread forbids itself while a stream is captured.
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
}

/// The streams of a process.
#[derive(Default)]
pub(crate) struct Streams {
    made: BTreeMap<usize, Stream>,
    captures: BTreeMap<usize, Capture>,
    last_capture: u64,
}

struct Stream {
    /// Handle of its context.
    context: usize,
    flags: c_uint,
    priority: c_int,
}

/// A stream whose work goes into a graph.
struct Capture {
    graph: usize,
    mode: c_int,
    thread: ThreadId,
    id: u64,
    /// Handle of the stream's context.
    context: usize,
    /// Whether the default stream waits for the stream.
    blocking: bool,
    broken: bool,
}

exports! {
    /// Makes a stream in the current context.
    fn cuStreamCreate(stream: Out<*mut c_void>, flags: c_uint) { create(stream, flags, 0) }

    /// Makes a stream in the current context; priorities change nothing here.
    fn cuStreamCreateWithPriority(stream: Out<*mut c_void>, flags: c_uint, priority: c_int) {
        create(stream, flags, priority)
    }

    /// Ends a stream.
    fn cuStreamDestroy(stream: *mut c_void) { destroy(stream) }

    /// Ends a stream.
    fn cuStreamDestroy_v2(stream: *mut c_void) { destroy(stream) }

    /// Waits for a stream.
    fn cuStreamSynchronize(stream: *mut c_void) { synchronize(stream, false) }

    /// Waits for a stream.
    fn cuStreamSynchronize_ptsz(stream: *mut c_void) { synchronize(stream, true) }

    /// Whether a stream is idle: it is.
    fn cuStreamQuery(stream: *mut c_void) { query(stream, false) }

    /// Whether a stream is idle: it is.
    fn cuStreamQuery_ptsz(stream: *mut c_void) { query(stream, true) }

    /// The context of a stream.
    fn cuStreamGetCtx(stream: *mut c_void, context: Out<*mut c_void>) {
        put(context, opaque(with(|session| context_of(session, key(stream, false)))?))
    }

    /// The context of a stream.
    fn cuStreamGetCtx_ptsz(stream: *mut c_void, context: Out<*mut c_void>) {
        put(context, opaque(with(|session| context_of(session, key(stream, true)))?))
    }

    /// Flags of a stream.
    fn cuStreamGetFlags(stream: *mut c_void, flags: Out<c_uint>) {
        let known = with(|session| {
            context_of(session, key(stream, false))?;
            Ok(session.streams.made.get(&stream.addr()).map_or(0, |stream| stream.flags))
        })?;
        put(flags, known)
    }

    /// Priority of a stream.
    fn cuStreamGetPriority(stream: *mut c_void, priority: Out<c_int>) {
        let known = with(|session| {
            context_of(session, key(stream, false))?;
            Ok(session.streams.made.get(&stream.addr()).map_or(0, |stream| stream.priority))
        })?;
        put(priority, known)
    }

    /// From here on the stream's work goes into a graph.
    fn cuStreamBeginCapture(stream: *mut c_void) { begin(stream, GLOBAL, false) }

    /// From here on the stream's work goes into a graph.
    fn cuStreamBeginCapture_ptsz(stream: *mut c_void) { begin(stream, GLOBAL, true) }

    /// From here on the stream's work goes into a graph.
    fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) { begin(stream, mode, false) }

    /// From here on the stream's work goes into a graph.
    fn cuStreamBeginCapture_v2_ptsz(stream: *mut c_void, mode: c_int) { begin(stream, mode, true) }

    /// Ends a capture and gives its graph.
    fn cuStreamEndCapture(stream: *mut c_void, graph: Out<*mut c_void>) { end(stream, graph, false) }

    /// Ends a capture and gives its graph.
    fn cuStreamEndCapture_ptsz(stream: *mut c_void, graph: Out<*mut c_void>) { end(stream, graph, true) }

    /// Whether the stream is captured.
    fn cuStreamIsCapturing(stream: *mut c_void, status: Out<c_int>) {
        put(status, with(|session| status_of(session, key(stream, false)))?.0)
    }

    /// Whether the stream is captured.
    fn cuStreamIsCapturing_ptsz(stream: *mut c_void, status: Out<c_int>) {
        put(status, with(|session| status_of(session, key(stream, true)))?.0)
    }

    /// Whether the stream is captured, and which capture that is.
    fn cuStreamGetCaptureInfo(stream: *mut c_void, status: Out<c_int>, id: Out<c_ulonglong>) {
        inform(key(stream, false), status, id, None, None)
    }

    /// Whether the stream is captured, and which capture that is.
    fn cuStreamGetCaptureInfo_ptsz(stream: *mut c_void, status: Out<c_int>, id: Out<c_ulonglong>) {
        inform(key(stream, true), status, id, None, None)
    }

    /// Whether the stream is captured, and into what. Nodes never depend on each other here.
    fn cuStreamGetCaptureInfo_v2(
        stream: *mut c_void, status: Out<c_int>, id: Out<c_ulonglong>, graph: Out<*mut c_void>,
        dependencies: Out<*const *mut c_void>, count: Out<usize>,
    ) {
        put_if_wanted(dependencies, std::ptr::null());
        inform(key(stream, false), status, id, graph, count)
    }

    /// Whether the stream is captured, and into what. Nodes never depend on each other here.
    fn cuStreamGetCaptureInfo_v2_ptsz(
        stream: *mut c_void, status: Out<c_int>, id: Out<c_ulonglong>, graph: Out<*mut c_void>,
        dependencies: Out<*const *mut c_void>, count: Out<usize>,
    ) {
        put_if_wanted(dependencies, std::ptr::null());
        inform(key(stream, true), status, id, graph, count)
    }

    /// Whether the stream is captured, and into what. Nodes never depend on each other here.
    fn cuStreamGetCaptureInfo_v3(
        stream: *mut c_void, status: Out<c_int>, id: Out<c_ulonglong>, graph: Out<*mut c_void>,
        dependencies: Out<*const *mut c_void>, edges: Out<*const c_void>, count: Out<usize>,
    ) {
        put_if_wanted(dependencies, std::ptr::null());
        put_if_wanted(edges, std::ptr::null());
        inform(key(stream, false), status, id, graph, count)
    }

    /// Whether the stream is captured, and into what. Nodes never depend on each other here.
    fn cuStreamGetCaptureInfo_v3_ptsz(
        stream: *mut c_void, status: Out<c_int>, id: Out<c_ulonglong>, graph: Out<*mut c_void>,
        dependencies: Out<*const *mut c_void>, edges: Out<*const c_void>, count: Out<usize>,
    ) {
        put_if_wanted(dependencies, std::ptr::null());
        put_if_wanted(edges, std::ptr::null());
        inform(key(stream, true), status, id, graph, count)
    }

    /// Changes what this thread forbids itself while a stream is captured; gives what it was.
    fn cuThreadExchangeStreamCaptureMode(mode: Option<&mut c_int>) {
        let mode = mode.ok_or(Code::InvalidValue)?;
        if !(GLOBAL..=RELAXED).contains(mode) {
            return Err(Code::InvalidValue);
        }
        *mode = MODE.replace(*mode);
        Ok(())
    }
}

/// The stream that a call means: under a name that ends in `_ptsz` the default one is the
/// thread's own.
pub(crate) fn key(stream: *mut c_void, per_thread: bool) -> usize {
    match stream.addr() {
        NONE if per_thread => PER_THREAD,
        other => other,
    }
}

/// The context that a stream works in.
pub(crate) fn context_of(session: &Session, stream: usize) -> Result<usize, Code> {
    if stream > PER_THREAD {
        return session.streams.made.get(&stream).map(|stream| stream.context).ok_or(Code::InvalidHandle);
    }
    let current = crate::session::with_stack(|stack| stack.last().copied()).ok_or(Code::InvalidContext)?;
    if session.contexts.contains_key(&current) { Ok(current) } else { Err(Code::ContextIsDestroyed) }
}

/// The graph that a stream's work goes into, while it is captured.
pub(crate) fn graph_of(session: &Session, stream: usize) -> Result<Option<usize>, Code> {
    match session.streams.captures.get(&stream) {
        Some(capture) if capture.broken => Err(Code::CaptureInvalidated),
        capture => Ok(capture.map(|capture| capture.graph)),
    }
}

/// Whether any stream is captured at all.
pub(crate) fn any_capture() -> bool {
    CAPTURES.load(Ordering::Relaxed) > 0
}

/// For calls that may wait for the device or change what it has mapped: they spoil the captures
/// that forbid them.
pub(crate) fn forbid_unsafe(session: &mut Session) -> Result<(), Code> {
    let (me, own_mode) = (std::thread::current().id(), MODE.get());
    if own_mode == RELAXED {
        return Ok(());
    }
    session.streams.spoil(Code::CaptureUnsupported, |capture| {
        if capture.thread == me {
            capture.mode != RELAXED
        } else {
            own_mode == GLOBAL && capture.mode == GLOBAL
        }
    })
}

/// For work on the default stream, for which a captured stream that blocks it would have to wait.
pub(crate) fn forbid_implicit(session: &mut Session) -> Result<(), Code> {
    session.streams.spoil(Code::CaptureImplicit, |capture| capture.blocking && capture.mode != RELAXED)
}

/// For calls that wait for all streams of a context.
pub(crate) fn forbid_in_context(session: &mut Session, context: usize) -> Result<(), Code> {
    session.streams.spoil(Code::CaptureUnsupported, |capture| capture.context == context)
}

/// The streams of a context are gone with it.
pub(crate) fn forget(session: &mut Session, context: usize) {
    session.streams.made.retain(|_, stream| stream.context != context);
    let gone = session.streams.captures.iter().filter(|(_, capture)| capture.context == context);
    let gone: Vec<usize> = gone.map(|(stream, _)| *stream).collect();
    for stream in gone {
        drop_capture(session, stream);
    }
}

impl Streams {
    /// Spoils captures; fails with the code where there were any.
    fn spoil(&mut self, code: Code, forbids: impl Fn(&Capture) -> bool) -> Result<(), Code> {
        let mut result = Ok(());
        for capture in self.captures.values_mut().filter(|capture| forbids(capture)) {
            capture.broken = true;
            result = Err(code);
        }
        result
    }
}

fn create(stream: Out<*mut c_void>, flags: c_uint, priority: c_int) -> Result<(), Code> {
    let out = stream.ok_or(Code::InvalidValue)?;
    if flags > NON_BLOCKING {
        return Err(Code::InvalidValue);
    }
    let handle = with_current(|session, context| {
        let handle = session.new_handle();
        session.streams.made.insert(handle, Stream { context, flags, priority });
        Ok(handle)
    })?;
    put(Some(out), opaque(handle))
}

fn destroy(stream: *mut c_void) -> Result<(), Code> {
    with(|session| {
        session.streams.made.remove(&stream.addr()).ok_or(Code::InvalidHandle)?;
        drop_capture(session, stream.addr());
        Ok(())
    })
}

fn drop_capture(session: &mut Session, stream: usize) {
    if let Some(capture) = session.streams.captures.remove(&stream) {
        CAPTURES.fetch_sub(1, Ordering::Relaxed);
        session.graphs.drop_graph(capture.graph);
    }
}

fn synchronize(stream: *mut c_void, per_thread: bool) -> Result<(), Code> {
    let stream = key(stream, per_thread);
    with(|session| {
        let device = idle(session, stream)?;
        let region = session.region(device)?;
        session.call(&Request::Check(region))?;
        pool::synchronize(session, device)
    })
}

fn query(stream: *mut c_void, per_thread: bool) -> Result<(), Code> {
    let stream = key(stream, per_thread);
    with(|session| idle(session, stream).map(|_| ()))
}

/// Fails where looking at the stream would spoil a capture; else gives its device.
fn idle(session: &mut Session, stream: usize) -> Result<usize, Code> {
    let context = context_of(session, stream)?;
    if let Some(capture) = session.streams.captures.get_mut(&stream) {
        capture.broken = true;
        return Err(Code::CaptureUnsupported);
    }
    if stream <= LEGACY {
        forbid_implicit(session)?;
    }
    Ok(session.context(context)?.device)
}

fn begin(stream: *mut c_void, mode: c_int, per_thread: bool) -> Result<(), Code> {
    let stream = key(stream, per_thread);
    with(|session| {
        let context = context_of(session, stream)?;
        if !(GLOBAL..=RELAXED).contains(&mode) {
            return Err(Code::InvalidValue);
        }
        if stream <= LEGACY {
            return Err(Code::CaptureUnsupported);
        }
        if session.streams.captures.contains_key(&stream) {
            return Err(Code::IllegalState);
        }
        let graph = graph::create(session);
        session.streams.last_capture += 1;
        let flags = session.streams.made.get(&stream).map_or(0, |stream| stream.flags);
        let capture = Capture {
            graph,
            mode,
            thread: std::thread::current().id(),
            id: session.streams.last_capture,
            context,
            blocking: flags & NON_BLOCKING == 0,
            broken: false,
        };
        session.streams.captures.insert(stream, capture);
        CAPTURES.fetch_add(1, Ordering::Relaxed);
        Ok(())
    })
}

fn end(stream: *mut c_void, graph: Out<*mut c_void>, per_thread: bool) -> Result<(), Code> {
    let stream = key(stream, per_thread);
    let out = graph.ok_or(Code::InvalidValue)?;
    out.write(std::ptr::null_mut());
    let graph = with(|session| {
        context_of(session, stream)?;
        let capture = session.streams.captures.get(&stream).ok_or(Code::IllegalState)?;
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(Code::CaptureWrongThread);
        }
        if capture.broken {
            drop_capture(session, stream);
            return Err(Code::CaptureInvalidated);
        }
        let graph = capture.graph;
        session.streams.captures.remove(&stream);
        CAPTURES.fetch_sub(1, Ordering::Relaxed);
        Ok(graph)
    })?;
    out.write(opaque(graph));
    Ok(())
}

/// `CUstreamCaptureStatus`, the number of the capture, and its graph.
fn status_of(session: &Session, stream: usize) -> Result<(c_int, u64, usize), Code> {
    context_of(session, stream)?;
    let captures = &session.streams.captures;
    if stream <= LEGACY && captures.values().any(|capture| capture.blocking && capture.mode != RELAXED) {
        return Err(Code::CaptureImplicit);
    }
    Ok(match captures.get(&stream) {
        None => (IDLE, 0, 0),
        Some(Capture { broken: true, id, graph, .. }) => (BROKEN, *id, *graph),
        Some(Capture { id, graph, .. }) => (ACTIVE, *id, *graph),
    })
}

fn inform(
    stream: usize,
    status: Out<c_int>,
    id: Out<c_ulonglong>,
    graph: Out<*mut c_void>,
    dependencies: Out<usize>,
) -> Result<(), Code> {
    let (now, number, into) = with(|session| status_of(session, stream))?;
    put(status, now)?;
    if now == ACTIVE {
        put_if_wanted(id, number);
        put_if_wanted(graph, opaque(into));
        put_if_wanted(dependencies, 0);
    }
    Ok(())
}
