"""SGLang's host pools by the addresses of their pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from larder_kv import ScatteredMemory
from larder_kv.settings import UnsupportedError
from larder_kv.sglang.facts import PoolFacts


@dataclass(frozen=True)
class HostPool:
    """A host pool whose pages can be copied."""

    facts: PoolFacts
    page_rows: int
    """Indices of one page."""
    pool: Any

    def pieces(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the pieces of these pages, page by page."""
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        return list(addresses), list(sizes)


class HostPools:
    """The pools that SGLang registered, by name, and their memory."""

    def __init__(self) -> None:
        self._pools: dict[str, HostPool | None] = {}
        self._regions: dict[tuple[int, int], Any] = {}
        self._memory: ScatteredMemory | None = None

    def add(self, name: str, pool: Any, is_replicated: bool) -> None:
        """Takes a pool. Raises `UnsupportedError` if its pages have no addresses."""
        tensors = [tensor for tensor in buffers(pool) if tensor.numel() > 0]
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise UnsupportedError(f"the host pool {name} is on {tensor.device}, not in host memory")
            storage = tensor.untyped_storage()
            place = (storage.data_ptr(), storage.nbytes())
            if place not in self._regions:
                self._regions[place] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        # An anchor that only counts rows has no memory of its own.
        self._pools[name] = describe(name, pool, is_replicated) if tensors or has_addresses(pool) else None
        self._memory = ScatteredMemory(list(self._regions.values()))

    def get(self, name: str) -> HostPool | None:
        """The pool; None if it has no bytes. Raises `KeyError` if SGLang did not register it."""
        return self._pools[name]

    @property
    def memory(self) -> ScatteredMemory:
        """The memory of all pools."""
        if self._memory is None:
            raise RuntimeError("SGLang registered no host pool")
        return self._memory

    def clear(self) -> None:
        """Lets go of all memory."""
        self._pools.clear()
        self._regions.clear()
        self._memory = None


def buffers(pool: Any) -> Iterator[torch.Tensor]:
    """The tensors that contain a pool's pages."""
    candidates = [getattr(pool, "kv_buffer", None)]
    if hasattr(pool, "get_hybrid_pool_buffer"):
        try:
            candidates += pool.get_hybrid_pool_buffer()
        except (AttributeError, NotImplementedError, TypeError):
            # SGLang makes this buffer for pools besides the KV. Pools whose `kv_buffer` has all pages lack it.
            pass
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor):
            yield candidate
        elif isinstance(candidate, Sequence):
            yield from (tensor for tensor in candidate if isinstance(tensor, torch.Tensor))


def has_addresses(pool: Any) -> bool:
    """Whether the pool gives addresses of pages, possibly in another pool's memory."""
    return hasattr(pool, "get_page_buffer_meta")


def describe(name: str, pool: Any, is_replicated: bool) -> HostPool:
    """Reads a pool's facts for the namespace."""
    layout = str(getattr(pool, "layout", ""))
    rows = int(getattr(pool, "page_size", 1) or 1)
    try:
        _, sizes = pool.get_page_buffer_meta(torch.arange(rows))
    except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
        raise UnsupportedError(
            f"the host pool {name} ({type(pool).__name__}) has no addresses of pages in layout {layout!r}: "
            f"choose another --hicache-mem-layout, such as page_first or page_first_direct ({error})"
        ) from error
    facts = PoolFacts(name, kind_of(pool), layout, dtype_of(pool), tuple(int(size) for size in sizes), is_replicated)
    return HostPool(facts, rows, pool)


def kind_of(pool: Any) -> str:
    """SGLang's class of a pool, and the order in which the device's pool beside it has its pages."""
    device = getattr(pool, "device_pool", None)
    names = [type(pool).__name__, getattr(pool, "storage_format_tag", None)]
    names += [] if device is None else [type(device).__name__, getattr(device, "kv_cache_layout", None)]
    return " ".join(str(name) for name in names if name)


def dtype_of(pool: Any) -> str:
    """The data types in a pool, in torch's words."""
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in buffers(pool)]
    names.append(str(getattr(pool, "dtype", "")).removeprefix("torch."))
    return " ".join(dict.fromkeys(name for name in names if name))
