//! `libnvidia-ml.so.1` of the simulated driver: the calls of NVML that Highwater makes, with
//! NVML's names, layouts and error codes.
//!
//! Pointers come from C callers, who promise what `nvml.h` asks: each is null or valid for its
//! type. Output pointers are therefore `Option<&mut MaybeUninit<T>>`, which has the layout of a
//! nullable pointer and needs no unsafe code to check and to write.
#![allow(non_snake_case, reason = "the names are NVML's")]

mod code;
mod device;
mod limits;
mod memory;
mod mig;
mod output;
mod process;
mod session;
mod system;

/// Defines functions of the C interface, whose bodies may fail with a [`code::Code`].
macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> std::ffi::c_uint {
            let body = || -> Result<(), $crate::code::Code> { $body };
            body().map_or_else($crate::code::Code::number, |()| 0)
        }
    )*};
}
use exports;
