//! Receiving: blocks of a holder come straight into their slots.

use std::sync::Arc;

use bytes::Bytes;
use larder_core::store::Checksums;
use larder_core::{Arrival, FetchFailure};
use larder_net::quic::{Connection, MessageError, write_message};
use larder_net::trace::Trace;
use larder_protocol::Fingerprint;
use larder_protocol::checksum::{RangeChecksum, Stores};
use larder_protocol::peer::{
    Chunks, Class, Fetch, FetchedChunk, HeldChunk, PeerRequest, PeerResponse, RetryAfter,
};
use larder_protocol::table::Holder;
use quinn::RecvStream;
use smallvec::SmallVec;

use super::FetchChunk;
use super::awake::Waiting;
use super::metrics::Stage;
use super::mover::Mover;
use super::peers::write_trace;
use super::rooms::read_answer;
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
pub(super) enum Asked {
    /// Blocks follow on the stream. Has the holder's facts about them.
    Coming(RecvStream, Vec<FetchedChunk>, Waiting),
    /// The holder is too busy for all chunks.
    Busy(RetryAfter),
}

/// A stream of blocks, and the holder's facts about them.
struct Coming {
    stream: RecvStream,
    held: std::vec::IntoIter<FetchedChunk>,
    waiting: Waiting,
    /// Packets that have come and were not used yet. They are taken from the connection many at a time, since each time locks the
    /// connection.
    came: [Bytes; PACKETS],
    taken: usize,
    filled: usize,
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
    ) -> Result<Asked, FetchFailure> {
        let (waiting, asked_at) = (self.awake.wait(), self.common.now());
        let asked = self.ask_untimed(connection, from, batch, (waiting, trace)).await;
        self.common.metrics.took(Stage::Answer, self.common.now() - asked_at);
        asked
    }

    async fn ask_untimed(
        &self,
        connection: &Connection,
        From { holder, fingerprint, class }: From,
        batch: &Batch,
        (waiting, trace): (Waiting, &Trace),
    ) -> Result<Asked, FetchFailure> {
        let broken = |_| FetchFailure::Broken;
        let (mut send, mut receive) = connection.quic().open_bi().await.map_err(broken)?;
        let hashes = batch.chunks().map(|(_, chunk)| chunk.hash).collect();
        let request = PeerRequest::Fetch(Fetch {
            chunks: Chunks { device: holder.device, fingerprint, hashes },
            block_bytes: batch.order[batch.positions[0]].blocks.iter().map(|block| block.bytes).collect(),
            class,
        });
        write_trace(&mut send, trace).await.map_err(|_| FetchFailure::Broken)?;
        write_message(&mut send, &request).await.map_err(|_| FetchFailure::Broken)?;
        send.finish().map_err(|_| FetchFailure::Broken)?;
        let answer = read_answer(&mut receive).await;
        if let Ok(Some((room, _))) = &answer {
            self.common.rooms.heard(holder.node, *room, connection.version());
        }
        match answer.map(|answer| answer.map(|(_, answer)| answer)) {
            Ok(Some(PeerResponse::Fetched(held))) if held.len() == batch.len() => {
                Ok(Asked::Coming(receive, held, waiting))
            }
            Ok(Some(PeerResponse::Busy(busy))) => Ok(Asked::Busy(busy)),
            Ok(Some(response)) => {
                if let PeerResponse::Refused(reason) = response {
                    tracing::warn!(%holder, reason, "a node refuses a fetch");
                }
                Err(FetchFailure::Malformed)
            }
            Err(MessageError::Malformed(_) | MessageError::NotAFrame) => Err(FetchFailure::Malformed),
            Ok(None) | Err(_) => Err(FetchFailure::Broken),
        }
    }

    /// Receives a holder's answer. Calls `came` for each chunk, with its position in the order, as soon as it has come or failed.
    pub(super) async fn receive(
        &self,
        asked: Result<Asked, FetchFailure>,
        from: From,
        batch: &Batch,
        mut came: impl FnMut(usize, Arrival),
    ) {
        let mut coming = match asked {
            Ok(Asked::Coming(stream, held, waiting)) => Coming::new(stream, held, waiting),
            Ok(Asked::Busy(RetryAfter { retry_after_ms })) => {
                return batch.chunks().for_each(|(at, _)| came(at, Arrival::Busy { retry_after_ms }));
            }
            Err(failure) => return batch.chunks().for_each(|(at, _)| came(at, Arrival::Failed(failure))),
        };
        let answered_at = self.common.now();
        let mut chunks = batch.chunks();
        while let Some((at, chunk)) = chunks.next() {
            match coming.receive(chunk).await {
                Ok(arrival) => came(at, arrival),
                Err(failure) => {
                    if failure == FetchFailure::Malformed {
                        tracing::warn!(holder = %from.holder, "a node sent a wrong answer to a fetch");
                    }
                    came(at, Arrival::Failed(failure));
                    return chunks.for_each(|(at, _)| came(at, Arrival::Failed(failure)));
                }
            }
        }
        self.common.metrics.took(Stage::Blocks, self.common.now() - answered_at);
    }
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

/// Packets that are taken from a connection at a time.
const PACKETS: usize = 32;
