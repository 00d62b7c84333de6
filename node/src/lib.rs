//! One Larder node: GPU actors, the store, the host tier, engine sessions.

pub mod clock;
pub mod config;
pub mod host;
pub mod limits;
pub mod store;
