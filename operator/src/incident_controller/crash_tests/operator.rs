//! One operator, its calls, and the news that its watches would bring.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, Weak},
};

use axum::http::{Request, Response};
use kube::{
    Client,
    client::Body,
    runtime::{reflector::store::Writer, watcher::Event},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};

use super::cluster::{Cluster, Fault, INCIDENT, PODS};
use crate::{
    context::{Context, Ends, Known, Writers},
    error::Error,
    incident_controller::reconcile,
    node_controller::{self, device_taint},
    policy_controller,
};

/// Most rounds of a story.
const ROUNDS: usize = 40;

/// Where an operator that is struck says so, and waits for somebody who lets it go on.
#[derive(Default)]
pub(super) struct Line {
    struck: Notify,
    resume: Notify,
}

impl Line {
    /// Whether an operator is struck before its work is done.
    pub(super) async fn died(&self, work: impl Future<Output = ()>) -> bool {
        tokio::select! {
            () = work => false,
            () = self.struck.notified() => true,
        }
    }
}

pub(super) struct Operator(Arc<Inner>);

struct Inner {
    ctx: Context,
    writers: Mutex<Writers>,
    /// The versions of what was heard last, by the paths that a store has.
    heard: Mutex<HashMap<&'static str, Vec<(String, Value)>>>,
    /// Whether single devices can be tainted.
    dra: bool,
    learnt: watch::Sender<Arc<Known>>,
    _leads: watch::Sender<bool>,
}

impl Operator {
    pub(super) fn new(cluster: &Arc<Mutex<Cluster>>, line: &Arc<Line>) -> Self {
        let own: Arc<OnceLock<Weak<Inner>>> = Arc::default();
        let dra = lock(cluster).dra;
        let (cluster, line, known_as) = (Arc::clone(cluster), Arc::clone(line), Arc::clone(&own));
        let service = tower::service_fn(move |request: Request<Body>| {
            let (cluster, line, known_as) = (Arc::clone(&cluster), Arc::clone(&line), Arc::clone(&known_as));
            async move {
                let operator = known_as.get().and_then(Weak::upgrade);
                request_of(operator.as_deref(), &cluster, &line, request).await
            }
        });
        let client = Client::new(service, "default");
        let (ctx, Ends { writers, leads, learnt, .. }) = Context::new(client, "hw".into()).unwrap();
        leads.send_replace(true);
        let heard = Mutex::default();
        let inner = Arc::new(Inner { ctx, writers: Mutex::new(writers), heard, dra, learnt, _leads: leads });
        assert!(own.set(Arc::downgrade(&inner)).is_ok());
        Self(inner)
    }

    /// Brings every store to what the API server holds.
    pub(super) fn hear(&self, cluster: &Mutex<Cluster>) {
        self.0.hear(&lock(cluster));
    }

    /// Looks at the incident and at the node once, and at what else is looked at from time to time.
    pub(super) async fn work(&self) {
        let ctx = &self.0.ctx;
        // Whatever was refused was so some time before.
        for pod in ["a", "b", "c"] {
            ctx.refusals.forget(&("team".to_owned(), format!("pod/{pod}")));
        }
        let key = ("hw".to_owned(), "i".to_owned());
        ctx.refusals.forget(&key);
        Box::pin(reconcile(ctx, &key)).await.map_or_else(|e| is_no_surprise(&e), drop);
        Box::pin(node_controller::reconcile(ctx, "n1")).await.map_or_else(|e| is_no_surprise(&e), drop);
        if self.0.dra {
            device_taint::list_again(ctx).await.unwrap_or_else(|e| is_no_surprise(&e));
        }
    }

    /// What the operator itself works with.
    pub(super) fn context(&self) -> &Context {
        &self.0.ctx
    }

    /// How many requests of a kind were counted.
    pub(super) fn evictions(&self, outcome: &str) -> u64 {
        self.0.ctx.metrics.evictions.with_label_values(&[outcome]).get()
    }
}

/// What an operator meets while calls fail: no error of its own.
fn is_no_surprise(error: &Error) {
    let met = error.is_ordinary() || ["throttled", "connection"].contains(&error.category());
    assert!(met, "{error}");
}

impl Inner {
    fn hear(&self, cluster: &Cluster) {
        let mut heard = self.heard.lock().unwrap();
        let mut news = |prefix: &'static str| -> Option<Vec<Value>> {
            let objects = cluster.objects.iter().filter(|(path, _)| path.starts_with(prefix));
            let (versions, objects): (Vec<_>, Vec<_>) = objects
                .map(|(path, object)| ((path.clone(), object["metadata"]["resourceVersion"].clone()), object))
                .unzip();
            let before = heard.insert(prefix, versions.clone());
            (before != Some(versions)).then(|| objects.into_iter().cloned().collect())
        };
        let mut writers = self.writers.lock().unwrap();
        let w = &mut *writers;
        let plans = [
            fill(&mut w.nodes, news("/api/v1/nodes/")),
            fill(&mut w.plans, news("/gmn/")),
            fill(&mut w.policies, news("/policy/")),
            fill(&mut w.namespaces, news("/api/v1/namespace-objects/")),
        ];
        fill(&mut w.pods, news(PODS));
        fill(&mut w.incidents, news(INCIDENT));
        fill(&mut w.ledger, news("/api/v1/namespaces/hw/configmaps/"));
        if plans.contains(&true) {
            policy_controller::learn(&self.ctx, &self.learnt);
        }
    }
}

async fn request_of(
    operator: Option<&Inner>,
    cluster: &Mutex<Cluster>,
    line: &Line,
    request: Request<Body>,
) -> Result<Response<Body>, kube::Error> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let dry = request.uri().query().is_some_and(|query| query.contains("dryRun=All"));
    let bytes = request.into_body().collect_bytes().await?;
    let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    let fault = lock(cluster).strike();
    match fault {
        Some(Fault::DiesBefore) => {
            line.struck.notify_one();
            std::future::pending::<()>().await;
        }
        Some(Fault::StallsBefore) => {
            line.struck.notify_one();
            line.resume.notified().await;
        }
        Some(Fault::Throttled) => {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                "message": "too many requests, please try again later", "reason": "TooManyRequests", "code": 429});
            let response = Response::builder().status(429).header("Retry-After", "1");
            return Ok(response.body(Body::from(status.to_string().into_bytes())).unwrap());
        }
        _ => {}
    }
    let (status, answer) = {
        let mut cluster = lock(cluster);
        let answer = cluster.answer(&method, &path, dry, &body);
        if let Some(operator) = operator.filter(|_| cluster.news_at_once && method != "GET") {
            operator.hear(&cluster);
        }
        answer
    };
    match fault {
        Some(Fault::DiesAfter) => {
            line.struck.notify_one();
            std::future::pending::<()>().await;
        }
        Some(Fault::StallsAfter) => {
            line.struck.notify_one();
            line.resume.notified().await;
        }
        Some(Fault::LosesAnswer) => return Err(kube::Error::Service("the connection was reset".into())),
        _ => {}
    }
    Ok(Response::builder().status(status).body(Body::from(answer.to_string().into_bytes())).unwrap())
}

/// Brings a store to these objects, if there is news of them.
fn fill<K>(writer: &mut Writer<K>, news: Option<Vec<Value>>) -> bool
where
    K: kube::runtime::reflector::Lookup + DeserializeOwned + Clone + 'static,
    K::DynamicType: Eq + std::hash::Hash + Clone,
{
    let Some(objects) = news else { return false };
    writer.apply_watcher_event(&Event::Init);
    for object in objects {
        writer.apply_watcher_event(&Event::InitApply(serde_json::from_value(object).unwrap()));
    }
    writer.apply_watcher_event(&Event::InitDone);
    true
}

pub(super) fn lock(cluster: &Mutex<Cluster>) -> MutexGuard<'_, Cluster> {
    cluster.lock().unwrap()
}

/// Plays a cluster to the end. Says whether what was to go wrong did.
pub(super) async fn play(cluster: Cluster) -> (Cluster, bool) {
    let fault = cluster.fault.map(|(_, fault)| fault);
    let stalls = matches!(fault, Some(Fault::StallsBefore | Fault::StallsAfter));
    let (cluster, line) = (Arc::new(Mutex::new(cluster)), Arc::new(Line::default()));
    let mut operator = Operator::new(&cluster, &line);
    for _ in 0..ROUNDS {
        operator.hear(&cluster);
        let next = {
            let mut work = std::pin::pin!(operator.work());
            tokio::select! {
                () = &mut work => None,
                () = line.struck.notified() => {
                    let next = Operator::new(&cluster, &line);
                    if stalls {
                        play_on(&next, &cluster).await;
                        line.resume.notify_one();
                        // Then it hears that it leads no more.
                        work.await;
                    }
                    Some(next)
                }
            }
        };
        operator = next.unwrap_or(operator);
        if lock(&cluster).is_over() {
            break;
        }
        lock(&cluster).live();
    }
    let end = lock(&cluster).clone();
    let struck = end.fault.is_none();
    (end, struck)
}

/// Another operator goes on with everything until it is over.
async fn play_on(operator: &Operator, cluster: &Mutex<Cluster>) {
    for _ in 0..ROUNDS {
        operator.hear(cluster);
        operator.work().await;
        if lock(cluster).is_over() {
            break;
        }
        lock(cluster).live();
    }
}
