"""vLLM's block hash `sha256_cbor`, computed independently: vLLM's own hash must agree before it is trusted as a key."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from larder_kv.settings import UnsupportedError

TEST_TOKENS = tuple(range(1, 33))
"""The tokens of the test vector."""


def none_hash(seed: str) -> bytes:
    """The parent of every prompt's first block."""
    return hashlib.sha256(_text(seed)).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a block without extra keys: SHA-256 of the canonical CBOR of [parent, tokens, null]."""
    items = b"".join(_head(0, token) for token in tokens)
    encoded = _head(4, 3) + _head(2, len(parent)) + parent + _head(4, len(tokens)) + items + b"\xf6"
    return hashlib.sha256(encoded).digest()


def checked_seed(algorithm: str, seed: str, function: Callable[[Any], bytes]) -> str:
    """The seed for the namespace, together with the hash of a test vector by the engine's own `function`: engines with different
    hashes never share chunks."""
    if algorithm not in ("sha256", "sha256_cbor"):
        raise UnsupportedError(
            f"prefix_caching_hash_algo is {algorithm}: its seed is drawn by each process, and 128 bits name no prompt "
            "safely; use sha256_cbor"
        )
    if seed.lower() == "random":
        raise UnsupportedError("PYTHONHASHSEED=random: set a fixed seed, or none")
    vector = function((function(seed), TEST_TOKENS, None))
    if len(vector) != 32:
        raise UnsupportedError(f"{algorithm} gives {len(vector)} bytes, but 32 are expected")
    if algorithm == "sha256_cbor" and vector != block_hash(none_hash(seed), TEST_TOKENS):
        raise UnsupportedError("this vLLM computes sha256_cbor differently: its hashes cannot be trusted as keys")
    return f"{seed}:{vector[:8].hex()}"


def _head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for size, code in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if number < 1 << 8 * size:
            return bytes([major << 5 | code]) + number.to_bytes(size, "big")
    raise ValueError(f"{number} has more than 64 bits")


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _head(3, len(encoded)) + encoded
