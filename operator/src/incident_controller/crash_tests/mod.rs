//! The operator against a scripted API server that fails it at every step.
//!
//! What is done at each call is not listed by hand: every act that the API knows is played, once for
//! each call that it makes and each thing that can go wrong there, and once for each write and each
//! thing that somebody else can do right after it. Whatever happens, no pod is evicted twice, nothing is
//! done without its token, every act ends, and nothing is left behind: no cordon, no taint, no pod
//! that is parked or not ready. A cordon that somebody else has set in between stays.

mod cluster;
mod every_step;
mod faults;
mod leaks;
mod operator;

use std::collections::BTreeSet;

use highwater_crds::{ActionType, DecisionState};
use kube::CustomResourceExt as _;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use self::{
    cluster::{Agent, Cluster, Fault, INCIDENT, NODE, PODS, Turn, now},
    operator::{Line, Operator, lock, play},
};

/// The values of an enumeration of the API, as its schema lists them.
fn all<T: DeserializeOwned>(pointer: &str) -> Vec<T> {
    let crd = serde_json::to_value(highwater_crds::GpuMemoryIncident::crd()).unwrap();
    let at = format!("/spec/versions/0/schema/openAPIV3Schema/properties/{pointer}/enum");
    let values = crd.pointer(&at).unwrap_or_else(|| panic!("no {at}")).as_array().unwrap();
    values.iter().map(|value| serde_json::from_value(value.clone()).unwrap()).collect()
}

/// Every act that an incident can propose; a restart in both of its ways.
fn proposals() -> Vec<Value> {
    let actions: Vec<ActionType> = all("spec/properties/proposed/properties/action");
    assert!(actions.len() >= 8);
    let plain = actions.iter().map(|action| json!({"action": action}));
    plain.chain([json!({"action": "Restart", "inPlace": true})]).collect()
}

/// A story of every act; of one that taints devices, another where they can be tainted by themselves.
fn stories() -> Vec<Cluster> {
    let mut stories: Vec<Cluster> = proposals().iter().map(Cluster::new).collect();
    let freeze = stories.iter().find(|story| story.proposed["action"] == "Freeze");
    let by_device = freeze.expect("a Freeze").with(|cluster| cluster.dra = true);
    stories.push(by_device);
    stories
}

fn states() -> Vec<DecisionState> {
    all("status/properties/decision/properties/state")
}

/// What holds at the end of every story.
fn assert_sound(cluster: &Cluster, story: &str) {
    let status = &cluster.objects.get(INCIDENT).map(|incident| incident["status"].clone());
    let action: ActionType = serde_json::from_value(cluster.proposed["action"].clone()).unwrap();
    let in_place = cluster.proposed["inPlace"] == json!(true);
    let may_go: &[&str] = match action {
        ActionType::Restart if !in_place => &["a"],
        ActionType::Drain => &["a", "b", "c"],
        _ => &[],
    };
    let evicted: BTreeSet<_> = cluster.evictions.iter().map(String::as_str).collect();
    assert_eq!(evicted.len(), cluster.evictions.len(), "evicted twice: {story}: {:?}", cluster.evictions);
    assert!(evicted.iter().all(|pod| may_go.contains(pod)), "{story}: evicted {evicted:?}");
    assert!(cluster.begun <= 1, "the agent did it {} times: {story}", cluster.begun);
    let by_agent = matches!(action, ActionType::Unready | ActionType::Park) || in_place;
    assert!(cluster.begun == 0 || by_agent, "{story}: the agent has done what is not its act");
    assert_eq!(cluster.unguarded, 0, "{story}: evicted from a node without our cordon");
    assert!(cluster.late == 0 || cluster.stalled, "{story}: acted after it had heard that it may not");
    let tokens = cluster.tokens();
    let most = if action == ActionType::Drain { 4 } else { may_go.len().max(usize::from(by_agent)) };
    assert!(tokens.len() <= most, "{story}: {tokens:?}");
    assert!(cluster.is_over(), "{story}: not over: {status:#?} {:#}", cluster.objects[NODE]);
    assert!(!cluster.lasting, "{story}: a pod is left parked or not ready");
    assert!(!cluster.is_tainted(), "{story}: left tainted: {:#?}", cluster.objects);
    // A cordon by hand is nobody else's to undo.
    assert_eq!(
        cluster.objects[NODE]["spec"].get("unschedulable").is_some(),
        cluster.is_cordoned_by_hand(),
        "{story}: left cordoned, or not: {:#}",
        cluster.objects[NODE]
    );
}
