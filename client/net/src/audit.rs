//! The audit log: one line of JSON for each change at this server, with its author.
//!
//! `{"time":"2026-11-23T14:05:09.120Z","node":"node-0","by":"admin me","action":"set_policy","what":"sieve","outcome":"done"}`.
//! It records the actions of admins, of signals and of a changed configuration, and the pins of engines. A coordinator's lines
//! name it as `coordinator` instead of `node`. `outcome` is `done`, or the reason of the refusal. The server's own log reports
//! lines that could not be written. Engines must not push the lines of others out of the files: of a tenant whose engines pin
//! much, most lines are left out and counted.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use humantime::format_rfc3339_millis;
use serde::Serialize;
use tokio::time::Instant;

use crate::line_file::{LineFile, RecordConfig};
use crate::seldom::Seldom;

/// Notes changes and their authors. Cheap to clone; its thread ends with the last clone.
#[derive(Debug, Clone, Default)]
pub struct Audit(Option<(LineFile, Arc<Shared>)>);

#[derive(Debug)]
struct Shared {
    server: Server,
    started: Instant,
    tenants: Mutex<BTreeMap<String, TenantLines>>,
}

/// The lines of one tenant's engines.
#[derive(Debug, Default)]
struct TenantLines {
    /// When the tenant may write as many lines at once as any tenant: later with each line.
    rested: Duration,
    left_out: u64,
}

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
        let (started, seldom) = (Instant::now(), Mutex::new(Seldom::new(LINE_EVERY)));
        let lost = move || {
            if let Some(more) = crate::lock(&seldom).says(started.elapsed()) {
                tracing::error!(more, "a line of the audit log is lost: check the disk of [audit] path");
            }
        };
        let (file, thread) = LineFile::start(config, "larder-audit", Arc::new(lost))?;
        Ok((Self(Some((file, Arc::new(Shared { server, started, tenants: Mutex::default() })))), thread))
    }

    /// Whether changes are noted.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Ends the log, after all changes noted so far, and the numbers of lines left out, have been written.
    pub fn end(&self) {
        if let Some((file, shared)) = &self.0 {
            shared.write_left_out(file, Duration::MAX);
            file.end();
        }
    }

    /// Notes that somebody did something, or was refused.
    pub fn note<E: AsRef<str>>(&self, by: &str, action: &str, what: &str, outcome: Result<(), E>) {
        if let Some((file, shared)) = &self.0 {
            shared.write_left_out(file, shared.started.elapsed());
            file.write(&shared.line(by, action, what, &outcome));
        }
    }

    /// Notes that an engine of a tenant did something, or was refused. Beyond 100 lines at once and one line a second, lines of the
    /// tenant's engines are left out. Their number precedes the next line of anybody after a line may be written again.
    pub fn note_of_engine<E: AsRef<str>>(
        &self,
        (tenant, by): (&str, &str),
        action: &str,
        what: &str,
        outcome: Result<(), E>,
    ) {
        let Some((file, shared)) = &self.0 else { return };
        let now = shared.started.elapsed();
        shared.write_left_out(file, now);
        if shared.may_write(tenant, now) {
            file.write_if_half_empty(&shared.line(by, action, what, &outcome));
        }
    }
}

impl Shared {
    fn line<'a, E: AsRef<str>>(
        &'a self,
        by: &'a str,
        action: &'a str,
        what: &'a str,
        outcome: &'a Result<(), E>,
    ) -> Line<'a> {
        let time = format_rfc3339_millis(SystemTime::now()).to_string();
        let outcome = outcome.as_ref().map_or_else(|refused| refused.as_ref(), |()| "done");
        Line { time, server: &self.server, by, action, what, outcome }
    }

    /// Whether a tenant's engines may write a line now; if not, the line is counted.
    fn may_write(&self, tenant: &str, now: Duration) -> bool {
        let mut tenants = crate::lock(&self.tenants);
        let lines = tenants.entry(tenant.to_owned()).or_default();
        let may_write = lines.may_write(now);
        if may_write {
            lines.rested = lines.rested.max(now) + LINE_EVERY;
        } else {
            lines.left_out += 1;
        }
        may_write
    }

    /// Writes how many lines of a tenant's engines were left out, once they may write again. A number that does not fit the queue
    /// is kept. A tenant without such a number that has rested, or was removed, takes no memory.
    fn write_left_out(&self, file: &LineFile, now: Duration) {
        crate::lock(&self.tenants).retain(|tenant, lines| {
            if lines.left_out > 0 && lines.may_write(now) {
                let (by, what) = (format!("engines of tenant {tenant}"), format!("{} lines", lines.left_out));
                if file.try_write_if_half_empty(&self.line(&by, "left_out", &what, &Ok::<_, &str>(()))) {
                    lines.left_out = 0;
                }
            }
            lines.left_out > 0 || lines.rested > now
        });
    }
}

impl TenantLines {
    fn may_write(&self, now: Duration) -> bool {
        self.rested.max(now).saturating_add(LINE_EVERY) <= now.saturating_add(LINES_AT_ONCE * LINE_EVERY)
    }
}

/// One line of a tenant's engines is written in this time, and one about lost lines logged.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Lines of a tenant's engines that may come at once.
const LINES_AT_ONCE: u32 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_pins_without_end_leaves_the_lines_of_admins_in_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        let config = RecordConfig::to(path.clone());
        let (audit, thread) = Audit::start(config, Server::Node("n".to_owned())).unwrap();
        let pin = |tenant| audit.note_of_engine((tenant, "engine e"), "pin", "", Err("not_found"));
        audit.note("admin me", "purge", "tenant chat", Ok::<_, &str>(()));
        for _ in 0..60 {
            (0..10_000).for_each(|_| pin("chat"));
            tokio::time::advance(LINE_EVERY).await;
        }
        pin("other");
        (0..200).for_each(|_| pin("last"));
        audit.end();
        thread.join().unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let of = |action: &str| text.matches(&format!("\"action\":\"{action}\"")).count();
        assert_eq!((of("purge"), of("pin"), of("left_out")), (1, 260, 61));
        assert_eq!(
            text.matches(r#""what":"9999 lines""#).count(),
            59,
            "the last ones too, by the line of another tenant"
        );
        assert!(text.contains(r#""by":"engines of tenant last","action":"left_out","what":"100 lines""#));
        assert!(text.contains(r#""by":"engines of tenant chat","action":"left_out","what":"9900 lines""#));
    }
}
