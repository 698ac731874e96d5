//! What came of tests, told as a test program tells it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    process::Output,
    time::Duration,
};

/// What came of one test.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// What a failed one printed, its error last; none of one that passed.
    failure: Option<String>,
}

impl Outcome {
    /// Of a test program that ran this test alone.
    pub(crate) fn of(test: &str, output: &Output) -> Self {
        if output.status.success() {
            return Self { failure: None };
        }
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        Self {
            failure: Some(own_words(test, &said).unwrap_or_else(|| {
                // It did not come so far as to tell: it was killed, or crashed.
                format!("{said}{errors}\nError: {test}: the test program ended with {}", output.status)
            })),
        }
    }

    pub(crate) fn failed(why: &str) -> Self {
        Self { failure: Some(format!("Error: {why}")) }
    }

    pub(crate) fn is_good(&self) -> bool {
        self.failure.is_none()
    }

    pub(crate) fn word(&self) -> &'static str {
        if self.is_good() { "ok" } else { "FAILED" }
    }

    /// Puts a line behind what a failed test printed.
    pub(crate) fn add(&mut self, line: &str) {
        let said = self.failure.get_or_insert_default();
        said.push('\n');
        said.push_str(line);
    }
}

/// What a failed test printed itself, among what its program says around it.
fn own_words(test: &str, said: &str) -> Option<String> {
    let (_, behind) = said.split_once(&format!("---- {test} stdout ----\n"))?;
    let (own, _) = behind.rsplit_once("\nfailures:\n")?;
    Some(own.trim_end().to_owned())
}

/// What came of all tests.
#[derive(Debug)]
pub(crate) struct Report {
    ended: BTreeMap<String, (Outcome, Duration)>,
    /// Those that failed at first.
    second_try: BTreeSet<String>,
    ignored: usize,
    filtered: usize,
}

impl Report {
    pub(crate) fn new(ignored: usize, filtered: usize) -> Self {
        Self { ended: BTreeMap::new(), second_try: BTreeSet::new(), ignored, filtered }
    }

    /// Notes what came of a test, in place of what came of an earlier try.
    pub(crate) fn add(&mut self, test: &str, outcome: Outcome, took: Duration) {
        if self.ended.insert(test.to_owned(), (outcome, took)).is_some() {
            self.second_try.insert(test.to_owned());
        }
    }

    pub(crate) fn is_good(&self) -> bool {
        self.ended.values().all(|(outcome, _)| outcome.is_good())
    }

    /// How long each took that passed.
    pub(crate) fn passed(&self) -> impl Iterator<Item = (String, Duration)> {
        let passed = self.ended.iter().filter(|(_, (outcome, _))| outcome.is_good());
        passed.map(|(test, (_, took))| (test.clone(), *took))
    }

    /// The names of those that failed.
    pub(crate) fn failed(&self) -> Vec<String> {
        self.told().map(|(test, _)| test.to_owned()).collect()
    }

    fn told(&self) -> impl Iterator<Item = (&str, &str)> {
        self.ended
            .iter()
            .filter_map(|(test, (outcome, _))| Some((test.as_str(), outcome.failure.as_deref()?)))
    }

    /// What each failed test printed, and their names.
    pub(crate) fn failures(&self) -> String {
        let mut text = String::new();
        if self.is_good() {
            return text;
        }
        text.push_str("\nfailures:\n");
        for (test, said) in self.told() {
            let _ = writeln!(text, "\n---- {test} stdout ----\n{said}");
        }
        text.push_str("\nfailures:\n");
        for (test, _) in self.told() {
            let _ = writeln!(text, "    {test}");
        }
        text
    }

    /// The end of the output: the failures, which tests passed at the second try only, the counts.
    pub(crate) fn summary(&self, took: Duration) -> String {
        let mut text = self.failures();
        let failed = self.told().count();
        for (test, _) in self.passed().filter(|(test, _)| self.second_try.contains(test)) {
            let _ = writeln!(text, "needed a second try: {test}");
        }
        let _ = writeln!(
            text,
            "\ntest result: {}. {} passed; {failed} failed; {} ignored; 0 measured; {} filtered out; \
             finished in {:.2}s",
            if failed == 0 { "ok" } else { "FAILED" },
            self.ended.len() - failed,
            self.ignored,
            self.filtered,
            took.as_secs_f64(),
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    const SAID: &str = "\nrunning 1 test\ntest a::b ... FAILED\n\nfailures:\n\n---- a::b stdout ----\n\
        the cluster at that moment:\n\nfailures:\n  none\nError: b (b.rs:7): waited for rain\n\n\n\
        failures:\n    a::b\n\ntest result: FAILED. 0 passed; 1 failed; ...\n";

    fn ended(status: i32, said: &str) -> Outcome {
        let status = std::process::ExitStatus::from_raw(status);
        Outcome::of("a::b", &Output { status, stdout: said.into(), stderr: Vec::new() })
    }

    #[test]
    fn what_a_failed_test_printed_ends_with_its_error() {
        let failure = ended(101 << 8, SAID).failure.unwrap();
        assert!(failure.starts_with("the cluster at that moment"), "{failure}");
        assert!(failure.ends_with("Error: b (b.rs:7): waited for rain"), "{failure}");
    }

    #[test]
    fn a_program_that_was_killed_says_by_what() {
        let failure = ended(9, "\nrunning 1 test\n").failure.unwrap();
        assert!(failure.ends_with("the test program ended with signal: 9 (SIGKILL)"), "{failure}");
    }

    #[test]
    fn the_summary_has_the_counts_where_a_test_program_has_them() {
        let mut report = Report::new(2, 1);
        report.add("a::c", ended(0, ""), Duration::from_secs(2));
        report.add("a::b", ended(101 << 8, SAID), Duration::from_secs(1));
        let text = report.summary(Duration::from_millis(2500));
        let last = text.lines().last().unwrap();
        assert_eq!(
            last,
            "test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured; 1 filtered out; finished in 2.50s"
        );
        assert!(text.contains("---- a::b stdout ----\n"), "{text}");
        assert!(text.contains("\n    a::b\n"), "{text}");
    }

    #[test]
    fn what_passed_at_the_second_try_counts_as_passed_and_is_named() {
        let mut report = Report::new(0, 0);
        report.add("a::b", ended(101 << 8, SAID), Duration::from_secs(1));
        assert_eq!(report.failed(), ["a::b"]);
        report.add("a::b", ended(0, ""), Duration::from_secs(1));
        let text = report.summary(Duration::from_secs(1));
        assert!(report.is_good() && text.starts_with("needed a second try: a::b\n"), "{text}");
        assert!(text.contains("test result: ok. 1 passed; 0 failed;"), "{text}");
    }
}
