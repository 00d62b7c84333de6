"""Speculative decoding as the connector sees it, without vLLM."""

from types import SimpleNamespace

import pytest
from larder_kv.settings import UnsupportedError
from larder_kv.vllm.plan import Shape, failed_pages, plan_load
from larder_kv.vllm.speculation import Speculation, speculation_of


def config(method: str, drops: bool = False) -> SimpleNamespace:
    return SimpleNamespace(method=method, use_eagle_block_drop=lambda: drops)


def test_what_is_kept_and_dropped_depends_on_the_method():
    assert speculation_of(None, "sync", False) is None
    assert speculation_of(config("ngram"), "async", False) == Speculation("ngram", has_kv=False, drops_block=False)
    assert speculation_of(config("draft_model"), "async", True) == Speculation("draft_model", has_kv=True, drops_block=False)
    assert speculation_of(config("mtp", drops=True), "async", True) == Speculation("mtp", has_kv=True, drops_block=True)
    # `disable_eagle_block_drop`: vLLM does not drop a block of its own hits either.
    assert speculation_of(config("eagle3"), "async", True) == Speculation("eagle3", has_kv=True, drops_block=False)


@pytest.mark.parametrize(
    ("method", "drops", "load", "is_attention", "why"),
    [
        ("dflash", True, "async", True, "'dflash' is not supported"),
        ("extract_hidden_states", False, "async", True, "'extract_hidden_states' is not supported"),
        ("ngram", False, "sync", True, '`load` is "sync"'),
        ("mtp", True, "async", False, "sliding windows"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(method, drops, load, is_attention, why):
    with pytest.raises(UnsupportedError, match=why):
        speculation_of(config(method, drops), load, is_attention)


def test_a_hit_without_its_last_block_ends_within_a_chunk():
    shape = Shape(chunk_tokens=64, block_tokens=16, dropped_tokens=16)
    assert [shape.hit_tokens(chunks) for chunks in (0, 1, 3)] == [0, 48, 176]
    hashes, table = [bytes([number]) * 32 for number in range(3)], list(range(100, 120))
    load = plan_load(shape, "a", hashes, 0, shape.hit_tokens(3), table)
    assert load.hashes == hashes and load.pages == table[:11]
    # Two chunks come; the wanted part of the third chunk does not.
    assert failed_pages(load, shape, 2) == table[8:11]
    assert failed_pages(load, shape, 3) == []
