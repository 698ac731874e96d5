//! What is replayed: benign series, leaks, and what is neither.

use crate::{
    cases::{Case, render::render},
    inject::{KINDS, Kind, UNSEEN_KINDS},
    series::Series,
    side::Side,
    synthetic::{
        Workload,
        shapes::{FAMILIES, Family},
        unseen::UNSEEN,
    },
    trace::{self, Trace},
};

/// Peaks of what is used rightly, as shares of the capacity: some close to it.
const PEAKS: (f64, f64) = (0.45, 0.97);
/// Peaks of what leaks besides: pods with some room, as there is nothing to see where there is none.
const PEAKS_BELOW_LEAKS: (f64, f64) = (0.3, 0.85);
/// Hours that a leak takes to run out, and one that only the slow scales can see.
const HOURS: (f64, f64) = (2.0, 12.0);
const SLOW_HOURS: (f64, f64) = (24.0, 72.0);
/// The number of a slow leak is beyond this.
const SLOW: usize = 100_000;

/// A pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Pool {
    /// Device memory of the trace.
    TraceGpu,
    /// Host memory of the trace.
    TraceHost,
    /// Made right use.
    Synthetic,
    /// Leaks in device memory of the trace.
    LeakGpu,
    /// Leaks in host memory of the trace.
    LeakHost,
    /// Leaks in made series.
    LeakSynthetic,
    /// Slow leaks in made series.
    LeakSlow,
    /// Right use of makes that tuning has not seen.
    Unseen,
    /// Leaks of kinds, or in right use of makes, that tuning has not seen.
    LeakUnseen,
    /// Rows that a maintainer or reporter told of.
    Rows,
    /// Rows whose label is inferred.
    RowsInferred,
    /// The pods of the trace that collapse.
    Collapses,
}

/// How much is replayed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Workloads of each family.
    pub workloads: usize,
    /// Leaks of each kind in each family.
    pub leaks: usize,
    /// Slow ones.
    pub slow: usize,
    /// Leaks of each kind in each series of the trace.
    pub traced: usize,
    /// Seeds of each row.
    pub seeds: usize,
}

/// For the report.
pub(crate) const FULL: Sizes = Sizes { workloads: 640, leaks: 10, slow: 3, traced: 2, seeds: 20 };
/// For a look.
pub(crate) const QUICK: Sizes = Sizes { workloads: 32, leaks: 3, slow: 1, traced: 1, seeds: 4 };

/// A series to be made, or one that is there.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    /// Made right use.
    Benign(Workload),
    /// A leak of a kind in it, and whether it is a slow one.
    Leaking(Workload, Kind, bool),
    /// The same, held back from tuning.
    UnseenBenign(Workload),
    /// The same, held back from tuning.
    UnseenLeaking(Workload, Kind),
    /// A row of the table and its seed.
    Row(Case, usize),
    /// One of the trace.
    Traced(Pool, Series),
}

/// A series with what belongs to it.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    /// Where it counts.
    pub pool: Pool,
    /// The life to be judged.
    pub series: Series,
    /// An earlier, disjoint life of the same workload, if there is one.
    pub earlier: Option<Series>,
}

impl Job {
    /// Makes the series; `None` where the draw gave none.
    pub(crate) fn make(&self) -> Option<Made> {
        match self {
            Self::Benign(workload) => {
                let length = workload.length();
                let (series, earlier) = (workload.life(0, length), Some(workload.life(1, length)));
                Some(Made { pool: Pool::Synthetic, series, earlier })
            }
            Self::Leaking(workload, kind, slow) => {
                let series = workload.leaking(0, *kind, if *slow { SLOW_HOURS } else { HOURS })?;
                let earlier = Some(workload.life(1, 86_400.0));
                Some(Made { pool: if *slow { Pool::LeakSlow } else { Pool::LeakSynthetic }, series, earlier })
            }
            Self::UnseenBenign(workload) => {
                let made = Self::Benign(workload.clone()).make()?;
                Some(Made { pool: Pool::Unseen, ..made })
            }
            Self::UnseenLeaking(workload, kind) => {
                let made = Self::Leaking(workload.clone(), *kind, false).make()?;
                Some(Made { pool: Pool::LeakUnseen, ..made })
            }
            Self::Row(case, seed) => {
                let cadence = if seed.is_multiple_of(2) { 10.0 } else { 60.0 };
                let series = render(case, *seed, cadence)?;
                Some(Made {
                    pool: if case.reported { Pool::Rows } else { Pool::RowsInferred },
                    series,
                    earlier: None,
                })
            }
            Self::Traced(pool, series) => Some(Made { pool: *pool, series: series.clone(), earlier: None }),
        }
    }
}

/// So many workloads of a family that are on a side.
fn workloads(
    pool: &'static str,
    family: Family,
    peaks: (f64, f64),
    side: Side,
    from: usize,
) -> impl Iterator<Item = Workload> {
    (from..).map(move |n| Workload::new(pool, family, n, peaks)).filter(move |w| w.side() == side)
}

/// What is held back from tuning: right use of other makes, other leaks in all makes, and the known
/// leaks in the other makes.
fn unseen(side: Side, sizes: Sizes) -> Vec<Job> {
    let mut jobs = Vec::new();
    for kind in UNSEEN {
        let family = Family::Unseen(kind);
        let benign = workloads("benign", family, PEAKS, side, 0).take(sizes.workloads);
        jobs.extend(benign.map(Job::UnseenBenign));
    }
    let makes = FAMILIES.into_iter().chain(UNSEEN.map(Family::Unseen));
    for (number, family) in makes.enumerate() {
        let known = number >= FAMILIES.len();
        let kinds = KINDS.into_iter().filter(move |_| known).chain(UNSEEN_KINDS);
        let kinds = kinds.flat_map(|kind| std::iter::repeat_n(kind, sizes.leaks.div_ceil(2)));
        let bases = workloads("leak-unseen", family, PEAKS_BELOW_LEAKS, side, 0);
        jobs.extend(bases.zip(kinds).map(|(w, kind)| Job::UnseenLeaking(w, kind)));
    }
    jobs
}

/// All that is replayed for a side; the longest jobs first.
pub(crate) fn jobs(side: Side, sizes: Sizes, trace: Option<&Trace>, cases: &[Case]) -> Vec<Job> {
    let mut jobs = Vec::new();
    for family in FAMILIES {
        let benign = workloads("benign", family, PEAKS, side, 0).take(sizes.workloads);
        jobs.extend(benign.map(Job::Benign));
        let kinds = |each: usize| KINDS.into_iter().flat_map(move |kind| std::iter::repeat_n(kind, each));
        for (slow, each, from) in [(false, sizes.leaks, 0), (true, sizes.slow, SLOW)] {
            let bases = workloads("leak", family, PEAKS_BELOW_LEAKS, side, from);
            jobs.extend(bases.zip(kinds(each)).map(|(w, kind)| Job::Leaking(w, kind, slow)));
        }
    }
    if side == Side::Odd {
        jobs.extend(unseen(side, sizes));
    }
    for case in cases.iter().filter(|case| case.side() == side) {
        jobs.extend((0..sizes.seeds).map(|seed| Job::Row(case.clone(), seed)));
    }
    if let Some(trace) = trace {
        let of_side = |s: &&Series| Side::of(&s.pod) == side;
        for (benign, leak, series) in
            [(Pool::TraceGpu, Pool::LeakGpu, &trace.gpu), (Pool::TraceHost, Pool::LeakHost, &trace.host)]
        {
            for series in series.iter().filter(of_side) {
                jobs.push(Job::Traced(benign, series.clone()));
                let leaking = trace::leaking(series, sizes.traced);
                jobs.extend(leaking.into_iter().map(|series| Job::Traced(leak, series)));
            }
        }
        // Too few to tune on, and never looked at for it.
        if side == Side::Odd {
            jobs.extend(trace.collapses.iter().map(|s| Job::Traced(Pool::Collapses, s.clone())));
        }
    }
    jobs
}
