//! Routes the requests of a replay, by load or by the nodes' cached chunks.

use std::collections::BTreeMap;

use larder_coordinator::PrefixAnswer;
use larder_protocol::{ChunkHash, Fingerprint};
use serde::Serialize;

use crate::address::Coordinators;
use crate::cluster::first_answer;
use crate::http;
use crate::trace::CHUNK_TOKENS;

/// The rule by which a replay chooses the node of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Route {
    /// The node that recomputed the fewest tokens lately
    #[default]
    Load,
    /// The node where the request costs least, as the coordinator says
    Cache,
}

/// Asks a coordinator for the costs of a request at each node.
#[derive(Debug, Clone)]
pub struct Router {
    coordinator: Coordinators,
    fingerprint: String,
}

/// The question, as `POST /v1/prefix` takes it.
#[derive(Serialize)]
struct RouteQuestion {
    fingerprint: String,
    chunk_tokens: u64,
    hashes: Vec<String>,
    prompt_tokens: u64,
    backlog_tokens: BTreeMap<String, u64>,
}

impl Router {
    /// A router of requests for a namespace's chunks.
    pub(crate) fn new(coordinator: Coordinators, namespace: &Fingerprint) -> Self {
        Self { coordinator, fingerprint: format!("{namespace:x}") }
    }

    /// The part of a prompt that each node holds, and the costs of the request there; `None` if the coordinator does not answer.
    pub(super) async fn ask(
        &self,
        hashes: &[ChunkHash],
        prompt_tokens: u64,
        backlog_tokens: BTreeMap<String, u64>,
    ) -> Option<PrefixAnswer> {
        let question = RouteQuestion {
            fingerprint: self.fingerprint.clone(),
            chunk_tokens: CHUNK_TOKENS,
            hashes: hashes.iter().map(ToString::to_string).collect(),
            prompt_tokens,
            backlog_tokens,
        };
        let coordinator = self.coordinator.clone();
        let ask = move || {
            first_answer(coordinator.each(), |one| http::post_json(one, "/v1/prefix", &question)).ok()
        };
        tokio::task::spawn_blocking(ask).await.ok().flatten()
    }
}
