"""vLLM's KV cache groups as pools: the kept blocks of a chunk, the blocks that a prefix needs, and their places.

A model whose layers differ (full attention, sliding windows, recurrent state) has several groups; a request has a list of blocks
for each. For each group, a chunk keeps the blocks that a prefix may need if it ends with this chunk:

- attention: all blocks of the chunk; a prefix needs the blocks of every chunk;
- a sliding window of `w` tokens: the `w - 1` tokens that the token after the prefix sees. If they fit in a chunk, only its last
  blocks are kept, and a prefix needs the blocks of its last chunk. Otherwise whole chunks are kept, and a prefix needs as many as
  contain these tokens;
- recurrent state: the block with the state after the chunk, if the engine has kept it; a prefix needs the block of its last
  chunk.

So a prefix can only end at a chunk at which every group can be restored. The node computes this from the pools' `hit`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The part of a prefix that a layer reads."""

    ATTENTION = "attention"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class Group:
    """Layers for which a request has one list of blocks."""

    number: int
    """Index of the group's list among the request's lists."""
    kind: Kind
    block_tokens: int
    window: int = 0
    """Tokens that a token sees in a sliding window, including itself."""
    spread: int = 1
    """Ranks over which the tokens of a block are spread, by decode-context parallelism."""

    @property
    def rows(self) -> int:
        """Tokens, or states, that one rank's part of a block holds separately."""
        return 1 if self.kind is Kind.STATE else self.block_tokens // self.spread

    def blocks_per_chunk(self, chunk_tokens: int) -> int:
        """Blocks that the tokens of a chunk take."""
        return chunk_tokens // self.block_tokens

    def kept(self, chunk_tokens: int) -> int:
        """Number of blocks of a chunk that are kept: its last ones."""
        whole = self.blocks_per_chunk(chunk_tokens)
        match self.kind:
            case Kind.ATTENTION:
                return whole
            case Kind.WINDOW:
                return min(self._window_blocks(), whole)
            case Kind.STATE:
                return 1

    def hit(self, chunk_tokens: int) -> str | int:
        """The chunks of a prefix that are needed, in the form of a pool's `hit`."""
        if self.kind is Kind.ATTENTION:
            return "all"
        if self.kind is Kind.STATE or self._window_blocks() <= self.blocks_per_chunk(chunk_tokens):
            return "last"
        return -(-(self.window - 1) // chunk_tokens)

    def first_needed(self, end: int) -> int:
        """The first block of a prefix of `end` tokens, a whole number of blocks, that the token after the prefix reads."""
        blocks = end // self.block_tokens
        match self.kind:
            case Kind.ATTENTION:
                return 0
            case Kind.WINDOW:
                return max(blocks - self._window_blocks(), 0)
            case Kind.STATE:
                return blocks - 1

    def _window_blocks(self) -> int:
        return max(-(-(self.window - 1) // self.block_tokens), 1)


@dataclass(frozen=True)
class Run:
    """Consecutive blocks to load."""

    first: int
    """Number of the first block among the kept blocks of a group, counted from the first chunk of the load."""
    blocks: list[int]
    """The targets: numbers of blocks in the engine's cache."""


def blocks_to_load(
    group: Group, chunk_tokens: int, computed: int, end: int, blocks: Sequence[int], null: int
) -> Run:
    """The blocks of one group that extend a prompt from `computed` tokens to `end`, the end of a chunk. `blocks` is the request's
    list; it has the block `null` where the request has none."""
    whole, kept = group.blocks_per_chunk(chunk_tokens), group.kept(chunk_tokens)
    first = max(computed // group.block_tokens, group.first_needed(end))
    found = list(blocks[first : end // group.block_tokens])
    # A missing block would be read before it was written.
    assert null not in found and len(found) == end // group.block_tokens - first, f"blocks of group {group.number} lack"
    chunk, in_chunk = divmod(first, whole)
    first_chunk = computed // chunk_tokens
    return Run((chunk - first_chunk) * kept + in_chunk - (whole - kept), found)


def blocks_to_save(
    group: Group,
    chunk_tokens: int,
    chunk: int,
    blocks: Sequence[int],
    null: int,
    states: Mapping[tuple[int, int], int],
) -> list[int]:
    """The blocks of one group that are kept of a chunk; none if the engine does not have all of them (any more). States move from
    block to block: `states` says, by group and tokens, which blocks have the states that the engine keeps."""
    end = (chunk + 1) * chunk_tokens
    if group.kind is Kind.STATE:
        block = states.get((group.number, end), null)
        return [] if block == null else [block]
    last = end // group.block_tokens
    found = list(blocks[last - group.kept(chunk_tokens) : last])
    is_whole = len(found) == group.kept(chunk_tokens) and null not in found
    return found if is_whole else []


@dataclass(frozen=True)
class PoolLayer:
    """A layer of a pool."""

    name: str
    group: int
    """The layer's group, by its place among the groups."""


@dataclass(frozen=True)
class GroupPool:
    """Layers with the same kept blocks of a chunk, needed by the same prefixes."""

    name: str
    hit: str | int
    pages: int
    """Blocks of one layer that are kept for a chunk."""
    rows: int
    """Tokens that one rank's part of a block holds separately; 1 for a state."""
    kind: Kind
    page_bytes: int
    """Bytes of one block in one layer of one slice."""
    layers: tuple[PoolLayer, ...]


def pools_of(groups: Sequence[tuple[Group, int, Sequence[str]]], chunk_tokens: int) -> list[GroupPool]:
    """The pools of these groups, each given with the bytes of its blocks and its layers. Groups that are alike share a pool,
    since their number depends on how the engine divides its memory. A group whose layers have blocks of different sizes comes
    once for each size, and has as many pools."""
    made: dict[tuple[str | int, int, int, Kind, int], list[PoolLayer]] = {}
    places: dict[Group, int] = {}
    for group, page_bytes, names in groups:
        place = places.setdefault(group, len(places))
        key = (group.hit(chunk_tokens), group.kept(chunk_tokens), group.rows, group.kind, page_bytes)
        made.setdefault(key, []).extend(PoolLayer(name, place) for name in names)
    kinds = [kind.value for _, _, _, kind, _ in made]
    names = ["kv", *(f"{kind}-{number}" for number, kind in enumerate(kinds[1:], start=1))]
    return [GroupPool(name, *key, tuple(layers)) for name, (key, layers) in zip(names, made.items(), strict=True)]
