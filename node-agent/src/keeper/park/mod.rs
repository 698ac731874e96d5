//! What the keeper has parked: the device memory of pods, moved to the host by the driver.
//!
//! The agent says whom and when; the keeper carries it out by a worker, and writes down what it is
//! about to do before it does it. Nothing is parked for ever by a death:
//!
//! - of a worker: the keeper starts another, which goes on from where the driver has the processes;
//! - of the keeper: the next one reads the journal and does the same;
//! - of the agent: it finds in the status what is parked; where no agent comes, the keeper brings
//!   everything back by itself, as it does when it ends for good.

pub(crate) mod child;
mod journal;
mod process;
mod steps;
mod worker;

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{sync::mpsc, time::Instant};
use tracing::{error, info, warn};

use crate::{
    args::Libraries,
    holder::Owed,
    keeper_protocol::{
        LONGEST_MESSAGE, MOST_PARKS, MOST_PROCESSES, Moved, Park, ParkAsk, ParkState, Parking, Reason,
        Refusal, is_key, is_uuid,
    },
};
use journal::{Entry, Journal};
use process::is_there;
use steps::{Aim, Place};
pub(crate) use worker::Ended;
use worker::{Mover, Told, Way};

/// How often a worker that dies is followed by another one for the same way.
const MOST_DEATHS: u32 = 3;
/// Until then.
const AFTER_DEATH: Duration = Duration::from_secs(1);
/// How long there may be no agent before the keeper brings back what is parked.
const AWAY: Duration = Duration::from_mins(10);
/// Between two attempts of the keeper's own.
const AGAIN: Duration = Duration::from_mins(1);
/// The same when it ends.
const AGAIN_AT_THE_END: Duration = Duration::from_secs(2);
/// How long after a successor asked nothing new is begun.
const YIELDING: Duration = Duration::from_secs(10);
/// Longest time for a lock, in milliseconds.
const LONGEST_LOCK: u32 = 60_000;

/// A pod and a device.
type Key = (String, String);

/// A park, and what is done about it.
#[derive(Debug)]
struct Held<A> {
    entry: Entry,
    /// Its memory is being moved.
    mover: Option<Mover>,
    /// Where to.
    aim: Aim,
    /// Since when.
    began: Instant,
    /// Who waits for it.
    asker: Option<A>,
    /// Workers that died on this way.
    deaths: u32,
    /// When the next worker is due, if this way is to go on.
    due: Option<Instant>,
    /// When the keeper tried by itself.
    tried: Option<Instant>,
}

/// A reply that is due: to whom, and what.
pub(crate) type Due<A> = (A, Result<Moved, Refusal>);

/// Every park of the node. `A` is whoever asks.
#[derive(Debug)]
pub(crate) struct Parks<A> {
    journal: Journal,
    libraries: Libraries,
    held: BTreeMap<Key, Held<A>>,
    ended: mpsc::UnboundedSender<Ended>,
    /// The PID namespace that this keeper is in.
    namespace: String,
    started: u64,
    /// Why nothing can be parked.
    unable: Option<String>,
    /// The journal does not say yet what is so.
    unwritten: bool,
    /// When there was an agent.
    agent: Instant,
    /// A successor waits until then that nothing is under way.
    yielding: Option<Instant>,
    /// The keeper ends: everything is brought back.
    ending: bool,
}

impl<A: Copy> Parks<A> {
    /// Takes up what the journal in a directory says. The end of each way goes to `ended`.
    pub(crate) fn take_up(
        directory: PathBuf,
        libraries: Libraries,
        ended: mpsc::UnboundedSender<Ended>,
    ) -> Self {
        let journal = Journal::new(directory);
        let entries = journal.read().unwrap_or_else(|error| {
            error!(%error, "what is parked on this node is not known: restart pods that do not answer");
            Vec::new()
        });
        let now = Instant::now();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let namespace = namespace.to_string_lossy().into_owned();
        let mut held = BTreeMap::new();
        for mut entry in entries {
            let (aim, due) = match entry.state {
                // Its processes are not to be seen from here.
                _ if entry.namespace != namespace => (Aim::Run, None),
                ParkState::Parking => (Aim::Settle, Some(now)),
                ParkState::Restoring => (Aim::Run, Some(now)),
                _ => (Aim::Run, None),
            };
            if entry.state == ParkState::Other {
                entry.state = ParkState::Parked;
            }
            let key = (entry.pod.clone(), entry.device.clone());
            let taken =
                Held { entry, mover: None, aim, began: now, asker: None, deaths: 0, due, tried: None };
            held.insert(key, taken);
        }
        if !held.is_empty() {
            info!(parks = held.len(), "taking up what an earlier keeper had parked");
        }
        Self {
            journal,
            libraries,
            held,
            ended,
            namespace,
            started: 0,
            unable: None,
            unwritten: false,
            agent: now,
            yielding: None,
            ending: false,
        }
    }

    /// For the agent.
    pub(crate) fn status(&self) -> Parking {
        let parks = self.held.values().map(|Held { entry, .. }| Park {
            pod: entry.pod.clone(),
            device: entry.device.clone(),
            bytes: entry.bytes,
            state: entry.state,
            since: entry.since,
            message: entry.message.clone(),
        });
        Parking { unable: self.unable.clone(), parks: parks.collect() }
    }

    /// Whether nothing is under way, nor about to be.
    pub(crate) fn is_quiet(&self) -> bool {
        self.held.values().all(|held| held.mover.is_none() && held.due.is_none())
    }

    /// What is parked, or on its way, and can be brought back from here.
    pub(crate) fn owed(&self) -> Owed {
        let here = |held: &&Held<A>| held.entry.state != ParkState::Lost && self.sees(held);
        self.held.values().filter(here).fold(Owed::default(), |owed, held| Owed {
            parks: owed.parks.saturating_add(1),
            bytes: owed.bytes.saturating_add(held.entry.bytes),
        })
    }

    /// Whether the processes of a park are to be seen from here.
    fn sees(&self, held: &Held<A>) -> bool {
        held.entry.namespace == self.namespace
    }

    /// Begins nothing new for a while: a successor waits.
    pub(crate) fn yield_to_successor(&mut self) {
        self.yielding = Some(Instant::now() + YIELDING);
    }

    /// Begins to park.
    pub(crate) fn park(&mut self, asker: A, ask: ParkAsk) -> Result<(), Refusal> {
        let ParkAsk { pod, device, mut processes, bytes, lock_milliseconds } = ask;
        if !is_key(&pod) || !is_uuid(&device) {
            return Err(Refusal::new(Reason::Malformed, "not the UID of a pod and the UUID of a device"));
        }
        processes.sort_unstable();
        processes.dedup();
        if processes.is_empty() || processes.len() > MOST_PROCESSES || processes.iter().any(|p| p.pid <= 1) {
            let why = format!("between 1 and {MOST_PROCESSES} processes are parked together");
            return Err(Refusal::new(Reason::Malformed, why));
        }
        self.may_begin(&pod, &device)?;
        if let Some(why) = &self.unable {
            return Err(Refusal::new(Reason::Unable, why.clone()));
        }
        if let Some(gone) = processes.iter().find(|process| !is_there(**process)) {
            let why = format!(
                "process {} is not there, or not to be seen by the keeper: parking needs the keeper in the host's \
                 PID namespace (keeper.park.enabled)",
                gone.pid
            );
            return Err(Refusal::new(Reason::NotFound, why));
        }
        let key = (pod.clone(), device.clone());
        if self.held.contains_key(&key) {
            return Err(Refusal::new(Reason::Busy, "this pod's memory on this device is parked already"));
        }
        if self.held.len() >= MOST_PARKS {
            return Err(Refusal::new(
                Reason::Full,
                format!("{MOST_PARKS} pods are parked, which is the limit"),
            ));
        }
        let entry = Entry {
            pod,
            device,
            processes,
            bytes,
            since: milliseconds(),
            lock_milliseconds: lock_milliseconds.clamp(1, LONGEST_LOCK),
            state: ParkState::Parking,
            namespace: self.namespace.clone(),
            message: None,
        };
        let now = Instant::now();
        let held = Held {
            entry,
            mover: None,
            aim: Aim::Park,
            began: now,
            asker: Some(asker),
            deaths: 0,
            due: None,
            tried: None,
        };
        self.held.insert(key.clone(), held);
        if let Err(error) = self.write() {
            // Without it a death in the middle would not be noticed.
            self.held.remove(&key);
            return Err(Refusal::new(Reason::Full, format!("cannot write down what is parked: {error}")));
        }
        self.start(&key);
        Ok(())
    }

    /// Begins to restore. The answer, where nothing is parked.
    pub(crate) fn restore(&mut self, asker: A, pod: &str, device: &str) -> Result<Option<Moved>, Refusal> {
        let key = (pod.to_owned(), device.to_owned());
        let Some(held) = self.held.get(&key) else {
            return Ok(Some(Moved { state: ParkState::Running, message: None, milliseconds: 0 }));
        };
        if held.entry.state == ParkState::Lost {
            let message = held.entry.message.clone();
            return Ok(Some(Moved { state: ParkState::Lost, message, milliseconds: 0 }));
        }
        self.may_begin(pod, device)?;
        self.bring_back(&key, Some(asker));
        Ok(None)
    }

    fn may_begin(&self, pod: &str, device: &str) -> Result<(), Refusal> {
        if self.ending || self.yielding.is_some_and(|until| until > Instant::now()) {
            return Err(Refusal::new(Reason::HandingOver, "another keeper is taking over: ask again"));
        }
        let held = self.held.get(&(pod.to_owned(), device.to_owned()));
        if held.is_some_and(|held| held.mover.is_some() || held.due.is_some()) {
            return Err(Refusal::new(Reason::Busy, "this pod's memory is being moved already"));
        }
        if held.is_some_and(|held| !self.sees(held)) {
            let why = "it was parked by a keeper in another PID namespace: set keeper.park.enabled to bring it back, \
                       or delete the pod";
            return Err(Refusal::new(Reason::Unable, why));
        }
        Ok(())
    }

    /// Starts to bring a park back.
    fn bring_back(&mut self, key: &Key, asker: Option<A>) {
        let Some(held) = self.held.get_mut(key) else { return };
        held.entry.state = ParkState::Restoring;
        (held.aim, held.asker, held.deaths) = (Aim::Run, asker, 0);
        held.began = Instant::now();
        // Whoever reads "parked" after a death does no harm by it.
        self.unwritten |= self.write().is_err();
        self.start(key);
    }

    fn start(&mut self, key: &Key) {
        let Some(held) = self.held.get_mut(key) else { return };
        self.started += 1;
        let way = Way {
            aim: held.aim,
            processes: held.entry.processes.clone(),
            lock_milliseconds: held.entry.lock_milliseconds,
        };
        held.due = None;
        let device = &held.entry.device;
        held.mover = Some(Mover::start(device, self.started, way, &self.libraries, self.ended.clone()));
    }

    /// A way came to its end. Returns the reply that is due.
    pub(crate) fn on_ended(&mut self, ended: Ended) -> Option<Due<A>> {
        let is_its = |held: &Held<A>| held.mover.as_ref().is_some_and(|mover| mover.number == ended.number);
        let key = self.held.iter().find(|(_, held)| is_its(held)).map(|(key, _)| key.clone())?;
        let held = self.held.get_mut(&key)?;
        held.mover = None;
        let told = match ended.told {
            Ok(told) => told,
            Err(how) => {
                held.deaths += 1;
                warn!(pod = key.0, device = key.1, how, "a worker that moved memory is gone");
                if held.deaths < MOST_DEATHS {
                    if held.aim == Aim::Park {
                        held.aim = Aim::Settle;
                    }
                    held.due = Some(Instant::now() + AFTER_DEATH);
                    return None;
                }
                Told { place: Some(Place::Parked), message: Some(how), unable: false }
            }
        };
        let due = self.settle(&key, told);
        self.unwritten |= self.write().is_err();
        due
    }

    fn settle(&mut self, key: &Key, told: Told) -> Option<Due<A>> {
        let Told { place, message, unable } = told;
        let message = message.map(shortened);
        let held = self.held.get_mut(key)?;
        let asker = held.asker.take();
        let began = held.began;
        let aim = held.aim;
        let Some(place) = place else {
            // The driver could not be used, so nothing was moved by this worker.
            if unable {
                self.unable.clone_from(&message);
            }
            let why = message.clone().unwrap_or_default();
            warn!(pod = key.0, device = key.1, why, "memory cannot be moved");
            if aim == Aim::Park {
                self.held.remove(key);
            } else {
                (held.entry.state, held.entry.message) = (ParkState::Parked, message);
            }
            return asker.map(|asker| (asker, Err(Refusal::new(Reason::Unable, why))));
        };
        let state = match place {
            Place::Running => ParkState::Running,
            Place::Parked => ParkState::Parked,
            Place::Lost => ParkState::Lost,
        };
        let milliseconds = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let why = message.as_deref();
        info!(pod = key.0, device = key.1, ?aim, ?state, milliseconds, why, "memory was moved");
        if state == ParkState::Running {
            self.held.remove(key);
        } else {
            (held.entry.state, held.entry.message) = (state, message.clone());
        }
        asker.map(|asker| (asker, Ok(Moved { state, message, milliseconds })))
    }

    /// Looks after what is due. `agent`: whether one is connected. Returns the replies that are due.
    pub(crate) fn on_tick(&mut self, agent: bool, now: Instant) -> Vec<Due<A>> {
        if agent {
            self.agent = now;
        }
        let mut due = Vec::new();
        // Processes that ended took with them what they had.
        let gone = |held: &Held<A>| {
            held.mover.is_none() && self.sees(held) && !held.entry.processes.iter().any(|p| is_there(*p))
        };
        let ended = self.held.iter().filter(|(_, held)| gone(held));
        let ended: Vec<_> = ended.map(|(key, _)| key.clone()).collect();
        for key in ended {
            info!(pod = key.0, device = key.1, "the processes of a parked pod have ended");
            let Some(held) = self.held.remove(&key) else { continue };
            let message = Some("its processes have ended".to_owned());
            let moved = Moved { state: ParkState::Running, message, milliseconds: 0 };
            due.extend(held.asker.map(|asker| (asker, Ok(moved))));
            self.unwritten = true;
        }
        let ready = self.held.iter().filter(|(_, held)| held.due.is_some_and(|at| at <= now));
        let ready: Vec<_> = ready.map(|(key, _)| key.clone()).collect();
        for key in ready {
            self.start(&key);
        }
        if self.ending || self.agent + AWAY < now {
            self.bring_next_back(now);
        }
        if self.unwritten {
            self.unwritten = self.write().inspect_err(|error| warn!(%error, "the journal of parks")).is_err();
        }
        due
    }

    /// Brings back, by the keeper's own decision, whoever has been parked for longest.
    fn bring_next_back(&mut self, now: Instant) {
        if !self.is_quiet() {
            return;
        }
        let again = if self.ending { AGAIN_AT_THE_END } else { AGAIN };
        let may = |held: &Held<A>| {
            let parked = held.entry.state == ParkState::Parked && self.sees(held);
            parked && held.tried.is_none_or(|tried| tried + again < now)
        };
        let parked = self.held.iter().filter(|(_, held)| may(held));
        let Some(key) =
            parked.min_by_key(|(_, held)| (held.tried, held.entry.since)).map(|(key, _)| key.clone())
        else {
            return;
        };
        let why = if self.ending { "the keeper ends" } else { "there is no agent" };
        info!(pod = key.0, device = key.1, why, "bringing back what is parked");
        if let Some(held) = self.held.get_mut(&key) {
            held.tried = Some(now);
        }
        self.bring_back(&key, None);
    }

    /// Brings everything back from now on, and begins nothing else.
    pub(crate) fn end(&mut self) {
        self.ending = true;
    }

    /// The journal as it should be.
    fn write(&self) -> std::io::Result<()> {
        let entries: Vec<_> = self.held.values().map(|held| &held.entry).collect();
        self.journal.write(&entries)
    }

    /// Forgets everything: another keeper answers for it.
    pub(crate) fn let_go(&mut self) {
        self.held.clear();
        self.unwritten = false;
    }
}

fn milliseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A text that fits its field.
fn shortened(mut text: String) -> String {
    if text.len() > LONGEST_MESSAGE {
        let mut end = LONGEST_MESSAGE;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::keeper_protocol::Process;

    const POD: &str = "6b0f3c52-66f2-4a52-9f0e-0c1d2e3f4a5b";
    const DEVICE: &str = "GPU-00000000-0000-0000-0000-000000000001";

    fn own() -> Process {
        let pid = i32::try_from(std::process::id()).unwrap();
        Process { pid, started: process::started(Path::new("/proc"), pid).unwrap() }
    }

    fn ask() -> ParkAsk {
        ParkAsk {
            pod: POD.into(),
            device: DEVICE.into(),
            processes: vec![own()],
            bytes: 1 << 30,
            lock_milliseconds: 100,
        }
    }

    fn parks(directory: &Path) -> Parks<u32> {
        let libraries = Libraries { driver_library: None, cuda_library: None };
        // The ways of these tests go nowhere: what they come to is said by the tests.
        Parks::take_up(directory.to_owned(), libraries, mpsc::unbounded_channel().0)
    }

    fn end(parks: &mut Parks<u32>, told: Result<Told, String>) -> Option<Due<u32>> {
        let number = parks.started;
        parks.on_ended(Ended { number, told })
    }

    #[allow(clippy::unnecessary_wraps, reason = "as it comes of a worker")]
    fn told(place: Place) -> Result<Told, String> {
        Ok(Told { place: Some(place), message: None, unable: false })
    }

    fn state(parks: &Parks<u32>) -> Option<ParkState> {
        parks.status().find(POD, DEVICE).map(|park| park.state)
    }

    #[tokio::test]
    async fn a_park_is_written_down_before_it_begins_and_listed_until_it_is_back() {
        let directory = tempfile::tempdir().unwrap();
        let mut parks = parks(directory.path());
        parks.park(1, ask()).unwrap();
        assert_eq!(state(&parks), Some(ParkState::Parking));
        assert_eq!(Journal::new(directory.path().to_owned()).read().unwrap()[0].state, ParkState::Parking);
        assert!(!parks.is_quiet());
        assert_eq!(parks.park(2, ask()).unwrap_err().reason, Reason::Busy);
        assert_eq!(parks.restore(2, POD, DEVICE).unwrap_err().reason, Reason::Busy);
        let (asker, moved) = end(&mut parks, told(Place::Parked)).unwrap();
        assert_eq!((asker, moved.unwrap().state), (1, ParkState::Parked));
        assert_eq!(parks.park(2, ask()).unwrap_err().reason, Reason::Busy);
        assert!(parks.restore(3, POD, DEVICE).unwrap().is_none());
        assert_eq!(state(&parks), Some(ParkState::Restoring));
        let (asker, moved) = end(&mut parks, told(Place::Running)).unwrap();
        assert_eq!((asker, moved.unwrap().state), (3, ParkState::Running));
        assert_eq!(state(&parks), None);
        assert_eq!(parks.restore(3, POD, DEVICE).unwrap().unwrap().state, ParkState::Running);
        assert_eq!(Journal::new(directory.path().to_owned()).read().unwrap(), []);
    }

    #[tokio::test]
    async fn whoever_asks_for_what_makes_no_sense_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let mut parks = parks(directory.path());
        let reason = |parks: &mut Parks<u32>, change: fn(&mut ParkAsk)| {
            let mut ask = ask();
            change(&mut ask);
            parks.park(1, ask).unwrap_err().reason
        };
        assert_eq!(reason(&mut parks, |ask| ask.processes.clear()), Reason::Malformed);
        assert_eq!(reason(&mut parks, |ask| ask.processes[0].pid = 1), Reason::Malformed);
        assert_eq!(reason(&mut parks, |ask| ask.processes[0].pid = -1), Reason::Malformed);
        assert_eq!(reason(&mut parks, |ask| ask.pod = "../x y".into()), Reason::Malformed);
        assert_eq!(reason(&mut parks, |ask| ask.device = "0".into()), Reason::Malformed);
        // Of a process that has ended, or another one with its number.
        assert_eq!(reason(&mut parks, |ask| ask.processes[0].started += 1), Reason::NotFound);
        fs::create_dir(directory.path().join("parks.json.new")).unwrap();
        assert_eq!(reason(&mut parks, |_| ()), Reason::Full, "it cannot be written down");
        assert!(parks.status().parks.is_empty());
    }

    #[tokio::test]
    async fn a_dead_worker_is_followed_by_others_that_undo() {
        let directory = tempfile::tempdir().unwrap();
        let mut parks = parks(directory.path());
        parks.park(1, ask()).unwrap();
        for death in 1..MOST_DEATHS {
            assert!(end(&mut parks, Err("killed".into())).is_none(), "{death}");
            assert!(!parks.is_quiet());
            let held = parks.held.values_mut().next().unwrap();
            assert_eq!(held.aim, Aim::Settle);
            held.due = Some(Instant::now());
            assert!(parks.on_tick(true, Instant::now()).is_empty());
        }
        let (_, moved) = end(&mut parks, Err("killed".into())).unwrap();
        let moved = moved.unwrap();
        assert_eq!((moved.state, moved.message.as_deref()), (ParkState::Parked, Some("killed")));
        assert_eq!(state(&parks), Some(ParkState::Parked), "and may be asked to come back");
    }

    #[tokio::test]
    async fn the_next_keeper_goes_on_from_whatever_the_journal_says() {
        for (written, aim, goes_on) in [
            (ParkState::Parking, Aim::Settle, true),
            (ParkState::Restoring, Aim::Run, true),
            (ParkState::Parked, Aim::Run, false),
            (ParkState::Lost, Aim::Run, false),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let mut first = parks(directory.path());
            first.park(1, ask()).unwrap();
            first.held.values_mut().next().unwrap().entry.state = written;
            first.write().unwrap();
            // Killed here.
            drop(first);
            let mut second = parks(directory.path());
            assert_eq!((state(&second), second.is_quiet()), (Some(written), !goes_on), "{written:?}");
            second.on_tick(true, Instant::now());
            let held = second.held.values().next().unwrap();
            assert_eq!((held.mover.is_some(), held.aim), (goes_on, aim), "{written:?}");
            if goes_on {
                assert!(end(&mut second, told(Place::Running)).is_none(), "nobody waits for it");
                assert_eq!(state(&second), None);
            }
        }
    }

    #[tokio::test]
    async fn without_an_agent_everything_comes_back() {
        let directory = tempfile::tempdir().unwrap();
        let mut parks = parks(directory.path());
        parks.park(1, ask()).unwrap();
        end(&mut parks, told(Place::Parked));
        let mut now = Instant::now();
        parks.on_tick(true, now);
        now += AWAY / 2;
        parks.on_tick(false, now);
        assert_eq!(state(&parks), Some(ParkState::Parked));
        now += AWAY;
        parks.on_tick(false, now);
        assert_eq!(state(&parks), Some(ParkState::Restoring));
        // No room: again after a while.
        assert!(end(&mut parks, told(Place::Parked)).is_none());
        parks.on_tick(false, now);
        assert_eq!(state(&parks), Some(ParkState::Parked));
        now += AGAIN * 2;
        parks.on_tick(false, now);
        assert_eq!(state(&parks), Some(ParkState::Restoring));
        end(&mut parks, told(Place::Running));
        assert_eq!(parks.owed(), Owed::default());
    }

    #[tokio::test]
    async fn an_end_brings_everything_back_but_what_is_lost() {
        let directory = tempfile::tempdir().unwrap();
        let mut parks = parks(directory.path());
        assert_eq!(parks.owed(), Owed::default());
        parks.park(1, ask()).unwrap();
        assert_eq!(parks.owed(), Owed { parks: 1, bytes: 1 << 30 }, "also while it is on its way");
        end(&mut parks, told(Place::Parked));
        parks.end();
        assert_eq!(parks.park(1, ask()).unwrap_err().reason, Reason::HandingOver);
        parks.on_tick(false, Instant::now());
        assert_eq!(state(&parks), Some(ParkState::Restoring));
        end(&mut parks, told(Place::Lost));
        assert_eq!(parks.owed(), Owed::default());
        assert_eq!(parks.restore(1, POD, DEVICE).unwrap().unwrap().state, ParkState::Lost);
    }

    #[tokio::test]
    async fn a_driver_that_cannot_is_not_asked_again() {
        let directory = tempfile::tempdir().unwrap();
        let mut parks = parks(directory.path());
        parks.park(1, ask()).unwrap();
        let cannot = Told { place: None, message: Some("too old".into()), unable: true };
        assert_eq!(end(&mut parks, Ok(cannot)).unwrap().1.unwrap_err().reason, Reason::Unable);
        assert_eq!(parks.status().unable.as_deref(), Some("too old"));
        assert_eq!(parks.park(1, ask()).unwrap_err().reason, Reason::Unable);
        assert_eq!(parks.owed(), Owed::default());
    }

    #[tokio::test]
    async fn what_is_not_to_be_seen_from_here_is_neither_forgotten_nor_touched() {
        let directory = tempfile::tempdir().unwrap();
        let mut first = parks(directory.path());
        first.park(1, ask()).unwrap();
        let entry = &mut first.held.values_mut().next().unwrap().entry;
        entry.namespace = "pid:[1]".into();
        entry.processes[0].started += 1;
        first.write().unwrap();
        drop(first);
        let mut second = parks(directory.path());
        second.on_tick(true, Instant::now());
        assert!(second.is_quiet());
        assert_eq!(second.owed(), Owed::default());
        assert_eq!(state(&second), Some(ParkState::Parking));
        assert_eq!(second.restore(1, POD, DEVICE).unwrap_err().reason, Reason::Unable);
        assert_eq!(Journal::new(directory.path().to_owned()).read().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn processes_that_have_ended_are_parked_no_longer() {
        let directory = tempfile::tempdir().unwrap();
        let mut parks = parks(directory.path());
        parks.park(1, ask()).unwrap();
        end(&mut parks, told(Place::Lost));
        parks.held.values_mut().next().unwrap().entry.processes[0].started += 1;
        parks.on_tick(true, Instant::now());
        assert_eq!(state(&parks), None);
        assert_eq!(Journal::new(directory.path().to_owned()).read().unwrap(), []);
    }

    #[test]
    fn messages_are_cut_between_characters() {
        let text = "ä".repeat(LONGEST_MESSAGE);
        assert_eq!(shortened(text).len(), LONGEST_MESSAGE);
        assert_eq!(shortened(format!("x{}", "ä".repeat(LONGEST_MESSAGE))).len(), LONGEST_MESSAGE - 1);
    }
}
