"""Tells the node the tokens of chunks, for the node's own KV events: once for each chunk and session."""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

import larder_kv
from larder_kv.vllm.node import Node, Open
from larder_kv.vllm.published import Stored

logger = logging.getLogger("vllm.larder")

MOST_SAID = 65_536
"""The most chunks that are remembered and not described again. A chunk that the node has forgotten is described again once it is
no longer remembered here."""


class Describer:
    """Describes one engine's chunks to its node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._heard: Open | None = None
        self._said: OrderedDict[bytes, None] = OrderedDict()

    def say(self, names: Iterable[bytes], describe: Callable[[int], Stored]) -> None:
        """Describes these chunks; `describe` gets a chunk's index among the names."""
        node = self._node.current()
        if node is None:
            return
        if node is not self._heard:
            # A node that started again knows no descriptions.
            self._heard = node
            self._said.clear()
        new = [(place, name) for place, name in enumerate(names) if name not in self._said]
        if not new:
            return
        try:
            node.session.describe(node.namespace, [described(describe(place)) for place, _ in new])
        except larder_kv.LarderError as error:
            logger.debug("the node was not told of tokens: %s", error)
            return
        self._said.update((name, None) for _, name in new)
        while len(self._said) > MOST_SAID:
            self._said.popitem(last=False)


def described(chunk: Stored) -> larder_kv.DescribedChunk:
    """A chunk's description for the node."""
    has_keys = chunk.extra_keys is not None and any(keys is not None for keys in chunk.extra_keys)
    return larder_kv.DescribedChunk(
        hashes=chunk.hashes,
        parent=chunk.parent,
        tokens=chunk.tokens,
        lora_id=chunk.lora_id,
        lora_name=chunk.lora_name,
        extra_keys=json.dumps(chunk.extra_keys, default=text_of) if has_keys else "",
    )


def text_of(key: object) -> str:
    """The text of a key that JSON cannot express: an embedding's digest."""
    return key.hex() if isinstance(key, bytes) else str(key)
