//! What a policy would have done at a moment.

use std::time::Duration;

use highwater_policy::leak::LeakClass;
use serde::{Serialize, Serializer};

/// One decision, as it is written by `-o json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Decision<'a> {
    /// Whose memory it is about.
    pub(crate) pod: &'a str,
    /// Of which device.
    pub(crate) device: &'a str,
    /// As the file gives it; 0 where it does not.
    pub(crate) life: i64,
    /// When, as the file gives it.
    pub(crate) seconds: Seconds,
    /// What is decided.
    pub(crate) kind: Kind,
    /// How memory grows; of a suspicion and an act only, as all that follows but the reason.
    pub(crate) class: Option<&'static str>,
    /// How fast, as the best guess.
    pub(crate) slope_bytes_per_hour: Option<f64>,
    /// In how many seconds memory runs out, as the best guess.
    pub(crate) exhaustion_seconds: Option<u64>,
    /// How sure this is, from 0 to 1.
    pub(crate) confidence: Option<f64>,
    /// Why, with the numbers.
    pub(crate) reason: String,
}

/// How memory grows, as it is written.
pub(crate) const fn class(class: LeakClass) -> &'static str {
    match class {
        LeakClass::Linear => "linear",
        LeakClass::Step => "step",
        LeakClass::Exponential => "exponential",
        LeakClass::Saturating => "saturating",
        LeakClass::PerReplay => "perReplay",
    }
}

/// What is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// A leak is suspected: an incident is opened.
    Suspect,
    /// The pod is to be restarted before memory runs out.
    Act,
    /// A suspicion is dropped: its incident is over.
    Cleared,
    /// The pod was started anew under suspicion: the incident ends with the life.
    Ended,
    /// The lowest mark of the breaker is passed.
    Warning,
    /// The middle one is.
    Critical,
    /// The highest one is.
    Emergency,
    /// Memory ran out in the recording.
    Oom,
}

impl Kind {
    /// In the order in which they are counted.
    pub(crate) const ALL: [Self; 8] = [
        Self::Suspect,
        Self::Act,
        Self::Cleared,
        Self::Ended,
        Self::Warning,
        Self::Critical,
        Self::Emergency,
        Self::Oom,
    ];

    /// As it is written.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Suspect => "suspect",
            Self::Act => "act",
            Self::Cleared => "cleared",
            Self::Ended => "ended",
            Self::Warning => "warning",
            Self::Critical => "critical",
            Self::Emergency => "emergency",
            Self::Oom => "oom",
        }
    }

    /// Its place in [`Kind::ALL`].
    pub(crate) fn index(self) -> usize {
        match self {
            Self::Suspect => 0,
            Self::Act => 1,
            Self::Cleared => 2,
            Self::Ended => 3,
            Self::Warning => 4,
            Self::Critical => 5,
            Self::Emergency => 6,
            Self::Oom => 7,
        }
    }
}

/// A time of the file in milliseconds, written in seconds: whole ones as an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seconds(pub(crate) u64);

impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(1000) {
            serializer.serialize_u64(self.0 / 1000)
        } else {
            serializer.serialize_f64(Duration::from_millis(self.0).as_secs_f64())
        }
    }
}
