"""64 requests at once over two engines, with clients that hang up; then a node, and then an engine, is killed in the middle.

The engines compute in float32: then requests that are computed together give the same tokens as a request that is computed alone.
"""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPException

from answers import prompt
from driver import Engine
from prefill_decode_router import held
from router_suite import Server
from scenarios import until

REQUESTS, ANSWER, EXACT = 64, 24, {"dtype": "float32", "max-num-seqs": 16}
PROMPTS = [prompt(900 + number, 300 + 50 * (number % 8)) for number in range(REQUESTS)]
LATER = [prompt(1_300 + number, 700) for number in range(REQUESTS)]


def run(world, row) -> None:
    with Engine(world.scratch, "crowd-alone", dtype="float32") as alone:
        expected = [alone.ask(one, max_tokens=ANSWER)["tokens"][0] for one in (*PROMPTS, *LATER)]
    with ExitStack() as running:
        cluster = world.cluster("crowd", 2, arena="512MiB")
        running.callback(cluster.stop)
        servers = [Server(world.scratch, f"crowd-{node}", cluster.sockets[node], **EXACT) for node in range(2)]
        for server in servers:
            running.callback(server.signal, signal.SIGKILL)
        for server in servers:
            server.wait()
        hung_up = ask_all(servers, PROMPTS, expected, hang_up_every=3)
        row(f"{REQUESTS} requests at once, some hang up", f"{hung_up} hung up, the others identical")

        killed = cluster.pid(0)
        for server in servers:
            server.forget()
        before = sum(server.loaded() for server in servers)
        ask_all(servers, PROMPTS, expected, at=REQUESTS // 4, trouble=lambda: cluster.kill(0))
        loaded = sum(server.loaded() for server in servers) - before
        until(lambda: cluster.pid(0) != killed, "the node starts again")
        row("the same, a node is killed -9 in the middle", f"all answered, identical; {loaded} tokens loaded")

        lost = ask_all(
            servers, LATER, expected[REQUESTS:], at=REQUESTS // 8, trouble=lambda: servers[0].signal(signal.SIGKILL), may_fail=servers[0]
        )
        again = Server(world.scratch, "crowd-again", cluster.sockets[0], **EXACT)
        running.callback(again.signal, signal.SIGKILL)
        again.wait()
        before = again.loaded()
        ask_all([again, servers[1]], LATER, expected[REQUESTS:])
        row(
            "the same, an engine is killed -9 in the middle of its saves",
            f"{lost} of its requests failed; asked again of others, all identical; {again.loaded() - before} tokens loaded",
        )
        for node in range(2):
            until(lambda node=node: held(cluster, node) == 0, f"node {node} holds nothing for anybody any more", patience=60)
        row("leases, reservations, follows, grants and quarantined bytes afterwards", "0 on both nodes")


def ask_all(servers, prompts, expected, *, hang_up_every=0, at=0, trouble=None, may_fail=None) -> int:
    """Asks everything at once, each second prompt of each server. `trouble` comes when `at` requests are answered. Returns the
    number of clients that hung up, or that the server in `may_fail` failed."""
    answered, done, failed = threading.Semaphore(0), [], []

    def ask(number: int) -> None:
        server = servers[number % len(servers)]
        hangs_up = hang_up_every > 0 and number % hang_up_every == 0
        try:
            tokens = server.ask(prompts[number], ANSWER, hangs_up)
        except (OSError, HTTPException):
            if server is not may_fail:
                raise
            failed.append(number)
            return
        finally:
            answered.release()
        if tokens is None:
            failed.append(number)
            return
        assert tokens == expected[number], f"prompt {number}: {tokens} is not {expected[number]}"
        done.append(number)

    with ThreadPoolExecutor(len(prompts)) as clients:
        asked = [clients.submit(ask, number) for number in range(len(prompts))]
        if trouble is not None:
            for _ in range(at):
                answered.acquire()
            trouble()
        for one in asked:
            one.result()
    assert len(done) + len(failed) == len(prompts)
    return len(failed)
