//! A whole cluster in one deterministic simulation.
//!
//! Nodes, each of a few actors with real cores, the real directory and exchange decisions, the real disk tier over a simulated
//! disk; one to five coordinators with their real membership, ring and election; engines that behave as a connector does, and
//! some that lie. Time is virtual; there is one source of chance, one queue of events, and no thread. A seed decides everything:
//! a seed always has the same history.
//!
//! [`run`](run()) plays one seed: a minute with faults, then some time without faults, in which everything must come to rest.
//! `world` is the whole simulated cluster; `process`, `actor`, `tiers`, `gpu`, `exchange`, `serve`, `follow`, `directory`,
//! `coordinator` and `follower` perform the effects of the real decisions; `network`, `streams`, `platter` and `objects` are the
//! parts that fail; `engine` sends requests; `oracles` has the checks.

mod actor;
mod bytes;
mod clock;
mod content;
mod coordinator;
pub mod coverage;
mod directory;
mod drain;
mod engine;
mod exchange;
mod faults;
mod follow;
mod follower;
mod gpu;
mod network;
mod objects;
mod oracles;
pub mod planted;
mod platter;
mod process;
mod purge;
mod queue;
mod run;
pub mod scale;
mod serve;
mod space;
mod streams;
#[cfg(test)]
mod tests;
mod tiers;
mod world;

pub use run::{Outcome, run, shrink};
