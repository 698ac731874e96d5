//! `libcuda.so.1` of the simulated driver: devices, contexts and memory, with CUDA's names and
//! error codes. Nothing is computed: memory exists as a number only.
//!
//! Pointers come from C callers, who promise what `cuda.h` asks: each is null or valid for its
//! type. Output pointers are therefore `Option<&mut MaybeUninit<T>>`, which has the layout of a
//! nullable pointer and needs no unsafe code to check and to write.
#![allow(non_snake_case, reason = "the names are CUDA's")]

mod array;
mod checkpoint;
mod code;
mod context;
mod device;
mod entry;
mod failing;
mod graph;
mod host;
mod ipc;
mod launch;
mod link;
mod memory;
mod output;
mod pointer;
mod pool;
mod session;
mod stream;
mod uvm;
mod virtual_memory;

/// Defines functions of the C interface, whose bodies may fail with a [`code::Code`], and
/// `address`, which finds them by name.
macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $type),*) -> std::ffi::c_uint {
                if let Some(code) = $crate::failing::code(stringify!($name)) {
                    return code;
                }
                let body = || -> Result<(), $crate::code::Code> { $body };
                body().map_or_else($crate::code::Code::number, |()| 0)
            }
        )*

        /// The function of this module with that name.
        pub(crate) fn address(name: &str) -> Option<*const std::ffi::c_void> {
            $(
                if name == stringify!($name) {
                    return Some($name as *const std::ffi::c_void);
                }
            )*
            None
        }
    };
}
use exports;
