//! /metrics and /healthz.

use crate::metrics;
use crate::state::Shared;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, extract};
use prometheus_client::registry::Registry;
use std::sync::Arc;

/// Serves until aborted.
pub(crate) async fn serve(listener: tokio::net::TcpListener, shared: Shared) {
    let registry = Arc::new(metrics::registry(shared));
    let router = Router::new()
        .route("/metrics", get(scrape))
        .route("/healthz", get(|| async { "ok\n" }))
        .with_state(registry);
    if let Err(e) = axum::serve(listener, router).await {
        log::error!("metrics are served no longer: {e}");
    }
}

async fn scrape(extract::State(registry): extract::State<Arc<Registry>>, headers: HeaderMap) -> Response {
    let mut text = String::new();
    if prometheus_client::encoding::text::encode(&mut text, &registry).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or("");
    if accept.contains("application/openmetrics-text") {
        let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        return ([(header::CONTENT_TYPE, content_type)], text).into_response();
    }
    let content_type = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], metrics::classic(&text)).into_response()
}
