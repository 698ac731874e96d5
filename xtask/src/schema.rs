//! Whether an object fits the schema of a custom resource: as much of it as needs no API server
//! (types, required and unknown fields, enumerations, ranges, lengths). CEL rules and patterns
//! are left to the API server of the end-to-end tests.

use serde_json::Value;

/// One message for each way in which `value` does not fit `schema`.
pub(crate) fn misfits(path: &str, value: &Value, schema: &Value) -> Vec<String> {
    let mut found = Vec::new();
    walk(path, value, schema, &mut found);
    found
}

fn walk(path: &str, value: &Value, schema: &Value, found: &mut Vec<String>) {
    if let Some(choices) = schema.get("enum").and_then(Value::as_array)
        && !choices.contains(value)
    {
        found.push(format!("{path}: {value} is none of {}", Value::Array(choices.clone())));
    }
    let int_or_string = schema.get("x-kubernetes-int-or-string") == Some(&Value::Bool(true));
    match (value, schema.get("type").and_then(Value::as_str)) {
        (Value::String(_) | Value::Number(_), _) if int_or_string => {}
        (Value::Object(map), Some("object")) => {
            let properties = schema.get("properties").and_then(Value::as_object);
            for required in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
                if required.as_str().is_some_and(|name| !map.contains_key(name)) {
                    found.push(format!("{path}: {required} is required"));
                }
            }
            for (name, field) in map {
                let path = format!("{path}.{name}");
                match (properties.and_then(|p| p.get(name)), schema.get("additionalProperties")) {
                    (Some(schema), _) | (None, Some(schema @ Value::Object(_))) => {
                        walk(&path, field, schema, found);
                    }
                    _ => found.push(format!("{path}: unknown field")),
                }
            }
        }
        (Value::Array(items), Some("array")) => {
            bounds(path, items.len(), schema, ["minItems", "maxItems"], found);
            if let Some(schema) = schema.get("items") {
                for (n, item) in items.iter().enumerate() {
                    walk(&format!("{path}[{n}]"), item, schema, found);
                }
            }
        }
        (Value::String(text), Some("string")) => {
            bounds(path, text.chars().count(), schema, ["minLength", "maxLength"], found);
        }
        (Value::Number(number), Some("integer" | "number")) => {
            let limit = |key| schema.get(key).and_then(Value::as_f64);
            let number = number.as_f64().unwrap_or(f64::NAN);
            if limit("minimum").is_some_and(|least| number < least)
                || limit("maximum").is_some_and(|most| number > most)
            {
                found.push(format!("{path}: {number} is out of range"));
            }
        }
        (Value::Bool(_), Some("boolean")) => {}
        (value, expected) => {
            found.push(format!("{path}: {value} is not of type {}", expected.unwrap_or("?")));
        }
    }
}

/// Whether a length is within the bounds that `keys` name.
fn bounds(path: &str, length: usize, schema: &Value, keys: [&str; 2], found: &mut Vec<String>) {
    let [least, most] = keys.map(|key| schema.get(key).and_then(Value::as_u64));
    let length = u64::try_from(length).unwrap_or(u64::MAX);
    if least.is_some_and(|least| length < least) || most.is_some_and(|most| length > most) {
        found.push(format!("{path}: length {length} is out of range"));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn schema() -> Value {
        json!({"type": "object", "required": ["mode"], "properties": {
            "mode": {"type": "string", "enum": ["Observe", "Enforce"]},
            "percent": {"type": "integer", "minimum": 1, "maximum": 100},
            "size": {"x-kubernetes-int-or-string": true},
            "names": {"type": "array", "maxItems": 1, "items": {"type": "string"}}
        }})
    }

    #[test]
    fn a_fitting_object_has_no_misfit() {
        let value = json!({"mode": "Observe", "percent": 5, "size": "8Gi", "names": ["a"]});
        assert_eq!(misfits("spec", &value, &schema()), Vec::<String>::new());
    }

    #[test]
    fn every_kind_of_misfit_is_named_with_its_path() {
        for (value, path) in [
            (json!({}), "spec"),
            (json!({"mode": "Kill"}), "spec.mode"),
            (json!({"mode": "Observe", "percent": 101}), "spec.percent"),
            (json!({"mode": "Observe", "percent": "5"}), "spec.percent"),
            (json!({"mode": "Observe", "names": ["a", "b"]}), "spec.names"),
            (json!({"mode": "Observe", "extra": 1}), "spec.extra"),
        ] {
            let found = misfits("spec", &value, &schema());
            assert_eq!(found.len(), 1, "{value}: {found:?}");
            assert!(found[0].starts_with(&format!("{path}:")), "{found:?}");
        }
    }
}
