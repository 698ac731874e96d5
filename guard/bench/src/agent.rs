//! An agent for the processes of one guarded program: it lets every process in, and grants what is
//! asked for at once. For each process that connects it does what the product's does: it opens the
//! process, and reads who it is.

use std::collections::HashMap;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use highwater_guard_abi::Versions;
use highwater_guard_abi::charge::Units;
use highwater_guard_abi::page::{DeviceQuota, QuotaPage, UsagePage};
use highwater_guard_abi::wire::{DeniedReason, FRAME, Hello, NotGrantedReason, ToAgent, ToGuard};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, IoSlice};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, listen, recv, sendmsg, socket_with,
};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit};

/// Processes that may wait to be let in.
const BACKLOG: i32 = 1024;

const LISTENER: u64 = 0;
const STOP: u64 = 1;

/// What the agent and who started it both see.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) quota: QuotaPage,
    pub(crate) usage: UsagePage,
    quota_descriptor: OwnedFd,
    usage_descriptor: OwnedFd,
    devices: u32,
    /// Grants what is asked for and no more, so that the next allocation asks again.
    pub(crate) tight: AtomicBool,
    /// Processes that were let in.
    pub(crate) joined: AtomicU64,
    /// Allocations that were refused, as guards said.
    pub(crate) refused: AtomicU64,
    /// Questions for more.
    pub(crate) asked: AtomicU64,
    /// What guards said that weakens them.
    pub(crate) weaknesses: AtomicU32,
    /// Slots of living processes.
    slots: Mutex<Vec<(u32, usize)>>,
}

impl Shared {
    fn new(devices: &[DeviceQuota]) -> Result<Self> {
        let (quota, quota_descriptor) = QuotaPage::create()?;
        let (usage, usage_descriptor) = UsagePage::create()?;
        for (ordinal, device) in devices.iter().enumerate() {
            quota.set(ordinal, device);
        }
        Ok(Self {
            quota,
            usage,
            quota_descriptor,
            usage_descriptor,
            devices: u32::try_from(devices.len())?,
            tight: AtomicBool::new(false),
            joined: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            weaknesses: AtomicU32::new(0),
            slots: Mutex::new(Vec::new()),
        })
    }

    /// The slots of living processes.
    pub(crate) fn slots(&self) -> Vec<(u32, usize)> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A running agent. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Agent {
    shared: Arc<Shared>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Agent {
    /// Listens at the path, for processes that may have this.
    pub(crate) fn start(socket: &Path, devices: &[DeviceQuota]) -> Result<Self> {
        raise_descriptor_limit();
        let shared = Arc::new(Shared::new(devices)?);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new(socket)?).with_context(|| socket.display().to_string())?;
        fs::set_permissions(socket, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
        listen(&listener, BACKLOG)?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, &stop, EventData::new_u64(STOP), EventFlags::IN)?;
        let server = Server {
            shared: Arc::clone(&shared),
            epoll,
            listener,
            members: HashMap::new(),
            processes: HashMap::new(),
            next: STOP + 1,
        };
        let thread = std::thread::Builder::new().name("agent".to_owned()).spawn(move || server.run())?;
        Ok(Self { shared, stop, thread: Some(thread) })
    }

    /// What the processes have and may have.
    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Who a descriptor in the epoll set belongs to.
enum Member {
    /// A guard, with its process once that said Hello.
    Connection { socket: OwnedFd, pid: Option<u32> },
    /// A process; its descriptor is readable when it has ended.
    Process(u32),
}

/// A process that was let in.
struct Process {
    pidfd: OwnedFd,
    /// Slots, and the connection of each.
    slots: Vec<(usize, u64)>,
}

struct Server {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    listener: OwnedFd,
    members: HashMap<u64, Member>,
    processes: HashMap<u32, Process>,
    next: u64,
}

impl Server {
    fn run(mut self) {
        loop {
            let mut events = [const { MaybeUninit::<Event>::uninit() }; 64];
            let ready: Vec<u64> = match epoll::wait(&self.epoll, &mut events[..], None) {
                Ok((ready, _)) => ready
                    .iter()
                    .map(|event| {
                        let data = event.data; // the struct is packed
                        data.u64()
                    })
                    .collect(),
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            for id in ready {
                match id {
                    STOP => return,
                    LISTENER => self.accept(),
                    id => match self.members.get(&id) {
                        Some(Member::Connection { .. }) => self.read(id),
                        Some(Member::Process(pid)) => self.ended(id, *pid),
                        None => {}
                    },
                }
            }
        }
    }

    fn watch(&mut self, descriptor: BorrowedFd<'_>) -> Result<u64, Errno> {
        let id = self.next;
        self.next += 1;
        epoll::add(&self.epoll, descriptor, EventData::new_u64(id), EventFlags::IN)?;
        Ok(id)
    }

    fn accept(&mut self) {
        while let Ok(socket) = accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            if let Ok(id) = self.watch(socket.as_fd()) {
                self.members.insert(id, Member::Connection { socket, pid: None });
            }
        }
    }

    fn read(&mut self, id: u64) {
        loop {
            let Some(Member::Connection { socket, pid }) = self.members.get(&id) else { return };
            let mut frame = [0; FRAME];
            let length = match recv(socket, &mut frame, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return self.close(id),
                Ok((length, _)) => length,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => continue,
                Err(_) => return self.close(id),
            };
            let pid = *pid;
            match frame.get(..length).map(ToAgent::decode) {
                Some(Ok(ToAgent::Hello(hello))) if pid.is_none() => self.greet(id, &hello),
                Some(Ok(message)) if pid.is_some() => self.hear(id, &message),
                _ => {
                    self.say(id, &ToGuard::Denied { reason: DeniedReason::Malformed }, &[]);
                    return self.close(id);
                }
            }
        }
    }

    /// Lets a process in.
    fn greet(&mut self, id: u64, hello: &Hello) {
        let Some(abi) = hello.versions.common(Versions::OURS) else {
            self.say(id, &ToGuard::Denied { reason: DeniedReason::Abi }, &[]);
            return self.close(id);
        };
        let Some((pid, slot)) = self.admit(id, hello.slot) else {
            self.say(id, &ToGuard::Denied { reason: DeniedReason::NoSlot }, &[]);
            return self.close(id);
        };
        if let Some(Member::Connection { pid: known, .. }) = self.members.get_mut(&id) {
            *known = Some(pid);
        }
        self.shared.joined.fetch_add(1, Ordering::Relaxed);
        self.tell_slots();
        let welcome = ToGuard::Welcome {
            abi,
            slot: u32::try_from(slot).unwrap_or(0),
            devices: self.shared.devices,
            pod_uid: [0; 40],
        };
        let shared = Arc::clone(&self.shared);
        self.say(id, &welcome, &[shared.quota_descriptor.as_fd(), shared.usage_descriptor.as_fd()]);
    }

    /// The process of a connection, and the slot that it has from now on.
    fn admit(&mut self, id: u64, claimed: u32) -> Option<(u32, usize)> {
        let Some(Member::Connection { socket, .. }) = self.members.get(&id) else { return None };
        let peer = socket_peercred(socket).ok()?.pid;
        let pid = u32::try_from(peer.as_raw_pid()).ok()?;
        // As the product: by its cgroup it is told whose it is, by its start that it is the same.
        let token = started(pid)? << 23 | u64::from(pid);
        let _whose = fs::read(format!("/proc/{pid}/cgroup")).ok()?;
        if !self.processes.contains_key(&pid) {
            let pidfd = pidfd_open(Pid::from_raw(peer.as_raw_pid())?, PidfdFlags::empty()).ok()?;
            let watched = self.watch(pidfd.as_fd()).ok()?;
            self.members.insert(watched, Member::Process(pid));
            self.processes.insert(pid, Process { pidfd, slots: Vec::new() });
        }
        let gone: Vec<u64> =
            self.processes.get(&pid)?.slots.iter().map(|(_, connection)| *connection).collect();
        let gone: Vec<u64> = gone.into_iter().filter(|connection| self.is_gone(*connection)).collect();
        let claimed = usize::try_from(claimed).ok()?;
        let process = self.processes.get_mut(&pid)?;
        if claimed != 0 {
            // The same program connects again.
            let held = process.slots.iter_mut().find(|(slot, _)| *slot == claimed)?;
            held.1 = id;
            return Some((pid, claimed));
        }
        // Another program runs in the process now.
        let shared = &self.shared;
        process.slots.retain(|(slot, connection)| {
            let keep = !gone.contains(connection);
            if !keep {
                let _ = shared.usage.reap(*slot);
            }
            keep
        });
        let slot = shared.usage.claim_any(token)?;
        process.slots.push((slot, id));
        Some((pid, slot))
    }

    fn is_gone(&self, connection: u64) -> bool {
        let Some(Member::Connection { socket, .. }) = self.members.get(&connection) else { return true };
        let mut watched = [PollFd::new(socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut watched, Some(&now)).is_err()
            || watched.iter().any(|one| one.revents().contains(PollFlags::HUP))
    }

    fn hear(&mut self, id: u64, message: &ToAgent) {
        match *message {
            ToAgent::Hello(_) => self.close(id),
            ToAgent::Grant { device, ticket, wanted_total_units, .. } => {
                let answer = self.grant(device, ticket, wanted_total_units);
                self.say(id, &answer, &[]);
            }
            ToAgent::Refused { .. } => {
                self.shared.refused.fetch_add(1, Ordering::Relaxed);
            }
            ToAgent::Strength { flags } => {
                self.shared.weaknesses.fetch_or(flags, Ordering::Relaxed);
            }
        }
    }

    fn grant(&self, device: u32, ticket: u32, units: u64) -> ToGuard {
        self.shared.asked.fetch_add(1, Ordering::Relaxed);
        let refused = |reason| ToGuard::NotGranted { device, ticket, reason };
        let ordinal = usize::try_from(device).unwrap_or(usize::MAX);
        let Some(quota) = self.shared.quota.device(ordinal) else {
            return refused(NotGrantedReason::UnknownDevice);
        };
        let wanted = units.saturating_mul(highwater_guard_abi::charge::UNIT);
        if wanted > quota.limit {
            return refused(NotGrantedReason::OverLimit);
        }
        let tight = self.shared.tight.load(Ordering::Relaxed);
        let granted = if tight { wanted.max(quota.granted) } else { quota.limit };
        self.shared.quota.set_granted(ordinal, granted);
        ToGuard::Granted { device, ticket, granted_units: Units::of(granted).get() }
    }

    fn say(&self, id: u64, message: &ToGuard, descriptors: &[BorrowedFd<'_>]) {
        let Some(Member::Connection { socket, .. }) = self.members.get(&id) else { return };
        let (frame, length) = message.encode();
        let Some(frame) = frame.get(..length) else { return };
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut beside = SendAncillaryBuffer::new(&mut room);
        if !descriptors.is_empty() {
            beside.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        // Whoever does not read is about to be closed.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendmsg(socket, &[IoSlice::new(frame)], &mut beside, flags);
    }

    fn close(&mut self, id: u64) {
        if let Some(Member::Connection { socket, .. }) = self.members.remove(&id) {
            let _ = epoll::delete(&self.epoll, &socket);
        }
    }

    /// A process has ended: what it held is nobody's.
    fn ended(&mut self, id: u64, pid: u32) {
        self.members.remove(&id);
        let Some(process) = self.processes.remove(&pid) else { return };
        let _ = epoll::delete(&self.epoll, &process.pidfd);
        for (slot, _) in process.slots {
            let _ = self.shared.usage.reap(slot);
        }
        self.tell_slots();
    }

    fn tell_slots(&self) {
        let slots = self.processes.iter();
        let slots = slots.flat_map(|(pid, process)| process.slots.iter().map(|(slot, _)| (*pid, *slot)));
        *self.shared.slots.lock().unwrap_or_else(PoisonError::into_inner) = slots.collect();
    }
}

/// Each process takes two descriptors, and hundreds may come at once.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let enough = limit.maximum.map_or(8192, |maximum| maximum.min(8192));
    if limit.current.is_some_and(|current| current < enough) {
        // Where it cannot be raised, fewer processes will do.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(enough), maximum: limit.maximum });
    }
}

/// When a process started, in ticks of the kernel's clock.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything, parentheses and spaces too.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start() {
        assert!(started(std::process::id()).unwrap() > 0);
        assert_eq!(started(u32::MAX), None);
    }

    #[test]
    fn what_is_asked_for_is_granted_within_the_limit_and_tightly_if_told() {
        let folder = tempfile::tempdir().unwrap();
        let device = DeviceQuota { limit: 1 << 30, granted: 1 << 20, ..DeviceQuota::default() };
        let agent = Agent::start(&folder.path().join("agent.sock"), &[device]).unwrap();
        let shared = Arc::clone(&agent.shared);
        let server = Server {
            shared: Arc::clone(&shared),
            epoll: epoll::create(CreateFlags::CLOEXEC).unwrap(),
            listener: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
            members: HashMap::new(),
            processes: HashMap::new(),
            next: 2,
        };
        shared.tight.store(true, Ordering::Relaxed);
        let granted = server.grant(0, 7, 512);
        assert_eq!(granted, ToGuard::Granted { device: 0, ticket: 7, granted_units: 512 });
        assert_eq!(shared.quota.device(0).unwrap().granted, 2 << 20);
        shared.tight.store(false, Ordering::Relaxed);
        server.grant(0, 8, 513);
        assert_eq!(shared.quota.device(0).unwrap().granted, 1 << 30);
        let over = server.grant(0, 9, (1 << 18) + 1);
        assert!(matches!(over, ToGuard::NotGranted { reason: NotGrantedReason::OverLimit, .. }));
        assert!(matches!(
            server.grant(1, 9, 1),
            ToGuard::NotGranted { reason: NotGrantedReason::UnknownDevice, .. }
        ));
    }
}
