//! The directory: knows which node holds which chunk.
//!
//! The directory is sharded over the nodes: the partition table names the home of each run of chunks. Rows are hints: a stale
//! row costs a round trip. A node's part consists of three machines. Each is told the time and sends nothing itself:
//!
//! 1. [`Outbox`] tells homes which chunks this node holds. [`Outbox::changed`] takes the gains and losses of actors,
//!    [`Outbox::due`] says which message goes to which home, [`Outbox::answered`] takes the home's answer or silence. After
//!    silence the message is sent again, or the stream starts anew.
//! 2. [`Lookup`](lookup::Lookup) asks homes for the holders of chunks. [`new`](lookup::Lookup::new) answers from the cache,
//!    [`take_asks`](lookup::Lookup::take_asks) says which homes to ask, [`fill`](lookup::Lookup::fill) takes each answer, and
//!    [`finish`](lookup::Lookup::finish) gives the holders. A chunk without an answer has none.
//! 3. [`Shard`] has the rows of which this node is home. [`Shard::announce`] and [`Shard::find`] answer the other nodes'
//!    outboxes and lookups, [`Shard::not_held`] doubts a row, [`Shard::tick`] forgets old doubts.
//!
//! Outbox, shard and cache hear of each new table before anything else ([`Outbox::new_table`], [`Shard::new_table`],
//! [`Cache::new_table`](cache::Cache::new_table)).
//!
//! The chunks 0; 1-7; 8-63; then 64 at a time share a home ([`larder_protocol::run`]). So a prompt needs few messages,
//! and no system prompt makes one node hot.

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

/// The holders of a chunk.
pub type Holders = SmallVec<[Holder; 2]>;

/// An actor's gained and lost chunks.
#[derive(Debug)]
pub enum Changes {
    /// Since the last message.
    Since(Vec<Change>),
    /// A page of all that the actor holds, since changes were lost. Changes between two pages are told in between.
    Page(Page),
}

/// A part of the chunks that an actor holds.
#[derive(Debug)]
pub struct Page {
    /// Whether it is the first page. Then earlier pages no longer count.
    pub is_first: bool,
    /// The chunks.
    pub chunks: Vec<(Fingerprint, ChunkRef)>,
    /// Whether the page is the last: then the actor holds the pages' chunks and nothing else.
    pub is_last: bool,
}

#[cfg(test)]
pub(crate) mod tests;
