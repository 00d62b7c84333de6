//! The coordinator's HTTP answers.

mod bodies;
mod console;
mod prefix;
mod tokens;
mod what_if;

use std::net::SocketAddr;
use std::sync::Arc;

use actix_web::web::{Data, ServiceConfig, get, post};
use actix_web::{HttpRequest, HttpResponse, error};
use larder_net::audit::Audit;
use larder_net::http::in_pieces;
use larder_net::trace::Sampler;
use larder_protocol::table::MemberState;
use larder_protocol::version::Version;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

pub(crate) use self::bodies::Bodies;
pub(crate) use self::console::{Token, Tokens};
pub use self::prefix::{NodeHeld, PrefixAnswer, PrefixHeld};
pub(crate) use self::tokens::Tokenizers;
pub(crate) use self::what_if::Progress;
use crate::elect::Part;
use crate::gather;
use crate::history::History;
use crate::membership::{Lost, MemberReport, Millis, Patience};
use crate::metrics::{Metrics, Shown};
use crate::prefix::HoldingsQuery;
use crate::shared::SharedMembership;
use crate::uptime::Uptime;

/// The body of `GET /status`. Parts that a coordinator of another version leaves out are read as empty.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Always `coordinator`.
    #[serde(default)]
    pub role: String,
    /// The version that runs.
    pub version: String,
    /// Seconds since it began to serve.
    pub uptime_seconds: f64,
    /// The epoch of the last table, `TERM.NUMBER`.
    #[serde(default)]
    pub epoch: String,
    /// Whether this coordinator does not lead. Then it knows only the facts of nodes that are in the leader's tables.
    #[serde(default)]
    pub follows: bool,
    /// The UDP port at which it serves nodes and admins; 0 if it does not say.
    #[serde(default)]
    pub peer_port: u16,
    /// The leader's HTTP address, `HOST:PORT`, if another coordinator leads.
    #[serde(default)]
    pub leader: Option<String>,
    /// The members.
    pub nodes: Vec<NodeStatus>,
    /// Members that were removed lately after long silence, and did not come back.
    #[serde(default)]
    pub lost: Vec<LostStatus>,
}

/// One lost node in [`Status`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LostStatus {
    /// Its name.
    pub name: String,
    /// The last address of its HTTP server.
    pub http: SocketAddr,
    /// Its number, which it has again when it comes back.
    pub number: u16,
    /// The incarnation that was lost.
    pub incarnation: u64,
    /// Seconds since it was last heard.
    pub silent_seconds: f64,
}

/// One node in [`Status`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its name.
    pub name: String,
    /// Address of its HTTP server.
    pub http: SocketAddr,
    /// Its number.
    #[serde(default)]
    pub number: u16,
    /// The node's incarnation.
    #[serde(default)]
    pub incarnation: u64,
    /// `alive`, `suspect` or `draining`.
    #[serde(default)]
    pub state: String,
    /// Address for peers.
    pub peer: SocketAddr,
    /// Number of its GPU actors.
    #[serde(default)]
    pub devices: u16,
    /// Partitions of the directory whose home it is.
    #[serde(default)]
    pub partitions: usize,
    /// Version of the protocol between nodes that it speaks with the coordinator; 0 if that is not known.
    #[serde(default)]
    pub protocol: u8,
    /// Seconds since it was last heard.
    #[serde(default)]
    pub silent_seconds: f64,
}

/// The state that all requests share.
pub(crate) struct HttpState {
    pub(crate) membership: SharedMembership,
    pub(crate) part: Part,
    pub(crate) patience: Patience,
    pub(crate) peer_port: u16,
    pub(crate) questions: mpsc::Sender<HoldingsQuery>,
    /// Questions of the console to nodes.
    pub(crate) gathers: mpsc::Sender<gather::NodeQuery>,
    /// The last hour, for the console.
    pub(crate) history: History,
    /// The last lookups, played again.
    pub(crate) what_if: Arc<watch::Sender<Progress>>,
    /// The tokenizers of models.
    pub(crate) tokenizers: Tokenizers,
    /// The tokens of the console's users.
    pub(crate) console_tokens: Tokens,
    /// Bodies of questions that are being read and understood.
    pub(crate) bodies: Bodies,
    pub(crate) metrics: Metrics,
    pub(crate) audit: Audit,
    pub(crate) uptime: Uptime,
    /// Decides which questions are traced.
    pub(crate) sampler: Sampler,
}

/// The paths.
pub(crate) fn routes(service: &mut ServiceConfig) {
    service
        .route("/healthz", get().to(healthy))
        .route("/readyz", get().to(ready))
        .route("/metrics", get().to(metrics))
        .route("/status", get().to(status))
        .route("/v1/prefix", post().to(prefix::answer))
        .route("/", get().to(console::page))
        .route("/console.js", get().to(console::script))
        .route("/console.css", get().to(console::style))
        .route("/console/nodes", get().to(console::nodes))
        .route("/console/nodes", post().to(console::nodes))
        .route("/console/history", get().to(console::history))
        .route("/console/tokens", post().to(tokens::answer))
        .route("/console/what_if", get().to(what_if::what_if))
        .route("/console/change", post().to(console::change));
}

async fn healthy() -> &'static str {
    "ok\n"
}

/// Ready means that the coordinator serves tables, or would if there were nodes.
async fn ready(state: Data<HttpState>) -> HttpResponse {
    if state.membership.lock().is_serving(state.uptime.now()) {
        HttpResponse::Ok().body("ok\n")
    } else {
        HttpResponse::ServiceUnavailable().body("waiting for the nodes of the last term\n")
    }
}

async fn metrics(state: Data<HttpState>) -> actix_web::Result<HttpResponse> {
    let now = state.uptime.now();
    let shown = {
        let membership = state.membership.lock();
        let leads = membership.leads(now);
        Shown {
            members: membership.report(now),
            // One coordinator counts them, so that a sum over all is right.
            lost: if leads { membership.lost(now).len() } else { 0 },
            epoch: membership.table().epoch,
            leads,
            counts: membership.counts(),
        }
    };
    let text = state.metrics.render(state.uptime.elapsed(), &shown, state.patience.heartbeat_ms);
    let text = text.map_err(error::ErrorInternalServerError)?;
    Ok(in_pieces(prometheus::TEXT_FORMAT, text))
}

async fn status(state: Data<HttpState>, request: HttpRequest) -> actix_web::Result<HttpResponse> {
    if let Some(refused) = console::refuse_arguments(&request) {
        return Ok(refused);
    }
    let now = state.uptime.now();
    let membership = state.membership.lock();
    let leads = membership.leads(now);
    let leader = state.part.leader.borrow().as_ref().map(|leader| leader.http.clone());
    let status = Status {
        role: "coordinator".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        uptime_seconds: state.uptime.elapsed().as_secs_f64(),
        epoch: membership.table().epoch.to_string(),
        follows: !leads,
        peer_port: state.peer_port,
        leader: leader.filter(|_| !leads),
        nodes: membership.report(now).into_iter().map(node_status).collect(),
        lost: membership.lost(now).into_iter().map(lost_status).collect(),
    };
    drop(membership);
    Ok(in_pieces("application/json", serde_json::to_vec(&status)?))
}

fn node_status(report: MemberReport) -> NodeStatus {
    let MemberReport { member, partitions, version, silent_ms } = report;
    NodeStatus {
        name: member.name,
        http: member.http,
        number: member.number.0,
        incarnation: member.incarnation,
        state: match member.state {
            MemberState::Alive => "alive".into(),
            MemberState::Suspect => "suspect".into(),
            MemberState::Draining => "draining".into(),
        },
        peer: member.peer,
        devices: member.devices,
        partitions,
        protocol: version.map_or(0, Version::number),
        silent_seconds: silent_ms as f64 / 1_000.0,
    }
}

fn lost_status((Lost { member, .. }, silent_ms): (Lost, Millis)) -> LostStatus {
    LostStatus {
        name: member.name,
        http: member.http,
        number: member.number.0,
        incarnation: member.incarnation,
        silent_seconds: silent_ms as f64 / 1_000.0,
    }
}
