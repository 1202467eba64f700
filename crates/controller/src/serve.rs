//! The HTTP port: `/metrics`, `/healthz` (the process lives), `/readyz` (it knows the cluster).

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::metrics::Metrics;

/// Serves until the process ends.
pub async fn serve(
    listener: TcpListener,
    metrics: Metrics,
    ready: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let readyz = move || {
        let ready = *ready.borrow();
        async move {
            if ready {
                (StatusCode::OK, "ok")
            } else {
                (StatusCode::SERVICE_UNAVAILABLE, "the first lists are not complete")
            }
        }
    };
    let text = move || {
        let text = metrics.text();
        async move { ([("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")], text) }
    };
    let app = Router::new()
        .route("/metrics", get(text))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(readyz));
    axum::serve(listener, app).await
}
