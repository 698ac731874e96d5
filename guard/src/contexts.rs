//! Contexts: what a process cannot compute without, and half a gibibyte each.
//!
//! The first of a process is where it meets the agent: it is held up until the pod has been granted
//! what a context takes, for two seconds at most.

use core::ffi::{c_int, c_uint, c_void};

use crate::accounts;
use crate::blocks;
use crate::client;
use crate::code::{Code, OUT_OF_MEMORY, SUCCESS};
use crate::state::{self, Device, State};
use crate::streams;
use crate::symbols::{driver, hooks};
use crate::sys::{self, Zeroed};
use crate::table::{Entry, Kind, Space};

type Context = *mut c_void;

/// The primary context of a device in this process. Locked while the driver makes or ends it, so
/// that two threads do not charge it twice.
#[repr(C)]
pub(crate) struct ContextAccount {
    /// 1 while it is charged.
    charged: u32,
}

// SAFETY: numbers.
unsafe impl Zeroed for ContextAccount {}

/// What allocations are noted to belong to: 0 for the primary context of their device, and for
/// green contexts, which are parts of it.
pub(crate) fn owner(state: &'static State) -> u64 {
    let context = sys::key(streams::current_context());
    if state.table.get(Space::Context, context).is_some() { context } else { 0 }
}

fn is_primary_active(device: c_int) -> bool {
    let (mut flags, mut active): (c_uint, c_int) = (0, 0);
    // SAFETY: the function takes places for two numbers.
    let code = unsafe {
        driver!(cuDevicePrimaryCtxGetState(
            device => c_int, &raw mut flags => *mut c_uint, &raw mut active => *mut c_int
        ))
    };
    // Better charged too long than too short.
    code != SUCCESS || active != 0
}

/// Uses the primary context of a device, which `make` makes if there is none.
fn with_primary(state: &'static State, device: c_int, make: impl FnOnce() -> Code) -> Code {
    // The driver says the same of the device when it is to make its context.
    let known = match state.device(device) {
        Ok(known) => known,
        Err(why) => return why,
    };
    let mut primary = known.context.lock();
    if primary.charged != 0 {
        return make();
    }
    if accounts::charge_context(state, known).is_err() {
        return OUT_OF_MEMORY;
    }
    let code = make();
    if code == SUCCESS {
        primary.charged = 1;
    } else {
        accounts::uncharge_context(state, known);
    }
    code
}

/// Leaves the primary context of a device, which may end it.
fn leave_primary(state: &'static State, device: c_int, leave: impl FnOnce() -> Code) -> Code {
    let Ok(known) = state.device(device) else { return leave() };
    let mut primary = known.context.lock();
    let code = leave();
    if code == SUCCESS && primary.charged != 0 && !is_primary_active(device) {
        primary.charged = 0;
        accounts::uncharge_context(state, known);
        ended(state, Some(known), 0);
    }
    code
}

/// Gives back what went with a context: 0 stands for the primary one of `device`.
fn ended(state: &'static State, device: Option<&'static Device>, owner: u64) {
    let index = device.map(|device| state.index_of(device));
    let mut gone = [Gone::default(); state::DEVICES];
    let went = |entry: &Entry| {
        let goes = (entry.is(Space::Pointer) && entry.kind != Kind::Pool)
            || entry.is(Space::Array)
            || entry.is(Space::Mipmap)
            || entry.is(Space::Heap)
            || entry.is(Space::Block);
        goes && entry.owner == owner && index.is_none_or(|index| entry.device == index)
    };
    state.table.drain(went, |entry| {
        let Some(gone) = gone.get_mut(usize::from(entry.device)) else { return };
        // What is charged for a piece of a block is the block.
        let sum = if entry.is(Space::Pointer) && entry.kind == Kind::Small {
            &mut gone.pieces
        } else {
            &mut gone.bytes
        };
        *sum = sum.saturating_add(entry.bytes);
        gone.blocks = gone.blocks.saturating_add(u64::from(entry.is(Space::Block)));
    });
    for (device, gone) in state.devices.iter().zip(gone) {
        if gone.pieces > 0 || gone.blocks > 0 {
            blocks::forget(device, gone.pieces);
            blocks::ended(device, gone.blocks);
        }
        accounts::uncharge(state, device, gone.bytes);
    }
}

/// What went with a context on one device.
#[derive(Clone, Copy, Default)]
struct Gone {
    bytes: u64,
    pieces: u64,
    blocks: u64,
}

/// Makes a context of the program's own.
fn create(state: &'static State, out: *mut Context, device: c_int, make: impl FnOnce() -> Code) -> Code {
    if out.is_null() {
        return make();
    }
    let known = match state.device(device) {
        Ok(known) => known,
        Err(why) => return why,
    };
    if accounts::charge_context(state, known).is_err() {
        return OUT_OF_MEMORY;
    }
    let code = make();
    if code != SUCCESS {
        accounts::uncharge_context(state, known);
        return code;
    }
    // SAFETY: the driver has just written it.
    let context = sys::key(unsafe { *out });
    let entry = Entry { uses: 1, device: state.index_of(known), ..Entry::new(Space::Context, context) };
    if state.table.insert(entry).is_err() {
        // It cannot be told when it ends: it stays charged for as long as the process lives.
        return SUCCESS;
    }
    SUCCESS
}

/// Ends a context of the program's own.
fn destroy(state: &'static State, context: Context, end: impl FnOnce() -> Code) -> Code {
    let known = state.table.take(Space::Context, sys::key(context));
    let code = end();
    if let Some(entry) = known {
        if code != SUCCESS {
            let _put_back = state.table.insert(entry);
            return code;
        }
        if let Some(device) = state.device_at(entry.device) {
            accounts::uncharge_context(state, device);
        }
        ended(state, None, entry.key);
    }
    code
}

hooks! {
    /// Opens the driver for this process: the first thing that a program does, so the agent is told
    /// of the process here.
    fn cuInit(flags: c_uint) via state::cuda, |state, real| {
        client::greet(state);
        let code = real(flags);
        if code == SUCCESS {
            // A driver need not know its version before it is opened.
            state.judge_again();
        }
        code
    }

    /// Takes part in the primary context of a device.
    fn cuDevicePrimaryCtxRetain(context: *mut Context, device: c_int) via state::cuda, |state, real| {
        with_primary(state, device, || real(context, device))
    }

    /// Leaves the primary context of a device.
    fn cuDevicePrimaryCtxRelease(device: c_int) via state::cuda, |state, real| {
        leave_primary(state, device, || real(device))
    }

    /// Leaves the primary context of a device.
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) via state::cuda, |state, real| {
        leave_primary(state, device, || real(device))
    }

    /// Ends the primary context of a device, whoever uses it.
    fn cuDevicePrimaryCtxReset(device: c_int) via state::cuda, |state, real| {
        leave_primary(state, device, || real(device))
    }

    /// Ends the primary context of a device, whoever uses it.
    fn cuDevicePrimaryCtxReset_v2(device: c_int) via state::cuda, |state, real| {
        leave_primary(state, device, || real(device))
    }

    /// Makes a context.
    fn cuCtxCreate(context: *mut Context, flags: c_uint, device: c_int) via state::cuda, |state, real| {
        create(state, context, device, || real(context, flags, device))
    }

    /// Makes a context.
    fn cuCtxCreate_v2(context: *mut Context, flags: c_uint, device: c_int) via state::cuda, |state, real| {
        create(state, context, device, || real(context, flags, device))
    }

    /// Makes a context that uses part of a device.
    fn cuCtxCreate_v3(
        context: *mut Context, parameters: *mut c_void, count: c_int, flags: c_uint, device: c_int,
    ) via state::cuda, |state, real| {
        create(state, context, device, || real(context, parameters, count, flags, device))
    }

    /// Makes a context with parameters.
    fn cuCtxCreate_v4(
        context: *mut Context, parameters: *mut c_void, flags: c_uint, device: c_int,
    ) via state::cuda, |state, real| {
        create(state, context, device, || real(context, parameters, flags, device))
    }

    /// Makes a context that works together with OpenGL.
    fn cuGLCtxCreate(context: *mut Context, flags: c_uint, device: c_int) via state::cuda, |state, real| {
        create(state, context, device, || real(context, flags, device))
    }

    /// Makes a context that works together with OpenGL.
    fn cuGLCtxCreate_v2(context: *mut Context, flags: c_uint, device: c_int) via state::cuda, |state, real| {
        create(state, context, device, || real(context, flags, device))
    }

    /// Makes a context that works together with VDPAU.
    fn cuVDPAUCtxCreate(
        context: *mut Context, flags: c_uint, device: c_int, video: c_uint, lookup: *mut c_void,
    ) via state::cuda, |state, real| {
        create(state, context, device, || real(context, flags, device, video, lookup))
    }

    /// Makes a context that works together with VDPAU.
    fn cuVDPAUCtxCreate_v2(
        context: *mut Context, flags: c_uint, device: c_int, video: c_uint, lookup: *mut c_void,
    ) via state::cuda, |state, real| {
        create(state, context, device, || real(context, flags, device, video, lookup))
    }

    /// Ends a context.
    fn cuCtxDestroy(context: Context) via state::cuda, |state, real| {
        destroy(state, context, || real(context))
    }

    /// Ends a context.
    fn cuCtxDestroy_v2(context: Context) via state::cuda, |state, real| {
        destroy(state, context, || real(context))
    }

    /// Takes part in the current context.
    fn cuCtxAttach(context: *mut Context, flags: c_uint) via state::cuda, |state, real| {
        let code = real(context, flags);
        if code == SUCCESS && !context.is_null() {
            // SAFETY: the driver has just written it.
            let attached = sys::key(unsafe { *context });
            state.table.change(Space::Context, attached, |entry| entry.uses = entry.uses.saturating_add(1));
        }
        code
    }

    /// Leaves a context; the last to leave ends it.
    fn cuCtxDetach(context: Context) via state::cuda, |state, real| {
        match state.table.get(Space::Context, sys::key(context)) {
            Some(entry) if entry.uses <= 1 => destroy(state, context, || real(context)),
            _ => {
                let code = real(context);
                if code == SUCCESS {
                    state.table.change(Space::Context, sys::key(context), |entry| {
                        entry.uses = entry.uses.saturating_sub(1);
                    });
                }
                code
            }
        }
    }

    /// Makes a green context, a part of the primary one, which is made if there is none.
    fn cuGreenCtxCreate(
        context: *mut Context, resources: *mut c_void, device: c_int, flags: c_uint,
    ) via state::cuda, |state, real| {
        let code = with_primary(state, device, || real(context, resources, device, flags));
        if code == SUCCESS && !context.is_null() && let Ok(known) = state.device(device) {
            // SAFETY: the driver has just written it.
            let made = sys::key(unsafe { *context });
            // Only to know its device when it ends.
            let entry = Entry { device: state.index_of(known), ..Entry::new(Space::Green, made) };
            let _unknown = state.table.insert(entry);
        }
        code
    }

    /// Ends a green context, and the primary one if nobody else uses it.
    fn cuGreenCtxDestroy(context: Context) via state::cuda, |state, real| {
        match state.table.take(Space::Green, sys::key(context)) {
            Some(entry) => leave_primary(state, c_int::from(entry.device), || real(context)),
            None => real(context),
        }
    }

    /// Sets sizes of a context. The heap of kernels and the buffer of their prints are memory of
    /// the device, set aside by the driver when a kernel needs them.
    fn cuCtxSetLimit(limit: c_int, value: usize) via state::cuda, |state, real| {
        set_limit(state, limit, sys::bytes(value), || real(limit, value))
    }
}

/// `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`, with what a context has anyway.
const LIMITS: [(c_int, u64); 2] = [(1, 1 << 20), (2, 8 << 20)];

fn set_limit(state: &'static State, limit: c_int, value: u64, set: impl FnOnce() -> Code) -> Code {
    let Some((_, included)) = LIMITS.iter().find(|(number, _)| *number == limit) else { return set() };
    let device = match streams::current_device(state) {
        Ok(device) => device,
        Err(why) => return why,
    };
    let context = sys::key(streams::current_context());
    // Handles are aligned, so the lowest bits are free.
    let key = context | u64::try_from(limit).unwrap_or(0);
    let before = state.table.get(Space::Heap, key).map_or(0, |entry| entry.bytes);
    let after = value.saturating_sub(*included);
    let more = after.saturating_sub(before);
    if more > 0 && accounts::charge(state, device, more).is_err() {
        return OUT_OF_MEMORY;
    }
    let code = set();
    if code != SUCCESS {
        accounts::uncharge(state, device, more);
        return code;
    }
    let entry = Entry {
        bytes: before.max(after),
        owner: owner(state),
        device: state.index_of(device),
        ..Entry::new(Space::Heap, key)
    };
    if more > 0 {
        // Without a note it stays charged for as long as the process lives.
        let _unknown = state.table.insert(entry);
    }
    code
}
