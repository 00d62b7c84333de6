//! The hits of a cache with the same rule: a sequential model that shares nothing with Larder's code.
//!
//! The rule: only full chunks of 512 tokens are kept. A request hits the longest cached prefix of its chunks: whole chunks, at
//! most `tokens - 1` of its tokens. Afterwards all of its full chunks are cached; its first chunk counts as used last. Beyond the
//! capacity, the least recently used chunk without a cached child is evicted.

use std::collections::{BTreeMap, HashMap, VecDeque};

/// Fractions of the requested tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Hits within the capacity.
    pub token_hit_rate: f64,
    /// Hits of a cache that keeps everything.
    pub token_hit_rate_infinite: f64,
}

/// Plays requests (tokens of the prompt, ids of its blocks), one after the other, in a cache of `capacity_chunks`.
pub fn leaf_lru(requests: &[(u64, Vec<u64>)], capacity_chunks: usize) -> Rates {
    Rates {
        token_hit_rate: hit_rate(requests, capacity_chunks),
        token_hit_rate_infinite: hit_rate(requests, usize::MAX),
    }
}

fn hit_rate(requests: &[(u64, Vec<u64>)], capacity_chunks: usize) -> f64 {
    let mut cache = Cache::default();
    let (mut asked, mut hit) = (0, 0);
    for (tokens, blocks) in requests {
        let full = &blocks[..(tokens / CHUNK_TOKENS) as usize];
        let usable = (tokens.saturating_sub(1) / CHUNK_TOKENS) as usize;
        let found = full[..usable].iter().take_while(|id| cache.chunks.contains_key(id)).count();
        asked += tokens;
        hit += found as u64 * CHUNK_TOKENS;
        cache.keep(full, capacity_chunks);
    }
    hit as f64 / f64::max(asked as f64, 1.0)
}

/// Plays the same requests in memory of `memory_chunks` above a disk of `disk_chunks`. Returns the token hit rate.
///
/// The rule of the disk: a committed chunk is written at the young end. Beyond the capacity the oldest chunk is dropped, unless
/// it was used since it was written: then it moves to the young end, once. A chunk that memory evicts and the disk lacks is
/// written again.
pub fn two_tiers(requests: &[(u64, Vec<u64>)], memory_chunks: usize, disk_chunks: usize) -> f64 {
    let (mut memory, mut disk) = (Cache::default(), Disk::default());
    let (mut asked, mut hit) = (0, 0);
    for (tokens, blocks) in requests {
        let full = &blocks[..(tokens / CHUNK_TOKENS) as usize];
        let usable = (tokens.saturating_sub(1) / CHUNK_TOKENS) as usize;
        let is_here = |id: &&u64| memory.chunks.contains_key(*id) || disk.is_used.contains_key(*id);
        let found = full[..usable].iter().take_while(is_here).count();
        asked += tokens;
        hit += found as u64 * CHUNK_TOKENS;
        full[..found].iter().for_each(|id| disk.used(*id));
        full.iter().for_each(|&id| disk.write(id, disk_chunks));
        for evicted in memory.keep(full, memory_chunks) {
            disk.write(evicted, disk_chunks);
        }
    }
    hit as f64 / f64::max(asked as f64, 1.0)
}

#[derive(Default)]
struct Disk {
    /// Oldest first.
    order: VecDeque<u64>,
    is_used: HashMap<u64, bool>,
}

impl Disk {
    fn used(&mut self, id: u64) {
        self.is_used.entry(id).and_modify(|is_used| *is_used = true);
    }

    fn write(&mut self, id: u64, capacity_chunks: usize) {
        if self.is_used.contains_key(&id) {
            return;
        }
        self.is_used.insert(id, false);
        self.order.push_back(id);
        while self.is_used.len() > capacity_chunks {
            let Some(oldest) = self.order.pop_front() else { return };
            if std::mem::take(self.is_used.get_mut(&oldest).expect("what is in order is there")) {
                self.order.push_back(oldest);
            } else {
                self.is_used.remove(&oldest);
            }
        }
    }
}

#[derive(Default)]
struct Cache {
    chunks: HashMap<u64, Chunk>,
    /// Chunks without a cached child, by the time of their last use.
    leaves: BTreeMap<u64, u64>,
    clock: u64,
}

struct Chunk {
    parent: Option<u64>,
    children: usize,
    used: u64,
}

impl Cache {
    /// Keeps a chain. Returns the chunks that are evicted for it.
    fn keep(&mut self, chain: &[u64], capacity_chunks: usize) -> Vec<u64> {
        let end = self.clock + chain.len() as u64;
        for (index, &id) in chain.iter().enumerate() {
            let used = end - index as u64;
            match self.chunks.get_mut(&id) {
                Some(chunk) => {
                    if chunk.children == 0 {
                        self.leaves.remove(&chunk.used);
                        self.leaves.insert(used, id);
                    }
                    chunk.used = used;
                }
                None => self.insert(id, index.checked_sub(1).map(|before| chain[before]), used),
            }
        }
        self.clock = end;
        let mut evicted = Vec::new();
        while self.chunks.len() > capacity_chunks
            && let Some((_, id)) = self.leaves.pop_first()
        {
            self.remove(id);
            evicted.push(id);
        }
        evicted
    }

    fn insert(&mut self, id: u64, parent: Option<u64>, used: u64) {
        if let Some(parent) = parent.and_then(|parent| self.chunks.get_mut(&parent)) {
            if parent.children == 0 {
                self.leaves.remove(&parent.used);
            }
            parent.children += 1;
        }
        self.chunks.insert(id, Chunk { parent, children: 0, used });
        self.leaves.insert(used, id);
    }

    fn remove(&mut self, id: u64) {
        let Some(Chunk { parent: Some(parent_id), .. }) = self.chunks.remove(&id) else { return };
        if let Some(parent) = self.chunks.get_mut(&parent_id) {
            parent.children -= 1;
            if parent.children == 0 {
                self.leaves.insert(parent.used, parent_id);
            }
        }
    }
}

const CHUNK_TOKENS: u64 = 512;

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(requests: &[(u64, &[u64])], capacity_chunks: usize) -> [u64; 2] {
        let owned: Vec<(u64, Vec<u64>)> =
            requests.iter().map(|(tokens, ids)| (*tokens, ids.to_vec())).collect();
        let asked: u64 = requests.iter().map(|(tokens, _)| tokens).sum();
        let Rates { token_hit_rate, token_hit_rate_infinite } = leaf_lru(&owned, capacity_chunks);
        [token_hit_rate, token_hit_rate_infinite].map(|rate| (rate * asked as f64 / 512.0).round() as u64)
    }

    #[test]
    fn a_repeated_prompt_hits_all_but_its_last_token() {
        assert_eq!(rates(&[(1_024, &[1, 2]), (1_024, &[1, 2])], 10), [1, 1]);
        assert_eq!(rates(&[(1_025, &[1, 2, 3]), (1_025, &[1, 2, 4])], 10), [2, 2]);
        assert_eq!(rates(&[], 10), [0, 0]);
    }

    #[test]
    fn what_memory_loses_is_hit_on_disk_until_that_is_full_too() {
        let requests: Vec<(u64, Vec<u64>)> =
            [1, 2, 3, 1].iter().map(|&id| (513, vec![id, 90 + id])).collect();
        assert_eq!(two_tiers(&requests, 1, 3), 512.0 / (4.0 * 513.0));
        assert_eq!(two_tiers(&requests, 1, 2), 0.0);
    }

    #[test]
    fn a_partial_chunk_is_not_kept() {
        assert_eq!(rates(&[(1_023, &[1, 2]), (1_536, &[1, 2, 3])], 10), [1, 1]);
    }

    #[test]
    fn the_least_recently_used_leaf_goes_first() {
        // 1-2 and 3-4 fill the cache. 1-2 is used again, so 5 takes the place of 4, the end of the other chain.
        let history: [(u64, &[u64]); 4] =
            [(1_025, &[1, 2, 90]), (1_025, &[3, 4, 91]), (1_025, &[1, 2, 92]), (513, &[5, 93])];
        let ask_again: [(u64, &[u64]); 2] = [(1_025, &[1, 2, 94]), (1_025, &[3, 4, 95])];
        assert_eq!(rates(&[&history[..], &ask_again[..]].concat(), 4), [2 + 2 + 1, 2 + 2 + 2]);
    }

    #[test]
    fn a_chunk_with_a_cached_child_stays_however_old_it_is() {
        // 1 was used before 2, but 2 is its child: 2 is evicted, and 1 stays.
        let requests: [(u64, &[u64]); 4] =
            [(513, &[1, 90]), (1_025, &[1, 2, 91]), (513, &[3, 92]), (1_025, &[1, 2, 93])];
        assert_eq!(rates(&requests, 2), [1 + 1, 1 + 2]);
    }
}
