//! The policies in `examples/` fit the schema and say nothing that the types do not know.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use highwater_crds::GpuMemoryPolicy;
use serde_json::Value;

use crate::{crds, schema};

/// One message for each example that an API server would refuse.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let definitions = crds::definitions()?;
    let policy = definitions
        .iter()
        .find(|crd| crd.pointer("/spec/names/kind").is_some_and(|kind| kind == "GpuMemoryPolicy"))
        .and_then(|crd| crd.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec"))
        .context("GpuMemoryPolicy has no schema")?;
    let mut problems = Vec::new();
    let mut found = false;
    for entry in fs::read_dir(root.join("examples")).context("reading examples")? {
        let file = entry?.path();
        if file.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let text = fs::read_to_string(&file).with_context(|| format!("reading {name}"))?;
        for document in documents(&text) {
            let value: Value =
                serde_saphyr::from_str(document).with_context(|| format!("{name} is not YAML"))?;
            if value.get("kind").and_then(Value::as_str) != Some("GpuMemoryPolicy") {
                continue;
            }
            found = true;
            let spec = value.get("spec").unwrap_or(&Value::Null);
            problems.extend(schema::misfits(&format!("examples/{name}: spec"), spec, policy));
            if let Err(error) = serde_json::from_value::<GpuMemoryPolicy>(value.clone()) {
                problems.push(format!("examples/{name}: {error}"));
            }
        }
    }
    if !found {
        problems.push("examples/ holds no GpuMemoryPolicy".into());
    }
    Ok(problems)
}

/// The YAML documents of a file.
fn documents(text: &str) -> impl Iterator<Item = &str> {
    text.split("\n---\n").filter(|document| !document.trim().is_empty())
}
