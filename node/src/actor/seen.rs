//! What an actor shows of itself: to metrics, to operators, to admins who purge, and to those who try other caches.

use std::time::Duration;

use actix::Context;
use larder_core::lookups::{ChunkOutcome, LookupFilter, LookupRecord, OutcomeRun};
use larder_core::store::policy::PolicyName;
use larder_core::store::{
    NamespaceFacts, OtherNamespace, PinFacts, PurgedKeys, PurgedPage, RememberedEvictions, SessionFacts,
    Stay, Usage,
};
use larder_core::what_if::PastLookup;
use larder_core::{DrainProgress, Event, PurgeStep};
use larder_protocol::purge::PurgeScope;
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};

use super::{Client, DiskParts, GpuActor};
use crate::events::PAGE_CHUNKS;
use crate::metrics::TenantRates;

/// The recent lookups of an actor.
#[derive(Debug, Clone)]
pub struct PastSeen {
    /// Its last whole lookups, the oldest first.
    pub lookups: Vec<PastLookup>,
    /// Bytes of its disk tier; 0 if it has none, or it is closed.
    pub disk_bytes: u64,
}

/// An actor's last lookups.
#[derive(Debug, Clone)]
pub struct LookupsSeen {
    /// Each lookup, and the namespaces that resemble its own if one of its chunks was nowhere.
    pub records: Vec<(LookupRecord, Vec<OtherNamespace>)>,
    /// The last evictions.
    pub evictions: RememberedEvictions,
}

/// The chunks of a prompt that an actor has.
#[derive(Debug, Clone)]
pub struct ChainSeen {
    /// The outcome of each chunk; `None` for a namespace that the actor does not know.
    pub outcomes: Option<Vec<OutcomeRun>>,
    /// The namespaces that resemble this one, if a chunk is missing.
    pub others: Vec<OtherNamespace>,
    /// The keepers of the chunks in memory.
    pub stays: Vec<Stay>,
    /// For how long nobody had used the chunks that were evicted lately.
    pub evicted_after_ms: Option<u64>,
    /// The last evictions.
    pub evictions: RememberedEvictions,
}

/// An open session.
#[derive(Debug, Clone)]
pub struct SessionSeen {
    /// Its holdings.
    pub facts: SessionFacts,
    /// The engine behind it.
    pub client: Client,
    /// The namespaces that it registered.
    pub namespaces: Vec<Fingerprint>,
    /// Its last request, and the time since then.
    pub last: Option<(&'static str, Duration)>,
}

/// The holdings of sessions, pins and tenants in an actor.
#[derive(Debug, Clone)]
pub struct Holdings {
    /// Every open session.
    pub sessions: Vec<SessionSeen>,
    /// Every pin.
    pub pins: Vec<PinFacts>,
    /// Bytes of extents that each tenant holds and may hold, by number.
    pub tenants: Vec<(u64, u64)>,
}

/// The contents of an actor.
#[derive(Debug, Clone)]
pub struct ActorReport {
    /// In numbers.
    pub usage: Usage,
    /// The policy in force.
    pub policy: PolicyName,
    /// Prompt tokens of all lookups whose caller could use a hit.
    pub tokens_asked: u64,
    /// Prompt tokens that they found.
    pub tokens_hit: u64,
    /// Each tenant's recent hit rates.
    pub tenants: Vec<TenantRates>,
    /// Bytes of its disk tier that chunks have taken, and all of them; `None` if it has none, or it is closed.
    pub disk_fill: Option<(u64, u64)>,
    /// The reason why its disk tier is closed, if it is.
    pub disk_trouble: Option<String>,
}

impl GpuActor {
    /// The store's contents; updates the gauges.
    pub(crate) fn report(&mut self) -> ActorReport {
        let usage = self.core.usage();
        let tenants = self.metrics.observe(&usage, self.clock.now());
        let lookups = self.core.lookup_bytes() + self.past.bytes();
        self.metrics.remembers(self.core.store().remembered_bytes(), lookups);
        let of_tenants = self.core.tenants().iter().zip(self.core.store().tenant_bytes());
        for (tenant, (held, limit)) in of_tenants.filter(|(tenant, _)| !tenant.is_empty()) {
            self.metrics.tenant_holds(tenant, held, limit);
        }
        let (tokens_asked, tokens_hit) = self.metrics.tokens();
        let disk_fill = self.open_disk().map(|disk| (disk.tier.used_bytes(), disk.tier.capacity_bytes()));
        let closed = self.disk.as_ref().and_then(|disk| disk.tier.trouble());
        let disk_trouble = closed.or(self.disk_trouble.as_deref()).map(str::to_owned);
        let policy = self.core.store().policy();
        ActorReport { usage, policy, tokens_asked, tokens_hit, tenants, disk_fill, disk_trouble }
    }

    /// The lookups that can be played again.
    pub(crate) fn past(&mut self) -> PastSeen {
        PastSeen {
            lookups: self.past.lookups().cloned().collect(),
            disk_bytes: self.open_disk().map_or(0, |disk| disk.tier.capacity_bytes()),
        }
    }

    fn open_disk(&self) -> Option<&DiskParts> {
        self.disk.as_ref().filter(|disk| disk.tier.trouble().is_none())
    }

    /// The namespaces that it knows.
    pub(crate) fn namespaces(&mut self) -> Vec<NamespaceFacts> {
        self.core.store().namespaces().collect()
    }

    /// The holdings of its sessions and pins.
    pub(crate) fn holdings(&mut self) -> Holdings {
        let store = self.core.store();
        let now = self.clock.elapsed();
        let seen = |facts: SessionFacts| {
            let engine = self.clients.get(&facts.session);
            SessionSeen {
                client: engine.map(|engine| engine.client.clone()).unwrap_or_default(),
                namespaces: store.namespaces_of(facts.session).collect(),
                last: engine
                    .and_then(|engine| engine.last)
                    .map(|(request, at)| (request, now.saturating_sub(at))),
                facts,
            }
        };
        Holdings {
            sessions: store.session_facts().map(seen).collect(),
            pins: store.pin_facts(self.clock.now()).collect(),
            tenants: store.tenant_bytes(),
        }
    }

    /// A page of its chunks, from a position on, and the position of the next page; `None` after the last.
    pub(crate) fn page(&mut self, from: usize) -> (Vec<(Fingerprint, ChunkRef)>, Option<usize>) {
        self.core.store().held_from(from, PAGE_CHUNKS)
    }

    /// How far its drain is; `None` if there is none.
    pub(crate) fn drain_progress(&mut self) -> Option<DrainProgress> {
        self.core.drain_progress()
    }

    /// Its last lookups.
    pub(crate) fn last_lookups(&mut self, filter: &LookupFilter) -> LookupsSeen {
        let with_others = |record: LookupRecord| {
            let others = self.others_like(&record.fingerprint, &record.hashes, &record.outcomes);
            (record, others)
        };
        let records = self.core.last_lookups(filter).into_iter().map(with_others).collect();
        LookupsSeen { records, evictions: self.core.store().remembered_evictions() }
    }

    /// The chunks of a prompt that it has.
    pub(crate) fn chain(&mut self, fingerprint: &Fingerprint, hashes: &[ChunkHash]) -> ChainSeen {
        let store = self.core.store();
        let outcomes = store.has_of(fingerprint, hashes);
        let others = self.others_like(fingerprint, hashes, outcomes.as_deref().unwrap_or_default());
        ChainSeen {
            outcomes,
            others,
            stays: store.stays(fingerprint, hashes),
            evicted_after_ms: store.evicted_after_ms(),
            evictions: store.remembered_evictions(),
        }
    }

    /// The namespaces that resemble one in which a chunk is nowhere.
    fn others_like(
        &self,
        fingerprint: &Fingerprint,
        hashes: &[ChunkHash],
        outcomes: &[OutcomeRun],
    ) -> Vec<OtherNamespace> {
        let starts = std::iter::once(0).chain(outcomes.iter().map(|run| run.to));
        let mut missing = starts.zip(outcomes).filter(|(_, run)| run.outcome == ChunkOutcome::Absent);
        let missing = missing.next().and_then(|(from, _)| hashes.get(from as usize));
        missing.map(|hash| self.core.store().others_like(fingerprint, hash)).unwrap_or_default()
    }

    /// The names of a purge's chunks.
    pub(crate) fn purged_keys(&mut self, scope: &PurgeScope) -> PurgedKeys {
        self.core.purged_keys(scope)
    }

    /// Has the core remove or count some chunks of a purge; also returns how many of its chunks are being written.
    pub(crate) fn purge_page(
        &mut self,
        page: PurgeStep,
        ctx: &mut Context<Self>,
    ) -> Option<(PurgedPage, u64)> {
        self.decide(Event::Purge(page), ctx);
        self.pending.purged.take()
    }
}
