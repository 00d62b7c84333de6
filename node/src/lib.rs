//! One Larder node: GPU actors, their memory and tiers, engine sessions, and its part in the cluster.
//!
//! | thread | work | file |
//! | --- | --- | --- |
//! | main | accepts sessions, says hello, watches engine processes | `session/listen.rs`, `session/hello.rs`, `processes.rs` |
//! | `larder-gpu-N`, one per actor, on the CPUs near its GPU | the actor's mailbox and the tasks of its sessions, so a request crosses no thread | `actor.rs`, `session/serve.rs` |
//! | copy threads, on the same CPUs | copy and sum blocks | `copy.rs` |
//! | `larder-disk`, one per actor with a disk | writes, syncs, reads, verifies, frees segments | `disk/tier.rs` |
//! | `larder-device-N`, one per actor whose engines registered GPU memory | the only caller of the GPU | `device_lane.rs` |
//! | `larder-object`, with an object store | speaks HTTP with the store, verifies objects | `object/tier.rs` |
//! | `larder-peer`, in a cluster, near the interface of its address | the QUIC endpoint, both halves of the exchange, the directory, the coordinator's client | `cluster.rs` |
//! | `larder-blocks-N`, beside `larder-peer` on fast links | fetch and send large batches of blocks, each thread on its own sockets | `exchange/block_threads.rs` |
//! | `larder-work` | one call that may block, such as a file's deletion; then the thread ends | `blocking.rs` of `larder-net` |
//! | one for each log | writes the lines | `line_file.rs` of `larder-net` |
//! | HTTP | health, metrics, status, events | `http.rs` |
//!
//! A session talks to one actor. Through this actor it reaches the chunks of the node's other actors (`siblings`).

mod accept;
pub mod actor;
pub mod arena;
pub mod clock;
mod cluster;
pub mod config;
pub mod copy;
mod described;
pub mod device_lane;
pub mod directory;
pub mod disk;
pub mod drain;
pub mod events;
pub mod exchange;
mod filling;
mod findings;
mod guests;
pub mod hands;
pub mod hardware;
pub mod host;
mod http;
pub mod infinite_cache;
mod kv_events;
pub mod limits;
pub mod lookup_log;
pub mod metrics;
pub mod object;
mod private;
pub mod processes;
mod purge;
mod reload;
mod server;
pub mod session;
pub mod siblings;
mod spans;
mod tell;
mod tenants;
pub mod threads;
mod watched;
pub mod window;

pub use cluster::{ClusterError, ClusterStatus};
pub use config::Config;
pub use drain::Ended;
pub use findings::FindingStatus;
pub use http::{
    ActorStatus, ChainStatus, DiskStatus, EvictedStatus, HashStatus, LinkStatus, LookupStatus,
    NamespaceStatus, ObjectStatus, OtherStatus, PastLookupStatus, PastStatus, PinStatus, PlayedStatus,
    PrefixStatus, RunStatus, SessionStatus, Status, StayStatus, TenantStatus, TierHits, TriedStatus,
    UsageStatus, WhatIfStatus,
};
pub use reload::{Examine, Reloadable, SetLog};
pub use server::{Ready, STOP_WITHIN, ServeError, run, run_on};
