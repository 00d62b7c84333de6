"""Blocks that change behind the node's back: their readers find out, and so does the node."""

import itertools
import re
import urllib.request

import larder_kv
import pytest
from conftest import BLOCK_BYTES, LAYER_BYTES, LAYERS, content, damage, put, spec, start_cluster, until
from larder_kv.settings import NodeSettings, UnsupportedError
from larder_kv.vllm.handoff import Writer
from larder_kv.vllm.plan import Load
from larder_kv.vllm.settings import Settings
from test_keyed import BLOCK, Rank as KeyedRank
from test_vllm_offload import Tier, keys, row_of
from test_vllm_transfers import LAYERS as RANK_LAYERS
from test_vllm_transfers import PAGE_BYTES, Rank, hashes

PAGE = 4_096
FIRST_VALUES = itertools.count(13, 40)


@pytest.fixture(scope="module")
def own():
    """A cluster whose memory is damaged."""
    running = start_cluster("--nodes", "1", "--arena-bytes", "32MiB")
    yield running
    running.stop()


def dropped(own) -> float:
    """Chunks that the node has found damaged."""
    with urllib.request.urlopen(f"http://{own.http[0]}/metrics") as answer:
        lines = re.findall(r'^larder_damage_reports_total\{.*found="damaged"\} (.*)$', answer.read().decode(), re.MULTILINE)
    return sum(map(float, lines))


def prompt(own, name: str, verify: str = "always"):
    """Three chunks, of which the second is damaged; returns the session, its namespace and the chain."""
    session = larder_kv.Session(own.sockets[0], window_bytes=1 << 20, verify=verify)
    namespace = session.register(spec(name))
    chain = namespace.chain([bytes([number + 1]) * 32 for number in range(3)])
    seed = sum(name.encode())
    assert put(session, namespace, chain, seed) == 3
    damage(own, content(seed + 1)[:PAGE], content(seed + 2)[:PAGE])
    return session, namespace, chain, seed


def test_a_damaged_block_raises_and_is_a_miss_until_it_is_written_again(own):
    session, namespace, chain, seed = prompt(own, "raises")
    before, out = dropped(own), bytearray(BLOCK_BYTES)
    with session.lease(namespace, chain) as lease:
        lease.copy_block(0, out)
        assert bytes(out) == content(seed)
        for read in (lambda: lease.copy_block(1, out), lambda: lease.view(1)):
            with pytest.raises(larder_kv.DamagedError) as damaged:
                read()
            assert (damaged.value.position, damaged.value.block) == (1, 0)
        assert bytes(memoryview(lease.view(2))) == content(seed + 2)
    stats = session.stats()
    assert (stats.blocks_damaged, stats.bytes_verified) == (1, 3 * BLOCK_BYTES)
    until(lambda: dropped(own) == before + 1)
    assert session.lookup(namespace, chain, prompt_tokens=1_000).tokens == 32
    assert put(session, namespace, chain, seed) == 1
    with session.lease(namespace, chain) as lease:
        lease.copy_block(1, out)
    assert bytes(out) == content(seed + 1)


def test_nothing_is_verified_where_that_is_off(own):
    session, namespace, chain, seed = prompt(own, "off", "off")
    with session.lease(namespace, chain) as lease:
        assert bytes(memoryview(lease.view(1))) != content(seed + 1)
    assert session.stats().bytes_verified == 0


def test_verify_is_one_of_three_words(own):
    with pytest.raises(ValueError, match="sometimes"):
        larder_kv.Session(own.sockets[0], verify="sometimes")
    with pytest.raises(UnsupportedError, match="sometimes"):
        NodeSettings.parse({"socket": "s", "verify": "sometimes"}, "here")
    with pytest.raises(UnsupportedError, match="sometimes"):
        Settings.parse({"socket": "s", "verify": "sometimes"})
    assert (NodeSettings("s").verify, Settings("s").verify) == ("sample", "sample")


def test_a_key_whose_bytes_are_wrong_is_a_miss(own):
    rank = KeyedRank(own.sockets[0], "damaged key")
    assert rank.save([1, 2, 3]) == [True] * 3
    damage(own, content(2, BLOCK), content(3, BLOCK))
    before = dropped(own)
    assert rank.load([1, 2, 3])[0] == 1
    assert rank.counted("damaged_keys", "loaded_keys", "missed_keys", "failures") == (1, 1, 2, 0)
    until(lambda: dropped(own) == before + 1)
    assert rank.exists([1, 2, 3]) == [True, False, True]
    assert rank.save([1, 2, 3]) == [True] * 3
    assert rank.load([1, 2, 3]) == (3, [content(number, BLOCK) for number in (1, 2, 3)])
    rank.link.close()


def test_a_row_of_vllms_offloading_that_is_wrong_is_not_loaded_and_the_others_are(own):
    tier = Tier(own.sockets[0], "damaged row")
    tier.offload.store(1, keys(3), [5, 6, 7])
    tier.offload.drain()
    damage(own, row_of(6), row_of(7))
    tier.offload.load(2, keys(3), [0, 1, 2])
    tier.offload.drain()
    ended = [job for job in tier.offload.finished() if job.job == 2]
    assert [(job.success, job.keys) for job in ended] == [(False, [keys(3)[0], keys(3)[2]])]
    tier.close()


@pytest.fixture(params=["host", "gpu"])
def rank(own, fake_gpu, request):
    """Four pages of two chunks, of which the second is damaged."""
    made = Rank(own.sockets[0], request.node.name, gpu=fake_gpu if request.param == "gpu" else None)
    # Pages with values that no other test has.
    first = next(FIRST_VALUES)
    for page in range(4):
        made.fill(page, first + 10 * page)
    made.save("saved", 2)
    damage(own, bytes([first + 20]) * PAGE_BYTES, bytes([first + 21]) * PAGE_BYTES)
    made.first_values = [first + layer for layer in range(RANK_LAYERS)]
    yield made
    made.close()


def test_the_connector_computes_the_blocks_of_a_damaged_chunk_again_and_loads_those_before_it(rank):
    rank.loader.load_soon([Load("b", hashes(2), 0, [9, 8, 7, 6])])
    until(lambda: rank.loader.take_done() == {"b"})
    assert rank.loader.take_failed() == {7, 6}
    assert rank.values(9) == rank.first_values
    assert rank.counts.take()["damaged_chunks"] == 1


def test_a_step_that_loads_layer_by_layer_fails_the_blocks_of_a_damaged_chunk(rank):
    gate = rank.loader.load_now([Load("b", hashes(2), 0, [9, 8, 7, 6])])
    gate.wait_all()
    assert {7, 6} <= rank.loader.take_failed()
    assert rank.counts.take()["damaged_chunks"] == 1


def test_layers_that_another_engine_hands_over_are_verified_too(rank):
    node = rank.node.current()
    writer = Writer(node.session.node, node.session.device)
    rank.loader.load_soon([Load("b", hashes(2), 0, [9, 8, 7, 6], writer=writer)])
    until(lambda: rank.loader.take_done() == {"b"})
    assert rank.loader.take_failed() == {7, 6}
    assert rank.values(9) == rank.first_values


def test_layers_that_are_followed_are_verified_as_they_come(own):
    session = larder_kv.Session(own.sockets[0], window_bytes=1 << 20, verify="always")
    namespace = session.register(spec("followed"))
    chain = namespace.chain([bytes([9]) * 32])
    follow = session.follow(namespace, chain)
    reservation = session.reserve(namespace, chain)
    seed = 170
    for layer in range(LAYERS):
        staged = session.stage_layers(reservation, reservation.chunks, layer, layer + 1)
        staged.copy_from(0, content(seed + layer, LAYER_BYTES))
        session.hand_over(staged)
    damage(own, content(seed + 1, LAYER_BYTES)[:PAGE], content(seed + 2, LAYER_BYTES)[:PAGE])
    assert session.wait_for_layers(follow, LAYERS).layers == LAYERS
    with pytest.raises(larder_kv.DamagedError):
        follow.lease.view(0)
    follow.release()
