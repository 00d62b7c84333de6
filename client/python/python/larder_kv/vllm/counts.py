"""The connector's counters, for vLLM's logs and Prometheus."""

import threading
from collections.abc import Mapping

COUNTERS = {
    "lookups": "Prompts that were looked up.",
    "lookups_without_node": "Prompts that were not looked up, as the node was not there.",
    "lookups_failed": "Prompts whose lookup or prefetch failed.",
    "found_tokens": "Tokens that could be used, of the prompts that were looked up.",
    "followed_chunks": "Chunks that were followed while another engine computed them.",
    "handed_over_chunks": "Chunks that were handed over layer by layer to whoever decodes; also counted as saved.",
    "loads": "Requests that loaded blocks.",
    "loaded_blocks": "Engine blocks that were loaded.",
    "failed_blocks": "Engine blocks that were to be loaded and did not come; they are computed again.",
    "damaged_chunks": "Chunks that were to be loaded and were wrong; their blocks count as failed.",
    "loaded_bytes": "Bytes copied from the cache into the engine's blocks.",
    "saved_chunks": "Chunks that were saved, those that the cache had already included.",
    "saved_bytes": "Bytes copied from the engine's blocks into the cache.",
    "shed_chunks_queue": "Chunks that were not saved, as too many waited already.",
    "shed_chunks_room": "Chunks that were not saved, as the node had no room for them.",
    "shed_chunks_node": "Chunks that were not saved, as the node was not there or failed.",
    "shed_chunks_gone": "Chunks that were not saved, as their request was preempted or a chunk before them was not saved.",
}
"""Each counter and its meaning."""


class Counts:
    """Counters that threads add to, taken away by the engine at each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, name: str, more: int = 1) -> None:
        """Counts; `name` is one of `COUNTERS`."""
        if name not in COUNTERS:
            raise KeyError(name)
        if more:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + more

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken


def summed(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """The sums of two takes."""
    return {name: first.get(name, 0) + second.get(name, 0) for name in first.keys() | second.keys()}
