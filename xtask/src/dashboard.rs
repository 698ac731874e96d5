//! The Grafana dashboard: fleet, then node, then pod - who holds what, levels, incidents.
//!
//! Every query must be answered with data as soon as Highwater runs and one incident was
//! decided; what may rightly be empty ends in `or vector(0)`. Variables: `$node`, `$namespace`
//! and `$pod` are regular expressions (all: `.+`).

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{artefacts::canonical, crds, metrics};

/// How a panel draws.
#[derive(Clone, Copy, Debug)]
enum Draw {
    /// One number.
    Stat,
    /// Lines over time.
    Lines,
    /// Areas over time that add up.
    Stack,
    /// Coloured bands over time.
    States,
    /// A table of present values, the queries joined on their labels.
    Table,
}

/// One panel.
#[derive(Debug)]
struct Panel {
    title: &'static str,
    description: &'static str,
    draw: Draw,
    unit: &'static str,
    /// Query and legend (the name of the column in a table).
    queries: Vec<(&'static str, &'static str)>,
    /// Width out of 24 and height, in grid units.
    size: (u64, u64),
}

/// A heading and the panels under it.
#[derive(Debug)]
struct Row {
    title: &'static str,
    panels: Vec<Panel>,
}

/// The dashboard as Grafana imports it.
pub(crate) fn json() -> Result<String> {
    let dashboard = json!({
        "uid": "highwater",
        "title": "Highwater: GPU memory",
        "description": "Who holds GPU memory, how high it stands, and what was done about it.",
        "tags": ["gpu", "highwater"],
        "editable": false,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {"list": variables()},
        "annotations": {"list": []},
        "panels": lay_out(&rows()),
    });
    Ok(format!("{}\n", serde_json::to_string_pretty(&canonical(dashboard))?))
}

/// One message for each query that asks for a metric which nothing exports, or that Prometheus
/// cannot parse.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for query in queries() {
        for name in metrics::unknown_names(query) {
            problems
                .push(format!("a query of the dashboard asks for {name}, which nothing exports: {query}"));
        }
    }
    // promtool parses queries only inside of rules.
    let rules: Vec<Value> = queries()
        .iter()
        .map(|query| json!({"record": "dashboard:query", "labels": {"query": query}, "expr": filled_in(query)}))
        .collect();
    // Built elsewhere, a fresh checkout has no such folder yet.
    fs::create_dir_all(root.join("target"))?;
    let file = root.join("target/dashboard-queries.yaml");
    fs::write(&file, crds::yaml(&json!({"groups": [{"name": "dashboard", "rules": rules}]})))
        .with_context(|| format!("writing {}", file.display()))?;
    match Command::new("promtool").args(["check", "rules"]).arg(&file).output() {
        Err(_) => println!("skipped the syntax of the dashboard's queries: promtool is not installed"),
        Ok(output) if output.status.success() => {}
        Ok(output) => problems.push(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
    Ok(problems)
}

/// Every query of the dashboard, variables included.
fn queries() -> Vec<&'static str> {
    rows()
        .iter()
        .flat_map(|row| &row.panels)
        .flat_map(|panel| &panel.queries)
        .map(|(query, _)| *query)
        .collect()
}

/// A query with everything selected.
fn filled_in(query: &str) -> String {
    query
        .replace("$__rate_interval", "1m")
        .replace("$node", ".+")
        .replace("$namespace", ".+")
        .replace("$pod", ".+")
}

fn rows() -> Vec<Row> {
    vec![fleet(), node(), pod(), agent(), operator()]
}

/// The fleet in six numbers.
fn fleet_numbers() -> Vec<Panel> {
    let stat = |title, description, query| Panel {
        title,
        description,
        draw: Draw::Stat,
        unit: "short",
        queries: vec![(query, "")],
        size: (4, 4),
    };
    vec![
        stat(
            "Devices measured",
            "Devices for which the driver answers.",
            r#"sum(highwater_device_up{node=~"$node"})"#,
        ),
        stat(
            "Devices not measured",
            "Devices for which the driver does not answer.",
            r#"count(highwater_device_up{node=~"$node"} == 0) or vector(0)"#,
        ),
        stat(
            "Devices above Normal",
            "Devices on which a breaker, in any mode, has tripped.",
            r#"count(max by (node, device) (highwater_device_level{node=~"$node"}) > 0) or vector(0)"#,
        ),
        stat(
            "Pods over their limit",
            "Pods that hold more than their quota on a device.",
            r#"count(highwater_pod_memory_used_bytes{node=~"$node"} > highwater_pod_memory_limit_bytes{node=~"$node"}) or vector(0)"#,
        ),
        stat(
            "Open incidents",
            "Incidents without a final decision.",
            r#"sum(highwater_incidents_open{node=~"$node"})"#,
        ),
        stat(
            "Fleet breaker",
            "1 while every new act is held because too many devices ask for one at once.",
            "max(highwater_fleet_halted)",
        ),
    ]
}

fn fleet() -> Row {
    let mut panels = fleet_numbers();
    panels.extend([
            Panel {
                title: "Who holds the fleet's memory",
                description: "The ledger of all devices. The buckets add up to the capacity.",
                draw: Draw::Stack,
                unit: "bytes",
                queries: vec![(
                    r#"sum by (bucket) (highwater_device_memory_bytes{node=~"$node"})"#,
                    "{{bucket}}",
                )],
                size: (12, 8),
            },
            Panel {
                title: "Fullest device of each node",
                description: "Used over usable memory, as breakers see it.",
                draw: Draw::Lines,
                unit: "percentunit",
                queries: vec![(r#"max by (node) (highwater_device_usage_ratio{node=~"$node"})"#, "{{node}}")],
                size: (12, 8),
            },
            Panel {
                title: "Levels",
                description: "Level of each device by mode: 0 Normal, 1 Warning, 2 Critical, 3 Emergency.",
                draw: Draw::States,
                unit: "short",
                queries: vec![(
                    r#"max by (node, device, mode) (highwater_device_level{node=~"$node"})"#,
                    "{{node}} {{device}} {{mode}}",
                )],
                size: (12, 8),
            },
            Panel {
                title: "Incidents decided in the last hour",
                description: "Decisions on incidents by state and reason.",
                draw: Draw::Lines,
                unit: "short",
                queries: vec![(
                    "sum by (state, reason) (increase(highwater_incident_decisions_total[1h]))",
                    "{{state}}/{{reason}}",
                )],
                size: (12, 8),
            },
            Panel {
                title: "Devices",
                description: "Every device, what it is and how full it is.",
                draw: Draw::Table,
                unit: "percentunit",
                queries: vec![(
                    r#"max by (node, device, product, partition, driver) (highwater_device_usage_ratio{node=~"$node"} * on (node, device) group_left (product, partition, driver) highwater_device_info{node=~"$node"})"#,
                    "Use",
                )],
                size: (24, 8),
            },
    ]);
    Row { title: "Fleet", panels }
}

fn node() -> Row {
    Row {
        title: "Node",
        panels: vec![
            Panel {
                title: "Who holds each device",
                description: "The ledger of each device. The buckets add up to its capacity.",
                draw: Draw::Stack,
                unit: "bytes",
                queries: vec![(
                    r#"sum by (node, device, bucket) (highwater_device_memory_bytes{node=~"$node"})"#,
                    "{{node}} {{device}} {{bucket}}",
                )],
                size: (12, 8),
            },
            Panel {
                title: "Use of each device",
                description: "Used over usable memory, as breakers see it.",
                draw: Draw::Lines,
                unit: "percentunit",
                queries: vec![(
                    r#"max by (node, device) (highwater_device_usage_ratio{node=~"$node"})"#,
                    "{{node}} {{device}}",
                )],
                size: (12, 8),
            },
            Panel {
                title: "Memory that no pod answers for",
                description: "Processes of no pod, memory of processes that are gone, and memory that no process explains.",
                draw: Draw::Lines,
                unit: "bytes",
                queries: vec![(
                    r#"sum by (node, device, bucket) (highwater_device_memory_bytes{node=~"$node", bucket=~"foreign|zombie|unexplained"})"#,
                    "{{node}} {{device}} {{bucket}}",
                )],
                size: (12, 8),
            },
        ],
    }
}

/// How well the agents do their work.
fn agent() -> Row {
    Row {
        title: "Agent",
        panels: vec![
            Panel {
                title: "Time to measure (p99)",
                description: "One round over all devices of a node.",
                draw: Draw::Lines,
                unit: "s",
                queries: vec![(
                    r#"histogram_quantile(0.99, sum by (node, le) (rate(highwater_sample_duration_seconds_bucket{node=~"$node"}[$__rate_interval])))"#,
                    "{{node}}",
                )],
                size: (6, 8),
            },
            Panel {
                title: "Samples a second",
                description: "Rounds taken, rounds thrown away, and samples whose numbers may not fit together.",
                draw: Draw::Lines,
                unit: "short",
                queries: vec![
                    (
                        r#"sum by (node) (rate(highwater_samples_total{node=~"$node"}[$__rate_interval]))"#,
                        "{{node}} taken",
                    ),
                    (
                        r#"sum by (node) (rate(highwater_samples_dropped_total{node=~"$node"}[$__rate_interval]))"#,
                        "{{node}} thrown away",
                    ),
                    (
                        r#"sum by (node) (rate(highwater_device_torn_samples_total{node=~"$node"}[$__rate_interval])) or vector(0)"#,
                        "{{node}} torn",
                    ),
                ],
                size: (6, 8),
            },
            Panel {
                title: "Driver errors",
                description: "Errors of the driver while measuring, by kind.",
                draw: Draw::Lines,
                unit: "short",
                queries: vec![(
                    r#"sum by (node, device, error) (rate(highwater_device_errors_total{node=~"$node"}[$__rate_interval])) or vector(0)"#,
                    "{{node}} {{device}} {{error}}",
                )],
                size: (12, 6),
            },
            Panel {
                title: "Signals in the last hour",
                description: "Pressure files, by whether they could be written.",
                draw: Draw::Lines,
                unit: "short",
                queries: vec![(
                    r#"sum by (node, outcome) (increase(highwater_signals_total{node=~"$node"}[1h]))"#,
                    "{{node}} {{outcome}}",
                )],
                size: (12, 6),
            },
            Panel {
                title: "Lateness (p99)",
                description: "How much later than planned a round of samples began.",
                draw: Draw::Lines,
                unit: "s",
                queries: vec![(
                    r#"histogram_quantile(0.99, sum by (node, le) (rate(highwater_sample_lateness_seconds_bucket{node=~"$node"}[$__rate_interval])))"#,
                    "{{node}}",
                )],
                size: (12, 6),
            },
            Panel {
                title: "Contact with the API server",
                description: "Time since the API server last answered the agent. Past the plan's life the agent only measures.",
                draw: Draw::Lines,
                unit: "s",
                queries: vec![(
                    r#"max by (node) (highwater_api_contact_age_seconds{node=~"$node"})"#,
                    "{{node}}",
                )],
                size: (12, 6),
            },
        ],
    }
}

fn pod() -> Row {
    Row {
        title: "Pod",
        panels: vec![
            Panel {
                title: "Who holds what",
                description: "What each pod holds on each device, its limit and what it is owed.",
                draw: Draw::Table,
                unit: "bytes",
                queries: vec![
                    (
                        r#"max by (node, device, namespace, pod) (highwater_pod_memory_used_bytes{node=~"$node", namespace=~"$namespace", pod=~"$pod"})"#,
                        "Used",
                    ),
                    (
                        r#"max by (node, device, namespace, pod) (highwater_pod_memory_limit_bytes{node=~"$node", namespace=~"$namespace", pod=~"$pod"})"#,
                        "Limit",
                    ),
                    (
                        r#"max by (node, device, namespace, pod) (highwater_pod_memory_due_bytes{node=~"$node", namespace=~"$namespace", pod=~"$pod"})"#,
                        "Due",
                    ),
                ],
                size: (24, 8),
            },
            Panel {
                title: "Memory of each pod",
                description: "What each pod holds on each device.",
                draw: Draw::Stack,
                unit: "bytes",
                queries: vec![(
                    r#"sum by (node, device, namespace, pod) (highwater_pod_memory_used_bytes{node=~"$node", namespace=~"$namespace", pod=~"$pod"})"#,
                    "{{namespace}}/{{pod}} {{node}} {{device}}",
                )],
                size: (12, 8),
            },
            Panel {
                title: "Use against what is due",
                description: "Above 100 % a pod holds more than its guarantee, or its limit where it has none.",
                draw: Draw::Lines,
                unit: "percentunit",
                queries: vec![(
                    r#"max by (node, device, namespace, pod) (highwater_pod_memory_used_bytes{node=~"$node", namespace=~"$namespace", pod=~"$pod"} / highwater_pod_memory_due_bytes{node=~"$node", namespace=~"$namespace", pod=~"$pod"})"#,
                    "{{namespace}}/{{pod}} {{node}} {{device}}",
                )],
                size: (12, 8),
            },
            Panel {
                title: "Enforcement",
                description: "Pods by how firmly their quota is enforced.",
                draw: Draw::Lines,
                unit: "short",
                queries: vec![(
                    r#"count by (strength) (highwater_pod_strength_info{node=~"$node", namespace=~"$namespace", pod=~"$pod"})"#,
                    "{{strength}}",
                )],
                size: (12, 6),
            },
            Panel {
                title: "Killed for host memory",
                description: "Containers that the kernel killed for host memory in the last hour. These are no GPU fault.",
                draw: Draw::Lines,
                unit: "short",
                queries: vec![(
                    r#"sum by (namespace, pod) (increase(highwater_pod_host_oom_kills_total{node=~"$node", namespace=~"$namespace", pod=~"$pod"}[1h])) or vector(0)"#,
                    "{{namespace}}/{{pod}}",
                )],
                size: (12, 6),
            },
        ],
    }
}

fn operator() -> Row {
    let lines = |title, description, unit, query, legend| Panel {
        title,
        description,
        draw: Draw::Lines,
        unit,
        queries: vec![(query, legend)],
        size: (8, 7),
    };
    Row {
        title: "Operator",
        panels: vec![
            lines(
                "Leaders",
                "Exactly one replica leads.",
                "short",
                "sum(highwater_operator_leader)",
                "leaders",
            ),
            lines(
                "Evictions in the last hour",
                "Eviction requests by what the API server answered.",
                "short",
                "sum by (outcome) (increase(highwater_evictions_total[1h])) or vector(0)",
                "{{outcome}}",
            ),
            lines(
                "Restarts reserved",
                "Tokens taken from the budgets in their current windows.",
                "short",
                "max by (policy) (highwater_budget_tokens) or vector(0)",
                "{{policy}}",
            ),
            lines(
                "Reaction (p99 of the last hour)",
                "From the sample that satisfied a hold to the accepted eviction.",
                "s",
                "histogram_quantile(0.99, sum by (le) (rate(highwater_reaction_seconds_bucket[1h]))) or vector(0)",
                "p99",
            ),
            lines(
                "Errors",
                "Reconciliations that failed, by controller.",
                "short",
                "sum by (controller, category) (rate(highwater_reconcile_errors_total[$__rate_interval])) or vector(0)",
                "{{controller}} {{category}}",
            ),
            lines(
                "Watches interrupted",
                "Interruptions of the operator's watches, by kind.",
                "short",
                "sum by (kind) (rate(highwater_watch_errors_total[$__rate_interval])) or vector(0)",
                "{{kind}}",
            ),
            lines(
                "Time to plan (p99 of the last hour)",
                "Time to compute the plans of the whole fleet.",
                "s",
                "histogram_quantile(0.99, sum by (le) (rate(highwater_plan_compute_seconds_bucket[1h]))) or vector(0)",
                "p99",
            ),
            lines(
                "Plans written",
                "Node plans written in the last hour. A steady fleet causes none.",
                "short",
                "sum(increase(highwater_plan_writes_total[1h])) or vector(0)",
                "plans",
            ),
            Panel {
                title: "Policies",
                description: "The status of each condition of each policy.",
                draw: Draw::Table,
                unit: "short",
                queries: vec![("max by (policy, type, status) (highwater_policy_conditions) == 1", "Holds")],
                size: (24, 7),
            },
        ],
    }
}

fn variables() -> Vec<Value> {
    let choice = |name: &str, label: &str, query: &str| {
        json!({
            "name": name,
            "label": label,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": true,
            "includeAll": true,
            "allValue": ".+",
            "current": {"text": "All", "value": "$__all"},
        })
    };
    vec![
        json!({"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}),
        choice("node", "Node", "label_values(highwater_device_up, node)"),
        choice(
            "namespace",
            "Namespace",
            r#"label_values(highwater_pod_memory_used_bytes{node=~"$node"}, namespace)"#,
        ),
        choice(
            "pod",
            "Pod",
            r#"label_values(highwater_pod_memory_used_bytes{node=~"$node", namespace=~"$namespace"}, pod)"#,
        ),
    ]
}

/// Places panels from left to right and from top to bottom.
fn lay_out(rows: &[Row]) -> Vec<Value> {
    let mut placed = Vec::new();
    let mut id = 0_u64;
    let mut next_id = || {
        id = id.saturating_add(1);
        id
    };
    let mut top = 0_u64;
    for row in rows {
        placed.push(json!({
            "id": next_id(), "type": "row", "title": row.title, "collapsed": false, "panels": [],
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
        }));
        top = top.saturating_add(1);
        let (mut left, mut tallest) = (0_u64, 0_u64);
        for panel in &row.panels {
            let (width, height) = panel.size;
            if left.saturating_add(width) > 24 {
                top = top.saturating_add(tallest);
                (left, tallest) = (0, 0);
            }
            placed.push(panel.to_json(next_id(), left, top));
            left = left.saturating_add(width);
            tallest = tallest.max(height);
        }
        top = top.saturating_add(tallest);
    }
    placed
}

/// Names and colours of the levels.
fn levels() -> Value {
    let names = [("Normal", "green"), ("Warning", "yellow"), ("Critical", "orange"), ("Emergency", "red")];
    let options: serde_json::Map<String, Value> = (0..)
        .zip(names)
        .map(|(level, (name, color)): (u8, _)| {
            (level.to_string(), json!({"text": name, "color": color, "index": level}))
        })
        .collect();
    json!([{"type": "value", "options": options}])
}

impl Panel {
    fn to_json(&self, id: u64, x: u64, y: u64) -> Value {
        let (w, h) = self.size;
        let (kind, custom, options) = self.style();
        let targets: Vec<Value> = self
            .queries
            .iter()
            .zip('A'..='Z')
            .map(|((query, legend), letter)| {
                json!({
                    "refId": letter.to_string(),
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "expr": query,
                    "legendFormat": legend,
                    "instant": matches!(self.draw, Draw::Table),
                    "range": !matches!(self.draw, Draw::Table),
                    "format": if matches!(self.draw, Draw::Table) { "table" } else { "time_series" },
                })
            })
            .collect();
        let mut panel = json!({
            "id": id,
            "type": kind,
            "title": self.title,
            "description": self.description,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {"x": x, "y": y, "w": w, "h": h},
            "fieldConfig": {"defaults": {"unit": self.unit, "custom": custom}, "overrides": []},
            "options": options,
            "targets": targets,
        });
        if let Some(panel) = panel.as_object_mut() {
            match self.draw {
                Draw::Table => {
                    panel.insert("transformations".into(), self.columns());
                }
                Draw::States => {
                    if let Some(defaults) = panel.get_mut("fieldConfig").and_then(|c| c.get_mut("defaults")) {
                        *defaults =
                            json!({"unit": self.unit, "custom": {"fillOpacity": 70}, "mappings": levels()});
                    }
                }
                Draw::Stat | Draw::Lines | Draw::Stack => {}
            }
        }
        panel
    }

    fn style(&self) -> (&'static str, Value, Value) {
        match self.draw {
            Draw::Stat => {
                ("stat", json!({}), json!({"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none"}))
            }
            Draw::Lines => (
                "timeseries",
                json!({"lineWidth": 1, "fillOpacity": 0}),
                json!({"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}),
            ),
            Draw::Stack => (
                "timeseries",
                json!({"lineWidth": 1, "fillOpacity": 30, "stacking": {"mode": "normal"}}),
                json!({"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}),
            ),
            Draw::States => (
                "state-timeline",
                json!({"fillOpacity": 70}),
                json!({"mergeValues": true, "showValue": "never", "legend": {"displayMode": "list", "placement": "bottom"}}),
            ),
            Draw::Table => ("table", json!({"filterable": true}), json!({"showHeader": true})),
        }
    }

    /// Joins the queries of a table and names their columns.
    fn columns(&self) -> Value {
        let mut names = serde_json::Map::new();
        for ((_, legend), letter) in self.queries.iter().zip('A'..='Z') {
            let value = if self.queries.len() > 1 { format!("Value #{letter}") } else { "Value".into() };
            names.insert(value, json!(legend));
        }
        json!([
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": true}, "renameByName": names}},
        ])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_query_names_only_exported_metrics() {
        for query in queries() {
            assert_eq!(metrics::unknown_names(query), Vec::<String>::new(), "{query}");
        }
    }

    #[test]
    fn every_panel_says_what_it_shows() {
        for panel in rows().iter().flat_map(|row| &row.panels) {
            assert!(!panel.description.is_empty() && !panel.queries.is_empty(), "{}", panel.title);
        }
    }

    #[test]
    fn panels_have_unique_ids_and_do_not_overlap() {
        let panels = lay_out(&rows());
        let ids: BTreeSet<u64> = panels.iter().map(|p| p["id"].as_u64().unwrap()).collect();
        assert_eq!(ids.len(), panels.len());
        let mut cells = BTreeSet::new();
        for panel in &panels {
            let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            assert!(at("x") + at("w") <= 24);
            for x in at("x")..at("x") + at("w") {
                for y in at("y")..at("y") + at("h") {
                    assert!(cells.insert((x, y)), "{} overlaps", panel["title"]);
                }
            }
        }
    }
}
