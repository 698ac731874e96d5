//! Follows a script.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io::Write;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::cuda::{ContextHandle, Cuda, CudaError};
use crate::script::{OnRefusal, Script, Statement};
use crate::signals::{Signals, Terminated};
use crate::units::show;

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

/// Prints a line that tells apart processes and moments.
pub(crate) fn say(line: &str) {
    static START: OnceLock<Instant> = OnceLock::new();
    let elapsed = START.get_or_init(Instant::now).elapsed();
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
#[derive(Debug, Clone, Copy)]
struct Piece {
    kind: Kind,
    /// Address or handle.
    place: u64,
    size: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Managed,
    Physical,
}

/// A process on its way through a script.
pub(crate) struct Runner {
    signals: Signals,
    cuda: Option<Cuda>,
    device: c_int,
    /// The contexts that this process has, by device.
    contexts: BTreeMap<c_int, ContextHandle>,
    pieces: Vec<Piece>,
    children: Vec<Child>,
    on_refusal: OnRefusal,
}

impl Runner {
    /// At the start of a script.
    pub(crate) fn new(signals: Signals) -> Self {
        Self {
            signals,
            cuda: None,
            device: 0,
            contexts: BTreeMap::new(),
            pieces: Vec::new(),
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
            Err(Stop::Failed(reason)) => {
                say(&reason);
                self.end_children();
                FAILED
            }
            Err(Stop::Terminated) => {
                say("ends on request");
                self.end_children();
                self.tidy();
                0
            }
        }
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
            Statement::Allocate(bytes) => {
                self.take(Kind::Plain, *bytes)?;
            }
            Statement::Managed(bytes) => {
                self.take(Kind::Managed, *bytes)?;
            }
            Statement::Physical(bytes) => {
                self.take(Kind::Physical, *bytes)?;
            }
            Statement::Touch => self.touch()?,
            Statement::Grow { bytes_per_second, target } => self.grow(*bytes_per_second, *target)?,
            Statement::Leak { bytes, every, times } => self.leak(*bytes, *every, *times)?,
            Statement::Spike { bytes, lasting } => {
                if self.take(Kind::Plain, *bytes)? {
                    self.signals.wait(*lasting)?;
                    self.give_back(Some(*bytes))?;
                }
            }
            Statement::Hold(time) => {
                let deadline = time.map(|time| Instant::now() + time);
                self.signals.wait_until(deadline)?;
            }
            Statement::Free(bytes) => self.give_back(*bytes)?,
            Statement::Fork { children, script } => self.fork(*children, script)?,
            Statement::IgnoreTermination => self.signals.ignore(),
            Statement::WatchPressure(path) => crate::pressure::watch(path)
                .map_err(|error| Stop::Failed(format!("cannot watch {}: {error}", path.display())))?,
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
            if !self.take(Kind::Plain, each.min(target - self.held()))? {
                return Ok(());
            }
            next += period;
            self.signals.wait_until(Some(next))?;
        }
        Ok(())
    }

    fn leak(&mut self, bytes: u64, every: Duration, times: Option<u64>) -> Result<(), Stop> {
        let mut next = Instant::now();
        let mut left = times;
        while left != Some(0) {
            self.take(Kind::Plain, bytes)?;
            left = left.map(|left| left - 1);
            next += every;
            self.signals.wait_until(Some(next))?;
        }
        Ok(())
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
            self.signals.wait_until(Some(next))?;
        }
    }

    /// What serving a request takes: a little memory for a moment, and an answer of the device.
    fn beat(&self) -> Result<(), CudaError> {
        let Some(cuda) = &self.cuda else { return Ok(()) };
        let bytes = length(HEARTBEAT_BYTES);
        let address = cuda.allocate(bytes)?;
        let used = cuda.touch(address, bytes);
        cuda.free(address)?;
        used
    }

    /// Takes memory, by the rule for refusals. Whether there is more now.
    fn take(&mut self, kind: Kind, bytes: u64) -> Result<bool, Stop> {
        if kind != Kind::Physical {
            self.context()?;
        }
        let device = self.device;
        loop {
            let cuda = self.cuda()?;
            let taken = match kind {
                Kind::Plain => cuda.allocate(length(bytes)),
                Kind::Managed => cuda.allocate_managed(length(bytes)),
                Kind::Physical => cuda.create(device, length(bytes)),
            };
            match taken {
                Ok(place) => {
                    self.pieces.push(Piece { kind, place, size: bytes });
                    say(&format!("took {}: holds {}", show(bytes), show(self.held())));
                    return Ok(true);
                }
                Err(error) if error.is_refusal() => say(&format!("{error}: holds {}", show(self.held()))),
                Err(error) => return Err(error.into()),
            }
            match self.on_refusal {
                OnRefusal::Exit(status) => return Err(Stop::Exit(status)),
                OnRefusal::Continue => return Ok(false),
                OnRefusal::Retry => self.signals.wait(RETRY)?,
            }
        }
    }

    fn touch(&mut self) -> Result<(), Stop> {
        self.context()?;
        let addressed = self.pieces.iter().filter(|piece| piece.kind != Kind::Physical);
        let addressed: Vec<Piece> = addressed.copied().collect();
        let cuda = self.cuda()?;
        for piece in addressed {
            cuda.touch(piece.place, length(piece.size))?;
        }
        Ok(())
    }

    /// Gives back the newest pieces, at least so much; or everything.
    fn give_back(&mut self, bytes: Option<u64>) -> Result<(), Stop> {
        let mut left = bytes.unwrap_or(u64::MAX);
        while left > 0 {
            let Some(piece) = self.pieces.pop() else { break };
            let cuda = self.cuda()?;
            match piece.kind {
                Kind::Plain | Kind::Managed => cuda.free(piece.place)?,
                Kind::Physical => cuda.release(piece.place)?,
            }
            left = left.saturating_sub(piece.size);
        }
        say(&format!("gave back: holds {}", show(self.held())));
        Ok(())
    }

    /// Starts children. A process that has used the driver cannot go on with it in a copy of
    /// itself, so they begin anew as programs of their own.
    fn fork(&mut self, children: u32, script: &str) -> Result<(), Stop> {
        for _ in 0..children {
            let child = Command::new("/proc/self/exe").args(["--script", script]).spawn();
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
                self.signals.wait(RETRY)?;
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
                OnRefusal::Retry => self.signals.wait(RETRY)?,
            }
        };
        self.contexts.insert(device, context);
        say(&format!("has a context on device {device}"));
        Ok(())
    }

    /// The driver; opened when first needed.
    fn cuda(&mut self) -> Result<&Cuda, Stop> {
        if self.cuda.is_none() {
            let cuda = Cuda::open().map_err(|error| Stop::Failed(format!("no CUDA driver: {error}")))?;
            self.cuda = Some(cuda);
        }
        self.cuda.as_ref().ok_or_else(|| Stop::Failed("no CUDA driver".into()))
    }

    /// Bytes that the script took and has not given back.
    fn held(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.size).sum()
    }
}

/// As C counts bytes. More than fits is more than any device has, so the driver will refuse it.
fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
