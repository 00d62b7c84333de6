"""Scenarios with LMCache: a fresh engine retrieves exactly the bytes that another engine stored through Larder, or has a miss.

lmcache_suite.py [NAME...]     all scenarios, or the named ones
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from driver import HERE, Cluster
from process import Process
from scenarios import Scenarios, free_port, row, until

scenario = Scenarios()
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", HF_HUB_OFFLINE="1")


class LMCache(Process):
    """A process with LMCache's engines and adapters."""

    def __init__(self, scratch: Path, name: str):
        super().__init__(scratch, name, [sys.executable, HERE / "lmcache_engine.py"], dict(os.environ))

    def engine(self, name: str, socket: str, **options) -> dict:
        return self.send({"do": "engine", "name": name, "plugin": settings(socket), **options})

    def server(self, name: str, socket: str) -> dict:
        return self.send({"do": "server", "name": name, "params": settings(socket)})

    def ask(self, do: str, name: str, **asked) -> dict:
        return self.send({"do": do, "name": name, **asked})


def settings(socket: str) -> dict:
    return {"socket": socket, "reconnect_seconds": 2.0, "timeout_seconds": 5.0}


def prompt(seed: int, tokens: int = 200) -> list[int]:
    """Tokens whose first chunk no other seed has; the last eight make no chunk."""
    return [seed + 3] + [(i * i * 7 + i * (13 + seed)) % 1_000 + 3 for i in range(1, tokens)]


@scenario
def remote_connector(scratch: Path) -> None:
    """An engine stores, and a fresh engine on another node retrieves; altered bytes and a node that is gone are misses."""
    cluster = Cluster(scratch / "remote", 2)
    tokens, altered = prompt(1), prompt(2)
    with LMCache(scratch, "first") as first, LMCache(scratch, "second") as second:
        first.engine("engine", cluster.sockets[0])
        second.engine("engine", cluster.sockets[1])
        stored = first.ask("store", "engine", tokens=tokens)
        first.ask("store", "engine", tokens=altered)
        until(lambda: first.ask("lookup", "engine", tokens=altered)["found"] == 192, "chunks are stored")
        first.ask("store", "engine", tokens=tokens)
        until(lambda: first.ask("lookup", "engine", tokens=tokens)["counts"]["present_keys"] == 6, "stored again")
        until(lambda: second.ask("lookup", "engine", tokens=tokens)["found"] == 192, "the other node hears of them")
        come = second.ask("retrieve", "engine", tokens=tokens)
        assert come["retrieved"] == 192 and come["digest"] == stored["digest"], f"{come}"
        row("200-token prompt, retrieved on another node", "192 tokens, bytes identical")
        second.engine("fresh", cluster.sockets[1])
        again = second.ask("retrieve", "fresh", tokens=tokens)
        assert again["retrieved"] == 192 and again["digest"] == stored["digest"], f"{again}"
        assert second.ask("retrieve", "fresh", tokens=prompt(9))["retrieved"] == 0
        row("a fresh engine, and a prompt that nobody stored", "192 tokens, identical; 0 tokens")
        cluster.flip_a_bit_in_every_page(0)
        come = second.ask("retrieve", "fresh", tokens=altered)
        noticed = cluster.metric(1, "larder_peer_fetches_total", outcome="checksum")
        assert come["retrieved"] == 0 and noticed > 0, f"{come}, {noticed}"
        row("stored bytes altered behind its back", "0 tokens retrieved")
        os.kill(cluster.pid(1), signal.SIGKILL)
        come = second.ask("retrieve", "fresh", tokens=tokens)
        assert come["retrieved"] == 0 and come["counts"]["failures"] + come["counts"]["without_node"] > 0, f"{come}"
        row("node killed", "0 tokens retrieved, counted, the engine goes on")
        for options in ({"pre_caching_hash_algorithm": "builtin"}, {"use_layerwise": True}):
            (option,) = options
            refused = first.engine(option, cluster.sockets[0], **options)
            assert "without Larder" in refused.get("refused", ""), f"{refused}"
            assert f"remote backend for plugin larder: {option}" in first.log.read_text()
        row("hashes that are not cryptographic, layer-wise chunks", "refused, and LMCache's log says why")
    cluster.stop()


@scenario
def second_level(scratch: Path) -> None:
    """The server's adapter: objects of two groups, a bitmap of the objects that are there, and salts."""
    cluster = Cluster(scratch / "level", 2)
    names = [str(number) for number in range(6)]
    with LMCache(scratch, "servers") as process:
        process.server("first", cluster.sockets[0])
        process.server("second", cluster.sockets[1])
        stored = process.ask("store", "first", names=names[:4])
        assert stored["stored"] and process.ask("store", "first", names=names[:4])["counts"]["saved_keys"] == 4
        wanted = ["5", *names[:4], "4"]
        there = [False, True, True, True, True, False]
        until(lambda: process.ask("lookup", "second", names=wanted)["found"] == there, "the other node hears of them")
        loaded = process.ask("load", "second", names=wanted)
        assert loaded["loaded"] == there and loaded["digest"][1:5] == stored["digest"], f"{loaded}"
        row("objects of two groups, loaded on another node", "4 of 6 are there, and have the bytes that were stored")
        salted = process.ask("lookup", "second", names=names[:4], salt="alice")
        assert not any(salted["found"]), f"{salted}"
        row("the same objects under a salt", "none is found")
        os.kill(cluster.pid(1), signal.SIGKILL)
        gone = process.ask("load", "second", names=wanted)
        assert not any(gone["loaded"]), f"{gone}"
        assert not process.ask("store", "second", names=["7"])["stored"]
        row("node killed", "nothing is loaded, stores are told to have failed")
    cluster.stop()


@scenario
def servers(scratch: Path) -> None:
    """LMCache's own server and client, as processes: one server stores, and another server on another node retrieves."""
    cluster = Cluster(scratch / "servers", 2)
    with Server(scratch, "server-0", cluster.sockets[0]) as first:
        # The client compares what it stored with what came back: the server itself keeps nothing. The client does not wait until
        # the server has stored the objects.
        for start in range(0, 30, 3):
            said = first.bench(start)
            same, other = (int(re.search(rf"Checksum {word}: *(\d+)", said)[1]) for word in ("OK", "FAIL"))
            assert other == 0, said
            if same:
                break
        assert same, said
        row("stored and retrieved by LMCache's own client", f"1,024 tokens of {same} of 3 prompts, checksums equal")
    until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= 12, "objects are stored")
    with Server(scratch, "server-1", cluster.sockets[1]) as second:
        said = second.bench(0)
        found = re.findall(r"seq \d/cold. LOOKUP: 4/4 chunks hit", said)
        came = re.findall(r"seq \d/cold. RETRIEVE: retrieved .1024 tokens", said)
        received = cluster.metric(1, "larder_peer_received_bytes_total")
        assert len(found) == len(came) == 3 and received >= 12 << 20, said
        row("a fresh server on another node", f"3 of 3 prompts retrieved, {received:.0f} bytes over QUIC")
    cluster.stop()


class Server:
    """LMCache's server, with Larder as its second level and nothing in its first."""

    def __init__(self, scratch: Path, name: str, socket: str):
        self.rpc, self.http = free_port(), free_port()
        self.log = scratch / f"{name}.log"
        plugin = {"type": "plugin", "module_path": "larder_kv.lmcache", "class_name": "LarderL2Adapter"}
        adapter = json.dumps(plugin | {"adapter_params": settings(socket)})
        options = (
            f"--host 127.0.0.1 --port {self.rpc} --http-host 127.0.0.1 --http-port {self.http} --l1-size-gb 1".split()
        )
        options += "--eviction-policy LRU --l2-store-policy skip_l1 --disable-observability --l2-adapter".split()
        self.process = subprocess.Popen(
            [*COMMAND, "server", *options, adapter], stdout=open(self.log, "w"), stderr=subprocess.STDOUT
        )

    def __enter__(self):
        try:
            until(self._answers, "LMCache's server starts", patience=120)
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *error):
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def bench(self, start: int) -> str:
        """Has LMCache's client look up, store and retrieve three prompts; returns its output."""
        options = f"--rpc-url tcp://127.0.0.1:{self.rpc} --url http://127.0.0.1:{self.http} --mode cpu".split()
        options += "--transfer-mode lmcache_driven --num-tokens 1024 --interval 0".split()
        options += ["--start", str(start), "--end", str(start + 3)]
        options += ["--kvcache-shape-spec", "(2,256,16,8,128):float16:1"]
        done = subprocess.run([*COMMAND, "bench", "server", *options], capture_output=True, text=True, timeout=300)
        return done.stdout + done.stderr

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3_000:]
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=5).read())
        except OSError:
            return False


COMMAND = (sys.executable, "-m", "lmcache.cli.main")


if __name__ == "__main__":
    scenario.run(sys.argv[1:], Path)
