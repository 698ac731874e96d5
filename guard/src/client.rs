//! The connection to the agent: the pages come over it, and grants.
//!
//! The socket lies beside the library, in the volume of this pod alone. Programs close descriptors
//! that they do not know and reuse their numbers, so the socket is recognised by its inode before
//! every use. A child of a fork has its own connection.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use highwater_guard_abi::Versions;
use highwater_guard_abi::charge::Units;
use highwater_guard_abi::page::{QuotaView, UsagePage};
use highwater_guard_abi::wire::{
    FRAME, Hello, NotGrantedReason, RefusedReason, STRENGTH_MPS, ToAgent, ToGuard,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use rustix::fs::Access;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::accounts::{self, Pages};
use crate::elf;
use crate::state::State;
use crate::sys::{self, Guard, MILLISECOND, Moment, SECOND, Zeroed};

/// How long the first allocation waits for an agent that is not there.
const PATIENCE: u64 = 2 * SECOND;
/// How often an agent that is not there is looked for afterwards.
const RETRY: u64 = SECOND;
/// How long a call is held up by looking for a newer agent.
const REFRESH_PATIENCE: u64 = 300 * MILLISECOND;
/// How often calls of the driver look whether the agent has asked for something.
const HEED: u64 = 50 * MILLISECOND;
/// Pause between attempts while waiting.
const PAUSE: u64 = 20 * MILLISECOND;
/// How long a thread sleeps at most before it looks whether another one took its answer in.
const SLICE: u64 = 5 * MILLISECOND;

/// Descriptors from here on rarely collide with those that programs choose for themselves.
const HIGH_DESCRIPTOR: RawFd = 512;

/// Answers to threads that did not read them themselves.
const ANSWERS: usize = 32;
/// How long after its deadline a question is remembered: its thread may have gone without a word.
const STALE: u64 = SECOND;

#[derive(Clone, Copy)]
#[repr(C)]
struct Inbox {
    /// 0 where there is none.
    ticket: u32,
    /// 0 while it is awaited, 1 granted, else 2 plus the position of the reason.
    verdict: u32,
    /// When nobody waits for it any more.
    until: Moment,
}

impl Inbox {
    const EMPTY: Self = Self { ticket: 0, verdict: 0, until: 0 };
}

/// The connection.
#[repr(C)]
pub(crate) struct Client {
    /// Whether `socket` and what follows say something.
    connected: u32,
    socket: RawFd,
    device: u64,
    inode: u64,
    ticket: u32,
    /// Whether the first wait is over.
    waited: u32,
    next_try: Moment,
    /// What the agent was told of [`WEAKNESSES`].
    told: u32,
    /// A bit for each device of the quota page on which the agent asked for a trim.
    trims: u32,
    inbox: [Inbox; ANSWERS],
}

// SAFETY: numbers.
unsafe impl Zeroed for Client {}

/// `STRENGTH_*` bits that hold for this process.
static WEAKNESSES: AtomicU32 = AtomicU32::new(0);

/// The socket that this process, or the parent that it was forked from, has open: number and inode.
static OPENED: AtomicI32 = AtomicI32::new(-1);
static OPENED_INODE: AtomicU64 = AtomicU64::new(0);

/// How a question for more memory ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The pages say something else than before.
    LookAgain,
    /// No.
    Refused(NotGrantedReason),
}

/// Why there is no connection.
enum Absent {
    /// Nobody listens.
    Nobody,
    /// Somebody listens, but did not let this process in.
    Denied,
}

/// A path in a buffer of its own.
struct Path {
    bytes: [u8; PATH],
    length: usize,
}

/// What fits into the address of a socket, with its zero.
const PATH: usize = 108;

impl Path {
    /// The path of a file beside the library, if it is short enough.
    fn beside_library(name: &[u8]) -> Option<Self> {
        let here = (beside_library_anchor as fn() as *const ()).addr();
        elf::find(|object| {
            if !object.contains(here) {
                return None;
            }
            let own = object.path().to_bytes();
            let slash = own.iter().rposition(|byte| *byte == b'/')?;
            let mut path = Self { bytes: [0; PATH], length: 0 };
            Some(path.add(own.get(..slash)?).and_then(|()| path.add(name)).map(|()| path))
        })
        .flatten()
    }

    fn add(&mut self, part: &[u8]) -> Option<()> {
        let end = self.length.checked_add(part.len()).filter(|end| *end < PATH)?;
        self.bytes.get_mut(self.length..end)?.copy_from_slice(part);
        self.length = end;
        Some(())
    }

    fn as_c_str(&self) -> Option<&CStr> {
        CStr::from_bytes_until_nul(&self.bytes).ok()
    }
}

/// Lies inside of the library.
fn beside_library_anchor() {}

impl Client {
    /// The socket, unless the program has closed it.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        if self.connected == 0 {
            return None;
        }
        // SAFETY: it is only used if it is the very socket that was opened here.
        let socket = unsafe { BorrowedFd::borrow_raw(self.socket) };
        let stat = rustix::fs::fstat(socket).ok()?;
        (stat.st_dev == self.device && stat.st_ino == self.inode).then_some(socket)
    }

    /// Ends the connection.
    fn disconnect(&mut self) {
        if self.connected == 0 {
            return;
        }
        if self.socket().is_some() {
            // SAFETY: it is our own, as was just seen; `connected` says that it is no more.
            unsafe { rustix::io::close(self.socket) };
        }
        self.connected = 0;
        OPENED.store(-1, Ordering::Relaxed);
        // Whoever asked through it has to ask again.
        self.inbox = [Inbox::EMPTY; ANSWERS];
    }

    /// Whether the agent at the other end is still there.
    fn alive(&self) -> bool {
        let Some(socket) = self.socket() else { return false };
        let mut watched = [PollFd::new(&socket, PollFlags::IN)];
        let ended = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        match poll(&mut watched, Some(&sys::timespec(0))) {
            Ok(_) => !watched.iter().any(|one| one.revents().intersects(ended)),
            Err(_) => true,
        }
    }

    fn send(&self, message: &ToAgent) -> Result<(), Errno> {
        let (frame, length) = message.encode();
        let socket = self.socket().ok_or(Errno::NOTCONN)?;
        let frame = frame.get(..length).ok_or(Errno::INVAL)?;
        rustix::net::send(socket, frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map(|_| ())
    }

    /// Says what weakens the guard here, if the agent does not know yet.
    fn confess(&mut self) {
        let weaknesses = WEAKNESSES.load(Ordering::Relaxed);
        if weaknesses != self.told && self.send(&ToAgent::Strength { flags: weaknesses }).is_ok() {
            self.told = weaknesses;
        }
    }

    /// Connects, and takes over the pages that the agent hands out.
    fn connect(&mut self, state: &'static State, deadline: Moment) -> Result<(), Absent> {
        self.disconnect();
        drop_inherited();
        let slot = state.accounts.lock().pages().map_or(0, |pages| u32::try_from(pages.slot).unwrap_or(0));
        let socket = open_socket(deadline)?;
        let hello = Hello { versions: Versions::OURS, slot, guard_version: version() };
        let (frame, length) = ToAgent::Hello(hello).encode();
        let frame = frame.get(..length).unwrap_or_default();
        rustix::net::send(&socket, frame, SendFlags::NOSIGNAL).map_err(|_| Absent::Nobody)?;
        let pages = welcome(&socket, deadline)?;
        self.keep(socket)?;
        if !self.alive() {
            // The epoch may be that of the agent after this one.
            self.disconnect();
            return Err(Absent::Nobody);
        }
        state.accounts.lock().replace(state, pages);
        self.told = 0;
        self.confess();
        Ok(())
    }

    fn keep(&mut self, socket: OwnedFd) -> Result<(), Absent> {
        let stat = rustix::fs::fstat(&socket).map_err(|_| Absent::Nobody)?;
        let high = rustix::io::fcntl_dupfd_cloexec(&socket, HIGH_DESCRIPTOR);
        self.socket = high.unwrap_or(socket).into_raw_fd();
        (self.device, self.inode) = (stat.st_dev, stat.st_ino);
        self.connected = 1;
        close_in_children();
        OPENED_INODE.store(stat.st_ino, Ordering::Relaxed);
        OPENED.store(self.socket, Ordering::Relaxed);
        Ok(())
    }

    /// Puts what has arrived where the threads that asked will look.
    fn take_in(&mut self) -> Result<(), Errno> {
        loop {
            let mut frame = [0_u8; FRAME];
            let socket = self.socket().ok_or(Errno::NOTCONN)?;
            let length = match rustix::net::recv(socket, &mut frame, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Errno::NOTCONN),
                Ok((length, _)) => length,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            };
            let (ticket, verdict) = match frame.get(..length).map(ToGuard::decode) {
                Some(Ok(ToGuard::Granted { ticket, .. })) => (ticket, 1),
                Some(Ok(ToGuard::NotGranted { ticket, reason, .. })) => {
                    let position = NotGrantedReason::ALL.iter().position(|other| *other == reason);
                    (
                        ticket,
                        2_u32.saturating_add(position.and_then(|at| u32::try_from(at).ok()).unwrap_or(0)),
                    )
                }
                Some(Ok(ToGuard::Trim { device })) => {
                    self.trims |= 1_u32.checked_shl(device).unwrap_or(0);
                    continue;
                }
                // Of a newer agent, or of none: nobody waits for it.
                _ => continue,
            };
            if let Some(awaited) = self.inbox.iter_mut().find(|awaited| awaited.ticket == ticket) {
                awaited.verdict = verdict;
            }
        }
    }

    /// Asks for more; returns the ticket.
    fn question(
        &mut self,
        ordinal: usize,
        wanted_total: u64,
        wait: u64,
        deadline: Moment,
    ) -> Result<u32, Errno> {
        self.ticket = self.ticket.wrapping_add(1).max(1);
        let (ticket, now) = (self.ticket, sys::now());
        let is_free = |awaited: &Inbox| awaited.ticket == 0 || awaited.until < now;
        let free = self.inbox.iter_mut().find(|awaited| is_free(awaited)).ok_or(Errno::AGAIN)?;
        *free = Inbox { ticket, verdict: 0, until: deadline.saturating_add(STALE) };
        let asked = self.send(&ToAgent::Grant {
            device: u32::try_from(ordinal).unwrap_or(u32::MAX),
            ticket,
            wanted_total_units: Units::of(wanted_total).get(),
            wait_milliseconds: u32::try_from(wait / MILLISECOND).unwrap_or(u32::MAX),
        });
        if asked.is_err() {
            self.forget(ticket);
        }
        asked.map(|()| ticket)
    }

    fn forget(&mut self, ticket: u32) {
        if let Some(awaited) = self.inbox.iter_mut().find(|awaited| awaited.ticket == ticket) {
            *awaited = Inbox::EMPTY;
        }
    }

    /// Whether an answer to a question may still come.
    fn awaits(&self, ticket: u32) -> bool {
        self.inbox.iter().any(|awaited| awaited.ticket == ticket)
    }

    /// The answer to a question, once.
    fn answer(&mut self, ticket: u32) -> Option<Answer> {
        let awaited = self.inbox.iter_mut().find(|awaited| awaited.ticket == ticket)?;
        let verdict = awaited.verdict.checked_sub(1)?;
        *awaited = Inbox::EMPTY;
        let Some(position) = verdict.checked_sub(1).and_then(|at| usize::try_from(at).ok()) else {
            return Some(Answer::LookAgain);
        };
        let reason = NotGrantedReason::ALL.get(position).copied().unwrap_or(NotGrantedReason::NoMemory);
        Some(Answer::Refused(reason))
    }
}

#[link(name = "c")]
unsafe extern "C" {
    fn getenv(name: *const c_char) -> *const c_char;

    /// What `pthread_atfork` is, which before version 2.34 is in no shared library.
    fn __register_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
        library: *mut c_void,
    ) -> c_int;
}

/// Sees to it that forked children let go of the socket at once. One that kept it open, and perhaps
/// never uses the driver, would pass for its parent when that has run another program since.
fn close_in_children() {
    static REGISTERED: AtomicU32 = AtomicU32::new(0);
    if REGISTERED.swap(1, Ordering::Relaxed) == 0 {
        // SAFETY: the function may be called in any child, and the library is never unloaded.
        // Where it cannot be registered, a child closes the socket when it connects by itself.
        let _left = unsafe { __register_atfork(None, None, Some(in_child), core::ptr::null_mut()) };
    }
}

/// Calls the kernel only, as is due between fork and exec.
extern "C" fn in_child() {
    drop_inherited();
}

/// Closes the socket that this process inherited by a fork, if it is still that.
fn drop_inherited() {
    let opened = OPENED.swap(-1, Ordering::Relaxed);
    if opened < 0 {
        return;
    }
    // SAFETY: it is only closed if it is the very socket that the parent opened.
    let socket = unsafe { BorrowedFd::borrow_raw(opened) };
    if rustix::fs::fstat(socket).is_ok_and(|stat| {
        stat.st_ino == OPENED_INODE.load(Ordering::Relaxed)
            && rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Socket
    }) {
        // SAFETY: as above.
        unsafe { rustix::io::close(opened) };
    }
}

fn version() -> [u8; 16] {
    let mut version = [0; 16];
    for (place, byte) in version.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *place = byte;
    }
    version
}

/// A socket that is connected to whoever listens beside the library.
fn open_socket(deadline: Moment) -> Result<OwnedFd, Absent> {
    let path = Path::beside_library(b"/run/agent.sock").ok_or(Absent::Nobody)?;
    let address = path.as_c_str().and_then(|path| SocketAddrUnix::new(path).ok()).ok_or(Absent::Nobody)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    loop {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|_| Absent::Nobody)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            // Many processes start at once, and the agent has not come to this one.
            Err(Errno::AGAIN | Errno::INTR) if sys::now() < deadline => sys::sleep(MILLISECOND),
            Err(_) => return Err(Absent::Nobody),
        }
    }
}

/// Waits until there is something to read.
fn await_input(socket: impl AsFd, deadline: Moment) -> bool {
    loop {
        let rest = deadline.saturating_sub(sys::now());
        let mut watched = [PollFd::new(&socket, PollFlags::IN)];
        match poll(&mut watched, Some(&sys::timespec(rest))) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(Errno::INTR) if rest > 0 => {}
            Err(_) => return false,
        }
    }
}

/// The agent's answer to Hello: the pages.
fn welcome(socket: &OwnedFd, deadline: Moment) -> Result<Pages, Absent> {
    if !await_input(socket, deadline) {
        return Err(Absent::Denied);
    }
    let mut frame = [0_u8; FRAME];
    let mut room = [MaybeUninit::<u8>::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let received = {
        let mut parts = [rustix::io::IoSliceMut::new(&mut frame)];
        rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    };
    let length = received.map_err(|_| Absent::Nobody)?.bytes;
    let (mut quota, mut usage) = (None, None);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            // Those beyond the second are closed again.
            for descriptor in descriptors {
                if quota.is_none() {
                    quota = Some(descriptor);
                } else if usage.is_none() {
                    usage = Some(descriptor);
                }
            }
        }
    }
    let Some(Ok(ToGuard::Welcome { abi, slot, pod_uid, .. })) = frame.get(..length).map(ToGuard::decode)
    else {
        return Err(Absent::Denied);
    };
    let (Some(quota), Some(usage), true) = (quota, usage, Versions::OURS.contain(abi)) else {
        return Err(Absent::Denied);
    };
    let quota = QuotaView::map(quota.as_fd()).map_err(|_| Absent::Denied)?;
    let usage = UsagePage::map(usage.as_fd()).map_err(|_| Absent::Denied)?;
    let epoch = usage.epoch();
    Ok(Pages { quota, usage, slot: usize::try_from(slot).unwrap_or(usize::MAX), epoch, pod: pod_uid })
}

/// Notes what weakens the guard in this process; the agent is told when there is occasion.
pub(crate) fn weaken(flag: u32) {
    WEAKNESSES.fetch_or(flag, Ordering::Relaxed);
}

fn has_pages(state: &'static State) -> bool {
    state.accounts.lock().pages().is_some()
}

/// Makes this process known to the agent, if one listens. Does not wait for one that does not.
pub(crate) fn greet(state: &'static State) {
    if let Some(mut client) = state.client.try_lock()
        && !has_pages(state)
        && sys::now() >= client.next_try
    {
        if is_mps_client() {
            weaken(STRENGTH_MPS);
        }
        let deadline = sys::now().saturating_add(PATIENCE);
        if let Err(Absent::Denied) = client.connect(state, deadline) {
            client.next_try = sys::now().saturating_add(PAUSE);
            // An agent that does not answer has been waited for once.
            client.waited |= u32::from(sys::now() >= deadline);
        }
    }
}

/// Whether the driver would work through a server of MPS: where it is, the driver is told as here.
fn is_mps_client() -> bool {
    // SAFETY: the name is a text, and so is what is found; the driver reads it in the same call.
    let set = unsafe {
        let set = getenv(c"CUDA_MPS_PIPE_DIRECTORY".as_ptr());
        if set.is_null() { c"/tmp/nvidia-mps" } else { CStr::from_ptr(set) }
    };
    let mut path = Path { bytes: [0; PATH], length: 0 };
    // One that is too long for a socket's address is too long for the driver.
    path.add(set.to_bytes()).and_then(|()| path.add(b"/control")).is_some()
        && path.as_c_str().is_some_and(|path| rustix::fs::access(path, Access::EXISTS).is_ok())
}

/// Waits for the agent: the first time up to two seconds, later not at all, but one is looked for
/// once a second. Whether there are pages then: without, memory is to be had unguarded.
pub(crate) fn await_agent(state: &'static State) -> bool {
    let began = sys::now();
    let client = state.client.lock_until(began.saturating_add(PATIENCE));
    if has_pages(state) {
        return true;
    }
    // Else another thread is waiting still.
    let Some(mut client) = client else { return false };
    let deadline = if client.waited == 0 { began.saturating_add(PATIENCE) } else { began };
    if client.waited == 0 || began >= client.next_try {
        loop {
            let patience = deadline.max(sys::now().saturating_add(REFRESH_PATIENCE));
            if client.connect(state, patience).is_ok() {
                return true;
            }
            if sys::now().saturating_add(PAUSE) >= deadline {
                break;
            }
            sys::sleep(PAUSE);
        }
        client.waited = 1;
        client.next_try = sys::now().saturating_add(RETRY);
    }
    false
}

/// Does what the agent has asked for since the last look, if anything. Takes no longer than reading the
/// clock most of the time. To be called where nothing is locked.
pub(crate) fn heed(state: &'static State) {
    let (now, before) = (sys::now(), state.heeded.load(Ordering::Relaxed));
    if now < before.saturating_add(HEED) {
        return;
    }
    state.heeded.store(now, Ordering::Relaxed);
    let asked = match state.client.try_lock() {
        Some(mut client) if client.connected != 0 => {
            // One that is gone is noticed by whoever needs it.
            let _gone = client.take_in();
            // What could disturb a capture waits for its end.
            if state.captures.load(Ordering::Relaxed) == 0 { core::mem::take(&mut client.trims) } else { 0 }
        }
        _ => 0,
    };
    if asked != 0 {
        accounts::give_back(state, asked);
    }
}

/// Goes over to a newer agent, if it listens already.
pub(crate) fn refresh(state: &'static State) {
    if let Some(mut client) = state.client.try_lock() {
        // The old pages do until then.
        let _absent = client.connect(state, sys::now().saturating_add(REFRESH_PATIENCE));
    }
}

/// Asks for `wanted_total` bytes for the pod, and waits for the answer until `deadline`. Other
/// threads may ask meanwhile.
pub(crate) fn ask(
    state: &'static State,
    ordinal: usize,
    wanted_total: u64,
    wait: u64,
    deadline: Moment,
) -> Answer {
    let asked = sys::now();
    let mut ticket = None;
    loop {
        let Some(mut client) = state.client.lock_until(deadline) else { break };
        if granted(state, ordinal) >= wanted_total {
            forget(&mut client, ticket);
            return Answer::LookAgain;
        }
        if client.take_in().is_err() || !client.alive() {
            // What was asked is lost with the agent that was asked.
            forget(&mut client, ticket.take());
            client.disconnect();
            let patience = deadline.min(sys::now().saturating_add(REFRESH_PATIENCE));
            if client.connect(state, patience).is_ok() {
                return Answer::LookAgain;
            }
            if pause(client, deadline) {
                continue;
            }
            break;
        }
        // Another thread may have gone over to a new agent, which was not asked.
        ticket = ticket.filter(|number| client.awaits(*number));
        if let Some(number) = ticket {
            match client.answer(number) {
                // Whoever comes next will do.
                Some(Answer::Refused(NotGrantedReason::Stopping)) => {
                    ticket = None;
                    client.disconnect();
                    if pause(client, deadline) {
                        continue;
                    }
                    break;
                }
                Some(answer) => return answer,
                None => {}
            }
        } else {
            let left = wait.saturating_sub(sys::now().saturating_sub(asked));
            match client.question(ordinal, wanted_total, left, deadline) {
                Ok(number) => ticket = Some(number),
                Err(_) if pause(client, deadline) => continue,
                Err(_) => break,
            }
        }
        let socket = client.socket;
        let now = sys::now();
        if now >= deadline {
            forget(&mut client, ticket);
            return Answer::Refused(NotGrantedReason::Timeout);
        }
        drop(client);
        // SAFETY: should it be closed and opened anew meanwhile, nothing worse happens than that
        // this ends early or lasts for a slice.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        await_input(socket, deadline.min(now.saturating_add(SLICE)));
    }
    if let Some(mut client) = state.client.try_lock() {
        forget(&mut client, ticket);
    }
    Answer::Refused(NotGrantedReason::Timeout)
}

fn forget(client: &mut Client, ticket: Option<u32>) {
    if let Some(ticket) = ticket {
        client.forget(ticket);
    }
}

/// Lets others use the connection for a while. False if that would be too long.
fn pause(client: Guard<'_, Client>, deadline: Moment) -> bool {
    drop(client);
    let goes_on = sys::now().saturating_add(PAUSE) < deadline;
    if goes_on {
        sys::sleep(PAUSE);
    }
    goes_on
}

fn granted(state: &'static State, ordinal: usize) -> u64 {
    state.accounts.lock().pages().and_then(|pages| pages.quota.granted(ordinal)).unwrap_or(0)
}

/// Tells the agent of a refusal, if that can be done at once.
pub(crate) fn report(state: &'static State, ordinal: usize, bytes: u64, reason: RefusedReason) {
    if let Some(mut client) = state.client.try_lock() {
        client.confess();
        let device = u32::try_from(ordinal).unwrap_or(u32::MAX);
        // Nobody answers, and nothing depends on it.
        let _lost = client.send(&ToAgent::Refused { device, bytes, reason });
    }
}

/// Tells the agent what weakens the guard here, if that can be done at once.
pub(crate) fn confess(state: &'static State) {
    if let Some(mut client) = state.client.try_lock() {
        client.confess();
    }
}
