//! An object tier: its thread, and the queues before it.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream::poll_fn;
use futures_util::{FutureExt as _, StreamExt as _};
use larder_core::store::PurgedKeys;
use larder_net::blocking::try_blocking;
use larder_protocol::purge::PurgeMode;
use larder_protocol::{ChunkRef, Fingerprint};
use object_store::path::Path;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::oneshot;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep};

use super::client::{Client, PurgeTrouble};
use super::metrics::{ObjectMetrics, Side};
use super::ordered::{Earlier, Ordered, OrderedWrites};
use super::patience::AskedPause;
use super::record::format_folder;
use super::store::{self, Opened};
use super::trouble::TroubleKind;
use super::{BlockId, ObjectOptions, OpenError, Trouble, leftovers};
use crate::clock::Clock;
use crate::disk::{ReadAnswer, ReadOrder, Refused, WriteAnswer, WriteOrder};
use crate::threads::{self, Joined};

/// An open object tier. Dropping it waits until every order is done, but no longer than their deadline and one large
/// upload: a folder may hang. A purge, which has no deadline, ends early.
///
/// Completions come on channels of their own and cannot be refused. An error of such a channel means that the order
/// panicked: a bug is in the log, and the order's places must not be used again.
pub struct ObjectTier {
    writes: Sender<ObjectJob>,
    reads: Sender<ObjectJob>,
    /// A queue of its own: questions do not wait behind blocks. Nor do their requests, see [`Client`].
    finds: Sender<ObjectJob>,
    ordered: OrderedWrites,
    _thread: Ending,
    said: Arc<StoreNews>,
    deadline: Duration,
    metrics: ObjectMetrics,
}

/// What the object thread reports of the store.
#[derive(Debug, Default)]
pub(super) struct StoreNews {
    /// Whether each side is left alone.
    pub(super) closed: [AtomicBool; 2],
    /// Why a side was left alone the last time.
    pub(super) trouble: Mutex<Option<Trouble>>,
    /// For how long the store wants to be left alone.
    pub(super) pause: AskedPause,
    /// Whether the tier is being dropped.
    pub(super) stops: AtomicBool,
    /// Why the store did not delete the small object by which it was tried.
    pub(super) not_deleted: Mutex<Option<Trouble>>,
}

/// Waits for the tier's thread when dropped, but not for ever.
struct Ending {
    thread: Option<Joined>,
    /// How long the orders may take.
    within: Duration,
}

impl Drop for Ending {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let clock = Clock::start();
        thread.join_unless(|| {
            let gives_up = clock.elapsed() > self.within;
            if gives_up {
                tracing::warn!(
                    "the object store does not answer: the object tier ends without its last orders"
                );
            }
            gives_up
        });
    }
}

impl Drop for ObjectTier {
    fn drop(&mut self) {
        self.said.stops.store(true, Ordering::Release);
    }
}

/// Work, and its deadline.
struct ObjectJob {
    work: Work,
    deadline: Instant,
}

/// A job, and the channel of its result.
enum Work {
    Write(WriteOrder, Ordered, oneshot::Sender<WriteAnswer>),
    Read(ReadOrder, oneshot::Sender<ReadAnswer>),
    Find(Fingerprint, Vec<ChunkRef>, Vec<BlockId>, oneshot::Sender<Vec<Option<bool>>>),
    Purge(ObjectPurge, Earlier, oneshot::Sender<Result<(), PurgeTrouble>>),
    Forget(PurgedKeys, oneshot::Sender<()>),
}

/// Chunks to purge.
pub struct ObjectPurge {
    /// The names of the chunks.
    pub keys: PurgedKeys,
    /// Whether the chunks are removed, or only counted.
    pub mode: PurgeMode,
    /// Called for each page with the number of further objects.
    pub progress: Box<dyn Fn(u64) + Send>,
}

impl ObjectTier {
    /// Opens the tier and starts its thread. Tries the store with a small object that is written, read and deleted; this takes
    /// until the deadline at most.
    ///
    /// # Errors
    /// [`OpenError`] says what to change. With [`ObjectOptions::start_without`], a store that refuses is no error.
    pub fn open(options: &ObjectOptions, metrics: ObjectMetrics) -> Result<Self, OpenError> {
        let said = Arc::<StoreNews>::default();
        Self::start_with(store::open(options, &said.pause)?, options, metrics, said)
    }

    #[cfg(test)]
    pub(super) fn start(
        opened: Opened,
        options: &ObjectOptions,
        metrics: ObjectMetrics,
    ) -> Result<Self, OpenError> {
        Self::start_with(opened, options, metrics, Arc::default())
    }

    fn start_with(
        opened: Opened,
        options: &ObjectOptions,
        metrics: ObjectMetrics,
        said: Arc<StoreNews>,
    ) -> Result<Self, OpenError> {
        let runtime = runtime(options.max_in_flight).map_err(OpenError::Thread)?;
        let [(writes, writes_due), (reads, reads_due), (finds, finds_due)] =
            [(); 3].map(|()| channel(options.queue_orders.max(1)));
        let (ready, opens) = sync_channel(1);
        let (copied, metrics_there) = (options.clone(), metrics.clone());
        let (said_there, said_of_folder) = (Arc::clone(&said), Arc::clone(&said));
        let thread = threads::spawn("larder-object", &options.cpus, move || {
            let work = async move {
                let client = Rc::new(Client::new(opened, &copied, metrics_there, said_there));
                let is_open = begin(&client, &copied).await;
                let goes_on = is_open.is_ok();
                // If nobody waits, the tier is gone already, and the queues say so.
                let _ = ready.send(is_open);
                if goes_on {
                    let leftovers = spawn_local(remove_leftovers(copied.clone(), said_of_folder));
                    serve(client, &copied, [writes_due, reads_due, finds_due]).await;
                    leftovers.abort();
                }
            };
            LocalSet::new().block_on(&runtime, work);
            // A file system that hangs keeps the threads that wait for it, but nobody waits for these threads.
            runtime.shutdown_timeout(LAST_WAIT);
        });
        let within = options.deadline + options.timeout + LARGE_UPLOAD;
        let thread = Ending { thread: Some(thread.map_err(OpenError::Thread)?.into()), within };
        let opened = opens.recv();
        opened.unwrap_or_else(|_| Err(OpenError::Thread(io::Error::other("the object thread panicked"))))?;
        let deadline = options.deadline;
        let ordered = OrderedWrites::default();
        Ok(Self { writes, reads, finds, ordered, _thread: thread, said, deadline, metrics })
    }

    /// Counts a chunk that cannot be ordered to be written, and why.
    pub(crate) fn not_written(&self, why: &'static str) {
        self.metrics.answered(why);
    }

    /// Orders a chunk to be written. The order is carried out even if nobody waits for the answer; the places must stay as they
    /// are until then. The answer `Closed` means that the store failed, or is left alone; then nobody knows whether the chunk
    /// is there.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn write(&self, order: WriteOrder) -> Result<oneshot::Receiver<WriteAnswer>, Refused> {
        let ordered = self.ordered.order(order.key());
        self.order(Side::Writing, &self.writes, |done| Work::Write(order, ordered, done))
    }

    /// Orders a chunk to be read. The places belong to the order until the answer. The answer `Closed` means that the store
    /// failed, or is left alone.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn read(&self, order: ReadOrder) -> Result<oneshot::Receiver<ReadAnswer>, Refused> {
        self.order(Side::Reading, &self.reads, |done| Work::Read(order, done))
    }

    /// Asks which chunks are there with these blocks. The answer comes at the latest [`ObjectOptions::find_deadline`] after the
    /// tier took up the order.
    ///
    /// In a chain, the answer has one item for each chunk before the first hole, and one for the hole, if there is one: it ends
    /// earlier if no more is known at the deadline. A hole that a later chunk hides may be missed. In a flat namespace (each
    /// chunk its own anchor), the answer has one item for each chunk: `None` if the chunk's state is unknown at the deadline.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn find(
        &self,
        fingerprint: Fingerprint,
        chunks: Vec<ChunkRef>,
        blocks: Vec<BlockId>,
    ) -> Result<oneshot::Receiver<Vec<Option<bool>>>, Refused> {
        self.order(Side::Reading, &self.finds, |done| Work::Find(fingerprint, chunks, blocks, done))
    }

    /// Purges chunks, those included whose writes were ordered before. The answer says why some are left, if some are. The purge
    /// has no deadline, and ends early if the tier is dropped.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn purge(&self, purge: ObjectPurge) -> Result<oneshot::Receiver<Result<(), PurgeTrouble>>, Refused> {
        let earlier = self.ordered.of(|key| purge.mode == PurgeMode::Remove && purge.keys.has(key));
        self.order(Side::Writing, &self.finds, |done| Work::Purge(purge, earlier, done))
    }

    /// Forgets which chunks of these namespaces the store has: a purge on any node may have deleted them. Costs only questions.
    ///
    /// # Errors
    /// Fails if the order was not taken.
    pub fn forget(&self, keys: PurgedKeys) -> Result<oneshot::Receiver<()>, Refused> {
        self.enqueue(&self.finds, |done| Work::Forget(keys, done))
    }

    /// Whether this side of the store is left alone at the moment, after it failed.
    pub fn is_closed(&self, side: Side) -> bool {
        self.said.closed[side as usize].load(Ordering::Acquire)
    }

    /// The time until which the store wants to be left alone.
    #[cfg(test)]
    pub(super) fn asked_pause(&self) -> Option<Instant> {
        self.said.pause.until()
    }

    /// Why a side is left alone; `None` if neither side is.
    pub fn trouble(&self) -> Option<Trouble> {
        let is_closed = self.is_closed(Side::Reading) || self.is_closed(Side::Writing);
        let last = || larder_net::lock(&self.said.trouble).clone();
        is_closed.then(last).flatten()
    }

    /// Why the store did not delete the small object by which it was tried at the start, if it did not.
    pub(super) fn not_deleted(&self) -> Option<Trouble> {
        larder_net::lock(&self.said.not_deleted).clone()
    }

    fn order<A>(
        &self,
        side: Side,
        queue: &Sender<ObjectJob>,
        work: impl FnOnce(oneshot::Sender<A>) -> Work,
    ) -> Result<oneshot::Receiver<A>, Refused> {
        if self.is_closed(side) {
            self.metrics.answered("closed");
            return Err(Refused::Closed);
        }
        self.enqueue(queue, work)
    }

    fn enqueue<A>(
        &self,
        queue: &Sender<ObjectJob>,
        work: impl FnOnce(oneshot::Sender<A>) -> Work,
    ) -> Result<oneshot::Receiver<A>, Refused> {
        let (done, answer) = oneshot::channel();
        let job = ObjectJob { work: work(done), deadline: Instant::now() + self.deadline };
        queue.try_send(job).map(|()| answer).map_err(|error| match error {
            TrySendError::Full(_) => {
                self.metrics.answered("busy");
                Refused::Busy
            }
            TrySendError::Closed(_) => Refused::Closed,
        })
    }
}

fn runtime(max_in_flight: usize) -> io::Result<Runtime> {
    // Each access to a local folder, and each name resolution, blocks a thread.
    Builder::new_current_thread()
        .enable_all()
        .thread_name("larder-object-b")
        .max_blocking_threads(max_in_flight.max(2))
        .build()
}

/// Tries the store. Fails if the tier may not serve.
async fn begin(client: &Client, options: &ObjectOptions) -> Result<(), OpenError> {
    let within = if options.start_without { options.deadline.min(START_WAIT) } else { options.deadline };
    match client.probe(Instant::now() + within).await {
        Err(trouble) if options.start_without => {
            tracing::error!(url = options.url, %trouble, "the node leaves the object store alone, and tries again later");
            client.leave_alone(&trouble);
            Ok(())
        }
        probed => probed.map_err(|trouble| OpenError::Refused { url: options.url.clone(), trouble }),
    }
}

/// Runs the object thread until the tier is dropped.
async fn serve(
    client: Rc<Client>,
    options: &ObjectOptions,
    [writes, reads, finds]: [Receiver<ObjectJob>; 3],
) {
    let (most, deadline) = (options.max_in_flight, options.deadline);
    let trials =
        [Side::Reading, Side::Writing].map(|side| spawn_local(try_again(Rc::clone(&client), side, deadline)));
    tokio::join!(take(&client, writes, most / 2), take(&client, reads, most), take(&client, finds, most));
    trials.into_iter().for_each(|trial| trial.abort());
}

/// Removes half uploads from a local folder, now and every day.
async fn remove_leftovers(options: ObjectOptions, said: Arc<StoreNews>) {
    let Some((store::Kind::Folder(folder), _)) = store::parse(&options.url).filter(|_| options.writes) else {
        return;
    };
    let folder = folder.join(format_folder(&Path::default()).as_ref());
    loop {
        let (folder, said) = (folder.clone(), Arc::clone(&said));
        let removed = try_blocking(move || leftovers::remove(&folder, &said.stops)).await;
        match removed.unwrap_or_else(|panicked| Err(io::Error::other(panicked))) {
            Ok(0) => {}
            Ok(files) => tracing::info!(files, "removed half uploads of nodes that are gone"),
            Err(error) => tracing::warn!(%error, "half uploads of nodes that are gone cannot be looked for"),
        }
        sleep(leftovers::LEFT_FOR).await;
    }
}

/// Takes up orders, a bounded number at a time. Ends when all are done.
async fn take(client: &Rc<Client>, mut queue: Receiver<ObjectJob>, most: usize) {
    let jobs = poll_fn(|context| queue.poll_recv(context));
    // Each order is a task of its own: an order that panics ends no other.
    let perform = |job: ObjectJob| spawn_local(job.perform(Rc::clone(client))).map(drop);
    jobs.for_each_concurrent(most.max(1), perform).await;
}

/// Tries a side again whenever a trial is due.
async fn try_again(client: Rc<Client>, side: Side, deadline: Duration) {
    loop {
        client.trial(side).await;
        client.try_again(side, Instant::now() + deadline).await;
    }
}

impl ObjectJob {
    async fn perform(self, client: Rc<Client>) {
        let Self { work, deadline } = self;
        // If nobody waits any more, there is nobody to tell.
        match work {
            Work::Write(order, ordered, done) => {
                let answer = client.write(order, deadline).await;
                drop(ordered);
                _ = done.send(answer);
            }
            Work::Read(order, done) => {
                drop(done.send(client.read(order, deadline).await));
                client.delete_wrong(deadline).await;
            }
            Work::Purge(ObjectPurge { keys, mode, progress }, earlier, done) => {
                let has_ended = earlier.end().await;
                let purged = client.purge(keys, mode, &*progress).await;
                let late = Trouble::new(
                    TroubleKind::TimedOut,
                    "write an object",
                    "uploads that began earlier have not ended; purge again, and restart the node if this stays",
                );
                drop(done.send(purged.and(if has_ended { Ok(()) } else { Err(late.into()) })));
            }
            Work::Forget(keys, done) => {
                client.forget_namespaces(&keys);
                _ = done.send(());
            }
            Work::Find(fingerprint, chunks, blocks, done) => {
                drop(done.send(client.find(fingerprint, &chunks, &blocks, deadline).await));
            }
        }
    }
}

/// How long a node that may start without the store waits for it.
const START_WAIT: Duration = Duration::from_secs(2);

/// How long a tier that ends waits for threads that a file system holds up. Every order has its answer by then.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// The time that the bytes of a last upload may take when the tier ends: those of a block of 64 MiB.
const LARGE_UPLOAD: Duration = Duration::from_secs(16);
