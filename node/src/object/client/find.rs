//! Finding which chunks the store has.

use futures_util::StreamExt;
use futures_util::future::try_join_all;
use futures_util::stream::iter;
use larder_core::store::ids::ChunkKey;
use larder_core::tiers::presence::Fact;
use larder_core::tiers::search::Search;
use larder_protocol::{ChunkRef, Fingerprint};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::super::BlockId;
use super::super::metrics::Side;
use super::super::record::ObjectKey;
use super::super::trouble::{Trouble, TroubleKind};
use super::request::{HEAD, Line};
use super::{Client, Failed};

impl Client {
    /// Whether each chunk is there; `None` if the store did not say. In a chain, the answer ends with the first hole, or where
    /// nothing more is known.
    pub(in super::super) async fn find(
        &self,
        fingerprint: Fingerprint,
        chunks: &[ChunkRef],
        blocks: &[BlockId],
        deadline: Instant,
    ) -> Vec<Option<bool>> {
        let deadline = deadline.min(Instant::now() + self.find_time);
        let keys: Vec<ChunkKey> =
            chunks.iter().map(|chunk| ChunkKey { fingerprint, hash: chunk.hash }).collect();
        // In a namespace without chains, each chunk begins a run of its own.
        let is_flat = chunks.iter().all(|chunk| chunk.index == 0 && chunk.anchor == chunk.hash);
        if is_flat {
            return self.find_each(&keys, blocks, deadline).await;
        }
        let mut search = Search::new(keys.len());
        for (position, key) in keys.iter().enumerate() {
            if let Some(fact) = self.known_chunk(key, blocks) {
                search.tell(position, fact == Fact::Present);
            }
        }
        loop {
            let next = search.next();
            if next.is_empty() {
                break;
            }
            // Told in the order of the chain: a hole counts, whatever comes behind it.
            let asked = next.len();
            let mut found = self.look(&keys, blocks, next, deadline).await;
            found.sort_unstable();
            let is_cut = found.len() < asked;
            found.into_iter().for_each(|(position, is_there)| search.tell(position, is_there));
            if is_cut || Instant::now() >= deadline {
                break;
            }
        }
        // Without an answer about the next chunk, nothing is said of it: nobody may take it for absent.
        let hole = (search.next().is_empty() && search.present() < keys.len()).then_some(false);
        std::iter::repeat_n(true, search.present()).chain(hole).map(Some).collect()
    }

    async fn find_each(&self, keys: &[ChunkKey], blocks: &[BlockId], deadline: Instant) -> Vec<Option<bool>> {
        let is_there = |key| self.known_chunk(key, blocks).map(|fact| fact == Fact::Present);
        let mut there: Vec<Option<bool>> = keys.iter().map(is_there).collect();
        let unknown = (0..keys.len()).filter(|&position| there[position].is_none());
        for (position, is_there) in self.look(keys, blocks, unknown.collect(), deadline).await {
            there[position] = Some(is_there);
        }
        there
    }

    /// Asks the store for some of the chunks: as many at once as requests are allowed, in turn with other lookups. Returns the
    /// answers that come before the deadline. A failure is no answer.
    async fn look(
        &self,
        keys: &[ChunkKey],
        blocks: &[BlockId],
        positions: Vec<usize>,
        deadline: Instant,
    ) -> Vec<(usize, bool)> {
        if positions.is_empty() || self.is_open(Side::Reading) {
            return Vec::new();
        }
        let (all, mut answered) = (positions.len(), 0);
        let mut found = Vec::with_capacity(all);
        // A request that is cut off here has not failed: only its `find` had no more time.
        let (start, far) = (Instant::now(), deadline + self.find_time.max(MOST_FIND_TIME));
        let line = &Semaphore::new((self.most_requests / 4).max(1));
        let asked = positions.into_iter().map(|position| async move {
            (position, self.head_all(&keys[position], blocks, line, far).await)
        });
        let mut asked = std::pin::pin!(iter(asked).buffer_unordered(self.most_requests));
        while let Ok(Some((position, head))) = timeout_at(deadline, asked.next()).await {
            answered += 1;
            match head {
                Ok(()) => found.push((position, true)),
                Err(Failed::Absent) => found.push((position, false)),
                Err(_) => {}
            }
        }
        let was_silent = self.is_silent_for(Side::Reading, self.find_time / 2);
        if answered < all && was_silent && !self.has_heard_since(Side::Reading, start) {
            // The store was silent all this time, and nobody else waits as long. A store that is only slow answers the trial.
            // Questions that waited for their turn here say nothing of the store.
            self.went_silent(Side::Reading, &Trouble::new(TroubleKind::TimedOut, HEAD, "no answer in time"));
        }
        found
    }
}

impl Client {
    /// The known fact of a chunk: present if all its blocks are; absent or damaged if one block is.
    fn known_chunk(&self, &chunk: &ChunkKey, blocks: &[BlockId]) -> Option<Fact> {
        let mut all = Some(Fact::Present);
        for &block in blocks {
            match self.known(&ObjectKey { chunk, block }) {
                Some(Fact::Present) => {}
                Some(other) => return Some(other),
                None => all = None,
            }
        }
        all
    }

    /// Checks that each of these blocks is there. Fails if one is not, or is not known to be.
    async fn head_all(
        &self,
        &chunk: &ChunkKey,
        blocks: &[BlockId],
        line: &Semaphore,
        deadline: Instant,
    ) -> Result<(), Failed> {
        let unknown = blocks.iter().map(|&block| ObjectKey { chunk, block });
        let unknown = unknown.filter(|key| self.known(key) != Some(Fact::Present));
        let asked = unknown.map(|key| async move { self.head(&key, Line::Lookup(line), deadline).await });
        try_join_all(asked).await.map(drop)
    }
}

/// Longer than any `find` waits.
const MOST_FIND_TIME: std::time::Duration = std::time::Duration::from_secs(1);
