//! Helpers of the tests of whole processes: servers, clusters and engines as processes, and sessions and peers that break the
//! rules.

pub mod api_server;
pub mod cluster;
pub mod collector;
pub mod content;
pub mod coordinators;
pub mod engine;
pub mod etcd;
pub mod flip;
pub mod hosts;
mod http;
pub mod impostor;
pub mod model;
pub mod node;
pub mod raw;
pub mod real_api_server;
pub mod replay;
pub mod s3;
pub mod server;
pub mod soak;
pub mod tls;
pub mod visitor;
pub mod wait;
