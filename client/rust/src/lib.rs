//! The engine side of a Larder session: it talks to the node on the same host and copies blocks in and out of its arena.
//!
//! A [`Session`] makes [`Call`]s: a task on tokio awaits them, a thread without a runtime waits for them, with [`Call::wait`].
//!
//! - **get**: [`Session::lookup`] says how much of a prompt is here, [`Session::lease`] keeps it in place,
//!   [`LeaseGuard::copy_block`] copies one block out, [`LeaseGuard::copy_parts`] many by several threads, dropping the guard
//!   gives the chunks back. Blocks are verified when they are read, as [`SessionOptions::verify`] says. A block with wrong bytes
//!   is [`Damaged`], and the node is told.
//! - **put**: [`Session::reserve`] says which chunks are missing, [`Session::stage`] gives one of them room,
//!   [`StagedChunk::copy_from`] fills it, [`Session::commit`] hands it over.
//! - **hand over**: [`Session::stage_layers`] and [`Session::hand_over`] give others some layers ahead of the commit;
//!   [`Session::follow`] reads chunks while another engine writes them.
//! - **GPU memory**: [`EngineLane`] copies it in the engine's process, the [`device_lane`] has the node copy it.

mod call;
pub mod copies;
pub mod device_lane;
pub mod engine_lane;
mod error;
mod extents;
mod follow;
mod handoff;
mod lease;
mod link;
mod namespace;
mod opening;
mod options;
mod origin;
mod regions;
mod reservation;
mod session;
mod ticket;
mod traffic;
mod verifier;
mod verify;
mod window;

pub use call::{Call, CallFuture};
pub use copies::BlockPart;
pub use device_lane::{NodeCopy, NodeTensors};
pub use engine_lane::EngineLane;
pub use error::{Damaged, ProtocolError, SessionError};
pub use follow::{Follow, FollowOptions, InPlace};
pub use lease::LeaseGuard;
pub use namespace::Namespace;
pub use options::{LookupOptions, SessionOptions, UnknownVerify, Verify};
pub use reservation::{Reservation, StagedChunk, StagedLayers};
pub use session::Session;
pub use ticket::Ticket;
pub use traffic::Counters;

/// The examples of both READMEs compile.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../README.md")]
struct Readme;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose holders leave nothing half done: a holder's panic does not stop the other holders.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
