"""Indexes of routers, each filled from messages as its router's documentation describes, and vLLM's example of a subscriber.

Each index takes the events of one medium, so that a test sees the worth of these events alone. None is a router's own code.
"""

from collections.abc import Sequence

import msgspec
import zmq

CLEARED, REMOVED, STORED = "AllBlocksCleared", "BlockRemoved", "BlockStored"
SNAPSHOT = -2


class Subscriber:
    """A subscriber like vLLM's example: a topic, a number without gaps, a batch; missed messages are requested again."""

    def __init__(self, endpoint: str, replay: str):
        context = zmq.Context.instance()
        self._events, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._events.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._events.connect(endpoint)
        self._replay.connect(replay)
        self.topic = ""
        self.batches: dict[int, bytes] = {}

    def read(self) -> None:
        while self._events.poll(100):
            topic, number, payload = self._events.recv_multipart()
            assert self.topic in ("", topic.decode()), f"{self.topic} and {topic.decode()}"
            self.topic = topic.decode()
            self.batches[int.from_bytes(number, "big")] = payload

    def replayed(self, start: int) -> list[tuple[int, str, bytes]]:
        """All messages from a number on, as a late subscriber requests them; a node also answers `SNAPSHOT`."""
        self._replay.send_multipart([b"", start.to_bytes(8, "big", signed=True)])
        found = []
        while self._replay.poll(5_000):
            empty, topic, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                return found
            found.append((int.from_bytes(number, "big"), topic.decode(), payload))
        raise AssertionError("the replay has no end")


class Index:
    """The common part of all routers: a batch is `[time, events, rank]`, an event is a map with its `type`."""

    def __init__(self, block_tokens: int, medium: str = "CPU"):
        self.block_tokens, self.medium = block_tokens, medium
        self.refused = 0

    def take(self, topic: str, payload: bytes) -> None:
        _, events, *rank = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == CLEARED:
                self.cleared(topic, rank[0] if rank else 0)
            elif (event.get("medium") or "GPU") == self.medium:
                (self.stored if event["type"] == STORED else self.removed)(topic, event)

    def cleared(self, topic: str, rank: int) -> None:
        """Does nothing: vLLM's own blocks are not those of this medium."""

    def stored(self, topic: str, event: dict) -> None:
        raise NotImplementedError

    def removed(self, topic: str, event: dict) -> None:
        raise NotImplementedError

    def blocks(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        whole = len(tokens) // self.block_tokens * self.block_tokens
        return [tuple(tokens[at : at + self.block_tokens]) for at in range(0, whole, self.block_tokens)]


class Dynamo(Index):
    """A tree of blocks by their tokens below their parents. A block of another size, without tokens or with an unknown parent is
    dropped (docs.nvidia.com/dynamo, "Publish KV events from a custom backend")."""

    def __init__(self, block_tokens: int, medium: str = "CPU"):
        super().__init__(block_tokens, medium)
        self.known: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def stored(self, topic: str, event: dict) -> None:
        hashes, tokens, parent = event["block_hashes"], event["token_ids"], event["parent_block_hash"]
        is_whole = event["block_size"] == self.block_tokens and len(tokens) == len(hashes) * self.block_tokens
        if not is_whole or not (parent is None or parent in self.known):
            self.refused += 1
            return
        for one, block in zip(hashes, self.blocks(tokens), strict=True):
            self.known[one] = (parent, block)
            parent = one

    def removed(self, topic: str, event: dict) -> None:
        for one in event["block_hashes"]:
            self.known.pop(one, None)

    def overlap(self, tokens: Sequence[int]) -> int:
        parent, found = None, 0
        children = {place: one for one, place in self.known.items()}
        for block in self.blocks(tokens):
            parent = children.get((parent, block))
            if parent is None:
                break
            found += 1
        return found


class LlmD(Index):
    """Pods and tiers by a key of the index's own, made of a block's tokens, its parent's key and its extra keys. The topic names
    pod and model; an event without tokens names another place of known blocks (llm-d-kv-cache, `kvevents`)."""

    def __init__(self, block_tokens: int, medium: str = "CPU"):
        super().__init__(block_tokens, medium)
        self.keys: dict[int, tuple] = {}
        self.pods: dict[tuple, set[tuple[str, str]]] = {}

    def stored(self, topic: str, event: dict) -> None:
        place = self.place(topic, event)
        parent, hashes = event["parent_block_hash"], event["block_hashes"]
        blocks = self.blocks(event["token_ids"])
        if len(blocks) != len(hashes) or not (parent is None or parent in self.keys):
            for one in hashes:
                if one in self.keys:
                    self.pods[self.keys[one]].add(place)
                else:
                    self.refused += 1
            return
        key = self.keys.get(parent)
        for number, (one, block) in enumerate(zip(hashes, blocks, strict=True)):
            extra = (event.get("extra_keys") or [None] * len(hashes))[number]
            key = (key, block, tuple(extra) if extra else None)
            self.keys[one] = key
            self.pods.setdefault(key, set()).add(place)

    def removed(self, topic: str, event: dict) -> None:
        for one in event["block_hashes"]:
            if one in self.keys:
                self.pods[self.keys[one]].discard(self.place(topic, event))

    def place(self, topic: str, event: dict) -> tuple[str, str]:
        kind, pod, _model = topic.split("@")
        assert kind == "kv"
        return pod, (event.get("medium") or "GPU").lower()

    def overlap(self, tokens: Sequence[int], salt: str | None = None) -> int:
        key, found = None, 0
        for number, block in enumerate(self.blocks(tokens)):
            key = (key, block, (salt,) if salt and number == 0 else None)
            if not self.pods.get(key):
                break
            found += 1
        return found


class SglangGateway(Index):
    """Positions by the content of blocks. The worker's servicer translates each block by itself: its share of the tokens, its
    hash as a signed number. It ends the subscription at an event whose number of tokens does not fit its blocks (the servicer of
    SGLang's gateway, `SubscribeKvEvents`)."""

    def __init__(self, block_tokens: int, medium: str = "CPU"):
        super().__init__(block_tokens, medium)
        self.places: dict[int, tuple[int, tuple[int, ...]]] = {}

    def stored(self, topic: str, event: dict) -> None:
        hashes, tokens = event["block_hashes"], event["token_ids"]
        assert len(tokens) == len(hashes) * event["block_size"] > 0, "the subscription ends: a layout that cannot be translated"
        parent = event["parent_block_hash"]
        position = -1 if parent is None else self.places.get(signed(parent), (None, ()))[0]
        if position is None or event["block_size"] != self.block_tokens:
            self.refused += 1
            return
        for number, (one, block) in enumerate(zip(hashes, self.blocks(tokens), strict=True)):
            self.places[signed(one)] = (position + 1 + number, block)

    def removed(self, topic: str, event: dict) -> None:
        for one in event["block_hashes"]:
            self.places.pop(signed(one), None)

    def overlap(self, tokens: Sequence[int]) -> int:
        known, found = set(self.places.values()), 0
        for position, block in enumerate(self.blocks(tokens)):
            if (position, block) not in known:
                break
            found += 1
        return found


class VllmRouter(Index):
    """Blocks of one size (the router's `--kv-block-size`), by a hash of their content and of the blocks before them, with the
    router's own seed."""

    def __init__(self, block_tokens: int, medium: str = "CPU"):
        super().__init__(block_tokens, medium)
        self.contents: dict[int, int] = {}

    def stored(self, topic: str, event: dict) -> None:
        parent = event["parent_block_hash"]
        if event["block_size"] != self.block_tokens or not (parent is None or parent in self.contents) or not event["token_ids"]:
            self.refused += 1
            return
        content = self.contents.get(parent, 0)
        for one, block in zip(event["block_hashes"], self.blocks(event["token_ids"]), strict=True):
            content = hash((content, block))
            self.contents[one] = content

    def removed(self, topic: str, event: dict) -> None:
        for one in event["block_hashes"]:
            self.contents.pop(one, None)

    def overlap(self, tokens: Sequence[int]) -> int:
        known, content, found = set(self.contents.values()), 0, 0
        for block in self.blocks(tokens):
            content = hash((content, block))
            if content not in known:
                break
            found += 1
        return found


def signed(one: int) -> int:
    return one - (1 << 64) if one >= 1 << 63 else one


def routers(block_tokens: int) -> list[Index]:
    """One index of each kind."""
    return [kind(block_tokens) for kind in (Dynamo, LlmD, SglangGateway, VllmRouter)]
