//! Events: the ordered stream of gained and lost chunks of a node's actors, for routers that follow it.
//!
//! A follower first gets the held chunks (the snapshot), page by page, then the changes. Changes during the snapshot come after
//! it, in order. A follower that applies everything in order knows which chunks are held: gaining a chunk twice or losing an
//! absent chunk changes nothing.
//!
//! Served as server-sent events (WHATWG HTML, section 9.2). The id of an event is `DEVICE:SEQUENCE`; sequence numbers of a
//! device have no gaps. A follower that is too slow gets `lagged` as its last event, and starts again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{self, Stream};
use larder_core::store::{Change, ChangeKind};
use larder_net::blocking::try_blocking;
use larder_protocol::{ChunkRef, Fingerprint};
use serde::Serialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver, Sender};
use tokio::time::timeout;

/// The feed of an actor's changes. It needs no listener.
#[derive(Debug, Clone)]
pub struct Feed {
    device: u16,
    sender: Sender<Arc<Batch>>,
}

/// Changes that are published together.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Number of the first change.
    sequence: u64,
    /// The changes, in order.
    pub(crate) changes: Vec<Change>,
    /// Whether the actor lost everything it had published: followers then begin anew.
    pub(crate) is_restart: bool,
}

/// Asks an actor for a page of its chunks, from a position on.
pub(crate) type AskPage = Box<dyn Fn(usize) -> LocalBoxFuture<'static, Option<Page>>>;

/// Some chunks of an actor, and the position of the next page; `None` after the last page.
pub(crate) type Page = (Vec<(Fingerprint, ChunkRef)>, Option<usize>);

/// The data of an event.
#[derive(Debug, Serialize)]
struct Data<'a> {
    /// The device that gained or lost the chunk.
    device: u16,
    /// The fingerprint of the chunk's namespace: 64 hexadecimal digits.
    namespace: &'a str,
    /// The chunk's hash.
    hash: String,
    /// The hash of the chunk before this chunk; for the first chunk of a prompt, the root of the namespace.
    parent: String,
    /// The chunk's place in the prompt, from 0.
    index: u32,
    /// Why the chunk was evicted: `watermark`, `need` or `clearing`; `null` if it was not evicted.
    evicted: Option<&'a str>,
}

/// The state of a follower's stream.
struct EventSubscriber {
    actors: VecDeque<(Feed, AskPage, usize)>,
    live: Vec<(Feed, Receiver<Arc<Batch>>)>,
    state: StreamPhase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum StreamPhase {
    Snapshot,
    Live,
    Ended,
}

impl Feed {
    /// The feed of an actor.
    pub fn new(device: u16) -> Self {
        Self { device, sender: broadcast::channel(WAITING_BATCHES).0 }
    }

    /// Publishes changes; `sequence` is the number of the first change.
    pub fn tell(&self, sequence: u64, changes: &[Change]) {
        if self.sender.receiver_count() > 0 && !changes.is_empty() {
            // An error: the last follower has just left.
            let _ =
                self.sender.send(Arc::new(Batch { sequence, changes: changes.to_vec(), is_restart: false }));
        }
    }
}

impl Feed {
    /// Tells followers that everything published before is lost.
    pub(crate) fn restart(&self) {
        // An error: nobody follows.
        let _ = self.sender.send(Arc::new(Batch { sequence: 0, changes: Vec::new(), is_restart: true }));
    }

    /// The changes from here on.
    pub(crate) fn subscribe(&self) -> Receiver<Arc<Batch>> {
        self.sender.subscribe()
    }
}

/// The events of these actors, from a snapshot on, as the body of an HTTP answer.
pub(crate) fn follow(actors: Vec<(Feed, AskPage)>) -> impl Stream<Item = Result<Bytes, std::io::Error>> {
    let live = actors.iter().map(|(feed, _)| (feed.clone(), feed.sender.subscribe())).collect();
    let actors = actors.into_iter().map(|(feed, actor)| (feed, actor, 0)).collect();
    let follower = EventSubscriber { actors, live, state: StreamPhase::Snapshot };
    stream::unfold(follower, |mut follower| async move {
        let text = follower.next().await?;
        Some((Ok(Bytes::from(text)), follower))
    })
}

impl EventSubscriber {
    /// The next piece of text; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        match self.state {
            StreamPhase::Snapshot => Some(self.next_page().await),
            StreamPhase::Live => Some(self.next_batch().await),
            StreamPhase::Ended => None,
        }
    }

    async fn next_page(&mut self) -> String {
        let Some((feed, actor, from)) = self.actors.front_mut() else {
            self.state = StreamPhase::Live;
            return "event: live\ndata: {}\n\n".to_owned();
        };
        let Some((chunks, next)) = actor(*from).await else { return self.end() };
        let device = feed.device;
        match next {
            Some(next) => *from = next,
            None => _ = self.actors.pop_front(),
        }
        // Another thread writes the text: this thread must answer health checks meanwhile.
        let written = try_blocking(move || {
            let mut text = String::new();
            for (fingerprint, chunk) in chunks {
                let held = Change { fingerprint, chunk, kind: ChangeKind::Gained, evicted: None };
                write_event(&mut text, "held", None, device, &held);
            }
            text
        });
        let Ok(text) = written.await else { return self.end() };
        // An empty comment keeps the stream alive if a page holds nothing.
        if text.is_empty() { ":\n\n".to_owned() } else { text }
    }

    async fn next_batch(&mut self) -> String {
        let waiting = self.live.iter_mut().map(|(feed, receiver)| {
            let device = feed.device;
            Box::pin(async move { (device, receiver.recv().await) })
        });
        let Ok(((device, batch), ..)) = timeout(SILENCE, futures_util::future::select_all(waiting)).await
        else {
            // By a comment the follower knows that node and network are well.
            return ":\n\n".to_owned();
        };
        match batch {
            Ok(batch) if batch.is_restart => self.end(),
            Ok(batch) => {
                let mut text = String::new();
                for (sequence, change) in (batch.sequence..).zip(&batch.changes) {
                    let event = if change.kind == ChangeKind::Lost { "evict" } else { "admit" };
                    write_event(&mut text, event, Some(sequence), device, change);
                }
                text
            }
            Err(RecvError::Lagged(_) | RecvError::Closed) => self.end(),
        }
    }

    fn end(&mut self) -> String {
        self.state = StreamPhase::Ended;
        "event: lagged\ndata: {}\n\n".to_owned()
    }
}

fn write_event(
    text: &mut String,
    event: &str,
    sequence: Option<u64>,
    device: u16,
    &Change { fingerprint, chunk, evicted, .. }: &Change,
) {
    use std::fmt::Write as _;
    let namespace = format!("{fingerprint:x}");
    let (hash, parent) = (chunk.hash.to_string(), chunk.parent.to_string());
    let evicted = evicted.map(<&str>::from);
    let data = Data { device, namespace: &namespace, hash, parent, index: chunk.index, evicted };
    let data = serde_json::to_string(&data).unwrap_or_default();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "event: {event}");
    if let Some(sequence) = sequence {
        let _ = writeln!(text, "id: {device}:{sequence}");
    }
    let _ = write!(text, "data: {data}\n\n");
}

/// A stream without changes has a comment in every such time.
const SILENCE: Duration = Duration::from_secs(10);

/// Batches that a slow follower may leave unread: some 12 s at one batch per 3 ms.
const WAITING_BATCHES: usize = 4_096;

/// Chunks of one page: an actor makes a page in well under a millisecond.
pub(crate) const PAGE_CHUNKS: usize = 1_024;

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::StreamExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_without_changes_has_comments() {
        let page: AskPage = Box::new(|_| Box::pin(async { Some((Vec::new(), None)) }));
        let mut events = pin!(follow(vec![(Feed::new(0), page)]));
        let begun = tokio::time::Instant::now();
        for expected in [":\n\n", "event: live\ndata: {}\n\n", ":\n\n", ":\n\n"] {
            assert_eq!(events.next().await.unwrap().unwrap(), expected);
        }
        assert_eq!(begun.elapsed(), 2 * SILENCE);
    }
}
