//! One line a figure, and a summary.

use std::process::ExitCode;

/// Figures against their goals.
#[derive(Debug)]
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
        // Not a number does not hold.
        self.figure(what, figure, ("<=", goal), unit, figure <= goal);
    }

    /// Prints a figure that must be at least `goal`.
    pub(crate) fn at_least(&mut self, what: &str, figure: f64, goal: f64, unit: &str) {
        self.figure(what, figure, (">=", goal), unit, figure >= goal);
    }

    /// Notes something that either holds or does not, and was printed already.
    pub(crate) fn note(&mut self, holds: bool) {
        self.figures += 1;
        self.short += usize::from(!holds);
    }

    fn figure(&mut self, what: &str, figure: f64, (sign, goal): (&str, f64), unit: &str, holds: bool) {
        self.note(holds);
        let verdict = if holds { "ok" } else { "short" };
        println!("{what:<52} {figure:>9.3} {unit:<3}  goal {sign} {goal} {unit:<3}  {verdict}");
    }

    /// Prints the summary; success if every goal holds.
    pub(crate) fn finish(self) -> ExitCode {
        println!("{}: {} of {} goals hold", self.name, self.figures - self.short, self.figures);
        if self.short == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
