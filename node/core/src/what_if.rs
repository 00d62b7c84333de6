//! Tries more memory, more disk or another policy: plays the last lookups of a node again through the store.
//!
//! The first half of the lookups only fills the cache; the second half is counted. A chunk on disk counts as a chunk in memory,
//! and no other node is asked.

pub mod cluster;
pub mod together;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use larder_protocol::{ChunkHash, Fingerprint};

use crate::store::policy::PolicyName;
use crate::store::replay::{TraceRequest, replay_after};
use crate::time::Millis;

/// A lookup of a whole prompt, without its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PastLookup {
    /// The time of the lookup.
    pub at: Millis,
    /// The namespace.
    pub namespace: Fingerprint,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens that were found.
    pub tokens_hit: u64,
    /// A name for each full chunk. Chunks of different namespaces have different names.
    pub chunks: Arc<[u64]>,
}

/// The last lookups of an actor. The oldest go first.
#[derive(Debug, Default)]
pub struct Past {
    kept: VecDeque<PastLookup>,
    chunks: usize,
}

/// A cache to try.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Variant {
    /// Its policy.
    pub policy: PolicyName,
    /// Its size, as a multiple of the present one; `None` for a cache that never evicts.
    pub times: Option<f64>,
}

/// The hits of a cache that was tried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tried {
    /// The cache.
    pub variant: Variant,
    /// Chunks that it keeps.
    pub capacity_chunks: u64,
    /// Tokens of the counted lookups that it hits.
    pub tokens_hit: u64,
}

/// The lookups that were played, and their results in each cache or cluster that was tried.
#[derive(Debug, Clone, PartialEq)]
pub struct Played<T> {
    /// Lookups that only filled the caches.
    pub warming_lookups: u64,
    /// Lookups that were counted.
    pub counted_lookups: u64,
    /// Lookups that were left out: their chunks have another size, or a chunk of theirs follows another parent than before.
    pub left_out_lookups: u64,
    /// Time from the first counted lookup to the last.
    pub counted_ms: u64,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Different chunks of all lookups that were played: a cache cannot use more room.
    pub distinct_chunks: u64,
    /// Tokens of the counted lookups.
    pub tokens_asked: u64,
    /// Tokens of the counted lookups that were really found, at other nodes too.
    pub tokens_found: u64,
    /// The results, the present cache or cluster included, in the order of `variants`.
    pub tried: Vec<T>,
}

impl Past {
    /// Keeps a lookup of a whole prompt's full chunks.
    pub fn note(&mut self, hashes: &[ChunkHash], about: PastLookup) {
        let of_namespace = mark(&about.namespace);
        let chunks: Arc<[u64]> = hashes.iter().map(|hash| hash.short() ^ of_namespace).collect();
        self.chunks += chunks.len();
        self.kept.push_back(PastLookup { chunks, ..about });
        while self.kept.len() > MOST_LOOKUPS || self.chunks > MOST_CHUNKS {
            let Some(oldest) = self.kept.pop_front() else { break };
            self.chunks -= oldest.chunks.len();
        }
    }

    /// Bytes of the lookups' chunks.
    pub fn bytes(&self) -> u64 {
        (self.chunks * size_of::<u64>()) as u64
    }

    /// The lookups, the oldest first.
    pub fn lookups(&self) -> impl Iterator<Item = &PastLookup> {
        self.kept.iter()
    }
}

/// The caches to try where `present` is the policy in force: other sizes with it, and other policies with the present size.
pub fn variants(present: PolicyName) -> Vec<Variant> {
    let sizes = SIZES.iter().map(|&times| Variant { policy: present, times: Some(times) });
    let others = PolicyName::ALL.into_iter().filter(|&policy| policy != present);
    let others = others.map(|policy| Variant { policy, times: Some(1.0) });
    sizes.chain([Variant { policy: present, times: None }]).chain(others).collect()
}

/// Plays lookups through every cache; `capacity_chunks` is the present size. Takes about a microsecond for each chunk and cache.
/// `None` if there is nothing to play.
pub fn play(
    mut lookups: Vec<PastLookup>,
    capacity_chunks: u64,
    present: PolicyName,
) -> Option<Played<Tried>> {
    lookups.sort_by_key(|lookup| lookup.at);
    let all = lookups.len();
    let mut left = MOST_PLAYED_CHUNKS;
    let is_recent = |lookup: &PastLookup| {
        left = left.saturating_sub(lookup.chunks.len().max(1));
        left > 0
    };
    let too_old = all - lookups.iter().rev().map(is_recent).take_while(|&is_recent| is_recent).count();
    lookups.drain(..too_old);
    let chunk_tokens = main_chunk_tokens(lookups.iter())?;
    lookups.retain(|lookup| lookup.chunk_tokens == chunk_tokens);
    let distinct_chunks = keep_chained(&mut lookups);
    let warming = lookups.len() / 2;
    let counted = &lookups[warming..];
    let (first, last) = (counted.first()?.at, counted.last()?.at);
    let request = |lookup: &PastLookup| TraceRequest {
        at_ms: lookup.at.0,
        tokens: lookup.prompt_tokens,
        blocks: lookup.chunks.to_vec(),
    };
    let requests: Vec<TraceRequest> = lookups.iter().map(request).collect();
    let try_one = |variant: Variant| {
        let capacity = variant.times.map_or(distinct_chunks, |times| (capacity_chunks as f64 * times) as u64);
        let capacity_chunks = capacity.max(1);
        // More room than chunks is not used.
        let room = capacity_chunks.min(distinct_chunks.max(1));
        let replayed = replay_after(&requests, warming, chunk_tokens, room, variant.policy, false);
        Tried { variant, capacity_chunks, tokens_hit: replayed.tokens_hit }
    };
    Some(Played {
        warming_lookups: warming as u64,
        counted_lookups: counted.len() as u64,
        left_out_lookups: (all - too_old - lookups.len()) as u64,
        counted_ms: last.since(first),
        chunk_tokens,
        distinct_chunks,
        tokens_asked: counted.iter().map(|lookup| lookup.prompt_tokens).sum(),
        tokens_found: counted.iter().map(|lookup| lookup.tokens_hit).sum(),
        tried: variants(present).into_iter().map(try_one).collect(),
    })
}

impl PastLookup {
    /// The [`ChunkHash::short`] of the chunk of `namespace` that has this name.
    pub fn short_hash(namespace: &Fingerprint, name: u64) -> u64 {
        name ^ mark(namespace)
    }
}

/// Tells the chunks of namespaces apart: engines that hash on their own give chunks of two namespaces the same hash.
fn mark(namespace: &Fingerprint) -> u64 {
    ChunkHash(namespace.0).short().rotate_left(1)
}

/// The size, in tokens, that most chunks have: a replay has chunks of one size.
fn main_chunk_tokens<'a>(lookups: impl Iterator<Item = &'a PastLookup>) -> Option<u32> {
    let mut chunks = HashMap::<u32, usize>::new();
    for lookup in lookups {
        *chunks.entry(lookup.chunk_tokens).or_default() += lookup.chunks.len();
    }
    chunks.into_iter().max_by_key(|&(tokens, chunks)| (chunks, tokens)).map(|(tokens, _)| tokens)
}

/// Keeps the lookups whose chunks always follow the same parent, as a store demands; returns the number of their different
/// chunks.
pub(crate) fn keep_chained(lookups: &mut Vec<PastLookup>) -> u64 {
    let mut parents = HashMap::<u64, Option<u64>>::new();
    lookups.retain(|lookup| {
        let own: HashSet<u64> = lookup.chunks.iter().copied().collect();
        let before = std::iter::once(None).chain(lookup.chunks.iter().copied().map(Some));
        let links = || lookup.chunks.iter().copied().zip(before.clone());
        let is_chained = own.len() == lookup.chunks.len()
            && links().all(|(chunk, parent)| parents.get(&chunk).is_none_or(|known| *known == parent));
        if is_chained {
            parents.extend(links());
        }
        is_chained
    });
    parents.len() as u64
}

/// Sizes to try, as multiples of the present one.
const SIZES: [f64; 6] = [0.5, 1.0, 1.5, 2.0, 4.0, 8.0];

/// The most lookups that an actor keeps.
const MOST_LOOKUPS: usize = 16_384;

/// The most chunks of these lookups, of 8 bytes each: 2 MiB.
const MOST_CHUNKS: usize = 262_144;

/// Limit of the chunks that are played, from the last lookups of all actors.
const MOST_PLAYED_CHUNKS: usize = 131_072;

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(at: u64, chunks: &[u64]) -> PastLookup {
        let prompt_tokens = chunks.len() as u64 * 16 + 1;
        PastLookup {
            at: Millis(at),
            namespace: Fingerprint([1; 32]),
            chunk_tokens: 16,
            prompt_tokens,
            tokens_hit: 16,
            chunks: chunks.into(),
        }
    }

    fn hit(played: &Played<Tried>, policy: PolicyName, times: Option<f64>) -> u64 {
        let wanted = Variant { policy, times };
        played.tried.iter().find(|tried| tried.variant == wanted).unwrap().tokens_hit
    }

    #[test]
    fn twice_the_memory_keeps_what_a_loop_over_it_loses() {
        // Eight prompts of one chunk in turn, and room for four.
        let lookups = (0..80).map(|at| lookup(at, &[100 + at % 8])).collect();
        let played = play(lookups, 4, PolicyName::Lru).unwrap();
        assert_eq!((played.warming_lookups, played.counted_lookups, played.distinct_chunks), (40, 40, 8));
        assert_eq!((played.tokens_asked, played.tokens_found, played.counted_ms), (40 * 17, 40 * 16, 39));
        assert_eq!(hit(&played, PolicyName::Lru, Some(1.0)), 0, "a loop is the worst of LRU");
        assert_eq!(hit(&played, PolicyName::Lru, Some(2.0)), 40 * 16);
        assert_eq!(hit(&played, PolicyName::Lru, None), 40 * 16);
        assert!(hit(&played, PolicyName::Lfu, Some(1.0)) <= 40 * 16);
        assert_eq!(played.tried.len(), variants(PolicyName::Lru).len());
    }

    #[test]
    fn lookups_that_contradict_each_other_or_have_other_chunks_are_left_out() {
        let other_size = PastLookup { chunk_tokens: 32, ..lookup(5, &[9]) };
        let lookups =
            vec![lookup(1, &[1, 2]), lookup(2, &[3, 2]), lookup(3, &[1, 1]), lookup(4, &[1, 2]), other_size];
        let played = play(lookups, 4, PolicyName::Lru).unwrap();
        assert_eq!((played.warming_lookups, played.counted_lookups, played.left_out_lookups), (1, 1, 3));
        assert_eq!((played.chunk_tokens, hit(&played, PolicyName::Lru, Some(1.0))), (16, 32));
        assert!(play(Vec::new(), 4, PolicyName::Lru).is_none());
    }

    #[test]
    fn the_past_is_bounded_and_equal_hashes_of_two_namespaces_are_two_chunks() {
        let mut past = Past::default();
        let about = lookup(1, &[]);
        let hashes = vec![ChunkHash([7; 32]); 1_024];
        (0..MOST_CHUNKS / 1_024 + 3).for_each(|_| past.note(&hashes, about.clone()));
        assert_eq!(past.lookups().count(), MOST_CHUNKS / 1_024);
        past.note(&hashes, PastLookup { namespace: Fingerprint([2; 32]), ..about.clone() });
        let kept: Vec<&PastLookup> = past.lookups().collect();
        let (one, other) = (kept[0], kept.last().unwrap());
        assert_ne!(one.chunks[0], other.chunks[0]);
        let short = |lookup: &PastLookup| PastLookup::short_hash(&lookup.namespace, lookup.chunks[0]);
        assert_eq!((short(one), short(other)), (hashes[0].short(), hashes[0].short()));
        (0..MOST_LOOKUPS + 3).for_each(|_| past.note(&hashes[..1], about.clone()));
        assert_eq!((past.lookups().count(), past.bytes()), (MOST_LOOKUPS, 8 * MOST_LOOKUPS as u64));
    }

    #[test]
    fn lookups_of_several_actors_are_played_in_the_order_of_their_times() {
        let in_order: Vec<PastLookup> = (0..80).map(|at| lookup(at, &[100 + at / 20])).collect();
        let (mut by_actor, others): (Vec<_>, Vec<_>) =
            in_order.iter().cloned().partition(|lookup| lookup.at.0 % 2 == 1);
        by_actor.extend(others);
        assert_eq!(play(by_actor, 1, PolicyName::Lru), play(in_order, 1, PolicyName::Lru));
    }

    #[test]
    fn chunks_have_the_size_that_most_chunks_have_not_most_lookups() {
        let small = |at, chunk| PastLookup { chunk_tokens: 32, ..lookup(at, &[chunk]) };
        let long: Vec<u64> = (0..10).collect();
        let lookups = vec![small(1, 90), small(2, 91), small(3, 92), lookup(4, &long), lookup(5, &long)];
        let played = play(lookups, 16, PolicyName::Lru).unwrap();
        assert_eq!((played.chunk_tokens, played.left_out_lookups), (16, 3));
    }
}
