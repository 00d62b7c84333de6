"""Copies between paged memory and blocks."""

import larder_kv
import pytest
from conftest import FakeGpu, spec

LAYERS, PAGES, HEADS, TOKENS, CONTENT = 3, 6, 2, 4, 16
PAGE_BYTES = HEADS * TOKENS * CONTENT
PAGES_PER_CHUNK = 2
CHUNK_TOKENS = PAGES_PER_CHUNK * 16


def layers(order: str, offset: int = 0) -> list[larder_kv.LayerPages]:
    """One region with all of L, B, H, N, C in the order `order`."""
    sizes = {"L": LAYERS, "B": PAGES, "H": HEADS, "N": TOKENS, "C": CONTENT}
    strides, step = {}, 1
    for name in reversed(order):
        strides[name] = step
        step *= sizes[name]
    dims = [(sizes[name], strides[name]) for name in order if name in "HN"]
    page = {"page_stride": strides["B"], "pages": PAGES, "dims": dims, "run_bytes": CONTENT}
    return [larder_kv.LayerPages(region=0, offset=offset + layer * strides["L"], **page) for layer in range(LAYERS)]


def memory(order: str):
    region = bytearray((place * 7 + (place >> 8)) % 251 for place in range(LAYERS * PAGES * PAGE_BYTES))
    return region, larder_kv.PagedMemory([region], layers(order), pages_per_chunk=PAGES_PER_CHUNK)


def gpu_memory(fake_gpu: FakeGpu, order: str):
    """The same memory on a GPU whose memory is the host's."""
    region, _ = memory(order)
    return region, fake_gpu.paged_memory([region], layers(order), pages_per_chunk=PAGES_PER_CHUNK)


def test_a_chunk_with_more_bytes_than_a_block_may_have_is_refused():
    for pages_per_chunk in (1 << 40, (1 << 64) - 1):
        with pytest.raises(ValueError, match="the most of a block"):
            larder_kv.PagedMemory([bytearray(PAGE_BYTES * PAGES * LAYERS)], layers("LBHNC"), pages_per_chunk=pages_per_chunk)


@pytest.mark.parametrize("place", ["host", "gpu"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_pages_survive_a_round_trip_to_other_pages(session, fake_gpu, order, place):
    region, paged = memory(order) if place == "host" else gpu_memory(fake_gpu, order)
    before = [page(region, order, number) for number in range(PAGES)]
    pool = larder_kv.Pool(layers=LAYERS, layer_bytes=PAGES_PER_CHUNK * PAGE_BYTES)
    namespace = session.register(spec(f"pages {order} {place}", pools=[pool]))
    assert namespace.block_bytes() == paged.block_bytes
    chain = namespace.chain_of_tokens(list(range(2 * CHUNK_TOKENS)))
    reservation = session.reserve(namespace, chain)
    staged = session.stage_chunks(reservation, [0, 1])
    for layer in range(LAYERS):
        paged.save(staged, [4, 1, 2, 3], layer=layer)
    session.commit(reservation, staged)
    region[:] = bytes(len(region))
    with session.lease(namespace, chain) as lease:
        # The last three of the four pages; the first layer is loaded apart from the others.
        paged.load(lease, [0, 5, 4], first_page=1, layer=0)
        for layer in range(1, LAYERS):
            paged.load(lease, [0, 5, 4], first_page=1, layer=layer)
    after = [page(region, order, number) for number in range(PAGES)]
    assert [after[0], after[5], after[4]] == [before[1], before[2], before[3]]
    assert not any(b"".join(after[1] + after[2] + after[3]))


@pytest.mark.parametrize("copies", [1, 20, 256])
def test_chunks_are_saved_together_however_few_copies_the_gpu_takes_at_a_time(session, fake_gpu, copies):
    region, _ = memory("BLHNC")
    before, gpu = bytes(region), larder_kv.Gpu(copies=copies)
    paged = fake_gpu.paged_memory([region], layers("BLHNC"), pages_per_chunk=PAGES_PER_CHUNK, gpu=gpu)
    pool = larder_kv.Pool(layers=LAYERS, layer_bytes=PAGES_PER_CHUNK * PAGE_BYTES)
    namespace = session.register(spec(f"together {copies}", pools=[pool]))
    chain = namespace.chain_of_tokens(list(range(3 * CHUNK_TOKENS)))
    reservation = session.reserve(namespace, chain)
    staged = session.stage_chunks(reservation, [0, 1, 2])
    paged.save(staged, list(range(PAGES)))
    if copies > 1:
        with pytest.raises(larder_kv.ReleasedError):
            paged.save([staged[0], staged[1], staged[1]], list(range(PAGES)))
    session.commit(reservation, staged)
    region[:] = bytes(len(region))
    with session.lease(namespace, chain) as lease:
        paged.load(lease, list(range(PAGES)))
    assert bytes(region) == before


def one_chunk(session, model: str):
    """A chunk to write: its namespace, its chain, its reservation."""
    pool = larder_kv.Pool(layers=LAYERS, layer_bytes=PAGES_PER_CHUNK * PAGE_BYTES)
    namespace = session.register(spec(model, pools=[pool]))
    chain = namespace.chain_of_tokens(list(range(CHUNK_TOKENS)))
    return namespace, chain, session.reserve(namespace, chain)


def test_pages_beyond_the_memory_are_refused(session):
    with pytest.raises(ValueError, match="beyond a memory"):
        larder_kv.PagedMemory([bytearray(100)], layers("LBHNC"), pages_per_chunk=1)
    with pytest.raises(ValueError, match="beyond a memory"):
        region = bytearray(LAYERS * PAGES * PAGE_BYTES)
        larder_kv.PagedMemory([region], layers("LBHNC", offset=1), pages_per_chunk=1)
    with pytest.raises(BufferError, match="read-only"):
        larder_kv.PagedMemory([bytes(LAYERS * PAGES * PAGE_BYTES)], layers("LBHNC"), pages_per_chunk=1)
    _, paged = memory("LBHNC")
    namespace, chain, reservation = one_chunk(session, "beyond")
    staged = session.stage(reservation, 0)
    with pytest.raises(ValueError, match="no page 6"):
        paged.save([staged], [0, 6])
    with pytest.raises(ValueError, match="has 2 pages"):
        paged.save([staged], [0])
    with pytest.raises(ValueError, match="no layer 3"):
        paged.save([staged], [0, 1], layer=3)
    paged.save([staged], [0, 1])
    session.commit(reservation, [staged])
    with session.lease(namespace, chain) as lease, pytest.raises(ValueError, match="not leased"):
        paged.load(lease, [0, 1], first_page=1)


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_layers_of_a_session_with_several_slices_are_not_saved_from_the_pages_of_one(session, fake_gpu, where):
    _, paged = memory("LBHNC") if where == "host" else gpu_memory(fake_gpu, "LBHNC")
    pool = larder_kv.Pool(layers=LAYERS, layer_bytes=PAGES_PER_CHUNK * PAGE_BYTES)
    namespace = session.register(spec(f"slices {where}", tensor_parallel=2, slices=2, pools=[pool]), slices=[0, 1])
    chain = namespace.chain_of_tokens(list(range(CHUNK_TOKENS)))
    staged = session.stage_layers(session.reserve(namespace, chain), [0], 0, 1)
    with pytest.raises(ValueError, match="2 slices"):
        paged.save_layers(staged, [0, 1])


def test_pages_that_do_not_fill_a_block_are_not_saved(session):
    region, _ = memory("LBHNC")
    paged = larder_kv.PagedMemory([region], layers("LBHNC")[1:], pages_per_chunk=PAGES_PER_CHUNK)
    _, _, reservation = one_chunk(session, "part of a block")
    with pytest.raises(ValueError, match="a chunk's pages have 512 bytes, its block 768"):
        paged.save([session.stage(reservation, 0)], [0, 1])


def test_what_a_gpu_cannot_copy_is_refused(session, fake_gpu):
    assert fake_gpu.gpu.name == "fake GPU"
    with pytest.raises(larder_kv.GpuError, match="GPU 7"):
        larder_kv.Gpu(7)
    _, paged = gpu_memory(fake_gpu, "LBHNC")
    assert (paged.layers, paged.page_bytes) == (LAYERS, PAGE_BYTES)
    crooked = [larder_kv.LayerPages(region=0, offset=8, page_stride=64, pages=4, run_bytes=64)]
    with pytest.raises(ValueError, match="multiple of 16"):
        larder_kv.GpuPagedMemory(fake_gpu.gpu, [(0x1000, 4096)], crooked, pages_per_chunk=1)
    namespace, chain, reservation = one_chunk(session, "refused by a GPU")
    staged = session.stage(reservation, 0)
    with pytest.raises(ValueError, match="has 2 pages"):
        paged.save([staged], [0])
    with pytest.raises(ValueError, match="no layer 3"):
        paged.save([staged], [0, 1], layer=3)
    with pytest.raises(ValueError, match="no page 6"):
        paged.save([staged], [0, PAGES])
    paged.save([staged], [0, 1])
    session.commit(reservation, [staged])
    with session.lease(namespace, chain) as lease, pytest.raises(ValueError, match="not those of a lease"):
        paged.load(lease, [0, 1], first_page=1)


def page(region: bytearray, order: str, number: int) -> list[bytes]:
    """A page's contents, layer by layer, read one element at a time by the strides of `order`."""
    sizes = {"L": LAYERS, "B": PAGES, "H": HEADS, "N": TOKENS, "C": CONTENT}
    strides, step = {}, 1
    for name in reversed(order):
        strides[name] = step
        step *= sizes[name]

    def element(layer, head, token, at):
        place = layer * strides["L"] + number * strides["B"] + head * strides["H"] + token * strides["N"]
        return region[place + at * strides["C"]]

    places = [(head, token, at) for head in range(HEADS) for token in range(TOKENS) for at in range(CONTENT)]
    return [bytes(element(layer, *place) for place in places) for layer in range(LAYERS)]
