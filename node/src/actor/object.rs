//! What an actor does with the object store: asks it for what no node has, reads what leases need, writes what the store
//! wants there.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use larder_core::store::ChangeKind;
use larder_core::store::ids::ChunkKey;
use larder_core::store::{Came, ChunkWrite, FetchId, WriteId};
use larder_core::tiers::known::{Fact, Known, Lifetimes};
use larder_protocol::peer::Class;
use larder_protocol::{Chain, PoolSet};
use tokio::sync::oneshot::error::RecvError;

use super::GpuActor;
use super::locate::{Located, Locating};
use super::reads::ReadLine;
use crate::copy::BlockChecksums;
use crate::disk::{ReadAnswer, ReadOrder, Refused, WriteAnswer};
use crate::object::metrics::Side;
use crate::object::{BlockId, ObjectTier};

/// An actor's part in the object store, as it is handed over.
pub struct ObjectParts {
    /// The tier, which all actors share.
    pub tier: Arc<ObjectTier>,
    /// How long a lease waits for it.
    pub deadline: Duration,
    /// How long a lookup waits to hear what is there.
    pub find_deadline: Duration,
    /// Chunks of which the actor remembers whether they are there: about 100 bytes each.
    pub known_chunks: usize,
}

/// An actor's part in the object store.
pub(super) struct Objects {
    tier: Arc<ObjectTier>,
    pub(super) deadline: Duration,
    find_deadline: Duration,
    /// What was found, so that a lookup and the lease after it ask once.
    known: Known<ChunkKey>,
    /// Uploads under way.
    uploads: usize,
    pub(super) reads: ReadLine,
}

impl Objects {
    pub(super) fn new(parts: ObjectParts) -> Self {
        let ObjectParts { tier, deadline, find_deadline, known_chunks } = parts;
        let known = Known::new(known_chunks, LIFETIMES);
        let reads = ReadLine::new(MAX_READING_BYTES);
        Self { tier, deadline, find_deadline, known, uploads: 0, reads }
    }
}

impl Objects {
    /// Nothing is under way for the actor any more.
    pub(super) fn begin_anew(&mut self) {
        self.uploads = 0;
        self.reads = ReadLine::new(MAX_READING_BYTES);
    }
}

impl GpuActor {
    /// Asks the object store for what no node has, where it is not known already. A chain counts up to its first hole.
    pub(super) fn locate_stored(&mut self, namespace: u32, chain: &Chain, mut located: Located) -> Locating {
        let (Some(objects), Some(fingerprint)) = (&self.objects, self.store.fingerprint(namespace)) else {
            return Locating::Known(located);
        };
        let (blocks, is_flat) = self.store.blocks_of(namespace);
        if objects.tier.is_closed(Side::Reading) {
            return Locating::Known(located);
        }
        let (now, mut unknown) = (self.clock.elapsed(), Vec::new());
        for position in located.unheld() {
            let key = ChunkKey { fingerprint, hash: chain.hashes[position as usize] };
            match objects.known.get(&key, now) {
                Some(Fact::Present) if unknown.is_empty() || is_flat => located.stored.push(position),
                Some(Fact::Present) | None => unknown.push(position),
                Some(_) if is_flat => {}
                Some(_) => break,
            }
        }
        if unknown.is_empty() {
            return Locating::Known(located);
        }
        let chunks = unknown.iter().map(|&position| chain.chunk(position as usize)).collect();
        let blocks = blocks.into_iter().map(|(slice, pool)| BlockId { slice, pool }).collect();
        let Ok(asking) = objects.tier.find(fingerprint, chunks, blocks) else {
            return Locating::Known(located);
        };
        let keys: Vec<(u32, ChunkKey)> = unknown
            .into_iter()
            .map(|position| (position, ChunkKey { fingerprint, hash: chain.hashes[position as usize] }))
            .collect();
        // Its own deadline begins when it is taken up.
        let asking = tokio::time::timeout(objects.find_deadline, asking);
        Locating::Asked(Box::pin(asking.into_actor(self).map(move |found, actor, _| {
            let found = found.ok().and_then(Result::ok).unwrap_or_default();
            located.stored.extend(actor.learn_found(&keys, &found, is_flat));
            located.stored.sort_unstable();
            located
        })))
    }

    /// Remembers what the object store said; the positions that it has.
    fn learn_found(&mut self, keys: &[(u32, ChunkKey)], found: &[bool], is_flat: bool) -> Vec<u32> {
        let now = self.clock.elapsed();
        let Some(objects) = &mut self.objects else { return Vec::new() };
        let mut stored = Vec::new();
        for (&(position, key), &is_there) in keys.iter().zip(found) {
            objects.known.set(key, if is_there { Fact::Present } else { Fact::Absent }, now);
            if is_there {
                stored.push(position);
            } else if !is_flat {
                // Of what is behind the hole it said nothing.
                break;
            }
        }
        stored
    }

    /// Reads chunks that leases wait for into their slots, some at a time: what nobody waits for any more by the time that
    /// its turn comes is not read.
    pub(super) fn read_from_objects(&mut self, ids: Vec<FetchId>, ctx: &mut Context<Self>) {
        let now = self.clock.elapsed();
        for id in ids {
            let class = self.fetching.get(&id).map_or(Class::Decode, |fetch| fetch.class);
            match &mut self.objects {
                Some(objects) => objects.reads.wait(id, class, now),
                None => self.did_not_come(id),
            }
        }
        self.read_queued_objects(ctx);
    }

    /// Whether the object store may have a chunk that no node gave.
    pub(super) fn may_be_stored(&self, id: FetchId) -> bool {
        let (Some(objects), Some(fetch)) = (&self.objects, self.fetching.get(&id)) else { return false };
        let known = objects.known.get(&fetch.key(), self.clock.elapsed());
        !fetch.is_object_asked
            && !matches!(known, Some(Fact::Absent | Fact::Damaged))
            && !objects.tier.is_closed(Side::Reading)
            && self.store.is_leased_soon(id)
    }

    /// Orders reads that wait, as far as the object store is to have them at a time.
    pub(super) fn read_queued_objects(&mut self, ctx: &mut Context<Self>) {
        while let Some(objects) = &mut self.objects
            && let Some(id) = objects.reads.next()
        {
            let Some(fetch) = self.fetching.get_mut(&id) else { continue };
            fetch.is_object_asked = true;
            let fetch = &self.fetching[&id];
            let (bytes, key, chunk) = (fetch.bytes(), fetch.key(), fetch.wanted.chunk);
            let places = fetch.wanted.blocks.iter().map(|block| self.block_place(block)).collect();
            let Some(objects) = &mut self.objects else { return };
            match ReadOrder::new(key.fingerprint, chunk, places).map(|order| objects.tier.read(order)) {
                Ok(Ok(answer)) => {
                    objects.reads.began(bytes);
                    self.meters.object.ordered(bytes, self.clock.elapsed());
                    let finish = answer
                        .into_actor(self)
                        .map(move |answer, actor, ctx| actor.read_object(id, key, bytes, answer, ctx));
                    self.spawn(ctx, finish);
                }
                // Its queue is full: computing is the better way.
                Ok(Err(Refused::Busy(_) | Refused::Closed(_))) => self.did_not_come(id),
                Err(error) => {
                    tracing::error!(%error, "the store made an order that does not fit its memory");
                    self.did_not_come(id);
                }
            }
        }
    }

    /// Takes those of the chunks that wait for the object store out of its queue.
    pub(super) fn unqueue_object_reads(&mut self, ids: &[FetchId]) -> Vec<FetchId> {
        self.objects.as_mut().map(|objects| objects.reads.leave(ids)).unwrap_or_default()
    }

    /// Orders what the store wants written there, as far as it keeps up.
    pub(super) fn write_to_objects(&mut self, ctx: &mut Context<Self>) {
        while self.objects.as_ref().is_some_and(|objects| objects.uploads < MAX_UPLOADS)
            && let Some(write) = self.store.next_upload()
        {
            if !self.order_upload(&write, ctx) {
                return;
            }
        }
    }

    /// Orders one upload; whether more may follow.
    fn order_upload(&mut self, write: &ChunkWrite, ctx: &mut Context<Self>) -> bool {
        let id = write.write;
        let order = match self.write_order(write) {
            Ok(order) => order,
            Err(error) => {
                tracing::warn!(%error, chunk = %write.chunk.hash, "a chunk cannot be written to the object store");
                self.store.uploaded(id, false);
                return true;
            }
        };
        let Some(objects) = &mut self.objects else { return false };
        let key = order.key();
        match objects.tier.write(order) {
            Ok(answer) => {
                objects.uploads += 1;
                let finish = answer
                    .into_actor(self)
                    .map(move |answer, actor, ctx| actor.uploaded(id, key, answer, ctx));
                self.spawn(ctx, finish);
                true
            }
            // Asked again with the next tick at the latest.
            Err(Refused::Busy(_)) => {
                self.store.postpone_upload(id);
                false
            }
            Err(Refused::Closed(_)) => {
                self.store.uploaded(id, false);
                true
            }
        }
    }

    fn uploaded(
        &mut self,
        id: WriteId,
        key: ChunkKey,
        answer: Result<WriteAnswer, RecvError>,
        ctx: &mut Context<Self>,
    ) {
        let is_stored = matches!(answer, Ok(WriteAnswer::Durable | WriteAnswer::AlreadyThere));
        if let Some(objects) = &mut self.objects {
            objects.uploads -= 1;
            if is_stored {
                objects.known.set(key, Fact::Present, self.clock.elapsed());
            }
        }
        self.store.uploaded(id, is_stored);
        self.follow_up(ctx);
    }

    fn read_object(
        &mut self,
        id: FetchId,
        key: ChunkKey,
        bytes: u64,
        answer: Result<ReadAnswer, RecvError>,
        ctx: &mut Context<Self>,
    ) {
        let now = self.clock.elapsed();
        if let Some(objects) = &mut self.objects {
            objects.reads.ended(bytes);
            match &answer {
                Ok(ReadAnswer::Here { .. }) => objects.known.set(key, Fact::Present, now),
                Ok(
                    ReadAnswer::NotHeld
                    | ReadAnswer::OtherBlocks
                    | ReadAnswer::Damaged
                    | ReadAnswer::Disagrees,
                ) => {
                    objects.known.set(key, Fact::Absent, now);
                }
                Ok(ReadAnswer::Closed) | Err(_) => {}
            }
        }
        match &answer {
            Ok(ReadAnswer::Here { .. }) => self.meters.object.delivered(bytes, now),
            _ => self.meters.object.gave_up(bytes),
        }
        match answer {
            Ok(ReadAnswer::Here { checksums, pools, .. }) => self.came_from_objects(id, pools, checksums),
            Ok(_) => self.did_not_come(id),
            Err(_) => {
                tracing::error!("an order of the object tier failed: what it read into stays unused");
                self.end_recalls(id);
            }
        }
        self.read_queued_objects(ctx);
        self.follow_up(ctx);
    }

    fn came_from_objects(&mut self, id: FetchId, pools: PoolSet, checksums: Vec<BlockChecksums>) {
        if self.fetching.remove(&id).is_none() {
            return;
        }
        let kept = self.store.is_leased_soon(id).then_some(ChangeKind::Gained);
        let checksums = checksums.into_iter().map(larder_core::store::Checksums::from).collect();
        let came = Came { checksums, pools, reads: 1, is_on_disk_elsewhere: false, is_stored: true };
        let ready = self.store.fetched(id, Some(came), kept);
        self.end_recalls(id);
        self.finish_gathers(ready);
    }
}

/// What the actor believes: that something is there until a read finds out, at most for a minute; that something is not
/// there for as long as one request's lookup, prefetch and lease take.
const LIFETIMES: Lifetimes = Lifetimes { present: Duration::from_secs(60), absent: Duration::from_secs(1) };

/// Bytes that are read at a time: what a link of 20 Gbit/s delivers in 25 ms, the time that a distant store takes to answer.
const MAX_READING_BYTES: u64 = 64 << 20;

/// Chunks that are uploaded at a time.
const MAX_UPLOADS: usize = 64;
