//! Fields that the schema of a resource does not know: a typing error would otherwise pass for a
//! default.

use serde_json::Value;

/// The paths of the fields of an object that the schema in its definition does not name.
pub(crate) fn unknown(object: &Value, definition: &Value) -> Vec<String> {
    let schema = definition.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec");
    let mut found = Vec::new();
    if let (Some(spec), Some(schema)) = (object.get("spec"), schema) {
        walk("spec", spec, schema, &mut found);
    }
    found
}

fn walk(path: &str, value: &Value, schema: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            let properties = schema.get("properties").and_then(Value::as_object);
            let additional = schema.get("additionalProperties");
            for (name, field) in map {
                let path = format!("{path}.{name}");
                match properties.and_then(|known| known.get(name)).or(additional) {
                    Some(schema) => walk(&path, field, schema, found),
                    None if properties.is_some() => found.push(path),
                    None => {}
                }
            }
        }
        Value::Array(items) => {
            for (n, item) in items.iter().enumerate() {
                walk(&format!("{path}[{n}]"), item, schema.get("items").unwrap_or(&Value::Null), found);
            }
        }
        _ => {}
    }
}
