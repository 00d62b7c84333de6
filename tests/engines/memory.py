"""A soak of the engines' and the node's memory: an engine with Larder and an engine without it get the same requests for a while.

LARDER_SOAK_SECONDS is the duration, 60 by default; memory is judged from 900 on. The node has room for half of the prompts. The
engines compute in float32: in bfloat16, when two tokens are one step of rounding apart, vLLM without Larder gives sometimes one,
sometimes the other.
"""

import os
import random
import signal
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from answers import prompt
from router_suite import Server

SECONDS = int(os.environ.get("LARDER_SOAK_SECONDS", "60"))
PROMPTS, ANSWER, LOAD_EVERY, EXACT = 100, 4, 3, {"dtype": "float32"}
JUDGED_SECONDS, MOST_GROWTH_BYTES = 900, 24 << 20


def run(world, row) -> None:
    with ExitStack() as running:
        seed = random.randrange(1 << 32)
        print(f"  seed {seed}", flush=True)
        chance = random.Random(seed)
        cluster = world.cluster("soak", 1, arena="128MiB")
        running.callback(cluster.stop)
        with_larder = Server(world.scratch, "soak-with", cluster.sockets[0], **EXACT)
        without = Server(world.scratch, "soak-without", None, **EXACT)
        for server in (with_larder, without):
            running.callback(server.signal, signal.SIGKILL)
        for server in (with_larder, without):
            server.wait()
        processes = {
            "engine with Larder": with_larder.processes,
            "engine without": without.processes,
            "node": lambda: [cluster.pid(0)],
        }
        samples: dict[str, list[tuple[float, int]]] = {name: [] for name in processes}
        start, asked = time.monotonic(), 0
        while time.monotonic() - start < SECONDS:
            tokens = prompt(2_000 + chance.randrange(PROMPTS), 700)
            for server in (with_larder, without):
                # The server's answers come from Larder at times, at times from the engine's own cache, and at times they are
                # computed.
                if asked % LOAD_EVERY == 0:
                    server.forget()
                server.ask(tokens, ANSWER)
            said = [server.ask(tokens, ANSWER) for server in (with_larder, without)]
            assert said[0] == said[1], f"prompt {asked}: {said[0]} is not {said[1]}"
            asked += 1
            if asked % 10 == 0:
                for name, of in processes.items():
                    samples[name].append((time.monotonic() - start, sum(map(private_bytes, of()))))
        loaded = with_larder.loaded()
        evicted = cluster.metric(0, "larder_evicted_chunks_total")
        assert loaded > 0, "nothing came from Larder"
    growth = {}
    for name, found in samples.items():
        # The first third includes one-time allocations.
        late = [size for at, size in found if at > SECONDS / 3]
        half = len(late) // 2
        growth[name] = statistics.median(late[half:]) - statistics.median(late[:half]) if half else 0.0
        row(f"memory of the {name}", f"{statistics.median(late) / 1e6:.1f} MB, {growth[name] / 1e6:+.2f} MB from the second third to the last")
    row("soak", f"{SECONDS} s, {3 * asked} requests to each engine, identical, {loaded} tokens loaded, {evicted:.0f} chunks evicted")
    if SECONDS >= JUDGED_SECONDS:
        more = growth["engine with Larder"] - growth["engine without"]
        assert more < MOST_GROWTH_BYTES and growth["node"] < MOST_GROWTH_BYTES, f"memory grows: {growth}"


def private_bytes(process: int) -> int:
    """Memory that only this process uses."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("Private_Clean", "Private_Dirty"))) << 10
