"""One rank of an engine without vLLM: the connector's threads over the test's memory, and the connection to a node."""

from collections import Counter
from dataclasses import replace

import larder_kv
from conftest import Cluster, FakeGpu
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.handoff import Writer
from larder_kv.vllm.memory import Memory, Pages
from larder_kv.vllm.node import Node, Open
from larder_kv.vllm.plan import Shape
from larder_kv.vllm.prefetch import Prefetcher
from larder_kv.vllm.saver import Saver
from larder_kv.vllm.settings import Settings
from larder_kv.vllm.transfer import Loader


class RankThreads:
    """The threads that load, save and prefetch."""

    def __init__(
        self,
        socket: str,
        spec: larder_kv.NamespaceSpec,
        shape: Shape,
        memory: Memory,
        *,
        queue_chunks: int = 64,
        handoff_seconds: float = 5.0,
        timeout_seconds: float = 10.0,
    ):
        self.memory, self.counts = memory, Counts()
        options = {"window_bytes": 1 << 20, "verify": "always", "timeout": timeout_seconds}
        self.node = Node(lambda: larder_kv.Session(socket, **options), spec, [0], 0.01)
        self.node.wait_for_first_try(10)
        self.settings = Settings(
            socket=socket, prefetches=2, handoff_seconds=handoff_seconds, timeout_seconds=timeout_seconds
        )
        self.loader = Loader(self.node, self.memory, shape, self.counts, self.settings)
        self.saver = Saver(self.node, self.memory, shape, self.counts, queue_chunks)
        self.prefetcher = Prefetcher(self.node, self.counts, self.settings)

    def close(self) -> None:
        self.prefetcher.close()
        self.loader.close()
        self.saver.close(10)
        self.node.close()


class PurgedSession:
    """An open session whose namespace is purged right before each commit."""

    def __init__(self, cluster: Cluster, opened: Open):
        self._cluster, self._opened = cluster, opened

    def __getattr__(self, name: str) -> object:
        if name.startswith("commit"):
            self._cluster.purge(self._opened.namespace.fingerprint)
        return getattr(self._opened.session, name)


def purge_before_commits(cluster: Cluster, node: Node) -> None:
    """From now on chunks are purged while they are being saved."""
    opened = node.current()
    assert opened is not None
    purged = replace(opened, session=PurgedSession(cluster, opened))
    node.current = lambda: purged


def writer_at(rank: RankThreads) -> Writer:
    """The writer that decoders name for this rank's engine."""
    node = rank.node.current()
    assert node is not None
    return Writer(node.session.node, node.session.device)


def paged(
    gpu: FakeGpu | None, regions: list[bytearray], layers: list[larder_kv.LayerPages], *, pages_per_chunk: int
) -> Pages:
    """These regions as host memory, or as a GPU's memory."""
    if gpu is None:
        return larder_kv.PagedMemory(regions, layers, pages_per_chunk=pages_per_chunk)
    return gpu.paged_memory(regions, layers, pages_per_chunk=pages_per_chunk)


class BusySession:
    """A session of a node that is busy with the first answers to each kind of request: it asks to be asked again in 5 ms."""

    def __init__(self, session: larder_kv.Session, times: int):
        self._session, self._times, self._asked = session, times, Counter()

    def __getattr__(self, name: str) -> object:
        request = getattr(self._session, name)
        if name not in ("reserve", "commit", "hand_over", "commit_handed_over"):
            return request

        def ask(*given: object, **named: object) -> object:
            self._asked[name] += 1
            if self._asked[name] <= self._times:
                error = larder_kv.BusyError("busy")
                error.what, error.retry_after = "memory", 0.005
                raise error
            return request(*given, **named)

        return ask
