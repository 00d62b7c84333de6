"""Copies that the node makes between an engine's GPU memory and chunks, over a CUDA driver of host memory."""

import asyncio
import mmap
import os

import larder_kv
import pytest
from conftest import content, spec, start_cluster

LAYERS, PAGES, PAGE_BYTES, PAGES_PER_CHUNK = 4, 12, 4_096, 2
LAYER_BYTES = PAGES_PER_CHUNK * PAGE_BYTES
POOL = larder_kv.Pool(layers=LAYERS, layer_bytes=LAYER_BYTES)


class Engine:
    """An engine whose pages the node knows."""

    def __init__(self, socket: str, model: str):
        self.session = larder_kv.Session(socket, window_bytes=1 << 20)
        self.namespace = self.session.register(spec(model, pools=[POOL]))
        descriptor = os.memfd_create("gpu")
        os.ftruncate(descriptor, LAYERS * PAGES * PAGE_BYTES)
        self.region = mmap.mmap(descriptor, LAYERS * PAGES * PAGE_BYTES)
        memory = [larder_kv.DescriptorMemory(descriptor, len(self.region))]
        self.tensors = self.session.register_tensors(
            self.namespace, memory, layers(), pages_per_chunk=PAGES_PER_CHUNK
        )
        os.close(descriptor)

    def page(self, layer: int, number: int) -> slice:
        start = (layer * PAGES + number) * PAGE_BYTES
        return slice(start, start + PAGE_BYTES)

    def compute(self, pages: list[int], seed: int) -> None:
        """Fills the pages as if a chunk were computed; a block has the chunk's bytes in the same order."""
        block = content(seed, LAYERS * LAYER_BYTES)
        for layer in range(LAYERS):
            for in_chunk, number in enumerate(pages):
                start = layer * LAYER_BYTES + in_chunk * PAGE_BYTES
                self.region[self.page(layer, number)] = block[start : start + PAGE_BYTES]

    def computed(self, pages: list[int]) -> bytes:
        return b"".join(self.region[self.page(layer, number)] for layer in range(LAYERS) for number in pages)


def layers() -> list[larder_kv.LayerPages]:
    page = {"page_stride": PAGE_BYTES, "pages": PAGES, "run_bytes": PAGE_BYTES}
    return [larder_kv.LayerPages(region=0, offset=layer * PAGES * PAGE_BYTES, **page) for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def with_gpu(fake_driver):
    running = start_cluster("--nodes", "1", "--arena-bytes", "16MiB", LD_LIBRARY_PATH=str(fake_driver.parent))
    yield running
    running.stop()


@pytest.fixture
def engine(with_gpu, request):
    return Engine(with_gpu.sockets[0], request.node.name)


def test_what_is_saved_from_a_gpu_is_in_blocks_and_is_loaded_into_other_pages(engine):
    session, chain = engine.session, engine.namespace.chain([bytes([number + 1]) * 32 for number in range(2)])
    reservation = session.reserve(engine.namespace, chain)
    engine.compute([3, 9], 1)
    engine.compute([0, 4], 2)
    for part in ((0, 1), (1, LAYERS)):
        copy = session.save_pages(engine.tensors, reservation, [0, 1], [3, 9, 0, 4], layers=part)
        told = session.wait_for_copy(copy)
        assert (told.end, told.layers, copy.progress.end) == ("done", part[1] - part[0], "done")
    assert session.commit_handed_over(reservation, [0, 1]) == 2
    engine.region[:] = bytes(len(engine.region))
    with session.lease(engine.namespace, chain) as lease:
        blocks = [bytes(lease.view(position)) for position in range(2)]
        copy = session.load_pages(engine.tensors, lease, [11, 1, 2], first_page=1)
    assert blocks == [content(seed, LAYERS * LAYER_BYTES) for seed in (1, 2)]
    assert session.wait_for_copy(copy, 1).layers >= 1
    assert session.wait_for_copy(copy).end == "done"
    assert engine.computed([1, 2]) == blocks[1]
    half = b"".join(blocks[0][layer * LAYER_BYTES + PAGE_BYTES : (layer + 1) * LAYER_BYTES] for layer in range(LAYERS))
    assert engine.computed([11]) == half and not any(engine.computed([0, 3, 4, 9]))


def test_event_loops_copy_too(with_gpu, engine):
    async def run() -> None:
        session = await larder_kv.AsyncSession.connect(with_gpu.sockets[0])
        namespace = await session.register(spec("async copies", pools=[POOL]))
        descriptor = os.memfd_create("gpu")
        os.ftruncate(descriptor, len(engine.region))
        memory = [larder_kv.DescriptorMemory(descriptor, len(engine.region))]
        tensors = await session.register_tensors(namespace, memory, layers(), pages_per_chunk=PAGES_PER_CHUNK)
        assert tensors.layers == LAYERS
        chain = namespace.chain([b"\x01" * 32])
        reservation = await session.reserve(namespace, chain)
        copy = await session.save_pages(tensors, reservation, [0], [5, 6])
        assert (await session.wait_for_copy(copy)).end == "done"
        assert await session.commit_handed_over(reservation, [0]) == 1
        lease = await session.lease(namespace, chain)
        assert (await session.wait_for_copy(await session.load_pages(tensors, lease, [7, 8]))).end == "done"
        os.close(descriptor)

    asyncio.run(run())


def test_what_cannot_be_copied_is_refused(cluster, session, engine):
    namespace = session.register(spec("no GPU here", pools=[POOL]))
    with pytest.raises(ValueError, match="64 bytes"):
        session.register_tensors(namespace, [larder_kv.IpcMemory(b"", 0, 1 << 20)], layers(), pages_per_chunk=2)
    with pytest.raises(OSError, match="no open file descriptor"):
        session.register_tensors(namespace, [larder_kv.DescriptorMemory(-1, 1 << 20)], layers(), pages_per_chunk=2)
    with pytest.raises(ValueError, match="needs"):
        session.register_tensors(namespace, [larder_kv.DescriptorMemory(0, 16)], layers(), pages_per_chunk=2)
    reservation = engine.session.reserve(engine.namespace, engine.namespace.chain([b"\x02" * 32]))
    with pytest.raises(ValueError, match="no layers 2 to 5"):
        engine.session.save_pages(engine.tensors, reservation, [0], [0, 1], layers=(2, 5))
    with pytest.raises(ValueError, match="not reserved"):
        engine.session.save_pages(engine.tensors, reservation, [1], [0, 1])
    with pytest.raises(larder_kv.RefusedError):
        engine.session.save_pages(engine.tensors, reservation, [0], [0])
    if not os.path.exists("/dev/nvidiactl"):
        handle = larder_kv.IpcMemory(bytes(64), 0, 1 << 20)
        with pytest.raises(larder_kv.RefusedError, match="no CUDA driver") as refused:
            session.register_tensors(namespace, [handle], layers(), pages_per_chunk=2)
        assert refused.value.code == "device"
