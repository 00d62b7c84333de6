"""The thread that keeps a session open, and the connector's other threads: no fault ends them."""

import logging
import threading
import weakref

from conftest import start_cluster, until
from larder_kv.link import MOST_REASONS, Link
from larder_kv.vllm.plan import Load
from test_vllm_transfers import Rank, hashes


class Panic(BaseException):
    """An error like a panic of native code."""


def test_a_link_outlives_whatever_a_try_raises_and_logs_each_reason_once(caplog):
    reasons = [OSError("absent"), Panic("bug"), OSError("absent"), SystemExit(3), KeyError("x"), Panic("bug")]
    waiting, counted = list(reasons), []

    def connect() -> str:
        if waiting:
            raise waiting.pop(0)
        return "a session"

    with caplog.at_level(logging.INFO, "test"):
        link = Link(connect, 0.001, logging.getLogger("test"), counted.append)
        until(lambda: link.current() == "a session")
    assert counted == ["failed_connects"] * len(reasons)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warned] == [
        "no Larder node for now: absent",
        "no Larder node for now: bug",
        "no Larder node for now: 3",
        "no Larder node for now: 'x'",
    ]
    # Only unexpected reasons have a traceback.
    assert [bool(record.exc_info) for record in warned] == [False, True, True, True]
    link.close()


def test_a_link_that_was_lost_tells_again_why_and_bounds_what_it_tells(caplog):
    ready, failed = threading.Event(), []
    ready.set()

    def connect() -> str:
        if not ready.is_set():
            failed.append(None)
            raise OSError(f"reason {len(failed)}")
        return "a session"

    with caplog.at_level(logging.INFO, "test"):
        link = Link(connect, 0.0001, logging.getLogger("test"))
        until(lambda: link.current() is not None)
        ready.clear()
        link.lost("a session")
        until(lambda: len(failed) > 3 * MOST_REASONS)
        ready.set()
        until(lambda: link.current() is not None)
    link.close()
    assert sum(record.getMessage().startswith("no Larder node") for record in caplog.records) == MOST_REASONS


def test_a_load_that_cannot_be_asked_for_is_computed_and_the_next_one_comes(cluster):
    rank = Rank(cluster.sockets[0], "impossible loads")
    rank.fill(0, 1)
    rank.fill(1, 2)
    rank.save("a", 1)
    impossible = Load("b", [b"no hash of 32 bytes"], 0, [3, 4])
    rank.loader.load_soon([impossible])
    until(lambda: rank.loader.take_done() == {"b"})
    assert rank.loader.take_failed() == {3, 4}
    rank.loader.load_now([impossible]).wait_all()
    assert rank.loader.take_failed() == {3, 4}
    rank.loader.load_soon([Load("c", hashes(1), 0, [5, 6])])
    until(lambda: rank.loader.take_done() == {"c"})
    assert rank.loader.take_failed() == set() and rank.values(5) == [1, 2, 3]
    rank.close()


def test_a_prefetch_that_panics_is_a_miss_and_the_next_one_is_found(cluster, monkeypatch):
    rank = Rank(cluster.sockets[0], "panics")
    rank.save("a", 1)

    class Broken:
        @property
        def session(self):
            raise Panic("bug")

    with monkeypatch.context() as patch:
        patch.setattr(rank.node, "current", Broken)
        first = rank.prefetcher.start("b", hashes(1), 1_000, False)
        assert rank.prefetcher.look(first, 0) == 0
    second = rank.prefetcher.start("c", hashes(1), 1_000, False)
    assert rank.prefetcher.look(second, 10) == 1
    rank.close()


def test_a_link_that_does_not_begin_opens_nothing_until_it_is_told_to():
    opened = []
    link = Link(lambda: opened.append(None) or "a session", 0.001, logging.getLogger("test"), begins=False)
    link.wait_for_first_try(0.01)
    assert not opened and link.current() is None
    link.begin()
    link.wait_for_first_try(10)
    assert link.current() == "a session" and len(opened) == 1
    link.close()
    Link(lambda: opened.append(None), 0.001, logging.getLogger("test"), begins=False).close()
    assert len(opened) == 1, "nor one that is closed before"


def test_a_link_that_is_told_to_begin_while_it_opens_a_session_opens_another():
    """The first session may be at an actor that the engine does not use any more."""
    opening, told, opened = threading.Event(), threading.Event(), []

    def connect() -> int:
        opening.set()
        told.wait(10)
        opened.append(None)
        return len(opened)

    link = Link(connect, 0.001, logging.getLogger("test"))
    opening.wait(10)
    link.begin()
    told.set()
    until(lambda: link.current() == 2)
    link.close()


def test_an_idle_link_lets_a_session_go_that_has_ended(monkeypatch):
    """A session has the memory of its node, whose next life needs it."""
    monkeypatch.setattr("larder_kv.link.LOOK_SECONDS", 0.01)

    class Ends:
        is_over = False

    opened = [Ends()]
    ends = weakref.ref(opened[0])

    def connect() -> Ends:
        if not opened:
            raise ConnectionRefusedError("no node")
        return opened.pop()

    link = Link(connect, 0.001, logging.getLogger("test"), is_open=lambda session: not session.is_over)
    link.wait_for_first_try(10)
    assert ends() is not None
    ends().is_over = True
    until(lambda: ends() is None)
    link.close()


def test_a_link_opens_another_session_once_the_node_has_ended_the_first(tmp_path):
    """Nobody has to ask the ended session for anything."""
    own = start_cluster("--nodes", "1", "--arena-bytes", "16MiB", "--dir", str(tmp_path))
    rank = Rank(own.sockets[0], "ended")
    first = rank.node.current()
    assert first.session.is_open
    own.stop()
    until(lambda: not first.session.is_open)
    assert rank.node.current() is None
    again = start_cluster("--nodes", "1", "--arena-bytes", "16MiB", "--dir", str(tmp_path))
    until(lambda: rank.node.current() is not None)
    assert rank.node.current() is not first
    rank.close()
    again.stop()
