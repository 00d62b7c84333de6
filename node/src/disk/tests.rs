//! Tests of the disk tier, and their shared fixtures.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use larder_core::store::ids::ChunkKey;
use larder_protocol::checksum::{BlockKey, range_checksum};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};
use prometheus::Registry;
use tokio::sync::oneshot;

use super::format::PAGE_BYTES;
use super::*;
use crate::arena::tests::arena;
use crate::arena::{Arena, ExtentMemory};
use crate::threads::pinned_to;
use larder_core::store::Checksums;

pub(crate) mod before;
mod behaviour;
mod faults;
mod histories;
mod killed;
mod opening;
pub(crate) mod silent;
mod unreadable;

/// Memory in which chunks are made, and into which they are read.
pub(crate) struct Slots {
    arena: Arena,
    next: u64,
}

/// A chunk of a test. Its number determines everything about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TestChunk(pub(crate) u64);

impl Slots {
    pub(crate) fn new() -> Self {
        Self { arena: arena(2), next: 0 }
    }

    /// Puts a chunk into memory, and makes the order to write it. The next 16 chunks leave its memory alone.
    pub(crate) fn write_order(&mut self, chunk: TestChunk) -> WriteOrder {
        self.next = (self.next + 1) % 16;
        let mut offset = self.next * TestChunk::MOST_BYTES;
        let mut sources = Vec::new();
        for block in chunk.blocks() {
            let memory = self.arena.extent(0);
            memory.copy_in(offset, &block.content).unwrap();
            sources.push(Source { place: block.place(memory, offset), checksums: block.checksums });
            offset += block.content.len() as u64;
        }
        WriteOrder::new(chunk.key().fingerprint, chunk.chunk_ref(), sources).unwrap()
    }

    /// Makes the order to read a chunk into memory that nothing else uses.
    pub(crate) fn read_order(&self, chunk: TestChunk) -> ReadOrder {
        ReadOrder::new(chunk.key().fingerprint, chunk.chunk_ref(), self.destinations(chunk)).unwrap()
    }

    pub(crate) fn destinations(&self, chunk: TestChunk) -> Vec<BlockPlace> {
        let (memory, mut offset) = (self.arena.extent(1), 0);
        let mut places = Vec::new();
        for block in chunk.blocks() {
            memory.copy_in(offset, &vec![0xee; block.content.len()]).unwrap();
            places.push(block.place(memory, offset));
            offset += block.content.len() as u64;
        }
        places
    }

    /// Checks that an answer is `Here`, and that bytes and checksums are those of the chunk.
    pub(crate) fn assert_right(&self, chunk: TestChunk, answer: &ReadAnswer) {
        let ReadAnswer::Here { checksums, .. } = answer else { panic!("{chunk:?}: {answer:?}") };
        let mut offset = 0;
        for (block, checksums) in chunk.blocks().iter().zip(checksums) {
            let mut found = vec![0; block.content.len()];
            self.arena.extent(1).copy_out(offset, &mut found).unwrap();
            assert!(found == block.content, "{chunk:?} came back with other bytes");
            assert_eq!(*checksums, block.checksums);
            offset += block.content.len() as u64;
        }
    }
}

/// A block of a chunk.
struct TestBlock {
    slice: u16,
    pool: u8,
    range_bytes: u64,
    content: Vec<u8>,
    checksums: Checksums,
}

impl TestBlock {
    fn place(&self, memory: &Arc<ExtentMemory>, offset: u64) -> BlockPlace {
        let Self { slice, pool, range_bytes, .. } = *self;
        let bytes = self.content.len() as u64;
        BlockPlace { slice, pool, memory: Arc::clone(memory), offset, bytes, range_bytes }
    }
}

impl TestChunk {
    /// Bytes of the largest chunk: three blocks of two pages and less.
    pub(super) const MOST_BYTES: u64 = 32 << 10;

    pub(crate) fn key(self) -> ChunkKey {
        ChunkKey { fingerprint: Fingerprint([(self.0 % 3) as u8 + 1; 32]), hash: hash(self.0) }
    }

    pub(crate) fn chunk_ref(self) -> ChunkRef {
        let parent = hash(self.0.wrapping_sub(1));
        ChunkRef { hash: hash(self.0), parent, index: (self.0 % 1000) as u32, anchor: hash(self.0 / 16) }
    }

    /// The pools of the chunk's blocks.
    pub(crate) fn pools(self) -> PoolSet {
        self.blocks().iter().fold(PoolSet::default(), |pools, block| pools.with(block.pool.into()))
    }

    /// The chunk's blocks.
    fn blocks(self) -> Vec<TestBlock> {
        let mut random = fastrand::Rng::with_seed(self.0);
        let blocks = (0..random.u16(1..=3)).map(|slice| {
            // Every third chunk has whole pages, so it moves between arena and drive without a copy.
            let bytes =
                if self.0.is_multiple_of(3) { random.usize(1..=2) << 12 } else { random.usize(1..7_000) };
            let mut content = vec![0; bytes];
            random.fill(&mut content);
            let (pool, range_bytes) = ((slice % 2) as u8, random.u64(500..8_000));
            let key = BlockKey { fingerprint: self.key().fingerprint, hash: self.key().hash, slice, pool };
            let checksums = Checksums::of(&key, content.chunks(range_bytes as usize).map(range_checksum));
            TestBlock { slice, pool, range_bytes, content, checksums }
        });
        blocks.collect()
    }
}

fn hash(number: u64) -> ChunkHash {
    let mut bytes = [7; 32];
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    ChunkHash(bytes)
}

/// A small tier in a folder.
pub(super) fn options(folder: &Path) -> DiskOptions {
    DiskOptions {
        folder: folder.to_owned(),
        capacity_bytes: 16 * SEGMENT_BYTES,
        segment_bytes: SEGMENT_BYTES,
        queue_orders: 32,
        scrub_bytes_per_second: 0,
        silent_after: Duration::from_secs(60),
        cpus: pinned_to().unwrap(),
        lane: None,
    }
}

pub(super) fn metrics() -> DiskMetrics {
    DiskMetrics::new(&Registry::new(), 0).unwrap()
}

/// A callback for gone chunks, and the receiver of its messages.
pub(super) fn gone() -> (OnGone, Receiver<Gone>) {
    let (send, receive) = channel();
    (Box::new(move |gone| drop(send.send(gone))), receive)
}

pub(super) fn open(folder: &Path) -> DiskTier {
    DiskTier::open(&options(folder), metrics(), gone().0).unwrap()
}

/// The answer, which must have come already.
pub(super) fn now<T>(mut answer: oneshot::Receiver<T>) -> T {
    answer.try_recv().unwrap_or_else(|_| panic!("every order is answered"))
}

pub(super) const SEGMENT_BYTES: u64 = 32 * PAGE_BYTES;
