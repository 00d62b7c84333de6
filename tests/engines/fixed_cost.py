"""The fixed cost of a hit: the first token of one prompt computed, hit in vLLM's own cache, loaded in both ways, and missed.

The rounds are paired: each asks every engine for the same new prompt, one after the other, so that what else the machine does
meanwhile falls on all of them alike.
"""

import statistics

from answers import counted, loaded, prompt, same
from driver import Engine

PROMPT_TOKENS, ROUNDS = 3_000, 20


def run(world, row, until) -> None:
    cluster = world.cluster("fixed", 1)
    connector = {"socket": cluster.sockets[0]}
    times: dict[str, list[float]] = {}

    def note(kind: str, answer: dict) -> None:
        times.setdefault(kind, []).append(1_000 * answer["first_token_seconds"][0])

    with (
        Engine(world.scratch, "fixed-plain") as plain,
        Engine(world.scratch, "fixed-async", connector) as asynchronous,
        Engine(world.scratch, "fixed-sync", connector | {"load": "sync"}) as synchronous,
    ):
        for engine in (plain, asynchronous, synchronous):
            engine.ask(prompt(99), max_tokens=2)
        for number in range(ROUNDS + 1):
            tokens = prompt(500 + number, PROMPT_TOKENS)
            cold, own = plain.ask(tokens, max_tokens=2), plain.ask(tokens, max_tokens=2)
            before = cluster.metric(0, "larder_cached_chunks", tier="host")
            missed = asynchronous.ask(tokens, max_tokens=2)
            until(lambda: cluster.metric(0, "larder_cached_chunks", tier="host") >= before + 93, "chunks are saved")
            later = asynchronous.ask(tokens, max_tokens=2, forget=True)
            ahead = synchronous.ask(tokens, max_tokens=2)
            assert (loaded(missed), loaded(later), loaded(ahead)) == (0, 2_976, 2_976)
            assert counted(later, "failed_blocks") == counted(ahead, "failed_blocks") == 0
            same(later, own)
            same(ahead, own)
            # The first round pays for what is made once.
            if number > 0:
                kinds = {"computed": cold, "own hit": own, "miss": missed, "async hit": later, "sync hit": ahead}
                for kind, answer in kinds.items():
                    note(kind, answer)
    cluster.stop()
    for kind, found in times.items():
        first, middle, last = statistics.quantiles(found, n=4)
        row(f"first token of {PROMPT_TOKENS} tokens, {kind}", f"{middle:.1f} ms (quartiles {first:.1f} to {last:.1f})")
    for kind, base in (("async hit", "own hit"), ("sync hit", "own hit"), ("miss", "computed")):
        apart = statistics.median(one - other for one, other in zip(times[kind], times[base], strict=True))
        share = f", {100 * apart / statistics.median(times[base]):.1f} %" if kind == "miss" else ""
        row(f"  {kind} above {base}", f"{apart:.1f} ms{share} (median of {ROUNDS} pairs)")
