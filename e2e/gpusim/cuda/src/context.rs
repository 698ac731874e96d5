//! Contexts: what a process needs before it can take memory, and what makes it visible.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use gpusim::protocol::Request;

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put, put_if_wanted};
use crate::session::{Context, Primary, Session, opaque, ordinal, with, with_current, with_stack};
use crate::{memory, pool, stream};

exports! {
    /// Takes part in the device's primary context; makes it for the first taker.
    fn cuDevicePrimaryCtxRetain(context: Out<*mut c_void>, device: c_int) {
        let out = context.ok_or(Code::InvalidValue)?;
        let handle = with(|session| {
            let device = ordinal(session, device)?;
            if let Some(primary) = session.primaries.get_mut(&device) {
                primary.users += 1;
                return Ok(primary.handle);
            }
            let handle = create(session, device, true)?;
            session.primaries.insert(device, Primary { handle, users: 1 });
            Ok(handle)
        })?;
        put(Some(out), opaque(handle))
    }

    /// Leaves the device's primary context; ends it with the last.
    fn cuDevicePrimaryCtxRelease(device: c_int) { release(device) }

    /// Leaves the device's primary context; ends it with the last.
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) { release(device) }

    /// Ends the device's primary context whoever uses it.
    fn cuDevicePrimaryCtxReset(device: c_int) { reset(device) }

    /// Ends the device's primary context whoever uses it.
    fn cuDevicePrimaryCtxReset_v2(device: c_int) { reset(device) }

    /// Flags for the device's primary context: noted by nobody.
    fn cuDevicePrimaryCtxSetFlags(device: c_int, _flags: c_uint) {
        with(|session| ordinal(session, device).map(|_| ()))
    }

    /// Flags for the device's primary context: noted by nobody.
    fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, _flags: c_uint) {
        with(|session| ordinal(session, device).map(|_| ()))
    }

    /// Whether the device's primary context exists, and its flags: always the default ones.
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) {
        let exists = with(|session| {
            let device = ordinal(session, device)?;
            Ok(session.primaries.contains_key(&device))
        })?;
        put(flags, 0)?;
        put(active, c_int::from(exists))
    }

    /// Makes a context and makes it current.
    fn cuCtxCreate(context: Out<*mut c_void>, _flags: c_uint, device: c_int) {
        create_current(context, device)
    }

    /// Makes a context and makes it current.
    fn cuCtxCreate_v2(context: Out<*mut c_void>, _flags: c_uint, device: c_int) {
        create_current(context, device)
    }

    /// Makes a context and makes it current; parameters for parts of a device are not served.
    fn cuCtxCreate_v3(
        context: Out<*mut c_void>, parameters: *mut c_void, count: c_int, _flags: c_uint, device: c_int,
    ) {
        if !parameters.is_null() && count != 0 {
            return Err(Code::NotSupported);
        }
        create_current(context, device)
    }

    /// Makes a context and makes it current; parameters for parts of a device are not served.
    fn cuCtxCreate_v4(context: Out<*mut c_void>, parameters: *mut c_void, _flags: c_uint, device: c_int) {
        if !parameters.is_null() {
            return Err(Code::NotSupported);
        }
        create_current(context, device)
    }

    /// Ends a context, with the memory that was made in it.
    fn cuCtxDestroy(context: *mut c_void) { destroy_given(context) }

    /// Ends a context, with the memory that was made in it.
    fn cuCtxDestroy_v2(context: *mut c_void) { destroy_given(context) }

    /// Replaces this thread's current context; null leaves it without.
    fn cuCtxSetCurrent(context: *mut c_void) {
        let handle = context.addr();
        with(|session| if context.is_null() { Ok(()) } else { session.context(handle).map(|_| ()) })?;
        with_stack(|stack| {
            stack.pop();
            if !context.is_null() {
                stack.push(handle);
            }
        });
        Ok(())
    }

    /// This thread's current context; null where it has none.
    fn cuCtxGetCurrent(context: Out<*mut c_void>) {
        with(|_| Ok(()))?;
        put(context, opaque(with_stack(|stack| stack.last().copied().unwrap_or(0))))
    }

    /// Makes a context current until it is popped.
    fn cuCtxPushCurrent(context: *mut c_void) { push(context) }

    /// Makes a context current until it is popped.
    fn cuCtxPushCurrent_v2(context: *mut c_void) { push(context) }

    /// Makes the context before the current one current.
    fn cuCtxPopCurrent(context: Out<*mut c_void>) { pop(context) }

    /// Makes the context before the current one current.
    fn cuCtxPopCurrent_v2(context: Out<*mut c_void>) { pop(context) }

    /// Device of the current context.
    fn cuCtxGetDevice(device: Out<c_int>) {
        let out = device.ok_or(Code::InvalidValue)?;
        let ordinal = with_current(|session, handle| Ok(session.context(handle)?.device))?;
        put(Some(out), c_int::try_from(ordinal).map_err(|_| Code::Unknown)?)
    }

    /// Device of a context, or of the current one.
    fn cuCtxGetDevice_v2(device: Out<c_int>, context: *mut c_void) {
        let out = device.ok_or(Code::InvalidValue)?;
        let ordinal = with_given(context, |session, handle| Ok(session.context(handle)?.device))?;
        put(Some(out), c_int::try_from(ordinal).map_err(|_| Code::Unknown)?)
    }

    /// What tells a context from all others of this process.
    fn cuCtxGetId(context: *mut c_void, id: Out<c_ulonglong>) {
        let number = with_given(context, |session, handle| Ok(session.context(handle)?.id))?;
        put(id, number)
    }

    /// Version of the interface that a context was made by.
    fn cuCtxGetApiVersion(context: *mut c_void, version: Out<c_uint>) {
        with_given(context, |session, handle| session.context(handle).map(|_| ()))?;
        put(version, API_VERSION)
    }

    /// Flags of the current context: always the default ones.
    fn cuCtxGetFlags(flags: Out<c_uint>) {
        with_current(|_, _| Ok(()))?;
        put(flags, 0)
    }

    /// Waits for the device: nothing ever runs, but a lost device says so.
    fn cuCtxSynchronize() { with_current(synchronize) }

    /// Waits for the device of a context, or of the current one.
    fn cuCtxSynchronize_v2(context: *mut c_void) { with_given(context, synchronize) }
}

/// The version of the interface since its second form.
const API_VERSION: c_uint = 3020;

/// Runs `body` with a context, or with the current one for null.
fn with_given<T>(
    context: *mut c_void,
    body: impl FnOnce(&mut Session, usize) -> Result<T, Code>,
) -> Result<T, Code> {
    if context.is_null() { with_current(body) } else { with(|session| body(session, context.addr())) }
}

fn synchronize(session: &mut Session, handle: usize) -> Result<(), Code> {
    let device = session.context(handle)?.device;
    stream::forbid_in_context(session, handle)?;
    let region = session.region(device)?;
    session.call(&Request::Check(region))?;
    pool::synchronize(session, device)
}

fn push(context: *mut c_void) -> Result<(), Code> {
    let handle = given(context)?;
    with(|session| session.context(handle).map(|_| ()))?;
    with_stack(|stack| stack.push(handle));
    Ok(())
}

fn pop(context: Out<*mut c_void>) -> Result<(), Code> {
    with(|_| Ok(()))?;
    let popped = with_stack(Vec::pop).ok_or(Code::InvalidContext)?;
    put_if_wanted(context, opaque(popped));
    Ok(())
}

fn reset(device: c_int) -> Result<(), Code> {
    with(|session| {
        let device = ordinal(session, device)?;
        match session.primaries.remove(&device) {
            Some(primary) => destroy(session, primary.handle),
            None => Ok(()),
        }
    })
}

fn destroy_given(context: *mut c_void) -> Result<(), Code> {
    let handle = given(context)?;
    with(|session| {
        if session.context(handle)?.primary {
            return Err(Code::InvalidContext);
        }
        destroy(session, handle)
    })?;
    with_stack(|stack| {
        if stack.last() == Some(&handle) {
            stack.pop();
        }
    });
    Ok(())
}

/// The number of a handle that must not be null.
fn given(context: *mut c_void) -> Result<usize, Code> {
    if context.is_null() { Err(Code::InvalidValue) } else { Ok(context.addr()) }
}

fn release(device: c_int) -> Result<(), Code> {
    with(|session| {
        let device = ordinal(session, device)?;
        let primary = session.primaries.get_mut(&device).ok_or(Code::InvalidContext)?;
        primary.users -= 1;
        if primary.users > 0 {
            return Ok(());
        }
        let handle = primary.handle;
        session.primaries.remove(&device);
        destroy(session, handle)
    })
}

fn create_current(context: Out<*mut c_void>, device: c_int) -> Result<(), Code> {
    let out = context.ok_or(Code::InvalidValue)?;
    let handle = with(|session| {
        let device = ordinal(session, device)?;
        create(session, device, false)
    })?;
    with_stack(|stack| stack.push(handle));
    put(Some(out), opaque(handle))
}

fn create(session: &mut Session, device: usize, primary: bool) -> Result<usize, Code> {
    let region = session.region(device)?;
    let id = session.make(&Request::CreateContext(region))?;
    // Never null, and aligned as a pointer would be.
    let handle = usize::try_from(id).map_err(|_| Code::Unknown)? << 4;
    session.contexts.insert(handle, Context { device, id, primary });
    session.map_own();
    Ok(handle)
}

fn destroy(session: &mut Session, handle: usize) -> Result<(), Code> {
    let context = session.contexts.remove(&handle).ok_or(Code::InvalidContext)?;
    memory::forget(session, handle);
    stream::forget(session, handle);
    session.pools.forget(handle);
    session.graphs.forget(handle);
    session.arrays.forget(handle);
    session.call(&Request::Free(context.id)).map(|_| ())
}
