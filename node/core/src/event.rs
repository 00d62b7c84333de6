//! What happens to a core.

use larder_protocol::session::{Collect, Lease, Lookup};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};

use crate::cause::Cause;
use crate::directory::{Changes, Holders};
use crate::store::Checksums;
use crate::store::ids::{ChunkKey, SessionId};

pub use crate::store::ids::Below;

/// A request of a session. The shell chooses the number; the core answers each of them once, by an effect that repeats it,
/// unless the session ends before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

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

/// A chunk that is read from disk for a peer. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecallId(pub(crate) u64);

/// Something that happened. Answers may come in any order, late, or not at all; one that comes twice, or that nobody waits
/// for, changes nothing.
#[derive(Debug)]
pub enum Event {
    /// A session asks how much of a prompt is cached.
    Lookup {
        /// Its number.
        request: RequestId,
        /// Who asks.
        session: SessionId,
        /// What.
        ask: Lookup,
        /// What it belongs to.
        cause: Cause,
    },
    /// A session wants to read chunks.
    Lease {
        /// Its number.
        request: RequestId,
        /// Who asks.
        session: SessionId,
        /// What.
        ask: Lease,
        /// What it belongs to.
        cause: Cause,
    },
    /// A session wants chunks brought, and does not wait for them.
    Prefetch {
        /// Its number.
        request: RequestId,
        /// Who asks.
        session: SessionId,
        /// What.
        ask: Lookup,
        /// What it belongs to.
        cause: Cause,
    },
    /// A session wants to read what a prefetch brought.
    Collect {
        /// Its number.
        request: RequestId,
        /// Who asks.
        session: SessionId,
        /// What.
        ask: Collect,
    },
    /// A session wants nothing more of a prefetch.
    Cancel {
        /// Who says so.
        session: SessionId,
        /// Of which.
        ticket: u64,
    },
    /// A session ended.
    Closed(SessionId),
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
    Failed,
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
