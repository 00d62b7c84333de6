"""The worker half's loads into the engine's blocks, on threads of their own."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import larder_kv
from larder_kv.link import LOST
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.groups import Run
from larder_kv.vllm.handoff import follow_chunks
from larder_kv.vllm.memory import Mark, Memory, done
from larder_kv.vllm.node import Node, Open
from larder_kv.vllm.plan import Load, Shape, failed_pages, tail
from larder_kv.vllm.settings import Settings

logger = logging.getLogger("vllm.larder")


class LayerGate:
    """Lets readers of layers pass once the layers are there."""

    def __init__(self, layers: int) -> None:
        self._marks: list[Mark | None] = [None] * layers
        self._changed = threading.Condition()

    def open(self, layer: int, mark: Mark = done) -> None:
        """Marks the layer as there once `mark` is reached."""
        with self._changed:
            self._marks[layer] = mark
            self._changed.notify_all()

    def open_all(self, mark: Mark = done) -> None:
        """Marks all other layers as there once `mark` is reached."""
        with self._changed:
            self._marks = [own or mark for own in self._marks]
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Waits for the layer."""
        with self._changed:
            self._changed.wait_for(lambda: self._marks[layer])
            mark = self._marks[layer]
        if mark is not None:
            mark()

    def wait_all(self) -> None:
        """Waits for all layers."""
        for layer in range(len(self._marks)):
            self.wait(layer)


@dataclass(frozen=True)
class Leased:
    """A load whose chunks are leased."""

    load: Load
    lease: larder_kv.Lease
    runs: list[Run]
    """Its blocks that come, by group."""


@dataclass
class Followed:
    """A load whose chunks are being written."""

    load: Load
    node: Open
    follow: larder_kv.Follow
    first_page: int
    pages: list[int]
    """The load's blocks of the first group, except the failed ones."""

    @property
    def runs(self) -> list[Run]:
        """Its blocks that come, by group."""
        return [Run(self.first_page, self.pages), *self.load.others]


class Loader:
    """Loads blocks: at once for asynchronous loads, layer by layer ahead of a step for the others."""

    def __init__(self, node: Node, memory: Memory, shape: Shape, counts: Counts, settings: Settings) -> None:
        self._node, self._memory, self._shape, self._counts = node, memory, shape, counts
        self._patience = settings.handoff_seconds
        # A load from another engine's prefill is as slow as the prefill, so it has its own thread.
        self._handoffs = ThreadPoolExecutor(settings.handoffs, thread_name_prefix="larder-handoff")
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._under_way = 0
        self._done: set[str] = set()
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        # Bounded by the engine's own running and waiting requests: each has at most one load.
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="larder-load", daemon=True)
        self._thread.start()

    def load_soon(self, loads: Sequence[Load], free: Mark = done) -> None:
        """Begins asynchronous loads into blocks that are free once `free` is reached; `take_done` returns the ended loads."""
        with self._lock:
            self._under_way += len(loads)
        for load in loads:
            if load.writer is not None:
                self._handoffs.submit(self._follow_one, load, free)
                continue
            self._work.put(partial(self._load_one, load, free))

    def load_now(self, loads: Sequence[Load], free: Mark = done) -> LayerGate:
        """Leases the chunks that the coming step needs, and begins to copy them layer by layer once `free` is reached."""
        ready: list[Leased | Followed] = []
        for load in loads:
            with self._failing([load]):
                begun = self._follow(load) if load.writer is not None else self._lease(load)
                ready += [begun] if begun is not None else []
        gate = LayerGate(self._memory.layers)
        if not ready:
            gate.open_all()
            return gate
        self._work.put(partial(self._load_layers, ready, gate, free))
        return gate

    def wait_for_one(self, seconds: float) -> None:
        """Waits until an asynchronous load has ended, if one is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self._under_way, seconds)

    def take_done(self) -> set[str]:
        """Requests whose asynchronous loads have ended since the last call, whatever their result."""
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

    def take_failed_requests(self, done: set[str]) -> set[str]:
        """The requests of `done` (with ended loads) that must be computed as a whole."""
        with self._lock:
            failed = self._failed_requests & done
            self._failed_requests -= failed
        return failed

    def close(self) -> None:
        """Ends the thread after its last task."""
        self._work.put(None)
        self._handoffs.shutdown(cancel_futures=True)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _follow_one(self, load: Load, free: Mark) -> None:
        with self._failing([load]):
            followed = self._follow(load)
            if followed is not None:
                with self._failing([load]):
                    free()
                    for layer in range(self._memory.depth):
                        self._load_followed(followed, layer)
                followed.follow.release()
        self._ended(load)

    def _ended(self, load: Load) -> None:
        """Notes that an asynchronous load has ended, whatever its result."""
        with self._changed:
            self._done.add(load.request)
            self._under_way -= 1
            self._changed.notify_all()

    def _follow(self, load: Load) -> Followed | None:
        """Follows a load's chunks; if that is not possible, all its blocks fail at once."""
        self._counts.add("loads")
        first_chunk, first_page = tail(load, self._shape)
        node = self._node.current()
        try:
            if node is not None and load.writer is not None:
                follow = follow_chunks(node, load.hashes, first_chunk, load.writer, self._patience)
                return Followed(load, node, follow, first_page, load.pages)
        except larder_kv.LarderError as error:
            if isinstance(error, LOST) and node is not None:
                self._node.lost(node)
        self._fail(load, load.pages)
        return None

    def _load_followed(self, one: Followed, layer: int) -> None:
        """Copies a layer when it has come; blocks without the layer fail."""
        if not one.pages:
            # A writer that was given up on is not waited for again.
            return
        chunks = len(one.load.hashes) - one.load.first_page // self._shape.pages_per_chunk
        come = one.node.session.wait_for_layers(one.follow, layer + 1, seconds=self._patience)
        here = min(come.chunks, chunks) if come.layers > layer else 0
        left = len(one.load.pages) - len(failed_pages(one.load, self._shape, here))
        if left < len(one.pages):
            logger.info(
                "request %s computes the rest of its prompt: its prefill handed over %d of %d chunks in time",
                one.load.request,
                here,
                chunks,
            )
        self._fail(one.load, one.pages[left:])
        one.pages = one.pages[:left]
        lease = one.follow.lease
        if one.pages and lease is not None:
            try:
                self._memory.load_layer(lease, one.runs, layer)
            except larder_kv.DamagedError as error:
                right = 0 if one.load.others else error.position
                left = len(one.load.pages) - len(failed_pages(one.load, self._shape, right))
                self._damaged(one.load, error, one.pages[left:])
                one.pages = one.pages[:left]
            lease.release()
            self._counts.add("loaded_bytes", self._memory.layer_bytes_of(one.runs, layer) if one.pages else 0)
            if layer + 1 == self._memory.depth:
                self._counts.add("loaded_blocks", sum(len(run.blocks) for run in one.runs) if one.pages else 0)

    def _damaged(self, load: Load, error: larder_kv.DamagedError, pages: Sequence[int]) -> None:
        """Notes that a chunk is damaged: these blocks fail."""
        logger.warning("blocks of request %s are computed again: %s", load.request, error)
        self._counts.add("damaged_chunks")
        self._fail(load, pages)

    def _fail(self, load: Load, pages: Sequence[int]) -> None:
        """Notes blocks that did not come. A hybrid model's request is then computed as a whole: no shorter prefix is known at
        which every group can be restored."""
        if load.others and pages:
            with self._lock:
                is_new = load.request not in self._failed_requests
                self._failed_requests.add(load.request)
            self._counts.add("failed_blocks", load.blocks if is_new else 0)
            return
        with self._lock:
            new = set(pages) - self._failed
            self._failed |= new
        self._counts.add("failed_blocks", len(new))

    def _load_one(self, load: Load, free: Mark) -> None:
        with self._failing([load]):
            leased = self._lease(load)
            if leased is not None:
                with self._failing([load]):
                    free()
                    try:
                        self._memory.load(leased.lease, leased.runs)
                    except larder_kv.DamagedError as error:
                        come = error.position if self._memory.loads_in_order else 0
                        self._damaged(load, error, failed_pages(load, self._shape, come))
                leased.lease.release()
        self._ended(load)

    def _load_layers(self, loads: Sequence[Leased | Followed], gate: LayerGate, free: Mark) -> None:
        with self._failing([one.load for one in loads]):
            free()
            left = list(loads)
            for layer in range(self._memory.layers):
                for one in list(left):
                    if isinstance(one, Followed):
                        self._load_followed(one, layer)
                        continue
                    (run,) = one.runs
                    try:
                        self._memory.first.load(one.lease, run.blocks, first_page=run.first, layer=layer)
                    except larder_kv.DamagedError as error:
                        self._damaged(one.load, error, one.load.pages)
                        left.remove(one)
                gate.open(layer)
        gate.open_all()
        for one in loads:
            (one.follow if isinstance(one, Followed) else one.lease).release()

    @contextmanager
    def _failing(self, loads: Sequence[Load]) -> Iterator[None]:
        """Turns any failure, panics of native code included, into failed blocks: the engine must not wait for them."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, larder_kv.LarderError):
                # Expected: the node went away, or an engine computes a prompt too slowly.
                logger.warning("blocks are computed here, since they did not come: %s", error)
            else:
                logger.exception("a load failed")
            for load in loads:
                self._fail(load, load.pages)
            if isinstance(error, KeyboardInterrupt):
                raise

    def _lease(self, load: Load) -> Leased | None:
        """Leases a load's chunks; blocks that will not come fail at once."""
        first_chunk, first_page = tail(load, self._shape)
        lease = lease_of(self._node, load.hashes, first_chunk)
        missing = failed_pages(load, self._shape, lease.chunks if lease else 0)
        self._fail(load, missing)
        self._counts.add("loads")
        come = load.pages[: len(load.pages) - len(missing)]
        if lease is None or not come or (missing and load.others):
            return None
        runs = [Run(first_page, come), *load.others]
        self._counts.add("loaded_blocks", sum(len(run.blocks) for run in runs))
        self._counts.add("loaded_bytes", self._memory.bytes_of(runs))
        return Leased(load, lease, runs)


def lease_of(node: Node, hashes: list[bytes], first_chunk: int) -> larder_kv.Lease | None:
    """Leases the chunks from `first_chunk` on; None if that is not possible."""
    opened = node.current()
    if opened is None:
        return None
    try:
        return opened.session.lease(opened.namespace, opened.namespace.chain(hashes).part(first_chunk))
    except larder_kv.LarderError as error:
        if isinstance(error, LOST):
            node.lost(opened)
        return None
