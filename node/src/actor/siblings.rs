//! Copies chunks of another actor of this node into this actor's memory, near its GPU.

use actix::fut::LocalBoxActorFuture;
use actix::prelude::*;
use larder_core::reports::Reporter;
use larder_core::store::Checksums;
use larder_core::{Arrival, FetchFailure};
use larder_protocol::{ChunkHash, Fingerprint};

use super::GpuActor;
use crate::arena::Destination;
use crate::copy::ImportOrder;
use crate::exchange::{AskBlocks, FetchChunk, FetchOrder, GiveUp, Grant, GrantedChunk, VerifyChunks};

impl GpuActor {
    /// Carries out an order whose holder is a sibling. Each chunk is checked as if a peer had sent it.
    pub(super) fn fetch_from_sibling(&self, order: FetchOrder) -> LocalBoxActorFuture<Self, Vec<Arrival>> {
        let FetchOrder { holder, fingerprint, chunks, deadline, class, trace, .. } = order;
        let sibling = self.siblings.as_ref().and_then(|siblings| siblings.actor(holder.device));
        let asking = sibling.map(|sibling| {
            let hashes = chunks.iter().map(|chunk| chunk.hash).collect();
            let block_bytes = chunks.first().map_or(&[][..], |chunk| &chunk.blocks);
            let block_bytes = block_bytes.iter().map(|block| block.bytes).collect();
            let ask = AskBlocks { fingerprint, hashes, block_bytes, class: *class.borrow(), trace };
            tokio::time::timeout(deadline, sibling.blocks.send(ask))
        });
        let asked = async move {
            match asking {
                // An error: it is stopping, or too slow.
                Some(asking) => asking.await.ok().and_then(Result::ok),
                None => None,
            }
        };
        let copied = asked.into_actor(self).then(move |grants, actor: &mut Self, _| {
            let (come, coming) = actor.copy_granted(&chunks, grants.unwrap_or_default());
            let coming = async move {
                match coming {
                    Some(coming) => coming.await.unwrap_or_default(),
                    None => Vec::new(),
                }
            };
            coming.into_actor(actor).map(move |checksums, _, _| {
                let mut checksums = checksums.into_iter();
                come.into_iter().map(|come| come.fetched(&mut checksums)).collect()
            })
        });
        Box::pin(copied)
    }

    /// Tells a sibling that chunks of its stay here now.
    pub(super) fn moved_from_sibling(&self, device: u16, fingerprint: Fingerprint, hash: ChunkHash) {
        let sibling = self.siblings.as_ref().and_then(|siblings| siblings.actor(device));
        if let Some(sibling) = sibling {
            // Refused: it keeps a copy until it is evicted.
            let _ = sibling.give_up.try_send(GiveUp { fingerprint, hashes: vec![hash] });
        }
    }

    /// Tells a sibling that chunks of its came with other bytes than it has checksums for.
    pub(super) fn tell_sibling_damaged(&self, device: u16, fingerprint: Fingerprint, hashes: Vec<ChunkHash>) {
        let Some(siblings) = &self.siblings else { return };
        let by = Reporter::Sibling(siblings.device());
        if let Some(sibling) = siblings.actor(device)
            && sibling.verify.try_send(VerifyChunks { by, fingerprint, hashes }).is_err()
        {
            tracing::debug!(device, "a sibling is busy: the next reader of the chunk reports it");
        }
    }

    /// Copies a sibling's granted chunks; returns the expected result of each chunk, and the checksums of the blocks to come.
    fn copy_granted(
        &self,
        chunks: &[FetchChunk],
        grants: Vec<Grant>,
    ) -> (Vec<Coming>, Option<crate::copy::CopyDone>) {
        let mut blocks = Vec::new();
        let grants = grants.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
        let mut come: Vec<Coming> =
            chunks.iter().zip(grants).map(|(chunk, grant)| Coming::new(chunk, grant, &mut blocks)).collect();
        let coming = ImportOrder::new(blocks).ok().and_then(|order| self.lane.import(order));
        if coming.is_none() {
            // The copy threads have too much to do.
            come.iter_mut().for_each(Coming::is_put_off);
        }
        (come, coming)
    }
}

/// The expected result for a chunk.
enum Coming {
    /// Nothing.
    Is(Arrival),
    /// Blocks with these checksums.
    Copied { sums: Vec<u64>, granted: GrantedChunk },
}

impl Coming {
    fn new(chunk: &FetchChunk, grant: Option<Grant>, blocks: &mut Vec<(bytes::Bytes, Destination)>) -> Self {
        let granted = match grant {
            Some(Grant::Held(granted)) => granted,
            Some(Grant::NotHeld) => return Self::Is(Arrival::NotHeld),
            Some(Grant::Busy { retry_after_ms }) => return Self::Is(Arrival::Busy { retry_after_ms }),
            None => return Self::Is(Arrival::Failed(FetchFailure::Unreachable)),
        };
        let coming = || chunk.blocks.iter().filter(|to| granted.pools.has(to.key.pool.into()));
        if granted.blocks.iter().map(|block| block.bytes).ne(coming().map(|to| to.bytes)) {
            return Self::Is(Arrival::Failed(FetchFailure::Malformed));
        }
        for (block, to) in granted.blocks.iter().zip(coming()) {
            let from = block.memory.share(block.offset, block.bytes, std::sync::Arc::clone(&granted.lease));
            blocks.push((from, to.clone()));
        }
        Self::Copied { sums: granted.blocks.iter().map(|block| block.checksum).collect(), granted }
    }

    fn is_put_off(&mut self) {
        if matches!(self, Self::Copied { .. }) {
            *self = Self::Is(Arrival::Busy { retry_after_ms: COPY_RETRY_MS });
        }
    }

    /// The result for the chunk; takes its blocks' checksums off the front.
    fn fetched(self, came: &mut impl Iterator<Item = Checksums>) -> Arrival {
        let (sums, granted) = match self {
            Self::Is(fetched) => return fetched,
            Self::Copied { sums, granted } => (sums, granted),
        };
        let checksums: Vec<_> = came.take(sums.len()).collect();
        if checksums.iter().map(|came| came.whole).ne(sums) {
            tracing::error!("a sibling has bytes that do not match its checksums: the bytes are dropped");
            return Arrival::Damaged;
        }
        let GrantedChunk { reads, is_on_disk, pools, .. } = granted;
        Arrival::Here { checksums, pools, reads, is_on_disk }
    }
}

/// When copying may be tried again.
const COPY_RETRY_MS: u64 = 5;
