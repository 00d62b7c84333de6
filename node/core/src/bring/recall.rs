//! Reads chunks from disk for peers. The chunks are sent and do not stay in memory.

use std::sync::Arc;
use std::time::Duration;

use larder_protocol::peer::Class;
use larder_protocol::{ChunkHash, Fingerprint};

use super::Fetch;
use crate::Core;
use crate::cause::Cause;
use crate::directory::Holders;
use crate::effect::Effect;
use crate::event::Below;
use crate::event::RecallId;
use crate::store::{FetchId, Granted, Recall};

/// A peer that waits for a chunk from disk.
#[derive(Debug)]
pub(super) struct Recalled {
    recall: RecallId,
    fingerprint: Fingerprint,
    hash: ChunkHash,
    block_bytes: Arc<[u64]>,
}

/// The answer to a peer that asks for a chunk.
#[derive(Debug)]
pub enum Offer {
    /// The answer.
    Now(Granted),
    /// The chunk is read from disk: [`Effect::Granted`] answers.
    Later(RecallId),
}

impl Core {
    /// Grants chunks of a prompt, first to last, to a peer whose blocks of the chunks have these sizes.
    pub fn offer(
        &mut self,
        now: Duration,
        (fingerprint, hashes): (Fingerprint, &[ChunkHash]),
        block_bytes: &Arc<[u64]>,
        class: Class,
        cause: &Cause,
    ) -> Vec<Offer> {
        self.now = self.now.max(now);
        let granted = self.store.grant_all(&fingerprint, hashes, block_bytes);
        let mut offer = |(&hash, granted)| match granted {
            Granted::OnDisk => self.offer_from_disk((fingerprint, hash), block_bytes, class, cause),
            granted => Offer::Now(granted),
        };
        hashes.iter().zip(granted).map(&mut offer).collect()
    }

    fn offer_from_disk(
        &mut self,
        (fingerprint, hash): (Fingerprint, ChunkHash),
        block_bytes: &Arc<[u64]>,
        class: Class,
        cause: &Cause,
    ) -> Offer {
        if self.bring.sources.disk.is_none() {
            return Offer::Now(Granted::Busy);
        }
        let Some(Recall { fetch, wanted }) = self.store.recall(&fingerprint, &hash) else {
            return Offer::Now(Granted::Busy);
        };
        let recall = RecallId(self.bring.next_number());
        let recalled = Recalled { recall, fingerprint, hash, block_bytes: Arc::clone(block_bytes) };
        self.bring.recalls.entry(fetch).or_default().push(recalled);
        if let Some(wanted) = wanted {
            let cause = super::gather::read_cause(cause, Below::Disk, std::slice::from_ref(&wanted));
            let wanted = Fetch::new(wanted, fingerprint, class, Holders::default(), Duration::ZERO, cause);
            self.bring.fetches.insert(fetch, wanted);
            self.read_from(Below::Disk, vec![fetch]);
        } else if class == Class::Decode {
            self.hurry_fetch(fetch);
        }
        Offer::Later(recall)
    }

    /// Answers the peers that waited for a chunk: it is here now, or did not come.
    pub(crate) fn end_recalls(&mut self, id: FetchId) {
        for Recalled { recall, fingerprint, hash, block_bytes } in
            self.bring.recalls.remove(&id).unwrap_or_default()
        {
            let granted = match self.store.grant(&fingerprint, &hash, &block_bytes) {
                Granted::OnDisk => Granted::NotHeld,
                granted => granted,
            };
            self.effects.push_back(Effect::Granted { recall, granted });
            self.store.end_recall(id);
        }
    }
}
