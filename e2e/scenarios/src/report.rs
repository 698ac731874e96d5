//! What is told when a scenario fails: short, so that it can be read, with all the rest in a file.

use std::fmt::Write as _;

use highwater_crds::{GpuMemoryIncident, GpuMemoryNode, names};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt as _, api::ListParams};

use crate::{SYSTEM, Scenario};

/// Lines of one kind that are shown.
const MOST_LINES: usize = 12;
/// Incidents that are shown, the newest.
const MOST_INCIDENTS: usize = 6;
/// Nodes that are shown: a fleet has many.
const MOST_NODES: usize = 4;
/// Characters of one line that are shown.
const WIDTH: usize = 260;

/// A text in one line, cut where it is very long.
pub(crate) fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    cut(&lines.collect::<Vec<_>>().join(" | "), 8 * WIDTH)
}

fn cut(text: &str, width: usize) -> String {
    let mut characters = text.chars();
    let mut short: String = characters.by_ref().take(width).collect();
    if characters.next().is_some() {
        short.push_str(" ...");
    }
    short
}

/// The last lines of an answer, each cut.
fn tail(text: &str, most: usize) -> String {
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let skipped = lines.len().saturating_sub(most);
    let mut short = if skipped > 0 { format!("  ({skipped} lines before these)\n") } else { String::new() };
    for line in lines.iter().skip(skipped) {
        let _ = writeln!(short, "  {}", cut(line, WIDTH));
    }
    short
}

impl Scenario {
    /// What helps most to see why something did not happen, in some dozens of lines.
    pub async fn describe(&self) -> String {
        let mut text = self.describe_nodes().await.unwrap_or_else(|error| format!("  nodes: {error:#}\n"));
        text += &self.describe_incidents().await.unwrap_or_else(|error| format!("  incidents: {error:#}\n"));
        let namespace = self.namespace.as_str();
        let columns =
            "custom-columns=POLICY:.metadata.name,MODE:.spec.mode,CONDITIONS:.status.conditions[*].reason";
        let questions: [&[&str]; 4] = [
            &["get", "gmp", "-o", columns],
            &["get", "pods", "-n", namespace, "-o", "wide", "--no-headers"],
            &["get", "pods", "-n", SYSTEM, "-o", "wide", "--no-headers"],
            &["get", "events", "-n", namespace, "--sort-by=.lastTimestamp", "--no-headers"],
        ];
        for question in questions {
            let answer = self.cluster.kubectl(question.iter().copied()).await;
            let answer = answer.unwrap_or_else(|error| format!("{error:#}"));
            let _ = write!(text, "$ kubectl {}\n{}", question.join(" "), tail(&answer, MOST_LINES));
        }
        for component in ["agent", "keeper", "operator"] {
            let answer = self.logs_of(component, MOST_LINES).await;
            let _ = write!(text, "$ logs of {component}\n{}", tail(&answer, MOST_LINES));
        }
        text
    }

    async fn logs_of(&self, component: &str, lines: usize) -> String {
        let selector = format!("app.kubernetes.io/component={component}");
        let tail = format!("--tail={lines}");
        let arguments = ["logs", "-n", SYSTEM, "-l", &selector, &tail, "--prefix"];
        self.cluster.kubectl(arguments).await.unwrap_or_else(|error| format!("{error:#}"))
    }

    async fn describe_nodes(&self) -> anyhow::Result<String> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let plans: Api<GpuMemoryNode> = Api::all(self.client.clone());
        let mut text = String::new();
        let list = nodes.list(&ListParams::default()).await?;
        for node in list.items.iter().take(MOST_NODES) {
            let spec = node.spec.clone().unwrap_or_default();
            let taints: Vec<_> = spec.taints.iter().flatten().map(|t| t.key.as_str()).collect();
            let own: Vec<_> = node
                .annotations()
                .iter()
                .filter(|(key, _)| key.starts_with(names::GROUP))
                .map(|(key, value)| format!("{key}={value}"))
                .collect();
            let cordoned = if spec.unschedulable == Some(true) { " CORDONED" } else { "" };
            let _ =
                writeln!(text, "  node {}{cordoned} taints={taints:?} {}", node.name_any(), own.join(" "));
            let Some(status) = plans.get_opt(&node.name_any()).await?.and_then(|plan| plan.status) else {
                continue;
            };
            let conditions: Vec<_> =
                status.conditions.iter().map(|c| format!("{}={}/{}", c.type_, c.status, c.reason)).collect();
            let devices: Vec<_> = status
                .devices
                .iter()
                .map(|d| {
                    format!(
                        "{:?} headroom {:?} freeze {:?} parked {}",
                        d.level, d.headroom, d.freeze, d.parked
                    )
                })
                .collect();
            let _ = writeln!(
                text,
                "    generation {:?}, {}; devices: {}",
                status.observed_generation,
                conditions.join(" "),
                cut(&devices.join(", "), WIDTH)
            );
        }
        Ok(text)
    }

    async fn describe_incidents(&self) -> anyhow::Result<String> {
        let incidents: Api<GpuMemoryIncident> = Api::all(self.client.clone());
        let mut list = incidents.list(&ListParams::default()).await?.items;
        list.retain(|incident| {
            let namespace = incident.namespace();
            namespace.as_deref() == Some(&self.namespace) || namespace.as_deref() == Some(SYSTEM)
        });
        list.sort_by_key(|incident| incident.spec.evidence.at.0);
        let mut text = String::new();
        for incident in list.iter().rev().take(MOST_INCIDENTS).rev() {
            let _ = writeln!(text, "  incident {}", cut(&in_short(incident), 4 * WIDTH));
        }
        Ok(text)
    }

    /// Keeps everything that might help beside the logs of the cluster's components.
    pub(crate) async fn keep_details(&self) {
        let mut text = String::new();
        let namespace = self.namespace.as_str();
        let questions: [&[&str]; 6] = [
            &["get", "gmp,gmn", "-o", "yaml", "--show-managed-fields=false"],
            &["get", "gmi", "-A", "-o", "yaml"],
            &["get", "pods", "-A", "-o", "wide"],
            &["get", "pods", "-n", namespace, "-o", "yaml"],
            &["get", "events", "-A", "--sort-by=.lastTimestamp"],
            &["get", "configmap", "-n", SYSTEM, names::BUDGET_CONFIG_MAP, "-o", "yaml"],
        ];
        for question in questions {
            let answer = self.cluster.kubectl(question.iter().copied()).await;
            let answer = answer.unwrap_or_else(|error| format!("{error:#}"));
            let _ = writeln!(text, "$ kubectl {}\n{answer}", question.join(" "));
        }
        for component in ["agent", "keeper", "operator"] {
            let _ = writeln!(text, "$ logs of {component}\n{}", self.logs_of(component, 400).await);
        }
        let path = self.cluster.paths.log(&format!("scenario-{namespace}"));
        match std::fs::write(&path, text) {
            Ok(()) => eprintln!("more of it in {}", path.display()),
            Err(error) => eprintln!("no more of it in {}: {error}", path.display()),
        }
    }
}

fn in_short(incident: &GpuMemoryIncident) -> String {
    let spec = &incident.spec;
    let whom = spec.subject.as_ref().map_or("nobody", |subject| subject.name.as_str());
    let status = incident.status.clone().unwrap_or_default();
    let observed = status.observation.map_or_else(String::new, |observation| {
        let act =
            observation.act.map_or_else(String::new, |act| format!(" act {:?}: {}", act.state, act.message));
        format!(" observed {:?} bytes {:?}{act};", observation.state, observation.bytes)
    });
    let decided = status.decision.map_or_else(
        || " no decision".to_owned(),
        |d| format!(" {:?}/{}: {} budgets {:?}", d.state, d.reason, d.message, d.budgets),
    );
    format!(
        "{}: {:?} {:?} on {whom} by {} on {};{observed}{decided}; because {}; alternatives {:?}",
        incident.name_any(),
        spec.kind,
        spec.proposed.action,
        spec.policy,
        spec.node,
        spec.evidence.explanation,
        spec.proposed.alternatives,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_many_lines_becomes_one() {
        assert_eq!(one_line("waited for a\n\n  and b\n"), "waited for a | and b");
        let long = one_line(&"x".repeat(10_000));
        assert!(long.len() < 8 * WIDTH + 10 && long.ends_with(" ..."), "{}", long.len());
    }

    #[test]
    fn of_a_long_answer_the_end_is_shown() {
        let text = (0..20).map(|line| format!("line {line}")).collect::<Vec<_>>().join("\n");
        let short = tail(&text, 2);
        assert_eq!(short, "  (18 lines before these)\n  line 18\n  line 19\n");
        assert_eq!(tail("one\n\n", 2), "  one\n");
    }
}
