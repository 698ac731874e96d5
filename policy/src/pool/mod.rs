//! The reservation pool of a device: ballast that the keeper holds, and grants to pods.
//!
//! A grant is a number of bytes that a pod may have and that lies free for it: taken out of the
//! ballast, so that nobody else could have taken it before. What is granted to nobody is held
//! back. For each device:
//!
//! ```text
//! pool = ballast + grants
//! device = driver's reserve + used + ballast + free
//! ```
//!
//! After each sample and decision, whatever came before:
//!
//! 1. What pods were granted and do not use is free.
//! 2. What pods are guaranteed and was not granted is in the ballast, or [`Report::short`] says
//!    how much is not.
//! 3. What a quota page says is at most what the journal says, so no grant is lost by a crash. A
//!    grant is a level and the bytes behind it are worked out from what driver and keeper say, so
//!    none is doubled.
//! 4. Bytes leave the ballast for a grant, or because policy made the pool smaller; never because
//!    somebody took what was not his. What was taken from a pod is given again when it returns, or
//!    when nobody has taken anything for a while; at once only to a guard that asks for what its
//!    pod is guaranteed.
//!
//! What this rests on: a decision is carried out in the order of [`Decision`]'s fields, and
//! nothing of it after the journal before that is written. Samples are delivered in the order in
//! which they were read. The keeper has finished or dropped what an earlier connection asked for
//! before it greets a new one. A pod's UID never comes back.
//!
//! Whoever holds what was never granted is named in [`PodReport::ungranted`]; bytes that no list
//! shows make the pool smaller.

pub mod adaptive;
pub mod fragmentation;
pub mod grant;
pub mod journal;
pub mod ladder;
#[cfg(test)]
mod model;
pub mod page;
pub mod size;
mod state;
pub mod wait;

use std::sync::Arc;

use highwater_crds::ByteSize;

use crate::time::Millis;

pub use self::{
    grant::Kind,
    size::DeviceBytes,
    state::DevicePool,
    wait::{Answer, Outcome, Refusal, Request},
};

/// What policy says of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Share of the device in percent, of what [`size::size`] leaves of it.
    pub size_percent: u32,
    /// Least size in bytes.
    pub min_size: u64,
    /// Greatest share in percent. It wins over both of the above.
    pub max_percent: u32,
    /// Bytes that stay free whatever is held back: pushed to the last byte, the driver would move
    /// other pods' managed memory out.
    pub margin: u64,
    /// Most bytes that are held back in one go, before what is free is read again.
    pub reserve_step: u64,
    /// Bytes by which elastic grants grow ahead of use.
    pub grant_step: u64,
    /// How long after its binding a pod is taken to be starting, in milliseconds. Engines measure
    /// what is free while they start, so nothing is given out ahead of use then.
    pub start_hold_ms: u64,
    /// How long nobody may have taken anything that was not granted, in milliseconds, before what
    /// was taken from unguarded pods is made up from the ballast; eight times as long once that was
    /// taken again, and not before it returned after a second time.
    pub calm_ms: u64,
    /// How long a request is kept that only waits for the keeper, in milliseconds.
    pub keeper_timeout_ms: u64,
    /// How the size adapts to use. `None`: not at all.
    pub adaptive: Option<adaptive::Rule>,
    /// How idle grants melt away.
    pub decay: grant::Decay,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            size_percent: 50,
            min_size: 0,
            max_percent: 75,
            margin: 512 * ByteSize::MI,
            // The keeper reads what is free every few GiB by itself; each command is a round trip.
            reserve_step: 64 * ByteSize::GI,
            grant_step: ByteSize::GI,
            start_hold_ms: 120_000,
            calm_ms: 30_000,
            keeper_timeout_ms: 2000,
            adaptive: None,
            decay: grant::Decay::default(),
        }
    }
}

/// What is seen of a device at a sample.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// When reading began.
    pub at: Millis,
    /// Who has its bytes. `None` where the driver does not say all of it; the pool stands still.
    pub device: Option<DeviceBytes>,
    /// What the keeper holds, in bytes. `None` where it does not answer: it is then asked for
    /// nothing and taken to cover nothing.
    pub ballast: Option<u64>,
    /// Memory and processes were not of the same moment.
    pub torn: bool,
    /// Every pod with a quota that is bound to the device: who is missing has ended. `None` where
    /// that is not known.
    pub pods: Option<&'a [PodDemand]>,
    /// What the breaker of the device asks for.
    pub pressure: Pressure,
}

/// What the breaker of a device asks of its pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Everything idle above guarantees is taken back at once.
    pub reclaim: bool,
    /// Nothing above guarantees is granted. What is guaranteed is: it is held back for that, and
    /// no reason to let a pod fail within it.
    pub freeze: bool,
}

/// What a pod has a right to on a device, and what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDemand {
    /// UID of the pod.
    pub uid: Arc<str>,
    /// Whether it has a guard that asks.
    pub kind: Kind,
    /// What it is owed whatever others do, in bytes. Of a pod without a guard its limit is.
    pub guarantee: u64,
    /// What it may have, in bytes.
    pub limit: u64,
    /// What it holds as the driver says, in bytes, of the same moment as the device's numbers.
    pub used: Option<u64>,
    /// What it has charged by its own account, in bytes. Not trusted: it is a hint of how busy
    /// the pod is.
    pub charged: Option<u64>,
    /// When it was bound to the device.
    pub bound_at: Millis,
}

/// What is to be done, in this order. Nothing after the journal may be done before it is
/// written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Grants to write to quota pages first.
    pub lower: Vec<Grant>,
    /// Whether the journal has changed and is to be written.
    pub journal: bool,
    /// Grants to write to quota pages then: their bytes are free.
    pub raise: Vec<Grant>,
    /// Answers to give.
    pub answers: Vec<Answer>,
    /// What to ask of the keeper. There is never more than one command without a reply.
    pub command: Option<Command>,
    /// Another sample is worth taking as soon as this is done.
    pub sample_soon: bool,
}

/// What a pod may have now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// UID of the pod.
    pub uid: Arc<str>,
    /// In bytes, in total.
    pub granted: u64,
}

/// What is asked of the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Hold back more.
    Reserve {
        /// Up to so many bytes.
        bytes: u64,
        /// While at least so many bytes stay free as the driver says it.
        keep_free: u64,
    },
    /// Give out of the ballast.
    Release {
        /// At least so many bytes.
        bytes: u64,
    },
}

/// What came of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Bytes that were held back or given out.
    pub done: u64,
    /// Whether that was all of it. Where it was not, it is tried again after a while.
    pub complete: bool,
}

/// The state of a pool, for status and metrics. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The size of the pool.
    pub size: u64,
    /// What is held back. `None` where the keeper does not say.
    pub ballast: Option<u64>,
    /// What should be held back.
    pub ballast_target: u64,
    /// What pods may have together.
    pub granted: u64,
    /// What is guaranteed and covered by the pool, but not granted.
    pub owed: u64,
    /// What is guaranteed, not granted, and not held back either.
    pub short: u64,
    /// Granted in percent of the pool.
    pub utilisation_percent: u32,
    /// Requests that wait.
    pub waiting: usize,
    /// Until when a pod is taken to be starting.
    pub start_hold_until: Option<Millis>,
    /// The pods, by UID.
    pub pods: Vec<PodReport>,
}

/// The state of a pod in its pool. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodReport {
    /// UID of the pod.
    pub uid: Arc<str>,
    /// How it is granted.
    pub kind: Kind,
    /// What it may have now.
    pub granted: u64,
    /// What it may have as soon as the bytes are there.
    pub entitled: u64,
    /// What it is guaranteed.
    pub guarantee: u64,
    /// What it holds.
    pub used: u64,
    /// The part of its guarantee for which the pool is too small.
    pub uncovered: u64,
    /// How far it is above a limit that was lowered below what it held. No more is granted to it;
    /// if it does not shrink, that is for the breaker.
    pub shrinking: u64,
    /// What it holds without ever having been granted it.
    pub ungranted: u64,
    /// What others took of its grant.
    pub taken: u64,
    /// What it could take beyond its grant, if nothing refuses it: free bytes that are not owed to
    /// it.
    pub overshoot: u64,
}
