//! Tests of the object tier, and their shared fixtures.

use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryStreamExt as _};
use larder_core::store::ids::ChunkKey;
use larder_net::metrics::Part as _;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use prometheus::Registry;
use tokio::sync::RwLock;
use tokio::time::{Instant, sleep};

use super::client::Client;
use super::metrics::Kind;
use super::patience::AskedPause;
use super::record::ObjectKey;
use super::*;
use crate::disk::tests::{Slots, TestChunk};
use crate::disk::{ReadAnswer, WriteAnswer};
use crate::threads::pinned_to;

mod before;
mod behaviour;
mod faults;
mod finding;
mod histories;
mod opening;
mod overload;
mod purges;
mod s3;

/// A store in memory, with faults that the test chooses.
#[derive(Debug, Clone, Default)]
pub(super) struct Faulty {
    pub(super) inner: Arc<InMemory>,
    state: Arc<Mutex<Faults>>,
    /// Requests wait while a test holds this.
    pub(super) gate: Arc<RwLock<()>>,
}

/// The faults of a store, and counts of its requests.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// Refuses to look for objects and to read them.
    pub(super) refuses_reads: bool,
    /// Objects that it has, and refuses to read, as an archive does. A write replaces them, but see `keeps_archived`.
    pub(super) archived: Vec<Path>,
    /// Answers 409 for archived objects, and refuses to replace them, as Azure does.
    pub(super) keeps_archived: bool,
    /// Answers 409 with this code to every upload.
    pub(super) conflict: Option<&'static str>,
    /// Objects that it hands out as files that cannot be read. A write replaces them.
    pub(super) unreadable: Vec<Path>,
    /// Says which objects it has, but hands out none.
    pub(super) hangs_in_reads: bool,
    /// Refuses to take or delete objects.
    pub(super) refuses_writes: bool,
    /// Refuses only to delete objects.
    pub(super) refuses_deletes: bool,
    /// Objects that it refuses to delete, as under a legal hold.
    pub(super) held: Vec<Path>,
    /// Says to those who read that there is no bucket.
    pub(super) lacks_bucket: bool,
    /// Cannot refuse to overwrite existing objects.
    pub(super) cannot_create: bool,
    /// Has no hard links, as some file systems, so it cannot create objects.
    pub(super) has_no_links: bool,
    /// Fails to create objects, and can replace them.
    pub(super) fails_to_create: bool,
    /// Takes what it is sent, and does not answer.
    pub(super) loses_answers: bool,
    /// Hands out nothing for so many requests.
    pub(super) hanging_gets: usize,
    /// Refuses uploads beside so many other requests, and counts these refusals.
    pub(super) most_requests: Option<usize>,
    pub(super) refused_uploads: u64,
    /// How long a request takes.
    pub(super) delay: Duration,
    /// The bytes that all uploads together send in a second.
    pub(super) uplink: Option<f64>,
    uploads: usize,
    /// How long the store holds the bytes that it was sent, whatever becomes of the request.
    pub(super) holds: Duration,
    pub(super) gets: usize,
    pub(super) heads: usize,
    pub(super) puts: usize,
    now: usize,
    pub(super) most_at_once: usize,
}

impl Faults {
    fn is_overloaded(&mut self) -> bool {
        let is_overloaded = self.most_requests.is_some_and(|most| self.now >= most);
        self.refused_uploads += u64::from(is_overloaded);
        is_overloaded
    }

    fn hangs_now(&mut self) -> bool {
        let hangs_once = self.hanging_gets > 0;
        self.hanging_gets -= usize::from(hangs_once);
        hangs_once || self.hangs_in_reads
    }
}

impl Faulty {
    pub(super) fn faults(&self) -> MutexGuard<'_, Faults> {
        self.state.lock().unwrap()
    }

    /// Changes an object's bytes behind the tier's back.
    pub(super) async fn change(&self, chunk: TestChunk, change: impl FnOnce(&mut Vec<u8>)) {
        let name = object_name(chunk);
        let mut bytes = self.inner.get(&name).await.unwrap().bytes().await.unwrap().to_vec();
        change(&mut bytes);
        self.inner.put(&name, bytes.into()).await.unwrap();
    }

    pub(super) async fn has(&self, chunk: TestChunk) -> bool {
        self.inner.head(&object_name(chunk)).await.is_ok()
    }

    /// Takes an upload's bytes from the link, which all uploads share.
    async fn upload(&self, bytes: usize) {
        let Some(uplink) = self.faults().uplink else { return };
        self.faults().uploads += 1;
        let _ended = Uploaded(self);
        let (mut left, tick) = (bytes as f64, Duration::from_millis(20));
        while left > 0.0 {
            sleep(tick).await;
            left -= uplink * tick.as_secs_f64() / self.faults().uploads as f64;
        }
    }

    fn keeps_archived(&self, at: &Path) -> bool {
        let faults = self.faults();
        faults.keeps_archived && faults.archived.contains(at)
    }

    /// Counts a request, and lets it take its time.
    async fn under_way(&self, is_refused: impl Fn(&Faults) -> bool) -> Result<()> {
        let delay = {
            let mut faults = self.faults();
            faults.now += 1;
            faults.most_at_once = faults.most_at_once.max(faults.now);
            faults.delay
        };
        let _ended = Ended(self);
        drop(self.gate.read().await);
        sleep(delay).await;
        if is_refused(&self.faults()) {
            let (path, source) =
                ("p".to_owned(), "confidential <Code>AccessDenied</Code> confidential".into());
            return Err(Error::PermissionDenied { path, source });
        }
        Ok(())
    }
}

/// The error that the `object_store` crate makes of a status 409.
pub(super) fn conflict(code: &str) -> Error {
    Error::AlreadyExists {
        path: "p".to_owned(),
        source: format!("Server returned non-2xx status code: 409 Conflict: <Code>{code}</Code>").into(),
    }
}

struct Ended<'a>(&'a Faulty);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.faults().now -= 1;
    }
}

struct Uploaded<'a>(&'a Faulty);

impl Drop for Uploaded<'_> {
    fn drop(&mut self) {
        self.0.faults().uploads -= 1;
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.faults().puts += 1;
        let holds = self.faults().holds;
        if holds > Duration::ZERO {
            let held = payload.clone();
            tokio::spawn(async move {
                sleep(holds).await;
                drop(held);
            });
        }
        self.upload(payload.content_length()).await;
        if self.faults().is_overloaded() {
            return Err(Error::Generic { store: "Faulty", source: "<Code>SlowDown</Code>".into() });
        }
        self.under_way(|faults| faults.refuses_writes).await?;
        if let Some(code) = self.faults().conflict {
            return Err(conflict(code));
        }
        if options.mode == PutMode::Overwrite && self.keeps_archived(at) {
            return Err(conflict("BlobArchived"));
        }
        if self.faults().cannot_create && options.mode == PutMode::Create {
            let (operation, implementer) = ("create".to_owned(), "Faulty".to_owned());
            return Err(Error::NotImplemented { operation, implementer });
        }
        let creates_anew = options.mode == PutMode::Create && self.inner.head(at).await.is_err();
        if creates_anew && self.faults().has_no_links {
            let source = std::io::Error::from(rustix::io::Errno::PERM).into();
            return Err(Error::Generic { store: "LocalFileSystem", source });
        }
        if creates_anew && self.faults().fails_to_create {
            return Err(Error::Generic { store: "Faulty", source: "no".into() });
        }
        let put = self.inner.put_opts(at, payload, options).await?;
        self.faults().archived.retain(|archived| archived != at);
        self.faults().unreadable.retain(|unreadable| unreadable != at);
        if self.faults().loses_answers {
            return std::future::pending().await;
        }
        Ok(put)
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        unreachable!("objects are written in one request")
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        match options.head {
            true => self.faults().heads += 1,
            false => self.faults().gets += 1,
        }
        if !options.head && self.faults().hangs_now() {
            self.inner.head(at).await?;
            return std::future::pending().await;
        }
        if !options.head && self.keeps_archived(at) {
            return Err(conflict("BlobArchived"));
        }
        if self.faults().lacks_bucket {
            let source = if options.head { "" } else { "<Code>NoSuchBucket</Code>" };
            return Err(Error::NotFound { path: "p".to_owned(), source: source.into() });
        }
        self.under_way(|faults| faults.refuses_reads || (!options.head && faults.archived.contains(at)))
            .await?;
        let is_unreadable = !options.head && self.faults().unreadable.contains(at);
        let mut got = self.inner.get_opts(at, options).await?;
        if is_unreadable {
            // Address 0 of a process cannot be read.
            let file = "/proc/self/mem";
            got.payload = GetResultPayload::File(std::fs::File::open(file).unwrap(), file.into());
        }
        Ok(got)
    }

    fn delete_stream(&self, names: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        if self.faults().refuses_writes || self.faults().refuses_deletes {
            let (path, source) = ("p".to_owned(), "no".into());
            let refused = Err(Error::PermissionDenied { path, source });
            return Box::pin(futures_util::stream::iter([refused]));
        }
        let (held, inner) = (self.faults().held.clone(), Arc::clone(&self.inner));
        names
            .and_then(move |name| {
                let (is_held, inner) = (held.contains(&name), Arc::clone(&inner));
                async move {
                    match is_held {
                        true => Err(Error::Generic {
                            store: "Faulty",
                            source: "held (code: AccessDenied)".into(),
                        }),
                        false => inner.delete(&name).await.map(|()| name),
                    }
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        unreachable!("objects are not copied")
    }
}

impl Client {
    /// Deletes blocks of a chunk, as the owner of the bucket may. Returns whether the store deleted one.
    pub(super) async fn remove(&self, chunk: ChunkKey, blocks: &[BlockId], deadline: Instant) -> bool {
        let keys = blocks.iter().map(|&block| ObjectKey { chunk, block });
        join_all(keys.map(|key| self.remove_block(key, deadline))).await.contains(&true)
    }
}

/// A client over a faulty store.
pub(super) struct Rig {
    pub(super) store: Faulty,
    pub(super) client: Client,
    pub(super) slots: Slots,
    pub(super) metrics: ObjectMetrics,
}

impl Rig {
    pub(super) fn new() -> Self {
        Self::over(Faulty::default())
    }

    /// Another node on the same store.
    pub(super) fn over(store: Faulty) -> Self {
        Self::with(store, &options("memory:///"))
    }

    pub(super) fn with(store: Faulty, options: &ObjectOptions) -> Self {
        let (metrics, opened) = (metrics(), (Arc::new(store.clone()) as Arc<dyn ObjectStore>, PREFIX.into()));
        let client = Client::new(opened, options, metrics.clone(), Arc::default());
        Self { store, client, slots: Slots::new(), metrics }
    }

    pub(super) async fn write(&mut self, number: u64) -> WriteAnswer {
        self.write_chunk(single(number)).await
    }

    pub(super) async fn write_chunk(&mut self, chunk: TestChunk) -> WriteAnswer {
        let order = self.slots.write_order(chunk);
        self.client.write(order, deadline()).await
    }

    pub(super) async fn read(&mut self, number: u64) -> ReadAnswer {
        let order = self.slots.read_order(single(number));
        let answer = self.client.read(order, deadline()).await;
        self.client.delete_wrong(deadline()).await;
        if matches!(answer, ReadAnswer::Here { .. }) {
            self.slots.assert_right(single(number), &answer);
        }
        answer
    }

    pub(super) async fn remove(&self, number: u64) -> bool {
        self.client.remove(single(number).key(), &BLOCKS, deadline()).await
    }
}

pub(super) fn deadline() -> Instant {
    Instant::now() + DEADLINE
}

pub(super) fn metrics() -> ObjectMetrics {
    ObjectMetrics::register(&Registry::new()).unwrap()
}

pub(super) fn options(url: &str) -> ObjectOptions {
    ObjectOptions {
        url: url.to_owned(),
        settings: BTreeMap::new(),
        allow_http: true,
        start_without: false,
        writes: true,
        queue_orders: 32,
        max_in_flight: 8,
        bytes_in_flight: 1 << 20,
        timeout: Duration::from_secs(5),
        deadline: DEADLINE,
        find_deadline: FIND_DEADLINE,
        known_chunks: 10_000,
        cpus: pinned_to().unwrap(),
    }
}

/// A chunk of one block. Its number determines its namespace; every third chunk has whole pages.
pub(super) fn single(number: u64) -> TestChunk {
    let numbers = (number..).step_by(3_000).map(TestChunk);
    numbers.into_iter().find(|chunk| chunk.pools().len() == 1).unwrap()
}

/// The name of such a chunk's object.
pub(super) fn object_name(chunk: TestChunk) -> Path {
    record::name(&Path::from(PREFIX), &ObjectKey { chunk: chunk.key(), block: BLOCKS[0] })
}

/// All blocks of such a chunk.
pub(super) const BLOCKS: [BlockId; 1] = [BlockId { slice: 0, pool: 0 }];
pub(super) const PREFIX: &str = "some/prefix";
pub(super) const DEADLINE: Duration = Duration::from_secs(20);
pub(super) const FIND_DEADLINE: Duration = Duration::from_millis(200);
