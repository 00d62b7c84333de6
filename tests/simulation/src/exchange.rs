//! The asking half of a node's exchange, over its real decisions: small questions, and fetched blocks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder_core::alarm::AlarmClock;
use larder_core::directory::Outgoing;
use larder_core::exchange::{BusyPause, Effect, PeerId, RequestId, Turn, Wanted as WantedBytes};
use larder_core::store::{Checksums, Offered, Wanted};
use larder_core::{Arrival, Event, FetchFailure, FetchOrder, OrderNumber};
use larder_node::arena::ExtentMemory;
use larder_protocol::peer::{
    Chunks, Class, Fetch, FetchedChunk, Followed, HeldChunk, OfferChunks, PeerRequest, PeerResponse,
    RetryAfter,
};
use larder_protocol::table::NodeNumber;

use crate::bytes::sums_of_bytes;
use crate::process::Own;
use crate::world::{At, Life, World};

/// The messages between peers.
#[derive(Debug, Clone)]
pub(crate) enum Body {
    Ask {
        call: u64,
        request: PeerRequest,
    },
    Answer {
        call: u64,
        response: PeerResponse,
    },
    /// The blocks of a chunk of a fetch.
    Blocks {
        call: u64,
        at: usize,
        blocks: Vec<Vec<u8>>,
    },
    /// Progress of a followed chunk, and the bytes of layers.
    Step {
        call: u64,
        followed: Followed,
        bytes: Vec<u8>,
    },
    /// The receiver has read what was sent so far.
    Read {
        call: u64,
        pieces: u64,
    },
    /// Nobody reads the answers to this call.
    Stop {
        call: u64,
    },
    /// Nothing more comes of the followed chunks.
    End {
        call: u64,
    },
}

/// The requests of a process to others.
#[derive(Default)]
pub(crate) struct Asking {
    calls: BTreeMap<u64, Call>,
    orders: BTreeMap<(u16, OrderNumber), Order>,
    batches: BTreeMap<u64, Batch>,
    pub(crate) follows: BTreeMap<u64, crate::follow::Following>,
    /// Number of packets that came, by host.
    came: BTreeMap<usize, u64>,
    alarm: AlarmClock,
}

/// The use of an answer.
#[derive(Debug)]
pub(crate) enum For {
    Nothing,
    Announce(Outgoing),
    Find(u64, Vec<u32>),
    /// The actor, the life of its store, and the offer.
    Offer(u16, u64, u64),
    Probe(u64),
    FollowProbe(u64),
    Take(At, u64, larder_core::TakeNumber),
}

struct Call {
    peer: PeerId,
    host: usize,
    request: PeerRequest,
    asked_at: Duration,
    before: u64,
    busy: Option<RetryAfter>,
    pause: BusyPause,
    then: For,
}

/// Chunks that an actor wants from a peer.
#[derive(Debug)]
pub(crate) struct Ordered {
    pub(crate) at: At,
    pub(crate) life: u64,
    pub(crate) order: FetchOrder,
    pub(crate) chunks: Vec<Destination>,
}

/// A chunk that is to come, and the memory for it.
#[derive(Debug, Clone)]
pub(crate) struct Destination {
    pub(crate) wanted: Wanted,
    pub(crate) memory: Vec<Arc<ExtentMemory>>,
}

struct Order {
    ordered: Ordered,
    came: Vec<Option<Arrival>>,
    batches: Vec<u64>,
}

/// Some chunks of an order, which share a stream.
struct Batch {
    order: (u16, OrderNumber),
    positions: Vec<usize>,
    peer: PeerId,
    host: usize,
    request: RequestId,
    before: u64,
    said: Option<Vec<FetchedChunk>>,
    next: usize,
    /// The call that asks for it.
    call: u64,
}

impl Body {
    /// The call of a message.
    pub(crate) fn call(&self) -> u64 {
        match *self {
            Self::Ask { call, .. }
            | Self::Answer { call, .. }
            | Self::Blocks { call, .. }
            | Self::Step { call, .. }
            | Self::Read { call, .. }
            | Self::Stop { call }
            | Self::End { call } => call,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Ask { .. } | Self::Answer { .. } => 300,
            Self::Blocks { blocks, .. } => blocks.iter().map(|block| block.len() as u64).sum::<u64>() + 40,
            Self::Step { bytes, .. } => bytes.len() as u64 + 100,
            Self::Read { .. } | Self::Stop { .. } | Self::End { .. } => 40,
        }
    }
}

impl Asking {
    /// The number of requests under way, for the check at the end.
    pub(crate) fn under_way(&self) -> usize {
        self.calls.len() + self.orders.len() + self.batches.len() + self.follows.len()
    }

    /// Calls, orders, batches and follows that are under way.
    pub(crate) fn left(&self) -> [u64; 4] {
        [self.calls.len(), self.orders.len(), self.batches.len(), self.follows.len()].map(|len| len as u64)
    }

    pub(crate) fn came(&self, host: usize) -> u64 {
        self.came.get(&host).copied().unwrap_or(0)
    }

    pub(crate) fn hears(&mut self, host: usize) {
        *self.came.entry(host).or_default() += 1;
    }
}

impl World {
    /// Performs the exchange's effects, and sets its alarms.
    pub(crate) fn exchange_wants(&mut self, life: Life) {
        while let Some(process) = self.process(life) {
            let Some(effect) = process.exchange.poll_effect() else { break };
            self.coverage.note(crate::coverage::exchanged(&effect));
            match effect {
                Effect::Turn(request, turn) => self.turn(life, request, turn),
                Effect::Probe { peer, probe, deadline } => {
                    self.begin_call(life, peer, PeerRequest::Ping, deadline, For::Probe(probe));
                }
                Effect::Silent(peer) => {
                    self.process(life).map(|process| process.silent.insert(peer.node));
                }
                Effect::Answers(peer) => {
                    self.process(life).map(|process| process.silent.remove(&peer.node));
                }
                Effect::Gone(peer) => {
                    self.process(life).map(|process| process.silent.remove(&peer.node));
                    self.connection_is_gone(life, peer);
                }
            }
        }
        let Some(process) = self.process(life) else { return };
        if let Some(due) = process.asking.alarm.set(process.exchange.next_deadline()) {
            let after = due.saturating_sub(self.local(life.host)) + Duration::from_micros(1);
            self.plan_local(life, after, Own::ExchangeAlarm(due));
        }
    }

    pub(crate) fn exchange_alarm(&mut self, life: Life, due: Duration) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        if !process.asking.alarm.rings(due) {
            return;
        }
        process.exchange.tick(now);
        self.exchange_wants(life);
    }

    /// Ends all requests to a peer.
    fn connection_is_gone(&mut self, life: Life, peer: PeerId) {
        self.stop_asking(life, |of, _| of == peer);
    }

    /// Ends all requests to some peers at some hosts.
    pub(crate) fn stop_asking(&mut self, life: Life, of: impl Fn(PeerId, usize) -> bool) {
        let Some(process) = self.process(life) else { return };
        let Asking { calls, batches, follows, .. } = &process.asking;
        let calls: Vec<u64> =
            calls.iter().filter(|(_, call)| of(call.peer, call.host)).map(|(&call, _)| call).collect();
        let batches: Vec<u64> =
            // The exchange itself reports that a batch waits for its turn in vain.
            batches.iter().filter(|(_, batch)| batch.call != 0 && of(batch.peer, batch.host)).map(|(&batch, _)| batch).collect();
        let follows: Vec<u64> = follows
            .iter()
            .filter(|(_, follow)| follow.peer().is_some_and(|(peer, host)| of(peer, host)))
            .map(|(&id, _)| id)
            .collect();
        calls.into_iter().for_each(|call| self.finish_call(life, call, None));
        batches.into_iter().for_each(|batch| self.batch_fails(life, batch));
        follows.into_iter().for_each(|follow| self.end_follow(life, follow));
    }

    /// The host of a life of a peer.
    pub(crate) fn host_of(&mut self, life: Life, peer: PeerId) -> Option<usize> {
        let process = self.process(life)?;
        let member = process.exchange.table().member(peer.node)?;
        Some(usize::from(member.peer.port()) - 1)
    }

    /// Sends a small request to a node.
    pub(crate) fn ask_peer(
        &mut self,
        life: Life,
        node: NodeNumber,
        request: PeerRequest,
        deadline: Duration,
        then: For,
    ) {
        let Some(process) = self.process(life) else { return };
        match process.exchange.peer(node) {
            Ok(peer) => self.begin_call(life, peer, request, deadline, then),
            Err(_) => self.answer_to(life, PeerId { node, incarnation: 0 }, then, None),
        }
    }

    /// An actor offers a peer chunks that it is evicting.
    pub(crate) fn offer(&mut self, life: Life, actor: u16, store: u64, offered: Offered) {
        let Offered { number, to, fingerprint, worth, chunks } = offered;
        let request = PeerRequest::Offer(OfferChunks { device: actor, fingerprint, worth: worth.0, chunks });
        self.ask_peer(life, to, request, OFFER_DEADLINE, For::Offer(actor, store, number));
    }

    fn begin_call(&mut self, life: Life, peer: PeerId, request: PeerRequest, deadline: Duration, then: For) {
        let (number, asked_at) = (self.next_number(), self.local(life.host));
        let Some(host) = self.host_of(life, peer) else {
            return self.answer_to(life, peer, then, None);
        };
        let Some(process) = self.process(life) else { return };
        let before = process.asking.came(host);
        let (busy, pause) = (None, BusyPause::default());
        let call = Call { peer, host, request: request.clone(), asked_at, before, busy, pause, then };
        process.asking.calls.insert(number, call);
        self.send(life, host, None, &Body::Ask { call: number, request });
        self.plan_local(life, deadline, Own::CallLate(number));
    }

    pub(crate) fn call_again(&mut self, life: Life, number: u64) {
        let Some(process) = self.process(life) else { return };
        let Some(call) = process.asking.calls.get(&number) else { return };
        let (host, request) = (call.host, call.request.clone());
        self.send(life, host, None, &Body::Ask { call: number, request });
    }

    pub(crate) fn call_is_late(&mut self, life: Life, number: u64) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let Some(call) = process.asking.calls.get(&number) else { return };
        let was_heard = process.asking.came(call.host) > call.before;
        let (peer, asked_at, busy) = (call.peer, call.asked_at, call.busy);
        if let Some(retry) = busy {
            return self.finish_call(life, number, Some(PeerResponse::Busy(retry)));
        }
        if !matches!(call.then, For::Probe(_)) {
            process.exchange.is_late(now, peer, asked_at, was_heard);
        }
        self.finish_call(life, number, None);
        self.exchange_wants(life);
    }

    fn finish_call(&mut self, life: Life, number: u64, answer: Option<PeerResponse>) {
        let Some(process) = self.process(life) else { return };
        let Some(call) = process.asking.calls.remove(&number) else { return };
        let was_heard = process.asking.came(call.host) > call.before;
        if let For::Probe(probe) = call.then {
            let now = self.local(life.host);
            let answers = answer == Some(PeerResponse::Done);
            if let Some(process) = self.process(life) {
                process.exchange.probed(now, call.peer, probe, answers, was_heard);
            }
            return self.exchange_wants(life);
        }
        self.answer_to(life, call.peer, call.then, answer);
    }

    fn answer_to(&mut self, life: Life, peer: PeerId, then: For, answer: Option<PeerResponse>) {
        match then {
            For::Announce(outgoing) => {
                let answers = match answer {
                    Some(PeerResponse::Announced(answers)) => answers,
                    _ => Vec::new(),
                };
                self.announced(life, &outgoing, answers);
            }
            For::Find(number, positions) => {
                self.home_answers(life, peer.node, (number, positions), answer);
            }
            For::Offer(actor, store, offer) => {
                let wanted = match answer {
                    Some(PeerResponse::Wanted(wanted)) => wanted,
                    _ => Vec::new(),
                };
                self.tell_in_life(At { life, actor }, store, Event::OfferEnded { offer, wanted });
            }
            For::Take(at, store, take) => self.take_answered(at, store, take, answer),
            For::FollowProbe(follow) => self.follow_probed(life, follow, answer.is_some()),
            For::Nothing | For::Probe(_) => {}
        }
    }

    /// A peer answered.
    pub(crate) fn answered(&mut self, life: Life, number: u64, response: PeerResponse) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        if let PeerResponse::Room(room) = response {
            let Asking { calls, batches, .. } = &process.asking;
            let batch = batches.values().find(|batch| batch.call == number).map(|batch| batch.peer);
            let peer = calls.get(&number).map(|call| call.peer).or(batch);
            for actor in &mut process.actors {
                peer.into_iter().for_each(|peer| actor.core.neighbour_says(now, peer.node, room));
            }
            return;
        }
        if let Some(call) = process.asking.calls.get_mut(&number) {
            if let PeerResponse::Busy(retry) = response {
                call.busy = Some(retry);
                let pause = process.exchange.pause(now, &mut call.pause, retry, Duration::MAX);
                return self.plan_local(life, pause.unwrap_or_default(), Own::CallAgain(number));
            }
            return self.finish_call(life, number, Some(response));
        }
        let batch = process.asking.batches.iter().find(|(_, batch)| batch.call == number);
        if let Some((&batch, _)) = batch {
            return self.batch_answered(life, batch, response);
        }
        self.follow_answered(life, number, response);
    }

    /// An actor wants chunks from a peer.
    pub(crate) fn order(&mut self, life: Life, ordered: Ordered) {
        let now = self.local(life.host);
        let key = (ordered.at.actor, ordered.order.order);
        let FetchOrder { holder, tenant, deadline, has_others, class, .. } = ordered.order;
        let chunks = ordered.chunks.len();
        let Some(process) = self.process(life) else { return };
        let peer = process.exchange.peer(holder.node);
        let came = vec![None; chunks];
        let sizes: Vec<u64> = ordered.chunks.iter().map(Destination::bytes).collect();
        process.asking.orders.insert(key, Order { ordered, came, batches: Vec::new() });
        let host = peer.ok().and_then(|peer| self.host_of(life, peer));
        let (Ok(peer), Some(host)) = (peer, host) else { return self.finish_order(life, key) };
        let Some(process) = self.process(life) else { return };
        let firsts = process.exchange.batches(sizes.iter().copied());
        let ends: Vec<usize> = firsts.iter().copied().skip(1).chain([chunks]).collect();
        for (&first, end) in firsts.iter().zip(ends) {
            let number = self.next_number();
            let bytes = sizes[first..end].iter().sum();
            let Some(process) = self.process(life) else { return };
            let wanted = WantedBytes { tenant, bytes, class, deadline, has_others };
            let request = process.exchange.fetch(now, peer, wanted);
            let batch = Batch {
                order: key,
                positions: (first..end).collect(),
                peer,
                host,
                request,
                before: 0,
                said: None,
                next: 0,
                call: 0,
            };
            process.asking.batches.insert(number, batch);
            if let Some(order) = process.asking.orders.get_mut(&key) {
                order.batches.push(number);
            }
        }
        self.exchange_wants(life);
    }

    /// A batch may be sent now, or its peer cannot be asked any more.
    fn turn(&mut self, life: Life, request: RequestId, Turn { class, until, .. }: Turn) {
        let call = self.next_number();
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let asking = &mut process.asking;
        let found = asking.batches.iter_mut().find(|(_, batch)| batch.request == request);
        let Some((&number, batch)) = found else { return };
        let Some(until) = until else { return self.batch_fails(life, number) };
        batch.before = asking.came.get(&batch.host).copied().unwrap_or(0);
        (batch.call, batch.said, batch.next) = (call, None, 0);
        let host = batch.host;
        let Some(Order { ordered, .. }) = asking.orders.get(&batch.order) else { return };
        let hashes = batch.positions.iter().map(|&at| ordered.chunks[at].wanted.chunk.hash).collect();
        let first = &ordered.chunks[batch.positions[0]].wanted;
        let chunks =
            Chunks { device: ordered.order.holder.device, fingerprint: ordered.order.fingerprint, hashes };
        let block_bytes = first.blocks.iter().map(|block| block.bytes).collect();
        let request = PeerRequest::Fetch(Fetch { chunks, block_bytes, class });
        self.send(life, host, None, &Body::Ask { call, request });
        self.plan_local(life, until.saturating_sub(now), Own::BatchLate(call));
    }

    fn batch_answered(&mut self, life: Life, number: u64, response: PeerResponse) {
        let Some(process) = self.process(life) else { return };
        let Some(batch) = process.asking.batches.get_mut(&number) else { return };
        let peer = batch.peer;
        match response {
            PeerResponse::Fetched(said) if said.len() == batch.positions.len() && batch.said.is_none() => {
                batch.said = Some(said);
                process.exchange.heard(peer);
                self.advance_batch(life, number);
            }
            PeerResponse::Busy(retry) if batch.said.is_none() => {
                let chunks = batch.positions.len();
                batch.said = Some(vec![FetchedChunk::Busy(retry); chunks]);
                process.exchange.heard(peer);
                self.advance_batch(life, number);
            }
            // A second answer.
            PeerResponse::Fetched(_) | PeerResponse::Busy(_) => {}
            _ => self.batch_fails(life, number),
        }
    }

    /// Notes the chunks that need no bytes, up to the next chunk whose blocks come.
    fn advance_batch(&mut self, life: Life, number: u64) {
        let Some(process) = self.process(life) else { return };
        let asking = &mut process.asking;
        let Some(batch) = asking.batches.get_mut(&number) else { return };
        let Some(order) = asking.orders.get_mut(&batch.order) else { return };
        let Some(said) = &batch.said else { return };
        while let Some(chunk) = said.get(batch.next) {
            let arrival = match chunk {
                FetchedChunk::Held(_) => return,
                FetchedChunk::NotHeld => Arrival::NotHeld,
                FetchedChunk::Busy(retry) => Arrival::Busy { retry_after_ms: retry.retry_after_ms },
            };
            order.came[batch.positions[batch.next]] = Some(arrival);
            batch.next += 1;
        }
        self.batch_has_come(life, number);
    }

    /// Blocks of a chunk have come.
    pub(crate) fn blocks_came(&mut self, life: Life, from: usize, call: u64, at: usize, blocks: &[Vec<u8>]) {
        let Some(process) = self.process(life) else { return };
        let asking = &mut process.asking;
        let found = asking.batches.iter_mut().find(|(_, batch)| batch.call == call);
        let Some((&number, batch)) = found else {
            return self.send(life, from, None, &Body::Stop { call });
        };
        let Some(FetchedChunk::Held(held)) =
            batch.said.as_ref().and_then(|said| said.get(batch.next)).cloned()
        else {
            return;
        };
        if at != batch.next {
            return;
        }
        let position = batch.positions[at];
        batch.next += 1;
        let (peer, key) = (batch.peer, batch.order);
        let Some(order) = asking.orders.get_mut(&key) else { return };
        let arrival = receive(&order.ordered.chunks[position], &held, blocks);
        let is_damaged = arrival == Arrival::Damaged;
        let is_malformed = matches!(arrival, Arrival::Failed(_));
        order.came[position] = Some(arrival);
        let chunks = Chunks {
            device: order.ordered.order.holder.device,
            fingerprint: order.ordered.order.fingerprint,
            hashes: vec![order.ordered.chunks[position].wanted.chunk.hash],
        };
        process.exchange.heard(peer);
        if is_damaged {
            self.saw_damage(life, from);
            self.ask_peer(life, peer.node, PeerRequest::Damaged(chunks), REPORT_DEADLINE, For::Nothing);
        }
        self.send(life, from, None, &Body::Read { call, pieces: at as u64 + 1 });
        if is_malformed {
            return self.batch_fails(life, number);
        }
        self.advance_batch(life, number);
    }

    /// A whole batch has come. If allowed, asks again for the chunks for which the holder was too busy.
    fn batch_has_come(&mut self, life: Life, number: u64) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let asking = &mut process.asking;
        let Some(batch) = asking.batches.get_mut(&number) else { return };
        let Some(order) = asking.orders.get(&batch.order) else { return };
        let (mut busy, mut longest_ms) = (Vec::new(), 0);
        for &at in &batch.positions {
            if let Some(Arrival::Busy { retry_after_ms }) = order.came[at] {
                busy.push(at);
                longest_ms = retry_after_ms.max(longest_ms);
            }
        }
        if !busy.is_empty() {
            let bytes = busy.iter().map(|&at| order.ordered.chunks[at].bytes()).sum();
            let retry = RetryAfter { retry_after_ms: longest_ms };
            let request = batch.request;
            batch.positions = busy;
            batch.call = 0;
            let again = process.exchange.is_busy(now, request, bytes, retry);
            self.exchange_wants(life);
            if again {
                return;
            }
        }
        self.leave_batch(life, number);
    }

    pub(crate) fn batch_is_late(&mut self, life: Life, call: u64) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let asking = &mut process.asking;
        let Some((&number, batch)) = asking.batches.iter().find(|(_, batch)| batch.call == call) else {
            return;
        };
        let was_heard = asking.came(batch.host) > batch.before;
        let (request, host) = (batch.request, batch.host);
        process.exchange.fetch_is_late(now, request, was_heard);
        self.send(life, host, None, &Body::Stop { call });
        self.leave_batch(life, number);
    }

    /// Notes that nothing more comes of a batch.
    fn batch_fails(&mut self, life: Life, number: u64) {
        self.leave_batch(life, number);
    }

    fn leave_batch(&mut self, life: Life, number: u64) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let Some(batch) = process.asking.batches.remove(&number) else { return };
        process.exchange.leave(now, batch.request);
        let key = batch.order;
        let is_last = process.asking.orders.get_mut(&key).is_some_and(|order| {
            order.batches.retain(|&other| other != number);
            order.batches.is_empty()
        });
        self.exchange_wants(life);
        if is_last {
            self.finish_order(life, key);
        }
    }

    fn finish_order(&mut self, life: Life, key: (u16, OrderNumber)) {
        let Some(process) = self.process(life) else { return };
        let Some(Order { ordered, came, .. }) = process.asking.orders.remove(&key) else { return };
        let came: Vec<Arrival> =
            came.into_iter().map(|came| came.unwrap_or(Arrival::Failed(FetchFailure::Broken))).collect();
        came.iter().for_each(|came| self.coverage.note(crate::coverage::arrival(came)));
        self.tell_soon(ordered.at, ordered.life, Event::OrderEnded { order: ordered.order.order, came });
    }

    /// Stops an order that nobody waits for any more.
    pub(crate) fn cancel_order(&mut self, life: Life, actor: u16, order: OrderNumber) {
        let Some(process) = self.process(life) else { return };
        let follow = process.asking.follows.iter().find(|(_, follow)| follow.is_order(actor, order));
        if let Some((&follow, _)) = follow {
            return self.end_follow(life, follow);
        }
        let Some(found) = process.asking.orders.get(&(actor, order)) else { return };
        for batch in found.batches.clone() {
            let Some(process) = self.process(life) else { return };
            let Some((call, host)) = process.asking.batches.get(&batch).map(|batch| (batch.call, batch.host))
            else {
                continue;
            };
            self.send(life, host, None, &Body::Stop { call });
            self.leave_batch(life, batch);
        }
    }

    /// An engine is blocked until an order is answered.
    pub(crate) fn hurry(&mut self, life: Life, actor: u16, order: OrderNumber) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let Some(found) = process.asking.orders.get_mut(&(actor, order)) else { return };
        found.ordered.order.class = Class::Decode;
        for number in found.batches.clone() {
            if let Some(batch) = process.asking.batches.get(&number) {
                process.exchange.change_class(now, batch.request, Class::Decode);
            }
        }
        self.exchange_wants(life);
    }

    /// A fault ends the exchange's knowledge of its peers.
    pub(crate) fn exchange_panics(&mut self, host: usize) {
        let Some(process) = &mut self.hosts[host].process else { return };
        let life = process.life;
        process.exchange.begin_anew();
        self.exchange_wants(life);
    }
}

impl Destination {
    pub(crate) fn bytes(&self) -> u64 {
        self.wanted.blocks.iter().map(|block| block.bytes).sum()
    }
}

/// Puts the blocks of a chunk into their places.
fn receive(to: &Destination, held: &HeldChunk, blocks: &[Vec<u8>]) -> Arrival {
    let coming =
        || to.wanted.blocks.iter().zip(&to.memory).filter(|(to, _)| held.pools.has(to.key.pool.into()));
    let said = held.blocks.iter().map(|block| block.bytes);
    let found = blocks.iter().map(|block| block.len() as u64);
    if said.clone().ne(coming().map(|(to, _)| to.bytes)) || said.ne(found) {
        return Arrival::Failed(FetchFailure::Broken);
    }
    let (mut checksums, mut is_right) = (Vec::<Checksums>::new(), true);
    for (((to, memory), said), bytes) in coming().zip(&held.blocks).zip(blocks) {
        if memory.copy_in(to.place.offset, bytes).is_err() {
            return Arrival::Failed(FetchFailure::Broken);
        }
        let sums = sums_of_bytes(&to.key, bytes, to.range_bytes);
        is_right &= sums.whole == said.checksum;
        checksums.push(sums);
    }
    if !is_right {
        return Arrival::Damaged;
    }
    let HeldChunk { reads, is_on_disk, pools, .. } = *held;
    Arrival::Here { checksums, pools, reads, is_on_disk }
}

const REPORT_DEADLINE: Duration = Duration::from_secs(2);

/// Time in which a peer must choose chunks of an offer.
const OFFER_DEADLINE: Duration = Duration::from_millis(500);
