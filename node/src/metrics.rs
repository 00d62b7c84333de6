//! A node's metrics, as Prometheus shows them.
//!
//! Handles are taken out of their families once, so counting is one relaxed addition. Gauges are updated when somebody asks. Only
//! metrics in the table can be registered.

mod actor;
mod rates;
pub mod table;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use larder_net::http::Connections;
use larder_net::metrics::{Part as _, ProcessMetrics, TracingMetrics};
use larder_protocol::session::Tier;
use prometheus::{Counter, Error, IntCounter, IntGauge, Registry, TextEncoder};
use rustix::process::{Resource, getrlimit};

use crate::object::ObjectMetrics;
use table::{Operations, Recording, Tenants, Tiers, Value};

pub use actor::{ActorMetrics, Outcome};
pub use rates::TenantRates;

/// Every metric of a node.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    value: Value,
    operations: Operations,
    tiers: Tiers,
    tenants: Tenants,
    /// The metrics of the object tier; none if the node has no such tier.
    pub object: OnceLock<ObjectMetrics>,
    recording: Recording,
    process: ProcessMetrics,
    tracing: TracingMetrics,
    /// Connections to the HTTP endpoint.
    pub connections: Connections,
    known: KnownNamespaces,
}

/// How many actors know a namespace of a tenant. When no actor knows it any more, its counters are removed.
type KnownNamespaces = Arc<Mutex<HashMap<(String, String), usize>>>;

/// The counters of one namespace of one tenant. Pairs of counters are indexed as [`PREEMPTED`].
#[derive(Debug)]
struct NamespaceMetrics {
    tenant: String,
    fingerprint: String,
    asked: [IntCounter; 2],
    /// Indexed by preemption, then as [`HIT_TIERS`].
    hit: [[IntCounter; 5]; 2],
    skipped: IntCounter,
    avoided_seconds: Counter,
}

impl Metrics {
    /// Fresh metrics in a registry of their own.
    ///
    /// # Errors
    /// Fails if two metrics share a name.
    pub fn new() -> Result<Self, Error> {
        let registry = Registry::new();
        let operations = Operations::register(&registry)?;
        operations.build.with_label_values(&["node", env!("CARGO_PKG_VERSION")]).set(1);
        Ok(Self {
            value: Value::register(&registry)?,
            operations,
            tiers: Tiers::register(&registry)?,
            tenants: Tenants::register(&registry)?,
            object: OnceLock::new(),
            recording: Recording::register(&registry)?,
            process: ProcessMetrics::register(&registry)?,
            tracing: TracingMetrics::register(&registry)?,
            connections: Connections::new(most_http_connections(), &registry)?,
            known: KnownNamespaces::default(),
            registry,
        })
    }

    /// Everything in Prometheus' text format.
    ///
    /// # Errors
    /// Fails if a metric cannot be written as text.
    pub fn render(&self) -> Result<String, Error> {
        self.process.show();
        self.tracing.show();
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    /// The registry, for other parts of the node that count.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Registers the metrics of the object tier.
    ///
    /// # Errors
    /// Fails if they are registered already.
    pub fn add_object_tier(&self) -> Result<ObjectMetrics, Error> {
        let object = ObjectMetrics::register(&self.registry)?;
        Ok(self.object.get_or_init(|| object).clone())
    }

    /// Counts the end of a session.
    pub fn session_ended(&self, tenant: &str, how: &str) {
        self.operations.session_ends.with_label_values(&[tenant, how]).inc();
    }

    /// The gauge of a tenant's write windows, whose limit is `limit_bytes`.
    pub fn windows(&self, tenant: &str, limit_bytes: u64) -> IntGauge {
        self.tenants.window_bytes.with_label_values(&[tenant, "limit"]).set(limit_bytes as i64);
        self.tenants.window_bytes.with_label_values(&[tenant, "held"])
    }

    /// Removes the gauges of a tenant's write windows.
    pub fn tenant_left(&self, tenant: &str) {
        for which in ["limit", "held"] {
            // An error: the gauge was never shown.
            _ = self.tenants.window_bytes.remove_label_values(&[tenant, which]);
        }
    }

    /// Notes whether an actor answers.
    pub fn actor_is_up(&self, device: u16, up: bool) {
        self.operations.up.with_label_values(&[device.to_string()]).set(up.into());
    }

    /// The counter of lookups that the lookup log left out.
    pub fn unrecorded(&self) -> IntCounter {
        self.recording.unrecorded.clone()
    }

    /// Counts a part of the machine that is not in its best place, by kind.
    pub fn mismatched(&self, kind: &str) {
        self.tiers.mismatches.with_label_values(&[kind]).inc();
    }

    /// Notes how many bytes of an actor's arena lie in a place.
    pub fn placed(&self, device: u16, place: &str, bytes: u64) {
        self.tiers.placement_bytes.with_label_values(&[&*device.to_string(), place]).set(bytes as i64);
    }

    fn of_namespace(&self, tenant: &str, fingerprint: &str) -> NamespaceMetrics {
        let key = (tenant.to_owned(), fingerprint.to_owned());
        *larder_net::lock(&self.known).entry(key).or_default() += 1;
        let asked = |preempted| self.value.tokens_asked.with_label_values(&[tenant, fingerprint, preempted]);
        let hit = |preempted| {
            HIT_TIERS.map(|tier| {
                let labels = [tenant, fingerprint, preempted, tier.name()];
                self.value.tokens_hit.with_label_values(&labels)
            })
        };
        NamespaceMetrics {
            tenant: tenant.to_owned(),
            fingerprint: fingerprint.to_owned(),
            asked: PREEMPTED.map(asked),
            hit: PREEMPTED.map(hit),
            skipped: self.value.tokens_skipped.with_label_values(&[tenant, fingerprint]),
            avoided_seconds: self.value.avoided_seconds.with_label_values(&[tenant, fingerprint]),
        }
    }

    /// Removes the counters of a namespace, unless another actor knows the namespace.
    fn forget(&self, NamespaceMetrics { tenant, fingerprint, .. }: &NamespaceMetrics) {
        let mut known = larder_net::lock(&self.known);
        let key = (tenant.clone(), fingerprint.clone());
        let actors = known.get(&key).map_or(0, |actors| actors.saturating_sub(1));
        if actors > 0 {
            known.insert(key, actors);
            return;
        }
        known.remove(&key);
        // An error means that the counter is not there, as wanted.
        let _ = self.value.tokens_skipped.remove_label_values(&[tenant, fingerprint]);
        let _ = self.value.avoided_seconds.remove_label_values(&[tenant, fingerprint]);
        for preempted in PREEMPTED {
            let _ = self.value.tokens_asked.remove_label_values(&[tenant, fingerprint, preempted]);
            for tier in HIT_TIERS.map(Tier::name) {
                let _ = self.value.tokens_hit.remove_label_values(&[tenant, fingerprint, preempted, tier]);
            }
        }
    }
}

/// The metrics of a node, shared by its threads.
pub type SharedMetrics = Arc<Metrics>;

/// Maximum number of connections to the HTTP endpoint. Each takes two descriptors, and engines need the others: strangers may have
/// a quarter of them.
fn most_http_connections() -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / 8).unwrap_or(usize::MAX).clamp(8, 512)
}

/// The values of the label that tells whether a lookup's sequence was preempted.
const PREEMPTED: [&str; 2] = ["false", "true"];

/// The tiers in which lookups find tokens.
const HIT_TIERS: [Tier; 5] = [Tier::Device, Tier::Host, Tier::Disk, Tier::Peer, Tier::Object];

#[cfg(test)]
mod tests {
    use super::*;
    use larder_core::store::{Evictions, Usage};
    use larder_core::{Counted, LookedUp, Millis};
    use larder_protocol::session::{Found, Lookup, Span};
    use larder_protocol::{Chain, ChunkHash, Fingerprint};

    fn lookup_of(namespace: u32) -> Lookup {
        Lookup {
            namespace,
            chain: Chain::from_root(ChunkHash([0; 32]), Vec::new()),
            prompt_tokens: 100,
            skip_read: false,
            preempted: false,
            tiers: Vec::new(),
            pin_ms: None,
            prefill_tokens_per_second: None,
        }
    }

    #[test]
    fn a_node_without_an_object_tier_has_no_metrics_of_one() {
        assert!(!Metrics::new().unwrap().render().unwrap().contains("larder_object_"));
    }

    #[test]
    fn what_is_counted_is_rendered() {
        let metrics = Metrics::new().unwrap();
        let mut actor = metrics.of_actor(0, None);
        actor.know(3, "team", "00ff");
        let ask = lookup_of(3);
        let spans = [(0, 3, Tier::Device), (3, 8, Tier::Host), (8, 12, Tier::Disk), (12, 14, Tier::Peer)];
        let spans = spans.map(|(from, to, tier)| Span { from, to, tier }).to_vec();
        let found = Found { tokens: 112, spans, pin: None };
        let lookup = LookedUp {
            at: Millis(0),
            ask: &ask,
            found: &found,
            fingerprint: Fingerprint([0xff; 32]),
            chunk_tokens: 8,
            prompt_tokens: 100,
            usable: &[],
        };
        actor.looked_up(&lookup);
        actor.looked_up(&LookedUp { ask: &Lookup { skip_read: true, ..ask.clone() }, ..lookup });
        let mut other = metrics.of_actor(1, None);
        other.know(3, "team", "00ff");
        assert_eq!((actor.tokens(), other.tokens()), ((100, 112), (0, 0)), "only one actor was asked");
        actor.count(&Counted::Avoided(3, 0.5));
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
    fn a_namespace_under_another_number_has_the_rates_of_its_last_life_alone() {
        let metrics = Metrics::new().unwrap();
        let mut actor = metrics.of_actor(0, None);
        let asked = |actor: &mut ActorMetrics, namespace, tokens| {
            let ask = lookup_of(namespace);
            let found = Found { tokens, spans: Vec::new(), pin: None };
            let fingerprint = Fingerprint([0xff; 32]);
            let (at, usable, chunk_tokens, prompt_tokens) = (Millis(0), &[], 8, 100);
            let (ask, found) = (&ask, &found);
            let lookup = LookedUp { at, ask, found, fingerprint, chunk_tokens, prompt_tokens, usable };
            actor.looked_up(&lookup);
        };
        for number in 0..20 {
            actor.know(number, "team", "00ff");
            asked(&mut actor, number, 100 - u64::from(number));
            let rates = actor.observe(&Usage::default(), Millis(0));
            assert!(rates.iter().all(|rates| rates.tokens_asked == 100), "{rates:?}");
            let rate = f64::from(100 - number) / 100.0;
            let labels = r#"device="0",namespace="00ff",tenant="team",window="1h""#;
            let text = metrics.render().unwrap();
            assert!(text.contains(&format!("larder_hit_rate{{{labels}}} {rate}\n")), "{rate}: {text}");
            assert!(text.contains(&format!(
                "_asked_total{{namespace=\"00ff\",preempted=\"false\",tenant=\"team\"}} {}00\n",
                number + 1
            )));
        }
        actor.know(0, "team", "00aa");
        asked(&mut actor, 19, 50);
        actor.know(1, "other", "00bb");
        for end in [|actor: &mut ActorMetrics| actor.tenant_left("team"), ActorMetrics::life_ended] {
            end(&mut actor);
            actor.observe(&Usage::default(), Millis(0));
            let text = metrics.render().unwrap();
            assert!(!text.contains("team"), "{text}");
        }
        assert!(!metrics.render().unwrap().contains("00bb"), "the store begins anew");
    }

    #[test]
    fn a_namespace_that_no_actor_knows_any_more_has_no_counters_left() {
        let metrics = Metrics::new().unwrap();
        let (mut one, mut other) = (metrics.of_actor(0, None), metrics.of_actor(1, None));
        one.know(0, "team", "00");
        other.know(0, "team", "00");
        one.know(0, "team", "01");
        let has = |fingerprint| metrics.render().unwrap().contains(&format!(r#"namespace="{fingerprint}""#));
        assert!(has("00") && has("01"), "the other actor knows it still");
        other.know(0, "team", "01");
        assert!(!has("00") && has("01"));
    }
}
