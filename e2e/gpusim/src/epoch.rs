//! How an observer knows, without asking, that the driver would answer as it did before.
//!
//! No answer of a real driver crosses a socket, and a program that samples would be charged for
//! that here. So the daemon has a page of memory which clients can map and cannot change. On it
//! stands a number that is another one after every change of anything, from before the change is
//! answered: while it is the same, replies may be given again. What is visible to whom stays the
//! daemon's to say, for only replies to the same connection are kept. That the daemon is gone the
//! page does not tell, but its socket does.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The length of the page.
const LENGTH: usize = 4096;
/// Stands on the page while no reply may be given again.
const UNSETTLED: u64 = 0;

/// Counts the changes.
#[derive(Debug, Default)]
pub(crate) struct Epoch {
    last: u64,
    settled: bool,
}

impl Epoch {
    /// What is to stand on the page after something was done: another number than ever before if
    /// replies of before may be wrong now.
    pub(crate) fn next(&mut self, changed: bool, settled: bool) -> u64 {
        if changed || settled != self.settled {
            self.last += 1;
        }
        self.settled = settled;
        if settled { self.last } else { UNSETTLED }
    }
}

/// The daemon's page.
#[derive(Debug)]
pub(crate) struct Page {
    descriptor: OwnedFd,
    map: Map,
}

impl Page {
    /// A page that nobody else can write to, or make shorter under its readers and us.
    pub(crate) fn create() -> io::Result<Self> {
        let descriptor = memfd_create("gpusim-epoch", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&descriptor, u64::try_from(LENGTH).map_err(io::Error::other)?)?;
        let map = Map::of(&descriptor, ProtFlags::READ | ProtFlags::WRITE)?;
        // The mapping that there is stays writable.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&descriptor, seals)?;
        Ok(Self { descriptor, map })
    }

    /// What clients map.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Says that no reply may be given again, until a number is published.
    pub(crate) fn unsettle(&self) {
        self.publish(UNSETTLED);
    }

    /// Puts a number on the page.
    pub(crate) fn publish(&self, number: u64) {
        self.map.number().store(number, Ordering::Release);
    }
}

/// A client's view of the page.
#[derive(Debug)]
pub(crate) struct View(Map);

impl View {
    /// Maps the page.
    pub(crate) fn of(descriptor: &OwnedFd) -> io::Result<Self> {
        Map::of(descriptor, ProtFlags::READ).map(Self)
    }

    /// The epoch; none while replies may not be given again.
    pub(crate) fn epoch(&self) -> Option<u64> {
        // Only relaxed loads are promised to work where memory cannot be written.
        let number = self.0.number().load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        Some(number).filter(|number| *number != UNSETTLED)
    }
}

/// A mapping of the page.
#[derive(Debug)]
struct Map(NonNull<AtomicU64>);

// SAFETY: the mapping is no thread's own, and all that is done with it is atomic.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn of(descriptor: &OwnedFd, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: the kernel finds a place where nothing is mapped yet.
        let start =
            unsafe { mmap(std::ptr::null_mut(), LENGTH, protection, MapFlags::SHARED, descriptor, 0) }?;
        NonNull::new(start.cast()).map(Self).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn number(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped for as long as `self` lives, begins at a multiple of its own
        // length, and is accessed by atomic operations alone. The file is as long as the page and
        // sealed against being cut.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: `mmap` gave this range, and nobody has a reference into it any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), LENGTH) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use rustix::io::Errno;
    use rustix::mm::{MprotectFlags, mprotect};

    use super::*;

    #[test]
    fn a_number_is_shown_for_as_long_as_nothing_changes() {
        let mut epoch = Epoch::default();
        let first = epoch.next(false, true);
        assert_ne!(first, UNSETTLED);
        assert_eq!(epoch.next(false, true), first);
        assert_ne!(epoch.next(true, true), first);
    }

    #[test]
    fn no_number_comes_back_after_an_unsettled_time() {
        let mut epoch = Epoch::default();
        let first = epoch.next(true, true);
        assert_eq!(epoch.next(true, false), UNSETTLED);
        assert_eq!(epoch.next(false, false), UNSETTLED);
        let second = epoch.next(false, true);
        assert!(second != UNSETTLED && second != first);
    }

    #[test]
    fn a_view_shows_what_was_published_and_nothing_at_first() {
        let page = Page::create().unwrap();
        let view = View::of(&page.descriptor().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(view.epoch(), None);
        page.publish(7);
        assert_eq!(view.epoch(), Some(7));
        page.publish(UNSETTLED);
        assert_eq!(view.epoch(), None);
    }

    #[test]
    fn a_client_cannot_scribble_on_the_page_or_cut_it() {
        let page = Page::create().unwrap();
        page.publish(7);
        let descriptor = page.descriptor().try_clone_to_owned().unwrap();
        // Not even by a descriptor that it opens anew.
        let again = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let again: OwnedFd = File::options().read(true).write(true).open(again).unwrap().into();
        for descriptor in [&descriptor, &again] {
            assert_eq!(rustix::io::pwrite(descriptor, &[0; 8], 0), Err(Errno::PERM));
            assert_eq!(ftruncate(descriptor, 0), Err(Errno::PERM));
            assert_eq!(fcntl_add_seals(descriptor, SealFlags::WRITE), Err(Errno::PERM));
            assert!(Map::of(descriptor, ProtFlags::READ | ProtFlags::WRITE).is_err());
            let view = View::of(descriptor).unwrap();
            let start = view.0.0.as_ptr().cast();
            // SAFETY: the range is the view's, and more is allowed there only if the test fails.
            let allowed = unsafe { mprotect(start, LENGTH, MprotectFlags::READ | MprotectFlags::WRITE) };
            assert_eq!(allowed, Err(Errno::ACCESS));
            assert_eq!(view.epoch(), Some(7));
        }
        page.publish(8);
        assert_eq!(View::of(&descriptor).unwrap().epoch(), Some(8));
    }
}
