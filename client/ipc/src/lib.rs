//! The link between an engine and the node on its host: a [`socket`] that carries frames and descriptors, and memory that one
//! of them has mapped for the other.

mod mapping;
pub mod socket;

pub use mapping::{Mapping, MappingError};
