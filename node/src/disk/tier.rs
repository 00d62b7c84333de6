//! A disk tier: its thread, and the queue before it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use larder_core::store::ids::ChunkKey;
use larder_core::{Visited, Written};
use larder_net::failure::Failure;
use larder_protocol::Fingerprint;
use tokio::sync::oneshot;

use super::DiskOptions;
use super::damage::FoundDamage;
use super::drive::{Drive, DriveWatch, Ending};
use super::log::Geometry;
use super::metrics::DiskMetrics;
use super::order::{DiskPurge, PurgedSegment, ReadAnswer, ReadOrder, SnapshotPage, WriteAnswer, WriteOrder};
use super::owners::Owners;
use super::volume::{DiskJob, Volume};
use crate::clock::Clock;
use crate::threads;

pub use super::volume::OnGone;

/// An open disk tier. Dropping it waits until every order is done, then unlocks the file. It does not wait for a silent drive: the
/// thread stays behind with its orders, so that nobody else uses their places.
///
/// While the drive is silent, the tier takes no orders that somebody waits for. Orders that it has taken stay until the drive
/// answers.
///
/// Completions come on channels of their own and cannot be refused. An error of such a channel means that the tier's thread
/// panicked: a bug is in the log, the tier is closed, and the order's places must not be used again, since the drive may
/// still write there.
pub struct DiskTier {
    queue: SyncSender<DiskJob>,
    _thread: Ending,
    /// Why the tier closed itself, if it did.
    trouble: Arc<OnceLock<String>>,
    found: FoundDamage,
    metrics: DiskMetrics,
    namespaces: Vec<Fingerprint>,
    owners: Arc<Owners>,
    capacity_bytes: u64,
    geometry: Geometry,
    watch: DriveWatch,
    /// Whether the drive was silent when the tier was looked at last.
    was_silent: AtomicBool,
}

/// Why a tier did not take an order: nothing was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The queue is full: try again later, or do without.
    Busy,
    /// The tier closed itself: do without.
    Closed,
    /// The drive does not answer: do without until it does.
    Silent,
}

impl DiskTier {
    /// Opens the tier in a folder, or makes one, and starts its thread. Opening takes well below a second for thousands of
    /// segments; making a large tier takes longer.
    ///
    /// The tier's thread calls `on_gone` with chunks that the tier dropped by itself.
    ///
    /// # Errors
    /// Says what to change.
    pub fn open(options: &DiskOptions, metrics: DiskMetrics, on_gone: OnGone) -> Result<Self, Failure> {
        Self::open_on(&Drive::new(), options, metrics, on_gone)
    }

    /// As [`DiskTier::open`], on a drive that others watch meanwhile.
    pub(crate) fn open_on(
        drive: &Drive,
        options: &DiskOptions,
        metrics: DiskMetrics,
        on_gone: OnGone,
    ) -> Result<Self, Failure> {
        Self::start(Volume::open(options, drive, metrics.clone(), on_gone)?, options, metrics)
    }

    pub(super) fn start(
        volume: Volume,
        options: &DiskOptions,
        metrics: DiskMetrics,
    ) -> Result<Self, Failure> {
        let (namespaces, owners) = (volume.namespaces(), Arc::clone(volume.owners()));
        let watch = DriveWatch::new(volume.drive(), options.silent_after);
        let (found, geometry) = (volume.found().clone(), volume.geometry());
        let (queue, jobs) = sync_channel(options.queue_orders);
        let trouble = Arc::<OnceLock<String>>::default();
        let work = Work {
            volume,
            jobs,
            deferred: None,
            trouble: Arc::clone(&trouble),
            metrics: metrics.clone(),
            clock: Clock::start(),
            scrub: Scrub::new(options.scrub_bytes_per_second),
            look_at: Duration::ZERO,
        };
        let thread = threads::spawn("larder-disk", &options.cpus, move || work.run());
        let thread =
            thread.map_err(|error| Failure::because(error, "cannot start the disk tier's thread"))?;
        Ok(Self {
            queue,
            _thread: Ending { thread: Some(thread.into()), watch: watch.clone() },
            trouble,
            found,
            metrics,
            namespaces,
            owners,
            capacity_bytes: options.capacity_bytes,
            geometry,
            watch,
            was_silent: AtomicBool::new(false),
        })
    }

    /// Bytes that the tier takes on disk.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes that chunks have taken so far. The tier frees many bytes at a time.
    pub fn used_bytes(&self) -> u64 {
        self.metrics.used_bytes()
    }

    /// Orders a chunk to be written. The order is carried out even if nobody waits for the answer. Until the answer the places
    /// must stay as they are.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn write(&self, order: WriteOrder) -> Result<oneshot::Receiver<WriteAnswer>, Refused> {
        self.order(|done| DiskJob::Write((order, done)))
    }

    /// Orders a chunk to be read. The places belong to the order until the answer.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn read(&self, order: ReadOrder) -> Result<oneshot::Receiver<ReadAnswer>, Refused> {
        self.order(|done| DiskJob::Read((order, done)))
    }

    /// Forgets a chunk; the answer says whether it was there. A restart may bring the chunk back, which does no harm: bytes
    /// under a key never change.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn remove(&self, key: ChunkKey) -> Result<oneshot::Receiver<bool>, Refused> {
        let (done, answer) = oneshot::channel();
        self.send(DiskJob::Forget(key, done)).map(|()| answer)
    }

    /// Says that chunks were used elsewhere (from host memory, say), so that they stay when their segment is given up. This is a
    /// hint: a full queue drops it.
    pub fn touch(&self, keys: Vec<ChunkKey>) {
        // Refused: it is only a hint.
        let _ = self.send(DiskJob::Touch(keys));
    }

    /// Lists the chunks, a segment at a time from old to young. Begin with 0, go on with [`SnapshotPage::next`]. A chunk that
    /// moves meanwhile may be listed twice, but is never left out. `None` means that the tier is closed.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn snapshot(&self, after: u64) -> Result<oneshot::Receiver<Option<SnapshotPage>>, Refused> {
        self.order(|done| DiskJob::Snapshot(after, done))
    }

    /// Purges chunks, a segment at a time. Begin with 0, go on with [`PurgedSegment::next`]. Purged chunks are gone for good: no
    /// start finds them again. `None` means that the tier is closed.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn purge(
        &self,
        purge: DiskPurge,
        after: u64,
    ) -> Result<oneshot::Receiver<Option<PurgedSegment>>, Refused> {
        self.order(|done| DiskJob::Purge(purge, after, done))
    }

    /// Whether the tier closed itself after a failure.
    pub fn is_closed(&self) -> bool {
        self.trouble.get().is_some()
    }

    /// Why the tier closed itself, if it did.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.get().map(String::as_str)
    }

    /// How the tier is divided into segments.
    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Where damage is noted.
    pub(crate) fn found(&self) -> &FoundDamage {
        &self.found
    }

    /// The damage that was found lately.
    pub(crate) fn damage(&self) -> Option<String> {
        self.found.trouble()
    }

    /// Whether the drive is silent. The tier is to be looked at often: this logs when the drive falls silent, and when it answers
    /// again.
    pub(crate) fn look(&self) -> bool {
        let silent = self.watch.silent_for();
        if self.was_silent.swap(silent.is_some(), Ordering::Relaxed) != silent.is_some() {
            self.metrics.silent.set(silent.is_some().into());
            match silent {
                Some(silent) => tracing::warn!(
                    ?silent,
                    "the drive does not answer: the node does without its disk until it does"
                ),
                None => tracing::info!("the drive answers again: the node uses its disk again"),
            }
        }
        silent.is_some()
    }

    /// Says whether the drive is silent.
    pub(crate) fn watch(&self) -> &DriveWatch {
        &self.watch
    }

    /// The namespaces that had records when the tier was opened, those with the most first.
    pub fn namespaces_at_start(&self) -> &[Fingerprint] {
        &self.namespaces
    }

    /// The tenants of the namespaces. While several tenants are known, each keeps its part of the disk.
    pub fn owners(&self) -> &Owners {
        &self.owners
    }

    fn order<A>(
        &self,
        job: impl FnOnce(oneshot::Sender<A>) -> DiskJob,
    ) -> Result<oneshot::Receiver<A>, Refused> {
        if self.watch.silent_for().is_some() && !self.is_closed() {
            self.metrics.answered("silent");
            return Err(Refused::Silent);
        }
        let (done, answer) = oneshot::channel();
        self.send(job(done)).map(|()| answer)
    }

    fn send(&self, job: DiskJob) -> Result<(), Refused> {
        if self.is_closed() {
            self.metrics.answered("closed");
            return Err(Refused::Closed);
        }
        self.queue.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => {
                self.metrics.answered("busy");
                Refused::Busy
            }
            TrySendError::Disconnected(_) => Refused::Closed,
        })
    }
}

impl From<Refused> for larder_core::ReadAnswer {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Busy => Self::Busy,
            Refused::Closed => Self::Closed,
            Refused::Silent => Self::Impossible,
        }
    }
}

impl From<Refused> for Written {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Busy => Self::Busy,
            Refused::Closed => Self::Closed,
            // The chunk stays in memory, and has another chance when it is evicted.
            Refused::Silent => Self::Failed,
        }
    }
}

impl From<Refused> for Visited {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Busy | Refused::Silent => Self::Busy,
            Refused::Closed => Self::Closed,
        }
    }
}

/// The thread's state.
struct Work {
    volume: Volume,
    jobs: Receiver<DiskJob>,
    /// A job other than a read that came while more reads were looked for.
    deferred: Option<DiskJob>,
    trouble: Arc<OnceLock<String>>,
    metrics: DiskMetrics,
    clock: Clock,
    scrub: Scrub,
    /// The time of the file's next check.
    look_at: Duration,
}

/// The time at which the scrubber may look at the next record.
struct Scrub {
    bytes_per_second: u64,
    next: Duration,
}

impl Work {
    /// Runs the disk thread until the tier is dropped.
    fn run(mut self) {
        loop {
            match self.wait() {
                Ok(first) => {
                    let batch = self.batch(first);
                    self.perform(batch);
                    if self.scrub.is_overdue(self.clock.elapsed()) {
                        self.scrub_next();
                    }
                }
                Err(RecvTimeoutError::Timeout) => self.work_ahead(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.look_after_file();
        }
        self.guard(Volume::settle);
    }

    /// Waits for the next job. Times out if there is other work to do.
    fn wait(&mut self) -> Result<DiskJob, RecvTimeoutError> {
        if let Some(job) = self.deferred.take() {
            return Ok(job);
        }
        if self.volume.wants_eviction() {
            return match self.jobs.try_recv() {
                Ok(job) => Ok(job),
                Err(TryRecvError::Empty) => Err(RecvTimeoutError::Timeout),
                Err(TryRecvError::Disconnected) => Err(RecvTimeoutError::Disconnected),
            };
        }
        if self.volume.is_closed() {
            return self.jobs.recv().map_err(|_| RecvTimeoutError::Disconnected);
        }
        let now = self.clock.elapsed();
        let look = self.look_at.saturating_sub(now);
        self.jobs.recv_timeout(self.scrub.due_in(now).map_or(look, |scrub| scrub.min(look)))
    }

    /// Checks from time to time whether the file is still there.
    fn look_after_file(&mut self) {
        let now = self.clock.elapsed();
        if now >= self.look_at {
            self.look_at = now + LOOK_EVERY;
            self.guard(Volume::look);
        }
    }

    /// The waiting jobs, up to a bound, so that later reads wait no longer than one batch takes.
    fn batch(&self, first: DiskJob) -> Vec<DiskJob> {
        let mut bytes = first.write_bytes();
        let mut batch = vec![first];
        while batch.len() < BATCH_ORDERS
            && bytes < BATCH_WRITE_BYTES
            && let Ok(job) = self.jobs.try_recv()
        {
            bytes += job.write_bytes();
            batch.push(job);
        }
        batch
    }

    /// Carries out a batch, and the reads that come meanwhile, up to a bound that limits how long writes wait.
    fn perform(&mut self, batch: Vec<DiskJob>) {
        let Self { volume, jobs, deferred, .. } = self;
        let mut bytes = 0;
        let mut more = || {
            if deferred.is_some() || bytes >= BATCH_READ_BYTES {
                return None;
            }
            match jobs.try_recv().ok()? {
                DiskJob::Read(reading) => {
                    bytes += reading.0.bytes();
                    Some(reading)
                }
                job => {
                    *deferred = Some(job);
                    None
                }
            }
        };
        let performed = catch_unwind(AssertUnwindSafe(|| volume.perform(batch, &mut more)));
        self.follow(performed.is_ok());
    }

    /// Does a little of the work that nobody ordered: gives up segments ahead of need, or scrubs.
    fn work_ahead(&mut self) {
        if self.volume.wants_eviction() {
            self.guard(Volume::evict_ahead);
            return;
        }
        if self.scrub.due_in(self.clock.elapsed()) == Some(Duration::ZERO) {
            self.scrub_next();
        }
    }

    fn scrub_next(&mut self) {
        let mut scrubbed = None;
        self.guard(|volume| scrubbed = volume.scrub());
        self.scrub.did(self.clock.elapsed(), scrubbed);
    }

    /// Runs `work` on the volume. A panic only closes the tier.
    fn guard(&mut self, work: impl FnOnce(&mut Volume)) {
        let volume = &mut self.volume;
        let worked = catch_unwind(AssertUnwindSafe(|| work(volume)));
        self.follow(worked.is_ok());
    }

    /// Follows up on work: a panic closes the tier, and a closed tier refuses the waiting jobs.
    fn follow(&mut self, has_worked: bool) {
        if !has_worked {
            self.volume.close(&std::io::Error::other("the disk thread panicked"));
        }
        if let Some(trouble) = self.volume.trouble() {
            self.trouble.get_or_init(|| trouble.to_owned());
            while let Some(job) = self.deferred.take().or_else(|| self.jobs.try_recv().ok()) {
                job.refuse(&self.metrics);
            }
        }
    }
}

impl Scrub {
    fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, next: Duration::ZERO }
    }

    /// The time until the next record; `None` if there is no scrubbing.
    fn due_in(&self, now: Duration) -> Option<Duration> {
        (self.bytes_per_second > 0).then(|| self.next.saturating_sub(now))
    }

    /// Whether the scrubber has waited too long for a moment without orders, and now runs between orders.
    fn is_overdue(&self, now: Duration) -> bool {
        self.bytes_per_second > 0 && now.saturating_sub(self.next) >= SCRUB_PATIENCE
    }

    /// Notes that `bytes` were verified, or that there was nothing to verify.
    fn did(&mut self, now: Duration, bytes: Option<u64>) {
        let pause = match bytes {
            Some(bytes) => Duration::from_secs_f64(bytes as f64 / self.bytes_per_second.max(1) as f64),
            None => NOTHING_TO_SCRUB,
        };
        self.next = now + pause;
    }
}

/// Orders that are carried out together.
const BATCH_ORDERS: usize = 256;

/// Bytes of writes that share a sync: 20 ms of a fast drive.
const BATCH_WRITE_BYTES: u64 = 64 << 20;

/// How long the scrubber lets orders go first.
const SCRUB_PATIENCE: Duration = Duration::from_secs(10);

/// Bytes of reads that may join a batch while it is carried out.
const BATCH_READ_BYTES: u64 = 64 << 20;

/// Interval of checks whether the file is still there. Writes between its removal and the check are lost.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The time until the scrubber of an empty tier looks again.
const NOTHING_TO_SCRUB: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scrubber_waits_for_a_quiet_moment_but_not_for_ever() {
        let mut scrub = Scrub::new(1 << 20);
        let at = Duration::from_secs;
        assert_eq!(scrub.due_in(at(0)), Some(Duration::ZERO));
        scrub.did(at(100), Some(5 << 20));
        assert_eq!(scrub.due_in(at(102)), Some(at(3)));
        assert!(!scrub.is_overdue(at(105)) && !scrub.is_overdue(at(114)));
        assert!(scrub.is_overdue(at(115)));
        assert!(!Scrub::new(0).is_overdue(at(1_000)), "a tier without a scrubber has none to wait");
    }
}
