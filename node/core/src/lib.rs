//! The decisions of a Larder node, and no IO: no thread, socket, file or clock. Time is an argument.

pub mod directory;
pub mod loading;
pub mod placement;
pub mod priority;
pub mod reports;
pub mod store;
pub mod tiers;
mod time;

pub use time::Millis;
