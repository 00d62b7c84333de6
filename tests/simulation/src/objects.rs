//! The object store that all nodes share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder_core::store::ids::ChunkKey;
use larder_core::store::{BlockMove, ChunkWrite, Wanted};
use larder_core::{Event, QuestionId, ReadAnswer, ReadId, WriteNumber, Written};
use larder_node::arena::ExtentMemory;
use larder_protocol::{ChunkRef, Fingerprint, PoolSet};

use crate::bytes::sums_of_bytes;
use crate::world::{ActorHappening, At, World};

/// The store's objects, by chunk, then slice and pool.
#[derive(Default)]
pub(crate) struct Objects {
    objects: BTreeMap<(ChunkKey, u16, u8), Object>,
    /// Whether the store is no longer used, since it failed.
    pub(crate) is_closed: bool,
    /// Number of orders in a thousand that fail.
    pub(crate) failing: u32,
    pub(crate) is_slow: bool,
}

struct Object {
    chunk: ChunkRef,
    bytes: Vec<u8>,
    checksum: u64,
}

/// A job that the store carries out.
pub(crate) enum Job {
    Find {
        life: u64,
        question: QuestionId,
        keys: Vec<ChunkKey>,
        blocks: Vec<(u16, u8)>,
    },
    Read {
        life: u64,
        read: ReadId,
        key: ChunkKey,
        chunk: ChunkRef,
        blocks: Vec<BlockMove>,
        memory: Vec<Arc<ExtentMemory>>,
    },
    Write {
        life: u64,
        number: WriteNumber,
        key: ChunkKey,
        chunk: ChunkRef,
        blocks: Vec<(BlockMove, u64)>,
        memory: Vec<Arc<ExtentMemory>>,
    },
}

impl Objects {
    /// Flips a bit of an object.
    pub(crate) fn flip(&mut self, random: &mut fastrand::Rng) {
        let count = self.objects.len();
        if count > 0
            && let Some(object) = self.objects.values_mut().nth(random.usize(..count))
        {
            let at = random.usize(..object.bytes.len());
            object.bytes[at] ^= 1 << random.u32(..8);
        }
    }
}

impl World {
    pub(crate) fn object_takes(&mut self) -> Duration {
        if self.objects.is_slow { self.some_us(10_000, 1_500_000) } else { self.some_us(1_000, 20_000) }
    }

    pub(crate) fn read_object(&mut self, at: At, read: ReadId, wanted: &Wanted, fingerprint: Fingerprint) {
        let key = ChunkKey { fingerprint, hash: wanted.chunk.hash };
        let Some(memory) = self.memory_of(at, &wanted.blocks) else { return };
        let life = self.actor(at).map_or(0, |actor| actor.life);
        let after = self.object_takes();
        let (chunk, blocks) = (wanted.chunk, wanted.blocks.clone());
        let job = Job::Read { life, read, key, chunk, blocks, memory };
        self.plan_actor(at, after, ActorHappening::Object(job));
    }

    pub(crate) fn write_object(&mut self, at: At, number: WriteNumber, write: &ChunkWrite) {
        let key = ChunkKey { fingerprint: write.fingerprint, hash: write.chunk.hash };
        let moves: Vec<BlockMove> = write.blocks.iter().map(|(block, _)| *block).collect();
        let Some(memory) = self.memory_of(at, &moves) else { return };
        let life = self.actor(at).map_or(0, |actor| actor.life);
        let after = self.object_takes();
        let blocks = write.blocks.iter().map(|(block, sums)| (*block, sums.whole)).collect();
        let job = Job::Write { life, number, key, chunk: write.chunk, blocks, memory };
        self.plan_actor(at, after, ActorHappening::Object(job));
    }

    pub(crate) fn object_works(&mut self, at: At, job: Job) {
        let fails = self.chance(self.objects.failing);
        match job {
            Job::Find { life, question, keys, blocks } => {
                let has = |key: &ChunkKey| {
                    blocks
                        .iter()
                        .all(|&(slice, pool)| self.objects.objects.contains_key(&(*key, slice, pool)))
                };
                let found = if fails { Vec::new() } else { keys.iter().map(has).map(Some).collect() };
                self.tell_in_life(at, life, Event::StoredFound { question, found });
            }
            Job::Read { life, read, key, chunk, blocks, memory } => {
                let answer = if fails {
                    ReadAnswer::Closed
                } else {
                    self.objects.read(&key, &chunk, &blocks, &memory)
                };
                drop(memory);
                self.coverage.note(crate::coverage::read(&answer));
                self.tell_in_life(at, life, Event::ReadEnded { read, answer });
            }
            Job::Write { life, number, key, chunk, blocks, memory } => {
                if !fails {
                    for ((block, checksum), memory) in blocks.iter().zip(&memory) {
                        let mut bytes = vec![0; block.bytes as usize];
                        let copied = memory.copy_out(block.place.offset, &mut bytes);
                        debug_assert!(copied.is_ok(), "a write lies within its extent");
                        let object = Object { chunk, bytes, checksum: *checksum };
                        let name = (key, block.key.slice, block.key.pool);
                        self.objects.objects.entry(name).or_insert(object);
                    }
                }
                drop(memory);
                let answer = if fails { Written::Failed } else { Written::There };
                self.coverage.note(crate::coverage::written(&answer));
                self.tell_in_life(at, life, Event::WriteEnded { number, answer });
            }
        }
    }
}

impl Objects {
    fn read(
        &mut self,
        key: &ChunkKey,
        chunk: &ChunkRef,
        blocks: &[BlockMove],
        memory: &[Arc<ExtentMemory>],
    ) -> ReadAnswer {
        // A pool is missing if one of its slices is missing.
        let has = |block: &BlockMove| self.objects.contains_key(&(*key, block.key.slice, block.key.pool));
        let lacks = |pool: u8| blocks.iter().any(|block| block.key.pool == pool && !has(block));
        let (mut checksums, mut pools) = (Vec::new(), PoolSet::default());
        for (block, memory) in blocks.iter().zip(memory).filter(|(block, _)| !lacks(block.key.pool)) {
            let name = (*key, block.key.slice, block.key.pool);
            let Some(object) = self.objects.get(&name) else { return ReadAnswer::Missing };
            let sums = sums_of_bytes(&block.key, &object.bytes, block.range_bytes);
            if object.chunk != *chunk || object.bytes.len() as u64 != block.bytes {
                return ReadAnswer::Missing;
            }
            if sums.whole != object.checksum || memory.copy_in(block.place.offset, &object.bytes).is_err() {
                self.objects.remove(&name);
                return ReadAnswer::Missing;
            }
            checksums.push(sums);
            pools = pools.with(block.key.pool.into());
        }
        if pools.has(0) { ReadAnswer::Here { checksums, pools } } else { ReadAnswer::Missing }
    }
}
