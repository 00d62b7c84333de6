"""A session that is kept open, for engines that outlive their node and start before it."""

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import larder_kv

T = TypeVar("T")


LOST = (larder_kv.EndedError, larder_kv.RequestTimeout)
"""The errors after which a session is of no use. A node that does not answer would delay every call: without it, calls miss at
once until it answers again."""

LOOK_SECONDS = 1.0
"""How often a link looks whether its session goes on. An engine without requests has to notice that its node is gone: as long as it
keeps the session, it keeps the node's memory, and the node's next life may find none."""

MOST_REASONS = 16
"""Limit of different reasons that are logged, for instance while a node is absent."""


def goes_on(session: larder_kv.Session) -> bool:
    """Whether a session goes on, as far as is known."""
    try:
        return session.is_open
    except larder_kv.ForkedError:
        # Each request says so.
        return True


def is_too_large(error: larder_kv.LarderError) -> bool:
    """Whether the node asks for smaller parts."""
    return isinstance(error, larder_kv.RefusedError) and error.code == "too_large"


def uncounted(_: str) -> None:
    """Counts nothing."""


class Opened:
    """An open session, and the namespaces that were registered with it so far."""

    def __init__(self, session: larder_kv.Session) -> None:
        self.session = session
        self._lock = threading.Lock()
        self._namespaces: dict[larder_kv.NamespaceSpec, larder_kv.Namespace] = {}

    def namespace(self, spec: larder_kv.NamespaceSpec) -> larder_kv.Namespace:
        """The namespace, registered at the first call. Raises the errors of `Session.register`."""
        with self._lock:
            if spec not in self._namespaces:
                self._namespaces[spec] = self.session.register(spec)
            return self._namespaces[spec]

    def __str__(self) -> str:
        return self.session.node


class Link(Generic[T]):
    """Keeps a session, or an object made from one, open on its own thread: no other thread ever waits for an absent node."""

    def __init__(
        self,
        connect: Callable[[], T],
        reconnect_seconds: float,
        logger: logging.Logger,
        count: Callable[[str], None] = uncounted,
        *,
        begins: bool = True,
        is_open: Callable[[T], bool] = lambda _: True,
    ) -> None:
        """Calls `count` with "failed_connects" for each failed try. A link with `begins=False` waits for `begin`. `is_open` says at
        once whether a session goes on."""
        self._connect, self._reconnect_seconds, self._logger, self._count = connect, reconnect_seconds, logger, count
        self._is_open = is_open
        self._opened: T | None = None
        self._wanted = threading.Event()
        self._tried = threading.Event()
        self._closed = threading.Event()
        if begins:
            self._wanted.set()
        self._thread = threading.Thread(target=self._keep_open, name="larder-link", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Opens a session, which replaces the open one."""
        self._wanted.set()

    def wait_for_first_try(self, seconds: float) -> None:
        """Waits for the first try to reach the node, so that an engine that starts beside its node begins with it."""
        self._tried.wait(seconds)

    def current(self) -> T | None:
        """The session, if one is open. The first call after its end tells the link."""
        opened = self._opened
        if opened is None or self._is_open(opened):
            return opened
        self.lost(opened)
        return self._opened

    def lost(self, opened: T) -> None:
        """Tells the link that a session has ended, or does not answer: the link opens another."""
        if self._opened is opened:
            self._logger.warning("the Larder node is gone or does not answer; going on without it")
            self._opened = None
            self._wanted.set()

    def close(self) -> None:
        """Ends the session and the thread."""
        self._closed.set()
        self._wanted.set()
        self._thread.join()
        self._opened = None

    def _keep_open(self) -> None:
        reasons: set[str] = set()
        while not self._closed.is_set():
            if not self._wanted.wait(LOOK_SECONDS):
                self.current()
                continue
            if self._closed.is_set():
                return
            # Not after the try: `begin` may ask for another session meanwhile.
            self._wanted.clear()
            try:
                opened = self._connect()
                self._logger.info("using the Larder node %s", opened)
            # Catches everything, panics of native code included: without this thread the engine would never have a cache again.
            except BaseException as error:
                self._failed(error, reasons)
                self._wanted.set()
                self._tried.set()
                self._closed.wait(self._reconnect_seconds)
                continue
            reasons.clear()
            self._opened = opened
            # Nobody else keeps the session when it ends.
            del opened
            self._tried.set()

    def _failed(self, error: BaseException, reasons: set[str]) -> None:
        """Counts a try, and logs each reason once until the node is there again."""
        self._count("failed_connects")
        reason = f"{type(error).__name__}: {error}"
        if reason in reasons or len(reasons) == MOST_REASONS:
            return
        reasons.add(reason)
        is_known = isinstance(error, (larder_kv.LarderError, ValueError, OSError))
        self._logger.warning("no Larder node for now: %s", error, exc_info=None if is_known else error)
