"""The router in front of servers that do what a test tells them to."""

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import re
import resource
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import standins
from conftest import until
from larder_kv.router import serve
from larder_kv.router.__main__ import main
from larder_kv.router.engines import Engine as Known
from larder_kv.router.engines import Fleet, Source
from larder_kv.router.requests import Asked, WrongRequestError
from standins import Coordinator, Engine

COMPLETIONS = "/v1/completions"
PROMPT = list(range(1_000))


class Router:
    """`python -m larder_kv.router` with these options, run by the command `by`."""

    def __init__(self, *options: str, by: tuple[str, ...] = ()):
        command = [*by, sys.executable, "-m", "larder_kv.router", "--listen=127.0.0.1:0", "--status-listen=127.0.0.1:0"]
        command += ["--health-seconds=0.05", "--health-patience-seconds=0.2", *options]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        self.url, self.status = re.findall(r"https?://[^\s,]+", line)

    def open(self, body: object, path: str = COMPLETIONS, context: ssl.SSLContext | None = None, **headers: str):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, named)
        return urllib.request.urlopen(request, timeout=30, context=context)

    def ask(self, prompt: object = PROMPT, **more) -> tuple[dict, str]:
        """The answer, and the URL of the engine that gave it."""
        with self.open({"model": "model", "prompt": prompt} | more) as answer:
            return json.load(answer), answer.headers["x-larder-engine"]

    def fails(self, body: object, path: str = COMPLETIONS, **headers: str) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as error:
            self.open(body, path, **headers)
        return error.value.code, error.value.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        text = urllib.request.urlopen(f"{self.status}/metrics", timeout=30).read().decode()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        samples = re.findall(rf"^larder_router_{name}(\{{.*\}})? (\S+)$", text, re.M)
        return sum(float(value) for found, value in samples if all(one in found for one in wanted))

    def knows(self, *engines: Engine) -> "Router":
        """Waits until the router knows the nodes of these engines."""
        until(lambda: all(self.metric("engine_up", engine=one.url, node=one.node) for one in engines))
        return self

    def is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.status}/readyz", timeout=30).status == 200
        except urllib.error.HTTPError:
            return False


def log_of(router: Router) -> str:
    router.log.seek(0)
    return router.log.read()


@pytest.fixture
def made():
    """Makes stand-ins and routers, and ends them."""
    running = []

    def make(what, *arguments):
        running.append(what(*arguments))
        return running[-1]

    yield make
    for one in running:
        if isinstance(one, Router):
            one.process.kill()
            one.process.wait()
        else:
            one.shutdown()


def two(made) -> tuple[Engine, Engine]:
    return made(Engine, "node-0"), made(Engine, "node-1")


def in_front_of(made, *engines: Engine, coordinator: Coordinator | None = None, options: tuple[str, ...] = ()) -> Router:
    named = [f"--engine={one.url}" for one in engines]
    asked = [f"--coordinator={coordinator.address}"] if coordinator else []
    return made(Router, *named, *asked, *options)


def test_a_request_goes_where_its_prompt_is_cached(made):
    engines, coordinator = two(made), made(Coordinator, {"node-0": 0, "node-1": 960})
    router = in_front_of(made, *engines, coordinator=coordinator).knows(*engines)
    for _ in range(4):
        assert router.ask()[1] == engines[1].url
    assert router.metric("routed_total", by="cache") == 4
    assert router.metric("cached_tokens_total") == 4 * 960
    assert router.metric("first_byte_seconds_count") == 4


def test_the_question_has_tokens_salt_and_adapter(made):
    engine, coordinator = made(Engine, "node-0"), made(Coordinator, {"node-0": 0})
    router = in_front_of(made, engine, coordinator=coordinator).knows(engine)
    router.ask("four words are here", model="adapter", cache_salt="alice")
    (question,) = coordinator.questions
    assert question["tokens"] == [4, 5, 3, 4]
    assert question["hash"]["cache_salt"] == "alice"
    assert question["hash"]["lora"] == {"name": "adapter", "path": "/adapters/a"}


def test_a_backlog_outweighs_a_cached_prompt(made):
    engines, coordinator = two(made), made(Coordinator, {"node-0": 0, "node-1": 100})
    router = in_front_of(made, *engines, coordinator=coordinator).knows(*engines)
    engines[1].deeds.put(standins.wait_for_hang_up)
    with ThreadPoolExecutor() as clients:
        clients.submit(lambda: router.ask())
        engines[1].came.acquire()
        # At this node, 900 tokens wait to be computed first; elsewhere, ten tokens have to be moved.
        assert router.ask()[1] == engines[0].url
        router.process.kill()


def test_requests_are_spread_where_nobody_says_what_is_cached(made):
    engines, coordinator = two(made), made(Coordinator, {"node-0": 0, "node-1": 960})
    router = in_front_of(made, *engines, coordinator=coordinator).knows(*engines)
    coordinator.is_broken = True
    assert {router.ask()[1] for _ in range(2)} == {one.url for one in engines}
    assert router.metric("routed_total", by="load") == 2
    # The coordinator is not asked again at once.
    assert len(coordinator.questions) == 1 and router.metric("coordinator_failures_total") == 1


def test_a_prompt_that_the_coordinator_refuses_is_routed_by_load_and_the_next_one_by_cache(made):
    engines, coordinator = two(made), made(Coordinator, {"node-0": 0, "node-1": 960})
    router = in_front_of(made, *engines, coordinator=coordinator).knows(*engines)
    coordinator.most_tokens = 1_000
    for refused in (list(range(2_000)), [-1], [1 << 32], [True], [1] * ((1 << 20) + 1)):
        router.ask(refused)
        assert router.ask()[1] == engines[1].url
    assert router.metric("routed_total", by="load") == router.metric("routed_total", by="cache") == 5
    assert router.metric("coordinator_failures_total") == 0
    asked = [len(question["tokens"]) for question in coordinator.questions]
    assert asked == [2_000, *[1_000] * 5], "prompts with impossible tokens, or too many, are not asked for"


def test_an_engine_whose_node_is_named_tells_its_adapters(made):
    engine, coordinator = made(Engine), made(Coordinator, {"node-0": 0})
    router = made(Router, f"--engine=node-0={engine.url}", f"--coordinator={coordinator.address}")
    until(lambda: router.ask(model="adapter") and coordinator.questions[-1]["hash"]["lora"])
    assert coordinator.questions[-1]["hash"]["lora"] == {"name": "adapter", "path": "/adapters/a"}


def test_engines_with_an_api_key_tell_their_nodes_to_a_router_that_has_the_key(made, tmp_path):
    engine, coordinator, key = made(Engine, "node-0"), made(Coordinator, {"node-0": 960}), tmp_path / "key"
    engine.api_key = "of the engines".replace(" ", "-")
    key.write_text("another\n")
    router = in_front_of(made, engine, coordinator=coordinator, options=(f"--engine-api-key-file={key}",))
    assert router.fails({"prompt": PROMPT})[0] == 401, "clients send a key of their own"
    until(lambda: "refuses the router's own questions (401)" in log_of(router))
    key.write_text(engine.api_key + "\n")
    router.knows(engine)
    with router.open({"model": "model", "prompt": PROMPT}, authorization=f"Bearer {engine.api_key}"):
        assert router.metric("routed_total", by="cache") > 0
    assert engine.api_key not in log_of(router)


def test_an_engine_is_checked_whatever_its_models_look_like(made, monkeypatch):
    monkeypatch.setattr(Engine, "models", [{"id": "model"}, "no object"])
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine)
    router.ask()
    engine.is_hanging.set()
    until(lambda: not router.is_ready())
    engine.is_hanging.clear()
    until(router.is_ready)


def test_the_log_has_no_secrets_of_clients(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine).knows(engine)
    engine.serve = standins.babble
    assert router.fails({"prompt": "a"}, authorization="Bearer secret")[0] == 503
    log = log_of(router)
    assert "no engine answers" in log and "secret" not in log


def test_a_dead_engine_gets_no_requests_until_it_is_back(made):
    engines = two(made)
    router = in_front_of(made, *engines).knows(*engines)
    engines[0].stop()
    assert {router.ask()[1] for _ in range(4)} == {engines[1].url}
    until(lambda: router.metric("engine_up", engine=engines[0].url) == 0)
    assert router.is_ready()
    engines[1].stop()
    assert router.fails({"prompt": [1]})[0] == 503
    until(lambda: not router.is_ready())


@pytest.mark.parametrize("deed", [standins.fail(429), standins.fail(503), standins.fail(500), standins.die])
def test_an_engine_that_is_busy_or_broken_is_passed_over(made, deed):
    engines = two(made)
    router = in_front_of(made, *engines).knows(*engines)
    serve_with(standins.first_time(deed), engines)
    answer, _ = router.ask()
    assert answer["choices"] == [{"text": "said"}]
    assert [len(engine.asked) for engine in engines] == [1, 1]
    assert router.metric("tries_total", outcome="ok") == 1 and router.metric("tries_total") == 2


def serve_with(deed: standins.Deed, engines: Iterable[Engine]) -> None:
    for engine in engines:
        engine.serve = deed


def test_the_last_engines_own_answer_comes_where_all_are_busy(made):
    engines = two(made)
    router = in_front_of(made, *engines).knows(*engines)
    serve_with(standins.fail(503, retry_after="7"), engines)
    with pytest.raises(urllib.error.HTTPError) as error:
        router.ask()
    assert (error.value.code, error.value.headers["retry-after"]) == (503, "7")
    assert error.value.read() == b'{"error": {"message": "busy"}}'
    assert router.metric("requests_total", outcome="unanswered") == 1
    assert [len(engine.asked) for engine in engines] == [1, 1]


def test_an_error_of_the_request_itself_is_its_answer(made):
    engines = two(made)
    router = in_front_of(made, *engines).knows(*engines)
    serve_with(standins.fail(422), engines)
    assert router.fails({"prompt": [1]})[0] == 422
    assert sorted(len(engine.asked) for engine in engines) == [0, 1]


def test_a_request_leaves_an_engine_that_hangs(made):
    engines = two(made)
    router = in_front_of(made, *engines).knows(*engines)
    serve_with(standins.first_time(standins.wait_for_hang_up), engines)
    with ThreadPoolExecutor() as clients:
        asked = clients.submit(router.ask)
        until(lambda: engines[0].asked or engines[1].asked)
        hanging, other = engines if engines[0].asked else reversed(engines)
        hanging.is_hanging.set()
        assert asked.result()[1] == other.url
        assert hanging.left.acquire(timeout=30), "the router hangs up"
    hanging.is_hanging.clear()
    until(lambda: router.metric("engine_up", engine=hanging.url))


def test_a_request_at_which_an_engine_is_silent_for_too_long_is_not_computed_again_elsewhere(made):
    engines = two(made)
    router = in_front_of(made, *engines, options=("--idle-seconds=0.5",)).knows(*engines)
    serve_with(standins.wait_for_hang_up, engines)
    status, why = router.fails({"prompt": [1]})
    assert status == 504 and "--idle-seconds" in why
    assert sum(len(engine.asked) for engine in engines) == 1
    assert sum(router.metric("tries_total", engine=engine.url, outcome="silent") for engine in engines) == 1


def test_a_name_that_is_not_found_for_now_breaks_off_no_request():
    cut = OSError(1, "refused")
    unnamed = OSError(-2, "Name or service not known")
    connection = SimpleNamespace(host="engine", port=1, is_ssl=False, ssl=False)
    errors = {
        "unnamed": aiohttp.ClientConnectorDNSError(connection, unnamed),
        "refused": aiohttp.ClientConnectorError(connection, cut),
    }

    async def states(error: str) -> list[tuple[bool, bool]]:
        def fails(*_: object, **more: object) -> None:
            raise errors[error]

        fleet = Fleet([], SimpleNamespace(get=fails), None, tls=None, key_file=None, seconds=1, patience=1)
        engine = Known("http://engine:1", Source("both", "http://engine:1", "node-0"), is_up=True)
        fleet.failed(engine, errors[error])
        seen = [(engine.is_up, engine.gone.is_set())]
        for _ in range(2):
            await fleet._check(engine)
            seen.append((engine.is_up, engine.gone.is_set()))
        return seen

    assert asyncio.run(states("unnamed")) == [(True, False), (True, False), (False, False)]
    assert asyncio.run(states("refused")) == [(False, True)] * 3


def test_an_error_that_was_packed_between_router_and_engine_comes_whole_and_named(made):
    packed = gzip.compress(json.dumps({"error": {"message": "busy" * 10_000}}).encode(), 0)

    def busy(handler: standins.Handler, _body: dict) -> None:
        handler.send_response(503)
        handler.send_header("content-encoding", "gzip")
        handler.send_header("content-length", str(len(packed)))
        handler.end_headers()
        for start in range(0, len(packed), 10_000):
            handler.wfile.write(packed[start : start + 10_000])
            handler.wfile.flush()
            time.sleep(0.01)

    engine = made(Engine, "node-0")
    router = in_front_of(made, engine).knows(engine)
    engine.serve = busy
    with pytest.raises(urllib.error.HTTPError) as error:
        router.open({"prompt": [1]}, accept_encoding="gzip")
    assert (error.value.code, error.value.headers["content-encoding"]) == (503, "gzip")
    assert error.value.read() == packed


def test_a_router_that_can_open_no_more_files_keeps_its_engines_and_their_requests(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine).knows(engine)
    clients = [http.client.HTTPConnection(router.url.removeprefix("http://")) for _ in range(2)]
    for client in clients:
        client.request("POST", COMPLETIONS, json.dumps({"prompt": [1]}))
        assert client.getresponse().read()
    engine.deeds.put(standins.wait)
    clients[0].request("POST", COMPLETIONS, json.dumps({"prompt": [1]}))
    until(lambda: len(engine.asked) == 3)
    limits = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    engine.ends_checks = True
    until(lambda: log_of(router).count("is not checked") > 2)
    clients[1].request("POST", COMPLETIONS, json.dumps({"prompt": [1]}))
    assert clients[1].getresponse().status == 503
    assert "Too many open files" in log_of(router) and "not well" not in log_of(router)
    engine.go_on.release()
    assert json.load(clients[0].getresponse())["choices"] == [{"text": "said"}]
    resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, limits)
    assert router.ask()[1] == engine.url


def test_a_router_takes_as_many_open_files_as_it_may_and_warns_if_they_are_too_few(made):
    def limited(*options: str) -> Router:
        return Router(f"--engine={engine.url}", *options, by=("prlimit", "--nofile=128:300"))

    engine = made(Engine, "node-0")
    many, few = made(limited, "--most-requests=79"), made(limited, "--most-requests=78")
    for router in (many, few):
        assert resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE) == (300, 300)
    assert "--most-requests=79 may need 301 open files, and the limit is 300" in log_of(many)
    assert "open files" not in log_of(few)


def test_parts_of_a_stream_come_as_they_are_made(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine).knows(engine)
    engine.deeds.put(standins.stream)
    with router.open({"prompt": [1], "stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.read1() == b"data: one\n\n"
        engine.go_on.release()
        assert answer.read() == b"data: two\n\n"


def test_a_client_notices_that_its_stream_was_cut(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine).knows(engine)
    engine.deeds.put(standins.cut)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)), router.open({"prompt": [1], "stream": True}) as answer:
        answer.read()
    until(lambda: router.metric("requests_total", outcome="cut") == 1)
    assert router.metric("open_requests") == 0 and router.metric("backlog_tokens") == 0


def test_a_client_notices_that_the_engine_of_its_stream_hangs(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine).knows(engine)
    engine.deeds.put(standins.stream_and_hang)
    with router.open({"prompt": [1], "stream": True}) as answer:
        assert answer.read1() == b"data: one\n\n"
        engine.is_hanging.set()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
    assert engine.left.acquire(timeout=30)
    assert router.metric("requests_total", outcome="cut") == 1


def test_a_stream_goes_on_while_its_engines_checks_fail(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine).knows(engine)
    engine.deeds.put(standins.tick)
    with router.open({"prompt": [1], "stream": True}) as answer:
        engine.is_hanging.set()
        until(lambda: router.metric("engine_up", engine=engine.url) == 0)
        for _ in range(30):
            assert answer.readline() + answer.readline() == b"data: one\n\n"
        engine.go_on.release()
        answer.read()
    assert router.metric("requests_total", outcome="answered") == 1


def test_a_client_that_does_not_read_is_left(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine, options=("--idle-seconds=0.5", "--most-requests=1")).knows(engine)
    engine.deeds.put(standins.stream_on)
    client = http.client.HTTPConnection(router.url.removeprefix("http://"))
    client.request("POST", COMPLETIONS, json.dumps({"prompt": [1], "stream": True}))
    assert engine.left.acquire(timeout=30)
    until(lambda: router.metric("requests_total", outcome="left") == 1)
    assert router.ask()[1] == engine.url, "its place is free"
    client.close()


def test_the_engine_stops_when_the_client_goes_away(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine).knows(engine)
    engine.deeds.put(standins.wait_for_hang_up)
    client = http.client.HTTPConnection(router.url.removeprefix("http://"))
    client.request("POST", COMPLETIONS, json.dumps({"prompt": [1]}))
    engine.came.acquire()
    client.close()
    assert engine.left.acquire(timeout=30)
    until(lambda: router.metric("requests_total", outcome="left") == 1)


def test_limits_and_wrong_requests_are_answered_by_the_router(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine, options=("--most-requests=1", "--most-body-bytes=1000")).knows(engine)
    assert router.fails({"prompt": "x" * 2_000})[0] == 413
    assert router.fails(b"[1]") == (400, unordered("the body is not a JSON object", 400))
    assert router.fails(b"{")[0] == 400
    assert router.fails({}, "/pause")[0] == 404 and router.fails({}, "/metrics")[0] in (404, 405)
    engine.deeds.put(standins.stream)
    with router.open({"prompt": [1]}) as answer:
        assert answer.read1() == b"data: one\n\n"
        assert router.fails({"prompt": [1]})[0] == 503
        engine.go_on.release()
    assert router.metric("requests_total", outcome="refused") == 4
    assert len(engine.asked) == 1


def unordered(message: str, code: int) -> str:
    return json.dumps({"error": {"message": message, "type": "router_error", "param": None, "code": code}})


def test_a_request_under_way_ends_before_the_router_does(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine, options=("--leave-seconds=0.5",)).knows(engine)
    engine.deeds.put(standins.stream)
    with router.open({"prompt": [1]}) as answer:
        answer.read1()
        router.process.send_signal(signal.SIGTERM)
        until(lambda: not router.is_ready())
        engine.go_on.release()
        assert answer.read() == b"data: two\n\n"
    assert router.process.wait(timeout=30) == 0


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes NAME.pem and NAME.key, for 127.0.0.1."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run([*command, "-keyout", key, "-out", certificate, *names], check=True, capture_output=True)
    return certificate, key


def test_clients_speak_tls(made, tmp_path):
    for name in ("server", "client"):
        make_certificate(tmp_path, name)
    engine = made(Engine, "node-0")
    certificates = [f"--tls-{of}={tmp_path / name}" for of, name in (("certificate", "server.pem"), ("key", "server.key"))]
    certificates.append(f"--tls-client-ca={tmp_path / 'client.pem'}")
    router = in_front_of(made, engine, options=tuple(certificates)).knows(engine)
    context = ssl.create_default_context(cafile=tmp_path / "server.pem")
    with pytest.raises((urllib.error.URLError, OSError)):
        router.open({"prompt": [1]}, context=context)
    context.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
    assert router.open({"prompt": [1]}, context=context).status == 200


def test_a_certificate_that_comes_before_its_key_is_not_used_until_the_key_comes(tmp_path, monkeypatch, caplog):
    first, second = (make_certificate(tmp_path, name) for name in ("first", "second"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*first)

    async def replace() -> None:
        reloading = asyncio.create_task(serve.reload_certificate(context, *first))
        async with asyncio.timeout(30):
            # The task sees the first certificate before the second one comes.
            await asyncio.sleep(0)
            os.utime(second[0], (1, 1))
            second[0].replace(first[0])
            while caplog.text.count("is not used") < 2:
                await asyncio.sleep(0.001)
            assert shown(context) == kept
            second[1].replace(first[1])
            while shown(context) == kept:
                await asyncio.sleep(0.001)
        reloading.cancel()

    kept, new = (ssl.PEM_cert_to_DER_cert(one[0].read_text()) for one in (first, second))
    assert shown(context) == kept
    monkeypatch.setattr(serve, "CERTIFICATE_SECONDS", 0.001)
    asyncio.run(replace())
    assert shown(context) == new


def shown(context: ssl.SSLContext) -> bytes | None:
    """The certificate that a client of this server gets."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl._create_unverified_context().wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client.getpeercert(binary_form=True)


def test_a_body_that_cannot_be_decoded_is_refused(made):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine)
    assert router.fails(b"no gzip", content_encoding="gzip")[0] == 400
    assert router.metric("requests_total", outcome="refused") == 1 and engine.asked == []


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
def test_a_packed_body_reaches_the_engine_unpacked_and_is_not_called_packed(made, path):
    engine = made(Engine, "node-0")
    router = in_front_of(made, engine).knows(engine)
    named = []

    def note(handler: standins.Handler, body: dict) -> None:
        named.append(handler.headers["content-encoding"])
        standins.answer(handler, body)

    engine.serve = note
    router.open(gzip.compress(json.dumps({"prompt": [1], "input": "x"}).encode()), path, content_encoding="gzip").close()
    assert named == [None] and engine.asked[-1]["prompt"] == [1]


# Prefill and decode.


def apart(made, *options: str, coordinator: Coordinator | None = None) -> tuple[Router, list[Engine], list[Engine]]:
    prefills, decodes = ([made(Engine, f"{kind}-{number}") for number in range(2)] for kind in ("p", "d"))
    named = [f"--prefill={one.url}" for one in prefills] + [f"--decode={one.url}" for one in decodes]
    if coordinator is not None:
        named.append(f"--coordinator={coordinator.address}")
    return made(Router, *named, *options).knows(*prefills, *decodes), prefills, decodes


def asked_of(engines: list[Engine]) -> list[dict]:
    return [body for engine in engines for body in engine.asked]


def test_a_prompt_is_handed_over_in_turn(made):
    router, prefills, decodes = apart(made)
    _, engine = router.ask(max_tokens=50, stream=False, n=2, kv_transfer_params={"remote_node": "evil", "other": 1})
    assert engine in [one.url for one in decodes]
    (prefill,), (decode,) = asked_of(prefills), asked_of(decodes)
    assert prefill["max_tokens"] == 1 and "stream" not in prefill and "n" not in prefill
    assert prefill["kv_transfer_params"] == {"other": 1, "do_remote_decode": True, "remote_attempt": 0}
    node = next(one.node for one in prefills if one.asked)
    told = {"other": 1, "do_remote_prefill": True, "remote_node": node, "remote_attempt": 0}
    assert decode["kv_transfer_params"] == told
    assert (decode["max_tokens"], decode["n"]) == (50, 2)
    assert router.metric("handed_over_total", how="prefilled") == 1


def test_a_prefill_that_fails_is_tried_elsewhere(made):
    router, prefills, decodes = apart(made)
    serve_with(standins.first_time(standins.die), prefills)
    router.ask()
    assert sorted(map(attempt_of, asked_of(prefills))) == [0, 1]
    (decode,) = asked_of(decodes)
    assert decode["kv_transfer_params"]["remote_node"] == next(p.node for p in prefills if attempt_of(p.asked[0]) == 1)


def test_a_prefill_that_fails_at_the_same_time_is_tried_elsewhere_and_decode_begins_anew(made):
    router, prefills, decodes = apart(made, "--hand-over=at-once")
    decode_came = threading.Event()

    def fail_when_decode_waits(handler, body):
        decode_came.wait(30)
        standins.die(handler, body)

    def wait_for_prefill(handler, body):
        decode_came.set()
        standins.wait_for_hang_up(handler, body)

    serve_with(standins.first_time(fail_when_decode_waits), prefills)
    serve_with(standins.first_time(wait_for_prefill), decodes)
    router.ask()
    # A decode that waits for nobody may answer before its prefill is asked.
    until(lambda: len(asked_of(prefills)) == 2)
    assert sorted(map(attempt_of, asked_of(prefills))) == [0, 1]
    told = {attempt_of(body): body["kv_transfer_params"]["remote_node"] for body in asked_of(decodes)}
    assert told == {attempt_of(one.asked[0]): one.node for one in prefills}
    assert [len(one.asked) for one in decodes] == [1, 1], "the first one's node may go on waiting"
    assert any(one.left.acquire(timeout=30) for one in decodes if attempt_of(one.asked[0]) == 0), "the router hangs up"


def attempt_of(body: dict) -> int:
    return body["kv_transfer_params"]["remote_attempt"]


def test_both_begin_at_the_same_time(made):
    router, prefills, decodes = apart(made, "--hand-over=at-once")
    serve_with(standins.wait_for_hang_up, prefills)
    _, engine = router.ask()
    assert engine in [one.url for one in decodes]
    (decode,) = asked_of(decodes)
    assert decode["kv_transfer_params"]["remote_node"] in [one.node for one in prefills]
    assert decode["kv_transfer_params"]["do_remote_prefill"] is True


def test_decode_hears_the_device_of_a_prefill_whose_node_is_named(made):
    prefill, decode = made(Engine, "p"), made(Engine, "d")
    prefill.device = 3
    router = made(Router, f"--prefill=p={prefill.url}", f"--decode={decode.url}", "--hand-over=at-once").knows(prefill, decode)
    until(lambda: "uses the node p" in log_of(router))
    router.ask()
    (asked,) = asked_of([decode])
    assert (asked["kv_transfer_params"]["remote_node"], asked["kv_transfer_params"]["remote_device"]) == ("p", 3)


def test_a_request_that_kills_engines_kills_three_of_a_kind(made):
    prefills, decodes = ([made(Engine, f"{kind}-{number}") for number in range(8)] for kind in ("p", "d"))
    named = [f"--prefill={one.url}" for one in prefills] + [f"--decode={one.url}" for one in decodes]
    router = made(Router, *named, "--hand-over=at-once").knows(*prefills, *decodes)
    serve_with(standins.wait_for_hang_up, prefills)
    serve_with(standins.die, decodes)
    assert router.fails({"prompt": PROMPT})[0] == 503
    assert len(asked_of(prefills)) == 1 and len(asked_of(decodes)) == 3


def test_decode_computes_what_no_prefill_does(made):
    router, prefills, decodes = apart(made)
    for one in prefills:
        one.stop()
    router.ask()
    (decode,) = asked_of(decodes)
    assert "kv_transfer_params" not in decode
    assert router.metric("handed_over_total", how="alone") == 1


def test_decode_is_tried_elsewhere_with_what_the_prefill_said(made):
    router, prefills, decodes = apart(made)
    serve_with(standins.first_time(standins.fail(503)), decodes)
    router.ask()
    first, second = asked_of(decodes)
    assert first == second and first["kv_transfer_params"]["do_remote_prefill"] is True
    assert len(asked_of(prefills)) == 1


def test_a_prompt_of_which_little_is_to_compute_is_not_handed_over(made):
    coordinator = made(Coordinator, {"p-0": 960, "p-1": 0, "d-0": 0, "d-1": 960})
    router, prefills, decodes = apart(made, coordinator=coordinator)
    assert router.ask()[1] == decodes[1].url
    assert asked_of(prefills) == [] and router.metric("handed_over_total", how="short") == 1
    assert router.ask(list(range(2_000)))[1] == decodes[1].url
    assert len(prefills[0].asked) == 1, "where most of it is cached"


# Tests that need no servers.


def test_wrong_options_are_explained(capsys):
    for options, why in [
        ([], "at least one --engine"),
        (["--engine=10.0.0.1:8000"], "is no [NODE=]URL"),
        (["--prefill=http://a:1"], "--decode"),
        (["--engine=http://a:1", "--listen=8080"], "is no HOST:PORT"),
        (["--engine=http://a:1", "--tls-key=k"], "go together"),
        (["--engine=http://a:1", "--most-requests=0"], "number from 1 on"),
        (["--engine=http://user:word@a:1"], "the URL of a has a user"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(options)
        assert ended.value.code == 2 and why in capsys.readouterr().err, options


def test_a_file_without_a_key_is_an_error(tmp_path, capsys):
    (tmp_path / "empty").touch()
    for name, why in [("empty", "has no API key"), ("absent", "No such file")]:
        assert main(["--engine=http://a:1", f"--engine-api-key-file={tmp_path / name}"]) == 1
        assert why in capsys.readouterr().err


def test_an_address_in_use_is_an_error(made, capsys):
    taken = made(Engine)
    assert main([f"--engine={taken.url}", f"--listen={taken.address}", "--status-listen=off"]) == 1
    assert "does not start" in capsys.readouterr().err


def test_prompts_with_media_are_not_taken_for_their_text():
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert Asked("/v1/chat/completions", {"messages": image}).to_tokenize() is None
    several = Asked("/v1/completions", {"prompt": ["a", "b"]})
    assert several.to_tokenize() is None and not several.may_be_handed_over()


def test_a_client_names_no_node_in_any_place_that_an_engine_reads():
    named = {"kv_transfer_params": {"do_remote_prefill": True, "remote_node": "any", "session": "s"}, "other": 1}
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "extra_args": named}, "vllm_xargs": named, **named}
    asked = Asked.parse("/inference/v1/generate", json.dumps(body).encode())
    assert asked.body == {
        "token_ids": [1],
        "sampling_params": {"max_tokens": 1, "extra_args": {"other": 1}},
        "vllm_xargs": {"other": 1},
        "kv_transfer_params": {"session": "s"},
        "other": 1,
    }
    for odd in ({"sampling_params": [1]}, {"sampling_params": {"extra_args": "a"}}, {"vllm_xargs": 1}):
        assert Asked.parse(COMPLETIONS, json.dumps(odd).encode()).body == odd


def test_clients_name_no_media_unless_they_may():
    part = {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "of another image"}
    tools = [{"type": "function", "function": {"parameters": {"properties": {"uuid": {"type": "string"}}}}}]
    told = {"type": "tool_use", "input": {"uuid": "a tool's own"}}
    deep = {"type": "tool_result", "content": [part]}
    body = {"messages": [{"role": "user", "content": [part, "text", told, deep]}], "tools": tools, "content_parts": [part]}
    nameless = {key: value for key, value in part.items() if key != "uuid"}
    expected = {
        "messages": [{"role": "user", "content": [nameless, "text", told, deep | {"content": [nameless]}]}],
        "tools": tools,
        "content_parts": [nameless],
    }
    sent = json.dumps(body).encode()
    assert Asked.parse("/v1/chat/completions", sent).body == expected
    assert Asked.parse("/v1/chat/completions", sent, media_names=True).body == body
    named = b'{"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}}}'
    with pytest.raises(WrongRequestError, match="--media-names"):
        Asked.parse("/inference/v1/generate", named)
    assert Asked.parse("/inference/v1/generate", named, media_names=True).body == json.loads(named)


def test_bodies_that_are_no_objects_are_refused():
    for body in (b"", b"[]", b"{", b"[" * 100_000, b'{"kv_transfer_params": [1]}', b'{"kv_transfer_params": "a"}'):
        with pytest.raises(WrongRequestError):
            Asked.parse(COMPLETIONS, body)
