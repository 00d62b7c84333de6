"""The worker half's copies: loads into the engine's blocks, saves out of them, each on a thread of its own."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import larder_kv
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.node import Node, Open
from larder_kv.vllm.plan import Load, Save, Shape, failed_pages, tail

logger = logging.getLogger("vllm.larder")


class LayerGate:
    """Lets readers of layers pass once the layers are there."""

    def __init__(self, layers: int) -> None:
        self._open = [False] * layers
        self._changed = threading.Condition()

    def open(self, layer: int) -> None:
        """The layer is there."""
        with self._changed:
            self._open[layer] = True
            self._changed.notify_all()

    def open_all(self) -> None:
        """All layers are there."""
        with self._changed:
            self._open = [True] * len(self._open)
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Waits for the layer."""
        with self._changed:
            self._changed.wait_for(lambda: self._open[layer])

    def wait_all(self) -> None:
        """Waits for all layers."""
        with self._changed:
            self._changed.wait_for(lambda: all(self._open))


@dataclass(frozen=True)
class Leased:
    """A load whose chunks are leased."""

    load: Load
    lease: larder_kv.Lease
    first_page: int
    pages: list[int]


class Loader:
    """Loads blocks: at once for asynchronous loads, layer by layer ahead of a step for the others."""

    def __init__(self, node: Node, memory: larder_kv.PagedMemory, shape: Shape, counts: Counts) -> None:
        self._node, self._memory, self._shape, self._counts = node, memory, shape, counts
        self._lock = threading.Lock()
        self._done: set[str] = set()
        self._failed: set[int] = set()
        # Bounded by the engine's own running and waiting requests: each has one load at most.
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="larder-load", daemon=True)
        self._thread.start()

    def load_soon(self, loads: Sequence[Load]) -> None:
        """Begins asynchronous loads; `take_done` tells when."""
        for load in loads:
            self._work.put(lambda load=load: self._load_one(load))  # type: ignore[misc]

    def load_now(self, loads: Sequence[Load]) -> LayerGate:
        """Leases what the coming step needs, and begins to copy it layer by layer."""
        leased = [one for one in (self._lease(load) for load in loads) if one is not None]
        gate = LayerGate(self._memory.layers)
        if not leased:
            gate.open_all()
            return gate
        self._work.put(lambda: self._load_layers(leased, gate))
        return gate

    def take_done(self) -> set[str]:
        """Requests whose asynchronous loads have ended, however they did, since the last call."""
        with self._lock:
            done, self._done = self._done, set()
        return done

    def has_failed(self) -> bool:
        """Whether blocks did not come, since `take_failed`."""
        with self._lock:
            return bool(self._failed)

    def take_failed(self) -> set[int]:
        """Blocks that did not come, since the last call."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Ends the thread when it has done what was asked."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _load_one(self, load: Load) -> None:
        leased = self._lease(load)
        if leased is not None:
            with self._failing([load]):
                self._memory.load(leased.lease, leased.pages, first_page=leased.first_page)
            leased.lease.release()
        with self._lock:
            self._done.add(load.request)

    def _load_layers(self, loads: Sequence[Leased], gate: LayerGate) -> None:
        with self._failing([one.load for one in loads]):
            for layer in range(self._memory.layers):
                for one in loads:
                    self._memory.load(one.lease, one.pages, first_page=one.first_page, layer=layer)
                gate.open(layer)
        gate.open_all()
        for one in loads:
            one.lease.release()

    @contextmanager
    def _failing(self, loads: Sequence[Load]) -> Iterator[None]:
        """Whatever goes wrong, the engine must hear of it, and not wait."""
        try:
            yield
        except Exception:
            logger.exception("a load failed")
            with self._lock:
                for load in loads:
                    self._failed.update(load.pages)

    def _lease(self, load: Load) -> Leased | None:
        """Leases a load's chunks; blocks that will not come are failed at once."""
        first_chunk, first_page = tail(load, self._shape)
        lease = lease_of(self._node, load.hashes, first_chunk)
        missing = failed_pages(load, self._shape, lease.chunks if lease else 0)
        with self._lock:
            self._failed.update(missing)
        come = load.pages[: len(load.pages) - len(missing)]
        self._counts.add("loads")
        self._counts.add("failed_blocks", len(missing))
        self._counts.add("loaded_blocks", len(come))
        self._counts.add("loaded_bytes", len(come) * self._memory.page_bytes * self._memory.layers)
        return Leased(load, lease, first_page, come) if lease and come else None


def lease_of(node: Node, hashes: list[bytes], first_chunk: int) -> larder_kv.Lease | None:
    """Leases the chunks from `first_chunk` on; None where that cannot be."""
    opened = node.current()
    if opened is None:
        return None
    try:
        return opened.session.lease(opened.namespace, opened.namespace.chain(hashes).part(first_chunk))
    except larder_kv.LarderError as error:
        if isinstance(error, larder_kv.EndedError):
            node.lost(opened)
        return None


@dataclass
class SaveJob:
    """A save that is waiting or under way."""

    save: Save
    gate: LayerGate
    """Which layers the step has computed."""
    cancelled: bool = False
    chunks: int = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = len(self.save.hashes) - self.save.first_chunk


class Saver:
    """Saves blocks behind the engine's back: a step never waits for it."""

    def __init__(
        self, node: Node, memory: larder_kv.PagedMemory, shape: Shape, counts: Counts, queue_chunks: int
    ) -> None:
        self._node, self._memory, self._shape, self._counts = node, memory, shape, counts
        self._queue_chunks = queue_chunks
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._jobs: list[SaveJob] = []
        # Requests of which a chunk was not saved: what follows it could not be found.
        self._holed: set[str] = set()
        self._work: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="larder-save", daemon=True)
        self._thread.start()

    def save_soon(self, saves: Sequence[Save], gate: LayerGate) -> None:
        """Takes saves of a step, or sheds them. Layers are read once `gate` lets them pass."""
        for save in saves:
            job = SaveJob(save, gate)
            with self._lock:
                waiting = sum(other.chunks for other in self._jobs)
                if save.request in self._holed:
                    self._counts.add("shed_chunks_gone", job.chunks)
                elif waiting > 0 and waiting + job.chunks > self._queue_chunks:
                    self._holed.add(save.request)
                    self._counts.add("shed_chunks_queue", job.chunks)
                else:
                    self._jobs.append(job)
                    self._work.put(job)

    def cancel(self, request: str) -> None:
        """Stops reading a request's blocks: they are about to be overwritten."""
        with self._lock:
            self._holed.discard(request)
            for job in self._jobs:
                job.cancelled |= job.save.request == request
        # A copy that had begun has ended when the lock is free.
        with self._copying:
            pass

    def is_reading(self, request: str) -> bool:
        """Whether blocks of the request are still to be read."""
        with self._lock:
            return any(job.save.request == request for job in self._jobs)

    def forget(self, request: str) -> None:
        """The request has gone."""
        with self._lock:
            self._holed.discard(request)

    def close(self, seconds: float) -> None:
        """Ends the thread when it has done what was asked, or at least lets it go after `seconds`."""
        self._work.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            reason = self._save(job)
            if reason is not None:
                self._counts.add(reason, job.chunks)
            with self._lock:
                self._jobs.remove(job)
                if reason is not None and not job.cancelled:
                    self._holed.add(job.save.request)

    def _save(self, job: SaveJob) -> str | None:
        """Saves, or says under which name it is counted that it did not."""
        node = self._node.current()
        if node is None:
            return "shed_chunks_node"
        if job.cancelled or job.save.request in self._holed:
            return "shed_chunks_gone"
        try:
            done = self._write(node, job)
        except larder_kv.BusyError:
            return "shed_chunks_room"
        except larder_kv.LarderError as error:
            if isinstance(error, larder_kv.EndedError):
                self._node.lost(node)
            return "shed_chunks_node"
        except Exception:
            logger.exception("a save failed")
            return "shed_chunks_node"
        if not done:
            return "shed_chunks_gone"
        self._counts.add("saved_chunks", job.chunks)
        return None

    def _write(self, node: Open, job: SaveJob) -> bool:
        """Writes what the node does not have, as many chunks at a time as its window holds twice; False where cancelled."""
        save, session = job.save, node.session
        chain = node.namespace.chain(save.hashes).part(save.first_chunk)
        reservation = session.reserve(node.namespace, chain)
        at_once = max(session.window_bytes // (2 * self._memory.block_bytes), 1)
        positions = reservation.chunks
        for start in range(0, len(positions), at_once):
            part = positions[start : start + at_once]
            staged = [session.stage(reservation, position) for position in part]
            for layer in range(self._memory.layers):
                job.gate.wait(layer)
                for chunk in staged:
                    if not self._copy(job, chunk, layer):
                        return False
            session.commit(reservation, staged)
            self._counts.add("saved_bytes", len(part) * self._memory.block_bytes)
        return True

    def _copy(self, job: SaveJob, staged: larder_kv.StagedChunk, layer: int) -> bool:
        pages = self._shape.pages_per_chunk
        start = staged.position * pages
        with self._copying:
            if not job.cancelled:
                self._memory.save(staged, job.save.pages[start : start + pages], layer=layer)
            return not job.cancelled
