"""The costs of requests, asked of coordinators and nodes of which some never answer."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from larder_kv.router import costs
from larder_kv.router.costs import Costing
from larder_kv.router.metrics import Metrics
from standins import Coordinator

NAMESPACE = {"fingerprint": "ab" * 32, "chunk_tokens": 16, "hash": {"name": "sha256_cbor"}}


@pytest.fixture
def hung():
    """The address of a server to which connections can be made, and that never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        yield f"127.0.0.1:{silent.getsockname()[1]}"


@pytest.fixture
def coordinator():
    running = Coordinator({"node-0": 5})
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(costs, "REFRESH_SECONDS", 0.5)
    monkeypatch.setattr(costs, "REFRESH_EMPTY_SECONDS", 0.01)
    monkeypatch.setattr(costs, "PAUSE_SECONDS", 0.0)


def asking(does: Callable[[Costing], Awaitable[object]], *coordinators: str, known: int = 1, seen: float = 0.0) -> Metrics:
    """Does something with the costs, asked of these coordinators; `known` namespaces were seen `seen` seconds ago."""
    metrics = Metrics()

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            costing = Costing(coordinators, "default", session, metrics)
            for number in range(known):
                costing._namespaces[str(number)] = (time.monotonic() - seen, NAMESPACE)
            async with asyncio.timeout(30):
                await does(costing)

    asyncio.run(run())
    return metrics


async def cached(costing: Costing) -> int | None:
    """The cached tokens of a prompt of eight tokens; None without an answer."""
    found = await costing.of(list(range(8)), None, None, None)
    return found and found.cached


def failures(metrics: Metrics) -> bool:
    return b"larder_router_coordinator_failures_total 0.0" not in metrics.text()


def test_the_next_coordinator_is_asked_if_the_first_accepts_a_question_and_never_answers(hung, coordinator):
    async def ask(costing):
        assert await cached(costing) is None
        while await cached(costing) is None:
            pass

    asking(ask, hung, coordinator.address)


def test_the_namespaces_come_from_the_next_coordinator_if_the_first_is_silent(hung, coordinator):
    async def learn(costing):
        await costing.start()
        while await cached(costing) is None:
            await asyncio.sleep(0.001)
        await costing.close()

    asking(learn, hung, coordinator.address, known=0)


@pytest.mark.parametrize("is_silent", [True, False])
def test_questions_that_fail_together_skip_one_coordinator(hung, coordinator, is_silent):
    async def ask(costing):
        first, *others = costing._coordinators
        await asyncio.gather(*(cached(costing) for _ in range(3)))
        assert costing._coordinators == [*others, first]

    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    asking(ask, hung if is_silent else address, coordinator.address, "127.0.0.1:1", known=2)


def test_namespaces_that_no_node_has_had_for_long_are_not_asked_for(coordinator):
    async def ask(costing):
        assert await cached(costing) is None

    assert not failures(asking(ask, coordinator.address, seen=costs.KEPT_SECONDS + 1))
    assert coordinator.questions == []


def test_a_namespace_in_which_the_question_is_wrong_hides_no_answers_of_others(coordinator):
    async def ask(costing):
        small = NAMESPACE | {"fingerprint": "cd" * 32, "chunk_tokens": 1}
        costing._namespaces = {"small": (time.monotonic(), small), **costing._namespaces}
        assert await cached(costing) == 5
        del costing._namespaces["0"]
        assert await cached(costing) is None

    coordinator.refused = "cd" * 32
    assert not failures(asking(ask, coordinator.address))


def test_prompts_with_a_salt_or_an_adapter_are_not_asked_for_in_namespaces_of_larders_hash(coordinator):
    async def ask(costing):
        larder = NAMESPACE | {"fingerprint": "cd" * 32, "hash": {"name": "larder"}}
        costing._namespaces["larder"] = (time.monotonic(), larder)
        assert await cached(costing) == 5
        assert len(coordinator.questions) == 2
        for salt, lora in (("alice", None), (None, {"name": "sql", "path": "/sql"})):
            found = await costing.of([1], salt, lora, None)
            assert found is not None and found.cached == 5
        assert [one["fingerprint"] for one in coordinator.questions[2:]] == [NAMESPACE["fingerprint"]] * 2
        del costing._namespaces["0"]
        assert await cached(costing) == 5

    assert not failures(asking(ask, coordinator.address))


def test_a_node_that_never_answers_hides_no_namespaces_of_others(hung, coordinator, monkeypatch):
    async def learn(costing):
        await costing.refresh()
        assert list(costing._namespaces) == ["ab" * 32]

    monkeypatch.setattr(costs, "NODE_SECONDS", 0.5)
    monkeypatch.setattr(coordinator, "nodes", [hung, coordinator.address])
    asking(learn, coordinator.address, known=0)
