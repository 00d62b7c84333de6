//! Follows between nodes: layers come from the writer's node as its engine hands them over.
//!
//! The reader takes room for all missing chunks, or for none. It asks once, and the writer's node sends each layer as soon as
//! it is in place: a layer costs half a round trip, while a fetch of each layer would cost one and a half. Each message names its
//! order and has a number. Each piece of a block is summed as it is written to its slot. No byte is written twice, since
//! a reader here may be reading it. A whole chunk's blocks must have the checksums of the commit. These streams do not pass
//! the gate of a peer: they live as long as a prefill, and would take the gate's few streams from fetches. Every second the
//! reader asks the writer's node whether it is there.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use larder_core::exchange::{Arriving, BusyPause, FOLLOW_PROBE, NoPeer};
use larder_core::store::{Checksums, Ranges};
use larder_core::{Arrival, Event, FetchFailure, LayersArrived};
use larder_net::quic::{Connection, MessageError, read_message, write_message};
use larder_net::trace::Trace;
use larder_protocol::PoolSet;
use larder_protocol::checksum::{RangeChecksum, Stores, block_checksum, block_ranges, layers_checksum};
use larder_protocol::identity::Identity;
use larder_protocol::limits::MAX_LAYERS;
use larder_protocol::peer::{
    BlockLayers, Chunks, FollowChunks, FollowPools, FollowStep, Followed, PeerRequest, PeerResponse,
    RetryAfter,
};
use quinn::{RecvStream, SendStream, VarInt};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{sleep, timeout};

use super::connections::{AskedAgain, InUse, Link};
use super::peers::Peers;
use super::place::{AwaitsMember, InLine};
use super::send::order::{BEFORE_BLOCKS, SendOrder, SendTurns};
use super::serve::{BUSY_RETRY_MS, SEND_DEADLINE, STALL_DEADLINE, Server};
use super::{AskFollow, FetchChunk, FollowOrder, PeerNews, PeerStep};
use crate::arena::Destination;
use crate::watched::here;

/// Carries a follow out, and reports each chunk's news. After the report of a chunk's end, nothing writes to its slots.
pub(super) async fn carry_out(peers: Peers, mut order: FollowOrder) {
    here("follow");
    let chunks: Vec<Coming> = order.chunks.iter().map(Coming::new).collect();
    let coming = RefCell::new(chunks);
    let news = order.news.clone();
    let cancelled = std::mem::replace(&mut order.cancelled, tokio::sync::oneshot::channel().1);
    let failure = tokio::select! {
        failure = follow(&peers, &order, &coming) => failure,
        // An error: the actor's life has ended. The memory is needed for the next.
        _ = cancelled => FetchFailure::Deadline,
        () = news.closed() => FetchFailure::Deadline,
    };
    for (chunk, coming) in coming.take().into_iter().enumerate() {
        if !coming.has_ended {
            tell(&order, chunk, Arrival::Failed(failure));
        }
    }
}

/// The received part of a chunk.
struct Coming {
    has_ended: bool,
    /// For each block, the start and end of each piece.
    pieces: Vec<Vec<(u64, u64)>>,
}

impl Coming {
    fn new(chunk: &FetchChunk) -> Self {
        Self { has_ended: false, pieces: vec![Vec::new(); chunk.blocks.len()] }
    }

    /// Notes a piece of a block. Returns whether the piece has bytes, lies within the block, and is new. A piece has at least one
    /// layer, so a block has at most `MAX_LAYERS` pieces.
    fn take(&mut self, blocks: &[Destination], layers: &BlockLayers) -> bool {
        let &BlockLayers { block, offset, bytes, .. } = layers;
        let (Some(to), Some(pieces)) = (blocks.get(block as usize), self.pieces.get_mut(block as usize))
        else {
            return false;
        };
        let Some(end) = offset.checked_add(bytes).filter(|&end| end <= to.bytes && bytes > 0) else {
            return false;
        };
        let is_new = pieces.len() < MAX_LAYERS as usize
            && pieces.iter().all(|&(from, to)| end <= from || to <= offset);
        pieces.push((offset, end));
        is_new
    }

    /// Whether all of every block has come.
    fn is_whole(&self, blocks: &[Destination]) -> bool {
        let came = |pieces: &Vec<(u64, u64)>| pieces.iter().map(|(from, to)| to - from).sum::<u64>();
        self.pieces.iter().zip(blocks).all(|(pieces, to)| came(pieces) == to.bytes)
    }
}

fn tell(order: &FollowOrder, chunk: usize, came: Arrival) {
    // An error: the actor stopped, and its arena goes.
    let _ = order.news.send(Event::FollowedCame { order: order.ordered.order, chunk, came });
}

/// Asks and receives until every chunk has ended; returns why some chunks did not come.
async fn follow(peers: &Peers, order: &FollowOrder, coming: &RefCell<Vec<Coming>>) -> FetchFailure {
    let link = match link_to(peers, order).await {
        Ok(link) => link,
        Err(failure) => return failure,
    };
    let Some(place) = InLine::of_follow(peers, &link, order.ordered.tenant) else {
        return FetchFailure::Full;
    };
    tokio::select! {
        received = receive_all(peers, order, &link, coming) => received.err().unwrap_or(FetchFailure::Broken),
        () = until_silent(peers, &link, &place) => FetchFailure::Unreachable,
    }
}

/// The link to the writer's node, which may have joined so lately that this node does not know of it yet.
async fn link_to(peers: &Peers, order: &FollowOrder) -> Result<Rc<Link>, FetchFailure> {
    let (writer, arriving) = (&order.ordered.writer.node, Arriving::new(peers.now()));
    let mut place = None;
    loop {
        let node = peers.number_of(writer).ok_or(NoPeer::NotAMember);
        match node.and_then(|node| peers.link(node)) {
            Ok(link) => return Ok(link),
            Err(error) => match arriving.pause(peers.now(), error) {
                Some(pause) => {
                    if place.is_none() {
                        place =
                            Some(AwaitsMember::of(peers, order.ordered.tenant).ok_or(FetchFailure::Full)?);
                    }
                    sleep(pause).await;
                }
                None => {
                    if let Some(more) = peers.says("follow") {
                        tracing::warn!(node = writer, %error, more, "this node cannot follow a writer on another node");
                    }
                    return Err(FetchFailure::Unreachable);
                }
            },
        }
    }
}

/// Asks the node whether it is there, again and again, as long as the follow goes on.
async fn until_silent(peers: &Peers, link: &Link, place: &InLine) {
    let mut answers = true;
    while place.follows_on(answers) {
        sleep(FOLLOW_PROBE).await;
        let answer = peers.ask(link.peer.node, &PeerRequest::Ping, FOLLOW_PROBE, &Trace::default()).await;
        answers = answer.is_ok();
    }
}

async fn receive_all(
    peers: &Peers,
    order: &FollowOrder,
    link: &Rc<Link>,
    coming: &RefCell<Vec<Coming>>,
) -> Result<(), FetchFailure> {
    // The connection stays in use until all chunks have ended.
    let (mut receive, mut first, _connection) = ask_to_follow(peers, order, link).await?;
    let mut last_message = 0;
    while coming.borrow().iter().any(|coming| !coming.has_ended) {
        let message = match first.take() {
            Some(message) => Ok(Some(message)),
            None => read_message(&mut receive).await,
        };
        let followed = match message {
            Ok(Some(PeerResponse::Followed(followed))) => followed,
            Ok(Some(_)) => return Err(FetchFailure::Malformed),
            Ok(None) | Err(_) => return Err(FetchFailure::Broken),
        };
        let is_next = followed.order == order.ordered.order.0 && followed.message == last_message + 1;
        if !is_next || followed.chunk as usize >= order.chunks.len() {
            tracing::warn!(
                node = order.ordered.writer.node,
                order = order.ordered.order.0,
                ?followed,
                "a node sent bytes that were not requested"
            );
            return Err(FetchFailure::Malformed);
        }
        last_message = followed.message;
        peers.heard(link);
        receive_one(peers, order, link, &mut receive, followed, coming).await?;
    }
    Ok(())
}

/// Asks the writer's node, again and again while it is busy, until the reader's patience ends. Returns the stream, its first
/// message, and its connection.
async fn ask_to_follow(
    peers: &Peers,
    order: &FollowOrder,
    link: &Rc<Link>,
) -> Result<(RecvStream, Option<PeerResponse>, InUse), FetchFailure> {
    let over = peers.now() + Duration::from_millis(order.ordered.patience_ms);
    let (mut pause, mut again) = (BusyPause::default(), AskedAgain::default());
    loop {
        let connection = peers.connection(link).await.ok_or(FetchFailure::Unreachable)?;
        match ask_once(order, &connection).await {
            Ok((_, Some(PeerResponse::Busy(retry)))) => {
                sleep(peers.pause(&mut pause, retry, over).ok_or(FetchFailure::Full)?).await;
            }
            Ok((receive, first)) => return Ok((receive, first, connection)),
            Err(_) if again.may(&connection) => {}
            Err(_) => return Err(FetchFailure::Broken),
        }
    }
}

/// Asks to follow, and reads the first message.
async fn ask_once(
    order: &FollowOrder,
    connection: &Connection,
) -> Result<(RecvStream, Option<PeerResponse>), MessageError> {
    let (mut send, mut receive) = connection.quic().open_bi().await.map_err(|_| MessageError::Cut)?;
    let hashes = order.chunks.iter().map(|chunk| chunk.hash).collect();
    let chunks = FollowChunks {
        chunks: Chunks {
            device: order.ordered.writer.device,
            fingerprint: order.ordered.fingerprint,
            hashes,
        },
        order: order.ordered.order.0,
        attempt: order.ordered.attempt,
        patience_ms: order.ordered.patience_ms,
    };
    let request = PeerRequest::follow(chunks, order.ordered.pools.clone());
    if connection.version() < request.since() {
        tracing::warn!(node = order.ordered.writer.node, version = %connection.version(), "this node cannot follow a writer on a node of an earlier version: upgrade that node");
        return Err(MessageError::Cut);
    }
    write_message(&mut send, &request).await?;
    send.finish().map_err(|_| MessageError::Cut)?;
    let first = read_message(&mut receive).await?;
    Ok((receive, first))
}

/// Takes one message, and the bytes behind it.
async fn receive_one(
    peers: &Peers,
    order: &FollowOrder,
    link: &Link,
    receive: &mut RecvStream,
    Followed { message, chunk, step, .. }: Followed,
    coming: &RefCell<Vec<Coming>>,
) -> Result<(), FetchFailure> {
    let (chunk, to) = (chunk as usize, &order.chunks[chunk as usize]);
    let has_ended = coming.borrow()[chunk].has_ended;
    let ended = match step {
        FollowStep::Layers(layers) => {
            let BlockLayers { block, offset, bytes, checksum } = layers;
            let may_write = !has_ended && coming.borrow_mut()[chunk].take(&to.blocks, &layers);
            if !may_write && !has_ended {
                return Err(FetchFailure::Malformed);
            }
            // Bytes for a chunk that was given up are read and forgotten: the chunk's slots are not ours any more.
            let place = to.blocks.get(block as usize).filter(|_| may_write);
            let sum = receive_piece(receive, place, &layers).await?;
            let is_right =
                place.is_none_or(|to| layers_checksum(&to.key, &(offset..offset + bytes), sum) == checksum);
            peers.metrics().received_bytes.with_label_values(&[peers.metrics_name(link)]).inc_by(bytes);
            tracing::debug!(order = order.ordered.order.0, number = message, chunk = %to.hash, block, offset, bytes, "layers came");
            match is_right {
                _ if has_ended => None,
                true => {
                    let layers = LayersArrived { block: block as usize, offset, bytes, checksum: sum };
                    let _ = order.news.send(Event::LayersCame { order: order.ordered.order, chunk, layers });
                    None
                }
                false => Some(Arrival::Damaged),
            }
        }
        // The chunk's slots are not ours any more.
        FollowStep::Whole(_) | FollowStep::Lost if has_ended => None,
        FollowStep::Whole(checksums) => {
            tracing::debug!(order = order.ordered.order.0, number = message, chunk = %to.hash, "a chunk is whole");
            let is_whole = coming.borrow()[chunk].is_whole(&to.blocks);
            Some(if is_whole { verified(to, &checksums) } else { Arrival::Failed(FetchFailure::Malformed) })
        }
        FollowStep::Lost => {
            tracing::debug!(order = order.ordered.order.0, number = message, chunk = %to.hash, "a chunk is lost");
            Some(Arrival::NotHeld)
        }
    };
    if let Some(fetched) = ended {
        if fetched == Arrival::Damaged {
            let (device, fingerprint, hashes) =
                (order.ordered.writer.device, order.ordered.fingerprint, vec![to.hash]);
            peers.tell_damaged(link, Chunks { device, fingerprint, hashes });
        }
        peers.metrics().fetched(&fetched);
        coming.borrow_mut()[chunk].has_ended = true;
        tell(order, chunk, fetched);
    }
    Ok(())
}

/// Writes a piece of a block into its place, or drops it if there is no place. Returns the piece's checksum.
async fn receive_piece(
    receive: &mut RecvStream,
    to: Option<&Destination>,
    &BlockLayers { offset, bytes, .. }: &BlockLayers,
) -> Result<u64, FetchFailure> {
    let mut sum = RangeChecksum::new();
    let mut at = 0;
    while at < bytes {
        let most = usize::try_from(bytes - at).unwrap_or(usize::MAX);
        let piece = receive.read_chunk(most, true).await.map_err(|_| FetchFailure::Broken)?;
        let piece: Bytes = piece.ok_or(FetchFailure::Malformed)?.bytes;
        match to {
            Some(to) => to
                .memory
                .copy_in_summed(to.offset + offset + at, &piece, Stores::Cached, &mut sum)
                .map_err(|_| FetchFailure::Full)?,
            None => sum.update(&piece),
        }
        at += piece.len() as u64;
    }
    Ok(sum.finish())
}

/// The result for a complete chunk: the checksums of the received bytes must be those of the commit.
fn verified(chunk: &FetchChunk, said: &[u64]) -> Arrival {
    let sums: Option<Vec<Checksums>> = chunk.blocks.iter().map(sums_of).collect();
    let Some(checksums) = sums.filter(|sums| sums.iter().map(|sums| sums.whole).eq(said.iter().copied()))
    else {
        tracing::error!(chunk = %chunk.hash, "a node handed over other bytes than it committed: the bytes are dropped");
        return Arrival::Damaged;
    };
    let pools = chunk.blocks.iter().fold(PoolSet::default(), |pools, to| pools.with(to.key.pool.into()));
    Arrival::Here { checksums, pools, reads: 1, is_on_disk: false }
}

/// The checksums of a block in its slot.
fn sums_of(to: &Destination) -> Option<Checksums> {
    let ranges = block_ranges(to.bytes, to.range_bytes).map(|range| {
        let mut sum = RangeChecksum::new();
        to.memory.add_to(&mut sum, to.offset + range.start, range.end - range.start).ok()?;
        Some(sum.finish())
    });
    let ranges: Ranges = ranges.collect::<Option<_>>()?;
    Some(Checksums { whole: block_checksum(&to.key, &ranges), ranges })
}

impl Server {
    /// Sends a following node the chunks' news. Sent bytes stay leased until the last byte was acknowledged, or until the
    /// follower has acknowledged nothing for a while.
    pub(super) async fn tell_follower(
        &self,
        (connection, sends): (&Connection, &SendOrder),
        mut send: SendStream,
        FollowPools { chunks, pools }: FollowPools,
    ) {
        let FollowChunks { chunks: Chunks { device, fingerprint, hashes }, order, attempt, patience_ms } =
            chunks;
        let (news, mut told) = unbounded_channel();
        let mut open = hashes.len();
        let lease = match self.services.follow.get(usize::from(device)) {
            Some(actor) => {
                let ask = AskFollow { fingerprint, hashes, pools, attempt, patience_ms, news };
                actor.send(ask).await.ok().flatten()
            }
            None => None,
        };
        let Some(_lease) = lease else {
            let busy = PeerResponse::Busy(RetryAfter { retry_after_ms: BUSY_RETRY_MS });
            // An error: the asker went away, or does not read.
            if let Ok(Ok(())) = timeout(STALL_DEADLINE, write_message(&mut send, &busy)).await {
                let _ = send.finish();
            }
            return;
        };
        let stopped = send.stopped();
        let telling = async {
            let (mut turns, mut message) = (sends.join(), 0);
            while open > 0 {
                let Some(PeerNews { chunk, step }) = told.recv().await else { break };
                open -= usize::from(!matches!(step, PeerStep::Layers { .. }));
                message += 1;
                let sent = self.tell_step(
                    connection.peer(),
                    (&mut send, &mut turns),
                    Followed { order, message, chunk, step: said(&step) },
                    step,
                );
                if !sent.await {
                    let _ = send.reset(VarInt::from_u32(0));
                    return;
                }
            }
            let _ = send.finish();
            // The lease ends when the last byte has come.
            let acknowledged = timeout(SEND_DEADLINE, self.peers.mover().acknowledged(connection, &mut send));
            if acknowledged.await.ok().flatten().is_none() {
                let _ = send.reset(VarInt::from_u32(0));
            }
        };
        // The asker stops the stream when nobody follows any more.
        tokio::select! {
            () = telling => {}
            _ = stopped => {}
        }
    }

    async fn tell_step(
        &self,
        peer: &Identity,
        (send, turns): (&mut SendStream, &mut SendTurns<'_>),
        followed: Followed,
        step: PeerStep,
    ) -> bool {
        let Followed { order, message, chunk, .. } = followed;
        if !matches!(step, PeerStep::Layers { .. }) && send.set_priority(BEFORE_BLOCKS).is_err() {
            return false;
        }
        let said = timeout(STALL_DEADLINE, write_message(send, &PeerResponse::Followed(followed))).await;
        if !said.is_ok_and(|said| said.is_ok()) {
            return false;
        }
        let PeerStep::Layers { block, offset, bytes, .. } = step else {
            tracing::debug!(
                order,
                number = message,
                chunk,
                peer = &*peer.name,
                ?step,
                "told a follower of a chunk's end"
            );
            return true;
        };
        tracing::debug!(order, number = message, chunk, block, offset, peer = &*peer.name, "layers are sent");
        let peer = self.peers.mover().common.metrics_name(&peer.name);
        self.peers.metrics().sent_bytes.with_label_values(&[peer]).inc_by(bytes.len() as u64);
        self.peers.mover().write_while_read(send, turns, bytes).await.is_some()
    }
}

/// The message for a step.
fn said(step: &PeerStep) -> FollowStep {
    match step {
        &PeerStep::Layers { block, offset, ref bytes, checksum } => FollowStep::Layers(BlockLayers {
            block: block as u32,
            offset,
            bytes: bytes.len() as u64,
            checksum,
        }),
        PeerStep::Whole(checksums) => FollowStep::Whole(checksums.clone()),
        PeerStep::Lost => FollowStep::Lost,
    }
}
