//! Follows the chunks that nodes gain and lose, for the reasons of a replay's lost tokens.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, SendError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use larder_protocol::{ChunkHash, Fingerprint};
use serde::Deserialize;

use super::losses::Change;
use crate::http;

/// The changes of all nodes, each with the number of its node.
#[derive(Debug)]
pub(crate) struct Holdings {
    changes: Receiver<(usize, Change)>,
}

/// The data of an event, as far as it matters here.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow)]
    namespace: &'a str,
    hash: &'a str,
    evicted: Option<&'a str>,
}

impl Holdings {
    /// Follows the chunks of a namespace at these nodes, each on a thread that ends with this, or with the process.
    pub(crate) fn follow(nodes: impl IntoIterator<Item = SocketAddr>, namespace: &Fingerprint) -> Self {
        let (sender, changes) = sync_channel(WAITING_CHANGES);
        for (number, http) in nodes.into_iter().enumerate() {
            let (sender, namespace) = (sender.clone(), format!("{namespace:x}"));
            thread::spawn(move || while follow(number, http, &namespace, &sender).is_ok() {});
        }
        Self { changes }
    }

    /// The changes since the last call.
    pub(crate) fn changes(&self) -> impl Iterator<Item = (usize, Change)> {
        self.changes.try_iter()
    }
}

/// Follows a node until its stream ends; it may be followed again after a pause.
fn follow(
    number: usize,
    http: SocketAddr,
    namespace: &str,
    sender: &SyncSender<(usize, Change)>,
) -> Result<(), SendError<(usize, Change)>> {
    let mut name = String::new();
    for line in http::get_lines(&http.to_string(), "/events").into_iter().flatten().map_while(Result::ok) {
        if let Some(event) = line.strip_prefix("event: ") {
            event.clone_into(&mut name);
        }
        let change = line.strip_prefix("data: ").and_then(|data| change(&name, data, namespace));
        if let Some(change) = change {
            sender.send((number, change))?;
        }
    }
    sender.send((number, Change::Ended))?;
    thread::sleep(PAUSE);
    Ok(())
}

/// The change that an event reports; `None` if the event is about no chunk of this namespace.
fn change(name: &str, data: &str, namespace: &str) -> Option<Change> {
    let event: Event<'_> = serde_json::from_str(data).ok()?;
    let hash: ChunkHash = event.hash.parse().ok().filter(|_| event.namespace == namespace)?;
    match name {
        "held" | "admit" => Some(Change::Gained(hash)),
        "evict" => Some(Change::Lost(hash, event.evicted.unwrap_or("dropped").to_owned())),
        _ => None,
    }
}

/// Changes that wait to be counted. Beyond this number the threads wait, and at last a node ends their stream.
const WAITING_CHANGES: usize = 1 << 16;

/// The pause before a node is followed again.
const PAUSE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_the_namespace_become_changes() {
        let hash = ChunkHash([7; 32]);
        let data = |more: &str| format!("{{\"device\":0,\"namespace\":\"n\",\"hash\":\"{hash}\"{more}}}");
        assert_eq!(change("held", &data(""), "n"), Some(Change::Gained(hash)));
        assert_eq!(change("admit", &data(""), "n"), Some(Change::Gained(hash)));
        let lost = |rule: &str| Some(Change::Lost(hash, rule.to_owned()));
        assert_eq!(change("evict", &data(",\"evicted\":\"need\""), "n"), lost("need"));
        assert_eq!(change("evict", &data(""), "n"), lost("dropped"));
        assert_eq!(change("admit", &data(""), "another"), None);
        assert_eq!(change("live", "{}", "n"), None);
    }
}
