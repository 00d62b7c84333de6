"""Saves under way, and the blocks that the engine may not reuse meanwhile.

vLLM frees a block when its window has passed or its state moved on, which may be before the save has ended. The
references are given back when every rank has ended the save.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class HeldBlocks:
    """The saves that not all ranks have ended, each with a reference to the blocks that the engine would free meanwhile.

    They are bounded: saves that find no place in the workers' queue end at once.
    """

    def __init__(self, pool: Any, ranks: int) -> None:
        """`pool` is vLLM's BlockPool."""
        self._pool, self._ranks = pool, ranks
        self._held: dict[int, tuple[list[Any], int]] = {}
        self._last = 0

    @property
    def null(self) -> int:
        """The block that stands for a missing block."""
        return int(self._pool.null_block.block_id)

    def hold(self, blocks: Iterable[int]) -> int:
        """Keeps blocks for a save, and returns the save's number."""
        kept = [self._pool.blocks[number] for number in dict.fromkeys(blocks)]
        self._pool.touch(kept)
        self._last += 1
        self._held[self._last] = (kept, self._ranks)
        return self._last

    def ended(self, ranks: Mapping[int, int]) -> None:
        """Counts the ranks that have ended these saves."""
        for number, count in ranks.items():
            kept, left = self._held.pop(number)
            if left > count:
                self._held[number] = (kept, left - count)
            else:
                # A prompt's end is useful only with the blocks before it, so the end goes first.
                self._pool.free_blocks(reversed(kept))

    def has_blocks(self) -> bool:
        """Whether some blocks become free when a save ends."""
        return any(kept for kept, _ in self._held.values())

    def __bool__(self) -> bool:
        """Whether a save is under way."""
        return bool(self._held)


def blocks_of(others: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """All blocks of a save's other groups."""
    return [block for chunk in others for blocks in chunk for block in blocks]
