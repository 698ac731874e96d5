//! How far it is, for whoever waits at a terminal.

use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use super::input::Tally;

/// Nothing is shown before.
const PATIENCE: Duration = Duration::from_millis(700);
/// Between two looks at the clock, rows go by.
const ROWS: u32 = 1 << 14;

/// A line that is written over and over.
#[derive(Debug)]
pub(crate) struct Progress {
    tally: Tally,
    shown: bool,
    terminal: bool,
    rows: u32,
    next: Instant,
    began: Instant,
}

impl Progress {
    pub(crate) fn new(tally: Tally) -> Self {
        let began = Instant::now();
        Self {
            tally,
            shown: false,
            terminal: io::stderr().is_terminal(),
            rows: 0,
            next: began + PATIENCE,
            began,
        }
    }

    /// One more row.
    pub(crate) fn row(&mut self, samples: u64, series: usize) {
        self.rows += 1;
        if !self.terminal || self.rows < ROWS {
            return;
        }
        self.rows = 0;
        let now = Instant::now();
        if now >= self.next {
            self.next = now + PATIENCE;
            self.shown = true;
            let done = self.tally.percent().map_or_else(String::new, |percent| format!("{percent:3} %  "));
            let line = line(samples, series, self.began.elapsed());
            // A terminal that is gone is no reason to stop.
            let _ = write!(io::stderr(), "\r\x1b[K{done}{line}");
        }
    }

    /// Takes the line away.
    pub(crate) fn finish(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

fn line(samples: u64, series: usize, since: Duration) -> String {
    let seconds = since.as_secs().max(1);
    format!("{samples} samples of {series} series, {} a second", samples / seconds)
}
