"""The blocks of a hybrid model's groups that are kept, needed, loaded and saved: without vLLM and without a node."""

from dataclasses import dataclass, field

import pytest
from larder_kv.vllm.groups import Group, Kind, Run, blocks_to_load, blocks_to_save, pools_of
from larder_kv.vllm.held import HeldBlocks
from larder_kv.vllm.plan import Load, Save, Shape, load_all_groups, plan_load, save_all_groups

NULL = 0
ATTENTION = Group(0, Kind.ATTENTION, 16)
STATE = Group(2, Kind.STATE, 64)


def window(tokens: int, block_tokens: int = 16) -> Group:
    return Group(1, Kind.WINDOW, block_tokens, window=tokens)


def seen(group: Group, end: int) -> set[int]:
    """The blocks with tokens that the token after a prefix of `end` tokens sees."""
    return {token // group.block_tokens for token in range(max(end - group.window + 1, 0), end)}


@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("tokens", [2, 16, 17, 18, 33, 64, 65, 66, 100, 128, 129, 130, 1_000])
def test_a_window_keeps_what_the_next_token_sees_and_no_chunk_more(tokens, block_tokens):
    group, chunk = window(tokens, block_tokens), 64
    hit, kept, whole = group.hit(chunk), group.kept(chunk), group.blocks_per_chunk(chunk)
    reach = 1 if hit == "last" else hit
    for chunks in range(1, 24):
        end = chunks * chunk
        assert set(range(group.first_needed(end), end // block_tokens)) == seen(group, end)
        stored = {
            chunk_number * whole + block
            for chunk_number in range(max(chunks - reach, 0), chunks)
            for block in range(whole - kept, whole)
        }
        assert seen(group, end) <= stored, "what is seen is kept in the chunks that are needed"
        fewer = {block for block in stored if block >= (chunks - reach + 1) * whole}
        assert chunks < reach or not seen(group, end) <= fewer, "a chunk less is not enough"
    assert kept == whole or reach == 1, "chunks are kept in part only where the last one is enough"


@pytest.mark.parametrize("group", [ATTENTION, STATE, window(2), window(33), window(64), window(100), window(1_000)])
def test_each_block_that_is_needed_is_loaded_from_its_own_place(group):
    chunk, chunks = 64, 5
    blocks = [100 + block for block in range(chunks * group.blocks_per_chunk(chunk))]
    whole, kept = group.blocks_per_chunk(chunk), group.kept(chunk)
    for computed in range(0, chunks * chunk, 64):
        run = blocks_to_load(group, chunk, computed, chunks * chunk, blocks, NULL)
        places = [
            (computed // chunk + number // kept) * whole + whole - kept + number % kept
            for number in range(run.first, run.first + len(run.blocks))
        ]
        assert [100 + place for place in places] == run.blocks
        first = max(computed // group.block_tokens, group.first_needed(chunks * chunk))
        assert run.blocks == blocks[first:]


def test_a_load_begins_within_a_chunk_that_the_engine_has_in_part():
    run = blocks_to_load(window(1_000), 64, 96, 192, list(range(100, 112)), NULL)
    assert run == Run(2, [106, 107, 108, 109, 110, 111])
    # The window begins in the same chunk, and only the chunk's last blocks are kept.
    assert blocks_to_load(window(33), 64, 160, 192, list(range(100, 112)), NULL) == Run(0, [110, 111])
    assert blocks_to_load(window(49), 64, 160, 192, list(range(100, 112)), NULL) == Run(1, [110, 111])


def test_a_block_that_is_needed_and_not_there_is_never_loaded_over():
    with pytest.raises(AssertionError, match="lack"):
        blocks_to_load(window(33), 64, 0, 64, [NULL, NULL, NULL, 7], NULL)
    with pytest.raises(AssertionError, match="lack"):
        blocks_to_load(STATE, 64, 0, 128, [NULL], NULL)


def test_blocks_that_the_window_has_passed_are_not_saved():
    group, blocks = window(100), [NULL] * 5 + list(range(105, 112))
    assert [blocks_to_save(group, 64, chunk, blocks, NULL, {}) for chunk in range(3)] == [
        [],
        [],
        [108, 109, 110, 111],
    ]
    # For a window within a chunk, the last blocks are enough. They are there as long as the chunk is the last one.
    assert blocks_to_save(window(33), 64, 1, blocks, NULL, {}) == [106, 107]
    assert blocks_to_save(window(33), 64, 3, blocks, NULL, {}) == [], "it is not computed yet"


def test_a_state_is_saved_where_the_engine_has_kept_it():
    # The running state may be in the block that held the state after a chunk.
    blocks = [NULL, 7, NULL, 9]
    states = {(2, 128): 5, (3, 192): 6, (2, 256): NULL}
    assert [blocks_to_save(STATE, 64, chunk, blocks, NULL, states) for chunk in range(4)] == [[], [5], [], []]


def test_groups_that_are_alike_share_a_pool():
    groups = [
        (ATTENTION, 1_000, ["a.0"]),
        (window(100), 1_000, ["w.0", "w.1"]),
        (Group(3, Kind.WINDOW, 16, window=100), 1_000, ["w.2"]),
        (window(33), 1_000, ["short"]),
        (STATE, 640, ["s.0"]),
    ]
    pools = pools_of(groups, 64)
    assert [(pool.name, pool.hit, pool.pages, pool.rows, pool.page_bytes) for pool in pools] == [
        ("kv", "all", 4, 16, 1_000),
        ("window-1", 2, 4, 16, 1_000),
        ("window-2", "last", 2, 16, 1_000),
        ("state-3", "last", 1, 1, 640),
    ]
    assert [(layer.name, layer.group) for layer in pools[1].layers] == [("w.0", 1), ("w.1", 1), ("w.2", 2)]
    (plain,) = pools_of([(ATTENTION, 1_000, ["a", "b"])], 64)
    assert (plain.name, plain.hit, plain.pages) == ("kv", "all", 4)


def test_hashes_of_other_runs_than_a_block_name_chunks():
    hashes = [bytes([number]) * 32 for number in range(40)]
    shape = Shape(chunk_tokens=128, block_tokens=64, hash_tokens=32)
    assert shape.chunk_hashes(hashes) == hashes[3::4]
    assert Shape(128, 64).chunk_hashes(hashes) == hashes[1::2]


def test_loads_and_saves_of_a_hybrid_model_name_the_blocks_of_each_group():
    shape = Shape(64, 16, 16, 0, (window(33), STATE))
    hashes = [bytes([number]) * 32 for number in range(3)]
    tables = [list(range(100, 112)), [NULL] * 10 + [210, 211], [NULL, NULL, 302]]
    plain = plan_load(shape, "r", hashes, 64, 128, tables[0])
    load = load_all_groups(shape, plain, 64, 192, tables, NULL)
    assert load == Load("r", hashes, 4, tables[0][4:], None, (Run(2, [210, 211]), Run(1, [302])))
    assert load.blocks == 8 + 2 + 1
    save = save_all_groups(shape, Save("r", hashes, 1, tables[0][4:]), tables, NULL, {})
    assert save.others == (([], []), ([210, 211], []))
    save = save_all_groups(shape, Save("r", hashes, 1, tables[0][4:]), tables, NULL, {(2, 192): 302})
    assert save.others == (([], []), ([210, 211], [302]))


@dataclass
class Block:
    block_id: int
    references: int = 1


@dataclass
class Pool:
    """The part of vLLM's BlockPool that is used."""

    blocks: list[Block] = field(default_factory=lambda: [Block(number) for number in range(8)])

    @property
    def null_block(self) -> Block:
        return self.blocks[0]

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.references += 1

    def free_blocks(self, blocks) -> None:
        for block in blocks:
            block.references -= 1


def test_blocks_are_held_until_every_rank_has_saved_them():
    pool = Pool()
    held = HeldBlocks(pool, ranks=2)
    assert not held and held.null == 0
    first, second = held.hold([3, 4, 3]), held.hold([4])
    assert [block.references for block in pool.blocks[3:5]] == [2, 3], "a block that comes twice is held once"
    held.ended({first: 1, second: 1})
    assert held and [block.references for block in pool.blocks[3:5]] == [2, 3]
    held.ended({first: 1})
    assert held and [block.references for block in pool.blocks[3:5]] == [1, 2]
    held.ended({second: 1})
    assert not held and [block.references for block in pool.blocks[3:5]] == [1, 1]
