//! The program without a C library: where the kernel starts it, and what it asks of the kernel.

use core::arch::{asm, global_asm};

use crate::{LONGEST, pressure};

#[cfg(target_arch = "x86_64")]
mod number {
    pub(super) const READ: usize = 0;
    pub(super) const EXIT: usize = 231;
    pub(super) const NOW: usize = 228;
    pub(super) const OPEN: usize = 257;
}
#[cfg(target_arch = "aarch64")]
mod number {
    pub(super) const READ: usize = 63;
    pub(super) const EXIT: usize = 94;
    pub(super) const NOW: usize = 113;
    pub(super) const OPEN: usize = 56;
}

/// `AT_FDCWD`.
const HERE: usize = usize::MAX - 99;
/// `O_NONBLOCK | O_NOCTTY | O_CLOEXEC`, for reading: whatever lies there, opening it waits for nobody.
const FLAGS: usize = 0o4000 | 0o400 | 0o2_000_000;

// The stack as the kernel leaves it: the number of arguments, then a pointer to each.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {begin}",
    "ud2",
    begin = sym begin,
);
#[cfg(target_arch = "aarch64")]
global_asm!(
    ".globl _start",
    "_start:",
    "mov x29, xzr",
    "mov x0, sp",
    "bl {begin}",
    "brk #1",
    begin = sym begin,
);

/// # Safety
/// `stack` is what the kernel left.
unsafe extern "C" fn begin(stack: *const usize) -> ! {
    // SAFETY: there is always a count, and so many pointers after it.
    let path = unsafe { if *stack < 2 { 0 } else { *stack.add(2) } };
    exit(usize::from(path != 0 && is_unready(path)))
}

fn is_unready(path: usize) -> bool {
    // Not on the stack, where it would have to be cleared.
    static mut TEXT: [u8; LONGEST + 1] = [0; LONGEST + 1];
    // SAFETY: there is one thread, which comes here once.
    let text: &mut [u8] = unsafe { &mut *(&raw mut TEXT) };
    // SAFETY: the path is a text that ends with a zero byte, as every argument.
    let Some(file) = result(unsafe { call(number::OPEN, [HERE, path, FLAGS, 0]) }) else { return false };
    let mut length = 0;
    loop {
        let Some(rest) = text.get_mut(length..).filter(|rest| !rest.is_empty()) else { return false };
        // SAFETY: the kernel writes no more than that.
        match result(unsafe { call(number::READ, [file, rest.as_mut_ptr().addr(), rest.len(), 0]) }) {
            Some(0) => break,
            Some(read) => length += read,
            None => return false,
        }
    }
    let mut time = [0_u64; 2];
    // SAFETY: the kernel writes seconds and nanoseconds there; 0 is the clock of the real time.
    let asked = result(unsafe { call(number::NOW, [0, (&raw mut time).addr(), 0, 0]) });
    let [seconds, nanoseconds] = time;
    let now = seconds.wrapping_mul(1000).wrapping_add(nanoseconds / 1_000_000);
    match text.get(..length) {
        Some(text) if asked.is_some() => pressure::is_unready(text, now),
        _ => false,
    }
}

fn exit(code: usize) -> ! {
    loop {
        // SAFETY: it does not return.
        unsafe { call(number::EXIT, [code, 0, 0, 0]) };
    }
}

/// What the kernel answered, unless it is an error.
fn result(answer: usize) -> Option<usize> {
    if answer > usize::MAX - 4096 { None } else { Some(answer) }
}

/// Asks the kernel.
///
/// # Safety
/// As the call that has the number.
unsafe fn call(number: usize, [a, b, c, d]: [usize; 4]) -> usize {
    let answer;
    // SAFETY: the registers are those of the kernel's interface; memory may be written.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            out("rcx") _, out("r11") _,
            options(nostack),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => answer,
            in("x1") b, in("x2") c, in("x3") d,
            options(nostack),
        );
    }
    answer
}

/// Nothing here panics; should it ever, the pod stays ready.
#[panic_handler]
fn stop(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(0)
}
