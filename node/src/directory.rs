//! The directory: which node holds which chunk.
//!
//! It is sharded over the nodes: the partition table says which node is home to a run of chunks. What a node holds it
//! announces to the homes; what it lacks it asks them for. Rows are hints: a stale one costs a round trip.

mod actor;
mod agenda;
pub mod cache;
mod held;
mod holders;
pub mod lookup;
pub(crate) mod metrics;
mod outbox;
mod shard;
mod stream;

use actix::Message;
use larder_client::trace::Trace;
use larder_protocol::table::Holder;
use larder_protocol::{ChunkRef, Fingerprint};
use smallvec::SmallVec;

use crate::store::Change;

pub use actor::{DirectoryActor, DirectoryLimits};
pub use metrics::DirectoryMetrics;
pub use outbox::{Answered, BatchId, Moved, Outbox, Outgoing};
pub use shard::{MAX_FOUND_HOLDERS, MAX_ROW_HOLDERS, Shard, ShardCounts};

/// Who holds a chunk.
pub type Holders = SmallVec<[Holder; 2]>;

/// Asks who else holds chunks. The answer has one item a chunk, in their order; this node is never in it. What cannot be
/// found out soon has no holder.
#[derive(Message, Debug)]
#[rtype(result = "Vec<Holders>")]
pub struct AskHolders {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunks.
    pub chunks: Vec<ChunkRef>,
    /// The span of it, which ends with it.
    pub trace: Trace,
}

/// Tells what an actor of this node gained and lost.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Changed {
    /// The actor.
    pub device: u16,
    /// What happened, in order.
    pub changes: Changes,
}

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

/// Tells that a holder did not have what the directory said.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Stale {
    /// Who.
    pub holder: Holder,
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// What it does not have.
    pub chunks: Vec<ChunkRef>,
}

#[cfg(test)]
pub(crate) mod tests;
