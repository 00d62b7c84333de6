"""Blocks under single keys: shared by the adapters for caches that look up, load and save key by key.

These calls never raise for a fault of a node: such a fault is a miss, and is counted. Their namespaces are flat, so one lookup
answers for each key separately. Keys are written from the last to the first, so that a prompt's head is evicted last.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import larder_kv
from larder_kv.link import LOST, Link, Opened, is_too_large
from larder_kv.patience import BUSY_SECONDS, Patience

LOOKUP_KEYS = 4_096
"""Keys of one lookup, and of one lease; a chain may have twice as many."""

UNBOUNDED_BYTES = 64 << 20
"""Twice the bytes of one reservation, for a session without a window."""

COUNTERS = {
    "lookups": "Lookups of keys.",
    "asked_keys": "Keys looked up.",
    "found_keys": "Keys found.",
    "loaded_keys": "Keys loaded.",
    "missed_keys": "Requested keys that were absent or came too late.",
    "damaged_keys": "Requested keys with wrong bytes; they count as missed.",
    "loaded_bytes": "Bytes loaded.",
    "saved_keys": "Keys saved.",
    "present_keys": "Keys to save that were stored already, or were being written.",
    "shed_keys": "Keys to save that were not saved.",
    "saved_bytes": "Bytes saved.",
    "without_node": "Calls while the node was absent: lookups and loads miss, saves are dropped.",
    "busy": "Calls for which the node had no room.",
    "failures": "Calls that failed for another reason.",
    "failed_connects": "Tries to open a session with the node that failed.",
}
"""Each counter and its meaning."""


class Counts:
    """Counters that threads add to."""

    def __init__(self, export: Callable[[str, int], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._export = export

    def add(self, name: str, more: int = 1) -> None:
        """Adds to a counter, and tells `export`; `name` is one of `COUNTERS`."""
        if more == 0:
            return
        with self._lock:
            self._counts[name] += more
        if self._export is not None:
            self._export(name, more)

    def now(self) -> dict[str, int]:
        """The counts so far."""
        with self._lock:
            return dict(self._counts)


class Blocks(Protocol):
    """The engine's memory of the blocks that a call names, by their numbers in the call."""

    def fill(self, lease: larder_kv.Lease, first: int) -> None:
        """Copies all leased chunks to blocks `first` on, in order. Raises the lease's error if a chunk is damaged."""

    def write(self, staged: Sequence[larder_kv.StagedChunk], numbers: Sequence[int]) -> None:
        """Copies blocks to staged chunks, one block to each."""


class Keyed:
    """Looks up, loads and saves blocks of flat namespaces. No call raises for a fault of the node: the fault is a miss, or an
    unsaved block, and is counted. No call begins a request after `timeout_seconds`, and none of its requests takes longer than
    that."""

    def __init__(self, link: Link[Opened], counts: Counts, timeout_seconds: float, logger: logging.Logger) -> None:
        self._link, self._counts = link, counts
        self._timeout_seconds, self._logger = timeout_seconds, logger

    def exists(self, spec: larder_kv.NamespaceSpec, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether it can be loaded. Keys have 32 bytes."""
        found = [False] * len(keys)
        self._counts.add("lookups")
        self._counts.add("asked_keys", len(keys))

        def look(opened: Opened, deadline: float) -> None:
            namespace = opened.namespace(spec)
            start = 0
            while start < len(keys) and time.monotonic() <= deadline:
                part = distinct(keys[start : start + LOOKUP_KEYS])
                for span in opened.session.lookup(namespace, namespace.chain(part)).spans:
                    found[start + span.start : start + span.end] = [True] * (span.end - span.start)
                start += len(part)

        self._try(look)
        self._counts.add("found_keys", sum(found))
        return found

    def load(self, spec: larder_kv.NamespaceSpec, keys: Sequence[bytes], blocks: Blocks) -> int:
        """Copies blocks into the engine's memory; returns the number of loaded keys, from the first on."""
        loaded = 0

        def bring(opened: Opened, deadline: float) -> None:
            nonlocal loaded
            namespace = opened.namespace(spec)
            while loaded < len(keys) and time.monotonic() <= deadline:
                part = distinct(keys[loaded : loaded + LOOKUP_KEYS])
                with opened.session.lease(namespace, namespace.chain(part)) as lease:
                    come = lease.chunks
                    if come == 0:
                        return
                    damaged = False
                    try:
                        blocks.fill(lease, loaded)
                    except larder_kv.DamagedError as error:
                        self._logger.warning("a key is a miss: %s", error)
                        come, damaged = error.position, True
                loaded += come
                self._counts.add("loaded_bytes", come * namespace.block_bytes())
                if damaged:
                    self._counts.add("damaged_keys")
                    return

        self._try(bring)
        self._counts.add("loaded_keys", loaded)
        self._counts.add("missed_keys", len(keys) - loaded)
        return loaded

    def save(
        self, spec: larder_kv.NamespaceSpec, keys: Sequence[bytes], blocks: Blocks, priorities: Sequence[int] = ()
    ) -> list[bool]:
        """Copies blocks out of the engine's memory; returns for each key whether it is in the cache now. A key that is in the
        cache already is not written. `priorities` has one for each key; empty: 0 for all."""
        saved, patience = [False] * len(keys), Patience(min(BUSY_SECONDS, self._timeout_seconds))

        def write(opened: Opened, deadline: float) -> None:
            session, namespace = opened.session, opened.namespace(spec)
            # An engine that the node trusts has no window, and writes to its memory.
            at_once = max((session.window_bytes or UNBOUNDED_BYTES) // (2 * namespace.block_bytes()), 1)
            # From the last to the first: keys of a prompt come in the prompt's order, and the youngest key stays longest.
            for group, priority in groups(keys, at_once, priorities):
                waiting = [group]
                while waiting:
                    if time.monotonic() > deadline:
                        return
                    part = waiting.pop()
                    chain = namespace.chain([keys[number] for number in part])
                    try:
                        reservation = patience.ask(partial(session.reserve, namespace, chain, priority=priority))
                    except larder_kv.RefusedError as error:
                        if not is_too_large(error) or len(part) == 1:
                            raise
                        waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
                        continue
                    write_part(session, namespace, reservation, part)

        def write_part(
            session: larder_kv.Session, namespace: larder_kv.Namespace, reservation: larder_kv.Reservation, part: list[int]
        ) -> None:
            numbers = [part[position] for position in reservation.chunks]
            staged = session.stage_chunks(reservation, reservation.chunks)
            blocks.write(staged, numbers)
            # The chunks stay staged while the node is busy.
            kept = patience.ask(partial(session.commit, reservation, staged)) if staged else 0
            self._counts.add("present_keys", len(part) - len(numbers))
            self._counts.add("saved_keys", kept)
            self._counts.add("saved_bytes", kept * namespace.block_bytes())
            for number in part:
                saved[number] = kept == len(numbers) or number not in numbers

        self._try(write)
        self._counts.add("shed_keys", saved.count(False))
        return saved

    def _try(self, call: Callable[[Opened, float], None]) -> None:
        opened = self._link.current()
        if opened is None:
            self._counts.add("without_node")
            return
        try:
            call(opened, time.monotonic() + self._timeout_seconds)
        except larder_kv.BusyError:
            self._counts.add("busy")
        except LOST:
            self._counts.add("failures")
            self._link.lost(opened)
        except KeyboardInterrupt:
            raise
        # Catches panics of native code too: a call from the engine never fails.
        except BaseException:
            self._counts.add("failures")
            self._logger.exception("a call to the Larder node failed")


def distinct(keys: Sequence[bytes]) -> list[bytes]:
    """The keys before the first that comes a second time: no chain has a key twice."""
    seen: set[bytes] = set()
    for position, key in enumerate(keys):
        if key in seen:
            return list(keys[:position])
        seen.add(key)
    return list(keys)


def groups(keys: Sequence[bytes], at_once: int, priorities: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """The numbers of keys that are saved together, from the last to the first, with the priority that they share. No group has a
    key twice."""
    end = len(keys)
    while end > 0:
        priority = priorities[end - 1] if priorities else 0
        first = end - 1
        while first > max(end - at_once, 0) and (not priorities or priorities[first - 1] == priority):
            first -= 1
        numbers = range(end - 1, first - 1, -1)
        numbers = numbers[: len(distinct([keys[number] for number in numbers]))]
        yield list(numbers), priority
        end -= len(numbers)
