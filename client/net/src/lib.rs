//! Networking, metrics and traces, shared by the processes of a cluster.
//!
//! - [`quic`]: mutual TLS, certificates and their renewal, messages on streams; [`coordinator_client`] speaks with a coordinator
//!   over it.
//! - [`tcp`]: TLS over TCP, a second way for blocks; [`keepalive`]: ends TCP connections whose other end is gone.
//! - [`http`]: health, metrics and status, over connections that are cheap each.
//! - [`config_file`]: reads configuration files; [`reload`]: changes of a configuration file while a server runs.
//! - [`audit`], [`line_file`]: logs of what happened, a line of JSON each; [`log_paths`]: checks their paths; [`warnings`]: how
//!   often a warning is repeated.
//! - [`sizes`], [`addresses`]: values in configuration files; [`blocking`]: work that takes its time; [`failure`]: an error that is
//!   only told.
//! - [`metrics`]: one table, from which a server's metrics are made; [`trace`]: spans and their export.

pub mod addresses;
pub mod audit;
pub mod blocking;
pub mod config_file;
pub mod coordinator_client;
pub mod failure;
pub mod http;
pub mod keepalive;
pub mod line_file;
pub mod log_paths;
pub mod metrics;
pub mod quic;
pub mod reload;
pub mod seldom;
pub mod sizes;
pub mod tcp;
pub mod trace;
pub mod warnings;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose holders leave nothing half done: a holder's panic does not stop the other holders.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error and its causes.
pub fn in_one_line(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
