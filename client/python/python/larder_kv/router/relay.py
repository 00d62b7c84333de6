"""One try of a request at one engine, and its answer to the client as it comes."""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from larder_kv.router.engines import Engine, Fleet
from larder_kv.router.metrics import Metrics

T = TypeVar("T")

BUSY = (429, 502, 503, 504)
"""The statuses of an engine that has no room now, or lacks a part of itself."""
OF_ONE_CONNECTION = (
    *("connection", "content-length", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "expect"),
)
"""Headers that are not forwarded."""
SILENT_SECONDS = 2.0
"""How long an engine whose checks fail may say nothing within a stream. Checks may fail while streams go on."""
ERROR_BYTES = 65_536
"""Limit of an error's text: a longer one is not passed on."""


class TryAnotherError(Exception):
    """This engine does not serve the request. The client has not received any part of its answer yet."""

    def __init__(self, why: str, answer: web.Response | None = None) -> None:
        super().__init__(why)
        self.answer = answer
        """The engine's own answer, for the client if no other engine has a better one."""


class SilentError(Exception):
    """An engine that goes on has said nothing for `--idle-seconds`: another engine would take as long for the same answer."""


@dataclass
class Begun:
    """An answer whose first bytes have come."""

    engine: Engine
    answer: aiohttp.ClientResponse
    first: bytes
    parts: int = 0
    """Further parts that have come."""

    def close(self) -> None:
        """Breaks the answer off; an engine that still generates stops."""
        self.answer.close()


class Relay:
    """Sends requests to engines."""

    def __init__(self, session: aiohttp.ClientSession, fleet: Fleet, metrics: Metrics, client_seconds: float) -> None:
        """`client_seconds` is how long a client may take for a part of its answer."""
        self._session, self._fleet, self._metrics = session, fleet, metrics
        self._client_seconds = client_seconds

    async def begin(
        self, engine: Engine, method: str, path: str, headers: Mapping[str, str], body: Mapping[str, Any] | None
    ) -> Begun:
        """Sends a request, and waits for the first bytes of its answer. Raises `TryAnotherError` if the engine cannot be reached,
        goes away before these bytes, or is busy, and `SilentError` if it took the request and says nothing for too long. Cancelling
        this also cancels the engine's work."""
        try:
            begun = await self._while_up(engine, self._first_bytes(engine, method, path, headers, body))
        except aiohttp.SocketTimeoutError as error:
            self._metrics.tries.labels(engine.url, "silent").inc()
            raise SilentError(f"{engine.url}: {told(error)}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._metrics.tries.labels(engine.url, "unreachable").inc()
            self._fleet.failed(engine, error)
            raise TryAnotherError(f"{engine.url}: {told(error)}") from error
        status = begun.answer.status
        if status in BUSY or status >= 500:
            self._metrics.tries.labels(engine.url, "busy" if status in BUSY else "error").inc()
            raise TryAnotherError(f"{engine.url}: status {status}", await whole(begun))
        self._metrics.tries.labels(engine.url, "ok").inc()
        return begun

    async def prefill(
        self, engine: Engine, path: str, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Lets an engine compute a prompt, and returns the parameters for decode; None if the engine refuses the request itself.
        Raises as `begin`."""
        headers = {name: value for name, value in headers.items() if name.lower() != "accept-encoding"}
        try:
            begun = await self.begin(engine, "POST", path, headers, body)
        except SilentError as error:
            raise TryAnotherError(str(error)) from error
        try:
            text = begun.first + await self._while_up(engine, begun.answer.read())
            params = json.loads(text).get("kv_transfer_params") if begun.answer.status == 200 else None
            return params if isinstance(params, dict) else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TryAnotherError(f"{engine.url}: {told(error)}") from error
        finally:
            begun.close()

    async def pass_on(self, begun: Begun, request: web.Request) -> web.StreamResponse:
        """Gives an answer to the client, part by part. An answer that is cut ends the client's connection before its end, so that
        the client notices. A client that does not read is left."""
        answer = begun.answer
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in OF_ONE_CONNECTION}
        if length := answer.headers.get("content-length"):
            headers["content-length"] = length
        headers["x-larder-engine"] = begun.engine.url
        if begun.engine.node:
            headers["x-larder-node"] = begun.engine.node
        said = web.StreamResponse(status=answer.status, headers=headers)
        watching = asyncio.ensure_future(close_when_gone(begun))
        try:
            await self._taken(said.prepare(request))
            await self._taken(said.write(begun.first))
            while part := await next_part(answer):
                begun.parts += 1
                await self._taken(said.write(part))
            await self._taken(said.write_eof())
        except (CutError, IdleClientError) as error:
            self._metrics.requests.labels("cut" if isinstance(error, CutError) else "left").inc()
            if request.transport is not None:
                request.transport.abort()
            return said
        finally:
            watching.cancel()
            # An answer that was read completely has given its connection back before this.
            begun.close()
        self._metrics.requests.labels("answered").inc()
        return said

    async def _taken(self, writing: Awaitable[T]) -> T:
        """Writes to a client, which must read what it gets."""
        try:
            async with asyncio.timeout(self._client_seconds):
                return await writing
        except TimeoutError as error:
            raise IdleClientError from error

    async def _first_bytes(
        self, engine: Engine, method: str, path: str, headers: Mapping[str, str], body: Mapping[str, Any] | None
    ) -> Begun:
        kept = {name: value for name, value in headers.items() if name.lower() not in OF_ONE_CONNECTION}
        answer = await self._session.request(
            method, engine.url + path, json=body, headers=kept, **self._fleet.ssl(engine)
        )
        try:
            return Begun(engine, answer, await answer.content.readany())
        except BaseException:
            answer.close()
            raise

    async def _while_up(self, engine: Engine, awaited: Awaitable[T]) -> T:
        """Awaits a result as long as the engine's checks succeed: an engine that hangs must not keep the request."""
        if not engine.is_up:
            return await awaited
        task = asyncio.ensure_future(awaited)
        gone = asyncio.ensure_future(engine.gone.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise aiohttp.ServerDisconnectedError("its checks fail")
            return task.result()
        finally:
            gone.cancel()
            task.cancel()


class CutError(Exception):
    """An engine's answer was cut off."""


class IdleClientError(Exception):
    """A client does not read its answer."""


async def close_when_gone(begun: Begun) -> None:
    """Cuts an answer off if its engine's checks fail and no part of it comes."""
    if not begun.engine.is_up:
        # The request went to an engine whose checks failed already.
        return
    while await begun.engine.gone.wait():
        before = begun.parts
        await asyncio.sleep(SILENT_SECONDS)
        if begun.parts == before and begun.engine.gone.is_set():
            begun.close()
            return


async def next_part(answer: aiohttp.ClientResponse) -> bytes:
    """The next part of an answer; empty at the end."""
    try:
        return await answer.content.readany()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CutError from error


def told(error: BaseException) -> str:
    """An error for the log. The `repr` of an answer that is no HTTP has all headers of the request, secrets included."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def whole(begun: Begun) -> web.Response | None:
    """Reads a short answer, such as an error's; None if it does not come, or is longer than `ERROR_BYTES`."""
    text = begun.first
    try:
        while len(text) <= ERROR_BYTES and (part := await next_part(begun.answer)):
            text += part
    except CutError:
        return None
    finally:
        begun.close()
    if len(text) > ERROR_BYTES:
        return None
    kept = ("content-encoding", "content-type", "retry-after")
    headers = {name: begun.answer.headers[name] for name in kept if name in begun.answer.headers}
    return web.Response(status=begun.answer.status, body=text, headers=headers)
