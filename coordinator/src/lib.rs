//! The Larder coordinator: membership, the ring, the partition table. It is off the data path.

mod config;
mod elect;
pub mod election;
mod gather;
mod history;
mod http;
mod keep;
pub mod membership;
mod metrics;
mod nodes;
mod prefix;
mod published;
pub mod register;
mod reload;
pub mod ring;
mod rivals;
mod serve;
mod server;
mod shared;
pub mod state;
mod tokenizer;
mod uptime;

pub use config::{Backend, Config, ElectionConfig, HttpConfig, PeerConfig, StateConfig};
pub use http::{LostStatus, NodeHeld, NodeStatus, PrefixAnswer, PrefixHeld, Status};
pub use metrics::COORDINATOR;
pub use published::Published;
pub use server::{Ready, STOP_WITHIN, ServeError, check_build, check_files, run, run_elected, run_from};
pub use tokenizer::{Tokenizer, TokenizerError};
