"""One rank's blocks, pool by pool: what is copied between them and the blocks of chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import larder_kv
from larder_kv.vllm.groups import Run


@dataclass(frozen=True)
class PoolMemory:
    """The layers of one pool."""

    pages: larder_kv.PagedMemory
    groups: tuple[int, ...]
    """For each layer, the group whose blocks are its; 0 is the first one."""


class Memory:
    """The pools of one rank, numbered as its namespace has them. Layers are numbered over all pools."""

    def __init__(self, pools: Sequence[PoolMemory]) -> None:
        self._pools = list(pools)
        self._layers = [(number, layer) for number, pool in enumerate(pools) for layer in range(pool.pages.layers)]

    @property
    def first(self) -> larder_kv.PagedMemory:
        """The first pool's pages: those of a model whose layers are all alike."""
        return self._pools[0].pages

    @property
    def layers(self) -> int:
        """Layers of all pools."""
        return len(self._layers)

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
        """Copies what is leased into these blocks, by group."""
        for number, pool in enumerate(self._pools):
            if len(set(pool.groups)) == 1:
                run = runs[pool.groups[0]]
                pool.pages.load(lease, run.blocks, first_page=run.first, block=number)
                continue
            for layer, group in enumerate(pool.groups):
                run = runs[group]
                pool.pages.load(lease, run.blocks, first_page=run.first, layer=layer, block=number)

    def pools_there(self, blocks: Sequence[Sequence[int]]) -> list[int]:
        """The pools of a chunk that the engine has, where it has these blocks of each group."""
        return [number for number, pool in enumerate(self._pools) if all(blocks[group] for group in pool.groups)]

    def save(
        self, staged: larder_kv.StagedChunk, blocks: Sequence[list[int]], layer: int, pools: Sequence[int]
    ) -> None:
        """Copies a layer of a chunk, if its pool is one of `pools`, which are to be written; `blocks` are by group."""
        pool, in_pool = self._layers[layer]
        if pool in pools:
            one = self._pools[pool]
            one.pages.save(staged, blocks[one.groups[in_pool]], layer=in_pool, block=pool)
