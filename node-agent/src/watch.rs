//! Watches: everything the agent knows from the API server.
//!
//! An object that cannot be read is skipped and told once, never a reason to stop.

use std::{collections::HashMap, fmt::Debug};

use futures::TryStreamExt;
use highwater_crds::{GpuMemoryIncident, GpuMemoryNode};
use highwater_policy::pod::{NamespaceFacts, PodFacts};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::{DeserializeGuard, PartialObjectMeta},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event},
    },
};
use serde::de::DeserializeOwned;
use tokio::{sync::mpsc::UnboundedSender, task::JoinSet};
use tracing::{debug, info, warn};

use crate::world::{Change, NodeFacts, WorldChange};

/// Objects that one answer lists at most. The memory that a list takes is never given back whole.
const PAGE: u32 = 50;

/// Starts all watches. None of them ends by itself.
pub(crate) fn start(
    client: &Client,
    node: &str,
    send: &UnboundedSender<WorldChange>,
    tasks: &mut JoinSet<&'static str>,
) {
    let by_name = format!("metadata.name={node}");

    let pods: Api<DeserializeGuard<Pod>> = Api::all(client.clone());
    let of_node = format!("spec.nodeName={node}");
    tasks.spawn(follow(
        "pods",
        pods,
        of_node,
        guarded(|pod: Pod| PodFacts::parse(&pod)),
        WorldChange::Pod,
        send.clone(),
    ));

    let namespaces: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
    let facts = |namespace: PartialObjectMeta<Namespace>| {
        Some((namespace.name_any(), NamespaceFacts::from_metadata(&namespace.metadata)))
    };
    tasks.spawn(follow("namespaces", namespaces, String::new(), facts, WorldChange::Namespace, send.clone()));

    let nodes: Api<PartialObjectMeta<Node>> = Api::all(client.clone());
    let facts = |node: PartialObjectMeta<Node>| Some(NodeFacts::from_metadata(&node.metadata));
    tasks.spawn(follow("node", nodes, by_name.clone(), facts, WorldChange::Node, send.clone()));

    let plans: Api<DeserializeGuard<GpuMemoryNode>> = Api::all(client.clone());
    tasks.spawn(follow("plan", plans, by_name, guarded(stripped), WorldChange::Plan, send.clone()));

    let incidents: Api<DeserializeGuard<GpuMemoryIncident>> = Api::all(client.clone());
    let of_node = format!("spec.node={node}");
    tasks.spawn(follow(
        "incidents",
        incidents,
        of_node,
        guarded(stripped),
        WorldChange::Incident,
        send.clone(),
    ));
}

fn stripped<K: Resource>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}

/// Reads what can be read; tells once of each version that cannot.
fn guarded<K: Resource<DynamicType = ()>, T>(
    read: impl Fn(K) -> T,
) -> impl FnMut(DeserializeGuard<K>) -> Option<T> {
    let mut told: HashMap<String, Option<String>> = HashMap::new();
    move |object| match object.0 {
        Ok(object) => Some(read(object)),
        Err(invalid) => {
            let name = invalid.metadata.name.unwrap_or_default();
            let version = invalid.metadata.resource_version;
            if told.get(&name) != Some(&version) {
                warn!(kind = %K::kind(&()), name, namespace = invalid.metadata.namespace, error = invalid.error,
                    "an object cannot be read and is left as it was");
                if told.len() >= 256 {
                    told.clear();
                }
                told.insert(name, version);
            }
            None
        }
    }
}

/// Follows the objects that a field selector picks.
async fn follow<K, T, C>(
    what: &'static str,
    api: Api<K>,
    fields: String,
    mut read: impl FnMut(K) -> Option<T>,
    wrap: fn(Change<T>) -> C,
    send: UnboundedSender<C>,
) -> &'static str
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut config = watcher::Config::default().page_size(PAGE);
    if !fields.is_empty() {
        config = config.fields(&fields);
    }
    let stream = watcher::watcher(api, config).default_backoff();
    futures::pin_mut!(stream);
    let mut failing = false;
    let mut list = (Vec::new(), true);
    loop {
        let event = match stream.try_next().await {
            Ok(Some(event)) => event,
            Ok(None) => return what,
            Err(error) => {
                if std::mem::replace(&mut failing, true) {
                    debug!(what, %error, "the watch still fails");
                } else {
                    warn!(what, %error, "the watch failed: it is tried again, and what is known stands");
                }
                continue;
            }
        };
        if failing && !matches!(event, Event::Init) {
            info!(what, "the watch is back");
            failing = false;
        }
        let change = match event {
            Event::Init => {
                list = (Vec::new(), true);
                continue;
            }
            Event::InitApply(object) => {
                match read(object) {
                    Some(item) => list.0.push(item),
                    None => list.1 = false,
                }
                continue;
            }
            Event::InitDone => {
                let (items, complete) = std::mem::replace(&mut list, (Vec::new(), true));
                Some(Change::Reset { items, complete })
            }
            Event::Apply(object) => read(object).map(Change::Upsert),
            Event::Delete(object) => read(object).map(Change::Remove),
        };
        if let Some(change) = change
            && send.send(wrap(change)).is_err()
        {
            return what;
        }
    }
}
