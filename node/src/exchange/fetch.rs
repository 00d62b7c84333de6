//! Fetching: blocks of a peer, straight into their slots.

use std::cell::RefCell;
use std::rc::Rc;

use bytes::Bytes;
use futures_util::future::join_all;
use larder_core::exchange::{Turn, Wanted};
use larder_core::store::Checksums;
use larder_core::{Arrival, FetchFailure};
use larder_net::quic::{Connection, write_message};
use larder_net::trace::{SpanKind, Trace};
use larder_protocol::checksum::{RangeChecksum, Stores};
use larder_protocol::peer::{
    Chunks, Class, Fetch, FetchedChunk, HeldChunk, PeerRequest, PeerResponse, RetryAfter,
};
use quinn::RecvStream;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::awake::Waiting;
use super::connections::{AskedAgain, Link};
use super::metrics::{Counted, Stage};
use super::peers::{Peers, write_trace};
use super::place::InLine;
use super::rooms::read_answer;
use super::{FetchChunk, FetchOrder};
use crate::arena::Destination;
use crate::watched::here;

/// Carries an order out, and reports each chunk's result. After the report, nothing writes to the slots.
pub(super) async fn carry_out(peers: Peers, mut order: FetchOrder, done: oneshot::Sender<Vec<Arrival>>) {
    let mut done = done;
    let cancelled = order.cancelled.take();
    let cancelled = async {
        let is_cancelled = match cancelled {
            Some(cancelled) => cancelled.await.is_ok(),
            None => false,
        };
        if !is_cancelled {
            std::future::pending::<()>().await;
        }
    };
    let chunks = order.chunks.len();
    let metrics = peers.metrics().clone();
    let counted = Counted::new(&metrics.fetches_in_flight, chunks as i64);
    here("fetch");
    let came: Rc<RefCell<Vec<Option<Arrival>>>> = Rc::new(RefCell::new((0..chunks).map(|_| None).collect()));
    let link = peers.link(order.holder.node);
    let left = match &link {
        Err(_) => FetchFailure::Unreachable,
        Ok(link) => {
            tokio::select! {
                () = fetch_batches(&peers, link, &order, &came) => {}
                // Nobody waits any more.
                () = done.closed() => {}
                () = cancelled => {}
            }
            FetchFailure::Deadline
        }
    };
    drop(counted);
    let came = came.take().into_iter().map(|came| came.unwrap_or(Arrival::Failed(left)));
    let came: Vec<Arrival> = came.inspect(|came| metrics.fetched(came)).collect();
    if order.trace.is_recorded() {
        let here = came.iter().filter(|came| matches!(came, Arrival::Here { .. })).count();
        order.trace.count("larder.chunks", chunks as u64);
        order.trace.count("larder.chunks_here", here as u64);
        order.trace.set("larder.outcome", outcome(&came));
    }
    // An error: the actor stopped, and its arena goes.
    let _ = done.send(came);
}

/// The outcome of an order in a trace: that of the first chunk that did not come.
fn outcome(came: &[Arrival]) -> &'static str {
    let not_here = came.iter().find(|came| !matches!(came, Arrival::Here { .. }));
    match not_here {
        None | Some(Arrival::Here { .. }) => "done",
        Some(Arrival::NotHeld) => "not_held",
        Some(Arrival::Busy { .. }) => "busy",
        Some(Arrival::Damaged | Arrival::Failed(_)) => "failed",
    }
}

/// Chunks of an order that share a stream.
struct Batch<'a> {
    /// Each with its position in the order.
    chunks: Vec<(usize, &'a FetchChunk)>,
    bytes: u64,
}

async fn fetch_batches(
    peers: &Peers,
    link: &Rc<Link>,
    order: &FetchOrder,
    came: &RefCell<Vec<Option<Arrival>>>,
) {
    let firsts = peers.decide(|exchange, _| exchange.batches(order.chunks.iter().map(bytes_of)));
    let ends = firsts.iter().copied().skip(1).chain([order.chunks.len()]);
    let batches = firsts.iter().zip(ends).map(|(&first, end)| {
        let batch = Batch::new((first..end).map(|at| (at, &order.chunks[at])).collect());
        fetch_batch(peers, link, order, batch, came)
    });
    join_all(batches).await;
}

/// Fetches a batch within the deadline. Chunks that the holder is too busy to send are requested again, unless others have them.
async fn fetch_batch(
    peers: &Peers,
    link: &Rc<Link>,
    order: &FetchOrder,
    mut batch: Batch<'_>,
    came: &RefCell<Vec<Option<Arrival>>>,
) {
    let &FetchOrder { deadline, has_others, ref class, .. } = order;
    let wanted = Wanted { bytes: batch.bytes, class: *class.borrow(), deadline, has_others };
    let place = InLine::of_fetch(peers, link, wanted);
    let mut changes = class.clone();
    loop {
        let Turn { class, waited, until } = place.turn(&mut changes).await;
        peers.metrics().waited(&link.name, class, waited);
        peers.metrics().took(Stage::Turn, waited);
        let Some(until) = until else {
            let unreachable = || Some(Arrival::Failed(FetchFailure::Unreachable));
            return batch.chunks.iter().for_each(|&(at, _)| came.borrow_mut()[at] = unreachable());
        };
        let before = peers.came(link);
        let coming = receive_batch(peers, link, order, class, &batch, came);
        if timeout(until.saturating_sub(peers.clock().elapsed()), coming).await.is_err() {
            return place.is_late(peers.missed(link, before));
        }
        let Some((busy, retry)) = batch.busy(&came.borrow()) else { return };
        if !place.is_busy(busy.bytes, retry) {
            return;
        }
        batch = busy;
    }
}

impl<'a> Batch<'a> {
    fn new(chunks: Vec<(usize, &'a FetchChunk)>) -> Self {
        let bytes = chunks.iter().map(|(_, chunk)| bytes_of(chunk)).sum();
        Self { chunks, bytes }
    }

    /// The chunks that their holder is too busy for, and when to ask again.
    fn busy(&self, came: &[Option<Arrival>]) -> Option<(Self, RetryAfter)> {
        let (mut chunks, mut longest_ms) = (Vec::new(), 0);
        for &(at, chunk) in &self.chunks {
            if let Some(Arrival::Busy { retry_after_ms }) = came[at] {
                chunks.push((at, chunk));
                longest_ms = retry_after_ms.max(longest_ms);
            }
        }
        (!chunks.is_empty()).then(|| (Self::new(chunks), RetryAfter { retry_after_ms: longest_ms }))
    }
}

async fn receive_batch(
    peers: &Peers,
    link: &Rc<Link>,
    order: &FetchOrder,
    class: Class,
    batch: &Batch<'_>,
    came: &RefCell<Vec<Option<Arrival>>>,
) {
    let metrics = peers.metrics();
    let note = |at: usize, fetched: Arrival| came.borrow_mut()[batch.chunks[at].0] = Some(fetched);
    let fill = |from: usize, with: &dyn Fn() -> Arrival| {
        (from..batch.chunks.len()).for_each(|at| note(at, with()));
    };
    let trace = order.trace.child(SpanKind::Client, "fetch_batch");
    trace.count("larder.chunks", batch.chunks.len() as u64);
    trace.count("larder.bytes", batch.bytes);
    trace.set("larder.peer", &*link.name);
    let mut again = AskedAgain::default();
    let waiting = peers.awake().wait();
    // The connection stays in use until the last byte has come.
    let (asked, _connection) = loop {
        let Some(connection) = peers.connection(link).await else {
            return fill(0, &|| Arrival::Failed(FetchFailure::Unreachable));
        };
        let asked_at = peers.now();
        let asked = ask((peers, &connection), order, class, batch, &trace).await;
        metrics.took(Stage::Answer, peers.now() - asked_at);
        if asked.is_ok() || !again.may(&connection) {
            break (asked, connection);
        }
    };
    if asked.is_ok() {
        peers.heard(link);
    }
    let mut stream = match asked {
        Ok(Asked::Coming(stream, held)) => Coming::new(stream, held, waiting),
        Ok(Asked::Busy(RetryAfter { retry_after_ms })) => {
            return fill(0, &|| Arrival::Busy { retry_after_ms });
        }
        Err(failure) => return fill(0, &|| Arrival::Failed(failure)),
    };
    let answered_at = peers.now();
    for (at, (_, chunk)) in batch.chunks.iter().enumerate() {
        match stream.receive(chunk).await {
            Ok(fetched) => {
                peers.heard(link);
                if fetched == Arrival::Damaged {
                    let (device, fingerprint, hashes) =
                        (order.holder.device, order.fingerprint, vec![chunk.hash]);
                    peers.tell_damaged(link, Chunks { device, fingerprint, hashes });
                }
                if let Arrival::Here { pools, .. } = &fetched {
                    let came = chunk.blocks.iter().filter(|to| pools.has(to.key.pool.into()));
                    let bytes: u64 = came.map(|to| to.bytes).sum();
                    metrics.received_bytes.with_label_values(&[&link.name]).inc_by(bytes);
                }
                note(at, fetched);
            }
            Err(failure) => {
                if failure == FetchFailure::Malformed {
                    tracing::warn!(holder = %order.holder, "a node answered a fetch with something else");
                }
                return fill(at, &|| Arrival::Failed(failure));
            }
        }
    }
    metrics.took(Stage::Blocks, peers.now() - answered_at);
}

enum Asked {
    Coming(RecvStream, Vec<FetchedChunk>),
    Busy(RetryAfter),
}

async fn ask(
    (peers, connection): (&Peers, &Connection),
    order: &FetchOrder,
    class: Class,
    batch: &Batch<'_>,
    trace: &Trace,
) -> Result<Asked, FetchFailure> {
    let broken = |_| FetchFailure::Broken;
    let (mut send, mut receive) = connection.quic().open_bi().await.map_err(broken)?;
    let hashes = batch.chunks.iter().map(|(_, chunk)| chunk.hash).collect();
    let request = PeerRequest::Fetch(Fetch {
        chunks: Chunks { device: order.holder.device, fingerprint: order.fingerprint, hashes },
        block_bytes: batch.chunks[0].1.blocks.iter().map(|block| block.bytes).collect(),
        class,
    });
    write_trace(&mut send, trace).await.map_err(|_| FetchFailure::Broken)?;
    write_message(&mut send, &request).await.map_err(|_| FetchFailure::Broken)?;
    send.finish().map_err(|_| FetchFailure::Broken)?;
    let answer = read_answer(&mut receive).await;
    if let Ok(Some((room, _))) = &answer {
        peers.rooms().heard(order.holder.node, *room, connection.version());
    }
    match answer.map(|answer| answer.map(|(_, answer)| answer)) {
        Ok(Some(PeerResponse::Fetched(held))) if held.len() == batch.chunks.len() => {
            Ok(Asked::Coming(receive, held))
        }
        Ok(Some(PeerResponse::Busy(busy))) => Ok(Asked::Busy(busy)),
        Ok(Some(response)) => {
            if let PeerResponse::Refused(reason) = response {
                tracing::warn!(holder = %order.holder, reason, "a node refuses a fetch");
            }
            Err(FetchFailure::Malformed)
        }
        Err(larder_net::quic::MessageError::Malformed(_) | larder_net::quic::MessageError::NotAFrame) => {
            Err(FetchFailure::Malformed)
        }
        Ok(None) | Err(_) => Err(FetchFailure::Broken),
    }
}

/// A stream of blocks, and the holder's facts about them.
struct Coming {
    stream: RecvStream,
    held: std::vec::IntoIter<FetchedChunk>,
    waiting: Waiting,
    /// Packets that have come and were not used yet. They are taken from the connection many at a time, since each time takes
    /// its lock.
    came: [Bytes; PACKETS],
    taken: usize,
    filled: usize,
}

impl Coming {
    fn new(stream: RecvStream, held: Vec<FetchedChunk>, waiting: Waiting) -> Self {
        let came = [const { Bytes::new() }; PACKETS];
        Self { stream, held: held.into_iter(), waiting, came, taken: 0, filled: 0 }
    }

    /// The next bytes, at most `most`.
    async fn piece(&mut self, most: usize) -> Result<Bytes, FetchFailure> {
        while self.taken == self.filled {
            (self.taken, self.filled) = (0, 0);
            self.waiting.goes_on();
            let filled = self.stream.read_chunks(&mut self.came).await;
            // The stream ended early: the holder said more than it sent.
            self.filled = filled.map_err(|_| FetchFailure::Broken)?.ok_or(FetchFailure::Malformed)?;
        }
        let front = &mut self.came[self.taken];
        if front.len() > most {
            return Ok(front.split_to(most));
        }
        self.taken += 1;
        Ok(std::mem::take(front))
    }

    /// The next chunk. After an error nothing on the stream can be trusted.
    async fn receive(&mut self, chunk: &FetchChunk) -> Result<Arrival, FetchFailure> {
        let HeldChunk { reads, is_on_disk, pools, blocks } = match self.held.next() {
            Some(FetchedChunk::Held(held)) => held,
            Some(FetchedChunk::NotHeld) => return Ok(Arrival::NotHeld),
            Some(FetchedChunk::Busy(RetryAfter { retry_after_ms })) => {
                return Ok(Arrival::Busy { retry_after_ms });
            }
            None => return Err(FetchFailure::Malformed),
        };
        // The holder may lack pools that not every chunk of a prefix needs.
        let coming = || chunk.blocks.iter().filter(|to| pools.has(to.key.pool.into()));
        if blocks.iter().map(|block| block.bytes).ne(coming().map(|to| to.bytes)) {
            return Err(FetchFailure::Malformed);
        }
        let mut checksums = Vec::with_capacity(blocks.len());
        let mut is_right = true;
        for (destination, said) in coming().zip(&blocks) {
            let sums = self.receive_block(destination).await?;
            is_right &= sums.whole == said.checksum;
            checksums.push(sums);
        }
        if is_right {
            return Ok(Arrival::Here { checksums, pools, reads, is_on_disk });
        }
        tracing::error!(chunk = %chunk.hash, "a node sent bytes that do not match its checksums: the bytes are dropped");
        Ok(Arrival::Damaged)
    }

    /// Writes the next block into its slot.
    async fn receive_block(&mut self, to: &Destination) -> Result<Checksums, FetchFailure> {
        let mut ranges = SmallVec::<[u64; 1]>::new();
        let mut range = RangeChecksum::new();
        let mut at = 0;
        while at < to.bytes {
            let end_of_range = (at / to.range_bytes + 1).saturating_mul(to.range_bytes).min(to.bytes);
            let most = usize::try_from(end_of_range - at).unwrap_or(usize::MAX);
            let piece = self.piece(most).await?;
            if to.memory.copy_in_summed(to.offset + at, &piece, Stores::Cached, &mut range).is_err() {
                tracing::error!(
                    offset = to.offset,
                    bytes = to.bytes,
                    "a slot does not lie within its extent"
                );
                return Err(FetchFailure::Full);
            }
            at += piece.len() as u64;
            if at == end_of_range {
                ranges.push(std::mem::take(&mut range).finish());
            }
        }
        Ok(Checksums::of(&to.key, ranges))
    }
}

fn bytes_of(chunk: &FetchChunk) -> u64 {
    chunk.blocks.iter().map(|block| block.bytes).sum()
}

/// Packets that are taken from a connection at a time.
const PACKETS: usize = 32;
