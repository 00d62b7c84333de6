//! The directory: which node holds which chunk.
//!
//! It is sharded over the nodes: the partition table says which node is home to a run of chunks. What a node holds it
//! announces to the homes ([`Outbox`]); what it lacks it asks them for ([`lookup`]); the rows of which it is home are in its
//! [`Shard`]. Rows are hints: a stale one costs a round trip.

mod agenda;
pub mod cache;
mod held;
mod holders;
pub mod lookup;
mod outbox;
mod shard;
mod stream;

use larder_protocol::table::Holder;
use larder_protocol::{ChunkRef, Fingerprint};
use smallvec::SmallVec;

pub use outbox::{Answered, BatchId, Moved, Outbox, Outgoing};
pub use shard::{MAX_FOUND_HOLDERS, MAX_ROW_HOLDERS, Shard, ShardCounts};
pub use stream::FLUSH_MS;

use crate::store::Change;

/// Who holds a chunk.
pub type Holders = SmallVec<[Holder; 2]>;

/// What an actor gained and lost.
#[derive(Debug)]
pub enum Changes {
    /// Since the last message.
    Since(Vec<Change>),
    /// Changes were lost: some of all that it holds. What changes between two pages is told in between.
    Page(Page),
}

/// Some of all that an actor holds.
#[derive(Debug)]
pub struct Page {
    /// Whether it is the first. Pages before it count no more.
    pub is_first: bool,
    /// The chunks.
    pub chunks: Vec<(Fingerprint, ChunkRef)>,
    /// Whether it is the last: the actor holds what was in the pages, and nothing else.
    pub is_last: bool,
}

#[cfg(test)]
mod tests;
