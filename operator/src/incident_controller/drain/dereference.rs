//! The dereference step of a drain.

use std::collections::BTreeSet;

use highwater_crds::{
    ActionType, DecisionState, DrainAction, GpuMemoryIncident, GpuMemoryIncidentSpec, IncidentKind, Mode,
    names,
};
use highwater_policy::{
    budget::{self, Act, Answer, Limits, Token, TokenLedger},
    drain::{self, Asks, Cordon, Step, View, decide},
    pod::{PodFacts, selects_namespace},
    remediation::{Carrier, Refusal, carrier},
    resolve::{Terms, action, terms},
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, runtime::reflector::ObjectRef};
use tokio::time::Instant;

use super::room::{self, Room};
use crate::{
    context::{Context, Key, Known, is_open, key, state},
    error::{Error, call},
    incident_controller::{
        budget::{Wanted, ledger, longest_window},
        dereference::{halted, limits, model},
        workload,
    },
    node_controller::cordon,
    watch::readable,
};

/// How long the news of an eviction takes at most to come back as the state of its pod.
const SETTLED: SignedDuration = SignedDuration::from_secs(5);

/// Everything that is known about a drain that is not over.
pub(super) struct Scene {
    pub(super) key: Key,
    pub(super) incident: GpuMemoryIncident,
    /// The node: as last heard, and as just read right before an act.
    pub(super) node: Option<Node>,
    pub(super) pods: Vec<drain::Pod>,
    /// The tokens for the evictions of the pods, in their order.
    pub(super) tokens: Vec<Wanted>,
    pub(super) limits: Limits,
    pub(super) refusal: Option<Refusal>,
    pub(super) terms: Option<Terms>,
    pub(super) room: Result<Room, String>,
    asks: Asks,
    /// The other nodes that are being drained.
    draining: BTreeSet<String>,
    evicting: bool,
    agent_away: Option<SignedDuration>,
    paused: Option<String>,
    halted: Option<String>,
    rival: Option<String>,
    larger: Option<String>,
}

/// None where the incident is gone, over, or cannot be read.
pub(super) async fn dereference(ctx: &Context, key: &Key) -> Result<Option<Scene>, Error> {
    let Some(incident) = newest(ctx, key).filter(is_open) else { return Ok(None) };
    let node = ctx.stores.node(&incident.spec.node).map(|node| Node::clone(&node));
    let mut scene = Scene {
        key: key.clone(),
        incident,
        node,
        pods: Vec::new(),
        tokens: Vec::new(),
        limits: Limits::default(),
        refusal: None,
        terms: None,
        room: Ok(Room::default()),
        asks: Asks::Unknown,
        draining: BTreeSet::new(),
        evicting: false,
        agent_away: None,
        paused: None,
        halted: None,
        rival: None,
        larger: None,
    };
    scene.look(ctx)?;
    if scene.needs_room() {
        scene.room = room::find(ctx, &scene.incident, scene.node.as_ref(), &scene.moving(ctx)).await?;
    }
    Ok(Some(scene))
}

fn newest(ctx: &Context, key: &Key) -> Option<GpuMemoryIncident> {
    let guard = ctx.stores.incidents.get(&ObjectRef::new(&key.1).within(&key.0))?;
    readable(&guard).map(|heard| ctx.written.newest(key, heard))
}

impl Scene {
    /// Looks again at everything that needs no call, and reads the node again.
    pub(super) async fn look_again(&mut self, ctx: &Context) -> Result<(), Error> {
        self.incident = newest(ctx, &self.key).filter(is_open).ok_or(Error::Overtaken)?;
        self.read_node(ctx).await?;
        self.look(ctx)
    }

    async fn read_node(&mut self, ctx: &Context) -> Result<(), Error> {
        let api: Api<Node> = Api::all(ctx.client.clone());
        self.node = call("read a node", api.get_opt(&self.incident.spec.node)).await?;
        Ok(())
    }

    fn look(&mut self, ctx: &Context) -> Result<(), Error> {
        let known = std::sync::Arc::clone(&ctx.known.borrow());
        let spec = self.incident.spec.clone();
        self.limits = limits(ctx, &self.incident, &known.policies);
        (self.asks, self.terms) = what_is_asked(ctx, &self.incident, &known);
        self.agent_away = ctx.agent_away(&spec.node);
        self.paused = ctx.paused(&spec.node, None);
        self.halted = halted(ctx, &self.incident, &self.limits);
        let draining = drains(ctx, &self.key);
        self.rival = draining
            .iter()
            .find(|other| other.spec.node == spec.node)
            .and_then(|other| other.metadata.name.clone());
        let larger = ctx.stores.incidents(|other| is_open(other) && is_larger(&other.spec, &spec));
        self.larger = larger.into_iter().find_map(|other| other.metadata.name);
        let ledger = ledger(ctx)?;
        self.find_pods(ctx, &ledger);
        let now = Timestamp::now();
        // A pod that is as it was long after its token was reserved was not evicted: it was refused.
        let refused = |token: &Token| {
            now.duration_since(token.at) >= SETTLED
                && self.pods.iter().any(|pod| pod.uid == token.pod && !pod.going)
        };
        self.evicting = ledger.has_other(self.uid(), &self.node_token().key, refused);
        self.draining = draining.into_iter().map(|i| i.spec.node).filter(|n| *n != spec.node).collect();
        self.refusal = self.against_beginning(ctx, &ledger);
        Ok(())
    }

    /// The pods on the node that use a GPU, and whether each may and can be evicted.
    fn find_pods(&mut self, ctx: &Context, ledger: &TokenLedger) {
        let node = self.incident.spec.node.as_str();
        let here = |pod: &Pod| {
            pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node) && drain::uses_gpu(pod)
        };
        let (mut pods, mut tokens) = (Vec::new(), Vec::new());
        for pod in ctx.stores.pods.state_filter(here) {
            let facts = PodFacts::parse(&pod);
            if facts.finished {
                continue; // it holds nothing
            }
            let born = pod.metadata.creation_timestamp.as_ref().map(|at| at.0);
            let wanted = self.eviction_token(ctx, &facts, born);
            let refused = ctx.refusals.recent(&refusal_key(&facts), Instant::now());
            let said = || match wanted.ask(ctx, &self.limits, ledger) {
                Answer::Refused { said, .. } => Some(said.join("; ")),
                Answer::Reserved { .. } => None,
            };
            pods.push(drain::Pod {
                workload: wanted.token.workload.clone(),
                priority: facts.priority,
                born,
                stays: self.stays(ctx, &facts),
                going: facts.terminating,
                waits: refused.or_else(said),
                namespace: facts.namespace,
                name: facts.name,
                uid: facts.uid,
            });
            tokens.push(wanted);
        }
        (self.pods, self.tokens) = (pods, tokens);
    }

    /// Why a pod stays, if it does.
    pub(super) fn stays(&self, ctx: &Context, facts: &PodFacts) -> Option<&'static str> {
        let Some(terms) = &self.terms else { return Some("no policy asks for it") };
        let namespace = ctx.stores.namespace(&facts.namespace);
        let selected = selects_namespace(
            terms.namespaces.as_ref(),
            &facts.namespace,
            namespace.as_ref(),
            &ctx.release_namespace,
        );
        if namespace.is_some_and(|n| n.paused) {
            return Some("acts in its namespace are paused");
        }
        drain::stays(facts, &terms.owner_kinds, selected)
    }

    fn eviction_token(&self, ctx: &Context, facts: &PodFacts, born: Option<Timestamp>) -> Wanted {
        let workload = workload::top_owner(&ctx.stores, facts);
        let unavailable = workload
            .as_ref()
            .map(|w| workload::unavailable(&ctx.stores, &facts.namespace, w))
            .unwrap_or_default();
        Wanted {
            key: budget::key(self.uid(), &facts.uid),
            token: Token {
                workload: workload.map(|w| w.to_string()).unwrap_or_default(),
                namespace: facts.namespace.clone(),
                pod: facts.uid.clone(),
                born,
                ..self.token()
            },
            unavailable,
            enforced: self.is_enforced(),
            leak: None,
        }
    }

    /// The token for the cordon.
    pub(super) fn node_token(&self) -> Wanted {
        let node = format!("node/{}", self.incident.spec.node);
        Wanted {
            key: budget::key(self.uid(), &node),
            token: Token { workload: format!("Node/{}", self.incident.spec.node), ..self.token() },
            unavailable: self.draining.clone(),
            enforced: self.is_enforced(),
            leak: None,
        }
    }

    fn token(&self) -> Token {
        Token {
            at: Timestamp::now(),
            policy: self.incident.spec.policy.clone(),
            workload: String::new(),
            namespace: String::new(),
            node: self.incident.spec.node.clone(),
            pod: String::new(),
            act: Some(Act::Drain),
            born: None,
            keep_until: None,
        }
    }

    /// What the budgets say against beginning: as many drains as may be, or no room in the rates for
    /// all of it.
    fn against_beginning(&self, ctx: &Context, ledger: &TokenLedger) -> Option<Refusal> {
        let cordon = self.node_token();
        if let Answer::Refused { said, retry_at } = cordon.ask(ctx, &self.limits, ledger) {
            return Some(Refusal { said, retry_at });
        }
        let evictions =
            self.pods.iter().zip(&self.tokens).filter(|(pod, _)| pod.stays.is_none() && !pod.going);
        let acts: Vec<_> = std::iter::once(&cordon)
            .chain(evictions.map(|(_, wanted)| wanted))
            .map(|wanted| (wanted.key.clone(), wanted.token.clone()))
            .collect();
        match budget::room_for(ledger, &self.limits, &acts, longest_window(ctx)) {
            Answer::Reserved { .. } => None,
            Answer::Refused { mut said, retry_at } => {
                said.insert(0, format!("the cordon and {} evictions need a token each", acts.len() - 1));
                Some(Refusal { said, retry_at })
            }
        }
    }

    /// Whether nothing but the want of room could keep the next cordon or eviction. While something
    /// else does, nobody looks for room.
    fn needs_room(&self) -> bool {
        let next = match decide(&self.view(), Timestamp::now()) {
            Step::Begin | Step::Evict(_) | Step::Observe(_) => true,
            Step::Record(verdict, _) => ["AwaitingObservation", "DryRun"].contains(&verdict.reason),
            Step::Rest(_) => false,
        };
        next && self.pods.iter().any(|pod| pod.stays.is_none() && !pod.going)
    }

    /// The pods that have to find room elsewhere, as the store has them.
    fn moving(&self, ctx: &Context) -> Vec<Pod> {
        let moving = self.pods.iter().filter(|pod| pod.stays.is_none() && !pod.going);
        moving
            .filter_map(|pod| ctx.stores.pods.get(&ObjectRef::new(&pod.name).within(&pod.namespace)))
            .map(|pod| Pod::clone(&pod))
            .collect()
    }

    fn is_enforced(&self) -> bool {
        self.incident.spec.mode == Mode::Enforce
    }

    pub(super) fn uid(&self) -> &str {
        self.incident.metadata.uid.as_deref().unwrap_or_default()
    }

    /// What its cordon is marked with.
    pub(super) fn mark(&self) -> String {
        drain::mark(&self.key.0, &self.key.1, self.uid())
    }

    /// Whose cordon its node has. None: the node is gone.
    pub(super) fn cordon(&self) -> Option<Cordon> {
        Some(cordon::state(self.node.as_ref()?, &self.mark()))
    }

    /// The scene as the decision takes it.
    pub(super) fn view(&self) -> View<'_> {
        let status = self.incident.status.as_ref();
        let asked = self.incident.metadata.annotations.as_ref().and_then(|a| a.get(names::OBSERVE));
        View {
            spec: &self.incident.spec,
            decision: status.and_then(|s| s.decision.as_ref()),
            observation: status.and_then(|s| s.observation.as_ref()),
            asked: asked.and_then(|at| at.parse::<Timestamp>().ok()),
            agent_away: self.agent_away,
            asks: self.asks,
            rival: self.rival.clone(),
            larger: self.larger.clone(),
            paused: self.paused.clone(),
            halted: self.halted.clone(),
            refusal: self.refusal.clone(),
            cordon: self.cordon(),
            pods: &self.pods,
            evicting: self.evicting,
            room: self.room.as_ref().map(|room| room.targets.as_slice()).map_err(Clone::clone),
        }
    }
}

/// Under which a refusal to evict a pod is remembered.
pub(super) fn refusal_key(facts: &PodFacts) -> Key {
    (facts.namespace.clone(), format!("pod/{}", facts.uid))
}

/// The other drains that are under way.
fn drains(ctx: &Context, own: &Key) -> Vec<GpuMemoryIncident> {
    let goes_on = |incident: &GpuMemoryIncident| {
        matches!(state(incident), Some(DecisionState::Approved | DecisionState::Verifying))
    };
    ctx.stores.incidents(|other| {
        let is_other = || Some(key(&other.metadata)).filter(|key| key != own);
        carrier(&other.spec.proposed) == Carrier::Drain
            && is_open(other)
            && is_other().is_some_and(|key| ctx.written.by_newest(&key, other, goes_on))
    })
}

/// Whether an incident is about more of the zombie memory that another is about: later ones of one policy
/// are opened for no other reason while the first is still open.
fn is_larger(other: &GpuMemoryIncidentSpec, than: &GpuMemoryIncidentSpec) -> bool {
    let of = |spec: &GpuMemoryIncidentSpec| {
        (spec.kind, spec.mode, spec.policy.clone(), spec.node.clone(), spec.device.clone())
    };
    other.kind == IncidentKind::ZombieMemory && other.episode > than.episode && of(other) == of(than)
}

fn what_is_asked(ctx: &Context, incident: &GpuMemoryIncident, known: &Known) -> (Asks, Option<Terms>) {
    let spec = &incident.spec;
    let Some(policy) = ctx.stores.policies.get(&ObjectRef::new(&spec.policy)) else {
        return (Asks::Deleted, None);
    };
    let still_stored = readable(&policy).is_some_and(|p| p.spec.mode == spec.mode);
    let reported = ctx.stores.plan(&spec.node);
    let device = reported.as_deref().and_then(readable).and_then(|node| model(node, &spec.device));
    let plan = known.plans.get(&spec.node);
    if plan.is_none() && still_stored && reported.is_some() && ctx.stores.node(&spec.node).is_some() {
        return (Asks::Unknown, None);
    }
    let act = (IncidentKind::Breaker, ActionType::Drain);
    let asked = plan.filter(|_| still_stored).and_then(|plan| {
        let terms = terms(plan, spec.mode, &spec.policy, act, device)?;
        let settings = action(plan, spec.mode, &spec.policy, act, device)?;
        let minutes = settings
            .drain
            .as_ref()
            .map_or(DrainAction::DEFAULT_TIMEOUT_MINUTES, |drain| drain.timeout_minutes);
        Some((Asks::Drain { timeout_minutes: minutes }, Some(terms)))
    });
    asked.unwrap_or((Asks::Nothing, None))
}
