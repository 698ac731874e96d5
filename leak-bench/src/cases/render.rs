//! Series from the numbers of a report. What the report leaves open (the pod's limit, how often
//! requests come, how noisy the level is) is drawn; each seed draws anew.
//!
//! This renderer was fixed before any detector had seen its series, and is not to be changed to
//! suit one.

use super::{
    Case, Label,
    figures::{Figures, Per},
};
use crate::{
    disturb,
    load::Load,
    noise::Noise,
    number::{DAY, GIB, HOUR, MIB, real, whole},
    random::Random,
    series::{Point, Series, Truth},
};

/// No series is longer, in seconds.
const LONGEST: f64 = 100.0 * HOUR;

/// How memory runs, in bytes over what was done since the start (in seconds of mean load) or over
/// seconds.
#[derive(Clone, Debug)]
enum Course {
    Flat(f64),
    /// From a level, by `rise` bytes with every `every` seconds of mean work, at most to `most`.
    Growing {
        from: f64,
        rise: f64,
        every: f64,
        most: f64,
    },
    /// Levels, each from a time on.
    Levels(Vec<(f64, f64)>),
    /// From a level by a rise, with a time constant, in so many pieces.
    Saturating {
        from: f64,
        rise: f64,
        constant: f64,
        pieces: f64,
    },
    /// A level, and bursts to another between two times.
    Bursts {
        level: f64,
        to: f64,
        bursts: Vec<(f64, f64)>,
    },
}

impl Course {
    fn level(&self, age: f64, work: f64) -> f64 {
        match self {
            Self::Flat(level) => *level,
            Self::Growing { from, rise, every, most } => (from + rise * (work / every).floor()).min(*most),
            Self::Levels(levels) => {
                levels.iter().rev().find(|(since, _)| age >= *since).map_or(0.0, |(_, level)| *level)
            }
            Self::Saturating { from, rise, constant, pieces } => {
                let share = 1.0 - (-age / constant).exp();
                from + rise * (share * pieces).round() / pieces
            }
            Self::Bursts { level, to, bursts } => {
                if bursts.iter().any(|(from, until)| age >= *from && age < *until) { *to } else { *level }
            }
        }
    }
}

/// What a course runs against.
#[derive(Clone, Debug)]
struct Outline {
    course: Course,
    capacity: f64,
    /// Whether it goes on until it runs out.
    runs_out: bool,
}

/// Capacities as they are sold.
fn usual_capacity(gpu: bool, random: &mut Random) -> f64 {
    if gpu {
        GIB * random.pick(&[24.0, 48.0, 80.0, 141.0]).unwrap_or(80.0)
    } else {
        GIB * random.log_uniform(8.0, 256.0)
    }
}

/// The highest level named, and the capacity if one is.
fn plateau(figures: &Figures, random: &mut Random) -> (Option<f64>, Option<f64>) {
    match random.pick(&figures.of_capacity) {
        Some((level, capacity)) => (Some(level), Some(capacity)),
        None => (figures.levels.last().copied(), figures.capacity),
    }
}

fn growing(case: &Case, random: &mut Random) -> Option<Outline> {
    let figures = &case.figures;
    let (amount, per) = if let Some(growth) = figures.growth {
        (random.uniform(growth.low, growth.high), growth.per)
    } else {
        let (first, last) = (figures.levels.first()?, figures.levels.last()?);
        let steps = real(figures.levels.len().saturating_sub(1));
        ((last - first) / steps.max(1.0), Per::Events(1.0))
    };
    let start = case.start.or(figures.levels.first().copied().filter(|_| figures.growth.is_none()));
    match per {
        Per::Seconds(seconds) => {
            let needed = amount / seconds * random.log_uniform(4.0 * HOUR, 72.0 * HOUR);
            let from = start.unwrap_or_else(|| {
                let share = random.uniform(0.2, 0.6);
                needed * share / (1.0 - share)
            });
            // Bytes come by the request: pieces of a minute's worth.
            let course = Course::Growing { from, rise: amount * 60.0 / seconds, every: 60.0, most: f64::MAX };
            Some(Outline { course, capacity: from + needed, runs_out: true })
        }
        Per::Events(_) => {
            let capacity = match start.filter(|s| *s > 0.0) {
                Some(start) => start * random.uniform(1.3, 4.0),
                None => usual_capacity(case.gpu, random),
            };
            let from = start.unwrap_or_else(|| capacity * random.uniform(0.2, 0.6));
            let times = (capacity - from) / amount;
            let every = random.log_uniform(2.0 * HOUR, DAY) / times;
            // Events faster than one a second come together; slower ones stand out as steps.
            let pieces = (1.0 / every).max(1.0);
            let course =
                Course::Growing { from, rise: amount * pieces, every: every * pieces, most: f64::MAX };
            Some(Outline { course, capacity, runs_out: true })
        }
    }
}

fn capped(case: &Case, random: &mut Random) -> Option<Outline> {
    let rise = *case.figures.levels.first()?;
    let amount = case.figures.growth.map_or(rise / 100.0, |g| g.low);
    let capacity = usual_capacity(case.gpu, random);
    let from = case.start.unwrap_or_else(|| capacity * random.uniform(0.4, 0.9));
    let every = random.log_uniform(HOUR, DAY) * amount / rise;
    let course = Course::Growing { from, rise: amount, every, most: from + rise };
    Some(Outline { course, capacity: capacity.max((from + rise) * 1.03), runs_out: false })
}

fn steps(case: &Case, random: &mut Random) -> Option<Outline> {
    let figures = &case.figures;
    let (level, capacity) = plateau(figures, random);
    let from = case.start.or(level.filter(|_| figures.levels.len() > 1).and(figures.levels.first().copied()));
    let mut targets = Vec::new();
    match (from, level) {
        (Some(from), _) if !figures.rises.is_empty() => {
            let mut at = from;
            for (rise, _) in &figures.rises {
                at += rise;
                targets.push(at);
            }
        }
        (Some(_), Some(level)) if figures.levels.is_empty() => targets.push(level),
        _ if !figures.levels.is_empty() => targets.extend(&figures.levels),
        _ => {
            let rise = figures.rises.first()?.0;
            let from = rise * random.uniform(0.5, 2.0);
            targets.extend([from, from + rise]);
        }
    }
    let top = targets.iter().copied().fold(from.unwrap_or(0.0), f64::max);
    let mut at = 0.0;
    let mut levels = vec![(0.0, from.or(targets.first().copied()).unwrap_or(0.0))];
    let gap = random.log_uniform(120.0, 2.0 * HOUR);
    for target in targets {
        at += random.exponential(gap);
        levels.push((at, target));
    }
    let capacity = capacity.unwrap_or_else(|| top * random.uniform(1.05, 2.0));
    Some(Outline { course: Course::Levels(levels), capacity, runs_out: false })
}

fn saturating(case: &Case, random: &mut Random) -> Option<Outline> {
    let figures = &case.figures;
    let (level, capacity) = plateau(figures, random);
    let drawn = random.log_uniform(1200.0, 6.0 * HOUR);
    let (from, rise, constant) = match (figures.rises.first(), figures.growth, level) {
        (_, Some(growth), level) if matches!(growth.per, Per::Seconds(_)) && figures.levels.len() < 2 => {
            let Per::Seconds(seconds) = growth.per else { return None };
            // "Then a plateau": the rise was all there was, and three time constants long.
            let whole_rise = level.is_some() || case.shape != "saturating" || seconds >= HOUR;
            let more = if whole_rise { 1.0 } else { random.uniform(1.0, 5.0) };
            let rise = f64::midpoint(growth.low, growth.high) * more;
            let from = match (level, case.start) {
                (Some(level), _) => level - rise,
                (None, start) => start?,
            };
            (from, rise, if whole_rise { seconds / 3.0 } else { seconds * more })
        }
        (_, _, Some(level)) => {
            let from = case.start.or(figures.levels.first().copied())?;
            let constant = match figures.through {
                Some(Per::Seconds(seconds)) => seconds / 3.0,
                _ => drawn,
            };
            (from, level - from, constant)
        }
        (Some((rise, span)), _, None) => (case.start?, *rise, span.map_or(drawn, |span| span / 3.0)),
        _ => return None,
    };
    let pieces = if case.gpu { random.uniform(5.0, 40.0).round() } else { 1e6 };
    let capacity = capacity.unwrap_or_else(|| (from + rise) * random.uniform(1.05, 2.0));
    Some(Outline { course: Course::Saturating { from, rise, constant, pieces }, capacity, runs_out: false })
}

fn burst(case: &Case, random: &mut Random) -> Option<Outline> {
    let to = *case.figures.levels.first()?;
    let mut bursts = Vec::new();
    let mut at = 0.0;
    while at < DAY {
        at += random.exponential(5.0 * HOUR);
        let until = at + random.uniform(120.0, 900.0);
        bursts.push((at, until));
        at = until;
    }
    let level = case.start.unwrap_or_else(|| to * random.uniform(0.1, 0.3));
    let course = Course::Bursts { level, to, bursts };
    Some(Outline { course, capacity: to * random.uniform(1.05, 2.0), runs_out: false })
}

fn flat(case: &Case, random: &mut Random) -> Outline {
    let (level, capacity) = if let Some(level) = case.start {
        (level, level * random.uniform(1.05, 2.0))
    } else {
        let capacity = usual_capacity(case.gpu, random);
        (capacity * random.uniform(0.3, 0.93), capacity)
    };
    Outline { course: Course::Flat(level), capacity, runs_out: false }
}

fn outline(case: &Case, random: &mut Random) -> Option<Outline> {
    match case.shape.as_str() {
        "flat" | "flat-in-NVML" => Some(flat(case, random)),
        "linear" | "monotone" | "slow-monotone" | "staircase" => growing(case, random),
        "linear-capped" => capped(case, random),
        "step" | "step-then-flat" => steps(case, random),
        "saturating" | "saturating?" | "concave" => saturating(case, random),
        "burst" => burst(case, random),
        _ => None,
    }
}

/// The series of a row for a seed, a sample every `cadence` seconds; `None` where the row carries
/// no number that its shape can be drawn by.
pub(crate) fn render(case: &Case, seed: usize, cadence: f64) -> Option<Series> {
    if !case.carries_numbers() {
        return None;
    }
    let pod = format!("row-{}-{seed}", case.id);
    let mut random = Random::of(&format!("{}/{pod}", case.thread));
    let Outline { course, capacity, runs_out } = outline(case, &mut random)?;
    let mut workload = random.clone();
    let mut load = Load::new(&mut workload, &mut random);
    let mut noise = Noise::new(case.gpu, capacity, &mut random);
    let signal = random.chance(0.5);
    let scale = random.log_uniform(0.05, 50.0);
    let begin = random.uniform(30.0, 300.0);
    let length = if runs_out { LONGEST } else { DAY };
    let (mut age, mut done, mut exhausted) = (0.0, 0.0, None);
    let mut points = Vec::new();
    while age < length && exhausted.is_none() {
        let grown = if age < begin {
            (0.02 + 0.98 * age / begin) * course.level(0.0, 0.0)
        } else {
            done += load.step(age, cadence, &mut random) * cadence;
            course.level(age - begin, done)
        };
        let level = noise.add(grown, cadence, &mut random);
        let at = whole(age * 1000.0);
        if level >= capacity && runs_out {
            exhausted = Some(at);
        }
        let bytes = whole(level.min(capacity - MIB));
        points.push(Point { at, bytes: Some(bytes), work: signal.then_some(done * scale) });
        age += cadence;
    }
    disturb::gaps(&mut points, &mut random);
    let truth = match (case.label, exhausted) {
        (Label::Benign, _) => Truth::Benign,
        (Label::Leak, Some(exhausted)) => Truth::Leak { onset: whole(begin * 1000.0), exhausted },
        // Too slow for the series, or not to be seen in it.
        (Label::Leak, None) => return None,
        (Label::Fragmentation, exhausted) => Truth::Fragmentation { exhausted },
        (Label::Unresolved, exhausted) => Truth::Unresolved { exhausted },
    };
    let family = format!("row {} {}", case.id, case.shape);
    Some(Series { pod, family, capacity: whole(capacity), declared: None, points, truth })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::figures;

    fn case(shape: &str, start: Option<f64>, rate: &str, label: Label) -> Case {
        Case {
            id: "1".to_owned(),
            thread: "owner/name#1".to_owned(),
            gpu: true,
            shape: shape.to_owned(),
            start: start.map(|s| s * MIB),
            figures: figures::read(rate, start.is_some()),
            label,
            reported: true,
        }
    }

    fn highest(series: &Series) -> f64 {
        series.points.iter().filter_map(|p| p.bytes).max().map_or(0.0, crate::number::wide) / MIB
    }

    #[test]
    fn a_leak_runs_out_within_its_series() {
        for seed in 0..20 {
            let case = case("linear", None, "8-10 MB/iter", Label::Leak);
            let series = render(&case, seed, 60.0).unwrap();
            let Truth::Leak { onset, exhausted } = series.truth else { panic!("{:?}", series.truth) };
            assert!(onset < exhausted && exhausted <= 100 * 3_600_000);
            assert!(highest(&series) * MIB > crate::number::wide(series.capacity) * 0.98);
        }
    }

    #[test]
    fn a_plateau_is_where_the_report_says() {
        let case = case("saturating", Some(717.0), "0.7->1.5->22GB then flat 22266/24564", Label::Benign);
        let series = render(&case, 3, 60.0).unwrap();
        assert_eq!(series.capacity, 24_564 << 20);
        assert!((22_000.0..22_700.0).contains(&highest(&series)), "{}", highest(&series));
    }

    #[test]
    fn steps_add_up() {
        let case = case("step-then-flat", Some(25_568.0), "+86 then +2 then 0", Label::Benign);
        assert!((25_656.0..26_000.0).contains(&highest(&render(&case, 1, 60.0).unwrap())));
    }

    #[test]
    fn a_row_without_numbers_has_no_series() {
        assert!(render(&case("linear", None, "plot", Label::Leak), 0, 60.0).is_none());
    }

    #[test]
    fn a_seed_gives_the_same_series_again() {
        let case = case("concave", Some(9713.0), "9713 10845 ? 11133 MiB of 12196", Label::Benign);
        let points = |seed| render(&case, seed, 60.0).unwrap().points;
        assert_eq!(points(7), points(7));
        assert_ne!(points(7), points(8));
    }
}
