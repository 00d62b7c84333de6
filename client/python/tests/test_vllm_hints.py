"""Hints of requests: how they are read, and their effect at a node."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import larder_kv
import pytest
from conftest import CHUNK_TOKENS, put, spec, until
from larder_kv.vllm import keeper as keeping
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.hints import NONE, Hints, hints_of
from larder_kv.vllm.keeper import Keeper
from larder_kv.vllm.node import Open
from larder_kv.vllm.plan import Saved, Shape, plan_save


def hinted(**hints) -> dict:
    return {"larder_hints": hints}


def envelope(*actions: tuple[str, str, object]) -> SimpleNamespace:
    """vLLM's hint envelope."""
    fields = ("action_type", "action_version", "payload")
    return SimpleNamespace(actions=[SimpleNamespace(**dict(zip(fields, one, strict=True))) for one in actions])


def test_a_request_without_hints_has_none():
    for params in (None, {}, {"do_remote_decode": True}):
        assert hints_of(params) == (NONE, 0)
    assert hints_of(None, envelope(("prefetch", "1", {"x": 1}))) == (NONE, 0), "an action for somebody else"


def test_hints_are_read_from_parameters_and_from_the_envelope():
    said = {"priority": 5, "retain_seconds": 60, "session": "s", "return_seconds": 7.5}
    assert hints_of(hinted(**said)) == (Hints(5, 60, "s", 7.5), 0)
    assert hints_of(None, envelope(("larder_hints", "1", said))) == (Hints(5, 60, "s", 7.5), 0)
    both = envelope(("larder_hints", "1", {"priority": 1, "session": "s"}), ("larder_hints", "2", {"priority": 9}))
    assert hints_of(hinted(priority=-3), both) == (Hints(priority=-3, session="s"), 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": 128},
        {"priority": True},
        {"priority": "5"},
        {"retain_seconds": 0},
        {"retain_seconds": float("nan")},
        {"retain_seconds": 1e9},
        {"return_seconds": "soon"},
        {"session": ""},
        {"session": "x" * 257},
        {"session": 5},
        {"ttl": 5},
    ],
)
def test_what_is_wrong_is_left_out_and_counted(wrong):
    assert hints_of(hinted(**wrong)) == (NONE, 1)
    assert hints_of(hinted(**({"session": "s", "priority": 2} | wrong)))[1] == 1
    assert hints_of({"larder_hints": [wrong]}) == (NONE, 1)


def test_a_save_has_the_priority_of_its_request_after_a_preemption_too():
    saved, hashes = Saved(priority=7), [bytes([number]) * 32 for number in range(4)]
    assert plan_save(Shape(32, 32), "a", saved, hashes, 64, [1, 2]).priority == 7
    assert plan_save(Shape(32, 32), "a", saved.anew(), hashes, 64, [1, 2]).priority == 7


class Connected:
    """The connection to a node, as in the scheduler half."""

    def __init__(self, socket: str, model: str) -> None:
        session = larder_kv.Session(socket, window_bytes=1 << 20)
        self.open: Open | None = Open(session, session.register(spec(model)))

    def current(self) -> Open | None:
        return self.open

    def put(self, *numbers: int) -> list[bytes]:
        """Puts chunks of a prompt whose tokens are these numbers; returns their hashes."""
        chain = self.chain(*numbers)
        assert put(self.open.session, self.open.namespace, chain) == len(numbers)
        return list(chain.hashes)

    def chain(self, *numbers: int):
        return self.open.namespace.chain_of_tokens([number for number in numbers for _ in range(CHUNK_TOKENS)])

    def tiers(self, *numbers: int) -> set[str]:
        return {span.tier for span in self.open.session.lookup(self.open.namespace, self.chain(*numbers)).spans}


@pytest.fixture
def kept(cluster, request, monkeypatch):
    """A node, a keeper, and its counters. The keeper tries again without waiting."""
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (0.01,) * 1_000)
    monkeypatch.setattr(keeping, "AHEAD_SECONDS", 0.05)
    node, counts = Connected(cluster.sockets[0], request.node.name), Counts()
    keeper = Keeper(node, counts)
    yield SimpleNamespace(node=node, keeper=keeper, counts=Counted(counts))
    keeper.close()


class Counted:
    """The counters' sums."""

    def __init__(self, counts: Counts) -> None:
        self._counts, self._sums = counts, {}

    def __getitem__(self, name: str) -> int:
        for taken, more in self._counts.take().items():
            self._sums[taken] = self._sums.get(taken, 0) + more
        return self._sums.get(name, 0)


def pins(cluster) -> list[dict]:
    with urllib.request.urlopen(f"http://{cluster.http[0]}/pins") as answer:
        return json.load(answer)


def test_chunks_are_pinned_as_long_as_is_hinted(kept, cluster):
    before = len(pins(cluster))
    kept.keeper.ends(Hints(retain_seconds=30), kept.node.put(1, 2, 3))
    until(lambda: kept.counts["pinned_chunks"] == 3)
    assert len(pins(cluster)) == before + 1


def test_chunks_that_are_saved_later_are_pinned_too(kept, cluster):
    before = len(pins(cluster))
    hashes = list(kept.node.chain(4, 5).hashes)
    kept.keeper.ends(Hints(retain_seconds=30), hashes)
    kept.node.put(4)
    until(lambda: len(pins(cluster)) == before + 1)
    assert kept.counts["pinned_chunks"] == 0
    put(kept.node.open.session, kept.node.open.namespace, kept.node.chain(4, 5))
    until(lambda: kept.counts["pinned_chunks"] == 2)
    assert len(pins(cluster)) == before + 1, "one pin, of both"


class Granter:
    """A connection to a node that pins some of the chunks; its next pin has the number 7."""

    def __init__(self, chunks: int) -> None:
        self.ended: list[int] = []
        pin = SimpleNamespace(pin=7, chunks=chunks)
        self.session = SimpleNamespace(pin=lambda *_: pin, unpin=self.ended.append)
        self.namespace = SimpleNamespace(chain=list)


def test_a_pin_of_a_lost_connection_ends_no_pin_of_that_number_at_the_next(monkeypatch):
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (0.01,) * 3)
    lost, first, last = Granter(0), Granter(0), Granter(1)
    connections, counts = iter([lost, first, first, last]), Counts()
    keeper = Keeper(SimpleNamespace(current=lambda: next(connections)), counts)
    keeper.ends(Hints(retain_seconds=30), [bytes(32)])
    counted = Counted(counts)
    until(lambda: counted["pinned_chunks"] == 1)
    keeper.close()
    assert (lost.ended, first.ended, last.ended) == ([], [7], [])


def test_a_session_has_the_pin_of_its_last_turn(kept, cluster):
    before = len(pins(cluster))
    for turn in range(1, 4):
        hints = Hints(retain_seconds=30, session="alice")
        kept.keeper.comes(hints)
        kept.keeper.ends(hints, kept.node.put(*range(10 * turn, 10 * turn + 2)))
        until(lambda turn=turn: kept.counts["pinned_chunks"] == 2 * turn)
        until(lambda: len(pins(cluster)) == before + 1)


def test_a_turn_whose_chunks_never_come_leaves_the_pin_of_the_next_turn(monkeypatch):
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (0.01,) * 1_000)
    first, second, pinned, ended = [b"a", b"never saved"], [b"a", b"b", b"c"], [], []

    def pin(_, chain: list[bytes], __) -> SimpleNamespace:
        pinned.append(chain)
        return SimpleNamespace(pin=len(pinned), chunks=1 if chain == first else len(chain))

    session = SimpleNamespace(pin=pin, unpin=ended.append)
    node, counts = SimpleNamespace(session=session, namespace=SimpleNamespace(chain=list)), Counts()
    keeper, hints = Keeper(SimpleNamespace(current=lambda: node), counts), Hints(retain_seconds=30, session="alice")
    keeper.comes(hints)
    keeper.ends(hints, first)
    until(lambda: pinned)
    keeper.comes(hints)
    keeper.ends(hints, second)
    until(lambda: not keeper._pins and pinned.count(second) == 1)
    keeper.close()
    assert ended == [number for number, chain in enumerate(pinned, 1) if chain == first], "only the second turn has a pin"


@pytest.mark.parametrize("fault", ["an error", "too many tasks"])
def test_the_next_turn_ends_the_pin_of_a_part_though_no_further_try_succeeded(monkeypatch, fault):
    monkeypatch.setattr(keeping, "AGAIN_SECONDS", (0.01,))
    monkeypatch.setattr(keeping, "MOST_TASKS", 1 if fault == "an error" else 0)
    first, second, pinned, ended = [b"a", b"not yet saved"], [b"a", b"b"], [], []

    def pin(_, chain: list[bytes], __) -> SimpleNamespace:
        pinned.append(chain)
        if chain == first and pinned.count(first) == 2:
            raise larder_kv.RefusedError("no more pins")
        return SimpleNamespace(pin=len(pinned), chunks=1 if chain == first else 2)

    session = SimpleNamespace(pin=pin, unpin=ended.append)
    node, counts = SimpleNamespace(session=session, namespace=SimpleNamespace(chain=list)), Counts()
    keeper, counted = Keeper(SimpleNamespace(current=lambda: node), counts), Counted(counts)
    for turn, hashes in enumerate((first, second)):
        task = keeping.Task("pin", hashes, "alice", turn, time.monotonic(), time.monotonic() + 30)
        keeper._do(task)
        if turn == 0 and fault == "an error":
            with pytest.raises(larder_kv.RefusedError):
                keeper._do(task)
    assert counted["pinned_chunks"] == 2 and ended == [1], "only the second turn has a pin"
    keeper.close()


def test_a_prompt_is_near_when_its_session_is_expected(kept, cluster, request):
    other = Connected(cluster.sockets[1], request.node.name)
    hashes = other.put(6, 7)
    until(lambda: kept.node.tiers(6, 7) == {"peer"})
    start = time.monotonic()
    kept.keeper.ends(Hints(return_seconds=0.5, session="bob"), hashes)
    until(lambda: kept.counts["brought_chunks"] == 2)
    assert time.monotonic() - start > 0.4, "not before it is time"
    assert kept.node.tiers(6, 7) == {"host"}


def test_a_session_that_has_come_back_is_not_waited_for(kept):
    hashes = kept.node.put(8, 9)
    hints = Hints(return_seconds=0.2, session="carol")
    kept.keeper.ends(hints, hashes)
    kept.keeper.comes(hints)
    # The hint of a later turn, whose prompt is brought: tasks are done in order.
    kept.keeper.ends(Hints(return_seconds=0.3, session="carol"), hashes[:1])
    until(lambda: kept.counts["brought_chunks"] > 0)
    assert kept.counts["brought_chunks"] == 1


def test_too_much_is_left_out_and_counted(kept, monkeypatch):
    monkeypatch.setattr(keeping, "MOST_TASKS", 2)
    monkeypatch.setattr(keeping, "MOST_SESSIONS", 2)
    for number in range(4):
        kept.keeper.ends(Hints(return_seconds=3_600, session=f"s{number}"), [bytes(32)])
    assert kept.counts["dropped_hints"] == 2
    assert len(kept.keeper._sessions) == 2


def test_a_slow_prompt_delays_pins_by_its_own_time_only_and_a_pin_that_is_too_late_is_counted():
    begun, may_end, pinned = threading.Semaphore(0), threading.Semaphore(0), []

    @contextmanager
    def collect(_ticket: int, wait: float) -> Iterator[SimpleNamespace]:
        begun.release()
        assert may_end.acquire(timeout=wait)
        yield SimpleNamespace(chunks=1)

    def pin(_, chain: list[bytes], __) -> SimpleNamespace:
        pinned.append(chain)
        return SimpleNamespace(pin=len(pinned), chunks=len(chain))

    session = SimpleNamespace(lookup_and_prefetch=lambda *_, **__: 1, collect=collect, pin=pin, unpin=lambda _: None)
    node, counts = SimpleNamespace(session=session, namespace=SimpleNamespace(chain=list)), Counts()
    keeper, counted = Keeper(SimpleNamespace(current=lambda: node), counts), Counted(counts)
    for _ in range(3):
        keeper.ends(Hints(return_seconds=0.1), [b"slow"])
    assert begun.acquire(timeout=10)
    too_late = time.monotonic() + 0.01
    keeper.ends(Hints(retain_seconds=0.01), [b"too late"])
    keeper.ends(Hints(retain_seconds=30), [b"a", b"b"])
    until(lambda: time.monotonic() > too_late + 0.01)
    may_end.release()
    until(lambda: counted["pinned_chunks"] == 2)
    assert (pinned, counted["dropped_hints"], counted["brought_chunks"]) == ([[b"a", b"b"]], 1, 1)
    for _ in range(2):
        may_end.release()
    keeper.close()


def test_hints_wait_for_no_absent_node(kept):
    kept.node.open = None
    kept.keeper.ends(Hints(retain_seconds=30), [bytes(32)])
    until(lambda: kept.counts["dropped_hints"] == 1)


def test_the_thread_survives_what_goes_wrong(kept):
    hashes = kept.node.put(11)
    kept.keeper.ends(Hints(retain_seconds=30), [b"short"])
    until(lambda: kept.counts["dropped_hints"] == 1)
    kept.keeper.ends(Hints(retain_seconds=30), hashes)
    until(lambda: kept.counts["pinned_chunks"] == 1)
