"""Follows hints for the time after a request: pins its chunks, and brings them near before its session comes back."""

import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import larder_kv
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.hints import Hints
from larder_kv.vllm.node import Node, Open

logger = logging.getLogger("vllm.larder")

MOST_TASKS, MOST_SESSIONS = 4_096, 4_096
AGAIN_SECONDS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Pauses before a pin is tried again while chunks of the request are missing: chunks are saved after the engine's steps."""
AHEAD_SECONDS = 2.0
"""The prompt is brought near at least this long before the expected turn; a tenth of the time until then if that is longer."""
NEAR_SECONDS = 10.0
"""Time limit of bringing a prompt near."""


@dataclass
class Task:
    """One thing to do at one time."""

    what: Literal["pin", "bring"]
    hashes: list[bytes]
    session: str | None
    turn: int
    """The turn of the session after which this was planned."""
    planned: float
    """When this was planned."""
    until: float
    """The end of the pin."""
    tries: int = 0
    pin: tuple[Open, int] | None = None
    """The pin so far, and the connection to the node that granted it."""


@dataclass
class Turns:
    """A session's turns."""

    number: int = 0
    """Number of turns that have come."""
    pin: tuple[Open, int] | None = None
    """The pin of the last ended turn, and the connection to the node that granted it."""
    pin_planned: float = 0.0
    """When this pin was planned."""


class Keeper:
    """A thread that pins chunks and brings them near, one task at a time; tasks beyond the limit are dropped and counted. Pins go
    first: chunks may take long to come, and chunks without their pin may be evicted."""

    def __init__(self, node: Node, counts: Counts) -> None:
        self._node, self._counts = node, counts
        self._changed = threading.Condition()
        self._pins: list[tuple[float, int, Task]] = []
        self._brings: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()
        self._sessions: OrderedDict[str, Turns] = OrderedDict()
        self._closed = False
        self._thread: threading.Thread | None = None

    def comes(self, hints: Hints) -> None:
        """Notes that a request has come: plans for the return of its session are no longer needed."""
        if hints.session is not None:
            with self._changed:
                self._turns(hints.session).number += 1

    def ends(self, hints: Hints, hashes: list[bytes]) -> None:
        """Notes that a request has ended; `hashes` are those of its chunks from the first on."""
        if not hashes or not hints.is_for_the_end:
            return
        now = time.monotonic()
        with self._changed:
            turn = self._turns(hints.session).number if hints.session is not None else 0
            if hints.retain_seconds is not None:
                self._plan(now, Task("pin", hashes, hints.session, turn, now, now + hints.retain_seconds))
            if hints.return_seconds is not None:
                ahead = max(AHEAD_SECONDS, hints.return_seconds / 10)
                at = now + max(hints.return_seconds - ahead, 0)
                self._plan(at, Task("bring", hashes, hints.session, turn, now, now + hints.return_seconds))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="larder-keeper", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread. Pins stay until their time is over."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _turns(self, session: str) -> Turns:
        turns = self._sessions.setdefault(session, Turns())
        self._sessions.move_to_end(session)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return turns

    def _plan(self, at: float, task: Task) -> None:
        if len(self._pins) + len(self._brings) >= MOST_TASKS:
            self._counts.add("dropped_hints")
            return
        heapq.heappush(self._pins if task.what == "pin" else self._brings, (at, next(self._numbers), task))

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._do(task)
            except larder_kv.LarderError as error:
                self._counts.add("dropped_hints")
                logger.debug("a hint was not followed: %s", error)
            # Catches everything: without this thread no hint would be followed again.
            except BaseException:
                self._counts.add("dropped_hints")
                logger.exception("a hint was not followed")

    def _next(self) -> Task | None:
        """The next task, when its time has come; None at the end."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                waiting = [tasks for tasks in (self._pins, self._brings) if tasks]
                for tasks in waiting:
                    if tasks[0][0] <= now:
                        return heapq.heappop(tasks)[2]
                self._changed.wait(min(tasks[0][0] for tasks in waiting) - now if waiting else None)
            return None

    def _do(self, task: Task) -> None:
        node = self._node.current()
        if node is None:
            self._counts.add("dropped_hints")
        elif task.what == "pin":
            self._pin(node, task)
        elif not self._has_come_back(task):
            chain = node.namespace.chain(task.hashes)
            # No request asks for this lookup: `preempted` counts it apart from requests.
            ticket = node.session.lookup_and_prefetch(node.namespace, chain, preempted=True)
            with node.session.collect(ticket, wait=NEAR_SECONDS) as lease:
                self._counts.add("brought_chunks", lease.chunks)

    def _pin(self, node: Open, task: Task) -> None:
        """Pins the present chunks, again and again until all chunks of the request are pinned, or those of a later turn."""
        left = task.until - time.monotonic()
        if left <= 0:
            if task.pin is None:
                self._counts.add("dropped_hints")
            return
        if self._has_later_pin(task):
            # The later turn has ended this turn's pin.
            return
        pinned = node.session.pin(node.namespace, node.namespace.chain(task.hashes), left)
        previous, task.pin = task.pin, (node, pinned.pin)
        unpin(node, previous)
        is_last = pinned.chunks == len(task.hashes) or task.tries == len(AGAIN_SECONDS)
        if task.session is not None and (pinned.chunks or is_last):
            # Before another try: it may fail or be dropped, and the next turn ends this pin.
            former = self._note_pin(task.session, task)
            unpin(node, former if former is not previous else None)
        if is_last:
            self._counts.add("pinned_chunks", pinned.chunks)
            return
        with self._changed:
            self._plan(time.monotonic() + AGAIN_SECONDS[task.tries], task)
        task.tries += 1

    def _note_pin(self, session: str, task: Task) -> tuple[Open, int] | None:
        """Notes the pin of a session's last turn, and returns the pin so far."""
        with self._changed:
            turns = self._turns(session)
            former, turns.pin, turns.pin_planned = turns.pin, task.pin, task.planned
        return former

    def _has_later_pin(self, task: Task) -> bool:
        """Whether a later turn of the session has its pin already."""
        with self._changed:
            turns = self._sessions.get(task.session) if task.session is not None else None
            return turns is not None and turns.pin_planned > task.planned

    def _has_come_back(self, task: Task) -> bool:
        """Whether the session's next turn has come already."""
        with self._changed:
            turns = self._sessions.get(task.session) if task.session is not None else None
            return turns is not None and turns.number != task.turn


def unpin(node: Open, pin: tuple[Open, int] | None) -> None:
    """Ends a pin, if this connection granted it and it has not ended by itself. Elsewhere its number may name another pin."""
    if pin is not None and pin[0] is node and pin[1]:
        with suppress(larder_kv.RefusedError):
            node.session.unpin(pin[1])
