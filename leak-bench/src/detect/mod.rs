//! What is judged: Highwater's detector, and what others do.
//!
//! All see the same samples in the same order, none looks ahead, and an alarm within two hours of a
//! counted one is not counted, whoever raises it.

mod highwater;
mod linear;
mod mann_kendall;
mod minutes;
mod oracle;
mod page_hinkley;
mod pivot;
mod staircase;
mod watermark;

use crate::series::{Point, Series, Truth};

pub(crate) use highwater::{Highwater, settings};

/// Alarms so soon after a counted one are the same alarm, in milliseconds.
pub(crate) const COOL_DOWN: u64 = 2 * 3_600_000;

/// An alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Alarm {
    /// Tell somebody.
    Suspect,
    /// Restart it.
    Act,
}

/// What a detector does with a series.
pub(crate) trait Detect {
    /// Takes a sample; the alarm that it raises.
    fn push(&mut self, point: &Point) -> Option<Alarm>;
}

/// A detector by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Method {
    /// Ours, on a first life.
    Highwater,
    /// Ours, after an earlier healthy life of the workload.
    HighwaterWithPrior,
    /// Ours, on a first life that declares its plateau.
    HighwaterDeclared,
    /// Steps above the median of five samples.
    Staircase,
    /// The same, above 75 % of the capacity.
    StaircaseHigh,
    /// Above 88 % of the capacity.
    Watermark88,
    /// Above 95 % of the capacity.
    Watermark95,
    /// A straight line with R² of at least 0.8 that reaches the capacity within an hour.
    Linear,
    /// Mann-Kendall on raw means, and a median slope that does.
    MannKendall,
    /// A change of the mean.
    PageHinkley,
    /// Buckets of use against the hours before.
    Pivot,
    /// Knows the truth.
    Oracle,
}

/// What runs on every series, in the order of the tables.
pub(crate) const BASELINES: [Method; 9] = [
    Method::Staircase,
    Method::StaircaseHigh,
    Method::Watermark88,
    Method::Watermark95,
    Method::Linear,
    Method::MannKendall,
    Method::PageHinkley,
    Method::Pivot,
    Method::Oracle,
];

impl Method {
    /// As it stands in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Highwater => "Highwater, first life",
            Self::HighwaterWithPrior => "Highwater, with an earlier life",
            Self::HighwaterDeclared => "Highwater, plateau declared",
            Self::Staircase => "staircase",
            Self::StaircaseHigh => "staircase above 75 %",
            Self::Watermark88 => "watermark 88 %",
            Self::Watermark95 => "watermark 95 %",
            Self::Linear => "linear fit, R² >= 0.8 (as LBR, Precog)",
            Self::MannKendall => "Mann-Kendall on raw means",
            Self::PageHinkley => "Page-Hinkley",
            Self::Pivot => "bucket pivot (as RESIN)",
            Self::Oracle => "oracle",
        }
    }

    /// A baseline, new; none for Highwater, which has a setting of its own.
    fn baseline(self, series: &Series) -> Option<Box<dyn Detect>> {
        let capacity = crate::number::wide(series.capacity);
        Some(match self {
            Self::Highwater | Self::HighwaterWithPrior | Self::HighwaterDeclared => return None,
            Self::Staircase => Box::new(staircase::Staircase::new(capacity, 0.0)),
            Self::StaircaseHigh => Box::new(staircase::Staircase::new(capacity, 0.75)),
            Self::Watermark88 => Box::new(watermark::Watermark::new(capacity, 0.88)),
            Self::Watermark95 => Box::new(watermark::Watermark::new(capacity, 0.95)),
            Self::Linear => Box::new(linear::Linear::new(capacity)),
            Self::MannKendall => Box::new(mann_kendall::MannKendall::new(capacity)),
            Self::PageHinkley => Box::new(page_hinkley::PageHinkley::new(capacity)),
            Self::Pivot => Box::new(pivot::Pivot::new(capacity)),
            Self::Oracle => Box::new(oracle::Oracle::new(series.truth)),
        })
    }
}

/// The alarms of a detector on a series that count, in milliseconds of the series.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Alarms {
    /// Suspicions.
    pub suspects: Vec<u64>,
    /// Acts.
    pub acts: Vec<u64>,
}

impl Alarms {
    fn note(&mut self, alarm: Alarm, at: u64) {
        let list = match alarm {
            Alarm::Suspect => &mut self.suspects,
            Alarm::Act => &mut self.acts,
        };
        if list.last().is_none_or(|last| at.saturating_sub(*last) >= COOL_DOWN) {
            list.push(at);
        }
    }

    /// The first act, in milliseconds of the series.
    pub(crate) fn first_act(&self) -> Option<u64> {
        self.acts.first().copied()
    }
}

/// Shows a detector a series.
pub(crate) fn replay(detector: &mut dyn Detect, series: &Series) -> Alarms {
    let mut alarms = Alarms::default();
    for point in &series.points {
        if let Some(alarm) = detector.push(point) {
            alarms.note(alarm, point.at);
        }
    }
    alarms
}

/// Shows a baseline a series; nothing for Highwater.
pub(crate) fn replay_baseline(method: Method, series: &Series) -> Alarms {
    method.baseline(series).map(|mut detector| replay(detector.as_mut(), series)).unwrap_or_default()
}

/// Whether something that lasts has just begun.
#[derive(Clone, Copy, Debug, Default)]
struct Edge(bool);

impl Edge {
    fn rises(&mut self, now: bool) -> bool {
        let before = std::mem::replace(&mut self.0, now);
        now && !before
    }
}

/// When the life of a series ends by its leak, in milliseconds.
fn end_of(truth: Truth) -> Option<(u64, u64)> {
    match truth {
        Truth::Leak { onset, exhausted } => Some((onset, exhausted)),
        Truth::Fragmentation { exhausted: Some(exhausted) }
        | Truth::Unresolved { exhausted: Some(exhausted) } => Some((0, exhausted)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_soon_after_another_is_the_same() {
        let mut alarms = Alarms::default();
        for at in [0, 1, COOL_DOWN - 1, COOL_DOWN, COOL_DOWN + 1] {
            alarms.note(Alarm::Act, at);
        }
        assert_eq!(alarms.acts, [0, COOL_DOWN]);
        assert_eq!(alarms.first_act(), Some(0));
    }

    #[test]
    fn what_lasts_begins_once() {
        let mut edge = Edge::default();
        assert_eq!([true, true, false, true].map(|now| edge.rises(now)), [true, false, false, true]);
    }

    /// What each baseline does with a day of a pod that fills evenly to its capacity.
    #[test]
    fn baselines_find_what_they_are_made_for() {
        let point = |i: u64| Point { at: i * 60_000, bytes: Some(100_000 + i * 600), work: None };
        let truth = Truth::Leak { onset: 0, exhausted: 1500 * 60_000 };
        let series = Series {
            pod: "pod".to_owned(),
            family: "ramp".to_owned(),
            capacity: 1_000_000,
            declared: None,
            points: (0..1500).map(point).collect(),
            truth,
        };
        let first = |method| replay_baseline(method, &series).first_act().map(|at| at / 60_000);
        assert_eq!(first(Method::Staircase), None, "a slow rise has no steps");
        assert_eq!(first(Method::Watermark88), Some(1300));
        assert_eq!(first(Method::Watermark95), Some(1417));
        for method in [Method::Linear, Method::MannKendall, Method::Oracle] {
            let at = first(method).unwrap();
            assert!((1435..=1455).contains(&at), "{method:?}: {at}");
        }
        assert!(first(Method::PageHinkley).is_some() && first(Method::Pivot).is_some());
    }
}
