"""Addresses in all layouts of vLLM's KV cache, on plain memory."""

import larder_kv
import pytest
from larder_kv.settings import UnsupportedError
from larder_kv.vllm.layout import LAYOUTS, LayerTensor, layer_pages, page_bytes

SIZES = {"L": 3, "B": 5, "H": 2, "N": 4, "C": 6}
ELEMENT = 2


def strides_of(layout: str) -> dict[str, int]:
    """Strides in elements."""
    strides, step = {}, 1
    for letter in reversed(layout):
        strides[letter] = step
        step *= SIZES[letter]
    return strides


def tensor(layout: str, layer: int, **changes) -> LayerTensor:
    """A layer's view [B, H, N, C] of one allocation with all layers."""
    strides = strides_of(layout)
    fields = {
        "name": f"layer {layer}",
        "region": 0,
        "offset": layer * strides["L"] * ELEMENT,
        "shape": [SIZES[letter] for letter in "BHNC"],
        "strides": [strides[letter] for letter in "BHNC"],
        "element_bytes": ELEMENT,
    }
    return LayerTensor(**(fields | changes))


def addressed(layout: str, layer: int) -> larder_kv.LayerPages:
    return layer_pages(tensor(layout, layer), layout, SIZES["B"], SIZES["N"])


def places(pages: larder_kv.LayerPages, page: int) -> list[int]:
    """The bytes of a page, in the order in which they are copied."""
    starts = [pages.offset + page * pages.page_stride]
    for count, stride in pages.dims:
        starts = [start + number * stride for start in starts for number in range(count)]
    return [start + byte for start in starts for byte in range(pages.run_bytes)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_every_page_is_addressed_once(layout):
    strides = strides_of(layout)
    seen = []
    for layer in range(SIZES["L"]):
        pages = addressed(layout, layer)
        assert page_bytes(pages) == SIZES["H"] * SIZES["N"] * SIZES["C"] * ELEMENT
        for page in range(SIZES["B"]):
            expected = {
                (layer * strides["L"] + page * strides["B"] + h * strides["H"] + n * strides["N"] + c) * ELEMENT + byte
                for h in range(SIZES["H"])
                for n in range(SIZES["N"])
                for c in range(SIZES["C"])
                for byte in range(ELEMENT)
            }
            found = places(pages, page)
            assert set(found) == expected and len(found) == len(expected)
            seen += found
    assert sorted(seen) == list(range(len(seen)))


@pytest.mark.parametrize(
    ("layout", "runs"), [("LBHNC", 1), ("LBNHC", 1), ("LHBNC", 2), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 2)]
)
def test_pages_are_copied_in_as_few_runs_as_can_be(layout, runs):
    pages = addressed(layout, 1)
    assert page_bytes(pages) // pages.run_bytes == runs


def test_padded_pages_are_copied_without_their_padding():
    padded = tensor("LBHNC", 0, strides=[1_000, 24, 6, 1])
    pages = layer_pages(padded, "LBHNC", SIZES["B"], SIZES["N"])
    assert (pages.page_stride, page_bytes(pages)) == (2_000, 96)


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ("NHBLC", {}, "unknown KV cache layout"),
        (None, {}, "unknown KV cache layout"),
        ("LBHNC", {"shape": [2, 5, 4, 2, 6], "strides": [1, 1, 1, 1, 1]}, r"not \[B, H, N, C\]"),
        ("LBHNC", {"shape": [10, 2, 2, 6]}, "blocks of their own"),
        ("LBHNC", {"strides": [96, 24, 12, 2]}, "not contiguous"),
        ("LBHNC", {"strides": [48, 6, 12, 1]}, "not laid out as LBHNC"),
    ],
)
def test_what_is_not_surely_addressed_is_refused(layout, changes, words):
    with pytest.raises(UnsupportedError, match=words):
        layer_pages(tensor("LBHNC", 0, **changes), layout, SIZES["B"], SIZES["N"])
