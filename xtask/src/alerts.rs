//! The alert rules, each with its runbook.

use std::{fs, path::Path, process::Command};

use anyhow::Result;
use serde_json::{Value, json};

use crate::{artefacts::canonical, crds, metrics};

/// Where the chart keeps the rules.
pub(crate) const PATH: &str = "charts/highwater/files/alerts.yaml";

/// Unit tests of the rules, for promtool.
const TESTS: &str = "xtask/tests/alerts.yaml";

/// The chart replaces this by its value `prometheusRule.runbookBaseUrl`.
const RUNBOOKS: &str = "https://highwater.dev/runbooks";

/// One alert.
#[derive(Debug)]
struct Alert {
    name: &'static str,
    expr: &'static str,
    lasts: &'static str,
    severity: &'static str,
    summary: &'static str,
    description: &'static str,
}

const ALERTS: &[Alert] = &[
    Alert {
        name: "HighwaterAgentDown",
        expr: r#"up{job="highwater-agent"} == 0"#,
        lasts: "3m",
        severity: "warning",
        summary: "The agent on {{ $labels.instance }} does not answer.",
        description: "GPU memory on this node is not measured and no breaker works there.",
    },
    Alert {
        name: "HighwaterDeviceDown",
        expr: "highwater_device_up == 0",
        lasts: "1m",
        severity: "warning",
        summary: "Device {{ $labels.device }} of {{ $labels.node }} is not measured.",
        description: "The driver does not answer for it, or does not say how much memory is used.",
    },
    Alert {
        name: "HighwaterDeviceEmergency",
        expr: r#"highwater_device_level{mode="Enforce"} == 3"#,
        lasts: "1m",
        severity: "critical",
        summary: "Device {{ $labels.device }} of {{ $labels.node }} is at Emergency.",
        description: "An allocation of any pod on it may fail. Highwater has not brought it down within a minute.",
    },
    Alert {
        name: "HighwaterDeviceCritical",
        expr: r#"highwater_device_level{mode="Enforce"} == 2"#,
        lasts: "10m",
        severity: "warning",
        summary: "Device {{ $labels.device }} of {{ $labels.node }} has been at Critical for 10 minutes.",
        description: "The signals and acts of the policy have not brought it down.",
    },
    Alert {
        name: "HighwaterPodOverLimit",
        expr: "highwater_pod_memory_used_bytes > highwater_pod_memory_limit_bytes",
        lasts: "10m",
        severity: "warning",
        summary: "Pod {{ $labels.namespace }}/{{ $labels.pod }} is over its limit on device {{ $labels.device }} of {{ $labels.node }}.",
        description: "It holds {{ $value | humanize1024 }}B. Its incident says why nothing was done.",
    },
    Alert {
        name: "HighwaterLeakActDue",
        expr: "highwater_pod_leak_stage == 2",
        lasts: "5m",
        severity: "warning",
        summary: "Pod {{ $labels.namespace }}/{{ $labels.pod }} leaks on device {{ $labels.device }} of {{ $labels.node }} and was not restarted.",
        description: "Its memory ({{ $labels.memory }}) may run out within the policy's horizon. Its incident says why nothing was done.",
    },
    Alert {
        name: "HighwaterKeeperDown",
        expr: "highwater_keeper_up == 0",
        lasts: "2m",
        severity: "warning",
        summary: "The keeper of {{ $labels.node }} does not answer.",
        description: "If it has ended, the pools of the node are free memory, for anybody to take. New pods with a guard wait there.",
    },
    Alert {
        name: "HighwaterPoolShort",
        expr: "highwater_pool_short_bytes > 0",
        lasts: "10m",
        severity: "warning",
        summary: "The pool of device {{ $labels.device }} of {{ $labels.node }} lacks {{ $value | humanize1024 }}B of what it promises.",
        description: "Others use the memory. Guarantees may not be had when they are wanted.",
    },
    Alert {
        name: "HighwaterStrengthBelowMinimum",
        expr: "highwater_pod_strength_below_minimum == 1",
        lasts: "2m",
        severity: "warning",
        summary: "The quota of pod {{ $labels.namespace }}/{{ $labels.pod }} on device {{ $labels.device }} of {{ $labels.node }} holds less firmly than its rule asks.",
        description: "Reason: {{ $labels.reason }}. Nothing is done to the pod for that.",
    },
    Alert {
        name: "HighwaterStrengthLost",
        // Pods that had it within the hour, are still there, and have it no more.
        expr: r#"count by (node) (max by (node, device, namespace, pod) (max_over_time(highwater_pod_strength_info{strength=~"Guard|Kernel"}[1h])) and on (node, device, namespace, pod) highwater_pod_strength_info{strength!~"Guard|Kernel"})"#,
        lasts: "2m",
        severity: "warning",
        summary: "{{ $value }} pods of {{ $labels.node }} are no longer held to their quota at the call.",
        description: "Guard or driver refused what was over their quota before, and does not any more: see what changed on the node.",
    },
    Alert {
        name: "HighwaterOutsideGuard",
        expr: r#"highwater_pod_memory_difference_bytes{part="outside_guard"} > 1073741824"#,
        lasts: "5m",
        severity: "warning",
        summary: "Pod {{ $labels.namespace }}/{{ $labels.pod }} holds {{ $value | humanize1024 }}B on device {{ $labels.device }} of {{ $labels.node }} outside of its guard.",
        description: "A process of it goes past the guard: linked statically, from another root file system, or on purpose. It is charged and can take no more than what is within its reach.",
    },
    Alert {
        name: "HighwaterZombieMemory",
        expr: r#"highwater_device_memory_bytes{bucket="zombie"} > 268435456"#,
        lasts: "5m",
        severity: "warning",
        summary: "{{ $value | humanize1024 }}B on device {{ $labels.device }} of {{ $labels.node }} belong to processes that are gone.",
        description: "Only a reset of the device or of the node gives them back. No pod is to blame.",
    },
    Alert {
        name: "HighwaterUnexplainedMemory",
        expr: "highwater_device_unattributed_bytes > 1073741824",
        lasts: "10m",
        severity: "warning",
        summary: "{{ $value | humanize1024 }}B on device {{ $labels.device }} of {{ $labels.node }} are held by no listed process.",
        description: "Managed memory, or memory made without a CUDA context. Highwater does not act on it.",
    },
    Alert {
        name: "HighwaterAgentCutOff",
        expr: "highwater_api_contact_age_seconds > 120",
        lasts: "1m",
        severity: "warning",
        summary: "The agent on {{ $labels.node }} has had no answer from the API server for {{ $value | humanizeDuration }}.",
        description: "It goes on by its last plan until the plan's life is over; after that it only measures.",
    },
    Alert {
        name: "HighwaterKubeletSilent",
        expr: "highwater_pod_resources_age_seconds > 300",
        lasts: "5m",
        severity: "warning",
        summary: "The kubelet of {{ $labels.node }} has not said for {{ $value | humanizeDuration }} which pod has which device.",
        description: "Pods are still known by their processes. A pod that has a device and no process on it yet is not shown.",
    },
    Alert {
        name: "HighwaterSamplingSlow",
        expr: "histogram_quantile(0.99, sum by (node, le) (rate(highwater_sample_duration_seconds_bucket[5m]))) > 0.05",
        lasts: "15m",
        severity: "warning",
        summary: "Measuring takes {{ $value | humanizeDuration }} (p99) on {{ $labels.node }}.",
        description: "Breakers see the device late. The driver may be busy or a device sick.",
    },
    Alert {
        name: "HighwaterNoLeader",
        expr: "max(highwater_operator_leader) == 0 or absent(highwater_operator_leader)",
        lasts: "2m",
        severity: "critical",
        summary: "No replica of the operator leads.",
        description: "Plans are not updated and no incident is decided.",
    },
    Alert {
        name: "HighwaterFleetHalted",
        expr: "max(highwater_fleet_halted) == 1",
        lasts: "0m",
        severity: "critical",
        summary: "The fleet breaker holds every new act.",
        description: "More devices ask for a restart at once than haltAtCondemnedPercent allows. That is most likely a fault of measurement.",
    },
    Alert {
        name: "HighwaterWorkloadLeaks",
        expr: "max(highwater_leak_workload_tickets) > 0",
        lasts: "0m",
        severity: "warning",
        summary: "Pods of {{ $value }} workloads leak alike.",
        description: "Their program leaks, so none of them is restarted. The incidents with the reason WorkloadTicket name the pods, and an Event the workload; a new template of it ends the ticket.",
    },
    Alert {
        name: "HighwaterTicketNeeded",
        // A counter that appears with its first increase has no increase to Prometheus.
        expr: r#"sum(increase(highwater_incident_decisions_total{reason="TicketNeeded"}[15m])) > 0 or sum(highwater_incident_decisions_total{reason="TicketNeeded"} unless highwater_incident_decisions_total{reason="TicketNeeded"} offset 15m) > 0"#,
        lasts: "0m",
        severity: "warning",
        summary: "Restarting a workload does not help.",
        description: "It is not restarted a third time. The incident with the reason TicketNeeded says why, and an Event is on the workload.",
    },
    Alert {
        name: "HighwaterActFailed",
        // A counter that appears with its first increase has no increase to Prometheus.
        expr: r#"sum by (reason) (increase(highwater_incident_decisions_total{state="Failed"}[15m])) > 0 or sum by (reason) (highwater_incident_decisions_total{state="Failed"} unless highwater_incident_decisions_total{state="Failed"} offset 15m) > 0"#,
        lasts: "0m",
        severity: "warning",
        summary: "An act failed: {{ $labels.reason }}.",
        description: "An eviction was refused, or the memory did not come back. See the incident.",
    },
    Alert {
        name: "HighwaterBudgetExhausted",
        expr: r#"sum(increase(highwater_incident_decisions_total{state="Proposed", reason="BudgetExhausted"}[15m])) > 0 or sum(highwater_incident_decisions_total{state="Proposed", reason="BudgetExhausted"} unless highwater_incident_decisions_total{state="Proposed", reason="BudgetExhausted"} offset 15m) > 0"#,
        lasts: "0m",
        severity: "warning",
        summary: "Incidents wait because a budget is spent.",
        description: "Restarts do not cure the cause, or the budget is too small.",
    },
    Alert {
        name: "HighwaterPolicyNotAccepted",
        expr: r#"max by (policy) (highwater_policy_conditions{type="Accepted", status="False"}) == 1"#,
        lasts: "5m",
        severity: "warning",
        summary: "Policy {{ $labels.policy }} is not accepted.",
        description: "It has no effect. Its condition Accepted says what to change.",
    },
    Alert {
        name: "HighwaterReconcileErrors",
        expr: "sum by (controller, category) (rate(highwater_reconcile_errors_total[10m])) > 0",
        lasts: "15m",
        severity: "warning",
        summary: "Controller {{ $labels.controller }} keeps failing: {{ $labels.category }}.",
        description: "Plans, decisions or taints may be out of date.",
    },
];

/// The rules as a Prometheus rule file.
pub(crate) fn yaml() -> String {
    let rules: Vec<Value> = ALERTS
        .iter()
        .map(|alert| {
            json!({
                "alert": alert.name,
                "expr": alert.expr,
                "for": alert.lasts,
                "labels": {"severity": alert.severity},
                "annotations": {
                    "summary": alert.summary,
                    "description": alert.description,
                    "runbook_url": format!("{RUNBOOKS}/{}", alert.name),
                },
            })
        })
        .collect();
    let file = canonical(json!({"groups": [{"name": "highwater", "rules": rules}]}));
    format!(
        "# Generated from xtask/src/alerts.rs by `cargo xtask generate`. Do not edit.\n{}",
        crds::yaml(&file)
    )
}

/// One message for each alert without a runbook, each runbook without an alert, each unknown
/// metric, and what promtool has to say.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for alert in ALERTS {
        let runbook = format!("docs/runbooks/{}.md", alert.name);
        if !root.join(&runbook).is_file() {
            problems.push(format!("{runbook} is missing"));
        }
        for name in metrics::unknown_names(alert.expr) {
            problems.push(format!("{} asks for {name}, which nothing exports", alert.name));
        }
    }
    for entry in fs::read_dir(root.join("docs/runbooks")).into_iter().flatten() {
        let file = entry?.file_name().to_string_lossy().into_owned();
        let name = file.trim_end_matches(".md");
        if name != "README" && !ALERTS.iter().any(|alert| alert.name == name) {
            problems.push(format!("docs/runbooks/{file} belongs to no alert"));
        }
    }
    for arguments in [["check", "rules", PATH], ["test", "rules", TESTS]] {
        match Command::new("promtool").args(arguments).current_dir(root).output() {
            Err(_) => println!("skipped promtool {} rules: promtool is not installed", arguments[0]),
            Ok(output) if output.status.success() => {}
            Ok(output) => problems.push(format!(
                "promtool {}:\n{}{}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr),
            )),
        }
    }
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alerts_ask_only_for_exported_metrics() {
        for alert in ALERTS {
            assert_eq!(metrics::unknown_names(alert.expr), Vec::<String>::new(), "{}", alert.name);
        }
    }

    #[test]
    fn the_rule_file_is_yaml() {
        let file: Value = serde_saphyr::from_str(&yaml()).unwrap();
        assert_eq!(file["groups"][0]["rules"].as_array().map(Vec::len), Some(ALERTS.len()));
    }
}
