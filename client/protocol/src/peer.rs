//! The messages between nodes.
//!
//! Every request is a bidirectional QUIC stream of its own: the asker writes one message ([`PeerRequest`]) and ends its half. The
//! other side answers with one message ([`PeerResponse`]). After the answer to a fetch, the blocks' bytes follow. A follow is
//! answered with one message ([`PeerResponse::Followed`]) for each piece of news. If a request belongs to a trace,
//! [`PeerRequest::Trace`] comes before the request. A message on a stream is
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..4 | `u32` bytes of the message, little-endian, at most [`MAX_PEER_MESSAGE_BYTES`](crate::limits::MAX_PEER_MESSAGE_BYTES) |
//! | 4..8 | zero |
//! | 8.. | the message in rkyv |

use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize, rancor};

use crate::chunk::{ChunkHash, ChunkRef};
use crate::drain::{DrainCommand, DrainReport, Take, Taken};
use crate::frame::MalformedMessage;
use crate::membership::{CoordinatorMessage, FollowerMessage};
use crate::namespace::Fingerprint;
use crate::pin::{DevicePin, PinCommand};
use crate::pools::PoolSet;
use crate::purge::{PurgeCommand, PurgeReport};
use crate::reload::Reloaded;
use crate::table::{Epoch, Holder, RowKey};
use crate::trace::TraceContext;
use crate::v1;
use crate::version::Version;

/// A request between nodes.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum PeerRequest {
    /// Asks the home who holds chunks; answered by [`PeerResponse::Rows`].
    Find(Find),
    /// Announces to the home which chunks the asker's actors gained and lost, each at most once; answered by
    /// [`PeerResponse::Announced`].
    Announce(Vec<Announce>),
    /// Tells the home that some of a holder's rows are wrong; answered by [`PeerResponse::Done`].
    Repair(Repair),
    /// Asks a holder for blocks; answered by [`PeerResponse::Fetched`], with the bytes behind it.
    Fetch(Fetch),
    /// Asks a node for chunks while they are being written there; answered by [`PeerResponse::Followed`] again and again, until
    /// the last chunk is whole or lost.
    Follow(FollowChunks),
    /// Tells a holder that the asker keeps these chunks from now on, and that the directory knows this. The holder gives up its
    /// own copies if nobody uses them. Answered by [`PeerResponse::Done`].
    Moved(Chunks),
    /// Asks for a sign of life; answered by [`PeerResponse::Done`].
    Ping,
    /// Makes every actor evict by another policy from now on, until the node ends; answered by [`PeerResponse::Done`]. Only an
    /// admin may send it.
    SetPolicy(String),
    /// Names the trace of the request that follows on the same stream. It has no answer of its own.
    Trace(TraceContext),
    /// Tells a holder that it sent other bytes than were committed under these names. The holder answers [`PeerResponse::Done`]
    /// at once, then verifies its own chunks and drops wrong ones.
    Damaged(Chunks),
    /// Offers chunks that the asker evicts; answered by [`PeerResponse::Wanted`]. A node that wants some of them fetches them
    /// from the asker, and then sends [`PeerRequest::Moved`].
    Offer(OfferChunks),
    /// Asks a node to keep chunks of the asker, because the asker drains; answered by [`PeerResponse::Taken`] when the node keeps
    /// them.
    Take(Box<Take>),
    /// Makes a node drain, or asks how far the drain is; answered by [`PeerResponse::Drains`]. Only an admin may send it.
    Drain(DrainCommand),
    /// Makes a node read its configuration again; answered by [`PeerResponse::Reloaded`]. Only an admin may send it.
    Reload,
    /// Makes a node remove chunks, or asks how far the purge is; answered by [`PeerResponse::Purges`]. Only an admin may send it.
    Purge(Box<PurgeCommand>),
    /// Asks for an answer of the node's HTTP server; answered by [`PeerResponse::Shown`]. Only a coordinator or an admin may send
    /// it.
    Show(Show),
    /// Makes a node keep chunks from eviction; answered by [`PeerResponse::Pinned`], or [`PeerResponse::Done`] if a pin ends.
    /// Only an admin may send it.
    Pin(Box<PinCommand>),
    /// As [`PeerRequest::Follow`], for some pools of each chunk.
    #[strum(serialize = "follow")]
    FollowPools(Box<FollowPools>),
}

impl PeerRequest {
    /// The request's name in metrics; the forms of a request in two versions share one name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.into()
    }

    /// Builds a request for chunks while they are being written: for these pools of each chunk, or for all pools if `pools` is
    /// empty.
    #[must_use]
    pub fn follow(chunks: FollowChunks, pools: Vec<PoolSet>) -> Self {
        if pools.is_empty() {
            return Self::Follow(chunks);
        }
        Self::FollowPools(Box::new(FollowPools { chunks, pools }))
    }

    /// The first version that has this request. The request is not sent to nodes of an earlier version.
    #[must_use]
    pub fn since(&self) -> Version {
        match self {
            Self::Offer(_)
            | Self::Take(_)
            | Self::Drain(_)
            | Self::Reload
            | Self::Purge(_)
            | Self::Show(_)
            | Self::Pin(_)
            | Self::FollowPools(_) => Version::SECOND,
            _ => Version::FIRST,
        }
    }
}

/// Asks for an answer of a node's HTTP server: a client that reaches the coordinator may not reach the node.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Show {
    /// The path with its query, such as `/lookups?most=10`.
    pub path: String,
    /// The body, in JSON; empty if the path takes none.
    pub body: Vec<u8>,
}

/// Asks the home who holds chunks.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Find {
    /// The asker's table.
    pub epoch: Epoch,
    /// The chunks; at most [`MAX_FIND_ROWS`](crate::limits::MAX_FIND_ROWS).
    pub rows: Vec<RowKey>,
}

/// A batch of the ordered stream of one holder's gained and lost chunks, for one home.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Announce {
    /// The holder.
    pub holder: Holder,
    /// The holder's incarnation.
    pub incarnation: u64,
    /// The holder's table.
    pub epoch: Epoch,
    /// Number of the stream. The number grows whenever the holder starts anew, so that a late copy of an old batch voids nothing.
    pub stream: u64,
    /// Number of the batch in its stream. 0 starts the stream anew: the home forgets all rows of this holder. Each further batch
    /// has the next number.
    pub sequence: u64,
    /// The sum, modulo 2^64, of [`RowKey::digest`] over all rows of the holder in this home's partitions, if the home knows all
    /// of them after this batch. A home with the same table and another sum makes the holder start the stream anew.
    pub digest: Option<u64>,
    /// The changes, in the order in which they happened; at most [`MAX_ANNOUNCE_CHANGES`](crate::limits::MAX_ANNOUNCE_CHANGES) in
    /// one message.
    pub changes: Vec<RowChange>,
}

/// Tells the home that some of a holder's rows are wrong.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// The holder that does not have these chunks.
    pub holder: Holder,
    /// The rows of these chunks; at most [`MAX_FIND_ROWS`](crate::limits::MAX_FIND_ROWS).
    pub rows: Vec<RowKey>,
}

/// A chunk that was gained or lost.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowChange {
    /// The chunk.
    pub row: RowKey,
    /// Whether the holder has it now.
    pub is_held: bool,
}

/// Chunks of one holder.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// The actor that has the chunks.
    pub device: u16,
    /// The chunks' namespace.
    pub fingerprint: Fingerprint,
    /// The chunks' hashes.
    pub hashes: Vec<ChunkHash>,
}

/// Asks a holder for blocks: all slices of each chunk, and every pool that the holder has.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// The chunks; at most [`MAX_FETCH_CHUNKS`](crate::limits::MAX_FETCH_CHUNKS).
    pub chunks: Chunks,
    /// Bytes of each block of one chunk, by slice, then pool, as the asker knows them.
    pub block_bytes: Vec<u64>,
    /// The urgency of the request.
    pub class: Class,
}

/// Offers chunks that the asker evicts.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct OfferChunks {
    /// The asker's actor that still has the chunks for a moment.
    pub device: u16,
    /// The chunks' namespace.
    pub fingerprint: Fingerprint,
    /// The least worth of these chunks to the asker, in millionths of a token of prefill saved for each GiB and second.
    pub worth: u64,
    /// The chunks; at most [`MAX_FETCH_CHUNKS`](crate::limits::MAX_FETCH_CHUNKS).
    pub chunks: Vec<ChunkRef>,
}

/// Asks for chunks while they are being written. The asker has room for all of them.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct FollowChunks {
    /// The chunks; at most [`MAX_FETCH_CHUNKS`](crate::limits::MAX_FETCH_CHUNKS). The holder waits for chunks that nobody writes
    /// yet.
    pub chunks: Chunks,
    /// The asker's number of this request. Every answer repeats it; the asker refuses answers with another number.
    pub order: u64,
    /// The earliest attempt at writing whose layers are wanted.
    pub attempt: u64,
    /// The longest silence before the chunks count as lost.
    pub patience_ms: u64,
}

/// Asks for some pools of chunks while they are being written.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct FollowPools {
    /// The chunks.
    pub chunks: FollowChunks,
    /// The pools of each chunk.
    pub pools: Vec<PoolSet>,
}

impl FollowPools {
    /// Whether the request names at least one pool of each chunk.
    #[must_use]
    pub fn names_pools_of_each(&self) -> bool {
        self.pools.len() == self.chunks.chunks.hashes.len()
            && !self.pools.iter().any(|pools| pools.is_empty())
    }
}

/// News of a followed chunk.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Followed {
    /// The asker's number of the request.
    pub order: u64,
    /// Number of this message on its stream, from 1 on.
    pub message: u64,
    /// Position of the chunk in the request.
    pub chunk: u32,
    /// The news.
    pub step: FollowStep,
}

/// One step of a followed chunk. The last step is `Whole` or `Lost`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum FollowStep {
    /// Some layers of a block: their bytes follow this message.
    Layers(BlockLayers),
    /// All layers have been sent, and the chunk is committed: the checksums of its blocks, by slice, then pool.
    Whole(Vec<u64>),
    /// The chunk will not come: its writer has ended or failed, or was silent for too long.
    Lost,
}

/// Some layers of a block.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayers {
    /// The block, by slice, then pool.
    pub block: u32,
    /// Offset of the layers in the block.
    pub offset: u64,
    /// Bytes of the layers.
    pub bytes: u64,
    /// The checksum of these bytes and the block's name ([`layers_checksum`](crate::checksum::layers_checksum)).
    pub checksum: u64,
}

/// The urgency of a request for blocks, the most urgent first.
#[derive(
    Archive,
    Serialize,
    Deserialize,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
pub enum Class {
    /// A request of an engine that waits for the blocks.
    Decode,
    /// A prefetch that nobody has collected yet.
    Prefetch,
}

/// An answer between nodes.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum PeerResponse {
    /// The holders of the chunks, in the order of the request. A chunk without a holder has an empty entry.
    Rows(Rows),
    /// How each announcement ended, in the order of the request.
    Announced(Vec<Announced>),
    /// The header of the blocks that follow, one entry a chunk of the request.
    Fetched(Vec<FetchedChunk>),
    /// News of a followed chunk; the bytes of new layers come behind it.
    Followed(Followed),
    /// The request was carried out.
    Done,
    /// Too much to do; ask again later.
    Busy(RetryAfter),
    /// The request is impossible, or not for this node or this asker.
    Refused(String),
    /// The answering node's room. It comes before another answer on the same stream. A node that does not send it has free room,
    /// and serves nothing.
    Room(Room),
    /// Whether the node fetches each of the offered chunks, in the order of the offer.
    Wanted(Vec<bool>),
    /// The chunks that are kept.
    Taken(Taken),
    /// The progress of the drain.
    Drains(Box<DrainReport>),
    /// The result of reading the configuration again.
    Reloaded(Box<Reloaded>),
    /// The progress of the purge.
    Purges(Box<PurgeReport>),
    /// The body of the answer, in JSON.
    Shown(Vec<u8>),
    /// The chunks that each of the node's actors pinned; empty if no memory has the prompt's first chunk.
    Pinned(Vec<DevicePin>),
}

/// The answering node's room, and how much it serves.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// The worth of the chunk that the node evicts next, in the unit of [`OfferChunks::worth`]; 0 if the node has free room.
    pub least: u64,
    /// Bytes of blocks a second that the node has sent to other nodes lately.
    pub served: u64,
}

/// The holders of chunks, as spans over the chunks of the request.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The home's table. If it is newer than the asker's table, the asker looks again.
    pub epoch: Epoch,
    /// The spans, ascending; a chunk with several holders has several spans.
    pub spans: Vec<RowSpan>,
}

/// A stretch of a request's chunks that one holder has.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSpan {
    /// Position of the first chunk.
    pub from: u32,
    /// Position after the last chunk.
    pub to: u32,
    /// The holder.
    pub holder: Holder,
}

/// How an announcement ended.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Announced {
    /// The home knows all changes up to this sequence number.
    Known(u64),
    /// An earlier batch is missing, or the home starts anew: begin again at sequence 0 with all held chunks.
    StartAnew,
    /// The home has an older table than the holder, and took nothing: send the same batch again a little later.
    Later,
    /// The home does not know this incarnation, or knows a later incarnation. The answer has the epoch of the home's table.
    OtherIncarnation(Epoch),
}

/// The result of a fetch for one chunk.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum FetchedChunk {
    /// The chunk's blocks follow behind those of the chunks before it, ordered by slice, then by pool.
    Held(HeldChunk),
    /// The chunk is not here (any more): the directory was wrong.
    NotHeld,
    /// Too much is being sent; ask again later.
    Busy(RetryAfter),
}

/// The time after which asking again may help.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryAfter {
    /// Milliseconds from the answer on.
    pub retry_after_ms: u64,
}

/// A holder's facts about a chunk that it sends.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct HeldChunk {
    /// How often the chunk was read, this time included: placement uses it.
    pub reads: u32,
    /// Whether the holder has the chunk on disk too. If so, no other node needs to write it.
    pub is_on_disk: bool,
    /// The pools that the chunk has in every slice; `all` pools are always among them.
    pub pools: PoolSet,
    /// The blocks of these pools, by slice, then pool.
    pub blocks: Vec<HeldBlock>,
}

/// A holder's facts about a block that it sends.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct HeldBlock {
    /// The block's size.
    pub bytes: u64,
    /// The checksum of the block's range checksums and key (see [`crate::checksum`]).
    pub checksum: u64,
}

/// A message of this module or of [`crate::membership`].
pub trait Message: Sized {
    /// Encodes the message.
    ///
    /// # Panics
    /// Never: encoding cannot fail.
    fn encode(&self) -> AlignedVec;

    /// Checks and reads a message. `bytes` must start at a multiple of 16.
    ///
    /// # Errors
    /// Fails if the bytes are no message of this type.
    fn decode(bytes: &[u8]) -> Result<Self, MalformedMessage>;
}

macro_rules! message {
    ($($name:ty),*) => {$(
        impl Message for $name {
            fn encode(&self) -> AlignedVec {
                rkyv::to_bytes::<rancor::Error>(self).expect("a message can always be encoded")
            }

            fn decode(bytes: &[u8]) -> Result<Self, MalformedMessage> {
                rkyv::from_bytes::<Self, rancor::Failure>(bytes).map_err(|_| MalformedMessage)
            }
        }
    )*};
}

message!(PeerRequest, PeerResponse, FollowerMessage, CoordinatorMessage, v1::CoordinatorMessage);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follow_of_some_pools_names_at_least_one_of_each_chunk() {
        let names = |pools: &[u8]| {
            let hashes = vec![ChunkHash([1; 32]), ChunkHash([2; 32])];
            let chunks = Chunks { device: 0, fingerprint: Fingerprint([3; 32]), hashes };
            let chunks = FollowChunks { chunks, order: 1, attempt: 0, patience_ms: 1 };
            FollowPools { chunks, pools: pools.iter().copied().map(PoolSet).collect() }.names_pools_of_each()
        };
        assert!(names(&[1, 3]));
        assert!(!names(&[1]) && !names(&[1, 3, 1]) && !names(&[1, 0]) && !names(&[]));
    }
}
