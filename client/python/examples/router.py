"""Sends each request to the vLLM where it costs least: that engine's backlog, the tokens to compute, and those to move there:

python router.py --coordinator 10.0.0.10:7600 --node 10.0.0.1:9440 \
    --engine node-0=http://10.0.0.1:8000 --engine node-1=http://10.0.0.2:8000

An example of one page: no TLS, no health checks, no LoRA. Where nobody can say what is cached, the load alone decides.
"""

import argparse
import http.client
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

UNKNOWN_TOKENS = 1_000
"""The cost of a request where nobody says what is cached."""
REFRESH_SECONDS, DEADLINE_SECONDS = 10.0, 0.5


def get_json(url: str, body: object = None, patience: float = DEADLINE_SECONDS) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=patience) as answer:
        return json.load(answer)


class Router:
    def __init__(self, coordinator: str, node: str, tenant: str, engines: dict[str, str]) -> None:
        self.coordinator, self.node, self.tenant, self.engines = coordinator, node, tenant, engines
        self.lock, self.turn = threading.Lock(), itertools.count()
        self.backlog: Counter[str] = Counter()
        self.namespaces: list[dict[str, Any]] = []
        self.refreshed = float("-inf")

    def ranked(self, body: dict[str, Any]) -> list[tuple[str, int]]:
        """The nodes whose engines could serve a request, best first, each with the tokens that the request costs there."""
        backlogs = {node: self.backlog[node] for node in self.engines}
        costs, turn = self.costs(body, backlogs), next(self.turn)
        nodes = list(self.engines)
        nodes = nodes[turn % len(nodes) :] + nodes[: turn % len(nodes)]
        cost = {node: costs.get(node, backlogs[node] + UNKNOWN_TOKENS) for node in nodes}
        return [(node, cost[node] - backlogs[node]) for node in sorted(nodes, key=lambda node: cost[node])]

    def costs(self, body: dict[str, Any], backlogs: dict[str, int]) -> dict[str, int]:
        """Its cost at each node: the least of any namespace that engines of this tenant have."""
        least: dict[str, int] = {}
        try:
            tokens = self.tokens(body)
            for namespace in self.known():
                question = {"fingerprint": namespace["fingerprint"], "chunk_tokens": namespace["chunk_tokens"]}
                hashing = namespace["hash"] | {"cache_salt": body.get("cache_salt")}
                question |= {"tokens": tokens, "hash": hashing, "backlog_tokens": backlogs}
                for node in get_json(f"http://{self.coordinator}/v1/prefix", question)["nodes"]:
                    name, cost = node["name"], node["cost_tokens"]
                    least[name] = min(least.get(name, cost), cost)
        except (OSError, ValueError, KeyError) as error:
            print(f"routed by load alone: {error}", flush=True)
        return least

    def known(self) -> list[dict[str, Any]]:
        if time.monotonic() - self.refreshed > REFRESH_SECONDS or not self.namespaces:
            told = get_json(f"http://{self.node}/namespaces")
            of_vllm = [one for one in told if one["tenant"] == self.tenant and one["hash"]]
            self.namespaces, self.refreshed = of_vllm, time.monotonic()
        return self.namespaces

    def tokens(self, body: dict[str, Any]) -> list[int]:
        """The prompt's tokens: the request's own, or what an engine makes of its text."""
        given = body.get("token_ids") or body.get("prompt")
        if isinstance(given, list) and all(isinstance(token, int) for token in given):
            return given
        part = {key: body[key] for key in ("model", "prompt", "messages", "tools") if key in body}
        tokens: list[int] = get_json(next(iter(self.engines.values())) + "/tokenize", part)["tokens"]
        return tokens


class Handler(BaseHTTPRequestHandler):
    router: Router

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for node, tokens in self.router.ranked(json.loads(body)):
            with self.router.lock:
                self.router.backlog[node] += tokens
            try:
                return self.forward(node, body)
            except ConnectionRefusedError:
                print(f"the engine of {node} is not there", flush=True)
            finally:
                with self.router.lock:
                    self.router.backlog[node] -= tokens
        self.send_error(503, "no engine is there")

    def forward(self, node: str, body: bytes) -> None:
        """Sends a request on, and its answer back as it comes."""
        address = self.router.engines[node].removeprefix("http://")
        engine = http.client.HTTPConnection(address)
        kept = ("content-type", "authorization", "traceparent", "x-request-id")
        engine.request("POST", self.path, body, {name: self.headers[name] for name in kept if name in self.headers})
        answer = engine.getresponse()
        self.send_response(answer.status)
        self.send_header("content-type", answer.headers.get("content-type", "application/json"))
        self.send_header("x-larder-node", node)
        self.end_headers()
        while part := answer.read1(65_536):
            self.wfile.write(part)
        engine.close()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--coordinator", required=True, help="host:port of the coordinator's HTTP")
    options.add_argument("--node", required=True, help="host:port of any node's HTTP, which knows the namespaces")
    options.add_argument("--engine", required=True, action="append", help="NODE=URL of a vLLM and the node that it uses")
    options.add_argument("--tenant", default="default")
    options.add_argument("--listen", default="127.0.0.1:8080")
    given = options.parse_args()
    engines = dict(one.split("=", 1) for one in given.engine)
    Handler.router = Router(given.coordinator, given.node, given.tenant, engines)
    host, port = given.listen.rsplit(":", 1)
    server = ThreadingHTTPServer((host, int(port)), Handler)
    print(f"routing at http://{host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
