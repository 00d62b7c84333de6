"""The connector's counters, for vLLM's logs and Prometheus."""

import threading
from collections.abc import Mapping

COUNTERS = {
    "failed_connects": "Tries to open a session with the node that failed.",
    "lookups": "Prompts looked up.",
    "short_prompts": "Prompts too short for a hit: they have no whole chunk ahead of their last token.",
    "lookups_without_node": "Prompts not looked up because the node was absent.",
    "lookups_failed": "Prompts whose lookup or prefetch failed.",
    "found_tokens": "Usable cached tokens of the prompts looked up.",
    "followed_chunks": "Chunks followed while another engine computed them.",
    "handed_over_chunks": "Chunks handed over layer by layer to a decode engine; also counted as saved.",
    "loads": "Requests that loaded blocks.",
    "loaded_blocks": "Engine blocks loaded.",
    "failed_blocks": "Requested engine blocks that did not come; the engine computes them again.",
    "damaged_chunks": "Requested chunks with wrong bytes; their blocks count as failed.",
    "loaded_bytes": "Bytes copied from the cache into the engine's blocks.",
    "saved_chunks": "Chunks saved, including chunks that the cache had already.",
    "saved_bytes": "Bytes copied from the engine's blocks into the cache.",
    "shed_chunks_queue": "Chunks not saved because too many waited already.",
    "shed_chunks_room": "Chunks not saved because the node had no room.",
    "shed_chunks_node": "Chunks not saved because the node was absent or failed.",
    "shed_chunks_refused": "Chunks not saved because the node refused them; the log names each reason.",
    "shed_chunks_gone": "Chunks not saved: purged meanwhile, of a preempted request, or after a chunk that was not saved.",
    "pinned_chunks": "Chunks pinned for requests that hint how long they are wanted.",
    "brought_chunks": "Chunks brought near ahead of the expected return of a session.",
    "dropped_hints": "Pins and prefetches left out: the node refused them or was absent, too many waited, or it was too late.",
    "wrong_hints": "Hints that are unknown, or of a wrong type or range.",
}
"""Each counter and its meaning."""


class Counts:
    """Counters that threads add to; the engine takes the counts at each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, name: str, more: int = 1) -> None:
        """Adds to a counter; `name` is one of `COUNTERS`."""
        if name not in COUNTERS:
            raise KeyError(name)
        if more:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + more

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken


def summed(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """The sums of two results of `take`."""
    return {name: first.get(name, 0) + second.get(name, 0) for name in first.keys() | second.keys()}
