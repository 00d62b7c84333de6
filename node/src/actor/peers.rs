//! What an actor does for others than its sessions: it tells what it holds, sends what peers ask for, gives up what
//! moved.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use larder_core::Offer;
use larder_core::directory::Changes;
use larder_core::store::Change;
use larder_core::store::Granted;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::{oneshot, watch};

use super::GpuActor;
use super::traces::cause_of;
use crate::arena::Arena;
use crate::directory::{AskHolders, Changed, Stale};
use crate::events::{AskPage, PAGE_CHUNKS, Page};
use crate::exchange::{
    AskBlocks, FetchOrder, Fetched, FollowOrder, GiveUp, Grant, GrantedBlock, GrantedChunk, PeerLease,
};

/// How an actor reaches other nodes.
pub struct Peers {
    /// The actor's number.
    pub device: u16,
    /// Says who has what.
    pub holders: Recipient<AskHolders>,
    /// Hears what this actor gained and lost.
    pub changed: Recipient<Changed>,
    /// How often the directory began again: each time it wants to hear all that is held.
    pub restarts: watch::Receiver<u64>,
    /// Hears who did not have what it should.
    pub stale: Recipient<Stale>,
    /// Fetches.
    pub fetch: Fetcher,
    /// Follows what is being written.
    pub follow: Follower,
    /// What this node is called.
    pub node: String,
    /// How long a lease waits for other nodes.
    pub deadline: Duration,
}

/// Hands an order to the exchange; it comes back where the exchange has too many.
pub type Fetcher = Box<dyn Fn(FetchOrder) -> Result<oneshot::Receiver<Vec<Fetched>>, FetchOrder> + Send>;

/// Hands a follow to the exchange; whether it was taken, which it is not where the exchange has too many.
pub type Follower = Box<dyn Fn(FollowOrder) -> bool + Send>;

/// What the directory was not told yet.
#[derive(Default)]
pub(super) struct Untold {
    changes: Vec<Change>,
    /// How many of them the followers of events were told.
    told_followers: usize,
    /// Number of the next event.
    sequence: u64,
    /// What has still to be told of all that is held, where changes were lost.
    resync: Option<Resync>,
    is_scheduled: bool,
}

impl Untold {
    /// Everything that was told is lost; numbers go on.
    pub(super) fn begin_anew(&mut self) {
        let (sequence, resync) = (self.sequence, Some(Resync::default()));
        *self = Self { sequence, resync, ..Self::default() };
    }
}

/// How far the directory was told all that is held.
#[derive(Clone, Copy, Default)]
struct Resync {
    /// Where in the store the next page begins.
    from: usize,
    /// Whether a page was told.
    has_begun: bool,
}

/// Leases of peers that have ended.
pub(super) struct EndedGrants {
    pub(super) sender: UnboundedSender<u64>,
    pub(super) receiver: Option<UnboundedReceiver<u64>>,
}

impl GpuActor {
    /// What follows whatever was asked: what is to be written goes to disk and the object store, and others hear of what changed.
    pub(super) fn follow_up(&mut self, ctx: &mut Context<Self>) {
        self.write_to_disk(ctx);
        self.write_to_objects(ctx);
        self.tell_changes(ctx);
        self.tell_followers();
    }

    /// Sees to it that others hear soon of what was gained and lost: a few milliseconds make one message of many.
    fn tell_changes(&mut self, ctx: &mut Context<Self>) {
        let changes = self.core.store.take_changes();
        if let Some(siblings) = &self.siblings {
            siblings.note(&changes);
        }
        self.untold.changes.extend(changes);
        if let Some(peers) = &mut self.peers
            && peers.restarts.has_changed().unwrap_or(false)
        {
            // The directory began again, and knows nothing.
            peers.restarts.mark_unchanged();
            self.untold.resync = Some(Resync::default());
        }
        if !self.untold.is_scheduled && (self.untold.resync.is_some() || !self.untold.changes.is_empty()) {
            self.untold.is_scheduled = true;
            self.later(ctx, TELL_AFTER, |actor, ctx| {
                actor.untold.is_scheduled = false;
                actor.tell_now();
                actor.tell_changes(ctx);
            });
        }
    }

    fn tell_now(&mut self) {
        let Untold { changes, told_followers, sequence, .. } = &mut self.untold;
        let news = &changes[*told_followers..];
        self.feed.tell(*sequence, news);
        *sequence += news.len() as u64;
        *told_followers = changes.len();
        if self.peers.is_none() {
            (*changes, *told_followers) = (Vec::new(), 0);
            return;
        };
        if self.tell_since() {
            self.tell_page();
        }
    }

    /// Tells the directory what changed; whether it took that.
    fn tell_since(&mut self) -> bool {
        let (Some(peers), Untold { changes, told_followers, resync, .. }) = (&self.peers, &mut self.untold)
        else {
            return false;
        };
        if changes.len() > MAX_UNTOLD_CHANGES {
            (*changes, *told_followers, *resync) = (Vec::new(), 0, Some(Resync::default()));
        }
        // Before the first page nothing of it counts.
        if resync.is_some_and(|resync| !resync.has_begun) {
            (*changes, *told_followers) = (Vec::new(), 0);
        }
        if changes.is_empty() {
            return true;
        }
        let since = Changes::Since(std::mem::take(changes));
        *told_followers = 0;
        match peers.changed.try_send(Changed { device: peers.device, changes: since }) {
            Ok(()) => true,
            Err(SendError::Full(Changed { changes: Changes::Since(untold), .. })) => {
                *told_followers = untold.len();
                *changes = untold;
                false
            }
            Err(_) => {
                *resync = Some(Resync::default());
                false
            }
        }
    }

    /// Tells the directory the next page of all that is held, where that is wanted. It may change until the next one.
    fn tell_page(&mut self) {
        let (Some(peers), Some(resync)) = (&self.peers, &mut self.untold.resync) else { return };
        let (chunks, next) = self.core.store.held_from(resync.from, RESYNC_CHUNKS);
        let page =
            larder_core::directory::Page { is_first: !resync.has_begun, chunks, is_last: next.is_none() };
        if peers.changed.try_send(Changed { device: peers.device, changes: Changes::Page(page) }).is_ok() {
            resync.has_begun = true;
            match next {
                Some(next) => resync.from = next,
                None => self.untold.resync = None,
            }
        }
    }
}

/// What a peer gets of what the store keeps for it, with the lease that ends that.
pub(super) fn show_grant(granted: Granted, arena: &Arena, ended: &UnboundedSender<u64>) -> Grant {
    match granted {
        Granted::Held { grant, reads, is_on_disk, pools, blocks } => {
            let blocks = blocks.into_iter().map(|block| GrantedBlock {
                memory: Arc::clone(arena.extent(block.place.extent)),
                offset: block.place.offset,
                bytes: block.bytes,
                checksum: block.checksum,
            });
            let lease = Arc::new(PeerLease { number: grant, ended: ended.clone() });
            Grant::Held(GrantedChunk { reads, is_on_disk, pools, blocks: blocks.collect(), lease })
        }
        Granted::NotHeld | Granted::OnDisk => Grant::NotHeld,
        Granted::Busy => Grant::Busy { retry_after_ms: GRANT_RETRY_MS },
    }
}

impl GpuActor {
    /// Gives chunks up, and tries those again that are still in use: whoever took them may not have let go yet.
    fn give_up(&mut self, GiveUp { fingerprint, hashes }: GiveUp, tries: u32, ctx: &mut Context<Self>) {
        let used = self.core.store.give_up(&fingerprint, &hashes);
        self.settle(ctx);
        if !used.is_empty() && tries > 1 {
            let again = GiveUp { fingerprint, hashes: used };
            self.later(ctx, GIVE_UP_PAUSE, move |actor, ctx| actor.give_up(again, tries - 1, ctx));
        }
    }
}

impl Handler<AskBlocks> for GpuActor {
    type Result = Response<Vec<Grant>>;

    fn handle(&mut self, ask: AskBlocks, ctx: &mut Self::Context) -> Self::Result {
        let nothing = || Response::reply(Vec::new());
        self.guard(ctx, |actor, ctx| actor.grant_all(ask, ctx)).unwrap_or_else(nothing)
    }
}

impl GpuActor {
    /// Keeps chunks for a peer, those on disk included.
    fn grant_all(&mut self, ask: AskBlocks, ctx: &mut Context<Self>) -> Response<Vec<Grant>> {
        let AskBlocks { fingerprint, hashes, block_bytes, class, trace } = ask;
        let (block_bytes, cause): (Arc<[u64]>, _) = (block_bytes.into(), cause_of(&trace));
        let (mut grants, mut coming) = (Vec::with_capacity(hashes.len()), Vec::new());
        for (at, hash) in hashes.into_iter().enumerate() {
            let now = self.clock.elapsed();
            let granted = match self.core.offer(now, (fingerprint, hash), &block_bytes, class, &cause) {
                Offer::Now(granted) => granted,
                Offer::Later(recall) => {
                    let (answer, grant) = oneshot::channel();
                    self.pending.recalls.insert(recall, answer);
                    coming.push((at, grant));
                    Granted::Busy
                }
            };
            grants.push(self.show_grant(granted));
        }
        self.settle(ctx);
        if coming.is_empty() {
            return Response::reply(grants);
        }
        Response::fut(async move {
            for (at, grant) in coming {
                // An error: the actor is stopping.
                grants[at] = grant.await.unwrap_or(Grant::NotHeld);
            }
            grants
        })
    }
}

impl Handler<AskPage> for GpuActor {
    type Result = Page;

    fn handle(&mut self, ask: AskPage, ctx: &mut Self::Context) -> Page {
        let held = self.guard(ctx, |actor, _| actor.core.store.held_from(ask.from, PAGE_CHUNKS));
        let (chunks, next) = held.unwrap_or_default();
        Page { chunks, next }
    }
}

impl Handler<GiveUp> for GpuActor {
    type Result = ();

    fn handle(&mut self, moved: GiveUp, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.give_up(moved, GIVE_UP_TRIES, ctx));
    }
}

impl StreamHandler<u64> for GpuActor {
    fn handle(&mut self, grant: u64, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| {
            actor.core.store.end_grant(grant);
            actor.forget_follower(grant);
            actor.settle(ctx);
        });
    }

    /// The actor holds a sender itself: the stream ends only with the actor.
    fn finished(&mut self, _: &mut Self::Context) {}
}

/// How long changes wait for others.
const TELL_AFTER: Duration = Duration::from_millis(3);

/// Chunks of a page of all that is held: collecting them takes less than a millisecond.
const RESYNC_CHUNKS: usize = 1_024;

/// Changes kept for a directory that does not take them; beyond these it is told everything anew.
const MAX_UNTOLD_CHANGES: usize = 65_536;

/// How often a chunk that moved is tried to be given up, and the pause between. What is used for longer stays until it is
/// evicted.
const GIVE_UP_TRIES: u32 = 5;
const GIVE_UP_PAUSE: Duration = Duration::from_millis(20);

/// How long a peer waits when too much is being sent.
const GRANT_RETRY_MS: u64 = 5;
