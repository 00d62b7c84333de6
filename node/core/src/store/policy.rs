//! Chooses the chunk to evict first.
//!
//! The store tells a policy which chunks enter, are used, leave, or are *blocked*: leased, pinned, being written, or with a
//! cached child. The policy chooses the next victim among the others. So a policy never sees the prefix tree, and only leaves are
//! evicted. The store reports only chunks that become blocked or free: a lease of a long prefix costs one call, for its last
//! chunk.

mod adaptive;
mod arc;
mod ghosts;
mod heap;
mod plain;
mod queued;
mod queues;
mod ranked;
mod s3fifo;
mod sieve;
mod sketch;
mod slru;
mod wtinylfu;

use std::fmt;
use std::num::NonZeroU32;

use strum::{Display, EnumMessage, EnumString, IntoStaticStr, VariantArray, VariantNames};

use super::ids::ChunkNumber;
use queued::Queued;
use ranked::Ranked;

/// Decides the order of eviction. One implementation per file; the eviction loop knows none of them.
pub trait Policy: fmt::Debug + Send {
    /// Sets the time, in milliseconds on the clock by which chunks age. A policy that is never told the time decides by uses
    /// alone.
    fn is_now(&mut self, _now_ms: u64) {}

    /// Adds a cached chunk, which may be evicted until [`Policy::block`] says otherwise.
    ///
    /// Chunks of one commit come from last to first, so that the head of a prompt ends up the most recent.
    fn insert(&mut self, chunk: ChunkNumber, facts: Facts);

    /// Notes that the chunk that was just inserted was used last `idle_ms` ago, at another node. A policy that does not know this
    /// takes the chunk for a new one.
    fn was_idle(&mut self, _chunk: ChunkNumber, _idle_ms: u64) {}

    /// Notes a use of a cached chunk. One request's hits come from its last chunk to its first.
    fn touch(&mut self, chunk: ChunkNumber);

    /// Removes a cached chunk, blocked or not.
    fn remove(&mut self, chunk: ChunkNumber, why: Removal);

    /// Notes that a cached chunk may not be evicted: it has a cached child, or is leased, pinned or written.
    fn block(&mut self, chunk: ChunkNumber);

    /// Notes that a blocked chunk may be evicted again.
    fn unblock(&mut self, chunk: ChunkNumber);

    /// The next chunk to evict among the chunks that may be evicted and that `judge` accepts; `None` if there is none.
    ///
    /// The chunk stays in the policy until [`Policy::remove`].
    fn victim(&mut self, judge: Judge<'_>) -> Option<ChunkNumber>;

    /// All cached chunks in the order of eviction, blocked chunks included: from it, another policy takes the chunks over.
    fn order(&self) -> Vec<ChunkNumber>;
}

/// Facts of an entering chunk, for the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Part of the chunk's hash, by which a policy recognizes a chunk that comes back.
    pub short_hash: u64,
    /// Chunks before it in its prompt: the cost of recomputing the chunk grows with their number.
    pub index: u32,
    /// The caller's priority; higher stays longer.
    pub priority: i8,
    /// The chunk before it in its prompt, if that is here.
    pub parent: Option<ChunkNumber>,
}

/// Why a chunk left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The policy chose the chunk as the victim.
    Evicted,
    /// The chunk left for another reason, which says nothing about its worth.
    Dropped,
}

/// Says whether a victim that a policy proposes is taken.
pub(crate) type Judge<'a> = &'a mut dyn FnMut(ChunkNumber) -> Verdict;

/// The store's answer to a proposed victim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Take this chunk.
    Take,
    /// Do not take this chunk now; propose the next.
    Skip,
    /// Take no chunk: a longer search would take too much time.
    Stop,
}

/// A policy, by its name in configuration, commands and metrics. The documentation of each variant is text for people:
/// [`PolicyName::about`] returns it.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Hash,
    Display,
    EnumMessage,
    EnumString,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[strum(serialize_all = "lowercase", parse_err_fn = unknown, parse_err_ty = UnknownPolicy)]
pub enum PolicyName {
    /// Least likely to be used again, as learned
    #[default]
    Adaptive,
    /// Oldest insertion
    Fifo,
    /// Newest insertion
    Filo,
    /// Least recently used
    Lru,
    /// Most recently used
    Mru,
    /// Fewest hits
    Lfu,
    /// Used once, by recency; then the others
    Slru,
    /// Lowest priority of the caller
    Priority,
    /// Adaptive replacement cache
    Arc,
    /// Small queue, main queue and ghosts
    S3Fifo,
    /// Oldest that was not used since the last round
    Sieve,
    /// Seldom used, but for a small window of new ones
    WTinyLfu,
}

impl PolicyName {
    /// Every policy there is.
    pub const ALL: [Self; 12] = *<Self as VariantArray>::VARIANTS.first_chunk().expect("there are twelve");

    /// The policy's name in configuration, commands and metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Describes the chunk that this policy evicts first, for people.
    pub fn about(self) -> &'static str {
        self.get_documentation().unwrap_or_default()
    }

    /// An empty policy of this name. With `recompute_doubles_at`, `adaptive` prefers to keep chunks that cost more to recompute:
    /// behind this many chunks, a chunk costs twice as much as the first chunk of a prompt.
    pub fn build(self, recompute_doubles_at: Option<NonZeroU32>) -> Box<dyn Policy> {
        match self {
            Self::Adaptive => adaptive::Adaptive::policy(recompute_doubles_at),
            Self::Fifo => Box::new(Queued::new(1, plain::Fifo)),
            Self::Lru => Box::new(Queued::new(1, plain::Lru)),
            Self::Filo => Box::new(Ranked::filo()),
            Self::Mru => Box::new(Ranked::mru()),
            Self::Lfu => Box::new(Ranked::lfu()),
            Self::Priority => Box::new(Ranked::priority()),
            Self::Slru => Box::new(Queued::new(2, slru::Slru)),
            Self::Arc => Box::new(Queued::new(2, arc::Arc::default())),
            Self::S3Fifo => Box::new(Queued::new(2, s3fifo::S3Fifo::default())),
            Self::Sieve => Box::new(Queued::new(2, sieve::Sieve::default())),
            Self::WTinyLfu => Box::new(Queued::new(4, wtinylfu::WTinyLfu::default())),
        }
    }
}

/// A name that is no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no eviction policy `{name}`; there are: {}", PolicyName::ALL.map(PolicyName::as_str).join(", "))]
pub struct UnknownPolicy {
    name: String,
}

fn unknown(name: &str) -> UnknownPolicy {
    UnknownPolicy { name: name.into() }
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
