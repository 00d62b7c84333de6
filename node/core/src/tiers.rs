//! What the tiers below memory have in common.

pub mod known;
pub mod search;
