//! The hands of an actor: they perform its core's effects.
//!
//! Hands copy and sum blocks (`copies`), get new memory (`renewals`), read and write the tiers below (`tiers`, `disk`), and ask
//! other actors of this node and of others (`peers`). They know no core: the actor gives them the facts of an effect, and tells
//! its core the answer. An answer that comes later is a future (`Ok`); an answer that is here already is an `Err`.

mod copies;
mod disk;
mod peers;
mod renewals;
mod tiers;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use larder_net::audit::Audit;
use larder_protocol::session::Extent;
use tokio::sync::mpsc::UnboundedSender;

pub use self::disk::DiskParts;
pub(crate) use self::peers::PeerFollowers;
pub use self::peers::{Fetcher, FollowStarter, Peers};
pub(crate) use self::renewals::{Renewals, Renewed};
pub use self::tiers::ObjectParts;
use crate::arena::Arena;
use crate::clock::Clock;
use crate::copy::CopyPool;
use crate::events::Feed;
use crate::lookup_log::Recorder;
use crate::metrics::ActorMetrics;
use crate::siblings::Siblings;

/// An actor's memory, threads, tiers, neighbours and logs.
pub struct Hands {
    /// The memory of the actor's chunks.
    pub arena: Arena,
    /// The copy threads.
    pub copy_pool: Arc<CopyPool>,
    /// The counters.
    pub metrics: ActorMetrics,
    /// The clock.
    pub clock: Clock,
    /// The audit log of pins.
    pub audit: Audit,
    /// The lookup log.
    pub recorder: Option<Recorder>,
    /// Other actors of this node, if there are any.
    pub siblings: Option<Siblings>,
    /// Other nodes, if there are any.
    pub peers: Option<Peers>,
    /// The feed of events.
    pub feed: Feed,
    /// The disk below the store, if there is one.
    pub disk: Option<DiskParts>,
    /// Why the disk was not opened.
    pub disk_trouble: Option<String>,
    /// The object store, if there is one.
    pub objects: Option<ObjectParts>,
    /// Extents that get new memory.
    pub(crate) renewals: Renewals,
    /// Peers that follow chunks of writers here.
    pub(crate) followers: PeerFollowers,
    /// Peers' leases report their end here.
    pub(crate) ended_grants: UnboundedSender<u64>,
}

/// Extents with their descriptors.
pub(crate) type Shown = (Vec<Extent>, Vec<OwnedFd>);

impl Hands {
    /// Begins anew with an empty store. Dropped channels tell waiting tasks that no answer comes.
    pub(crate) fn begin_anew(&mut self) {
        self.metrics.life_ended();
        self.followers.clear();
        self.feed.restart();
        _ = self.siblings.as_ref().map(Siblings::forget_all);
    }

    /// The extents that a session sees for the first time; `None` if there are not enough descriptors for all of them.
    pub(crate) fn show(&self, extents: &[u32]) -> Option<Shown> {
        let shown = extents.iter().map(|&extent| {
            let memory = self.arena.extent(extent);
            let descriptor = memory.descriptor().try_clone_to_owned()?;
            Ok((Extent { extent, bytes: memory.bytes() }, descriptor))
        });
        shown.collect::<std::io::Result<Shown>>().inspect_err(no_descriptor_left).ok()
    }
}

fn no_descriptor_left(error: &std::io::Error) {
    tracing::error!(
        %error,
        "no descriptor left to show an engine the memory of its blocks: it is asked to wait; raise the limit of open files"
    );
}
