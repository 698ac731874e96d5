//! `make bench-leaks`: how early leaks are found, and how seldom anything else is taken for one.
//!
//! Every series is replayed sample by sample. Sides, seeds and series follow from names; nothing
//! is set for the bench. One line a figure, with its goal and `ok` or `short`; the exit status is
//! 0 only where every goal is reached.

mod cases;
mod cost;
mod detect;
mod disturb;
mod features;
mod figures;
mod inject;
mod interval;
mod load;
mod modes;
mod noise;
mod number;
mod pools;
mod random;
mod recorded;
mod report;
mod run;
#[cfg(test)]
mod scenarios;
mod score;
mod series;
mod side;
mod synthetic;
mod tables;
mod trace;
mod tuning;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context;
use clap::{Parser, ValueEnum};

use crate::{report::Report, side::Side};

/// Replays series with and without leaks, and counts.
#[derive(Debug, Parser)]
struct Args {
    /// The side of every pool: the even one is for tuning, the odd one is reported.
    #[arg(long, value_enum, default_value = "odd")]
    side: Side,
    /// A tenth of it, in less than a minute.
    #[arg(long)]
    quick: bool,
    /// Only Highwater, none of what it is compared with.
    #[arg(long)]
    alone: bool,
    /// Write the tables to docs/benchmarks/leaks.md.
    #[arg(long)]
    write: bool,
    /// Replay this alone, print it, and stop: what costs little.
    #[arg(long, value_enum, conflicts_with = "write")]
    only: Option<Only>,
    /// Print so many wrong decisions of each family, with the reason given (even side).
    #[arg(long, default_value_t = 0)]
    wrong: usize,
    /// Write the samples of a pod of the even side as CSV, and what was found in it, and stop.
    #[arg(long)]
    dump: Option<String>,
    /// Write what an act would go by, minute by minute, as CSV for `model/train.py`, and stop.
    #[arg(long)]
    features: Option<PathBuf>,
    /// The folder of the trace; without it, what needs it is left out.
    #[arg(long, env = "HIGHWATER_TRACE")]
    trace: Option<PathBuf>,
    /// The table of public reports; without it, what needs it is left out.
    #[arg(long, env = "HIGHWATER_LEAK_CASES")]
    cases: Option<PathBuf>,
}

/// A part that can be replayed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Only {
    /// What was recorded on a real GPU.
    Recorded,
    /// The pods of the trace whose host memory collapses.
    Collapses,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let mut report = Report::default();
    if args.only == Some(Only::Recorded) {
        recorded::report(&mut report, &recorded::folder(), &detect::settings())?;
        print!("{}", report.tables());
        return Ok(report.finish());
    }
    let trace = args.trace.as_deref().map(trace::read).transpose()?;
    if trace.is_none() {
        report.note("HIGHWATER_TRACE names no folder: nothing of the trace is replayed.");
    }
    let cases = args.cases.as_deref().map(cases::read).transpose()?.unwrap_or_default();
    if cases.is_empty() {
        report.note("HIGHWATER_LEAK_CASES names no table: no public report is replayed.");
    }
    let sizes = if args.quick { pools::QUICK } else { pools::FULL };
    let mut jobs = pools::jobs(args.side, sizes, trace.as_ref(), &cases);
    let settings = detect::settings();
    if args.only == Some(Only::Collapses) {
        jobs.retain(|job| matches!(job, pools::Job::Traced(pools::Pool::Collapses, _)));
        tables::collapses(&mut report, &run::run(&jobs, &settings, true));
        print!("{}", report.tables());
        return Ok(report.finish());
    }
    if let Some(pod) = &args.dump {
        return tuning::dump(&jobs, pod, &settings);
    }
    if let Some(path) = &args.features {
        return features::write(path, args.side, &jobs, &settings);
    }
    let outcomes = run::run(&jobs, &settings, !args.alone);
    if args.wrong > 0 && args.side == Side::Even {
        tuning::wrong(&outcomes, args.wrong);
    }
    tables::all(&mut report, &outcomes);
    let named = modes::named(args.side, args.quick, &settings);
    modes::tables(&mut report, &named);
    recorded::report(&mut report, &recorded::folder(), &settings)?;
    print!("{}", report.tables());
    figures::all(&mut report, &outcomes, &named, &cost::measure(&settings));
    if args.write {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/benchmarks/leaks.md");
        let side = match args.side {
            Side::Odd => "Below is the odd side, which tuning has not seen.",
            Side::Even => {
                "**Below is the even side, on which the detector was tuned: no result yet, only where tuning stands.**"
            }
        };
        let text = format!(
            "{}\n{side}\n\n{}{}",
            include_str!("preface.md"),
            report.markdown(),
            include_str!("tried.md")
        );
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(report.finish())
}
