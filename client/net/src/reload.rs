//! Changes of a server's configuration file while the server runs: when to read it again, and what has changed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, SystemTime};

use larder_protocol::reload::ChangedSetting;
use serde::Serialize;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

/// Calls `reload` at every SIGHUP, and when the file changed, with the cause.
///
/// # Cancel safety
/// Once dropped, it no longer reloads.
pub async fn when_to_reload(file: &Path, mut reload: impl AsyncFnMut(&'static str)) {
    let mut hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => hangup,
        Err(error) => {
            return tracing::error!(%error, "SIGHUP and changes of the configuration are not noticed: restart this process after a change");
        }
    };
    let mut look = interval(LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let stamp = || std::fs::metadata(file).ok().map(|file| (file.modified().ok(), file.len()));
    let mut known: Option<(Option<SystemTime>, u64)> = stamp();
    loop {
        let by = tokio::select! {
            Some(()) = hangup.recv() => "SIGHUP",
            _ = look.tick() => "the changed file",
        };
        let now = stamp();
        if by == "SIGHUP" || (now.is_some() && now != known) {
            reload(by).await;
        }
        known = now.or(known);
    }
}

/// The settings in which two configurations differ.
#[must_use]
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
