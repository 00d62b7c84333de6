"""The place of an engine's KV caches: host memory, or a GPU, whose stream runs behind the engine's thread.

On a GPU copies are orders to the device. So a step's loads and saves carry *marks*, events on the engine's stream. The
connector's threads wait for a mark before they copy. Event handles do not leave the process.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

import larder_kv
from larder_kv.settings import UnsupportedError
from larder_kv.vllm.memory import Mark, Pages, done


class Device(Protocol):
    """Describes allocations as memory, and makes marks after which they may be copied."""

    def pages(self, layers: Sequence[larder_kv.LayerPages], pages_per_chunk: int) -> Pages:
        """These layers; their regions are the allocations in order."""

    def mark(self) -> Mark:
        """A mark: calling it waits until the device has done all orders that the calling thread gave before."""


class HostDevice:
    """Host memory; the engine's thread writes it directly."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for storage in storages]

    def pages(self, layers: Sequence[larder_kv.LayerPages], pages_per_chunk: int) -> Pages:
        """See `Device`."""
        return larder_kv.PagedMemory(self._buffers, layers, pages_per_chunk=pages_per_chunk)

    def mark(self) -> Mark:
        """See `Device`."""
        return done


class GpuDevice:
    """Memory of a GPU."""

    def __init__(self, ordinal: int, storages: Sequence[torch.UntypedStorage]) -> None:
        self._ordinal, self._gpu, self._storages = ordinal, open_gpu(ordinal), storages

    def pages(self, layers: Sequence[larder_kv.LayerPages], pages_per_chunk: int) -> Pages:
        """See `Device`."""
        regions = [(storage.data_ptr(), storage.nbytes()) for storage in self._storages]
        try:
            return larder_kv.GpuPagedMemory(self._gpu, regions, layers, pages_per_chunk=pages_per_chunk)
        except ValueError as error:
            raise UnsupportedError(f"the KV cache on {self._gpu.name} is not supported: {error}") from error

    def mark(self) -> Mark:
        """See `Device`."""
        # A thread that waits for the event sleeps: a step takes far too long to spin.
        event = torch.cuda.Event(blocking=True)
        event.record()

        def wait() -> None:
            # A thread begins with GPU 0: waiting there would make a context of some hundred MiB on the GPU of another rank.
            torch.cuda.set_device(self._ordinal)
            event.synchronize()

        return wait


def device_of(tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> Device:
    """The device of all these tensors; raises `UnsupportedError` for a device that copies do not support."""
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) != 1:
        raise UnsupportedError(f"the KV caches of one rank are on several devices: {', '.join(devices)}")
    device = tensors[0].device
    if device.type == "cpu":
        return HostDevice(storages)
    if device.type != "cuda":
        raise UnsupportedError(f"the KV cache is on {device}: this connector copies from and to host memory and CUDA GPUs")
    return GpuDevice(device.index or 0, storages)


def open_gpu(ordinal: int) -> larder_kv.Gpu:
    """A GPU of this process."""
    try:
        return larder_kv.Gpu(ordinal)
    except larder_kv.GpuError as error:
        raise UnsupportedError(
            f"the KV cache is on GPU {ordinal}, and this connector cannot copy there: {error}. "
            "larder_kv.vllm.LarderTier, below vLLM's own offloading, needs no copies of ours"
        ) from error
