"""Routes requests: each to the engine where it costs least, and from prefill to decode."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import aiohttp
from aiohttp import web

from larder_kv.router.costs import MOVED, Costing, Costs
from larder_kv.router.engines import Engine, Fleet
from larder_kv.router.metrics import Metrics
from larder_kv.router.relay import OF_ONE_CONNECTION, Begun, Relay, SilentError, TryAnotherError, told
from larder_kv.router.requests import GENERATING, Asked, WrongRequestError

logger = logging.getLogger("larder.router")

MOST_TRIES = 3
"""The most engines of a kind that get one request: a request that kills engines does not kill all of them."""
UNKNOWN_TOKENS = 1_000
"""The cost of a request without an answer about cached tokens."""
TOKENIZE_SECONDS = 0.5

HandOver = Literal["in-turn", "at-once"]


class DecodeFailedError(TryAnotherError):
    """No decode engine serves the request: another prefill would not help."""


class Router:
    """Answers requests with the engines of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        costing: Costing | None,
        relay: Relay,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        *,
        hand_over: HandOver,
        least_prefill_tokens: int,
        most_requests: int,
        media_names: bool,
        body_seconds: float,
    ) -> None:
        self._fleet, self._costing, self._relay, self._session, self._metrics = fleet, costing, relay, session, metrics
        self._hand_over, self._least_prefill_tokens = hand_over, least_prefill_tokens
        self._most_requests, self._body_seconds, self._open = most_requests, body_seconds, 0
        self._media_names, self._has_prefill = media_names, fleet.has("prefill")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers a request."""
        if self._open >= self._most_requests:
            return self._refuse(503, f"the router has {self._most_requests} requests already", {"retry-after": "1"})
        self._open += 1
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self._metrics.requests.labels("left").inc()
            raise
        except ConnectionResetError:
            self._metrics.requests.labels("left").inc()
            return web.Response(status=499)
        finally:
            self._open -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        started, asked = time.monotonic(), None
        if request.method == "POST":
            try:
                async with asyncio.timeout(self._body_seconds):
                    asked = Asked.parse(request.path, await request.read(), media_names=self._media_names)
            except WrongRequestError as error:
                return self._refuse(400, str(error))
            except TimeoutError:
                return self._refuse(408, f"the body did not come within {self._body_seconds:g} s")
            except web.RequestPayloadError as error:
                return self._refuse(400, f"the body cannot be decoded: {error}")
            except web.HTTPRequestEntityTooLarge as error:
                return self._refuse(413, error.text or "the body is too large")
        try:
            with contextlib.ExitStack() as working:
                begun = await self._begin(request, asked, working)
                self._metrics.first_byte.observe(time.monotonic() - started)
                return await self._relay.pass_on(begun, request)
        except TryAnotherError as error:
            self._metrics.requests.labels("unanswered").inc()
            logger.warning("%s: no engine answers; the last: %s", request.path, error)
            return error.answer or failure(503, "no engine answers", {"retry-after": "1"})
        except SilentError as error:
            self._metrics.requests.labels("unanswered").inc()
            logger.warning("%s: %s", request.path, error)
            return failure(504, "the engine says nothing for --idle-seconds")

    async def _begin(self, request: web.Request, asked: Asked | None, working: contextlib.ExitStack) -> Begun:
        """The beginning of a request's answer; its engine counts it until `working` ends."""
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_ONE_CONNECTION}
        if asked is not None:
            # The router has decoded the body.
            headers = {name: value for name, value in headers.items() if name.lower() != "content-encoding"}
        if asked is None or asked.path not in GENERATING:
            body = asked.body if asked else None
            order = self._fleet.choose(("both", "decode"), {}, 0)
            return await self._first_that_answers(request.method, request.path, headers, body, order, working)
        costs = await self._costs(asked, headers.get("traceparent"))
        self._metrics.routed.labels("cache" if costs else "load").inc()
        if costs:
            self._metrics.prompt_tokens.inc(costs.tokens)
            self._metrics.cached_tokens.inc(costs.cached)
        if self._has_prefill and asked.may_be_handed_over():
            if costs and costs.tokens - costs.cached < self._least_prefill_tokens:
                self._metrics.handed_over.labels("short").inc()
            else:
                return await self._hand(asked, headers, costs, working)
        order = self._order(("both", "decode"), costs)
        return await self._first_that_answers("POST", asked.path, headers, asked.body, order, working)

    async def _hand(
        self, asked: Asked, headers: Mapping[str, str], costs: Costs | None, working: contextlib.ExitStack
    ) -> Begun:
        """Makes one engine compute the prompt for another; if no engine does, the other engine computes the prompt itself."""
        body: Mapping[str, Any] = asked.body
        prefills = islice(self._order(("prefill",), costs), MOST_TRIES)
        # Engines that wait for a failed prefill: their node waits a moment longer, for other requests too.
        waiting: list[Engine] = []
        for attempt, (engine, tokens) in enumerate(prefills):
            try:
                if self._hand_over == "at-once" and engine.node:
                    begun = await self._hand_at_once(asked, headers, costs, (engine, tokens), attempt, working, waiting)
                    self._metrics.handed_over.labels("prefilled").inc()
                    return begun
                with engine.working(tokens):
                    params = await self._relay.prefill(engine, asked.path, headers, asked.for_prefill(attempt))
                if params is not None:
                    body = asked.for_decode(params)
                break
            except DecodeFailedError:
                raise
            except TryAnotherError as error:
                logger.warning("prefill: %s", error)
        self._metrics.handed_over.labels("prefilled" if body is not asked.body else "alone").inc()
        order = self._order_of_decode(costs, waiting)
        return await self._first_that_answers("POST", asked.path, headers, body, order, working)

    async def _hand_at_once(
        self,
        asked: Asked,
        headers: Mapping[str, str],
        costs: Costs | None,
        chosen: tuple[Engine, int],
        attempt: int,
        working: contextlib.ExitStack,
        waiting: list[Engine],
    ) -> Begun:
        """Runs prefill and decode at the same time; `chosen` is the prefill's engine and the prompt's cost there. Raises
        `TryAnotherError` if the prefill fails before decode's first byte: decode is broken off, as it would wait for the
        prefill's node. Raises `DecodeFailedError` if no decode engine answers. Engines that were asked to decode join those that
        are `waiting`."""
        prefill, tokens = chosen
        params = {
            "do_remote_prefill": True,
            "remote_node": prefill.node,
            "remote_device": prefill.device,
            "remote_attempt": attempt,
        }

        async def compute() -> None:
            with prefill.working(tokens):
                await self._relay.prefill(prefill, asked.path, headers, asked.for_prefill(attempt))

        computing = asyncio.create_task(compute())
        # If decode begins first, the prefill continues; it ends when the client ends.
        working.callback(computing.cancel)
        decoding = asyncio.create_task(
            self._first_that_answers(
                "POST",
                asked.path,
                headers,
                asked.for_decode(params),
                self._order_of_decode(costs, waiting),
                working,
                waiting,
            )
        )
        try:
            await asyncio.wait({computing, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if computing.done() and not decoding.done():
                computing.result()
            try:
                begun = await decoding
            except TryAnotherError as error:
                raise DecodeFailedError(str(error), error.answer) from error
            computing.add_done_callback(lambda task: task.cancelled() or task.exception())
            return begun
        finally:
            if not decoding.done():
                decoding.cancel()
                await asyncio.gather(decoding, return_exceptions=True)

    async def _first_that_answers(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | None,
        order: Iterator[tuple[Engine, int]] | list[tuple[Engine, int]],
        working: contextlib.ExitStack,
        tried: list[Engine] | None = None,
    ) -> Begun:
        """Tries engines in this order, and adds them to `tried`. Raises the `TryAnotherError` of the last one."""
        last: TryAnotherError | None = None
        for engine, tokens in islice(order, MOST_TRIES):
            if tried is not None:
                tried.append(engine)
            with contextlib.ExitStack() as trying:
                work = trying.enter_context(engine.working(tokens))
                try:
                    begun = await self._relay.begin(engine, method, path, headers, body)
                except TryAnotherError as error:
                    last = error if error.answer is not None or last is None else last
                    continue
                work.generates()
                working.push(trying.pop_all())
                return begun
        raise last or TryAnotherError("there are no engines")

    def _order(self, roles: tuple[Any, ...], costs: Costs | None) -> list[tuple[Engine, int]]:
        """Engines for a prompt, best first."""
        if costs is None:
            return self._fleet.choose(roles, {}, UNKNOWN_TOKENS)
        for engine in self._fleet.up(*roles):
            if engine.node is not None and engine.node not in costs.at:
                self._fleet.forget_node(engine)
        return self._fleet.choose(roles, dict(costs.at), costs.elsewhere)

    def _order_of_decode(self, costs: Costs | None, last: Sequence[Engine]) -> list[tuple[Engine, int]]:
        """Engines for the decode of a prompt that another engine computes, best first, except the engines that must come last."""
        at, elsewhere = (costs.of_decode(), costs.tokens // MOVED) if costs else ({}, 0)
        order = self._fleet.choose(("decode", "both"), at, elsewhere)
        return sorted(order, key=lambda one: one[0] in last)

    async def _costs(self, asked: Asked, trace: str | None) -> Costs | None:
        if self._costing is None:
            return None
        tokens = asked.tokens()
        if tokens is None:
            tokens = await self._tokenize(asked)
        if not tokens:
            return None
        return await self._costing.of(tokens, asked.salt, self._lora(asked.model), trace)

    async def _tokenize(self, asked: Asked) -> list[int] | None:
        """A prompt's tokens, from the engine with the least load."""
        question = asked.to_tokenize()
        order = self._fleet.choose(("both", "prefill", "decode"), {}, 0) if question else []
        for engine, _ in order[:1]:
            try:
                async with (
                    asyncio.timeout(TOKENIZE_SECONDS),
                    self._session.post(
                        engine.url + "/tokenize", json=question, **self._fleet.own(engine)
                    ) as answer,
                ):
                    answer.raise_for_status()
                    tokens = (await answer.json())["tokens"]
                    return tokens if isinstance(tokens, list) else None
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
                logger.info("%s does not tokenize: %s", engine.url, told(error))
        return None

    def _lora(self, model: str | None) -> Mapping[str, str] | None:
        """The adapter of that name; None if there is none."""
        for engine in self._fleet.up("both", "prefill", "decode"):
            if model in engine.adapters:
                return {"name": model or "", "path": engine.adapters[model or ""]}
        return None

    def _refuse(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> web.Response:
        self._metrics.requests.labels("refused").inc()
        return failure(status, why, headers)


def failure(status: int, why: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as OpenAI's clients read it."""
    error = {"message": why, "type": "router_error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)
