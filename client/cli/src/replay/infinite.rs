//! The hits of a cache that never evicts: the bound of every replay.

use std::collections::HashSet;

use crate::trace::{CHUNK_TOKENS, Request};

/// Keeps every full chunk that it was ever shown.
#[derive(Debug, Clone, Default)]
pub struct InfiniteCache {
    chunks: HashSet<u64>,
    tokens_asked: u64,
    tokens_hit: u64,
}

impl InfiniteCache {
    /// Plays the next request of the trace, and returns how many of its tokens hit.
    pub fn ask(&mut self, request: &Request) -> u64 {
        let usable = &request.full_chunks()[..request.usable_chunks().min(request.full_chunks().len())];
        let hit = usable.iter().take_while(|id| self.chunks.contains(id)).count() as u64 * CHUNK_TOKENS;
        self.chunks.extend(request.full_chunks());
        self.tokens_asked += request.input_tokens;
        self.tokens_hit += hit;
        hit
    }

    /// Chunks that it keeps.
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Tokens hit of tokens asked; 0 if none was asked.
    pub fn hit_rate(&self) -> f64 {
        self.tokens_hit as f64 / self.tokens_asked.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(input_tokens: u64, block_ids: &[u64]) -> Request {
        Request { timestamp_ms: 0, input_tokens, output_tokens: 1, block_ids: block_ids.to_vec() }
    }

    #[test]
    fn full_chunks_hit_once_they_were_seen_and_the_last_token_never_does() {
        let mut cache = InfiniteCache::default();
        assert_eq!(cache.ask(&request(1_200, &[1, 2, 3])), 0);
        assert_eq!(cache.ask(&request(1_200, &[1, 2, 4])), 1_024);
        assert_eq!(cache.ask(&request(1_024, &[1, 2])), 512, "one token is left to compute");
        assert_eq!(cache.ask(&request(1_600, &[1, 2, 3, 5])), 1_024, "block 3 was partial: never stored");
        assert!((cache.hit_rate() - 2_560.0 / 5_024.0).abs() < 1e-12);
    }
}
