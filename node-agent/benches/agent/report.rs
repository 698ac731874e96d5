//! One line a figure, and a summary.

use std::process::ExitCode;

/// Figures against their goals.
pub(crate) struct Report {
    name: &'static str,
    figures: usize,
    short: usize,
}

impl Report {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, figures: 0, short: 0 }
    }

    /// Prints a figure that may be at most `goal`.
    pub(crate) fn at_most(&mut self, what: &str, figure: f64, goal: f64, unit: &str) {
        let holds = figure <= goal; // not a number does not hold
        self.figures += 1;
        self.short += usize::from(!holds);
        let verdict = if holds { "ok" } else { "short" };
        println!("{what:<34} {figure:>8.2} {unit:<3}  goal <= {goal} {unit:<3}  {verdict}");
    }

    /// Prints the summary; success if every goal holds.
    pub(crate) fn finish(self) -> ExitCode {
        println!("{}: {} of {} goals hold", self.name, self.figures - self.short, self.figures);
        if self.short == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
