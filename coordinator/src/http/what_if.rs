//! `GET /console/what_if`: the hits that the last lookups of all nodes would have had with other sizes, policies and ways to work
//! together.
//!
//! The nodes hand over their lookups without tokens. Playing them takes seconds of one processor: a thread of the lowest priority
//! does it, once for all requests within a minute.

use std::sync::Arc;
use std::time::Duration;

use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};
use larder_core::Millis;
use larder_core::store::policy::PolicyName;
use larder_core::what_if::cluster::{MAX_CLUSTER_NODES, NodeSize};
use larder_core::what_if::together::{NodePast, Tried, Working, play};
use larder_core::what_if::{PastLookup, Played};
use larder_net::http::in_pieces;
use larder_protocol::Fingerprint;
use larder_protocol::limits::MAX_CHAIN_CHUNKS;
use larder_protocol::peer::{PeerRequest, Show};
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use super::HttpState;
use super::console::{harden, refuse_arguments, refuse_strangers};
use crate::gather::{NodeQuery, Shown, Wanted};
use crate::uptime::Uptime;

/// The body of `GET /console/what_if`.
#[derive(Debug, Serialize)]
struct WhatIfStatus {
    /// Whether lookups are being played at the moment: ask again for a newer answer.
    running: bool,
    /// Seconds since the answer was made; `None` without an answer.
    age_seconds: Option<f64>,
    /// The nodes whose lookups are not in the answer.
    left_out: Vec<LeftOutNode>,
    /// The answer; `None` while the first answer is being made, or while nothing was looked up and cached yet.
    played: Option<PlayedStatus>,
}

/// A node in [`WhatIfStatus`] whose lookups are not played.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct LeftOutNode {
    /// The node's name.
    node: String,
    /// The reason.
    error: String,
}

/// The lookups that were played, in [`WhatIfStatus`].
#[derive(Debug, Clone, PartialEq, Serialize)]
struct PlayedStatus {
    /// Nodes whose lookups were played.
    nodes: usize,
    /// Whether they read each other's chunks at present.
    shares: bool,
    /// The policies in force.
    policies: Vec<String>,
    /// Bytes of a chunk, on average over the nodes' chunks.
    chunk_bytes: u64,
    /// Tokens of one chunk.
    chunk_tokens: u32,
    /// Lookups that only filled the caches.
    warming_lookups: u64,
    /// Lookups that were counted.
    counted_lookups: u64,
    /// Lookups that were left out: of chunks of another size, with a chunk behind another one than before, or too many.
    left_out_lookups: u64,
    /// Seconds from the first counted lookup to the last.
    counted_seconds: f64,
    /// The number of different chunks in these lookups: a cache for more chunks is as good as one that never evicts.
    distinct_chunks: u64,
    /// Tokens of the counted lookups.
    tokens_asked: u64,
    /// Tokens of the counted lookups that were really found.
    tokens_found: u64,
    /// The clusters that were tried; the present one comes first.
    tried: Vec<TriedStatus>,
}

/// A cluster in [`PlayedStatus`].
#[derive(Debug, Clone, PartialEq, Serialize)]
struct TriedStatus {
    /// The policy of all nodes; `None` if each node keeps its own.
    policy: Option<String>,
    /// The size of each node, as a multiple of the present one; `None` for nodes that never evict.
    times: Option<f64>,
    /// How the nodes work together: `as_they_are` (each lookup at its node; nodes read each other's chunks if they do so at
    /// present), `apart` (no node reads others' chunks), `together` (each node does), or `routed` (a router sends each lookup
    /// where it costs least).
    ways: String,
    /// Chunks that all nodes keep together.
    capacity_chunks: u64,
    /// Tokens of the counted lookups that are hit.
    tokens_hit: u64,
    /// Tokens among them that a node reads from another node.
    tokens_moved: u64,
}

/// The last answer, and whether a newer one is being made.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    is_running: bool,
    last: Option<Made>,
}

/// An answer.
#[derive(Debug)]
struct Made {
    at: Duration,
    left_out: Vec<LeftOutNode>,
    played: Option<PlayedStatus>,
}

/// A node's answer to `GET /past`. It is checked before it is used.
#[derive(Debug, Deserialize)]
struct Past {
    policy: String,
    capacity_chunks: u64,
    chunk_bytes: u64,
    shares: bool,
    names: Vec<u64>,
    parents: Vec<u32>,
    lookups: Vec<Lookup>,
    left_out_lookups: u64,
}

#[derive(Debug, Deserialize)]
struct Lookup {
    unix_ms: u64,
    chunk_tokens: u32,
    prompt_tokens: u64,
    tokens_hit: u64,
    last: u32,
}

/// The lookups of all nodes.
#[derive(Debug, Default)]
struct Pasts {
    nodes: Vec<NodePast>,
    shares: bool,
    /// The number of all chunks that the nodes keep.
    chunks: u64,
    bytes: u64,
    left_out_lookups: u64,
    left_out: Vec<LeftOutNode>,
    /// Chunks of lookups that may still be added.
    left_chunks: usize,
}

/// Plays the last lookups, and waits a second for the result.
pub(super) async fn what_if(state: Data<HttpState>, request: HttpRequest) -> actix_web::Result<HttpResponse> {
    if let Some(refused) = refuse_strangers(&state, &request) {
        return Ok(refused);
    }
    if let Some(refused) = refuse_arguments(&request) {
        return Ok(refused);
    }
    let mut progress = state.what_if.subscribe();
    let now = state.uptime.elapsed();
    let begins = state.what_if.send_if_modified(|progress| {
        let is_fresh = progress.last.as_ref().is_some_and(|made| now.saturating_sub(made.at) < FRESH);
        let begins = !is_fresh && !progress.is_running;
        progress.is_running |= begins;
        begins
    });
    if begins {
        // The work goes on when the asker goes away.
        actix_web::rt::spawn(begin(state.clone(), Running(Arc::clone(&state.what_if))));
    }
    // After success and after the timeout: answer with what is known.
    let _ = timeout(PATIENCE, progress.wait_for(|progress| !progress.is_running)).await;
    let json = serde_json::to_vec(&progress.borrow().status(state.uptime.elapsed()))?;
    let mut response = in_pieces("application/json", json);
    harden(response.headers_mut());
    Ok(response)
}

/// Collects the lookups, and starts the thread that plays them.
async fn begin(state: Data<HttpState>, running: Running) {
    let Some(shown) = gather(&state).await else { return };
    let uptime = state.uptime;
    let work = move || {
        // After an error, the thread works at its old priority.
        let _ = rustix::process::nice(LOWEST_PRIORITY);
        let made = Made::of(&shown, uptime);
        running.0.send_modify(|progress| progress.last = Some(made));
    };
    if let Err(error) = std::thread::Builder::new().name("larder-what-if".into()).spawn(work) {
        tracing::warn!(%error, "cannot start a thread that plays lookups");
    }
}

/// The nodes' answers; `None` if nobody asks the nodes.
async fn gather(state: &HttpState) -> Option<Vec<Shown>> {
    let members = state.membership.lock().table().members.len().clamp(1, MAX_CLUSTER_NODES.into());
    let path = format!("/past?most_chunks={}", MOST_PLAYED_CHUNKS / members);
    let (answer, answered) = oneshot::channel();
    let wanted = Wanted::Answer(PeerRequest::Show(Show { path, body: Vec::new() }));
    state.gathers.send(NodeQuery { wanted, node: None, answer }).await.ok()?;
    answered.await.ok()
}

/// Marks that lookups are being played, until it is dropped.
struct Running(Arc<watch::Sender<Progress>>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|progress| progress.is_running = false);
    }
}

impl Progress {
    fn status(&self, now: Duration) -> WhatIfStatus {
        let last = self.last.as_ref();
        WhatIfStatus {
            running: self.is_running,
            age_seconds: last.map(|made| now.saturating_sub(made.at).as_secs_f64()),
            left_out: last.map(|made| made.left_out.clone()).unwrap_or_default(),
            played: last.and_then(|made| made.played.clone()),
        }
    }
}

impl Made {
    fn of(shown: &[Shown], uptime: Uptime) -> Self {
        let pasts = Pasts::read(shown);
        let played = play(&pasts.nodes, pasts.shares).map(|played| pasts.status(played));
        Self { at: uptime.elapsed(), left_out: pasts.left_out, played }
    }
}

impl Pasts {
    fn read(shown: &[Shown]) -> Self {
        let mut pasts = Self { left_chunks: MOST_PLAYED_CHUNKS, ..Self::default() };
        for Shown { node, said } in shown {
            let said = said.as_ref().map_err(Clone::clone);
            let read =
                said.and_then(|json| serde_json::from_slice::<Past>(json).map_err(|error| error.to_string()));
            if let Err(error) = read.and_then(|past| pasts.add(past)) {
                pasts.left_out.push(LeftOutNode { node: node.clone(), error });
            }
        }
        pasts.begin_now();
        pasts
    }

    /// Takes a node's lookups. The error is for people.
    fn add(&mut self, past: Past) -> Result<(), String> {
        if past.policy.is_empty() {
            return Err("the node has recorded no lookups yet".to_owned());
        }
        if self.nodes.len() == usize::from(MAX_CLUSTER_NODES) {
            return Err(format!("at most {MAX_CLUSTER_NODES} nodes are played"));
        }
        let policy: PolicyName = past
            .policy
            .parse()
            .map_err(|_| format!("the coordinator does not know its policy {}", past.policy))?;
        let lookups = past.lookups(&mut self.left_chunks).ok_or("its lookups are not understood")?;
        let capacity_chunks = past.capacity_chunks.min(MOST_CAPACITY_CHUNKS);
        self.nodes.push(NodePast { size: NodeSize { policy, capacity_chunks }, lookups });
        self.shares |= past.shares;
        self.chunks += capacity_chunks;
        self.bytes = self.bytes.saturating_add(capacity_chunks.saturating_mul(past.chunk_bytes));
        self.left_out_lookups = self.left_out_lookups.saturating_add(past.left_out_lookups);
        Ok(())
    }

    /// Lets the lookups begin at time 0, since stores count time from their start, and only up to years.
    fn begin_now(&mut self) {
        let lookups = || self.nodes.iter().flat_map(|node| &node.lookups);
        let newest = lookups().map(|lookup| lookup.at.0).max().unwrap_or_default();
        for lookup in self.nodes.iter_mut().flat_map(|node| &mut node.lookups) {
            lookup.at = Millis(OLDEST_MS.saturating_sub(newest - lookup.at.0));
        }
    }

    fn status(&self, played: Played<Tried>) -> PlayedStatus {
        let mut policies: Vec<String> = self.nodes.iter().map(|node| node.size.policy.to_string()).collect();
        policies.sort();
        policies.dedup();
        let present = if self.shares { Working::Together } else { Working::Apart };
        PlayedStatus {
            nodes: self.nodes.len(),
            shares: self.shares,
            policies,
            chunk_bytes: self.bytes.checked_div(self.chunks).unwrap_or(0),
            chunk_tokens: played.chunk_tokens,
            warming_lookups: played.warming_lookups,
            counted_lookups: played.counted_lookups,
            left_out_lookups: self.left_out_lookups.saturating_add(played.left_out_lookups),
            counted_seconds: played.counted_ms as f64 / 1_000.0,
            distinct_chunks: played.distinct_chunks,
            tokens_asked: played.tokens_asked,
            tokens_found: played.tokens_found,
            tried: played.tried.into_iter().map(|tried| TriedStatus::of(tried, present)).collect(),
        }
    }
}

impl Past {
    /// The lookups with all their chunks; `None` if the answer contradicts itself, or has more than was asked for.
    fn lookups(&self, left_chunks: &mut usize) -> Option<Vec<PastLookup>> {
        let is_earlier = |(place, &parent): (usize, &u32)| parent as usize <= place;
        if self.names.len() != self.parents.len() || !self.parents.iter().enumerate().all(is_earlier) {
            return None;
        }
        let mut left = *left_chunks;
        let lookup = |lookup: &Lookup| {
            let chunks = self.chunks(lookup.last)?;
            left = left.checked_sub(chunks.len())?;
            Some(PastLookup {
                at: Millis(lookup.unix_ms),
                namespace: Fingerprint([0; 32]),
                chunk_tokens: lookup.chunk_tokens,
                prompt_tokens: lookup.prompt_tokens.min(MOST_TOKENS),
                tokens_hit: lookup.tokens_hit.min(MOST_TOKENS),
                chunks: chunks.into(),
            })
        };
        let lookups = self.lookups.iter().map(lookup).collect();
        *left_chunks = left;
        lookups
    }

    /// The chunks of a prompt whose last chunk is at this place of the list.
    fn chunks(&self, last: u32) -> Option<Vec<u64>> {
        let (mut at, mut chunks) = (last as usize, Vec::new());
        while at > 0 {
            if chunks.len() == MAX_CHAIN_CHUNKS {
                return None;
            }
            chunks.push(*self.names.get(at - 1)?);
            at = self.parents[at - 1] as usize;
        }
        chunks.reverse();
        Some(chunks)
    }
}

impl TriedStatus {
    fn of(Tried { variant, capacity_chunks, tokens_hit, tokens_moved }: Tried, present: Working) -> Self {
        let ways = match variant.working {
            working if working == present => "as_they_are",
            Working::Apart => "apart",
            Working::Together => "together",
            Working::RoutedApart | Working::RoutedTogether => "routed",
        };
        let ways = ways.to_owned();
        let policy = variant.policy.map(|policy| policy.to_string());
        Self { policy, times: variant.times, ways, capacity_chunks, tokens_hit, tokens_moved }
    }
}

/// The lifetime of an answer.
const FRESH: Duration = Duration::from_secs(60);

/// Time for which a request waits for an answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// All other work goes first.
const LOWEST_PRIORITY: i32 = 19;

/// Chunks of the last lookups of all nodes, each counted as often as it was asked for.
const MOST_PLAYED_CHUNKS: usize = 262_144;

/// Most chunks that a node keeps, so that the chunks of all nodes can be summed.
const MOST_CAPACITY_CHUNKS: u64 = 1 << 48;

/// The greatest age of a lookup before the newest one, a month. Older lookups count as this old.
const OLDEST_MS: u64 = 30 * 24 * 3_600_000;

/// Most tokens of a prompt, so that the tokens of all prompts can be summed.
const MOST_TOKENS: u64 = 1 << 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(node: &str, past: &serde_json::Value) -> Shown {
        Shown { node: node.into(), said: Ok(past.to_string().into_bytes()) }
    }

    fn past(names: &[u64], parents: &[u32], lasts: &[u32]) -> serde_json::Value {
        let lookup = |(number, last): (usize, &u32)| serde_json::json!({ "unix_ms": 1_000 - number, "chunk_tokens": 16, "prompt_tokens": 33, "tokens_hit": 16, "last": last });
        let lookups: Vec<_> = lasts.iter().enumerate().map(lookup).collect();
        serde_json::json!({ "policy": "lru", "capacity_chunks": 10, "chunk_bytes": 100, "shares": true, "names": names,
            "parents": parents, "lookups": lookups, "left_out_lookups": 1, "more": "than is read" })
    }

    #[test]
    fn what_one_node_computed_is_hit_by_the_other() {
        let one = past(&[u64::MAX, 6], &[0, 1], &[2]);
        let other = past(&[u64::MAX, 6], &[0, 1], &[2, 1]);
        let silent = Shown { node: "c".into(), said: Err("no answer in time".into()) };
        let made = Made::of(&[shown("a", &one), shown("b", &other), silent], Uptime::start());
        assert_eq!(made.left_out, [LeftOutNode { node: "c".into(), error: "no answer in time".into() }]);
        let played = made.played.unwrap();
        assert_eq!(
            (played.nodes, played.shares, played.policies.as_slice()),
            (2, true, &["lru".to_owned()][..])
        );
        assert_eq!((played.warming_lookups, played.counted_lookups, played.left_out_lookups), (1, 2, 2));
        assert_eq!((played.chunk_bytes, played.distinct_chunks, played.tokens_asked), (100, 2, 66));
        let present = &played.tried[0];
        assert_eq!(
            (present.policy.as_deref(), present.times, present.ways.as_str()),
            (None, Some(1.0), "as_they_are")
        );
        assert_eq!((present.tokens_hit, present.capacity_chunks), (16 + 32, 20));
        let ways = played.tried.iter().map(|tried| tried.ways.as_str()).filter(|&ways| ways != "as_they_are");
        assert_eq!(ways.collect::<Vec<_>>(), ["apart", "routed"]);
    }

    #[test]
    fn nodes_that_say_nonsense_are_left_out_and_nothing_loops() {
        let empty = serde_json::json!({ "policy": "", "capacity_chunks": 0, "chunk_bytes": 0, "shares": true, "names": [], "parents": [],
            "lookups": [], "left_out_lookups": 0 });
        let mut unknown = past(&[1], &[0], &[1]);
        unknown["policy"] = "clairvoyant".into();
        let many: Vec<u64> = (0..MAX_CHAIN_CHUNKS as u64 + 1).collect();
        let chain: Vec<u32> = (0..many.len() as u32).collect();
        for (wrong, said) in [
            (past(&[1], &[1], &[1]), "not understood"),
            (past(&[1, 2], &[0], &[1]), "not understood"),
            (past(&[1], &[0], &[2]), "not understood"),
            (past(&many, &chain, &[many.len() as u32]), "not understood"),
            (past(&many[1..], &chain[..MAX_CHAIN_CHUNKS], &[MAX_CHAIN_CHUNKS as u32; 33]), "not understood"),
            (unknown, "does not know its policy clairvoyant"),
            (empty, "has recorded no lookups yet"),
            (serde_json::json!([1, 2]), "invalid"),
        ] {
            let made = Made::of(&[shown("a", &wrong)], Uptime::start());
            assert!(made.left_out[0].error.contains(said), "{:?}", made.left_out);
            assert_eq!(made.played, None);
        }
        let mut huge = past(&[1], &[0], &[1, 1]);
        huge["capacity_chunks"] = u64::MAX.into();
        huge["lookups"][0]["prompt_tokens"] = u64::MAX.into();
        huge["lookups"][0]["tokens_hit"] = u64::MAX.into();
        huge["left_out_lookups"] = (u64::MAX - 9).into();
        huge["lookups"][1]["chunk_tokens"] = 0.into();
        let made = Made::of(&[shown("a", &huge), shown("b", &huge)], Uptime::start());
        assert!(made.played.is_some(), "no number is too large");
    }

    #[test]
    fn as_many_nodes_are_played_as_the_model_has() {
        let all: Vec<Shown> =
            (0..70).map(|number| shown(&format!("n{number}"), &past(&[number + 1], &[0], &[1]))).collect();
        let pasts = Pasts::read(&all);
        assert_eq!((pasts.nodes.len(), pasts.left_out.len()), (64, 6));
        assert!(pasts.left_out[0].error.contains("64 nodes"));
    }
}
