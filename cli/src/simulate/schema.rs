//! What is wrong with a resource by the schema of its definition: which field, what it says, and what
//! to write instead. Parsing alone would say neither, and would take a typing error for a default.

use highwater_crds::ByteSize;
use jiff::SignedDuration;
use serde_json::{Map, Value};

/// The longest text that is shown of a value.
const LONGEST: usize = 60;

/// The first fault of an object's `spec`.
pub(crate) fn fault(object: &Value, definition: &Value) -> Option<String> {
    let schema = definition.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec")?;
    walk("spec", object.get("spec")?, schema)
}

fn walk(path: &str, value: &Value, schema: &Value) -> Option<String> {
    if value.is_null() {
        // As if it were not there.
        return None;
    }
    if schema.get("x-kubernetes-int-or-string").is_some() {
        return size(path, value);
    }
    match (schema.get("type").and_then(Value::as_str)?, value) {
        ("object", Value::Object(fields)) => object(path, fields, schema),
        ("array", Value::Array(items)) => array(path, items, schema),
        ("string", Value::String(text)) => one_of(path, text, schema),
        ("integer", _) => integer(path, value, schema),
        ("boolean", Value::Bool(_)) => None,
        ("object", _) => {
            let fields = schema.get("properties").and_then(Value::as_object).map(names);
            let fields = fields.unwrap_or_else(|| "names with values".to_owned());
            Some(wrong(path, value, &format!("write what it consists of ({fields}), or {{}}")))
        }
        ("array", _) => Some(wrong(path, value, "write a list, in [ ] or with a - before each")),
        ("string", _) => Some(match schema.get("enum").and_then(Value::as_array) {
            Some(known) => wrong(path, value, &format!("write {}", either(known))),
            None => wrong(path, value, &format!("write text, in quotes: \"{}\"", shown(value))),
        }),
        ("boolean", _) => Some(wrong(path, value, "write true or false")),
        _ => None,
    }
}

fn object(path: &str, fields: &Map<String, Value>, schema: &Value) -> Option<String> {
    let properties = schema.get("properties").and_then(Value::as_object);
    let additional = schema.get("additionalProperties");
    for (name, field) in fields {
        let path = format!("{path}.{name}");
        match (properties.and_then(|known| known.get(name)).or(additional), properties) {
            (Some(schema), _) => {
                if let Some(fault) = walk(&path, field, schema) {
                    return Some(fault);
                }
            }
            (None, Some(known)) => {
                return Some(format!(
                    "{path} is no field of a GpuMemoryPolicy: correct or remove it (there are {})",
                    names(known)
                ));
            }
            (None, None) => {}
        }
    }
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    let mut missing = required
        .filter_map(Value::as_str)
        .filter(|name| properties.and_then(|known| known.get(*name)?.get("default")).is_none())
        .filter(|name| fields.get(*name).is_none_or(Value::is_null));
    missing.next().map(|name| format!("{path}.{name} is missing: it has to be given"))
}

fn array(path: &str, items: &[Value], schema: &Value) -> Option<String> {
    let bound = |name: &str| schema.get(name).and_then(Value::as_u64);
    let count = u64::try_from(items.len()).unwrap_or(u64::MAX);
    if let Some(least) = bound("minItems").filter(|least| count < *least) {
        return Some(format!("{path} has {count} entries: give at least {least}"));
    }
    if let Some(most) = bound("maxItems").filter(|most| count > *most) {
        return Some(format!("{path} has {count} entries: give at most {most}"));
    }
    let of = schema.get("items")?;
    items.iter().enumerate().find_map(|(n, item)| walk(&format!("{path}[{n}]"), item, of))
}

fn one_of(path: &str, text: &str, schema: &Value) -> Option<String> {
    let known = schema.get("enum")?.as_array()?;
    let is_known = known.iter().any(|known| known == text);
    (!is_known).then(|| wrong(path, &Value::from(text), &format!("write {}", either(known))))
}

fn size(path: &str, value: &Value) -> Option<String> {
    match value {
        Value::String(text) => match text.parse::<ByteSize>() {
            Ok(ByteSize(0)) => Some(wrong(path, value, "write a size above 0, such as 8Gi")),
            Ok(_) => None,
            Err(error) => Some(format!("{path}: {error}")),
        },
        Value::Number(number) if number.as_u64().is_some_and(|bytes| bytes > 0) => None,
        Value::Number(_) => {
            Some(wrong(path, value, "write a whole number of bytes above 0, or a size such as 8Gi"))
        }
        _ => Some(wrong(path, value, "write a size such as 8Gi")),
    }
}

fn integer(path: &str, value: &Value, schema: &Value) -> Option<String> {
    // The schema's bounds are floats; none is too large to be exact.
    let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
    let (least, most) = (bound("minimum"), bound("maximum"));
    let within = |number: i64| {
        let number = Value::from(number).as_f64();
        number.is_some_and(|n| least.is_none_or(|least| n >= least) && most.is_none_or(|most| n <= most))
    };
    if value.as_i64().is_some_and(within) {
        return None;
    }
    let unit = Unit::of(path);
    if let Some(meant) = value.as_str().and_then(|text| unit.meant(text)).filter(|meant| within(*meant)) {
        let name = unit.name.map_or_else(String::new, |name| format!(", in {name}"));
        return Some(wrong(path, value, &format!("write {meant}{name}")));
    }
    let of = unit.name.map_or_else(String::new, |name| format!(" of {name}"));
    let range = match (least, most) {
        (Some(least), Some(most)) => format!(" from {least} to {most}"),
        (Some(least), None) => format!(" of at least {least}"),
        (None, Some(most)) => format!(" of at most {most}"),
        (None, None) => String::new(),
    };
    Some(wrong(path, value, &format!("write a whole number{of}{range}")))
}

/// The unit that a field's name ends in.
struct Unit {
    name: Option<&'static str>,
    /// Of times only.
    milliseconds: Option<i128>,
}

impl Unit {
    fn of(path: &str) -> Self {
        let units = [
            ("milliseconds", Some(1)),
            ("seconds", Some(1000)),
            ("minutes", Some(60_000)),
            ("percent", None),
        ];
        // A list's fields are of the list's unit.
        let field = path.rsplit('.').next().and_then(|field| field.split('[').next());
        let field = field.unwrap_or_default().to_ascii_lowercase();
        let found = units.into_iter().find(|(name, _)| field.ends_with(name));
        Self { name: found.map(|(name, _)| name), milliseconds: found.and_then(|(_, of)| of) }
    }

    /// The number that a text means, which says its unit by itself or is quoted only.
    fn meant(&self, text: &str) -> Option<i64> {
        let text = text.trim();
        if let Ok(number) = text.parse() {
            return Some(number);
        }
        let Some(unit) = self.milliseconds else {
            return text.strip_suffix('%')?.trim().parse().ok();
        };
        let milliseconds = text.parse::<SignedDuration>().ok()?.as_millis();
        (milliseconds % unit == 0).then(|| i64::try_from(milliseconds / unit).ok())?
    }
}

fn wrong(path: &str, value: &Value, what_to_do: &str) -> String {
    let quote = if value.is_string() { "\"" } else { "" };
    format!("{path} is {quote}{}{quote}: {what_to_do}", shown(value))
}

/// A value as it is written, cut short.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.escape_debug().to_string(),
        other => other.to_string(),
    };
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", text.split_at(end).0),
        None => text,
    }
}

fn names(fields: &Map<String, Value>) -> String {
    fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

fn either(known: &[Value]) -> String {
    let known: Vec<&str> = known.iter().filter_map(Value::as_str).collect();
    match known.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} or {last}", before.join(", ")),
        _ => known.concat(),
    }
}

#[cfg(test)]
mod tests {
    use highwater_crds::GpuMemoryPolicy;
    use kube::CustomResourceExt;
    use serde_json::json;

    use super::*;

    /// The fault of a policy with this beside `nodes`.
    fn of(name: &str, value: Value) -> Option<String> {
        let mut spec = json!({"nodes": {}});
        spec[name] = value;
        fault(&json!({"spec": spec}), &serde_json::to_value(GpuMemoryPolicy::crd()).unwrap())
    }

    #[test]
    fn a_wrong_value_is_named_with_its_field_and_what_to_write() {
        for (name, value, expected) in [
            (
                "leaks",
                json!({"horizonMilliseconds": "1h"}),
                "spec.leaks.horizonMilliseconds is \"1h\": write 3600000, in milliseconds",
            ),
            (
                "leaks",
                json!({"bucketMilliseconds": "1m"}),
                "spec.leaks.bucketMilliseconds is \"1m\": write 60000, in milliseconds",
            ),
            (
                "leaks",
                json!({"leadMilliseconds": "soon"}),
                "spec.leaks.leadMilliseconds is \"soon\": write a whole number of milliseconds from 100 to 86400000",
            ),
            (
                "leaks",
                json!({"horizonMilliseconds": 1}),
                "spec.leaks.horizonMilliseconds is 1: write a whole number of milliseconds from 1000 to 604800000",
            ),
            (
                "leaks",
                json!({"sampleMilliseconds": 0.5}),
                "spec.leaks.sampleMilliseconds is 0.5: write a whole number of milliseconds from 100 to 600000",
            ),
            (
                "leaks",
                json!({"actAbovePercent": "60%"}),
                "spec.leaks.actAbovePercent is \"60%\": write 60, in percent",
            ),
            (
                "leaks",
                json!({"actAbovePercent": "0.6"}),
                "spec.leaks.actAbovePercent is \"0.6\": write a whole number of percent from 0 to 100",
            ),
            (
                "remediation",
                json!({"budget": {"maxUnavailable": 1, "rates": [
                    {"scope": "Fleet", "maxActions": 1, "windowMinutes": "1h"}]}}),
                "spec.remediation.budget.rates[0].windowMinutes is \"1h\": write 60, in minutes",
            ),
            (
                "leaks",
                json!({"blockMilliseconds": [1000, 2000]}),
                "spec.leaks.blockMilliseconds has 2 entries: give at least 4",
            ),
            (
                "leaks",
                json!({"blockMilliseconds": [180_000, "10m", 1_800_000, 7_200_000]}),
                "spec.leaks.blockMilliseconds[1] is \"10m\": write 600000, in milliseconds",
            ),
            (
                "leaks",
                json!({"minimumGrowthSize": "256MB"}),
                "spec.leaks.minimumGrowthSize: \"256MB\" is not a quantity: write 256M, or 256Mi",
            ),
            ("leaks", json!({"minimumGrowthSize": 0}), "spec.leaks.minimumGrowthSize is 0: write a whole"),
            ("leaks", json!({"minimumGrowthSize": [1]}), "spec.leaks.minimumGrowthSize is [1]: write a size"),
            ("leaks", json!({"actions": "Restart"}), "spec.leaks.actions is \"Restart\": write a list"),
            (
                "leaks",
                json!({"actions": [{"type": "Kill"}]}),
                "spec.leaks.actions[0].type is \"Kill\": write Signal, ",
            ),
            ("leaks", json!({"actions": [{}]}), "spec.leaks.actions[0].type is missing"),
            ("leaks", json!(5), "spec.leaks is 5: write what it consists of (actAbovePercent, "),
            (
                "leaks",
                json!({"horizon": 5}),
                "spec.leaks.horizon is no field of a GpuMemoryPolicy: correct or remove it (there are ",
            ),
            ("mode", json!("Kill"), "spec.mode is \"Kill\": write Observe, DryRun or Enforce"),
            ("mode", json!(true), "spec.mode is true: write Observe, DryRun or Enforce"),
            ("quota", json!({"default": {}}), "spec.quota.default.limit is missing"),
            (
                "nodes",
                json!({"matchLabels": {"gpu": true}}),
                "spec.nodes.matchLabels.gpu is true: write text, in quotes: \"true\"",
            ),
            ("nodes", Value::Null, "spec.nodes is missing"),
        ] {
            let found = of(name, value.clone()).unwrap_or_default();
            assert!(found.starts_with(expected), "{value}: {found}");
        }
    }

    #[test]
    fn what_is_right_has_no_fault() {
        for (name, value) in [
            ("leaks", json!({})),
            ("leaks", Value::Null),
            ("leaks", json!({"minimumGrowthSize": 268_435_456, "actions": [{"type": "Restart"}]})),
            ("nodes", json!({"matchExpressions": [{"key": "gpu", "operator": "Exists"}]})),
            ("mode", json!("DryRun")),
        ] {
            assert_eq!(of(name, value.clone()), None, "{value}");
        }
    }

    #[test]
    fn a_long_value_is_cut() {
        let found = of("mode", json!("x".repeat(5000))).unwrap();
        assert!(found.len() < 200, "{found}");
    }
}
