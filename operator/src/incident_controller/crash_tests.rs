//! SIGKILL at every step: for each act, the operator is stopped after each of its calls in turn - the
//! call has its effect, the answer never comes - and another one goes on with what it finds. However
//! it falls, every pod is evicted at most once, every act ends, and nothing is left behind.

mod leaks;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard},
};

use axum::http::{Method, Request, Response, StatusCode};
use highwater_crds::{DecisionState, GpuMemoryIncident, names};
use highwater_policy::remediation::may_follow;
use jiff::{SignedDuration, Timestamp};
use kube::{
    Client,
    client::Body,
    runtime::{reflector::store::Writer, watcher::Event},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};

use crate::{
    context::{Context, Ends, Writers},
    node_controller, policy_controller,
};

const NODE: &str = "/api/v1/nodes/n1";
const INCIDENT: &str = "/apis/highwater.dev/v1alpha1/namespaces/hw/gpumemoryincidents/i";
const PODS: &str = "/api/v1/namespaces/team/pods/";

/// What the API server holds, and how it dies on the operator.
#[derive(Clone)]
struct Cluster {
    objects: BTreeMap<String, Value>,
    version: u64,
    calls: usize,
    /// After which call the operator is gone.
    dies_after: usize,
    evictions: Vec<String>,
    /// Evictions that were requested while the node had no cordon of ours.
    unguarded: usize,
    /// Somebody uncordons the node right after this many evictions.
    uncordon_after: usize,
}

impl Cluster {
    /// A cluster with one incident that proposes `proposed`, of three pods of three workloads.
    fn new(proposed: &Value) -> Self {
        let drain = proposed["action"] == "Drain";
        let mut cluster = Self {
            objects: BTreeMap::new(),
            version: 100,
            calls: 0,
            dies_after: usize::MAX,
            evictions: Vec::new(),
            unguarded: 0,
            uncordon_after: usize::MAX,
        };
        for node in ["n1", "n2"] {
            cluster.put(
                &format!("/api/v1/nodes/{node}"),
                json!({"metadata": {"name": node, "uid": node},
                "spec": {}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}),
            );
            cluster.put(
                &format!("/gmn/{node}"),
                json!({"metadata": {"name": node}, "spec": {}, "status": {
                "conditions": [{"type": "Monitored", "status": "True", "reason": "R", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}],
                "models": [{"product": "G", "partition": "Whole", "memory": "100Gi"}],
                "devices": [{"uuid": format!("GPU-{node}"), "headroom": "Below60", "strength": "Observe"}]}}),
            );
            cluster.put(
                &format!("{PODS}agent-{node}"),
                json!({"metadata": {"name": format!("agent-{node}"),
                "namespace": "hw", "uid": format!("agent-{node}"), "labels": {
                    "app.kubernetes.io/part-of": "highwater", "app.kubernetes.io/component": "agent"}},
                "spec": {"nodeName": node, "containers": []},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
            );
        }
        for pod in ["a", "b", "c"] {
            cluster.put(&format!("{PODS}{pod}"), json!({"metadata": {"name": pod, "namespace": "team",
                    "uid": pod, "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [
                    {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": pod, "uid": pod, "controller": true}]},
                "spec": {"nodeName": "n1", "terminationGracePeriodSeconds": 1, "containers": [
                    {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
                "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}));
        }
        cluster.put(
            "/policy/p",
            json!({"metadata": {"name": "p", "generation": 1,
                "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"mode": "Enforce", "nodes": {}, "breakers": [{"scope": "Device",
                "critical": {"tripPercent": 88, "clearPercent": 84, "actions": [
                    {"type": "Unready"}, {"type": "Park"}, {"type": "Restart"}, {"type": "Drain"}]}}],
                "remediation": {"budget": {"maxUnavailable": 1, "haltAtCondemnedPercent": 100,
                    "rates": [{"scope": "Fleet", "maxActions": 4, "windowMinutes": 60}]}}}}),
        );
        let subject = json!({"namespace": "team", "name": "a", "uid": "a"});
        let mut spec = json!({"kind": "Breaker", "mode": "Enforce", "policy": "p", "node": "n1",
            "device": "GPU-n1", "episode": 1, "evidence": {"at": now()}, "proposed": proposed});
        if !drain {
            spec["subject"] = subject;
        }
        cluster.put(
            INCIDENT,
            json!({"metadata": {"name": "i", "namespace": "hw", "uid": "u"},
            "spec": spec, "status": {}}),
        );
        cluster
    }

    fn put(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(path.to_owned(), object.clone());
        object
    }

    fn decision(&self) -> Option<DecisionState> {
        serde_json::from_value(self.objects.get(INCIDENT)?["status"]["decision"]["state"].clone()).ok()
    }

    fn is_over(&self) -> bool {
        self.decision().is_some_and(DecisionState::is_final)
            && self.objects[NODE]["metadata"]["annotations"]
                .get(names::CORDONED_FOR)
                .is_none_or(Value::is_null)
    }

    fn tokens(&self) -> BTreeSet<String> {
        let map = self.objects.get("/api/v1/namespaces/hw/configmaps/highwater-budget");
        let text = map.and_then(|map| map["data"]["ledger.json"].as_str()).unwrap_or(r#"{"tokens": {}}"#);
        let ledger: Value = serde_json::from_str(text).unwrap();
        ledger["tokens"].as_object().unwrap().keys().cloned().collect()
    }

    /// What the kubelet and the agent do meanwhile: pods end, and memory is looked at.
    fn live(&mut self, proposed: &Value) {
        let ending = |object: &Value| object["metadata"].get("deletionTimestamp").is_some();
        self.objects.retain(|_, object| !ending(object));
        let Some(mut incident) = self.objects.get(INCIDENT).cloned() else { return };
        let left = ["a", "b", "c"].iter().filter(|pod| self.objects.contains_key(&format!("{PODS}{pod}")));
        let by_agent = proposed["action"] != "Drain"
            && (proposed["action"] != "Restart" || proposed["inPlace"] == json!(true));
        let begun = !incident["status"]["observation"]["act"].is_null();
        let approved = self.decision() == Some(DecisionState::Approved);
        let act = (by_agent && (approved || begun)).then(|| json!({"state": "Done"}));
        let back = act.is_some() || left.count() < if proposed["action"] == "Drain" { 1 } else { 3 };
        let mut observation = json!({"state": if back { "Recovered" } else { "Over" }, "at": now()});
        if let Some(act) = act {
            observation["act"] = act;
        }
        if incident["spec"]["kind"] == "Leak" {
            observation["leak"] = leaks::finding("Act");
        }
        incident["status"]["observation"] = observation;
        self.put(INCIDENT, incident);
    }

    fn answer(&mut self, method: &Method, path: &str, body: &Value) -> (StatusCode, Value) {
        let failed = |code: StatusCode| {
            let reason = match code {
                StatusCode::NOT_FOUND => "NotFound",
                StatusCode::CONFLICT => "Conflict",
                _ => "Invalid",
            };
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "",
                "reason": reason, "code": code.as_u16()});
            (code, status)
        };
        let found = self.objects.get(path).cloned();
        match (method.as_str(), found) {
            ("GET", _) if path.starts_with("/apis/resource.k8s.io") => failed(StatusCode::NOT_FOUND),
            ("GET", _) if path.ends_with("kube-node-lease/leases") => {
                let lease = |node: &str| json!({"metadata": {"name": node}, "spec": {"renewTime": now()}});
                (
                    StatusCode::OK,
                    json!({"kind": "LeaseList", "apiVersion": "coordination.k8s.io/v1",
                    "metadata": {}, "items": [lease("n1"), lease("n2")]}),
                )
            }
            ("POST", _) if path.ends_with("/eviction") => self.evict(path, body).map_or_else(failed, |pod| {
                (
                    StatusCode::CREATED,
                    json!({"kind": "Status", "apiVersion": "v1", "status": "Success",
                    "metadata": {}, "details": {"name": pod}}),
                )
            }),
            ("POST", _) => {
                let path = format!("{path}/{}", body["metadata"]["name"].as_str().unwrap());
                if self.objects.contains_key(&path) {
                    return failed(StatusCode::CONFLICT);
                }
                (StatusCode::CREATED, self.put(&path, body.clone()))
            }
            ("PATCH", None) if path.ends_with("/status") => {
                let path = path.trim_end_matches("/status");
                let Some(mut incident) = self.objects.get(path).cloned() else {
                    return failed(StatusCode::NOT_FOUND);
                };
                let new: DecisionState =
                    serde_json::from_value(body["status"]["decision"]["state"].clone()).unwrap();
                if !may_follow(self.decision(), new) {
                    return failed(StatusCode::UNPROCESSABLE_ENTITY);
                }
                incident["status"]["decision"] = body["status"]["decision"].clone();
                (StatusCode::OK, self.put(path, incident))
            }
            ("GET", Some(object)) => (StatusCode::OK, object),
            ("PUT" | "PATCH", Some(mut object)) => {
                let wanted = body["metadata"].get("resourceVersion");
                if wanted.is_some_and(|v| !v.is_null() && *v != object["metadata"]["resourceVersion"]) {
                    return failed(StatusCode::CONFLICT);
                }
                if method == Method::PUT {
                    object = body.clone();
                } else {
                    merge(&mut object, body);
                }
                (StatusCode::OK, self.put(path, object))
            }
            _ => failed(StatusCode::NOT_FOUND),
        }
    }

    fn evict(&mut self, path: &str, body: &Value) -> Result<String, StatusCode> {
        let path = path.trim_end_matches("/eviction");
        let mut pod = self.objects.get(path).cloned().ok_or(StatusCode::NOT_FOUND)?;
        let asked = &body["deleteOptions"]["preconditions"];
        assert_eq!(asked["uid"], pod["metadata"]["uid"], "an eviction without the UID");
        if asked["resourceVersion"] != pod["metadata"]["resourceVersion"] {
            return Err(StatusCode::CONFLICT);
        }
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        pod["status"]["conditions"] = json!([{"type": "DisruptionTarget", "status": "True",
            "reason": "EvictionByEvictionAPI"}]);
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        self.put(path, pod);
        self.evictions.push(name.clone());
        let node = self.objects[NODE].clone();
        if node["spec"]["unschedulable"] != json!(true) {
            self.unguarded += 1;
        }
        if self.evictions.len() == self.uncordon_after {
            let mut node = node;
            node["spec"].as_object_mut().unwrap().remove("unschedulable");
            self.put(NODE, node);
        }
        Ok(name)
    }
}

/// RFC 7396.
fn merge(object: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (key, value) in fields.iter().filter(|(key, _)| *key != "resourceVersion") {
        if value.is_null() {
            object.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut object[key], value);
        }
    }
}

fn now() -> Value {
    json!(format!("{:.6}", Timestamp::now()))
}

/// One operator, and the news that its watches would bring.
struct Operator {
    ctx: Context,
    writers: Writers,
    learnt: watch::Sender<Arc<crate::context::Known>>,
    _leads: watch::Sender<bool>,
}

impl Operator {
    fn new(cluster: &Arc<Mutex<Cluster>>, died: &Arc<Notify>) -> Self {
        let (cluster, died) = (Arc::clone(cluster), Arc::clone(died));
        let service = tower::service_fn(move |request: Request<Body>| {
            let (cluster, died) = (Arc::clone(&cluster), Arc::clone(&died));
            async move {
                let (method, path) = (request.method().clone(), request.uri().path().to_owned());
                let bytes = request.into_body().collect_bytes().await?;
                let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
                let (answer, dead) = {
                    let mut cluster = lock(&cluster);
                    cluster.calls += 1;
                    (cluster.answer(&method, &path, &body), cluster.calls == cluster.dies_after)
                };
                if dead {
                    died.notify_one();
                    std::future::pending::<()>().await;
                }
                let response = Response::builder().status(answer.0);
                Ok::<_, kube::Error>(response.body(Body::from(answer.1.to_string().into_bytes())).unwrap())
            }
        });
        let client = Client::new(service, "default");
        let (ctx, Ends { writers, leads, learnt, .. }) = Context::new(client, "hw".into()).unwrap();
        leads.send_replace(true);
        Self { ctx, writers, learnt, _leads: leads }
    }

    /// Brings every store to what the API server holds.
    fn hear(&mut self, cluster: &Cluster) {
        let all = |prefix: &str| -> Vec<Value> {
            cluster
                .objects
                .iter()
                .filter(|(path, _)| path.starts_with(prefix))
                .map(|(_, o)| o.clone())
                .collect()
        };
        let w = &mut self.writers;
        fill(&mut w.nodes, all("/api/v1/nodes/"));
        fill(&mut w.pods, all(PODS));
        fill(&mut w.plans, all("/gmn/"));
        fill(&mut w.policies, all("/policy/"));
        fill(&mut w.incidents, all(INCIDENT));
        fill(&mut w.ledger, all("/api/v1/namespaces/hw/configmaps/"));
        let namespaces =
            ["team", "hw"].map(|n| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}}));
        fill(&mut w.namespaces, namespaces.to_vec());
        policy_controller::learn(&self.ctx, &self.learnt);
    }

    /// Looks at the incident and at the node once.
    async fn work(&self) {
        let key = ("hw".to_owned(), "i".to_owned());
        let failed = |error: crate::error::Error| assert!(error.is_ordinary(), "{error}");
        Box::pin(super::reconcile(&self.ctx, &key)).await.map_or_else(failed, drop);
        Box::pin(node_controller::reconcile(&self.ctx, "n1")).await.map_or_else(failed, drop);
    }
}

fn fill<K>(writer: &mut Writer<K>, objects: Vec<Value>)
where
    K: kube::runtime::reflector::Lookup + DeserializeOwned + Clone + 'static,
    K::DynamicType: Eq + std::hash::Hash + Clone,
{
    writer.apply_watcher_event(&Event::Init);
    for object in objects {
        writer.apply_watcher_event(&Event::InitApply(serde_json::from_value(object).unwrap()));
    }
    writer.apply_watcher_event(&Event::InitDone);
}

fn lock(cluster: &Mutex<Cluster>) -> MutexGuard<'_, Cluster> {
    cluster.lock().unwrap()
}

/// Plays a cluster to the end, with an operator that dies after so many calls. Says whether it did.
async fn play(mut cluster: Cluster, proposed: &Value, dies_after: usize) -> (Cluster, bool) {
    cluster.dies_after = dies_after;
    let (cluster, died) = (Arc::new(Mutex::new(cluster)), Arc::new(Notify::new()));
    let mut operator = Operator::new(&cluster, &died);
    let mut dead = false;
    for _ in 0..60 {
        operator.hear(&lock(&cluster));
        tokio::select! {
            () = operator.work() => {}
            () = died.notified() => {
                dead = true;
                operator = Operator::new(&cluster, &died);
            }
        }
        if lock(&cluster).is_over() {
            break;
        }
        lock(&cluster).live(proposed);
    }
    let end = lock(&cluster).clone();
    (end, dead)
}

/// Plays it with a death after each call in turn, and hands every end to `check`.
async fn at_every_step(proposed: Value, prepare: impl Fn(&mut Cluster), check: impl Fn(&Cluster, usize)) {
    let mut steps = 0;
    loop {
        steps += 1;
        let mut cluster = Cluster::new(&proposed);
        prepare(&mut cluster);
        let (cluster, died) = play(cluster, &proposed, steps).await;
        assert!(cluster.is_over(), "step {steps}: {:#}", cluster.objects[INCIDENT]["status"]);
        check(&cluster, steps);
        if !died {
            break;
        }
    }
    assert!(steps > 4, "too few calls to be true: {steps}");
}

#[tokio::test]
async fn a_restart_happens_once_whenever_the_operator_dies() {
    at_every_step(
        json!({"action": "Restart"}),
        |_| {},
        |cluster, step| {
            assert_eq!(cluster.decision(), Some(DecisionState::Succeeded), "step {step}");
            assert_eq!(cluster.evictions, ["a"], "step {step}");
            assert_eq!(cluster.tokens(), BTreeSet::from(["u/a".to_owned()]), "step {step}");
        },
    )
    .await;
}

#[tokio::test]
async fn what_the_agent_does_is_approved_once_whenever_the_operator_dies() {
    for action in [
        json!({"action": "Unready"}),
        json!({"action": "Park"}),
        json!({"action": "Restart", "inPlace": true}),
    ] {
        at_every_step(
            action.clone(),
            |_| {},
            |cluster, step| {
                assert_eq!(cluster.decision(), Some(DecisionState::Succeeded), "{action} step {step}");
                assert!(cluster.evictions.is_empty(), "{action} step {step}");
                assert_eq!(cluster.tokens().len(), 1, "{action} step {step}");
            },
        )
        .await;
    }
}

#[tokio::test]
async fn a_drain_ends_and_its_cordon_goes_whenever_the_operator_dies() {
    at_every_step(
        json!({"action": "Drain"}),
        |_| {},
        |cluster, step| {
            let status = &cluster.objects[INCIDENT]["status"]["decision"];
            assert_eq!(cluster.decision(), Some(DecisionState::Succeeded), "step {step}: {status:#}");
            assert_eq!(cluster.evictions, ["a", "b", "c"], "step {step}");
            assert_eq!(cluster.unguarded, 0, "step {step}: evicted without a cordon");
            assert!(cluster.objects[NODE]["spec"].get("unschedulable").is_none(), "step {step}");
            assert_eq!(cluster.tokens().len(), 4, "step {step}");
            assert_eq!(status["targets"], json!(["n2"]), "step {step}");
        },
    )
    .await;
}

#[tokio::test]
async fn nobody_is_evicted_from_a_node_that_somebody_uncordoned_whenever_the_operator_dies() {
    at_every_step(
        json!({"action": "Drain"}),
        |cluster| cluster.uncordon_after = 1,
        |cluster, step| {
            assert_eq!(cluster.decision(), Some(DecisionState::Cancelled), "step {step}");
            assert_eq!(cluster.evictions, ["a"], "step {step}");
            assert!(cluster.objects[NODE]["spec"].get("unschedulable").is_none(), "step {step}");
        },
    )
    .await;
}

#[tokio::test]
async fn without_a_target_nothing_is_touched() {
    let proposed = json!({"action": "Drain"});
    let mut cluster = Cluster::new(&proposed);
    let mut full = cluster.objects["/gmn/n2"].clone();
    full["status"]["devices"][0]["headroom"] = json!("Full");
    cluster.put("/gmn/n2", full);
    let (cluster, _) = play(cluster, &proposed, usize::MAX).await;
    let decision = &cluster.objects[INCIDENT]["status"]["decision"];
    assert_eq!((&decision["state"], &decision["reason"]), (&json!("Proposed"), &json!("NoTarget")));
    assert!(cluster.evictions.is_empty() && cluster.tokens().is_empty());
    assert!(cluster.objects[NODE]["spec"].get("unschedulable").is_none());
}

#[tokio::test]
async fn an_incident_deleted_by_hand_gives_its_node_back() {
    let proposed = json!({"action": "Drain"});
    let cluster = Arc::new(Mutex::new(Cluster::new(&proposed)));
    let died = Arc::new(Notify::new());
    let mut operator = Operator::new(&cluster, &died);
    for _ in 0..3 {
        operator.hear(&lock(&cluster));
        operator.work().await;
    }
    assert_eq!(lock(&cluster).objects[NODE]["spec"]["unschedulable"], true);
    let tokens = lock(&cluster).tokens().len();
    lock(&cluster).objects.remove(INCIDENT);
    operator.hear(&lock(&cluster));
    operator.work().await;
    let cluster = lock(&cluster);
    assert!(cluster.objects[NODE]["spec"].get("unschedulable").is_none());
    assert_eq!(cluster.tokens().len(), tokens, "the budgets hold");
}

#[tokio::test]
async fn zombie_memory_asks_for_a_reset_and_withdraws_that_when_it_is_back() {
    let proposed = json!({"action": "Drain"});
    let mut cluster = Cluster::new(&proposed);
    let mut incident = cluster.objects[INCIDENT].clone();
    incident["spec"]["kind"] = json!("ZombieMemory");
    cluster.put(INCIDENT, incident);
    let cluster = Arc::new(Mutex::new(cluster));
    let mut operator = Operator::new(&cluster, &Arc::new(Notify::new()));
    let requested = |cluster: &Cluster| {
        cluster.objects[NODE]["metadata"]["annotations"].get(names::RESET_REQUESTED).cloned()
    };
    operator.hear(&lock(&cluster));
    operator.work().await;
    assert_eq!(requested(&lock(&cluster)), Some(json!("GPU-n1")));
    assert!(lock(&cluster).evictions.is_empty());
    let mut incident = lock(&cluster).objects[INCIDENT].clone();
    assert_eq!(incident["status"]["decision"]["reason"], "ResetRequested");
    incident["status"]["observation"] = json!({"state": "Recovered", "at": now()});
    lock(&cluster).put(INCIDENT, incident);
    for _ in 0..2 {
        operator.hear(&lock(&cluster));
        operator.work().await;
    }
    assert_eq!(lock(&cluster).decision(), Some(DecisionState::Cancelled));
    assert_eq!(requested(&lock(&cluster)), None);
}

/// The clock of the tests is the real one: nothing here may take as long as an observation lives.
#[test]
fn an_observation_outlives_a_round() {
    assert!(highwater_policy::remediation::FRESH > SignedDuration::from_secs(1));
    assert!(
        serde_json::from_value::<GpuMemoryIncident>(
            Cluster::new(&json!({"action": "Drain"})).objects[INCIDENT].clone()
        )
        .is_ok()
    );
}
