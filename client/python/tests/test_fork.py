"""What a forked child may do and what it may not do."""

import os
import pickle
import subprocess
import sys
import warnings

import larder_kv
from conftest import CHUNK_TOKENS, content, put, spec

TOKENS = list(range(2 * CHUNK_TOKENS))


def test_a_child_may_not_use_its_parents_session(session):
    namespace = session.register(spec("fork"))
    chain = namespace.chain_of_tokens(TOKENS)
    put(session, namespace, chain)
    lease = session.lease(namespace, chain)
    view = lease.view(0)
    ticket = session.lookup_and_prefetch(namespace, chain)
    prefetches = larder_kv.Prefetches(session, at_most=1)
    pending = prefetches.start(namespace, chain, patience=1)
    uses = {
        "lookup": lambda: session.lookup(namespace, chain),
        "view": lambda: lease.view(0),
        "old view": lambda: memoryview(view),
        "ticket": lambda: ticket.tokens,
        "prefetches": lambda: prefetches.start(namespace, chain, patience=1),
        "pending lease": lambda: pending.wait(1),
        "stats": session.stats,
    }
    assert in_a_child(lambda: {name: raised(use) for name, use in uses.items()}) == dict.fromkeys(uses, "ForkedError")


def test_a_child_that_ends_gives_back_nothing_of_its_parents(session):
    namespace = session.register(spec("fork end"))
    chain = namespace.chain_of_tokens(TOKENS)
    put(session, namespace, chain)
    pending = larder_kv.Prefetches(session, at_most=1).start(namespace, chain, patience=1)
    held = [session.lease(namespace, chain), session.lookup_and_prefetch(namespace, chain), pending]
    in_a_child(held.clear)
    assert len(held) == 3 and bytes(held[0].view(1)) == content(1)
    outcome = pending.wait(10)
    assert outcome is not None and bytes(outcome[1].view(1)) == content(1)
    assert session.lookup(namespace, chain).tokens == len(TOKENS)


def test_a_child_may_open_a_session_of_its_own(cluster, session):
    namespace = session.register(spec("fork own"))
    put(session, namespace, namespace.chain_of_tokens(TOKENS))

    def look():
        own = larder_kv.Session(cluster.sockets[0])
        mine = own.register(spec("fork own"))
        return own.lookup(mine, mine.chain_of_tokens(TOKENS)).tokens

    assert in_a_child(look) == len(TOKENS)


def test_a_child_ends_while_answers_of_its_parent_come(cluster):
    subprocess.run([sys.executable, "-c", FORKS, cluster.sockets[0]], check=True)


FORKS = """
import asyncio, os, signal, sys, threading, time, warnings
import larder_kv

async def ask():
    session = await larder_kv.AsyncSession.connect(sys.argv[1], window_bytes=0)
    while not is_over.is_set():
        await asyncio.gather(*(session.lookup(*asked) for asked in await chains(session)))

async def chains(session):
    pool = larder_kv.Pool(layers=1, layer_bytes=4096)
    spec = larder_kv.NamespaceSpec(
        model="fork ends", kv_dtype="bfloat16", layout="test", chunk_tokens=32, engine_block_tokens=16, pools=[pool]
    )
    namespace = await session.register(spec)
    return [(namespace, namespace.chain_of_tokens([number] * 32)) for number in range(30)]

warnings.simplefilter("ignore", DeprecationWarning)
is_over = threading.Event()
asking = threading.Thread(target=asyncio.run, args=(ask(),))
asking.start()
for _ in range(30):
    child = os.fork()
    if child == 0:
        # A child that does not end is killed.
        signal.alarm(20)
        sys.exit()
    began = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() - began < 60:
        time.sleep(0.001)
    if ended[0]:
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        continue
    # Not even its alarm is set: the child never came back from the fork. In CPython before 3.12, a fork in the moment in which
    # another thread makes its thread state leaves the child a lock that nobody holds.
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert sys.version_info < (3, 12), "a child hangs in its fork"
is_over.set()
asking.join()
"""


def in_a_child(work):
    """The result of `work` in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, pickle.dumps(work()))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return pickle.loads(answer)


def raised(use):
    try:
        use()
    except Exception as error:
        return type(error).__name__
    return None
