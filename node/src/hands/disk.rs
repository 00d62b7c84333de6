//! The actor's disk, except reads and writes: lists of the chunks on disk, and descriptions of their namespaces.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use larder_core::store::ids::ChunkKey;
use larder_core::{Description, SegmentVisit, Visited};
use larder_net::blocking::try_blocking;
use larder_protocol::purge::PurgeMode;
use larder_protocol::{ChunkRef, Fingerprint};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot::Receiver;

use super::Hands;
use crate::disk::drive::DriveWatch;
use crate::disk::namespaces::{KnownNamespace, NamespaceFolder};
use crate::disk::owners::Owners;
use crate::disk::{DiskPurge, DiskTier, Gone, PurgedSegment, Refused, SnapshotPage};

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

impl Hands {
    fn disk_tier(&self) -> Option<&DiskTier> {
        self.disk.as_ref().map(|disk| &disk.tier)
    }

    /// Tells the disk something about the tenants of its namespaces, if there is a disk.
    pub(crate) fn owners(&self, tell: impl FnOnce(&Owners)) {
        _ = self.disk_tier().map(|tier| tell(tier.owners()));
    }

    /// Whether the disk's drive has fallen silent.
    pub(crate) fn is_drive_silent(&self) -> bool {
        self.disk_tier().is_some_and(DiskTier::look)
    }

    /// Used bytes and all bytes of the disk tier; `None` if there is no disk tier, or if the tier is closed.
    pub(crate) fn disk_fill(&self) -> Option<(u64, u64)> {
        let tier = self.disk_tier().filter(|tier| tier.trouble().is_none())?;
        Some((tier.used_bytes(), tier.capacity_bytes()))
    }

    /// Why the disk tier is closed or silent, or does not keep all chunks; damage that it found within the last hour.
    pub(crate) fn disk_trouble(&self, cannot_describe: bool) -> Option<String> {
        let tier = self.disk_tier();
        let closed = tier.and_then(DiskTier::trouble);
        let silent = tier.and_then(|tier| tier.watch().silent_for());
        let silent = silent.map(|silent| format!("the drive has not answered for {} s", silent.as_secs()));
        let trouble = closed.or(silent.as_deref()).or(self.disk_trouble.as_deref());
        let trouble = trouble.or_else(|| cannot_describe.then_some(UNDESCRIBED));
        trouble.map(str::to_owned).or_else(|| tier.and_then(DiskTier::damage))
    }

    /// Lists or purges the next segment after position `after`.
    pub(crate) fn visit(
        &self,
        visit: &SegmentVisit,
        after: u64,
    ) -> Result<impl Future<Output = Visited> + use<>, Visited> {
        let tier = self.disk_tier().ok_or(Visited::Closed)?;
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
    pub(crate) fn purge_disk(&self, purge: DiskPurge, after: u64) -> Option<Result<SegmentPurge, Refused>> {
        let Some(tier) = self.disk_tier() else {
            return self.disk_trouble.is_some().then_some(Err(Refused::Closed));
        };
        Some(tier.purge(purge, after).map(|purged| (purged, tier.watch().clone())))
    }

    /// The namespaces that had chunks on disk when the node started.
    pub(crate) fn namespaces_at_start(&self) -> &[Fingerprint] {
        self.disk_tier().map_or(&[], DiskTier::namespaces_at_start)
    }

    /// Has the disk keep chunks for longer.
    pub(crate) fn touch(&self, keys: Vec<ChunkKey>) {
        _ = self.disk_tier().map(|tier| tier.touch(keys));
    }

    /// Removes a chunk from disk.
    pub(crate) fn remove(&self, key: ChunkKey) {
        // If the tier refuses, the chunk stays on disk unused, and is found again after a restart.
        _ = self.disk_tier().map(|tier| tier.remove(key));
    }

    /// Notes a chunk on disk whose record contradicts the store's names of the chunk, its parent or its children: nobody can use it.
    pub(crate) fn disagrees(&self, chunk: &ChunkRef) {
        tracing::warn!(?chunk, "a chunk on disk contradicts others in parent or index: it is forgotten");
        self.metrics.not_written("disagrees");
    }

    /// Writes a namespace's description, if there is a disk.
    pub(crate) fn describe(
        &self,
        fingerprint: Fingerprint,
        namespace: KnownNamespace,
    ) -> Option<impl Future<Output = Description> + use<>> {
        let disk = self.disk.as_ref()?;
        disk.tier.owners().own(&namespace.tenant, fingerprint);
        let spec = &namespace.spec;
        if !disk.tier.geometry().has_room_for(spec.slices, &spec.pools) {
            tracing::warn!(
                namespace = %fingerprint, model = spec.model,
                "a chunk of this namespace is larger than a segment of the disk tier, and stays in memory: set [disk] segment_bytes to more, and remove the tier's file, or let the engine have smaller chunks"
            );
        }
        let folder = Arc::clone(&disk.folder);
        let recording = try_blocking(move || folder.record(&namespace));
        Some(recording.map(move |recorded| match recorded {
            Ok(Ok(())) => Description::There,
            failed => {
                tracing::error!(?failed, namespace = %fingerprint, "a namespace cannot be described on disk: its chunks stay in memory");
                Description::Failed
            }
        }))
    }

    /// Deletes the descriptions of namespaces, if there is a disk; the answer has the namespaces.
    pub(crate) fn forget_descriptions(
        &self,
        unused: Vec<Fingerprint>,
    ) -> Option<impl Future<Output = Vec<Fingerprint>> + use<>> {
        let (folder, deleted) = (Arc::clone(&self.disk.as_ref()?.folder), unused.clone());
        let forgetting = try_blocking(move || {
            for fingerprint in &deleted {
                if let Err(error) = folder.forget(fingerprint) {
                    // The node tries again when it starts.
                    tracing::warn!(%error, namespace = %fingerprint, "the unused description of a namespace cannot be removed");
                }
            }
        });
        Some(forgetting.map(|_| unused))
    }
}

/// The trouble of a disk tier that cannot store a namespace's description.
const UNDESCRIBED: &str = "the description of a namespace cannot be written beside it, so its chunks stay in memory: is the file \
                           system full? The node tries again";
