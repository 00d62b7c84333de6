"""The places of a KV cache's bytes: from a tensor's shape and strides to the contiguous runs of its pages."""

from collections.abc import Sequence
from dataclasses import dataclass

from larder_kv.namespace import LayerPages
from larder_kv.settings import UnsupportedError

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The known orders in memory of layers, blocks, heads, tokens and contents, outermost first."""


@dataclass(frozen=True)
class LayerTensor:
    """One layer's KV cache. Its logical dimensions are blocks, heads, tokens, contents."""

    name: str
    region: int
    """Number of its allocation."""
    offset: int
    """Bytes from the allocation's start to its first element."""
    shape: Sequence[int]
    strides: Sequence[int]
    """Strides in elements."""
    element_bytes: int


def layer_pages(tensor: LayerTensor, layout: str | None, blocks: int, block_tokens: int) -> LayerPages:
    """The addresses of one layer's pages; refuses a layout that is not certain."""
    if layout not in LAYOUTS:
        raise UnsupportedError(f"unknown KV cache layout {layout!r}: known are {', '.join(LAYOUTS)}")
    if len(tensor.shape) != 4 or len(tensor.strides) != 4:
        raise UnsupportedError(f"the KV cache of {tensor.name} has the shape {tuple(tensor.shape)}, not [B, H, N, C]")
    if tensor.shape[0] != blocks or tensor.shape[2] != block_tokens:
        raise UnsupportedError(
            f"the KV cache of {tensor.name} has {tensor.shape[0]} blocks of {tensor.shape[2]} tokens, "
            f"not {blocks} of {block_tokens}: kernels with blocks of their own are not supported"
        )
    dims = dict(zip("BHNC", zip(tensor.shape, tensor.strides, strict=True), strict=True))
    if dims["C"][1] != 1:
        raise UnsupportedError(f"the contents of {tensor.name} are not contiguous")
    check_order(tensor.name, layout, dims)
    size = tensor.element_bytes
    run = dims["C"][0]
    runs: list[tuple[int, int]] = []
    # From the inside out: a dimension that directly follows the run extends it.
    for name in (letter for letter in reversed(layout) if letter in "HN"):
        count, stride = dims[name]
        if not runs and stride == run:
            run *= count
        elif count > 1:
            runs.insert(0, (count, stride * size))
    return LayerPages(
        region=tensor.region,
        offset=tensor.offset,
        page_stride=dims["B"][1] * size,
        pages=blocks,
        dims=runs,
        run_bytes=run * size,
    )


def check_order(name: str, layout: str, dims: dict[str, tuple[int, int]]) -> None:
    """Refuses a tensor whose strides contradict `layout`."""
    strides = [dims[letter][1] for letter in layout if letter in dims and dims[letter][0] > 1]
    if any(outer < inner for outer, inner in zip(strides, strides[1:], strict=False)):
        raise UnsupportedError(f"the KV cache of {name} is not laid out as {layout}: its strides are {dims}")


def page_bytes(pages: LayerPages) -> int:
    """Bytes of one page, without padding."""
    size = pages.run_bytes
    for count, _ in pages.dims:
        size *= count
    return size
