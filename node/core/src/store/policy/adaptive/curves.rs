//! Learns how likely a use is at each age, and what a chunk is worth for that.

/// Classes by number of uses: 1, 2, 3 to 4, 5 to 8, more.
pub(super) const CLASSES: usize = 5;

/// The learned curves of each class: uses seen at each age, and how long chunks of that age were there. Their quotient is the
/// hazard: the chance of a use in a unit of time.
#[derive(Debug)]
pub(super) struct Curves {
    uses: [[f64; BINS]; CLASSES],
    exposure: [[f64; BINS]; CLASSES],
    worth: [[f32; BINS]; CLASSES],
}

/// How many chunks of each class have which age at a moment.
#[derive(Debug)]
pub(super) struct Ages {
    chunks: [[u32; BINS]; CLASSES],
}

/// The class of a chunk used so often.
pub(super) fn class(uses: u8) -> usize {
    match uses {
        0 | 1 => 0,
        2 => 1,
        3..=4 => 2,
        5..=8 => 3,
        _ => 4,
    }
}

impl Default for Curves {
    fn default() -> Self {
        let nothing = [[0.0; BINS]; CLASSES];
        let mut curves = Self { uses: nothing, exposure: nothing, worth: [[0.0; BINS]; CLASSES] };
        curves.weigh();
        curves
    }
}

impl Default for Ages {
    fn default() -> Self {
        Self { chunks: [[0; BINS]; CLASSES] }
    }
}

impl Curves {
    /// A chunk that had been used so often was used again at this age.
    pub(super) fn used(&mut self, uses: u8, age: u64) {
        self.uses[class(uses)][bin(age).0] += 1.0;
    }

    /// Learns from the ages at the end of an interval.
    pub(super) fn learn(&mut self, ages: &Ages, since: u64) {
        for class in 0..CLASSES {
            for bin in 0..BINS {
                let chunks = f64::from(ages.chunks[class][bin]);
                self.uses[class][bin] *= DECAY;
                self.exposure[class][bin] *= DECAY;
                self.exposure[class][bin] += chunks * since as f64;
            }
        }
        self.weigh();
    }

    /// Hits for each unit of room and time that a chunk of this class and age promises.
    pub(super) fn worth(&self, class: usize, age: u64) -> f32 {
        let (bin, part) = bin(age);
        let worth = &self.worth[class];
        worth[bin] + part * (worth[(bin + 1).min(BINS - 1)] - worth[bin])
    }

    fn weigh(&mut self) {
        let of_all = |rows: &[[f64; BINS]; CLASSES], bin: usize| rows.iter().map(|row| row[bin]).sum::<f64>();
        let total = |rows: &[[f64; BINS]; CLASSES]| rows.iter().flatten().sum::<f64>();
        let mean = (total(&self.uses) + 1.0) / (total(&self.exposure) + 1.0);
        // Little evidence leans on all classes together, and that, where it is little too, on the age before: hazards
        // fall as ages grow, so what nobody has seen yet goes as under lru.
        let mut expected = mean;
        let pooled: [f64; BINS] = std::array::from_fn(|bin| {
            let hazard = (of_all(&self.uses, bin) + 1.0) / (of_all(&self.exposure, bin) + 1.0 / expected);
            expected = hazard * FALL;
            hazard
        });
        for class in 0..CLASSES {
            let mut expected = mean;
            let hazards: [f64; BINS] = std::array::from_fn(|bin| {
                let prior = (expected * pooled[bin]).sqrt();
                let hazard = (self.uses[class][bin] + 1.0) / (self.exposure[class][bin] + 1.0 / prior);
                expected = hazard * FALL;
                hazard
            });
            self.worth[class] = best_densities(&hazards);
        }
    }
}

impl Ages {
    /// Adds a chunk.
    pub(super) fn add(&mut self, uses: u8, age: u64) {
        self.chunks[class(uses)][bin(age).0] += 1;
    }

    /// The age below which `wanted` chunks are.
    pub(super) fn newest(&self, wanted: usize) -> u64 {
        let mut before = 0;
        for bin in 0..BINS {
            let here: usize = self.chunks.iter().map(|row| row[bin] as usize).sum();
            if before + here >= wanted && here > 0 {
                let part = (wanted - before) as f64 / here as f64;
                return (edge(bin) + part * (edge(bin + 1) - edge(bin))) as u64;
            }
            before += here;
        }
        u64::MAX
    }
}

/// For each age the most hits for each unit of time that can be had from there on: over every span, the chance of a use
/// in it by the time that is expected to pass until that use, or the span's end.
fn best_densities(hazards: &[f64; BINS]) -> [f32; BINS] {
    let steps: [(f64, f64); BINS] = std::array::from_fn(|bin| {
        let unused = (-hazards[bin] * (edge(bin + 1) - edge(bin))).exp();
        (unused, (1.0 - unused) / hazards[bin])
    });
    std::array::from_fn(|from| {
        let (mut unused, mut time, mut best) = (1.0, 0.0, 0.0_f64);
        for &(still_unused, step) in &steps[from..] {
            time += unused * step;
            unused *= still_unused;
            best = best.max((1.0 - unused) / time);
        }
        best as f32
    })
}

/// The bin of an age, and how far into it. Bins are half octaves; the first one goes up to [`FIRST_BIN`].
fn bin(age: u64) -> (usize, f32) {
    let position = 2.0 * (age.max(1) as f32 / FIRST_BIN).log2() + 1.0;
    if position < 1.0 {
        return (0, age as f32 / FIRST_BIN);
    }
    ((position as usize).min(BINS - 1), position.fract())
}

/// The lower edge of a bin.
fn edge(bin: usize) -> f64 {
    if bin == 0 { 0.0 } else { f64::from(FIRST_BIN) * (bin as f64 / 2.0 - 0.5).exp2() }
}

const BINS: usize = 54;
const FIRST_BIN: f32 = 16.0;

/// The fraction of the evidence that stays each time.
const DECAY: f64 = 0.98;

/// How a hazard is expected to fall from bin to bin: as one over the age.
const FALL: f64 = std::f64::consts::FRAC_1_SQRT_2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_have_no_gaps() {
        let mut last = 0;
        for age in 0..100_000 {
            let (bin, part) = bin(age);
            assert!((0.0..=1.0).contains(&part) && bin - last <= 1, "{age}");
            assert!(edge(bin) <= age as f64 + 0.1 && (age as f64) < edge(bin + 1) + 0.1, "{age}");
            last = bin;
        }
        assert_eq!(bin(u64::MAX).0, BINS - 1);
    }

    #[test]
    fn with_no_evidence_the_older_is_worth_less() {
        let curves = Curves::default();
        let worth: Vec<f32> = (4..30).map(|log2| curves.worth(0, 1 << log2)).collect();
        assert!(worth.is_sorted_by(|younger, older| younger > older), "{worth:?}");
    }

    #[test]
    fn a_chunk_whose_time_comes_is_worth_more_than_a_younger_one() {
        let mut curves = Curves::default();
        for _ in 0..20 {
            let mut ages = Ages::default();
            (1..4_096).for_each(|age| ages.add(1, age));
            (0..300).for_each(|_| curves.used(1, 4_000));
            curves.learn(&ages, 300);
        }
        assert!(curves.worth(0, 3_000) > curves.worth(0, 100));
        assert!(curves.worth(0, 3_000) > curves.worth(0, 20_000));
    }
}
