//! The costs of a cluster, and the savings of its hits.

use super::{Outcome, Scenario, Speeds};
use crate::plan::advice::Goal;

/// The prices and speeds, and the goal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// Tokens that one GPU computes in a second of prefill.
    pub prefill_tokens_per_s: f64,
    /// GPUs that compute a prompt together.
    pub engine_gpus: u16,
    /// Price of one GPU for an hour.
    pub price_per_gpu_hour: f64,
    /// Price of one GiB of memory for an hour.
    pub price_per_gib_hour: f64,
    /// Price of one GiB of disk for an hour.
    pub price_per_disk_gib_hour: f64,
    /// Price of one GiB in the object store for an hour.
    pub price_per_object_gib_hour: f64,
    /// Bytes of one chunk over all ranks.
    pub chunk_bytes: u64,
    /// Speeds of the chunks' transfers.
    pub speeds: Speeds,
    /// The goal of the recommended size.
    pub goal: Goal,
}

impl Prices {
    /// The usual prices and speeds, for chunks of `chunk_bytes`.
    pub const fn of(chunk_bytes: u64) -> Self {
        Self {
            prefill_tokens_per_s: 10_000.0,
            engine_gpus: 1,
            price_per_gpu_hour: 2.5,
            price_per_gib_hour: 0.005,
            price_per_disk_gib_hour: 0.000_12,
            price_per_object_gib_hour: 0.000_034,
            chunk_bytes,
            speeds: Speeds::USUAL,
            goal: Goal::Enough,
        }
    }

    /// GPU seconds to compute `tokens` tokens.
    pub fn gpu_seconds(&self, tokens: u64) -> f64 {
        tokens as f64 / self.prefill_tokens_per_s
    }

    /// The price of GPU seconds.
    pub fn money(&self, gpu_seconds: f64) -> f64 {
        gpu_seconds / 3_600.0 * self.price_per_gpu_hour
    }

    /// The price of a cluster's memory, disks and objects for an hour. The object store has `stored_chunks` chunks.
    pub fn cost_per_hour(&self, scenario: &Scenario, stored_chunks: u64) -> f64 {
        self.parts(scenario, stored_chunks).into_iter().map(|(_, price)| price).sum()
    }

    /// A sentence with the savings and the costs of a size while a trace of `span_ms` runs; a trace of 0 ms has no times.
    pub fn balance(&self, outcome: &Outcome, span_ms: u64) -> String {
        let hours = if span_ms == 0 { 1.0 } else { span_ms as f64 / 3_600e3 };
        let saved = self.money(self.gpu_seconds(outcome.counts.tokens_hit));
        let cost = outcome.cost_per_hour * hours;
        let parts = self.parts(&outcome.scenario, outcome.stored_chunks);
        let parts = parts.into_iter().filter(|&(_, price)| price > 0.0);
        let parts: Vec<String> = parts.map(|(name, price)| format!("{name} {:.2}", price * hours)).collect();
        let (rate, parts) = (self.price_per_gpu_hour, parts.join(", "));
        let saves = format!("Over the trace it saves {saved:.2} at {rate} a GPU hour, and costs {cost:.2}");
        match span_ms {
            0 => format!("{saves} an hour ({parts}); the trace does not tell how long it lasts."),
            _ => format!("{saves} ({parts}): {:.2} are left.", saved - cost),
        }
    }

    /// Bytes of `chunks` chunks.
    pub fn bytes(&self, chunks: u64) -> u64 {
        chunks.saturating_mul(self.chunk_bytes)
    }

    /// The price of each tier for an hour.
    fn parts(&self, scenario: &Scenario, stored_chunks: u64) -> [(&'static str, f64); 3] {
        let price = |chunks, price| self.bytes(chunks) as f64 / GIB * price;
        [
            ("memory", price(scenario.total_chunks(), self.price_per_gib_hour)),
            ("disks", price(scenario.disk_chunks(), self.price_per_disk_gib_hour)),
            ("objects", price(stored_chunks, self.price_per_object_gib_hour)),
        ]
    }
}

const GIB: f64 = (1_u64 << 30) as f64;

#[cfg(test)]
mod tests {
    use larder_core::store::policy::PolicyName;

    use super::*;
    use crate::plan::{Counts, PlanPolicy, Played, Sharing, Tiers};

    const PRICES: Prices = Prices {
        prefill_tokens_per_s: 1_000.0,
        price_per_gpu_hour: 3.6,
        price_per_gib_hour: 0.5,
        price_per_disk_gib_hour: 0.05,
        price_per_object_gib_hour: 0.001,
        ..Prices::of(1 << 30)
    };

    fn outcome(tiers: Tiers) -> Outcome {
        let policy = PlanPolicy::Store(PolicyName::Lru);
        let scenario = Scenario { policy, nodes: 2, sharing: Sharing::Shared, capacity_chunks: 1, tiers };
        let counts = Counts { tokens_hit: 5_000_000, ..Counts::default() };
        let stored_chunks = if tiers.object_store { 30 } else { 0 };
        Outcome::new(scenario, Played { counts, stored_chunks, ..Played::default() }, 1.0, &PRICES)
    }

    #[test]
    fn memory_disks_and_objects_are_charged_together_against_the_saved_prefill() {
        let memory = outcome(Tiers::default());
        assert!((memory.cost_per_hour - 1.0).abs() < 1e-12);
        assert_eq!(
            PRICES.balance(&memory, 2 * 3_600_000),
            "Over the trace it saves 5.00 at 3.6 a GPU hour, and costs 2.00 (memory 2.00): 3.00 are left."
        );
        let untimed = PRICES.balance(&memory, 0);
        assert!(untimed.contains("costs 1.00 an hour (memory 1.00); the trace does not tell"), "{untimed}");
        let all = outcome(Tiers { disk_chunks: 10, object_store: true });
        assert!((all.cost_per_hour - (1.0 + 20.0 * 0.05 + 30.0 * 0.001)).abs() < 1e-12);
        let text = PRICES.balance(&all, 3_600_000);
        assert!(text.contains("costs 2.03 (memory 1.00, disks 1.00, objects 0.03)"), "{text}");
    }

    #[test]
    fn tokens_become_seconds_and_seconds_become_money() {
        assert!((PRICES.gpu_seconds(5_000) - 5.0).abs() < 1e-12);
        assert!((PRICES.money(500.0) - 0.5).abs() < 1e-12);
    }
}
