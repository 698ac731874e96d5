//! The rule on the host memory of pods: where it stands for each.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use highwater_crds::{ActionType, HostMemory, Level, Mode};
use highwater_policy::{
    host_memory::{self, Change, Sample, State},
    pod,
    time::Millis,
    victim,
};
use tracing::info;

use crate::{
    account::Device,
    decide::{Because, Concern, HOST, Rules, Standing, Wanted},
    host::{Reading, Want},
    world::World,
};

/// The host memory of the node's pods.
#[derive(Debug, Default)]
pub(crate) struct Hosts {
    pods: HashMap<Arc<str>, Watched>,
}

/// A pod with the rule that holds for it: of the first of its devices that has one, in each mode.
#[derive(Debug)]
struct Watched {
    rules: BTreeMap<Mode, Rule>,
    sample: Option<Sample>,
}

#[derive(Debug)]
struct Rule {
    value: HostMemory,
    device: Arc<str>,
    concern: Concern,
    state: State,
    why: String,
}

/// A pod for which the rule has tripped.
#[derive(Clone, Debug)]
pub(crate) struct Tripped {
    /// What was read last.
    pub(crate) sample: Sample,
    /// Whom the rule's policy concerns, and whom it may restart.
    pub(crate) concern: Concern,
    /// Why it tripped.
    pub(crate) why: String,
}

/// What is shown of a pod.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    /// What was read last.
    pub(crate) sample: Sample,
    /// The pressure index, from 0 to 100.
    pub(crate) index: Option<i32>,
}

impl Hosts {
    /// Looks up anew which rule holds for whom. States that stand for the same pod are taken over.
    pub(crate) fn rule(&mut self, devices: &[(Device, Rules)], world: &World, release_namespace: &str) {
        let mut before = std::mem::take(&mut self.pods);
        for (device, rules) in devices {
            for layer in &rules.layers {
                let Some(plan) = &layer.host_memory else { continue };
                for tenant in &rules.tenants {
                    let uid = &tenant.pod.kubelet_uid;
                    let facts = &tenant.pod.facts;
                    let namespace = world.namespaces.get(&facts.namespace);
                    let namespaces = plan.namespaces.as_ref();
                    let selected =
                        pod::selects_namespace(namespaces, &facts.namespace, namespace, release_namespace);
                    if !selected {
                        continue;
                    }
                    let old = before.get_mut(uid);
                    let watched = self.pods.entry(Arc::clone(uid)).or_insert_with(|| Watched {
                        rules: BTreeMap::new(),
                        sample: old.as_ref().and_then(|old| old.sample),
                    });
                    watched.rules.entry(layer.mode).or_insert_with(|| {
                        let old = old.and_then(|old| old.rules.remove(&layer.mode));
                        let restart = victim::may_restart(facts, selected, &plan.owner_kinds);
                        Rule {
                            value: plan.value.clone(),
                            device: Arc::clone(&device.uuid),
                            concern: Concern { selected, restart, state: Standing::default() },
                            state: old.as_ref().map(|old| old.state).unwrap_or_default(),
                            why: old.map(|old| old.why).unwrap_or_default(),
                        }
                    });
                }
            }
        }
    }

    /// The pods whose host memory is to be read.
    pub(crate) fn wants(&self) -> Vec<Want> {
        let mut wants: Vec<Want> = self
            .pods
            .iter()
            .map(|(pod, watched)| {
                let clear = watched.rules.values().map(|rule| rule.value.clear_percent).min().unwrap_or(0);
                let above_percent = Some(u8::try_from(clear).unwrap_or(0));
                Want { pod: Arc::clone(pod), above_percent, exact_every: None }
            })
            .collect();
        wants.sort_unstable_by(|a, b| a.pod.cmp(&b.pod));
        wants
    }

    /// Takes in what was read. Returns whether a rule tripped, or ended.
    pub(crate) fn read(&mut self, readings: Vec<Reading>, now: Millis) -> bool {
        let mut changed = false;
        for Reading { pod, sample, .. } in readings {
            let Some((watched, sample)) = self.pods.get_mut(&pod).zip(sample) else { continue };
            watched.sample = Some(sample);
            for (mode, rule) in &mut watched.rules {
                let (state, change) = host_memory::step(&rule.value, rule.state, &sample, now);
                rule.state = state;
                changed |= change.is_some();
                match change {
                    Some(Change::Tripped(cause)) => {
                        rule.why = cause.explain(&rule.value);
                        info!(%pod, ?mode, why = rule.why, "host memory stands too high");
                    }
                    Some(Change::Ended) => info!(%pod, ?mode, "host memory has fallen"),
                    None => {}
                }
            }
        }
        changed
    }

    /// The rule, where it has tripped for a pod and is told at this device.
    pub(crate) fn tripped(&self, pod: &str, mode: Mode, device: &str) -> Option<Tripped> {
        let watched = self.pods.get(pod)?;
        let rule = watched.rules.get(&mode).filter(|rule| rule.state.active && *rule.device == *device)?;
        Some(Tripped { sample: watched.sample?, concern: rule.concern.clone(), why: rule.why.clone() })
    }

    /// Whether a pod's host memory stands too high, and what it holds. `None` where that is not known.
    pub(crate) fn is_over(&self, pod: &str, mode: Mode) -> Option<(bool, Option<u64>)> {
        let watched = self.pods.get(pod)?;
        let rule = watched.rules.get(&mode)?;
        let sample = watched.sample?;
        Some((rule.state.active, sample.held))
    }

    /// What a pod ought to be told, if its rule says so.
    pub(crate) fn wanted(&self, pod: &str) -> Option<Wanted> {
        let watched = self.pods.get(pod)?;
        let rule = watched.rules.get(&Mode::Enforce).filter(|rule| rule.state.active)?;
        let asks = |type_| rule.value.actions.iter().any(|action| action.type_ == type_);
        asks(ActionType::Signal).then(|| Wanted {
            level: Level::Critical,
            device: HOST.into(),
            used: watched.sample.and_then(|sample| sample.held),
            limit: watched.sample.and_then(|sample| sample.limit),
            restart: asks(ActionType::Restart),
            because: Because::Host,
        })
    }

    /// What is shown of a pod.
    pub(crate) fn shown(&self, pod: &str) -> Option<Shown> {
        let watched = self.pods.get(pod)?;
        let index = watched.rules.values().find_map(|rule| rule.state.index);
        Some(Shown { sample: watched.sample?, index })
    }
}
