//! What every part of Larder agrees on: keys, namespaces, session messages, limits. No IO.

pub mod chain;
pub mod checksum;
pub mod chunk;
pub mod frame;
pub mod geometry;
pub mod hashing;
pub mod limits;
pub mod namespace;
pub mod run;
pub mod session;

pub use chain::{Chain, ChainError};
pub use chunk::{ChunkHash, ChunkRef};
pub use namespace::{Fingerprint, NamespaceSpec, PoolSpec};
