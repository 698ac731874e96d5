//! The sample step: a thread of its own that asks the driver, since the driver may hang.
//!
//! One thread samples all devices in turn. Should a call on one device not return, the watchdog
//! ([`Sampler::watch`]) leaves that thread behind with its device and starts another for the
//! rest; the device is tried again some time after the call came back.
//!
//! Between two samples the thread waits. It takes one early when the loop asks for it, and, where that
//! matters, soon after a process that used a device has ended: its memory is free then.

use std::{
    collections::{HashMap, VecDeque},
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use highwater_crds::StrengthReason;
use highwater_gpu::{Device, DeviceInfo, Driver, LimitError, Reading, Unavailable};
use highwater_policy::ledger::{Charge, Holder};
use jiff::Timestamp;
use rustix::event::{
    EventfdFlags, Timespec,
    epoll::{self, CreateFlags, Event, EventData, EventFlags},
    eventfd,
};
use tracing::{error, info, warn};

use crate::{
    attribute::{Attributor, Owner},
    limits::{Failure, Outcome, Task},
};

/// How long a call on a device may take before the device is called unresponsive. Long enough for
/// a node whose processors are all taken.
const HANG: Duration = Duration::from_secs(5);
/// How often the list of devices is read again.
const INVENTORY_EVERY: Duration = Duration::from_secs(10);
/// How often to try to let go of the driver while a call holds it.
const CLOSE_AGAIN: Duration = Duration::from_millis(250);
/// How long to wait before the driver is tried again.
const OPEN_AGAIN: Duration = Duration::from_secs(5);
/// Least time between two samples, whoever asks for one.
const SOONEST: Duration = Duration::from_millis(10);
/// How long after the end of a process a sample is taken, and another: the driver frees its memory some
/// milliseconds after its end is seen.
const AFTER_END: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(30));
/// How long a device that hung is left alone: doubled each time, up to the second.
const LEAVE_ALONE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(1));

/// What the sampler has to say.
#[derive(Debug)]
pub(crate) enum Report {
    /// The driver is open; these are the devices.
    Opened {
        /// Version of the driver.
        version: String,
        /// The devices in the driver's order.
        devices: Vec<DeviceInfo>,
        /// The driver can keep limits itself.
        limits: bool,
    },
    /// The driver could not be opened: why, and what to change.
    Failed(String),
    /// Every handle is about to be closed, as asked: what holds the last.
    Closing(String),
    /// Every handle is closed, as asked.
    Closed,
    /// All devices that answer were sampled.
    Pass(Pass),
    /// A limit was, or was not, given to the driver.
    Limited(Outcome),
}

/// One sample of every device.
#[derive(Debug)]
pub(crate) struct Pass {
    /// When it began, on the monotonic clock.
    pub(crate) at: Instant,
    /// When it began, for people.
    pub(crate) wall: Timestamp,
    /// How much later than planned it began.
    pub(crate) late: Duration,
    /// How long it took.
    pub(crate) took: Duration,
    /// The samples.
    pub(crate) devices: Vec<Sampled>,
}

/// One sample of one device.
#[derive(Debug)]
pub(crate) struct Sampled {
    /// UUID.
    pub(crate) uuid: Arc<str>,
    /// What the driver said.
    pub(crate) reading: Reading,
    /// Its processes with their owners. `None` where the driver does not list them.
    pub(crate) charges: Option<Vec<Charge>>,
}

/// What the sampler is made with.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Time between samples.
    pub(crate) interval: Duration,
    /// Path of the driver's library.
    pub(crate) library: Option<PathBuf>,
    /// `/proc` of the host.
    pub(crate) proc_root: PathBuf,
}

/// The handle on the sampling thread.
pub(crate) struct Sampler {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Settings,
    send: Box<dyn Fn(Report) + Send + Sync>,
    /// Ends a wait. Absent where the kernel gives none: then it ends when its time is over.
    wake: Option<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
struct State {
    stand_down: bool,
    stopped: bool,
    /// The present thread's number; a thread with another one has been left behind.
    epoch: u64,
    thread: Option<Thread>,
    /// A sample is asked for at once.
    soon: bool,
    /// The end of a process is worth a sample.
    eager: bool,
    /// Limits to give to the driver, with the cgroups.
    limits: VecDeque<(Task, Vec<PathBuf>)>,
    /// The one that is being given.
    limiting: Option<Task>,
    /// The call that the present thread is in.
    call: Option<Call>,
    driver: Option<Arc<Driver>>,
    /// The devices as last listed.
    infos: Vec<DeviceInfo>,
    /// The same, with the driver's handles.
    devices: Devices,
    hung: HashMap<Arc<str>, Hung>,
}

/// Devices by UUID. Each is locked for as long as it is sampled: a thread that was left behind
/// keeps the lock of its device, which its successor leaves alone.
type Devices = Vec<(Arc<str>, Arc<Mutex<Device>>)>;

struct Call {
    device: Option<Arc<str>>,
    since: Instant,
}

/// A device that did not answer.
struct Hung {
    times: u32,
    /// When to try it again; `None` while the call has not returned.
    until: Option<Instant>,
}

impl Sampler {
    /// Starts sampling, or stands down from the start. `send` must not block.
    pub(crate) fn start(
        settings: Settings,
        stand_down: bool,
        send: impl Fn(Report) + Send + Sync + 'static,
    ) -> Self {
        let state = Mutex::new(State { stand_down, ..State::default() });
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok();
        let shared = Arc::new(Shared { settings, send: Box::new(send), wake, state });
        spawn(&shared, &mut shared.lock());
        Self { shared }
    }

    /// Closes every handle, or opens the driver again.
    pub(crate) fn stand_down(&self, yes: bool) {
        let mut state = self.shared.lock();
        if state.stand_down != yes {
            state.stand_down = yes;
            self.shared.wake(&state);
        }
    }

    /// Takes the next sample at once.
    pub(crate) fn soon(&self) {
        let mut state = self.shared.lock();
        if !std::mem::replace(&mut state.soon, true) {
            self.shared.wake(&state);
        }
    }

    /// Whether the end of a process is worth a sample.
    pub(crate) fn eager(&self, yes: bool) {
        self.shared.lock().eager = yes;
    }

    /// Gives a limit to the driver, for these cgroups of a pod. The outcome is reported.
    pub(crate) fn limit(&self, task: Task, cgroups: Vec<PathBuf>) {
        self.shared.lock().limits.push_back((task, cgroups));
    }

    /// Ends sampling; the thread ends as soon as the driver lets it.
    pub(crate) fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        self.shared.wake(&state);
    }

    /// Looks whether a call hangs. Returns the devices that do not answer, and how long the
    /// driver as a whole has not, should that be it. To be called every so often.
    pub(crate) fn watch(&self) -> (Vec<Arc<str>>, Option<Duration>) {
        let mut state = self.shared.lock();
        let mut blocked = None;
        let overdue = state.call.as_ref().filter(|call| call.since.elapsed() >= HANG);
        match overdue.map(|call| (call.device.clone(), call.since)) {
            Some((Some(device), _)) => {
                warn!(%device, "the driver does not answer about this device: the others go on without it");
                let hung = state.hung.entry(device).or_insert(Hung { times: 0, until: None });
                hung.times = hung.times.saturating_add(1);
                hung.until = None;
                state.call = None;
                if let Some(task) = state.limiting.take() {
                    let result = Err(Failure::Refused("the call does not return".to_owned()));
                    (self.shared.send)(Report::Limited(Outcome { task, result }));
                }
                spawn(&self.shared, &mut state);
            }
            Some((None, since)) => blocked = Some(since.elapsed()),
            None => {}
        }
        (state.hung.keys().cloned().collect(), blocked)
    }
}

impl Shared {
    /// Ends the present thread's wait.
    fn wake(&self, state: &State) {
        if let Some(wake) = &self.wake {
            // Full means that it is awake already.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
        if let Some(thread) = &state.thread {
            thread.unpark();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call that the watchdog minds. `None` if this thread was left behind meanwhile.
    fn call<T>(&self, epoch: u64, device: Option<&Arc<str>>, call: impl FnOnce() -> T) -> Option<T> {
        self.lock().call = Some(Call { device: device.cloned(), since: Instant::now() });
        let value = call();
        let mut state = self.lock();
        if state.epoch == epoch {
            state.call = None;
            return Some(value);
        }
        if let Some(hung) = device.and_then(|device| state.hung.get_mut(device)) {
            let (first, most) = LEAVE_ALONE;
            let pause = first.saturating_mul(1 << hung.times.saturating_sub(1).min(8)).min(most);
            hung.until = Some(Instant::now() + pause);
        }
        None
    }
}

/// Starts a thread that takes the place of the present one.
fn spawn(shared: &Arc<Shared>, state: &mut State) {
    state.epoch += 1;
    let epoch = state.epoch;
    let of_thread = Arc::clone(shared);
    let spawned = thread::Builder::new()
        .name(format!("sampler-{epoch}"))
        .stack_size(512 << 10)
        .spawn(move || Sampling::new(&of_thread, epoch).run());
    match spawned {
        Ok(handle) => state.thread = Some(handle.thread().clone()),
        Err(error) => error!(%error, "no thread for sampling"),
    }
}

/// The thread's own state.
struct Sampling<'a> {
    shared: &'a Shared,
    epoch: u64,
    attributor: Attributor,
    /// Ready when the wait is to end, or a known process has ended.
    waits: Option<OwnedFd>,
    /// When another sample is worth taking, because a process ended.
    echo: Option<Instant>,
    driver: Option<Arc<Driver>>,
    /// The driver that is to be let go of, while a call that does not return has it as well.
    closing: Option<Arc<Driver>>,
    devices: Devices,
    infos: Vec<DeviceInfo>,
    /// When the devices were last listed.
    listed: Option<Instant>,
    said: Said,
}

/// What was reported last, so that it is said once.
#[derive(PartialEq)]
enum Said {
    Nothing,
    Opened,
    Closing(String),
    Closed,
    Failed(String),
}

impl<'a> Sampling<'a> {
    fn new(shared: &'a Shared, epoch: u64) -> Self {
        let (driver, infos, devices) = {
            let state = shared.lock();
            (state.driver.clone(), state.infos.clone(), state.devices.clone())
        };
        let attributor = Attributor::new(shared.settings.proc_root.clone());
        let waits = waits(shared, &attributor);
        // A successor goes on with the list and the handles of the thread that was left behind:
        // asking for these might hang as well.
        let successor = !infos.is_empty();
        Self {
            shared,
            epoch,
            attributor,
            waits,
            echo: None,
            driver,
            closing: None,
            devices,
            infos,
            listed: successor.then(Instant::now),
            said: if successor { Said::Opened } else { Said::Nothing },
        }
    }

    fn run(mut self) {
        let interval = self.shared.settings.interval;
        let mut next = Instant::now();
        loop {
            let stand_down = {
                let state = self.shared.lock();
                if state.stopped || state.epoch != self.epoch {
                    return;
                }
                state.stand_down
            };
            let Some(pause) = (if stand_down { self.close() } else { self.work(next) }) else { return };
            let now = Instant::now();
            next = if pause.is_zero() { (next + interval).max(now) } else { now + pause };
            if pause.is_zero()
                && let Some(echo) = self.echo.take()
            {
                next = next.min(echo.max(now));
            }
            self.wait(&mut next, stand_down);
        }
    }

    /// Waits until `next`, which comes nearer if a sample is worth taking before.
    fn wait(&mut self, next: &mut Instant, stand_down: bool) {
        let began = Instant::now();
        loop {
            let now = Instant::now();
            let Some(left) = next.checked_duration_since(now).filter(|left| !left.is_zero()) else { return };
            let ended = self.pause(left);
            let mut state = self.shared.lock();
            if state.stopped || state.stand_down != stand_down || state.epoch != self.epoch {
                // What was waited for is not to be waited for any longer.
                *next = Instant::now();
                return;
            }
            if stand_down {
                continue;
            }
            let now = Instant::now();
            if std::mem::take(&mut state.soon) {
                *next = (*next).min(now.max(began + SOONEST));
            }
            if ended && state.eager {
                let (first, second) = AFTER_END;
                *next = (*next).min((now + first).max(began + SOONEST));
                self.echo = Some(now + second);
            }
        }
    }

    /// Waits until somebody wakes the thread. Says whether a process ended meanwhile.
    fn pause(&self, left: Duration) -> bool {
        let Some(waits) = &self.waits else {
            thread::park_timeout(left);
            return false;
        };
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 2];
        let count = epoll::wait(waits, &mut events[..], Some(&timeout)).unwrap_or(0);
        let mut ended = false;
        for event in events.iter().take(count) {
            let data = event.data; // the struct is packed
            match data.u64() {
                WOKEN => {
                    let mut woken = [0; 8];
                    if let Some(wake) = &self.shared.wake {
                        let _ = rustix::io::read(wake, &mut woken);
                    }
                }
                _ => ended = true,
            }
        }
        ended
    }

    /// Lets go of the driver. `None` if this thread was left behind; else how long to wait.
    fn close(&mut self) -> Option<Duration> {
        self.devices.clear();
        self.infos.clear();
        self.listed = None;
        let (last, hung) = {
            let mut state = self.shared.lock();
            state.infos.clear();
            state.devices.clear();
            let hung: Vec<_> = state.hung.drain().map(|(uuid, _)| uuid.to_string()).collect();
            (state.driver.take(), hung.join(", "))
        };
        // Both are the same, should there be both.
        let last = last.or(self.driver.take()).or(self.closing.take());
        self.driver = None;
        match last.map(Arc::try_unwrap) {
            None => {}
            Some(Ok(driver)) => {
                if let Err(error) = self.shared.call(self.epoch, None, || driver.close())? {
                    warn!(%error, "closing the driver");
                }
            }
            Some(Err(held)) => {
                self.closing = Some(held);
                if !matches!(self.said, Said::Closing(_)) {
                    let device =
                        if hung.is_empty() { String::new() } else { format!(" about device {hung}") };
                    self.say(Said::Closing(format!(
                        "a call of the driver{device} has not returned and keeps it open"
                    )));
                }
                return Some(CLOSE_AGAIN);
            }
        }
        self.say(Said::Closed);
        Some(Duration::from_hours(1)) // until woken
    }

    /// One round: opens the driver if need be, lists the devices if it is time, samples. `None`
    /// if this thread was left behind; else how long to wait, 0 being until the next sample.
    fn work(&mut self, planned: Instant) -> Option<Duration> {
        if let Some(driver) = self.closing.take() {
            self.shared.lock().driver = Some(Arc::clone(&driver));
            self.driver = Some(driver);
        }
        if self.driver.is_none() {
            let library = self.shared.settings.library.clone();
            match self.shared.call(self.epoch, None, || Driver::open(library.as_deref()))? {
                Ok(driver) => {
                    info!(version = driver.version(), "the driver is open");
                    let driver = Arc::new(driver);
                    self.shared.lock().driver = Some(Arc::clone(&driver));
                    self.driver = Some(driver);
                }
                Err(error) => {
                    self.say(Said::Failed(error.to_string()));
                    return Some(OPEN_AGAIN);
                }
            }
        }
        let due = self.listed.is_none_or(|listed| listed.elapsed() >= INVENTORY_EVERY);
        if due && self.shared.lock().hung.is_empty() {
            self.list()?;
        }
        self.sample(planned)
    }

    /// Reads the list of devices and reports it if it changed.
    fn list(&mut self) -> Option<()> {
        let driver = Arc::clone(self.driver.as_ref()?);
        self.listed = Some(Instant::now());
        let inventory = match self.shared.call(self.epoch, None, || driver.inventory())? {
            Ok(inventory) => inventory,
            Err(error) => {
                warn!(%error, "cannot list the devices: the last list stands");
                return Some(());
            }
        };
        let mut infos = inventory.devices;
        // A device that cannot be asked for the moment is still there.
        let kept = self.infos.iter().filter(|old| {
            inventory.failed.iter().any(|(index, _)| *index == old.index)
                && infos.iter().all(|i| i.uuid != old.uuid)
        });
        let kept: Vec<_> = kept.cloned().collect();
        infos.extend(kept);
        if self.said != Said::Opened || infos != self.infos {
            self.said = Said::Opened;
            self.devices = devices(&infos);
            self.infos.clone_from(&infos);
            let mut state = self.shared.lock();
            state.infos.clone_from(&infos);
            state.devices.clone_from(&self.devices);
            drop(state);
            let (version, limits) = (driver.version().to_owned(), driver.limits().is_ok());
            (self.shared.send)(Report::Opened { version, devices: infos, limits });
        }
        Some(())
    }

    fn sample(&mut self, planned: Instant) -> Option<Duration> {
        let driver = Arc::clone(self.driver.as_ref()?);
        let (at, wall) = (Instant::now(), Timestamp::now());
        let mut readings = Vec::with_capacity(self.devices.len());
        for (uuid, device) in &self.devices {
            if self.shared.lock().leaves_alone(uuid) {
                continue;
            }
            let sample = || driver.sample(&mut device.lock().unwrap_or_else(PoisonError::into_inner));
            let reading = self.shared.call(self.epoch, Some(uuid), sample)?;
            self.shared.lock().hung.remove(uuid);
            readings.push((Arc::clone(uuid), reading));
        }
        self.attributor.begin_sample();
        let devices = readings
            .into_iter()
            .map(|(uuid, reading)| {
                let charges = reading.processes.as_deref().map(|processes| {
                    processes
                        .iter()
                        .map(|process| {
                            let owner = self.attributor.owner(process.pid);
                            // Of nobody knows whom: then what pods and others hold is not known.
                            let bytes = process.bytes.filter(|_| owner != Owner::Unknown);
                            Charge { pid: process.pid, bytes, holder: holder(owner) }
                        })
                        .collect()
                });
                Sampled { uuid, reading, charges }
            })
            .collect();
        let late = at.saturating_duration_since(planned);
        (self.shared.send)(Report::Pass(Pass { at, wall, late, took: at.elapsed(), devices }));
        self.limit(&driver)?;
        Some(Duration::ZERO)
    }

    /// Gives the driver the limits that wait. `None` if this thread was left behind.
    fn limit(&mut self, driver: &Driver) -> Option<()> {
        loop {
            let (task, cgroups) = {
                let mut state = self.shared.lock();
                let Some((task, cgroups)) = state.limits.pop_front() else { return Some(()) };
                state.limiting = Some(task.clone());
                (task, cgroups)
            };
            let left_alone = self.shared.lock().leaves_alone(&task.device);
            let result = if left_alone {
                Err(Failure::Refused("the device does not answer".to_owned()))
            } else {
                let set = || limit(driver, &task, &cgroups);
                self.shared.call(self.epoch, Some(&task.device), set)?
            };
            self.shared.lock().limiting = None;
            (self.shared.send)(Report::Limited(Outcome { task, result }));
        }
    }

    fn say(&mut self, what: Said) {
        if self.said == what {
            return;
        }
        match &what {
            Said::Closing(why) => {
                warn!("{why}");
                (self.shared.send)(Report::Closing(why.clone()));
            }
            Said::Closed => (self.shared.send)(Report::Closed),
            Said::Failed(why) => {
                warn!("{why}");
                (self.shared.send)(Report::Failed(why.clone()));
            }
            Said::Nothing | Said::Opened => {}
        }
        self.said = what;
    }
}

impl State {
    /// Whether a device that hung is to be left alone for now.
    fn leaves_alone(&self, uuid: &Arc<str>) -> bool {
        self.hung.get(uuid).is_some_and(|hung| hung.until.is_none_or(|until| Instant::now() < until))
    }
}

/// What tells the two apart that end a wait.
const WOKEN: u64 = 0;
const ENDED: u64 = 1;

/// What a thread waits for.
fn waits(shared: &Shared, attributor: &Attributor) -> Option<OwnedFd> {
    let waits = epoll::create(CreateFlags::CLOEXEC).ok()?;
    epoll::add(&waits, shared.wake.as_ref()?, EventData::new_u64(WOKEN), EventFlags::IN).ok()?;
    if let Some(exits) = attributor.exits() {
        // Told once for each end: they are noted at the next sample only.
        epoll::add(&waits, exits, EventData::new_u64(ENDED), EventFlags::IN | EventFlags::ET).ok()?;
    }
    Some(waits)
}

/// Sets, or lifts, the limit of a pod's cgroups.
fn limit(driver: &Driver, task: &Task, cgroups: &[PathBuf]) -> Result<(), Failure> {
    let unavailable = |error: Unavailable| {
        let reason = match &error {
            Unavailable::NoCgroup2 { .. } => StrengthReason::NoCgroupV2,
            Unavailable::Mig => StrengthReason::KernelLimitsMig,
            _ => StrengthReason::NoKernelLimits,
        };
        Failure::Unavailable(reason, error.to_string())
    };
    let limits = driver.limits().map_err(unavailable)?;
    let Some((pod, containers)) = cgroups.split_first() else { return Err(Failure::NoCgroup) };
    let set = |cgroup: &PathBuf| match task.bytes {
        Some(bytes) => limits.set(&task.device, cgroup, bytes),
        None => limits.clear(&task.device, cgroup),
    };
    set(pod).map_err(|error| match error {
        LimitError::Unavailable(error) => unavailable(error),
        LimitError::Call(error) => Failure::Refused(error.to_string()),
    })?;
    for container in containers {
        // It may have ended meanwhile, and the pod's own limit holds all of them.
        if let Err(error) = set(container) {
            warn!(cgroup = %container.display(), %error, "a container is not shown the limit of its pod");
        }
    }
    Ok(())
}

fn devices(infos: &[DeviceInfo]) -> Devices {
    let device = |info: &DeviceInfo| Arc::new(Mutex::new(Device::new(info.uuid.as_str())));
    infos.iter().map(|info| (info.uuid.as_str().into(), device(info))).collect()
}

fn holder(owner: Owner) -> Holder {
    match owner {
        Owner::Pod(owner) => {
            Holder::Container { pod: Arc::clone(&owner.pod_uid), container: owner.container_id.clone() }
        }
        Owner::Foreign | Owner::Unknown => Holder::Foreign,
        Owner::Gone => Holder::Gone,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// A sampler on a node without a driver, and what it reports.
    fn sampler() -> (Sampler, Receiver<Report>) {
        started(false)
    }

    fn started(stand_down: bool) -> (Sampler, Receiver<Report>) {
        let (send, receive) = channel();
        let settings = Settings {
            interval: Duration::from_millis(10),
            library: Some("/nonexistent/libnvidia-ml.so.1".into()),
            proc_root: "/proc".into(),
        };
        let sampler = Sampler::start(settings, stand_down, move |report| drop(send.send(report)));
        (sampler, receive)
    }

    fn report(receive: &Receiver<Report>) -> Report {
        receive.recv_timeout(Duration::from_mins(1)).unwrap()
    }

    /// Makes it seem that the present thread has been in a call for long.
    fn hang(sampler: &Sampler, device: Option<&Arc<str>>) {
        let since = Instant::now().checked_sub(2 * HANG).unwrap();
        sampler.shared.lock().call = Some(Call { device: device.cloned(), since });
    }

    #[test]
    fn a_node_without_a_driver_is_told_once_and_stands_down_when_asked() {
        let (sampler, receive) = sampler();
        assert!(matches!(report(&receive), Report::Failed(why) if why.contains("--driver-library")));
        sampler.stand_down(true);
        assert!(matches!(report(&receive), Report::Closed));
        sampler.stand_down(false);
        assert!(matches!(report(&receive), Report::Failed(_)));
        sampler.stop();
    }

    #[test]
    fn a_device_that_hangs_is_left_behind_until_some_time_after_it_answers() {
        let (sampler, receive) = sampler();
        report(&receive);
        let device: Arc<str> = "GPU-1".into();
        let epoch = sampler.shared.lock().epoch;
        hang(&sampler, Some(&device));
        assert_eq!(sampler.watch(), (vec![Arc::clone(&device)], None));
        assert!(matches!(report(&receive), Report::Failed(_)), "another thread goes on");
        assert!(sampler.shared.lock().leaves_alone(&device));
        assert_eq!(sampler.shared.lock().hung[&device].until, None, "for as long as the call lasts");
        // The call returns to the thread that was left behind.
        assert_eq!(sampler.shared.call(epoch, Some(&device), || ()), None);
        assert!(sampler.shared.lock().hung[&device].until.is_some());
        assert!(sampler.shared.lock().leaves_alone(&device), "it is given a rest first");
        sampler.stop();
    }

    #[test]
    fn who_stands_down_has_no_device_that_hangs_and_may_do_so_from_the_start() {
        let (sampler, receive) = started(true);
        assert!(matches!(report(&receive), Report::Closed), "the driver was not tried");
        sampler.stand_down(false);
        assert!(matches!(report(&receive), Report::Failed(_)));
        hang(&sampler, Some(&"GPU-1".into()));
        sampler.watch();
        assert!(matches!(report(&receive), Report::Failed(_)));
        sampler.stand_down(true);
        assert!(matches!(report(&receive), Report::Closed));
        assert_eq!(sampler.watch(), (vec![], None));
        sampler.stop();
    }

    #[test]
    fn a_driver_that_does_not_answer_at_all_is_told() {
        let (sampler, receive) = sampler();
        report(&receive);
        hang(&sampler, None);
        let (devices, blocked) = sampler.watch();
        assert!(devices.is_empty() && blocked.unwrap() >= HANG);
        sampler.stop();
    }
}
