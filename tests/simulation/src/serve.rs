//! The serving half of a node's exchange: the requests of peers and siblings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use larder_core::placement::{Served, Worth};
use larder_core::reports::Reporter;
use larder_core::store::{FollowNews, Granted, GrantedBlock, News};
use larder_core::{Arrival, Event, FetchFailure, Offer, OrderNumber, RecallId};
use larder_node::arena::ExtentMemory;
use larder_protocol::peer::{
    BlockLayers, Chunks, Class, Fetch, FetchedChunk, FollowChunks, FollowPools, FollowStep, Followed,
    HeldBlock, HeldChunk, OfferChunks, PeerRequest, PeerResponse, RetryAfter, Room,
};
use larder_protocol::table::Holder;
use larder_protocol::{ChunkHash, Fingerprint};

use crate::bytes::{Reader, Reading, sums_of_bytes};
use crate::exchange::{Body, Destination};
use crate::network::{Packed, Packet, Party};
use crate::process::Own;
use crate::world::{ActorHappening, At, Life, World};

/// The blocks that a process is sending.
#[derive(Default)]
pub(crate) struct Serving {
    sendings: BTreeMap<u64, Sending>,
    follows: BTreeMap<u64, Followee>,
    /// Bytes of blocks that it sent.
    served: Served,
}

/// Blocks that are being sent to a peer.
struct Sending {
    to: Life,
    call: u64,
    actor: At,
    peer: String,
    bytes: u64,
    chunks: VecDeque<(usize, Vec<Held>)>,
    /// Sent blocks keep their memory until the asker has all of them.
    sent: Vec<Vec<Held>>,
    grants: Vec<u64>,
    /// The end of the pieces that are to be read.
    end: u64,
    read: u64,
}

/// A granted block, with its memory.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    block: GrantedBlock,
    memory: Arc<ExtentMemory>,
}

/// A peer that follows chunks here.
struct Followee {
    to: Life,
    call: u64,
    order: u64,
    actor: At,
    follow: Option<u64>,
    message: u64,
    open: usize,
    is_given_up: bool,
}

/// A request for blocks of an actor.
#[derive(Debug)]
pub(crate) struct AskBlocks {
    pub(crate) asker: Asker,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) hashes: Vec<ChunkHash>,
    pub(crate) block_bytes: Vec<u64>,
    pub(crate) class: Class,
    pub(crate) grants: Vec<Option<Given>>,
}

/// A peer's offer of chunks that it is evicting.
pub(crate) struct TakeIn {
    asker: Life,
    call: u64,
    holder: Holder,
    offer: OfferChunks,
}

/// The granted part of a chunk.
#[derive(Debug)]
pub(crate) enum Given {
    Held { grant: u64, chunk: HeldChunk, blocks: Vec<Held> },
    NotHeld,
    Busy,
}

/// The asker of blocks.
#[derive(Debug)]
pub(crate) enum Asker {
    /// A peer, with its call, and the actor that is asked.
    Peer(Life, u64, At),
    /// Another actor of the node, and the life of its store.
    Sibling(At, u64, OrderNumber),
}

/// Blocks that a sibling granted, to be copied.
pub(crate) struct Import {
    pub(crate) life: u64,
    pub(crate) order: OrderNumber,
    holder: At,
    given: Vec<Given>,
    chunks: Vec<Destination>,
}

impl Serving {
    pub(crate) fn under_way(&self) -> usize {
        self.sendings.len() + self.follows.len()
    }
}

impl World {
    /// A packet arrives at a host.
    pub(crate) fn packet_comes(&mut self, Packet { from, to, body }: Packet) {
        let Some(host) = to.host() else { return };
        let Some(process) = &mut self.hosts[host].process else { return };
        let life = process.life;
        if let Party::Host(from) = from {
            process.asking.hears(from);
        }
        match body {
            Packed::Acknowledged => {}
            Packed::CoordinatorSays(meant, told) => {
                if meant == life {
                    self.follower_hears(life, told);
                }
            }
            Packed::Peer(message) => self.message_comes(life, message),
        }
    }

    pub(crate) fn peer_says(&mut self, life: Life, from: Life, body: Body) {
        match body {
            Body::Ask { call, request } => {
                self.acknowledge(life.host, from.host);
                self.serve(life, from, call, request);
            }
            Body::Answer { call, response } => self.answered(life, call, response),
            Body::Blocks { call, at, blocks } => self.blocks_came(life, from.host, call, at, &blocks),
            Body::Step { call, followed, bytes } => self.step_came(life, from.host, call, followed, &bytes),
            Body::Read { call, pieces } => self.was_read(life, from, call, pieces),
            Body::Stop { call } => self.stops(life, from, call),
            Body::End { call } => self.follow_is_cut(life, call),
        }
    }

    fn serve(&mut self, life: Life, from: Life, call: u64, request: PeerRequest) {
        let name = self.host_name(from.host);
        let actors = self.settings.actors;
        let response = match request {
            PeerRequest::Ping => PeerResponse::Done,
            PeerRequest::Find(find) => match self.find(life, &find) {
                Some(rows) => PeerResponse::Rows(rows),
                None => return,
            },
            PeerRequest::Announce(announces) => {
                let Some(process) = self.process(life) else { return };
                PeerResponse::Announced(process.directory.announces(&announces))
            }
            PeerRequest::Repair(repair) => {
                self.repair(life, repair.holder, &repair.rows);
                PeerResponse::Done
            }
            PeerRequest::Moved(Chunks { device, fingerprint, hashes }) if device < actors => {
                self.tell_soon_in_any_life(At { life, actor: device }, Event::Moved { fingerprint, hashes });
                PeerResponse::Done
            }
            PeerRequest::Damaged(Chunks { device, fingerprint, hashes }) if device < actors => {
                let by = Reporter::Peer(name);
                let event = Event::Damaged { by, fingerprint, hashes };
                self.tell_soon_in_any_life(At { life, actor: device }, event);
                PeerResponse::Done
            }
            PeerRequest::Fetch(Fetch { chunks, block_bytes, class }) if chunks.device < actors => {
                let Chunks { device, fingerprint, hashes } = chunks;
                let at = At { life, actor: device };
                let (asker, grants) = (Asker::Peer(from, call, at), Vec::new());
                let ask = AskBlocks { asker, fingerprint, hashes, block_bytes, class, grants };
                return self.plan_actor(at, MAILBOX, ActorHappening::Grant(ask));
            }
            PeerRequest::Offer(offer) => {
                let Some(process) = self.process(life) else { return };
                let members = &process.exchange.table().members;
                let Some(node) =
                    members.iter().find(|member| member.name == name).map(|member| member.number)
                else {
                    return;
                };
                let worth = |actor: &u16| process.actors[usize::from(*actor)].core.least_worth();
                let actor = (0..actors).min_by_key(worth).unwrap_or_default();
                let holder = Holder { node, device: offer.device };
                let offered = TakeIn { asker: from, call, holder, offer };
                return self.plan_actor(At { life, actor }, MAILBOX, ActorHappening::TakeIn(offered));
            }
            PeerRequest::Follow(chunks) if chunks.chunks.device < actors => {
                return self.serve_follow(life, from, call, FollowPools { chunks, pools: Vec::new() });
            }
            PeerRequest::FollowPools(ask) if ask.chunks.chunks.device < actors => {
                return self.serve_follow(life, from, call, *ask);
            }
            PeerRequest::Take(take) if take.to < actors => {
                let at = At { life, actor: take.to };
                return self.plan_actor(at, MAILBOX, ActorHappening::Take(from, call, take));
            }
            PeerRequest::SetPolicy(name) => {
                if let Ok(policy) = name.parse() {
                    for actor in 0..actors {
                        self.tell_soon_in_any_life(At { life, actor }, Event::PolicyIs(policy));
                    }
                }
                PeerResponse::Done
            }
            _ => PeerResponse::Refused("not here".to_owned()),
        };
        self.say_room(life, from, call);
        self.send(life, from.host, Some(from), &Body::Answer { call, response });
    }

    /// Sends, before an answer, the worth of this node's next victim and how much the node serves.
    fn say_room(&mut self, life: Life, to: Life, call: u64) {
        let now_ms = self.local(life.host).as_millis() as u64;
        let Some(process) = self.process(life) else { return };
        let least = process.actors.iter().map(|actor| actor.core.least_worth().0).min();
        let served = process.serving.served.bytes_a_second(now_ms);
        process.actors.iter_mut().for_each(|actor| actor.core.this_node_serves(served));
        let response = PeerResponse::Room(Room { least: least.unwrap_or_default(), served });
        self.send(life, to.host, Some(to), &Body::Answer { call, response });
    }

    /// An actor takes chunks that a peer is evicting, or refuses them.
    pub(crate) fn take_in(&mut self, at: At, TakeIn { asker, call, holder, offer }: TakeIn) {
        let now = self.local(at.life.host);
        let Some(actor) = self.actor(at) else { return };
        let OfferChunks { fingerprint, worth, chunks, .. } = offer;
        let wanted = actor.core.take_in(now, holder, fingerprint, &chunks, Worth(worth));
        self.tell(at, Event::Alarm);
        let response = PeerResponse::Wanted(wanted);
        self.send(at.life, asker.host, Some(asker), &Body::Answer { call, response });
    }

    /// Keeps chunks for an asker, including chunks on disk.
    pub(crate) fn grant_all(&mut self, at: At, ask: AskBlocks) {
        let now = self.local(at.life.host);
        let sizes: Arc<[u64]> = ask.block_bytes.as_slice().into();
        let number = self.next_number();
        let (fingerprint, hashes, class) = (ask.fingerprint, ask.hashes.clone(), ask.class);
        let mut grants = Vec::new();
        let Some(actor) = self.actor(at) else { return };
        let cause = larder_core::cause::Cause::default();
        let offers = actor.core.offer(now, (fingerprint, &hashes), &sizes, class, &cause);
        for (position, (hash, offer)) in hashes.into_iter().zip(offers).enumerate() {
            let Some(actor) = self.actor(at) else { return };
            match offer {
                Offer::Now(granted) => {
                    let given = self.given(at, fingerprint, hash, granted);
                    grants.push(Some(given));
                }
                Offer::Later(recall) => {
                    actor.recalls.insert(recall, (number, position));
                    grants.push(None);
                }
            }
        }
        let Some(actor) = self.actor(at) else { return };
        actor.asks.insert(number, AskBlocks { grants, ..ask });
        self.tell(at, Event::Alarm);
        self.finish_ask(at, number);
    }

    /// A chunk has come from disk for the askers that wait for it.
    pub(crate) fn recalled(&mut self, at: At, recall: RecallId, granted: Granted) {
        let Some(actor) = self.actor(at) else { return };
        let Some((ask, position)) = actor.recalls.remove(&recall) else { return };
        let Some(found) = actor.asks.get(&ask) else { return };
        let (fingerprint, hash) = (found.fingerprint, found.hashes[position]);
        let given = self.given(at, fingerprint, hash, granted);
        let Some(actor) = self.actor(at) else { return };
        if let Some(found) = actor.asks.get_mut(&ask) {
            found.grants[position] = Some(given);
        }
        self.finish_ask(at, ask);
    }

    fn given(&mut self, at: At, fingerprint: Fingerprint, hash: ChunkHash, granted: Granted) -> Given {
        let Granted::Held { grant, reads, is_on_disk, pools, blocks } = granted else {
            return match granted {
                Granted::Busy => Given::Busy,
                _ => Given::NotHeld,
            };
        };
        let space = self.spaces.iter().find(|space| space.fingerprint == fingerprint).cloned();
        let Some(actor) = self.actor(at) else { return Given::NotHeld };
        let memory = |block: &GrantedBlock| actor.memory[block.place.extent as usize].clone();
        let held = blocks.iter().map(|&block| Some(Held { block, memory: memory(&block)? }));
        let Some(held) = held.collect::<Option<Vec<Held>>>() else {
            self.violate(|| format!("{at:?}: a grant of an extent without memory"));
            return Given::NotHeld;
        };
        let life = actor.life;
        if let Some(space) = space {
            let readings = space.blocks_of(hash, pools).zip(&blocks).map(|(key, block)| Reading {
                extent: block.place.extent,
                offset: block.place.offset,
                key,
                from: 0,
                to: block.bytes,
            });
            let readings: Vec<Reading> = readings.collect();
            readings.iter().for_each(|reading| self.must_hold(at, reading));
            if let Some(actor) = self.actor(at) {
                actor.uses.readings.insert(Reader::Grant(life, grant), readings);
            }
        }
        let said = held
            .iter()
            .map(|held| HeldBlock { bytes: held.block.bytes, checksum: held.block.checksum })
            .collect();
        Given::Held { grant, chunk: HeldChunk { reads, is_on_disk, pools, blocks: said }, blocks: held }
    }

    fn finish_ask(&mut self, at: At, number: u64) {
        let Some(actor) = self.actor(at) else { return };
        if actor.asks.get(&number).is_none_or(|ask| ask.grants.iter().any(Option::is_none)) {
            return;
        }
        let Some(ask) = actor.asks.remove(&number) else { return };
        match ask.asker {
            Asker::Peer(..) => self.plan_local(at.life, MAILBOX, Own::Granted(ask)),
            Asker::Sibling(asker, life, order) => {
                let given = ask.grants.into_iter().flatten().collect();
                self.sibling_granted(asker, life, order, at, given);
            }
        }
    }

    /// An actor has answered a peer: sends blocks as far as there is room.
    pub(crate) fn granted_to_peer(&mut self, life: Life, ask: AskBlocks) {
        let Asker::Peer(to, call, actor) = ask.asker else { return };
        let peer = self.host_name(to.host);
        let (number, now_ms) = (self.next_number(), self.local(life.host).as_millis() as u64);
        let Some(process) = self.process(life) else { return };
        let (mut said, mut chunks, mut grants) = (Vec::new(), VecDeque::new(), Vec::new());
        let (mut bytes, mut over) = (0, Vec::new());
        let retry = RetryAfter { retry_after_ms: BUSY_RETRY_MS };
        for (at, given) in ask.grants.into_iter().flatten().enumerate() {
            said.push(match given {
                Given::NotHeld => FetchedChunk::NotHeld,
                Given::Busy => FetchedChunk::Busy(retry),
                Given::Held { grant, chunk, blocks } => {
                    let size = blocks.iter().map(|held| held.block.bytes).sum();
                    match process.outgoing.sending.take(&peer, size, ask.class) {
                        Some(taken) => {
                            bytes += taken;
                            grants.push(grant);
                            chunks.push_back((at, blocks));
                            FetchedChunk::Held(chunk)
                        }
                        None => {
                            over.push(grant);
                            FetchedChunk::Busy(retry)
                        }
                    }
                }
            });
        }
        process.serving.served.sent(bytes, now_ms);
        let end = chunks.back().map_or(0, |&(at, _)| at as u64 + 1);
        let sending =
            Sending { to, call, actor, peer, bytes, chunks, sent: Vec::new(), grants, end, read: 0 };
        process.serving.sendings.insert(number, sending);
        for grant in over {
            self.end_grant(actor, grant);
        }
        self.say_room(life, to, call);
        self.send(life, to.host, Some(to), &Body::Answer { call, response: PeerResponse::Fetched(said) });
        self.plan_local(life, STALL_DEADLINE, Own::SendStalls(number, 0));
        self.plan_local(life, Duration::from_micros(20), Own::SendNext(number));
    }

    /// Sends the next chunk of a fetch from its place.
    pub(crate) fn send_next(&mut self, life: Life, number: u64) {
        let pause = self.some_us(20, 400);
        let Some(process) = self.process(life) else { return };
        let Some(sending) = process.serving.sendings.get_mut(&number) else { return };
        let Some((at, held)) = sending.chunks.pop_front() else {
            if sending.read >= sending.end {
                self.end_sending(life, number);
            }
            return;
        };
        let read = |held: &Held| {
            let mut bytes = vec![0; held.block.bytes as usize];
            let copied = held.memory.copy_out(held.block.place.offset, &mut bytes);
            debug_assert!(copied.is_ok(), "a grant lies within its extent");
            bytes
        };
        let blocks = held.iter().map(read).collect();
        sending.sent.push(held);
        let (to, call) = (sending.to, sending.call);
        self.send(life, to.host, Some(to), &Body::Blocks { call, at, blocks });
        self.plan_local(life, pause, Own::SendNext(number));
    }

    fn was_read(&mut self, life: Life, from: Life, call: u64, pieces: u64) {
        let Some(process) = self.process(life) else { return };
        let sendings = &mut process.serving.sendings;
        let found = sendings.iter_mut().find(|(_, sending)| sending.to == from && sending.call == call);
        if let Some((&number, sending)) = found {
            sending.read = sending.read.max(pieces);
            if sending.read >= sending.end && sending.chunks.is_empty() {
                self.end_sending(life, number);
            }
        }
    }

    pub(crate) fn sending_stalls(&mut self, life: Life, number: u64, read: u64) {
        let Some(process) = self.process(life) else { return };
        let Some(sending) = process.serving.sendings.get(&number) else { return };
        let now = sending.read;
        if now == read {
            return self.end_sending(life, number);
        }
        self.plan_local(life, STALL_DEADLINE, Own::SendStalls(number, now));
    }

    /// Drops blocks on their way, and with them the leases.
    fn end_sending(&mut self, life: Life, number: u64) {
        let Some(process) = self.process(life) else { return };
        let Some(Sending { peer, bytes, actor, grants, .. }) = process.serving.sendings.remove(&number)
        else {
            return;
        };
        process.outgoing.sending.give_back(&peer, bytes);
        for grant in grants {
            self.end_grant(actor, grant);
        }
    }

    fn stops(&mut self, life: Life, from: Life, call: u64) {
        let Some(process) = self.process(life) else { return };
        let Serving { sendings, follows, .. } = &mut process.serving;
        let is_it = |to: Life, of: u64| to == from && of == call;
        let sending = sendings.iter().find(|(_, sending)| is_it(sending.to, sending.call));
        let follow = follows.iter().find(|(_, follow)| is_it(follow.to, follow.call));
        match (sending.map(|(&number, _)| number), follow.map(|(&number, _)| number)) {
            (Some(number), _) => self.end_sending(life, number),
            (None, Some(number)) => self.end_followee(life, number),
            (None, None) => {}
        }
    }

    /// A peer wants to follow chunks that are being written here.
    fn serve_follow(&mut self, life: Life, from: Life, call: u64, ask: FollowPools) {
        let number = self.next_number();
        let FollowPools { chunks, pools } = ask;
        let FollowChunks { chunks: Chunks { device, fingerprint, hashes }, order, attempt, patience_ms } =
            chunks;
        let actor = At { life, actor: device };
        let Some(process) = self.process(life) else { return };
        if process.serving.follows.values().any(|other| other.to == from && other.call == call) {
            return;
        }
        let open = hashes.len();
        let (follow, message, is_given_up) = (None, 0, false);
        let followee = Followee { to: from, call, order, actor, follow, message, open, is_given_up };
        process.serving.follows.insert(number, followee);
        let ask = ActorHappening::PeerFollows { number, fingerprint, hashes, pools, attempt, patience_ms };
        self.plan_actor(actor, MAILBOX, ask);
    }

    /// An actor has let a peer follow, or refused it.
    pub(crate) fn peer_follows(&mut self, life: Life, number: u64, follow: Option<u64>) {
        let Some(process) = self.process(life) else { return };
        let Some(followee) = process.serving.follows.get_mut(&number) else {
            return;
        };
        let (to, call, actor) = (followee.to, followee.call, followee.actor);
        followee.follow = follow;
        let is_given_up = followee.is_given_up;
        if follow.is_none() || is_given_up {
            process.serving.follows.remove(&number);
        }
        match follow {
            None => {
                let response = PeerResponse::Busy(RetryAfter { retry_after_ms: BUSY_RETRY_MS });
                self.send(life, to.host, Some(to), &Body::Answer { call, response });
            }
            Some(follow) if is_given_up => {
                self.end_grant(actor, follow);
            }
            Some(_) => {}
        }
    }

    /// An actor has news for a peer that follows.
    pub(crate) fn follow_news(&mut self, life: Life, actor: u16, told: FollowNews) {
        let Some(process) = self.process(life) else { return };
        let is_it =
            |followee: &Followee| followee.follow == Some(told.follow) && followee.actor.actor == actor;
        let found = process.serving.follows.iter_mut().find(|(_, followee)| is_it(followee));
        let Some((&number, followee)) = found else { return };
        followee.message += 1;
        followee.open -= usize::from(!matches!(told.what, News::Layers(_)));
        let (to, call, order, message) = (followee.to, followee.call, followee.order, followee.message);
        let is_over = followee.open == 0;
        let (step, bytes) = match told.what {
            News::Layers(layers) => {
                let mut bytes = vec![0; layers.bytes as usize];
                let memory = process.actors[usize::from(actor)].memory[layers.place.extent as usize].as_ref();
                let copied =
                    memory.map(|memory| memory.copy_out(layers.place.offset + layers.offset, &mut bytes));
                if !matches!(copied, Some(Ok(()))) {
                    return self
                        .violate(|| format!("{life:?}: a follower is told of {layers:?}, which is nowhere"));
                }
                let step = BlockLayers {
                    block: layers.block as u32,
                    offset: layers.offset,
                    bytes: layers.bytes,
                    checksum: layers.checksum,
                };
                (FollowStep::Layers(step), bytes)
            }
            News::Whole(checksums) => (FollowStep::Whole(checksums), Vec::new()),
            News::Lost => (FollowStep::Lost, Vec::new()),
        };
        let followed = Followed { order, message, chunk: told.position, step };
        self.send(life, to.host, Some(to), &Body::Step { call, followed, bytes });
        if is_over {
            self.end_followee(life, number);
        }
    }

    /// A connection is lost: stops all sending on it.
    pub(crate) fn stop_serving(&mut self, life: Life, host: usize) {
        let Some(process) = self.process(life) else { return };
        let Serving { sendings, follows, .. } = &process.serving;
        let to = |to: Life| to.host == host;
        let sendings: Vec<u64> =
            sendings.iter().filter(|(_, sending)| to(sending.to)).map(|(&number, _)| number).collect();
        let follows: Vec<u64> =
            follows.iter().filter(|(_, follow)| to(follow.to)).map(|(&number, _)| number).collect();
        sendings.into_iter().for_each(|number| self.end_sending(life, number));
        follows.into_iter().for_each(|number| self.end_followee(life, number));
    }

    /// An actor begins anew: its followers get no more news.
    pub(crate) fn cut_followees(&mut self, at: At) {
        let Some(process) = self.process(at.life) else { return };
        let is_told = |followee: &Followee| followee.actor == at && followee.follow.is_some();
        let (cut, left): (BTreeMap<_, _>, _) =
            std::mem::take(&mut process.serving.follows).into_iter().partition(|(_, other)| is_told(other));
        process.serving.follows = left;
        for Followee { to, call, .. } in cut.into_values() {
            self.send(at.life, to.host, Some(to), &Body::End { call });
        }
    }

    fn end_followee(&mut self, life: Life, number: u64) {
        let Some(process) = self.process(life) else { return };
        let Some(followee) = process.serving.follows.get_mut(&number) else { return };
        let Some(follow) = followee.follow else {
            followee.is_given_up = true;
            return;
        };
        let actor = followee.actor;
        process.serving.follows.remove(&number);
        self.end_grant(actor, follow);
    }

    /// Another actor of the node has granted blocks to an actor: they are copied.
    fn sibling_granted(&mut self, asker: At, life: u64, order: OrderNumber, holder: At, given: Vec<Given>) {
        let after = self.some_us(20, 300);
        let Some(actor) = self.actor(asker) else { return };
        let chunks = actor.from_siblings.remove(&(life, order));
        let Some(chunks) = chunks else {
            return self.end_given(holder, given);
        };
        let import = Import { life, order, holder, given, chunks };
        self.plan_actor(asker, after, ActorHappening::Imported(import));
    }

    /// Nobody reads the granted blocks any more: the actor learns of it soon.
    fn end_grant(&mut self, holder: At, grant: u64) {
        if let Some(actor) = self.actor(holder) {
            // Grants of earlier stores have different numbers.
            let is_other = |reader: &Reader| !matches!(reader, Reader::Grant(_, of) if *of == grant);
            actor.uses.readings.retain(|reader, _| is_other(reader));
        }
        self.plan_actor(holder, MAILBOX, ActorHappening::GrantEnded(grant));
    }

    fn end_given(&mut self, holder: At, given: Vec<Given>) {
        for given in given {
            if let Given::Held { grant, .. } = given {
                self.end_grant(holder, grant);
            }
        }
    }

    /// Blocks of a sibling are copied: they are checked as if a peer had sent them.
    pub(crate) fn imported(&mut self, at: At, import: Import) {
        let Import { life, order, holder, given, chunks } = import;
        let mut came = Vec::new();
        let mut is_damaged = false;
        for (given, to) in given.iter().zip(&chunks) {
            came.push(match given {
                Given::NotHeld => Arrival::NotHeld,
                Given::Busy => Arrival::Busy { retry_after_ms: BUSY_RETRY_MS },
                Given::Held { chunk, blocks, .. } => {
                    let arrival = import_chunk(chunk, blocks, to);
                    is_damaged |= arrival == Arrival::Damaged;
                    arrival
                }
            });
        }
        drop(chunks);
        if is_damaged {
            self.saw_damage(at.life, at.life.host);
        }
        self.end_given(holder, given);
        came.iter().for_each(|came| self.coverage.note(crate::coverage::arrival(came)));
        self.tell_in_life(at, life, Event::OrderEnded { order, came });
    }
}

fn import_chunk(said: &HeldChunk, blocks: &[Held], to: &Destination) -> Arrival {
    let coming =
        || to.wanted.blocks.iter().zip(&to.memory).filter(|(to, _)| said.pools.has(to.key.pool.into()));
    if blocks.iter().map(|held| held.block.bytes).ne(coming().map(|(to, _)| to.bytes)) {
        return Arrival::Failed(FetchFailure::Broken);
    }
    let (mut checksums, mut is_right) = (Vec::new(), true);
    for (held, (to, memory)) in blocks.iter().zip(coming()) {
        let mut bytes = vec![0; to.bytes as usize];
        let copied = held.memory.copy_out(held.block.place.offset, &mut bytes);
        if copied.and_then(|()| memory.copy_in(to.place.offset, &bytes)).is_err() {
            return Arrival::Failed(FetchFailure::Broken);
        }
        let sums = sums_of_bytes(&to.key, &bytes, to.range_bytes);
        is_right &= sums.whole == held.block.checksum;
        checksums.push(sums);
    }
    let HeldChunk { reads, is_on_disk, pools, .. } = *said;
    if is_right { Arrival::Here { checksums, pools, reads, is_on_disk } } else { Arrival::Damaged }
}

/// Time of a message between threads of a process.
pub(crate) const MAILBOX: Duration = Duration::from_micros(15);
pub(crate) const BUSY_RETRY_MS: u64 = 5;
const STALL_DEADLINE: Duration = Duration::from_secs(2);
