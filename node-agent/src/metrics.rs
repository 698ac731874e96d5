//! Metrics, made from the agent's state when they are asked for.
//!
//! A number that is not known has no series. Series of pods exist for as long as the pod has a
//! device.

use std::time::Duration;

use highwater_crds::{ActState, ActionType, BreakerScope, LeakMemory, LeakStage, Level, Mode};
use highwater_gpu::ErrorClass;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

use crate::{
    account::Device,
    act::{carry::Carries, hooks::Hooks, parks::Parks},
    decide::{Rules, Tenant},
    guard::Refusal,
    hosts::Hosts,
    leaks::Leaks,
    pools::Pools,
    wards::{Keeper, Wards},
};

const DEVICE: &[&str] = &["device"];
const POD: &[&str] = &["namespace", "pod", "device"];
const LEAK: &[&str] = &["namespace", "pod", "device", "memory"];

/// Every metric of the agent.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    device_info: IntGaugeVec,
    device_up: IntGaugeVec,
    device_capacity: IntGaugeVec,
    device_memory: IntGaugeVec,
    device_usage: GaugeVec,
    device_level: IntGaugeVec,
    device_unusual: IntGaugeVec,
    device_errors: IntCounterVec,
    device_torn: IntCounterVec,
    pod_used: IntGaugeVec,
    pod_limit: IntGaugeVec,
    pod_due: IntGaugeVec,
    pod_strength: IntGaugeVec,
    pod_below: IntGaugeVec,
    pod_granted: IntGaugeVec,
    pod_overshoot: IntGaugeVec,
    pod_charged: IntGaugeVec,
    pod_difference: IntGaugeVec,
    pod_guards: IntGaugeVec,
    pod_refusals: IntCounterVec,
    pod_misaccounted: IntGaugeVec,
    pool_size: IntGaugeVec,
    pool_ballast: IntGaugeVec,
    pool_short: IntGaugeVec,
    keeper_up: IntGaugeVec,
    pod_host_oom: IntCounterVec,
    plan_age: GaugeVec,
    api_age: GaugeVec,
    pod_resources_age: GaugeVec,
    incidents: IntGaugeVec,
    signals: IntCounterVec,
    pool_level: IntGaugeVec,
    pod_level: IntGaugeVec,
    device_headroom: GaugeVec,
    node_headroom: GaugeVec,
    pod_parked: IntGaugeVec,
    park_moves: IntCounterVec,
    hooks: IntCounterVec,
    reclaims: IntCounterVec,
    acts: IntCounterVec,
    unready: IntGaugeVec,
    host_used: IntGaugeVec,
    host_limit: IntGaugeVec,
    host_pressure: GaugeVec,
    leak_stage: IntGaugeVec,
    leak_slope: IntGaugeVec,
    leak_exhaustion: IntGaugeVec,
    leak_findings: IntCounterVec,
    leak_samples: IntCounterVec,
    leak_missing: IntCounterVec,
    scrapes: IntCounterVec,
    /// Rounds of samples.
    pub(crate) samples: IntCounter,
    /// Rounds that were thrown away, because the agent did not keep up.
    pub(crate) dropped: IntCounter,
    duration: Histogram,
    lateness: Histogram,
}

/// The devices, and what is known of their pods.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown<'a> {
    /// The devices with what holds there.
    pub(crate) devices: &'a [(Device, Rules)],
    /// The guarded pods.
    pub(crate) wards: &'a Wards,
    /// The pools.
    pub(crate) pools: &'a Pools,
    /// What is parked.
    pub(crate) parks: &'a Parks,
    /// The hooks.
    pub(crate) hooks: &'a Hooks,
    /// The acts that the operator allowed.
    pub(crate) carries: &'a Carries,
    /// The host memory of pods.
    pub(crate) hosts: &'a Hosts,
    /// What is thought of pods' growth.
    pub(crate) leaks: &'a Leaks,
    /// Whether the plan binds.
    pub(crate) binds: bool,
}

/// What there is to show besides devices and pods.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gauges {
    /// Since the API server last confirmed the plan.
    pub(crate) plan_age: Option<Duration>,
    /// Since the API server was last heard.
    pub(crate) api_contact_age: Option<Duration>,
    /// Since the kubelet last said which pod has which device.
    pub(crate) pod_resources_age: Option<Duration>,
    /// Incidents of this node that are not closed.
    pub(crate) incidents_open: usize,
    /// Pressure files written.
    pub(crate) signals_written: u64,
    /// Pressure files that could not be written.
    pub(crate) signals_failed: u64,
    /// Pods that are unready by their pressure file.
    pub(crate) unready: usize,
    /// How often idle memory was taken back.
    pub(crate) reclaims: u64,
}

/// How long a guard's question for more memory took, from when it was read until it was answered.
///
/// # Errors
/// Fails where the name is not one of a metric.
pub(crate) fn grant_durations(node: &str) -> prometheus::Result<HistogramVec> {
    // 3 ms is the goal for 1 GiB.
    const BUCKETS: [f64; 16] = [
        0.0001, 0.000_25, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0,
        10.0,
    ];
    let opts = Opts::new(
        "highwater_grant_duration_seconds",
        "Time from a guard's question for more memory until it was answered.",
    );
    HistogramVec::new(
        HistogramOpts::from(opts.const_label("node", node)).buckets(BUCKETS.to_vec()),
        &["outcome"],
    )
}

impl Metrics {
    /// Metrics with the node's name as a constant label.
    ///
    /// # Errors
    /// Fails when two metrics have one name.
    #[allow(clippy::too_many_lines)] // the list of metrics
    pub(crate) fn new(node: &str, grants: HistogramVec) -> prometheus::Result<Self> {
        let registry = Registry::new();
        registry.register(Box::new(grants))?;
        let make = Maker { registry: &registry, node };
        let metrics = Self {
            device_info: make.gauges(
                "highwater_device_info",
                "What a device is: always 1.",
                &["device", "uuid", "product", "partition", "driver"],
            )?,
            device_up: make.gauges(
                "highwater_device_up",
                "Whether the device is wholly measured: 1, else 0.",
                DEVICE,
            )?,
            device_capacity: make.gauges("highwater_device_capacity_bytes", "Memory of the device.", DEVICE)?,
            device_memory: make.gauges(
                "highwater_device_memory_bytes",
                "Memory of the device by who has it; the buckets add up to the capacity. What no process explains is signed.",
                &["device", "bucket"],
            )?,
            device_usage: make.float_gauges(
                "highwater_device_usage_ratio",
                "Memory in use of what can be used: the ratio that breakers look at.",
                DEVICE,
            )?,
            device_level: make.gauges(
                "highwater_device_level",
                "Level of the device's breaker: 0 Normal, 1 Warning, 2 Critical, 3 Emergency.",
                &["device", "mode"],
            )?,
            device_unusual: make.gauges(
                "highwater_device_unattributed_bytes",
                "Memory that no process explains, beyond what is normal.",
                DEVICE,
            )?,
            device_errors: make.counters(
                "highwater_device_errors_total",
                "Calls about the device that the driver refused.",
                &["device", "error"],
            )?,
            device_torn: make.counters(
                "highwater_device_torn_samples_total",
                "Samples whose numbers may not fit together, however often they were taken again.",
                DEVICE,
            )?,
            pod_used: make.gauges(
                "highwater_pod_memory_used_bytes",
                "Memory that a pod holds on a device, contexts included.",
                POD,
            )?,
            pod_limit: make.gauges(
                "highwater_pod_memory_limit_bytes",
                "Memory that a pod may have on a device.",
                POD,
            )?,
            pod_due: make.gauges(
                "highwater_pod_memory_due_bytes",
                "Memory that a pod is owed on a device: its guarantee, else its limit.",
                POD,
            )?,
            pod_strength: make.gauges(
                "highwater_pod_strength_info",
                "How firmly a pod's quota is enforced on a device, and why no more firmly: always 1.",
                &["namespace", "pod", "device", "strength", "reason"],
            )?,
            pod_below: make.gauges(
                "highwater_pod_strength_below_minimum",
                "A pod's quota holds less firmly than its rule asks for, and why: always 1.",
                &["namespace", "pod", "device", "reason"],
            )?,
            pod_granted: make.gauges(
                "highwater_pool_granted_bytes",
                "Memory of the device's pool that a pod may have now.",
                POD,
            )?,
            pod_overshoot: make.gauges(
                "highwater_pod_overshoot_bytes",
                "Memory that a pod could take beyond its due: free on the device, and not owed to it.",
                POD,
            )?,
            pod_charged: make.gauges(
                "highwater_pod_guard_charged_bytes",
                "Memory that a pod's guards have charged, as they say.",
                POD,
            )?,
            pod_difference: make.gauges(
                "highwater_pod_memory_difference_bytes",
                "What the driver says that a guarded pod holds, less what its guards have charged, by what makes it.",
                &["namespace", "pod", "device", "part"],
            )?,
            pod_guards: make.gauges(
                "highwater_guard_processes",
                "Processes of a pod that charge a device through a guard.",
                POD,
            )?,
            pod_refusals: make.counters(
                "highwater_guard_refusals_total",
                "Allocations that a pod's guards refused, as far as they said so, by why.",
                &["namespace", "pod", "device", "reason"],
            )?,
            pod_misaccounted: make.gauges(
                "highwater_pod_guard_misaccounted_bytes",
                "How far the total in the page of a pod's guards is from the sum of what they charged there.",
                POD,
            )?,
            pool_size: make.gauges(
                "highwater_pool_size_bytes",
                "Memory that the pool of a device is: held back and granted.",
                DEVICE,
            )?,
            pool_ballast: make.gauges(
                "highwater_pool_ballast_bytes",
                "Memory of a device that the keeper holds back.",
                DEVICE,
            )?,
            pool_short: make.gauges(
                "highwater_pool_short_bytes",
                "Memory that is guaranteed on a device, not granted, and not held back either.",
                DEVICE,
            )?,
            keeper_up: make.gauges("highwater_keeper_up", "Whether the keeper answers: 1, else 0.", &[])?,
            pod_host_oom: make.counters(
                "highwater_pod_host_oom_kills_total",
                "Containers that the host's kernel killed for lack of host memory, which is not GPU memory.",
                &["namespace", "pod"],
            )?,
            plan_age: make.float_gauges(
                "highwater_plan_age_seconds",
                "Time since the API server last confirmed the plan.",
                &[],
            )?,
            api_age: make.float_gauges(
                "highwater_api_contact_age_seconds",
                "Time since the API server was last heard.",
                &[],
            )?,
            pod_resources_age: make.float_gauges(
                "highwater_pod_resources_age_seconds",
                "Time since the kubelet last said which pod has which device.",
                &[],
            )?,
            incidents: make.gauges("highwater_incidents_open", "Incidents of this node that are not closed.", &[])?,
            signals: make.counters(
                "highwater_signals_total",
                "Pressure files, by whether they could be written.",
                &["outcome"],
            )?,
            pool_level: make.gauges(
                "highwater_pool_level",
                "Level of the breaker on the device's pool: 0 Normal, 1 Warning, 2 Critical, 3 Emergency.",
                &["device", "mode"],
            )?,
            pod_level: make.gauges(
                "highwater_pod_level",
                "Level of the breaker on a pod's use of its limit: 0 Normal, 1 Warning, 2 Critical, 3 Emergency.",
                &["namespace", "pod", "device", "mode"],
            )?,
            device_headroom: make.float_gauges(
                "highwater_device_headroom_ratio",
                "Memory of the device that is not in use, of what can be used.",
                DEVICE,
            )?,
            node_headroom: make.float_gauges(
                "highwater_node_headroom_ratio",
                "Headroom of the device of the node that has most, for routers.",
                &[],
            )?,
            pod_parked: make.gauges(
                "highwater_pod_parked_bytes",
                "Memory of a pod that is parked on the host and owed to it on the device.",
                POD,
            )?,
            park_moves: make.counters(
                "highwater_park_moves_total",
                "Moves of a pod's memory to the host (`park`) and back (`restore`), by what came of them.",
                &["move", "outcome"],
            )?,
            hooks: make.counters(
                "highwater_hook_calls_total",
                "Calls of an endpoint by which a pod's engine frees memory, by preset and by what came of them.",
                &["preset", "result"],
            )?,
            reclaims: make.counters("highwater_reclaims_total", "How often idle memory was taken back.", &[])?,
            acts: make.counters(
                "highwater_acts_total",
                "Acts that the operator allowed and the agent carried out, by what became of them.",
                &["act", "state"],
            )?,
            unready: make.gauges(
                "highwater_pods_unready",
                "Pods whose pressure file says that they are unready.",
                &[],
            )?,
            host_used: make.gauges(
                "highwater_pod_host_memory_bytes",
                "Host memory of a pod that cannot be dropped; at most so much where that is far from the rule's mark.",
                &["namespace", "pod"],
            )?,
            host_limit: make.gauges(
                "highwater_pod_host_memory_limit_bytes",
                "Host memory that a pod may have: its limit, or what the node has.",
                &["namespace", "pod"],
            )?,
            host_pressure: make.float_gauges(
                "highwater_pod_host_memory_pressure_ratio",
                "A pod's memory pressure index over the last 10 s.",
                &["namespace", "pod"],
            )?,
            leak_stage: make.gauges(
                "highwater_pod_leak_stage",
                "How far it is suspected that a pod leaks: 0 not, 1 suspect, 2 an act is due.",
                LEAK,
            )?,
            leak_slope: make.gauges(
                "highwater_pod_leak_slope_bytes_per_hour",
                "How fast the memory of a pod grows that is suspected to leak.",
                LEAK,
            )?,
            leak_exhaustion: make.gauges(
                "highwater_pod_leak_exhaustion_seconds",
                "How long the memory of a pod that is suspected to leak will likely last.",
                LEAK,
            )?,
            leak_findings: make.counters(
                "highwater_leak_findings_total",
                "Changes of what is thought of a pod's growth, by how far it goes and how it grows.",
                &["stage", "class"],
            )?,
            leak_samples: make.counters(
                "highwater_leak_samples_total",
                "Samples of pods' memory that were looked at for leaks.",
                &[],
            )?,
            leak_missing: make.counters(
                "highwater_leak_samples_missing_total",
                "Those of them that had no number.",
                &[],
            )?,
            scrapes: make.counters(
                "highwater_framework_scrapes_total",
                "Readings of what frameworks in pods say of themselves, by what came of them.",
                &["result"],
            )?,
            samples: make.counter("highwater_samples_total", "Rounds in which all devices were sampled.")?,
            dropped: make.counter(
                "highwater_samples_dropped_total",
                "Rounds thrown away because the agent did not keep up.",
            )?,
            duration: make.histogram("highwater_sample_duration_seconds", "Time to sample all devices.")?,
            lateness: make.histogram(
                "highwater_sample_lateness_seconds",
                "How much later than planned a round of samples began.",
            )?,
            registry: Registry::new(),
        };
        Ok(Self { registry, ..metrics })
    }

    /// Notes a round of samples.
    pub(crate) fn sampled(&self, took: Duration, late: Duration) {
        self.samples.inc();
        self.duration.observe(took.as_secs_f64());
        self.lateness.observe(late.as_secs_f64());
    }

    /// The text of all metrics.
    pub(crate) fn render(&self, shown: Shown<'_>, driver: &str, gauges: Gauges) -> String {
        self.clear();
        match shown.pools.keeper() {
            Keeper::None => {}
            keeper => set(&self.keeper_up, &[], Some(u64::from(keeper == Keeper::Up))),
        }
        for (device, rules) in shown.devices {
            self.show_device(device, rules, driver);
            if let Some(pool) = shown.pools.report(&device.uuid) {
                let label = [device.label.as_str()];
                set(&self.pool_size, &label, Some(pool.size));
                set(&self.pool_ballast, &label, pool.ballast);
                set(&self.pool_short, &label, Some(pool.short));
            }
            for tenant in &rules.tenants {
                let facts = &tenant.pod.facts;
                let pod = [facts.namespace.as_str(), facts.name.as_str(), device.label.as_str()];
                set(&self.pod_used, &pod, tenant.used);
                set(&self.pod_limit, &pod, tenant.quota().map(|quota| quota.limit));
                set(&self.pod_due, &pod, tenant.due());
                self.show_strength(device, rules, tenant, shown);
                let [namespace, name, _] = pod;
                // Of a pod on several devices, each sets the same.
                let kills = self.pod_host_oom.with_label_values(&[namespace, name]);
                kills.reset();
                kills.inc_by(tenant.pod.host_oom_kills);
                self.show_pod_acts(device, rules, tenant, shown);
            }
        }
        for (gauge, age) in [
            (&self.plan_age, gauges.plan_age),
            (&self.api_age, gauges.api_contact_age),
            (&self.pod_resources_age, gauges.pod_resources_age),
        ] {
            gauge.reset();
            if let Some(age) = age {
                gauge.with_label_values::<&str>(&[]).set(age.as_secs_f64());
            }
        }
        self.show_acts(shown, gauges);
        self.show_leaks(shown);
        self.show_headroom(shown);
        set(&self.incidents, &[], u64::try_from(gauges.incidents_open).ok());
        self.signals.with_label_values(&["written"]).inc_by(gauges.signals_written);
        self.signals.with_label_values(&["failed"]).inc_by(gauges.signals_failed);
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }

    /// How firmly a pod's quota holds on a device, and by what.
    fn show_strength(&self, device: &Device, rules: &Rules, tenant: &Tenant, shown: Shown<'_>) {
        let facts = &tenant.pod.facts;
        let pod = [facts.namespace.as_str(), facts.name.as_str(), device.label.as_str()];
        let [namespace, name, label] = pod;
        let (strength, reason) = tenant.strength;
        // Nothing is stronger than a strength without a reason.
        let why = reason.map(|reason| format!("{reason:?}")).unwrap_or_default();
        set(&self.pod_strength, &[namespace, name, label, &format!("{strength:?}"), &why], Some(1));
        let asked =
            rules.enforced_quota(tenant).filter(|_| shown.binds).and_then(|quota| quota.asked.as_ref());
        if let (Some(asked), Some(reason)) = (asked, reason)
            && strength < asked.strength
        {
            set(&self.pod_below, &[namespace, name, label, &format!("{reason:?}")], Some(1));
        }
        let uid = &tenant.pod.kubelet_uid;
        set(&self.pod_overshoot, &pod, tenant.overshoot);
        set(&self.pod_granted, &pod, shown.pools.of_pod(&device.uuid, uid).map(|report| report.granted));
        let Some(ward) = shown.wards.get(uid) else { return };
        let (Some(ordinal), Some(view)) = (ward.ordinal(&device.uuid), shown.wards.view(uid, &device.uuid))
        else {
            return;
        };
        set(&self.pod_charged, &pod, Some(view.charged));
        set(&self.pod_guards, &pod, u64::try_from(view.processes).ok());
        let outside = i64::try_from(view.outside).unwrap_or(i64::MAX);
        for (part, bytes) in [("context", view.context), ("outside_guard", outside), ("driver", view.driver)]
        {
            self.pod_difference.with_label_values(&[namespace, name, label, part]).set(bytes);
        }
        for reason in Refusal::ALL {
            let labels = [namespace, name, label, reason.as_str()];
            self.pod_refusals.with_label_values(&labels).inc_by(ward.refused(ordinal, reason));
        }
        set(&self.pod_misaccounted, &pod, ward.misaccounted(ordinal));
    }

    fn show_device(&self, device: &Device, rules: &Rules, driver: &str) {
        let label = device.label.as_str();
        let partition = format!("{:?}", device.partition());
        set(&self.device_info, &[label, &device.uuid, &device.info.product, &partition, driver], Some(1));
        set(&self.device_up, &[label], Some(u64::from(device.fault.is_none() && device.is_sampled())));
        let ledger = &device.ledger;
        set(&self.device_capacity, &[label], ledger.total);
        let known = ledger.total.is_some();
        for (bucket, bytes) in [
            ("driver_reserved", ledger.driver_reserved),
            ("pods", ledger.pods),
            ("foreign", ledger.foreign),
            ("zombie", ledger.zombie),
            ("ballast", known.then_some(ledger.ballast)),
            ("leased", known.then_some(ledger.leased)),
            ("free", ledger.free),
        ] {
            set(&self.device_memory, &[label, bucket], bytes);
        }
        if let Some(bytes) = ledger.unexplained {
            self.device_memory.with_label_values(&[label, "unexplained"]).set(bytes);
            set(&self.device_unusual, &[label], Some(ledger.unusual()));
        }
        if let Some(share) = ledger.level {
            self.device_usage.with_label_values(&[label]).set(float(share.used) / float(share.of));
        }
        for layer in &rules.layers {
            for watched in &layer.breakers {
                let gauges = match watched.rule.value.scope {
                    BreakerScope::Device => &self.device_level,
                    BreakerScope::Pool => &self.pool_level,
                    BreakerScope::Pod => continue,
                };
                set(gauges, &[label, mode(layer.mode)], number(watched.state.state.level));
            }
        }
        for (class, count) in ErrorClass::ALL.iter().zip(device.errors) {
            self.device_errors.with_label_values(&[label, class.as_str()]).inc_by(count);
        }
        self.device_torn.with_label_values(&[label]).inc_by(device.torn);
    }

    /// What acts did, on a pod.
    fn show_pod_acts(&self, device: &Device, rules: &Rules, tenant: &Tenant, shown: Shown<'_>) {
        let facts = &tenant.pod.facts;
        let [namespace, name, label] = [facts.namespace.as_str(), facts.name.as_str(), device.label.as_str()];
        for (layer, terms) in rules.layers.iter().zip(&tenant.terms) {
            for (watched, concern) in layer.breakers.iter().zip(&terms.concerns) {
                if watched.rule.value.scope == BreakerScope::Pod && concern.selected {
                    let labels = [namespace, name, label, mode(layer.mode)];
                    set(&self.pod_level, &labels, number(concern.state.state.level));
                }
            }
        }
        let uid = &tenant.pod.kubelet_uid;
        set(&self.pod_parked, &[namespace, name, label], shown.parks.bytes(uid, &device.uuid));
        if let Some(host) = shown.hosts.shown(uid) {
            set(&self.host_used, &[namespace, name], host.sample.held);
            set(&self.host_limit, &[namespace, name], host.sample.limit);
            if let Some(index) = host.index {
                self.host_pressure.with_label_values(&[namespace, name]).set(f64::from(index) / 100.0);
            }
        }
        for leak in shown.leaks.shown(uid).iter().filter(|leak| *leak.device == *device.uuid) {
            let labels = [namespace, name, label, memory(leak.memory)];
            set(&self.leak_stage, &labels, Some(leak.finding.map_or(0, |finding| stage(finding.stage))));
            let Some(finding) = leak.finding else { continue };
            self.leak_slope.with_label_values(&labels).set(finding.slope_bytes_per_hour.mid);
            if let Some(end) = finding.exhaustion_seconds {
                self.leak_exhaustion.with_label_values(&labels).set(end.mid);
            }
        }
    }

    /// What was counted of leaks.
    fn show_leaks(&self, shown: Shown<'_>) {
        let counts = &shown.leaks.counts;
        for ((stage, class), count) in &counts.findings {
            self.leak_findings.with_label_values(&[stage, class]).inc_by(*count);
        }
        self.leak_samples.with_label_values::<&str>(&[]).inc_by(counts.samples);
        self.leak_missing.with_label_values::<&str>(&[]).inc_by(counts.missing);
        for (result, count) in &counts.scrapes {
            self.scrapes.with_label_values(&[result]).inc_by(*count);
        }
    }

    /// What acts did, on the node.
    fn show_acts(&self, shown: Shown<'_>, gauges: Gauges) {
        for ((what, outcome), count) in &shown.parks.moves {
            self.park_moves.with_label_values(&[what, outcome]).inc_by(*count);
        }
        for ((preset, result), count) in &shown.hooks.calls {
            self.hooks.with_label_values(&[preset, result]).inc_by(*count);
        }
        for ((act, state), count) in &shown.carries.counts {
            self.acts.with_label_values(&[action(*act), outcome(*state)]).inc_by(*count);
        }
        self.reclaims.with_label_values::<&str>(&[]).inc_by(gauges.reclaims);
        set(&self.unready, &[], u64::try_from(gauges.unready).ok());
    }

    /// What routers choose a node by: nothing where a device is not wholly measured.
    fn show_headroom(&self, shown: Shown<'_>) {
        let mut most: Option<f64> = None;
        for (device, _) in shown.devices {
            let Some(share) = device.ledger.level.filter(|share| share.of > 0 && device.fault.is_none())
            else {
                continue;
            };
            let headroom = (1.0 - float(share.used) / float(share.of)).max(0.0);
            self.device_headroom.with_label_values(&[device.label.as_str()]).set(headroom);
            most = Some(most.map_or(headroom, |most| most.max(headroom)));
        }
        if let Some(most) = most {
            self.node_headroom.with_label_values::<&str>(&[]).set(most);
        }
    }

    /// Forgets every series that stands for something that may be gone.
    fn clear(&self) {
        for gauges in [
            &self.device_info,
            &self.device_up,
            &self.device_capacity,
            &self.device_memory,
            &self.device_level,
            &self.device_unusual,
            &self.pod_used,
            &self.pod_limit,
            &self.pod_due,
            &self.pod_strength,
            &self.pod_below,
            &self.pod_granted,
            &self.pod_overshoot,
            &self.pod_charged,
            &self.pod_difference,
            &self.pod_guards,
            &self.pod_misaccounted,
            &self.pool_size,
            &self.pool_ballast,
            &self.pool_short,
            &self.keeper_up,
            &self.pool_level,
            &self.pod_level,
            &self.pod_parked,
            &self.host_used,
            &self.host_limit,
            &self.leak_stage,
            &self.leak_slope,
            &self.leak_exhaustion,
        ] {
            gauges.reset();
        }
        for gauges in [&self.device_usage, &self.device_headroom, &self.node_headroom, &self.host_pressure] {
            gauges.reset();
        }
        for counters in [
            &self.device_errors,
            &self.device_torn,
            &self.pod_host_oom,
            &self.pod_refusals,
            &self.signals,
            &self.park_moves,
            &self.hooks,
            &self.reclaims,
            &self.acts,
            &self.leak_findings,
            &self.leak_samples,
            &self.leak_missing,
            &self.scrapes,
        ] {
            counters.reset();
        }
    }
}

/// A mode as metrics say it.
const fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "Enforce",
        Mode::DryRun => "DryRun",
        Mode::Observe => "Observe",
    }
}

/// Which memory, as metrics say it.
const fn memory(memory: LeakMemory) -> &'static str {
    match memory {
        LeakMemory::Device => "Device",
        LeakMemory::Host => "Host",
    }
}

/// The number of a stage.
const fn stage(stage: LeakStage) -> u64 {
    match stage {
        LeakStage::Suspect => 1,
        LeakStage::Act => 2,
    }
}

/// An act of the agent as metrics say it.
const fn action(act: ActionType) -> &'static str {
    match act {
        ActionType::Unready => "Unready",
        ActionType::Park => "Park",
        _ => "RestartInPlace",
    }
}

/// What became of an act, as metrics say it.
const fn outcome(state: ActState) -> &'static str {
    match state {
        ActState::Refused => "Refused",
        ActState::Begun => "Begun",
        ActState::Done => "Done",
        ActState::Failed => "Failed",
        ActState::Undone => "Undone",
    }
}

/// The number of a level.
fn number(level: Level) -> Option<u64> {
    let place = Level::ALL.iter().position(|known| *known == level)?;
    u64::try_from(place).ok()
}

fn set(gauges: &IntGaugeVec, labels: &[&str], value: Option<u64>) {
    if let Some(value) = value {
        gauges.with_label_values(labels).set(i64::try_from(value).unwrap_or(i64::MAX));
    }
}

/// A number as floating point, exact up to 2^53.
fn float(bytes: u64) -> f64 {
    let part = |bits: u64| f64::from(u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX));
    part(bytes >> 32) * 4_294_967_296.0 + part(bytes)
}

/// Makes and registers metrics.
struct Maker<'a> {
    registry: &'a Registry,
    node: &'a str,
}

impl Maker<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("node", self.node)
    }

    fn register<M: Clone + prometheus::core::Collector + 'static>(&self, metric: M) -> prometheus::Result<M> {
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntGaugeVec> {
        self.register(IntGaugeVec::new(self.opts(name, help), labels)?)
    }

    fn float_gauges(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
        self.register(GaugeVec::new(self.opts(name, help), labels)?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        self.register(IntCounterVec::new(self.opts(name, help), labels)?)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.register(IntCounter::with_opts(self.opts(name, help))?)
    }

    fn histogram(&self, name: &str, help: &str) -> prometheus::Result<Histogram> {
        const BUCKETS: [f64; 12] =
            [0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];
        let opts = HistogramOpts::from(self.opts(name, help)).buckets(BUCKETS.to_vec());
        self.register(Histogram::with_opts(opts)?)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn large_numbers_become_floats_exactly() {
        for bytes in [0, 1, u64::from(u32::MAX), 1 << 32, 151_397_597_184] {
            assert_eq!(format!("{:.0}", float(bytes)), bytes.to_string());
        }
    }

    #[test]
    fn metrics_name_the_node_and_nothing_unknown() {
        let metrics = Metrics::new("n1", grant_durations("n1").unwrap()).unwrap();
        metrics.sampled(Duration::from_millis(1), Duration::ZERO);
        let state = tempfile::tempdir().unwrap();
        let pools = Pools::new(state.path(), state.path(), false);
        let proc = Path::new("/nowhere");
        let shown = Shown {
            devices: &[],
            wards: &Wards::default(),
            pools: &pools,
            parks: &Parks::default(),
            hooks: &Hooks::open(state.path()),
            carries: &Carries::new(crate::act::record::Record::open(state.path(), proc)),
            hosts: &Hosts::default(),
            leaks: &Leaks::open(state.path(), jiff::Timestamp::UNIX_EPOCH),
            binds: false,
        };
        let text = metrics.render(shown, "580", Gauges::default());
        assert!(text.contains("highwater_samples_total{node=\"n1\"} 1"), "{text}");
        assert!(text.contains("highwater_incidents_open{node=\"n1\"} 0"), "{text}");
        assert!(!text.contains("highwater_api_contact_age_seconds{"), "{text}");
    }
}
