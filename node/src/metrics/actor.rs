//! What one actor counts.

use std::collections::HashMap;

use larder_core::reports::Reporter;
use larder_core::store::{Evictions, Usage};
use larder_core::{LaneCopy, Millis};
use larder_protocol::session::{Checked, Tier};
use prometheus::{Histogram, IntCounter, IntGaugeVec};

use super::rates::{Rates, TenantRates};
use super::{Metrics, NamespaceMetrics, table, tier_name};
use crate::reuse::Lookup;

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
    counted_misnamed: u64,
    counted_refused_names: u64,
    /// Pieces and bytes, by [`HandedOver`].
    handed_over: [(IntCounter, IntCounter); 3],
    /// By [`LaneCopy`].
    device_copies: [IntCounter; 5],
    /// Bytes loaded, saved, promoted, and loaded from the tier.
    device_bytes: [IntCounter; 4],
    reports: HashMap<(&'static str, &'static str), IntCounter>,
    counted_device_evictions: u64,
    counted_lost: u64,
    counted_shed: u64,
    counted_unstored: u64,
}

/// Prompt tokens that a lookup found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hit {
    /// In GPU memory that this node owns.
    pub on_device: u64,
    /// In this node's memory.
    pub in_memory: u64,
    /// On this node's disk.
    pub on_disk: u64,
    /// In others.
    pub from_peers: u64,
    /// In the object store.
    pub stored: u64,
}

/// The result for a chunk to be fetched from another node.
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

/// The direction in which bytes move between engine and node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Movement {
    /// An engine handed blocks over.
    Committed,
    /// An engine may read blocks.
    Leased,
}

/// The place of a hand-over of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandedOver {
    /// An engine gave them, ahead of their commit.
    Given,
    /// They were sent to a node that follows them.
    Sent,
    /// They came from the node whose engine gave them.
    Came,
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
    /// The metrics of one actor.
    #[must_use]
    pub fn of_actor(&self, device: u16) -> ActorMetrics {
        let device = device.to_string();
        // There from the start, so that the first fault is an increase.
        self.restarts.with_label_values(&[&*device]);
        ActorMetrics {
            leased_bytes: self.moved_bytes.with_label_values(&[&*device, "leased"]),
            committed_bytes: self.moved_bytes.with_label_values(&[&*device, "committed"]),
            fetched: ["migrated", "replicated", "passed", "missed"]
                .map(|placement| self.fetched_chunks.with_label_values(&[&*device, placement])),
            counted_given_up: 0,
            counted_misnamed: 0,
            counted_refused_names: 0,
            handed_over: table::HANDED_OVER.map(|how| {
                (
                    self.handed_over_layers.with_label_values(&[&*device, how]),
                    self.handed_over_bytes.with_label_values(&[&*device, how]),
                )
            }),
            device_copies: table::DEVICE_COPIES
                .map(|how| self.device_copies.with_label_values(&[&*device, how])),
            device_bytes: table::DEVICE_DIRECTIONS
                .map(|direction| self.device_bytes.with_label_values(&[&*device, direction])),
            reports: table::REPORTED_BY
                .iter()
                .flat_map(|&by| table::REPORT_FINDINGS.iter().map(move |&found| (by, found)))
                .map(|(by, found)| {
                    ((by, found), self.damage_reports.with_label_values(&[&*device, by, found]))
                })
                .collect(),
            counted_device_evictions: 0,
            counted_lost: 0,
            counted_shed: 0,
            counted_unstored: 0,
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
    /// The actor lost its store to a fault: the store's counts begin at nothing again.
    pub fn life_ended(&mut self) {
        self.metrics.restarts.with_label_values(&[&self.device]).inc();
        self.counted = Evictions::default();
        let counted = [
            &mut self.counted_given_up,
            &mut self.counted_misnamed,
            &mut self.counted_refused_names,
            &mut self.counted_lost,
            &mut self.counted_shed,
            &mut self.counted_unstored,
        ];
        counted.into_iter().for_each(|counted| *counted = 0);
    }

    /// A namespace became known under this number, which another one may have had.
    pub fn know(&mut self, number: u32, tenant: &str, fingerprint: &str) {
        if self.namespaces.get(&number).is_some_and(|known| known.fingerprint == fingerprint) {
            return;
        }
        let known = self.metrics.of_namespace(tenant, fingerprint);
        if let Some(forgotten) = self.namespaces.insert(number, known) {
            self.metrics.forget(&forgotten);
        }
        self.rates.know(number, tenant, fingerprint);
    }

    /// Counts a lookup.
    pub fn looked_up(&self, namespace: u32, asked: u64, hit: Hit, preempted: bool, skipped: bool) {
        let Some(counters) = self.namespaces.get(&namespace) else { return };
        let count = |[on_device, in_memory, on_disk, from_peers, stored]: &[IntCounter; 5]| {
            on_device.inc_by(hit.on_device);
            in_memory.inc_by(hit.in_memory);
            on_disk.inc_by(hit.on_disk);
            from_peers.inc_by(hit.from_peers);
            stored.inc_by(hit.stored);
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

    /// Counts seconds of prefill that a hit saves.
    pub fn avoided(&self, namespace: u32, seconds: f64) {
        if let Some(counters) = self.namespaces.get(&namespace) {
            counters.avoided_seconds.inc_by(seconds);
        }
    }

    /// Notes the chunks of a lookup, for the hit rate of an infinite cache.
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

    /// Counts a report of damage with its verdict; `None`: too many chunks are being verified already.
    pub fn reported(&self, by: &Reporter, found: Option<Checked>) {
        let found = match found {
            Some(Checked::Damaged) => "damaged",
            Some(Checked::Right) => "right",
            Some(Checked::Nothing) => "nothing",
            None => "not_examined",
        };
        if let Some(counter) = self.reports.get(&(by.name(), found)) {
            counter.inc();
        }
    }

    /// Counts a chunk that was to be fetched.
    pub fn placed_fetched(&self, placed: Placed) {
        self.fetched[placed as usize].inc();
    }

    /// Counts layers that were handed over: pieces of blocks, and their bytes.
    pub fn handed_over(&self, how: HandedOver, pieces: u64, bytes: u64) {
        let (layers, all_bytes) = &self.handed_over[how as usize];
        layers.inc_by(pieces);
        all_bytes.inc_by(bytes);
    }

    /// Counts a copy by a device, and the bytes that it brought where it went well.
    pub fn lane_copied(&self, how: LaneCopy, bytes: u64) {
        self.device_copies[how as usize].inc();
        match how {
            LaneCopy::Loaded | LaneCopy::Saved | LaneCopy::Promoted => {
                self.device_bytes[how as usize].inc_by(bytes);
            }
            LaneCopy::Failed | LaneCopy::Stalled => {}
        }
    }

    /// Counts bytes that a load takes from the device tier.
    pub fn read_from_tier(&self, bytes: u64) {
        self.device_bytes[3].inc_by(bytes);
    }

    /// Notes how many bytes of extents a tenant holds, and may hold.
    pub fn tenant_holds(&self, tenant: &str, held: u64, limit: u64) {
        for (state, bytes) in [("held", held), ("limit", limit)] {
            let gauge = self.metrics.tenant_bytes.with_label_values(&[tenant, &self.device, state]);
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        // Seen before the first of its sessions ends, so that a rate misses none.
        for how in table::SESSION_ENDS {
            self.metrics.session_ends.with_label_values(&[tenant, how]);
        }
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
        set(&metrics.held, "follows", usage.follows);
        set(&metrics.held, "device_copies", usage.device_copies);
        set(&metrics.held, "sessions", usage.sessions);
        set(&metrics.held, "leases", usage.leases);
        set(&metrics.held, "reservations", usage.reservations);
        set(&metrics.held, "pins", usage.pins);
        set(&metrics.held, "lingering_processes", usage.lingering_processes);
        let on_device = usage.device_tier;
        set(&metrics.cached_chunks, tier_name(Tier::Device), on_device.blocks);
        set(&metrics.cached_bytes, tier_name(Tier::Device), on_device.used_bytes);
        let evicted = on_device.evicted - self.counted_device_evictions;
        metrics.device_evictions.with_label_values(&[device]).inc_by(evicted);
        self.counted_device_evictions = on_device.evicted;
        set(&metrics.cached_chunks, tier_name(Tier::Host), usage.cached_chunks);
        set(&metrics.cached_bytes, tier_name(Tier::Host), usage.cached_bytes);
        if let Some(disk) = usage.disk {
            set(&metrics.cached_chunks, tier_name(Tier::Disk), disk.chunks);
            metrics.disk.waiting_bytes.with_label_values(&[device]).set(disk.waiting_bytes as i64);
            metrics.disk.shed.with_label_values(&[device]).inc_by(disk.shed - self.counted_shed);
            self.counted_shed = disk.shed;
        }
        if let Some(object) = usage.object {
            metrics.object.waiting_bytes.with_label_values(&[device]).set(object.waiting_bytes as i64);
            metrics.object.shed.with_label_values(&[device]).inc_by(object.shed - self.counted_unstored);
            self.counted_unstored = object.shed;
        }
        let Evictions { watermark, need, clearing, resided_ms } = usage.evictions;
        let reasons = [
            ("watermark", watermark - self.counted.watermark),
            ("need", need - self.counted.need),
            ("clearing", clearing - self.counted.clearing),
        ];
        for (reason, more) in reasons {
            metrics.evictions.with_label_values(&[device, reason]).inc_by(more);
        }
        let resided_ms = resided_ms - self.counted.resided_ms;
        metrics.residence_seconds.with_label_values(&[device]).inc_by(resided_ms as f64 / 1e3);
        self.counted = usage.evictions;
        metrics.given_up.with_label_values(&[device]).inc_by(usage.given_up - self.counted_given_up);
        self.counted_given_up = usage.given_up;
        let misnamed = usage.misnamed - self.counted_misnamed;
        metrics.misnamed.with_label_values(&[device]).inc_by(misnamed);
        self.counted_misnamed = usage.misnamed;
        let refused_names = usage.refused_names - self.counted_refused_names;
        metrics.refused_names.with_label_values(&[device]).inc_by(refused_names);
        self.counted_refused_names = usage.refused_names;
        let lost = usage.follows_lost - self.counted_lost;
        metrics.follows_lost.with_label_values(&[device]).inc_by(lost);
        self.counted_lost = usage.follows_lost;
        self.rates.observe(now)
    }
}
