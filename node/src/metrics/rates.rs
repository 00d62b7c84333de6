//! Hit rates over sliding windows beside the rates of an infinite cache, for each namespace and tenant.
//!
//! Labels are bounded: the configuration names the tenants, a store knows a bounded number of namespaces at a time, and the
//! gauges of a namespace are removed when another namespace gets its number. Namespaces share no chunk, so a tenant's tokens are
//! the sum of its namespaces' tokens.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use larder_core::Millis;
use prometheus::{Gauge, GaugeVec, IntGaugeVec};
use serde::{Deserialize, Serialize};

use super::table::{Tenants, Value};
use crate::infinite_cache::{Lookup, Period, ReuseWindows, Tokens};

/// A tenant's hit rates in a window, real and for an infinite cache, as fractions of tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TenantRates {
    /// The tenant.
    pub tenant: String,
    /// The sliding window: `10m` or `1h`.
    pub window: String,
    /// Prompt tokens of the tenant's lookups.
    pub tokens_asked: u64,
    /// Hit rate of this cache.
    pub hit_rate: f64,
    /// Hit rate of an infinite cache of all nodes together. If it is close to `hit_rate`, more memory brings nothing.
    pub infinite_hit_rate: f64,
}

/// The lookups of one actor, by namespace.
#[derive(Debug)]
pub(super) struct Rates {
    of_namespaces: [GaugeVec; 2],
    of_tenants: [GaugeVec; 2],
    tenant_tokens: IntGaugeVec,
    device: String,
    namespaces: HashMap<u32, Namespace>,
    /// The tenants whose rates are shown.
    shown: BTreeSet<String>,
}

#[derive(Debug)]
struct Namespace {
    tenant: String,
    fingerprint: String,
    reuse: ReuseWindows,
}

impl Rates {
    pub(super) fn new(value: &Value, tenants: &Tenants, device: &str) -> Self {
        Self {
            of_namespaces: [&value.hit_rate, &value.infinite_hit_rate].map(Clone::clone),
            of_tenants: [&tenants.hit_rate, &tenants.infinite_hit_rate].map(Clone::clone),
            tenant_tokens: tenants.window_tokens.clone(),
            device: device.to_owned(),
            namespaces: HashMap::new(),
            shown: BTreeSet::new(),
        }
    }

    /// Notes the namespace of a number. Another namespace may have had the number before.
    pub(super) fn know(&mut self, number: u32, tenant: &str, fingerprint: &str) {
        let (tenant, fingerprint) = (tenant.to_owned(), fingerprint.to_owned());
        self.forget(number);
        self.namespaces.insert(number, Namespace { tenant, fingerprint, reuse: ReuseWindows::default() });
    }

    /// Removes the gauges of the namespace of a number.
    pub(super) fn forget(&mut self, number: u32) {
        let Some(forgotten) = self.namespaces.remove(&number) else { return };
        for (gauges, window) in self.of_namespaces.iter().flat_map(|g| Period::ALL.map(|w| (g, w))) {
            let Namespace { tenant, fingerprint, .. } = &forgotten;
            // An error: nobody has read the gauge yet, so it does not exist.
            let _ = gauges.remove_label_values(&[tenant, fingerprint, &self.device, window.as_str()]);
        }
    }

    /// Counts a lookup.
    pub(super) fn record(&mut self, namespace: u32, lookup: Lookup<'_>, now: Millis) {
        if let Some(known) = self.namespaces.get_mut(&namespace) {
            known.reuse.record(lookup, now);
        }
    }

    /// Updates the gauges, and returns the tenants' rates.
    pub(super) fn observe(&mut self, now: Millis) -> Vec<TenantRates> {
        let mut tenants: BTreeMap<(String, &'static str), Tokens> = BTreeMap::new();
        for Namespace { tenant, fingerprint, reuse } in self.namespaces.values_mut() {
            for window in Period::ALL {
                let tokens = reuse.tokens(window, now);
                let labels = [tenant.as_str(), fingerprint, &self.device, window.as_str()];
                set(self.of_namespaces.each_ref().map(|g| g.with_label_values(&labels)), tokens);
                *tenants.entry((tenant.clone(), window.as_str())).or_default() += tokens;
            }
        }
        let shown = tenants.keys().map(|(tenant, _)| tenant.clone()).collect();
        let before = std::mem::replace(&mut self.shown, shown);
        before.difference(&self.shown).for_each(|tenant| self.forget_tenant(tenant));
        let rates = |((tenant, window), tokens): ((String, &'static str), Tokens)| {
            let labels = [tenant.as_str(), &self.device, window];
            set(self.of_tenants.each_ref().map(|g| g.with_label_values(&labels)), tokens);
            let Tokens { asked, hit, reusable } = tokens;
            for (which, tokens) in TOKENS.into_iter().zip([asked, hit, reusable]) {
                let labels = [tenant.as_str(), &self.device, window, which];
                self.tenant_tokens.with_label_values(&labels).set(tokens.try_into().unwrap_or(i64::MAX));
            }
            TenantRates {
                tenant,
                window: window.to_owned(),
                tokens_asked: tokens.asked,
                hit_rate: tokens.hit_rate(),
                infinite_hit_rate: tokens.infinite_hit_rate(),
            }
        };
        tenants.into_iter().map(rates).collect()
    }

    /// Removes the gauges of a tenant without namespaces.
    fn forget_tenant(&self, tenant: &str) {
        for window in Period::ALL.map(Period::as_str) {
            let labels = [tenant, &self.device, window];
            // An error means that the gauge is not there, as wanted.
            self.of_tenants.iter().for_each(|gauges| _ = gauges.remove_label_values(&labels));
            for which in TOKENS {
                _ = self.tenant_tokens.remove_label_values(&[tenant, &self.device, window, which]);
            }
        }
    }
}

/// The kinds of tokens of lookups in a window.
const TOKENS: [&str; 3] = ["asked", "hit", "reusable"];

fn set([real, infinite]: [Gauge; 2], tokens: Tokens) {
    real.set(tokens.hit_rate());
    infinite.set(tokens.infinite_hit_rate());
}

#[cfg(test)]
mod tests {
    use larder_net::metrics::Part as _;
    use larder_protocol::ChunkHash;
    use prometheus::{Registry, TextEncoder};

    use super::*;

    fn rates() -> (Registry, Rates) {
        let registry = Registry::new();
        let (value, tenants) = (Value::register(&registry).unwrap(), Tenants::register(&registry).unwrap());
        let rates = Rates::new(&value, &tenants, "0");
        (registry, rates)
    }

    fn ask(rates: &mut Rates, namespace: u32, chunk_tokens: u32, chunks: std::ops::Range<u8>, hit: u64) {
        let usable: Vec<ChunkHash> = chunks.map(|n| ChunkHash([n; 32])).collect();
        let tokens_asked = usable.len() as u64 * u64::from(chunk_tokens);
        let tokens_hit = hit * u64::from(chunk_tokens);
        let lookup = Lookup { usable: &usable, chunk_tokens, tokens_asked, tokens_hit };
        rates.record(namespace, lookup, Millis(0));
    }

    fn text(registry: &Registry) -> String {
        TextEncoder::new().encode_to_string(&registry.gather()).unwrap()
    }

    #[test]
    fn a_tenant_has_the_sum_of_its_namespaces_whatever_the_size_of_their_chunks() {
        let (registry, mut rates) = rates();
        rates.know(0, "red", "00");
        rates.know(1, "red", "01");
        rates.know(2, "blue", "02");
        for _ in 0..2 {
            ask(&mut rates, 0, 16, 0..40, 10);
            ask(&mut rates, 1, 48, 0..40, 0);
        }
        ask(&mut rates, 2, 16, 0..40, 0);
        let found = rates.observe(Millis(0));
        let row = |tenant: &str| found.iter().find(|row| row.tenant == tenant && row.window == "1h").unwrap();
        assert_eq!(row("red").tokens_asked, 2 * 40 * (16 + 48));
        assert!((row("red").hit_rate - 0.0625).abs() < 1e-9, "{found:?}");
        // 30 of 80 chunks of 16 tokens were new, and 40 of 80 chunks of 48 tokens.
        assert!((row("red").infinite_hit_rate - 2_720.0 / 5_120.0).abs() < 0.02, "{found:?}");
        assert!(row("blue").infinite_hit_rate < 0.02, "each of its chunks came once: {found:?}");
        let text = text(&registry);
        assert!(text.contains(r#"larder_tenant_hit_rate{device="0",tenant="red",window="10m"} 0.0625"#));
        assert!(text.contains(
            r#"larder_tenant_window_tokens{device="0",tenant="red",tokens="hit",window="10m"} 320"#
        ));
        assert!(text.contains(r#"larder_hit_rate{device="0",namespace="01",tenant="red",window="1h"} 0"#));
    }

    #[test]
    fn a_tenant_whose_namespaces_gave_their_numbers_to_others_has_no_gauges_left() {
        let (registry, mut rates) = rates();
        for tenant in ["red", "blue"] {
            rates.know(0, tenant, "00");
            assert!(rates.observe(Millis(0)).iter().all(|row| row.tenant == tenant));
        }
        let text = text(&registry);
        assert!(!text.contains("red") && text.contains("blue"), "{text}");
    }

    #[test]
    fn a_namespace_that_gave_its_number_to_another_has_no_gauges_left() {
        let (registry, mut rates) = rates();
        for n in 0..5_000 {
            rates.know(n % 8, "red", &format!("{n:04x}"));
            rates.observe(Millis(0));
        }
        let text = text(&registry);
        let lines = text.lines().filter(|line| line.starts_with("larder_"));
        assert_eq!(lines.count(), ((8 + 1) * 2 + 3) * Period::ALL.len(), "{text}");
    }
}
