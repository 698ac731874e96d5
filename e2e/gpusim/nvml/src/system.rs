//! The driver as a whole.

use std::ffi::{c_char, c_int, c_uint};

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put, put_text};
use crate::session::with;

exports! {
    /// Version of the driver.
    fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) {
        let text = with(|session| Ok(session.inventory().driver_version.clone()))?;
        // SAFETY: the caller has room for `length` bytes, as the interface asks.
        unsafe { put_text(version, length, &text) }
    }

    /// Version of this library: the driver's, with the CUDA major version in front.
    fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) {
        let text = with(|session| {
            let inventory = session.inventory();
            Ok(format!("{}.{}", inventory.cuda_version / 1000, inventory.driver_version))
        })?;
        // SAFETY: the caller has room for `length` bytes, as the interface asks.
        unsafe { put_text(version, length, &text) }
    }

    /// CUDA version that the driver supports.
    fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) { cuda_version(version) }

    /// CUDA version that the driver supports.
    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) { cuda_version(version) }

    /// Name of a process, by its PID in the caller's PID namespace.
    fn nvmlSystemGetProcessName(pid: c_uint, name: *mut c_char, length: c_uint) {
        with(|_| Ok(()))?;
        let path = std::fs::read_link(format!("/proc/{pid}/exe")).map_err(|_| Code::NotFound)?;
        // SAFETY: the caller has room for `length` bytes, as the interface asks.
        unsafe { put_text(name, length, &path.to_string_lossy()) }
    }
}

fn cuda_version(version: Out<c_int>) -> Result<(), Code> {
    put(version, with(|session| Ok(session.inventory().cuda_version))?)
}
