//! Chooses the way of copying for each shape of order: the way that measured faster on this machine. Pure.

use std::collections::BTreeMap;

use crate::order::Direction;

/// A way of copying.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Form {
    /// A kernel reads and writes the blocks where they are, in pinned host memory too.
    Direct,
    /// A kernel works on a buffer on the device, and the copy engine moves large pieces between it and the host.
    Staged,
    /// The copy engine moves each contiguous run of a page. No kernel runs, so the engine's own kernels lose nothing to the copy.
    Batched,
}

/// The shape of an order. Orders of one shape count as alike; sizes are logarithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct OrderShape {
    is_load: bool,
    by_layer: bool,
    run: u32,
    block: u32,
    order: u32,
}

/// The measurements.
#[derive(Debug, Default)]
pub(super) struct Forms {
    only_copies: bool,
    rates: BTreeMap<OrderShape, Rates>,
}

/// The rates of a shape's forms, in the order of [`Form::ALL`].
type Rates = [Rate; 3];

#[derive(Debug, Clone, Copy, Default)]
struct Rate {
    /// Orders that were measured, and orders that were begun.
    measured: u32,
    begun: u32,
    bytes_per_ms: f64,
}

impl Form {
    /// All forms.
    pub const ALL: [Self; 3] = [Self::Direct, Self::Staged, Self::Batched];

    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Batched => "batched",
        }
    }

    /// The factor of a form's rate in a choice: a form that leaves more of the GPU to the engine may be slower. Measured on an H200
    /// beside matrix products: at the bus's rate, kernels of this process cost them 4 % (direct), and kernels of another process
    /// 59 % (direct) or 16 % (staged).
    fn weight(self, only_copies: bool, by_layer: bool) -> f64 {
        match (self, only_copies) {
            (Self::Direct, _) => 1.0,
            (Self::Staged, false) => 1.1,
            (Self::Staged, true) => 2.0,
            // Entering many runs takes so long that the first layers are reported late.
            (Self::Batched, false) if by_layer => 0.9,
            (Self::Batched, false) => 1.15,
            (Self::Batched, true) => 3.0,
        }
    }
}

impl OrderShape {
    /// The shape of an order of `order` bytes, with blocks and contiguous runs of these sizes.
    pub(super) fn new(direction: Direction, by_layer: bool, run: u64, block: u64, order: u64) -> Self {
        let is_load = direction == Direction::Load;
        let [run, block, order] = [run, block, order].map(|bytes| bytes.max(1).ilog2());
        Self { is_load, by_layer, run, block, order }
    }

    /// The forms that such an order can have. Small runs are slow for the copy engine, and many take long to enter.
    fn forms(&self) -> impl Iterator<Item = Form> + Clone + use<> {
        let is_batched = self.run >= SMALLEST_BATCHED_RUN.ilog2()
            && self.order.saturating_sub(self.run) <= MOST_BATCHED_RUNS.ilog2();
        Form::ALL.into_iter().filter(move |&form| is_batched || form != Form::Batched)
    }
}

impl Forms {
    /// Nothing measured yet.
    pub(super) fn new(only_copies: bool) -> Self {
        Self { only_copies, rates: BTreeMap::new() }
    }

    /// The form for an order: each is tried a few times, then the best one is taken, and at times another is tried again. An order
    /// that is not alone in its direction cannot be measured, so it tries nothing.
    pub(super) fn choose(&mut self, shape: OrderShape, is_alone: bool) -> Form {
        if self.rates.len() >= MOST_SHAPES && !self.rates.contains_key(&shape) {
            return Form::Staged;
        }
        let rates = self.rates.entry(shape).or_default();
        if !is_alone {
            return best(&shape, rates, self.only_copies);
        }
        let begun: u32 = rates.iter().map(|rate| rate.begun).sum();
        let best = best(&shape, rates, self.only_copies);
        let others = shape.forms().filter(|&form| form != best);
        let chosen = match shape.forms().find(|&form| rates[form as usize].begun < TRIALS) {
            Some(untried) => untried,
            None if begun.is_multiple_of(RETRY_EVERY) => {
                others.min_by_key(|&form| rates[form as usize].begun).unwrap_or(best)
            }
            None => best,
        };
        let rate = &mut rates[chosen as usize];
        rate.begun = rate.begun.saturating_add(1);
        chosen
    }

    /// Notes how long an order of this shape took. If another form is preferred now, returns a line that says so.
    pub(super) fn measured(
        &mut self,
        shape: OrderShape,
        form: Form,
        bytes: u64,
        milliseconds: f64,
    ) -> Option<String> {
        let rates = self.rates.get_mut(&shape)?;
        let before = preferred(&shape, rates, self.only_copies);
        let rate = &mut rates[form as usize];
        let now = bytes as f64 / milliseconds.max(1e-3);
        // Other work only makes a copy slower: the fastest trial says what the form can do.
        rate.bytes_per_ms = match rate.measured {
            ..TRIALS => rate.bytes_per_ms.max(now),
            TRIALS.. => rate.bytes_per_ms + (now - rate.bytes_per_ms) * NEWEST,
        };
        rate.measured = rate.measured.saturating_add(1);
        (preferred(&shape, rates, self.only_copies) != before).then(|| line(&shape, rates, self.only_copies))
    }

    /// A line for each shape.
    pub(super) fn lines(&self) -> Vec<String> {
        self.rates.iter().map(|(shape, rates)| line(shape, rates, self.only_copies)).collect()
    }
}

fn best(shape: &OrderShape, rates: &Rates, only_copies: bool) -> Form {
    let weighed = |form: &Form| form.weight(only_copies, shape.by_layer) * rates[*form as usize].bytes_per_ms;
    shape.forms().max_by(|a, b| weighed(a).total_cmp(&weighed(b))).unwrap_or(Form::Staged)
}

/// The best form, once all were tried.
fn preferred(shape: &OrderShape, rates: &Rates, only_copies: bool) -> Option<Form> {
    let is_tried = shape.forms().all(|form| rates[form as usize].measured >= TRIALS);
    is_tried.then(|| best(shape, rates, only_copies))
}

fn line(shape: &OrderShape, rates: &Rates, only_copies: bool) -> String {
    let way = if shape.is_load { "load" } else { "save" };
    let layers = if shape.by_layer { "by layer" } else { "merged" };
    let [run, block, order] = [shape.run, shape.block, shape.order].map(|log| 1u64 << log);
    let of_form = |form: Form| format!("{} {:.1} GB/s", form.name(), rates[form as usize].bytes_per_ms / 1e6);
    let of_forms: Vec<String> = shape.forms().map(of_form).collect();
    format!(
        "{way} {layers}, runs from {run} B, blocks from {block} B, orders from {order} B: {} ({})",
        best(shape, rates, only_copies).name(),
        of_forms.join(", ")
    )
}

/// Each form is tried this often before one is preferred.
const TRIALS: u32 = 3;

/// The slower form is tried again after this many orders: machines change.
const RETRY_EVERY: u32 = 256;

/// The weight of the newest measurement.
const NEWEST: f64 = 0.25;

/// The most shapes that are told apart.
const MOST_SHAPES: usize = 256;

/// The smallest run, in bytes, that the copy engine moves by itself.
const SMALLEST_BATCHED_RUN: u64 = 32 << 10;

/// The most runs of an order that the copy engine moves one by one. Entering a run takes about 1.3 us, in which the thread looks
/// after no other copy.
const MOST_BATCHED_RUNS: u64 = 4 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// With runs that the copy engine does not move by itself.
    fn shape(order: u64) -> OrderShape {
        OrderShape::new(Direction::Load, false, 4_096, 1 << 20, order)
    }

    #[test]
    fn both_forms_are_tried_and_the_faster_is_kept_until_it_is_slower() {
        let (mut forms, mut told) = (Forms::default(), Vec::new());
        let mut speed = |forms: &mut Forms, direct: f64, staged: f64| {
            let chosen = forms.choose(shape(1 << 26), true);
            let milliseconds = if chosen == Form::Direct { direct } else { staged };
            told.extend(forms.measured(shape(1 << 26), chosen, 1 << 26, milliseconds));
            chosen
        };
        let tried: Vec<Form> = (0..6).map(|_| speed(&mut forms, 2.0, 1.0)).collect();
        assert_eq!(tried.iter().filter(|&&form| form == Form::Staged).count(), 3);
        assert!((0..100).all(|_| speed(&mut forms, 2.0, 1.0) == Form::Staged));
        assert!(
            forms.lines()[0].contains("staged (direct 33.6 GB/s, staged 67.1 GB/s)"),
            "{:?}",
            forms.lines()
        );
        let later: Vec<Form> = (0..2_000).map(|_| speed(&mut forms, 0.5, 1.0)).collect();
        assert_eq!(later.last(), Some(&Form::Direct));
        let [first, then] = &told[..] else { panic!("told when it is known, and when it changes: {told:?}") };
        assert!(first.contains("B: staged (") && then.contains("B: direct ("), "{told:?}");
    }

    #[test]
    fn a_slow_trial_says_nothing_and_a_form_that_leaves_the_gpu_to_the_engine_may_be_slower() {
        let settled = |runs: u64, milliseconds: [f64; 3], only_copies: bool| {
            let (mut forms, shape) =
                (Forms::new(only_copies), OrderShape::new(Direction::Save, false, runs, 1 << 20, 1 << 26));
            let (mut chosen, mut copies) = (Form::Direct, [0; 3]);
            for _ in 0..20 {
                chosen = forms.choose(shape, true);
                // Others under way at the same time try nothing.
                (0..9).for_each(|_| _ = forms.choose(shape, false));
                // The first copy of each form is slow, as other work was under way.
                let slow = if copies[chosen as usize] == 0 { 9.0 } else { 1.0 };
                copies[chosen as usize] += 1;
                forms.measured(shape, chosen, 1 << 26, milliseconds[chosen as usize] * slow);
            }
            chosen
        };
        assert_eq!(settled(64 << 10, [1.0, 1.1, 1.12], false), Form::Batched);
        assert_eq!(settled(64 << 10, [1.0, 1.05, 1.4], false), Form::Staged);
        assert_eq!(settled(64 << 10, [1.0, 1.2, 1.4], false), Form::Direct);
        assert_eq!(settled(64 << 10, [1.0, 1.2, 1.4], true), Form::Batched);
        assert_eq!(settled(4 << 10, [1.0, 1.8, 0.1], true), Form::Staged);
        assert_eq!(
            settled(4 << 10, [1.0, 1.05, 0.1], false),
            Form::Staged,
            "such small runs are not the copy engine's"
        );
    }

    #[test]
    fn each_shape_has_its_own_judgement_and_few_shapes_are_kept() {
        let mut forms = Forms::default();
        for (small, large) in [(1.0, 4.0), (1.0, 4.0), (1.0, 4.0)] {
            for order in [1 << 16, 1 << 26] {
                for _ in 0..2 {
                    let form = forms.choose(shape(order), true);
                    let is_direct = form == Form::Direct;
                    let cost = if (order == 1 << 16) == is_direct { small } else { large };
                    forms.measured(shape(order), form, order, cost);
                }
            }
        }
        assert_eq!(forms.choose(shape(1 << 16), true), Form::Direct);
        assert_eq!(forms.choose(shape(1 << 26), true), Form::Staged);
        for run in 0..40 {
            for block in 0..40 {
                forms.choose(OrderShape::new(Direction::Save, true, 1 << run, 1 << block, 1), true);
            }
        }
        assert_eq!(forms.lines().len(), MOST_SHAPES);
    }
}
