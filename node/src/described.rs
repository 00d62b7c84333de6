//! Keeps engines' descriptions of chunks, with their tokens, for events.
//!
//! Memory is bounded. The longest unused description is forgotten first, except for those that somebody still uses: the publisher
//! of events keeps the descriptions of the chunks that it has told. If these leave no room, further descriptions are dropped. With
//! several tenants, half of the memory is kept for them in equal parts, as in the arena: no tenant can leave the others none.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

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
    tenants: HashMap<Arc<str>, TenantDescriptions>,
    last_turn: u64,
    most_bytes: usize,
    /// The number of tenants that the node serves.
    served: usize,
    /// Names of the chunks that were described since the last [`Descriptions::fresh`].
    fresh: Vec<Name>,
}

/// The descriptions of one tenant.
#[derive(Debug, Default)]
struct TenantDescriptions {
    /// The names by last use, the longest unused first.
    turns: BTreeMap<u64, Name>,
    /// Bytes of the descriptions, also of those that are only in use.
    bytes: Arc<AtomicUsize>,
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
    /// Bytes of all the tenant's descriptions; this one counts until it is dropped.
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
    /// Creates descriptions that are kept, for a node with this much memory for chunks and one tenant.
    pub(crate) fn kept(arena_bytes: u64) -> Self {
        let most_bytes = FEWEST_BYTES + (arena_bytes / ARENA_SHARE) as usize;
        let known = KnownDescriptions { most_bytes, served: 1, ..KnownDescriptions::default() };
        Self(Some(Arc::new(SharedDescriptions { known: Mutex::new(known), changed: Notify::new() })))
    }

    /// Sets the number of tenants that the node serves.
    pub(crate) fn tenants_are(&self, served: usize) {
        if let Some(shared) = &self.0 {
            shared.lock().served = served;
        }
    }

    /// Keeps an engine's description of a tenant's chunks; false if a chunk's description is not sound.
    pub(crate) fn describe(&self, tenant: &Arc<str>, said: Describe) -> bool {
        let Some(shared) = &self.0 else { return true };
        let bytes = shared.lock().bytes_of(tenant);
        let named = |chunk: Described| {
            let name =
                Name { tenant: Arc::clone(tenant), fingerprint: said.fingerprint, hash: chunk.name()? };
            Some((name, DescribedChunk::new(chunk, &bytes)?))
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
        larder_net::lock(&self.known)
    }
}

impl KnownDescriptions {
    fn insert(&mut self, name: Name, chunk: DescribedChunk) {
        if self.by_name.get(&name).is_some_and(|entry| *entry.chunk == chunk) {
            self.use_again(&name);
            return;
        }
        self.remove(&name);
        if !(self.make_room(&name.tenant, Whose::Anyones) || self.make_room(&name.tenant, Whose::Own)) {
            return;
        }
        self.last_turn += 1;
        let tenant = self.tenants.entry(Arc::clone(&name.tenant)).or_default();
        tenant.turns.insert(self.last_turn, name.clone());
        if self.fresh.len() < MOST_FRESH {
            self.fresh.push(name.clone());
        }
        self.by_name.insert(name, Entry { turn: self.last_turn, chunk: Arc::new(chunk) });
    }

    /// The count of a tenant's bytes. Forgets tenants without descriptions.
    fn bytes_of(&mut self, tenant: &Arc<str>) -> Arc<AtomicUsize> {
        if !self.tenants.contains_key(tenant) {
            self.tenants.retain(|_, known| Arc::strong_count(&known.bytes) > 1);
        }
        Arc::clone(&self.tenants.entry(Arc::clone(tenant)).or_default().bytes)
    }

    /// Forgets descriptions until a tenant's descriptions fit; false if those in use leave no room.
    fn make_room(&mut self, tenant: &str, whose: Whose) -> bool {
        let mut in_use = 0;
        while !self.fits(tenant) {
            let Some(oldest) = self.oldest(tenant, whose) else { return false };
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

    /// Whether a tenant's descriptions take no more than its own part, or the common part has room for all that tenants have
    /// beyond their own parts.
    fn fits(&self, tenant: &str) -> bool {
        let part = self.part();
        let common = self.most_bytes - self.served * part;
        self.tenants.get(tenant).is_none_or(|own| own.bytes() <= part)
            || self.tenants.values().map(|tenant| tenant.bytes().saturating_sub(part)).sum::<usize>()
                <= common
    }

    /// Bytes that are kept for each tenant, used or not.
    fn part(&self) -> usize {
        match self.served {
            0 | 1 => 0,
            several => self.most_bytes / (2 * several),
        }
    }

    /// The longest unused description that is not within a tenant's own part.
    fn oldest(&self, tenant: &str, whose: Whose) -> Option<Name> {
        let part = self.part();
        let considered = |name: &str| matches!(whose, Whose::Anyones) || name == tenant;
        let tenants = self.tenants.iter().filter(|(name, known)| known.bytes() > part && considered(name));
        let oldest = tenants.filter_map(|(_, known)| known.turns.first_key_value());
        oldest.min_by_key(|(turn, _)| **turn).map(|(_, name)| name.clone())
    }

    fn remove(&mut self, name: &Name) {
        if let Some(Entry { turn, .. }) = self.by_name.remove(name)
            && let Some(tenant) = self.tenants.get_mut(&name.tenant)
        {
            tenant.turns.remove(&turn);
        }
    }

    fn use_again(&mut self, name: &Name) {
        if let Some(entry) = self.by_name.get_mut(name)
            && let Some(tenant) = self.tenants.get_mut(&name.tenant)
        {
            tenant.turns.remove(&entry.turn);
            self.last_turn += 1;
            entry.turn = self.last_turn;
            tenant.turns.insert(entry.turn, name.clone());
        }
    }
}

impl TenantDescriptions {
    fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// The descriptions that may make room for a new one.
#[derive(Debug, Clone, Copy)]
enum Whose {
    /// Those of the new one's tenant.
    Own,
    /// Those of all tenants that have more than their own part.
    Anyones,
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
        let bytes = || bytes(&descriptions);
        let say = |number| say(&descriptions, "a", number);
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

    /// Bytes of all descriptions.
    fn bytes(descriptions: &Descriptions) -> usize {
        descriptions.0.as_ref().unwrap().lock().tenants.values().map(TenantDescriptions::bytes).sum()
    }

    /// Describes a tenant's large chunk of this number. Returns its description, unless there was no room.
    fn say(descriptions: &Descriptions, tenant: &str, number: u32) -> Option<Arc<DescribedChunk>> {
        let mut describe = said(1, 4);
        describe.chunks[0].blocks[1] = first_of(number);
        describe.chunks[0].extra_keys = format!(r#"[["{}"],null]"#, "x".repeat(16_000));
        assert!(descriptions.describe(&tenant.into(), describe));
        descriptions.get(&Name { hash: first_of(number), ..name(tenant, 1) })
    }

    #[test]
    fn a_tenant_whose_descriptions_are_all_in_use_leaves_the_others_room() {
        let descriptions = Descriptions::kept(0);
        descriptions.tenants_are(2);
        let used = |tenant| -> Vec<_> {
            (0..10_000).map_while(|number| say(&descriptions, tenant, number)).collect()
        };
        let first = used("a");
        let second = used("b");
        let parts = [&first, &second].map(|used| used.len() * 100 / (first.len() + second.len()));
        assert_eq!(parts, [75, 24], "the first has its part and all that is common");
        assert!(bytes(&descriptions) <= FEWEST_BYTES);
        drop(first);
        assert!(say(&descriptions, "b", 20_000).is_some(), "what the first uses no more makes room");
        assert!(bytes(&descriptions) <= FEWEST_BYTES);
    }

    #[test]
    fn unused_descriptions_of_one_tenant_are_found_behind_those_in_use_of_another() {
        let descriptions = Descriptions::kept(0);
        descriptions.tenants_are(2);
        let _used: Vec<_> = (0..1_700).map(|number| say(&descriptions, "a", number).unwrap()).collect();
        for number in 0..10_000 {
            assert!(say(&descriptions, "b", number).is_some(), "{number}");
        }
        assert!(bytes(&descriptions) <= FEWEST_BYTES);
    }

    fn first_of(number: u32) -> ChunkHash {
        let mut hash = ChunkHash([1; 32]);
        hash.0[..4].copy_from_slice(&number.to_be_bytes());
        hash
    }
}
