//! The effects that a core asks its shell to perform.

mod device;

use std::time::Duration;

use larder_protocol::checksum::BlockKey;
use larder_protocol::drain::{TakeChunk, TakeNamespace, Taken};
use larder_protocol::handoff::Writer;
use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::peer::Class;
use larder_protocol::session::{Checked, Found, Lookup, Response};
use larder_protocol::table::Holder;
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};

use crate::cause::Cause;
use crate::directory::Page;
use crate::event::{
    Below, CopyNumber, DeviceCopyNumber, NextPage, OrderNumber, QuestionId, ReadId, RecallId, RequestId,
    SegmentVisit, TakeNumber, WriteNumber,
};
use crate::placement::Placement;
use crate::reports::Reporter;
use crate::store::ids::{ChunkKey, SessionId, TenantId};
use crate::store::policy::PolicyName;
use crate::store::{
    BlockMove, Change, ChunkWrite, FetchId, FollowNews, Granted, Leased, Offered, PurgedPage, Refused,
};

pub use device::{BlockAt, CopyDirection, DeviceOrder, DeviceWork, PagesCopy, Promoted};

/// An order to ask an actor of another node to keep chunks.
#[derive(Debug)]
pub struct TakeOrder {
    /// Its number.
    pub take: TakeNumber,
    /// The actor to ask.
    pub taker: Holder,
    /// The chunks' namespace; `None` if only the room is of interest.
    pub namespace: Option<TakeNamespace>,
    /// The chunks.
    pub chunks: Vec<TakeChunk>,
}

/// A task for the shell. Each is handed out once, in order.
#[derive(Debug)]
pub enum Effect {
    /// Answers a request.
    Answer {
        /// The request.
        request: RequestId,
        /// The answer. If it names places, the shell adds the new extents to it.
        response: Response,
        /// Extents that the session sees for the first time.
        new_extents: Vec<u32>,
    },
    /// A request that has no answer is done.
    Done {
        /// The request.
        request: RequestId,
    },
    /// Answers a lookup.
    Found {
        /// The request.
        request: RequestId,
        /// The lookup.
        ask: Lookup,
        /// The result.
        found: Found,
    },
    /// Answers a prefetch.
    Prefetching {
        /// The request.
        request: RequestId,
        /// The lookup.
        ask: Lookup,
        /// The result.
        found: Found,
        /// The prefetch, or the refusal.
        started: Result<Started, Refused>,
    },
    /// Answers a lease, or the collection of a prefetch.
    Leased {
        /// The request.
        request: RequestId,
        /// The lease.
        leased: Leased,
    },
    /// Refuses a request.
    Refused {
        /// The request.
        request: RequestId,
        /// Why.
        refused: Refused,
    },
    /// Copies and sums blocks: [`Event::Copied`](crate::Event::Copied) answers.
    Copy {
        /// The copy's number.
        copy: CopyNumber,
        /// The session whose window has the sources; `None` if all blocks are in place.
        session: Option<SessionId>,
        /// The bytes and their places.
        moves: Vec<BlockMove>,
    },
    /// Makes the device copy: [`DeviceEvent::Took`](crate::DeviceEvent::Took) answers at once, before the next effect is taken,
    /// and [`DeviceEvent::Ended`](crate::DeviceEvent::Ended) is the last answer.
    DeviceCopy(DeviceOrder),
    /// Nobody waits for this copy by the device any more: the device does not begin it if there is still time. The shell must
    /// answer nevertheless.
    CancelDeviceCopy(DeviceCopyNumber),
    /// Gives an extent new memory: [`Event::ExtentRenewed`](crate::Event::ExtentRenewed) answers.
    Renew(u32),
    /// Asks the node of an engine for chunks while that engine writes them: [`Event::FollowEnded`](crate::Event::FollowEnded) is
    /// the last answer.
    Follow(FollowOrder),
    /// Tells a peer the progress of its follow.
    TellFollower(FollowNews),
    /// Asks which other actors of this node hold chunks: [`Event::SiblingsFound`](crate::Event::SiblingsFound) answers.
    FindSiblings {
        /// The question's number.
        question: QuestionId,
        /// The namespace.
        fingerprint: Fingerprint,
        /// The chunks.
        chunks: Vec<ChunkRef>,
    },
    /// Asks the directory who holds chunks: [`Event::HoldersFound`](crate::Event::HoldersFound) answers.
    FindHolders {
        /// The question's number.
        question: QuestionId,
        /// The namespace.
        fingerprint: Fingerprint,
        /// The namespace's tenant.
        tenant: TenantId,
        /// The chunks.
        chunks: Vec<ChunkRef>,
        /// The cause.
        cause: Cause,
    },
    /// Asks the object store which chunks it has: [`Event::StoredFound`](crate::Event::StoredFound) answers.
    FindStored {
        /// The question's number.
        question: QuestionId,
        /// The namespace.
        fingerprint: Fingerprint,
        /// The chunks.
        chunks: Vec<ChunkRef>,
        /// Slice and pool of each block that the store must have for a chunk to count as present.
        blocks: Vec<(u16, u8)>,
    },
    /// Asks another actor for chunks: [`Event::OrderEnded`](crate::Event::OrderEnded) answers.
    Fetch(FetchOrder),
    /// Makes an order urgent: an engine stands still until it is answered.
    Hurry(OrderNumber),
    /// Nobody waits for this order any more. The shell must answer nevertheless.
    CancelOrder(OrderNumber),
    /// Reads a chunk from a tier: [`Event::ReadEnded`](crate::Event::ReadEnded) answers. [`Core::wanted`](crate::Core::wanted)
    /// says where its blocks go.
    Read {
        /// The read's number.
        read: ReadId,
        /// The tier.
        tier: Below,
        /// The chunk.
        chunk: FetchId,
    },
    /// Writes a chunk to the tier that its write names: [`Event::WriteEnded`](crate::Event::WriteEnded) answers. The chunk's
    /// memory does not change before the answer.
    Write {
        /// The write's number.
        number: WriteNumber,
        /// The bytes and their places.
        write: ChunkWrite,
    },
    /// Tells the disk that chunks on it were used in memory: they should stay on disk.
    Touch(Vec<ChunkKey>),
    /// Makes the disk forget a chunk.
    Remove(ChunkKey),
    /// Logs and counts a chunk on disk that disagrees with others in parent or index. [`Effect::Remove`] follows.
    Disagrees(ChunkRef),
    /// Describes a namespace on disk: [`Event::Described`](crate::Event::Described) answers.
    Describe {
        /// The namespace.
        fingerprint: Fingerprint,
        /// The tenant's name.
        tenant_name: String,
        /// The namespace's description.
        spec: NamespaceSpec,
    },
    /// Deletes descriptions from disk: [`Event::Described`](crate::Event::Described) answers for each.
    ForgetDescriptions(Vec<Fingerprint>),
    /// A new store knows a namespace.
    Knows {
        /// The namespace's number.
        namespace: u32,
        /// The tenant's name.
        tenant_name: String,
        /// The namespace.
        fingerprint: Fingerprint,
    },
    /// Tells the other actors of this node the gained and lost chunks.
    TellSiblings(Vec<Change>),
    /// Tells followers of events and the directory the gained and lost chunks. [`Event::Announced`](crate::Event::Announced)
    /// answers for the directory at once, before the next effect is taken.
    Changed {
        /// Event number of the first change that followers were not told.
        sequence: u64,
        /// How many of the changes followers were told.
        told: usize,
        /// The changes, in order.
        changes: Vec<Change>,
        /// Whether the directory is told.
        to_directory: bool,
    },
    /// Tells the directory a page of all held chunks: [`Event::PageAnnounced`](crate::Event::PageAnnounced) or
    /// [`Event::Announced`](crate::Event::Announced) answers at once, before the next effect is taken.
    AnnouncePage {
        /// The page.
        page: Page,
        /// Where the announcement goes on.
        next: NextPage,
    },
    /// Tells the directory that some of a holder's rows are wrong.
    Stale {
        /// The holder.
        holder: Holder,
        /// The namespace.
        fingerprint: Fingerprint,
        /// The chunks that the holder does not have.
        chunks: Vec<ChunkRef>,
    },
    /// Tells another actor of this node that some of its chunks came with bytes that do not match their checksums.
    TellDamaged {
        /// The actor.
        device: u16,
        /// The namespace.
        fingerprint: Fingerprint,
        /// The chunks.
        hashes: Vec<ChunkHash>,
    },
    /// Tells another actor of this node that one of its chunks has moved here.
    TellMoved {
        /// The actor.
        device: u16,
        /// The namespace.
        fingerprint: Fingerprint,
        /// The chunk.
        hash: ChunkHash,
    },
    /// Asks an actor of another node to keep chunks, since this node drains: [`Event::TakeAnswered`](crate::Event::TakeAnswered)
    /// answers.
    AskToTake(TakeOrder),
    /// Answers a node that drains.
    Taken {
        /// The number under which the node's chunks were taken.
        take: TakeNumber,
        /// The answer.
        taken: Taken,
    },
    /// Answers a peer that waited for a chunk from disk.
    Granted {
        /// The number of the recall.
        recall: RecallId,
        /// The grant.
        granted: Granted,
    },
    /// A chunk in memory has other bytes than were committed under its name: it is dropped.
    Condemned {
        /// The reporter.
        by: Reporter,
        /// The chunk's blocks.
        keys: Vec<BlockKey>,
    },
    /// Offers a node chunks that are evicted here: [`Event::OfferEnded`](crate::Event::OfferEnded) answers.
    Offer(Offered),
    /// Visits the disk's first segment behind a position: [`Event::SegmentVisited`](crate::Event::SegmentVisited) answers.
    VisitSegment {
        /// The purpose.
        visit: SegmentVisit,
        /// The position.
        after: u64,
    },
    /// A tenant is no longer served: its metrics go.
    TenantLeft(String),
    /// Answers a page of a purge.
    Purged {
        /// The purge.
        purge: u64,
        /// The chunks, and where the next page begins.
        page: PurgedPage,
        /// Chunks of the purge that are being written to tiers below.
        writes: u64,
    },
    /// Counts something.
    Count(Counted),
}

/// The event to count.
#[derive(Debug, Clone, PartialEq)]
pub enum Counted {
    /// A chunk that was wanted from elsewhere was placed like this; `None` if it did not come.
    Placed(Option<Placement>),
    /// A chunk is not written to disk, since its namespace cannot be described there.
    NotWritten,
    /// So many bytes were committed.
    Committed(u64),
    /// So many bytes were leased.
    Leased(u64),
    /// A session handed over layers: the number of pieces, and their bytes.
    Given(u64, u64),
    /// So many bytes of layers were sent to a node that follows.
    Sent(u64),
    /// Layers came from another node: the number of pieces, and the bytes of whole chunks.
    Came(u64, u64),
    /// A copy by a device ended like this, and brought so many bytes.
    ByDevice(DeviceCopyEnd, u64),
    /// A load reads so many bytes from the device tier.
    ReadFromTier(u64),
    /// A hit in a namespace, by its number, saves so many seconds of prefill.
    Avoided(u32, f64),
    /// A chunk was refused because its name disagrees with the name of a chunk that is here.
    NameRefused,
    /// Another policy decides evictions from now on.
    PolicyChanged(PolicyName),
    /// A chunk was reported as damaged, with the result; `None` if it was not verified, since too much is being verified.
    Reported(Reporter, Option<Checked>),
}

/// How a copy by a device ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceCopyEnd {
    /// Pages were loaded.
    Loaded,
    /// Pages were saved.
    Saved,
    /// Blocks were copied into the device tier.
    Promoted,
    /// The copy failed, or was given up.
    Failed,
    /// The copy did not end in time.
    Stalled,
}

/// Chunks to follow at the node whose engine writes them. [`Core::wanted`](crate::Core::wanted) says where their blocks go.
#[derive(Debug)]
pub struct FollowOrder {
    /// The order's number.
    pub order: OrderNumber,
    /// The writer's node and actor.
    pub writer: Writer,
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The tenant to which the namespace belongs.
    pub tenant: TenantId,
    /// The chunks.
    pub chunks: Vec<FetchId>,
    /// The wanted pools of each chunk; empty if all pools are wanted.
    pub pools: Vec<PoolSet>,
    /// The earliest attempt of the writer that may be followed.
    pub attempt: u64,
    /// For how long the writer may be silent.
    pub patience_ms: u64,
}

/// Chunks that another actor is asked for together. [`Core::wanted`](crate::Core::wanted) says where their blocks go.
#[derive(Debug)]
pub struct FetchOrder {
    /// The order's number.
    pub order: OrderNumber,
    /// The holder to ask.
    pub holder: Holder,
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The namespace's tenant.
    pub tenant: TenantId,
    /// The chunks.
    pub chunks: Vec<FetchId>,
    /// How long the fetch may take, counted from the moment when the holder is asked.
    pub deadline: Duration,
    /// Whether other actors have all of the chunks too.
    pub has_others: bool,
    /// The urgency of the requests that wait for the chunks.
    pub class: Class,
    /// The cause.
    pub cause: Cause,
}

/// A prefetch that has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    /// The prefetch's number; 0 if nothing is brought.
    pub ticket: u64,
    /// Tokens that will be in place.
    pub tokens: u64,
    /// Tokens that were found, but that the engine computes sooner than they come.
    pub tokens_to_recompute: u64,
}
