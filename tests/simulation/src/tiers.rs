//! Disk and object store of an actor: the disk tier's real volume over a simulated disk.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use larder_core::store::ids::{Below, ChunkKey};
use larder_core::store::{BlockMove, ChunkWrite, FetchId, PurgedKeys};
use larder_core::{
    Description, Event, QuestionId, ReadAnswer, ReadId, SegmentVisit, Visited, WriteNumber, Written,
};
use larder_node::disk::format::StorageId;
use larder_node::disk::log::Geometry;
use larder_node::disk::volume::{DiskJob, Volume};
use larder_node::disk::{
    self, BlockPlace, DiskMetrics, DiskPurge, Gone, PurgedSegment, ReadOrder, SnapshotPage, Source, Why,
    WriteAnswer, WriteOrder,
};
use larder_protocol::purge::PurgeMode;
use larder_protocol::{ChunkRef, Fingerprint, NamespaceSpec};
use prometheus::Registry;
use tokio::sync::oneshot;

use crate::bytes::{Doing, Reading};
use crate::world::{ActorHappening, At, World};

/// The disk of an actor, and the orders that wait for it.
pub(crate) struct Tier {
    volume: Volume,
    jobs: VecDeque<(u64, Waiting)>,
    gone: Receiver<Gone>,
    is_working: bool,
    scrub_at: Duration,
}

enum Waiting {
    Read(ReadId, ReadOrder),
    Write(WriteNumber, WriteOrder),
    Forget(ChunkKey),
    Touch(Vec<ChunkKey>),
    Visit(SegmentVisit, u64),
}

enum Answer {
    Read(ReadId, oneshot::Receiver<disk::ReadAnswer>),
    Write(WriteNumber, oneshot::Receiver<WriteAnswer>),
    Listed(u64, oneshot::Receiver<Option<SnapshotPage>>),
    Purged(Arc<PurgedKeys>, u64, oneshot::Receiver<Option<PurgedSegment>>),
    Nothing,
}

impl Tier {
    /// Orders that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.jobs.len()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.volume.is_closed()
    }
}

impl World {
    /// Opens an actor's disk, and tells the core about its chunks.
    pub(crate) fn open_disk(&mut self, at: At) {
        let (host, actor) = (at.life.host, usize::from(at.actor));
        let device = self.hosts[host].platters[actor].device();
        let (send, gone) = channel();
        let on_gone = Box::new(move |gone| drop(send.send(gone)));
        let mut storage = [9; 16];
        (storage[0], storage[1]) = (host as u8, actor as u8);
        let volume = Volume::over(device, GEOMETRY, StorageId(storage), metrics(), on_gone);
        let Ok(volume) = volume else {
            // The disk cannot be read: the node serves without it.
            return self.tell(at, Event::DiskClosed);
        };
        let scrub_at = self.local(host) + SCRUB_EVERY;
        let described: Vec<_> = self.hosts[host].described[actor].clone().into_iter().collect();
        let Some(found) = self.actor(at) else { return };
        found.disk = Some(Tier { volume, jobs: VecDeque::new(), gone, is_working: false, scrub_at });
        for (fingerprint, (name, spec)) in described {
            let Some(found) = self.actor(at) else { return };
            if found.core.know(name, fingerprint, spec).is_err() {
                self.violate(|| format!("{at:?}: a namespace on disk is not known again"));
            }
        }
        let Some(found) = self.actor(at) else { return };
        found.core.list_disk();
        self.tell(at, Event::Alarm);
        self.plan_actor(at, SCRUB_EVERY, ActorHappening::Disk);
    }

    /// Lists or purges the next segment of the disk after a position.
    pub(crate) fn visit_segment(&mut self, at: At, visit: SegmentVisit, after: u64) {
        let busy = self.hosts[at.life.host].busy_disk;
        let is_busy = self.chance(busy);
        let is_closed = self.actor(at).is_none_or(|actor| actor.disk.as_ref().is_none_or(Tier::is_closed));
        if is_closed || is_busy {
            let result = if is_closed { Visited::Closed } else { Visited::Busy };
            return self.tell_at_once(at, Event::SegmentVisited { visit, after, result });
        }
        self.order_of_disk(at, Waiting::Visit(visit, after));
    }

    fn order_of_disk(&mut self, at: At, order: Waiting) {
        let host = &self.hosts[at.life.host];
        // A large disk is read for a while before its contents are known; engines write meanwhile.
        let is_first = matches!(order, Waiting::Visit(SegmentVisit::List, 0));
        let after =
            if host.slow_disk || is_first { self.some_us(1_000, 1_500_000) } else { self.some_us(50, 3_000) };
        let Some(actor) = self.actor(at) else { return };
        let life = actor.life;
        let Some(tier) = &mut actor.disk else { return };
        tier.jobs.push_back((life, order));
        if !tier.is_working {
            tier.is_working = true;
            self.plan_actor(at, after, ActorHappening::Disk);
            if after >= SILENT_AFTER {
                self.tell_at_once(at, Event::DiskSilent(true));
            }
        }
    }

    /// The disk's thread carries out the waiting orders.
    pub(crate) fn disk_works(&mut self, at: At) {
        let now = self.local(at.life.host);
        let Some(actor) = self.actor(at) else { return };
        let Some(tier) = &mut actor.disk else { return };
        tier.is_working = false;
        let (mut jobs, mut answers) = (Vec::new(), Vec::new());
        for (life, waiting) in tier.jobs.drain(..) {
            let (job, answer) = waiting.job();
            jobs.push(job);
            answers.push((life, answer));
        }
        let has_jobs = !jobs.is_empty();
        let is_silent = actor.core.store().is_disk_silent();
        if has_jobs {
            tier.volume.perform(jobs, &mut || None);
        } else if tier.volume.wants_eviction() {
            tier.volume.evict_ahead();
        } else if now >= tier.scrub_at {
            tier.scrub_at = now + SCRUB_EVERY;
            _ = tier.volume.scrub();
        }
        let wants_more = tier.volume.wants_eviction();
        let gone: Vec<Gone> = tier.gone.try_iter().collect();
        let life = actor.life;
        for Gone { chunks, why } in gone {
            let event = match why {
                Why::Evicted | Why::Damaged => Event::LeftDisk(chunks),
                Why::Closed => Event::DiskClosed,
            };
            self.tell_soon(at, life, event);
        }
        answers.into_iter().for_each(|(life, answer)| self.disk_answered(at, life, answer));
        if is_silent {
            self.tell_soon(at, life, Event::DiskSilent(false));
        }
        let pause = if wants_more { Duration::from_millis(2) } else { SCRUB_EVERY };
        if !has_jobs || wants_more {
            self.plan_actor(at, pause, ActorHappening::Disk);
        }
    }

    fn disk_answered(&mut self, at: At, life: u64, answer: Answer) {
        let event = match answer {
            Answer::Read(read, mut answer) => {
                let answer = answer.try_recv().map_or(ReadAnswer::Lost, ReadAnswer::from);
                self.coverage.note(crate::coverage::read(&answer));
                if answer == ReadAnswer::Lost {
                    return self.violate(|| format!("{at:?}: a read of the disk has no answer"));
                }
                Event::ReadEnded { read, answer }
            }
            Answer::Write(number, mut answer) => {
                let answer = answer.try_recv().map_or(Written::Failed, Written::from);
                self.coverage.note(crate::coverage::written(&answer));
                Event::WriteEnded { number, answer }
            }
            Answer::Listed(after, mut page) => {
                let done = |SnapshotPage { held, next }| Visited::Done { held, next };
                let result = page.try_recv().ok().flatten().map_or(Visited::Closed, done);
                Event::SegmentVisited { visit: SegmentVisit::List, after, result }
            }
            Answer::Purged(keys, after, mut purged) => {
                let done = |purged: PurgedSegment| Visited::Done { held: Vec::new(), next: purged.next };
                let result = purged.try_recv().ok().flatten().map_or(Visited::Closed, done);
                Event::SegmentVisited { visit: SegmentVisit::Purge(keys), after, result }
            }
            Answer::Nothing => return,
        };
        self.tell_soon(at, life, event);
    }

    /// Makes a tier read a chunk into its slots.
    pub(crate) fn read(&mut self, at: At, read: ReadId, tier: Below, chunk: FetchId) {
        let Some(actor) = self.actor(at) else { return };
        let wanted = actor.core.wanted(chunk).map(|(fingerprint, wanted)| (fingerprint, wanted.clone()));
        let Some((fingerprint, wanted)) = wanted else {
            return self.tell_at_once(at, Event::ReadEnded { read, answer: ReadAnswer::Closed });
        };
        self.begin(at, Doing::Read(read), &wanted.blocks, true);
        let busy = self.hosts[at.life.host].busy_disk;
        let refused = match tier {
            _ if self.chance(busy) => Some(ReadAnswer::Busy),
            Below::Disk => match self.actor(at).and_then(|actor| actor.disk.as_ref()) {
                Some(tier) if tier.waiting() >= QUEUE_ORDERS => Some(ReadAnswer::Busy),
                Some(tier) if !tier.is_closed() => None,
                _ => Some(ReadAnswer::Closed),
            },
            Below::Object => self.objects.is_closed.then_some(ReadAnswer::Closed),
        };
        if let Some(answer) = refused {
            self.coverage.note(crate::coverage::read(&answer));
            return self.tell_at_once(at, Event::ReadEnded { read, answer });
        }
        let Some(places) = self.places(at, &wanted.blocks) else {
            return self.violate(|| format!("{at:?}: {read:?} goes to an extent without memory"));
        };
        let Ok(order) = ReadOrder::new(fingerprint, wanted.chunk, places) else {
            return self.violate(|| format!("{at:?}: {read:?} does not fit its memory"));
        };
        match tier {
            Below::Disk => self.order_of_disk(at, Waiting::Read(read, order)),
            Below::Object => self.read_object(at, read, &wanted, fingerprint),
        }
    }

    /// Makes a tier write a chunk from its slots.
    pub(crate) fn write(&mut self, at: At, number: WriteNumber, write: ChunkWrite) {
        let blocks: Vec<BlockMove> =
            write.blocks.iter().map(|(block, _)| BlockMove { is_in_place: true, ..*block }).collect();
        self.begin(at, Doing::Write(number), &blocks, false);
        for block in &blocks {
            let (extent, offset) = (block.place.extent, block.place.offset);
            self.must_hold(at, &Reading { extent, offset, key: block.key, from: 0, to: block.bytes });
            if (block.key.fingerprint, block.key.hash) != (write.fingerprint, write.chunk.hash) {
                self.violate(|| format!("{at:?}: {number:?} writes a block of another chunk"));
            }
        }
        let tier = write.write.tier;
        let busy = self.hosts[at.life.host].busy_disk;
        let refused = match tier {
            _ if self.chance(busy) => Some(Written::Busy),
            Below::Disk => match self.actor(at).and_then(|actor| actor.disk.as_ref()) {
                Some(tier) if tier.waiting() >= QUEUE_ORDERS => Some(Written::Busy),
                Some(tier) if !tier.is_closed() => None,
                _ => Some(Written::Closed),
            },
            Below::Object => self.objects.is_closed.then_some(Written::Closed),
        };
        if let Some(answer) = refused {
            self.coverage.note(crate::coverage::written(&answer));
            return self.tell_at_once(at, Event::WriteEnded { number, answer });
        }
        let Some(order) = self.write_order(at, &write) else {
            return self.violate(|| format!("{at:?}: {number:?} is no order that a tier can carry out"));
        };
        match tier {
            Below::Disk => self.order_of_disk(at, Waiting::Write(number, order)),
            Below::Object => self.write_object(at, number, &write),
        }
    }

    fn write_order(&mut self, at: At, write: &ChunkWrite) -> Option<WriteOrder> {
        let blocks: Vec<BlockMove> = write.blocks.iter().map(|(block, _)| *block).collect();
        let places = self.places(at, &blocks)?;
        let sources = places
            .into_iter()
            .zip(&write.blocks)
            .map(|(place, (_, sums))| Source { place, checksums: sums.clone() });
        let order = WriteOrder::new(write.fingerprint, write.chunk, sources.collect()).ok()?;
        Some(if write.replaces { order.replacing() } else { order })
    }

    fn places(&mut self, at: At, blocks: &[BlockMove]) -> Option<Vec<BlockPlace>> {
        let memory = self.memory_of(at, blocks)?;
        let place = |(block, memory): (&BlockMove, Arc<_>)| BlockPlace {
            slice: block.key.slice,
            pool: block.key.pool,
            memory,
            offset: block.place.offset,
            bytes: block.bytes,
            range_bytes: block.range_bytes,
        };
        Some(blocks.iter().zip(memory).map(place).collect())
    }

    pub(crate) fn touch(&mut self, at: At, keys: Vec<ChunkKey>) {
        self.order_of_disk(at, Waiting::Touch(keys));
    }

    pub(crate) fn remove(&mut self, at: At, key: ChunkKey) {
        self.order_of_disk(at, Waiting::Forget(key));
    }

    /// Describes a namespace on disk.
    pub(crate) fn describe(&mut self, at: At, fingerprint: Fingerprint, tenant: String, spec: NamespaceSpec) {
        let after = self.some_us(100, 5_000);
        let host = &mut self.hosts[at.life.host];
        let fails = host.busy_disk > 0 && self.random.u8(..3) == 0;
        if !fails {
            host.described[usize::from(at.actor)].insert(fingerprint, (tenant, spec));
        }
        let description = if fails { Description::Failed } else { Description::There };
        let life = self.actor(at).map_or(0, |actor| actor.life);
        let event = Event::Described { fingerprint, description };
        self.plan_actor(at, after, ActorHappening::InLife(life, event));
    }

    pub(crate) fn forget_descriptions(&mut self, at: At, unused: Vec<Fingerprint>) {
        let life = self.actor(at).map_or(0, |actor| actor.life);
        for fingerprint in unused {
            self.hosts[at.life.host].described[usize::from(at.actor)].remove(&fingerprint);
            let event = Event::Described { fingerprint, description: Description::Gone };
            self.tell_soon(at, life, event);
        }
    }

    /// Asks the object store which chunks it has.
    pub(crate) fn find_stored(
        &mut self,
        at: At,
        question: QuestionId,
        fingerprint: Fingerprint,
        chunks: &[ChunkRef],
        blocks: Vec<(u16, u8)>,
    ) {
        if self.objects.is_closed {
            return self.tell_at_once(at, Event::StoredFound { question, found: Vec::new() });
        }
        let keys = chunks.iter().map(|chunk| ChunkKey { fingerprint, hash: chunk.hash }).collect();
        let life = self.actor(at).map_or(0, |actor| actor.life);
        let after = self.object_takes();
        let job = crate::objects::Job::Find { life, question, keys, blocks };
        self.plan_actor(at, after, ActorHappening::Object(job));
    }
}

impl Waiting {
    fn job(self) -> (DiskJob, Answer) {
        match self {
            Self::Read(read, order) => {
                let (done, answer) = oneshot::channel();
                (DiskJob::Read((order, done)), Answer::Read(read, answer))
            }
            Self::Write(number, order) => {
                let (done, answer) = oneshot::channel();
                (DiskJob::Write((order, done)), Answer::Write(number, answer))
            }
            Self::Forget(key) => (DiskJob::Forget(key, oneshot::channel().0), Answer::Nothing),
            Self::Touch(keys) => (DiskJob::Touch(keys), Answer::Nothing),
            Self::Visit(SegmentVisit::List, after) => {
                let (done, answer) = oneshot::channel();
                (DiskJob::Snapshot(after, done), Answer::Listed(after, answer))
            }
            Self::Visit(SegmentVisit::Purge(keys), after) => {
                let (done, answer) = oneshot::channel();
                let purge = DiskPurge { keys: Arc::clone(&keys), mode: PurgeMode::Remove };
                (DiskJob::Purge(purge, after, done), Answer::Purged(keys, after, answer))
            }
        }
    }
}

/// The metrics of disks. Nobody reads them.
fn metrics() -> DiskMetrics {
    static METRICS: OnceLock<DiskMetrics> = OnceLock::new();
    METRICS.get_or_init(|| DiskMetrics::new(&Registry::new(), 0).expect("the first are registered")).clone()
}

/// A megabyte: some fifty chunks.
const GEOMETRY: Geometry = Geometry { segments: 8, segment_pages: 32 };

const QUEUE_ORDERS: usize = 32;
const SCRUB_EVERY: Duration = Duration::from_millis(500);
/// A drive that takes longer for an order counts as silent from the start.
const SILENT_AFTER: Duration = Duration::from_secs(1);
