//! The events that a shell tells its core.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::drain::Taken;
use larder_protocol::pin::PinStart;
use larder_protocol::purge::{PurgeMode, PurgeScope};
use larder_protocol::session::Request;
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};

use crate::cause::Cause;
use crate::directory::{Changes, Holders};
use crate::reports::Reporter;
use crate::store::ids::{ChunkKey, ProcessId, SessionId};
use crate::store::policy::PolicyName;
use crate::store::{Checksums, PurgedKeys, StoreLimits};

pub use crate::store::ids::Below;

/// The other nodes of a table, as a drain sees them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OtherNodes {
    /// The actors that may take chunks, in the order in which they are asked.
    pub takers: Vec<Holder>,
    /// The nodes that do not leave: those of the takers, and nodes that were not heard for a moment.
    pub stay: BTreeSet<NodeNumber>,
}

/// How an actor is to drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainOrder {
    /// When the drain is over at the latest, counted from the node's start.
    pub until: Duration,
    /// Whether the node will read its disk again.
    pub keeps_disk: bool,
    /// Limit of the bytes of blocks that move in a second.
    pub bytes_per_second: Option<u64>,
}

/// A request of a session. The shell chooses the number. The core answers each request once, by an effect that repeats the
/// number, unless the session ends first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId {
    /// The asking session.
    pub session: SessionId,
    /// Its number, which no other request has.
    pub number: u64,
}

/// A question about the places of chunks. The core chooses the number, and uses no number twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QuestionId(pub(crate) u64);

/// Chunks that another actor is asked for together. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OrderNumber(pub u64);

/// A chunk that a tier is asked for. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadId(pub(crate) u64);

/// The question of a node that drains, whether another node keeps its chunks. The core on each side chooses a number of its own,
/// and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TakeNumber(pub(crate) u64);

/// A chunk that is written to a tier. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteNumber(pub(crate) u64);

/// Bytes that are copied and summed. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopyNumber(pub(crate) u64);

/// A chunk that is read from disk for a peer. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecallId(pub(crate) u64);

/// A copy by a device. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceCopyNumber(pub u64);

/// Why a segment of the disk is visited.
#[derive(Debug, Clone)]
pub enum SegmentVisit {
    /// To learn its chunks.
    List,
    /// To purge these chunks from it for good.
    Purge(Arc<PurgedKeys>),
}

/// The result of a visit to a segment of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Visited {
    /// The visit is done.
    Done {
        /// The listed chunks, with their pools.
        held: Vec<(Fingerprint, ChunkRef, PoolSet)>,
        /// The position of the next segment; `None` after the last.
        next: Option<u64>,
    },
    /// The disk has too much to do: asking again helps.
    Busy,
    /// The disk is closed.
    Closed,
}

/// A pin of an admin.
#[derive(Debug, Clone)]
pub enum AdminPin {
    /// Keep the first chunks of a prompt that are in memory.
    Start(PinStart),
    /// End the pin of this number; the answer tells nothing.
    End(u64),
}

/// A step of a purge. The shell chooses its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PurgeStep {
    /// Begins a purge. Until its end, none of its chunks is brought from elsewhere, and those that are being written now are not
    /// kept.
    Begin(u64, PurgeScope),
    /// Some chunks are removed, or counted: [`Effect::Purged`](crate::Effect::Purged) answers.
    Page {
        /// The purge.
        purge: u64,
        /// Its chunks.
        scope: PurgeScope,
        /// Whether the chunks are removed or counted.
        mode: PurgeMode,
        /// Where the page begins: at 0, or where the page before it says.
        from: usize,
    },
    /// Ends a purge: its chunks may come again.
    End(u64),
}

/// Why a device did not make a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFailure {
    /// The copy was refused before anything was begun.
    Refused,
    /// The copy was refused, since the device gives no memory for the device tier.
    NoTier,
    /// The copy has failed and ended: the contents of its targets are unknown.
    Failed,
    /// The device failed during the copy, and may touch the copy's memory until the device is gone.
    Lost,
}

/// An event that a shell tells its core. Answers may come in any order, late, or not at all. An answer that comes twice, or
/// that nobody waits for, changes nothing.
#[derive(Debug)]
pub enum Event {
    /// A session asks for something.
    Asked {
        /// The request's number and session.
        request: RequestId,
        /// The request.
        ask: Request,
        /// The cause.
        cause: Cause,
    },
    /// A session ended.
    Closed(SessionId),
    /// A process is known to be gone.
    ProcessGone(ProcessId),
    /// This policy is in force from now on.
    PolicyIs(PolicyName),
    /// These limits are in force from now on, as far as limits can change
    /// ([`Store::change_limits`](crate::store::Store::change_limits)).
    LimitsAre(Box<StoreLimits>),
    /// These tenants are served from now on, by number, with the bytes of extents that each may hold. A tenant with 0 bytes has
    /// left: its sessions are about to end, its chunks and pins go.
    TenantsAre(Vec<(String, u64)>),
    /// A purge begins, goes on or ends.
    Purge(PurgeStep),
    /// A copy has ended: nothing is written to its places any more.
    Copied {
        /// The copy.
        copy: CopyNumber,
        /// The result.
        answer: CopyAnswer,
    },
    /// The device answers, or fails.
    Device(DeviceEvent),
    /// An extent has new memory.
    ExtentRenewed(u32),
    /// This node no longer touches an earlier life's bytes in this extent; engines still may.
    ExtentLeft {
        /// The extent.
        extent: u32,
        /// Whether engines had time enough to unmap it.
        may_renew: bool,
    },
    /// Somebody reports chunks as damaged, and wants no answer.
    Damaged {
        /// The reporter.
        by: Reporter,
        /// The namespace.
        fingerprint: Fingerprint,
        /// The chunks.
        hashes: Vec<ChunkHash>,
    },
    /// The node leaves: the actor moves its warm chunks to others, and keeps nothing new.
    Drain(DrainOrder),
    /// The node no longer leaves.
    DrainCancelled,
    /// These actors of other nodes may keep this actor's chunks when it drains, in the order in which they are asked.
    TakersAre(OtherNodes),
    /// An actor of another node was asked to keep chunks, and answered or failed to.
    TakeAnswered {
        /// The question.
        take: TakeNumber,
        /// The answer; `None` if there is none.
        taken: Option<Taken>,
    },
    /// A peer lets go of a grant or a follow.
    GrantEnded(u64),
    /// The answer of this node's other actors.
    SiblingsFound {
        /// The question.
        question: QuestionId,
        /// One item per chunk, in the order of the question.
        holders: Vec<Holders>,
    },
    /// The directory's answer; empty if it could not be asked.
    HoldersFound {
        /// The question.
        question: QuestionId,
        /// One item per chunk, in the order of the question.
        holders: Vec<Holders>,
    },
    /// The object store's answer; empty if it could not be asked.
    StoredFound {
        /// The question.
        question: QuestionId,
        /// One item per chunk, in the order of the question; `None` for a chunk of which the store said nothing.
        found: Vec<Option<bool>>,
    },
    /// Another actor answered an order.
    OrderEnded {
        /// The order.
        order: OrderNumber,
        /// One item per chunk, in the order of the chunks. A missing item means that its chunk did not come.
        came: Vec<Arrival>,
    },
    /// Too many orders are under way: this order was not taken.
    OrderRefused(OrderNumber),
    /// Layers of a chunk that is followed at another node came, and are right.
    LayersCame {
        /// The order.
        order: OrderNumber,
        /// Position of the chunk in the order.
        chunk: usize,
        /// The layers.
        layers: LayersArrived,
    },
    /// A chunk that is followed at another node is all here, or will not come.
    FollowedCame {
        /// The order.
        order: OrderNumber,
        /// Position of the chunk in the order.
        chunk: usize,
        /// The result.
        came: Arrival,
    },
    /// A follow has ended: none of its chunks comes any more.
    FollowEnded(OrderNumber),
    /// A tier answered.
    ReadEnded {
        /// The read.
        read: ReadId,
        /// The result.
        answer: ReadAnswer,
    },
    /// A write has ended: its memory is no longer read.
    WriteEnded {
        /// The write.
        number: WriteNumber,
        /// The result.
        answer: Written,
    },
    /// A namespace's description on disk was written or deleted.
    Described {
        /// The namespace.
        fingerprint: Fingerprint,
        /// The result.
        description: Description,
    },
    /// A segment of the disk was visited, or could not be.
    SegmentVisited {
        /// The purpose.
        visit: SegmentVisit,
        /// The position before the segment.
        after: u64,
        /// The result.
        result: Visited,
    },
    /// Chunks are no longer on disk.
    LeftDisk(Vec<ChunkKey>),
    /// The disk is closed: nothing on it can be read or written any more.
    DiskClosed,
    /// The drive of the disk does not answer, or answers again: meanwhile the disk is asked for nothing.
    DiskSilent(bool),
    /// A node answered an offer.
    OfferEnded {
        /// The offer.
        offer: u64,
        /// Whether the node wants each chunk, in the order of the offer; empty if the node did not answer.
        wanted: Vec<bool>,
    },
    /// Chunks moved to another actor.
    Moved {
        /// The namespace.
        fingerprint: Fingerprint,
        /// The chunks.
        hashes: Vec<ChunkHash>,
    },
    /// The directory's answer to [`Effect::Changed`](crate::Effect::Changed), or to a page that it did not take.
    Announced(Announced),
    /// The directory took a page of all that is held.
    PageAnnounced {
        /// The page's [`Effect::AnnouncePage`](crate::Effect::AnnouncePage) has it.
        next: NextPage,
    },
    /// Time has passed. The shell sends this event a few times a second.
    Tick,
    /// The time of [`Core::next_deadline`](crate::Core::next_deadline) has come.
    Alarm,
}

/// The result for one chunk of an order to another actor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrival {
    /// The chunk's blocks are in their slots, and right.
    Here {
        /// Checksums of the blocks that came: by slice, then pool.
        checksums: Vec<Checksums>,
        /// The pools that came with every slice.
        pools: PoolSet,
        /// How often the chunk was read, this time included.
        reads: u32,
        /// Whether the chunk's holder has it on disk.
        is_on_disk: bool,
    },
    /// The holder does not have it.
    NotHeld,
    /// The holder has too much to do.
    Busy {
        /// When asking again may help.
        retry_after_ms: u64,
    },
    /// The chunk came with bytes that do not match its checksums.
    Damaged,
    /// The chunk did not come.
    Failed(FetchFailure),
}

/// Why a chunk did not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum FetchFailure {
    /// The holder is not reached, or has not answered lately.
    Unreachable,
    /// The deadline passed.
    Deadline,
    /// The connection or stream broke.
    Broken,
    /// The holder answered something else than was asked.
    Malformed,
    /// This node has too many fetches under way.
    Full,
}

/// Layers of a block that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayersArrived {
    /// The block, by slice, then pool.
    pub block: usize,
    /// Offset of the layers in the block.
    pub offset: u64,
    /// Bytes of the layers.
    pub bytes: u64,
    /// The checksum of the layers.
    pub checksum: u64,
}

/// The result of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyAnswer {
    /// The bytes are in their places: their checksums, in the order of the moves.
    Done(Vec<Checksums>),
    /// Too much is being copied: nothing was begun.
    Busy,
    /// The order does not fit its memory, which is a fault of ours: nothing was begun.
    Impossible,
    /// The copy thread failed.
    Failed,
}

impl CopyAnswer {
    /// The checksums, if there are any.
    pub(crate) fn sums(self) -> Option<Vec<Checksums>> {
        match self {
            Self::Done(sums) => Some(sums),
            Self::Busy | Self::Impossible | Self::Failed => None,
        }
    }
}

/// A device's answer about its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The device's thread took a copy, or has too much to do. The shell says so at once, before it takes the next effect.
    Took {
        /// The copy.
        number: DeviceCopyNumber,
        /// Whether the thread took the copy.
        is_taken: bool,
    },
    /// The first layers of a copy are done.
    Layers {
        /// The copy.
        number: DeviceCopyNumber,
        /// How many layers are done.
        done: u32,
    },
    /// A copy has ended: it touches no memory any more, unless the device was lost.
    Ended {
        /// The copy.
        number: DeviceCopyNumber,
        /// Whether all its bytes are where they should be.
        result: Result<(), DeviceFailure>,
    },
    /// There is no device, or it failed. All copies are refused from now on.
    Lost,
    /// Nothing of the device is left: it touches no memory.
    Gone,
}

/// The result of a read. Except after [`Self::Lost`], nothing is written to the read's slots any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadAnswer {
    /// The chunk's blocks are in their slots, and right.
    Here {
        /// Checksums of the blocks that came: by slice, then pool.
        checksums: Vec<Checksums>,
        /// The pools of these blocks.
        pools: PoolSet,
    },
    /// The tier does not have the chunk, or had it damaged and forgot it.
    Missing,
    /// The tier has too much to do: nothing was ordered.
    Busy,
    /// The tier takes no orders any more.
    Closed,
    /// The order does not fit its memory, which is a fault of ours, or the drive does not answer: nothing was ordered.
    Impossible,
    /// The tier's thread failed: it may still write to the slots.
    Lost,
}

/// The result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// The tier has the chunk.
    There,
    /// The tier does not have the chunk.
    Failed,
    /// The tier has too much to do: nothing was ordered.
    Busy,
    /// The tier takes no orders any more.
    Closed,
}

/// The result of describing a namespace on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Description {
    /// The description is written.
    There,
    /// The description could not be written.
    Failed,
    /// The description is deleted, or of no use.
    Gone,
}

/// Where a full announcement goes on after a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextPage {
    /// The number of the full announcement.
    pub(crate) resync: u64,
    /// Position of the next page in the store; `None` after the last.
    pub(crate) from: Option<usize>,
}

/// The result of a message to the directory.
#[derive(Debug)]
pub enum Announced {
    /// The directory took the message.
    Taken,
    /// The directory has too much to do, and gives the message back.
    Full(Changes),
    /// The message is lost.
    Lost,
}
