//! Follows between nodes: layers come from the writer's node as its engine hands them over.

use std::time::Duration;

use larder_core::exchange::{BusyPause, FOLLOW_PROBE, NoPeer, PeerId, RequestId};
use larder_core::{Arrival, Event, FetchFailure, FollowOrder, LayersArrived, OrderNumber};
use larder_protocol::checksum::{layers_checksum, range_checksum};
use larder_protocol::peer::{
    BlockLayers, Chunks, FollowChunks, FollowStep, Followed, PeerRequest, PeerResponse,
};

use crate::bytes::sums_of_place;
use crate::exchange::{Body, Destination, For};
use crate::process::Own;
use crate::world::{At, Life, World};

/// Chunks that an actor wants to follow at a peer.
#[derive(Debug)]
pub(crate) struct Ordered {
    pub(crate) at: At,
    pub(crate) life: u64,
    pub(crate) order: FollowOrder,
    pub(crate) chunks: Vec<Destination>,
}

/// A follow under way.
pub(crate) struct Following {
    ordered: Ordered,
    coming: Vec<Coming>,
    link: Option<Link>,
    waited: Duration,
    over: Duration,
    pause: BusyPause,
}

struct Link {
    peer: PeerId,
    host: usize,
    request: RequestId,
    call: u64,
    last_message: u64,
    is_asked: bool,
}

/// The parts of a chunk that have come so far.
#[derive(Debug, Clone, Default)]
struct Coming {
    has_ended: bool,
    /// For each block, the start and end of its pieces.
    pieces: Vec<Vec<(u64, u64)>>,
}

impl Following {
    /// The peer that is asked to serve the follow, and its host.
    pub(crate) fn peer(&self) -> Option<(PeerId, usize)> {
        self.link.as_ref().map(|link| (link.peer, link.host))
    }

    pub(crate) fn is_order(&self, actor: u16, order: OrderNumber) -> bool {
        (self.ordered.at.actor, self.ordered.order.order) == (actor, order)
    }
}

impl World {
    /// An actor wants to follow chunks.
    pub(crate) fn order_follow(&mut self, life: Life, ordered: Ordered) {
        let number = self.next_number();
        let over = self.local(life.host) + Duration::from_millis(ordered.order.patience_ms);
        let blocks = |chunk: &Destination| vec![Vec::new(); chunk.wanted.blocks.len()];
        let coming = |chunk| Coming { has_ended: false, pieces: blocks(chunk) };
        let coming = ordered.chunks.iter().map(coming).collect();
        let Some(process) = self.process(life) else { return };
        let (link, waited, pause) = (None, Duration::ZERO, BusyPause::default());
        process.asking.follows.insert(number, Following { ordered, coming, link, waited, over, pause });
        self.begin_follow(life, number);
    }

    /// Looks for the writer's node, which may have joined too recently to be known here.
    pub(crate) fn begin_follow(&mut self, life: Life, number: u64) {
        let call = self.next_number();
        let Some(process) = self.process(life) else { return };
        let Some(following) = process.asking.follows.get_mut(&number) else { return };
        let (name, tenant) = (&following.ordered.order.writer.node, following.ordered.order.tenant);
        let table = process.exchange.table();
        let node = table.members.iter().find(|member| member.name == *name).map(|member| member.number);
        match node.ok_or(NoPeer::NotAMember).and_then(|node| process.exchange.peer(node)) {
            Ok(peer) => {
                let request = process.exchange.follow(peer, tenant);
                let host = self.host_of(life, peer);
                let (Some(request), Some(host)) = (request, host) else {
                    return self.end_follow(life, number);
                };
                let Some(process) = self.process(life) else { return };
                if let Some(following) = process.asking.follows.get_mut(&number) {
                    let link = Link { peer, host, request, call, last_message: 0, is_asked: false };
                    following.link = Some(link);
                }
                self.ask_to_follow(life, number);
                self.plan_local(life, FOLLOW_PROBE, Own::FollowProbe(number));
            }
            Err(NoPeer::NotAMember) if following.waited < MEMBER_DEADLINE => {
                following.waited += MEMBER_PAUSE;
                self.plan_local(life, MEMBER_PAUSE, Own::FollowBegins(number));
            }
            Err(_) => self.end_follow(life, number),
        }
    }

    pub(crate) fn ask_to_follow(&mut self, life: Life, number: u64) {
        let call = self.next_number();
        let Some(process) = self.process(life) else { return };
        let Some(Following { ordered, link: Some(link), .. }) = process.asking.follows.get_mut(&number)
        else {
            return;
        };
        (link.call, link.is_asked) = (call, true);
        let host = link.host;
        let hashes = ordered.chunks.iter().map(|chunk| chunk.wanted.chunk.hash).collect();
        let FollowOrder { ref writer, ref pools, fingerprint, attempt, patience_ms, order, .. } =
            ordered.order;
        let chunks = Chunks { device: writer.device, fingerprint, hashes };
        let follow = FollowChunks { chunks, order: order.0, attempt, patience_ms };
        let request = PeerRequest::follow(follow, pools.clone());
        self.send(life, host, None, &Body::Ask { call, request });
    }

    /// Asks the peer for a sign of life, as long as the follow goes on.
    pub(crate) fn probe_follow(&mut self, life: Life, number: u64) {
        let Some(process) = self.process(life) else { return };
        let Some(Following { link: Some(link), .. }) = process.asking.follows.get(&number) else { return };
        let node = link.peer.node;
        self.ask_peer(life, node, PeerRequest::Ping, FOLLOW_PROBE, For::FollowProbe(number));
    }

    pub(crate) fn follow_probed(&mut self, life: Life, number: u64, answers: bool) {
        let Some(process) = self.process(life) else { return };
        let Some(Following { link: Some(link), .. }) = process.asking.follows.get(&number) else { return };
        let request = link.request;
        if process.exchange.follows_on(request, answers) {
            return self.plan_local(life, FOLLOW_PROBE, Own::FollowProbe(number));
        }
        self.end_follow(life, number);
    }

    /// A peer answered that this node may not follow.
    pub(crate) fn follow_answered(&mut self, life: Life, call: u64, response: PeerResponse) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let asking = &mut process.asking;
        let is_it = |following: &Following| following.link.as_ref().is_some_and(|link| link.call == call);
        let found = asking.follows.iter_mut().find(|(_, following)| is_it(following));
        let Some((&number, following)) = found else { return };
        if let PeerResponse::Busy(retry) = response
            && let Some(pause) = process.exchange.pause(now, &mut following.pause, retry, following.over)
        {
            return self.plan_local(life, pause, Own::FollowAgain(number));
        }
        self.end_follow(life, number);
    }

    /// Progress of a followed chunk has come.
    pub(crate) fn step_came(&mut self, life: Life, from: usize, call: u64, followed: Followed, bytes: &[u8]) {
        let Followed { order, message, chunk, step } = followed;
        let Some(process) = self.process(life) else { return };
        let is_it = |following: &Following| following.link.as_ref().is_some_and(|link| link.call == call);
        let found = process.asking.follows.iter_mut().find(|(_, following)| is_it(following));
        let Some((&number, following)) = found else {
            return self.send(life, from, None, &Body::Stop { call });
        };
        let Following { ordered, coming, link: Some(link), .. } = following else { return };
        let at = chunk as usize;
        let is_next = order == ordered.order.order.0 && message == link.last_message + 1;
        if !is_next || at >= coming.len() {
            // A stream keeps its order, so the peer is wrong.
            return self.end_follow(life, number);
        }
        link.last_message = message;
        let (peer, host) = (link.peer, link.host);
        let to = &ordered.chunks[at];
        let (order, actor, store) = (ordered.order.order, ordered.at, ordered.life);
        let ended = match step {
            FollowStep::Layers(layers) => {
                if coming[at].has_ended {
                    None
                } else if coming[at].take(to, &layers) && bytes.len() as u64 == layers.bytes {
                    let BlockLayers { block, offset, bytes: length, checksum } = layers;
                    let (block, sum) = (block as usize, range_checksum(bytes));
                    let place = &to.wanted.blocks[block];
                    let copied = to.memory[block].copy_in(place.place.offset + offset, bytes);
                    let is_right = copied.is_ok()
                        && layers_checksum(&place.key, &(offset..offset + length), sum) == checksum;
                    if is_right {
                        let layers = LayersArrived { block, offset, bytes: length, checksum: sum };
                        process.exchange.heard(peer);
                        self.tell_soon(actor, store, Event::LayersCame { order, chunk: at, layers });
                        return self.send(life, host, None, &Body::Read { call, pieces: message });
                    }
                    Some(Arrival::Damaged)
                } else {
                    return self.end_follow(life, number);
                }
            }
            FollowStep::Whole(checksums) => Some(whole(to, &coming[at], &checksums)),
            FollowStep::Lost => Some(Arrival::NotHeld),
        };
        let mut reports = None;
        if let Some(came) = ended.filter(|_| !coming[at].has_ended) {
            coming[at].has_ended = true;
            if came == Arrival::Damaged {
                let (device, fingerprint) = (ordered.order.writer.device, ordered.order.fingerprint);
                let hashes = vec![to.wanted.chunk.hash];
                reports = Some(PeerRequest::Damaged(Chunks { device, fingerprint, hashes }));
            }
            let is_over = coming.iter().all(|coming| coming.has_ended);
            self.tell_soon(actor, store, Event::FollowedCame { order, chunk: at, came });
            if is_over {
                self.end_follow(life, number);
            }
        }
        if let Some(request) = reports {
            self.saw_damage(life, from);
            self.ask_peer(life, peer.node, request, Duration::from_secs(2), For::Nothing);
        }
        self.send(life, host, None, &Body::Read { call, pieces: message });
    }

    /// The peer's stream ends before its last message.
    pub(crate) fn follow_is_cut(&mut self, life: Life, call: u64) {
        let Some(process) = self.process(life) else { return };
        let is_it = |following: &Following| following.link.as_ref().is_some_and(|link| link.call == call);
        let found = process.asking.follows.iter().find(|(_, following)| is_it(following));
        if let Some((&number, _)) = found {
            self.end_follow(life, number);
        }
    }

    /// Ends a follow.
    pub(crate) fn end_follow(&mut self, life: Life, number: u64) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let Some(Following { ordered, coming, link, .. }) = process.asking.follows.remove(&number) else {
            return;
        };
        if let Some(link) = link {
            process.exchange.leave(now, link.request);
            if link.is_asked {
                self.send(life, link.host, None, &Body::Stop { call: link.call });
            }
        }
        let order = ordered.order.order;
        for (chunk, _) in coming.iter().enumerate().filter(|(_, coming)| !coming.has_ended) {
            let came = Arrival::Failed(FetchFailure::Broken);
            self.tell_soon(ordered.at, ordered.life, Event::FollowedCame { order, chunk, came });
        }
        self.tell_soon(ordered.at, ordered.life, Event::FollowEnded(order));
        self.exchange_wants(life);
    }
}

impl Coming {
    /// Takes a place for a piece of a block. Returns whether the piece lies within the block and is new.
    fn take(&mut self, to: &Destination, layers: &BlockLayers) -> bool {
        let &BlockLayers { block, offset, bytes, .. } = layers;
        let (Some(to), Some(pieces)) =
            (to.wanted.blocks.get(block as usize), self.pieces.get_mut(block as usize))
        else {
            return false;
        };
        let Some(end) = offset.checked_add(bytes).filter(|&end| end <= to.bytes && bytes > 0) else {
            return false;
        };
        let is_new = pieces.iter().all(|&(from, to)| end <= from || to <= offset);
        pieces.push((offset, end));
        is_new
    }
}

/// The result for a chunk of which every byte has come.
fn whole(to: &Destination, coming: &Coming, said: &[u64]) -> Arrival {
    let came = |pieces: &Vec<(u64, u64)>| pieces.iter().map(|(from, to)| to - from).sum::<u64>();
    let blocks = &to.wanted.blocks;
    if coming.pieces.iter().zip(blocks).any(|(pieces, to)| came(pieces) != to.bytes) {
        return Arrival::Failed(FetchFailure::Broken);
    }
    let sums = blocks.iter().zip(&to.memory).map(|(block, memory)| sums_of_place(block, memory));
    let checksums: Vec<_> = sums.collect();
    if checksums.iter().map(|sums| sums.whole).ne(said.iter().copied()) {
        return Arrival::Damaged;
    }
    Arrival::Here { checksums, pools: to.wanted.pools(), reads: 1, is_on_disk: false }
}

const MEMBER_DEADLINE: Duration = Duration::from_secs(5);
const MEMBER_PAUSE: Duration = Duration::from_millis(20);
