//! The audit log: one line of JSON for each change at this server, with its author.
//!
//! `{"time":"2026-11-23T14:05:09.120Z","node":"node-0","by":"admin me","action":"set_policy","what":"sieve","outcome":"done"}`.
//! It records the actions of admins, of signals and of a changed configuration, and the pins of engines. A coordinator's lines
//! name it as `coordinator` instead of `node`. `outcome` is `done`, or the reason of the refusal. The server's own log reports
//! lines that could not be written.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::SystemTime;

use humantime::format_rfc3339_millis;
use serde::Serialize;

use crate::line_file::{LineFile, RecordConfig};

/// Notes changes and their authors. Cheap to clone; its thread ends with the last clone.
#[derive(Debug, Clone, Default)]
pub struct Audit(Option<(LineFile, Arc<Server>)>);

/// The server that owns the log.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Server {
    /// A node of this name.
    Node(String),
    /// A coordinator whose certificate has this name.
    Coordinator(String),
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    #[serde(flatten)]
    server: &'a Server,
    by: &'a str,
    action: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    what: &'a str,
    outcome: &'a str,
}

impl Audit {
    /// Opens the log of this server for appending, and starts its thread.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or the system gives no thread.
    pub fn start(config: RecordConfig, server: Server) -> io::Result<(Self, JoinHandle<()>)> {
        let lost = || tracing::error!("a line of the audit log is lost: check the disk of [audit] path");
        let (file, thread) = LineFile::start(config, "larder-audit", Arc::new(lost))?;
        Ok((Self(Some((file, Arc::new(server)))), thread))
    }

    /// Whether changes are noted.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Ends the log, after all changes noted so far have been written.
    pub fn end(&self) {
        if let Some((file, _)) = &self.0 {
            file.end();
        }
    }

    /// Notes that somebody did something, or was refused.
    pub fn note<E: AsRef<str>>(&self, by: &str, action: &str, what: &str, outcome: Result<(), E>) {
        let Some((file, server)) = &self.0 else { return };
        let time = format_rfc3339_millis(SystemTime::now()).to_string();
        let outcome = outcome.as_ref().map_or_else(|refused| refused.as_ref(), |()| "done");
        file.write(&Line { time, server, by, action, what, outcome });
    }
}
