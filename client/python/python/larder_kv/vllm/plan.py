"""The decisions of the scheduler half, without vLLM: the chunks of a request to load, and the chunks to save at each step.

Nothing that was computed from missing blocks is saved (`Garbage`): a step that began with missing blocks continues with garbage
until the scheduler hears of it, and steps may be planned ahead. If several ranks would have to hear of each other's failures in
time, only asynchronous loads are offered: no step depends on these.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from larder_kv.vllm.groups import Group, Run, blocks_to_load, blocks_to_save
from larder_kv.vllm.handoff import Writer

MAX_CHUNKS = 8_192
"""Limit of the chunks of one prompt: one message to the node holds this many."""


@dataclass(frozen=True)
class Shape:
    """The sizes of chunks and blocks, by which prompts are cut."""

    chunk_tokens: int
    block_tokens: int
    """Tokens of one engine block; with several groups, of a block of the first group, which is attention."""
    hash_tokens: int = 0
    """Tokens for which one of the engine's hashes stands; 0: the tokens of a block."""
    number: int = 0
    """The first group's index among a request's lists of blocks."""
    others: tuple[Group, ...] = ()
    """The other groups of a hybrid model."""
    dropped_tokens: int = 0
    """Tokens at the end of a hit that are computed again, for a draft that reads the target's hidden states."""
    salt: bytes = b""
    """If given, part of the names of chunks: an engine with a salt of its own shares chunks with no other engine."""

    @property
    def pages_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def hashes_per_chunk(self) -> int:
        return self.chunk_tokens // (self.hash_tokens or self.block_tokens)

    def chunk_hashes(self, block_hashes: Sequence[bytes], chunks: int | None = None) -> list[bytes]:
        """The names of the first full chunks."""
        full = len(block_hashes) // self.hashes_per_chunk
        count = min(full if chunks is None else min(chunks, full), MAX_CHUNKS)
        return [self.chunk_hash(block_hashes, chunk) for chunk in range(count)]

    def chunk_hash(self, block_hashes: Sequence[bytes], chunk: int) -> bytes:
        """The name of a full chunk: the hash of its last tokens, with the salt if there is one."""
        last = bytes(block_hashes[(chunk + 1) * self.hashes_per_chunk - 1])
        return hashlib.sha256(self.salt + last).digest() if self.salt else last

    def hit_tokens(self, chunks: int) -> int:
        """Tokens that are loaded if this number of chunks is there."""
        return max(chunks * self.chunk_tokens - self.dropped_tokens, 0)

    def usable_chunks(self, prompt_tokens: int) -> int:
        """Number of a prompt's chunks that may be loaded: at least one token is left to compute."""
        return min(max(prompt_tokens - 1, 0) // self.chunk_tokens, MAX_CHUNKS)


@dataclass(frozen=True)
class Load:
    """The blocks of one request to load."""

    request: str
    hashes: list[bytes]
    """Hashes of the prompt's chunks from the first on, up to the last needed one."""
    first_page: int
    """Number of the first block to load, in the prompt."""
    pages: list[int]
    """The targets of the blocks: numbers in the engine's cache."""
    writer: Writer | None = None
    """The engine that computes the blocks, if another engine does."""
    others: tuple[Run, ...] = ()
    """The blocks of a hybrid model's other groups."""

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.pages) + sum(len(run.blocks) for run in self.others)


@dataclass(frozen=True)
class Save:
    """The chunks of one request that are complete after a step."""

    request: str
    hashes: list[bytes]
    """Hashes of the prompt's chunks from the first on."""
    first_chunk: int
    """The first chunk to save; all later ones are saved too."""
    pages: list[int]
    """The blocks of these chunks in the engine's cache."""
    attempt: int | None = None
    """The number of this attempt, if the chunks are handed over layer by layer to an engine that decodes."""
    others: tuple[tuple[list[int], ...], ...] = ()
    """For a hybrid model, by chunk: the blocks of each other group; none if the engine does not have all of them."""
    priority: int = 0
    """The chunks' priority, from the request's hint."""
    number: int | None = None
    """The save's number, to be reported at its end."""


@dataclass
class Saved:
    """The progress of a request's saves, including saves under way."""

    chunks: int = 0
    in_flight: bool = False
    """Whether blocks that the engine would free may still be read."""
    hashes: list[bytes] = field(default_factory=list)
    attempt: int | None = None
    """The attempt of the hand-over, if there is one."""
    priority: int = 0
    """The chunks' priority, from the request's hint."""
    is_of_old_weights: bool = False
    """Whether a part of the request's KV was computed before a reset: none of it is saved."""

    def anew(self) -> "Saved":
        """The same request before any save."""
        return Saved(attempt=self.attempt, priority=self.priority)


@dataclass
class Garbage:
    """Steps that computed from missing blocks: none of their results may be saved.

    This also holds for later steps, until a step that was planned by a scheduler that knew of the failure: steps may be planned
    ahead.
    """

    failed_step: int = -1
    """The last step that began with a failed load."""

    def load_failed(self, step: int) -> None:
        """Notes that a synchronous load of this step failed."""
        self.failed_step = step

    def may_save(self, recovered: int) -> bool:
        """Whether a step may be saved. `recovered` is the last step that had been planned when the scheduler heard of a failed
        load."""
        return self.failed_step <= recovered


def plan_load(
    shape: Shape,
    request: str,
    hashes: Sequence[bytes],
    computed: int,
    tokens: int,
    table: Sequence[int],
    writer: Writer | None = None,
) -> Load:
    """Loads `tokens` tokens after the first `computed`; `table` has the request's blocks."""
    first, end = computed // shape.block_tokens, (computed + tokens) // shape.block_tokens
    chunks = -(-(computed + tokens) // shape.chunk_tokens)
    return Load(request, list(hashes[:chunks]), first, list(table[first:end]), writer)


def tail(load: Load, shape: Shape) -> tuple[int, int]:
    """The first chunk that a load needs, and the number of its first block counted from there."""
    chunk = load.first_page // shape.pages_per_chunk
    return chunk, load.first_page - chunk * shape.pages_per_chunk


def failed_pages(load: Load, shape: Shape, leased_chunks: int) -> list[int]:
    """Blocks of a load that do not come, if only its first `leased_chunks` chunks come."""
    _, skipped = tail(load, shape)
    come = max(leased_chunks * shape.pages_per_chunk - skipped, 0)
    return load.pages[come:]


def plan_save(
    shape: Shape, request: str, saved: Saved, block_hashes: Sequence[bytes], computed: int, table: Sequence[int]
) -> Save | None:
    """Saves the chunks that are complete after `computed` tokens, and remembers that their saves are under way."""
    hashes = shape.hashes_per_chunk
    complete = min(computed // shape.chunk_tokens, len(block_hashes) // hashes, MAX_CHUNKS)
    if complete <= saved.chunks:
        return None
    first, pages = saved.chunks, shape.pages_per_chunk
    known = len(saved.hashes)
    saved.hashes += [shape.chunk_hash(block_hashes, chunk) for chunk in range(known, complete)]
    saved.chunks, saved.in_flight = complete, True
    blocks = list(table[first * pages : complete * pages])
    return Save(request, saved.hashes[:complete], first, blocks, saved.attempt, priority=saved.priority)


def load_all_groups(
    shape: Shape, load: Load, computed: int, end: int, tables: Sequence[Sequence[int]], null: int
) -> Load:
    """The load of a hybrid model's first group, with the loads of the other groups. `tables` has the request's blocks by group,
    `null` for none."""
    others = (
        blocks_to_load(group, shape.chunk_tokens, computed, end, tables[group.number], null) for group in shape.others
    )
    return replace(load, others=tuple(others))


def save_all_groups(
    shape: Shape, save: Save, tables: Sequence[Sequence[int]], null: int, states: Mapping[tuple[int, int], int]
) -> Save:
    """The save of a hybrid model's first group, with the present blocks of the other groups; `states` as in `blocks_to_save`."""
    others = tuple(
        tuple(
            blocks_to_save(group, shape.chunk_tokens, chunk, tables[group.number], null, states)
            for group in shape.others
        )
        for chunk in range(save.first_chunk, len(save.hashes))
    )
    return replace(save, others=others)


def tokens_by_tier(spans: Sequence[tuple[int, int, str]], shape: Shape, start: int, tokens: int) -> dict[str, int]:
    """The number of `tokens` tokens from `start` on that come from each tier; `spans` are in chunks."""
    found: dict[str, int] = {}
    for first, end, tier in spans:
        from_token = max(first * shape.chunk_tokens, start)
        to_token = min(end * shape.chunk_tokens, start + tokens)
        if to_token > from_token:
            found[tier] = found.get(tier, 0) + to_token - from_token
    return found
