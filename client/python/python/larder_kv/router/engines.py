"""The engines: the known engines, their health, and their load."""

import asyncio
import errno
import ipaddress
import itertools
import logging
import ssl
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from larder_kv.router.metrics import Metrics

logger = logging.getLogger("larder.router")

Role = Literal["both", "prefill", "decode"]

OPEN_TOKENS = 100
"""The cost of a request that generates, in tokens of prefill."""
FAILURES = 2
"""Checks that must fail before an engine counts as gone."""
LEARN_SECONDS = 15.0
"""How often an engine is asked for its node, if the node is unknown."""
OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
"""Errors of the router's own machine, which lacks files, ports or memory. They say nothing about an engine."""


@dataclass(frozen=True)
class Source:
    """Engines as the command line names them: one engine, or all engines of a name."""

    role: Role
    url: str
    node: str | None = None
    """The node that the engine uses. If not given, the engine is asked."""


@dataclass(eq=False)
class Engine:
    """One server."""

    url: str
    source: Source
    name: str | None = None
    """The name in the engine's certificate, if it differs from the URL's."""
    node: str | None = None
    device: int = 0
    adapters: dict[str, str] = field(default_factory=dict)
    """Paths of the engine's LoRA adapters, by name."""
    model: str | None = None
    is_known: bool = False
    """Whether the engine has told its models and its node."""
    has_refused: bool = False
    """Whether the engine has refused the router's own questions."""
    is_up: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the engine is not up."""
    failures: int = 0
    open: int = 0
    """Number of its open requests."""
    backlog: int = 0
    """The cost of its open requests, in tokens of prefill."""
    learn_at: float = 0.0

    @contextmanager
    def working(self, tokens: int) -> Iterator["Work"]:
        """Counts a request of this cost while it runs."""
        work = Work(self, tokens)
        try:
            yield work
        finally:
            work.end()


class Work:
    """One request at an engine. It counts with its prompt's cost, and with `OPEN_TOKENS` while it generates."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine, self._tokens = engine, tokens + OPEN_TOKENS
        engine.open += 1
        engine.backlog += self._tokens

    def generates(self) -> None:
        """Notes that the prompt is computed."""
        self._engine.backlog -= self._tokens - OPEN_TOKENS
        self._tokens = OPEN_TOKENS

    def end(self) -> None:
        """Notes that the request has ended."""
        self._engine.open -= 1
        self._engine.backlog -= self._tokens


class Fleet:
    """All engines; checks each again and again."""

    def __init__(
        self,
        sources: Iterable[Source],
        session: aiohttp.ClientSession,
        metrics: Metrics,
        *,
        tls: ssl.SSLContext | None,
        key_file: Path | None,
        seconds: float,
        patience: float,
    ) -> None:
        self._sources, self._session, self._metrics, self._tls = tuple(sources), session, metrics, tls
        self._seconds, self._patience = seconds, patience
        self._key_file, self._key = key_file, read_key(key_file) if key_file else None
        self._engines: dict[tuple[str, Role], Engine] = {}
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._turn = itertools.count()

    async def start(self) -> None:
        """Finds the engines, and checks each once."""
        await self._resolve()
        await asyncio.gather(*(self._check(engine) for engine in self._engines.values()))
        self._resolving = asyncio.create_task(self._resolve_again())

    async def close(self) -> None:
        """Ends the checks."""
        tasks = [task for task in (self._resolving, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def has(self, role: Role) -> bool:
        """Whether the command line names engines of this role."""
        return any(source.role == role for source in self._sources)

    def up(self, *roles: Role) -> list[Engine]:
        """The healthy engines of these roles."""
        return [engine for engine in self._engines.values() if engine.is_up and engine.source.role in roles]

    def choose(self, roles: tuple[Role, ...], costs: dict[str, int], unknown: int) -> list[tuple[Engine, int]]:
        """The engines of these roles, best first, each with the request's cost there, without the backlog. `costs` are the costs
        at nodes by name, `unknown` the cost at all others. If no engine is healthy, all are tried: checks may fail while requests
        succeed."""
        engines = self.up(*roles) or [one for one in self._engines.values() if one.source.role in roles]
        if not engines:
            return []
        turn = next(self._turn) % len(engines)
        engines = engines[turn:] + engines[:turn]
        weighed = [(engine, costs.get(engine.node or "", unknown)) for engine in engines]
        return sorted(weighed, key=lambda one: one[0].backlog + one[1])

    def failed(self, engine: Engine, error: BaseException) -> None:
        """Notes an error of a request. An engine to which no connection can be made gets no requests until a check succeeds."""
        if cannot_connect(error) and not is_own(error):
            self._set_up(engine, False)

    def forget_node(self, engine: Engine) -> None:
        """Forgets an engine's node, as the cluster does not know it: the node has a new name."""
        if engine.source.node is None:
            engine.node, engine.is_known = None, False

    async def _resolve_again(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            self._read_key_again()
            await self._resolve()

    def _read_key_again(self) -> None:
        try:
            key = read_key(self._key_file) if self._key_file else None
        except (OSError, ValueError) as error:
            logger.warning("the engines' API key stays the old one: %s", error)
            return
        if key != self._key:
            self._key = key
            for engine in self._engines.values():
                engine.has_refused, engine.learn_at = False, 0.0

    async def _resolve(self) -> None:
        """Adds the engines to which names resolve now, and removes the engines to which no name resolves any more."""
        found: dict[tuple[str, Role], Engine] = {}
        for source in self._sources:
            try:
                urls = await addresses(source)
            except OSError as error:
                logger.warning("%s: %s", source.url, error)
                # The known engines of this name stay.
                found |= {key: one for key, one in self._engines.items() if one.source == source}
                continue
            for url in urls:
                key = (url, source.role)
                name = urlsplit(source.url).hostname if url != source.url else None
                found[key] = self._engines.get(key) or Engine(url, source, name, node=source.node)
        for engine in set(self._engines.values()) - set(found.values()):
            logger.info("%s is there no more", engine.url)
            if task := self._tasks.pop(engine, None):
                task.cancel()
            self._set_up(engine, False, cuts=False)
        for engine in set(found.values()) - set(self._engines.values()):
            engine.gone.set()
            self._tasks[engine] = asyncio.create_task(self._check_again(engine))
        self._engines = found

    async def _check_again(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            await self._check(engine)

    async def _check(self, engine: Engine) -> None:
        is_named = True
        try:
            async with asyncio.timeout(self._patience):
                async with self._session.get(engine.url + "/health", **self.ssl(engine)) as answer:
                    well = answer.status == 200
            engine.failures = 0 if well else FAILURES
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if is_own(error):
                logger.warning("%s is not checked: %s", engine.url, error)
                return
            is_named = not isinstance(error, aiohttp.ClientConnectorDNSError)
            engine.failures = FAILURES if cannot_connect(error) else engine.failures + 1
        if engine.failures in range(1, FAILURES):
            return
        # A name that is not found for now says nothing about requests that the engine has.
        self._set_up(engine, engine.failures == 0, cuts=is_named)
        if engine.is_up and not engine.is_known and time.monotonic() >= engine.learn_at:
            engine.learn_at = time.monotonic() + LEARN_SECONDS
            # An answer of any form must not end the checks.
            with suppress(Exception):
                async with asyncio.timeout(LEARN_SECONDS):
                    await self._learn(engine)

    async def _learn(self, engine: Engine) -> None:
        """Asks an engine for its models, and, with a request of one token, for its node and device. An engine whose node the command
        line names is asked only if decode needs its device."""
        async with self._session.get(engine.url + "/v1/models", **self.own(engine)) as answer:
            if answer.status in (401, 403) and not engine.has_refused:
                engine.has_refused = True
                logger.warning(
                    "%s refuses the router's own questions (%d), so it is routed by load alone: give --engine-api-key-file",
                    engine.url, answer.status,
                )
            models = (await answer.json())["data"]
        engine.model = models[0]["id"]
        engine.adapters = {one["id"]: one["root"] for one in models if one.get("parent")}
        if engine.source.node is not None and engine.source.role != "prefill":
            engine.is_known = True
            return
        params = {"report_node": True}
        for path, body in (
            ("/v1/completions", {"model": engine.model, "prompt": [1], "max_tokens": 1}),
            ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
        ):
            body["kv_transfer_params"] = params
            async with self._session.post(engine.url + path, json=body, **self.own(engine)) as answer:
                if answer.status != 404:
                    told = (await answer.json())["kv_transfer_params"]
                    engine.node, engine.device = engine.source.node or told["node"], told["device"]
                    engine.is_known = True
                    logger.info("%s uses the node %s", engine.url, engine.node)
                    return

    def own(self, engine: Engine) -> dict[str, Any]:
        """The settings of the router's own questions to an engine: TLS, and the engines' API key."""
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        return {"headers": headers, "allow_redirects": False, **self.ssl(engine)}

    def ssl(self, engine: Engine) -> dict[str, Any]:
        """The TLS settings of a request to an engine."""
        if not engine.url.startswith("https:"):
            return {}
        return {"ssl": self._tls or True, "server_hostname": engine.name}

    def _set_up(self, engine: Engine, is_up: bool, *, cuts: bool = True) -> None:
        if engine.is_up != is_up:
            logger.info("%s is %s", engine.url, "well" if is_up else "not well")
        engine.is_up = is_up
        if is_up:
            engine.gone.clear()
        elif cuts:
            engine.gone.set()

    def export(self) -> None:
        """Brings the gauges up to date."""
        for gauge in (self._metrics.up, self._metrics.open, self._metrics.backlog):
            gauge.clear()
        for engine in self._engines.values():
            labels = (engine.url, engine.source.role, engine.node or "")
            self._metrics.up.labels(*labels).set(engine.is_up)
            self._metrics.open.labels(engine.url).set(engine.open)
            self._metrics.backlog.labels(engine.url).set(engine.backlog)


def cannot_connect(error: BaseException) -> bool:
    """Whether an error says that nothing listens at an engine's address. A name without an address says less."""
    return isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientConnectorDNSError)


def is_own(error: BaseException) -> bool:
    """Whether an error is of the router's own machine."""
    return isinstance(error, OSError) and error.errno in OWN_ERRORS


def read_key(path: Path) -> str:
    """The API key in a file. Raises `ValueError` if the file has none, or more than one."""
    key = path.read_text(errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{path} has no API key: one line of visible ASCII characters")
    return key


async def addresses(source: Source) -> list[str]:
    """The URLs of a source's engines: its own, or one for each address of its name."""
    url = urlsplit(source.url)
    host = url.hostname or ""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return [source.url]
    if source.node is not None:
        return [source.url]
    port = url.port or (443 if url.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
    hosts = sorted({str(one[4][0]) for one in found})
    return [f"{url.scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]
