//! The dereference step of the policy controller: what the stores hold.

use std::{collections::BTreeMap, sync::Arc};

use highwater_crds::{GpuMemoryNode, GpuMemoryNodeSpec, GpuMemoryNodeStatus, GpuMemoryPolicy};
use highwater_policy::{
    pod::{Labels, NamespaceFacts},
    resolve::{self, Policy},
};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Resource, ResourceExt,
    core::{DeserializeGuard, error_boundary::InvalidObject},
};

use crate::{context::Context, watch::readable};

type Guarded<K> = Arc<DeserializeGuard<K>>;

pub(crate) struct Inputs {
    /// Policies that can be read, by name, with the object that they were read from.
    pub(crate) policies: BTreeMap<String, (Guarded<GpuMemoryPolicy>, Policy)>,
    /// Policies that cannot.
    pub(crate) unreadable: Vec<InvalidObject>,
    /// Nodes that have an agent.
    pub(crate) nodes: Vec<(Guarded<GpuMemoryNode>, Arc<Node>)>,
    pub(crate) namespaces: BTreeMap<String, NamespaceFacts>,
}

pub(crate) fn dereference(ctx: &Context) -> Inputs {
    let mut policies = BTreeMap::new();
    let mut unreadable = Vec::new();
    for guard in ctx.stores.policies.state() {
        match &guard.0 {
            Ok(policy) => {
                let read = read(policy);
                policies.insert(read.name.clone(), (guard, read));
            }
            Err(invalid) => unreadable.push(invalid.clone()),
        }
    }
    let nodes = ctx
        .stores
        .plans
        .state()
        .into_iter()
        .filter(|plan| readable(plan).is_some())
        .filter_map(|plan| {
            let node = ctx.stores.node(&plan.name_any())?;
            Some((plan, node))
        })
        .collect();
    let namespaces = ctx.stores.actionable_namespaces(&ctx.release_namespace);
    Inputs { policies, unreadable, nodes, namespaces }
}

fn read(policy: &GpuMemoryPolicy) -> Policy {
    let meta = policy.meta();
    Policy {
        name: policy.name_any(),
        created: meta.creation_timestamp.as_ref().map(|t| t.0),
        generation: meta.generation.unwrap_or_default(),
        spec: policy.spec.clone(),
    }
}

static NO_LABELS: Labels = Labels::new();

impl Inputs {
    /// The nodes as the resolution takes them.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = resolve::Node<'_>> {
        self.nodes.iter().filter_map(|(plan, node)| {
            let plan = readable(plan)?;
            let status = plan.status.as_ref();
            Some(resolve::Node {
                name: plan.metadata.name.as_deref()?,
                labels: node.metadata.labels.as_ref().unwrap_or(&NO_LABELS),
                models: status.map(|s| s.models.as_slice()).unwrap_or_default(),
                devices: status.map(|s| s.devices.as_slice()).unwrap_or_default(),
            })
        })
    }

    /// The nodes with their plans, and with what they say of them.
    pub(crate) fn reporting<'a>(
        &'a self,
        plans: &'a BTreeMap<String, Arc<GpuMemoryNodeSpec>>,
    ) -> impl Iterator<Item = (&'a str, &'a GpuMemoryNodeSpec, Option<&'a GpuMemoryNodeStatus>)> {
        self.nodes.iter().filter_map(|(node, _)| {
            let node = readable(node)?;
            let name = node.metadata.name.as_deref()?;
            Some((name, plans.get(name)?.as_ref(), node.status.as_ref()))
        })
    }
}
