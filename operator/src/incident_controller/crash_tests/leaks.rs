//! The same for incidents about leaks: a suspicion costs nobody anything, an act that is due happens
//! once, and replicas that leak alike are a ticket and no restart - whenever the operator dies.

use highwater_policy::{
    leak_acts::{LEAK_SUSPECTED, WORKLOAD_TICKET},
    remediation::TICKET_NEEDED,
};

use std::sync::{Arc, Mutex};

use jiff::{SignedDuration, Timestamp};

use super::{cluster::POLICY, every_step::at_every_call, *};
use crate::incident_controller::dereference::dereference;

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
async fn a_restart_waits_for_what_is_seen_after_the_hook_whatever_goes_wrong_at_whichever_call() {
    let mut cluster = Cluster::new(&json!({"action": "Restart"}));
    suspected(&mut cluster);
    cluster.edit(POLICY, |policy| {
        policy["spec"]["leaks"]["actions"] = json!([{"type": "Hook"}, {"type": "Restart"}]);
    });
    // It is due already when it is opened, so that its evidence alone says nothing of the hook.
    cluster.edit(INCIDENT, |incident| incident["spec"]["evidence"]["leak"] = finding("Act"));
    cluster.hook = Some(3);
    for fault in Fault::ALL {
        let calls = at_every_call(&cluster, fault, |cluster, story| {
            assert_eq!(cluster.decision(), Some(DecisionState::Succeeded), "{story}");
            assert_eq!((&*cluster.evictions, cluster.early), (&["a".to_owned()][..], 0), "{story}");
        });
        assert!(calls.await >= 5, "too few calls to be true");
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

#[tokio::test]
async fn one_that_is_being_restarted_leaves_it_to_the_next_to_tell_of_the_ticket() {
    for (state, teller) in [("Proposed", PATHS[0]), ("Approved", PATHS[1]), ("Verifying", PATHS[1])] {
        let mut cluster = three_alike();
        cluster.edit(PATHS[0], |incident| {
            incident["status"]["decision"] = json!({"state": state, "reason": "X", "since": now()});
        });
        let operator = Operator::new(&Arc::new(Mutex::new(cluster.clone())), &Arc::default());
        operator.hear(&Mutex::new(cluster));
        let mut telling = Vec::new();
        for path in PATHS {
            let key = ("hw".to_owned(), path.rsplit('/').next().unwrap().to_owned());
            let scene = dereference(operator.context(), &key).await.unwrap().unwrap();
            if scene.leak.is_some_and(|leak| leak.tells) {
                telling.push(path);
            }
        }
        assert_eq!(telling, [teller], "{state}");
    }
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

/// An act is due for a pod that came out of the later of two restarts because of leaks, so many hours
/// ago, the earlier of which did not help.
fn restarted_twice(hours: i64) -> Arc<Mutex<Cluster>> {
    let mut cluster = Cluster::new(&json!({"action": "Restart"}));
    suspected(&mut cluster);
    observe(&mut cluster, INCIDENT, "Over", "Act");
    let before = |hours: i64| Timestamp::now() - SignedDuration::from_hours(hours);
    let at = before(hours).as_millisecond();
    let second = json!({"at": at, "pod": "y", "slope": 1_200_000_000, "until": at + 24 * 3_600_000,
        "again": before(hours + 10).as_millisecond()});
    let ledger = json!({"version": 1, "tokens": {}, "leaks": {"team/ReplicaSet/a": [second]}});
    let path = "/api/v1/namespaces/hw/configmaps/highwater-budget";
    cluster.put(
        path,
        json!({"metadata": {"name": "highwater-budget", "namespace": "hw"},
        "data": {"ledger.json": ledger.to_string()}}),
    );
    cluster.edit(&format!("{PODS}a"), |pod| {
        pod["metadata"]["creationTimestamp"] = json!(before(hours - 1).to_string());
    });
    // It was suspected an hour later.
    cluster.edit(INCIDENT, |incident| {
        incident["spec"]["evidence"]["at"] = json!(format!("{:.6}", before(hours - 2)));
    });
    Arc::new(Mutex::new(cluster))
}

#[tokio::test]
async fn a_leak_that_restarts_did_not_slow_is_a_ticket() {
    let cluster = restarted_twice(10);
    let operator = Operator::new(&cluster, &Arc::default());
    operator.hear(&cluster);
    operator.work().await;
    assert_eq!(reason(&lock(&cluster), INCIDENT), TICKET_NEEDED);
    assert!(lock(&cluster).evictions.is_empty());
}

#[tokio::test]
async fn a_restart_that_held_for_a_day_was_not_in_vain_however_soon_its_pod_was_suspected() {
    let cluster = restarted_twice(25);
    let operator = Operator::new(&cluster, &Arc::default());
    operator.hear(&cluster);
    operator.work().await;
    assert_eq!(lock(&cluster).evictions, ["a"], "{}", reason(&lock(&cluster), INCIDENT));
}
