//! What whoever tunes wants to see: wrong decisions with their reasons, and the samples of a pod.

use std::{collections::BTreeMap, process::ExitCode, sync::Arc};

use highwater_policy::leak::Settings;

use crate::{
    detect::{Detect, Highwater, Method},
    number::wide,
    pools::{Job, Pool},
    run::Outcome,
    score::{LEAD, lead},
    series::Truth,
    side::Side,
};

/// What is wrong with a decision; `None` where it is right.
fn fault(outcome: &Outcome, method: Method) -> Option<String> {
    let alarms = outcome.of(method)?;
    match (outcome.truth, alarms.first_act()) {
        (Truth::Benign, Some(at)) => Some(format!("false act at {:.1} h", hours(at))),
        (Truth::Leak { onset, .. }, Some(at)) if at < onset => {
            Some(format!("act at {:.1} h before the onset", hours(at)))
        }
        (Truth::Leak { exhausted, .. }, Some(at)) if lead(at, exhausted) < LEAD => {
            Some(format!("act only {:.0} min before the end", lead(at, exhausted)))
        }
        (Truth::Leak { .. }, None) => Some("missed".to_owned()),
        _ => None,
    }
}

fn hours(at: u64) -> f64 {
    wide(at) / 3.6e6
}

/// Prints at most `most` wrong decisions of each family and pool.
pub(crate) fn wrong(outcomes: &[Outcome], most: usize) {
    let mut printed: BTreeMap<(Pool, &str, Method), usize> = BTreeMap::new();
    for outcome in outcomes {
        for (method, reason) in &outcome.reasons {
            let Some(fault) = fault(outcome, *method) else { continue };
            let count = printed.entry((outcome.pool, &outcome.family, *method)).or_default();
            *count += 1;
            if *count > most {
                continue;
            }
            let truth = match outcome.truth {
                Truth::Leak { onset, exhausted } => {
                    format!(", leaks {:.1}-{:.1} h", hours(onset), hours(exhausted))
                }
                _ => String::new(),
            };
            println!(
                "{:?} [{}] {} ({}{truth}): {fault}: {reason}",
                outcome.pool,
                method.name(),
                outcome.pod,
                outcome.family
            );
        }
    }
}

/// Writes the samples of a pod to the output and its findings to the error output.
pub(crate) fn dump(jobs: &[Job], pod: &str, settings: &Arc<Settings>) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        Side::of(pod) == Side::Even || pod.starts_with("row-"),
        "{pod} is on the side that is reported"
    );
    let mut seen = false;
    for made in jobs.iter().filter_map(Job::make).filter(|made| made.series.pod == pod) {
        eprintln!(
            "{} {}: capacity {}, {:?}",
            pod, made.series.family, made.series.capacity, made.series.truth
        );
        if !seen {
            println!("pod,device,seconds,bytes,capacity,work");
        }
        let mut detector = Highwater::new(settings, &made.series);
        for point in &made.series.points {
            let text = |value: Option<String>| value.unwrap_or_default();
            if !seen {
                println!(
                    "{pod},0,{},{},{},{}",
                    wide(point.at) / 1000.0,
                    text(point.bytes.map(|b| b.to_string())),
                    made.series.capacity,
                    text(point.work.map(|w| format!("{w:.3}")))
                );
            }
            if let (Some(alarm), Some(finding)) = (detector.push(point), &detector.finding) {
                eprintln!(
                    "{:.2} h {alarm:?} {:?} {:?}: {}",
                    hours(point.at),
                    finding.rule,
                    finding.class,
                    finding.reason
                );
            }
        }
        seen = true;
    }
    anyhow::ensure!(seen, "no pod {pod} is replayed with these arguments");
    Ok(ExitCode::SUCCESS)
}
