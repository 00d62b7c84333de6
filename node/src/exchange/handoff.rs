//! Messages about follows between actors and the exchange.

use std::sync::Arc;

use actix::prelude::*;
use bytes::Bytes;
use larder_core::Event;
use larder_protocol::{ChunkHash, Fingerprint, PoolSet};
use tokio::sync::{mpsc, oneshot};

use super::{FetchChunk, PeerLease};

/// Chunks to follow at the node whose engine writes them.
#[derive(Debug)]
pub struct FollowOrder {
    /// The core's order. Messages with another order number are refused.
    pub ordered: larder_core::FollowOrder,
    /// The order's chunks, with their targets.
    pub chunks: Vec<FetchChunk>,
    /// The channel for the core's events: [`Event::LayersCame`] and [`Event::FollowedCame`], sent once nothing writes to those
    /// layers or slots any more. The number of chunks and layers bounds the number of events.
    pub news: mpsc::UnboundedSender<Event>,
    /// A message here stops the follow: chunks that have not come by then do not come.
    pub cancelled: oneshot::Receiver<()>,
}

/// Asks an actor for chunks while they are being written. The answer is a lease if the peer may follow. Dropping the lease ends
/// the follow.
#[derive(Message, Debug)]
#[rtype(result = "Option<Arc<PeerLease>>")]
pub struct AskFollow {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunks.
    pub hashes: Vec<ChunkHash>,
    /// The wanted pools of each chunk; empty if all pools are wanted.
    pub pools: Vec<PoolSet>,
    /// The earliest attempt at writing that will do.
    pub attempt: u64,
    /// How long the chunks' writers may be silent.
    pub patience_ms: u64,
    /// The channel of the peer's stream.
    pub news: mpsc::UnboundedSender<PeerNews>,
}

/// News for a peer of a chunk that it follows.
#[derive(Debug)]
pub struct PeerNews {
    /// Position of the chunk in the request.
    pub chunk: u32,
    /// The step.
    pub step: PeerStep,
}

/// A step as a peer hears it.
#[derive(Debug)]
pub enum PeerStep {
    /// Layers of a block.
    Layers {
        /// Number of the block among the wanted blocks, by slice, then pool.
        block: usize,
        /// Offset of the layers in the block.
        offset: u64,
        /// The layers' bytes.
        bytes: Bytes,
        /// The bytes' checksum.
        checksum: u64,
    },
    /// The chunk is complete and committed. Has the checksums of its blocks.
    Whole(Vec<u64>),
    /// The chunk will not come.
    Lost,
}
