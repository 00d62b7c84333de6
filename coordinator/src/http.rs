//! What the coordinator answers over HTTP.

use std::net::SocketAddr;

use actix_web::web::{Data, Json, JsonConfig, ServiceConfig, get, post};
use actix_web::{HttpRequest, HttpResponse, error};
use larder_client::trace::Sampler;
use larder_protocol::hashing::{PromptExtra, hash_prompt};
use larder_protocol::limits::{MAX_CHAIN_CHUNKS, MAX_CHUNK_TOKENS};
use larder_protocol::table::MemberState;
use larder_protocol::{Chain, ChunkHash, Fingerprint, sha256_cbor};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use crate::membership::{MemberReport, Patience};
use crate::metrics::Metrics;
use crate::prefix::{Holdings, Question};
use crate::serve::SharedMembership;
use crate::server::Uptime;

/// The body of `GET /status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Always `coordinator`.
    pub role: String,
    /// The version that runs.
    pub version: String,
    /// Seconds since it began to serve.
    pub uptime_seconds: f64,
    /// The epoch of the last table, `TERM.NUMBER`.
    pub epoch: String,
    /// The members.
    pub nodes: Vec<NodeStatus>,
}

/// One node in [`Status`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its name.
    pub name: String,
    /// Where it serves HTTP.
    pub http: SocketAddr,
    /// Its number.
    pub number: u16,
    /// Which life of it this is.
    pub incarnation: u64,
    /// `alive` or `suspect`.
    pub state: String,
    /// Where peers reach it.
    pub peer: SocketAddr,
    /// GPU actors it has.
    pub devices: u16,
    /// Partitions of the directory it is home to.
    pub partitions: usize,
    /// Seconds since it was heard of.
    pub silent_seconds: f64,
}

/// The body of `POST /v1/prefix`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct PrefixRequest {
    /// The namespace: 64 hexadecimal digits, as nodes' events have it.
    fingerprint: String,
    /// Tokens of one chunk.
    chunk_tokens: u32,
    /// The prompt's chunks as hashes, first to last, 64 hexadecimal digits each.
    hashes: Option<Vec<String>>,
    /// The prompt's tokens, where the coordinator knows the hash.
    tokens: Option<Vec<u32>>,
    /// How the namespace's chunks are hashed from tokens; by Larder's own hash where it is not given.
    #[serde(default)]
    hash: Hash,
}

/// How chunks are hashed from tokens.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case", deny_unknown_fields)]
enum Hash {
    /// Larder's own.
    #[default]
    Larder,
    /// vLLM's.
    Sha256Cbor(EnginePrompt),
}

/// What vLLM hashes besides the tokens.
#[derive(Debug, Clone, Deserialize)]
struct EnginePrompt {
    /// The engines' `PYTHONHASHSEED`, or what stands for none.
    seed: Option<String>,
    /// Tokens of the engine's own blocks; those of a chunk where it is not given.
    block_tokens: Option<u32>,
    cache_salt: Option<String>,
    lora: Option<Lora>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lora {
    name: String,
    path: String,
}

/// The answer to it.
#[derive(Debug, Serialize)]
struct PrefixAnswer {
    /// What all nodes together have.
    cluster: Held,
    /// What each has.
    nodes: Vec<NodeHeld>,
    /// Nodes that did not answer: what they know is missing.
    silent_homes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct NodeHeld {
    name: String,
    #[serde(flatten)]
    held: Held,
}

#[derive(Debug, Serialize)]
struct Held {
    chunks: usize,
    tokens: u64,
}

/// What all requests share.
pub(crate) struct State {
    pub(crate) membership: SharedMembership,
    pub(crate) patience: Patience,
    pub(crate) questions: mpsc::Sender<Question>,
    pub(crate) metrics: Metrics,
    pub(crate) uptime: Uptime,
    /// Which questions are traced.
    pub(crate) sampler: Sampler,
}

/// The paths.
pub(crate) fn routes(service: &mut ServiceConfig) {
    service
        .app_data(JsonConfig::default().limit(MAX_BODY_BYTES))
        .route("/healthz", get().to(healthy))
        .route("/readyz", get().to(ready))
        .route("/metrics", get().to(metrics))
        .route("/status", get().to(status))
        .route("/v1/prefix", post().to(prefix));
}

async fn healthy() -> &'static str {
    "ok\n"
}

/// Ready means that it serves tables, or would if there were nodes.
async fn ready(state: Data<State>) -> HttpResponse {
    if state.membership.lock().is_serving(state.uptime.now()) {
        HttpResponse::Ok().body("ok\n")
    } else {
        HttpResponse::ServiceUnavailable().body("waiting for the nodes of the last term\n")
    }
}

async fn metrics(state: Data<State>) -> actix_web::Result<HttpResponse> {
    let (members, epoch, counts) = {
        let membership = state.membership.lock();
        (membership.report(state.uptime.now()), membership.table().epoch, membership.counts())
    };
    let heartbeat_ms = state.patience.heartbeat_ms;
    let text = state.metrics.render(state.uptime.elapsed(), &members, epoch, counts, heartbeat_ms);
    let text = text.map_err(error::ErrorInternalServerError)?;
    Ok(HttpResponse::Ok().insert_header(("content-type", prometheus::TEXT_FORMAT)).body(text))
}

async fn status(state: Data<State>) -> Json<Status> {
    let membership = state.membership.lock();
    Json(Status {
        role: "coordinator".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        uptime_seconds: state.uptime.elapsed().as_secs_f64(),
        epoch: membership.table().epoch.to_string(),
        nodes: membership.report(state.uptime.now()).into_iter().map(node_status).collect(),
    })
}

/// How much of a prompt's prefix each node holds. The question belongs to the trace of its header `traceparent`; one that
/// is none counts as none, as its standard has it.
async fn prefix(
    state: Data<State>,
    head: HttpRequest,
    request: Json<PrefixRequest>,
) -> actix_web::Result<Json<PrefixAnswer>> {
    let parent = head.headers().get("traceparent").and_then(|value| value.to_str().ok()?.parse().ok());
    let trace = state.sampler.request("prefix", parent);
    let chunk_tokens = request.chunk_tokens;
    let (fingerprint, chain) = request.into_inner().chain().map_err(error::ErrorBadRequest)?;
    if trace.is_recorded() {
        trace.set("larder.namespace", tracing::field::display(fingerprint));
        trace.count("larder.chunks", chain.hashes.len() as u64);
    }
    let (answer, answered) = oneshot::channel();
    if state.questions.try_send(Question { fingerprint, chain, trace, answer }).is_err() {
        return Err(error::ErrorServiceUnavailable("too many questions at a time: ask again in a moment\n"));
    }
    let answered = answered.await.map_err(|_| error::ErrorServiceUnavailable("the coordinator stops\n"))?;
    let Holdings { cluster_chunks, chunks, silent_homes } = answered;
    let held = |chunks: usize| Held { chunks, tokens: chunks as u64 * u64::from(chunk_tokens) };
    Ok(Json(PrefixAnswer {
        cluster: held(cluster_chunks),
        nodes: chunks.into_iter().map(|(name, chunks)| NodeHeld { name, held: held(chunks) }).collect(),
        silent_homes,
    }))
}

impl PrefixRequest {
    fn chain(self) -> Result<(Fingerprint, Chain), String> {
        let fingerprint: ChunkHash = self
            .fingerprint
            .parse()
            .map_err(|error| format!("fingerprint: {error}; a node's /events tells those in use\n"))?;
        let fingerprint = Fingerprint(fingerprint.0);
        if !(1..=MAX_CHUNK_TOKENS).contains(&self.chunk_tokens) {
            return Err(format!("chunk_tokens: 1 to {MAX_CHUNK_TOKENS}\n"));
        }
        let root = fingerprint.root();
        let hashes = match (self.hashes, self.tokens) {
            (Some(hashes), None) => hashes
                .iter()
                .enumerate()
                .map(|(i, hash)| hash.parse().map_err(|error| format!("hashes[{i}]: {error}\n")))
                .collect::<Result<Vec<ChunkHash>, String>>()?,
            (None, Some(tokens)) => match &self.hash {
                Hash::Larder => hash_prompt(root, &tokens, self.chunk_tokens, PromptExtra::default()),
                Hash::Sha256Cbor(prompt) => prompt.hashes(&tokens, self.chunk_tokens)?,
            },
            _ => return Err("give either `hashes` or `tokens`\n".to_owned()),
        };
        if hashes.len() > MAX_CHAIN_CHUNKS {
            return Err(format!("at most {MAX_CHAIN_CHUNKS} chunks\n"));
        }
        Ok((fingerprint, Chain::from_root(root, hashes)))
    }
}

impl EnginePrompt {
    fn hashes(&self, tokens: &[u32], chunk_tokens: u32) -> Result<Vec<ChunkHash>, String> {
        let block_tokens = self.block_tokens.unwrap_or(chunk_tokens);
        if block_tokens == 0 || !chunk_tokens.is_multiple_of(block_tokens) {
            return Err(format!("hash.block_tokens: a chunk of {chunk_tokens} tokens is of whole blocks\n"));
        }
        let seed = self.seed.as_deref().unwrap_or(sha256_cbor::DEFAULT_SEED);
        let lora = self.lora.as_ref().map(|Lora { name, path }| sha256_cbor::Lora { name, path });
        let extra = sha256_cbor::PromptExtra { cache_salt: self.cache_salt.as_deref(), lora };
        Ok(sha256_cbor::hash_prompt(seed, tokens, block_tokens, chunk_tokens, extra))
    }
}

fn node_status(report: MemberReport) -> NodeStatus {
    let MemberReport { member, partitions, silent_ms } = report;
    NodeStatus {
        name: member.name,
        http: member.http,
        number: member.number.0,
        incarnation: member.incarnation,
        state: match member.state {
            MemberState::Alive => "alive".into(),
            MemberState::Suspect => "suspect".into(),
        },
        peer: member.peer,
        devices: member.devices,
        partitions,
        silent_seconds: silent_ms as f64 / 1_000.0,
    }
}

/// A prompt of two million tokens, as numbers of seven digits.
const MAX_BODY_BYTES: usize = 16 << 20;
