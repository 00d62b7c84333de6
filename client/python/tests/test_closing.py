"""Sessions, reservations and leases as context managers."""

import asyncio

import larder_kv
import pytest
from conftest import CHUNK_TOKENS, content, put, spec

TOKENS = list(range(2 * CHUNK_TOKENS))


def test_a_session_that_was_closed_asks_for_nothing_and_its_leases_stay(cluster):
    with larder_kv.Session(cluster.sockets[0], window_bytes=1 << 20) as session:
        namespace = session.register(spec("closed"))
        chain = namespace.chain_of_tokens(TOKENS)
        put(session, namespace, chain)
        lease = session.lease(namespace, chain)
    with pytest.raises(larder_kv.ReleasedError, match="session"):
        session.lease(namespace, chain)
    with pytest.raises(larder_kv.ReleasedError):
        _ = session.node
    session.close()
    assert bytes(lease.view(1)) == content(1)


def test_what_a_reservation_did_not_commit_is_given_back_at_its_end(session):
    namespace = session.register(spec("closed reservation"))
    chain = namespace.chain_of_tokens(TOKENS)
    with session.reserve(namespace, chain) as reservation:
        staged = session.stage(reservation, 0)
        staged.copy_from(content(0))
        assert session.commit(reservation, [staged]) == 1
        assert session.reserve(namespace, chain).chunks == []
    with pytest.raises(larder_kv.ReleasedError, match="reservation"):
        _ = reservation.chunks
    assert session.reserve(namespace, chain).chunks == [1]


def test_a_reservation_is_given_back_where_its_writer_fails(session):
    namespace = session.register(spec("failed reservation"))
    chain = namespace.chain_of_tokens(TOKENS)
    with pytest.raises(ZeroDivisionError), session.reserve(namespace, chain):
        _ = 1 / 0
    assert session.reserve(namespace, chain).chunks == [0, 1]


def test_a_closed_lease_may_not_be_read(session):
    namespace = session.register(spec("closed lease"))
    chain = namespace.chain_of_tokens(TOKENS)
    put(session, namespace, chain)
    lease = session.lease(namespace, chain)
    lease.close()
    with pytest.raises(larder_kv.ReleasedError, match="lease"):
        lease.view(0)


def test_coroutines_close_them_too(cluster):
    async def run():
        async with await larder_kv.AsyncSession.connect(cluster.sockets[0], window_bytes=1 << 20) as session:
            namespace = await session.register(spec("closed async"))
            chain = namespace.chain_of_tokens(TOKENS)
            async with await session.reserve(namespace, chain) as reservation:
                staged = await session.stage(reservation, 0)
                staged.copy_from(content(0))
                await session.commit(reservation, [staged])
            assert (await session.reserve(namespace, chain)).chunks == [1]
            async with await session.lease(namespace, chain) as lease:
                read = bytes(lease.view(0))
        for closed in (lambda: session.lease(namespace, chain), lambda: reservation.chunks, lambda: lease.chunks):
            with pytest.raises(larder_kv.ReleasedError):
                closed()
        return read

    assert asyncio.run(run()) == content(0)
