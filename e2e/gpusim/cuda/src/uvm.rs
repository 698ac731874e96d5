//! Managed memory in the address space: the driver maps it from its device file, by which an
//! observer of `/proc/PID/maps` knows that there is some. Nothing is behind these addresses.

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::session::DevicePointer;

/// What the driver maps for itself in a process that has a context.
pub(crate) const OWN: u64 = 2 << 20;

/// Maps a part of the file; whether it is there now.
pub(crate) fn map(file: Option<&File>, address: DevicePointer, size: u64) -> bool {
    let (Some(file), Ok(place), Ok(length)) = (file, usize::try_from(address), usize::try_from(size)) else {
        return false;
    };
    let wanted: *mut libc::c_void = std::ptr::without_provenance_mut(place);
    // SAFETY: the flags forbid to replace a mapping that is there, and nobody knows a new one yet.
    let got = unsafe {
        libc::mmap(
            wanted,
            length,
            libc::PROT_READ,
            libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE,
            file.as_raw_fd(),
            0,
        )
    };
    if got == wanted {
        return true;
    }
    if got != libc::MAP_FAILED {
        // SAFETY: an old kernel took the address for a hint and put the mapping elsewhere, where
        // nobody knows it.
        unsafe { libc::munmap(got, length) };
    }
    false
}

/// Ends what `map` made.
pub(crate) fn unmap(address: DevicePointer, size: u64) {
    if let (Ok(place), Ok(length)) = (usize::try_from(address), usize::try_from(size)) {
        // SAFETY: the caller made the mapping, and device memory is not for the host to touch.
        unsafe { libc::munmap(std::ptr::without_provenance_mut(place), length) };
    }
}
