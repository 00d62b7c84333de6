//! The messages that an actor takes, and its answers.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use larder_core::lookups::{LookupFilter, LookupRecord, Origin, OutcomeRun};
use larder_core::store::ids::{ProcessId, SessionId, TenantId};
use larder_core::store::policy::PolicyName;
use larder_core::store::{
    NamespaceFacts, OtherNamespace, PinFacts, PurgedKeys, PurgedPage, RememberedEvictions, SessionFacts,
    Stay, StoreLimits, Usage,
};
use larder_core::what_if::PastLookup;
use larder_core::{DrainOrder, DrainProgress};
use larder_net::trace::Trace;
use larder_protocol::purge::{PurgeMode, PurgeScope};
use larder_protocol::session::{Request, Response};
use larder_protocol::table::Holder;
use larder_protocol::{ChunkHash, Fingerprint};
use tokio::sync::mpsc;

use super::purge::OnDisk;
use crate::disk::DiskPurge;
use crate::metrics::TenantRates;
use crate::window::Window;

/// Opens a session. Its process belongs to the tenant.
#[derive(Message)]
#[rtype(result = "SessionId")]
pub struct Open {
    /// The tenant, from the socket.
    pub tenant: TenantId,
    /// The process behind the session.
    pub process: ProcessId,
    /// Its write window, if it has one.
    pub window: Option<Arc<Window>>,
    /// The engine that asks for it.
    pub client: Client,
}

/// The engine behind a session, for people.
#[derive(Debug, Clone, Default)]
pub struct Client {
    /// The name that it gave itself.
    pub name: String,
    /// Its process, if the system tells.
    pub pid: Option<u32>,
}

/// A session's request. It is taken when this message is answered; the request's own answer comes by [`Ask::reply_to`].
#[derive(Message)]
#[rtype(result = "()")]
pub struct Ask {
    /// The asking session.
    pub session: SessionId,
    /// The request.
    pub request: Request,
    /// The memory that comes along.
    pub descriptors: Vec<OwnedFd>,
    /// The channel for the answer.
    pub reply_to: ReplyTo,
    /// The trace of the request.
    pub trace: Trace,
    /// The engine's name of the request.
    pub origin: Origin,
}

/// The channel for all of a session's answers, in the order in which the actor makes them: an answer may speak of memory that
/// an earlier one brought. It holds at most one answer per unanswered request, and the session bounds those.
#[derive(Debug, Clone)]
pub struct ReplyTo {
    /// Number of the request.
    pub number: u64,
    /// The answers of the session.
    pub answers: mpsc::UnboundedSender<(u64, Answer)>,
}

/// An answer to a session, with its descriptors. `None` if a request has no answer.
#[derive(Debug)]
pub struct Answer {
    /// The message.
    pub response: Option<Response>,
    /// The memory that it speaks of for the first time.
    pub descriptors: Vec<OwnedFd>,
}

/// A session ended.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Close {
    /// The session.
    pub session: SessionId,
}

/// A process is known to be gone.
#[derive(Message, Clone, Copy)]
#[rtype(result = "()")]
pub struct ProcessGone {
    /// The process.
    pub process: ProcessId,
}

/// Asks for the store's contents, and updates the gauges.
#[derive(Message)]
#[rtype(result = "ActorReport")]
pub struct AskReport;

/// Asks an actor for the namespaces that it knows.
#[derive(Debug, Message)]
#[rtype(result = "Vec<NamespaceFacts>")]
pub struct AskNamespaces;

/// Has an actor work within these limits from now on, as far as they can change.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct LimitsAre(pub StoreLimits);

/// These tenants are served from now on, by number, with the bytes of extents that each may hold.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct TenantsAre(pub Vec<(String, u64)>);

/// Asks for the names of the chunks of a purge.
#[derive(Debug, Clone, Message)]
#[rtype(result = "PurgedKeys")]
pub struct AskPurged(pub PurgeScope);

/// Begins a purge of this number.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct BeginPurge(pub u64, pub PurgeScope);

/// Has an actor remove or count some chunks of a purge. Answered with these, and the writes of its chunks that are under way;
/// `None` after a fault.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Option<(PurgedPage, u64)>")]
pub struct PurgePage {
    /// The purge.
    pub purge: u64,
    /// Its chunks.
    pub scope: PurgeScope,
    /// Whether they are removed.
    pub mode: PurgeMode,
    /// Where the page begins.
    pub from: usize,
}

/// Purges a segment of the actor's disk, the one behind a position; `None` if there is no disk.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Option<OnDisk>")]
pub(crate) struct PurgeDisk(pub(crate) DiskPurge, pub(crate) u64);

/// Ends the purge of this number.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct EndPurge(pub u64);

/// Has an actor drain by this order, or drain no more.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Drain(pub Option<DrainOrder>);

/// The actors of other nodes that may keep chunks of an actor that drains.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct TakersAre(pub Vec<Holder>);

/// Asks how far an actor's drain is; `None` if there is none.
#[derive(Debug, Message)]
#[rtype(result = "Option<DrainProgress>")]
pub struct AskDrain;

/// Asks an actor for the holdings of its sessions and pins.
#[derive(Debug, Message)]
#[rtype(result = "Holdings")]
pub struct AskHoldings;

/// Asks an actor for the lookups that can be played again.
#[derive(Debug, Message)]
#[rtype(result = "PastSeen")]
pub struct AskPast;

/// The recent lookups of an actor.
#[derive(Debug, Clone, MessageResponse)]
pub struct PastSeen {
    /// Its last whole lookups, the oldest first.
    pub lookups: Vec<PastLookup>,
    /// Bytes of its disk tier; 0 if it has none, or it is closed.
    pub disk_bytes: u64,
}

/// Asks an actor for its last lookups.
#[derive(Debug, Clone, Message)]
#[rtype(result = "LookupsSeen")]
pub struct AskLookups(pub LookupFilter);

/// An actor's last lookups.
#[derive(Debug, Clone, MessageResponse)]
pub struct LookupsSeen {
    /// Each lookup, and the namespaces that resemble its own if one of its chunks was nowhere.
    pub records: Vec<(LookupRecord, Vec<OtherNamespace>)>,
    /// The last evictions.
    pub evictions: RememberedEvictions,
}

/// Asks an actor which chunks of a prompt it has.
#[derive(Debug, Clone, Message)]
#[rtype(result = "ChainSeen")]
pub struct AskChain {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The prompt's chunks.
    pub hashes: Vec<ChunkHash>,
}

/// The chunks of a prompt that an actor has.
#[derive(Debug, Clone, MessageResponse)]
pub struct ChainSeen {
    /// The outcome of each chunk; `None` for a namespace that the actor does not know.
    pub outcomes: Option<Vec<OutcomeRun>>,
    /// The namespaces that resemble this one, if a chunk is missing.
    pub others: Vec<OtherNamespace>,
    /// The keepers of the chunks in memory.
    pub stays: Vec<Stay>,
    /// For how long nobody had used the chunks that were evicted lately.
    pub evicted_after_ms: Option<u64>,
    /// The last evictions.
    pub evictions: RememberedEvictions,
}

/// An open session.
#[derive(Debug, Clone)]
pub struct SessionSeen {
    /// Its holdings.
    pub facts: SessionFacts,
    /// The engine behind it.
    pub client: Client,
    /// The namespaces that it registered.
    pub namespaces: Vec<Fingerprint>,
    /// Its last request, and the time since then.
    pub last: Option<(&'static str, Duration)>,
}

/// The holdings of sessions, pins and tenants in an actor.
#[derive(Debug, Clone, MessageResponse)]
pub struct Holdings {
    /// Every open session.
    pub sessions: Vec<SessionSeen>,
    /// Every pin.
    pub pins: Vec<PinFacts>,
    /// Bytes of extents that each tenant holds and may hold, by number.
    pub tenants: Vec<(u64, u64)>,
}

/// The contents of an actor.
#[derive(Debug, Clone, MessageResponse)]
pub struct ActorReport {
    /// In numbers.
    pub usage: Usage,
    /// The policy in force.
    pub policy: PolicyName,
    /// Prompt tokens of all lookups whose caller could use a hit.
    pub tokens_asked: u64,
    /// Prompt tokens that they found.
    pub tokens_hit: u64,
    /// Each tenant's recent hit rates.
    pub tenants: Vec<TenantRates>,
    /// Bytes of its disk tier that chunks have taken, and all of them; `None` if it has none, or it is closed.
    pub disk_fill: Option<(u64, u64)>,
    /// The reason why its disk tier is closed, if it is.
    pub disk_trouble: Option<String>,
}
