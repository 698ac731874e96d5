//! Finding functions by name, as the CUDA runtime does.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::code::Code;
use crate::output::{Out, put, put_if_wanted};
use crate::{code, context, device, exports, memory, session, virtual_memory};

/// CU_GET_PROC_ADDRESS_SUCCESS and CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND.
const FOUND: c_uint = 0;
const SYMBOL_NOT_FOUND: c_uint = 1;
/// From this version on, a name means the newest form of its function.
const NEWEST_FORMS: c_int = 13_000;

exports! {
    /// Finds a function by the name that programs write.
    fn cuGetProcAddress(
        name: *const c_char, function: Out<*const c_void>, version: c_int, _flags: c_ulonglong,
    ) {
        if find(name, function, version)? { Ok(()) } else { Err(Code::NotFound) }
    }

    /// Finds a function by the name that programs write, and says why there is none.
    fn cuGetProcAddress_v2(
        name: *const c_char, function: Out<*const c_void>, version: c_int, _flags: c_ulonglong,
        status: Out<c_uint>,
    ) {
        // That there is none is an answer, not a failure.
        let found = find(name, function, version)?;
        put_if_wanted(status, if found { FOUND } else { SYMBOL_NOT_FOUND });
        Ok(())
    }

    /// Internal tables of the real driver: there are none here.
    fn cuGetExportTable(table: Out<*const c_void>, _id: *const c_void) {
        put(table, std::ptr::null())?;
        Err(Code::NotFound)
    }
}

/// Writes the address of a function, or null; whether there is one.
fn find(name: *const c_char, function: Out<*const c_void>, version: c_int) -> Result<bool, Code> {
    if name.is_null() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: a text that ends in a zero byte, as the interface asks.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::InvalidValue)?;
    let newest: &[&str] = if version >= NEWEST_FORMS { &["_v4", "_v2", ""] } else { &["_v2", ""] };
    let found = newest.iter().find_map(|form| anywhere(&format!("{name}{form}")));
    put(function, found.unwrap_or(std::ptr::null()))?;
    Ok(found.is_some())
}

fn anywhere(name: &str) -> Option<*const c_void> {
    let modules = [
        session::address,
        device::address,
        context::address,
        memory::address,
        virtual_memory::address,
        code::address,
        address,
    ];
    modules.iter().find_map(|find| find(name))
}
