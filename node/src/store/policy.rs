//! Which chunk goes first.
//!
//! The store tells a policy what enters, what is used, what leaves and what may not leave just now; the policy answers
//! which chunk should go next. That only leaves go is the store's business: a chunk with a cached child is blocked
//! like one that is leased, so a policy never sees the tree.

mod fifo;
mod lru;
mod queue;

use std::fmt;
use std::str::FromStr;

use super::ids::ChunkId;

/// Decides the order of eviction. One implementation per file; the eviction loop knows none of them.
pub trait Policy: fmt::Debug + Send {
    /// A chunk is cached from now on, and may go until [`Policy::block`] says otherwise.
    ///
    /// Chunks of one commit come from last to first, so that the head of a prompt ends up the most recent.
    fn insert(&mut self, chunk: ChunkId, facts: Facts);

    /// A cached chunk was used. One request's hits come from its last chunk to its first.
    fn touch(&mut self, chunk: ChunkId);

    /// A cached chunk left, blocked or not.
    fn remove(&mut self, chunk: ChunkId, why: Removal);

    /// A cached chunk may not go: it has a cached child, or is leased, pinned or written.
    fn block(&mut self, chunk: ChunkId);

    /// A blocked chunk may go again.
    fn unblock(&mut self, chunk: ChunkId);

    /// The chunk that should go next, among those that may go and that `judge` takes; `None` where there is none.
    ///
    /// The chunk stays in the policy until [`Policy::remove`].
    fn victim(&mut self, judge: &mut dyn FnMut(ChunkId) -> Verdict) -> Option<ChunkId>;

    /// Every cached chunk, blocked ones too, the first to go first: what another policy takes over.
    fn order(&self) -> Vec<ChunkId>;
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PolicyName {
    /// Oldest insertion goes first.
    Fifo,
    /// Least recently used goes first.
    Lru,
}

impl PolicyName {
    /// Every policy there is.
    pub const ALL: [Self; 2] = [Self::Fifo, Self::Lru];

    /// Its name in configuration, commands and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::Lru => "lru",
        }
    }

    /// A policy of this name with no chunk in it.
    #[must_use]
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Fifo => Box::new(fifo::Fifo::default()),
            Self::Lru => Box::new(lru::Lru::default()),
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
        assert_eq!(error, "there is no eviction policy `lfru`; there are: fifo, lru");
    }
}
