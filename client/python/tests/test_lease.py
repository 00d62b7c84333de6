"""Views and copies of leased blocks."""

import gc
import threading

import larder_kv
import pytest
from conftest import BLOCK_BYTES, CHUNK_TOKENS, content, put, spec, start_cluster

TOKENS = list(range(3 * CHUNK_TOKENS))


@pytest.fixture
def leased(session, request):
    namespace = session.register(spec(request.node.name))
    chain = namespace.chain_of_tokens(TOKENS)
    put(session, namespace, chain)
    return session.lease(namespace, chain)


def test_a_view_is_read_only_and_without_a_copy(leased):
    first, second = memoryview(leased.view(1)), memoryview(leased.view(1))
    assert first.readonly and first.nbytes == BLOCK_BYTES and first == second == content(1)
    with pytest.raises(TypeError):
        first[0] = 1


def test_a_view_keeps_what_it_shows_when_the_lease_is_given_back():
    # Room for about four blocks: blocks that are not leased are evicted when others are put.
    small = start_cluster("--nodes", "1", "--arena-bytes", "4MiB", "--chunks-per-node", "4")
    try:
        session = larder_kv.Session(small.sockets[0], window_bytes=1 << 20)
        namespace = session.register(spec("kept"))
        chain = namespace.chain_of_tokens(TOKENS[:CHUNK_TOKENS])
        put(session, namespace, chain)
        lease = session.lease(namespace, chain)
        view = memoryview(lease.view(0))
        lease.release()
        del lease
        gc.collect()
        fill(session, namespace)
        assert session.lookup(namespace, chain).tokens == CHUNK_TOKENS and view == content(0)
        del view
        gc.collect()
        fill(session, namespace, first=100)
        assert session.lookup(namespace, chain).tokens == 0
    finally:
        small.stop()


def fill(session, namespace, first=50):
    for number in range(first, first + 8):
        put(session, namespace, namespace.chain_of_tokens([number] * CHUNK_TOKENS))


def test_a_lease_that_was_given_back_reads_nothing(leased):
    leased.release()
    leased.release()
    for use in (lambda: leased.view(0), lambda: leased.copy_block(0, bytearray(BLOCK_BYTES)), lambda: leased.chunks):
        with pytest.raises(larder_kv.ReleasedError):
            use()


def test_copies_fit_exactly(leased):
    with pytest.raises(ValueError, match="`out` has"):
        leased.copy_block(0, bytearray(BLOCK_BYTES - 1))
    with pytest.raises(BufferError, match="read-only"):
        leased.copy_block(0, bytes(BLOCK_BYTES))
    with pytest.raises(BufferError, match="not contiguous"):
        leased.copy_block(0, memoryview(bytearray(2 * BLOCK_BYTES))[::2])
    with pytest.raises(IndexError):
        leased.copy_block(3, bytearray(BLOCK_BYTES))
    with pytest.raises(ValueError, match="no block 1"):
        leased.view(0, 1)


def test_a_miss_is_a_lease_of_nothing(session):
    namespace = session.register(spec("nothing"))
    lease = session.lease(namespace, namespace.chain_of_tokens(TOKENS))
    assert (lease.chunks, lease.tokens) == (0, 0)
    with pytest.raises(IndexError):
        lease.view(0)


def test_other_threads_run_while_one_copies(session):
    size = 1 << 20
    namespace = session.register(spec("copies", pools=[larder_kv.Pool(layers=1, layer_bytes=size)]))
    chain = namespace.chain_of_tokens(TOKENS[:CHUNK_TOKENS])
    reservation = session.reserve(namespace, chain)
    staged = session.stage(reservation, 0)
    staged.copy_from(bytes(size))
    session.commit(reservation, [staged])
    lease, out = session.lease(namespace, chain), bytearray(size)
    # A thread that keeps the interpreter's lock during a copy would let others run at most once a copy.
    copying = threading.Thread(target=lambda: [lease.copy_block(0, out) for _ in range(500)])
    copying.start()
    steps = 0
    while copying.is_alive():
        steps += 1
    assert steps > 5_000
