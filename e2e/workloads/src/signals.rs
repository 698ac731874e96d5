//! SIGTERM and SIGINT, waited for like time.
//!
//! Both are blocked and read from a descriptor, so that a wait ends at once when they come. This
//! works for process 1 of a container too, which the kernel spares signals without a handler.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{BorrowedFd, FromRawFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The signals as a descriptor.
#[derive(Debug)]
pub(crate) struct Signals {
    descriptor: File,
    ignored: bool,
}

/// Why a wait is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Woken {
    /// Its time has passed.
    Time,
    /// The bell rang.
    Bell,
}

/// The end was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terminated;

impl Signals {
    /// Takes the signals over for the whole process; to be called before there are other threads.
    pub(crate) fn take() -> io::Result<Self> {
        let fd = block_and_open()?;
        // SAFETY: the descriptor was made just now and belongs to nobody else.
        Ok(Self { descriptor: unsafe { File::from_raw_fd(fd) }, ignored: false })
    }

    /// From here on the signals end nothing.
    pub(crate) fn ignore(&mut self) {
        self.ignored = true;
    }

    /// Waits until `deadline`, or for ever, or until a bell can be read.
    pub(crate) fn wait_until(
        &mut self,
        deadline: Option<Instant>,
        bell: BorrowedFd<'_>,
    ) -> Result<Woken, Terminated> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let (signalled, rung) = self.arrives_within(left, bell);
            if signalled {
                self.take_one();
                if !self.ignored {
                    return Err(Terminated);
                }
                crate::run::say("ignores a signal to end");
            } else if rung {
                return Ok(Woken::Bell);
            } else if left.is_some_and(|left| left.is_zero()) {
                return Ok(Woken::Time);
            }
        }
    }

    /// Whether a signal arrives within a time, and whether the bell rings; with no time, waits until
    /// one does.
    fn arrives_within(&self, time: Option<Duration>, bell: BorrowedFd<'_>) -> (bool, bool) {
        let mut ready =
            [PollFd::new(&self.descriptor, PollFlags::IN), PollFd::from_borrowed_fd(bell, PollFlags::IN)];
        let timeout = time.and_then(|time| Timespec::try_from(time).ok());
        if poll(&mut ready, timeout.as_ref()).is_err() {
            return (false, false);
        }
        let [signalled, rung] = ready.map(|one| one.revents().contains(PollFlags::IN));
        (signalled, rung)
    }

    fn take_one(&mut self) {
        let mut record = [0; size_of::<libc::signalfd_siginfo>()];
        // The descriptor was ready, so this neither waits nor fails.
        let _ = self.descriptor.read(&mut record);
    }
}

fn block_and_open() -> io::Result<RawFd> {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first call initialises the set that the others read, and null asks for no copy
    // of the old mask.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
        let code = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code));
        }
        let fd = libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
    }
}
