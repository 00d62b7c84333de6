"""What the tests of the Python package share: a development cluster, sessions, chunks with content."""

import atexit
import json
import os
import signal
import subprocess
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

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def start_cluster(*arguments: str) -> Cluster:
    command = [LARDER, "dev", "--json", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    started = Cluster(process, [], [])
    # A test that fails leaves it behind.
    atexit.register(started.stop)
    ready = json.loads(process.stdout.readline())
    started.sockets += [next(iter(node["sockets"].values())) for node in ready["nodes"]]
    started.http += [node["http"] for node in ready["nodes"]]
    return started


@pytest.fixture(scope="session")
def cluster():
    running = start_cluster("--nodes", "2", "--arena-bytes", "64MiB")
    yield running
    running.stop()


@pytest.fixture
def session(cluster):
    return larder_kv.Session(cluster.sockets[0], window_bytes=1 << 20)


def spec(model: str, **changes) -> larder_kv.NamespaceSpec:
    """A namespace of the test `model`: tests that use other names never meet."""
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
    """Writes what is missing of a chain, and returns how many chunks the node keeps."""
    reservation = session.reserve(namespace, chain)
    kept = 0
    for position in reservation.chunks:
        staged = session.stage(reservation, position)
        staged.copy_from(content(first_seed + position))
        kept += session.commit(reservation, [staged])
    return kept
