//! What is found, and on what evidence.

use highwater_crds::{LeakAdvice, LeakClass, LeakMode};
use serde::{Deserialize, Serialize};

use crate::{leak::settings::SCALES, time::Millis};

/// A value with its bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval<T> {
    /// The lower bound.
    pub low: T,
    /// The best guess.
    pub mid: T,
    /// The upper bound.
    pub high: T,
}

/// How far the alarm goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FindingKind {
    /// It grows steadily and not just for a moment.
    Suspect,
    /// Memory may run out within the horizon, and this is not what healthy lives do.
    Act,
    /// What was suspected is not so any more.
    Cleared,
}

/// By which rule an act is due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Rule {
    /// The trend of block floors.
    #[default]
    Trend,
    /// The rise of the last minutes.
    RateOfRise,
}

/// What one scale says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScaleEvidence {
    /// Length of its blocks in milliseconds.
    pub block_milliseconds: u64,
    /// Blocks in its window,
    pub blocks: u32,
    /// and of these since the onset of the rise.
    pub blocks_since_onset: u32,
    /// Score of the Mann-Kendall test, corrected for autocorrelation.
    pub z: f64,
    /// Slope in bytes an hour: Theil-Sen, with the 15 and 85 % quantiles of the pairs' slopes.
    pub slope_bytes_per_hour: Interval<f64>,
    /// Growth since the onset in bytes.
    pub growth_bytes: f64,
    /// Growth in the second half of the rise as a share of that in the first.
    pub second_half: f64,
    /// All of its gates are passed.
    pub agrees: bool,
}

/// What the published recipes say of the same series. Evidence only: alone they fire on nearly
/// every healthy pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Signals {
    /// The last sample is above the median of five by 1.8 times their interquartile range, and
    /// above 1.15 times the one before.
    pub staircase: bool,
    /// Times that the staircase fired in this life.
    pub staircase_count: u32,
    /// Distance of the last samples from a uniform sample of the whole life, as the statistic of
    /// Kolmogorov and Smirnov: 0 alike, 1 apart.
    pub drift: f64,
    /// When the rise of the last minutes would reach the capacity, in milliseconds.
    pub rate_of_rise_exhaustion_milliseconds: Option<u64>,
}

/// A change of what is thought of a pod on a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// When, on the clock of the samples.
    #[serde(with = "millis")]
    pub at: Millis,
    /// How far the alarm goes.
    pub kind: FindingKind,
    /// By which rule.
    pub rule: Rule,
    /// How memory grows.
    pub class: LeakClass,
    /// How fast.
    pub slope_bytes_per_hour: Interval<f64>,
    /// When memory runs out, in milliseconds from `at`. `None` where the capacity is not known or
    /// nothing grows.
    pub exhaustion_milliseconds: Option<Interval<u64>>,
    /// How sure this is, from 0 to 1.
    pub confidence: f64,
    /// What each scale says that has enough blocks, the shortest first; at most as many as there
    /// are scales.
    pub scales: Vec<ScaleEvidence>,
    /// Who holds it, and how sure that is from 0 to 1.
    pub mode: Option<(LeakMode, f64)>,
    /// What is recommended; `None`: nothing yet.
    pub advice: Option<LeakAdvice>,
    /// What other recipes say.
    pub signals: Signals,
    /// One sentence with the numbers.
    pub reason: String,
}

impl Finding {
    /// Scales that agree.
    pub fn agreeing(&self) -> usize {
        self.scales.iter().filter(|s| s.agrees).count().min(SCALES)
    }
}

/// A time as a plain number.
pub(crate) mod millis {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::time::Millis;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it by reference")]
    pub(crate) fn serialize<S: Serializer>(at: &Millis, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(at.0)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Millis, D::Error> {
        u64::deserialize(deserializer).map(Millis)
    }
}
