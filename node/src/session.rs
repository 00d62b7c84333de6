//! Engine sessions: a socket a tenant, a task a session.
//!
//! `listen` accepts and opens, `serve` carries requests to the session's actor and answers back.

mod hello;
mod listen;
mod serve;

pub use listen::{Listener, Listening, SessionActor, SessionSettings};
