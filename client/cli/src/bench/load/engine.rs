//! The engines that send the requests, and the requests.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_client::SessionError;
use larder_protocol::Chain;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::super::peer::End;
use super::super::session::all_tokens;
use super::super::transfer::Transfer;
use crate::clock::now;
use crate::content::chunk_hash;

/// A kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A lookup of 100 chunks that are there.
    Lookup,
    /// A lease of these chunks, and its release.
    Lease,
    /// Saves a block.
    Save,
    /// A block that comes from the other node.
    Fetch,
}

/// The result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) kind: Kind,
    /// From when it was due to its answer.
    pub(super) took: Duration,
    /// The node is busy, or did not bring the block in time.
    pub(super) turned_away: bool,
}

/// A request, with a prompt unless it shares the common one.
enum Asked {
    Lookup,
    Lease,
    Save(Chain),
    Fetch(Chain),
}

/// Engines at one node, and one engine at the other node: it saves the blocks that the engines fetch.
pub(super) struct Engines {
    near: Vec<Arc<LoadEngine>>,
    far: End,
    /// The prompts of one block each that the other node holds, and nobody has fetched yet.
    to_fetch: Vec<Chain>,
    next_id: u64,
    asked: JoinSet<anyhow::Result<Answer>>,
}

/// An engine with its prompts.
struct LoadEngine {
    /// The session with small chunks, and the prompt that is looked up and leased.
    prompt: (End, Chain),
    /// The session with the blocks that are saved and fetched.
    blocks: End,
}

impl Engines {
    /// Connects them, and saves the prompt that lookups and leases are for.
    pub(super) async fn connect(near: &Path, far: &Path) -> anyhow::Result<Self> {
        let small = Transfer { block_bytes: SMALL_BYTES, in_flight: 1 };
        let block = Transfer { block_bytes: BLOCK_BYTES, in_flight: 1 };
        let mut engines = Vec::new();
        for _ in 0..ENGINES {
            let (prompt, blocks) = (End::connect(near, small).await?, End::connect(near, block).await?);
            let chain = prompt.namespace.chain((0..CHUNKS).map(chunk_hash).collect());
            prompt.put(std::slice::from_ref(&chain), &[1; SMALL_BYTES]).await?;
            engines.push(Arc::new(LoadEngine { prompt: (prompt, chain), blocks }));
        }
        let far = End::connect(far, block).await?;
        Ok(Self { near: engines, far, to_fetch: Vec::new(), next_id: FIRST_BLOCK, asked: JoinSet::new() })
    }

    /// Bytes of the blocks that the fetches (a tenth) among `requests` need.
    pub(super) fn fetched_bytes(requests: usize) -> u64 {
        (requests.div_ceil(KINDS.len()) * BLOCK_BYTES) as u64
    }

    /// Saves at the other node the blocks that the fetches (a tenth) among `requests` need.
    pub(super) async fn prepare(&mut self, requests: usize) -> anyhow::Result<()> {
        let chains: Vec<Chain> = (0..requests.div_ceil(KINDS.len())).map(|_| self.new_prompt()).collect();
        self.far.put(&chains, &vec![1; BLOCK_BYTES]).await?;
        self.near[0].blocks.wait_for(&chains).await?;
        self.to_fetch = chains;
        Ok(())
    }

    /// Sends the request of this number; it was due at `due`.
    pub(super) fn ask(&mut self, number: usize, due: Instant) {
        let asked = match KINDS[number % KINDS.len()] {
            Kind::Lease => Asked::Lease,
            Kind::Save => Asked::Save(self.new_prompt()),
            Kind::Fetch => self.to_fetch.pop().map_or(Asked::Lookup, Asked::Fetch),
            Kind::Lookup => Asked::Lookup,
        };
        let engine = Arc::clone(&self.near[number / KINDS.len() % self.near.len()]);
        self.asked.spawn(async move {
            let turned_away = match engine.ask(&asked).await {
                Err(SessionError::Busy { .. }) => true,
                answered => !answered?,
            };
            Ok(Answer { kind: asked.kind(), took: now() - due, turned_away })
        });
    }

    /// The next answer. Cancel safe.
    pub(super) async fn answered(&mut self) -> anyhow::Result<Answer> {
        match self.asked.join_next().await {
            Some(joined) => joined?,
            None => std::future::pending().await,
        }
    }

    /// Requests without an answer.
    pub(super) fn waiting(&self) -> usize {
        self.asked.len()
    }

    /// Gives up the requests without an answer.
    pub(super) fn forget_waiting(&mut self) {
        self.asked.abort_all();
        self.asked = JoinSet::new();
    }

    fn new_prompt(&mut self) -> Chain {
        self.next_id += 1;
        self.far.namespace.chain(vec![chunk_hash(self.next_id)])
    }
}

impl Asked {
    fn kind(&self) -> Kind {
        match self {
            Self::Lookup => Kind::Lookup,
            Self::Lease => Kind::Lease,
            Self::Save(_) => Kind::Save,
            Self::Fetch(_) => Kind::Fetch,
        }
    }
}

impl LoadEngine {
    /// Returns whether the request was served.
    async fn ask(&self, asked: &Asked) -> Result<bool, SessionError> {
        let (End { session, namespace }, prompt) = &self.prompt;
        Ok(match asked {
            Asked::Lookup => {
                let found = session.lookup(namespace, prompt, all_tokens()).await?;
                found.spans.last().is_some_and(|span| span.to as usize == prompt.len())
            }
            Asked::Lease => session.lease(namespace, prompt).await?.chunks() == prompt.len(),
            Asked::Save(block) => save(&self.blocks, block).await?,
            Asked::Fetch(block) => {
                self.blocks.session.lease(&self.blocks.namespace, block).await?.chunks() == block.len()
            }
        })
    }
}

async fn save(End { session, namespace }: &End, chain: &Chain) -> Result<bool, SessionError> {
    let reservation = session.reserve(namespace, chain, 0).await?;
    for &position in reservation.chunks() {
        let mut staged = session.stage(&reservation, position).await?;
        staged.copy_from(0, 0, &[1; BLOCK_BYTES]);
        session.commit(&reservation, vec![staged]).await?;
    }
    Ok(reservation.chunks().len() == chain.len())
}

/// Engines that ask one actor.
pub(super) const ENGINES: usize = 16;

/// The kinds of the requests, in turn.
const KINDS: [Kind; 10] = {
    use Kind::{Fetch, Lease, Lookup, Save};
    [Lookup, Lease, Lookup, Save, Lookup, Lookup, Lease, Lookup, Fetch, Lookup]
};

/// Chunks of a prompt that is looked up and leased.
const CHUNKS: u64 = 100;

const SMALL_BYTES: usize = 4_096;

/// Bytes of a block that is saved or fetched: some engines have such blocks for one group of layers.
const BLOCK_BYTES: usize = 64 << 10;

/// First id of the blocks that are saved and fetched, apart from the ids of the common prompt.
const FIRST_BLOCK: u64 = 1 << 32;
