//! A fleet of 1,000 nodes: what is wrong everywhere is a fault of measurement, and what is wrong on
//! few nodes is dealt with there, within budget, and nowhere else.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use highwater_crds::{ActionType, DecisionState, GpuMemoryIncident, IncidentKind, ObservationState};
use highwater_e2e::{eventually, never};
use highwater_scenarios::{
    FleetNode, ModelServer, Scenario, SimulatedFleet, TIMEOUT, broken_by, critical, policy, scenario,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::{Value, json};

/// Acts that the fleet's budget allows in a minute.
const A_MINUTE: i32 = 60;

fn fleet_policy(s: &Scenario) -> Value {
    let mut spec = broken_by(&s.namespace, "75Gi", &critical(95, 90, &json!([{"type": "Drain"}])));
    spec["nodes"] = json!({"matchLabels": {"highwater.dev/fleet": "true"}});
    spec["remediation"]["budget"] = json!({
        "maxUnavailable": 10, "haltAtCondemnedPercent": 10,
        "rates": [{"scope": "Fleet", "maxActions": A_MINUTE, "windowMinutes": 1}],
    });
    spec
}

#[test]
#[ignore = "takes minutes: make fleet"]
fn d02_d06_a_driver_that_is_wrong_everywhere_drains_nothing_and_few_sick_nodes_are_dealt_with() -> Result<()>
{
    scenario("fleet", async |s| {
        let size = s.fleet_size();
        SimulatedFleet::with(s, size, async |fleet| {
            s.apply(&policy(&s.namespace, fleet_policy(s))).await?;
            s.fleet_follows(&s.namespace).await?;
            let sick: Vec<String> = fleet.nodes.iter().step_by(20).cloned().collect();
            let spare = fleet.nodes.iter().skip(1).step_by(20);
            let pods = load(s, &sick.iter().zip(spare).collect::<Vec<_>>()).await?;
            wrong_everywhere(s, fleet).await.context("99 % everywhere")?;
            few_are_sick(s, fleet, &sick, &pods)
                .await
                .with_context(|| format!("{} of {size} are sick", sick.len()))
        })
        .await
    })
}

/// One pod on each of these nodes that may run on a spare one as well, by the node.
async fn load(s: &Scenario, nodes: &[(&String, &String)]) -> Result<BTreeMap<String, Pod>> {
    stream::iter(nodes)
        .map(async |(node, spare)| {
            let mut deployment = ModelServer::new(&format!("on-{node}"), "hold").anywhere().deployment();
            let spec = &mut deployment["spec"]["template"]["spec"];
            spec["tolerations"] = json!([{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]);
            let named = |name: &String| {
                json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]})
            };
            // Both are named: of a large fleet the scheduler looks at a part only.
            spec["affinity"] = json!({"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [named(node), named(spare)]},
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": named(node)}],
            }});
            s.apply(&deployment).await
        })
        .buffer_unordered(16)
        .try_collect::<()>()
        .await?;
    eventually("a pod on each of the nodes", 3 * TIMEOUT, async || {
        let mut found = BTreeMap::new();
        for pod in s.api::<Pod>().list(&ListParams::default()).await? {
            let place = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
            let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
            if phase.as_deref() == Some("Running") {
                ensure!(nodes.iter().any(|(node, _)| **node == place), "{} runs on {place}", pod.name_any());
                found.insert(place, pod);
            }
        }
        ensure!(found.len() == nodes.len(), "{} of {} run", found.len(), nodes.len());
        Ok(found)
    })
    .await
}

async fn wrong_everywhere(s: &Scenario, fleet: &SimulatedFleet) -> Result<()> {
    let (start, began) = (Timestamp::now(), Instant::now());
    fleet.report(&fleet.nodes, FleetNode::Lying).await?;
    let reported = began.elapsed();
    fleet.open(&fleet.nodes, &s.namespace, IncidentKind::Breaker, ActionType::Drain).await?;
    let opened = began.elapsed();
    halted(s, true).await?;
    decided(s, fleet.nodes.len(), |state, reason| {
        (state, reason) == (DecisionState::Proposed, "FleetHalted")
    })
    .await?;
    println!(
        "{} nodes at 99 %: reported after {:.0} s, their incidents opened after {:.0} s, all of them held back \
         after {:.0} s",
        fleet.nodes.len(),
        reported.as_secs_f64(),
        opened.as_secs_f64(),
        began.elapsed().as_secs_f64(),
    );
    // One condition on the policy, not one on each of its nodes.
    s.policy_condition(&s.namespace, "Halted", "True", "FleetHalted").await?;
    eventually("one Event about the halt", TIMEOUT, async || {
        let fields = format!("reason=FleetHalted,involvedObject.name={}", s.namespace);
        let arguments = ["get", "events", "-A", "--field-selector", &fields, "--no-headers"];
        let events = s.cluster.kubectl(arguments).await?;
        let count = events.lines().count();
        ensure!((1..=3).contains(&count), "there are {count}");
        Ok(())
    })
    .await?;
    never("a drain of a fleet that is only measured wrongly", Duration::from_secs(5), async || {
        fleet.cordoned().await?.pop_first().context("none")
    })
    .await?;

    // D06: the driver is mended. Recovery is let through, and nothing of what was is made up for.
    fleet.report(&fleet.nodes, FleetNode::Well).await?;
    decided(s, fleet.nodes.len(), |state, reason| (state, reason) == (DecisionState::Cancelled, "Recovered"))
        .await?;
    halted(s, false).await?;
    s.policy_condition(&s.namespace, "Halted", "False", "WithinLimits").await?;
    never("an act that was due before the halt", Duration::from_secs(5), async || {
        fleet.cordoned().await?.pop_first().context("none")
    })
    .await?;
    let evictions = s.evictions_since(start)?;
    ensure!(evictions.is_empty(), "{} evictions", evictions.len());
    Ok(())
}

/// Waits until the leading operator says so.
async fn halted(s: &Scenario, halted: bool) -> Result<()> {
    eventually(&format!("highwater_fleet_halted to be {halted}"), 3 * TIMEOUT, async || {
        let mut told = Vec::new();
        for (_, samples) in s.operator_metrics().await? {
            if samples.value("highwater_operator_leader", &[])? == Some(1.0) {
                told.extend(samples.values("highwater_fleet_halted", &[]));
            }
        }
        let expected = if halted { 1.0 } else { 0.0 };
        ensure!(told == [expected], "the leader says {told:?}");
        Ok(())
    })
    .await
}

/// Waits until so many incidents of the policy have been decided so.
async fn decided(s: &Scenario, count: usize, so: impl Fn(DecisionState, &str) -> bool) -> Result<()> {
    eventually(&format!("the decisions on {count} incidents"), 4 * TIMEOUT, async || {
        let incidents = s.incidents_of(&s.namespace).await?;
        let mut as_awaited = 0;
        let mut others = BTreeMap::new();
        for decision in incidents.iter().filter_map(|incident| incident.status.as_ref()?.decision.as_ref()) {
            if so(decision.state, &decision.reason) {
                as_awaited += 1;
            } else {
                *others.entry(format!("{:?}/{}", decision.state, decision.reason)).or_insert(0) += 1;
            }
        }
        ensure!(as_awaited >= count, "{as_awaited} of {}; others {others:?}", incidents.len());
        Ok(())
    })
    .await
}

async fn few_are_sick(
    s: &Scenario,
    fleet: &SimulatedFleet,
    sick: &[String],
    pods: &BTreeMap<String, Pod>,
) -> Result<()> {
    let (start, began) = (Timestamp::now(), Instant::now());
    fleet.report(sick, FleetNode::Sick).await?;
    fleet.open(sick, &s.namespace, IncidentKind::Breaker, ActionType::Drain).await?;
    // Two tokens a node, for the cordon and the eviction.
    let minutes = u32::try_from(2 * sick.len())?.div_ceil(u32::try_from(A_MINUTE)?);
    let bound = Duration::from_mins(u64::from(minutes) + 2);
    let succeeded = |incident: &GpuMemoryIncident| {
        let decision = incident.status.as_ref().and_then(|status| status.decision.as_ref());
        incident.spec.evidence.at.0 >= start
            && decision.is_some_and(|decision| decision.state == DecisionState::Succeeded)
    };
    eventually("every sick node to be dealt with", bound, async || {
        let incidents = s.incidents_of(&s.namespace).await?;
        let done = incidents.iter().filter(|incident| succeeded(incident)).count();
        ensure!(done == sick.len(), "{done} of {}", sick.len());
        Ok(())
    })
    .await?;
    println!(
        "{} of {} nodes sick: all dealt with after {:.0} s, of {} s at most",
        sick.len(),
        fleet.nodes.len(),
        began.elapsed().as_secs_f64(),
        bound.as_secs(),
    );

    let evictions = s.evictions_since(start)?;
    let evicted: BTreeSet<_> = evictions.iter().map(|write| write.name.as_str()).collect();
    let expected: BTreeSet<String> = pods.values().map(kube::ResourceExt::name_any).collect();
    ensure!(
        evictions.len() == evicted.len(),
        "a pod was evicted twice: {} of {}",
        evictions.len(),
        evicted.len()
    );
    ensure!(expected.iter().all(|name| evicted.contains(name.as_str())), "somebody was not evicted");
    ensure!(evicted.len() == expected.len(), "{} were evicted, not {}", evicted.len(), expected.len());
    within_budget(&evictions.iter().map(|write| write.at).collect::<Vec<_>>())?;

    // No other node was touched, and these are open again.
    let touched: BTreeSet<_> = s
        .writes_since(start)?
        .into_iter()
        .filter(|write| write.resource == "nodes" && write.code < 300)
        .map(|write| write.name)
        .collect();
    let others: Vec<_> = touched.iter().filter(|name| !sick.contains(name)).collect();
    ensure!(others.is_empty(), "nodes that were well were written: {others:?}");
    eventually("every cordon to be undone", TIMEOUT, async || {
        let cordoned = fleet.cordoned().await?;
        ensure!(cordoned.is_empty(), "{cordoned:?} are cordoned");
        Ok(())
    })
    .await
}

/// In no minute more acts than the budget allows.
fn within_budget(acts: &[Timestamp]) -> Result<()> {
    let most = usize::try_from(A_MINUTE)?;
    for (index, first) in acts.iter().enumerate() {
        let end = first.checked_add(Duration::from_mins(1))?;
        let count = acts.iter().skip(index).take_while(|at| **at < end).count();
        ensure!(count <= most, "{count} evictions in the minute from {first}");
    }
    Ok(())
}

/// Kills the leader at every step of every act that it decides on: of each, one episode on one node.
#[test]
#[ignore = "takes minutes: make fleet"]
fn an_operator_killed_at_every_step_of_every_act_does_each_once() -> Result<()> {
    scenario("fleet-killed", async |s| {
        SimulatedFleet::with(s, 12, async |fleet| {
            s.apply(&policy(&s.namespace, every_act(s))).await?;
            s.fleet_follows(&s.namespace).await?;
            let sick: Vec<String> = fleet.nodes.iter().take(Story::ALL.len()).cloned().collect();
            let spare = fleet.nodes.iter().skip(sick.len());
            let pods = load(s, &sick.iter().zip(spare).collect::<Vec<_>>()).await?;
            fleet.report(&sick, FleetNode::Sick).await?;
            let start = Timestamp::now();
            let mut episodes = Vec::new();
            for (story, node) in Story::ALL.into_iter().zip(&sick) {
                let pod = pods.get(node).context("its pod")?;
                let subject = (story != Story::Drain).then_some(pod);
                let (kind, action) = (IncidentKind::Breaker, story.action());
                let name = fleet.open_about(node, &s.namespace, kind, action, subject).await?;
                episodes.push(Episode { story, name, pod: pod.clone() });
            }
            for step in Step::ALL {
                s.kill_leader().await.with_context(|| format!("killing the leader before {step:?}"))?;
                for episode in &episodes {
                    episode
                        .reach(s, fleet, step)
                        .await
                        .with_context(|| format!("{episode:?} to be {step:?}"))?;
                }
            }
            for episode in &episodes {
                episode.is_over(s, start).await.with_context(|| format!("{episode:?} at the end"))?;
            }
            let cordoned = fleet.cordoned().await?;
            ensure!(cordoned.is_empty(), "{cordoned:?} are left cordoned");
            Ok(())
        })
        .await
    })
}

fn every_act(s: &Scenario) -> Value {
    let actions = json!([{"type": "Unready"}, {"type": "Park"}, {"type": "Restart"}, {"type": "Drain"}]);
    let mut spec = broken_by(&s.namespace, "75Gi", &critical(95, 90, &actions));
    spec["nodes"] = json!({"matchLabels": {"highwater.dev/fleet": "true"}});
    spec
}

/// The acts that the operator decides on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Story {
    Unready,
    Park,
    Restart,
    Drain,
}

impl Story {
    const ALL: [Self; 4] = [Self::Unready, Self::Park, Self::Restart, Self::Drain];

    fn action(self) -> ActionType {
        match self {
            Self::Unready => ActionType::Unready,
            Self::Park => ActionType::Park,
            Self::Restart => ActionType::Restart,
            Self::Drain => ActionType::Drain,
        }
    }

    /// Whether its agent carries it out.
    fn is_the_agents(self) -> bool {
        matches!(self, Self::Unready | Self::Park)
    }
}

/// How far an act is, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Approved, or further where the operator does it by itself.
    Approved,
    Begun,
    Done,
    Over,
}

impl Step {
    const ALL: [Self; 4] = [Self::Approved, Self::Begun, Self::Done, Self::Over];
}

#[derive(Debug)]
struct Episode {
    story: Story,
    name: String,
    pod: Pod,
}

impl Episode {
    fn incidents(&self, s: &Scenario) -> Api<GpuMemoryIncident> {
        let namespace = if self.story == Story::Drain { highwater_scenarios::SYSTEM } else { &s.namespace };
        Api::namespaced(s.client.clone(), namespace)
    }

    async fn state_is(&self, s: &Scenario, one_of: &[DecisionState]) -> Result<GpuMemoryIncident> {
        eventually(&format!("{} to be one of {one_of:?}", self.name), 2 * TIMEOUT, async || {
            let incident = self.incidents(s).get(&self.name).await?;
            let decision = incident.status.as_ref().and_then(|status| status.decision.clone());
            let decision = decision.context("no decision")?;
            ensure!(
                one_of.contains(&decision.state),
                "it is {:?}/{}: {}",
                decision.state,
                decision.reason,
                decision.message
            );
            Ok(incident)
        })
        .await
    }

    async fn reach(&self, s: &Scenario, fleet: &SimulatedFleet, step: Step) -> Result<()> {
        use DecisionState::{Approved, Succeeded, Verifying};
        use ObservationState::{Over, Recovered};

        if !self.story.is_the_agents() {
            let enough: &[_] =
                if step == Step::Over { &[Succeeded] } else { &[Approved, Verifying, Succeeded] };
            return self.state_is(s, enough).await.map(drop);
        }
        let told = match step {
            Step::Approved => return self.state_is(s, &[Approved]).await.map(drop),
            Step::Begun => ("Begun", Over),
            Step::Done => ("Done", Over),
            Step::Over => ("Done", Recovered),
        };
        let incident = self.state_is(s, &[Approved, Verifying]).await?;
        fleet.tell_act(&incident, told.0, told.1).await?;
        let next: &[_] = if step == Step::Over { &[Succeeded] } else { &[Verifying] };
        self.state_is(s, next).await.map(drop)
    }

    /// It was done once: one token, and one eviction where it is one.
    async fn is_over(&self, s: &Scenario, start: Timestamp) -> Result<()> {
        let tokens = s.tokens_of(&self.pod).await?;
        ensure!(tokens == 1, "{tokens} tokens");
        let evictions = s.evictions_of(&self.pod, start)?;
        let most = usize::from(!self.story.is_the_agents());
        // One whose request was under way when its sender died may not be in the log as ours.
        ensure!(evictions <= most, "{evictions} evictions");
        Ok(())
    }
}
