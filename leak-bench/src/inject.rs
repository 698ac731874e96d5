//! Leaks put into series that have none.

use crate::{
    number::{real, whole, wide},
    random::Random,
    series::{Series, Truth},
};

/// How a leak grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Evenly in time.
    Linear,
    /// In 6 to 20 steps at random times.
    Step,
    /// Doubling three to six times.
    Exponential,
    /// With the work done.
    Work,
    /// Slower and slower, without an end: the power 0.7 of time.
    Slowing,
    /// Faster and faster: the power 1.7 of time.
    Quickening,
    /// In bursts of some minutes, between which it rests.
    Bursts,
    /// Evenly, a part of it given back every now and then.
    GivingBack,
}

/// The kinds that tuning may see.
pub(crate) const KINDS: [Kind; 4] = [Kind::Linear, Kind::Step, Kind::Exponential, Kind::Work];

/// The kinds that are held back from it.
pub(crate) const UNSEEN_KINDS: [Kind; 4] = [Kind::Slowing, Kind::Quickening, Kind::Bursts, Kind::GivingBack];

impl Kind {
    /// As it stands in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Step => "step",
            Self::Exponential => "exponential",
            Self::Work => "work",
            Self::Slowing => "slowing",
            Self::Quickening => "quickening",
            Self::Bursts => "bursts",
            Self::GivingBack => "giving-back",
        }
    }
}

/// The share of a leak's growth that is there after a share of its time; goes on beyond 1.
#[derive(Clone, Debug)]
enum Curve {
    Linear,
    /// The shares of time at which it steps, all by the same.
    Step(Vec<f64>),
    /// So many doublings.
    Exponential(f64),
    /// The work done at the onset and at the end of its time.
    Work {
        from: f64,
        to: f64,
    },
    /// A power of time.
    Power(f64),
    /// Grows in this part of each period, a share of time.
    Bursts {
        period: f64,
        part: f64,
    },
    /// Gives back so much of what came in each period, a share of time.
    GivingBack {
        period: f64,
        part: f64,
    },
}

impl Curve {
    fn at(&self, time: f64, work: f64) -> f64 {
        match self {
            Self::Linear => time,
            Self::Step(steps) => {
                let passed = steps.partition_point(|step| *step <= time);
                real(passed) / real(steps.partition_point(|step| *step <= 1.0).max(1))
            }
            Self::Exponential(doublings) => ((doublings * time).exp2() - 1.0) / (doublings.exp2() - 1.0),
            Self::Power(power) => time.powf(*power),
            Self::Bursts { period, part } => {
                ((time / period).floor() + ((time / period).fract() / part).min(1.0)) * period
            }
            Self::GivingBack { period, part } => {
                // Within a period more comes than stays.
                let (whole, within) = ((time / period).floor(), (time / period).fract());
                (whole + within / (1.0 - part)) * period
            }
            Self::Work { from, to } => (work - from) / (to - from).max(f64::MIN_POSITIVE),
        }
    }
}

/// The 95th percentile of what the series holds between two times.
fn envelope(series: &Series, from: u64, to: u64) -> Option<f64> {
    let mut held: Vec<u64> =
        series.points.iter().filter(|p| p.at >= from && p.at < to).filter_map(|p| p.bytes).collect();
    held.sort_unstable();
    held.get(held.len().saturating_sub(1 + held.len() / 20)).map(|bytes| wide(*bytes))
}

/// Lets the pod leak from `onset` so that its upper envelope reaches the capacity about `takes`
/// later, both in seconds, and ends its life where it runs out. `None` where it does not run
/// out within the series, and where it would before the leak.
pub(crate) fn leak(
    series: &mut Series,
    kind: Kind,
    onset: f64,
    takes: f64,
    random: &mut Random,
) -> Option<()> {
    let begin = whole(onset * 1000.0);
    let end = whole((onset + takes) * 1000.0);
    let capacity = wide(series.capacity);
    let room = capacity - envelope(series, begin, end)?;
    if room <= 0.02 * capacity {
        return None;
    }
    let work_at = |at: u64| series.points.iter().find(|p| p.at >= at).and_then(|p| p.work);
    let curve = match kind {
        Kind::Linear => Curve::Linear,
        Kind::Step => {
            let each = 1.0 / random.uniform(6.0, 20.0);
            let mut steps = Vec::new();
            let mut at = 0.0;
            while at < 4.0 {
                at += random.exponential(each);
                steps.push(at);
            }
            Curve::Step(steps)
        }
        Kind::Exponential => Curve::Exponential(random.uniform(3.0, 6.0)),
        Kind::Slowing => Curve::Power(0.7),
        Kind::Quickening => Curve::Power(1.7),
        Kind::Bursts => {
            let period = random.uniform(600.0, 3600.0) / takes;
            Curve::Bursts { period, part: random.uniform(0.1, 0.5) }
        }
        Kind::GivingBack => {
            let period = random.uniform(600.0, 3600.0) / takes;
            Curve::GivingBack { period, part: random.uniform(0.2, 0.7) }
        }
        // Without a signal of its own the pod still works; evenly, as nothing else is known.
        Kind::Work => match (work_at(begin), work_at(end)) {
            (Some(from), Some(to)) if to > from => Curve::Work { from, to },
            _ => Curve::Linear,
        },
    };
    let last = series.points.len();
    let mut out = None;
    for (index, point) in series.points.iter_mut().enumerate() {
        let Some(bytes) = point.bytes else { continue };
        if point.at < begin {
            if bytes >= series.capacity {
                return None;
            }
            continue;
        }
        let time = wide(point.at - begin) / (takes * 1000.0);
        let grown = wide(bytes) + room * curve.at(time, point.work.unwrap_or(0.0)).max(0.0);
        point.bytes = Some(whole(grown.min(capacity)));
        if grown >= capacity {
            out = Some((index, point.at));
            break;
        }
    }
    let (index, exhausted) = out?;
    series.points.truncate((index + 1).min(last));
    series.truth = Truth::Leak { onset: begin, exhausted };
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::Point;

    fn flat() -> Series {
        let point =
            |i: u64| Point { at: i * 60_000, bytes: Some(40), work: Some(real(usize::try_from(i).unwrap())) };
        Series {
            pod: "pod".to_owned(),
            family: "flat".to_owned(),
            capacity: 1000,
            declared: None,
            points: (0..1440).map(point).collect(),
            truth: Truth::Benign,
        }
    }

    #[test]
    fn every_kind_begins_at_its_onset_and_ends_the_life_where_it_runs_out() {
        for kind in KINDS.into_iter().chain(UNSEEN_KINDS) {
            let mut series = flat();
            leak(&mut series, kind, 7200.0, 36_000.0, &mut Random::of("leak")).unwrap();
            let Truth::Leak { onset, exhausted } = series.truth else { panic!() };
            assert_eq!(onset, 7_200_000);
            assert!(series.points.iter().filter(|p| p.at < onset).all(|p| p.bytes == Some(40)));
            let last = series.points.last().unwrap();
            assert_eq!((last.at, last.bytes), (exhausted, Some(1000)));
            let grows = series.points.windows(2).all(|p| p[0].bytes <= p[1].bytes);
            assert!(grows || kind == Kind::GivingBack, "{kind:?}");
            if ![Kind::Step, Kind::Bursts, Kind::GivingBack].contains(&kind) {
                assert!(exhausted.abs_diff(43_200_000) <= 120_000, "{kind:?}: {exhausted}");
            }
        }
    }

    #[test]
    fn a_leak_that_does_not_run_out_is_none() {
        assert!(leak(&mut flat(), Kind::Linear, 7200.0, 90_000.0, &mut Random::of("leak")).is_none());
    }
}
