//! A table for people.

use std::{
    io::{self, Write},
    time::Duration,
};

use highwater_crds::ByteSize;
use jiff::Timestamp;

use super::Output;
use crate::simulate::{
    decision::{Decision, Seconds},
    span::span,
};

/// Rows that are held back to see how wide the columns have to be.
const HELD: usize = 500;

/// A time from here on is taken for one since 1970: September 2001.
const SINCE_1970: u64 = 1_000_000_000_000;

const HEADER: [&str; COLUMNS] =
    ["TIME", "POD", "DEVICE", "LIFE", "DECISION", "CLASS", "GROWTH", "FULL IN", "SURE", "WHY"];
const COLUMNS: usize = 10;

/// Writes decisions under a header. The first rows decide how wide the columns are.
#[derive(Debug)]
pub(crate) struct Table<W> {
    into: W,
    held: Vec<[String; COLUMNS]>,
    widths: Option<[usize; COLUMNS]>,
}

impl<W: Write> Table<W> {
    pub(crate) fn new(into: W) -> Self {
        Self { into, held: Vec::new(), widths: None }
    }

    /// Writes what was held back, once the widths are known.
    fn release(&mut self) -> io::Result<[usize; COLUMNS]> {
        if let Some(widths) = self.widths {
            return Ok(widths);
        }
        let header = HEADER.map(str::to_owned);
        let mut widths = [0; COLUMNS];
        for row in self.held.iter().chain([&header]) {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        write_row(&mut self.into, &header, &widths)?;
        for row in self.held.drain(..) {
            write_row(&mut self.into, &row, &widths)?;
        }
        self.widths = Some(widths);
        Ok(widths)
    }
}

impl<W: Write> Output for Table<W> {
    fn decision(&mut self, decision: &Decision<'_>) -> io::Result<()> {
        let row = row(decision);
        if self.widths.is_none() && self.held.len() < HELD {
            self.held.push(row);
            return Ok(());
        }
        let widths = self.release()?;
        write_row(&mut self.into, &row, &widths)
    }

    fn finish(&mut self, whole: bool) -> io::Result<()> {
        if self.widths.is_some() || !self.held.is_empty() {
            self.release()?;
        } else if whole {
            writeln!(self.into, "No decisions.")?;
        }
        self.into.flush()
    }
}

fn write_row(into: &mut impl Write, row: &[String; COLUMNS], widths: &[usize; COLUMNS]) -> io::Result<()> {
    let mut line = String::new();
    for (cell, width) in row.iter().zip(widths) {
        line.push_str(cell);
        line.extend(std::iter::repeat_n(' ', (width + 2).saturating_sub(cell.chars().count())));
    }
    writeln!(into, "{}", line.trim_end())
}

fn row(decision: &Decision<'_>) -> [String; COLUMNS] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    [
        time(decision.seconds),
        printable(decision.pod),
        printable(decision.device),
        decision.life.to_string(),
        decision.kind.name().to_owned(),
        or_dash(decision.class.map(str::to_owned)),
        or_dash(decision.slope_bytes_per_hour.map(growth)),
        or_dash(decision.exhaustion_seconds.map(|seconds| span(seconds.saturating_mul(1000)))),
        or_dash(decision.confidence.map(|sure| format!("{sure:.2}"))),
        printable(&decision.reason),
    ]
}

/// A time since 1970 as such, any other as a distance from 0.
fn time(Seconds(milliseconds): Seconds) -> String {
    let since_1970 = i64::try_from(milliseconds).ok().filter(|_| milliseconds >= SINCE_1970);
    if let Some(time) = since_1970.and_then(|ms| Timestamp::from_millisecond(ms).ok()) {
        return time.round(jiff::Unit::Second).unwrap_or(time).to_string();
    }
    let seconds = milliseconds / 1000;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let clock = format!("{hours:02}:{minutes:02}:{:02}", seconds % 60);
    if days > 0 { format!("{days}d {clock}") } else { clock }
}

/// Bytes an hour.
fn growth(slope: f64) -> String {
    let sign = if slope < 0.0 { "-" } else { "+" };
    format!("{sign}{}/h", ByteSize(whole(slope.abs())).rounded())
}

/// A float that is not below zero without its fraction.
fn whole(value: f64) -> u64 {
    // The library's conversion is checked, the language's is not.
    Duration::try_from_secs_f64(value).map_or(u64::MAX, |seconds| seconds.as_secs())
}

/// A name without what would upset a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use highwater_policy::leak::LeakClass;

    use super::*;
    use crate::simulate::decision::{Kind, class};

    fn decision(pod: &str) -> Decision<'_> {
        Decision {
            pod,
            device: "0",
            life: 1,
            seconds: Seconds(93_784_500),
            kind: Kind::Act,
            class: Some(class(LeakClass::PerReplay)),
            slope_bytes_per_hour: Some(1.5 * 1024.0 * 1024.0 * 1024.0),
            exhaustion_seconds: Some(2580),
            confidence: Some(0.912),
            reason: "grows\nsteadily".to_owned(),
        }
    }

    fn table(pods: &[&str]) -> Vec<String> {
        let mut text = Vec::new();
        let mut table = Table::new(&mut text);
        for pod in pods {
            table.decision(&decision(pod)).unwrap();
        }
        table.finish(true).unwrap();
        String::from_utf8(text).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        assert_eq!(
            table(&["a", "server-0"]),
            [
                "TIME         POD       DEVICE  LIFE  DECISION  CLASS      GROWTH      FULL IN  SURE  WHY",
                "1d 02:03:04  a         0       1     act       perReplay  +1.5 GiB/h  43 min   0.91  grows?steadily",
                "1d 02:03:04  server-0  0       1     act       perReplay  +1.5 GiB/h  43 min   0.91  grows?steadily",
            ]
        );
    }

    #[test]
    fn no_decision_is_said() {
        assert_eq!(table(&[]), ["No decisions."]);
    }

    #[test]
    fn more_rows_than_are_held_are_all_written() {
        let names: Vec<String> = (0..=HELD).map(|n| "x".repeat(n % 7 + 1)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(table(&names).len(), names.len() + 1);
    }

    #[test]
    fn a_time_since_1970_is_a_date() {
        assert_eq!(time(Seconds(1_767_225_600_957)), "2026-01-01T00:00:01Z");
        assert_eq!(time(Seconds(3_661_000)), "01:01:01");
        assert_eq!(time(Seconds(u64::MAX)), "213503982334d 14:25:51");
    }
}
