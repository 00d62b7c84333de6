"""Layers that are handed over and followed while their chunks are being written, by sessions and by the connector's threads."""

import asyncio
import logging
import threading
import time
from dataclasses import replace

import larder_kv
import pytest
from conftest import LAYER_BYTES, LAYERS, content, spec, start_cluster, until
from larder_kv.vllm.handoff import Writer, attempt_of, params_for_decode, writer_of
from larder_kv.vllm.node import Open
from larder_kv.vllm.plan import Load, Save
from larder_kv.vllm.saver import HandOver
from larder_kv.vllm.transfer import LayerGate
from ranks import writer_at
from test_vllm_transfers import LAYERS as RANK_LAYERS
from test_vllm_transfers import Rank, hashes


def layer(seed: int, number: int) -> bytes:
    return content(seed * 10 + number, LAYER_BYTES)


def give(session, reservation, number: int) -> None:
    """Hands over one layer of every chunk."""
    staged = session.stage_layers(reservation, reservation.chunks, number, number + 1)
    for position in reservation.chunks:
        staged.copy_from(position, layer(position, number))
    session.hand_over(staged)


def assert_layer(follow, position: int, number: int) -> None:
    block = memoryview(follow.lease.view(position))
    assert block[number * LAYER_BYTES : (number + 1) * LAYER_BYTES] == layer(position, number)


def test_another_node_reads_each_layer_as_it_is_handed_over(cluster, session):
    reader = larder_kv.Session(cluster.sockets[1], window_bytes=0)
    mine, other = session.register(spec("handed over")), reader.register(spec("handed over"))
    named = [bytes([number + 1]) * 32 for number in range(2)]
    follow = reader.follow(other, other.chain(named), node=session.node, device=session.device)
    assert follow.lease is None and follow.in_place.layers == 0
    reservation = session.reserve(mine, mine.chain(named))
    for number in range(LAYERS):
        give(session, reservation, number)
        come = reader.wait_for_layers(follow, number + 1, seconds=10)
        assert (come.chunks, come.layers, come.is_whole) == (2, number + 1, False)
        for position in range(2):
            assert_layer(follow, position, number)
        assert reader.lookup(other, other.chain(named)).tokens == 0
    assert session.commit_handed_over(reservation, [0, 1]) == 2
    until(lambda: reader.wait_for_layers(follow, LAYERS + 1).is_whole)
    assert reader.lookup(other, other.chain(named)).tokens == 64


def test_a_writer_that_gives_up_ends_its_followers(cluster, session):
    reader = larder_kv.Session(cluster.sockets[1], window_bytes=0)
    mine, other = session.register(spec("given up")), reader.register(spec("given up"))
    named = [b"\x07" * 32]
    follow = reader.follow(other, other.chain(named), node=session.node)
    reservation = session.reserve(mine, mine.chain(named))
    give(session, reservation, 0)
    assert reader.wait_for_layers(follow, 1, seconds=10).layers == 1
    reservation.abort()
    until(lambda: reader.wait_for_layers(follow, LAYERS).chunks == 0)
    assert_layer(follow, 0, 0)
    with pytest.raises(larder_kv.DamagedError, match="has not come"):
        follow.lease.copy_block(0, bytearray(LAYERS * LAYER_BYTES))
    follow.release()
    with pytest.raises(larder_kv.ReleasedError):
        reader.wait_for_layers(follow, 1)


def test_what_does_not_fit_is_refused(session):
    namespace = session.register(spec("misfit"))
    reservation = session.reserve(namespace, namespace.chain([b"\x08" * 32]))
    for positions, start, end in (([1], 0, 1), ([0], 0, LAYERS + 1), ([0], 2, 2)):
        with pytest.raises(ValueError):
            session.stage_layers(reservation, positions, start, end)
    staged = session.stage_layers(reservation, [0], 0, 1)
    with pytest.raises(ValueError):
        staged.copy_from(1, layer(0, 0))
    with pytest.raises(ValueError):
        staged.copy_from(0, layer(0, 0), offset=1)
    session.hand_over(staged)
    with pytest.raises(larder_kv.ReleasedError):
        session.hand_over(staged)
    with pytest.raises(larder_kv.RefusedError):
        session.commit_handed_over(reservation, [0])


def test_a_later_attempt_ends_the_earlier_one(session, cluster):
    later = larder_kv.Session(cluster.sockets[0], window_bytes=1 << 20)
    first, second = session.register(spec("attempts")), later.register(spec("attempts"))
    named = [b"\x09" * 32]
    stalled = session.reserve(first, first.chain(named), attempt=1)
    assert later.reserve(second, second.chain(named), attempt=2).chunks == [0]
    with pytest.raises(larder_kv.RefusedError):
        give(session, stalled, 0)


def test_coroutines_hand_over_too(cluster):
    async def run() -> None:
        writer = await larder_kv.AsyncSession.connect(cluster.sockets[0], window_bytes=1 << 20)
        reader = await larder_kv.AsyncSession.connect(cluster.sockets[0], window_bytes=0)
        mine, other = await writer.register(spec("async")), await reader.register(spec("async"))
        named = [b"\x0a" * 32]
        follow = await reader.follow(other, other.chain(named))
        reservation = await writer.reserve(mine, mine.chain(named), attempt=1)
        waiting = asyncio.ensure_future(reader.wait_for_layers(follow, LAYERS, seconds=10))
        staged = await writer.stage_layers(reservation, [0], 0, LAYERS)
        staged.copy_from(0, b"".join(layer(0, number) for number in range(LAYERS)))
        await writer.hand_over(staged)
        assert (await waiting).layers == LAYERS
        assert_layer(follow, 0, 2)
        assert await writer.commit_handed_over(reservation, [0]) == 1

    asyncio.run(run())


@pytest.fixture(params=["host", "gpu"])
def ranks(cluster, fake_gpu, request):
    """A rank that prefills on one node, and a rank that decodes on the other."""
    on = fake_gpu if request.param == "gpu" else None
    made = [Rank(socket, request.node.name, gpu=on) for socket in cluster.sockets]
    yield made
    for rank in made:
        rank.close()


def test_a_routers_second_attempt_ends_its_first_one_on_the_same_actor(ranks, cluster, request):
    """A router numbers its attempts from 0."""
    hangs, decode = ranks
    first, second = attempt_of({"do_remote_decode": True}), attempt_of({"do_remote_decode": True, "remote_attempt": 1})
    never, computed = LayerGate(RANK_LAYERS), LayerGate(RANK_LAYERS)
    hangs.saver.save_soon([Save("a", hashes(1), 0, [0, 1], first)], never)
    never.open(0)
    follow = decode.prefetcher.start("a", hashes(1), 1_000, False, writer_at(hangs))
    until(lambda: follow.chunks == 1)
    decode.prefetcher.drop("a")
    again = Rank(cluster.sockets[0], request.node.name)
    again.fill(0, 10)
    again.fill(1, 20)
    again.saver.save_soon([Save("a", hashes(1), 0, [0, 1], second)], computed)
    computed.open_all()
    until(lambda: again.counts.take().get("handed_over_chunks") == 1)
    writer = replace(writer_at(again), attempt=second)
    follow = decode.prefetcher.start("a", hashes(1), 1_000, False, writer)
    until(lambda: follow.chunks == 1)
    decode.loader.load_soon([Load("a", hashes(1), 0, [3, 4], writer)])
    until(lambda: decode.loader.take_done() == {"a"})
    assert (decode.values(3), decode.values(4)) == ([10, 11, 12], [20, 21, 22])
    never.open_all()
    until(lambda: not hangs.saver.is_reading("a"))
    assert hangs.counts.take() == {"shed_chunks_refused": 1}, "its late layers are refused"
    again.close()


def test_decode_loads_layers_while_prefill_computes_them(ranks):
    prefill, decode = ranks
    for page in range(4):
        prefill.fill(page, 10 * page)
    computed = LayerGate(RANK_LAYERS)
    prefetch = decode.prefetcher.start("b", hashes(2), 1_000, False, writer_at(prefill))
    prefill.saver.save_soon([Save("a", hashes(2), 0, [0, 1, 2, 3], attempt=0)], computed)
    assert prefetch.chunks is None
    computed.open(0)
    until(lambda: prefetch.chunks == 2)
    assert prefetch.follow is not None and prefetch.spans == [(0, 2, "peer")]
    loaded = decode.loader.load_now([Load("b", hashes(2), 0, [9, 8, 7, 6], writer_at(prefill))])
    for layer_number in range(RANK_LAYERS):
        # The previous layer was read before this layer is computed.
        computed.open(layer_number)
        loaded.wait(layer_number)
        values = [decode.values(page)[layer_number] for page in (9, 8, 7, 6)]
        assert values == [10 * page + layer_number for page in range(4)]
    until(lambda: not prefill.saver.is_reading("a"))
    decode.prefetcher.drop("b")
    assert decode.loader.take_failed() == set()
    assert prefill.counts.take()["handed_over_chunks"] == 2
    counts = decode.counts.take()
    assert (counts["followed_chunks"], counts["loaded_blocks"]) == (2, 4)


def test_a_prefill_that_ends_fails_the_blocks_that_wait_for_it(ranks):
    prefill, decode = ranks
    computed = LayerGate(RANK_LAYERS)
    prefill.saver.save_soon([Save("a", hashes(1), 0, [0, 1], attempt=0)], computed)
    prefetch = decode.prefetcher.start("b", hashes(1), 1_000, False, writer_at(prefill))
    computed.open(0)
    until(lambda: prefetch.chunks == 1)
    loaded = decode.loader.load_now([Load("b", hashes(1), 0, [3, 4], writer_at(prefill))])
    loaded.wait(0)
    assert decode.loader.take_failed() == set()
    prefill.saver.cancel("a")
    computed.open_all()
    loaded.wait_all()
    until(lambda: decode.loader.take_failed() == {3, 4})
    decode.loader.load_soon([Load("c", hashes(1), 0, [3, 4], Writer("nobody"))])
    until(lambda: decode.loader.take_done() == {"c"})
    assert decode.loader.take_failed() == {3, 4}


def test_a_stream_that_fails_ends_its_hand_over_and_the_next_save_goes_on(ranks):
    def broken() -> None:
        raise RuntimeError("the GPU failed")

    prefill, _ = ranks
    computed, later = LayerGate(RANK_LAYERS), LayerGate(RANK_LAYERS)
    computed.open_all(broken)
    prefill.saver.save_soon([Save("a", hashes(1), 0, [0, 1], attempt=0)], computed)
    later.open_all()
    prefill.saver.save_soon([Save("b", hashes(1), 0, [0, 1])], later)
    until(lambda: not prefill.saver.is_reading("a") and not prefill.saver.is_reading("b"))
    counts = prefill.counts.take()
    assert (counts["shed_chunks_node"], counts["saved_chunks"]) == (1, 1)


def test_a_request_that_goes_away_waits_for_its_prefill_no_more(ranks):
    prefill, decode = ranks
    before = time.monotonic()
    prefetch = decode.prefetcher.start("b", hashes(1), 1_000, False, writer_at(prefill))
    decode.prefetcher.drop("b")
    until(lambda: prefetch.chunks == 0 and prefetch.follow is None)
    assert time.monotonic() - before < decode.settings.handoff_seconds


def test_chunks_that_are_here_are_loaded_though_the_node_has_no_room_to_follow_the_others(ranks, monkeypatch):
    def follow(*_: object) -> larder_kv.Follow:
        raise larder_kv.BusyError("no room")

    prefill, decode = ranks
    decode.save("a", 1)
    monkeypatch.setattr("larder_kv.vllm.prefetch.follow_chunks", follow)
    prefetch = decode.prefetcher.start("b", hashes(2), 1_000, False, writer_at(prefill))
    assert decode.prefetcher.look(prefetch, 10.0) == 1
    assert prefetch.follow is None, "so the chunk is loaded as any other"
    assert decode.counts.take()["lookups_failed"] == 1


def test_the_answer_of_a_prefill_is_what_its_decode_asks_with(session):
    namespace = session.register(spec("params"))
    told = params_for_decode(Open(session, namespace), 3, hashes(2))
    assert told is not None and told["remote_chunks"] == 2 and told["remote_hash"] == hashes(2)[-1].hex()
    assert writer_of(told) == Writer(session.node, session.device, 3)
    assert attempt_of(told) is None
    assert attempt_of({"do_remote_decode": True}) == 0
    assert attempt_of({"do_remote_decode": True, "remote_attempt": 2}) == 2
    assert attempt_of(None) is None and writer_of(None) is None
    assert writer_of({"do_remote_prefill": True}) is None
    assert params_for_decode(None, 0, hashes(2)) is None


@pytest.mark.parametrize("wrong", ["abc", [1], float("inf"), {}, -1, (1 << 64) - 1, 1 << 64, True])
def test_wrong_parameters_of_a_client_raise_nothing(wrong):
    """vLLM ends if its connector raises an error for a request."""
    assert attempt_of({"do_remote_decode": True, "remote_attempt": wrong}) == 0
    asked = {"do_remote_prefill": True, "remote_node": "node-0"}
    assert writer_of(asked | {"remote_attempt": wrong}) == Writer("node-0", 0, 0)
    assert writer_of(asked | {"remote_device": wrong}) is None
    assert writer_of(asked | {"remote_node": wrong}) is None or wrong == "abc"


def test_a_prefill_that_is_too_slow_is_no_error(ranks, caplog):
    prefill, decode = ranks
    computed = LayerGate(RANK_LAYERS)
    prefill.saver.save_soon([Save("a", hashes(1), 0, [0, 1], attempt=0)], computed)
    prefetch = decode.prefetcher.start("b", hashes(1), 1_000, False, writer_at(prefill))
    computed.open(0)
    until(lambda: prefetch.chunks == 1)
    decode.loader._patience = 0.05
    with caplog.at_level(logging.INFO, "vllm.larder"):
        decode.loader.load_soon([Load("b", hashes(1), 0, [3, 4], writer_at(prefill))])
        until(lambda: decode.loader.take_done() == {"b"})
    assert decode.loader.take_failed() == {3, 4}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info] == []
    assert "request b computes the rest of its prompt: its prefill handed over 0 of 1 chunks in time" in caplog.text
    computed.open_all()


def test_a_hand_over_whose_session_has_ended_leaves_the_next_session_alone(cluster, monkeypatch):
    begun, begin = threading.Semaphore(0), HandOver.begin

    def end(*_: object) -> bool:
        raise larder_kv.EndedError("the first session")

    monkeypatch.setattr(HandOver, "begin", lambda *given: begin(*given) and (begun.release() or True))
    monkeypatch.setattr("larder_kv.vllm.saver.hand_over_layer", end)
    rank, computed = Rank(cluster.sockets[0], "outlived"), LayerGate(RANK_LAYERS)
    first = rank.node.current()
    saves = [Save("a", hashes(1), 0, [0, 1], attempt=0), Save("b", hashes(2), 1, [2, 3], attempt=0)]
    rank.saver.save_soon(saves, computed)
    assert begun.acquire(timeout=10) and begun.acquire(timeout=10)
    rank.node.lost(first)
    until(lambda: rank.node.current() is not None)
    second = rank.node.current()
    computed.open_all()
    until(lambda: not rank.saver.is_reading("b"))
    assert rank.node.current() is second and rank.counts.take()["shed_chunks_node"] == 2
    rank.close()


def test_a_node_that_goes_away_during_a_hand_over_is_no_error(caplog):
    """The request that follows the chunks is computed here, and the next request begins."""
    own = start_cluster("--nodes", "1", "--arena-bytes", "16MiB")
    decode = Rank(own.sockets[0], "gone")
    with caplog.at_level(logging.INFO, "vllm.larder"):
        decode.loader.load_soon([Load("b", hashes(1), 0, [3, 4], Writer("node-0"))])
        until(lambda: decode.counts.take().get("loads") == 1)
        own.stop()
        until(lambda: decode.loader.take_done() == {"b"})
    assert decode.loader.take_failed() == {3, 4}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    decode.close()
