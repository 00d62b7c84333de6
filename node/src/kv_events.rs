//! Publishes the node's gained and lost chunks as vLLM publishes its own, for routers that follow engines by them.
//!
//! A ZeroMQ PUB socket sends messages of three frames: topic, number, and a batch in MessagePack, `[seconds, [event, ...],
//! rank]`. The rank is the GPU's number, as an engine's data-parallel rank is. An event is a map with a `type`
//! (`vllm/distributed/kv_events.py` of vLLM 0.32). The numbers of a topic have no gaps, so that a slow subscriber, for which
//! messages are dropped, sees its loss. Nobody keeps old messages: a node begins each topic with `AllBlocksCleared` and its
//! contents, and does so again where it has lost track itself.
//!
//! Facts that a node cannot know stay empty: tokens and LoRA adapters. Hashes are those of chunks, and `block_size` is a
//! chunk's.

mod publisher;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use actix::Addr;
use futures_util::future::select_all;
use larder_core::store::{Change, ChangeKind};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};
use serde::{Serialize, Serializer};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use self::publisher::Publisher;
use crate::actor::{AskNamespaces, GpuActor};
use crate::config::{EventHashes, KvEventsConfig};
use crate::events::{AskPage, Batch, Feed};

/// Publishes; ends only when it is dropped.
pub(crate) struct KvEvents {
    publisher: Publisher,
    node: String,
    topic: String,
    hashes: EventHashes,
    /// The known facts of each namespace.
    namespaces: HashMap<Fingerprint, Arc<Known>>,
    /// The number of the next message, by topic.
    numbers: HashMap<String, u64>,
}

#[derive(Debug)]
struct Known {
    topic: String,
    chunk_tokens: u32,
}

/// The event of one message.
#[derive(Debug, Serialize)]
#[serde(tag = "type")]
enum Event {
    BlockStored {
        block_hashes: Vec<Hash>,
        parent_block_hash: Option<Hash>,
        token_ids: [u32; 0],
        block_size: u32,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'static str>,
    },
    BlockRemoved {
        block_hashes: Vec<Hash>,
        medium: &'static str,
    },
    AllBlocksCleared {},
}

/// A hash as subscribers have it from engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hash {
    /// Its last 64 bits, as a number.
    Int(u64),
    /// The whole hash.
    Bytes([u8; 32]),
}

impl KvEvents {
    /// Listens. The node's name is part of topics.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) async fn bind(config: &KvEventsConfig, node: &str) -> io::Result<(Self, SocketAddr)> {
        let KvEventsConfig { listen, topic, hashes } = config.clone();
        let (publisher, bound) = Publisher::bind(listen).await?;
        let (namespaces, numbers) = (HashMap::new(), HashMap::new());
        let events = Self { publisher, node: node.to_owned(), topic, hashes, namespaces, numbers };
        Ok((events, bound))
    }

    /// Publishes these actors' chunks, then their changes.
    pub(crate) async fn publish(mut self, actors: Vec<(Feed, Addr<GpuActor>)>) {
        let mut live: Vec<Receiver<Arc<Batch>>> = actors.iter().map(|(feed, _)| feed.subscribe()).collect();
        self.publish_all(&actors).await;
        // The order of the feeds is that of the devices.
        loop {
            let waiting = live.iter_mut().map(|receiver| Box::pin(receiver.recv()));
            let (batch, device, _) = select_all(waiting).await;
            match batch {
                Ok(batch) if batch.is_restart => self.publish_all(&actors).await,
                Ok(batch) => self.publish_changes(device as u16, &actors, &batch.changes).await,
                Err(RecvError::Lagged(_)) => self.publish_all(&actors).await,
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// Begins every topic anew, with the held chunks.
    async fn publish_all(&mut self, actors: &[(Feed, Addr<GpuActor>)]) {
        for topic in self.numbers.keys().cloned().collect::<Vec<_>>() {
            self.clear(&topic, actors.len());
        }
        for (device, (_, actor)) in (0..).zip(actors) {
            let mut from = Some(0);
            while let Some(position) = from {
                let Ok(page) = actor.send(AskPage { from: position }).await else { return };
                let gained = |&(fingerprint, chunk)| Change {
                    kind: ChangeKind::Gained,
                    fingerprint,
                    chunk,
                    evicted: None,
                };
                let changes: Vec<Change> = page.chunks.iter().map(gained).collect();
                self.publish_changes(device, actors, &changes).await;
                from = page.next;
            }
        }
    }

    /// A message for each run of changes in one namespace.
    async fn publish_changes(&mut self, device: u16, actors: &[(Feed, Addr<GpuActor>)], changes: &[Change]) {
        for run in changes.chunk_by(|one, other| one.fingerprint == other.fingerprint) {
            let Some(known) = self.known(actors, run[0].fingerprint).await else { continue };
            if !self.numbers.contains_key(&known.topic) {
                self.clear(&known.topic, actors.len());
            }
            self.send(&known.topic, device, &events(run, self.hashes, known.chunk_tokens));
        }
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
    ) -> Option<Arc<Known>> {
        if !self.namespaces.contains_key(&fingerprint) {
            // What has gone from all of them is forgotten, so that there are never more than they know.
            self.namespaces.clear();
            for (_, actor) in actors {
                for facts in actor.send(AskNamespaces).await.ok()? {
                    let topic = self.topic.replace("{node}", &self.node);
                    let topic = topic.replace("{tenant}", &facts.tenant).replace("{model}", &facts.model);
                    let known = Known { topic, chunk_tokens: facts.chunk_tokens };
                    self.namespaces.insert(facts.fingerprint, Arc::new(known));
                }
            }
            self.numbers.retain(|topic, _| self.namespaces.values().any(|known| known.topic == *topic));
        }
        self.namespaces.get(&fingerprint).cloned()
    }

    fn send(&mut self, topic: &str, device: u16, events: &[Event]) {
        let number = self.numbers.entry(topic.to_owned()).or_default();
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let mut payload = Vec::with_capacity(64 + 16 * events.len());
        let mut serializer = rmp_serde::Serializer::new(&mut payload).with_struct_map();
        let batch = (seconds, events, device);
        if let Err(error) = batch.serialize(&mut serializer) {
            tracing::error!(%error, "an event cannot be written");
            return;
        }
        self.publisher.send([topic.as_bytes(), &number.to_be_bytes(), &payload]);
        *number += 1;
    }
}

/// Changes of one namespace as events: chunks that follow each other are told together.
fn events(changes: &[Change], hashes: EventHashes, chunk_tokens: u32) -> Vec<Event> {
    let is_lost = |change: &Change| change.kind == ChangeKind::Lost;
    let follows = |one: &Change, other: &Change| {
        is_lost(one) == is_lost(other) && (is_lost(one) || other.chunk.parent == one.chunk.hash)
    };
    let told = changes.chunk_by(follows).map(|run| {
        let block_hashes = run.iter().map(|change| Hash::of(&change.chunk.hash, hashes)).collect();
        if is_lost(&run[0]) {
            return Event::BlockRemoved { block_hashes, medium: MEDIUM };
        }
        let ChunkRef { parent, index, .. } = run[0].chunk;
        Event::BlockStored {
            block_hashes,
            // The parent of a prompt's first chunk is the namespace, which is no block.
            parent_block_hash: (index > 0).then(|| Hash::of(&parent, hashes)),
            token_ids: [],
            block_size: chunk_tokens,
            lora_id: None,
            medium: MEDIUM,
            lora_name: None,
        }
    });
    told.collect()
}

impl Hash {
    fn of(hash: &ChunkHash, hashes: EventHashes) -> Self {
        match hashes {
            EventHashes::Int64 => Self::Int(hash.0.last_chunk().map_or(0, |tail| u64::from_be_bytes(*tail))),
            EventHashes::Bytes => Self::Bytes(hash.0),
        }
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Int(number) => serializer.serialize_u64(*number),
            Self::Bytes(bytes) => serializer.serialize_bytes(bytes),
        }
    }
}

/// The place of chunks, in vLLM's words.
const MEDIUM: &str = "CPU";

#[cfg(test)]
mod tests {
    use super::*;

    fn change(kind: ChangeKind, number: u8, parent: u8) -> Change {
        let chunk = ChunkRef {
            hash: ChunkHash([number; 32]),
            parent: ChunkHash([parent; 32]),
            index: u32::from(number) - 1,
            anchor: ChunkHash([1; 32]),
        };
        Change { kind, fingerprint: Fingerprint([9; 32]), chunk, evicted: None }
    }

    fn int(byte: u8) -> Hash {
        Hash::Int(u64::from_be_bytes([byte; 8]))
    }

    #[test]
    fn chunks_that_follow_each_other_are_one_event() {
        let changes = [
            change(ChangeKind::Gained, 1, 0),
            change(ChangeKind::Gained, 2, 1),
            change(ChangeKind::Gained, 4, 3),
            change(ChangeKind::Lost, 2, 1),
            change(ChangeKind::Lost, 1, 0),
        ];
        let told = events(&changes, EventHashes::Int64, 256);
        let [Event::BlockStored { .. }, Event::BlockStored { .. }, Event::BlockRemoved { .. }] = &told[..]
        else {
            panic!("{told:?}")
        };
        let Event::BlockStored { block_hashes, parent_block_hash, block_size, .. } = &told[0] else { return };
        assert_eq!((&block_hashes[..], *parent_block_hash, *block_size), (&[int(1), int(2)][..], None, 256));
        let Event::BlockStored { block_hashes, parent_block_hash, .. } = &told[1] else { return };
        assert_eq!((&block_hashes[..], *parent_block_hash), (&[int(4)][..], Some(int(3))));
        let Event::BlockRemoved { block_hashes, .. } = &told[2] else { return };
        assert_eq!(block_hashes[..], [int(2), int(1)]);
    }

    #[test]
    fn a_hash_is_its_last_64_bits_or_all_of_it() {
        let hash = ChunkHash(std::array::from_fn(|i| i as u8));
        assert_eq!(Hash::of(&hash, EventHashes::Int64), Hash::Int(0x1819_1a1b_1c1d_1e1f));
        assert_eq!(Hash::of(&hash, EventHashes::Bytes), Hash::Bytes(hash.0));
    }
}
