//! Before an uninstall: undoes what we did to nodes, and keeps the running operators from doing it
//! again.
//!
//! It refuses while pods have the guard's volume. What takes such a volume away when its pod ends is
//! the volume server, which the uninstall removes: these pods could never end.

use std::{fmt, time::Duration};

use anyhow::Context as _;
use futures::{StreamExt, TryStreamExt, stream};
use highwater_crds::{
    GpuMemoryNode,
    names::{GUARD_DRIVER, GUARD_LABEL, manager},
};
use highwater_policy::{pod::has_guard_volume, taint::TaintChange};
use k8s_openapi::{
    api::core::v1::{Node, Pod},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams},
    core::ApiResource,
};
use serde::de::DeserializeOwned;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::{
    args::Settings,
    error::{CALL_SECONDS, Error, call, code},
    node_controller::{cordon, device_taint, labels, reset, taint},
    run::client,
    uninstall,
};

/// How often the mark of the uninstall is renewed.
const RENEW: Duration = Duration::from_secs(10);
/// When every write has ended that an operator began before it could see the mark.
const WRITES_HAVE_ENDED: Duration = Duration::from_secs(CALL_SECONDS + 1);
/// How many objects are asked for at once.
const PAGE: u32 = 250;
/// Most writes under way at once.
const WIDTH: usize = 16;
/// How often everything is looked through until nothing of ours is left.
const ROUNDS: usize = 5;
/// How often a node is tried that others change at the same time.
const ATTEMPTS: usize = 10;

/// How many pods a refusal names.
const NAMED: usize = 10;

/// Pods that have the guard's volume, as `namespace/name`. Nothing was changed.
#[derive(Debug)]
pub(crate) struct StillGuarded(Vec<String>);

impl std::error::Error for StillGuarded {}

impl fmt::Display for StillGuarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named: Vec<_> = self.0.iter().take(NAMED).map(String::as_str).collect();
        write!(
            f,
            "not uninstalled: {} pods have a volume of {GUARD_DRIVER}, which nobody could take away afterwards, so that they could not end: {}",
            self.0.len(),
            named.join(", "),
        )?;
        match self.0.len().saturating_sub(NAMED) {
            0 => {}
            more => write!(f, " and {more} more")?,
        }
        write!(
            f,
            ". Remove the label {GUARD_LABEL} from their owners (or the volume from their spec), let them be replaced, and uninstall again; or set cleanup.abandonGuardVolumes (--abandon-guard-volumes)"
        )
    }
}

/// Marks the release as being uninstalled, then removes our taints, cordons, requests and labels and
/// empties the plans until none is left. The mark is renewed all the while, and outlasts the operators.
pub(crate) async fn cleanup(settings: Settings, abandon_guard_volumes: bool) -> anyhow::Result<()> {
    clean(&client().await?, &settings.namespace, abandon_guard_volumes).await
}

async fn clean(client: &Client, namespace: &str, abandon_guard_volumes: bool) -> anyhow::Result<()> {
    let guarded = guarded_pods(client).await?;
    if !guarded.is_empty() {
        let refusal = StillGuarded(guarded);
        if !abandon_guard_volumes {
            return Err(refusal.into());
        }
        warn!(pods = refusal.0.len(), "going on as told: {refusal}");
    }
    uninstall::mark(client, namespace).await.context("cannot stop the running operators")?;
    let renew = async {
        loop {
            sleep(RENEW).await;
            if let Err(error) = uninstall::mark(client, namespace).await {
                warn!(%error, "trying again"); // the mark outlasts many attempts
            }
        }
    };
    tokio::select! {
        done = undo(client) => done?,
        () = renew => {}
    }
    uninstall::mark(client, namespace).await.context("cannot stop the running operators")
}

async fn undo(client: &Client) -> anyhow::Result<()> {
    sleep(WRITES_HAVE_ENDED).await;
    for _ in 0..ROUNDS {
        let (touched, planned) = (touched_nodes(client).await?, planned_nodes(client).await?);
        let rules = device_taint::ours(client).await?;
        if touched.is_empty() && planned.is_empty() && rules.is_empty() {
            info!("nothing of ours is left on the nodes");
            return Ok(());
        }
        for (resource, rule) in &rules {
            let api: Api<DynamicObject> = Api::all_with(client.clone(), resource);
            device_taint::remove(&api, rule).await?;
        }
        let restore = |node: Touched| async move { restore(client, &node).await };
        stream::iter(touched.clone()).map(restore).buffer_unordered(WIDTH).try_collect::<()>().await?;
        let empty = |node: String| async move { empty(client, &node).await };
        stream::iter(planned.clone()).map(empty).buffer_unordered(WIDTH).try_collect::<()>().await?;
        let (nodes, plans, rules) = (touched.len(), planned.len(), rules.len());
        info!(nodes, plans, rules, "removed what was ours");
    }
    anyhow::bail!("something sets taints, cordons, labels or plans again: stop it, then uninstall again")
}

/// A node that has something of ours.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // independent facts
struct Touched {
    meta: ObjectMeta,
    tainted: bool,
    labelled: bool,
    cordoned: bool,
    reset_requested: bool,
}

impl Touched {
    fn any(&self) -> bool {
        self.tainted || self.labelled || self.cordoned || self.reset_requested
    }
}

async fn touched_nodes(client: &Client) -> anyhow::Result<Vec<Touched>> {
    let api: Api<Node> = Api::all(client.clone());
    let touched = |node: &Node| {
        let ObjectMeta { name, uid, .. } = node.metadata.clone();
        let touched = Touched {
            meta: ObjectMeta { name, uid, ..ObjectMeta::default() },
            tainted: taint::present(node).is_some(),
            labelled: labels::are_ours(node),
            cordoned: cordon::annotation(node).is_some(),
            reset_requested: reset::present(node).is_some(),
        };
        touched.any().then_some(touched)
    };
    Ok(find("list the nodes", &api, touched).await?)
}

/// The pods that have the guard's volume and have not ended, by namespace and name.
async fn guarded_pods(client: &Client) -> anyhow::Result<Vec<String>> {
    let api: Api<Pod> = Api::all(client.clone());
    Ok(find("list the pods", &api, still_guarded).await?)
}

fn still_guarded(pod: &Pod) -> Option<String> {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    let ended = matches!(phase, Some("Succeeded" | "Failed"));
    let name = || format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    (!ended && has_guard_volume(pod)).then(name)
}

/// The nodes whose agents still have something to follow. None where the kind is not defined (any
/// more).
async fn planned_nodes(client: &Client) -> anyhow::Result<Vec<String>> {
    let planned = |node: &DynamicObject| {
        let layers = node.data.pointer("/spec/layers").and_then(serde_json::Value::as_array);
        layers.is_some_and(|layers| !layers.is_empty()).then(|| node.name_any())
    };
    match find("list the node plans", &plans(client), planned).await {
        Err(Error::Api { source, .. }) if code(&source) == Some(404) => Ok(Vec::new()),
        names => Ok(names?),
    }
}

/// Dynamic, since a plan that cannot be read must be emptied too.
fn plans(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &ApiResource::erase::<GpuMemoryNode>(&()))
}

/// What is sought of each object, where there is any, a page at a time: Node objects are large.
async fn find<K, T>(
    what: &'static str,
    api: &Api<K>,
    sought: impl Fn(&K) -> Option<T>,
) -> Result<Vec<T>, Error>
where
    K: Resource + Clone + fmt::Debug + DeserializeOwned,
{
    let mut params = ListParams::default().limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = call(what, api.list(&params)).await?;
        found.extend(page.items.iter().filter_map(&sought));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(found),
        }
    }
}

async fn restore(client: &Client, node: &Touched) -> anyhow::Result<()> {
    let name = node.meta.name.as_deref().unwrap_or_default();
    for attempt in 1.. {
        match undo_on(client, node, name).await {
            Ok(()) => break,
            Err(error) if error.is_ordinary() && attempt < ATTEMPTS => {
                warn!(node = name, %error, "trying again");
            }
            Err(error) => {
                return Err(error).with_context(|| format!("cannot undo what is ours on node {name}"));
            }
        }
    }
    Ok(())
}

async fn undo_on(client: &Client, node: &Touched, name: &str) -> Result<(), Error> {
    if node.tainted {
        taint::write(client, name, TaintChange::Remove, async { Ok(()) }).await?;
    }
    if node.cordoned {
        cordon::release(client, name, |_| true).await?;
    }
    if node.reset_requested {
        reset::write(client, &node.meta, None).await?;
    }
    if node.labelled {
        labels::write(client, &node.meta, &labels::Set::new()).await?;
    }
    Ok(())
}

async fn empty(client: &Client, node: &str) -> anyhow::Result<()> {
    let patch = serde_json::json!({"spec": {"layers": null}});
    let params =
        PatchParams { field_manager: Some(manager::OPERATOR_CLEANUP.to_owned()), ..PatchParams::default() };
    match call("empty a node plan", plans(client).patch(node, &params, &Patch::Merge(patch))).await {
        Err(Error::Api { source, .. }) if code(&source) == Some(404) => Ok(()),
        written => written.map(drop).with_context(|| format!("cannot empty the plan of node {node}")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// Requests and their bodies.
    type Asked = Arc<Mutex<Vec<(String, String)>>>;

    /// An API server that gives one answer, and what it was asked.
    fn scripted(answer: Value) -> (Client, Asked) {
        let asked = Asked::default();
        let log = Arc::clone(&asked);
        let service = tower::service_fn(move |request: Request<Body>| {
            let (answer, log) = (answer.to_string(), Arc::clone(&log));
            async move {
                let what = format!("{} {}", request.method(), request.uri());
                let body = request.into_body().collect_bytes().await?;
                log.lock().unwrap().push((what, String::from_utf8_lossy(&body).into_owned()));
                Ok::<_, kube::Error>(Response::new(Body::from(answer.into_bytes())))
            }
        });
        (Client::new(service, "default"), asked)
    }

    fn guarded_pod(n: usize) -> Value {
        json!({"metadata": {"namespace": "team", "name": format!("p{n}")}, "spec": {"containers": [],
            "volumes": [{"name": "v", "csi": {"driver": "guard.highwater.dev"}}]}})
    }

    #[tokio::test]
    async fn nothing_is_touched_while_pods_have_the_guards_volume() {
        let pods: Vec<_> = (0..3).map(guarded_pod).collect();
        let (client, asked) =
            scripted(json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods}));
        let refused = clean(&client, "highwater-system", false).await.unwrap_err();
        assert!(refused.is::<StillGuarded>(), "{refused:?}");
        assert!(refused.to_string().contains("team/p0, team/p1, team/p2."), "{refused}");
        let asked: Vec<_> = asked.lock().unwrap().iter().map(|(what, _)| what.clone()).collect();
        assert_eq!(asked, ["GET /api/v1/pods?&limit=250"]);
    }

    #[tokio::test]
    async fn of_a_nodes_labels_only_ours_are_given_up() {
        let (client, asked) =
            scripted(json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": "n1"}}));
        let meta = ObjectMeta { name: Some("n1".into()), uid: Some("u".into()), ..ObjectMeta::default() };
        let node = Touched { meta, tainted: false, labelled: true, cordoned: false, reset_requested: false };
        undo_on(&client, &node, "n1").await.unwrap();
        let asked = asked.lock().unwrap().clone();
        let [(what, body)] = &asked[..] else { panic!("{asked:?}") };
        assert!(what.starts_with("PATCH /api/v1/nodes/n1?"), "{what}");
        assert!(what.contains("fieldManager=highwater-operator%2Fstrength"), "{what}");
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["metadata"], json!({"name": "n1", "uid": "u", "labels": {}}));
    }

    #[tokio::test]
    async fn a_cordon_of_ours_goes_and_its_annotation_with_it() {
        let (client, asked) = scripted(json!({"kind": "Node", "apiVersion": "v1",
            "metadata": {"name": "n1", "resourceVersion": "7",
                "annotations": {"highwater.dev/cordoned-for": "hw/i/u", "highwater.dev/reset-requested": "GPU-1"}},
            "spec": {"unschedulable": true}}));
        let meta = ObjectMeta { name: Some("n1".into()), uid: Some("u".into()), ..ObjectMeta::default() };
        let node = Touched { meta, tainted: false, labelled: false, cordoned: true, reset_requested: true };
        undo_on(&client, &node, "n1").await.unwrap();
        let asked = asked.lock().unwrap().clone();
        let [(read, _), (uncordon, first), (withdraw, second)] = &asked[..] else { panic!("{asked:?}") };
        assert_eq!(read, "GET /api/v1/nodes/n1");
        assert!(uncordon.starts_with("PATCH /api/v1/nodes/n1?") && withdraw.starts_with("PATCH"));
        let first: Value = serde_json::from_str(first).unwrap();
        assert_eq!(first["spec"], json!({"unschedulable": null}));
        assert_eq!(first["metadata"]["annotations"], json!({"highwater.dev/cordoned-for": null}));
        assert_eq!(first["metadata"]["resourceVersion"], "7");
        let second: Value = serde_json::from_str(second).unwrap();
        assert_eq!(second["metadata"]["annotations"], json!({"highwater.dev/reset-requested": null}));
    }

    #[test]
    fn a_pod_with_the_guards_volume_counts_until_it_has_ended() {
        let pod = |driver: &str, phase: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"namespace": "team", "name": "p"},
                "spec": {"containers": [], "volumes": [{"name": "v", "csi": {"driver": driver}}]},
                "status": {"phase": phase}}))
            .unwrap()
        };
        for phase in ["Pending", "Running"] {
            assert_eq!(still_guarded(&pod("guard.highwater.dev", phase)).as_deref(), Some("team/p"));
        }
        assert_eq!(still_guarded(&pod("guard.highwater.dev", "Succeeded")), None);
        assert_eq!(still_guarded(&pod("secrets-store.csi.k8s.io", "Running")), None);
        assert_eq!(still_guarded(&Pod::default()), None);
    }

    #[test]
    fn a_refusal_names_ten_pods_and_says_what_to_do() {
        let text = StillGuarded((0..12).map(|i| format!("team/p{i}")).collect()).to_string();
        assert!(text.starts_with("not uninstalled: 12 pods"), "{text}");
        assert!(text.contains("team/p9 and 2 more. Remove the label highwater.dev/guard"), "{text}");
        assert!(!text.contains("team/p10"), "{text}");
        assert!(StillGuarded(vec!["team/p".into()]).to_string().contains("not end: team/p. Remove"));
    }
}
