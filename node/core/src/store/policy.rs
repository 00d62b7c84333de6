//! Which chunk goes first.
//!
//! The store tells a policy what enters, what is used, what leaves and what may not leave just now; the policy answers
//! which chunk should go next. That only leaves go is the store's business: a chunk with a cached child is blocked
//! like one that is leased, so a policy never sees the tree.

mod adaptive;
mod arc;
mod fifo;
mod filo;
mod ghosts;
mod heap;
mod lfu;
mod lru;
mod mru;
mod priority;
mod queues;
mod s3fifo;
mod sieve;
mod sketch;
mod slru;
mod wtinylfu;

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use super::ids::ChunkNumber;

/// Decides the order of eviction. One implementation per file; the eviction loop knows none of them.
pub trait Policy: fmt::Debug + Send {
    /// A chunk is cached from now on, and may go until [`Policy::block`] says otherwise.
    ///
    /// Chunks of one commit come from last to first, so that the head of a prompt ends up the most recent.
    fn insert(&mut self, chunk: ChunkNumber, facts: Facts);

    /// A cached chunk was used. One request's hits come from its last chunk to its first.
    fn touch(&mut self, chunk: ChunkNumber);

    /// A cached chunk left, blocked or not.
    fn remove(&mut self, chunk: ChunkNumber, why: Removal);

    /// A cached chunk may not go: it has a cached child, or is leased, pinned or written.
    fn block(&mut self, chunk: ChunkNumber);

    /// A blocked chunk may go again.
    fn unblock(&mut self, chunk: ChunkNumber);

    /// The chunk that should go next, among those that may go and that `judge` takes; `None` where there is none.
    ///
    /// The chunk stays in the policy until [`Policy::remove`].
    fn victim(&mut self, judge: &mut dyn FnMut(ChunkNumber) -> Verdict) -> Option<ChunkNumber>;

    /// Every cached chunk, blocked ones too, the first to go first: what another policy takes over.
    fn order(&self) -> Vec<ChunkNumber>;
}

/// What a policy learns of a chunk that enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Part of the chunk's hash: recognises a chunk that comes back.
    pub short_hash: u64,
    /// Chunks before it in its prompt: what recomputing it costs grows with it.
    pub index: u32,
    /// The caller's priority; higher stays longer.
    pub priority: i8,
}

/// Why a chunk left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The policy named it.
    Evicted,
    /// For another reason, which says nothing of its worth.
    Dropped,
}

/// What the store says to a victim that a policy proposes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// This one.
    Take,
    /// Not this one now; propose the next.
    Skip,
    /// None: searching on would take too long.
    Stop,
}

/// A policy by name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PolicyName {
    /// The chunk least likely to be used again goes first, as learned.
    #[default]
    Adaptive,
    /// Oldest insertion goes first.
    Fifo,
    /// Newest insertion goes first.
    Filo,
    /// Least recently used goes first.
    Lru,
    /// Most recently used goes first.
    Mru,
    /// Fewest hits goes first; ties by least recently used.
    Lfu,
    /// Not yet used twice goes first, by recency; then the others, by recency.
    Slru,
    /// Lowest priority of the caller goes first; ties by least recently used.
    Priority,
    /// Used once or used again, whichever has more than its ghosts say it should.
    Arc,
    /// Three queues, in and out by age, of which one is of ghosts.
    S3Fifo,
    /// Oldest that was not used since a hand last passed it goes first.
    Sieve,
    /// Seldom used goes first, but for a small window of new ones.
    WTinyLfu,
}

impl PolicyName {
    /// Every policy there is.
    pub const ALL: [Self; 12] = [
        Self::Adaptive,
        Self::Fifo,
        Self::Filo,
        Self::Lru,
        Self::Mru,
        Self::Lfu,
        Self::Slru,
        Self::Priority,
        Self::Arc,
        Self::S3Fifo,
        Self::Sieve,
        Self::WTinyLfu,
    ];

    /// Its name in configuration, commands and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Fifo => "fifo",
            Self::Filo => "filo",
            Self::Lru => "lru",
            Self::Mru => "mru",
            Self::Lfu => "lfu",
            Self::Slru => "slru",
            Self::Priority => "priority",
            Self::Arc => "arc",
            Self::S3Fifo => "s3fifo",
            Self::Sieve => "sieve",
            Self::WTinyLfu => "wtinylfu",
        }
    }

    /// What it does, for who chooses: which chunk goes first.
    #[must_use]
    pub fn about(self) -> &'static str {
        match self {
            Self::Adaptive => "Least likely to be used again, as learned",
            Self::Fifo => "Oldest insertion",
            Self::Filo => "Newest insertion",
            Self::Lru => "Least recently used",
            Self::Mru => "Most recently used",
            Self::Lfu => "Fewest hits",
            Self::Slru => "Used once, by recency; then the others",
            Self::Priority => "Lowest priority of the caller",
            Self::Arc => "Adaptive replacement cache",
            Self::S3Fifo => "Small queue, main queue and ghosts",
            Self::Sieve => "Oldest that was not used since the last round",
            Self::WTinyLfu => "Seldom used, but for a small window of new ones",
        }
    }

    /// A policy of this name with no chunk in it. `recompute_doubles_at` is for `adaptive`: where given, it prefers chunks
    /// that cost more to recompute, which is twice as much as the first of a prompt where so many stand before it.
    #[must_use]
    pub fn build(self, recompute_doubles_at: Option<NonZeroU32>) -> Box<dyn Policy> {
        match self {
            Self::Adaptive => Box::new(adaptive::Adaptive::new(recompute_doubles_at)),
            Self::Fifo => Box::new(fifo::Fifo::default()),
            Self::Filo => Box::new(filo::Filo::default()),
            Self::Lru => Box::new(lru::Lru::default()),
            Self::Mru => Box::new(mru::Mru::default()),
            Self::Lfu => Box::new(lfu::Lfu::default()),
            Self::Slru => Box::new(slru::Slru::default()),
            Self::Priority => Box::new(priority::Priority::default()),
            Self::Arc => Box::new(arc::Arc::default()),
            Self::S3Fifo => Box::new(s3fifo::S3Fifo::default()),
            Self::Sieve => Box::new(sieve::Sieve::default()),
            Self::WTinyLfu => Box::new(wtinylfu::WTinyLfu::default()),
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.as_str() == name)
            .ok_or_else(|| UnknownPolicy { name: name.into() })
    }
}

/// A name that is no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no eviction policy `{name}`; there are: {}", PolicyName::ALL.map(PolicyName::as_str).join(", "))]
pub struct UnknownPolicy {
    name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_found_by_name_and_an_unknown_one_lists_them() {
        assert!(PolicyName::ALL.into_iter().all(|policy| policy.as_str().parse() == Ok(policy)));
        let error = "lfru".parse::<PolicyName>().unwrap_err().to_string();
        assert!(
            error.starts_with("there is no eviction policy `lfru`; there are: adaptive, fifo, filo, lru"),
            "{error}"
        );
    }
}
