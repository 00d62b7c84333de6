//! What the object thread does: orders to requests, answers to facts.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::TryStreamExt;
use hashbrown::HashMap;
use object_store::path::Path;
use object_store::{Error, GetResultPayload, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use super::breaker::Breaker;
use super::known::{Fact, Known};
use super::metrics::{Kind, ObjectMetrics, Side};
use super::record::{Arriving, body, name, probe_name};
use super::trouble::{Trouble, TroubleKind};
use super::{MAX_OBJECT_BYTES, ObjectOptions};
use crate::disk::format::{FormatError, RecordHeader};
use crate::disk::volume::{Damage, answer};
use crate::disk::{BlockPlace, ChunkKey, ReadAnswer, ReadOrder, WriteAnswer, WriteOrder};

mod find;

/// The store, and what is known of it. Lives on one thread.
pub(super) struct Engine {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    metrics: ObjectMetrics,
    start: Instant,
    requests: Semaphore,
    /// Bytes of blocks that may be under way, in units of [`UNIT_BYTES`].
    bytes: Semaphore,
    units: u32,
    find_time: Duration,
    known: RefCell<Known>,
    sides: [(RefCell<Breaker>, Arc<AtomicBool>); 2],
    /// Whether the store can write what is not there yet, and nothing else.
    can_create: Cell<bool>,
    /// One write of a chunk at a time.
    writing: RefCell<HashMap<ChunkKey, Rc<Mutex<()>>>>,
}

/// Why a request came to nothing.
#[derive(Debug)]
pub(super) enum Failed {
    /// There is no such object: a proper answer.
    Absent,
    /// There is such an object: a proper answer.
    Exists,
    /// The store failed.
    Trouble(Trouble),
}

/// An object that was asked for.
enum Got {
    /// All its bytes were taken.
    Whole(Arriving),
    /// They are in a file of this machine.
    File(Arriving, std::fs::File),
}

impl Engine {
    pub(super) fn new(
        (store, prefix): super::store::Opened,
        options: &ObjectOptions,
        metrics: ObjectMetrics,
        closed: [Arc<AtomicBool>; 2],
    ) -> Self {
        let most = Semaphore::MAX_PERMITS.min(u32::MAX as usize) as u64;
        let units = (options.bytes_in_flight / UNIT_BYTES).clamp(1, most) as u32;
        Self {
            store,
            prefix,
            metrics,
            start: Instant::now(),
            requests: Semaphore::new(options.max_in_flight.max(1)),
            bytes: Semaphore::new(units as usize),
            units,
            find_time: options.find_deadline,
            known: RefCell::new(Known::new(options.known_chunks)),
            sides: closed.map(|closed| (RefCell::default(), closed)),
            can_create: Cell::new(true),
            writing: RefCell::default(),
        }
    }

    /// Writes, reads and deletes an object of a few bytes: what is refused now would be refused later.
    pub(super) async fn probe(&self, deadline: Instant) -> Result<(), Trouble> {
        let at = probe_name(&self.prefix);
        let trouble = |failed, asked| match failed {
            Failed::Trouble(trouble) => trouble,
            _ => Trouble::new(TroubleKind::Other, asked, "its answers contradict each other"),
        };
        self.put_probe(deadline).await.map_err(|failed| trouble(failed, PUT))?;
        let found =
            self.ask(Kind::Get, GET, deadline, async { self.store.get(&at).await?.bytes().await }).await;
        let found = found.map_err(|failed| trouble(failed, GET))?;
        if found != PROBE {
            return Err(Trouble::new(TroubleKind::Other, GET, "other bytes came back than were written"));
        }
        let absent = ChunkKey {
            fingerprint: larder_protocol::Fingerprint([0; 32]),
            hash: larder_protocol::ChunkHash([0; 32]),
        };
        // Where it may not list, S3 does not say that an object is absent.
        if let Err(Failed::Trouble(trouble)) = self.head(&absent, deadline).await {
            return Err(trouble);
        }
        let deleted = self.ask(Kind::Delete, DELETE, deadline, self.store.delete(&at)).await;
        if let Err(Failed::Trouble(trouble)) = deleted {
            tracing::warn!(%trouble, "objects cannot be deleted: damaged ones stay until they are written again");
        }
        Ok(())
    }

    /// Begins with the store left alone.
    pub(super) fn leave_alone(&self) {
        [Side::Reading, Side::Writing].into_iter().for_each(|side| while !self.failed(side) {});
    }

    pub(super) async fn write(&self, order: WriteOrder, deadline: Instant) -> WriteAnswer {
        let key = order.key();
        let turn = Rc::clone(self.writing.borrow_mut().entry(key).or_default());
        let written = {
            let _turn = turn.lock().await;
            self.write_alone(order, deadline).await
        };
        drop(turn);
        let mut writing = self.writing.borrow_mut();
        if writing.get(&key).is_some_and(|turn| Rc::strong_count(turn) == 1) {
            writing.remove(&key);
        }
        self.metrics.answered(match written {
            WriteAnswer::Durable => "written",
            WriteAnswer::AlreadyThere => "already_there",
            WriteAnswer::TooLarge => "too_large",
            WriteAnswer::Closed => "closed",
        });
        written
    }

    async fn write_alone(&self, order: WriteOrder, deadline: Instant) -> WriteAnswer {
        let (key, bytes) = (order.key(), order.bytes());
        if RecordHeader::record_pages_for(&order.entries) * crate::disk::format::PAGE_BYTES > MAX_OBJECT_BYTES
        {
            return WriteAnswer::TooLarge;
        }
        let mut is_damaged = false;
        match self.known(&key) {
            Some(Fact::Present) => return WriteAnswer::AlreadyThere,
            Some(Fact::Damaged) => is_damaged = true,
            Some(Fact::Absent) => {}
            // A question costs less than a body that is refused.
            None if !self.is_open(Side::Reading) && self.head(&key, deadline).await.is_ok() => {
                return WriteAnswer::AlreadyThere;
            }
            None => {}
        }
        let Ok(_place) = timeout_at(deadline, self.place(bytes)).await else { return WriteAnswer::Closed };
        match self.put(&order, is_damaged, deadline).await {
            Ok(bytes) => {
                self.metrics.written_bytes.inc_by(bytes);
                self.learn(key, Fact::Present);
                WriteAnswer::Durable
            }
            Err(Failed::Exists) => {
                self.learn(key, Fact::Present);
                WriteAnswer::AlreadyThere
            }
            Err(Failed::Absent | Failed::Trouble(_)) => WriteAnswer::Closed,
        }
    }

    /// Sends a chunk; its bytes. Returns only when nothing reads its places any more.
    async fn put(&self, order: &WriteOrder, is_damaged: bool, deadline: Instant) -> Result<u64, Failed> {
        let at = name(&self.prefix, &order.key());
        loop {
            // What was found on the way may close a side for what waits behind it.
            if self.is_open(Side::Writing) {
                return Err(Failed::Trouble(Trouble::new(TroubleKind::Other, PUT, "it is left alone")));
            }
            let creates = self.can_create.get() && !is_damaged;
            let mode = if creates { PutMode::Create } else { PutMode::Overwrite };
            let (payload, released) = body(order);
            let bytes = payload.content_length() as u64;
            let options = PutOptions { mode, ..PutOptions::default() };
            let put = self.store.put_opts(&at, payload, options);
            let put = self.ask(Kind::Put, PUT, deadline, put).await;
            // The client may still be letting go of a request that was given up.
            let _ = released.await;
            match put {
                Err(Failed::Trouble(trouble)) if creates && trouble.kind == TroubleKind::Unsupported => {
                    tracing::warn!("the store cannot refuse what is there already: objects are written over");
                    self.can_create.set(false);
                }
                other => return other.map(|_| bytes),
            }
        }
    }

    pub(super) async fn read(&self, order: ReadOrder, deadline: Instant) -> ReadAnswer {
        let read = match self.known(&order.key) {
            _ if self.is_open(Side::Reading) => ReadAnswer::Closed,
            Some(Fact::Absent) => ReadAnswer::NotHeld,
            _ => match timeout_at(deadline, self.place(order.destinations.iter().map(|to| to.bytes).sum()))
                .await
            {
                Ok(_place) => self.read_placed(&order, deadline).await,
                Err(_) => ReadAnswer::Closed,
            },
        };
        self.metrics.answered(match &read {
            ReadAnswer::Here { .. } => "read",
            ReadAnswer::NotHeld => "not_held",
            ReadAnswer::OtherBlocks => "other_blocks",
            ReadAnswer::Damaged => "damaged",
            ReadAnswer::Closed => "closed",
        });
        read
    }

    async fn read_placed(&self, order: &ReadOrder, deadline: Instant) -> ReadAnswer {
        let destinations: Arc<[BlockPlace]> = order.destinations.clone().into();
        let mut tries = 0;
        loop {
            match self.get(order, &destinations, deadline).await {
                Err(Failed::Absent) => {
                    self.learn(order.key, Fact::Absent);
                    return ReadAnswer::NotHeld;
                }
                Err(_) => return ReadAnswer::Closed,
                Ok(Ok(header)) => {
                    self.learn(order.key, Fact::Present);
                    return answer(&header, &order.destinations);
                }
                // Another build's: neither ours to read nor to delete.
                Ok(Err(Damage::Header(FormatError::Version { .. }))) => return ReadAnswer::NotHeld,
                // Once more: all nodes would lose the object.
                Ok(Err(_)) if tries == 0 => tries += 1,
                Ok(Err(damage)) => {
                    self.metrics.damaged.inc();
                    tracing::error!(chunk = %order.key.hash, ?damage, "wrong bytes in the object store");
                    self.learn(order.key, Fact::Damaged);
                    self.remove(order.key, deadline).await;
                    return ReadAnswer::Damaged;
                }
            }
        }
    }

    /// Brings a chunk into its places: its header, or what is wrong with it.
    async fn get(
        &self,
        order: &ReadOrder,
        destinations: &Arc<[BlockPlace]>,
        deadline: Instant,
    ) -> Result<Result<RecordHeader, Damage>, Failed> {
        let at = name(&self.prefix, &order.key);
        let got = self.ask(Kind::Get, GET, deadline, async {
            let found = self.store.get(&at).await?;
            let mut arriving = Arriving::new(order, destinations, found.meta.size);
            match found.payload {
                GetResultPayload::File(file, _) => Ok(Got::File(arriving, file)),
                GetResultPayload::Stream(mut stream) => {
                    while let Some(bytes) = stream.try_next().await? {
                        arriving.feed(&bytes);
                    }
                    Ok(Got::Whole(arriving))
                }
            }
        });
        let arriving = match got.await? {
            Got::Whole(arriving) => arriving,
            Got::File(arriving, file) => read_file(arriving, file, deadline).await?,
        };
        self.metrics.read_bytes.inc_by(arriving.bytes);
        Ok(arriving.finish())
    }

    /// Deletes a chunk's object; whether the store did.
    pub(super) async fn remove(&self, key: ChunkKey, deadline: Instant) -> bool {
        let at = name(&self.prefix, &key);
        let removed = match self.ask(Kind::Delete, DELETE, deadline, self.store.delete(&at)).await {
            Ok(()) => Some(true),
            Err(Failed::Absent) => Some(false),
            Err(_) => None,
        };
        if removed.is_some() {
            self.learn(key, Fact::Absent);
        }
        removed.unwrap_or(false)
    }

    /// Whether a chunk's object is there: an error where it is not, or is not known to be.
    async fn head(&self, key: &ChunkKey, deadline: Instant) -> Result<(), Failed> {
        let at = name(&self.prefix, key);
        let found = self.ask(Kind::Head, HEAD, deadline, self.store.head(&at)).await;
        match &found {
            Ok(_) => self.learn(*key, Fact::Present),
            Err(Failed::Absent) => self.learn(*key, Fact::Absent),
            Err(_) => {}
        }
        found.map(|_| ())
    }

    /// Sees whether a side that is left alone does again what it is asked.
    pub(super) async fn try_again(&self, side: Side, deadline: Instant) {
        let tried = match side {
            Side::Reading => {
                let at = probe_name(&self.prefix);
                self.ask(Kind::Head, HEAD, deadline, self.store.head(&at)).await.map(|_| ())
            }
            Side::Writing => self.put_probe(deadline).await,
        };
        if let Err(Failed::Trouble(trouble)) = tried {
            tracing::debug!(%trouble, side = side.name(), "the object store still fails");
            self.breaker(side).borrow_mut().trial_failed(self.now());
        }
    }

    /// When a side that is left alone is to be tried again.
    pub(super) fn trial_at(&self, side: Side) -> Option<Instant> {
        self.breaker(side).borrow().trial_at().map(|at| self.start + at)
    }

    async fn put_probe(&self, deadline: Instant) -> Result<(), Failed> {
        let (at, payload) = (probe_name(&self.prefix), PutPayload::from_static(PROBE));
        self.ask(Kind::Put, PUT, deadline, self.store.put(&at, payload)).await.map(|_| ())
    }

    /// Makes one request, in its turn and until the deadline, and learns from it how the store fares.
    async fn ask<T>(
        &self,
        kind: Kind,
        asked: &'static str,
        deadline: Instant,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Failed> {
        let Ok(Ok(_turn)) = timeout_at(deadline, self.requests.acquire()).await else {
            // The store is not to blame for what waited behind other requests, which are counted themselves.
            self.metrics.requested(kind, "not_made", 0.0);
            return Err(Failed::Trouble(Trouble::new(TroubleKind::TimedOut, asked, "too much to do")));
        };
        let under_way = UnderWay::new(&self.metrics);
        let start = Instant::now();
        let made = timeout_at(deadline, request).await;
        drop(under_way);
        let made = match made {
            Ok(Ok(made)) => Ok(made),
            // Only an object can be absent to whoever reads; a put finds no bucket.
            Ok(Err(Error::NotFound { .. })) if kind != Kind::Put => Err(Failed::Absent),
            Ok(Err(Error::AlreadyExists { .. } | Error::Precondition { .. })) => Err(Failed::Exists),
            Ok(Err(error)) => Err(Failed::Trouble(Trouble::of(&error, asked))),
            Err(_) => Err(Failed::Trouble(Trouble::new(TroubleKind::TimedOut, asked, "its deadline passed"))),
        };
        let outcome = match &made {
            Ok(_) => "ok",
            Err(Failed::Absent) => "absent",
            Err(Failed::Exists) => "exists",
            Err(Failed::Trouble(trouble)) => trouble.name(),
        };
        self.metrics.requested(kind, outcome, start.elapsed().as_secs_f64());
        match &made {
            // Deleting is less than writing: what comes of it says nothing of that.
            _ if kind == Kind::Delete => {}
            Err(Failed::Trouble(trouble)) if trouble.kind != TroubleKind::Unsupported => {
                if self.failed(kind.side()) {
                    let side = kind.side().name();
                    tracing::error!(%trouble, side, "the object store fails: it is left alone, and tried again");
                }
            }
            _ => self.succeeded(kind.side()),
        }
        made
    }

    async fn place(&self, bytes: u64) -> Option<SemaphorePermit<'_>> {
        let units = bytes.div_ceil(UNIT_BYTES).clamp(1, u64::from(self.units)) as u32;
        self.bytes.acquire_many(units).await.ok()
    }

    fn known(&self, key: &ChunkKey) -> Option<Fact> {
        self.known.borrow().get(key, self.now())
    }

    fn learn(&self, key: ChunkKey, fact: Fact) {
        let mut known = self.known.borrow_mut();
        known.set(key, fact, self.now());
        self.metrics.known.set(known.len() as i64);
    }

    pub(super) fn is_open(&self, side: Side) -> bool {
        self.breaker(side).borrow().is_open()
    }

    fn breaker(&self, side: Side) -> &RefCell<Breaker> {
        &self.sides[side as usize].0
    }

    fn succeeded(&self, side: Side) {
        if self.breaker(side).borrow_mut().succeeded() {
            tracing::info!(side = side.name(), "the object store does again what it is asked");
            self.sides[side as usize].1.store(false, Ordering::Release);
            self.metrics.reopened(side);
        }
    }

    /// Whether it is left alone from now on.
    fn failed(&self, side: Side) -> bool {
        let opens = self.breaker(side).borrow_mut().failed(self.now());
        if opens {
            self.sides[side as usize].1.store(true, Ordering::Release);
            self.metrics.closed(side);
        }
        opens
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// A request that is counted as long as it is under way.
struct UnderWay<'a>(&'a ObjectMetrics);

impl<'a> UnderWay<'a> {
    fn new(metrics: &'a ObjectMetrics) -> Self {
        metrics.in_flight.inc();
        Self(metrics)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.in_flight.dec();
    }
}

/// Takes a file's bytes on a thread that may block. It is waited for to its end: the places belong to the order until then.
async fn read_file(
    mut arriving: Arriving,
    file: std::fs::File,
    deadline: Instant,
) -> Result<Arriving, Failed> {
    let read = tokio::task::spawn_blocking(move || arriving.feed_file(file, deadline).map(|()| arriving));
    let trouble = |detail: String| Failed::Trouble(Trouble::new(TroubleKind::Other, GET, detail));
    let read = read.await.map_err(|error| trouble(error.to_string()))?;
    read.map_err(|error| trouble(error.to_string()))
}

/// What is written to see whether the store answers.
const PROBE: &[u8] = b"Larder was here";

const HEAD: &str = "look for an object";
const GET: &str = "read an object";
const PUT: &str = "write an object";
const DELETE: &str = "delete an object";

/// Bytes under way are counted in these.
const UNIT_BYTES: u64 = 64 << 10;
