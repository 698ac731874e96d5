//! The figures with their goals.

use crate::{
    cost::Cost,
    detect::Method,
    interval::{ratio, share},
    modes::Named,
    number::real,
    pools::Pool,
    report::{Goal, Report, plain},
    run::Outcome,
    score::{benign, leaks, precision_of},
    tables::{mix, of, synthetic},
};

fn found(report: &mut Report, outcomes: &[Outcome]) {
    let (all, right) = mix(outcomes, Method::Highwater);
    report.estimate(
        "recall with >= 10 min, leaks in trace host and synthetic, first life",
        all.recall_in_time(),
        Goal::AtLeast(0.92),
    );
    for (pool, name) in [
        (Pool::LeakHost, "trace host"),
        (Pool::LeakSynthetic, "synthetic, 2-12 h"),
        (Pool::LeakSlow, "synthetic, 24-72 h"),
        (Pool::LeakUnseen, "synthetic, held back from tuning"),
        (Pool::Rows, "rows of public reports"),
        (Pool::LeakGpu, "trace device, which swaps models"),
    ] {
        let leaks = leaks(of(outcomes, pool), Method::Highwater);
        if leaks.lives > 0 {
            report.estimate(&format!("  of these and apart: {name}"), leaks.recall_in_time(), Goal::Stated);
        }
    }
    let (prior, _) = mix(outcomes, Method::HighwaterWithPrior);
    report.estimate("  synthetic, with an earlier healthy life", prior.recall_in_time(), Goal::Stated);
    report.estimate(
        "precision of episodes at 1 leak : 3 benign, first life",
        precision_of(&all, &right),
        Goal::AtLeast(0.90),
    );
    let lead = |part| all.lead(part).unwrap_or(f64::NAN);
    report.figure(
        "  lead, p10 and p50, minutes",
        lead(0.5),
        &format!("{} and {}", plain(lead(0.1)), plain(lead(0.5))),
        Goal::Stated,
    );
    report.figure(
        "  leaks acted on before their onset",
        real(all.early),
        &format!("{} of {}", all.early, all.lives),
        Goal::Stated,
    );
}

fn false_acts(report: &mut Report, outcomes: &[Outcome]) {
    let host = benign(of(outcomes, Pool::TraceHost), Method::Highwater);
    if host.lives > 0 {
        report.figure(
            "false acts on host memory of the trace",
            real(host.acts),
            &format!("{} in {} days", host.acts, plain(host.days)),
            Goal::AtMost(1.0),
        );
    }
    let device = benign(of(outcomes, Pool::TraceGpu), Method::Highwater);
    if device.lives > 0 {
        report.figure(
            "  device memory of the trace, which swaps models",
            real(device.acts),
            &format!("{} in {} days", device.acts, plain(device.days)),
            Goal::Stated,
        );
    }
    let first = benign(synthetic(outcomes, false), Method::Highwater);
    report.estimate(
        "false acts per 1,000 days, synthetic without KV fill, first life",
        first.per_thousand_days(),
        Goal::AtMost(5.0),
    );
    report.estimate(
        "  KV fill, first life, nothing declared",
        benign(synthetic(outcomes, true), Method::Highwater).per_thousand_days(),
        Goal::Stated,
    );
    let unseen = benign(of(outcomes, Pool::Unseen), Method::Highwater);
    if unseen.lives > 0 {
        report.estimate("  held back from tuning, first life", unseen.per_thousand_days(), Goal::Stated);
        let prior = benign(of(outcomes, Pool::Unseen), Method::HighwaterWithPrior);
        report.estimate(
            "  held back from tuning, with an earlier life",
            prior.per_thousand_days(),
            Goal::Stated,
        );
    }
    let prior = benign(of(outcomes, Pool::Synthetic), Method::HighwaterWithPrior);
    report.estimate(
        "false acts per 1,000 days, synthetic, with an earlier life",
        prior.per_thousand_days(),
        Goal::AtMost(1.0),
    );
    let declared = benign(synthetic(outcomes, true), Method::HighwaterDeclared);
    report.estimate(
        "false acts per 1,000 days, KV fill, plateau declared",
        declared.per_thousand_days(),
        Goal::AtMost(1.0),
    );
    report.figure(
        "  days of synthetic lives: first, with an earlier life",
        first.days,
        &format!("{} and {}", plain(first.days), plain(prior.days)),
        Goal::Stated,
    );
}

fn against_staircase(report: &mut Report, outcomes: &[Outcome]) {
    for (pool, name) in
        [(Pool::TraceGpu, "trace device"), (Pool::TraceHost, "trace host"), (Pool::Synthetic, "synthetic")]
    {
        let theirs = benign(of(outcomes, pool), Method::Staircase);
        if theirs.lives == 0 {
            continue;
        }
        let ours = benign(of(outcomes, pool), Method::Highwater);
        let what = format!("  false alarms of the staircase for each of ours, {name}");
        let shown = format!(
            "{}:{} {}",
            theirs.acts,
            ours.acts,
            crate::report::bounded(ratio(theirs.acts, ours.acts))
        );
        report.figure(&what, f64::NAN, &shown, Goal::Stated);
    }
}

fn costs(report: &mut Report, cost: &Cost) {
    let microseconds = cost.microseconds_a_sample;
    report.figure("a sample, amortised, µs", microseconds, &plain(microseconds), Goal::AtMost(0.5));
    let longest = cost.longest_milliseconds;
    report.figure("the longest sample (blocks close), ms", longest, &plain(longest), Goal::AtMost(1.0));
    // 10,000 pods every 10 s are 1,000 samples a second.
    let core = microseconds / 10.0;
    report.figure("10,000 pods every 10 s, percent of a core", core, &plain(core), Goal::AtMost(10.0));
    report.figure(
        "a detector with its windows, bytes",
        real(cost.bytes),
        &cost.bytes.to_string(),
        Goal::AtMost(4096.0),
    );
    report.figure(
        "its state and profile as written, bytes",
        real(cost.state),
        &cost.state.to_string(),
        Goal::AtMost(32_768.0),
    );
}

fn modes(report: &mut Report, named: &[Named]) {
    let right = named.iter().filter(|n| n.said == Some(n.truth)).count();
    report.estimate(
        "coarse leak modes that are named rightly",
        share(right, named.len()),
        Goal::AtLeast(0.85),
    );
}

/// All figures.
pub(crate) fn all(report: &mut Report, outcomes: &[Outcome], named: &[Named], cost: &Cost) {
    found(report, outcomes);
    false_acts(report, outcomes);
    against_staircase(report, outcomes);
    modes(report, named);
    costs(report, cost);
}
