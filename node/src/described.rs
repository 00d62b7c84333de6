//! Keeps engines' descriptions of chunks, with their tokens, for events. Memory is bounded: the longest unused description is
//! forgotten first.

use std::collections::{BTreeMap, HashMap};
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
    changed: Notify,
}

#[derive(Debug, Default)]
struct KnownDescriptions {
    by_name: HashMap<Name, Entry>,
    /// The names by last use, the longest unused first.
    turns: BTreeMap<u64, Name>,
    last_turn: u64,
    bytes: usize,
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

/// A chunk's description, engine block by engine block.
#[derive(Debug, PartialEq)]
pub(crate) struct DescribedChunk {
    pub(crate) chunk: Described,
    pub(crate) extra_keys: Option<Value>,
}

impl DescribedChunk {
    /// Reads an engine's description; `None` if it is not sound.
    fn new(chunk: Described) -> Option<Self> {
        if !chunk.is_sound() {
            return None;
        }
        let extra_keys = match &chunk.extra_keys[..] {
            "" => None,
            text => {
                let keys: Vec<Value> = serde_json::from_str(text).ok()?;
                (keys.len() == chunk.blocks.len()).then_some(Some(Value::Array(keys)))?
            }
        };
        Some(Self { chunk, extra_keys })
    }

    fn bytes(&self) -> usize {
        let Described { blocks, tokens, extra_keys, .. } = &self.chunk;
        ENTRY_BYTES + 32 * blocks.len() + 4 * tokens.len() + 4 * extra_keys.len()
    }
}

impl Descriptions {
    /// Creates descriptions that are kept.
    pub(crate) fn kept() -> Self {
        Self(Some(Arc::default()))
    }

    /// Keeps an engine's description of a tenant's chunks; false if a chunk's description is not sound.
    pub(crate) fn describe(&self, tenant: &Arc<str>, said: Describe) -> bool {
        let Some(shared) = &self.0 else { return true };
        let mut known = shared.lock();
        for chunk in said.chunks {
            let Some(hash) = chunk.name() else { return false };
            let Some(chunk) = DescribedChunk::new(chunk) else { return false };
            let name = Name { tenant: Arc::clone(tenant), fingerprint: said.fingerprint, hash };
            known.insert(name, chunk);
        }
        drop(known);
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
        self.last_turn += 1;
        self.bytes += chunk.bytes();
        self.turns.insert(self.last_turn, name.clone());
        if self.fresh.len() < MOST_FRESH {
            self.fresh.push(name.clone());
        }
        self.by_name.insert(name, Entry { turn: self.last_turn, chunk: Arc::new(chunk) });
        while self.bytes > MOST_BYTES
            && let Some((_, oldest)) = self.turns.first_key_value()
        {
            let oldest = oldest.clone();
            self.remove(&oldest);
        }
    }

    fn remove(&mut self, name: &Name) {
        if let Some(Entry { turn, chunk }) = self.by_name.remove(name) {
            self.turns.remove(&turn);
            self.bytes -= chunk.bytes();
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

/// Maximum bytes of all descriptions together: enough for some 40,000 chunks of 256 tokens.
const MOST_BYTES: usize = 64 << 20;

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
        let descriptions = Descriptions::kept();
        assert!(descriptions.describe(&"a".into(), said(1, 4)));
        assert!(descriptions.describe(&"a".into(), said(1, 4)));
        assert_eq!(descriptions.fresh().await, [name("a", 1)]);
        let known = descriptions.get(&name("a", 1)).unwrap();
        assert_eq!((&known.chunk.tokens[..], known.chunk.block_tokens()), (&[1; 4][..], 2));
        assert_eq!(known.extra_keys, Some(serde_json::json!([["salt"], null])));
        assert_eq!((descriptions.get(&name("b", 1)), descriptions.get(&name("a", 2))), (None, None));
    }

    #[test]
    fn what_is_no_description_is_not_taken() {
        let tenant = Arc::from("a");
        let refused = |change: &dyn Fn(&mut Described)| {
            let mut describe = said(1, 4);
            change(&mut describe.chunks[0]);
            !Descriptions::kept().describe(&tenant, describe)
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
        let descriptions = Descriptions::kept();
        let tenant = Arc::from("a");
        // One chunk cannot fill the memory, so many chunks do.
        let each = 40_000;
        let fit = MOST_BYTES / (ENTRY_BYTES + 64 + 4 * each + 60);
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

    fn first_of(number: u32) -> ChunkHash {
        let mut hash = ChunkHash([1; 32]);
        hash.0[..4].copy_from_slice(&number.to_be_bytes());
        hash
    }
}
