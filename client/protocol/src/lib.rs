//! The types that every part of Larder shares: keys, namespaces, messages of sessions, peers and membership, the partition
//! table, limits. No IO.

pub mod chain;
pub mod checksum;
pub mod chunk;
pub mod describe;
pub mod drain;
pub mod frame;
pub mod geometry;
pub mod handoff;
pub mod hashing;
pub mod identity;
pub mod lane;
pub mod lease;
pub mod limits;
pub mod membership;
pub mod namespace;
pub mod peer;
pub mod pin;
pub mod pools;
pub mod purge;
pub mod reload;
pub mod routing;
pub mod run;
pub mod session;
pub mod sha256_cbor;
pub mod table;
pub mod trace;
pub mod v1;
pub mod version;

pub use chain::{Chain, ChainError};
pub use chunk::{ChunkHash, ChunkRef};
pub use namespace::{Fingerprint, NamespaceSpec};
pub use pools::{HitPolicy, PoolRules, PoolSet, PoolSpec};
pub use trace::{InvalidTraceparent, TraceContext};
