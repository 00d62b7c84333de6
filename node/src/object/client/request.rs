//! Makes requests to the store, and learns the store's health from the answers.

use std::time::Duration;

use futures_util::TryStreamExt as _;
use larder_core::store::ids::ChunkKey;
use larder_core::tiers::presence::Fact;
use larder_protocol::{ChunkHash, Fingerprint};
use object_store::path::Path;
use object_store::{Error, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use super::super::BlockId;
use super::super::metrics::{Kind, ObjectMetrics, Side};
use super::super::record::{ObjectKey, name, probe_name};
use super::super::trouble::{
    Trouble, TroubleKind, is_of_no_bucket, is_refused_overwrite, unsupported_if_no_links,
};
use super::uploads::UploadTurn;
use super::{Client, Failed};

impl Client {
    /// Writes, reads and deletes a small object: a store that refuses this now would refuse blocks later. If no chunks are written,
    /// only reads.
    pub(in super::super) async fn probe(&self, deadline: Instant) -> Result<(), Trouble> {
        let at = probe_name(&self.prefix);
        if self.writes
            && let Err(Failed::Trouble(trouble)) = self.put_probe(deadline).await
        {
            return Err(trouble);
        }
        let read = async { self.store.get(&at).await?.bytes().await };
        match self.ask(Line::Blocks(0), (Kind::Get, GET), deadline, read).await {
            Ok(bytes) if bytes != PROBE && self.writes => {
                return Err(Trouble::new(
                    TroubleKind::Other,
                    GET,
                    "the read bytes differ from the written bytes",
                ));
            }
            Err(Failed::Trouble(trouble)) => return Err(trouble),
            // Absent: another node that starts just now has deleted it.
            Ok(_) | Err(_) => {}
        }
        let chunk = ChunkKey { fingerprint: Fingerprint([0; 32]), hash: ChunkHash([0; 32]) };
        let absent = ObjectKey { chunk, block: BlockId { slice: 0, pool: 0 } };
        // Without the permission to list, S3 does not say that an object is absent.
        if let Err(Failed::Trouble(trouble)) = self.head(&absent, Line::Blocks(0), deadline).await {
            return Err(trouble);
        }
        if !self.writes {
            return Ok(());
        }
        let deleted = self.ask(Line::Blocks(0), (Kind::Delete, DELETE), deadline, self.store.delete(&at));
        if let Err(Failed::Trouble(trouble)) = deleted.await {
            tracing::warn!(%trouble, "objects cannot be deleted: purges fail, and damaged ones stay until written again");
            *larder_net::lock(&self.said.not_deleted) = Some(trouble);
        }
        Ok(())
    }

    /// Checks that a block's object is there. Fails if it is not, or is not known to be.
    pub(super) async fn head(
        &self,
        key: &ObjectKey,
        line: Line<'_>,
        deadline: Instant,
    ) -> Result<(), Failed> {
        let at = name(&self.prefix, key);
        let found = self.ask(line, (Kind::Head, HEAD), deadline, self.store.head(&at)).await;
        match &found {
            Ok(_) => self.learn(*key, Fact::Present),
            Err(Failed::Absent) => self.learn(*key, Fact::Absent),
            Err(_) => {}
        }
        found.map(|_| ())
    }

    /// Tries whether a side that is left alone works again.
    pub(in super::super) async fn try_again(&self, side: Side, deadline: Instant) {
        let tried = match side {
            Side::Reading => self.read_again(deadline).await,
            Side::Writing => self.put_probe(deadline).await,
        };
        if let Err(failed) = tried {
            tracing::debug!(?failed, side = side.name(), "the object store still fails");
            self.trial_failed(side);
        }
    }

    /// Reads the last unread object again. If the store refuses it, but answers for another name, only the unread objects cannot
    /// be read (an archive keeps them, or their key is gone): they count as damaged, so nobody asks for them, and the next writes
    /// replace them.
    async fn read_again(&self, deadline: Instant) -> Result<(), Failed> {
        let reads = self.reads.get();
        let last = self.unread.borrow().back().filter(|last| last.reads == reads).map(|last| last.key);
        let at = last.map_or_else(|| probe_name(&self.prefix), |key| name(&self.prefix, &key));
        let Err(Failed::Trouble(trouble)) = self.begin_to_read(&at, deadline).await else {
            if let Some(key) = last {
                self.forget_unread(&key);
            }
            return Ok(());
        };
        if last.is_none() || trouble.is_silence() {
            return Err(Failed::Trouble(trouble));
        }
        if let Err(Failed::Trouble(trouble)) = self.begin_to_read(&probe_name(&self.prefix), deadline).await {
            return Err(Failed::Trouble(trouble));
        }
        let unread = std::mem::take(&mut *self.unread.borrow_mut());
        let unread: Vec<_> = unread.into_iter().filter(|unread| unread.reads == reads).collect();
        let objects = unread.len();
        tracing::warn!(%trouble, objects, "the object store answers, but refuses some objects: they are missed until written again");
        unread.into_iter().for_each(|unread| self.learn(unread.key, Fact::Damaged));
        Ok(())
    }

    pub(super) async fn begin_to_read(&self, at: &Path, deadline: Instant) -> Result<(), Failed> {
        let begins = async { self.store.get(at).await?.into_stream().try_next().await.map(|_| ()) };
        let begun = self.ask(Line::Blocks(0), (Kind::Get, GET), deadline, begins).await;
        begun.inspect(|()| self.succeeded(Side::Reading))
    }

    /// Writes a small object as blocks are written: a store may take objects, and fail only to create them.
    async fn put_probe(&self, deadline: Instant) -> Result<(), Failed> {
        let at = probe_name(&self.prefix);
        let put = |creates| {
            self.put_object(Line::Blocks(0), &at, PutPayload::from_static(PROBE), creates, deadline)
        };
        for _ in 0..2 {
            match put(self.can_create.get()).await {
                // An earlier trial left it, or another node tries just now.
                Err(Failed::Exists) => {
                    let deletion = self.store.delete(&at);
                    // If nobody may delete it, it is written over.
                    let _ = self.ask(Line::Blocks(0), (Kind::Delete, DELETE), deadline, deletion).await;
                }
                // Another node tries just now, or the store cannot refuse existing objects.
                Err(Failed::Trouble(trouble))
                    if trouble.is_of_conflict() || trouble.kind == TroubleKind::Unsupported => {}
                put => return put,
            }
        }
        put(false).await
    }

    /// Writes an object. If `creates`, an existing object stays; learns whether the store can do that.
    pub(super) async fn put_object(
        &self,
        line: Line<'_>,
        at: &Path,
        payload: PutPayload,
        creates: bool,
        deadline: Instant,
    ) -> Result<(), Failed> {
        let mode = if creates { PutMode::Create } else { PutMode::Overwrite };
        let options = PutOptions { mode, ..PutOptions::default() };
        let put = async {
            let put = self.store.put_opts(at, payload, options).await;
            put.map_err(|error| if creates { unsupported_if_no_links(error) } else { error })
        };
        let put = self.ask(line, (Kind::Put, PUT), deadline, put).await;
        if creates
            && matches!(&put, Err(Failed::Trouble(trouble)) if trouble.kind == TroubleKind::Unsupported)
        {
            tracing::warn!("the store cannot refuse existing objects: they are written over");
            self.can_create.set(false);
        }
        put.map(drop)
    }

    /// Makes one request, and learns the store's health from it. The request waits for its turn until the deadline. Then it has as
    /// much time as its bytes need, but it ends at the deadline if it is no upload: an upload that got its turn late would else
    /// be broken off, and its bytes sent in vain.
    pub(super) async fn ask<T>(
        &self,
        line: Line<'_>,
        (kind, asked): (Kind, &'static str),
        deadline: Instant,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Failed> {
        let (side, is_order) = (kind.side(), matches!(line, Line::Writes(_)));
        let is_upload = is_order && kind == Kind::Put;
        let turn = async {
            tokio::select! {
                biased;
                // The store is silent, and nobody waits for it twice.
                () = self.went_silent_by_others(side), if !is_upload => None,
                turn = self.turn(line) => turn,
            }
        };
        let turn = timeout_at(deadline, turn).await.ok().flatten();
        // Results of other requests may have closed the side meanwhile: then only trials are made.
        let is_late = || Instant::now() >= deadline || (is_order && self.is_open(side));
        let Some(_turn) = turn.filter(|_| !is_late()) else {
            // The store is not to blame for requests that waited behind other requests; those are counted themselves.
            self.metrics.requested(kind, "not_made", 0.0);
            return Err(Failed::Trouble(Trouble::new(
                TroubleKind::TimedOut,
                asked,
                "the store answers nothing, or too many requests are under way",
            )));
        };
        let under_way = UnderWay::new(&self.metrics);
        let (start, had) = (Instant::now(), self.time_for(line));
        let until = if is_upload { start + had } else { deadline.min(start + had) };
        let asked_store = self.asked(side);
        let timed_out = |detail| Err(Failed::Trouble(Trouble::new(TroubleKind::TimedOut, asked, detail)));
        let made = tokio::select! {
            biased;
            made = timeout_at(until, request) => match made {
                Ok(made) => made.map_err(|error| Failed::of(&error, kind, asked)),
                Err(_) if is_upload && !self.has_heard_since(side, start) => timed_out(SILENT),
                Err(_) => timed_out("the deadline passed"),
            },
            // While uploads fill the link, nothing is heard of them for as long as their bytes take.
            () = self.silence(side, start), if !is_upload => timed_out(SILENT),
        };
        drop((under_way, asked_store));
        let outcome = match &made {
            Ok(_) => "ok",
            Err(Failed::Absent) => "absent",
            Err(Failed::Exists) => "exists",
            Err(Failed::Trouble(trouble)) => trouble.kind.into(),
        };
        self.metrics.requested(kind, outcome, start.elapsed().as_secs_f64());
        if is_upload {
            self.note_pace(&made, start, had);
        }
        match &made {
            // A deletion is less than a write: its result says nothing of writing.
            _ if kind == Kind::Delete => {}
            // Finding is less than reading: a store may know its objects, and hand none out.
            Ok(_) | Err(Failed::Absent) if kind == Kind::Head => {}
            // The bytes of a file are still to be read. The caller knows when it has them.
            Ok(_) if kind == Kind::Get => self.heard(side),
            // The store answers, which does not prove that it can write.
            Err(Failed::Exists) => self.heard(side),
            Err(Failed::Trouble(trouble))
                if trouble.is_of_conflict() || trouble.kind == TroubleKind::Unsupported =>
            {
                self.heard(side);
            }
            Err(Failed::Trouble(trouble)) if trouble.detail == SILENT => self.went_silent(side, trouble),
            Err(Failed::Trouble(trouble)) => {
                if !trouble.is_silence() {
                    self.heard(side);
                }
                self.failed(side, trouble);
            }
            _ => {
                self.heard(side);
                self.succeeded(side);
            }
        }
        made
    }
}

impl Client {
    /// Waits for a request's turn. `None`: never, since the turns are not closed.
    pub(super) async fn turn(&self, line: Line<'_>) -> Option<Turn<'_>> {
        if let Line::Lookup(own) = line {
            let _first = own.acquire().await.ok()?;
            return Some(Turn { _write: None, _block: None, _request: self.requests.acquire().await.ok()? });
        }
        let is_write = matches!(line, Line::Writes(_));
        let _write = if is_write { Some(self.uploads.turn().await?) } else { None };
        let _block = Some(self.blocks.acquire().await.ok()?);
        Some(Turn { _write, _block, _request: self.requests.acquire().await.ok()? })
    }

    /// The time that a request may take.
    fn time_for(&self, line: Line<'_>) -> Duration {
        let (Line::Writes(bytes) | Line::Blocks(bytes)) = line else { return self.patience };
        self.patience + Duration::from_millis(bytes * 1_000 / LEAST_BYTES_PER_SECOND)
    }

    /// Lets the number of uploads follow the time that an upload took.
    fn note_pace<T>(&self, made: &Result<T, Failed>, start: Instant, had: Duration) {
        match made {
            Err(Failed::Trouble(trouble)) if trouble.is_overload() => {
                self.uploads.pace.borrow_mut().was_too_slow(start - self.start, self.now());
            }
            Err(Failed::Trouble(_)) => {}
            _ => self.uploads.succeeded(start.elapsed(), had),
        }
    }
}

/// Where a request waits for its turn.
#[derive(Clone, Copy)]
pub(super) enum Line<'a> {
    /// Among the requests of writes, which take half of all requests at most. With the bytes that are sent.
    Writes(u64),
    /// Among all requests but those of lookups. With the writes, they leave a quarter of all requests to lookups. With the bytes
    /// that are read.
    Blocks(u64),
    /// In the line of one lookup. Only the first few questions of each such line wait for a request, so lookups take turns, and
    /// one with thousands of questions keeps no other waiting.
    Lookup(&'a Semaphore),
}

/// The turn of a request, until it is dropped.
pub(super) struct Turn<'a> {
    _write: Option<UploadTurn<'a>>,
    _block: Option<SemaphorePermit<'a>>,
    _request: SemaphorePermit<'a>,
}

impl Failed {
    fn of(error: &Error, kind: Kind, asked: &'static str) -> Self {
        match error {
            // Unless the store says that the bucket is absent, the object is. For a put, only the bucket can be.
            Error::NotFound { .. } if kind != Kind::Put && !is_of_no_bucket(error) => Self::Absent,
            error if kind == Kind::Put && is_refused_overwrite(error) => Self::Exists,
            error => Self::Trouble(Trouble::of(error, asked)),
        }
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

/// The rate from which on a request ends in time, however many bytes it has: slower stores are of no use.
const LEAST_BYTES_PER_SECOND: u64 = 4 << 20;

/// The message for a store that does not answer.
const SILENT: &str = "it does not answer";

/// The bytes of a probe.
const PROBE: &[u8] = b"Larder was here";

pub(super) const HEAD: &str = "look for an object";
pub(super) const GET: &str = "read an object";
pub(super) const PUT: &str = "write an object";
pub(super) const DELETE: &str = "delete an object";
