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
    vec![fleet(), node(), pod(), pool(), guard(), agent(), operator()]
}

/// A metric of devices, as far as the node is selected.
macro_rules! of_node {
    ($metric:literal) => {
        concat!($metric, r#"{node=~"$node"}"#)
    };
}

/// A metric of pods, as far as node, namespace and pod are selected.
macro_rules! of_pod {
    ($metric:literal) => {
        concat!($metric, r#"{node=~"$node", namespace=~"$namespace", pod=~"$pod"}"#)
    };
}

/// One series for each pod and device.
macro_rules! each_pod {
    ($metric:literal) => {
        concat!("max by (node, device, namespace, pod) (", of_pod!($metric), ")")
    };
}

/// One series for each device.
macro_rules! each_device {
    ($metric:literal) => {
        concat!("max by (node, device) (", of_node!($metric), ")")
    };
}

/// What 99 of 100 stay below, on each node.
macro_rules! p99 {
    ($histogram:literal) => {
        concat!(
            "histogram_quantile(0.99, sum by (node, le) (rate(",
            of_node!($histogram),
            "[$__rate_interval])))"
        )
    };
}

/// How fast a counter rises, on each node.
macro_rules! node_rate {
    ($counter:literal) => {
        concat!("sum by (node) (rate(", of_node!($counter), "[$__rate_interval]))")
    };
}

const DEVICE: &str = "{{node}} {{device}}";
const POD: &str = "{{namespace}}/{{pod}} {{node}} {{device}}";
const HALF: (u64, u64) = (12, 8);
const LOW_HALF: (u64, u64) = (12, 6);
const WHOLE: (u64, u64) = (24, 8);

type Query = (&'static str, &'static str);

/// A number.
fn stat(title: &'static str, description: &'static str, query: &'static str) -> Panel {
    let queries = vec![(query, "")];
    Panel { title, description, draw: Draw::Stat, unit: "short", queries, size: (4, 4) }
}

/// Lines over time.
fn lines<const N: usize>(
    title: &'static str,
    description: &'static str,
    unit: &'static str,
    size: (u64, u64),
    queries: [Query; N],
) -> Panel {
    Panel { title, description, draw: Draw::Lines, unit, queries: queries.into(), size }
}

/// Bytes that add up.
fn stack(title: &'static str, description: &'static str, query: Query) -> Panel {
    Panel { title, description, draw: Draw::Stack, unit: "bytes", queries: vec![query], size: HALF }
}

/// A table over the whole width.
fn table<const N: usize>(
    title: &'static str,
    description: &'static str,
    unit: &'static str,
    queries: [Query; N],
) -> Panel {
    Panel { title, description, draw: Draw::Table, unit, queries: queries.into(), size: WHOLE }
}

/// The fleet in six numbers.
fn fleet_numbers() -> Vec<Panel> {
    vec![
        stat(
            "Devices measured",
            "Devices for which the driver answers.",
            concat!("sum(", of_node!("highwater_device_up"), ")"),
        ),
        stat(
            "Devices not measured",
            "Devices for which the driver does not answer.",
            concat!("count(", of_node!("highwater_device_up"), " == 0) or vector(0)"),
        ),
        stat(
            "Devices above Normal",
            "Devices on which a breaker, in any mode, has tripped.",
            concat!("count(", each_device!("highwater_device_level"), " > 0) or vector(0)"),
        ),
        stat(
            "Pods over their limit",
            "Pods that hold more than their quota on a device.",
            concat!(
                "count(",
                of_node!("highwater_pod_memory_used_bytes"),
                " > ",
                of_node!("highwater_pod_memory_limit_bytes"),
                ") or vector(0)"
            ),
        ),
        stat(
            "Open incidents",
            "Incidents without a final decision.",
            concat!("sum(", of_node!("highwater_incidents_open"), ")"),
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
        stack(
            "Who holds the fleet's memory",
            "The ledger of all devices. The buckets add up to the capacity.",
            (concat!("sum by (bucket) (", of_node!("highwater_device_memory_bytes"), ")"), "{{bucket}}"),
        ),
        lines(
            "Fullest device of each node",
            "Used over usable memory, as breakers see it.",
            "percentunit",
            HALF,
            [(concat!("max by (node) (", of_node!("highwater_device_usage_ratio"), ")"), "{{node}}")],
        ),
        Panel {
            title: "Levels",
            description: "Level of each device by mode: 0 Normal, 1 Warning, 2 Critical, 3 Emergency.",
            draw: Draw::States,
            unit: "short",
            queries: vec![(
                concat!("max by (node, device, mode) (", of_node!("highwater_device_level"), ")"),
                "{{node}} {{device}} {{mode}}",
            )],
            size: HALF,
        },
        lines(
            "Incidents decided in the last hour",
            "Decisions on incidents by state and reason.",
            "short",
            HALF,
            [(
                "sum by (state, reason) (increase(highwater_incident_decisions_total[1h]))",
                "{{state}}/{{reason}}",
            )],
        ),
        table(
            "Devices",
            "Every device, what it is and how full it is.",
            "percentunit",
            [(
                concat!(
                    "max by (node, device, product, partition, driver) (",
                    of_node!("highwater_device_usage_ratio"),
                    " * on (node, device) group_left (product, partition, driver) ",
                    of_node!("highwater_device_info"),
                    ")"
                ),
                "Use",
            )],
        ),
    ]);
    Row { title: "Fleet", panels }
}

fn node() -> Row {
    Row {
        title: "Node",
        panels: vec![
            stack(
                "Who holds each device",
                "The ledger of each device. The buckets add up to its capacity.",
                (
                    concat!(
                        "sum by (node, device, bucket) (",
                        of_node!("highwater_device_memory_bytes"),
                        ")"
                    ),
                    "{{node}} {{device}} {{bucket}}",
                ),
            ),
            lines(
                "Use of each device",
                "Used over usable memory, as breakers see it.",
                "percentunit",
                HALF,
                [(each_device!("highwater_device_usage_ratio"), DEVICE)],
            ),
            lines(
                "Memory that no pod answers for",
                "Processes of no pod, memory of processes that are gone, and memory that no process explains.",
                "bytes",
                HALF,
                [(
                    r#"sum by (node, device, bucket) (highwater_device_memory_bytes{node=~"$node", bucket=~"foreign|zombie|unexplained"})"#,
                    "{{node}} {{device}} {{bucket}}",
                )],
            ),
        ],
    }
}

/// What is held for whom.
fn pool() -> Row {
    Row {
        title: "Pool",
        panels: vec![
            Panel {
                size: (4, 8),
                ..stat(
                    "Keepers away",
                    "Nodes whose keeper does not answer: their pools cannot change.",
                    concat!("count(", of_node!("highwater_keeper_up"), " == 0) or vector(0)"),
                )
            },
            Panel {
                size: (4, 8),
                ..stat(
                    "Pools that are short",
                    "Devices whose pool has not all the memory that it promises.",
                    concat!("count(", of_node!("highwater_pool_short_bytes"), " > 0) or vector(0)"),
                )
            },
            Panel {
                size: (4, 8),
                ..stat(
                    "Pods below their minimum",
                    "Pods whose quota is enforced less firmly than its rule asks.",
                    concat!("count(", of_node!("highwater_pod_strength_below_minimum"), ") or vector(0)"),
                )
            },
            lines(
                "Pool of each device",
                "What the pool is to have, what the keeper holds of it, and what is given to pods, used or not.",
                "bytes",
                HALF,
                [
                    (
                        concat!(each_device!("highwater_pool_size_bytes"), " or vector(0)"),
                        "size {{node}} {{device}}",
                    ),
                    (
                        concat!(each_device!("highwater_pool_ballast_bytes"), " or vector(0)"),
                        "held {{node}} {{device}}",
                    ),
                    (
                        concat!(
                            "sum by (node, device) (",
                            of_node!("highwater_pool_granted_bytes"),
                            ") or vector(0)"
                        ),
                        "granted {{node}} {{device}}",
                    ),
                ],
            ),
            lines(
                "Missing from the pools",
                "What a pool promises and does not have, because others use the memory.",
                "bytes",
                HALF,
                [(concat!(each_device!("highwater_pool_short_bytes"), " or vector(0)"), DEVICE)],
            ),
            lines(
                "Granted",
                "What the pool has given to each pod, used or not.",
                "bytes",
                HALF,
                [(concat!(each_pod!("highwater_pool_granted_bytes"), " or vector(0)"), POD)],
            ),
            lines(
                "Within reach",
                "Free bytes that a pod could take although they are not owed to it. What the keeper holds is out of reach.",
                "bytes",
                HALF,
                [(concat!(each_pod!("highwater_pod_overshoot_bytes"), " or vector(0)"), POD)],
            ),
        ],
    }
}

fn pod() -> Row {
    Row {
        title: "Pod",
        panels: vec![
            table(
                "Who holds what",
                "What each pod holds on each device, its limit and what it is owed.",
                "bytes",
                [
                    (each_pod!("highwater_pod_memory_used_bytes"), "Used"),
                    (each_pod!("highwater_pod_memory_limit_bytes"), "Limit"),
                    (each_pod!("highwater_pod_memory_due_bytes"), "Due"),
                ],
            ),
            stack(
                "Memory of each pod",
                "What each pod holds on each device.",
                (each_pod!("highwater_pod_memory_used_bytes"), POD),
            ),
            lines(
                "Use against what is due",
                "Above 100 % a pod holds more than its guarantee, or its limit where it has none.",
                "percentunit",
                HALF,
                [(
                    concat!(
                        "max by (node, device, namespace, pod) (",
                        of_pod!("highwater_pod_memory_used_bytes"),
                        " / ",
                        of_pod!("highwater_pod_memory_due_bytes"),
                        ")"
                    ),
                    POD,
                )],
            ),
            lines(
                "Suspected leaks",
                "Pods whose memory grows and may not come back: suspected, and those of them for which an act is due.",
                "short",
                LOW_HALF,
                [
                    (
                        concat!("sum(", of_pod!("highwater_pod_leak_stage"), " >= bool 1) or vector(0)"),
                        "suspect",
                    ),
                    (
                        concat!("sum(", of_pod!("highwater_pod_leak_stage"), " == bool 2) or vector(0)"),
                        "act due",
                    ),
                ],
            ),
            lines(
                "Growth of suspected pods",
                "How fast the memory of pods grows that are suspected to leak, an hour.",
                "bytes",
                LOW_HALF,
                [(
                    concat!(
                        "max by (node, device, namespace, pod) (",
                        of_pod!("highwater_pod_leak_slope_bytes_per_hour"),
                        ") or vector(0)"
                    ),
                    POD,
                )],
            ),
            lines(
                "Enforcement",
                "Pods by how firmly their quota is enforced.",
                "short",
                LOW_HALF,
                [(
                    concat!("count by (strength) (", of_pod!("highwater_pod_strength_info"), ")"),
                    "{{strength}}",
                )],
            ),
            lines(
                "Killed for host memory",
                "Containers that the kernel killed for host memory in the last hour. These are no GPU fault.",
                "short",
                LOW_HALF,
                [(
                    concat!(
                        "sum by (namespace, pod) (increase(",
                        of_pod!("highwater_pod_host_oom_kills_total"),
                        "[1h])) or vector(0)"
                    ),
                    "{{namespace}}/{{pod}}",
                )],
            ),
        ],
    }
}

/// How firmly quotas hold, and the views that should agree on it.
fn guard() -> Row {
    Row {
        title: "Guard",
        panels: vec![
            table(
                "Strength of each pod",
                "How firmly the quota of each pod is enforced on each device.",
                "short",
                [(
                    concat!(
                        "max by (node, device, namespace, pod, strength) (",
                        of_pod!("highwater_pod_strength_info"),
                        ")"
                    ),
                    "In force",
                )],
            ),
            lines(
                "Guard and driver",
                "What the guard has charged to a pod, and what the driver says that it holds. The next panel names the difference.",
                "bytes",
                HALF,
                [
                    (
                        concat!(each_pod!("highwater_pod_guard_charged_bytes"), " or vector(0)"),
                        "guard {{namespace}}/{{pod}} {{node}} {{device}}",
                    ),
                    (
                        each_pod!("highwater_pod_memory_used_bytes"),
                        "driver {{namespace}}/{{pod}} {{node}} {{device}}",
                    ),
                ],
            ),
            lines(
                "Between guard and driver",
                "Contexts beyond their estimate, memory made outside of the guard, and what the driver took by itself.",
                "bytes",
                HALF,
                [(
                    concat!(
                        "sum by (node, device, namespace, pod, part) (",
                        of_pod!("highwater_pod_memory_difference_bytes"),
                        ") or vector(0)"
                    ),
                    "{{part}} {{namespace}}/{{pod}} {{node}} {{device}}",
                )],
            ),
            lines(
                "Refused by the guard in the last hour",
                "Allocations over the quota, or for which there was no memory to grant.",
                "short",
                LOW_HALF,
                [(
                    concat!(
                        "sum by (node, device, namespace, pod) (increase(",
                        of_pod!("highwater_guard_refusals_total"),
                        "[1h])) or vector(0)"
                    ),
                    POD,
                )],
            ),
            lines(
                "Guarded processes",
                "Processes of each pod that have a guard and hold memory of the device.",
                "short",
                LOW_HALF,
                [(concat!(each_pod!("highwater_guard_processes"), " or vector(0)"), POD)],
            ),
        ],
    }
}

/// How well the agents do their work.
fn agent() -> Row {
    Row {
        title: "Agent",
        panels: vec![
            lines(
                "Time to measure (p99)",
                "One round over all devices of a node.",
                "s",
                (6, 8),
                [(p99!("highwater_sample_duration_seconds_bucket"), "{{node}}")],
            ),
            lines(
                "Samples a second",
                "Rounds taken, rounds thrown away, and samples whose numbers may not fit together.",
                "short",
                (6, 8),
                [
                    (node_rate!("highwater_samples_total"), "{{node}} taken"),
                    (node_rate!("highwater_samples_dropped_total"), "{{node}} thrown away"),
                    (
                        concat!(node_rate!("highwater_device_torn_samples_total"), " or vector(0)"),
                        "{{node}} torn",
                    ),
                ],
            ),
            lines(
                "Driver errors",
                "Errors of the driver while measuring, by kind.",
                "short",
                LOW_HALF,
                [(
                    concat!(
                        "sum by (node, device, error) (rate(",
                        of_node!("highwater_device_errors_total"),
                        "[$__rate_interval])) or vector(0)"
                    ),
                    "{{node}} {{device}} {{error}}",
                )],
            ),
            lines(
                "Signals in the last hour",
                "Pressure files, by whether they could be written.",
                "short",
                LOW_HALF,
                [(
                    concat!(
                        "sum by (node, outcome) (increase(",
                        of_node!("highwater_signals_total"),
                        "[1h]))"
                    ),
                    "{{node}} {{outcome}}",
                )],
            ),
            lines(
                "Lateness (p99)",
                "How much later than planned a round of samples began.",
                "s",
                LOW_HALF,
                [(p99!("highwater_sample_lateness_seconds_bucket"), "{{node}}")],
            ),
            lines(
                "Contact with the API server",
                "Time since the API server last answered the agent. Past the plan's life the agent only measures.",
                "s",
                LOW_HALF,
                [(
                    concat!("max by (node) (", of_node!("highwater_api_contact_age_seconds"), ")"),
                    "{{node}}",
                )],
            ),
        ],
    }
}

fn operator() -> Row {
    let small =
        |title, description, unit, query, legend| lines(title, description, unit, (8, 7), [(query, legend)]);
    Row {
        title: "Operator",
        panels: vec![
            small(
                "Leaders",
                "Exactly one replica leads.",
                "short",
                "sum(highwater_operator_leader)",
                "leaders",
            ),
            small(
                "Evictions in the last hour",
                "Eviction requests by what the API server answered.",
                "short",
                "sum by (outcome) (increase(highwater_evictions_total[1h])) or vector(0)",
                "{{outcome}}",
            ),
            small(
                "Restarts reserved",
                "Tokens taken from the budgets in their current windows.",
                "short",
                "max by (policy) (highwater_budget_tokens) or vector(0)",
                "{{policy}}",
            ),
            small(
                "Reaction (p99 of the last hour)",
                "From the sample that satisfied a hold to the accepted eviction.",
                "s",
                "histogram_quantile(0.99, sum by (le) (rate(highwater_reaction_seconds_bucket[1h]))) or vector(0)",
                "p99",
            ),
            small(
                "Errors",
                "Reconciliations that failed, by controller.",
                "short",
                "sum by (controller, category) (rate(highwater_reconcile_errors_total[$__rate_interval])) or vector(0)",
                "{{controller}} {{category}}",
            ),
            small(
                "Watches interrupted",
                "Interruptions of the operator's watches, by kind.",
                "short",
                "sum by (kind) (rate(highwater_watch_errors_total[$__rate_interval])) or vector(0)",
                "{{kind}}",
            ),
            small(
                "Time to plan (p99 of the last hour)",
                "Time to compute the plans of the whole fleet.",
                "s",
                "histogram_quantile(0.99, sum by (le) (rate(highwater_plan_compute_seconds_bucket[1h]))) or vector(0)",
                "p99",
            ),
            small(
                "Plans written",
                "Node plans written in the last hour. A steady fleet causes none.",
                "short",
                "sum(increase(highwater_plan_writes_total[1h])) or vector(0)",
                "plans",
            ),
            table(
                "Policies",
                "The status of each condition of each policy.",
                "short",
                [("max by (policy, type, status) (highwater_policy_conditions) == 1", "Holds")],
            ),
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
