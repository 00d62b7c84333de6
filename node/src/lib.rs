//! One Larder node: GPU actors, the store, the host tier, engine sessions.

pub mod actor;
pub mod arena;
pub mod clock;
mod cluster;
pub mod config;
pub mod copy;
pub mod device_lane;
pub mod directory;
pub mod disk;
pub mod events;
pub mod exchange;
pub mod hardware;
pub mod host;
mod http;
mod kv_events;
pub mod limits;
pub mod metrics;
pub mod object;
mod private;
pub mod processes;
pub mod record;
pub mod reuse;
mod server;
pub mod session;
pub mod siblings;
pub mod threads;
mod watched;
pub mod window;

pub use cluster::{ClusterError, ClusterStatus};
pub use config::Config;
pub use http::{ActorStatus, DiskStatus, HashStatus, NamespaceStatus, ObjectStatus, Status};
pub use server::{Ready, STOP_WITHIN, ServeError, run, run_on};
