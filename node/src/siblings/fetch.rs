//! Copies chunks of another actor of this node into this actor's memory, near its GPU.

use std::future::Future;
use std::iter::repeat_with;
use std::sync::Arc;

use larder_core::reports::Reporter;
use larder_core::store::Checksums;
use larder_core::{Arrival, Event, FetchFailure};
use larder_protocol::{ChunkHash, Fingerprint};

use super::Siblings;
use crate::arena::Destination;
use crate::copy::{CopyPool, ImportOrder};
use crate::exchange::{AskBlocks, FetchChunk, FetchOrder, Grant, GrantedChunk};
use crate::tell::Tell;

impl Siblings {
    /// Carries out an order whose holder is a sibling. Each chunk is checked as if a peer had sent it.
    pub(crate) fn fetch(
        &self,
        order: FetchOrder,
        copies: Arc<CopyPool>,
    ) -> impl Future<Output = Vec<Arrival>> + use<> {
        let FetchOrder { ordered, chunks, class, trace, .. } = order;
        let larder_core::FetchOrder { holder, fingerprint, deadline, .. } = ordered;
        let asking = self.actor(holder.device).map(|sibling| {
            let hashes = chunks.iter().map(|chunk| chunk.hash).collect();
            let block_bytes = chunks.first().map_or(&[][..], |chunk| &chunk.blocks);
            let block_bytes = block_bytes.iter().map(|block| block.bytes).collect();
            let ask = AskBlocks { fingerprint, hashes, block_bytes, class: *class.borrow(), trace };
            tokio::time::timeout(deadline, sibling.blocks.send(ask))
        });
        async move {
            let grants = match asking {
                // An error: the sibling is stopping, or too slow.
                Some(asking) => asking.await.ok().and_then(Result::ok),
                None => None,
            };
            let grants = grants.unwrap_or_default().into_iter().map(Some).chain(repeat_with(|| None));
            let mut blocks = Vec::new();
            let expected =
                chunks.iter().zip(grants).map(|(chunk, grant)| Coming::new(chunk, grant, &mut blocks));
            let mut expected: Vec<Coming> = expected.collect();
            let copying = ImportOrder::new(blocks).ok().and_then(|order| copies.import(order));
            drop(copies);
            let checksums = match copying {
                Some(copying) => copying.await.unwrap_or_default(),
                None => {
                    // The copy threads have too much to do.
                    expected.iter_mut().for_each(Coming::is_put_off);
                    Vec::new()
                }
            };
            let mut checksums = checksums.into_iter();
            expected.into_iter().map(|chunk| chunk.arrival(&mut checksums)).collect()
        }
    }

    /// Tells a sibling that its chunk has moved to this actor.
    pub(crate) fn tell_moved(&self, device: u16, fingerprint: Fingerprint, hash: ChunkHash) {
        if let Some(sibling) = self.actor(device) {
            // If refused, the sibling keeps its copy until eviction.
            let _ = sibling.tell.try_send(Tell(Event::Moved { fingerprint, hashes: vec![hash] }));
        }
    }

    /// Tells a sibling that the bytes of its chunks do not match its checksums.
    pub(crate) fn tell_damaged(&self, device: u16, fingerprint: Fingerprint, hashes: Vec<ChunkHash>) {
        let by = Reporter::Sibling(self.device());
        if let Some(sibling) = self.actor(device)
            && sibling.tell.try_send(Tell(Event::Damaged { by, fingerprint, hashes })).is_err()
        {
            tracing::debug!(device, "a sibling is busy: the next reader of the chunk reports it");
        }
    }
}

/// The expected result for a chunk.
enum Coming {
    /// The result is already known: no blocks come.
    Is(Arrival),
    /// Blocks come that should have these checksums.
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
            let from = block.memory.share(block.offset, block.bytes, Arc::clone(&granted.lease));
            blocks.push((from, to.clone()));
        }
        Self::Copied { sums: granted.blocks.iter().map(|block| block.checksum).collect(), granted }
    }

    fn is_put_off(&mut self) {
        if matches!(self, Self::Copied { .. }) {
            *self = Self::Is(Arrival::Busy { retry_after_ms: COPY_RETRY_MS });
        }
    }

    /// The result for the chunk. Takes the checksums of the chunk's blocks off the front of `came`.
    fn arrival(self, came: &mut impl Iterator<Item = Checksums>) -> Arrival {
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
