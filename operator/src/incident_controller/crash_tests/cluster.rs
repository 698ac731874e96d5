//! What the API server holds, what the kubelet and the agent do meanwhile, and what goes wrong.

use std::collections::{BTreeMap, BTreeSet};

use axum::http::{Method, StatusCode};
use highwater_crds::{
    DecisionState,
    names::{self, manager},
};
use highwater_policy::remediation::may_follow;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

pub(super) const NODE: &str = "/api/v1/nodes/n1";
pub(super) const INCIDENT: &str = "/apis/highwater.dev/v1alpha1/namespaces/hw/gpumemoryincidents/i";
pub(super) const PODS: &str = "/api/v1/namespaces/team/pods/";
pub(super) const POLICY: &str = "/policy/p";
const REPORT: &str = "/gmn/n1";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const RULES: &str = "/apis/resource.k8s.io/v1beta2/devicetaintrules";

/// What goes wrong at one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// SIGKILL before the request arrives.
    DiesBefore,
    /// SIGKILL before the answer arrives.
    DiesAfter,
    /// The request has its effect, and the connection breaks.
    LosesAnswer,
    /// The API server has no time: 429 with Retry-After.
    Throttled,
    /// The operator stands still before the request is sent, believes that it still leads, and goes on
    /// after another has done everything.
    StallsBefore,
    /// The same, before it hears the answer.
    StallsAfter,
}

impl Fault {
    pub(super) const ALL: [Self; 6] = [
        Self::DiesBefore,
        Self::DiesAfter,
        Self::LosesAnswer,
        Self::Throttled,
        Self::StallsBefore,
        Self::StallsAfter,
    ];
}

/// What somebody else does right after one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    PolicyDeleted,
    PolicyAsksForNothing,
    /// For as long as two rounds.
    Paused,
    IncidentDeleted,
    /// Somebody empties the status of the incident by hand.
    IncidentEmptied,
    MemoryBack,
    PodDeleted,
    /// The pod of that name is another one, as of a StatefulSet, and waits for a node.
    PodReplaced,
    PodFinished,
    Uncordoned,
    /// Somebody lifts our cordon and sets their own.
    CordonedAnew,
    /// Another owner's field of the node changes.
    NodeChanged,
    PodChanged,
}

impl Turn {
    pub(super) const ALL: [Self; 13] = [
        Self::PolicyDeleted,
        Self::PolicyAsksForNothing,
        Self::Paused,
        Self::IncidentDeleted,
        Self::IncidentEmptied,
        Self::MemoryBack,
        Self::PodDeleted,
        Self::PodReplaced,
        Self::PodFinished,
        Self::Uncordoned,
        Self::CordonedAnew,
        Self::NodeChanged,
        Self::PodChanged,
    ];

    /// Whether nothing new may be done once the operator has heard of it.
    fn forbids(self) -> bool {
        matches!(
            self,
            Self::PolicyDeleted | Self::PolicyAsksForNothing | Self::Paused | Self::IncidentDeleted
        )
    }
}

/// What the agent makes of an act that is approved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agent {
    Does,
    Refuses,
    Fails,
    TakesBack,
}

/// One incident, what it is about, and what is to go wrong.
#[derive(Clone)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub(super) struct Cluster {
    pub(super) objects: BTreeMap<String, Value>,
    pub(super) proposed: Value,
    version: u64,
    /// Calls and writes of the operators so far.
    calls: usize,
    pub(super) writes: usize,
    /// What goes wrong, and at which call; None once it has.
    pub(super) fault: Option<(usize, Fault)>,
    /// What somebody does, and after which write.
    pub(super) turn: Option<(usize, Turn)>,
    /// Whether the watches bring news at once, or only after each round.
    pub(super) news_at_once: bool,
    pub(super) agent: Agent,
    /// A DRA driver publishes the devices, and single ones can be tainted.
    pub(super) dra: bool,
    pub(super) evictions: Vec<String>,
    /// How often the agent has begun the act, and whether what it did lasts now.
    pub(super) begun: usize,
    pub(super) lasting: bool,
    /// Evictions that were requested while the node had no cordon of ours.
    pub(super) unguarded: usize,
    /// Acts after what forbids them was told to whoever listened: one that stood still did not.
    pub(super) late: usize,
    pub(super) stalled: bool,
    forbidden: Option<Turn>,
    /// Somebody has forbidden it, whether the operator has heard of that or not.
    stopped: bool,
    /// What the agent says of its act.
    report: Value,
    /// How many evictions the disruption budgets let through. None: any number.
    pub(super) disruptions_allowed: Option<usize>,
    /// Rounds until what is seen after a hook says that it did not help. None: no hook comes first.
    pub(super) hook: Option<usize>,
    /// Evictions before that was said.
    pub(super) early: usize,
    /// Rounds until a pause ends.
    pause: Option<usize>,
    memory_back: bool,
    /// Whether the device has asked for a taint long enough.
    pub(super) was_tainted: bool,
    /// The states that followed each other.
    pub(super) followed: BTreeSet<(Option<DecisionState>, DecisionState)>,
}

/// A taint that is none of ours.
pub(super) fn foreign_taints() -> Value {
    json!([{"key": "gpu", "value": "true", "effect": "NoSchedule"}])
}

impl Cluster {
    /// A cluster with one incident that proposes `proposed`, of three pods of three workloads.
    pub(super) fn new(proposed: &Value) -> Self {
        let drain = proposed["action"] == "Drain";
        let freeze = (proposed["action"] == "Freeze").then_some("AnyDevice");
        let mut cluster = Self {
            objects: BTreeMap::new(),
            proposed: proposed.clone(),
            version: 100,
            calls: 0,
            writes: 0,
            fault: None,
            turn: None,
            news_at_once: true,
            agent: Agent::Does,
            dra: false,
            evictions: Vec::new(),
            begun: 0,
            lasting: false,
            unguarded: 0,
            late: 0,
            stalled: false,
            forbidden: None,
            stopped: false,
            report: Value::Null,
            disruptions_allowed: None,
            hook: None,
            early: 0,
            pause: None,
            memory_back: false,
            was_tainted: false,
            followed: BTreeSet::new(),
        };
        for node in ["n1", "n2"] {
            cluster.put(
                &format!("/api/v1/nodes/{node}"),
                json!({"metadata": {"name": node, "uid": node},
                "spec": {"taints": foreign_taints()}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}),
            );
            cluster.put(
                &format!("/gmn/{node}"),
                json!({"metadata": {"name": node}, "spec": {}, "status": {
                "conditions": [{"type": "Monitored", "status": "True", "reason": "R", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}],
                "models": [{"product": "G", "partition": "Whole", "memory": "100Gi"}],
                "devices": [{"uuid": format!("GPU-{node}"), "headroom": "Below60", "strength": "Observe",
                    "level": "Critical", "freeze": freeze.filter(|_| node == "n1")}]}}),
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
        for namespace in ["team", "hw"] {
            cluster.put(
                &format!("/api/v1/namespace-objects/{namespace}"),
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}),
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
            POLICY,
            json!({"metadata": {"name": "p", "generation": 1,
                "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"mode": "Enforce", "nodes": {}, "breakers": [{"scope": "Device",
                "critical": {"tripPercent": 88, "clearPercent": 84, "actions": [
                    {"type": "Freeze"}, {"type": "Unready"}, {"type": "Park"}, {"type": "Restart"}, {"type": "Drain"}]}}],
                "remediation": {"budget": {"maxUnavailable": 1, "haltAtCondemnedPercent": 100,
                    "rates": [{"scope": "Fleet", "maxActions": 4, "windowMinutes": 60}]}}}}),
        );
        let subject = json!({"namespace": "team", "name": "a", "uid": "a"});
        let mut spec = json!({"kind": "Breaker", "mode": "Enforce", "policy": "p", "node": "n1",
            "device": "GPU-n1", "episode": 1, "evidence": {}, "proposed": proposed});
        if !drain {
            spec["subject"] = subject;
        }
        cluster.put(
            INCIDENT,
            json!({"metadata": {"name": "i", "namespace": "hw", "uid": "u"},
            "spec": spec, "status": {}}),
        );
        cluster.see();
        cluster
    }

    /// Dates what the agent saw: of a drain long enough ago that it may begin, and again just now.
    fn see(&mut self) {
        let drain = self.proposed["action"] == "Drain";
        self.edit(INCIDENT, |incident| {
            incident["spec"]["evidence"]["at"] = if drain { before(10) } else { now() };
            if drain {
                incident["status"]["observation"] = json!({"state": "Over", "at": now()});
            }
        });
    }

    /// The same, with changes.
    pub(super) fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut cluster = self.clone();
        // What was seen long ago is not acted on.
        cluster.see();
        change(&mut cluster);
        cluster
    }

    pub(super) fn put(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(path.to_owned(), object.clone());
        object
    }

    /// Changes an object as somebody else would.
    pub(super) fn edit(&mut self, path: &str, change: impl FnOnce(&mut Value)) {
        let Some(mut object) = self.objects.get(path).cloned() else { return };
        change(&mut object);
        self.put(path, object);
    }

    pub(super) fn decision(&self) -> Option<DecisionState> {
        serde_json::from_value(self.objects.get(INCIDENT)?["status"]["decision"]["state"].clone()).ok()
    }

    /// Pauses acts on the node for so many rounds.
    pub(super) fn pause(&mut self, rounds: usize) {
        self.pause = Some(rounds);
        self.edit(NODE, |node| node["metadata"]["annotations"][names::PAUSED] = json!("true"));
    }

    /// Whether nothing is under way any more, and nothing is left to be undone.
    pub(super) fn is_over(&self) -> bool {
        let decided =
            !self.objects.contains_key(INCIDENT) || self.decision().is_some_and(DecisionState::is_final);
        let node = &self.objects[NODE];
        decided
            && !self.lasting
            && node["metadata"]["annotations"].get(names::CORDONED_FOR).is_none_or(Value::is_null)
            && !self.is_tainted()
            && (self.proposed["action"] != "Freeze" || self.was_tainted)
    }

    /// Whether the node, or its device, has a taint of ours.
    pub(super) fn is_tainted(&self) -> bool {
        self.objects[NODE]["spec"]["taints"] != foreign_taints()
            || self.objects.keys().any(|path| path.starts_with(RULES))
    }

    /// Whether somebody else has set the cordon that the node has.
    pub(super) fn is_cordoned_by_hand(&self) -> bool {
        self.objects[NODE]["metadata"]["managedFields"][0]["manager"] == "kubectl-cordon"
    }

    pub(super) fn tokens(&self) -> BTreeSet<String> {
        let map = self.objects.get("/api/v1/namespaces/hw/configmaps/highwater-budget");
        let text = map.and_then(|map| map["data"]["ledger.json"].as_str()).unwrap_or(r#"{"tokens": {}}"#);
        let ledger: Value = serde_json::from_str(text).unwrap();
        ledger["tokens"].as_object().unwrap().keys().cloned().collect()
    }

    /// Counts a call; what goes wrong at it.
    pub(super) fn strike(&mut self) -> Option<Fault> {
        self.calls += 1;
        let fault = self.fault.take_if(|(at, _)| *at == self.calls).map(|(_, fault)| fault);
        self.stalled |= matches!(fault, Some(Fault::StallsBefore | Fault::StallsAfter));
        fault
    }

    /// What somebody does after a write, if this was the one.
    fn take_turn(&mut self) {
        self.writes += 1;
        let Some((_, turn)) = self.turn.take_if(|(at, _)| *at == self.writes) else { return };
        let first_pod = format!("{PODS}a");
        match turn {
            Turn::PolicyDeleted => drop(self.objects.remove(POLICY)),
            Turn::PolicyAsksForNothing => self.edit(POLICY, |policy| {
                policy["spec"]["breakers"][0]["critical"]["actions"] = json!([{"type": "Signal"}]);
            }),
            Turn::Paused => self.pause(2),
            Turn::IncidentDeleted => drop(self.objects.remove(INCIDENT)),
            Turn::IncidentEmptied => self.edit(INCIDENT, |incident| incident["status"] = json!({})),
            Turn::MemoryBack => {
                self.memory_back = true;
                self.live();
            }
            Turn::PodDeleted => drop(self.objects.remove(&first_pod)),
            Turn::PodReplaced => self.edit(&first_pod, |pod| {
                pod["metadata"]["uid"] = json!("a-2");
                pod["metadata"].as_object_mut().unwrap().remove("deletionTimestamp");
                pod["spec"].as_object_mut().unwrap().remove("nodeName");
                pod["status"] = json!({"phase": "Pending"});
            }),
            Turn::PodFinished => self.edit(&first_pod, |pod| {
                pod["status"] = json!({"phase": "Succeeded"});
            }),
            Turn::Uncordoned => self.edit(NODE, |node| {
                node["spec"].as_object_mut().unwrap().remove("unschedulable");
            }),
            Turn::CordonedAnew => self.edit(NODE, |node| {
                if node["spec"]["unschedulable"] == json!(true) {
                    node["metadata"]["managedFields"] = wrote_cordon("kubectl-cordon");
                }
            }),
            Turn::NodeChanged => self.edit(NODE, |node| node["metadata"]["labels"]["x"] = json!("y")),
            Turn::PodChanged => self.edit(&first_pod, |pod| pod["metadata"]["labels"]["x"] = json!("y")),
        }
        self.stopped |= turn.forbids();
        self.forbidden = Some(turn).filter(|turn| turn.forbids() && self.news_at_once);
    }

    fn by_agent(&self) -> bool {
        let action = &self.proposed["action"];
        action == "Unready"
            || action == "Park"
            || (action == "Restart" && self.proposed["inPlace"] == json!(true))
    }

    /// What the agent does of its own act, and says of it.
    fn carry_out(&mut self, approved: bool) {
        let said = self.report["state"].as_str();
        let (state, lasts) = match (said, self.agent) {
            (None, _) if !approved => return,
            (None, Agent::Refuses) => ("Refused", false),
            (None, _) => {
                assert!(!self.tokens().is_empty(), "approved without a token");
                self.begun += 1;
                ("Begun", true)
            }
            (Some("Begun"), Agent::Fails) => ("Failed", false),
            (Some("Begun"), Agent::TakesBack) => ("Undone", false),
            (Some("Begun"), _) => ("Done", true),
            _ => return,
        };
        self.lasting = lasts && self.proposed["action"] != "Restart";
        self.report = json!({"state": state});
    }

    /// What the kubelet and the agent do between two rounds: pods end, memory is looked at, and what
    /// was approved is begun, then done; what lasts is taken back when its incident is over.
    pub(super) fn live(&mut self) {
        let ending = |object: &Value| object["metadata"].get("deletionTimestamp").is_some();
        self.objects.retain(|_, object| !ending(object));
        match &mut self.pause {
            Some(0) => {
                (self.pause, self.forbidden) = (None, None);
                self.edit(NODE, |node| {
                    node["metadata"]["annotations"].as_object_mut().unwrap().remove(names::PAUSED);
                });
            }
            Some(rounds) => *rounds -= 1,
            None => {}
        }
        if self.proposed["action"] == "Freeze" {
            // The device is full until the taint has held for a round, or nobody may ask for it.
            self.was_tainted |= self.is_tainted() || self.stopped;
            if self.was_tainted {
                self.edit(REPORT, |report| report["status"]["devices"][0]["freeze"] = Value::Null);
            }
        }
        let over = self.decision().is_some_and(DecisionState::is_final);
        let Some(mut incident) = self.objects.get(INCIDENT).cloned().filter(|_| !over) else {
            self.lasting = false;
            return;
        };
        let there = |pod: &&str| {
            let pod = self.objects.get(&format!("{PODS}{pod}"));
            pod.is_some_and(|p| p["spec"]["nodeName"] == "n1" && p["status"]["phase"] == "Running")
        };
        let left = ["a", "b", "c"].iter().filter(|pod| there(pod)).count();
        let drain = self.proposed["action"] == "Drain";
        if self.by_agent() {
            let approved = self.decision() == Some(DecisionState::Approved);
            self.carry_out(approved);
        }
        let back = self.memory_back || self.report["state"] == "Done" || left < if drain { 1 } else { 3 };
        let mut observation = json!({
            "state": if back { "Recovered" } else { "Over" }, "at": now(),
            "afterAct": incident["status"]["decision"]["actedAt"],
        });
        if !self.report.is_null() {
            observation["act"] = self.report.clone();
        }
        if incident["spec"]["kind"] == "Leak" {
            observation["leak"] = super::leaks::finding("Act");
        }
        if let Some(rounds) = &mut self.hook {
            let effect = if *rounds > 0 { "Awaited" } else { "InVain" };
            observation["hook"] = json!({"effect": effect, "heldBytes": 1_i64 << 34});
            *rounds = rounds.saturating_sub(1);
        }
        incident["status"]["observation"] = observation;
        self.put(INCIDENT, incident);
    }

    pub(super) fn answer(
        &mut self,
        method: &Method,
        path: &str,
        dry: bool,
        body: &Value,
    ) -> (StatusCode, Value) {
        let answer = self.serve(method, path, dry, body);
        if *method != Method::GET && !dry && answer.0.is_success() {
            self.take_turn();
        }
        answer
    }

    fn serve(&mut self, method: &Method, path: &str, dry: bool, body: &Value) -> (StatusCode, Value) {
        let failed = |code: StatusCode| {
            let reason = match code {
                StatusCode::NOT_FOUND => "NotFound",
                StatusCode::CONFLICT => "Conflict",
                StatusCode::TOO_MANY_REQUESTS => "TooManyRequests",
                _ => "Invalid",
            };
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                "message": if code == 429 { "it would violate the pod's disruption budget" } else { "" },
                "reason": reason, "code": code.as_u16()});
            (code, status)
        };
        let found = self.objects.get(path).cloned();
        match (method.as_str(), found) {
            ("GET", _) if path.starts_with("/apis/resource.k8s.io") => {
                self.of_dra(path).map_or_else(|| failed(StatusCode::NOT_FOUND), |list| (StatusCode::OK, list))
            }
            ("DELETE", Some(rule)) if path.starts_with(RULES) => {
                self.objects.remove(path);
                (StatusCode::OK, rule)
            }
            ("PATCH", None) if path.starts_with(RULES) => {
                self.late += usize::from(self.forbidden.is_some_and(|turn| turn != Turn::IncidentDeleted));
                (StatusCode::CREATED, self.put(path, body.clone()))
            }
            ("GET", _) if path.ends_with("kube-node-lease/leases") => {
                let lease = |node: &str| json!({"metadata": {"name": node}, "spec": {"renewTime": now()}});
                (
                    StatusCode::OK,
                    json!({"kind": "LeaseList", "apiVersion": "coordination.k8s.io/v1",
                    "metadata": {}, "items": [lease("n1"), lease("n2")]}),
                )
            }
            ("POST", _) if path.ends_with("/eviction") => {
                self.evict(path, dry, body).map_or_else(failed, |pod| {
                    (
                        StatusCode::CREATED,
                        json!({"kind": "Status", "apiVersion": "v1", "status": "Success",
                    "metadata": {}, "details": {"name": pod}}),
                    )
                })
            }
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
                if body["metadata"]["uid"] != incident["metadata"]["uid"] {
                    return failed(StatusCode::CONFLICT);
                }
                let new: DecisionState =
                    serde_json::from_value(body["status"]["decision"]["state"].clone()).unwrap();
                if !may_follow(self.decision(), new) {
                    return failed(StatusCode::UNPROCESSABLE_ENTITY);
                }
                self.followed.insert((self.decision(), new));
                if new == DecisionState::Approved && self.by_agent() {
                    self.late += usize::from(self.forbidden.is_some());
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
                let taints = body["spec"]["taints"].as_array();
                let ours = taints.is_some_and(|t| t.iter().any(|t| t["key"] == names::PRESSURE_TAINT));
                assert!(!(ours && self.dra), "the node is tainted beside its device");
                if path == NODE && (body["spec"]["unschedulable"] == json!(true) || ours) {
                    self.late += usize::from(
                        self.forbidden.is_some_and(|turn| !ours || turn != Turn::IncidentDeleted),
                    );
                }
                if method == Method::PUT {
                    object = body.clone();
                } else {
                    merge(&mut object, body);
                }
                if path == NODE && body["spec"].get("unschedulable").is_some() {
                    object["metadata"]["managedFields"] = wrote_cordon(manager::OPERATOR_CORDON);
                }
                (StatusCode::OK, self.put(path, object))
            }
            _ => failed(StatusCode::NOT_FOUND),
        }
    }

    /// What is known of devices that are published, where any are.
    fn of_dra(&self, path: &str) -> Option<Value> {
        let list = |kind: &str, version: &str, items: Vec<Value>| json!({"kind": kind, "apiVersion": format!("resource.k8s.io/{version}"), "metadata": {}, "items": items});
        let kinds = |version: &str, name: &str, kind: &str| {
            json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("resource.k8s.io/{version}"),
                "resources": [{"name": name, "singularName": "", "namespaced": false, "kind": kind,
                    "verbs": ["list", "patch", "delete"]}]})
        };
        let served = match path {
            "/apis/resource.k8s.io/v1" => kinds("v1", "resourceslices", "ResourceSlice"),
            "/apis/resource.k8s.io/v1beta2" => kinds("v1beta2", "devicetaintrules", "DeviceTaintRule"),
            SLICES => {
                let slice = json!({"metadata": {"name": "n1-gpus"}, "spec": {
                    "driver": "gpu.nvidia.com", "nodeName": "n1",
                    "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": "GPU-n1"}}}]}});
                list("ResourceSliceList", "v1", vec![slice])
            }
            RULES => {
                let rules = self.objects.iter().filter(|(path, _)| path.starts_with(RULES));
                list("DeviceTaintRuleList", "v1beta2", rules.map(|(_, rule)| rule.clone()).collect())
            }
            _ => return None,
        };
        Some(served).filter(|_| self.dra)
    }

    fn evict(&mut self, path: &str, dry: bool, body: &Value) -> Result<String, StatusCode> {
        let path = path.trim_end_matches("/eviction");
        let mut pod = self.objects.get(path).cloned().ok_or(StatusCode::NOT_FOUND)?;
        let asked = &body["deleteOptions"]["preconditions"];
        assert!(
            asked["uid"].is_string() && asked["resourceVersion"].is_string(),
            "of whatever pod it is: {asked}"
        );
        if ["uid", "resourceVersion"].iter().any(|of| asked[of] != pod["metadata"][of]) {
            return Err(StatusCode::CONFLICT);
        }
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        if self.disruptions_allowed == Some(0) {
            return Err(StatusCode::TOO_MANY_REQUESTS);
        }
        if dry {
            return Ok(name);
        }
        let of_pod = format!("/{name}");
        assert!(self.tokens().iter().any(|token| token.ends_with(&of_pod)), "an eviction without a token");
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        pod["status"]["conditions"] = json!([{"type": "DisruptionTarget", "status": "True",
            "reason": "EvictionByEvictionAPI"}]);
        self.put(path, pod);
        self.evictions.push(name.clone());
        self.late += usize::from(self.forbidden.is_some());
        let incident = self.objects.get(INCIDENT);
        let in_vain = incident.is_some_and(|i| i["status"]["observation"]["hook"]["effect"] == "InVain");
        self.early += usize::from(self.hook.is_some() && !in_vain);
        let cordoned =
            self.objects[NODE]["spec"]["unschedulable"] == json!(true) && !self.is_cordoned_by_hand();
        self.unguarded += usize::from(self.proposed["action"] == "Drain" && !cordoned);
        Ok(name)
    }
}

/// What the API server says of who set a node's cordon.
fn wrote_cordon(manager: &str) -> Value {
    json!([{"manager": manager, "operation": "Update", "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}])
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

pub(super) fn now() -> Value {
    before(0)
}

/// So many seconds ago.
fn before(seconds: i64) -> Value {
    json!(format!("{:.6}", Timestamp::now() - SignedDuration::from_secs(seconds)))
}
