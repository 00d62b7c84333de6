//! The copy pool: threads that move blocks into the arena, with their checksums, from write windows and from siblings.
//!
//! The same threads give extents new memory. Nothing here decides: an order says which bytes go where, and its completion
//! comes back on a channel of its own, so a completion can never be refused.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use larder_core::store::Checksums;
use larder_protocol::checksum::{RangeChecksum, block_ranges};
use tokio::sync::oneshot;

use crate::arena::{Destination, ExtentMemory, MemoryError, OutOfBounds, Renewal};
use crate::host::CpuSet;
use crate::threads::{self, Joined};
use crate::window::Window;

/// The threads, and the queue before them. Dropping it waits until every order is done.
pub struct CopyPool {
    queue: SyncSender<Job>,
    threads: Vec<Joined>,
    panics: Arc<AtomicU64>,
}

/// The numbers of one copy pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyLimits {
    /// Threads.
    pub threads: usize,
    /// Their CPUs.
    pub cpus: CpuSet,
    /// Orders that may wait.
    pub queue_orders: usize,
}

/// Blocks to move. All its places are known to lie within their memory.
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
    /// Whether it was copied before, layer by layer: it is summed alone.
    pub is_in_place: bool,
    /// The block's target. The order holds its memory until it is done.
    pub to: Destination,
}

/// Blocks to copy from memory that nobody writes meanwhile. All places that they go to are known to lie within their memory.
#[derive(Debug)]
pub struct ImportOrder(Vec<(Bytes, Destination)>);

/// Receives the checksums of an order's blocks, in the order of its moves. An error means that the thread panicked: the
/// contents of the places are unknown, and a bug is in the log.
pub type CopyDone = oneshot::Receiver<Vec<Checksums>>;

/// Tells the new memory of an extent. An error of the channel means that the thread panicked.
pub type RenewalDone = oneshot::Receiver<Result<Arc<ExtentMemory>, MemoryError>>;

enum Job {
    Copy(CopyOrder, oneshot::Sender<Vec<Checksums>>),
    Import(ImportOrder, oneshot::Sender<Vec<Checksums>>),
    Renew(Renewal, oneshot::Sender<Result<Arc<ExtentMemory>, MemoryError>>),
}

impl CopyPool {
    /// Starts the threads.
    ///
    /// # Errors
    /// Fails if the system gives no thread.
    pub fn start(name: &str, limits: &CopyLimits) -> io::Result<Self> {
        let (queue, jobs) = sync_channel(limits.queue_orders);
        let jobs = Arc::new(Mutex::new(jobs));
        let mut lane = Self { queue, threads: Vec::new(), panics: Arc::default() };
        for _ in 0..limits.threads {
            let (jobs, panics) = (Arc::clone(&jobs), Arc::clone(&lane.panics));
            lane.threads.push(threads::spawn(name, &limits.cpus, move || work(&jobs, &panics))?.into());
        }
        Ok(lane)
    }

    /// Hands an order to the threads. It is carried out even if nobody waits for its completion. `None` where the queue is full:
    /// nothing was done.
    #[must_use]
    pub fn submit(&self, order: CopyOrder) -> Option<CopyDone> {
        let (done, completion) = oneshot::channel();
        self.send(Job::Copy(order, done)).ok().map(|()| completion)
    }

    /// Hands blocks that come from elsewhere to the threads. `None` where the queue is full: nothing was done.
    #[must_use]
    pub fn import(&self, order: ImportOrder) -> Option<CopyDone> {
        let (done, completion) = oneshot::channel();
        self.send(Job::Import(order, done)).ok().map(|()| completion)
    }

    /// Hands the renewal of an extent to the threads.
    ///
    /// # Errors
    /// The renewal, where the queue is full: nothing was done.
    pub fn renew(&self, renewal: Renewal) -> Result<RenewalDone, Renewal> {
        let (done, completion) = oneshot::channel();
        match self.send(Job::Renew(renewal, done)) {
            Err(Job::Renew(renewal, _)) => Err(renewal),
            _ => Ok(completion),
        }
    }

    /// Orders that ended in a panic since the start. Each is a bug, and its place unusable.
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    fn send(&self, job: Job) -> Result<(), Job> {
        self.queue.try_send(job).map_err(|error| match error {
            TrySendError::Full(job) | TrySendError::Disconnected(job) => job,
        })
    }
}

impl CopyOrder {
    /// Blocks to move from `window`; without a window, blocks whose checksums alone are wanted, since trusted engines
    /// wrote them into the arena.
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
    #[must_use]
    pub fn is_small(&self) -> bool {
        self.moves.iter().map(|block| block.to.bytes).sum::<u64>() <= INLINE_COPY_BYTES
    }

    /// Carries the order out on the calling thread.
    #[must_use]
    pub fn perform(&self) -> Vec<Checksums> {
        self.moves.iter().map(|block| block.perform(self.window.as_deref())).collect()
    }
}

impl ImportOrder {
    /// Blocks and where each goes.
    ///
    /// # Errors
    /// Fails if a place is not within its extent, or the block has another size.
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

    /// Copies and sums the blocks on the calling thread. A block of another size than its place has the checksums of the
    /// bytes that came.
    fn perform(&self) -> Vec<Checksums> {
        self.0.iter().map(|(bytes, to)| import(bytes, to)).collect()
    }
}

impl Move {
    /// Copies each piece, then adds it to the checksum as it stands in the arena: what the window holds may have changed.
    fn perform(&self, window: Option<&Window>) -> Checksums {
        let Self { to, source, is_in_place } = self;
        let window = window.filter(|_| !is_in_place);
        sum(to, to.bytes, |start, bytes, checksum| {
            let at = to.offset + start;
            if let Some(window) = window {
                to.memory.copy_in_from(window.mapping(), source + start, at, bytes)?;
            }
            to.memory.add_to(checksum, at, bytes)
        })
    }
}

/// Copies each piece, then adds it to the checksum as it was copied: nobody writes the source meanwhile.
fn import(from: &Bytes, to: &Destination) -> Checksums {
    sum(to, from.len() as u64, |start, bytes, checksum| {
        let piece = &from[start as usize..][..bytes as usize];
        to.memory.copy_in(to.offset + start, piece)?;
        checksum.update(piece);
        Ok(())
    })
}

/// The checksums of a block of so many bytes; `add` adds a piece of it (where it begins, how long it is) to one.
fn sum(
    to: &Destination,
    bytes: u64,
    add: impl Fn(u64, u64, &mut RangeChecksum) -> Result<(), OutOfBounds>,
) -> Checksums {
    let ranges = block_ranges(bytes, to.range_bytes).map(|range| {
        let mut checksum = RangeChecksum::new();
        for piece in block_ranges(range.end - range.start, PIECE_BYTES) {
            let added = add(range.start + piece.start, piece.end - piece.start, &mut checksum);
            added.expect("the order's places were checked when it was made");
        }
        checksum.finish()
    });
    Checksums::of(&to.key, ranges)
}

/// The work of a copy thread, until the pool is dropped.
fn work(jobs: &Mutex<Receiver<Job>>, panics: &AtomicU64) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        // The memory that a panicking order leaves is bytes in a place that its sender never hears to be done.
        if catch_unwind(AssertUnwindSafe(|| job.perform())).is_err() {
            panics.fetch_add(1, Ordering::Relaxed);
            tracing::error!("an order panicked: its place stays unusable");
        }
    }
}

impl Job {
    fn perform(self) {
        // Where nobody waits any more there is nobody to tell.
        match self {
            Self::Copy(order, done) => drop(done.send(order.perform())),
            Self::Import(order, done) => {
                let sums = order.perform();
                // Whoever hears of it may give the sources up.
                drop(order);
                drop(done.send(sums));
            }
            Self::Renew(renewal, done) => drop(done.send(renewal.perform())),
        }
    }
}

/// Orders up to this size are carried out where they are made: at 8 GB/s this takes 8 us, and the hop to a thread and back
/// 30 us and more. Larger ones would keep the sessions on the arbiter waiting.
pub const INLINE_COPY_BYTES: u64 = 64 << 10;

/// A piece is still in the core's own cache when its checksum is computed.
const PIECE_BYTES: u64 = 128 << 10;

#[cfg(test)]
mod tests;
