"""An engine's KV memory: PyTorch's on a GPU, or shared memory of the host for a node over the stand-in for CUDA's driver."""

import ctypes
import importlib
import mmap
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import larder_kv

POISON = 0xA5
FAKE = "--fake" in sys.argv
torch: Any = None if FAKE else importlib.import_module("torch")
"""PyTorch, if this engine has a GPU. Its import makes no context on the GPU."""


@dataclass(frozen=True)
class Shape:
    """The shape of an engine's KV memory: layers one behind the other, each a row of pages."""

    layers: int
    pages: int
    page_bytes: int
    pages_per_chunk: int

    @property
    def size(self) -> int:
        """Bytes of the memory."""
        return self.layers * self.pages * self.page_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk over all layers."""
        return self.layers * self.pages_per_chunk * self.page_bytes

    def planes(self) -> list[larder_kv.LayerPages]:
        """The places of the layers."""
        row = self.pages * self.page_bytes
        return [
            larder_kv.LayerPages(
                region=0, offset=layer * row, page_stride=self.page_bytes, pages=self.pages, run_bytes=self.page_bytes
            )
            for layer in range(self.layers)
        ]

    def spec(self, model: str) -> larder_kv.NamespaceSpec:
        """The namespace of such chunks."""
        pool = larder_kv.Pool(layers=self.layers, layer_bytes=self.pages_per_chunk * self.page_bytes)
        return larder_kv.NamespaceSpec(
            model=model,
            kv_dtype="uint8",
            layout=f"{self.layers}x{self.pages_per_chunk}x{self.page_bytes}",
            chunk_tokens=16 * self.pages_per_chunk,
            engine_block_tokens=16,
            pools=[pool],
        )


class Memory(Protocol):
    """An engine's KV memory."""

    shape: Shape

    def shared(self) -> larder_kv.IpcMemory | larder_kv.DescriptorMemory:
        """The memory as the node may map it."""

    def address(self) -> int:
        """Its address for copies in this process."""

    def write(self, pages: Sequence[int], seed: int) -> None:
        """Fills these pages of all layers with random bytes."""

    def holds(self, pages: Sequence[int], seed: int) -> bool:
        """Whether these pages have the bytes that `write` gives them."""

    def poison(self, pages: Sequence[int] | None = None) -> None:
        """Overwrites these pages, all if not given."""

    def is_poisoned(self, but: Sequence[int] = ()) -> bool:
        """Whether all pages but these are as `poison` left them."""

    def free(self) -> None:
        """Gives the memory back to the system."""


class DriverError(Exception):
    """The driver refused a call."""


class Driver:
    """The calls of CUDA's driver by which memory is shared. The calling thread has PyTorch's context."""

    IPC_HANDLE_BYTES, DESCRIPTOR, GRANULE = 64, 1, 2 << 20

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        address, pointer = ctypes.c_uint64, ctypes.c_void_p
        self._library.cuMemGetAddressRange_v2.argtypes = (pointer, pointer, address)
        self._library.cuIpcGetMemHandle.argtypes = (pointer, address)
        self._library.cuMemRetainAllocationHandle.argtypes = (pointer, address)
        self._library.cuMemGetAllocationPropertiesFromHandle.argtypes = (pointer, ctypes.c_uint64)
        self._library.cuMemExportToShareableHandle.argtypes = (pointer, ctypes.c_uint64, ctypes.c_int, ctypes.c_ulonglong)
        self._library.cuMemRelease.argtypes = (ctypes.c_uint64,)
        self._library.cuGetErrorName.argtypes = (ctypes.c_int, pointer)
        self._library.cuDeviceGetAttribute.argtypes = (pointer, ctypes.c_int, ctypes.c_int)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the driver; raises `DriverError` with the driver's name of the error."""
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({result})")

    def range_of(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation at this address."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), address)
        return start.value, size.value

    def ipc_handle(self, start: int) -> bytes:
        """The handle by which others open memory of cudaMalloc."""
        handle = (ctypes.c_ubyte * self.IPC_HANDLE_BYTES)()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), start)
        return bytes(handle)

    @contextmanager
    def piece(self, address: int) -> Iterator[int]:
        """The handle of the piece of the virtual memory interface at this address."""
        handle = ctypes.c_uint64()
        self.call("cuMemRetainAllocationHandle", ctypes.byref(handle), address)
        try:
            yield handle.value
        finally:
            self.call("cuMemRelease", handle.value)

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """Address and size of the pieces between these addresses, as far as they lie there."""
        found: list[tuple[int, int, int]] = []
        for address in range(start - start % self.GRANULE, end, self.GRANULE):
            with self.piece(address) as handle:
                if found and found[-1][0] == handle:
                    found[-1] = (handle, found[-1][1], found[-1][2] + self.GRANULE)
                else:
                    found.append((handle, address, self.GRANULE))
        return [(address, size) for _, address, size in found]

    def export(self, address: int) -> int:
        """A descriptor of the piece at this address; the caller closes it."""
        descriptor = ctypes.c_int(-1)
        with self.piece(address) as handle:
            self.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, self.DESCRIPTOR, 0)
        return descriptor.value

    def try_export(self, address: int) -> str:
        """Exports the piece at this address for nobody."""
        os.close(self.export(address))
        return "yes"

    def exportable_as(self, address: int) -> int:
        """The ways of export that the piece was made for, as bits: 1 descriptor, 8 fabric handle."""
        properties = (ctypes.c_int * 64)()
        with self.piece(address) as handle:
            self.call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), handle)
        return properties[1]

    def attribute(self, number: int) -> int:
        """An attribute of the first GPU."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value


class GpuMemory:
    """A tensor of PyTorch's."""

    def __init__(self, shape: Shape, tensor: Any = None) -> None:
        self.shape = shape
        self._bytes = torch.empty(shape.size, dtype=torch.uint8, device="cuda") if tensor is None else tensor
        self.poison()

    def shared(self) -> larder_kv.IpcMemory | larder_kv.DescriptorMemory:
        """See `Memory`."""
        driver = Driver()
        start, _ = driver.range_of(self.address())
        return larder_kv.IpcMemory(driver.ipc_handle(start), self.address() - start, self.shape.size)

    def address(self) -> int:
        """See `Memory`."""
        return int(self._bytes.data_ptr())

    def write(self, pages: Sequence[int], seed: int) -> None:
        """See `Memory`."""
        self._rows()[:, self._index(pages)] = self._content(len(pages), seed)
        torch.cuda.current_stream().synchronize()

    def holds(self, pages: Sequence[int], seed: int) -> bool:
        """See `Memory`."""
        return bool(torch.equal(self._rows()[:, self._index(pages)], self._content(len(pages), seed)))

    def poison(self, pages: Sequence[int] | None = None) -> None:
        """See `Memory`."""
        if pages is None:
            self._bytes.fill_(POISON)
        else:
            self._rows()[:, self._index(pages)] = POISON
        torch.cuda.current_stream().synchronize()

    def is_poisoned(self, but: Sequence[int] = ()) -> bool:
        """See `Memory`."""
        wanted = torch.ones(self.shape.pages, dtype=torch.bool, device="cuda")
        wanted[self._index(but)] = False
        return all(bool((row[wanted] == POISON).all()) for row in self._rows())

    def free(self) -> None:
        """See `Memory`."""
        del self._bytes
        torch.cuda.empty_cache()

    def _rows(self) -> Any:
        return self._bytes.view(self.shape.layers, self.shape.pages, self.shape.page_bytes)

    def _index(self, pages: Sequence[int]) -> Any:
        return torch.tensor(list(pages), dtype=torch.long, device="cuda")

    def _content(self, pages: int, seed: int) -> Any:
        generator = torch.Generator(device="cuda")
        generator.manual_seed(seed)
        size = (self.shape.layers, pages, self.shape.page_bytes)
        return torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=generator)


class PieceMemory(GpuMemory):
    """One piece of an expandable segment: such memory is many allocations behind one another, and each is shared by itself."""

    def __init__(self, shape: Shape, whole: Any, address: int, size: int) -> None:
        pages = size // (shape.layers * shape.page_bytes)
        shape = replace(shape, pages=pages - pages % shape.pages_per_chunk)
        first = address - int(whole.data_ptr())
        super().__init__(shape, whole[first : first + shape.size])
        self._piece_bytes = size

    def shared(self) -> larder_kv.IpcMemory | larder_kv.DescriptorMemory:
        """See `Memory`. The descriptor is closed by `Engine`."""
        return larder_kv.DescriptorMemory(Driver().export(self.address()), self._piece_bytes)


class HostMemory:
    """Shared memory of the host."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._descriptor = os.memfd_create("faults-engine")
        os.ftruncate(self._descriptor, shape.size)
        self._bytes = mmap.mmap(self._descriptor, shape.size)
        self.poison()

    def shared(self) -> larder_kv.IpcMemory | larder_kv.DescriptorMemory:
        """See `Memory`."""
        return larder_kv.DescriptorMemory(os.dup(self._descriptor), self.shape.size)

    def address(self) -> int:
        """See `Memory`."""
        driver = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        memory = (ctypes.c_char * self.shape.size).from_buffer(self._bytes)
        if driver.fake_lend(memory, ctypes.c_size_t(self.shape.size)) != 0:
            raise DriverError("fake_lend")
        return ctypes.addressof(memory)

    def write(self, pages: Sequence[int], seed: int) -> None:
        """See `Memory`."""
        for place, content in self._places(pages, seed):
            self._bytes[place] = content

    def holds(self, pages: Sequence[int], seed: int) -> bool:
        """See `Memory`."""
        return all(self._bytes[place] == content for place, content in self._places(pages, seed))

    def poison(self, pages: Sequence[int] | None = None) -> None:
        """See `Memory`."""
        for place in self._each(range(self.shape.pages) if pages is None else pages):
            self._bytes[place] = bytes([POISON]) * self.shape.page_bytes

    def is_poisoned(self, but: Sequence[int] = ()) -> bool:
        """See `Memory`."""
        poison = bytes([POISON]) * self.shape.page_bytes
        wanted = sorted(set(range(self.shape.pages)) - set(but))
        return all(self._bytes[place] == poison for place in self._each(wanted))

    def free(self) -> None:
        """See `Memory`."""
        self._bytes.close()
        os.close(self._descriptor)

    def _each(self, pages: Sequence[int]) -> Iterator[slice]:
        for layer in range(self.shape.layers):
            for page in pages:
                start = (layer * self.shape.pages + page) * self.shape.page_bytes
                yield slice(start, start + self.shape.page_bytes)

    def _places(self, pages: Sequence[int], seed: int) -> Iterator[tuple[slice, bytes]]:
        content = random.Random(seed)
        for place in self._each(pages):
            yield place, content.randbytes(self.shape.page_bytes)
