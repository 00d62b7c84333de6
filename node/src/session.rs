//! Engine sessions: one socket per tenant, one task per session.
//!
//! `listen` accepts connections, `hello` opens sessions, `serve` carries requests to the session's actor and answers back.

mod connection;
mod greetings;
mod hello;
mod listen;
mod serve;
mod socket_file;

pub use listen::{Listener, Listening, Places, SessionActor, SessionSettings};
pub use socket_file::{BindError, NotASocket, check_socket_path};
