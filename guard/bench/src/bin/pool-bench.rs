//! `make bench-pool`: how much of a pool is lost to fragmentation, chunks of the ladder against first
//! fit, on a named trace. What takes a real GPU is measured by `e2e/real-gpu/pool_bench.py`.

use std::process::ExitCode;

use highwater_policy::pool::fragmentation::{Outcome, Trace, first_fit, on_ladder};

#[path = "../report.rs"]
#[allow(dead_code, reason = "the other program uses all of it")]
mod report;

/// What may be lost, external and internal fragmentation together, in percent.
const GOAL: f64 = 5.0;

/// Parts per million as percent.
fn percent(parts: u64) -> f64 {
    u32::try_from(parts).map_or(f64::NAN, |parts| f64::from(parts) / 1e4)
}

fn describe(how: &str, outcome: &Outcome) {
    println!(
        "  {how}: external {:.2} % (most {:.2} %), internal {:.2} % (most {:.2} %), {} refused although free, \
         at most {} pieces, {:.2} % made anew",
        percent(outcome.external_mean_ppm),
        percent(outcome.external_peak_ppm),
        percent(outcome.internal_mean_ppm),
        percent(outcome.internal_peak_ppm),
        outcome.refused_although_free,
        outcome.peak_pieces,
        percent(outcome.remade_ppm),
    );
}

fn main() -> ExitCode {
    let trace = Trace::llm_mix();
    let (ladder, fit) = (on_ladder(&trace), first_fit(&trace));
    println!("trace {}: {} requests in {} GiB", trace.name, ladder.requests, trace.capacity >> 30);
    let lost = |outcome: &Outcome| percent(outcome.external_mean_ppm) + percent(outcome.internal_mean_ppm);
    let mut report = report::Report::new("bench-pool");
    report.at_most("lost to fragmentation on the ladder, mean", lost(&ladder), GOAL, "%");
    report.at_most("the same, of what first fit loses", lost(&ladder) / lost(&fit), 1.0, "");
    describe("ladder", &ladder);
    describe("first fit", &fit);
    report.finish()
}
