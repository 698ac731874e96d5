//! Every metric that the agent and the operator export: the reference page is made from this
//! table, dashboard and alerts may use no other name, and a check holds it against the code.

use std::{collections::BTreeSet, fmt::Write as _, fs, path::Path};

use anyhow::{Context, Result};

/// Who exports a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Component {
    /// The agent, port 9440.
    Agent,
    /// The operator, port 9441.
    Operator,
}

/// How a metric behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Goes up and down.
    Gauge,
    /// Only goes up.
    Counter,
    /// `_bucket`, `_sum` and `_count` series.
    Histogram,
}

/// One metric.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Metric {
    pub(crate) component: Component,
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// Labels beside `node`, which every metric of the agent has.
    pub(crate) labels: &'static [&'static str],
    pub(crate) meaning: &'static str,
}

const fn agent(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    meaning: &'static str,
) -> Metric {
    Metric { component: Component::Agent, name, kind, labels, meaning }
}

const fn operator(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    meaning: &'static str,
) -> Metric {
    Metric { component: Component::Operator, name, kind, labels, meaning }
}

const POD: &[&str] = &["namespace", "pod", "device"];
const LEAK: &[&str] = &["namespace", "pod", "device", "memory"];

/// The metrics, in the order of the reference page.
pub(crate) const ALL: &[Metric] = &[
    agent(
        "highwater_device_info",
        Kind::Gauge,
        &["device", "uuid", "product", "partition", "driver"],
        "Always 1. Join it by `node` and `device` for what a device is.",
    ),
    agent(
        "highwater_device_up",
        Kind::Gauge,
        &["device"],
        "1 while the device is measured, 0 while the driver does not answer for it.",
    ),
    agent("highwater_device_capacity_bytes", Kind::Gauge, &["device"], "Memory of the device."),
    agent(
        "highwater_device_memory_bytes",
        Kind::Gauge,
        &["device", "bucket"],
        "The ledger. The buckets `pods`, `foreign` (processes of no pod), `zombie` (held for a process that is gone), `unexplained` (no process accounts for it), `driver_reserved`, `ballast`, `leased` and `free` add up to the capacity.",
    ),
    agent(
        "highwater_device_usage_ratio",
        Kind::Gauge,
        &["device"],
        "The level that breakers look at: used over usable memory, declared parts left out.",
    ),
    agent(
        "highwater_device_level",
        Kind::Gauge,
        &["device", "mode"],
        "0 Normal, 1 Warning, 2 Critical, 3 Emergency, by the breaker of each mode.",
    ),
    agent(
        "highwater_device_unattributed_bytes",
        Kind::Gauge,
        &["device"],
        "Memory that no process explains, beyond what is normal for the driver.",
    ),
    agent(
        "highwater_device_errors_total",
        Kind::Counter,
        &["device", "error"],
        "Driver errors while measuring.",
    ),
    agent(
        "highwater_device_torn_samples_total",
        Kind::Counter,
        &["device"],
        "Samples whose numbers may not fit together because memory moved, however often they were taken again.",
    ),
    agent(
        "highwater_pod_memory_used_bytes",
        Kind::Gauge,
        POD,
        "What the pod holds on the device, all containers and contexts. 0 from admission on; gone with the pod.",
    ),
    agent(
        "highwater_pod_memory_limit_bytes",
        Kind::Gauge,
        POD,
        "The pod's limit on the device. Absent without a quota.",
    ),
    agent(
        "highwater_pod_memory_due_bytes",
        Kind::Gauge,
        POD,
        "What the pod is owed: its guarantee, else its limit.",
    ),
    agent(
        "highwater_pod_host_oom_kills_total",
        Kind::Counter,
        &["namespace", "pod"],
        "Containers of the pod that the kernel killed for host memory. These are no GPU fault.",
    ),
    agent(
        "highwater_pod_strength_info",
        Kind::Gauge,
        &["namespace", "pod", "device", "strength", "reason"],
        "Always 1. How firmly the pod's quota is enforced, and why no more firmly: a reason of the API, or empty where nothing is stronger.",
    ),
    agent(
        "highwater_pod_strength_below_minimum",
        Kind::Gauge,
        &["namespace", "pod", "device", "reason"],
        "1 for a pod whose quota is enforced less firmly than its rule asks, with the reason. Absent otherwise.",
    ),
    agent(
        "highwater_pod_overshoot_bytes",
        Kind::Gauge,
        POD,
        "Free bytes of the device that the pod could take although they are not owed to it. Absent where there is no pool.",
    ),
    agent(
        "highwater_pod_guard_charged_bytes",
        Kind::Gauge,
        POD,
        "What the guards of the pod have charged. Absent without a guard. `highwater_pod_memory_used_bytes` is what the driver says.",
    ),
    agent(
        "highwater_pod_memory_difference_bytes",
        Kind::Gauge,
        &["namespace", "pod", "device", "part"],
        "What the driver counts beyond what the guard charged, by part: `context` (contexts beyond their estimate), `outside_guard` (processes that have none), `driver` (what the driver took by itself in processes that have one). Signed; the parts add up to the difference.",
    ),
    agent(
        "highwater_guard_processes",
        Kind::Gauge,
        POD,
        "Processes of the pod that have a guard and hold memory of the device.",
    ),
    agent(
        "highwater_guard_refusals_total",
        Kind::Counter,
        &["namespace", "pod", "device", "reason"],
        "Allocations that the guard refused. Over the quota: `OverLimit`, `QuotaBelowContext` (it does not hold a context and 64 MiB), `Managed` (managed memory, which is refused for the pod). Within it: `NoMemory` (the device has none that the pod could have now), `Timeout` (none came in the time that it would wait), `UnknownDevice` (the agent does not know the pod there). `Invalid`: it could not be charged.",
    ),
    agent(
        "highwater_pod_guard_misaccounted_bytes",
        Kind::Gauge,
        POD,
        "How far the total in the page of the pod's guards is from the sum of what they charged, looked at every 10 s. Above 0: a process of the pod wrote there past its guard. Its own account is wrong, nobody else's.",
    ),
    agent(
        "highwater_pool_size_bytes",
        Kind::Gauge,
        &["device"],
        "What the pool of the device is to have: ballast and grants. Absent where no policy asks for a pool.",
    ),
    agent(
        "highwater_pool_ballast_bytes",
        Kind::Gauge,
        &["device"],
        "Memory that the keeper holds, to be granted.",
    ),
    agent(
        "highwater_pool_granted_bytes",
        Kind::Gauge,
        POD,
        "What the pool has given to the pod, used or not.",
    ),
    agent(
        "highwater_pool_short_bytes",
        Kind::Gauge,
        &["device"],
        "What the pool promises and does not have. 0 where it covers everything.",
    ),
    agent(
        "highwater_keeper_up",
        Kind::Gauge,
        &[],
        "1 while the keeper of the node answers, 0 while it does not. Absent where none is installed.",
    ),
    agent(
        "highwater_sample_duration_seconds",
        Kind::Histogram,
        &[],
        "Time that one round over all devices took.",
    ),
    agent("highwater_samples_total", Kind::Counter, &[], "Rounds taken."),
    agent(
        "highwater_samples_dropped_total",
        Kind::Counter,
        &[],
        "Rounds thrown away because the agent did not keep up.",
    ),
    agent(
        "highwater_sample_lateness_seconds",
        Kind::Histogram,
        &[],
        "How much later than planned a round began.",
    ),
    agent(
        "highwater_signals_total",
        Kind::Counter,
        &["outcome"],
        "Pressure files, by whether they could be `written` or `failed`.",
    ),
    agent(
        "highwater_pool_level",
        Kind::Gauge,
        &["device", "mode"],
        "Level of the breaker on what is granted of the pool: 0 Normal, 1 Warning, 2 Critical, 3 Emergency. Absent without such a breaker.",
    ),
    agent(
        "highwater_pod_level",
        Kind::Gauge,
        &["namespace", "pod", "device", "mode"],
        "Level of the breaker on the pod's use of its limit. Absent without such a breaker.",
    ),
    agent(
        "highwater_device_headroom_ratio",
        Kind::Gauge,
        &["device"],
        "What is not in use of what can be used: 1 less `highwater_device_usage_ratio`. Absent while the device is not wholly measured.",
    ),
    agent(
        "highwater_node_headroom_ratio",
        Kind::Gauge,
        &[],
        "Headroom of the device of the node that has most. For routers: send work where it is above 0.4.",
    ),
    agent(
        "highwater_hook_calls_total",
        Kind::Counter,
        &["preset", "result"],
        "Calls of an endpoint of a pod's engine: `done`, or why it came to nothing: `connection`, `timeout`, `redirect`, `status`, `malformed`.",
    ),
    agent(
        "highwater_reclaims_total",
        Kind::Counter,
        &[],
        "How often idle grants were taken back and guards asked to trim the driver's pools.",
    ),
    agent(
        "highwater_acts_total",
        Kind::Counter,
        &["act", "state"],
        "Acts that the operator allowed and the agent carried out (`Unready`, `Park`, `RestartInPlace`), by what they came to: `Refused`, `Begun`, `Done`, `Failed`, `Undone`.",
    ),
    agent("highwater_pods_unready", Kind::Gauge, &[], "Pods whose pressure file says that they are unready."),
    agent(
        "highwater_pod_parked_bytes",
        Kind::Gauge,
        POD,
        "Memory of the pod that is on the host and owed to it on the device. Not part of the ledger's sum. Absent where nothing is parked.",
    ),
    agent(
        "highwater_park_moves_total",
        Kind::Counter,
        &["move", "outcome"],
        "Moves to the host (`park`) and back (`restore`): `done`, `failed`, `refused`, `lost`.",
    ),
    agent(
        "highwater_pod_host_memory_bytes",
        Kind::Gauge,
        &["namespace", "pod"],
        "Host memory of the pod that cannot be dropped. Below the clear mark of its rule it is at most that much. Absent without a rule, or without cgroup v2.",
    ),
    agent(
        "highwater_pod_host_memory_limit_bytes",
        Kind::Gauge,
        &["namespace", "pod"],
        "What that is measured against: the pod's limit, or that of its fullest container, or the node's memory.",
    ),
    agent(
        "highwater_pod_host_memory_pressure_ratio",
        Kind::Gauge,
        &["namespace", "pod"],
        "Memory pressure index of the pod in the last whole window of 10 s, from 0 to 1.",
    ),
    agent(
        "highwater_pod_leak_stage",
        Kind::Gauge,
        LEAK,
        "How far it is suspected that the pod leaks: 0 not, 1 suspect, 2 an act is due. `memory` is `Device` or `Host`. By the strictest mode that watches it; absent without a rule.",
    ),
    agent(
        "highwater_pod_leak_slope_bytes_per_hour",
        Kind::Gauge,
        LEAK,
        "How fast the memory of a suspected pod grows. Absent while nothing is suspected.",
    ),
    agent(
        "highwater_pod_leak_exhaustion_seconds",
        Kind::Gauge,
        LEAK,
        "How long the memory of a suspected pod will likely last, as of when that was last looked at. Absent as well where nobody knows what the pod can come to.",
    ),
    agent(
        "highwater_leak_findings_total",
        Kind::Counter,
        &["stage", "class"],
        "Changes of what is thought of a pod's growth: `Suspect`, `Act` or `Cleared`, and how it grows.",
    ),
    agent(
        "highwater_leak_samples_total",
        Kind::Counter,
        &[],
        "Samples of pods' memory that were looked at for leaks.",
    ),
    agent(
        "highwater_leak_samples_missing_total",
        Kind::Counter,
        &[],
        "Those of them that had no number: nothing is concluded from these.",
    ),
    agent(
        "highwater_framework_scrapes_total",
        Kind::Counter,
        &["result"],
        "Readings of what frameworks in pods say of themselves: `done`, or why there are no numbers (`connection`, `timeout`, `redirect`, `status`, `malformed`, `too_long`, `nothing_known`).",
    ),
    agent(
        "highwater_grant_duration_seconds",
        Kind::Histogram,
        &["outcome"],
        "From the moment a guard's question for more memory was read until it was answered: `granted` or `refused`. The driver's own work on memory that was just released comes on top, in the program.",
    ),
    agent(
        "highwater_plan_age_seconds",
        Kind::Gauge,
        &[],
        "Time since the API server last confirmed the plan.",
    ),
    agent("highwater_api_contact_age_seconds", Kind::Gauge, &[], "Time since the API server last answered."),
    agent(
        "highwater_pod_resources_age_seconds",
        Kind::Gauge,
        &[],
        "Time since the kubelet last said which pod has which device.",
    ),
    agent("highwater_incidents_open", Kind::Gauge, &[], "Incidents of this node without a final decision."),
    operator("highwater_operator_leader", Kind::Gauge, &[], "1 on the replica that leads."),
    operator(
        "highwater_incident_decisions_total",
        Kind::Counter,
        &["state", "reason"],
        "Decisions written on incidents.",
    ),
    operator(
        "highwater_evictions_total",
        Kind::Counter,
        &["outcome"],
        "Eviction requests by what the API server answered.",
    ),
    operator(
        "highwater_budget_tokens",
        Kind::Gauge,
        &["policy"],
        "Acts reserved in the current windows, by policy.",
    ),
    operator(
        "highwater_policy_conditions",
        Kind::Gauge,
        &["policy", "type", "status"],
        "1 for the status that the condition of the policy has.",
    ),
    operator("highwater_plan_writes_total", Kind::Counter, &[], "Node plans written."),
    operator(
        "highwater_plan_compute_seconds",
        Kind::Histogram,
        &[],
        "Time to compute the plans of the fleet.",
    ),
    operator(
        "highwater_reconcile_errors_total",
        Kind::Counter,
        &["controller", "category"],
        "Reconciliations that failed.",
    ),
    operator("highwater_watch_errors_total", Kind::Counter, &["kind"], "Watches that were interrupted."),
    operator("highwater_fleet_halted", Kind::Gauge, &[], "1 while the fleet breaker holds every new act."),
    operator(
        "highwater_leak_workload_tickets",
        Kind::Gauge,
        &[],
        "Workloads whose pods leak alike: one ticket, and none is restarted.",
    ),
    operator(
        "highwater_redirections_total",
        Kind::Counter,
        &["outcome"],
        "Searches for room before a drain: `target`, or `no_target`.",
    ),
    operator(
        "highwater_reaction_seconds",
        Kind::Histogram,
        &[],
        "From the sample that satisfied a hold to the accepted eviction, or to the cordon of a drain.",
    ),
];

/// Where the code names its metrics.
const SOURCES: [(Component, &str); 2] =
    [(Component::Agent, "node-agent/src/metrics.rs"), (Component::Operator, "operator/src/metrics.rs")];

/// The reference page.
pub(crate) fn markdown() -> String {
    let mut page = String::from(
        "<!-- Generated from xtask/src/metrics.rs by `cargo xtask generate`. Do not edit. -->\n\
         # Metrics\n\n\
         A number that the driver does not give is a missing series, never 0. A pod has one series for each device that\n\
         it was given, from admission until it ends. Scrape with `honor_labels: true`: `namespace` and `pod` name the\n\
         measured pod, not the agent.\n",
    );
    for (component, title) in [
        (Component::Agent, "Agent, port 9440, each with the label `node`"),
        (Component::Operator, "Operator, port 9441"),
    ] {
        // Writing to a String cannot fail.
        let _ = write!(page, "\n## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n");
        for metric in ALL.iter().filter(|metric| metric.component == component) {
            let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
            let kind = match metric.kind {
                Kind::Gauge => "gauge",
                Kind::Counter => "counter",
                Kind::Histogram => "histogram",
            };
            let _ =
                writeln!(page, "| `{}` | {kind} | {} | {} |", metric.name, labels.join(", "), metric.meaning);
        }
    }
    page
}

/// One message for each metric that only the table or only the code knows.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for (component, source) in SOURCES {
        let code = fs::read_to_string(root.join(source)).with_context(|| format!("reading {source}"))?;
        let in_code = names(without_tests(&code));
        let in_table: BTreeSet<&str> =
            ALL.iter().filter(|metric| metric.component == component).map(|metric| metric.name).collect();
        for name in in_code.iter().filter(|name| !in_table.contains(*name)) {
            problems.push(format!("{name} of {source} is not in xtask/src/metrics.rs"));
        }
        for name in in_table.iter().filter(|name| !in_code.contains(*name)) {
            problems.push(format!("{name} of xtask/src/metrics.rs is not exported by {source}"));
        }
    }
    Ok(problems)
}

/// One message for each metric name in a query that nothing exports.
pub(crate) fn unknown_names(query: &str) -> Vec<String> {
    let known = |name: &str| {
        ALL.iter().any(|metric| match metric.kind {
            Kind::Histogram => ["_bucket", "_sum", "_count"]
                .iter()
                .any(|suffix| name.strip_suffix(suffix).is_some_and(|base| base == metric.name)),
            Kind::Gauge | Kind::Counter => metric.name == name,
        })
    };
    names(query).into_iter().filter(|name| !known(name)).map(str::to_owned).collect()
}

/// Whether a histogram has this name, without the suffix of one of its series.
pub(crate) fn is_histogram(name: &str) -> bool {
    ALL.iter().any(|metric| metric.kind == Kind::Histogram && metric.name == name)
}

/// Whether it is one of the metrics that pods may serve to the agent.
pub(crate) fn is_read(name: &str) -> bool {
    const READ: [&str; 4] = [
        "highwater_framework_allocated_bytes",
        "highwater_framework_reserved_bytes",
        "highwater_graph_replays_total",
        "highwater_work_total",
    ];
    READ.contains(&name)
}

/// Crates whose names begin like a metric's.
const CRATES: [&str; 5] =
    ["highwater_crds", "highwater_policy", "highwater_gpu", "highwater_guard", "highwater_guard_abi"];

/// Every word of a text that begins like one of our metrics.
fn names(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.strip_prefix("highwater_").is_some_and(|rest| !rest.is_empty()))
        .filter(|word| !CRATES.contains(word))
        .collect()
}

fn without_tests(code: &str) -> &str {
    code.split_once("#[cfg(test)]").map_or(code, |(code, _)| code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_conventions_of_prometheus() {
        for metric in ALL {
            let counter = metric.kind == Kind::Counter;
            assert_eq!(metric.name.ends_with("_total"), counter, "{}", metric.name);
            assert!(
                !metric.labels.contains(&"node"),
                "{}: node is on every series of the agent",
                metric.name
            );
        }
        let unique: BTreeSet<&str> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(unique.len(), ALL.len());
    }

    #[test]
    fn queries_may_name_only_what_is_exported() {
        assert_eq!(unknown_names("rate(highwater_sample_duration_seconds_bucket[5m])"), Vec::<String>::new());
        assert_eq!(unknown_names("highwater_sample_duration_seconds"), ["highwater_sample_duration_seconds"]);
        assert_eq!(unknown_names("sum(highwater_no_such_metric)"), ["highwater_no_such_metric"]);
    }
}
