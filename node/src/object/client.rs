//! The work of the object thread: turns orders into requests, and answers into facts.
//!
//! Blocks are sent from their places in the arena. A write is answered only when the HTTP client has let go of all its blocks.
//! Incoming bytes are summed and copied to their place as they come.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use futures_util::future::join_all;
use hashbrown::HashMap;
use larder_core::tiers::presence::{Fact, LIFETIMES, PresenceCache};
use larder_protocol::{ChunkRef, PoolSet};
use object_store::path::Path;
use object_store::{Error, GetResultPayload, ObjectStore, ObjectStoreExt};
use rustix::io::Errno;
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use super::metrics::{Kind, ObjectMetrics, Side};
use super::record::{Arriving, ObjectKey, body, name};
use super::tier::StoreNews;
use super::trouble::{Trouble, TroubleKind};
use super::{BlockId, MAX_OBJECT_BYTES, ObjectOptions};
use crate::disk::format::{FormatError, PAGE_BYTES, RecordHeader};
use crate::disk::volume::{Damage, answer};
use crate::disk::{BlockPlace, ReadAnswer, ReadOrder, WriteAnswer, WriteOrder};

mod find;
mod purge;
mod request;
mod side;
mod uploads;

pub use purge::PurgeTrouble;
use request::{DELETE, GET, Line};
use side::SideState;
use uploads::Uploads;

/// The store, and the facts known about it. Lives on one thread.
pub(super) struct Client {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    metrics: ObjectMetrics,
    start: Instant,
    most_requests: usize,
    requests: Semaphore,
    /// Turns of everything but lookups: three quarters of the requests, so that the questions of lookups always get a turn.
    blocks: Semaphore,
    /// Turns of writes: at most half of the requests, so that reads always get a turn.
    uploads: Uploads,
    /// Bytes of blocks that may be under way, in units of [`UNIT_BYTES`].
    bytes: Semaphore,
    /// Bytes of written blocks, in the same units: half, so that reads do not wait behind writes.
    write_bytes: Semaphore,
    units: u32,
    find_time: Duration,
    /// Whether chunks are written.
    writes: bool,
    known: RefCell<PresenceCache<ObjectKey>>,
    /// How long the store may be silent before it counts as silent for all requests.
    patience: Duration,
    sides: [SideState; 2],
    said: Arc<StoreNews>,
    /// The objects that could not be read when they were last asked for, at most [`MOST_UNREAD`]. A trial of the reading side reads
    /// the last of them again.
    unread: RefCell<VecDeque<Unread>>,
    /// Objects that were read, and the last of them.
    reads: Cell<u64>,
    last_read: Cell<Option<ObjectKey>>,
    /// Whether the store can refuse to overwrite existing objects.
    can_create: Cell<bool>,
    /// Locks for one write or deletion of a block at a time.
    writing: RefCell<HashMap<ObjectKey, Rc<Mutex<()>>>>,
    /// Wrong objects, to be deleted once their readers are answered.
    wrong: RefCell<Vec<ObjectKey>>,
    /// The last minute in which wrong objects were found, and their number.
    found_wrong: Cell<(u64, u32)>,
}

/// Why a request did not succeed.
#[derive(Debug)]
pub(super) enum Failed {
    /// There is no such object: a proper answer.
    Absent,
    /// There is such an object: a proper answer.
    Exists,
    /// The store failed.
    Trouble(Trouble),
}

/// An object that could not be read.
struct Unread {
    key: ObjectKey,
    /// Objects that had been read before.
    reads: u64,
    /// Whether the store answered, and had no other reason than the object.
    is_refused: bool,
}

/// A requested object.
enum Got {
    /// All its bytes were taken.
    Whole(Arriving),
    /// The object's bytes are in a file of this machine.
    File(Arriving, std::fs::File),
}

impl Client {
    pub(super) fn new(
        (store, prefix): super::store::Opened,
        options: &ObjectOptions,
        metrics: ObjectMetrics,
        said: Arc<StoreNews>,
    ) -> Self {
        let most = Semaphore::MAX_PERMITS.min(u32::MAX as usize) as u64;
        let units = (options.bytes_in_flight / UNIT_BYTES).clamp(1, most) as u32;
        Self {
            store,
            prefix,
            metrics,
            start: Instant::now(),
            most_requests: options.max_in_flight.max(1),
            requests: Semaphore::new(options.max_in_flight.max(1)),
            blocks: Semaphore::new((options.max_in_flight - options.max_in_flight.div_ceil(4)).max(1)),
            uploads: Uploads::new(options.max_in_flight / 2),
            bytes: Semaphore::new(units as usize),
            write_bytes: Semaphore::new((units as usize / 2).max(1)),
            units,
            find_time: options.find_deadline,
            writes: options.writes,
            known: RefCell::new(PresenceCache::new(options.known_chunks, LIFETIMES)),
            patience: options.timeout,
            sides: Default::default(),
            said,
            unread: RefCell::default(),
            reads: Cell::new(0),
            last_read: Cell::new(None),
            can_create: Cell::new(true),
            writing: RefCell::default(),
            wrong: RefCell::default(),
            found_wrong: Cell::default(),
        }
    }

    #[cfg(test)]
    pub(super) async fn all_turns(&self) -> SemaphorePermit<'_> {
        let turns = self.requests.available_permits() as u32;
        self.requests.acquire_many(turns).await.unwrap()
    }

    /// Asks the store for an object, whatever is known of it.
    #[cfg(test)]
    pub(super) async fn ask_for(&self, key: &ObjectKey, deadline: Instant) -> Result<(), Failed> {
        self.head(key, Line::Blocks(0), deadline).await
    }

    pub(super) async fn write(&self, order: WriteOrder, deadline: Instant) -> WriteAnswer {
        let blocks = (0..order.sources.len()).map(|at| self.write_block(&order, at, deadline));
        let written = written(&join_all(blocks).await);
        self.metrics.answered(written.into());
        written
    }

    /// Writes one of an order's blocks, when no other task here works on the same object.
    async fn write_block(&self, order: &WriteOrder, at: usize, deadline: Instant) -> WriteAnswer {
        let BlockPlace { slice, pool, .. } = order.sources[at].place;
        let key = ObjectKey { chunk: order.key(), block: BlockId { slice, pool } };
        self.alone(key, self.write_alone(key, order, at, deadline)).await
    }

    /// Does `work` on an object while no other task here works on the same object.
    async fn alone<T>(&self, key: ObjectKey, work: impl Future<Output = T>) -> T {
        let turn = Rc::clone(self.writing.borrow_mut().entry(key).or_default());
        let done = {
            let _turn = turn.lock().await;
            work.await
        };
        drop(turn);
        let mut writing = self.writing.borrow_mut();
        if writing.get(&key).is_some_and(|turn| Rc::strong_count(turn) == 1) {
            writing.remove(&key);
        }
        done
    }

    async fn write_alone(
        &self,
        key: ObjectKey,
        order: &WriteOrder,
        at: usize,
        deadline: Instant,
    ) -> WriteAnswer {
        let bytes = order.entries[at].bytes;
        if RecordHeader::record_pages_for(&order.entries[at..=at]) * PAGE_BYTES > MAX_OBJECT_BYTES {
            return WriteAnswer::TooLarge;
        }
        let mut is_damaged = false;
        match self.known(&key) {
            Some(Fact::Present) => return WriteAnswer::AlreadyThere,
            Some(Fact::Damaged) => is_damaged = self.may_replace(),
            Some(Fact::Absent) => {}
            // A question costs less than a refused body.
            None if !self.is_open(Side::Reading)
                && self.head(&key, Line::Writes(0), deadline).await.is_ok() =>
            {
                return WriteAnswer::AlreadyThere;
            }
            None => {}
        }
        let places = async { (self.write_place(bytes).await, self.place(bytes).await) };
        let Ok(_places) = timeout_at(deadline, places).await else { return WriteAnswer::Closed };
        let mut put = self.put(&key, order, at, is_damaged, deadline).await;
        if is_damaged && matches!(put, Err(Failed::Exists)) {
            // Azure deletes archived objects, and does not replace them.
            self.remove_block(key, deadline).await;
            put = self.put(&key, order, at, false, deadline).await;
        }
        match put {
            Ok(bytes) => {
                self.metrics.written_bytes.inc_by(bytes);
                self.learn(key, Fact::Present);
                WriteAnswer::Durable
            }
            Err(Failed::Exists) if !is_damaged => {
                self.learn(key, Fact::Present);
                WriteAnswer::AlreadyThere
            }
            // A damaged object that can be neither replaced nor deleted is of no use to readers.
            Err(_) => WriteAnswer::Closed,
        }
    }

    /// Sends a block, and returns the number of bytes. Returns only when nothing reads the block's place any more.
    async fn put(
        &self,
        key: &ObjectKey,
        order: &WriteOrder,
        at: usize,
        is_damaged: bool,
        deadline: Instant,
    ) -> Result<u64, Failed> {
        let name = name(&self.prefix, key);
        loop {
            let creates = self.can_create.get() && !is_damaged;
            let (payload, released) = body(order, at);
            let bytes = payload.content_length() as u64;
            let put = self.put_object(Line::Writes(bytes), &name, payload, creates, deadline).await;
            // The HTTP client may still hold the bytes of a request that was given up.
            let _ = released.await;
            if put.is_ok() || !creates || self.can_create.get() {
                return put.map(|()| bytes);
            }
        }
    }

    pub(super) async fn read(&self, order: ReadOrder, deadline: Instant) -> ReadAnswer {
        let blocks = order.destinations.iter().map(|to| self.read_block(&order, to, deadline));
        let read = read(&order.destinations, join_all(blocks).await);
        self.metrics.answered((&read).into());
        read
    }

    /// Brings one block into its place.
    async fn read_block(&self, order: &ReadOrder, to: &BlockPlace, deadline: Instant) -> ReadAnswer {
        let key = ObjectKey { chunk: order.key, block: BlockId { slice: to.slice, pool: to.pool } };
        match self.known(&key) {
            _ if self.is_open(Side::Reading) => ReadAnswer::Closed,
            Some(Fact::Absent) => ReadAnswer::NotHeld,
            _ => match timeout_at(deadline, self.place(to.bytes)).await {
                Ok(_place) => self.read_placed(key, order.chunk, to, deadline).await,
                Err(_) => ReadAnswer::Closed,
            },
        }
    }

    async fn read_placed(
        &self,
        key: ObjectKey,
        chunk: ChunkRef,
        to: &BlockPlace,
        deadline: Instant,
    ) -> ReadAnswer {
        let mut tries = 0;
        loop {
            // The store may have failed meanwhile.
            if self.is_open(Side::Reading) {
                return ReadAnswer::Closed;
            }
            match self.get(&key, to, deadline).await {
                Err(Failed::Absent) => {
                    if self.known(&key) != Some(Fact::Damaged) {
                        self.learn(key, Fact::Absent);
                    }
                    return ReadAnswer::NotHeld;
                }
                // One connection may be dead, and the store not.
                Err(Failed::Trouble(trouble)) if tries == 0 && trouble.kind == TroubleKind::TimedOut => {
                    tries += 1
                }
                Err(_) => return ReadAnswer::Closed,
                Ok(Ok(header)) => {
                    self.learn(key, Fact::Present);
                    return answer(&header, chunk, std::slice::from_ref(to));
                }
                // Another build wrote the object: this node may neither read nor delete it.
                Ok(Err(Damage::Header(FormatError::Version { .. }))) => return ReadAnswer::NotHeld,
                // Read once more, because all nodes would lose the object.
                Ok(Err(_)) if tries == 0 => tries += 1,
                Ok(Err(damage)) => {
                    self.metrics.damaged.inc();
                    tracing::error!(chunk = %key.chunk.hash, ?damage, "wrong bytes in the object store");
                    self.learn(key, Fact::Damaged);
                    // A file that this machine cannot read may be right on others.
                    if damage != Damage::Unreadable && self.may_replace() {
                        self.wrong.borrow_mut().push(key);
                    }
                    return ReadAnswer::Damaged;
                }
            }
        }
    }

    /// Brings a block into its place. Returns the record's header, or its fault.
    async fn get(
        &self,
        key: &ObjectKey,
        to: &BlockPlace,
        deadline: Instant,
    ) -> Result<Result<RecordHeader, Damage>, Failed> {
        let at = name(&self.prefix, key);
        let is_damaged = self.known(key) == Some(Fact::Damaged);
        let got = self.ask(Line::Blocks(to.bytes), (Kind::Get, GET), deadline, async {
            let found = match self.store.get(&at).await {
                // The store may refuse this object for ever: that says nothing of the others.
                Err(error) if is_damaged && !Trouble::of(&error, GET).is_silence() => {
                    return Err(Error::NotFound { path: at.to_string(), source: error.into() });
                }
                found => found?,
            };
            self.heard(Side::Reading);
            let mut arriving = Arriving::new(key.chunk, to, found.meta.size);
            match found.payload {
                GetResultPayload::File(file, _) => Ok(Got::File(arriving, file)),
                GetResultPayload::Stream(mut stream) => {
                    while !arriving.is_damaged()
                        && let Some(bytes) = stream.try_next().await?
                    {
                        self.heard(Side::Reading);
                        arriving.feed(&bytes);
                    }
                    Ok(Got::Whole(arriving))
                }
            }
        });
        let taken = match got.await {
            Ok(Got::Whole(arriving)) => Ok(Ok(arriving)),
            Ok(Got::File(arriving, file)) => {
                let taken = read_file(arriving, file, deadline).await;
                taken.inspect_err(|trouble| _ = self.failed(Side::Reading, trouble)).map_err(Failed::Trouble)
            }
            Err(failed) => Err(failed),
        };
        match &taken {
            Err(Failed::Trouble(trouble)) => self.note_unread(*key, trouble, deadline).await,
            Err(_) | Ok(Err(_)) => _ = self.forget_unread(key),
            Ok(Ok(_)) => {
                self.forget_unread(key);
                self.reads.update(|reads| reads + 1);
                self.last_read.set(Some(*key));
                self.succeeded(Side::Reading);
            }
        }
        let arriving = match taken? {
            Ok(arriving) => arriving,
            Err(damage) => return Ok(Err(damage)),
        };
        self.metrics.read_bytes.inc_by(arriving.bytes);
        // An object of this name must have this block and nothing else.
        let is_this = |header: &RecordHeader| matches!(&header.blocks[..], [one] if (one.slice, one.pool) == (key.block.slice, key.block.pool));
        let read = arriving.finish();
        Ok(read.and_then(|header| if is_this(&header) { Ok(header) } else { Err(Damage::Key) }))
    }

    /// Deletes objects that reads found wrong, unless they were written anew since. Must be called right after the readers are
    /// answered: the next write of such an object waits for its deletion.
    pub(super) async fn delete_wrong(&self, deadline: Instant) {
        let wrong = std::mem::take(&mut *self.wrong.borrow_mut());
        let delete = |key| async move {
            if self.known(&key) == Some(Fact::Damaged) {
                self.remove_block(key, deadline).await;
            }
        };
        join_all(wrong.into_iter().map(|key| self.alone(key, delete(key)))).await;
    }

    /// Deletes a block. Returns whether the store had it.
    pub(super) async fn remove_block(&self, key: ObjectKey, deadline: Instant) -> bool {
        let at = name(&self.prefix, &key);
        let deleted = self.ask(Line::Blocks(0), (Kind::Delete, DELETE), deadline, self.store.delete(&at));
        let removed = match deleted.await {
            Ok(()) => Some(true),
            Err(Failed::Absent) => Some(false),
            Err(_) => None,
        };
        if removed.is_some() {
            self.learn(key, Fact::Absent);
        }
        removed.unwrap_or(false)
    }

    /// Whether one more wrong object may be deleted or overwritten. If many objects seem wrong, this node's memory may be what is
    /// wrong, and other nodes can read the objects.
    fn may_replace(&self) -> bool {
        let minute = self.now().as_secs() / 60;
        let (of, found) = self.found_wrong.get();
        let found = if of == minute { found + 1 } else { 1 };
        self.found_wrong.set((minute, found));
        found <= MOST_REPLACED_A_MINUTE
    }

    /// Notes that an object could not be read. If the store refuses the object once more, after it handed out others, and still
    /// hands out the last of these, the object counts as damaged: the next write replaces it.
    async fn note_unread(&self, key: ObjectKey, trouble: &Trouble, deadline: Instant) {
        let (before, reads) = (self.forget_unread(&key), self.reads.get());
        let is_refused = !trouble.is_silence() && !trouble.is_overload();
        let is_again = is_refused && before.is_some_and(|before| before.is_refused && before.reads < reads);
        let other = self.last_read.get().filter(|_| is_again);
        if let Some(other) = other
            && self.begin_to_read(&name(&self.prefix, &other), deadline).await.is_ok()
        {
            tracing::warn!(%trouble, chunk = %key.chunk.hash, "the object store refuses an object: it is missed until written again");
            return self.learn(key, Fact::Damaged);
        }
        let mut unread = self.unread.borrow_mut();
        if unread.len() == MOST_UNREAD {
            unread.pop_front();
        }
        unread.push_back(Unread { key, reads, is_refused });
    }

    fn forget_unread(&self, key: &ObjectKey) -> Option<Unread> {
        let mut unread = self.unread.borrow_mut();
        let at = unread.iter().position(|unread| unread.key == *key)?;
        unread.remove(at)
    }

    async fn place(&self, bytes: u64) -> Option<SemaphorePermit<'_>> {
        let units = bytes.div_ceil(UNIT_BYTES).clamp(1, u64::from(self.units)) as u32;
        self.bytes.acquire_many(units).await.ok()
    }

    async fn write_place(&self, bytes: u64) -> Option<SemaphorePermit<'_>> {
        let most = u64::from(self.units / 2).max(1);
        self.write_bytes.acquire_many(bytes.div_ceil(UNIT_BYTES).clamp(1, most) as u32).await.ok()
    }

    fn known(&self, key: &ObjectKey) -> Option<Fact> {
        self.known.borrow().get(key, self.now())
    }

    fn learn(&self, key: ObjectKey, fact: Fact) {
        let mut known = self.known.borrow_mut();
        known.set(key, fact, self.now());
        self.metrics.known.set(known.len() as i64);
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// The result for a chunk, from its blocks' writes.
fn written(blocks: &[WriteAnswer]) -> WriteAnswer {
    let any = |answer| blocks.contains(&answer);
    match () {
        () if any(WriteAnswer::Closed) => WriteAnswer::Closed,
        () if any(WriteAnswer::TooLarge) => WriteAnswer::TooLarge,
        () if any(WriteAnswer::Durable) => WriteAnswer::Durable,
        () => WriteAnswer::AlreadyThere,
    }
}

/// The result for a chunk, from its blocks' reads. Only complete pools count, and only if no block is damaged.
fn read(destinations: &[BlockPlace], blocks: Vec<ReadAnswer>) -> ReadAnswer {
    for bad in [ReadAnswer::Closed, ReadAnswer::Damaged, ReadAnswer::Disagrees, ReadAnswer::OtherBlocks] {
        if blocks.contains(&bad) {
            return bad;
        }
    }
    let asked = || destinations.iter().zip(&blocks);
    let lacks = |pool| asked().any(|(to, read)| to.pool == pool && *read == ReadAnswer::NotHeld);
    let pools = destinations.iter().map(|to| to.pool).filter(|&pool| !lacks(pool));
    let pools = pools.fold(PoolSet::default(), |pools, pool| pools.with(pool.into()));
    if pools == PoolSet::default() {
        return ReadAnswer::NotHeld;
    }
    let mut sums = Vec::with_capacity(blocks.len());
    for (to, read) in destinations.iter().zip(blocks) {
        if let ReadAnswer::Here { checksums, .. } = read
            && pools.has(to.pool.into())
        {
            sums.extend(checksums);
        }
    }
    ReadAnswer::Here { pools, checksums: sums }
}

/// Takes a file's bytes on a thread that may block. The caller waits until this thread has ended: the places belong to the
/// order until then.
async fn read_file(
    mut arriving: Arriving,
    file: std::fs::File,
    deadline: Instant,
) -> Result<Result<Arriving, Damage>, Trouble> {
    let read =
        larder_net::blocking::try_blocking(move || arriving.feed_file(file, deadline).map(|()| arriving));
    match read.await.map_err(io::Error::other).flatten() {
        Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => Ok(Err(Damage::Unreadable)),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            Err(Trouble::new(TroubleKind::TimedOut, GET, "the deadline passed"))
        }
        Err(error) => Err(Trouble::new(TroubleKind::Other, GET, error.to_string())),
        Ok(arriving) => Ok(Ok(arriving)),
    }
}

/// The unit in which bytes under way are counted.
const UNIT_BYTES: u64 = 64 << 10;

/// Wrong objects that a node deletes or overwrites in a minute.
const MOST_REPLACED_A_MINUTE: u32 = 16;

/// Unread objects that are remembered: more than are read at a time, since reads under way fail after the side is closed.
const MOST_UNREAD: usize = 1_000;
