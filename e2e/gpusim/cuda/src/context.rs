//! Contexts: what a process needs before it can take memory, and what makes it visible.

use std::ffi::{c_int, c_uint, c_void};

use gpusim::protocol::Request;

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put, put_if_wanted};
use crate::session::{Context, Primary, Session, opaque, ordinal, with, with_current, with_stack};

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
    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        with(|session| {
            let device = ordinal(session, device)?;
            match session.primaries.remove(&device) {
                Some(primary) => destroy(session, primary.handle),
                None => Ok(()),
            }
        })
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
    fn cuCtxCreate_v2(context: Out<*mut c_void>, _flags: c_uint, device: c_int) {
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
    fn cuCtxDestroy_v2(context: *mut c_void) {
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
    fn cuCtxPushCurrent_v2(context: *mut c_void) {
        let handle = given(context)?;
        with(|session| session.context(handle).map(|_| ()))?;
        with_stack(|stack| stack.push(handle));
        Ok(())
    }

    /// Makes the context before the current one current.
    fn cuCtxPopCurrent_v2(context: Out<*mut c_void>) {
        with(|_| Ok(()))?;
        let popped = with_stack(Vec::pop).ok_or(Code::InvalidContext)?;
        put_if_wanted(context, opaque(popped));
        Ok(())
    }

    /// Device of the current context.
    fn cuCtxGetDevice(device: Out<c_int>) {
        let out = device.ok_or(Code::InvalidValue)?;
        let ordinal = with_current(|session, handle| Ok(session.context(handle)?.device))?;
        put(Some(out), c_int::try_from(ordinal).map_err(|_| Code::Unknown)?)
    }

    /// Waits for the device: nothing ever runs, but a lost device says so.
    fn cuCtxSynchronize() {
        with_current(|session, handle| {
            let region = session.region(session.context(handle)?.device)?;
            session.call(&Request::Check(region)).map(|_| ())
        })
    }
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
    Ok(handle)
}

fn destroy(session: &mut Session, handle: usize) -> Result<(), Code> {
    let context = session.contexts.remove(&handle).ok_or(Code::InvalidContext)?;
    session.blocks.retain(|_, block| block.context != handle);
    session.shared.retain(|_, block| block.context != handle);
    session.call(&Request::Free(context.id)).map(|_| ())
}
