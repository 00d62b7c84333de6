"""Conversations over two vLLM servers behind the example router: what they say is what one says without Larder."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from driver import BLOCK_TOKENS, ROOT, Cluster, Engine
from scenarios import free_port

ROUTER = ROOT / "client/python/examples/router.py"
CONVERSATIONS, TURNS, SAID_TOKENS, ANSWER_TOKENS = 8, 6, 90, 16
CLIENTS = 2


class Server:
    """A vLLM server that takes and gives tokens, on one node of a cluster."""

    def __init__(self, scratch: Path, name: str, socket_path: str):
        self.log, self.port = scratch / f"{name}.log", free_port()
        transfer = {
            "kv_connector": "LarderConnector",
            "kv_connector_module_path": "larder_kv.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"chunk_tokens": BLOCK_TOKENS, "socket": socket_path},
        }
        options = {
            "dtype": "bfloat16",
            "max-model-len": 4_000,
            "block-size": BLOCK_TOKENS,
            "max-num-batched-tokens": 4_096,
            # One at a time: a step with several requests rounds otherwise, and the most likely token may be another.
            "max-num-seqs": 1,
            "seed": 0,
            "prefix-caching-hash-algo": "sha256_cbor",
            "port": self.port,
            "host": "127.0.0.1",
            "kv-transfer-config": json.dumps(transfer),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={scratch / 'model'}"]
        command += ["--tokens-only", "--skip-tokenizer-init", "--enforce-eager"]
        command += [f"--{key}={value}" for key, value in options.items()]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.process = subprocess.Popen(command, stdout=open(self.log, "w"), stderr=subprocess.STDOUT, env=environment)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        deadline = time.monotonic() + 300
        while True:
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (OSError, urllib.error.URLError):
                tail = "".join(self.log.read_text().splitlines(keepends=True)[-30:])
                assert self.process.poll() is None and time.monotonic() < deadline, tail
                time.sleep(0.2)

    def loaded(self) -> int:
        """Tokens that came from Larder."""
        text = urllib.request.urlopen(f"{self.url}/metrics").read().decode()
        found = re.findall(r"^vllm:prompt_tokens_by_source_total\{.*external_kv_transfer.*\} (\S+)$", text, re.M)
        return int(sum(map(float, found)))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


class Router:
    """The example, in front of the engines of a cluster."""

    def __init__(self, cluster: Cluster, servers: list[Server]):
        command = [sys.executable, ROUTER, "--coordinator", cluster.coordinator, "--node", cluster.http[0]]
        command += [f"--engine=node-{number}={server.url}" for number, server in enumerate(servers)]
        self.process = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().split()[-1]
        self.routed = {f"node-{number}": 0 for number in range(len(servers))}

    def ask(self, history: list[int]) -> list[int]:
        """What a model says after this, from the engine that the router chooses."""
        sampling = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "detokenize": False}
        body = json.dumps({"token_ids": history, "sampling_params": sampling}).encode()
        request = urllib.request.Request(
            f"{self.url}/inference/v1/generate", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            self.routed[answer.headers["x-larder-node"]] += 1
            return json.load(answer)["choices"][0]["token_ids"]


def said(conversation: int, turn: int) -> list[int]:
    """What the user says in a turn. No two conversations begin with the same tokens."""
    start = 17 * conversation + 5 * turn
    return [(start + i * (3 + conversation) + i * i) % 1_000 + 3 for i in range(SAID_TOKENS)]


class Conversation:
    """What was said, and what was answered."""

    def __init__(self, number: int):
        self.number, self.history, self.answers = number, [], []

    def go_on(self, ask, turns: range) -> None:
        for turn in turns:
            self.history += said(self.number, turn)
            self.answers.append(ask(self.history))
            self.history += self.answers[-1]


def conversations(world, row) -> None:
    """Eight conversations of six turns over two engines behind the router, one of which is gone after half of them."""
    with Engine(world.scratch, "alone") as alone:
        expected = [Conversation(number) for number in range(CONVERSATIONS)]
        for one in expected:
            one.go_on(lambda history: alone.ask(history)["tokens"][0], range(TURNS))
    with ExitStack() as running:
        cluster = world.cluster("routed", 2)
        running.callback(cluster.stop)
        servers = [Server(world.scratch, f"serve-{node}", cluster.sockets[node]) for node in range(2)]
        for server in servers:
            running.callback(server.stop)
        for server in servers:
            server.wait()
        router = Router(cluster, servers)
        running.callback(router.process.kill)
        heard = [Conversation(number) for number in range(CONVERSATIONS)]
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(lambda one: one.go_on(router.ask, range(TURNS // 2)), heard))
            halves = dict(router.routed)
            before = servers[1].loaded()
            servers[0].stop()
            list(clients.map(lambda one: one.go_on(router.ask, range(TURNS // 2, TURNS)), heard))
        loaded = servers[1].loaded() - before
    for one, other in zip(heard, expected, strict=True):
        assert one.answers == other.answers, f"conversation {one.number}: {one.answers} is not {other.answers}"
    assert min(halves.values()) > 0, f"one engine got everything: {halves}"
    assert loaded > 0, "what the engine that is gone had computed was computed again"
    row(
        f"{CONVERSATIONS} conversations of {TURNS} turns behind the router",
        f"identical; {' and '.join(map(str, halves.values()))} requests, then all to one engine, "
        f"which loads {loaded} tokens of what the other computed",
    )
