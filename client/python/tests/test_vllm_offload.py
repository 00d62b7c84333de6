"""The tier below vLLM's own offloading against a real node, and the node's events, without vLLM."""

import http.client
import http.server
import json
import logging
import queue
import socket
import threading
from dataclasses import replace

import larder_kv
import pytest
from conftest import spec, start_cluster, until
from larder_kv.vllm import events as following
from larder_kv.vllm import offload
from larder_kv.vllm.events import Event, Held, NodeEvents
from larder_kv.vllm.node import Node
from larder_kv.vllm.offload import Offload
from ranks import purge_before_commits

ROWS, ROW_BYTES = 8, 4_096


def row_of(value: int, row_bytes: int = ROW_BYTES) -> bytes:
    return bytes([value]) * row_bytes


class Tier:
    """Rows of host memory of its own, and the object that moves them."""

    def __init__(
        self, socket: str, model: str, window_bytes: int = 1 << 20, threads: int = 2, row_bytes: int = ROW_BYTES
    ):
        self.memory = bytearray(b"".join(row_of(value, row_bytes) for value in range(ROWS)))
        pool = larder_kv.Pool(layers=1, layer_bytes=row_bytes)
        namespace = spec(model, pools=[pool], flat=True)
        options = {"window_bytes": window_bytes, "verify": "always", "timeout": 5.0}
        self.node = Node(lambda: larder_kv.Session(socket, **options), namespace, [0], 0.01)
        self.node.wait_for_first_try(10)
        rows = memoryview(self.memory).cast("B", (ROWS, row_bytes))
        self.offload = Offload(self.node, rows, rows.strides[0], threads)

    def found(self, keys: list[bytes]) -> list[bool]:
        assert [self.offload.lookup(key) for key in keys] == [None] * len(keys)
        self.offload.flush()
        until(lambda: all(self.offload.lookup(key) is not None for key in keys))
        return [bool(self.offload.lookup(key)) for key in keys]

    def close(self) -> None:
        self.offload.close()
        self.node.close()


@pytest.fixture
def tiers(cluster, request):
    made = [Tier(socket, request.node.name) for socket in cluster.sockets]
    yield made
    for tier in made:
        tier.close()


def keys(count: int) -> list[bytes]:
    """Keys of a block's hash and the number of its group."""
    return [bytes([number + 1]) * 32 + (0).to_bytes(4, "big") for number in range(count)]


def test_jobs_at_the_same_time_do_not_wait_for_each_others_room(cluster):
    """Each job takes half of the window; four jobs are under way."""
    tier = Tier(cluster.sockets[0], "jobs", window_bytes=8 * ROW_BYTES, threads=4)
    for job in range(32):
        names = [bytes([job, number]) * 16 for number in range(ROWS)]
        tier.offload.store(job, names, list(range(ROWS)))
    tier.offload.drain()
    assert [ended.success for ended in tier.offload.finished()] == [True] * 32
    tier.close()


def test_rows_that_one_engine_stored_another_loads_by_their_keys(tiers):
    first, second = tiers
    first.offload.store(1, keys(4), [3, 2, 1, 0])
    first.offload.drain()
    (stored,) = first.offload.finished()
    assert (stored.job, stored.success, stored.bytes) == (1, True, 4 * ROW_BYTES)
    assert not first.offload.has_jobs()
    until(lambda: second.offload.forget(keys(5)) or second.found(keys(5)) == [True] * 4 + [False])
    second.offload.load(7, [keys(4)[2], keys(4)[0]], [5, 6])
    second.offload.drain()
    (loaded,) = second.offload.finished()
    assert loaded.success
    rows = [bytes(second.memory[row * ROW_BYTES : (row + 1) * ROW_BYTES]) for row in (5, 6, 7)]
    assert rows == [row_of(1), row_of(3), row_of(7)], "and no other row"


def test_a_load_says_which_of_its_keys_came(tiers):
    first, _ = tiers
    first.offload.store(1, [keys(3)[0], keys(3)[2]], [1, 2])
    first.offload.drain()
    first.offload.load(2, keys(3), [5, 6, 7])
    first.offload.drain()
    loaded = first.offload.finished()[-1]
    assert not loaded.success and loaded.keys == [keys(3)[0], keys(3)[2]]
    assert first.memory[6 * ROW_BYTES : 7 * ROW_BYTES] == row_of(6)


def test_rows_that_are_too_many_for_one_reservation_are_stored_in_parts():
    """A session may have a quarter of the arena reserved."""
    small = start_cluster("--nodes", "1", "--arena-bytes", "8MiB")
    tier = Tier(small.sockets[0], "in parts", window_bytes=1 << 20, row_bytes=96 << 10)
    names = [bytes([number]) * 36 for number in range(40)]
    tier.offload.store(1, names, [number % ROWS for number in range(40)])
    tier.offload.drain()
    (stored,) = tier.offload.finished()
    assert stored.success and stored.keys == names
    tier.close()
    small.stop()


def test_storing_what_is_there_is_no_error(tiers):
    first, _ = tiers
    for job in range(2):
        first.offload.store(job, keys(2), [0, 1])
        first.offload.drain()
    assert [ended.success for ended in first.offload.finished()] == [True, True]


def test_rows_that_are_purged_during_their_store_do_not_count_as_stored(tiers, cluster):
    first, _ = tiers
    purge_before_commits(cluster, first.node)
    first.offload.store(1, keys(2), [0, 1])
    first.offload.drain()
    (stored,) = first.offload.finished()
    assert (stored.success, stored.keys, stored.bytes) == (False, [], 0)
    assert first.found(keys(2)) == [False, False]


def test_more_keys_are_looked_up_at_once_than_one_message_holds(tiers):
    first, _ = tiers
    many = [number.to_bytes(36, "big") for number in range(10_000)]
    first.offload.store(1, [many[1], many[9_000]], [0, 1])
    first.offload.drain()
    first.offload.forget(many)
    found = first.found(many)
    assert [number for number, is_there in enumerate(found) if is_there] == [1, 9_000]


def test_a_key_that_was_forgotten_before_the_node_was_asked_is_looked_up_once(tiers, monkeypatch):
    first, _ = tiers
    first.offload.store(1, keys(1), [0])
    first.offload.drain()
    first.offload.forget(keys(1))
    monkeypatch.setattr(offload, "MOST_KNOWN", 2)
    assert [first.offload.lookup(key) for key in keys(3)] == [None] * 3
    assert first.found(keys(1)) == [True]


def test_a_stored_key_that_the_node_no_longer_has_is_not_found(tiers, cluster):
    first, _ = tiers
    first.offload.store(1, keys(2), [0, 1])
    first.offload.drain()
    cluster.purge(first.node.current().namespace.fingerprint)
    assert first.found(keys(2)) == [False, False]


def test_an_answer_that_was_under_way_when_its_key_was_to_be_forgotten_is_not_kept(tiers):
    first, _ = tiers
    assert first.offload.lookup(keys(1)[0]) is None
    first.offload.forget(keys(1))
    first.offload.flush()
    first.offload.drain()
    assert first.found(keys(1)) == [False], "it is asked for anew"


def test_what_an_earlier_node_had_is_forgotten_with_it(tiers):
    first, _ = tiers
    assert first.found(keys(1)) == [False]
    later = replace(first.node.current())
    first.node.current = lambda: later
    assert first.found(keys(1)) == [False], "it is asked for anew"


def test_without_a_node_nothing_is_found_and_jobs_fail(tmp_path):
    tier = Tier(str(tmp_path / "nobody.sock"), "nobody")
    assert tier.found(keys(2)) == [False, False]
    tier.offload.store(1, keys(2), [0, 1])
    tier.offload.load(2, keys(2), [0, 1])
    tier.offload.drain()
    assert {(ended.job, ended.success) for ended in tier.offload.finished()} == {(1, False), (2, False)}
    tier.close()


def told(held: Held, kind: str, name: int, index: int = 0, namespace: str = "n") -> list[Event]:
    held.line(f"event: {kind}")
    hashes = {"hash": bytes([name] * 32).hex(), "parent": bytes([name - 1] * 32).hex()}
    return held.line("data: " + json.dumps({"device": 0, "namespace": namespace, "index": index} | hashes))


def stored(name: int, parent: int | None = None) -> Event:
    return Event(bytes([name] * 32), None if parent is None else bytes([parent] * 32), True)


def gone(name: int) -> Event:
    return Event(bytes([name] * 32), None, False)


def test_events_tell_what_came_and_went_and_nothing_twice():
    held = Held()
    held.begin(("n", 0))
    assert told(held, "held", 1) == [stored(1)]
    assert told(held, "held", 2, index=1) == [stored(2, parent=1)]
    held.line("event: live")
    assert held.line("data: {}") == []
    assert told(held, "admit", 2, index=1) == []
    assert told(held, "admit", 3, namespace="other") == []
    assert told(held, "admit", 3) == [stored(3)]
    assert told(held, "evict", 2) == [gone(2)]
    assert told(held, "evict", 2) == []


def test_what_a_new_snapshot_lacks_has_gone():
    held = Held()
    held.begin(("n", 0))
    for name in (1, 2):
        told(held, "held", name)
    held.line("event: live")
    held.line("data: {}")
    held.begin(("n", 0))
    assert told(held, "held", 2) == []
    assert told(held, "held", 3) == [stored(3)]
    held.line("event: live")
    assert held.line("data: {}") == [gone(1)]
    assert told(held, "evict", 3) == [gone(3)]


def test_what_the_device_before_had_has_gone_when_the_engine_uses_another():
    held = Held()
    held.begin(("n", 0))
    told(held, "held", 1)
    held.line("event: live")
    held.line("data: {}")
    held.begin(("n", 1))
    assert told(held, "held", 1) == [], "it is the other device's"
    held.line("event: live")
    assert held.line("data: {}") == [gone(1)]


def test_a_nodes_events_are_followed(tmp_path):
    running = start_cluster("--nodes", "1", "--arena-bytes", "16MiB", "--dir", str(tmp_path))
    session = larder_kv.Session(running.sockets[0], window_bytes=1 << 20)
    namespace = session.register(spec("events"))
    chain = namespace.chain([bytes([name]) * 32 for name in (1, 2)])
    for position in (reservation := session.reserve(namespace, chain)).chunks:
        session.commit(reservation, [session.stage(reservation, position)])
    events = NodeEvents(running.http[0], lambda: (namespace.fingerprint, 0), 0.01)
    seen: list[Event] = []
    until(lambda: seen.extend(events.take()) or len(seen) >= 2)
    assert seen == [stored(1), stored(2, parent=1)]
    later = namespace.chain([bytes([name]) * 32 for name in (1, 2, 3)])
    session.commit(reservation := session.reserve(namespace, later), [session.stage(reservation, 2)])
    until(lambda: seen.extend(events.take()) or len(seen) >= 3)
    assert seen[2] == stored(3, parent=2)
    stream = events._connection.sock
    assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "a node whose host is gone is noticed"
    probing = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert [stream.getsockopt(socket.IPPROTO_TCP, option) for option in probing] == [30, 10, 3]
    events.close()
    running.stop()


def test_a_lookup_that_fails_in_any_way_is_a_miss(tiers, monkeypatch):
    first, _ = tiers

    class Broken:
        @property
        def session(self):
            raise BaseException("a panic")

    with monkeypatch.context() as patch:
        broken = Broken()
        patch.setattr(first.node, "current", lambda: broken)
        assert first.found(keys(2)) == [False, False]
        first.offload.store(1, keys(2), [0, 1])
        first.offload.drain()
    assert [ended.success for ended in first.offload.finished()] == [False]


def test_an_idle_engine_reads_events_no_further_than_a_limit_and_later_misses_none(monkeypatch):
    monkeypatch.setattr(following, "MOST_WAITING", 3)
    lines, streams = queue.Queue(), []

    class Node(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            streams.append(self)
            self.send_response(200)
            self.end_headers()
            while line := lines.get():
                self.wfile.write(line.encode())

        def log_message(self, *_):
            pass

    def send(kind: str, *names: int) -> None:
        for name in names:
            one = {"device": 0, "namespace": "n", "index": 0, "hash": bytes([name] * 32).hex()}
            lines.put(f"event: {kind}\ndata: {json.dumps(one)}\n")

    with http.server.HTTPServer(("127.0.0.1", 0), Node) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        events = NodeEvents(f"127.0.0.1:{server.server_address[1]}", lambda: ("n", 0), 0.001)
        send("held", *range(1, 9))
        send("live", 0)
        until(lambda: lines.empty() and len(events._waiting) == 3)
        assert len(streams) == 1
        seen: list[Event] = []

        def has_taken(number: int) -> bool:
            taken = events.take()
            assert len(taken) <= 3
            seen.extend(taken)
            return len(seen) == number

        until(lambda: has_taken(8))
        send("evict", 1)
        send("admit", 9, 10, 11)
        until(lambda: len(events._waiting) == 3)
        # The stream ends meanwhile. Whatever changed by then follows from a new snapshot.
        lines.put("")
        send("held", *range(3, 12))
        send("live", 0)
        until(lambda: has_taken(13))
        assert len(streams) == 2
        send("admit", 12, 13, 14, 15)
        until(lambda: len(events._waiting) == 3)
        events.close()
        assert not events._thread.is_alive()
        lines.put("")
        server.shutdown()
    comes = [stored(name) for name in range(1, 9)]
    assert seen == [*comes, gone(1), stored(9), stored(10), stored(11), gone(2)]


def test_events_that_are_none_end_their_stream_and_the_next_one_is_followed(caplog):
    streams = [
        'event: held\ndata: {"device": 0, "namespace": "n", "index": 0}\n',
        "event: held\ndata: []\n",
        'event: held\ndata: {"device": 0, "namespace": "n", "index": 0, "hash": "%s"}\n' % ("07" * 32),
    ]

    class Node(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(streams.pop(0).encode() if streams else b"")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Node) as server, caplog.at_level(logging.WARNING, "vllm.larder"):
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        events = NodeEvents(f"127.0.0.1:{server.server_address[1]}", lambda: ("n", 0), 0.001)
        seen: list[Event] = []
        until(lambda: seen.extend(events.take()) or seen)
        events.close()
        server.shutdown()
    assert seen == [stored(7)]
    assert "no events from http://127.0.0.1:" in caplog.text


@pytest.mark.parametrize("error", [OSError("not connected"), AttributeError("'NoneType' object has no attribute 'shutdown'")])
def test_events_end_though_their_socket_was_closed_meanwhile(error):
    class Socket:
        def shutdown(self, _):
            raise error

    events = NodeEvents("127.0.0.1:1", lambda: None, 0.01)
    events._connection = http.client.HTTPConnection("127.0.0.1:1")
    events._connection.sock = Socket()
    events.close()
    assert not events._thread.is_alive()
