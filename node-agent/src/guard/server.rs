//! The thread that serves the sockets of all guarded pods.
//!
//! A pod may do to its socket what it likes: what it sends is read a few frames at a time, each pod and
//! each connection at a bounded rate, and whoever sends garbage, or does not read, is cut off. Nothing
//! here waits for a pod.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use highwater_guard_abi::{
    AGENT_SLOT, MAX_SLOTS, Versions,
    charge::{Contended, Units},
    wire::{DeniedReason, FRAME, Hello, NotGrantedReason, ToAgent, ToGuard},
};
use rustix::{
    event::{
        EventfdFlags, Timespec,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
        eventfd,
    },
    io::{Errno, IoSlice},
    net::{
        RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with, recv,
        sendmsg,
    },
    process::Pid,
};
use tracing::{debug, error, warn};

use super::{
    News, Order, Pages, Refusal, Want,
    bucket::{Bucket, Rest},
    pages::{token, token_pid},
    peer::{self, Peer},
    place::{PlaceError, Places},
};
use crate::attribute::Owner;

/// How often a volume that is not there yet is looked for, and until when often.
const LOOK_SOON: Duration = Duration::from_millis(100);
const LOOK_SOON_FOR: Duration = Duration::from_mins(2);
/// How often otherwise, and how often it is seen to that the socket is still where it was.
const LOOK_LATER: Duration = Duration::from_secs(5);
/// How long a connection may say nothing before its first frame.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// When a page that a pod changes without pause is tried again: each try may take some milliseconds, in
/// which no other pod is served, so a page that stays so is tried less and less often.
const CONTENDED_AGAIN: Duration = Duration::from_millis(50);
const CONTENDED_AGAIN_MOST: Duration = Duration::from_secs(3);
/// When connections are accepted again after one was not.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Frames that are read of one connection before others have their turn.
const FRAMES_A_TURN: usize = 16;
/// Connections of a pod: as many as there are slots, and some that are about to end.
const CONNECTIONS: usize = MAX_SLOTS + 64;
/// Accepted at once and a second, for each pod. Hundreds of processes may start together.
const ACCEPTS: (u32, u32) = (2048, 200);
/// Frames at once and a second, for each connection and for each pod.
const FRAMES: (u32, u32) = (512, 500);
const POD_FRAMES: (u32, u32) = (8192, 2000);
/// When a connection of a pod that has sent too many frames is read again. A pod can have a thousand of
/// them, for which one frame that may be read is not worth waking up.
const FLOODED_AGAIN: Duration = Duration::from_millis(20);

/// What the thread is made with.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The kubelet's directory.
    pub(crate) kubelet_root: PathBuf,
    /// `/proc` of the host.
    pub(crate) proc_root: PathBuf,
    /// How long guards' questions took, in seconds, by `granted` and `refused`.
    pub(crate) grants: prometheus::HistogramVec,
}

/// The handle on the thread.
#[derive(Clone, Debug)]
pub(crate) struct Guards {
    /// Absent only while this is being dropped.
    orders: Option<Sender<Order>>,
    wake: Arc<OwnedFd>,
}

impl Guards {
    /// Starts the thread. `news` must not block. The thread ends when the last handle is gone.
    ///
    /// # Errors
    /// Fails when the kernel gives no descriptors or no thread.
    pub(crate) fn start(settings: Settings, news: impl Fn(News) + Send + 'static) -> io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let server = Server::new(settings, received, wake.as_fd().try_clone_to_owned()?, Box::new(news))?;
        thread::Builder::new().name("guards".to_owned()).stack_size(512 << 10).spawn(move || server.run())?;
        Ok(Self { orders: Some(orders), wake })
    }

    /// Gives an order.
    pub(crate) fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // The thread ends only after the last handle.
            let _ = orders.send(order);
        }
        self.wake();
    }

    fn wake(&self) {
        // Full means that it is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        // The thread sees then whether anybody is there any more.
        self.orders = None;
        self.wake();
    }
}

/// Who a descriptor in the epoll set belongs to.
#[derive(Debug)]
enum Member {
    /// A pod's socket.
    Listener(Arc<str>),
    Connection(Connection),
    Process(Process),
}

/// A pod that is served.
#[derive(Debug)]
struct Ward {
    pages: Arc<Pages>,
    since: Instant,
    /// The guards are to connect again once the socket is there.
    raise_epoch: bool,
    /// The socket, its place in the epoll set, and the inode it has in the volume.
    listener: Option<(OwnedFd, u64, u64)>,
    /// What was said of the volume.
    told: bool,
    accepts: Bucket,
    frames: Bucket,
    connections: usize,
    /// Its processes by PID.
    processes: HashMap<u32, u64>,
    /// Corrections that could not be made yet, by slot and device: the process and the bytes.
    corrections: HashMap<(usize, usize), (u32, i64)>,
    /// When its page is left alone because it was changed without pause.
    rest: Rest,
}

/// A connection of a guard.
#[derive(Debug)]
struct Connection {
    pod: Arc<str>,
    socket: OwnedFd,
    /// The process at the other end, once it said Hello.
    process: Option<u64>,
    frames: Bucket,
    /// It is not read for now.
    paused: bool,
    /// What it said of its strength.
    flags: u32,
    /// When each of its questions came that are not answered, by device and ticket.
    asked: HashMap<(u32, u32), Instant>,
    /// Why it was last not granted more, by the device.
    refused: HashMap<u32, NotGrantedReason>,
}

/// A process that has slots.
#[derive(Debug)]
struct Process {
    pod: Arc<str>,
    pid: u32,
    start_ticks: u64,
    /// Absent once it has ended.
    pidfd: Option<OwnedFd>,
    comm: Box<str>,
    slots: Vec<Held>,
}

/// A slot of a process.
#[derive(Clone, Copy, Debug)]
struct Held {
    slot: usize,
    /// The connection of the guard that charges through it; absent while that is gone.
    connection: Option<u64>,
    /// Nobody charges through it any more; it is to be emptied.
    dead: bool,
}

/// Something to do at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Looks for the volume of a pod, or whether its socket is still there.
    Look(Arc<str>),
    /// Accepts again.
    Accept(Arc<str>),
    /// Reads a connection again.
    Read(u64),
    /// A connection ought to have said Hello.
    Hello(u64),
    /// Empties the slots of a process.
    Reap(u64),
    /// Tries a correction again.
    Correct(Arc<str>),
}

const WAKE: u64 = 0;
/// Questions of a connection that are timed at once. What it may ask is bounded by how often.
const QUESTIONS: usize = 64;

/// The thread's state.
struct Server {
    places: Places,
    grants: prometheus::HistogramVec,
    proc_root: PathBuf,
    orders: Receiver<Order>,
    news: Box<dyn Fn(News) + Send>,
    epoll: OwnedFd,
    wake: OwnedFd,
    wards: HashMap<Arc<str>, Ward>,
    members: HashMap<u64, Member>,
    timers: BinaryHeap<Reverse<(Instant, Timer)>>,
    next: u64,
}

impl Server {
    fn new(
        settings: Settings,
        orders: Receiver<Order>,
        wake: OwnedFd,
        news: Box<dyn Fn(News) + Send>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Self {
            places: Places::new(settings.kubelet_root),
            grants: settings.grants,
            proc_root: settings.proc_root,
            orders,
            news,
            epoll,
            wake,
            wards: HashMap::new(),
            members: HashMap::new(),
            timers: BinaryHeap::new(),
            next: WAKE + 1,
        })
    }

    fn run(mut self) {
        loop {
            let timeout = self
                .timers
                .peek()
                .map(|Reverse((at, _))| timespec(at.saturating_duration_since(Instant::now())));
            let mut events = [const { MaybeUninit::<Event>::uninit() }; 64];
            let ready: Vec<u64> = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
                Ok((ready, _)) => ready
                    .iter()
                    .map(|event| {
                        let data = event.data; // the struct is packed
                        data.u64()
                    })
                    .collect(),
                Err(Errno::INTR) => continue,
                Err(error) => {
                    error!(%error, "the guards are not served any more");
                    return;
                }
            };
            let now = Instant::now();
            for id in ready {
                if id == WAKE {
                    let mut count = [0; 8];
                    let _ = rustix::io::read(&self.wake, &mut count);
                } else {
                    self.ready(id, now);
                }
            }
            loop {
                match self.orders.try_recv() {
                    Ok(order) => self.obey(order, now),
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
            }
            while self.timers.peek().is_some_and(|Reverse((at, _))| *at <= now) {
                if let Some(Reverse((_, timer))) = self.timers.pop() {
                    self.fire(timer, now);
                }
            }
        }
    }

    fn ready(&mut self, id: u64, now: Instant) {
        match self.members.get(&id) {
            Some(Member::Listener(pod)) => {
                let pod = Arc::clone(pod);
                self.accept(&pod, now);
            }
            Some(Member::Connection(_)) => self.read(id, now),
            Some(Member::Process(_)) => self.ended(id, now),
            // Closed by what came before it in this turn.
            None => {}
        }
    }

    fn obey(&mut self, order: Order, now: Instant) {
        match order {
            Order::Serve { pod, pages, resumed } => self.serve(&pod, &pages, resumed, now),
            Order::Leave { pod } => self.leave(&pod),
            Order::Tell { connection, what } => self.answer(connection, &what, now),
            Order::Trim { pod, device } => {
                let is_theirs = |member: &Member| matches!(member, Member::Connection(c) if c.pod == pod && c.process.is_some());
                let theirs = self.members.iter().filter(|(_, member)| is_theirs(member)).map(|(id, _)| *id);
                let theirs: Vec<u64> = theirs.collect();
                for id in theirs {
                    self.tell(id, &ToGuard::Trim { device }, &[]);
                }
            }
            Order::Correct { pod, pid, slot, device, bytes } => {
                if let Some(ward) = self.wards.get_mut(&pod) {
                    ward.corrections.insert((slot, device), (pid, bytes));
                    // Else one that is waiting for its time makes this as well.
                    if ward.corrections.len() == 1 {
                        self.correct(&pod, now);
                    }
                }
            }
            Order::Inspect { pod, pid } => {
                if let Some((comm, other_root)) = peer::inspect(&self.proc_root, pid) {
                    (self.news)(News::Inspected { pod, pid, comm, other_root });
                }
            }
        }
    }

    fn fire(&mut self, timer: Timer, now: Instant) {
        match timer {
            Timer::Look(pod) => self.look(&pod, now),
            Timer::Accept(pod) => {
                if let Some((socket, id, _)) = self.wards.get(&pod).and_then(|ward| ward.listener.as_ref()) {
                    let _ = epoll::add(&self.epoll, socket, EventData::new_u64(*id), EventFlags::IN);
                }
            }
            Timer::Read(id) => {
                if let Some(Member::Connection(connection)) = self.members.get_mut(&id) {
                    connection.paused = false;
                    let _ =
                        epoll::add(&self.epoll, &connection.socket, EventData::new_u64(id), EventFlags::IN);
                }
            }
            Timer::Hello(id) => {
                let silent =
                    matches!(self.members.get(&id), Some(Member::Connection(c)) if c.process.is_none());
                if silent {
                    self.close(id);
                }
            }
            Timer::Reap(id) => self.reap(id, now),
            Timer::Correct(pod) => self.correct(&pod, now),
        }
    }

    fn at(&mut self, at: Instant, timer: Timer) {
        self.timers.push(Reverse((at, timer)));
    }

    fn id(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        id
    }

    fn serve(&mut self, pod: &Arc<str>, pages: &Arc<Pages>, resumed: bool, now: Instant) {
        self.leave(pod);
        let ward = Ward {
            pages: Arc::clone(pages),
            since: now,
            raise_epoch: resumed,
            listener: None,
            told: false,
            accepts: Bucket::new(ACCEPTS.0, ACCEPTS.1, now),
            frames: Bucket::new(POD_FRAMES.0, POD_FRAMES.1, now),
            connections: 0,
            processes: HashMap::new(),
            corrections: HashMap::new(),
            rest: Rest::new(CONTENDED_AGAIN, CONTENDED_AGAIN_MOST),
        };
        self.wards.insert(Arc::clone(pod), ward);
        if resumed {
            for (slot, token) in pages.usage.slots_in_use() {
                self.resume(pod, pages, slot, token, now);
            }
        }
        self.look(pod, now);
    }

    /// Finds the process of a slot that an earlier agent gave, or empties the slot.
    fn resume(&mut self, pod: &Arc<str>, pages: &Pages, slot: usize, stored: u64, now: Instant) {
        let pid = i32::try_from(token_pid(stored)).ok().and_then(Pid::from_raw);
        let found = pid.and_then(|pid| peer::of_pid(pid, &self.proc_root));
        match found {
            Some(peer) if is_of(&peer, pod) && token(peer.pid, peer.identity.start_ticks) == stored => {
                let id = self.process(pod, peer);
                self.joined(id, Held { slot, connection: None, dead: false });
            }
            _ => {
                let Some(ward) = self.wards.get_mut(pod) else { return };
                let again = ward.rest.until(now).or_else(|| match pages.usage.reap(slot) {
                    Ok(_) => None,
                    Err(Contended) => Some(ward.rest.begin(now)),
                });
                if let Some(again) = again {
                    // No process of its own minds the slot: one that is none does.
                    let id = self.id();
                    let slots = vec![Held { slot, connection: None, dead: true }];
                    let process = Process {
                        pod: Arc::clone(pod),
                        pid: 0,
                        start_ticks: 0,
                        pidfd: None,
                        comm: "".into(),
                        slots,
                    };
                    self.members.insert(id, Member::Process(process));
                    self.at(again, Timer::Reap(id));
                }
            }
        }
    }

    fn leave(&mut self, pod: &Arc<str>) {
        let Some(ward) = self.wards.remove(pod) else { return };
        if let Some((_, id, _)) = ward.listener {
            self.members.remove(&id);
        }
        self.members.retain(|_, member| match member {
            Member::Listener(_) => true,
            Member::Connection(connection) => connection.pod != *pod,
            Member::Process(process) => process.pod != *pod,
        });
    }

    /// Makes the pod's socket, or sees to it that it is still there.
    fn look(&mut self, pod: &Arc<str>, now: Instant) {
        let id = self.next;
        let Some(ward) = self.wards.get_mut(pod) else { return };
        let young = now.saturating_duration_since(ward.since) < LOOK_SOON_FOR;
        let mut again = if young { LOOK_SOON } else { LOOK_LATER };
        if let Some((_, id, inode)) = &ward.listener {
            if self.places.inode(pod).is_some_and(|found| found == *inode) {
                self.at(now + LOOK_LATER, Timer::Look(Arc::clone(pod)));
                return;
            }
            // The volume was made anew. Who is connected stays so.
            let id = *id;
            ward.listener = None;
            self.members.remove(&id);
        }
        match self.places.listen(pod) {
            Ok((socket, inode)) => {
                match epoll::add(&self.epoll, &socket, EventData::new_u64(id), EventFlags::IN) {
                    Ok(()) => {
                        self.next += 1;
                        ward.listener = Some((socket, id, inode));
                        if std::mem::take(&mut ward.raise_epoch) {
                            ward.pages.usage.raise_epoch();
                        }
                        self.members.insert(id, Member::Listener(Arc::clone(pod)));
                        again = LOOK_LATER;
                        debug!(%pod, "serving the pod's guard");
                    }
                    Err(error) => warn!(%pod, %error, "cannot wait for the pod's guards"),
                }
            }
            // It is being made.
            Err(PlaceError::NoVolume) => {}
            Err(error) => {
                if !std::mem::replace(&mut ward.told, true) {
                    warn!(%pod, %error, "cannot serve the pod's guard: it is tried again");
                }
                again = LOOK_LATER;
            }
        }
        self.at(now + again, Timer::Look(Arc::clone(pod)));
    }

    fn accept(&mut self, pod: &Arc<str>, now: Instant) {
        for _ in 0..FRAMES_A_TURN {
            let id = self.next;
            let Some(ward) = self.wards.get_mut(pod) else { return };
            let Some((listener, ..)) = &ward.listener else { return };
            let accepted = if ward.accepts.has(now) {
                accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
                    .map_err(|error| (error, now + ACCEPT_AGAIN))
            } else {
                Err((Errno::BUSY, ward.accepts.ready_at()))
            };
            let socket = match accepted {
                Ok(socket) => socket,
                Err((Errno::AGAIN, _)) => return,
                Err((error, at)) => {
                    debug!(%pod, %error, "no connection is accepted for a moment");
                    let _ = epoll::delete(&self.epoll, listener);
                    self.at(at, Timer::Accept(Arc::clone(pod)));
                    return;
                }
            };
            ward.accepts.take(now);
            if ward.connections >= CONNECTIONS {
                continue;
            }
            if epoll::add(&self.epoll, &socket, EventData::new_u64(id), EventFlags::IN).is_err() {
                continue;
            }
            ward.connections += 1;
            self.next += 1;
            let connection = Connection {
                pod: Arc::clone(pod),
                socket,
                process: None,
                frames: Bucket::new(FRAMES.0, FRAMES.1, now),
                paused: false,
                asked: HashMap::new(),
                refused: HashMap::new(),
                flags: 0,
            };
            self.members.insert(id, Member::Connection(connection));
            self.at(now + HELLO_WITHIN, Timer::Hello(id));
        }
    }

    fn read(&mut self, id: u64, now: Instant) {
        for _ in 0..FRAMES_A_TURN {
            let Some(Member::Connection(connection)) = self.members.get_mut(&id) else { return };
            let Some(ward) = self.wards.get_mut(&connection.pod) else { return };
            if connection.paused {
                return;
            }
            let ready = if !connection.frames.has(now) {
                Some(connection.frames.ready_at())
            } else if !ward.frames.has(now) {
                Some(ward.frames.ready_at().max(now + FLOODED_AGAIN))
            } else {
                None
            };
            if let Some(at) = ready {
                connection.paused = true;
                let _ = epoll::delete(&self.epoll, &connection.socket);
                self.at(at, Timer::Read(id));
                return;
            }
            // Room for more than a frame, so that one that is too long shows.
            let mut buffer = [0; FRAME + 1];
            let length = match recv(&connection.socket, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return self.close(id),
                Ok((_, length)) => length,
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(_) => return self.close(id),
            };
            connection.frames.take(now);
            ward.frames.take(now);
            match ToAgent::decode(buffer.get(..length.min(buffer.len())).unwrap_or_default()) {
                Ok(frame) => self.hear(id, frame, now),
                Err(malformed) => {
                    debug!(pod = %connection.pod, %malformed, "a guard's connection is cut off");
                    self.refuse(id, DeniedReason::Malformed);
                    return;
                }
            }
        }
    }

    /// What a guard says.
    fn hear(&mut self, id: u64, frame: ToAgent, now: Instant) {
        let Some(Member::Connection(connection)) = self.members.get_mut(&id) else { return };
        let Some(ward) = self.wards.get(&connection.pod) else { return };
        let known = connection.process;
        match (frame, known) {
            (ToAgent::Hello(hello), None) => self.welcome(id, hello, now),
            // Once, and first.
            (ToAgent::Hello(_), Some(_)) | (_, None) => self.refuse(id, DeniedReason::Malformed),
            (ToAgent::Grant { device, ticket, wanted_total_units, wait_milliseconds }, Some(_)) => {
                if usize::try_from(device).is_ok_and(|device| device < ward.pages.quota.len()) {
                    if connection.asked.len() < QUESTIONS {
                        connection.asked.insert((device, ticket), now);
                    }
                    (self.news)(News::Wants(Want {
                        pod: Arc::clone(&connection.pod),
                        connection: id,
                        device,
                        ticket,
                        bytes: Units::new(wanted_total_units).bytes(),
                        wait: wait_milliseconds.into(),
                    }));
                } else {
                    let reason = NotGrantedReason::UnknownDevice;
                    self.tell(id, &ToGuard::NotGranted { device, ticket, reason }, &[]);
                }
            }
            (ToAgent::Refused { device, reason, bytes }, Some(_)) => {
                let why = Refusal::of(reason, connection.refused.get(&device).copied());
                debug!(pod = %connection.pod, device, bytes, ?why, "a guard refused memory");
                ward.pages.tally.refuse(usize::try_from(device).unwrap_or(usize::MAX), why);
            }
            (ToAgent::Strength { flags }, Some(process)) => {
                if connection.flags != flags {
                    connection.flags = flags;
                    let pod = Arc::clone(&connection.pod);
                    if let Some(Member::Process(Process { pid, .. })) = self.members.get(&process) {
                        (self.news)(News::Weakness { pod, pid: *pid, flags });
                    }
                }
            }
        }
    }

    /// A guard's first frame.
    fn welcome(&mut self, id: u64, hello: Hello, now: Instant) {
        let Some(Member::Connection(connection)) = self.members.get(&id) else { return };
        let pod = Arc::clone(&connection.pod);
        let Some(pages) = self.wards.get(&pod).map(|ward| Arc::clone(&ward.pages)) else { return };
        let Some(peer) = peer::of_connection(&connection.socket, &self.proc_root) else {
            return self.close(id);
        };
        let pid = peer.pid;
        if !is_of(&peer, &pod) {
            debug!(%pod, pid, comm = &*peer.identity.comm, "a process that is not of the pod came to its socket");
            (self.news)(News::Stranger { pod, pid, comm: peer.identity.comm });
            return self.refuse(id, DeniedReason::NotThisPod);
        }
        let Some(abi) = Versions::OURS.common(hello.versions) else {
            (self.news)(News::Incompatible { pod, pid });
            return self.refuse(id, DeniedReason::Abi);
        };
        let stamp = token(pid, peer.identity.start_ticks);
        let process = self.process(&pod, peer);
        let Some(slot) = self.slot(process, id, &hello, stamp, &pages, now) else {
            self.forget(process);
            return self.refuse(id, DeniedReason::NoSlot);
        };
        if let Some(Member::Connection(connection)) = self.members.get_mut(&id) {
            connection.process = Some(process);
        }
        // The loop hears of the slot before the guard can have charged anything.
        self.joined(process, Held { slot, connection: Some(id), dead: false });
        let mut pod_uid = [0; 40];
        for (to, from) in pod_uid.iter_mut().zip(pod.as_bytes()) {
            *to = *from;
        }
        let devices = u32::try_from(pages.quota.len()).unwrap_or(0);
        let welcome = ToGuard::Welcome { abi, slot: u32::try_from(slot).unwrap_or(0), devices, pod_uid };
        self.tell(id, &welcome, &pages.descriptors());
    }

    /// The slot for a guard that says Hello.
    fn slot(
        &mut self,
        process: u64,
        connection: u64,
        hello: &Hello,
        stamp: u64,
        pages: &Pages,
        now: Instant,
    ) -> Option<usize> {
        let Some(Member::Process(known)) = self.members.get(&process) else { return None };
        let asked = usize::try_from(hello.slot).ok().filter(|slot| *slot != AGENT_SLOT);
        if let Some(asked) = asked {
            let holds = known.slots.iter().any(|held| held.slot == asked && !held.dead);
            if holds && pages.usage.token(asked) == stamp {
                return Some(asked);
            }
        } else {
            // A program that has none of its own: whatever this process had before, it ran another
            // program since, unless that one's connection stands: then there are two guards in it.
            let stale: Vec<usize> = known
                .slots
                .iter()
                .filter(|held| {
                    held.connection.is_none_or(|other| {
                        other != connection
                            && !matches!(self.members.get(&other),
                                Some(Member::Connection(other)) if !peer::has_hung_up(&other.socket))
                    })
                })
                .map(|held| held.slot)
                .collect();
            if !stale.is_empty() {
                if let Some(Member::Process(known)) = self.members.get_mut(&process) {
                    for held in known.slots.iter_mut().filter(|held| stale.contains(&held.slot)) {
                        held.dead = true;
                    }
                }
                self.reap(process, now);
            }
        }
        pages.usage.claim_any(stamp)
    }

    /// The place of a process, which is taken note of if it is new.
    fn process(&mut self, pod: &Arc<str>, peer: Peer) -> u64 {
        let known = self.wards.get(pod).and_then(|ward| ward.processes.get(&peer.pid)).copied();
        if let Some(id) = known
            && let Some(Member::Process(process)) = self.members.get(&id)
            && process.start_ticks == peer.identity.start_ticks
            && process.pidfd.is_some()
        {
            return id;
        }
        let id = self.id();
        if let Err(error) = epoll::add(&self.epoll, &peer.pidfd, EventData::new_u64(id), EventFlags::IN) {
            error!(%pod, %error, "the end of a process will not be seen");
        }
        if let Some(ward) = self.wards.get_mut(pod) {
            ward.processes.insert(peer.pid, id);
        }
        let process = Process {
            pod: Arc::clone(pod),
            pid: peer.pid,
            start_ticks: peer.identity.start_ticks,
            pidfd: Some(peer.pidfd),
            comm: peer.identity.comm,
            slots: Vec::new(),
        };
        self.members.insert(id, Member::Process(process));
        id
    }

    /// Lets go of a process that has no slot: a pod may have more processes than there are descriptors.
    fn forget(&mut self, id: u64) {
        let Some(Member::Process(process)) = self.members.get(&id) else { return };
        if !process.slots.is_empty() {
            return;
        }
        if let Some(ward) = self.wards.get_mut(&process.pod)
            && ward.processes.get(&process.pid) == Some(&id)
        {
            ward.processes.remove(&process.pid);
        }
        self.members.remove(&id);
    }

    fn joined(&mut self, process: u64, held: Held) {
        let Some(Member::Process(process)) = self.members.get_mut(&process) else { return };
        process.slots.retain(|other| other.slot != held.slot);
        process.slots.push(held);
        (self.news)(News::Joined {
            pod: Arc::clone(&process.pod),
            pid: process.pid,
            slot: held.slot,
            comm: process.comm.clone(),
        });
    }

    /// A process has ended: what it held is nobody's any more.
    fn ended(&mut self, id: u64, now: Instant) {
        let Some(Member::Process(process)) = self.members.get_mut(&id) else { return };
        process.pidfd = None; // which takes it out of the epoll set
        for held in &mut process.slots {
            held.dead = true;
        }
        self.reap(id, now);
    }

    /// Empties the slots of a process that nobody charges through any more.
    fn reap(&mut self, id: u64, now: Instant) {
        let Some(Member::Process(process)) = self.members.get_mut(&id) else { return };
        let Some(ward) = self.wards.get_mut(&process.pod) else { return };
        let (pod, pid) = (Arc::clone(&process.pod), process.pid);
        let mut again = ward.rest.until(now);
        process.slots.retain(|held| {
            if !held.dead || again.is_some() {
                return true;
            }
            if ward.pages.usage.reap(held.slot).is_err() {
                again = Some(ward.rest.begin(now));
                return true;
            }
            ward.rest.end();
            (self.news)(News::Left { pod: Arc::clone(&pod), pid, slot: held.slot });
            false
        });
        let waits = process.slots.iter().any(|held| held.dead);
        if process.pidfd.is_none() && process.slots.is_empty() {
            if ward.processes.get(&pid) == Some(&id) {
                ward.processes.remove(&pid);
            }
            self.members.remove(&id);
        } else if let Some(again) = again.filter(|_| waits) {
            self.at(again, Timer::Reap(id));
        }
    }

    fn correct(&mut self, pod: &Arc<str>, now: Instant) {
        let Some(ward) = self.wards.get_mut(pod) else { return };
        let mut again = ward.rest.until(now);
        let mut corrections = std::mem::take(&mut ward.corrections);
        corrections.retain(|(slot, device), (pid, bytes)| {
            // A slot that was given back, or to another process, has nothing of this to be corrected.
            if *slot != AGENT_SLOT && token_pid(ward.pages.usage.token(*slot)) != *pid {
                return false;
            }
            if again.is_some() {
                return true;
            }
            match ward.pages.usage.correct(*slot, *device, *bytes) {
                Ok(_) => ward.rest.end(),
                Err(Contended) => again = Some(ward.rest.begin(now)),
            }
            again.is_some()
        });
        ward.corrections = corrections;
        if let Some(again) = again.filter(|_| !ward.corrections.is_empty()) {
            self.at(again, Timer::Correct(Arc::clone(pod)));
        }
    }

    /// Answers a question, and notes how long that took and why it is no.
    fn answer(&mut self, id: u64, what: &ToGuard, now: Instant) {
        let (device, ticket, no) = match *what {
            ToGuard::Granted { device, ticket, .. } => (device, ticket, None),
            ToGuard::NotGranted { device, ticket, reason } => (device, ticket, Some(reason)),
            _ => return self.tell(id, what, &[]),
        };
        self.tell(id, what, &[]);
        let Some(Member::Connection(connection)) = self.members.get_mut(&id) else { return };
        match no {
            Some(reason) => connection.refused.insert(device, reason),
            None => connection.refused.remove(&device),
        };
        if let Some(asked) = connection.asked.remove(&(device, ticket)) {
            let took = now.saturating_duration_since(asked);
            let outcome = if no.is_some() { "refused" } else { "granted" };
            self.grants.with_label_values(&[outcome]).observe(took.as_secs_f64());
        }
    }

    /// Says something to a guard, with descriptors. Whoever does not read what it is told is cut off.
    fn tell(&mut self, id: u64, what: &ToGuard, descriptors: &[std::os::fd::BorrowedFd<'_>]) {
        let Some(Member::Connection(connection)) = self.members.get(&id) else { return };
        let (frame, length) = what.encode();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            error!("no room for the descriptors of a page");
        }
        let frame = frame.get(..length).unwrap_or_default();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if sendmsg(&connection.socket, &[IoSlice::new(frame)], &mut control, flags).is_err() {
            self.close(id);
        }
    }

    /// Turns a guard away.
    fn refuse(&mut self, id: u64, reason: DeniedReason) {
        if reason == DeniedReason::Malformed
            && let Some(Member::Connection(connection)) = self.members.get(&id)
            && let Some(ward) = self.wards.get(&connection.pod)
        {
            ward.pages.tally.garbage.fetch_add(1, Ordering::Relaxed);
            (self.news)(News::Garbage { pod: Arc::clone(&connection.pod) });
        }
        self.tell(id, &ToGuard::Denied { reason }, &[]);
        self.close(id);
    }

    /// Closes a connection. The slot of its process stays as it is: the process may live on.
    fn close(&mut self, id: u64) {
        let Some(Member::Connection(connection)) = self.members.remove(&id) else { return };
        if let Some(ward) = self.wards.get_mut(&connection.pod) {
            ward.connections = ward.connections.saturating_sub(1);
        }
        if let Some(process) = connection.process {
            if let Some(Member::Process(process)) = self.members.get_mut(&process) {
                for held in process.slots.iter_mut().filter(|held| held.connection == Some(id)) {
                    held.connection = None;
                }
            }
            (self.news)(News::Gone { connection: id });
        }
    }
}

/// Whether a process belongs to the pod.
fn is_of(peer: &Peer, pod: &str) -> bool {
    matches!(&peer.identity.owner, Owner::Pod(owner) if *owner.pod_uid == *pod)
}

fn timespec(duration: Duration) -> Timespec {
    // Rounded up, so that a timer is due when the wait for it ends.
    let duration = duration + Duration::from_micros(1);
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{BufRead, BufReader},
        os::{fd::AsRawFd, unix::fs::symlink},
        path::Path,
        process::{Child, Command, Stdio},
        sync::mpsc::Receiver,
    };

    use highwater_guard_abi::{
        ABI,
        charge::Charge,
        page::{DeviceQuota, QuotaView, UsagePage},
        wire::{DeniedReason, RefusedReason},
    };
    use rustix::{
        fs::{CWD, Mode, OFlags, openat},
        io::IoSliceMut,
        net::{
            AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, ReturnFlags, SocketAddrUnix,
            SocketType, connect, recvmsg, send, socket_with,
        },
    };

    use super::*;
    use crate::guard::place::SOCKET;

    const POD: &str = "8f0c1c3e-52f4-4c8e-9a66-6f5b4f2c9d10";
    const OTHER: &str = "00000000-1111-2222-3333-444444444444";
    const PATIENCE: Duration = Duration::from_secs(20);
    const MI: u64 = 1 << 20;
    /// Where a child that plays a guarded process finds the directory of its socket.
    const CHILD: &str = "HIGHWATER_TEST_GUARDED_CHILD";

    /// A node with two pods, the volumes that the volume server made, and the thread.
    struct Node {
        root: tempfile::TempDir,
        guards: Guards,
        news: Receiver<News>,
    }

    impl Node {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            for pod in [POD, OTHER] {
                let volume = root.path().join(format!("pods/{pod}/volumes/kubernetes.io~csi/g"));
                fs::create_dir_all(volume.join("mount/run")).unwrap();
                fs::write(volume.join("vol_data.json"), r#"{"driverName":"guard.highwater.dev"}"#).unwrap();
            }
            let (guards, news) = start(root.path());
            let node = Self { root, guards, news };
            node.in_pod(std::process::id(), POD);
            node
        }

        /// The agent ends, and another begins.
        fn restart(&mut self) {
            let (guards, news) = start(self.root.path());
            self.guards = guards;
            self.news = news;
        }

        /// A process is in the cgroup of a pod.
        fn in_pod(&self, pid: u32, pod: &str) {
            let directory = self.root.path().join(format!("proc/{pid}"));
            fs::create_dir_all(&directory).unwrap();
            let _ = symlink(format!("/proc/{pid}/stat"), directory.join("stat"));
            fs::write(directory.join("cgroup"), format!("0::/kubepods/burstable/pod{pod}/x\n")).unwrap();
        }

        fn run(&self, pod: &str) -> PathBuf {
            self.root.path().join(format!("pods/{pod}/volumes/kubernetes.io~csi/g/mount/run"))
        }

        fn serve(&self, pod: &str) -> Arc<Pages> {
            let pages = Arc::new(Pages::create().unwrap());
            pages.quota.set(0, &DeviceQuota { limit: 100 * MI, granted: 100 * MI, ..DeviceQuota::default() });
            self.serve_with(pod, &pages, false);
            pages
        }

        fn serve_with(&self, pod: &str, pages: &Arc<Pages>, resumed: bool) {
            let _ = fs::remove_file(self.run(pod).join(SOCKET));
            self.guards.order(Order::Serve { pod: pod.into(), pages: Arc::clone(pages), resumed });
            await_true("the socket", || self.run(pod).join(SOCKET).exists());
        }

        fn heard(&self, wanted: impl Fn(&News) -> bool) -> News {
            let deadline = Instant::now() + PATIENCE;
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                let news = self.news.recv_timeout(left).expect("no such news");
                if wanted(&news) {
                    return news;
                }
            }
        }
    }

    fn start(root: &Path) -> (Guards, Receiver<News>) {
        let (send, news) = mpsc::channel();
        let grants = crate::metrics::grant_durations("n1").unwrap();
        let settings = Settings { kubelet_root: root.into(), proc_root: root.join("proc"), grants };
        (Guards::start(settings, move |news| drop(send.send(news))).unwrap(), news)
    }

    fn await_true(what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < deadline, "{what} did not come");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// What a guard does, without the driver.
    struct Fake {
        socket: OwnedFd,
    }

    struct Welcome {
        slot: usize,
        quota: QuotaView,
        usage: UsagePage,
    }

    impl Fake {
        fn connect(run: &Path) -> Self {
            let directory = openat(CWD, run, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            rustix::net::sockopt::set_socket_timeout(
                &socket,
                rustix::net::sockopt::Timeout::Recv,
                Some(PATIENCE),
            )
            .unwrap();
            // As short as a socket's address must be.
            let path = format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd());
            connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
            Self { socket }
        }

        fn say(&self, what: &ToAgent) {
            let (frame, length) = what.encode();
            send(&self.socket, &frame[..length], SendFlags::NOSIGNAL).unwrap();
        }

        /// The next frame; `None` if the other end is closed.
        fn hear(&self) -> Option<(ToGuard, Vec<OwnedFd>)> {
            let mut frame = [0; FRAME];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut iov = [IoSliceMut::new(&mut frame)];
            let received = recvmsg(&self.socket, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
            assert!(!received.flags.contains(ReturnFlags::CTRUNC));
            let descriptors = control
                .drain()
                .flat_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
                    _ => Vec::new(),
                })
                .collect();
            let length = received.bytes;
            (length > 0).then(|| (ToGuard::decode(&frame[..length]).unwrap(), descriptors))
        }

        fn hello(&self, slot: usize) -> Option<Welcome> {
            let slot = u32::try_from(slot).unwrap();
            self.say(&ToAgent::Hello(Hello { versions: Versions::OURS, slot, guard_version: [0; 16] }));
            let (ToGuard::Welcome { abi, slot, devices, pod_uid }, pages) = self.hear()? else { return None };
            assert_eq!((abi, devices), (ABI, 1));
            assert!(std::str::from_utf8(&pod_uid).unwrap().trim_end_matches('\0').len() == 36);
            let quota = QuotaView::map(pages[0].as_fd()).unwrap();
            let usage = UsagePage::map(pages[1].as_fd()).unwrap();
            Some(Welcome { slot: slot.try_into().unwrap(), quota, usage })
        }

        /// Hello is answered thus.
        fn denied(&self, hello: &ToAgent) -> Option<DeniedReason> {
            self.say(hello);
            match self.hear()?.0 {
                ToGuard::Denied { reason } => Some(reason),
                _ => None,
            }
        }
    }

    fn hello() -> ToAgent {
        ToAgent::Hello(Hello { versions: Versions::OURS, slot: 0, guard_version: [0; 16] })
    }

    fn charge(welcome: &Welcome, bytes: u64) -> Charge {
        let (limit, granted) = (welcome.quota.limit(0).unwrap(), welcome.quota.granted(0).unwrap());
        welcome.usage.charge(welcome.slot, 0, bytes, limit, granted)
    }

    #[test]
    fn a_guard_gets_slot_and_pages_and_asks_for_more() {
        let node = Node::new();
        let pages = node.serve(POD);
        let fake = Fake::connect(&node.run(POD));
        let welcome = fake.hello(0).unwrap();
        let News::Joined { pid, slot, .. } = node.heard(|news| matches!(news, News::Joined { .. })) else {
            panic!()
        };
        assert_eq!((pid, slot), (std::process::id(), welcome.slot));
        assert_eq!(charge(&welcome, 60 * MI), Charge::Granted);
        assert_eq!(pages.usage.charged(0), 60 * MI);
        // A quota that is edited is seen at once.
        pages.quota.set_granted(0, 50 * MI);
        assert!(matches!(charge(&welcome, MI), Charge::NeedsGrant { .. }));
        let wanted = Units::of(61 * MI).get();
        fake.say(&ToAgent::Grant { device: 0, ticket: 7, wanted_total_units: wanted, wait_milliseconds: 5 });
        let News::Wants(want) = node.heard(|news| matches!(news, News::Wants(_))) else { panic!() };
        assert_eq!((want.device, want.ticket, want.bytes, want.wait), (0, 7, 61 * MI, 5));
        let granted = ToGuard::Granted { device: 0, ticket: 7, granted_units: wanted };
        node.guards.order(Order::Tell { connection: want.connection, what: granted });
        assert_eq!(fake.hear().unwrap().0, granted);
        // Why it refuses an allocation is what it was told last.
        let (device, bytes) = (0, MI);
        let full = ToGuard::NotGranted { device, ticket: 9, reason: NotGrantedReason::NoMemory };
        node.guards.order(Order::Tell { connection: want.connection, what: full });
        assert_eq!(fake.hear().unwrap().0, full);
        for reason in [RefusedReason::NotGranted, RefusedReason::OverLimit] {
            fake.say(&ToAgent::Refused { device, bytes, reason });
        }
        fake.say(&ToAgent::Grant { device: 3, ticket: 8, wanted_total_units: 1, wait_milliseconds: 0 });
        let unknown = ToGuard::NotGranted { device: 3, ticket: 8, reason: NotGrantedReason::UnknownDevice };
        assert_eq!(fake.hear().unwrap().0, unknown);
        let refused = Refusal::ALL.map(|why| pages.tally.refused(0, why));
        assert_eq!((refused.iter().sum::<u64>(), pages.tally.refused(0, Refusal::NoMemory)), (2, 1));
        drop(fake);
        node.heard(|news| matches!(news, News::Gone { connection } if *connection == want.connection));
        assert_eq!(pages.usage.charged(0), 60 * MI, "the process lives");
    }

    #[test]
    fn an_impersonator_is_turned_away_and_told() {
        let node = Node::new();
        let pages = node.serve(POD);
        for cgroup in [OTHER, "nobody"] {
            node.in_pod(std::process::id(), cgroup);
            let fake = Fake::connect(&node.run(POD));
            assert_eq!(fake.denied(&hello()), Some(DeniedReason::NotThisPod));
            assert!(fake.hear().is_none());
            node.heard(|news| matches!(news, News::Stranger { pod, .. } if **pod == *POD));
        }
        assert_eq!(pages.usage.slots_in_use().count(), 0);
    }

    #[test]
    fn versions_that_have_nothing_in_common_part() {
        let node = Node::new();
        node.serve(POD);
        let versions = Versions { oldest: ABI + 2, newest: ABI + 3 };
        let newer = ToAgent::Hello(Hello { versions, slot: 0, guard_version: [0; 16] });
        assert_eq!(Fake::connect(&node.run(POD)).denied(&newer), Some(DeniedReason::Abi));
        node.heard(|news| matches!(news, News::Incompatible { .. }));
        // One that is newer and still speaks ours.
        let versions = Versions { oldest: ABI, newest: ABI + 1 };
        let newer = ToAgent::Hello(Hello { versions, slot: 0, guard_version: [0; 16] });
        let fake = Fake::connect(&node.run(POD));
        fake.say(&newer);
        assert!(matches!(fake.hear().unwrap().0, ToGuard::Welcome { abi: ABI, .. }));
    }

    #[test]
    fn garbage_ends_a_connection_and_no_other() {
        let node = Node::new();
        let pages = node.serve(POD);
        let good = Fake::connect(&node.run(POD));
        let welcome = good.hello(0).unwrap();
        let mut counted = 0;
        for garbage in [&b"GET / HTTP/1.1\r\n"[..], &[0; 1], &[0xff; FRAME], &[0; 4000]] {
            let bad = Fake::connect(&node.run(POD));
            send(&bad.socket, garbage, SendFlags::NOSIGNAL).unwrap();
            assert!(matches!(bad.hear(), Some((ToGuard::Denied { reason: DeniedReason::Malformed }, _))));
            assert!(bad.hear().is_none());
            counted += 1;
        }
        // What may not come first, or twice.
        let early = Fake::connect(&node.run(POD));
        assert_eq!(early.denied(&ToAgent::Strength { flags: 1 }), Some(DeniedReason::Malformed));
        let twice = Fake::connect(&node.run(POD));
        twice.hello(0).unwrap();
        assert_eq!(twice.denied(&hello()), Some(DeniedReason::Malformed));
        assert_eq!(pages.tally.garbage.load(Ordering::Relaxed), counted + 2);
        node.heard(|news| matches!(news, News::Garbage { pod } if **pod == *POD));
        assert_eq!(charge(&welcome, MI), Charge::Granted);
        good.say(&ToAgent::Grant { device: 0, ticket: 1, wanted_total_units: 1, wait_milliseconds: 0 });
        node.heard(|news| matches!(news, News::Wants(_)));
    }

    #[test]
    fn a_pod_that_floods_its_socket_delays_no_other_and_is_bounded() {
        let node = Node::new();
        let pages = node.serve(POD);
        let other = node.serve(OTHER);
        let flood = Fake::connect(&node.run(POD));
        flood.hello(0).unwrap();
        let (frame, length) =
            ToAgent::Refused { device: 0, bytes: 1, reason: RefusedReason::OverLimit }.encode();
        let began = Instant::now();
        let mut sent = 0;
        while sent < 1_000_000 && began.elapsed() < Duration::from_millis(500) {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            sent += usize::from(send(&flood.socket, &frame[..length], flags).is_ok());
        }
        // The other pod, whose process this is from now on, is answered meanwhile.
        node.in_pod(std::process::id(), OTHER);
        let asked = Instant::now();
        Fake::connect(&node.run(OTHER)).hello(0).unwrap();
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
        assert_eq!(other.usage.slots_in_use().count(), 1);
        let most = f64::from(FRAMES.0) + f64::from(FRAMES.1) * (began.elapsed().as_secs_f64() + 1.0);
        let heard = u32::try_from(pages.tally.refused(0, Refusal::OverLimit)).unwrap();
        assert!(heard > 0 && f64::from(heard) <= most, "{heard} of {sent} frames, at most {most}");
    }

    #[test]
    fn who_never_says_hello_is_dropped_and_many_may_wait_to_be_accepted() {
        let node = Node::new();
        node.serve(POD);
        let waiting: Vec<_> = (0..300).map(|_| Fake::connect(&node.run(POD))).collect();
        let fake = Fake::connect(&node.run(POD));
        fake.hello(0).unwrap();
        assert!(waiting[0].hear().is_none(), "it was given some seconds");
    }

    #[test]
    fn a_program_that_runs_another_gives_back_its_slot_and_two_guards_in_one_do_not() {
        let node = Node::new();
        let pages = node.serve(POD);
        let first = Fake::connect(&node.run(POD));
        let welcome = first.hello(0).unwrap();
        assert_eq!(charge(&welcome, 10 * MI), Charge::Granted);
        // A second guard in the same process.
        let second = Fake::connect(&node.run(POD)).hello(0).unwrap();
        assert_ne!(second.slot, welcome.slot);
        assert_eq!(pages.usage.charged(0), 10 * MI);
        // After exec, what the program before had opened is closed.
        drop(first);
        let third = Fake::connect(&node.run(POD)).hello(0).unwrap();
        // The new connection may be heard of before the end of the old one.
        await_true("the slot to be given back", || pages.usage.charged(0) == 0);
        node.heard(|news| matches!(news, News::Left { slot, .. } if *slot == welcome.slot));
        assert_ne!(third.slot, 0);
    }

    #[test]
    fn an_agent_that_starts_again_takes_the_charges_over() {
        let mut node = Node::new();
        let pages = node.serve(POD);
        let fake = Fake::connect(&node.run(POD));
        let welcome = fake.hello(0).unwrap();
        assert_eq!(charge(&welcome, 10 * MI), Charge::Granted);
        // Somebody who will be gone, and somebody else's PID.
        let gone = pages.usage.claim_any(token(1 << 22, 5)).unwrap();
        assert_eq!(pages.usage.charge(gone, 0, 7 * MI, u64::MAX, u64::MAX), Charge::Granted);
        let reused = pages.usage.claim_any(token(std::process::id(), 1)).unwrap();
        assert_eq!(pages.usage.charge(reused, 0, 5 * MI, u64::MAX, u64::MAX), Charge::Granted);
        let kept = pages.kept()[0].try_clone_to_owned().unwrap();
        drop(pages);
        node.restart();
        assert!(fake.hear().is_none());
        let pages = Arc::new(Pages::resume(kept).unwrap());
        pages.quota.set(0, &DeviceQuota { limit: 20 * MI, granted: 20 * MI, ..DeviceQuota::default() });
        let epoch = welcome.usage.epoch();
        node.serve_with(POD, &pages, true);
        await_true("a new epoch", || welcome.usage.epoch() != epoch);
        assert_eq!(pages.usage.charged(0), 10 * MI, "of those that are gone nothing is left");
        node.heard(|news| matches!(news, News::Joined { slot, .. } if *slot == welcome.slot));
        let again = Fake::connect(&node.run(POD)).hello(welcome.slot).unwrap();
        assert_eq!(again.slot, welcome.slot);
        assert!(matches!(charge(&again, 11 * MI), Charge::OverLimit { .. }), "the new page holds");
        // Nobody gets a slot that is another's.
        let thief = Fake::connect(&node.run(POD)).hello(gone).unwrap();
        assert_ne!(thief.slot, welcome.slot);
    }

    #[test]
    fn a_correction_is_charged_and_goes_with_its_process() {
        let node = Node::new();
        let pages = node.serve(POD);
        let fake = Fake::connect(&node.run(POD));
        let welcome = fake.hello(0).unwrap();
        let order = |pid, slot, bytes| {
            node.guards.order(Order::Correct { pod: POD.into(), pid, slot, device: 0, bytes });
        };
        let me = std::process::id();
        let mib = i64::try_from(MI).unwrap();
        order(me, welcome.slot, 3 * mib);
        order(0, AGENT_SLOT, 5 * mib);
        await_true("both corrections", || pages.usage.charged(0) == 8 * MI);
        order(me, welcome.slot, -mib);
        order(me + 1, welcome.slot, 50 * mib);
        await_true("the later one", || pages.usage.charged(0) == 4 * MI);
        order(0, AGENT_SLOT, 0);
        await_true("none for the pod", || pages.usage.charged(0) == 0);
        assert_eq!(pages.usage.correction(welcome.slot, 0), -mib, "another process's was not made");
    }

    #[test]
    fn a_volume_that_was_made_anew_has_its_socket_again() {
        let node = Node::new();
        node.serve(POD);
        fs::remove_dir_all(node.run(POD)).unwrap();
        fs::create_dir(node.run(POD)).unwrap();
        await_true("the socket", || node.run(POD).join(SOCKET).exists());
        Fake::connect(&node.run(POD)).hello(0).unwrap();
        node.guards.order(Order::Leave { pod: POD.into() });
        await_true("the end of the socket", || {
            let directory = openat(CWD, node.run(POD), OFlags::PATH, Mode::empty()).unwrap();
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            let path = format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd());
            connect(&socket, &SocketAddrUnix::new(path).unwrap()).is_err()
        });
    }

    /// Not a test by itself: a process of a pod that charges and uncharges for ever.
    #[test]
    fn child() {
        let Some(run) = std::env::var_os(CHILD) else { return };
        // Whoever started this says when it is in its pod.
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        let fake = Fake::connect(Path::new(&run));
        let Some(welcome) = fake.hello(0) else {
            println!("turned away");
            thread::sleep(PATIENCE);
            return;
        };
        println!("charging");
        loop {
            assert_eq!(charge(&welcome, 3 * MI), Charge::Granted);
            assert_eq!(charge(&welcome, 5 * MI), Charge::Granted);
            welcome.usage.uncharge(welcome.slot, 0, 3 * MI);
            welcome.usage.uncharge(welcome.slot, 0, 5 * MI);
        }
    }

    fn spawn(node: &Node) -> Child {
        spawn_until(node, "charging")
    }

    fn spawn_until(node: &Node, what: &str) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "guard::server::tests::child", "--nocapture"]);
        command.env(CHILD, node.run(POD)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        node.in_pod(child.id(), POD);
        drop(child.stdin.take());
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.contains(what)));
        child
    }

    #[test]
    fn a_pod_with_more_processes_than_slots_takes_no_descriptors_for_them() {
        let node = Node::new();
        let pages = node.serve(POD);
        while pages.usage.claim_any(1).is_some() {}
        let mut child = spawn_until(&node, "turned away");
        let pid = format!("Pid:\t{}\n", child.id());
        await_true("that nothing of it is kept", || {
            let known = fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
            !known
                .map(|entry| fs::read_to_string(entry.path()))
                .any(|text| text.is_ok_and(|t| t.contains(&pid)))
        });
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a04_whoever_is_killed_anywhere_leaves_nothing_charged() {
        let node = Node::new();
        let pages = node.serve(POD);
        let fake = Fake::connect(&node.run(POD));
        let welcome = fake.hello(0).unwrap();
        assert_eq!(charge(&welcome, MI), Charge::Granted);
        for round in 0..12u64 {
            let mut children: Vec<_> = (0..3).map(|_| spawn(&node)).collect();
            thread::sleep(Duration::from_micros(137 * round));
            for child in &mut children {
                child.kill().unwrap();
            }
            let killed = Instant::now();
            for child in &mut children {
                child.wait().unwrap();
            }
            await_true("their end", || pages.usage.slots_in_use().count() == 1);
            assert!(killed.elapsed() < Duration::from_secs(2));
            assert_eq!(pages.usage.charged(0), MI);
            let audit = pages.usage.audit(0).unwrap();
            assert_eq!(audit.charged, audit.sum);
        }
        let left = node.news.try_iter().filter(|news| matches!(news, News::Left { .. })).count();
        assert_eq!(left, 36);
    }
}
