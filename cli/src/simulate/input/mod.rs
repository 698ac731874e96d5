//! Recorded series, read row by row: nothing here holds a file.

mod csv;
mod labels;
mod lines;
mod number;
mod prometheus;
mod source;

pub(crate) use self::{
    csv::read as read_csv,
    labels::{Labels, PodLabels},
    prometheus::read as read_prometheus,
    source::{Source, Tally},
};

use std::{fmt, io};

/// What stands in one row of a file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Row<'a> {
    /// Whose memory it is.
    pub(crate) pod: &'a [u8],
    /// Of which device.
    pub(crate) device: &'a [u8],
    /// When, in milliseconds of the file's own time.
    pub(crate) milliseconds: u64,
    /// Memory in use. `None` where it is missing, which is never 0.
    pub(crate) bytes: Option<u64>,
    /// Memory that there is.
    pub(crate) capacity: Option<u64>,
    /// Work done so far.
    pub(crate) work: Option<f64>,
    /// Memory of the host in use by the pod.
    pub(crate) host_bytes: Option<u64>,
    /// Another number than in the row before: the pod was started anew.
    pub(crate) life: Option<i64>,
    /// Labels of the pod.
    pub(crate) labels: PodLabels<'a>,
}

/// What is done with each row; the line is given where there are lines.
pub(crate) type Each<'a> = dyn FnMut(Option<u64>, &Row<'_>) -> Result<(), Stop> + 'a;

/// Why reading ended before the end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    /// The file has to be changed.
    #[error("{0}")]
    Fault(#[from] Fault),
    /// Nobody takes what is found.
    #[error("the decisions cannot be written: {0}")]
    Output(#[from] io::Error),
}

/// Why a file cannot be read, and what to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) struct Fault {
    /// The line, from 1; absent where it is about the whole file.
    pub(crate) line: Option<u64>,
    /// What is wrong there.
    pub(crate) what: String,
}

impl Fault {
    /// About a line.
    pub(crate) fn at(line: u64, what: impl Into<String>) -> Self {
        Self { line: Some(line), what: what.into() }
    }

    /// About the file.
    pub(crate) fn of_file(what: impl Into<String>) -> Self {
        Self { line: None, what: what.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        f.write_str(&self.what)
    }
}

/// Text of a file for a message: cut short, and made readable.
fn shown(text: &[u8]) -> String {
    const LONGEST: usize = 40;
    let text = String::from_utf8_lossy(text);
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}...", text.split_at(end).0),
        None => format!("{text:?}"),
    }
}
