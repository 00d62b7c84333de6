"""What is told to SGLang's metrics."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import REGISTRY, Counter
from sglang.srt.observability.metrics_collector import StorageMetrics

from larder_kv.keyed import COUNTERS, Counts

KEPT = 1_024
"""Measurements that wait for SGLang to take them; beyond it new ones are left out."""


class Metrics:
    """Counters `sglang:larder_NAME`, and pages and bandwidth for the histograms that SGLang has for all storages."""

    def __init__(self, counts: Counts, labels: dict[str, str]) -> None:
        self._counts, self._labels = counts, labels
        self._told = dict.fromkeys(COUNTERS, 0)
        self._counters = {name: counter(name, tuple(labels)) for name in COUNTERS}
        self._lock = threading.Lock()
        self._taken = StorageMetrics()

    @contextmanager
    def measured(self, pages: str, bandwidth: str, page_bytes: int) -> Iterator[list[int]]:
        """Measures a transfer; the block appends the pages that it moved."""
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
        """Brings the counters up to date, and hands over what was measured since the last call."""
        now = self._counts.now()
        for name, counted in now.items():
            if counted > self._told[name]:
                self._counters[name].labels(**self._labels).inc(counted - self._told[name])
        self._told = now
        with self._lock:
            taken, self._taken = self._taken, StorageMetrics()
        return taken


def counter(name: str, labels: tuple[str, ...]) -> Counter:
    """The counter; the one that is there already where a storage is attached again."""
    full = f"sglang:larder_{name}"
    known = getattr(REGISTRY, "_names_to_collectors", {}).get(full)
    return known if isinstance(known, Counter) else Counter(full, COUNTERS[name], labels)
