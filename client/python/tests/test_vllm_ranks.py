"""The slice of a chunk that each rank of a parallel engine holds, without vLLM."""

import pytest
from larder_kv.vllm.groups import Group, Kind, pools_of
from larder_kv.vllm.ranks import Ranks


@pytest.mark.parametrize(
    ("ranks", "slices", "writers"),
    [
        (Ranks(), [0], [0]),
        (Ranks(tensor=4), [0, 1, 2, 3], [0, 1, 2, 3]),
        # Latent attention: all tensor ranks hold the same.
        (Ranks(tensor=4, replicas=4), [0, 0, 0, 0], [0]),
        (Ranks(tensor=4, replicas=2), [0, 0, 1, 1], [0, 2]),
        (Ranks(tensor=2, pipeline=2), [0, 1, 2, 3], [0, 1, 2, 3]),
        (Ranks(tensor=2, pipeline=2, replicas=2), [0, 0, 1, 1], [0, 2]),
        # Tokens are spread over tensor ranks.
        (Ranks(tensor=4, decode_context=4), [0, 1, 2, 3], [0, 1, 2, 3]),
        # Ranks of prefill-context parallelism hold the same, unless tokens are spread over them.
        (Ranks(tensor=2, prefill_context=2), [0, 1, 0, 1], [0, 1]),
        (Ranks(tensor=2, prefill_context=2, replicas=2), [0, 0, 0, 0], [0]),
        (Ranks(tensor=2, prefill_context=2, decode_context=2), [0, 1, 2, 3], [0, 1, 2, 3]),
        (Ranks(tensor=1, prefill_context=2, pipeline=2), [0, 0, 1, 1], [0, 2]),
    ],
)
def test_each_slice_has_one_writer(ranks, slices, writers):
    every = range(ranks.count)
    assert [ranks.slice_of(rank) for rank in every] == slices
    assert [rank for rank in every if ranks.is_writer(rank)] == writers
    assert sorted(slices[rank] for rank in writers) == list(range(ranks.slices))


def test_a_block_whose_tokens_are_spread_has_its_share_of_rows_on_each_rank():
    spread = Group(0, Kind.ATTENTION, 128, spread=4)
    (pool,) = pools_of([(spread, 1_000, ["a", "b"])], 256)
    assert (pool.pages, pool.rows) == (2, 32)


def test_layers_of_one_group_with_blocks_of_different_sizes_are_pools_with_the_same_blocks():
    group = Group(0, Kind.ATTENTION, 32)
    pools = pools_of([(group, 1_000, ["latent.0", "latent.1"]), (group, 100, ["index.0"])], 64)
    assert [(pool.name, pool.hit, pool.page_bytes) for pool in pools] == [("kv", "all", 1_000), ("attention-1", "all", 100)]
    assert {layer.group for pool in pools for layer in pool.layers} == {0}
