//! Hand-overs: sessions follow chunks while an engine writes them, here or at another node.
//!
//! A session that follows asks for the progress of its chunks. The answer comes when there is news, or when the session has
//! waited long enough. A node asks the writer's node once; the writer's node then sends layers as they become ready.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use larder_protocol::handoff::{AskInPlace, Follow, InPlace, Writer};
use larder_protocol::limits::{MAX_FETCH_CHUNKS, MAX_NAME_BYTES};
use larder_protocol::peer::Class;
use larder_protocol::session::{Leased, Response};
use larder_protocol::{ChunkHash, Fingerprint, PoolSet};

use super::Fetch;
use super::fetch::OrderUnderWay;
use crate::Core;
use crate::cause::Cause;
use crate::directory::Holders;
use crate::effect::{Counted, Effect, FollowOrder};
use crate::event::{Arrival, Below, FetchFailure, LayersArrived, OrderNumber, RequestId};
use crate::placement::Placement;
use crate::store::ids::{SessionId, TenantId};
use crate::store::{
    AskedAgain, Came, ChangeKind, FetchId, FollowProgress, FollowProofs, FollowRequest, FollowStarted,
    Refused, Source, Wanted,
};

/// Sessions that wait for news, by follow. The sessions' limits of requests bound their number.
#[derive(Debug, Default)]
pub(super) struct Followers(HashMap<u64, Vec<Follower>>);

#[derive(Debug)]
struct Follower {
    request: RequestId,
    ask: AskInPlace,
    until: Duration,
}

impl Core {
    /// Starts to follow chunks, and asks for the chunks that another node's engine writes.
    pub(crate) fn follow(&mut self, request: RequestId, ask: Follow) -> Result<(), Refused> {
        let Follow { namespace, chain, writer, attempt, patience_ms } = ask;
        if let Some(bytes) = writer.as_ref().map(|writer| writer.node.len()).filter(|&it| it > MAX_NAME_BYTES)
        {
            return Err(Refused::WriterName { bytes });
        }
        let writer = writer.filter(|writer| self.is_elsewhere(writer));
        let (patience_ms, now) = (patience_ms.min(MOST_PATIENCE_MS), self.millis());
        let asked = FollowRequest { namespace, chain: &chain, writer: writer.as_ref(), attempt, patience_ms };
        let FollowStarted { follow, wanted } = self.store.follow(request.session, asked, now)?;
        self.answer(request, Response::Following(follow));
        let fingerprint = self.store.fingerprint(namespace).unwrap_or(Fingerprint([0; 32]));
        self.end_earlier_attempts(fingerprint, &chain.hashes, attempt);
        let (coming, on_disk): (Vec<Wanted>, Vec<Wanted>) =
            wanted.into_iter().partition(|wanted| wanted.from == Source::Peer);
        let on_disk = on_disk.into_iter().map(|wanted| self.fetch_followed(wanted, fingerprint, None));
        let on_disk = on_disk.collect();
        self.read_from(Below::Disk, on_disk);
        if let Some(writer) = writer {
            self.order_follows(&writer, fingerprint, (attempt, patience_ms), coming);
        }
        Ok(())
    }

    /// Whether a writer is at another node.
    fn is_elsewhere(&self, writer: &Writer) -> bool {
        self.bring.sources.peers.is_some() && writer.node != self.node
    }

    /// Gives up orders that wait for an earlier attempt at writing these chunks. An order that brings other chunks too is of
    /// another prompt, and goes on.
    fn end_earlier_attempts(&mut self, fingerprint: Fingerprint, hashes: &[ChunkHash], attempt: u64) {
        if attempt == 0 {
            return;
        }
        let hashes: HashSet<&ChunkHash> = hashes.iter().collect();
        // For each earlier order, whether all of its chunks are named.
        let mut orders = BTreeMap::<OrderNumber, bool>::new();
        for fetch in self.bring.fetches.values() {
            let Some(order) = fetch.order() else { continue };
            if self.bring.orders.get(&order).is_some_and(|order| order.is_before(attempt)) {
                let is_named = fetch.fingerprint == fingerprint && hashes.contains(&fetch.wanted.chunk.hash);
                *orders.entry(order).or_insert(true) &= is_named;
            }
        }
        let ended = orders.into_iter().filter(|&(_, is_named)| is_named);
        self.effects.extend(ended.map(|(order, _)| Effect::CancelOrder(order)));
    }

    /// Asks the writers' nodes for followed chunks that another request's fetch should have brought and did not. While an order's
    /// chunks end one by one (`is_amid_order`), nothing is asked yet, so that all failed chunks are asked for together.
    pub(crate) fn follow_again(&mut self, is_amid_order: bool) {
        if is_amid_order {
            return;
        }
        for (follow, positions) in self.store.take_followed_again() {
            let Some(again) = self.store.follow_again(follow, &positions) else { continue };
            let AskedAgain { writer, fingerprint, attempt, patience_ms, wanted } = again;
            self.order_follows(&writer, fingerprint, (attempt, patience_ms), wanted);
        }
    }

    /// Asks the writer's node for chunks, in as few orders as they fit into.
    fn order_follows(
        &mut self,
        writer: &Writer,
        fingerprint: Fingerprint,
        terms: (u64, u64),
        wanted: Vec<Wanted>,
    ) {
        let mut wanted = wanted.into_iter().peekable();
        while wanted.peek().is_some() {
            let part = wanted.by_ref().take(MAX_FETCH_CHUNKS).collect();
            self.order_follow(writer, fingerprint, terms, part);
        }
    }

    /// Starts a follow for a peer: of each chunk the named pools, or all pools if none are named.
    /// [`Event::GrantEnded`](crate::Event::GrantEnded) ends it. `None` if peers follow too much.
    pub fn follow_for_peer(
        &mut self,
        now: Duration,
        fingerprint: &Fingerprint,
        chunks: (&[ChunkHash], &[PoolSet]),
        (attempt, patience_ms): (u64, u64),
    ) -> Option<u64> {
        self.now = self.now.max(now);
        let (patience_ms, now) = (patience_ms.min(MOST_PATIENCE_MS), self.millis());
        self.store.follow_for_peer(fingerprint, chunks, attempt, patience_ms, now)
    }

    /// Asks the writer's node for chunks, once: the node sends their layers as they become ready.
    fn order_follow(
        &mut self,
        writer: &Writer,
        fingerprint: Fingerprint,
        (attempt, patience_ms): (u64, u64),
        wanted: Vec<Wanted>,
    ) {
        let tenant = self.store.tenant_of_namespace(&fingerprint).unwrap_or(TenantId(0));
        let order = OrderNumber(self.bring.next_number());
        let every = self.store.every_pool(&fingerprint);
        let mut pools: Vec<PoolSet> = wanted.iter().map(Wanted::pools).collect();
        if pools.iter().all(|&pools| Some(pools) == every) {
            pools.clear();
        }
        let chunks: Vec<FetchId> =
            wanted.into_iter().map(|wanted| self.fetch_followed(wanted, fingerprint, Some(order))).collect();
        self.bring.orders.insert(order, OrderUnderWay::of_follow(chunks.clone(), attempt));
        let writer = writer.clone();
        let follow = FollowOrder { order, writer, fingerprint, tenant, chunks, pools, attempt, patience_ms };
        self.effects.push_back(Effect::Follow(follow));
    }

    /// Notes a chunk that is followed: it comes by this order, or from disk, and nobody else is asked for it.
    fn fetch_followed(
        &mut self,
        wanted: Wanted,
        fingerprint: Fingerprint,
        order: Option<OrderNumber>,
    ) -> FetchId {
        let id = wanted.fetch;
        let (holders, cause) = (Holders::default(), Cause::default());
        let mut fetch = Fetch::new(wanted, fingerprint, Class::Decode, holders, Duration::MAX, cause);
        fetch.is_followed_by(order);
        self.bring.fetches.insert(id, fetch);
        id
    }

    /// A chunk of an order to follow, as long as the chunk is under way.
    fn followed(&self, order: OrderNumber, chunk: usize) -> Option<&Fetch> {
        let id = self.bring.orders.get(&order)?.followed(chunk)?;
        self.bring.fetches.get(&id).filter(|fetch| fetch.is_in(order))
    }

    /// Takes layers that another node sent of a chunk that is written there.
    pub(crate) fn layers_came(&mut self, order: OrderNumber, chunk: usize, layers: LayersArrived) {
        let Some(Wanted { fetch, number, .. }) = self.followed(order, chunk).map(|fetch| &fetch.wanted)
        else {
            return;
        };
        let (fetch, number) = (*fetch, *number);
        let LayersArrived { block, offset, bytes, checksum } = layers;
        self.count(Counted::Came(1, 0));
        self.store.layers_came(fetch, number, block, offset, bytes, checksum);
    }

    /// Takes the end of a followed chunk: the chunk has come and stays, or will not come.
    pub(crate) fn followed_came(&mut self, order: OrderNumber, chunk: usize, came: Arrival) {
        let Some(fetch) = self.followed(order, chunk) else { return };
        let (id, bytes) = (fetch.wanted.fetch, fetch.bytes());
        let Arrival::Here { checksums, pools, reads, .. } = came else { return self.did_not_come(id) };
        self.bring.fetches.remove(&id);
        self.count(Counted::Came(0, bytes));
        self.count(Counted::Placed(Some(Placement::Replicate)));
        let came =
            Came { checksums, pools, reads, is_on_disk_elsewhere: false, is_stored: false, is_copy: false };
        // The next turn of the conversation begins with the chunks of this one: they stay.
        self.end_fetch(id, Some(came), Some(ChangeKind::Gained));
    }

    /// Ends an order to follow: nothing more of it will come.
    pub(crate) fn follow_ended(&mut self, number: OrderNumber) {
        let Some(order) = self.bring.orders.get(&number).filter(|order| order.is_follow()) else { return };
        for chunk in 0..order.len() {
            self.followed_came(number, chunk, Arrival::Failed(FetchFailure::Broken));
        }
        self.bring.orders.remove(&number);
    }

    /// Answers with a follow's progress, once it exceeds the progress that the session knows of, or once the session has waited
    /// long enough.
    pub(crate) fn ask_in_place(&mut self, request: RequestId, ask: AskInPlace) -> Result<(), Refused> {
        let progress = self.store.followed(request.session, ask.follow)?;
        if ask.wait_ms == 0 || is_news(&ask, &progress) {
            return self.tell_in_place(request, &ask);
        }
        let until = self.now + Duration::from_millis(ask.wait_ms).min(MOST_WAIT);
        let follower = Follower { request, ask, until };
        self.bring.followers.0.entry(ask.follow).or_default().push(follower);
        Ok(())
    }

    fn tell_in_place(&mut self, request: RequestId, ask: &AskInPlace) -> Result<(), Refused> {
        let (mut leased, mut new_extents) = (None, Vec::new());
        if self.store.followed(request.session, ask.follow)?.layers > 0
            && let Some(shown) = self.store.show_followed(request.session, ask.follow)?
        {
            self.count(Counted::Leased(shown.bytes));
            new_extents = shown.new_extents;
            let (lease, chunks, places) = (shown.lease, shown.chunks, shown.places);
            leased = Some(Leased { lease, chunks, places, checksums: Vec::new(), extents: Vec::new() });
        }
        let FollowProofs { progress, sums, checksums } =
            self.store.prove_followed(request.session, ask.follow, ask.layers)?;
        let FollowProgress { chunks, layers, is_whole } = progress;
        let response = Response::InPlace(InPlace { chunks, layers, is_whole, leased, sums, checksums });
        self.effects.push_back(Effect::Answer { request, response, new_extents });
        Ok(())
    }

    /// Tells followers, here and at other nodes, which layers have come.
    pub(crate) fn tell_followers(&mut self) {
        for follow in self.store.take_progressed() {
            self.answer_followers(follow, |core, waiting| {
                let progress = core.store.followed(waiting.request.session, follow);
                progress.map_or(true, |progress| is_news(&waiting.ask, &progress))
            });
        }
        let told = self.store.take_told();
        self.effects.extend(told.into_iter().map(Effect::TellFollower));
    }

    /// Answers sessions that have waited as long as they wanted to.
    pub(crate) fn answer_late_followers(&mut self) {
        let mut follows: Vec<u64> = self.bring.followers.0.keys().copied().collect();
        follows.sort_unstable();
        for follow in follows {
            self.answer_followers(follow, |core, waiting| waiting.until <= core.now);
        }
    }

    fn answer_followers(&mut self, follow: u64, is_due: impl Fn(&Self, &Follower) -> bool) {
        let Some(waiting) = self.bring.followers.0.remove(&follow) else { return };
        let (due, waiting): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|waiting| is_due(self, waiting));
        if !waiting.is_empty() {
            self.bring.followers.0.insert(follow, waiting);
        }
        for Follower { request, ask, .. } in due {
            let told = self.tell_in_place(request, &ask);
            self.refuse(request, told);
        }
    }

    /// Forgets the waiting requests of a session that has ended.
    pub(super) fn forget_followers_of(&mut self, session: SessionId) {
        self.bring.followers.0.retain(|_, waiting| {
            waiting.retain(|waiting| waiting.request.session != session);
            !waiting.is_empty()
        });
    }
}

/// Whether this progress is news for the asker.
fn is_news(ask: &AskInPlace, progress: &FollowProgress) -> bool {
    progress.layers > ask.layers || progress.chunks < ask.chunks || progress.is_whole
}

/// How long an answer may wait for news: the end of a session waits for its answers.
const MOST_WAIT: Duration = Duration::from_secs(1);

/// How long a reader may wait for a writer that is silent: longer than any prefill takes from layer to layer.
const MOST_PATIENCE_MS: u64 = 600_000;
