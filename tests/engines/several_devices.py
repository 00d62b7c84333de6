"""Engines beside a node with two actors, whose settings name no actor: all processes of an engine use one actor, and different
engines use different actors."""

import json
import subprocess
import urllib.request
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

from answers import computed, hit_of, loaded, prompt, same
from driver import LARDER, Engine
from scenarios import free_port, until

# A node opens a GPU only when an engine has it copy, and these engines copy by themselves: any device on the bus will do.
DEVICES = Path("/sys/bus/pci/devices")
CONFIG = """
name = "several"
[http]
listen = "{http}"
[host]
arena_bytes = "256MiB"
{gpus}
[[tenants]]
name = "default"
socket = "{socket}"
"""


def run(world, row) -> None:
    found = sorted(one.name for one in DEVICES.iterdir())[:2] if DEVICES.exists() else []
    if len(found) < 2:
        row("engines beside a node with two actors", "not run: the machine has no two devices on its PCI bus")
        return
    tokens, expected = prompt(1), world.reference[1]
    socket = world.scratch / "several.sock"
    with node(world.scratch, socket, found) as http:
        with Engine(world.scratch, "several-first", {"socket": str(socket)}) as first:
            same(first.ask(tokens), expected)
            until(lambda: chunks(http)[0] >= 6, "chunks are saved by the first engine's actor")
            assert devices(http) == [{0}], devices(http)
            with Engine(world.scratch, "several-second", {"socket": str(socket)}) as second:
                answer = second.ask(tokens)
                same(answer, expected)
                assert (loaded(answer), computed(answer)) == (192, 8), f"{answer['counts']}"
                assert devices(http) == [{0}, {1}], devices(http)
        ranks = {"tensor_parallel_size": 2}
        with Engine(world.scratch, "several-ranks-alone", **ranks) as alone:
            expected = alone.ask(tokens)
        with Engine(world.scratch, "several-busy", {"socket": str(socket)}) as busy:
            busy.ask(prompt(2))
            with Engine(world.scratch, "several-ranks", {"socket": str(socket)}, **ranks) as both:
                same(both.ask(tokens), expected)
                assert devices(http) == [{0}, {1}], f"two ranks and their scheduler use the second actor: {devices(http)}"
                # The actor has had the prompt of the engine before, too: its chunks do not say when both ranks have saved.
                answer = until(lambda: hit_of(both, tokens, expected), "what both ranks saved is loaded")
                assert computed(answer) == 8, f"{answer['counts']}"
    row("engines beside a node with two actors", "each has an actor, with all of its ranks; hits from its own and the other one")


@contextmanager
def node(folder: Path, socket: Path, found: list[str]):
    """A node with an actor for each of these devices; yields its HTTP address."""
    http = f"127.0.0.1:{free_port()}"
    config = folder / "several.toml"
    gpus = "\n".join(f'[[gpus]]\npci = "{one}"' for one in found)
    config.write_text(CONFIG.format(http=http, gpus=gpus, socket=socket))
    with open(folder / "several-node.log", "w") as log:
        process = subprocess.Popen([LARDER, "node", "--config", config], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert json.loads(process.stdout.readline())["ready"]
        yield http
    finally:
        process.terminate()
        process.wait(timeout=60)


def devices(http: str) -> list[set[int]]:
    """The actors of each engine, in order; an engine is a process and all processes that it started."""
    of_engine = defaultdict(set)
    for session in ask(http, "/sessions"):
        of_engine[group_of(session["pid"])].add(session["device"])
    return sorted(of_engine.values(), key=sorted)


def group_of(pid: int) -> int:
    """The engine's own process: the topmost one that runs vllm_engine.py."""
    engine = pid
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        if "vllm_engine.py" in Path(f"/proc/{pid}/cmdline").read_text():
            engine = pid
        pid = int(stat.rpartition(")")[2].split()[1])
    return engine


def chunks(http: str) -> list[int]:
    return [actor["chunks"] for actor in ask(http, "/status")["actors"]]


def ask(http: str, path: str):
    with urllib.request.urlopen(f"http://{http}{path}", timeout=30) as answer:
        return json.load(answer)
