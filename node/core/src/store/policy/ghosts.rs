//! Chunks that were evicted not long ago.

use super::Facts;
use crate::store::ids::ChunkNumber;

/// Two sets of short hashes. Each keeps the last hashes that were added and not taken out.
///
/// Both share one table with buckets of eight; a full bucket loses its oldest entry. 32 bits of a hash are kept: at a million
/// ghosts, one look-up in a thousand finds a wrong ghost. A ghost takes 16 to 20 bytes.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    buckets: Vec<[Ghost; WAYS]>,
    kinds: [Kind; 2],
}

/// 32 bits of each cached chunk's short hash, for its later ghost.
#[derive(Debug, Default)]
pub(super) struct ShortHashes {
    hashes: Vec<u32>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Kind {
    added: u32,
    most: u32,
    len: f64,
    /// The last `span` additions may still be here.
    span: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Ghost {
    hash: u32,
    /// The number of the addition in the lower 31 bits, and the set in the highest bit; 0 if there is no ghost.
    born: u32,
}

impl Ghosts {
    /// Adds a ghost to a set that keeps its last `most` ghosts.
    pub(super) fn insert(&mut self, kind: usize, hash: u32, most: usize) {
        let most = bounded(most);
        let born = self.kinds[kind].add(most) | (kind as u32) << 31;
        let wanted = self.kinds.iter().map(|kind| kind.most as usize).sum::<usize>();
        if wanted * LEAST_SPARE > self.buckets.len() * WAYS {
            self.grow(wanted * LEAST_SPARE * 5 / 4);
        }
        self.place(Ghost { hash, born });
    }

    /// Keeps the last `most` ghosts of a set.
    pub(super) fn limit(&mut self, kind: usize, most: usize) {
        self.kinds[kind].limit(bounded(most));
    }

    /// Takes a ghost out, if it is here, and returns its set.
    pub(super) fn take(&mut self, hash: u32) -> Option<usize> {
        let bucket = self.bucket(hash)?;
        let kinds = &mut self.kinds;
        let found =
            self.buckets[bucket].iter_mut().find(|ghost| ghost.hash == hash && ghost.age(kinds).is_some())?;
        let kind = (std::mem::take(found).born >> 31) as usize;
        kinds[kind].len = (kinds[kind].len - 1.0).max(0.0);
        Some(kind)
    }

    /// The approximate number of ghosts in a set.
    pub(super) fn len(&self, kind: usize) -> usize {
        self.kinds[kind].len as usize
    }

    fn place(&mut self, ghost: Ghost) {
        let Some(bucket) = self.bucket(ghost.hash) else { return };
        let kinds = self.kinds;
        let age = |ghost: &&mut Ghost| ghost.age(&kinds).unwrap_or(u32::MAX);
        if let Some(oldest) = self.buckets[bucket].iter_mut().max_by_key(age) {
            *oldest = ghost;
        }
    }

    fn grow(&mut self, ghosts: usize) {
        let old = std::mem::replace(&mut self.buckets, vec![[Ghost::default(); WAYS]; ghosts.div_ceil(WAYS)]);
        let kinds = self.kinds;
        old.into_iter()
            .flatten()
            .filter(|ghost| ghost.age(&kinds).is_some())
            .for_each(|ghost| self.place(ghost));
    }

    fn bucket(&self, hash: u32) -> Option<usize> {
        (!self.buckets.is_empty()).then(|| ((u64::from(hash) * self.buckets.len() as u64) >> 32) as usize)
    }
}

impl Ghost {
    /// The number of later ghosts of its set; `None` if this is no ghost, or too many came later.
    fn age(self, kinds: &[Kind; 2]) -> Option<u32> {
        let Kind { added, span, .. } = kinds[(self.born >> 31) as usize];
        let age = added.wrapping_sub(self.born & BORN) & BORN;
        (self.born & BORN != 0 && f64::from(age) < span).then_some(age)
    }
}

impl Kind {
    /// Counts one more ghost, keeps the last `most` ghosts, and returns the number of the new ghost.
    fn add(&mut self, most: u32) -> u32 {
        self.added = if self.added == BORN { 1 } else { self.added + 1 };
        self.span += 1.0;
        self.len += 1.0;
        self.limit(most);
        self.added
    }

    /// Keeps the last `most` ghosts. It is not known which older ghosts were taken out, so the span is shortened as if they were
    /// evenly spread.
    fn limit(&mut self, most: u32) {
        self.most = most;
        let too_many = self.len - f64::from(most);
        if too_many > 0.0 {
            self.span -= self.span * too_many / self.len;
            self.len = f64::from(most);
        }
    }
}

impl ShortHashes {
    /// Notes the hash of a chunk that enters, and returns it.
    pub(super) fn note(&mut self, chunk: ChunkNumber, facts: Facts) -> u32 {
        if self.hashes.len() <= chunk.position() {
            self.hashes.resize(chunk.position() + 1, 0);
        }
        let hash = facts.short_hash as u32;
        self.hashes[chunk.position()] = hash;
        hash
    }

    /// The hash of a cached chunk.
    pub(super) fn get(&self, chunk: ChunkNumber) -> u32 {
        self.hashes[chunk.position()]
    }
}

fn bounded(most: usize) -> u32 {
    u32::try_from(most).unwrap_or(u32::MAX) & BORN
}

const WAYS: usize = 8;

/// The least number of places for each ghost. With fewer, buckets overflow, and policies that depend on ghosts lose up to half a
/// point of hit rate.
const LEAST_SPARE: usize = 2;

/// The bits of an addition's number.
const BORN: u32 = u32::MAX >> 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u32) -> u32 {
        fastrand::Rng::with_seed(n.into()).u32(..)
    }

    #[test]
    fn a_ghost_is_found_once_and_until_too_many_came_after_it() {
        let mut ghosts = Ghosts::default();
        (0..100).for_each(|n| ghosts.insert(0, hash(n), 60));
        assert_eq!([39, 40, 99, 99].map(|n| ghosts.take(hash(n))), [None, Some(0), Some(0), None]);
        assert_eq!(ghosts.len(0), 58);
    }

    #[test]
    fn the_two_sets_age_apart_and_survive_growth() {
        let mut ghosts = Ghosts::default();
        ghosts.insert(1, hash(7), 4);
        (100..1_000).for_each(|n| ghosts.insert(0, hash(n), n as usize));
        assert_eq!(ghosts.take(hash(7)), Some(1));
        let found = (100..1_000).filter(|&n| ghosts.take(hash(n)).is_some()).count();
        assert!(found > 890, "{found}: buckets lose few");
    }
}
