//! Estimates how often something was seen lately: a count-min sketch with 4-bit counters that are halved now and then.
//!
//! As in Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (TOS 2017) and Caffeine.

/// Counts up to 15 for 32-bit hashes. It takes 8 to 16 bytes for each chunk that it is made for.
#[derive(Debug, Default)]
pub(super) struct Sketch {
    /// Each word has 16 counters. A hash has one counter in each of four words.
    words: Vec<u64>,
    additions: usize,
}

impl Sketch {
    /// Fits the sketch to `chunks` cached chunks. Its counts are lost when it grows.
    pub(super) fn fit(&mut self, chunks: usize) {
        if chunks > self.words.len() {
            self.words = vec![0; chunks.next_power_of_two().max(64)];
            self.additions = 0;
        }
    }

    /// Counts one more use of a hash.
    pub(super) fn add(&mut self, hash: u32) {
        if self.words.is_empty() {
            return;
        }
        let mut added = false;
        for row in 0..ROWS {
            let (word, shift) = self.counter(hash, row);
            if self.words[word] >> shift & 15 < 15 {
                self.words[word] += 1 << shift;
                added = true;
            }
        }
        self.additions += usize::from(added);
        if self.additions >= SAMPLE * self.words.len() {
            self.additions /= 2;
            self.words.iter_mut().for_each(|word| *word = *word >> 1 & 0x7777_7777_7777_7777);
        }
    }

    /// The number of uses counted for a hash.
    pub(super) fn count(&self, hash: u32) -> u64 {
        let count = |row| {
            let (word, shift) = self.counter(hash, row);
            self.words.get(word).map_or(0, |word| word >> shift & 15)
        };
        (0..ROWS).map(count).min().unwrap_or(0)
    }

    fn counter(&self, hash: u32, row: usize) -> (usize, u32) {
        let mixed = (u64::from(hash) + 1).wrapping_mul(SEEDS[row]);
        let word = (mixed >> 32) as usize & self.words.len().saturating_sub(1);
        (word, (row as u32 * 4 + (mixed >> 30) as u32 % 4) * 4)
    }
}

const ROWS: usize = 4;

const SEEDS: [u64; ROWS] =
    [0xc3a5_c85c_97cb_3127, 0xb492_b66f_be98_f273, 0x9ae1_6a3b_2f90_404f, 0xcbf2_9ce4_8422_2325];

/// Counters are halved after this many additions a word.
const SAMPLE: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_often_counts_more_and_fades() {
        let mut sketch = Sketch::default();
        sketch.fit(1_000);
        (0..8).for_each(|_| sketch.add(7));
        assert_eq!((sketch.count(7), sketch.count(8)), (8, 0));
        (100..10_400).for_each(|n| sketch.add(n));
        assert!((4..8).contains(&sketch.count(7)), "{}", sketch.count(7));
    }
}
