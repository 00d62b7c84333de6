//! What an actor does with its disk: writes what the store wants there, learns what is there when it starts and what left.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use larder_core::store::ids::{ChunkKey, TenantId};
use larder_core::store::{ChunkWrite, WriteId};
use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::{ChunkRef, Fingerprint};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot::error::RecvError;

use super::GpuActor;
use crate::copy::BlockChecksums;
use crate::disk::namespaces::{KnownNamespace, NamespaceFolder};
use crate::disk::order::OrderError;
use crate::disk::{DiskTier, Gone, Refused, SnapshotPage, Source, Why, WriteAnswer, WriteOrder};

/// An actor's disk, as it is handed over.
pub struct DiskParts {
    /// The tier.
    pub tier: DiskTier,
    /// Tells what left it.
    pub gone: UnboundedReceiver<Gone>,
    /// Where its namespaces are described.
    pub folder: Arc<NamespaceFolder>,
    /// Those that were described there when the node started.
    pub known: Vec<KnownNamespace>,
    /// How long a lease waits for it.
    pub deadline: Duration,
}

/// An actor's disk.
pub(super) struct Disk {
    pub(super) tier: DiskTier,
    folder: Arc<NamespaceFolder>,
    known: HashMap<Fingerprint, Described>,
    /// Writes under way.
    writes: usize,
    /// Tells what left it, until somebody listens.
    gone: Option<UnboundedReceiver<Gone>>,
    /// Namespaces that were described there when the node started, until the store was told.
    found: Vec<KnownNamespace>,
    /// Whether all that was there at start is known.
    is_recovered: bool,
}

/// A namespace that engines named, or that was described when the node started.
struct Described {
    namespace: Arc<KnownNamespace>,
    state: Description,
}

/// Whether a namespace is described on disk: before it is, none of its chunks is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Description {
    Missing,
    /// Being written, or deleted.
    UnderWay,
    There,
    /// It could not be written, and is tried again from then on.
    Failed(Duration),
}

/// What becomes of a chunk that is to be written, as far as its namespace's description goes.
enum MayWrite {
    Now,
    Later,
    /// Not for a while: its memory is needed.
    Never,
}

impl Disk {
    pub(super) fn new(parts: DiskParts) -> Self {
        let DiskParts { tier, gone, folder, known, .. } = parts;
        Self {
            tier,
            folder,
            known: HashMap::new(),
            writes: 0,
            gone: Some(gone),
            found: known,
            is_recovered: false,
        }
    }

    /// Why it closed itself.
    pub(super) fn trouble(&self) -> Option<&str> {
        self.tier.trouble()
    }

    fn describe(&mut self, namespace: KnownNamespace, state: Description) {
        let fingerprint = namespace.fingerprint();
        let described = || Described { namespace: Arc::new(namespace), state };
        self.known.entry(fingerprint).or_insert_with(described);
    }
}

impl GpuActor {
    /// Begins to learn what is on disk.
    pub(super) fn start_disk(&mut self, ctx: &mut Context<Self>) {
        let Some(disk) = &mut self.disk else { return };
        if let Some(mut gone) = disk.gone.take() {
            ctx.add_stream(futures_util::stream::poll_fn(move |cx| gone.poll_recv(cx)));
        }
        for known in std::mem::take(&mut disk.found) {
            self.know_described(known);
        }
        self.recover(0, ctx);
        ctx.run_interval(FORGET_EVERY, |actor, ctx| {
            actor.guard(ctx, Self::forget_unused_namespaces);
        });
    }

    /// Learns anew what is on disk, for a store that knows nothing.
    pub(super) fn restart_disk(&mut self, ctx: &mut Context<Self>) {
        let Some(disk) = &mut self.disk else { return };
        disk.writes = 0;
        disk.is_recovered = false;
        // Nobody waits for a description that was under way: sessions name their namespaces again.
        let described = std::mem::take(&mut disk.known).into_values();
        let there = described.filter(|described| described.state == Description::There);
        for described in there.collect::<Vec<_>>() {
            self.know_described(KnownNamespace::clone(&described.namespace));
        }
        self.recover(0, ctx);
    }

    /// Tells the store of a namespace that is described on disk.
    fn know_described(&mut self, known: KnownNamespace) {
        let KnownNamespace { tenant, spec } = &known;
        let Some(number) = self.tenants.iter().position(|name| name == tenant) else {
            tracing::warn!(
                tenant,
                "the disk has chunks of a tenant that is not configured: they are not used"
            );
            return;
        };
        match self.core.store.know(TenantId(number as u16), tenant, spec) {
            Ok(number) => {
                self.metrics.know(number, tenant, &known.fingerprint().to_string());
                if let Some(disk) = &mut self.disk {
                    disk.describe(known, Description::There);
                }
            }
            Err(error) => tracing::warn!(tenant, %error, "a namespace on disk cannot be used"),
        }
    }

    /// Notes that a session named a namespace, for when its chunks are written.
    pub(super) fn describe(&mut self, tenant: &str, spec: &NamespaceSpec) {
        if let Some(disk) = &mut self.disk {
            let namespace = KnownNamespace { tenant: tenant.to_owned(), spec: spec.clone() };
            disk.describe(namespace, Description::Missing);
        }
    }

    /// Orders what the store wants written, as far as the disk keeps up, and tells it what was used or given up.
    pub(super) fn write_to_disk(&mut self, ctx: &mut Context<Self>) {
        let Some(disk) = &self.disk else { return };
        let touched = self.core.store.take_touched();
        if !touched.is_empty() {
            disk.tier.touch(touched);
        }
        for key in self.core.store.take_given_up() {
            // Refused: it stays there unused, and is told again after a restart, when it is as right as before.
            let _ = disk.tier.remove(key);
        }
        while self.disk.as_ref().is_some_and(|disk| disk.writes < MAX_WRITES)
            && let Some(write) = self.core.store.next_write()
        {
            let may_follow = match self.is_described(write.fingerprint, ctx) {
                MayWrite::Now => self.order_write(&write, ctx),
                MayWrite::Later => {
                    self.core.store.postpone_write(write.write);
                    false
                }
                MayWrite::Never => self.give_up_write(&write, "undescribed"),
            };
            if !may_follow {
                return;
            }
        }
    }

    /// Asks for the content after a position, a segment at a time.
    fn recover(&mut self, after: u64, ctx: &mut Context<Self>) {
        let Some(disk) = &self.disk else { return };
        match disk.tier.snapshot(after) {
            Ok(page) => {
                self.spawn(ctx, page.into_actor(self).map(|page, actor, ctx| actor.recovered(page, ctx)));
            }
            Err(Refused::Busy(after)) => {
                self.later(ctx, RETRY, move |actor, ctx| actor.recover(after, ctx));
            }
            Err(Refused::Closed(_)) => {}
        }
    }

    fn recovered(&mut self, page: Result<Option<SnapshotPage>, RecvError>, ctx: &mut Context<Self>) {
        let Ok(Some(SnapshotPage { held, next })) = page else { return };
        for (fingerprint, chunk, pools) in held {
            if !self.core.store.recovered(&fingerprint, chunk, pools) {
                self.refuse_recovered(fingerprint, &chunk);
            }
        }
        self.settle(ctx);
        match next {
            Some(next) => self.recover(next, ctx),
            None => {
                if let Some(disk) = &mut self.disk {
                    disk.is_recovered = true;
                }
            }
        }
    }

    /// A record disagrees with what the store knows of its chunk, parent or children: nobody can use it. One of a namespace that is
    /// not known stays: it may be, after the next start.
    fn refuse_recovered(&mut self, fingerprint: Fingerprint, chunk: &ChunkRef) {
        let Some(disk) = self.disk.as_ref().filter(|disk| disk.known.contains_key(&fingerprint)) else {
            return;
        };
        let key = ChunkKey { fingerprint, hash: chunk.hash };
        tracing::warn!(
            ?chunk,
            "a chunk on disk disagrees with others in parent, index or anchor: it is forgotten"
        );
        disk.tier.not_ordered("disagrees");
        // Refused: it stays there unused, and is found out when it is read.
        let _ = disk.tier.remove(key);
        // What was committed under this hash since the start may be taken to be there.
        self.core.store.left_disk(&[key]);
    }

    /// Whether a chunk of a namespace may be written; sees to it that the namespace is described.
    fn is_described(&mut self, fingerprint: Fingerprint, ctx: &mut Context<Self>) -> MayWrite {
        let now = self.clock.elapsed();
        let Some(disk) = &mut self.disk else { return MayWrite::Never };
        let Some(Described { namespace, state }) = disk.known.get_mut(&fingerprint) else {
            tracing::error!(namespace = %fingerprint, "a chunk of a namespace that nobody named is not written");
            return MayWrite::Never;
        };
        match *state {
            Description::There => return MayWrite::Now,
            Description::UnderWay => return MayWrite::Later,
            Description::Failed(until) if now < until => return MayWrite::Never,
            Description::Missing | Description::Failed(_) => *state = Description::UnderWay,
        }
        let (folder, namespace) = (Arc::clone(&disk.folder), Arc::clone(namespace));
        let record = tokio::task::spawn_blocking(move || folder.record(&namespace));
        let finish = record.into_actor(self).map(move |recorded, actor, ctx| {
            let state = match recorded {
                Ok(Ok(())) => Description::There,
                failed => {
                    tracing::error!(?failed, namespace = %fingerprint, "cannot be described on disk: its chunks stay in memory");
                    Description::Failed(actor.clock.elapsed() + DESCRIBE_AGAIN)
                }
            };
            actor.set_description(fingerprint, state);
            actor.write_to_disk(ctx);
        });
        self.spawn(ctx, finish);
        MayWrite::Later
    }

    fn set_description(&mut self, fingerprint: Fingerprint, state: Description) {
        let known = self.disk.as_mut().and_then(|disk| disk.known.get_mut(&fingerprint));
        if let Some(described) = known {
            described.state = state;
        }
    }

    /// Forgets namespaces that no session names and no chunk belongs to, in memory or on disk, and deletes their descriptions.
    fn forget_unused_namespaces(&mut self, ctx: &mut Context<Self>) {
        let in_use: HashSet<Fingerprint> =
            self.core.store.namespaces().map(|known| known.fingerprint).collect();
        let Some(disk) = &mut self.disk else { return };
        if !disk.is_recovered || disk.tier.is_closed() {
            return;
        }
        let is_used = |known: &Fingerprint| in_use.contains(known);
        disk.known.retain(|known, described| is_used(known) || described.state != Description::Missing);
        let (folder, mut unused) = (Arc::clone(&disk.folder), Vec::new());
        for (&fingerprint, described) in &mut disk.known {
            if !is_used(&fingerprint) && described.state != Description::UnderWay {
                described.state = Description::UnderWay;
                unused.push(fingerprint);
            }
        }
        if unused.is_empty() {
            return;
        }
        let forget = tokio::task::spawn_blocking(move || {
            for fingerprint in &unused {
                if let Err(error) = folder.forget(fingerprint) {
                    // It is tried again when the node starts.
                    tracing::warn!(%error, namespace = %fingerprint, "the description of a namespace stays, of no use");
                }
            }
            unused
        });
        let finish = forget.into_actor(self).map(|forgotten, actor, ctx| {
            for fingerprint in forgotten.unwrap_or_default() {
                actor.set_description(fingerprint, Description::Missing);
            }
            actor.write_to_disk(ctx);
        });
        self.spawn(ctx, finish);
    }

    /// Orders one write; whether more may follow.
    fn order_write(&mut self, write: &ChunkWrite, ctx: &mut Context<Self>) -> bool {
        let id = write.write;
        let order = match self.write_order(write) {
            Ok(order) => order,
            Err(error @ OrderError::Misnamed { .. }) => {
                tracing::error!(%error, chunk = %write.chunk.hash, "the store gave another chunk than it says");
                return self.give_up_write(write, "misnamed");
            }
            Err(error) => {
                tracing::warn!(%error, chunk = %write.chunk.hash, "a chunk cannot be written to disk");
                return self.give_up_write(write, "too_large");
            }
        };
        let Some(disk) = &mut self.disk else { return false };
        match disk.tier.write(order) {
            Ok(answer) => {
                disk.writes += 1;
                let finish =
                    answer.into_actor(self).map(move |answer, actor, ctx| actor.wrote(id, answer, ctx));
                self.spawn(ctx, finish);
                true
            }
            Err(Refused::Busy(_)) => {
                self.core.store.postpone_write(id);
                false
            }
            Err(Refused::Closed(_)) => {
                self.core.store.written(id, false);
                self.close_disk();
                false
            }
        }
    }

    /// A chunk cannot be written: it stays in memory, and has another chance when it is evicted. More may follow.
    fn give_up_write(&mut self, write: &ChunkWrite, why: &'static str) -> bool {
        if let Some(disk) = &self.disk {
            disk.tier.not_ordered(why);
        }
        self.core.store.written(write.write, false);
        true
    }

    fn wrote(&mut self, id: WriteId, answer: Result<WriteAnswer, RecvError>, ctx: &mut Context<Self>) {
        if let Some(disk) = &mut self.disk {
            disk.writes -= 1;
        }
        self.core.store.written(id, matches!(answer, Ok(WriteAnswer::Durable | WriteAnswer::AlreadyThere)));
        self.settle(ctx);
    }

    pub(super) fn write_order(&self, write: &ChunkWrite) -> Result<WriteOrder, OrderError> {
        let sources = write.blocks.iter().map(|(block, checksums)| Source {
            place: self.block_place(block),
            checksums: BlockChecksums {
                whole: checksums.whole,
                ranges: checksums.ranges.as_slice().iter().copied().collect(),
            },
        });
        let order = WriteOrder::new(write.fingerprint, write.chunk, sources.collect())?;
        Ok(if write.replaces { order.replacing() } else { order })
    }

    /// The disk failed: the node goes on without it.
    fn close_disk(&mut self) {
        self.core.store.disk_closed();
    }
}

impl StreamHandler<Gone> for GpuActor {
    fn handle(&mut self, Gone { chunks, why }: Gone, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| {
            match why {
                Why::Evicted | Why::Damaged => actor.core.store.left_disk(&chunks),
                Why::Closed => actor.close_disk(),
            }
            actor.settle(ctx);
        });
    }

    /// The tier holds the sender: the stream ends only with the actor.
    fn finished(&mut self, _: &mut Self::Context) {}
}

/// Writes that are ordered at a time; the disk's queue has room for reads besides.
const MAX_WRITES: usize = 64;

/// How long a namespace that could not be described on disk keeps its chunks from there.
const DESCRIBE_AGAIN: Duration = Duration::from_secs(10);

/// How often namespaces are looked for that are of no use any more.
const FORGET_EVERY: Duration = Duration::from_secs(60);

/// When the disk is asked again that has too much to do.
const RETRY: Duration = Duration::from_millis(20);
