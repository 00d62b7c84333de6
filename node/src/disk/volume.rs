//! One tier's records on one device: carries out orders on the caller's thread.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::Discriminant;
use std::sync::Arc;
use std::time::Duration;

use larder_core::store::ids::ChunkKey;
use larder_net::seldom::Seldom;
use larder_protocol::Fingerprint;
use tokio::sync::oneshot;

use super::damage::FoundDamage;
use super::drive::Drive;
use super::format::{PAGE_BYTES, StorageId};
use super::log::{Geometry, Log};
use super::metrics::DiskMetrics;
use super::order::{DiskPurge, Gone, PurgedSegment, ReadAnswer, SnapshotPage, Why, WriteAnswer};
use super::owners::Owners;
use crate::clock::Clock;

mod budget;
mod check;
mod open;
mod purge;
mod read;
mod recover;
mod transfers;
mod write;

use budget::ReadBudget;
pub(crate) use check::{Check, Damage};
pub use read::Reading;
pub(crate) use read::{answer, fits};
use transfers::Transfers;
use write::Pending;
pub use write::Writing;

/// The records of a tier, and the means to read and write them.
///
/// After the first failed write or sync, and after too many failed reads, nothing is written or read any more.
pub struct Volume {
    transfers: Transfers,
    storage: StorageId,
    geometry: Geometry,
    log: Log,
    metrics: DiskMetrics,
    pending: Vec<Pending>,
    on_gone: OnGone,
    scrub_at: u32,
    read_budget: ReadBudget,
    /// The lines about records with each kind of fault, and about segments that cannot be read.
    damaged: HashMap<Discriminant<Damage>, Seldom>,
    unreadable: Seldom,
    found: FoundDamage,
    clock: Clock,
    owners: Arc<Owners>,
    /// Why the tier is closed.
    trouble: Option<String>,
}

/// Called on the tier's thread with chunks that left the disk. Must not wait.
pub type OnGone = Box<dyn FnMut(Gone) + Send>;

/// A job, and the channel of its result.
pub enum DiskJob {
    /// Writes a chunk.
    Write(Writing),
    /// Reads a chunk.
    Read(Reading),
    /// Forgets a chunk; the answer says whether it was there.
    Forget(ChunkKey, oneshot::Sender<bool>),
    /// Notes that chunks were used elsewhere.
    Touch(Vec<ChunkKey>),
    /// Lists the chunks of the next segment after a position; the answer is `None` if the tier is closed.
    Snapshot(u64, oneshot::Sender<Option<SnapshotPage>>),
    /// Purges the next segment after a position; the answer is `None` if the tier is closed.
    Purge(DiskPurge, u64, oneshot::Sender<Option<PurgedSegment>>),
}

impl Volume {
    /// Opens the volume on a device; a new device is all zeros.
    ///
    /// # Errors
    /// Fails if the device fails.
    pub fn over(
        device: Box<dyn super::io::DiskDevice>,
        geometry: Geometry,
        storage: StorageId,
        metrics: DiskMetrics,
        on_gone: OnGone,
    ) -> io::Result<Self> {
        let transfers = Transfers::new(device, Drive::new(), metrics.clone())?;
        Self::with(transfers, geometry, storage, metrics, on_gone)
    }

    fn with(
        transfers: Transfers,
        geometry: Geometry,
        storage: StorageId,
        metrics: DiskMetrics,
        on_gone: OnGone,
    ) -> io::Result<Self> {
        let clock = Clock::start();
        let mut volume = Self {
            transfers,
            storage,
            geometry,
            log: Log::new(geometry),
            metrics,
            pending: Vec::new(),
            on_gone,
            scrub_at: 0,
            read_budget: ReadBudget::default(),
            damaged: HashMap::new(),
            unreadable: Seldom::new(QUIET),
            found: FoundDamage::new(clock),
            clock,
            owners: Arc::default(),
            trouble: None,
        };
        volume.log = volume.recover()?;
        volume.metrics.bring_up_to_date(&volume.log);
        Ok(volume)
    }

    /// Carries jobs out: reads first, since somebody waits for them; then the others in their order. One sync serves all
    /// writes. Each job is answered, whatever happens. `more` gives reads that came since. They join while the drive still
    /// works on the other reads, so that it is not idle between batches.
    pub fn perform(&mut self, jobs: Vec<DiskJob>, more: &mut dyn FnMut() -> Option<Reading>) {
        let (reads, others): (Vec<DiskJob>, Vec<DiskJob>) =
            jobs.into_iter().partition(|job| matches!(job, DiskJob::Read(_)));
        let mut others = VecDeque::from(others);
        let reads =
            reads.into_iter().filter_map(|job| if let DiskJob::Read(read) = job { Some(read) } else { None });
        self.guard(|volume| volume.read_all(reads.collect(), more));
        while let Some(job) = others.pop_front() {
            self.guard(|volume| volume.perform_one(job));
        }
        self.guard(Self::commit);
        self.metrics.bring_up_to_date(&self.log);
    }

    /// The namespaces that have records, those with the most first.
    pub fn namespaces(&self) -> Vec<Fingerprint> {
        self.log.namespaces()
    }

    /// The tenants of the namespaces.
    pub fn owners(&self) -> &Arc<Owners> {
        &self.owners
    }

    /// How the file is divided into segments.
    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The damage that was found.
    pub(crate) fn found(&self) -> &FoundDamage {
        &self.found
    }

    /// The drive below.
    pub(crate) fn drive(&self) -> &Drive {
        self.transfers.drive()
    }

    /// Whether a segment should be given up ahead of need.
    pub fn wants_eviction(&self) -> bool {
        !self.is_closed() && self.log.wants_eviction()
    }

    /// Does one step of giving up a segment.
    pub fn evict_ahead(&mut self) {
        self.guard(Self::evict_step);
        self.metrics.bring_up_to_date(&self.log);
    }

    /// Verifies the next record. Returns its bytes, or `None` if there is no record.
    pub fn scrub(&mut self) -> Option<u64> {
        let mut scrubbed = None;
        self.guard(|volume| {
            scrubbed = volume.scrub_next()?;
            Ok(())
        });
        self.metrics.bring_up_to_date(&self.log);
        scrubbed
    }

    /// Finishes the work that was begun, before the tier ends.
    pub fn settle(&mut self) {
        if !self.is_closed() {
            self.guard(|volume| {
                volume.commit()?;
                volume.transfers.sync()
            });
        }
    }

    /// Closes the tier if its file was taken away.
    pub(crate) fn look(&mut self) {
        if !self.is_closed() {
            self.guard(|volume| volume.transfers.look());
        }
    }

    /// Whether the device failed.
    pub fn is_closed(&self) -> bool {
        self.trouble.is_some()
    }

    /// Why the tier is closed.
    pub(crate) fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Closes the tier: every later job is answered so.
    pub(crate) fn close(&mut self, error: &io::Error) {
        if !self.is_closed() {
            self.trouble = Some(error.to_string());
            tracing::error!(%error, "the disk tier closes itself: check drive and folder, then start the node again");
            self.metrics.closed.set(1);
            self.give_up_pending();
            self.tell_gone(Vec::new(), Why::Closed);
        }
    }

    /// Runs `work`, and closes the tier if the device fails.
    fn guard(&mut self, work: impl FnOnce(&mut Self) -> io::Result<()>) {
        if let Err(error) = work(self) {
            self.close(&error);
        }
    }

    fn perform_one(&mut self, job: DiskJob) -> io::Result<()> {
        match job {
            DiskJob::Write((_, done)) if self.is_closed() => self.answer_write(done, WriteAnswer::Closed),
            DiskJob::Write(writing) => self.write(writing)?,
            DiskJob::Read(reading) => self.read_all(vec![reading], &mut || None)?,
            DiskJob::Touch(keys) => keys.iter().for_each(|key| self.log.touch(key)),
            DiskJob::Forget(key, done) => {
                // The log does not have records that are still being written.
                let committed = if self.is_closed() { Ok(()) } else { self.commit() };
                // If nobody waits any more, there is nobody to tell.
                let _ = done.send(self.log.forget(&key));
                committed?;
            }
            DiskJob::Purge(_, _, done) if self.is_closed() => drop(done.send(None)),
            DiskJob::Purge(purge, after, done) => {
                let purged = self.purge(&purge, after);
                let _ = done.send(purged.as_ref().ok().copied());
                purged?;
            }
            DiskJob::Snapshot(_, done) if self.is_closed() => drop(done.send(None)),
            DiskJob::Snapshot(after, done) => {
                self.commit()?;
                drop(done.send(Some(self.snapshot(after)?)));
            }
        }
        Ok(())
    }

    fn tell_gone(&mut self, chunks: Vec<ChunkKey>, why: Why) {
        if !chunks.is_empty() || why == Why::Closed {
            (self.on_gone)(Gone { chunks, why });
        }
    }
}

impl DiskJob {
    /// Bytes that the job will write.
    pub(crate) fn write_bytes(&self) -> u64 {
        if let Self::Write((order, _)) = self { order.bytes() } else { 0 }
    }

    /// Answers that the tier is closed.
    pub(crate) fn refuse(self, metrics: &DiskMetrics) {
        metrics.answered("closed");
        match self {
            Self::Write((_, done)) => drop(done.send(WriteAnswer::Closed)),
            Self::Read((_, done)) => drop(done.send(ReadAnswer::Closed)),
            Self::Forget(_, done) => drop(done.send(false)),
            Self::Touch(_) => {}
            Self::Snapshot(_, done) => drop(done.send(None)),
            Self::Purge(_, _, done) => drop(done.send(None)),
        }
    }
}

/// At most one line about each kind of fault is logged in this time. The metrics count every fault.
const QUIET: Duration = Duration::from_secs(60);

static EMPTY_PAGE: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

fn page_bytes(pages: u32) -> u64 {
    u64::from(pages) * PAGE_BYTES
}

#[cfg(test)]
mod tests;
