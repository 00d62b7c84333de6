//! The sessions that Python opens, and their requests.

use std::convert::identity;
use std::path::PathBuf;
use std::sync::Arc;

use larder_client::engine_lane::CopyFlags;
use larder_client::{FollowOptions, SessionError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tokio::task::spawn_blocking;

use crate::answers::{Found, Pinned, Progress, Stats};
use crate::handoff::{Follow, InPlace, StagedLayers};
use crate::lease::Lease;
use crate::namespace::{Chain, DescribedFields, Namespace, SpecFields, check_block};
use crate::node_copies::{self, CopyProgress, NodeCopy, NodeTensors, SharedMemory};
use crate::open::{Open, Opening};
use crate::requests::{
    self, Asking, Patience, Reply, Request, check_reserved, check_written, pool_sets, seconds, then,
    then_pinned,
};
use crate::reservation::{Reservation, StagedChunk, Taken};
use crate::ticket::Ticket;
use crate::waiting::{Task, Thread, awaitable, wait};

/// A session with the node on this host: `Session(path)`, where `path` is the tenant's socket. Threads share it; each of its
/// methods waits without the interpreter's lock, and requests of several threads are under way at the same time.
///
/// `client` is the caller's name, for the node's log; `device` is the number of the GPU actor (if not given, the actor with the
/// fewest sessions); `window_bytes` is the requested write window, 0 for a session that never writes; `timeout` is in seconds,
/// for each request. `verify` says which blocks are verified when they are read: "off", "sample" (one in 64, chosen by
/// `verify_seed`, at random if not given) or "always". A wrong block raises `DamagedError`, and the node is told. Copies of 4 MiB
/// and more take up to `copy_threads` threads, the calling one among them; 0 is half of the process's CPUs, at most 4.
///
/// The session ends when it was closed, by `close()` or as a context manager, or dropped, and its last lease, ticket and
/// reservation are gone. It belongs to the process that opened it: after a fork, the child gets `ForkedError`.
///
/// Raises `ConnectError` if nobody listens there, `BusyError` and `RefusedError` if the node wants no session now.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Session {
    open: Open,
}

/// A session with the node on this host, for asyncio: await `AsyncSession.connect(path)`. The parameters and errors are those of
/// `Session`. Many requests may be under way at the same time. Cancelling one is safe: what a late answer grants is given back.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct AsyncSession {
    open: Open,
}

impl Session {
    /// # Errors
    /// As [`Open::session`].
    pub(crate) fn share(&self) -> PyResult<larder_client::Session> {
        self.open.session()
    }

    fn open(py: Python<'_>, opening: Opening) -> PyResult<Self> {
        let (runtime, session) = opening.start()?;
        let session = wait(py, &runtime, session)?;
        Ok(Self { open: Open::new(session, runtime) })
    }
}

impl AsyncSession {
    fn open(py: Python<'_>, opening: Opening) -> PyResult<Bound<'_, PyAny>> {
        let (runtime, session) = opening.start()?;
        let on = runtime.clone();
        let opened = async move { Ok(Reply::from(Self { open: Open::new(session.await?, on) })) };
        awaitable(py, &runtime, opened)
    }
}

sessions! {
    /// Registers a namespace: `spec` is a `NamespaceSpec`, `slices` are those that this session reads and writes (slice 0 if not
    /// given).
    ///
    /// Raises `ValueError` if the namespace is impossible, `RefusedError` if the node refuses it, or if this session registered it
    /// with other slices.
    #[pyo3(signature = (spec: "NamespaceSpec", *, slices: "Sequence[int] | None" = None) -> "Namespace")]
    fn register(&self, spec: SpecFields, slices: Option<Vec<u16>>) -> Namespace {
        let (spec, block_bytes) = spec.resolve()?;
        let slices = slices.unwrap_or_else(|| vec![0]);
        then(self.session()?.register(&spec, &slices, &block_bytes), |inner| Namespace { inner })
    }

    /// Asks how much of a prompt is in the cache. Nothing found is a result with 0 tokens.
    ///
    /// `prompt_tokens`: tokens of the whole prompt; the answer leaves at least one of them to compute. `skip_read`: the caller
    /// cannot use a hit, so the lookup is counted apart. `preempted`: the request had been preempted. `tiers`: the tiers to look
    /// in ("device", "host", "disk", "peer", "object"; all if empty). `pin_seconds`: pin the found chunks for this time.
    /// `prefill_tokens_per_second`: how fast the engine computes; the node counts the seconds of prefill that a hit saves.
    #[pyo3(signature = (namespace: "Namespace", chain: "Chain", *, prompt_tokens: "int | None" = None, skip_read: "bool" = false,
        preempted: "bool" = false, tiers: "Sequence[_Tier]" = vec![], pin_seconds: "float | None" = None,
        prefill_tokens_per_second: "float | None" = None) -> "Found")]
    fn lookup(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        prompt_tokens: Option<u64>,
        skip_read: bool,
        preempted: bool,
        tiers: Vec<String>,
        pin_seconds: Option<f64>,
        prefill_tokens_per_second: Option<f64>,
    ) -> Found {
        let asking =
            Asking { prompt_tokens, skip_read, preempted, tiers, pin_seconds, prefill_tokens_per_second };
        let options = asking.options(namespace, chain)?;
        let session = self.session()?;
        let call = session.lookup(&namespace.inner, &chain.inner, options);
        then_pinned(session, call, |found| found.pin.unwrap_or(0), |found| Found::from(&found))
    }

    /// Asks how much of a prompt can be served. Meanwhile the node brings these chunks into its memory, from disk and other
    /// nodes. The options are those of `lookup`. If `prefill_tokens_per_second` is given, only chunks that come sooner than the
    /// engine computes them are brought. `request`: the engine's own id of the request, by which `larder explain` finds it.
    #[pyo3(signature = (namespace: "Namespace", chain: "Chain", *, prompt_tokens: "int | None" = None, skip_read: "bool" = false,
        preempted: "bool" = false, tiers: "Sequence[_Tier]" = vec![], pin_seconds: "float | None" = None,
        prefill_tokens_per_second: "float | None" = None, request: "str | None" = None) -> "Ticket")]
    fn lookup_and_prefetch(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        prompt_tokens: Option<u64>,
        skip_read: bool,
        preempted: bool,
        tiers: Vec<String>,
        pin_seconds: Option<f64>,
        prefill_tokens_per_second: Option<f64>,
        request: Option<String>,
    ) -> Ticket {
        let asking =
            Asking { prompt_tokens, skip_read, preempted, tiers, pin_seconds, prefill_tokens_per_second };
        let options = asking.options(namespace, chain)?;
        let session = self.session()?;
        let session = request.map_or_else(|| session.clone(), |request| session.named(&request));
        let call = session.prefetch(&namespace.inner, &chain.inner, options);
        then_pinned(session, call, |ticket| ticket.found().pin.unwrap_or(0), Ticket::new)
    }

    /// Asks how far a prefetch is.
    #[pyo3(signature = (ticket: "Ticket") -> "Progress")]
    fn progress(&self, ticket: &Ticket) -> Progress {
        let ticket = ticket.share()?;
        then(self.session()?.progress(&ticket), Progress::from)
    }

    /// Ends a prefetch and leases the contiguous prefix that has come. `wait` is "complete" (until all has come or failed to
    /// come), "best_effort" (what has come by now) or a number of seconds, by which the session's timeout is longer for this
    /// request.
    #[pyo3(signature = (ticket: "Ticket", *, wait: "_Wait" = Patience::Word(String::from("complete"))) -> "Lease")]
    fn collect(&self, ticket: &Ticket, wait: Patience) -> Lease {
        let (session, wait) = (self.session()?, wait.resolve()?);
        then(session.collect(ticket.take()?, wait), Lease::new)
    }

    /// Asks to read the longest prefix of `chain` that is here or can be brought in time. A miss is a lease of 0 chunks.
    ///
    /// Raises `BusyError` if the session reads too much already.
    #[pyo3(signature = (namespace: "Namespace", chain: "Chain") -> "Lease")]
    fn lease(&self, namespace: &Namespace, chain: &Chain) -> Lease {
        then(self.session()?.lease(&namespace.inner, &chain.inner), Lease::new)
    }

    /// Asks for room for those chunks of `chain` that are missing. `priority` is 0 for ordinary traffic; chunks of a higher
    /// priority stay longer under the `priority` policy. If `attempt` is not 0, the reservations of earlier attempts for these
    /// chunks end. `pools` says, for each chunk, the numbers of the pools that will be written, all if not given: pools that
    /// every chunk has are written whether named or not, others may be added later.
    ///
    /// Raises `BusyError` if there is no room.
    #[pyo3(signature = (namespace: "Namespace", chain: "Chain", *, priority: "int" = 0, attempt: "int" = 0,
        pools: "Sequence[Sequence[int]] | None" = None) -> "Reservation")]
    fn reserve(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        priority: i8,
        attempt: u64,
        pools: Option<Vec<Vec<usize>>>,
    ) -> Reservation {
        let (session, namespace, chain) = (self.session()?, &namespace.inner, &chain.inner);
        let call = match pools {
            Some(pools) => {
                session.reserve_attempt(namespace, chain, &pool_sets(namespace, &pools)?, priority, attempt)
            }
            None => session.reserve_attempt(namespace, chain, &[], priority, attempt),
        };
        then(call, Reservation::new)
    }

    /// Gives the reserved chunk at `position` (in the chain) room to be filled; waits until the write window has some.
    ///
    /// Raises `WindowError` if a chunk is larger than the window, `RequestTimeout` if no room was freed in time.
    #[pyo3(signature = (reservation: "Reservation", position: "int") -> "StagedChunk")]
    fn stage(&self, reservation: &Reservation, position: u32) -> StagedChunk {
        let reservation = reservation.share_for(&[position])?;
        let call = self.session()?.stage(&reservation, position);
        then(call, move |staged| StagedChunk::new(&reservation, staged))
    }

    /// Gives the reserved chunks at `positions` room to be filled, as `stage` does for one; all get it at once.
    ///
    /// Raises as `stage`: `WindowError` if the chunks together are larger than the window.
    #[pyo3(signature = (reservation: "Reservation", positions: "Sequence[int]") -> "list[StagedChunk]")]
    fn stage_chunks(&self, reservation: &Reservation, positions: Vec<u32>) -> Vec<StagedChunk> {
        let reservation = reservation.share_for(&positions)?;
        let call = self.session()?.stage_chunks(&reservation, &positions);
        then(call, move |staged| staged.into_iter().map(|one| StagedChunk::new(&reservation, one)).collect::<Vec<_>>())
    }

    /// Hands filled chunks of one reservation over, and returns how many the node keeps.
    ///
    /// Raises `BusyError` if the node copies too much at the moment: then the chunks are still staged, and may be committed again.
    #[pyo3(signature = (reservation: "Reservation", staged: "Sequence[StagedChunk]") -> "int")]
    fn commit(&self, reservation: &Reservation, staged: Vec<PyRef<'_, StagedChunk>>) -> u32 {
        let (session, reservation) = (self.session()?, reservation.share()?);
        let taken = Taken::of(&staged, &reservation)?;
        Ok(async move { taken.commit(session, reservation).await.map(Reply::from) })
    }

    /// Takes room in the write window for layers `start` to before `end` of one pool of reserved chunks, to be filled. Waits
    /// until there is room. `positions` are the chunks' positions in the chain, ascending.
    ///
    /// Raises `WindowError` if the layers are larger than the window, `RequestTimeout` if no room was freed in time.
    #[pyo3(signature = (reservation: "Reservation", positions: "Sequence[int]", start: "int", end: "int", *, pool: "int" = 0) -> "StagedLayers")]
    fn stage_layers(&self, reservation: &Reservation, positions: Vec<u32>, start: u32, end: u32, pool: usize) -> StagedLayers {
        let (session, reservation) = (self.session()?, reservation.share_for(&positions)?);
        let known = reservation.namespace().pool_layers().get(pool).copied().unwrap_or(0);
        if start >= end || end > known {
            return Err(PyValueError::new_err(format!("pool {pool} has {known} layers, not {start}..{end}")));
        }
        check_written(&reservation, &positions, pool)?;
        then(session.stage_layers(&reservation, &positions, pool, start..end), StagedLayers::new)
    }

    /// Hands filled layers over: followers of the chunks may read them. When all layers of the chunks were handed over,
    /// `commit_handed_over` commits the chunks.
    ///
    /// Raises `RefusedError` if the reservation has ended, by its deadline or a later attempt; `BusyError` if the node copies too
    /// much at the moment: then the layers are still staged, and may be handed over again.
    #[pyo3(signature = (staged: "StagedLayers") -> "None")]
    fn hand_over(&self, staged: &StagedLayers) -> () {
        let (session, taken) = (self.session()?, staged.take_out()?);
        Ok(async move { taken.hand_over(session).await.map(Reply::from) })
    }

    /// Commits chunks of which all layers were handed over, and returns how many the node keeps.
    ///
    /// Raises `RefusedError` if layers are missing.
    #[pyo3(signature = (reservation: "Reservation", positions: "Sequence[int]") -> "int")]
    fn commit_handed_over(&self, reservation: &Reservation, positions: Vec<u32>) -> u32 {
        let (session, reservation) = (self.session()?, reservation.share_for(&positions)?);
        then(session.commit_handed_over(&reservation, &positions), identity)
    }

    /// Follows chunks that are being written, or soon will be: on this node, or by an engine that talks to the actor `device` of
    /// the node `node`; its layers come as it hands them over. Room for these chunks is taken at once, for all or for none.
    /// Layers of an earlier attempt than `attempt` do not count; chunks of which nothing comes for `patience` seconds are lost.
    ///
    /// Raises `BusyError` if there is no room.
    #[pyo3(signature = (namespace: "Namespace", chain: "Chain", *, node: "str | None" = None, device: "int" = 0, attempt: "int" = 0,
        patience: "float" = 10.0) -> "Follow")]
    fn follow(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        node: Option<String>,
        device: u16,
        attempt: u64,
        patience: f64,
    ) -> Follow {
        let writer = node.map(|node| (node, device));
        let options = FollowOptions { writer, attempt, patience: seconds(patience)? };
        then(self.session()?.follow(&namespace.inner, &chain.inner, options), Follow::new)
    }

    /// Waits until `layers` layers of the followed chunks are in place, or nothing more will come, or `seconds` have passed.
    /// Returns what is in place then.
    #[pyo3(signature = (follow: "Follow", layers: "int", *, seconds: "float" = 1.0) -> "InPlace")]
    fn wait_for_layers(&self, follow: &Follow, layers: u32, seconds: f64) -> InPlace {
        let (follow, patience) = (follow.share()?, requests::seconds(seconds)?);
        then(self.session()?.wait_for_layers(&follow, layers, patience), InPlace::from)
    }

    /// Describes the tokens of chunks, for the events of a node that publishes tokens (`[kv_events] tokens`); other nodes drop
    /// the description. Never waits.
    ///
    /// Raises `ValueError` if the blocks of a chunk do not have equally many tokens, or a chunk has more of anything than a node
    /// takes.
    #[pyo3(signature = (namespace: "Namespace", chunks: "Sequence[DescribedChunk]") -> "None")]
    fn describe(&self, namespace: &Namespace, chunks: Vec<DescribedFields>) -> () {
        let (session, namespace) = (self.session()?, namespace.inner.clone());
        let chunks = chunks.into_iter().map(DescribedFields::resolve).collect::<PyResult<Vec<_>>>()?;
        Ok(async move {
            session.describe(&namespace, chunks);
            Ok::<_, SessionError>(Reply::from(()))
        })
    }

    /// Registers GPU memory for copies by the node. `memory` has, as `larder_kv.IpcMemory` or `larder_kv.DescriptorMemory`, the
    /// regions that `layers` name; the rest is as for `GpuPagedMemory`. These layers hold the block `block` of each chunk.
    ///
    /// Raises `RefusedError` if there is no GPU that the node could use, or this memory cannot be shared.
    #[pyo3(signature = (namespace: "Namespace", memory: "Sequence[IpcMemory | DescriptorMemory]", layers: "Sequence[LayerPages]", *,
        pages_per_chunk: "int", block: "int" = 0) -> "NodeTensors")]
    fn register_tensors(
        &self,
        namespace: &Namespace,
        memory: Vec<SharedMemory>,
        layers: Vec<Bound<'_, PyAny>>,
        pages_per_chunk: u32,
        block: usize,
    ) -> NodeTensors {
        let (session, namespace) = (self.session()?, &namespace.inner);
        check_block(namespace, block)?;
        let (layout, memory) = node_copies::resolve(memory, &layers, pages_per_chunk)?;
        then(session.register_tensors(namespace, block, &layout, memory), NodeTensors::new)
    }

    /// Has the node begin to copy leased blocks into `pages`: consecutive pages of the prompt, from number `first_page` on,
    /// counted from the lease's first chunk. `layers` are first and end, all layers if not given. The lease may be given back
    /// meanwhile. The engine's streams must have finished their work on these pages.
    ///
    /// Raises `BusyError` if too many copies are under way.
    #[pyo3(signature = (tensors: "NodeTensors", lease: "Lease", pages: "Sequence[int]", *, first_page: "int" = 0,
        layers: "tuple[int, int] | None" = None) -> "NodeCopy")]
    fn load_pages(
        &self,
        tensors: &NodeTensors,
        lease: &Lease,
        pages: Vec<u32>,
        first_page: u64,
        layers: Option<(u32, u32)>,
    ) -> NodeCopy {
        let (session, lease) = (self.session()?, lease.guard()?);
        let (load, tensors) = (tensors.load(pages, first_page, layers)?, tensors.get()?.clone());
        Ok(async move {
            // Verified on another thread, since verifying takes as long as reading. `load_pages` does not verify them again.
            let (verified, of_load, of_tensors) = (Arc::clone(&lease), load.clone(), tensors.clone());
            let verify = move || of_tensors.verify(&verified, &of_load);
            spawn_blocking(verify).await.unwrap_or(Ok(()))?;
            session.load_pages(&tensors, &lease, &load, CopyFlags::default()).await.map(|copy| Reply::from(NodeCopy::new(copy)))
        })
    }

    /// Has the node begin to copy `pages`, chunk by chunk, into the reserved chunks at `positions`. When all layers are done,
    /// `commit_handed_over` commits the chunks. If a copy does not end as "done", its chunks are given up.
    ///
    /// Raises `BusyError` if too many copies are under way.
    #[pyo3(signature = (tensors: "NodeTensors", reservation: "Reservation", positions: "Sequence[int]", pages: "Sequence[int]", *,
        layers: "tuple[int, int] | None" = None) -> "NodeCopy")]
    fn save_pages(
        &self,
        tensors: &NodeTensors,
        reservation: &Reservation,
        positions: Vec<u32>,
        pages: Vec<u32>,
        layers: Option<(u32, u32)>,
    ) -> NodeCopy {
        let (session, reservation) = (self.session()?, reservation.share()?);
        check_reserved(&reservation, &positions)?;
        let (save, tensors) = (tensors.save(positions, pages, layers)?, tensors.get()?);
        then(session.save_pages(tensors, &reservation, &save, CopyFlags::default()), NodeCopy::new)
    }

    /// Waits until `layers` layers of a copy are done, or it has ended, or `seconds` have passed, and says how far it is then.
    /// Layers that are done may be used while the others are under way. Waits for the end if `layers` is not given.
    #[pyo3(signature = (copy: "NodeCopy", layers: "int | None" = None, *, seconds: "float" = 10.0) -> "CopyProgress")]
    fn wait_for_copy(&self, copy: &NodeCopy, layers: Option<u32>, seconds: f64) -> CopyProgress {
        let (copy, patience) = (copy.share()?, requests::seconds(seconds)?);
        let layers = layers.unwrap_or(u32::MAX);
        then(self.session()?.wait_for_copy(&copy, layers, patience), CopyProgress::from)
    }

    /// Keeps the longest prefix of `chain` that is here from eviction, for `seconds`, or for as long as the node grants.
    #[pyo3(signature = (namespace: "Namespace", chain: "Chain", seconds: "float") -> "Pinned")]
    fn pin(&self, namespace: &Namespace, chain: &Chain, seconds: f64) -> Pinned {
        let duration = requests::seconds(seconds)?;
        let session = self.session()?;
        let call = session.pin(&namespace.inner, &chain.inner, duration);
        then_pinned(session, call, |pinned| pinned.pin, Pinned::from)
    }

    /// Ends a pin before its deadline.
    #[pyo3(signature = (pin: "int") -> "None")]
    fn unpin(&self, pin: u64) -> () {
        then(self.session()?.unpin(pin), identity)
    }
}
