//! What the keeper does while it holds: takes and gives back memory as it is told, keeps what it
//! is given, hands everything over.
//!
//! One task owns everything, and never waits: clients, workers and the closing of descriptors
//! have tasks of their own and send events. So a device that is stuck delays no other, and no
//! reply but its own.

mod device;
mod door;
mod ending;

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::OwnedFd,
    pin::Pin,
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tracing::{debug, error, info, warn};

use crate::{
    args::Serve,
    connection::{FromClient, Outgoing},
    descriptors::{Descriptor, Holdings},
    keeper_protocol::{
        Answer, Ask, Batch, KEYS_A_PAGE, Last, MOST_BYTES, MOST_STORED, Outcome, Phase, Reason, Refusal,
        Released, Reply, Request, Reserved, Role, Status, is_key, is_uuid,
    },
    park::{Due, Ended, Parks},
    place::{Lock, Place},
    probe::Pulse,
    succeed::{Inheritance, Predecessor},
    worker,
};
use device::{Attempt, Device};
use door::Door;
pub(crate) use ending::Owed;
use ending::{Ending, Next, Seen};

/// How many events of a kind may wait.
const EVENTS: usize = 64;
/// How often time-outs are looked at, and whether the sockets still have their names.
const TICK: Duration = Duration::from_secs(1);
/// Most devices: 8 GPUs of 7 instances each, and room.
const MOST_DEVICES: usize = 128;
/// Most stored keys: a few for each pod of a node.
const MOST_KEYS: usize = 4096;
/// Most descriptors of one batch, so that its sizes fit beside them.
const BATCH: usize = 200;
/// How long standing down may take.
const STANDING_DOWN: Duration = Duration::from_secs(5);
/// How long giving back memory may take.
const RELEASING: Duration = Duration::from_secs(10);
/// How long a hand-over waits for what is under way.
const QUIET: Duration = Duration::from_secs(4);
/// How long a successor may take from its request to `done`.
const HANDING_OVER: Duration = Duration::from_mins(1);

/// Why a keeper holds no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Another keeper holds everything now.
    HandedOver,
    /// It was told to end.
    Terminated,
}

/// A request that waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asker {
    client: u64,
    id: u64,
}

#[derive(Debug)]
struct Client {
    role: Role,
    replies: mpsc::UnboundedSender<Outgoing>,
}

/// A request that is answered when nothing is under way any more.
#[derive(Debug)]
struct Waiting {
    asker: Asker,
    until: Instant,
}

/// A hand-over under way.
#[derive(Debug)]
struct HandOver {
    asker: Asker,
    since: Instant,
    /// Everything is on its way to the successor.
    sent: bool,
}

/// The end of a task that closed descriptors.
#[derive(Debug)]
struct Closed {
    device: String,
    bytes: u64,
    /// Who waits for it, and what goes beyond that.
    release: Option<(Asker, Option<Excess>)>,
}

/// What a release gave back beyond what was asked for, and is to be made again.
#[derive(Clone, Copy, Debug)]
struct Excess {
    bytes: u64,
    keep_free: u64,
}

#[derive(Debug)]
struct Holder<'a> {
    args: &'a Serve,
    devices: BTreeMap<String, Device>,
    stored: BTreeMap<String, Vec<Descriptor>>,
    stand_down: bool,
    /// Who waits for standing down.
    standing_down: Vec<Waiting>,
    /// Releases under way, which are told when they take too long.
    releasing: Vec<Waiting>,
    hand_over: Option<HandOver>,
    predecessor: bool,
    clients: HashMap<u64, Client>,
    workers: mpsc::Sender<worker::Event>,
    closed: mpsc::UnboundedSender<Closed>,
    parks: Parks<Asker>,
    /// A successor was told to wait until no memory is being moved.
    put_off: bool,
}

/// Serves until another keeper holds everything, or `end` comes.
pub(crate) async fn hold(
    args: &Serve,
    place: &Place,
    inheritance: Inheritance,
    pulse: &watch::Sender<Pulse>,
    mut end: Pin<&mut (impl Future<Output = ()> + ?Sized)>,
) -> anyhow::Result<End> {
    let Inheritance { holdings, predecessor, unknown, starting } = inheritance;
    let (clients, mut from_clients) = mpsc::channel(EVENTS);
    let (workers, mut from_workers) = mpsc::channel(EVENTS);
    let (closed, mut from_closing) = mpsc::unbounded_channel();
    let (ended, mut from_moving) = mpsc::unbounded_channel::<Ended>();
    let mut door = Door::open(args, place, clients)?;
    let (told, mut predecessors_end) = mpsc::channel::<()>(1);
    // From here on this keeper answers for everything; the other one is told, and closes its own.
    let mut lingers = unknown;
    if let Some(predecessor) = predecessor
        && let Some(slow) = predecessor.done().await
    {
        lingers = true;
        tokio::spawn(tell_end(slow, told.clone()));
    }
    // The other one may have written to its journal until now.
    let parks = Parks::take_up(args.state.state_dir.clone(), args.libraries.clone(), ended);
    let mut holder = Holder::new(args, holdings, workers, closed, parks);
    holder.predecessor = lingers;
    let mut lock = take_lock(place);
    drop(starting);
    info!(bytes = holder.bytes(), devices = holder.devices.len(), "holding");
    pulse.send_replace(Pulse::now(Phase::Holding));

    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut ending = None::<Ending>;
    loop {
        tokio::select! {
            biased;
            () = end.as_mut(), if ending.is_none() => {
                holder.offer();
                let lasts = Duration::from_secs(args.end_seconds.into());
                ending = Some(Ending::new(lasts, Instant::now()));
            }
            Some(ended) = from_moving.recv() => {
                if let Some(due) = holder.parks.on_ended(ended) {
                    holder.reply_moved(due);
                }
            }
            Some(closed) = from_closing.recv() => holder.on_closed(closed),
            Some(event) = from_workers.recv() => holder.on_worker(event),
            Some(event) = from_clients.recv() => {
                if let Some(asker) = holder.on_client(event, &mut door) {
                    door.close();
                    holder.let_go(asker).await;
                    door.flushed().await;
                    drop(lock);
                    return Ok(if ending.is_some() { End::Terminated } else { End::HandedOver });
                }
            }
            Some(()) = predecessors_end.recv() => holder.predecessor = false,
            _ = tick.tick() => {
                pulse.send_replace(Pulse::now(Phase::Holding));
                if lock.is_none() {
                    lock = take_lock(place);
                    // Whoever had it is gone, and closed what it had.
                    holder.predecessor &= lock.is_none();
                }
                holder.on_tick();
                // One that had to wait while memory was moved.
                if ending.is_some() && holder.put_off && holder.parks.is_quiet() {
                    holder.put_off = false;
                    holder.offer();
                }
                if holder.hand_over.is_none() && !door.keep() {
                    warn!("another keeper has taken this one's place: letting go of what is held");
                    holder.let_go_unasked().await;
                    return Ok(End::HandedOver);
                }
            }
        }
        holder.settle();
        if let Some(ending) = &mut ending {
            match ending.next(&holder.seen(), Instant::now()) {
                Next::Wait => {}
                Next::Undo => holder.undo(),
                Next::Leave => {
                    holder.say_what_is_left();
                    return Ok(End::Terminated);
                }
            }
        }
    }
}

/// The lock of whoever holds; tried again where another still has it, or where it cannot be taken.
fn take_lock(place: &Place) -> Option<Lock> {
    place.try_holder_lock().unwrap_or_else(|error| {
        warn!(%error, "cannot lock the keeper's directory");
        None
    })
}

async fn tell_end(predecessor: Predecessor, told: mpsc::Sender<()>) {
    predecessor.gone().await;
    let _ = told.send(()).await;
}

impl<'a> Holder<'a> {
    fn new(
        args: &'a Serve,
        holdings: Holdings,
        workers: mpsc::Sender<worker::Event>,
        closed: mpsc::UnboundedSender<Closed>,
        parks: Parks<Asker>,
    ) -> Self {
        let devices = holdings.devices.into_iter().map(|(uuid, chunks)| (uuid, Device::holding(chunks)));
        Self {
            args,
            devices: devices.collect(),
            stored: holdings.stored,
            stand_down: holdings.stand_down,
            standing_down: Vec::new(),
            releasing: Vec::new(),
            hand_over: None,
            predecessor: false,
            clients: HashMap::new(),
            workers,
            closed,
            parks,
            put_off: false,
        }
    }

    fn reply_moved(&self, (asker, moved): Due<Asker>) {
        self.reply(asker, moved.map(Answer::Moved), Vec::new());
    }

    fn bytes(&self) -> u64 {
        self.devices.values().fold(0, |bytes, device| bytes.saturating_add(device.chunks.bytes()))
    }

    fn reply(&self, asker: Asker, result: Result<Answer, Refusal>, descriptors: Vec<Descriptor>) {
        let Some(client) = self.clients.get(&asker.client) else { return };
        let result = match result {
            Ok(answer) => Outcome::Ok(answer),
            Err(refusal) => Outcome::Error(refusal),
        };
        // One whose connection is ending does not hear it.
        let _ = client.replies.send(Outgoing { reply: Reply { id: asker.id, result }, descriptors });
    }

    /// Returns whoever may be told that everything is handed over.
    fn on_client(&mut self, event: FromClient, door: &mut Door) -> Option<Asker> {
        match event {
            FromClient::Joined { client, role, replies } => self.join(client, Client { role, replies }),
            FromClient::Gone { client } => {
                self.clients.remove(&client);
                if self.hand_over.take_if(|hand_over| hand_over.asker.client == client).is_some() {
                    warn!("the successor is gone before it was done: going on");
                    door.restore();
                }
            }
            FromClient::Asked { client, request: Request { id, ask }, descriptors, cut } => {
                let asker = Asker { client, id };
                let role = self.clients.get(&client).map(|client| client.role)?;
                if matches!(ask, Ask::Done {}) && self.is_sent_to(client) {
                    return Some(asker);
                }
                match self.ask(asker, role, ask, descriptors, cut) {
                    Ok(Some((answer, descriptors))) => self.reply(asker, Ok(answer), descriptors),
                    Ok(None) => {}
                    Err(refusal) => self.reply(asker, Err(refusal), Vec::new()),
                }
            }
        }
        None
    }

    fn join(&mut self, number: u64, client: Client) {
        debug!(number, role = ?client.role, "a client joined");
        if client.role == Role::Agent {
            let older = |other: &Client| other.role == Role::Agent;
            let older: Vec<_> = self.clients.iter().filter(|(_, c)| older(c)).map(|(n, _)| *n).collect();
            for older in older {
                let displaced = Refusal::new(Reason::Displaced, "a newer agent is connected");
                self.reply(Asker { client: older, id: 0 }, Err(displaced), Vec::new());
                self.clients.remove(&older);
            }
            // It starts from what is held: nothing is taken behind its back.
            self.devices.values_mut().for_each(Device::forsake);
        }
        self.clients.insert(number, client);
    }

    fn is_sent_to(&self, client: u64) -> bool {
        self.hand_over.as_ref().is_some_and(|hand_over| hand_over.sent && hand_over.asker.client == client)
    }

    /// Does what is asked. `None`: the answer comes later.
    fn ask(
        &mut self,
        asker: Asker,
        role: Role,
        ask: Ask,
        descriptors: Vec<OwnedFd>,
        cut: bool,
    ) -> Result<Option<(Answer, Vec<Descriptor>)>, Refusal> {
        let allowed = match ask {
            Ask::Hello { .. } => false,
            Ask::Status {} => true,
            Ask::HandOver {} | Ask::Done {} => role == Role::Successor,
            _ => role == Role::Agent,
        };
        if !allowed {
            return Err(Refusal::new(
                Reason::NotAllowed,
                format!("not a request for a client that is {role:?}"),
            ));
        }
        let reads = matches!(ask, Ask::Status {} | Ask::Get { .. } | Ask::Keys { .. } | Ask::HandOver {});
        if self.hand_over.is_some() && !reads {
            return Err(Refusal::new(Reason::HandingOver, "another keeper is taking over: connect again"));
        }
        let plain = |answer| Ok(Some((answer, Vec::new())));
        match ask {
            Ask::Status {} => plain(Answer::Status(self.status())),
            Ask::Reserve { device, bytes, keep_free } => {
                let answer = self.reserve(asker, device, bytes, keep_free)?;
                Ok(answer.map(|reserved| (Answer::Reserved(reserved), Vec::new())))
            }
            Ask::Release { device, bytes, keep_free } => Ok(self.release(asker, &device, bytes, keep_free)),
            Ask::StandDown { on: true } => {
                self.begin_standing_down();
                self.standing_down.push(Waiting { asker, until: Instant::now() + STANDING_DOWN });
                Ok(None)
            }
            Ask::StandDown { on: false } => {
                if std::mem::take(&mut self.stand_down) {
                    info!("standing down no longer");
                }
                plain(Answer::Done {})
            }
            Ask::Put { key } => self.put(key, descriptors, cut).and_then(|()| plain(Answer::Done {})),
            Ask::Get { key } => match self.stored.get(&key) {
                Some(stored) => Ok(Some((Answer::Done {}, stored.clone()))),
                None => Err(Refusal::new(Reason::NotFound, format!("nothing is stored under {key:?}"))),
            },
            Ask::Drop { key } => {
                self.stored.remove(&key);
                plain(Answer::Done {})
            }
            Ask::Keys { after } => {
                use std::ops::Bound::{Excluded, Unbounded};
                let from = after.map_or(Unbounded, Excluded);
                let keys = self.stored.range((from, Unbounded)).map(|(key, _)| key.clone());
                plain(Answer::Keys { keys: keys.take(KEYS_A_PAGE).collect() })
            }
            Ask::Park(_) if self.stand_down => {
                Err(Refusal::new(Reason::StoodDown, "the keeper stands down and parks nothing"))
            }
            Ask::Park(ask) => self.parks.park(asker, ask).map(|()| None),
            // Also while it stands down: it gives somebody's memory back.
            Ask::Restore { pod, device } => {
                let moved = self.parks.restore(asker, &pod, &device)?;
                Ok(moved.map(|moved| (Answer::Moved(moved), Vec::new())))
            }
            Ask::HandOver {} => self.begin_hand_over(asker).map(|()| None),
            Ask::Hello { .. } | Ask::Done {} => {
                Err(Refusal::new(Reason::NotAllowed, "nothing is being handed over to this client"))
            }
        }
    }

    fn status(&self) -> Status {
        let devices = self.devices.iter().map(|(uuid, device)| device.status(uuid));
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            phase: Phase::Holding,
            stand_down: self.stand_down,
            predecessor: self.predecessor,
            standing_by: self.clients.values().filter(|client| client.role == Role::Successor).count(),
            stored: self.stored.len(),
            devices: devices.collect(),
            parking: Some(self.parks.status()),
        }
    }

    fn put(&mut self, key: String, descriptors: Vec<OwnedFd>, cut: bool) -> Result<(), Refusal> {
        if !is_key(&key) {
            return Err(Refusal::new(Reason::Malformed, "keys are letters, digits and -._:/, at most 128"));
        }
        if cut || descriptors.is_empty() || descriptors.len() > MOST_STORED {
            let why = format!("a key stores between 1 and {MOST_STORED} descriptors, and all must arrive");
            return Err(Refusal::new(Reason::Malformed, why));
        }
        if self.stored.len() >= MOST_KEYS && !self.stored.contains_key(&key) {
            return Err(Refusal::new(
                Reason::Full,
                format!("{MOST_KEYS} keys are stored, which is the limit"),
            ));
        }
        self.stored.insert(key, descriptors.into_iter().map(Into::into).collect());
        Ok(())
    }

    fn reserve(
        &mut self,
        asker: Asker,
        uuid: String,
        bytes: u64,
        keep_free: u64,
    ) -> Result<Option<Reserved>, Refusal> {
        if self.stand_down {
            return Err(Refusal::new(Reason::StoodDown, "the keeper stands down and reserves nothing"));
        }
        if !is_uuid(&uuid) {
            return Err(Refusal::new(Reason::Malformed, format!("{uuid:?} is not the UUID of a device")));
        }
        if self.devices.len() >= MOST_DEVICES && !self.devices.contains_key(&uuid) {
            let why = format!("{MOST_DEVICES} devices are known, which is the limit");
            return Err(Refusal::new(Reason::Full, why));
        }
        let device = self.devices.entry(uuid).or_default();
        device.enqueue(Attempt::asked(asker, bytes, keep_free))
    }

    fn release(
        &mut self,
        asker: Asker,
        uuid: &str,
        bytes: u64,
        keep_free: Option<u64>,
    ) -> Option<(Answer, Vec<Descriptor>)> {
        let device = self.devices.get_mut(uuid).filter(|_| bytes > 0);
        let Some((device, release)) = device.and_then(|device| {
            let release = device.begin_release(bytes)?;
            Some((device, release))
        }) else {
            let ballast_bytes = self.devices.get(uuid).map_or(0, |device| device.chunks.bytes());
            return Some((Answer::Released(Released { bytes: 0, ballast_bytes }), Vec::new()));
        };
        let excess = keep_free.map(|keep_free| Excess { bytes: release.excess, keep_free });
        device.closing += 1;
        self.close(uuid.to_owned(), release.descriptors, release.bytes, Some((asker, excess)));
        self.releasing.push(Waiting { asker, until: Instant::now() + RELEASING });
        None
    }

    /// Closes descriptors in a thread of their own: the kernel may take its time.
    fn close(
        &self,
        device: String,
        descriptors: Vec<Descriptor>,
        bytes: u64,
        release: Option<(Asker, Option<Excess>)>,
    ) {
        let told = self.closed.clone();
        tokio::task::spawn_blocking(move || {
            drop(descriptors);
            let _ = told.send(Closed { device, bytes, release });
        });
    }

    fn on_closed(&mut self, closed: Closed) {
        let Closed { device, bytes, release } = closed;
        let Some(device) = self.devices.get_mut(&device) else { return };
        device.closing = device.closing.saturating_sub(1);
        let Some((asker, excess)) = release else { return };
        if let Some(Excess { bytes, keep_free }) =
            excess.filter(|_| !self.stand_down && self.hand_over.is_none())
        {
            device.remake(bytes, keep_free);
        }
        let ballast_bytes = device.chunks.bytes();
        // One that took too long has been answered already.
        let count = self.releasing.len();
        self.releasing.retain(|waiting| waiting.asker != asker);
        if self.releasing.len() < count {
            let released = Released { bytes, ballast_bytes };
            self.reply(asker, Ok(Answer::Released(released)), Vec::new());
        }
    }

    fn on_worker(&mut self, event: worker::Event) {
        let worker::Event { device: uuid, number, what } = event;
        let keeps = !self.stand_down;
        let Some(device) = self.devices.get_mut(&uuid) else { return };
        let answer = match what {
            worker::What::Made(chunks) if keeps => {
                device.made(chunks);
                None
            }
            worker::What::Made(chunks) => {
                let descriptors: Vec<_> =
                    chunks.into_iter().map(|(_, chunk)| Descriptor::new(chunk)).collect();
                device.closing += 1;
                self.close(uuid, descriptors, 0, None);
                return;
            }
            worker::What::Cut => {
                device.last_error = Some("this process may open no more descriptors".to_owned());
                device.fail("this process may open no more descriptors")
            }
            worker::What::Ended { end, message, free } => device.ended(number, end, message, free),
            worker::What::Gone(how) => device.gone(number, &how),
        };
        if let Some(tidied) = device.tidied.take() {
            device.closing += 1;
            self.close(uuid, tidied, 0, None);
        }
        if let Some((asker, reserved)) = answer {
            self.reply(asker, Ok(Answer::Reserved(reserved)), Vec::new());
        }
    }

    fn begin_standing_down(&mut self) {
        if !std::mem::replace(&mut self.stand_down, true) {
            info!(bytes = self.bytes(), "standing down");
        }
        let uuids: Vec<_> = self.devices.keys().cloned().collect();
        for uuid in uuids {
            let Some(device) = self.devices.get_mut(&uuid) else { continue };
            let dropped = device.stop();
            let (descriptors, bytes) = device.chunks.take_all();
            if !descriptors.is_empty() {
                device.closing += 1;
                self.close(uuid, descriptors, bytes, None);
            }
            for (asker, reserved) in dropped {
                self.reply(asker, Ok(Answer::Reserved(reserved)), Vec::new());
            }
        }
    }

    fn begin_hand_over(&mut self, asker: Asker) -> Result<(), Refusal> {
        if self.hand_over.is_some() {
            return Err(Refusal::new(Reason::Busy, "everything is being handed over already"));
        }
        if !self.parks.is_quiet() {
            // A move that is cut off in the middle is taken up by the next keeper, and slower.
            self.parks.yield_to_successor();
            self.put_off = true;
            return Err(Refusal::new(Reason::Busy, "memory is being moved: ask again"));
        }
        info!("another keeper takes over");
        self.hand_over = Some(HandOver { asker, since: Instant::now(), sent: false });
        let dropped: Vec<_> = self.devices.values_mut().flat_map(Device::stop).collect();
        for (asker, reserved) in dropped {
            self.reply(asker, Ok(Answer::Reserved(reserved)), Vec::new());
        }
        Ok(())
    }

    /// Sends duplicates of everything to the successor.
    fn send_everything(&self, asker: Asker) {
        let mut count = 0;
        let mut send = |batch: Batch, descriptors: Vec<Descriptor>| {
            count += descriptors.len();
            self.reply(asker, Ok(Answer::Batch(batch)), descriptors);
        };
        for (uuid, device) in &self.devices {
            let chunks: Vec<_> = device.chunks.iter().collect();
            for some in chunks.chunks(BATCH) {
                let (sizes, chunks) =
                    some.iter().map(|(size, chunk)| (*size, Descriptor::clone(chunk))).unzip();
                send(Batch { device: Some(uuid.clone()), sizes, ..Batch::default() }, chunks);
            }
        }
        for (key, stored) in &self.stored {
            send(Batch { key: Some(key.clone()), ..Batch::default() }, stored.clone());
        }
        let last = Last { descriptors: count, stand_down: self.stand_down };
        self.reply(asker, Ok(Answer::Batch(Batch { last: Some(last), ..Batch::default() })), Vec::new());
    }

    /// What an end goes by.
    fn seen(&self) -> Seen {
        Seen {
            successor: self.successor().is_some(),
            taking_over: self.hand_over.is_some(),
            moving: !self.parks.is_quiet(),
            owed: self.parks.owed(),
        }
    }

    /// Begins to bring back what is parked.
    fn undo(&mut self) {
        info!("nobody takes over: what is held is freed, and what is parked brought back first");
        // While it hands over nothing is brought back.
        if let Some(hand_over) = &self.hand_over {
            self.clients.remove(&hand_over.asker.client);
        }
        self.parks.end();
        // Nobody is owed it any more, and what comes back needs room.
        self.begin_standing_down();
    }

    fn say_what_is_left(&self) {
        let Owed { parks, bytes } = self.parks.owed();
        if parks == 0 {
            info!("ended; what is held is freed");
        } else {
            warn!(parks, bytes, "ended before everything that is parked was back: the next keeper goes on");
        }
    }

    /// The newest keeper that stands by.
    fn successor(&self) -> Option<u64> {
        let successors = self.clients.iter().filter(|(_, client)| client.role == Role::Successor);
        successors.map(|(number, _)| *number).max()
    }

    /// Asks a keeper that stands by to take over, if there is one that does not do so already.
    fn offer(&self) {
        if self.hand_over.is_none()
            && let Some(newest) = self.successor()
        {
            self.reply(Asker { client: newest, id: 0 }, Ok(Answer::TakeOver {}), Vec::new());
        }
    }

    /// Closes everything, then tells the successor.
    async fn let_go(&mut self, successor: Asker) {
        self.let_go_unasked().await;
        self.reply(successor, Ok(Answer::Done {}), Vec::new());
        self.clients.clear();
    }

    async fn let_go_unasked(&mut self) {
        let devices = std::mem::take(&mut self.devices);
        let stored = std::mem::take(&mut self.stored);
        self.parks.let_go();
        let closing = tokio::task::spawn_blocking(move || drop((devices, stored)));
        // Duplicates, so the device is not asked and this takes no time.
        if timeout(STANDING_DOWN, closing).await.is_err() {
            error!("the kernel does not take back the descriptors");
        }
    }

    fn on_tick(&mut self) {
        let now = Instant::now();
        let idle = Duration::from_secs(self.args.worker_idle_seconds.into());
        for device in self.devices.values_mut() {
            device.rest(now, idle);
        }
        // While it hands over, nothing begins.
        if self.hand_over.is_none() {
            let agent = self.clients.values().any(|client| client.role == Role::Agent);
            for due in self.parks.on_tick(agent, now) {
                self.reply_moved(due);
            }
        }
        let late = |waiting: &mut Waiting| waiting.until < now;
        let down =
            self.standing_down.extract_if(.., late).map(|w| (w, "not every handle could be closed in time"));
        let down: Vec<_> = down.collect();
        let released = self.releasing.extract_if(.., late).map(|w| (w, "the memory is not free yet"));
        let released: Vec<_> = released.collect();
        for (waiting, what) in down.into_iter().chain(released) {
            let why = format!("{what}: a device or its worker is stuck, see the status");
            self.reply(waiting.asker, Err(Refusal::new(Reason::Stuck, why)), Vec::new());
        }
        // A successor that does not come to an end is cut off, and this keeper goes on.
        if let Some(hand_over) = &self.hand_over
            && hand_over.since + HANDING_OVER < now
        {
            self.clients.remove(&hand_over.asker.client);
        }
    }

    /// Goes on with whatever can go on now.
    fn settle(&mut self) {
        if !self.stand_down && self.hand_over.is_none() {
            let mut failed = Vec::new();
            for (uuid, device) in &mut self.devices {
                failed.extend(device.go_on(uuid, &self.args.libraries, &self.workers));
            }
            for (asker, reserved) in failed {
                self.reply(asker, Ok(Answer::Reserved(reserved)), Vec::new());
            }
        }
        let closed = self.devices.values().all(Device::is_closed) && self.parks.is_quiet();
        if !self.standing_down.is_empty() && closed {
            for waiting in std::mem::take(&mut self.standing_down) {
                self.reply(waiting.asker, Ok(Answer::Done {}), Vec::new());
            }
        }
        let quiet = self.devices.values().all(Device::is_quiet);
        if let Some(hand_over) = &mut self.hand_over
            && !hand_over.sent
            && (quiet || hand_over.since + QUIET < Instant::now())
        {
            hand_over.sent = true;
            let asker = hand_over.asker;
            self.send_everything(asker);
        }
    }
}

/// The sizes of a batch, and one stored set, fit a frame with room to spare.
const _: () = assert!(BATCH * 21 + 1024 < MOST_BYTES);
