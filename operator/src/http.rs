//! `/metrics`, `/healthz` and `/readyz`.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Context as _;
use axum::{Router, extract::State, http::StatusCode, response::IntoResponse, routing::get};
use tokio::net::TcpListener;

use crate::metrics::Metrics;

/// Whether everything was heard once, so that decisions can be made here.
pub(crate) type Ready = Arc<AtomicBool>;

/// Serves until the process ends. `/healthz` says that the process serves; `/readyz` says that
/// its stores are filled, whether it leads or not.
pub(crate) async fn serve(listen: SocketAddr, metrics: Metrics, ready: Ready) -> anyhow::Result<()> {
    let app = Router::new()
        .route("/metrics", get(expose))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(is_ready))
        .with_state((metrics, ready));
    let listener =
        TcpListener::bind(listen).await.with_context(|| format!("failed to listen on {listen}"))?;
    axum::serve(listener, app).await.context("the HTTP server ended")
}

async fn expose(State((metrics, _)): State<(Metrics, Ready)>) -> impl IntoResponse {
    match metrics.text() {
        Ok(text) => (StatusCode::OK, [("content-type", "text/plain; version=0.0.4")], text),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, [("content-type", "text/plain")], error.to_string())
        }
    }
}

async fn is_ready(State((_, ready)): State<(Metrics, Ready)>) -> impl IntoResponse {
    if ready.load(Ordering::Relaxed) {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the first lists are not complete")
    }
}
