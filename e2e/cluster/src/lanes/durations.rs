//! How long the scenarios take, as a run wrote it down: a line of seconds and name for each.

use std::{collections::BTreeMap, fmt::Write as _, fs, io, path::Path, time::Duration};

use anyhow::{Context as _, Result};

/// Seconds by the name of a scenario.
#[derive(Debug, Default)]
pub(crate) struct Durations(BTreeMap<String, u64>);

impl Durations {
    /// What is written down; nothing where nothing is.
    pub(crate) fn read(file: &Path) -> Result<Self> {
        let read = match fs::read_to_string(file) {
            Ok(text) => Self::parse(&text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error.into()),
        };
        read.with_context(|| format!("reading {}", file.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let entries = text.lines().map(|line| {
            let (seconds, name) = line.split_once('\t').with_context(|| format!("no tab in {line:?}"))?;
            Ok((name.to_owned(), seconds.parse().with_context(|| format!("no seconds in {line:?}"))?))
        });
        entries.collect::<Result<_>>().map(Self)
    }

    /// Puts the longest in front. What was never measured may take long, and so goes before all.
    pub(crate) fn longest_first(&self, mut tests: Vec<String>) -> Vec<String> {
        tests.sort_by_key(|test| std::cmp::Reverse(self.0.get(test).copied().unwrap_or(u64::MAX)));
        tests
    }

    /// Writes down what was measured now; of the others, what was known before.
    pub(crate) fn learn(
        &mut self,
        took: impl Iterator<Item = (String, Duration)>,
        file: &Path,
    ) -> Result<()> {
        self.0.extend(took.map(|(test, took)| (test, took.as_secs())));
        let mut text = String::new();
        for (test, seconds) in &self.0 {
            writeln!(text, "{seconds}\t{test}")?;
        }
        fs::write(file, text).with_context(|| format!("writing {}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_comes_first_and_the_unknown_before_it() {
        let known = Durations::parse("3\ta\n200\tb\n").unwrap();
        assert_eq!(known.longest_first(vec!["a".into(), "b".into(), "new".into()]), ["new", "b", "a"]);
    }

    #[test]
    fn a_line_that_cannot_be_read_is_named() {
        assert!(format!("{:#}", Durations::parse("long\ta").unwrap_err()).contains("long"));
    }

    #[test]
    fn what_is_learnt_is_read_again_beside_what_was_known() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut known = Durations::parse("3\ta\n9\tb\n").unwrap();
        known.learn([(String::from("a"), Duration::from_secs(20))].into_iter(), file.path()).unwrap();
        let read = Durations::read(file.path()).unwrap();
        assert_eq!(read.longest_first(vec!["b".into(), "a".into()]), ["a", "b"]);
    }
}
