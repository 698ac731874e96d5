//! Stand-in for the API server, as far as one agent asks: lists that never change, and a
//! `GpuMemoryNode` whose status is kept and watched.

use std::{collections::BTreeMap, convert::Infallible, net::SocketAddr, sync::Arc};

use anyhow::Result;
use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{Method, StatusCode, Uri, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};

/// The collection that changes.
const PLANS: &str = "gpumemorynodes";

/// What the server has.
pub(crate) struct Objects {
    /// Objects by the plural of their kind.
    pub(crate) fixed: BTreeMap<&'static str, Vec<Value>>,
    /// The `GpuMemoryNode`.
    pub(crate) plan: watch::Sender<Value>,
}

/// Serves, and says where.
pub(crate) async fn serve(objects: Objects) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let router = Router::new().fallback(answer).with_state(Arc::new(objects));
    tokio::spawn(axum::serve(listener, router).into_future());
    Ok(address)
}

async fn answer(State(objects): State<Arc<Objects>>, method: Method, uri: Uri, body: Bytes) -> Response {
    let mut path = uri.path().trim_end_matches("/status").rsplit('/');
    let (last, parent) = (path.next().unwrap_or_default(), path.next().unwrap_or_default());
    let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
    if method == Method::GET && (objects.fixed.contains_key(last) || last == PLANS) {
        return if uri.query().is_some_and(|query| query.contains("watch=")) {
            watch(&objects, last)
        } else {
            list(&objects, last)
        };
    }
    match method {
        Method::GET if last == "version" => json(StatusCode::OK, &json!({"major": "1", "minor": "34"})),
        Method::GET if parent == PLANS => json(StatusCode::OK, &objects.plan.borrow()),
        Method::PATCH if parent == PLANS => json(StatusCode::OK, &objects.patch(&sent)),
        Method::POST | Method::PATCH => json(StatusCode::CREATED, &sent),
        _ => {
            let status = json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 404,
                "reason": "NotFound", "message": format!("{uri} is not there")});
            json(StatusCode::NOT_FOUND, &status)
        }
    }
}

fn list(objects: &Objects, collection: &str) -> Response {
    let items = objects.fixed.get(collection).cloned().unwrap_or_else(|| vec![objects.plan.borrow().clone()]);
    let list =
        json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": items});
    json(StatusCode::OK, &list)
}

fn json(code: StatusCode, value: &Value) -> Response {
    (code, [(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// A stream of changes that never ends.
fn watch(objects: &Objects, collection: &str) -> Response {
    if collection != PLANS {
        return Body::from_stream(stream::pending::<Result<Bytes, Infallible>>()).into_response();
    }
    let changes = stream::unfold(objects.plan.subscribe(), |mut plan| async {
        plan.changed().await.ok()?;
        let event = format!("{}\n", json!({"type": "MODIFIED", "object": *plan.borrow_and_update()}));
        Some((event, plan))
    });
    Body::from_stream(changes.map(Ok::<_, Infallible>)).into_response()
}

impl Objects {
    /// Takes over the status that was sent, if it differs, and gives back the object.
    fn patch(&self, sent: &Value) -> Value {
        self.plan.send_if_modified(|plan| {
            let (Some(status), Some(plan)) = (sent.get("status"), plan.as_object_mut()) else { return false };
            let old = plan.insert("status".into(), status.clone());
            old.as_ref() != Some(status)
        });
        self.plan.borrow().clone()
    }
}
