"""Saves and loads of a hybrid model's groups against a real node, without vLLM."""

import larder_kv
import pytest
from conftest import FakeGpu, spec
from larder_kv.vllm.groups import Group, Kind, pools_of
from larder_kv.vllm.memory import Memory, PoolMemory
from larder_kv.vllm.plan import Save, Shape, load_all_groups, plan_load, save_all_groups
from larder_kv.vllm.transfer import LayerGate
from ranks import RankThreads, paged, writer_at
from test_vllm_transfers import hashes, until

PAGES, CHUNK, NULL = 64, 32, 0
# Attention; a window within a chunk; a window of two chunks, whose layers are in two groups; recurrent state.
GROUPS = [
    (Group(0, Kind.ATTENTION, 16), 512, ["a0", "a1"]),
    (Group(1, Kind.WINDOW, 16, window=17), 512, ["w0"]),
    (Group(2, Kind.WINDOW, 16, window=50), 512, ["x0", "x1"]),
    (Group(3, Kind.WINDOW, 16, window=50), 512, ["x2"]),
    (Group(4, Kind.STATE, 32), 320, ["s0", "s1"]),
]
SHAPE = Shape(CHUNK, 16, 16, 0, tuple(group for group, _, _ in GROUPS[1:]))
POOLS = pools_of(GROUPS, CHUNK)


class HybridRank(RankThreads):
    """One rank of a hybrid model."""

    def __init__(self, socket: str, model: str, queue_chunks: int = 64, gpu: FakeGpu | None = None):
        self.regions = {name: bytearray(PAGES * size) for _, size, names in GROUPS for name in names}
        places, regions = list(self.regions), list(self.regions.values())
        pools = []
        for pool in POOLS:
            page = {"page_stride": pool.page_bytes, "pages": PAGES, "run_bytes": pool.page_bytes}
            layers = [
                larder_kv.LayerPages(region=places.index(layer.name), offset=0, **page) for layer in pool.layers
            ]
            pages = paged(gpu, regions, layers, pages_per_chunk=pool.pages)
            groups = tuple(layer.group for layer in pool.layers)
            pools.append(PoolMemory(pages, groups, pool.kind is Kind.STATE))
        told = [
            larder_kv.Pool(name=one.name, layers=len(one.layers), layer_bytes=one.page_bytes * one.pages, hit=one.hit)
            for one in POOLS
        ]
        namespace = spec(model, hash_algorithm="sha256_cbor", hash_seed="test", pools=told)
        super().__init__(socket, namespace, SHAPE, Memory(pools), queue_chunks=queue_chunks)

    def fill(self, tables: list[list[int]]) -> None:
        """Gives every block its own content, which depends on its group and its place in the prompt."""
        for (_, size, names), blocks in zip(GROUPS, tables, strict=True):
            for name in names:
                for place, block in enumerate(blocks):
                    if block != NULL:
                        self.regions[name][block * size : (block + 1) * size] = content(name, place, size)

    def save(self, chunks: int, tables: list[list[int]], states: dict[tuple[int, int], int], number: int = 7) -> None:
        """Saves the first chunks of the prompt, and waits."""
        gate = LayerGate(self.memory.layers)
        gate.open_all()
        plain = Save("a", hashes(chunks), 0, tables[0][: chunks * 2], number=number)
        self.saver.save_soon([save_all_groups(SHAPE, plain, tables, NULL, states)], gate)
        until(lambda: not self.saver.is_reading("a"))
        assert self.saver.take_ended() == [number]

    def prefetched(self, chunks: int) -> int:
        """The number of the prompt's first chunks that can be restored."""
        prefetch = self.prefetcher.start("b", hashes(chunks), 10_000, False)
        found = self.prefetcher.look(prefetch, 10)
        self.prefetcher.drop("b")
        assert found is not None
        return found


def content(name: str, place: int, size: int) -> bytes:
    return bytes((sum(name.encode()) * 3 + place * 11 + byte) % 251 for byte in range(size))


def tables_at(first: int, chunks: int) -> list[list[int]]:
    """Blocks of all groups; no two groups share a block."""
    sizes = [chunks * CHUNK // group.block_tokens for group, _, _ in GROUPS]
    starts = [first + sum(sizes[:number]) for number in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


@pytest.fixture(params=["host", "gpu"])
def rank(cluster, fake_gpu, request):
    made = HybridRank(cluster.sockets[0], request.node.name, gpu=fake_gpu if request.param == "gpu" else None)
    yield made
    made.close()


def test_a_prefix_ends_where_a_state_was_saved_and_its_blocks_come_back(rank):
    tables = tables_at(1, 3)
    rank.fill(tables)
    # States after the first chunk and the second; the third has none.
    rank.save(3, tables, {(4, CHUNK): tables[4][0], (4, 2 * CHUNK): tables[4][1]})
    assert rank.prefetched(3) == 2
    assert rank.prefetched(1) == 1
    # The loaded blocks go to other places; blocks that a window does not reach are `NULL`.
    others = [[20, 21, 22, 23], [NULL, NULL, NULL, 24], [25, 26, 27, 28], [30, 31, 32, 33], [NULL, 29]]
    load = load_all_groups(SHAPE, plan_load(SHAPE, "b", hashes(2), 0, 64, others[0]), 0, 64, others, NULL)
    rank.loader.load_soon([load])
    until(lambda: rank.loader.take_done() == {"b"})
    assert rank.loader.take_failed() == set() and rank.loader.take_failed_requests({"b"}) == set()
    for (_, size, names), blocks in zip(GROUPS, others, strict=True):
        for name in names:
            for place, block in enumerate(blocks):
                if block != NULL:
                    found = rank.regions[name][block * size : (block + 1) * size]
                    assert found == content(name, place, size), f"{name}, block {place}"
            assert not any(rank.regions[name][:size]), "the block that stands for none was written"
    counts = rank.counts.take()
    assert counts["loaded_blocks"] == 4 + 1 + 4 + 4 + 1
    assert counts["loaded_bytes"] == 512 * (2 * 4 + 1 * 1 + 2 * 4 + 1 * 4) + 320 * 2 * 1


def test_a_load_behind_what_the_engine_has_brings_the_rest_of_the_window(rank):
    tables = tables_at(1, 3)
    rank.fill(tables)
    rank.save(3, tables, {(4, 3 * CHUNK): tables[4][2]})
    others = [
        list(range(20, 26)),
        [NULL] * 5 + [26],
        [NULL, NULL, 40, 41, 27, 28],
        [NULL, NULL, 42, 43, 29, 30],
        [NULL, NULL, 31],
    ]
    load = load_all_groups(SHAPE, plan_load(SHAPE, "b", hashes(3), 64, 32, others[0]), 64, 96, others, NULL)
    rank.loader.load_soon([load])
    until(lambda: rank.loader.take_done() == {"b"})
    came = [("a1", 24, 4), ("w0", 26, 5), ("x0", 28, 5), ("x2", 29, 4), ("x2", 30, 5), ("s0", 31, 2)]
    for name, block, place in came:
        size = len(rank.regions[name]) // PAGES
        assert rank.regions[name][block * size : (block + 1) * size] == content(name, place, size), name
    for name, block in (("a0", 20), ("x0", 40), ("x2", 43)):
        size = len(rank.regions[name]) // PAGES
        assert not any(rank.regions[name][block * size : (block + 1) * size]), "what the engine had was written over"


def test_states_and_windows_that_were_not_saved_at_first_are_added(rank):
    tables = tables_at(1, 3)
    rank.fill(tables)
    passed = [tables[0], *([NULL] * 4 + table[4:] for table in tables[1:4]), tables[4]]
    rank.save(3, passed, {})
    assert rank.prefetched(3) == 0, "no state, no prefix"
    rank.save(3, passed, {(4, 3 * CHUNK): tables[4][2]}, number=8)
    assert rank.prefetched(3) == 0, "the window of two chunks begins in one that has it not"
    rank.save(3, tables, {}, number=9)
    assert rank.prefetched(3) == 3


def test_a_request_of_which_a_chunk_does_not_come_is_computed_as_a_whole(rank):
    tables = tables_at(1, 2)
    rank.fill(tables)
    rank.save(2, tables, {(4, 2 * CHUNK): tables[4][1]})
    others = tables_at(20, 3)
    load = load_all_groups(SHAPE, plan_load(SHAPE, "b", hashes(3), 0, 96, others[0]), 0, 96, others, NULL)
    rank.loader.load_soon([load])
    done: set[str] = set()
    until(lambda: done.update(rank.loader.take_done()) or done == {"b"})
    assert rank.loader.take_failed() == set(), "vLLM cannot tell whose these blocks are"
    assert rank.loader.take_failed_requests({"a"}) == set()
    assert rank.loader.take_failed_requests({"b"}) == {"b"} and rank.loader.take_failed_requests({"b"}) == set()
    assert rank.counts.take()["failed_blocks"] == load.blocks
    assert not any(rank.regions["a0"][20 * 512 :]), "a part of it was loaded"


def test_saves_that_are_shed_or_cancelled_have_ended(cluster):
    rank = HybridRank(cluster.sockets[0], "ended", queue_chunks=2)
    gate = LayerGate(rank.memory.layers)
    tables = tables_at(1, 2)
    for number, request in enumerate(["a", "b"], start=1):
        plain = Save(request, hashes(2), 0, tables[0], number=number)
        rank.saver.save_soon([save_all_groups(SHAPE, plain, tables, NULL, {})], gate)
    assert rank.saver.take_ended() == [2], "there is no place in the queue for the second one"
    rank.saver.cancel("a")
    gate.open_all()
    until(lambda: rank.saver.take_ended() == [1])
    rank.close()


@pytest.fixture(params=["host", "gpu"])
def prefill_and_decode(cluster, fake_gpu, request):
    """Ranks on two nodes."""
    on = fake_gpu if request.param == "gpu" else None
    made = [HybridRank(socket, request.node.name, gpu=on) for socket in cluster.sockets]
    yield made
    for rank in made:
        rank.close()


def handed_over(chunks: int, tables: list[list[int]], states: dict[tuple[int, int], int]) -> Save:
    plain = Save("a", hashes(chunks), 0, tables[0][: chunks * 2], attempt=0, number=7)
    return save_all_groups(SHAPE, plain, tables, NULL, states)


def test_decode_gets_the_layers_of_a_hybrid_prompt_while_prefill_computes_them_and_its_state_at_the_end(prefill_and_decode):
    prefill, decode = prefill_and_decode
    tables = tables_at(1, 3)
    prefill.fill(tables)
    prefetch = decode.prefetcher.start("b", hashes(3), 1_000, False, writer_at(prefill))
    # The engine keeps only the state after the last chunk; windows have passed the first chunk.
    passed = [tables[0], *([NULL] * 2 + table[2:] for table in tables[1:4]), tables[4]]
    computed = LayerGate(prefill.memory.layers)
    prefill.saver.save_soon([handed_over(3, passed, {(4, 3 * CHUNK): tables[4][2]})], computed)
    states = [one.number for one in prefill.memory.given if one.group == 4]
    before = decode.counts.take()
    for number in range(prefill.memory.layers):
        if number not in states:
            computed.open(number)
    received = decode.node.current().session
    until(lambda: prefetch.follow is not None and prefetch.follow.in_place.chunks == 3)
    assert prefetch.chunks is None and before.get("followed_chunks", 0) == 0, "there is no prefix without its state"
    assert received.lookup(decode.node.current().namespace, decode.node.current().namespace.chain(hashes(3))).tokens == 0
    computed.open_all()
    until(lambda: prefetch.chunks == 3)
    others = [list(range(20, 26)), [NULL] * 5 + [26], [NULL, NULL, *range(27, 31)], [NULL, NULL, *range(31, 35)], [NULL, NULL, 35]]
    plain = plan_load(SHAPE, "b", hashes(3), 0, 96, others[0], writer_at(prefill))
    decode.loader.load_soon([load_all_groups(SHAPE, plain, 0, 96, others, NULL)])
    until(lambda: decode.loader.take_done() == {"b"})
    assert decode.loader.take_failed() == set() and decode.loader.take_failed_requests({"b"}) == set()
    for (_, size, names), blocks in zip(GROUPS, others, strict=True):
        for name in names:
            for place, block in enumerate(blocks):
                if block != NULL:
                    found = decode.regions[name][block * size : (block + 1) * size]
                    assert found == content(name, place, size), f"{name}, block {place}"
    until(lambda: not prefill.saver.is_reading("a"))
    assert prefill.saver.take_ended() == [7]
    counts, given = decode.counts.take(), prefill.counts.take()
    assert (counts["followed_chunks"], counts["loaded_blocks"]) == (3, 6 + 1 + 4 + 4 + 1)
    assert counts["loaded_bytes"] == 512 * (2 * 6 + 1 + 2 * 4 + 4) + 320 * 2
    # Three chunks of attention, two of each window, one state.
    assert given["saved_bytes"] == 512 * (2 * 6 + 2 + 3 * 4) + 320 * 2
    decode.prefetcher.drop("b")
    assert decode.prefetched(3) == 3, "what was followed stays"


def test_a_prefill_without_the_state_that_decode_needs_ends_the_hand_over_at_once(prefill_and_decode):
    prefill, decode = prefill_and_decode
    tables = tables_at(1, 2)
    prefill.fill(tables)
    prefetch = decode.prefetcher.start("b", hashes(2), 1_000, False, writer_at(prefill))
    until(lambda: prefetch.follow is not None)
    computed = LayerGate(prefill.memory.layers)
    computed.open_all()
    prefill.saver.save_soon([handed_over(2, tables, {})], computed)
    until(lambda: prefetch.chunks == 0, 4)
    assert decode.counts.take().get("followed_chunks", 0) == 0
    until(lambda: not prefill.saver.is_reading("a"))


def test_a_hybrid_prefill_that_dies_has_the_whole_request_computed(prefill_and_decode):
    prefill, decode = prefill_and_decode
    tables = tables_at(1, 2)
    prefill.fill(tables)
    prefetch = decode.prefetcher.start("b", hashes(2), 1_000, False, writer_at(prefill))
    computed = LayerGate(prefill.memory.layers)
    for layer in prefill.memory.given[:3]:
        computed.open(layer.number)
    prefill.saver.save_soon([handed_over(2, tables, {(4, 2 * CHUNK): tables[4][1]})], computed)
    others = tables_at(20, 2)
    plain = plan_load(SHAPE, "b", hashes(2), 0, 64, others[0], writer_at(prefill))
    load = load_all_groups(SHAPE, plain, 0, 64, others, NULL)
    decode.loader.load_soon([load])
    prefill.saver.cancel("a")
    computed.open_all()
    until(lambda: prefetch.chunks == 0)
    until(lambda: decode.loader.take_done() == {"b"})
    assert decode.loader.take_failed() == set()
    assert decode.loader.take_failed_requests({"b"}) == {"b"}
    assert decode.counts.take()["failed_blocks"] == load.blocks
