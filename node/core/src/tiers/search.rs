//! Finds how much of a chain's beginning the store has, in few rounds of questions.
//!
//! The search is pure. The first round asks for chunks 0, 1, 3, 7, 15, ... and the last chunk. Each later round divides the gap
//! between the last present chunk and the first absent chunk. So the number of rounds grows with the logarithm of the chain's
//! length. A chunk counts as present if a later chunk is present, since a writer writes a chain from its beginning. A hole costs
//! the reader one answer `NotHeld`, nothing else.

use std::collections::BTreeSet;

/// The search through one chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Search {
    /// The number of chunks from the beginning that are known to be there.
    present: usize,
    /// The position of the first absent chunk, or the length of the chain.
    absent: usize,
}

impl Search {
    /// A search over a chain of `chunks` chunks, about which nothing is known.
    pub fn new(chunks: usize) -> Self {
        Self { present: 0, absent: chunks }
    }

    /// Takes the answer whether a chunk is there.
    pub fn tell(&mut self, position: usize, is_there: bool) {
        match is_there {
            true if position < self.absent => self.present = self.present.max(position + 1),
            // An earlier chunk is missing, so this chunk is of no use.
            true => {}
            false => {
                self.absent = self.absent.min(position);
                self.present = self.present.min(self.absent);
            }
        }
    }

    /// The chunks to ask for in the next round, all at once; empty if the result is known.
    pub fn next(&self) -> Vec<usize> {
        let unknown = self.absent - self.present;
        let offsets: BTreeSet<usize> = if self.present == 0 {
            let doubling = std::iter::successors(Some(1_usize), |at| at.checked_mul(2)).map(|at| at - 1);
            doubling.take_while(|&at| at < unknown).chain(unknown.checked_sub(1)).collect()
        } else {
            (1..WAYS).map(|way| unknown * way / WAYS).filter(|&at| at < unknown).collect()
        };
        offsets.into_iter().map(|offset| self.present + offset).collect()
    }

    /// The number of chunks from the beginning that are there, as far as is known.
    pub fn present(&self) -> usize {
        self.present
    }
}

/// Parts into which a later round divides the gap.
const WAYS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// The result, and the rounds and questions that it took.
    fn search(chunks: usize, is_there: impl Fn(usize) -> bool) -> (usize, usize, usize) {
        let (mut search, mut rounds, mut questions) = (Search::new(chunks), 0, 0);
        loop {
            let next = search.next();
            if next.is_empty() {
                return (search.present(), rounds, questions);
            }
            rounds += 1;
            questions += next.len();
            next.into_iter().for_each(|position| search.tell(position, is_there(position)));
        }
    }

    #[test]
    fn the_prefix_is_found_in_a_number_of_rounds_that_grows_with_the_logarithm() {
        for chunks in (0..70).chain([1_000, 5_000]) {
            let step = (chunks / 50).max(1);
            for present in (0..=chunks).step_by(step).chain([chunks]) {
                let (found, rounds, questions) = search(chunks, |position| position < present);
                assert_eq!(found, present, "of {chunks}");
                let doublings = (chunks + 1).ilog2() as usize + 1;
                assert!(rounds <= 1 + doublings.div_ceil(3), "{rounds} rounds for {chunks}");
                assert!(questions <= 2 + doublings + 7 * doublings.div_ceil(3), "{questions} for {chunks}");
            }
        }
    }

    #[test]
    fn a_chain_that_is_there_or_not_there_at_all_takes_one_round() {
        assert_eq!(search(1_000, |_| true), (1_000, 1, 11));
        assert_eq!(search(1_000, |_| false).1, 1);
        assert_eq!(search(0, |_| true), (0, 0, 0));
    }

    #[test]
    fn holes_end_the_search_and_never_beyond_what_is_there() {
        for seed in 0..500 {
            let mut random = fastrand::Rng::with_seed(seed);
            let there: Vec<bool> = (0..random.usize(1..100)).map(|_| random.u8(..10) > 0).collect();
            let (found, _, _) = search(there.len(), |position| there[position]);
            assert!(found == 0 || there[found - 1], "seed {seed}: the last of the prefix was seen");
            assert!(there.get(found).is_none_or(|is_there| !is_there), "seed {seed}: the next was not");
        }
    }
}
