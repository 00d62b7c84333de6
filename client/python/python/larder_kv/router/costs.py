"""The costs of a request at each node, from the coordinator."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import aiohttp

from larder_kv.router.metrics import Metrics
from larder_kv.router.relay import told

logger = logging.getLogger("larder.router")

DEADLINE_SECONDS = 0.5
"""Time limit of a question; after it, only the load decides."""
PAUSE_SECONDS = 2.0
"""Pause before a coordinator that did not answer is asked again."""
REFRESH_SECONDS, REFRESH_EMPTY_SECONDS, KEPT_SECONDS = 10.0, 1.0, 300.0
WRONG_QUESTION = (400, 413, 422)
"""The statuses by which a coordinator refuses one prompt, for instance a prompt that is too long."""
ENGINE_HASH = "sha256_cbor"
"""The hash whose chunks may have a salt or an adapter; Larder's own has neither."""
NODES_AT_ONCE, MOST_NAMESPACES = 8, 8
NODE_SECONDS = 2.0
"""Time limit of a node's answer about its namespaces."""
MOST_TOKENS = 1 << 20
"""Longer prompts are routed by load alone: their questions alone take about the deadline, and a late answer counts as none."""
MOVED = 10
"""Moving this many tokens costs as much as computing one."""


class WrongQuestionError(ValueError):
    """The coordinator answers others, but not this question."""


@dataclass(frozen=True)
class Costs:
    """The costs of one prompt, in tokens of prefill."""

    tokens: int
    cached: int
    """Length in tokens of the prompt's prefix that the cluster holds."""
    at: Mapping[str, int]
    """The cost at each node by name, without backlogs."""
    held: Mapping[str, int]
    """Number of these tokens that each node has itself."""

    @property
    def elsewhere(self) -> int:
        """The cost at a node that holds nothing."""
        return self.tokens - self.cached + self.cached // MOVED

    def of_decode(self) -> dict[str, int]:
        """The cost at each node if another node has computed the prompt: the tokens to move."""
        return {node: (self.tokens - held) // MOVED for node, held in self.held.items()}


class Costing:
    """Asks the coordinators (HOST:PORT or URL) in turn until one answers."""

    def __init__(
        self, coordinators: Sequence[str], tenant: str, session: aiohttp.ClientSession, metrics: Metrics
    ) -> None:
        self._coordinators = [one if "://" in one else f"http://{one}" for one in coordinators]
        self._tenant, self._session, self._metrics = tenant, session, metrics
        self._paused_until = 0.0
        # Namespaces by fingerprint, each with the last time at which a node had it.
        self._namespaces: dict[str, tuple[float, dict[str, Any]]] = {}
        self._turn = 0
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Learns the namespaces, and keeps learning them."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            await self.refresh()
        self._refreshing = asyncio.create_task(self._refresh_again())

    async def close(self) -> None:
        """Stops learning."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def of(
        self, tokens: list[int], salt: str | None, lora: Mapping[str, str] | None, trace: str | None
    ) -> Costs | None:
        """The costs of a prompt, in the namespace with the least costs; None without an answer. Never raises for faults of
        others, and takes at most `DEADLINE_SECONDS`."""
        now = time.monotonic()
        known = [
            one
            for seen, one in self._namespaces.values()
            if now - seen < KEPT_SECONDS and (one["hash"].get("name") == ENGINE_HASH or not (salt or lora))
        ]
        if not known or now < self._paused_until or len(tokens) > MOST_TOKENS:
            return None
        try:
            async with self._within(DEADLINE_SECONDS):
                questions = (self._ask(one, tokens, salt, lora, trace) for one in islice(known, MOST_NAMESPACES))
                answers = await asyncio.gather(*questions, return_exceptions=True)
            come = [one for one in answers if not isinstance(one, BaseException)]
            if not come and isinstance(answers[0], BaseException):
                raise answers[0]
            return cheapest(len(tokens), come)
        except WrongQuestionError as error:
            logger.info("a prompt is routed by load alone: %s", error)
            return None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            self._metrics.coordinator_failures.inc()
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            logger.warning("routing by load alone for %g s: %s", PAUSE_SECONDS, told(error))
            return None

    async def _ask(
        self,
        namespace: dict[str, Any],
        tokens: list[int],
        salt: str | None,
        lora: Mapping[str, str] | None,
        trace: str | None,
    ) -> dict[str, Any]:
        extra = {"cache_salt": salt, "lora": lora} if namespace["hash"].get("name") == ENGINE_HASH else {}
        question = {
            "fingerprint": namespace["fingerprint"],
            "chunk_tokens": namespace["chunk_tokens"],
            "tokens": tokens,
            "hash": namespace["hash"] | extra,
        }
        headers = {"traceparent": trace} if trace else {}
        answer: dict[str, Any] = await self._coordinator("POST", "/v1/prefix", json=question, headers=headers)
        return answer

    async def _coordinator(self, method: str, path: str, **more: Any) -> Any:
        """The answer of the first coordinator that can be reached. Raises `WrongQuestionError` if it refuses the question, or
        has no room for it now; no other coordinator is asked."""
        for last, url in enumerate(self._coordinators, 1 - len(self._coordinators)):
            try:
                async with self._session.request(method, url + path, **more) as answer:
                    if answer.status in WRONG_QUESTION or (answer.status == 503 and "retry-after" in answer.headers):
                        raise WrongQuestionError(f"the coordinator answers {answer.status}")
                    answer.raise_for_status()
                    return await answer.json(content_type=None)
            except (aiohttp.ClientError, OSError):
                self._skip(url)
                if last == 0:
                    raise
        raise AssertionError("there is a coordinator")

    @asynccontextmanager
    async def _within(self, seconds: float) -> AsyncIterator[None]:
        """Limits the time of questions to coordinators. If the time is over, the coordinator that was asked first is skipped."""
        first = self._coordinators[0]
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            self._skip(first)
            raise

    def _skip(self, coordinator: str) -> None:
        """Asks the next coordinator first from now on. Of several questions that fail together, only one changes the order."""
        if self._coordinators[0] == coordinator:
            self._coordinators = self._coordinators[1:] + self._coordinators[:1]

    async def _refresh_again(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS if self._namespaces else REFRESH_EMPTY_SECONDS)
            try:
                await self.refresh()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("the namespaces are unknown: %s", told(error))

    async def refresh(self) -> None:
        """Asks some nodes for their namespaces, other nodes each time."""
        async with self._within(REFRESH_SECONDS):
            status = await self._coordinator("GET", "/status")
        nodes = [one["http"] for one in status["nodes"]]
        first = self._turn % len(nodes) if nodes else 0
        self._turn += NODES_AT_ONCE
        nodes = (nodes[first:] + nodes[:first])[:NODES_AT_ONCE]
        answers = await asyncio.gather(*map(self._namespaces_of, nodes), return_exceptions=True)
        for one in answers:
            for namespace in one if isinstance(one, list) else []:
                # The prompts of other engines' namespaces cannot be hashed from tokens.
                if namespace["tenant"] == self._tenant and namespace["hash"]:
                    self._namespaces[namespace["fingerprint"]] = (time.monotonic(), namespace)
        kept = sorted(self._namespaces.items(), key=lambda one: -one[1][0])
        self._namespaces = dict(kept[:MOST_NAMESPACES])

    async def _namespaces_of(self, node: str) -> list[dict[str, Any]]:
        async with asyncio.timeout(NODE_SECONDS), self._session.get(f"http://{node}/namespaces") as answer:
            answer.raise_for_status()
            found: list[dict[str, Any]] = await answer.json(content_type=None)
            return found


def cheapest(tokens: int, answers: Sequence[Mapping[str, Any]]) -> Costs:
    """The answer of the namespace with the most cached tokens."""
    best = max(answers, key=lambda answer: answer["cluster"]["tokens"])
    at = {node["name"]: int(node["cost_tokens"]) for node in best["nodes"]}
    held = {node["name"]: int(node["held_tokens"]) for node in best["nodes"]}
    return Costs(tokens, int(best["cluster"]["tokens"]), at, held)
