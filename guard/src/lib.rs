//! The library that keeps a pod within its memory quota from inside of its processes.
//!
//! It is loaded before every program of the pod by `ld.so.preload` and stands in front of those
//! functions of the driver that give memory. What a program asks for is charged to the pod's quota
//! first (`accounts`); what would go over it is refused with the driver's own
//! `CUDA_ERROR_OUT_OF_MEMORY`. Memory information shows the quota as the device. The README beside
//! this crate says what is covered and what is not, `entry-points.tsv` says it of every function.
//!
//! | file | what |
//! |---|---|
//! | `lookup`, `symbols`, `elf` | how programs and hooks find the driver's functions |
//! | `plain`, `virtual_memory`, `pools`, `arrays`, `graphs`, `ipc`, `contexts` | a family of allocations each |
//! | `streams`, `blocks` | what families need to know of streams, and of small allocations |
//! | `exports` | descriptors that keep memory alive |
//! | `info` | what programs are told |
//! | `accounts`, `client` | the pod's quota, and the agent that grants it |
//! | `state`, `table`, `sys` | what this process holds |
//!
//! It lives inside of programs that it knows nothing about. So it starts no threads, allocates
//! nothing from the heap, does nothing before the first call of the driver, waits for no other
//! process, and begins anew in a forked child.

#![cfg_attr(feature = "freestanding", no_std)]

#[cfg(all(feature = "freestanding", not(panic = "abort")))]
compile_error!("build the library as it is shipped with `--profile guard`");

#[cfg(not(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64")))]
compile_error!("the driver and its programs use glibc on 64-bit Linux");

extern crate rustix_bare as rustix;

mod accounts;
mod arrays;
mod blocks;
mod client;
mod code;
mod contexts;
mod elf;
mod exports;
mod graphs;
mod info;
mod ipc;
mod lookup;
mod plain;
mod pools;
mod state;
mod streams;
mod symbols;
mod sys;
mod table;
mod virtual_memory;

/// Nothing here panics; should it ever, the program must not go on with an account that is wrong.
#[cfg(feature = "freestanding")]
#[panic_handler]
fn stop(_: &core::panic::PanicInfo<'_>) -> ! {
    #[link(name = "c")]
    unsafe extern "C" {
        fn abort() -> !;
    }
    // SAFETY: it does not return.
    unsafe { abort() }
}
