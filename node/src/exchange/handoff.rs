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
    /// The core's order: messages for another number are refused.
    pub ordered: larder_core::FollowOrder,
    /// Its chunks, with their targets.
    pub chunks: Vec<FetchChunk>,
    /// The channel for the core's events: [`Event::LayersCame`] and [`Event::FollowedCame`], sent once nothing writes to those
    /// layers or slots any more. The number of chunks and layers bounds the number of events.
    pub news: mpsc::UnboundedSender<Event>,
    /// A message here stops the follow: chunks that have not come by then do not come.
    pub cancelled: oneshot::Receiver<()>,
}

/// Asks an actor for chunks while they are being written. The lease, which there is where the peer may follow, ends it.
#[derive(Message, Debug)]
#[rtype(result = "Option<Arc<PeerLease>>")]
pub struct AskFollow {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunks.
    pub hashes: Vec<ChunkHash>,
    /// The pools of each that are wanted; empty if these are all of them.
    pub pools: Vec<PoolSet>,
    /// The earliest attempt that will do.
    pub attempt: u64,
    /// For how long their writers may be silent.
    pub patience_ms: u64,
    /// The channel of the peer's stream.
    pub news: mpsc::UnboundedSender<PeerNews>,
}

/// Something to tell a peer of a chunk that it follows.
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
        /// The block among those that are wanted, by slice, then pool.
        block: usize,
        /// Offset of the layers in the block.
        offset: u64,
        /// Themselves.
        bytes: Bytes,
        /// Their checksum.
        checksum: u64,
    },
    /// All was told, and is committed: the checksums of the blocks.
    Whole(Vec<u64>),
    /// It will not come.
    Lost,
}
