//! `/metrics`, `/healthz` and `/readyz`.
//!
//! All are answered by the agent's loop itself: should that be stuck, so is the answer, and the
//! kubelet's probe says so.

use std::{net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
    time::timeout,
};

/// How long the loop may take to answer.
const LIMIT: Duration = Duration::from_secs(5);

/// Something that is asked of the loop.
#[derive(Debug)]
pub(crate) enum Ask {
    /// The metrics in the text format.
    Metrics(oneshot::Sender<String>),
    /// Whether the agent lives; else why not.
    Health(oneshot::Sender<Result<(), String>>),
    /// Whether it does its work; else why not.
    Ready(oneshot::Sender<Result<(), String>>),
}

type Asks = mpsc::Sender<Ask>;

/// Serves until the process ends.
///
/// # Errors
/// Fails when the address cannot be bound.
pub(crate) async fn serve(listen: SocketAddr, asks: Asks) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route(
            "/healthz",
            get(|State(asks): State<Asks>| async move { verdict(ask(&asks, Ask::Health).await) }),
        )
        .route(
            "/readyz",
            get(|State(asks): State<Asks>| async move { verdict(ask(&asks, Ask::Ready).await) }),
        )
        .with_state(asks);
    axum::serve(TcpListener::bind(listen).await?, router).await
}

async fn metrics(State(asks): State<Asks>) -> Response {
    match ask(&asks, Ask::Metrics).await {
        Some(text) => ([(CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        None => stuck(),
    }
}

async fn ask<T>(asks: &Asks, question: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Option<T> {
    let (send, receive) = oneshot::channel();
    timeout(LIMIT, async {
        asks.send(question(send)).await.ok()?;
        receive.await.ok()
    })
    .await
    .ok()?
}

fn verdict(answer: Option<Result<(), String>>) -> Response {
    match answer {
        Some(Ok(())) => "ok\n".into_response(),
        Some(Err(why)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
        None => stuck(),
    }
}

fn stuck() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "the agent's loop does not answer\n").into_response()
}
