"""Asks a busy node again, for a moment: most nodes are busy for some milliseconds."""

import time
from collections.abc import Callable
from typing import TypeVar

import larder_kv

T = TypeVar("T")

BUSY_SECONDS = 0.1
"""How long a save waits in all for a node that is busy."""


class Patience:
    """The time for which one save, or one call of an engine's, waits for a busy node. Used only on threads that may wait."""

    def __init__(self, seconds: float = BUSY_SECONDS) -> None:
        self._left = seconds

    def ask(self, request: Callable[[], T]) -> T:
        """Makes a request, and makes it again after the pauses that the node asks for. Raises `BusyError` once the time is over."""
        while True:
            try:
                return request()
            except larder_kv.BusyError as error:
                pause = max(error.retry_after, SHORTEST_PAUSE)
                self._left -= pause
                if self._left < 0:
                    raise
                time.sleep(pause)


SHORTEST_PAUSE = 0.001
