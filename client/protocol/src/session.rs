//! Messages between an engine and the node on its host.
//!
//! A session starts with [`Request::Hello`], then registers one namespace or more. Requests may be sent without waiting for
//! earlier answers. `Release` has no answer: it cannot be refused.

use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize, rancor};

use crate::chain::Chain;
use crate::chunk::ChunkHash;
use crate::describe::Describe;
use crate::frame::MalformedMessage;
use crate::handoff::{AskInPlace, Follow, HandOver, InPlace};
use crate::lane::{AskCopy, CopyProgress, LoadPages, RegisterTensors, SavePages, TensorsRegistered};
pub use crate::lease::{Extent, Leased, Place};
use crate::namespace::{Fingerprint, NamespaceSpec};
use crate::pools::PoolSet;
use crate::trace::TraceContext;

/// A request of an engine.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Request {
    /// Opens the session; the first message, once.
    Hello(Hello),
    /// Registers a namespace; answered by [`Response::Registered`].
    Register(Register),
    /// Asks how much of a prompt is here; answered by [`Response::Found`].
    Lookup(Lookup),
    /// Asks for room for chunks; answered by [`Response::Reserved`] or [`Response::Busy`].
    Reserve(Reserve),
    /// Hands over written blocks; answered by [`Response::Committed`]. Send it only when every store into the window has
    /// completed.
    Commit(Commit),
    /// Gives back the uncommitted chunks of a reservation; answered by [`Response::Aborted`].
    ///
    /// Names the reservation.
    Abort(u64),
    /// Asks to read the longest prefix that is here or can be fetched from other nodes in time; answered by [`Response::Leased`]
    /// or [`Response::Busy`].
    Lease(Lease),
    /// Ends a lease. No answer. Send it only when every load from the leased slots has completed.
    ///
    /// Names the lease.
    Release(u64),
    /// Keeps the longest prefix that is here from eviction until a deadline; answered by [`Response::Pinned`].
    Pin(Pin),
    /// Ends a pin before its deadline; answered by [`Response::Unpinned`].
    ///
    /// Names the pin.
    Unpin(u64),
    /// Asks how much of a prompt can be served, and starts to bring the chunks that are not in memory; answered by
    /// [`Response::Prefetching`] as soon as the amount is known.
    Prefetch(Lookup),
    /// Asks for the progress of a prefetch; answered by [`Response::Progress`].
    ///
    /// Names the ticket.
    Progress(u64),
    /// Ends a prefetch and leases the chunks that it brought; answered by [`Response::Leased`], at once or after the requested
    /// wait.
    Collect(Collect),
    /// Ends a prefetch whose request went away, and stops its transfers. No answer.
    ///
    /// Names the ticket.
    Cancel(u64),
    /// Hands over some layers of reserved chunks ahead of their commit; answered by [`Response::HandedOver`]. Send it only when
    /// every store of these layers into the window has completed.
    HandOver(HandOver),
    /// Asks to read chunks while they are being written; answered by [`Response::Following`]. [`Request::Release`] ends it.
    Follow(Follow),
    /// Asks how many layers of followed chunks are in place; answered by [`Response::InPlace`] when the number exceeds the
    /// asker's, or the wait is over.
    AskInPlace(AskInPlace),
    /// Names the trace of the next request; the frame bears the number of that request. No answer. Without this message, the node
    /// chooses whether it traces a request.
    Trace(TraceContext),
    /// Registers GPU memory for copies by the node; answered by [`Response::TensorsRegistered`].
    RegisterTensors(RegisterTensors),
    /// Loads leased chunks into pages; answered by [`Response::Copying`] or [`Response::Busy`].
    LoadPages(LoadPages),
    /// Saves pages as reserved chunks; answered by [`Response::Copying`] or [`Response::Busy`].
    SavePages(SavePages),
    /// Asks for the progress of a copy; answered by [`Response::CopyProgress`].
    AskCopy(AskCopy),
    /// Forgets a copy: nobody will ask for its progress. A copy that has not begun is given up. No answer.
    ///
    /// Names the copy.
    ForgetCopy(u64),
    /// Reports that a chunk has other bytes than were committed under its name; answered by [`Response::Checked`] when the node
    /// has verified the chunk itself, or [`Response::Busy`] if this session reports too much.
    ReportDamage(ReportDamage),
    /// Gives the engine's name of the next request, in at most [`MAX_NAME_BYTES`](crate::limits::MAX_NAME_BYTES) bytes; the frame
    /// bears the number of that request. No answer. Operators find a lookup by this name.
    Name(String),
    /// Describes chunks by their tokens, for the node's events. No answer.
    Describe(Describe),
    /// Says that the session asks for an operator, and not for an engine: the node counts and logs none of its later lookups. No
    /// answer.
    Observe,
}

impl Request {
    /// The request's name in metrics and traces.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.into()
    }
}

/// Opens a session.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The client's version of the session protocol: [`crate::limits::SESSION_VERSION`].
    pub version: u16,
    /// Name and version of the client, for logs.
    pub client: String,
    /// Number of the GPU actor to talk to; if `None`, the actor with the fewest sessions.
    pub device: Option<u16>,
    /// Requested bytes of write window; 0 for sessions that never write. The node may give less.
    pub window_bytes: u64,
}

/// Registers a namespace for the session.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Register {
    /// The namespace. The socket determines the tenant.
    pub spec: NamespaceSpec,
    /// The slices that this session reads and writes.
    pub slices: Vec<u16>,
    /// Bytes of one block of each pool in the engine's own tensors; refused if the namespace says otherwise.
    pub block_bytes: Vec<u64>,
}

/// Asks how much of a prompt is here.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Lookup {
    /// Number of the namespace, from [`Registered`].
    pub namespace: u32,
    /// The prompt's full chunks.
    pub chain: Chain,
    /// Tokens of the whole prompt: the answer leaves at least one token to compute.
    pub prompt_tokens: u64,
    /// Whether the caller cannot use a hit (prompt log-probabilities, pooling). If so, the answer is zero, and the lookup is
    /// counted separately.
    pub skip_read: bool,
    /// Whether the request was preempted before. If so, the lookup is counted separately.
    pub preempted: bool,
    /// Tiers to look in; all tiers if empty.
    pub tiers: Vec<Tier>,
    /// Duration of a pin for the found chunks; `None` for no pin.
    pub pin_ms: Option<u64>,
    /// Tokens that the engine computes in a second. With this number, a prefetch leaves out chunks that are computed sooner than
    /// they come, and the node counts the seconds of prefill that a hit saves.
    pub prefill_tokens_per_second: Option<f64>,
}

/// Ends a prefetch.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collect {
    /// The ticket.
    pub ticket: u64,
    /// How long to wait.
    pub wait: Wait,
}

/// How long an engine waits for a prefetch.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Does not wait: takes the chunks that are in place now, and stops the others.
    BestEffort,
    /// Waits until all chunks have come, or failed to come.
    Complete,
    /// Waits for all chunks, but no longer than this many milliseconds.
    TimeoutMs(u64),
}

/// Asks for room for chunks.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Reserve {
    /// Number of the namespace.
    pub namespace: u32,
    /// The chunks to write.
    pub chain: Chain,
    /// Chunks of a higher priority stay longer under the `priority` policy; 0 for ordinary traffic.
    pub priority: i8,
    /// The pools that will be written, by position in the chain; all pools of all chunks if empty. Pools that every chunk has are
    /// always written, named or not. A pool that a chunk lacks may be added later.
    pub pools: Vec<PoolSet>,
    /// Number of the attempt at a hand-over; 0 for ordinary writing. Reservations of earlier attempts at these chunks end.
    pub attempt: u64,
}

/// Hands over the blocks of chunks.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The reservation.
    pub reservation: u64,
    /// Positions (in the reserved chain) of the chunks that are complete.
    pub chunks: Vec<u32>,
    /// Offsets of the blocks in the write window: for each chunk, for each slice of the session, for each pool to be written,
    /// except blocks whose layers were handed over before. Empty if the node trusts its engines: then the engine has written to
    /// the places of [`Reserved`].
    pub sources: Vec<u64>,
}

/// Asks to read.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Number of the namespace.
    pub namespace: u32,
    /// The chunks to read, usually the chunks that a lookup found.
    pub chain: Chain,
}

/// Says that a chunk has other bytes than were committed under its name.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportDamage {
    /// Number of the namespace.
    pub namespace: u32,
    /// The chunk.
    pub hash: ChunkHash,
}

/// Keeps chunks from eviction.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Number of the namespace.
    pub namespace: u32,
    /// The chunks to keep.
    pub chain: Chain,
    /// The pin's duration; the node may grant less.
    pub duration_ms: u64,
}

/// An answer of the node.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Response {
    /// The session is open.
    Welcome(Welcome),
    /// The namespace is known.
    Registered(Registered),
    /// The cached part of the prompt.
    Found(Found),
    /// There is room.
    Reserved(Reserved),
    /// The blocks of this many chunks are kept. Other sessions of the namespace see a chunk once all its slices are kept.
    Committed(u32),
    /// The reservation is gone.
    Aborted,
    /// The blocks may be read until the lease is released.
    Leased(Leased),
    /// The chunks stay.
    Pinned(Pinned),
    /// The pin is gone.
    Unpinned,
    /// The found chunks are on their way.
    Prefetching(Prefetching),
    /// The progress of the prefetch.
    Progress(Progress),
    /// The layers are in place: followers of these chunks may read them.
    HandedOver,
    /// The chunks are followed, under this number.
    Following(u64),
    /// How many layers of followed chunks are in place.
    InPlace(InPlace),
    /// No room or too much in flight; nothing was done. Not an error: ask again later.
    Busy(Busy),
    /// The request was refused; nothing was done.
    Refused(Refusal),
    /// The tensors are known.
    TensorsRegistered(TensorsRegistered),
    /// A copy has begun, under this number: ask for its progress until it has ended, or forget it.
    Copying(u64),
    /// The progress of a copy.
    CopyProgress(CopyProgress),
    /// The chunk was verified, or there is none to verify.
    Checked(Checked),
}

/// The session is open. If there is a window, one descriptor comes with the message: the window's memory.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The node's session protocol version.
    pub version: u16,
    /// The node's name.
    pub node: String,
    /// The tenant that this socket serves.
    pub tenant: String,
    /// Number of the GPU actor that serves the session.
    pub device: u16,
    /// Bytes of the write window; 0 if there is none.
    pub window_bytes: u64,
    /// Whether the engine writes straight into the arena. If so, the engine maps the arena writable.
    pub trusted: bool,
}

/// The namespace is known.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    /// The namespace's number in this session.
    pub namespace: u32,
    /// The namespace's fingerprint, tenant included.
    pub fingerprint: Fingerprint,
    /// The parent of every first chunk.
    pub root: ChunkHash,
}

/// The cached part of a prompt.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Tokens of the contiguous prefix that can be used, counted from the chain's first chunk.
    pub tokens: u64,
    /// The found chunks, ascending, with one span for each stretch in one tier. In a linked namespace the spans follow one
    /// another without a gap from the chain's first chunk; in a flat namespace they are all found runs of keys.
    pub spans: Vec<Span>,
    /// The pin, if one was asked for and something was found.
    pub pin: Option<u64>,
}

/// A prefetch has begun.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Prefetching {
    /// The ticket, to collect or cancel. 0 if there is nothing to bring.
    pub ticket: u64,
    /// The result of the lookup.
    pub found: Found,
    /// Tokens that the ticket covers: all found tokens, or only those for which there is room and loading is faster than
    /// computing.
    pub tokens: u64,
    /// Found tokens that are not brought because computing them is faster.
    pub tokens_to_recompute: u64,
}

/// The progress of a prefetch.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens of contiguous prefix that are in place.
    pub tokens_in_place: u64,
    /// Tokens that will be in place, if nothing fails.
    pub tokens_expected: u64,
    /// Whether all chunks have come or failed.
    pub is_done: bool,
}

/// A run of chunks in one tier.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Position of the first chunk.
    pub from: u32,
    /// Position after the last chunk.
    pub to: u32,
    /// The chunks' tier.
    pub tier: Tier,
}

/// A class of places in one node.
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
pub enum Tier {
    /// GPU memory that the node owns, for loads by the device lane. The host arena has the same chunks.
    Device,
    /// The host arena.
    Host,
    /// The node's disk: a lease reads the chunk into the arena first.
    Disk,
    /// Another node: a lease brings the chunk here first.
    Peer,
    /// The object store that all nodes share: a lease brings the chunk here first.
    Object,
}

impl Tier {
    /// The tier's name in metrics, commands and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// There is room.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// The reservation, to commit or abort. 0 if there is nothing to write. The reservation ends once all its chunks are
    /// committed.
    pub reservation: u64,
    /// Positions (in the chain, ascending) of the chunks to write; the others are here already or are being written.
    pub chunks: Vec<u32>,
    /// For each of these chunks, the pools to write; all pools of all chunks if empty.
    pub pools: Vec<PoolSet>,
    /// The place for each block, in the order of [`Commit::sources`], if the node trusts its engines; otherwise empty.
    pub places: Vec<Place>,
    /// Milliseconds from this answer until the right to commit ends.
    pub deadline_ms: u64,
    /// Extents that the session sees for the first time; their descriptors come with the message, in this order.
    pub extents: Vec<Extent>,
}

/// The node's verdict on a reported chunk.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Checked {
    /// The chunk's bytes were wrong: the node has dropped the chunk.
    Damaged,
    /// The chunk's bytes equal the bytes committed under its name.
    Right,
    /// The chunk is not in the node's memory, or is being verified for somebody else already.
    Nothing,
}

/// Chunks stay.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// The pin; 0 if nothing is pinned.
    pub pin: u64,
    /// Chunks pinned, from the chain's first on.
    pub chunks: u32,
    /// The granted duration.
    pub duration_ms: u64,
}

/// No room or too much in flight.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// The exhausted resource.
    pub what: Scarce,
    /// The time after which asking again may help.
    pub retry_after_ms: u64,
}

/// The exhausted resource.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Scarce {
    /// No slot is free and nothing may be evicted now.
    Memory,
    /// The session or its tenant has reached its limit of leases, pins or reservations.
    Claims,
    /// The tenant has reached its limit of sessions.
    Sessions,
    /// The GPU, or this session at it, has reached its limit of copies.
    Copies,
}

impl Scarce {
    /// The name in errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Why a request was refused.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The class of the reason, for programs.
    pub code: RefusalCode,
    /// The fault and its remedy, for people.
    pub message: String,
}

/// The class of a refusal.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum RefusalCode {
    /// The other side speaks another protocol version.
    Version,
    /// The frame or message is malformed, or comes out of order. The node closes the session.
    Protocol,
    /// The namespace is impossible, or disagrees with the engine's own sizes.
    Namespace,
    /// The chain is impossible, or contradicts cached chunks.
    Chain,
    /// A number names nothing of this session (namespace, lease, reservation, pin, device), or names something that has ended.
    Unknown,
    /// A place is outside the write window, or a list has the wrong length.
    Place,
    /// The request can never be met on this node: a block larger than the window or an extent.
    TooLarge,
    /// The node is stopping.
    Stopping,
    /// The node failed through its own fault; its log says more.
    Internal,
    /// The GPU's memory cannot be shared with the node, or there is no GPU that the node could use.
    Device,
}

impl RefusalCode {
    /// The name in errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Encodes a request at the end of `out`.
///
/// # Panics
/// Never for messages within the limits: encoding them cannot fail.
pub fn encode_request(request: &Request, out: AlignedVec) -> AlignedVec {
    rkyv::api::high::to_bytes_in::<_, rancor::Error>(request, out).expect("a request can always be encoded")
}

/// Encodes a response at the end of `out`.
///
/// # Panics
/// Never for messages within the limits: encoding them cannot fail.
pub fn encode_response(response: &Response, out: AlignedVec) -> AlignedVec {
    rkyv::api::high::to_bytes_in::<_, rancor::Error>(response, out).expect("a response can always be encoded")
}

/// Checks and reads a request. `bytes` must start at a multiple of 16.
///
/// # Errors
/// Fails if the bytes are not a request.
pub fn decode_request(bytes: &[u8]) -> Result<Request, MalformedMessage> {
    rkyv::from_bytes::<Request, rancor::Failure>(bytes).map_err(|_| MalformedMessage)
}

/// Checks and reads a response. `bytes` must start at a multiple of 16.
///
/// # Errors
/// Fails if the bytes are not a response.
pub fn decode_response(bytes: &[u8]) -> Result<Response, MalformedMessage> {
    rkyv::from_bytes::<Response, rancor::Failure>(bytes).map_err(|_| MalformedMessage)
}
