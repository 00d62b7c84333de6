"""Prefetches that are started by a thread which does not wait for them."""

import re
import threading
import urllib.request

import larder_kv
import pytest
from conftest import CHUNK_TOKENS, content, put, spec, standing_still, start_cluster, until

TOKENS = list(range(5 * CHUNK_TOKENS))


def test_a_pending_lease_has_what_another_node_had_and_is_given_once(cluster):
    near, far = (larder_kv.Session(socket) for socket in cluster.sockets)
    there, here = far.register(spec("pending")), near.register(spec("pending"))
    chain = there.chain_of_tokens(TOKENS)
    put(far, there, chain)
    # Other nodes learn of a chunk soon after its commit.
    until(lambda: near.lookup(here, chain).tokens == len(TOKENS))
    pending = larder_kv.Prefetches(near, at_most=2).start(here, chain, patience=10)
    found, lease = taken(pending)
    assert found.tokens == len(TOKENS) and found.spans[0].tier == "peer"
    assert [bytes(lease.view(position)) for position in range(lease.chunks)] == [content(n) for n in range(5)]
    with pytest.raises(larder_kv.ReleasedError):
        pending.wait(10)


def test_a_miss_is_a_lease_of_nothing(session):
    namespace = session.register(spec("pending miss"))
    pending = larder_kv.Prefetches(session, at_most=1).start(namespace, namespace.chain_of_tokens(TOKENS), patience=0)
    found, lease = taken(pending)
    assert (found.tokens, found.spans, lease.chunks) == (0, [], 0)


def test_what_nobody_asks_after_is_given_back(cluster):
    session = larder_kv.Session(cluster.sockets[0])
    namespace = session.register(spec("pending dropped"))
    chain = namespace.chain_of_tokens(TOKENS)
    put(session, namespace, chain)
    before = leased(cluster)
    prefetches = larder_kv.Prefetches(session, at_most=4)
    for pause in (0, 0.001, 0.05):
        pending = [prefetches.start(namespace, chain, patience=1) for _ in range(8)]
        threading.Event().wait(pause)
        pending[0].cancel()
        with pytest.raises(larder_kv.ReleasedError):
            pending[0].wait(1)
        del pending
    assert taken(prefetches.start(namespace, chain, patience=1))[1].chunks == 5
    until(lambda: leased(cluster) == before)


def test_nothing_waits_for_a_node_that_stands_still():
    running = start_cluster("--nodes", "1", "--arena-bytes", "64MiB")
    session = larder_kv.Session(running.sockets[0], timeout=20)
    namespace = session.register(spec("pending still"))
    chain = namespace.chain_of_tokens(TOKENS)
    put(session, namespace, chain)
    prefetches = larder_kv.Prefetches(session, at_most=2)
    with standing_still(running):
        pending = [prefetches.start(namespace, chain, patience=10) for _ in range(6)]
        assert [one.wait(0) for one in pending] == [None] * 6
        assert pending[0].wait(0.01) is None
    assert [taken(one)[1].chunks for one in pending] == [5] * 6, "those that waited for their turn, too"
    running.stop()


def test_a_node_that_is_gone_says_so_and_none_at_a_time_are_none(cluster):
    session = larder_kv.Session(cluster.sockets[0])
    namespace = session.register(spec("pending none"))
    chain = namespace.chain_of_tokens(TOKENS)
    with pytest.raises(ValueError, match="no prefetch would ever begin"):
        larder_kv.Prefetches(session, at_most=0)
    prefetches = larder_kv.Prefetches(session, at_most=1)
    with pytest.raises(ValueError):
        prefetches.start(namespace, chain, patience=-1)
    other = start_cluster("--nodes", "1", "--arena-bytes", "64MiB")
    session = larder_kv.Session(other.sockets[0])
    namespace = session.register(spec("pending none"))
    prefetches = larder_kv.Prefetches(session, at_most=1)
    other.stop()
    with pytest.raises(larder_kv.EndedError):
        prefetches.start(namespace, chain, patience=1).wait(10)


def taken(pending: larder_kv.PendingLease) -> tuple[larder_kv.Found, larder_kv.Lease]:
    outcome = pending.wait(10)
    assert outcome is not None
    return outcome


def leased(cluster) -> list[str]:
    """The numbers of leases and fetches that the first node holds."""
    with urllib.request.urlopen(f"http://{cluster.http[0]}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    held = [line for line in lines if re.match(r'larder_held{.*what="(leases|fetches)"', line)]
    assert len(held) == 2, held
    return held
