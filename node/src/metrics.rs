//! What a node counts, as Prometheus shows it.
//!
//! Handles are taken out of their families once, by whoever counts; counting is one relaxed addition.

mod rates;

use std::collections::HashMap;
use std::sync::Arc;

use larder_protocol::session::Tier;
use prometheus::{
    Encoder, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

use crate::clock::Millis;
use crate::reuse::Lookup;
use crate::store::{Evictions, Usage};
use rates::{RateGauges, Rates};

pub use rates::TenantRates;

/// Every metric of a node.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    tokens_asked: IntCounterVec,
    tokens_hit: IntCounterVec,
    tokens_skipped: IntCounterVec,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    moved_bytes: IntCounterVec,
    fetched_chunks: IntCounterVec,
    given_up: IntCounterVec,
    evictions: IntCounterVec,
    arena_bytes: IntGaugeVec,
    placement_bytes: IntGaugeVec,
    held: IntGaugeVec,
    cached_chunks: IntGaugeVec,
    cached_bytes: IntGaugeVec,
    up: IntGaugeVec,
    disk_waiting_bytes: IntGaugeVec,
    disk_shed: IntCounterVec,
    session_ends: IntCounterVec,
    /// Lookups that the lookup log left out.
    pub unrecorded: IntCounter,
    rates: RateGauges,
}

/// The counters of one namespace of one tenant.
#[derive(Debug)]
struct NamespaceMetrics {
    fingerprint: String,
    asked: IntCounter,
    asked_preempted: IntCounter,
    /// From memory, disk, peers.
    hit: [IntCounter; 3],
    hit_preempted: [IntCounter; 3],
    skipped: IntCounter,
}

/// The gauges and counters of one actor.
#[derive(Debug)]
pub struct ActorMetrics {
    metrics: Metrics,
    device: String,
    counted: Evictions,
    namespaces: HashMap<u32, NamespaceMetrics>,
    rates: Rates,
    requests: HashMap<(&'static str, Outcome), (IntCounter, Histogram)>,
    leased_bytes: IntCounter,
    committed_bytes: IntCounter,
    /// By [`Placed`].
    fetched: [IntCounter; 4],
    counted_given_up: u64,
    counted_shed: u64,
}

/// Prompt tokens that a lookup found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hit {
    /// In this node's memory.
    pub in_memory: u64,
    /// On this node's disk.
    pub on_disk: u64,
    /// In others.
    pub from_peers: u64,
}

/// What became of a chunk that was to be fetched from another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    /// It is kept, and the holder gives its copy up.
    Migrated,
    /// It is kept.
    Replicated,
    /// It stays only as long as it is read.
    Passed,
    /// It did not come.
    Missed,
}

/// What becomes of blocks when bytes move between engine and node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Movement {
    /// An engine handed blocks over.
    Committed,
    /// An engine may read blocks.
    Leased,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Done.
    Done,
    /// Nothing was done, because there was too much of something.
    Busy,
    /// Refused.
    Refused,
}

impl Metrics {
    /// Fresh metrics in a registry of their own.
    ///
    /// # Errors
    /// Where two metrics share a name.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let families = Families(&registry);
        let build =
            families.gauge("larder_build_info", "Always 1; the labels say what runs", &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let namespace = ["tenant", "namespace", "preempted"];
        let hit = ["tenant", "namespace", "preempted", "tier"];
        let skipped = "Prompt tokens of lookups whose caller could not use a hit";
        let moved = "Bytes of blocks committed by engines, or leased to them";
        let fetched = "Chunks wanted from other nodes, by what became of them";
        let given_up = "Chunks that moved to other nodes";
        let placed = "Bytes of the arena where the kernel says they are, and where they should be";
        let held =
            "What engines hold: sessions, leases, reservations, pins, processes that may still touch memory";
        let ended = "Requests of sessions, by how they ended";
        let arena = "Bytes of the arena, by what they are for";
        Ok(Self {
            tokens_asked: families.counter(
                "larder_tokens_asked_total",
                "Prompt tokens of all lookups",
                &namespace,
            )?,
            tokens_hit: families.counter("larder_tokens_hit_total", "Prompt tokens found, by tier", &hit)?,
            tokens_skipped: families.counter("larder_tokens_skipped_total", skipped, &namespace[..2])?,
            requests: families.counter("larder_requests_total", ended, &["request", "outcome"])?,
            request_seconds: families
                .seconds("larder_request_seconds", "Time to answer a session's request")?,
            moved_bytes: families.counter("larder_moved_bytes_total", moved, &["device", "movement"])?,
            fetched_chunks: families.counter(
                "larder_fetched_chunks_total",
                fetched,
                &["device", "placement"],
            )?,
            given_up: families.counter("larder_given_up_chunks_total", given_up, &["device"])?,
            disk_waiting_bytes: families.gauge(
                "larder_disk_waiting_bytes",
                "Bytes of chunks that wait to be written to disk",
                &["device"],
            )?,
            disk_shed: families.counter(
                "larder_disk_shed_chunks_total",
                "Chunks that were not written to disk because too many waited",
                &["device"],
            )?,
            evictions: families.counter(
                "larder_evicted_chunks_total",
                "Chunks evicted",
                &["device", "reason"],
            )?,
            arena_bytes: families.gauge("larder_arena_bytes", arena, &["device", "state"])?,
            placement_bytes: families.gauge("larder_arena_placement_bytes", placed, &["device", "place"])?,
            held: families.gauge("larder_held", held, &["device", "what"])?,
            cached_chunks: families.gauge("larder_cached_chunks", "Chunks in a tier", &["device", "tier"])?,
            cached_bytes: families.gauge(
                "larder_cached_bytes",
                "Bytes of chunks in a tier",
                &["device", "tier"],
            )?,
            up: families.gauge("larder_actor_up", "Whether the actor answers", &["device"])?,
            session_ends: families.counter(
                "larder_session_ends_total",
                "Sessions that ended",
                &["tenant", "how"],
            )?,
            unrecorded: families
                .single("larder_unrecorded_lookups_total", "Lookups that the lookup log left out")?,
            rates: RateGauges::new(&families)?,
            registry,
        })
    }

    /// Everything in Prometheus' text format.
    ///
    /// # Errors
    /// Where a metric cannot be written as text.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// The registry, for others that count in this node.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Counts the end of a session.
    pub fn session_ended(&self, tenant: &str, how: &str) {
        self.session_ends.with_label_values(&[tenant, how]).inc();
    }

    /// Notes whether an actor answers.
    pub fn actor_is_up(&self, device: u16, up: bool) {
        self.up.with_label_values(&[device.to_string()]).set(up.into());
    }

    /// Notes how many bytes of an actor's arena lie in a place.
    pub fn placed(&self, device: u16, place: &str, bytes: u64) {
        self.placement_bytes.with_label_values(&[&*device.to_string(), place]).set(bytes as i64);
    }

    /// The metrics of one actor.
    #[must_use]
    pub fn of_actor(&self, device: u16) -> ActorMetrics {
        let device = device.to_string();
        ActorMetrics {
            leased_bytes: self.moved_bytes.with_label_values(&[&*device, "leased"]),
            committed_bytes: self.moved_bytes.with_label_values(&[&*device, "committed"]),
            fetched: ["migrated", "replicated", "passed", "missed"]
                .map(|placement| self.fetched_chunks.with_label_values(&[&*device, placement])),
            counted_given_up: 0,
            counted_shed: 0,
            metrics: self.clone(),
            rates: self.rates.of_actor(&device),
            device,
            counted: Evictions::default(),
            namespaces: HashMap::new(),
            requests: HashMap::new(),
        }
    }
}

impl ActorMetrics {
    /// A namespace became known under this number.
    pub fn know(&mut self, number: u32, tenant: &str, fingerprint: &str) {
        let Metrics { tokens_asked, tokens_hit, tokens_skipped, .. } = &self.metrics;
        let hits = |preempted: &str| {
            [Tier::Host, Tier::Disk, Tier::Peer]
                .map(|tier| tokens_hit.with_label_values(&[tenant, fingerprint, preempted, tier_name(tier)]))
        };
        if self.namespaces.get(&number).is_some_and(|known| known.fingerprint == fingerprint) {
            return;
        }
        let known = NamespaceMetrics {
            fingerprint: fingerprint.to_owned(),
            asked: tokens_asked.with_label_values(&[tenant, fingerprint, "false"]),
            asked_preempted: tokens_asked.with_label_values(&[tenant, fingerprint, "true"]),
            hit: hits("false"),
            hit_preempted: hits("true"),
            skipped: tokens_skipped.with_label_values(&[tenant, fingerprint]),
        };
        self.namespaces.insert(number, known);
        self.rates.know(number, tenant, fingerprint);
    }

    /// Counts a lookup.
    pub fn looked_up(&self, namespace: u32, asked: u64, hit: Hit, preempted: bool, skipped: bool) {
        let Some(counters) = self.namespaces.get(&namespace) else { return };
        let count = |[in_memory, on_disk, from_peers]: &[IntCounter; 3]| {
            in_memory.inc_by(hit.in_memory);
            on_disk.inc_by(hit.on_disk);
            from_peers.inc_by(hit.from_peers);
        };
        if skipped {
            counters.skipped.inc_by(asked);
        } else if preempted {
            counters.asked_preempted.inc_by(asked);
            count(&counters.hit_preempted);
        } else {
            counters.asked.inc_by(asked);
            count(&counters.hit);
        }
    }

    /// Notes what a lookup could have used, for the hit rate of an infinite cache.
    pub fn could_reuse(&mut self, namespace: u32, lookup: Lookup<'_>, now: Millis) {
        self.rates.record(namespace, lookup, now);
    }

    /// Prompt tokens asked and hit so far.
    #[must_use]
    pub fn tokens(&self) -> (u64, u64) {
        let counters = || self.namespaces.values();
        let asked = counters().map(|counters| counters.asked.get() + counters.asked_preempted.get()).sum();
        let hit = counters().flat_map(|counters| counters.hit.iter().chain(&counters.hit_preempted));
        (asked, hit.map(IntCounter::get).sum())
    }

    /// Counts a request.
    pub fn requested(&mut self, request: &'static str, outcome: Outcome, seconds: f64) {
        let metrics = &self.metrics;
        let (count, time) = self.requests.entry((request, outcome)).or_insert_with(|| {
            let outcome = match outcome {
                Outcome::Done => "done",
                Outcome::Busy => "busy",
                Outcome::Refused => "refused",
            };
            let count = metrics.requests.with_label_values(&[request, outcome]);
            (count, metrics.request_seconds.with_label_values(&[request]))
        });
        count.inc();
        time.observe(seconds);
    }

    /// Counts bytes of blocks that moved.
    pub fn moved(&self, movement: Movement, bytes: u64) {
        match movement {
            Movement::Committed => self.committed_bytes.inc_by(bytes),
            Movement::Leased => self.leased_bytes.inc_by(bytes),
        }
    }

    /// Counts a chunk that was to be fetched.
    pub fn placed_fetched(&self, placed: Placed) {
        self.fetched[placed as usize].inc();
    }

    /// Brings the gauges up to date, and says how much the tenants hit.
    pub fn observe(&mut self, usage: &Usage, now: Millis) -> Vec<TenantRates> {
        let device = &*self.device;
        let metrics = &self.metrics;
        let set = |family: &IntGaugeVec, label: &str, value: u64| {
            family.with_label_values(&[device, label]).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&metrics.arena_bytes, "total", usage.bytes.total);
        set(&metrics.arena_bytes, "free", usage.bytes.free);
        set(&metrics.arena_bytes, "used", usage.bytes.used);
        set(&metrics.arena_bytes, "quarantined", usage.bytes.quarantined);
        set(&metrics.arena_bytes, "pinned", usage.pinned_bytes);
        set(&metrics.arena_bytes, "passing", usage.passing_bytes);
        set(&metrics.held, "fetches", usage.fetches);
        set(&metrics.held, "grants", usage.grants);
        set(&metrics.held, "sessions", usage.sessions);
        set(&metrics.held, "leases", usage.leases);
        set(&metrics.held, "reservations", usage.reservations);
        set(&metrics.held, "pins", usage.pins);
        set(&metrics.held, "lingering_processes", usage.lingering_processes);
        set(&metrics.cached_chunks, tier_name(Tier::Host), usage.cached_chunks);
        set(&metrics.cached_bytes, tier_name(Tier::Host), usage.cached_bytes);
        if let Some(disk) = usage.disk {
            set(&metrics.cached_chunks, tier_name(Tier::Disk), disk.chunks);
            metrics.disk_waiting_bytes.with_label_values(&[device]).set(disk.waiting_bytes as i64);
            metrics.disk_shed.with_label_values(&[device]).inc_by(disk.shed - self.counted_shed);
            self.counted_shed = disk.shed;
        }
        let Evictions { watermark, need, clearing } = usage.evictions;
        let reasons = [
            ("watermark", watermark - self.counted.watermark),
            ("need", need - self.counted.need),
            ("clearing", clearing - self.counted.clearing),
        ];
        for (reason, more) in reasons {
            metrics.evictions.with_label_values(&[device, reason]).inc_by(more);
        }
        self.counted = usage.evictions;
        metrics.given_up.with_label_values(&[device]).inc_by(usage.given_up - self.counted_given_up);
        self.counted_given_up = usage.given_up;
        self.rates.observe(now)
    }
}

/// Makes families of metrics and registers them.
struct Families<'a>(&'a Registry);

impl Families<'_> {
    fn counter(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
        let family = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn single(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        let counter = IntCounter::new(name, help)?;
        self.0.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    fn gauge(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
        let family = IntGaugeVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn rate(&self, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec, prometheus::Error> {
        let family = GaugeVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn seconds(&self, name: &str, help: &str) -> Result<HistogramVec, prometheus::Error> {
        let options = HistogramOpts::new(name, help).buckets(REQUEST_BUCKETS.to_vec());
        let family = HistogramVec::new(options, &["request"])?;
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }
}

/// A tier's name in metrics, commands and reports.
#[must_use]
pub fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Peer => "peer",
    }
}

/// The metrics of a node, shared by its threads.
pub type SharedMetrics = Arc<Metrics>;

/// Seconds, from a microsecond to a tenth: a request that copies nothing takes a few microseconds.
const REQUEST_BUCKETS: [f64; 11] = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 5e-4, 2e-3, 1e-2, 0.1];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_rendered() {
        let metrics = Metrics::new().unwrap();
        let mut actor = metrics.of_actor(0);
        actor.know(3, "team", "00ff");
        actor.looked_up(3, 100, Hit { in_memory: 40, on_disk: 32, from_peers: 16 }, false, false);
        actor.looked_up(3, 100, Hit::default(), false, true);
        let evictions = Evictions { watermark: 5, ..Evictions::default() };
        actor.observe(&Usage { evictions, ..Usage::default() }, Millis(0));
        actor.observe(&Usage { evictions, ..Usage::default() }, Millis(0));
        let text = metrics.render().unwrap();
        let labels = r#"namespace="00ff",preempted="false",tenant="team""#;
        assert!(text.contains(&format!("larder_tokens_asked_total{{{labels}}} 100")), "{text}");
        assert!(text.contains(&format!("larder_tokens_hit_total{{{labels},tier=\"host\"}} 40")), "{text}");
        assert!(text.contains(&format!("larder_tokens_hit_total{{{labels},tier=\"disk\"}} 32")), "{text}");
        assert!(text.contains(&format!("larder_tokens_hit_total{{{labels},tier=\"peer\"}} 16")), "{text}");
        assert!(text.contains(r#"larder_evicted_chunks_total{device="0",reason="watermark"} 5"#), "{text}");
    }
}
