//! The time that requests wait for their first token: until their hits are loaded, and the rest of the prompt is computed.
//!
//! The estimate is for a free engine: its steps come one after the other, and no request waits for another one.

use larder_core::what_if::cluster::{Hits, Prompt};
use serde::Serialize;

use super::Prices;
use crate::size::measured::MeasuredSpeeds;

/// Speeds of the chunks' transfers, in bytes a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speeds {
    /// From a node's memory to an engine of its host.
    pub host: f64,
    /// From a disk.
    pub disk: f64,
    /// From another node.
    pub peer: f64,
    /// From the object store.
    pub object: f64,
}

/// The times to the first token, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Wait {
    /// On average.
    pub ttft_mean_ms: f64,
    /// Half of the requests wait no longer.
    pub ttft_p50_ms: f64,
    /// 99 of 100 requests wait no longer.
    pub ttft_p99_ms: f64,
}

/// The waits of a run's requests.
#[derive(Debug)]
pub struct Waits<'a> {
    prices: &'a Prices,
    ms: Vec<f64>,
}

impl Speeds {
    /// The assumed speeds without a measurement.
    pub const USUAL: Self = Self { host: 10e9, disk: 3e9, peer: 3e9, object: 1e9 };

    /// The measured speeds of chunks of this size; disks and object stores are not measured.
    #[must_use]
    pub fn measured(self, measured: &MeasuredSpeeds, chunk_bytes: u64) -> Self {
        Self { host: measured.host.at(chunk_bytes), peer: measured.peer.at(chunk_bytes), ..self }
    }
}

impl<'a> Waits<'a> {
    /// Starts without requests.
    pub fn new(prices: &'a Prices) -> Self {
        Self { prices, ms: Vec::new() }
    }

    /// Counts the hits of a request. Every hit goes from the node's memory to the engine in the end.
    pub fn note(&mut self, prompt: &Prompt, hits: &Hits) {
        let Prices { speeds, .. } = self.prices;
        let moved = |chunks: u64, speed: f64| self.prices.bytes(chunks) as f64 / speed;
        let loading = moved(hits.chunks, speeds.host)
            + moved(hits.from_disk, speeds.disk)
            + moved(hits.from_peers, speeds.peer)
            + moved(hits.from_objects, speeds.object);
        let gpu_seconds = self.prices.gpu_seconds(prompt.tokens.saturating_sub(hits.tokens));
        let computing = gpu_seconds / f64::from(self.prices.engine_gpus);
        self.ms.push((loading + computing) * 1e3);
    }

    /// The result for all requests.
    #[must_use]
    pub fn finish(mut self) -> Wait {
        self.ms.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * self.ms.len() as f64).ceil() as usize;
            self.ms.get(rank.saturating_sub(1)).copied().unwrap_or_default()
        };
        Wait {
            ttft_mean_ms: self.ms.iter().sum::<f64>() / self.ms.len().max(1) as f64,
            ttft_p50_ms: at(0.5),
            ttft_p99_ms: at(0.99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(tokens: u64) -> Prompt {
        Prompt { at_ms: 0, tokens, blocks: Vec::new(), usable: 0, block_tokens: 512 }
    }

    #[test]
    fn a_request_waits_for_what_is_loaded_and_for_what_is_computed() {
        let speeds = Speeds { host: 10e6, disk: 2e6, peer: 5e6, object: 1e6 };
        let prices = Prices { speeds, prefill_tokens_per_s: 250.0, engine_gpus: 4, ..Prices::of(1_000_000) };
        let waited = |hits: Hits| {
            let mut waits = Waits::new(&prices);
            waits.note(&prompt(2_000), &hits);
            waits.finish().ttft_mean_ms
        };
        assert!((waited(Hits::default()) - 2_000.0).abs() < 1e-6);
        let all = Hits { chunks: 4, from_disk: 1, from_peers: 1, from_objects: 1, tokens: 1_999 };
        assert!((waited(all) - (400.0 + 500.0 + 200.0 + 1_000.0 + 1.0)).abs() < 1e-6);
    }

    #[test]
    fn half_and_all_but_one_in_a_hundred_wait_no_longer() {
        let prices = Prices { prefill_tokens_per_s: 1_000.0, ..Prices::of(1) };
        let mut waits = Waits::new(&prices);
        (1..=200).rev().for_each(|tokens| waits.note(&prompt(tokens), &Hits::default()));
        let Wait { ttft_mean_ms, ttft_p50_ms, ttft_p99_ms } = waits.finish();
        assert!((ttft_mean_ms - 100.5).abs() < 1e-6);
        assert!((ttft_p50_ms - 100.0).abs() < 1e-6 && (ttft_p99_ms - 198.0).abs() < 1e-6);
        assert_eq!(Waits::new(&prices).finish(), Wait::default());
    }
}
