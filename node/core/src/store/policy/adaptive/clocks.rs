//! Learns the chance of a use at each age on one clock, and computes a chunk's worth from it.
//!
//! A clock counts units: of wall time, or uses of any chunk. Each chunk of the sample has a class and an age on the clock. For
//! each class and bin of ages the curves count uses, and the time that chunks spent at that age, including evicted chunks. The
//! quotient is the hazard: the chance of a use in one unit, as in a Kaplan-Meier curve. Evidence fades.

/// The curves of one clock.
#[derive(Debug)]
pub(super) struct Curves {
    rows: Vec<AgeRow>,
}

/// The evidence of one class.
#[derive(Debug, Clone, Copy)]
struct AgeRow {
    uses: [f64; BINS],
    exposure: [f64; BINS],
    /// Whether there is any evidence: most classes never have a chunk.
    is_known: bool,
}

/// The worth of chunks, by age: the hits that they promise for each unit of room and time.
pub(super) type Worths = [f32; BINS];

const NOTHING: AgeRow = AgeRow { uses: [0.0; BINS], exposure: [0.0; BINS], is_known: false };

impl Curves {
    /// Curves of `classes` classes, without evidence.
    pub(super) fn new(classes: usize) -> Self {
        Self { rows: vec![NOTHING; classes] }
    }

    /// Notes that a chunk of a class was used at this age.
    pub(super) fn used(&mut self, class: usize, age: u32) {
        let row = &mut self.rows[class];
        row.is_known = true;
        row.uses[bin(age).0] += 1.0;
    }

    /// Notes that a chunk of a class was not used while its age grew from `from` to `to`.
    #[inline]
    pub(super) fn exposed(&mut self, class: usize, from: u32, to: u32) {
        let row = &mut self.rows[class];
        row.is_known = true;
        let mut bin = bin(from).0;
        let (mut from, to) = (f64::from(from), f64::from(to));
        while from < to {
            let end = if bin + 1 < BINS { EDGES[bin + 1].min(to) } else { to };
            row.exposure[bin] += end - from;
            (from, bin) = (end, bin + 1);
        }
    }

    /// Lets evidence fade: a part of `kept` remains.
    pub(super) fn fade(&mut self, kept: f64) {
        let fade = |values: &mut [f64; BINS]| values.iter_mut().for_each(|value| *value *= kept);
        self.rows.iter_mut().filter(|row| row.is_known).for_each(|row| {
            fade(&mut row.uses);
            fade(&mut row.exposure);
        });
    }

    /// The worth of chunks of each of `groups` groups of classes, by age. A group with little evidence leans on the evidence of
    /// all classes together. If that is little too, it leans on the bin of the age before: hazards fall as ages grow.
    pub(super) fn worths(&self, groups: usize, group: impl Fn(usize) -> usize) -> Vec<Worths> {
        let mut rows = vec![NOTHING; groups];
        let mut all = NOTHING;
        for (class, row) in self.rows.iter().enumerate().filter(|(_, row)| row.is_known) {
            rows[group(class)].add(row);
            all.add(row);
        }
        let mut expected = (sum(&all.uses) + 1.0) / (sum(&all.exposure) + FIRST_EXPOSURE);
        let pooled: [f64; BINS] = std::array::from_fn(|bin| {
            let hazard = all.hazard(bin, 1.0 / expected);
            expected = hazard * FALL;
            1.0 / hazard
        });
        let worths = |row: &AgeRow| best_densities(&std::array::from_fn(|bin| row.hazard(bin, pooled[bin])));
        let unknown = worths(&NOTHING);
        rows.iter().map(|row| if row.is_known { worths(row) } else { unknown }).collect()
    }
}

impl AgeRow {
    fn add(&mut self, other: &Self) {
        self.uses.iter_mut().zip(&other.uses).for_each(|(sum, value)| *sum += value);
        self.exposure.iter_mut().zip(&other.exposure).for_each(|(sum, value)| *sum += value);
        self.is_known |= other.is_known;
    }

    /// The hazard of a bin, as if one more use had been seen after `expected_wait`, which is one over the expected hazard.
    fn hazard(&self, bin: usize, expected_wait: f64) -> f64 {
        (self.uses[bin] + 1.0) / (self.exposure[bin] + expected_wait)
    }
}

/// The worth at an age, interpolated between the edges of the age's bin.
#[inline]
pub(super) fn at(worths: &Worths, age: u32) -> f32 {
    let (bin, part) = bin(age);
    worths[bin] + part * (worths[(bin + 1).min(BINS - 1)] - worths[bin])
}

fn sum(values: &[f64; BINS]) -> f64 {
    values.iter().sum()
}

/// For each age, the highest rate of hits that a chunk can bring from there on. The rate of a span is the chance of a use in the
/// span, divided by the time that is expected to pass until this use or the span's end. The highest rate of all spans counts.
///
/// Let `S` be the chance that a chunk is not used before an age, and `J` the time that it waits from there on, on average. Then
/// the highest rate is the steepest line from a point of the curve of `S` over `J` to a later point: a side of the curve's hull.
fn best_densities(hazards: &[f64; BINS]) -> Worths {
    let mut unused = [1.0; BINS + 1];
    let mut waits = [0.0; BINS + 1];
    for bin in 0..BINS {
        let is_possible = unused[bin] > 0.0;
        let still = |width: f64| if is_possible { (-hazards[bin] * width).exp() } else { 0.0 };
        unused[bin + 1] = unused[bin] * still(EDGES[bin + 1] - EDGES[bin]);
    }
    // The sum starts at the end, where the smallest terms are.
    for bin in (0..BINS).rev() {
        waits[bin] = waits[bin + 1] + (unused[bin] - unused[bin + 1]) / hazards[bin];
    }
    let slope = |from: usize, to: usize| (unused[from] - unused[to]) / (waits[from] - waits[to]);
    let mut hull = [BINS; BINS + 1];
    let mut len = 1;
    let mut worths = [0.0; BINS];
    for from in (0..BINS).rev() {
        let mut best = slope(from, hull[len - 1]);
        while len > 1 {
            let next = slope(from, hull[len - 2]);
            if best > next || best.is_nan() || next.is_nan() {
                break;
            }
            (best, len) = (next, len - 1);
        }
        // Without a remaining chance there is no slope.
        worths[from] = if best.is_finite() { best as f32 } else { hazards[from] as f32 };
        hull[len] = from;
        len += 1;
    }
    worths
}

/// The bin of an age, and the part of the bin that is below the age. Bins are half octaves; the first one goes up to
/// [`FIRST_BIN`].
#[inline]
fn bin(age: u32) -> (usize, f32) {
    if age < FIRST_BIN {
        return (0, age as f32 / FIRST_BIN as f32);
    }
    // The exponent and the highest digit of the age.
    let bits = (age as f32).to_bits();
    let bin = (bits >> HALF_OCTAVE_BITS) - FIRST_HALF_OCTAVE + 1;
    let part = (bits & ((1 << HALF_OCTAVE_BITS) - 1)) as f32 / (1_u32 << HALF_OCTAVE_BITS) as f32;
    ((bin as usize).min(BINS - 1), part)
}

/// The lower edge of a bin.
const fn edge(bin: usize) -> f64 {
    match bin.checked_sub(1) {
        None => 0.0,
        Some(halves) => FIRST_BIN as f64 * (1_u64 << (halves / 2)) as f64 * (1.0 + 0.5 * (halves % 2) as f64),
    }
}

/// The lower edge of each bin, and the end of the last one.
static EDGES: [f64; BINS + 1] = {
    let mut edges = [0.0; BINS + 1];
    let mut bin = 0;
    while bin <= BINS {
        edges[bin] = edge(bin);
        bin += 1;
    }
    edges
};

/// The bins reach up to 27 octaves above the first bin.
const BINS: usize = 56;
const FIRST_BIN: u32 = 16;

const HALF_OCTAVE_BITS: u32 = 22;
const FIRST_HALF_OCTAVE: u32 = (FIRST_BIN as f32).to_bits() >> HALF_OCTAVE_BITS;

/// The factor by which a hazard is expected to fall from bin to bin, since hazards fall as one over the age.
const FALL: f64 = std::f64::consts::FRAC_1_SQRT_2;

/// The exposure that is assumed before any evidence.
const FIRST_EXPOSURE: f64 = 64.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_have_no_gaps() {
        let mut last = 0;
        for age in 0..100_000 {
            let (bin, part) = bin(age);
            assert!((0.0..=1.0).contains(&part) && bin - last <= 1, "{age}");
            let in_bin = edge(bin) + f64::from(part) * (edge(bin + 1) - edge(bin));
            assert!((in_bin - f64::from(age)).abs() < 0.1, "{age}: {in_bin}");
            last = bin;
        }
        assert_eq!(bin(u32::MAX).0, BINS - 1);
    }

    #[test]
    fn exposure_is_shared_among_the_bins_it_passes() {
        let mut curves = Curves::new(1);
        curves.exposed(0, 10, 40);
        curves.exposed(0, 5, 5);
        assert_eq!(curves.rows[0].exposure[..5], [6.0, 8.0, 8.0, 8.0, 0.0], "10 to 16, 24, 32 and 40");
        curves.exposed(0, u32::MAX - 1, u32::MAX);
        assert_eq!(sum(&curves.rows[0].exposure), 31.0);
    }

    #[test]
    fn the_steepest_line_is_the_best_of_all_spans() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..200 {
            let hazards: [f64; BINS] = std::array::from_fn(|bin| rng.f64() * 0.3 / (edge(bin) + 1.0));
            let best = |from: usize| {
                let (mut unused, mut time, mut best) = (1.0, 0.0, 0.0_f64);
                for (bin, hazard) in hazards.iter().enumerate().skip(from) {
                    let still = (-hazard * (edge(bin + 1) - edge(bin))).exp();
                    time += unused * (1.0 - still) / hazard;
                    unused *= still;
                    best = best.max((1.0 - unused) / time);
                }
                best as f32
            };
            for (from, worth) in best_densities(&hazards).into_iter().enumerate() {
                assert!((worth / best(from) - 1.0).abs() < 1e-3, "{from}: {worth} and {}", best(from));
            }
        }
    }

    #[test]
    fn with_no_evidence_the_older_is_worth_less() {
        let worths = Curves::new(3).worths(1, |_| 0)[0];
        let worths: Vec<f32> = (4..28).map(|log2| at(&worths, 1 << log2)).collect();
        assert!(worths.is_sorted_by(|younger, older| younger > older), "{worths:?}");
    }

    #[test]
    fn a_chunk_whose_time_comes_is_worth_more_than_a_younger_one() {
        let mut curves = Curves::new(1);
        for _ in 0..300 {
            curves.exposed(0, 0, 4_000);
            curves.used(0, 4_000);
        }
        let worths = curves.worths(1, |_| 0)[0];
        assert!(at(&worths, 3_500) > 2.0 * at(&worths, 100));
        assert!(at(&worths, 3_500) > 2.0 * at(&worths, 30_000));
    }

    #[test]
    fn evidence_that_faded_is_outweighed() {
        let mut curves = Curves::new(1);
        let learn = |curves: &mut Curves, age| {
            (0..100).for_each(|_| {
                curves.exposed(0, 0, age);
                curves.used(0, age);
            });
            curves.worths(1, |_| 0)[0]
        };
        let before = at(&learn(&mut curves, 100), 90);
        curves.fade(0.001);
        assert!(at(&learn(&mut curves, 10_000), 90) < before / 10.0);
    }
}
