"""Copies between blocks and pieces of memory by address."""

import ctypes

import larder_kv
import pytest
from conftest import content, spec

BLOCK = 4_096


class Region:
    """Memory whose addresses are known."""

    def __init__(self, size: int):
        self.bytes = bytearray(size)
        self.pinned = (ctypes.c_char * size).from_buffer(self.bytes)
        self.start = ctypes.addressof(self.pinned)

    def fill(self, at: int, data: bytes) -> None:
        ctypes.memmove(self.start + at, data, len(data))

    def read(self, at: int, size: int) -> bytes:
        return ctypes.string_at(self.start + at, size)


@pytest.fixture
def keys(session, request):
    """A namespace of blocks of 4 KiB, and two keys in it that only this test uses."""
    pool = larder_kv.Pool(layers=1, layer_bytes=BLOCK)
    namespace = session.register(spec(request.node.name, pools=[pool], flat=True))
    return namespace, namespace.chain([b"a" * 32, b"b" * 32])


def staged_chunks(session, keys):
    namespace, chain = keys
    reservation = session.reserve(namespace, chain)
    return reservation, [session.stage(reservation, position) for position in reservation.chunks]


def test_blocks_survive_a_round_trip_through_other_pieces(session, keys):
    first, second = Region(3 * BLOCK), Region(3 * BLOCK)
    memory = larder_kv.ScatteredMemory([first.bytes, second.bytes])
    data = [content(1, BLOCK), content(2, BLOCK)]
    # The first block is in three pieces of two regions, in no order; the second is in one piece.
    first.fill(5_000, data[0][:1_000])
    second.fill(7, data[0][1_000:1_500])
    first.fill(0, data[0][1_500:])
    second.fill(BLOCK, data[1])
    reservation, staged = staged_chunks(session, keys)
    addresses = [first.start + 5_000, second.start + 7, first.start, second.start + BLOCK]
    memory.save(staged, addresses, [1_000, 500, BLOCK - 1_500, BLOCK])
    assert session.commit(reservation, staged) == 2
    out = Region(3 * BLOCK)
    with session.lease(*keys) as lease:
        larder_kv.ScatteredMemory([out.bytes]).load(lease, [out.start + 8_192, out.start + 1], [BLOCK, BLOCK])
    assert [out.read(8_192, BLOCK), out.read(1, BLOCK)] == data


def test_the_first_chunks_of_a_lease_may_be_loaded_alone(session, keys):
    region = Region(2 * BLOCK)
    region.fill(0, content(3, 2 * BLOCK))
    memory = larder_kv.ScatteredMemory([region.bytes])
    reservation, staged = staged_chunks(session, keys)
    memory.save(staged, [region.start, region.start + BLOCK], [BLOCK, BLOCK])
    session.commit(reservation, staged)
    out = Region(BLOCK)
    with session.lease(*keys) as lease:
        larder_kv.ScatteredMemory([out.bytes]).load(lease, [out.start], [BLOCK], chunks=1)
        with pytest.raises(ValueError, match="3 chunks are not leased"):
            memory.load(lease, [region.start], [BLOCK], chunks=3)
    assert out.read(0, BLOCK) == content(3, 2 * BLOCK)[:BLOCK]


@pytest.mark.parametrize(
    ("offsets", "sizes", "reason"),
    [
        ([-1, BLOCK], [BLOCK, BLOCK], "none of the regions"),
        ([0, BLOCK + 1], [BLOCK, BLOCK], "none of the regions"),
        ([0, BLOCK], [BLOCK, BLOCK - 1], "not 2 blocks"),
        ([0], [BLOCK], "not 2 blocks"),
        ([0, 0, BLOCK], [BLOCK - 8, 16, BLOCK - 8], "do not make up"),
        ([0, BLOCK, 0], [BLOCK, BLOCK, 8], "do not make up"),
        ([0, BLOCK], [BLOCK], "2 addresses and 1 sizes"),
    ],
)
def test_pieces_that_are_not_these_blocks_are_refused(session, keys, offsets, sizes, reason):
    region = Region(2 * BLOCK)
    memory = larder_kv.ScatteredMemory([region.bytes])
    reservation, staged = staged_chunks(session, keys)
    with pytest.raises(ValueError, match=reason):
        memory.save(staged, [region.start + offset for offset in offsets], sizes)
    reservation.abort()


def test_memory_that_is_read_only_is_refused():
    with pytest.raises(BufferError, match="read-only"):
        larder_kv.ScatteredMemory([b"constant"])
