//! What is held of one device, and what is being done about it.

use std::{collections::BTreeMap, os::fd::OwnedFd, time::Duration};

use highwater_policy::pool::ladder;
use tokio::{sync::mpsc, time::Instant};
use tracing::{debug, warn};

use super::Asker;
use crate::{
    args::Libraries,
    descriptors::{Chunks, Descriptor},
    keeper_protocol::{DeviceStatus, End, Reason, Refusal, Reserved},
    worker::{self, Order, Worker},
};

/// How often an attempt is planned anew, with smaller chunks, because less was free than planned.
const MOST_PLANS: u32 = 6;
/// How long a device is left alone before its chunks are put in order.
const CALM: Duration = Duration::from_secs(5);
/// How long until that is tried again where there was no room for it.
const UNTIDY: Duration = Duration::from_mins(1);

/// A device.
#[derive(Debug, Default)]
pub(super) struct Device {
    /// What is held.
    pub(super) chunks: Chunks,
    worker: Option<Worker>,
    /// Workers started so far, to tell their events apart.
    started: u64,
    /// What is being made.
    attempt: Option<Attempt>,
    /// What comes next.
    next: Option<Attempt>,
    /// What releases gave back beyond what was asked for, to be made again after that.
    excess: u64,
    /// How many times descriptors are being closed.
    pub(super) closing: usize,
    /// Chunks that finer or coarser ones took the place of, to be closed.
    pub(super) tidied: Option<Vec<Descriptor>>,
    /// Chunks are not put in order until then.
    untidy_until: Option<Instant>,
    /// What was to stay free when the agent last said.
    keep_free: Option<u64>,
    /// When the worker last had something to do.
    busy: Option<Instant>,
    /// See [`DeviceStatus::last_error`].
    pub(super) last_error: Option<String>,
}

/// Memory that is being made.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct Attempt {
    /// Who waits for it. `None`: the keeper's own.
    asker: Option<Asker>,
    /// What to make. `None`: planned when it begins.
    chunks: Option<ladder::Chunks>,
    /// What is still to be made.
    left: u64,
    taken: u64,
    keep_free: u64,
    plans: u32,
    /// The worker was told to stop.
    stopped: bool,
    /// The worker has its order.
    begun: bool,
    /// It makes up for an excess.
    again: bool,
    /// It asks for nothing but a worker that is ready.
    warms: bool,
    /// What to close when all is made. What was made is closed instead if not all was.
    replaces: Option<ladder::Chunks>,
    made: ladder::Chunks,
}

impl Attempt {
    /// An attempt that the agent asked for.
    pub(super) fn asked(asker: Asker, bytes: u64, keep_free: u64) -> Self {
        let own = Self::own(ladder::Chunks::NONE, keep_free);
        let left = bytes - bytes % ladder::GRAIN;
        Self { asker: Some(asker), chunks: None, left, warms: left == 0, ..own }
    }

    /// An attempt to make again what was given back beyond what was asked for.
    fn again(bytes: u64, keep_free: u64) -> Self {
        Self { chunks: None, left: bytes, again: true, ..Self::own(ladder::Chunks::NONE, keep_free) }
    }

    /// An attempt of the keeper's own.
    fn own(chunks: ladder::Chunks, keep_free: u64) -> Self {
        Self {
            asker: None,
            left: chunks.bytes(),
            chunks: Some(chunks),
            taken: 0,
            keep_free,
            plans: 0,
            stopped: false,
            begun: false,
            again: false,
            warms: false,
            replaces: None,
            made: ladder::Chunks::NONE,
        }
    }
}

/// What a release begins with.
#[derive(Debug)]
pub(super) struct Release {
    /// To be closed.
    pub(super) descriptors: Vec<Descriptor>,
    /// How much that is.
    pub(super) bytes: u64,
    /// How much of it was not asked for.
    pub(super) excess: u64,
}

impl Device {
    /// A device of which something is held.
    pub(super) fn holding(chunks: Chunks) -> Self {
        Self { chunks, ..Self::default() }
    }

    pub(super) fn status(&self, uuid: &str) -> DeviceStatus {
        let chunks = self.chunks.sizes().map(|(size, count)| (size >> 20, count));
        DeviceStatus {
            uuid: uuid.to_owned(),
            ballast_bytes: self.chunks.bytes(),
            chunks: chunks.collect::<BTreeMap<_, _>>(),
            busy: self.attempt.is_some() || self.closing > 0,
            worker: self.worker.as_ref().and_then(|worker| worker.pid),
            last_error: self.last_error.clone(),
        }
    }

    /// Whether nothing changes what is held.
    pub(super) fn is_quiet(&self) -> bool {
        self.attempt.is_none() && self.worker.is_none() && self.closing == 0
    }

    /// Whether every handle is closed.
    pub(super) fn is_closed(&self) -> bool {
        self.is_quiet() && self.chunks.bytes() == 0
    }

    /// Puts an attempt of the agent's in line, before any of the keeper's own. Returns the answer where
    /// there is one at once.
    pub(super) fn enqueue(&mut self, attempt: Attempt) -> Result<Option<Reserved>, Refusal> {
        if attempt.warms {
            if self.attempt.is_some() || self.next.is_some() {
                // The worker is at work, or about to be.
                return Ok(Some(self.reserved(&attempt, End::Complete, None, None)));
            }
            // It says nothing of what is to stay free.
            self.next = Some(attempt);
            return Ok(None);
        }
        let asked = |attempt: &Option<Attempt>| {
            attempt.as_ref().is_some_and(|a| a.asker.is_some() && !a.stopped && !a.warms)
        };
        if asked(&self.attempt) || asked(&self.next) {
            return Err(Refusal::new(Reason::Busy, "memory of this device is being reserved already"));
        }
        self.interrupt();
        self.excess = 0;
        self.keep_free = Some(attempt.keep_free);
        self.next = Some(attempt);
        Ok(None)
    }

    /// Makes no more of what an earlier agent asked for: the new one knows nothing of it.
    pub(super) fn forsake(&mut self) {
        self.next.take_if(|next| next.asker.is_some());
        self.attempt.take_if(|attempt| attempt.asker.is_some() && !attempt.begun);
        if self.attempt.as_ref().is_some_and(|attempt| attempt.asker.is_some()) {
            self.interrupt();
        }
    }

    /// Lets memory be made again after a release that gave back too much. A reservation that the
    /// agent asks for takes its place.
    pub(super) fn remake(&mut self, bytes: u64, keep_free: u64) {
        self.keep_free = Some(keep_free);
        self.excess = self.excess.saturating_add(bytes);
    }

    /// Tells the worker to make no more.
    fn interrupt(&mut self) {
        if let Some(attempt) = &mut self.attempt
            && !std::mem::replace(&mut attempt.stopped, true)
            && let Some(worker) = &self.worker
        {
            worker.order(Order::Stop {});
        }
    }

    /// Begins to give back memory; `None` if there is none. The worker is told to stop before
    /// anything is closed, so that it does not take what is given back.
    pub(super) fn begin_release(&mut self, bytes: u64) -> Option<Release> {
        self.interrupt();
        self.next.take_if(|next| next.asker.is_none());
        let ladder::Exchange { close, remake } = ladder::release(&self.chunks.on_ladder(), bytes);
        let (mut descriptors, mut given) = self.chunks.take(&close);
        let mut excess = remake.bytes();
        if given < bytes {
            // Chunks of an older keeper may be of sizes that the planner does not know.
            let (others, more) = self.chunks.take_all();
            descriptors.extend(others);
            given = given.saturating_add(more);
            excess = 0;
        }
        // It is somebody's from now on, until the agent says anew what is to stay free.
        self.keep_free = self.keep_free.map(|keep| keep.saturating_add(given.saturating_sub(excess)));
        (!descriptors.is_empty()).then_some(Release { descriptors, bytes: given, excess })
    }

    /// Ends whatever is under way. Returns what is answered for it.
    pub(super) fn stop(&mut self) -> Vec<(Asker, Reserved)> {
        self.excess = 0;
        let dropped = self.next.take().and_then(|next| self.answer(&next, End::Interrupted, None, None));
        if let Some(worker) = &self.worker {
            if let Some(attempt) = &mut self.attempt {
                attempt.stopped = true;
            }
            worker.end();
            return dropped.into_iter().collect();
        }
        let attempt =
            self.attempt.take().and_then(|attempt| self.answer(&attempt, End::Interrupted, None, None));
        attempt.into_iter().chain(dropped).collect()
    }

    /// Begins what is next, if nothing is under way. Returns what is answered where it cannot.
    pub(super) fn go_on(
        &mut self,
        uuid: &str,
        libraries: &Libraries,
        events: &mpsc::Sender<worker::Event>,
    ) -> Option<(Asker, Reserved)> {
        if self.attempt.is_none() {
            let again =
                || (self.excess > 0).then(|| Attempt::again(self.excess, self.keep_free.unwrap_or(u64::MAX)));
            self.attempt = self.next.take().or_else(again);
        }
        let mut attempt = self.attempt.take_if(|attempt| !attempt.begun)?;
        if self.worker.is_none() {
            self.started += 1;
            match Worker::start(uuid, self.started, libraries, events.clone()) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => {
                    let why = format!("cannot start a worker: {error}");
                    warn!(device = uuid, error = why);
                    self.last_error = Some(why.clone());
                    self.make_up(&attempt, End::Failed);
                    return self.answer(&attempt, End::Failed, Some(why), None);
                }
            }
        }
        attempt.begun = true;
        self.order(&mut attempt);
        self.attempt = Some(attempt);
        None
    }

    /// Gives the worker its order.
    fn order(&mut self, attempt: &mut Attempt) {
        self.busy = Some(Instant::now());
        let chunks = match attempt.chunks.take() {
            Some(chunks) => chunks,
            None => ladder::plan(&self.chunks.on_ladder(), attempt.left),
        };
        // The finest first: if it ends early, there is what exact amounts are made of.
        let mut chunks: Vec<_> = chunks.iter().filter(|(_, count)| *count > 0).collect();
        chunks.sort_unstable();
        if let Some(worker) = &self.worker {
            worker.order(Order::Make { chunks, keep_free: attempt.keep_free });
        }
    }

    /// What is still in excess after an attempt: nothing, unless it was interrupted.
    fn make_up(&mut self, attempt: &Attempt, end: End) {
        if attempt.again {
            let rest = self.excess.saturating_sub(attempt.taken);
            self.excess = if end == End::Interrupted { rest } else { 0 };
        }
    }

    /// Takes what the worker made.
    pub(super) fn made(&mut self, chunks: Vec<(u64, OwnedFd)>) {
        for (size, chunk) in chunks {
            self.chunks.add(size, chunk);
            if let Some(attempt) = &mut self.attempt {
                attempt.made.add(size, 1);
                attempt.taken = attempt.taken.saturating_add(size);
                attempt.left = attempt.left.saturating_sub(size);
            }
        }
    }

    /// The worker ended an order. Returns what is answered.
    pub(super) fn ended(
        &mut self,
        number: u64,
        end: End,
        message: Option<String>,
        free: Option<u64>,
    ) -> Option<(Asker, Reserved)> {
        if self.worker.as_ref().is_none_or(|worker| worker.number != number) {
            return None;
        }
        self.busy = Some(Instant::now());
        let mut attempt = self.attempt.take()?;
        let room = free.unwrap_or(0).saturating_sub(attempt.keep_free);
        let room = room - room % ladder::GRAIN;
        attempt.plans += 1;
        // What is left may still fit in smaller chunks.
        let again = end == End::KeepFree
            && attempt.replaces.is_none()
            && !attempt.stopped
            && attempt.plans < MOST_PLANS
            && room.min(attempt.left) >= ladder::GRAIN;
        if again {
            let chunks = ladder::plan(&self.chunks.on_ladder(), room.min(attempt.left));
            attempt.chunks = Some(chunks);
            self.order(&mut attempt);
            self.attempt = Some(attempt);
            return None;
        }
        // Planned anew for less than was asked for: complete, and still short.
        let end = if end == End::Complete && attempt.left >= ladder::GRAIN { End::KeepFree } else { end };
        match end {
            End::Complete => self.last_error = None,
            End::Refused | End::Failed => self.last_error.clone_from(&message),
            End::KeepFree | End::Interrupted => {}
        }
        self.replace(&mut attempt, end == End::Complete);
        self.make_up(&attempt, end);
        self.answer(&attempt, end, message, free)
    }

    /// Ends an attempt that was to take the place of other chunks: those go, or what was made.
    fn replace(&mut self, attempt: &mut Attempt, complete: bool) {
        let Some(replaced) = attempt.replaces.take() else { return };
        let gone = if complete { replaced } else { attempt.made };
        self.tidied = Some(self.chunks.take(&gone).0).filter(|gone| !gone.is_empty());
        self.untidy_until = (!complete).then(|| Instant::now() + UNTIDY);
    }

    /// The attempt cannot go on. Returns what is answered.
    pub(super) fn fail(&mut self, why: &str) -> Option<(Asker, Reserved)> {
        self.interrupt();
        let attempt = self.attempt.as_mut()?;
        let asker = attempt.asker.take()?;
        let (bytes, ballast_bytes) = (attempt.taken, self.chunks.bytes());
        let message = Some(why.to_owned());
        Some((asker, Reserved { bytes, ballast_bytes, end: End::Failed, message, free_bytes: None }))
    }

    /// The worker is gone. Returns what is answered.
    pub(super) fn gone(&mut self, number: u64, how: &str) -> Option<(Asker, Reserved)> {
        if self.worker.as_ref().is_none_or(|worker| worker.number != number) {
            return None;
        }
        self.worker = None;
        let mut attempt = self.attempt.take()?;
        self.replace(&mut attempt, false);
        self.make_up(&attempt, if attempt.stopped { End::Interrupted } else { End::Failed });
        if attempt.stopped {
            return self.answer(&attempt, End::Interrupted, None, None);
        }
        let why = format!("the worker is gone: {how}");
        self.last_error = Some(why.clone());
        self.answer(&attempt, End::Failed, Some(why), None)
    }

    fn answer(
        &self,
        attempt: &Attempt,
        end: End,
        message: Option<String>,
        free: Option<u64>,
    ) -> Option<(Asker, Reserved)> {
        debug!(?end, taken = attempt.taken, message, "a reservation ended");
        let reserved = self.reserved(attempt, end, message, free);
        Some((attempt.asker?, reserved))
    }

    fn reserved(
        &self,
        attempt: &Attempt,
        end: End,
        message: Option<String>,
        free_bytes: Option<u64>,
    ) -> Reserved {
        Reserved { bytes: attempt.taken, ballast_bytes: self.chunks.bytes(), end, message, free_bytes }
    }

    /// Ends a worker that has had nothing to do; while there is one, puts the chunks in order.
    pub(super) fn rest(&mut self, now: Instant, idle: Duration) {
        let busy = self.attempt.is_some() || self.next.is_some() || self.excess > 0 || self.closing > 0;
        if self.worker.is_none() || busy {
            return;
        }
        let rested = self.busy.map_or(Duration::MAX, |busy| now.saturating_duration_since(busy));
        if rested >= idle {
            if let Some(worker) = &self.worker {
                worker.end();
            }
            self.busy = Some(now);
        } else if let Some(keep_free) = self.keep_free
            && rested >= CALM
            && self.untidy_until.is_none_or(|until| until < now)
            && let Some(ladder::Exchange { close, remake }) = ladder::tidy(&self.chunks.on_ladder())
        {
            // The new ones first: what is held never falls below what it was.
            let own = Attempt::own(remake, keep_free);
            self.next = Some(Attempt { replaces: Some(close), ..own });
        }
    }
}
