//! The store's present answers to "why was this a miss?": the chunks that it has of a prompt, and the namespaces that resemble
//! one.

use larder_protocol::namespace::HashAlgorithm;
use larder_protocol::session::Tier;
use larder_protocol::{ChunkHash, Fingerprint};

use super::Store;
use super::ids::NamespaceId;
use super::journal::is_held;
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
    /// Its chunks here.
    pub chunks: u32,
    /// Whether a chunk of it has the requested hash; `None` if chunks of equal tokens have other hashes in it.
    pub has_chunk: Option<bool>,
}

impl Store {
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
