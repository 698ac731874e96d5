//! Descriptors that keep memory, and their end.
//!
//! Each is the writing end of a pipe of its own, whose reading end the daemon keeps. The kernel
//! says when the last duplicate of the writing end is closed, in whichever process it was, or on
//! its way to one: a pipe without a writer hangs up. So nothing is asked again and again, and a
//! thousand descriptors cost no more than one while nobody closes them.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::protocol::Descriptor;

/// No wait.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Ends that are learnt of at once.
const MOST_AT_ONCE: usize = 512;

/// The descriptors that are out.
#[derive(Debug)]
pub(crate) struct Exports {
    epoll: OwnedFd,
    kept: Mutex<HashMap<u64, Export>>,
}

/// One of them.
#[derive(Debug)]
struct Export {
    descriptor: Descriptor,
    /// The piece of memory that it keeps.
    piece: u64,
    /// The pipe's reading end; its own end takes it out of `epoll` too.
    _reader: OwnedFd,
}

impl Exports {
    /// None yet.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, kept: Mutex::default() })
    }

    /// A descriptor for a piece. The caller must let go of it once it is sent.
    pub(crate) fn make(&self, piece: u64) -> io::Result<OwnedFd> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // Both ends are the same file.
        let descriptor = Descriptor::of(reader.as_fd())?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // No flags: a hang-up is always told, and what anybody writes there is of no interest.
        let number = epoll::EventData::new_u64(descriptor.inode);
        epoll::add(&self.epoll, &reader, number, epoll::EventFlags::empty())?;
        kept.insert(descriptor.inode, Export { descriptor, piece, _reader: reader });
        Ok(writer)
    }

    /// The piece that a process's descriptor keeps.
    pub(crate) fn piece(&self, descriptor: Descriptor) -> Option<u64> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let export = kept.get(&descriptor.inode).filter(|export| export.descriptor == descriptor)?;
        Some(export.piece)
    }

    /// What is readable while descriptors are closed everywhere of which [`Self::ended`] has not told.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Waits until descriptors are closed everywhere.
    pub(crate) fn wait(&self) -> io::Result<()> {
        match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], None) {
            Err(Errno::INTR) => Ok(()),
            result => result.map(drop).map_err(io::Error::from),
        }
    }

    /// The pieces of which the descriptors are closed everywhere, each told once. The kernel says so
    /// before whoever closed the last one goes on. `first` is done while [`Self::descriptor`] still
    /// is readable.
    pub(crate) fn ended(&self, first: impl Fn()) -> io::Result<Vec<u64>> {
        let mut pieces = Vec::new();
        loop {
            let mut events = Vec::with_capacity(MOST_AT_ONCE);
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&AT_ONCE)) {
                Err(Errno::INTR) => continue,
                result => result?,
            };
            if !events.is_empty() {
                first();
            }
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let ended = events.iter().filter_map(|event| kept.remove(&event.data.u64()));
            pieces.extend(ended.map(|export| export.piece));
            if events.len() < MOST_AT_ONCE {
                return Ok(pieces);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::protocol::{Reply, receive_with, send_with};

    #[test]
    fn a_descriptor_ends_with_its_last_duplicate_even_in_flight() {
        let exports = Exports::new().unwrap();
        let (first, second) = (exports.make(1).unwrap(), exports.make(2).unwrap());
        assert_eq!(exports.piece(Descriptor::of(second.as_fd()).unwrap()), Some(2));
        let other = std::fs::File::open("/proc/self/stat").unwrap();
        assert_eq!(exports.piece(Descriptor::of(other.as_fd()).unwrap()), None);

        let duplicate = first.try_clone().unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        send_with(&mut ours, &Reply::Done, first.as_fd()).unwrap();
        drop((first, duplicate));
        assert!(exports.ended(|| ()).unwrap().is_empty());
        drop(second);
        assert_eq!(exports.ended(|| ()).unwrap(), [2]);
        let (_, arrived) = receive_with::<Reply>(&theirs, &mut Vec::new()).unwrap().unwrap();
        drop(arrived);
        assert_eq!(exports.ended(|| ()).unwrap(), [1]);

        let third = exports.make(3).unwrap();
        send_with(&mut ours, &Reply::Done, third.as_fd()).unwrap();
        drop(third);
        // Nobody will ever take it out of the socket.
        drop((ours, theirs));
        assert_eq!(exports.ended(|| ()).unwrap(), [3]);
    }

    #[test]
    fn what_is_written_to_a_descriptor_ends_nothing() {
        let exports = Exports::new().unwrap();
        let (first, second) = (exports.make(1).unwrap(), exports.make(2).unwrap());
        rustix::io::write(&first, b"x").unwrap();
        drop(second);
        assert_eq!(exports.ended(|| ()).unwrap(), [2]);
        drop(first);
        exports.wait().unwrap();
        assert_eq!(exports.ended(|| ()).unwrap(), [1]);
    }
}
