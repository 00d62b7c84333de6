//! A planned node's disk: a log that drops its oldest records, except records that were used since they were written.

use std::collections::{HashMap, VecDeque};

use larder_protocol::ChunkHash;

/// The records of a log with room for a number of chunks.
#[derive(Debug)]
pub(super) struct DiskLog {
    chunks: u64,
    line: VecDeque<(ChunkHash, u64)>,
    /// For each chunk: the number of its record, and whether the chunk was used since it was written.
    records: HashMap<ChunkHash, (u64, bool)>,
    next: u64,
}

impl DiskLog {
    /// An empty log.
    pub(super) fn new(chunks: u64) -> Self {
        Self { chunks, line: VecDeque::new(), records: HashMap::new(), next: 0 }
    }

    /// Writes a chunk; returns the chunks that make way for it.
    pub(super) fn write(&mut self, chunk: ChunkHash) -> Vec<ChunkHash> {
        let mut gone = Vec::new();
        self.append(chunk);
        while self.records.len() as u64 > self.chunks
            && let Some((oldest, number)) = self.line.pop_front()
        {
            match self.records.get(&oldest) {
                Some(&(current, true)) if current == number => self.append(oldest),
                Some(&(current, false)) if current == number => {
                    self.records.remove(&oldest);
                    gone.push(oldest);
                }
                _ => {}
            }
        }
        gone
    }

    /// Notes that a chunk was used.
    pub(super) fn touch(&mut self, chunk: &ChunkHash) {
        if let Some((_, is_used)) = self.records.get_mut(chunk) {
            *is_used = true;
        }
    }

    /// Forgets a chunk.
    pub(super) fn forget(&mut self, chunk: &ChunkHash) {
        self.records.remove(chunk);
    }

    fn append(&mut self, chunk: ChunkHash) {
        self.next += 1;
        self.records.insert(chunk, (self.next, false));
        self.line.push_back((chunk, self.next));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_record_goes_unless_it_was_used_or_written_again() {
        let [a, b, c, d, e] = [1, 2, 3, 4, 5].map(|number| ChunkHash([number; 32]));
        let mut log = DiskLog::new(2);
        assert_eq!((log.write(a), log.write(b)), (vec![], vec![]));
        log.touch(&a);
        assert_eq!(log.write(c), [b], "a was used");
        assert_eq!(log.write(a), [], "it is there already");
        assert_eq!(log.write(d), [c]);
        log.forget(&a);
        assert_eq!(log.write(e), [], "there was room again");
    }
}
