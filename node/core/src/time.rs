//! Time as a node counts it.

use std::ops::Add;

/// Milliseconds since the node started. Pure modules take it as `now`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Millis(pub u64);

impl Millis {
    /// How long from `earlier` until this moment; 0 if `earlier` is later.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Millis {
    type Output = Self;

    fn add(self, milliseconds: u64) -> Self {
        Self(self.0.saturating_add(milliseconds))
    }
}
