//! Pools: kinds of state of a chunk, and the longest prefix that can be restored from them.
//!
//! An attention layer needs the state of every chunk of a prefix (`all`), a sliding window the state of the last few chunks
//! (`window(n)`), a recurrent layer only the state of the last chunk (`last`, the same as a window of one). A prefix is of use
//! only if every pool can be restored at its end: the attention state of ten chunks without the recurrent state after the tenth
//! makes garbage. [`PoolRules`] is the only place that knows these rules. It passes over the chunks once, and keeps a counter for
//! each pool.
//!
//! Only pools that are not `all` may be missing. Both sides of a session derive from the rules which blocks a lease names or a
//! reservation writes, so messages need not say it. A flat namespace has only `all` pools: its keys have no order, so no key is
//! the last.

use rkyv::{Archive, Deserialize, Serialize};

use crate::geometry::AttentionGeometry;
use crate::limits::MAX_POOLS;

/// One kind of state of a chunk.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    /// The pool's name: `kv` for attention, otherwise the engine's word.
    pub name: String,
    /// Layers that one slice holds.
    pub layers: u32,
    /// Bytes of one layer of one chunk in one slice.
    pub layer_bytes: u64,
    /// The chunks of a prefix that must have this state.
    pub hit: HitPolicy,
}

/// The chunks of a prefix that must have a pool's block.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HitPolicy {
    /// Every chunk (attention). No chunk is ever without such a pool.
    #[default]
    All,
    /// This many chunks at the end, at least one (sliding window).
    Window(u32),
    /// The last chunk (recurrent state). The same as a window of one.
    Last,
}

/// Some of a namespace's pools, one bit for each: bit 0 is the first pool.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Default, Hash)]
pub struct PoolSet(pub u8);

/// The rules by which a namespace's pools restore a prefix.
///
/// Chunks are counted from the start of a chain. If the chain is the tail of a prompt, the caller accounts for the chunks before
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolRules {
    /// How many chunks at the end need the pool; `None` for all of them.
    reaches: [Option<u32>; MAX_POOLS],
    every: PoolSet,
    obligatory: PoolSet,
}

impl PoolSpec {
    /// The attention pool of a model of this shape; `None` if its blocks exceed 64 bits.
    #[must_use]
    pub fn attention(geometry: &AttentionGeometry, chunk_tokens: u32) -> Option<Self> {
        geometry.block_bytes(chunk_tokens)?;
        let layer_bytes = geometry.layer_bytes(chunk_tokens)?;
        Some(Self { name: "kv".into(), layers: geometry.layers, layer_bytes, hit: HitPolicy::All })
    }

    /// Bytes of one block: one chunk of this pool in one slice.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.layer_bytes.saturating_mul(self.layers.into())
    }
}

impl HitPolicy {
    /// How many chunks at the end of a prefix need a pool of this policy; `None` for all of them.
    #[must_use]
    pub fn reach(self) -> Option<u32> {
        match self {
            Self::All => None,
            Self::Window(chunks) => Some(chunks),
            Self::Last => Some(1),
        }
    }
}

impl PoolSet {
    /// Every pool that a namespace may have.
    pub const ANY: Self = Self(u8::MAX);

    /// The set of the first `pools` pools.
    #[must_use]
    pub fn first(pools: usize) -> Self {
        (0..pools).fold(Self::default(), Self::with)
    }

    /// The set with `pool` as well.
    #[must_use]
    pub fn with(self, pool: usize) -> Self {
        Self(self.0 | bit(pool))
    }

    /// Whether `pool` is in the set.
    #[must_use]
    pub fn has(self, pool: usize) -> bool {
        self.0 & bit(pool) != 0
    }

    /// Whether all of `other` is in the set.
    #[must_use]
    pub fn has_all(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The pools of both sets together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The pools that both sets have.
    #[must_use]
    pub fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The pools that only this set has.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The number of pools in the set.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The pools in the set, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let next = left.trailing_zeros();
            left &= left.wrapping_sub(1);
            (next < u8::BITS).then_some(next as usize)
        })
    }
}

impl PoolRules {
    /// The rules of a namespace that [`NamespaceSpec::check`](crate::NamespaceSpec::check) accepts.
    #[must_use]
    pub fn new(pools: &[PoolSpec]) -> Self {
        let mut reaches = [None; MAX_POOLS];
        let mut obligatory = PoolSet::default();
        for (pool, (spec, reach)) in pools.iter().zip(&mut reaches).enumerate() {
            *reach = spec.hit.reach();
            if reach.is_none() {
                obligatory = obligatory.with(pool);
            }
        }
        Self { reaches, every: PoolSet::first(pools.len().min(MAX_POOLS)), obligatory }
    }

    /// All pools of the namespace.
    #[must_use]
    pub fn every(&self) -> PoolSet {
        self.every
    }

    /// The pools that every chunk has.
    #[must_use]
    pub fn obligatory(&self) -> PoolSet {
        self.obligatory
    }

    /// Whether every chunk has all pools: then any number of chunks can be restored.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.every == self.obligatory
    }

    /// The pools of the chunk at `position` that are needed to restore a prefix of `prefix` chunks.
    #[must_use]
    pub fn needed(&self, position: usize, prefix: usize) -> PoolSet {
        if self.is_plain() {
            return self.every;
        }
        let after = (prefix - position.min(prefix)) as u64;
        let needed = self.every.iter().filter(|&pool| self.reaches[pool].is_none_or(|n| after <= n.into()));
        needed.fold(PoolSet::default(), PoolSet::with)
    }

    /// The number of blocks of one slice that are needed to restore a prefix of `prefix` chunks.
    #[must_use]
    pub fn blocks(&self, prefix: usize) -> usize {
        if self.is_plain() {
            return prefix.saturating_mul(self.every.len());
        }
        let of = |pool: usize| self.reaches[pool].map_or(prefix, |reach| prefix.min(reach as usize));
        self.every.iter().map(of).fold(0, usize::saturating_add)
    }

    /// The longest prefix that can be restored. `held` has the pools of each chunk, from the first on. The prefix ends before the
    /// first chunk that lacks an obligatory pool.
    #[must_use]
    pub fn longest(&self, held: impl Iterator<Item = PoolSet>) -> usize {
        let held = held.take_while(|held| held.has_all(self.obligatory));
        if self.is_plain() {
            return held.count();
        }
        // For each pool, the number of consecutive chunks up to the present chunk that have it.
        let mut rows = [0_u64; MAX_POOLS];
        let mut longest = 0;
        for (held, prefix) in held.zip(1_u64..) {
            let mut is_legal = true;
            for pool in self.every.without(self.obligatory).iter() {
                rows[pool] = if held.has(pool) { rows[pool] + 1 } else { 0 };
                is_legal &= rows[pool] >= u64::from(self.reaches[pool].unwrap_or(0)).min(prefix);
            }
            if is_legal {
                longest = prefix as usize;
            }
        }
        longest
    }
}

fn bit(pool: usize) -> u8 {
    1_u8.checked_shl(pool as u32).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(hits: &[HitPolicy]) -> PoolRules {
        let spec = |(i, &hit): (usize, &HitPolicy)| PoolSpec {
            name: format!("{i}"),
            layers: 1,
            layer_bytes: 1,
            hit,
        };
        PoolRules::new(&hits.iter().enumerate().map(spec).collect::<Vec<_>>())
    }

    fn longest(rules: &PoolRules, held: &[u8]) -> usize {
        rules.longest(held.iter().copied().map(PoolSet))
    }

    #[test]
    fn a_plain_prefix_ends_at_the_first_hole() {
        let rules = rules(&[HitPolicy::All, HitPolicy::All]);
        assert!(rules.is_plain());
        assert_eq!(
            (longest(&rules, &[3, 3, 3]), longest(&rules, &[3, 1, 3]), longest(&rules, &[])),
            (3, 1, 0)
        );
        assert_eq!((rules.needed(0, 3), rules.blocks(3)), (PoolSet(3), 6));
    }

    #[test]
    fn a_recurrent_state_is_needed_at_the_end_alone() {
        let rules = rules(&[HitPolicy::All, HitPolicy::Last]);
        assert_eq!(longest(&rules, &[1, 3, 1, 3, 1]), 4);
        assert_eq!(longest(&rules, &[1, 1, 1]), 0, "no state, no prefix");
        assert_eq!(longest(&rules, &[1, 3, 2, 3]), 2, "attention has a hole");
        assert_eq!([0, 1, 2, 3].map(|position| rules.needed(position, 4)), [1, 1, 1, 3].map(PoolSet));
        assert_eq!(rules.blocks(4), 5);
    }

    #[test]
    fn a_window_is_needed_as_far_as_it_reaches_or_the_prefix_does() {
        let rules = rules(&[HitPolicy::All, HitPolicy::Window(2)]);
        assert_eq!((longest(&rules, &[3]), longest(&rules, &[1, 3]), longest(&rules, &[1, 3, 3])), (1, 0, 3));
        assert_eq!([0, 1, 2].map(|position| rules.needed(position, 3)), [1, 3, 3].map(PoolSet));
        assert_eq!((rules.blocks(1), rules.blocks(3)), (2, 5));
    }

    #[test]
    fn every_pool_must_agree_on_the_boundary() {
        let rules = rules(&[HitPolicy::All, HitPolicy::Last, HitPolicy::Window(3)]);
        assert_eq!(longest(&rules, &[7, 5, 7, 5, 3]), 3, "the state after the fifth chunk has no window");
        assert_eq!(longest(&rules, &[5, 5, 5, 3]), 0);
    }
}
