//! Changes of a server's configuration file while the server runs: when to read it again, and what has changed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use larder_protocol::reload::{ChangedSetting, Reloaded};
use serde::Serialize;
use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

use crate::audit::Audit;
use crate::blocking::blocking;

/// The times at which a server reads its configuration file again: at every SIGHUP, and when the file changed. A change counts
/// when two looks in a row agree: a file may be empty, or end midway, while somebody writes it.
#[derive(Debug)]
pub struct ReloadTimes {
    file: PathBuf,
    /// `None`: the system gave no handler.
    hangup: Option<Signal>,
    known: Option<Stamp>,
}

/// The time of a file's last change, and its length.
type Stamp = (Option<SystemTime>, u64);

impl ReloadTimes {
    /// Notes every SIGHUP and change of the file from now on, so that those of a long start are not lost. Needs a tokio runtime.
    #[must_use]
    pub fn begin(file: &Path) -> Self {
        let hangup = signal(SignalKind::hangup());
        let hangup = hangup.inspect_err(
            |error| tracing::error!(%error, "SIGHUP is not noticed: use `larder reload`, or change the file"),
        );
        Self { file: file.to_owned(), hangup: hangup.ok(), known: stamp(file) }
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Calls `reload` at each of the times, with the cause.
    ///
    /// # Cancel safety
    /// Once dropped, it no longer reloads.
    pub async fn call(self, reload: impl AsyncFnMut(&'static str)) {
        let file = self.file.clone();
        // The file's drive or server may hang.
        let stamp = || {
            let file = file.clone();
            blocking(move || stamp(&file))
        };
        self.call_by(stamp, reload).await;
    }

    /// As [`call`](Self::call), with a way to look at the file.
    async fn call_by<S: Future<Output = Option<Stamp>>>(
        self,
        stamp: impl Fn() -> S,
        mut reload: impl AsyncFnMut(&'static str),
    ) {
        let Self { mut hangup, mut known, .. } = self;
        let mut last_look = known;
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_told = tokio::select! {
                Some(()) = next(&mut hangup) => true,
                _ = look.tick() => false,
            };
            let now = stamp().await;
            let has_settled = std::mem::replace(&mut last_look, now) == now;
            if is_told {
                reload("SIGHUP").await;
            } else if now.is_some() && now != known && has_settled {
                reload("the changed file").await;
            } else {
                continue;
            }
            known = now.or(known);
        }
    }
}

async fn next(hangup: &mut Option<Signal>) -> Option<()> {
    hangup.as_mut()?.recv().await
}

fn stamp(file: &Path) -> Option<Stamp> {
    std::fs::metadata(file).ok().map(|file| (file.modified().ok(), file.len()))
}

/// The settings in which two configurations differ.
pub fn differences<C: Serialize>(before: &C, after: &C) -> Vec<ChangedSetting> {
    let (before, after) = (settings(before), settings(after));
    let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let value = |settings: &BTreeMap<String, Value>, key: &String| {
        settings.get(key).map_or_else(|| "null".to_owned(), Value::to_string)
    };
    let setting = |key: &String| ChangedSetting {
        key: key.clone(),
        before: value(&before, key),
        after: value(&after, key),
    };
    keys.into_iter().map(setting).filter(|setting| setting.before != setting.after).collect()
}

/// Notes a reload in the audit log, and logs each change. `by` names who asked for it.
pub fn note(audit: &Audit, by: &str, reloaded: &Result<Reloaded, String>) {
    let Reloaded { applied, at_restart } = match reloaded {
        Ok(reloaded) => reloaded,
        Err(error) => {
            audit.note(by, "reload", "", Err(error));
            tracing::error!(
                by,
                error,
                "the configuration is refused, and nothing has changed: correct the file"
            );
            return;
        }
    };
    let settings = applied.iter().map(|changed| format!("{} = {}", changed.key, changed.after));
    audit.note(by, "reload", &settings.collect::<Vec<_>>().join(", "), Ok::<_, &str>(()));
    for ChangedSetting { key, before, after } in applied {
        tracing::info!(by, key, before, after, "a setting has changed");
    }
    for key in at_restart {
        tracing::warn!(by, key, "this setting takes effect at the next start: restart this process");
    }
    if applied.is_empty() && at_restart.is_empty() {
        tracing::info!(by, "the configuration has not changed");
    }
}

/// Every setting by its key.
fn settings(config: &impl Serialize) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    // An error: never, since a configuration is made of texts and numbers.
    add_settings(&mut all, String::new(), serde_json::to_value(config).unwrap_or_default());
    all
}

fn add_settings(all: &mut BTreeMap<String, Value>, key: String, value: Value) {
    let below = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                // The key of a table with a name already has the name.
                if name != "name" || key.is_empty() {
                    add_settings(all, below(&name), field);
                }
            }
        }
        Value::Array(items) => {
            for (at, item) in items.into_iter().enumerate() {
                let name =
                    item.get("name").and_then(Value::as_str).map_or_else(|| at.to_string(), str::to_owned);
                add_settings(all, below(&name), item);
            }
        }
        Value::Null => {}
        value => _ = all.insert(key, value),
    }
}

/// How often the file is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use rustix::process::{Signal, getpid, kill_process};
    use tokio::sync::mpsc;

    use super::*;

    /// Looks at the file on this thread: only the time of tokio passes.
    fn looks(file: &Path) -> impl Fn() -> std::future::Ready<Option<Stamp>> {
        || std::future::ready(stamp(file))
    }

    /// The first cause to read the file again.
    async fn first_cause(times: ReloadTimes) -> &'static str {
        let (tell, mut told) = mpsc::unbounded_channel();
        let file = times.file().to_owned();
        tokio::select! {
            cause = told.recv() => cause.unwrap(),
            () = times.call_by(looks(&file), async |by| _ = tell.send(by)) => unreachable!("it goes on"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_hangup_and_a_change_during_a_long_start_are_not_lost() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("node.toml");
        std::fs::write(&file, "").unwrap();
        let times = ReloadTimes::begin(&file);
        kill_process(getpid(), Signal::HUP).unwrap();
        assert_eq!(first_cause(times).await, "SIGHUP");

        let times = ReloadTimes::begin(&file);
        std::fs::write(&file, "name = \"longer\"").unwrap();
        assert_eq!(first_cause(times).await, "the changed file");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_still_being_written_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("node.toml");
        std::fs::write(&file, "name = \"a\"").unwrap();
        let (tell, mut told) = mpsc::unbounded_channel();
        let content = || std::fs::read_to_string(&file).unwrap();
        let times = ReloadTimes::begin(&file);
        let watch = times.call_by(looks(&file), async |_| _ = tell.send(content()));
        let write = async {
            for text in ["", "name", "name = \"longer\""] {
                std::fs::write(&file, text).unwrap();
                tokio::time::sleep(LOOK_EVERY * 3 / 4).await;
            }
            told.recv().await.unwrap()
        };
        tokio::select! {
            read = write => assert_eq!(read, "name = \"longer\""),
            () = watch => unreachable!("it goes on"),
        }
    }
}
