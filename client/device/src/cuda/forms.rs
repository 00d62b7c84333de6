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
    rates: BTreeMap<OrderShape, [Rate; 2]>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Rate {
    /// Orders that were measured, and orders that were begun.
    measured: u32,
    begun: u32,
    bytes_per_ms: f64,
}

impl OrderShape {
    /// The shape of an order of `order` bytes, with blocks and contiguous runs of these sizes.
    pub(super) fn new(direction: Direction, by_layer: bool, run: u64, block: u64, order: u64) -> Self {
        let is_load = direction == Direction::Load;
        let [run, block, order] = [run, block, order].map(|bytes| bytes.max(1).ilog2());
        Self { is_load, by_layer, run, block, order }
    }
}

impl Forms {
    /// The form for an order: each is tried a few times, then the faster one is taken, and at times the other is tried again.
    pub(super) fn choose(&mut self, shape: OrderShape) -> Form {
        if self.rates.len() >= MOST_SHAPES && !self.rates.contains_key(&shape) {
            return Form::Staged;
        }
        let rates = self.rates.entry(shape).or_default();
        let begun = rates[0].begun + rates[1].begun;
        let best = usize::from(rates[1].bytes_per_ms > rates[0].bytes_per_ms);
        let chosen = match rates.iter().position(|rate| rate.begun < TRIALS) {
            Some(untried) => untried,
            None if begun.is_multiple_of(RETRY_EVERY) => 1 - best,
            None => best,
        };
        rates[chosen].begun = rates[chosen].begun.saturating_add(1);
        if chosen == 0 { Form::Direct } else { Form::Staged }
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
        let before = preferred(rates);
        let rate = &mut rates[usize::from(form == Form::Staged)];
        let now = bytes as f64 / milliseconds.max(1e-3);
        let weight = if rate.measured == 0 { 1.0 } else { NEWEST };
        rate.bytes_per_ms += (now - rate.bytes_per_ms) * weight;
        rate.measured = rate.measured.saturating_add(1);
        (preferred(rates) != before).then(|| line(&shape, rates))
    }

    /// A line for each shape.
    pub(super) fn lines(&self) -> Vec<String> {
        self.rates.iter().map(|(shape, rates)| line(shape, rates)).collect()
    }
}

/// The faster form, once both were tried.
fn preferred(rates: &[Rate; 2]) -> Option<Form> {
    let is_tried = rates.iter().all(|rate| rate.measured >= TRIALS);
    let is_staged = rates[1].bytes_per_ms > rates[0].bytes_per_ms;
    is_tried.then_some(if is_staged { Form::Staged } else { Form::Direct })
}

fn line(shape: &OrderShape, rates: &[Rate; 2]) -> String {
    let gbps = rates.map(|rate| rate.bytes_per_ms / 1e6);
    let way = if shape.is_load { "load" } else { "save" };
    let layers = if shape.by_layer { "by layer" } else { "merged" };
    let [run, block, order] = [shape.run, shape.block, shape.order].map(|log| 1u64 << log);
    let better = if gbps[1] > gbps[0] { "staged" } else { "direct" };
    format!(
        "{way} {layers}, runs from {run} B, blocks from {block} B, orders from {order} B: {better} \
         (direct {:.1} GB/s, staged {:.1} GB/s)",
        gbps[0], gbps[1]
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

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(order: u64) -> OrderShape {
        OrderShape::new(Direction::Load, false, 4_096, 1 << 20, order)
    }

    #[test]
    fn both_forms_are_tried_and_the_faster_is_kept_until_it_is_slower() {
        let (mut forms, mut told) = (Forms::default(), Vec::new());
        let mut speed = |forms: &mut Forms, direct: f64, staged: f64| {
            let chosen = forms.choose(shape(1 << 26));
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
    fn each_shape_has_its_own_judgement_and_few_shapes_are_kept() {
        let mut forms = Forms::default();
        for (small, large) in [(1.0, 4.0), (1.0, 4.0), (1.0, 4.0)] {
            for order in [1 << 16, 1 << 26] {
                for _ in 0..2 {
                    let form = forms.choose(shape(order));
                    let is_direct = form == Form::Direct;
                    let cost = if (order == 1 << 16) == is_direct { small } else { large };
                    forms.measured(shape(order), form, order, cost);
                }
            }
        }
        assert_eq!(forms.choose(shape(1 << 16)), Form::Direct);
        assert_eq!(forms.choose(shape(1 << 26)), Form::Staged);
        for run in 0..40 {
            for block in 0..40 {
                forms.choose(OrderShape::new(Direction::Save, true, 1 << run, 1 << block, 1));
            }
        }
        assert_eq!(forms.lines().len(), MOST_SHAPES);
    }
}
