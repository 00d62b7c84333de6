"""Copies by the node, at an engine's request."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import larder_kv
from memory import Memory

MODEL = "faults"
COPY_SECONDS = 10.0

T = TypeVar("T")


def chain_of(namespace: larder_kv.Namespace, number: int, chunks: int) -> larder_kv.Chain:
    """The chunks of prompt `number`."""
    return namespace.chain([hashlib.sha256(f"{number}/{chunk}".encode()).digest() for chunk in range(chunks)])


def patiently(request: Callable[[], T], seconds: float = 5.0) -> T:
    """Asks the node again while it is busy."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return request()
        except larder_kv.BusyError as error:
            if time.monotonic() > deadline:
                raise
            time.sleep(min(max(error.retry_after, 0.001), 0.05))


class CopyFailed(Exception):
    """A copy did not end well, or its bytes are wrong."""


class Lane:
    """A session whose copies the node makes."""

    def __init__(self, socket: str, memory: Memory, *, verify: bool = True) -> None:
        self._memory = memory
        self.session = larder_kv.Session(socket, window_bytes=0, verify="sample" if verify else "off")
        self.namespace = self.session.register(memory.shape.spec(MODEL))
        self._tensors = self.register(memory.shared())

    def register(self, shared: larder_kv.IpcMemory | larder_kv.DescriptorMemory) -> larder_kv.NodeTensors:
        """Makes memory known to the node; a descriptor is closed then."""
        shape = self._memory.shape
        try:
            return patiently(
                lambda: self.session.register_tensors(
                    self.namespace, [shared], shape.planes(), pages_per_chunk=shape.pages_per_chunk
                )
            )
        finally:
            if isinstance(shared, larder_kv.DescriptorMemory):
                os.close(shared.descriptor)

    def chain(self, number: int, chunks: int) -> larder_kv.Chain:
        """The chunks of prompt `number`."""
        return chain_of(self.namespace, number, chunks)

    def begin_save(self, number: int, pages: Sequence[int]) -> tuple[larder_kv.Reservation, larder_kv.NodeCopy]:
        """Begins to save these pages as the chunks of a prompt that the node does not have."""
        chunks = len(pages) // self._memory.shape.pages_per_chunk
        reservation = patiently(lambda: self.session.reserve(self.namespace, self.chain(number, chunks)))
        if reservation.chunks != list(range(chunks)):
            raise CopyFailed(f"prompt {number}: only {len(reservation.chunks)} of {chunks} chunks are to be written")
        copy = patiently(lambda: self.session.save_pages(self._tensors, reservation, reservation.chunks, list(pages)))
        return reservation, copy

    def save(self, number: int, pages: Sequence[int]) -> None:
        """Saves these pages as the chunks of a prompt."""
        reservation, copy = self.begin_save(number, pages)
        self.until_done(copy)
        kept = self.session.commit_handed_over(reservation, reservation.chunks)
        if kept != len(reservation.chunks):
            raise CopyFailed(f"the node keeps {kept} of {len(reservation.chunks)} chunks")

    def begin_load(self, number: int, pages: Sequence[int]) -> larder_kv.NodeCopy:
        """Begins to load the chunks of a prompt into these pages."""
        chunks = len(pages) // self._memory.shape.pages_per_chunk
        with patiently(lambda: self.session.lease(self.namespace, self.chain(number, chunks))) as lease:
            if lease.chunks != chunks:
                raise CopyFailed(f"prompt {number}: {lease.chunks} of {chunks} chunks are there")
            return patiently(lambda: self.session.load_pages(self._tensors, lease, list(pages)))

    def load(self, number: int, pages: Sequence[int]) -> None:
        """Loads the chunks of a prompt into these pages."""
        self.until_done(self.begin_load(number, pages))

    def until_done(self, copy: larder_kv.NodeCopy) -> None:
        """Waits for a copy's end."""
        end = self.session.wait_for_copy(copy, seconds=COPY_SECONDS).end
        if end != "done":
            raise CopyFailed(f"a copy ended as {end}")

    def tiers(self, number: int, chunks: int) -> str:
        """The tiers that hold the chunks of a prompt."""
        found = self.session.lookup(self.namespace, self.chain(number, chunks))
        return "+".join(f"{span.end - span.start} {span.tier}" for span in found.spans) or "none"


class Stream:
    """Saves and loads that are verified, on a thread, until they are stopped."""

    def __init__(self, lane: Lane, memory: Memory, chunks: int, first: int) -> None:
        self._lane, self._memory, self._first = lane, memory, first
        half = chunks * memory.shape.pages_per_chunk
        self._from, self._to = list(range(half)), list(range(half, 2 * half))
        self._stop = threading.Event()
        self.rounds, self.longest = 0, 0.0
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def told(self) -> dict[str, Any]:
        """The rounds until now, the first errors, and the seconds of the longest round."""
        return {"rounds": self.rounds, "errors": self.errors[:5], "failed": len(self.errors), "longest": self.longest}

    def stop(self) -> dict[str, Any]:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(COPY_SECONDS)
        return self.told()

    def _run(self) -> None:
        number = self._first
        while not self._stop.is_set():
            start = time.monotonic()
            try:
                self._round(number)
            except Exception as error:  # noqa: BLE001
                self.errors.append(f"round {number - self._first}: {type(error).__name__}: {error}")
                time.sleep(0.05)
            self.rounds += 1
            self.longest = max(self.longest, time.monotonic() - start)
            number += 1

    def _round(self, number: int) -> None:
        self._memory.write(self._from, number)
        self._memory.poison(self._to)
        self._lane.save(number, self._from)
        self._memory.poison(self._from)
        self._lane.load(number, self._to)
        if not self._memory.holds(self._to, number):
            raise CopyFailed("loaded pages have wrong bytes")
        if not self._memory.is_poisoned(self._to):
            raise CopyFailed("pages were written that should not have been")
