"""One rank's blocks, pool by pool: copies between them and the blocks of chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import larder_kv
from larder_kv._native import MAX_COPIES
from larder_kv.vllm.groups import Run


Pages = larder_kv.PagedMemory | larder_kv.GpuPagedMemory
"""The layers of one pool, in host or GPU memory."""

Mark = Callable[[], None]
"""Waits until a device has done all orders that came before the mark."""


MAX_PAGES = MAX_COPIES
"""Limit of the blocks of one copy of GPU memory."""


def done() -> None:
    """A mark that is reached already."""


@dataclass(frozen=True)
class PoolMemory:
    """The layers of one pool."""

    pages: Pages
    groups: tuple[int, ...]
    """For each layer, the group of its blocks; 0 is the first group."""
    is_state: bool = False
    """Whether its blocks contain states, which change with each step, instead of tokens."""

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same blocks."""
        return len(set(self.groups)) == 1


@dataclass(frozen=True)
class ChunkBlocks:
    """A chunk to save, and its blocks in the engine's memory."""

    staged: larder_kv.StagedChunk
    blocks: Sequence[list[int]]
    """Its blocks, by group."""
    pools: Sequence[int]
    """The pools of the chunk that are to be written."""


@dataclass(frozen=True)
class MemoryLayer:
    """A layer of a pool."""

    pool: int
    """The pool's number."""
    layer: int
    """The layer's number in the pool."""
    pages: Pages
    """The pool's pages."""
    group: int
    """The group of its blocks."""
    number: int
    """The layer's number over all pools."""


class Memory:
    """The pools of one rank, numbered as in its namespace. Layers are numbered over all pools."""

    def __init__(self, pools: Sequence[PoolMemory]) -> None:
        self._pools = list(pools)
        ends = [sum(pool.pages.layers for pool in pools[: number + 1]) for number in range(len(pools))]
        self._ranges = [range(end - pool.pages.layers, end) for end, pool in zip(ends, pools, strict=True)]
        self.layers = ends[-1]
        """Layers of all pools."""
        self.depth = max(pool.pages.layers for pool in pools)
        """The number of layers of the pool with the most layers."""

    @property
    def loads_in_order(self) -> bool:
        """Whether `load` finishes a chunk before it begins the next: then all chunks before a damaged chunk are loaded."""
        return len(self._pools) == 1 and self._pools[0].is_uniform

    @property
    def first(self) -> Pages:
        """The pages of the first pool, which is the only one if all layers of a model are alike."""
        return self._pools[0].pages

    def at_layer(self, layer: int) -> list[MemoryLayer]:
        """The layers of this number, of each pool that has one."""
        return [
            MemoryLayer(number, layer, pool.pages, pool.groups[layer], own.start + layer)
            for number, (pool, own) in enumerate(zip(self._pools, self._ranges, strict=True))
            if layer < len(own)
        ]

    @property
    def given(self) -> list[MemoryLayer]:
        """Every layer in the order of the hand-over: a step computes layers one after the other, and states at its end."""
        every = [one for layer in range(self.depth) for one in self.at_layer(layer)]
        return sorted(every, key=lambda one: self._pools[one.pool].is_state)

    def load_layer(self, lease: larder_kv.Lease, runs: Sequence[Run], layer: int) -> None:
        """Copies a layer of each pool into these blocks, by group. Raises as `load`."""
        for one in self.at_layer(layer):
            run = runs[one.group]
            load_run(one.pages, lease, run, layer=layer, block=one.pool)

    def layer_bytes_of(self, runs: Sequence[Run], layer: int) -> int:
        """Bytes of a layer of these blocks, by group, over all pools."""
        return sum(one.pages.page_bytes * len(runs[one.group].blocks) for one in self.at_layer(layer))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk in all pools."""
        return self.bytes_of_chunk(range(len(self._pools)))

    def bytes_of_chunk(self, pools: Sequence[int]) -> int:
        """Bytes of a chunk in these pools."""
        return sum(self._pools[pool].pages.block_bytes for pool in pools)

    def bytes_of(self, runs: Sequence[Run]) -> int:
        """Bytes of these blocks, by group."""
        layers = ((pool.pages.page_bytes, group) for pool in self._pools for group in pool.groups)
        return sum(page_bytes * len(runs[group].blocks) for page_bytes, group in layers)

    def load(self, lease: larder_kv.Lease, runs: Sequence[Run]) -> None:
        """Copies the leased chunks into these blocks, by group. Raises `DamagedError` if a verified chunk is wrong."""
        for number, pool in enumerate(self._pools):
            if pool.is_uniform:
                run = runs[pool.groups[0]]
                load_run(pool.pages, lease, run, layer=None, block=number)
                continue
            for layer, group in enumerate(pool.groups):
                load_run(pool.pages, lease, runs[group], layer=layer, block=number)

    def pools_there(self, blocks: Sequence[Sequence[int]]) -> list[int]:
        """The pools of a chunk that the engine can write, if it has these blocks of each group."""
        return [number for number, pool in enumerate(self._pools) if all(blocks[group] for group in pool.groups)]

    def save(self, chunks: Sequence[ChunkBlocks]) -> None:
        """Copies the chunks' blocks that are to be written."""
        for number, pool in enumerate(self._pools):
            written = [chunk for chunk in chunks if number in chunk.pools]
            if not written:
                continue
            for layer in [None] if pool.is_uniform else range(pool.pages.layers):
                group = pool.groups[layer or 0]
                blocks = [block for chunk in written for block in chunk.blocks[group]]
                pool.pages.save([chunk.staged for chunk in written], blocks, layer=layer, block=number)


def load_run(pages: Pages, lease: larder_kv.Lease, run: Run, *, layer: int | None, block: int) -> None:
    """Copies leased blocks into a run of the engine's blocks."""
    for start in range(0, len(run.blocks), MAX_PAGES):
        blocks = run.blocks[start : start + MAX_PAGES]
        pages.load(lease, blocks, first_page=run.first + start, layer=layer, block=block)
