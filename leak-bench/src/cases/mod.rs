//! Public reports of leaks and of what was taken for one, as rows of a table with their numbers.

pub(crate) mod figures;
pub(crate) mod render;

use std::path::Path;

use anyhow::Context;

use crate::side::Side;
use figures::Figures;

/// What became of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Label {
    /// A leak.
    Leak,
    /// Not one.
    Benign,
    /// Fragmentation of an allocator.
    Fragmentation,
    /// Nobody found out.
    Unresolved,
}

/// A row of the table.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// The row's number.
    pub id: String,
    /// The thread it is from; rows of one thread stay on one side.
    pub thread: String,
    /// Device memory, in steps of 2 MiB; otherwise host memory.
    pub gpu: bool,
    /// The shape in the words of the table.
    pub shape: String,
    /// Where it starts, in bytes.
    pub start: Option<f64>,
    /// Its numbers.
    pub figures: Figures,
    /// What became of it.
    pub label: Label,
    /// Whether a maintainer or a reporter said so, rather than whoever made the table.
    pub reported: bool,
}

impl Case {
    /// The side of the row.
    pub(crate) fn side(&self) -> Side {
        Side::of(&self.thread)
    }

    /// Whether its series says anything: it carries numbers, and a growth where it is to grow.
    pub(crate) fn carries_numbers(&self) -> bool {
        let grows = ["linear", "monotone", "slow-monotone", "staircase"].contains(&self.shape.as_str());
        if grows {
            let levels = &self.figures.levels;
            return self.figures.growth.is_some() || levels.len() > 1 && levels.first() < levels.last();
        }
        self.shape == "flat" && self.start.is_some() || self.figures.any()
    }
}

/// The thread of a source: "owner/name#12ctl" is of "owner/name#12", and a number in brackets
/// names the thread that a row shares with its control.
fn thread(source: &str) -> String {
    let (repository, rest) = source.split_once('#').unwrap_or((source, ""));
    let number = rest.split_once('(').map_or(rest, |(_, shared)| shared);
    let digits: String = number.chars().take_while(char::is_ascii_digit).collect();
    format!("{repository}#{digits}")
}

/// Reads the table.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Case>> {
    let mut reader = csv::Reader::from_path(path).with_context(|| format!("open {}", path.display()))?;
    let headers = reader.headers()?.clone();
    let column = |name: &str| {
        headers
            .iter()
            .position(|h| h == name)
            .with_context(|| format!("{}: no column {name}", path.display()))
    };
    let (id, source, kind, shape) = (column("id")?, column("source")?, column("kind")?, column("shape")?);
    let (start, rate, label, confidence) =
        (column("start_MiB")?, column("rate")?, column("label")?, column("conf")?);
    let mut cases = Vec::new();
    for record in reader.records() {
        let record = record?;
        let field = |at: usize| record.get(at).unwrap_or_default();
        let start = field(start).parse::<f64>().ok().map(|mib| mib * crate::number::MIB);
        cases.push(Case {
            id: field(id).to_owned(),
            thread: thread(field(source)),
            gpu: field(kind) == "gpu",
            shape: field(shape).to_owned(),
            start,
            figures: figures::read(field(rate), start.is_some()),
            label: match field(label) {
                "leak" => Label::Leak,
                "benign" => Label::Benign,
                "frag" => Label::Fragmentation,
                "unres" => Label::Unresolved,
                other => anyhow::bail!("{}: row {}: label {other:?}", path.display(), field(id)),
            },
            reported: ["M", "R"].contains(&field(confidence)),
        });
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_one_thread_share_their_side() {
        assert_eq!(thread("a/b#12ctl"), "a/b#12");
        assert_eq!(thread("a/b#34 (12)"), "a/b#12");
        assert_eq!(thread("a/b#43 + 86"), "a/b#43");
    }
}
