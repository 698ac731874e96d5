//! Replays all jobs and keeps what each detector did.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use highwater_policy::leak::Settings;

use crate::{
    detect::{Alarms, BASELINES, Detect, Highwater, Method, replay, replay_baseline},
    pools::{Job, Made, Pool},
    series::{Series, Truth},
};

/// What became of a series.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// The pool that it counts for.
    pub pool: Pool,
    /// The pod.
    pub pod: String,
    /// Family, kind or row.
    pub family: String,
    /// What is true of it.
    pub truth: Truth,
    /// Its length in days.
    pub days: f64,
    /// Whether there is a sample about every 10 s; otherwise about every minute.
    pub often: bool,
    /// The alarms of each detector.
    pub alarms: Vec<(Method, Alarms)>,
    /// Why ours acted first, in each of its settings.
    pub reasons: Vec<(Method, String)>,
}

impl Outcome {
    /// The alarms of a detector; `None` where it did not see this series.
    pub(crate) fn of(&self, method: Method) -> Option<&Alarms> {
        self.alarms.iter().find(|(m, _)| *m == method).map(|(_, alarms)| alarms)
    }
}

/// Shows Highwater a series; its alarms and the reason of the first act, or else of the last
/// finding.
fn replay_ours(mut detector: Highwater, series: &Series) -> (Alarms, String) {
    let mut first = None;
    let alarms = replay(&mut Watched { detector: &mut detector, first: &mut first }, series);
    let last = detector.finding.map(|f| format!("(no act) {}", f.reason));
    (alarms, first.or(last).unwrap_or_else(|| "(nothing found)".to_owned()))
}

struct Watched<'a> {
    detector: &'a mut Highwater,
    first: &'a mut Option<String>,
}

impl Detect for Watched<'_> {
    fn push(&mut self, point: &crate::series::Point) -> Option<crate::detect::Alarm> {
        let alarm = self.detector.push(point);
        if alarm == Some(crate::detect::Alarm::Act) && self.first.is_none() {
            *self.first = self.detector.finding.as_ref().map(|f| {
                let class = format!("{:?} {:?}", f.rule, f.class);
                format!("{:.1} h {class}: {}", crate::number::wide(point.at) / 3.6e6, f.reason)
            });
        }
        alarm
    }
}

fn judge(made: Made, settings: &Arc<Settings>, baselines: bool) -> Outcome {
    let Made { pool, series, earlier } = made;
    let mut alarms = Vec::new();
    let mut reasons = Vec::new();
    let mut ours = |method, detector| {
        let (seen, reason) = replay_ours(detector, &series);
        alarms.push((method, seen));
        reasons.push((method, reason));
    };
    ours(Method::Highwater, Highwater::new(settings, &series));
    if let Some(earlier) = &earlier {
        ours(Method::HighwaterWithPrior, Highwater::after(settings, earlier));
    }
    if series.declared.is_some() {
        let mut detector = Highwater::new(settings, &series);
        detector.declare(series.declared);
        ours(Method::HighwaterDeclared, detector);
    }
    if baselines {
        alarms.extend(BASELINES.map(|method| (method, replay_baseline(method, &series))));
    }
    let (days, often) = (series.days(), series.cadence() < 30.0);
    Outcome {
        pool,
        pod: series.pod,
        family: series.family,
        truth: series.truth,
        days,
        often,
        alarms,
        reasons,
    }
}

/// Replays all jobs.
pub(crate) fn run(jobs: &[Job], settings: &Arc<Settings>, baselines: bool) -> Vec<Outcome> {
    each(jobs, |job| Some(judge(job.make()?, settings, baselines)))
}

/// What comes of all items, worked on by as many threads as there are cores. The order is that of
/// the items, whoever took them.
pub(crate) fn each<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Option<R> + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { break };
                    let Some(result) = work(item) else { continue };
                    if let Ok(mut results) = results.lock() {
                        results.push((at, result));
                    }
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_default();
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}
