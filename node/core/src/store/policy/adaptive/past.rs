//! Chunks that were evicted and may come back.

use hashbrown::HashMap;

use super::curves::Ages;

/// Ghosts by 32 bits of their hash: half as many as chunks are cached, and always [`LEAST_GHOSTS`].
#[derive(Debug, Default)]
pub(super) struct Past {
    ghosts: HashMap<u32, Ghost>,
}

/// The facts of a chunk that comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    /// How often it was used; 15 stands for more, too.
    pub(super) uses: u8,
    /// Time since its last use.
    pub(super) age: u64,
}

/// The time of the last use, in units of eight, in the upper 28 bits; the number of uses in the lowest four.
#[derive(Debug, Clone, Copy)]
struct Ghost(u32);

impl Past {
    /// How many ghosts there are.
    pub(super) fn len(&self) -> usize {
        self.ghosts.len()
    }

    /// Remembers a chunk that is evicted.
    pub(super) fn add(&mut self, hash: u32, uses: u8, used_at: u64) {
        self.ghosts.insert(hash, Ghost((used_at >> 3 << 4) as u32 | u32::from(uses.min(15))));
    }

    /// Takes out the facts of a chunk.
    pub(super) fn take(&mut self, hash: u32, now: u64) -> Option<Seen> {
        let ghost = self.ghosts.remove(&hash)?;
        Some(Seen { uses: ghost.uses(), age: ghost.age(now) })
    }

    /// Adds the ages of all ghosts, and forgets the oldest if there are too many.
    pub(super) fn look(&mut self, now: u64, cached: usize, ages: &mut Ages) {
        let mut own = Ages::default();
        self.ghosts.values().for_each(|ghost| {
            own.add(ghost.uses(), ghost.age(now));
            ages.add(ghost.uses(), ghost.age(now));
        });
        let oldest = own.newest((cached / 2).max(LEAST_GHOSTS)).min(MOST_AGE);
        self.ghosts.retain(|_, ghost| ghost.age(now) <= oldest);
    }
}

impl Ghost {
    fn uses(self) -> u8 {
        (self.0 & 15) as u8
    }

    fn age(self, now: u64) -> u64 {
        u64::from(((now >> 3 << 4) as u32).wrapping_sub(self.0 & !15) >> 4) << 3
    }
}

/// Half a megabyte.
const LEAST_GHOSTS: usize = 32_768;

/// Half of the range of a ghost's time.
const MOST_AGE: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ghost_knows_its_uses_and_its_age_also_after_its_clock_went_round() {
        let mut past = Past::default();
        for start in [0, (1 << 31) - 400, 5 << 40] {
            past.add(7, 200, start + 80);
            assert_eq!(past.take(7, start + 880), Some(Seen { uses: 15, age: 800 }));
            assert_eq!(past.take(7, start + 880), None);
        }
    }

    #[test]
    fn the_oldest_ghosts_are_forgotten() {
        let mut past = Past::default();
        (0..200_000).for_each(|n| past.add(n, 1, u64::from(n)));
        past.look(200_000, 150_000, &mut Ages::default());
        assert!((75_000..110_000).contains(&past.len()), "{}", past.len());
        assert_eq!((past.take(199_999, 200_000).is_some(), past.take(9, 200_000)), (true, None));
    }
}
