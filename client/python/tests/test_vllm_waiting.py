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


def test_a_long_prompt_keeps_short_ones_waiting_for_a_limited_time_only(steps, prefetcher, monkeypatch):
    # One request holds blocks, and the engine cannot schedule it.
    prefetcher.start("stuck", [b"x"], 1_000, False)
    monkeypatch.setattr("larder_kv.vllm.prefetch.time.monotonic", lambda: float(steps.step))
    limit = int(Settings(socket="s").timeout_seconds)
    waiting, served_at = {}, []

    def go_on(steps_more: int) -> None:
        for steps.step in range(steps.step + 1, steps.step + 1 + steps_more):
            name, chunks = (f"short {steps.step}", 16) if steps.step > 1 else ("long", HELD_BLOCKS // BLOCKS_PER_CHUNK)
            waiting[name] = prefetcher.start(name, [b"x"] * chunks, 1_000, False)
            for name, prefetch in list(waiting.items()):
                if prefetcher.look(prefetch, 0) is not None:
                    prefetcher.drop(name)
                    del waiting[name]
                    served_at.append(steps.step)
            prefetcher.go_on()

    go_on(6 * limit)
    assert "long" in waiting and len(waiting) <= 2 * limit
    gaps = [after - before for before, after in zip(served_at, served_at[1:], strict=False)]
    assert max(gaps) <= limit + STEPS + 1, "the short ones go on after the limit"
    prefetcher.drop("stuck")
    go_on(3 * limit)
    assert "long" not in waiting
