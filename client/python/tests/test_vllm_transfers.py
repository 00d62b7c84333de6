"""Prefetches, loads and saves of the connector against a real node, without vLLM."""

import threading
import time
from dataclasses import replace

import larder_kv
import pytest
from conftest import FakeGpu, spec, standing_still, start_cluster, take_all_memory, until
from larder_kv.vllm import memory
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.handoff import Writer
from larder_kv.vllm.memory import Memory, PoolMemory
from larder_kv.vllm.node import Node
from larder_kv.vllm.plan import Load, Save, Shape
from larder_kv.vllm.prefetch import Prefetch, Prefetcher
from larder_kv.vllm.settings import Settings
from larder_kv.vllm.transfer import LayerGate
from ranks import BusySession, RankThreads, paged, purge_before_commits

LAYERS, PAGES, PAGE_BYTES = 3, 16, 4_096
SHAPE = Shape(chunk_tokens=32, block_tokens=16)
BLOCK_BYTES = LAYERS * 2 * PAGE_BYTES


class Rank(RankThreads):
    """One rank of a model whose layers are alike."""

    def __init__(
        self, socket: str, model: str, queue_chunks: int = 64, gpu: FakeGpu | None = None, timeout_seconds: float = 10.0
    ):
        self.region = bytearray(LAYERS * PAGES * PAGE_BYTES)
        page = {"page_stride": PAGE_BYTES, "pages": PAGES, "run_bytes": PAGE_BYTES}
        layers = [
            larder_kv.LayerPages(region=0, offset=layer * PAGES * PAGE_BYTES, **page) for layer in range(LAYERS)
        ]
        pages = paged(gpu, [self.region], layers, pages_per_chunk=2)
        pool = larder_kv.Pool(layers=LAYERS, layer_bytes=2 * PAGE_BYTES)
        namespace = spec(model, hash_algorithm="sha256_cbor", hash_seed="test", pools=[pool])
        memory = Memory([PoolMemory(pages, (0,) * LAYERS)])
        super().__init__(
            socket, namespace, SHAPE, memory, queue_chunks=queue_chunks, timeout_seconds=timeout_seconds
        )

    def fill(self, page: int, value: int) -> None:
        for layer in range(LAYERS):
            start = (layer * PAGES + page) * PAGE_BYTES
            self.region[start : start + PAGE_BYTES] = bytes([value + layer]) * PAGE_BYTES

    def values(self, page: int) -> list[int]:
        return [self.region[(layer * PAGES + page) * PAGE_BYTES + 17] for layer in range(LAYERS)]

    def save(self, request: str, chunks: int, attempt: int | None = None) -> None:
        """Saves the first chunks of the prompt, which are in pages 0 on, and waits."""
        gate = LayerGate(LAYERS)
        gate.open_all()
        self.saver.save_soon([Save(request, hashes(chunks), 0, list(range(2 * chunks)), attempt)], gate)
        until(lambda: not self.saver.is_reading(request))


def hashes(chunks: int) -> list[bytes]:
    return [bytes([number + 1]) * 32 for number in range(chunks)]


@pytest.fixture(params=["host", "gpu"])
def rank(cluster, fake_gpu, request):
    made = Rank(cluster.sockets[0], request.node.name, gpu=fake_gpu if request.param == "gpu" else None)
    yield made
    made.close()


def test_what_was_saved_is_loaded_into_other_blocks(rank):
    for page in range(4):
        rank.fill(page, 10 * page)
    rank.save("a", 2)
    rank.loader.load_soon([Load("b", hashes(2), 1, [9, 8, 7])])
    until(lambda: rank.loader.take_done() == {"b"})
    assert [rank.values(page) for page in (9, 8, 7)] == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert rank.loader.take_failed() == set()
    counts = rank.counts.take()
    assert counts["saved_chunks"] == 2 and counts["saved_bytes"] == 2 * BLOCK_BYTES
    assert counts["loaded_blocks"] == 3 and counts["loaded_bytes"] == 3 * LAYERS * PAGE_BYTES


def test_a_load_of_more_blocks_than_one_copy_may_have_comes_in_parts(rank, monkeypatch):
    for page in range(4):
        rank.fill(page, 10 * page)
    rank.save("a", 2)
    monkeypatch.setattr(memory, "MAX_PAGES", 2)
    copied = []
    (pool,) = rank.memory._pools

    class Noting:
        def __getattr__(self, name: str) -> object:
            return getattr(pool.pages, name)

        def load(self, lease: larder_kv.Lease, blocks: list[int], **more: object) -> None:
            copied.append(blocks)
            pool.pages.load(lease, blocks, **more)

    rank.memory._pools = [PoolMemory(Noting(), pool.groups)]
    rank.loader.load_soon([Load("b", hashes(2), 1, [9, 8, 7])])
    until(lambda: rank.loader.take_done() == {"b"})
    assert [rank.values(page) for page in (9, 8, 7)] == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert copied == [[9, 8], [7]]


@pytest.mark.parametrize("attempt", [None, 1])
def test_chunks_that_are_purged_during_their_save_do_not_count_as_saved(rank, cluster, attempt):
    purge_before_commits(cluster, rank.node)
    rank.save("a", 2, attempt)
    # The node could not find the next chunk without the chunks before it.
    rank.save("a", 3, attempt)
    assert rank.counts.take() == {"shed_chunks_gone": 5}


def test_a_step_may_read_a_layer_once_it_is_loaded(rank):
    rank.fill(0, 5)
    rank.fill(1, 6)
    rank.save("a", 1)
    gate = rank.loader.load_now([Load("b", hashes(1), 0, [5, 6])])
    for layer in range(LAYERS):
        gate.wait(layer)
        assert (rank.values(5)[layer], rank.values(6)[layer]) == (5 + layer, 6 + layer)


def test_blocks_that_do_not_come_are_told_at_once_and_counted(rank):
    rank.save("a", 1)
    gate = rank.loader.load_now([Load("b", hashes(3), 0, [1, 2, 3, 4, 5, 6])])
    assert rank.loader.has_failed() and rank.loader.take_failed() == {3, 4, 5, 6}
    gate.wait_all()
    rank.loader.load_soon([Load("c", hashes(2), 2, [7, 8])])
    until(lambda: rank.loader.take_done() == {"c"})
    assert rank.loader.take_failed() == {7, 8}
    assert rank.counts.take()["failed_blocks"] == 6


def test_a_prefetch_says_what_is_in_place_and_holds_it(rank):
    rank.save("a", 2)
    prefetch = rank.prefetcher.start("b", hashes(3), 1_000, False)
    assert rank.prefetcher.look(prefetch, 10) == 2 and prefetch.spans == [(0, 2, "host")]
    assert prefetch.lease is not None and prefetch.lease.chunks == 2
    rank.prefetcher.drop("b")
    assert prefetch.lease is None and rank.prefetcher.find("b") is None
    assert rank.counts.take()["found_tokens"] == 64


def test_prefetches_that_were_dropped_keep_nobody_waiting(rank):
    rank.save("a", 2)
    for _ in range(8):
        rank.prefetcher.start("b", hashes(2), 1_000, False)
    rank.prefetcher.drop("b")
    last = rank.prefetcher.start("c", hashes(2), 1_000, False)
    assert rank.prefetcher.look(last, 10) == 2


def test_layers_are_saved_as_they_are_computed(rank):
    rank.fill(0, 1)
    rank.fill(1, 2)
    gate = LayerGate(LAYERS)
    rank.saver.save_soon([Save("a", hashes(1), 0, [0, 1])], gate)
    for layer in range(LAYERS):
        assert rank.saver.is_reading("a")
        gate.open(layer)
    until(lambda: not rank.saver.is_reading("a"))
    assert rank.counts.take()["saved_chunks"] == 1


def test_blocks_are_copied_only_once_the_engines_stream_is_done_with_them(rank):
    rank.fill(0, 1)
    rank.fill(1, 2)
    computed, free = threading.Event(), threading.Event()
    gate = LayerGate(LAYERS)
    rank.saver.save_soon([Save("a", hashes(1), 0, [0, 1])], gate)
    gate.open_all(computed.wait)
    # The stream's last write counts.
    rank.fill(1, 7)
    computed.set()
    until(lambda: not rank.saver.is_reading("a"))
    rank.loader.load_soon([Load("b", hashes(1), 0, [2, 3])], free.wait)
    rank.fill(3, 99)
    free.set()
    until(lambda: rank.loader.take_done() == {"b"})
    assert (rank.values(2), rank.values(3)) == ([1, 2, 3], [7, 8, 9])


def test_saves_beyond_the_queue_are_shed_and_so_is_what_follows_them(cluster):
    rank = Rank(cluster.sockets[0], "shed", queue_chunks=2)
    closed = LayerGate(LAYERS)
    rank.saver.save_soon([Save("a", hashes(2), 0, [0, 1, 2, 3])], closed)
    rank.saver.save_soon([Save("b", hashes(1), 0, [4, 5])], closed)
    rank.saver.save_soon([Save("b", hashes(2), 1, [6, 7])], closed)
    counts = rank.counts.take()
    assert (counts["shed_chunks_queue"], counts["shed_chunks_gone"]) == (1, 1)
    closed.open_all()
    until(lambda: not rank.saver.is_reading("a"))
    rank.saver.forget("b")
    rank.saver.save_soon([Save("b", hashes(3), 2, [8, 9])], closed)
    until(lambda: not rank.saver.is_reading("b"))
    assert rank.counts.take()["saved_chunks"] == 3
    rank.close()


def test_a_preempted_requests_blocks_are_read_no_more(rank):
    gate = LayerGate(LAYERS)
    rank.saver.save_soon([Save("a", hashes(1), 0, [0, 1])], gate)
    gate.open(0)
    rank.saver.cancel("a")
    # From here on the engine may overwrite the blocks.
    rank.fill(0, 99)
    gate.open_all()
    until(lambda: not rank.saver.is_reading("a"))
    assert rank.counts.take() == {"shed_chunks_gone": 1}
    prefetch = rank.prefetcher.start("b", hashes(1), 1_000, False)
    assert rank.prefetcher.look(prefetch, 10) == 0


def test_a_node_that_has_no_room_sheds_saves():
    small = start_cluster("--nodes", "1", "--arena-bytes", "4MiB")
    rank = Rank(small.sockets[0], "no room")
    taken = take_all_memory(small.sockets[0])
    rank.save("a", 2)
    assert rank.counts.take() == {"shed_chunks_room": 2}
    for reservation in taken:
        reservation.abort()
    # The node hears of the aborts of other sessions when it comes to them.
    until(lambda: rank.saver.forget("a") or rank.save("a", 2) or rank.counts.take().get("saved_chunks") == 2)
    rank.close()
    small.stop()


@pytest.mark.parametrize("attempt", [None, 1])
def test_a_save_larger_than_one_reservation_may_be_is_saved_in_parts(attempt):
    """A session may have a quarter of the arena reserved."""
    small = start_cluster("--nodes", "1", "--arena-bytes", "16MiB")
    rank = Rank(small.sockets[0], "in parts")
    for page in range(2):
        rank.fill(page, 10 * page)
    gate = LayerGate(LAYERS)
    gate.open_all()
    rank.saver.save_soon([Save("a", hashes(200), 0, [0, 1] * 200, attempt)], gate)
    until(lambda: not rank.saver.is_reading("a"))
    counts = rank.counts.take()
    handed_over = counts.pop("handed_over_chunks", 0)
    assert counts == {"saved_chunks": 200, "saved_bytes": 200 * BLOCK_BYTES}
    assert handed_over == (100 if attempt else 0), "the longest part that fits is handed over"
    rank.loader.load_soon([Load("b", hashes(200), 398, [4, 5])])
    until(lambda: rank.loader.take_done() == {"b"})
    assert (rank.values(4), rank.values(5)) == ([0, 1, 2], [10, 11, 12])
    rank.close()
    small.stop()


def test_what_a_hand_over_left_is_saved_when_the_others_of_its_step_hold_no_room(monkeypatch):
    monkeypatch.setattr("larder_kv.vllm.saver.RESERVED_PARTS", 8)
    small = start_cluster("--nodes", "1", "--arena-bytes", "16MiB")
    rank = Rank(small.sockets[0], "left over", queue_chunks=1_000)
    gate = LayerGate(LAYERS)
    gate.open_all()
    # A session may have 170 of these chunks reserved. The first hand-over gets 100 and leaves 101, the second gets 70.
    others = [bytes([number, 255]) * 16 for number in range(70)]
    saves = [Save("a", hashes(201), 0, [0, 1] * 201, attempt=0), Save("b", others, 0, [0, 1] * 70, attempt=0)]
    rank.saver.save_soon(saves, gate)
    until(lambda: not rank.saver.is_reading("a") and not rank.saver.is_reading("b"))
    counts = rank.counts.take()
    assert (counts["handed_over_chunks"], counts["saved_chunks"], counts.get("shed_chunks_room")) == (170, 271, None)
    rank.close()
    small.stop()


def test_what_a_node_refuses_is_counted_apart_and_each_reason_is_logged_once(rank, monkeypatch, caplog):
    def refuse(*_: object, **__: object) -> None:
        error = larder_kv.RefusedError("the node refused: no such thing")
        error.code = "internal"
        raise error

    monkeypatch.setattr("larder_kv.vllm.saver.reserve", refuse)
    for name in ("a", "b"):
        rank.save(name, 2)
    assert rank.counts.take() == {"shed_chunks_refused": 4}
    assert caplog.text.count("chunks are not saved: the node refused: no such thing") == 1


@pytest.mark.parametrize("attempt", [None, 1])
def test_a_save_waits_a_moment_for_a_node_that_is_busy(rank, attempt):
    opened = rank.node.current()
    busy = replace(opened, session=BusySession(opened.session, 3))
    rank.node.current = lambda: busy
    rank.save("a", 2, attempt)
    assert rank.counts.take()["saved_chunks"] == 2
    stays_busy = replace(opened, session=BusySession(opened.session, 1_000))
    rank.node.current = lambda: stays_busy
    rank.save("b", 3, attempt)
    assert rank.counts.take() == {"shed_chunks_room": 3}, "and no longer than that"
    rank.node.current = lambda: opened


def test_an_engine_goes_on_without_its_node_and_uses_it_when_it_comes(tmp_path):
    rank = Rank(str(tmp_path / "node-0.sock"), "late")
    rank.save("a", 1)
    assert rank.counts.take() == {"shed_chunks_node": 1}
    absent = rank.prefetcher.start("b", hashes(1), 1_000, False)
    assert absent.chunks == 0 and rank.counts.take() == {"lookups_without_node": 1}
    rank.saver.forget("a")
    late = start_cluster("--nodes", "1", "--arena-bytes", "16MiB", "--dir", str(tmp_path))
    until(lambda: rank.node.current() is not None)
    rank.save("a", 1)
    assert rank.counts.take()["saved_chunks"] == 1
    late.stop()
    rank.loader.load_soon([Load("c", hashes(1), 0, [3, 4])])
    until(lambda: rank.loader.take_done() == {"c"})
    assert rank.loader.take_failed() == {3, 4}
    rank.close()


def test_threads_end_with_their_engine(cluster):
    before = {thread for thread in threading.enumerate() if thread.name.startswith("larder-")}
    rank = Rank(cluster.sockets[0], "threads end")
    rank.close()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("larder-")} <= before


def test_a_prompt_without_a_whole_chunk_is_counted_and_not_looked_up(rank):
    prefetch = rank.prefetcher.start("short", [], 20, False)
    assert rank.prefetcher.look(prefetch, 0) == 0
    assert rank.counts.take() == {"short_prompts": 1}


def test_a_step_without_work_waits_for_a_load_and_no_longer(rank):
    rank.save("a", 1)
    rank.loader.wait_for_one(60)
    rank.loader.load_soon([Load("b", hashes(1), 0, [5, 6])])
    rank.loader.wait_for_one(60)
    assert rank.loader.take_done() == {"b"}
    rank.loader.wait_for_one(60)


def test_whoever_waits_for_a_lookup_hears_of_its_end(rank):
    rank.save("a", 1)
    prefetch = rank.prefetcher.start("b", hashes(2), 1_000, False)
    assert rank.prefetcher.look(prefetch, 60) == 1 == prefetch.chunks


def test_a_node_that_does_not_answer_costs_one_timeout():
    """Prompts, loads and saves go on without the node, whatever number of them has asked it, and use it when it answers again."""
    own = start_cluster("--nodes", "1", "--arena-bytes", "16MiB")
    rank = Rank(own.sockets[0], "silent", timeout_seconds=1.0)
    rank.save("a", 1)
    gate = LayerGate(LAYERS)
    gate.open_all()
    before = time.monotonic()
    with standing_still(own):
        names = [str(number) for number in range(8)]
        asked = [rank.prefetcher.start(name, hashes(1), 1_000, False) for name in names]
        rank.loader.load_soon([Load(name, hashes(1), 0, [3, 4]) for name in names])
        for name in names:
            rank.saver.save_soon([Save(name, hashes(2), 1, [5, 6])], gate)
        loaded: set[str] = set()
        until(lambda: loaded.update(rank.loader.take_done()) or loaded == set(names))
        until(lambda: all(rank.prefetcher.look(one, 0.01) == 0 for one in asked))
        until(lambda: not any(rank.saver.is_reading(name) for name in names))
        assert time.monotonic() - before < 5, "not one timeout after the other"
        assert rank.prefetcher.look(rank.prefetcher.start("b", hashes(1), 1_000, False), 0) == 0
    assert rank.loader.take_failed() == {3, 4}
    counts = rank.counts.take()
    assert counts["lookups_failed"] == 8 and counts["shed_chunks_node"] == 8 and counts["lookups_without_node"] == 1
    until(lambda: rank.node.current() is not None)
    assert rank.prefetcher.look(rank.prefetcher.start("c", hashes(1), 1_000, False), 10) == 1
    rank.close()
    own.stop()


def test_a_prefetch_waits_no_longer_than_a_request_may_take(cluster, monkeypatch):
    rank = Rank(cluster.sockets[0], "patience", timeout_seconds=4.0)
    rank.settings = rank.prefetcher._settings = replace(rank.settings, prefetch_seconds=60)
    rank.save("a", 1)
    asked = []

    class Prefetches:
        def start(self, *_: object, patience: float, **more: object) -> None:
            asked.append(patience)

    monkeypatch.setattr(rank.prefetcher, "_prefetches_of", lambda _: Prefetches())
    rank.prefetcher.start("b", hashes(1), 1_000, False)
    assert asked == [2.0]
    rank.close()


LONG = 8_192


class LongPrompts:
    """A node that has all chunks of one long prompt, and the prefetches of an engine beside it, which names the engine that
    computed the prompt or does not."""

    def __init__(self, is_handed_over: bool):
        self.cluster = start_cluster("--nodes", "1", "--arena-bytes", "256MiB")
        same = spec("long", hash_algorithm="sha256_cbor", hash_seed="test", pools=[larder_kv.Pool(layers=1, layer_bytes=64)])
        writer = larder_kv.Session(self.cluster.sockets[0])
        namespace = writer.register(same)
        self.names = [number.to_bytes(32, "big") for number in range(LONG)]
        reservation = writer.reserve(namespace, namespace.chain(self.names))
        staged = writer.stage_chunks(reservation, reservation.chunks)
        larder_kv.StagedChunk.copy_all(staged, [bytes(64)] * LONG)
        assert writer.commit(reservation, staged) == LONG
        self.counts, settings = Counts(), Settings(socket=self.cluster.sockets[0])
        self.node = Node(lambda: larder_kv.Session(self.cluster.sockets[0], window_bytes=0), same, [0], 0.01)
        self.node.wait_for_first_try(10)
        self.prefetcher = Prefetcher(self.node, self.counts, settings)
        self.writer = Writer(writer.node, writer.device) if is_handed_over else None

    def start(self, name: str) -> Prefetch:
        return self.prefetcher.start(name, self.names, LONG * 32 + 1, False, self.writer)

    def lease(self) -> larder_kv.Lease:
        """A lease of the engine's session beside its prefetches, as for a load."""
        opened = self.node.current()
        return opened.session.lease(opened.namespace, opened.namespace.chain(self.names))

    def close(self) -> None:
        self.prefetcher.close()
        self.node.close()
        self.cluster.stop()


@pytest.fixture(params=[False, True], ids=["found", "handed over"])
def long_prompts(request):
    made = LongPrompts(request.param)
    yield made
    made.close()


def test_waiting_requests_hold_no_more_than_a_part_of_what_a_session_may(long_prompts):
    """Ten waiting prompts have more chunks than the node grants one session."""
    asked = [long_prompts.start(str(number)) for number in range(10)]

    def ended() -> int:
        long_prompts.prefetcher.go_on()
        return sum(one.chunks is not None for one in asked)

    until(lambda: ended() >= 4)
    assert sum(one.lease is not None for one in asked) == 4
    for one in asked:
        until(lambda one=one: long_prompts.prefetcher.look(one, 0.1) is not None)
        assert one.chunks == LONG and one.lease is not None
        long_prompts.prefetcher.drop(one.request)
    assert long_prompts.counts.take() == {"lookups": 10, "found_tokens": 10 * LONG * 32}


def test_a_prompt_whose_chunks_the_node_could_not_lease_for_now_is_asked_for_again(long_prompts):
    loading = [long_prompts.lease() for _ in range(8)]
    asked = long_prompts.start("a")
    until(lambda: long_prompts.prefetcher.look(asked, 0.1) is None and asked.busy_until is not None)
    for lease in loading:
        lease.release()
    until(lambda: long_prompts.prefetcher.look(asked, 0.1) == LONG)
    assert long_prompts.counts.take() == {"lookups": 1, "found_tokens": LONG * 32}


def test_a_prompt_is_not_asked_for_without_end_at_a_node_that_stays_busy(long_prompts, monkeypatch):
    monkeypatch.setattr(long_prompts.prefetcher, "_settings", Settings(socket="", timeout_seconds=0.1))
    loading = [long_prompts.lease() for _ in range(8)]
    asked = long_prompts.start("a")
    until(lambda: long_prompts.prefetcher.look(asked, 0.01) == 0)
    assert loading and long_prompts.counts.take() == {"lookups": 1, "lookups_failed": 1}
