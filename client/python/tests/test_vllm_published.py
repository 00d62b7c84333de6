"""The events about the node's chunks that routers get, without vLLM."""

import dataclasses
import random

import larder_kv
import pytest
from conftest import spec
from larder_kv.settings import UnsupportedError
from larder_kv.vllm import published
from larder_kv.vllm.describer import Describer, described
from larder_kv.vllm.events import Event
from larder_kv.vllm.published import Published, Removed, Stored
from larder_kv.vllm.settings import Settings

CHUNK_TOKENS, BLOCK_TOKENS = 8, 4


def name(chunk: int) -> bytes:
    return bytes([chunk, 1]) * 16


def chunk(number: int) -> Stored:
    """A chunk of two blocks, after the chunk before it."""
    hashes = [bytes([number, 0]) * 16, name(number)]
    tokens = range(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
    parent = name(number - 1) if number else None
    return Stored(hashes, parent, BLOCK_TOKENS, tokens, 7, "adapter", [("adapter",), ("adapter",)])


def came(number: int) -> Event:
    return Event(name(number), name(number - 1) if number else None, True)


def went(number: int) -> Event:
    return Event(name(number), None, False)


def test_a_chunk_whose_tokens_are_known_is_told_block_by_block():
    told = Published(CHUNK_TOKENS, True)
    told.describe(chunk(0))
    told.describe(chunk(1))
    _, event = told.take([came(0), came(1)])
    assert isinstance(event, Stored)
    assert (list(event.tokens), event.block_tokens, event.parent) == ([8, 9, 10, 11, 12, 13, 14, 15], 4, name(0))
    assert list(event.hashes) == chunk(1).hashes and (event.lora_id, event.lora_name) == (7, "adapter")
    assert len(event.tokens) == len(event.hashes) * event.block_tokens == CHUNK_TOKENS
    assert told.take([went(1)]) == [Removed(chunk(1).hashes)]


def test_a_chunk_whose_tokens_come_later_is_told_when_they_come():
    told = Published(CHUNK_TOKENS, True)
    assert told.take([came(0), came(1)]) == []
    told.describe(chunk(0))
    (stored,) = told.take([])
    assert list(stored.tokens) == list(range(8))
    assert told.take([]) == [] and told.take([went(0), went(1)]) == [Removed(chunk(0).hashes)]


def test_a_chunk_is_told_behind_its_parent():
    told = Published(CHUNK_TOKENS, True)
    for number in range(4):
        told.describe(chunk(number))
    assert told.take([came(3), came(1), came(2)]) == [], "a router would drop them"
    assert told.take([went(2)]) == [], "it was not told"
    assert [one.hashes for one in told.take([came(0)])] == [chunk(0).hashes, chunk(1).hashes]
    assert [one.hashes for one in told.take([came(2)])] == [chunk(2).hashes, chunk(3).hashes]
    told.take([went(0), came(0)])
    assert [one.hashes for one in told.again()] == [chunk(number).hashes for number in range(4)]


def test_where_no_tokens_are_to_be_told_a_chunk_is_a_location():
    told = Published(CHUNK_TOKENS, False)
    assert told.take([came(1)]) == [Stored([name(1)], name(0), CHUNK_TOKENS)]
    assert told.take([went(1)]) == [Removed([name(1)])]


def test_what_is_told_again_is_all_that_is_there_and_stands_alone():
    told = Published(CHUNK_TOKENS, True)
    for number in range(3):
        told.describe(chunk(number))
    told.take([came(0), came(1), came(2), came(9), went(2)])
    assert [one.hashes[-1] for one in told.again()] == [name(0), name(1)]
    assert all(one.tokens for one in told.again())


def test_what_goes_without_having_been_told_is_not_told():
    assert Published(CHUNK_TOKENS, True).take([went(1)]) == []


def test_whatever_happens_a_router_knows_what_the_node_has(monkeypatch):
    """Chunks come, go and are described in any order, with less memory for descriptions than chunks."""
    monkeypatch.setattr(published, "MOST_DESCRIBED", 5)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance, told, held, known = random.Random(seed), Published(CHUNK_TOKENS, True), set(), set()
    for _ in range(2_000):
        number = chance.randrange(8)
        events = []
        if chance.random() < 0.4:
            told.describe(chunk(number))
        elif number in held:
            held.discard(number)
            events = [went(number)]
        else:
            held.add(number)
            events = [came(number)]
        for event in told.take(events):
            if isinstance(event, Removed):
                assert set(event.hashes) <= known, "a router is told that something has gone that it never had"
                known -= set(event.hashes)
            else:
                assert not set(event.hashes) & known, "a router is told twice"
                assert event.parent is None or event.parent in known, "a router does not know its parent"
                assert len(event.tokens) == len(event.hashes) * event.block_tokens > 0
                known |= set(event.hashes)
        assert {number for number in range(8) if name(number) in known} <= held
        heard: list[bytes] = []
        for one in told.again():
            assert one.parent is None or one.parent in heard, "who comes later does not know its parent"
            heard.append(one.hashes[-1])
        assert len(heard) == len(set(heard)) and set(heard) <= {name(number) for number in held}
    # Once all chunks are there and described in the order of the prompt, the router knows all of them.
    monkeypatch.setattr(published, "MOST_DESCRIBED", 8)
    for number in range(8):
        told.describe(chunk(number))
    for event in told.take([came(number) for number in range(8) if number not in held]):
        assert isinstance(event, Stored)
        known |= set(event.hashes)
    assert {name(number) for number in range(8)} <= known


@pytest.mark.parametrize(
    ("given", "endpoints", "words"),
    [
        ({"events_tokens": "local"}, ["ipc:///e"], "need `events`"),
        ({"events_again_seconds": 5}, None, "need `events`"),
        ({"events": "h:1"}, None, "vLLM publishes nothing"),
        ({"events": "h:1", "events_tokens": "local"}, ["tcp://*:5557"], "vLLM's publisher is at tcp://*:5557"),
        ({"events": "h:1", "events_tokens": "local"}, ["tcp://127.0.0.1:1", "tcp://10.0.0.1:2"], "at tcp://10.0.0.1:2"),
        ({"events": "h:1", "events_tokens": "local"}, ["tcp://127.0.0.1.example.org:1"], "example.org"),
    ],
)
def test_tokens_go_only_to_this_host_unless_somebody_says_that_the_way_is_encrypted(given, endpoints, words):
    with pytest.raises(UnsupportedError) as refused:
        Settings.parse({"socket": "/s", **given}).check_events(endpoints)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("tokens", "endpoints"),
    [
        ("off", ["tcp://*:5557"]),
        ("encrypted", ["tcp://*:5557"]),
        ("local", ["ipc:///run/e", "tcp://127.0.0.1:1", "tcp://localhost:2", "tcp://[::1]:3"]),
    ],
)
def test_events_without_tokens_may_go_anywhere(tokens, endpoints):
    Settings.parse({"socket": "/s", "events": "h:1", "events_tokens": tokens}).check_events(endpoints)


def stored(number: int, extra_keys=None) -> Stored:
    hashes = [bytes([number, block]) * 16 for block in range(2)]
    return Stored(hashes, None, 2, [number] * 4, lora_id=3, lora_name="a", extra_keys=extra_keys)


class Listening:
    """A session that records the descriptions."""

    def __init__(self) -> None:
        self.heard: list[larder_kv.DescribedChunk] = []
        self.session, self.namespace = self, "namespace"

    def describe(self, namespace: str, chunks: list[larder_kv.DescribedChunk]) -> None:
        assert namespace == "namespace"
        self.heard += chunks


class Way:
    """The connection to a node that may later be another node."""

    def __init__(self) -> None:
        self.node: Listening | None = None

    def current(self) -> Listening | None:
        return self.node


def test_a_node_hears_of_each_chunk_once_and_another_one_of_all():
    way = Way()
    describer = Describer(way)
    chunks = [stored(1, [("salt",), None]), stored(2, [None, None])]
    names = [chunk.hashes[-1] for chunk in chunks]
    describer.say(names, chunks.__getitem__)
    for _ in range(2):
        way.node = Listening()
        describer.say(names[:1], chunks.__getitem__)
        describer.say(names, chunks.__getitem__)
        assert [chunk.hashes[-1] for chunk in way.node.heard] == names
    first, second = way.node.heard
    assert (first.extra_keys, second.extra_keys) == ('[["salt"], null]', "")
    assert (list(first.tokens), first.lora_id, first.lora_name, first.parent) == ([1] * 4, 3, "a", None)


def test_a_described_chunk_has_as_many_tokens_for_each_block(session):
    namespace = session.register(spec("described"))
    whole = described(stored(1))
    session.describe(namespace, [whole])
    for wrong in (
        dataclasses.replace(whole, tokens=[1, 2, 3]),
        dataclasses.replace(whole, hashes=[]),
        dataclasses.replace(whole, hashes=[b"short", bytes(32)]),
        dataclasses.replace(whole, extra_keys="x" * 20_000),
    ):
        with pytest.raises(ValueError):
            session.describe(namespace, [wrong])
    assert session.lookup(namespace, namespace.chain([])).tokens == 0
