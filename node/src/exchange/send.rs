//! Sending: blocks go from their places to the nodes that asked for them.

pub(super) mod order;

use std::sync::Arc;
use std::time::Duration;

use actix::Recipient;
use bytes::Bytes;
use larder_core::exchange::{Frames, Stall};
use larder_net::quic::{Connection, write_message};
use larder_net::trace::Trace;
use larder_protocol::peer::{
    Chunks, Class, Fetch, FetchedChunk, HeldBlock, HeldChunk, PeerResponse, RetryAfter,
};
use quinn::{SendStream, VarInt};
use tokio::time::{sleep, timeout};

use super::metrics::Stage;
use super::mover::{Common, Mover};
use super::serve::{BUSY_RETRY_MS, SEND_DEADLINE, STALL_DEADLINE};
use super::{AskBlocks, Grant, GrantedChunk};

use self::order::{PIECE_BYTES, SendOrder, SendTurns};

/// Bytes that are being sent to a peer, as long as this value lives.
struct Sending<'a> {
    common: &'a Common,
    peer: &'a str,
    bytes: u64,
}

/// Blocks that an actor leased for an answer.
pub(super) struct GrantedBlocks<'a> {
    /// The facts for the asker.
    pub(super) said: PeerResponse,
    /// The blocks. Each stays leased until its last part is dropped.
    pub(super) blocks: Vec<Bytes>,
    /// Their size.
    bytes: u64,
    granted_at: Duration,
    sending: Sending<'a>,
}

impl Mover {
    /// Answers a fetch, and sends the blocks from their places. Each block stays leased until its last byte was acknowledged.
    pub(super) async fn send_blocks(
        &self,
        actors: &[Recipient<AskBlocks>],
        (connection, order): (&Connection, &SendOrder),
        mut send: SendStream,
        fetch: Fetch,
        trace: Trace,
    ) {
        let common = &self.common;
        let granted = self.grant(actors, &connection.peer().name, fetch, &trace);
        // An actor may take long, as when a chunk is read from disk. No room to send is kept for an asker that gave up meanwhile.
        let granted = tokio::select! {
            granted = granted => Some(granted),
            _ = send.stopped() => None,
        };
        let Some(mut granted) = granted else { return trace.set("larder.outcome", "failed") };
        let sent = async {
            let head = async {
                common.rooms.write_before(&mut send, connection.version(), common.now()).await?;
                write_message(&mut send, &granted.said).await
            };
            timeout(STALL_DEADLINE, head).await.ok()?.ok()?;
            let mut turns = order.join();
            for block in std::mem::take(&mut granted.blocks) {
                self.write_while_read(&mut send, &mut turns, block).await?;
            }
            send.finish().ok()?;
            self.awake.expects_next();
            let sent_at = granted.are_sent();
            self.acknowledged(connection, &mut send).await?;
            common.metrics.took(Stage::Acknowledged, common.now() - sent_at);
            Some(())
        };
        if timeout(SEND_DEADLINE, sent).await.is_ok_and(|sent| sent.is_some()) {
            return trace.set("larder.outcome", "done");
        }
        trace.set("larder.outcome", "failed");
        // The asker went away, or does not read. The reset drops the bytes that are under way, and with them the leases. An
        // error: the stream was reset already.
        let _ = send.reset(VarInt::from_u32(0));
    }

    /// Has an actor lease the blocks of a fetch.
    pub(super) async fn grant<'a>(
        &'a self,
        actors: &[Recipient<AskBlocks>],
        peer: &'a str,
        fetch: Fetch,
        trace: &Trace,
    ) -> GrantedBlocks<'a> {
        let Fetch { chunks: Chunks { device, fingerprint, hashes }, block_bytes, class } = fetch;
        let (awake, common) = (&self.awake, &self.common);
        let asked_at = common.now();
        awake.came();
        let waiting = awake.wait();
        // Room comes first: an actor reads chunks from disk for a peer, and would read them again each time the peer asks again.
        let chunk_bytes = block_bytes.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let mut sending = Sending { common, peer, bytes: 0 };
        let all = hashes.len();
        let hashes: Vec<_> = hashes.into_iter().take_while(|_| sending.take(chunk_bytes, class)).collect();
        let put_off = all - hashes.len();
        let granted = match actors.get(usize::from(device)) {
            _ if hashes.is_empty() => Ok(Vec::new()),
            Some(actor) => {
                let trace = trace.clone();
                actor.send(AskBlocks { fingerprint, hashes, block_bytes, class, trace }).await
            }
            None => Ok(hashes.iter().map(|_| Grant::NotHeld).collect()),
        };
        // An error of the mailbox: the actor is stopping.
        let granted = granted.unwrap_or_default();
        drop(waiting);
        let granted_at = common.now();
        common.metrics.took(Stage::Grant, granted_at - asked_at);
        let (mut said, mut blocks, mut held) = (Vec::with_capacity(granted.len()), Vec::new(), 0_u64);
        // An actor that stops answers nothing.
        let is_answered = !granted.is_empty() || put_off == all;
        for grant in granted {
            said.push(match grant {
                Grant::NotHeld => FetchedChunk::NotHeld,
                Grant::Busy { retry_after_ms } => FetchedChunk::Busy(RetryAfter { retry_after_ms }),
                Grant::Held(chunk) => {
                    held += 1;
                    FetchedChunk::Held(describe(chunk, &mut blocks))
                }
            });
        }
        let busy = || FetchedChunk::Busy(RetryAfter { retry_after_ms: BUSY_RETRY_MS });
        said.extend((0..put_off).filter(|_| is_answered).map(|_| busy()));
        let bytes: u64 = blocks.iter().map(|block| block.len() as u64).sum();
        sending.keep(bytes);
        trace.count("larder.bytes", bytes);
        trace.count("larder.chunks_here", held);
        trace.set("larder.peer", peer);
        common.rooms.sends(bytes, common.now());
        GrantedBlocks { said: PeerResponse::Fetched(said), blocks, bytes, granted_at, sending }
    }

    /// Sends bytes at the set pace, as long as the asker reads; `None` if the asker does not read, or went away.
    pub(super) async fn write_while_read(
        &self,
        send: &mut SendStream,
        turns: &mut SendTurns<'_>,
        mut bytes: Bytes,
    ) -> Option<()> {
        while let Some(piece) = self.next_piece(&mut bytes).await {
            if let Some(priority) = turns.priority(piece.len()) {
                send.set_priority(priority).ok()?;
            }
            self.unless_stalled(send.write_chunk(piece)).await?.ok()?;
        }
        Some(())
    }

    /// The next piece of some bytes, when the set pace allows it.
    pub(super) async fn next_piece(&self, bytes: &mut Bytes) -> Option<Bytes> {
        let piece = bytes.split_to(bytes.len().min(PIECE_BYTES));
        if piece.is_empty() {
            return None;
        }
        let pause = self.common.outgoing().pace.pause(self.common.now(), piece.len() as u64);
        if !pause.is_zero() {
            sleep(pause).await;
        }
        Some(piece)
    }

    /// Awaits the end of a write; `None` if the asker does not read.
    pub(super) async fn unless_stalled<T>(&self, write: impl Future<Output = T>) -> Option<T> {
        let written = timeout(STALL_DEADLINE, write).await;
        if written.is_err() {
            self.common.metrics.stalled();
        }
        written.ok()
    }

    /// Waits until the last byte is acknowledged, as long as the connection makes progress: pieces are sent, and acknowledged.
    pub(super) async fn acknowledged(&self, connection: &Connection, send: &mut SendStream) -> Option<()> {
        let frames = || {
            let stats = connection.quic().stats();
            Frames { sent: stats.frame_tx.stream, acknowledged: stats.frame_rx.acks }
        };
        let mut stall = Stall::new(frames());
        loop {
            if let Ok(stopped) = timeout(STALL_DEADLINE, send.stopped()).await {
                return stopped.ok().map(|_| ());
            }
            if stall.is_there(frames()) {
                self.common.metrics.stalled();
                return None;
            }
        }
    }
}

impl GrantedBlocks<'_> {
    /// Counts the blocks as sent; returns the time.
    pub(super) fn are_sent(&self) -> Duration {
        let Sending { common, peer, .. } = self.sending;
        let sent_at = common.now();
        common.metrics.took(Stage::Send, sent_at - self.granted_at);
        common.metrics.sent_bytes.with_label_values(&[common.metrics_name(peer)]).inc_by(self.bytes);
        sent_at
    }
}

impl Sending<'_> {
    /// Takes room for a chunk; returns whether there is room.
    fn take(&mut self, bytes: u64, class: Class) -> bool {
        let taken = self.common.outgoing().sending.take(self.peer, bytes, class);
        self.bytes += taken.unwrap_or(0);
        taken.is_some()
    }

    /// Gives back the room that `bytes` bytes do not need.
    fn keep(&mut self, bytes: u64) {
        let unneeded = self.bytes.saturating_sub(bytes);
        self.bytes -= unneeded;
        self.common.outgoing().sending.give_back(self.peer, unneeded);
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.common.outgoing().sending.give_back(self.peer, self.bytes);
    }
}

/// The facts of a chunk for its reader. Adds the bytes of the chunk's blocks to `blocks`.
fn describe(chunk: GrantedChunk, blocks: &mut Vec<Bytes>) -> HeldChunk {
    let GrantedChunk { reads, is_on_disk, pools, blocks: granted, lease } = chunk;
    let mut held = Vec::with_capacity(granted.len());
    for block in granted {
        held.push(HeldBlock { bytes: block.bytes, checksum: block.checksum });
        blocks.push(block.memory.share(block.offset, block.bytes, Arc::clone(&lease)));
    }
    HeldChunk { reads, is_on_disk, pools, blocks: held }
}
