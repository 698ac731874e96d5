//! Which tests of a test program are to be run.

use std::{collections::BTreeSet, path::Path, process::Stdio};

use anyhow::{Context as _, Result, ensure};
use tokio::process::Command;

/// The tests that are meant, and what is left out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// To be run.
    pub(crate) run: Vec<String>,
    /// Asked for, but run only when that is said.
    pub(crate) ignored: usize,
    /// Not asked for.
    pub(crate) filtered: usize,
}

/// Asks a test program for its tests.
pub(crate) async fn chosen(program: &Path, arguments: &[String]) -> Result<Chosen> {
    let all = list(program, &[]).await?;
    let named = list(program, arguments).await?;
    // With these, the list has those alone that are run.
    let asked = arguments.iter().any(|argument| argument == "--ignored" || argument == "--include-ignored");
    let ignored = if asked {
        BTreeSet::new()
    } else {
        list(program, &[&["--ignored".to_owned()], arguments].concat()).await?.into_iter().collect()
    };
    Ok(choose(all.len(), named, &ignored))
}

fn choose(all: usize, mut named: Vec<String>, ignored: &BTreeSet<String>) -> Chosen {
    let filtered = all.saturating_sub(named.len());
    named.retain(|test| !ignored.contains(test));
    Chosen { run: named, ignored: ignored.len(), filtered }
}

async fn list(program: &Path, arguments: &[String]) -> Result<Vec<String>> {
    let mut command = Command::new(program);
    command.args(["--list", "--format", "terse"]).args(arguments).stdin(Stdio::null());
    let output = command.output().await.with_context(|| format!("starting {}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} does not list its tests: {said}", program.display());
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

fn parse(listed: &str) -> Vec<String> {
    listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_is_counted_and_not_run() {
        let named = parse("drain::one: test\nfleet::two: test\n");
        let ignored = [String::from("fleet::two")].into();
        let chosen = choose(5, named, &ignored);
        assert_eq!(chosen, Chosen { run: vec!["drain::one".into()], ignored: 1, filtered: 3 });
    }

    #[test]
    fn benches_and_blank_lines_are_no_tests() {
        assert_eq!(parse("\na::b: test\nc::d: benchmark\n"), ["a::b"]);
    }
}
