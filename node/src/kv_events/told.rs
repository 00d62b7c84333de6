//! Tracks the chunks that subscribers were told of, and makes the events for changes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use larder_core::store::{Change, ChangeKind};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};
use serde::{Serialize, Serializer};
use serde_json::Value;
use tokio::task::yield_now;

use crate::config::EventHashes;
use crate::described::{DescribedChunk, Name};

/// The held chunks, and which of them subscribers were told of. If events include tokens, a chunk waits for two things: its
/// tokens, since a router may end its subscription at an event without tokens, and its parent, since a router drops a block whose
/// parent it does not know.
#[derive(Debug)]
pub(super) struct Told {
    chunks: HashMap<(Fingerprint, ChunkHash), Vec<Holding>>,
    /// Described chunks that wait for their parents, by parent and GPU.
    orphans: HashMap<(Fingerprint, ChunkHash, u16), Vec<ChunkHash>>,
    tells_tokens: bool,
}

/// A GPU's chunk.
#[derive(Debug)]
struct Holding {
    device: u16,
    chunk: ChunkRef,
    described: Option<Arc<DescribedChunk>>,
    /// Whether subscribers were told of the chunk with its description.
    is_told: bool,
}

/// An event for subscribers.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    /// Consecutive chunks, by their names.
    Stored { hashes: Vec<ChunkHash>, parent: Option<ChunkHash>, chunk_tokens: u32 },
    /// A chunk, engine block by engine block.
    Described(Arc<DescribedChunk>),
    /// Hashes of chunks or blocks that the GPU no longer holds.
    Removed { hashes: Vec<ChunkHash> },
    /// The GPU holds nothing.
    AllBlocksCleared {},
}

/// An event as it is written, in vLLM's format.
#[derive(Serialize)]
#[serde(tag = "type")]
pub(super) enum Written<'a> {
    BlockStored {
        block_hashes: Vec<Hash>,
        parent_block_hash: Option<Hash>,
        token_ids: &'a [u32],
        block_size: u32,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        extra_keys: Option<ExtraKeys<'a>>,
        locality: &'static str,
        ownership: &'static str,
    },
    BlockRemoved {
        block_hashes: Vec<Hash>,
        medium: &'static str,
        locality: &'static str,
        ownership: &'static str,
    },
    AllBlocksCleared {},
}

/// Extra keys as JSON. They are parsed only while they are written: parsed, they take up to 90 times their bytes.
#[derive(Clone, Copy)]
pub(super) struct ExtraKeys<'a>(&'a str);

/// A hash in the form in which engines publish it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hash {
    /// The hash's last 64 bits, as a number.
    Int(u64),
    /// The whole hash.
    Bytes([u8; 32]),
}

impl Told {
    /// Starts without held chunks.
    pub(super) fn new(tells_tokens: bool) -> Self {
        Self { chunks: HashMap::new(), orphans: HashMap::new(), tells_tokens }
    }

    /// Forgets everything that was told.
    pub(super) fn clear(&mut self) {
        self.chunks.clear();
        self.orphans.clear();
    }

    /// Forgets the namespaces for which `is_kept` is false.
    pub(super) fn keep(&mut self, is_kept: impl Fn(&Fingerprint) -> bool) {
        self.chunks.retain(|(fingerprint, _), _| is_kept(fingerprint));
        self.orphans.retain(|(fingerprint, ..), _| is_kept(fingerprint));
    }

    /// The chunks that a GPU holds in a namespace, by position. Other tasks run in between.
    pub(super) async fn held(&self, device: u16, of: Fingerprint) -> BTreeMap<u32, Vec<ChunkRef>> {
        let mut held: BTreeMap<u32, Vec<ChunkRef>> = BTreeMap::new();
        for (number, ((fingerprint, _), holdings)) in self.chunks.iter().enumerate() {
            if number % CHUNKS_AT_ONCE == 0 {
                yield_now().await;
            }
            let here = holdings.iter().find(|one| *fingerprint == of && one.device == device);
            here.into_iter().for_each(|one| held.entry(one.chunk.index).or_default().push(one.chunk));
        }
        held
    }

    /// The GPUs where a chunk is held and waits for its tokens.
    pub(super) fn waiting(&self, fingerprint: Fingerprint, hash: ChunkHash) -> Vec<u16> {
        let held = self.chunks.get(&(fingerprint, hash)).into_iter().flatten();
        held.filter(|holding| holding.described.is_none()).map(|holding| holding.device).collect()
    }

    /// Events for all held chunks, parents first, by namespace and GPU, in the namespaces for which `chunk_tokens` returns the
    /// tokens of a chunk. Other tasks run in between: a node may hold millions of chunks.
    pub(super) async fn events(
        &self,
        chunk_tokens: impl Fn(&Fingerprint) -> Option<u32>,
    ) -> BTreeMap<(Fingerprint, u16), Vec<Event>> {
        // By position, so that nothing has to be sorted in one go.
        let mut held: BTreeMap<(Fingerprint, u16), BTreeMap<u32, Vec<&Holding>>> = BTreeMap::new();
        for (number, ((fingerprint, _), holdings)) in self.chunks.iter().enumerate() {
            if number % CHUNKS_AT_ONCE == 0 {
                yield_now().await;
            }
            if chunk_tokens(fingerprint).is_some() {
                for one in holdings {
                    let held = held.entry((*fingerprint, one.device)).or_default();
                    held.entry(one.chunk.index).or_default().push(one);
                }
            }
        }
        let mut events = BTreeMap::new();
        for ((fingerprint, device), held) in held {
            let tokens = chunk_tokens(&fingerprint).unwrap_or_default();
            events.insert((fingerprint, device), self.events_of(held, tokens).await);
        }
        events
    }

    /// Events for chunks of one namespace that one GPU holds, by position.
    async fn events_of(&self, held: BTreeMap<u32, Vec<&Holding>>, chunk_tokens: u32) -> Vec<Event> {
        let (mut events, mut known) = (Vec::new(), HashSet::<ChunkHash>::new());
        for (number, one) in held.into_values().flatten().enumerate() {
            if number % CHUNKS_AT_ONCE == 0 {
                yield_now().await;
            }
            if !self.tells_tokens {
                events.push(Event::bare(&one.chunk, chunk_tokens));
            } else if let Some(described) = &one.described
                && one.parent().is_none_or(|parent| known.contains(&parent))
            {
                known.insert(one.chunk.hash);
                events.push(Event::Described(Arc::clone(described)));
            }
        }
        events
    }

    fn gain(
        &mut self,
        device: u16,
        fingerprint: Fingerprint,
        chunk: ChunkRef,
        described: Option<Arc<DescribedChunk>>,
    ) {
        let holdings = self.chunks.entry((fingerprint, chunk.hash)).or_default();
        holdings.retain(|one| one.device != device);
        holdings.push(Holding { device, chunk, described, is_told: false });
    }

    /// Tells of a GPU's described chunk and of the chunks that waited for it. If its parent was not told, the chunk waits for the
    /// parent.
    fn tell_described(&mut self, device: u16, fingerprint: Fingerprint, hash: ChunkHash) -> Vec<Event> {
        let mut events = Vec::new();
        let mut coming = vec![hash];
        while let Some(hash) = coming.pop() {
            let Some(holding) = self.holding(device, fingerprint, hash) else { continue };
            let (Some(described), parent) = (holding.described.clone(), holding.parent()) else { continue };
            if let Some(parent) = parent
                && !self.holding(device, fingerprint, parent).is_some_and(|parent| parent.is_told)
            {
                let orphans = self.orphans.entry((fingerprint, parent, device)).or_default();
                if !orphans.contains(&hash) {
                    orphans.push(hash);
                }
                continue;
            }
            if let Some(holding) = self.holding(device, fingerprint, hash) {
                holding.is_told = true;
            }
            events.push(Event::Described(described));
            coming.extend(self.orphans.remove(&(fingerprint, hash, device)).unwrap_or_default());
        }
        events
    }

    fn holding(&mut self, device: u16, fingerprint: Fingerprint, hash: ChunkHash) -> Option<&mut Holding> {
        self.chunks.get_mut(&(fingerprint, hash))?.iter_mut().find(|one| one.device == device)
    }

    /// Forgets a chunk that a GPU lost, and returns the hashes under which subscribers know it; none if it was not told.
    fn lose(&mut self, device: u16, fingerprint: Fingerprint, hash: ChunkHash) -> Vec<ChunkHash> {
        let mut lost = None;
        if let Some(holdings) = self.chunks.get_mut(&(fingerprint, hash)) {
            lost = holdings.iter().position(|one| one.device == device).map(|at| holdings.swap_remove(at));
            if holdings.is_empty() {
                self.chunks.remove(&(fingerprint, hash));
            }
        }
        let Some(Holding { described: Some(described), is_told, chunk, .. }) = lost else {
            return if self.tells_tokens { Vec::new() } else { vec![hash] };
        };
        if is_told {
            return described.chunk.blocks.clone();
        }
        let parent = (fingerprint, chunk.parent, device);
        if let Some(orphans) = self.orphans.get_mut(&parent) {
            orphans.retain(|one| *one != hash);
            if orphans.is_empty() {
                self.orphans.remove(&parent);
            }
        }
        Vec::new()
    }
}

impl Holding {
    /// The chunk before this chunk. `None` for a prompt's first chunk: its parent is the namespace, which is no block.
    fn parent(&self) -> Option<ChunkHash> {
        (self.chunk.index > 0).then_some(self.chunk.parent)
    }
}

/// Turns changes of one namespace at a GPU into events. Consecutive chunks without tokens share an event, up to a number of them.
pub(super) fn tell(
    told: &mut Told,
    device: u16,
    changes: &[Change],
    chunk_tokens: u32,
    described: impl Fn(ChunkHash) -> Option<Arc<DescribedChunk>>,
) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    for run in changes.chunk_by(|one, other| one.kind == other.kind) {
        // Parents come first and go last: a router drops a block whose parent it does not know.
        let mut run: Vec<&Change> = run.iter().collect();
        run.sort_by_key(|change| change.chunk.index);
        if run[0].kind == ChangeKind::Lost {
            run.reverse();
        }
        for change in run {
            let (fingerprint, chunk) = (change.fingerprint, change.chunk);
            if change.kind == ChangeKind::Lost {
                let gone = told.lose(device, fingerprint, chunk.hash);
                match events.last_mut() {
                    Some(Event::Removed { hashes }) if hashes.len() < MOST_HASHES => hashes.extend(gone),
                    _ if gone.is_empty() => {}
                    _ => events.push(Event::Removed { hashes: gone }),
                }
                continue;
            }
            told.gain(device, fingerprint, chunk, described(chunk.hash));
            if told.tells_tokens {
                events.extend(told.tell_described(device, fingerprint, chunk.hash));
                continue;
            }
            match events.last_mut() {
                Some(Event::Stored { hashes, .. })
                    if hashes.last() == Some(&chunk.parent) && hashes.len() < MOST_HASHES =>
                {
                    hashes.push(chunk.hash);
                }
                _ => events.push(Event::bare(&chunk, chunk_tokens)),
            }
        }
    }
    events
}

/// The events for a held chunk that waited for its tokens, and for the chunks that waited for this chunk.
pub(super) fn tell_late(
    told: &mut Told,
    device: u16,
    name: &Name,
    described: &Arc<DescribedChunk>,
) -> Vec<Event> {
    let Some(holding) = told.holding(device, name.fingerprint, name.hash) else { return Vec::new() };
    holding.described = Some(Arc::clone(described));
    told.tell_described(device, name.fingerprint, name.hash)
}

impl Event {
    /// An event with only the chunk's name. It names no parent for a prompt's first chunk: the parent is the namespace, no block.
    fn bare(chunk: &ChunkRef, chunk_tokens: u32) -> Self {
        let parent = (chunk.index > 0).then_some(chunk.parent);
        Self::Stored { hashes: vec![chunk.hash], parent, chunk_tokens }
    }

    /// Bytes of the event, approximately.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Described(described) => described.bytes(),
            Self::Stored { hashes, .. } | Self::Removed { hashes } => HASH_BYTES * hashes.len(),
            Self::AllBlocksCleared {} => 0,
        }
    }

    /// The event in vLLM's format.
    pub(super) fn told(&self, form: EventHashes) -> Written<'_> {
        let all = |hashes: &[ChunkHash]| hashes.iter().map(|hash| Hash::of(hash, form)).collect();
        let one = |hash: &ChunkHash| Hash::of(hash, form);
        match self {
            Self::Stored { hashes, parent, chunk_tokens } => Written::BlockStored {
                block_hashes: all(hashes),
                parent_block_hash: parent.as_ref().map(one),
                token_ids: &[],
                block_size: *chunk_tokens,
                lora_id: None,
                medium: MEDIUM,
                lora_name: None,
                extra_keys: None,
                locality: LOCALITY,
                ownership: OWNER,
            },
            Self::Described(described) => Written::BlockStored {
                block_hashes: all(&described.chunk.blocks),
                parent_block_hash: described.chunk.parent.as_ref().map(one),
                token_ids: &described.chunk.tokens,
                block_size: described.chunk.block_tokens() as u32,
                lora_id: described.chunk.lora_id,
                medium: MEDIUM,
                lora_name: described.chunk.lora_name.as_deref(),
                extra_keys: Some(ExtraKeys(&described.chunk.extra_keys)).filter(|keys| !keys.0.is_empty()),
                locality: LOCALITY,
                ownership: OWNER,
            },
            Self::Removed { hashes } => Written::BlockRemoved {
                block_hashes: all(hashes),
                medium: MEDIUM,
                locality: LOCALITY,
                ownership: OWNER,
            },
            Self::AllBlocksCleared {} => Written::AllBlocksCleared {},
        }
    }
}

impl Hash {
    fn of(hash: &ChunkHash, form: EventHashes) -> Self {
        match form {
            EventHashes::Int64 => Self::Int(hash.0.last_chunk().map_or(0, |tail| u64::from_be_bytes(*tail))),
            EventHashes::Bytes => Self::Bytes(hash.0),
        }
    }
}

impl Serialize for ExtraKeys<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serde_json::from_str::<Value>(self.0).map_err(serde::ser::Error::custom)?.serialize(serializer)
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

/// The place of chunks, in vLLM's words: in the memory of the host that publishes the event.
const MEDIUM: &str = "CPU";
const LOCALITY: &str = "LOCAL";

/// The owner of the chunks.
const OWNER: &str = "larder";

/// Chunks that are looked through before other tasks run.
pub(super) const CHUNKS_AT_ONCE: usize = 4_096;

/// An event with so many hashes gets no further one.
const MOST_HASHES: usize = 512;

/// Bytes of a hash in a message, in its longest form.
const HASH_BYTES: usize = 34;

#[cfg(test)]
mod tests {
    use larder_protocol::describe::{Describe, Described};

    use super::*;
    use crate::described::Descriptions;

    const SPACE: Fingerprint = Fingerprint([9; 32]);

    fn hash(byte: u8) -> ChunkHash {
        ChunkHash([byte; 32])
    }

    fn change(kind: ChangeKind, number: u8, parent: u8) -> Change {
        let chunk = ChunkRef {
            hash: hash(number),
            parent: hash(parent),
            index: u32::from(number) - 1,
            anchor: hash(1),
        };
        Change { kind, fingerprint: SPACE, chunk, evicted: None }
    }

    fn name(number: u8) -> Name {
        Name { tenant: "t".into(), fingerprint: SPACE, hash: hash(number) }
    }

    /// Descriptions of these chunks, each with two blocks of two tokens.
    fn descriptions(chunks: &[u8]) -> Descriptions {
        let descriptions = Descriptions::kept(0);
        let chunks = chunks.iter().map(|&number| Described {
            blocks: vec![hash(100 + number), hash(number)],
            parent: (number > 1).then(|| hash(number - 1)),
            tokens: vec![u32::from(number); 4],
            lora_id: None,
            lora_name: None,
            extra_keys: String::new(),
        });
        assert!(
            descriptions.describe(&"t".into(), Describe { fingerprint: SPACE, chunks: chunks.collect() })
        );
        descriptions
    }

    fn bare(hashes: &[u8], parent: Option<u8>) -> Event {
        Event::Stored {
            hashes: hashes.iter().copied().map(hash).collect(),
            parent: parent.map(hash),
            chunk_tokens: 256,
        }
    }

    fn removed(hashes: &[u8]) -> Event {
        Event::Removed { hashes: hashes.iter().copied().map(hash).collect() }
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
        let told = tell(&mut Told::new(false), 0, &changes, 256, |_| None);
        assert_eq!(told, [bare(&[1, 2], None), bare(&[4], Some(3)), removed(&[2, 1])]);
    }

    /// The events for all chunks that a GPU holds.
    fn held_by(told: &Told, device: u16, chunk_tokens: Option<u32>) -> Vec<Event> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let events = runtime.block_on(told.events(|_| chunk_tokens));
        events.into_iter().filter(|((_, of), _)| *of == device).flat_map(|(_, events)| events).collect()
    }

    #[test]
    fn a_described_chunk_is_told_and_removed_block_by_block() {
        let (descriptions, mut told) = (descriptions(&[1, 2]), Told::new(true));
        let described = |hash| descriptions.get(&Name { hash, ..name(1) });
        let gained = [
            change(ChangeKind::Gained, 1, 0),
            change(ChangeKind::Gained, 2, 1),
            change(ChangeKind::Gained, 3, 2),
        ];
        let events = tell(&mut told, 0, &gained, 256, described);
        let each = |number| Event::Described(descriptions.get(&name(number)).unwrap());
        assert_eq!(events, [each(1), each(2)], "the third waits for its tokens");
        let lost = [change(ChangeKind::Lost, 3, 2), change(ChangeKind::Lost, 2, 1)];
        assert_eq!(tell(&mut told, 0, &lost, 256, described), [removed(&[102, 2])]);
        assert_eq!(held_by(&told, 0, Some(256)), [each(1)]);
        assert_eq!(held_by(&told, 1, Some(256)), []);
        assert_eq!(held_by(&told, 0, None), []);
    }

    #[test]
    fn a_chunk_is_told_behind_its_parent_in_whatever_order_they_come() {
        let (descriptions, mut told) = (descriptions(&[1, 2, 3, 4]), Told::new(true));
        let mut say = |kind, number: u8| {
            let described = |hash| descriptions.get(&Name { hash, ..name(1) });
            tell(&mut told, 0, &[change(kind, number, number - 1)], 256, described)
        };
        let each = |number| Event::Described(descriptions.get(&name(number)).unwrap());
        for number in [4, 2, 3] {
            assert_eq!(say(ChangeKind::Gained, number), [], "a router would drop {number}");
        }
        assert_eq!(say(ChangeKind::Lost, 3), [], "it was not told");
        assert_eq!(say(ChangeKind::Gained, 1), [each(1), each(2)]);
        assert_eq!(say(ChangeKind::Gained, 3), [each(3), each(4)]);
        assert_eq!(say(ChangeKind::Lost, 2), [removed(&[102, 2])]);
        assert_eq!(held_by(&told, 0, Some(256)), [each(1)], "the others have no parent for who comes later");
        assert!(told.orphans.is_empty());
    }

    #[test]
    fn a_chunk_that_is_described_later_is_told_then_for_each_gpu_that_holds_it() {
        let mut told = Told::new(true);
        for device in [0, 1] {
            assert_eq!(tell(&mut told, device, &[change(ChangeKind::Gained, 1, 0)], 256, |_| None), []);
        }
        assert_eq!(tell(&mut told, 1, &[change(ChangeKind::Lost, 1, 0)], 256, |_| None), []);
        assert_eq!(told.waiting(SPACE, hash(1)), [0]);
        let described = descriptions(&[1]).get(&name(1)).unwrap();
        assert_eq!(tell_late(&mut told, 0, &name(1), &described), [Event::Described(described)]);
        assert!(told.waiting(SPACE, hash(1)).is_empty());
        assert_eq!(
            tell(&mut told, 0, &[change(ChangeKind::Lost, 1, 0)], 256, |_| None),
            [removed(&[101, 1])]
        );
    }

    #[test]
    fn a_hash_is_its_last_64_bits_or_all_of_it() {
        let hash = ChunkHash(std::array::from_fn(|i| i as u8));
        assert_eq!(Hash::of(&hash, EventHashes::Int64), Hash::Int(0x1819_1a1b_1c1d_1e1f));
        assert_eq!(Hash::of(&hash, EventHashes::Bytes), Hash::Bytes(hash.0));
    }
}
