//! The plan of acts: what is begun now against memory that stands too high.
//!
//! Acts are weighed in the order of [`ActionType`], gentlest first. Begun is the cheapest set that
//! may be enough; a stronger act only once what was begun before was seen not to be enough, or has
//! had its time. Among pods those of the lowest priority go first, then those furthest over their
//! due, and never one within its due while another is above. `Signal` and `Freeze` harm nobody who
//! runs and belong to the level: they are begun as soon as it is entered.
//!
//! At Emergency only what frees memory at once counts; `Hook`, `Unready` and `Park` are not begun.

mod ability;
mod choose;
#[cfg(test)]
mod tests;
mod words;

use highwater_crds::{Action, ActionType, Breaker, BreakerScope, Level, WhenNobodyIsOver};
use jiff::Timestamp;

use crate::{
    breaker::{self, Reading, State},
    ledger::Share,
    park,
    pod::PodFacts,
    time::Millis,
    victim,
};

pub use self::ability::{Cannot, is_at_once, patience};

/// The most alternatives that a plan tells (as the schema of an incident says).
pub const MAX_ALTERNATIVES: usize = 12;

/// What is known when a plan is made.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// What the breaker measures. `Pod` as well for a quota and for host memory.
    pub scope: BreakerScope,
    /// The present level.
    pub level: Level,
    /// The actions in force, one a type; from [`in_force`].
    pub actions: &'a [&'a Action],
    /// Bytes that must go before the level clears; from [`need`].
    pub need: u64,
    /// The pods concerned: all on the device, or the one that a breaker of scope `Pod` is about.
    pub tenants: &'a [Tenant<'a>],
    /// What was begun in this episode already.
    pub tried: &'a [Tried<'a>],
    /// Whom `Restart` may concern when no pod is over its due.
    pub when_nobody_is_over: WhenNobodyIsOver,
    /// Now.
    pub now: Millis,
    /// Now, as pods' deadlines are told.
    pub wall: Timestamp,
}

/// A pod, and what is known of it on the device.
#[derive(Clone, Copy, Debug)]
pub struct Tenant<'a> {
    /// The pod.
    pub pod: &'a PodFacts,
    /// What it uses, in bytes. A pod whose use is not known is not acted on.
    pub used: Option<u64>,
    /// What it is owed: its guarantee, else its limit. A pod without a quota is never over its due.
    pub due: Option<u64>,
    /// Bytes that it was granted beyond its guarantee and does not use.
    pub idle_grant: u64,
    /// A guard is connected in it.
    pub guarded: bool,
    /// Bytes that the driver keeps in its pools there, where its guard says.
    pub cached: Option<u64>,
    /// The policy concerns its namespace.
    pub selected: bool,
    /// Whether it may be restarted; from [`victim::may_restart`].
    pub restart: Result<(), victim::Refusal>,
    /// How many bytes parking it would free, or why it cannot be; from [`park::may_park`].
    pub park: Result<u64, park::Refusal>,
}

impl Tenant<'_> {
    /// How far it is over its due, in bytes.
    pub fn over(&self) -> u64 {
        self.used.zip(self.due).map_or(0, |(used, due)| used.saturating_sub(due))
    }

    /// Asked to end, and not long past the time by which it ought to have.
    fn is_leaving(&self, now: Timestamp) -> bool {
        self.pod.terminating && !victim::is_stuck(self.pod, now)
    }
}

/// An act that was begun in this episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tried<'a> {
    /// The act.
    pub act: ActionType,
    /// UID of the pod; `None` where it concerns the device or the node.
    pub uid: Option<&'a str>,
    /// When.
    pub begun: Millis,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of an act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Not known yet.
    Pending,
    /// It was done, and memory is still too high.
    Insufficient {
        /// Bytes that it freed, where that was measured.
        freed: Option<u64>,
    },
    /// It went wrong.
    Failed,
    /// It was not done: a precondition or a budget was against it.
    Refused,
}

/// What is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// What is begun now, gentlest first.
    pub begin: Vec<Act>,
    /// What else was weighed, at most [`MAX_ALTERNATIVES`].
    pub alternatives: Vec<Alternative>,
    /// How things stand.
    pub verdict: Verdict,
}

/// One act of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Act {
    /// The act.
    pub action: ActionType,
    /// The pod, by its place among the tenants; `None` where it concerns the device or the node.
    pub tenant: Option<usize>,
    /// What it should free.
    pub frees: Frees,
    /// A restart of the containers where they are.
    pub in_place: bool,
}

/// How much an act frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frees {
    /// So many bytes.
    Known(u64),
    /// It depends on the pod: at most so many bytes.
    UpTo(u64),
    /// Nothing: it stops growth.
    Growth,
}

impl Frees {
    /// The most bytes that it may free.
    pub const fn most(self) -> u64 {
        match self {
            Self::Known(bytes) | Self::UpTo(bytes) => bytes,
            Self::Growth => 0,
        }
    }
}

/// How things stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// Memory is below its mark: nothing is needed.
    #[default]
    Enough,
    /// What is begun now, or was begun and has its time, may be enough.
    UnderWay,
    /// A pod (by its place) was asked to end already: its memory is waited for.
    Leaving(usize),
    /// Nobody is over its due, and the policy lets nobody else be restarted.
    NoCulprit,
    /// Everything that could help was begun, and may not be enough.
    Exhausted,
}

/// Something that was weighed and not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alternative {
    /// The act.
    pub action: ActionType,
    /// The pod, by its place among the tenants.
    pub tenant: Option<usize>,
    /// Bytes that it might have freed, where it could have been done.
    pub frees: Option<Frees>,
    /// Why it is not begun.
    pub why_not: WhyNot,
}

/// Why something is not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyNot {
    /// It cannot be done.
    Cannot(Cannot),
    /// It was begun already.
    Tried(Outcome),
    /// Gentler acts, or the same on others, may be enough.
    NotNeeded,
}

/// The actions in force at a level, one a type (of several the one of the highest level), gentlest
/// first.
pub fn in_force(breaker: &Breaker, level: Level) -> Vec<&Action> {
    ActionType::ALL
        .into_iter()
        .filter_map(|type_| breaker::action(breaker, level, type_))
        .map(|(.., action)| action)
        .collect()
}

/// The bytes that must go before a breaker leaves its level: what is above its clear mark. Where the
/// level was entered early, what will be above it by the end of the lead. `None` where that is not
/// known.
pub fn need(breaker: &Breaker, state: &State, reading: Reading) -> Option<u64> {
    let share = reading.share?;
    let clear = breaker::mark(breaker, state.level).map_or(0, |mark| mark.clear_percent);
    if state.level == Level::Normal {
        return Some(0);
    }
    let rule = breaker.rise.as_ref().filter(|_| state.early);
    let coming = rule.zip(reading.rate).map_or(0, |(rule, rate)| {
        let lead = u64::try_from(rule.lead_seconds).unwrap_or(0);
        u64::try_from(rate.0).unwrap_or(0).saturating_mul(lead)
    });
    let used = share.used.saturating_add(coming).min(share.of.max(share.used));
    Some(breaker::excess(Share { used, of: share.of }, clear))
}

/// The plan for a situation. The same situation always has the same plan, and what a plan begins is
/// not begun again once it is among what was tried.
pub fn plan(situation: &Situation<'_>) -> Plan {
    choose::plan(situation)
}
