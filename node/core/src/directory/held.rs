//! The chunks that one actor holds, by partition.
//!
//! Sorted lists cost hardly more than the keys themselves. They stay short: an actor with a million chunks has 61 keys in each
//! partition, and moving half of them for an insertion takes some tens of nanoseconds.

use larder_protocol::table::{PARTITIONS, RowKey, RunKey};

/// The keys of the chunks that one actor holds.
#[derive(Debug)]
pub(super) struct HeldChunks {
    partitions: Vec<Vec<PackedKey>>,
    /// The sum of the digests of each partition's keys.
    digests: Vec<u64>,
}

/// A [`RowKey`] without padding: the halves of the run, the high one first, then the chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PackedKey([u64; 3]);

impl HeldChunks {
    /// A set without keys.
    pub(super) fn new() -> Self {
        let partitions = usize::from(PARTITIONS);
        Self { partitions: vec![Vec::new(); partitions], digests: vec![0; partitions] }
    }

    /// Adds a key; returns whether the key is new.
    pub(super) fn insert(&mut self, key: PackedKey) -> bool {
        let partition = usize::from(key.partition());
        let keys = &mut self.partitions[partition];
        let Err(at) = keys.binary_search(&key) else { return false };
        if keys.len() == keys.capacity() {
            keys.reserve_exact(keys.len() / GROWTH + 2);
        }
        keys.insert(at, key);
        self.digests[partition] = self.digests[partition].wrapping_add(key.digest());
        true
    }

    /// Removes a key; returns whether it was there.
    pub(super) fn remove(&mut self, key: PackedKey) -> bool {
        let partition = usize::from(key.partition());
        let keys = &mut self.partitions[partition];
        let Ok(at) = keys.binary_search(&key) else { return false };
        keys.remove(at);
        if keys.len() < keys.capacity() / 2 {
            keys.shrink_to(keys.len() + keys.len() / GROWTH);
        }
        self.digests[partition] = self.digests[partition].wrapping_sub(key.digest());
        true
    }

    pub(super) fn contains(&self, key: PackedKey) -> bool {
        self.partition(key.partition()).binary_search(&key).is_ok()
    }

    /// The keys of a partition, ascending.
    pub(super) fn partition(&self, partition: u16) -> &[PackedKey] {
        &self.partitions[usize::from(partition)]
    }

    /// The sum of the digests of a partition's keys.
    pub(super) fn digest(&self, partition: u16) -> u64 {
        self.digests[usize::from(partition)]
    }

    /// All keys.
    pub(super) fn iter(&self) -> impl Iterator<Item = PackedKey> {
        self.partitions.iter().flatten().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.partitions.iter().map(Vec::len).sum()
    }
}

impl PackedKey {
    pub(super) fn partition(self) -> u16 {
        self.unpacked().run.partition()
    }

    pub(super) fn digest(self) -> u64 {
        self.unpacked().digest()
    }

    pub(super) fn unpacked(self) -> RowKey {
        let Self([high, low, chunk]) = self;
        RowKey { run: RunKey(u128::from(high) << 64 | u128::from(low)), chunk }
    }
}

impl From<RowKey> for PackedKey {
    fn from(key: RowKey) -> Self {
        Self([(key.run.0 >> 64) as u64, key.run.0 as u64, key.chunk])
    }
}

/// A full list grows by this part of itself: doubling would waste more memory than it saves time.
const GROWTH: usize = 8;
