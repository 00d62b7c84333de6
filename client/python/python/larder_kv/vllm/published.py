"""The events about the node's chunks for routers. An event is complete if this engine knows the chunk's tokens.

A node knows names of chunks, not tokens. The engine knows the tokens of the prompts that it got. The event of a chunk that both
know has all fields of vLLM's own events: the hash of each block, its tokens, its parent, LoRA adapter and extra keys. The event
of any other chunk waits until a prompt brings the tokens, since a router may end its subscription at an event without tokens. The
event of a chunk follows its parent's, since routers drop a block with an unknown parent. If events must not contain tokens, an
event has only the chunk's name.
"""

from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from larder_kv.vllm.events import Event

MOST_DESCRIBED = 16_384
"""Limit of chunks whose tokens are remembered: some kilobytes each."""


@dataclass(frozen=True)
class Stored:
    """A stored chunk, block by block."""

    hashes: Sequence[bytes]
    parent: bytes | None
    block_tokens: int
    tokens: Sequence[int] = ()
    """Empty if the tokens are not known: then there is one hash, the chunk's, and `block_tokens` are the chunk's."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None


@dataclass(frozen=True)
class Removed:
    """A removed chunk, by the hashes in its earlier event."""

    hashes: Sequence[bytes]


class Published:
    """Turns a node's events into events for routers, once for each chunk."""

    def __init__(self, chunk_tokens: int, tells_tokens: bool) -> None:
        self._chunk_tokens, self._tells_tokens = chunk_tokens, tells_tokens
        # By the chunk's name; the chunk that was used last is at the end.
        self._described: OrderedDict[bytes, Stored] = OrderedDict()
        # Stored chunks that were published, with the hashes in their events.
        self._told: dict[bytes, Sequence[bytes]] = {}
        # Stored chunks that wait for their tokens, with their parents.
        self._waiting: dict[bytes, bytes | None] = {}
        # Stored chunks that wait until their parents are published, with the parents; and the reverse.
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
        """Takes a chunk's description from a prompt; a stored chunk that waited for it is published."""
        name = chunk.hashes[-1]
        self._described[name] = replace(chunk, tokens=array("I", chunk.tokens))
        self._described.move_to_end(name)
        if len(self._described) > MOST_DESCRIBED:
            self._described.popitem(last=False)
        if name in self._waiting:
            self._described_late += self._stored(name, self._waiting.pop(name))

    def take(self, events: Iterable[Event]) -> list[Stored | Removed]:
        """The events to publish for these events of the node, and for chunks that were described since the last call."""
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
        """All stored chunks with known tokens, for subscribers that came later; parents come before their children."""
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
        """Publishes a stored chunk, and the chunks that have waited for it."""
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
        """Forgets a removed chunk that may be waiting for its parent."""
        parent = self._parents.pop(name, None)
        if parent is not None:
            del self._children[parent][name]
            if not self._children[parent]:
                del self._children[parent]
