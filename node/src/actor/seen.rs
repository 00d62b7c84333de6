//! Views of an actor: for metrics, for operators, for admins who purge, and for replays of lookups with other caches.

use std::time::Duration;

use actix::Context;
use larder_core::store::policy::PolicyName;
use larder_core::store::{PinFacts, PurgedPage, SessionFacts, Usage};
use larder_core::{Event, PurgeStep};
use larder_protocol::Fingerprint;

use super::{Client, GpuActor};
use crate::metrics::TenantRates;

/// An open session.
#[derive(Debug, Clone)]
pub struct SessionSeen {
    /// The session's holdings.
    pub facts: SessionFacts,
    /// The engine behind the session.
    pub client: Client,
    /// The namespaces that the session registered.
    pub namespaces: Vec<Fingerprint>,
    /// The session's last request, and the time since then.
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
    /// The contents in numbers.
    pub usage: Usage,
    /// The policy in force.
    pub policy: PolicyName,
    /// Prompt tokens of all lookups whose caller could use a hit.
    pub tokens_asked: u64,
    /// Prompt tokens that these lookups found.
    pub tokens_hit: u64,
    /// Each tenant's recent hit rates.
    pub tenants: Vec<TenantRates>,
    /// Used bytes and all bytes of the disk tier; `None` if the actor has no disk tier, or if the tier is closed.
    pub disk_fill: Option<(u64, u64)>,
    /// Why the disk tier is closed or silent, or does not keep all chunks; damage that it found within the last hour.
    pub disk_trouble: Option<String>,
}

impl GpuActor {
    /// The store's contents; updates the gauges.
    pub(crate) fn report(&mut self) -> ActorReport {
        let usage = self.core.usage();
        let tenants = self.hands.metrics.observe(&usage, self.hands.clock.now());
        self.hands.metrics.remembers(self.core.store().remembered_bytes(), self.core.lookup_bytes());
        let of_tenants = self.core.tenants().iter().zip(self.core.store().tenant_bytes());
        for (tenant, (held, limit)) in of_tenants.filter(|(tenant, _)| !tenant.is_empty()) {
            self.hands.metrics.tenant_holds(tenant, held, limit);
        }
        let (tokens_asked, tokens_hit) = self.hands.metrics.tokens();
        let disk_fill = self.hands.disk_fill();
        let disk_trouble = self.hands.disk_trouble(self.core.cannot_describe());
        let policy = self.core.store().policy();
        ActorReport { usage, policy, tokens_asked, tokens_hit, tenants, disk_fill, disk_trouble }
    }

    /// The holdings of the actor's sessions and pins.
    pub(crate) fn holdings(&mut self) -> Holdings {
        let store = self.core.store();
        let now = self.hands.clock.elapsed();
        let seen = |facts: SessionFacts| {
            let engine = self.engines.get(&facts.session);
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
            pins: store.pin_facts(self.hands.clock.now()).collect(),
            tenants: store.tenant_bytes(),
        }
    }

    /// Has the core remove or count some chunks of a purge. Also returns how many chunks of the purge are being written.
    pub(crate) fn purge_page(
        &mut self,
        page: PurgeStep,
        ctx: &mut Context<Self>,
    ) -> Option<(PurgedPage, u64)> {
        self.decide(Event::Purge(page), ctx);
        self.pending.purged.take()
    }
}
