"""Copies of many blocks at once, by several threads."""

import random
import threading

import larder_kv
import pytest
from conftest import spec, start_cluster

BLOCK = 2 << 20
CHUNKS = 5


def content(number: int) -> bytes:
    """The bytes of the block of that number."""
    return random.Random(number).randbytes(BLOCK)


@pytest.fixture(scope="module")
def own():
    """A node of these tests' own: their blocks would fill the memory of the other tests' nodes."""
    running = start_cluster("--nodes", "1", "--arena-bytes", "256MiB")
    yield running
    running.stop()


@pytest.fixture(params=[1, 4])
def session(request, own):
    """A session whose copies take this many threads."""
    with larder_kv.Session(own.sockets[0], window_bytes=32 << 20, copy_threads=request.param) as session:
        yield session


def namespace_of(session, name: str) -> larder_kv.Namespace:
    return session.register(spec(name, pools=[larder_kv.Pool(layers=1, layer_bytes=BLOCK)], flat=True))


@pytest.fixture
def keys(session, request):
    namespace = namespace_of(session, request.node.name)
    return namespace, namespace.chain([bytes([number]) * 32 for number in range(CHUNKS)])


def staged_of(session, keys):
    reservation = session.reserve(*keys)
    return reservation, [session.stage(reservation, position) for position in reservation.chunks]


def put(session, keys) -> list[bytes]:
    data = [content(number) for number in range(CHUNKS)]
    reservation, staged = staged_of(session, keys)
    larder_kv.StagedChunk.copy_all(staged, data)
    assert session.commit(reservation, staged) == CHUNKS
    return data


def test_many_blocks_arrive_each_in_its_own_buffer(session, keys):
    data = put(session, keys)
    with session.lease(*keys) as lease:
        outs = [bytearray(BLOCK) for _ in range(CHUNKS)]
        lease.copy_blocks(outs)
        assert outs == data
        some = [bytearray(BLOCK), bytearray(BLOCK)]
        lease.copy_blocks(some, first=3)
        assert some == data[3:]
        lease.copy_blocks([])
    assert session.stats().bytes_read == (CHUNKS + 2) * BLOCK


def test_buffers_that_share_memory_get_the_blocks_in_order(session, keys):
    data = put(session, keys)
    with session.lease(*keys) as lease:
        memory = bytearray(BLOCK + 4_096)
        low, high = memoryview(memory)[:BLOCK], memoryview(memory)[4_096:]
        lease.copy_blocks([low, high, low])
        assert low == data[2]
        assert memory[BLOCK:] == data[1][-4_096:]


def test_wrong_numbers_and_sizes_copy_nothing(session, keys):
    reservation, staged = staged_of(session, keys)
    with pytest.raises(ValueError, match="5 staged chunks and 1 sources"):
        larder_kv.StagedChunk.copy_all(staged, [bytes(BLOCK)])
    with pytest.raises(ValueError, match="a source has 7"):
        larder_kv.StagedChunk.copy_all(staged[:1], [bytes(7)])
    larder_kv.StagedChunk.copy_all([], [])
    reservation.abort()
    del staged
    put(session, keys)
    with session.lease(*keys) as lease:
        outs = [bytearray(BLOCK) for _ in range(CHUNKS + 1)]
        with pytest.raises(IndexError, match="none at 5"):
            lease.copy_blocks(outs)
        with pytest.raises(ValueError, match="`out` has 7"):
            lease.copy_blocks([*outs[:2], bytearray(7)])
        assert not any(any(out) for out in outs)


def test_a_chunk_that_is_gone_is_an_error_and_the_others_can_still_be_filled(session, keys):
    reservation, staged = staged_of(session, keys)
    data = [content(number) for number in range(CHUNKS)]
    staged[2].drop()
    with pytest.raises(larder_kv.ReleasedError):
        larder_kv.StagedChunk.copy_all(staged, data)
    larder_kv.StagedChunk.copy_all(staged[:2] + staged[3:], data[:2] + data[3:])
    assert session.commit(reservation, staged[:2] + staged[3:]) == CHUNKS - 1
    with session.lease(*keys) as lease:
        assert lease.chunks == 2
        assert memoryview(lease.view(1)) == data[1]


def test_threads_copy_from_one_lease_and_fill_one_set_of_chunks_at_the_same_time(session, keys):
    data = [content(number) for number in range(CHUNKS)]
    reservation, staged = staged_of(session, keys)
    in_parallel(lambda: larder_kv.StagedChunk.copy_all(staged[::-1], data[::-1]))
    assert session.commit(reservation, staged) == CHUNKS
    with session.lease(*keys) as lease:

        def read():
            outs = [bytearray(BLOCK) for _ in range(CHUNKS)]
            lease.copy_blocks(outs)
            assert outs == data

        in_parallel(read)


def in_parallel(work) -> None:
    failed = []

    def run():
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
