//! The `larder` command line: servers, development cluster, trace replay, benches.

pub mod content;
pub mod generator;
pub mod replay;
pub mod trace;

mod output;
