//! The Larder coordinator: for now it starts, answers health and says which nodes it was told of.
//!
//! Membership, the ring and the partition table come later; until then its nodes stand in its config file.

mod config;
mod http;
mod metrics;
mod server;

pub use config::{Config, ConfigError, HttpConfig, NodeConfig};
pub use http::{NodeStatus, Status};
pub use server::{Ready, STOP_SECONDS, ServeError, run};
