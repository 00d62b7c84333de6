"""Follows the chunks that the node on this host gains and loses, for routers."""

import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

logger = logging.getLogger("vllm.larder")

IDLE_SECONDS, PROBE_SECONDS, PROBES = 30, 10, 3
"""A node without news sends nothing. After this idle time its host is probed; a host that answers no probe is gone."""
MOST_WAITING = 100_000
"""Events that wait for the engine to take them, which an idle engine does not do; at this limit the stream is read no further."""


@dataclass(frozen=True)
class Event:
    """A chunk that was stored or removed."""

    hash: bytes
    parent: bytes | None
    """The chunk before it in its prompt; None for the first chunk."""
    is_stored: bool


class Held:
    """The held chunks, from the node's stream of server-sent events: a snapshot, then changes."""

    def __init__(self) -> None:
        self._place = ("", 0)
        self._held: set[bytes] = set()
        self._snapshot: set[bytes] | None = set()
        self._kind = ""

    def begin(self, place: tuple[str, int]) -> None:
        """A new stream begins, with a snapshot of a namespace at a device: chunks that are not in it are gone."""
        self._place, self._snapshot = place, set()

    def line(self, line: str) -> list[Event]:
        """The events in a line of the stream."""
        if line.startswith("event: "):
            self._kind = line.removeprefix("event: ")
            return []
        if not line.startswith("data: "):
            return []
        if self._kind == "live" and self._snapshot is not None:
            gone = self._held - self._snapshot
            self._held, self._snapshot = self._snapshot, None
            return [Event(one, None, False) for one in sorted(gone)]
        data = json.loads(line.removeprefix("data: "))
        if (data.get("namespace"), data.get("device")) != self._place:
            return []
        one = bytes.fromhex(data["hash"])
        if self._kind == "evict":
            known = one in self._held
            self._held.discard(one)
            return [Event(one, None, False)] if known else []
        if self._snapshot is not None:
            self._snapshot.add(one)
        is_new = one not in self._held
        if self._snapshot is None or is_new:
            self._held.add(one)
        parent = bytes.fromhex(data["parent"]) if data["index"] > 0 else None
        return [Event(one, parent, True)] if is_new else []


class NodeEvents:
    """Follows a node's events on its own thread, and starts again when the stream ends."""

    def __init__(self, address: str, place: Callable[[], tuple[str, int] | None], pause: float) -> None:
        """`place` returns the engine's namespace and the device whose chunks the engine uses, or None if they are not known
        yet."""
        self._address, self._place, self._pause = address, place, pause
        self._taken = threading.Condition()
        self._waiting: list[Event] = []
        self._closed = threading.Event()
        self._held = Held()
        self._connection: http.client.HTTPConnection | None = None
        self._is_quiet = False
        self._thread = threading.Thread(target=self._run, name="larder-events", daemon=True)
        self._thread.start()

    def take(self) -> list[Event]:
        """The events since the last call."""
        with self._taken:
            taken, self._waiting = self._waiting, []
            self._taken.notify()
        return taken

    def close(self) -> None:
        """Ends the thread."""
        with self._taken:
            self._closed.set()
            self._taken.notify()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            # The thread that reads the stream notices this at once. It may have closed the socket meanwhile.
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(2)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._closed.is_set():
            place = self._place()
            if place is not None:
                try:
                    self._follow(place)
                # Catches everything: without this thread routers would hear nothing again.
                except BaseException as error:
                    self._ended(error)
            self._closed.wait(self._pause)

    def _ended(self, error: BaseException) -> None:
        """Logs why a stream ended, once until one begins again."""
        if self._is_quiet or self._closed.is_set():
            return
        self._is_quiet = True
        is_known = isinstance(error, (OSError, http.client.HTTPException, ValueError))
        logger.warning("no events from http://%s for now: %s", self._address, error, exc_info=None if is_known else error)

    def _follow(self, place: tuple[str, int]) -> None:
        held = self._held
        held.begin(place)
        self._connection = http.client.HTTPConnection(self._address)
        try:
            self._connection.connect()
            keep_alive(self._connection.sock)
            self._connection.request("GET", "/events", headers={"Accept": "text/event-stream"})
            answer = self._connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"the node answers {answer.status}")
            self._is_quiet = False
            for line in answer:
                if self._closed.is_set():
                    return
                self._add(held.line(line.decode().rstrip("\n")))
        finally:
            self._connection.close()

    def _add(self, events: Iterable[Event]) -> None:
        """Adds events, and waits until there is room for further ones. The node ends the stream of a follower that is too slow."""
        with self._taken:
            self._waiting += events
            self._taken.wait_for(lambda: len(self._waiting) < MOST_WAITING or self._closed.is_set())


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel notice that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
