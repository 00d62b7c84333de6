"""Requests of a session, from coroutines."""

import asyncio
import json
import subprocess
import sys
import time
import urllib.request

import larder_kv
import pytest
from conftest import BLOCK_BYTES, CHUNK_TOKENS, content, spec, start_cluster, until

TOKENS = list(range(3 * CHUNK_TOKENS))


def test_bytes_that_were_put_come_back(cluster):
    async def run():
        session = await larder_kv.AsyncSession.connect(cluster.sockets[0], window_bytes=1 << 20)
        namespace = await session.register(spec("async"))
        chain = namespace.chain_of_tokens(TOKENS)
        reservation = await session.reserve(namespace, chain)
        staged = await asyncio.gather(*(session.stage(reservation, n) for n in reservation.chunks))
        for chunk in staged:
            chunk.copy_from(content(chunk.position))
        assert await session.commit(reservation, staged) == 3
        ticket = await session.lookup_and_prefetch(namespace, chain)
        assert (await session.progress(ticket)).is_done
        with await session.collect(ticket, wait="best_effort") as lease:
            return [bytes(lease.view(position)) for position in range(3)]

    assert asyncio.run(run()) == [content(n) for n in range(3)]


def test_the_event_loop_goes_on_while_a_request_waits(cluster):
    async def run():
        connect = larder_kv.AsyncSession.connect
        session = await connect(cluster.sockets[0], window_bytes=BLOCK_BYTES, timeout=0.5)
        namespace = await session.register(spec("async waits"))
        reservation = await session.reserve(namespace, namespace.chain_of_tokens(TOKENS))
        kept = await session.stage(reservation, 0)
        waiting = asyncio.ensure_future(session.stage(reservation, 1))
        steps = 0
        while not waiting.done():
            await asyncio.sleep(0)
            steps += 1
        with pytest.raises(larder_kv.RequestTimeout):
            waiting.result()
        return steps, kept

    steps, _ = asyncio.run(run())
    assert steps > 100


def test_a_cancelled_request_takes_nothing(cluster):
    async def run():
        session = await larder_kv.AsyncSession.connect(cluster.sockets[0], window_bytes=BLOCK_BYTES)
        namespace = await session.register(spec("async cancel"))
        reservation = await session.reserve(namespace, namespace.chain_of_tokens(TOKENS))
        kept = await session.stage(reservation, 0)
        waiting = asyncio.ensure_future(session.stage(reservation, 1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # The room in the window, once freed, is for the next request.
        kept.drop()
        staged = await session.stage(reservation, 2)
        return staged.position

    assert asyncio.run(run()) == 2


def test_errors_are_those_of_threads(cluster):
    async def run():
        with pytest.raises(larder_kv.ConnectError):
            await larder_kv.AsyncSession.connect("/nowhere/socket")
        session = await larder_kv.AsyncSession.connect(cluster.sockets[0])
        with pytest.raises(larder_kv.RefusedError):
            await session.unpin(77)

    asyncio.run(run())


def test_a_request_needs_an_event_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        larder_kv.AsyncSession.connect("/nowhere/socket")


def test_an_interpreter_may_end_while_requests_are_answered(cluster):
    program = """if True:
        import asyncio, sys, larder_kv
        async def run():
            session = await larder_kv.AsyncSession.connect(sys.argv[1])
            waiting = [asyncio.ensure_future(session.unpin(number)) for number in range(1, 60)]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        asyncio.run(run())
    """
    for _ in range(20):
        subprocess.run([sys.executable, "-c", program, cluster.sockets[0]], check=True, timeout=60)


def test_an_exit_handler_gets_an_error_instead_of_a_future_that_nothing_settles(cluster):
    program = """if True:
        import asyncio, atexit, sys
        def at_exit():
            async def run():
                await larder_kv.AsyncSession.connect(sys.argv[1])
            try:
                asyncio.run(run())
            except RuntimeError as error:
                print(error)
        atexit.register(at_exit)
        # Its own exit handler comes before the earlier one.
        import larder_kv
    """
    command = [sys.executable, "-c", program, cluster.sockets[0]]
    ended = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    assert "the interpreter ends" in ended.stdout


def test_a_request_that_is_cancelled_before_the_loop_sees_its_answer_leaves_no_pin(cluster):
    async def run():
        session = await larder_kv.AsyncSession.connect(cluster.sockets[0], window_bytes=1 << 20)
        namespace = await session.register(spec("async pins"))
        chain = namespace.chain_of_tokens(TOKENS)
        reservation = await session.reserve(namespace, chain)
        staged = await session.stage_chunks(reservation, reservation.chunks)
        for chunk in staged:
            chunk.copy_from(content(chunk.position))
        assert await session.commit(reservation, staged) == 3
        for ask in (
            lambda: session.pin(namespace, chain, 600.0),
            lambda: session.lookup(namespace, chain, pin_seconds=600.0),
            lambda: session.lookup_and_prefetch(namespace, chain, pin_seconds=600.0),
        ):
            cancelled = ask()
            # The answer comes while the loop stands still.
            until(lambda: pins(cluster) == 1)
            time.sleep(0.1)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            while pins(cluster) > 0:
                await asyncio.sleep(0.01)
        kept = await session.pin(namespace, chain, 600.0)
        assert pins(cluster) == 1
        await session.unpin(kept.pin)

    asyncio.run(asyncio.wait_for(run(), 60))


def pins(cluster) -> int:
    with urllib.request.urlopen(f"http://{cluster.http[0]}/pins") as answer:
        return len(json.load(answer))


def test_chunks_that_a_busy_node_did_not_commit_stay_staged_and_are_committed_again():
    """More commits at a time than may wait for a copy."""
    own, busy = start_cluster("--nodes", "1", "--arena-bytes", "512MiB"), 0
    pool = larder_kv.Pool(layers=1, layer_bytes=1 << 20)

    async def commit(session, reservation, staged) -> None:
        nonlocal busy
        while True:
            try:
                assert await session.commit(reservation, [staged]) == 1
                return
            except larder_kv.BusyError as error:
                busy += 1
                await asyncio.sleep(error.retry_after)

    async def put(session, model: str) -> None:
        namespace = await session.register(spec(model, pools=[pool]))
        reservation = await session.reserve(namespace, namespace.chain([bytes([number]) * 32 for number in range(40)]))
        staged = await session.stage_chunks(reservation, reservation.chunks)
        await asyncio.gather(*(commit(session, reservation, chunk) for chunk in staged))

    async def run() -> None:
        sessions = [await larder_kv.AsyncSession.connect(own.sockets[0], window_bytes=40 << 20) for _ in range(3)]
        until_busy = time.monotonic() + 30
        while busy == 0 and time.monotonic() < until_busy:
            names = [f"busy {number} {time.monotonic()}" for number in range(3)]
            await asyncio.gather(*map(put, sessions, names))

    asyncio.run(run())
    assert busy > 0
    own.stop()
