"""What routers are told of the node's chunks: events that stand alone where this engine knows the chunk's tokens.

A node knows names of chunks, not tokens. The engine knows those of the prompts that it was asked. An event of a chunk that
both know has all that vLLM's own events have: the hash of each block, its tokens, its parent, LoRA adapter and extra keys.
Another chunk is told when a prompt brings its tokens: a router may end its subscription at an event without them. A chunk is told
behind its parent, since routers drop a block whose parent they do not know. Where no tokens are to be told, an event has the chunk's
name alone.
"""

from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from larder_kv.vllm.events import Event

MOST_DESCRIBED = 16_384
"""Chunks whose tokens are remembered: some kilobytes each."""


@dataclass(frozen=True)
class Stored:
    """A chunk that is there, block by block."""

    hashes: Sequence[bytes]
    parent: bytes | None
    block_tokens: int
    tokens: Sequence[int] = ()
    """Empty where they are not known: then there is one hash, the chunk's, and `block_tokens` are the chunk's."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None


@dataclass(frozen=True)
class Removed:
    """A chunk that has gone, by the hashes under which it was told."""

    hashes: Sequence[bytes]


class Published:
    """Turns a node's events into what is told, once for each chunk."""

    def __init__(self, chunk_tokens: int, tells_tokens: bool) -> None:
        self._chunk_tokens, self._tells_tokens = chunk_tokens, tells_tokens
        # By the chunk's name, the one that was used last at the end.
        self._described: OrderedDict[bytes, Stored] = OrderedDict()
        # What was told and is there: the hashes under which it was.
        self._told: dict[bytes, Sequence[bytes]] = {}
        # Those that are there and wait for their tokens, with their parents.
        self._waiting: dict[bytes, bytes | None] = {}
        # Those that are there and wait until their parents are told, with these, and the other way round.
        self._parents: dict[bytes, bytes] = {}
        self._children: defaultdict[bytes, dict[bytes, None]] = defaultdict(dict)
        self._described_late: list[Stored | Removed] = []

    def knows(self, name: bytes) -> bool:
        """Whether a chunk's tokens are known."""
        if name not in self._described:
            return False
        self._described.move_to_end(name)
        return True

    def describe(self, chunk: Stored) -> None:
        """Takes what a prompt says of a chunk; one that is there and was not told is told."""
        name = chunk.hashes[-1]
        self._described[name] = replace(chunk, tokens=array("I", chunk.tokens))
        self._described.move_to_end(name)
        if len(self._described) > MOST_DESCRIBED:
            self._described.popitem(last=False)
        if name in self._waiting:
            self._described_late += self._stored(name, self._waiting.pop(name))

    def take(self, events: Iterable[Event]) -> list[Stored | Removed]:
        """What is to be told of these events, and of chunks that were described since the last call."""
        told, self._described_late = self._described_late, []
        for event in events:
            if event.is_stored:
                told += self._stored(event.hash, event.parent)
                continue
            known = self._told.pop(event.hash, None)
            self._waiting.pop(event.hash, None)
            self._wait_no_more(event.hash)
            if known is not None:
                told.append(Removed(known))
        return told

    def again(self) -> list[Stored]:
        """Everything that is there and whose tokens are known, for those who came later, parents ahead of their children."""
        known = {name: self._described[name] for name in self._told if name in self._described}
        children: defaultdict[bytes | None, list[Stored]] = defaultdict(list)
        for chunk in known.values():
            children[chunk.parent].append(chunk)
        told = children[None]
        # The list grows as it is read.
        for chunk in told:
            told += children[chunk.hashes[-1]]
        return told

    def _stored(self, name: bytes, parent: bytes | None) -> list[Stored]:
        """Tells a chunk that is there, and those that have waited for it."""
        if not self._tells_tokens:
            self._told[name] = [name]
            return [Stored([name], parent, self._chunk_tokens)]
        told: list[Stored] = []
        coming = deque([(name, parent)])
        while coming:
            name, parent = coming.popleft()
            chunk = self._described.get(name)
            if chunk is None:
                self._waiting[name] = parent
            elif chunk.parent is not None and chunk.parent not in self._told:
                self._parents[name] = chunk.parent
                self._children[chunk.parent][name] = None
            else:
                self._told[name] = chunk.hashes
                told.append(chunk)
                for child in self._children.pop(name, ()):
                    del self._parents[child]
                    coming.append((child, name))
        return told

    def _wait_no_more(self, name: bytes) -> None:
        """A chunk has gone while it waited for its parent, if it did."""
        parent = self._parents.pop(name, None)
        if parent is not None:
            del self._children[parent][name]
            if not self._children[parent]:
                del self._children[parent]
