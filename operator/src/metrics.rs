//! Metrics, in a registry of their own.

use prometheus::{
    GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

#[derive(Clone)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) leader: IntGauge,
    pub(crate) decisions: IntCounterVec,
    pub(crate) evictions: IntCounterVec,
    pub(crate) budget_tokens: GaugeVec,
    pub(crate) policy_conditions: IntGaugeVec,
    pub(crate) plan_writes: IntCounter,
    pub(crate) plan_compute: Histogram,
    pub(crate) reconcile_errors: IntCounterVec,
    pub(crate) watch_errors: IntCounterVec,
    pub(crate) fleet_halted: IntGauge,
    pub(crate) leak_workload_tickets: IntGauge,
    pub(crate) redirections: IntCounterVec,
    pub(crate) reaction: Histogram,
}

impl Metrics {
    pub(crate) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let r = &registry;
        let metrics = Self {
            leader: register(
                r,
                IntGauge::new("highwater_operator_leader", "1 on the replica that leads, else 0."),
            )?,
            decisions: register(
                r,
                counters(
                    "highwater_incident_decisions_total",
                    "Decisions about incidents that were recorded.",
                    &["state", "reason"],
                ),
            )?,
            evictions: register(
                r,
                counters(
                    "highwater_evictions_total",
                    "Eviction requests by what came of them.",
                    &["outcome"],
                ),
            )?,
            budget_tokens: register(
                r,
                GaugeVec::new(
                    Opts::new(
                        "highwater_budget_tokens",
                        "Remediation tokens that are in the ledger, by policy.",
                    ),
                    &["policy"],
                ),
            )?,
            policy_conditions: register(
                r,
                IntGaugeVec::new(
                    Opts::new(
                        "highwater_policy_conditions",
                        "1 for the status that a condition of a policy has.",
                    ),
                    &["policy", "type", "status"],
                ),
            )?,
            plan_writes: register(
                r,
                IntCounter::new("highwater_plan_writes_total", "Node plans that were written."),
            )?,
            plan_compute: register(
                r,
                histogram(
                    "highwater_plan_compute_seconds",
                    "Time to compute the plans of the whole fleet.",
                    vec![0.000_1, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0],
                ),
            )?,
            reconcile_errors: register(
                r,
                counters(
                    "highwater_reconcile_errors_total",
                    "Reconciliations that failed and are tried again.",
                    &["controller", "category"],
                ),
            )?,
            watch_errors: register(
                r,
                counters("highwater_watch_errors_total", "Interruptions of watches.", &["kind"]),
            )?,
            fleet_halted: register(
                r,
                IntGauge::new(
                    "highwater_fleet_halted",
                    "1 while so many devices or nodes are to be acted on that nothing is done.",
                ),
            )?,
            leak_workload_tickets: register(
                r,
                IntGauge::new(
                    "highwater_leak_workload_tickets",
                    "Workloads whose pods leak alike, so that they are one ticket and none is restarted.",
                ),
            )?,
            redirections: register(
                r,
                counters(
                    "highwater_redirections_total",
                    "Searches for room before a drain by what came of them.",
                    &["outcome"],
                ),
            )?,
            reaction: register(
                r,
                histogram(
                    "highwater_reaction_seconds",
                    "Time from the sample that satisfied a hold to the accepted eviction, or to the cordon.",
                    vec![0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0],
                ),
            )?,
            registry,
        };
        Ok(metrics)
    }

    /// Everything, in the text format.
    pub(crate) fn text(&self) -> prometheus::Result<String> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

fn register<C: prometheus::core::Collector + Clone + 'static>(
    registry: &Registry,
    collector: prometheus::Result<C>,
) -> prometheus::Result<C> {
    let collector = collector?;
    registry.register(Box::new(collector.clone()))?;
    Ok(collector)
}

fn counters(name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
    IntCounterVec::new(Opts::new(name, help), labels)
}

fn histogram(name: &str, help: &str, buckets: Vec<f64>) -> prometheus::Result<Histogram> {
    Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_exposed_with_help() {
        let metrics = Metrics::new().unwrap();
        metrics.evictions.with_label_values(&["accepted"]).inc();
        let text = metrics.text().unwrap();
        assert!(text.contains("# HELP highwater_evictions_total"));
        assert!(text.contains("highwater_evictions_total{outcome=\"accepted\"} 1"));
        assert!(text.contains("highwater_operator_leader 0"));
    }
}
