//! The lessons of all uses: the worth of a chunk by its kind and its age.
//!
//! Two judges estimate the worth of a chunk. The judge by the wall clock takes the mean of three coarser classifications of a
//! kind, since a class for each full kind would have too little evidence. The judge by uses knows only the number of uses: it
//! serves loads whose wall time means nothing. Both are trusted by the quality of their predictions of hard uses: uses of chunks
//! that had been idle. For each such use, the worth of the used chunk is compared with the mean worth of idle chunks (the partial
//! likelihood of Cox). Beside both counts recency. Its weight grows with the number of hits that `lru` would have had more than the
//! policy.

use super::clocks::{self, Curves, Worths};
use super::kinds::{self, CLASSES, GAPS, Kind, TURNS, USES};
use super::state::Moment;

/// The curves of both clocks, and the worths that follow from them.
#[derive(Debug)]
pub(super) struct Lessons {
    wall: Curves,
    uses: Curves,
    worth_by_wall: Vec<Worths>,
    worth_by_uses: Vec<Worths>,
    foretold: Foretold,
    /// The uses and the units of wall time that passed recently.
    passed: [f64; 2],
    /// The weight of each judge, and of recency.
    weights: [f32; JUDGES],
    recency: f32,
}

/// The quality of each judge's predictions.
#[derive(Debug, Clone, Copy)]
struct Foretold {
    /// The mean worth that each judge gave to idle chunks; 0 before the first idle chunk.
    mean: [f64; JUDGES],
    /// For chunks that were used again, the sum of the logarithms of their worth divided by that mean.
    gains: [f64; JUDGES],
    /// The product of such quotients whose logarithms are not in `gains` yet: a logarithm for each use takes too long.
    quotients: [f64; JUDGES],
    uses: f64,
}

impl Default for Foretold {
    fn default() -> Self {
        let nothing = [0.0; JUDGES];
        Self { mean: nothing, gains: nothing, quotients: [1.0; JUDGES], uses: 0.0 }
    }
}

impl Foretold {
    /// Notes the worths that the judges gave to a chunk that is used again.
    #[inline]
    fn used(&mut self, worths: [f32; JUDGES]) {
        let mut is_large = false;
        for ((quotient, worth), mean) in self.quotients.iter_mut().zip(worths).zip(self.mean) {
            *quotient *= (f64::from(worth) / mean).max(1e-9);
            is_large |= !(1e-200..1e200).contains(quotient);
        }
        self.uses += 1.0;
        if is_large {
            self.settle();
        }
    }

    /// Adds the quotients to the gains.
    fn settle(&mut self) {
        for (gain, quotient) in self.gains.iter_mut().zip(&mut self.quotients) {
            *gain += std::mem::replace(quotient, 1.0).ln();
        }
    }

    fn fade(&mut self) {
        self.settle();
        self.gains.iter_mut().for_each(|gain| *gain *= FORETOLD_KEPT);
        self.uses *= FORETOLD_KEPT;
    }
}

/// Sums of the worth of idle chunks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Idle {
    sums: [f64; JUDGES],
    chunks: f64,
}

impl Default for Lessons {
    fn default() -> Self {
        let mut lessons = Self {
            wall: Curves::new(CLASSES),
            uses: Curves::new(USES * 2),
            worth_by_wall: Vec::new(),
            worth_by_uses: Vec::new(),
            foretold: Foretold::default(),
            passed: [0.0; 2],
            weights: [0.0, 1.0],
            recency: 0.0,
        };
        lessons.weigh();
        lessons
    }
}

impl Lessons {
    /// Notes that a chunk of the sample is used again at this age. `is_idle` says whether it was idle before.
    pub(super) fn used(&mut self, kind: Kind, age: Moment, is_idle: bool) {
        let class = kind.class();
        if is_idle && self.foretold.mean.iter().all(|&mean| mean > 0.0) {
            self.foretold.used(self.worths(class, age));
        }
        self.wall.used(class, age.wall);
        self.uses.used(by_uses(class), age.uses);
    }

    /// Notes that a chunk of the sample was not used while its age grew.
    #[inline]
    pub(super) fn exposed(&mut self, kind: Kind, from: Moment, to: Moment) {
        let class = kind.class();
        self.wall.exposed(class, from.wall, to.wall);
        self.uses.exposed(by_uses(class), from.uses, to.uses);
    }

    /// Counts an idle chunk.
    #[inline]
    pub(super) fn count_idle(&self, kind: Kind, age: Moment, idle: &mut Idle) {
        let worths = self.worths(kind.class(), age);
        (0..JUDGES).for_each(|judge| idle.sums[judge] += f64::from(worths[judge]));
        idle.chunks += 1.0;
    }

    /// Learns from the counts of the time `passed`. `cached` is the number of cached chunks; `lead` is the lead over `lru` as a
    /// part of all uses; `lead_of_recency` is that of the duels.
    pub(super) fn learn(
        &mut self,
        passed: Moment,
        idle: &Idle,
        cached: usize,
        lead: f64,
        lead_of_recency: f64,
    ) {
        if idle.chunks > 0.0 {
            self.foretold.mean = idle.sums.map(|sum| sum / idle.chunks);
        }
        self.foretold.fade();
        for (sum, new) in self.passed.iter_mut().zip([passed.uses, passed.wall]) {
            *sum = *sum * PASSED_KEPT + f64::from(new);
        }
        self.wall.fade(KEPT);
        self.uses.fade(KEPT);
        self.weigh();
        let (weights, per_use) = self.weights(cached);
        self.weights = weights;
        let doubt = (DOUBT * lead_of_recency).min(0.0).exp();
        self.recency = ((-lead - LOSS_BORNE).max(0.0) * PULL * doubt * per_use) as f32;
    }

    /// The worth of a chunk of this kind and age.
    pub(super) fn worth(&self, kind: Kind, age: Moment) -> f32 {
        self.learned(kind, age) + self.recency / (age.uses as f32 + 1.0)
    }

    /// The worth without the part of recency.
    pub(super) fn learned(&self, kind: Kind, age: Moment) -> f32 {
        let worths = self.worths(kind.class(), age);
        worths.iter().zip(&self.weights).map(|(worth, weight)| worth * weight).sum()
    }

    /// The mean number of uses in a unit of wall time, recently.
    pub(super) fn uses_in_a_unit(&self) -> f64 {
        let [uses, wall] = self.passed;
        uses / wall.max(1.0)
    }

    /// Each judge's estimate.
    #[inline]
    fn worths(&self, class: usize, age: Moment) -> [f32; JUDGES] {
        let wall = clocks::at(&self.worth_by_wall[class], age.wall);
        let uses = clocks::at(&self.worth_by_uses[by_uses(class)], age.uses);
        [wall, uses]
    }

    fn weigh(&mut self) {
        let by_turn_and_gap =
            |class| (kinds::turn_of(class) * GAPS + kinds::gap_of(class)) * 2 + kinds::last_of(class);
        let by_gap_and_uses =
            |class| (kinds::gap_of(class) * USES + kinds::uses_of(class)) * 2 + kinds::last_of(class);
        let by_turn_and_uses =
            |class| (kinds::turn_of(class) * USES + kinds::uses_of(class)) * 2 + kinds::last_of(class);
        let turns_and_gaps = self.wall.worths(TURNS * GAPS * 2, by_turn_and_gap);
        let gaps_and_uses = self.wall.worths(GAPS * USES * 2, by_gap_and_uses);
        let turns_and_uses = self.wall.worths(TURNS * USES * 2, by_turn_and_uses);
        let mean = |class| {
            let first = &turns_and_gaps[by_turn_and_gap(class)];
            let second = &gaps_and_uses[by_gap_and_uses(class)];
            let third = &turns_and_uses[by_turn_and_uses(class)];
            let mut mean = *first;
            for ((mean, second), third) in mean.iter_mut().zip(second).zip(third) {
                *mean = (*mean + second + third) / 3.0;
            }
            mean
        };
        self.worth_by_wall = (0..CLASSES).map(mean).collect();
        self.worth_by_uses = self.uses.worths(USES * 2, |class| class);
    }

    /// The weights of the judges' worths, and the uses in a unit of wall time. The first judge estimates hits for each unit of
    /// wall time, the second judge and recency estimate hits for each use.
    fn weights(&self, cached: usize) -> ([f32; JUDGES], f64) {
        let [uses, wall] = self.passed;
        let Foretold { gains, uses: counted, .. } = self.foretold;
        let best = gains.iter().copied().fold(f64::MIN, f64::max);
        let mut trust = gains.map(|gain| (SHARPNESS * (gain - best) / (counted + FORETOLD_NOTHING)).exp());
        // In a replay at full speed, as many uses as there are cached chunks take almost no time. Then the wall clock says
        // nothing.
        let per_use = if wall * cached as f64 <= LEAST_LIFETIME * uses {
            trust[WALL] = 0.0;
            1.0
        } else {
            uses / wall
        };
        ([trust[WALL] as f32, (trust[1] * per_use) as f32], per_use)
    }
}

/// The class on the clock of uses: the number of uses, and whether the chunk is the last of its prompt.
#[inline]
fn by_uses(class: usize) -> usize {
    kinds::uses_of(class) * 2 + kinds::last_of(class)
}

/// The judges: by the wall clock, by the clock of uses.
const JUDGES: usize = 2;
const WALL: usize = 0;

/// The parts that remain in each lesson: of the curves, of the judges' predictions, and of the passed time.
const KEPT: f64 = 0.99;
const FORETOLD_KEPT: f64 = 0.995;
const PASSED_KEPT: f64 = 0.9;

/// Each judge starts as if it had predicted this many uses equally well.
const FORETOLD_NOTHING: f64 = 100.0;

/// The part of all uses that may be lost to `lru` before recency counts, and how strongly recency counts then: as much as the
/// better judge when 0.01 % more are lost.
const LOSS_BORNE: f64 = 0.0001;
const PULL: f64 = 10_000.0;

/// The logarithm of the factor by which recency loses weight for each standard deviation that the judges lead in duels.
const DOUBT: f64 = 2.0;

/// The strength of the preference for the better judge: a mean gain that is larger by 0.1 (natural logarithm, per use) makes it
/// 20 to 1.
const SHARPNESS: f64 = 30.0;

/// The wall clock counts only if as many uses as there are cached chunks take more than this many units of wall time.
const LEAST_LIFETIME: f64 = 16.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(wall: u32, uses: u32) -> Moment {
        Moment { wall, uses }
    }

    /// Lessons of a load in which chunks are used again 1,000 units of wall time after their last use (`by_wall`), or 1,000 uses
    /// after it.
    fn taught(by_wall: bool) -> Lessons {
        let (mut lessons, mut rng) = (Lessons::default(), fastrand::Rng::with_seed(1));
        for _ in 0..200 {
            let mut idle = Idle::default();
            for _ in 0..50 {
                let noise = rng.u32(200..20_000);
                let age = if by_wall { moment(1_000, noise) } else { moment(noise, 1_000) };
                lessons.exposed(Kind::FIRST, Moment::default(), age);
                lessons.used(Kind::FIRST, age, true);
                lessons.count_idle(
                    Kind::FIRST,
                    moment(rng.u32(200..20_000), rng.u32(200..20_000)),
                    &mut idle,
                );
            }
            lessons.learn(moment(1_000, 1_000), &idle, 1_000, 0.0, 0.0);
        }
        lessons
    }

    #[test]
    fn the_clock_that_predicts_uses_has_the_weight() {
        let [wall, uses] = taught(true).weights;
        assert!(wall > 10.0 * uses, "{wall} and {uses}");
        let [wall, uses] = taught(false).weights;
        assert!(uses > 10.0 * wall, "{wall} and {uses}");
    }

    #[test]
    fn if_no_wall_time_passes_only_uses_have_weight() {
        let mut lessons = taught(true);
        (0..200).for_each(|_| lessons.learn(moment(0, 1_000), &Idle::default(), 1_000, 0.0, 0.0));
        let [wall, uses] = lessons.weights;
        assert!(wall == 0.0 && uses > 0.0, "{wall} and {uses}");
    }

    #[test]
    fn recency_gains_weight_when_lru_hits_more_unless_duels_speak_for_what_was_learned() {
        let mut lessons = taught(true);
        let mut recency = |lead, lead_of_recency| {
            lessons.learn(moment(1_000, 1_000), &Idle::default(), 1_000, lead, lead_of_recency);
            lessons.recency
        };
        assert_eq!((recency(0.01, 9.0), recency(-0.00009, 9.0)), (0.0, 0.0));
        let little = recency(-0.0005, 0.0);
        assert!(little > 0.0 && recency(-0.0025, 0.0) > 5.0 * little, "{little}");
        assert_eq!(recency(-0.0005, 9.0), little);
        assert!(recency(-0.0005, -5.0) < little / 100.0);
    }
}
