//! The device tier: knows which blocks have a copy in the GPU memory that the node owns.
//!
//! The tier is a cache above host memory. A block comes here when its chunk is loaded for the second time, in one merged order
//! per load; later loads take the block from here. The host keeps its own copy, so the tier drops blocks and writes nothing back.
//! A block's name stands for its bytes, since blocks are summed before they are copied here: the copy stays right whatever
//! happens to the chunk on the host. All slots have one size: that of the largest blocks that an engine had before the tier had
//! its first block. When a GPU is lost, its tier is lost too.

use std::collections::HashMap;

use larder_protocol::checksum::BlockKey;

use super::slots::SlotId;
use crate::store::TierUsage;
use crate::store::ids::ChunkNumber;
use crate::store::policy::{Facts, Policy, PolicyName, Removal, Verdict};

/// The blocks of the tier.
#[derive(Debug)]
pub(super) struct DeviceTier {
    bytes: u64,
    slot_bytes: u64,
    found: HashMap<BlockKey, SlotId>,
    slots: HashMap<SlotId, Entry>,
    policy: Box<dyn Policy>,
    filled: u64,
    evicted: u64,
    /// Whether the GPU refused the tier's memory: nothing more is brought, until the GPU is opened anew.
    is_refused: bool,
}

#[derive(Debug)]
struct Entry {
    key: BlockKey,
    is_filled: bool,
    /// Whether the block was purged on its way here.
    is_purged: bool,
}

impl DeviceTier {
    /// An empty tier of `bytes` bytes; no tier if `bytes` is 0.
    pub(super) fn new(bytes: u64, policy: PolicyName) -> Self {
        Self {
            bytes,
            slot_bytes: 0,
            found: HashMap::new(),
            slots: HashMap::new(),
            policy: policy.build(None),
            filled: 0,
            evicted: 0,
            is_refused: false,
        }
    }

    /// Notes the size of an engine's blocks. If it needs larger slots than there are, none of which is in use (`are_free`), or if
    /// there are no slots yet, returns the number of slots from now on.
    pub(super) fn size_slots(&mut self, block_bytes: u64, are_free: bool) -> Option<u32> {
        let slot_bytes = block_bytes.max(self.bytes / MOST_SLOTS).next_multiple_of(SLOT_ALIGNMENT);
        if !are_free || block_bytes == 0 || slot_bytes <= self.slot_bytes || slot_bytes > self.bytes {
            return None;
        }
        self.slot_bytes = slot_bytes;
        u32::try_from(self.bytes / slot_bytes).ok()
    }

    /// Bytes of GPU memory that the tier needs, whatever the size of its slots; 0 if it has none.
    pub(super) fn pool_bytes(&self) -> u64 {
        if self.slot_bytes > 0 { self.bytes } else { 0 }
    }

    /// The offset of a slot in the pool.
    pub(super) fn offset(&self, slot: SlotId) -> u64 {
        u64::from(slot.0) * self.slot_bytes
    }

    /// The slot of a block, if the block can be read.
    pub(super) fn find(&self, key: &BlockKey) -> Option<SlotId> {
        self.found.get(key).copied().filter(|slot| self.slots.get(slot).is_some_and(|entry| entry.is_filled))
    }

    /// Whether a block should be here, by its chunk's number of reads, and is neither here nor on its way.
    pub(super) fn wants(&self, key: &BlockKey, block_bytes: u64, reads: u8) -> bool {
        reads >= READS_TO_ADMIT
            && block_bytes <= self.slot_bytes
            && self.pool_bytes() > 0
            && !self.is_refused
            && !self.found.contains_key(key)
    }

    /// Notes that a block is read.
    pub(super) fn touch(&mut self, slot: SlotId) {
        self.policy.touch(chunk_of(slot));
    }

    /// Notes that a block is being copied into a slot.
    pub(super) fn fill(&mut self, slot: SlotId, key: BlockKey) {
        self.found.insert(key, slot);
        self.slots.insert(slot, Entry { key, is_filled: false, is_purged: false });
    }

    /// Notes that a block is here, and returns whether it stays.
    pub(super) fn filled(&mut self, slot: SlotId, facts: Facts) -> bool {
        let Some(entry) = self.slots.get_mut(&slot) else { return true };
        if entry.is_purged {
            self.take_out(slot, Removal::Dropped);
            return false;
        }
        entry.is_filled = true;
        self.filled += 1;
        self.policy.insert(chunk_of(slot), facts);
        true
    }

    /// Notes that a block did not come, or that its slot is lost.
    pub(super) fn dropped(&mut self, slot: SlotId) {
        self.take_out(slot, Removal::Dropped);
    }

    /// Drops a block that is or may be wrong, and returns its slot. A block on its way stays, since it was verified just now.
    pub(super) fn drop_block(&mut self, key: &BlockKey) -> Option<SlotId> {
        let slot = self.find(key)?;
        self.take_out(slot, Removal::Dropped);
        Some(slot)
    }

    /// Purges blocks, and returns the slots of the blocks that were here. A block on its way is dropped when it arrives.
    pub(super) fn purge(&mut self, is_purged: impl Fn(&BlockKey) -> bool) -> Vec<SlotId> {
        let mut slots = Vec::new();
        for (&slot, entry) in self.slots.iter_mut().filter(|(_, entry)| is_purged(&entry.key)) {
            entry.is_purged = true;
            slots.extend(entry.is_filled.then_some(slot));
        }
        slots.sort_unstable();
        slots.iter().for_each(|&slot| self.take_out(slot, Removal::Dropped));
        slots
    }

    /// Notes that the GPU refuses the tier's memory, for instance because the GPU has too little.
    pub(super) fn refused(&mut self) {
        self.is_refused = true;
    }

    /// Evicts the block that should go next, and returns its slot.
    pub(super) fn evict(&mut self) -> Option<SlotId> {
        let victim = self.policy.victim(&mut |_| Verdict::Take)?;
        let slot = SlotId(victim.position() as u32);
        self.take_out(slot, Removal::Evicted);
        self.evicted += 1;
        Some(slot)
    }

    /// Drops all blocks, since the GPU is lost, and returns their slots.
    pub(super) fn clear(&mut self) -> Vec<SlotId> {
        self.is_refused = false;
        let mut slots: Vec<SlotId> =
            self.slots.iter().filter(|(_, entry)| entry.is_filled).map(|(&slot, _)| slot).collect();
        slots.sort_unstable();
        slots.iter().for_each(|&slot| self.take_out(slot, Removal::Dropped));
        slots
    }

    /// The tier's contents.
    pub(super) fn usage(&self) -> TierUsage {
        let (blocks, evicted) = (self.filled, self.evicted);
        TierUsage { bytes: self.bytes, blocks, used_bytes: blocks * self.slot_bytes, evicted }
    }

    fn take_out(&mut self, slot: SlotId, why: Removal) {
        let Some(Entry { key, is_filled, .. }) = self.slots.remove(&slot) else { return };
        self.found.remove(&key);
        if is_filled {
            self.filled -= 1;
            self.policy.remove(chunk_of(slot), why);
        }
    }
}

/// The number under which policies know a slot.
fn chunk_of(slot: SlotId) -> ChunkNumber {
    ChunkNumber::at(slot.0 as usize)
}

/// Reads of a chunk before its blocks come here: a chunk that is read once is not worth the copy.
const READS_TO_ADMIT: u8 = 2;

/// The most slots of a tier: each takes 36 bytes of host memory.
const MOST_SLOTS: u64 = 1 << 20;

/// The alignment of slots: kernels move 16 bytes at a time, and the copy engine is fastest with whole lines.
const SLOT_ALIGNMENT: u64 = 256;

#[cfg(test)]
mod tests {
    use larder_protocol::{ChunkHash, Fingerprint};

    use super::*;

    const FACTS: Facts = Facts { short_hash: 0, index: 0, priority: 0, parent: None };

    fn key(number: u8) -> BlockKey {
        BlockKey { fingerprint: Fingerprint([0; 32]), hash: ChunkHash([number; 32]), slice: 0, pool: 0 }
    }

    fn tier(slots: u64) -> DeviceTier {
        let mut tier = DeviceTier::new(slots * 4_096, PolicyName::Lru);
        assert_eq!(tier.size_slots(4_096, true), Some(slots as u32));
        tier
    }

    #[test]
    fn a_block_is_wanted_when_its_chunk_is_read_again_and_found_when_it_is_whole() {
        let mut tier = tier(2);
        assert!(!tier.wants(&key(1), 4_096, 1) && tier.wants(&key(1), 4_096, 2));
        assert!(!tier.wants(&key(1), 4_097, 2), "it fits no slot");
        tier.fill(SlotId(0), key(1));
        assert!(!tier.wants(&key(1), 4_096, 3) && tier.find(&key(1)).is_none(), "it is on its way");
        tier.filled(SlotId(0), FACTS);
        assert_eq!((tier.find(&key(1)), tier.offset(SlotId(1))), (Some(SlotId(0)), 4_096));
        tier.dropped(SlotId(0));
        assert!(tier.wants(&key(1), 4_096, 2) && tier.find(&key(1)).is_none());
    }

    #[test]
    fn what_goes_is_what_the_policy_says_and_never_what_is_on_its_way() {
        let mut tier = tier(3);
        for slot in 0..2 {
            tier.fill(SlotId(slot), key(slot as u8));
            tier.filled(SlotId(slot), FACTS);
        }
        tier.fill(SlotId(2), key(2));
        tier.touch(SlotId(0));
        assert_eq!((tier.evict(), tier.evict(), tier.evict()), (Some(SlotId(1)), Some(SlotId(0)), None));
        assert_eq!(tier.usage(), TierUsage { bytes: 3 * 4_096, blocks: 0, used_bytes: 0, evicted: 2 });
    }

    #[test]
    fn nothing_is_wanted_where_there_is_no_tier_or_nobody_said_how_large_blocks_are() {
        assert!(!DeviceTier::new(1 << 20, PolicyName::Lru).wants(&key(1), 4_096, 9));
        let mut none = DeviceTier::new(0, PolicyName::Lru);
        assert_eq!((none.size_slots(4_096, true), none.pool_bytes()), (None, 0));
        assert!(!none.wants(&key(1), 4_096, 9));
    }

    #[test]
    fn small_blocks_of_the_first_engine_neither_cost_much_memory_nor_keep_larger_blocks_away() {
        let mut tier = DeviceTier::new(40 << 30, PolicyName::Lru);
        assert_eq!(tier.size_slots(16, true), Some(1 << 20));
        assert_eq!(tier.size_slots(2 << 20, false), None, "slots are in use");
        assert_eq!(tier.size_slots(2 << 20, true), Some(20 << 10));
        assert_eq!(tier.size_slots(1 << 20, true), None, "they fit");
        assert_eq!(tier.size_slots(41 << 30, true), None, "the tier is too small for one");
        assert!(tier.wants(&key(1), 2 << 20, 2));
        assert_eq!((tier.offset(SlotId(3)), tier.pool_bytes()), (6 << 20, 40 << 30));
    }

    #[test]
    fn a_block_that_is_purged_on_its_way_does_not_stay() {
        let mut tier = tier(2);
        tier.fill(SlotId(0), key(1));
        assert_eq!(tier.purge(|purged| *purged == key(1)), []);
        assert!(!tier.filled(SlotId(0), FACTS) && tier.find(&key(1)).is_none());
        assert!(tier.wants(&key(1), 4_096, 2), "it may come again");
    }

    #[test]
    fn a_gpu_that_refuses_is_asked_again_only_when_it_was_opened_anew() {
        let mut tier = tier(2);
        tier.fill(SlotId(0), key(1));
        tier.filled(SlotId(0), FACTS);
        tier.refused();
        assert!(!tier.wants(&key(2), 4_096, 9) && tier.find(&key(1)).is_some(), "what is there can be read");
        tier.clear();
        assert!(tier.wants(&key(2), 4_096, 9));
    }

    #[test]
    fn a_lost_gpu_leaves_nothing_here_and_names_the_slots_that_had_blocks() {
        let mut tier = tier(3);
        tier.fill(SlotId(1), key(1));
        tier.filled(SlotId(1), FACTS);
        tier.fill(SlotId(2), key(2));
        assert_eq!(tier.clear(), [SlotId(1)]);
        assert_eq!(tier.find(&key(1)), None);
    }
}
