//! The copy pool: threads that move blocks into the arena, with their checksums, from write windows and from siblings.
//!
//! The same threads give extents new memory. Nothing here decides: an order says which bytes go where, and its completion
//! comes back on a channel of its own, so a completion can never be refused. Threads that have nothing to do help with a large
//! copy (`copy/shared.rs`). A large copy goes to the end of the queue again and again, so it delays small ones only a little.

mod shared;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use bytes::Bytes;
use larder_core::store::Checksums;
use larder_protocol::checksum::{RangeChecksum, Stores, block_ranges};
use tokio::sync::oneshot;

use self::shared::SharedCopy;
use crate::arena::{Destination, ExtentMemory, MemoryError, OutOfBounds, Renewal};
use crate::host::CpuSet;
use crate::threads::{self, Joined};
use crate::window::Window;

/// The threads, and the queue before them. Dropping the pool waits until every order is done.
pub struct CopyPool {
    queue: Arc<Queue>,
    threads: Vec<Joined>,
    /// Threads that wait for an order.
    idle: Arc<AtomicUsize>,
}

/// The numbers of one copy pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyLimits {
    /// Threads.
    pub threads: usize,
    /// The CPUs of these threads.
    pub cpus: CpuSet,
    /// Orders that may wait.
    pub queue_orders: usize,
}

/// Blocks to move. All places of the order are known to lie within their memory.
#[derive(Debug)]
pub struct CopyOrder {
    window: Option<Arc<Window>>,
    moves: Vec<Move>,
}

/// A block to move.
#[derive(Debug, Clone)]
pub struct Move {
    /// Offset in the window; meaningless if the engine wrote into the arena itself.
    pub source: u64,
    /// Whether the block was copied before, layer by layer. Then it is only summed.
    pub is_in_place: bool,
    /// The block's target. The order holds its memory until it is done.
    pub to: Destination,
}

/// Blocks to copy from memory that nobody writes meanwhile. All target places are known to lie within their memory.
#[derive(Debug)]
pub struct ImportOrder(Vec<(Bytes, Destination)>);

/// Receives the checksums of an order's blocks, in the order of its moves. An error means that the thread panicked: the
/// contents of the places are unknown, and a bug is in the log.
pub type CopyDone = oneshot::Receiver<Vec<Checksums>>;

/// Receives the new memory of an extent. An error of the channel means that the thread panicked.
pub type RenewalDone = oneshot::Receiver<Result<Arc<ExtentMemory>, MemoryError>>;

/// The orders that wait for a thread.
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    most: usize,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<CopyJob>,
    /// Whether no more orders come.
    is_closed: bool,
}

enum CopyJob {
    Copy(Arc<SharedCopy>),
    Import(ImportOrder, oneshot::Sender<Vec<Checksums>>),
    Renew(Renewal, oneshot::Sender<Result<Arc<ExtentMemory>, MemoryError>>),
}

impl CopyPool {
    /// Starts the threads.
    ///
    /// # Errors
    /// Fails if the system gives no thread.
    pub fn start(name: &str, limits: &CopyLimits) -> io::Result<Self> {
        let queue = Arc::new(Queue::new(limits.queue_orders));
        let mut lane = Self { queue, threads: Vec::new(), idle: Arc::default() };
        for _ in 0..limits.threads {
            let (queue, idle) = (Arc::clone(&lane.queue), Arc::clone(&lane.idle));
            lane.threads.push(threads::spawn(name, &limits.cpus, move || work(&queue, &idle))?.into());
        }
        Ok(lane)
    }

    /// Hands an order to the threads. It is carried out even if nobody waits for its completion. `None` if the queue is full:
    /// nothing was done.
    #[must_use]
    pub fn submit(&self, order: CopyOrder) -> Option<CopyDone> {
        let helpers =
            (order.bytes() / HELPED_BYTES).min(self.idle.load(Ordering::Relaxed).saturating_sub(1) as u64);
        let (copy, completion) = SharedCopy::new(order);
        let copy = Arc::new(copy);
        self.queue.send(CopyJob::Copy(Arc::clone(&copy))).ok()?;
        for _ in 0..helpers {
            // If there is no room for help, the first thread copies alone.
            let _ = self.queue.send(CopyJob::Copy(Arc::clone(&copy)));
        }
        Some(completion)
    }

    /// Hands blocks that come from elsewhere to the threads. `None` if the queue is full: nothing was done.
    #[must_use]
    pub fn import(&self, order: ImportOrder) -> Option<CopyDone> {
        let (done, completion) = oneshot::channel();
        self.queue.send(CopyJob::Import(order, done)).ok().map(|()| completion)
    }

    /// Hands the renewal of an extent to the threads.
    ///
    /// # Errors
    /// Returns the renewal if the queue is full: nothing was done.
    pub fn renew(&self, renewal: Renewal) -> Result<RenewalDone, Renewal> {
        let (done, completion) = oneshot::channel();
        match self.queue.send(CopyJob::Renew(renewal, done)) {
            Err(CopyJob::Renew(renewal, _)) => Err(renewal),
            _ => Ok(completion),
        }
    }
}

impl Drop for CopyPool {
    fn drop(&mut self) {
        larder_net::lock(&self.queue.waiting).is_closed = true;
        self.queue.changed.notify_all();
    }
}

impl Queue {
    fn new(most: usize) -> Self {
        Self { waiting: Mutex::default(), changed: Condvar::new(), most }
    }

    /// Adds an order. If the queue is full, returns the order.
    fn send(&self, job: CopyJob) -> Result<(), CopyJob> {
        let mut waiting = larder_net::lock(&self.waiting);
        if waiting.jobs.len() >= self.most {
            return Err(job);
        }
        waiting.jobs.push_back(job);
        self.changed.notify_one();
        Ok(())
    }

    /// Puts an order that gave way behind all others. A queue that is full takes it too.
    fn put_back(&self, job: CopyJob) {
        larder_net::lock(&self.waiting).jobs.push_back(job);
        self.changed.notify_one();
    }

    /// Waits for an order; `None` if no more come.
    fn take(&self) -> Option<CopyJob> {
        let mut waiting = larder_net::lock(&self.waiting);
        loop {
            match waiting.jobs.pop_front() {
                None if !waiting.is_closed => {
                    waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                }
                job => return job,
            }
        }
    }
}

impl CopyOrder {
    /// An order to move blocks from `window`. Without a window, trusted engines wrote the blocks into the arena, and the order
    /// only sums them.
    ///
    /// # Errors
    /// Fails if a block does not lie within the window, or its place not within the extent.
    ///
    /// # Panics
    /// Panics if a layer range has no bytes, or blocks without a window go to an extent that no engine can write.
    pub fn new(window: Option<Arc<Window>>, moves: Vec<Move>) -> Result<Self, OutOfBounds> {
        for block in &moves {
            let Destination { memory, offset, bytes, range_bytes, .. } = &block.to;
            assert!(*range_bytes > 0, "a layer range has at least one layer");
            memory.check(*offset, *bytes)?;
            match &window {
                _ if block.is_in_place => {}
                Some(window) => window.check(block.source, *bytes)?,
                None => assert!(memory.is_writable_by_engines(), "nobody can have written the block"),
            }
        }
        Ok(Self { window, moves })
    }

    /// Whether handing the order to a thread would cost more than carrying it out here.
    pub fn is_small(&self) -> bool {
        self.bytes() <= INLINE_COPY_BYTES
    }

    /// Carries the order out on the calling thread.
    #[must_use]
    pub fn perform(&self) -> Vec<Checksums> {
        let sums = |block: &Move| {
            let ranges = block_ranges(block.to.bytes, block.to.range_bytes);
            Checksums::of(&block.to.key, ranges.map(|range| self.perform_range(block, range)))
        };
        self.moves.iter().map(sums).collect()
    }

    /// Copies a layer range of a block, and sums the bytes that arrive in the arena: the window's bytes may change.
    fn perform_range(&self, block: &Move, range: Range<u64>) -> u64 {
        let Move { source, is_in_place, to } = block;
        let (at, bytes) = (to.offset + range.start, range.end - range.start);
        let mut sum = RangeChecksum::new();
        let performed = match self.window.as_deref().filter(|_| !is_in_place) {
            Some(window) => {
                to.memory.copy_in_from(window.mapping(), source + range.start, at, bytes, &mut sum)
            }
            None => to.memory.add_to(&mut sum, at, bytes),
        };
        performed.expect("the order's places were checked when it was made");
        sum.finish()
    }

    fn bytes(&self) -> u64 {
        self.moves.iter().map(|block| block.to.bytes).sum()
    }
}

impl ImportOrder {
    /// An order to copy each block to its destination.
    ///
    /// # Errors
    /// Fails if a place does not lie within its extent, or the extent ends before the block would.
    ///
    /// # Panics
    /// Panics if a layer range has no bytes.
    pub fn new(blocks: Vec<(Bytes, Destination)>) -> Result<Self, OutOfBounds> {
        for (bytes, to) in &blocks {
            assert!(to.range_bytes > 0, "a layer range has at least one layer");
            to.memory.check(to.offset, to.bytes.max(bytes.len() as u64))?;
        }
        Ok(Self(blocks))
    }

    /// Copies and sums the blocks on the calling thread. If a block's size differs from its place's size, the checksums are
    /// those of the block's bytes.
    fn perform(&self) -> Vec<Checksums> {
        self.0.iter().map(|(bytes, to)| import(bytes, to)).collect()
    }
}

/// Copies a block and sums it.
fn import(from: &Bytes, to: &Destination) -> Checksums {
    let ranges = block_ranges(from.len() as u64, to.range_bytes).map(|range| {
        let mut sum = RangeChecksum::new();
        let piece = &from[range.start as usize..range.end as usize];
        let copied = to.memory.copy_in_summed(to.offset + range.start, piece, Stores::Streamed, &mut sum);
        copied.expect("the order's places were checked when it was made");
        sum.finish()
    });
    Checksums::of(&to.key, ranges)
}

/// The work of a copy thread, until the pool is dropped.
fn work(queue: &Queue, idle: &AtomicUsize) {
    loop {
        idle.fetch_add(1, Ordering::Relaxed);
        let job = queue.take();
        idle.fetch_sub(1, Ordering::Relaxed);
        let Some(job) = job else { return };
        // A panicking order leaves unknown bytes only in its own place, and its sender never hears that the place is done.
        match catch_unwind(AssertUnwindSafe(|| job.perform())) {
            Ok(rest) => rest.into_iter().for_each(|rest| queue.put_back(rest)),
            Err(_) => tracing::error!("an order panicked: its place stays unusable"),
        }
    }
}

impl CopyJob {
    /// Carries the order out, or a part of a large copy. Returns the order if a part is left.
    fn perform(self) -> Option<Self> {
        // If nobody waits any more, there is nobody to tell.
        match self {
            Self::Copy(copy) => return (!copy.help(TURN_BYTES)).then_some(Self::Copy(copy)),
            Self::Import(order, done) => {
                let sums = order.perform();
                // A caller that hears of the end may release the sources, so the order's references go first.
                drop(order);
                drop(done.send(sums));
            }
            Self::Renew(renewal, done) => drop(done.send(renewal.perform())),
        }
        None
    }
}

/// Orders up to this size are carried out on the thread that makes them: at 16 GB/s this takes 8 us, and the hop to a copy thread
/// and back 30 us and more. Larger orders would delay the sessions on the actor's thread.
pub const INLINE_COPY_BYTES: u64 = 128 << 10;

/// An order gets one helping thread for each this many bytes: that much work is worth a wake-up.
const HELPED_BYTES: u64 = 1 << 20;

/// A thread gives way to the next order after this many bytes: 1 ms of copying.
const TURN_BYTES: u64 = 16 << 20;

#[cfg(test)]
mod tests;
