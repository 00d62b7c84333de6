//! An object tier: its thread, and the queues before it.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_protocol::{ChunkRef, Fingerprint};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::Instant;

use super::engine::Engine;
use super::metrics::{ObjectMetrics, Side};
use super::store::{self, Opened};
use super::{BlockId, ObjectOptions, OpenError, Trouble};
use crate::disk::{ReadAnswer, ReadOrder, Refused, WriteAnswer, WriteOrder};
use crate::threads;

/// An object tier that is open. Dropping it waits until every order is done: no longer than their deadline.
///
/// Completions come on channels of their own and cannot be refused. An error of such a channel means that the order
/// panicked: a bug is in the log, and the order's places must not be used again.
pub struct ObjectTier {
    /// `None` only while the tier is being dropped: writes, questions, and everything else. Questions do not wait behind
    /// blocks.
    queues: Option<[Sender<Job>; 3]>,
    thread: Option<JoinHandle<()>>,
    closed: [Arc<AtomicBool>; 2],
    trouble: LastTrouble,
    deadline: Duration,
    metrics: ObjectMetrics,
}

/// The store's last error when a side was closed.
pub(super) type LastTrouble = Arc<Mutex<Option<Trouble>>>;

/// Something to do until a moment.
struct Job {
    work: Work,
    deadline: Instant,
}

/// A job, and the channel of its result.
enum Work {
    Write(WriteOrder, oneshot::Sender<WriteAnswer>),
    Read(ReadOrder, oneshot::Sender<ReadAnswer>),
    Find(Fingerprint, Vec<ChunkRef>, Vec<BlockId>, oneshot::Sender<Vec<bool>>),
}

impl ObjectTier {
    /// Opens the tier and starts its thread: writes, reads and deletes a small object, which takes until the deadline
    /// at most.
    ///
    /// # Errors
    /// [`OpenError`] says what to change. With [`ObjectOptions::start_without`], a store that refuses is no error.
    pub fn open(options: &ObjectOptions, metrics: ObjectMetrics) -> Result<Self, OpenError> {
        Self::start(store::open(options)?, options, metrics)
    }

    pub(super) fn start(
        opened: Opened,
        options: &ObjectOptions,
        metrics: ObjectMetrics,
    ) -> Result<Self, OpenError> {
        let runtime = runtime(options.max_in_flight).map_err(OpenError::Thread)?;
        let closed = [(); 2].map(|()| Arc::default());
        let (writes, writes_due) = channel(options.queue_orders.max(1));
        let (finds, finds_due) = channel(options.queue_orders.max(1));
        let (others, others_due) = channel(options.queue_orders.max(1));
        let (ready, opens) = oneshot::channel();
        let trouble = LastTrouble::default();
        let (copied, metrics_there) = (options.clone(), metrics.clone());
        let (closed_there, trouble_there) = (closed.clone(), Arc::clone(&trouble));
        let thread = threads::spawn("larder-object", &options.cpus, move || {
            let work = async move {
                let engine =
                    Rc::new(Engine::new(opened, &copied, metrics_there, closed_there, trouble_there));
                let is_open = begin(&engine, &copied).await;
                let goes_on = is_open.is_ok();
                // Where nobody waits the tier is gone already, and the queues say so.
                let _ = ready.send(is_open);
                if goes_on {
                    let due = [writes_due, finds_due, others_due];
                    serve(engine, copied.max_in_flight, copied.deadline, due).await;
                }
            };
            LocalSet::new().block_on(&runtime, work);
        });
        let thread = thread.map_err(OpenError::Thread)?;
        let opened = opens.blocking_recv();
        opened.unwrap_or_else(|_| Err(OpenError::Thread(io::Error::other("the object thread panicked"))))?;
        let (queues, thread) = (Some([writes, finds, others]), Some(thread));
        Ok(Self { queues, thread, closed, trouble, deadline: options.deadline, metrics })
    }

    /// Orders a chunk to be written. It is carried out even if nobody waits for the answer; the places must stay as
    /// they are until then. `Closed` as an answer: the store failed, or is left alone; whether the chunk is there is
    /// not known.
    ///
    /// # Errors
    /// The order, where it was not taken.
    pub fn write(
        &self,
        order: WriteOrder,
    ) -> Result<oneshot::Receiver<WriteAnswer>, Refused<Box<WriteOrder>>> {
        let (done, answer) = oneshot::channel();
        self.send(Side::Writing, 0, Work::Write(order, done), answer, |work| match work {
            Work::Write(order, _) => Some(Box::new(order)),
            _ => None,
        })
    }

    /// Orders a chunk to be read. The places belong to the order until the answer. `Closed` as an answer: the store
    /// failed, or is left alone.
    ///
    /// # Errors
    /// The order, where it was not taken.
    pub fn read(&self, order: ReadOrder) -> Result<oneshot::Receiver<ReadAnswer>, Refused<Box<ReadOrder>>> {
        let (done, answer) = oneshot::channel();
        self.send(Side::Reading, 2, Work::Read(order, done), answer, |work| match work {
            Work::Read(order, _) => Some(Box::new(order)),
            _ => None,
        })
    }

    /// Asks which chunks are there with these blocks; the answer says so of each, and comes before [`ObjectOptions::find_deadline`] has
    /// passed since the tier took the order up.
    ///
    /// In a chain, only the chunks before the first hole count as present, and a hole that a later chunk hides may be missed.
    /// In a flat namespace (each chunk its own anchor), each chunk counts by itself. Chunks that are unknown at the deadline
    /// count as absent.
    ///
    /// # Errors
    /// The chunks, where the order was not taken.
    pub fn find(
        &self,
        fingerprint: Fingerprint,
        chunks: Vec<ChunkRef>,
        blocks: Vec<BlockId>,
    ) -> Result<oneshot::Receiver<Vec<bool>>, Refused<Vec<ChunkRef>>> {
        let (done, answer) = oneshot::channel();
        self.send(
            Side::Reading,
            1,
            Work::Find(fingerprint, chunks, blocks, done),
            answer,
            |work| match work {
                Work::Find(_, chunks, ..) => Some(chunks),
                _ => None,
            },
        )
    }

    /// Whether that side of the store is left alone at the moment, after it failed.
    #[must_use]
    pub fn is_closed(&self, side: Side) -> bool {
        self.closed[side as usize].load(Ordering::Acquire)
    }

    /// Why a side is left alone; `None` if neither is.
    #[must_use]
    pub fn trouble(&self) -> Option<Trouble> {
        let is_closed = self.is_closed(Side::Reading) || self.is_closed(Side::Writing);
        let last = || self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        is_closed.then(last).flatten()
    }

    fn send<A, T>(
        &self,
        side: Side,
        queue: usize,
        work: Work,
        answer: A,
        back: impl Fn(Work) -> Option<T>,
    ) -> Result<A, Refused<T>> {
        let queues = self.queues.as_ref().expect("the queues live until the tier is dropped");
        let back = |work| back(work).expect("an order comes back as what it was");
        if self.is_closed(side) {
            self.metrics.answered("closed");
            return Err(Refused::Closed(back(work)));
        }
        match queues[queue].try_send(Job { work, deadline: Instant::now() + self.deadline }) {
            Ok(()) => Ok(answer),
            Err(TrySendError::Full(job)) => {
                self.metrics.answered("busy");
                Err(Refused::Busy(back(job.work)))
            }
            Err(TrySendError::Closed(job)) => Err(Refused::Closed(back(job.work))),
        }
    }
}

impl Drop for ObjectTier {
    fn drop(&mut self) {
        drop(self.queues.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the object thread panicked outside of any order");
        }
    }
}

fn runtime(max_in_flight: usize) -> io::Result<Runtime> {
    // Local folders and name resolution block a thread each.
    Builder::new_current_thread()
        .enable_all()
        .thread_name("larder-object-b")
        .max_blocking_threads(max_in_flight.max(2))
        .build()
}

/// Whether the tier may serve.
async fn begin(engine: &Engine, options: &ObjectOptions) -> Result<(), OpenError> {
    let within = if options.start_without { options.deadline.min(START_WAIT) } else { options.deadline };
    match engine.probe(Instant::now() + within).await {
        Err(trouble) if options.start_without => {
            tracing::error!(url = options.url, %trouble, "the node leaves the object store alone, and tries again later");
            engine.leave_alone(&trouble);
            Ok(())
        }
        probed => probed.map_err(|trouble| OpenError::Refused { url: options.url.clone(), trouble }),
    }
}

/// The work of the object thread, until the tier is dropped.
async fn serve(
    engine: Rc<Engine>,
    most: usize,
    deadline: Duration,
    [writes, finds, others]: [Receiver<Job>; 3],
) {
    let trials =
        [Side::Reading, Side::Writing].map(|side| spawn_local(try_again(Rc::clone(&engine), side, deadline)));
    let writes = spawn_local(take(Rc::clone(&engine), writes, (most / 2).max(1)));
    let finds = spawn_local(take(Rc::clone(&engine), finds, most.max(1)));
    take(engine, others, most.max(1)).await;
    // An error: it panicked, and that is in the log.
    let _ = tokio::join!(writes, finds);
    trials.into_iter().for_each(|trial| trial.abort());
}

/// Takes orders up, a bounded number at a time; ends when all are done.
async fn take(engine: Rc<Engine>, mut queue: Receiver<Job>, most: usize) {
    let slots = Arc::new(Semaphore::new(most));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let Some(job) = queue.recv().await else { break };
        let engine = Rc::clone(&engine);
        spawn_local(async move {
            job.perform(&engine).await;
            drop(slot);
        });
    }
    // Never closed: all slots come back.
    let _ = slots.acquire_many(most as u32).await;
}

/// Tries a side again that is left alone.
async fn try_again(engine: Rc<Engine>, side: Side, deadline: Duration) {
    loop {
        engine.trial(side).await;
        engine.try_again(side, Instant::now() + deadline).await;
    }
}

impl Job {
    async fn perform(self, engine: &Engine) {
        let Self { work, deadline } = self;
        // Where nobody waits any more there is nobody to tell.
        match work {
            Work::Write(order, done) => drop(done.send(engine.write(order, deadline).await)),
            Work::Read(order, done) => {
                drop(done.send(engine.read(order, deadline).await));
                engine.delete_wrong(deadline).await;
            }
            Work::Find(fingerprint, chunks, blocks, done) => {
                drop(done.send(engine.find(fingerprint, &chunks, &blocks, deadline).await));
            }
        }
    }
}

/// How long a node that may start without the store waits for it.
const START_WAIT: Duration = Duration::from_secs(2);
