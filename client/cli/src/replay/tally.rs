//! Counts the events of a replay.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use larder_net::in_one_line;
use larder_protocol::ChunkHash;
use larder_protocol::session::Tier;

use super::losses::Reasons;
use super::report::{Report, WrongBlock};
use crate::content;
use crate::trace::CHUNK_TOKENS;

/// Running counts of one replay.
#[derive(Debug, Clone)]
pub struct Tally {
    prefill_tokens_per_s: f64,
    requests: u64,
    failed_requests: u64,
    first_failure: Option<String>,
    tokens_asked: u64,
    tokens_from_before: u64,
    tokens_hit: BTreeMap<&'static str, u64>,
    wrong_bytes: u64,
    first_wrong: Option<WrongBlock>,
    busy_answers: u64,
    saves_shed: u64,
    recomputed_after_failure: u64,
    lease_shortfalls: u64,
    lookups: Histogram<u64>,
    fetches: Histogram<u64>,
    /// Times of fetches that had chunks of other nodes.
    peer_fetches: Histogram<u64>,
}

/// The transport's own counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Transport {
    /// Bytes of blocks read and written.
    pub bytes_moved: u64,
    /// Sessions that were opened again after their node had gone.
    pub sessions_reconnected: u64,
    /// Chunks that nodes forwarded to each other when they evicted them.
    pub forwarded_chunks: u64,
}

impl Tally {
    /// All counts at 0.
    pub fn new(prefill_tokens_per_s: f64) -> Self {
        Self {
            prefill_tokens_per_s,
            requests: 0,
            failed_requests: 0,
            first_failure: None,
            tokens_asked: 0,
            tokens_from_before: 0,
            tokens_hit: [Tier::Device, Tier::Host, Tier::Disk, Tier::Peer, Tier::Object]
                .into_iter()
                .map(|tier| (tier.name(), 0))
                .collect(),
            wrong_bytes: 0,
            first_wrong: None,
            busy_answers: 0,
            saves_shed: 0,
            recomputed_after_failure: 0,
            lease_shortfalls: 0,
            lookups: latencies(),
            fetches: latencies(),
            peer_fetches: latencies(),
        }
    }

    /// Counts a request with a prompt of `tokens`, as soon as its hits are known. `from_before` tokens are hits of chunks that no
    /// request before had computed.
    pub fn asked(&mut self, tokens: u64, from_before: u64) {
        self.requests += 1;
        self.tokens_asked += tokens;
        self.tokens_from_before += from_before;
    }

    /// Counts tokens of a prompt that came from `tier`.
    pub fn hit(&mut self, tier: Tier, tokens: u64) {
        *self.tokens_hit.entry(tier.name()).or_default() += tokens;
    }

    /// Counts a failed request.
    pub fn failed(&mut self, error: &(dyn std::error::Error + 'static)) {
        self.failed_requests += 1;
        self.first_failure.get_or_insert_with(|| in_one_line(error));
    }

    /// Counts tokens of a prompt that were computed because its node was gone.
    pub fn recomputed_after_failure(&mut self, tokens: u64) {
        self.recomputed_after_failure += tokens;
    }

    /// Counts found chunks that could not be leased.
    pub fn lease_fell_short(&mut self, chunks: u64) {
        self.lease_shortfalls += chunks;
    }

    /// Compares a block served under `chunk` with the bytes that its key implies; returns whether it is right.
    pub fn check(&mut self, chunk: &ChunkHash, block: &[u8]) -> bool {
        let Some(offset) = content::first_difference(chunk, block) else { return true };
        let wrong_bytes = content::differences(chunk, block) as u64;
        self.wrong_bytes += wrong_bytes;
        self.first_wrong.get_or_insert_with(|| WrongBlock {
            chunk: chunk.to_string(),
            offset: offset as u64,
            wrong_bytes,
            block_bytes: block.len() as u64,
        });
        false
    }

    /// Counts an answer of a busy node, which is asked again.
    pub fn busy(&mut self) {
        self.busy_answers += 1;
    }

    /// Counts a prompt for whose rest a node had no room at any of the tries.
    pub fn save_shed(&mut self) {
        self.saves_shed += 1;
    }

    /// Counts an answered lookup.
    pub fn looked_up(&mut self, took: Duration) {
        self.lookups.saturating_record(took.as_nanos() as u64);
    }

    /// Counts a fetch: the blocks that hit were leased and copied out. `from_peers` is true if some came from other nodes.
    pub fn fetched(&mut self, took: Duration, from_peers: bool) {
        let fetches = if from_peers { &mut self.peer_fetches } else { &mut self.fetches };
        fetches.saturating_record(took.as_nanos() as u64);
    }

    /// Tokens hit of tokens asked until now; 0 if none was asked.
    pub fn hit_rate(&self) -> f64 {
        self.tokens_hit_total() as f64 / self.tokens_asked.max(1) as f64
    }

    /// The results, with facts from elsewhere: the transport's bytes, the bound, the reasons of lost tokens, the time of the replay.
    #[must_use]
    pub fn finish(
        self,
        transport: Transport,
        token_hit_rate_infinite: f64,
        lost: Reasons,
        took: Duration,
    ) -> Report {
        let tokens_hit = self.tokens_hit_total();
        let from_peers = self.tokens_hit.get(Tier::Peer.name()).copied().unwrap_or_default();
        Report {
            requests: self.requests,
            failed_requests: self.failed_requests,
            tokens_asked: self.tokens_asked,
            tokens_hit,
            tokens_hit_by_tier: self
                .tokens_hit
                .iter()
                .map(|(&tier, &tokens)| (tier.to_owned(), tokens))
                .collect(),
            tokens_computed: self.tokens_asked - tokens_hit,
            tokens_lost: lost.tokens,
            evicted: lost.evicted,
            prefill_seconds_avoided: tokens_hit as f64 / self.prefill_tokens_per_s,
            token_hit_rate: self.hit_rate(),
            token_hit_rate_infinite,
            tokens_from_before: self.tokens_from_before,
            wrong_bytes: self.wrong_bytes,
            busy_answers: self.busy_answers,
            saves_shed: self.saves_shed,
            recomputed_after_failure: self.recomputed_after_failure,
            sessions_reconnected: transport.sessions_reconnected,
            lease_shortfalls: self.lease_shortfalls,
            peer_chunks_per_request: (from_peers / CHUNK_TOKENS) as f64 / self.requests.max(1) as f64,
            forwarded_chunks_per_request: transport.forwarded_chunks as f64 / self.requests.max(1) as f64,
            bytes_moved: transport.bytes_moved,
            lookup_p50_us: quantile_us(&self.lookups, 0.5),
            lookup_p99_us: quantile_us(&self.lookups, 0.99),
            fetch_p50_us: quantile_us(&self.fetches, 0.5),
            fetch_p99_us: quantile_us(&self.fetches, 0.99),
            peer_fetch_p50_us: quantile_us(&self.peer_fetches, 0.5),
            peer_fetch_p99_us: quantile_us(&self.peer_fetches, 0.99),
            longest_fetch_us: quantile_us(&self.fetches, 1.0).max(quantile_us(&self.peer_fetches, 1.0)),
            seconds: took.as_secs_f64(),
            first_wrong: self.first_wrong,
            first_failure: self.first_failure,
        }
    }

    fn tokens_hit_total(&self) -> u64 {
        self.tokens_hit.values().sum()
    }
}

fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST_LATENCY_NS, 3)
        .expect("the bounds are constants that the crate allows")
}

/// A quantile in microseconds; 0 if nothing was measured.
fn quantile_us(latencies: &Histogram<u64>, quantile: f64) -> f64 {
    latencies.value_at_quantile(quantile) as f64 / 1_000.0
}

/// Longer latencies count as an hour.
const LONGEST_LATENCY_NS: u64 = 3_600 * 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_become_rates_and_latencies() {
        let mut tally = Tally::new(1_000.0);
        tally.asked(1_000, 0);
        tally.hit(Tier::Host, 512);
        tally.asked(1_048, 0);
        tally.looked_up(Duration::from_micros(100));
        tally.looked_up(Duration::from_micros(300));
        let report =
            tally.finish(Transport::default(), 0.5, Reasons::default(), Duration::from_millis(1_500));
        assert_eq!((report.requests, report.tokens_computed), (2, 1_536));
        assert!((report.prefill_seconds_avoided - 0.512).abs() < 1e-12);
        assert!((report.token_hit_rate - 0.25).abs() < 1e-12);
        assert!((report.lookup_p50_us - 100.0).abs() < 1.0 && (report.lookup_p99_us - 300.0).abs() < 1.0);
        assert_eq!(report.fetch_p99_us, 0.0);
        assert!(report.passed());
    }

    #[test]
    fn a_wrong_byte_is_counted_and_the_first_wrong_key_is_named() {
        let mut tally = Tally::new(1_000.0);
        let mut block = vec![0; 4_096];
        for id in [1, 2] {
            content::fill(&content::chunk_hash(id), &mut block);
            assert!(tally.check(&content::chunk_hash(id), &block));
            block[77] ^= 1;
            block[99] ^= 1;
            assert!(!tally.check(&content::chunk_hash(id), &block));
        }
        let report = tally.finish(Transport::default(), 0.0, Reasons::default(), Duration::ZERO);
        assert_eq!(report.wrong_bytes, 4);
        let first = report.first_wrong.as_ref().unwrap();
        assert_eq!((first.chunk.as_str(), first.offset), (content::chunk_hash(1).to_string().as_str(), 77));
        assert!(!report.passed());
    }

    #[test]
    fn a_failed_request_fails_the_run_with_its_causes() {
        let mut tally = Tally::new(1_000.0);
        tally.failed(&std::io::Error::other("the node is gone"));
        tally.failed(&std::io::Error::other("later"));
        let report = tally.finish(Transport::default(), 0.0, Reasons::default(), Duration::ZERO);
        assert_eq!(report.failed_requests, 2);
        assert_eq!(report.first_failure.as_deref(), Some("the node is gone"));
        assert!(!report.passed());
    }
}
