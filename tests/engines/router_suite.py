"""Conversations over two vLLM servers behind the router: their answers equal those of an engine without Larder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from driver import BLOCK_TOKENS, Cluster, Engine
from scenarios import free_port, until

CONVERSATIONS, TURNS, SAID_TOKENS, ANSWER_TOKENS = 8, 6, 90, 16
CLIENTS = 2


class Server:
    """A vLLM server with tokens as input and output, on one node of a cluster."""

    def __init__(self, scratch: Path, name: str, socket_path: str | None, role: str = "kv_both", **chosen):
        self.log, self.port = scratch / f"{name}.log", free_port()
        transfer = {
            "kv_connector": "LarderConnector",
            "kv_connector_module_path": "larder_kv.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"chunk_tokens": BLOCK_TOKENS, "socket": socket_path},
        }
        options = {
            "dtype": "bfloat16",
            "max-model-len": 4_000,
            "block-size": BLOCK_TOKENS,
            "max-num-batched-tokens": 4_096,
            # One request at a time: a step with several requests rounds otherwise, and the most likely token may be another.
            "max-num-seqs": 1,
            "seed": 0,
            "prefix-caching-hash-algo": "sha256_cbor",
            "port": self.port,
            "host": "127.0.0.1",
            **({"kv-transfer-config": json.dumps(transfer)} if socket_path is not None else {}),
        } | chosen
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={scratch / 'model'}"]
        command += ["--tokens-only", "--skip-tokenizer-init", "--enforce-eager"]
        command += [f"--{key}={value}" for key, value in options.items()]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Allows requests to forget the server's own cache.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        # A process group of its own: vLLM's other processes do not notice when the first one is killed.
        self.process = subprocess.Popen(
            command, stdout=open(self.log, "w"), stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

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
        return self.metric("prompt_tokens_by_source_total", "external_kv_transfer")

    def metric(self, name: str, label: str = "") -> int:
        """The sum of vLLM's samples of this name, with this text among their labels."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        found = re.findall(rf"^vllm:{name}\{{.*{label}.*\}} (\S+)$", text, re.M)
        return int(sum(map(float, found)))

    def ask(self, tokens: list[int], answer_tokens: int, hang_up: bool = False) -> list[int] | None:
        """The answer to these tokens; None if the client hangs up when the first words have come."""
        sampling = {"temperature": 0, "max_tokens": answer_tokens, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": tokens, "sampling_params": sampling, "stream": hang_up}
        request = urllib.request.Request(
            f"{self.url}/inference/v1/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            if hang_up:
                answer.readline()
                return None
            return json.load(answer)["choices"][0]["token_ids"]

    def forget(self) -> None:
        """Empties the server's own cache, as soon as nobody uses it."""

        def is_empty() -> bool:
            request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
            with urllib.request.urlopen(request, timeout=30):
                return self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0

        until(is_empty, "no request is left", 120)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)

    def processes(self) -> list[int]:
        """All processes of the server."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getpgid(int(entry.name)) == self.process.pid:
                    found.append(int(entry.name))
        return found

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all remaining processes of the server."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Router:
    """The router in front of the engines of a cluster. Engines report which node they use."""

    def __init__(self, cluster: Cluster, servers: dict[str, list[Server]], *options: str):
        command = [sys.executable, "-m", "larder_kv.router", "--coordinator", cluster.coordinator, *options]
        command += [f"--{role}={server.url}" for role, some in servers.items() for server in some]
        command += ["--listen=127.0.0.1:0", "--status-listen=127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url, self.status = re.findall(r"http://[^\s,]+", self.process.stdout.readline())
        self.routed: Counter[str] = Counter()
        until(lambda: not re.search(r'engine_up\{.*node="".*\} 1', self.metrics()), "engines say which node they use", 60)

    def ask(self, history: list[int]) -> list[int]:
        """A model's answer after this history, from the engine that the router chooses."""
        sampling = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "detokenize": False}
        body = json.dumps({"token_ids": history, "sampling_params": sampling}).encode()
        request = urllib.request.Request(
            f"{self.url}/inference/v1/generate", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            self.routed[answer.headers["x-larder-engine"]] += 1
            return json.load(answer)["choices"][0]["token_ids"]

    def metrics(self) -> str:
        return urllib.request.urlopen(f"{self.status}/metrics").read().decode()

    def metric(self, name: str, **labels: str) -> int:
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        samples = re.findall(rf"^larder_router_{name}(\{{.*\}})? (\S+)$", self.metrics(), re.M)
        return int(sum(float(value) for found, value in samples if all(one in found for one in wanted)))

    def stop(self) -> None:
        """Ends the router as Kubernetes does."""
        self.process.terminate()
        assert self.process.wait(timeout=90) == 0


def said(conversation: int, turn: int) -> list[int]:
    """The user's words in a turn. No two conversations begin with the same tokens."""
    start = 17 * conversation + 5 * turn
    return [(start + i * (3 + conversation) + i * i) % 1_000 + 3 for i in range(SAID_TOKENS)]


class Conversation:
    """The words of a conversation, and their answers."""

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
        router = Router(cluster, {"engine": servers})
        running.callback(router.process.kill)
        heard = [Conversation(number) for number in range(CONVERSATIONS)]
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(lambda one: one.go_on(router.ask, range(TURNS // 2)), heard))
            halves = dict(router.routed)
            cached = router.metric("cached_tokens_total")
            before = servers[1].loaded()
            servers[0].stop()
            list(clients.map(lambda one: one.go_on(router.ask, range(TURNS // 2, TURNS)), heard))
        loaded = servers[1].loaded() - before
    for one, other in zip(heard, expected, strict=True):
        assert one.answers == other.answers, f"conversation {one.number}: {one.answers} is not {other.answers}"
    assert len(halves) == 2, f"one engine got everything: {halves}"
    assert cached > 0, "nothing was routed by cache"
    assert loaded > 0, "what the engine that is gone had computed was computed again"
    row(
        f"{CONVERSATIONS} conversations of {TURNS} turns behind the router",
        f"identical; {' and '.join(map(str, halves.values()))} requests, then all to one engine, "
        f"which loads {loaded} tokens of what the other computed",
    )
