//! The metrics of one actor.

use std::collections::HashMap;
use std::mem;

use larder_core::placement::Placement;
use larder_core::reports::Reporter;
use larder_core::store::Usage;
use larder_core::store::policy::PolicyName;
use larder_core::{Counted, DeviceCopyEnd, LookedUp, Millis};
use larder_protocol::session::{Checked, Response, Tier};
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGaugeVec};
use strum::VariantNames;

use super::rates::{Rates, TenantRates};
use super::{HIT_TIERS, Metrics, NamespaceMetrics, table};
use crate::disk::DiskMetrics;
use crate::infinite_cache::Lookup;

/// The gauges and counters of one actor.
#[derive(Debug)]
pub struct ActorMetrics {
    metrics: Metrics,
    disk: Option<DiskMetrics>,
    device: String,
    /// The usage that was counted already.
    counted: Usage,
    namespaces: HashMap<u32, NamespaceMetrics>,
    /// Prompt tokens asked and hit so far. The counters of namespaces are those of all actors.
    tokens: (u64, u64),
    rates: Rates,
    requests: HashMap<(&'static str, Outcome), (IntCounter, Histogram)>,
    /// Bytes leased and committed.
    moved_bytes: [IntCounter; 2],
    /// Chunks migrated, replicated, passed, missed and forwarded.
    fetched: [IntCounter; 5],
    /// Layers handed over by engines, sent to other nodes, and received from them.
    handed_over_layers: [IntCounter; 3],
    handed_over_bytes: [IntCounter; 3],
    /// Indexed by [`DeviceCopyEnd`].
    device_copies: [IntCounter; 5],
    /// Bytes loaded, saved, promoted, and loaded from the tier.
    device_bytes: [IntCounter; 4],
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Outcome {
    /// Done.
    Done,
    /// Nothing was done, because a limit was reached.
    Busy,
    /// Refused.
    Refused,
}

impl Outcome {
    /// How a request with this answer ended.
    pub(crate) fn of(response: Option<&Response>) -> Self {
        match response {
            Some(Response::Busy(_)) => Self::Busy,
            Some(Response::Refused(_)) => Self::Refused,
            _ => Self::Done,
        }
    }

    /// The outcome's name in metrics and traces.
    pub(crate) fn name(self) -> &'static str {
        self.into()
    }
}

impl Metrics {
    /// The metrics of one actor, with those of its disk tier if it has one.
    pub fn of_actor(&self, device: u16, disk: Option<DiskMetrics>) -> ActorMetrics {
        let device = device.to_string();
        let (operations, tiers) = (&self.operations, &self.tiers);
        // These counters exist from the start, so that the first fault is an increase.
        tiers.restarts.with_label_values(&[&device]);
        for policy in PolicyName::ALL {
            tiers.policy_changes.with_label_values(&[&*device, policy.as_str()]);
        }
        for (by, found) in
            Reporter::VARIANTS.iter().flat_map(|&by| table::REPORT_FINDINGS.map(|found| (by, found)))
        {
            operations.damage_reports.with_label_values(&[&*device, by, found]);
        }
        ActorMetrics {
            disk,
            moved_bytes: of_device(&operations.moved_bytes, &device, table::MOVEMENTS),
            fetched: of_device(&tiers.fetched_chunks, &device, table::PLACEMENTS),
            handed_over_layers: of_device(&tiers.handed_over_layers, &device, table::HANDED_OVER),
            handed_over_bytes: of_device(&tiers.handed_over_bytes, &device, table::HANDED_OVER),
            device_copies: of_device(&tiers.device_copies, &device, table::DEVICE_COPIES),
            device_bytes: of_device(&tiers.device_bytes, &device, table::DEVICE_DIRECTIONS),
            metrics: self.clone(),
            rates: Rates::new(&self.value, &self.tenants, &device),
            device,
            counted: Usage::default(),
            namespaces: HashMap::new(),
            tokens: (0, 0),
            requests: HashMap::new(),
        }
    }
}

impl ActorMetrics {
    /// Notes that the actor lost its store to a fault: the counts of a store begin at 0 again. The device tier stays.
    pub fn life_ended(&mut self) {
        self.metrics.tiers.restarts.with_label_values(&[&self.device]).inc();
        self.counted = Usage { device_tier: self.counted.device_tier, ..Usage::default() };
        self.forget(|_, _| true);
    }

    /// Notes the namespace of a number. Another namespace may have had the number before, and the namespace another number.
    pub fn know(&mut self, number: u32, tenant: &str, fingerprint: &str) {
        if self.namespaces.get(&number).is_some_and(|known| known.fingerprint == fingerprint) {
            return;
        }
        let known = self.metrics.of_namespace(tenant, fingerprint);
        self.forget(|before, gone| {
            before == number || (gone.tenant == tenant && gone.fingerprint == fingerprint)
        });
        self.namespaces.insert(number, known);
        self.rates.know(number, tenant, fingerprint);
    }

    fn forget(&mut self, is_gone: impl Fn(u32, &NamespaceMetrics) -> bool) {
        for (number, gone) in self.namespaces.extract_if(|&number, known| is_gone(number, known)) {
            self.metrics.forget(&gone);
            self.rates.forget(number);
        }
    }

    /// Counts a lookup, and notes its chunks for the hit rate of an infinite cache.
    pub fn looked_up(&mut self, lookup: &LookedUp<'_>) {
        let &LookedUp { ask, found, chunk_tokens, prompt_tokens, usable, .. } = lookup;
        let Some(counters) = self.namespaces.get(&ask.namespace) else { return };
        if ask.skip_read {
            return counters.skipped.inc_by(prompt_tokens);
        }
        let preempted = usize::from(ask.preempted);
        counters.asked[preempted].inc_by(prompt_tokens);
        self.tokens.0 += prompt_tokens;
        for (counter, tier) in counters.hit[preempted].iter().zip(HIT_TIERS) {
            let spans = found.spans.iter().filter(|span| span.tier == tier);
            let chunks: u64 = spans.map(|span| u64::from(span.to - span.from)).sum();
            let tokens = chunks * u64::from(chunk_tokens);
            counter.inc_by(tokens);
            self.tokens.1 += tokens;
        }
        let (tokens_asked, tokens_hit) = (prompt_tokens, found.tokens);
        let asked = Lookup { usable, chunk_tokens, tokens_asked, tokens_hit };
        self.rates.record(ask.namespace, asked, lookup.at);
    }

    /// Prompt tokens asked and hit so far.
    pub const fn tokens(&self) -> (u64, u64) {
        self.tokens
    }

    /// Counts a request.
    pub fn requested(&mut self, request: &'static str, outcome: Outcome, seconds: f64) {
        let operations = &self.metrics.operations;
        let (count, time) = self.requests.entry((request, outcome)).or_insert_with(|| {
            let count = operations.requests.with_label_values(&[request, outcome.name()]);
            (count, operations.request_seconds.with_label_values(&[request]))
        });
        count.inc();
        time.observe(seconds);
    }

    /// Counts an event that a core reports.
    pub fn count(&self, counted: &Counted) {
        match counted {
            Counted::Placed(placement) => self.fetched[placed(*placement)].inc(),
            Counted::NotWritten => self.not_written("undescribed"),
            Counted::Leased(bytes) => self.moved_bytes[0].inc_by(*bytes),
            Counted::Committed(bytes) => self.moved_bytes[1].inc_by(*bytes),
            Counted::Given(pieces, bytes) => self.handed_over(0, *pieces, *bytes),
            Counted::Sent(bytes) => self.handed_over(1, 1, *bytes),
            Counted::Came(pieces, bytes) => self.handed_over(2, *pieces, *bytes),
            Counted::ByDevice(how, bytes) => self.lane_copied(*how, *bytes),
            Counted::ReadFromTier(bytes) => self.device_bytes[3].inc_by(*bytes),
            Counted::Avoided(namespace, seconds) => {
                _ = self.namespaces.get(namespace).map(|counters| counters.avoided_seconds.inc_by(*seconds));
            }
            Counted::NameRefused => {
                self.metrics.tiers.refused_names.with_label_values(&[&*self.device]).inc();
            }
            Counted::PolicyChanged(to) => {
                self.metrics.tiers.policy_changes.with_label_values(&[&*self.device, to.as_str()]).inc();
            }
            Counted::Reported(by, found) => self.reported(by, *found),
        }
    }

    /// Counts a chunk that cannot be ordered to be written to disk, and why.
    pub fn not_written(&self, why: &'static str) {
        if let Some(disk) = &self.disk {
            disk.answered(why);
        }
    }

    /// Counts a report of damage with the node's finding. `found` is `None` if too many chunks are already being verified.
    fn reported(&self, by: &Reporter, found: Option<Checked>) {
        let found = found.map_or("not_examined", Into::into);
        let reports = &self.metrics.operations.damage_reports;
        reports.with_label_values(&[&*self.device, by.name(), found]).inc();
    }

    fn handed_over(&self, how: usize, pieces: u64, bytes: u64) {
        self.handed_over_layers[how].inc_by(pieces);
        self.handed_over_bytes[how].inc_by(bytes);
    }

    /// Counts a copy by a device, and its bytes if it succeeded.
    fn lane_copied(&self, how: DeviceCopyEnd, bytes: u64) {
        self.device_copies[how as usize].inc();
        match how {
            DeviceCopyEnd::Loaded | DeviceCopyEnd::Saved | DeviceCopyEnd::Promoted => {
                self.device_bytes[how as usize].inc_by(bytes);
            }
            DeviceCopyEnd::Failed | DeviceCopyEnd::Stalled => {}
        }
    }

    /// Notes how many bytes of extents a tenant holds, and may hold.
    pub fn tenant_holds(&self, tenant: &str, held: u64, limit: u64) {
        for (state, bytes) in [("held", held), ("limit", limit)] {
            let gauge = self.metrics.tenants.arena_bytes.with_label_values(&[tenant, &self.device, state]);
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        // These counters exist before the tenant's first session ends, so that a rate misses no end.
        for how in table::SESSION_ENDS {
            self.metrics.operations.session_ends.with_label_values(&[tenant, how]);
        }
    }

    /// Removes the gauges of a tenant's extents and namespaces.
    pub fn tenant_left(&mut self, tenant: &str) {
        self.forget(|_, known| known.tenant == tenant);
        for state in ["held", "limit"] {
            // An error: the gauge was never shown.
            _ = self.metrics.tenants.arena_bytes.remove_label_values(&[tenant, &self.device, state]);
        }
    }

    /// Shows the memory that remembered evictions and lookups take.
    pub fn remembers(&self, evictions: u64, lookups: u64) {
        for (what, bytes) in [("evictions", evictions), ("lookups", lookups)] {
            let gauge = self.metrics.tiers.remembered_bytes.with_label_values(&[&self.device, what]);
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    /// Updates the gauges, and returns the tenants' hit rates.
    pub fn observe(&mut self, usage: &Usage, now: Millis) -> Vec<TenantRates> {
        let (device, before) = (&*self.device, mem::replace(&mut self.counted, *usage));
        let Metrics { operations, tiers, object, .. } = &self.metrics;
        let set = |family: &IntGaugeVec, values: &[(&str, u64)]| {
            for &(label, value) in values {
                let gauge = family.with_label_values(&[device, label]);
                gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
            }
        };
        let arena = usage.bytes;
        set(
            &tiers.arena_bytes,
            &[
                ("total", arena.total),
                ("free", arena.free),
                ("used", arena.used),
                ("quarantined", arena.quarantined),
                ("pinned", usage.pinned_bytes),
                ("passing", usage.passing_bytes),
            ],
        );
        set(
            &operations.held,
            &[
                ("fetches", usage.fetches),
                ("grants", usage.grants),
                ("follows", usage.follows),
                ("device_copies", usage.device_copies),
                ("sessions", usage.sessions),
                ("leases", usage.leases),
                ("reservations", usage.reservations),
                ("pins", usage.pins),
                ("lingering_processes", usage.lingering_processes),
            ],
        );
        let (on_device, host) = (Tier::Device.name(), Tier::Host.name());
        let held_there = usage.device_tier;
        set(&tiers.cached_chunks, &[(on_device, held_there.blocks), (host, usage.cached_chunks)]);
        set(&tiers.cached_bytes, &[(on_device, held_there.used_bytes), (host, usage.cached_bytes)]);
        let more = |total: fn(&Usage) -> u64| total(usage) - total(&before);
        if let Some((used, disk)) = usage.disk.zip(self.disk.as_ref()) {
            set(&tiers.cached_chunks, &[(Tier::Disk.name(), used.chunks)]);
            disk.waiting_bytes.set(used.waiting_bytes as i64);
            disk.shed.inc_by(more(|usage| usage.disk.unwrap_or_default().shed));
        }
        if let Some((used, object)) = usage.object.zip(object.get()) {
            object.waiting_bytes.with_label_values(&[device]).set(used.waiting_bytes as i64);
            let shed = more(|usage| usage.object.unwrap_or_default().shed);
            object.shed.with_label_values(&[device]).inc_by(shed);
        }
        self.count_departures(usage, &before);
        self.rates.observe(now)
    }

    /// Counts the chunks that were evicted, forwarded or refused since `before`.
    fn count_departures(&self, usage: &Usage, before: &Usage) {
        let (device, tiers) = (&*self.device, &self.metrics.tiers);
        let more = |total: fn(&Usage) -> u64| total(usage) - total(before);
        for (reason, more) in [
            ("watermark", more(|usage| usage.evictions.watermark)),
            ("need", more(|usage| usage.evictions.need)),
            ("clearing", more(|usage| usage.evictions.clearing)),
        ] {
            tiers.evictions.with_label_values(&[device, reason]).inc_by(more);
        }
        let resided_ms = more(|usage| usage.evictions.resided_ms);
        tiers.residence_seconds.with_label_values(&[device]).inc_by(resided_ms as f64 / 1e3);
        for (how, more) in [
            ("offered", more(|usage| usage.forwards.offered)),
            ("sent", more(|usage| usage.forwards.taken)),
            ("taken", more(|usage| usage.forwards.taken_in)),
        ] {
            tiers.forwarded.with_label_values(&[device, how]).inc_by(more);
        }
        for (counter, more) in [
            (&tiers.forwarded_bytes, more(|usage| usage.forwards.taken_bytes)),
            (&tiers.device_evictions, more(|usage| usage.device_tier.evicted)),
            (&tiers.given_up, more(|usage| usage.given_up)),
            (&tiers.misnamed, more(|usage| usage.misnamed)),
            (&tiers.refused_names, more(|usage| usage.refused_names)),
            (&tiers.follows_lost, more(|usage| usage.follows_lost)),
        ] {
            counter.with_label_values(&[device]).inc_by(more);
        }
    }
}

/// The index of the counter for the placement of a fetched chunk.
fn placed(placement: Option<Placement>) -> usize {
    match placement {
        Some(Placement::Migrate) => 0,
        Some(Placement::Replicate) => 1,
        Some(Placement::Pass) => 2,
        None => 3,
        Some(Placement::Forwarded) => 4,
    }
}

fn of_device<const N: usize>(counters: &IntCounterVec, device: &str, values: [&str; N]) -> [IntCounter; N] {
    values.map(|value| counters.with_label_values(&[device, value]))
}
