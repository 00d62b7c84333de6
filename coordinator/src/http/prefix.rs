//! `POST /v1/prefix`: how much of a prompt each node holds.

use std::collections::BTreeMap;

use actix_web::web::{Data, Json, Payload};
use actix_web::{HttpRequest, error};
use larder_protocol::hashing::{PromptExtra, hash_prompt};
use larder_protocol::limits::{MAX_CHAIN_CHUNKS, MAX_CHUNK_TOKENS};
use larder_protocol::routing::{Candidate, Prompt};
use larder_protocol::{Chain, ChunkHash, Fingerprint, sha256_cbor};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::HttpState;
use super::bodies::busy;
use crate::prefix::{Holdings, HoldingsQuery};

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
    /// The prompt's tokens, if the coordinator knows the hash.
    tokens: Option<Vec<u32>>,
    /// Tokens of the prompt, if hashes are given; by default, the tokens of the hashed chunks.
    prompt_tokens: Option<u64>,
    /// Whether the answer names the prompt's chunks.
    #[serde(default)]
    with_hashes: bool,
    /// Tokens that the engines of nodes have yet to compute for other requests, by the nodes' names; 0 for others.
    #[serde(default)]
    backlog_tokens: BTreeMap<String, u64>,
    /// The hash that makes chunks from tokens in the namespace; Larder's own hash if it is not given.
    #[serde(default)]
    hash: Hash,
}

/// The hash of chunks from tokens.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case", deny_unknown_fields)]
enum Hash {
    // With braces: serde ignores fields beside a name that has none.
    /// Larder's own.
    Larder {},
    /// vLLM's.
    Sha256Cbor(EnginePrompt),
}

/// The facts besides the tokens that vLLM hashes.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct EnginePrompt {
    /// The engines' `PYTHONHASHSEED`, or the constant for none.
    seed: Option<String>,
    /// Tokens of the engine's own blocks; by default, the tokens of a chunk.
    block_tokens: Option<u32>,
    /// The request's `cache_salt`.
    cache_salt: Option<String>,
    /// The request's LoRA adapter.
    lora: Option<Lora>,
}

/// A LoRA adapter, as vLLM names it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lora {
    /// Its name.
    name: String,
    /// The path of its files.
    path: String,
}

/// The answer to `POST /v1/prefix`.
#[derive(Debug, Serialize, Deserialize)]
pub struct PrefixAnswer {
    /// The prefix that all nodes together hold.
    pub cluster: PrefixHeld,
    /// The prefix that each node holds.
    pub nodes: Vec<NodeHeld>,
    /// Homes that did not answer: their rows are missing.
    pub silent_homes: Vec<String>,
    /// The prompt's chunks, 64 hexadecimal digits each; none unless `with_hashes` asked for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hashes: Vec<String>,
}

/// The part of a prompt's prefix that one node has, in [`PrefixAnswer`].
#[derive(Debug, Serialize, Deserialize)]
pub struct NodeHeld {
    /// The node's name.
    pub name: String,
    /// The part that the node has.
    #[serde(flatten)]
    pub held: PrefixHeld,
    /// Tokens of the cluster's prefix that the node has, wherever they stand in it.
    #[serde(default)]
    pub held_tokens: u64,
    /// The cost of the request at this node, in tokens of prefill: its backlog, the tokens to compute, and a tenth of the tokens
    /// to move there.
    #[serde(default)]
    pub cost_tokens: u64,
}

/// The part of a prompt's prefix that is held.
#[derive(Debug, Serialize, Deserialize)]
pub struct PrefixHeld {
    /// Chunks from the prompt's first on.
    pub chunks: usize,
    /// Their tokens.
    pub tokens: u64,
}

/// A parsed request.
struct PrefixQuery {
    fingerprint: Fingerprint,
    chain: Chain,
    chunk_tokens: u32,
    prompt_tokens: u64,
    backlog_tokens: BTreeMap<String, u64>,
    with_hashes: bool,
}

/// Answers how much of a prompt's prefix each node holds. The question belongs to the trace of its header `traceparent`; an
/// invalid header counts as none, as its standard says.
///
/// A thread of its own reads and hashes the prompt: meanwhile this thread answers others.
pub(super) async fn answer(
    state: Data<HttpState>,
    head: HttpRequest,
    payload: Payload,
) -> actix_web::Result<Json<PrefixAnswer>> {
    let parent = head.headers().get("traceparent").and_then(|value| value.to_str().ok()?.parse().ok());
    let trace = state.sampler.request("prefix", parent);
    let body = state.bodies.read(&head, payload).await?;
    let PrefixQuery { fingerprint, chain, chunk_tokens, prompt_tokens, backlog_tokens, with_hashes } =
        body.understand(|body| PrefixQuery::of(&body)).await?;
    if trace.is_recorded() {
        trace.set("larder.namespace", tracing::field::display(fingerprint));
        trace.count("larder.chunks", chain.hashes.len() as u64);
    }
    let named = if with_hashes { &chain.hashes[..] } else { &[] };
    let hashes = named.iter().map(ChunkHash::to_string).collect();
    let (answer, answered) = oneshot::channel();
    if state.questions.try_send(HoldingsQuery { fingerprint, chain, trace, answer }).is_err() {
        return Err(busy());
    }
    let answered = answered.await.map_err(|_| error::ErrorServiceUnavailable("the coordinator stops\n"))?;
    let Holdings { cluster_chunks, chunks, held, silent_homes } = answered;
    let tokens = |chunks: usize| chunks as u64 * u64::from(chunk_tokens);
    let prefix = |chunks: usize| PrefixHeld { chunks, tokens: tokens(chunks) };
    let prompt = Prompt { tokens: prompt_tokens, cluster_tokens: tokens(cluster_chunks) };
    let node = |(name, chunks): (String, usize)| {
        let held_tokens = held.get(&name).map_or(0, |&chunks| tokens(chunks));
        let backlog_tokens = backlog_tokens.get(&name).copied().unwrap_or(0);
        let cost_tokens = prompt.cost_tokens(Candidate { backlog_tokens, held_tokens });
        NodeHeld { name, held: prefix(chunks), held_tokens, cost_tokens }
    };
    Ok(Json(PrefixAnswer {
        cluster: prefix(cluster_chunks),
        nodes: chunks.into_iter().map(node).collect(),
        silent_homes,
        hashes,
    }))
}

impl PrefixQuery {
    /// Parses a body.
    fn of(body: &[u8]) -> Result<Self, String> {
        let mut request: PrefixRequest =
            serde_json::from_slice(body).map_err(|error| format!("the body is no question: {error}\n"))?;
        let chunk_tokens = request.chunk_tokens;
        let backlog_tokens = std::mem::take(&mut request.backlog_tokens);
        let with_hashes = request.with_hashes;
        let known = request.tokens.as_ref().map(|tokens| tokens.len() as u64).or(request.prompt_tokens);
        let (fingerprint, chain) = request.chain()?;
        let prompt_tokens = known.unwrap_or(chain.len() as u64 * u64::from(chunk_tokens));
        Ok(Self { fingerprint, chain, chunk_tokens, prompt_tokens, backlog_tokens, with_hashes })
    }
}

impl PrefixRequest {
    fn chain(self) -> Result<(Fingerprint, Chain), String> {
        let fingerprint: ChunkHash = self.fingerprint.parse().map_err(|error| {
            format!("fingerprint: {error}; a node's /events tells the fingerprints in use\n")
        })?;
        let fingerprint = Fingerprint(fingerprint.0);
        if !(1..=MAX_CHUNK_TOKENS).contains(&self.chunk_tokens) {
            return Err(format!("chunk_tokens must be 1 to {MAX_CHUNK_TOKENS}\n"));
        }
        let root = fingerprint.root();
        let chunks = match (&self.hashes, &self.tokens) {
            (Some(hashes), _) => hashes.len(),
            (None, Some(tokens)) => tokens.len() / self.chunk_tokens as usize,
            (None, None) => 0,
        };
        if chunks > MAX_CHAIN_CHUNKS {
            return Err(format!("a prompt has at most {MAX_CHAIN_CHUNKS} chunks\n"));
        }
        if self.tokens.as_ref().is_some_and(|tokens| tokens.len() > MAX_TOKENS) {
            return Err(format!("a prompt has at most {MAX_TOKENS} tokens\n"));
        }
        let hashes = match (self.hashes, self.tokens) {
            (Some(hashes), None) => hashes
                .iter()
                .enumerate()
                .map(|(i, hash)| hash.parse().map_err(|error| format!("hashes[{i}]: {error}\n")))
                .collect::<Result<Vec<ChunkHash>, String>>()?,
            (None, Some(tokens)) => match &self.hash {
                Hash::Larder {} => hash_prompt(root, &tokens, self.chunk_tokens, PromptExtra::default()),
                Hash::Sha256Cbor(prompt) => prompt.hashes(&tokens, self.chunk_tokens)?,
            },
            _ => return Err("give either `hashes` or `tokens`\n".to_owned()),
        };
        Ok((fingerprint, Chain::from_root(root, hashes)))
    }
}

impl Default for Hash {
    fn default() -> Self {
        Self::Larder {}
    }
}

impl EnginePrompt {
    fn hashes(&self, tokens: &[u32], chunk_tokens: u32) -> Result<Vec<ChunkHash>, String> {
        let block_tokens = self.block_tokens.unwrap_or(chunk_tokens);
        if block_tokens == 0 || !chunk_tokens.is_multiple_of(block_tokens) {
            return Err(format!("hash.block_tokens must divide the {chunk_tokens} tokens of a chunk\n"));
        }
        let lora_bytes = self.lora.as_ref().map_or(0, |Lora { name, path }| name.len() + path.len());
        if lora_bytes > LORA_BYTES_A_TOKEN * block_tokens as usize {
            return Err(format!(
                "hash.lora: name and path have {lora_bytes} bytes, and are hashed with each block of {block_tokens} tokens: they may have {LORA_BYTES_A_TOKEN} bytes for each of these tokens\n"
            ));
        }
        let seed = self.seed.as_deref().unwrap_or(sha256_cbor::DEFAULT_SEED);
        let lora = self.lora.as_ref().map(|Lora { name, path }| sha256_cbor::Lora { name, path });
        let extra = sha256_cbor::PromptExtra { cache_salt: self.cache_salt.as_deref(), lora };
        Ok(sha256_cbor::hash_prompt(seed, tokens, block_tokens, chunk_tokens, extra))
    }
}

/// Most tokens of one prompt: as many as the longest chain has with chunks of 256.
const MAX_TOKENS: usize = MAX_CHAIN_CHUNKS * 256;

/// Most bytes of an adapter's name and path for each token of a block. They are hashed with each block, so that without a limit a
/// small body would mean hours of work. With blocks of 16 tokens they may have 1,024 bytes.
const LORA_BYTES_A_TOKEN: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(tokens: usize, chunk_tokens: u32, hash: &str) -> Result<PrefixQuery, String> {
        let fingerprint = "ab".repeat(32);
        let body = serde_json::json!({
            "fingerprint": fingerprint, "chunk_tokens": chunk_tokens, "tokens": vec![7; tokens],
            "hash": serde_json::from_str::<serde_json::Value>(hash).unwrap(),
        });
        PrefixQuery::of(body.to_string().as_bytes())
    }

    #[test]
    fn a_prompt_of_too_many_chunks_or_tokens_is_refused_before_it_is_hashed() {
        let engine = r#"{"name": "sha256_cbor", "block_tokens": 1}"#;
        for hash in [r#"{"name": "larder"}"#, engine] {
            assert_eq!(asked(MAX_CHAIN_CHUNKS, 1, hash).unwrap().chain.len(), MAX_CHAIN_CHUNKS);
            assert_eq!(
                asked(MAX_CHAIN_CHUNKS + 1, 1, hash).err().unwrap(),
                "a prompt has at most 8192 chunks\n"
            );
        }
        let refused = asked(MAX_TOKENS + 1, 65_536, engine).err().unwrap();
        assert_eq!(refused, "a prompt has at most 2097152 tokens\n");
    }

    #[test]
    fn a_prompt_whose_adapter_makes_long_work_is_refused_before_it_is_hashed() {
        let hash = |bytes: usize, block_tokens: u32| {
            let lora = serde_json::json!({"name": "x".repeat(bytes), "path": ""});
            serde_json::json!({"name": "sha256_cbor", "block_tokens": block_tokens, "lora": lora}).to_string()
        };
        for (bytes, block_tokens, is_right) in [(1_024, 16, true), (1_025, 16, false), (65, 1, false)] {
            let asked = asked(16_000, 16, &hash(bytes, block_tokens));
            assert!(is_right || asked.as_ref().is_err_and(|error| error.starts_with("hash.lora: ")));
            assert_eq!(asked.is_ok(), is_right, "{bytes} bytes");
        }
    }

    #[test]
    fn a_misspelled_fact_of_the_hash_is_refused() {
        for (hash, is_right) in [
            (r#"{"name": "sha256_cbor", "cache_salt": "alice"}"#, true),
            (r#"{"name": "sha256_cbor", "cachesalt": "alice"}"#, false),
            (r#"{"name": "larder"}"#, true),
            (r#"{"name": "larder", "seed": "0"}"#, false),
        ] {
            assert_eq!(asked(16, 16, hash).is_ok(), is_right, "{hash}");
        }
    }
}
