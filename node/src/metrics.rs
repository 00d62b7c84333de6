//! A node's metrics, as Prometheus shows them.
//!
//! Handles are taken out of their families once; counting is one relaxed addition. Gauges are updated when somebody asks. A
//! metric that is not in the table cannot be registered.

mod actor;
mod rates;
pub mod table;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use larder_net::http::Connections;
use larder_net::metrics::{Families, ProcessMetrics, TracingMetrics};
use larder_protocol::session::Tier;
use prometheus::{
    Counter, CounterVec, Encoder, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
    TextEncoder,
};

use crate::disk::{DiskFamilies, DiskMetrics};
use crate::object::ObjectMetrics;
use rates::RateGauges;

pub use actor::{ActorMetrics, HandedOver, Hit, Movement, Outcome, Placed};
pub use rates::TenantRates;

/// Every metric of a node.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    tokens_asked: IntCounterVec,
    tokens_hit: IntCounterVec,
    tokens_skipped: IntCounterVec,
    avoided_seconds: CounterVec,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    moved_bytes: IntCounterVec,
    fetched_chunks: IntCounterVec,
    given_up: IntCounterVec,
    misnamed: IntCounterVec,
    refused_names: IntCounterVec,
    restarts: IntCounterVec,
    handed_over_layers: IntCounterVec,
    handed_over_bytes: IntCounterVec,
    damage_reports: IntCounterVec,
    device_copies: IntCounterVec,
    device_bytes: IntCounterVec,
    device_evictions: IntCounterVec,
    follows_lost: IntCounterVec,
    evictions: IntCounterVec,
    residence_seconds: CounterVec,
    arena_bytes: IntGaugeVec,
    placement_bytes: IntGaugeVec,
    mismatches: IntGaugeVec,
    held: IntGaugeVec,
    cached_chunks: IntGaugeVec,
    cached_bytes: IntGaugeVec,
    up: IntGaugeVec,
    disk: DiskFamilies,
    /// The metrics of the object tier.
    pub object: ObjectMetrics,
    session_ends: IntCounterVec,
    tenant_bytes: IntGaugeVec,
    window_bytes: IntGaugeVec,
    process: ProcessMetrics,
    tracing: TracingMetrics,
    /// Connections to the HTTP endpoint.
    pub connections: Connections,
    known: KnownNamespaces,
    /// Lookups that the lookup log left out.
    pub unrecorded: IntCounter,
    rates: RateGauges,
}

/// How many actors know a namespace of a tenant: when none does any more, its counters go.
type KnownNamespaces = Arc<Mutex<HashMap<(String, String), usize>>>;

/// The counters of one namespace of one tenant.
#[derive(Debug)]
struct NamespaceMetrics {
    tenant: String,
    fingerprint: String,
    asked: IntCounter,
    asked_preempted: IntCounter,
    /// By [`HIT_TIERS`].
    hit: [IntCounter; 5],
    hit_preempted: [IntCounter; 5],
    skipped: IntCounter,
    avoided_seconds: Counter,
}

impl Metrics {
    /// Fresh metrics in a registry of their own.
    ///
    /// # Errors
    /// Fails if two metrics share a name.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let families = Families::new(&registry, table::NODE);
        let build = families.gauges("larder_build_info")?;
        build.with_label_values(&["node", env!("CARGO_PKG_VERSION")]).set(1);
        Ok(Self {
            tokens_asked: families.counters("larder_tokens_asked_total")?,
            tokens_hit: families.counters("larder_tokens_hit_total")?,
            tokens_skipped: families.counters("larder_tokens_skipped_total")?,
            avoided_seconds: families.sums("larder_recompute_avoided_seconds_total")?,
            requests: families.counters("larder_requests_total")?,
            request_seconds: families.histograms("larder_request_seconds")?,
            moved_bytes: families.counters("larder_moved_bytes_total")?,
            fetched_chunks: families.counters("larder_fetched_chunks_total")?,
            misnamed: families.counters("larder_misnamed_chunks_total")?,
            refused_names: families.counters("larder_refused_chunk_names_total")?,
            restarts: families.counters("larder_actor_restarts_total")?,
            given_up: families.counters("larder_given_up_chunks_total")?,
            handed_over_layers: families.counters("larder_handed_over_layers_total")?,
            handed_over_bytes: families.counters("larder_handed_over_bytes_total")?,
            damage_reports: families.counters("larder_damage_reports_total")?,
            device_copies: families.counters("larder_device_copies_total")?,
            device_bytes: families.counters("larder_device_copied_bytes_total")?,
            device_evictions: families.counters("larder_device_evicted_blocks_total")?,
            follows_lost: families.counters("larder_follows_lost_chunks_total")?,
            evictions: families.counters("larder_evicted_chunks_total")?,
            disk: DiskFamilies::new(&families)?,
            object: ObjectMetrics::new(&families)?,
            residence_seconds: families.sums("larder_evicted_residence_seconds_total")?,
            arena_bytes: families.gauges("larder_arena_bytes")?,
            placement_bytes: families.gauges("larder_arena_placement_bytes")?,
            mismatches: families.gauges("larder_placement_mismatches")?,
            held: families.gauges("larder_held")?,
            cached_chunks: families.gauges("larder_cached_chunks")?,
            cached_bytes: families.gauges("larder_cached_bytes")?,
            up: families.gauges("larder_actor_up")?,
            session_ends: families.counters("larder_session_ends_total")?,
            tenant_bytes: families.gauges("larder_tenant_arena_bytes")?,
            window_bytes: families.gauges("larder_tenant_window_bytes")?,
            process: ProcessMetrics::new(&families)?,
            connections: Connections::new(MAX_HTTP_CONNECTIONS, &families)?,
            tracing: TracingMetrics::new(&families)?,
            known: KnownNamespaces::default(),
            unrecorded: families.counter("larder_unrecorded_lookups_total")?,
            rates: RateGauges::new(&families)?,
            registry,
        })
    }

    /// Everything in Prometheus' text format.
    ///
    /// # Errors
    /// Fails if a metric cannot be written as text.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        self.process.show();
        self.tracing.show();
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

    /// The gauge of a tenant's write windows, whose limit is `limit_bytes`.
    #[must_use]
    pub fn windows(&self, tenant: &str, limit_bytes: u64) -> IntGauge {
        self.window_bytes.with_label_values(&[tenant, "limit"]).set(limit_bytes as i64);
        self.window_bytes.with_label_values(&[tenant, "held"])
    }

    /// Notes whether an actor answers.
    pub fn actor_is_up(&self, device: u16, up: bool) {
        self.up.with_label_values(&[device.to_string()]).set(up.into());
    }

    /// The metrics of one actor's disk tier.
    #[must_use]
    pub fn disk(&self, device: u16) -> DiskMetrics {
        self.disk.of_device(device)
    }

    /// The kinds of things that the machine could not give as it would be best.
    pub fn mismatched(&self, kind: &str) {
        self.mismatches.with_label_values(&[kind]).inc();
    }

    /// Notes how many bytes of an actor's arena lie in a place.
    pub fn placed(&self, device: u16, place: &str, bytes: u64) {
        self.placement_bytes.with_label_values(&[&*device.to_string(), place]).set(bytes as i64);
    }

    fn of_namespace(&self, tenant: &str, fingerprint: &str) -> NamespaceMetrics {
        let (mine, key) = ([tenant, fingerprint], (tenant.to_owned(), fingerprint.to_owned()));
        *self.known.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default() += 1;
        let asked = |preempted| self.tokens_asked.with_label_values(&[mine[0], mine[1], preempted]);
        let hit = |preempted| {
            HIT_TIERS.map(|tier| {
                self.tokens_hit.with_label_values(&[mine[0], mine[1], preempted, tier_name(tier)])
            })
        };
        NamespaceMetrics {
            tenant: tenant.to_owned(),
            fingerprint: fingerprint.to_owned(),
            asked: asked("false"),
            asked_preempted: asked("true"),
            hit: hit("false"),
            hit_preempted: hit("true"),
            skipped: self.tokens_skipped.with_label_values(&mine),
            avoided_seconds: self.avoided_seconds.with_label_values(&mine),
        }
    }

    /// Takes the counters of a namespace away, unless another actor knows it.
    fn forget(&self, NamespaceMetrics { tenant, fingerprint, .. }: &NamespaceMetrics) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (tenant.clone(), fingerprint.clone());
        let actors = known.get(&key).map_or(0, |actors| actors.saturating_sub(1));
        if actors > 0 {
            known.insert(key, actors);
            return;
        }
        known.remove(&key);
        // Errors: it is not there, which is what is wanted.
        let _ = self.tokens_skipped.remove_label_values(&[tenant, fingerprint]);
        let _ = self.avoided_seconds.remove_label_values(&[tenant, fingerprint]);
        for preempted in ["false", "true"] {
            let _ = self.tokens_asked.remove_label_values(&[tenant, fingerprint, preempted]);
            for tier in HIT_TIERS.map(tier_name) {
                let _ = self.tokens_hit.remove_label_values(&[tenant, fingerprint, preempted, tier]);
            }
        }
    }
}

/// A tier's name in metrics, commands and reports.
#[must_use]
pub fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Peer => "peer",
        Tier::Object => "object",
    }
}

/// The metrics of a node, shared by its threads.
pub type SharedMetrics = Arc<Metrics>;

/// Connections to the HTTP endpoint: each takes two descriptors.
const MAX_HTTP_CONNECTIONS: usize = 512;

/// The tiers in which lookups find tokens.
const HIT_TIERS: [Tier; 5] = [Tier::Device, Tier::Host, Tier::Disk, Tier::Peer, Tier::Object];

#[cfg(test)]
mod tests {
    use super::*;
    use larder_core::Millis;
    use larder_core::store::{Evictions, Usage};

    #[test]
    fn what_is_counted_is_rendered() {
        let metrics = Metrics::new().unwrap();
        let mut actor = metrics.of_actor(0);
        actor.know(3, "team", "00ff");
        actor.looked_up(
            3,
            100,
            Hit { on_device: 24, in_memory: 40, on_disk: 32, from_peers: 16, stored: 8 },
            false,
            false,
        );
        actor.looked_up(3, 100, Hit::default(), false, true);
        actor.avoided(3, 0.5);
        let evictions = Evictions { watermark: 5, ..Evictions::default() };
        actor.observe(&Usage { evictions, ..Usage::default() }, Millis(0));
        actor.observe(&Usage { evictions, ..Usage::default() }, Millis(0));
        let text = metrics.render().unwrap();
        let labels = r#"namespace="00ff",preempted="false",tenant="team""#;
        assert!(text.contains(&format!("larder_tokens_asked_total{{{labels}}} 100")), "{text}");
        assert!(text.contains(&format!("larder_tokens_hit_total{{{labels},tier=\"device\"}} 24")), "{text}");
        assert!(text.contains(&format!("larder_tokens_hit_total{{{labels},tier=\"host\"}} 40")), "{text}");
        assert!(text.contains(&format!("larder_tokens_hit_total{{{labels},tier=\"disk\"}} 32")), "{text}");
        assert!(text.contains(&format!("larder_tokens_hit_total{{{labels},tier=\"peer\"}} 16")), "{text}");
        assert!(text.contains(r#"larder_evicted_chunks_total{device="0",reason="watermark"} 5"#), "{text}");
        let labels = r#"namespace="00ff",tenant="team""#;
        assert!(text.contains(&format!("larder_recompute_avoided_seconds_total{{{labels}}} 0.5")), "{text}");
    }

    #[test]
    fn a_namespace_that_no_actor_knows_any_more_has_no_counters_left() {
        let metrics = Metrics::new().unwrap();
        let (mut one, mut other) = (metrics.of_actor(0), metrics.of_actor(1));
        one.know(0, "team", "00");
        other.know(0, "team", "00");
        one.know(0, "team", "01");
        let has = |fingerprint| metrics.render().unwrap().contains(&format!(r#"namespace="{fingerprint}""#));
        assert!(has("00") && has("01"), "the other actor knows it still");
        other.know(0, "team", "01");
        assert!(!has("00") && has("01"));
    }
}
