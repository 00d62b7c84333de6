//! The two rules that need one queue and nothing else.

use super::Facts;
use super::queued::Rule;
use super::queues::Queues;
use crate::store::ids::ChunkNumber;

/// First in, first out: the oldest insertion goes first (Belady, "A study of replacement algorithms for a virtual-storage
/// computer", IBM Systems Journal 1966).
#[derive(Debug)]
pub(super) struct Fifo;

impl Rule for Fifo {
    fn insert(&mut self, queues: &mut Queues, chunk: ChunkNumber, _: Facts) {
        queues.push(chunk, 0);
    }

    fn touch(&mut self, _: &mut Queues, _: ChunkNumber) {}
}

/// Least recently used goes first (Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970;
/// SGLang's radix cache has it leaf-first, as here).
#[derive(Debug)]
pub(super) struct Lru;

impl Rule for Lru {
    fn insert(&mut self, queues: &mut Queues, chunk: ChunkNumber, _: Facts) {
        queues.push(chunk, 0);
    }

    fn touch(&mut self, queues: &mut Queues, chunk: ChunkNumber) {
        queues.move_to_end(chunk, 0);
    }
}
