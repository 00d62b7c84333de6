//! What happens to a core.

use larder_protocol::PoolSet;
use larder_protocol::session::{Collect, Lease, Lookup};

use crate::cause::Cause;
use crate::directory::Holders;
use crate::store::Checksums;
use crate::store::ids::SessionId;

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

/// A chunk that is read from disk for a peer. The core chooses the number, and uses none twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecallId(pub(crate) u64);

/// A tier below memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Below {
    /// This actor's disk.
    Disk,
    /// The object store that all nodes share.
    Object,
}

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
    /// Time has passed.
    Tick,
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
