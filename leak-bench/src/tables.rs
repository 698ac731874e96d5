//! The tables: every detector on every pool, ours by family, kind and row.

use std::collections::BTreeMap;

use crate::{
    detect::{BASELINES, Method},
    pools::Pool,
    report::{Report, bounded, plain},
    run::Outcome,
    score::{self, balanced_accuracy, benign, leaks, open, precision_of},
    series::Truth,
    synthetic::shapes::Family,
};

/// Outcomes of a pool.
pub(crate) fn of(outcomes: &[Outcome], pool: Pool) -> impl Iterator<Item = &Outcome> + Clone {
    outcomes.iter().filter(move |o| o.pool == pool)
}

/// Whether it is a cache that fills.
pub(crate) fn fills(outcome: &Outcome) -> bool {
    outcome.family == Family::KvFill.name()
}

/// Made right use: without caches that fill, or these alone.
pub(crate) fn synthetic(outcomes: &[Outcome], filling: bool) -> impl Iterator<Item = &Outcome> + Clone {
    of(outcomes, Pool::Synthetic).filter(move |o| fills(o) == filling)
}

fn methods() -> impl Iterator<Item = Method> {
    [Method::Highwater, Method::HighwaterWithPrior, Method::HighwaterDeclared].into_iter().chain(BASELINES)
}

fn seen(outcomes: &[Outcome], method: Method) -> bool {
    outcomes.iter().any(|o| o.of(method).is_some())
}

fn false_acts(report: &mut Report, outcomes: &[Outcome]) {
    let mut rows = Vec::new();
    for method in methods().filter(|m| seen(outcomes, *m)) {
        let pools = [
            benign(of(outcomes, Pool::TraceHost), method),
            benign(of(outcomes, Pool::TraceGpu), method),
            benign(synthetic(outcomes, false), method),
            benign(synthetic(outcomes, true), method),
            benign(of(outcomes, Pool::Unseen), method),
            benign(of(outcomes, Pool::Rows), method),
        ];
        let mut row = vec![method.name().to_owned()];
        row.extend(pools.iter().map(|b| {
            if b.lives == 0 {
                "-".to_owned()
            } else {
                format!("{}: {}", b.acts, bounded(b.per_thousand_days()))
            }
        }));
        let suspects =
            pools.get(2).filter(|b| b.lives > 0).map_or("-".to_owned(), |b| plain(b.suspects_a_day()));
        row.push(suspects);
        rows.push(row);
    }
    let days = |b: score::Benign| format!("{} lives, {} days", b.lives, plain(b.days));
    let mut last = vec!["(what was replayed)".to_owned()];
    for b in [
        benign(of(outcomes, Pool::TraceHost), Method::Highwater),
        benign(of(outcomes, Pool::TraceGpu), Method::Highwater),
        benign(synthetic(outcomes, false), Method::Highwater),
        benign(synthetic(outcomes, true), Method::Highwater),
        benign(of(outcomes, Pool::Unseen), Method::Highwater),
        benign(of(outcomes, Pool::Rows), Method::Highwater),
    ] {
        last.push(days(b));
    }
    last.push(String::new());
    rows.push(last);
    report.table(
        "False acts: count, and per 1,000 days of a pod with the exact 95 % interval",
        &[
            "detector",
            "trace, host",
            "trace, device (swaps models)",
            "synthetic without KV fill",
            "synthetic KV fill",
            "synthetic held back from tuning",
            "benign rows",
            "suspicions a pod and day, synthetic without KV fill",
        ],
        &rows,
    );
}

/// The pools of leaks by their name.
const LEAKS: [(Pool, &str); 6] = [
    (Pool::LeakHost, "trace, host"),
    (Pool::LeakSynthetic, "synthetic"),
    (Pool::LeakSlow, "synthetic, slow (24-72 h)"),
    (Pool::LeakUnseen, "held back from tuning"),
    (Pool::Rows, "rows"),
    (Pool::LeakGpu, "trace, device (swaps models)"),
];

fn found(report: &mut Report, outcomes: &[Outcome]) {
    for (pool, name) in LEAKS {
        let mut rows = Vec::new();
        for method in methods() {
            let leaks = leaks(of(outcomes, pool), method);
            if leaks.lives == 0 {
                continue;
            }
            let minutes = |part| leaks.lead(part).map_or("-".to_owned(), plain);
            rows.push(vec![
                method.name().to_owned(),
                leaks.lives.to_string(),
                bounded(leaks.recall_in_time()),
                plain(leaks.recall().value),
                minutes(0.1),
                minutes(0.5),
                leaks.early.to_string(),
            ]);
        }
        if !rows.is_empty() {
            report.table(
                &format!("Leaks found: {name}"),
                &[
                    "detector",
                    "leaks",
                    "recall with >= 10 min",
                    "recall",
                    "lead p10, min",
                    "lead p50, min",
                    "acted on before the onset",
                ],
                &rows,
            );
        }
    }
}

/// Leaks and benign series of the stated mix: host-like and synthetic.
pub(crate) fn mix(outcomes: &[Outcome], method: Method) -> (score::Leaks, score::Benign) {
    let leak = |o: &&Outcome| matches!(o.pool, Pool::LeakHost | Pool::LeakSynthetic | Pool::LeakSlow);
    let right = |o: &&Outcome| matches!(o.pool, Pool::TraceHost | Pool::Synthetic);
    (leaks(outcomes.iter().filter(leak), method), benign(outcomes.iter().filter(right), method))
}

/// The precision of one pool of leaks at the mix, with benign series of another.
fn precision_apart(outcomes: &[Outcome], leaking: &[Pool], right: Pool, method: Method) -> String {
    let leaks = leaks(outcomes.iter().filter(|o| leaking.contains(&o.pool)), method);
    let benign = benign(of(outcomes, right), method);
    if leaks.lives == 0 || benign.lives == 0 {
        "-".to_owned()
    } else {
        bounded(precision_of(&leaks, &benign))
    }
}

fn precisions(report: &mut Report, outcomes: &[Outcome]) {
    let mut rows = Vec::new();
    for method in methods() {
        let (leaks, benign) = mix(outcomes, method);
        if leaks.lives == 0 || benign.lives == 0 {
            continue;
        }
        // Of 1,000 episodes at the mix: leaks that did not run out, less restarts of what was well.
        let leaking = 1000.0 / (1.0 + score::BENIGN_A_LEAK);
        let spared = leaking * leaks.recall_in_time().value;
        let wrong = leaking
            * (crate::number::real(leaks.early) / crate::number::real(leaks.lives)
                + score::BENIGN_A_LEAK * crate::number::real(benign.acted)
                    / crate::number::real(benign.lives));
        let restarts = leaking * leaks.recall().value + wrong;
        rows.push(vec![
            method.name().to_owned(),
            bounded(precision_of(&leaks, &benign)),
            precision_apart(outcomes, &[Pool::LeakHost], Pool::TraceHost, method),
            precision_apart(outcomes, &[Pool::LeakSynthetic, Pool::LeakSlow], Pool::Synthetic, method),
            bounded(leaks.recall_in_time()),
            plain(balanced_accuracy(&leaks, &benign)),
            plain(spared),
            plain(wrong),
            plain(spared - wrong),
            plain(restarts * score::LEAD),
        ]);
    }
    report.table(
        "Episodes of the mix: 1 leak (trace host and synthetic) to 3 benign (the same), and the harm in 1,000 of them",
        &[
            "detector",
            "precision",
            "trace host alone",
            "synthetic alone",
            "recall with >= 10 min",
            "balanced accuracy",
            "OOMs avoided",
            "false restarts",
            "avoided less false",
            "GPU-minutes of restarts at 10 min",
        ],
        &rows,
    );
}

fn families(report: &mut Report, outcomes: &[Outcome]) {
    let mut groups: BTreeMap<&str, Vec<&Outcome>> = BTreeMap::new();
    for outcome in of(outcomes, Pool::Synthetic).chain(of(outcomes, Pool::Unseen)) {
        groups.entry(&outcome.family).or_default().push(outcome);
    }
    let rows: Vec<Vec<String>> = groups
        .iter()
        .map(|(family, group)| {
            let mut row = vec![(*family).to_owned()];
            let first = benign(group.iter().copied(), Method::Highwater);
            row.push(plain(first.days));
            for method in [Method::Highwater, Method::HighwaterWithPrior, Method::HighwaterDeclared] {
                let b = benign(group.iter().copied(), method);
                row.push(if b.lives == 0 {
                    "-".to_owned()
                } else {
                    format!("{} in {}: {}", b.acts, b.acted, bounded(b.per_thousand_days()))
                });
            }
            row.push(plain(first.suspects_a_day()));
            row
        })
        .collect();
    report.table(
        "Highwater on right use, by family: acts, in so many lives, per 1,000 days",
        &["family", "days", "first life", "with an earlier life", "plateau declared", "suspicions a day"],
        &rows,
    );
}

fn kinds(report: &mut Report, outcomes: &[Outcome]) {
    let mut groups: BTreeMap<(Pool, &str), Vec<&Outcome>> = BTreeMap::new();
    let pools = [Pool::LeakHost, Pool::LeakSynthetic, Pool::LeakSlow, Pool::LeakUnseen, Pool::LeakGpu];
    for outcome in outcomes.iter().filter(|o| pools.contains(&o.pool)) {
        let (base, kind) = outcome.family.split_once(' ').unwrap_or((&outcome.family, ""));
        groups.entry((outcome.pool, kind)).or_default().push(outcome);
        if matches!(outcome.pool, Pool::LeakSynthetic | Pool::LeakUnseen) {
            groups.entry((outcome.pool, base)).or_default().push(outcome);
        }
    }
    let rows: Vec<Vec<String>> = groups
        .iter()
        .map(|((pool, what), group)| {
            let name = LEAKS.iter().find(|(p, _)| p == pool).map_or("", |(_, name)| name);
            let mut row = vec![name.to_owned(), (*what).to_owned()];
            for method in [Method::Highwater, Method::HighwaterWithPrior] {
                let leaks = leaks(group.iter().copied(), method);
                row.push(if leaks.lives == 0 {
                    "-".to_owned()
                } else {
                    format!(
                        "{} of {}, {} too late, {} before",
                        leaks.in_time,
                        leaks.lives,
                        leaks.found - leaks.in_time,
                        leaks.early
                    )
                });
            }
            row
        })
        .collect();
    report.table(
        "Highwater on leaks, by kind of leak and by what leaks",
        &["pool", "kind or family", "first life", "with an earlier life"],
        &rows,
    );
}

fn cadences(report: &mut Report, outcomes: &[Outcome]) {
    let mut rows = Vec::new();
    for (often, name) in [(true, "10 s"), (false, "a minute")] {
        let seen = |pools: &'static [Pool]| {
            outcomes.iter().filter(move |o| o.often == often && pools.contains(&o.pool))
        };
        let leaks = leaks(seen(&[Pool::LeakSynthetic, Pool::LeakSlow]), Method::Highwater);
        let right = benign(seen(&[Pool::Synthetic]).filter(|o| !fills(o)), Method::Highwater);
        rows.push(vec![
            name.to_owned(),
            bounded(leaks.recall_in_time()),
            format!("{} in {} days: {}", right.acts, plain(right.days), bounded(right.per_thousand_days())),
        ]);
    }
    report.table(
        "Highwater by how often there is a sample, synthetic, first life",
        &["a sample every", "recall with >= 10 min", "false acts per 1,000 days, without KV fill"],
        &rows,
    );
}

fn table_rows(report: &mut Report, outcomes: &[Outcome]) {
    let mut groups: BTreeMap<(u32, &str), Vec<&Outcome>> = BTreeMap::new();
    for outcome in outcomes.iter().filter(|o| matches!(o.pool, Pool::Rows | Pool::RowsInferred)) {
        let number = outcome.family.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        groups.entry((number, &outcome.family)).or_default().push(outcome);
    }
    let mut rows = Vec::new();
    for ((_, family), group) in groups {
        let mut row = vec![family.to_owned()];
        let truth = group.first().map(|o| o.truth);
        let inferred = group.iter().any(|o| o.pool == Pool::RowsInferred);
        row.push(if inferred { "inferred" } else { "told" }.to_owned());
        let of = |method| match truth {
            Some(Truth::Leak { .. }) => {
                let l = leaks(group.iter().copied(), method);
                let lead = l.lead(0.5).map_or("-".to_owned(), plain);
                format!("{} of {} in time, p50 {lead} min", l.in_time, l.lives)
            }
            Some(Truth::Benign) => {
                let b = benign(group.iter().copied(), method);
                format!("{} of {} acted on", b.acted, b.lives)
            }
            Some(t) => {
                let o = open(group.iter().copied(), method, matches!(t, Truth::Fragmentation { .. }));
                format!(
                    "{} near the end, {} before, of {} that run out and {} that do not",
                    o.near,
                    o.early,
                    o.run_out,
                    o.lives - o.run_out
                )
            }
            None => String::new(),
        };
        row.push(
            match truth {
                Some(Truth::Leak { .. }) => "leak",
                Some(Truth::Benign) => "benign",
                Some(Truth::Fragmentation { .. }) => "fragmentation",
                _ => "unresolved",
            }
            .to_owned(),
        );
        row.extend([Method::Highwater, Method::Staircase, Method::Linear, Method::Watermark88].map(of));
        rows.push(row);
    }
    if !rows.is_empty() {
        report.table(
            "Rows of public reports",
            &["row", "label", "what it is", "Highwater", "staircase", "linear fit", "watermark 88 %"],
            &rows,
        );
    }
}

/// What each saw of the pods that collapse, and when.
pub(crate) fn collapses(report: &mut Report, outcomes: &[Outcome]) {
    let shown = |times: &[u64], end: u64| {
        let before: Vec<u64> = times.iter().copied().filter(|at| *at < end).collect();
        before.last().map_or("-".to_owned(), |last| {
            format!("{} ({} in all)", plain(score::lead(*last, end)), before.len())
        })
    };
    let mut rows = Vec::new();
    for outcome in of(outcomes, Pool::Collapses) {
        let Truth::Leak { exhausted, .. } = outcome.truth else { continue };
        let mut row = vec![outcome.pod.clone(), plain(crate::number::wide(exhausted) / 3.6e6)];
        for method in
            [Method::Highwater, Method::Staircase, Method::Linear, Method::Watermark88, Method::Watermark95]
        {
            row.push(outcome.of(method).map_or("-".to_owned(), |alarms| shown(&alarms.acts, exhausted)));
        }
        if let Some(ours) = outcome.of(Method::Highwater) {
            row.insert(2, shown(&ours.suspects, exhausted));
        }
        rows.push(row);
    }
    if !rows.is_empty() {
        report.table(
            "Pods of the trace whose host memory collapses: minutes from the last alarm to the collapse",
            &[
                "pod",
                "collapses at, h",
                "Highwater suspects",
                "Highwater acts, by the trend or the rate of rise",
                "staircase",
                "linear fit",
                "watermark 88 %",
                "watermark 95 %",
            ],
            &rows,
        );
    }
}

/// All tables.
pub(crate) fn all(report: &mut Report, outcomes: &[Outcome]) {
    false_acts(report, outcomes);
    precisions(report, outcomes);
    found(report, outcomes);
    families(report, outcomes);
    kinds(report, outcomes);
    cadences(report, outcomes);
    table_rows(report, outcomes);
    collapses(report, outcomes);
}
