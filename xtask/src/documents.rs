//! The documents: links lead somewhere, and metrics that they name exist.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::metrics;

/// One message for each dead link and each unknown metric.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let mut pages: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].iter().map(|page| root.join(page)).collect();
    collect(&root.join("docs"), &mut pages)?;
    let mut problems = Vec::new();
    for page in pages {
        let name = page.strip_prefix(root).unwrap_or(&page).display().to_string();
        let text = fs::read_to_string(&page).with_context(|| format!("reading {name}"))?;
        for target in links(&text) {
            let folder = page.parent().unwrap_or(root);
            if !folder.join(target).exists() {
                problems.push(format!("{name}: the link to {target} leads nowhere"));
            }
        }
        for metric in metrics::unknown_names(&text) {
            if !metrics::is_histogram(&metric) && !metrics::is_read(&metric) {
                problems.push(format!("{name}: {metric} is not exported"));
            }
        }
    }
    Ok(problems)
}

/// Every Markdown page below a folder, in order of their names.
fn collect(folder: &Path, pages: &mut Vec<PathBuf>) -> Result<()> {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .with_context(|| format!("reading {}", folder.display()))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    entries.sort();
    for entry in entries {
        if entry.is_dir() {
            collect(&entry, pages)?;
        } else if entry.extension().is_some_and(|extension| extension == "md") {
            pages.push(entry);
        }
    }
    Ok(())
}

/// The targets of links to files, without their fragments.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty() && !target.contains("://"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_files_are_found_and_others_are_not() {
        let text = "a [b](docs/c.md#d), [e](https://example.com), [f](#g) and `x[0]`";
        assert_eq!(links(text).collect::<Vec<_>>(), ["docs/c.md"]);
    }
}
