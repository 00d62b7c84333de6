//! Keeps engines' descriptions of chunks, with their tokens, for events.
//!
//! Memory is bounded. The longest unused description is forgotten first, except for those that somebody still uses: the publisher
//! of events keeps the descriptions of the chunks that it has told. If these leave no room, further descriptions are dropped.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_protocol::describe::{Describe, Described};
use larder_protocol::{ChunkHash, Fingerprint};
use serde_json::Value;
use tokio::sync::Notify;

/// The descriptions of chunks, by tenant. Cheap to clone. Keeps nothing if no events need descriptions.
#[derive(Debug, Clone, Default)]
pub struct Descriptions(Option<Arc<SharedDescriptions>>);

#[derive(Debug, Default)]
struct SharedDescriptions {
    known: Mutex<KnownDescriptions>,
    /// Bytes of all descriptions, also of those that are no longer in `known`.
    bytes: Arc<AtomicUsize>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct KnownDescriptions {
    by_name: HashMap<Name, Entry>,
    /// The names by last use, the longest unused first.
    turns: BTreeMap<u64, Name>,
    last_turn: u64,
    /// Bytes of all descriptions, also of those that are no longer in `by_name`.
    bytes: Arc<AtomicUsize>,
    most_bytes: usize,
    /// Names of the chunks that were described since the last [`Descriptions::fresh`].
    fresh: Vec<Name>,
}

#[derive(Debug)]
struct Entry {
    turn: u64,
    chunk: Arc<DescribedChunk>,
}

/// A chunk of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Name {
    pub(crate) tenant: Arc<str>,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) hash: ChunkHash,
}

/// A chunk's description, engine block by engine block. Its extra keys are a list in JSON with an entry for each block.
#[derive(Debug)]
pub(crate) struct DescribedChunk {
    pub(crate) chunk: Described,
    /// Bytes of all descriptions; this one counts until it is dropped.
    all_bytes: Arc<AtomicUsize>,
}

impl DescribedChunk {
    /// Reads an engine's description; `None` if it is not sound.
    fn new(chunk: Described, all_bytes: &Arc<AtomicUsize>) -> Option<Self> {
        let extra_keys = || serde_json::from_str::<Vec<Value>>(&chunk.extra_keys);
        if !chunk.is_sound()
            || !(chunk.extra_keys.is_empty()
                || extra_keys().is_ok_and(|keys| keys.len() == chunk.blocks.len()))
        {
            return None;
        }
        let described = Self { chunk, all_bytes: Arc::clone(all_bytes) };
        all_bytes.fetch_add(described.bytes(), Ordering::Relaxed);
        Some(described)
    }

    /// Bytes of memory, approximately.
    pub(crate) fn bytes(&self) -> usize {
        let Described { blocks, tokens, lora_name, extra_keys, .. } = &self.chunk;
        let name = lora_name.as_ref().map_or(0, String::len);
        ENTRY_BYTES + 32 * blocks.len() + 4 * tokens.len() + name + extra_keys.len()
    }
}

impl PartialEq for DescribedChunk {
    fn eq(&self, other: &Self) -> bool {
        self.chunk == other.chunk
    }
}

impl Drop for DescribedChunk {
    fn drop(&mut self) {
        self.all_bytes.fetch_sub(self.bytes(), Ordering::Relaxed);
    }
}

impl Descriptions {
    /// Creates descriptions that are kept, for a node with this much memory for chunks.
    pub(crate) fn kept(arena_bytes: u64) -> Self {
        let most_bytes = FEWEST_BYTES + (arena_bytes / ARENA_SHARE) as usize;
        let bytes = Arc::<AtomicUsize>::default();
        let known =
            KnownDescriptions { bytes: Arc::clone(&bytes), most_bytes, ..KnownDescriptions::default() };
        Self(Some(Arc::new(SharedDescriptions { known: Mutex::new(known), bytes, changed: Notify::new() })))
    }

    /// Keeps an engine's description of a tenant's chunks; false if a chunk's description is not sound.
    pub(crate) fn describe(&self, tenant: &Arc<str>, said: Describe) -> bool {
        let Some(shared) = &self.0 else { return true };
        let named = |chunk: Described| {
            let name =
                Name { tenant: Arc::clone(tenant), fingerprint: said.fingerprint, hash: chunk.name()? };
            Some((name, DescribedChunk::new(chunk, &shared.bytes)?))
        };
        // Reading a description may take long, so the lock is taken for each.
        for chunk in said.chunks {
            let Some((name, chunk)) = named(chunk) else { return false };
            shared.lock().insert(name, chunk);
        }
        shared.changed.notify_one();
        true
    }

    /// The description of a chunk.
    pub(crate) fn get(&self, name: &Name) -> Option<Arc<DescribedChunk>> {
        let mut known = self.0.as_ref()?.lock();
        let chunk = Arc::clone(&known.by_name.get(name)?.chunk);
        known.use_again(name);
        Some(chunk)
    }

    /// Waits until engines describe chunks, and takes the names of these chunks.
    ///
    /// Cancel safe.
    pub(crate) async fn fresh(&self) -> Vec<Name> {
        let Some(shared) = &self.0 else { return std::future::pending().await };
        loop {
            let fresh = std::mem::take(&mut shared.lock().fresh);
            if !fresh.is_empty() {
                return fresh;
            }
            shared.changed.notified().await;
        }
    }
}

impl SharedDescriptions {
    fn lock(&self) -> MutexGuard<'_, KnownDescriptions> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KnownDescriptions {
    fn insert(&mut self, name: Name, chunk: DescribedChunk) {
        if self.by_name.get(&name).is_some_and(|entry| *entry.chunk == chunk) {
            self.use_again(&name);
            return;
        }
        self.remove(&name);
        if !self.make_room() {
            return;
        }
        self.last_turn += 1;
        self.turns.insert(self.last_turn, name.clone());
        if self.fresh.len() < MOST_FRESH {
            self.fresh.push(name.clone());
        }
        self.by_name.insert(name, Entry { turn: self.last_turn, chunk: Arc::new(chunk) });
    }

    /// Forgets descriptions until all fit; false if those in use leave no room.
    fn make_room(&mut self) -> bool {
        let mut in_use = 0;
        while self.bytes.load(Ordering::Relaxed) > self.most_bytes {
            let Some((_, oldest)) = self.turns.first_key_value() else { return false };
            let oldest = oldest.clone();
            if self.by_name.get(&oldest).is_some_and(|entry| Arc::strong_count(&entry.chunk) > 1) {
                self.use_again(&oldest);
                in_use += 1;
                if in_use == MOST_LOOKS {
                    return false;
                }
            } else {
                self.remove(&oldest);
            }
        }
        true
    }

    fn remove(&mut self, name: &Name) {
        if let Some(Entry { turn, .. }) = self.by_name.remove(name) {
            self.turns.remove(&turn);
        }
    }

    fn use_again(&mut self, name: &Name) {
        if let Some(entry) = self.by_name.get_mut(name) {
            self.turns.remove(&entry.turn);
            self.last_turn += 1;
            entry.turn = self.last_turn;
            self.turns.insert(entry.turn, name.clone());
        }
    }
}

/// Maximum bytes of all descriptions, for a node with little memory: enough for some 40,000 chunks of 256 tokens.
const FEWEST_BYTES: usize = 64 << 20;

/// Each so many bytes of the node's memory allow one more byte of descriptions. Chunks of real models have some 4,000 times the bytes
/// of their descriptions, so descriptions of all held chunks fit.
const ARENA_SHARE: u64 = 1_024;

/// Maximum number of descriptions in use that one new description passes over in search for room.
const MOST_LOOKS: usize = 64;

/// Approximate bytes of a description besides its contents.
const ENTRY_BYTES: usize = 400;

/// Maximum number of names that wait for [`Descriptions::fresh`]. Further names are left out: their chunks are published when
/// they are gained again.
const MOST_FRESH: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    fn said(byte: u8, tokens: usize) -> Describe {
        let chunk = Described {
            blocks: vec![ChunkHash([0; 32]), ChunkHash([byte; 32])],
            parent: None,
            tokens: vec![u32::from(byte); tokens],
            lora_id: None,
            lora_name: None,
            extra_keys: r#"[["salt"],null]"#.into(),
        };
        Describe { fingerprint: Fingerprint([9; 32]), chunks: vec![chunk] }
    }

    fn name(tenant: &str, byte: u8) -> Name {
        Name { tenant: tenant.into(), fingerprint: Fingerprint([9; 32]), hash: ChunkHash([byte; 32]) }
    }

    #[tokio::test]
    async fn what_an_engine_says_is_known_to_its_tenant_alone_and_is_news_once() {
        let descriptions = Descriptions::kept(0);
        assert!(descriptions.describe(&"a".into(), said(1, 4)));
        assert!(descriptions.describe(&"a".into(), said(1, 4)));
        assert_eq!(descriptions.fresh().await, [name("a", 1)]);
        let known = descriptions.get(&name("a", 1)).unwrap();
        assert_eq!((&known.chunk.tokens[..], known.chunk.block_tokens()), (&[1; 4][..], 2));
        assert_eq!(known.chunk.extra_keys, r#"[["salt"],null]"#);
        assert_eq!((descriptions.get(&name("b", 1)), descriptions.get(&name("a", 2))), (None, None));
    }

    #[test]
    fn what_is_no_description_is_not_taken() {
        let tenant = Arc::from("a");
        let refused = |change: &dyn Fn(&mut Described)| {
            let mut describe = said(1, 4);
            change(&mut describe.chunks[0]);
            !Descriptions::kept(0).describe(&tenant, describe)
        };
        assert!(refused(&|chunk| chunk.blocks.clear()));
        assert!(refused(&|chunk| chunk.tokens.clear()));
        assert!(refused(&|chunk| chunk.tokens.push(1)));
        assert!(refused(&|chunk| chunk.lora_name = Some("x".repeat(257))));
        assert!(refused(&|chunk| chunk.extra_keys = "[null]".into()));
        assert!(refused(&|chunk| chunk.extra_keys = "{}".into()));
        assert!(refused(&|chunk| chunk.extra_keys = format!("[{:20000},null]", "null")));
        assert!(!refused(&|chunk| chunk.extra_keys.clear()));
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let descriptions = Descriptions::kept(0);
        let tenant = Arc::from("a");
        // One chunk cannot fill the memory, so many chunks do.
        let each = 40_000;
        let fit = FEWEST_BYTES / (ENTRY_BYTES + 64 + 4 * each + 15);
        for byte in 0..fit as u32 {
            let mut describe = said(1, each);
            describe.chunks[0].blocks[1].0[..4].copy_from_slice(&byte.to_be_bytes());
            assert!(descriptions.describe(&tenant, describe));
            let first = Name { hash: first_of(0), ..name("a", 1) };
            assert!(descriptions.get(&first).is_some(), "it is used all the time");
        }
        assert!(descriptions.describe(&tenant, said(7, each)));
        assert!(descriptions.get(&Name { hash: first_of(1), ..name("a", 1) }).is_none());
        assert!(descriptions.get(&Name { hash: first_of(0), ..name("a", 1) }).is_some());
    }

    #[test]
    fn descriptions_in_use_count_and_are_not_forgotten() {
        let descriptions = Descriptions::kept(0);
        let bytes = || descriptions.0.as_ref().unwrap().lock().bytes.load(Ordering::Relaxed);
        let extra_keys = format!(r#"[["{}"],null]"#, "x".repeat(16_000));
        let say = |number: u32| {
            let mut describe = said(1, 4);
            describe.chunks[0].blocks[1] = first_of(number);
            describe.chunks[0].extra_keys.clone_from(&extra_keys);
            assert!(descriptions.describe(&"a".into(), describe));
            descriptions.get(&Name { hash: first_of(number), ..name("a", 1) })
        };
        // Somebody keeps all of them, as the publisher does whose chunks stay.
        let mut used: Vec<_> = (0..10_000).map_while(say).collect();
        let fit = used.len();
        assert!((3_000..4_500).contains(&fit), "{fit} fit");
        for number in 10_000..10_100 {
            assert!(say(number).is_none() && bytes() <= FEWEST_BYTES);
        }
        let known = (0..fit as u32).map(|number| Name { hash: first_of(number), ..name("a", 1) });
        assert!(known.clone().all(|name| descriptions.get(&name).is_some()));
        drop(used.pop());
        assert!((20_000..20_100).any(|number| say(number).is_some()), "there is room again");
        drop((used, known));
        assert!(bytes() <= FEWEST_BYTES && bytes() > 0);
    }

    fn first_of(number: u32) -> ChunkHash {
        let mut hash = ChunkHash([1; 32]);
        hash.0[..4].copy_from_slice(&number.to_be_bytes());
        hash
    }
}
