"""Helpers of the Python package's tests: a development cluster, sessions, chunks with content."""

import atexit
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import larder_kv
import pytest

ROOT = Path(__file__).resolve().parents[3]
LARDER = os.environ.get("LARDER", str(ROOT / "target/debug/larder"))
LAYERS, LAYER_BYTES, CHUNK_TOKENS = 4, 8_192, 32
BLOCK_BYTES = LAYERS * LAYER_BYTES


@dataclass
class Cluster:
    """A running `larder dev`."""

    process: subprocess.Popen
    sockets: list[str]
    http: list[str]
    coordinator: str = ""
    folder: str = ""

    def purge(self, fingerprint: str) -> None:
        """Purges a namespace, as an admin does."""
        files = {"ca": "ca.pem", "certificate": "admin.pem", "key": "admin.key"}
        admin = [argument for name, file in files.items() for argument in (f"--{name}", f"{self.folder}/{file}")]
        command = [LARDER, "purge", "--coordinator", self.coordinator, "--namespace-id", fingerprint, *admin]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def start_cluster(*arguments: str, **environment: str) -> Cluster:
    command = [LARDER, "dev", "--json", *arguments]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, env=os.environ | environment, **quiet)
    started = Cluster(process, [], [])
    # Stops the cluster even after a test that fails.
    atexit.register(started.stop)
    ready = json.loads(process.stdout.readline())
    started.sockets += [next(iter(node["sockets"].values())) for node in ready["nodes"]]
    started.http += [node["http"] for node in ready["nodes"]]
    started.coordinator, started.folder = ready["coordinator"], ready["dir"]
    return started


@contextmanager
def standing_still(cluster: Cluster) -> Iterator[None]:
    """The nodes of a cluster run no instruction meanwhile: their sockets are open, and nobody answers."""
    children = Path(f"/proc/{cluster.process.pid}/task").glob("*/children")
    nodes = [int(pid) for child in children for pid in child.read_text().split()]
    for node in nodes:
        os.kill(node, signal.SIGSTOP)
    try:
        until(lambda: all(stands_still(node) for node in nodes))
        yield
    finally:
        for node in nodes:
            os.kill(node, signal.SIGCONT)


def stands_still(process: int) -> bool:
    threads = [file.read_text().rpartition(") ")[2] for file in Path(f"/proc/{process}/task").glob("*/stat")]
    return all(thread.startswith("T") for thread in threads)


def damage(cluster: Cluster, block: bytes, wrong: bytes) -> None:
    """Writes `wrong` over a block, at most a page, in the arena of the cluster's node that has it: behind the node's back, as a
    debugger would."""
    replaced = 0
    for children in Path(f"/proc/{cluster.process.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            replaced += replace_in_arena(pid, block, wrong)
    assert replaced == 1, f"{replaced} such blocks"


def replace_in_arena(pid: str, block: bytes, wrong: bytes) -> int:
    replaced = 0
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in lines:
            if "memfd:larder-arena" not in line:
                continue
            start, end = (int(place, 16) for place in line.split()[0].split("-"))
            memory.seek(start)
            arena = memory.read(end - start)
            for page in range(0, end - start, 4_096):
                if arena.startswith(block, page):
                    memory.seek(start + page)
                    memory.write(wrong)
                    replaced += 1
    return replaced


def until(condition, patience: float = 30.0):
    """Waits until a condition becomes true."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.001)


def take_all_memory(socket: str) -> list[larder_kv.Reservation]:
    """Reserves all memory: reserved chunks that are not committed cannot be evicted. One session may reserve only a part."""
    taken: list[larder_kv.Reservation] = []
    for _ in range(16):
        session = larder_kv.Session(socket, window_bytes=0)
        namespace = session.register(spec("filler", pools=[larder_kv.Pool(layers=1, layer_bytes=1 << 20)]))
        with pytest.raises(larder_kv.BusyError) as busy:
            while True:
                taken.append(session.reserve(namespace, namespace.chain_of_tokens([len(taken)] * CHUNK_TOKENS)))
        assert busy.value.retry_after >= 0
        if busy.value.what == "memory":
            return taken
        assert busy.value.what == "claims"
    raise AssertionError("the node was never full")


class FakeGpu:
    """A GPU with its driver. The host's memory is lent to it."""

    def __init__(self, library: Path) -> None:
        self._driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.gpu = larder_kv.Gpu()

    def paged_memory(
        self,
        regions: list[bytearray],
        layers: list[larder_kv.LayerPages],
        *,
        pages_per_chunk: int,
        gpu: larder_kv.Gpu | None = None,
    ) -> larder_kv.GpuPagedMemory:
        """The GPU's view of `regions`, which are now its own allocations."""
        places = [self._lend(region) for region in regions]
        return larder_kv.GpuPagedMemory(gpu or self.gpu, places, layers, pages_per_chunk=pages_per_chunk)

    def _lend(self, region: bytearray) -> tuple[int, int]:
        memory = (ctypes.c_char * len(region)).from_buffer(region)
        assert self._driver.fake_lend(memory, ctypes.c_size_t(len(region))) == 0
        return ctypes.addressof(memory), len(region)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory) -> Path:
    """A CUDA driver over host memory, found by the name of the real driver."""
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so"
    source = ROOT / "client/device/fake/libcuda.c"
    flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{library.name}"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture(scope="session")
def fake_gpu(fake_driver) -> FakeGpu:
    """A GPU whose memory is the host's."""
    return FakeGpu(fake_driver)


@pytest.fixture(scope="session")
def cluster():
    running = start_cluster("--nodes", "2", "--arena-bytes", "64MiB")
    yield running
    running.stop()


@pytest.fixture
def session(cluster):
    return larder_kv.Session(cluster.sockets[0], window_bytes=1 << 20)


def spec(model: str, **changes) -> larder_kv.NamespaceSpec:
    """A namespace of the test `model`: tests with different names never meet."""
    fields = {
        "model": model,
        "kv_dtype": "bfloat16",
        "layout": "test",
        "chunk_tokens": CHUNK_TOKENS,
        "engine_block_tokens": 16,
        "pools": [larder_kv.Pool(layers=LAYERS, layer_bytes=LAYER_BYTES)],
    }
    return larder_kv.NamespaceSpec(**(fields | changes))


def content(seed: int, size: int = BLOCK_BYTES) -> bytes:
    """Bytes that differ for each seed and at each place."""
    return bytes((seed * 31 + place * 7 + (place >> 8)) % 251 for place in range(size))


def put(session, namespace, chain, first_seed: int = 0) -> int:
    """Writes the missing chunks of a chain, and returns how many chunks the node keeps."""
    reservation = session.reserve(namespace, chain)
    kept = 0
    for position in reservation.chunks:
        staged = session.stage(reservation, position)
        staged.copy_from(content(first_seed + position))
        kept += session.commit(reservation, [staged])
    return kept
