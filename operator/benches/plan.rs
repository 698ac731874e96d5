//! How long the plans of a whole fleet take, and the effective quotas of its pods.
//!
//! One line a figure, with its goal and `ok` or `short`; the last line sums up. The exit status
//! is 0 only where every goal is reached.

#![allow(clippy::unwrap_used, clippy::expect_used)] // made-up input that is known to be right

use std::{
    collections::BTreeMap,
    process::ExitCode,
    time::{Duration, Instant},
};

use highwater_crds::{ByteSize, DeviceModel, DeviceStatus, Partition};
use highwater_policy::{
    pod::{Labels, NamespaceFacts, PodFacts},
    quota::effective,
    resolve::{Node, Policies, Policy, Resolution, resolve},
};
use jiff::Timestamp;
use serde_json::json;

const PRODUCTS: [(&str, u64); 4] =
    [("NVIDIA H200", 140), ("NVIDIA H100 80GB HBM3", 80), ("NVIDIA L40S", 48), ("NVIDIA A30", 24)];
const POOLS: [&str; 5] = ["serving", "batch", "training", "notebooks", "spare"];
const DEVICES: usize = 8;
const PODS_A_NODE: usize = 8;
const RUNS: usize = 15;

struct Fleet {
    names: Vec<String>,
    labels: Vec<Labels>,
    models: Vec<Vec<DeviceModel>>,
    devices: Vec<DeviceStatus>,
    namespaces: BTreeMap<String, NamespaceFacts>,
    pods: Vec<PodFacts>,
}

fn main() -> ExitCode {
    let policies: Vec<Policy> = (0..20).map(policy).collect();
    let (small, large) = (Fleet::new(500), Fleet::new(5000));
    let times = Times::measure(&policies, &small, &large);
    let ratio = times.large.as_secs_f64() / times.small.as_secs_f64();

    let mut short = 0;
    let mut figure = |what: &str, value: String, goal: &str, reached: bool| {
        println!("{what}: {value} (goal {goal}) {}", if reached { "ok" } else { "short" });
        short += usize::from(!reached);
    };
    let milliseconds = |d: Duration| format!("{:.2} ms", d.as_secs_f64() * 1000.0);
    figure(
        "plan of 5000 nodes x 8 devices x 40000 pods",
        milliseconds(times.large),
        "<= 100 ms",
        times.large <= Duration::from_millis(100),
    );
    figure(
        "5000 nodes : 500 nodes",
        format!("{ratio:.1} ({} : {})", milliseconds(times.large), milliseconds(times.small)),
        "<= 13, linear is 10",
        ratio <= 13.0,
    );
    println!(
        "bench-plan: {}",
        if short == 0 { "every goal is reached".to_owned() } else { format!("{short} short") }
    );
    if short == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The median times of a run, the two sizes by turns.
struct Times {
    small: Duration,
    large: Duration,
}

impl Times {
    fn measure(policies: &[Policy], small: &Fleet, large: &Fleet) -> Self {
        let mut times: [Vec<Duration>; 2] = [Vec::new(), Vec::new()];
        for _ in 0..RUNS {
            for (fleet, times) in [small, large].into_iter().zip(&mut times) {
                let begin = Instant::now();
                std::hint::black_box(fleet.plan(policies));
                times.push(begin.elapsed());
            }
        }
        let [small, large] = times.map(|mut t| {
            t.sort_unstable();
            t.into_iter().nth(RUNS / 2).unwrap()
        });
        Self { small, large }
    }
}

impl Fleet {
    fn new(size: usize) -> Self {
        let labels = |i: usize| {
            let mut labels: Labels =
                (0..20).map(|l| (format!("example.com/label-{l}"), format!("value-{l}"))).collect();
            labels.insert("kubernetes.io/hostname".into(), format!("node-{i}"));
            labels.insert("pool".into(), POOLS.iter().cycle().nth(i % 5).unwrap().to_string());
            labels
        };
        let models = |i: usize| {
            let (product, gib) = PRODUCTS.iter().cycle().nth(i % 4).unwrap();
            vec![DeviceModel {
                product: (*product).to_owned(),
                partition: Partition::Whole,
                memory: Some(ByteSize::gib(*gib)),
                context: Some(ByteSize::mib(576)),
            }]
        };
        let device = |i: usize| -> DeviceStatus {
            serde_json::from_value(json!({"uuid": format!("GPU-{i}"), "model": 0, "level": "Normal",
                "headroom": "Below60", "strength": "Observe", "pods": 1}))
            .unwrap()
        };
        let namespaces = (0..50).map(|i| {
            let labels = [("team".to_owned(), format!("team-{}", i % 10))].into();
            (format!("namespace-{i}"), NamespaceFacts { labels, paused: false })
        });
        let pods = (0..size * PODS_A_NODE).map(|i| PodFacts {
            namespace: format!("namespace-{}", i % 50),
            name: format!("pod-{i}"),
            labels: [("tier".to_owned(), ["serving", "batch"].get(i % 2).unwrap().to_string())].into(),
            ..PodFacts::default()
        });
        Self {
            names: (0..size).map(|i| format!("node-{i}")).collect(),
            labels: (0..size).map(labels).collect(),
            models: (0..size).map(models).collect(),
            devices: (0..DEVICES).map(device).collect(),
            namespaces: namespaces.collect(),
            pods: pods.collect(),
        }
    }

    /// Everything from stored policies to the plan of each node and the quota of each pod by it.
    fn plan(&self, policies: &[Policy]) -> (Resolution, usize) {
        let nodes = self
            .names
            .iter()
            .zip(&self.labels)
            .zip(&self.models)
            .map(|((name, labels), models)| Node { name, labels, models, devices: &self.devices });
        let resolution = resolve(&Policies::new(policies.iter().cloned()), nodes, &self.namespaces);
        let limited = self.pods.chunks(PODS_A_NODE).zip(&self.names).flat_map(|(pods, node)| {
            let plan = resolution.plans.get(node).unwrap();
            let namespaces = &self.namespaces;
            pods.iter().filter(move |pod| {
                let namespace = namespaces.get(&pod.namespace);
                plan.layers.iter().any(|layer| {
                    effective(&layer.quotas, pod, namespace, "highwater-system", Some(140 << 30)).is_some()
                })
            })
        });
        let limited = limited.count();
        (resolution, limited)
    }
}

fn policy(i: usize) -> Policy {
    let pool = POOLS.iter().cycle().nth(i % 5).unwrap();
    let mode = ["Observe", "DryRun", "Enforce"].iter().cycle().nth(i % 3).unwrap();
    let spec = json!({
        "mode": mode,
        "priority": i % 7,
        "nodes": {"matchLabels": {"pool": pool}},
        "namespaces": {"matchLabels": {"team": format!("team-{}", i % 10)}},
        "pool": {"sizePercent": 60, "maxPercent": 75, "driverReserve": {"percent": 3}},
        "quota": {"default": {"limit": "8Gi"}, "rules": [
            {"name": "serving", "pods": {"matchLabels": {"tier": "serving"}}, "guarantee": "12Gi", "limit": "16Gi"}],
            "breach": {"actions": [{"type": "Signal"}, {"type": "Restart"}]}},
        "breakers": [{"scope": "Device", "critical": {"tripPercent": 80 + i % 10, "clearPercent": 70,
            "actions": [{"type": "Signal"}, {"type": "Freeze"}]}}],
        "remediation": {"budget": {"maxUnavailable": 1}},
    });
    Policy {
        name: format!("policy-{i:02}"),
        created: Some(Timestamp::UNIX_EPOCH),
        generation: 1,
        spec: serde_json::from_value(spec).unwrap(),
    }
}
