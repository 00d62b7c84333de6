//! Brings the chunks that a request wants and memory does not have.
//!
//! A lookup, lease or prefetch begins in `gather`. `locate` looks for missing chunks: it asks other actors of this node, then the
//! directory, then the object store. Each is asked for the chunks that the earlier ones do not have. For a lease or prefetch, the
//! store then takes slots, and each chunk is fetched from its place: from disk or object store (`tiers`), or from other actors in
//! orders of some MiB (`fetch`). A chunk is fetched once, however many requests wait for it. If one place fails, the next place
//! that may have the chunk is asked. A gather ends when each of its chunks has come or failed, or when its time is up. Its result
//! is a lease of the prefix that is here. A prefetch (`prefetch`) is a gather that nobody waits for yet.
//!
//! No question blocks the actor. Each has a deadline; a chunk that nobody has reported by then counts as absent. A directory row
//! does not say which pools a holder has besides the `all` pools. A lookup counts on none of these other pools. A lease or
//! prefetch asks for all of them, and ends where the received state can be restored.

mod fetch;
mod forward;
mod gather;
mod handoff;
mod locate;
mod note;
pub(crate) mod prefetch;
mod recall;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::chain::Chain;
use larder_protocol::table::Holder;

use self::locate::Located;
use crate::cause::Cause;
use crate::directory::cache::Cache;
use crate::event::{Below, OrderNumber, QuestionId, ReadId, RequestId};
use crate::loading::Meter;
use crate::placement::Gaps;
use crate::store::FetchId;
use crate::store::ids::{ChunkKey, SessionId};
use crate::tiers::presence::{Lifetimes, PresenceCache};
use crate::tiers::{Read, Reads};

pub(crate) use fetch::Fetch;
pub use recall::Offer;

/// The sources from which an actor may get chunks, and how long a lease waits for each. An absent source is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sources {
    /// Other actors of this node.
    pub siblings: Option<Duration>,
    /// Other nodes.
    pub peers: Option<Duration>,
    /// The actor's disk.
    pub disk: Option<Duration>,
    /// The object store.
    pub object: Option<Duration>,
    /// Limit of chunks for which the actor remembers whether the object store has them: about 100 bytes each.
    pub known_chunks: usize,
}

/// Chunks on their way, and the gathers that wait for them.
#[derive(Debug)]
pub(crate) struct Bring {
    pub(crate) sources: Sources,
    /// Whether the object store may be read, as the shell says.
    pub(crate) object_is_open: bool,
    pub(crate) fetches: HashMap<FetchId, Fetch>,
    orders: HashMap<OrderNumber, fetch::OrderUnderWay>,
    questions: HashMap<QuestionId, locate::ChunkSearch>,
    /// Gathers of sessions: leases that wait, and prefetches.
    waiting: HashMap<u64, Waiting>,
    /// Gathers that found no room beside other chunks on their way, in the order in which they try again.
    crowded_out: VecDeque<u64>,
    /// Whether chunks on their way have ended since these gathers tried.
    has_left_room: bool,
    pub(crate) reads: HashMap<ReadId, Read>,
    disk: Option<Reads>,
    object: Option<Reads>,
    /// The object store's recent answers, so that a lookup and its lease ask once.
    pub(crate) known: PresenceCache<ChunkKey>,
    /// The directory's recent answers to lookups, for the leases that follow.
    heard_of: Cache,
    meters: HashMap<Holder, Meter>,
    /// How often this actor reads chunks of others.
    gaps: Gaps,
    /// Number of loads of chunks with several holders so far.
    turn: usize,
    followers: handoff::Followers,
    /// Peers that wait for chunks from disk.
    recalls: HashMap<FetchId, Vec<recall::Recalled>>,
    /// The times at which chunks are ordered again because their holder was busy.
    retries: BTreeMap<(Duration, u64), Vec<FetchId>>,
    last_number: u64,
}

/// A request that waits for a gather.
#[derive(Debug)]
struct Waiting {
    session: SessionId,
    /// The request to answer when the gather ends; `None` for a prefetch that is not collected yet.
    request: Option<RequestId>,
    cause: Cause,
    until: Duration,
    /// The request's number in the log of lookups.
    lookup: u64,
    /// The rest of the chain, if it found no room yet.
    rest: Option<Arc<Rest>>,
}

/// The chain of a gather that is brought in parts, and the places of its chunks.
#[derive(Debug)]
struct Rest {
    namespace: u32,
    chain: Chain,
    located: Located,
}

impl Bring {
    pub(crate) fn new(sources: Sources) -> Self {
        Self {
            object_is_open: true,
            fetches: HashMap::new(),
            orders: HashMap::new(),
            questions: HashMap::new(),
            waiting: HashMap::new(),
            crowded_out: VecDeque::new(),
            has_left_room: false,
            reads: HashMap::new(),
            disk: sources.disk.map(|_| Reads::new(Below::Disk)),
            object: sources.object.map(|_| Reads::new(Below::Object)),
            known: PresenceCache::new(sources.known_chunks, LIFETIMES),
            heard_of: Cache::default(),
            meters: HashMap::new(),
            gaps: Gaps::default(),
            turn: 0,
            followers: handoff::Followers::default(),
            recalls: HashMap::new(),
            retries: BTreeMap::new(),
            last_number: 0,
            sources,
        }
    }

    /// Forgets all that is under way. Numbers go on, so that late answers mean nothing.
    pub(crate) fn begin_anew(&mut self) {
        let known = std::mem::replace(&mut self.known, PresenceCache::new(0, LIFETIMES));
        *self = Self { last_number: self.last_number, known, ..Self::new(self.sources) };
    }

    pub(crate) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(crate) fn reads_of(&mut self, tier: Below) -> Option<&mut Reads> {
        match tier {
            Below::Disk => self.disk.as_mut(),
            Below::Object => self.object.as_mut(),
        }
    }

    /// The time of the next task that does not wait for a tick.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.retries.first_key_value().map(|(&(at, _), _)| at)
    }

    /// How long a lease waits for other actors.
    fn others_deadline(&self) -> Duration {
        self.sources.peers.or(self.sources.siblings).unwrap_or_default()
    }

    /// The longest wait of a lease.
    fn load_deadline(&self) -> Duration {
        let Sources { siblings, peers, disk, object, .. } = self.sources;
        let others = (siblings.is_some() || peers.is_some()).then(|| self.others_deadline());
        [others, disk, object].into_iter().flatten().max().unwrap_or_default()
    }
}

#[cfg(test)]
impl Bring {
    /// Asserts that nothing is kept for requests that have ended.
    pub(crate) fn assert_is_at_rest(&self) {
        let Self { fetches, orders, questions, waiting, crowded_out, recalls, retries, .. } = self;
        assert!(fetches.is_empty() && orders.is_empty() && questions.is_empty(), "{self:?}");
        assert!(waiting.is_empty() && crowded_out.is_empty(), "{self:?}");
        assert!(recalls.is_empty() && retries.is_empty(), "{self:?}");
        // A drive that does not answer may keep a read for ever.
        if self.reads.is_empty() {
            let lines = [&self.disk, &self.object].into_iter().flatten();
            assert!(lines.map(|reads| reads.line.bytes_under_way()).all(|bytes| bytes == 0), "{self:?}");
        }
    }
}

/// How long an actor trusts its memory of the object store. A present object counts as present until a read fails, for a minute
/// at most. An absent object counts as absent for as long as one request's lookup, prefetch and lease take. Damage is believed for
/// a minute, since the tier itself remembers it.
const LIFETIMES: Lifetimes = Lifetimes {
    present: Duration::from_secs(60),
    absent: Duration::from_secs(1),
    damaged: Duration::from_secs(60),
};
