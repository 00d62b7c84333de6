"""The way to the node, which may come later and go at any time."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import larder_kv

logger = logging.getLogger("vllm.larder")


@dataclass(frozen=True)
class Open:
    """An open session with the engine's namespace."""

    session: larder_kv.Session
    namespace: larder_kv.Namespace


class Node:
    """Keeps a session open from a thread of its own: nobody else ever waits for a node that is not there."""

    def __init__(
        self,
        open_session: Callable[[], larder_kv.Session],
        spec: larder_kv.NamespaceSpec,
        slices: Sequence[int],
        reconnect_seconds: float,
    ) -> None:
        self._open_session = open_session
        self._spec, self._slices = spec, slices
        self._reconnect_seconds = reconnect_seconds
        self._open: Open | None = None
        self._wanted = threading.Event()
        self._tried = threading.Event()
        self._closed = threading.Event()
        self._wanted.set()
        self._thread = threading.Thread(target=self._keep_open, name="larder-node", daemon=True)
        self._thread.start()

    def wait_for_first_try(self, seconds: float) -> None:
        """Waits until the node was there once, or was not; so that an engine that starts beside its node begins with it."""
        self._tried.wait(seconds)

    def current(self) -> Open | None:
        """The session, where there is one."""
        return self._open

    def lost(self, session: Open) -> None:
        """Says that a session has ended: another one is opened."""
        if self._open is session:
            logger.warning("the Larder node is gone; the engine goes on without it")
            self._open = None
            self._wanted.set()

    def close(self) -> None:
        """Ends the session and the thread."""
        self._closed.set()
        self._wanted.set()
        self._thread.join()
        self._open = None

    def _keep_open(self) -> None:
        warned = False
        while not self._closed.is_set():
            self._wanted.wait()
            if self._closed.is_set():
                return
            try:
                session = self._open_session()
                namespace = session.register(self._spec, slices=self._slices)
            except (larder_kv.LarderError, ValueError, OSError) as error:
                if not warned:
                    logger.warning("no Larder cache for now: %s", error)
                warned = True
                self._tried.set()
                self._closed.wait(self._reconnect_seconds)
                continue
            logger.info("using the Larder node %s, namespace %s", session.node, namespace.fingerprint[:16])
            warned = False
            self._wanted.clear()
            self._open = Open(session, namespace)
            self._tried.set()
