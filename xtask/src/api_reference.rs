//! `docs/reference/policy-api.md`: every field of the API, from the schema that the API server
//! gets.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use crate::crds;

/// The page.
pub(crate) fn markdown() -> Result<String> {
    let mut page = String::from(
        "<!-- Generated from crds/src by `cargo xtask generate`. Do not edit. -->\n\
         # API reference: `highwater.dev/v1alpha1`\n\n\
         Sizes are quantities (`8Gi`, `512Mi`). Percentages and durations are integers; a duration has its unit in\n\
         its name. A field that is *not yet served* is refused with a message, never ignored.\n",
    );
    for crd in crds::definitions()? {
        kind(&crd, &mut page)?;
    }
    Ok(page)
}

fn kind(crd: &Value, page: &mut String) -> Result<()> {
    let text = |pointer| crd.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let schema =
        crd.pointer("/spec/versions/0/schema/openAPIV3Schema").context("a definition has a schema")?;
    let short = crd.pointer("/spec/names/shortNames/0").and_then(Value::as_str).unwrap_or_default();
    write!(
        page,
        "\n## {}\n\n{} scope, short name `{short}`. {}\n",
        text("/spec/names/kind"),
        text("/spec/scope"),
        description(schema),
    )?;
    for part in ["spec", "status"] {
        if let Some(schema) = schema.pointer(&format!("/properties/{part}")) {
            let mut rows = String::new();
            let mut rules = String::new();
            fields(part, schema, &mut rows, &mut rules)?;
            write!(
                page,
                "\n### {part}\n\n| field | type | default | description |\n|---|---|---|---|\n{rows}"
            )?;
            if !rules.is_empty() {
                write!(page, "\nRefused with a message:\n\n{rules}")?;
            }
        }
    }
    Ok(())
}

/// One row a field, parents before children, and one line a CEL rule.
fn fields(path: &str, schema: &Value, rows: &mut String, rules: &mut String) -> Result<()> {
    for rule in schema.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten() {
        let message = rule.get("message").and_then(Value::as_str).unwrap_or_default();
        writeln!(rules, "- `{path}`: {message}")?;
    }
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .map(|names| names.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return Ok(()) };
    for (name, property) in properties {
        let path = format!("{path}.{name}");
        let default = match property.get("default") {
            Some(value) => format!("`{value}`"),
            None if required.contains(&name.as_str()) => "required".into(),
            None => String::new(),
        };
        writeln!(
            rows,
            "| `{path}` | {} | {} | {} |",
            kind_of(property),
            cell(&default),
            cell(&description(property))
        )?;
        if crds::is_selector(property) || name == "conditions" {
            continue;
        }
        fields(&path, property, rows, rules)?;
        if let Some(items) = property.get("items") {
            fields(&format!("{path}[]"), items, rows, rules)?;
        }
    }
    Ok(())
}

/// The type of a field and its bounds, in a few words.
fn kind_of(schema: &Value) -> String {
    if crds::is_selector(schema) {
        return "LabelSelector".into();
    }
    if schema.get("x-kubernetes-int-or-string").is_some() {
        return "quantity".into();
    }
    if let Some(choices) = schema.get("enum").and_then(Value::as_array) {
        let names: Vec<String> = choices.iter().filter_map(Value::as_str).map(|c| format!("`{c}`")).collect();
        return names.join(", ");
    }
    let Some(schema) = schema.as_object() else { return String::new() };
    let name = schema.get("type").and_then(Value::as_str).unwrap_or("any");
    match name {
        "array" => {
            let items = schema.get("items").map(kind_of).unwrap_or_default();
            let most = bound(schema, "maxItems").map(|most| format!(", at most {most}")).unwrap_or_default();
            format!("list of {items}{most}")
        }
        "integer" => match (bound(schema, "minimum"), bound(schema, "maximum")) {
            (Some(least), Some(most)) => format!("integer {least} to {most}"),
            (Some(least), None) => format!("integer from {least}"),
            _ => name.into(),
        },
        "string" if schema.get("format").is_some_and(|format| format == "date-time") => "time".into(),
        _ => name.into(),
    }
}

fn bound(schema: &Map<String, Value>, key: &str) -> Option<i64> {
    let value = schema.get(key)?;
    // Bounds are written as floats where the type derives them from an integer range.
    value.as_i64().or_else(|| value.to_string().strip_suffix(".0").and_then(|whole| whole.parse().ok()))
}

fn description(schema: &Value) -> String {
    let text = schema.get("description").and_then(Value::as_str).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Text that cannot end a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_page_names_every_kind_and_the_rules() {
        let page = markdown().unwrap();
        for text in [
            "## GpuMemoryPolicy",
            "## GpuMemoryNode",
            "## GpuMemoryIncident",
            "`spec.breakers[].warning.tripPercent`",
            "mode Enforce needs remediation.budget",
        ] {
            assert!(page.contains(text), "{text}");
        }
    }

    #[test]
    fn integers_show_their_range() {
        assert_eq!(
            kind_of(&json!({"type": "integer", "minimum": 0.0, "maximum": 1000.0})),
            "integer 0 to 1000"
        );
    }
}
