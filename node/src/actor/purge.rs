//! The actor's part in purges, and in tenants that come or go.

use std::sync::Arc;

use actix::prelude::*;
use larder_core::store::{PurgedKeys, PurgedPage};
use larder_core::{Event, PurgeStep};
use larder_protocol::purge::{PurgeMode, PurgeScope};
use tokio::sync::oneshot::Receiver;

use super::GpuActor;
use crate::disk::{DiskPurge, PurgedSegment, Refused};

impl GpuActor {
    /// Takes the core's result for a page.
    pub(super) fn purged(&mut self, page: PurgedPage, writes: u64) {
        self.pending.purged = Some((page, writes));
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

    /// Purges a segment of the disk, the one behind a position; `None` if there is no disk.
    pub(crate) fn purge_disk(
        &mut self,
        purge: DiskPurge,
        after: u64,
    ) -> Option<Result<Receiver<Option<PurgedSegment>>, Refused>> {
        self.disk.as_ref().map(|disk| disk.tier.purge(purge, after))
    }

    /// These tenants are served from now on, by number, with the bytes of extents that each may hold.
    pub(crate) fn tenants_are(&mut self, tenants: Vec<(String, u64)>, ctx: &mut Context<Self>) {
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
