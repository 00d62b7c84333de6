//! A session for threads.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::answers::{Found, Pinned, Progress, Stats};
use crate::handoff::{Follow, InPlace, StagedLayers};
use crate::lease::Lease;
use crate::namespace::{Chain, Namespace, SpecFields};
use crate::node_copies::{CopyProgress, NodeCopy, NodeTensors, SharedMemory};
use crate::requests::{Asking, Following, Opening, Patience, Requests, Reserving};
use crate::reservation::{Reservation, StagedChunk};
use crate::ticket::Ticket;
use crate::waiting;

/// A session with the node on this host: `Session(path)`, where `path` is the tenant's socket. Threads share it; each of its
/// methods waits without the interpreter's lock, and requests of several threads are under way at the same time.
///
/// `client` says who asks, for the node's log; `device` is the number of the GPU actor (the one with the fewest sessions where
/// not given); `window_bytes` is the write window wanted, 0 for a session that never writes; `timeout` is in seconds, for
/// each request. `verify` says which blocks are verified when they are read: "off", "sample" (one in 64, chosen by `verify_seed`,
/// at random where that is not given) or "always"; one that is wrong raises `DamagedError`, and the node is told.
///
/// The session ends when it and its last lease, ticket and reservation are gone. It belongs to the process that opened it:
/// after a fork, the child gets `ForkedError`.
///
/// Raises `ConnectError` where nobody listens there, `BusyError` and `RefusedError` where the node wants no session now.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Session {
    requests: Requests,
}

#[pymethods]
impl Session {
    #[new]
    #[pyo3(signature = (path, *, client = None, device = None, window_bytes = 64 << 20, timeout = 10.0, verify = String::from("sample"), verify_seed = None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        client: Option<String>,
        device: Option<u16>,
        window_bytes: u64,
        timeout: f64,
        verify: String,
        verify_seed: Option<u64>,
    ) -> PyResult<Self> {
        let (runtime, session) =
            Opening { path, client, device, window_bytes, timeout, verify, verify_seed }.start()?;
        let session = waiting::wait(py, &runtime, session)?;
        Ok(Self { requests: Requests::new(session, runtime) })
    }

    /// Makes a namespace known: `spec` is a `NamespaceSpec`, `slices` are those that this session reads and writes (slice 0 where
    /// not given).
    ///
    /// Raises `ValueError` where the namespace is impossible, `RefusedError` where the node says so.
    #[pyo3(signature = (spec, *, slices = None))]
    fn register(&self, py: Python<'_>, spec: SpecFields, slices: Option<Vec<u16>>) -> PyResult<Namespace> {
        let request = self.requests.register(spec, slices.unwrap_or_else(|| vec![0]))?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Asks how much of a prompt is in the cache. Nothing found is a result with 0 tokens.
    ///
    /// `prompt_tokens`: tokens of the whole prompt; the answer leaves at least one of them to compute. `skip_read`: the caller
    /// cannot use a hit, count it apart. `preempted`: the request had been preempted. `tiers`: where to look ("host", "disk",
    /// "peer", "object"; everywhere where empty). `pin_seconds`: pin what is found for so long. `prefill_tokens_per_second`: how fast
    /// the engine computes; the node counts the seconds of prefill that a hit saves.
    #[pyo3(signature = (namespace, chain, *, prompt_tokens = None, skip_read = false, preempted = false, tiers = vec![], pin_seconds = None, prefill_tokens_per_second = None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn lookup(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        chain: &Chain,
        prompt_tokens: Option<u64>,
        skip_read: bool,
        preempted: bool,
        tiers: Vec<String>,
        pin_seconds: Option<f64>,
        prefill_tokens_per_second: Option<f64>,
    ) -> PyResult<Found> {
        let request = self.requests.lookup(
            namespace,
            chain,
            Asking { prompt_tokens, skip_read, preempted, tiers, pin_seconds, prefill_tokens_per_second },
        )?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Asks how much of a prompt can be served, and has the node bring it into its memory meanwhile, from disk and other nodes.
    /// The options are those of `lookup`. Where `prefill_tokens_per_second` says how fast the engine computes, only what comes
    /// sooner is brought.
    #[pyo3(signature = (namespace, chain, *, prompt_tokens = None, skip_read = false, preempted = false, tiers = vec![], pin_seconds = None, prefill_tokens_per_second = None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn lookup_and_prefetch(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        chain: &Chain,
        prompt_tokens: Option<u64>,
        skip_read: bool,
        preempted: bool,
        tiers: Vec<String>,
        pin_seconds: Option<f64>,
        prefill_tokens_per_second: Option<f64>,
    ) -> PyResult<Ticket> {
        let request = self.requests.prefetch(
            namespace,
            chain,
            Asking { prompt_tokens, skip_read, preempted, tiers, pin_seconds, prefill_tokens_per_second },
        )?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Asks how far a prefetch is.
    #[pyo3(signature = (ticket))]
    fn progress(&self, py: Python<'_>, ticket: &Ticket) -> PyResult<Progress> {
        let request = self.requests.progress(ticket)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Ends a prefetch and leases the contiguous prefix that has come. `wait` is "complete" (until all has come or failed to),
    /// "best_effort" (what is there now) or a number of seconds.
    #[pyo3(signature = (ticket, *, wait = Patience::Word(String::from("complete"))))]
    fn collect(&self, py: Python<'_>, ticket: &Ticket, wait: Patience) -> PyResult<Lease> {
        let request = self.requests.collect(ticket, wait)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Asks to read the longest prefix of `chain` that is here or can be brought in time. A miss is a lease of 0 chunks.
    ///
    /// Raises `BusyError` where the session reads too much already.
    #[pyo3(signature = (namespace, chain))]
    fn lease(&self, py: Python<'_>, namespace: &Namespace, chain: &Chain) -> PyResult<Lease> {
        let request = self.requests.lease(namespace, chain)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Asks for room for those chunks of `chain` that are missing. `priority` is 0 for ordinary traffic; higher stays longer
    /// under the `priority` policy. Where `attempt` is not 0, the reservations of
    /// earlier attempts for these chunks end. `pools` says for each chunk by their numbers which pools will be written, all
    /// where not given: pools that every chunk has are written whether named or not, others may be added later.
    ///
    /// Raises `BusyError` where there is no room.
    #[pyo3(signature = (namespace, chain, *, priority = 0, attempt = 0, pools = None))]
    fn reserve(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        chain: &Chain,
        priority: i8,
        attempt: u64,
        pools: Option<Vec<Vec<usize>>>,
    ) -> PyResult<Reservation> {
        let request = self.requests.reserve(namespace, chain, Reserving { priority, attempt, pools })?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Gives the reserved chunk at `position` (in the chain) room to be filled; waits until the write window has some.
    ///
    /// Raises `WindowError` where a chunk is larger than the window, `RequestTimeout` where no room was freed in time.
    #[pyo3(signature = (reservation, position))]
    fn stage(&self, py: Python<'_>, reservation: &Reservation, position: u32) -> PyResult<StagedChunk> {
        let request = self.requests.stage(reservation, position)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Hands filled chunks of one reservation over, and returns how many the node keeps.
    #[pyo3(signature = (reservation, staged))]
    fn commit(
        &self,
        py: Python<'_>,
        reservation: &Reservation,
        staged: Vec<PyRef<'_, StagedChunk>>,
    ) -> PyResult<u32> {
        let request = self.requests.commit(reservation, &staged)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Gives layers `start` to before `end` of one pool of reserved chunks room to be filled; `positions` are those of the chunks
    /// in the chain, ascending. Waits until the write window has some.
    ///
    /// Raises `WindowError` where they are more than the window holds, `RequestTimeout` where no room was freed in time.
    #[pyo3(signature = (reservation, positions, start, end, *, pool = 0))]
    fn stage_layers(
        &self,
        py: Python<'_>,
        reservation: &Reservation,
        positions: Vec<u32>,
        start: u32,
        end: u32,
        pool: usize,
    ) -> PyResult<StagedLayers> {
        let request = self.requests.stage_layers(reservation, positions, start..end, pool)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Hands filled layers over: whoever follows the chunks may read them. The chunks are committed, with `commit_handed_over`,
    /// when all their layers were.
    ///
    /// Raises `RefusedError` where the reservation has ended, by its deadline or a later attempt.
    #[pyo3(signature = (staged))]
    fn hand_over(&self, py: Python<'_>, staged: &StagedLayers) -> PyResult<()> {
        let request = self.requests.hand_over(staged)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Commits chunks of which all layers were handed over, and returns how many the node keeps.
    ///
    /// Raises `RefusedError` where layers are missing.
    #[pyo3(signature = (reservation, positions))]
    fn commit_handed_over(
        &self,
        py: Python<'_>,
        reservation: &Reservation,
        positions: Vec<u32>,
    ) -> PyResult<u32> {
        let request = self.requests.commit_handed_over(reservation, positions)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Follows chunks that are being written, or soon will be: on this node, or by an engine that talks to the actor `device` of
    /// the node `node`, whose layers come as it hands them over. Room for them is taken at once, for all or for none. What is of an
    /// earlier attempt than `attempt` does not count; what does not come for `patience` seconds is lost.
    ///
    /// Raises `BusyError` where there is no room.
    #[pyo3(signature = (namespace, chain, *, node = None, device = 0, attempt = 0, patience = 10.0))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn follow(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        chain: &Chain,
        node: Option<String>,
        device: u16,
        attempt: u64,
        patience: f64,
    ) -> PyResult<Follow> {
        let following = Following { node, device, attempt, patience };
        let request = self.requests.follow(namespace, chain, following)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Waits until so many layers of what is followed are in place, or nothing more will come, or for `seconds`; what is in place
    /// then.
    #[pyo3(signature = (follow, layers, *, seconds = 1.0))]
    fn wait_for_layers(
        &self,
        py: Python<'_>,
        follow: &Follow,
        layers: u32,
        seconds: f64,
    ) -> PyResult<InPlace> {
        let request = self.requests.wait_for_layers(follow, layers, seconds)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Makes GPU memory known that the node is to copy to and from: `memory` has, as `larder_kv.IpcMemory` or
    /// `larder_kv.DescriptorMemory`, the regions that `layers` name; the rest is as for `GpuPagedMemory`. `block` is the block of each
    /// chunk that these layers are.
    ///
    /// Raises `RefusedError` where there is no GPU that the node could use, or this memory cannot be shared.
    #[pyo3(signature = (namespace, memory, layers, *, pages_per_chunk, block = 0))]
    fn register_tensors(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        memory: Vec<SharedMemory>,
        layers: Vec<Bound<'_, PyAny>>,
        pages_per_chunk: u32,
        block: usize,
    ) -> PyResult<NodeTensors> {
        let request = self.requests.register_tensors(namespace, memory, &layers, pages_per_chunk, block)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Has the node begin to copy what is leased into `pages`: consecutive pages of the prompt, of which the first is number
    /// `first_page`, counted from the lease's first chunk. `layers` are first and end, all where not given. The lease may be given
    /// back meanwhile. What the engine's streams do to these pages must be done.
    ///
    /// Raises `BusyError` where too many copies are under way.
    #[pyo3(signature = (tensors, lease, pages, *, first_page = 0, layers = None))]
    fn load_pages(
        &self,
        py: Python<'_>,
        tensors: &NodeTensors,
        lease: &Lease,
        pages: Vec<u32>,
        first_page: u64,
        layers: Option<(u32, u32)>,
    ) -> PyResult<NodeCopy> {
        let request = self.requests.load_pages(tensors, lease, pages, first_page, layers)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Has the node begin to copy `pages`, chunk by chunk, into the reserved chunks at `positions`. When all layers are done,
    /// `commit_handed_over` commits them; where a copy does not end as "done" they are given up.
    ///
    /// Raises `BusyError` where too many copies are under way.
    #[pyo3(signature = (tensors, reservation, positions, pages, *, layers = None))]
    fn save_pages(
        &self,
        py: Python<'_>,
        tensors: &NodeTensors,
        reservation: &Reservation,
        positions: Vec<u32>,
        pages: Vec<u32>,
        layers: Option<(u32, u32)>,
    ) -> PyResult<NodeCopy> {
        let request = self.requests.save_pages(tensors, reservation, positions, pages, layers)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Waits until so many layers of a copy are done, or it has ended, or `seconds` have passed, and says how far it is then.
    /// Layers that are done may be used while the others are under way. Waits for the end where `layers` is not given.
    #[pyo3(signature = (copy, layers = None, *, seconds = 10.0))]
    fn wait_for_copy(
        &self,
        py: Python<'_>,
        copy: &NodeCopy,
        layers: Option<u32>,
        seconds: f64,
    ) -> PyResult<CopyProgress> {
        let request = self.requests.wait_for_copy(copy, layers, seconds)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Keeps the longest prefix of `chain` that is here from eviction, for `seconds` or what the node grants.
    #[pyo3(signature = (namespace, chain, seconds))]
    fn pin(&self, py: Python<'_>, namespace: &Namespace, chain: &Chain, seconds: f64) -> PyResult<Pinned> {
        let request = self.requests.pin(namespace, chain, seconds)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// Ends a pin before its deadline.
    #[pyo3(signature = (pin))]
    fn unpin(&self, py: Python<'_>, pin: u64) -> PyResult<()> {
        let request = self.requests.unpin(pin)?;
        waiting::wait(py, self.requests.runtime(), request)
    }

    /// The tenant that the socket serves.
    #[getter]
    fn tenant(&self) -> PyResult<&str> {
        Ok(self.requests.session()?.tenant())
    }

    /// The node's name.
    #[getter]
    fn node(&self) -> PyResult<&str> {
        Ok(self.requests.session()?.node())
    }

    /// Number of the GPU actor that serves the session.
    #[getter]
    fn device(&self) -> PyResult<u16> {
        Ok(self.requests.session()?.device())
    }

    /// Bytes of the session's write window; 0 where it has none.
    #[getter]
    fn window_bytes(&self) -> PyResult<u64> {
        Ok(self.requests.session()?.window_bytes())
    }

    /// Bytes that the session has copied so far.
    fn stats(&self) -> PyResult<Stats> {
        Ok(self.requests.session()?.counters().into())
    }

    fn __repr__(&self) -> String {
        match self.requests.session() {
            Ok(session) => format!("<larder_kv.Session with {}>", session.node()),
            Err(_) => "<larder_kv.Session of another process>".into(),
        }
    }
}
