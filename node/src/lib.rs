//! One Larder node: GPU actors, the store, the host tier, engine sessions.

pub mod arena;
pub mod config;
pub mod copy;
pub mod host;
pub mod limits;
pub mod threads;
pub mod window;
