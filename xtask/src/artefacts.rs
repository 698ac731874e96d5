//! The generated files, and whether the committed ones are the same.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{alerts, api_reference, crds, dashboard, metrics};

/// A generated file.
#[derive(Debug)]
pub(crate) struct Artefact {
    /// Path below the root of the repository.
    pub(crate) path: String,
    /// What it holds.
    pub(crate) content: String,
}

/// Every generated file.
fn all() -> Result<Vec<Artefact>> {
    let mut files = crds::artefacts()?;
    files.push(Artefact {
        path: "charts/highwater/dashboards/highwater.json".into(),
        content: dashboard::json()?,
    });
    files.push(Artefact { path: alerts::PATH.into(), content: alerts::yaml() });
    files.push(Artefact { path: "docs/reference/policy-api.md".into(), content: api_reference::markdown()? });
    files.push(Artefact { path: "docs/reference/metrics.md".into(), content: metrics::markdown() });
    Ok(files)
}

/// The value with the keys of every object in order, whatever the map of `serde_json` keeps.
pub(crate) fn canonical(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut fields: Vec<(String, Value)> =
                map.into_iter().map(|(name, field)| (name, canonical(field))).collect();
            fields.sort_by(|(a, _), (b, _)| a.cmp(b));
            Value::Object(fields.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(canonical).collect()),
        other => other,
    }
}

/// Writes every generated file that is not current.
pub(crate) fn write(root: &Path) -> Result<()> {
    for Artefact { path, content } in all()? {
        let file = root.join(&path);
        if fs::read_to_string(&file).is_ok_and(|committed| committed == content) {
            continue;
        }
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        }
        fs::write(&file, content).with_context(|| format!("writing {path}"))?;
        println!("wrote {path}");
    }
    Ok(())
}

/// One message for each generated file that is missing or differs.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    Ok(all()?
        .into_iter()
        .filter_map(|Artefact { path, content }| match fs::read_to_string(root.join(&path)) {
            Err(_) => Some(format!("{path} is missing: run `cargo xtask generate`")),
            Ok(committed) => difference(&committed, &content)
                .map(|summary| format!("{path} is not current: run `cargo xtask generate`\n{summary}")),
        })
        .collect())
}

/// Where two texts part, in a few lines. `None` if they are equal.
fn difference(committed: &str, generated: &str) -> Option<String> {
    if committed == generated {
        return None;
    }
    let old: Vec<&str> = committed.lines().collect();
    let new: Vec<&str> = generated.lines().collect();
    let line = old.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let show = |lines: &[&str]| lines.get(line).map_or("(end of file)".to_owned(), ToString::to_string);
    Some(format!(
        "first difference in line {}:\n- {}\n+ {}\n({} lines committed, {} generated)",
        line.saturating_add(1),
        show(&old),
        show(&new),
        old.len(),
        new.len(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_have_no_difference() {
        assert_eq!(difference("a\nb\n", "a\nb\n"), None);
    }

    #[test]
    fn the_first_differing_line_is_shown() {
        let summary = difference("a\nb\nc\n", "a\nx\n").unwrap();
        assert!(
            summary.contains("line 2") && summary.contains("- b") && summary.contains("+ x"),
            "{summary}"
        );
    }

    #[test]
    fn a_missing_tail_is_shown_as_the_end_of_the_file() {
        assert!(difference("a\n", "a\nb\n").unwrap().contains("- (end of file)"));
    }
}
