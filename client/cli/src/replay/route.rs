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

/// The cost of a request at a node, in tokens: the same at all nodes without the coordinator's answer, and the most at a node that
/// the coordinator does not know.
pub(super) fn cost_at(answer: Option<&PrefixAnswer>, node: &str) -> u64 {
    answer.map_or(0, |answer| {
        let known = answer.nodes.iter().find(|known| known.name == node);
        known.map_or(u64::MAX, |known| known.cost_tokens)
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_the_coordinator_does_not_know_costs_most() {
        let held = serde_json::json!({"chunks": 0, "tokens": 0});
        let node = serde_json::json!({"name": "a", "chunks": 0, "tokens": 0, "cost_tokens": 9});
        let answer = serde_json::json!({"cluster": held, "nodes": [node], "silent_homes": []});
        let answer: PrefixAnswer = serde_json::from_value(answer).unwrap();
        assert_eq!((cost_at(Some(&answer), "a"), cost_at(Some(&answer), "b")), (9, u64::MAX));
        assert_eq!(cost_at(None, "b"), 0);
    }
}
