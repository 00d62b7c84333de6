//! Publishes the node's gained and lost chunks in the format of vLLM's KV events, for routers that follow engines by such events.
//!
//! A ZeroMQ PUB socket sends messages of three frames: topic, number, and a batch in MessagePack, `[seconds, [event, ...],
//! rank]`. The rank is the GPU's number, in place of an engine's data-parallel rank. An event is a map with a `type`
//! (`vllm/distributed/kv_events.py` of vLLM 0.32). The numbers of a topic have no gaps, so a slow subscriber sees when messages
//! to it were dropped. A node begins each topic with `AllBlocksCleared` and the held chunks. It begins every topic again whenever
//! the publisher has lost track of changes.
//!
//! A node itself knows only the names of chunks. If it is configured to publish tokens, and engines describe a chunk
//! ([`crate::described`]), the chunk's event has everything: the hash of each block, tokens, parent, LoRA adapter and extra keys.
//! A chunk that is described late is published then. Every chunk is published after its parent. Without tokens, an event has one
//! hash for each chunk, and `block_size` is the size of a chunk.
//!
//! A second socket, if it is configured ([`replay`]), sends old messages again, and snapshots of the held chunks. A snapshot has
//! the number of the last message that it includes.

mod publisher;
mod replay;
mod told;
mod zmtp;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use actix::Addr;
use bytes::Bytes;
use futures_util::future::select_all;
use larder_core::store::{Change, ChangeKind};
use larder_protocol::Fingerprint;
use serde::Serialize as _;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::yield_now;

use self::publisher::Publisher;
use self::replay::{Ask, Old, Part, Replay};
use self::told::{CHUNKS_AT_ONCE, Event, Told, tell, tell_late};
use crate::actor::{GpuActor, ask};
use crate::clock::now_us;
use crate::config::{EventHashes, EventTokens, KvEventsConfig};
use crate::described::{DescribedChunk, Descriptions, Name};
use crate::events::{Batch, Feed, PAGE_CHUNKS};

/// Publishes events until it is dropped.
pub(crate) struct KvEvents {
    publisher: Publisher,
    replay: Option<Replay>,
    node: String,
    topic: String,
    hashes: EventHashes,
    descriptions: Descriptions,
    /// The known facts of each namespace.
    namespaces: HashMap<Fingerprint, Arc<NamespaceTopic>>,
    /// The number of the next message, by topic.
    numbers: HashMap<String, u64>,
    /// The first number of a topic that begins: higher than any number of a topic that ended, or of an earlier life of the node,
    /// which may be the same topic.
    first_number: u64,
    told: Told,
}

/// Facts of a namespace.
#[derive(Debug)]
struct NamespaceTopic {
    topic: String,
    tenant: Arc<str>,
    chunk_tokens: u32,
}

/// The addresses of a publisher's sockets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    /// For subscribers.
    pub(crate) listen: SocketAddr,
    /// For requests for old messages.
    pub(crate) replay: Option<SocketAddr>,
}

/// Why the publisher woke up.
enum Woken {
    Changed(u16, Result<Arc<Batch>, RecvError>),
    Described(Vec<Name>),
    Asked(Ask),
}

impl NamespaceTopic {
    /// The description of a chunk, if it has the tokens of a chunk of this namespace.
    fn described(&self, descriptions: &Descriptions, name: &Name) -> Option<Arc<DescribedChunk>> {
        descriptions.get(name).filter(|one| one.chunk.tokens.len() == self.chunk_tokens as usize)
    }
}

impl KvEvents {
    /// Listens on the configured addresses. The node's name is part of topics.
    ///
    /// # Errors
    /// The system's error, with the address that cannot be used.
    pub(crate) async fn bind(
        config: &KvEventsConfig,
        node: &str,
        descriptions: Descriptions,
    ) -> Result<(Self, Bound), (SocketAddr, io::Error)> {
        let KvEventsConfig { listen, topic, hashes, replay_listen, replay_messages, tokens } = config.clone();
        let (publisher, bound) = Publisher::bind(listen).await.map_err(|error| (listen, error))?;
        let replay = match replay_listen {
            Some(at) => Some(Replay::bind(at, replay_messages).await.map_err(|error| (at, error))?),
            None => None,
        };
        let bound = Bound { listen: bound, replay: replay.as_ref().map(Replay::address) };
        let events = Self {
            publisher,
            replay,
            node: node.to_owned(),
            topic,
            hashes,
            descriptions,
            namespaces: HashMap::new(),
            numbers: HashMap::new(),
            first_number: now_us(),
            told: Told::new(tokens != EventTokens::Off),
        };
        Ok((events, bound))
    }

    /// Publishes these actors' chunks, then their changes.
    pub(crate) async fn publish(mut self, actors: Vec<(Feed, Addr<GpuActor>)>) {
        let mut live: Vec<Receiver<Arc<Batch>>> = actors.iter().map(|(feed, _)| feed.subscribe()).collect();
        self.publish_all(&actors).await;
        // The feeds are in the order of the devices.
        loop {
            match self.wait(&mut live).await {
                Woken::Changed(_, Err(RecvError::Lagged(_))) => {
                    // After one stall the feeds of all devices have lost changes. All chunks are published once, not once for each.
                    live.iter_mut().for_each(|feed| *feed = feed.resubscribe());
                    self.publish_all(&actors).await;
                }
                Woken::Changed(_, Ok(batch)) if batch.is_restart => self.publish_all(&actors).await,
                Woken::Changed(device, Ok(batch)) => {
                    self.publish_changes(device, &actors, &batch.changes).await;
                }
                Woken::Changed(_, Err(RecvError::Closed)) => return,
                Woken::Described(names) => self.publish_described(&names),
                Woken::Asked(ask) if ask.answer.is_closed() => {}
                Woken::Asked(ask) => {
                    // An error: the asker is gone.
                    let _ = ask.answer.send(self.snapshot(&ask.topic, actors.len()).await);
                }
            }
        }
    }

    async fn wait(&mut self, live: &mut [Receiver<Arc<Batch>>]) -> Woken {
        let Self { replay, descriptions, .. } = self;
        let waiting = live.iter_mut().map(|receiver| Box::pin(receiver.recv()));
        let asked = async {
            match replay {
                Some(replay) => replay.asked().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            (batch, device, _) = select_all(waiting) => Woken::Changed(device as u16, batch),
            names = descriptions.fresh() => Woken::Described(names),
            ask = asked => Woken::Asked(ask),
        }
    }

    /// Begins every topic anew, with the held chunks.
    async fn publish_all(&mut self, actors: &[(Feed, Addr<GpuActor>)]) {
        self.told.clear();
        for topic in self.numbers.keys().cloned().collect::<Vec<_>>() {
            self.clear(&topic, actors.len());
        }
        for (device, (_, actor)) in (0..).zip(actors) {
            let mut from = Some(0);
            while let Some(position) = from {
                let page =
                    actor.send(ask(move |actor| actor.core.store().held_from(position, PAGE_CHUNKS))).await;
                let Ok(Some((chunks, next))) = page else { return };
                let gained = |&(fingerprint, chunk)| Change {
                    kind: ChangeKind::Gained,
                    fingerprint,
                    chunk,
                    evicted: None,
                };
                let changes: Vec<Change> = chunks.iter().map(gained).collect();
                self.publish_changes(device, actors, &changes).await;
                from = next;
            }
        }
    }

    /// Publishes changes: separate messages for each run of changes in one namespace.
    async fn publish_changes(&mut self, device: u16, actors: &[(Feed, Addr<GpuActor>)], changes: &[Change]) {
        for run in changes.chunk_by(|one, other| one.fingerprint == other.fingerprint) {
            let Some(known) = self.known(actors, run[0].fingerprint).await else { continue };
            if !self.numbers.contains_key(&known.topic) {
                self.clear(&known.topic, actors.len());
            }
            let described = |hash| {
                let (tenant, fingerprint) = (Arc::clone(&known.tenant), run[0].fingerprint);
                known.described(&self.descriptions, &Name { tenant, fingerprint, hash })
            };
            let events = tell(&mut self.told, device, run, known.chunk_tokens, described);
            self.send(&known.topic, device, &events);
        }
    }

    /// Publishes held chunks that waited for their tokens.
    fn publish_described(&mut self, names: &[Name]) {
        for name in names {
            let Some(known) = self.namespaces.get(&name.fingerprint).cloned() else { continue };
            if known.tenant != name.tenant {
                continue;
            }
            let Some(chunk) = known.described(&self.descriptions, name) else { continue };
            for device in self.told.waiting(name.fingerprint, name.hash) {
                let events = tell_late(&mut self.told, device, name, &chunk);
                self.send(&known.topic, device, &events);
            }
        }
    }

    /// The held chunks of all topics that begin with `topic`, as messages with the number of each topic's last message. They are
    /// encoded one by one as the asker takes them: encoded, the chunks take many times the memory.
    async fn snapshot(&self, topic: &[u8], devices: usize) -> Vec<Part> {
        let wanted = |fingerprint: &Fingerprint| {
            let known = self.namespaces.get(fingerprint);
            known.filter(|known| known.topic.as_bytes().starts_with(topic))
        };
        let mut held: HashMap<(&str, u16), Vec<Event>> = HashMap::new();
        let events =
            self.told.events(|fingerprint| wanted(fingerprint).map(|known| known.chunk_tokens)).await;
        for ((fingerprint, device), events) in events {
            if let Some(known) = wanted(&fingerprint) {
                held.entry((&known.topic, device)).or_default().extend(events);
            }
        }
        let mut snapshot = Vec::new();
        for (topic, next) in self.numbers.iter().filter(|(name, _)| name.as_bytes().starts_with(topic)) {
            for device in 0..devices as u16 {
                let mut events = vec![Event::AllBlocksCleared {}];
                events.extend(held.remove(&(topic.as_str(), device)).unwrap_or_default());
                let (topic, hashes) = (Bytes::copy_from_slice(topic.as_bytes()), self.hashes);
                snapshot.push(Part { topic, number: next.saturating_sub(1), device, hashes, events });
            }
        }
        snapshot
    }

    /// Begins a topic anew, for every GPU.
    fn clear(&mut self, topic: &str, devices: usize) {
        for device in 0..devices as u16 {
            self.send(topic, device, &[Event::AllBlocksCleared {}]);
        }
    }

    /// The actors' facts of a namespace.
    async fn known(
        &mut self,
        actors: &[(Feed, Addr<GpuActor>)],
        fingerprint: Fingerprint,
    ) -> Option<Arc<NamespaceTopic>> {
        if !self.namespaces.contains_key(&fingerprint) {
            // Namespaces that no actor knows any more are forgotten, so this map never has more than the actors know.
            let before = std::mem::take(&mut self.namespaces);
            for (_, actor) in actors {
                for facts in actor
                    .send(ask(|actor| actor.core.store().namespaces().collect::<Vec<_>>()))
                    .await
                    .ok()??
                {
                    let topic = self.topic.replace("{node}", &self.node);
                    let topic = topic.replace("{tenant}", &facts.tenant).replace("{model}", &facts.model);
                    let known = NamespaceTopic {
                        topic,
                        tenant: facts.tenant.as_str().into(),
                        chunk_tokens: facts.chunk_tokens,
                    };
                    self.namespaces.insert(facts.fingerprint, Arc::new(known));
                }
            }
            self.forget(&before, actors.len()).await;
        }
        self.namespaces.get(&fingerprint).cloned()
    }

    /// Publishes the loss of all chunks in namespaces that are known no more: losses that still come are not published. Ends the
    /// topics that have no namespace any more. Other tasks run in between.
    async fn forget(&mut self, before: &HashMap<Fingerprint, Arc<NamespaceTopic>>, devices: usize) {
        for (&fingerprint, gone) in before {
            if self.namespaces.contains_key(&fingerprint) {
                continue;
            }
            for device in 0..devices as u16 {
                // The last chunks of prompts go first.
                let mut left = self.told.held(device, fingerprint).await.into_values().rev().flatten();
                loop {
                    let lost = |chunk| Change { kind: ChangeKind::Lost, fingerprint, chunk, evicted: None };
                    let lost: Vec<Change> = left.by_ref().take(CHUNKS_AT_ONCE).map(lost).collect();
                    if lost.is_empty() {
                        break;
                    }
                    let events = tell(&mut self.told, device, &lost, gone.chunk_tokens, |_| None);
                    self.send(&gone.topic, device, &events);
                    yield_now().await;
                }
            }
        }
        let topics: HashSet<&String> = self.namespaces.values().map(|known| &known.topic).collect();
        let gone: Vec<String> =
            self.numbers.keys().filter(|topic| !topics.contains(topic)).cloned().collect();
        for topic in gone {
            self.clear(&topic, devices);
            let next = self.numbers.remove(&topic).unwrap_or_default();
            self.first_number = self.first_number.max(next);
        }
        self.told.keep(|fingerprint| self.namespaces.contains_key(fingerprint));
    }

    /// Sends events of one GPU, in as many messages as they take.
    fn send(&mut self, topic: &str, device: u16, events: &[Event]) {
        for part in in_messages(events) {
            let payload = encode(self.hashes, device, part);
            let number = self.numbers.entry(topic.to_owned()).or_insert(self.first_number);
            let message = Old { topic: Bytes::copy_from_slice(topic.as_bytes()), number: *number, payload };
            *number += 1;
            self.publisher.send([topic.as_bytes(), &message.number.to_be_bytes(), &message.payload]);
            if let Some(replay) = &self.replay {
                replay.keep(message);
            }
        }
    }
}

impl Part {
    /// The messages, each encoded when it is taken.
    fn messages(&self) -> impl Iterator<Item = Old> {
        in_messages(&self.events).map(move |events| Old {
            topic: self.topic.clone(),
            number: self.number,
            payload: encode(self.hashes, self.device, events),
        })
    }
}

/// Splits events into those of each message.
fn in_messages(mut events: &[Event]) -> impl Iterator<Item = &[Event]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |event: &&Event| {
            let is_first = bytes == 0;
            bytes += event.bytes();
            is_first || bytes <= MESSAGE_BYTES
        };
        let (message, rest) = events.split_at(events.iter().take(MOST_EVENTS).take_while(fits).count());
        events = rest;
        (!message.is_empty()).then_some(message)
    })
}

fn encode(hashes: EventHashes, device: u16, events: &[Event]) -> Bytes {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let mut payload = Vec::with_capacity(64 + 16 * events.len());
    let mut serializer = rmp_serde::Serializer::new(&mut payload).with_struct_map();
    let events: Vec<_> = events.iter().map(|event| event.told(hashes)).collect();
    if let Err(error) = (seconds, events, device).serialize(&mut serializer) {
        tracing::error!(%error, "an event cannot be encoded");
    }
    payload.into()
}

/// Maximum number of events of one message.
const MOST_EVENTS: usize = 64;

/// Maximum bytes of the events of one message, if it has several. For subscribers that are behind,
/// [`WAITING_MESSAGES`](publisher::WAITING_MESSAGES) such messages are kept: about 64 MiB.
const MESSAGE_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::BytesMut;
    use larder_protocol::describe::{Describe, Described};
    use larder_protocol::{ChunkHash, ChunkRef};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::publisher::WAITING_MESSAGES;
    use super::*;

    #[test]
    fn the_messages_that_wait_for_subscribers_take_at_most_64_mib() {
        let descriptions = Descriptions::kept(1 << 30);
        let (tenant, fingerprint) = ("t".into(), Fingerprint([9; 32]));
        let hash = |number| ChunkHash([number; 32]);
        let described = |number| Described {
            blocks: vec![hash(number)],
            parent: None,
            tokens: vec![40_000; 2_048],
            lora_id: None,
            lora_name: None,
            extra_keys: String::new(),
        };
        let chunks = (0..100).map(described).collect();
        assert!(descriptions.describe(&tenant, Describe { fingerprint, chunks }));
        let event = |number| {
            let name = Name { tenant: tenant.clone(), fingerprint, hash: hash(number) };
            Event::Described(descriptions.get(&name).unwrap())
        };
        let events: Vec<Event> = (0..100).map(event).collect();
        waiting_messages_fit(&events);
    }

    fn waiting_messages_fit(events: &[Event]) {
        let longest = in_messages(events).map(|events| encode(EventHashes::Bytes, 0, events).len()).max();
        assert!(WAITING_MESSAGES * longest.unwrap() <= 64 << 20, "{longest:?}");
    }

    #[test]
    fn many_chunks_that_come_or_go_together_take_several_messages() {
        let hash = |number: u32| ChunkHash(std::array::from_fn(|at| number.to_be_bytes()[at % 4]));
        let chunk = |number| ChunkRef {
            hash: hash(number),
            parent: hash(number.saturating_sub(1)),
            index: number,
            anchor: hash(0),
        };
        let mut told = Told::new(false);
        for kind in [ChangeKind::Gained, ChangeKind::Lost] {
            let change = |number| Change {
                kind,
                fingerprint: Fingerprint([9; 32]),
                chunk: chunk(number),
                evicted: None,
            };
            let changes: Vec<Change> = (0..10_000).map(change).collect();
            let events = tell(&mut told, 0, &changes, 16, |_| None);
            waiting_messages_fit(&events);
            assert_eq!(events.iter().map(Event::bytes).sum::<usize>(), 10_000 * 34, "none is left out");
        }
    }

    /// Reads from a subscription up to the end of these bytes.
    async fn read_until(subscriber: &mut TcpStream, wanted: &[u8]) {
        let mut read = Vec::new();
        while !read.ends_with(wanted) {
            read.push(subscriber.read_u8().await.unwrap());
        }
    }

    #[test]
    fn subscribers_hear_that_the_chunks_of_namespaces_that_are_gone_are_lost() {
        actix_rt::System::new().block_on(async {
            let config: KvEventsConfig = toml::from_str("listen = \"127.0.0.1:0\"").unwrap();
            let (mut events, bound) = KvEvents::bind(&config, "node-0", Descriptions::kept(0)).await.unwrap();
            let mut subscriber = TcpStream::connect(bound.listen).await.unwrap();
            let (mut reader, mut writer) = subscriber.split();
            zmtp::greet(&mut reader, &mut writer, &mut BytesMut::new(), "SUB").await.unwrap();
            writer.write_all(b"\0\x01\x01").await.unwrap();
            let until_subscribed = Duration::from_millis(10);
            while timeout(until_subscribed, read_until(&mut subscriber, b"BlockStored")).await.is_err() {
                let hashes = vec![ChunkHash([1; 32])];
                let stored = Event::Stored { hashes, parent: None, chunk_tokens: 16 };
                events.send("kv@both", 0, &[stored]);
            }

            let topic = |topic: &str| {
                Arc::new(NamespaceTopic { topic: topic.into(), tenant: "t".into(), chunk_tokens: 16 })
            };
            let [gone, stays, alone] = [1, 2, 3].map(|number| Fingerprint([number; 32]));
            let (both, single) = (topic("kv@both"), topic("kv@alone"));
            let before =
                HashMap::from([(gone, Arc::clone(&both)), (stays, Arc::clone(&both)), (alone, single)]);
            events.namespaces = HashMap::from([(stays, both)]);
            let chunk = ChunkRef {
                hash: ChunkHash([1; 32]),
                parent: ChunkHash([0; 32]),
                index: 0,
                anchor: ChunkHash([1; 32]),
            };
            let gained = Change { kind: ChangeKind::Gained, fingerprint: gone, chunk, evicted: None };
            tell(&mut events.told, 0, &[gained], 16, |_| None);
            events.send("kv@alone", 0, &[Event::AllBlocksCleared {}]);
            read_until(&mut subscriber, b"AllBlocksCleared").await;

            events.forget(&before, 1).await;
            let heard = async {
                read_until(&mut subscriber, b"BlockRemoved").await;
                read_until(&mut subscriber, b"AllBlocksCleared").await;
            };
            assert!(timeout(Duration::from_secs(10), heard).await.is_ok(), "they are not told");
            assert_eq!(events.numbers.keys().collect::<Vec<_>>(), ["kv@both"]);
        });
    }

    #[test]
    fn a_later_life_of_the_node_has_no_number_of_an_earlier_life() {
        actix_rt::System::new().block_on(async {
            let config: KvEventsConfig = toml::from_str("listen = \"127.0.0.1:0\"").unwrap();
            let mut last = None;
            for _ in 0..2 {
                let (mut events, _) = KvEvents::bind(&config, "node-0", Descriptions::kept(0)).await.unwrap();
                events.clear("kv@topic", 1);
                assert!(last < Some(events.numbers["kv@topic"] - 1), "a number that was used");
                (0..7).for_each(|_| events.clear("kv@topic", 1));
                last = Some(events.numbers["kv@topic"] - 1);
                tokio::time::sleep(Duration::from_millis(1)).await;
                assert!(
                    i64::try_from(last.unwrap()).is_ok(),
                    "the negative numbers of requests mean something else"
                );
            }
        });
    }

    #[test]
    fn a_topic_that_ended_and_comes_again_has_no_number_twice() {
        actix_rt::System::new().block_on(async {
            let config: KvEventsConfig = toml::from_str("listen = \"127.0.0.1:0\"").unwrap();
            let (mut events, _) = KvEvents::bind(&config, "node-0", Descriptions::kept(0)).await.unwrap();
            (0..7).for_each(|_| events.clear("kv@long", 1));
            (0..3).for_each(|_| events.clear("kv@short", 1));
            let last = events.numbers["kv@long"] - 1;
            events.forget(&HashMap::new(), 1).await;
            assert!(events.numbers.is_empty());
            let next = |events: &mut KvEvents, topic: &str| {
                events.clear(topic, 1);
                events.numbers[topic] - 1
            };
            let again = next(&mut events, "kv@long");
            assert!(again > last && next(&mut events, "kv@short") > last);
            assert_eq!(next(&mut events, "kv@long"), again + 1, "and has no gap");
        });
    }
}
