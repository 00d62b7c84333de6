"""Blocks under single keys against a real node, as SGLang's and LMCache's adapters use them."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import larder_kv
import pytest
from conftest import content, spec, start_cluster, take_all_memory, until
from larder_kv.keyed import Counts, Keyed, groups
from larder_kv.settings import NodeSettings
from ranks import BusySession

BLOCK = 4_096
LOG = logging.getLogger("test")


class Blocks:
    """Blocks in Python's buffers."""

    def __init__(self, buffers):
        self.buffers = buffers

    def fill(self, lease, first):
        for position in range(lease.chunks):
            lease.copy_block(position, self.buffers[first + position])

    def write(self, staged, numbers):
        for chunk, number in zip(staged, numbers, strict=True):
            chunk.copy_from(self.buffers[number])


class Rank:
    """An adapter's objects for one rank."""

    def __init__(self, socket: str, model: str, window_bytes: int = 1 << 20, timeout_seconds: float = 5.0):
        self.counts = Counts()
        settings = NodeSettings(
            socket, window_bytes=window_bytes, reconnect_seconds=0.01, verify="always", timeout_seconds=timeout_seconds
        )
        self.link = settings.link("test", LOG, self.counts.add)
        self.link.wait_for_first_try(10)
        self.keyed = Keyed(self.link, self.counts, timeout_seconds, LOG)
        self.spec = spec(model, pools=(larder_kv.Pool(layers=1, layer_bytes=BLOCK),), flat=True)

    def save(self, numbers):
        return self.keyed.save(self.spec, keys(numbers), Blocks([content(number, BLOCK) for number in numbers]))

    def load(self, numbers):
        buffers = [bytearray(BLOCK) for _ in numbers]
        return self.keyed.load(self.spec, keys(numbers), Blocks(buffers)), [bytes(buffer) for buffer in buffers]

    def exists(self, numbers):
        return self.keyed.exists(self.spec, keys(numbers))

    def counted(self, *names):
        now = self.counts.now()
        return tuple(now[name] for name in names)


def keys(numbers):
    return [number.to_bytes(32, "little") for number in numbers]


@pytest.fixture
def rank(cluster, request):
    made = Rank(cluster.sockets[0], request.node.name)
    yield made
    made.link.close()


def test_threads_that_save_at_the_same_time_do_not_wait_for_each_others_room(cluster):
    """Each call takes half of the window; four calls are under way."""
    rank = Rank(cluster.sockets[0], "threads", window_bytes=8 * BLOCK)
    with ThreadPoolExecutor(4) as threads:
        saved = list(threads.map(lambda call: rank.save(range(16 * call, 16 * call + 16)), range(32)))
    assert saved == [[True] * 16] * 32
    assert rank.counted("saved_keys", "failures", "shed_keys") == (16 * 32, 0, 0)
    rank.link.close()


def test_more_keys_than_a_chain_may_have_are_loaded_in_parts(rank):
    buffers = [bytearray(BLOCK)] * 9_000
    assert rank.save([1]) == [True]
    assert rank.keyed.load(rank.spec, keys(range(1, 9_001)), Blocks(buffers)) == 1
    assert buffers[0] == content(1, BLOCK)
    assert rank.counted("loaded_keys", "missed_keys", "failures") == (1, 8_999, 0)


def test_what_was_saved_is_loaded_under_its_keys(rank):
    assert rank.save([1, 2, 3]) == [True] * 3
    assert rank.load([3, 1]) == (2, [content(3, BLOCK), content(1, BLOCK)])
    assert rank.counted("saved_keys", "loaded_keys", "loaded_bytes") == (3, 2, 2 * BLOCK)


def test_every_key_is_told_by_itself(rank):
    rank.save([2, 4])
    assert rank.exists([1, 2, 3, 4]) == [False, True, False, True]
    assert rank.counted("asked_keys", "found_keys") == (4, 2)


def test_a_load_ends_at_the_first_key_that_is_not_there(rank):
    rank.save([1, 3])
    loaded, buffers = rank.load([1, 2, 3])
    assert loaded == 1 and buffers[0] == content(1, BLOCK) and not any(buffers[2])
    assert rank.counted("missed_keys") == (2,)


def test_where_a_lease_covers_a_part_the_rest_is_leased_too(rank):
    class Short:
        """A session whose leases cover at most two keys, since an answer has limits."""

        session, is_open = rank.link.current().session, True

        def lease(self, namespace, chain):
            return self.session.lease(namespace, chain.part(0, min(len(chain), 2)))

    rank.save([1, 2, 3, 4, 5])
    opened = rank.link.current()
    opened.session = Short()
    assert rank.load([5, 4, 3, 2, 1]) == (5, [content(number, BLOCK) for number in (5, 4, 3, 2, 1)])
    assert rank.load([1, 2, 3, 9])[0] == 3


def test_what_is_there_is_not_written_again(rank):
    rank.save([1, 2])
    assert rank.save([1, 2, 3]) == [True] * 3
    assert rank.counted("saved_keys", "present_keys", "shed_keys") == (3, 2, 0)


def test_more_than_the_window_holds_is_saved_in_parts(cluster, request):
    rank = Rank(cluster.sockets[0], request.node.name, window_bytes=4 * BLOCK)
    numbers = list(range(1, 12))
    assert all(rank.save(numbers))
    assert rank.load(numbers) == (11, [content(number, BLOCK) for number in numbers])
    rank.link.close()


def test_more_than_one_reservation_may_have_is_saved_in_parts(request):
    """A session may have a quarter of the arena reserved, and its window is larger."""
    small = start_cluster("--nodes", "1", "--arena-bytes", "4MiB")
    rank = Rank(small.sockets[0], request.node.name, window_bytes=4 << 20)
    numbers = range(2 * (1 << 20) // BLOCK)
    assert rank.save(numbers) == [True] * len(numbers)
    assert rank.load(numbers)[0] == len(numbers)
    rank.link.close()
    small.stop()


def test_keys_are_saved_from_the_last_on_with_those_of_their_priority():
    five = keys(range(5))
    assert list(groups(five, 3, ())) == [([4, 3, 2], 0), ([1, 0], 0)]
    assert list(groups(five, 3, [1, 0, 0, 2, 2])) == [([4, 3], 2), ([2, 1], 0), ([0], 1)]
    assert list(groups([], 3, ())) == []
    assert list(groups(keys([1, 2, 1, 2]), 3, ())) == [([3, 2], 0), ([1, 0], 0)]


def test_a_key_that_comes_twice_in_a_call_is_saved_and_loaded_in_both_places(rank):
    assert rank.save([1, 2, 1]) == [True] * 3
    assert rank.load([2, 1, 2, 2, 1]) == (5, [content(number, BLOCK) for number in (2, 1, 2, 2, 1)])
    assert rank.exists([1, 1, 3, 2, 3]) == [True, True, False, True, False]
    assert rank.counted("saved_keys", "present_keys", "failures") == (2, 1, 0)


def test_more_keys_than_one_question_holds_are_asked_in_parts(rank, monkeypatch):
    monkeypatch.setattr("larder_kv.keyed.LOOKUP_KEYS", 2)
    rank.save([1, 4, 5])
    assert rank.exists([1, 2, 3, 4, 5]) == [True, False, False, True, True]


def test_without_a_node_everything_is_a_miss_and_counted(tmp_path):
    rank = Rank(str(tmp_path / "nobody.sock"), "nobody")
    assert rank.exists([1]) == [False] and rank.load([1])[0] == 0 and rank.save([1]) == [False]
    assert rank.counted("without_node", "missed_keys", "shed_keys") == (3, 1, 1)
    rank.link.close()


def test_a_node_that_stops_is_a_miss_and_one_that_comes_is_used(tmp_path):
    folder = str(tmp_path / "cluster")
    running = start_cluster("--nodes", "1", "--arena-bytes", "16MiB", "--dir", folder)
    rank = Rank(running.sockets[0], "comes and goes")
    assert rank.save([1]) == [True]
    running.stop()
    assert rank.load([1])[0] == 0
    assert sum(rank.counted("failures", "without_node")) == 1
    running = start_cluster("--nodes", "1", "--arena-bytes", "16MiB", "--dir", folder)
    until(lambda: rank.save([1]) == [True])
    assert rank.load([1]) == (1, [content(1, BLOCK)])
    rank.link.close()
    running.stop()


def test_a_node_without_room_sheds_and_is_counted(tmp_path):
    running = start_cluster("--nodes", "1", "--arena-bytes", "4MiB")
    rank = Rank(running.sockets[0], "full")
    taken = take_all_memory(running.sockets[0])
    assert rank.save([1]) == [False]
    assert rank.counted("busy", "shed_keys") == (1, 1)
    assert taken
    rank.link.close()
    running.stop()


def test_a_save_waits_a_moment_for_a_node_that_is_busy(rank):
    opened = rank.link.current()
    session, opened.session = opened.session, BusySession(opened.session, 3)
    assert rank.save([1, 2]) == [True, True]
    assert rank.counted("busy", "shed_keys") == (0, 0)
    opened.session = BusySession(session, 1_000)
    assert rank.save([3]) == [False]
    assert rank.counted("busy", "shed_keys") == (1, 1)


def test_threads_that_find_no_room_give_up_in_time(cluster):
    rank = Rank(cluster.sockets[0], "no room", window_bytes=4 * BLOCK, timeout_seconds=1.0)
    session = rank.link.current().session
    namespace = rank.link.current().namespace(rank.spec)
    # Nobody gives this room back.
    held = session.reserve(namespace, namespace.chain(keys(range(100, 104))))
    room = session.stage_chunks(held, held.chunks)
    with ThreadPoolExecutor(4) as threads:
        before = time.monotonic()
        saved = list(threads.map(lambda call: rank.save(range(2 * call, 2 * call + 2)), range(4)))
        assert saved == [[False] * 2] * 4 and time.monotonic() - before < 3, "not one timeout after the other"
    del room
    rank.link.close()
