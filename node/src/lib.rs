//! A Larder node.

pub mod clock;
pub mod store;
