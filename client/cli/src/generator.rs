//! Makes a trace for a replay without a file: the same requests for the same seed, on every machine.
//!
//! The model, with integers only:
//!
//! - [`HEADS`] system prompts of 1 to 8 blocks; the prompt of rank r is chosen with weight 1/(r+1) (Zipf).
//! - Three requests in ten start a session: a head, then a first message of 64 to 8,191 tokens, log-uniform.
//! - The other requests continue one of the latest [`OPEN_SESSIONS`] sessions: two are drawn, and the one that was used last is
//!   continued. The session's prompt grows by the previous answer (16 to 1,023 tokens) and a new message (64 to 4,095 tokens).
//! - A session whose prompt passes [`LONGEST_PROMPT_TOKENS`] is closed. Beyond [`OPEN_SESSIONS`], the session that was used least
//!   recently is closed.
//! - Requests arrive 0 to 599 ms apart.
//!
//! Block ids are chained as in published traces: full blocks keep their ids while a session grows; the last, partial block has a
//! new id each time.

use crate::trace::{CHUNK_TOKENS, Request};

/// System prompts.
pub const HEADS: usize = 64;

/// Sessions that may be continued.
pub const OPEN_SESSIONS: usize = 48;

/// A session whose prompt is longer is not continued.
pub const LONGEST_PROMPT_TOKENS: u64 = 24_576;

/// Default number of requests: a replay of them takes seconds.
pub const DEFAULT_REQUESTS: usize = 2_000;

/// An endless trace.
#[derive(Debug, Clone)]
pub struct Generator {
    rng: fastrand::Rng,
    heads: Vec<Vec<u64>>,
    /// The session used last is at the end.
    sessions: Vec<Conversation>,
    next_id: u64,
    now_ms: u64,
}

impl Generator {
    /// The trace of `seed`.
    pub fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut next_id = 0;
        let heads = (0..HEADS).map(|_| fresh_ids(&mut next_id, rng.u64(1..=8))).collect();
        Self { rng, heads, sessions: Vec::new(), next_id, now_ms: 0 }
    }

    fn start_session(&mut self) -> Conversation {
        let head = self.popular_head();
        let blocks = self.heads[head].clone();
        let tokens = blocks.len() as u64 * CHUNK_TOKENS + self.log_uniform(6, 13);
        Conversation { blocks, tokens, answer_tokens: 0 }
    }

    fn continue_session(&mut self) -> Conversation {
        let at = self.rng.usize(..self.sessions.len()).max(self.rng.usize(..self.sessions.len()));
        let mut session = self.sessions.remove(at);
        session.tokens += session.answer_tokens + self.log_uniform(6, 12);
        session
    }

    fn popular_head(&mut self) -> usize {
        let total: u64 = (0..HEADS).map(zipf_weight).sum();
        let mut at = self.rng.u64(..total);
        for rank in 0..HEADS {
            let weight = zipf_weight(rank);
            if at < weight {
                return rank;
            }
            at -= weight;
        }
        HEADS - 1
    }

    /// A number of at least 2^`low` and less than 2^`high`, each power as likely as the other.
    fn log_uniform(&mut self, low: u32, high: u32) -> u64 {
        let power = 1 << self.rng.u32(low..high);
        power + self.rng.u64(..power)
    }
}

impl Iterator for Generator {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        let starts = self.sessions.is_empty() || self.rng.u32(..10) < 3;
        let mut session = if starts { self.start_session() } else { self.continue_session() };
        session.answer_tokens = self.log_uniform(4, 10);
        let missing = session.tokens / CHUNK_TOKENS - session.blocks.len() as u64;
        session.blocks.extend(fresh_ids(&mut self.next_id, missing));

        let mut block_ids = session.blocks.clone();
        block_ids
            .extend(fresh_ids(&mut self.next_id, u64::from(!session.tokens.is_multiple_of(CHUNK_TOKENS))));
        let request = Request {
            timestamp_ms: self.now_ms,
            input_tokens: session.tokens,
            output_tokens: session.answer_tokens,
            block_ids,
        };
        self.now_ms += self.rng.u64(..600);
        if session.tokens <= LONGEST_PROMPT_TOKENS {
            self.sessions.push(session);
        }
        if self.sessions.len() > OPEN_SESSIONS {
            self.sessions.remove(0);
        }
        Some(request)
    }
}

/// A conversation that grows turn by turn.
#[derive(Debug, Clone)]
struct Conversation {
    /// Ids of its full blocks.
    blocks: Vec<u64>,
    tokens: u64,
    answer_tokens: u64,
}

fn fresh_ids(next_id: &mut u64, count: u64) -> Vec<u64> {
    let first = *next_id;
    *next_id += count;
    (first..*next_id).collect()
}

fn zipf_weight(rank: usize) -> u64 {
    1_000_000 / (rank as u64 + 1)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;
    use crate::replay::DEFAULT_CHUNKS_PER_NODE;
    use crate::replay::infinite::InfiniteCache;
    use crate::trace::TraceReader;

    #[test]
    fn the_first_requests_of_a_seed_are_what_they_always_were() {
        let first: Vec<_> = Generator::new(0)
            .take(6)
            .map(|r| (r.timestamp_ms, r.input_tokens, r.output_tokens, r.block_ids[0], r.block_ids.len()))
            .collect();
        assert_eq!(first, GOLDEN);
    }

    #[test]
    fn seeds_make_different_traces() {
        assert!(Generator::new(1).take(10).ne(Generator::new(2).take(10)));
        assert!(Generator::new(1).take(500).eq(Generator::new(1).take(500)));
    }

    #[test]
    fn what_is_generated_is_a_valid_trace() {
        let mut text = String::new();
        for request in Generator::new(7).take(3_000) {
            let Request { timestamp_ms, input_tokens, output_tokens, block_ids } = request;
            writeln!(
                text,
                r#"{{"timestamp":{timestamp_ms},"input_length":{input_tokens},"output_length":{output_tokens},"hash_ids":{block_ids:?}}}"#
            )
            .unwrap();
        }
        let requests = TraceReader::new(text.as_bytes()).read_all(None).unwrap();
        assert!(requests.is_sorted_by_key(|request| request.timestamp_ms));
    }

    #[test]
    fn the_default_trace_has_something_to_hit_and_something_to_compute() {
        let mut cache = InfiniteCache::default();
        for request in Generator::new(0).take(DEFAULT_REQUESTS) {
            cache.ask(&request);
        }
        let (rate, chunks) = (cache.hit_rate(), cache.chunks() as u64);
        assert!((0.6..0.8).contains(&rate), "{rate}");
        assert!(chunks > DEFAULT_CHUNKS_PER_NODE * 3 / 2, "{chunks} chunks: a node must have to evict");
    }

    const GOLDEN: [(u64, u64, u64, u64, usize); 6] = [
        (0, 2_659, 25, 0, 6),
        (32, 3_141, 59, 0, 7),
        (63, 1_521, 18, 10, 3),
        (630, 1_612, 30, 10, 4),
        (837, 669, 27, 90, 2),
        (899, 896, 44, 90, 2),
    ];
}
