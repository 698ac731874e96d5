//! An agent for tests: hands out pages, grants, and remembers what it is told.

use std::io::{PipeReader, PipeWriter};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use highwater_guard_abi::charge::Units;
use highwater_guard_abi::page::{DeviceQuota, QuotaPage, UsagePage};
use highwater_guard_abi::wire::{DeniedReason, FRAME, NotGrantedReason, RefusedReason, ToAgent, ToGuard};
use rustix_bare::event::{PollFd, PollFlags, poll};
use rustix_bare::io::{Errno, IoSlice};
use rustix_bare::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, listen, recv, send, sendmsg, socket_with,
    sockopt::socket_peercred,
};
use rustix_bare::process::{Pid, PidfdFlags, pidfd_open};

/// What the agent says to a question for more.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Grants {
    /// Yes, up to so many bytes in all.
    UpTo(u64),
    /// No, for that reason.
    Refuse(NotGrantedReason),
    /// Nothing.
    Silence,
    /// Yes, after a while.
    After(Duration),
}

/// What the agent has heard.
#[derive(Clone, Debug, Default)]
pub(crate) struct Heard {
    pub(crate) hellos: usize,
    /// Slots that those who said hello said they had.
    pub(crate) slots: Vec<u32>,
    pub(crate) questions: usize,
    pub(crate) refused: Vec<(u64, RefusedReason)>,
    pub(crate) weaknesses: u32,
}

struct Shared {
    quota: QuotaPage,
    quota_fd: OwnedFd,
    usage: UsagePage,
    usage_fd: OwnedFd,
    grants: Mutex<Grants>,
    denies: Mutex<Option<DeniedReason>>,
    heard: Mutex<Heard>,
    /// Whoever said hello.
    guards: Mutex<Vec<OwnedFd>>,
    stopping: AtomicBool,
    /// Its other end is closed when threads are to stop.
    stop: PipeReader,
}

/// An agent that serves one pod.
pub(crate) struct Agent {
    shared: Arc<Shared>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
    stop: Option<PipeWriter>,
}

pub(crate) const POD: &str = "0a1b2c3d-0000-4000-8000-000000000001";

impl Agent {
    /// Serves at that socket, with quotas for these devices.
    pub(crate) fn start(socket: &Path, quotas: &[DeviceQuota]) -> Self {
        let (usage, usage_fd) = UsagePage::create().unwrap();
        Self::with_usage(socket, quotas, usage, usage_fd, POD)
    }

    /// The same, of another pod.
    pub(crate) fn of_pod(socket: &Path, quotas: &[DeviceQuota], pod: &'static str) -> Self {
        let (usage, usage_fd) = UsagePage::create().unwrap();
        Self::with_usage(socket, quotas, usage, usage_fd, pod)
    }

    fn with_usage(
        socket: &Path,
        quotas: &[DeviceQuota],
        usage: UsagePage,
        usage_fd: OwnedFd,
        pod: &'static str,
    ) -> Self {
        let (quota, quota_fd) = QuotaPage::create().unwrap();
        for (ordinal, device) in quotas.iter().enumerate() {
            assert!(quota.set(ordinal, device));
        }
        let (stop, stopper) = std::io::pipe().unwrap();
        let shared = Arc::new(Shared {
            quota,
            quota_fd,
            usage,
            usage_fd,
            grants: Mutex::new(Grants::UpTo(u64::MAX)),
            denies: Mutex::new(None),
            heard: Mutex::default(),
            guards: Mutex::default(),
            stopping: AtomicBool::new(false),
            stop,
        });
        let _ = std::fs::remove_file(socket);
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        listen(&listener, 128).unwrap();
        let thread = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.accept(&listener, pod))
        };
        Self { shared, socket: socket.to_owned(), thread: Some(thread), stop: Some(stopper) }
    }

    /// Ends at once, as by SIGKILL: sockets close, pages stay.
    pub(crate) fn die(&mut self) {
        self.stop().unwrap();
        std::fs::remove_file(&self.socket).unwrap();
    }

    fn stop(&mut self) -> thread::Result<()> {
        self.shared.stopping.store(true, Ordering::Relaxed);
        drop(self.stop.take());
        self.thread.take().map_or(Ok(()), JoinHandle::join)
    }

    /// The next agent: has the usage page, and makes a new quota page.
    pub(crate) fn successor(mut self, quotas: &[DeviceQuota]) -> Self {
        if self.thread.is_some() {
            self.die();
        }
        self.next(quotas)
    }

    /// The same, but this one ends only when the next one listens already.
    pub(crate) fn upgraded(self, quotas: &[DeviceQuota]) -> Self {
        self.next(quotas)
    }

    fn next(&self, quotas: &[DeviceQuota]) -> Self {
        let usage_fd = self.shared.usage_fd.try_clone().unwrap();
        let usage = UsagePage::map(usage_fd.as_fd()).unwrap();
        usage.recover();
        let next = Self::with_usage(&self.socket.clone(), quotas, usage, usage_fd, POD);
        next.shared.usage.raise_epoch();
        next
    }

    pub(crate) fn set(&self, quota: &DeviceQuota) {
        assert!(self.shared.quota.set(0, quota));
    }

    pub(crate) fn set_grants(&self, grants: Grants) {
        *self.shared.grants.lock().unwrap() = grants;
    }

    pub(crate) fn deny(&self, reason: Option<DeniedReason>) {
        *self.shared.denies.lock().unwrap() = reason;
    }

    /// Says something to every guard that has said hello.
    pub(crate) fn say(&self, packet: &[u8]) {
        for socket in self.shared.guards.lock().unwrap().iter() {
            let _gone = send(socket, packet, SendFlags::NOSIGNAL);
        }
    }

    /// Asks every guard to have pools and graphs of a device give back what they keep.
    pub(crate) fn trim(&self, device: u32) {
        let (frame, length) = ToGuard::Trim { device }.encode();
        self.say(&frame[..length]);
    }

    pub(crate) fn heard(&self) -> Heard {
        self.shared.heard.lock().unwrap().clone()
    }

    /// Waits until what it has heard is enough: messages that nobody answers arrive a moment later.
    pub(crate) fn await_heard(&self, enough: impl Fn(&Heard) -> bool) {
        let began = Instant::now();
        while !enough(&self.heard()) {
            assert!(began.elapsed() < Duration::from_secs(20), "{:?}", self.heard());
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn charged(&self) -> u64 {
        self.shared.usage.charged(0)
    }

    pub(crate) fn charged_on(&self, device: usize) -> u64 {
        self.shared.usage.charged(device)
    }

    /// Waits until so much is charged.
    pub(crate) fn await_charged(&self, bytes: u64) {
        self.await_charged_on(0, bytes);
    }

    pub(crate) fn await_charged_on(&self, device: usize, bytes: u64) {
        let (began, charged) = (Instant::now(), || self.charged_on(device));
        while charged() != bytes {
            assert!(began.elapsed() < Duration::from_secs(20), "{} are charged, not {bytes}", charged());
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Whether what is charged is what the processes hold.
    pub(crate) fn is_consistent(&self) -> bool {
        let audit = self.shared.usage.audit(0).unwrap();
        audit.charged == audit.sum
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

impl Shared {
    fn stops(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Waits for input, the end of the other side, or until this is to stop.
    fn has_input(&self, fd: impl AsFd) -> bool {
        let mut watched = [PollFd::new(&fd, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
        poll(&mut watched, None).is_ok() && !watched[0].revents().is_empty()
    }

    fn accept(self: &Arc<Self>, listener: &OwnedFd, pod: &'static str) {
        let mut threads = Vec::new();
        while !self.stops() {
            if !self.has_input(listener) {
                continue;
            }
            let Ok(socket) = accept_with(listener, SocketFlags::CLOEXEC) else { continue };
            let shared = Arc::clone(self);
            threads.push(thread::spawn(move || shared.serve(&socket, pod)));
        }
        for thread in threads {
            thread.join().unwrap();
        }
    }

    fn serve(&self, socket: &OwnedFd, pod: &str) {
        let pid = socket_peercred(socket).unwrap().pid;
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        let mut slot = None;
        let mut frame = [0_u8; FRAME];
        while !self.stops() {
            if !self.has_input(socket) {
                continue;
            }
            let length = match recv(socket, &mut frame, RecvFlags::empty()) {
                Ok((0, _)) | Err(Errno::CONNRESET) => break,
                Ok((length, _)) => length,
                Err(error) => panic!("{error}"),
            };
            match ToAgent::decode(&frame[..length]).unwrap() {
                ToAgent::Hello(hello) => {
                    self.heard.lock().unwrap().slots.push(hello.slot);
                    slot = self.welcome(socket, pid, hello.slot, pod);
                    self.heard.lock().unwrap().hellos += 1;
                    if slot.is_none() {
                        return;
                    }
                    self.guards.lock().unwrap().push(socket.try_clone().unwrap());
                }
                ToAgent::Grant { device, ticket, wanted_total_units, .. } => {
                    self.heard.lock().unwrap().questions += 1;
                    self.grant(socket, device, ticket, Units::new(wanted_total_units).bytes());
                }
                ToAgent::Refused { bytes, reason, .. } => {
                    self.heard.lock().unwrap().refused.push((bytes, reason));
                }
                ToAgent::Strength { flags } => self.heard.lock().unwrap().weaknesses |= flags,
            }
        }
        // Whoever is at the other end is to see that this one is closed.
        self.guards.lock().unwrap().clear();
        // The process may have closed its socket and go on.
        while !self.stops() && !self.has_input(&process) {}
        if let Some(slot) = slot.filter(|_| !self.stops()) {
            self.usage.reap(slot).unwrap();
        }
    }

    fn welcome(&self, socket: &OwnedFd, pid: Pid, had: u32, pod: &str) -> Option<usize> {
        if let Some(reason) = *self.denies.lock().unwrap() {
            let (frame, length) = ToGuard::Denied { reason }.encode();
            send(socket, &frame[..length], SendFlags::NOSIGNAL).unwrap();
            return None;
        }
        let token = u64::from(pid.as_raw_nonzero().get().unsigned_abs());
        let had = usize::try_from(had).unwrap();
        let same = had != 0 && self.usage.token(had) == token;
        let slot = if same { had } else { self.usage.claim_any(token)? };
        let mut pod_uid = [0; 40];
        pod_uid[..pod.len()].copy_from_slice(pod.as_bytes());
        let message = ToGuard::Welcome {
            abi: highwater_guard_abi::ABI,
            slot: u32::try_from(slot).unwrap(),
            devices: u32::try_from(self.quota.len()).unwrap(),
            pod_uid,
        };
        let (frame, length) = message.encode();
        let fds = [self.quota_fd.as_fd(), self.usage_fd.as_fd()];
        let mut room = [std::mem::MaybeUninit::uninit(); rustix_bare::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        // Whoever has gone meanwhile is reaped below.
        let _gone = sendmsg(socket, &[IoSlice::new(&frame[..length])], &mut control, SendFlags::NOSIGNAL);
        Some(slot)
    }

    fn grant(&self, socket: &OwnedFd, device: u32, ticket: u32, wanted: u64) {
        let grants = *self.grants.lock().unwrap();
        let ordinal = usize::try_from(device).unwrap();
        let refuse = |reason| ToGuard::NotGranted { device, ticket, reason };
        let answer = match grants {
            Grants::Silence => return,
            Grants::Refuse(reason) => refuse(reason),
            Grants::UpTo(most) if wanted > most => refuse(NotGrantedReason::NoMemory),
            Grants::UpTo(_) | Grants::After(_) => {
                if let Grants::After(pause) = grants {
                    thread::sleep(pause);
                }
                assert!(self.quota.set_granted(ordinal, wanted));
                ToGuard::Granted { device, ticket, granted_units: Units::of(wanted).get() }
            }
        };
        let (frame, length) = answer.encode();
        let _gone = send(socket, &frame[..length], SendFlags::NOSIGNAL);
    }
}
