//! The link between an engine and the node on its host: a [`socket`] that carries frames and descriptors, and memory that one of
//! them shares with the other.

mod look_or_sleep;
mod mapping;
pub mod socket;

pub use look_or_sleep::LookOrSleep;
pub use mapping::{Mapping, MappingError};
