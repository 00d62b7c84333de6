//! The cost of recomputing a chunk.
//!
//! Every token costs the same in the layers' products with their weights. In attention, a token costs in proportion to the tokens
//! before it. So the cost of chunk `i` is the first chunk's cost times `1 + i / d`; at `d` chunks both parts are equal. A cost is
//! rounded to one of four bands. Each band costs twice as much as the band before it.

use std::num::NonZeroU32;

/// Costs by a chunk's index; all equal if the configuration does not tell where they double.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Costs {
    doubles_at: Option<NonZeroU32>,
}

impl Costs {
    pub(super) fn new(doubles_at: Option<NonZeroU32>) -> Self {
        Self { doubles_at }
    }

    /// The band of the chunk at this index.
    pub(super) fn band(self, index: u32) -> usize {
        self.doubles_at.map_or(0, |doubles_at| {
            let cost = 1.0 + f64::from(index) / f64::from(doubles_at.get());
            (cost.log2().round() as usize).min(COST_BANDS - 1)
        })
    }

    /// The cost of a chunk of a band, relative to the first band.
    pub(super) fn of_band(band: usize) -> f32 {
        (1_u32 << band) as f32
    }
}

const COST_BANDS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_grow_with_position_and_are_alike_where_nobody_asks() {
        let costs = Costs::new(NonZeroU32::new(100));
        assert_eq!(
            [0, 40, 42, 180, 184, 460, 470, 1_000_000].map(|i| costs.band(i)),
            [0, 0, 1, 1, 2, 2, 3, 3]
        );
        assert_eq!([0, 1_000_000].map(|index| Costs::default().band(index)), [0, 0]);
        assert_eq!([0, 3].map(Costs::of_band), [1.0, 8.0]);
    }
}
