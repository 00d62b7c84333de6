//! Receiving: blocks of a holder come straight into their slots.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use larder_core::store::Checksums;
use larder_core::{Arrival, FetchFailure};
use larder_net::quic::{Connection, MessageError, write_message};
use larder_net::tcp::TcpConnection;
use larder_net::trace::Trace;
use larder_protocol::Fingerprint;
use larder_protocol::checksum::{RangeChecksum, Stores};
use larder_protocol::peer::{
    Chunks, Class, Fetch, FetchedChunk, HeldChunk, PeerRequest, PeerResponse, RetryAfter,
};
use larder_protocol::table::Holder;
use larder_protocol::version::Version;
use quinn::RecvStream;
use smallvec::SmallVec;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

use super::FetchChunk;
use super::awake::Waiting;
use super::metrics::Stage;
use super::mover::Mover;
use super::peers::write_trace;
use super::rooms::read_answer;
use super::tcp::TcpWay;
use crate::arena::Destination;

/// Chunks of an order that share a stream.
#[derive(Debug, Clone)]
pub(super) struct Batch {
    /// All chunks of the order.
    order: Arc<Vec<FetchChunk>>,
    /// The positions of the batch's chunks in the order.
    positions: Vec<usize>,
    pub(super) bytes: u64,
}

/// From whom chunks are requested, and how urgently.
#[derive(Debug, Clone, Copy)]
pub(super) struct From {
    pub(super) holder: Holder,
    pub(super) fingerprint: Fingerprint,
    pub(super) class: Class,
}

/// The first part of a holder's answer.
pub(super) enum Granted {
    /// Blocks follow. Has the holder's facts about them.
    Coming(Vec<FetchedChunk>),
    /// The holder is too busy for all chunks.
    Busy(RetryAfter),
}

/// The first part of a holder's answer, and the way on which blocks follow.
pub(super) struct Asked<W> {
    granted: Granted,
    way: W,
}

/// A way on which the bytes of blocks come.
pub(super) trait Way {
    /// Hands the next bytes to `take`, at most `most` of them.
    ///
    /// # Errors
    /// [`FetchFailure::Malformed`] if the holder announced more than it sent, [`FetchFailure::Broken`] if the way broke.
    async fn take<T>(&mut self, most: usize, take: impl FnOnce(&[u8]) -> T) -> Result<T, FetchFailure>;
}

/// A stream of QUIC.
pub(super) struct QuicWay {
    stream: RecvStream,
    waiting: Waiting,
    /// Packets that have come and were not used yet. They are taken from the connection many at a time, since each time locks the
    /// connection.
    came: [Bytes; PACKETS],
    taken: usize,
    filled: usize,
}

/// The blocks of an answer, and the holder's facts about them.
struct Coming<W> {
    way: W,
    held: std::vec::IntoIter<FetchedChunk>,
}

impl Batch {
    pub(super) fn new(order: Arc<Vec<FetchChunk>>, positions: Vec<usize>) -> Self {
        let bytes = positions.iter().map(|&at| order[at].bytes()).sum();
        Self { order, positions, bytes }
    }

    /// Each chunk with its position in the order.
    pub(super) fn chunks(&self) -> impl Iterator<Item = (usize, &FetchChunk)> {
        self.positions.iter().map(|&at| (at, &self.order[at]))
    }

    pub(super) fn len(&self) -> usize {
        self.positions.len()
    }

    /// The chunks that their holder is too busy for, and when to ask again.
    pub(super) fn busy(&self, came: &[Option<Arrival>]) -> Option<(Self, RetryAfter)> {
        let (mut positions, mut longest_ms) = (Vec::new(), 0);
        for &at in &self.positions {
            if let Some(Arrival::Busy { retry_after_ms }) = came[at] {
                positions.push(at);
                longest_ms = retry_after_ms.max(longest_ms);
            }
        }
        let busy = Self::new(Arc::clone(&self.order), positions);
        (busy.len() > 0).then_some((busy, RetryAfter { retry_after_ms: longest_ms }))
    }
}

impl FetchChunk {
    /// Bytes of the chunk's blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.bytes).sum()
    }
}

impl Mover {
    /// Requests a batch on a connection.
    pub(super) async fn ask(
        &self,
        connection: &Connection,
        from: From,
        batch: &Batch,
        trace: &Trace,
    ) -> Result<Asked<QuicWay>, FetchFailure> {
        let (waiting, asked_at) = (self.awake.wait(), self.common.now());
        let asked = self.ask_untimed(connection, from, batch, (waiting, trace)).await;
        self.common.metrics.took(Stage::Answer, self.common.now() - asked_at);
        asked
    }

    async fn ask_untimed(
        &self,
        connection: &Connection,
        from: From,
        batch: &Batch,
        (waiting, trace): (Waiting, &Trace),
    ) -> Result<Asked<QuicWay>, FetchFailure> {
        let (mut send, mut receive) = connection.quic().open_bi().await.map_err(|_| FetchFailure::Broken)?;
        write_request(&mut send, from, batch, trace).await?;
        send.finish().map_err(|_| FetchFailure::Broken)?;
        let granted = self.read_granted(&mut receive, connection.version(), from, batch).await?;
        Ok(Asked { granted, way: QuicWay::new(receive, waiting) })
    }

    /// Requests a batch on a connection over TCP, which nobody else uses until the answer has come.
    pub(super) async fn ask_over_tcp<'a>(
        &'a self,
        connection: &'a mut TcpConnection,
        from: From,
        batch: &Batch,
        (trace, came): (&Trace, &'a AtomicU64),
    ) -> Result<Asked<TcpWay<'a>>, FetchFailure> {
        let (asked_at, version) = (self.common.now(), connection.version());
        write_request(connection, from, batch, trace).await?;
        connection.flush().await.map_err(|_| FetchFailure::Broken)?;
        let granted = self.read_granted(connection, version, from, batch).await;
        self.common.metrics.took(Stage::Answer, self.common.now() - asked_at);
        Ok(Asked {
            granted: granted?,
            way: TcpWay { connection, came: (came, &self.common.metrics.tcp_bytes) },
        })
    }

    /// Reads the first part of an answer.
    async fn read_granted(
        &self,
        receive: &mut (impl AsyncRead + Unpin),
        version: Version,
        From { holder, .. }: From,
        batch: &Batch,
    ) -> Result<Granted, FetchFailure> {
        let answer = read_answer(receive).await;
        if let Ok(Some((room, _))) = &answer {
            self.common.rooms.heard(holder.node, *room, version, self.common.now());
        }
        match answer.map(|answer| answer.map(|(_, answer)| answer)) {
            Ok(Some(PeerResponse::Fetched(held))) if held.len() == batch.len() => Ok(Granted::Coming(held)),
            Ok(Some(PeerResponse::Busy(busy))) => Ok(Granted::Busy(busy)),
            Ok(Some(response)) => {
                if let PeerResponse::Refused(reason) = response
                    && let Some(more) = self.common.says("refused")
                {
                    tracing::warn!(%holder, reason, more, "a node refuses a fetch");
                }
                Err(FetchFailure::Malformed)
            }
            Err(MessageError::Malformed(_) | MessageError::NotAFrame) => Err(FetchFailure::Malformed),
            Ok(None) | Err(_) => Err(FetchFailure::Broken),
        }
    }

    /// Receives a holder's answer. Calls `came` for each chunk, with its position in the order, as soon as it has come or failed.
    /// Returns whether the whole answer was read.
    pub(super) async fn receive<W: Way>(
        &self,
        asked: Result<Asked<W>, FetchFailure>,
        from: From,
        batch: &Batch,
        mut came: impl FnMut(usize, Arrival),
    ) -> bool {
        let mut coming = match asked {
            Ok(Asked { granted: Granted::Coming(held), way }) => Coming { way, held: held.into_iter() },
            Ok(Asked { granted: Granted::Busy(RetryAfter { retry_after_ms }), .. }) => {
                batch.chunks().for_each(|(at, _)| came(at, Arrival::Busy { retry_after_ms }));
                return true;
            }
            Err(failure) => {
                batch.chunks().for_each(|(at, _)| came(at, Arrival::Failed(failure)));
                return false;
            }
        };
        let answered_at = self.common.now();
        let mut chunks = batch.chunks();
        while let Some((at, chunk)) = chunks.next() {
            match coming.receive(chunk).await {
                Ok(arrival) => {
                    if arrival == Arrival::Damaged
                        && let Some(more) = self.common.says("damaged")
                    {
                        tracing::error!(chunk = %chunk.hash, holder = %from.holder, more, "a node sent bytes that do not match its checksums: the bytes are dropped");
                    }
                    came(at, arrival);
                }
                Err(failure) => {
                    if failure == FetchFailure::Malformed
                        && let Some(more) = self.common.says("malformed")
                    {
                        tracing::warn!(holder = %from.holder, more, "a node sent a wrong answer to a fetch");
                    }
                    came(at, Arrival::Failed(failure));
                    chunks.for_each(|(at, _)| came(at, Arrival::Failed(failure)));
                    return false;
                }
            }
        }
        self.common.metrics.took(Stage::Blocks, self.common.now() - answered_at);
        true
    }
}

impl<W> Asked<W> {
    /// Whether blocks follow.
    pub(super) fn is_coming(&self) -> bool {
        matches!(self.granted, Granted::Coming(_))
    }
}

/// Writes the request of a batch.
async fn write_request(
    send: &mut (impl AsyncWrite + Unpin),
    From { holder, fingerprint, class }: From,
    batch: &Batch,
    trace: &Trace,
) -> Result<(), FetchFailure> {
    let hashes = batch.chunks().map(|(_, chunk)| chunk.hash).collect();
    let request = PeerRequest::Fetch(Fetch {
        chunks: Chunks { device: holder.device, fingerprint, hashes },
        block_bytes: batch.order[batch.positions[0]].blocks.iter().map(|block| block.bytes).collect(),
        class,
    });
    write_trace(send, trace).await.map_err(|_| FetchFailure::Broken)?;
    write_message(send, &request).await.map_err(|_| FetchFailure::Broken)
}

impl QuicWay {
    fn new(stream: RecvStream, waiting: Waiting) -> Self {
        let came = [const { Bytes::new() }; PACKETS];
        Self { stream, waiting, came, taken: 0, filled: 0 }
    }

    /// The next bytes, at most `most`.
    async fn piece(&mut self, most: usize) -> Result<Bytes, FetchFailure> {
        while self.taken == self.filled {
            (self.taken, self.filled) = (0, 0);
            self.waiting.goes_on();
            let filled = self.stream.read_chunks(&mut self.came).await;
            // The stream ended early: the holder announced more than it sent.
            self.filled = filled.map_err(|_| FetchFailure::Broken)?.ok_or(FetchFailure::Malformed)?;
        }
        let front = &mut self.came[self.taken];
        if front.len() > most {
            return Ok(front.split_to(most));
        }
        self.taken += 1;
        Ok(std::mem::take(front))
    }
}

impl Way for QuicWay {
    async fn take<T>(&mut self, most: usize, take: impl FnOnce(&[u8]) -> T) -> Result<T, FetchFailure> {
        Ok(take(&self.piece(most).await?))
    }
}

impl<W: Way> Coming<W> {
    /// Receives the next chunk. After an error, nothing on the stream can be trusted.
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
        Ok(if is_right { Arrival::Here { checksums, pools, reads, is_on_disk } } else { Arrival::Damaged })
    }

    /// Writes the next block into its slot.
    async fn receive_block(&mut self, to: &Destination) -> Result<Checksums, FetchFailure> {
        let mut ranges = SmallVec::<[u64; 1]>::new();
        let mut range = RangeChecksum::new();
        let mut at = 0;
        while at < to.bytes {
            let end_of_range = (at / to.range_bytes + 1).saturating_mul(to.range_bytes).min(to.bytes);
            let most = usize::try_from(end_of_range - at).unwrap_or(usize::MAX);
            let copy = |piece: &[u8]| {
                let copied = to.memory.copy_in_summed(to.offset + at, piece, Stores::Cached, &mut range);
                copied.map(|_| piece.len() as u64)
            };
            let Ok(copied) = self.way.take(most, copy).await? else {
                tracing::error!(
                    offset = to.offset,
                    bytes = to.bytes,
                    "a slot does not lie within its extent"
                );
                return Err(FetchFailure::Full);
            };
            at += copied;
            if at == end_of_range {
                ranges.push(std::mem::take(&mut range).finish());
            }
        }
        Ok(Checksums::of(&to.key, ranges))
    }
}

/// Packets that are taken from a connection at a time.
const PACKETS: usize = 32;
