//! The actor's disk at the start and afterwards: the actor learns which chunks are on it, and which have left.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use larder_core::store::ids::{ChunkKey, TenantId};
use larder_core::{Description, Event};
use larder_protocol::{ChunkRef, Fingerprint};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot::error::RecvError;

use super::GpuActor;
use crate::disk::namespaces::{KnownNamespace, NamespaceFolder};
use crate::disk::{DiskTier, Gone, Refused, SnapshotPage, Why};

/// An actor's disk, as it is handed over.
pub struct DiskParts {
    /// The tier.
    pub tier: DiskTier,
    /// Reports chunks that left the tier.
    pub gone: UnboundedReceiver<Gone>,
    /// The folder with the namespaces' descriptions.
    pub folder: Arc<NamespaceFolder>,
    /// Namespaces that were described there when the node started.
    pub known: Vec<KnownNamespace>,
    /// How long a lease waits for it.
    pub deadline: Duration,
}

/// An actor's disk.
pub(super) struct Disk {
    pub(super) tier: DiskTier,
    folder: Arc<NamespaceFolder>,
    /// Reports chunks that left the tier, until somebody listens.
    gone: Option<UnboundedReceiver<Gone>>,
    /// Namespaces that were described there when the node started, until the core was told.
    found: Vec<KnownNamespace>,
    /// Namespaces among them whose tenants are not served.
    pub(super) strangers: Vec<KnownNamespace>,
}

impl Disk {
    pub(super) fn new(parts: DiskParts) -> Self {
        let DiskParts { tier, gone, folder, known, .. } = parts;
        Self { tier, folder, gone: Some(gone), found: known, strangers: Vec::new() }
    }

    /// Why it closed itself.
    pub(super) fn trouble(&self) -> Option<&str> {
        self.tier.trouble()
    }
}

impl GpuActor {
    /// Begins to learn which chunks are on disk.
    pub(super) fn start_disk(&mut self, ctx: &mut Context<Self>) {
        let Some(disk) = &mut self.disk else { return };
        if let Some(mut gone) = disk.gone.take() {
            ctx.add_stream(futures_util::stream::poll_fn(move |cx| gone.poll_recv(cx)));
        }
        for known in std::mem::take(&mut disk.found) {
            self.know_described(known);
        }
        self.recover(0, ctx);
    }

    /// Tells the core of a namespace that is described on disk.
    fn know_described(&mut self, known: KnownNamespace) {
        let Some(number) = self.tenants.iter().position(|name| *name == known.tenant) else {
            tracing::warn!(
                known.tenant,
                "the disk has chunks of a tenant that is not configured: they are not used"
            );
            self.disk.iter_mut().for_each(|disk| disk.strangers.push(known.clone()));
            return;
        };
        let fingerprint = known.fingerprint();
        let KnownNamespace { tenant, spec } = known;
        if let Err(error) = self.core.know(TenantId(number as u16), fingerprint, spec) {
            tracing::warn!(tenant, %error, "a namespace on disk cannot be used");
        }
    }

    /// Learns the disk's chunks of tenants that were not served when the node started.
    pub(super) fn know_strangers(&mut self, ctx: &mut Context<Self>) {
        let Some(disk) = &mut self.disk else { return };
        let is_served = |known: &KnownNamespace| self.tenants.contains(&known.tenant);
        let (served, strangers) = std::mem::take(&mut disk.strangers).into_iter().partition(is_served);
        let served: Vec<KnownNamespace> = served;
        disk.strangers = strangers;
        if !served.is_empty() {
            served.into_iter().for_each(|known| self.know_described(known));
            self.recover(0, ctx);
        }
    }

    /// Asks for the content after a position, a segment at a time.
    pub(super) fn recover(&mut self, after: u64, ctx: &mut Context<Self>) {
        let Some(disk) = &self.disk else { return };
        match disk.tier.snapshot(after) {
            Ok(page) => {
                self.spawn(ctx, page.into_actor(self).map(|page, actor, ctx| actor.recovered(page, ctx)));
            }
            Err(Refused::Busy) => {
                self.later(ctx, RETRY, move |actor, ctx| actor.recover(after, ctx));
            }
            Err(Refused::Closed) => {}
        }
    }

    fn recovered(&mut self, page: Result<Option<SnapshotPage>, RecvError>, ctx: &mut Context<Self>) {
        let Ok(Some(SnapshotPage { held, next })) = page else { return };
        self.decide(Event::Recovered { held, is_all: next.is_none() }, ctx);
        if let Some(next) = next {
            self.recover(next, ctx);
        }
    }

    pub(super) fn remove_from_disk(&self, key: ChunkKey) {
        // Refused: the chunk stays on disk unused, and is found again after a restart.
        let _ = self.disk.as_ref().map(|disk| disk.tier.remove(key));
    }

    /// A record contradicts the store's names of its chunk, parent or children: nobody can use it.
    pub(super) fn disagrees(&self, fingerprint: Fingerprint, chunk: &ChunkRef) {
        tracing::warn!(?chunk, "a chunk on disk contradicts others in parent or index: it is forgotten");
        self.count_unwritten("disagrees");
        self.remove_from_disk(ChunkKey { fingerprint, hash: chunk.hash });
    }

    pub(super) fn count_unwritten(&self, why: &'static str) {
        if let Some(disk) = &self.disk {
            disk.tier.not_ordered(why);
        }
    }

    /// Writes a namespace's description.
    pub(super) fn describe(
        &mut self,
        fingerprint: Fingerprint,
        namespace: KnownNamespace,
        ctx: &mut Context<Self>,
    ) {
        let Some(disk) = &self.disk else { return };
        let folder = Arc::clone(&disk.folder);
        let record = tokio::task::spawn_blocking(move || folder.record(&namespace));
        let finish = record.into_actor(self).map(move |recorded, actor, ctx| {
            let description = match recorded {
                Ok(Ok(())) => Description::There,
                failed => {
                    tracing::error!(?failed, namespace = %fingerprint, "a namespace cannot be described on disk: its chunks stay in memory");
                    Description::Failed
                }
            };
            actor.decide(Event::Described { fingerprint, description }, ctx);
        });
        self.spawn(ctx, finish);
    }

    /// Deletes the descriptions of namespaces.
    pub(super) fn forget_descriptions(&mut self, unused: Vec<Fingerprint>, ctx: &mut Context<Self>) {
        let Some(disk) = &self.disk else { return };
        let (folder, deleted) = (Arc::clone(&disk.folder), unused.clone());
        let forget = tokio::task::spawn_blocking(move || {
            for fingerprint in &deleted {
                if let Err(error) = folder.forget(fingerprint) {
                    // It is tried again when the node starts.
                    tracing::warn!(%error, namespace = %fingerprint, "the unused description of a namespace cannot be removed");
                }
            }
        });
        let finish = forget.into_actor(self).map(|_, actor, ctx| {
            for fingerprint in unused {
                actor.tell(Event::Described { fingerprint, description: Description::Gone });
            }
            actor.settle(ctx);
        });
        self.spawn(ctx, finish);
    }
}

impl StreamHandler<Gone> for GpuActor {
    fn handle(&mut self, Gone { chunks, why }: Gone, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| {
            let event = match why {
                Why::Evicted | Why::Damaged => Event::LeftDisk(chunks),
                Why::Closed => Event::DiskClosed,
            };
            actor.decide(event, ctx);
        });
    }

    /// The tier holds the sender: the stream ends only with the actor.
    fn finished(&mut self, _: &mut Self::Context) {}
}

/// The pause before a busy disk is asked again.
pub(super) const RETRY: Duration = Duration::from_millis(20);
