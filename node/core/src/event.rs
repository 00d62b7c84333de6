//! The events that a shell tells its core.

use larder_protocol::session::Request;
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};

use crate::cause::Cause;
use crate::directory::{Changes, Holders};
use crate::reports::Reporter;
use crate::store::Checksums;
use crate::store::ids::{ChunkKey, ProcessId, SessionId};
use crate::store::policy::PolicyName;

pub use crate::store::ids::Below;

/// A request of a session. The shell chooses the number; the core answers each of them once, by an effect that repeats it,
/// unless the session ends before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId {
    /// Who asks.
    pub session: SessionId,
    /// Its number, which no other request has.
    pub number: u64,
}

/// A question for whoever may know where chunks are. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QuestionId(pub(crate) u64);

/// Chunks that another actor is asked for together. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OrderNumber(pub u64);

/// A chunk that a tier is asked for. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadId(pub(crate) u64);

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
pub struct Ticket(pub u64);

/// Why a device did not make a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFailure {
    /// It was refused before anything was begun.
    Refused,
    /// It failed, and has ended: what is in its targets is unknown.
    Failed,
    /// The device failed under it, and may touch its memory until it is gone.
    Lost,
}

/// Something that happened. Answers may come in any order, late, or not at all; one that comes twice, or that nobody waits
/// for, changes nothing.
#[derive(Debug)]
pub enum Event {
    /// A session asks for something.
    Asked {
        /// Its number, and who asks.
        request: RequestId,
        /// What.
        ask: Request,
        /// What it belongs to.
        cause: Cause,
    },
    /// A session ended.
    Closed(SessionId),
    /// A process is known to be gone.
    ProcessGone(ProcessId),
    /// This policy is in force from now on.
    PolicyIs(PolicyName),
    /// A copy has ended: nothing is written to its places any more.
    Copied {
        /// The copy.
        copy: CopyNumber,
        /// What came of it.
        answer: CopyAnswer,
    },
    /// The device says something.
    Device(DeviceEvent),
    /// An extent has new memory.
    ExtentRenewed(u32),
    /// Nobody on this node's side touches what an earlier life put into this extent.
    ExtentLeft {
        /// The extent.
        extent: u32,
        /// Whether engines had time enough to unmap it.
        may_renew: bool,
    },
    /// Somebody says that chunks are damaged, and wants no answer.
    Damaged {
        /// Who says so.
        by: Reporter,
        /// The namespace.
        fingerprint: Fingerprint,
        /// The chunks.
        hashes: Vec<ChunkHash>,
    },
    /// A peer lets go of what it was granted, or followed.
    GrantEnded(u64),
    /// Which other actors of this node hold chunks.
    SiblingsFound {
        /// The question.
        question: QuestionId,
        /// One item a chunk, in their order.
        holders: Vec<Holders>,
    },
    /// What the directory says; nothing where it could not be asked.
    HoldersFound {
        /// The question.
        question: QuestionId,
        /// One item a chunk, in their order.
        holders: Vec<Holders>,
    },
    /// What the object store says; nothing where it could not be asked.
    StoredFound {
        /// The question.
        question: QuestionId,
        /// One item a chunk, in their order.
        found: Vec<bool>,
    },
    /// Another actor answered an order.
    OrderEnded {
        /// The order.
        order: OrderNumber,
        /// One item a chunk, in their order; those that are missing did not come.
        came: Vec<Arrival>,
    },
    /// Too many orders are under way: this one was not taken.
    OrderRefused(OrderNumber),
    /// Layers of a chunk that is followed at another node came, and are right.
    LayersCame {
        /// The order.
        order: OrderNumber,
        /// Position of the chunk in it.
        chunk: usize,
        /// What came.
        layers: LayersArrived,
    },
    /// A chunk that is followed at another node is all here, or will not come.
    FollowedCame {
        /// The order.
        order: OrderNumber,
        /// Position of the chunk in it.
        chunk: usize,
        /// What came of it.
        came: Arrival,
    },
    /// Nothing that is followed by this order comes any more.
    FollowEnded(OrderNumber),
    /// A tier answered.
    ReadEnded {
        /// The read.
        read: ReadId,
        /// What came of it.
        answer: ReadAnswer,
    },
    /// A write has ended: its memory is read no more.
    WriteEnded {
        /// The write.
        number: WriteNumber,
        /// What came of it.
        answer: Written,
    },
    /// A namespace's description on disk was written or deleted.
    Described {
        /// The namespace.
        fingerprint: Fingerprint,
        /// What came of it.
        description: Description,
    },
    /// Chunks were found on disk, with these pools.
    Recovered {
        /// The chunks.
        held: Vec<(Fingerprint, ChunkRef, PoolSet)>,
        /// Whether that is all.
        is_all: bool,
    },
    /// Chunks are no longer on disk.
    LeftDisk(Vec<ChunkKey>),
    /// The disk is closed: nothing on it can be read or written any more.
    DiskClosed,
    /// Chunks moved to another actor.
    Moved {
        /// The namespace.
        fingerprint: Fingerprint,
        /// The chunks.
        hashes: Vec<ChunkHash>,
    },
    /// What the directory made of [`Effect::Changed`](crate::Effect::Changed), or that it does not take a page.
    Announced(Announced),
    /// The directory took a page of all that is held.
    PageAnnounced {
        /// Where the next one begins; `None` after the last.
        next: Option<usize>,
    },
    /// Time has passed: this comes a few times a second.
    Tick,
    /// It is as late as [`Core::next_deadline`](crate::Core::next_deadline) said.
    Alarm,
}

/// What came of a chunk that another actor was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrival {
    /// Its blocks are in their slots, and right.
    Here {
        /// Checksums of the blocks that came: by slice, then pool.
        checksums: Vec<Checksums>,
        /// The pools of which every slice came.
        pools: PoolSet,
        /// How often the chunk was read, this time included.
        reads: u32,
        /// Whether its holder has it on disk.
        is_on_disk: bool,
    },
    /// The holder does not have it.
    NotHeld,
    /// The holder has too much to do.
    Busy {
        /// When asking again may help.
        retry_after_ms: u64,
    },
    /// It came with other bytes than it has checksums for.
    Damaged,
    /// It did not come.
    Failed(FetchFailure),
}

/// Why a chunk did not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Where in it they begin.
    pub offset: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their checksum.
    pub checksum: u64,
}

/// What came of a copy.
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
    /// The checksums, where there are any.
    pub(crate) fn sums(self) -> Option<Vec<Checksums>> {
        match self {
            Self::Done(sums) => Some(sums),
            Self::Busy | Self::Impossible | Self::Failed => None,
        }
    }
}

/// What a device says of its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceEvent {
    /// Its thread took a copy, or has too much to do. Told at once, before the next effect is taken.
    Took {
        /// The copy.
        ticket: Ticket,
        /// Whether it did.
        is_taken: bool,
    },
    /// Layers of a copy are done, from its first on.
    Layers {
        /// The copy.
        ticket: Ticket,
        /// How many are.
        done: u32,
    },
    /// A copy has ended: unless the device was lost under it, nothing of it touches any memory.
    Ended {
        /// The copy.
        ticket: Ticket,
        /// Whether all its bytes are where they should be.
        result: Result<(), DeviceFailure>,
    },
    /// There is no device, or it failed. All copies are refused from now on.
    Lost,
    /// Nothing of the device is left: it touches no memory.
    Gone,
}

/// What came of a read. But for the last, nothing is written to its slots any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadAnswer {
    /// Its blocks are in their slots, and right.
    Here {
        /// Checksums of the blocks that came: by slice, then pool.
        checksums: Vec<Checksums>,
        /// Their pools.
        pools: PoolSet,
    },
    /// The tier does not have it, or it was damaged, and is forgotten there.
    Missing,
    /// The tier has too much to do: nothing was ordered.
    Busy,
    /// The tier takes no orders any more.
    Closed,
    /// The order does not fit its memory, which is a fault of ours: nothing was ordered.
    Impossible,
    /// The tier's thread failed: whether it still writes to the slots, nobody knows.
    Lost,
}

/// What came of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// The tier has the chunk.
    There,
    /// It does not.
    Failed,
    /// The tier has too much to do: nothing was ordered.
    Busy,
    /// The tier takes no orders any more.
    Closed,
}

/// What came of a namespace's description on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Description {
    /// It is written.
    There,
    /// It could not be written.
    Failed,
    /// It is deleted, or of no use.
    Gone,
}

/// How a message for the directory fared.
#[derive(Debug)]
pub enum Announced {
    /// It was taken.
    Taken,
    /// The directory has too much to do: here it is again.
    Full(Changes),
    /// It is lost.
    Lost,
}
