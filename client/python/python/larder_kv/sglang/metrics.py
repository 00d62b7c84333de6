"""The figures that SGLang's metrics for all storages show: pages and bandwidth of transfers."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.observability.metrics_collector import StorageMetrics

KEPT = 1_024
"""The most measurements that wait for SGLang to take them; further measurements are left out."""


class Transfers:
    """Measures transfers, and keeps the measurements until SGLang asks for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = StorageMetrics()

    @contextmanager
    def measured(self, pages: str, bandwidth: str, page_bytes: int) -> Iterator[list[int]]:
        """Measures one transfer; the `with` block appends the pages that it moved."""
        start = time.perf_counter()
        moved: list[int] = []
        yield moved
        seconds = max(time.perf_counter() - start, 1e-9)
        with self._lock:
            taken: list[Any] = getattr(self._taken, pages)
            if moved and moved[0] and len(taken) < KEPT:
                taken.append(moved[0])
                getattr(self._taken, bandwidth).append(moved[0] * page_bytes / seconds / 1e9)

    def take(self) -> StorageMetrics:
        """Returns the measurements since the last call."""
        with self._lock:
            taken, self._taken = self._taken, StorageMetrics()
        return taken
