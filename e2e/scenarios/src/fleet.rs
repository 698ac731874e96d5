//! Many nodes without a machine, whose agents are simulated here: they report what a scenario says,
//! follow their plans, and answer the operator, as the real ones do. Kwok stands in for the kubelets.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use highwater_crds::{
    ActionType, DecisionState, GpuMemoryIncident, GpuMemoryNode, IncidentKind, ObservationState, names,
};
use highwater_e2e::eventually;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::{SYSTEM, Scenario, elapsed};

/// Marks what belongs to simulated agents.
const LABEL: &str = "highwater.dev/simulated";
/// The label by which the fleet's nodes are told from others.
const FLEET: &str = "highwater.dev/fleet";
/// Requests to the API server at a time.
const AT_A_TIME: usize = 24;
/// How often the agents look what is asked of them.
const LOOK: Duration = Duration::from_secs(1);
/// How often an observation is renewed while an act is verified.
const RENEW: Duration = Duration::from_secs(2);
/// How long the fleet may take to be there, or to be gone.
const PATIENCE: Duration = Duration::from_mins(4);

/// What a simulated node's one device reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetNode {
    /// Nothing is in use.
    Well,
    /// 99 % is in use, and that ends when the node has no pod of the scenario any more.
    Sick,
    /// 99 % is in use, whatever is done: the driver is wrong.
    Lying,
}

/// The fleet, while there is one.
#[derive(Debug)]
pub struct SimulatedFleet {
    /// Its nodes: `f1`, `f2`, ...
    pub nodes: Vec<String>,
    scenario: Scenario,
    reports: Arc<Mutex<Vec<FleetNode>>>,
    agents: JoinHandle<()>,
}

impl Drop for SimulatedFleet {
    fn drop(&mut self) {
        self.agents.abort();
    }
}

impl SimulatedFleet {
    /// Makes a fleet of so many nodes with agents, does the work, and removes it all.
    pub async fn with(s: &Scenario, count: usize, work: impl AsyncFnOnce(&Self) -> Result<()>) -> Result<()> {
        let done = match Self::begin(s, count).await {
            Ok(fleet) => work(&fleet).await,
            Err(error) => Err(error.context("making the fleet")),
        };
        let told = if done.is_err() { s.describe().await } else { String::new() };
        if !told.is_empty() {
            eprintln!("---- the cluster while the fleet was there:\n{told}");
        }
        done.and(Self::clear(s).await.context("removing the fleet"))
    }

    async fn begin(s: &Scenario, count: usize) -> Result<Self> {
        let nodes = s.cluster.fleet(count).await?;
        stream::iter(&nodes)
            .map(async |node| {
                agent_pod(s, node).await?;
                let plan = json!({"apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryNode",
                    "metadata": {"name": node, "labels": {LABEL: "true"}}, "spec": {}});
                plans(s).patch(node, &agent(names::manager::AGENT_NODE), &Patch::Apply(plan)).await?;
                report(s, node, FleetNode::Well, None).await
            })
            .buffer_unordered(AT_A_TIME)
            .try_collect::<()>()
            .await?;
        let reports = Arc::new(Mutex::new(vec![FleetNode::Well; nodes.len()]));
        let agents = tokio::spawn(follow(s.clone(), nodes.clone(), Arc::clone(&reports)));
        let fleet = Self { nodes, scenario: s.clone(), reports, agents };
        fleet.agents_are_ready().await?;
        Ok(fleet)
    }

    async fn agents_are_ready(&self) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.scenario.client.clone(), SYSTEM);
        let of_fleet = ListParams::default().labels(&format!("{LABEL}=true")).fields("status.phase=Running");
        eventually("the fleet's agents to be Ready", PATIENCE, async || {
            let running = pods.list_metadata(&of_fleet).await?.items.len();
            ensure!(running == self.nodes.len(), "{running} of {} are", self.nodes.len());
            Ok(())
        })
        .await
    }

    /// Removes every simulated agent and every node of the fleet.
    pub async fn clear(s: &Scenario) -> Result<()> {
        let nodes: Api<Node> = Api::all(s.client.clone());
        let of_fleet = ListParams::default().labels(&format!("{LABEL}=true"));
        let left = nodes.list_metadata(&ListParams::default().labels(FLEET)).await?.items.len();
        let at_once = DeleteParams::default().grace_period(0);
        let incidents: Api<GpuMemoryIncident> = Api::namespaced(s.client.clone(), SYSTEM);
        incidents.delete_collection(&DeleteParams::default(), &of_fleet).await?;
        plans(s).delete_collection(&DeleteParams::default(), &of_fleet).await?;
        let pods: Api<Pod> = Api::namespaced(s.client.clone(), SYSTEM);
        pods.delete_collection(&at_once, &of_fleet).await?;
        if left > 0 {
            s.cluster.fleet(0).await?;
        }
        eventually("the fleet to be gone", PATIENCE, async || {
            let pods = pods.list_metadata(&of_fleet).await?.items.len();
            ensure!(pods == 0, "{pods} of its agents are there");
            Ok(())
        })
        .await
    }

    /// Lets these nodes' devices report something else from now on.
    pub async fn report(&self, nodes: &[String], what: FleetNode) -> Result<()> {
        for node in nodes {
            let index = self.nodes.iter().position(|known| known == node).context("no such node")?;
            let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(report) = reports.get_mut(index) {
                *report = what;
            }
        }
        stream::iter(nodes)
            .map(async |node| report(&self.scenario, node, what, None).await)
            .buffer_unordered(AT_A_TIME)
            .try_collect()
            .await
    }

    /// Opens an incident about nobody on each of these nodes, as their agents do.
    pub async fn open(
        &self,
        nodes: &[String],
        policy: &str,
        kind: IncidentKind,
        action: ActionType,
    ) -> Result<()> {
        stream::iter(nodes)
            .map(async |node| self.open_about(node, policy, kind, action, None).await.map(drop))
            .buffer_unordered(AT_A_TIME)
            .try_collect()
            .await
    }

    /// Opens an incident, about a pod or about nobody; its name.
    pub async fn open_about(
        &self,
        node: &str,
        policy: &str,
        kind: IncidentKind,
        action: ActionType,
        subject: Option<&Pod>,
    ) -> Result<String> {
        static EPISODE: AtomicI64 = AtomicI64::new(1);
        let episode = EPISODE.fetch_add(1, Ordering::Relaxed);
        let s = &self.scenario;
        let now = format!("{:.6}", Timestamp::now());
        let total: i64 = 80 << 30;
        let name = format!("sim-{node}-{episode}-{}", Timestamp::now().as_millisecond());
        let mut incident = json!({
            "apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryIncident",
            "metadata": {"name": name, "labels": {LABEL: "true", names::NODE_LABEL: node}},
            "spec": {
                "kind": kind, "mode": "Enforce", "policy": policy, "node": node, "device": uuid(node),
                "episode": episode,
                "evidence": {
                    "at": now, "level": "Emergency", "levelPercent": 99, "tripPercent": 95,
                    "deviceTotalBytes": total, "deviceFreeBytes": total / 100,
                    "explanation": format!("99 % of device {} is in use", uuid(node)),
                },
                "proposed": {"action": action, "freesBytes": total / 8},
            },
        });
        let mut namespace = SYSTEM.to_owned();
        if let Some(pod) = subject {
            namespace = pod.namespace().context("a pod has a namespace")?;
            incident["spec"]["subject"] =
                json!({"namespace": namespace, "name": pod.name_any(), "uid": pod.uid()});
            incident["spec"]["evidence"]["usedBytes"] = json!(total / 2);
            incident["spec"]["evidence"]["limitBytes"] = json!(total / 4);
            incident["spec"]["evidence"]["dueBytes"] = json!(total / 4);
        }
        let incidents: Api<GpuMemoryIncident> = Api::namespaced(s.client.clone(), &namespace);
        incidents.patch(&name, &agent(names::manager::AGENT_INCIDENT), &Patch::Apply(incident)).await?;
        Ok(name)
    }

    /// Says in an incident what became of an act that its agent carries out.
    pub async fn tell_act(
        &self,
        incident: &GpuMemoryIncident,
        act: &str,
        state: ObservationState,
    ) -> Result<()> {
        let report = json!({"state": act, "message": format!("{act} by a simulated agent"), "parkedBytes": 1_i64 << 30});
        observe(&self.scenario, incident, state, Some(report)).await
    }

    /// The nodes that are cordoned now.
    pub async fn cordoned(&self) -> Result<BTreeSet<String>> {
        let nodes: Api<Node> = Api::all(self.scenario.client.clone());
        let list = nodes.list(&ListParams::default().labels(FLEET)).await?;
        let cordoned = |node: &Node| node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true);
        Ok(list.items.iter().filter(|node| cordoned(node)).map(kube::ResourceExt::name_any).collect())
    }
}

/// The UUID of a simulated node's one device.
pub(crate) fn uuid(node: &str) -> String {
    format!("GPU-{node}-0000")
}

fn plans(s: &Scenario) -> Api<GpuMemoryNode> {
    Api::all(s.client.clone())
}

fn agent(manager: &str) -> PatchParams {
    PatchParams::apply(manager).force()
}

async fn agent_pod(s: &Scenario, node: &str) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(s.client.clone(), SYSTEM);
    let name = format!("simulated-agent-{node}");
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {
            LABEL: "true",
            "app.kubernetes.io/part-of": "highwater", "app.kubernetes.io/component": "agent",
        }},
        "spec": {
            "nodeName": node, "tolerations": [{"operator": "Exists"}], "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false,
            "containers": [{"name": "agent", "image": "highwater.local/agent:dev"}],
        },
    });
    pods.patch(&name, &agent("scenario"), &Patch::Apply(pod)).await?;
    Ok(())
}

/// Writes a node's status, which follows the plan that it has now or the one that is named.
async fn report(s: &Scenario, node: &str, what: FleetNode, generation: Option<i64>) -> Result<()> {
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let well = what == FleetNode::Well;
    let generation = match generation {
        Some(generation) => Some(generation),
        None => plans(s).get_metadata(node).await?.metadata.generation,
    };
    let (level, headroom) = if well { ("Normal", "Below60") } else { ("Emergency", "Full") };
    let status = json!({
        "apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryNode", "metadata": {"name": node},
        "status": {
            "observedGeneration": generation,
            "conditions": [{
                "type": "Monitored", "status": "True", "reason": "AllDevices", "message": "",
                "lastTransitionTime": now,
            }],
            "driverVersion": if well { "580.159.04" } else { "580.0.0" }, "agentVersion": "simulated",
            "level": level, "deviceCount": 1,
            "models": [{"product": "NVIDIA H200", "partition": "Whole", "memory": "80Gi"}],
            // Where all is well it is empty, so that there is room.
            "devices": [{"uuid": uuid(node), "level": level, "headroom": headroom, "pods": i32::from(!well)}],
        },
    });
    plans(s).patch_status(node, &agent(names::manager::AGENT_NODE), &Patch::Apply(status)).await?;
    Ok(())
}

/// What all agents of the fleet do from now on.
async fn follow(s: Scenario, nodes: Vec<String>, reports: Arc<Mutex<Vec<FleetNode>>>) {
    let mut observed = vec![None; nodes.len()];
    loop {
        // Whatever fails is tried again.
        if let Err(error) = follow_plans(&s, &nodes, &reports, &mut observed).await {
            eprintln!("a simulated agent: {error:#}");
        }
        if let Err(error) = answer(&s, &nodes, &reports).await {
            eprintln!("a simulated agent: {error:#}");
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn follow_plans(
    s: &Scenario,
    nodes: &[String],
    reports: &Mutex<Vec<FleetNode>>,
    observed: &mut [Option<i64>],
) -> Result<()> {
    let of_fleet = ListParams::default().labels(&format!("{LABEL}=true"));
    let list = plans(s).list_metadata(&of_fleet).await?;
    let reports = reports.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut changed = Vec::new();
    for plan in &list.items {
        let index = nodes.iter().position(|node| *node == plan.name_any());
        if let Some((index, known)) = index.and_then(|index| Some((index, observed.get_mut(index)?)))
            && *known != plan.metadata.generation
        {
            *known = plan.metadata.generation;
            let report = reports.get(index).copied().unwrap_or(FleetNode::Well);
            changed.push((plan.name_any(), report, plan.metadata.generation));
        }
    }
    stream::iter(changed)
        .map(async |(node, what, generation)| report(s, &node, what, generation).await)
        .buffer_unordered(AT_A_TIME)
        .try_collect()
        .await
}

/// Looks again where the operator asks for it, while an act is verified, and where something is
/// not as it was.
async fn answer(s: &Scenario, nodes: &[String], reports: &Mutex<Vec<FleetNode>>) -> Result<()> {
    let incidents: Api<GpuMemoryIncident> = Api::all(s.client.clone());
    let list = incidents.list(&ListParams::default().labels(&format!("{LABEL}=true"))).await?;
    let pods = s.api::<Pod>().list(&ListParams::default()).await?;
    let reports = reports.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let now = Timestamp::now();
    let mut due = Vec::new();
    for incident in list.items {
        let index = nodes.iter().position(|known| *known == incident.spec.node);
        let what = index.and_then(|index| reports.get(index).copied()).unwrap_or(FleetNode::Well);
        let state = seen_now(&incident, what, &pods.items);
        if is_due(&incident, state, now) {
            due.push((incident, what, state));
        }
    }
    stream::iter(due)
        .map(async |(incident, what, state): (GpuMemoryIncident, FleetNode, ObservationState)| {
            if what == FleetNode::Sick && state == ObservationState::Recovered {
                report(s, &incident.spec.node, FleetNode::Well, None).await?;
            }
            observe(s, &incident, state, None).await
        })
        .buffer_unordered(AT_A_TIME)
        .try_collect()
        .await
}

fn seen_now(incident: &GpuMemoryIncident, what: FleetNode, pods: &[Pod]) -> ObservationState {
    if let Some(subject) = &incident.spec.subject {
        let there = pods.iter().any(|pod| pod.uid().as_deref() == Some(&subject.uid));
        return if there { ObservationState::Over } else { ObservationState::Gone };
    }
    let taken = pods
        .iter()
        .any(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&incident.spec.node));
    match what {
        FleetNode::Lying => ObservationState::Over,
        FleetNode::Sick if taken => ObservationState::Over,
        FleetNode::Sick | FleetNode::Well => ObservationState::Recovered,
    }
}

fn is_due(incident: &GpuMemoryIncident, state: ObservationState, now: Timestamp) -> bool {
    let status = incident.status.as_ref();
    let decision = status.and_then(|status| status.decision.as_ref());
    if decision.is_some_and(|decision| decision.state.is_final()) {
        return false;
    }
    let asked = incident.annotations().get(names::OBSERVE).and_then(|at| at.parse::<Timestamp>().ok());
    let under_way = decision
        .is_some_and(|decision| matches!(decision.state, DecisionState::Approved | DecisionState::Verifying));
    match status.and_then(|status| status.observation.as_ref()) {
        // Told by the scenario itself.
        Some(seen) if seen.act.is_some() => false,
        Some(seen) => {
            seen.state != state
                || asked.is_some_and(|asked| seen.at.0 < asked)
                || (under_way && elapsed(seen.at.0, now) >= RENEW)
        }
        None => state != ObservationState::Over || asked.is_some() || under_way,
    }
}

async fn observe(
    s: &Scenario,
    incident: &GpuMemoryIncident,
    state: ObservationState,
    act: Option<Value>,
) -> Result<()> {
    let namespace = incident.namespace().context("an incident has a namespace")?;
    let incidents: Api<GpuMemoryIncident> = Api::namespaced(s.client.clone(), &namespace);
    let bytes = if state == ObservationState::Over { 40_i64 << 30 } else { 0 };
    let mut observation = json!({"state": state, "bytes": bytes, "at": format!("{:.6}", Timestamp::now())});
    if let Some(act) = act {
        observation["act"] = act;
    }
    let status = json!({
        "apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryIncident",
        "metadata": {"name": incident.name_any()},
        "status": {"observation": observation},
    });
    let parameters = agent(names::manager::AGENT_OBSERVATION);
    match incidents.patch_status(&incident.name_any(), &parameters, &Patch::Apply(status)).await {
        // Removed meanwhile.
        Err(kube::Error::Api(error)) if error.code == 404 => Ok(()),
        done => Ok(done.map(drop)?),
    }
}

impl Scenario {
    /// How many nodes a scenario's fleet has: 1,000, or what `FLEET_NODES` says.
    pub fn fleet_size(&self) -> usize {
        std::env::var("FLEET_NODES").ok().and_then(|count| count.parse().ok()).unwrap_or(1000)
    }

    /// Waits until the agents of a fleet follow the plan that a policy makes.
    pub async fn fleet_follows(&self, policy: &str) -> Result<()> {
        self.policy_condition(policy, "Accepted", "True", "Accepted").await?;
        let of_fleet = ListParams::default().labels(&format!("{LABEL}=true"));
        eventually("the fleet to follow its plan", PATIENCE, async || {
            let list = plans(self).list(&of_fleet).await?;
            let behind = list.items.iter().filter(|node| {
                let observed = node.status.as_ref().and_then(|status| status.observed_generation);
                node.spec.layers.is_empty() || observed != node.metadata.generation
            });
            let behind = behind.count();
            ensure!(behind == 0, "{behind} of {} do not", list.items.len());
            Ok(())
        })
        .await
        .with_context(|| format!("policy {policy}"))
    }
}
