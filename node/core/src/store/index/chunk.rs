//! One chunk of the index: its blocks, its claims, and its other places.

use larder_protocol::{ChunkHash, ChunkRef, PoolSet};
use smallvec::SmallVec;

use crate::store::checksums::Checksums;
use crate::store::ids::{ChunkNumber, NamespaceId, Slot};

/// The store's state of one chunk; [`Index::name`](super::Index::name) has the rest of its name. 128 bytes.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) hash: ChunkHash,
    /// Chunks before it in its prompt.
    pub(crate) index: u32,
    /// How many chunks had its place before it.
    pub(super) generation: u32,
    pub(crate) namespace: NamespaceId,
    pub(super) parent: Option<ChunkNumber>,
    pub(super) first_child: Option<ChunkNumber>,
    pub(super) next_sibling: Option<ChunkNumber>,
    pub(super) previous_sibling: Option<ChunkNumber>,
    /// The number of leases, writers, fetches and other users that keep it in memory, orphaned leases included.
    pub(crate) claims: u32,
    /// Claims of ended sessions whose process, or a device, may still read the chunk.
    pub(crate) orphaned_leases: u32,
    pub(crate) pins: u32,
    /// Children that are in memory.
    pub(super) resident_children: u32,
    /// Blocks that can be read.
    pub(crate) ready: u16,
    /// The readable pools: see [`Namespace::readable`](super::super::namespaces::Namespace::readable).
    pub(crate) pools: PoolSet,
    /// The pools whose slices are all in its record on disk, if it has one.
    pub(crate) disk_pools: PoolSet,
    pub(crate) priority: i8,
    /// The number of reads, up to a bound.
    pub(crate) reads: u8,
    pub(crate) standing: Standing,
    pub(crate) disk: OnDisk,
    pub(crate) stored: Stored,
    pub(super) marks: Marks,
    /// Its last use, in hundredths of a second on the clock of ages (`Store::age_ms`).
    pub(crate) used: u32,
    /// Its blocks, by slice, then pool.
    pub(crate) blocks: SmallVec<[Block; 1]>,
}

/// Facts of a chunk, one bit each, and its account in the two uppermost bits.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Marks(u8);

#[derive(Debug, Clone, Copy)]
pub(super) enum Mark {
    /// The chunk is in memory, or about to be; otherwise it is only on disk.
    Resident = 1,
    Copy = 2,
    Forwarded = 4,
    ReadElsewhere = 8,
}

impl Marks {
    fn has(self, mark: Mark) -> bool {
        self.0 & mark as u8 != 0
    }

    /// Sets or takes away a mark; returns whether it was set.
    pub(super) fn set(&mut self, mark: Mark, is_set: bool) -> bool {
        let was_set = self.has(mark);
        self.0 = if is_set { self.0 | mark as u8 } else { self.0 & !(mark as u8) };
        was_set
    }
}

/// Whether a chunk counts as cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Standing {
    /// The chunk stays until it is evicted.
    #[default]
    Kept,
    /// The chunk was fetched and stays only as long as somebody claims it.
    Passing,
    /// The chunk was evicted, and stays only as long as a write, a forward or a reader claims it.
    Leaving,
    /// The chunk's bytes are wrong, or it was purged: nobody finds it, and it stays only until its readers have let go.
    Condemned,
}

/// An account of the bytes of chunks that are not kept. Each has its own limit: reads from one place leave the room of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Account {
    /// Fetched from other actors, of this node or of others.
    Peers,
    /// Read from disk.
    Disk,
    /// Read from the object store.
    Objects,
    /// Evicted or condemned.
    Leaving,
}

impl Account {
    const ALL: [Self; 4] = [Self::Peers, Self::Disk, Self::Objects, Self::Leaving];
}

const ACCOUNT_SHIFT: u32 = 6;

/// The state of a chunk's bytes on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum OnDisk {
    /// On no disk, as far as is known.
    #[default]
    Nowhere,
    /// Being written to this node's disk.
    Coming,
    /// On this node's disk.
    Here,
    /// On the disk of the node that it came from: nobody else has to write it.
    Elsewhere,
}

/// Whether the object store has a chunk that is in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Stored {
    /// This is unknown.
    #[default]
    Unknown,
    /// The chunk is being written to the object store.
    Coming,
    /// The object store has the chunk.
    There,
}

/// One block of a chunk.
#[derive(Debug, Clone, Default)]
pub(crate) enum Block {
    /// Nobody has written it.
    #[default]
    Absent,
    /// A reservation holds its slot.
    Writing(Slot),
    /// The block can be read.
    Ready(Slot, Checksums),
}

impl Chunk {
    pub(super) fn new(namespace: NamespaceId, name: &ChunkRef, generation: u32, blocks: usize) -> Self {
        Self {
            hash: name.hash,
            index: name.index,
            generation,
            namespace,
            parent: None,
            first_child: None,
            next_sibling: None,
            previous_sibling: None,
            claims: 0,
            orphaned_leases: 0,
            pins: 0,
            resident_children: 0,
            ready: 0,
            pools: PoolSet::default(),
            disk_pools: PoolSet::default(),
            priority: 0,
            reads: 0,
            standing: Standing::Kept,
            disk: OnDisk::Nowhere,
            stored: Stored::Unknown,
            marks: Marks::default(),
            used: 0,
            blocks: smallvec::smallvec![Block::Absent; blocks],
        }
    }

    /// The chunk before this chunk, if it is here.
    pub(crate) fn parent_number(&self) -> Option<ChunkNumber> {
        self.parent
    }

    /// The account of its bytes while it is not kept.
    pub(crate) fn account(&self) -> Account {
        Account::ALL[usize::from(self.marks.0 >> ACCOUNT_SHIFT)]
    }

    pub(crate) fn set_account(&mut self, account: Account) {
        self.marks.0 = (self.marks.0 & !(u8::MAX << ACCOUNT_SHIFT)) | (account as u8) << ACCOUNT_SHIFT;
    }

    /// Whether all blocks that every chunk must have can be read, in every slice.
    pub(crate) fn is_complete(&self) -> bool {
        self.pools.has(0)
    }

    /// Whether the chunk has pools in memory that its record on disk lacks.
    pub(crate) fn outgrew_disk(&self) -> bool {
        self.disk == OnDisk::Here && !self.disk_pools.has_all(self.pools)
    }

    /// Whether the chunk counts as cached: some block can be read, and the chunk is to stay.
    pub(crate) fn is_cached(&self) -> bool {
        self.ready > 0 && self.standing == Standing::Kept
    }

    /// Whether the complete chunk, or a pool that it gained, is neither on disk nor on its way there.
    pub(crate) fn belongs_on_disk(&self) -> bool {
        self.is_complete() && (self.disk == OnDisk::Nowhere || self.outgrew_disk())
    }

    /// Whether the complete chunk is here to stay, and neither known to be in the object store nor on its way there.
    pub(crate) fn belongs_in_objects(&self) -> bool {
        self.is_complete() && self.stored == Stored::Unknown && self.standing != Standing::Passing
    }

    /// Counts that it was read.
    pub(crate) fn count_read(&mut self, now: u32) {
        self.reads = self.reads.saturating_add(1);
        self.used = now;
        self.set_forwarded(false);
    }

    /// Whether the chunk may be evicted.
    pub(crate) fn may_go(&self) -> bool {
        self.claims == 0 && self.pins == 0 && self.resident_children == 0
    }

    /// Whether the chunk is in memory, or about to be.
    pub(crate) fn is_resident(&self) -> bool {
        self.marks.has(Mark::Resident)
    }

    /// Whether another node holds the chunk too.
    pub(crate) fn is_copy(&self) -> bool {
        self.marks.has(Mark::Copy)
    }

    pub(crate) fn set_copy(&mut self, is_copy: bool) {
        self.marks.set(Mark::Copy, is_copy);
    }

    /// Whether another node evicted the chunk and sent it here, and nobody has used it since.
    pub(crate) fn was_forwarded(&self) -> bool {
        self.marks.has(Mark::Forwarded)
    }

    pub(crate) fn set_forwarded(&mut self, was_forwarded: bool) {
        self.marks.set(Mark::Forwarded, was_forwarded);
    }

    /// Whether another node has read it: its prompt probably goes on there.
    pub(crate) fn was_read_elsewhere(&self) -> bool {
        self.marks.has(Mark::ReadElsewhere)
    }

    pub(crate) fn set_read_elsewhere(&mut self) {
        self.marks.set(Mark::ReadElsewhere, true);
    }

    /// Whether this node has the chunk on disk, but not in memory.
    pub(crate) fn is_on_disk_alone(&self) -> bool {
        self.disk == OnDisk::Here && !self.is_resident()
    }

    /// The slots of the chunk's readable blocks.
    pub(crate) fn readable_slots(&self) -> impl Iterator<Item = Slot> {
        self.blocks
            .iter()
            .filter_map(|block| if let Block::Ready(slot, _) = block { Some(*slot) } else { None })
    }

    /// The chunk's slots.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.blocks.iter().filter_map(Block::slot)
    }
}

impl Block {
    /// Whether nobody has written the block.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }

    /// The block's checksum; 0 if the block cannot be read.
    pub(crate) fn checksum(&self) -> u64 {
        match self {
            Self::Absent | Self::Writing(_) => 0,
            Self::Ready(_, checksums) => checksums.whole,
        }
    }

    /// The block's slot, if it has one.
    pub(crate) fn slot(&self) -> Option<Slot> {
        match self {
            Self::Absent => None,
            Self::Writing(slot) | Self::Ready(slot, _) => Some(*slot),
        }
    }
}
