"""The pages that a call of SGLang names, as pieces of host memory."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import larder_kv


@dataclass(frozen=True)
class Pages:
    """Pages by the addresses of their pieces, page by page."""

    memory: larder_kv.ScatteredMemory
    addresses: Sequence[int]
    sizes: Sequence[int]
    pieces: int
    """Pieces of one page."""

    def fill(self, lease: larder_kv.Lease, first: int) -> None:
        """Copies all leased chunks to pages `first` on."""
        part = slice(first * self.pieces, (first + lease.chunks) * self.pieces)
        self.memory.load(lease, self.addresses[part], self.sizes[part])

    def write(self, staged: Sequence[larder_kv.StagedChunk], numbers: Sequence[int]) -> None:
        """Copies pages to staged chunks, one page to each."""
        pieces = [number * self.pieces + piece for number in numbers for piece in range(self.pieces)]
        addresses = [self.addresses[piece] for piece in pieces]
        self.memory.save(staged, addresses, [self.sizes[piece] for piece in pieces])


def digests(keys: Sequence[str], salt: bytes = b"") -> list[bytes]:
    """Page hashes as bytes, from SGLang's 64 hexadecimal digits; with a salt, names that are known only to its owner."""
    hashes = [bytes.fromhex(key) for key in keys]
    return [hashlib.sha256(salt + one).digest() for one in hashes] if salt else hashes
