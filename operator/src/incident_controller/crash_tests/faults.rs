//! What is not of every act.

use std::sync::{Arc, Mutex};

use super::*;

/// A cluster and its operator after so many rounds.
async fn rounds(cluster: Cluster, count: usize) -> (Arc<Mutex<Cluster>>, Operator) {
    let cluster = Arc::new(Mutex::new(cluster));
    let operator = Operator::new(&cluster, &Arc::new(Line::default()));
    for _ in 0..count {
        round(&cluster, &operator).await;
    }
    (cluster, operator)
}

async fn round(cluster: &Mutex<Cluster>, operator: &Operator) {
    operator.hear(cluster);
    operator.work().await;
}

fn verdict(cluster: &Mutex<Cluster>) -> (String, String) {
    let decision = lock(cluster).objects[INCIDENT]["status"]["decision"].clone();
    let text = |field: &str| decision[field].as_str().unwrap_or_default().to_owned();
    (text("state"), text("reason"))
}

fn is(state: &str, reason: &str) -> (String, String) {
    (state.to_owned(), reason.to_owned())
}

#[tokio::test]
async fn without_a_target_nothing_is_touched() {
    let mut cluster = Cluster::new(&json!({"action": "Drain"}));
    cluster.edit("/gmn/n2", |report| report["status"]["devices"][0]["headroom"] = json!("Full"));
    let (cluster, _) = rounds(cluster, 3).await;
    assert_eq!(verdict(&cluster), is("Proposed", "NoTarget"));
    let cluster = lock(&cluster);
    assert!(cluster.evictions.is_empty() && cluster.tokens().is_empty());
    assert!(cluster.objects[NODE]["spec"].get("unschedulable").is_none());
}

#[tokio::test]
async fn an_incident_deleted_by_hand_gives_its_node_back() {
    let (cluster, operator) = rounds(Cluster::new(&json!({"action": "Drain"})), 3).await;
    assert_eq!(lock(&cluster).objects[NODE]["spec"]["unschedulable"], true);
    let tokens = lock(&cluster).tokens().len();
    lock(&cluster).objects.remove(INCIDENT);
    round(&cluster, &operator).await;
    let cluster = lock(&cluster);
    assert!(cluster.objects[NODE]["spec"].get("unschedulable").is_none());
    assert_eq!(cluster.tokens().len(), tokens, "the budgets hold");
}

#[tokio::test]
async fn a_cordon_of_which_nothing_was_recorded_counts_as_begun_even_without_its_token() {
    let (cluster, _) = rounds(Cluster::new(&json!({"action": "Drain"})), 2).await;
    let evicted = {
        let mut cluster = lock(&cluster);
        assert_eq!(cluster.objects[NODE]["spec"]["unschedulable"], true);
        cluster.objects.remove("/api/v1/namespaces/hw/configmaps/highwater-budget");
        cluster.edit(INCIDENT, |incident| incident["status"] = json!({}));
        cluster.edit(super::cluster::POLICY, |policy| {
            policy["spec"]["remediation"]["budget"]["rates"][0]["maxActions"] = json!(0);
        });
        cluster.evictions.len()
    };
    let operator = Operator::new(&cluster, &Arc::new(Line::default()));
    round(&cluster, &operator).await;
    let decision = lock(&cluster).objects[INCIDENT]["status"]["decision"].clone();
    assert!(decision["actedAt"].is_string(), "its time is counted: {decision:#}");
    assert!(decision["message"].as_str().unwrap().contains("its cordon stands already"), "{decision:#}");
    lock(&cluster).objects.remove(super::cluster::POLICY);
    for _ in 0..2 {
        round(&cluster, &operator).await;
    }
    assert_eq!(verdict(&cluster), is("Cancelled", "PolicyDeleted"));
    let cluster = lock(&cluster);
    assert!(cluster.objects[NODE]["spec"].get("unschedulable").is_none());
    assert_eq!((cluster.evictions.len(), cluster.tokens().len()), (evicted, 0), "nobody without a token");
}

#[tokio::test]
async fn of_two_incidents_of_zombie_memory_the_larger_one_goes_on() {
    let mut cluster = Cluster::new(&json!({"action": "Drain"}));
    cluster.edit(INCIDENT, |incident| incident["spec"]["kind"] = json!("ZombieMemory"));
    let mut larger = cluster.objects[INCIDENT].clone();
    larger["metadata"] = json!({"name": "i-larger", "namespace": "hw", "uid": "v"});
    larger["spec"]["episode"] = json!(2);
    cluster.put(&format!("{INCIDENT}-larger"), larger);
    let (cluster, _) = rounds(cluster, 2).await;
    assert_eq!(verdict(&cluster), is("Superseded", "LargerEpisode"));
    let annotations = lock(&cluster).objects[NODE]["metadata"]["annotations"].clone();
    assert_eq!(annotations[highwater_crds::names::RESET_REQUESTED], "GPU-n1", "the other asks for it");
}

#[tokio::test]
async fn zombie_memory_asks_for_a_reset_and_withdraws_that_when_it_is_back() {
    let mut cluster = Cluster::new(&json!({"action": "Drain"}));
    cluster.edit(INCIDENT, |incident| incident["spec"]["kind"] = json!("ZombieMemory"));
    let (cluster, operator) = rounds(cluster, 1).await;
    let requested = || {
        let node = lock(&cluster).objects[NODE].clone();
        node["metadata"]["annotations"].get(highwater_crds::names::RESET_REQUESTED).cloned()
    };
    assert_eq!(requested(), Some(json!("GPU-n1")));
    assert!(lock(&cluster).evictions.is_empty());
    assert_eq!(verdict(&cluster), is("Proposed", "ResetRequested"));
    lock(&cluster).edit(INCIDENT, |incident| {
        incident["status"]["observation"] = json!({"state": "Recovered", "at": now()});
    });
    for _ in 0..2 {
        round(&cluster, &operator).await;
    }
    assert_eq!(verdict(&cluster).0, "Cancelled");
    assert_eq!(requested(), None);
}

/// What no eviction may be asked for, by the pod that has the subject's name.
#[tokio::test]
async fn pods_that_are_not_to_be_evicted_are_not() {
    type Change = fn(&mut Value);
    let pods: [(&str, &str, Change); 6] = [
        ("Suppressed", "MirrorPod", |pod| {
            pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
        }),
        ("Suppressed", "NoOwner", |pod| {
            pod["metadata"].as_object_mut().unwrap().remove("ownerReferences");
        }),
        ("Suppressed", "DaemonSetPod", |pod| {
            pod["metadata"]["ownerReferences"][0]["kind"] = json!("DaemonSet");
        }),
        ("Cancelled", "PodGone", |pod| pod["status"] = json!({"phase": "Succeeded"})),
        // Of a StatefulSet, whose next pod has the name already and waits for a node.
        ("Cancelled", "PodReplaced", |pod| {
            pod["metadata"]["uid"] = json!("a-2");
            pod["spec"].as_object_mut().unwrap().remove("nodeName");
            pod["status"] = json!({"phase": "Pending"});
        }),
        ("Suppressed", "NotOnNode", |pod| pod["spec"]["nodeName"] = json!("n2")),
    ];
    for proposed in proposals() {
        let action = proposed["action"].as_str().unwrap();
        if !["Restart", "Unready", "Park"].contains(&action) {
            continue;
        }
        for (state, reason, change) in pods {
            let mut cluster = Cluster::new(&proposed);
            cluster.edit(&format!("{PODS}a"), change);
            let (cluster, _) = rounds(cluster, 2).await;
            assert_eq!(verdict(&cluster), is(state, reason), "{proposed}");
            let cluster = lock(&cluster);
            assert!(cluster.evictions.is_empty() && cluster.tokens().is_empty(), "{proposed}: {reason}");
        }
    }
}

#[tokio::test]
async fn a_drain_leaves_static_finished_and_ownerless_pods_where_they_are() {
    let mut cluster = Cluster::new(&json!({"action": "Drain"}));
    cluster.edit(&format!("{PODS}a"), |pod| {
        pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    });
    cluster.edit(&format!("{PODS}b"), |pod| pod["status"] = json!({"phase": "Succeeded"}));
    let (cluster, operator) = rounds(cluster, 0).await;
    for _ in 0..6 {
        round(&cluster, &operator).await;
        lock(&cluster).objects.retain(|_, object| object["metadata"].get("deletionTimestamp").is_none());
    }
    assert_eq!(lock(&cluster).evictions, ["c"]);
}

#[tokio::test]
async fn a_disruption_budget_is_waited_for_and_spends_no_second_token() {
    for (proposed, waits) in [("Restart", "Proposed"), ("Drain", "Approved")] {
        let mut cluster = Cluster::new(&json!({"action": proposed}));
        cluster.disruptions_allowed = Some(0);
        let (cluster, operator) = rounds(cluster, 4).await;
        assert_eq!(verdict(&cluster), is(waits, "DisruptionBudget"), "{proposed}");
        let tokens = lock(&cluster).tokens();
        round(&cluster, &operator).await;
        assert_eq!(lock(&cluster).tokens(), tokens, "{proposed}");
        lock(&cluster).disruptions_allowed = None;
        for _ in 0..8 {
            round(&cluster, &operator).await;
            lock(&cluster).live();
        }
        assert_eq!(verdict(&cluster).0, "Succeeded", "{proposed}");
        assert_sound(&lock(&cluster), proposed);
    }
}

#[tokio::test]
async fn an_api_server_without_time_is_not_asked_for_an_eviction_twice_in_a_row() {
    let mut calls = 0;
    let evictions = loop {
        calls += 1;
        let mut cluster = Cluster::new(&json!({"action": "Restart"}));
        cluster.fault = Some((calls, Fault::Throttled));
        let (cluster, operator) = rounds(cluster, 1).await;
        if operator.evictions("unclear") == 1 {
            break lock(&cluster).evictions.len();
        }
        assert!(calls < 20, "the eviction was never throttled");
    };
    assert_eq!(evictions, 0);
}

/// The clock of these tests is the real one: nothing here may take as long as an observation lives.
#[test]
fn an_observation_outlives_a_round() {
    assert!(highwater_policy::remediation::FRESH > jiff::SignedDuration::from_secs(1));
    let incident = Cluster::new(&json!({"action": "Drain"})).objects[INCIDENT].clone();
    assert!(serde_json::from_value::<highwater_crds::GpuMemoryIncident>(incident).is_ok());
}
