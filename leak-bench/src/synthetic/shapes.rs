//! How memory that is used rightly moves: eight families, each between 0 (what the pod holds when
//! it has just begun) and 1 (about the most it ever holds).
//!
//! They were fixed before any detector had seen their series, and are not to be changed to suit
//! one.

use std::f64::consts::TAU;

use super::unseen::{Course, Unseen};
use crate::{
    number::{DAY, HOUR, MINUTE, real},
    random::Random,
};

/// A kind of right use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Family {
    /// Lazy loading, caches and arenas that fill: saturating, or as the logarithm of age.
    WarmUp,
    /// A cache of keys and values that fills at the pace of the work, and then is full.
    KvFill,
    /// Follows the load of the day.
    Diurnal,
    /// Batches that grow step by step to a bound.
    BatchGrowth,
    /// An allocator that fragments until holes fit.
    Fragmentation,
    /// One model after the other in the same process.
    ModelSwap,
    /// Keeps what the largest request so far needed.
    HighWater,
    /// Garbage that is collected when there is enough of it.
    Sawtooth,
    /// What was held back from tuning.
    Unseen(Unseen),
}

/// All families that tuning may see.
pub(crate) const FAMILIES: [Family; 8] = [
    Family::WarmUp,
    Family::KvFill,
    Family::Diurnal,
    Family::BatchGrowth,
    Family::Fragmentation,
    Family::ModelSwap,
    Family::HighWater,
    Family::Sawtooth,
];

impl Family {
    /// As it stands in names and tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::WarmUp => "warm-up",
            Self::KvFill => "kv-fill",
            Self::Diurnal => "diurnal",
            Self::BatchGrowth => "batch-growth",
            Self::Fragmentation => "fragmentation",
            Self::ModelSwap => "model-swap",
            Self::HighWater => "high-water",
            Self::Sawtooth => "sawtooth",
            Self::Unseen(kind) => kind.name(),
        }
    }
}

/// The state of a life of one of the families.
#[derive(Clone, Debug)]
pub(crate) enum Shape {
    /// `constant` in seconds; `span`: the age at which the logarithm reaches 1.
    WarmUp {
        constant: f64,
        logarithmic: Option<f64>,
    },
    KvFill {
        a_second: f64,
        filled: f64,
    },
    Diurnal {
        exponent: f64,
        follows: f64,
        typical: f64,
        state: f64,
    },
    BatchGrowth {
        gap: f64,
        most: f64,
        now: f64,
        next: f64,
        shrinks: bool,
    },
    Fragmentation {
        gap: f64,
        piece: f64,
        swing: f64,
        period: f64,
        held: f64,
        next: f64,
    },
    ModelSwap {
        models: Vec<f64>,
        dwell: f64,
        now: f64,
        next: f64,
        empty_until: f64,
    },
    HighWater {
        gap: f64,
        tail: f64,
        held: f64,
        releases: bool,
        next: f64,
    },
    Sawtooth {
        period: f64,
        jitter: f64,
        floor: f64,
        begun: f64,
        until: f64,
        power: f64,
    },
    Unseen(Course),
}

impl Shape {
    /// A life of `length` seconds of a family.
    pub(crate) fn new(family: Family, length: f64, workload: &mut Random) -> Self {
        let w = workload;
        match family {
            Family::WarmUp => Self::WarmUp {
                constant: w.log_uniform(5.0 * MINUTE, 3.0 * HOUR),
                logarithmic: w.chance(0.3).then_some(length),
            },
            Family::KvFill => {
                Self::KvFill { a_second: 1.0 / w.log_uniform(10.0 * MINUTE, 10.0 * HOUR), filled: 0.0 }
            }
            Family::Diurnal => Self::Diurnal {
                exponent: w.uniform(0.5, 1.5),
                follows: w.log_uniform(10.0, 30.0 * MINUTE),
                typical: w.uniform(2.0, 4.0),
                state: 0.0,
            },
            Family::BatchGrowth => Self::BatchGrowth {
                gap: w.log_uniform(3.0 * MINUTE, HOUR),
                most: w.uniform(4.0, 17.0).floor(),
                now: 0.0,
                next: 0.0,
                shrinks: w.chance(0.3),
            },
            Family::Fragmentation => Self::Fragmentation {
                gap: w.log_uniform(2.0 * MINUTE, 30.0 * MINUTE),
                piece: w.uniform(0.02, 0.3),
                swing: w.uniform(0.0, 0.1),
                period: w.log_uniform(5.0 * MINUTE, 4.0 * HOUR),
                held: 0.0,
                next: 0.0,
            },
            Family::ModelSwap => {
                let many = [2usize, 3, 4, 5];
                let models = (0..w.pick(&many).unwrap_or(2)).map(|_| w.uniform(0.1, 1.0)).collect::<Vec<_>>();
                let top = models.iter().copied().fold(0.1, f64::max);
                Self::ModelSwap {
                    models: models.into_iter().map(|m| m / top).collect(),
                    dwell: w.log_uniform(5.0 * MINUTE, 2.0 * HOUR),
                    now: 0.0,
                    next: 0.0,
                    empty_until: 0.0,
                }
            }
            Family::HighWater => Self::HighWater {
                gap: w.log_uniform(MINUTE, 30.0 * MINUTE),
                tail: w.uniform(0.8, 2.5),
                held: 0.0,
                releases: w.chance(0.2),
                next: 0.0,
            },
            Family::Unseen(kind) => Self::Unseen(Course::new(kind, w)),
            Family::Sawtooth => Self::Sawtooth {
                period: w.log_uniform(3.0 * MINUTE, 6.0 * HOUR),
                jitter: w.uniform(0.05, 0.5),
                floor: w.uniform(0.0, 0.15),
                begun: 0.0,
                until: 0.0,
                power: w.pick(&[0.7, 1.0, 1.0, 1.5]).unwrap_or(1.0),
            },
        }
    }

    /// Where memory stands `age` seconds into the life, after `dt` seconds under a load.
    pub(crate) fn step(&mut self, age: f64, dt: f64, load: f64, random: &mut Random) -> f64 {
        match self {
            Self::WarmUp { constant, logarithmic } => match logarithmic {
                Some(length) => (1.0 + age / *constant).ln() / (1.0 + *length / *constant).ln(),
                None => 1.0 - (-age / *constant).exp(),
            },
            Self::KvFill { a_second, filled } => {
                *filled = (*filled + *a_second * load * dt).min(1.0);
                *filled
            }
            Self::Diurnal { exponent, follows, typical, state } => {
                let aim = (load / *typical).powf(*exponent).min(1.0);
                *state += (aim - *state) * (1.0 - (-dt / *follows).exp());
                *state
            }
            Self::BatchGrowth { gap, most, now, next, shrinks } => {
                if age >= *next {
                    let down = *shrinks && load < 0.5 && *now > 1.0;
                    let up = load > 0.3 && *now < *most;
                    *now += if down { -1.0 } else { f64::from(u8::from(up)) };
                    *next = age + random.exponential(*gap);
                }
                *now / *most
            }
            Self::Fragmentation { gap, piece, swing, period, held, next } => {
                if age >= *next {
                    *held += (1.0 - *held) * *piece * random.unit();
                    *next = age + random.exponential(*gap);
                }
                let live = *swing * f64::midpoint(1.0, (TAU * age / *period).sin()) * load.min(1.0);
                *held * (1.0 - *swing) + live
            }
            Self::ModelSwap { models, dwell, now, next, empty_until } => {
                if age >= *next {
                    *now = random.pick(models).unwrap_or(0.5);
                    *next = age + random.exponential(*dwell);
                    *empty_until = age + random.uniform(5.0, 60.0);
                }
                if age < *empty_until { 0.0 } else { *now }
            }
            Self::HighWater { gap, tail, held, releases, next } => {
                if age >= *next {
                    // The size of a request: a Pareto tail, cut at what the server accepts.
                    let size = (0.1 * (1.0 - random.unit()).powf(-1.0 / *tail)).min(1.0);
                    *held = held.max(size);
                    *next = age + random.exponential(*gap / load.clamp(0.05, 5.0));
                }
                if *releases && load < 0.2 {
                    *held *= (-dt / HOUR).exp();
                }
                *held
            }
            Self::Unseen(course) => course.step(age, dt, load, random),
            Self::Sawtooth { period, jitter, floor, begun, until, power } => {
                if age >= *until {
                    *begun = age;
                    *until = age + (*period * (1.0 + *jitter * random.normal())).max(*period * 0.2);
                }
                let run = ((age - *begun) / *period).min(1.0);
                *floor + (1.0 - *floor) * run.powf(*power)
            }
        }
        .clamp(0.0, 1.0)
    }
}

/// How long a life lasts: most a day, some a week, in seconds.
pub(crate) fn length(number: usize) -> f64 {
    DAY * real(if number.is_multiple_of(8) { 7 } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_stays_between_its_floor_and_its_top() {
        for family in FAMILIES {
            let mut random = Random::of(family.name());
            let mut shape = Shape::new(family, DAY, &mut random);
            let mut top: f64 = 0.0;
            for minute in 0..1440 {
                let x = shape.step(f64::from(minute) * MINUTE, MINUTE, 1.0, &mut random);
                assert!((0.0..=1.0).contains(&x), "{family:?}: {x}");
                top = top.max(x);
            }
            assert!(top > 0.1, "{family:?} never grew: {top}");
        }
    }
}
