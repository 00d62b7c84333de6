//! The link between an engine and the node on its host: a [`socket`] that carries frames and descriptors, and memory that one
//! of them has mapped for the other.

mod lookout;
mod mapping;
pub mod socket;

pub use lookout::Lookout;
pub use mapping::{Mapping, MappingError};
