//! Chunks that were evicted and may come back.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::kinds::Kind;
use super::state::Moment;

/// Ghosts by 32 bits of their hash: half as many as there are cached chunks, but at least [`LEAST_GHOSTS`].
///
/// The same calls lead to the same contents and the same order of [`Past::iter`], so a run can be repeated.
#[derive(Debug, Default)]
pub(super) struct Past {
    ghosts: HashTable<(u32, Ghost)>,
}

/// The state of a chunk at its eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ghost {
    /// Its kind.
    pub(super) kind: Kind,
    /// Its last use.
    pub(super) used: Moment,
}

impl Past {
    /// The number of ghosts.
    pub(super) fn len(&self) -> usize {
        self.ghosts.len()
    }

    /// Remembers a chunk that is evicted, and forgets the oldest if there are too many.
    pub(super) fn add(&mut self, hash: u32, ghost: Ghost, now: Moment, cached: usize) {
        match self.ghosts.entry(spread(hash), |entry| entry.0 == hash, |entry| spread(entry.0)) {
            Entry::Occupied(mut entry) => entry.get_mut().1 = ghost,
            Entry::Vacant(entry) => _ = entry.insert((hash, ghost)),
        }
        let most = (cached / 2).max(LEAST_GHOSTS);
        if self.ghosts.len() > most + most / 4 {
            let mut ages: Vec<u32> = self.iter().map(|(_, ghost)| now.since(ghost.used).uses).collect();
            let (_, &mut oldest, _) = ages.select_nth_unstable(most - 1);
            self.ghosts.retain(|entry| now.since(entry.1.used).uses <= oldest);
        }
    }

    /// The ghost of a chunk.
    pub(super) fn get(&self, hash: u32) -> Option<Ghost> {
        self.ghosts.find(spread(hash), |entry| entry.0 == hash).map(|entry| entry.1)
    }

    /// Takes a ghost out.
    pub(super) fn take(&mut self, hash: u32) -> Option<Ghost> {
        let entry = self.ghosts.find_entry(spread(hash), |entry| entry.0 == hash).ok()?;
        Some(entry.remove().0.1)
    }

    /// All ghosts, with their hashes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, Ghost)> {
        self.ghosts.iter().copied()
    }
}

/// Spreads a hash over 64 bits: the table uses the lowest bits and the highest seven.
pub(super) fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// The least number of ghosts to keep. They take half a megabyte.
const LEAST_GHOSTS: usize = 32_768;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_ghosts_are_forgotten() {
        let mut past = Past::default();
        let at = |uses| Moment { wall: 0, uses };
        for n in 0..200_000 {
            past.add(n, Ghost { kind: Kind::FIRST, used: at(n) }, at(n), 150_000);
        }
        assert!((75_000..95_000).contains(&past.len()), "{}", past.len());
        let ghost = past.take(199_999);
        assert_eq!(ghost, Some(Ghost { kind: Kind::FIRST, used: at(199_999) }));
        assert_eq!((past.get(199_999), past.get(9)), (None, None));
    }

    #[test]
    fn a_chunk_that_is_evicted_again_has_one_ghost() {
        let mut past = Past::default();
        for wall in [1, 2] {
            let used = Moment { wall, uses: wall };
            past.add(7, Ghost { kind: Kind::FIRST, used }, used, 10);
        }
        assert_eq!((past.len(), past.get(7).map(|ghost| ghost.used.wall)), (1, Some(2)));
    }
}
