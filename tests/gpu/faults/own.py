"""Copies in an engine's own process, beside its computation."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import larder_kv
from lane import COPY_SECONDS, CopyFailed, chain_of, patiently
from memory import Memory, torch

WINDOW_BYTES = 64 << 20
MATRIX, MATRIX_AT_ONCE = 8192, 20


class Computation:
    """Large matrix products, in groups whose time the GPU measures."""

    def __init__(self) -> None:
        self._left, self._right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._left)
        self.milliseconds(5)

    def milliseconds(self, groups: int) -> float:
        """The median time of one product."""
        times: list[float] = []
        for _ in range(groups):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(MATRIX_AT_ONCE):
                torch.matmul(self._left, self._right, out=self._out)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / MATRIX_AT_ONCE)
        return sorted(times)[len(times) // 2]


class Idle:
    """In the place of a computation where there is no GPU."""

    def milliseconds(self, groups: int) -> float:
        """Time that passes."""
        time.sleep(0.01 * groups)
        return 1.0


class Busy:
    """Repeats a copy on a thread of its own, as the connectors' threads do."""

    def __init__(self, copy: Callable[[], int]) -> None:
        self._copy, self._stop, self.bytes = copy, threading.Event(), 0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; raises the error that ended it before."""
        self._stop.set()
        self._thread.join(COPY_SECONDS)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.bytes += self._copy()
        except Exception as error:  # noqa: BLE001
            self.error = error


def rates_while(copies: Sequence[Callable[[], int]], action: Callable[[], object]) -> list[float]:
    """GB/s of each copy, all repeated at the same time, while `action` runs."""
    busy = [Busy(copy) for copy in copies]
    try:
        time.sleep(0.05)
        before, start = [one.bytes for one in busy], time.perf_counter()
        action()
        seconds, after = time.perf_counter() - start, [one.bytes for one in busy]
    finally:
        for one in busy:
            one.stop()
    return [(end - begin) / seconds / 1e9 for begin, end in zip(before, after, strict=True)]


class OwnCopies:
    """Copies that this process makes itself, as the connector for vLLM does: whole chunks, or layer by layer."""

    def __init__(self, gpu: larder_kv.Gpu, session: larder_kv.Session, memory: Memory, chunks: int) -> None:
        shape = memory.shape
        self._session, self._memory, self._chunks = session, memory, chunks
        self._namespace = session.register(shape.spec("own copies"))
        regions = [(memory.address(), shape.size)]
        self._paged = larder_kv.GpuPagedMemory(gpu, regions, shape.planes(), pages_per_chunk=shape.pages_per_chunk)
        pages = list(range(shape.pages))
        random.Random(1).shuffle(pages)
        half = chunks * shape.pages_per_chunk
        self._loaded, self._saved, self._next = pages[:half], pages[half : 2 * half], 1
        self._kept: larder_kv.Lease | None = None
        self.copied = {"load": (0, 0.0), "save": (0, 0.0)}
        """Bytes and seconds of the copies alone, without the requests around them."""

    def prepare(self) -> bool:
        """Saves the chunks that `load` loads, and loads them once; whether the bytes are right."""
        self._memory.write(self._saved, 7)
        self._next = 0
        self.save()
        # Keeps these chunks whatever is saved later.
        self._kept = self._lease()
        self.load()
        return self._memory.holds(self._loaded, 7)

    def load(self) -> int:
        """Loads all chunks."""
        with self._lease() as lease, self._timed("load", self._chunks):
            self._paged.load(lease, self._loaded)
        return self._bytes()

    def load_layers(self) -> int:
        """Loads all chunks, layer by layer."""
        with self._lease() as lease:
            for layer in range(self._paged.layers):
                self._paged.load(lease, self._loaded, layer=layer)
        return self._bytes()

    def save(self) -> int:
        """Saves new chunks, half a window at a time."""
        reservation = self._reserve()
        for positions in self._parts(self._window() // (2 * self._paged.block_bytes)):
            staged = self._session.stage_chunks(reservation, positions)
            with self._timed("save", len(positions)):
                self._paged.save(staged, self._pages(positions))
            self._session.commit(reservation, staged)
        return self._bytes()

    def save_layers(self) -> int:
        """Saves new chunks, layer by layer."""
        reservation = self._reserve()
        parts = self._parts(self._window() * self._paged.layers // (2 * self._paged.block_bytes))
        for layer in range(self._paged.layers):
            for positions in parts:
                staged = self._session.stage_layers(reservation, positions, layer, layer + 1)
                self._paged.save_layers(staged, self._pages(positions))
                self._session.hand_over(staged)
        self._session.commit_handed_over(reservation, list(range(self._chunks)))
        return self._bytes()

    @contextmanager
    def _timed(self, way: str, chunks: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        size, seconds = self.copied[way]
        self.copied[way] = (size + chunks * self._paged.block_bytes, seconds + time.perf_counter() - start)

    def _lease(self) -> larder_kv.Lease:
        lease = patiently(lambda: self._session.lease(self._namespace, chain_of(self._namespace, 0, self._chunks)))
        if lease.chunks != self._chunks:
            raise CopyFailed(f"{lease.chunks} of {self._chunks} chunks are there")
        return lease

    def _reserve(self) -> larder_kv.Reservation:
        chain = chain_of(self._namespace, self._next, self._chunks)
        self._next += 1
        return patiently(lambda: self._session.reserve(self._namespace, chain))

    def _parts(self, at_once: int) -> list[list[int]]:
        size = max(at_once, 1)
        return [list(range(self._chunks))[start : start + size] for start in range(0, self._chunks, size)]

    def _pages(self, positions: Sequence[int]) -> list[int]:
        per_chunk = self._memory.shape.pages_per_chunk
        return self._saved[positions[0] * per_chunk : (positions[-1] + 1) * per_chunk]

    def _window(self) -> int:
        return self._session.window_bytes or WINDOW_BYTES

    def _bytes(self) -> int:
        return self._chunks * self._paged.block_bytes
