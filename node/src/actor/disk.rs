//! The actor's disk, except reads and writes: lists of the chunks on disk, and descriptions of their namespaces.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::FutureExt as _;
use futures_util::stream::poll_fn;
use larder_core::store::ids::ChunkKey;
use larder_core::{Description, Event, SegmentVisit, Visited};
use larder_net::blocking::try_blocking;
use larder_protocol::purge::PurgeMode;
use larder_protocol::{ChunkRef, Fingerprint};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot::Receiver;

use super::GpuActor;
use crate::disk::drive::DriveWatch;
use crate::disk::namespaces::{KnownNamespace, NamespaceFolder};
use crate::disk::owners::Owners;
use crate::disk::{DiskPurge, DiskTier, Gone, PurgedSegment, Refused, SnapshotPage, Why};

/// An actor's disk.
pub struct DiskParts {
    /// The tier.
    pub tier: DiskTier,
    /// Reports chunks that left the tier; taken when the actor starts.
    pub gone: Option<UnboundedReceiver<Gone>>,
    /// The folder with the namespaces' descriptions.
    pub folder: Arc<NamespaceFolder>,
    /// Namespaces that were described there when the node started; taken when the actor starts.
    pub known: Vec<KnownNamespace>,
    /// How long a lease waits for the disk.
    pub deadline: Duration,
}

/// A segment's purge that was ordered, and the watch of its drive.
type SegmentPurge = (Receiver<Option<PurgedSegment>>, DriveWatch);

impl GpuActor {
    /// Begins to learn which chunks are on disk.
    pub(super) fn start_disk(&mut self, ctx: &mut Context<Self>) {
        let Some(disk) = &mut self.hands.disk else { return };
        let known = std::mem::take(&mut disk.known);
        if let Some(mut gone) = disk.gone.take() {
            self.hear(ctx, poll_fn(move |cx| gone.poll_recv(cx)), |_, Gone { chunks, why }| match why {
                Why::Evicted | Why::Damaged => Event::LeftDisk(chunks),
                Why::Closed => Event::DiskClosed,
            });
        }
        for known in known {
            let (fingerprint, KnownNamespace { tenant, spec }) = (known.fingerprint(), known);
            self.owners(|owners| owners.own(&tenant, fingerprint));
            match self.core.know(tenant.clone(), fingerprint, spec) {
                Ok(true) => {}
                Ok(false) => {
                    self.owners(|owners| owners.serves(&tenant, false));
                    tracing::warn!(
                        tenant,
                        "the disk has chunks of a tenant that is not configured: they are not used"
                    );
                }
                Err(error) => tracing::warn!(tenant, %error, "a namespace on disk cannot be used"),
            }
        }
        self.core.list_disk();
        self.settle(ctx);
    }

    /// Tells the disk something about the tenants of its namespaces, if there is a disk.
    pub(super) fn owners(&self, tell: impl FnOnce(&Owners)) {
        if let Some(disk) = &self.hands.disk {
            tell(disk.tier.owners());
        }
    }

    /// Tells the core when the disk's drive falls silent, and when it answers again.
    pub(super) fn look_at_drive(&mut self, ctx: &mut Context<Self>) {
        let is_silent = self.hands.disk.as_ref().is_some_and(|disk| disk.tier.look());
        let store = self.core.store();
        if store.has_disk() && is_silent != store.is_disk_silent() {
            self.decide(Event::DiskSilent(is_silent), ctx);
        }
    }

    /// Lists or purges the next segment after position `after`.
    pub(super) fn order_visit(
        &self,
        visit: &SegmentVisit,
        after: u64,
    ) -> Result<impl Future<Output = Visited> + use<>, Visited> {
        let tier = &self.hands.disk.as_ref().ok_or(Visited::Closed)?.tier;
        let visiting = match visit {
            SegmentVisit::List => {
                let done = |SnapshotPage { held, next }| Visited::Done { held, next };
                tier.snapshot(after)?.map(move |page| page.map(|page| page.map(done))).boxed_local()
            }
            SegmentVisit::Purge(keys) => {
                let purge = DiskPurge { keys: Arc::clone(keys), mode: PurgeMode::Remove };
                let done = |purged: PurgedSegment| Visited::Done { held: Vec::new(), next: purged.next };
                tier.purge(purge, after)?
                    .map(move |purged| purged.map(|purged| purged.map(done)))
                    .boxed_local()
            }
        };
        Ok(visiting.map(|visited| visited.ok().flatten().unwrap_or(Visited::Closed)))
    }

    /// Purges a segment for an admin; `None` if the actor is to have no disk. The watch says whether the answer is to be expected.
    pub(crate) fn purge_disk(
        &mut self,
        purge: DiskPurge,
        after: u64,
    ) -> Option<Result<SegmentPurge, Refused>> {
        let Some(DiskParts { tier, .. }) = &self.hands.disk else {
            return self.hands.disk_trouble.is_some().then_some(Err(Refused::Closed));
        };
        Some(tier.purge(purge, after).map(|purged| (purged, tier.watch().clone())))
    }

    /// Namespaces that had chunks on disk when the node started, and whose tenants nobody knows.
    pub(crate) fn undescribed(&self) -> Vec<Fingerprint> {
        let disk = self.hands.disk.as_ref();
        disk.map_or_else(Vec::new, |disk| self.core.undescribed(disk.tier.namespaces_at_start()))
    }

    pub(super) fn remove_from_disk(&self, key: ChunkKey) {
        // If the tier refuses, the chunk stays on disk unused, and is found again after a restart.
        let _ = self.hands.disk.as_ref().map(|disk| disk.tier.remove(key));
    }

    /// Notes a chunk on disk whose record contradicts the store's names of the chunk, its parent or its children: nobody can use it.
    pub(super) fn disagrees(&self, chunk: &ChunkRef) {
        tracing::warn!(?chunk, "a chunk on disk contradicts others in parent or index: it is forgotten");
        self.hands.metrics.not_written("disagrees");
    }

    /// Writes a namespace's description.
    pub(super) fn describe(
        &mut self,
        fingerprint: Fingerprint,
        namespace: KnownNamespace,
        ctx: &mut Context<Self>,
    ) {
        let Some(disk) = &self.hands.disk else { return };
        disk.tier.owners().own(&namespace.tenant, fingerprint);
        let spec = &namespace.spec;
        if !disk.tier.geometry().has_room_for(spec.slices, &spec.pools) {
            tracing::warn!(
                namespace = %fingerprint, model = spec.model,
                "a chunk of this namespace is larger than a segment of the disk tier, and stays in memory: set [disk] segment_bytes to more, and remove the tier's file, or let the engine have smaller chunks"
            );
        }
        let folder = Arc::clone(&disk.folder);
        let record = try_blocking(move || folder.record(&namespace));
        self.tell_when(ctx, record, move |recorded| {
            let description = match recorded {
                Ok(Ok(())) => Description::There,
                failed => {
                    tracing::error!(?failed, namespace = %fingerprint, "a namespace cannot be described on disk: its chunks stay in memory");
                    Description::Failed
                }
            };
            Event::Described { fingerprint, description }
        });
    }

    /// Deletes the descriptions of namespaces.
    pub(super) fn forget_descriptions(&mut self, unused: Vec<Fingerprint>, ctx: &mut Context<Self>) {
        let Some(disk) = &self.hands.disk else { return };
        let (folder, deleted) = (Arc::clone(&disk.folder), unused.clone());
        let forget = try_blocking(move || {
            for fingerprint in &deleted {
                if let Err(error) = folder.forget(fingerprint) {
                    // The node tries again when it starts.
                    tracing::warn!(%error, namespace = %fingerprint, "the unused description of a namespace cannot be removed");
                }
            }
        });
        let finish = forget.into_actor(self).map(|_, actor, ctx| {
            for fingerprint in unused {
                actor.owners(|owners| owners.forget(&fingerprint));
                actor.tell(Event::Described { fingerprint, description: Description::Gone });
            }
            actor.settle(ctx);
        });
        self.spawn(ctx, finish);
    }
}
