"""The router's servers: one for clients, one for probes and Prometheus."""

import asyncio
import logging
import os
import signal
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from larder_kv.router.costs import Costing
from larder_kv.router.engines import Fleet, Source
from larder_kv.router.metrics import Metrics
from larder_kv.router.relay import Relay
from larder_kv.router.requests import GENERATING, OTHERS, READ_ONLY
from larder_kv.router.router import HandOver, Router

logger = logging.getLogger("larder.router")

CERTIFICATE_SECONDS = 10.0
"""How often the certificate's files are checked."""


@dataclass(frozen=True)
class Options:
    """The options of a router."""

    sources: tuple[Source, ...]
    coordinators: tuple[str, ...]
    tenant: str
    listen: tuple[str, int]
    status_listen: tuple[str, int] | None
    certificate: Path | None
    key: Path | None
    client_ca: Path | None
    engine_ca: Path | None
    engine_api_key_file: Path | None
    allow: tuple[str, ...]
    media_names: bool
    hand_over: HandOver
    least_prefill_tokens: int
    most_requests: int
    most_body_bytes: int
    health_seconds: float
    health_patience_seconds: float
    connect_seconds: float
    idle_seconds: float
    leave_seconds: float
    drain_seconds: float


async def serve(options: Options, ready: Callable[[str, str | None], None]) -> None:
    """Serves until SIGTERM or SIGINT; then it is not ready, takes requests for `leave_seconds` more, and finishes the requests
    under way within `drain_seconds`. `ready` gets the URLs of both servers when they listen. Raises `OSError` if an address or a
    file cannot be used, and `ValueError` for a file without an API key."""
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    async with AsyncExitStack() as parts:
        metrics = Metrics()
        connect = aiohttp.ClientTimeout(total=None, sock_connect=options.connect_seconds, sock_read=options.idle_seconds)
        control = await parts.enter_async_context(aiohttp.ClientSession(timeout=connect, trust_env=False))
        # A connection of its own for each request: an engine may close an idle connection just when a request goes out.
        data = aiohttp.ClientSession(
            timeout=connect,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            read_bufsize=1 << 16,
        )
        await parts.enter_async_context(data)
        tls = ssl.create_default_context(cafile=options.engine_ca) if options.engine_ca else None
        fleet = Fleet(
            options.sources,
            control,
            metrics,
            tls=tls,
            key_file=options.engine_api_key_file,
            seconds=options.health_seconds,
            patience=options.health_patience_seconds,
        )
        await fleet.start()
        parts.push_async_callback(fleet.close)
        costing = Costing(options.coordinators, options.tenant, control, metrics) if options.coordinators else None
        if costing is not None:
            await costing.start()
            parts.push_async_callback(costing.close)
        router = Router(
            fleet,
            costing,
            Relay(data, fleet, metrics, options.idle_seconds),
            control,
            metrics,
            hand_over=options.hand_over,
            least_prefill_tokens=options.least_prefill_tokens,
            most_requests=options.most_requests,
            media_names=options.media_names,
            body_seconds=options.idle_seconds,
        )
        status_url = await serve_status(options, fleet, metrics, ending, parts)
        runner = await serve_clients(options, router, parts)
        ready(url_of(runner, "https" if options.certificate else "http"), status_url)
        await ending.wait()
        logger.info("leaving")
        await asyncio.sleep(options.leave_seconds)


async def serve_clients(options: Options, router: Router, parts: AsyncExitStack) -> web.AppRunner:
    """Makes the server for clients; it has only the paths of inference."""
    app = web.Application(client_max_size=options.most_body_bytes)
    for path in (*GENERATING, *OTHERS, *options.allow):
        app.router.add_post(path, router.answer)
    for path in READ_ONLY:
        app.router.add_get(path, router.answer)
    # A client that goes away ends its request at the engine.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=options.drain_seconds, handle_signals=False
    )
    await runner.setup()
    parts.push_async_callback(runner.cleanup)
    context = None
    if options.certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if options.client_ca is not None:
            context.load_verify_locations(options.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(options.certificate, options.key)
        reloading = asyncio.create_task(reload_certificate(context, options.certificate, options.key))
        parts.callback(reloading.cancel)
    await web.TCPSite(runner, *options.listen, ssl_context=context, backlog=1_024).start()
    return runner


async def serve_status(
    options: Options, fleet: Fleet, metrics: Metrics, ending: asyncio.Event, parts: AsyncExitStack
) -> str | None:
    """Starts the server for probes and Prometheus; returns its URL."""
    if options.status_listen is None:
        return None

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if ending.is_set():
            return web.Response(status=503, text="it is leaving\n")
        if not fleet.up("both", "decode"):
            return web.Response(status=503, text="no engine is well\n")
        return web.Response(text="ok\n")

    async def figures(_: web.Request) -> web.Response:
        fleet.export()
        return web.Response(body=metrics.text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", figures)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handle_signals=False)
    await runner.setup()
    parts.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, *options.status_listen).start()
    return url_of(runner, "http")


async def reload_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Takes new files for new connections; if the new files do not fit together, the old ones stay in use."""
    seen = modified(certificate)
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        now = modified(certificate)
        if now == seen:
            continue
        try:
            # A context takes a certificate also if the key does not fit, so another context tries the files.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
            context.load_cert_chain(certificate, key)
            seen = now
            logger.info("a new certificate is in use")
        except (OSError, ssl.SSLError) as error:
            logger.error("the new certificate is not used: %s", error)


def modified(path: Path) -> float:
    """The time at which a file was last written; 0 while the file is missing."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def url_of(runner: web.AppRunner, scheme: str) -> str:
    """The URL on which a server listens."""
    host, port = runner.addresses[0][:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
