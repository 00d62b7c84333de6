//! What the object thread does: orders to requests, answers to facts.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures_util::TryStreamExt;
use hashbrown::HashMap;
use object_store::path::Path;
use object_store::{GetResultPayload, ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use super::breaker::Breaker;
use super::known::{Fact, Known};
use super::metrics::{Kind, ObjectMetrics, Side};
use super::record::{Arriving, body, name};
use super::trouble::{Trouble, TroubleKind};
use super::{MAX_OBJECT_BYTES, ObjectOptions};
use crate::disk::format::{FormatError, RecordHeader};
use crate::disk::volume::{Damage, answer};
use crate::disk::{BlockPlace, ChunkKey, ReadAnswer, ReadOrder, WriteAnswer, WriteOrder};

mod find;
mod request;

use request::{DELETE, GET, PUT};

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

    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// Takes a file's bytes on a thread that may block. It is waited for to its end: the places belong to the order until
/// then.
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

/// Bytes under way are counted in these.
const UNIT_BYTES: u64 = 64 << 10;
