//! The ways by which programs find functions of the driver: its symbols (which this library exports
//! as well, and is searched first), `dlsym`, `dlvsym`, and the driver's own `cuGetProcAddress`.
//!
//! A name is answered with a hook only if the driver that was asked has the function: programs test
//! for what a driver can do by looking whether it is there.

#![cfg_attr(test, allow(dead_code, reason = "the loader calls it, which it does not in unit tests"))]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use highwater_guard_abi::wire::STRENGTH_UNCOVERED;

use crate::client;
use crate::code::SUCCESS;
use crate::elf::{self, Library};
use crate::state::{self, State};
use crate::symbols::{self, Symbol, hooks};

type Handle = *mut c_void;

/// `RTLD_NEXT`, as an address.
const NEXT: usize = usize::MAX;

/// What is to become of a question: if `next` is not null the loader's own function is to answer,
/// as if the guard were not there, else `answer` is the answer.
#[repr(C)]
struct Verdict {
    answer: *mut c_void,
    next: *const (),
}

impl Verdict {
    fn answer(answer: *const c_void) -> Self {
        Self { answer: answer.cast_mut(), next: core::ptr::null() }
    }

    fn ask(next: Option<usize>) -> Self {
        let next = next.map_or(core::ptr::null(), core::ptr::with_exposed_provenance);
        Self { answer: core::ptr::null_mut(), next }
    }
}

static DLSYM: AtomicUsize = AtomicUsize::new(0);
static DLVSYM: AtomicUsize = AtomicUsize::new(0);

/// Tables of unnamed functions that programs were given.
static TABLES: AtomicU32 = AtomicU32::new(0);

/// The loader's own function of that name: in the C library, or before version 2.34 beside it.
fn loader(name: &CStr, known: &AtomicUsize) -> Option<usize> {
    let address = known.load(Ordering::Relaxed);
    if address != 0 {
        return Some(address);
    }
    let found = elf::find(|object| {
        // SAFETY: the object is loaded during the visit.
        object.is_loader().then(|| unsafe { object.function(name) }).flatten()
    })?;
    known.store(found, Ordering::Relaxed);
    Some(found)
}

/// An address inside of this library.
fn here() -> usize {
    (here as fn() -> usize as *const ()).addr()
}

/// Whether the guard comes later than the object of `caller` in the order in which the loader
/// searches: then "the next one" is the guard, or something between.
fn is_before_guard(caller: usize) -> bool {
    let ours = here();
    elf::find(|object| match (object.contains(caller), object.contains(ours)) {
        (_, true) => Some(false),
        (true, false) => Some(true),
        (false, false) => None,
    })
    .unwrap_or(false)
}

/// Whether the guard is the next object after that of `caller` that has a function of that name.
fn is_next_after(caller: usize, name: &CStr) -> bool {
    let ours = here();
    let mut is_past = false;
    elf::find(|object| {
        if object.contains(ours) {
            return Some(is_past);
        }
        if object.contains(caller) {
            is_past = true;
            return None;
        }
        // SAFETY: the object is loaded during the visit.
        (is_past && unsafe { object.function(name) }.is_some()).then_some(false)
    })
    .unwrap_or(false)
}

fn is_ours(address: usize) -> bool {
    let ours = here();
    elf::find(|object| object.contains(ours).then(|| object.contains(address))).unwrap_or(false)
}

/// Whether a function is of the driver whose functions the hooks call.
fn is_of_driver(library: Library, address: usize) -> bool {
    let bound = symbols::bound(library);
    if bound.is_some_and(|(start, end)| (start..end).contains(&address)) {
        return true;
    }
    // Where a driver was unloaded and loaded again, the hooks follow. A second one beside the first
    // is not covered: its functions must not be mixed with those of the first.
    let still_there = bound.is_some_and(|(start, _)| {
        elf::find(|object| (object.start == start && object.is(library)).then_some(())).is_some()
    });
    let found = elf::find(|object| {
        if !object.contains(address) {
            return None;
        }
        let is_driver = object.is(library);
        if is_driver && !still_there {
            // SAFETY: the object is loaded during the visit.
            unsafe { symbols::bind_to(library, object) };
        }
        Some(is_driver)
    });
    if found == Some(true) && still_there {
        client::weaken(STRENGTH_UNCOVERED);
        if let Some(state) = state::any() {
            client::confess(state);
        }
        return false;
    }
    found == Some(true)
}

/// The hook, if the driver has the function.
fn hook(symbol: Symbol) -> Option<*const c_void> {
    symbols::real(symbol).and_then(|_| symbol.hook()).map(<*const ()>::cast)
}

/// Decides on a name that the guard stands in front of. `ask` asks the loader on the guard's behalf.
fn decide(
    symbol: Symbol,
    handle: Handle,
    caller: usize,
    loader: usize,
    ask: impl Fn(Handle) -> *mut c_void,
) -> Verdict {
    if handle.addr() == NEXT {
        return match hook(symbol) {
            Some(hook) if !is_before_guard(caller) => Verdict::answer(hook),
            _ => Verdict::ask(Some(loader)),
        };
    }
    let found = ask(handle);
    if found.is_null() {
        return Verdict::answer(found);
    }
    let Some(library) = symbol.entry().map(|entry| entry.library) else {
        return Verdict::answer(found);
    };
    if is_of_driver(library, found.addr()) {
        return Verdict::answer(hook(symbol).unwrap_or(found));
    }
    if is_ours(found.addr()) {
        // By name alone the guard has everything that it knows of. Only the driver can say what
        // there is; without it, whoever comes after the guard.
        return Verdict::answer(hook(symbol).unwrap_or_else(|| ask(core::ptr::without_provenance_mut(NEXT))));
    }
    Verdict::answer(found)
}

/// The name, if the guard may stand in front of it.
///
/// # Safety
/// It is null or a text.
unsafe fn hooked(name: *const c_char) -> Option<Symbol> {
    if name.is_null() {
        return None;
    }
    // SAFETY: as the caller says.
    let name = unsafe { CStr::from_ptr(name) };
    let ours = matches!(name.to_bytes(), [b'c', b'u', ..] | [b'n', b'v', b'm', b'l', ..]);
    if ours { symbols::hooked(name) } else { None }
}

/// Whether a program asks for `dlsym` itself, so as to ask it instead of the guard.
///
/// # Safety
/// The name is null or a text.
unsafe fn is_lookup(name: *const c_char) -> Option<*const c_void> {
    // SAFETY: as the caller says.
    let name = if name.is_null() { return None } else { unsafe { CStr::from_ptr(name) } };
    match name.to_bytes() {
        b"dlsym" => Some(exported::dlsym as *const c_void),
        b"dlvsym" => Some(exported::dlvsym as *const c_void),
        _ => None,
    }
}

unsafe extern "C" fn choose(handle: Handle, name: *const c_char, caller: usize) -> Verdict {
    let Some(loader) = loader(c"dlsym", &DLSYM) else { return Verdict::ask(None) };
    // SAFETY: that is the function of that name.
    let ask = unsafe {
        core::mem::transmute::<*const (), unsafe extern "C" fn(Handle, *const c_char) -> *mut c_void>(
            core::ptr::with_exposed_provenance(loader),
        )
    };
    // SAFETY: the program passes a text.
    unsafe { answer(handle, name, caller, loader, |handle| ask(handle, name)) }
}

unsafe extern "C" fn choose_version(
    handle: Handle,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> Verdict {
    let Some(loader) = loader(c"dlvsym", &DLVSYM) else { return Verdict::ask(None) };
    // SAFETY: that is the function of that name.
    let ask = unsafe {
        core::mem::transmute::<
            *const (),
            unsafe extern "C" fn(Handle, *const c_char, *const c_char) -> *mut c_void,
        >(core::ptr::with_exposed_provenance(loader))
    };
    // SAFETY: the program passes texts.
    unsafe { answer(handle, name, caller, loader, |handle| ask(handle, name, version)) }
}

/// # Safety
/// The name is null or a text.
unsafe fn answer(
    handle: Handle,
    name: *const c_char,
    caller: usize,
    loader: usize,
    ask: impl Fn(Handle) -> *mut c_void,
) -> Verdict {
    // SAFETY: as the caller says.
    if let Some(symbol) = unsafe { hooked(name) } {
        if state::any().is_some() {
            return decide(symbol, handle, caller, loader, ask);
        }
    // SAFETY: as the caller says.
    } else if let Some(ours) = unsafe { is_lookup(name) } {
        // Libraries before the guard ask for the next one, and mean whatever was there before them:
        // by a version of glibc as often as not, which the guard does not have, so that they would
        // get past it. Those after the guard ask for what they themselves stand in front of.
        let is_meant = match handle.addr() {
            // SAFETY: as the caller says.
            NEXT => is_next_after(caller, unsafe { CStr::from_ptr(name) }),
            _ => ask(handle).addr() == loader,
        };
        if is_meant {
            return Verdict::answer(ours);
        }
    }
    Verdict::ask(Some(loader))
}

/// What the loader binds to the names: not in the unit tests, whose own program would be bound too.
mod exported {
    use core::arch::naked_asm;
    use core::ffi::{c_char, c_void};

    use super::{Handle, choose, choose_version};

    /// `dlsym`: the loader's own continues as if it had been called in the first place, since it
    /// goes by the address to which it returns.
    #[unsafe(naked)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub(super) unsafe extern "C" fn dlsym(handle: Handle, name: *const c_char) -> *mut c_void {
        #[cfg(target_arch = "x86_64")]
        naked_asm!(
            "endbr64",
            "push rdi",
            "push rsi",
            "push rdx",
            "mov rdx, [rsp + 24]",
            "call {choose}",
            "mov rcx, rdx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "test rcx, rcx",
            "jz 2f",
            "jmp rcx",
            "2: ret",
            choose = sym choose,
        );
        #[cfg(target_arch = "aarch64")]
        naked_asm!(
            "hint #34",
            "stp x29, x30, [sp, #-48]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "str x2, [sp, #32]",
            "mov x2, x30",
            "bl {choose}",
            "mov x17, x0",
            "mov x16, x1",
            "ldp x0, x1, [sp, #16]",
            "ldr x2, [sp, #32]",
            "ldp x29, x30, [sp], #48",
            "cbz x16, 2f",
            "br x16",
            "2: mov x0, x17",
            "ret",
            choose = sym choose,
        );
    }

    /// `dlvsym`: as `dlsym`.
    #[unsafe(naked)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub(super) unsafe extern "C" fn dlvsym(
        handle: Handle,
        name: *const c_char,
        version: *const c_char,
    ) -> *mut c_void {
        #[cfg(target_arch = "x86_64")]
        naked_asm!(
            "endbr64",
            "push rdi",
            "push rsi",
            "push rdx",
            "mov rcx, [rsp + 24]",
            "call {choose}",
            "mov rcx, rdx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "test rcx, rcx",
            "jz 2f",
            "jmp rcx",
            "2: ret",
            choose = sym choose_version,
        );
        #[cfg(target_arch = "aarch64")]
        naked_asm!(
            "hint #34",
            "stp x29, x30, [sp, #-48]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "str x2, [sp, #32]",
            "mov x3, x30",
            "bl {choose}",
            "mov x17, x0",
            "mov x16, x1",
            "ldp x0, x1, [sp, #16]",
            "ldr x2, [sp, #32]",
            "ldp x29, x30, [sp], #48",
            "cbz x16, 2f",
            "br x16",
            "2: mov x0, x17",
            "ret",
            choose = sym choose_version,
        );
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("lookups are written for x86-64 and aarch64 only");

/// Forms of functions whose name alone does not say which is meant, with the version of CUDA from
/// which on each is.
const FORMS: [(&CStr, &[(c_int, Symbol)]); 19] = [
    (c"cuMemAlloc", &[(2000, Symbol::cuMemAlloc), (3020, Symbol::cuMemAlloc_v2)]),
    (c"cuMemAllocPitch", &[(2000, Symbol::cuMemAllocPitch), (3020, Symbol::cuMemAllocPitch_v2)]),
    (c"cuMemFree", &[(2000, Symbol::cuMemFree), (3020, Symbol::cuMemFree_v2)]),
    (c"cuMemGetInfo", &[(2000, Symbol::cuMemGetInfo), (3020, Symbol::cuMemGetInfo_v2)]),
    (c"cuDeviceTotalMem", &[(2000, Symbol::cuDeviceTotalMem), (3020, Symbol::cuDeviceTotalMem_v2)]),
    (c"cuArrayCreate", &[(2000, Symbol::cuArrayCreate), (3020, Symbol::cuArrayCreate_v2)]),
    (c"cuArray3DCreate", &[(2000, Symbol::cuArray3DCreate), (3020, Symbol::cuArray3DCreate_v2)]),
    (
        c"cuCtxCreate",
        &[
            (2000, Symbol::cuCtxCreate),
            (3020, Symbol::cuCtxCreate_v2),
            (11_040, Symbol::cuCtxCreate_v3),
            (12_050, Symbol::cuCtxCreate_v4),
        ],
    ),
    (c"cuCtxDestroy", &[(2000, Symbol::cuCtxDestroy), (4000, Symbol::cuCtxDestroy_v2)]),
    (c"cuCtxSynchronize", &[(2000, Symbol::cuCtxSynchronize), (13_000, Symbol::cuCtxSynchronize_v2)]),
    (c"cuGLCtxCreate", &[(2000, Symbol::cuGLCtxCreate), (3020, Symbol::cuGLCtxCreate_v2)]),
    (c"cuVDPAUCtxCreate", &[(2000, Symbol::cuVDPAUCtxCreate), (3020, Symbol::cuVDPAUCtxCreate_v2)]),
    (
        c"cuDevicePrimaryCtxRelease",
        &[(7000, Symbol::cuDevicePrimaryCtxRelease), (11_000, Symbol::cuDevicePrimaryCtxRelease_v2)],
    ),
    (
        c"cuDevicePrimaryCtxReset",
        &[(7000, Symbol::cuDevicePrimaryCtxReset), (11_000, Symbol::cuDevicePrimaryCtxReset_v2)],
    ),
    (c"cuGraphInstantiate", &[(10_000, Symbol::cuGraphInstantiate), (11_000, Symbol::cuGraphInstantiate_v2)]),
    (c"cuGraphAddNode", &[(12_020, Symbol::cuGraphAddNode), (12_030, Symbol::cuGraphAddNode_v2)]),
    (
        c"cuStreamBeginCapture",
        &[(10_000, Symbol::cuStreamBeginCapture), (10_010, Symbol::cuStreamBeginCapture_v2)],
    ),
    (c"cuIpcOpenMemHandle", &[(4010, Symbol::cuIpcOpenMemHandle), (11_000, Symbol::cuIpcOpenMemHandle_v2)]),
    (c"cuGetProcAddress", &[(11_030, Symbol::cuGetProcAddress), (12_000, Symbol::cuGetProcAddress_v2)]),
];

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD: u64 = 2;

/// The form of a function that a program means.
fn form(name: &CStr, version: c_int, flags: u64) -> Option<Symbol> {
    let known = FORMS.iter().find(|(base, _)| *base == name);
    let symbol = match known {
        Some((_, forms)) => {
            forms.iter().rev().find(|(from, _)| *from <= version).map(|(_, symbol)| *symbol)?
        }
        None => symbols::hooked(name)?,
    };
    if flags & PER_THREAD == 0 {
        return Some(symbol);
    }
    Some(of_thread(symbol).unwrap_or(symbol))
}

/// The form of a function for which the null stream is the thread's own.
fn of_thread(symbol: Symbol) -> Option<Symbol> {
    let mut name = [0_u8; 64];
    let text = symbol.entry()?.name.to_bytes().iter().chain(b"_ptsz");
    name.iter_mut().take(63).zip(text).for_each(|(place, byte)| *place = *byte);
    symbols::hooked(CStr::from_bytes_until_nul(&name).ok()?)
}

/// Puts a hook in the place of what the driver found.
///
/// # Safety
/// The driver has just written `found`, and read the name.
unsafe fn replace(
    state: &'static State,
    found: *mut *mut c_void,
    name: *const c_char,
    version: c_int,
    flags: u64,
) {
    // SAFETY: as the caller says.
    let (Some(found), false) = (unsafe { found.as_mut() }, name.is_null()) else { return };
    if found.is_null() {
        return;
    }
    let symbol = symbols::hooked_at(found.addr()).or_else(|| {
        // SAFETY: as the caller says.
        let meant = form(unsafe { CStr::from_ptr(name) }, version, flags)?;
        // A form of a covered function which a newer driver exports, and which is not known here,
        // takes other arguments: it must not be mixed up with one that is.
        let is_new = is_exported(found.addr());
        if is_new {
            client::weaken(STRENGTH_UNCOVERED);
            client::confess(state);
        }
        (!is_new).then_some(meant)
    });
    if let Some(hook) = symbol.and_then(hook) {
        *found = hook.cast_mut();
    }
}

/// Whether the driver exports a function at that address.
fn is_exported(address: usize) -> bool {
    let Some((start, _)) = symbols::bound(Library::Cuda) else { return false };
    elf::find(|object| {
        // SAFETY: the object is loaded during the visit.
        (object.start == start).then(|| unsafe { object.exports(address) })
    })
    .unwrap_or(false)
}

/// Tables that the CUDA runtime and NVIDIA's own libraries ask for in every program. What is in
/// them allocates through the functions that are covered, as far as is known.
const TABLES_OF_RUNTIME: [[u8; 16]; 11] = [
    table(0x6bd5_fb6c_5bf4_e74a_8987_d939_12fd_9df9),
    table(0x42d8_5a81_23f6_cb47_8298_f6e7_8a3a_ecdc),
    table(0xa094_798c_2e74_2e74_93f2_0800_200c_0a66),
    table(0xc693_336e_1121_df11_a8c3_68f3_55d8_9593),
    table(0x195b_cbf4_d67d_024a_acc5_1d29_cea6_31ae),
    table(0xb105_41e1_f7c7_c74a_9f64_f223_be99_f1e2),
    table(0xd408_2055_bde6_704b_8d34_ba12_3c66_e1f2),
    table(0x263e_8860_7cd2_6143_92f6_bbd5_006d_fa7e),
    table(0x2131_8c60_9714_3248_8ca6_41ff_7324_c8f2),
    table(0xf8cf_f951_2146_8b4e_b9e2_fb46_9e7c_0dd9),
    table(0x69a2_8e9f_2449_8b47_b030_c5da_330e_a4e9),
];

const fn table(name: u128) -> [u8; 16] {
    name.to_be_bytes()
}

hooks! {
    /// Finds a function by name.
    fn cuGetProcAddress(
        name: *const c_char, found: *mut *mut c_void, version: c_int, flags: u64,
    ) via state::cuda, |state, real| {
        let code = real(name, found, version, flags);
        if code == SUCCESS {
            // SAFETY: the driver has written it.
            unsafe { replace(state, found, name, version, flags) };
        }
        code
    }

    /// Finds a function by name, and says why there is none.
    fn cuGetProcAddress_v2(
        name: *const c_char, found: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int,
    ) via state::cuda, |state, real| {
        let code = real(name, found, version, flags, status);
        if code == SUCCESS {
            // SAFETY: the driver has written it.
            unsafe { replace(state, found, name, version, flags) };
        }
        code
    }

    /// Gives out a table of functions without names, which cannot be covered.
    fn cuGetExportTable(out: *mut *const c_void, name: *const [u8; 16]) via state::cuda, |state, real| {
        let code = real(out, name);
        // SAFETY: the caller passes 16 bytes or null.
        if code == SUCCESS && let Some(name) = unsafe { name.as_ref() } {
            TABLES.fetch_add(1, Ordering::Relaxed);
            if !TABLES_OF_RUNTIME.contains(name) {
                client::weaken(STRENGTH_UNCOVERED);
                client::confess(state);
            }
        }
        code
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_depends_on_the_version_and_the_null_stream() {
        assert_eq!(form(c"cuMemAlloc", 2000, 0), Some(Symbol::cuMemAlloc));
        assert_eq!(form(c"cuMemAlloc", 13_000, 0), Some(Symbol::cuMemAlloc_v2));
        assert_eq!(form(c"cuCtxCreate", 12_000, 0), Some(Symbol::cuCtxCreate_v3));
        assert_eq!(form(c"cuMemAllocAsync", 11_020, 0), Some(Symbol::cuMemAllocAsync));
        assert_eq!(form(c"cuMemAllocAsync", 11_020, PER_THREAD), Some(Symbol::cuMemAllocAsync_ptsz));
        assert_eq!(
            form(c"cuStreamBeginCapture", 10_010, PER_THREAD),
            Some(Symbol::cuStreamBeginCapture_v2_ptsz)
        );
        assert_eq!(form(c"cuMemAlloc", 13_000, PER_THREAD), Some(Symbol::cuMemAlloc_v2));
        assert_eq!(form(c"cuLaunchKernel", 13_000, 0), None);
        assert_eq!(form(c"cuGraphAddNode", 12_000, 0), None);
    }

    #[test]
    fn names_that_are_no_functions_of_the_driver_are_left_alone() {
        for name in [c"malloc", c"", c"cu", c"cuda", c"nvmlInit_v2", c"dlsym"] {
            // SAFETY: a text.
            assert!(unsafe { hooked(name.as_ptr()) }.is_none(), "{name:?}");
        }
        // SAFETY: null is allowed.
        assert!(unsafe { hooked(core::ptr::null()) }.is_none());
    }

    #[test]
    fn the_loaders_own_lookup_is_found() {
        let dlsym = loader(c"dlsym", &AtomicUsize::new(0)).unwrap();
        let object = elf::containing(dlsym).unwrap();
        assert!(object.is_loader(), "{:?}", object.path());
        assert!(!is_ours(dlsym));
        assert!(is_ours(here()));
    }
}
