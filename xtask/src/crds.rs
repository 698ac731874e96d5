//! The custom resource definitions as YAML, and what an API server would not accept in them.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::artefacts::{Artefact, canonical};

/// Upper bound of a list or text that the schema does not bound itself would make CEL rules too
/// expensive; these are the only places where a bound is left to Kubernetes' own types.
const BOUNDED_ELSEWHERE: [&str; 3] = ["conditions", "matchExpressions", "matchLabels"];

/// The definitions as plain files and as templates of the `highwater-crds` chart.
pub(crate) fn artefacts() -> Result<Vec<Artefact>> {
    let mut files = Vec::new();
    for mut crd in definitions()? {
        label(&mut crd)?;
        let plural = text(&crd, "/spec/names/plural")?;
        let header = "# Generated from crds/src by `cargo xtask generate`. Do not edit.\n";
        files.push(Artefact {
            path: format!("crds/yaml/{plural}.yaml"),
            content: format!("{header}{}", yaml(&canonical(crd.clone()))),
        });
        files.push(Artefact {
            path: format!("charts/highwater-crds/templates/{plural}.yaml"),
            content: format!("{header}{}", yaml(&canonical(kept_on_uninstall(crd)?))),
        });
    }
    Ok(files)
}

/// One message for each place where a definition is likely to be refused by an API server or to
/// leave a user without an explanation.
pub(crate) fn check(_root: &Path) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for crd in definitions()? {
        let kind = text(&crd, "/spec/names/kind")?;
        let schema = crd
            .pointer("/spec/versions/0/schema/openAPIV3Schema")
            .with_context(|| format!("{kind} has no schema"))?;
        lint(&kind, schema, &mut problems);
        if yaml(&crd).contains("{{") {
            problems.push(format!("{kind}: a description holds `{{{{`, which Helm would expand"));
        }
    }
    Ok(problems)
}

/// Every definition as JSON, as it is installed.
///
/// `nullable` is dropped: the API server then treats `null` in an optional field as absent, where
/// a nullable field would satisfy `has()` and so slip past rules such as "Enforce needs a budget".
pub(crate) fn definitions() -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for crd in highwater_crds::all_crds() {
        let mut crd = canonical(serde_json::to_value(crd)?);
        drop_nullable(&mut crd);
        bound_selectors(&mut crd);
        describe(&mut crd);
        all.push(crd);
    }
    Ok(all)
}

fn drop_nullable(value: &mut Value) {
    match value {
        Value::Object(map) => {
            // A property that happens to have this name is an object, not a boolean.
            if map.get("nullable").is_some_and(Value::is_boolean) {
                map.remove("nullable");
            }
            map.values_mut().for_each(drop_nullable);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nullable),
        _ => {}
    }
}

/// Kubernetes' own schema of a label selector takes any operator, of which a user would learn only
/// from a condition; and it has no bounds.
fn bound_selectors(value: &mut Value) {
    if is_selector(value)
        && let Some(expressions) =
            value.pointer_mut("/properties/matchExpressions").and_then(Value::as_object_mut)
    {
        expressions.insert("maxItems".into(), json!(16));
        if let Some(item) = expressions.get_mut("items").and_then(Value::as_object_mut) {
            item.insert(
                "x-kubernetes-validations".into(),
                json!([{
                    "rule": "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : !has(self.values) || size(self.values) == 0",
                    "message": "In and NotIn need values; Exists and DoesNotExist take none",
                }]),
            );
        }
        for (pointer, bounds) in [
            ("/key", json!({"maxLength": 317})),
            ("/operator", json!({"enum": ["In", "NotIn", "Exists", "DoesNotExist"]})),
            ("/values", json!({"maxItems": 64})),
            ("/values/items", json!({"maxLength": 63})),
        ] {
            let property = expressions
                .get_mut("items")
                .and_then(|item| item.pointer_mut(&format!("/properties{pointer}")));
            if let (Some(property), Value::Object(bounds)) = (property.and_then(Value::as_object_mut), bounds)
            {
                property.extend(bounds);
            }
        }
    }
    match value {
        Value::Object(map) => map.values_mut().for_each(bound_selectors),
        Value::Array(items) => items.iter_mut().for_each(bound_selectors),
        _ => {}
    }
}

/// The kind is described by the comment on its type, which is the description of its spec.
fn describe(crd: &mut Value) {
    const SCHEMA: &str = "/spec/versions/0/schema/openAPIV3Schema";
    let description = crd.pointer(&format!("{SCHEMA}/properties/spec/description")).cloned();
    if let (Some(text), Some(schema)) = (description, crd.pointer_mut(SCHEMA).and_then(Value::as_object_mut))
    {
        schema.insert("description".into(), text);
    }
}

/// The label by which `kubectl delete crd -l` finds all of them.
fn label(crd: &mut Value) -> Result<()> {
    crd.pointer_mut("/metadata")
        .and_then(Value::as_object_mut)
        .context("a definition has metadata")?
        .insert("labels".into(), json!({"app.kubernetes.io/part-of": "highwater"}));
    Ok(())
}

/// Uninstalling the chart must never delete the users' objects.
fn kept_on_uninstall(mut crd: Value) -> Result<Value> {
    crd.pointer_mut("/metadata")
        .and_then(Value::as_object_mut)
        .context("a definition has metadata")?
        .insert("annotations".into(), json!({"helm.sh/resource-policy": "keep"}));
    Ok(crd)
}

/// The text at `pointer`.
fn text(value: &Value, pointer: &str) -> Result<String> {
    value
        .pointer(pointer)
        .and_then(Value::as_str)
        .map(str::to_owned)
        .with_context(|| format!("{pointer} is missing"))
}

/// YAML that a YAML 1.1 parser (as Kubernetes uses) reads as the same value: strings that could
/// be read as anything else are quoted.
pub(crate) fn yaml(value: &Value) -> String {
    let mut out = String::new();
    write_yaml(value, 0, &mut out);
    out
}

fn write_yaml(value: &Value, indent: usize, out: &mut String) {
    let pad = " ".repeat(indent);
    match value {
        Value::Object(map) if map.is_empty() => out.push_str("{}\n"),
        Value::Array(items) if items.is_empty() => out.push_str("[]\n"),
        Value::Object(map) => {
            for (key, value) in map {
                out.push_str(&pad);
                out.push_str(&scalar(key));
                out.push(':');
                if is_block(value) {
                    out.push('\n');
                    let deeper = if value.is_array() { indent } else { indent.saturating_add(2) };
                    write_yaml(value, deeper, out);
                } else {
                    out.push(' ');
                    write_yaml(value, 0, out);
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                out.push_str(&pad);
                out.push_str("- ");
                let mut block = String::new();
                write_yaml(item, indent.saturating_add(2), &mut block);
                out.push_str(block.trim_start_matches(' '));
            }
        }
        Value::String(text) => {
            out.push_str(&scalar(text));
            out.push('\n');
        }
        other => {
            out.push_str(&other.to_string());
            out.push('\n');
        }
    }
}

/// Whether a value starts on a line of its own.
fn is_block(value: &Value) -> bool {
    match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => false,
    }
}

/// A string as a plain scalar where that is safe beyond doubt, else in double quotes, whose
/// escapes are JSON's.
fn scalar(text: &str) -> String {
    let plain_start = text.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '$' || c == '/');
    let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || " _-./$()'`,;=+<>".contains(c))
        && !text.ends_with(' ');
    let word = matches!(
        text.to_ascii_lowercase().as_str(),
        "true" | "false" | "yes" | "no" | "on" | "off" | "y" | "n" | "null"
    );
    if plain_start && plain && !word { text.to_owned() } else { Value::from(text).to_string() }
}

/// Walks a schema and notes what an API server refuses or a user would stumble over.
fn lint(path: &str, schema: &Value, problems: &mut Vec<String>) {
    let Some(schema) = schema.as_object() else { return };
    if schema.get("type").is_none() && !schema.contains_key("x-kubernetes-int-or-string") {
        problems.push(format!("{path}: no type, so the schema is not structural"));
    }
    let elsewhere = path.rsplit('.').next().is_some_and(|last| BOUNDED_ELSEWHERE.contains(&last));
    if has_type(schema, "array") && !schema.contains_key("maxItems") && !elsewhere {
        problems.push(format!("{path}: a list without maxItems makes every CEL rule below it unaffordable"));
    }
    for rule in list(schema, "x-kubernetes-validations") {
        if rule.get("message").and_then(Value::as_str).is_none_or(str::is_empty) {
            problems.push(format!("{path}: a CEL rule without a message tells nobody what to change"));
        }
    }
    if elsewhere {
        return;
    }
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        for (name, property) in properties {
            let path = format!("{path}.{name}");
            if property.get("description").is_none() && !path.contains("elector") && name != "spec" {
                problems.push(format!("{path}: no description"));
            }
            if !is_selector(property) {
                lint(&path, property, problems);
            }
        }
    }
    if let Some(items) = schema.get("items") {
        lint(&format!("{path}[]"), items, problems);
    }
}

/// A `metav1.LabelSelector`, whose schema is Kubernetes' own.
pub(crate) fn is_selector(schema: &Value) -> bool {
    schema.pointer("/properties/matchLabels").is_some()
        && schema.pointer("/properties/matchExpressions").is_some()
}

fn has_type(schema: &Map<String, Value>, name: &str) -> bool {
    schema.get("type").and_then(Value::as_str) == Some(name)
}

fn list<'a>(schema: &'a Map<String, Value>, key: &str) -> &'a [Value] {
    schema.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yaml_reads_back_as_the_same_value() {
        for crd in definitions().unwrap() {
            let read: Value = serde_saphyr::from_str(&yaml(&crd)).unwrap();
            assert_eq!(read, crd);
        }
    }

    #[test]
    fn strings_that_yaml_would_take_for_something_else_are_quoted() {
        for text in
            ["true", "No", "null", "1", "1e3", "~", "", "- a", "a: b", "a #b", "*x", "[a]", " a", "a ", "y"]
        {
            assert!(scalar(text).starts_with('"'), "{text:?} became {}", scalar(text));
        }
        assert_eq!(scalar("clear < trip"), "clear < trip");
    }

    #[test]
    fn a_list_without_bounds_is_found() {
        let mut problems = Vec::new();
        let schema = json!({"type": "object", "properties": {"a": {"description": "a", "type": "array", "items": {"type": "string"}}}});
        lint("Kind", &schema, &mut problems);
        assert_eq!(problems.len(), 1, "{problems:?}");
    }

    #[test]
    fn the_chart_keeps_the_definitions_on_uninstall() {
        let kept = kept_on_uninstall(json!({"metadata": {"name": "x"}})).unwrap();
        assert_eq!(kept.pointer("/metadata/annotations/helm.sh~1resource-policy"), Some(&json!("keep")));
    }
}
