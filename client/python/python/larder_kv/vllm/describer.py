"""Tells the node of which tokens chunks are, for its own KV events: once a chunk and session."""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

import larder_kv
from larder_kv.vllm.node import Node, Open
from larder_kv.vllm.published import Stored

logger = logging.getLogger("vllm.larder")

MOST_SAID = 65_536
"""Chunks that are not said again; a node that forgot one hears of it when it is not among these any more."""


class Describer:
    """What one engine tells its node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._heard: Open | None = None
        self._said: OrderedDict[bytes, None] = OrderedDict()

    def say(self, names: Iterable[bytes], describe: Callable[[int], Stored]) -> None:
        """Says of these chunks what `describe` makes of them, by their place among the names."""
        node = self._node.current()
        if node is None:
            return
        if node is not self._heard:
            # A node that starts again knows nothing.
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
    """A chunk as nodes hear of it."""
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
    """A key that JSON has no form for: the digest of an embedding."""
    return key.hex() if isinstance(key, bytes) else str(key)
