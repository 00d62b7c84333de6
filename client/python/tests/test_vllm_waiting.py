"""Prefetches that wait until other waiting requests hold less, against a node of a stand-in."""

from types import SimpleNamespace

import pytest
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.prefetch import HELD_BLOCKS, Prefetcher
from larder_kv.vllm.settings import Settings

BLOCKS_PER_CHUNK, STEPS = 8, 3


class Steps:
    """A node that brings every chunk of a prompt in some of the engine's steps."""

    def __init__(self) -> None:
        self.step = 0
        namespace = SimpleNamespace(blocks_per_chunk=BLOCKS_PER_CHUNK, chain=lambda hashes: hashes)
        self.node = SimpleNamespace(namespace=namespace, session=None)

    def current(self) -> SimpleNamespace:
        return self.node

    def start(self, _namespace: object, chain: list[bytes], **_: object) -> SimpleNamespace:
        ready, lease = self.step + STEPS, SimpleNamespace(chunks=len(chain), tokens=0, release=lambda: None)
        outcome = SimpleNamespace(spans=[]), lease
        return SimpleNamespace(wait=lambda _: outcome if self.step >= ready else None, cancel=lambda: None)


@pytest.fixture
def steps():
    return Steps()


@pytest.fixture
def prefetcher(steps, monkeypatch):
    made = Prefetcher(steps, Counts(), Settings(socket="s"))
    monkeypatch.setattr(made, "_prefetches_of", lambda _node: steps)
    yield made
    made.close()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_long_prompt_is_scheduled_while_short_ones_keep_coming(steps, prefetcher, is_dropped):
    waiting, scheduled = {}, []
    for steps.step in range(100):
        if steps.step == 3:
            waiting["long"] = prefetcher.start("long", [b"x"] * (HELD_BLOCKS // BLOCKS_PER_CHUNK), 1_000, False)
        if steps.step % 2 == 0:
            name = f"short {steps.step}"
            waiting[name] = prefetcher.start(name, [b"x"] * 16, 1_000, False)
        if is_dropped and steps.step == 5:
            prefetcher.drop("long")
            del waiting["long"]
        for name, prefetch in list(waiting.items()):
            if prefetcher.look(prefetch, 0) is not None:
                prefetcher.loads(prefetch)
                prefetcher.drop(name)
                del waiting[name]
                scheduled.append(name)
        prefetcher.go_on()
    assert ("long" in scheduled) is not is_dropped
    # No short prompt waits for long, either: at most for the long prompt's three steps.
    assert len(waiting) <= 3 and len(scheduled) >= 47
