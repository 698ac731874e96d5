//! What the guard needs of the kernel: time, memory that a forked child does not inherit, locks.
//!
//! Nothing here touches `errno`, allocates from the program's heap or starts a thread: all of it
//! may run inside of any program at any time.

use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::fmt;
use core::ops::{Deref, DerefMut};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// A moment, in nanoseconds of the monotonic clock.
pub(crate) type Moment = u64;

/// Nanoseconds in a millisecond.
pub(crate) const MILLISECOND: u64 = 1_000_000;
/// Nanoseconds in a second.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// The present moment.
pub(crate) fn now() -> Moment {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.saturating_mul(SECOND).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// A length of time as the kernel takes it.
pub(crate) fn timespec(nanoseconds: u64) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(nanoseconds / SECOND).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(nanoseconds % SECOND).unwrap_or(0),
    }
}

/// Sleeps; a signal may end it early.
pub(crate) fn sleep(nanoseconds: u64) {
    let _early = rustix::thread::nanosleep(&timespec(nanoseconds));
}

/// Maps that many bytes of zeroes, for this process alone.
pub(crate) fn map(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: the kernel chooses an address that nothing else has.
    let address = unsafe {
        rustix::mm::mmap_anonymous(
            ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    NonNull::new(address.ok()?.cast())
}

/// Gives memory of [`map`] back.
///
/// # Safety
/// Nothing may use it any more.
pub(crate) unsafe fn unmap(address: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller says that it is mapped and unused.
    let _leaked = unsafe { rustix::mm::munmap(address.as_ptr().cast(), bytes) };
}

/// Leaves memory of [`map`] out of forked children.
pub(crate) fn keep_from_children(address: NonNull<u8>, bytes: usize) {
    // SAFETY: this changes what a child gets, not what this process has.
    let _copied = unsafe { rustix::mm::madvise(address.as_ptr().cast(), bytes, Advice::LinuxDontFork) };
}

/// Makes forked children find zeroes in memory of [`map`]. False where the kernel cannot.
pub(crate) fn wipe_in_children(address: NonNull<u8>, bytes: usize) -> bool {
    // SAFETY: as above.
    unsafe { rustix::mm::madvise(address.as_ptr().cast(), bytes, Advice::LinuxWipeOnFork) }.is_ok()
}

#[link(name = "c")]
unsafe extern "C" {
    fn getauxval(kind: usize) -> usize;
}

/// Whether the program runs with more rights than its caller had.
pub(crate) fn is_secure() -> bool {
    const AT_SECURE: usize = 23;
    // SAFETY: a query that has no conditions.
    unsafe { getauxval(AT_SECURE) != 0 }
}

/// The first value of `T` in memory that [`map`] gives, and how many bytes that has.
pub(crate) fn map_first<T: Zeroed>() -> Option<(NonNull<T>, usize)> {
    let bytes = size_of::<T>().next_multiple_of(4096);
    const { assert!(align_of::<T>() <= 4096) };
    map(bytes).map(|memory| (memory.cast(), bytes))
}

/// Types whose first value is all zeroes, so that fresh memory, and memory that a fork has wiped,
/// holds it.
///
/// # Safety
/// All-zero bytes must be a valid value.
pub(crate) unsafe trait Zeroed {}

// SAFETY: a unit has no bytes.
unsafe impl Zeroed for () {}

const FREE: u32 = 0;
const HELD: u32 = 1;
const WAITED_FOR: u32 = 2;

/// A lock between the threads of this process, with what it protects.
///
/// It lives in memory that is wiped by a fork, so a child never finds it held. No process ever
/// waits for another one's.
#[repr(C)]
pub(crate) struct Mutex<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only while the lock is held.
unsafe impl<T: Send> Sync for Mutex<T> {}
// SAFETY: zero is `FREE`, and the value is zeroed by its own word.
unsafe impl<T: Zeroed> Zeroed for Mutex<T> {}

/// The right to what a [`Mutex`] protects.
pub(crate) struct Guard<'a, T> {
    mutex: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    /// Waits until the lock is free.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        if self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait(None);
        }
        Guard { mutex: self }
    }

    /// Takes the lock if it is free.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let taken = self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed);
        // Not `then_some`: a guard that is made in vain would open the lock when it is dropped.
        taken.is_ok().then(|| Guard { mutex: self })
    }

    /// Waits until the lock is free, but not longer than until `deadline`.
    pub(crate) fn lock_until(&self, deadline: Moment) -> Option<Guard<'_, T>> {
        if let Some(guard) = self.try_lock() {
            return Some(guard);
        }
        self.wait(Some(deadline)).then(|| Guard { mutex: self })
    }

    #[cold]
    fn wait(&self, deadline: Option<Moment>) -> bool {
        for _ in 0..100 {
            if self.state.load(Ordering::Relaxed) == FREE
                && self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return true;
            }
            core::hint::spin_loop();
        }
        while self.state.swap(WAITED_FOR, Ordering::Acquire) != FREE {
            let rest = match deadline.map(|deadline| deadline.saturating_sub(now())) {
                Some(0) => return false,
                rest => rest.map(timespec),
            };
            // Whatever ends the wait, the state is looked at again.
            let _woken = futex::wait(&self.state, futex::Flags::PRIVATE, WAITED_FOR, rest.as_ref());
        }
        true
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.mutex.state.swap(FREE, Ordering::Release) == WAITED_FOR {
            // It fails only for an address that is none.
            let _woken = futex::wake(&self.mutex.state, futex::Flags::PRIVATE, 1);
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held, by this guard alone.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T> fmt::Debug for Guard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guard")
    }
}

/// A pointer or handle as a number, for use as a key: it is never turned back.
pub(crate) fn key(handle: *mut c_void) -> u64 {
    u64::try_from(handle.addr()).unwrap_or(0)
}

/// A size as the guard counts it.
pub(crate) fn bytes(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use core::mem::MaybeUninit;
    use std::{sync::Arc, thread};

    use super::*;

    // SAFETY: zero is zero.
    unsafe impl Zeroed for u64 {}

    fn zeroed<T: Zeroed>() -> T {
        // SAFETY: that is what the trait promises.
        unsafe { MaybeUninit::zeroed().assume_init() }
    }

    #[test]
    fn a_lock_lets_one_thread_in() {
        let counter: Arc<Mutex<u64>> = Arc::new(zeroed());
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let counter = Arc::clone(&counter);
                thread::spawn(move || (0..10_000).for_each(|_| *counter.lock() += 1))
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*counter.lock(), 40_000);
    }

    #[test]
    fn waiting_for_a_lock_ends_at_the_deadline() {
        let lock: Mutex<()> = zeroed();
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        assert!(lock.lock_until(now() + 5 * MILLISECOND).is_none());
        drop(held);
        assert!(lock.lock_until(now()).is_some());
    }
}
