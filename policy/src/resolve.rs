//! From policies and nodes to one plan a node and one outcome a policy.
//!
//! Of caps (limits, budgets, the most that a pool may have) the strictest holds. Everything else is
//! a tuning field: the policy with the highest priority sets it, then the older one, then the first
//! by name. Each mode is resolved apart, so that a policy that only observes never binds.
//!
//! Nodes whose labels look alike to every selector and whose devices are of the same models share
//! one plan, so that the work grows with the number of kinds of node; what is left a node is a
//! look-up.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::Arc,
};

use highwater_crds::{
    Action, ActionType, BreakerScope, ByteSize, DeviceModel, DeviceRule, DeviceSelector, DeviceStatus,
    GpuMemoryNodeSpec, GpuMemoryPolicySpec, IncidentKind, Mode, Partition, PlanBreaker, PlanDriverReserve,
    PlanHostMemory, PlanLayer, PlanLeaks, PlanPool, PlanQuota, Planned, Pool, Quota, Strength, Victims,
    Watermark, names,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{Selector, SelectorExt};

use crate::{
    breaker, leak,
    pod::{Labels, NamespaceFacts},
    quota,
};

/// How long an agent may follow its plan without contact with the API server, in seconds.
const PLAN_LIFE_SECONDS: i32 = 600;
/// Most quotas, and most kinds of device, that one layer of a plan holds (as its schema says).
const LAYER_LIMIT: usize = 16;

/// A policy as stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Name.
    pub name: String,
    /// When it was created.
    pub created: Option<Timestamp>,
    /// Generation of the spec.
    pub generation: i64,
    /// What it asks for.
    pub spec: GpuMemoryPolicySpec,
}

/// A node that has an agent.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// Name.
    pub name: &'a str,
    /// Labels of the Node object.
    pub labels: &'a Labels,
    /// The kinds of device that its agent found.
    pub models: &'a [DeviceModel],
    /// The devices.
    pub devices: &'a [DeviceStatus],
}

/// What the policies come to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resolution {
    /// The plan of each node, by its name.
    pub plans: BTreeMap<String, Arc<GpuMemoryNodeSpec>>,
    /// What became of each policy, by its name.
    pub outcomes: BTreeMap<String, Outcome>,
}

/// What became of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Generation that this is about.
    pub generation: i64,
    /// Nodes that it selects.
    pub nodes: usize,
    /// Devices that it selects.
    pub devices: usize,
    /// Why it makes no sense and does not hold at all.
    pub invalid: Option<String>,
    /// Sizes that some of its devices do not have.
    pub clamped: Vec<String>,
    /// Which of its selectors selects nothing.
    pub unmatched: Option<String>,
    /// Fields that another policy sets instead.
    pub lost: Vec<Lost>,
    /// Sizes that a cap of another policy holds down.
    pub capped: Vec<String>,
    /// Limits under which no process can work, since a CUDA context takes more.
    pub below_context: Vec<String>,
    /// Guarantees that its own pool could never cover.
    pub above_pool: Vec<String>,
    /// What it enforces, if it does.
    pub enforces: Enforces,
}

/// What a policy in mode Enforce enforces; nothing in any other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enforces {
    /// It has quotas.
    pub quota: bool,
    /// A rule of them asks for more than to be measured.
    pub strength: bool,
    /// It asks for a reservation pool.
    pub pool: bool,
}

impl Enforces {
    fn of(spec: &GpuMemoryPolicySpec) -> Self {
        if spec.mode != Mode::Enforce {
            return Self::default();
        }
        let quota = spec.quota.as_ref().filter(|q| q.default.is_some() || !q.rules.is_empty());
        Self {
            quota: quota.is_some(),
            strength: quota
                .is_some_and(|q| q.rules.iter().any(|r| r.minimum_strength > Some(Strength::Observe))),
            pool: spec.pool.as_ref().is_some_and(Pool::is_sized),
        }
    }
}

/// A field that another policy sets instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The field.
    pub field: String,
    /// To whom and why.
    pub to: String,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} lost to {}", self.field, self.to)
    }
}

/// Whom a policy lets acts concern on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Terms {
    /// Its namespaces. None: every one.
    pub namespaces: Option<LabelSelector>,
    /// The owner kinds whose pods may be restarted.
    pub owner_kinds: Vec<String>,
}

/// The policies in order of precedence, with their selectors read.
#[derive(Clone, Debug, Default)]
pub struct Policies {
    ranked: Vec<Ranked>,
    /// Every label key that a node selector looks at.
    node_keys: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct Ranked {
    policy: Policy,
    nodes: Selector,
    namespaces: Option<Selector>,
    fault: Option<String>,
}

impl Policies {
    /// Reads the selectors and puts the policies in order, whatever order they come in.
    pub fn new(policies: impl IntoIterator<Item = Policy>) -> Self {
        let mut ranked: Vec<Ranked> = policies.into_iter().map(Ranked::new).collect();
        ranked.sort_by(|a, b| a.rank().cmp(&b.rank()));
        let node_keys = ranked.iter().flat_map(|r| selector_keys(&r.policy.spec.nodes)).collect();
        Self { ranked, node_keys }
    }

    /// The policy of this name.
    pub fn get(&self, name: &str) -> Option<&Policy> {
        self.ranked.iter().map(|r| &r.policy).find(|p| p.name == name)
    }

    /// Every policy in mode Enforce that makes sense.
    pub fn enforced(&self) -> impl Iterator<Item = &Policy> {
        self.ranked
            .iter()
            .filter(|r| r.policy.spec.mode == Mode::Enforce && r.fault.is_none())
            .map(|r| &r.policy)
    }

    /// The longest window of any rate of any policy in minutes; at least an hour.
    pub fn longest_window_minutes(&self) -> i32 {
        let budgets = self.ranked.iter().filter_map(|r| r.policy.spec.remediation.as_ref()?.budget.as_ref());
        budgets.flat_map(|b| &b.rates).map(|r| r.window_minutes).max().unwrap_or(0).max(60)
    }

    /// The policies in mode Enforce whose budgets bind an act on a device of this kind in a
    /// namespace with these labels.
    pub fn binding<'a>(
        &'a self,
        node: &'a Labels,
        product: &'a str,
        partition: Partition,
        namespace: &'a Labels,
    ) -> impl Iterator<Item = &'a Policy> {
        self.ranked
            .iter()
            .filter(move |r| {
                r.policy.spec.mode == Mode::Enforce
                    && r.fault.is_none()
                    && r.nodes.matches(node)
                    && selects_device(r.policy.spec.devices.as_ref(), product, partition)
                    && r.namespaces.as_ref().is_none_or(|s| s.matches(namespace))
            })
            .map(|r| &r.policy)
    }
}

impl Ranked {
    fn new(mut policy: Policy) -> Self {
        // Two policies ask for the same if their marks are the same, whoever wrote these down.
        for breaker in &mut policy.spec.breakers {
            *breaker = breaker::filled(breaker);
        }
        let read = |field: &str, selector: &LabelSelector| {
            read_selector(selector).map_err(|problem| format!("{field}: {problem}"))
        };
        let nodes = read("nodes", &policy.spec.nodes);
        let namespaces = policy.spec.namespaces.as_ref().map(|s| read("namespaces", s)).transpose();
        let rules = policy
            .spec
            .quota
            .iter()
            .flat_map(|q| &q.rules)
            .find_map(|rule| read(&format!("quota.rules[{}].pods", rule.name), &rule.pods).err());
        let no_budget = (policy.spec.mode == Mode::Enforce
            && policy.spec.remediation.as_ref().is_none_or(|r| r.budget.is_none()))
        .then(|| "mode Enforce needs remediation.budget: say how many pods may be down at once".to_owned());
        let disorder = policy.spec.breakers.iter().find_map(|breaker| {
            breaker::disorder(breaker).map(|what| format!("breakers[{:?}]: {what}", breaker.scope))
        });
        let leaks = policy.spec.leaks.as_ref().and_then(|leaks| leak::Settings::of(leaks).err());
        let leaks = leaks.map(|what| format!("leaks.{what}"));
        let fault = nodes.as_ref().err().or(namespaces.as_ref().err()).cloned();
        let fault = fault.or(rules).or(no_budget).or(disorder).or(leaks);
        Self { nodes: nodes.unwrap_or_default(), namespaces: namespaces.unwrap_or_default(), fault, policy }
    }

    fn rank(&self) -> (Reverse<i32>, Timestamp, &str) {
        let created = self.policy.created.unwrap_or(Timestamp::MAX);
        (Reverse(self.policy.spec.priority), created, &self.policy.name)
    }
}

/// Plans for every node, and what became of every policy. `namespaces` are those that acts may
/// concern at all. Independent of the order of its inputs.
pub fn resolve<'a>(
    policies: &Policies,
    nodes: impl IntoIterator<Item = Node<'a>>,
    namespaces: &BTreeMap<String, NamespaceFacts>,
) -> Resolution {
    let (groups, contexts) = group(policies, nodes);
    let mut outcomes: Vec<Outcome> =
        policies.ranked.iter().map(|r| survey(r, &groups, &contexts, namespaces)).collect();

    let mut losses = Losses::default();
    let mut plans = BTreeMap::new();
    for group in &groups {
        let candidates: Vec<(usize, &Ranked)> = policies
            .ranked
            .iter()
            .enumerate()
            .filter(|(i, r)| {
                outcomes.get(*i).is_some_and(|o| o.invalid.is_none()) && r.nodes.matches(group.labels)
            })
            .collect();
        let plan = Arc::new(plan(&candidates, group, &mut losses));
        plans.extend(group.nodes.iter().map(|name| ((*name).to_owned(), Arc::clone(&plan))));
    }

    for (rank, said) in losses.capped {
        if let Some(outcome) = outcomes.get_mut(rank) {
            outcome.capped.push(said);
        }
    }
    for ((loser, field), winner) in losses.lost {
        if let (Some(outcome), Some(lost), Some(won)) =
            (outcomes.get_mut(loser), policies.ranked.get(loser), policies.ranked.get(winner))
        {
            outcome.lost.push(Lost { field, to: reason_of_loss(&won.policy, &lost.policy) });
        }
    }
    let outcomes =
        policies.ranked.iter().zip(outcomes).map(|(r, outcome)| (r.policy.name.clone(), outcome)).collect();
    Resolution { plans, outcomes }
}

/// Nodes that look alike to every policy.
struct Group<'a> {
    labels: &'a Labels,
    stand_down: bool,
    models: &'a [DeviceModel],
    /// Number of devices of each model on all these nodes together.
    counts: Vec<usize>,
    nodes: Vec<&'a str>,
}

/// The largest CUDA context that was seen on any node, by the kind of device.
type Contexts<'a> = HashMap<(&'a str, Partition), u64>;

fn group<'a>(
    policies: &Policies,
    nodes: impl IntoIterator<Item = Node<'a>>,
) -> (Vec<Group<'a>>, Contexts<'a>) {
    let mut groups: Vec<Group<'a>> = Vec::new();
    let mut known = HashMap::new();
    let mut contexts = Contexts::new();
    for node in nodes {
        for model in node.models {
            if let Some(context) = model.context {
                let largest = contexts.entry((model.product.as_str(), model.partition)).or_default();
                *largest = context.0.max(*largest);
            }
        }
        let seen: Vec<Option<&str>> =
            policies.node_keys.iter().map(|key| node.labels.get(key).map(String::as_str)).collect();
        let says = |label, value| node.labels.get(label).is_some_and(|v| v == value);
        let stand_down =
            says(names::STAND_DOWN, "true") || says(names::DRIVER_UPGRADE, names::DRIVER_UPGRADE_RESTARTS);
        let models: Vec<_> =
            node.models.iter().map(|m| (m.product.as_str(), m.partition, m.memory)).collect();
        let index = *known.entry((seen, stand_down, models)).or_insert_with(|| {
            groups.push(Group {
                labels: node.labels,
                stand_down,
                models: node.models,
                counts: vec![0; node.models.len()],
                nodes: Vec::new(),
            });
            groups.len() - 1
        });
        let Some(group) = groups.get_mut(index) else { continue };
        group.nodes.push(node.name);
        for device in node.devices {
            let model = usize::try_from(device.model).ok();
            if let Some(count) = model.and_then(|m| group.counts.get_mut(m)) {
                *count += 1;
            }
        }
    }
    (groups, contexts)
}

/// What a policy selects, and whether its sizes fit that.
fn survey(
    ranked: &Ranked,
    groups: &[Group<'_>],
    contexts: &Contexts<'_>,
    namespaces: &BTreeMap<String, NamespaceFacts>,
) -> Outcome {
    let spec = &ranked.policy.spec;
    let mut outcome =
        Outcome { generation: ranked.policy.generation, enforces: Enforces::of(spec), ..Outcome::default() };
    if ranked.fault.is_some() {
        outcome.invalid.clone_from(&ranked.fault);
        return outcome;
    }
    let mut selected: BTreeSet<(&str, ByteSize)> = BTreeSet::new();
    let mut passed_over: BTreeSet<&str> = BTreeSet::new();
    let mut kinds: BTreeSet<(&str, Partition)> = BTreeSet::new();
    let mut memory_unknown = false;
    for group in groups.iter().filter(|g| ranked.nodes.matches(g.labels)) {
        outcome.nodes += group.nodes.len();
        for (model, count) in group.models.iter().zip(&group.counts).filter(|(_, count)| **count > 0) {
            if !selects_device(spec.devices.as_ref(), &model.product, model.partition) {
                passed_over.insert(&model.product);
                continue;
            }
            outcome.devices += count;
            kinds.insert((&model.product, model.partition));
            match model.memory {
                Some(memory) => {
                    selected.insert((&model.product, memory));
                }
                None => memory_unknown = true,
            }
        }
    }
    if outcome.nodes == 0 {
        outcome.unmatched = Some("nodes selects no node that has an agent".to_owned());
    } else if outcome.devices == 0 {
        let there: Vec<_> = passed_over.into_iter().collect();
        let there = if there.is_empty() { "none yet".to_owned() } else { there.join(", ") };
        outcome.unmatched =
            Some(format!("devices selects none of the devices of the selected nodes (there: {there})"));
    } else if let Some(selector) = &ranked.namespaces
        && !namespaces.values().any(|n| selector.matches(&n.labels))
    {
        outcome.unmatched = Some(
            "namespaces selects no namespace that acts may concern: no pod has a quota by this policy"
                .to_owned(),
        );
    }
    for (field, size) in sizes(spec) {
        let short: Vec<_> = selected.iter().filter(|(_, memory)| *memory < size(*memory)).collect();
        let Some((product, largest)) = short.iter().max_by_key(|(_, memory)| *memory) else { continue };
        let needed = size(*largest);
        if short.len() == selected.len() && !memory_unknown {
            outcome.invalid = Some(format!(
                "{field} needs {needed}, which is more than any selected device has (the largest is {product} with {largest}): lower it"
            ));
        } else {
            outcome.clamped.push(format!("{field} needs {needed}, which {product} ({largest}) does not have: there it is clamped to the device"));
        }
    }
    outcome.below_context = below_context(spec, &kinds, contexts);
    outcome.above_pool = above_pool(spec, &selected);
    outcome
}

/// The limits of a policy by the name of their field.
fn limits(spec: &GpuMemoryPolicySpec) -> impl Iterator<Item = (String, ByteSize, Option<ByteSize>)> {
    let quota = spec.quota.as_ref();
    let default =
        quota.and_then(|q| q.default.as_ref()).map(|d| ("default".to_owned(), d.limit, d.guarantee));
    let rules = quota
        .into_iter()
        .flat_map(|q| &q.rules)
        .map(|r| (format!("rules[{}]", r.name), r.limit, r.guarantee));
    default.into_iter().chain(rules)
}

/// Limits that are below a context on some kind of device. A limit that no process can work under
/// still holds: that it is too small is told, and changes nothing.
fn below_context(
    spec: &GpuMemoryPolicySpec,
    kinds: &BTreeSet<(&str, Partition)>,
    contexts: &Contexts<'_>,
) -> Vec<String> {
    let largest = kinds.iter().map(|kind| {
        let context = contexts.get(kind).copied().unwrap_or(quota::DEFAULT_CONTEXT);
        (context, kind.0)
    });
    let Some((context, product)) = largest.max() else { return Vec::new() };
    limits(spec)
        .filter(|(_, limit, _)| quota::below_context(limit.0, context))
        .map(|(name, limit, _)| {
            format!(
                "quota.{name}.limit {limit} is below what a CUDA context takes on {product} ({}) and {}: no process can work under it: raise it",
                ByteSize(context),
                ByteSize(quota::CONTEXT_HEADROOM),
            )
        })
        .collect()
}

/// Guarantees that the pool of the same policy could not cover on some device, however empty.
fn above_pool(spec: &GpuMemoryPolicySpec, selected: &BTreeSet<(&str, ByteSize)>) -> Vec<String> {
    let Some(pool) = spec.pool.as_ref().filter(|pool| pool.is_sized()) else { return Vec::new() };
    let percent = pool.max_percent();
    let most = |memory: ByteSize| {
        let usable = memory.0.saturating_sub(reserved(spec, memory));
        ByteSize(usable / 100 * u64::try_from(percent).unwrap_or(0))
    };
    let Some((product, memory)) = selected.iter().min_by_key(|(_, memory)| *memory) else {
        return Vec::new();
    };
    limits(spec)
        .filter_map(|(name, _, guarantee)| Some((name, guarantee?)))
        .filter(|(_, guarantee)| *guarantee > most(*memory))
        .map(|(name, guarantee)| {
            format!(
                "quota.{name}.guarantee {guarantee} is more than the pool may have on {product} (maxPercent {percent} of {memory}): raise maxPercent or promise less",
            )
        })
        .collect()
}

/// What the policy's own reserve takes of a device.
fn reserved(spec: &GpuMemoryPolicySpec, memory: ByteSize) -> u64 {
    spec.pool.as_ref().and_then(|p| p.driver_reserve.as_ref()).map_or(0, |r| {
        let share = memory.0 / 100 * u64::try_from(r.percent).unwrap_or(0);
        share.max(r.min_size.map_or(0, ByteSize::bytes))
    })
}

/// How much memory of a device something takes, as a function of the device's memory.
type Need<'a> = Box<dyn Fn(ByteSize) -> ByteSize + 'a>;

/// So much, beside the policy's own reserve.
fn beside_reserve(spec: &GpuMemoryPolicySpec, size: ByteSize) -> Need<'_> {
    Box::new(move |memory| ByteSize(size.0.saturating_add(reserved(spec, memory))))
}

/// Everything in a policy that takes memory of a device.
fn sizes(spec: &GpuMemoryPolicySpec) -> Vec<(String, Need<'_>)> {
    let mut sizes: Vec<(String, Need<'_>)> = Vec::new();
    let pool = spec.pool.as_ref();
    if let Some(least) = pool.and_then(|p| p.driver_reserve.as_ref()?.min_size) {
        sizes.push(("pool.driverReserve.minSize".to_owned(), Box::new(move |_| least)));
    }
    if let Some(least) = pool.and_then(|p| p.min_size) {
        sizes.push(("pool.minSize plus the driver's reserve".to_owned(), beside_reserve(spec, least)));
    }
    for (name, limit, guarantee) in limits(spec) {
        sizes.push((format!("quota.{name}.limit"), Box::new(move |_| limit)));
        if let Some(guarantee) = guarantee {
            let field = format!("quota.{name}.guarantee plus the driver's reserve");
            sizes.push((field, beside_reserve(spec, guarantee)));
        }
    }
    sizes
}

/// Who did not get what it asked for.
#[derive(Default)]
struct Losses {
    /// Who lost which field to whom: (loser, field) -> winner, as ranks. Of several winners the
    /// highest is named.
    lost: BTreeMap<(usize, String), usize>,
    /// Whose size is held down by whose cap, in words, by rank.
    capped: BTreeSet<(usize, String)>,
}

impl Losses {
    fn note(&mut self, loser: usize, field: impl Into<String>, winner: usize) {
        let entry = self.lost.entry((loser, field.into())).or_insert(winner);
        *entry = winner.min(*entry);
    }

    /// The first of `claims` sets the field; every other that asks for something else lost it.
    fn settle<T: PartialEq>(
        &mut self,
        field: &str,
        mut claims: impl Iterator<Item = (usize, T)>,
    ) -> Option<(usize, T)> {
        let won = claims.next()?;
        for (loser, _) in claims.filter(|(_, value)| *value != won.1) {
            self.note(loser, field, won.0);
        }
        Some(won)
    }
}

fn plan(candidates: &[(usize, &Ranked)], group: &Group<'_>, losses: &mut Losses) -> GpuMemoryNodeSpec {
    let kinds: BTreeSet<(&str, Partition)> =
        group.models.iter().map(|m| (m.product.as_str(), m.partition)).collect();
    let layers = [Mode::Enforce, Mode::DryRun, Mode::Observe]
        .into_iter()
        .filter_map(|mode| layer(mode, candidates, &kinds, losses))
        .collect();
    GpuMemoryNodeSpec { plan_life_seconds: PLAN_LIFE_SECONDS, stand_down: group.stand_down, layers }
}

/// A policy's quota on a node, with the victims that hold there and the rank of their policy.
struct Claimed<'a> {
    policy: &'a Policy,
    quota: &'a Quota,
    victims: (usize, Vec<String>),
}

fn layer(
    mode: Mode,
    candidates: &[(usize, &Ranked)],
    kinds: &BTreeSet<(&str, Partition)>,
    losses: &mut Losses,
) -> Option<PlanLayer> {
    let mut rules = Vec::new();
    // Policies with a quota on some device here, with the victims that hold there.
    let mut quotas: BTreeMap<usize, Claimed<'_>> = BTreeMap::new();
    for (product, partition) in kinds.iter().take(LAYER_LIMIT) {
        let members: Vec<(usize, &Policy)> = candidates
            .iter()
            .map(|(rank, r)| (*rank, &r.policy))
            .filter(|(_, p)| {
                p.spec.mode == mode && selects_device(p.spec.devices.as_ref(), product, *partition)
            })
            .collect();

        let victims = losses.settle(
            "remediation.victims",
            members.iter().filter_map(|(rank, p)| {
                Some((*rank, p.spec.remediation.as_ref()?.victims.as_ref()?.owner_kinds.clone()))
            }),
        );
        let victims =
            victims.unwrap_or_else(|| (usize::MAX, Victims::DEFAULT_OWNER_KINDS.map(str::to_owned).to_vec()));

        let driver_reserve = losses
            .settle(
                "pool.driverReserve",
                members
                    .iter()
                    .filter_map(|(rank, p)| Some((*rank, p.spec.pool.as_ref()?.driver_reserve.clone()?))),
            )
            .and_then(|(rank, value)| Some((name_of(&members, rank)?, value)))
            .map(|(policy, value)| PlanDriverReserve { policy, value });
        let pool = settle_pool(&members, losses);

        let breakers: Vec<PlanBreaker> = [BreakerScope::Device, BreakerScope::Pool, BreakerScope::Pod]
            .into_iter()
            .filter_map(|scope| {
                let field = format!("breakers[{scope:?}]");
                settle_whole(&members, &victims.1, losses, &field, |policy| {
                    policy.breakers.iter().find(|breaker| breaker.scope == scope)
                })
            })
            .collect();

        let host_memory =
            settle_whole(&members, &victims.1, losses, "hostMemory", |policy| policy.host_memory.as_ref());
        // Its times belong together.
        let leaks = settle_whole(&members, &victims.1, losses, "leaks", |policy| policy.leaks.as_ref());
        settle_breach(&members, losses);
        let mut quota_policies = Vec::new();
        for (rank, policy) in &members {
            let Some(quota) = &policy.spec.quota else { continue };
            if quotas.len() < LAYER_LIMIT || quotas.contains_key(rank) {
                quota_policies.push(policy.name.clone());
                let entry = quotas.entry(*rank).or_insert_with(|| Claimed {
                    policy,
                    quota,
                    victims: victims.clone(),
                });
                if victims.0 < entry.victims.0 {
                    entry.victims = victims.clone();
                }
            } else if let Some(first) = quotas.keys().next() {
                losses.note(*rank, format!("quota (a node takes {LAYER_LIMIT} a mode)"), *first);
            }
        }

        let rule = DeviceRule {
            product: (*product).to_owned(),
            partition: *partition,
            quota_policies,
            driver_reserve,
            pool,
            breakers,
            host_memory,
            leaks,
        };
        let reserves = rule.driver_reserve.is_some() || rule.pool.is_some();
        let watches = !rule.breakers.is_empty() || rule.host_memory.is_some() || rule.leaks.is_some();
        if !rule.quota_policies.is_empty() || reserves || watches {
            rules.push(rule);
        }
    }
    let quotas = quotas
        .into_values()
        .map(|Claimed { policy, quota, victims }| PlanQuota {
            policy: policy.name.clone(),
            namespaces: policy.spec.namespaces.clone(),
            owner_kinds: victims.1,
            value: quota.clone(),
        })
        .collect();
    (!rules.is_empty()).then_some(PlanLayer { mode, rules, quotas })
}

/// The pool comes whole from one policy: a size of one with the pace of another would be a pool that
/// nobody asked for. Only `maxPercent` is a cap, and the strictest of all holds.
fn settle_pool(members: &[(usize, &Policy)], losses: &mut Losses) -> Option<PlanPool> {
    let pools = || members.iter().filter_map(|(rank, p)| Some((*rank, p.spec.pool.as_ref()?)));
    let sized = pools().filter(|(_, pool)| pool.is_sized());
    let claims =
        sized.map(|(rank, pool)| (rank, Pool { max_percent: None, driver_reserve: None, ..pool.clone() }));
    let (rank, mut value) = losses.settle("pool", claims)?;
    let cap = pools().filter_map(|(rank, pool)| Some((pool.max_percent?, rank))).min();
    if let (Some((most, capping)), Some(size)) = (cap, value.size_percent)
        && size > most
        && let Some(by) = name_of(members, capping)
    {
        value.size_percent = Some(most);
        let said = format!("pool.sizePercent {size} is held at {most} by pool.maxPercent of policy {by}");
        losses.capped.insert((rank, said));
    }
    value.max_percent = Some(cap.map_or(value.max_percent(), |(most, _)| most));
    let max_policy = cap.filter(|(_, capping)| *capping != rank).and_then(|(_, r)| name_of(members, r));
    Some(PlanPool { policy: name_of(members, rank)?, max_policy, value })
}

/// A part that comes whole from one policy: the first of these that has it.
fn settle_whole<'a, T: Clone + PartialEq + 'a>(
    members: &[(usize, &'a Policy)],
    owner_kinds: &[String],
    losses: &mut Losses,
    field: &str,
    part: impl Fn(&'a GpuMemoryPolicySpec) -> Option<&'a T>,
) -> Option<Planned<T>> {
    let claims =
        members.iter().filter_map(|(rank, p)| Some((*rank, (part(&p.spec)?, p.spec.namespaces.as_ref()))));
    let (rank, (value, namespaces)) = losses.settle(field, claims)?;
    Some(Planned {
        policy: name_of(members, rank)?,
        namespaces: namespaces.cloned(),
        owner_kinds: owner_kinds.to_vec(),
        value: value.clone(),
    })
}

/// What a breach leads to is taken from the first policy that concerns the pod, so a policy loses
/// it only to one that may concern the same pods.
fn settle_breach(members: &[(usize, &Policy)], losses: &mut Losses) {
    let claims: Vec<_> = members
        .iter()
        .filter_map(|(rank, p)| {
            Some((*rank, p.spec.quota.as_ref()?.breach.as_ref()?, p.spec.namespaces.as_ref()))
        })
        .collect();
    for (at, (rank, breach, namespaces)) in claims.iter().enumerate() {
        let above = claims
            .iter()
            .take(at)
            .find(|(_, other, theirs)| other != breach && !disjoint(*namespaces, *theirs));
        if let Some((winner, ..)) = above {
            losses.note(*rank, "quota.breach", *winner);
        }
    }
}

/// Whether no labels can satisfy both: they ask for different values of one label.
fn disjoint(a: Option<&LabelSelector>, b: Option<&LabelSelector>) -> bool {
    let (Some(a), Some(b)) =
        (a.and_then(|s| s.match_labels.as_ref()), b.and_then(|s| s.match_labels.as_ref()))
    else {
        return false;
    };
    a.iter().any(|(key, value)| b.get(key).is_some_and(|other| other != value))
}

fn name_of(members: &[(usize, &Policy)], rank: usize) -> Option<String> {
    members.iter().find(|(r, _)| *r == rank).map(|(_, p)| p.name.clone())
}

fn reason_of_loss(winner: &Policy, loser: &Policy) -> String {
    let name = &winner.name;
    match (winner.spec.priority, loser.spec.priority) {
        (high, low) if high != low => format!("policy {name} (priority {high} > {low})"),
        (same, _) if winner.created != loser.created => {
            format!("policy {name} (both have priority {same}; it is older)")
        }
        (same, _) => format!("policy {name} (both have priority {same} and age; its name sorts first)"),
    }
}

fn selects_device(selector: Option<&DeviceSelector>, product: &str, partition: Partition) -> bool {
    selector.is_none_or(|s| {
        let product_fits = s.products.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => product.starts_with(prefix),
            None => product == pattern,
        });
        (s.products.is_empty() || product_fits)
            && (s.partitions.is_empty() || s.partitions.contains(&partition))
    })
}

fn selector_keys(selector: &LabelSelector) -> impl Iterator<Item = String> {
    let labels = selector.match_labels.iter().flat_map(BTreeMap::keys);
    let expressions = selector.match_expressions.iter().flatten().map(|e| &e.key);
    labels.chain(expressions).cloned()
}

/// Reads a selector, with the checks that the API server makes of selectors in its own types.
fn read_selector(selector: &LabelSelector) -> Result<Selector, String> {
    for requirement in selector.match_expressions.iter().flatten() {
        let key = &requirement.key;
        let values = requirement.values.as_ref().is_some_and(|v| !v.is_empty());
        match (requirement.operator.as_str(), values) {
            ("In" | "NotIn", true) | ("Exists" | "DoesNotExist", false) => {}
            ("In" | "NotIn", false) => {
                return Err(format!("operator {} of {key} needs at least one value", requirement.operator));
            }
            ("Exists" | "DoesNotExist", true) => {
                return Err(format!(
                    "operator {} of {key} takes no values: remove them",
                    requirement.operator
                ));
            }
            (other, _) => {
                return Err(format!(
                    "operator {other:?} of {key} is unknown: use In, NotIn, Exists or DoesNotExist"
                ));
            }
        }
    }
    Selector::try_from(selector.clone()).map_err(|error| error.to_string())
}

/// Whom acts of `policy` may concern on a device of this kind by a node's plan. None where the
/// plan has no such rule (any more), or the rule no longer lists the act. A device of unknown kind
/// (`None`) takes any of the policy's rules.
pub fn terms(
    plan: &GpuMemoryNodeSpec,
    mode: Mode,
    policy: &str,
    (kind, act): (IncidentKind, ActionType),
    device: Option<(&str, Partition)>,
) -> Option<Terms> {
    let layer = plan.layers.iter().find(|l| l.mode == mode)?;
    let mut rules = layer.rules.iter().filter(|r| {
        device.is_none_or(|(product, partition)| r.product == product && r.partition == partition)
    });
    match kind {
        // Zombie memory is nobody's: what may be done about it is what the device's breaker asks for.
        IncidentKind::Breaker | IncidentKind::ZombieMemory => {
            let asks = |b: &PlanBreaker| marks(b).flat_map(|mark| &mark.actions).any(|a| a.type_ == act);
            let breaker = rules.flat_map(|r| &r.breakers).find(|b| b.policy == policy && asks(b))?;
            Some(breaker.into())
        }
        IncidentKind::QuotaBreach => {
            rules.find(|r| r.quota_policies.iter().any(|p| p == policy))?;
            let quota = layer.quotas.iter().find(|q| q.policy == policy)?;
            quota.value.breach.as_ref()?.actions.iter().find(|a| a.type_ == act)?;
            Some(quota.into())
        }
        IncidentKind::HostMemory => {
            let asks = |h: &&PlanHostMemory| {
                h.policy == policy && h.value.actions.iter().any(|action| action.type_ == act)
            };
            rules.filter_map(|r| r.host_memory.as_ref()).find(asks).map(Terms::from)
        }
        IncidentKind::Leak => {
            let asks = |l: &&PlanLeaks| l.policy == policy && l.value.actions.iter().any(|a| a.type_ == act);
            rules.filter_map(|r| r.leaks.as_ref()).find(asks).map(Terms::from)
        }
    }
}

/// What a policy says of leaks on a device of this kind by a node's plan, whatever it asks to be done
/// about them. A device of unknown kind (`None`) takes any of the policy's rules.
pub fn leak_rule<'a>(
    plan: &'a GpuMemoryNodeSpec,
    mode: Mode,
    policy: &str,
    device: Option<(&str, Partition)>,
) -> Option<&'a PlanLeaks> {
    let layer = plan.layers.iter().find(|l| l.mode == mode)?;
    let rules = layer.rules.iter().filter(|r| {
        device.is_none_or(|(product, partition)| r.product == product && r.partition == partition)
    });
    rules.filter_map(|r| r.leaks.as_ref()).find(|l| l.policy == policy)
}

impl<T> From<&Planned<T>> for Terms {
    fn from(rule: &Planned<T>) -> Self {
        Self { namespaces: rule.namespaces.clone(), owner_kinds: rule.owner_kinds.clone() }
    }
}

/// The settings of an act that a node's plan asks for; those that [`terms`] go with. Of several marks
/// the highest counts. None where the plan does not ask for the act (any more), or gives no settings.
pub fn action<'a>(
    plan: &'a GpuMemoryNodeSpec,
    mode: Mode,
    policy: &str,
    (kind, act): (IncidentKind, ActionType),
    device: Option<(&str, Partition)>,
) -> Option<&'a Action> {
    let layer = plan.layers.iter().find(|l| l.mode == mode)?;
    let mut rules = layer.rules.iter().filter(|r| {
        device.is_none_or(|(product, partition)| r.product == product && r.partition == partition)
    });
    let is_act = |a: &&Action| a.type_ == act;
    match kind {
        IncidentKind::Breaker | IncidentKind::ZombieMemory => rules
            .flat_map(|r| &r.breakers)
            .filter(|b| b.policy == policy)
            .flat_map(|b| marks(b).rev())
            .flat_map(|mark| &mark.actions)
            .find(is_act),
        IncidentKind::QuotaBreach => {
            let quota = layer.quotas.iter().find(|q| q.policy == policy)?;
            quota.value.breach.as_ref()?.actions.iter().find(is_act)
        }
        IncidentKind::HostMemory => rules
            .find_map(|r| r.host_memory.as_ref().filter(|h| h.policy == policy))?
            .value
            .actions
            .iter()
            .find(is_act),
        IncidentKind::Leak => rules
            .find_map(|r| r.leaks.as_ref().filter(|l| l.policy == policy))?
            .value
            .actions
            .iter()
            .find(is_act),
    }
}

/// Whether an enforced breaker of this plan may ask for Freeze on devices of this kind.
pub fn may_freeze(plan: &GpuMemoryNodeSpec, product: &str, partition: Partition) -> bool {
    plan.layers
        .iter()
        .filter(|l| l.mode == Mode::Enforce)
        .flat_map(|l| &l.rules)
        .filter(|r| r.product == product && r.partition == partition)
        .flat_map(|r| &r.breakers)
        // What one pod uses of its limit is no reason to keep others away.
        .filter(|b| b.value.scope != BreakerScope::Pod)
        .flat_map(marks)
        .flat_map(|mark| &mark.actions)
        .any(|action| action.type_ == ActionType::Freeze)
}

/// The marks of a breaker that are set.
fn marks(breaker: &PlanBreaker) -> impl DoubleEndedIterator<Item = &Watermark> {
    [&breaker.value.warning, &breaker.value.critical, &breaker.value.emergency].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*, sample::select};
    use serde_json::{Value, json};

    use super::*;

    fn policy(name: &str, priority: i32, created: i64, spec: &Value) -> Policy {
        let mut whole = json!({"nodes": {}, "priority": priority});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        Policy {
            name: name.into(),
            created: Some(Timestamp::from_second(created).unwrap()),
            generation: 1,
            spec: serde_json::from_value(whole).unwrap(),
        }
    }

    fn breaker(trip: i32) -> Value {
        json!({"breakers": [{"scope": "Device", "warning": {"tripPercent": trip, "clearPercent": 10,
            "actions": [{"type": "Freeze"}]}}]})
    }

    fn model(product: &str, partition: Partition, gib: u64) -> DeviceModel {
        DeviceModel { product: product.into(), partition, memory: Some(ByteSize::gib(gib)), context: None }
    }

    fn devices(models: &[i32]) -> Vec<DeviceStatus> {
        models
            .iter()
            .map(|model| {
                serde_json::from_value(json!({"uuid": "GPU-1", "model": model, "level": "Normal",
                    "headroom": "Below60", "strength": "Observe", "pods": 0}))
                .unwrap()
            })
            .collect()
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn on_one_node(
        policies: Vec<Policy>,
        models: &[DeviceModel],
    ) -> (GpuMemoryNodeSpec, BTreeMap<String, Outcome>) {
        let (labels, devices) = (labels(&[("pool", "serving")]), devices(&[0]));
        let node = Node { name: "n1", labels: &labels, models, devices: &devices };
        let namespaces = [("team".to_owned(), NamespaceFacts::default())].into();
        let resolution = resolve(&Policies::new(policies), [node], &namespaces);
        (GpuMemoryNodeSpec::clone(&resolution.plans["n1"]), resolution.outcomes)
    }

    fn h200() -> Vec<DeviceModel> {
        vec![model("NVIDIA H200", Partition::Whole, 140)]
    }

    #[test]
    fn the_higher_priority_sets_a_breaker_and_the_loser_names_it() {
        let (plan, outcomes) = on_one_node(
            vec![policy("low", 100, 0, &breaker(70)), policy("high", 200, 9, &breaker(80))],
            &h200(),
        );
        assert_eq!(plan.layers[0].rules[0].breakers[0].policy, "high");
        assert_eq!(outcomes["high"].lost, []);
        assert_eq!(
            outcomes["low"].lost[0].to_string(),
            "breakers[Device] lost to policy high (priority 200 > 100)"
        );
    }

    #[test]
    fn age_then_name_break_a_tie() {
        let tie = |created| vec![policy("b", 100, 5, &breaker(70)), policy("a", 100, created, &breaker(80))];
        assert_eq!(on_one_node(tie(9), &h200()).0.layers[0].rules[0].breakers[0].policy, "b");
        let (plan, outcomes) = on_one_node(tie(5), &h200());
        assert_eq!(plan.layers[0].rules[0].breakers[0].policy, "a");
        assert!(outcomes["b"].lost[0].to.contains("name sorts first"));
    }

    #[test]
    fn equal_values_are_no_loss() {
        let (_, outcomes) =
            on_one_node(vec![policy("a", 1, 0, &breaker(70)), policy("b", 2, 0, &breaker(70))], &h200());
        assert!(outcomes.values().all(|o| o.lost.is_empty()));
    }

    #[test]
    fn modes_are_resolved_apart() {
        let mut enforce = breaker(70);
        enforce["mode"] = "Enforce".into();
        enforce["remediation"] = json!({"budget": {}});
        let (plan, outcomes) =
            on_one_node(vec![policy("a", 1, 0, &enforce), policy("b", 2, 0, &breaker(80))], &h200());
        let modes: Vec<_> = plan.layers.iter().map(|l| l.mode).collect();
        assert_eq!(modes, [Mode::Enforce, Mode::Observe]);
        assert!(outcomes["a"].lost.is_empty());
        assert!(may_freeze(&plan, "NVIDIA H200", Partition::Whole));
        let freeze = (IncidentKind::Breaker, ActionType::Freeze);
        assert!(terms(&plan, Mode::Enforce, "a", freeze, None).is_some());
        assert!(terms(&plan, Mode::Enforce, "b", freeze, None).is_none());
        let restart = (IncidentKind::Breaker, ActionType::Restart);
        assert!(terms(&plan, Mode::Enforce, "a", restart, None).is_none(), "no mark lists it");
    }

    #[test]
    fn an_act_that_the_breach_no_longer_lists_is_no_longer_asked_for() {
        let quota =
            |actions: Value| json!({"quota": {"default": {"limit": "8Gi"}, "breach": {"actions": actions}}});
        let asked = |actions: Value| {
            let (plan, _) = on_one_node(vec![policy("a", 1, 0, &quota(actions))], &h200());
            let act = (IncidentKind::QuotaBreach, ActionType::Restart);
            terms(&plan, Mode::Observe, "a", act, Some(("NVIDIA H200", Partition::Whole))).is_some()
        };
        assert!(asked(json!([{"type": "Signal"}, {"type": "Restart"}])));
        assert!(!asked(json!([{"type": "Signal"}])));
        assert!(!asked(json!([])));
    }

    #[test]
    fn a_preset_is_filled_in_and_its_marks_can_be_replaced() {
        let preset = json!({"breakers": [{"scope": "Device", "preset": "WarnBreakEmergency",
            "warning": {"tripPercent": 70, "clearPercent": 60}}]});
        let (plan, outcomes) = on_one_node(vec![policy("a", 1, 0, &preset)], &h200());
        let value = &plan.layers[0].rules[0].breakers[0].value;
        let trips =
            [&value.warning, &value.critical, &value.emergency].map(|m| m.as_ref().unwrap().trip_percent);
        assert_eq!((value.preset, trips), (None, [70, 88, 95]));
        assert!(outcomes["a"].invalid.is_none());
        let act = (IncidentKind::Breaker, ActionType::Restart);
        let restart = action(&plan, Mode::Observe, "a", act, None).unwrap().restart.as_ref();
        assert_eq!(restart.unwrap().grace_period_seconds, Some(10));
    }

    #[test]
    fn a_mark_that_does_not_go_with_its_preset_is_invalid() {
        let preset = json!({"breakers": [{"scope": "Pod", "preset": "ReclaimRefuse",
            "warning": {"tripPercent": 92, "clearPercent": 60}}]});
        let (plan, outcomes) = on_one_node(vec![policy("a", 1, 0, &preset)], &h200());
        let message = outcomes["a"].invalid.as_ref().unwrap();
        assert!(message.contains("breakers[Pod]") && message.contains("Warning trips at 92"), "{message}");
        assert!(plan.layers.is_empty());
    }

    #[test]
    fn each_scope_and_the_rule_on_host_memory_is_settled_by_itself() {
        let of = |scope: &str| json!({"scope": scope, "preset": "ReclaimRefuse"});
        let host = |trip: i32| json!({"tripPercent": trip, "actions": [{"type": "Restart"}]});
        let policies = vec![
            policy("a", 2, 0, &json!({"breakers": [of("Pool")], "hostMemory": host(90)})),
            policy("b", 1, 0, &json!({"breakers": [of("Device"), of("Pod")], "hostMemory": host(95)})),
        ];
        let (plan, outcomes) = on_one_node(policies, &h200());
        let rule = &plan.layers[0].rules[0];
        let scopes: Vec<_> = rule.breakers.iter().map(|b| (b.value.scope, b.policy.as_str())).collect();
        assert_eq!(
            scopes,
            [(BreakerScope::Device, "b"), (BreakerScope::Pool, "a"), (BreakerScope::Pod, "b")]
        );
        assert_eq!(rule.host_memory.as_ref().unwrap().value.trip_percent, 90);
        assert_eq!(outcomes["b"].lost.iter().map(|l| l.field.as_str()).collect::<Vec<_>>(), ["hostMemory"]);
        let host = |act| terms(&plan, Mode::Observe, "a", (IncidentKind::HostMemory, act), None).is_some();
        assert!(host(ActionType::Restart) && !host(ActionType::Unready));
    }

    #[test]
    fn only_breakers_of_the_device_or_its_pool_may_freeze() {
        for (scope, may) in [("Device", true), ("Pool", true), ("Pod", false)] {
            let spec = json!({"mode": "Enforce", "remediation": {"budget": {}},
                "breakers": [{"scope": scope, "preset": "ReclaimRefuse"}]});
            let (plan, _) = on_one_node(vec![policy("a", 1, 0, &spec)], &h200());
            assert_eq!(may_freeze(&plan, "NVIDIA H200", Partition::Whole), may, "{scope}");
        }
    }

    #[test]
    fn quotas_stand_side_by_side_in_order_of_precedence() {
        let quota = |limit: &str| json!({"quota": {"default": {"limit": limit}}});
        let (plan, outcomes) =
            on_one_node(vec![policy("a", 1, 0, &quota("8Gi")), policy("b", 2, 0, &quota("16Gi"))], &h200());
        let order: Vec<_> = plan.layers[0].quotas.iter().map(|q| q.policy.as_str()).collect();
        assert_eq!(order, ["b", "a"]);
        assert_eq!(plan.layers[0].rules[0].quota_policies, ["b", "a"]);
        assert!(outcomes.values().all(|o| o.lost.is_empty()));
    }

    #[test]
    fn a_breach_is_lost_only_where_the_same_pods_are_concerned() {
        let with = |team: &str, hold: i32| {
            json!({"namespaces": {"matchLabels": {"team": team}},
                   "quota": {"default": {"limit": "8Gi"}, "breach": {"holdMilliseconds": hold}}})
        };
        let apart = vec![policy("a", 2, 0, &with("x", 1)), policy("b", 1, 0, &with("y", 2))];
        assert!(on_one_node(apart, &h200()).1["b"].lost.is_empty());
        let together = vec![policy("a", 2, 0, &with("x", 1)), policy("b", 1, 0, &with("x", 2))];
        assert_eq!(on_one_node(together, &h200()).1["b"].lost[0].field, "quota.breach");
    }

    #[test]
    fn victims_are_one_tuning_field() {
        let with = |kind: &str| json!({"quota": {"default": {"limit": "8Gi"}}, "remediation": {"victims": {"ownerKinds": [kind]}}});
        let (plan, outcomes) = on_one_node(
            vec![policy("a", 2, 0, &with("Job")), policy("b", 1, 0, &with("ReplicaSet"))],
            &h200(),
        );
        assert!(plan.layers[0].quotas.iter().all(|q| q.owner_kinds == ["Job"]));
        assert_eq!(outcomes["b"].lost[0].field, "remediation.victims");
    }

    #[test]
    fn a_size_that_no_device_has_is_invalid_and_one_that_some_have_is_clamped() {
        let quota = json!({"quota": {"rules": [{"name": "big", "pods": {}, "limit": "80Gi"}]}});
        let small = vec![model("NVIDIA L4", Partition::Whole, 24)];
        let (plan, outcomes) = on_one_node(vec![policy("a", 1, 0, &quota)], &small);
        let message = outcomes["a"].invalid.as_ref().unwrap();
        assert!(
            message.contains("quota.rules[big].limit") && message.contains("NVIDIA L4 with 24Gi"),
            "{message}"
        );
        assert!(plan.layers.is_empty(), "an invalid policy does not hold");

        let (labels, devices) = (Labels::new(), devices(&[0, 1]));
        let models = [small[0].clone(), h200()[0].clone()];
        let node = Node { name: "n1", labels: &labels, models: &models, devices: &devices };
        let resolution = resolve(&Policies::new([policy("a", 1, 0, &quota)]), [node], &BTreeMap::new());
        let outcome = &resolution.outcomes["a"];
        assert!(outcome.invalid.is_none() && outcome.clamped[0].contains("clamped"), "{outcome:?}");
        assert_eq!((outcome.nodes, outcome.devices), (1, 2));
    }

    #[test]
    fn guarantee_and_reserve_together_must_fit() {
        let spec = json!({"pool": {"driverReserve": {"percent": 50}},
                          "quota": {"default": {"limit": "100Gi", "guarantee": "100Gi"}}});
        let outcome = on_one_node(vec![policy("a", 1, 0, &spec)], &h200()).1["a"].clone();
        assert!(outcome.invalid.unwrap().contains("guarantee plus the driver's reserve"));
    }

    #[test]
    fn a_pool_comes_whole_from_one_policy_and_the_least_cap_of_all_holds() {
        let (sized, other, cap) = (
            json!({"pool": {"sizePercent": 60, "maxPercent": 75, "startHoldSeconds": 30, "driverReserve": {"percent": 3}}}),
            json!({"pool": {"minSize": "8Gi", "decayPercent": 50}}),
            json!({"pool": {"maxPercent": 40}}),
        );
        let (plan, outcomes) = on_one_node(
            vec![policy("sized", 2, 0, &sized), policy("other", 1, 0, &other), policy("cap", 0, 0, &cap)],
            &h200(),
        );
        let rule = &plan.layers[0].rules[0];
        let pool = rule.pool.as_ref().unwrap();
        assert_eq!((pool.policy.as_str(), pool.max_policy.as_deref()), ("sized", Some("cap")));
        let Pool { size_percent, min_size, max_percent, start_hold_seconds, decay_percent, .. } = pool.value;
        assert_eq!((size_percent, max_percent, start_hold_seconds), (Some(40), Some(40), Some(30)));
        assert_eq!((min_size, decay_percent, &pool.value.driver_reserve), (None, None, &None));
        assert_eq!(rule.driver_reserve.as_ref().unwrap().policy, "sized");
        assert_eq!(outcomes["other"].lost[0].to_string(), "pool lost to policy sized (priority 2 > 1)");
        assert_eq!(
            outcomes["sized"].capped,
            ["pool.sizePercent 60 is held at 40 by pool.maxPercent of policy cap"]
        );
        assert!(outcomes["sized"].lost.is_empty() && outcomes["cap"].lost.is_empty(), "a cap loses nothing");
    }

    #[test]
    fn a_pool_without_a_cap_has_the_usual_one() {
        for (size, most) in [(60, 75), (90, 90)] {
            let pool = json!({"pool": {"sizePercent": size}});
            let (plan, outcomes) = on_one_node(vec![policy("a", 1, 0, &pool)], &h200());
            let pool = plan.layers[0].rules[0].pool.as_ref().unwrap();
            assert_eq!((pool.value.max_percent, pool.max_policy.as_ref()), (Some(most), None));
            assert!(outcomes["a"].capped.is_empty());
        }
        let cap_alone = json!({"pool": {"maxPercent": 40}});
        assert!(on_one_node(vec![policy("a", 1, 0, &cap_alone)], &h200()).0.layers.is_empty());
    }

    #[test]
    fn b17_a_limit_below_a_context_is_told_by_what_was_seen_on_that_kind_of_device() {
        let limit = |limit: &str| vec![policy("a", 1, 0, &json!({"quota": {"default": {"limit": limit}}}))];
        let told = |text: &str, context: Option<u64>| {
            let mut models = h200();
            models[0].context = context.map(ByteSize::mib);
            let outcome = on_one_node(limit(text), &models).1["a"].clone();
            assert!(outcome.invalid.is_none(), "a limit that is too small holds all the same");
            outcome.below_context
        };
        let message = &told("512Mi", None)[0];
        assert!(
            message.contains("quota.default.limit 512Mi") && message.contains("NVIDIA H200 (518Mi)"),
            "{message}"
        );
        assert!(told("582Mi", None).is_empty());
        assert!(told("512Mi", Some(256)).is_empty(), "a context is smaller there");
        assert_eq!(told("600Mi", Some(576)).len(), 1);
    }

    #[test]
    fn a_guarantee_that_the_pool_could_never_cover_is_told() {
        let outcome = |guarantee: &str| {
            let spec = json!({"pool": {"sizePercent": 20, "maxPercent": 50, "driverReserve": {"percent": 10}},
                "quota": {"default": {"limit": "100Gi", "guarantee": guarantee}}});
            on_one_node(vec![policy("a", 1, 0, &spec)], &h200()).1["a"].clone()
        };
        assert!(outcome("62Gi").above_pool.is_empty());
        let message = outcome("64Gi").above_pool[0].clone();
        assert!(
            message.contains("guarantee 64Gi") && message.contains("maxPercent 50 of 140Gi"),
            "{message}"
        );
    }

    #[test]
    fn only_enforce_enforces() {
        let of = |mode: &str, rules: Value| {
            let spec = json!({"mode": mode, "remediation": {"budget": {}}, "pool": {"minSize": "1Gi"},
                "quota": {"rules": rules}});
            on_one_node(vec![policy("a", 1, 0, &spec)], &h200()).1["a"].enforces
        };
        let rule =
            |strength: &str| json!([{"name": "r", "pods": {}, "limit": "8Gi", "minimumStrength": strength}]);
        assert_eq!(of("DryRun", rule("Guard")), Enforces::default());
        assert_eq!(of("Enforce", rule("Guard")), Enforces { quota: true, strength: true, pool: true });
        assert_eq!(of("Enforce", rule("Observe")), Enforces { quota: true, strength: false, pool: true });
        assert_eq!(of("Enforce", json!([])), Enforces { quota: false, strength: false, pool: true });
    }

    #[test]
    fn selectors_that_select_nothing_say_which() {
        for (spec, word) in [
            (json!({"nodes": {"matchLabels": {"pool": "none"}}}), "nodes selects no node"),
            (json!({"devices": {"products": ["NVIDIA A*"]}}), "there: NVIDIA H200"),
            (json!({"devices": {"partitions": ["Mig"]}}), "devices selects none"),
            (json!({"namespaces": {"matchLabels": {"team": "none"}}}), "namespaces selects no namespace"),
        ] {
            let outcome = on_one_node(vec![policy("a", 1, 0, &spec)], &h200()).1["a"].clone();
            assert!(outcome.unmatched.as_ref().unwrap().contains(word), "{outcome:?}");
        }
    }

    #[test]
    fn selectors_that_make_no_sense_are_invalid() {
        for (expression, word) in [
            (json!({"key": "a", "operator": "Near"}), "use In, NotIn"),
            (json!({"key": "a", "operator": "In", "values": []}), "at least one value"),
            (json!({"key": "a", "operator": "Exists", "values": ["b"]}), "takes no values"),
        ] {
            let spec = json!({"nodes": {"matchExpressions": [expression]}});
            let outcome = on_one_node(vec![policy("a", 1, 0, &spec)], &h200()).1["a"].clone();
            assert!(outcome.invalid.as_ref().unwrap().contains(word), "{outcome:?}");
        }
    }

    #[test]
    fn enforce_without_a_budget_does_not_hold_even_if_stored() {
        let (plan, outcomes) = on_one_node(vec![policy("a", 1, 0, &json!({"mode": "Enforce"}))], &h200());
        assert!(outcomes["a"].invalid.as_ref().unwrap().contains("remediation.budget"));
        assert!(plan.layers.is_empty());
    }

    #[test]
    fn a_node_takes_sixteen_quotas_and_the_rest_are_told() {
        let quota = json!({"quota": {"default": {"limit": "8Gi"}}});
        let policies = (0..18).map(|i| policy(&format!("p{i:02}"), 100, i, &quota)).collect();
        let (plan, outcomes) = on_one_node(policies, &h200());
        assert_eq!(plan.layers[0].quotas.len(), 16);
        assert!(outcomes["p17"].lost[0].field.starts_with("quota"));
    }

    #[test]
    fn a_node_stands_down_by_its_label_and_while_its_driver_is_replaced() {
        let stands_down = |label: &str, value: &str| {
            let (labels, models) = (labels(&[(label, value)]), h200());
            let node = Node { name: "n1", labels: &labels, models: &models, devices: &[] };
            resolve(&Policies::default(), [node], &BTreeMap::new()).plans["n1"].stand_down
        };
        assert!(stands_down(names::STAND_DOWN, "true"));
        assert!(!stands_down(names::STAND_DOWN, "false"));
        assert!(stands_down(names::DRIVER_UPGRADE, "pod-restart-required"));
        for state in ["drain-required", "validation-required", "upgrade-done"] {
            assert!(!stands_down(names::DRIVER_UPGRADE, state), "{state}");
        }
    }

    prop_compose! {
        fn any_policy()(
            mode in select(vec!["Observe", "DryRun", "Enforce"]),
            priority in 0..3i32,
            created in 0..3i64,
            pool in option::of(select(vec!["serving", "batch"])),
            product in option::of(select(vec!["NVIDIA H200", "NVIDIA A*"])),
            trip in option::of(70..73i32),
            limit in option::of(select(vec!["8Gi", "60Gi", "200Gi"])),
            kinds in option::of(select(vec!["Job", "ReplicaSet"])),
            size in option::of(select(vec![20, 60])),
            most in option::of(select(vec![40, 75])),
        ) -> Value {
            let mut spec = json!({"mode": mode, "priority": priority, "created": created, "nodes": {},
                                  "remediation": {"budget": {}}});
            if let Some(pool) = pool { spec["nodes"] = json!({"matchLabels": {"pool": pool}}); }
            if let Some(product) = product { spec["devices"] = json!({"products": [product]}); }
            if let Some(trip) = trip { spec["breakers"] = breaker(trip)["breakers"].clone(); }
            if let Some(limit) = limit { spec["quota"] = json!({"default": {"limit": limit}}); }
            if let Some(size) = size { spec["pool"]["sizePercent"] = json!(size); }
            if let Some(most) = most { spec["pool"]["maxPercent"] = json!(most); }
            if let Some(kind) = kinds { spec["remediation"]["victims"] = json!({"ownerKinds": [kind]}); }
            spec
        }
    }

    proptest! {
        #[test]
        fn resolution_does_not_depend_on_the_order_of_its_inputs(
            specs in vec(any_policy(), 0..6),
            pools in vec((select(vec!["serving", "batch", "other"]), 0..3usize), 0..6),
            turn in 0..6usize,
        ) {
            let mut policies: Vec<Policy> = specs.iter().enumerate().map(|(i, spec)| {
                let (priority, created) = (spec["priority"].as_i64().unwrap(), spec["created"].as_i64().unwrap());
                policy(&format!("p{i}"), priority.try_into().unwrap(), created, spec)
            }).collect();
            let kinds = [
                vec![model("NVIDIA H200", Partition::Whole, 140)],
                vec![model("NVIDIA A30", Partition::Mig, 12), model("NVIDIA A30", Partition::Whole, 24)],
                vec![],
            ];
            let devices = devices(&[0, 0, 1]);
            let mut nodes: Vec<(String, Labels, usize)> = pools.iter().enumerate()
                .map(|(i, (pool, kind))| (format!("n{i}"), labels(&[("pool", pool), ("host", &i.to_string())]), *kind))
                .collect();
            let run = |policies: &[Policy], nodes: &[(String, Labels, usize)]| resolve(
                &Policies::new(policies.to_vec()),
                nodes.iter().map(|(name, labels, kind)| Node { name, labels, models: &kinds[*kind], devices: &devices }),
                &BTreeMap::new(),
            );
            let before = run(&policies, &nodes);
            policies.reverse();
            let (p, n) = (turn % policies.len().max(1), turn % nodes.len().max(1));
            policies.rotate_left(p);
            nodes.rotate_left(n);
            nodes.reverse();
            for plan in before.plans.values() {
                for pool in plan.layers.iter().flat_map(|l| &l.rules).filter_map(|r| r.pool.as_ref()) {
                    // As the schema of the plan asks.
                    prop_assert!(pool.value.size_percent <= pool.value.max_percent);
                }
            }
            prop_assert_eq!(before, run(&policies, &nodes));
        }
    }
}
