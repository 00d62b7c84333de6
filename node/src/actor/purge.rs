//! The actor's part in purges, and in tenants that come or go.

use std::sync::Arc;

use actix::prelude::*;
use larder_core::store::{PurgedKeys, PurgedPage};
use larder_core::{Event, PurgeStep};
use larder_protocol::purge::{PurgeMode, PurgeScope};

use super::GpuActor;
use super::messages::{AskPurged, BeginPurge, EndPurge, PurgeDisk, PurgePage, TenantsAre};
use crate::disk::{DiskPurge, PurgedSegment, Refused};

/// A segment of the disk, or the reason why there is none.
pub(crate) type OnDisk = Result<PurgedSegment, Refused>;

impl GpuActor {
    /// Takes the core's result for a page.
    pub(super) fn purged(&mut self, page: PurgedPage, writes: u64) {
        self.pending.purged = Some((page, writes));
    }

    /// The names of a purge's chunks, including chunks on disk of tenants that are not served.
    fn purged_keys(&self, scope: &PurgeScope) -> PurgedKeys {
        let mut keys = self.core.store().purged_keys(scope);
        let strangers = self.disk.iter().flat_map(|disk| &disk.strangers);
        for stranger in
            strangers.filter(|stranger| matches!(scope, PurgeScope::Tenant(name) if *name == stranger.tenant))
        {
            keys.add(stranger.fingerprint());
        }
        keys
    }

    fn tenants_are(&mut self, tenants: Vec<(String, u64)>, ctx: &mut Context<Self>) {
        let left = self.tenants.iter().zip(&tenants);
        let left = left.filter(|(before, (_, bytes))| !before.is_empty() && *bytes == 0);
        let left: Vec<PurgeScope> = left.map(|(name, _)| PurgeScope::Tenant(name.clone())).collect();
        let keys: Vec<PurgedKeys> = left.iter().map(|scope| self.purged_keys(scope)).collect();
        let names = self.tenants.iter().zip(&tenants).filter(|(_, (_, bytes))| *bytes == 0);
        names.for_each(|(name, _)| self.metrics.tenant_left(name));
        let name = |(name, bytes): &(String, u64)| if *bytes > 0 { name.clone() } else { String::new() };
        self.tenants = tenants.iter().map(name).collect();
        self.decide(Event::TenantsAre(tenants), ctx);
        for keys in keys {
            self.purge_disk_of_the_left(Arc::new(keys), 0, ctx);
        }
        self.know_strangers(ctx);
    }

    /// Takes the chunks of a tenant that left from the disk for good, a segment at a time.
    fn purge_disk_of_the_left(&mut self, keys: Arc<PurgedKeys>, after: u64, ctx: &mut Context<Self>) {
        let Some(disk) = &self.disk else { return };
        let purge = DiskPurge { keys: Arc::clone(&keys), mode: PurgeMode::Remove };
        match disk.tier.purge(purge, after) {
            Ok(purged) => {
                let go_on = purged.into_actor(self).map(move |purged, actor, ctx| {
                    if let Ok(Some(PurgedSegment { next: Some(next), .. })) = purged {
                        actor.purge_disk_of_the_left(keys, next, ctx);
                    }
                });
                self.spawn(ctx, go_on);
            }
            Err(Refused::Busy) => {
                self.later(ctx, super::disk::RETRY, move |actor, ctx| {
                    actor.purge_disk_of_the_left(keys, after, ctx);
                });
            }
            Err(Refused::Closed) => {}
        }
    }
}

impl Handler<TenantsAre> for GpuActor {
    type Result = ();

    fn handle(&mut self, TenantsAre(tenants): TenantsAre, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.tenants_are(tenants, ctx));
    }
}

impl Handler<AskPurged> for GpuActor {
    type Result = MessageResult<AskPurged>;

    fn handle(&mut self, AskPurged(scope): AskPurged, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.purged_keys(&scope))
    }
}

impl Handler<BeginPurge> for GpuActor {
    type Result = ();

    fn handle(&mut self, BeginPurge(purge, scope): BeginPurge, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.decide(Event::Purge(PurgeStep::Begin(purge, scope)), ctx));
    }
}

impl Handler<PurgePage> for GpuActor {
    type Result = MessageResult<PurgePage>;

    fn handle(&mut self, ask: PurgePage, ctx: &mut Self::Context) -> Self::Result {
        let PurgePage { purge, scope, mode, from } = ask;
        let page = PurgeStep::Page { purge, scope, mode, from };
        self.guard(ctx, |actor, ctx| actor.decide(Event::Purge(page), ctx));
        MessageResult(self.pending.purged.take())
    }
}

impl Handler<EndPurge> for GpuActor {
    type Result = ();

    fn handle(&mut self, EndPurge(purge): EndPurge, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.decide(Event::Purge(PurgeStep::End(purge)), ctx));
    }
}

impl Handler<PurgeDisk> for GpuActor {
    type Result = ResponseFuture<Option<OnDisk>>;

    fn handle(&mut self, PurgeDisk(purge, after): PurgeDisk, _: &mut Self::Context) -> Self::Result {
        let Some(ordered) = self.disk.as_ref().map(|disk| disk.tier.purge(purge, after)) else {
            return Box::pin(async { None });
        };
        Box::pin(async move {
            Some(match ordered {
                Ok(purged) => purged.await.ok().flatten().ok_or(Refused::Closed),
                Err(refused) => Err(refused),
            })
        })
    }
}
