//! Chooses which blocks a session verifies.

use crate::options::Verify;

/// The choice of the blocks that a session verifies.
#[derive(Debug)]
pub(crate) struct Verifier {
    verify: Verify,
    seed: u64,
}

impl Verifier {
    pub(crate) fn new(verify: Verify, seed: Option<u64>) -> Self {
        Self { verify, seed: seed.unwrap_or_else(|| fastrand::u64(..)) }
    }

    /// Whether nothing is verified.
    pub(crate) fn is_off(&self) -> bool {
        self.verify == Verify::Off
    }

    /// Whether a block is to be verified. The session's seed and the block's place in the series of the session's leases decide,
    /// so that the time of reading does not matter.
    pub(crate) fn picks(&self, lease: u64, index: usize) -> bool {
        match self.verify {
            Verify::Off => false,
            Verify::Always => true,
            Verify::Sample => {
                let place = lease.wrapping_mul(1 << 20).wrapping_add(index as u64);
                fastrand::Rng::with_seed(self.seed ^ place.wrapping_mul(SPREAD)).u64(..SAMPLE_ONE_IN) == 0
            }
        }
    }
}

/// An odd number whose multiples differ in all bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// With a sample, one block in this many is verified.
const SAMPLE_ONE_IN: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_one_block_in_sixty_four_and_depends_on_the_seed_alone() {
        let picked = |seed| {
            let verifier = Verifier::new(Verify::Sample, Some(seed));
            (1..=1_000_u64)
                .flat_map(|lease| (0..64).map(move |index| (lease, index)))
                .filter(|&(lease, index)| verifier.picks(lease, index))
                .collect::<Vec<_>>()
        };
        let first = picked(1);
        assert!((900..1_100).contains(&first.len()), "{} of 64,000", first.len());
        assert_eq!(first, picked(1));
        assert_ne!(first, picked(2));
    }

    #[test]
    fn off_picks_nothing_and_always_everything() {
        let picks = |verify| (0..1_000).filter(|&index| Verifier::new(verify, None).picks(7, index)).count();
        assert_eq!((picks(Verify::Off), picks(Verify::Always)), (0, 1_000));
    }
}
