//! The namespaces that a store knows.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use larder_protocol::checksum::BlockKey;
use larder_protocol::namespace::{HashAlgorithm, NamespaceSpec};
use larder_protocol::{ChunkHash, Fingerprint, PoolRules, PoolSet, PoolSpec};

use super::ids::{NamespaceId, TenantId};
use super::index::{Block, Chunk, Standing};
use super::slab::ClassId;

/// The most namespaces that are in use at a time; any further namespace is refused.
pub(crate) const MAX_NAMESPACES: usize = 1_024;

/// The most namespaces that are remembered after others took their numbers: some 100 bytes each.
pub(crate) const MOST_FORGOTTEN: usize = 16_384;

/// Namespaces by number, and by fingerprint.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    known: Vec<Namespace>,
    numbers: HashMap<Fingerprint, NamespaceId>,
    /// The namespaces without a number, at most [`MOST_FORGOTTEN`], with the names of their tenants: others have their numbers now,
    /// or their tenants left. Disk and object store may still have their chunks.
    forgotten: HashSet<(String, Fingerprint)>,
    /// The names of the tenants that had more.
    lost_track_of: HashSet<String>,
    /// Number of registrations so far.
    uses: u64,
}

/// The store's facts of a namespace.
#[derive(Debug)]
pub(crate) struct Namespace {
    pub(crate) tenant: TenantId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) root: ChunkHash,
    pub(crate) chunk_tokens: u32,
    pub(crate) flat: bool,
    pub(crate) slices: u16,
    pub(crate) pools: Vec<Pool>,
    pub(crate) rules: PoolRules,
    /// Whether its tenant left: nobody finds it any more.
    pub(crate) is_gone: bool,
    /// The number of its last registration.
    pub(crate) last_use: u64,
    /// Sessions that registered it.
    pub(crate) sessions: u32,
    /// Chunks of it in the index.
    pub(crate) chunks: u32,
    /// Its description: a node that drains sends it to the takers of its chunks.
    pub(crate) spec: NamespaceSpec,
    /// Its facts for people and routers.
    facts: NamespaceFacts,
}

/// A namespace's facts for people and routers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceFacts {
    /// Name of its tenant.
    pub tenant: String,
    /// Its fingerprint, a part of every key.
    pub fingerprint: Fingerprint,
    /// Name of the model.
    pub model: String,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Tokens of one block of the engine.
    pub engine_block_tokens: u32,
    /// The hash algorithm of chunks.
    pub hash: HashAlgorithm,
    /// Sessions that registered the namespace.
    pub sessions: u32,
    /// Chunks of the namespace that are here.
    pub chunks: u32,
}

/// One pool of a namespace.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) spec: PoolSpec,
    pub(crate) class: ClassId,
}

impl Namespace {
    /// The name of the namespace's tenant.
    pub(crate) fn tenant_name(&self) -> &str {
        &self.facts.tenant
    }

    /// Blocks of one chunk over all slices.
    pub(crate) fn blocks(&self) -> usize {
        usize::from(self.slices) * self.pools.len()
    }

    /// The index of a block in its chunk.
    pub(crate) fn block(&self, slice: u16, pool: usize) -> usize {
        usize::from(slice) * self.pools.len() + pool
    }

    /// The name of a chunk's block.
    pub(crate) fn key(&self, hash: ChunkHash, block: usize) -> BlockKey {
        let (slice, pool) = ((block / self.pools.len()) as u16, (block % self.pools.len()) as u8);
        BlockKey { fingerprint: self.fingerprint, hash, slice, pool }
    }

    /// The blocks of a chunk in a slice.
    pub(crate) fn slice(&self, slice: u16) -> Range<usize> {
        self.block(slice, 0)..self.block(slice, self.pools.len())
    }

    /// The pools whose slices can all be read. The first pool is among them only if every `all` pool is.
    pub(crate) fn readable(&self, chunk: &Chunk) -> PoolSet {
        if chunk.standing == Standing::Condemned {
            return PoolSet::default();
        }
        if usize::from(chunk.ready) == chunk.blocks.len() {
            return self.rules.every();
        }
        let is_ready = |slice, pool| matches!(chunk.blocks[self.block(slice, pool)], Block::Ready(..));
        let whole =
            self.rules.every().iter().filter(|&pool| (0..self.slices).all(|slice| is_ready(slice, pool)));
        let whole = whole.fold(PoolSet::default(), PoolSet::with);
        if whole.has_all(self.rules.obligatory()) { whole } else { whole.without(PoolSet::first(1)) }
    }
}

impl Namespaces {
    /// Finds or adds a namespace of a tenant; `None` if there are too many namespaces, or the tenant uses `most` already.
    pub(crate) fn enter(
        &mut self,
        (tenant, tenant_name): (TenantId, &str),
        spec: &NamespaceSpec,
        classes: &[ClassId],
        most: usize,
    ) -> Option<NamespaceId> {
        let fingerprint = spec.fingerprint(tenant_name);
        self.uses += 1;
        if let Some(&number) = self.numbers.get(&fingerprint) {
            self.get_mut(number).last_use = self.uses;
            return Some(number);
        }
        let uses = |known: &&Namespace| known.tenant == tenant && (known.sessions > 0 || known.chunks > 0);
        if self.known.iter().filter(uses).count() >= most {
            return None;
        }
        let pools =
            spec.pools.iter().zip(classes).map(|(spec, &class)| Pool { spec: spec.clone(), class }).collect();
        let namespace = Namespace {
            tenant,
            fingerprint,
            root: fingerprint.root(),
            chunk_tokens: spec.chunk_tokens,
            flat: spec.flat,
            slices: spec.slices,
            rules: PoolRules::new(&spec.pools),
            pools,
            is_gone: false,
            last_use: self.uses,
            sessions: 0,
            chunks: 0,
            spec: spec.clone(),
            facts: NamespaceFacts {
                tenant: tenant_name.to_owned(),
                fingerprint,
                model: spec.model.clone(),
                chunk_tokens: spec.chunk_tokens,
                engine_block_tokens: spec.engine_block_tokens,
                hash: spec.hash.clone(),
                sessions: 0,
                chunks: 0,
            },
        };
        let position = if self.known.len() < MAX_NAMESPACES {
            self.known.push(namespace);
            self.known.len() - 1
        } else {
            let position = self.known.iter().position(|known| known.sessions == 0 && known.chunks == 0)?;
            let forgotten = std::mem::replace(&mut self.known[position], namespace);
            if !forgotten.is_gone {
                self.numbers.remove(&forgotten.fingerprint);
                self.forgot(forgotten.facts);
            }
            position
        };
        let number = NamespaceId(position as u16);
        self.numbers.insert(fingerprint, number);
        self.forgotten.remove(&(tenant_name.to_owned(), fingerprint));
        Some(number)
    }

    /// Notes that a tenant left: nobody finds its namespaces, but a purge covers them if the tenant comes back.
    pub(crate) fn leave(&mut self, tenant: TenantId) {
        let mut left = Vec::new();
        for known in self.known.iter_mut().filter(|known| known.tenant == tenant && !known.is_gone) {
            known.is_gone = true;
            self.numbers.remove(&known.fingerprint);
            left.push(known.facts.clone());
        }
        left.into_iter().for_each(|facts| self.forgot(facts));
    }

    fn forgot(&mut self, NamespaceFacts { tenant, fingerprint, .. }: NamespaceFacts) {
        if self.forgotten.len() < MOST_FORGOTTEN {
            self.forgotten.insert((tenant, fingerprint));
        } else {
            let name = (tenant, fingerprint);
            if !self.forgotten.contains(&name) {
                self.lost_track_of.insert(name.0);
            }
        }
    }

    /// A tenant's namespaces that have no number any more.
    pub(crate) fn forgotten_of(&self, tenant: &str) -> impl Iterator<Item = Fingerprint> {
        self.forgotten.iter().filter(move |(of, _)| of == tenant).map(|(_, fingerprint)| *fingerprint)
    }

    /// Whether the tenant had such namespaces when no more could be remembered.
    pub(crate) fn have_lost_track_of(&self, tenant: &str) -> bool {
        self.lost_track_of.contains(tenant)
    }

    /// Every namespace.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NamespaceId, &Namespace)> {
        (0..).map(NamespaceId).zip(&self.known)
    }

    /// The namespaces of tenants that left.
    pub(crate) fn gone(&self) -> impl Iterator<Item = NamespaceId> {
        self.iter().filter(|(_, known)| known.is_gone).map(|(number, _)| number)
    }

    /// The namespace of this fingerprint.
    pub(crate) fn of(&self, fingerprint: &Fingerprint) -> Option<NamespaceId> {
        self.numbers.get(fingerprint).copied()
    }

    /// A namespace that a session registered or a chunk belongs to.
    pub(crate) fn get(&self, number: NamespaceId) -> &Namespace {
        &self.known[number.0 as usize]
    }

    /// A namespace by its number, if such a namespace exists.
    pub(crate) fn find(&self, number: NamespaceId) -> Option<&Namespace> {
        self.known.get(number.0 as usize)
    }

    /// Mutable access to a namespace, for its known number.
    pub(crate) fn get_mut(&mut self, number: NamespaceId) -> &mut Namespace {
        &mut self.known[number.0 as usize]
    }

    /// The facts of the namespaces in use that can be found.
    pub(crate) fn facts(&self) -> impl Iterator<Item = NamespaceFacts> {
        let is_in_use = |known: &&Namespace| (known.sessions > 0 || known.chunks > 0) && !known.is_gone;
        let in_use = self.known.iter().filter(is_in_use);
        in_use.map(|known| NamespaceFacts {
            sessions: known.sessions,
            chunks: known.chunks,
            ..known.facts.clone()
        })
    }

    /// Namespaces in use.
    pub(crate) fn in_use(&self) -> usize {
        self.known.iter().filter(|known| known.sessions > 0 || known.chunks > 0).count()
    }
}
