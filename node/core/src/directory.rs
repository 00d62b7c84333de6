//! The directory: which node holds which chunk.
//!
//! It is sharded over the nodes: the partition table says which node is home to a run of chunks. Rows are hints: a stale one costs a
//! round trip. A node's part consists of three machines, each of which is told the time and sends nothing itself:
//!
//! 1. [`Outbox`] tells homes what this node holds. [`Outbox::changed`] takes what actors gained and lost, [`Outbox::due`] says what
//!    to send to whom, [`Outbox::answered`] what a home said, or that it did not: then it is sent again, or anew from the start.
//! 2. [`Lookup`](lookup::Lookup) asks homes who holds chunks. [`new`](lookup::Lookup::new) answers what the cache knows,
//!    [`take_asks`](lookup::Lookup::take_asks) says whom to ask, [`fill`](lookup::Lookup::fill) takes each answer, and
//!    [`finish`](lookup::Lookup::finish) gives the holders, those that were not told included as nobody.
//! 3. [`Shard`] has the rows of which this node is home: [`Shard::announce`] and [`Shard::find`] answer the other nodes' outboxes and
//!    lookups, [`Shard::not_held`] doubts a row, [`Shard::tick`] forgets old doubts.
//!
//! All three are told of each new table before anything else ([`Outbox::new_table`], [`Shard::new_table`],
//! [`Cache::new_table`](cache::Cache::new_table)).

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
