"""Servers that stand in for vLLM and for a coordinator in tests of the router: they do what a test tells them to."""

import contextlib
import itertools
import json
import queue
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Deed = Callable[["Handler", dict], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "StandIn"

    def do_GET(self) -> None:
        self.server.get(self)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.post(self, body)

    def say(self, status: int, body: object, **headers: str) -> None:
        """A whole answer."""
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (("content-type", "application/json"), ("content-length", str(len(data))), *headers.items()):
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def part(self, text: str) -> None:
        """Sends a part of a stream; an empty part ends the stream."""
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def hang_up(self) -> None:
        """Breaks the connection off."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)

    def log_message(self, *_: object) -> None:
        pass


class StandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Ignores errors: a router that breaks off is none."""

    def stop(self) -> None:
        """Stops the server: nobody listens there any more."""
        self.shutdown()
        self.server_close()


class Engine(StandIn):
    """A vLLM. `deeds` are its answers to the next requests, `serve` its answer to later requests."""

    models: list[object] = [
        {"id": "model", "root": "/model", "parent": None},
        {"id": "adapter", "root": "/adapters/a", "parent": "model"},
    ]

    def __init__(self, node: str = "") -> None:
        self.node, self.device, self.asked = node, 0, []
        self.deeds: queue.Queue[Deed] = queue.Queue()
        self.serve: Deed = answer
        self.api_key: str | None = None
        """The key that requests below `/v1` need, as those of vLLM do."""
        self.is_hanging = threading.Event()
        """While set, checks get no answer."""
        self.ends_checks = False
        """Whether each check needs a connection of its own."""
        self.came, self.left, self.go_on = (threading.Semaphore(0) for _ in range(3))
        super().__init__()

    def is_allowed(self, handler: Handler) -> bool:
        return self.api_key is None or handler.headers["authorization"] == f"Bearer {self.api_key}"

    def get(self, handler: Handler) -> None:
        if handler.path == "/health":
            while self.is_hanging.is_set():
                # Waits until the router gives up.
                if handler.connection.recv(1) == b"":
                    return handler.hang_up()
            return handler.say(200, {}, connection="close" if self.ends_checks else "keep-alive")
        assert handler.path == "/v1/models"
        if not self.is_allowed(handler):
            return handler.say(401, {"error": "Unauthorized"})
        return handler.say(200, {"data": self.models})

    def post(self, handler: Handler, body: dict) -> None:
        params = body.get("kv_transfer_params") or {}
        if handler.path == "/tokenize":
            return handler.say(200, {"tokens": [len(word) for word in body["prompt"].split()]})
        if not self.is_allowed(handler):
            return handler.say(401, {"error": "Unauthorized"})
        if params.get("report_node"):
            told = {"node": self.node, "device": self.device} if self.node else None
            return handler.say(200, {"kv_transfer_params": told})
        self.asked.append(body)
        self.came.release()
        try:
            deed = self.deeds.get_nowait()
        except queue.Empty:
            deed = self.serve
        return deed(handler, body)


def answer(handler: Handler, body: dict) -> None:
    """Answers a request; a prefill request gets a prefill's answer."""
    params = body.get("kv_transfer_params") or {}
    told = None
    if params.get("do_remote_decode"):
        told = {"do_remote_prefill": True, "remote_node": handler.server.node, "remote_attempt": params["remote_attempt"]}
    handler.say(200, {"choices": [{"text": "said"}], "kv_transfer_params": told})


def first_time(deed: Deed, then: Deed = answer) -> Deed:
    """Does one thing with the first request, at whichever engine it comes, and another with all later requests."""
    times = itertools.count()
    return lambda handler, body: (then if next(times) else deed)(handler, body)


def fail(status: int, **headers: str) -> Deed:
    return lambda handler, _body: handler.say(status, {"error": {"message": "busy"}}, **headers)


def babble(handler: Handler, _body: dict) -> None:
    """Answers with bytes that are no HTTP."""
    handler.wfile.write(b"these bytes are no HTTP\r\n\r\n")
    handler.hang_up()


def die(handler: Handler, _body: dict) -> None:
    """Ends the connection before any answer."""
    handler.hang_up()


def cut(handler: Handler, _body: dict) -> None:
    """Ends the connection in the middle of a stream."""
    handler.begin_stream()
    handler.part("data: one\n\n")
    handler.hang_up()


def stream(handler: Handler, _body: dict) -> None:
    """Sends two parts, the second part when the test says so."""
    handler.begin_stream()
    handler.part("data: one\n\n")
    handler.server.go_on.acquire()
    handler.part("data: two\n\n")
    handler.part("")


def stream_on(handler: Handler, _body: dict) -> None:
    """Sends parts until the router hangs up, and signals that."""
    handler.begin_stream()
    with contextlib.suppress(OSError):
        while True:
            handler.part("data: " + "x" * 65_536 + "\n\n")
    handler.server.left.release()
    handler.hang_up()


def tick(handler: Handler, _body: dict) -> None:
    """Sends a part each tenth of a second until the test ends the stream."""
    handler.begin_stream()
    while not handler.server.go_on.acquire(timeout=0.1):
        handler.part("data: one\n\n")
    handler.part("")


def stream_and_hang(handler: Handler, body: dict) -> None:
    """Sends one part of a stream and then nothing."""
    handler.begin_stream()
    handler.part("data: one\n\n")
    wait_for_hang_up(handler, body)


def wait(handler: Handler, body: dict) -> None:
    """Answers when the test says so."""
    handler.server.go_on.acquire()
    answer(handler, body)


def wait_for_hang_up(handler: Handler, _body: dict) -> None:
    """Never answers; signals when the router has hung up."""
    handler.connection.recv(1)
    handler.server.left.release()
    handler.hang_up()


class Coordinator(StandIn):
    """A coordinator and a node. `held` says how many tokens of each prompt each node has."""

    def __init__(self, held: dict[str, int]) -> None:
        self.held, self.questions = held, []
        self.is_broken = False
        self.most_tokens = 100_000
        """Longer prompts are refused."""
        self.refused: str | None = None
        """The fingerprint of a namespace in which every prompt is refused."""
        super().__init__()
        self.nodes = [self.address]

    def get(self, handler: Handler) -> None:
        if handler.path == "/status":
            return handler.say(200, {"nodes": [{"name": f"node-{i}", "http": one} for i, one in enumerate(self.nodes)]})
        hashing = {"name": "sha256_cbor", "seed": "0", "block_tokens": 16}
        namespace = {"tenant": "default", "fingerprint": "ab" * 32, "chunk_tokens": 16, "hash": hashing}
        return handler.say(200, [namespace, namespace | {"tenant": "other"}, namespace | {"hash": None}])

    def post(self, handler: Handler, body: dict) -> None:
        self.questions.append(body)
        if self.is_broken:
            return handler.hang_up()
        if len(body["tokens"]) > self.most_tokens:
            return handler.say(400, {})
        # A real coordinator refuses facts that a hash does not have, too.
        if body["fingerprint"] == self.refused or (body["hash"]["name"] == "larder" and len(body["hash"]) > 1):
            return handler.say(400, {})
        tokens, cached = len(body["tokens"]), max(self.held.values())
        nodes = [
            {"name": name, "held_tokens": held, "cost_tokens": tokens - cached + (cached - held) // 10}
            for name, held in self.held.items()
        ]
        return handler.say(200, {"cluster": {"tokens": cached}, "nodes": nodes, "silent_homes": []})
