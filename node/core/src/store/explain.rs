//! Answers "why was this a miss?" from the present store: which chunks of a prompt it has, and which namespaces resemble the
//! prompt's namespace.

use larder_protocol::namespace::HashAlgorithm;
use larder_protocol::session::Tier;
use larder_protocol::{ChunkHash, Fingerprint};

use super::ids::NamespaceId;
use super::journal::is_held;
use super::{RememberedEvictions, Stay, Store};
use crate::outcome::{ChunkOutcome, OutcomeRun, runs_of};

/// A namespace of the same tenant in which the store has chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherNamespace {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// Name of its model.
    pub model: String,
    /// The fields of its description that differ.
    pub differing: Vec<&'static str>,
    /// Number of its chunks in this store.
    pub chunks: u32,
    /// Whether it has a chunk with the requested hash; `None` if equal tokens have other hashes in this namespace.
    pub has_chunk: Option<bool>,
}

/// A namespace that resembles another one.
pub(crate) struct Like {
    /// Its number, if equal tokens have equal hashes in both.
    hashed: Option<NamespaceId>,
    namespace: OtherNamespace,
}

/// The chunks of a prompt that a store has, and why the others may be missing.
#[derive(Debug, Clone)]
pub struct ExplainedChain {
    /// The outcome of each chunk; `None` for a namespace that the store does not know.
    pub outcomes: Option<Vec<OutcomeRun>>,
    /// The namespaces that resemble the prompt's namespace, if a chunk is missing.
    pub others: Vec<OtherNamespace>,
    /// The keepers of the chunks in memory.
    pub stays: Vec<Stay>,
    /// How long recently evicted chunks had been unused, in milliseconds.
    pub evicted_after_ms: Option<u64>,
    /// The last evictions.
    pub evictions: RememberedEvictions,
}

impl Store {
    /// Explains what a lookup of a prompt would find.
    pub fn explain(&self, fingerprint: &Fingerprint, hashes: &[ChunkHash]) -> ExplainedChain {
        let outcomes = self.has_of(fingerprint, hashes);
        let absent = absent_of(hashes, outcomes.as_deref().unwrap_or_default());
        ExplainedChain {
            others: absent.map(|hash| self.others_like(fingerprint, hash)).unwrap_or_default(),
            outcomes,
            stays: self.stays(fingerprint, hashes),
            evicted_after_ms: self.evicted_after_ms(),
            evictions: self.remembered_evictions(),
        }
    }

    /// The presence of each chunk of a prompt in the store now; `None` for an unknown namespace.
    pub fn has_of(&self, fingerprint: &Fingerprint, hashes: &[ChunkHash]) -> Option<Vec<OutcomeRun>> {
        let number = self.namespaces.of(fingerprint)?;
        let is_flat = self.namespaces.get(number).flat;
        let mut has_gap = false;
        Some(runs_of(hashes.iter().map(|hash| {
            let tier = self.tier_of(number, hash);
            let outcome = match tier {
                Some(tier) if has_gap && !is_flat => ChunkOutcome::BehindGap(tier),
                Some(tier) => ChunkOutcome::Found(tier),
                None if self.is_being_written(number, hash) => ChunkOutcome::BeingWritten,
                None => ChunkOutcome::Absent,
            };
            has_gap |= tier.is_none();
            outcome
        })))
    }

    /// Namespaces of the same tenant in which the store has chunks, the most similar first, and whether they have this chunk.
    pub fn others_like(&self, fingerprint: &Fingerprint, hash: &ChunkHash) -> Vec<OtherNamespace> {
        self.others_among(&self.like(fingerprint), hash)
    }

    /// Namespaces of the same tenant in which the store has chunks, the most similar first.
    pub(crate) fn like(&self, fingerprint: &Fingerprint) -> Vec<Like> {
        let Some(number) = self.namespaces.of(fingerprint) else { return Vec::new() };
        let known = self.namespaces.get(number);
        let is_other = |other: NamespaceId| {
            let candidate = self.namespaces.get(other);
            other != number && candidate.tenant == known.tenant && !candidate.is_gone && candidate.chunks > 0
        };
        let others = self.namespaces.iter().filter(|&(other, _)| is_other(other));
        let mut others: Vec<Like> = others
            .map(|(number, other)| Like {
                hashed: (other.spec.hash == known.spec.hash && other.spec.hash != HashAlgorithm::Larder)
                    .then_some(number),
                namespace: OtherNamespace {
                    fingerprint: other.fingerprint,
                    model: other.spec.model.clone(),
                    differing: known.spec.differing(&other.spec),
                    chunks: other.chunks,
                    has_chunk: None,
                },
            })
            .collect();
        others.sort_by_key(|Like { namespace: other, .. }| (other.differing.len(), other.fingerprint));
        others
    }

    /// The first of these namespaces, and whether they have this chunk. Those that have it come first.
    pub(crate) fn others_among(&self, like: &[Like], hash: &ChunkHash) -> Vec<OtherNamespace> {
        let has_chunk = |like: &Like| Some(self.tier_of(like.hashed?, hash).is_some());
        let mut others: Vec<(Option<bool>, &Like)> =
            like.iter().map(|like| (has_chunk(like), like)).collect();
        others.sort_by_key(|&(has_chunk, _)| has_chunk != Some(true));
        others.truncate(MOST_OTHERS);
        let other = |(has_chunk, like): (_, &Like)| OtherNamespace { has_chunk, ..like.namespace.clone() };
        others.into_iter().map(other).collect()
    }

    fn tier_of(&self, number: NamespaceId, hash: &ChunkHash) -> Option<Tier> {
        let chunk = self.index.get(self.index.find(number, hash)?);
        match is_held(chunk) {
            true if chunk.is_complete() => Some(Tier::Host),
            true => Some(Tier::Disk),
            false => None,
        }
    }
}

/// The first chunk of a prompt that was found nowhere.
pub(crate) fn absent_of<'a>(hashes: &'a [ChunkHash], outcomes: &[OutcomeRun]) -> Option<&'a ChunkHash> {
    let mut runs = OutcomeRun::with_starts(outcomes);
    let (from, _) = runs.find(|(_, run)| run.outcome == ChunkOutcome::Absent)?;
    hashes.get(from as usize)
}

/// The most namespaces in an answer.
const MOST_OTHERS: usize = 8;
