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
    #[must_use]
    pub fn explain(&self, fingerprint: &Fingerprint, hashes: &[ChunkHash]) -> ExplainedChain {
        let outcomes = self.has_of(fingerprint, hashes);
        ExplainedChain {
            others: self.others_if_missing(fingerprint, hashes, outcomes.as_deref().unwrap_or_default()),
            outcomes,
            stays: self.stays(fingerprint, hashes),
            evicted_after_ms: self.evicted_after_ms(),
            evictions: self.remembered_evictions(),
        }
    }

    /// The namespaces that resemble the prompt's namespace, if a chunk of the prompt was found nowhere.
    pub(crate) fn others_if_missing(
        &self,
        fingerprint: &Fingerprint,
        hashes: &[ChunkHash],
        outcomes: &[OutcomeRun],
    ) -> Vec<OtherNamespace> {
        let mut runs = OutcomeRun::with_starts(outcomes);
        let missing = runs.find(|(_, run)| run.outcome == ChunkOutcome::Absent);
        let missing = missing.and_then(|(from, _)| hashes.get(from as usize));
        missing.map(|hash| self.others_like(fingerprint, hash)).unwrap_or_default()
    }

    /// The presence of each chunk of a prompt in the store now; `None` for an unknown namespace.
    #[must_use]
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
    #[must_use]
    pub fn others_like(&self, fingerprint: &Fingerprint, hash: &ChunkHash) -> Vec<OtherNamespace> {
        let Some(number) = self.namespaces.of(fingerprint) else { return Vec::new() };
        let known = self.namespaces.get(number);
        let is_other = |other: NamespaceId| {
            let candidate = self.namespaces.get(other);
            other != number && candidate.tenant == known.tenant && !candidate.is_gone && candidate.chunks > 0
        };
        let others = self.namespaces.iter().filter(|&(other, _)| is_other(other));
        let mut others: Vec<OtherNamespace> = others
            .map(|(number, other)| OtherNamespace {
                fingerprint: other.fingerprint,
                model: other.spec.model.clone(),
                differing: known.spec.differing(&other.spec),
                chunks: other.chunks,
                has_chunk: (other.spec.hash == known.spec.hash && other.spec.hash != HashAlgorithm::Larder)
                    .then(|| self.tier_of(number, hash).is_some()),
            })
            .collect();
        others.sort_by_key(|other| (other.has_chunk != Some(true), other.differing.len(), other.fingerprint));
        others.truncate(MOST_OTHERS);
        others
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

/// The most namespaces in an answer.
const MOST_OTHERS: usize = 8;
