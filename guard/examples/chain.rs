//! A library that is loaded before the guard and stands in front of a function of the driver, and of
//! `dlsym`, as profilers do: it counts the calls, and passes them on to whoever is next.
#![allow(clippy::missing_safety_doc, missing_docs, reason = "for tests")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// `RTLD_NEXT`
const NEXT: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

static CALLS: AtomicU32 = AtomicU32::new(0);

/// The next `dlsym`, asked for by the versions that glibc has given it: by its name alone it would be
/// the one here.
#[unsafe(no_mangle)]
pub extern "C" fn chain_lookup() -> *mut c_void {
    let versions = [c"GLIBC_2.34", c"GLIBC_2.17", c"GLIBC_2.2.5"];
    // SAFETY: a lookup of texts.
    let next = versions.map(|version| unsafe { dlvsym(NEXT, c"dlsym".as_ptr(), version.as_ptr()) });
    next.into_iter().find(|function| !function.is_null()).unwrap_or(std::ptr::null_mut())
}

/// As the loader's: passes the question on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let function = chain_lookup();
    if function.is_null() {
        return function;
    }
    // SAFETY: the function of that name has this type.
    unsafe {
        let function = std::mem::transmute::<
            *mut c_void,
            unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void,
        >(function);
        function(handle, name)
    }
}

fn next(name: &CStr) -> *mut c_void {
    // SAFETY: a lookup has no conditions but that the name is a text.
    unsafe { dlsym(NEXT, name.as_ptr()) }
}

/// As the driver's: passes the call on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut u64, size: usize) -> c_uint {
    CALLS.fetch_add(1, Ordering::Relaxed);
    let function = next(c"cuMemAlloc_v2");
    if function.is_null() {
        return 500;
    }
    // SAFETY: the function of that name has this type.
    unsafe {
        let function =
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut u64, usize) -> c_uint>(function);
        function(pointer, size)
    }
}

/// How many calls there were.
#[unsafe(no_mangle)]
pub extern "C" fn chain_calls() -> c_uint {
    CALLS.load(Ordering::Relaxed)
}

/// Not a function of the driver: who is next depends on who asks, and is the program's C library.
#[unsafe(no_mangle)]
pub extern "C" fn getpid() -> c_int {
    let function = next(c"getpid");
    if function.is_null() {
        return -1;
    }
    // SAFETY: the function of that name has this type.
    unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(function)() }
}
