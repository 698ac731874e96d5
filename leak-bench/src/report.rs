//! One line a figure with its goal, tables, and a summary.

use std::{fmt::Write as _, process::ExitCode};

use crate::interval::Estimate;

/// What is printed, and what is written down.
#[derive(Debug, Default)]
pub(crate) struct Report {
    figures: usize,
    short: usize,
    /// The figures as rows of a table.
    rows: Vec<[String; 4]>,
    /// The tables, each with its heading.
    tables: String,
}

/// A goal of a figure.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    /// At most so much.
    AtMost(f64),
    /// At least so much.
    AtLeast(f64),
    /// No goal: stated only.
    Stated,
}

/// A number with as many places as it needs.
pub(crate) fn plain(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "-".to_owned(),
        _ if value.is_infinite() => "inf".to_owned(),
        v if v == 0.0 || v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// An estimate with its interval.
pub(crate) fn bounded(estimate: Estimate) -> String {
    if estimate.value.is_nan() {
        return "-".to_owned();
    }
    format!("{} ({}-{})", plain(estimate.value), plain(estimate.low), plain(estimate.high))
}

impl Report {
    /// Prints a figure and holds it against its goal.
    pub(crate) fn figure(&mut self, what: &str, value: f64, shown: &str, goal: Goal) {
        let (goal, holds, distance) = match goal {
            Goal::AtMost(most) => (format!("<= {most}"), Some(value <= most), value - most),
            Goal::AtLeast(least) => (format!(">= {least}"), Some(value >= least), least - value),
            Goal::Stated => (String::new(), None, 0.0),
        };
        let verdict = match holds {
            Some(true) => "ok".to_owned(),
            Some(false) if distance.is_nan() => "short".to_owned(),
            Some(false) => format!("short by {}", plain(distance)),
            None => String::new(),
        };
        self.figures += usize::from(holds.is_some());
        self.short += usize::from(holds == Some(false));
        let goal_shown = if goal.is_empty() { goal.clone() } else { format!("goal {goal}") };
        println!("{}", format!("{what:<68} {shown:<28} {goal_shown:<14} {verdict}").trim_end());
        self.rows.push([what.to_owned(), shown.to_owned(), goal, verdict]);
    }

    /// Prints an estimate and holds its value against its goal.
    pub(crate) fn estimate(&mut self, what: &str, estimate: Estimate, goal: Goal) {
        self.figure(what, estimate.value, &bounded(estimate), goal);
    }

    /// Prints something that belongs to the figures and is none.
    pub(crate) fn note(&mut self, text: &str) {
        println!("{text}");
        let _ = writeln!(self.tables, "{text}\n");
    }

    /// Adds a table.
    pub(crate) fn table(&mut self, heading: &str, columns: &[&str], rows: &[Vec<String>]) {
        let _ = writeln!(self.tables, "## {heading}\n\n| {} |", columns.join(" | "));
        let _ = writeln!(self.tables, "|{}", "---|".repeat(columns.len()));
        for row in rows {
            let _ = writeln!(self.tables, "| {} |", row.join(" | "));
        }
        self.tables.push('\n');
    }

    /// The figures as a table, and all tables after it.
    pub(crate) fn markdown(&self) -> String {
        let mut text = "| figure | measured | goal | |\n|---|---|---|---|\n".to_owned();
        for row in &self.rows {
            let _ = writeln!(text, "| {} |", row.join(" | "));
        }
        format!("{text}\n{}", self.tables)
    }

    /// The tables alone.
    pub(crate) fn tables(&self) -> &str {
        &self.tables
    }

    /// Prints the summary; success if every goal holds.
    pub(crate) fn finish(&self) -> ExitCode {
        println!("bench-leaks: {} of {} goals hold", self.figures - self.short, self.figures);
        if self.short == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_number_does_not_hold() {
        let mut report = Report::default();
        report.figure("a", f64::NAN, "-", Goal::AtLeast(0.9));
        report.figure("b", 1.0, "1", Goal::AtMost(1.0));
        assert_eq!((report.figures, report.short), (2, 1));
        assert!(report.markdown().contains("| a | - | >= 0.9 | short |"));
        assert!(report.markdown().contains("| b | 1 | <= 1 | ok |"));
    }

    #[test]
    fn what_is_short_says_by_how_much() {
        let mut report = Report::default();
        report.figure("a", 0.85, "0.85", Goal::AtLeast(0.92));
        report.figure("b", 13.5, "13.5", Goal::AtMost(5.0));
        let text = report.markdown();
        assert!(text.contains("| a | 0.85 | >= 0.92 | short by 0.070 |"), "{text}");
        assert!(text.contains("| b | 13.5 | <= 5 | short by 8.50 |"), "{text}");
    }
}
