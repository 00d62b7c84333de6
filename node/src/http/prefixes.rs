//! `GET /prefixes`: the hottest prefixes of the last lookups.

use larder_core::prefixes::{HotRun, hottest};
use larder_core::what_if::PastLookup;
use larder_net::blocking::blocking;
use larder_protocol::ChunkHash;
use serde::{Deserialize, Serialize};

use super::HttpState;
use super::why::SEARCHES;

/// A run of chunks in the list that `GET /prefixes` returns. The last lookups had each chunk of a run equally often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixStatus {
    /// The place in the list of the run before this run, counted from 0; `None` at the beginning of a prompt.
    pub parent: Option<usize>,
    /// Fingerprint of the namespace: 64 hexadecimal digits.
    pub namespace: String,
    /// The first 16 digits of the hash of the run's first chunk.
    pub first_chunk: String,
    /// Position of the run's first chunk in its prompts.
    pub from: u32,
    /// Position after the run's last chunk.
    pub to: u32,
    /// Tokens of all chunks of the run.
    pub tokens: u64,
    /// Lookups that had the run.
    pub lookups: u64,
    /// Lookups that found the whole run, here or elsewhere.
    pub hits: u64,
}

/// The hottest prefixes of the lookups at all actors.
pub(super) async fn prefixes(state: &HttpState) -> Vec<PrefixStatus> {
    // Never an error: nobody closes the semaphore.
    let searching = SEARCHES.acquire().await;
    let seen = state.ask_actors(|actor| actor.core.past()).await;
    let lookups: Vec<PastLookup> = seen.flat_map(|(_, lookups)| lookups).collect();
    let runs = blocking(move || {
        let runs = hottest(lookups, MOST_RUNS);
        drop(searching);
        runs
    });
    let runs = runs.await;
    runs.into_iter().map(prefix_status).collect()
}

fn prefix_status(run: HotRun) -> PrefixStatus {
    let mut first = [0; 32];
    first[..8].copy_from_slice(&PastLookup::short_hash(&run.namespace, run.first).to_le_bytes());
    let mut first_chunk = ChunkHash(first).to_string();
    first_chunk.truncate(16);
    PrefixStatus {
        parent: run.parent,
        namespace: ChunkHash(run.namespace.0).to_string(),
        first_chunk,
        from: run.from,
        to: run.to,
        tokens: run.tokens,
        lookups: run.lookups,
        hits: run.hits,
    }
}

/// Maximum number of runs in an answer.
const MOST_RUNS: usize = 100;
