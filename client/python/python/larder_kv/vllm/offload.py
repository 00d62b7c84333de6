"""Chunks of vLLM's offloading in the node: lookups, stores and loads of single keys, on threads."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import larder_kv
from larder_kv.keyed import LOOKUP_KEYS, UNBOUNDED_BYTES
from larder_kv.link import LOST, MOST_REASONS, is_too_large
from larder_kv.patience import Patience
from larder_kv.vllm.node import Node, Open

logger = logging.getLogger("vllm.larder")

MOST_KNOWN = 65_536
"""Keys whose presence is remembered for a moment."""

Tier: TypeAlias = Literal["device", "host", "disk", "peer", "object"]

AT_ONCE = 64
"""The most chunks of one request to the node."""


@dataclass(frozen=True)
class Finished:
    """A finished job."""

    job: int
    keys: list[bytes]
    """The keys of the job that were done."""
    success: bool
    """Whether all keys were done."""
    seconds: float
    bytes: int


class Offload:
    """Moves rows of host memory to and from the node. No call but `drain` and `close` waits."""

    def __init__(self, node: Node, rows: memoryview, row_bytes: int, threads: int, tiers: Sequence[Tier] = ()) -> None:
        """`tiers` are the tiers of lookups; empty: all."""
        self._node, self._rows, self._row_bytes, self._tiers = node, rows.cast("B"), row_bytes, tiers
        self._lock = threading.Lock()
        # The known presence of keys at `_known_by`: None while the node is asked.
        self._known: dict[bytes, bool | None] = {}
        self._known_by: Open | None = None
        self._asked: list[bytes] = []
        # Keys that were to be forgotten while the node was asked: its answer is not kept.
        self._forgotten: set[bytes] = set()
        self._finished: list[Finished] = []
        self._refusals: set[str] = set()
        self._jobs: set[Future[None]] = set()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="larder-offload")

    def lookup(self, key: bytes) -> bool | None:
        """Whether the node can serve a key; None while this is not known: `flush` asks the node."""
        node = self._node.current()
        with self._lock:
            if node is not self._known_by:
                # Another node, or the same one after a restart, has other keys.
                self._known_by = node
                self._forget(list(self._known))
            if key not in self._known:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[key] = None
                self._asked.append(key)
            return self._known[key]

    def flush(self) -> None:
        """Asks the node for all keys that were looked up since the last call."""
        with self._lock:
            # A key comes twice if it was forgotten meanwhile. The node refuses such a lookup.
            asked, self._asked = list(dict.fromkeys(self._asked)), []
        if asked:
            self._submit(lambda: self._ask_all(asked))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forgets whether these keys are there: they are asked for anew."""
        with self._lock:
            self._forget(keys)

    def store(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Stores rows under their keys."""
        self._submit(lambda: self._carry_out(job, keys, rows, self._store))

    def load(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Loads keys into their rows."""
        self._submit(lambda: self._carry_out(job, keys, rows, self._load))

    def finished(self) -> list[Finished]:
        """Jobs that have ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def has_jobs(self) -> bool:
        """Whether a job is under way, or has ended and was not reported."""
        with self._lock:
            return bool(self._jobs or self._finished)

    def drain(self) -> None:
        """Waits until no job is under way: then nobody reads or writes rows."""
        while True:
            with self._lock:
                jobs = list(self._jobs)
            if not jobs:
                return
            for job in jobs:
                job.exception()

    def close(self) -> None:
        """Ends the threads after their last tasks."""
        self._pool.shutdown()
        self._rows.release()

    def _submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            future = self._pool.submit(work)
            self._jobs.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: "Future[None]") -> None:
        with self._lock:
            self._jobs.discard(future)

    def _ask_all(self, keys: list[bytes]) -> None:
        for start in range(0, len(keys), LOOKUP_KEYS):
            self._ask(keys[start : start + LOOKUP_KEYS])

    def _ask(self, keys: list[bytes]) -> None:
        found: set[int] = set()
        node = self._node.current()
        if node is not None:
            try:
                spans = node.session.lookup(node.namespace, chain(node, keys), tiers=self._tiers).spans
                found = {at for span in spans for at in range(span.start, span.end)}
            except larder_kv.LarderError as error:
                self._heard(node, error)
            # Catches everything: otherwise the engine would ask for these keys for ever.
            except BaseException:
                logger.exception("a lookup failed")
        with self._lock:
            self._known.update({key: at in found for at, key in enumerate(keys)})
            for key in self._forgotten.intersection(keys):
                self._forgotten.discard(key)
                del self._known[key]

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._known.get(key, True) is None:
                self._forgotten.add(key)
            else:
                self._known.pop(key, None)

    def _carry_out(
        self,
        job: int,
        keys: Sequence[bytes],
        rows: Sequence[int],
        move: Callable[[Open, Sequence[bytes], Sequence[int]], list[bytes]],
    ) -> None:
        """Reports the job's end to the engine after any failure."""
        started, done = time.monotonic(), []
        try:
            start, at_once = 0, AT_ONCE
            while start < len(keys):
                node = self._node.current()
                if node is None:
                    break
                end = min(start + at_once, len(keys))
                try:
                    done += move(node, keys[start:end], rows[start:end])
                except larder_kv.LarderError as error:
                    if is_too_large(error) and end - start > 1:
                        at_once = (end - start) // 2
                        continue
                    self._heard(node, error)
                start = end
        except BaseException:
            logger.exception("an offloading job failed")
        ended = Finished(
            job, done, len(done) == len(keys), time.monotonic() - started, len(done) * self._row_bytes
        )
        with self._lock:
            # The node may evict a stored key at any time, and a key that was not done may be gone.
            self._forget(keys)
            self._finished.append(ended)

    def _store(self, node: Open, keys: Sequence[bytes], rows: Sequence[int]) -> list[bytes]:
        patience = Patience()
        reservation = patience.ask(partial(node.session.reserve, node.namespace, chain(node, keys)))
        # A window that is full of chunks that wait for their commit would wait for itself.
        at_once = max((node.session.window_bytes or UNBOUNDED_BYTES) // (2 * self._row_bytes), 1)
        positions = reservation.chunks
        unkept: set[int] = set()
        for start in range(0, len(positions), at_once):
            staged = node.session.stage_chunks(reservation, positions[start : start + at_once])
            larder_kv.StagedChunk.copy_all(staged, [self._row(rows[chunk.position]) for chunk in staged])
            if patience.ask(partial(node.session.commit, reservation, staged)) < len(staged):
                # They were purged meanwhile.
                unkept.update(chunk.position for chunk in staged)
        return [key for position, key in enumerate(keys) if position not in unkept]

    def _load(self, node: Open, keys: Sequence[bytes], rows: Sequence[int]) -> list[bytes]:
        """Loads keys. A lease ends at the first missing key; the keys after it get another lease."""
        loaded: list[bytes] = []
        start = 0
        while start < len(keys):
            with node.session.lease(node.namespace, chain(node, keys[start:])) as lease:
                come, at = lease.chunks, 0
                while at < come:
                    end = come
                    try:
                        lease.copy_blocks([self._row(row) for row in rows[start + at : start + come]], first=at)
                    except larder_kv.DamagedError as error:
                        # The other chunks are of use without this one.
                        logger.warning("a chunk was not loaded: %s", error)
                        end = error.position
                    loaded += keys[start + at : start + end]
                    at = end + 1
            start += come + 1
        return loaded

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self._row_bytes : (row + 1) * self._row_bytes]

    def _heard(self, node: Open, error: larder_kv.LarderError) -> None:
        if isinstance(error, LOST):
            self._node.lost(node)
        elif isinstance(error, larder_kv.RefusedError):
            with self._lock:
                is_new = str(error) not in self._refusals and len(self._refusals) < MOST_REASONS
                self._refusals.update([str(error)] if is_new else [])
            if is_new:
                logger.warning("chunks are not stored or loaded: %s", error)


def chain(node: Open, keys: Sequence[bytes]) -> larder_kv.Chain:
    """The node's chain for keys of any length."""
    return node.namespace.chain([hashlib.sha256(key).digest() for key in keys])
