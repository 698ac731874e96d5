//! One scenario: what it may touch, and what is told and cleaned up when it ends.

use std::{
    panic::Location,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use highwater_crds::{DecisionState, GpuMemoryIncident, GpuMemoryNode, GpuMemoryPolicy, IncidentKind, names};
use highwater_e2e::{Cluster, eventually};
use jiff::Timestamp;
use k8s_openapi::api::{
    apps::v1::{Deployment, StatefulSet},
    core::v1::{Event, Namespace, Node, Pod},
    events::v1::Event as EventV1,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
    discovery::ApiResource,
};
use serde_json::{Value, json};

use crate::{
    ModelServer, NODE, SYSTEM, Samples, SimulatedFleet, TIMEOUT, deployment, metrics, policy, report,
};

/// Marks the namespaces of scenarios.
const LABEL: &str = "highwater.dev/scenario";

/// A namespace of its own on the shared cluster, with what the scenario needs at hand.
#[derive(Clone)]
pub struct Scenario {
    /// The cluster.
    pub cluster: Cluster,
    /// The administrator's client.
    pub client: Client,
    /// The scenario's own namespace.
    pub namespace: String,
}

impl std::fmt::Debug for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scenario").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// Runs a scenario in a namespace named after it. When it fails, what the cluster looked like is
/// printed, in short, and the error as the last line; its policies, its namespace and every fault of
/// the simulated GPUs are removed in either case.
///
/// # Errors
/// Whatever the body fails with; and where no cluster is up.
#[track_caller]
pub fn scenario(name: &str, body: impl AsyncFnOnce(&Scenario) -> Result<()>) -> Result<()> {
    // One cluster, one scenario at a time.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let place = Location::caller();
    let cluster = Cluster::attach()?;
    cluster.clone().block_on(async move {
        let scenario = Scenario::begin(cluster, name).await?;
        let result = body(&scenario).await;
        if result.is_err() {
            eprintln!(
                "---- {name} ({place}) failed; the cluster at that moment:\n{}",
                scenario.describe().await
            );
            scenario.keep_details().await;
        }
        let cleaned = scenario.clean_up().await.context("cleaning up");
        // The last that is printed, in one line: what comes before may be cut.
        result
            .and(cleaned)
            .map_err(|error| anyhow!("{name} ({place}): {}", report::one_line(&format!("{error:#}"))))
    })?
}

impl Scenario {
    /// Clears what earlier runs left on the cluster and makes an empty namespace.
    pub async fn begin(cluster: Cluster, name: &str) -> Result<Self> {
        let client = cluster.client().await?;
        // Not the same name twice: a namespace takes its time to go, and need not be waited for.
        let unique = Timestamp::now().as_millisecond() % 100_000;
        let scenario = Self { cluster, client, namespace: format!("{name}-{unique}") };
        scenario.clean_up().await.context("clearing what an earlier run left")?;
        SimulatedFleet::clear(&scenario).await.context("clearing the fleet that an earlier run left")?;
        scenario.create_namespace().await?;
        Ok(scenario)
    }

    async fn create_namespace(&self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let namespace: Namespace = serde_json::from_value(json!({
            "metadata": {"name": self.namespace, "labels": {LABEL: "true"}},
        }))?;
        namespaces.create(&PostParams::default(), &namespace).await?;
        Ok(())
    }

    /// Leaves the cluster as it was.
    pub async fn end(&self) -> Result<()> {
        self.clean_up().await
    }

    /// Removes every policy, every scenario's pods and every fault; their namespaces go on their own.
    async fn clean_up(&self) -> Result<()> {
        // As whatever is stored there: a scenario may have left what the types cannot parse.
        let policies =
            ApiResource::from_gvk(&GroupVersionKind::gvk(names::GROUP, "v1alpha1", "GpuMemoryPolicy"));
        let policies: Api<DynamicObject> = Api::all_with(self.client.clone(), &policies);
        for policy in policies.list_metadata(&ListParams::default()).await? {
            policies.delete(&policy.name_any(), &DeleteParams::default()).await?;
        }
        for node in self.nodes() {
            self.cluster.gpusim(&node, &["clear"]).await?;
            self.as_it_was(&node).await.with_context(|| format!("restoring node {node}"))?;
        }
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        for namespace in namespaces.list(&ListParams::default().labels(&format!("{LABEL}=true"))).await? {
            let name = namespace.name_any();
            self.empty(&name).await.with_context(|| format!("emptying namespace {name}"))?;
            if namespace.metadata.deletion_timestamp.is_none() {
                namespaces.delete(&name, &DeleteParams::default()).await?;
            }
        }
        Ok(())
    }

    /// Ends every pod of a namespace and whatever would start it anew.
    async fn empty(&self, namespace: &str) -> Result<()> {
        let all = ListParams::default();
        let now = DeleteParams::background();
        Api::<Deployment>::namespaced(self.client.clone(), namespace).delete_collection(&now, &all).await?;
        Api::<StatefulSet>::namespaced(self.client.clone(), namespace).delete_collection(&now, &all).await?;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        eventually("its pods to be gone", Duration::from_secs(90), async || {
            // What ignores SIGTERM on purpose need not be waited for.
            pods.delete_collection(&DeleteParams::default().grace_period(1), &all).await?;
            let left = pods.list_metadata(&all).await?.items.len();
            ensure!(left == 0, "{left} are there");
            Ok(())
        })
        .await
    }

    /// The names of the real nodes.
    pub fn nodes(&self) -> Vec<String> {
        self.cluster.spec.nodes().map(highwater_e2e::spec::Node::name).collect()
    }

    /// An API for objects of a kind in the scenario's namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Applies an object, in the scenario's namespace where its kind has one.
    pub async fn apply(&self, object: &Value) -> Result<()> {
        self.patch(object, false).await
    }

    /// What the API server says to an object, without storing it.
    pub async fn dry_run(&self, object: &Value) -> Result<()> {
        self.patch(object, true).await
    }

    async fn patch(&self, object: &Value, dry_run: bool) -> Result<()> {
        let api_version = object["apiVersion"].as_str().context("no apiVersion")?;
        let kind = object["kind"].as_str().context("no kind")?;
        let name = object["metadata"]["name"].as_str().context("no name")?;
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let cluster_wide =
            matches!(kind, "GpuMemoryPolicy" | "GpuMemoryNode" | "Node" | "Namespace" | "PriorityClass");
        let api: Api<DynamicObject> = if cluster_wide {
            Api::all_with(self.client.clone(), &resource)
        } else {
            Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
        };
        let parameters = PatchParams {
            dry_run,
            force: true,
            field_manager: Some("scenario".into()),
            ..PatchParams::default()
        };
        let parameters = parameters.validation_strict();
        api.patch(name, &parameters, &Patch::Apply(object)).await?;
        Ok(())
    }

    /// Deletes a policy.
    pub async fn delete_policy(&self, name: &str) -> Result<()> {
        let policies: Api<GpuMemoryPolicy> = Api::all(self.client.clone());
        policies.delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Waits until a condition of a policy has this status and reason; returns its message.
    pub async fn policy_condition(
        &self,
        name: &str,
        type_: &str,
        status: &str,
        reason: &str,
    ) -> Result<String> {
        let policies: Api<GpuMemoryPolicy> = Api::all(self.client.clone());
        eventually(&format!("policy {name}: {type_}={status}/{reason}"), TIMEOUT, async || {
            let policy = policies.get(name).await?;
            let generation = policy.metadata.generation;
            let conditions = policy.status.map(|status| status.conditions).unwrap_or_default();
            let condition = conditions.iter().find(|condition| condition.type_ == type_);
            let condition = condition.context("there is no such condition")?;
            if condition.status == status
                && condition.reason == reason
                && condition.observed_generation == generation
            {
                return Ok(condition.message.clone());
            }
            Err(anyhow!("{type_} is {}/{}: {}", condition.status, condition.reason, condition.message))
        })
        .await
    }

    /// Applies a policy with this spec, and waits until the node's agent follows it.
    pub async fn program(&self, name: &str, spec: Value) -> Result<()> {
        self.apply(&policy(name, spec)).await?;
        self.programmed(name).await
    }

    /// Applies a model server that follows a script, and waits until its pod runs.
    pub async fn start(&self, name: &str, script: &str) -> Result<Pod> {
        self.apply(&deployment(name, script)).await?;
        self.running(name).await
    }

    /// Applies a model server of this name, and waits until its pod runs.
    pub async fn start_server(&self, name: &str, server: &ModelServer) -> Result<Pod> {
        self.apply(&server.deployment()).await?;
        self.running(name).await
    }

    /// Takes a model server away; its pods end by themselves.
    pub async fn remove(&self, name: &str) -> Result<()> {
        self.api::<Deployment>().delete(name, &DeleteParams::background()).await?;
        Ok(())
    }

    /// The same for a model server that opted in to the guard.
    pub async fn start_guarded(&self, name: &str, script: &str) -> Result<Pod> {
        self.start_server(name, &ModelServer::new(name, script).guarded()).await
    }

    /// Waits until the policy is programmed and the node's agent follows that plan.
    pub async fn programmed(&self, name: &str) -> Result<()> {
        self.policy_condition(name, "Programmed", "True", "Programmed").await?;
        self.plan_followed().await
    }

    /// Waits until the node's agent follows the node's present plan.
    pub async fn plan_followed(&self) -> Result<()> {
        let nodes: Api<GpuMemoryNode> = Api::all(self.client.clone());
        eventually("the agent to follow the plan", TIMEOUT, async || {
            let node = nodes.get(NODE).await?;
            let observed = node.status.and_then(|status| status.observed_generation);
            ensure!(
                observed.is_some() && observed == node.metadata.generation,
                "it follows {observed:?} of {:?}",
                node.metadata.generation
            );
            Ok(())
        })
        .await
    }

    /// Waits until a pod with label `app` runs (and is not on its way out), and returns it.
    pub async fn running(&self, app: &str) -> Result<Pod> {
        self.running_other_than(app, None).await
    }

    /// Waits until a pod with label `app` runs that has another UID than `old`.
    pub async fn running_other_than(&self, app: &str, old: Option<&str>) -> Result<Pod> {
        let pods: Api<Pod> = self.api();
        eventually(&format!("a running pod of {app}"), TIMEOUT, async || {
            let list = pods.list(&ListParams::default().labels(&format!("app={app}"))).await?;
            let found = list.into_iter().find(|pod| {
                pod.metadata.deletion_timestamp.is_none()
                    && pod.metadata.uid.as_deref() != old
                    && pod.status.as_ref().is_some_and(|status| {
                        status.phase.as_deref() == Some("Running")
                            && status.container_statuses.iter().flatten().all(|container| container.ready)
                    })
            });
            found.context("there is none")
        })
        .await
    }

    /// Fails where a pod is not what it was: gone, replaced, restarted, or on its way out.
    pub async fn untouched(&self, pod: &Pod) -> Result<()> {
        let name = pod.name_any();
        let now =
            self.api::<Pod>().get(&name).await.with_context(|| format!("{name} should be untouched"))?;
        let restarts: i32 = now
            .status
            .iter()
            .flat_map(|s| s.container_statuses.iter().flatten())
            .map(|c| c.restart_count)
            .sum();
        if now.metadata.uid != pod.metadata.uid || now.metadata.deletion_timestamp.is_some() || restarts > 0 {
            bail!(
                "{name} was touched: uid {:?}, {restarts} restarts, deletion {:?}",
                now.uid(),
                now.metadata.deletion_timestamp
            );
        }
        Ok(())
    }

    /// Fails where a pod that follows `serve` had a call to the driver that failed.
    pub async fn served_without_failure(&self, pod: &Pod) -> Result<()> {
        let log = self.cluster.logs(&self.namespace, &pod.name_any(), None, 1000).await?;
        let served: Vec<_> = log.lines().filter(|line| line.contains(" serve used=")).collect();
        ensure!(!served.is_empty(), "{} never served:\n{log}", pod.name_any());
        let failed: Vec<_> = served.iter().filter(|line| !line.contains(" failed=0 ")).collect();
        ensure!(failed.is_empty(), "{} had calls that failed: {failed:?}", pod.name_any());
        Ok(())
    }

    /// Every incident of the scenario's namespace.
    pub async fn incidents(&self) -> Result<Vec<GpuMemoryIncident>> {
        Ok(self.api::<GpuMemoryIncident>().list(&ListParams::default()).await?.items)
    }

    /// Waits until an incident about a pod has reached a state for a reason, and returns it.
    ///
    /// Fails at once where it ended in another way.
    pub async fn incident(&self, pod: &Pod, state: DecisionState, reason: &str) -> Result<GpuMemoryIncident> {
        self.incident_within(pod, state, reason, TIMEOUT).await
    }

    /// The same with another time-out.
    pub async fn incident_within(
        &self,
        pod: &Pod,
        state: DecisionState,
        reason: &str,
        timeout: Duration,
    ) -> Result<GpuMemoryIncident> {
        let uid = pod.uid().unwrap_or_default();
        let incidents: Api<GpuMemoryIncident> = Api::all(self.client.clone());
        self.incident_where(
            &incidents,
            &format!("about {}", pod.name_any()),
            state,
            reason,
            timeout,
            |incident| incident.spec.subject.as_ref().is_some_and(|subject| subject.uid == uid),
        )
        .await
    }

    /// Waits until the latest incident about a pod has ended; its state and reason.
    pub async fn incident_ended(&self, pod: &Pod) -> Result<(DecisionState, String)> {
        let uid = pod.uid().unwrap_or_default();
        eventually(&format!("the end of the incident about {}", pod.name_any()), TIMEOUT, async || {
            let incidents = self.incidents().await?;
            let about =
                |i: &&GpuMemoryIncident| i.spec.subject.as_ref().is_some_and(|subject| subject.uid == uid);
            let incident =
                incidents.iter().filter(about).max_by_key(|i| i.spec.episode).context("there is none")?;
            let decision = incident.status.as_ref().and_then(|status| status.decision.clone());
            let decision = decision.context("it has no decision")?;
            ensure!(decision.state.is_final(), "it is {:?}/{}", decision.state, decision.reason);
            Ok((decision.state, decision.reason))
        })
        .await
    }

    /// Waits until an incident without a subject has reached a state for a reason.
    pub async fn incident_without_subject(
        &self,
        policy: &str,
        state: DecisionState,
        reason: &str,
    ) -> Result<GpuMemoryIncident> {
        let incidents: Api<GpuMemoryIncident> = Api::namespaced(self.client.clone(), SYSTEM);
        self.incident_where(&incidents, "about nobody", state, reason, TIMEOUT, |incident| {
            incident.spec.subject.is_none()
                && incident.spec.kind == IncidentKind::Breaker
                && incident.spec.policy == policy
        })
        .await
    }

    async fn incident_where(
        &self,
        incidents: &Api<GpuMemoryIncident>,
        about: &str,
        state: DecisionState,
        reason: &str,
        timeout: Duration,
        matches: impl Fn(&GpuMemoryIncident) -> bool,
    ) -> Result<GpuMemoryIncident> {
        let what = format!("an incident {about} that is {state:?}/{reason}");
        let found = eventually(&what, timeout, async || {
            let mut found: Vec<_> = incidents.list(&ListParams::default()).await?.items;
            found.retain(&matches);
            found.sort_by_key(|incident| incident.metadata.creation_timestamp.clone());
            let incident = found.pop().context("there is no such incident")?;
            let decision = incident.status.as_ref().and_then(|status| status.decision.as_ref());
            match decision {
                Some(decision) if decision.state == state && decision.reason == reason => Ok(Ok(incident)),
                Some(decision) if decision.state.is_final() => Ok(Err(anyhow!(
                    "{what}: it ended {:?}/{}: {}",
                    decision.state,
                    decision.reason,
                    decision.message
                ))),
                Some(decision) => {
                    Err(anyhow!("it is {:?}/{}: {}", decision.state, decision.reason, decision.message))
                }
                None => Err(anyhow!("it has no decision")),
            }
        });
        found.await?
    }

    /// The reasons of the Events about an object, by either Events API.
    pub async fn events_about(&self, name: &str) -> Result<Vec<String>> {
        let core: Api<Event> = self.api();
        let list = core.list(&ListParams::default().fields(&format!("involvedObject.name={name}"))).await?;
        let mut reasons: Vec<String> = list.items.into_iter().filter_map(|event| event.reason).collect();
        let events: Api<EventV1> = self.api();
        let list = events.list(&ListParams::default().fields(&format!("regarding.name={name}"))).await?;
        reasons.extend(list.items.into_iter().filter_map(|event| event.reason));
        reasons.sort_unstable();
        reasons.dedup();
        Ok(reasons)
    }

    /// Waits for an Event about an object.
    pub async fn event(&self, name: &str, reason: &str) -> Result<()> {
        eventually(&format!("an Event {reason} about {name}"), TIMEOUT, async || {
            let reasons = self.events_about(name).await?;
            ensure!(reasons.iter().any(|seen| seen == reason), "its Events are {reasons:?}");
            Ok(())
        })
        .await
    }

    /// The agent's pod on a node.
    pub async fn agent(&self, node: &str) -> Result<Pod> {
        self.component("agent", node).await
    }

    /// The pod of a component on a node: `agent` or `keeper`.
    pub async fn component(&self, component: &str, node: &str) -> Result<Pod> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
        let selector = ListParams::default()
            .labels(&format!("app.kubernetes.io/component={component}"))
            .fields(&format!("spec.nodeName={node},status.phase=Running"));
        let list = pods.list(&selector).await?;
        list.into_iter()
            .find(|pod| pod.metadata.deletion_timestamp.is_none())
            .with_context(|| format!("no {component} runs on {node}"))
    }

    /// Waits for a metric of a node's agent to satisfy a condition; returns its value.
    pub async fn metric_on(
        &self,
        node: &str,
        name: &str,
        labels: &[(&str, &str)],
        holds: impl Fn(Option<i64>) -> bool,
    ) -> Result<Option<i64>> {
        eventually(&format!("{name}{labels:?} of {node} as expected"), TIMEOUT, async || {
            let value = self.metrics(node).await?.bytes(name, labels)?;
            ensure!(holds(value), "it is {value:?}");
            Ok(value)
        })
        .await
    }

    /// Scrapes the agent of a node.
    pub async fn metrics(&self, node: &str) -> Result<Samples> {
        let agent = self.agent(node).await?;
        Samples::scrape(&address(&agent, 9440)?).await
    }

    /// Waits for a metric of the node's agent to satisfy a condition; returns its value.
    pub async fn metric(
        &self,
        name: &str,
        labels: &[(&str, &str)],
        holds: impl Fn(Option<i64>) -> bool,
    ) -> Result<Option<i64>> {
        eventually(&format!("{name}{labels:?} as expected"), TIMEOUT, async || {
            let value = self.metrics(NODE).await?.bytes(name, labels)?;
            ensure!(holds(value), "it is {value:?}");
            Ok(value)
        })
        .await
    }

    /// The index of the one device that a pod was given.
    pub async fn device_of(&self, pod: &Pod) -> Result<String> {
        let name = pod.name_any();
        eventually(&format!("the device of {name}"), TIMEOUT, async || {
            let mut devices = self.metrics(NODE).await?.devices_of(&name);
            ensure!(devices.len() == 1, "it has {devices:?}");
            devices.pop().context("none")
        })
        .await
    }

    /// The operator's pods.
    pub async fn operators(&self) -> Result<Vec<Pod>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
        let selector = ListParams::default().labels("app.kubernetes.io/component=operator");
        Ok(pods.list(&selector).await?.items)
    }

    /// Scrapes every operator replica that runs.
    pub async fn operator_metrics(&self) -> Result<Vec<(String, Samples)>> {
        let mut all = Vec::new();
        for pod in self.operators().await? {
            if pod.metadata.deletion_timestamp.is_none()
                && let Ok(samples) = Samples::scrape(&address(&pod, 9441)?).await
            {
                all.push((pod.name_any(), samples));
            }
        }
        Ok(all)
    }

    /// `gpusim ctl inject ARGUMENTS` on a node: begins a fault. Every fault ends with the scenario.
    pub async fn fault(&self, node: &str, arguments: &[&str]) -> Result<()> {
        let arguments: Vec<_> = ["inject"].iter().chain(arguments).copied().collect();
        self.cluster.gpusim(node, &arguments).await.map(drop)
    }

    /// The body of a page of a pod.
    pub async fn page(&self, pod: &Pod, port: u16, path: &str) -> Result<String> {
        metrics::get(&address(pod, port)?, path).await
    }

    /// Sets (`Some`) or removes (`None`) the pause annotation on a namespace.
    pub async fn pause_namespace(&self, namespace: &str, paused: bool) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces.patch(namespace, &PatchParams::default(), &Patch::Merge(pause_patch(paused))).await?;
        Ok(())
    }

    /// Sets or removes the pause annotation on a node.
    pub async fn pause_node(&self, node: &str, paused: bool) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes.patch(node, &PatchParams::default(), &Patch::Merge(pause_patch(paused))).await?;
        Ok(())
    }
}

fn pause_patch(paused: bool) -> Value {
    let value = if paused { json!("true") } else { Value::Null };
    json!({"metadata": {"annotations": {names::PAUSED: value}}})
}

fn address(pod: &Pod, port: u16) -> Result<String> {
    let ip =
        pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).context("the pod has no address")?;
    Ok(format!("{ip}:{port}"))
}
