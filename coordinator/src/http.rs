//! What the coordinator answers over HTTP.

use std::net::SocketAddr;
use std::time::Instant;

use actix_web::web::{Data, Json, ServiceConfig, get};
use actix_web::{HttpResponse, error};
use serde::{Deserialize, Serialize};

use crate::config::NodeConfig;
use crate::metrics::Metrics;
use crate::server::now;

/// The body of `GET /status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Always `coordinator`.
    pub role: String,
    /// The version that runs.
    pub version: String,
    /// Seconds since it began to serve.
    pub uptime_seconds: f64,
    /// The nodes that it was told of. Whether they answer is theirs to say.
    pub nodes: Vec<NodeStatus>,
}

/// One node in [`Status`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its name.
    pub name: String,
    /// Where it serves HTTP.
    pub http: SocketAddr,
}

/// What all requests share.
pub(crate) struct State {
    pub(crate) nodes: Vec<NodeConfig>,
    pub(crate) metrics: Metrics,
    pub(crate) started: Instant,
}

/// The paths.
pub(crate) fn routes(service: &mut ServiceConfig) {
    service
        .route("/healthz", get().to(healthy))
        .route("/readyz", get().to(healthy))
        .route("/metrics", get().to(metrics))
        .route("/status", get().to(status));
}

/// It is healthy and ready whenever it answers: nothing of it starts later than HTTP.
async fn healthy() -> &'static str {
    "ok\n"
}

async fn metrics(state: Data<State>) -> actix_web::Result<HttpResponse> {
    let text = state.metrics.render(now() - state.started).map_err(error::ErrorInternalServerError)?;
    Ok(HttpResponse::Ok().insert_header(("content-type", prometheus::TEXT_FORMAT)).body(text))
}

async fn status(state: Data<State>) -> Json<Status> {
    let nodes = state.nodes.iter().map(|node| NodeStatus { name: node.name.clone(), http: node.http });
    Json(Status {
        role: "coordinator".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        uptime_seconds: (now() - state.started).as_secs_f64(),
        nodes: nodes.collect(),
    })
}
