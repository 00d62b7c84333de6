"""Two vLLM servers for prefill and two for decode behind the router: a prefill hangs, then is killed, in the middle of requests."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from answers import prompt
from router_suite import Router, Server
from scenarios import until

CLIENTS = 4


def run(world, row) -> None:
    with ExitStack() as running:
        cluster = world.cluster("apart", 4)
        running.callback(cluster.stop)
        roles = ("kv_producer", "kv_producer", "kv_consumer", "kv_consumer")
        servers = []
        for node, role in enumerate(roles):
            servers.append(Server(world.scratch, f"apart-{node}", cluster.sockets[node], role))
            running.callback(servers[-1].signal, signal.SIGKILL)
        for server in servers:
            server.wait()
        prefills, decodes = servers[:2], servers[2:]
        seeds = iter(world.seeds)
        for how, trouble in (("in-turn", signal.SIGSTOP), ("at-once", signal.SIGKILL)):
            options = (f"--hand-over={how}", "--least-prefill-tokens=32")
            router = Router(cluster, {"prefill": prefills, "decode": decodes}, *options)
            running.callback(router.process.kill)
            before = sum(server.loaded() for server in decodes)
            ask_all(world, router, [next(seeds) for _ in range(12)], prefills, trouble)
            loaded = sum(server.loaded() for server in decodes) - before
            handed = {one: router.metric("handed_over_total", how=one) for one in ("prefilled", "alone", "short")}
            tried = [router.metric("tries_total", engine=server.url, outcome="ok") for server in prefills]
            lost = router.metric("tries_total", engine=prefills[0].url, outcome="unreachable")
            assert len(router.routed) == 2, f"one decode got everything: {router.routed}"
            assert min(tried) > 0 and handed["prefilled"] > 6 and loaded > 6 * 192, f"{tried} {handed} {loaded}"
            router.stop()
            if trouble == signal.SIGSTOP:
                prefills[0].signal(signal.SIGCONT)
                prefills[0].wait()
            row(
                f"2 prefill, 2 decode, router, {how}; a prefill gets {trouble.name} half way",
                f"12 requests answered, identical; {handed['prefilled']} handed over, {loaded} tokens loaded, "
                f"{lost} tries at the prefill failed",
            )
        for node in range(4):
            until(lambda node=node: held(cluster, node) == 0, f"node {node} holds nothing for anybody any more", patience=60)


def ask_all(world, router: Router, seeds: list[int], prefills: list[Server], trouble: signal.Signals) -> None:
    """Asks from several clients. The first prefill gets the signal when a third of the requests are answered, and others are
    under way."""
    answered: list[int] = []

    def ask(seed: int) -> None:
        tokens = router.ask(prompt(seed))
        assert tokens == world.reference[seed]["tokens"][0], f"prompt {seed}: other tokens than without Larder"
        answered.append(seed)

    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(ask, seed) for seed in seeds]
        until(lambda: len(answered) >= len(seeds) // 3 or any(one.done() and one.exception() for one in asked), "answers", 300)
        prefills[0].signal(trouble)
        for one in asked:
            one.result()


def held(cluster, node: int) -> float:
    """Leases and reservations at a node, and bytes that a vanished process may touch."""
    held = sum(cluster.metric(node, "larder_held", what=what) for what in ("leases", "reservations", "follows", "grants"))
    return held + cluster.metric(node, "larder_arena_bytes", state="quarantined")
