"""Requests of a session, from threads."""

import os
import signal
import threading

import larder_kv
import pytest
from conftest import BLOCK_BYTES, CHUNK_TOKENS, LAYER_BYTES, LAYERS, content, put, spec, start_cluster, until

TOKENS = list(range(5 * CHUNK_TOKENS))


def test_bytes_that_were_put_come_back(session):
    namespace = session.register(spec("round trip"))
    chain = namespace.chain_of_tokens(TOKENS)
    assert session.lookup(namespace, chain).tokens == 0
    assert put(session, namespace, chain) == 5
    found = session.lookup(namespace, chain)
    assert found.tokens == len(TOKENS) and found.spans[0].tier == "host"
    out = bytearray(BLOCK_BYTES)
    with session.lease(namespace, chain) as lease:
        assert (lease.chunks, lease.tokens) == (5, len(TOKENS))
        for position in range(5):
            lease.copy_block(position, out)
            assert out == content(position)
    assert session.stats().bytes_read == session.stats().bytes_written == 5 * BLOCK_BYTES


def test_a_chunk_may_be_written_layer_by_layer(session):
    namespace = session.register(spec("layers"))
    chain = namespace.chain_of_tokens(TOKENS[:CHUNK_TOKENS])
    reservation = session.reserve(namespace, chain)
    staged = session.stage(reservation, 0)
    for start in range(0, BLOCK_BYTES, LAYER_BYTES):
        staged.copy_from(content(3)[start : start + LAYER_BYTES], offset=start)
    session.commit(reservation, [staged])
    with session.lease(namespace, chain) as lease:
        assert bytes(lease.view(0)) == content(3)


def test_what_is_there_is_not_written_again(session):
    namespace = session.register(spec("again"))
    chain = namespace.chain_of_tokens(TOKENS)
    assert put(session, namespace, chain.part(0, 3)) == 3
    assert session.reserve(namespace, chain).chunks == [3, 4]


def test_one_token_is_left_to_compute(session):
    namespace = session.register(spec("last token"))
    chain = namespace.chain_of_tokens(TOKENS)
    put(session, namespace, chain)
    assert session.lookup(namespace, chain, prompt_tokens=len(TOKENS)).tokens == 4 * CHUNK_TOKENS
    assert session.lookup(namespace, chain, prompt_tokens=len(TOKENS) + 1).tokens == 5 * CHUNK_TOKENS


def test_an_engines_own_hashes_name_chunks(session):
    engine = session.register(spec("engine", hash_algorithm="sha256_cbor", hash_seed="0"))
    chain = engine.chain([bytes([number]) * 32 for number in range(3)])
    put(session, engine, chain)
    assert session.lookup(engine, chain).tokens == 3 * CHUNK_TOKENS
    assert chain.hashes[2] == b"\2" * 32 and len(chain.part(1)) == 2
    with pytest.raises(ValueError, match="32 bytes"):
        engine.chain([b"short"])


def test_whatever_differs_in_a_namespace_keeps_prompts_apart(session):
    base = session.register(spec("apart"))
    put(session, base, base.chain_of_tokens(TOKENS))
    for change in ({"kv_dtype": "fp8"}, {"layout": "other"}, {"revision": "2"}, {"chunk_tokens": 64}):
        other = session.register(spec("apart", **change))
        assert other.fingerprint != base.fingerprint
        assert session.lookup(other, other.chain_of_tokens(TOKENS)).tokens == 0


def test_salted_prompts_never_meet(session):
    namespace = session.register(spec("salt"))
    put(session, namespace, namespace.chain_of_tokens(TOKENS, salt=b"alice"))
    for other in (None, b"bob"):
        assert session.lookup(namespace, namespace.chain_of_tokens(TOKENS, salt=other)).tokens == 0


def test_each_rank_writes_its_slice(cluster):
    chunks = []
    for rank in range(2):
        session = larder_kv.Session(cluster.sockets[0])
        namespace = session.register(spec("ranks", tensor_parallel=2, slices=2), slices=[rank])
        chain = namespace.chain_of_tokens(TOKENS)
        chunks.append(session.lookup(namespace, chain).tokens)
        put(session, namespace, chain, first_seed=10 * rank)
    assert chunks == [0, 0]
    with session.lease(namespace, chain) as lease:
        assert bytes(lease.view(4)) == content(14)


def test_a_ticket_brings_what_another_node_has(cluster):
    near, far = (larder_kv.Session(socket) for socket in cluster.sockets)
    there = far.register(spec("ticket"))
    chain = there.chain_of_tokens(TOKENS)
    put(far, there, chain)
    here = near.register(spec("ticket"))
    # Other nodes learn of a chunk soon after its commit.
    until(lambda: near.lookup(here, chain).tokens == len(TOKENS))
    ticket = near.lookup_and_prefetch(here, chain)
    assert ticket.tokens == len(TOKENS) and ticket.found.spans[0].tier == "peer"
    until(lambda: near.progress(ticket).is_done)
    with near.collect(ticket, wait=1.0) as lease:
        assert [bytes(lease.view(position)) for position in range(5)] == [content(n) for n in range(5)]
    with pytest.raises(larder_kv.ReleasedError):
        near.progress(ticket)


def test_a_cancelled_ticket_is_gone(session):
    namespace = session.register(spec("cancel"))
    chain = namespace.chain_of_tokens(TOKENS)
    put(session, namespace, chain)
    ticket = session.lookup_and_prefetch(namespace, chain)
    ticket.cancel()
    with pytest.raises(larder_kv.ReleasedError):
        session.collect(ticket)


def test_pins_end(session):
    namespace = session.register(spec("pin"))
    chain = namespace.chain_of_tokens(TOKENS)
    assert session.pin(namespace, chain, 60).pin == 0
    put(session, namespace, chain)
    pinned = session.pin(namespace, chain, 60)
    assert (pinned.chunks, pinned.seconds) == (5, 60)
    session.unpin(pinned.pin)
    with pytest.raises(larder_kv.RefusedError) as error:
        session.unpin(pinned.pin)
    assert error.value.code == "unknown"


def test_errors_say_what_to_do(cluster, session):
    with pytest.raises(larder_kv.ConnectError, match="Is the node running"):
        larder_kv.Session("/nowhere/socket")
    with pytest.raises(ValueError, match="seed"):
        session.register(spec("errors", hash_algorithm="xxhash", hash_seed="random"))
    with pytest.raises(ValueError, match="no whole number"):
        session.register(spec("errors", engine_block_tokens=5))
    namespace = session.register(spec("errors"))
    chain = namespace.chain_of_tokens(TOKENS)
    reservation = session.reserve(namespace, chain)
    with pytest.raises(ValueError, match="not reserved"):
        session.stage(reservation, 9)
    with pytest.raises(ValueError, match="not reserved"):
        session.stage_chunks(reservation, [0, 9])
    with pytest.raises(ValueError, match="do not fit"):
        session.stage(reservation, 0).copy_from(bytes(BLOCK_BYTES + 1))
    small = larder_kv.Session(cluster.sockets[0], window_bytes=0)
    others = small.register(spec("no window"))
    reserved = small.reserve(others, others.chain_of_tokens(TOKENS))
    with pytest.raises(larder_kv.WindowError):
        small.stage(reserved, 0)
    assert small.stage_chunks(reserved, []) == [], "a prompt that is there already needs no window"
    few = larder_kv.Session(cluster.sockets[0], window_bytes=2 * BLOCK_BYTES)
    others = few.register(spec("small window"))
    reserved = few.reserve(others, others.chain_of_tokens(TOKENS))
    with pytest.raises(larder_kv.WindowError):
        few.stage_chunks(reserved, list(range(few.window_bytes // BLOCK_BYTES + 1)))
    assert len(few.stage_chunks(reserved, [0, 1])) == 2, "what was refused has taken nothing"
    assert issubclass(larder_kv.RequestTimeout, TimeoutError)


def test_a_staged_chunk_is_committed_once_and_with_its_own_reservation(session):
    namespace = session.register(spec("once"))
    chain = namespace.chain_of_tokens(TOKENS)
    first, second = session.reserve(namespace, chain.part(0, 1)), session.reserve(namespace, chain.part(1, 2))
    staged = session.stage(first, 0)
    staged.copy_from(content(0))
    with pytest.raises(ValueError, match="its own"):
        session.commit(second, [staged])
    assert session.commit(first, [staged]) == 1
    with pytest.raises(larder_kv.ReleasedError):
        session.commit(first, [staged])


def test_a_session_ends_with_its_node():
    alone = start_cluster("--nodes", "1", "--arena-bytes", "16MiB")
    session = larder_kv.Session(alone.sockets[0])
    namespace = session.register(spec("end"))
    chain = namespace.chain_of_tokens(TOKENS)
    put(session, namespace, chain)
    lease = session.lease(namespace, chain)
    alone.stop()
    with pytest.raises(larder_kv.EndedError):
        session.lookup(namespace, chain)
    # Leased blocks stay mapped.
    assert bytes(lease.view(0)) == content(0)


def test_other_threads_run_while_one_waits(cluster):
    # The window has room for one chunk, so staging the second waits until the session's timeout.
    session = larder_kv.Session(cluster.sockets[0], window_bytes=BLOCK_BYTES, timeout=1.0)
    namespace = session.register(spec("threads"))
    reservation = session.reserve(namespace, namespace.chain_of_tokens(TOKENS))
    kept = session.stage(reservation, 0)
    failures = []

    def wait():
        try:
            session.stage(reservation, 1)
        except larder_kv.RequestTimeout as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    steps = 0
    while waiting.is_alive():
        steps += 1
    assert failures and steps > 1_000 and kept.position == 0


def test_a_signal_ends_the_waiting(cluster):
    session = larder_kv.Session(cluster.sockets[0], window_bytes=BLOCK_BYTES, timeout=60.0)
    namespace = session.register(spec("signal"))
    reservation = session.reserve(namespace, namespace.chain_of_tokens(TOKENS))
    kept = session.stage(reservation, 0)

    class InterruptedWait(Exception):
        pass

    def interrupt(*_):
        raise InterruptedWait

    # Not SIGINT: a shell that runs this in the background ignores it.
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(InterruptedWait):
            session.stage(reservation, 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert kept.position == 0


def test_a_reservation_says_which_pools_will_be_written(session):
    pools = [
        larder_kv.Pool(layers=LAYERS, layer_bytes=LAYER_BYTES),
        larder_kv.Pool(name="state", layers=1, layer_bytes=64, hit="last"),
    ]
    namespace = session.register(spec("pools", pools=pools))
    chain = namespace.chain_of_tokens(list(range(2 * CHUNK_TOKENS)))
    with pytest.raises(ValueError, match="no pool 2"):
        session.reserve(namespace, chain, pools=[[0], [0, 2]])
    with pytest.raises(larder_kv.RefusedError):
        session.reserve(namespace, chain, pools=[[0]])
    reservation = session.reserve(namespace, chain, pools=[[], [1]])
    assert reservation.pools == [[0], [0, 1]]
    with pytest.raises(ValueError, match="pool 1 of the chunk at 0 is not to be written"):
        session.stage_layers(reservation, [0, 1], 0, 1, pool=1)
    staged = [session.stage(reservation, position) for position in reservation.chunks]
    assert [chunk.blocks for chunk in staged] == [[0], [0, 1]], "what every chunk has is written whether named or not"


def test_a_session_says_that_it_was_closed(cluster):
    session = larder_kv.Session(cluster.sockets[0], window_bytes=0)
    assert session.is_open
    session.close()
    assert not session.is_open
