//! Follows a script.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use clap::builder::PossibleValue;
use rustix::process::{Pid, Signal, kill_process};

use crate::cuda::{ContextHandle, Cuda, CudaError, IpcHandle, Place, STEP};
use crate::errands::{Answer, Errands, Wish};
use crate::loader::{Bypass, Lookup};
use crate::script::{OnRefusal, Script, Statement, Way};
use crate::signals::{Signals, Terminated, Woken};
use crate::units::show;
use crate::{engine, nvml, pressure, share};

/// Between two attempts to get memory that was refused.
const RETRY: Duration = Duration::from_millis(100);
/// Between two heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Memory grows in steps of so much time, but not in steps smaller than this.
const GROWTH_STEP: Duration = Duration::from_millis(50);
const SMALLEST_STEP: u64 = 2 << 20;
/// What a heartbeat takes, uses and gives back.
const HEARTBEAT_BYTES: u64 = 2 << 20;
/// Exit status when a call failed.
const FAILED: u8 = 1;

/// When this program started.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Begins to count the time that is told: also what comes before the first line takes its time.
pub(crate) fn start_clock() {
    LazyLock::force(&START);
}

/// Prints a line that tells apart processes and moments.
pub(crate) fn say(line: &str) {
    let elapsed = START.elapsed();
    // Nobody may be listening any more; the memory matters, not the words.
    let _ = writeln!(std::io::stdout(), "[{}] {:.3}s {line}", std::process::id(), elapsed.as_secs_f64());
}

/// Why a script ends before its last statement.
#[derive(Debug)]
enum Stop {
    /// A signal asked for it.
    Terminated,
    /// It, or a refusal, asked for it.
    Exit(u8),
    /// A call failed.
    Failed(String),
    /// Memory was refused, and nothing has been said yet.
    Refused(CudaError),
    /// A call failed, and nothing has been said yet.
    Cuda(CudaError),
}

impl From<Terminated> for Stop {
    fn from(_: Terminated) -> Self {
        Self::Terminated
    }
}

impl From<CudaError> for Stop {
    fn from(error: CudaError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// A piece of memory that the script holds.
#[derive(Debug)]
struct Piece {
    place: Place,
    size: u64,
}

/// How to get at the driver.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Access {
    pub(crate) lookup: Lookup,
    pub(crate) bypass: Option<Bypass>,
}

/// A process on its way through a script.
pub(crate) struct Runner {
    signals: Signals,
    errands: Errands,
    access: Access,
    cuda: Option<Cuda>,
    device: c_int,
    /// The contexts that this process has, by device.
    contexts: BTreeMap<c_int, ContextHandle>,
    pieces: Vec<Piece>,
    /// What an engine gives back when it is asked to.
    cache: Vec<Piece>,
    /// What it held, and of that its cache, when it was sent to sleep.
    asleep: Option<(u64, u64)>,
    /// Descriptors that keep memory of whomever.
    descriptors: Vec<OwnedFd>,
    children: Vec<Child>,
    on_refusal: OnRefusal,
}

impl Runner {
    /// At the start of a script.
    pub(crate) fn new(signals: Signals, errands: Errands, access: Access) -> Self {
        Self {
            signals,
            errands,
            access,
            cuda: None,
            device: 0,
            contexts: BTreeMap::new(),
            pieces: Vec::new(),
            cache: Vec::new(),
            asleep: None,
            descriptors: Vec::new(),
            children: Vec::new(),
            on_refusal: OnRefusal::Exit(FAILED),
        }
    }

    /// Follows a script to its end, and says with which status to exit.
    pub(crate) fn run(&mut self, script: &Script) -> u8 {
        let end = script.0.iter().try_for_each(|statement| self.step(statement));
        let end = end.and_then(|()| self.await_children());
        match end {
            Ok(()) => {
                say("script ended");
                0
            }
            Err(Stop::Exit(status)) => {
                say(&format!("exits with {status}"));
                status
            }
            Err(Stop::Failed(reason)) => self.fail(&reason),
            Err(Stop::Refused(error) | Stop::Cuda(error)) => self.fail(&error.to_string()),
            Err(Stop::Terminated) => {
                say("ends on request");
                self.end_children();
                self.tidy();
                0
            }
        }
    }

    fn fail(&mut self, reason: &str) -> u8 {
        say(reason);
        self.end_children();
        FAILED
    }

    fn step(&mut self, statement: &Statement) -> Result<(), Stop> {
        match statement {
            Statement::Device(number) => {
                let device = self.cuda()?.device(*number)?;
                if let Some(context) = self.contexts.get(&device).copied() {
                    self.cuda()?.make_current(context)?;
                }
                self.device = device;
            }
            Statement::Context => self.context()?,
            Statement::Take(way, bytes) => {
                self.take(*way, *bytes)?;
            }
            Statement::ExpectRefusal(attempt) => self.expect_refusal(*attempt)?,
            Statement::Share { bytes, path } => self.share(*bytes, path)?,
            Statement::Import { path, map } => self.import(path, *map)?,
            Statement::Keep(path) => {
                let (descriptor, bytes) = take_descriptor(path)?;
                self.descriptors.push(descriptor);
                say(&format!("keeps a descriptor of {}", show(bytes)));
            }
            Statement::Offer { bytes, path } => self.offer(*bytes, path)?,
            Statement::Open(path) => self.open(path)?,
            Statement::Info => self.info()?,
            Statement::Synchronize => {
                self.context()?;
                let done = self.cuda()?.synchronize();
                self.report("synchronize", 0, done)?;
            }
            Statement::Trim => {
                self.context()?;
                let device = self.device;
                let done = self.cuda()?.trim(device);
                self.report("trim", 0, done)?;
            }
            Statement::Touch => self.touch()?,
            Statement::Grow { bytes_per_second, target } => self.grow(*bytes_per_second, *target)?,
            Statement::Leak { bytes, every, times } => self.leak(*bytes, *every, *times)?,
            Statement::Spike { bytes, lasting } => {
                if self.take(Way::Plain, *bytes)? {
                    self.wait(*lasting)?;
                    self.give_back(Some(*bytes))?;
                }
            }
            Statement::Hold(time) => {
                let deadline = time.map(|time| Instant::now() + time);
                self.wait_until(deadline)?;
            }
            Statement::Free(bytes) => self.give_back(*bytes)?,
            Statement::Fork { children, script } => self.fork(*children, script)?,
            Statement::IgnoreTermination => self.signals.ignore(),
            Statement::WatchPressure(path) => pressure::watch(path)
                .map_err(|error| Stop::Failed(format!("cannot watch {}: {error}", path.display())))?,
            Statement::Cache(bytes) => {
                if self.take(Way::Plain, *bytes)? {
                    self.cache.extend(self.pieces.pop());
                }
            }
            Statement::Engine { port, manner } => {
                let served = engine::serve(*port, manner.clone(), self.errands.asker());
                served.map_err(|error| Stop::Failed(format!("cannot serve at port {port}: {error}")))?;
            }
            Statement::Heed { what, path } => pressure::heed(path, *what, self.errands.asker())
                .map_err(|error| Stop::Failed(format!("cannot watch {}: {error}", path.display())))?,
            Statement::Retain => {
                self.context()?;
                let device = self.device;
                let done = self.cuda()?.retain(device);
                self.report("retain", 0, done)?;
            }
            Statement::Swing { bytes, every, times } => self.swing(*bytes, *every, *times)?,
            Statement::Serve => self.serve()?,
            Statement::OnRefusal(choice) => self.on_refusal = *choice,
            Statement::Exit(status) => return Err(Stop::Exit(*status)),
        }
        Ok(())
    }

    fn grow(&mut self, bytes_per_second: u64, target: u64) -> Result<(), Stop> {
        let each = bytes_per_second / u64::try_from(1_000 / GROWTH_STEP.as_millis()).unwrap_or(1);
        let each = each.max(SMALLEST_STEP).next_multiple_of(SMALLEST_STEP);
        let period = Duration::from_micros(each.saturating_mul(1_000_000) / bytes_per_second);
        let mut next = Instant::now();
        while self.held() < target {
            if !self.take(Way::Plain, each.min(target - self.held()))? {
                return Ok(());
            }
            next += period;
            self.wait_until(Some(next))?;
        }
        Ok(())
    }

    fn leak(&mut self, bytes: u64, every: Duration, times: Option<u64>) -> Result<(), Stop> {
        let mut next = Instant::now();
        let mut left = times;
        while left != Some(0) {
            self.take(Way::Plain, bytes)?;
            left = left.map(|left| left - 1);
            next += every;
            self.wait_until(Some(next))?;
        }
        Ok(())
    }

    fn swing(&mut self, bytes: u64, every: Duration, times: u64) -> Result<(), Stop> {
        let mut next = Instant::now();
        for _ in 0..times {
            let taken = self.take(Way::Plain, bytes)?;
            next += every;
            self.wait_until(Some(next))?;
            if taken {
                self.give_back(Some(bytes))?;
            }
            next += every;
            self.wait_until(Some(next))?;
        }
        Ok(())
    }

    /// Waits until `deadline`, or for ever, and does meanwhile what other threads ask for.
    fn wait_until(&mut self, deadline: Option<Instant>) -> Result<(), Stop> {
        while self.signals.wait_until(deadline, self.errands.bell())? == Woken::Bell {
            for errand in self.errands.take() {
                let answer = self.fulfil(errand.wish);
                errand.answer(answer);
            }
        }
        Ok(())
    }

    /// Waits for a time, likewise.
    fn wait(&mut self, time: Duration) -> Result<(), Stop> {
        self.wait_until(Some(Instant::now() + time))
    }

    fn fulfil(&mut self, wish: Wish) -> Answer {
        let failed = |error: CudaError| error.to_string();
        match wish {
            Wish::Flush => {
                let cache = std::mem::take(&mut self.cache);
                self.give_all_back(cache).map_err(failed)
            }
            Wish::Sleep => {
                let held = self.held();
                let cache = std::mem::take(&mut self.cache);
                let cached = cache.iter().map(|piece| piece.size).sum();
                self.asleep.get_or_insert((held, cached));
                let pieces = std::mem::take(&mut self.pieces);
                self.give_all_back(cache.into_iter().chain(pieces).collect()).map_err(failed)
            }
            Wish::WakeUp => {
                let Some((held, cached)) = self.asleep else { return Ok(0) };
                // The cache last, so that what it needs for its work is there first.
                if held > cached {
                    let piece = self.again(held - cached)?;
                    self.pieces.push(piece);
                    self.asleep = Some((cached, cached));
                }
                if cached > 0 {
                    let piece = self.again(cached)?;
                    self.cache.push(piece);
                }
                self.asleep = None;
                Ok(held)
            }
        }
    }

    /// Takes again what was given back to sleep.
    fn again(&mut self, bytes: u64) -> Result<Piece, String> {
        let Some(cuda) = &self.cuda else { return Err("there is no driver".to_owned()) };
        let place = cuda.allocate(length(bytes)).map_err(|error| error.to_string())?;
        Ok(Piece { place, size: bytes })
    }

    /// Gives pieces back; how much it was.
    fn give_all_back(&mut self, pieces: Vec<Piece>) -> Result<u64, CudaError> {
        let mut given = 0;
        for piece in pieces {
            if let Some(cuda) = &self.cuda {
                cuda.give_back(piece.place)?;
            }
            given += piece.size;
        }
        Ok(given)
    }

    fn serve(&mut self) -> Result<(), Stop> {
        self.context()?;
        let (mut succeeded, mut failed) = (0_u64, 0_u64);
        let mut next = Instant::now();
        loop {
            let last = match self.beat() {
                Ok(()) => {
                    succeeded += 1;
                    "CUDA_SUCCESS".to_owned()
                }
                Err(error) => {
                    failed += 1;
                    error.name
                }
            };
            say(&format!("serve used={} ok={succeeded} failed={failed} last={last}", self.held()));
            next += HEARTBEAT;
            self.wait_until(Some(next))?;
        }
    }

    /// What serving a request takes: a little memory for a moment, and an answer of the device.
    fn beat(&self) -> Result<(), CudaError> {
        let Some(cuda) = &self.cuda else { return Ok(()) };
        let bytes = length(HEARTBEAT_BYTES);
        let place = cuda.allocate(bytes)?;
        let used = match place {
            Place::Address(address) => cuda.touch(address, bytes),
            _ => Ok(()),
        };
        cuda.give_back(place)?;
        used
    }

    /// Takes memory, by the rule for refusals. Whether there is more now.
    fn take(&mut self, way: Way, bytes: u64) -> Result<bool, Stop> {
        self.context_for(way)?;
        loop {
            match self.attempt(way, bytes) {
                Ok(piece) => {
                    let size = piece.size;
                    self.pieces.push(piece);
                    say(&format!("took {}: holds {}", show(size), show(self.held())));
                    self.tell(way.name(), size, None);
                    return Ok(true);
                }
                Err(Stop::Refused(error)) => {
                    say(&format!("{error}: holds {}", show(self.held())));
                    self.tell(way.name(), bytes, Some(&error));
                }
                Err(Stop::Cuda(error)) => {
                    self.tell(way.name(), bytes, Some(&error));
                    return Err(Stop::Failed(error.to_string()));
                }
                Err(stop) => return Err(stop),
            }
            match self.on_refusal {
                OnRefusal::Exit(status) => return Err(Stop::Exit(status)),
                OnRefusal::Continue => return Ok(false),
                OnRefusal::Retry => self.wait(RETRY)?,
            }
        }
    }

    /// Makes the context that a way of taking memory needs.
    fn context_for(&mut self, way: Way) -> Result<(), Stop> {
        if way == Way::Physical { Ok(()) } else { self.context() }
    }

    /// Takes memory once.
    fn attempt(&mut self, way: Way, bytes: u64) -> Result<Piece, Stop> {
        let device = self.device;
        let cuda = self.cuda()?;
        let wanted = length(bytes);
        let stepwise = length(bytes.saturating_add(STEP - 1) / STEP * STEP);
        let place = match way {
            Way::Plain => cuda.allocate(wanted),
            Way::Pitch => cuda.allocate_pitch(wanted),
            Way::Managed => cuda.allocate_managed(wanted),
            Way::Physical => cuda.create(device, stepwise).map(Place::Physical),
            Way::Mapped => cuda.create(device, stepwise).and_then(|made| cuda.map(device, made, stepwise)),
            Way::Async => cuda.allocate_async(wanted),
            Way::Pool => cuda.allocate_from_pool(device, wanted),
            Way::Array => cuda.create_array(wanted),
            Way::Graph => cuda.launch_graph(device, wanted),
            Way::Capture => cuda.launch_captured(device, wanted),
            Way::Host => cuda.allocate_host(wanted),
        };
        match place {
            Ok(place) => Ok(Piece { place, size: bytes }),
            Err(error) if error.is_refusal() => Err(Stop::Refused(error)),
            Err(error) => Err(Stop::Cuda(error)),
        }
    }

    /// Goes on only where the driver refuses exactly as it does when memory is short.
    fn expect_refusal(&mut self, attempt: Option<(Way, u64)>) -> Result<(), Stop> {
        let (name, bytes) = attempt.map_or(("context", 0), |(way, bytes)| (way.name(), bytes));
        let refused = match attempt {
            None => {
                let device = self.device;
                let entered = self.cuda()?.enter(device);
                entered.map(|context| {
                    self.contexts.insert(device, context);
                })
            }
            Some((way, bytes)) => {
                self.context_for(way)?;
                match self.attempt(way, bytes) {
                    Ok(piece) => {
                        self.pieces.push(piece);
                        Ok(())
                    }
                    Err(Stop::Refused(error) | Stop::Cuda(error)) => Err(error),
                    Err(stop) => return Err(stop),
                }
            }
        };
        self.tell(name, bytes, refused.as_ref().err());
        match refused {
            Err(error) if error.is_refusal() => {
                say(&format!("{error}, as expected: holds {}", show(self.held())));
                Ok(())
            }
            Err(error) => Err(Stop::Failed(format!("expected CUDA_ERROR_OUT_OF_MEMORY (2), but {error}"))),
            Ok(()) => Err(Stop::Failed(format!(
                "expected CUDA_ERROR_OUT_OF_MEMORY (2), but {name} got {}",
                show(bytes)
            ))),
        }
    }

    /// Makes memory without a context, and a descriptor of it for whoever wants one.
    fn share(&mut self, bytes: u64, path: &Path) -> Result<(), Stop> {
        if !self.take(Way::Physical, bytes)? {
            return Ok(());
        }
        let Some(Piece { place: Place::Physical(handle), .. }) = self.pieces.last() else { return Ok(()) };
        let handle = *handle;
        let exported = self.cuda()?.export(handle);
        self.tell("export", bytes, exported.as_ref().err());
        let served = share::serve(path, exported?, bytes);
        served.map_err(|error| Stop::Failed(format!("cannot share at {}: {error}", path.display())))
    }

    /// Takes a share in memory that another process made.
    fn import(&mut self, path: &Path, map: bool) -> Result<(), Stop> {
        let (descriptor, bytes) = take_descriptor(path)?;
        if map {
            self.context()?;
        }
        let device = self.device;
        let cuda = self.cuda()?;
        let imported = cuda.import(descriptor.as_fd());
        let place = imported.and_then(|handle| {
            if map { cuda.map(device, handle, length(bytes)) } else { Ok(Place::Physical(handle)) }
        });
        self.tell("import", bytes, place.as_ref().err());
        self.pieces.push(Piece { place: place?, size: bytes });
        Ok(())
    }

    /// Takes memory that another process can open by a file.
    fn offer(&mut self, bytes: u64, path: &Path) -> Result<(), Stop> {
        if !self.take(Way::Plain, bytes)? {
            return Ok(());
        }
        let Some(Piece { place: Place::Address(address), .. }) = self.pieces.last() else { return Ok(()) };
        let address = *address;
        let offered = self.cuda()?.offer(address);
        self.tell("offer", bytes, offered.as_ref().err());
        let IpcHandle(handle) = offered?;
        // Whoever waits for the file must not find a part of it.
        let content: Vec<u8> = handle.iter().copied().chain(bytes.to_le_bytes()).collect();
        let new = path.with_extension("new");
        let written = std::fs::write(&new, content).and_then(|()| std::fs::rename(&new, path));
        written.map_err(|error| Stop::Failed(format!("cannot write {}: {error}", path.display())))
    }

    /// Opens memory that another process offers, once it does.
    fn open(&mut self, path: &Path) -> Result<(), Stop> {
        self.context()?;
        let content = loop {
            match std::fs::read(path) {
                Ok(content) => break content,
                Err(_) => self.wait(RETRY)?,
            }
        };
        let parts = content.split_first_chunk().zip(content.last_chunk());
        let Some(((handle, _), bytes)) = parts else {
            return Err(Stop::Failed(format!("{} is no offer", path.display())));
        };
        let bytes = u64::from_le_bytes(*bytes);
        let opened = self.cuda()?.open_offer(IpcHandle(*handle));
        self.tell("open", bytes, opened.as_ref().err());
        self.pieces.push(Piece { place: opened?, size: bytes });
        Ok(())
    }

    /// Prints what the driver and NVML say about the device's memory.
    fn info(&mut self) -> Result<(), Stop> {
        self.context()?;
        let (device, bypass) = (self.device, self.access.bypass);
        let cuda = self.cuda()?;
        let number = |result: &Result<usize, CudaError>| {
            result.as_ref().map_or_else(|_| "null".to_owned(), ToString::to_string)
        };
        let info = cuda.info();
        let (free, total) = match &info {
            Ok((free, total)) => (Ok(*free), Ok(*total)),
            Err(error) => (Err(error.clone()), Err(error.clone())),
        };
        let whole = cuda.total(device);
        let (old, new) = nvml::views(cuda.uuid(device)?, bypass);
        let old = match old {
            Ok(nvml::Memory { total, free, used }) => {
                format!("{{\"total\":{total},\"free\":{free},\"used\":{used}}}")
            }
            Err(code) => format!("{{\"code\":{code}}}"),
        };
        let new = match new {
            Ok(nvml::MemoryV2 { total, reserved, free, used, .. }) => {
                format!("{{\"total\":{total},\"reserved\":{reserved},\"free\":{free},\"used\":{used}}}")
            }
            Err(code) => format!("{{\"code\":{code}}}"),
        };
        say(&format!(
            "info {{\"device\":{device},\"code\":{},\"free\":{},\"total\":{},\"deviceTotal\":{},\"nvml\":{old},\"nvmlV2\":{new}}}",
            info.as_ref().err().map_or(0, |error| error.code),
            number(&free),
            number(&total),
            number(&whole),
        ));
        Ok(())
    }

    /// Says how a call ended, in a line for machines; fails as the call did.
    fn report(&self, name: &str, bytes: u64, result: Result<(), CudaError>) -> Result<(), Stop> {
        self.tell(name, bytes, result.as_ref().err());
        Ok(result?)
    }

    /// Prints how a statement's calls ended, in a line for machines.
    fn tell(&self, name: &str, bytes: u64, error: Option<&CudaError>) {
        let (code, text, call) =
            error.map_or((0, "CUDA_SUCCESS", "-"), |e| (e.code, e.name.as_str(), e.call));
        // One word, also where the driver has no name for the code.
        let text = text.replace(' ', "-");
        say(&format!(
            "result op={name} bytes={bytes} code={code} name={text} call={call} held={}",
            self.held()
        ));
    }

    fn touch(&mut self) -> Result<(), Stop> {
        self.context()?;
        let addressed = self.pieces.iter().filter_map(|piece| match piece.place {
            Place::Address(address)
            | Place::Async(address)
            | Place::Pool(address, _)
            | Place::Mapped(address, _) => Some((address, piece.size)),
            _ => None,
        });
        let addressed: Vec<(u64, u64)> = addressed.collect();
        let cuda = self.cuda()?;
        for (address, size) in addressed {
            cuda.touch(address, length(size))?;
        }
        Ok(())
    }

    /// Gives back the newest pieces, at least so much; or everything.
    fn give_back(&mut self, bytes: Option<u64>) -> Result<(), Stop> {
        let mut left = bytes.unwrap_or(u64::MAX);
        while left > 0 {
            let Some(piece) = self.pieces.pop() else { break };
            let given = self.cuda()?.give_back(piece.place);
            if let Err(error) = &given {
                self.tell("free", piece.size, Some(error));
            }
            given?;
            left = left.saturating_sub(piece.size);
        }
        if bytes.is_none() {
            self.descriptors.clear();
        }
        say(&format!("gave back: holds {}", show(self.held())));
        self.tell("free", bytes.unwrap_or(0), None);
        Ok(())
    }

    /// Starts children. A process that has used the driver cannot go on with it in a copy of
    /// itself, so they begin anew as programs of their own.
    fn fork(&mut self, children: u32, script: &str) -> Result<(), Stop> {
        for _ in 0..children {
            let child = Command::new("/proc/self/exe")
                .args(["--script", script])
                .args(self.access.arguments())
                .spawn();
            self.children
                .push(child.map_err(|error| Stop::Failed(format!("cannot start a child: {error}")))?);
        }
        Ok(())
    }

    /// Waits for the children; a failure of theirs is one of this process.
    fn await_children(&mut self) -> Result<(), Stop> {
        let mut worst = 0;
        while !self.children.is_empty() {
            self.children.retain_mut(|child| match child.try_wait() {
                Ok(None) => true,
                Ok(Some(status)) => {
                    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED);
                    say(&format!("child {} ended: {status}", child.id()));
                    worst = worst.max(code);
                    false
                }
                Err(error) => {
                    say(&format!("child {} is lost: {error}", child.id()));
                    worst = worst.max(FAILED);
                    false
                }
            });
            if !self.children.is_empty() {
                self.wait(RETRY)?;
            }
        }
        if worst == 0 { Ok(()) } else { Err(Stop::Exit(worst)) }
    }

    fn end_children(&mut self) {
        for child in &self.children {
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                // It may have ended already.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }

    /// Leaves as a well-behaved program does; failures do not matter any more.
    fn tidy(&mut self) {
        let _ = self.give_back(None);
        for device in std::mem::take(&mut self.contexts).into_keys() {
            let _ = self.cuda.as_ref().map(|cuda| cuda.leave(device));
        }
    }

    /// Makes the device's context, unless this process has it.
    fn context(&mut self) -> Result<(), Stop> {
        let device = self.device;
        if self.contexts.contains_key(&device) {
            return Ok(());
        }
        let context = loop {
            match self.cuda()?.enter(device) {
                Ok(context) => break context,
                Err(error) if error.is_refusal() => say(&error.to_string()),
                Err(error) => return Err(error.into()),
            }
            match self.on_refusal {
                OnRefusal::Exit(status) => return Err(Stop::Exit(status)),
                OnRefusal::Continue => {
                    return Err(Stop::Failed("there is no going on without a context".into()));
                }
                OnRefusal::Retry => self.wait(RETRY)?,
            }
        };
        self.contexts.insert(device, context);
        say(&format!("has a context on device {device}"));
        Ok(())
    }

    /// The driver; opened when first needed.
    fn cuda(&mut self) -> Result<&Cuda, Stop> {
        if self.cuda.is_none() {
            let Access { lookup, bypass } = self.access;
            let cuda = Cuda::open(lookup, bypass)
                .map_err(|error| Stop::Failed(format!("no CUDA driver: {error}")))?;
            self.cuda = Some(cuda);
        }
        self.cuda.as_ref().ok_or_else(|| Stop::Failed("no CUDA driver".into()))
    }

    /// Bytes that the script took and has not given back.
    fn held(&self) -> u64 {
        self.pieces.iter().chain(&self.cache).map(|piece| piece.size).sum()
    }
}

impl Access {
    /// The arguments by which a child gets at the driver in the same way.
    fn arguments(self) -> Vec<String> {
        let name =
            |value: Option<PossibleValue>| value.map_or(String::new(), |value| value.get_name().to_owned());
        let mut arguments = vec!["--lookup".to_owned(), name(self.lookup.to_possible_value())];
        if let Some(bypass) = self.bypass {
            arguments.extend(["--bypass".to_owned(), name(bypass.to_possible_value())]);
        }
        arguments
    }
}

/// A descriptor and the size of what it keeps, from whoever shares it at a path.
fn take_descriptor(path: &Path) -> Result<(OwnedFd, u64), Stop> {
    let failed = |error| Stop::Failed(format!("no descriptor from {}: {error}", path.display()));
    share::take(path).map_err(failed)
}

/// As C counts bytes. More than fits is more than any device has, so the driver will refuse it.
fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
