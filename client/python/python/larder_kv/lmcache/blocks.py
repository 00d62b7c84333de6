"""LMCache's keys and memory objects as keys and blocks of Larder."""

import hashlib
from collections.abc import Sequence
from typing import Any

import larder_kv
from larder_kv.identity import abilities_of_cpu, shortened
from larder_kv.namespace import NamespaceSpec, Pool


def digest(*fields: object) -> bytes:
    """The 32-byte key for the fields of one of LMCache's keys."""
    content = hashlib.sha256()
    for field in fields:
        part = field if isinstance(field, bytes) else str(field).encode()
        content.update(len(part).to_bytes(8, "little") + part)
    return content.digest()


def namespace(
    *, model: str, revision: str, dtype: str, layout: str, hashing: str, tokens: int, block_bytes: int
) -> NamespaceSpec:
    """A flat namespace: LMCache's keys stand for themselves, and name model, rank, hash and tags."""
    return NamespaceSpec(
        model=shortened(model),
        revision=shortened(revision),
        kv_dtype=shortened(dtype),
        layout=shortened(f"lmcache {device()} {layout}"),
        hash_algorithm=shortened(f"lmcache {hashing}"),
        chunk_tokens=tokens,
        engine_block_tokens=tokens,
        pools=(Pool(layers=1, layer_bytes=block_bytes),),
        flat=True,
    )


def device() -> str:
    """The device of the engine's KV. LMCache copies tokens as the engine's kernels have packed them; on CPUs, by its abilities."""
    from lmcache import torch_device_type

    return f"cpu {abilities_of_cpu()}" if torch_device_type == "cpu" else str(torch_device_type)


class Buffers:
    """The blocks that a call names, each in one buffer of its size."""

    def __init__(self, buffers: Sequence[Any]) -> None:
        self._buffers = buffers

    def fill(self, lease: larder_kv.Lease, first: int) -> None:
        """Copies all leased chunks to buffers `first` on."""
        lease.copy_blocks(self._buffers[first : first + lease.chunks])

    def write(self, staged: Sequence[larder_kv.StagedChunk], numbers: Sequence[int]) -> None:
        """Copies buffers to staged chunks, one buffer to each."""
        larder_kv.StagedChunk.copy_all(staged, [self._buffers[number] for number in numbers])
