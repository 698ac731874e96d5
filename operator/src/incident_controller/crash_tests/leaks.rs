//! The same for incidents about leaks: a suspicion costs nobody anything, an act that is due happens
//! once, and replicas that leak alike are a ticket and no restart - whenever the operator dies.

use highwater_policy::{
    leak_acts::{LEAK_SUSPECTED, WORKLOAD_TICKET},
    remediation::TICKET_NEEDED,
};

use std::sync::{Arc, Mutex};

use jiff::{SignedDuration, Timestamp};

use super::{every_step::at_every_call, *};

/// What an agent finds.
pub(super) fn finding(stage: &str) -> Value {
    json!({
        "at": now(), "stage": stage, "class": "Linear",
        "slopeBytesPerHour": {"low": 1_000_000_000, "mid": 1_200_000_000, "high": 1_400_000_000},
        "exhaustionSeconds": {"low": 1200, "mid": 1800, "high": 2400},
        "confidencePercent": 90, "agreeingScales": 3, "eligibleScales": 4, "advice": "Restart", "reason": "r",
    })
}

/// The cluster's incident is about a leak that was suspected, by a policy that asks for a restart.
fn suspected(cluster: &mut Cluster) {
    let mut policy = cluster.objects["/policy/p"].clone();
    policy["spec"]["leaks"] = json!({"actions": [{"type": "Restart"}]});
    cluster.put("/policy/p", policy);
    let mut incident = cluster.objects[INCIDENT].clone();
    incident["spec"]["kind"] = json!("Leak");
    incident["spec"]["evidence"]["leak"] = finding("Suspect");
    cluster.put(INCIDENT, incident);
}

fn observe(cluster: &mut Cluster, path: &str, state: &str, found: &str) {
    let mut incident = cluster.objects[path].clone();
    incident["status"]["observation"] = json!({"state": state, "at": now(), "leak": finding(found)});
    cluster.put(path, incident);
}

fn reason(cluster: &Cluster, path: &str) -> String {
    cluster.objects[path]["status"]["decision"]["reason"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_leaking_pod_is_restarted_once_whatever_goes_wrong_at_whichever_call() {
    let mut cluster = Cluster::new(&json!({"action": "Restart"}));
    suspected(&mut cluster);
    for fault in Fault::ALL {
        let calls = at_every_call(&cluster, fault, |cluster, story| {
            assert_eq!(cluster.decision(), Some(DecisionState::Succeeded), "{story}");
            assert_eq!(cluster.evictions, ["a"], "{story}");
            assert_eq!(cluster.tokens(), BTreeSet::from(["u/a".to_owned()]), "{story}");
        });
        assert!(calls.await >= 4, "too few calls to be true");
    }
}

#[tokio::test]
async fn a_suspicion_waits_and_ends_when_it_clears() {
    let mut cluster = Cluster::new(&json!({"action": "Restart"}));
    suspected(&mut cluster);
    let cluster = Arc::new(Mutex::new(cluster));
    let operator = Operator::new(&cluster, &Arc::default());
    for _ in 0..3 {
        operator.hear(&cluster);
        operator.work().await;
        observe(&mut lock(&cluster), INCIDENT, "Over", "Suspect");
    }
    assert_eq!(reason(&lock(&cluster), INCIDENT), LEAK_SUSPECTED);
    assert!(lock(&cluster).evictions.is_empty() && lock(&cluster).tokens().is_empty());
    observe(&mut lock(&cluster), INCIDENT, "Recovered", "Suspect");
    operator.hear(&cluster);
    operator.work().await;
    assert_eq!(lock(&cluster).decision(), Some(DecisionState::Cancelled));
}

const PATHS: [&str; 3] = [
    INCIDENT,
    "/apis/highwater.dev/v1alpha1/namespaces/hw/gpumemoryincidents/i2",
    "/apis/highwater.dev/v1alpha1/namespaces/hw/gpumemoryincidents/i3",
];

/// Three pods of one workload leak alike, on two nodes; for all of them an act is due.
fn three_alike() -> Cluster {
    let mut cluster = Cluster::new(&json!({"action": "Restart"}));
    suspected(&mut cluster);
    let first = cluster.objects[INCIDENT].clone();
    for ((pod, node), path) in [("a", "n1"), ("b", "n1"), ("c", "n2")].into_iter().zip(PATHS) {
        let name = path.rsplit('/').next().unwrap();
        let mut incident = first.clone();
        incident["metadata"] = json!({"name": name, "namespace": "hw", "uid": format!("u-{name}")});
        incident["spec"]["node"] = json!(node);
        incident["spec"]["device"] = json!(format!("GPU-{node}"));
        incident["spec"]["subject"] = json!({"namespace": "team", "name": pod, "uid": pod});
        cluster.put(path, incident);
        observe(&mut cluster, path, "Over", "Act");
        let mut object = cluster.objects[&format!("{PODS}{pod}")].clone();
        object["spec"]["nodeName"] = json!(node);
        object["metadata"]["ownerReferences"][0]["name"] = json!("w");
        object["metadata"]["ownerReferences"][0]["uid"] = json!("w");
        cluster.put(&format!("{PODS}{pod}"), object);
    }
    cluster
}

impl Operator {
    /// Looks at each of the three once.
    async fn work_on_all(&self) {
        for path in PATHS {
            let key = ("hw".to_owned(), path.rsplit('/').next().unwrap().to_owned());
            let failed = |error: crate::error::Error| assert!(error.is_ordinary(), "{error}");
            Box::pin(crate::incident_controller::reconcile(self.context(), &key))
                .await
                .map_or_else(failed, drop);
        }
    }
}

#[tokio::test]
async fn three_that_leak_alike_are_a_ticket_and_no_restart_whenever_the_operator_dies() {
    for call in 1.. {
        let mut cluster = three_alike();
        cluster.fault = Some((call, Fault::DiesAfter));
        let (cluster, line) = (Arc::new(Mutex::new(cluster)), Arc::new(Line::default()));
        let mut operator = Operator::new(&cluster, &line);
        for _ in 0..3 {
            operator.hear(&cluster);
            let died = line.died(operator.work_on_all()).await;
            if died {
                operator = Operator::new(&cluster, &line);
            }
        }
        operator.hear(&cluster);
        crate::incident_controller::show_tickets(operator.context());
        assert_eq!(operator.context().metrics.leak_workload_tickets.get(), 1, "call {call}");
        let cluster = lock(&cluster);
        for path in PATHS {
            assert_eq!(reason(&cluster, path), WORKLOAD_TICKET, "call {call}: {path}");
        }
        assert!(cluster.evictions.is_empty() && cluster.tokens().is_empty(), "call {call}");
        if cluster.fault.is_some() {
            assert!(call > 4, "too few calls to be true: {call}");
            break;
        }
    }
}

#[tokio::test]
async fn a_ticket_outlives_its_operator_and_ends_when_its_pods_are_made_from_another_template() {
    let cluster = Arc::new(Mutex::new(three_alike()));
    let line = Arc::default();
    let operator = Operator::new(&cluster, &line);
    operator.hear(&cluster);
    operator.work_on_all().await;
    observe(&mut lock(&cluster), PATHS[2], "Recovered", "Suspect");
    let operator = Operator::new(&cluster, &line);
    for _ in 0..2 {
        operator.hear(&cluster);
        operator.work_on_all().await;
    }
    assert_eq!(reason(&lock(&cluster), PATHS[2]), "Recovered");
    assert_eq!(reason(&lock(&cluster), PATHS[1]), WORKLOAD_TICKET, "two that are left are on it still");
    // The same workload, as one whose owner has a revision for each template says it.
    {
        let mut cluster = lock(&cluster);
        let mut next = cluster.objects[&format!("{PODS}c")].clone();
        next["metadata"]["name"] = json!("d");
        next["metadata"]["uid"] = json!("d");
        next["metadata"]["creationTimestamp"] = json!("2026-01-02T00:00:00Z");
        next["metadata"]["labels"] = json!({"controller-revision-hash": "new"});
        cluster.put(&format!("{PODS}d"), next);
        observe(&mut cluster, PATHS[0], "Over", "Suspect");
    }
    operator.hear(&cluster);
    operator.work_on_all().await;
    assert_eq!(reason(&lock(&cluster), PATHS[0]), LEAK_SUSPECTED);
    assert!(lock(&cluster).evictions.len() <= 1, "its other pod goes its own way");
}

#[tokio::test]
async fn a_leak_that_restarts_did_not_slow_is_a_ticket() {
    let mut cluster = Cluster::new(&json!({"action": "Restart"}));
    suspected(&mut cluster);
    observe(&mut cluster, INCIDENT, "Over", "Act");
    let before = |hours: i64| format!("{}", Timestamp::now() - SignedDuration::from_hours(hours));
    let token = |pod: &str, born: i64, at: i64| {
        json!({"at": before(at), "born": before(born), "policy": "p", "workload": "ReplicaSet/a",
            "namespace": "team", "node": "n1", "pod": pod, "act": "Restart", "leak": 1_200_000_000})
    };
    let ledger = json!({"version": 1, "tokens": {"x/x": token("x", 30, 20), "y/y": token("y", 19, 10)}});
    let path = "/api/v1/namespaces/hw/configmaps/highwater-budget";
    cluster.put(
        path,
        json!({"metadata": {"name": "highwater-budget", "namespace": "hw"},
        "data": {"ledger.json": ledger.to_string()}}),
    );
    let mut pod = cluster.objects[&format!("{PODS}a")].clone();
    pod["metadata"]["creationTimestamp"] = json!(before(9));
    cluster.put(&format!("{PODS}a"), pod);
    let cluster = Arc::new(Mutex::new(cluster));
    let operator = Operator::new(&cluster, &Arc::default());
    operator.hear(&cluster);
    operator.work().await;
    assert_eq!(reason(&lock(&cluster), INCIDENT), TICKET_NEEDED);
    assert!(lock(&cluster).evictions.is_empty());
}
