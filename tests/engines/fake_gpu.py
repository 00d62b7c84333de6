"""Treats the CPU's memory as a GPU's: the connector uses its code for GPUs, over a CUDA driver of host memory, and PyTorch's
events are reached late."""

import ctypes
import threading
import time
from functools import partial
from types import SimpleNamespace


CURRENT = threading.local()
"""The device that each thread has set."""


class Event:
    """A mark on the stream."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "a thread that waits would spin"
        self._is_recorded = False

    def record(self) -> None:
        self._is_recorded = True

    def synchronize(self) -> None:
        assert self._is_recorded, "nothing was recorded"
        assert threading.current_thread() is not threading.main_thread(), "the engine's own thread waits for its stream"
        assert vars(CURRENT) == {"device": 0}, "the thread would make a context on the first GPU"
        time.sleep(0.002)


def install(library: str) -> None:
    """Installs the stand-ins; `library` is the driver."""
    driver = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    from larder_kv.vllm import device, worker

    # Only there: vLLM on CPUs puts events that do nothing in the place of PyTorch's.
    device.torch = SimpleNamespace(cuda=SimpleNamespace(Event=Event, set_device=partial(setattr, CURRENT, "device")))

    def device_of(tensors, storages):
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        for storage in storages:
            assert driver.fake_lend(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())) == 0
        return device.GpuDevice(0, storages)

    worker.device_of = device_of
