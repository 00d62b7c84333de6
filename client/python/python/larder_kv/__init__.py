"""Use a Larder KV cache from Python.

A `Session` (for threads) or an `AsyncSession` (for asyncio) talks to the node on this host:

- get: `lookup` tells how much of a prompt is in the cache; `lookup_and_prefetch` also brings these chunks near. `lease` keeps
  chunks in place, `Lease.copy_block` copies a block out, `Lease.view` reads it in place; dropping the lease gives the chunks
  back. Reads are verified as the session's `verify` says. `Prefetches` starts prefetches for a scheduler, which must not wait.
- put: `reserve` returns the missing chunks, `stage` gives a chunk room, `StagedChunk.copy_from` fills the room, `commit` hands
  the chunk over.
- engines' memory: `PagedMemory` and `ScatteredMemory` copy between blocks and host memory, `GpuPagedMemory` between blocks and a
  `Gpu`; with `register_tensors`, `load_pages` and `save_pages` the node copies between blocks and GPU memory.
- hand over: `stage_layers` and `hand_over` give layers ahead of the commit, `follow` reads chunks while another engine writes
  them.

`larder_kv.vllm` has the connector for vLLM, `larder_kv.sglang` a storage for SGLang, `larder_kv.lmcache` one for LMCache.
"""

from typing import TYPE_CHECKING

from larder_kv._native import (
    AsyncSession,
    BlockView,
    Chain,
    CopyProgress,
    Follow,
    Found,
    Gpu,
    GpuPagedMemory,
    InPlace,
    Lease,
    Namespace,
    NodeCopy,
    NodeTensors,
    PagedMemory,
    PendingLease,
    Pinned,
    Prefetches,
    Progress,
    Reservation,
    ScatteredMemory,
    Session,
    Span,
    StagedChunk,
    StagedLayers,
    Stats,
    Ticket,
)
from larder_kv.errors import (
    BusyError,
    ConnectError,
    DamagedError,
    EndedError,
    ForkedError,
    GpuError,
    LarderError,
    RefusedError,
    ReleasedError,
    RequestTimeout,
    WindowError,
)
from larder_kv.namespace import DescribedChunk, DescriptorMemory, IpcMemory, LayerPages, NamespaceSpec, Pool

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name):
        if name == "__version__":
            from importlib.metadata import version

            return version("larder-kv")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AsyncSession",
    "BlockView",
    "BusyError",
    "Chain",
    "ConnectError",
    "CopyProgress",
    "DamagedError",
    "DescribedChunk",
    "DescriptorMemory",
    "EndedError",
    "Follow",
    "ForkedError",
    "Found",
    "Gpu",
    "GpuError",
    "GpuPagedMemory",
    "InPlace",
    "IpcMemory",
    "LarderError",
    "LayerPages",
    "Lease",
    "Namespace",
    "NamespaceSpec",
    "NodeCopy",
    "NodeTensors",
    "PagedMemory",
    "PendingLease",
    "Pinned",
    "Pool",
    "Prefetches",
    "Progress",
    "RefusedError",
    "ReleasedError",
    "RequestTimeout",
    "Reservation",
    "ScatteredMemory",
    "Session",
    "Span",
    "StagedChunk",
    "StagedLayers",
    "Stats",
    "Ticket",
    "WindowError",
]
