//! The shell of the directory ([`larder_core::directory`]): a mailbox on the peer thread.

mod actor;
pub(crate) mod metrics;

use actix::Message;
use larder_core::directory::{Changes, Holders};
use larder_core::store::ids::TenantId;
use larder_net::trace::Trace;
use larder_protocol::table::Holder;
use larder_protocol::{ChunkRef, Fingerprint};

pub use actor::{DirectoryActor, DirectoryLimits};
pub use metrics::DirectoryMetrics;

/// Asks which other nodes hold chunks. The answer has one item for each chunk, in the order of the chunks, and never names this
/// node. A chunk has no holder in the answer if its holders cannot be found soon.
#[derive(Message, Debug)]
#[rtype(result = "FoundHolders")]
pub struct AskHolders {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The namespace's tenant.
    pub tenant: TenantId,
    /// The chunks.
    pub chunks: Vec<ChunkRef>,
    /// The question's span.
    pub trace: Trace,
}

/// The holders of chunks in other nodes.
#[derive(Debug, Default)]
pub struct FoundHolders {
    /// Holders, one item for each chunk.
    pub holders: Vec<Holders>,
    /// Positions of the chunks whose homes did not answer.
    pub unanswered: Vec<u32>,
}

/// Announces an actor's gained and lost chunks.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Changed {
    /// The actor.
    pub device: u16,
    /// The changes, in order.
    pub changes: Changes,
}

/// Reports a holder whose rows are wrong.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Stale {
    /// The holder.
    pub holder: Holder,
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunks that it does not have.
    pub chunks: Vec<ChunkRef>,
}

#[cfg(test)]
pub(crate) mod tests;
