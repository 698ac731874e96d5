//! More right use and more leaks, of makes that nobody who tuned has seen: whether what holds for
//! the eight families holds beyond them. Replayed for the report alone.
//!
//! Fixed before any detector had seen their series, and not to be changed to suit one.

use std::f64::consts::TAU;

use crate::{
    number::{DAY, HOUR, MINUTE},
    random::Random,
};

/// A kind of right use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Unseen {
    /// A rollout that sends a growing share of the traffic here for hours.
    Ramp,
    /// A cache that takes off slowly, fills and then evicts.
    Logistic,
    /// A job each night that gathers for hours and then lets go.
    Nightly,
    /// Sessions that come and go: a random walk around its mean.
    Sessions,
    /// Epochs, each with a plateau; the first ones rise.
    Epochs,
    /// Segments that pile up until they are compacted.
    Compaction,
}

/// All of them.
pub(crate) const UNSEEN: [Unseen; 6] =
    [Unseen::Ramp, Unseen::Logistic, Unseen::Nightly, Unseen::Sessions, Unseen::Epochs, Unseen::Compaction];

impl Unseen {
    /// As it stands in names and tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ramp => "ramp",
            Self::Logistic => "logistic",
            Self::Nightly => "nightly",
            Self::Sessions => "sessions",
            Self::Epochs => "epochs",
            Self::Compaction => "compaction",
        }
    }
}

/// The state of a life.
#[derive(Clone, Debug)]
pub(crate) enum Course {
    Ramp { from: f64, takes: f64, begins: f64 },
    Logistic { middle: f64, steepness: f64, evicts: f64, period: f64 },
    Nightly { at: f64, takes: f64, day: f64 },
    Sessions { holds: f64, deviation: f64, state: f64 },
    Epochs { length: f64, first: f64, dip: f64, rising: f64 },
    Compaction { period: f64, begun: f64, next: f64, keeps: f64 },
}

impl Course {
    /// A life of a kind.
    pub(crate) fn new(kind: Unseen, w: &mut Random) -> Self {
        match kind {
            Unseen::Ramp => Self::Ramp {
                from: w.uniform(0.05, 0.5),
                takes: w.log_uniform(0.5 * HOUR, 8.0 * HOUR),
                begins: w.uniform(0.0, 4.0 * HOUR),
            },
            Unseen::Logistic => Self::Logistic {
                middle: w.log_uniform(0.5 * HOUR, 8.0 * HOUR),
                steepness: w.uniform(3.0, 8.0),
                evicts: w.uniform(0.0, 0.15),
                period: w.log_uniform(10.0 * MINUTE, 2.0 * HOUR),
            },
            Unseen::Nightly => Self::Nightly {
                at: w.uniform(0.0, DAY),
                takes: w.log_uniform(0.5 * HOUR, 5.0 * HOUR),
                day: w.uniform(0.1, 0.5),
            },
            Unseen::Sessions => Self::Sessions {
                holds: w.log_uniform(10.0 * MINUTE, 3.0 * HOUR),
                deviation: w.uniform(0.05, 0.2),
                state: 0.0,
            },
            Unseen::Epochs => Self::Epochs {
                length: w.log_uniform(5.0 * MINUTE, 3.0 * HOUR),
                first: w.uniform(0.3, 0.9),
                dip: w.uniform(0.05, 0.5),
                rising: w.uniform(1.0, 6.0).floor(),
            },
            Unseen::Compaction => Self::Compaction {
                period: w.log_uniform(HOUR, 10.0 * HOUR),
                begun: 0.0,
                next: 0.0,
                keeps: w.uniform(0.0, 0.4),
            },
        }
    }

    /// Where memory stands between 0 and 1.
    pub(crate) fn step(&mut self, age: f64, dt: f64, load: f64, random: &mut Random) -> f64 {
        match self {
            Self::Ramp { from, takes, begins } => {
                let share = ((age - *begins) / *takes).clamp(0.0, 1.0);
                (*from + (1.0 - *from) * share) * (0.9 + 0.1 * load.min(1.0))
            }
            Self::Logistic { middle, steepness, evicts, period } => {
                let fill = 1.0 / (1.0 + (-*steepness * (age - *middle) / *middle).exp());
                fill * (1.0 - *evicts * (age / *period).fract())
            }
            Self::Nightly { at, takes, day } => {
                let since = (age - *at).rem_euclid(DAY);
                let gathered = if since < *takes { since / *takes } else { 0.0 };
                (*day * load.min(2.0) / 2.0).max(gathered)
            }
            Self::Sessions { holds, deviation, state } => {
                let kept = (-dt / *holds).exp();
                *state = kept * *state + (1.0 - kept * kept).sqrt() * random.normal();
                (1.0 - (-age / *holds).exp()) * (0.55 + *deviation * *state)
            }
            Self::Epochs { length, first, dip, rising } => {
                let (epoch, within) = ((age / *length).floor(), (age / *length).fract());
                let plateau = *first + (1.0 - *first) * (epoch / *rising).min(1.0);
                if within < 0.1 {
                    plateau * (1.0 - *dip)
                } else {
                    plateau * (0.98 + 0.02 * (TAU * within).sin())
                }
            }
            Self::Compaction { period, begun, next, keeps } => {
                if age >= *next {
                    *begun = age;
                    *next = age + *period * random.uniform(0.7, 1.1);
                }
                *keeps + (1.0 - *keeps) * ((age - *begun) / *period).min(1.0)
            }
        }
        .clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_stays_between_its_floor_and_its_top() {
        for kind in UNSEEN {
            let mut random = Random::of(kind.name());
            let mut course = Course::new(kind, &mut random);
            let mut top: f64 = 0.0;
            for minute in 0..1440 {
                let x = course.step(f64::from(minute) * MINUTE, MINUTE, 1.0, &mut random);
                assert!((0.0..=1.0).contains(&x), "{kind:?}: {x}");
                top = top.max(x);
            }
            assert!(top > 0.5, "{kind:?} never grew: {top}");
        }
    }
}
