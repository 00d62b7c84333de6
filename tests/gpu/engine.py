"""An engine for tests of the GPU lane: answers each line of its input with a line, with PyTorch."""

import sys
import time


def say(text: object) -> None:
    print(text, flush=True)


try:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    torch.zeros(1, device="cuda")
except (ImportError, RuntimeError) as error:
    say(f"no PyTorch with a GPU: {error}".replace("\n", " "))
    sys.exit()

import ctypes  # noqa: E402


class Handle(ctypes.Structure):
    """A CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


shared = torch.zeros(0)
original = torch.zeros(0)


def share(size: str, seed: str) -> str:
    """Allocates memory as cudaMalloc does, and fills it with random bytes; returns the allocation's handle, and the offset of the
    tensor."""
    global shared, original
    torch.manual_seed(int(seed))
    shared = torch.randint(0, 256, (int(size),), dtype=torch.uint8, device="cuda")
    original = shared.clone()
    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    handle, base, length = Handle(), ctypes.c_uint64(), ctypes.c_size_t()
    address = ctypes.c_uint64(shared.data_ptr())
    for result in (
        driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(length), address),
        driver.cuIpcGetMemHandle(ctypes.byref(handle), base),
    ):
        if result != 0:
            return f"the driver refused to share memory ({result})"
    return f"shared {bytes(handle.bytes).hex()} {shared.data_ptr() - base.value}"


def poison() -> str:
    shared.fill_(0xA5)
    torch.cuda.synchronize()
    return "poisoned"


def compare(pages: str, chunks: str, layers: str) -> str:
    """Whether the last pages have the former content of the first pages, and the other pages are unchanged."""
    torch.cuda.synchronize()
    now, before, count = shared.view(int(layers), int(pages), -1), original.view(int(layers), int(pages), -1), int(chunks)
    if not torch.equal(now[:, -count:], before[:, :count]):
        return "the last pages have other bytes than the first had"
    if not bool((now[:, :-count] == 0xA5).all()):
        return "pages were written that should not have been"
    return "equal"


def median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def timed(action: object, rounds: int) -> float:
    times = []
    for number in range(rounds + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(time.perf_counter() - start)
    return median(times)


def index(chunks: str, layers: str, pages: str, page_bytes: str) -> str:
    """Copies as an engine does by itself: indexes each layer's pages, and copies to or from pinned memory. GB/s, load and
    save."""
    count, size = int(chunks), int(page_bytes)
    memory = [torch.randint(0, 256, (int(pages), size), dtype=torch.uint8, device="cuda") for _ in range(int(layers))]
    host = torch.empty((int(layers), count, size), dtype=torch.uint8, pin_memory=True)
    which = torch.randperm(int(pages), device="cuda")[:count]

    def load() -> None:
        for number, layer in enumerate(memory):
            layer[which] = host[number].to("cuda", non_blocking=True)

    def save() -> None:
        for number, layer in enumerate(memory):
            host[number].copy_(layer[which], non_blocking=True)

    rates = [host.numel() / timed(action, 15) / 1e9 for action in (load, save)]
    return " ".join(str(rate) for rate in rates)


def matrix() -> str:
    """Milliseconds of a large matrix product of random numbers."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(20):
            torch.matmul(left, right, out=out)

    return str(timed(multiply, 25) / 20 * 1e3)


def wait(seconds: str) -> str:
    time.sleep(float(seconds))
    return "waited"


COMMANDS = {"share": share, "poison": poison, "compare": compare, "index": index, "matrix": matrix, "wait": wait}

say("ready")
for line in sys.stdin:
    command, *words = line.split()
    try:
        say(COMMANDS[command](*words))
    except Exception as error:  # noqa: BLE001
        say(f"{type(error).__name__}: {error}".replace("\n", " "))
